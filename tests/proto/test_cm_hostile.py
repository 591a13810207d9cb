"""The CM agent on unreliable networks, and with peers that send forged or malformed messages."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.errors import CmStateError, RdmaError
from rdmacm.proto.cm.codes import MessageKind, RejectReason, TransportServiceType
from rdmacm.proto.cm.connection import DropReason
from rdmacm.proto.cm.messages import (
    APR,
    DREP,
    DREQ,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    Message,
    pack_message,
)
from rdmacm.proto.cm.states import CmState
from rdmacm.proto.mad import Mad
from support.cm import (
    PEER,
    PEER_GUID,
    SERVICE,
    Pair,
    Scripted,
    communication_ids,
    established,
    is_empty,
    lap,
    opened,
    reply,
    request,
)
from support.cm_events import (
    ConnectReply,
    ConnectRequest,
    Disconnected,
    DisconnectRequested,
    Established,
    Rejected,
    SidrRequest,
    Unreachable,
)
from support.rows import for_each

# -- loss, duplication and delay -----------------------------------------------------------------------------------


def connect_and_disconnect(pair: Pair) -> None:
    """Connect, run for 200 seconds, disconnect."""
    pair.agents[1].listen(SERVICE)
    active = pair.connect()
    pair.run(200.0)
    assert pair.kinds(0) == ["ConnectReply"]
    assert pair.kinds(1) == ["ConnectRequest", "Established"]
    pair.agents[0].disconnect(active, pair.now)
    pair.run()
    assert pair.kinds(0)[1:] == ["Disconnected"]
    assert pair.kinds(1)[2:] == ["DisconnectRequested"]
    assert pair.is_empty()


@for_each(
    ("kind", "times"),
    [(REQ, 1), (REQ, 3), (REP, 1), (REP, 3), (RTU, 1), (RTU, 2), (DREQ, 1), (DREQ, 3), (DREP, 1), (DREP, 3)],
)
def test_connection_survives_lost_messages(kind: type[Message], times: int) -> None:
    lost: list[Message] = []

    def fate(message: Message) -> list[float]:
        if isinstance(message, kind) and len(lost) < times:
            lost.append(message)
            return []
        return [0.001]

    pair = Pair(fate=fate)
    connect_and_disconnect(pair)
    assert len(lost) == times


def test_first_data_establishes_when_three_rtus_are_lost() -> None:
    """A peer that has answered nothing gets three REPs. Then only its first message shows that it is there."""
    pair = Pair(fate=lambda message: [] if isinstance(message, RTU) else [0.001])
    pair.agents[1].listen(SERVICE)
    active = pair.connect(max_cm_retries=15)
    pair.run(40.0)
    assert pair.sent().count("1:REP") == 3
    (asked,) = pair.events[1]
    assert isinstance(asked, ConnectRequest)
    pair.agents[1].establish(asked.comm_id, pair.now)
    pair.run()
    assert pair.kinds(1) == ["ConnectRequest", "Established"]
    pair.agents[1].disconnect(asked.comm_id, pair.now)
    pair.run()
    assert pair.kinds(0) == ["ConnectReply", "DisconnectRequested"]
    assert pair.agents[0].connection(active) is None
    assert pair.is_empty()


@for_each("kind", [REQ, REP, RTU, DREQ, DREP])
@for_each("later", [0.0, 0.0015, 0.1, 1.0])
def test_connection_survives_duplicate_messages(kind: type[Message], later: float) -> None:
    connect_and_disconnect(Pair(fate=lambda message: [0.001, 0.001 + later] if isinstance(message, kind) else [0.001]))


@for_each("slow", [REQ, REP, RTU, DREQ, DREP])
def test_connection_survives_delayed_messages(slow: type[Message]) -> None:
    connect_and_disconnect(Pair(fate=lambda message: [5.0] if isinstance(message, slow) else [0.001]))


def test_late_duplicate_req_is_not_a_new_request() -> None:
    pair, active, passive = established()
    pair.agents[0].disconnect(active, pair.now)
    pair.run(pair.now + 0.1)
    connection = pair.agents[1].connection(passive)
    assert connection is not None
    assert connection.state is CmState.TIMEWAIT
    pair.agents[1].mad_received(pack_message(pair.log[0][1], connection.transaction_id), 0, pair.now)
    ((_, mad),) = pair.agents[1].mads_to_send()
    rej = opened(mad)
    assert isinstance(rej, REJ)
    assert (rej.reason, rej.local_comm_id, rej.remote_comm_id) == (RejectReason.STALE_CONN, 0, active)
    assert not pair.agents[1].events()


def test_agent_connects_to_itself() -> None:
    pair = Pair()
    agent = pair.agents[0]
    agent.listen(SERVICE)
    active = agent.connect("me", request(), 0.0)
    passive = 0

    def exchange() -> list[Any]:
        for path, mad in agent.mads_to_send():
            agent.mad_received(mad, path, 0.0)
        return agent.events()

    (asked,) = exchange()
    passive = asked.comm_id
    agent.accept(passive, reply(), 0.0)
    (answered,) = exchange()
    assert answered.comm_id == active
    agent.send_rtu(active, 0.0)
    assert exchange() == [Established(passive)]
    agent.disconnect(passive, 0.0)
    assert exchange() == [DisconnectRequested(active)]
    agent.disconnect(active, 0.0)
    assert exchange() == [Disconnected(passive)]
    agent.timer(10.0)
    assert pair.is_empty()


# -- random networks -----------------------------------------------------------------------------------------------


def random_network(seed: int) -> Pair:
    dice = random.Random(seed)
    loss, double, slow = dice.random() * 0.5, dice.random() * 0.5, dice.random() * 0.5

    def fate(message: Message) -> list[float]:
        copies = 0 if dice.random() < loss else 1 + (dice.random() < double)
        return [dice.random() * (9.0 if dice.random() < slow else 0.01) for _ in range(copies)]

    return Pair(seed, fate)


@for_each("block", range(10))
def test_both_sides_agree_on_random_networks(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        dice = random.Random(seed)
        pair = random_network(seed)
        listens = dice.random() < 0.9
        rejects = dice.random() < 0.2
        if listens:
            pair.agents[1].listen(SERVICE)
        if rejects:
            pair.handlers[ConnectRequest] = lambda p, i, e: p.agents[i].reject(e.comm_id, p.now)
        active = pair.connect()
        pair.run(30.0)
        # The first message of the active side shows that it is there, if three RTUs were lost.
        for comm_id in communication_ids(pair.agents[1]):
            end = pair.agents[0].connection(active)
            if end is not None and end.state is CmState.ESTABLISHED:
                with suppress(CmStateError):
                    pair.agents[1].establish(comm_id, pair.now)
        pair.run(400.0)
        outcome = pair.kinds(0)
        connections = [pair.agents[1].connection(comm_id) for comm_id in communication_ids(pair.agents[1])]
        ends = [end for end in connections if end is not None and end.state is CmState.ESTABLISHED]
        if outcome == ["ConnectReply"]:
            assert listens
            assert not rejects
            assert pair.agents[0].connection(active).state is CmState.ESTABLISHED  # type: ignore[union-attr]
            (passive,) = ends
            assert (passive.remote_comm_id, passive.path) == (active, 0)
            assert pair.agents[0].next_deadline() is None
            assert pair.agents[1].next_deadline() is None
            closers = dice.choice(([0], [1], [0, 1]))
            for side in closers:
                pair.agents[side].disconnect((active, passive.comm_id)[side], pair.now)
            pair.run()
            for side in (0, 1):
                ended = pair.kinds(side)[1 + side :]
                assert ended in (["Disconnected"], ["DisconnectRequested"]), (seed, ended)
                assert side in closers or ended == ["DisconnectRequested"], seed
        else:
            assert outcome == ["Rejected"], (seed, outcome)
            assert rejects or not listens, seed
            assert not ends, seed
            rejected = pair.events[0][0]
            assert isinstance(rejected, Rejected)
            assert rejected.reason == (28 if listens else 8)
            pair.run()
        # The handlers have answered every event, so that no connection is left.
        assert pair.is_empty(), seed


def test_permanent_loss_times_out() -> None:
    for kind, outcome in ((REQ, ["Unreachable"]), (REP, ["Unreachable"])):
        pair = Pair(fate=lambda message, kind=kind: [] if isinstance(message, kind) else [0.001])  # type: ignore[misc]
        pair.agents[1].listen(SERVICE)
        pair.connect()
        pair.run()
        assert pair.kinds(0) in (outcome, ["Rejected"])
        assert pair.is_empty()


# -- floods -----------------------------------------------------------------------------------------------------


def test_requests_beyond_the_backlog_are_dropped() -> None:
    peer = Scripted()
    listener = peer.agent.listen(SERVICE, backlog=10)
    for i in range(1000):
        peer.say(request(local_comm_id=i, local_qpn=i), path=f"peer {i}")
    asked = peer.agent.events()
    assert len(asked) == len(peer.agent) == listener.pending == 10
    assert not peer.heard(), "a request beyond the backlog gets no answer"
    assert peer.agent.dropped == {DropReason.BACKLOG: 990}
    for event in asked[:5]:
        peer.agent.accept(event.comm_id, reply(), peer.now)
    peer.agent.reject(asked[5].comm_id, peer.now)
    peer.agent.destroy(asked[6].comm_id, peer.now)
    assert listener.pending == 3
    for i in range(1000, 1020):
        peer.say(request(local_comm_id=i, local_qpn=i), path=f"peer {i}")
    assert len(peer.agent.events()) == 7


def test_req_beyond_the_backlog_is_accepted_on_retry() -> None:
    pair = Pair()
    pair.agents[1].listen(SERVICE, backlog=1)
    accept = pair.handlers.pop(ConnectRequest)
    pair.connect(local_qpn=1)
    pair.connect(local_qpn=2)
    pair.run(1.0)
    assert len(pair.events[1]) == 1
    pair.handlers[ConnectRequest] = accept
    accept(pair, 1, pair.events[1][0])
    pair.run()
    assert sorted(pair.kinds(1)) == ["ConnectRequest", "ConnectRequest", "Established", "Established"]


def test_full_backlog_makes_room_for_another_source() -> None:
    """One source fills the backlog; requests of others displace its oldest ones, silently."""
    peer = Scripted()
    listener = peer.agent.listen(SERVICE, backlog=10)
    for i in range(1000):
        peer.say(request(local_comm_id=i, local_qpn=i), path="flood")
    for i in range(4):
        peer.say(request(local_comm_id=i, local_qpn=i), path=f"peer {i}")
    assert len(peer.agent) == listener.pending == 10
    assert peer.agent.dropped == {DropReason.BACKLOG: 994}
    assert not peer.heard()
    taken = [peer.agent.next_request(listener) for _ in range(11)]
    asked = [(one.path, one.remote_comm_id) for one in taken if one is not None]
    assert asked == [("flood", 4), *((f"peer {i}", i) for i in range(4)), *(("flood", i) for i in range(5, 10))]
    assert taken[-1] is None
    assert listener.pending == 0
    assert len(peer.agent) == 10
    peer.say(request(local_comm_id=0, local_qpn=0), path="flood")  # displaced before, so its copy is a new request
    assert listener.pending == 1


def test_sources_are_what_the_user_says() -> None:
    peer = Scripted(source_of=lambda path: path[0])
    listener = peer.agent.listen(SERVICE, backlog=3)
    for number, path in enumerate([("a", 1), ("a", 2), ("a", 3), ("b", 1)]):
        peer.say(request(local_comm_id=number, local_qpn=number), path=path)
    taken = [peer.agent.next_request(listener) for _ in range(3)]
    assert [event.path for event in taken if event is not None] == [("a", 2), ("b", 1), ("a", 3)]


def test_address_that_has_not_answered_gets_three_times_its_bytes() -> None:
    """Whatever the user does and however long it takes: three MADs for each copy of the REQ."""
    peer = Scripted()
    peer.agent.listen(SERVICE)
    req = request(local_comm_id=PEER, local_ca_guid=PEER_GUID, max_cm_retries=15, local_cm_response_timeout=18)
    peer.say(req)
    comm_id = peer.only_event().comm_id
    for _ in range(2):
        peer.say(req)
    assert [type(message) for message in peer.heard()] == [MRA, MRA]
    peer.agent.accept(comm_id, reply(), peer.now)
    for _ in range(16):
        peer.wait()
    assert [type(message) for message in peer.heard()] == [REP] * 7
    assert isinstance(peer.only_event(), Unreachable)
    # A peer that has answered the REP gets as many copies as it has asked for.
    peer = Scripted()
    peer.agent.listen(SERVICE)
    peer.say(req)
    comm_id = peer.only_event().comm_id
    peer.agent.accept(comm_id, reply(), peer.now)
    peer.say(MRA(PEER, comm_id, MessageKind.REP, 10))
    for _ in range(16):
        peer.wait()
    assert [type(message) for message in peer.heard()] == [REP] * 16 + [REJ]


def test_peers_are_asked_once_for_an_answer_to_the_rep() -> None:
    peer = Scripted()
    agent = peer.agent
    listener = agent.listen(SERVICE)
    for number in range(1, 6):
        peer.say(request(local_comm_id=number, local_qpn=number, local_ca_guid=PEER_GUID))
    first, second, third, fourth, _ = (event.comm_id for _ in range(5) if (event := agent.next_request(listener)))
    agent.ask_peers()
    assert peer.heard() == [], "no REP was sent"
    for comm_id in (first, second, third, fourth):
        agent.accept(comm_id, reply(), peer.now)
    peer.heard()
    peer.say(RTU(1, first))
    agent.destroy(fourth, peer.now)
    peer.heard()
    agent.ask_peers()
    reps = [message for message in peer.heard() if isinstance(message, REP)]
    assert [rep.local_comm_id for rep in reps] == [second, third]
    agent.ask_peers()
    assert peer.heard() == []
    assert agent.recorder.answers == 1
    for _ in range(2):
        peer.say(MRA(2, second, MessageKind.REP, 10))
        peer.say(RTU(2, second))
    assert agent.recorder.answers == 2, "of two peers"
    # A forger of the REQ can send this too: it has no id that the REP has told.
    peer.say(REJ(3, 0, MessageKind.OTHER, RejectReason.TIMEOUT, 8, PEER_GUID.to_bytes(8, "big")))
    assert agent.connection(third) is None
    assert agent.recorder.answers == 2


def test_connections_are_limited() -> None:
    peer = Scripted(max_connections=5)
    peer.agent.listen(SERVICE)
    for i in range(9):
        peer.say(request(local_comm_id=i, local_qpn=i))
    peer.say(SIDR_REQ(SERVICE, 7))
    assert len(peer.agent) == 5
    assert peer.agent.dropped == {DropReason.FULL: 5}
    with pytest.raises(RdmaError, match="limit of 5 connections"):
        peer.agent.connect("peer", request(), peer.now)


def test_stopped_timers_are_removed() -> None:
    peer = Scripted()
    for i in range(2000):
        active = peer.agent.connect("peer", request(local_qpn=i), peer.now)
        peer.say(REJ(0, active, MessageKind.REQ, 28))
    assert len(peer.agent) == 0
    assert len(peer.agent.timers) < 100
    assert peer.agent.next_deadline() is None


# -- forged messages --------------------------------------------------------------------------------------------


def test_messages_from_another_source_are_dropped() -> None:
    peer = Scripted()
    agent = peer.agent
    agent.listen(SERVICE)
    active = agent.connect("peer", request(), peer.now)
    rep = reply(local_comm_id=PEER, remote_comm_id=active, local_ca_guid=PEER_GUID)
    forged: list[Message] = [rep, REJ(0, active, MessageKind.REQ, 28), MRA(PEER, active, MessageKind.REQ, 24)]
    for message in forged:
        peer.say(message, path="other")
    assert agent.dropped == {DropReason.WRONG_PATH: 3}
    peer.say(rep)
    agent.send_rtu(active, peer.now)
    peer.heard()
    agent.dropped.clear()
    ari = PEER_GUID.to_bytes(8, "big")
    forged = [
        rep,
        REJ(PEER, active, MessageKind.OTHER, 28),
        REJ(PEER, 0, MessageKind.OTHER, 4, 8, ari),
        DREQ(PEER, active, 0x11),
    ]
    for message in forged:
        peer.say(message, path="other")
    # A REQ from another source does not end the connection, although it names the peer's GUID and queue pair.
    peer.say(request(local_comm_id=1, local_ca_guid=PEER_GUID, local_qpn=0x22), path="other")
    assert agent.dropped == {DropReason.WRONG_PATH: 3, DropReason.UNKNOWN: 1}
    assert agent.connection(active).state is CmState.ESTABLISHED  # type: ignore[union-attr]
    assert peer.heard() == []


def test_mismatched_messages_are_dropped_with_a_reason() -> None:
    peer = Scripted()
    agent = peer.agent
    agent.listen(SERVICE)
    active = agent.connect("peer", request(), peer.now)
    rep = reply(local_comm_id=PEER, remote_comm_id=active, local_ca_guid=PEER_GUID)
    peer.say(rep)
    agent.send_rtu(active, peer.now)
    peer.heard()
    wrong: list[tuple[Message, DropReason]] = [
        (reply(local_comm_id=PEER + 1, remote_comm_id=active, local_ca_guid=PEER_GUID), DropReason.UNKNOWN),
        (reply(local_comm_id=PEER, remote_comm_id=active, local_ca_guid=1), DropReason.UNKNOWN),
        (RTU(PEER, active), DropReason.UNEXPECTED),
        (RTU(PEER + 1, active), DropReason.UNKNOWN),
        (DREQ(PEER, active, 0x12), DropReason.WRONG_QPN),
        (DREP(PEER, active), DropReason.UNEXPECTED),
        (MRA(PEER, active, MessageKind.REQ, 3), DropReason.UNKNOWN),
        (MRA(PEER, active, MessageKind.OTHER, 3), DropReason.UNEXPECTED),
        (MRA(PEER, active, 3, 3), DropReason.UNSUPPORTED),
        (REJ(PEER, active + 1, 2, 28), DropReason.UNKNOWN),
        (REJ(PEER, active + 1, 2, 4, 8, PEER_GUID.to_bytes(8, "big")), DropReason.UNKNOWN),
        (REJ(PEER, 0, 2, 4, 7, PEER_GUID.to_bytes(8, "big")), DropReason.UNKNOWN),
        (request(local_comm_id=PEER, local_ca_guid=PEER_GUID, local_qpn=0x99), DropReason.UNEXPECTED),
        (SIDR_REP(active), DropReason.UNEXPECTED),
        (SIDR_REP(active ^ 1), DropReason.UNKNOWN),
        (APR(PEER, active, 2), DropReason.UNEXPECTED),
        (APR(PEER + 1, active, 2), DropReason.UNKNOWN),
        (lap(PEER, active, 0x11), DropReason.UNEXPECTED),
    ]
    for message, drop in wrong:
        agent.dropped.clear()
        peer.say(message)
        assert agent.dropped == {drop: 1}, message
    assert agent.events()[1:] == []
    assert peer.heard() == []
    assert agent.connection(active).state is CmState.ESTABLISHED  # type: ignore[union-attr]


def test_second_rep_with_the_same_communication_id_is_dropped() -> None:
    peer = Scripted()
    first, second = (peer.agent.connect("peer", request(local_qpn=i), peer.now) for i in (1, 2))
    for active, qpn in ((first, 0x21), (second, 0x22)):
        peer.say(reply(local_comm_id=PEER, remote_comm_id=active, local_qpn=qpn, local_ca_guid=PEER_GUID))
    assert [type(event) for event in peer.agent.events()] == [ConnectReply]
    assert peer.agent.dropped == {DropReason.UNEXPECTED: 1}


def test_dreq_for_an_unknown_connection_is_answered() -> None:
    peer = Scripted()
    peer.say(DREQ(1, 2, 3), tid=0x1234)
    ((path, mad),) = peer.agent.mads_to_send()
    assert path == "peer"
    assert Mad.unpack(mad).transaction_id == 0x1234
    assert opened(mad) == DREP(2, 1, bytes(DREP.PRIVATE_DATA))


def test_rep_for_an_unknown_request_is_rejected() -> None:
    """Its sender would repeat it, as the REJ of a request that was given up may be lost."""
    peer = Scripted()
    peer.say(reply(local_comm_id=1, remote_comm_id=2), tid=0x1234)
    ((path, mad),) = peer.agent.mads_to_send()
    assert path == "peer"
    assert Mad.unpack(mad).transaction_id == 0x1234
    rejection = opened(mad)
    assert isinstance(rejection, REJ)
    assert (rejection.local_comm_id, rejection.remote_comm_id) == (2, 1)
    assert (rejection.message_rejected, rejection.reason) == (MessageKind.REP, RejectReason.INVALID_COMM_ID)


def test_xrc_target_is_identified_by_its_eecn() -> None:
    peer = Scripted()
    xrc = request(transport_service_type=TransportServiceType.EXTENDED, extended_transport_type=1)
    active = peer.agent.connect("peer", xrc, peer.now)
    peer.say(reply(local_comm_id=PEER, remote_comm_id=active, local_qpn=0, local_eecn=0x77))
    peer.agent.send_rtu(active, peer.now)
    peer.agent.disconnect(active, peer.now)
    dreq = peer.heard()[-1]
    assert isinstance(dreq, DREQ)
    assert dreq.remote_qpn_eecn == 0x77


# -- malformed MADs ------------------------------------------------------------------------------------------------


def busy_agent(seed: int) -> tuple[Scripted, list[bytes]]:
    """An agent with connections in several states, and valid MADs for them."""
    peer = Scripted(random.Random(seed), max_connections=40)
    agent = peer.agent
    agent.listen(SERVICE, backlog=8)
    mads: list[bytes] = []
    for i in range(6):
        active = agent.connect("peer", request(local_qpn=i), peer.now)
        rep = reply(local_comm_id=PEER + i, remote_comm_id=active, local_qpn=0x40 + i, local_ca_guid=PEER_GUID)
        if i % 2:
            peer.say(rep)
        messages: tuple[Message, ...] = (
            rep,
            RTU(PEER + i, active),
            DREQ(PEER + i, active, i),
            DREP(PEER + i, active),
            REJ(PEER + i, active, MessageKind.OTHER, 28),
            REJ(0, active, MessageKind.REQ, 10),
            REJ(PEER + i, 0, MessageKind.OTHER, 4, 8, PEER_GUID.to_bytes(8, "big")),
            MRA(PEER + i, active, i % 3, 20),
            request(local_comm_id=i, local_ca_guid=PEER_GUID, local_qpn=0x40 + i),
            SIDR_REQ(SERVICE, i),
            SIDR_REP(active),
        )
        mads += [pack_message(message, i) for message in messages]
    return peer, mads


@for_each("seed", range(20))
def test_flipped_bits_never_raise(seed: int) -> None:
    dice = random.Random(seed)
    peer, mads = busy_agent(seed)
    agent = peer.agent
    calls: dict[type, Any] = {
        ConnectRequest: lambda e: agent.accept(e.comm_id, reply(), peer.now),
        ConnectReply: lambda e: agent.send_rtu(e.comm_id, peer.now),
        SidrRequest: lambda e: agent.sidr_reply(e.comm_id, SIDR_REP(), peer.now),
        DisconnectRequested: lambda e: agent.disconnect(e.comm_id, peer.now),
    }
    for _ in range(1500):
        data = bytearray(dice.choice(mads))
        for _ in range(dice.choice((0, 0, 1, 2, 8))):
            data[dice.randrange(len(data) if dice.random() < 0.3 else 40)] ^= 1 << dice.randrange(8)
        agent.mad_received(data, dice.choice(("peer", "peer", "other")), peer.now)
        peer.now += dice.random() * dice.choice((0, 0, 1, 10))
        agent.timer(peer.now)
        for event in agent.events():
            if type(event) in calls and dice.random() < 0.7:
                with suppress(CmStateError):  # a timer may have ended the connection
                    calls[type(event)](event)
        agent.mads_to_send()
        assert len(agent) <= 40
    for comm_id in communication_ids(agent):
        agent.destroy(comm_id, peer.now)
    agent.timer(peer.now + 100)
    assert is_empty(agent)


@given(st.binary(max_size=300) | st.binary(min_size=252, max_size=252).map(lambda tail: b"\x01\x07\x02\x03" + tail))
def test_random_bytes_never_raise(data: bytes) -> None:
    peer, _ = busy_agent(1)
    before = len(peer.agent)
    peer.agent.mad_received(data, "peer", peer.now)
    assert len(peer.agent) <= before + 1
    peer.agent.events()
    peer.agent.mads_to_send()


def test_malformed_mads_are_counted() -> None:
    peer = Scripted()
    for data in (b"", bytes(256), b"\x01" * 256, bytes(257), memoryview(bytes(3))):
        peer.agent.mad_received(data, "peer", 0.0)
    assert peer.agent.dropped == {DropReason.MALFORMED: 5}
