"""Hosts find each other through a torch.distributed Store: one node leads, and its address and token travel through the
Store, which is used for nothing else. The Store is given (``tm.init(store=)``: the host that comes first leads), or is
torchrun's (host 0 leads).

Each pool has keys of its own: a claim, which is the text of whoever leads, and under that text where its node is. A
claim is good for as long as its node is: a host that finds nobody at the address claims anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

from torch_mooncake.clock import seconds_left
from torch_mooncake.config import Config
from torch_mooncake.discovery import parse_etcd
from torch_mooncake.errors import InvalidArgument, PoolUnavailable
from torch_mooncake.node import nobody_listens

_T = TypeVar("_T")


class _Board:
    """The keys of one pool in the Store. Its methods raise PoolUnavailable."""

    def __init__(self, store: Any, pool: str, deadline: int) -> None:
        self._store, self._at, self._deadline = store, f"torch_mooncake/{pool}", deadline

    def claim(self, held: str, mine: str) -> str:
        """Take the claim from ``held`` ("": nobody). Who has it now."""
        return str(_ask(lambda: self._store.compare_set(f"{self._at}/claim", held, mine)).decode())

    def set_claim(self, mine: str) -> None:
        _ask(lambda: self._store.set(f"{self._at}/claim", mine))

    def claimed(self) -> str:
        return self._get(f"{self._at}/claim").decode()

    def tell(self, claim: str, leader: dict[str, str]) -> None:
        """Where the node is; empty: it did not start."""
        _ask(lambda: self._store.set(f"{self._at}/leader/{claim}", json.dumps(leader)))

    def leader(self, claim: str) -> dict[str, str]:
        """Where the node of ``claim`` is, as soon as it is told; empty: there is none, or no more."""
        found: dict[str, str] = json.loads(self._get(f"{self._at}/leader/{claim}")) if claim else {}
        return {} if not found or nobody_listens(found["address"]) else found

    def _get(self, key: str) -> bytes:
        left = timedelta(seconds=max(0.01, seconds_left(self._deadline)))
        _ask(lambda: self._store.wait([key], left))
        return bytes(_ask(lambda: self._store.get(key)))


@dataclass
class Cluster:
    """How this host's node is to be started."""

    listen: list[str] = field(default_factory=list)
    leader: str = ""  # empty: it leads
    token: str = ""
    claim: str = ""  # of a node that leads
    board: _Board | None = None  # where the others are told

    def publish(self, addresses: list[str], token: str) -> None:
        """Tell the other hosts where the leader is (the one that leads only)."""
        if self.board is None or not self.claim:
            return
        tcp = next((a for a in addresses if a.startswith("tcp://")), None)
        if tcp is None:
            raise PoolUnavailable(f"this host's node has no TCP address for the other hosts: {addresses}")
        self.board.tell(self.claim, {"address": tcp, "token": token})

    def give_back(self) -> None:
        """The node did not start: whoever waits for it claims anew."""
        if self.board is not None and self.claim:
            with contextlib.suppress(PoolUnavailable):  # what kept the node from starting says more
                self.board.tell(self.claim, {})


def cluster(config: Config, deadline: int, store: Any = None) -> Cluster:
    """With a ``discovery``: the nodes elect their leader (those of one URL: its prefix tells pools apart). With
    ``store``: whoever comes first leads. Without, what torchrun's environment says: one host (or no torchrun at all),
    host 0 of several, or another of several. PoolUnavailable if the leader is not told of in time."""
    env = os.environ
    if config.discovery:
        if not config.token:
            raise InvalidArgument("a discovery needs a token that all nodes have (TM_TOKEN)")
        return Cluster([f"tcp://{_own_ip(*parse_etcd(config.discovery)[0])}:0"], token=config.token)
    mine = secrets.token_hex(16)
    if store is not None:
        board = _Board(store, config.pool, deadline)
        listen = [f"tcp://{_own_ip(_place(store))}:0"]
        held = board.claim("", mine)
        while held != mine:
            if leader := board.leader(held):
                return _join(config, listen, leader)
            held = board.claim(held, mine)
        return _lead(config, listen, board, mine)
    hosts = int(env.get("GROUP_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in env else 1
    if hosts <= 1:
        return Cluster()
    board = _Board(_default_store(deadline), config.pool, deadline)
    listen = [f"tcp://{_own_ip((env.get('MASTER_ADDR', ''), int(env.get('MASTER_PORT', '0'))))}:0"]
    if int(env.get("GROUP_RANK", "0")) == 0:
        board.set_claim(mine)
        return _lead(config, listen, board, mine)
    while not (leader := board.leader(board.claimed())):
        if seconds_left(deadline) <= 0:
            raise PoolUnavailable("the pool's leader, on host 0, has left, and no other has come")
        time.sleep(0.05)
    return _join(config, listen, leader)


def _lead(config: Config, listen: list[str], board: _Board, claim: str) -> Cluster:
    return Cluster(listen, token=config.token or secrets.token_hex(32), claim=claim, board=board)


def _join(config: Config, listen: list[str], leader: dict[str, str]) -> Cluster:
    return Cluster(listen, leader=leader["address"], token=config.token or leader["token"])


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


def _own_ip(*places: tuple[str, int]) -> str:
    """The address of ours that leads to the first of ``places`` (host, port) that can be reached, one on another host
    before one on this; no host means this host's name. PoolUnavailable if none can be."""
    ours: list[str] = []
    why = ""
    for host, port in places:
        host = host or socket.gethostname()
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                ours.append(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:
            why = f"{host}: {error}"
    if not ours:
        raise PoolUnavailable(f"no address of this host leads to the others: {why}")
    ip = next((ip for ip in ours if not ip_address(ip).is_loopback), ours[0])
    return f"[{ip}]" if ":" in ip else ip
