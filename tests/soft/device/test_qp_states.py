"""Queue pairs of the software device: their states, the sizes of their queues, and how they end."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from rdmacm import RdmaError
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.verbs.attr import QPAttr, QPCap, SrqAttr
from rdmacm.verbs.enums import EventType, Mtu, QPAttrMask, QPState, QPType, SrqAttrMask, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR
from support.softdev import Connected, Heard, Pair, modify_state, sge, to_init, to_rtr, to_rts, told


def refused(code: int, bad_wr: object = None) -> pytest.RaisesExc[RdmaError]:
    return pytest.raises(RdmaError, check=lambda error: error.errno == code and bad_wr in (None, error.bad_wr))


def test_receives_posted_in_init_are_used(pair: Pair) -> None:
    cq = pair.b.cq()
    left, right = pair.a.qp(), pair.b.qp(cq)
    with refused(errno.EINVAL):
        right.post_recv([RecvWR(1)])
    to_init(right)
    right.post_recv([RecvWR(1), RecvWR(2)])
    with refused(errno.EINVAL):
        right.post_send([SendWR(1)])
    pair.connect(left, right)
    left.post_send([SendWR(1), SendWR(2)])
    assert told(pair.poll(pair.b, cq, 2)) == [(1, "SUCCESS"), (2, "SUCCESS")]


def test_query_returns_a_copy_of_the_attributes(pair: Pair) -> None:
    ends = Connected(pair, path_mtu=Mtu.MTU_256)
    attr = ends.left.query()
    assert (attr.qp_state, attr.dest_qp_num, attr.path_mtu) == (QPState.RTS, ends.right.qp_num, Mtu.MTU_256)
    assert attr.ah_attr.gr.dgid.ip == bytes([10, 0, 0, 2])
    assert (attr.timeout, attr.sq_psn, attr.rq_psn, attr.cap.max_send_wr) == (14, 100, 100, 64)
    attr.ah_attr.gr.sgid_index = attr.cap.max_send_wr = 50
    again = ends.left.query()
    assert (again.ah_attr.gr.sgid_index, again.cap.max_send_wr) == (pair.a.gid_index(pair.a.addresses[0]), 64)


def test_unroutable_address_vector_changes_nothing(pair: Pair) -> None:
    qp = pair.a.qp()
    to_init(qp)
    for remote, index in ((pair.b.addresses[0], 9), (pair.b.addresses[0], pair.a.gid_index(pair.a.addresses[1]))):
        with refused(errno.EINVAL):
            to_rtr(qp, 1, remote, index)
    assert qp.state is QPState.INIT


def test_send_queue_is_full_until_a_completion(pair: Pair) -> None:
    cq = pair.a.cq()
    left, right = pair.a.qp(cq, sends=3), pair.b.qp()
    pair.connect(left, right)
    target, outbox = pair.b.region(8), pair.a.region(b"12345678")

    def write(number: int, flags: int) -> SendWR:
        wr = SendWR(number, WROpcode.RDMA_WRITE, [sge(outbox)], send_flags=flags)
        wr.set_wr_rdma(target.rkey, target.addr)
        return wr

    for _ in range(3):
        wrs = [write(number, 0) for number in (1, 2, 3, 4)]
        with refused(errno.ENOMEM, wrs[3]):
            left.post_send(wrs)
        wrs = [write(5, 2)]
        with refused(errno.ENOMEM, wrs[0]):
            left.post_send(wrs)
        pair.settle()
    assert cq.poll(10) == []
    left.post_send([write(6, 2)])
    assert told(pair.poll(pair.a, cq)) == [(6, "SUCCESS")]


def test_receive_queue_is_full_until_a_message(pair: Pair) -> None:
    left, right = pair.a.qp(), pair.b.qp(recvs=2)
    pair.connect(left, right)
    wrs = [RecvWR(1), RecvWR(2), RecvWR(3)]
    with refused(errno.ENOMEM, wrs[2]):
        right.post_recv(wrs)
    left.post_send([SendWR(1)])
    pair.settle()
    right.post_recv([RecvWR(4)])
    with refused(errno.ENOMEM):
        right.post_recv([RecvWR(5)])


def test_sq_sig_all_completes_every_send(pair: Pair) -> None:
    cq = pair.a.cq()
    left, right = pair.a.qp(cq, sq_sig_all=True), pair.b.qp()
    pair.connect(left, right)
    right.post_recv([RecvWR(1)])
    left.post_send([SendWR(1, send_flags=0)])
    assert told(pair.poll(pair.a, cq)) == [(1, "SUCCESS")]


def test_error_state_flushes_in_order(pair: Pair) -> None:
    ends = Connected(pair)
    pair.net.lost = lambda datagram: True
    ends.left.post_recv([RecvWR(11), RecvWR(12)])
    ends.left.post_send([SendWR(1), SendWR(2, send_flags=0), SendWR(3)])
    modify_state(ends.left, QPState.ERR)
    found = told(ends.left_cq.poll(10))
    assert [wr_id for wr_id, _ in found if wr_id < 10] == [1, 2, 3]
    assert [wr_id for wr_id, _ in found if wr_id > 10] == [11, 12]
    assert {status for _, status in found} == {"WR_FLUSH_ERR"}
    ends.left.post_send([SendWR(4)])
    ends.left.post_recv([RecvWR(13)])
    assert told(ends.left_cq.poll(10)) == [(4, "WR_FLUSH_ERR"), (13, "WR_FLUSH_ERR")]


def test_unconnected_queue_pair_flushes(pair: Pair) -> None:
    cq = pair.a.cq()
    qp = pair.a.qp(cq)
    to_init(qp)
    qp.post_recv([RecvWR(1)])
    modify_state(qp, QPState.ERR)
    assert told(cq.poll(10)) == [(1, "WR_FLUSH_ERR")]


@pytest.mark.parametrize("how", ["reset", "destroy"])
def test_reset_and_destroy_leave_no_completions(pair: Pair, how: str) -> None:
    cq = pair.a.cq()
    left, other, right = pair.a.qp(cq), pair.a.qp(cq), pair.b.qp()
    pair.connect(left, right)
    right.post_recv([RecvWR(1)])
    left.post_recv([RecvWR(1)])
    left.post_send([SendWR(1), SendWR(2)])
    to_init(other)
    other.post_recv([RecvWR(7)])
    modify_state(other, QPState.ERR)
    pair.settle()
    if how == "reset":
        modify_state(left, QPState.RESET)
    else:
        left.destroy()
    assert told(cq.poll(10)) == [(7, "WR_FLUSH_ERR")]
    pair.run(lambda: False, 5)
    assert cq.poll(10) == []


def test_queue_pair_is_usable_after_reset(pair: Pair) -> None:
    ends = Connected(pair)
    for qp in (ends.left, ends.right):
        modify_state(qp, QPState.RESET)
    pair.connect(ends.left, ends.right)
    ends.right.post_recv([RecvWR(1)])
    ends.left.post_send([SendWR(1)])
    assert told(ends.at_left()) == [(1, "SUCCESS")]


def test_sqd_drains_the_send_queue(pair: Pair) -> None:
    ends = Connected(pair)
    heard = Heard()
    ends.left.async_events = heard
    ends.right.post_recv([RecvWR(1), RecvWR(2)])
    ends.left.post_send([SendWR(1)])
    modify_state(ends.left, QPState.SQD, en_sqd_async_notify=1)
    assert ends.left.query().sq_draining == 1
    ends.left.post_send([SendWR(2)])
    pair.settle()
    assert (heard, ends.left.query().sq_draining) == ([EventType.SQ_DRAINED], 0)
    assert told(ends.left_cq.poll(10)) == [(1, "SUCCESS")]
    to_rts_again = QPAttr(qp_state=QPState.RTS)
    ends.left.modify(to_rts_again, QPAttrMask.STATE)
    assert told(ends.at_left()) == [(2, "SUCCESS")]


def test_first_packet_in_rtr_raises_comm_est(pair: Pair) -> None:
    cq = pair.a.cq()
    left, right = pair.a.qp(cq), pair.b.qp()
    heard = Heard()
    right.async_events = heard
    to_rtr(left, right.qp_num, pair.b.addresses[0], pair.a.gid_index(pair.a.addresses[0]))
    to_rtr(right, left.qp_num, pair.a.addresses[0], pair.b.gid_index(pair.b.addresses[0]))
    to_rts(left)
    right.post_recv([RecvWR(1), RecvWR(2)])
    left.post_send([SendWR(1), SendWR(2)])
    pair.settle()
    assert heard == [EventType.COMM_EST]
    assert told(cq.poll(9)) == [(1, "SUCCESS"), (2, "SUCCESS")]


def test_first_packet_in_rts_raises_nothing(pair: Pair) -> None:
    ends = Connected(pair)
    heard = ends.left.async_events = ends.right.async_events = Heard()
    ends.right.post_recv([RecvWR(1)])
    ends.left.post_send([SendWR(1)])
    assert told(ends.at_left()) == [(1, "SUCCESS")]
    assert heard == []


def test_fatal_errors_raise_an_event(pair: Pair) -> None:
    ends = Connected(pair, retry_cnt=0)
    heard = Heard()
    ends.left.async_events = heard
    pair.net.lost = lambda datagram: True
    ends.left.post_send([SendWR(1)])
    ends.at_left()
    assert (heard, ends.left.state) == ([EventType.QP_FATAL], QPState.ERR)


def test_child_may_not_use_the_parents_queue_pairs(pair: Pair) -> None:
    ends = Connected(pair)
    sent = len(pair.net.sent)
    pair.a.provider.abandon()  # as in the child
    with refused(errno.EBADF):
        ends.left.post_send([SendWR(1)])
    with refused(errno.EBADF):
        pair.a.qp()
    assert len(pair.net.sent) == sent


def test_raw_packets_are_not_supported(pair: Pair) -> None:
    with refused(errno.EOPNOTSUPP):
        pair.a.device.create_qp(1, QPType.RAW_PACKET, QPCap(), False, pair.a.cq(), pair.a.cq(), None)


# -- shared receive queues --------------------------------------------------------------------------------


class Shared:
    """Two queue pairs of host ``b`` with one receive queue, and their peers."""

    def __init__(self, pair: Pair, **attr: int) -> None:
        self.pair = pair
        self.srq: SoftSRQ = pair.b.device.create_srq(pair.b.pd, SrqAttr(**attr))
        self.cq = pair.b.cq()
        self.lefts = [pair.a.qp(), pair.a.qp()]
        self.rights = [pair.b.qp(self.cq, srq=self.srq) for _ in range(2)]
        for left, right in zip(self.lefts, self.rights, strict=True):
            pair.connect(left, right)


def test_queue_pairs_share_a_receive_queue(pair: Pair) -> None:
    shared = Shared(pair)
    inbox, outbox = pair.b.region(64), pair.a.region(b"first   second  ")
    shared.srq.post_recv([RecvWR(n, [sge(inbox, 16 * n, 8)]) for n in range(4)])
    for n, left in enumerate(shared.lefts):
        left.post_send([SendWR(n, sg=[sge(outbox, 8 * n, 8)])])
        pair.settle()
    found = shared.cq.poll(10)
    assert [(wc.wr_id, wc.qp_num) for wc in found] == [(n, shared.rights[n].qp_num) for n in range(2)]
    assert (bytes(inbox.view[:8]), bytes(inbox.view[16:24])) == (b"first   ", b"second  ")
    shared.rights[0].destroy()
    shared.lefts[1].post_send([SendWR(2)])
    assert [wc.wr_id for wc in pair.poll(pair.b, shared.cq)] == [2]


def test_srq_limit_warns_once(pair: Pair) -> None:
    shared = Shared(pair, max_wr=3)
    heard = Heard()
    shared.srq.async_events = heard
    wrs = [RecvWR(n) for n in range(4)]
    with refused(errno.ENOMEM, wrs[3]):
        shared.srq.post_recv(wrs)
    shared.srq.modify(SrqAttr(srq_limit=2), SrqAttrMask.LIMIT)
    assert shared.srq.query() == SrqAttr(max_wr=3, max_sge=1, srq_limit=2)
    for n in range(3):
        shared.lefts[0].post_send([SendWR(n)])
        pair.settle()
        assert len(heard) == min(n, 1)
    assert heard == [EventType.SRQ_LIMIT_REACHED]
    assert shared.srq.query().srq_limit == 0


def test_shared_receive_whose_region_has_changed(pair: Pair) -> None:
    shared, inbox = Shared(pair), pair.b.region(8)
    shared.srq.post_recv([RecvWR(1, [sge(inbox)])])
    inbox.rereg(object(), None, None)
    shared.lefts[0].post_send([SendWR(1, sg=[sge(pair.a.region(b"message!"))])])
    pair.settle()
    assert told(shared.cq.poll(10)) == [(1, "LOC_QP_OP_ERR")]
    assert bytes(inbox.view) == bytes(8)


def test_invalid_srq_sge_fails_the_consuming_queue_pair(pair: Pair) -> None:
    shared = Shared(pair)
    heard = Heard()
    shared.rights[0].async_events = heard
    shared.srq.post_recv([RecvWR(1, [SGE(1, 1, 1)]), RecvWR(2)])
    shared.lefts[0].post_send([SendWR(1, sg=[sge(pair.a.region(1))])])
    pair.settle()
    assert told(shared.cq.poll(10)) == [(1, "LOC_QP_OP_ERR")]
    assert heard == [EventType.QP_LAST_WQE_REACHED, EventType.QP_FATAL]
    shared.lefts[1].post_send([SendWR(2)])
    pair.settle()
    assert told(shared.cq.poll(10)) == [(2, "SUCCESS")]


@pytest.mark.parametrize(
    "end",
    [SoftQP.fail, SoftQP.destroy, lambda qp: modify_state(qp, QPState.ERR)],
    ids=["disconnected", "destroyed", "to ERR"],
)
def test_received_messages_are_acknowledged_before_close(pair: Pair, end: Callable[[SoftQP], None]) -> None:
    """A deferred ACK is not lost when the application closes the connection after its completion."""
    ends = Connected(pair)
    ends.right.post_recv([RecvWR(1)])
    ends.left.post_send([SendWR(2)])
    pair.b.mux.may_defer_acks = True
    assert told(ends.right_cq.poll(1)) == [(1, "SUCCESS")]
    end(ends.right)
    assert told(ends.at_left()) == [(2, "SUCCESS")]
