"""SGLang's prefill/decode transfers between processes: its own control plane, with our classes, which its plug-in hook
has found."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually
from sglang_pd import HEADS, HOST, PAGE, PAGES, Other, Side, classes, published, recurrent, whole

import torch_mooncake as tm

STACK = ("sglang", "PD managers, senders, receivers and bootstrap server between processes, by its plug-in hook")


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Other, Any]]]:
    """(prefill in another process, decode in this one); ``far``: the other way round."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    monkeypatch.setenv("TM_SGLANG_TIMEOUT_S", "10")
    made: list[Any] = []

    def make(p: int = 1, d: int = 1, far: str = "prefill", mla: bool = False, **settings: Any) -> tuple[Any, Any]:
        kinds: dict[str, Any] = {"prefill": Side, "decode": Side, far: Other}
        theirs = {name.removeprefix("decode_"): value for name, value in settings.items()}
        ours = {name: value for name, value in settings.items() if not name.startswith("decode_")}
        prefill, decode = kinds["prefill"]("prefill", p, mla, 1, **ours), kinds["decode"]("decode", d, mla, **theirs)
        made.extend((decode, prefill))
        return prefill, decode

    yield make
    for each in made:
        each.close()


def tokens(pages: list[int]) -> list[int]:
    return [page * PAGE + i for page in pages for i in range(PAGE)]


def test_our_classes_are_those_of_the_name():
    from sglang.srt.disaggregation import base

    published()
    found = classes()
    for name in ("manager", "sender", "receiver", "bootstrap_server"):
        assert getattr(found, name).__module__ == "torch_mooncake.integrations.sglang.pd"
        assert not getattr(found, name).__abstractmethods__
    assert issubclass(found.manager, base.conn.BaseKVManager)


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (2, 1), (1, 2), (1, 4), (4, 1)])
def test_pages_of_every_chunk_arrive(sides: Any, p: int, d: int):
    """Three chunks, pages in no order, other ranks; what was not sent stays as it was."""
    prefill, decode = sides(p, d)
    source, target = [7, 2, 3, 9, 0], [1, 8, 4, 5, 11]
    prefill("open", 17, 5, 2)
    assert decode.open(17, 5, 4, prefill.port, target, states=[[3]] * 1) == ["WaitingForInput"] * d
    assert set(prefill("wait", 17, "WaitingForInput")) == {"WaitingForInput"}
    prefill("send", 17, source[:2])
    prefill("send", 17, source[2:3])
    prefill("send", 17, source[3:], [[1]])
    assert set(prefill("wait", 17, "Success", "Failed")) == {"Success"}
    assert set(decode.wait(17, "Success", "Failed")) == {"Success"}
    model, share = whole(1, False), HEADS // d
    others = [i for i in range(PAGES) if i not in target]
    for rank, buffers in enumerate(decode.tensors("kv")):
        heads = slice(rank * share, (rank + 1) * share)
        for at, buffer in enumerate(buffers):
            k, layer = divmod(at, len(buffers) // 2)
            assert torch.equal(buffer[tokens(target)], model[k, layer][tokens(source)][:, heads])
            assert not buffer[tokens(others)].any()
    for rank, (rows, floats) in enumerate(decode.tensors("aux")):
        assert rows[4, 0] in [32 + 1000 * i for i in range(p)], rank
        assert floats[4].any()
        assert not rows[[i for i in range(len(rows)) if i != 4]].any()
    prefill("clear", 17)
    decode.clear(17)
    assert prefill("left") == [0] * p
    assert decode.left() == [0] * d


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_states_of_hybrid_models(sides: Any, p: int, d: int):
    """A mamba slot and the pages of a window, cut and gathered where the degrees differ."""
    prefill, decode = sides(p, d, states=("mamba", "swa"))
    prefill("open", 5, 1, 0)
    decode.open(5, 1, 0, prefill.port, [3], states=[[4], [6, 7]])
    prefill("wait", 5, "WaitingForInput")
    prefill("send", 5, [2], [[1], [8, 9, 10]])  # SGLang lets a window have a page more
    assert decode.wait(5, "Success", "Failed") == ["Success"] * d
    for rank, (states, windows) in enumerate(zip(decode.tensors("mamba"), decode.tensors("swa"), strict=True)):
        share, width = HEADS // d, 16 // d
        for layer, state in enumerate(states):
            assert torch.equal(state[4], recurrent(layer)[1, rank * width : (rank + 1) * width])
            assert not state[[0, 1, 2, 3, 5]].any()
        for at, window in enumerate(windows):
            k, layer = divmod(at, len(windows) // 2)
            heads = whole(51, False)[k, layer][:, rank * share : (rank + 1) * share]
            assert torch.equal(window[tokens([6, 7])], heads[tokens([8, 9])])
            assert not window[tokens([0, 1, 2, 3, 4, 5, 8, 9, 10, 11])].any()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"states": ("mamba",), "decode_states": ()}, r"LayoutMismatch: states \['mamba'\] here, \[\] there"),
        ({"states": ("swa",), "decode_states": ("mamba",)}, "LayoutMismatch: states"),
    ],
)
def test_layouts_that_do_not_go_together_are_refused(sides: Any, settings: dict[str, Any], reason: str):
    """Before a byte is written, on both sides, with the reason."""
    prefill, decode = sides(**settings)
    prefill("open", 5, 1, 0)
    decode.open(5, 1, 0, prefill.port, [3])
    assert decode.wait(5, "Failed") == ["Failed"]
    assert prefill("wait", 5, "Failed") == ["Failed"]
    for why in (decode.why(5), prefill("why", 5)):
        assert re.search(reason, why[0]), why
    assert not any(each.any() for each in decode.tensors("kv")[0])


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 1), (1, 2)])
def test_mla_pages_are_the_same_on_all_ranks(sides: Any, p: int, d: int):
    prefill, decode = sides(p, d, mla=True)
    prefill("open", 3, 2, 0)
    decode.open(3, 2, 1, prefill.port, [10, 1])
    prefill("wait", 3, "WaitingForInput")
    prefill("send", 3, [4, 6])
    assert set(decode.wait(3, "Success", "Failed")) == {"Success"}
    assert set(prefill("wait", 3, "Success", "Failed")) == {"Success"}
    for buffers in decode.tensors("kv"):
        for layer, buffer in enumerate(buffers):
            assert torch.equal(buffer[tokens([10, 1])], whole(1, True)[layer][tokens([4, 6])])


def test_nothing_but_tcp(sides: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TM_SGLANG_TRANSPORTS", "tcp")
    prefill, decode = sides(2, 1)
    prefill("open", 1, 2, 0)
    decode.open(1, 2, 0, prefill.port, [0, 5])
    prefill("wait", 1, "WaitingForInput")
    prefill("send", 1, [9, 8])
    assert decode.wait(1, "Success", "Failed") == ["Success"]
    for at, buffer in enumerate(decode.tensors("kv")[0]):
        assert torch.equal(buffer[tokens([0, 5])], whole(1, False).flatten(0, 1)[at][tokens([9, 8])])


def test_requests_at_once(sides: Any):
    prefill, decode = sides()
    for room in range(1, 9):
        prefill("open", room, 1, 0)
        decode.open(room, 1, 0, prefill.port, [room])
    for room in range(1, 9):
        prefill("wait", room, "WaitingForInput")
        prefill("send", room, [PAGES - 1 - room])
    for room in range(1, 9):
        assert decode.wait(room, "Success", "Failed") == ["Success"]
    buffer, model = decode.tensors("kv")[0][0], whole(1, False)[0, 0]
    for room in range(1, 9):
        assert torch.equal(buffer[tokens([room])], model[tokens([PAGES - 1 - room])])


@pytest.mark.parametrize("far", ["decode", "prefill"])
def test_what_is_no_message_harms_no_request(sides: Any, far: str, caplog: pytest.LogCaptureFixture):
    """Frames of another program, on the control socket of the side that is here."""
    from sglang.srt.utils.network import NetworkAddress

    from torch_mooncake.integrations.sglang import pd_messages as messages

    prefill, decode = sides(far=far)
    here = (prefill if far == "decode" else decode).ranks[0].manager
    bad = [
        [tag, value] for tag in (messages.MEMORY, messages.ROOM) for value in (b"", b"\xc1", b"\x90", b"\x81\xa1x\x01")
    ]
    bad += [[messages.MEMORY], [b""], [here.kv_status_msg_tag], [here.kv_status_msg_tag, b"x", b"y"], [b"ABORT", b"z"]]
    for frames in bad:
        here._send_multipart_locked(NetworkAddress(here.local_ip, here.rank_port).to_tcp(), frames)

    def both(call: str, *arguments: Any) -> Any:
        return prefill(call, *arguments) if far == "prefill" else getattr(prefill, call)(*arguments)

    both("open", 1, 1, 0)
    port = prefill.port
    decode("open", 1, 1, 0, port, [1]) if far == "decode" else decode.open(1, 1, 0, port, [1])
    both("wait", 1, "WaitingForInput")
    both("send", 1, [3])
    assert both("wait", 1, "Success", "Failed") == ["Success"]
    if far == "decode":
        assert caplog.text.count("SGLang control message b'TM_MEMORY': ValueError") == 5
        assert caplog.text.count("SGLang control message b'TM_ROOM': ValueError") == 4


def test_a_prefill_that_is_killed(sides: Any):
    """Decode sees it in bounded time, though it was sent a part."""
    prefill, decode = sides()
    prefill("open", 1, 2, 0)
    decode.open(1, 2, 0, prefill.port, [1, 2])
    prefill("wait", 1, "WaitingForInput")
    prefill("send", 1, [3])
    started = time.monotonic()
    prefill.kill()
    assert decode.wait(1, "Failed", timeout=60) == ["Failed"]
    assert time.monotonic() - started < 30
    assert "Lost connection with prefill" in decode.why(1)[0]
    assert decode.left() == [0]


def test_a_decode_that_is_killed(sides: Any):
    """Prefill's next chunk fails, and says what became of the peer."""
    prefill, decode = sides(far="decode")
    prefill.open(1, 2, 0)
    decode("open", 1, 2, 0, prefill.port, [1, 2])
    assert prefill.wait(1, "WaitingForInput") == ["WaitingForInput"]
    prefill.send(1, [3])
    decode.kill()
    prefill.send(1, [4])
    assert prefill.wait(1, "Success", "Failed", timeout=60) == ["Failed"]
    assert "PeerLost" in prefill.why(1)[0]
    assert prefill.left() == [0]


def test_a_decode_that_stands_still(sides: Any, monkeypatch: pytest.MonkeyPatch):
    """The chunk fails when its time is over."""
    prefill, decode = sides(far="decode")
    monkeypatch.setattr(prefill.ranks[0].manager, "_timeout_s", 2.0)
    prefill.open(1, 2, 0)
    decode("open", 1, 2, 0, prefill.port, [1, 2])
    assert prefill.wait(1, "WaitingForInput") == ["WaitingForInput"]
    os.kill(decode.process.pid, signal.SIGSTOP)
    try:
        prefill.send(1, [3])
        assert prefill.wait(1, "Success", "Failed", timeout=60) == ["Failed"]
        assert re.search("DeadlineExceeded|PeerLost", prefill.why(1)[0])
    finally:
        os.kill(decode.process.pid, signal.SIGCONT)


def test_a_decode_rank_that_does_not_answer_a_dial_keeps_nobody_else_waiting():
    """The control thread asks whether it is alive, and closes it, while a sender waits for it."""
    from torch_mooncake.integrations.sglang import pd_messages, pd_peer, pd_plan

    published()
    lists: dict[str, Any] = {name: [] for name in pd_messages.Memory.__struct_fields__}
    with socket.create_server((HOST, 0)) as silent, tm.Engine(f"tcp://{HOST}:0") as engine:
        silent.settimeout(30)
        numbers = dict.fromkeys(("tp_rank", "tp_size", "state_tp_size", "page_size"), 1)
        address = [f"tcp://{HOST}:{silent.getsockname()[1]}"]
        far = pd_messages.Memory(
            **{**lists, **numbers, "engine": "00", "addresses": address, "regions": [(4096, 4096, b"")]}
        )
        memory = torch.zeros(4096, dtype=torch.uint8)
        at = memory.data_ptr()
        args = SimpleNamespace(kv_data_ptrs=[at], kv_data_lens=[4096], aux_data_ptrs=[], aux_data_lens=[])
        args.state_data_ptrs = args.state_data_lens = []
        ours = pd_peer.register(engine, args, reachable=False)
        decoder = pd_peer.Decoder(engine, far, None, "", timeout_s=10.0)
        move = pd_plan.Move(np.array([0]), np.array([0]), 64, 64, 64, [at], [4096])
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(decoder.write, ours, move)
            connection, _ = silent.accept()  # and say nothing
            assert decoder.alive()
            decoder.close()
            assert not sent.done()  # it waits still
            connection.close()
            with pytest.raises((tm.PeerLost, tm.Closed)):
                sent.result(30)
        with pytest.raises(tm.Closed, match="other memory"):
            decoder.write(ours, move)


@pytest.mark.parametrize("deferred", ["1", "0"])
def test_an_abort_of_either_side_is_told_to_the_other(sides: Any, deferred: str, monkeypatch: pytest.MonkeyPatch):
    """Whether decode keeps the pages until prefill says so (SGLang's default) or not."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", deferred)
    prefill, decode = sides()
    for room, aborts in ((1, "prefill"), (2, "decode")):
        prefill("open", room, 2, 0)
        decode.open(room, 2, 0, prefill.port, [1, 2])
        prefill("wait", room, "WaitingForInput")
        prefill("send", room, [3])
        prefill("abort", room) if aborts == "prefill" else decode.abort(room)
        assert decode.wait(room, "Failed") == ["Failed"]
        assert prefill("wait", room, "Failed") == ["Failed"]
        assert "Aborted" in decode.why(room)[0]
        assert "Aborted" in prefill("why", room)[0]
    assert eventually(lambda: prefill("left") == [0])
    assert decode.left() == [0]


def test_pages_are_released_when_nothing_writes_them_any_more(sides: Any):
    """An aborted request's pages are free once prefill has said so, and what it sends later is dropped."""
    prefill, decode = sides()
    prefill("open", 1, 2, 0)
    decode.open(1, 2, 0, prefill.port, [1, 2])
    prefill("wait", 1, "WaitingForInput")
    prefill("send", 1, [3])
    decode.abort(1)
    assert eventually(lambda: decode.ranks[0].manager.is_abort_release_safe(1, 1), timeout=30)
    before = [each.clone() for each in decode.tensors("kv")[0]]
    prefill("send", 1, [4])
    assert prefill("wait", 1, "Failed") == ["Failed"]
    assert all(torch.equal(a, b) for a, b in zip(before, decode.tensors("kv")[0], strict=True))


def test_memory_that_is_taken_away_and_given_back(sides: Any):
    """SGLang's release and resume of memory: prefill is told the new regions."""
    prefill, decode = sides()

    def transfer(room: int) -> list[str]:
        prefill("open", room, 1, 0)
        decode.open(room, 1, 0, prefill.port, [room])
        prefill("wait", room, "WaitingForInput")
        prefill("send", room, [room + 1])
        return decode.wait(room, "Success", "Failed")

    assert transfer(1) == ["Success"]
    decode.ranks[0].manager.deregister_buffer_to_engine()
    decode.ranks[0].manager.register_buffer_to_engine()
    assert transfer(2) == ["Success"]
    assert torch.equal(decode.tensors("kv")[0][0][tokens([2])], whole(1, False)[0, 0][tokens([3])])


def test_settings_that_it_does_not_know_are_refused(sides: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    with pytest.raises(tm.Unsupported, match="SGLANG_DISAGG_STAGING_BUFFER"):
        Side("decode", 1)
