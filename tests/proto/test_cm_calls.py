"""Calls of the CM agent: connecting and disconnecting, rejection, timeouts, SIDR."""

from __future__ import annotations

import errno
import random
from collections import Counter
from itertools import pairwise

import pytest

from rdmacm.errors import CmStateError, RdmaError
from rdmacm.proto.cm.codes import MessageKind, RejectReason, SidrStatus
from rdmacm.proto.cm.connection import DropReason, NetworkError
from rdmacm.proto.cm.messages import (
    DREP,
    DREQ,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    pack_message,
    unpack_message,
)
from rdmacm.proto.cm.states import CmState
from rdmacm.proto.cm.timeouts import ack_timeout, seconds
from rdmacm.proto.mad import Mad
from support.cm import GUIDS, PEER, PEER_GUID, SERVICE, Pair, Scripted, established, opened, reply, request
from support.cm_events import (
    Agent,
    ConnectReply,
    ConnectRequest,
    Disconnected,
    DisconnectRequested,
    Rejected,
    SidrReply,
    SidrRequest,
    TimewaitExit,
    Unreachable,
)
from support.rows import for_each

# -- encodings --------------------------------------------------------------------------------------------------


def test_timeouts_are_encoded_as_powers_of_two() -> None:
    assert [seconds(x) for x in (0, 8, 16, 19, 20, 24)] == [0.001, 0.001, 0.256, 2.048, 4.096, 65.536]
    assert seconds(31) == seconds(24), "capped, because a peer could ask for two hours"
    assert ack_timeout(15, 18) == 19
    assert ack_timeout(15, 16) == 17
    assert [ack_timeout(d, 14) for d in (0, 13, 14, 15, 16, 17, 31)] == [15, 15, 16, 16, 17, 17, 31]


# -- from request to timewait -------------------------------------------------------------------------------------


def test_active_side_connects_and_disconnects() -> None:
    pair, active, passive = established()
    assert pair.sent() == ["0:REQ", "1:REP", "0:RTU"]
    req, rep, rtu = (message for _, message in pair.log)
    assert isinstance(req, REQ)
    assert isinstance(rep, REP)
    assert isinstance(rtu, RTU)
    assert (req.local_comm_id, rep.local_comm_id) == (active, passive)
    assert (rep.remote_comm_id, rtu.local_comm_id, rtu.remote_comm_id) == (active, active, passive)
    assert (req.local_ca_guid, rep.local_ca_guid) == GUIDS
    ends = [pair.agents[0].connection(active), pair.agents[1].connection(passive)]
    assert [end.state for end in ends if end is not None] == [CmState.ESTABLISHED] * 2
    assert [end.starting_psn for end in ends if end is not None] == [req.starting_psn, rep.starting_psn]
    assert pair.agents[0].next_deadline() is None
    assert pair.agents[1].next_deadline() is None

    started = pair.now
    pair.agents[0].disconnect(active, pair.now)
    pair.run()
    assert pair.sent()[3:] == ["0:DREQ", "1:DREP"]
    dreq = pair.log[3][1]
    assert isinstance(dreq, DREQ)
    assert dreq.remote_qpn_eecn == rep.local_qpn
    assert pair.events[0][1:] == [Disconnected(active), TimewaitExit(active, 0x11)]
    assert pair.events[1][2:] == [DisconnectRequested(passive), TimewaitExit(passive, 0x22)]
    # The passive side waits for the REQ's ACK timeout, 19; the active side for its own path's, 17.
    assert pair.times[1][-1] - started == pytest.approx(2.048 + 0.001)
    assert pair.times[0][-1] - started == pytest.approx(0.512 + 0.002)
    assert pair.is_empty()


def test_passive_side_disconnects() -> None:
    pair, active, passive = established()
    pair.agents[1].disconnect(passive, pair.now)
    pair.run()
    assert pair.sent()[3:] == ["1:DREQ", "0:DREP"]
    assert pair.log[3][1].remote_qpn_eecn == 0x11  # type: ignore[union-attr]
    assert pair.kinds(0)[1:] == ["DisconnectRequested"]
    assert pair.kinds(1)[2:] == ["Disconnected"]
    assert active != passive
    assert pair.is_empty()


def test_simultaneous_disconnect_ends_both_sides() -> None:
    pair, active, passive = established()
    pair.agents[0].disconnect(active, pair.now)
    pair.agents[1].disconnect(passive, pair.now)
    pair.run()
    assert sorted(pair.sent()[3:]) == ["0:DREP", "0:DREQ", "1:DREP", "1:DREQ"]
    assert pair.kinds(0)[1:] == ["Disconnected"]
    assert pair.kinds(1)[2:] == ["Disconnected"]
    assert pair.is_empty()


def test_private_data_is_delivered() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    pair.handlers = {
        ConnectRequest: lambda p, i, e: p.agents[i].accept(e.comm_id, reply(private_data=b"rep"), p.now),
        ConnectReply: lambda p, i, e: p.agents[i].send_rtu(e.comm_id, p.now, b"rtu"),
        DisconnectRequested: lambda p, i, e: p.agents[i].disconnect(e.comm_id, p.now, b"drep"),
    }
    active = pair.connect(private_data=b"req")
    pair.run()
    pair.agents[0].disconnect(active, pair.now, b"dreq")
    pair.run()
    assert [message.private_data.rstrip(b"\0") for _, message in pair.log] == [b"req", b"rep", b"rtu", b"dreq", b"drep"]


def test_replies_repeat_the_transaction_id_of_their_request() -> None:
    peer = Scripted()
    peer.agent.listen(SERVICE)
    peer.say(request(local_comm_id=1), tid=0xABCDEF0123456789)
    comm_id = peer.only_event().comm_id
    peer.agent.accept(comm_id, reply(), peer.now)
    peer.say(RTU(1, comm_id), tid=1)
    peer.say(DREQ(1, comm_id, 0x22), tid=0x5555)
    peer.agent.disconnect(comm_id, peer.now)
    rep, drep = (Mad.unpack(mad) for _, mad in peer.agent.mads_to_send())
    assert (rep.transaction_id, drep.transaction_id) == (0xABCDEF0123456789, 0x5555)
    peer.say(DREQ(1, comm_id, 0x22), tid=0x6666)
    assert Mad.unpack(peer.agent.mads_to_send()[0][1]).transaction_id == 0x6666
    active = peer.agent.connect("peer", request(), peer.now)
    req = Mad.unpack(peer.agent.mads_to_send()[0][1]).transaction_id
    peer.say(reply(local_comm_id=7, remote_comm_id=active), tid=99)
    peer.agent.send_rtu(active, peer.now)
    peer.agent.disconnect(active, peer.now)
    rtu, dreq = (Mad.unpack(mad).transaction_id for _, mad in peer.agent.mads_to_send())
    assert rtu == req != dreq


def test_establish_replaces_a_lost_rtu() -> None:
    pair = Pair(fate=lambda message: [] if isinstance(message, RTU) else [0.001])
    pair.agents[1].listen(SERVICE)
    pair.connect()
    pair.run(1.0)
    passive = pair.events[1][0].comm_id
    pair.agents[1].establish(passive, pair.now)
    pair.agents[1].establish(passive, pair.now)
    pair.run()
    assert pair.kinds(1) == ["ConnectRequest", "Established"]
    assert pair.sent() == ["0:REQ", "1:REP", "0:RTU"]


def test_communication_ids_are_random_and_unique() -> None:
    peer = Scripted()
    ids = [peer.agent.connect("peer", request(local_qpn=i), peer.now) for i in range(1000)]
    mads = [Mad.unpack(mad) for _, mad in peer.agent.mads_to_send()]
    psns = [opened(mad.pack()).starting_psn for mad in mads]  # type: ignore[union-attr]
    assert len(set(ids)) == len({mad.transaction_id for mad in mads}) == 1000
    for numbers, bits in ((ids, 32), ([mad.transaction_id for mad in mads], 64), (psns, 24)):
        steps = Counter(b - a for a, b in pairwise(numbers))
        assert steps.most_common(1)[0][1] < 3, "the numbers are not a counter"
        assert max(numbers) > 1 << bits - 1


def test_communication_id_in_use_is_not_reused() -> None:
    class RepeatingNumbers:
        def __init__(self) -> None:
            self.answers = [0, 5, 5, 1, 2, 5, 6, 3, 4]

        def getrandbits(self, k: int, /) -> int:
            return self.answers.pop(0) if k == 32 else 0

    numbers = RepeatingNumbers()
    peer = Scripted(numbers)
    assert peer.agent.connect("peer", request(), 0.0) == 5
    numbers.answers = [0, 5, 5, 6, 1]
    assert peer.agent.connect("peer", request(), 0.0) == 6
    peer.agent.destroy(5, 0.0)
    assert peer.agent.connection(5) is None
    numbers.answers = [5, 7, 1]  # the peer may still remember the connection with 5
    assert peer.agent.connect("peer", request(), 0.0) == 7


def test_connection_knows_its_messages_and_its_peer() -> None:
    pair, active, passive = established()
    ours, theirs = pair.agents[0].connection(active), pair.agents[1].connection(passive)
    assert ours is not None
    assert theirs is not None
    assert ours.reply == pair.log[1][1]
    assert theirs.request == opened(pack_message(pair.log[0][1], 0))
    assert theirs.reply is not None
    assert theirs.reply.local_comm_id == passive
    assert (ours.remote_comm_id, ours.remote_guid, ours.remote_qpn) == (passive, GUIDS[1], 0x22)
    assert (theirs.remote_comm_id, theirs.remote_guid, theirs.remote_qpn) == (active, GUIDS[0], 0x11)


def test_timewait_follows_the_peers_ack_delay_and_is_not_extended() -> None:
    peer = Scripted()
    active = peer.agent.connect("peer", request(), peer.now)
    peer.say(reply(local_comm_id=PEER, remote_comm_id=active, target_ack_delay=20))
    peer.agent.send_rtu(active, peer.now)
    peer.agent.disconnect(active, peer.now)
    peer.say(DREQ(PEER, active, 0x11))
    end_of_timewait = peer.agent.next_deadline()
    assert end_of_timewait == pytest.approx(peer.now + seconds(20))
    peer.heard()
    peer.now += 1
    peer.say(DREQ(PEER, active, 0x11))
    assert [type(message) for message in peer.heard()] == [DREP]
    assert peer.agent.next_deadline() == end_of_timewait


def test_rep_after_a_stale_rejection_is_ignored() -> None:
    peer = Scripted()
    active = peer.agent.connect("peer", request(), peer.now)
    peer.say(REJ(0, active, MessageKind.REQ, RejectReason.STALE_CONN))
    peer.say(reply(local_comm_id=PEER, remote_comm_id=active))
    connection = peer.agent.connection(active)
    assert connection is not None
    assert (connection.state, connection.remote_comm_id) == (CmState.TIMEWAIT, None)
    assert peer.agent.dropped == {DropReason.UNEXPECTED: 1}


# -- rejection ----------------------------------------------------------------------------------------------------


def test_rejection_delivers_private_data() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    pair.handlers[ConnectRequest] = lambda p, i, e: p.agents[i].reject(e.comm_id, p.now, private_data=b"no thanks")
    active = pair.connect()
    pair.run()
    assert pair.events[0] == [
        Rejected(active, RejectReason.CONSUMER_DEFINED, b"", b"no thanks".ljust(REJ.PRIVATE_DATA, b"\0"))
    ]
    assert pair.sent() == ["0:REQ", "1:REJ"]
    assert pair.is_empty()


def test_rejection_delivers_additional_information() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    gid = bytes(range(16))
    pair.handlers[ConnectRequest] = lambda p, i, e: p.agents[i].reject(e.comm_id, p.now, 12, ari=gid)
    active = pair.connect()
    pair.run()
    assert pair.events[0] == [Rejected(active, RejectReason.INVALID_GID, gid, bytes(REJ.PRIVATE_DATA))]


def test_active_side_rejects_a_rep() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    pair.handlers[ConnectReply] = lambda p, i, e: p.agents[i].reject(e.comm_id, p.now)
    pair.connect()
    pair.run()
    assert pair.sent() == ["0:REQ", "1:REP", "0:REJ"]
    assert pair.log[2][1].message_rejected == MessageKind.REP  # type: ignore[union-attr]
    assert pair.kinds(1) == ["ConnectRequest", "Rejected"]
    assert pair.is_empty()


@pytest.mark.parametrize("sends_mra", [False, True])
def test_rej_carries_the_local_id_only_after_an_mra(sends_mra: bool) -> None:
    peer = Scripted(mra_service_timeout=24 if sends_mra else None)
    peer.agent.listen(SERVICE)
    peer.say(request(local_comm_id=PEER))
    comm_id = peer.only_event().comm_id
    peer.agent.reject(comm_id, peer.now)
    (rej,) = peer.heard()
    assert isinstance(rej, REJ)
    assert (rej.local_comm_id, rej.message_rejected) == (comm_id if sends_mra else 0, MessageKind.REQ)


def test_request_without_listener_is_rejected() -> None:
    pair = Pair()
    active = pair.connect()
    pair.run()
    rej = pair.log[1][1]
    assert rej == REJ(0, active, MessageKind.REQ, RejectReason.INVALID_SERVICE_ID, 0, bytes(72), bytes(148))
    assert pair.kinds(0) == ["Rejected"]
    assert pair.agents[1].dropped == {DropReason.NO_LISTENER: 1}
    assert pair.is_empty()


def test_request_goes_to_the_most_specific_listener() -> None:
    peer = Scripted()
    wide = peer.agent.listen(0x01060000, mask=0xFFFFFFFFFFFF0000)
    peer.agent.listen(SERVICE)
    with pytest.raises(RdmaError, match="taken"):
        peer.agent.listen(SERVICE)
    peer.say(request(local_comm_id=1, local_qpn=1))
    assert peer.only_event().listener.service_id == SERVICE
    peer.say(request(local_comm_id=2, local_qpn=2, service_id=0x01060001))
    waiting = peer.only_event()
    assert waiting.listener.service_id == 0x01060000
    peer.agent.unlisten(wide)
    peer.agent.unlisten(wide)
    peer.say(request(local_comm_id=3, local_qpn=3, service_id=0x01060001))
    assert not peer.agent.events()
    peer.agent.accept(waiting.comm_id, reply(), peer.now)
    assert [type(message) for message in peer.heard()] == [REJ, REP]
    assert peer.agent.listen(0x01060000, mask=0xFFFFFFFFFFFF0000)


# -- timeouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("life", "interval"), [(16, 4.608), (18, 6.144)])
def test_unanswered_req_times_out(life: int, interval: float) -> None:
    peer = Scripted()
    start = peer.now
    active = peer.agent.connect("peer", request(), peer.now, packet_life_time=life)
    sent = peer.agent.mads_to_send()
    for copy in range(1, 16):
        peer.wait()
        assert peer.now - start == pytest.approx(copy * interval)
        assert peer.agent.mads_to_send() == sent, "a retransmission has the same bytes"
        assert not peer.agent.events()
    peer.wait()
    assert peer.now - start == pytest.approx(16 * interval)
    assert peer.agent.events() == [Unreachable(active)]
    rej = REJ(active, 0, MessageKind.OTHER, 4, 8, GUIDS[0].to_bytes(8, "big").ljust(72, b"\0"), bytes(148))
    assert peer.heard() == [rej]
    assert len(peer.agent) == 0
    assert peer.agent.next_deadline() is None


@pytest.mark.parametrize("is_datagram", [False, True])
def test_network_reports_that_the_request_was_not_delivered(is_datagram: bool) -> None:
    peer, error = Scripted(), NetworkError(errno.EHOSTUNREACH, b"\x0a\0\0\xfe")
    if is_datagram:
        comm_id = peer.agent.sidr_request("peer", SIDR_REQ(SERVICE), peer.now)
    else:
        comm_id = peer.agent.connect("peer", request(), peer.now)
    connection = peer.agent.connection(comm_id)
    assert connection is not None
    tid, agent = connection.transaction_id, peer.agent
    agent.mads_to_send()
    agent.unreachable(comm_id ^ 1, tid, lambda path: True, error, peer.now)
    agent.unreachable(comm_id, tid ^ 1, lambda path: True, error, peer.now)
    agent.unreachable(comm_id, tid, lambda path: path == "another", error, peer.now)
    assert agent.dropped == {DropReason.UNKNOWN: 1, DropReason.WRONG_REPORT: 1, DropReason.WRONG_PATH: 1}
    assert not agent.events()
    agent.unreachable(comm_id, tid, lambda path: path == "peer", error, peer.now)
    assert agent.events() == [Unreachable(comm_id, error)]
    assert not peer.heard(), "the peer does not know of the request"
    assert (len(agent), agent.next_deadline()) == (0, None)
    agent.unreachable(comm_id, tid, lambda path: True, error, peer.now)
    assert agent.dropped[DropReason.UNKNOWN] == 2


def test_report_about_a_request_of_the_peer_is_ignored() -> None:
    peer = Scripted()
    peer.agent.listen(SERVICE)
    peer.say(request(local_comm_id=PEER, local_ca_guid=PEER_GUID), tid=0x77)
    comm_id = peer.only_event().comm_id
    peer.agent.unreachable(comm_id, 0x77, lambda path: True, NetworkError(errno.ECONNREFUSED, b""), peer.now)
    assert peer.agent.dropped == {DropReason.WRONG_REPORT: 1}
    assert len(peer.agent) == 1


def test_retry_limit_comes_from_the_req() -> None:
    peer = Scripted()
    peer.agent.connect("peer", request(max_cm_retries=2, remote_cm_response_timeout=16), peer.now)
    for _ in range(3):
        peer.wait()
    assert [type(message) for message in peer.heard()] == [REQ, REQ, REQ, REJ]
    assert peer.now == pytest.approx(1000 + 3 * (2 * 0.256 + 0.256))


def test_rep_without_rtu_times_out() -> None:
    peer = Scripted()
    peer.agent.listen(SERVICE)
    peer.say(request(local_comm_id=PEER, local_ca_guid=PEER_GUID, max_cm_retries=3, local_cm_response_timeout=18))
    comm_id = peer.only_event().comm_id
    peer.agent.accept(comm_id, reply(), peer.now)
    for _ in range(4):
        peer.wait()
    assert peer.now == pytest.approx(1000 + 4 * 1.024)
    # Nothing has come from the peer after its REQ: it gets three MADs, and neither a fourth REP nor a REJ.
    assert [type(message) for message in peer.heard()] == [REP, REP, REP]
    assert peer.agent.dropped == {DropReason.UNANSWERED: 2}
    assert peer.agent.events() == [Unreachable(comm_id)]
    peer.wait()
    assert peer.agent.events() == [TimewaitExit(comm_id, 0x22)]


def test_req_timeout_rejection_ends_the_request() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    pair.handlers.clear()
    active = pair.connect()
    pair.run(1.0)
    pair.agents[0].destroy(active, pair.now)
    pair.run()
    assert pair.sent() == ["0:REQ", "0:REJ"]
    assert pair.events[0] == []
    (asked, rejected) = pair.events[1]
    assert isinstance(asked, ConnectRequest)
    assert rejected == Rejected(asked.comm_id, 4, GUIDS[0].to_bytes(8, "big"), bytes(REJ.PRIVATE_DATA))
    assert pair.is_empty()
    with pytest.raises(CmStateError):
        pair.agents[1].accept(asked.comm_id, reply(), pair.now)


def test_unanswered_dreq_times_out() -> None:
    pair, active, _ = established()
    pair.fate = lambda message: []
    started = pair.now
    pair.agents[0].disconnect(active, pair.now)
    pair.run()
    assert pair.sent()[3:] == ["0:DREQ"] * 16
    assert pair.events[0][1:] == [Disconnected(active, timed_out=True), TimewaitExit(active, 0x11)]
    assert pair.times[0][1] - started == pytest.approx(16 * 4.608)


def test_mra_extends_the_timeout_once_per_req() -> None:
    peer = Scripted()
    active = peer.agent.connect("peer", request(), peer.now, packet_life_time=16)
    for _ in range(5):
        peer.say(MRA(PEER, active, MessageKind.REQ, 24))
    assert peer.agent.next_deadline() == pytest.approx(1000 + 65.536 + 0.512)
    peer.now += 60
    peer.say(MRA(PEER, active, MessageKind.REQ, 31))
    assert peer.agent.next_deadline() == pytest.approx(1000 + 65.536 + 0.512)
    peer.wait()
    assert peer.agent.next_deadline() == pytest.approx(peer.now + 4.608)
    peer.say(MRA(PEER, active, MessageKind.REQ, 20))
    assert peer.agent.next_deadline() == pytest.approx(peer.now + 4.096 + 0.512)


def test_mra_is_sent_while_the_application_decides() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    accept = pair.handlers.pop(ConnectRequest)
    pair.connect()
    pair.run(200.0)
    assert Counter(pair.sent()) == {"0:REQ": 4, "1:MRA": 3}
    mra = next(message for _, message in pair.log if isinstance(message, MRA))
    assert (mra.message_mraed, mra.service_timeout) == (MessageKind.REQ, 24)
    accept(pair, 1, pair.events[1][0])
    pair.run()
    assert pair.kinds(1) == ["ConnectRequest", "Established"]


def test_mra_is_sent_for_a_rep() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    ready = pair.handlers.pop(ConnectReply)
    pair.connect()
    pair.run(100.0)
    assert Counter(pair.sent()) == {"0:REQ": 1, "1:REP": 3, "0:MRA": 2}
    ready(pair, 0, pair.events[0][0])
    pair.run()
    assert pair.kinds(1) == ["ConnectRequest", "Established"]


def test_invalid_calls_raise_and_change_nothing() -> None:
    pair, active, passive = established()
    agent = pair.agents[0]
    with pytest.raises(CmStateError, match=r"accept 0x[0-9a-f]{8}: not possible in state ESTABLISHED"):
        agent.accept(active, reply(), pair.now)
    with pytest.raises(CmStateError, match="IDLE"):
        agent.disconnect(active ^ 1, pair.now)
    agent.destroy(active ^ 1, pair.now)
    with pytest.raises(ValueError, match="private_data"):
        agent.disconnect(active, pair.now, bytes(221))
    assert agent.connection(active).state is CmState.ESTABLISHED  # type: ignore[union-attr]
    pair.handlers.clear()
    pair.agents[1].disconnect(passive, pair.now)
    pair.run(pair.now + 1)
    with pytest.raises(ValueError, match="private_data"):
        agent.disconnect(active, pair.now, bytes(225))
    assert agent.connection(active).state is CmState.DREQ_RCVD  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="local_qpn"):
        agent.connect(1, request(local_qpn=1 << 24), pair.now)
    assert len(agent) == 1


@pytest.mark.parametrize("side", [0, 1])
def test_destroy_raises_no_event(side: int) -> None:
    pair, active, passive = established()
    before = len(pair.events[side])
    pair.agents[side].destroy((active, passive)[side], pair.now)
    pair.run()
    assert len(pair.events[side]) == before
    assert pair.kinds(1 - side)[-1] == "DisconnectRequested"
    assert pair.is_empty()


def test_destroy_sends_dreq_without_retransmission() -> None:
    pair, active, _ = established()
    pair.agents[0].disconnect(active, pair.now)
    assert len(pair.agents[0].mads_to_send()) == 1  # not delivered
    pair.agents[0].destroy(active, pair.now)
    pair.run()
    assert pair.kinds(1)[-1] == "DisconnectRequested"
    assert pair.is_empty()


# -- SIDR ----------------------------------------------------------------------------------------------------------


def test_sidr_resolves_a_service() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE)
    pair.handlers[SidrRequest] = lambda p, i, e: p.agents[i].sidr_reply(
        e.comm_id, SIDR_REP(qpn=0x15, q_key=0x01234567, private_data=b"hi"), p.now
    )
    asked = pair.agents[0].sidr_request(1, SIDR_REQ(SERVICE, private_data=b"hello"), pair.now)
    pair.run()
    (event,) = pair.events[0]
    assert isinstance(event, SidrReply)
    assert event.comm_id == event.reply.request_id == asked
    assert (event.reply.qpn, event.reply.q_key, event.reply.service_id) == (0x15, 0x01234567, SERVICE)
    assert event.reply.private_data.rstrip(b"\0") == b"hi"
    assert pair.sent() == ["0:SIDR_REQ", "1:SIDR_REP"]
    assert pair.is_empty()


@pytest.mark.parametrize(("listens", "status"), [(False, SidrStatus.UNSUPPORTED), (True, SidrStatus.REJECT)])
def test_sidr_refusal_reports_its_status(listens: bool, status: SidrStatus) -> None:
    pair = Pair()
    if listens:
        pair.agents[1].listen(SERVICE)
    pair.handlers[SidrRequest] = lambda p, i, e: p.agents[i].destroy(e.comm_id, p.now)
    pair.agents[0].sidr_request(1, SIDR_REQ(SERVICE), pair.now)
    pair.run()
    (event,) = pair.events[0]
    assert isinstance(event, SidrReply)
    assert (event.reply.status, event.reply.qpn, event.reply.q_key) == (status, 0, 0)
    assert pair.is_empty()


def test_unanswered_sidr_req_times_out() -> None:
    peer = Scripted()
    asked = peer.agent.sidr_request("peer", SIDR_REQ(SERVICE), peer.now)
    for _ in range(16):
        assert not peer.agent.events()
        peer.wait()
    assert peer.now == pytest.approx(1000 + 16 * 4.096)
    assert peer.agent.events() == [Unreachable(asked)]
    assert [type(message) for message in peer.heard()] == [SIDR_REQ] * 16
    assert len(peer.agent) == 0


def test_duplicate_sidr_req_is_dropped_before_the_reply() -> None:
    peer = Scripted()
    peer.agent.listen(SERVICE, backlog=2)
    for path in ("peer", "peer", "other", "third"):
        peer.say(SIDR_REQ(SERVICE, 9), path=path)
    assert [event.path for event in peer.agent.events()] == ["peer", "other"]  # type: ignore[union-attr]
    assert peer.agent.dropped == {DropReason.UNEXPECTED: 1, DropReason.BACKLOG: 1}


def test_listeners_of_one_service_id_are_matched_by_address() -> None:
    agent = Agent(GUIDS[0], random.Random(1))
    mine = agent.listen(SERVICE, accepts=lambda request, path: request.local_qpn == 1)  # type: ignore[union-attr]
    other = agent.listen(SERVICE, accepts=lambda request, path: request.local_qpn == 2)  # type: ignore[union-attr]
    with pytest.raises(RdmaError, match="taken"):
        agent.listen(SERVICE)
    for qpn, listener in ((2, other), (1, mine)):
        agent.mad_received(pack_message(request(local_comm_id=qpn, local_qpn=qpn), 7), "peer", 0.0)
        (event,) = agent.events()
        assert isinstance(event, ConnectRequest)
        assert event.listener is listener
    agent.mad_received(pack_message(request(local_comm_id=3, local_qpn=3), 7), "peer", 0.0)
    assert agent.events() == []
    assert agent.dropped[DropReason.NO_MATCH] == 1
    ((_, mad),) = agent.mads_to_send()
    answer = unpack_message(Mad.unpack(mad))
    assert isinstance(answer, REJ)
    assert answer.reason == RejectReason.CONSUMER_DEFINED


def test_delivered_request_leaves_the_backlog() -> None:
    agent = Agent(GUIDS[0], random.Random(1))
    listener = agent.listen(SERVICE, backlog=1)
    for number in (1, 2):
        agent.mad_received(pack_message(request(local_comm_id=number, local_qpn=number), 7), "peer", 0.0)
    (event,) = agent.events()
    assert agent.dropped[DropReason.BACKLOG] == 1
    assert listener.pending == 1
    agent.delivered(event.comm_id)
    agent.delivered(event.comm_id)
    assert listener.pending == 0
    agent.mad_received(pack_message(request(local_comm_id=2, local_qpn=2), 7), "peer", 0.0)
    assert len(agent.events()) == 1
    agent.reject(event.comm_id, 0.0)
    assert listener.pending == 1


def test_communication_id_prefix_identifies_the_process() -> None:
    agent = Agent(1, random.Random(1), id_prefix=0x7E1)
    ids = {agent.connect("peer", request(), 0.0) for _ in range(20)}
    assert len(ids) == 20
    assert {comm_id >> 20 for comm_id in ids} == {0x7E1}


# -- requests for another transport service ---------------------------------------------------------------------

#: Transport service type and extended type: UC, RD, XRC, and types that are not defined.
OTHER_TRANSPORTS = [(1, 0), (2, 0), (3, 1), (3, 0), (3, 7)]


@for_each(("kind", "extended"), OTHER_TRANSPORTS)
def test_req_for_another_transport_service_is_rejected_with_reason_9(kind: int, extended: int) -> None:
    peer = Scripted()
    peer.agent.listen(SERVICE, transport=(0, 0))
    peer.say(request(local_comm_id=1, transport_service_type=kind, extended_transport_type=extended))
    (rej,) = peer.heard()
    assert isinstance(rej, REJ)
    assert (rej.reason, rej.remote_comm_id, rej.message_rejected) == (9, 1, MessageKind.REQ)
    assert not peer.agent.events()
    assert peer.agent.dropped == {DropReason.TRANSPORT: 1}
    assert len(peer.agent) == 0


def test_listener_with_the_transport_of_a_req_gets_it() -> None:
    peer = Scripted()
    listeners = {t: peer.agent.listen(SERVICE, transport=t, accepts=lambda *_: True) for t in ((0, 0), (1, 0), (3, 1))}
    for number, (transport, listener) in enumerate(listeners.items(), 1):
        req = request(
            local_comm_id=number,
            local_qpn=number,
            transport_service_type=transport[0],
            extended_transport_type=transport[1],
        )
        peer.say(req)
        assert peer.only_event().listener is listener
    peer.say(request(local_comm_id=9, local_qpn=9, extended_transport_type=1))
    assert peer.only_event().listener is listeners[0, 0], "without an extended type, the field has no meaning"
