"""torch_mooncake: tensors as first-class objects between processes, hosts and tiers, native to PyTorch.

    import torch_mooncake as tm
    tm.put("policy/v7/wq", w)           # this host's pool, started if there is none
    w = tm.get("policy/v7/wq")          # zero-copy on the same host

Importing this package imports neither torch nor the native core; names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torch_mooncake.blobs import Blobs as Blobs
    from torch_mooncake.config import Config as Config
    from torch_mooncake.context import close as close
    from torch_mooncake.context import init as init
    from torch_mooncake.errors import *  # noqa: F403
    from torch_mooncake.hardware import topology as topology
    from torch_mooncake.pool import Info as Info
    from torch_mooncake.pool import Pool as Pool
    from torch_mooncake.pool import PutResult as PutResult
    from torch_mooncake.pool import Version as Version
    from torch_mooncake.shared import empty as empty
    from torch_mooncake.transfer import Engine as Engine
    from torch_mooncake.transfer import File as File
    from torch_mooncake.transfer import Notification as Notification
    from torch_mooncake.transfer import Op as Op
    from torch_mooncake.transfer import Pages as Pages
    from torch_mooncake.transfer import Peer as Peer
    from torch_mooncake.transfer import Region as Region
    from torch_mooncake.transfer import RemoteRegion as RemoteRegion
    from torch_mooncake.verbs import adelete as adelete
    from torch_mooncake.verbs import aexists as aexists
    from torch_mooncake.verbs import aexport_safetensors as aexport_safetensors
    from torch_mooncake.verbs import aget as aget
    from torch_mooncake.verbs import aget_many as aget_many
    from torch_mooncake.verbs import aget_state_dict as aget_state_dict
    from torch_mooncake.verbs import aimport_safetensors as aimport_safetensors
    from torch_mooncake.verbs import ainfo as ainfo
    from torch_mooncake.verbs import akeys as akeys
    from torch_mooncake.verbs import aput as aput
    from torch_mooncake.verbs import aput_many as aput_many
    from torch_mooncake.verbs import aput_state_dict as aput_state_dict
    from torch_mooncake.verbs import astat as astat
    from torch_mooncake.verbs import await_key as await_key
    from torch_mooncake.verbs import delete as delete
    from torch_mooncake.verbs import exists as exists
    from torch_mooncake.verbs import export_safetensors as export_safetensors
    from torch_mooncake.verbs import get as get
    from torch_mooncake.verbs import get_many as get_many
    from torch_mooncake.verbs import get_state_dict as get_state_dict
    from torch_mooncake.verbs import import_safetensors as import_safetensors
    from torch_mooncake.verbs import info as info
    from torch_mooncake.verbs import keys as keys
    from torch_mooncake.verbs import put as put
    from torch_mooncake.verbs import put_many as put_many
    from torch_mooncake.verbs import put_state_dict as put_state_dict
    from torch_mooncake.verbs import stat as stat
    from torch_mooncake.verbs import wait as wait

_EXPORTS = {
    "blobs": ("Blobs",),
    "config": ("Config",),
    "context": ("init", "close"),
    "errors": (
        *("Error", "InvalidArgument", "OutOfBounds", "KeyNotFound", "KeyExists", "PoolFull", "PoolUnavailable"),
        *("PeerLost", "DeadlineExceeded", "Cancelled", "AuthError", "VersionMismatch", "Corrupt", "LayoutMismatch"),
        *("Busy", "Closed", "Forked", "Unsupported", "IoError", "InternalError"),
    ),
    "hardware": ("topology",),
    "pool": ("Info", "Pool", "PutResult", "Version"),
    "shared": ("empty",),
    "transfer": ("Engine", "File", "Notification", "Op", "Pages", "Peer", "Region", "RemoteRegion"),
    "verbs": (
        *("put", "get", "exists", "delete", "keys", "wait", "stat", "put_many", "get_many"),
        *("info", "put_state_dict", "get_state_dict", "import_safetensors", "export_safetensors"),
        *("aput", "aget", "aexists", "adelete", "akeys", "await_key", "astat", "aput_many", "aget_many"),
        *("ainfo", "aput_state_dict", "aget_state_dict", "aimport_safetensors", "aexport_safetensors"),
    ),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
_MODULES = ("checkpoint", "cli", "distributed", "kv", "metrics", "node", "ops", "tensors", "weights", *_EXPORTS)

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"torch_mooncake.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"torch_mooncake.{name}")
    raise AttributeError(f"module 'torch_mooncake' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
