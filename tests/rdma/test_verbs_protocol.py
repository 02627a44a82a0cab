"""Real verbs: settings, GIDs, registrations, and programs of others against our memory and on our devices."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import machine
import pytest
from machine import MiB, engine, sh, two
from processes import running

import torch_mooncake as tm
from torch_mooncake.cli import checks
from torch_mooncake.clock import deadline_ns

pytestmark = pytest.mark.rdma

CONNECT, RDMA_RECORD, ROCE_V2 = 150, 8, 2  # csrc/transfer/wire.h, descriptor.h, rdma/gid.h


def gid_index(device: str, part: str, end: str = "") -> int:
    """The position of the GID whose text, as the kernel writes it, has that part and that end."""
    for path in Path(f"/sys/class/infiniband/{device}/ports/1/gids").iterdir():
        text = path.read_text().strip()
        if part in text and text.endswith(end):
            return int(path.name)
    raise AssertionError(f"{device} has no GID {part} {end}")


@pytest.mark.parametrize("kind", ["IPv4", "link-local"])
def test_the_gid_that_the_user_names(kind: str) -> None:
    prefix, ends = {"IPv4": ("0000:ffff:0a01", ("0001", "0002")), "link-local": ("fe80:", ("", ""))}[kind]
    indices = {gid_index(f"rxe_a{side}", prefix, end) for side, end in enumerate(ends)}
    assert len(indices) == 1  # the same at both ends, so that one setting does
    with two(rdma=f"gid={indices.pop()}") as pair:
        pair.write(1).wait()
        pair.check(1)


def test_gids_of_different_kinds_are_told_in_words() -> None:
    v4, v6 = gid_index("rxe_a0", "ffff:0a01"), gid_index("rxe_a0", "fd00:0001")
    with engine(0, rdma=f"gid={v4}") as here, engine(1, rdma=f"gid={v6}") as there:
        target = there.register(bytearray(64))
        peer = here.connect(there.addresses[0])
        with pytest.raises(tm.Error, match=r"no two GIDs of one kind; here RoCE v2 fd00.*; there RoCE v2 10\."):
            peer.open(target.descriptor())


def test_a_pair_of_gids_that_does_not_get_through_is_not_used() -> None:
    # IPv4 between the rails' ends goes to a station that nobody has. IPv6 does not take packets of global addresses of
    # its own from outside. What is left is link-local addresses.
    ends = (("a", 1, 0), ("b", 2, 0), ("a", 1, 1), ("b", 2, 1))
    for rail, net, side in ends:
        sh(f"ip neigh replace 10.{net}.0.{2 - side} lladdr 02:00:00:00:00:99 dev {rail}{side} nud permanent")
    try:
        with two() as pair:
            pair.write(2).wait()
            pair.check(2)
    finally:
        for rail, net, side in ends:
            sh(f"ip neigh del 10.{net}.0.{2 - side} dev {rail}{side}")


def test_a_network_filter_chooses_rail_and_address() -> None:
    here = tm.Engine(transports=("rdma",), nics=["10.2.0.0/16", "rxe_?0"], name="a", token="t")
    there = tm.Engine(transports=("rdma",), nics=["10.2.0.0/16", "rxe_?1"], name="b", token="t")
    with here, there:
        remote = here.connect(there.addresses[0]).open(there.register(bytearray(MiB)).descriptor())
        here.write(here.register(bytearray(MiB)), remote).wait()
        (lane,) = [lane for lane in here.stats()["lanes"] if lane["transport"] == "rdma"]
        assert lane["rail"].startswith("rxe_b0 -> ")
        assert lane["bytes_sent"] == MiB


def test_registrations_in_chunks_and_an_op_over_their_bounds() -> None:
    nbytes = MiB + 12345
    with two(nbytes, rdma="mr=65536") as pair:
        pair.write(3).wait()
        pair.check(3)
        pair.local[:] = bytes(nbytes)
        pair.here.read(pair.region[70000:300001], pair.opened[1234:231235]).wait()
        assert pair.local[70000:300001] == machine.pattern(nbytes, 3)[1234:231235]
        assert not any(pair.local[:70000])
        assert not any(pair.local[300001:])


def test_lazy_registration_happens_when_it_is_needed() -> None:
    with two(rdma="lazy=1") as pair:
        registered = len(json.loads(sh("rdma -j resource show mr")))
        more = [pair.there.register(bytearray(MiB)) for _ in range(8)]
        assert len(json.loads(sh("rdma -j resource show mr"))) == registered
        opened = pair.peer.open(more[0].descriptor())
        assert len(json.loads(sh("rdma -j resource show mr"))) == registered + 2  # on both NICs
        pair.here.write(pair.region, opened).wait()
        pair.write(4).wait()
        pair.check(4)


def test_settings_that_make_no_sense_are_told_in_words() -> None:
    for rdma, words in (
        ("speed=9", "nothing is called 'speed'"),
        ("sl=16", "sl must be 0 .. 15, not '16'"),
        ("mtu=1000", "mtu must be 256"),
        ("pkey=0x1234", "no partition key 4660"),
        ("gid=200", "no GID of that index"),
    ):
        with pytest.raises(tm.Error, match=words):
            engine(0, rdma=rdma)
    with pytest.raises(tm.Unsupported, match="leave it out"):
        tm.Engine(transports=("rdma",), nics=["mlx5_*"])


@pytest.mark.parametrize("rdma", ["sl=3,tc=106,pkey=0xffff,mtu=1024", "relaxed=1,odp=1,timeout=16,retries=3"])
def test_settings_that_do(rdma: str) -> None:
    with two(rdma=rdma) as pair:
        pair.write(5).wait()
        pair.check(5)
        assert {lane["facts"]["MTU"] for lane in pair.lanes()} == {1024 if "mtu" in rdma else 4096}


def test_pyverbs_reads_and_writes_our_memory() -> None:
    nbytes = 300_000
    program = ["/usr/bin/python3", str(Path(__file__).parent / "pyverbs_peer.py")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    settings = "mr=65536"  # several registrations
    with engine(1, rdma=settings) as ours, engine(0) as carrier, running(program, **pipes) as foreign:

        def ask(question: dict[str, Any]) -> dict[str, Any]:
            foreign.stdin.write(json.dumps(question) + "\n")
            foreign.stdin.flush()
            return dict(json.loads(foreign.stdout.readline()))

        before, after = machine.pattern(nbytes, 6), machine.pattern(nbytes, 7)
        memory = bytearray(before)
        region = ours.register(memory)
        pair = ask({"device": "rxe_a0"})
        body = struct.pack("<QIIHIIII", 1 << 60, 0, 0, 0, pair["number"], pair["first_packet"], pair["mtu"], 1)
        body += bytes.fromhex(pair["gid"]) + bytes([ROCE_V2])
        peer = carrier.connect(ours.addresses[0])
        answer = peer._core.call(CONNECT, body, deadline_ns(10))
        _, _, gid, _, _, number, first_packet, mtu = struct.unpack_from("<II16sBHIII", answer)
        theirs = {"number": number, "first_packet": first_packet, "mtu": mtu, "gid": gid.hex()}
        record = rdma_record(region.descriptor())
        told = ask({"pair": theirs, "record": record.hex(), "nbytes": nbytes, "write": after.hex()})
        assert bytes.fromhex(told["read"]) == before
        assert memory == after


def rdma_record(descriptor: bytes) -> bytes:
    """The access record of that transport (csrc/transfer/descriptor.cpp)."""
    at = 4 + 2 + 16 + 1 + 8 + 8 + 8 + 2
    (label,) = struct.unpack_from("<I", descriptor, at)
    at += 4 + label
    (records,) = struct.unpack_from("<I", descriptor, at)
    at += 4
    for _ in range(records):
        kind, length = struct.unpack_from("<BI", descriptor, at)
        if kind == RDMA_RECORD:
            return descriptor[at + 5 : at + 5 + length]
        at += 5 + length
    raise AssertionError("no such record")


def with_server(tool: str, server: str, client: str) -> str:
    """What the client says of a test tool whose server has to listen first."""
    with running(["/bin/bash", "-c", f"exec {tool} {server}"], stdout=subprocess.DEVNULL):
        return sh(f"for i in {{1..100}}; do {tool} {client} 127.0.0.1 2> /dev/null && exit; sleep 0.1; done; exit 1")


def test_doctor_sends_itself_a_write_and_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in checks.rdma(Path("/"))}
    assert all(check.ok for check in found.values()), found
    assert "rxe_a0 -> NIC 0" in found["RDMA write to ourselves"].value
    assert "rxe_b1 4096 bytes" in found["RDMA packets"].value
    monkeypatch.setenv("TM_RDMA", "pkey=5")
    broken = next(check for check in checks.rdma(Path("/")) if check.name == "RDMA write to ourselves")
    assert not broken.ok
    assert "no partition key 5" in broken.value


def test_rdma_cores_own_tools_on_the_same_devices() -> None:
    with two() as pair:  # beside our connections
        index = gid_index("rxe_a0", "ffff:0a01")
        said = with_server("ibv_rc_pingpong", f"-d rxe_a1 -g {index} -n 10", f"-d rxe_a0 -g {index} -n 10")
        assert "10 iters" in said
        said = with_server("ib_write_bw", f"-d rxe_b1 -x {index} -n 50 -F", f"-d rxe_b0 -x {index} -n 50 -F")
        assert "BW average" in said
        pair.write(8).wait()
        pair.check(8)
