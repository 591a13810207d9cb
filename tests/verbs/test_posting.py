"""The checks of posted work requests, and what reaches the device."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from rdmacm import RdmaError
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    MW,
    PD,
    QP,
    SGE,
    SRQ,
    AccessFlag,
    AHAttr,
    Context,
    GlobalRoute,
    Mtu,
    MWBindInfo,
    MWType,
    PlacementType,
    QPAttr,
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
    WROpcode,
)
from support.verbs import GIDS, LIMITS, RecordingDevice, RecordingQP, RecordingSRQ, context_of

O, S = WROpcode, QPState  # noqa: E741
INLINE = SendFlag.INLINE | SendFlag.SIGNALED


class Rig:
    """A queue pair ready to send, its region of 64 bytes, and what reached the device."""

    def __init__(
        self, device: RecordingDevice, context: Context, qp_type: QPType = QPType.RC, max_inline_data: int = 16
    ) -> None:
        self.pd, self.cq = PD(context), CQ(context, 16)
        self.mr = MR(self.pd, bytearray(64), AccessFlag.LOCAL_WRITE)
        cap = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=2, max_recv_sge=2, max_inline_data=max_inline_data)
        self.qp = QP(self.pd, QPInitAttr(qp_type, scq=self.cq, rcq=self.cq, cap=cap))
        backend = device.living[-1]
        assert isinstance(backend, RecordingQP)
        self.backend = backend
        if qp_type is QPType.UD:
            self.qp.to_init(QPAttr())
        backend.state = S.RTS
        self.vector = AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0]))

    def refused(self, wr: SendWR, text: str) -> None:
        with pytest.raises(RdmaError, match=text) as raised:
            self.qp.post_send(wr)
        assert raised.value.errno == errno.EINVAL
        assert raised.value.address == f"wr_id {wr.wr_id}"
        assert self.backend.sent == []

    def accepted(self, wr: SendWR) -> None:
        self.qp.post_send(wr)
        assert self.backend.sent == [wr]
        self.backend.sent.clear()

    def close(self) -> None:
        for thing in (self.qp, self.mr, self.cq, self.pd):
            thing.close()


@pytest.fixture
def rig(device: RecordingDevice, context: Context) -> Iterator[Rig]:
    made = Rig(device, context)
    yield made
    made.close()


def test_states_decide_whether_work_can_be_posted(rig: Rig) -> None:
    for state in S:
        rig.backend.state = state
        if state in (S.RTS, S.SQD, S.SQE, S.ERR):
            rig.accepted(SendWR())
        else:
            with pytest.raises(RdmaError, match=f"a queue pair in {state.name} takes no sends") as raised:
                rig.qp.post_send([SendWR()])
            assert raised.value.errno == errno.EINVAL
        if state is S.RESET:
            with pytest.raises(RdmaError, match="a queue pair in RESET takes no receives") as raised:
                rig.qp.post_recv(RecvWR())
            assert raised.value.errno == errno.EINVAL
        else:
            rig.qp.post_recv(RecvWR())
    assert len(rig.backend.received) == len(S) - 1
    assert rig.backend.sent == []


LEGAL = {
    QPType.RC: {
        O.SEND,
        O.SEND_WITH_IMM,
        O.SEND_WITH_INV,
        O.RDMA_WRITE,
        O.RDMA_WRITE_WITH_IMM,
        O.RDMA_READ,
        O.ATOMIC_CMP_AND_SWP,
        O.ATOMIC_FETCH_AND_ADD,
        O.LOCAL_INV,
        O.BIND_MW,
        O.FLUSH,
        O.ATOMIC_WRITE,
    },
    QPType.UC: {O.SEND, O.SEND_WITH_IMM, O.RDMA_WRITE, O.RDMA_WRITE_WITH_IMM, O.LOCAL_INV, O.BIND_MW},
    QPType.UD: {O.SEND, O.SEND_WITH_IMM},
}


@pytest.mark.parametrize("qp_type", LEGAL, ids=lambda t: t.name)
def test_each_qp_type_accepts_its_opcodes(device: RecordingDevice, context: Context, qp_type: QPType) -> None:
    rig = Rig(device, context, qp_type)
    with AH(rig.pd, rig.vector) as ah, MW(rig.pd, MWType.TYPE_2) as mw:
        for opcode in O:
            sg = [] if opcode in (O.FLUSH, O.LOCAL_INV, O.BIND_MW) else [rig.mr.sge(0, 8)]
            wr = SendWR(7, opcode, sg, ah=ah, remote_addr=8, flush_type=1)
            if opcode in (O.LOCAL_INV, O.BIND_MW):
                wr.set_bind_wr(mw, MWBindInfo(rig.mr, rig.mr.addr, 8, 0))
            if opcode in LEGAL[qp_type]:
                rig.accepted(wr)
            else:
                rig.refused(wr, f"{opcode.name}.* is not for {qp_type.name}")
        for number in (11, 13, 16, 1 << 40, -1, -14):
            unknown: Any = number
            rig.refused(SendWR(7, unknown, ah=ah), f"{number} is not for")
    rig.close()


def test_scatter_gather_lists_are_checked(rig: Rig) -> None:
    sge = rig.mr.sge(0, 4)
    rig.accepted(SendWR(1, sg=[sge, sge]))
    rig.accepted(SendWR(1, sg=(sge, sge)))
    rig.accepted(SendWR(1))
    rig.refused(SendWR(9, sg=[sge] * 3), "3 elements, and max_send_sge is 2")
    rig.refused(SendWR(9, sg=[SGE(0, -1, 0)]), "an element of -1 bytes")
    rig.refused(SendWR(9, sg=[SGE(0, -1, 0)], send_flags=INLINE), "an element of -1 bytes")
    rig.qp.post_recv(RecvWR(1, [sge, sge]))
    buffer: Any = bytearray(8)
    for sg, text in (
        ([sge] * 3, "3 elements, and max_recv_sge is 2"),
        ([SGE(0, -1, 0)], "an element of -1 bytes"),
        ([buffer], "a buffer that is not registered"),
    ):
        with pytest.raises(RdmaError, match=f"post_recv wr_id 5: {text}") as raised:
            rig.qp.post_recv(RecvWR(5, sg))
        assert raised.value.errno == errno.EINVAL
    assert len(rig.backend.received) == 1


def test_message_length_is_limited(rig: Rig) -> None:
    maximum = LIMITS.max_msg_sz
    rig.accepted(SendWR(1, sg=[SGE(0, maximum, 1)]))
    rig.accepted(SendWR(1, O.RDMA_READ, sg=[SGE(0, maximum, 1)]))
    rig.refused(SendWR(1, sg=[SGE(0, maximum, 1), SGE(0, 1, 1)]), "65537 bytes, and a message has at most 65536")
    rig.refused(SendWR(1, O.RDMA_WRITE, sg=[SGE(0, maximum + 1, 1)]), "65537 bytes")


def test_inline_data_is_checked(rig: Rig) -> None:
    for data in (b"x" * 16, bytearray(16), memoryview(bytes(16))):
        rig.accepted(SendWR(1, sg=[data], send_flags=INLINE))
        rig.accepted(SendWR(1, O.RDMA_WRITE, sg=[data], send_flags=int(INLINE)))
        rig.refused(SendWR(1, sg=[data]), r"a buffer that is not registered.*try: SendFlag\.INLINE")
    rig.accepted(SendWR(1, sg=[b"x" * 8, rig.mr.sge(0, 8)], send_flags=INLINE))
    rig.refused(SendWR(1, sg=[b"x" * 17], send_flags=INLINE), "17 bytes inline, and max_inline_data is 16")
    rig.refused(SendWR(1, sg=[b"x" * 8, rig.mr.sge(0, 9)], send_flags=INLINE), "17 bytes inline")
    rig.refused(SendWR(1, sg=[memoryview(bytes(8)).cast("Q")] * 3, send_flags=INLINE), "3 elements")
    rig.accepted(SendWR(1, sg=[memoryview(bytes(16)).cast("Q")], send_flags=INLINE))
    rig.refused(SendWR(1, sg=[memoryview(bytes(24)).cast("Q")], send_flags=INLINE), "24 bytes inline")
    rig.refused(SendWR(1, sg=[memoryview(bytes(8))[::2]], send_flags=INLINE), "not contiguous")
    text: Any = "text"
    rig.refused(SendWR(1, sg=[text], send_flags=INLINE), "str is neither an SGE nor a buffer")
    for opcode in (O.RDMA_READ, O.ATOMIC_FETCH_AND_ADD):
        rig.refused(SendWR(1, opcode, [rig.mr.sge(0, 8)], INLINE), "INLINE is for data that is sent")


@pytest.mark.parametrize("opcode", [O.ATOMIC_CMP_AND_SWP, O.ATOMIC_FETCH_AND_ADD], ids=lambda o: o.name)
def test_operands_of_atomics_are_checked(rig: Rig, opcode: WROpcode) -> None:
    eight = [rig.mr.sge(0, 8)]
    rig.accepted(SendWR(1, opcode, eight, remote_addr=0x1000, compare_add=(1 << 64) - 1, swap=(1 << 64) - 1))
    rig.accepted(SendWR(1, opcode, [rig.mr.sge(0, 4), rig.mr.sge(4, 4)], remote_addr=8))
    rig.refused(SendWR(1, opcode, [rig.mr.sge(0, 4)], remote_addr=8), "an atomic is for 8 bytes, not 4")
    rig.refused(SendWR(1, opcode, [rig.mr.sge(0, 16)], remote_addr=8), "8 bytes, not 16")
    rig.refused(SendWR(1, opcode, eight, remote_addr=0x1004), "a multiple of 8, not 0x1004")
    rig.refused(SendWR(1, opcode, eight, compare_add=1 << 64), "64 bits")
    rig.refused(SendWR(1, opcode, eight, compare_add=-1), "64 bits")
    rig.refused(SendWR(1, opcode, eight, swap=-1), "64 bits")


def test_atomic_write_is_checked(device: RecordingDevice, context: Context, rig: Rig) -> None:
    write, eight = O.ATOMIC_WRITE, [rig.mr.sge(0, 8)]
    rig.accepted(SendWR(1, write, eight, remote_addr=0x1000))
    rig.accepted(SendWR(1, write, [rig.mr.sge(0, 4), rig.mr.sge(4, 4)], remote_addr=8))
    for size in (0, 1, 4, 7, 9, 16):
        rig.refused(SendWR(1, write, [rig.mr.sge(0, size)], remote_addr=8), f"an atomic is for 8 bytes, not {size}")
        rig.refused(SendWR(1, write, [bytes(size)], INLINE, remote_addr=8), f"8 bytes, not {size}")
    rig.refused(SendWR(1, write, remote_addr=8), "8 bytes, not 0")
    for address in range(0x1001, 0x1008):
        rig.refused(SendWR(1, write, eight, remote_addr=address), "a multiple of 8")
    without_inline = Rig(device, context, max_inline_data=0)
    without_inline.accepted(SendWR(1, write, [b"8 bytes!"], INLINE, remote_addr=8))
    without_inline.refused(SendWR(1, write, [b"nine byte"], INLINE, remote_addr=8), "9 bytes")
    without_inline.close()


def test_flush_is_checked(rig: Rig) -> None:
    wr = SendWR(1, O.FLUSH)
    rig.refused(wr, "flush_type is 0x0")
    wr.set_wr_flush(7, (1 << 64) - 1, LIMITS.max_msg_sz, PlacementType.GLOBAL, SelectivityLevel.MR)
    rig.accepted(wr)
    assert (wr.rkey, wr.remote_addr, wr.flush_length, wr.flush_type, wr.flush_level) == (7, 2**64 - 1, 1 << 16, 1, 1)
    for placement in (1, 2, 3):
        for level in (0, 1):
            rig.accepted(SendWR(1, O.FLUSH, flush_type=placement, flush_level=level))
    for placement in (-1, 0, 4, 7, 8, 1 << 40):
        rig.refused(SendWR(1, O.FLUSH, flush_type=placement), "flush_type is .*flags of PlacementType")
    for level in (-1, 2, 3, 1 << 40):
        rig.refused(SendWR(1, O.FLUSH, flush_type=1, flush_level=level), "flush_level is .*SelectivityLevel")
    for length in (-1, LIMITS.max_msg_sz + 1, 1 << 64):
        rig.refused(SendWR(1, O.FLUSH, flush_type=1, flush_length=length), "flush_length is .* 0 to 65536")
    for sg in ([rig.mr.sge(0, 8)], [rig.mr.sge(0, 0)]):
        rig.refused(SendWR(1, O.FLUSH, sg, flush_type=1), "FLUSH takes no elements")
    rig.refused(SendWR(1, O.FLUSH, [b""], INLINE, flush_type=1), "FLUSH takes no elements")
    rig.refused(SendWR(1, O.FLUSH, flush_type=1, remote_addr=1 << 64), "remote_addr")


def test_fields_out_of_range_are_refused(rig: Rig) -> None:
    for opcode in (O.RDMA_WRITE, O.RDMA_WRITE_WITH_IMM, O.RDMA_READ):
        for address in (1 << 64, -1):
            rig.refused(SendWR(1, opcode, remote_addr=address), "remote_addr .* more than 64 bits")
        rig.refused(SendWR(1, opcode, rkey=1 << 32), "rkey .* more than 32 bits")
    rig.accepted(SendWR(1, O.RDMA_WRITE, remote_addr=(1 << 64) - 1, rkey=(1 << 32) - 1))
    for opcode in (O.SEND_WITH_IMM, O.RDMA_WRITE_WITH_IMM):
        rig.refused(SendWR(1, opcode, imm_data=1 << 32), "imm_data")
        rig.accepted(SendWR(1, opcode, imm_data=(1 << 32) - 1))
    rig.refused(SendWR(1, O.SEND_WITH_INV, invalidate_rkey=-1), "invalidate_rkey")
    rig.accepted(SendWR(1, O.SEND, remote_addr=-1, imm_data=-1))  # a SEND ignores them


@pytest.mark.parametrize("value", [4.0, "4", None])
def test_numbers_that_are_not_whole_are_refused_before_anything_is_queued(rig: Rig, value: Any) -> None:
    ours, theirs = rig.mr.addr, [rig.mr.sge(0, 8)]
    swap: dict[str, Any] = {"opcode": O.ATOMIC_CMP_AND_SWP, "sg": theirs}
    requests: dict[str, list[SendWR | RecvWR]] = {
        "wr_id": [SendWR(value), RecvWR(value), SendWR(value, sg=[b"x"], send_flags=INLINE)],
        "addr": [kind(1, sg=[SGE(value, 4, rig.mr.lkey)]) for kind in (SendWR, RecvWR)],
        "length": [kind(1, sg=[SGE(ours, value, rig.mr.lkey)]) for kind in (SendWR, RecvWR)],
        "lkey": [kind(1, sg=[SGE(ours, 4, value)]) for kind in (SendWR, RecvWR)],
        "send_flags": [SendWR(1, send_flags=value)],
        "remote_addr": [SendWR(1, O.RDMA_WRITE, remote_addr=value)],
        "rkey": [SendWR(1, O.RDMA_READ, rkey=value)],
        "compare_add": [SendWR(1, compare_add=value, **swap)],
        "swap": [SendWR(1, swap=value, **swap)],
        "imm_data": [SendWR(1, O.SEND_WITH_IMM, imm_data=value)],
        "invalidate_rkey": [SendWR(1, O.SEND_WITH_INV, invalidate_rkey=value)],
        "flush_length": [SendWR(1, O.FLUSH, flush_length=value, flush_type=1)],
        "flush_type": [SendWR(1, O.FLUSH, flush_type=value)],
        "flush_level": [SendWR(1, O.FLUSH, flush_type=1, flush_level=value)],
    }
    for name, wrs in requests.items():
        for wr in wrs:
            post: Any = rig.qp.post_send if isinstance(wr, SendWR) else rig.qp.post_recv
            for posted in (wr, [wr]):
                with pytest.raises(RdmaError, match=f"{name} is {value!r}, not a whole number") as raised:
                    post(posted)
                assert (raised.value.errno, raised.value.bad_wr) == (errno.EINVAL, wr)
    assert (rig.backend.sent, rig.backend.received) == ([], [])


@pytest.mark.parametrize(("mtu", "maximum"), [(Mtu.MTU_1024, 1024), (Mtu.MTU_2048, 2048), (None, 4096)])
def test_datagrams_need_an_address_handle_and_fit_the_mtu(mtu: Mtu | None, maximum: int) -> None:
    device = RecordingDevice()
    context = context_of(device, mtu)
    rig = Rig(device, context, QPType.UD)
    with AH(rig.pd, rig.vector) as ah, PD(context) as other, AH(other, rig.vector) as foreign:
        wr = SendWR(1, sg=[rig.mr.sge()], remote_qpn=0xFFFFFF, remote_qkey=0xFFFFFFFF)
        rig.refused(wr, "a datagram needs an address handle")
        wr.set_wr_ud(ah, 0xFFFFFF, 0xFFFFFFFF)
        rig.accepted(wr)
        rig.accepted(SendWR(1, sg=[SGE(0, maximum, 1)], ah=ah))
        rig.refused(SendWR(1, sg=[SGE(0, maximum + 1, 1)], ah=ah), f"a message has at most {maximum}")
        rig.refused(SendWR(1, ah=foreign), "of another protection domain")
        rig.refused(SendWR(1, ah=ah, remote_qpn=1 << 24), "remote_qpn")
        rig.refused(SendWR(1, ah=ah, remote_qkey=1 << 32), "remote_qkey")
    with pytest.raises(RdmaError, match="the AH is closed"):
        rig.qp.post_send(SendWR(1, ah=ah))
    rig.close()


def test_requests_before_a_refused_one_are_posted(rig: Rig) -> None:
    wrs = [SendWR(0), SendWR(1), SendWR(2, O.TSO), SendWR(3)]
    with pytest.raises(RdmaError, match="post_send wr_id 2: "):
        rig.qp.post_send(wrs)
    assert rig.backend.sent == wrs[:2]
    rig.backend.sent.clear()
    rig.qp.post_send(iter(wrs[:2]))
    assert rig.backend.sent == wrs[:2]
    rig.qp.post_send([])
    rig.backend.sent.clear()

    recvs = [RecvWR(0), RecvWR(1, [SGE(0, 1, 1)] * 3), RecvWR(2)]
    with pytest.raises(RdmaError, match="post_recv wr_id 1: "):
        rig.qp.post_recv(recvs)
    assert rig.backend.received == recvs[:1]


def test_full_send_queue_raises_enomem(rig: Rig) -> None:
    wrs = [SendWR(n) for n in range(9)]
    with pytest.raises(RdmaError, match="full") as raised:
        rig.qp.post_send(wrs)
    assert raised.value.errno == errno.ENOMEM
    assert raised.value.bad_wr is wrs[8]
    assert rig.backend.sent == wrs[:8]


WRONG: Any = "wrong"


def test_refused_request_is_in_the_error(rig: Rig) -> None:
    """However it is posted, alone or among others, and whatever is wrong with it."""
    one = SGE(0, 1, 1)
    for bad in (
        SendWR(1, O.TSO),
        SendWR(1, WRONG),
        SendWR(1, sg=WRONG),
        SendWR(1, send_flags=WRONG),
        SendWR(1, sg=[one] * 3),
    ):
        for wrs in (bad, [bad, SendWR(2)], iter([SendWR(0), bad, SendWR(2)])):
            rig.backend.sent.clear()
            with pytest.raises(RdmaError) as raised:
                rig.qp.post_send(wrs)
            assert (raised.value.errno, raised.value.bad_wr) == (errno.EINVAL, bad)
            assert len(rig.backend.sent) == (not isinstance(wrs, SendWR | list))
    for bad_recv in (RecvWR(1, [one] * 3), RecvWR(1, WRONG), RecvWR(1, [SGE(0, WRONG, 1)])):
        for recvs in (bad_recv, [RecvWR(0), bad_recv]):
            rig.backend.received.clear()
            with pytest.raises(RdmaError) as raised:
                rig.qp.post_recv(recvs)
            assert (raised.value.errno, raised.value.bad_wr) == (errno.EINVAL, bad_recv)
            assert len(rig.backend.received) == isinstance(recvs, list)
    assert raised.value.bad_wr is bad_recv
    assert pickle.loads(pickle.dumps(raised.value)).bad_wr is None
    with pytest.raises(RdmaError) as raised:
        rig.qp.post_send([WRONG])
    assert raised.value.bad_wr is WRONG


def test_state_refuses_the_first_request(rig: Rig) -> None:
    rig.backend.state = S.RESET
    send, recv = SendWR(), RecvWR()
    for sends in (send, [send, SendWR()], iter([send])):
        with pytest.raises(RdmaError, match="takes no sends") as raised:
            rig.qp.post_send(sends)
        assert raised.value.bad_wr is send
    for recvs in (recv, [recv, RecvWR()]):
        with pytest.raises(RdmaError, match="takes no receives") as raised:
            rig.qp.post_recv(recvs)
        assert raised.value.bad_wr is recv
    with pytest.raises(RdmaError) as raised:
        rig.qp.post_send([])
    assert raised.value.bad_wr is None


def test_receives_are_posted_to_the_shared_receive_queue(device: RecordingDevice, context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    with SRQ(pd, SrqInitAttr(SrqAttr(max_wr=8, max_sge=1))) as srq, QP(pd, QPInitAttr(scq=cq, rcq=cq, srq=srq)) as qp:
        qp.to_init(QPAttr())
        with pytest.raises(RdmaError, match=r"receives come from a shared receive queue.*try: srq\.post_recv"):
            qp.post_recv(RecvWR())
        backend = next(made for made in device.living if isinstance(made, RecordingSRQ))
        one = SGE(0, 1, 1)
        srq.post_recv(RecvWR(1, [one]))
        wrs = [RecvWR(2), RecvWR(3, [one, one])]
        with pytest.raises(RdmaError, match="wr_id 3: 2 elements, and max_recv_sge is 1") as raised:
            srq.post_recv(wrs)
        assert raised.value.bad_wr is wrs[1]
        with pytest.raises(RdmaError) as raised:
            srq.post_recv(wrs[1])
        assert raised.value.bad_wr is wrs[1]
        assert [wr.wr_id for wr in backend.received] == [1, 2]
    cq.close()
