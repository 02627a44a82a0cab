"""The two classes that TensorRT-LLM loads. Asking for one imports TensorRT-LLM, and checks that its interface is the
one that they were written for."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch_mooncake as tm
from torch_mooncake.integrations.tensorrt_llm.scheduler import Scheduler
from torch_mooncake.integrations.tensorrt_llm.worker import Worker

_PLACES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",  # before
)


def interface() -> Any:
    """The module of TensorRT-LLM that has the base classes. ModuleNotFoundError without TensorRT-LLM; Unsupported for
    one that has none."""
    importlib.import_module("tensorrt_llm")
    for place in _PLACES:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
    raise tm.Unsupported(f"this TensorRT-LLM has no KV-cache connector: none of {', '.join(_PLACES)}")


def check_signatures(base: type, mine: type) -> None:
    """Unsupported, naming them, if methods of ``base`` that have to be implemented are not, or take other arguments."""
    wrong = []
    for name in sorted(getattr(base, "__abstractmethods__", ())):
        theirs, ours = getattr(base, name), getattr(mine, name, None)
        if ours is None:
            wrong.append(f"{name} is missing")
            continue
        have, want = (list(inspect.signature(each).parameters)[1:] for each in (ours, theirs))
        if len(have) != len(want):
            wrong.append(f"{name}({', '.join(want)}) is {name}({', '.join(have)}) here")
    if wrong:
        raise tm.Unsupported(f"{base.__name__} of this TensorRT-LLM is another: {'; '.join(wrong)}")


def __getattr__(name: str) -> Any:
    pairs: dict[str, tuple[str, type]] = {
        "PoolConnectorScheduler": ("KvCacheConnectorScheduler", Scheduler),
        "PoolConnectorWorker": ("KvCacheConnectorWorker", Worker),
    }
    if name not in pairs:
        raise AttributeError(name)
    base_name, mine = pairs[name]
    base = getattr(interface(), base_name)
    check_signatures(base, mine)
    made = type(name, (mine, base), {"__doc__": mine.__doc__, "__module__": __name__})
    globals()[name] = made
    return made
