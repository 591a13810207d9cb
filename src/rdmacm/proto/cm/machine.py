"""Runs the tables of :mod:`rdmacm.proto.cm.states`: makes a transition and carries out its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from rdmacm.proto.cm import outgoing
from rdmacm.proto.cm.codes import RejectReason, SidrStatus
from rdmacm.proto.cm.connection import CmConnection, DropReason
from rdmacm.proto.cm.events import Event, NetworkError
from rdmacm.proto.cm.messages import MRA, REP, REQ, SIDR_REP, Message
from rdmacm.proto.cm.registry import Connections
from rdmacm.proto.cm.states import AWAITING_USER, TRANSITIONS, Action, CmState, CmTrigger
from rdmacm.proto.cm.timeouts import seconds
from rdmacm.proto.entropy import RandomSource

__all__ = ["StateMachine"]

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
        transition = TRANSITIONS[before].get(trigger)
        if transition is None:
            return False
        after = transition.state
        if after is not before:
            connection.deadline = None
            if self.questions:
                self.questions.pop(connection.comm_id, None)
        for action in transition.actions:
            report = outgoing.REPORTS.get(action)
            if report is None:
                self._perform(connection, action, now, message, packed)
            elif not connection.is_muted:
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

    def _perform(
        self,
        connection: CmConnection,
        action: Action,
        now: float,
        message: Message | NetworkError | None,
        packed: bytes,
    ) -> None:
        """Carry out one action of a transition, other than to report an event."""
        match action:
            case Action.SEND_REQ | Action.SEND_REP | Action.SEND_DREQ | Action.SEND_SIDR_REQ:
                connection.unanswered_mad = packed or self.new_dreq(connection)
                connection.retries_left = connection.retries
                self._send_unanswered(connection, now)
            case Action.MUTE:
                connection.is_muted = True
            case Action.SEND_RTU:
                self._send(connection, connection.rtu_mad)
            case Action.SEND_DREP:
                self._send(connection, packed or outgoing.drep(connection))
            case Action.RESEND:
                connection.retries_left -= 1
                self._send_unanswered(connection, now)
            case Action.SEND_MRA:
                self._send(connection, outgoing.mra(connection, self._mra_service_timeout or 0))
            case Action.SEND_REJ:
                self._send(connection, packed or outgoing.rej(connection, RejectReason.CONSUMER_DEFINED))
            case Action.SEND_REJ_TIMEOUT:
                self._send(connection, outgoing.rej_timeout(connection, connection.local_guid or self._guid))
            case Action.SEND_REJ_STALE if isinstance(message, REQ | REP):
                self._send(connection, outgoing.rej_stale(connection, message))
            case Action.SEND_REJ_STALE:
                self._send(connection, packed)
            case Action.SEND_DREQ_ONCE:
                self._send(connection, self.new_dreq(connection))
            case Action.SEND_SIDR_REP:
                rejection = SIDR_REP(status=SidrStatus.REJECT)
                self._send(connection, packed or outgoing.sidr_rep(connection, rejection))
            case Action.EXTEND_WAIT if isinstance(message, MRA):
                if not connection.was_extended:
                    connection.was_extended = True
                    wait = seconds(message.service_timeout) + seconds(connection.av_timeout)
                    self._connections.set_timer(connection, now + wait)
            case Action.AWAIT_ANSWER | Action.AWAIT_ANSWER_AGAIN:
                connection.retries_left = _QUESTIONS if action is Action.AWAIT_ANSWER else connection.retries_left - 1
                self._connections.set_timer(connection, now + _QUESTION_INTERVAL)
            case Action.STOP_WAITING:
                connection.deadline = None
            case Action.RELEASE_QPN:
                self._connections.release_qpn(connection)

    def _send(self, connection: CmConnection, mad: bytes) -> None:
        if connection.allowance is not None:
            if not connection.allowance:
                self._dropped[DropReason.UNANSWERED] += 1
                return
            connection.allowance -= 1
        self.outbox.append((connection.path, mad))

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
