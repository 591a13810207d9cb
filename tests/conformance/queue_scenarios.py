"""Scenarios of two ends whose queues are resized, drained, or extended; see support/scenario.py."""

from __future__ import annotations

import sys

from conformance.scenarios import SIGNALED, E, connected, ended, pattern, post, region_of
from rdmacm import CmId
from rdmacm.verbs import (
    CQ,
    CQEX,
    CqInitAttrEx,
    CqWcFlag,
    DataBuffer,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPEx,
    QPInitAttr,
    QPInitAttrEx,
    QPState,
    RecvWR,
    SendFlag,
    SendWR,
    SrqAttr,
    SrqAttrMask,
    SrqInitAttr,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from support.scenario import Side, Until

INLINE = SendFlag.SIGNALED | SendFlag.INLINE

# -- queues that are resized and drained ----------------------------------------------------------------


async def resized_passive(side: Side) -> None:
    """60 messages, while both queues change their size all the time: each is received, once and in order."""
    listener = side.listening()
    cmid = (await side.event(E.CONNECT_REQUEST)).id
    cq = CQ(cmid.verbs, 1)
    srq = cmid.create_srq(SrqInitAttr(SrqAttr(1)))
    region = region_of(cmid, bytes(60 * 64))
    cmid.create_qp(QPInitAttr(scq=cq, rcq=cq, srq=srq, cap=QPCap(8, 1)))
    cmid.accept()
    await side.event(E.ESTABLISHED)
    posted = 0
    for number in range(60):
        size = 1 + number * 7 % 5
        srq.modify(SrqAttr(max_wr=size + 5), SrqAttrMask.MAX_WR)
        cq.resize(16)
        while posted < min(60, number + size):
            srq.post_recv(RecvWR(posted, [region.sge(posted * 64, 64)]))
            posted += 1
        wc = await side.completion(cq)
        assert bytes(region.buf[number * 64 :][: wc.byte_len]) == b"message %d" % number
        assert wc.wr_id == number
    side.tell("all", None)
    await ended(side, cmid, listener, first=False)
    cq.close()


async def resized_active(side: Side) -> None:
    """It is drained in between, with requests that wait until it goes on."""
    cmid, _ = await connected(side, 0)
    qp = cmid.qp
    assert qp is not None
    for number in range(0, 60, 12):
        post(cmid, *(SendWR(n, WROpcode.SEND, [b"message %d" % n], INLINE) for n in range(number, number + 6)))
        qp.modify(QPAttr(qp_state=QPState.SQD), QPAttrMask.STATE)
        waiting = [SendWR(n, WROpcode.SEND, [b"message %d" % n], INLINE) for n in range(number + 6, number + 12)]
        late = 1 if side.is_rxe else 0  # which goes on with the next request only
        post(cmid, *waiting[: 6 - late])
        await Until(lambda: not qp.query()[0].sq_draining, "a drained send queue")
        qp.modify(QPAttr(timeout=15, retry_cnt=6), QPAttrMask.TIMEOUT | QPAttrMask.RETRY_CNT)
        qp.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
        post(cmid, *waiting[6 - late :])
        for n in range(number, number + 12):
            assert (await side.completion(cmid.send_cq)).wr_id == n
    await side.told("all")
    await ended(side, cmid)


# -- extended queue pairs and completion queues ---------------------------------------------------------


def extended(cmid: CmId) -> tuple[QPEx, CQEX]:
    """Give an id an extended queue pair, with an extended completion queue."""
    cq = CQEX(cmid.verbs, CqInitAttrEx(cqe=64, wc_flags=CqWcFlag.STANDARD))
    qp = cmid.create_qp(QPInitAttrEx(scq=cq, rcq=cq, cap=QPCap(16, 16, 4, 4, 256)))
    assert isinstance(qp, QPEx)
    return qp, cq


async def read(cq: CQEX, count: int) -> list[tuple[int, WCOpcode, int, int]]:
    """The next completions, field by field."""
    found: list[tuple[int, WCOpcode, int, int]] = []
    while len(found) < count:
        await Until(lambda: cq.start_poll() == 0, "a completion")
        while True:
            assert cq.status is WCStatus.SUCCESS
            found.append((cq.wr_id, cq.read_opcode(), cq.read_byte_len(), cq.read_imm_data()))
            if cq.next_poll():
                break
        cq.end_poll()
    return found


async def extended_passive(side: Side) -> None:
    listener = side.listening()
    cmid = (await side.event(E.CONNECT_REQUEST)).id
    qp, cq = extended(cmid)
    target, inbox = region_of(cmid, (5).to_bytes(8, sys.byteorder) + bytes(4088)), region_of(cmid, bytes(128))
    qp.post_recv([RecvWR(n, [inbox.sge(n * 64, 64)]) for n in range(2)])
    cmid.accept()
    await side.event(E.ESTABLISHED)
    side.tell("target", (target.addr, target.rkey))
    assert await read(cq, 2) == [(0, WCOpcode.RECV, 10, 0), (1, WCOpcode.RECV, 0, 9)]
    assert bytes(inbox.buf[:10]) == b"inline one"
    assert target.read(8 + 3000) == (12).to_bytes(8, sys.byteorder) + pattern(3000)
    side.tell("seen", None)
    await ended(side, cmid, listener, first=False)
    cq.close()


async def extended_active(side: Side) -> None:
    cmid = await side.resolved()
    qp, cq = extended(cmid)
    memory = region_of(cmid, pattern(3000) + bytes(3008))
    cmid.connect()
    await side.event(E.ESTABLISHED)
    addr, rkey = await side.told("target")
    qp.wr_start()
    qp.wr_flags = SIGNALED
    qp.wr_id = 1
    qp.wr_send()
    qp.wr_set_inline_data_list(2, [DataBuffer(b"inline", 6), DataBuffer(b" one and more", 4)])
    qp.wr_id = 2
    qp.wr_rdma_write(rkey, addr + 8)
    qp.wr_set_sge_list(2, [memory.sge(0, 1000), memory.sge(1000, 2000)])
    qp.wr_id = 3
    qp.wr_atomic_fetch_add(rkey, addr, 7)
    qp.wr_set_sge(memory.sge(3000, 8))
    qp.wr_id = 4
    qp.wr_rdma_read(rkey, addr + 8)
    qp.wr_set_sge(memory.sge(3008, 3000))
    qp.wr_id = 5
    qp.wr_send_imm(9)
    qp.wr_complete()
    opcodes = [WCOpcode.SEND, WCOpcode.RDMA_WRITE, WCOpcode.FETCH_ADD, WCOpcode.RDMA_READ, WCOpcode.SEND]
    found = await read(cq, 5)
    assert [each[:2] for each in found] == list(enumerate(opcodes, 1))
    assert memory.read(8, 3000) == (5).to_bytes(8, sys.byteorder)
    assert memory.read(3000, 3008) == pattern(3000)
    await side.told("seen")
    await ended(side, cmid)
    cq.close()
