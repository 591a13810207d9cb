"""Completion queues and shared receive queues that change their size: nothing in them is lost."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from rdmacm import RdmaError
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.verbs import EventType, QPState, RecvWR, SendWR, SrqAttr, SrqAttrMask
from support.softdev import Heard, Pair, sge

LIMIT, MAX_WR = SrqAttrMask.LIMIT, SrqAttrMask.MAX_WR


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(RdmaError, match=text) as raised:
        yield
    assert raised.value.errno == errno.EINVAL


class Ends:
    """A sender and a receiver, whose completion queue has room for four."""

    def __init__(self, pair: Pair, srq: SoftSRQ | None = None, receives: int = 8) -> None:
        self.pair = pair
        self.channel = pair.b.device.create_channel()
        self.cq = pair.b.cq(4, channel=self.channel, owner="the queue")
        self.left, self.right = pair.a.qp(), pair.b.qp(self.cq, srq=srq, recvs=receives)
        pair.connect(self.left, self.right)
        if srq is None:
            self.right.post_recv([RecvWR(n) for n in range(receives)])

    def messages(self, count: int) -> None:
        self.left.post_send([SendWR(send_flags=0) for _ in range(count)])
        self.pair.settle()

    def polled(self, count: int = 99) -> list[int]:
        return [wc.wr_id for wc in self.cq.poll(count)]


def test_completions_are_kept_in_order(pair: Pair) -> None:
    ends = Ends(pair)
    ends.messages(3)
    ends.cq.resize(6)
    ends.messages(3)
    with refused("6 completions, and would have room for 5"):
        ends.cq.resize(5)
    assert (ends.cq.cqe, ends.polled(4)) == (6, [0, 1, 2, 3])
    ends.cq.resize(2)
    assert (ends.cq.cqe, ends.polled()) == (2, [4, 5])


def test_smaller_queue_overflows_earlier(pair: Pair) -> None:
    ends = Ends(pair)
    ends.messages(1)
    ends.cq.resize(2)
    ends.messages(2)
    assert (ends.right.state, ends.polled()) == (QPState.ERR, [0, 1])
    with refused("has overflowed"):
        ends.cq.resize(9)
    with pytest.raises(RdmaError) as lost:
        ends.cq.poll(1)
    assert lost.value.errno == errno.EOVERFLOW


def test_armed_queue_stays_armed(pair: Pair) -> None:
    ends = Ends(pair)
    ends.cq.req_notify(False)
    ends.cq.resize(8)
    ends.messages(1)
    assert ends.channel.get(0) == "the queue"


def test_sizes_change_under_traffic(pair: Pair) -> None:
    """200 messages, each received once and in order, while both queues change their size all the time."""
    random = Random(1)
    srq = pair.b.device.create_srq(pair.b.pd, SrqAttr(max_wr=4))
    ends = Ends(pair, srq)
    posted = sent = refusals = 0
    found: list[int] = []
    while len(found) < 200:
        room, unpolled = random.randint(1, 9), sent - len(found)
        try:
            srq.modify(SrqAttr(max_wr=room), MAX_WR)
        except RdmaError as error:
            refusals += error.errno == errno.EINVAL
        with pytest.raises(RdmaError) as full:
            srq.post_recv([RecvWR(posted + n) for n in range(10)])
        assert isinstance(full.value.bad_wr, RecvWR)
        posted = full.value.bad_wr.wr_id
        count = random.randint(0, 3)
        ends.cq.resize(max(1, unpolled + count))
        ends.left.post_send([SendWR(n, send_flags=0) for n in range(count)])
        sent += count
        if random.random() < 0.5:  # else the sizes change while the messages travel
            pair.settle()
        found += ends.polled(random.randint(1, 4))
    assert found[:200] == list(range(200))
    assert refusals > 20


def test_receives_are_kept_in_order(pair: Pair) -> None:
    srq = pair.b.device.create_srq(pair.b.pd, SrqAttr(max_wr=2))
    ends = Ends(pair, srq)
    inbox, outbox = pair.b.region(8), pair.a.region(b"abcdefgh")
    srq.post_recv([RecvWR(n, [sge(inbox, n, 1)]) for n in range(2)])
    srq.modify(SrqAttr(max_wr=4), MAX_WR)
    srq.post_recv([RecvWR(n, [sge(inbox, n, 1)]) for n in (2, 3)])
    with pytest.raises(RdmaError) as full:
        srq.post_recv([RecvWR(9)])
    assert full.value.errno == errno.ENOMEM
    with refused("max_wr is 3, below 4"):
        srq.modify(SrqAttr(max_wr=3), MAX_WR)
    assert srq.query().max_wr == 4
    ends.left.post_send([SendWR(n, sg=[sge(outbox, n, 1)], send_flags=0) for n in range(4)])
    pair.settle()
    assert (ends.polled(), bytes(inbox.view[:4])) == ([0, 1, 2, 3], b"abcd")
    srq.modify(SrqAttr(max_wr=1), MAX_WR)
    assert srq.query() == SrqAttr(1, 1, 0)


def test_limit_and_size_go_together(pair: Pair) -> None:
    srq = pair.b.device.create_srq(pair.b.pd, SrqAttr(max_wr=8))
    ends = Ends(pair, srq)
    heard = Heard()
    srq.async_events = heard
    srq.modify(SrqAttr(max_wr=20, srq_limit=15), LIMIT | MAX_WR)
    assert srq.query() == SrqAttr(20, 1, 15)
    with refused("max_wr is 14, below 15"):
        srq.modify(SrqAttr(max_wr=14), MAX_WR)
    with refused("max_wr is 9, below 10"):
        srq.modify(SrqAttr(max_wr=9, srq_limit=10), LIMIT | MAX_WR)
    assert srq.query() == SrqAttr(20, 1, 15)
    srq.modify(SrqAttr(max_wr=9, srq_limit=2), LIMIT | MAX_WR)
    srq.post_recv([RecvWR(n) for n in range(3)])
    assert not heard
    ends.messages(2)
    assert (heard, srq.query()) == ([EventType.SRQ_LIMIT_REACHED], SrqAttr(9, 1, 0))
