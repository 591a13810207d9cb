"""Connection managers: one for all RoCE devices, and one for each InfiniBand port.

The agent (:mod:`rdmacm.proto.cm.engine`) does no input or output. A connection manager sends the agent's MADs over
QP 1, passes requests to the listeners' handlers, and turns the agent's deadline into a timer. The upper 12 bits of a
communication id are the wire's slot, so that replies reach the right process when several share the port.

The agent and the owners of connections raise no exceptions here. If one does all the same, its connection ends,
its owner is told that it has failed, and all others go on.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from random import Random
from typing import Any, Protocol, TypeAlias

from rdmacm.errors import errno_name
from rdmacm.progress.runtime import Runtime
from rdmacm.progress.timers import Timer
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.cm.connection import Accepts, CmConnection, CmListener, DropReason, NetworkError
from rdmacm.proto.cm.engine import Agent
from rdmacm.proto.cm.messages import REJ, REQ, SIDR_REQ, Message, unpack_mad
from rdmacm.proto.cm.states import CONNECTED, CmState
from rdmacm.proto.mad import MgmtClass
from rdmacm.proto.wire import Buffer, WireError
from rdmacm.provider import log

#: The low byte of the attribute id, in the header of a MAD.
_ATTRIBUTE_ID = 17
#: The class and the attribute id of a MAD, and the communication ids of a message: the sender's, and the receiver's.
#: A SIDR_REP has the receiver's request id first.
_IDS = struct.Struct("!xB14xH6xII")
_COM_MGT = int(MgmtClass.COM_MGT)
_ATTRIBUTES = frozenset(map(int, AttributeId))
_REP, _SIDR_REP, _DREQ, _REJ = map(int, (AttributeId.REP, AttributeId.SIDR_REP, AttributeId.DREQ, AttributeId.REJ))
#: States of a request that ends with a REJ. If the REJ is lost, the peer repeats its REP up to so many times, and knows
#: the number of the queue pair until then.
_REQUESTED = (CmState.REQ_SENT, CmState.MRA_REQ_RCVD, CmState.REP_RCVD)
_REPLIES = 4
#: States in which a connection is established, or was a moment ago.
_ESTABLISHED = CONNECTED | {CmState.DREQ_SENT, CmState.DREQ_RCVD, CmState.TIMEWAIT}

#: Takes the ids of a REQ or SIDR_REQ that was not delivered, a function that tells whether a path leads to where it was
#: sent, the error, and the time (:meth:`rdmacm.proto.cm.engine.Agent.unreachable`).
OnUndelivered: TypeAlias = Callable[[int, int, Callable[[Any], bool], NetworkError, float], None]


class Triage(Enum):
    """What to do with a MAD that is no request for a service id."""

    PROCESS = 1
    #: It names no connection, and is processed if there are not too many: it may be answered.
    PROCESS_SOME = 2
    #: It has been dropped and counted.
    DROPPED = 3


class Gsi(Protocol):
    """QP 1, the general services interface, as a connection manager uses it. A path is opaque to the agent."""

    #: Called with (MAD, path, now) for each MAD of a connection manager that arrives; the MAD is valid during the call.
    on_mad: Callable[[memoryview, Any, float], None] | None
    #: Called first with each MAD that is no request, where strangers can send any number of them.
    triage: Callable[[memoryview], Triage] | None
    #: Called when the network reports that a request was not delivered.
    on_undelivered: OnUndelivered | None
    #: Called while requests wait because peers have not answered the REPs to earlier ones.
    on_shortage: Callable[[], None] | None
    #: Whether nobody can forge the source of a MAD.
    trusts_sources: bool

    @property
    def id_prefix(self) -> int | None:
        """The upper byte of communication ids, when several processes share QP 1; known once opened."""

    def open(self) -> None:
        """Begin to receive MADs; RdmaError when that is not possible."""

    def source_of(self, path: Any) -> Hashable:
        """The peer that a path leads to, as far as no other can send from there. Each has its share of a backlog."""

    def send_mad(self, path: Any, mad: Buffer) -> object:
        """Send a MAD of 256 bytes. A MAD that cannot be sent is lost."""

    def listen(self, service_id: int, local: bytes | None, /) -> object:
        """Let requests for a service id, to one local address or any, come to this process; returns a token."""

    def unlisten(self, token: object) -> None:
        """Undo :meth:`listen`."""

    def peer_answered(self) -> None:
        """A peer has answered the REP to its request (:class:`rdmacm.proto.cm.admission.Admission`)."""

    def hold_qpn(self, qpn: int, until: float) -> None:
        """Give the number to no queue pair before ``until``."""

    def ask_peer(self, qpn: int) -> Hashable:
        """Send the peer of a connected queue pair a packet that it answers and that has no other effect.

        Returns a value that changes with every packet from the peer; None if there is no such queue pair here.
        """


class RequestHandler(Protocol):
    """Gets the requests for one listener. Called with the runtime's lock held."""

    def requested(self, connection: CmConnection, cm: ConnectionManager) -> None:
        """A REQ or SIDR_REQ has arrived."""


class ConnectionManager:
    """See the module; the :class:`~rdmacm.proto.cm.connection.AgentUser` of its agent. Used with the runtime's lock
    held. ``gsi`` carries its MADs.
    """

    received: list[int]
    sent: list[int]

    def __init__(self, runtime: Runtime, random: Random, gsi: Gsi) -> None:
        self._runtime = runtime
        self._random = random
        self._gsi = gsi
        #: Made with the first listener or connection.
        self._agent: Agent | None = None
        #: The handler of each listener, and the token of :meth:`Gsi.listen`.
        self._listeners: dict[CmListener, tuple[RequestHandler, object]] = {}
        #: Set for the agent's next deadline, or an earlier one.
        self._timer: Timer | None = None
        #: Whether QP 1 is sending: the network may report at once that it cannot deliver a request.
        self._is_sending = False
        #: See :class:`~rdmacm.proto.cm.connection.AgentUser`.
        self.hold_qpn: Callable[[int, float], None] = gsi.hold_qpn
        self.peer_answered: Callable[[], None] = gsi.peer_answered
        #: Messages sent and received, by the low byte of the MAD's attribute id.
        self.sent, self.received = [0] * 256, [0] * 256
        #: Messages that were sent again because no answer came.
        self.retries: int = 0
        #: Received messages without effect, of the agents that were closed.
        self._closed_drops: Counter[DropReason] = Counter()

    @property
    def agent(self) -> Agent:
        """The agent. The first use makes it and opens QP 1."""
        if self._agent is None:
            random, gsi = self._random, self._gsi
            gsi.open()
            self._agent = Agent(
                self,
                random.getrandbits(64),
                random,
                id_prefix=gsi.id_prefix,
                source_of=gsi.source_of,
                trusts_sources=gsi.trusts_sources,
            )
            gsi.on_mad = self._mad_received
            gsi.triage = self._triage
            gsi.on_undelivered = self._undelivered
            gsi.on_shortage = self._ask_peers
        return self._agent

    @property
    def dropped(self) -> Counter[DropReason]:
        """Received messages without effect, by reason; a copy."""
        return self._closed_drops + self._agent.dropped if self._agent is not None else Counter(self._closed_drops)

    def listen(
        self,
        handler: RequestHandler,
        service_id: int,
        local: bytes | None,
        backlog: int,
        accepts: Accepts,
        transport: tuple[int, int] | None = None,
    ) -> CmListener:
        """Accept requests for a service id, at one local address or, if ``local`` is None, at any.

        ``accepts`` and ``transport`` are those of :meth:`rdmacm.proto.cm.engine.Agent.listen`.
        """
        listener = self.agent.listen(service_id, backlog=backlog, accepts=accepts, transport=transport)
        try:
            token = self._gsi.listen(service_id, local)
        except BaseException:
            self.agent.unlisten(listener)
            raise
        self._listeners[listener] = handler, token
        self._runtime.descriptors_changed()
        return listener

    def unlisten(self, listener: CmListener) -> None:
        """Undo :meth:`listen`; the requests of the backlog are rejected."""
        found, agent = self._listeners.pop(listener, None), self._agent
        if found is not None and agent is not None:
            agent.unlisten(listener)
            while (request := agent.next_request(listener)) is not None:
                agent.destroy(request.comm_id, self._runtime.clock())
            self._gsi.unlisten(found[1])
            self._runtime.descriptors_changed()

    def leave(self, connection: CmConnection) -> None:
        """End a connection whose id is being destroyed: the peer gets a DREQ or REJ, if one is due."""
        if self._agent is not None and connection.state is not CmState.IDLE:
            before, now = connection.state, self._runtime.clock()
            self._agent.destroy(connection.comm_id, now)
            if before in _REQUESTED:
                self.hold_qpn(connection.local_qpn, now + _REPLIES * connection.retry_interval)

    # -- for the agent --------------------------------------------------------------------------------

    def send(self, path: Hashable, mad: bytes) -> None:
        self.sent[mad[_ATTRIBUTE_ID]] += 1
        if log.enabled:
            _log_message("to", mad, path)
        self._is_sending = True
        try:
            self._gsi.send_mad(path, mad)
        except Exception as error:
            self._runtime.errors.report("gsi", "a management datagram is lost", error)
        finally:
            self._is_sending = False

    def wake_at(self, when: float) -> None:
        """An earlier timer stays: when it fires, the agent asks for one for its next deadline."""
        if self._timer is None or when < self._timer.when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._runtime.call_at(when, self._time)

    def requested(self, connection: CmConnection, _: Message) -> None:
        assert connection.listener is not None
        self._listeners[connection.listener][0].requested(connection, self)

    def peer_questioned(self, connection: CmConnection, _: Message | None) -> None:
        if self._agent is not None:
            activity = self._gsi.ask_peer(connection.local_qpn)
            self._agent.peer_activity(connection.comm_id, activity, self._runtime.clock())

    def raised(self, connection: CmConnection, error: Exception) -> None:
        """What has been done for a connection has raised an exception, which ends it."""
        if self._agent is not None:
            self._end(self._agent, connection, error)

    # -- events of QP 1 and of time -------------------------------------------------------------------

    def _time(self, now: float) -> None:
        self._timer = None
        agent = self._agent
        if agent is not None:
            agent.machine.stepping = None
            try:
                agent.timer(now)
            except Exception as error:
                self._end(agent, agent.machine.stepping, error)

    def _ask_peers(self) -> None:
        if self._agent is not None:
            self._agent.ask_peers()

    def _triage(self, mad: memoryview) -> Triage:
        """Drop a message that names no connection before its ICRC is checked and its fields are unpacked."""
        agent = self._agent
        if agent is None or log.enabled:
            return Triage.PROCESS
        mgmt_class, attribute, sender_id, receiver_id = _IDS.unpack_from(mad)
        if mgmt_class != _COM_MGT or attribute not in _ATTRIBUTES:
            agent.dropped[DropReason.MALFORMED] += 1
            return Triage.DROPPED
        if agent.connection(sender_id if attribute == _SIDR_REP else receiver_id) is not None:
            return Triage.PROCESS
        if attribute in (_REP, _DREQ) or (attribute == _REJ and not receiver_id):
            return Triage.PROCESS_SOME
        agent.dropped[DropReason.UNKNOWN] += 1
        self.received[attribute & 0xFF] += 1
        return Triage.DROPPED

    def _mad_received(self, mad: memoryview, path: Hashable, now: float) -> None:
        agent = self._agent
        if agent is not None:
            if log.enabled:
                _log_message("from", mad, path)
            agent.machine.stepping = None
            try:
                dropped = agent.mad_received(mad, path, now)
                if dropped is not DropReason.MALFORMED:
                    self.received[mad[_ATTRIBUTE_ID]] += 1
                if dropped is not None and log.enabled:
                    log.CM.debug("from %s: dropped: %s", path, dropped.value)
            except Exception as error:
                self._end(agent, agent.machine.stepping or _addressed(agent, mad, path), error)

    def _undelivered(
        self, comm_id: int, transaction_id: int, is_path: Callable[[Any], bool], error: NetworkError, now: float
    ) -> None:
        if self._is_sending:  # the agent's step that sends is not over
            self._runtime.call_at(now, partial(self._undelivered, comm_id, transaction_id, is_path, error))
            return
        if log.enabled:
            log.CM.debug("not delivered: local id 0x%08x: %s", comm_id, errno_name(error.errno))
        agent = self._agent
        if agent is not None:
            agent.machine.stepping = None
            try:
                agent.unreachable(comm_id, transaction_id, is_path, error, now)
            except Exception as raised:
                self._end(agent, agent.machine.stepping, raised)

    def _end(self, agent: Agent, connection: CmConnection | None, error: Exception) -> None:
        """End the connection that an exception belongs to; None if it belongs to none."""
        errors = self._runtime.errors
        if connection is None:
            errors.report("connection", "a message or a timer of the connection manager has no effect", error)
            return
        comm_id = connection.comm_id
        errors.report("connection", f"the connection with communication id 0x{comm_id:08x} has ended", error)
        was_established = connection.state in _ESTABLISHED
        owner, connection.owner = connection.owner, None
        try:
            agent.destroy(comm_id, self._runtime.clock())
        except Exception as second:
            errors.report("connection", f"the peer of 0x{comm_id:08x} is not told", second)
            if connection.listener is not None:
                connection.listener.requests.discard(comm_id)
            agent.forget(connection)
        if owner is not None:
            try:
                owner.failed(connection, was_established)
            except Exception as second:
                errors.report("connection", f"the end of 0x{comm_id:08x} is not reported", second)

    def request_raised(self) -> None:
        """A call of the agent that makes a connection has raised: forget what it has made."""
        if self._agent is not None and self._agent.machine.stepping is not None:
            self._agent.forget(self._agent.machine.stepping)

    def close(self) -> None:
        """Drop every connection and listener, without notifying the peers."""
        self._closed_drops = self.dropped
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        self._listeners.clear()
        self._timer = None


def _log_message(verb: str, mad: Buffer, path: Hashable) -> None:
    try:
        message, _ = unpack_mad(mad)
    except WireError as error:
        log.CM.debug("%s %s: dropped: %s", verb, path, error)
        return
    fields = (("local", "local_comm_id"), ("remote", "remote_comm_id"), ("request", "request_id"))
    words = [f"{word} id 0x{value:08x}" for word, name in fields if (value := getattr(message, name, None)) is not None]
    if isinstance(message, REQ | SIDR_REQ):
        words.append(f"service 0x{message.service_id:x}")
    elif isinstance(message, REJ):
        words.append(f"reason {message.reason}")
    log.CM.debug("%s %s: %s %s", verb, path, type(message).__name__, ", ".join(words))


def _addressed(agent: Agent, mad: memoryview, path: Hashable) -> CmConnection | None:
    """The connection that a message is for, if it comes from its peer."""
    try:
        message, _ = unpack_mad(mad)
    except WireError:
        return None
    connection = agent.connection(getattr(message, "remote_comm_id", 0))
    return connection if connection is not None and connection.path == path else None
