"""XRC on the software device: domains, shared receive queues by number, queue pairs that send or receive only."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from rdmacm import RdmaError, open_device
from rdmacm.soft.device.completion import SoftCQ
from rdmacm.soft.device.extended_queue_pair import SoftXrcRecvQP, SoftXrcSendQP, SoftXrcSRQ, XrcDomain
from rdmacm.soft.device.memory import SoftMR
from rdmacm.testing import Fabric
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    XRCD,
    Context,
    OpenedQP,
    QPEx,
    QPInitAttr,
    QPInitAttrEx,
    QPOpenAttr,
    SrqInitAttr,
    SrqInitAttrEx,
    SRQType,
    XRCDInitAttr,
)
from rdmacm.verbs.attr import QPAttr, QPCap, SrqAttr
from rdmacm.verbs.enums import (
    AccessFlag,
    EventType,
    QPAttrMask,
    QPState,
    QPType,
    SendFlag,
    SrqInitAttrMask,
    WROpcode,
)
from rdmacm.verbs.wr import RecvWR, SendWR
from support.rows import for_each
from support.softdev import Heard, Pair, modify_state, sge, told

MTU = 1024


class Target:
    """A domain on host b with shared receive queues in two protection domains, and a target in it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        device = pair.b.device
        self.domain = device.open_xrcd(None, True, False)
        self.cqs = [pair.b.cq(), pair.b.cq()]
        self.pds = [object(), object()]
        self.queues = [self.queue(pd, cq) for pd, cq in zip(self.pds, self.cqs, strict=True)]
        qp = device.create_qp(self.domain, QPType.XRC_RECV, QPCap(), False, None, None, None)
        assert isinstance(qp, SoftXrcRecvQP)
        self.qp = qp

    def queue(self, pd: object, cq: SoftCQ, domain: XrcDomain | None = None) -> SoftXrcSRQ:
        return self.pair.b.device.create_xrc_srq(pd, SrqAttr(max_wr=32, max_sge=2), domain or self.domain, cq)

    def region(self, index: int, size: int = 4096) -> SoftMR:
        access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
        return self.pair.b.device.reg_mr(self.pds[index], memoryview(bytearray(size)), access)

    def post(self, index: int, wr_id: int) -> SoftMR:
        region = self.region(index)
        self.queues[index].post_recv([RecvWR(wr_id, [sge(region)])])
        return region


class Ends:
    """An initiator on host a, connected to a target on host b."""

    def __init__(self, pair: Pair, family: int = 0) -> None:
        self.pair = pair
        self.target = Target(pair)
        self.cq = pair.a.cq()
        self.left = initiator(pair, self.cq)
        pair.connect(self.left, self.target.qp, family=family)

    def send(
        self, wr_id: int, index: int, data: bytes = b"hello", opcode: WROpcode = WROpcode.SEND, **more: int
    ) -> None:
        wr = SendWR(wr_id, opcode, [sge(self.pair.a.region(data))], **more)  # type: ignore[arg-type]
        wr.set_qp_type_xrc(self.target.queues[index].srq_num)
        self.left.post_send([wr])

    def sent(self, count: int = 1) -> list[tuple[int, str]]:
        return told(self.pair.poll(self.pair.a, self.cq, count))


def initiator(pair: Pair, cq: SoftCQ) -> SoftXrcSendQP:
    qp = pair.a.device.create_qp(pair.a.pd, QPType.XRC_SEND, QPCap(64, 0, 8, 0, 256), False, cq, None, None)
    assert isinstance(qp, SoftXrcSendQP)
    return qp


@for_each("family", [0, 1])
def test_one_target_delivers_to_each_queue_of_its_domain(family: int) -> None:
    pair = Pair()
    ends = Ends(pair, family)
    target = ends.target
    inboxes = [target.post(index, 10 + index) for index in (0, 1)]
    ends.send(1, 1, b"for the second")
    ends.send(2, 0, b"x" * 3000)
    assert ends.sent(2) == [(1, "SUCCESS"), (2, "SUCCESS")]
    for index, data in ((0, b"x" * 3000), (1, b"for the second")):
        (wc,) = pair.poll(pair.b, target.cqs[index])
        assert (wc.wr_id, wc.byte_len, wc.qp_num) == (10 + index, len(data), target.qp.qp_num)
        assert bytes(inboxes[index].view[: len(data)]) == data
    pair.close()


def test_two_initiators_share_a_queue() -> None:
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    other = pair.b.device.create_qp(target.domain, QPType.XRC_RECV, QPCap(), False, None, None, None)
    assert isinstance(other, SoftXrcRecvQP)
    left = initiator(pair, ends.cq)
    pair.connect(left, other)
    target.post(0, 1)
    target.post(0, 2)
    ends.send(1, 0)
    pair.settle()
    left.post_send([SendWR(2, WROpcode.SEND, [b"again"], SendFlag.INLINE | SendFlag.SIGNALED,
                           remote_srqn=target.queues[0].srq_num)])  # fmt: skip
    found = pair.poll(pair.b, target.cqs[0], 2)
    assert [(wc.wr_id, wc.qp_num) for wc in found] == [(1, target.qp.qp_num), (2, other.qp_num)]
    pair.close()


def test_remote_memory_is_that_of_the_queues_protection_domain() -> None:
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    memory = target.region(1)
    ends.send(1, 1, b"written", WROpcode.RDMA_WRITE, remote_addr=memory.addr, rkey=memory.rkey)
    assert ends.sent() == [(1, "SUCCESS")]
    assert bytes(memory.view[:7]) == b"written"
    fetched = pair.a.region(7)
    wr = SendWR(2, WROpcode.RDMA_READ, [sge(fetched)], remote_addr=memory.addr, rkey=memory.rkey)
    wr.set_qp_type_xrc(target.queues[1].srq_num)
    ends.left.post_send([wr])
    assert ends.sent() == [(2, "SUCCESS")]
    assert bytes(fetched.view) == b"written"
    ends.send(3, 0, b"foreign", WROpcode.RDMA_WRITE, remote_addr=memory.addr, rkey=memory.rkey)
    assert ends.sent() == [(3, "REM_ACCESS_ERR")]
    assert bytes(memory.view[:7]) == b"written"
    pair.close()


def test_queue_of_another_domain_or_without_number_is_refused() -> None:
    for kind in ("other", "unknown", "closed"):
        pair = Pair()
        ends = Ends(pair)
        target = ends.target
        foreign = target.queue(target.pds[0], target.cqs[0], pair.b.device.open_xrcd(None, True, False))
        foreign.post_recv([RecvWR(1, [sge(target.region(0))])])
        number = foreign.srq_num
        if kind == "unknown":
            number = 0  # no queue has it
        elif kind == "closed":
            number = target.queues[1].srq_num
            target.queues[1].destroy()
        ends.left.post_send([SendWR(7, WROpcode.SEND, [sge(pair.a.region(b"hello"))], remote_srqn=number)])
        assert ends.sent() == [(7, "REM_INV_REQ_ERR")]
        assert (ends.left.state, target.qp.state) == (QPState.ERR, QPState.ERR)
        assert target.cqs[0].poll(9) == []
        pair.close()


def test_empty_queue_is_asked_again_and_other_queues_are_not_held_up() -> None:
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    target.post(1, 1)
    ends.send(1, 0)
    pair.settle()
    assert target.cqs[0].poll(9) == target.cqs[1].poll(9) == []
    target.post(0, 5)
    assert ends.sent() == [(1, "SUCCESS")]
    assert told(pair.poll(pair.b, target.cqs[0])) == [(5, "SUCCESS")]
    pair.close()


@for_each("seed", list(range(6)))
def test_losses_are_repaired(seed: int) -> None:
    chance = random.Random(seed)
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    pair.net.lost = lambda _: chance.random() < 0.1
    sizes = [chance.choice((0, 1, MTU, 3000)) for _ in range(24)]
    to = [chance.randrange(2) for _ in sizes]
    for number, index in enumerate(to):
        target.post(index, number)
    for number, (index, size) in enumerate(zip(to, sizes, strict=True)):
        ends.send(number, index, b"d" * (size or 1), WROpcode.SEND_WITH_IMM, imm_data=number)
    assert ends.sent(24) == [(number, "SUCCESS") for number in range(24)]
    for index in (0, 1):
        expected = [number for number, each in enumerate(to) if each == index]
        found = pair.poll(pair.b, target.cqs[index], len(expected))
        assert [(wc.wr_id, wc.imm_data, wc.byte_len) for wc in found] == [(n, n, sizes[n] or 1) for n in expected]
    pair.close()


def test_receive_in_progress_is_flushed_to_its_queue() -> None:
    pair = Pair(train=0)
    ends = Ends(pair)
    target = ends.target
    target.post(0, 1)
    target.post(0, 2)
    ends.send(1, 0)
    pair.settle()
    pair.net.lost = lambda datagram: len(datagram) < 1000  # the last packet of the next message
    ends.send(2, 0, b"x" * (MTU + 1))
    pair.a.mux.progress()
    pair.net.lost = lambda _: True
    pair.b.mux.progress()
    modify_state(target.qp, QPState.ERR)
    assert told(target.cqs[0].poll(9)) == [(1, "SUCCESS"), (2, "WR_FLUSH_ERR")]
    target.post(0, 3)
    assert target.cqs[0].poll(9) == [], "the queue keeps its receives"
    pair.close()


def test_reset_drops_the_completions_of_the_target_alone() -> None:
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    target.post(0, 1)
    ends.send(1, 0)
    pair.settle()
    modify_state(target.qp, QPState.RESET)
    assert target.cqs[0].poll(9) == []
    pair.close()


def test_overflow_of_a_completion_queue_ends_its_target() -> None:
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    small = target.queue(target.pds[0], pair.b.cq(1))
    for number in range(3):
        small.post_recv([RecvWR(number, [sge(target.region(0))])])
        wr = SendWR(number, WROpcode.SEND, [sge(pair.a.region(b"hello"))], remote_srqn=small.srq_num)
        ends.left.post_send([wr])
    pair.settle()
    assert target.qp.state is QPState.ERR
    pair.close()


def test_neither_end_does_the_others_work() -> None:
    pair = Pair()
    ends = Ends(pair)
    with refuses(errno.EINVAL):
        ends.left.post_recv([RecvWR(1)])
    with refuses(errno.EINVAL):
        ends.target.qp.post_send([SendWR(1)])
    with refuses(errno.EINVAL):
        ends.target.qp.post_recv([RecvWR(1)])
    ends.target.qp.ask_peer()
    assert not pair.a.wire.inbox, "only the initiator sends requests"
    pair.close()


# -- the objects of verbs -----------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Context:
    return open_device("soft_eth0", provider=Fabric().host("a", "10.0.0.1").provider)


def refuses(code: int, words: str | None = None) -> pytest.RaisesExc[RdmaError]:
    return pytest.raises(RdmaError, match=words, check=lambda error: error.errno == code)


def test_domain_is_busy_while_it_is_used(context: Context) -> None:
    pd, cq, xrcd = PD(context), CQ(context, 8), XRCD(context, XRCDInitAttr())
    srq = SRQ(context, SrqInitAttrEx(srq_type=SRQType.XRC, pd=pd, xrcd=xrcd, cq=cq))
    qp = QP(context, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=xrcd))
    assert not qp.pd, "NULL in C"
    assert (qp.xrcd, qp.scq, qp.rcq, qp.context) == (xrcd, None, None, context)
    assert (srq.xrcd, srq.cq, srq.pd) == (xrcd, cq, pd)
    assert 0 < srq.get_srq_num() < 1 << 24
    for used in (xrcd, cq, pd):
        with refuses(errno.EBUSY):
            used.close()
    srq.close()
    with refuses(errno.EBUSY, "1 QP"):
        xrcd.close()
    with refuses(errno.EBADF):
        srq.get_srq_num()
    qp.close()
    for each in (xrcd, cq, pd):
        each.close()


def test_numbers_are_unique(context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    domains = [XRCD(context), XRCD(context)]
    made = [SRQ(pd, SrqInitAttrEx(srq_type=SRQType.XRC, xrcd=xrcd, cq=cq)) for xrcd in domains for _ in range(20)]
    assert len({srq.get_srq_num() for srq in made}) == 40
    for each in (*made, *domains, cq, pd):
        each.close()


def test_domain_of_a_file_is_shared(context: Context, tmp_path: Path) -> None:
    with (tmp_path / "domain").open("w") as file, (tmp_path / "other").open("w") as other:
        with refuses(errno.EAGAIN):
            XRCD(context, XRCDInitAttr(3, 0, file.fileno()))
        first = XRCD(context, XRCDInitAttr(3, os.O_CREAT | os.O_EXCL, file.fileno()))
        second = XRCD(context, XRCDInitAttr(3, 0, file.fileno()))
        with refuses(errno.EINVAL, "already"):
            XRCD(context, XRCDInitAttr(3, os.O_CREAT | os.O_EXCL, file.fileno()))
        assert first.backend is second.backend
        assert XRCD(context, XRCDInitAttr(3, os.O_CREAT, other.fileno())).backend is not first.backend
        first.close()
        second.close()
        del first, second
        with refuses(errno.EAGAIN):
            XRCD(context, XRCDInitAttr(3, 0, file.fileno()))
    with refuses(errno.EBADF):
        XRCD(context, XRCDInitAttr(3, os.O_CREAT, file_number_that_is_closed()))


def test_opened_target_is_the_same_queue_pair(tmp_path: Path) -> None:
    """By another context, whose domain is of the same file. It lives until both handles are closed."""
    provider = Fabric().host("a", "10.0.0.1").provider
    first, second = (open_device("soft_eth0", provider=provider) for _ in range(2))
    with (tmp_path / "domain").open("w") as file:
        domains = [XRCD(each, XRCDInitAttr(3, os.O_CREAT, file.fileno())) for each in (first, second)]
    qp = QP(first, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=domains[0]))
    opened = OpenedQP(second, QPOpenAttr(qp_num=qp.qp_num, xrcd=domains[1], qp_context="mine"))
    assert (opened.qp_num, opened.qp_type, opened.xrcd, opened.context) == (qp.qp_num, qp.qp_type, domains[1], second)
    assert (opened.qp_context, opened.scq) == ("mine", None)
    assert not opened.pd, "NULL in C"
    qp.to_init(QPAttr(qp_access_flags=AccessFlag.REMOTE_WRITE, port_num=1))
    assert opened.state is QPState.INIT
    assert opened.query()[0].qp_access_flags == AccessFlag.REMOTE_WRITE
    with refuses(errno.EINVAL):
        opened.post_recv(RecvWR(1))
    with refuses(errno.EBUSY, "1 OpenedQP"):
        domains[1].close()
    qp.close()
    opened.modify(QPAttr(qp_state=QPState.ERR), QPAttrMask.STATE)
    again = OpenedQP(first, QPOpenAttr(qp_num=opened.qp_num, xrcd=domains[0]))
    opened.close()
    opened.close()
    assert again.state is QPState.ERR
    again.close()
    with refuses(errno.EINVAL, "no queue pair"):
        OpenedQP(second, QPOpenAttr(qp_num=qp.qp_num, xrcd=domains[1]))
    for each in domains:
        each.close()


def test_each_handle_of_a_target_has_its_events() -> None:
    pair = Pair()
    ends = Ends(pair)
    target = ends.target
    heard, opened = Heard(), Heard()
    target.qp.async_events = heard
    pair.b.device.open_qp(target.domain, target.qp.qp_num, opened)
    small = target.queue(target.pds[0], pair.b.cq(1))
    for number in range(3):
        small.post_recv([RecvWR(number, [sge(target.region(0))])])
        wr = SendWR(number, WROpcode.SEND, [sge(pair.a.region(b"hello"))], remote_srqn=small.srq_num)
        ends.left.post_send([wr])
    pair.settle()
    assert heard == opened == [EventType.QP_FATAL]
    pair.close()


def test_queue_pairs_that_are_not_opened(context: Context) -> None:
    pd, cq, xrcd, other = PD(context), CQ(context, 8), XRCD(context), XRCD(context)
    target = QP(context, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=xrcd))
    reliable = QP(pd, QPInitAttr(scq=cq, rcq=cq))
    for attr in (
        QPOpenAttr(qp_num=target.qp_num, xrcd=other),
        QPOpenAttr(qp_num=reliable.qp_num, xrcd=xrcd),
        QPOpenAttr(qp_num=0, xrcd=xrcd),
        QPOpenAttr(qp_num=target.qp_num ^ 1 << 23, xrcd=xrcd),
        QPOpenAttr(qp_num=target.qp_num, xrcd=xrcd, qp_type=QPType.RC),
        QPOpenAttr(qp_num=1 << 24, xrcd=xrcd),
        QPOpenAttr(qp_num=-1, xrcd=xrcd),
        QPOpenAttr(1 << 4, target.qp_num, xrcd),
        QPOpenAttr(qp_num=target.qp_num),
    ):
        with refuses(errno.EINVAL):
            OpenedQP(context, attr)
    xrcd_of_another_device = XRCD(open_device("soft_eth0", provider=Fabric().host("b", "10.0.0.2").provider))
    with refuses(errno.EINVAL, "another device"):
        OpenedQP(context, QPOpenAttr(qp_num=target.qp_num, xrcd=xrcd_of_another_device))
    for each in (target, reliable, xrcd, other, xrcd_of_another_device, cq, pd):
        each.close()
    with refuses(errno.EBADF):
        OpenedQP(context, QPOpenAttr(qp_num=target.qp_num, xrcd=xrcd))


def file_number_that_is_closed() -> int:
    number = os.open("/", os.O_RDONLY)
    os.close(number)
    return number


def test_wrong_arguments_are_refused(context: Context) -> None:
    pd, cq, xrcd = PD(context), CQ(context, 8), XRCD(context)
    for oflags, fd in ((0, -1), (os.O_CREAT | os.O_EXCL, -1), (os.O_APPEND, -1), (-1, -1), (os.O_CREAT, -2)):
        with refuses(errno.EINVAL):
            XRCD(context, XRCDInitAttr(0, oflags, fd))
    with refuses(errno.EINVAL, "comp_mask"):
        XRCD(context, XRCDInitAttr(4))
    for init in (
        SrqInitAttrEx(srq_type=SRQType.XRC, xrcd=xrcd),
        SrqInitAttrEx(srq_type=SRQType.XRC, cq=cq),
        SrqInitAttrEx(srq_type=9, xrcd=xrcd, cq=cq),
        SrqInitAttrEx(pd=PD(context)),
        SrqInitAttrEx(comp_mask=32),
        SrqInitAttrEx(srq_type=SRQType.XRC, xrcd="domain", cq=cq),  # type: ignore[arg-type]
    ):
        with refuses(errno.EINVAL):
            SRQ(pd, init)
    with refuses(errno.EINVAL, "no protection domain"):
        SRQ(context, SrqInitAttrEx())
    for tag_matching in (SrqInitAttrEx(srq_type=SRQType.TM), SrqInitAttrEx(comp_mask=SrqInitAttrMask.TM)):
        with refuses(errno.EOPNOTSUPP):
            SRQ(pd, tag_matching)
    with SRQ(pd, SrqInitAttr()) as basic, refuses(errno.EINVAL, "only a queue of type XRC"):
        basic.get_srq_num()
    with refuses(errno.EINVAL, "needs an XRC domain"):
        QP(pd, QPInitAttr(QPType.XRC_RECV))
    with refuses(errno.EINVAL, "needs a completion queue"):
        QP(pd, QPInitAttr(QPType.XRC_SEND))
    with SRQ(pd, SrqInitAttrEx(srq_type=SRQType.XRC, xrcd=xrcd, cq=cq)) as srq, refuses(errno.EINVAL, "type XRC_RECV"):
        QP(pd, QPInitAttr(scq=cq, rcq=cq, srq=srq))
    for each in (xrcd, cq, pd):
        each.close()


def test_parts_of_other_devices_are_refused(context: Context) -> None:
    other = open_device("soft_eth0", provider=Fabric().host("b", "10.0.0.2").provider)
    pd, cq, xrcd = PD(context), CQ(context, 8), XRCD(other)
    with refuses(errno.EINVAL, "different devices"):
        SRQ(pd, SrqInitAttrEx(srq_type=SRQType.XRC, xrcd=xrcd, cq=cq))
    with refuses(errno.EINVAL, "different devices"):
        QP(context, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=xrcd))
    cq.close()


def test_initiator_ignores_what_it_does_not_have(context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    with QPEx(pd, QPInitAttrEx(qp_type=QPType.XRC_SEND, scq=cq, rcq=cq, cap=QPCap(4, 4, 2, 2, 64))) as qp:
        assert (qp.scq, qp.rcq, qp.cap) == (cq, None, QPCap(4, 0, 2, 0, 64))
        assert qp.query()[1].qp_type is QPType.XRC_SEND
        qp.wr_start()
        qp.wr_send()
        qp.wr_set_xrc_srqn(1 << 24)
        with refuses(errno.EINVAL):
            qp.wr_complete()
    cq.close()


def test_memory_regions_have_no_part_in_a_target(context: Context) -> None:
    with PD(context) as pd, MR(pd, bytearray(8), 0), XRCD(context) as xrcd:
        with QPEx(context, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=xrcd)) as qp:
            assert qp.cap == QPCap(0, 0, 0, 0, 0)
            assert qp.state is QPState.RESET
            with refuses(errno.EINVAL):
                qp.post_send(SendWR(1))
            with refuses(errno.EINVAL):
                qp.post_recv(RecvWR(1))


def test_request_needs_a_number_of_24_bits(context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    with QP(pd, QPInitAttr(QPType.XRC_SEND, scq=cq)) as qp:
        for number in (-1, 1 << 24):
            with refuses(errno.EINVAL, "remote_srqn"):
                qp._send_rules.check(SendWR(1, remote_srqn=number))
        for opcode in (WROpcode.FLUSH, WROpcode.ATOMIC_WRITE):
            with refuses(errno.EINVAL, "is not for XRC_SEND"):
                qp._send_rules.check(SendWR(1, opcode))
    cq.close()
