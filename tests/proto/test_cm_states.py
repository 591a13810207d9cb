"""Every cell of the connection state table, compared with the specification and run through an agent."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from rdmacm.errors import CmStateError
from rdmacm.proto.cm.codes import ApStatus, MessageKind, RejectReason
from rdmacm.proto.cm.connection import CmConnection, NetworkError
from rdmacm.proto.cm.machine import PERFORM, REPORTS, USER_REPORTS
from rdmacm.proto.cm.messages import APR, DREP, DREQ, MRA, REJ, RTU, SIDR_REP, SIDR_REQ
from rdmacm.proto.cm.states import (
    AWAITING_USER,
    CALLS,
    CONNECTED,
    INTERNAL,
    MESSAGES,
    RETRYING,
    TRANSITIONS,
    Action,
    CmState,
    CmTrigger,
)
from support.cm import PATH, SERVICE, Scripted, lap, reply, request
from support.cm_events import PeerQuestion
from support.rows import for_each

S, I = CmState, CmTrigger  # noqa: E741

ACTIVE = {S.REQ_SENT, S.MRA_REQ_RCVD, S.REP_RCVD, S.MRA_REP_SENT}
PASSIVE = {S.REQ_RCVD, S.MRA_REQ_SENT, S.REP_SENT, S.MRA_REP_RCVD}
EITHER = {S.ESTABLISHED, S.DREQ_SENT, S.DREQ_RCVD, S.TIMEWAIT}
LOADING = {S.LAP_SENT, S.MRA_LAP_RCVD}
OFFERED = {S.LAP_RCVD, S.MRA_LAP_SENT}
SIDR = {S.SIDR_REQ_SENT, S.SIDR_REQ_RCVD}

#: States in which the peer may be asked whether it has restarted: no other timer runs in them.
ASKING = CONNECTED - LOADING

# From the specification: call → states that allow it.
ALLOWED: dict[CmTrigger, set[CmState]] = {
    I.CONNECT: {S.IDLE},
    I.RESOLVE: {S.IDLE},
    I.ACCEPT: {S.REQ_RCVD, S.MRA_REQ_SENT},
    I.REJECT: PASSIVE | {S.REP_RCVD, S.MRA_REP_SENT},
    I.SEND_RTU: {S.REP_RCVD, S.MRA_REP_SENT},
    I.ALLOW_MRA: {S.REQ_RCVD, S.REP_RCVD, S.LAP_RCVD},
    I.ESTABLISH: {S.REP_SENT, S.MRA_REP_RCVD} | CONNECTED,
    I.DISCONNECT: EITHER | CONNECTED,
    I.ANSWER: {S.SIDR_REQ_RCVD},
    I.LOAD_PATH: {S.ESTABLISHED},
    I.ANSWER_PATH: OFFERED,
    I.MIGRATE: {S.ESTABLISHED},
    I.DESTROY: set(S) - {S.IDLE},
}

# From the specification, independently of the table: message → {state that accepts it: next state}.
ACCEPTED_MESSAGES: dict[CmTrigger, dict[CmState, CmState]] = {
    I.REQ: {S.IDLE: S.REQ_RCVD, S.MRA_REQ_SENT: S.MRA_REQ_SENT, S.TIMEWAIT: S.TIMEWAIT},
    I.MRA_REQ: {S.REQ_SENT: S.MRA_REQ_RCVD, S.MRA_REQ_RCVD: S.MRA_REQ_RCVD},
    I.MRA_REP: {S.REP_SENT: S.MRA_REP_RCVD, S.MRA_REP_RCVD: S.MRA_REP_RCVD},
    I.REP: {
        S.IDLE: S.IDLE,
        S.REQ_SENT: S.REP_RCVD,
        S.MRA_REQ_RCVD: S.REP_RCVD,
        S.MRA_REP_SENT: S.MRA_REP_SENT,
        **{state: state for state in CONNECTED},
    },
    I.REP_STALE: {S.REQ_SENT: S.REQ_SENT, S.MRA_REQ_RCVD: S.MRA_REQ_RCVD},
    I.RTU: {S.REP_SENT: S.ESTABLISHED, S.MRA_REP_RCVD: S.ESTABLISHED},
    I.REJ: {
        S.REQ_SENT: S.IDLE,
        S.MRA_REQ_RCVD: S.IDLE,
        S.REP_RCVD: S.TIMEWAIT,
        S.MRA_REP_SENT: S.TIMEWAIT,
        S.REQ_RCVD: S.IDLE,
        S.MRA_REQ_SENT: S.IDLE,
        S.REP_SENT: S.IDLE,
        S.MRA_REP_RCVD: S.IDLE,
        **dict.fromkeys(CONNECTED, S.TIMEWAIT),
        S.DREQ_SENT: S.TIMEWAIT,
    },
    I.REJ_STALE: dict.fromkeys(ACTIVE | PASSIVE | CONNECTED | {S.DREQ_SENT}, S.TIMEWAIT),
    I.DREQ: {
        S.IDLE: S.IDLE,
        S.REP_SENT: S.DREQ_RCVD,
        S.MRA_REP_RCVD: S.DREQ_RCVD,
        **dict.fromkeys(CONNECTED, S.DREQ_RCVD),
        S.DREQ_SENT: S.TIMEWAIT,
        S.TIMEWAIT: S.TIMEWAIT,
    },
    I.DREP: {S.DREQ_SENT: S.TIMEWAIT},
    I.LAP: {S.IDLE: S.IDLE, S.ESTABLISHED: S.LAP_RCVD, S.MRA_LAP_SENT: S.MRA_LAP_SENT},
    I.LAP_COPY: {S.ESTABLISHED: S.ESTABLISHED},
    I.MRA_LAP: {S.LAP_SENT: S.MRA_LAP_RCVD, S.MRA_LAP_RCVD: S.MRA_LAP_RCVD},
    I.APR: {S.LAP_SENT: S.ESTABLISHED, S.MRA_LAP_RCVD: S.ESTABLISHED},
    I.SIDR_REQ: {S.IDLE: S.SIDR_REQ_RCVD},
    I.SIDR_REP: {S.SIDR_REQ_SENT: S.IDLE},
}


@for_each("state", list(S), ids=lambda s: s.name)
def test_each_state_allows_the_specified_triggers(state: CmState) -> None:
    row = TRANSITIONS[state]
    assert set(row) >= MESSAGES, "the row lists every message, even those it drops"
    for trigger in MESSAGES:
        step = row[trigger]
        assert (step.state if step is not None else None) == ACCEPTED_MESSAGES[trigger].get(state), trigger
    for call in CALLS:
        assert (TRANSITIONS[state].get(call) is not None) == (state in ALLOWED[call]), call
    assert (I.RETRY in row) == (I.EXHAUSTED in row) == (state in RETRYING or state in ASKING)
    assert (I.TIMEWAIT_OVER in row) == (state is S.TIMEWAIT)
    assert (I.STALE in row) == (I.PEER_ANSWERED in row) == (state in ASKING)
    assert (I.NETWORK_ERROR in row) == (state in (S.REQ_SENT, S.SIDR_REQ_SENT))


def test_table_covers_all_states_triggers_and_actions() -> None:
    assert set(TRANSITIONS) == set(S)
    assert set(I) == CALLS | INTERNAL | MESSAGES
    assert set(ACCEPTED_MESSAGES) == MESSAGES
    assert set(ALLOWED) == CALLS
    steps = [step for row in TRANSITIONS.values() for step in row.values() if step is not None]
    assert {action for step in steps for action in step.actions} == set(Action), "every action is used"
    assert len(PERFORM) + len(REPORTS) + len(USER_REPORTS) == len(Action)
    assert PERFORM.keys() | REPORTS.keys() | USER_REPORTS.keys() == set(Action), "every action is carried out"
    for step in steps:
        reports = [action in PERFORM for action in step.actions]
        assert False not in reports[:-1], "a step reports last, and one thing"


def test_every_state_can_be_reached_and_left() -> None:
    def reached(start: CmState) -> set[CmState]:
        seen, frontier = {start}, [start]
        while frontier:
            for step in TRANSITIONS[frontier.pop()].values():
                if step is not None and step.state not in seen:
                    seen.add(step.state)
                    frontier.append(step.state)
        return seen

    assert reached(S.IDLE) == set(S)
    for state in S:
        assert S.IDLE in reached(state)


def test_retransmission_starts_a_timer() -> None:
    starts = {
        Action.SEND_REQ,
        Action.SEND_REP,
        Action.SEND_DREQ,
        Action.SEND_SIDR_REQ,
        Action.SEND_LAP,
        Action.RESEND,
        Action.EXTEND_WAIT,
    }
    for before, row in TRANSITIONS.items():
        for trigger, step in row.items():
            if step is None:
                continue
            if step.state in RETRYING and step.state is not before:
                assert starts & set(step.actions), (before, trigger)
            if trigger is I.RETRY and before not in ASKING:
                assert step == (before, (Action.RESEND,))
    assert not AWAITING_USER & RETRYING


# -- through an agent -------------------------------------------------------------------------------------------

PEER = 0xA1B2C3D4
PEER_GUID = 0x0200C0FFFE000202
PEER_QPN = 0x33
LAP_TID = 0x99


class AgentInState:
    """An agent with a connection in a given state. The test is the connection's peer."""

    def __init__(self, state: CmState, is_active: bool) -> None:
        sends_mra = state in (S.MRA_REQ_SENT, S.MRA_REP_SENT, S.MRA_LAP_SENT)
        self.peer = peer = Scripted(mra_service_timeout=24 if sends_mra else None)
        self.agent = agent = peer.agent
        self.is_active = is_active
        self.comm_id = 0
        agent.listen(SERVICE)
        if state is S.IDLE:
            return
        if state is S.SIDR_REQ_SENT:
            self.comm_id = agent.sidr_request("peer", SIDR_REQ(SERVICE), peer.now)
        elif state is S.SIDR_REQ_RCVD:
            self.receive(I.SIDR_REQ)
            self.comm_id = peer.only_event().comm_id
        elif is_active:
            self.comm_id = agent.connect("peer", request(), peer.now)
            if state is S.MRA_REQ_RCVD:
                self.receive(I.MRA_REQ)
            elif state is not S.REQ_SENT:
                self.receive(I.REP)
                if state not in ACTIVE:
                    agent.send_rtu(self.comm_id, peer.now)
        else:
            self.receive(I.REQ)
            self.comm_id = peer.only_event().comm_id
            if state not in (S.REQ_RCVD, S.MRA_REQ_SENT):
                agent.accept(self.comm_id, reply(local_qpn=0x11), peer.now)
                if state is S.MRA_REP_RCVD:
                    self.receive(I.MRA_REP)
                elif state is not S.REP_SENT:
                    self.receive(I.RTU)
        if state in LOADING:
            agent.load_path(self.comm_id, PATH, peer.now)
            if state is S.MRA_LAP_RCVD:
                self.receive(I.MRA_LAP)
        elif state in OFFERED:
            self.receive(I.LAP)
        elif state is S.DREQ_RCVD:
            self.receive(I.DREQ)
        elif state in (S.DREQ_SENT, S.TIMEWAIT):
            agent.disconnect(self.comm_id, peer.now)
            if state is S.TIMEWAIT:
                self.receive(I.DREP)
        assert self.state is state
        peer.heard()
        agent.events()

    @property
    def connection(self) -> CmConnection | None:
        return self.agent.connection(self.comm_id)

    @property
    def state(self) -> CmState:
        return self.connection.state if self.connection is not None else S.IDLE

    def receive(self, trigger: CmTrigger) -> None:
        mine = self.comm_id
        rej = REJ(PEER, mine, MessageKind.OTHER, RejectReason.CONSUMER_DEFINED)
        if self.connection is not None and self.connection.remote_comm_id is None:
            rej = REJ(0, mine, MessageKind.REQ, RejectReason.CONSUMER_DEFINED)
        rep = reply(local_comm_id=PEER, remote_comm_id=mine, local_qpn=PEER_QPN, local_ca_guid=PEER_GUID)
        match trigger:
            case I.REQ:
                self.peer.say(request(local_comm_id=PEER, local_ca_guid=PEER_GUID, local_qpn=PEER_QPN))
            case I.MRA_REQ:
                self.peer.say(MRA(PEER, mine, MessageKind.REQ, 20))
            case I.MRA_REP:
                self.peer.say(MRA(PEER, mine, MessageKind.REP, 20))
            case I.REP | I.REP_STALE:
                self.peer.say(rep)
            case I.RTU:
                self.peer.say(RTU(PEER, mine))
            case I.REJ:
                self.peer.say(rej)
            case I.REJ_STALE:
                self.peer.say(REJ(rej.local_comm_id, mine, rej.message_rejected, RejectReason.STALE_CONN))
            case I.DREQ:
                self.peer.say(DREQ(PEER, mine, 0x11))
            case I.DREP:
                self.peer.say(DREP(PEER, mine))
            case I.LAP | I.LAP_COPY:
                self.peer.say(lap(PEER, mine, 0x11), LAP_TID)
            case I.MRA_LAP:
                self.peer.say(MRA(PEER, mine, MessageKind.OTHER, 20))
            case I.APR:
                sent = self.connection.lap_transaction_id if self.connection is not None else 0
                self.peer.say(APR(PEER, mine, ApStatus.SUCCESS), sent)
            case I.SIDR_REQ:
                self.peer.say(SIDR_REQ(SERVICE, PEER))
            case I.SIDR_REP:
                self.peer.say(SIDR_REP(mine, qpn=PEER_QPN))

    def call(self, trigger: CmTrigger) -> None:
        now = self.peer.now
        calls: dict[CmTrigger, Any] = {
            I.ACCEPT: lambda: self.agent.accept(self.comm_id, reply(), now),
            I.REJECT: lambda: self.agent.reject(self.comm_id, now),
            I.SEND_RTU: lambda: self.agent.send_rtu(self.comm_id, now),
            I.ESTABLISH: lambda: self.agent.establish(self.comm_id, now),
            I.DISCONNECT: lambda: self.agent.disconnect(self.comm_id, now),
            I.ANSWER: lambda: self.agent.sidr_reply(self.comm_id, SIDR_REP(), now),
            I.LOAD_PATH: lambda: self.agent.load_path(self.comm_id, PATH, now),
            I.ANSWER_PATH: lambda: self.agent.answer_path(self.comm_id, ApStatus.SUCCESS, now),
            I.MIGRATE: lambda: self.agent.migrate(self.comm_id, now),
            I.DESTROY: lambda: self.agent.destroy(self.comm_id, now),
        }
        calls[trigger]()


def expected(state: CmState, trigger: CmTrigger) -> tuple[CmState, list[str], list[str]]:
    """The next state, the messages sent and the events reported, according to the table."""
    step = TRANSITIONS[state].get(trigger)
    if step is None:
        return state, [], []
    sent, reported = [], []
    repeated = {S.REQ_SENT: "REQ", S.MRA_REQ_RCVD: "REQ", S.DREQ_SENT: "DREQ", S.SIDR_REQ_SENT: "SIDR_REQ"}
    repeated |= dict.fromkeys(LOADING, "LAP")
    for action in step.actions:
        if action is Action.RESEND:
            sent.append(repeated.get(state, "REP"))
        elif action.name.startswith("SEND_"):
            sent.append("SIDR_" + action.name[10:] if "SIDR" in action.name else action.name.split("_")[1])
        elif action.name.startswith("REPORT_"):
            reported.append(action.value)
    return step.state, sent, reported


ROLES = [
    (s, a) for s in S for a in (True, False) if (s in ACTIVE | LOADING) <= a and (s in PASSIVE | OFFERED) <= (not a)
]
ROLES = [(s, a) for s, a in ROLES if s not in SIDR | {S.IDLE} or a]
NO_REMOTE = {S.REQ_SENT, S.MRA_REQ_RCVD} | SIDR


def check(subject: AgentInState, state: CmState, want: tuple[CmState, list[str], list[str]]) -> None:
    reported = [type(event).__name__ for event in subject.agent.events()]
    sent = [type(message).__name__ for message in subject.peer.heard()]
    assert (sent, reported) == (want[1], want[2])
    assert subject.state is want[0]
    connection = subject.connection
    if connection is not None:
        timed = subject.state in RETRYING or subject.state is S.TIMEWAIT
        assert (connection.deadline is not None) == timed
        assert (subject.agent.next_deadline() is not None) == timed


@for_each("trigger", sorted(MESSAGES - {I.REP_STALE, I.LAP_COPY}, key=str), ids=str)
@for_each(("state", "is_active"), ROLES, ids=lambda v: v.name if isinstance(v, CmState) else str(v))
def test_messages_follow_the_table(state: CmState, is_active: bool, trigger: CmTrigger) -> None:
    subject = AgentInState(state, is_active)
    want = expected(state, trigger)
    if (trigger is I.REP and not is_active) or (trigger is I.REQ and is_active and state is not S.IDLE):
        want = state, [], []
        if trigger is I.REQ and state in NO_REMOTE:
            want = state, [], ["ConnectRequest"]  # taken as a request for another connection
    elif trigger is I.LAP and is_active and state in CONNECTED:
        want = state, [], []
    elif trigger in (I.DREQ, I.LAP) and state in NO_REMOTE - {S.SIDR_REQ_RCVD}:
        want = state, ["DREP" if trigger is I.DREQ else "APR"], []
    elif trigger is I.SIDR_REQ and state is not S.SIDR_REQ_RCVD:
        want = state, [], ["SidrRequest"]
    subject.receive(trigger)
    if state is S.IDLE and subject.agent.connection(subject.comm_id) is None:
        dropped = TRANSITIONS[state].get(trigger) is None or trigger in (I.REP, I.DREQ, I.LAP)
        assert sum(subject.agent.dropped.values()) == dropped
        assert [type(event).__name__ for event in subject.agent.events()] == (want[2] if not dropped else [])
        assert [type(message).__name__ for message in subject.peer.heard()] == want[1]
        return
    if TRANSITIONS[state].get(trigger) is None and not want[2]:
        assert sum(subject.agent.dropped.values()) == 1
    check(subject, state, want)


@for_each("trigger", sorted(CALLS - {I.CONNECT, I.RESOLVE, I.ALLOW_MRA}, key=str), ids=str)
@for_each(("state", "is_active"), ROLES, ids=lambda v: v.name if isinstance(v, CmState) else str(v))
def test_calls_follow_the_table(state: CmState, is_active: bool, trigger: CmTrigger) -> None:
    subject = AgentInState(state, is_active)
    subject.agent.set_alternate(subject.comm_id, "peer")
    if trigger is I.LOAD_PATH and state is S.ESTABLISHED and not is_active:
        with pytest.raises(CmStateError, match="the side that has sent the REQ"):
            subject.call(trigger)
        check(subject, state, (state, [], []))
        return
    if state in ALLOWED[trigger] or trigger is I.DESTROY:
        subject.call(trigger)
    else:
        with pytest.raises(CmStateError, match=state.name):
            subject.call(trigger)
    check(subject, state, expected(state, trigger))


@for_each(("state", "is_active"), ROLES, ids=lambda v: v.name if isinstance(v, CmState) else str(v))
def test_network_errors_follow_the_table(state: CmState, is_active: bool) -> None:
    case = AgentInState(state, is_active)
    connection = case.connection
    tid = connection.transaction_id if connection is not None else 0
    error = NetworkError(errno.ECONNREFUSED, b"")
    case.agent.unreachable(case.comm_id, tid, lambda path: path == "peer", error, case.peer.now)
    assert sum(case.agent.dropped.values()) == (state not in (S.REQ_SENT, S.SIDR_REQ_SENT))
    check(case, state, expected(state, I.NETWORK_ERROR))


@for_each("exhausted", [False, True])
@for_each(("state", "is_active"), ROLES, ids=lambda v: v.name if isinstance(v, CmState) else str(v))
def test_timers_follow_the_table(state: CmState, is_active: bool, exhausted: bool) -> None:
    subject = AgentInState(state, is_active)
    if state in RETRYING:
        assert subject.connection is not None
        if exhausted:
            subject.connection.retries_left = 0
        trigger = I.EXHAUSTED if exhausted else I.RETRY
    elif state is S.TIMEWAIT:
        trigger = I.TIMEWAIT_OVER
    else:
        assert subject.agent.next_deadline() is None
        subject.agent.timer(1e9)
        check(subject, state, (state, [], []))
        return
    subject.peer.wait()
    check(subject, state, expected(state, trigger))


@for_each(("state", "is_active"), ROLES, ids=lambda v: v.name if isinstance(v, CmState) else str(v))
def test_req_for_a_connected_qp_is_rejected_as_stale(state: CmState, is_active: bool) -> None:
    subject = AgentInState(state, is_active)
    subject.peer.say(request(local_comm_id=PEER + 1, local_ca_guid=PEER_GUID, local_qpn=PEER_QPN))
    if state in NO_REMOTE | {S.IDLE, S.TIMEWAIT}:
        assert type(subject.peer.only_event()).__name__ == "ConnectRequest"
        assert subject.state is state
        return
    if state in ASKING:
        assert subject.peer.only_event() == PeerQuestion(subject.comm_id)
        assert not subject.peer.heard()
        subject.agent.peer_activity(subject.comm_id, "before", subject.peer.now)
        subject.agent.peer_activity(subject.comm_id, "after", subject.peer.now)
    (rej,) = subject.peer.heard()
    assert isinstance(rej, REJ)
    assert (rej.reason, rej.local_comm_id, rej.remote_comm_id) == (RejectReason.STALE_CONN, 0, PEER + 1)
    check(subject, state, (state, [], []))


@pytest.mark.parametrize("state", [S.REQ_SENT, S.MRA_REQ_RCVD])
def test_rep_for_a_connected_qp_is_rejected_as_stale_if_its_peer_answers(state: CmState) -> None:
    subject = AgentInState(S.ESTABLISHED, True)
    old, subject.comm_id = subject.comm_id, subject.agent.connect("peer", request(local_qpn=0x12), subject.peer.now)
    if state is S.MRA_REQ_RCVD:
        subject.receive(I.MRA_REQ)
    subject.peer.heard()
    assert subject.state is state
    subject.peer.say(
        reply(local_comm_id=PEER + 1, remote_comm_id=subject.comm_id, local_qpn=PEER_QPN, local_ca_guid=PEER_GUID)
    )
    assert subject.peer.only_event() == PeerQuestion(old)
    assert not subject.peer.heard()
    subject.agent.peer_activity(old, "before", subject.peer.now)
    subject.agent.peer_activity(old, "after", subject.peer.now)
    (rej,) = subject.peer.heard()
    assert rej == REJ(
        subject.comm_id, PEER + 1, MessageKind.REP, RejectReason.STALE_CONN, 0, bytes(72), bytes(REJ.PRIVATE_DATA)
    )
    assert subject.state is state
    assert subject.agent.connection(old).state is S.ESTABLISHED  # type: ignore[union-attr]
