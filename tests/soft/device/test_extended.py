"""Batches of extended queue pairs on the software device: if one request is refused, none is posted."""

from __future__ import annotations

import errno

import pytest

from rdmacm import RdmaError
from rdmacm.verbs import QPState, RecvWR, SendWR
from support.softdev import Connected, Pair, modify_state, told


def refused(ends: Connected, code: int, wrs: list[SendWR], bad: int) -> None:
    with pytest.raises(RdmaError) as raised:
        ends.left.post_send_all(wrs)
    assert (raised.value.errno, raised.value.bad_wr) == (code, wrs[bad])
    ends.pair.settle()
    assert (ends.left_cq.poll(99), ends.right_cq.poll(99)) == ([], [])


def test_batch_larger_than_the_room_posts_nothing(pair: Pair) -> None:
    ends = Connected(pair)
    ends.right.post_recv([RecvWR(n) for n in range(64)])
    refused(ends, errno.ENOMEM, [SendWR(n) for n in range(65)], 64)
    ends.left.post_send_all([SendWR(n) for n in range(64)])
    assert told(ends.at_left(64)) == [(n, "SUCCESS") for n in range(64)]
    pair.net.lost = lambda datagram: True
    ends.left.post_send_all([SendWR(n) for n in range(60)])
    with pytest.raises(RdmaError) as raised:
        ends.left.post_send_all(wrs := [SendWR(n) for n in range(5)])
    assert raised.value.bad_wr is wrs[4]
    ends.left.post_send_all(wrs[:4])
    ends.left.destroy()


def test_acknowledged_requests_make_room(pair: Pair) -> None:
    ends = Connected(pair)
    ends.right.post_recv([RecvWR(n) for n in range(64)])
    ends.left.post_send_all([SendWR(n, send_flags=0) for n in range(60)])
    pair.b.provider.drive(lambda: None, 0)  # the peer acknowledges
    ends.right.post_recv([RecvWR(n) for n in range(32)])
    ends.left.post_send_all([SendWR(n) for n in range(32)])
    assert told(ends.at_left(32)) == [(n, "SUCCESS") for n in range(32)]


def test_batch_in_the_wrong_state_posts_nothing(pair: Pair) -> None:
    ends = Connected(pair)
    modify_state(ends.left, QPState.RESET)
    refused(ends, errno.EINVAL, [SendWR(1), SendWR(2)], 0)
    pair.connect(ends.left, pair.b.qp())
    modify_state(ends.left, QPState.ERR)
    ends.left.post_send_all([SendWR(1), SendWR(2)])
    assert told(ends.left_cq.poll(9)) == [(1, "WR_FLUSH_ERR"), (2, "WR_FLUSH_ERR")]
