"""The default context: the process's one pool behind ``tm.put``, ``tm.get`` …"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Any

from torch_mooncake.errors import Closed, InvalidArgument
from torch_mooncake.pool import Pool

if TYPE_CHECKING:
    import torch.distributed as dist

_lock = threading.Lock()
_default: Pool | None = None
_given: dict[str, Any] = {}
_exiting = False


def init(
    address: str | None = None,
    *,
    pool: str | None = None,
    token: str | None = None,
    memory: int | str | None = None,
    linger_s: float | None = None,
    host_id: str | None = None,
    name: str | None = None,
    store: dist.Store | None = None,
    discovery: str | None = None,
    timeout: float | None = 30,
) -> Pool:
    """Attach this process to a pool, and make it the default one. Idempotent.

    Without ``address``: this host's pool, whose node is started if there is none (inside torchrun over several hosts:
    one pool over all of them). With ``"host:7400"``: the pool of that node. With ``store``: hosts that give the same
    ``torch.distributed`` Store make one pool, which the node that is started first leads. With ``discovery``
    ("etcd://host:port[,…][/prefix]"): hosts that give the same make one pool, whose nodes elect their leader; only
    the URL's prefix tells pools apart there, ``pool`` does not. What is None comes from ``TM_*`` (see
    ``torch_mooncake.config``). InvalidArgument if it was called before with something else, or with ``store`` and
    ``discovery``.
    """
    global _default, _given
    given: dict[str, Any] = {"address": address, "pool": pool, "token": token, "memory": memory, "linger_s": linger_s}
    given |= {"host_id": host_id, "name": name, "store": store, "discovery": discovery}
    given = {key: value for key, value in given.items() if value is not None}
    with _lock:
        if _exiting:
            raise Closed("the interpreter is exiting")
        if _default is None:
            _default, _given = Pool(**given, timeout=timeout), given
        elif differs := {key for key, value in given.items() if _given.get(key) != value}:
            raise InvalidArgument(
                f"tm.init() was called before with another {', '.join(sorted(differs))}: tm.close() it"
            )
        return _default


def default() -> Pool:
    """The default pool; attached as by ``init()`` if it is not."""
    return _default if _default is not None else init()


def close() -> None:
    """Detach the default pool. Tensors that were got stay valid; the next verb attaches anew."""
    global _default
    with _lock:
        pool, _default = _default, None
    if pool is not None:
        pool.close()


@atexit.register
def _at_exit() -> None:
    global _exiting
    close()
    _exiting = True


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the pool itself re-attaches on its next use


os.register_at_fork(after_in_child=_after_fork)
