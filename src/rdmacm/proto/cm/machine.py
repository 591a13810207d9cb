"""Runs the tables of :mod:`rdmacm.proto.cm.states`: makes a transition and carries out its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import TypeAlias

from rdmacm.proto.cm import outgoing
from rdmacm.proto.cm.codes import MessageKind, RejectReason, SidrStatus
from rdmacm.proto.cm.connection import AgentUser, CmConnection, DropReason, NetworkError
from rdmacm.proto.cm.messages import MRA, REP, REQ, SIDR_REP, Message
from rdmacm.proto.cm.registry import Connections
from rdmacm.proto.cm.states import AWAITING_USER, TRANSITIONS, Action, CmState, CmTrigger, Transition
from rdmacm.proto.cm.timeouts import seconds
from rdmacm.proto.entropy import RandomSource

#: How often the peer of a connection that seems stale is asked after the first time, and the seconds in between. The
#: answer is known before Linux repeats its REQ, which takes 4.6 s at least.
_QUESTIONS = 8
_QUESTION_INTERVAL = 0.5


class StateMachine:
    """The transitions of an agent's connections, and what they send and report.

    ``user``, ``guid`` and ``mra_service_timeout`` are those of :class:`~rdmacm.proto.cm.engine.Agent`, ``dropped`` is
    its counter.
    """

    def __init__(
        self,
        user: AgentUser,
        connections: Connections,
        guid: int,
        random: RandomSource,
        mra_service_timeout: int | None,
        dropped: Counter[DropReason],
    ) -> None:
        self._user = user
        self._connections = connections
        self._guid = guid
        self._random = random
        self._mra_service_timeout = mra_service_timeout
        self._dropped = dropped
        #: The questions to the peers of connections that seem stale, by local communication id: the REJ to send if the
        #: peer answers, and its activity when it was asked first.
        self.questions: dict[int, tuple[bytes, Hashable]] = {}
        #: The connection whose state was changed last, for a caller that catches an exception of the agent.
        self.stepping: CmConnection | None = None

    def step(
        self,
        connection: CmConnection,
        trigger: CmTrigger,
        now: float,
        message: Message | NetworkError | None = None,
        packed: bytes = b"",
    ) -> bool:
        """Make the transition of the table, and tell whom it concerns, last; False if the table has none.

        ``message`` is the one received, or the network's report; ``packed`` is the MAD that a call sends.
        """
        self.stepping = connection
        before = connection.state
        transition = PREPARED[before].get(trigger)
        if transition is None:
            return False
        after, actions, report, is_for_user = transition
        if after is not before:
            connection.deadline = None
            if self.questions:
                self.questions.pop(connection.comm_id, None)
        for perform in actions:
            perform(self, connection, now, message, packed)
        connection.state = after
        if after is not before:
            if connection.listener is not None and after not in AWAITING_USER:
                connection.listener.requests.discard(connection.comm_id)
            if after is CmState.TIMEWAIT:
                # The peer's TIMEWAIT may end before this one does.
                self._connections.release_qpn(connection)
                until = now + seconds(connection.av_timeout)
                self._connections.set_timer(connection, until)
                self._user.hold_qpn(connection.local_qpn, until)
            elif after is CmState.IDLE:
                self._connections.remove(connection)
        if report:
            concerned = self._user if is_for_user else connection.owner
            if concerned is not None:
                try:
                    getattr(concerned, report)(connection, message)
                except Exception as error:
                    self._user.raised(connection, error)
        return True

    # -- actions: of a connection, at a time, with the message or report received, and the MAD of a call ------------

    def _send_until_answered(self, connection: CmConnection, now: float, _: object, packed: bytes) -> None:
        connection.unanswered_mad = packed = packed or self.new_dreq(connection)
        connection.retries_left = connection.retries
        connection.was_extended = False
        self._connections.set_timer(connection, now + connection.retry_interval)
        self._send(connection, packed)

    def _send_rtu(self, connection: CmConnection, *_: object) -> None:
        self._send(connection, connection.rtu_mad)

    def _send_drep(self, connection: CmConnection, _now: float, _: object, packed: bytes) -> None:
        self._send(connection, packed or outgoing.drep(connection))

    def _resend(self, connection: CmConnection, now: float, *_: object) -> None:
        connection.retries_left -= 1
        connection.was_extended = False
        self._connections.set_timer(connection, now + connection.retry_interval)
        self._user.retries += self._send(connection, connection.unanswered_mad)

    def _send_mra(self, connection: CmConnection, *_: object) -> None:
        self._send(connection, outgoing.mra(connection, self._mra_service_timeout or 0))

    def _send_rej(self, connection: CmConnection, _now: float, _: object, packed: bytes) -> None:
        self._send(connection, packed or outgoing.rej(connection, RejectReason.CONSUMER_DEFINED))

    def _send_rej_timeout(self, connection: CmConnection, *_: object) -> None:
        self._send(connection, outgoing.rej_timeout(connection, connection.local_guid or self._guid))

    def _send_rej_stale(self, connection: CmConnection, _now: float, message: object, packed: bytes) -> None:
        if isinstance(message, REQ | REP):
            packed = outgoing.rej_stale(connection, message)
        self._send(connection, packed)

    def _send_dreq_once(self, connection: CmConnection, *_: object) -> None:
        self._send(connection, self.new_dreq(connection))

    def _send_apr(self, connection: CmConnection, _now: float, _: object, packed: bytes) -> None:
        if packed:
            connection.apr_mad = packed
        self._send(connection, connection.apr_mad)

    def _change_path(self, connection: CmConnection, *_: object) -> None:
        connection.migrated, connection.alternate = connection.alternate, connection.current_path

    def _send_sidr_rep(self, connection: CmConnection, _now: float, _: object, packed: bytes) -> None:
        self._send(connection, packed or outgoing.sidr_rep(connection, SIDR_REP(status=SidrStatus.REJECT)))

    def _extend_wait(self, connection: CmConnection, now: float, message: object, _: bytes) -> None:
        if isinstance(message, MRA) and not connection.was_extended:
            connection.was_extended = True
            connection.is_put_off |= message.message_mraed == MessageKind.REQ
            wait = seconds(message.service_timeout) + seconds(connection.av_timeout)
            self._connections.set_timer(connection, now + wait)

    def _await_answer(self, connection: CmConnection, now: float, *_: object) -> None:
        connection.retries_left = _QUESTIONS
        self._connections.set_timer(connection, now + _QUESTION_INTERVAL)

    def _await_answer_again(self, connection: CmConnection, now: float, *_: object) -> None:
        connection.retries_left -= 1
        self._connections.set_timer(connection, now + _QUESTION_INTERVAL)

    def _stop_waiting(self, connection: CmConnection, *_: object) -> None:
        connection.deadline = None

    def _release_qpn(self, connection: CmConnection, *_: object) -> None:
        self._connections.release_qpn(connection)

    # -- sending --------------------------------------------------------------------------------------------------

    def _send(self, connection: CmConnection, mad: bytes) -> bool:
        """Send a MAD, if its peer may get one more; False otherwise."""
        if connection.allowance is not None:
            if not connection.allowance:
                self._dropped[DropReason.UNANSWERED] += 1
                return False
            connection.allowance -= 1
        self._user.send(connection.path if connection.migrated is None else connection.migrated, mad)
        return True

    def repeat(self, connection: CmConnection) -> None:
        """Send the message that is not answered once more, before its time."""
        self._user.retries += self._send(connection, connection.unanswered_mad)

    def new_dreq(self, connection: CmConnection, private_data: bytes = b"") -> bytes:
        tid = connection.transaction_id
        while tid == connection.transaction_id:
            tid = connection.comm_id << 32 | self._random.getrandbits(32)
        return outgoing.dreq(connection, tid, private_data)

    def new_transaction_id(self, comm_id: int) -> int:
        return comm_id << 32 | self._random.getrandbits(32)


_Perform: TypeAlias = Callable[[StateMachine, CmConnection, float, Message | NetworkError | None, bytes], None]

#: How each action is carried out, other than those that report an event.
PERFORM: dict[Action, _Perform] = {
    Action.SEND_REQ: StateMachine._send_until_answered,
    Action.SEND_REP: StateMachine._send_until_answered,
    Action.SEND_DREQ: StateMachine._send_until_answered,
    Action.SEND_LAP: StateMachine._send_until_answered,
    Action.SEND_APR: StateMachine._send_apr,
    Action.CHANGE_PATH: StateMachine._change_path,
    Action.SEND_SIDR_REQ: StateMachine._send_until_answered,
    Action.SEND_RTU: StateMachine._send_rtu,
    Action.SEND_DREP: StateMachine._send_drep,
    Action.RESEND: StateMachine._resend,
    Action.SEND_MRA: StateMachine._send_mra,
    Action.SEND_REJ: StateMachine._send_rej,
    Action.SEND_REJ_TIMEOUT: StateMachine._send_rej_timeout,
    Action.SEND_REJ_STALE: StateMachine._send_rej_stale,
    Action.SEND_DREQ_ONCE: StateMachine._send_dreq_once,
    Action.SEND_SIDR_REP: StateMachine._send_sidr_rep,
    Action.EXTEND_WAIT: StateMachine._extend_wait,
    Action.AWAIT_ANSWER: StateMachine._await_answer,
    Action.AWAIT_ANSWER_AGAIN: StateMachine._await_answer_again,
    Action.STOP_WAITING: StateMachine._stop_waiting,
    Action.RELEASE_QPN: StateMachine._release_qpn,
}

#: The methods of an :class:`~rdmacm.proto.cm.connection.ConnectionOwner` that report something.
REPORTS = {
    Action.REPORT_REPLY: "replied",
    Action.REPORT_ESTABLISHED: "established",
    Action.REPORT_REJECTED: "rejected",
    Action.REPORT_UNREACHABLE: "unreachable",
    Action.REPORT_DISCONNECT_REQUESTED: "disconnect_requested",
    Action.REPORT_DISCONNECTED: "disconnected",
    Action.REPORT_PATH_OFFERED: "path_offered",
    Action.REPORT_PATH_ANSWERED: "path_answered",
    Action.REPORT_TIMEWAIT_EXIT: "timewait_over",
    Action.REPORT_SIDR_REPLY: "sidr_replied",
}
#: Those of an :class:`~rdmacm.proto.cm.connection.AgentUser`.
USER_REPORTS = {
    Action.REPORT_REQUEST: "requested",
    Action.REPORT_SIDR_REQUEST: "requested",
    Action.REPORT_PEER_QUESTION: "peer_questioned",
}

_Prepared: TypeAlias = tuple[CmState, tuple[_Perform, ...], str, bool]


def _prepare(transition: Transition) -> _Prepared:
    """A transition with the functions of its actions, of which at most one reports something, and the last one."""
    state, actions = transition
    reports = [action for action in actions if action not in PERFORM]
    name = "".join(REPORTS.get(action) or USER_REPORTS[action] for action in reports)
    return state, tuple(PERFORM[action] for action in actions if action in PERFORM), name, name in _FOR_USER


_FOR_USER = frozenset(USER_REPORTS.values())
#: The tables, prepared so that a step looks up the transition only.
PREPARED: dict[CmState, dict[CmTrigger, _Prepared | None]] = {
    state: {trigger: transition and _prepare(transition) for trigger, transition in row.items()}
    for state, row in TRANSITIONS.items()
}
