"""Prefill/decode sessions: the right bytes at the right time, and an end for every session."""

import base64
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from caches import LAYERS, decode_cache, prefill_cache
from processes import eventually

import torch_mooncake as tm
from torch_mooncake.kv import KVReceiver, KVSender, PageAllocator, PagedKV, wire

PUSHER = Path(__file__).with_name("pusher.py")


class Decode:
    def __init__(self, kv: PagedKV, transports=("local", "shm", "tcp")) -> None:
        self.kv = kv
        self.engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token="t", name="decode", transports=transports)
        self.allocator = PageAllocator(kv.layout.num_pages)
        self.receiver = KVReceiver(self.engine, kv, self.allocator)
        self.regions_at_rest = self.engine.stats()["regions"]

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class Prefill:
    def __init__(self, transports=("local", "shm", "tcp"), token="t") -> None:
        self.kv = prefill_cache()
        self.engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token=token, name="prefill", transports=transports)
        self.sender = KVSender(self.engine, self.kv)

    def close(self) -> None:
        self.sender.close()
        self.engine.close()


@pytest.fixture(params=[("local",), ("shm",), ("tcp",)], ids="".join)
def sides(request):
    decode, prefill = Decode(decode_cache(), request.param), Prefill(request.param)
    yield decode, prefill
    prefill.close()
    decode.close()


@pytest.fixture
def decode():
    side = Decode(decode_cache())
    yield side
    side.close()


@pytest.fixture
def prefill():
    side = Prefill()
    yield side
    side.close()


def at_rest(decode: Decode) -> bool:
    """No session, no page taken, and no region but those of the receiver itself."""
    receiver = decode.receiver
    return (
        not receiver.sessions
        and not receiver.settler.waiting
        and decode.allocator.available == decode.kv.layout.num_pages
        and decode.engine.stats()["regions"] == decode.regions_at_rest + receiver.own_regions
    )


def test_pages_arrive_where_they_were_reserved(sides):
    decode, prefill = sides
    session = decode.receiver.open(3)
    with prefill.sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [7, 2, 11])
        result = push.finish({"first_token": 42})
    assert session.wait() == {"first_token": 42}
    for layer in range(LAYERS):
        assert torch.equal(decode.kv.layers[layer][session.pages], prefill.kv.layers[layer][[7, 2, 11]])
        others = [page for page in range(decode.kv.layout.num_pages) if page not in session.pages]
        assert decode.kv.layers[layer][others].eq(-1).all()
    assert result.nbytes == 3 * LAYERS * prefill.kv.layout.page_nbytes
    assert session.state == "done"
    decode.allocator.free(session.pages)
    assert eventually(lambda: at_rest(decode))


def test_a_layer_is_heard_of_before_the_next_is_pushed(sides):
    decode, prefill = sides
    session = decode.receiver.open(2)
    with prefill.sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [4, 5])
            session.wait_layer(layer)
            assert torch.equal(decode.kv.layers[layer][session.pages], prefill.kv.layers[layer][[4, 5]])
            assert session.state == "pending"
        push.finish()
    assert session.wait() == {}


def test_pages_in_several_pushes(sides):
    decode, prefill = sides
    session = decode.receiver.open(3)
    with prefill.sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [1], start=2)
            push.push_layer(layer, [8, 9])
        push.finish()
    session.wait()
    assert torch.equal(decode.kv.layers[3][session.pages], prefill.kv.layers[3][[8, 9, 1]])


def test_sessions_at_the_same_time_do_not_mix(sides):
    decode, prefill = sides
    sessions = [decode.receiver.open(1) for _ in range(8)]

    def push(index: int) -> None:
        with prefill.sender.open(sessions[index].ticket()) as going:
            for layer in range(LAYERS):
                going.push_layer(layer, [index])
            going.finish({"index": index})

    threads = [threading.Thread(target=push, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for index, session in enumerate(sessions):
        assert session.wait() == {"index": index}
        for layer in range(LAYERS):
            assert torch.equal(decode.kv.layers[layer][session.pages[0]], prefill.kv.layers[layer][index])
    for thread in threads:
        thread.join()


def test_zero_pages(sides):
    decode, prefill = sides
    session = decode.receiver.open(0)
    with prefill.sender.open(session.ticket()) as push:
        for layer in range(LAYERS):
            push.push_layer(layer, [])
        assert push.finish().nbytes == 0
    assert session.wait() == {}
    assert eventually(lambda: at_rest(decode))


@pytest.mark.parametrize(
    ("other", "named"), [({"heads": 3}, "kv_heads 2 here, 3 there"), ({"size": 8}, "page_size 4 here, 8 there")]
)
def test_another_layout_is_refused_by_name(prefill, other, named):
    decode = Decode(decode_cache(**other))
    session = decode.receiver.open(2)
    with pytest.raises(tm.LayoutMismatch, match=named):
        prefill.sender.open(session.ticket())
    session.cancel()
    assert eventually(lambda: at_rest(decode))
    decode.close()


def test_cancel_on_the_decode_side_fences_the_pages(sides):
    decode, prefill = sides
    session = decode.receiver.open(2)
    push = prefill.sender.open(session.ticket())
    push.push_layer(0, [1, 2])
    session.wait_layer(0)
    session.cancel()
    assert session.state == "cancelled"
    assert eventually(lambda: at_rest(decode))
    with pytest.raises(tm.Cancelled):
        session.wait()
    again = decode.allocator.take(decode.kv.layout.num_pages)  # all of them, the session's too
    decode.kv.layers[1].fill_(-2)

    def go_on() -> None:
        push.push_layer(1, [1, 2])
        push.finish()

    with pytest.raises(tm.Error):
        go_on()
    assert decode.kv.layers[1].eq(-2).all()
    decode.allocator.free(again)


def test_the_prefill_sides_error_arrives_as_itself(decode, prefill):
    def fail_in_layer_1(push) -> None:
        push.push_layer(0, [0])
        raise ZeroDivisionError("in layer 1")

    session = decode.receiver.open(1)
    with pytest.raises(ZeroDivisionError), prefill.sender.open(session.ticket()) as push:
        fail_in_layer_1(push)
    with pytest.raises(tm.PeerLost, match="ZeroDivisionError: in layer 1"):
        session.wait()
    session = decode.receiver.open(1)
    with pytest.raises(tm.PoolFull), prefill.sender.open(session.ticket()):
        raise tm.PoolFull("no room here")
    with pytest.raises(tm.PoolFull, match="no room here"):
        session.wait()
    assert eventually(lambda: at_rest(decode))


def test_a_session_ends_at_its_deadline_though_nobody_waits(decode):
    session = decode.receiver.open(3, timeout=0.3)
    assert eventually(lambda: session.state == "timeout")
    assert eventually(lambda: at_rest(decode))
    with pytest.raises(tm.DeadlineExceeded):
        session.wait()
    with pytest.raises(tm.DeadlineExceeded):
        session.wait_layer(0)


def test_a_ticket_after_its_session(decode, prefill):
    session = decode.receiver.open(1)
    ticket = session.ticket()
    session.cancel()
    with pytest.raises(tm.KeyNotFound):
        prefill.sender.open(ticket)


def test_reservation_is_bounded(decode):
    sessions = [decode.receiver.open(10), decode.receiver.open(10)]
    with pytest.raises(tm.PoolFull):
        decode.receiver.open(1)
    for session in sessions:
        session.cancel()
    assert eventually(lambda: at_rest(decode))


def test_wrong_pages_and_layers(decode, prefill):
    session = decode.receiver.open(2)
    with prefill.sender.open(session.ticket()) as push:
        with pytest.raises(tm.OutOfBounds, match="page 12"):
            push.push_layer(0, [0, 12])
        with pytest.raises(tm.InvalidArgument, match="3 pages from 0"):
            push.push_layer(0, [0, 1, 2])
        with pytest.raises(tm.InvalidArgument, match="layer 4"):
            push.push_layer(LAYERS, [0])
    with pytest.raises(tm.InvalidArgument, match="layer -1"):
        session.wait_layer(-1)
    with pytest.raises(tm.InvalidArgument):  # left without finish()
        session.wait()
    with pytest.raises(tm.InvalidArgument, match="left without finish"):
        push.finish()


def test_what_is_not_a_ticket(prefill):
    for garbage in (b"", b"\x00" * 40, msgspec.msgpack.encode({"version": 2}), msgspec.msgpack.encode([2, 2, 3])):
        with pytest.raises(tm.InvalidArgument, match="not a ticket"):
            prefill.sender.open(garbage)
    with pytest.raises(tm.VersionMismatch, match="version 9"):
        prefill.sender.open(msgspec.msgpack.encode([9, b"", [], {}, [], [], 1.0]))


def test_a_ticket_without_the_token_is_no_use(decode):
    session = decode.receiver.open(1)
    stranger = Prefill(token="other")
    with pytest.raises(tm.AuthError):
        stranger.sender.open(session.ticket(), timeout=5)
    stranger.close()
    session.cancel()


def test_notifications_of_others_are_left_alone(decode, prefill):
    session = decode.receiver.open(1)
    with prefill.sender.open(session.ticket()) as push:
        for data in (b"hello", wire.encode(wire.Note(b"unknown session!", "layer", wire.DECODE))):
            prefill.sender.inbox.send(decode.receiver.inbox.contact, data, 5).wait(5)
        for layer in range(LAYERS):
            push.push_layer(layer, [0])
        push.finish()
    session.wait()
    assert eventually(lambda: decode.receiver.stray_notes == 1)


def test_closing_the_receiver_ends_its_sessions():
    side = Decode(decode_cache())
    session = side.receiver.open(2)
    side.close()
    with pytest.raises(tm.Closed):
        session.wait()
    with pytest.raises(tm.Closed):
        side.receiver.open(1)


# ---- two processes --------------------------------------------------------------------------------------------------
class Pusher:
    """pusher.py as a child: `ticket` sends it off, `process` is killed at the end."""

    def __init__(self, layers: int, pages: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PUSHER), str(layers), pages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.line()

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def ticket(self, data: bytes) -> None:
        self.process.stdin.write(base64.b64encode(data).decode() + "\n")
        self.process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_from_another_process(shared):
    decode = Decode(decode_cache(shared=shared))
    source = prefill_cache()
    with Pusher(LAYERS, "3,1") as pusher:
        session = decode.receiver.open(2)
        pusher.ticket(session.ticket())
        assert session.wait() == {"first_token": 5}
        for layer in range(LAYERS):
            assert torch.equal(decode.kv.layers[layer][session.pages], source.layers[layer][[3, 1]])
        assert int(pusher.line()) == 2 * LAYERS * source.layout.page_nbytes
    decode.allocator.free(session.pages)
    assert eventually(lambda: at_rest(decode))
    decode.close()


@pytest.mark.parametrize("layers", [0, 2])
def test_prefill_killed_after_some_layers(decode, layers):
    with Pusher(layers, "0") as pusher:
        peer = decode.engine.connect(pusher.address, timeout=10)
        session = decode.receiver.open(1, timeout=60, peer=peer)
        pusher.ticket(session.ticket())
        assert pusher.line() == "pushed"
        assert session.state == "pending"
        pusher.process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(tm.PeerLost):
            session.wait()
        assert time.monotonic() - killed < 3
    assert eventually(lambda: at_rest(decode))


def test_prefill_stopped_in_the_middle_ends_at_the_deadline(decode):
    with Pusher(2, "0") as pusher:
        peer = decode.engine.connect(pusher.address, timeout=10)
        session = decode.receiver.open(1, timeout=3, peer=peer)
        pusher.ticket(session.ticket())
        assert pusher.line() == "pushed"
        pusher.process.send_signal(signal.SIGSTOP)
        with pytest.raises(tm.DeadlineExceeded):
            session.wait()
        # Its pages are free, or in quarantine if the stopped process may still hold them: never handed out in doubt.
        assert decode.allocator.available + decode.allocator.quarantined == decode.kv.layout.num_pages
