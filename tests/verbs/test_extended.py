"""Extended queue pairs and completion queues: batches are posted whole or not at all, completions read by field."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from rdmacm import RdmaError
from rdmacm.proto.work import WC
from rdmacm.verbs import (
    AH,
    CQ,
    CQEX,
    MR,
    PD,
    QP,
    SGE,
    AccessFlag,
    AHAttr,
    Context,
    CqAttrFlag,
    CqInitAttrEx,
    CqInitAttrMask,
    CqWcFlag,
    DataBuffer,
    GlobalRoute,
    PollCqAttr,
    QPAttr,
    QPCap,
    QPEx,
    QPInitAttr,
    QPInitAttrEx,
    QPInitAttrMask,
    QPState,
    QPType,
    SendFlag,
    SendOpsFlag,
    SendWR,
    WCFlag,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from support.verbs import GIDS, RecordingCQ, RecordingDevice, RecordingQP, context_of

O = WROpcode  # noqa: E741
CAP = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=2, max_inline_data=16)


@contextmanager
def fails(code: int, text: str) -> Iterator[pytest.ExceptionInfo[RdmaError]]:
    with pytest.raises(RdmaError, match=text) as raised:
        yield raised
    assert raised.value.errno == code


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test makes."""
    with ExitStack() as made:
        yield made


class Rig:
    """An extended queue pair in RTS, and what reaches its device."""

    def __init__(
        self, stack: ExitStack, device: RecordingDevice, context: Context, qp_type: QPType = QPType.RC, ops: int = 0
    ) -> None:
        self.pd, self.cq = PD(context), stack.enter_context(CQ(context, 16))
        self.mr = stack.enter_context(MR(self.pd, bytearray(64), AccessFlag.LOCAL_WRITE))
        init = QPInitAttrEx(qp_type, scq=self.cq, rcq=self.cq, cap=CAP, send_ops_flags=ops)
        self.qp = stack.enter_context(QPEx(self.pd, init))
        self.backend = cast("RecordingQP", device.living[-1])
        if qp_type is QPType.UD:
            self.qp.to_init(QPAttr())
        self.backend.state = QPState.RTS

    def posted(self, *calls: Callable[[QPEx], object]) -> list[SendWR]:
        """What a batch of these calls posts."""
        self.qp.wr_start()
        for call in calls:
            call(self.qp)
        self.qp.wr_complete()
        found = self.backend.sent[:]
        self.backend.sent.clear()
        return found

    def refused(self, text: str, *calls: Callable[[QPEx], object]) -> object:
        """The ``bad_wr``'s wr_id of a batch that is refused."""
        with fails(errno.EINVAL, text) as raised:
            self.posted(lambda qp: qp.wr_send(), *calls, lambda qp: qp.wr_send())
        assert self.backend.sent == []
        with fails(errno.EINVAL, "no batch has begun"):
            self.qp.wr_complete()
        bad = raised.value.bad_wr
        assert isinstance(bad, SendWR)
        return bad.wr_id


@pytest.fixture
def rig(stack: ExitStack, device: RecordingDevice, context: Context) -> Rig:
    return Rig(stack, device, context)


def fields(wr: SendWR) -> dict[str, Any]:
    """What is set in a request."""
    blank = SendWR(send_flags=0)
    return {name: getattr(wr, name) for name in SendWR.__slots__ if getattr(wr, name) != getattr(blank, name)}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda qp: qp.wr_send(), {}),
        (lambda qp: qp.wr_send_imm(7), {"opcode": O.SEND_WITH_IMM, "imm_data": 7}),
        (lambda qp: qp.wr_send_inv(8), {"opcode": O.SEND_WITH_INV, "invalidate_rkey": 8}),
        (lambda qp: qp.wr_rdma_write(8, 16), {"opcode": O.RDMA_WRITE, "rkey": 8, "remote_addr": 16}),
        (
            lambda qp: qp.wr_rdma_write_imm(8, 16, 5),
            {"opcode": O.RDMA_WRITE_WITH_IMM, "rkey": 8, "remote_addr": 16, "imm_data": 5},
        ),
        (lambda qp: qp.wr_rdma_read(8, 16), {"opcode": O.RDMA_READ, "rkey": 8, "remote_addr": 16}),
        (
            lambda qp: (qp.wr_atomic_cmp_swp(8, 16, 3, 4), qp.wr_set_sge(SGE(1, 8, 2))),
            {"opcode": O.ATOMIC_CMP_AND_SWP, "rkey": 8, "remote_addr": 16, "compare_add": 3, "swap": 4},
        ),
        (
            lambda qp: (qp.wr_atomic_fetch_add(8, 16, 3), qp.wr_set_sge(SGE(1, 8, 2))),
            {"opcode": O.ATOMIC_FETCH_AND_ADD, "rkey": 8, "remote_addr": 16, "compare_add": 3},
        ),
        (lambda qp: qp.wr_local_inv(8), {"opcode": O.LOCAL_INV, "invalidate_rkey": 8}),
        (
            lambda qp: qp.wr_flush(8, 16, 32, 1, 0),
            {"opcode": O.FLUSH, "rkey": 8, "remote_addr": 16, "flush_length": 32, "flush_type": 1},
        ),
        (
            lambda qp: qp.wr_atomic_write(8, 16, b"12345678-"),
            {"opcode": O.ATOMIC_WRITE, "rkey": 8, "remote_addr": 16, "send_flags": 9},
        ),
    ],
)
def test_each_call_begins_its_request(rig: Rig, call: Callable[[QPEx], object], expected: dict[str, Any]) -> None:
    rig.qp.wr_id, rig.qp.wr_flags = 11, SendFlag.FENCE
    (wr,) = rig.posted(call)
    found = fields(wr)
    found.pop("sg", None)
    assert found == {"wr_id": 11, "send_flags": SendFlag.FENCE, **expected}


def test_requests_have_the_id_and_flags_of_their_time(rig: Rig) -> None:
    first, second = rig.mr.sge(0, 8), rig.mr.sge(8, 8)

    def one(qp: QPEx) -> None:
        qp.wr_id, qp.wr_flags = 1, 0
        qp.wr_send()
        qp.wr_id, qp.wr_flags = 2, SendFlag.SIGNALED
        qp.wr_set_sge(first)

    def two(qp: QPEx) -> None:
        qp.wr_send()
        qp.wr_set_sge_list(2, [first, second, first])

    found = rig.posted(one, two)
    assert [(wr.wr_id, wr.send_flags, wr.sg) for wr in found] == [(1, 0, (first,)), (2, 2, (first, second))]


def test_inline_data_are_copied_by_the_call(rig: Rig) -> None:
    data = bytearray(b"inline data")

    def one(qp: QPEx) -> None:
        qp.wr_send()
        qp.wr_set_inline_data(data, 6)
        data[:6] = b"------"
        qp.wr_send()
        qp.wr_set_inline_data(data)
        qp.wr_send()
        qp.wr_set_inline_data_list(2, [DataBuffer(b"abc", 2), DataBuffer(bytearray(b"def"), 3), DataBuffer(b"x", 1)])

    found = rig.posted(one)
    assert [wr.sg for wr in found] == [(b"inline",), (b"------ data",), (b"abdef",)]
    assert {int(wr.send_flags) for wr in found} == {SendFlag.INLINE}


def test_datagrams_have_a_destination(stack: ExitStack, device: RecordingDevice, context: Context) -> None:
    rig = Rig(stack, device, context, QPType.UD)
    ah = AH(rig.pd, AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0])))

    def send(qp: QPEx) -> None:
        qp.wr_send()
        qp.wr_set_ud_addr(ah, 3, 4)

    (wr,) = rig.posted(send)
    assert (wr.ah, wr.remote_qpn, wr.remote_qkey) == (ah, 3, 4)
    with fails(errno.EINVAL, "needs an address handle"):
        rig.posted(lambda qp: qp.wr_send())
    with fails(errno.EINVAL, "not made for RDMA_READ"):
        rig.posted(lambda qp: qp.wr_rdma_read(1, 2))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("imm_data 0x100000000 has more", lambda qp: qp.wr_send_imm(1 << 32)),
        ("imm_data is 1.5, not a whole number", lambda qp: qp.wr_send_imm(1.5)),
        ("rkey 0x100000000 has more", lambda qp: qp.wr_rdma_write(1 << 32, 0)),
        ("remote_addr .* has more", lambda qp: qp.wr_rdma_read(1, 1 << 64)),
        ("atomic .* 8 bytes", lambda qp: qp.wr_atomic_fetch_add(1, 8, 1)),
        ("3 elements, and max_send_sge is 2", lambda qp: (qp.wr_send(), qp.wr_set_sge_list(3, [SGE(0, 1, 1)] * 3))),
        ("num_sge is 2, and there are 1", lambda qp: (qp.wr_send(), qp.wr_set_sge_list(2, [SGE(0, 1, 1)]))),
        ("num_sge is -1", lambda qp: (qp.wr_send(), qp.wr_set_sge_list(-1, [SGE(0, 1, 1)]))),
        ("no len", lambda qp: (qp.wr_send(), qp.wr_set_sge_list(1, 5))),
        ("a buffer that is not registered", lambda qp: (qp.wr_send(), qp.wr_set_sge(b"plain"))),
        ("17 bytes inline", lambda qp: (qp.wr_send(), qp.wr_set_inline_data(bytes(17)))),
        ("length is 4, and there are 3", lambda qp: (qp.wr_send(), qp.wr_set_inline_data(b"abc", 4))),
        ("bytes-like", lambda qp: (qp.wr_send(), qp.wr_set_inline_data("text"))),
        ("num_buf is 1, and", lambda qp: (qp.wr_send(), qp.wr_set_inline_data_list(1, []))),
        ("has no attribute", lambda qp: (qp.wr_send(), qp.wr_set_inline_data_list(1, [b"bytes"]))),
        ("set already", lambda qp: (qp.wr_send(), qp.wr_set_sge(SGE(0, 1, 1)), qp.wr_set_inline_data(b"x"))),
        ("INLINE is for data", lambda qp: (qp.wr_rdma_read(1, 2), qp.wr_set_inline_data(b"x"))),
    ],
)
def test_batch_with_a_wrong_request_posts_nothing(rig: Rig, text: str, call: Callable[[Any], object]) -> None:
    def seven(qp: QPEx) -> None:
        qp.wr_id = 7
        call(qp)
        qp.wr_id = 8

    assert rig.refused(text, seven) == 7
    assert len(rig.posted(lambda qp: qp.wr_send())) == 1


def test_calls_need_a_batch_and_a_request(rig: Rig) -> None:
    qp = rig.qp
    for call in (qp.wr_send, qp.wr_complete, qp.wr_abort, lambda: qp.wr_set_sge(SGE(0, 0, 0))):
        with fails(errno.EINVAL, "no batch has begun"):
            call()
    qp.wr_start()
    for call in (
        lambda: qp.wr_set_sge(SGE(0, 0, 0)),
        lambda: qp.wr_set_inline_data(b""),
        lambda: qp.wr_set_ud_addr(cast("AH", None), 0, 0),
    ):
        with fails(errno.EINVAL, "no request has begun"):
            call()
    with fails(errno.EBUSY, "a batch has begun"):
        qp.wr_start()
    qp.wr_send()
    qp.wr_abort()
    assert (rig.posted(), rig.backend.sent) == ([], [])
    rig.backend.state = QPState.INIT
    with fails(errno.EINVAL, "takes no sends"):
        rig.posted(lambda qp: qp.wr_send())
    rig.backend.state = QPState.RTS
    qp.wr_start()
    qp.wr_send()
    qp.close()
    with fails(errno.EBADF, "closed"):
        qp.wr_complete()
    with fails(errno.EBADF, "closed"):
        qp.wr_start()


def test_operations_are_those_asked_for(stack: ExitStack, device: RecordingDevice, context: Context) -> None:
    rig = Rig(stack, device, context, ops=SendOpsFlag.SEND | SendOpsFlag.RDMA_READ)
    assert len(rig.posted(lambda qp: qp.wr_send(), lambda qp: qp.wr_rdma_read(1, 2))) == 2
    assert rig.refused("was not made for SEND_WITH_IMM", lambda qp: qp.wr_send_imm(1)) == 0
    for qp_type, ops in ((QPType.UD, SendOpsFlag.RDMA_READ), (QPType.RC, SendOpsFlag.TSO)):
        with fails(errno.EOPNOTSUPP, f"{qp_type.name} has no {ops.name}"):
            Rig(stack, device, context, qp_type, ops)
    with fails(errno.EINVAL, "unknown send_ops_flags 0x8000"):
        Rig(stack, device, context, ops=1 << 15)


def test_extended_queue_pair_is_made_from_a_context(stack: ExitStack, context: Context) -> None:
    pd, cq = PD(context), stack.enter_context(CQ(context, 4))
    mask = QPInitAttrMask.PD | QPInitAttrMask.SEND_OPS_FLAGS
    init = QPInitAttrEx(scq=cq, rcq=cq, cap=CAP, comp_mask=mask, pd=pd, send_ops_flags=SendOpsFlag.SEND)
    with QPEx(context, init) as qp:
        assert (qp.pd, qp.query()[1]) == (pd, init)
    with QPEx(pd, QPInitAttr(scq=cq, rcq=cq)) as qp:
        qp.wr_start()
        qp.wr_rdma_write(1, 2)
        qp.wr_abort()
    with fails(errno.EINVAL, "no protection domain of the context"):
        QPEx(context, QPInitAttrEx(scq=cq, rcq=cq))
    with fails(errno.EINVAL, "no protection domain of the context"):
        QPEx(context_of(RecordingDevice()), init)
    with fails(errno.EINVAL, "another protection domain"):
        QPEx(PD(context), init)
    for name in ("create_flags", "max_tso_header", "source_qpn"):
        with fails(errno.EOPNOTSUPP, f"{name} is 2"):
            QP(pd, QPInitAttrEx(scq=cq, rcq=cq, **{name: 2}))  # type: ignore[arg-type]
    with fails(errno.EOPNOTSUPP, "raw packets: comp_mask has <QPInitAttrMask.MAX_TSO_HEADER"):
        QPEx(pd, QPInitAttrEx(scq=cq, rcq=cq, comp_mask=QPInitAttrMask.MAX_TSO_HEADER))
    with fails(errno.EINVAL, "init_attr is None"):
        QPEx(pd, cast("QPInitAttr", None))
    with QP(context, init) as plain:
        assert (plain.pd, isinstance(plain, QPEx)) == (pd, False)
    with fails(errno.EINVAL, "no protection domain of the context"):
        QP(context, QPInitAttr(scq=cq, rcq=cq))
    with fails(errno.EINVAL, "creator is None"):
        QP(cast("PD", None), init)


def test_queue_pair_is_moved_on_when_it_is_made(stack: ExitStack, device: RecordingDevice, context: Context) -> None:
    pd, cq = PD(context), stack.enter_context(CQ(context, 4))
    for qp_type, state in ((QPType.RC, QPState.INIT), (QPType.UD, QPState.RTS)):
        with QP(pd, QPInitAttr(qp_type, scq=cq, rcq=cq), QPAttr(port_num=1, qkey=7)) as qp:
            assert (qp.state, qp.query(1)[0].qp_state) == (state, state)
    before = len(device.living)
    with fails(errno.EINVAL, "no port 9"):
        QPEx(pd, QPInitAttr(scq=cq, rcq=cq), QPAttr(port_num=9))
    assert len(device.living) == before


# -- completion queues ------------------------------------------------------------------------------------

RECEIVED = WC(
    4, WCStatus.SUCCESS, WCOpcode.RECV, byte_len=20, imm_data=0x01020304, qp_num=5, src_qp=6, has_grh=True, vendor_err=9
)
INVALIDATED = WC(5, WCStatus.SUCCESS, WCOpcode.RECV, invalidated_rkey=0x77)


class Polled:
    """An extended completion queue and its recording backend."""

    def __init__(
        self, stack: ExitStack, context: Context, wc_flags: int = CqWcFlag.STANDARD, comp_mask: int = 0, flags: int = 0
    ) -> None:
        init = CqInitAttrEx(cqe=8, wc_flags=wc_flags, comp_mask=comp_mask, flags=flags)
        self.cq = stack.enter_context(CQEX(context, init))
        self.backend = cast("RecordingCQ", self.cq.backend)

    def add(self, *found: WC) -> CQEX:
        for wc in found:
            self.backend.add(wc)
        return self.cq


def test_completions_are_read_field_by_field(stack: ExitStack, context: Context) -> None:
    cq = Polled(stack, context).add(RECEIVED, INVALIDATED)
    assert cq.start_poll(PollCqAttr()) == 0
    assert (cq.wr_id, cq.status, cq.read_opcode(), cq.read_byte_len()) == (4, WCStatus.SUCCESS, WCOpcode.RECV, 20)
    assert (cq.read_imm_data(), cq.read_invalidated_rkey(), cq.read_vendor_err()) == (0x01020304, 0, 9)
    assert (cq.read_qp_num(), cq.read_src_qp(), cq.read_wc_flags()) == (5, 6, WCFlag.GRH | WCFlag.WITH_IMM)
    assert (cq.read_slid(), cq.read_sl(), cq.read_dlid_path_bits()) == (0, 0, 0)
    assert cq.poll_next() == 0
    assert (cq.wr_id, cq.read_imm_data(), cq.read_invalidated_rkey()) == (5, 0, 0x77)
    assert cq.next_poll() == errno.ENOENT
    for read in ("wr_id", "status"):
        with fails(errno.EINVAL, "no current completion"):
            getattr(cq, read)
    with fails(errno.EINVAL, "no current completion"):
        cq.read_opcode()
    cq.end_poll()
    assert cq.start_poll() == errno.ENOENT


def test_completions_that_are_not_taken_stay(stack: ExitStack, context: Context) -> None:
    polled = Polled(stack, context)
    cq = polled.add(RECEIVED, INVALIDATED)
    assert cq.start_poll() == 0
    with fails(errno.EBUSY, "polling has started"):
        cq.start_poll()
    cq.end_poll()
    assert cq.poll(9) == [INVALIDATED]
    assert cq.start_poll() == errno.ENOENT
    for call in (cq.end_poll, cq.next_poll):
        with fails(errno.EINVAL, "polling has not started"):
            call()
    polled.add(RECEIVED)
    assert cq.start_poll() == 0
    assert cq.next_poll() == errno.ENOENT
    polled.add(INVALIDATED)
    assert (cq.next_poll(), cq.wr_id) == (0, 5)
    cq.end_poll()
    with fails(errno.EINVAL, "comp_mask is 1"):
        cq.start_poll(PollCqAttr(1))
    cq.close()
    with fails(errno.EBADF, "closed"):
        cq.start_poll()


def test_fields_have_to_be_asked_for(stack: ExitStack, context: Context) -> None:
    cq = Polled(stack, context, CqWcFlag.QP_NUM | CqWcFlag.IMM).add(RECEIVED)
    assert cq.start_poll() == 0
    assert (cq.wr_id, cq.read_opcode(), cq.read_qp_num(), cq.read_imm_data()) == (4, WCOpcode.RECV, 5, 0x01020304)
    reads = (cq.read_byte_len, cq.read_src_qp, cq.read_slid, cq.read_sl, cq.read_dlid_path_bits)
    for read in reads:
        with fails(errno.EINVAL, "wc_flags lacks"):
            read()
    cq.end_poll()


def test_attributes_of_a_completion_queue(stack: ExitStack, context: Context) -> None:
    for bit in (7, 8, 9, 10, 11):
        with fails(errno.EOPNOTSUPP, "no provider has completions with time stamps"):
            Polled(stack, context, 1 << bit)
    with fails(errno.EINVAL, "unknown wc_flags 0x1000"):
        Polled(stack, context, 1 << 12)
    with fails(errno.EOPNOTSUPP, "parent domains"):
        Polled(stack, context, comp_mask=CqInitAttrMask.PD)
    with fails(errno.EOPNOTSUPP, "takes no more"):
        Polled(stack, context, comp_mask=1, flags=CqAttrFlag.IGNORE_OVERRUN)
    with fails(errno.EINVAL, "unknown flags 0x4"):
        Polled(stack, context, comp_mask=1, flags=4)
    with fails(errno.EINVAL, "unknown comp_mask 0x4"):
        Polled(stack, context, comp_mask=4)
    with fails(errno.EINVAL, "init_attr is 3"):
        CQEX(context, cast("CqInitAttrEx", 3))
    Polled(stack, context, flags=CqAttrFlag.IGNORE_OVERRUN)  # comp_mask does not name it
    cq = Polled(stack, context, comp_mask=1, flags=1).cq
    assert (cq.cqe, cq.channel, cq.cq_context) == (9, None, None)
