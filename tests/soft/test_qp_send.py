"""Queue pairs of the software device: messages and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdmacm.verbs.wr import RecvWR, SendWR
from support.softdev import Pair, sge


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("family", [0, 1, 2], ids=["ipv4", "ipv6", "link-local"])
def test_a_message_arrives(pair: Pair, family: int) -> None:
    left, right = pair.a.qp(), pair.b.qp()
    pair.connect(left, right, family=family)
    inbox, outbox = pair.b.region(8000), pair.a.region(bytes(range(250)) * 20)
    right.post_recv([RecvWR(7, [sge(inbox)])])
    left.post_send([SendWR(3, sg=[sge(outbox)])])
    assert [(wc.wr_id, wc.byte_len, wc.qp_num) for wc in pair.poll(pair.b, right._recv_cq)] == [(7, 5000, right.qp_num)]
    assert [(wc.wr_id, wc.status.name, wc.qp_num) for wc in pair.poll(pair.a, left._send_cq)] == [
        (3, "SUCCESS", left.qp_num)
    ]
    assert inbox.view[:5000] == outbox.view
