"""torch.distributed's backend "mooncake".

    import torch.distributed as dist
    dist.init_process_group("mooncake")

Nothing has to be imported where the package is installed: torch finds `autoload` by its entry point `torch.backends` at
`import torch`. `import torch_mooncake.distributed` does the same by hand. The compiled part (`torch_mooncake._c10d`) is
loaded when the first process group is made; it belongs to the torch (major.minor) it was built against, and another
torch gets an ImportError that says how to rebuild.

Failures are raised by `wait()` (or by the synchronous call) as `torch.distributed.DistBackendError` and name the ranks.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
from collections.abc import Mapping
from typing import Any

BACKEND = "mooncake"
LEAVE_TIMEOUT_S = 2.0

_leaving = False


def _load() -> Any:
    """The compiled part, if it was built for the torch that runs."""
    import torch

    running = ".".join(torch.__version__.split(".")[:2])
    rebuild = (
        "rebuild with: pip install --no-build-isolation --force-reinstall --no-deps torch_mooncake "
        "(in a checkout: make build)"
    )
    try:
        from torch_mooncake import _c10d
    except ImportError as error:
        raise ImportError(
            f"the backend {BACKEND!r} could not be loaded with torch {running} ({error}). If torch was changed since "
            f"torch_mooncake was built, {rebuild}"
        ) from error
    if running != _c10d.BUILT_FOR_TORCH:
        raise ImportError(
            f"the backend {BACKEND!r} was built for torch {_c10d.BUILT_FOR_TORCH}, this is torch {running}: {rebuild}"
        )
    _leave_at_exit(_c10d)
    return _c10d


def _leave_at_exit(_c10d: Any) -> None:
    """Processes that end without destroy_process_group() say good-bye all the same."""
    global _leaving
    if _leaving:
        return
    _leaving = True
    atexit.register(_c10d.leave_all, LEAVE_TIMEOUT_S)
    import multiprocessing.util

    # Children of multiprocessing skip atexit.
    multiprocessing.util.Finalize(None, _c10d.leave_all, args=(LEAVE_TIMEOUT_S,), exitpriority=10)


def listen_host() -> str:
    """The address this rank listens on: TM_LISTEN_HOST, else the one that leads to MASTER_ADDR, else loopback."""
    if host := os.environ.get("TM_LISTEN_HOST"):
        return host
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        infos = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return "127.0.0.1"  # the store came from elsewhere (a file, init_method): set TM_LISTEN_HOST across hosts
    for family, kind, proto, _, address in infos:
        with socket.socket(family, kind, proto) as probe:
            try:
                probe.connect(address)  # sends nothing: asks the routing table
            except OSError:
                continue
            host = probe.getsockname()[0]
            return "127.0.0.1" if host == "::1" else host
    return "127.0.0.1"


def MooncakeBackendOptions(
    timeout: datetime.timedelta | None = None,
    *,
    host: str = "",
    host_id: str = "",
    transports: tuple[str, ...] = ("local", "shm", "tcp"),
    algorithms: Mapping[str, str] | None = None,
) -> Any:
    """Options for `init_process_group("mooncake", pg_options=…)`.

    timeout: of every operation (default: the group's). host: address to listen on (default: `listen_host()`).
    host_id: ranks with equal ids may share memory (default: TM_HOST_ID, else the boot id). transports: what may carry
    bytes, in order of preference. algorithms: what to use instead of the built-in choice, by collective, as in
    `{"all_reduce": "ring", "broadcast": "flat/tree"}` (default: TM_ALGORITHM, "all_reduce=ring,broadcast=flat/tree");
    rank 0's hold for the group. ValueError, when the group is made, lists what is legal; `explain()` says what is
    used.
    """
    _c10d = _load()
    options = _c10d.MooncakeBackendOptions(host=host, host_id=host_id, transports=list(transports))
    options.algorithms = ",".join(f"{collective}={name}" for collective, name in (algorithms or {}).items())
    if timeout is not None:
        options._timeout = timeout
    return options


def _create(backend_options: Any, pg_options: Any) -> Any:
    """What torch calls for each new group: (_DistributedBackendOptions, pg_options or None) -> MooncakeBackend."""
    _c10d = _load()
    if pg_options is None:
        options = _c10d.MooncakeBackendOptions()
        options._timeout = backend_options.timeout
    elif isinstance(pg_options, _c10d.MooncakeBackendOptions):
        options = pg_options
    else:
        raise TypeError(f"pg_options must be MooncakeBackendOptions, not {type(pg_options).__name__}")
    options.host = options.host or listen_host()
    options.host_id = options.host_id or os.environ.get("TM_HOST_ID", "")
    options.algorithms = options.algorithms or os.environ.get("TM_ALGORITHM", "")
    return _c10d.MooncakeBackend(
        store=backend_options.store,
        rank=backend_options.group_rank,
        size=backend_options.group_size,
        global_ranks=list(backend_options.global_ranks_in_group),
        options=options,
    )


def explain(group: Any = None) -> dict[str, Any]:
    """How collectives of `group` (default: the default group) travel, and the bytes they and messages took so far.

    ranks_of_hosts: the group's ranks by host; within_host: "board" (shared slots), "messages", "alone", "not used yet";
    asked_for: what overrides the built-in choice; collectives: for each a list of size classes {up_to_bytes (None:
    any), algorithm, by_host, why}; traffic: this rank's payload in bytes, to_hosts and within_host (messages: sent,
    received), shown (written to shared slots). TypeError for a group of another backend.
    """
    import json

    import torch
    import torch.distributed as dist

    _c10d = _load()
    chosen = group if group is not None else dist.distributed_c10d._get_default_group()
    backend = chosen._get_backend(torch.device("cpu"))
    if not isinstance(backend, _c10d.MooncakeBackend):
        raise TypeError(f"explain() is for groups of the backend {BACKEND!r}, not {type(backend).__name__}")
    return json.loads(backend._explain())


def register() -> None:
    """Registers the backend's name with torch.distributed. Idempotent; another library's "mooncake" is an error."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    known = dist.Backend._plugins.get(BACKEND.upper())
    if known is not None:
        if known.creator_fn is not _create:
            raise RuntimeError(f"another library has registered the torch.distributed backend {BACKEND!r}")
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """The entry point `torch.backends`. Runs inside `import torch`, so it never raises."""
    try:
        register()
    except Exception as error:
        import warnings

        warnings.warn(
            f"torch_mooncake: the distributed backend is not registered: {error}", RuntimeWarning, stacklevel=1
        )


autoload()
