"""Completion queues and channels of the software device."""

from __future__ import annotations

import errno
import select

import pytest

from rdmacm import RdmaError
from rdmacm.soft.device.completion import SoftChannel, SoftCQ
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.verbs.enums import QPState, SendFlag, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR
from support.softdev import Pair, sge, told


class Armed:
    """A receiver whose completion queue reports to a channel."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.channel: SoftChannel = pair.b.device.create_channel()
        self.cq: SoftCQ = pair.b.cq(channel=self.channel, owner="the queue")
        self.left_cq: SoftCQ = pair.a.cq()
        self.left: SoftQP = pair.a.qp(self.left_cq)
        self.right: SoftQP = pair.b.qp(self.cq)
        pair.connect(self.left, self.right)
        self.right.post_recv([RecvWR(n) for n in range(20)])

    def message(self, flags: int = 0) -> None:
        self.left.post_send([SendWR(send_flags=flags)])
        self.pair.settle()


def readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def test_poll_returns_the_requested_number_in_order(pair: Pair) -> None:
    ends = Armed(pair)
    for _ in range(5):
        ends.message()
    assert [[wc.wr_id for wc in ends.cq.poll(n)] for n in (2, 1, 9, 9)] == [[0, 1], [2], [3, 4], []]


def test_polling_alone_drives_both_ends(pair: Pair) -> None:
    ends = Armed(pair)
    ends.left.post_send([SendWR(8)])
    assert [wc.wr_id for wc in ends.cq.poll(1)] == [0]
    assert [wc.wr_id for wc in ends.left_cq.poll(1)] == [8]


def test_polling_alone_retransmits(pair: Pair) -> None:
    ends = Armed(pair)
    pair.net.lost = lambda datagram: True
    ends.left.post_send([SendWR(8)])
    pair.net.lost = lambda datagram: False
    assert ends.left_cq.poll(1) == []
    pair.clock.advance(0.1)
    assert ends.left_cq.poll(1) == []
    ends.cq.poll(1)
    assert told(ends.left_cq.poll(1)) == [(8, "SUCCESS")]


def test_wait_returns_when_a_completion_arrives(pair: Pair) -> None:
    ends = Armed(pair)
    started = pair.clock.now
    assert not ends.cq.wait(0.5)
    assert pair.clock.now == started + 0.5
    ends.left.post_send([SendWR()])
    assert ends.cq.wait(None)
    assert ends.cq.wait(0)


def test_each_arming_raises_one_event(pair: Pair) -> None:
    ends = Armed(pair)
    ends.message()
    ends.cq.req_notify(False)
    assert ends.channel.get(0) is None  # completions before the arming raise no event
    ends.message()
    ends.message()
    assert ends.channel.get(0) == "the queue"
    ends.message()
    assert ends.channel.get(0) is None
    ends.cq.req_notify(False)
    ends.cq.req_notify(False)
    ends.message()
    assert [ends.channel.get(0), ends.channel.get(0)] == ["the queue", None]


def test_solicited_only_arming_ignores_other_messages(pair: Pair) -> None:
    ends = Armed(pair)
    ends.cq.req_notify(True)
    ends.message()
    assert ends.channel.get(0) is None
    ends.message(SendFlag.SOLICITED)
    assert ends.channel.get(0) == "the queue"
    ends.cq.req_notify(False)
    ends.cq.req_notify(True)  # does not undo the first
    ends.message()
    assert ends.channel.get(0) == "the queue"
    ends.cq.req_notify(True)
    ends.right.post_send([SendWR(1, WROpcode.RDMA_WRITE, [sge(pair.b.region(1))], rkey=1, remote_addr=1)])
    pair.settle()
    assert ends.channel.get(0) == "the queue"  # an error always raises an event


def test_channel_waits_for_an_event(pair: Pair) -> None:
    ends = Armed(pair)
    ends.cq.req_notify(False)
    started = pair.clock.now
    assert ends.channel.get(0.25) is None
    assert pair.clock.now >= started + 0.25
    ends.left.post_send([SendWR()])
    assert ends.channel.get(None) == "the queue"


def test_destroyed_queue_raises_no_event(pair: Pair) -> None:
    ends = Armed(pair)
    ends.cq.req_notify(False)
    ends.message()
    ends.right.destroy()
    ends.cq.destroy()
    assert ends.channel.get(0) is None


def test_channel_descriptor_becomes_readable(pair: Pair) -> None:
    ends = Armed(pair)
    ends.cq.req_notify(False)
    ends.message()
    fd = ends.channel.fileno()
    assert readable(fd)
    assert ends.channel.get(0) == "the queue"
    assert not readable(fd)
    ends.cq.req_notify(False)
    ends.message()
    assert readable(fd)
    ends.cq.destroy()
    assert not readable(fd)
    ends.channel.close()
    assert ends.channel.fileno() == -1
    with pytest.raises(RdmaError):
        ends.channel.get(0)


def test_overflow_moves_the_queue_pairs_to_error(pair: Pair) -> None:
    channel = pair.b.device.create_channel()
    cq = pair.b.cq(2, channel, "small")
    left, right, unconnected = pair.a.qp(), pair.b.qp(cq), pair.b.qp(cq)
    untouched = pair.b.qp()
    pair.connect(left, right)
    right.post_recv([RecvWR(n) for n in range(5)])
    cq.req_notify(True)
    left.post_send([SendWR(n) for n in range(3)])
    pair.settle()
    assert channel.get(0) == "small"
    assert cq.overrun
    assert (right.state, unconnected.state, untouched.state) == (QPState.ERR, QPState.RESET, QPState.RESET)
    assert cq.wait(0)
    assert told(cq.poll(9)) == [(0, "SUCCESS"), (1, "SUCCESS")]
    with pytest.raises(RdmaError) as caught:
        cq.poll(9)
    assert caught.value.errno == errno.EOVERFLOW
