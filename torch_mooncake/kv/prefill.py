"""One prompt's pages on their way, as the prefill side sees it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from torch_mooncake.errors import (
    Busy,
    Cancelled,
    Closed,
    DeadlineExceeded,
    Error,
    InvalidArgument,
    KeyNotFound,
    LayoutMismatch,
    PeerLost,
)
from torch_mooncake.kv import plan as planning
from torch_mooncake.kv import wire
from torch_mooncake.kv.inbox import ALIVE_S
from torch_mooncake.kv.layout import PagedKVLayout
from torch_mooncake.kv.plan import Plan
from torch_mooncake.kv.runs import checked_ids
from torch_mooncake.kv.target import Chunk, Target, left

if TYPE_CHECKING:
    from torch_mooncake.kv.send import KVSender
    from torch_mooncake.transfer import Region

_DOUBT_S = 1.0  # how long the end of a failed session waits for those who may be reading
_INLINE_NBYTES = 256 << 10  # up to that a push is posted by its caller


class Event(Protocol):
    """What `push_layer` takes as `event`: a torch.cuda.Event, or anything alike."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class PushResult:
    """What a session moved. `exposed_s` is the time the caller spent in `push_layer` and `finish`: transfer that ran
    while the caller computed is not in it. `wire` says how ("direct", "packed", "packed_fp8"; several decode ranks'
    joined by "+"), `transport` over what."""

    nbytes: int
    exposed_s: float
    transport: str
    wire: str = "direct"


class PrefillSession:
    """Made by `KVSender.open` and `KVSender.offer`. Used by one thread; `cancel` may come from any.

    Ends once, by `finish`, `abort`, `cancel`, the decode side's word, a lost peer or its deadline, whether or not
    anybody waits for it; leaving the `with` block without `finish` aborts. After the end no byte of it lands any more
    and the local pages may be reused.
    """

    def __init__(self, sender: KVSender, deadline: float, asked: str, *, pulled: bool) -> None:
        if asked not in wire.WIRES:
            raise InvalidArgument(f'wire is "auto", "direct", "packed" or "packed_fp8", not {asked!r}')
        self.id = b""  # of the session, or of the first of several decode ranks'
        self.attempt = os.urandom(8)
        self.deadline = deadline
        self.pulled = pulled
        self.targets: list[Target] = []
        self._asked = asked
        self._sender = sender
        self._changed = threading.Condition()
        self._jobs = 0  # pushes that are not dispatched yet
        self._dispatching = 0
        self._exposed_s = 0.0
        self._said_alive = time.monotonic()
        self._error: Error | None = None
        self._ended = False  # no more pushes
        self._ended_at = 0.0
        self._settled = False  # nothing of it is under way
        self._regions: list[Region] = []  # pull: the cache, registered for this session alone
        self._staging_region: Region | None = None
        self._pushed: list[tuple[Chunk, int]] = []  # pull: for decode ranks that come later
        self._sinks: set[int] | None = None  # pull: decode ranks that we feed, when one has come

    # ---- what a user sees

    @property
    def remote_pages(self) -> list[int]:
        """The decode side's pages of the first group (of the first rank)."""
        return [int(page) for page in self.targets[0].pages[0]]

    @property
    def plans(self) -> list[Plan]:
        """How each decode rank is reached; of a pulled session those that have come."""
        with self._changed:
            return [target.plan for target in self.targets]

    @property
    def plan(self) -> Plan:
        """The first decode rank's."""
        return self.plans[0]

    def explain(self) -> str:
        return "\n".join(map(str, self.plans)) or "no decode rank has come yet"

    @property
    def state(self) -> str:
        """ "pending", "done", "cancelled", "timeout" or "failed"."""
        with self._changed:
            return wire.state_of(self._settled, self._error)

    @property
    def error(self) -> Error | None:
        """What ended it. Its `failed_pages` are the local pages that were pushed and did not arrive."""
        with self._changed:
            return self._error

    @property
    def ended(self) -> bool:
        return self._ended

    def push_layer(
        self,
        layer: int,
        pages: Sequence[int] | torch.Tensor,
        *,
        start: int = 0,
        event: Event | None = None,
    ) -> None:
        """Sends local `pages` of one layer (the model's number) to the decode side's positions `start`, `start` + 1, …;
        may be called several times for a layer (chunked prefill). Returns at once; the pages must keep their content
        until the end. The decode side hears of the layer when all of the prompt's pages of it are in place.

        `event`: the pages are sent when it has happened (`event.synchronize()` returns, on another thread).
        Raises OutOfBounds for a page that does not exist, InvalidArgument for a layer or positions that do not, and
        what has ended the session, if something has.
        """
        began = time.perf_counter()
        self._check_open()
        if layer not in self._sender.group_of:
            raise InvalidArgument(f"layer {layer} is not in {few(sorted(self._sender.group_of))}")
        group, num_pages, page_nbytes = self._sender.group_of[layer]
        chunk = Chunk(layer, checked_ids(pages, num_pages), start)
        with self._changed:
            targets = list(self.targets)
            for target in targets:
                target.check(chunk, group)
            # Longer ones are posted by the sender's thread, so that the caller can go on computing.
            inline = not self._jobs and len(chunk.ids) * page_nbytes <= _INLINE_NBYTES
            inline = inline and not any(target.plan.wire.startswith("packed") for target in targets)
            inline = inline and (event is None or event.query())
            if not inline:
                self._jobs += 1
            if self.pulled:
                self._pushed.append((chunk, group))
        if inline:
            try:
                self._dispatch(chunk, group, targets)
            except BaseException as error:
                self._fail(self._reason(error))
                if not isinstance(error, Error):
                    raise
                raise self._raised() from error
        else:
            self._sender.run(lambda: self._later(chunk, group, event, targets))
        self._exposed_s += time.perf_counter() - began

    def finish(self, meta: dict[str, Any] | None = None) -> PushResult:
        """Waits until every byte is in place, then tells the decode side, with `meta` (msgpack's types). Raises what
        went wrong after telling the decode side of it, with `failed_pages`; InvalidArgument if the prompt's pages have
        not all been pushed."""
        began = time.perf_counter()
        self._check_open()
        try:
            if self.pulled:
                self._await(lambda: self._sinks is not None and self._sinks <= {t.place.rank for t in self.targets})
            self._drain()
            self._check_complete()
            for op in [target.say_done(meta or {}) for target in self.targets if target.plan.wire != "none"]:
                op.wait(left(self.deadline))
            if self.pulled:
                self._await(lambda: all(target.closed for target in self.targets if target.plan.wire != "none"))
        except Error as error:
            self.abort(self._reason(error))
            raise self._raised() from error
        with self._changed:
            if self._error is not None:
                raise self._error
            self._ended = True
        self._settle()
        if self._withdrawing():  # a peer that has everything and does not answer
            self._sender.settler.add(lambda: not self._withdrawing())
        self._exposed_s += time.perf_counter() - began
        return PushResult(
            sum(target.nbytes for target in self.targets),
            self._exposed_s,
            "+".join(dict.fromkeys(target.transport for target in self.targets if target.transport)),
            "+".join(dict.fromkeys(target.plan.wire for target in self.targets)),
        )

    def cancel(self) -> None:
        """Ends the session, if it has not ended, tells the decode side, and returns when nothing of it is under way."""
        self.abort(Cancelled("the prefill side cancelled"))

    def abort(self, error: BaseException) -> None:
        """The same for another reason. Never raises for a peer that is gone: its own deadline tells it."""
        self._fail(error)
        with self._changed:
            self._changed.wait_for(lambda: self._settled)

    # ---- its beginning

    def _open(self, tickets: list[wire.Ticket]) -> None:
        inbox = self._sender.inbox
        try:
            for ticket in tickets:
                self._add(ticket)
            self._sender.sessions.add(self)
            for target in self.targets:
                inbox.enlist(target.session_id, self.attempt, self)
            for target in self.targets:
                if target.plan.wire != "none":
                    target.say_hello()
            for target in self.targets:
                if target.plan.wire != "none":
                    target.await_welcome()
                if target.plan.wire == "direct" and target.num_regions > 1:
                    self._sender.run(lambda target=target: self._guarded(target.open_all))  # type: ignore[misc]
        except BaseException as error:
            self._ended = True
            self._settle()
            if not isinstance(error, KeyNotFound):  # a stale ticket has nobody who could be told
                for ticket in tickets:
                    inbox.post(ticket.contact, self._failed_note(ticket.session, error))
            raise

    def _add(self, ticket: wire.Ticket) -> None:
        """One more decode rank (push)."""
        sender = self._sender
        ours, theirs = sender.kv.layout, sender.others.layout(ticket.layout)
        check_layouts(ours, sender.place, theirs, ticket.place, "the decode cache differs")
        pages = [np.frombuffer(ids, np.int64) for ids in ticket.pages]
        if len(pages) != len(theirs.groups) or len(ticket.prompt_pages) != len(pages) or not ticket.regions:
            raise InvalidArgument("not a ticket: it does not name regions, and pages of every group")
        for ids, group in zip(pages, theirs.groups, strict=True):
            checked_ids(ids, group.num_pages)
            if len(np.unique(ids)) != len(ids):
                raise InvalidArgument("not a ticket: it names a page twice")
        feeds = planning.feeds_of(ours, sender.place, theirs, ticket.place)
        target = Target(self, ticket.session, ticket.contact, theirs, ticket.layout, ticket.place, feeds)
        target.reserve(pages, ticket.prompt_pages)
        transport = ""
        if any(feed is not None for feed in feeds):  # else it may be done, and gone, before we come
            peer = sender.inbox.peer(ticket.contact, left(self.deadline))
            transport = target.reach(peer, ticket)
        target.plan = planning.choose(
            planning.agree(self._asked, ticket.wire), ours, sender.place, theirs, ticket.place, feeds, transport,
            sender.cannot_pack(),
        )  # fmt: skip
        self.targets.append(target)
        self.id = self.id or target.session_id

    def _offer(self) -> None:
        sender = self._sender
        if not sender.engine.addresses:
            raise InvalidArgument("the prefill engine does not listen: nobody can pull from it")
        self.id = os.urandom(16)
        # A registration of its own: withdrawing it fences this session's readers and no others.
        self._regions = sender.kv.register(sender.engine, writable=False, label="offered KV pages")
        sender.sessions.add(self)
        sender.inbox.enlist(self.id, self.attempt, self)

    def ticket(self) -> bytes:
        """Pull: what the decode ranks need. Carry it over any channel. No secret."""
        if not self.pulled:
            raise InvalidArgument("this session is pushed: the decode side makes the ticket")
        sender = self._sender
        return wire.encode(
            wire.Ticket(
                version=wire.VERSION,
                session=self.id,
                mode="pull",
                contact=sender.inbox.contact,
                attempt=self.attempt,
                layout=sender.layout_key,
                place=sender.place,
                regions=[region.descriptor() for region in self._regions],
                table=b"",
                slot=0,
                pages=[],
                prompt_pages=[],
                wire=self._asked,
                timeout_s=max(0.0, self.deadline - time.monotonic()),
            )
        )

    def _meet(self, note: wire.Note) -> None:
        """Pull: a decode rank has come (inbox thread)."""
        sender, body = self._sender, note.body
        place, theirs = wire.Place(*body["place"]), sender.others.layout(body["layout"])
        contact = wire.contact_of(body)
        if any(target.place.rank == place.rank for target in self.targets):
            raise InvalidArgument(f"decode rank {place.rank} used the ticket twice")
        check_layouts(sender.kv.layout, sender.place, theirs, place, "the decode cache differs")
        feeds = planning.feeds_of(sender.kv.layout, sender.place, theirs, place)
        target = Target(self, self.id, contact, theirs, body["layout"], place, feeds)
        target.reserve([np.zeros(count, np.int64) for count in body["reserved"]], list(body["prompt"]))
        target.transport = str(body["transport"])
        target.plan = planning.choose(
            planning.agree(str(body["wire"]), self._asked), sender.kv.layout, sender.place, theirs, place, feeds,
            target.transport, "",
        )  # fmt: skip
        with self._changed:
            self._sinks = planning.sinks_of(sender.kv.layout, sender.place, theirs, place.size)
            self.targets.append(target)
            backlog = list(self._pushed)
            self._jobs += 1
        sender.inbox.greet(contact)

        def catch_up() -> None:
            for chunk, group in backlog:
                target.dispatch(chunk, group)

        sender.run(lambda: self._job(catch_up))

    # ---- its way

    def staging(self) -> bytes:
        """Descriptor of the staging memory, registered for this session alone."""
        with self._changed:
            if self._staging_region is None:
                memory = self._sender.staging.memory
                self._staging_region = self._sender.engine.register(memory, writable=False, label="packed KV pages")
            return self._staging_region.descriptor()

    def _dispatch(self, chunk: Chunk, group: int, targets: list[Target]) -> None:
        with self._changed:
            if self._ended:
                return
            self._dispatching += 1
        try:
            for target in targets:
                target.dispatch(chunk, group)
                if (failed := target.failed_op()) is not None:
                    raise failed
        finally:
            with self._changed:
                self._dispatching -= 1
                ended = self._ended
            if ended:  # meanwhile
                self._stop_ops()

    def _later(self, chunk: Chunk, group: int, event: Event | None, targets: list[Target]) -> None:
        """On the sender's thread."""

        def job() -> None:
            if event is not None:
                event.synchronize()
            self._dispatch(chunk, group, targets)

        self._job(job)

    def _job(self, job: Callable[[], object]) -> None:
        """One of `_jobs`, on the sender's thread."""
        self._guarded(job)
        with self._changed:
            self._jobs -= 1
            self._changed.notify_all()

    def _guarded(self, job: Callable[[], object]) -> None:
        """What goes wrong ends the session, an event's own error too."""
        try:
            if not self._ended:
                job()
        except Exception as error:
            self._fail(self._reason(error))

    def _drain(self) -> None:
        """Waits for all that has been pushed."""
        self._await(lambda: not self._jobs)
        for target in self.targets:
            for sent in list(target.sent):
                sent.op.wait(left(self.deadline))
                target.carried(sent)
        self._await(lambda: not any(target.unfetched or target.waiting for target in self.targets))

    def _await(self, reached: Callable[[], bool]) -> None:
        """`reached` becomes true with a note or a job."""
        with self._changed:
            while not reached() and self._error is None:
                self._changed.wait(left(self.deadline))
            if self._error is not None:
                raise self._error

    def _check_complete(self) -> None:
        for target in self.targets:
            for group, layers, positions in target.not_pushed():
                name = f" of group {self._sender.kv.layout.groups[group].name}" if len(target.pages) > 1 else ""
                raise InvalidArgument(
                    f"finished too early: positions {few(positions)} of the prompt's pages{name} were not pushed in "
                    f"layers {few(layers)}"
                )

    # ---- its end

    def hear(self, note: wire.Note) -> None:
        """A note of a decode side (inbox thread)."""
        target = next((t for t in self.targets if t.session_id == note.session and t.place.rank == note.rank), None)
        try:
            if note.kind == "failed":
                self._fail(wire.rebuild_error(note, "decode"), but=target)
            elif note.kind == "hello" and self.pulled:
                self._meet(note)
            elif target is not None and note.kind == "ack":
                target.transport = str(note.body["transport"])
                target.fetched(note.chunk)
            elif target is not None and note.kind == "closed":
                target.closed = True
        except Error as error:
            if note.kind == "hello":
                with contextlib.suppress(InvalidArgument):  # nobody who could be told
                    contact = wire.contact_of(note.body)
                    self._sender.inbox.post(contact, self._failed_note(note.session, error))
            self._fail(error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self._fail(InvalidArgument(f"not a note: {note.kind}, {type(error).__name__}: {error}"))
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Inbox thread, a few times a second."""
        if self._ended:
            return
        for target in list(self.targets):
            peer = target.peer or self._sender.inbox.known_peer(target.contact)
            if peer is not None and not peer.alive and not target.closed:
                self._fail(PeerLost("the decode engine is gone", peer=peer.name))
                return
        now = time.monotonic()
        if now >= self.deadline:
            self._fail(DeadlineExceeded("the session's deadline has passed"))
        elif now - self._said_alive >= ALIVE_S:
            self._said_alive = now
            for target in list(self.targets):
                if target.plan.wire != "none" and not target.closed:
                    target.say_alive()

    def closed(self, error: Error) -> None:
        self._fail(error)

    def _reason(self, error: BaseException) -> BaseException:
        """A push into pages that were withdrawn fails as KeyNotFound; the decode side says why in a moment."""
        if isinstance(error, KeyNotFound):
            return self._heard_why() or Cancelled(f"the decode side has withdrawn its pages: {error}")
        return error

    def _heard_why(self) -> Error | None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, wire.REASON_S)
            return self._error

    def _raised(self) -> Error:
        assert self._error is not None
        return self._error

    def _failed_note(self, session: bytes, error: BaseException) -> bytes:
        return wire.failed(session, wire.DECODE, error, attempt=self.attempt, rank=self._sender.place.rank)

    def _fail(self, error: BaseException, but: Target | None = None) -> None:
        """Ends the session without waiting for anything. `but`: who knows it."""
        with self._changed:
            if self._ended:
                return
            self._ended, self._ended_at = True, time.monotonic()
            self._error = error if isinstance(error, Error) else Error(f"{type(error).__name__}: {error}")
            self._error.failed_pages = self._unfinished()
            self._changed.notify_all()
        self._stop_ops()
        for target in self.targets:
            if target is not but:
                self._sender.inbox.post(target.contact, self._failed_note(target.session_id, error))
        self._sender.settler.add(self._quiet)

    def _stop_ops(self) -> None:
        for target in self.targets:
            for sent in list(target.sent):
                sent.op.cancel()

    def _unfinished(self) -> tuple[int, ...]:
        return tuple(sorted({page for target in self.targets for page in target.unfinished_pages()}))

    def _quiet(self) -> bool:
        """Settler: whether everything has ended. Our ops always do, by their deadline. A decode side that is stopped
        may hold its map of what it was to read for longer: it will see that the pages have been withdrawn."""
        if self._dispatching or not all(sent.op.done() for target in self.targets for sent in list(target.sent)):
            return False
        withdrawing = self._withdrawing()
        if not self._settled and (not withdrawing or time.monotonic() - self._ended_at >= _DOUBT_S):
            self._raised().failed_pages = self._unfinished()
            self._settle()
        if self._settled and not withdrawing:
            for target in self.targets:
                target.free_staging()
        return self._settled and not withdrawing

    def _withdrawing(self) -> bool:
        """Whether somebody may still read what was offered."""
        with self._changed:
            regions = [*self._regions, *([] if self._staging_region is None else [self._staging_region])]
        kept = []
        for region in regions:
            try:
                self._sender.engine.deregister(region, timeout=0)
            except Busy:
                kept.append(region)
            except Closed:  # the engine is gone, and all access with it
                pass
        with self._changed:
            self._regions, self._staging_region = kept, None
        return bool(kept)

    def _settle(self) -> None:
        self._sender.sessions.discard(self)
        for session in {self.id, *(target.session_id for target in self.targets)}:
            self._sender.inbox.dismiss(session, self.attempt, self._error)
        for target in self.targets:
            target.let_go()
        with self._changed:
            self._settled = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise Closed("this prefill session has ended")

    def __enter__(self) -> PrefillSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort(error or InvalidArgument("left without finish()"))


def check_layouts(ours: PagedKVLayout, our: wire.Place, theirs: PagedKVLayout, their: wire.Place, what: str) -> None:
    """LayoutMismatch naming everything that keeps the two from exchanging pages."""
    if found := ours.incompatibilities(theirs, our.size, their.size):
        raise LayoutMismatch(f"{what}: " + "; ".join(found))


def few(numbers: Sequence[int]) -> str:
    """ "3", "0..31", "0, 2, 5, 7 and 9 more"."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}..{numbers[-1]}"
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return ", ".join(map(str, numbers[:4])) + more
