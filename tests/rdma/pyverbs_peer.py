"""A peer that nobody of this library wrote: rdma-core's Python bindings, and the layout of a region's RDMA record.

Run by the system's Python, which has Debian's python3-pyverbs. Reads and writes JSON lines:

    ->  {"device": …}                                  <- {"number": …, "gid": hex, "first_packet": …, "mtu": …}
    ->  {"pair": {number, first_packet, mtu, gid}, "record": hex, "nbytes": …, "write": hex}
                                                       <- {"read": hex}, after all of the region was read and written
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

FIRST_PACKET = 77
MTU = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


def ask(answer: dict[str, Any] | None = None) -> dict[str, Any]:
    if answer is not None:
        print(json.dumps(answer), flush=True)
    return dict(json.loads(sys.stdin.readline()))


def parse(record: bytes) -> tuple[int, int, list[list[int]]]:
    """Address, bytes a chunk, and for each NIC the keys of the chunks."""
    address, chunk, _generation, _flush, nics = struct.unpack_from("<QQQBI", record)
    at, keys = 29, []
    for _ in range(nics):
        (length,) = struct.unpack_from("<I", record, at)
        at += 4 + length
        _distance, _generation_key, chunks = struct.unpack_from("<BII", record, at)
        keys.append(list(struct.unpack_from(f"<{chunks}I", record, at + 9)))
        at += 9 + 4 * chunks
    assert at == len(record)
    return address, chunk, keys


def main() -> None:
    context = Context(name=ask()["device"])
    pd, cq = PD(context), CQ(context, 64)
    rights = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(max_send_wr=16, max_recv_wr=16)))
    index = next(i for i in range(16) if "0000:0000:0000:0000:0000:ffff" in context.query_gid(1, i).gid)
    gid = bytes.fromhex(context.query_gid(1, index).gid.replace(":", ""))
    order = ask({"number": qp.qp_num, "gid": gid.hex(), "first_packet": FIRST_PACKET, "mtu": 4096})

    theirs = order["pair"]
    attributes = QPAttr(port_num=1)
    attributes.qp_access_flags = rights
    qp.to_init(attributes)
    attributes = QPAttr(qp_state=e.IBV_QPS_RTR, path_mtu=MTU[theirs["mtu"]])
    attributes.dest_qp_num, attributes.rq_psn = theirs["number"], theirs["first_packet"]
    attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 4, 12
    remote = GID(":".join(theirs["gid"][i : i + 4] for i in range(0, 32, 4)))
    route = GlobalRoute(dgid=remote, sgid_index=index, hop_limit=64)
    attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
    qp.to_rtr(attributes)
    attributes.sq_psn, attributes.timeout, attributes.retry_cnt = FIRST_PACKET, 14, 6
    attributes.rnr_retry, attributes.max_rd_atomic = 7, 4
    qp.to_rts(attributes)

    nbytes = order["nbytes"]
    address, chunk, keys = parse(bytes.fromhex(order["record"]))
    memory = MR(pd, nbytes, rights)

    def move(opcode: int) -> None:
        for at in range(0, nbytes, chunk):
            piece = [SGE(memory.buf + at, min(chunk, nbytes - at), memory.lkey)]
            request = SendWR(opcode=opcode, num_sge=1, sg=piece, send_flags=e.IBV_SEND_SIGNALED)
            request.set_wr_rdma(keys[0][at // chunk], address + at)
            qp.post_send(request)
            while True:
                count, done = cq.poll()
                if count:
                    break
            assert done[0].status == e.IBV_WC_SUCCESS, done[0].status

    move(e.IBV_WR_RDMA_READ)
    read = memory.read(nbytes, 0)
    memory.write(bytes.fromhex(order["write"]), nbytes)
    move(e.IBV_WR_RDMA_WRITE)
    print(json.dumps({"read": read.hex()}), flush=True)


main()
