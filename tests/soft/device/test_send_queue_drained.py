"""SQD: requests in progress finish, others wait, and attributes change that may not change in RTS."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rdmacm import RdmaError
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.verbs import AHAttr, EventType, QPAttr, QPAttrMask, QPState, RecvWR, SendWR, WROpcode
from support.softdev import Connected, Heard, Pair, sge, to_init, told

M = QPAttrMask
S = QPState


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(RdmaError, match=text) as raised:
        yield
    assert raised.value.errno == errno.EINVAL


def to(qp: SoftQP, state: QPState, mask: QPAttrMask = M.STATE, **attr: int) -> None:
    qp.modify(QPAttr(qp_state=state, **attr), M.STATE | mask)  # type: ignore[arg-type]


def change(qp: SoftQP, mask: QPAttrMask, **attr: int) -> None:
    qp.modify(QPAttr(**attr), mask)  # type: ignore[arg-type]


class Lossy(Connected):
    """A connection whose packets are lost; the left end is in SQD with one SEND in progress and one that waits."""

    def __init__(self, pair: Pair, timeout: int = 14) -> None:
        super().__init__(pair, timeout=timeout)
        self.heard = self.left.async_events = Heard()
        self.right.post_recv([RecvWR(1), RecvWR(2)])
        pair.net.lost = lambda datagram: True
        self.left.post_send([SendWR(1)])
        to(self.left, S.SQD, M.EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify=1)
        self.left.post_send([SendWR(2)])

    def is_draining(self) -> bool:
        return self.left.query().sq_draining == 1

    def repair(self) -> None:
        self.pair.net.lost = lambda datagram: False
        self.pair.settle()


def test_rts_has_to_wait_until_the_queue_is_drained(pair: Pair) -> None:
    ends = Lossy(pair)
    with refused("requests are still in progress"):
        to(ends.left, S.RTS)
    assert (ends.left.state, ends.is_draining(), ends.heard) == (S.SQD, True, [])
    ends.repair()
    pair.run(lambda: not ends.is_draining(), 5)
    assert (ends.heard, told(ends.left_cq.poll(9))) == ([EventType.SQ_DRAINED], [(1, "SUCCESS")])
    to(ends.left, S.RTS)
    assert told(ends.at_left()) == [(2, "SUCCESS")]


@pytest.mark.parametrize("state", [S.ERR, S.RESET])
def test_draining_queue_can_be_given_up(pair: Pair, state: QPState) -> None:
    ends = Lossy(pair)
    to(ends.left, state)
    ends.repair()
    flushed = [(1, "WR_FLUSH_ERR"), (2, "WR_FLUSH_ERR")] if state is S.ERR else []
    assert (told(ends.left_cq.poll(9)), ends.heard) == (flushed, [])


def test_new_timeout_starts_at_once(pair: Pair) -> None:
    """The old one is for ever, so that the lost packet would never be sent again."""
    ends = Lossy(pair, timeout=0)
    pair.net.lost = lambda datagram: False
    pair.run(lambda: False, 60)
    assert ends.is_draining()
    change(ends.left, M.TIMEOUT, timeout=14)
    pair.run(lambda: not ends.is_draining(), 1)
    assert (ends.is_draining(), ends.left.query().timeout) == (False, 14)


def test_new_retry_count_ends_a_connection_that_drains(pair: Pair) -> None:
    ends = Lossy(pair)
    change(ends.left, M.RETRY_CNT | M.TIMEOUT, retry_cnt=0, timeout=14)
    pair.run(lambda: ends.left.state is S.ERR, 0.1)
    assert told(ends.left_cq.poll(9)) == [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")]
    assert ends.heard == [EventType.QP_FATAL]


def test_new_rnr_retry_count_is_used(pair: Pair) -> None:
    ends = Connected(pair, rnr_retry=7)
    to(ends.left, S.SQD)
    change(ends.left, M.RNR_RETRY, rnr_retry=0)
    to(ends.left, S.RTS)
    ends.left.post_send([SendWR(1)])
    assert told(ends.at_left()) == [(1, "RNR_RETRY_EXC_ERR")]


def test_new_depths_of_reads_are_used(pair: Pair) -> None:
    """Two READs at a time where one was allowed; then none, which fails."""
    ends = Connected(pair, max_rd_atomic=1, max_dest_rd_atomic=1)
    source, target = pair.b.region(b"sixteen bytes..."), pair.a.region(16)

    def read(number: int) -> SendWR:
        wr = SendWR(number, WROpcode.RDMA_READ, [sge(target)])
        wr.set_wr_rdma(source.rkey, source.addr)
        return wr

    def requests(count: int) -> int:
        """How many of ``count`` READs leave before there is an answer."""
        before = len(pair.net.sent)
        ends.left.post_send([read(n) for n in range(count)])
        sent = sum(len(datagram) // 32 for _, datagram, _ in pair.net.sent[before:] if datagram[0] == 0x0C)
        pair.settle()
        assert told(ends.left_cq.poll(9)) == [(n, "SUCCESS") for n in range(count)]
        return sent

    assert requests(3) == 1
    for qp in (ends.left, ends.right):
        to(qp, S.SQD)
        change(qp, M.MAX_QP_RD_ATOMIC | M.MAX_DEST_RD_ATOMIC, max_rd_atomic=2, max_dest_rd_atomic=2)
        to(qp, S.RTS)
    assert requests(3) == 2
    assert bytes(target.view) == b"sixteen bytes..."
    to(ends.right, S.SQD)
    change(ends.right, M.MAX_DEST_RD_ATOMIC, max_dest_rd_atomic=0)
    ends.left.post_send([read(7)])
    assert told(ends.at_left()) == [(7, "REM_INV_REQ_ERR")]


def test_halted_queue_pair_still_receives(pair: Pair) -> None:
    ends = Connected(pair)
    source, target = pair.a.region(b"halted"), pair.b.region(6)
    to(ends.right, S.SQD)
    ends.right.post_recv([RecvWR(1, [sge(target)])])
    ends.right.post_send([SendWR(2)])
    ends.left.post_recv([RecvWR(3)])
    ends.left.post_send([SendWR(4, sg=[sge(source)])])
    assert told(ends.at_left()) == [(4, "SUCCESS")]
    assert (told(ends.right_cq.poll(9)), bytes(target.view)) == ([(1, "SUCCESS")], b"halted")
    to(ends.right, S.RTS)
    assert told(ends.at_right()) == [(2, "SUCCESS")]


def test_event_is_for_the_transition_that_asks_for_it(pair: Pair) -> None:
    ends = Connected(pair)
    heard = ends.left.async_events = Heard()
    for asked in (1, 0, 1):
        mask = M.EN_SQD_ASYNC_NOTIFY if asked else M.STATE
        to(ends.left, S.SQD, mask, en_sqd_async_notify=1)
        assert (len(heard), ends.left.query().en_sqd_async_notify) == (asked, asked)
        heard.clear()
        to(ends.left, S.RTS)


def test_alternate_paths_are_refused_as_rdma_rxe_does(pair: Pair) -> None:
    qp = pair.a.qp()
    to_init(qp)
    with refused("no alternate paths"):
        qp.modify(QPAttr(qp_state=S.RTR, alt_ah_attr=AHAttr()), M.STATE | M.ALT_PATH)
    assert qp.state is S.INIT
    ends = Connected(pair)
    for state in (S.RTS, S.SQD):
        if state is S.SQD:
            to(ends.left, S.SQD)
        with refused("no alternate paths"):
            ends.left.modify(QPAttr(alt_ah_attr=AHAttr()), M.ALT_PATH)
        change(ends.left, M.PATH_MIG_STATE, path_mig_state=2)
        assert ends.left.query().path_mig_state == 2
