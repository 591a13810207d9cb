"""Runs the tables of :mod:`rdmacm.proto.cm.states`: makes a transition and carries out its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from rdmacm.proto.cm import outgoing
from rdmacm.proto.cm.codes import MessageKind, RejectReason, SidrStatus
from rdmacm.proto.cm.connection import CmConnection, DropReason
from rdmacm.proto.cm.events import Event, NetworkError
from rdmacm.proto.cm.messages import MRA, REP, REQ, SIDR_REP, Message
from rdmacm.proto.cm.registry import Connections
from rdmacm.proto.cm.states import AWAITING_USER, TRANSITIONS, Action, CmState, CmTrigger
from rdmacm.proto.cm.timeouts import seconds
from rdmacm.proto.entropy import RandomSource

#: How often the peer of a connection that seems stale is asked after the first time, and the seconds in between. The
#: answer is known before Linux repeats its REQ, which takes 4.6 s at least.
_QUESTIONS = 8
_QUESTION_INTERVAL = 0.5


class StateMachine:
    """The transitions of an agent's connections, and what they send and report.

    ``guid`` and ``mra_service_timeout`` are those of :class:`~rdmacm.proto.cm.engine.Agent`, ``dropped`` is its
    counter.
    """

    def __init__(
        self,
        connections: Connections,
        guid: int,
        random: RandomSource,
        mra_service_timeout: int | None,
        dropped: Counter[DropReason],
    ) -> None:
        self._connections = connections
        self._guid = guid
        self._random = random
        self._mra_service_timeout = mra_service_timeout
        self._dropped = dropped
        #: (path, MAD) pairs to send.
        self.outbox: list[tuple[Hashable, bytes]] = []
        #: Events for the user.
        self.pending_events: list[Event] = []
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
        *,
        message: Message | NetworkError | None = None,
        packed: bytes = b"",
    ) -> bool:
        """Make the transition of the table; False if it has none.

        ``message`` is the one received, or the network's report; ``packed`` is the MAD that a call sends.
        """
        self.stepping = connection
        before = connection.state
        transition = _PREPARED[before].get(trigger)
        if transition is None:
            return False
        after, actions = transition
        if after is not before:
            connection.deadline = None
            if self.questions:
                self.questions.pop(connection.comm_id, None)
        for perform, report in actions:
            if perform is not None:
                perform(self, connection, now, message, packed)
            elif report is not None and not connection.is_muted:
                self.pending_events.append(report(connection, trigger, message))
        connection.state = after
        if after is before:
            return True
        if connection.listener is not None and after not in AWAITING_USER:
            connection.listener.requests.discard(connection.comm_id)
        if after is CmState.TIMEWAIT:
            # The peer's TIMEWAIT may end before this one does.
            self._connections.release_qpn(connection)
            self._connections.set_timer(connection, now + seconds(connection.av_timeout))
        elif after is CmState.IDLE:
            self._connections.remove(connection)
        return True

    # -- actions: of a connection, at a time, with the message or report received, and the MAD of a call ------------

    def _send_until_answered(self, connection: CmConnection, now: float, _: object, packed: bytes) -> None:
        connection.unanswered_mad = packed or self.new_dreq(connection)
        connection.retries_left = connection.retries
        self._send_unanswered(connection, now)

    def _mute(self, connection: CmConnection, *_: object) -> None:
        connection.is_muted = True

    def _send_rtu(self, connection: CmConnection, *_: object) -> None:
        self._send(connection, connection.rtu_mad)

    def _send_drep(self, connection: CmConnection, _now: float, _: object, packed: bytes) -> None:
        self._send(connection, packed or outgoing.drep(connection))

    def _resend(self, connection: CmConnection, now: float, *_: object) -> None:
        connection.retries_left -= 1
        self._send_unanswered(connection, now)

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

    def _send(self, connection: CmConnection, mad: bytes) -> None:
        if connection.allowance is not None:
            if not connection.allowance:
                self._dropped[DropReason.UNANSWERED] += 1
                return
            connection.allowance -= 1
        self.outbox.append((connection.current_path, mad))

    def repeat(self, connection: CmConnection) -> None:
        """Send the message that is not answered once more, before its time."""
        self._send(connection, connection.unanswered_mad)

    def _send_unanswered(self, connection: CmConnection, now: float) -> None:
        connection.was_extended = False
        self._send(connection, connection.unanswered_mad)
        self._connections.set_timer(connection, now + connection.retry_interval)

    def new_dreq(self, connection: CmConnection, private_data: bytes = b"") -> bytes:
        tid = connection.transaction_id
        while tid == connection.transaction_id:
            tid = self.new_transaction_id(connection.comm_id)
        return outgoing.dreq(connection, tid, private_data)

    def new_transaction_id(self, comm_id: int) -> int:
        return comm_id << 32 | self._random.getrandbits(32)


_Perform: TypeAlias = Callable[[StateMachine, CmConnection, float, Message | NetworkError | None, bytes], None]
_Report: TypeAlias = Callable[[CmConnection, CmTrigger, Any], Event]

#: How each action is carried out, other than those that report an event.
PERFORM: dict[Action, _Perform] = {
    Action.SEND_REQ: StateMachine._send_until_answered,
    Action.SEND_REP: StateMachine._send_until_answered,
    Action.SEND_DREQ: StateMachine._send_until_answered,
    Action.SEND_LAP: StateMachine._send_until_answered,
    Action.SEND_APR: StateMachine._send_apr,
    Action.CHANGE_PATH: StateMachine._change_path,
    Action.SEND_SIDR_REQ: StateMachine._send_until_answered,
    Action.MUTE: StateMachine._mute,
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

#: The tables with the functions of their actions, so that a step looks up the transition only.
_PREPARED: dict[CmState, dict[CmTrigger, tuple[CmState, tuple[tuple[_Perform | None, _Report | None], ...]] | None]] = {
    state: {
        trigger: transition
        and (transition[0], tuple((PERFORM.get(action), outgoing.REPORTS.get(action)) for action in transition[1]))
        for trigger, transition in row.items()
    }
    for state, row in TRANSITIONS.items()
}
