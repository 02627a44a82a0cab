"""Whatever happens to either side, every session ends, says what is missing, and gives everything back."""

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import eventually, stop
from sides import DecodeSide, PrefillSide, cache, model_pages, settled

import torch_mooncake as tm
from torch_mooncake.kv import KVReceiver, KVSender, PageAllocator, wire

SHAPE = (4, 12, 2, 4, 2, 8)
LAYERS = SHAPE[0]
FOLDER = Path(__file__).parent
PREFILL = """
import sys; sys.path[:0] = [folder]
from sides import PrefillSide, cache
import torch_mooncake as tm
kv = cache(tuple(shape))
for number, layer in enumerate(kv.layers): layer.fill_(number + 1)
side = PrefillSide(kv, tuple(transports))
result = side.engine.addresses[0]
"""
DECODE = """
import sys; sys.path[:0] = [folder]
from sides import DecodeSide, cache
import torch_mooncake as tm
side = DecodeSide(cache(tuple(shape)), tuple(transports))
"""
ALL = ("local", "shm", "tcp")


@pytest.fixture
def decode():
    side = DecodeSide(cache(SHAPE))
    yield side
    side.close()


@pytest.fixture
def prefill():
    kv = cache(SHAPE)
    for layer, pages in zip(kv.layers, model_pages(*SHAPE[:2], *SHAPE[3:]), strict=True):
        layer.copy_(pages)
    side = PrefillSide(kv)
    yield side
    side.close()


@pytest.fixture
def other_prefill(child):
    """A prefill side in another process: `other(code)` runs there, with `side`."""

    def start(transports=ALL, shape=SHAPE):
        other = child()
        other(PREFILL, folder=str(FOLDER), shape=shape, transports=transports)
        return other

    return start


@pytest.fixture
def other_decode(child):
    def start(transports=ALL, shape=SHAPE):
        other = child()
        other(DECODE, folder=str(FOLDER), shape=shape, transports=transports)
        return other

    return start


def push_some(other, ticket: bytes, layers, pages=(3, 1), wire="auto") -> None:
    other(
        "push = side.sender.open(bytes.fromhex(ticket), wire=wire)\n"
        "for layer in layers: push.push_layer(layer, pages)",
        ticket=ticket.hex(), layers=list(layers), pages=list(pages), wire=wire,
    )  # fmt: skip


# ---- somebody dies, or stands still


BOTH = [
    pytest.param(("shm",), "direct", id="shm-direct"),
    pytest.param(("tcp",), "packed", id="tcp-packed"),
    pytest.param(("shm",), "packed", id="shm-packed", marks=pytest.mark.slow),
    pytest.param(("tcp",), "direct", id="tcp-direct", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("transports", "wire"), BOTH)
def test_prefill_killed_after_a_layer(decode, other_prefill, transports, wire):
    """Its death is seen without the decode side having named it; what has arrived is kept."""
    other = other_prefill(transports)
    session = decode.receiver.open(3, prompt_pages=2, timeout=60, keep_pages=True)
    push_some(other, session.ticket(), [0, 1], wire=wire)
    session.wait_layer(0)
    session.wait_layer(1)
    assert decode.kv.layers[1][session.pages[:2]].eq(2).all()
    other.kill()
    with pytest.raises(tm.PeerLost) as caught:
        session.wait_layer(2)
    assert caught.value.failed_pages == tuple(session.pages[:2])  # none is whole: layers 2 and 3 never came
    assert session.layers == [0, 1]
    assert session.state == "failed"
    assert session.kept_pages == [[]]
    assert settled(decode)


def test_pages_that_arrived_whole_are_kept(decode, other_prefill):
    other = other_prefill()
    session = decode.receiver.open(4, prompt_pages=3, timeout=60, keep_pages=True)
    push_some(other, session.ticket(), range(LAYERS), pages=[5, 6])  # the third never comes
    assert eventually(lambda: session.failed_pages == [[session.pages[2]]])
    other.kill()
    with pytest.raises(tm.PeerLost) as caught:
        session.wait()
    assert caught.value.failed_pages == (session.pages[2],)
    assert session.kept_pages == [session.pages[:2]]
    for number, layer in enumerate(decode.kv.layers):
        assert layer[session.kept_pages[0]].eq(number + 1).all()
    decode.allocator.free(session.kept_pages[0])
    assert settled(decode)


def test_prefill_stopped_its_pages_come_back_when_it_dies(decode, other_prefill):
    """A stopped process may still write through its map: its pages are in quarantine, counted, until it is gone."""
    other = other_prefill(("shm",))
    session = decode.receiver.open(3, timeout=60)
    push_some(other, session.ticket(), [0])
    session.wait_layer(0)
    stop(other.pid)
    session.cancel()
    assert session.state == "cancelled"
    assert (decode.allocator.quarantined, decode.allocator.available) == (3, 9)
    assert decode.receiver.settler.waiting == 1
    other.kill()
    assert settled(decode)
    assert decode.allocator.quarantined == 0


def test_prefill_continued_after_the_end(decode, other_prefill):
    """It may write into pages in quarantine, until it hears that they were withdrawn. Into pages that came back it
    writes nothing."""
    other = other_prefill(("shm",))
    session = decode.receiver.open(2, timeout=60)
    push_some(other, session.ticket(), [0])
    session.wait_layer(0)
    stop(other.pid)
    session.cancel()
    assert decode.allocator.quarantined == 2
    other.process.send_signal(signal.SIGCONT)
    push = "try:\n    push.push_layer(1, [0, 1]); push.finish(); result = 'done'\n"
    push += "except tm.Error as error:\n    result = type(error).__name__"
    assert other(push) == "Cancelled"
    assert settled(decode)
    decode.kv.layers[1].fill_(-2)
    assert other(push) == "Cancelled"
    assert decode.kv.layers[1].eq(-2).all()
    assert other("result = push.state") == "cancelled"


@pytest.mark.parametrize(("transports", "wire"), BOTH)
def test_decode_killed(prefill, other_decode, transports, wire):
    other = other_decode(transports)
    ticket = bytes.fromhex(other("session = side.receiver.open(2, timeout=60)\nresult = session.ticket().hex()"))
    push = prefill.sender.open(ticket, wire=wire)
    push.push_layer(0, [1, 2])
    other("session.wait_layer(0)")
    other.kill()
    assert eventually(lambda: push.state == "failed")  # though nobody pushes
    with pytest.raises(tm.PeerLost):
        push.push_layer(1, [1, 2])
    with pytest.raises(tm.PeerLost):
        push.finish()
    assert settled(prefill)


def test_prefill_killed_while_it_is_pulled_from(decode, other_prefill):
    other = other_prefill()
    ticket = bytes.fromhex(
        other("push = side.sender.offer()\npush.push_layer(0, [4, 2])\nresult = push.ticket().hex()")
    )
    session = decode.receiver.pull(ticket, 2, prompt_pages=2)
    session.wait_layer(0)
    assert decode.kv.layers[0][session.pages].eq(1).all()
    other.kill()
    with pytest.raises(tm.PeerLost) as caught:
        session.wait()
    assert caught.value.failed_pages == tuple(session.pages)
    assert settled(decode)


def test_decode_killed_while_it_pulls(prefill, other_decode):
    other = other_decode()
    push = prefill.sender.offer()
    other(
        "session = side.receiver.pull(bytes.fromhex(ticket), 2, prompt_pages=2)", ticket=push.ticket().hex()
    )  # fmt: skip
    push.push_layer(0, [4, 2])
    other("session.wait_layer(0)")
    other.kill()

    def the_rest() -> None:
        for layer in range(1, LAYERS):
            push.push_layer(layer, [4, 2])
        push.finish()

    with pytest.raises(tm.PeerLost):
        the_rest()
    assert settled(prefill)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_stopped_decode_side_holds_nothing_up(prefill, other_decode, mode):
    """The prefill session ends at its deadline, and its own pages are free then."""
    other = other_decode(("shm",))
    if mode == "push":
        ticket = bytes.fromhex(other("session = side.receiver.open(2)\nresult = session.ticket().hex()"))
        push = prefill.sender.open(ticket, timeout=3)
    else:
        push = prefill.sender.offer(timeout=3)
        other("session = side.receiver.pull(bytes.fromhex(ticket), 2)", ticket=push.ticket().hex())
    push.push_layer(0, [4, 2])
    other("session.wait_layer(0)")
    stop(other.pid)

    def the_rest() -> None:
        for layer in range(1, LAYERS):
            push.push_layer(layer, [4, 2])
        push.finish()

    with pytest.raises(tm.DeadlineExceeded):
        the_rest()
    assert eventually(lambda: push.state == "timeout")
    other.kill()
    assert settled(prefill)


# ---- cancelling


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)], ids="".join)
@pytest.mark.parametrize("wire", ["direct", "packed"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_cancelled_in_the_middle_of_a_layer(who, wire, transports):
    """Megabytes under way: after the end not one of them lands any more, and all is given back."""
    shape = (2, 24, 2, 16, 8, 128)  # 128 KiB a page and plane
    decode, prefill = DecodeSide(cache(shape), transports), PrefillSide(cache(shape), transports)
    prefill.kv.layers[0].fill_(1)
    session = decode.receiver.open(20, timeout=60, wire=wire)
    push = prefill.sender.open(session.ticket())
    push.push_layer(0, list(range(20)))
    push.push_layer(1, list(range(9)))
    push.push_layer(1, list(range(9, 15)), start=9)
    (push if who == "prefill" else session).cancel()
    assert eventually(lambda: session.state == push.state == "cancelled")
    assert eventually(lambda: decode.allocator.available == 24)
    pages = decode.allocator.take(24)
    for layer in decode.kv.layers:
        layer.fill_(-2)
    for layer in prefill.kv.layers:
        layer.fill_(-3)
    with pytest.raises(tm.Cancelled):
        push.push_layer(1, [15], start=15)
    with pytest.raises(tm.Cancelled):
        session.wait()
    decode.allocator.free(pages)
    assert settled(decode, prefill)
    assert all(layer.eq(-2).all() for layer in decode.kv.layers)
    prefill.close()
    decode.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_cancelled_while_pulled(decode, prefill, who):
    push = prefill.sender.offer()
    session = decode.receiver.pull(push.ticket(), 3, prompt_pages=3)
    push.push_layer(0, [1, 2, 3])
    session.wait_layer(0)
    push.push_layer(1, [1])
    (push if who == "prefill" else session).cancel()
    assert eventually(lambda: session.state == push.state == "cancelled")
    for call in (lambda: push.push_layer(1, [2]), push.finish, session.wait, lambda: session.wait_layer(1)):
        with pytest.raises(tm.Cancelled):
            call()
    assert settled(decode, prefill)


def test_one_rank_cancels_and_all_hear_of_it():
    """Fan-in and fan-out: one decode rank's end is everybody's."""
    sides = [PrefillSide(cache((*SHAPE[:4], 2, 8)), tp_rank=rank, tp_size=2) for rank in range(2)]
    sinks = [DecodeSide(cache((*SHAPE[:4], 1, 8)), tp_rank=rank, tp_size=4) for rank in range(4)]
    sessions = [side.receiver.open(2) for side in sinks]
    tickets = [session.ticket() for session in sessions]
    pushes = [side.sender.open(tickets) for side in sides]
    for push in pushes:
        push.push_layer(0, [0, 1])
    for session in sessions:
        session.wait_layer(0)
    sessions[1].cancel()  # fed by prefill rank 0, which tells all whose tickets it has, which tell prefill rank 1
    assert eventually(lambda: {each.state for each in [*sessions, *pushes]} == {"cancelled"})
    assert settled(*sides, *sinks)
    for side in [*sides, *sinks]:
        side.close()


# ---- the wrong session, the wrong page


@pytest.mark.parametrize("end", ["done", "cancelled", "timeout"])
def test_a_stale_ticket_fails(decode, prefill, end):
    """vllm #52234: a reference to pages that are somebody else's by now must fail."""
    session = decode.receiver.open(2, timeout=0.3 if end == "timeout" else 30)
    ticket = session.ticket()
    if end == "done":
        with prefill.sender.open(ticket) as push:
            for layer in range(LAYERS):
                push.push_layer(layer, [1, 2])
            push.finish()
        session.wait()
        decode.allocator.free(session.pages)
    elif end == "cancelled":
        session.cancel()
    assert eventually(lambda: session.state == end)
    assert settled(decode)
    successor = decode.receiver.open(2)
    assert set(successor.pages) == set(session.pages)
    with pytest.raises(tm.KeyNotFound):
        prefill.sender.open(ticket, timeout=5)
    assert successor.state == "pending"
    assert successor.layers == []
    successor.cancel()


def test_a_stale_offer_fails(decode, prefill):
    push = prefill.sender.offer()
    ticket = push.ticket()
    push.cancel()
    assert settled(prefill)
    with pytest.raises(tm.KeyNotFound):
        decode.receiver.pull(ticket, 2)
    assert settled(decode)


def test_a_request_that_was_preempted_and_comes_again(decode, prefill):
    """vllm #51637: the notes of its first life never count for the second one."""
    first = decode.receiver.open(2, prompt_pages=2)
    old = prefill.sender.open(first.ticket())
    old.push_layer(0, [1, 2])
    first.wait_layer(0)
    first.cancel()
    assert eventually(lambda: old.state == "cancelled")
    second = decode.receiver.open(2, prompt_pages=2)
    assert second.id != first.id
    strays = decode.receiver.stray_notes
    contact = decode.receiver.inbox.contact
    late = [wire.Note(first.id, "layer", wire.DECODE, old.attempt, 0, layer, 0, 2, layer) for layer in range(LAYERS)]
    late.append(wire.Note(first.id, "done", wire.DECODE, old.attempt, body={"meta": {}, "pages": [2], "chunks": 4}))
    for note in late:
        prefill.sender.inbox.send(contact, wire.encode(note), 5).wait(5)
    assert eventually(lambda: decode.receiver.stray_notes == strays + len(late))
    assert (second.state, second.layers) == ("pending", [])
    with prefill.sender.open(second.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [3, 4])
        push.finish()
    second.wait()
    decode.allocator.free(second.pages)
    assert settled(decode, prefill)


def test_a_ticket_used_twice(decode, prefill):
    """Whose pages would be right? Neither's, so both end, the second one before it has written a byte."""
    session = decode.receiver.open(2)
    first = prefill.sender.open(session.ticket())
    first.push_layer(0, [1, 2])
    session.wait_layer(0)
    with pytest.raises(tm.InvalidArgument, match="opened the ticket twice"):
        prefill.sender.open(session.ticket())
    with pytest.raises(tm.InvalidArgument, match="opened the ticket twice"):
        session.wait()
    assert eventually(lambda: first.state == "failed")
    assert settled(decode, prefill)


def test_prefill_ranks_that_disagree(decode, prefill):
    session = decode.receiver.open(2)
    one = prefill.sender.open(session.ticket())
    one.push_layer(0, [1, 2])
    session.wait_layer(0)
    half = PrefillSide(cache((*SHAPE[:4], 1, 8)), tp_rank=1, tp_size=2)
    with pytest.raises(tm.LayoutMismatch, match="of 1 ranks, and one of 2"):
        half.sender.open(session.ticket())
    with pytest.raises(tm.LayoutMismatch, match="of 1 ranks, and one of 2"):
        session.wait()
    assert eventually(lambda: isinstance(one.error, tm.LayoutMismatch))
    assert settled(decode, prefill)
    half.close()


def test_mismatch_is_known_at_once_on_both_sides(prefill):
    """Every difference is named, nobody waits for a deadline, and no byte moves."""
    decode = DecodeSide(cache((3, 12, 2, 8, 2, 16), dtype=torch.float16))
    session = decode.receiver.open(2, timeout=600)
    differences = ["page_size 4 here, 8 there", "head_dim 8 here, 16 there", "num_layers 4 here, 3 there"]
    differences.append("dtype float32 here, float16 there")
    with pytest.raises(tm.LayoutMismatch) as caught:
        prefill.sender.open(session.ticket())
    assert all(text in str(caught.value) for text in differences)
    with pytest.raises(tm.LayoutMismatch) as caught:
        session.wait()
    assert all(text in str(caught.value) for text in differences)
    offer = prefill.sender.offer(timeout=600)
    with pytest.raises(tm.LayoutMismatch, match="page_size 8 here, 4 there"):
        decode.receiver.pull(offer.ticket(), 2)
    with pytest.raises(tm.LayoutMismatch, match="page_size 8 here, 4 there"):
        offer.finish()
    assert all(layer.eq(-1).all() for layer in decode.kv.layers)
    assert settled(decode, prefill)
    decode.close()


def forged(ticket: bytes, pages: list[int]) -> bytes:
    message = wire.decode_ticket(ticket)
    message.pages = [np.asarray(pages, np.int64).tobytes()]
    return wire.encode(message)


@pytest.mark.parametrize(
    ("pages", "error", "text"),
    [([3, 3], tm.InvalidArgument, "a page twice"), ([0, 12], tm.OutOfBounds, "12"), ([-1, 0], tm.OutOfBounds, "-1")],
)
def test_tickets_that_name_wrong_pages(decode, prefill, pages, error, text):
    session = decode.receiver.open(2)
    with pytest.raises(error, match=text):
        prefill.sender.open(forged(session.ticket(), pages))
    with pytest.raises(error, match=text):
        session.wait()
    assert settled(decode, prefill)


def test_local_pages(decode, prefill):
    """The same page may go to two places; one that does not exist is named, and the session goes on."""
    session = decode.receiver.open(3, prompt_pages=3)
    with prefill.sender.open(session.ticket()) as push:
        for pages, value in ([5, 12, 5], 12), ([5, -1, 5], -1):
            with pytest.raises(tm.OutOfBounds, match=f"page {value} is not in 0..11"):
                push.push_layer(0, pages)
        with pytest.raises(tm.InvalidArgument, match="3 pages from 1 do not fit the 3"):
            push.push_layer(0, [1, 2, 3], start=1)
        for layer in range(LAYERS):
            push.push_layer(layer, torch.tensor([5, 7, 5], dtype=torch.int32))
        push.finish()
    session.wait()
    for layer in range(LAYERS):
        assert torch.equal(decode.kv.layers[layer][session.pages], prefill.kv.layers[layer][[5, 7, 5]])
    decode.allocator.free(session.pages)


def test_every_page_is_there_already(decode, prefill):
    """An empty prompt hit: nothing to push, and no layer to wait for."""
    session = decode.receiver.open(2, prompt_pages=0)
    for layer in range(LAYERS):
        session.wait_layer(layer)
    with prefill.sender.open(session.ticket()) as push:
        assert push.finish({"first_token": 3}).nbytes == 0
    assert session.wait() == {"first_token": 3}
    push = prefill.sender.offer()
    pulled = decode.receiver.pull(push.ticket(), 2, prompt_pages=0)
    assert push.finish({"first_token": 4}).nbytes == 0
    assert pulled.wait() == {"first_token": 4}
    for each in (session, pulled):
        decode.allocator.free(each.pages)
    assert settled(decode, prefill)


def test_room_for_the_answer_does_not_count(decode, prefill):
    session = decode.receiver.open(7, prompt_pages=3)
    with prefill.sender.open(session.ticket()) as push:
        push.push_layer(0, [1, 2])
        push.push_layer(0, [3], start=2)
        session.wait_layer(0)
        for layer in range(1, LAYERS):
            push.push_layer(layer, [1, 2, 3])
        push.finish()
    session.wait()
    decode.allocator.free(session.pages)


def test_a_layer_counts_when_all_chunks_are_there(decode, prefill):
    """Chunked prefill: all layers of the first chunk, then all of the second."""
    session = decode.receiver.open(4, prompt_pages=4)
    with prefill.sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [1, 2, 3])
        assert eventually(lambda: session.failed_pages == [session.pages[3:]])
        assert session.layers == []
        for layer in range(LAYERS):
            push.push_layer(layer, [9], start=3)
            session.wait_layer(layer)
            assert torch.equal(decode.kv.layers[layer][session.pages], prefill.kv.layers[layer][[1, 2, 3, 9]])
        push.finish()
    session.wait()
    decode.allocator.free(session.pages)


def test_finished_too_early(decode, prefill):
    session = decode.receiver.open(4, prompt_pages=4)
    push = prefill.sender.open(session.ticket())
    for layer in range(LAYERS):
        push.push_layer(layer, [1, 2, 3] if layer == 2 else [1, 2, 3, 4])
    with pytest.raises(tm.InvalidArgument, match="positions 3 of the prompt's pages were not pushed in layers 2"):
        push.finish()
    with pytest.raises(tm.InvalidArgument, match="positions 3") as caught:
        session.wait()
    assert caught.value.failed_pages == (session.pages[3],)
    assert settled(decode, prefill)


# ---- events, and the order of things


class Event:
    """As much of a torch.cuda.Event as sessions use."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: Exception | None = None

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(60)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("wire", ["direct", "packed"])
def test_a_push_waits_for_its_event_and_the_caller_does_not(decode, prefill, wire):
    session = decode.receiver.open(2, wire=wire)
    events = [Event() for _ in range(LAYERS)]
    with prefill.sender.open(session.ticket()) as push:
        for layer, event in enumerate(events):
            push.push_layer(layer, [4, 5], event=event)  # returns, though nothing has been computed
        for layer, event in enumerate(events):
            assert session.layers == list(range(layer))
            prefill.kv.layers[layer][[4, 5]] = 40.0 + layer  # the kernel that the event stands for
            event.happened.set()
            session.wait_layer(layer)
            assert decode.kv.layers[layer][session.pages].eq(40 + layer).all()
        push.finish()
    session.wait()
    decode.allocator.free(session.pages)


def test_a_kernel_that_failed_ends_the_session(decode, prefill):
    session = decode.receiver.open(1)
    push = prefill.sender.open(session.ticket())
    event = Event()
    event.error = RuntimeError("CUDA error: an illegal memory access")
    push.push_layer(0, [1], event=event)
    event.happened.set()
    with pytest.raises(tm.Error, match="illegal memory access"):
        push.finish()
    with pytest.raises(tm.PeerLost, match="illegal memory access"):
        session.wait()
    assert settled(decode, prefill)


def test_the_first_layer_is_there_before_half_of_them_are_computed(decode, other_prefill):
    """By the order of events: prefill stands before layer L/2 until we have heard of, and seen, layer 0."""
    other = other_prefill()
    session = decode.receiver.open(2, prompt_pages=2)
    half = LAYERS // 2
    push_some(other, session.ticket(), range(half))
    session.wait_layer(0)
    assert decode.kv.layers[0][session.pages].eq(1).all()
    assert half not in session.layers
    other("for layer in layers: push.push_layer(layer, [3, 1])\npush.finish()", layers=list(range(half, LAYERS)))
    session.wait()
    decode.allocator.free(session.pages)


def test_deadline_on_both_sides_though_nobody_waits(decode, prefill):
    session = decode.receiver.open(2, timeout=1.5)
    push = prefill.sender.open(session.ticket())
    push.push_layer(0, [1, 2])
    session.wait_layer(0)
    assert eventually(lambda: (session.state, push.state) == ("timeout", "timeout"))
    with pytest.raises(tm.DeadlineExceeded):
        push.push_layer(1, [1, 2])
    with pytest.raises(tm.DeadlineExceeded) as caught:
        session.wait_layer(1)
    assert caught.value.failed_pages == tuple(session.pages)
    offer = prefill.sender.offer(timeout=0.3)
    assert eventually(lambda: offer.state == "timeout")
    assert settled(decode, prefill)


def test_closing_a_sender_ends_its_sessions(decode):
    side = PrefillSide(cache(SHAPE))
    session = decode.receiver.open(2)
    push = side.sender.open(session.ticket())
    push.push_layer(0, [1, 2])
    side.close()
    with pytest.raises(tm.Closed):
        push.push_layer(1, [1, 2])
    with pytest.raises(tm.Error):
        session.wait()
    assert session.state == "failed"
    assert settled(decode)


def test_both_sides_on_one_engine():
    """A worker that does both: one inbox, no confusion."""
    engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token="t")
    source, sink = cache(SHAPE), cache(SHAPE)
    source.layers[2].fill_(5)
    receiver, sender = KVReceiver(engine, sink, PageAllocator(12)), KVSender(engine, source)
    assert receiver.inbox is sender.inbox
    session = receiver.open(1)
    with sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [0])
        push.finish()
    session.wait()
    assert sink.layers[2][session.pages].eq(5).all()
    sender.close()
    receiver.close()
    engine.close()


@pytest.mark.parametrize("garbage", "abcdef")
def test_notes_that_make_no_sense_end_only_their_session(decode, prefill, garbage):
    session, bystander = decode.receiver.open(2), decode.receiver.open(2)
    push = prefill.sender.open(session.ticket())
    push.push_layer(0, [1, 2])
    session.wait_layer(0)
    note = {
        "a": wire.Note(session.id, "layer", wire.DECODE, push.attempt, 0, 77, 0, 1),
        "b": wire.Note(session.id, "layer", wire.DECODE, push.attempt, 0, 1, 1, 9),
        "c": wire.Note(session.id, "done", wire.DECODE, push.attempt),
        "d": wire.Note(session.id, "packed", wire.DECODE, push.attempt, 0, 1, 0, 2, body={"wire": "packed"}),
        "e": wire.Note(session.id, "ready", wire.DECODE, push.attempt, 0, 1, 0, 2, body={"pages": b"1234567"}),
        "f": wire.Note(session.id, "hello", wire.DECODE, push.attempt, 0, body={"place": 3}),
    }[garbage]
    prefill.sender.inbox.send(decode.receiver.inbox.contact, wire.encode(note), 5).wait(5)
    with pytest.raises(tm.Error):
        session.wait()
    assert session.state == "failed"
    assert bystander.state == "pending"
    bystander.cancel()
    push.cancel()
    assert settled(decode, prefill)


# ---- engines that cannot be dialled


def dialling_only(**options) -> PrefillSide:
    """A prefill side whose engine does not listen: nobody can dial it."""
    side = PrefillSide.__new__(PrefillSide)
    side.kv = cache(SHAPE, "PKHND")  # short runs: packing would pay
    side.engine = tm.Engine(listen=[], token="t", name="quiet prefill", transports=("tcp",))
    side.sender = KVSender(side.engine, side.kv, **options)
    side.regions_at_rest = side.engine.stats()["regions"]
    return side


def test_a_prefill_engine_that_does_not_listen(decode):
    """It can push directly, hears of a cancellation by its next push, and is missed when it falls silent."""
    side = dialling_only()
    session = decode.receiver.open(2, wire="direct")
    with side.sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [1, 2])
        push.finish()
    session.wait()
    decode.allocator.free(session.pages)
    with pytest.raises(tm.InvalidArgument, match="does not listen"):
        side.sender.open(decode.receiver.open(1, wire="packed").ticket())
    with pytest.raises(tm.InvalidArgument, match="does not listen"):
        side.sender.offer()
    assert side.sender.open(decode.receiver.open(1).ticket()).plan.wire == "direct"
    assert "does not listen" in side.sender.open(decode.receiver.open(1).ticket()).explain()
    session = decode.receiver.open(2)
    push = side.sender.open(session.ticket())
    session.cancel()
    assert eventually(lambda: refused(lambda: push.push_layer(0, [1, 2])))
    assert eventually(lambda: push.state == "cancelled")
    session = decode.receiver.open(2, timeout=60)
    side.sender.open(session.ticket())
    assert not eventually(lambda: session.state != "pending", 6)  # it says that it lives
    side.close()
    with pytest.raises(tm.Error):
        session.wait()
    for left_over in decode.receiver.sessions:
        left_over.cancel()
    assert settled(decode)


def refused(call) -> bool:
    try:
        call()
    except tm.Cancelled:
        return True
    return False


def test_another_engine_at_the_address(decode, prefill):
    """As of a host that calls itself 127.0.0.1: never mistaken for the one that was meant."""
    session = decode.receiver.open(1)
    message = wire.decode_ticket(session.ticket())
    message.contact.engine = bytes(16)
    with pytest.raises(tm.PeerLost, match="another engine answers"):
        prefill.sender.open(wire.encode(message))
    session.cancel()
