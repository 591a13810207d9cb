"""Loading an alternate path: LAP, MRA and APR between two agents, on a lossy network, and from a hostile peer."""

from __future__ import annotations

import errno

import pytest

from rdmacm.errors import CmStateError
from rdmacm.proto.cm.codes import ApStatus, MessageKind, RejectReason
from rdmacm.proto.cm.connection import DropReason
from rdmacm.proto.cm.messages import APR, DREQ, LAP, MRA, REJ, RTU, Message, Path
from rdmacm.proto.cm.states import CONNECTED, CmState
from support.cm import PATH, PEER, PEER_GUID, SERVICE, Pair, Scripted, established, lap, reply, request
from support.cm_events import DisconnectRequested, PathAnswered, PathOffered, PeerQuestion
from support.rows import for_each


def connected(**options: object) -> tuple[Pair, int, int]:
    pair, active, passive = established(Pair(**options))  # type: ignore[arg-type]
    pair.log.clear()
    return pair, active, passive


def answer_with(status: ApStatus, info: bytes = b"") -> object:
    def answer(pair: Pair, side: int, event: PathOffered) -> None:
        pair.agents[side].answer_path(event.comm_id, status, pair.now, info)

    return answer


def state_of(pair: Pair, side: int, comm_id: int) -> CmState:
    connection = pair.agents[side].connection(comm_id)
    return connection.state if connection is not None else CmState.IDLE


@for_each("status", list(ApStatus), ids=lambda status: status.name)
def test_each_status_reaches_the_side_that_offers(status: ApStatus) -> None:
    pair, active, passive = connected()
    pair.handlers[PathOffered] = answer_with(status, b"why")  # type: ignore[assignment]
    pair.agents[0].load_path(active, PATH, pair.now)
    pair.run()
    (offered,) = (event for event in pair.events[1] if isinstance(event, PathOffered))
    assert offered.comm_id == passive
    assert offered.lap.alternate == PATH
    assert offered.lap.remote_qpn_eecn == 0x22
    (answered,) = (event for event in pair.events[0] if isinstance(event, PathAnswered))
    assert answered.apr is not None
    assert (answered.apr.ap_status, answered.apr.additional_info_length) == (status, 3)
    assert answered.apr.additional_info[:3] == b"why"
    assert pair.sent() == ["0:LAP", "1:APR"]
    assert state_of(pair, 0, active) is state_of(pair, 1, passive) is CmState.ESTABLISHED


def test_lap_and_path_of_a_req_hold_the_same_fields() -> None:
    path = Path(
        local_gid=PATH.local_gid,
        remote_gid=PATH.remote_gid,
        local_lid=1,
        remote_lid=2,
        flow_label=0xABCDE,
        packet_rate=7,
        traffic_class=8,
        hop_limit=9,
        sl=10,
        subnet_local=True,
        local_ack_timeout=11,
    )
    message = lap(1, 2, 3, path)
    assert LAP.unpack(message.pack()).alternate == path
    assert Path.unpack(path.pack()) == path


@pytest.mark.parametrize("lost", ["LAP", "APR"])
def test_lost_message_is_repeated_and_the_user_is_asked_once(lost: str) -> None:
    seen: list[str] = []

    def fate(message: Message) -> list[float]:
        kind = type(message).__name__
        seen.append(kind)
        return [] if kind == lost and seen.count(kind) == 1 else [0.001]

    pair, active, _ = connected(fate=fate, mra_service_timeout=None)
    pair.handlers[PathOffered] = answer_with(ApStatus.SUCCESS)  # type: ignore[assignment]
    pair.agents[0].load_path(active, PATH, pair.now)
    pair.run()
    assert [type(event) for event in pair.events[1]].count(PathOffered) == 1
    (answered,) = (event for event in pair.events[0] if isinstance(event, PathAnswered))
    assert answered.apr is not None
    assert answered.apr.ap_status == ApStatus.SUCCESS
    assert seen.count("LAP") == 2
    assert seen.count("APR") == (2 if lost == "APR" else 1)


def test_user_who_takes_time_sends_an_mra_for_each_copy() -> None:
    pair, active, passive = connected()
    pair.agents[0].load_path(active, PATH, pair.now)
    pair.run(until=pair.now + 60)
    assert pair.sent()[:3] == ["0:LAP", "0:LAP", "1:MRA"]
    mra = pair.log[2][1]
    assert isinstance(mra, MRA)
    assert mra.message_mraed == MessageKind.OTHER
    assert state_of(pair, 0, active) is CmState.MRA_LAP_RCVD
    assert state_of(pair, 1, passive) is CmState.MRA_LAP_SENT
    pair.agents[1].answer_path(passive, ApStatus.SUCCESS, pair.now)
    pair.run()
    assert [type(event) for event in pair.events[0]].count(PathAnswered) == 1
    assert state_of(pair, 0, active) is CmState.ESTABLISHED


def test_silent_peer_leaves_the_connection_as_it_was() -> None:
    pair, active, _ = connected(fate=lambda message: [] if isinstance(message, LAP) else [0.001])
    pair.agents[0].load_path(active, PATH, pair.now)
    pair.run()
    assert pair.events[0][-1] == PathAnswered(active, None)
    assert pair.sent() == ["0:LAP"] * 16
    assert state_of(pair, 0, active) is CmState.ESTABLISHED
    pair.agents[0].disconnect(active, pair.now)
    pair.run()
    assert pair.is_empty()


def test_late_apr_of_an_abandoned_lap_does_not_answer_the_next_one() -> None:
    peer, active = scripted(is_active=True)
    peer.agent.load_path(active, PATH, peer.now)
    first = transaction_of(peer)
    for _ in range(16):
        peer.wait()
    assert peer.only_event() == PathAnswered(active, None)
    peer.agent.load_path(active, PATH, peer.now)
    second = transaction_of(peer)
    peer.say(APR(PEER, active, ApStatus.SUCCESS), first)
    assert peer.agent.events() == []
    assert peer.agent.dropped == {DropReason.UNEXPECTED: 1}
    peer.say(APR(PEER, active, ApStatus.REJECT), second)
    answered = peer.only_event()
    assert answered.apr.ap_status == ApStatus.REJECT


def test_passive_side_may_not_offer_a_path() -> None:
    pair, _, passive = connected()
    with pytest.raises(CmStateError, match="the side that has sent the REQ") as refused:
        pair.agents[1].load_path(passive, PATH, pair.now)
    assert refused.value.errno == errno.EINVAL


@for_each("ending", ["disconnect", "destroy", "peer disconnects"])
@for_each("side", [0, 1])
def test_connection_ends_as_usual_while_a_path_is_loaded(side: int, ending: str) -> None:
    pair, active, passive = connected(mra_service_timeout=None)
    pair.agents[0].load_path(active, PATH, pair.now)
    pair.run(until=pair.now + 0.01)
    assert state_of(pair, 0, active) is CmState.LAP_SENT
    assert state_of(pair, 1, passive) is CmState.LAP_RCVD
    comm_id = (active, passive)[side]
    if ending == "destroy":
        pair.agents[side].destroy(comm_id, pair.now)
    elif ending == "disconnect":
        pair.agents[side].disconnect(comm_id, pair.now)
    else:
        pair.agents[1 - side].disconnect((active, passive)[1 - side], pair.now)
    pair.run()
    assert [type(event) for event in pair.events[0]].count(PathAnswered) == 0
    assert pair.is_empty()


def test_messages_follow_a_migration_and_come_on_both_paths() -> None:
    peer, active = scripted(is_active=True)
    agent = peer.agent
    with pytest.raises(CmStateError, match="no alternate path"):
        agent.migrate(active, peer.now)
    agent.set_alternate(active, "other")
    agent.migrate(active, peer.now)
    agent.load_path(active, PATH, peer.now)
    ((path, _),) = agent.mads_to_send()
    assert path == "other"
    peer.say(DREQ(PEER, active, 0x12), path="third")
    assert agent.dropped == {DropReason.WRONG_PATH: 1}
    peer.say(DREQ(PEER, active, 0x11), path="other")
    assert peer.only_event() == DisconnectRequested(active)
    agent.disconnect(active, peer.now)
    ((path, _),) = agent.mads_to_send()
    assert path == "other"


def test_peer_that_has_migrated_first_is_heard_on_the_alternate_path() -> None:
    peer, active = scripted(is_active=True)
    peer.say(DREQ(PEER, active, 0x11), path="other")
    assert peer.agent.dropped == {DropReason.WRONG_PATH: 1}
    peer.agent.set_alternate(active, "other")
    peer.say(DREQ(PEER, active, 0x11), path="other")
    assert peer.only_event() == DisconnectRequested(active)


# -- a hostile peer ---------------------------------------------------------------------------------------------


def transaction_of(peer: Scripted) -> int:
    *_, (_, mad) = peer.agent.mads_to_send()
    return int.from_bytes(mad[8:16], "big")


def scripted(*, is_active: bool, **options: object) -> tuple[Scripted, int]:
    """An agent with an established connection to the test."""
    peer = Scripted(**options)  # type: ignore[arg-type]
    agent = peer.agent
    agent.listen(SERVICE)
    if is_active:
        comm_id = agent.connect("peer", request(), peer.now)
        peer.say(reply(local_comm_id=PEER, remote_comm_id=comm_id, local_ca_guid=PEER_GUID))
        agent.send_rtu(comm_id, peer.now)
    else:
        peer.say(request(local_comm_id=PEER, local_ca_guid=PEER_GUID, local_qpn=0x33))
        comm_id = peer.only_event().comm_id
        agent.accept(comm_id, reply(local_qpn=0x11), peer.now)
        peer.say(RTU(PEER, comm_id))
    peer.heard()
    agent.events()
    agent.dropped.clear()
    return peer, comm_id


def test_lap_of_a_stranger_has_no_effect() -> None:
    peer, passive = scripted(is_active=False)
    for message, path, drop in (
        (lap(PEER, passive, 0x11), "stranger", DropReason.WRONG_PATH),
        (lap(PEER + 1, passive, 0x11), "stranger", DropReason.UNKNOWN),
        (lap(PEER, passive, 0x12), "peer", DropReason.WRONG_QPN),
    ):
        peer.agent.dropped.clear()
        peer.say(message, path=path)
        assert peer.agent.dropped == {drop: 1}
        assert peer.agent.events() == []
    connection = peer.agent.connection(passive)
    assert connection is not None
    assert (connection.state, connection.lap) == (CmState.ESTABLISHED, None)


@pytest.mark.parametrize(
    ("remote", "qpn", "status"),
    [(0x1234, 0x11, ApStatus.INVALID_COMM_ID), (None, 0x12, ApStatus.INVALID_QPN_EECN)],
)
def test_lap_for_no_connection_or_another_qp_is_answered_once(remote: int | None, qpn: int, status: ApStatus) -> None:
    peer, passive = scripted(is_active=False)
    comm_id = passive if remote is None else remote
    peer.say(lap(PEER, comm_id, qpn), 0x4321)
    assert peer.heard() == [APR(comm_id, PEER, status, 0, bytes(72), bytes(APR.PRIVATE_DATA))]
    assert peer.agent.connection(0x1234) is None


def test_flood_of_laps_leaves_one_to_answer() -> None:
    peer, passive = scripted(is_active=False, mra_service_timeout=None)
    for number in range(1000):
        peer.say(lap(PEER, passive, 0x11), 0x100 + number)
    assert peer.only_event().comm_id == passive
    assert peer.agent.dropped == {DropReason.UNEXPECTED: 999}
    assert peer.heard() == []
    assert len(peer.agent) == 1
    peer.agent.answer_path(passive, ApStatus.SUCCESS, peer.now)
    (apr,) = peer.heard()
    assert isinstance(apr, APR)


def test_restarted_peer_is_found_while_its_lap_waits_for_the_user() -> None:
    peer, passive = scripted(is_active=False)
    peer.say(lap(PEER, passive, 0x11))
    peer.agent.events()
    peer.say(request(local_comm_id=PEER + 1, local_ca_guid=PEER_GUID, local_qpn=0x33))
    assert peer.only_event() == PeerQuestion(passive)
    peer.agent.peer_activity(passive, None, peer.now)
    connection = peer.agent.connection(passive)
    assert connection is not None
    assert connection.state is CmState.DREQ_SENT


def test_newcomer_with_the_peers_queue_pair_is_rejected_while_a_lap_is_sent() -> None:
    peer, active = scripted(is_active=True)
    peer.agent.load_path(active, PATH, peer.now)
    peer.heard()
    peer.say(request(local_comm_id=PEER + 1, local_ca_guid=PEER_GUID, local_qpn=0x22))
    (rej,) = peer.heard()
    assert isinstance(rej, REJ)
    assert rej.reason == RejectReason.STALE_CONN
    connection = peer.agent.connection(active)
    assert connection is not None
    assert connection.state in CONNECTED
