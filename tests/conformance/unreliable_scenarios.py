"""Scenarios of two ends with unreliable connections; see support/scenario.py."""

from __future__ import annotations

from conformance.scenarios import COPIES, FOREIGN, SIGNALED, E, ended, pattern, post, region_of
from rdmacm import CmId, PortSpace
from rdmacm.verbs import MR, AccessFlag, QPCap, QPInitAttr, QPState, QPType, SendWR, WCOpcode, WROpcode
from support.scenario import Side

_UC_OPCODES = (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM)
UC_ROOM = 2 * 4096


def with_uc(cmid: CmId) -> tuple[MR, MR]:
    """Give an id an unreliable queue pair and receives. Returns the regions of the receives and for the peer."""
    cmid.create_qp(QPInitAttr(QPType.UC, cap=QPCap(128, 128, 2, 2, 64)))
    inbox = region_of(cmid, bytes(128 * UC_ROOM), AccessFlag.LOCAL_WRITE)
    for slot in range(128):
        cmid.post_recv(slot, inbox, slot * UC_ROOM, UC_ROOM)
    return inbox, region_of(cmid, bytes(8 * UC_ROOM))


def uc_messages(cmid: CmId) -> list[tuple[WROpcode, int]]:
    """The opcode and length of each message: SENDs and WRITEs of up to two packets."""
    mtu = 128 << cmid.qp.query()[0].path_mtu
    return [(opcode, size) for size in (0, 1, mtu, mtu + 3) for opcode in _UC_OPCODES]


def send_uc(cmid: CmId, addr: int, rkey: int, salt: int) -> None:
    """Send each message several times, with its number as immediate data, and write to memory that is not there."""
    messages = uc_messages(cmid)
    out = region_of(cmid, b"".join(pattern(size, salt) for _, size in messages), AccessFlag.LOCAL_WRITE)
    wrs = [SendWR(FOREIGN, WROpcode.RDMA_WRITE_WITH_IMM, [out.sge(0, 1)], 0, imm_data=FOREIGN, rkey=rkey ^ 1)]
    offset = 0
    for number, (opcode, size) in enumerate(messages):
        half = size // 2
        sg = [out.sge(offset, half), out.sge(offset + half, size - half)] if size else []
        offset += size
        wr = SendWR(number, opcode, sg, 0, imm_data=number)
        wr.set_wr_rdma(rkey, addr + number * UC_ROOM)
        wrs.append(wr)
    for _ in range(COPIES):
        post(cmid, *wrs)
    post(cmid, SendWR(len(messages), WROpcode.SEND, [], SIGNALED))


async def take_uc(side: Side, cmid: CmId, inbox: MR, memory: MR, salt: int) -> None:
    """Receive until each message has come."""
    messages = uc_messages(cmid)
    slot = 0
    seen: set[int] = set()
    while len(seen) < len(messages):
        wc = await side.completion(cmid.recv_cq)
        assert wc.wr_id == slot, "receives complete once, in order"
        slot += 1
        if wc.imm_data is None:
            continue  # the last message
        assert wc.imm_data != FOREIGN, "the key was wrong"
        opcode, size = messages[wc.imm_data]
        is_send = opcode is WROpcode.SEND_WITH_IMM
        assert (wc.opcode, wc.byte_len) == (WCOpcode.RECV if is_send else WCOpcode.RECV_RDMA_WITH_IMM, size)
        start = wc.wr_id * UC_ROOM if is_send else wc.imm_data * UC_ROOM
        assert bytes((inbox if is_send else memory).buf[start : start + size]) == pattern(size, salt)
        seen.add(wc.imm_data)


async def unreliable_passive(side: Side) -> None:
    listener = side.listening(port_space=PortSpace.IB, qp_type=QPType.UC)
    request = await side.event(E.CONNECT_REQUEST)
    cmid = request.id
    assert cmid.qp_type is QPType.UC
    inbox, memory = with_uc(cmid)
    cmid.accept()
    await side.event(E.ESTABLISHED)
    side.tell("memory", (memory.addr, memory.rkey))
    addr, rkey = await side.told("memory")
    await take_uc(side, cmid, inbox, memory, 1)
    send_uc(cmid, addr, rkey, 2)
    sent = await side.completion(cmid.send_cq)
    assert sent.wr_id == len(uc_messages(cmid)), "the others were not signaled"
    await side.told("received")
    await ended(side, cmid, listener, first=False)


async def unreliable_active(side: Side) -> None:
    cmid = await side.resolved(PortSpace.IB, qp_type=QPType.UC)
    inbox, memory = with_uc(cmid)
    cmid.connect()
    await side.event(E.ESTABLISHED)
    side.tell("memory", (memory.addr, memory.rkey))
    addr, rkey = await side.told("memory")
    send_uc(cmid, addr, rkey, 1)
    await side.completion(cmid.send_cq)
    await take_uc(side, cmid, inbox, memory, 2)
    assert cmid.qp.state is QPState.RTS
    side.tell("received", None)
    await ended(side, cmid)
