"""Scenarios of two ends with extended reliable connections (XRC); see support/scenario.py."""

from __future__ import annotations

from conformance.scenarios import SIGNALED, E, destroy, ended, pattern, post, region_of
from rdmacm import CmId, CmStateError, ConnParam, PortSpace
from rdmacm.verbs import (
    CQ,
    MR,
    SRQ,
    AccessFlag,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    SrqAttr,
    SrqInitAttrEx,
    SRQType,
    WCOpcode,
    WROpcode,
)
from support.scenario import Side

XRC_ROOM = 3 * 4096
XRC_SIZES = (0, 1, 700, 4096, 9000)


def receives(queue: SRQ, inbox: MR) -> None:
    for slot in range(len(XRC_SIZES)):
        queue.post_recv(RecvWR(slot, [inbox.sge(slot * XRC_ROOM, XRC_ROOM)]))


async def take_xrc(side: Side, cmid: CmId, cq: CQ | None, inbox: MR, salt: int) -> None:
    """Receive each message, in order, with the number of the target."""
    for slot, size in enumerate(XRC_SIZES):
        wc = await side.completion(cq)
        assert (wc.wr_id, wc.opcode, wc.byte_len, wc.qp_num) == (slot, WCOpcode.RECV, size, cmid.qp.qp_num)
        assert wc.imm_data == salt
        assert bytes(inbox.buf[slot * XRC_ROOM :][:size]) == pattern(size, salt + slot)


async def extended_reliable_passive(side: Side) -> None:
    """A target, a queue that the id makes, and another of the same domain."""
    listener = side.listening(port_space=PortSpace.IB, qp_type=QPType.XRC_RECV)
    cmid = (await side.event(E.CONNECT_REQUEST)).id
    assert cmid.qp_type is QPType.XRC_RECV
    cmid.create_qp()
    first = cmid.create_srq(SrqInitAttrEx(SrqAttr(max_wr=8, max_sge=1), srq_type=SRQType.XRC))
    cq = CQ(cmid.verbs, 16)
    second = SRQ(cmid.pd, SrqInitAttrEx(SrqAttr(max_wr=8, max_sge=1), srq_type=SRQType.XRC, xrcd=first.xrcd, cq=cq))
    inboxes = [region_of(cmid, bytes(len(XRC_SIZES) * XRC_ROOM), AccessFlag.LOCAL_WRITE) for _ in range(2)]
    for queue, inbox in zip((first, second), inboxes, strict=True):
        receives(queue, inbox)
    memory = region_of(cmid, bytes(XRC_ROOM))
    numbers = first.get_srq_num().to_bytes(4, "big") + second.get_srq_num().to_bytes(4, "big")
    cmid.accept(ConnParam(private_data=numbers, responder_resources=2, initiator_depth=2))
    await side.event(E.ESTABLISHED)
    side.tell("memory", (memory.addr, memory.rkey))
    await take_xrc(side, cmid, cmid.recv_cq, inboxes[0], 1)
    await take_xrc(side, cmid, cq, inboxes[1], 2)
    assert bytes(memory.buf[:9000]) == pattern(9000, 9)
    await side.event(E.DISCONNECTED)
    cmid.disconnect()
    second.close()
    cq.close()
    destroy(cmid, listener)


async def extended_reliable_active(side: Side) -> None:
    """An initiator: a WRITE, a READ, and SENDs to both queues."""
    cmid = await side.resolved(PortSpace.IB, qp_type=QPType.XRC_SEND)
    cmid.create_qp(QPInitAttr(QPType.XRC_SEND, cap=QPCap(32, 0, 1, 0, 64)))
    try:
        raise AssertionError(f"an initiator has a queue for receives: {cmid.recv_cq}")
    except CmStateError:
        pass
    cmid.connect(ConnParam(responder_resources=2, initiator_depth=2))
    established = await side.event(E.ESTABLISHED)
    numbers = [int.from_bytes(established.private_data[at : at + 4], "big") for at in (0, 4)]
    addr, rkey = await side.told("memory")
    out = region_of(cmid, pattern(9000, 9), AccessFlag.LOCAL_WRITE)
    back = region_of(cmid, bytes(9000), AccessFlag.LOCAL_WRITE)
    write = SendWR(100, WROpcode.RDMA_WRITE, [out.sge()], SIGNALED, remote_addr=addr, rkey=rkey)
    write.set_qp_type_xrc(numbers[0])
    read = SendWR(101, WROpcode.RDMA_READ, [back.sge()], SIGNALED, remote_addr=addr, rkey=rkey)
    read.set_qp_type_xrc(numbers[1])
    post(cmid, write, read)
    for wr_id in (100, 101):
        assert (await side.completion(cmid.send_cq)).wr_id == wr_id
    assert bytes(back.buf) == pattern(9000, 9)
    for salt, number in enumerate(numbers, 1):
        for slot, size in enumerate(XRC_SIZES):
            data = region_of(cmid, pattern(size, salt + slot) or b"-", AccessFlag.LOCAL_WRITE)
            wr = SendWR(slot, WROpcode.SEND_WITH_IMM, [data.sge(0, size)], SIGNALED, imm_data=salt)
            wr.set_qp_type_xrc(number)
            post(cmid, wr)
        for slot in range(len(XRC_SIZES)):
            assert (await side.completion(cmid.send_cq)).wr_id == slot
    assert cmid.qp.state is QPState.RTS
    await ended(side, cmid)
