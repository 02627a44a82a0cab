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
import copy
import datetime
import os
import socket
from collections.abc import Mapping, Sequence
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
    nics: tuple[str, ...] | None = None,
    rdma: str | None = None,
    cuda: str = "mooncake",
    cuda_staged_bytes: int = 256 << 10,
    heartbeat_s: float = 0.5,
    heartbeat_timeout_s: float = 5.0,
    algorithms: Mapping[str, str] | None = None,
) -> Any:
    """Options for `init_process_group("mooncake", pg_options=…)`.

    timeout: of every operation (default: the group's). host: address to listen on (default: `listen_host()`).
    host_id: ranks with equal ids may share memory (default: TM_HOST_ID, else the boot id). transports: what may carry
    bytes, in order of preference. nics, rdma: as of `tm.Engine` (default: TM_NICS, TM_RDMA).
    heartbeat_s, heartbeat_timeout_s: how often native threads tell the other ranks that this process lives, and the
    silence after which a rank is lost; those of the process' first group count.
    cuda: who runs collectives of CUDA tensors: "mooncake", or "nccl" for those that are dense and contiguous, of types
    and operations that NCCL knows (torch must have been built with it; messages stay with mooncake).
    cuda_staged_bytes: collectives of CUDA tensors of up to so many bytes in all go through memory of the host, larger
    ones from device to device; the same on all ranks.
    algorithms: what to use instead of the built-in choice, by collective, as in
    `{"all_reduce": "ring", "broadcast": "flat/tree"}` (default: TM_ALGORITHM, "all_reduce=ring,broadcast=flat/tree");
    rank 0's hold for the group. ValueError, when the group is made, lists what is legal; `explain()` says what is
    used.
    """
    _c10d = _load()
    if cuda not in ("mooncake", "nccl"):
        raise ValueError(f"cuda must be 'mooncake' or 'nccl', not {cuda!r}")
    if not 0 <= cuda_staged_bytes <= 64 << 20:
        raise ValueError(f"cuda_staged_bytes must be at most 64 MiB, not {cuda_staged_bytes}")
    if cuda == "nccl":
        _check_nccl()
    options = _c10d.MooncakeBackendOptions(
        host=host,
        host_id=host_id,
        transports=list(transports),
        heartbeat=datetime.timedelta(seconds=heartbeat_s),
        heartbeat_timeout=datetime.timedelta(seconds=heartbeat_timeout_s),
    )
    from torch_mooncake.config import Config

    config = Config.from_env(nics=nics, rdma=rdma)
    options.nics, options.rdma = list(config.nics), config.rdma
    options.cuda = cuda
    options.cuda_staged_bytes = cuda_staged_bytes
    options.algorithms = ",".join(f"{collective}={name}" for collective, name in (algorithms or {}).items())
    if timeout is not None:
        options._timeout = timeout
        options.own_timeout = True
    return options


def _check_nccl() -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError(
            f"MooncakeBackendOptions(cuda='nccl') needs a torch with NCCL, and torch {torch.__version__} has none"
        )


def _with_nccl(_c10d: Any, backend: Any, backend_options: Any, options: Any) -> Any:
    """The same group once more, by NCCL, for dense collectives of CUDA tensors."""
    import torch.distributed as dist

    _check_nccl()
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = options._timeout
    nccl_options.global_ranks_in_group = list(backend_options.global_ranks_in_group)
    nccl_options.group_name = backend_options.group_id
    nccl = dist.ProcessGroupNCCL(
        dist.PrefixStore("tm/nccl", backend_options.store),
        backend_options.group_rank,
        backend_options.group_size,
        nccl_options,
    )
    return _c10d.DenseByNccl(mooncake=backend, nccl=nccl)


def _create(backend_options: Any, pg_options: Any) -> Any:
    """What torch calls for each new group: (_DistributedBackendOptions, pg_options or None) -> MooncakeBackend."""
    _c10d = _load()
    if pg_options is None:
        options = _c10d.MooncakeBackendOptions()
        options._timeout = backend_options.timeout
    elif isinstance(pg_options, _c10d.MooncakeBackendOptions):
        options = copy.deepcopy(pg_options)
        if not options.own_timeout:
            options._timeout = backend_options.timeout
    else:
        raise TypeError(f"pg_options must be MooncakeBackendOptions, not {type(pg_options).__name__}")
    options.host = options.host or listen_host()
    options.host_id = options.host_id or os.environ.get("TM_HOST_ID", "")
    options.algorithms = options.algorithms or os.environ.get("TM_ALGORITHM", "")
    backend = _c10d.MooncakeBackend(
        store=backend_options.store,
        rank=backend_options.group_rank,
        size=backend_options.group_size,
        global_ranks=list(backend_options.global_ranks_in_group),
        options=options,
    )
    if options.cuda == "nccl":
        return _with_nccl(_c10d, backend, backend_options, options)
    return backend


# ---- ranks that come and go


def _backend(group: Any = None, *, changes: bool = False) -> Any:
    """The group's MooncakeBackend, out of what is around it. changes: its ranks are to be changed."""
    import torch
    import torch.distributed as dist

    _c10d = _load()
    chosen = group if group is not None else dist.distributed_c10d._get_default_group()
    backend = chosen._get_backend(torch.device("cpu"))
    if hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    if isinstance(backend, _c10d.DenseByNccl):
        if changes:
            raise NotImplementedError("the ranks of a group with cuda='nccl' cannot be replaced: NCCL would not follow")
        backend = backend.mooncake
    if not isinstance(backend, _c10d.MooncakeBackend):
        raise TypeError(f"this is for groups of the backend {BACKEND!r}, not {type(backend).__name__}")
    return backend


def _milliseconds(timeout_s: float | None) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=-1 if timeout_s is None else max(0.0, timeout_s * 1000))


def active_ranks(group: Any = None) -> list[int]:
    """The group's ranks that take part in its collectives; all of them until deactivate_ranks() was called."""
    return _backend(group).active_ranks()


def deactivate_ranks(
    ranks: Sequence[int] = (), group: Any = None, *, at_least: int = 1, timeout_s: float | None = None
) -> list[int]:
    """Goes on without ranks that were lost: called by every survivor, after its collective raised.

    Left out are `ranks` and all ranks that any survivor knows as lost. The others keep their numbers, and the world
    its size: lists of tensors still have an item for every rank (an inactive one's is neither read nor written), AVG
    divides by the number of active ones. Pending messages fail. Other groups with a lost rank need a call of their own.

    at_least: how many must be left, else DistBackendError and nothing has changed; more than half of the ranks rules
    out that both sides of a cut network go on. timeout_s: for the agreement (default: the group's timeout).
    Returns the active ranks. Raises DistBackendError naming who did not agree in time, or saying that the others went
    on without this rank.
    """
    return _backend(group, changes=True).reseat(list(ranks), [], at_least, _milliseconds(timeout_s))


def activate_ranks(
    ranks: Sequence[int], group: Any = None, *, at_least: int = 1, timeout_s: float | None = None
) -> list[int]:
    """Waits for replacements of these ranks (they call join()) and lets them in: called by every active rank.

    Ranks that were lost meanwhile are left out, as by deactivate_ranks(), and at_least means the same: of the ranks
    that are there already. Returns the active ranks. Raises DistBackendError naming whose replacement did not come
    within timeout_s (default: the group's timeout).
    """
    return _backend(group, changes=True).reseat([], list(ranks), at_least, _milliseconds(timeout_s))


def waiting_ranks(group: Any = None) -> list[int]:
    """The ranks for which a replacement has asked to join, as far as this rank knows: others may know of more."""
    return _backend(group).waiting_ranks()


def contact(group: Any = None) -> str:
    """What a replacement needs to join(): a secret token, the addresses of all active ranks, the group's id.

    It stays good as long as one of those ranks lives: keep it outside of the processes (a file, a job's environment).
    """
    return _backend(group).contact()


def join(
    contact: str, rank: int, world_size: int, *, timeout_s: float = 300.0, pg_options: Any = None, **kwargs: Any
) -> None:
    """Makes the default process group of a process that replaces a lost rank of a running one.

    Instead of init_process_group(). No store is used: the other ranks are asked at the addresses in `contact`, of
    which one that lives is enough. Returns when they have let this one in (activate_ranks()). Afterwards collectives
    run as on all other ranks; new_group() needs a store that all share, so make sub-groups with split_group().

    contact: what contact() said on any rank. kwargs: for init_process_group (device_id, …). Raises DistBackendError
    when nobody lets it in within timeout_s, ValueError for a contact that is none.
    """
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    options = copy.deepcopy(pg_options) if pg_options is not None else MooncakeBackendOptions()
    if options.cuda == "nccl":
        raise NotImplementedError("a group with cuda='nccl' cannot be joined: NCCL would not follow")
    options.join = contact
    dist.init_process_group(
        BACKEND,
        store=dist.HashStore(),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        pg_options=options,
        **kwargs,
    )


def monitored_barrier(group: Any = None, timeout_s: float | None = None, wait_all_ranks: bool = False) -> None:
    """A barrier whose error names every rank that did not come, as torch.distributed.monitored_barrier.

    torch's own function refuses every backend that is not called gloo; this one is for groups of "mooncake".
    timeout_s: default the group's. wait_all_ranks: as torch has it; all absent ranks are named either way.
    """
    _backend(group).monitored_barrier(_milliseconds(timeout_s), wait_all_ranks)


def explain(group: Any = None) -> dict[str, Any]:
    """How collectives of `group` (default: the default group) travel, and the bytes they and messages took so far.

    ranks_of_hosts: the group's ranks by host; within_host: "board" (shared slots), "messages", "alone", "not used yet";
    asked_for: what overrides the built-in choice; collectives: for each a list of size classes {up_to_bytes (None:
    any), algorithm, by_host, why}; traffic: this rank's payload in bytes, to_hosts and within_host (messages: sent,
    received), shown (written to shared slots). TypeError for a group of another backend.
    """
    import json

    return json.loads(_backend(group)._explain())


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
