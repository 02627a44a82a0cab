"""Hosts find each other through a torch.distributed Store: one node leads, and its address and token travel through the
Store, which is used for nothing else. The Store is given (``tm.init(store=)``: the host that comes first leads), or is
torchrun's (host 0 leads)."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch_mooncake.clock import seconds_left
from torch_mooncake.config import Config
from torch_mooncake.errors import PoolUnavailable

_T = TypeVar("_T")
_KEY = "torch_mooncake/leader"
_CLAIM = "torch_mooncake/claim"


@dataclass
class Cluster:
    """How this host's node is to be started."""

    listen: list[str] = field(default_factory=list)
    leader: str = ""  # empty: it leads
    token: str = ""
    store: Any = None  # where host 0 tells the others

    def publish(self, addresses: list[str], token: str) -> None:
        """Tell the other hosts where the leader is (host 0 only)."""
        if self.store is None or self.leader:
            return
        tcp = next((a for a in addresses if a.startswith("tcp://")), None)
        if tcp is None:
            raise PoolUnavailable(f"this host's node has no TCP address for the other hosts: {addresses}")
        self.store.set(_KEY, json.dumps({"address": tcp, "token": token}))


def cluster(config: Config, deadline: int, store: Any = None) -> Cluster:
    """With ``store``: whoever comes first leads. Without, what torchrun's environment says: one host (or no torchrun at
    all), host 0 of several, or another of several. PoolUnavailable if the leader is not told of in time."""
    env = os.environ
    if store is not None:
        mine = secrets.token_hex(16)
        listen = [f"tcp://{_own_ip(*_place(store))}:0"]
        leads = _ask(lambda: store.compare_set(_CLAIM, "", mine)) == mine.encode()
        return _lead(config, listen, store) if leads else _join(config, listen, store, deadline)
    hosts = int(env.get("GROUP_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in env else 1
    if hosts <= 1:
        return Cluster()
    store = _default_store(deadline)
    listen = [f"tcp://{_own_ip(env.get('MASTER_ADDR', ''), int(env.get('MASTER_PORT', '0')))}:0"]
    if int(env.get("GROUP_RANK", "0")) == 0:
        return _lead(config, listen, store)
    return _join(config, listen, store, deadline)


def _lead(config: Config, listen: list[str], store: Any) -> Cluster:
    return Cluster(listen, token=config.token or secrets.token_hex(32), store=store)


def _join(config: Config, listen: list[str], store: Any, deadline: int) -> Cluster:
    _ask(lambda: store.wait([_KEY], timedelta(seconds=max(0.01, seconds_left(deadline)))))
    found = json.loads(_ask(lambda: store.get(_KEY)))
    return Cluster(listen, leader=found["address"], token=config.token or found["token"], store=store)


def _ask(question: Callable[[], _T]) -> _T:
    try:
        return question()
    except (RuntimeError, OSError) as error:  # DistStoreError and DistNetworkError among them
        raise PoolUnavailable(f"the pool's leader was not found in the Store: {error}") from None


def _place(store: Any) -> tuple[str, int]:
    """Host and port of a TCPStore, also below prefixes; of other Stores nothing."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") else ("", 0)


def _default_store(deadline: int) -> Any:
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise PoolUnavailable(
            "several hosts, and no Store yet: call torch.distributed.init_process_group before tm.init()"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=max(0.01, seconds_left(deadline)))
    return dist.PrefixStore("tm", dist.TCPStore(address, port, is_master=False, timeout=timeout))


def _own_ip(master: str, port: int) -> str:
    """The address of ours that reaches the master host; without one, the address of this host's name."""
    master = master or socket.gethostname()
    family, _, _, _, target = socket.getaddrinfo(master, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        ip = probe.getsockname()[0]
    return f"[{ip}]" if ":" in ip else str(ip)
