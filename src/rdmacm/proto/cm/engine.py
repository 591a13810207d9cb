"""The communication manager of one device, without a network, a clock or a source of randomness of its own.

An :class:`Agent` is driven by the user's calls, by :meth:`Agent.mad_received`, :meth:`Agent.unreachable` and
:meth:`Agent.timer`. Each takes the time in seconds, of any clock that only goes forward. After each of them, the caller
fetches the output from :meth:`Agent.mads_to_send`, :meth:`Agent.events` and :meth:`Agent.next_deadline`.

A ``path`` identifies where a MAD came from or goes to. The engine does not interpret paths; it compares them, and takes
MADs for a connection from no other path than the connection's. Two paths must be equal if, and only if, they lead to
the same port of the same peer. (The UDP source port is not part of a path.)

No message from a peer raises an exception or makes anything grow without bounds: ``max_connections`` limits the
connections, a listener's ``backlog`` its unanswered requests, :data:`~rdmacm.proto.cm.timeouts.MAX_EXPONENT` timeouts.
Messages beyond a limit are dropped as if they were lost, so the peer tries again. ``dropped`` counts them by reason.

Calls raise :class:`~rdmacm.errors.CmStateError` if the state of the connection does not allow them, which includes
connections that have ended, and ValueError for a field that does not fit into the message.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from rdmacm.address import ALL_BITS_64
from rdmacm.errors import CmStateError, cm_error
from rdmacm.proto.cm import outgoing
from rdmacm.proto.cm.codes import MessageKind, RejectReason, SidrStatus
from rdmacm.proto.cm.connection import Accepts, CmConnection, CmListener, DropReason
from rdmacm.proto.cm.events import Event, NetworkError
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
    Message,
    pack_message,
    unpack_mad,
)
from rdmacm.proto.cm.registry import Connections, Listeners
from rdmacm.proto.cm.states import AWAITING_USER, RETRYING, TRANSITIONS, Action, CmState, CmTrigger
from rdmacm.proto.cm.timeouts import ack_timeout, seconds
from rdmacm.proto.entropy import RandomSource
from rdmacm.proto.wire import WireError

__all__ = ["Agent"]

#: Linux's timeout (an exponent) and retries for a SIDR_REQ. No field of the message holds them.
_SIDR_RESPONSE_TIMEOUT = 20
_SIDR_RETRIES = 15

_GUID_SIZE = 8


class Agent:
    """The connections and listeners of one node.

    ``guid`` is the CA GUID of requests and replies that the caller gives none. ``max_connections`` bounds the
    connections, including those in TIMEWAIT. ``mra_service_timeout`` is the exponent an MRA announces; None for an
    agent that sends no MRA. ``id_prefix`` is the upper byte of every communication id, where several agents share one
    QP 1 and the ids tell which of them a MAD is for; None for random ids of 32 bits.
    """

    def __init__(
        self,
        guid: int,
        random: RandomSource,
        *,
        max_connections: int = 65536,
        mra_service_timeout: int | None = 24,
        id_prefix: int | None = None,
    ) -> None:
        self.guid = guid
        self.max_connections = max_connections
        self._id_prefix = id_prefix
        #: MADs that had no effect or were only rejected, and reports of the network without effect, by reason.
        self.dropped: Counter[DropReason] = Counter()
        self._random = random
        self._mra_service_timeout = mra_service_timeout
        self._connections = Connections()
        self._listeners = Listeners()
        #: The (path, MAD) pairs that :meth:`mads_to_send` will return.
        self.outbox: list[tuple[Hashable, bytes]] = []
        #: The events that :meth:`events` will return.
        self.pending_events: list[Event] = []
        #: The connection with a local communication id, or None once it is gone.
        self.connection = self._connections.get
        #: Forgets a connection in whatever state it is, without a message or an event.
        self.forget = self._connections.remove
        #: The connection whose state was changed last, for a caller that catches an exception of the agent.
        self.stepping: CmConnection | None = None
        #: When :meth:`timer` has something to do, or None.
        self.next_deadline = self._connections.timers.next_deadline
        #: The deadlines of the timers that run, by local communication id.
        self.timers = self._connections.timers

    def __len__(self) -> int:
        """The number of connections, including those in TIMEWAIT."""
        return len(self._connections)

    # -- output -----------------------------------------------------------------------------------------------

    def mads_to_send(self) -> list[tuple[Hashable, bytes]]:
        """The (path, MAD) pairs to send, in order. Each is returned once."""
        mads, self.outbox = self.outbox, []
        return mads

    def events(self) -> list[Event]:
        """The events since the last call."""
        events, self.pending_events = self.pending_events, []
        return events

    # -- calls: listening -------------------------------------------------------------------------------------

    def listen(
        self, service_id: int, *, mask: int = ALL_BITS_64, backlog: int = 128, accepts: Accepts | None = None
    ) -> CmListener:
        """Take requests for the service ids equal to ``service_id`` under ``mask``; EADDRINUSE if it is taken.

        Among several masks that match a request, the one with the most bits wins. Several listeners may share a service
        id if each has ``accepts(request, path)``, which selects its requests. The first listener that accepts a request
        gets it; a request that none accepts is rejected.
        """
        listener = self._listeners.add(service_id, mask, backlog, accepts)
        if listener is None:
            raise cm_error(errno.EADDRINUSE, "the service id is taken", "listen", f"0x{service_id:x}")
        return listener

    def unlisten(self, listener: CmListener) -> None:
        """Take no more requests. Requests that the user has not answered yet can still be answered."""
        self._listeners.remove(listener)

    def delivered(self, comm_id: int) -> None:
        """The user has fetched a request, so it no longer counts in its listener's backlog."""
        connection = self._connections.get(comm_id)
        if connection is not None and connection.listener is not None and connection.state in AWAITING_USER:
            connection.listener.pending -= 1
            connection.listener = None

    # -- calls: connecting ------------------------------------------------------------------------------------

    def connect(self, path: Hashable, request: REQ, now: float, *, packet_life_time: int = 16) -> int:
        """Send a REQ and return the local communication id.

        Fills in the communication id and starting PSN of ``request``, and the CA GUID if it has none.
        """
        comm_id = self._new_comm_id("connect")
        request.local_comm_id = comm_id
        request.local_ca_guid = request.local_ca_guid or self.guid
        request.starting_psn = self._random.getrandbits(24)
        tid = self._new_transaction_id(comm_id)
        packed = pack_message(request, tid)
        connection = CmConnection(
            comm_id=comm_id,
            path=path,
            is_active=True,
            request=request,
            transaction_id=tid,
            starting_psn=request.starting_psn,
            local_guid=request.local_ca_guid,
            local_qpn=request.local_qpn,
            packet_life_time=packet_life_time,
            av_timeout=packet_life_time + 1,
            retry_interval=2 * seconds(packet_life_time) + seconds(request.remote_cm_response_timeout),
            retries=request.max_cm_retries,
        )
        self._connections.add(connection)
        self._step(connection, CmTrigger.CONNECT, now, packed=packed)
        return comm_id

    def accept(self, comm_id: int, reply: REP, now: float) -> None:
        """Answer a ConnectRequest with a REP. Fills in its ids and starting PSN, and the CA GUID if it has none."""
        connection = self._allowed(comm_id, CmTrigger.ACCEPT)
        reply.local_comm_id = comm_id
        reply.remote_comm_id = connection.remote_comm_id or 0
        reply.starting_psn = connection.starting_psn
        reply.local_ca_guid = reply.local_ca_guid or self.guid
        packed = pack_message(reply, connection.transaction_id)
        connection.reply = reply
        connection.local_guid = reply.local_ca_guid
        connection.local_qpn = reply.local_qpn
        self._step(connection, CmTrigger.ACCEPT, now, packed=packed)

    def reject(
        self,
        comm_id: int,
        now: float,
        reason: int = RejectReason.CONSUMER_DEFINED,
        private_data: bytes = b"",
        ari: bytes = b"",
    ) -> None:
        """Answer a ConnectRequest or a ConnectReply with a REJ; ``ari`` is the additional reject information."""
        connection = self._allowed(comm_id, CmTrigger.REJECT)
        packed = outgoing.rej(connection, reason, private_data, ari)
        self._step(connection, CmTrigger.REJECT, now, packed=packed)

    def send_rtu(self, comm_id: int, now: float, private_data: bytes = b"") -> None:
        """Answer a ConnectReply with an RTU: the connection is established."""
        connection = self._allowed(comm_id, CmTrigger.SEND_RTU)
        rtu = RTU(comm_id, connection.remote_comm_id or 0, private_data)
        connection.rtu_mad = pack_message(rtu, connection.transaction_id)
        self._step(connection, CmTrigger.SEND_RTU, now)

    def establish(self, comm_id: int, now: float) -> None:
        """Data has arrived before the RTU: the connection is established."""
        self._step(self._allowed(comm_id, CmTrigger.ESTABLISH), CmTrigger.ESTABLISH, now)

    def disconnect(self, comm_id: int, now: float, private_data: bytes = b"") -> None:
        """Send a DREQ, or the DREP that answers the peer's DREQ."""
        connection = self._allowed(comm_id, CmTrigger.DISCONNECT)
        packed = b""
        if connection.state is CmState.DREQ_RCVD:
            connection.drep_private_data = private_data
            packed = outgoing.drep(connection)
        elif connection.state is CmState.ESTABLISHED:
            packed = self._new_dreq(connection, private_data)
        self._step(connection, CmTrigger.DISCONNECT, now, packed=packed)

    def destroy(self, comm_id: int, now: float) -> None:
        """Give up a connection in any state. No more events are reported for it."""
        connection = self._connections.get(comm_id)
        if connection is not None:
            self._step(connection, CmTrigger.DESTROY, now)

    # -- calls: service id resolution (SIDR) ------------------------------------------------------------------

    def sidr_request(self, path: Hashable, request: SIDR_REQ, now: float) -> int:
        """Send a SIDR_REQ and return its request id, which is filled in."""
        comm_id = self._new_comm_id("sidr_request")
        request.request_id = comm_id
        tid = self._new_transaction_id(comm_id)
        packed = pack_message(request, tid)
        connection = CmConnection(
            comm_id=comm_id,
            path=path,
            is_active=True,
            request=request,
            transaction_id=tid,
            retry_interval=seconds(_SIDR_RESPONSE_TIMEOUT),
            retries=_SIDR_RETRIES,
        )
        self._connections.add(connection)
        self._step(connection, CmTrigger.RESOLVE, now, packed=packed)
        return comm_id

    def sidr_reply(self, comm_id: int, reply: SIDR_REP, now: float) -> None:
        """Answer a SidrRequest. Fills in the request id and service id of ``reply``."""
        connection = self._allowed(comm_id, CmTrigger.ANSWER)
        self._step(connection, CmTrigger.ANSWER, now, packed=outgoing.sidr_rep(connection, reply))

    # -- input ------------------------------------------------------------------------------------------------

    def timer(self, now: float) -> None:
        """Handle the timers that are due."""
        while (connection := self._connections.pop_due(now)) is not None:
            if connection.state not in RETRYING:
                trigger = CmTrigger.TIMEWAIT_OVER
            elif connection.retries_left > 0:
                trigger = CmTrigger.RETRY
            else:
                trigger = CmTrigger.EXHAUSTED
            self._step(connection, trigger, now)

    def mad_received(self, data: bytes | bytearray | memoryview, path: Hashable, now: float) -> DropReason | None:
        """Handle a MAD that arrived on ``path``; return why it had no effect or was only rejected, if so."""
        try:
            message, tid = unpack_mad(data)
        except WireError:
            self.dropped[DropReason.MALFORMED] += 1
            return DropReason.MALFORMED
        handler = _HANDLERS.get(type(message))
        drop = DropReason.UNSUPPORTED if handler is None else handler(self, message, tid, path, now)
        if drop is not None:
            self.dropped[drop] += 1
        return drop

    def unreachable(
        self, comm_id: int, transaction_id: int, is_path: Callable[[Any], bool], error: NetworkError, now: float
    ) -> None:
        """Handle the network's report that a REQ or SIDR_REQ of this agent was not delivered.

        The ids are those of the request. ``is_path(path)`` tells whether a path leads to where the request was sent.
        The report ends a connection that still waits for the first answer to this request, with the event Unreachable.
        Any other report is dropped and counted.
        """
        connection = self._connections.get(comm_id)
        if connection is None:
            self.dropped[DropReason.UNKNOWN] += 1
        elif not connection.is_active or connection.transaction_id != transaction_id:
            self.dropped[DropReason.WRONG_REPORT] += 1
        elif not is_path(connection.path):
            self.dropped[DropReason.WRONG_PATH] += 1
        elif not self._step(connection, CmTrigger.NETWORK_ERROR, now, message=error):
            self.dropped[DropReason.UNEXPECTED] += 1

    def _handle_req(self, req: REQ, tid: int, path: Hashable, now: float) -> DropReason | None:
        known = self._connections.of_peer(req.local_comm_id, req.local_ca_guid, path)
        if known is not None:
            return DropReason.UNEXPECTED if known.is_active else self._deliver(known, path, CmTrigger.REQ, now, req)
        qpn = outgoing.peer_qpn(req, req)
        old = self._connections.of_qpn(qpn, req.local_ca_guid, path)
        if old is not None:
            self._refuse(req, RejectReason.STALE_CONN, tid, path)
            self._step(old, CmTrigger.STALE, now)
            return DropReason.STALE
        found = self._find_listener(req, path)
        if isinstance(found, DropReason):
            if found is DropReason.NO_LISTENER:
                self._refuse(req, RejectReason.INVALID_SERVICE_ID, tid, path)
            elif found is DropReason.NO_MATCH:
                self._refuse(req, RejectReason.CONSUMER_DEFINED, tid, path)
            return found
        connection = CmConnection(self._new_comm_id(""), path, False, req, tid, listener=found)
        connection.starting_psn = self._random.getrandbits(24)
        connection.remote_comm_id = req.local_comm_id
        connection.remote_guid = req.local_ca_guid
        connection.remote_qpn = qpn
        connection.av_timeout = req.primary.local_ack_timeout
        connection.retry_interval = seconds(req.local_cm_response_timeout)
        connection.retries = req.max_cm_retries
        self._connections.add(connection)
        self._step(connection, CmTrigger.REQ, now, message=req)
        if self._mra_service_timeout is not None:
            self._step(connection, CmTrigger.ALLOW_MRA, now)
        return None

    def _handle_rep(self, rep: REP, _: int, path: Hashable, now: float) -> DropReason | None:
        connection = self._connections.get(rep.remote_comm_id)
        if connection is None or not connection.is_active or isinstance(connection.request, SIDR_REQ):
            return DropReason.UNKNOWN
        if connection.remote_comm_id is not None:
            if (connection.remote_comm_id, connection.remote_guid) != (rep.local_comm_id, rep.local_ca_guid):
                return DropReason.UNKNOWN
            return self._deliver(connection, path, CmTrigger.REP, now, rep)
        if connection.path != path:
            return DropReason.WRONG_PATH
        if TRANSITIONS[connection.state].get(CmTrigger.REP) is None:
            return DropReason.UNEXPECTED
        qpn = outgoing.peer_qpn(connection.request, rep)
        old = self._connections.of_qpn(qpn, rep.local_ca_guid, path)
        if old is not None:
            self._step(connection, CmTrigger.REP_STALE, now, message=rep)
            self._step(old, CmTrigger.STALE, now)
            return DropReason.STALE
        if self._connections.of_peer(rep.local_comm_id, rep.local_ca_guid, path) is not None:
            return DropReason.UNEXPECTED
        connection.remote_comm_id = rep.local_comm_id
        connection.remote_guid = rep.local_ca_guid
        connection.remote_qpn = qpn
        connection.reply = rep
        connection.av_timeout = ack_timeout(rep.target_ack_delay, connection.packet_life_time)
        self._connections.add_remote(connection)
        self._step(connection, CmTrigger.REP, now, message=rep)
        if self._mra_service_timeout is not None:
            self._step(connection, CmTrigger.ALLOW_MRA, now)
        return None

    def _handle_rej(self, rej: REJ, _: int, path: Hashable, now: float) -> DropReason | None:
        connection = None
        if rej.reason == RejectReason.TIMEOUT and rej.reject_info_length >= _GUID_SIZE:
            # A peer that gives up may not know our communication id. Its own id and its GUID identify the connection.
            guid = int.from_bytes(rej.ari[:_GUID_SIZE], "big")
            connection = self._connections.of_peer(rej.local_comm_id, guid, path)
            if connection is not None and rej.remote_comm_id not in (0, connection.comm_id):
                return DropReason.UNKNOWN
        if connection is None and rej.message_rejected == MessageKind.REQ:
            connection = self._find_requesting(rej.remote_comm_id)
        if connection is None:
            connection = self._find(rej)
        trigger = CmTrigger.REJ_STALE if rej.reason == RejectReason.STALE_CONN else CmTrigger.REJ
        return self._deliver(connection, path, trigger, now, rej)

    def _handle_mra(self, mra: MRA, _: int, path: Hashable, now: float) -> DropReason | None:
        if mra.message_mraed == MessageKind.REQ:
            return self._deliver(self._find_requesting(mra.remote_comm_id), path, CmTrigger.MRA_REQ, now, mra)
        if mra.message_mraed == MessageKind.REP:
            return self._deliver(self._find(mra), path, CmTrigger.MRA_REP, now, mra)
        return DropReason.UNSUPPORTED

    def _handle_rtu(self, rtu: RTU, _: int, path: Hashable, now: float) -> DropReason | None:
        return self._deliver(self._find(rtu), path, CmTrigger.RTU, now, rtu)

    def _handle_dreq(self, dreq: DREQ, tid: int, path: Hashable, now: float) -> DropReason | None:
        connection = self._find(dreq)
        if connection is None:
            self.outbox.append((path, pack_message(DREP(dreq.remote_comm_id, dreq.local_comm_id), tid)))
            return DropReason.UNKNOWN
        if connection.path == path:
            if dreq.remote_qpn_eecn != connection.local_qpn:
                return DropReason.WRONG_QPN
            connection.dreq_transaction_id = tid
        return self._deliver(connection, path, CmTrigger.DREQ, now, dreq)

    def _handle_drep(self, drep: DREP, _: int, path: Hashable, now: float) -> DropReason | None:
        return self._deliver(self._find(drep), path, CmTrigger.DREP, now, drep)

    def _handle_sidr_req(self, req: SIDR_REQ, tid: int, path: Hashable, now: float) -> DropReason | None:
        known = self._connections.of_peer(req.request_id, None, path)
        if known is not None:
            return self._deliver(known, path, CmTrigger.SIDR_REQ, now, req)
        found = self._find_listener(req, path)
        if isinstance(found, DropReason):
            if found in (DropReason.NO_LISTENER, DropReason.NO_MATCH):
                status = SidrStatus.UNSUPPORTED if found is DropReason.NO_LISTENER else SidrStatus.REJECT
                reply = SIDR_REP(request_id=req.request_id, status=status, service_id=req.service_id)
                self.outbox.append((path, pack_message(reply, tid)))
            return found
        connection = CmConnection(self._new_comm_id(""), path, False, req, tid, listener=found)
        connection.remote_comm_id = req.request_id
        self._connections.add(connection)
        self._step(connection, CmTrigger.SIDR_REQ, now, message=req)
        return None

    def _handle_sidr_rep(self, rep: SIDR_REP, _: int, path: Hashable, now: float) -> DropReason | None:
        return self._deliver(self._connections.get(rep.request_id), path, CmTrigger.SIDR_REP, now, rep)

    def _find(self, message: RTU | DREQ | DREP | REJ | MRA) -> CmConnection | None:
        """The connection that both communication ids of a message belong to."""
        connection = self._connections.get(message.remote_comm_id)
        if connection is None or connection.remote_comm_id != message.local_comm_id:
            return None
        return connection

    def _find_requesting(self, comm_id: int) -> CmConnection | None:
        """The connection that has sent a REQ and does not know the peer's communication id yet."""
        connection = self._connections.get(comm_id)
        if connection is None or not connection.is_active or connection.remote_comm_id is not None:
            return None
        return connection

    def _find_listener(self, request: REQ | SIDR_REQ, path: Hashable) -> CmListener | DropReason:
        listeners = self._listeners.find(request.service_id)
        if not listeners:
            return DropReason.NO_LISTENER
        for listener in listeners:
            if listener.accepts is None or listener.accepts(request, path):
                if listener.pending >= listener.backlog:
                    return DropReason.BACKLOG
                return DropReason.FULL if len(self._connections) >= self.max_connections else listener
        return DropReason.NO_MATCH

    def _refuse(self, req: REQ, reason: RejectReason, tid: int, path: Hashable) -> None:
        """Send a REJ without creating a connection."""
        self.outbox.append((path, pack_message(REJ(0, req.local_comm_id, MessageKind.REQ, reason), tid)))

    def _deliver(
        self, connection: CmConnection | None, path: Hashable, trigger: CmTrigger, now: float, message: Message
    ) -> DropReason | None:
        """Pass a message to the state machine of its connection, if it came on the connection's path."""
        if connection is None:
            return DropReason.UNKNOWN
        if connection.path != path:
            return DropReason.WRONG_PATH
        return None if self._step(connection, trigger, now, message=message) else DropReason.UNEXPECTED

    # -- the state machine ------------------------------------------------------------------------------------

    def _step(
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
        for action in transition.actions:
            report = outgoing.REPORTS.get(action)
            if report is None:
                self._perform(connection, action, now, message, packed)
            elif not connection.is_muted:
                self.pending_events.append(report(connection, trigger, message))
        connection.state = after
        if after is before:
            return True
        if connection.listener is not None:
            connection.listener.pending += (after in AWAITING_USER) - (before in AWAITING_USER)
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
                connection.unanswered_mad = packed or self._new_dreq(connection)
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
                self._send(connection, outgoing.rej_timeout(connection, connection.local_guid or self.guid))
            case Action.SEND_REJ_STALE if isinstance(message, REQ | REP):
                self._send(connection, outgoing.rej_stale(connection, message))
            case Action.SEND_DREQ_ONCE:
                self._send(connection, self._new_dreq(connection))
            case Action.SEND_SIDR_REP:
                rejection = SIDR_REP(status=SidrStatus.REJECT)
                self._send(connection, packed or outgoing.sidr_rep(connection, rejection))
            case Action.EXTEND_WAIT if isinstance(message, MRA):
                if not connection.was_extended:
                    connection.was_extended = True
                    wait = seconds(message.service_timeout) + seconds(connection.av_timeout)
                    self._connections.set_timer(connection, now + wait)

    def _send(self, connection: CmConnection, mad: bytes) -> None:
        self.outbox.append((connection.path, mad))

    def _send_unanswered(self, connection: CmConnection, now: float) -> None:
        connection.was_extended = False
        self.outbox.append((connection.path, connection.unanswered_mad))
        self._connections.set_timer(connection, now + connection.retry_interval)

    def _allowed(self, comm_id: int, call: CmTrigger) -> CmConnection:
        """The connection of a call; CmStateError if its state does not allow the call."""
        connection = self._connections.get(comm_id)
        state = connection.state if connection is not None else CmState.IDLE
        if connection is None or TRANSITIONS[state].get(call) is None:
            raise CmStateError(errno.EINVAL, f"not possible in state {state.value}", call.value, f"0x{comm_id:08x}")
        return connection

    # -- new ids ----------------------------------------------------------------------------------------------

    def _new_dreq(self, connection: CmConnection, private_data: bytes = b"") -> bytes:
        tid = connection.transaction_id
        while tid == connection.transaction_id:
            tid = self._new_transaction_id(connection.comm_id)
        return outgoing.dreq(connection, tid, private_data)

    def _new_comm_id(self, step: str) -> int:
        if len(self._connections) >= self.max_connections:
            raise cm_error(
                errno.ENOMEM,
                f"the limit of {self.max_connections} connections is reached",
                step,
                hint="fewer connections at a time; one that has ended counts until its TIMEWAIT is over",
            )
        return self._connections.free_id(self._random, self._id_prefix)

    def _new_transaction_id(self, comm_id: int) -> int:
        return comm_id << 32 | self._random.getrandbits(32)


#: The handler of each message. LAP and APR have none: loading an alternate path is not supported.
_HANDLERS: dict[type[Message], Callable[[Agent, Any, int, Hashable, float], DropReason | None]] = {
    REQ: Agent._handle_req,
    REP: Agent._handle_rep,
    REJ: Agent._handle_rej,
    MRA: Agent._handle_mra,
    RTU: Agent._handle_rtu,
    DREQ: Agent._handle_dreq,
    DREP: Agent._handle_drep,
    SIDR_REQ: Agent._handle_sidr_req,
    SIDR_REP: Agent._handle_sidr_rep,
}
