"""Messages that say that the peer of an established connection has restarted: real ones, and forged ones."""

from __future__ import annotations

import random

import pytest

from rdmacm.proto.cm.codes import MessageKind, RejectReason
from rdmacm.proto.cm.connection import DropReason
from rdmacm.proto.cm.messages import DREP, DREQ, REJ, RTU, pack_message
from rdmacm.proto.cm.states import CmState
from support.cm import GUIDS, PEER, PEER_GUID, SERVICE, Pair, Scripted, established, reply, request
from support.cm_events import ConnectRequest, Established, PeerQuestion, Rejected
from support.rows import for_each

PEER_QPN = 0x33


class Passive:
    """An established connection that the peer has requested, its queue pair, and forged REQs."""

    def __init__(self) -> None:
        self.peer = Scripted(mra_service_timeout=None)
        self.agent = self.peer.agent
        self.agent.listen(SERVICE)
        self.peer.say(request(local_comm_id=PEER, local_ca_guid=PEER_GUID, local_qpn=PEER_QPN))
        self.comm_id = self.peer.only_event().comm_id
        self.agent.accept(self.comm_id, reply(), self.peer.now)
        self.peer.say(RTU(PEER, self.comm_id))
        assert self.peer.only_event() == Established(self.comm_id)
        self.peer.heard()
        #: What the queue pair has received from the peer.
        self.received = 0

    @property
    def state(self) -> CmState:
        connection = self.agent.connection(self.comm_id)
        assert connection is not None
        return connection.state

    def forge(self, count: int = 1) -> None:
        """Send REQs with the peer's address, GUID and queue pair number, each with another communication id."""
        for number in range(count):
            self.peer.say(request(local_comm_id=PEER + 1 + number, local_ca_guid=PEER_GUID, local_qpn=PEER_QPN))

    def ask(self, answers: bool) -> int:
        """Answer the agent's questions as the owner of the queue pair; return how many there were."""
        events = self.agent.events()
        for event in events:
            assert event == PeerQuestion(self.comm_id)
            self.agent.peer_activity(self.comm_id, self.received, self.peer.now)
            self.received += answers
        return len(events)


@for_each("lost", [0, 1, 7])
def test_forged_reqs_do_not_end_a_connection_whose_peer_answers_once(lost: int) -> None:
    case = Passive()
    case.forge(100)
    for number in range(lost + 1):
        assert case.ask(answers=number == lost) == 1
        assert case.state is CmState.ESTABLISHED
        assert not case.peer.heard(), "nothing is sent before the peer was asked"
        case.peer.wait()
    assert case.ask(answers=False) == 1
    (rej,) = case.peer.heard()
    assert isinstance(rej, REJ)
    assert (rej.reason, rej.remote_comm_id) == (RejectReason.STALE_CONN, PEER + 1)
    assert case.state is CmState.ESTABLISHED
    assert case.agent.next_deadline() is None
    assert case.agent.dropped[DropReason.STALE] == 100
    case.forge()
    assert case.ask(answers=False) == 1, "the peer is asked again"


def test_connection_whose_peer_is_gone_ends_within_four_seconds() -> None:
    case = Passive()
    case.forge()
    start = case.peer.now
    while case.state is CmState.ESTABLISHED:
        case.forge()
        case.ask(answers=False)
        if case.state is CmState.ESTABLISHED:
            case.peer.wait()
    assert case.peer.now - start == 4.0
    (dreq,) = case.peer.heard()
    assert isinstance(dreq, DREQ)
    case.forge()
    assert type(case.peer.only_event()).__name__ == "ConnectRequest"


def test_connection_without_a_queue_pair_to_ask_with_ends_at_once() -> None:
    case = Passive()
    case.forge()
    case.agent.peer_activity(case.comm_id, None, case.peer.now)
    assert case.state is CmState.DREQ_SENT


def test_connection_ends_if_nobody_asks_its_peer() -> None:
    case = Passive()
    case.forge()
    for _ in range(9):
        assert case.state is CmState.ESTABLISHED
        case.peer.wait()
    assert case.state is CmState.DREQ_SENT


def test_question_ends_with_the_connection() -> None:
    case = Passive()
    case.forge()
    case.ask(answers=False)
    case.agent.disconnect(case.comm_id, case.peer.now)
    case.agent.peer_activity(case.comm_id, "late", case.peer.now)
    assert case.state is CmState.DREQ_SENT
    assert [type(message) for message in case.peer.heard()] == [DREQ]


def test_answers_without_a_question_have_no_effect() -> None:
    case = Passive()
    case.agent.peer_activity(case.comm_id, None, case.peer.now)
    case.agent.peer_activity(12345, None, case.peer.now)
    assert case.state is CmState.ESTABLISHED


def test_restarted_peer_gets_a_connection_with_its_second_req() -> None:
    pair, active, passive = established()
    # The active host restarts with the same device and queue pair number, but without its connections.
    pair.agents[0] = type(pair.agents[0])(GUIDS[0], random.Random(99))
    pair.handlers[PeerQuestion] = lambda pair, i, event: pair.agents[i].peer_activity(event.comm_id, 0, pair.now)
    start = pair.now
    again = pair.connect()
    pair.run()
    assert pair.kinds(0) == ["ConnectReply", "ConnectReply"]
    assert "0:DREP" in pair.sent(), "the restarted host answers a DREQ for an unknown connection"
    assert pair.kinds(1)[2:] == ["PeerQuestion"] * 9 + ["Disconnected", "ConnectRequest", "Established"]
    connected = pair.times[1][pair.kinds(1).index("Established", 2)]
    assert connected - start == pytest.approx(4.611, abs=0.005)
    assert active not in (again, passive)


def test_communication_id_may_come_again_while_its_last_connection_is_in_timewait() -> None:
    case = Passive()
    case.agent.disconnect(case.comm_id, case.peer.now)
    case.peer.say(DREP(PEER, case.comm_id))
    assert case.state is CmState.TIMEWAIT
    case.agent.events()
    case.peer.heard()
    req = request(local_comm_id=PEER, local_ca_guid=PEER_GUID, local_qpn=PEER_QPN)
    case.peer.say(req)
    (rej,) = case.peer.heard()
    assert isinstance(rej, REJ)
    assert rej.reason == RejectReason.STALE_CONN, "a late copy"
    case.peer.say(req, tid=0x78)
    new = case.peer.only_event()
    assert isinstance(new, ConnectRequest)
    assert case.state is CmState.TIMEWAIT
    case.peer.wait()
    assert case.agent.connection(case.comm_id) is None
    case.agent.events()
    case.peer.say(req, tid=0x78)
    assert case.agent.events() == [], "a copy"
    assert case.agent.connection(new.comm_id) is not None


def test_peer_that_answers_no_dreq_gets_its_connection_as_soon() -> None:
    pair = Pair(fate=lambda message: [] if isinstance(message, DREQ) else [0.001])
    established(pair)
    pair.agents[0] = type(pair.agents[0])(GUIDS[0], random.Random(99))
    pair.handlers[PeerQuestion] = lambda pair, i, event: pair.agents[i].peer_activity(event.comm_id, 0, pair.now)
    start = pair.now
    pair.connect()
    pair.run(start + 5)
    assert pair.kinds(0)[-1] == "ConnectReply"
    assert pair.kinds(1)[-1] == "Established"


def test_forged_rej_of_a_peer_that_gives_up_does_not_end_a_connection() -> None:
    """Such a REJ names a connection by the peer's communication id and GUID only, which a stranger may guess."""
    case = Passive()
    rej = REJ(PEER, 0, MessageKind.OTHER, RejectReason.TIMEOUT, 8, PEER_GUID.to_bytes(8, "big"))
    case.agent.mad_received(pack_message(rej, 1), "peer", case.peer.now)
    assert case.state is CmState.ESTABLISHED
    assert case.agent.dropped[DropReason.UNKNOWN] == 1
    rej.remote_comm_id = case.comm_id
    case.agent.mad_received(pack_message(rej, 1), "peer", case.peer.now)
    assert type(case.peer.only_event()) is Rejected
