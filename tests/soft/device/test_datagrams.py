"""Datagram queue pairs of the software device, on a network in memory."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_address
from itertools import takewhile

import pytest

from rdmacm import RdmaError
from rdmacm.proto.roce.grh import GRH
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import QPAttr, SrqAttr
from rdmacm.verbs.buffers import address_of
from rdmacm.verbs.enums import EventType, QPAttrMask, QPState, SendFlag, SrqAttrMask, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR
from support.softdev import UD_STEPS, Handle, Host, Pair, sge, told

QKEY = 0x01234567
INLINE, SIGNALED, SOLICITED = SendFlag.INLINE, SendFlag.SIGNALED, SendFlag.SOLICITED
_M = QPAttrMask


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


class Ends:
    """A datagram queue pair of each host; ``family``: 0 IPv4, 1 IPv6, 2 link-local."""

    def __init__(self, pair: Pair, family: int = 0, *, receives: int = 8, room: int = 5000) -> None:
        self.pair = pair
        self.left_cq, self.right_cq = pair.a.cq(), pair.b.cq()
        self.left, self.right = pair.a.ud(self.left_cq), pair.b.ud(self.right_cq)
        self.ah = pair.a.ah(pair.b.addresses[family])
        self.inbox = pair.b.region(receives * room)
        self.room = room
        self.right.post_recv([RecvWR(number, [sge(self.inbox, number * room, room)]) for number in range(receives)])

    def send(self, data: bytes = b"hello", wr_id: int = 1, qkey: int = QKEY, **more: object) -> None:
        fields = {"sg": [data], "send_flags": INLINE | SIGNALED, "ah": self.ah, **more}
        wr = SendWR(wr_id, remote_qpn=self.right.qp_num, remote_qkey=qkey, **fields)  # type: ignore[arg-type]
        self.left.post_send([wr])

    def message(self, number: int, length: int) -> bytes:
        start = number * self.room + 40
        return bytes(self.inbox.view[start : start + length])

    def dropped(self, host: Host) -> dict[str, int]:
        counted = {name: count for name, count in host.device.query_counters().items() if count}
        return counted | {name: count for name, count in host.mux.dropped.items() if name != "packet"}


@pytest.mark.parametrize("family", [0, 1, 2], ids=["ipv4", "ipv6", "link-local"])
@pytest.mark.parametrize("size", [0, 1, 1024])
def test_message_and_its_answer(pair: Pair, family: int, size: int) -> None:
    """The receiver answers to the address in the GRH and the queue pair in the completion."""
    ends = Ends(pair, family)
    data = random.Random(size).randbytes(size)
    outbox = pair.a.region(data or b"-")
    pieces = [sge(outbox, 0, size // 3), sge(outbox, size // 3, size - size // 3)] if size else []
    ends.send(sg=pieces, send_flags=SIGNALED | SOLICITED, opcode=WROpcode.SEND_WITH_IMM, imm_data=0x16)
    assert told(pair.poll(pair.a, ends.left_cq)) == [(1, "SUCCESS")]
    (wc,) = pair.poll(pair.b, ends.right_cq)
    assert (wc.wr_id, wc.byte_len, wc.imm_data, wc.solicited) == (0, 40 + size, 0x16, True)
    assert (wc.src_qp, wc.qp_num, wc.has_grh, wc.slid) == (ends.left.qp_num, ends.right.qp_num, True, 0)
    assert ends.message(0, size) == data
    grh = GRH.unpack(ends.inbox.view)
    assert (grh.sgid.ip, grh.dgid.ip) == (pair.a.addresses[family], pair.b.addresses[family])
    answers = pair.a.region(100)
    ends.left.post_recv([RecvWR(9, [sge(answers)])])
    wr = SendWR(5, sg=[b"answer"], send_flags=INLINE, ah=pair.b.ah(grh.sgid.ip), remote_qpn=wc.src_qp, remote_qkey=QKEY)
    ends.right.post_send([wr])
    (answer,) = pair.poll(pair.a, ends.left_cq)
    assert (answer.wr_id, answer.byte_len) == (9, 46)
    assert bytes(answers.view[40:46]) == b"answer"
    assert not ends.right_cq.poll(8), "the answer was not signaled"


def test_inline_datagram_needs_no_registration(pair: Pair) -> None:
    ends, plain = Ends(pair), bytearray(b"anywhere")
    ends.send(sg=[SGE(address_of(memoryview(plain)), 8, 0)])
    plain[:] = b"!" * 8
    assert [(wc.status.name, wc.byte_len) for wc in pair.poll(pair.b, ends.right_cq)] == [("SUCCESS", 48)]
    assert ends.message(0, 8) == b"anywhere"


def test_batch_with_a_message_that_is_too_long_posts_nothing(pair: Pair) -> None:
    ends = Ends(pair)
    long = pair.a.region(1025)
    wrs = [
        SendWR(n, sg=[sge(long, 0, length)], ah=ends.ah, remote_qpn=ends.right.qp_num, remote_qkey=QKEY)
        for n, length in enumerate((1, 1025, 1024))
    ]
    with pytest.raises(RdmaError, match="MTU of the port is 1024") as caught:
        ends.left.post_send_all(wrs)
    assert caught.value.bad_wr is wrs[1]
    pair.settle()
    assert (ends.left_cq.poll(9), ends.right_cq.poll(9)) == ([], [])
    ends.left.post_send_all([wrs[0], wrs[2]])
    assert [wc.byte_len for wc in pair.poll(pair.b, ends.right_cq, 2)] == [41, 1064]


def test_two_queue_pairs_of_a_host(pair: Pair) -> None:
    cq = pair.a.cq()
    one, other = pair.a.ud(cq), pair.a.ud(cq)
    inbox = pair.a.region(100)
    other.post_recv([RecvWR(1, [sge(inbox)])])
    one.post_send(
        [
            SendWR(
                2,
                sg=[b"me"],
                send_flags=INLINE,
                ah=pair.a.ah(pair.a.addresses[0]),
                remote_qpn=other.qp_num,
                remote_qkey=QKEY,
            )
        ]
    )
    assert told(pair.poll(pair.a, cq)) == [(1, "SUCCESS")]


def test_traffic_class_and_hop_limit_are_the_address_handles(pair: Pair) -> None:
    ends = Ends(pair)
    for number, (hop_limit, expected) in enumerate(((7, 7), (255, 255), (1, 0), (0, 0))):
        ends.ah = pair.a.ah(pair.b.addresses[0], traffic_class=0x2E, hop_limit=hop_limit)
        ends.send()
        route = ends.left._routes[ends.ah][0]
        assert (route.traffic_class, route.hop_limit) == (0x2E, expected)  # type: ignore[union-attr]
        pair.poll(pair.b, ends.right_cq)
        grh = GRH.unpack(ends.inbox.view[number * ends.room :])
        assert (grh.traffic_class, grh.hop_limit) == (0x2E, expected or 64)


def test_message_longer_than_the_mtu_is_refused(pair: Pair) -> None:
    ends = Ends(pair)
    outbox = pair.a.region(2000)
    ends.send(sg=[sge(outbox, 0, 1024)])
    with pytest.raises(RdmaError, match="MTU of the port is 1024") as caught:
        ends.send(sg=[sge(outbox, 0, 1000), sge(outbox, 0, 25)])
    assert caught.value.errno == errno.EINVAL
    assert caught.value.bad_wr is not None
    pair.poll(pair.b, ends.right_cq)
    assert told(pair.poll(pair.a, ends.left_cq)) == [(1, "SUCCESS")]


def test_handle_that_leads_nowhere_is_refused(pair: Pair) -> None:
    ends = Ends(pair)
    good = ends.ah
    ends.ah = pair.a.ah(pair.b.addresses[0])
    ends.ah.attr.gr.sgid_index = pair.a.gid_index(pair.a.addresses[1])
    with pytest.raises(RdmaError, match="one GID is of IPv4") as caught:
        ends.send()
    assert (caught.value.errno, ends.left.state) == (errno.EINVAL, QPState.RTS)
    ends.ah = Handle(good.attr)
    ends.ah.attr.gr.sgid_index = 99
    with pytest.raises(RdmaError, match="no GID at index 99"):
        ends.send()


def test_full_queues(pair: Pair) -> None:
    ends = Ends(pair)
    ends.left.modify(QPAttr(qp_state=QPState.SQD), _M.STATE)
    for number in range(64):
        ends.send(wr_id=number)
    with pytest.raises(RdmaError) as caught:
        ends.send()
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(RdmaError) as caught:
        ends.right.post_recv([RecvWR(9)] * 57)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("train", [0, 65_507])
def test_flood_leaves_others_their_turn(train: int) -> None:
    """A queue pair sends a turn's packets, then another one has its turn."""
    with closing(Pair(train)) as pair:
        ends = Ends(pair)
        flooding = pair.a.ud(sends=1000)
        wr = SendWR(1, sg=[b"flood"], send_flags=INLINE, ah=ends.ah, remote_qpn=ends.right.qp_num, remote_qkey=QKEY)
        flooding.post_send([wr] * 1000)
        assert 0 < flooding._sends < 1000
        ends.send(b"fair")
        assert told(pair.poll(pair.a, ends.left_cq)) == [(1, "SUCCESS")]
        before = takewhile(lambda sent: b"fair" not in sent[1], pair.net.sent)
        assert sum(len(data) // 32 for _, data, _ in before) < 600, "packets of the flood, each of 32 bytes"
        pair.settle()
        assert flooding._sends == 0


def test_flood_of_small_send_queue_makes_progress(pair: Pair) -> None:
    ends = Ends(pair)
    busy = pair.a.ud(sends=8)
    wr = SendWR(1, sg=[b"x"], send_flags=INLINE, ah=ends.ah, remote_qpn=ends.right.qp_num, remote_qkey=QKEY)
    for _ in range(100):
        busy.post_send([wr] * 8)


# -- what is dropped ------------------------------------------------------------------------------------------------


def test_wrong_q_key_is_counted_and_nothing_else(pair: Pair) -> None:
    ends = Ends(pair)
    ends.send(b"bad", qkey=QKEY + 1)
    ends.send(b"good")
    (wc,) = pair.poll(pair.b, ends.right_cq)
    assert (wc.wr_id, ends.message(0, 4)) == (0, b"good")
    assert ends.dropped(pair.b) == {"dropped_qkey": 1}
    ends.right.modify(QPAttr(qkey=QKEY + 1), _M.QKEY)
    ends.send(b"now", qkey=QKEY + 1)
    assert pair.poll(pair.b, ends.right_cq)[0].wr_id == 1


def test_message_without_a_receive(pair: Pair) -> None:
    ends = Ends(pair, receives=1, room=44)
    ends.send(b"five5")  # too long
    ends.send(b"four")
    ends.send(b"none")
    pair.settle()
    assert told(pair.poll(pair.b, ends.right_cq)) == [(0, "SUCCESS")]
    assert ends.message(0, 4) == b"four"
    assert ends.dropped(pair.b) == {"dropped_no_receive": 1, "dropped_short_receive": 1}


@pytest.mark.parametrize("state", [QPState.INIT, QPState.RTR])
def test_receiving_begins_in_rtr(pair: Pair, state: QPState) -> None:
    ends = Ends(pair)
    cq = pair.b.cq()
    early = pair.b.ud(cq, state=state)
    inbox = pair.b.region(100)
    early.post_recv([RecvWR(1, [sge(inbox)])])
    wr = SendWR(1, sg=[b"early"], send_flags=INLINE, ah=ends.ah, remote_qpn=early.qp_num, remote_qkey=QKEY)
    ends.left.post_send([wr])
    pair.settle()
    found = told(cq.poll(2))
    assert found == ([(1, "SUCCESS")] if state is QPState.RTR else [])
    with pytest.raises(RdmaError) as caught:
        early.post_send([wr])
    assert (caught.value.errno, caught.value.bad_wr) == (errno.EINVAL, wr)


def test_packet_to_an_address_of_another_device(pair: Pair) -> None:
    """A host has many addresses; those of the queue pair's device are its own."""
    ends = Ends(pair)
    ends.send(b"four")
    path, packet, _ = pair.net.sent[-1]
    pair.poll(pair.b, ends.right_cq)
    foreign = ip_address("192.0.2.7").packed
    pair.net.wires[foreign] = pair.b.wire
    sealed = packet[:-4] + icrc_between(path.local, foreign, 50_000).seal([packet[:-4]])
    pair.net.inject(WirePath(path.local, foreign), sealed)
    pair.settle()
    assert not ends.right_cq.poll(1)
    assert ends.dropped(pair.b) == {"address": 1}


def test_packets_of_many_senders(pair: Pair) -> None:
    """A flow is kept for each of the last senders, not for all."""
    ends = Ends(pair, receives=16)
    ends.send(b"four")
    _, packet, _ = pair.net.sent[-1]
    pair.poll(pair.b, ends.right_cq)
    here = pair.b.addresses[0]
    for number in range(700):
        there = bytes((10, 9, number >> 8, number & 0xFF))
        sealed = packet[:-4] + icrc_between(there, here, 50_000).seal([packet[:-4]])
        pair.net.inject(WirePath(there, here), sealed)
    pair.settle()
    assert len(ends.right_cq.poll(100)) == 15
    assert len(ends.right._flows) <= 256
    assert ends.dropped(pair.b) == {"dropped_no_receive": 685}


# -- errors, states, the end ----------------------------------------------------------------------------------------


class Events(list[EventType]):
    """The asynchronous events of an object, in order."""

    post = list.append


def test_wrong_lkey_of_a_send_leads_to_sqe_and_back(pair: Pair) -> None:
    ends = Ends(pair)
    events = ends.left.async_events = Events()
    wrong = SGE(0, 8, 0xBAD)
    wrs = [
        SendWR(number, sg=[piece], send_flags=0, ah=ends.ah, remote_qpn=ends.right.qp_num, remote_qkey=QKEY)
        for number, piece in enumerate((sge(pair.a.region(8)), wrong, wrong))
    ]
    ends.left.post_send(wrs)
    assert told(pair.poll(pair.a, ends.left_cq, 2)) == [(1, "LOC_PROT_ERR"), (2, "WR_FLUSH_ERR")]
    assert (ends.left.state, events) == (QPState.SQE, [])
    ends.send(wr_id=3)
    assert told(pair.poll(pair.a, ends.left_cq)) == [(3, "WR_FLUSH_ERR")]
    inbox = pair.a.region(100)
    ends.left.post_recv([RecvWR(7, [sge(inbox)])])
    back = pair.b.ah(pair.a.addresses[0])
    wr = SendWR(1, sg=[b"in"], send_flags=INLINE, ah=back, remote_qpn=ends.left.qp_num, remote_qkey=QKEY)
    ends.right.post_send([wr])
    assert told(pair.poll(pair.a, ends.left_cq)) == [(7, "SUCCESS")], "receives go on"
    ends.left.modify(QPAttr(qp_state=QPState.RTS), _M.STATE)
    ends.send(wr_id=4)
    assert told(pair.poll(pair.a, ends.left_cq)) == [(4, "SUCCESS")]
    assert len(pair.poll(pair.b, ends.right_cq, 2)) == 2


def test_receive_of_a_datagram_whose_region_has_changed(pair: Pair) -> None:
    ends, inbox = Ends(pair, receives=0), pair.b.region(100)
    ends.right.post_recv([RecvWR(1, [sge(inbox)]), RecvWR(2)])
    inbox.rereg(object(), None, None)
    ends.send()
    assert told(pair.poll(pair.b, ends.right_cq, 2)) == [(1, "LOC_PROT_ERR"), (2, "WR_FLUSH_ERR")]
    assert bytes(inbox.view) == bytes(100)


def test_wrong_lkey_of_a_receive_leads_to_err(pair: Pair) -> None:
    ends = Ends(pair, receives=0)
    events = ends.right.async_events = Events()
    ends.right.post_recv([RecvWR(1, [SGE(0, 100, 0xBAD)]), RecvWR(2)])
    ends.send()
    assert told(pair.poll(pair.b, ends.right_cq, 2)) == [(1, "LOC_PROT_ERR"), (2, "WR_FLUSH_ERR")]
    assert (ends.right.state, events) == (QPState.ERR, [EventType.QP_FATAL])
    ends.right.post_recv([RecvWR(3)])
    assert told(pair.poll(pair.b, ends.right_cq)) == [(3, "WR_FLUSH_ERR")]


def test_sqd_keeps_requests_and_says_that_it_is_drained(pair: Pair) -> None:
    ends = Ends(pair)
    events = ends.left.async_events = Events()
    ends.left.modify(QPAttr(qp_state=QPState.SQD, en_sqd_async_notify=1), _M.STATE | _M.EN_SQD_ASYNC_NOTIFY)
    ends.send(wr_id=1)
    pair.settle()
    assert (events, ends.left_cq.poll(1), ends.left.query().sq_draining) == ([EventType.SQ_DRAINED], [], 0)
    ends.left.modify(QPAttr(qp_state=QPState.RTS), _M.STATE)
    assert told(pair.poll(pair.a, ends.left_cq)) == [(1, "SUCCESS")]


def test_err_flushes_and_reset_forgets(pair: Pair) -> None:
    ends = Ends(pair, receives=2)
    ends.left.modify(QPAttr(qp_state=QPState.SQD), _M.STATE)
    ends.send(wr_id=5)
    ends.left.modify(QPAttr(qp_state=QPState.ERR), _M.STATE)
    ends.send(wr_id=6)
    assert told(pair.poll(pair.a, ends.left_cq, 2)) == [(5, "WR_FLUSH_ERR"), (6, "WR_FLUSH_ERR")]
    ends.right.modify(QPAttr(qp_state=QPState.RESET), _M.STATE)
    assert not ends.right_cq.poll(8)
    for step, mask in UD_STEPS:
        for qp in (ends.left, ends.right):
            if qp is ends.left and step is QPState.INIT:
                qp.modify(QPAttr(qp_state=QPState.RESET), _M.STATE)
            qp.modify(QPAttr(qp_state=step, qkey=QKEY, sq_psn=0xFFFFFF), mask)
    ends.right.post_recv([RecvWR(1, [sge(ends.inbox)])])
    ends.send()
    assert told(pair.poll(pair.b, ends.right_cq)) == [(1, "SUCCESS")]
    assert pair.net.sent[-1][1][9:12] == b"\xff\xff\xff"


def test_attributes_are_queried(pair: Pair) -> None:
    qp = pair.a.ud(qkey=0x42)
    found = qp.query()
    assert (found.qp_state, found.qkey, found.sq_psn, found.cap.max_send_wr) == (QPState.RTS, 0x42, 100, 64)


def test_advance_takes_it_to_rts(pair: Pair) -> None:
    qp = pair.a.ud(state=QPState.RESET)
    qp.attr.qkey = QKEY
    qp.advance(QPState.RTS)
    assert qp.state is QPState.RTS
    with pytest.raises(RdmaError):
        qp.advance(QPState.INIT)
    qp.destroy()
    with pytest.raises(RdmaError):
        qp.advance(QPState.RTS)


def test_shared_receive_queue(pair: Pair) -> None:
    ends = Ends(pair)
    srq = pair.b.device.create_srq(pair.b.pd, SrqAttr(max_wr=8))
    events = srq.async_events = Events()
    cq = pair.b.cq()
    first, second = pair.b.ud(cq, srq=srq), pair.b.ud(cq, srq=srq)
    inbox = pair.b.region(400)
    srq.post_recv([RecvWR(number, [sge(inbox, number * 100, 44)]) for number in range(3)])
    srq.modify(SrqAttr(srq_limit=2), SrqAttrMask.LIMIT)

    def send(qp: SoftUdQP, data: bytes) -> None:
        wr = SendWR(1, sg=[data], send_flags=INLINE, ah=ends.ah, remote_qpn=qp.qp_num, remote_qkey=QKEY)
        ends.left.post_send([wr])

    send(first, b"too long")
    for number in range(4):
        send((first, second)[number & 1], b"no %d" % number)
    pair.settle()
    assert [(wc.wr_id, wc.qp_num) for wc in cq.poll(8)] == [
        (0, first.qp_num),
        (1, second.qp_num),
        (2, first.qp_num),
    ]
    assert events == [EventType.SRQ_LIMIT_REACHED]
    assert ends.dropped(pair.b) == {"dropped_short_receive": 1, "dropped_no_receive": 1}
    assert [bytes(inbox.view[at + 40 : at + 44]) for at in (0, 100, 200)] == [b"no 0", b"no 1", b"no 2"]
    gone = first.async_events = Events()
    first.modify(QPAttr(qp_state=QPState.ERR), _M.STATE)
    assert gone == [EventType.QP_LAST_WQE_REACHED]


def test_overflow_of_the_completion_queue_ends_the_queue_pair(pair: Pair) -> None:
    ends = Ends(pair)
    cq = pair.b.cq(1)
    small = pair.b.ud(cq)
    events = small.async_events = Events()
    inbox = pair.b.region(400)
    small.post_recv([RecvWR(number, [sge(inbox)]) for number in range(3)])
    wr = SendWR(1, sg=[b"one"], send_flags=INLINE, ah=ends.ah, remote_qpn=small.qp_num, remote_qkey=QKEY)
    ends.left.post_send([wr, wr])
    pair.settle()
    assert (small.state, events) == (QPState.ERR, [EventType.QP_FATAL])


def test_loss_loses_messages_and_nothing_else(pair: Pair) -> None:
    """Every send completes once; every message that arrives is whole, and completes one receive."""
    ends = Ends(pair, receives=64, room=128)
    chance = random.Random(5)
    pair.net.lost = lambda _: chance.random() < 0.3
    for number in range(64):
        ends.send(bytes((number,)) * (1 + number), wr_id=number)
    pair.settle()
    assert [wc.wr_id for wc in ends.left_cq.poll(100)] == list(range(64))
    arrived = ends.right_cq.poll(100)
    assert 20 < len(arrived) < 64
    assert [wc.wr_id for wc in arrived] == list(range(len(arrived)))
    for wc in arrived:
        content = ends.message(wc.wr_id, wc.byte_len - 40)
        assert set(content) == {len(content) - 1}
