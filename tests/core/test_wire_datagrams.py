"""Datagram queue pairs on the socket layer of the compiled core, over the loopback interface."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

import pytest

from rdmacm import RdmaError, open_device
from rdmacm.address import Gid
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.grh import GRH
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.ud import UdEngine, UdSend
from rdmacm.proto.work import SendWork
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    PD,
    QP,
    SGE,
    SRQ,
    WC,
    AccessFlag,
    AHAttr,
    Context,
    GlobalRoute,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    ReregMRFlag,
    SendFlag,
    SendWR,
    WCStatus,
    WROpcode,
)
from rdmacm.verbs.attr import SrqAttr
from rdmacm.verbs.enums import EventType, QPAttrMask, SrqAttrMask
from support.clock import eventually
from support.compiled import CoreEnd
from support.ud import make_ud

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

SIGNALED, INLINE, SOLICITED = SendFlag.SIGNALED, SendFlag.INLINE, SendFlag.SOLICITED
QKEY = 0x01234567
DEPTH = 64
ROOM = 512


@dataclass
class End(CoreEnd):
    context: Context
    pd: PD
    cq: CQ
    qp: QP
    memory: bytearray
    region: MR

    @property
    def backend(self) -> SoftUdQP:
        backend = self.qp.backend
        assert isinstance(backend, SoftUdQP)
        return backend

    def receive(self, count: int = 1, room: int = ROOM) -> None:
        self.qp.post_recv([RecvWR(n, [self.region.sge(n * ROOM, room)]) for n in range(count)])

    def message(self, slot: int, length: int) -> bytes:
        start = slot * ROOM + 40
        return bytes(self.memory[start : start + length])

    def completions(self, count: int) -> list[WC]:
        found: list[WC] = []
        while len(found) < count:
            assert self.cq.wait(10)
            found += self.cq.poll(count - len(found))
        return found

    def close(self) -> None:
        for part in (self.qp, self.cq, self.region, self.pd):
            part.close()


def make_end(cqe: int = 4 * DEPTH, srq: bool = False) -> End:
    context = open_device("soft_lo")
    pd, cq, memory = PD(context), CQ(context, cqe), bytearray(DEPTH * ROOM)
    attr = QPInitAttr(QPType.UD, scq=cq, rcq=cq, cap=QPCap(DEPTH, DEPTH, 2, 2, 256), srq=SRQ(pd) if srq else None)
    qp = QP(pd, attr, QPAttr(qkey=QKEY, port_num=1, sq_psn=7))
    return End(context, pd, cq, qp, memory, MR(pd, memory, AccessFlag.LOCAL_WRITE))


def handle(end: End, host: str = "127.0.0.1", **more: int) -> AH:
    """An address handle of the loopback device."""
    gid = Gid.from_ip(ip_address(host).packed)
    index = next(row.gid_index for row in end.context.query_gid_table() if row.gid == gid)
    return AH(end.pd, AHAttr(is_global=True, gr=GlobalRoute(dgid=gid, sgid_index=index, **more)))


class Ends:
    """Two queue pairs that have joined the port: each has sent and received."""

    def __init__(self, host: str = "127.0.0.1", **more: int) -> None:
        self.left, self.right = make_end(), make_end()
        self.there, self.back = handle(self.left, host, **more), handle(self.right, host)
        for end, other, ah in ((self.left, self.right, self.there), (self.right, self.left, self.back)):
            other.receive()
            end.qp.post_send(SendWR(1, sg=[b"join"], send_flags=SIGNALED | INLINE, **self.to(other, ah)))  # type: ignore[arg-type]
            end.completions(1)
            other.completions(1)
        assert self.left.backend.core is not None
        assert self.right.backend.core is not None

    @staticmethod
    def to(other: End, ah: AH) -> dict[str, object]:
        return {"ah": ah, "remote_qpn": other.qp.qp_num, "remote_qkey": QKEY}

    def wr(self, number: int, data: bytes | SGE, flags: SendFlag = SIGNALED | INLINE, **more: object) -> SendWR:
        fields = {**self.to(self.right, self.there), **more}
        return SendWR(number, sg=[data], send_flags=flags, **fields)  # type: ignore[arg-type]

    def close(self) -> None:
        self.there.close()
        self.back.close()
        self.left.close()
        self.right.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def told(found: list[WC]) -> list[tuple[int, str, int]]:
    return [(wc.wr_id, wc.status.name, wc.byte_len) for wc in found]


def test_list_is_one_train_and_keeps_its_order(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive(DEPTH)
    before = left.taken
    texts = [b"%02d" % number * 32 for number in range(DEPTH)]
    left.qp.post_send([ends.wr(number, text) for number, text in enumerate(texts)])
    assert told(right.completions(DEPTH)) == [(n, "SUCCESS", 104) for n in range(DEPTH)]
    assert [right.message(n, 64) for n in range(DEPTH)] == texts
    assert told(left.completions(DEPTH)) == [(n, "SUCCESS", 64) for n in range(DEPTH)]
    assert left.taken - before == 1


def test_packets_of_a_train_that_is_cut_have_no_identification(ends: Ends) -> None:
    """The system gives them 0 then, which their ICRCs cover, and the headers before the messages show."""
    left, right = ends.left, ends.right
    right.receive(DEPTH)
    sock = left.wire._out.sockets[False]
    assert sock is not None
    sock.setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK: the kernel refuses trains without UDP checksums
    before = left.wire.counters["trains_cut"]
    try:
        wrs = [ends.wr(number, b"", SIGNALED) for number in range(8)]
        left.memory[:80] = texts = bytes(range(80))
        for n, wr in enumerate(wrs):
            wr.sg = [left.region.sge(10 * n, 3), left.region.sge(10 * n + 3, 7)]
        left.qp.post_send(wrs)
        assert told(right.completions(8)) == [(n, "SUCCESS", 50) for n in range(8)]
        assert [right.message(n, 10) for n in range(8)] == [texts[10 * n : 10 * n + 10] for n in range(8)]
    finally:
        sock.setsockopt(socket.SOL_SOCKET, 11, 0)
    left.completions(8)
    left.context.query_counters()
    assert left.wire.counters["trains_cut"] == before + 1
    headers = [GRH.unpack(memoryview(right.memory)[n * ROOM :]) for n in range(8)]
    assert [header.identification for header in headers] == [0] * 8


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_fields_of_a_message(host: str) -> None:
    ends = Ends(host, traffic_class=0x2E, hop_limit=9)
    left, right = ends.left, ends.right
    right.receive(2)
    left.memory[:9] = b"immediate"
    before = left.taken
    wr = ends.wr(5, left.region.sge(0, 9), SOLICITED, opcode=WROpcode.SEND_WITH_IMM, imm_data=0xFEDCBA98)
    left.qp.post_send([wr, ends.wr(6, b"", INLINE | SIGNALED)])
    first, second = right.completions(2)
    assert (first.wr_id, first.byte_len, first.imm_data, first.solicited, first.has_grh) == (
        *(0, 49, 0xFEDCBA98, True, True),
    )
    assert (first.qp_num, first.src_qp) == (right.qp.qp_num, left.qp.qp_num)
    assert (second.byte_len, second.imm_data, second.solicited) == (40, None, False)
    assert right.message(0, 9) == b"immediate"
    grh = GRH.unpack(right.memory)
    assert (grh.sgid, grh.dgid) == (Gid.from_ip(ip_address(host).packed), Gid.from_ip(ip_address(host).packed))
    assert (grh.traffic_class, grh.hop_limit, grh.paylen) == (0x2E, 9, 8 + 24 + 12 + 4)
    assert told(left.completions(1)) == [(6, "SUCCESS", 0)], "the first was not signaled"
    assert left.taken > before
    ends.close()


def test_answer_by_the_address_of_the_completion(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive()
    left.receive()
    left.qp.post_send(ends.wr(1, b"question"))
    (wc,) = right.completions(1)
    with AH(right.pd, wc=wc, grh=right.memory, port_num=1) as back:
        for number in range(2):  # the first is posted by Python, which finds the route
            right.qp.post_send(SendWR(number, sg=[b"answer"], send_flags=INLINE, ah=back, remote_qpn=wc.src_qp,
                                      remote_qkey=QKEY))  # fmt: skip
            left.completions(2 - number)
            left.receive()
        assert left.message(0, 6) == b"answer"
        assert back.core_route is not None


def test_what_the_core_does_not_take_is_posted_by_python(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive(3)
    left.memory[:6] = b"abcdef"
    two = SendWR(2, sg=[left.region.sge(0, 2), left.region.sge(4, 2)], **Ends.to(right, ends.there))  # type: ignore[arg-type]
    left.qp.post_send([ends.wr(1, left.region.sge(0, 3), SIGNALED), two, ends.wr(3, b"last")])
    assert [wc.byte_len for wc in right.completions(3)] == [43, 44, 44]
    assert right.message(1, 4) == b"abef"
    assert [wc.wr_id for wc in left.completions(3)] == [1, 2, 3]
    assert left.backend.core is not None
    assert left.backend._sends + left.backend.core.take_posted_counts()[0] == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"sg": [b"x" * 257]}, errno.EINVAL),
        ({"sg": [b"x"], "send_flags": 0}, errno.EINVAL),
        ({"remote_qpn": 1 << 24}, errno.EINVAL),
        ({"remote_qkey": 1 << 32}, errno.EINVAL),
        ({"remote_qkey": -1}, errno.EINVAL),
        ({"ah": None}, errno.EINVAL),
        ({"opcode": WROpcode.RDMA_WRITE}, errno.EINVAL),
        ({"opcode": WROpcode.SEND_WITH_IMM, "imm_data": 1 << 32}, errno.EINVAL),
        ({"send_flags": 1 << 20}, errno.EINVAL),
        ({"wr_id": 2.5}, errno.EINVAL),
    ],
)
def test_refused_request_ends_the_list(ends: Ends, change: dict[str, object], code: int) -> None:
    left, right = ends.left, ends.right
    right.receive()
    wrong = ends.wr(2, b"wrong")
    for name, value in change.items():
        setattr(wrong, name, value)
    with pytest.raises(RdmaError) as caught:
        left.qp.post_send([ends.wr(1, b"before"), wrong])
    assert caught.value.errno == code
    assert caught.value.bad_wr is wrong
    assert told(right.completions(1)) == [(0, "SUCCESS", 46)]
    assert told(left.completions(1)) == [(1, "SUCCESS", 6)]


def test_handle_that_is_closed_or_of_another_domain(ends: Ends) -> None:
    left, right = ends.left, ends.right
    with PD(left.context) as pd:
        with AH(pd, ends.there.attr) as other:
            other.core_route = ends.there.core_route
            with pytest.raises(RdmaError, match="another protection domain"):
                left.qp.post_send(ends.wr(1, b"x", ah=other))
    with AH(left.pd, ends.there.attr) as closed:
        right.receive()
        left.qp.post_send(ends.wr(1, b"x", ah=closed))
        assert closed.core_route is ends.there.core_route, "one route for both"
        right.completions(1)
        left.completions(1)
    with pytest.raises(RdmaError) as caught:
        left.qp.post_send(ends.wr(1, b"x", ah=closed))
    assert caught.value.errno == errno.EBADF


def test_message_longer_than_the_mtu(ends: Ends) -> None:
    left, right = ends.left, ends.right
    mtu = left.backend._find_mtu()
    right.qp.post_recv(RecvWR(1, [right.region.sge(0, 40 + mtu)]))
    left.qp.post_send(ends.wr(1, left.region.sge(0, mtu), SIGNALED))
    assert [wc.byte_len for wc in right.completions(1)] == [40 + mtu]
    with pytest.raises(RdmaError) as caught:
        left.qp.post_send(ends.wr(1, left.region.sge(0, mtu + 1), SIGNALED))
    assert caught.value.errno == errno.EINVAL


def test_wrong_key_leads_to_sqe_and_back(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive(2)
    left.receive()
    sge = left.region.sge(0, 4)
    sge.lkey ^= 1
    left.qp.post_send([ends.wr(1, b"good"), ends.wr(9, sge, SIGNALED), ends.wr(2, b"flushed")])
    assert [(wc.wr_id, wc.status) for wc in left.completions(3)] == [
        (1, WCStatus.SUCCESS),
        (9, WCStatus.LOC_PROT_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]
    assert left.qp.state is QPState.SQE
    left.qp.post_send(ends.wr(3, b"flushed too"))
    assert left.completions(1)[0].status is WCStatus.WR_FLUSH_ERR
    right.qp.post_send(SendWR(4, sg=[b"in"], send_flags=INLINE, **Ends.to(left, ends.back)))  # type: ignore[arg-type]
    assert left.completions(1)[0].byte_len == 42, "receives go on"
    left.qp.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
    left.qp.post_send(ends.wr(5, b"again"))
    left.qp.post_send(ends.wr(6, b"by the core"))
    assert [wc.status for wc in left.completions(2)] == [WCStatus.SUCCESS] * 2
    assert left.backend.core is not None


def test_full_queues(ends: Ends) -> None:
    left, right = ends.left, ends.right
    with pytest.raises(RdmaError) as caught:
        right.qp.post_recv([RecvWR(1, [right.region.sge(0, ROOM)])] * (DEPTH + 1))
    assert caught.value.errno == errno.ENOMEM
    wrs = [ends.wr(number, b"x", INLINE) for number in range(DEPTH + 1)]
    with pytest.raises(RdmaError) as caught:
        left.qp.post_send(wrs)
    assert caught.value.errno == errno.ENOMEM
    assert caught.value.bad_wr is wrs[-1]
    right.completions(DEPTH)
    for _ in range(3):  # silent requests free their places as well
        right.receive(DEPTH)
        left.qp.post_send(wrs[:DEPTH])
        right.completions(DEPTH)


def dropped(end: End) -> dict[str, int]:
    return {name: count for name, count in end.context.query_counters().items() if count and "dropped" in name}


def test_what_is_dropped_is_counted(ends: Ends) -> None:
    left, right = ends.left, ends.right
    before, taken, packets = dropped(right), left.taken, right.backend._mux.dropped["packet"]
    right.receive(1, 44)
    left.qp.post_send([ends.wr(n, data, INLINE) for n, data in enumerate((b"five5", b"four", b"none", b"nope"))])
    left.qp.post_send(ends.wr(1, b"bad!", INLINE, remote_qkey=QKEY + 1))
    with_imm = {"opcode": WROpcode.SEND_WITH_IMM, "imm_data": 5}
    left.qp.post_send(ends.wr(1, b"bad!", INLINE, remote_qkey=QKEY + 1, **with_imm))
    (wc,) = right.completions(1)
    assert (wc.byte_len, right.message(0, 4)) == (44, b"four")
    reasons = {"dropped_short_receive": 1, "dropped_no_receive": 2, "dropped_qkey": 2}

    def counted() -> bool:
        assert not right.cq.poll(1)
        return {name: dropped(right).get(name, 0) - before.get(name, 0) for name in reasons} == reasons

    eventually(counted, "not all are counted")
    assert right.backend._mux.dropped["packet"] == packets + 3
    assert left.taken > taken


def test_train_with_packets_of_several_queue_pairs(ends: Ends) -> None:
    right, other, shared = ends.right, make_end(), make_end(srq=True)
    srq = shared.qp.srq
    assert srq is not None
    srq.post_recv([RecvWR(n, [shared.region.sge(0, ROOM)]) for n in range(2)])
    right.receive(5)
    other.receive(5)
    ends.left.qp.post_send(ends.wr(1, b"join", INLINE, remote_qpn=other.qp.qp_num))
    other.completions(1)
    assert other.backend.core is not None
    before, packets = ends.left.taken, right.backend._mux.dropped["packet"]
    order = (right, other, right, right, other, other, other, other, shared, right, right)
    ends.left.qp.post_send([ends.wr(n, b"%04d" % n, INLINE, remote_qpn=e.qp.qp_num) for n, e in enumerate(order)])
    assert [wc.byte_len for wc in right.completions(5)] == [44] * 5
    assert [wc.byte_len for wc in other.completions(4)] == [44] * 4
    shared.completions(1)
    assert [right.message(n, 4) for n in range(5)] == [b"%04d" % n for n in (0, 2, 3, 9, 10)]
    assert [other.message(n, 4) for n in range(1, 5)] == [b"%04d" % n for n in (1, 4, 5, 6)]
    assert ends.left.taken == before + 1
    assert right.backend._mux.dropped["packet"] == packets, "of the one without a receive, others were accepted"
    shared.qp.close()
    srq.close()
    for end in (other, shared):
        end.close()


def test_packet_to_an_address_of_another_device(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive()
    source, destination = ip_address("127.0.0.1").packed, ip_address("127.0.0.2").packed
    engine: UdEngine[str] = make_ud(left.qp.qp_num)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("127.0.0.1", 0))
        for host in (destination, source):
            icrc = icrc_between(source, host, sender.getsockname()[1])
            work = SendWork(1, WROpcode.SEND, [memoryview(b"foreign")])
            engine.post_send(UdSend(work, "way", icrc, right.qp.qp_num, QKEY))
            ((_, pieces, _),) = engine.datagrams(1, 0)
            sender.sendto(b"".join(pieces), (str(ip_address(host)), ROCE_PORT))
    before = right.backend._mux.dropped["address"]
    assert [wc.byte_len for wc in right.completions(1)] == [47]
    assert GRH.unpack(right.memory).dgid.ip == source, "the second packet"
    assert right.backend._mux.dropped["address"] == before + 1


def test_receives_of_several_elements(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive(1)
    right.qp.post_recv(RecvWR(7, [right.region.sge(ROOM, 30), right.region.sge(ROOM + 30, 100)]))
    right.receive(1)
    before = left.taken
    left.qp.post_send([ends.wr(n, b"one more") for n in range(3)])
    assert [wc.wr_id for wc in right.completions(3)] == [0, 7, 0]
    assert right.message(1, 8) == b"one more"
    assert left.taken == before + 1


@pytest.mark.parametrize("change", ["buffer", "nothing"])
def test_region_that_is_registered_anew(ends: Ends, change: str) -> None:
    left, right = ends.left, ends.right
    old = bytearray(100)
    region = MR(right.pd, old, AccessFlag.LOCAL_WRITE)
    right.qp.post_recv(RecvWR(5, [region.sge()]))
    if change == "buffer":
        region.rereg(ReregMRFlag.CHANGE_TRANSLATION, None, bytearray(100))
    else:
        region.rereg(ReregMRFlag.CHANGE_ACCESS, access=AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ)
    assert right.backend.core is not None
    left.qp.post_send(ends.wr(1, b"into it"))
    (wc,) = right.completions(1)
    if change == "buffer":
        assert wc.status is WCStatus.LOC_PROT_ERR
        eventually(lambda: right.qp.state is QPState.ERR, "it has not ended")
        assert not any(old)
    else:
        assert old[40:47] == b"into it"
    right.qp.to_error()
    region.close()


def test_region_that_is_deregistered_under_way(ends: Ends) -> None:
    left, right = ends.left, ends.right
    memory = bytearray(64)
    region = MR(right.pd, memory, AccessFlag.LOCAL_WRITE)
    right.qp.post_recv(RecvWR(5, [region.sge()]))
    region.close()
    with pytest.raises(BufferError):
        memory.append(1)
    left.qp.post_send(ends.wr(1, b"into it"))
    right.completions(1)
    assert bytes(memory[40:47]) == b"into it"
    memory.append(1)


def test_region_of_another_domain_is_not_written(ends: Ends) -> None:
    left, right = ends.left, ends.right
    assert right.pd is not left.pd
    right.qp.post_recv(RecvWR(5, [left.region.sge(5 * ROOM, 100)]))
    left.qp.post_send(ends.wr(1, b"x"))
    assert right.completions(1)[0].status is WCStatus.LOC_PROT_ERR
    eventually(lambda: right.qp.state is QPState.ERR, "it has not ended")
    assert right.backend.core is None
    assert not any(left.memory[5 * ROOM :])


def test_states(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive(3)
    left.qp.modify(QPAttr(qp_state=QPState.SQD), QPAttrMask.STATE)
    left.qp.post_send([ends.wr(1, b"waits"), ends.wr(2, b"too")])
    assert left.backend.core is not None
    assert not left.cq.poll(1)
    left.receive()
    right.qp.post_send(SendWR(4, sg=[b"in"], send_flags=INLINE, **Ends.to(left, ends.back)))  # type: ignore[arg-type]
    assert left.completions(1)[0].byte_len == 42, "receives go on"
    left.qp.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
    assert [wc.wr_id for wc in left.completions(2)] == [1, 2]
    right.completions(2)
    right.qp.modify(QPAttr(qkey=QKEY + 1), QPAttrMask.QKEY)
    left.qp.post_send(ends.wr(3, b"another", remote_qkey=QKEY + 1))
    assert right.completions(1)[0].byte_len == 47
    right.receive(2)
    right.qp.to_error()
    assert [wc.status for wc in right.completions(2)] == [WCStatus.WR_FLUSH_ERR] * 2
    assert right.backend.core is None


def test_before_rts_it_receives_and_does_not_send(ends: Ends) -> None:
    left, right = ends.left, make_end()
    right.qp.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
    assert right.backend.core is None
    init = QPAttr(qp_state=QPState.INIT, qkey=QKEY, port_num=1)
    right.qp.modify(init, QPAttrMask.STATE | QPAttrMask.QKEY | QPAttrMask.PORT | QPAttrMask.PKEY_INDEX)
    right.receive()
    assert right.backend.core is None
    right.qp.modify(QPAttr(qp_state=QPState.RTR), QPAttrMask.STATE)
    assert right.backend.core is not None
    before = left.taken
    left.qp.post_send(ends.wr(1, b"early", INLINE, remote_qpn=right.qp.qp_num))
    assert right.completions(1)[0].byte_len == 45
    assert left.taken == before + 1
    with handle(right) as ah, pytest.raises(RdmaError) as caught:
        right.qp.post_send(ends.wr(1, b"too early", ah=ah, remote_qpn=left.qp.qp_num))
    assert caught.value.errno == errno.EINVAL
    right.close()


def test_tap_sees_every_packet(ends: Ends) -> None:
    left, right = ends.left, ends.right
    seen: list[bool] = []
    before = left.taken
    left.wire.tap = lambda outgoing, *_: seen.append(outgoing)
    try:
        right.receive()
        left.qp.post_send(ends.wr(1, b"x"))
        right.completions(1)
        left.completions(1)
        assert left.taken == before
        assert {True, False} == set(seen)
    finally:
        left.wire.tap = None
    right.receive()
    left.qp.post_send(ends.wr(1, b"x"))
    right.completions(1)
    left.completions(1)
    assert left.taken > before


def test_shared_receive_queue(ends: Ends) -> None:
    left, shared = ends.left, make_end(srq=True)
    srq = shared.qp.srq
    assert srq is not None
    for number in range(2):  # of the first packet its engine is made
        srq.post_recv(RecvWR(number, [shared.region.sge(0, ROOM)]))
        left.qp.post_send(ends.wr(number, b"shared", INLINE, remote_qpn=shared.qp.qp_num))
        assert [wc.wr_id for wc in shared.completions(1)] == [number]
    assert shared.backend.core is not None
    before = left.taken
    srq.modify(SrqAttr(srq_limit=3), SrqAttrMask.LIMIT)
    srq.post_recv([RecvWR(n, [shared.region.sge(n * ROOM, ROOM)]) for n in range(4)])
    left.qp.post_send([ends.wr(n, b"%04d" % n, INLINE, remote_qpn=shared.qp.qp_num) for n in range(3)])
    assert [wc.wr_id for wc in shared.completions(3)] == [0, 1, 2]
    assert [shared.message(n, 4) for n in range(3)] == [b"0000", b"0001", b"0002"]
    assert left.taken == before + 1
    with shared.context.get_async_event(10) as event:
        assert event.event_type is EventType.SRQ_LIMIT_REACHED
    shared.qp.close()
    srq.close()
    shared.close()


def test_packets_in_other_states_are_dropped(ends: Ends) -> None:
    """Those of a queue pair that has no engine, or has ended, are not left to Python."""
    left, other = ends.left, make_end()
    mux, before = left.backend._mux, left.backend._mux.dropped["state"]
    other.qp.to_error()
    left.qp.post_send([ends.wr(n, b"x", INLINE, remote_qpn=other.qp.qp_num) for n in range(2)])

    def counted() -> bool:
        left.cq.poll(1)
        mux.count_strays()
        return mux.dropped["state"] > before

    eventually(counted, "not counted")
    assert other.backend._engine is None
    other.close()


def test_queue_that_overflows(ends: Ends) -> None:
    right, small = ends.right, make_end(cqe=2)
    small.receive(4)
    wrs = [ends.wr(n, b"x", INLINE, remote_qpn=small.qp.qp_num) for n in range(3)]
    ends.left.qp.post_send(wrs[:1])
    small.completions(1)
    ends.left.qp.post_send(wrs)
    assert small.cq.wait(10)
    with pytest.raises(RdmaError) as caught:
        while True:
            small.cq.poll(5)
    assert caught.value.errno == errno.EOVERFLOW
    assert small.qp.state is QPState.ERR
    assert right.qp.state is QPState.RTS
    small.close()


def test_garbage_with_receives_is_collected() -> None:
    ends = Ends()
    ends.right.receive(3)
    ends.close()
    backend = ends.right.backend
    assert backend.core is None
    del backend, ends
    gc.collect()


def test_threads_post_and_poll(ends: Ends) -> None:
    left, right = ends.left, ends.right
    count, failed = 300, []

    def work() -> None:
        try:
            for _ in range(count):
                left.qp.post_send(ends.wr(1, b"a message"))
                left.completions(1)
        except BaseException as error:
            failed.append(error)
            raise

    right.receive(DEPTH)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    received = 0
    while any(thread.is_alive() for thread in threads) or not received:
        found = right.cq.poll(16)  # some datagrams may be lost: the senders do not wait
        received += len(found)
        assert all((wc.status, wc.byte_len) == (WCStatus.SUCCESS, 49) for wc in found)
        if found:
            right.receive(len(found))
    for thread in threads:
        thread.join()
    assert not failed


def test_fork_leaves_the_port_to_the_parent(ends: Ends) -> None:
    left, right = ends.left, ends.right
    right.receive()
    child = os.fork()
    if not child:
        status = 1
        try:
            left.qp.post_send(ends.wr(1, b"from the child"))
        except RdmaError as error:
            status = 0 if error.errno == errno.EBADF else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    left.qp.post_send(ends.wr(1, b"from the parent"))
    assert right.completions(1)[0].byte_len == 55
