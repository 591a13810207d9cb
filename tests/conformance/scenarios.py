"""Scenarios of two ends, independent of the network between them; see support/scenario.py."""

from __future__ import annotations

import errno
import hashlib
from dataclasses import replace
from typing import Any

from conformance.features import features_of, group_of
from rdmacm import CmEventType, CmId, PortSpace
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.verbs import (
    AH,
    MR,
    MW,
    QP,
    WC,
    AccessFlag,
    MWBindInfo,
    MWType,
    PlacementType,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SelectivityLevel,
    SendFlag,
    SendWR,
    SrqAttr,
    SrqInitAttr,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from support.scenario import Side, refused

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
    cmid.create_qp(QPInitAttr(cap=QPCap(64, 64, 4, 4, 64)))
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
    cmid.qp.post_send(list(wrs))


# -- messages -------------------------------------------------------------------------------------------


async def messages_passive(side: Side) -> None:
    listener = side.listening()
    request = await side.event(E.CONNECT_REQUEST)
    assert request.private_data == side.padded(b"from the client", 56)
    cmid = request.id
    assert cmid.dst_port
    assert cmid.src_port == side.port
    region = prepared(cmid)
    cmid.accept(ConnParam(b"from the server"))
    await side.event(E.ESTABLISHED)
    for index, size in enumerate(SIZES):
        wc = await side.completion(cmid.recv_cq)
        number = None if side.is_iwarp else index  # there is no immediate data
        assert (wc.opcode, wc.wr_id, wc.byte_len, wc.imm_data) == (WCOpcode.RECV, index, size, number)
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
    assert event.private_data == side.padded(b"from the server", 196)
    out = region_of(cmid, b"".join(map(pattern, SIZES)))
    offset = 0
    for index, size in enumerate(SIZES):
        sg = [out.sge(offset, size)] if size else []
        opcode = WROpcode.SEND if side.is_iwarp else WROpcode.SEND_WITH_IMM
        post(cmid, SendWR(index, opcode, sg, SIGNALED, imm_data=index))
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
LAST = int.from_bytes(pattern(MEGABYTE, 1)[-8:], "little")


async def remote_passive(side: Side) -> None:
    listener, cmid, _ = await accepted(side, 1, 64)
    region = region_of(cmid, pattern(MEGABYTE, 1))
    side.tell("memory", (region.addr, region.rkey))
    wc = await side.completion(cmid.recv_cq)
    if side.is_iwarp:
        assert (wc.opcode, wc.byte_len) == (WCOpcode.RECV, 0)
    else:
        assert (wc.opcode, wc.imm_data, wc.byte_len) == (WCOpcode.RECV_RDMA_WITH_IMM, 77, 5000)
    half = MEGABYTE // 2
    assert bytes(region.buf[:half]) == pattern(half, 2)
    assert bytes(region.buf[half : half + 5000]) == pattern(5000, 3)
    last = int.from_bytes(region.buf[-8:], "little")
    assert last == (LAST if side.is_iwarp else 46)
    await ended(side, cmid, listener, first=False)


async def remote_active(side: Side) -> None:
    """On iWARP a SEND takes the place of immediate data, and there are no atomics."""
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

    if not side.is_iwarp:
        await changed_by_atomics(side, cmid, addr + MEGABYTE - 8, rkey)
    local.buf[:5000] = pattern(5000, 3)
    pieces = [local.sge(0, 1000), local.sge(1000, 3001), local.sge(4001, 999)]
    opcode = WROpcode.RDMA_WRITE if side.is_iwarp else WROpcode.RDMA_WRITE_WITH_IMM
    wr = SendWR(5, opcode, pieces, SIGNALED, imm_data=77)
    wr.set_wr_rdma(rkey, addr + half)
    post(cmid, wr)
    await side.completion(cmid.send_cq)
    if side.is_iwarp:
        post(cmid, SendWR(6, WROpcode.SEND, [], SIGNALED))
        await side.completion(cmid.send_cq)
    await ended(side, cmid)


async def changed_by_atomics(side: Side, cmid: CmId, last: int, rkey: int) -> None:
    values = region_of(cmid, bytes(16))
    before = LAST
    swap = SendWR(3, WROpcode.ATOMIC_CMP_AND_SWP, [values.sge(0, 8)], SIGNALED)
    swap.set_wr_atomic(rkey, last, before, 42)
    add = SendWR(4, WROpcode.ATOMIC_FETCH_AND_ADD, [values.sge(8, 8)], SIGNALED)
    add.set_wr_atomic(rkey, last, 4)
    post(cmid, swap, add)
    assert (await side.completion(cmid.send_cq)).opcode is WCOpcode.COMP_SWAP
    assert (await side.completion(cmid.send_cq)).opcode is WCOpcode.FETCH_ADD
    assert int.from_bytes(values.buf[:8], "little") == before
    assert int.from_bytes(values.buf[8:], "little") == 42


# -- FLUSH and ATOMIC WRITE -----------------------------------------------------------------------------


async def flushed_passive(side: Side) -> None:
    """Memory for FLUSH_PERSISTENT would have to be persistent; the queue pair permits both, as in Linux."""
    listener, cmid, _ = await accepted(side)
    with refused(errno.EINVAL):
        MR(cmid.pd, bytearray(8), EVERYTHING | AccessFlag.FLUSH_PERSISTENT)
    region = region_of(cmid, bytes(10_000), EVERYTHING | AccessFlag.FLUSH_GLOBAL)
    side.tell("memory", (region.addr, region.rkey))
    wc = await side.completion(cmid.recv_cq)
    assert wc.byte_len == 4
    last = int.from_bytes(region.buf[:8], "little")
    assert last == 2 * 9 + 21
    assert bytes(region.buf[8:]) == pattern(9992)
    await ended(side, cmid, listener, first=False)


async def flushed_active(side: Side) -> None:
    """A record is written and flushed, and only then the word that says that it is there."""
    cmid, _ = await connected(side)
    addr, rkey = await side.told("memory")
    record, word = region_of(cmid, pattern(9992)), region_of(cmid, bytes(8))
    write = SendWR(1, WROpcode.RDMA_WRITE, [record.sge()], SIGNALED, remote_addr=addr + 8, rkey=rkey)
    flush = SendWR(2, WROpcode.FLUSH, send_flags=SIGNALED)
    flush.set_wr_flush(rkey, addr + 8, 9992, PlacementType.GLOBAL, SelectivityLevel.RANGE)
    flush_all = SendWR(3, WROpcode.FLUSH, send_flags=SIGNALED)
    flush_all.set_wr_flush(rkey, 0, 0, PlacementType.GLOBAL, SelectivityLevel.MR)
    word.buf[:] = (42).to_bytes(8, "little")
    store = SendWR(4, WROpcode.ATOMIC_WRITE, [word.sge()], SIGNALED, remote_addr=addr, rkey=rkey)
    post(cmid, write, flush, flush_all, store)
    found = [await side.completion(cmid.send_cq) for _ in range(4)]
    assert [(wc.wr_id, wc.opcode, wc.byte_len) for wc in found] == [
        (1, WCOpcode.RDMA_WRITE, 9992),
        (2, WCOpcode.FLUSH, 9992),
        (3, WCOpcode.FLUSH, 0),
        (4, WCOpcode.ATOMIC_WRITE, 8),
    ]
    # Each value is found by the atomic after it: none is lost, and none is written twice.
    before = region_of(cmid, bytes(8 * 10))
    for number in range(10):
        value = [(2 * number).to_bytes(8, "little")]
        post(
            cmid,
            SendWR(0, WROpcode.ATOMIC_WRITE, value, SendFlag.INLINE, remote_addr=addr, rkey=rkey),
            SendWR(number, WROpcode.ATOMIC_FETCH_AND_ADD, [before.sge(8 * number, 8)], SIGNALED,
                   remote_addr=addr, rkey=rkey, compare_add=21),
        )  # fmt: skip
        assert (await side.completion(cmid.send_cq)).wr_id == number
        assert int.from_bytes(before.buf[8 * number :][:8], "little") == 2 * number
    post(cmid, SendWR(5, WROpcode.SEND, [b"done"], SIGNALED | SendFlag.INLINE))
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
    assert event.private_data == side.padded(b"not you", 148)
    assert isinstance(event.error, ConnectionRefusedError)
    assert qp.state is QPState.ERR
    with refused(errno.EINVAL):
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
    if side.is_iwarp:  # the kernel waits for TCP's answer
        with refused(errno.ECONNREFUSED):
            cmid.connect()
    else:
        cmid.connect()
        event = await side.event(E.REJECTED)
        assert event.status == 8
        assert "nobody listens" in str(event.error)
    side.tell("done", None)
    cmid.destroy()


# -- permissions ----------------------------------------------------------------------------------------

#: What is tried on memory; and what both devices must have for it, other than WRITEs.
ATTEMPTS = (
    *("wrong key", "before", "beyond", "not for writing", "not for reading", "not for atomics", "revoked"),
    *("beyond its window", "not for writing through its window", "invalidated window", "window of another"),
    *("not for flushing", "not persistent", "atomic write beyond", "not for atomic writes"),
)


ATTEMPTS_NEED = {
    "not for atomics": "atomics",
    "beyond its window": "windows",
    "not for writing through its window": "windows",
    "invalidated window": "windows",
    "window of another": "windows",
    "not for flushing": "FLUSH",
    "not persistent": "FLUSH",
    "atomic write beyond": "ATOMIC WRITE",
    "not for atomic writes": "ATOMIC WRITE",
}


async def attempts(side: Side) -> list[str]:
    """What both ends try, as far as their devices have it."""
    own = [each for each in ATTEMPTS if ATTEMPTS_NEED.get(each, "WRITE") in features_of(side.device) | {"WRITE"}]
    if side.is_rxe:  # it takes no notice of a window's length
        own.remove("beyond its window")
    if side.is_siw:  # it answers a READ whether the region may be read or not
        own.remove("not for reading")
    side.tell("attempts", own)
    others = await side.told("attempts")
    return [each for each in own if each in others]


REMOTE = AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC


async def bound_inside(side: Side, cmid: CmId, window: MW, region: MR, addr: int, attempt: str) -> int:
    """Bind a window to 1024 bytes at ``addr``, so that the peer's WRITE there is refused; return its key."""
    access = AccessFlag.REMOTE_READ if "writing" in attempt else REMOTE
    wr = SendWR(1, WROpcode.BIND_MW)
    wr.set_bind_wr(window, MWBindInfo(region, addr, 1023 if "beyond" in attempt else 1024, access))
    qp = cmid.qp
    assert qp is not None
    scq = qp.scq
    with QP(cmid.pd, QPInitAttr(scq=scq, rcq=scq)) as other:
        if "another" in attempt:
            other.to_rts(replace(qp.query()[0], qp_state=QPState.RESET))
            qp = other
        qp.post_send(wr)
        await side.completion(cmid.send_cq)
        if "invalidated" in attempt:
            qp.post_send(SendWR(2, WROpcode.LOCAL_INV, invalidate_rkey=wr.rkey))
            assert (await side.completion(cmid.send_cq)).opcode is WCOpcode.LOCAL_INV
    return wr.rkey


async def permissions_passive(side: Side) -> None:
    listener = side.listening()
    for attempt in await attempts(side):
        request = await side.event(E.CONNECT_REQUEST)
        cmid = request.id
        qp = cmid.create_qp()
        buffer = bytearray(pattern(4096))
        access = EVERYTHING | AccessFlag.MW_BIND
        if attempt in ("not for writing", "not for atomic writes"):
            access &= ~AccessFlag.REMOTE_WRITE
        if attempt == "not persistent":
            access |= AccessFlag.FLUSH_GLOBAL
        if attempt == "not for reading":
            access &= ~AccessFlag.REMOTE_READ
        if attempt == "not for atomics":
            access &= ~AccessFlag.REMOTE_ATOMIC
        region = MR(cmid.pd, buffer, access)
        inner = MR(cmid.pd, memoryview(buffer)[1024:2048], access)
        cmid.accept()
        await side.event(E.ESTABLISHED)
        told = inner if attempt in ("before", "beyond", "atomic write beyond") else region
        addr, rkey = inner.addr, told.rkey
        if attempt == "revoked":
            region.close()
        window = MW(cmid.pd, MWType.TYPE_2) if "window" in attempt else None
        if window is not None:
            rkey = await bound_inside(side, cmid, window, region, addr, attempt)
        side.tell("memory", (addr, rkey))
        event = await side.event(E.DISCONNECTED)
        assert event.id is cmid
        assert bytes(buffer) == pattern(4096), attempt
        assert qp.query()[0].qp_state is QPState.ERR, attempt
        cmid.destroy()
        if window is not None:
            window.close()
        region.close()
        inner.close()
    listener.destroy()


async def permissions_active(side: Side) -> None:
    await side.told("listening")
    for attempt in await attempts(side):
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
        elif attempt in ("not for flushing", "not persistent"):
            wr = SendWR(1, WROpcode.FLUSH, send_flags=SIGNALED)
            wr.set_wr_flush(rkey, addr, 8, 1 if attempt == "not for flushing" else 3, SelectivityLevel.MR)
            post(cmid, wr)
        elif "atomic write" in attempt:
            addr += 1024 if attempt == "atomic write beyond" else 0
            sg = [local.sge(0, 8)]
            post(cmid, SendWR(1, WROpcode.ATOMIC_WRITE, sg, SIGNALED, remote_addr=addr, rkey=rkey))
        else:
            addr += {"before": -1, "beyond": 1}.get(attempt, 0)
            rkey ^= attempt == "wrong key"
            cmid.post_write(1, local, addr, rkey, flags=SIGNALED)
        cmid.post_write(2, local, addr, rkey, flags=SIGNALED)
        if side.is_iwarp:  # there a WRITE completes when it is sent, and the peer ends the connection
            await side.event(E.DISCONNECTED)
            assert bytes(local.buf) == b"!" * 1024
            destroy(cmid)
            continue
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
    if side.is_iwarp:  # the kernel has taken the queue pair to RTS
        await side.event(E.ESTABLISHED)
        assert qp.query()[0].qp_state is QPState.RTS
    else:
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


def depth_of(side: Side, depth: int) -> int:
    """What a queue pair shows of a depth: rdma_rxe rounds it up to a power of two."""
    return 1 << (depth - 1).bit_length() if side.provider.name == "kernel" else depth


async def limits_passive(side: Side) -> None:
    listener = side.listening()
    request = await side.event(E.CONNECT_REQUEST)
    cmid = request.id
    assert request.private_data == b"x" * 56
    qp = cmid.create_qp()
    long = ConnParam(b"y" * (257 if side.is_iwarp else 197))
    for wrong in (long, ConnParam(responder_resources=129), ConnParam(initiator_depth=129)):
        with refused(errno.EINVAL):
            cmid.accept(wrong)
    cmid.accept(ConnParam(b"y" * 196, responder_resources=3, initiator_depth=4, rnr_retry_count=5))
    await side.event(E.ESTABLISHED)
    if not side.is_iwarp:  # there the kernel keeps them to itself
        attr = qp.query()[0]
        assert (attr.max_dest_rd_atomic, attr.max_rd_atomic) == (depth_of(side, 3), depth_of(side, 4))
        assert (attr.retry_cnt, attr.rnr_retry) == (2, 3)
    await ended(side, cmid, listener, first=False)


async def limits_active(side: Side) -> None:
    cmid = await side.resolved()
    qp = cmid.create_qp()
    with refused(errno.EINVAL):
        cmid.connect(ConnParam(b"x" * (257 if side.is_iwarp else 57)))
    param = ConnParam(b"x" * 56, responder_resources=7, initiator_depth=9, retry_count=2, rnr_retry_count=3)
    cmid.connect(param)
    event = await side.event(E.ESTABLISHED)
    assert event.private_data == b"y" * 196
    if not side.is_iwarp:
        attr = qp.query()[0]
        assert (attr.max_rd_atomic, attr.max_dest_rd_atomic) == (depth_of(side, 3), depth_of(side, 4))
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


# -- multicast ------------------------------------------------------------------------------------------


async def multicast(side: Side) -> None:
    """Both ends join a group and send to it; each gets every message of both."""
    cmid = side.make_id(PortSpace.UDP)
    cmid.bind_addr((side.address, 0))
    region = with_datagrams(cmid)
    cmid.join_multicast(group_of(side), context=side)
    event = await side.event(E.MULTICAST_JOIN)
    assert event.join_context is side
    assert isinstance(event.param, UdParam)
    assert (event.param.qp_num, event.param.ah_attr.gr.hop_limit) == (0xFFFFFF, 64)
    side.tell("joined", cmid.qp.qp_num)
    senders = {cmid.qp.qp_num, await side.told("joined")}
    sizes = datagram_sizes(cmid)
    with AH(cmid.pd, event.param.ah_attr) as ah:
        send_datagrams(cmid, ah, event.param.qp_num, event.param.qkey, 3)
        sent = await side.completion(cmid.send_cq)
        assert sent.wr_id == FOREIGN
        seen: set[tuple[int, int]] = set()
        while len(seen) < len(senders) * len(sizes):
            wc = await side.completion(cmid.recv_cq)
            assert wc.imm_data is not None
            assert wc.src_qp in senders
            size, start = sizes[wc.imm_data], wc.wr_id * DATAGRAM_ROOM + 40
            assert wc.byte_len == 40 + size
            assert bytes(region.buf[start : start + size]) == pattern(size, 3)
            seen.add((wc.src_qp, wc.imm_data))
    side.tell("received", None)
    await side.told("received")
    cmid.leave_multicast(group_of(side))
    destroy(cmid)


multicast_passive = multicast_active = multicast


NAMES = sorted(name.removesuffix("_passive") for name in list(globals()) if name.endswith("_passive"))
