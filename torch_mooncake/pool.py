"""The pool: ``put`` and ``get`` of tensors, state dicts and bytes by key, on this host and on others.

``tm.put``, ``tm.get`` … are the same methods on the process's default pool (``tm.init``). A ``Pool`` may be used from
any thread. All sizes are bytes; every call ends by its ``timeout`` (seconds) with a result or one of ``tm.errors``.

Two kinds of key. *Named* keys may be replaced and deleted; a ``get`` that starts after a ``put`` has returned never
sees an older value, anywhere. *Sealed* keys (``put(sealed=True)``) name their content, as page hashes do: a second put
changes nothing.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, overload
from weakref import WeakSet

from torch_mooncake import _core, attempts, batches, safetensors_io, state_dicts, values
from torch_mooncake.clock import deadline_ns, seconds_left
from torch_mooncake.config import Config, parse_bytes
from torch_mooncake.errors import Closed, DeadlineExceeded, Error, InvalidArgument, KeyNotFound
from torch_mooncake.node import find_or_start
from torch_mooncake.objects import Rounds, describe_peeked
from torch_mooncake.tensors import encode, encode_part, plain, writers

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from torch_mooncake.events import Subscription
    from torch_mooncake.kv import PagedKV, PoolKV

MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "<raise KeyNotFound>"})()


P = ParamSpec("P")
R = TypeVar("R")
Pin = Literal["soft", "hard"]
StateDict = TypeVar("StateDict", bound=Mapping[str, Any])


class Version(NamedTuple):
    """The pool's own version of a key: totally ordered, new at every put."""

    view: int
    counter: int


class PutResult(NamedTuple):
    version: Version
    stored: bool  # False: if_exists="keep" found a value, or a sealed copy was there
    nbytes: int


_core.set_result_types(Version, PutResult)
_PLAIN = _core.PutOptions()


class Info(NamedTuple):
    """What the pool knows of a key, without its bytes."""

    key: str
    version: Version
    label: str  # put(version=)
    nbytes: int
    meta: dict[str, Any]  # put(meta=)
    sealed: bool
    parts: int  # writers
    replicas: int
    local: bool  # on this host
    expires_in_s: float | None  # None: never
    tiers: tuple[str, ...] = ()  # "dram" or "ssd", of each replica
    pin: Pin | None = None


def _async(method: Callable[Concatenate[Pool, P], R]) -> Callable[Concatenate[Pool, P], Awaitable[R]]:
    """The ``await`` form of a verb: it runs on the library's thread pool."""

    @functools.wraps(method)
    async def call(self: Pool, *args: P.args, **kwargs: P.kwargs) -> R:
        from torch_mooncake import aio

        return await aio.in_thread(lambda: method(self, *args, **kwargs))

    return call


class Pool:
    """A connection to a pool. Re-attaches by itself after a fork, and after its node was lost."""

    _monitor = False  # a subclass that only looks on: not one of its node's clients

    def __init__(
        self,
        address: str | None = None,
        *,
        pool: str | None = None,
        token: str | None = None,
        memory: int | str | None = None,
        linger_s: float | None = None,
        host_id: str | None = None,
        name: str | None = None,
        runtime_dir: str | None = None,
        store: dist.Store | None = None,
        discovery: str | None = None,
        timeout: float | None = 30,
    ) -> None:
        """Connect to the node at ``address`` ("host:7400"), or to this host's, which is started if there is none.

        What is None comes from the environment (``torch_mooncake.config``). ``memory`` and ``linger_s`` are for a node
        that is started here, and so is ``store``: hosts that give the same ``torch.distributed`` Store make one pool,
        which the node of the first leads; its address travels through the Store. With ``discovery``
        ("etcd://host:port[,…][/prefix]", and one token on all hosts) the nodes elect their leader, and another when it
        is lost; one URL is one pool, whatever ``pool`` says: another pool takes another prefix. InvalidArgument for a
        ``store`` beside a ``discovery`` (beside TM_DISCOVERY it is not used). PoolUnavailable, AuthError,
        VersionMismatch or DeadlineExceeded when it cannot be had.
        """
        if store is not None and discovery is not None:
            raise InvalidArgument("store and discovery are two ways for hosts to find each other: give one")
        self.config = Config.from_env(
            address=address,
            pool=pool,
            token=token,
            memory=None if memory is None else parse_bytes(memory),
            linger_s=linger_s,
            host_id=host_id,
            name=name,
            runtime_dir=runtime_dir,
            discovery=discovery,
        )
        self._store = store
        self._lock = threading.Lock()
        self._core: _core.Client | None = None
        self._closed = False
        self._rounds = Rounds()
        _pools.add(self)
        self._client(deadline_ns(timeout))

    # --- put ---

    def put(
        self,
        key: str,
        value: Any,
        *,
        sealed: bool = False,
        if_exists: Literal["replace", "keep", "error"] = "replace",
        version: str | int | None = None,
        meta: dict[str, Any] | None = None,
        ttl_s: float | None = None,
        part: tuple[int, int] | None = None,
        group: str | None = None,
        replicas: int | str = 1,
        parent: str | None = None,
        pin: Pin | None = None,
        checksum: bool = False,
        timeout: float | None = 30,
    ) -> PutResult:
        """Store ``value`` under ``key``: a tensor of any dense dtype and shape, a numpy array, bytes, a scalar, or a
        nested dict, list or tuple of these (a state dict). All of it becomes visible at once.

        ``version`` is a label of yours beside the pool's version; ``meta`` a small dict (64 KiB of None, bool, int,
        float, str, bytes, list, dict) that ``info`` tells. ``ttl_s``: the value is missing so many seconds after it
        became visible. ``pin``: see ``Pool.pin``. ``parent``: a key that is there (else KeyNotFound), is not evicted
        before this one, and does not come after it (else InvalidArgument). ``replicas=n`` copies on different hosts, or
        raises; ``"≤n"`` makes do with fewer. Raises TypeError (naming the leaf) for what cannot be put, KeyExists,
        PoolFull (with the sizes). After DeadlineExceeded the put took effect wholly or not at all.

        Several writers: ``part=(i, n)`` puts the i-th of n values under one key (``get`` returns the list); a value
        with a ``DTensor`` is put by all ranks of its mesh, each its shard. The parts become visible together, when the
        last has come; otherwise none does, and every writer raises. Writers find each other by ``group``, by default
        the ``version``; ``part=`` needs one of the two, and for a DTensor the n-th put of the key on each rank are one.
        """
        deadline = deadline_ns(timeout)
        found = plain(value) if part is None and meta is None else None
        if found is not None:
            head, data = found
            options = _put_options(sealed, if_exists, version, ttl_s, replicas, checksum, pin, parent)
            plain_result: PutResult = self._client(deadline).put(checked_key(key), head, (data,), options, deadline)
            return plain_result
        label = "" if version is None else str(version)
        sharers = writers(value) if part is None else None
        if part is not None:
            index, parts = _part(part)
            encoded = encode_part(value, meta)
            if parts > 1 and not (group or label):
                raise InvalidArgument("writers of one object need the same version= or group=")
        else:
            index, parts = sharers or (0, 1)
            if parts > 1 and not (group or label):
                group = self._rounds.next(checked_key(key))  # counted also if this rank's put fails: the others' will
            encoded = encode(value, meta, (index, parts))
        options = _put_options(
            *(sealed, if_exists, version, ttl_s, replicas, checksum, pin, parent),
            part=index,
            parts=parts,
            group=group or "",
        )
        result: PutResult = self._client(deadline).put(checked_key(key), encoded.meta, encoded.data, options, deadline)
        return result

    @overload
    def put_many(
        self,
        items: Mapping[str, Any],
        *,
        errors: Literal["raise", "return"] = "raise",
        meta: dict[str, Any] | None = None,
        timeout: float | None = 30,
        **options: Any,
    ) -> dict[str, Any]: ...
    @overload
    def put_many(
        self,
        items: Iterable[tuple[str, Any]],
        *,
        errors: Literal["raise", "return"] = "raise",
        meta: dict[str, Any] | None = None,
        timeout: float | None = 30,
        **options: Any,
    ) -> list[Any]: ...
    def put_many(
        self,
        items: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        errors: Literal["raise", "return"] = "raise",
        meta: dict[str, Any] | None = None,
        timeout: float | None = 30,
        **options: Any,
    ) -> dict[str, Any] | list[Any]:
        """``put`` any number of values with a few messages: a dict of PutResult for a mapping, a list for pairs.

        Each key is put whole or not at all, by itself; pairs with the same key take effect in their order. All are
        attempted, within one deadline. ``errors="return"``: an exception stands in the place of the PutResult of each
        that failed; ``"raise"``: the first of them is raised (the others' values are there). ``options``: those of
        ``put`` but ``part`` and ``group``.
        """
        if errors not in ("raise", "return"):
            raise InvalidArgument(f'errors must be "raise" or "return", not {errors!r}')
        deadline = deadline_ns(timeout)
        native = _put_options(**options)
        if isinstance(items, Mapping):
            keys, data = list(items), list(items.values())
        else:
            pairs = list(items)
            keys, data = [key for key, _ in pairs], [value for _, value in pairs]
        _checked_keys(keys)
        outcomes = batches.put(
            self._client(deadline),
            keys,
            data,
            meta,
            native,
            deadline,
            lambda key, value: self.put(key, value, meta=meta, timeout=seconds_left(deadline), **options),
        )
        if errors == "raise":
            _raise_first(keys, outcomes)
        return dict(zip(keys, outcomes, strict=True)) if isinstance(items, Mapping) else outcomes

    # --- get ---

    def get(
        self,
        key: str,
        *,
        out: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        version: str | int | Version | None = None,
        placements: Sequence[Placement] | None = None,
        mesh: DeviceMesh | None = None,
        readonly: bool = False,
        consume: bool = False,
        wait: float | None = None,
        default: Any = MISSING,
        timeout: float | None = 30,
    ) -> Any:
        """The value under ``key``. Big objects of this host are mapped, not copied: tensors own a private
        (copy-on-write) view, so writing to them never reaches the pool, and they stay whole when the key is replaced.

        ``readonly=True``: tensors over the pool's own pages, free of faults; writing to them crashes the process.
        ``out``: copy into this tensor, array, buffer, or nest of tensors, and return it; LayoutMismatch if dtype or
        shape differ; unspecified content after a failure. ``device``, ``dtype``: convert tensors on the way.
        ``placements`` and ``mesh``: a DTensor of which this process reads its own share and no other byte, however the
        tensor was put; so does a DTensor in ``out``. Partial placements are InvalidArgument.
        ``consume=True``: take it: of all who do, one gets the value, after the pool has acknowledged that it is gone;
        who is killed meanwhile leaves it there or gone, never twice. "outcome unknown" in an error: gone, or not.
        A cancelled ``await tm.aget(consume=True)`` takes nothing; cancelled while it takes, it returns the value.
        ``version``: a label (KeyNotFound if the current value has another), or a ``PutResult.version`` (at least).
        ``wait``: seconds to wait for the key to appear, then DeadlineExceeded. ``default``: instead of KeyNotFound.
        """
        deadline = deadline_ns(timeout if wait is None or timeout is None else timeout + wait)
        wait_until = min(deadline, deadline_ns(wait))  # one for all turns: another may take what has appeared
        name, (at_least, label) = checked_key(key), _version(version)
        attempt = attempts.current()
        while True:
            client = self._client(deadline)
            try:
                if wait is None:
                    found = client.locate(name, at_least, label, deadline)
                else:
                    found = _wait(client, name, at_least, label, wait_until)
            except KeyNotFound:
                if default is MISSING:
                    raise
                return default
            try:
                value = values.load(
                    client,
                    found,
                    deadline,
                    out=out,
                    device=device,
                    dtype=dtype,
                    readonly=readonly,
                    placements=placements,
                    mesh=mesh,
                )
                if not consume:
                    return value
                if attempt is not None:
                    attempt.commit()
                if client.remove(name, deadline, found.version):
                    return value
                del value  # somebody else has taken or replaced it
                if attempt is not None:
                    attempt.reopen()
            except KeyNotFound:  # superseded between the look-up and the read: look again
                pass
            if time.monotonic_ns() >= deadline:
                raise DeadlineExceeded(f"{key!r} was replaced faster than it could be read") from None

    def get_many(
        self,
        keys: Sequence[str],
        *,
        missing: Literal["raise", "mask"] = "raise",
        errors: Literal["raise", "return"] = "raise",
        readonly: bool = False,
        consume: bool = False,
        out: Sequence[Any] | None = None,
        timeout: float | None = 30,
    ) -> list[Any]:
        """The values, in the order of ``keys``, after one look-up and one read of all small ones.

        ``missing="mask"``: None for missing keys. ``errors="return"``: an exception stands in the place of each that
        failed; ``"raise"``: the first is raised. ``out``: one target a key, as in ``get``; ``consume``: take each, at
        most once, as in ``get`` (what was taken before an error was raised is gone: use ``errors="return"``).
        """
        if missing not in ("raise", "mask"):
            raise InvalidArgument(f'missing must be "raise" or "mask", not {missing!r}')
        if errors not in ("raise", "return"):
            raise InvalidArgument(f'errors must be "raise" or "return", not {errors!r}')
        if out is not None and len(out) != len(keys):
            raise InvalidArgument(f"{len(keys)} keys, but {len(out)} outs")
        if out is not None and readonly:
            raise InvalidArgument("out= decides where the values are: give no readonly=")
        deadline = deadline_ns(timeout)
        names = _checked_keys(list(keys))
        getter = batches.Getter(
            self._client(deadline), names, out, readonly=readonly, consume=consume, deadline=deadline
        )
        getter.run()
        if not getter.failed:
            return getter.results
        failed = {i: e for i, e in getter.failed.items() if missing == "raise" or not isinstance(e, KeyNotFound)}
        if failed and errors == "raise":
            getter.results.clear()  # no error holds on to tensors
            try:
                raise failed[min(failed)]
            finally:
                del failed, getter
        for i, error in failed.items():
            getter.results[i] = error
        return getter.results

    # --- many tensors ---

    def put_state_dict(self, key: str, state_dict: Mapping[str, Any], **options: Any) -> PutResult:
        """``put`` a state dict (a model's, an optimizer's, nested ones; values that have a ``state_dict()`` are asked
        for it) as one object. With DTensors in it, all ranks of their mesh put it, and plain values are rank 0's.
        ``options``: those of ``put``."""
        return self.put(key, state_dicts.resolved(state_dict), **options)

    @overload
    def get_state_dict(
        self, key: str, into: None = None, *, strict: bool = True, timeout: float | None = 30
    ) -> dict[str, Any]: ...
    @overload
    def get_state_dict(
        self, key: str, into: StateDict, *, strict: bool = True, timeout: float | None = 30
    ) -> StateDict: ...
    def get_state_dict(self, key: str, into: Any = None, *, strict: bool = True, timeout: float | None = 30) -> Any:
        """A state dict; with ``into``, in place: tensors are filled (of DTensors, and of one that was put sharded,
        exactly this process's share is read), other values replaced, and objects with ``load_state_dict`` get theirs.

        Names are matched as torch's distributed checkpoint flattens them ("optimizer.state.0.step"). LayoutMismatch,
        before anything is written, if a tensor has another shape or dtype or, with ``strict``, if a name is missing
        on either side; without, such names are left alone. Returns ``into``.
        """
        deadline = deadline_ns(timeout)
        while True:
            client = self._client(deadline)
            found = client.locate(checked_key(key), None, "", deadline)
            try:
                return state_dicts.load(client, found, deadline, into, strict)
            except KeyNotFound:  # superseded between the look-up and the read: look again
                if time.monotonic_ns() >= deadline:
                    raise DeadlineExceeded(f"{key!r} was replaced faster than it could be read") from None

    def import_safetensors(self, path: str | os.PathLike[str], prefix: str = "", **options: Any) -> list[str]:
        """``put`` each tensor of a safetensors file under ``prefix`` + its name, straight from the mapped file, and the
        file's metadata, if it has any, under ``prefix`` + "__metadata__". Returns the tensors' keys.

        The header is checked before the first put: Corrupt for what the format forbids (sizes that do not fit, gaps,
        overlaps, a truncated file), Unsupported for a dtype torch has no tensors of, InvalidArgument for a name that
        makes no key. Each key is put by itself.
        ``options``: those of ``put``; the timeout is for all.
        """
        return safetensors_io.import_file(self, path, prefix, **options)

    def export_safetensors(
        self,
        prefix: str,
        path: str | os.PathLike[str],
        *,
        keys: Sequence[str] | None = None,
        timeout: float | None = 30,
    ) -> int:
        """Write the tensors under ``prefix`` (of these ``keys``, if given) to a safetensors file, named without it, and
        what ``import_safetensors`` kept of the metadata. The file is there whole or not at all. Returns its bytes.

        LayoutMismatch names a key that is not one tensor; Unsupported one whose dtype the format does not have.
        """
        return safetensors_io.export_file(self, prefix, path, keys=keys, timeout=timeout)

    # --- KV pages ---

    def kv(self, namespace: str, cache: PagedKV, *, group: int = 0) -> PoolKV:
        """Pages of a paged KV cache (of one of its groups) in this pool, reused by prefix: a ``kv.PoolKV``.
        ``namespace`` names the model and its weights."""
        from torch_mooncake.kv import PoolKV

        return PoolKV(self, cache, model=namespace, group=group)

    def subscribe(self, prefix: str = "") -> Subscription:
        """What becomes of the keys that start with ``prefix``, from now on, beginning with those that are there."""
        from torch_mooncake.events import Subscription

        return Subscription(self, prefix)

    # --- the rest ---

    def info(self, key: str, *, timeout: float | None = 30) -> Info:
        """Version, size, ``meta`` and more of a key, without reading it. KeyNotFound.

        Only looks: it counts as no use, and what is on an SSD stays there. ``meta`` of a value whose description is too
        long to be kept apart from it (512 KiB: ten thousand tensors) is empty while the value is on an SSD."""
        deadline = deadline_ns(timeout)
        client = self._client(deadline)
        found = peek(client, checked_key(key), deadline)
        description = describe_peeked(client, found, deadline)
        return Info(
            key=key,
            version=Version(*found.version),
            label=found.label,
            nbytes=found.nbytes,
            meta=copy.deepcopy((description and description.user) or {}),
            sealed=found.sealed,
            parts=len(found.parts),
            replicas=found.replicas,
            local=found.local,
            expires_in_s=None if found.left_ms is None else found.left_ms / 1000,
            tiers=tuple(found.tiers),
            pin=None if found.pin == "none" else found.pin,
        )

    @overload
    def exists(self, key: str, *, timeout: float | None = 30) -> bool: ...
    @overload
    def exists(self, key: list[str] | tuple[str, ...], *, timeout: float | None = 30) -> list[bool]: ...
    def exists(self, key: str | list[str] | tuple[str, ...], *, timeout: float | None = 30) -> bool | list[bool]:
        """Whether the key is there; for several keys a list, after one question."""
        deadline = deadline_ns(timeout)
        if isinstance(key, str):
            return self._client(deadline).exists([checked_key(key)], deadline)[0]
        return self._client(deadline).exists(_checked_keys(list(key)), deadline)

    def exists_prefix(self, keys: Sequence[str], *, pin_s: float = 0, timeout: float | None = 30) -> int:
        """How many of ``keys``, from the first on, are there: one question that ends at the first that is not. With
        ``pin_s`` (at most an hour) those are not evicted for so long, or until ``unpin`` or this pool is closed. They
        can still be replaced and deleted."""
        deadline = deadline_ns(timeout)
        pin_ms = _pin_ms(pin_s)
        names = [checked_key(key) for key in keys]
        return _core.match_prefix(self._client(deadline), names, pin_ms, deadline) if names else 0

    @overload
    def pin(self, keys: str, pin: Pin | None, *, timeout: float | None = 30) -> bool: ...
    @overload
    def pin(self, keys: list[str] | tuple[str, ...], pin: Pin | None, *, timeout: float | None = 30) -> list[bool]: ...
    def pin(
        self, keys: str | list[str] | tuple[str, ...], pin: Pin | None, *, timeout: float | None = 30
    ) -> bool | list[bool]:
        """Keep keys in memory, all replicas, whoever is connected: "soft": evicted (also to an SSD) only when nothing
        that is not pinned may go; "hard": never; None: as any other. False for a key that is not there.

        A pin is of what is there now: a replace, delete or expiry ends it (the new value has that of its own ``put``).
        What is on an SSD is brought back for a hard pin; PoolFull if there is no room for it. For several keys the
        first failure is raised, after all were tried. A pool full of hard pins takes nothing more: PoolFull says so.
        """
        deadline = deadline_ns(timeout)
        names = [checked_key(keys)] if isinstance(keys, str) else _checked_keys(list(keys))
        outcomes = self._client(deadline).pin_many(names, _pin(pin), deadline)
        _raise_first(names, outcomes)
        return outcomes[0] if isinstance(keys, str) else outcomes

    def unpin(self, keys: Sequence[str], *, timeout: float | None = 30) -> None:
        """End what ``exists_prefix(pin_s=)`` of this client has pinned of ``keys``, up to the first that is gone. (What
        ``pin`` has done is ended by ``pin(keys, None)``.)"""
        deadline = deadline_ns(timeout)
        names = [checked_key(key) for key in keys]
        if names:
            _core.refresh_keys(self._client(deadline), names, True, deadline)

    @overload
    def delete(self, key: str, *, timeout: float | None = 30) -> bool: ...
    @overload
    def delete(self, key: list[str] | tuple[str, ...], *, timeout: float | None = 30) -> list[bool]: ...
    def delete(self, key: str | list[str] | tuple[str, ...], *, timeout: float | None = 30) -> bool | list[bool]:
        """Remove the key; False if it was not there. For several keys a list, after one question (the first failure is
        raised, after all were tried). Tensors got before stay whole."""
        deadline = deadline_ns(timeout)
        if isinstance(key, str):
            return self._client(deadline).remove(checked_key(key), deadline)
        names = _checked_keys(list(key))
        outcomes = self._client(deadline).remove_many(names, None, deadline)
        _raise_first(names, outcomes)
        return outcomes

    def keys(self, prefix: str = "", *, timeout: float | None = 30) -> list[str]:
        """The keys that start with ``prefix``, sorted. A snapshot of no particular instant."""
        deadline = deadline_ns(timeout)
        return sorted(self._client(deadline).keys(prefix, deadline))

    def wait(self, key: str, timeout: float | None = 30, *, version: str | int | Version | None = None) -> Version:
        """Return the version of ``key`` as soon as it is there (with that label, or at least that version).
        DeadlineExceeded after ``timeout`` seconds."""
        deadline = deadline_ns(timeout)
        return Version(*_wait(self._client(deadline), checked_key(key), *_version(version), deadline).version)

    def set_quota(self, prefix: str, nbytes: int | str | None, *, timeout: float | None = 30) -> list[dict[str, Any]]:
        """Limit the memory of the keys that start with ``prefix`` to ``nbytes`` ("2GiB"; None: no limit), in the whole
        pool. Of two prefixes of a key the longer counts. What goes over it evicts others of that prefix on its node,
        least valuable first (to an SSD, if there is one; disks have no quota); what finds none is PoolFull, which names
        the quota, at once. Returns all quotas there are, as ``stat()["quotas"]``: prefix, limit_bytes, used_bytes.

        Counted in pages of 4 KiB from 32 KiB on, per replica, from the reservation on. Of other nodes a node knows what
        they had about a second ago: by what several put in that time the sum may be over the limit. With several nodes
        it returns when all know of it, after about a second: whoever leads next keeps it, too, as long as keys are
        kept. 16 prefixes of at most 256 bytes.
        """
        limit = 0 if nbytes is None else parse_bytes(nbytes)
        if nbytes is not None and limit <= 0:
            raise InvalidArgument(f"a quota is some bytes, or None, not {nbytes!r}")
        if not prefix:
            raise InvalidArgument("a quota is of a prefix")
        deadline = deadline_ns(timeout)
        return self._client(deadline).set_quota(prefix, limit, deadline)

    def stat(self, *, timeout: float | None = 30) -> dict[str, Any]:
        """Numbers of the pool: view, keys, what this client has mapped, and each node's memory, in bytes, and SSDs:
        what is there, what went there and back, what was dropped, refused, reclaimed, and what failed."""
        deadline = deadline_ns(timeout)
        return self._client(deadline).stat(deadline)

    def close(self) -> None:
        """End the connection. Tensors that were got stay valid. Idempotent; later calls raise Closed."""
        with self._lock:
            self._closed = True
            client, self._core = self._core, None
        if client is not None:
            client.close()

    def capsule(self) -> Any:
        """The native client, for the library's other native modules."""
        return self._client(deadline_ns(30)).capsule()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pool {self.config.address or self.config.pool}{', closed' if self._closed else ''}>"

    aput = _async(put)
    aput_many = _async(put_many)
    aget = _async(get)
    aget_many = _async(get_many)
    aexists = _async(exists)
    aexists_prefix = _async(exists_prefix)
    apin = _async(pin)
    aunpin = _async(unpin)
    adelete = _async(delete)
    akeys = _async(keys)
    await_key = _async(wait)
    astat = _async(stat)
    aset_quota = _async(set_quota)
    ainfo = _async(info)
    aput_state_dict = _async(put_state_dict)
    aget_state_dict = _async(get_state_dict)
    aimport_safetensors = _async(import_safetensors)
    aexport_safetensors = _async(export_safetensors)

    # --- the connection ---

    def _client(self, deadline: int) -> _core.Client:
        """The native client; made anew after a fork, or when its node is gone."""
        client = self._core
        if client is not None and client.alive:
            return client
        with self._lock:
            if self._closed:
                raise Closed(f"{self!r} was used after close()")
            if self._core is None or not self._core.alive:
                self._core = None
                self._core = self._connect(deadline)
            return self._core

    def _connect(self, deadline: int) -> _core.Client:
        config = self.config

        def connect(address: str, token: str, until: int) -> _core.Client:
            return _core.Client.connect(
                address=address,
                token=token,
                name=config.name or f"client-{os.getpid()}",
                host_id=config.host_id,
                engine=None,
                view_ttl_s=config.view_ttl_s,
                transports=list(config.transports),
                nics=list(config.nics),
                rdma=config.rdma,
                monitor=self._monitor,
                deadline_ns=until,
            )

        if config.address:
            address = config.address if "://" in config.address else f"tcp://{config.address}"
            return connect(address, config.token, deadline)
        return find_or_start(config, deadline, connect, self._store)


def _wait(client: _core.Client, key: str, at_least: tuple[int, int] | None, label: str, deadline: int) -> _core.Object:
    """``client.wait``, for as long as somebody is there to have the answer."""
    attempt = attempts.current()
    if attempt is None:
        return client.wait(key, at_least, label, deadline)
    while True:
        attempt.check()
        try:
            return client.wait(key, at_least, label, min(deadline, time.monotonic_ns() + attempts.SLICE_NS))
        except DeadlineExceeded:
            if time.monotonic_ns() >= deadline:
                raise


def peek(client: _core.Client, key: str, deadline: int) -> Any:
    """The object, for a look at it only. KeyNotFound."""
    (found,) = client.peek_many([key], deadline)
    if isinstance(found, Exception):
        raise found
    return found


def checked_key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a key is Unicode: {error}") from None
    if not 0 < nbytes <= _core.MAX_KEY_BYTES:
        raise InvalidArgument(f"a key has 1 to {_core.MAX_KEY_BYTES} bytes of UTF-8, not {nbytes}")
    return key


def _put_options(
    sealed: bool = False,
    if_exists: str = "replace",
    version: str | int | None = None,
    ttl_s: float | None = None,
    replicas: int | str = 1,
    checksum: bool = False,
    pin: Pin | None = None,
    parent: str | None = None,
    **parts: Any,
) -> _core.PutOptions:
    plain = not (sealed or checksum or parts) and if_exists == "replace" and replicas == 1
    if plain and version is ttl_s is pin is parent is None:
        return _PLAIN
    count, lenient = _replicas(replicas)
    return _core.PutOptions(
        sealed=sealed,
        if_exists=if_exists,
        replicas=count,
        replicas_lenient=lenient,
        label="" if version is None else str(version),
        checksum=checksum,
        ttl_ms=_ttl_ms(ttl_s),
        pin=_pin(pin),
        parent="" if parent is None else checked_key(parent),
        **parts,
    )


def _raise_first(keys: Sequence[str], outcomes: Sequence[Any]) -> None:
    """Raises the first exception among the outcomes, if there is one, and says which key's it is."""
    failed = [(key, outcome) for key, outcome in zip(keys, outcomes, strict=True) if isinstance(outcome, Exception)]
    if not failed:
        return
    key, error = failed[0]
    if isinstance(error, Error):
        error.message = f"key {key!r}: {error.message} ({len(failed)} of {len(keys)} keys failed)"
    try:
        raise error
    finally:
        del error, failed


def _checked_keys(keys: list[str]) -> list[str]:
    for key in keys:
        if type(key) is not str or not key.isascii() or not 0 < len(key) <= _core.MAX_KEY_BYTES:
            checked_key(key)
    return keys


def _version(version: str | int | Version | None) -> tuple[tuple[int, int] | None, str]:
    """(at least this version, label)."""
    if version is None:
        return None, ""
    if isinstance(version, tuple):
        return (version[0], version[1]), ""
    return None, str(version)


def _ttl_ms(ttl_s: float | None) -> int:
    if ttl_s is None:
        return 0
    if not 0 < ttl_s <= _core.MAX_TTL_MS / 1000:
        raise InvalidArgument(f"ttl_s is above 0 and at most ten years, not {ttl_s!r}")
    return max(1, round(ttl_s * 1000))


def _pin(pin: Pin | None) -> str:
    if pin not in (None, "soft", "hard"):
        raise InvalidArgument(f'pin is "soft", "hard" or None, not {pin!r}')
    return pin or "none"


def _pin_ms(pin_s: float) -> int:
    if not 0 <= pin_s <= _core.MAX_PIN_MS / 1000:
        raise InvalidArgument(f"pin_s is 0 to {_core.MAX_PIN_MS // 1000} seconds, not {pin_s!r}")
    return round(pin_s * 1000)


def _part(part: tuple[int, int]) -> tuple[int, int]:
    index, parts = part
    if not 0 <= index < parts <= _core.MAX_PARTS:
        raise InvalidArgument(f"part=(i, n) has 0 <= i < n <= {_core.MAX_PARTS}, not {part!r}")
    return index, parts


def _replicas(replicas: int | str) -> tuple[int, bool]:
    text = str(replicas)
    lenient = text.startswith(("≤", "<="))
    digits = text.removeprefix("≤").removeprefix("<=")
    if not digits.isdecimal() or not 1 <= int(digits) <= 64:
        raise InvalidArgument(f'replicas must be 1 to 64, or "≤n", not {replicas!r}')
    return int(digits), lenient


_pools: WeakSet[Pool] = WeakSet()


def _after_fork() -> None:
    for pool in list(_pools):
        pool._lock = threading.Lock()
        pool._core = None  # the parent's; the next use attaches anew


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["MISSING", "Info", "Pool", "PutResult", "Version"]
