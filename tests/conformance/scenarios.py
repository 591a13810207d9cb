"""Scenarios of two ends, independent of the network between them; see support/scenario.py."""

from __future__ import annotations

import errno
import hashlib
from typing import Any

import pytest

from rdmacm import CmEventType, CmId, PortSpace, RdmaError
from rdmacm.connparam import ConnParam, UdParam
from rdmacm.verbs import (
    AH,
    MR,
    WC,
    AccessFlag,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendFlag,
    SendWR,
    SrqAttr,
    SrqInitAttr,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from support.scenario import Side

E = CmEventType
SIZES = (0, 1, 3, 64, 1023, 1024, 1025, 4096, 4099, 70_001)
ROOM = 100_000
EVERYTHING = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC
SIGNALED = SendFlag.SIGNALED


def pattern(size: int, salt: int = 0) -> bytes:
    """Pseudo-random bytes, which differ from any shifted copy."""
    return hashlib.shake_128(b"%d %d" % (size, salt)).digest(size)


#: Regions to close with each id.
_regions: dict[CmId, list[MR]] = {}


def region_of(cmid: CmId, content: bytes, access: AccessFlag = EVERYTHING) -> MR:
    region = MR(cmid.pd, bytearray(content), access)
    _regions.setdefault(cmid, []).append(region)
    return region


def destroy(*cmids: CmId) -> None:
    for cmid in cmids:
        cmid.destroy()
        for region in _regions.pop(cmid, ()):
            region.close()


def prepared(cmid: CmId, receives: int = 16, size: int = ROOM) -> MR:
    """Give an id a queue pair and receives. Returns the region of the receives."""
    cmid.create_qp(QPInitAttr(cap=QPCap(64, 64, 4, 4, 256)))
    region = region_of(cmid, bytes(max(receives, 1) * size))
    for slot in range(receives):
        cmid.post_recv(slot, region, slot * size, size)
    return region


async def connected(side: Side, receives: int = 16, size: int = ROOM, **param: Any) -> tuple[CmId, MR]:
    """The active end: an id with receives posted, connected."""
    cmid = await side.resolved()
    region = prepared(cmid, receives, size)
    cmid.connect(ConnParam(**param))
    event = await side.event(E.ESTABLISHED)
    assert event.id is cmid
    return cmid, region


async def accepted(side: Side, receives: int = 16, size: int = ROOM, **param: Any) -> tuple[CmId, CmId, MR]:
    """The passive end: the listener and the id of its first request, connected."""
    listener = side.listening()
    request = await side.event(E.CONNECT_REQUEST)
    assert request.listen_id is listener
    cmid = request.id
    region = prepared(cmid, receives, size)
    cmid.accept(ConnParam(**param))
    event = await side.event(E.ESTABLISHED)
    assert event.id is cmid
    return listener, cmid, region


async def ended(side: Side, cmid: CmId, *others: CmId, first: bool = True) -> None:
    """Disconnect, before the peer or after it, expect one DISCONNECTED event, and destroy the ids."""
    if first:
        cmid.disconnect()
    event = await side.event(E.DISCONNECTED)
    assert event.id is cmid
    assert event.status == 0
    if not first:
        cmid.disconnect()
    destroy(cmid, *others)


def post(cmid: CmId, *wrs: SendWR) -> None:
    assert cmid.qp is not None
    cmid.qp.post_send(list(wrs))


# -- messages -------------------------------------------------------------------------------------------


async def messages_passive(side: Side) -> None:
    listener = side.listening()
    request = await side.event(E.CONNECT_REQUEST)
    assert request.private_data == b"from the client".ljust(56, b"\0")
    cmid = request.id
    assert cmid.dst_port
    assert cmid.src_port == side.port
    region = prepared(cmid)
    cmid.accept(ConnParam(b"from the server"))
    await side.event(E.ESTABLISHED)
    for index, size in enumerate(SIZES):
        wc = await side.completion(cmid.recv_cq)
        assert (wc.opcode, wc.wr_id, wc.byte_len, wc.imm_data) == (WCOpcode.RECV, index, size, index)
        start = index * ROOM
        assert bytes(region.buf[start : start + size]) == pattern(size)
        post(cmid, SendWR(index, WROpcode.SEND, [region.sge(start, size)] if size else [], SIGNALED))
    for index in range(len(SIZES)):
        wc = await side.completion(cmid.send_cq)
        assert (wc.opcode, wc.wr_id) == (WCOpcode.SEND, index)
    side.tell("acknowledged", None)  # an earlier disconnect would lose the last ACKs
    await ended(side, cmid, listener, first=False)


async def messages_active(side: Side) -> None:
    cmid = await side.resolved()
    region = prepared(cmid)
    cmid.connect(ConnParam(b"from the client"))
    event = await side.event(E.ESTABLISHED)
    assert event.private_data == b"from the server".ljust(196, b"\0")
    out = region_of(cmid, b"".join(map(pattern, SIZES)))
    offset = 0
    for index, size in enumerate(SIZES):
        sg = [out.sge(offset, size)] if size else []
        post(cmid, SendWR(index, WROpcode.SEND_WITH_IMM, sg, SIGNALED, imm_data=index))
        offset += size
    for index in range(len(SIZES)):
        wc = await side.completion(cmid.send_cq)
        assert (wc.opcode, wc.wr_id) == (WCOpcode.SEND, index)
    for index, size in enumerate(SIZES):
        wc = await side.completion(cmid.recv_cq)
        assert (wc.opcode, wc.byte_len, wc.imm_data) == (WCOpcode.RECV, size, None)
        assert bytes(region.buf[index * ROOM :][:size]) == pattern(size)
    await side.told("acknowledged")
    await ended(side, cmid)


# -- remote memory --------------------------------------------------------------------------------------

MEGABYTE = 1 << 20


async def remote_passive(side: Side) -> None:
    listener, cmid, _ = await accepted(side, 1, 64)
    region = region_of(cmid, pattern(MEGABYTE, 1))
    side.tell("memory", (region.addr, region.rkey))
    wc = await side.completion(cmid.recv_cq)
    assert (wc.opcode, wc.imm_data, wc.byte_len) == (WCOpcode.RECV_RDMA_WITH_IMM, 77, 5000)
    half = MEGABYTE // 2
    assert bytes(region.buf[:half]) == pattern(half, 2)
    assert bytes(region.buf[half : half + 5000]) == pattern(5000, 3)
    assert int.from_bytes(region.buf[-8:], "little") == 46
    await ended(side, cmid, listener, first=False)


async def remote_active(side: Side) -> None:
    cmid, _ = await connected(side)
    addr, rkey = await side.told("memory")
    local = region_of(cmid, bytes(MEGABYTE))
    cmid.post_read(1, local, addr, rkey, flags=SIGNALED)
    wc = await side.completion(cmid.send_cq)
    assert (wc.wr_id, wc.opcode, wc.byte_len) == (1, WCOpcode.RDMA_READ, MEGABYTE)
    assert bytes(local.buf) == pattern(MEGABYTE, 1)

    half = MEGABYTE // 2
    local.buf[:half] = pattern(half, 2)
    cmid.post_write(2, local, addr, rkey, 0, half, SIGNALED)
    wc = await side.completion(cmid.send_cq)
    assert (wc.wr_id, wc.opcode) == (2, WCOpcode.RDMA_WRITE)

    values = region_of(cmid, bytes(16))
    last = addr + MEGABYTE - 8
    before = int.from_bytes(pattern(MEGABYTE, 1)[-8:], "little")
    swap = SendWR(3, WROpcode.ATOMIC_CMP_AND_SWP, [values.sge(0, 8)], SIGNALED)
    swap.set_wr_atomic(rkey, last, before, 42)
    add = SendWR(4, WROpcode.ATOMIC_FETCH_AND_ADD, [values.sge(8, 8)], SIGNALED)
    add.set_wr_atomic(rkey, last, 4)
    post(cmid, swap, add)
    assert (await side.completion(cmid.send_cq)).opcode is WCOpcode.COMP_SWAP
    assert (await side.completion(cmid.send_cq)).opcode is WCOpcode.FETCH_ADD
    assert int.from_bytes(values.buf[:8], "little") == before
    assert int.from_bytes(values.buf[8:], "little") == 42

    local.buf[:5000] = pattern(5000, 3)
    pieces = [local.sge(0, 1000), local.sge(1000, 3001), local.sge(4001, 999)]
    wr = SendWR(5, WROpcode.RDMA_WRITE_WITH_IMM, pieces, SIGNALED, imm_data=77)
    wr.set_wr_rdma(rkey, addr + half)
    post(cmid, wr)
    await side.completion(cmid.send_cq)
    await ended(side, cmid)


# -- rejections -----------------------------------------------------------------------------------------


async def rejected_passive(side: Side) -> None:
    listener = side.listening()
    request = await side.event(E.CONNECT_REQUEST)
    request.id.reject(b"not you")
    request.id.destroy()
    await side.told("done")
    listener.destroy()


async def rejected_active(side: Side) -> None:
    cmid = await side.resolved()
    qp = cmid.create_qp()
    cmid.connect()
    event = await side.event(E.REJECTED)
    assert event.status == 28
    assert event.private_data == b"not you".ljust(148, b"\0")
    assert isinstance(event.error, ConnectionRefusedError)
    assert qp.state is QPState.ERR
    with pytest.raises(RdmaError):
        cmid.connect()
    side.tell("done", None)
    cmid.destroy()


async def no_listener_passive(side: Side) -> None:
    listener = side.make_id()
    listener.bind_addr((side.address, side.port + 1))
    listener.listen()  # this process rejects requests for the other port
    side.tell("listening", None)
    await side.told("done")
    listener.destroy()


async def no_listener_active(side: Side) -> None:
    cmid = await side.resolved()
    cmid.create_qp()
    cmid.connect()
    event = await side.event(E.REJECTED)
    assert event.status == 8
    assert "nobody listens" in str(event.error)
    side.tell("done", None)
    cmid.destroy()


# -- permissions ----------------------------------------------------------------------------------------

ATTEMPTS = ("wrong key", "before", "beyond", "not for writing", "not for reading", "not for atomics", "revoked")


async def permissions_passive(side: Side) -> None:
    listener = side.listening()
    for attempt in ATTEMPTS:
        request = await side.event(E.CONNECT_REQUEST)
        cmid = request.id
        qp = cmid.create_qp()
        buffer = bytearray(pattern(4096))
        access = EVERYTHING
        if attempt == "not for writing":
            access &= ~AccessFlag.REMOTE_WRITE
        if attempt == "not for reading":
            access &= ~AccessFlag.REMOTE_READ
        if attempt == "not for atomics":
            access &= ~AccessFlag.REMOTE_ATOMIC
        region = MR(cmid.pd, buffer, access)
        inner = MR(cmid.pd, memoryview(buffer)[1024:2048], access)
        cmid.accept()
        await side.event(E.ESTABLISHED)
        told = inner if attempt in ("before", "beyond") else region
        addr, rkey = inner.addr, told.rkey
        if attempt == "revoked":
            region.close()
        side.tell("memory", (addr, rkey))
        event = await side.event(E.DISCONNECTED)
        assert event.id is cmid
        assert bytes(buffer) == pattern(4096), attempt
        assert qp.state is QPState.ERR, attempt
        cmid.destroy()
        region.close()
        inner.close()
    listener.destroy()


async def permissions_active(side: Side) -> None:
    await side.told("listening")
    for attempt in ATTEMPTS:
        side.heard["listening"] = None
        cmid, _ = await connected(side)
        addr, rkey = await side.told("memory")
        local = region_of(cmid, b"!" * 1024)
        if attempt == "not for reading":
            cmid.post_read(1, local, addr, rkey, flags=SIGNALED)
        elif attempt == "not for atomics":
            wr = SendWR(1, WROpcode.ATOMIC_FETCH_AND_ADD, [local.sge(0, 8)], SIGNALED)
            wr.set_wr_atomic(rkey, addr, 1)
            post(cmid, wr)
        else:
            addr += {"before": -1, "beyond": 1}.get(attempt, 0)
            rkey ^= attempt == "wrong key"
            cmid.post_write(1, local, addr, rkey, flags=SIGNALED)
        cmid.post_write(2, local, addr, rkey, flags=SIGNALED)
        wc = await side.completion(cmid.send_cq, WCStatus.REM_ACCESS_ERR)
        assert wc.wr_id == 1
        wc = await side.completion(cmid.send_cq, WCStatus.WR_FLUSH_ERR)
        assert wc.wr_id == 2
        assert bytes(local.buf) == b"!" * 1024
        await ended(side, cmid)


# -- late receives, shared receive queues ---------------------------------------------------------------


async def late_passive(side: Side) -> None:
    listener, cmid, region = await accepted(side, 0, 64)
    await side.told("sent")
    cmid.post_recv(9, region, 0, 64)
    wc = await side.completion(cmid.recv_cq)
    assert (wc.wr_id, wc.byte_len) == (9, 5)
    await side.told("acknowledged")
    await ended(side, cmid, listener)


async def late_active(side: Side) -> None:
    cmid, _ = await connected(side)
    cmid.post_send(1, b"early", flags=SIGNALED | SendFlag.INLINE)
    side.tell("sent", None)
    await side.completion(cmid.send_cq)
    side.tell("acknowledged", None)
    await ended(side, cmid, first=False)


async def shared_passive(side: Side) -> None:
    listener = side.listening()
    cmids: list[CmId] = []
    request = await side.event(E.CONNECT_REQUEST)
    first = request.id
    srq = first.create_srq(SrqInitAttr(SrqAttr(32)))
    region = region_of(first, bytes(32 * 64))
    srq.post_recv([RecvWR(slot, [region.sge(slot * 64, 64)]) for slot in range(32)])
    established = 0
    while established < 2:
        if request.type is E.ESTABLISHED:  # the second REQ may arrive before the first RTU
            established += 1
        else:
            cmids.append(request.id)
            request.id.create_qp(QPInitAttr(srq=srq, cap=QPCap(8, 1)))
            request.id.accept()
        if established < 2:
            request = await side.event()
    side.tell("both", None)
    for cmid in cmids:
        for index in range(10):
            wc = await side.completion(cmid.recv_cq)
            assert cmid.qp is not None
            assert wc.qp_num == cmid.qp.qp_num
            assert bytes(region.buf[wc.wr_id * 64 :][: wc.byte_len]) == b"message %d" % index
    side.tell("all", None)
    left = set(cmids)
    while left:
        event = await side.event()
        if event.type is not E.TIMEWAIT_EXIT:  # of the first id, if the second disconnects late
            assert event.type is E.DISCONNECTED
            event.id.disconnect()
            left.remove(event.id)
    destroy(*reversed(cmids), listener)


async def shared_active(side: Side) -> None:
    await side.told("listening")
    cmids = []
    for _ in range(2):
        side.heard["listening"] = None
        cmid, _ = await connected(side, 0)
        cmids.append(cmid)
    await side.told("both")
    for index in range(10):
        for cmid in cmids:
            cmid.post_send(index, b"message %d" % index, flags=SendFlag.INLINE)
    await side.told("all")
    for cmid in cmids:
        await ended(side, cmid)


# -- application queue pairs ----------------------------------------------------------------------------


async def external_passive(side: Side) -> None:
    listener, cmid, _ = await accepted(side)
    wc = await side.completion(cmid.recv_cq)
    assert wc.byte_len == 6
    cmid.post_send(1, b"indeed", flags=SIGNALED | SendFlag.INLINE)
    await side.completion(cmid.send_cq)
    side.tell("acknowledged", None)
    await ended(side, cmid, listener, first=False)


async def external_active(side: Side) -> None:
    maker = await side.resolved()
    qp = maker.create_qp()  # made by one id, and connected by another one that only has its number
    region = region_of(maker, bytes(64))
    side.heard["listening"] = None
    cmid = await side.resolved()
    qp.modify(*cmid.init_qp_attr(QPState.INIT))
    qp.post_recv(RecvWR(1, [region.sge()]))
    cmid.connect(ConnParam(qp_num=qp.qp_num))
    event = await side.event(E.CONNECT_RESPONSE)
    assert event.id is cmid
    for state in (QPState.INIT, QPState.RTR, QPState.RTS):
        qp.modify(*cmid.init_qp_attr(state))
    cmid.establish()
    qp.post_send(SendWR(2, WROpcode.SEND, [b"really"], SIGNALED | SendFlag.INLINE))
    await side.completion(maker.send_cq)
    wc = await side.completion(maker.recv_cq)
    assert bytes(region.buf[: wc.byte_len]) == b"indeed"
    await side.told("acknowledged")
    qp.to_error()
    await ended(side, cmid, maker)


# -- negotiated resources, limits of private data -------------------------------------------------------


async def limits_passive(side: Side) -> None:
    listener = side.listening()
    request = await side.event(E.CONNECT_REQUEST)
    cmid = request.id
    assert request.private_data == b"x" * 56
    qp = cmid.create_qp()
    for wrong in (ConnParam(b"y" * 197), ConnParam(responder_resources=129), ConnParam(initiator_depth=129)):
        with pytest.raises(RdmaError) as failed:
            cmid.accept(wrong)
        assert failed.value.errno == errno.EINVAL
    cmid.accept(ConnParam(b"y" * 196, responder_resources=3, initiator_depth=4, rnr_retry_count=5))
    await side.event(E.ESTABLISHED)
    attr = qp.query()[0]
    assert (attr.max_dest_rd_atomic, attr.max_rd_atomic) == (3, 4)
    assert (attr.retry_cnt, attr.rnr_retry) == (2, 3)
    await ended(side, cmid, listener, first=False)


async def limits_active(side: Side) -> None:
    cmid = await side.resolved()
    qp = cmid.create_qp()
    with pytest.raises(RdmaError) as failed:
        cmid.connect(ConnParam(b"x" * 57))
    assert failed.value.errno == errno.EINVAL
    param = ConnParam(b"x" * 56, responder_resources=7, initiator_depth=9, retry_count=2, rnr_retry_count=3)
    cmid.connect(param)
    event = await side.event(E.ESTABLISHED)
    assert event.private_data == b"y" * 196
    attr = qp.query()[0]
    assert (attr.max_rd_atomic, attr.max_dest_rd_atomic) == (3, 4)
    assert (attr.retry_cnt, attr.rnr_retry) == (2, 5)
    await ended(side, cmid)


# -- ordering -------------------------------------------------------------------------------------------


async def fenced_passive(side: Side) -> None:
    listener, cmid, _ = await accepted(side)
    region = region_of(cmid, pattern(200_000))
    side.tell("memory", (region.addr, region.rkey))
    await ended(side, cmid, listener, first=False)


async def fenced_active(side: Side) -> None:
    """A fenced write does not overtake the read before it. Unsignaled requests have no completion."""
    cmid, _ = await connected(side)
    addr, rkey = await side.told("memory")
    local = region_of(cmid, bytes(200_000))
    other = region_of(cmid, pattern(200_000, 1))
    cmid.post_read(1, local, addr, rkey)
    cmid.post_write(2, other, addr, rkey, flags=SendFlag.FENCE)
    cmid.post_read(3, other, addr, rkey, flags=SIGNALED)
    wc = await side.completion(cmid.send_cq)
    assert wc.wr_id == 3
    assert bytes(local.buf) == pattern(200_000)
    assert bytes(other.buf) == pattern(200_000, 1)
    await ended(side, cmid)


# -- datagrams ------------------------------------------------------------------------------------------

#: Each datagram is sent so often: no more of them are lost together.
COPIES = 8
DATAGRAM_ROOM = 40 + 4096
FOREIGN = 0xBAD


def with_datagrams(cmid: CmId) -> MR:
    """Give a datagram id a queue pair and receives. Returns the region of the receives."""
    cmid.create_qp(QPInitAttr(QPType.UD, cap=QPCap(128, 128, 2, 2, 64)))
    region = region_of(cmid, bytes(128 * DATAGRAM_ROOM), AccessFlag.LOCAL_WRITE)
    for slot in range(128):
        cmid.post_recv(slot, region, slot * DATAGRAM_ROOM, DATAGRAM_ROOM)
    return region


def datagram_sizes(cmid: CmId) -> list[int]:
    assert cmid.verbs is not None
    mtu = cmid.verbs.query_port(cmid.port_num).active_mtu
    assert mtu is not None
    return [0, 1, 3, 64, mtu.bytes]


def send_datagrams(cmid: CmId, ah: AH, qpn: int, qkey: int, salt: int) -> None:
    """Send a datagram of each size, with its number as immediate data, and one with a wrong Q_Key."""
    sizes = datagram_sizes(cmid)
    out = region_of(cmid, b"".join(pattern(size, salt) for size in sizes), AccessFlag.LOCAL_WRITE)
    offset = 0
    for number, size in enumerate(sizes):
        half = size // 2
        sg = [out.sge(offset, half), out.sge(offset + half, size - half)] if size else []
        offset += size
        wr = SendWR(number, WROpcode.SEND_WITH_IMM, sg, 0, imm_data=number, ah=ah, remote_qpn=qpn, remote_qkey=qkey)
        post(cmid, *[wr] * COPIES)
    wrong = SendWR(FOREIGN, WROpcode.SEND_WITH_IMM, [], SIGNALED, imm_data=FOREIGN, ah=ah, remote_qpn=qpn)
    wrong.remote_qkey = qkey ^ 1
    post(cmid, wrong)


async def take_datagrams(side: Side, cmid: CmId, region: MR, salt: int) -> tuple[WC, memoryview]:
    """Receive until there was one of each size. Returns a completion and its memory."""
    sizes = datagram_sizes(cmid)
    seen: set[int] = set()
    used: set[int] = set()
    while len(seen) < len(sizes):
        wc = await side.completion(cmid.recv_cq)
        assert wc.wr_id not in used, "each receive completes once"
        used.add(wc.wr_id)
        assert wc.imm_data is not None
        assert wc.imm_data != FOREIGN, "the Q_Key was wrong"
        size = sizes[wc.imm_data]
        memory = region.buf[wc.wr_id * DATAGRAM_ROOM : (wc.wr_id + 1) * DATAGRAM_ROOM]
        assert (wc.opcode, wc.byte_len, wc.has_grh) == (WCOpcode.RECV, 40 + size, True)
        assert bytes(memory[40 : 40 + size]) == pattern(size, salt)
        seen.add(wc.imm_data)
    return wc, memory


async def datagrams_passive(side: Side) -> None:
    listener = side.listening(port_space=PortSpace.UDP)
    request = await side.event(E.CONNECT_REQUEST)
    assert request.private_data == b"who?".ljust(180, b"\0")
    cmid = request.id
    region = with_datagrams(cmid)
    cmid.accept(ConnParam(b"me"))
    wc, memory = await take_datagrams(side, cmid, region, 1)
    with AH(cmid.pd, wc=wc, grh=memory, port_num=cmid.port_num) as back:
        assert cmid.qp is not None
        send_datagrams(cmid, back, wc.src_qp, cmid.qp.query()[0].qkey, 2)
        sent = await side.completion(cmid.send_cq)
        assert sent.wr_id == FOREIGN, "the others were not signaled"
    await side.told("received")
    destroy(cmid, listener)


async def datagrams_active(side: Side) -> None:
    cmid = await side.resolved(PortSpace.UDP)
    region = with_datagrams(cmid)
    cmid.connect(ConnParam(b"who?"))
    event = await side.event(E.ESTABLISHED)
    assert isinstance(event.param, UdParam)
    assert event.private_data == b"me".ljust(136, b"\0")
    with AH(cmid.pd, event.param.ah_attr) as ah:
        send_datagrams(cmid, ah, event.param.qp_num, event.param.qkey, 1)
        sent = await side.completion(cmid.send_cq)
        assert sent.wr_id == FOREIGN
        wc, _ = await take_datagrams(side, cmid, region, 2)
        assert wc.src_qp == event.param.qp_num
    side.tell("received", None)
    destroy(cmid)


# -- unreliable connections -----------------------------------------------------------------------------

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
    assert cmid.qp is not None
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
    assert cmid.qp is not None
    assert cmid.qp.state is QPState.RTS
    side.tell("received", None)
    await ended(side, cmid)


NAMES = sorted(name.removesuffix("_passive") for name in list(globals()) if name.endswith("_passive"))
