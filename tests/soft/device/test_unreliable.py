"""Unreliable connected queue pairs of the software device."""

from __future__ import annotations

import errno
import random

import pytest

from rdmacm import RdmaError
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.verbs.attr import QPAttr, SrqAttr
from rdmacm.verbs.enums import EventType, QPAttrMask, QPState, QPType, SendFlag, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR
from support.softdev import Connected, Pair, sge, told

UC = QPType.UC


class Heard(list[EventType]):
    post = list.append


def modify_state(ends: Connected, state: QPState, **more: int) -> None:
    mask = QPAttrMask.STATE | (QPAttrMask.EN_SQD_ASYNC_NOTIFY if more else 0)
    ends.left.modify(QPAttr(qp_state=state, **more), QPAttrMask(mask))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [0, 1, 2], ids=["ipv4", "ipv6", "link-local"])
@pytest.mark.parametrize("size", [0, 1, 1024, 5000, 300_000])
def test_message_arrives_in_its_receive(pair: Pair, family: int, size: int) -> None:
    ends = Connected(pair, family, qp_type=UC)
    inbox, outbox = pair.b.region(size + 10), pair.a.region(random.Random(size).randbytes(size))
    ends.right.post_recv([RecvWR(7, [sge(inbox)])])
    ends.left.post_send([SendWR(3, sg=[sge(outbox)])])
    assert [(wc.wr_id, wc.byte_len, wc.qp_num) for wc in ends.at_right()] == [(7, size, ends.right.qp_num)]
    assert [(wc.wr_id, wc.status.name, wc.qp_num) for wc in ends.at_left()] == [(3, "SUCCESS", ends.left.qp_num)]
    assert inbox.view[:size] == outbox.view


def test_inline_data_and_writes_in_one_list(pair: Pair) -> None:
    ends = Connected(pair, qp_type=UC)
    target, outbox = pair.b.region(10_000), pair.a.region(b"x" * 5000)
    ends.right.post_recv([RecvWR(1), RecvWR(2, [sge(target)])])
    whole = SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], 0)
    part = SendWR(2, WROpcode.RDMA_WRITE_WITH_IMM, [sge(outbox, 0, 10)], 0, imm_data=9)
    for wr in (whole, part):
        wr.set_wr_rdma(target.rkey, target.addr + 5000)
    ends.left.post_send(
        [
            whole,
            part,
            SendWR(3, WROpcode.SEND, [b"inline"], SendFlag.INLINE | SendFlag.SIGNALED | SendFlag.SOLICITED),
        ]
    )
    assert [(wc.wr_id, wc.byte_len, wc.imm_data, wc.solicited) for wc in ends.at_right(2)] == [
        (1, 10, 9, False),
        (2, 6, None, True),
    ]
    assert told(ends.at_left()) == [(3, "SUCCESS")]
    assert bytes(target.view) == b"inline" + bytes(4994) + b"x" * 5000


def test_lost_packet_drops_its_message_only(pair: Pair) -> None:
    ends = Connected(pair, qp_type=UC)
    inbox, outbox = pair.b.region(15_000), pair.a.region(bytes(5000))
    ends.right.post_recv([RecvWR(n, [sge(inbox, 5000 * n, 5000)]) for n in range(3)])
    for number in range(3):
        pair.net.lost = (lambda _: True) if number == 1 else (lambda _: False)
        ends.left.post_send([SendWR(number, sg=[sge(outbox)])])
    assert told(ends.at_left(3)) == [(0, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS")]
    assert told(ends.at_right(2)) == [(0, "SUCCESS"), (1, "SUCCESS")]
    assert pair.b.mux.runtime.next_deadline() is None, "nothing is waited for"


def test_memory_that_is_not_registered_leads_to_sqe_and_back(pair: Pair) -> None:
    ends = Connected(pair, qp_type=UC)
    inbox, outbox = pair.a.region(100), pair.a.region(bytes(100))
    ends.left.post_recv([RecvWR(5, [sge(inbox)])])
    good = SendWR(1, sg=[sge(outbox)])
    ends.left.post_send([good, SendWR(2, sg=[SGE(outbox.addr, 100, outbox.lkey ^ 1)]), SendWR(3)])
    assert told(ends.at_left(3)) == [(1, "SUCCESS"), (2, "LOC_PROT_ERR"), (3, "WR_FLUSH_ERR")]
    assert ends.left.state is QPState.SQE
    ends.left.post_send([SendWR(4)])
    assert told(ends.at_left()) == [(4, "WR_FLUSH_ERR")]
    ends.right.post_send([SendWR(1, sg=[b"abc"], send_flags=SendFlag.INLINE)])
    assert told(ends.at_left()) == [(5, "SUCCESS")], "receives go on"
    modify_state(ends, QPState.RTS)
    ends.left.post_send([good])
    assert told(ends.at_left()) == [(1, "SUCCESS")]


def test_sqd_keeps_requests_for_later(pair: Pair) -> None:
    ends = Connected(pair, qp_type=UC)
    heard = ends.left.async_events = Heard()
    modify_state(ends, QPState.SQD, en_sqd_async_notify=1)
    assert heard == [EventType.SQ_DRAINED]
    ends.left.post_send([SendWR(1)])
    assert ends.left.query().sq_draining == 0
    pair.settle()
    assert ends.left_cq.poll(1) == []
    modify_state(ends, QPState.RTS)
    assert told(ends.at_left()) == [(1, "SUCCESS")]


def test_error_state_flushes(pair: Pair) -> None:
    ends = Connected(pair, qp_type=UC)
    ends.left.post_recv([RecvWR(1), RecvWR(2)])
    modify_state(ends, QPState.ERR)
    ends.left.post_send([SendWR(3)])
    assert told(ends.at_left(3)) == [(n, "WR_FLUSH_ERR") for n in (1, 2, 3)]


def test_receive_whose_memory_is_released_ends_the_queue_pair(pair: Pair) -> None:
    ends = Connected(pair, qp_type=UC)
    heard = ends.right.async_events = Heard()
    inbox = pair.b.region(100)
    ends.right.post_recv([RecvWR(1, [SGE(inbox.addr, 100, inbox.lkey ^ 1)]), RecvWR(2)])
    ends.left.post_send([SendWR(1, sg=[b"abc"], send_flags=SendFlag.INLINE | SendFlag.SIGNALED)])
    assert told(ends.at_right(2)) == [(1, "LOC_QP_OP_ERR"), (2, "WR_FLUSH_ERR")]
    assert (ends.right.state, heard) == (QPState.ERR, [EventType.QP_FATAL])
    assert told(ends.at_left()) == [(1, "SUCCESS")], "the sender does not know"


def test_shared_receives_and_a_full_send_queue(pair: Pair) -> None:
    srq: SoftSRQ = pair.b.device.create_srq(pair.b.pd, SrqAttr(max_wr=4, max_sge=1))
    cq, left_cq = pair.b.cq(), pair.a.cq()
    left, right = pair.a.qp(left_cq, qp_type=UC, sends=2), pair.b.qp(cq, srq=srq, qp_type=UC)
    pair.connect(left, right)
    inbox = pair.b.region(40)
    srq.post_recv([RecvWR(n, [sge(inbox, 10 * n, 10)]) for n in range(4)])
    left.modify(QPAttr(qp_state=QPState.SQD), QPAttrMask.STATE)
    left.post_send([SendWR(1), SendWR(2)])
    with pytest.raises(RdmaError, check=lambda error: error.errno == errno.ENOMEM):
        left.post_send([SendWR(3)])
    left.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
    assert told(pair.poll(pair.b, cq, 2)) == [(0, "SUCCESS"), (1, "SUCCESS")]
    assert right.ask_peer() is None


def test_packets_of_other_types_and_addresses_are_dropped(pair: Pair) -> None:
    """A reliable connected queue pair sends to an unreliable one, and the other way round."""
    reliable, unreliable = pair.a.qp(), pair.b.qp(qp_type=UC)
    pair.connect(reliable, unreliable, timeout=1, retry_cnt=0)
    unreliable.post_recv([RecvWR(1)])
    reliable.post_recv([RecvWR(1)])
    reliable.post_send([SendWR(1)])
    unreliable.post_send([SendWR(1)])
    pair.settle()
    for host in (pair.a, pair.b):
        assert host.device.query_counters()["dropped_opcode"] == 1
    assert (reliable.state, unreliable.state) == (QPState.RTS, QPState.RTS)
