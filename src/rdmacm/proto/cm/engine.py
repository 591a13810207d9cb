"""The communication manager of one device, without a network, a clock or a source of randomness of its own.

An :class:`Agent` is driven by the user's calls, by :meth:`Agent.mad_received` and by :meth:`Agent.timer`, each with
the time as seconds of any clock that only goes forward. What it wants comes out of :meth:`Agent.mads_to_send`,
:meth:`Agent.next_deadline` and :meth:`Agent.events`, to be asked for after each of them.

A ``path`` says where a MAD came from or goes to. The engine never looks into it but gives it back, and takes MADs
for a connection from no other path: two paths must be equal if, and only if, they lead to the same port of the
same peer. (A UDP source port is no part of one.)

Nothing a peer sends raises, and nothing a peer sends grows without bounds: not the connections (``max_connections``),
not the requests a listener has not answered (its ``backlog``), not the time a connection waits
(:data:`~rdmacm.proto.cm.timeouts.LONGEST`). What is over is dropped in silence, as a packet the network lost would
be, so that the peer tries again. ``dropped`` counts all of it.

Calls raise :class:`~rdmacm.errors.CmStateError` where the connection's state does not allow them, which includes
connections that have meanwhile ended, and ValueError for what does not fit into the message.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from rdmacm.address import ALL_BITS_64
from rdmacm.errors import CmStateError, cm_error
from rdmacm.proto.cm.connection import Accepts, Connection, Drop, Listener
from rdmacm.proto.cm.events import (
    ConnectReply,
    ConnectRequest,
    Disconnected,
    DisconnectRequested,
    Established,
    Event,
    Rejected,
    SidrReply,
    SidrRequest,
    TimewaitExit,
    Unreachable,
)
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
    MessageKind,
    RejectReason,
    SidrStatus,
    TransportService,
    pack_message,
    unpack_mad,
)
from rdmacm.proto.cm.states import RETRYING, THINKING, TRANSITIONS, Do, Input, State
from rdmacm.proto.cm.tables import Connections, Listeners
from rdmacm.proto.cm.timeouts import ack_timeout, seconds
from rdmacm.proto.wire import WireError

__all__ = ["Agent", "RandomSource"]

#: How a SIDR_REQ is repeated, which nothing in it says; Linux's numbers.
_SIDR_RESPONSE_TIMEOUT = 20
_SIDR_RETRIES = 15

_GUID_SIZE = 8

_REJECTS = {
    State.REQ_RCVD: MessageKind.REQ,
    State.MRA_REQ_SENT: MessageKind.REQ,
    State.REP_RCVD: MessageKind.REP,
    State.MRA_REP_SENT: MessageKind.REP,
}


class RandomSource(Protocol):
    """Where unpredictable numbers come from: ``random.SystemRandom()`` is one."""

    def getrandbits(self, k: int, /) -> int: ...


class Agent:
    """The connections and listeners of one node, whose GUID is ``guid`` unless a message brings another device's.

    ``mra_service_timeout`` is the exponent an MRA promises an answer within, or None for an agent that sends none.
    ``id_prefix`` is the upper byte of every communication id, where several agents share one QP 1 and the ids say
    whose a MAD is; None for ids that are random in all their bits.
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
        self.dropped: Counter[Drop] = Counter()
        self._random = random
        self._mra_service_timeout = mra_service_timeout
        self._connections = Connections()
        self._listeners = Listeners()
        #: What :meth:`mads_to_send` and :meth:`events` will hand out.
        self.outbox: list[tuple[Hashable, bytes]] = []
        self.news: list[Event] = []
        #: A connection by its local communication id, or None once it is forgotten.
        self.connection = self._connections.get
        #: When :meth:`timer` may have something to do: (time, communication id) as a heap. The first is no later than
        #: :meth:`next_deadline`, and quicker to look at.
        self.timers = self._connections.timers
        #: When :meth:`timer` has something to do, or None.
        self.next_deadline = self._connections.next_deadline

    # -- what comes out ---------------------------------------------------------------------------------------

    def mads_to_send(self) -> list[tuple[Hashable, bytes]]:
        """(path, MAD) to be sent, in order; they are handed out once."""
        mads, self.outbox = self.outbox, []
        return mads

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self.news = self.news, []
        return events

    def __len__(self) -> int:
        """How many connections there are, those in TIMEWAIT included."""
        return len(self._connections)

    # -- calls: listening -------------------------------------------------------------------------------------

    def listen(
        self, service_id: int, *, mask: int = ALL_BITS_64, backlog: int = 128, accepts: Accepts | None = None
    ) -> Listener:
        """Take requests for the service ids equal to ``service_id`` under ``mask``; EADDRINUSE if somebody does.

        Among several masks that fit a request, the one with the most bits wins. Several listeners may have the same
        service id if each says by ``accepts(request, path)`` which requests are for it; the first that does gets the
        request, and one that is for none of them is rejected.
        """
        listener = self._listeners.add(service_id, mask, backlog, accepts)
        if listener is None:
            raise cm_error(errno.EADDRINUSE, "the service id is taken", "listen", f"0x{service_id:x}")
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Take no more requests; those that wait for an answer still may have one."""
        self._listeners.remove(listener)

    def delivered(self, comm_id: int) -> None:
        """The user has a request in hand: it counts no longer against its listener's backlog."""
        connection = self._connections.get(comm_id)
        if connection is not None and connection.listener is not None and connection.state in THINKING:
            connection.listener.pending -= 1
            connection.listener = None

    # -- calls: connecting ------------------------------------------------------------------------------------

    def connect(self, path: Hashable, request: REQ, now: float, *, packet_life_time: int = 16) -> int:
        """Send a REQ and return the local communication id.

        Communication id and starting PSN of ``request`` are filled in here, and its CA GUID where it has none.
        """
        comm_id = self._new_comm_id("connect")
        request.local_comm_id = comm_id
        request.local_ca_guid = request.local_ca_guid or self.guid
        request.starting_psn = self._random.getrandbits(24)
        tid = self._new_transaction_id(comm_id)
        packed = pack_message(request, tid)
        connection = Connection(
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
            interval=2 * seconds(packet_life_time) + seconds(request.remote_cm_response_timeout),
            retries=request.max_cm_retries,
        )
        self._connections.add(connection)
        self._step(connection, Input.CONNECT, now, packed=packed)
        return comm_id

    def accept(self, comm_id: int, reply: REP, now: float) -> None:
        """Answer a ConnectRequest with a REP; its ids and starting PSN are filled in here, the CA GUID if missing."""
        connection = self._allowed(comm_id, Input.ACCEPT)
        reply.local_comm_id = comm_id
        reply.remote_comm_id = connection.remote_comm_id or 0
        reply.starting_psn = connection.starting_psn
        reply.local_ca_guid = reply.local_ca_guid or self.guid
        packed = pack_message(reply, connection.transaction_id)
        connection.reply = reply
        connection.local_guid = reply.local_ca_guid
        connection.local_qpn = reply.local_qpn
        self._step(connection, Input.ACCEPT, now, packed=packed)

    def reject(
        self,
        comm_id: int,
        now: float,
        reason: int = RejectReason.CONSUMER_DEFINED,
        private_data: bytes = b"",
        ari: bytes = b"",
    ) -> None:
        """Answer a ConnectRequest or a ConnectReply with a REJ."""
        connection = self._allowed(comm_id, Input.REJECT)
        packed = pack_message(self._rej(connection, reason, private_data, ari), connection.transaction_id)
        self._step(connection, Input.REJECT, now, packed=packed)

    def send_rtu(self, comm_id: int, now: float, private_data: bytes = b"") -> None:
        """Answer a ConnectReply with an RTU: the connection is established."""
        connection = self._allowed(comm_id, Input.SEND_RTU)
        rtu = RTU(comm_id, connection.remote_comm_id or 0, private_data)
        connection.rtu = pack_message(rtu, connection.transaction_id)
        self._step(connection, Input.SEND_RTU, now)

    def establish(self, comm_id: int, now: float) -> None:
        """Data has come for a connection that waits for its RTU, which is then established."""
        self._step(self._allowed(comm_id, Input.ESTABLISH), Input.ESTABLISH, now)

    def disconnect(self, comm_id: int, now: float, private_data: bytes = b"") -> None:
        """Send a DREQ, or the DREP that answers the peer's."""
        connection = self._allowed(comm_id, Input.DISCONNECT)
        packed = b""
        if connection.state is State.DREQ_RCVD:
            connection.drep_private_data = private_data
            packed = self._drep(connection)
        elif connection.state is State.ESTABLISHED:
            packed = self._dreq(connection, private_data)
        self._step(connection, Input.DISCONNECT, now, packed=packed)

    def destroy(self, comm_id: int, now: float) -> None:
        """Be done with a connection in whatever state it is; no event about it comes any more."""
        connection = self._connections.get(comm_id)
        if connection is not None:
            self._step(connection, Input.DESTROY, now)

    # -- calls: datagrams -------------------------------------------------------------------------------------

    def sidr_request(self, path: Hashable, request: SIDR_REQ, now: float) -> int:
        """Send a SIDR_REQ and return its request id, which is filled in here."""
        comm_id = self._new_comm_id("sidr_request")
        request.request_id = comm_id
        tid = self._new_transaction_id(comm_id)
        packed = pack_message(request, tid)
        connection = Connection(
            comm_id=comm_id,
            path=path,
            is_active=True,
            request=request,
            transaction_id=tid,
            interval=seconds(_SIDR_RESPONSE_TIMEOUT),
            retries=_SIDR_RETRIES,
        )
        self._connections.add(connection)
        self._step(connection, Input.RESOLVE, now, packed=packed)
        return comm_id

    def sidr_reply(self, comm_id: int, reply: SIDR_REP, now: float) -> None:
        """Answer a SidrRequest; request id and service id are filled in here."""
        connection = self._allowed(comm_id, Input.ANSWER)
        packed = pack_message(self._sidr_rep(connection, reply), connection.transaction_id)
        self._step(connection, Input.ANSWER, now, packed=packed)

    # -- what comes in ----------------------------------------------------------------------------------------

    def timer(self, now: float) -> None:
        """Do what is due."""
        while (connection := self._connections.take_due(now)) is not None:
            if connection.state not in RETRYING:
                what = Input.TIMEWAIT_OVER
            elif connection.retries_left > 0:
                what = Input.RETRY
            else:
                what = Input.EXHAUSTED
            self._step(connection, what, now)

    def mad_received(self, data: bytes | bytearray | memoryview, path: Hashable, now: float) -> None:
        """Take in a MAD that came over ``path``."""
        try:
            message, tid = unpack_mad(data)
        except WireError:
            self.dropped[Drop.MALFORMED] += 1
            return
        take = _TAKES.get(type(message))
        drop = Drop.UNSUPPORTED if take is None else take(self, message, tid, path, now)
        if drop is not None:
            self.dropped[drop] += 1

    def _mra(self, mra: MRA, _: int, path: Hashable, now: float) -> Drop | None:
        if mra.message_mraed == MessageKind.REQ:
            return self._arrive(self._asking(mra.remote_comm_id), path, Input.MRA_REQ, now, mra)
        if mra.message_mraed == MessageKind.REP:
            return self._arrive(self._find(mra), path, Input.MRA_REP, now, mra)
        return Drop.UNSUPPORTED

    def _rtu(self, rtu: RTU, _: int, path: Hashable, now: float) -> Drop | None:
        return self._arrive(self._find(rtu), path, Input.RTU, now, rtu)

    def _drep_received(self, drep: DREP, _: int, path: Hashable, now: float) -> Drop | None:
        return self._arrive(self._find(drep), path, Input.DREP, now, drep)

    def _sidr_rep_received(self, rep: SIDR_REP, _: int, path: Hashable, now: float) -> Drop | None:
        return self._arrive(self._connections.get(rep.request_id), path, Input.SIDR_REP, now, rep)

    def _find(self, message: RTU | DREQ | DREP | REJ | MRA) -> Connection | None:
        """The connection both ids agree on."""
        connection = self._connections.get(message.remote_comm_id)
        if connection is None or connection.remote_comm_id != message.local_comm_id:
            return None
        return connection

    def _asking(self, comm_id: int) -> Connection | None:
        """The connection that has sent a REQ and knows nothing of the peer yet."""
        connection = self._connections.get(comm_id)
        if connection is None or not connection.is_active or connection.remote_comm_id is not None:
            return None
        return connection

    def _arrive(
        self, connection: Connection | None, path: Hashable, what: Input, now: float, message: Message
    ) -> Drop | None:
        if connection is None:
            return Drop.UNKNOWN
        if connection.path != path:
            return Drop.WRONG_PATH
        return None if self._step(connection, what, now, message=message) else Drop.UNEXPECTED

    def _req(self, req: REQ, tid: int, path: Hashable, now: float) -> Drop | None:
        known = self._connections.of_peer(req.local_comm_id, req.local_ca_guid, path)
        if known is not None:
            return Drop.UNEXPECTED if known.is_active else self._arrive(known, path, Input.REQ, now, req)
        qpn = self._peer_qpn(req, req)
        old = self._connections.of_qpn(qpn, req.local_ca_guid, path)
        if old is not None:
            self._refuse(req, RejectReason.STALE_CONN, tid, path)
            self._step(old, Input.STALE, now)
            return Drop.STALE
        found = self._admit(req, path)
        if isinstance(found, Drop):
            if found in (Drop.NO_LISTENER, Drop.NO_MATCH):
                no_one = found is Drop.NO_LISTENER
                reason = RejectReason.INVALID_SERVICE_ID if no_one else RejectReason.CONSUMER_DEFINED
                self._refuse(req, reason, tid, path)
            return found
        connection = self._take_in(req, tid, path, found)
        connection.starting_psn = self._random.getrandbits(24)
        connection.remote_comm_id = req.local_comm_id
        connection.remote_guid = req.local_ca_guid
        connection.remote_qpn = qpn
        connection.av_timeout = req.primary.local_ack_timeout
        connection.interval = seconds(req.local_cm_response_timeout)
        connection.retries = req.max_cm_retries
        self._connections.add(connection)
        self._step(connection, Input.REQ, now, message=req)
        if self._mra_service_timeout is not None:
            self._step(connection, Input.THINK, now)
        return None

    def _rep(self, rep: REP, _: int, path: Hashable, now: float) -> Drop | None:
        connection = self._connections.get(rep.remote_comm_id)
        if connection is None or not connection.is_active or isinstance(connection.request, SIDR_REQ):
            return Drop.UNKNOWN
        if connection.remote_comm_id is not None:
            if (connection.remote_comm_id, connection.remote_guid) != (rep.local_comm_id, rep.local_ca_guid):
                return Drop.UNKNOWN
            return self._arrive(connection, path, Input.REP, now, rep)
        if connection.path != path:
            return Drop.WRONG_PATH
        if TRANSITIONS[connection.state].get(Input.REP) is None:
            return Drop.UNEXPECTED
        qpn = self._peer_qpn(connection.request, rep)
        old = self._connections.of_qpn(qpn, rep.local_ca_guid, path)
        if old is not None:
            self._step(connection, Input.REP_STALE, now, message=rep)
            self._step(old, Input.STALE, now)
            return Drop.STALE
        if self._connections.of_peer(rep.local_comm_id, rep.local_ca_guid, path) is not None:
            return Drop.UNEXPECTED
        connection.remote_comm_id = rep.local_comm_id
        connection.remote_guid = rep.local_ca_guid
        connection.remote_qpn = qpn
        connection.reply = rep
        connection.av_timeout = ack_timeout(rep.target_ack_delay, connection.packet_life_time)
        self._connections.learned(connection)
        self._step(connection, Input.REP, now, message=rep)
        if self._mra_service_timeout is not None:
            self._step(connection, Input.THINK, now)
        return None

    def _rejected(self, rej: REJ, _: int, path: Hashable, now: float) -> Drop | None:
        connection = None
        if rej.reason == RejectReason.TIMEOUT and rej.reject_info_length >= _GUID_SIZE:
            # A peer that gives up may know nothing of this side but where it sent its REQ.
            guid = int.from_bytes(rej.ari[:_GUID_SIZE], "big")
            connection = self._connections.of_peer(rej.local_comm_id, guid, path)
            if connection is not None and rej.remote_comm_id not in (0, connection.comm_id):
                return Drop.UNKNOWN
        if connection is None and rej.message_rejected == MessageKind.REQ:
            connection = self._asking(rej.remote_comm_id)
        if connection is None:
            connection = self._find(rej)
        what = Input.REJ_STALE if rej.reason == RejectReason.STALE_CONN else Input.REJ
        return self._arrive(connection, path, what, now, rej)

    def _dreq_received(self, dreq: DREQ, tid: int, path: Hashable, now: float) -> Drop | None:
        connection = self._find(dreq)
        if connection is None:
            self._send(path, pack_message(DREP(dreq.remote_comm_id, dreq.local_comm_id), tid))
            return Drop.UNKNOWN
        if connection.path == path:
            if dreq.remote_qpn_eecn != connection.local_qpn:
                return Drop.WRONG_QPN
            connection.dreq_transaction_id = tid
        return self._arrive(connection, path, Input.DREQ, now, dreq)

    def _sidr_req(self, req: SIDR_REQ, tid: int, path: Hashable, now: float) -> Drop | None:
        known = self._connections.of_peer(req.request_id, None, path)
        if known is not None:
            return self._arrive(known, path, Input.SIDR_REQ, now, req)
        found = self._admit(req, path)
        if isinstance(found, Drop):
            if found in (Drop.NO_LISTENER, Drop.NO_MATCH):
                status = SidrStatus.UNSUPPORTED if found is Drop.NO_LISTENER else SidrStatus.REJECT
                reply = SIDR_REP(request_id=req.request_id, status=status, service_id=req.service_id)
                self._send(path, pack_message(reply, tid))
            return found
        connection = self._take_in(req, tid, path, found)
        connection.remote_comm_id = req.request_id
        self._connections.add(connection)
        self._step(connection, Input.SIDR_REQ, now, message=req)
        return None

    def _admit(self, request: REQ | SIDR_REQ, path: Hashable) -> Listener | Drop:
        """Who takes a request, or why nobody does."""
        listeners = self._listeners.find(request.service_id)
        if not listeners:
            return Drop.NO_LISTENER
        for listener in listeners:
            if listener.accepts is None or listener.accepts(request, path):
                return self._no_room(listener) or listener
        return Drop.NO_MATCH

    def _take_in(self, request: REQ | SIDR_REQ, tid: int, path: Hashable, listener: Listener) -> Connection:
        return Connection(
            comm_id=self._new_comm_id(""),
            path=path,
            is_active=False,
            request=request,
            transaction_id=tid,
            listener=listener,
        )

    def _refuse(self, req: REQ, reason: RejectReason, tid: int, path: Hashable) -> None:
        """A REJ that leaves nothing behind."""
        self._send(path, pack_message(REJ(0, req.local_comm_id, MessageKind.REQ, reason), tid))

    # -- the machine ------------------------------------------------------------------------------------------

    def _step(
        self,
        connection: Connection,
        what: Input,
        now: float,
        *,
        message: Message | None = None,
        packed: bytes = b"",
    ) -> bool:
        """Follow the table. ``packed`` is the MAD a call wants sent, ``message`` what has arrived."""
        before = connection.state
        step = TRANSITIONS[before].get(what)
        if step is None:
            return False
        after = step.state
        if after is not before:
            connection.deadline = None
        for action in step.actions:
            tell = _TELLS.get(action)
            if tell is None:
                self._do(connection, action, now, message, packed)
            elif not connection.is_hushed:
                self.news.append(tell(connection, what, message))
        connection.state = after
        if after is before:
            return True
        if connection.listener is not None:
            connection.listener.pending += (after in THINKING) - (before in THINKING)
        if after is State.TIMEWAIT:
            # Its own timewait may be over sooner than this one.
            self._connections.release_qpn(connection)
            self._connections.arm(connection, now + seconds(connection.av_timeout))
        elif after is State.IDLE:
            self._connections.remove(connection)
        return True

    def _do(self, connection: Connection, action: Do, now: float, message: Message | None, packed: bytes) -> None:
        path, tid = connection.path, connection.transaction_id
        match action:
            case Do.SEND_REQ | Do.SEND_REP | Do.SEND_DREQ | Do.SEND_SIDR_REQ:
                connection.pending = packed or self._dreq(connection)
                connection.retries_left = connection.retries
                self._send_pending(connection, now)
            case Do.HUSH:
                connection.is_hushed = True
            case Do.SEND_RTU:
                self.outbox.append((path, connection.rtu))
            case Do.SEND_DREP:
                self.outbox.append((path, packed or self._drep(connection)))
            case Do.SEND_AGAIN:
                connection.retries_left -= 1
                self._send_pending(connection, now)
            case Do.SEND_MRA:
                kind = MessageKind.REP if connection.is_active else MessageKind.REQ
                promise = self._mra_service_timeout or 0
                mra = MRA(connection.comm_id, connection.remote_comm_id or 0, kind, promise)
                self._send(path, pack_message(mra, tid))
            case Do.SEND_REJ:
                rej = self._rej(connection, RejectReason.CONSUMER_DEFINED)
                self._send(path, packed or pack_message(rej, tid))
            case Do.SEND_REJ_TIMEOUT:
                guid = (connection.local_guid or self.guid).to_bytes(_GUID_SIZE, "big")
                self._send(path, pack_message(self._rej(connection, RejectReason.TIMEOUT, ari=guid), tid))
            case Do.SEND_REJ_STALE if isinstance(message, REQ):
                self._refuse(message, RejectReason.STALE_CONN, tid, path)
            case Do.SEND_REJ_STALE if isinstance(message, REP):
                rej = REJ(connection.comm_id, message.local_comm_id, MessageKind.REP, RejectReason.STALE_CONN)
                self._send(path, pack_message(rej, tid))
            case Do.SEND_DREQ_ONCE:
                self._send(path, self._dreq(connection))
            case Do.SEND_SIDR_REP:
                rejection = self._sidr_rep(connection, SIDR_REP(status=SidrStatus.REJECT))
                self._send(path, packed or pack_message(rejection, tid))
            case Do.EXTEND if isinstance(message, MRA):
                if not connection.was_extended:
                    connection.was_extended = True
                    wait = seconds(message.service_timeout) + seconds(connection.av_timeout)
                    self._connections.arm(connection, now + wait)

    def _allowed(self, comm_id: int, call: Input) -> Connection:
        connection = self._connections.get(comm_id)
        state = connection.state if connection is not None else State.IDLE
        if connection is None or TRANSITIONS[state].get(call) is None:
            raise CmStateError(errno.EINVAL, f"not possible in state {state.value}", call.value, f"0x{comm_id:08x}")
        return connection

    # -- messages ---------------------------------------------------------------------------------------------

    def _rej(self, connection: Connection, reason: int, private_data: bytes = b"", ari: bytes = b"") -> REJ:
        return REJ(
            local_comm_id=0 if connection.state is State.REQ_RCVD else connection.comm_id,
            remote_comm_id=connection.remote_comm_id or 0,
            message_rejected=_REJECTS.get(connection.state, MessageKind.OTHER),
            reason=reason,
            reject_info_length=len(ari),
            ari=ari,
            private_data=private_data,
        )

    def _dreq(self, connection: Connection, private_data: bytes = b"") -> bytes:
        tid = connection.transaction_id
        while tid == connection.transaction_id:
            tid = self._new_transaction_id(connection.comm_id)
        remote = connection.remote_comm_id or 0
        return pack_message(DREQ(connection.comm_id, remote, connection.remote_qpn or 0, private_data), tid)

    def _drep(self, connection: Connection) -> bytes:
        drep = DREP(connection.comm_id, connection.remote_comm_id or 0, connection.drep_private_data)
        return pack_message(drep, connection.dreq_transaction_id)

    def _sidr_rep(self, connection: Connection, reply: SIDR_REP) -> SIDR_REP:
        reply.request_id = connection.remote_comm_id or 0
        reply.service_id = connection.request.service_id
        return reply

    @staticmethod
    def _peer_qpn(request: REQ, told: REQ | REP) -> int:
        # The passive side of an XRC connection has its number in the EE context field.
        if isinstance(told, REP) and request.transport_service_type == TransportService.EXTENDED:
            return told.local_eecn
        return told.local_qpn

    def _send(self, path: Hashable, mad: bytes) -> None:
        self.outbox.append((path, mad))

    def _send_pending(self, connection: Connection, now: float) -> None:
        connection.was_extended = False
        self.outbox.append((connection.path, connection.pending))
        self._connections.arm(connection, now + connection.interval)

    # -- names and room ---------------------------------------------------------------------------------------

    def _new_comm_id(self, step: str) -> int:
        if len(self._connections) >= self.max_connections:
            raise cm_error(errno.ENOMEM, f"there are {self.max_connections} connections", step)
        comm_id = 0
        while not comm_id or comm_id in self._connections:
            comm_id = self._random.getrandbits(32)
            if self._id_prefix is not None:
                comm_id = self._id_prefix << 24 | comm_id & 0xFFFFFF
        return comm_id

    def _new_transaction_id(self, comm_id: int) -> int:
        return comm_id << 32 | self._random.getrandbits(32)

    def _no_room(self, listener: Listener) -> Drop | None:
        if listener.pending >= listener.backlog:
            return Drop.BACKLOG
        return Drop.FULL if len(self._connections) >= self.max_connections else None


#: Who takes a message in; LAP and APR are served by nobody.
_TAKES: dict[type[Message], Callable[[Agent, Any, int, Hashable, float], Drop | None]] = {
    REQ: Agent._req,
    REP: Agent._rep,
    REJ: Agent._rejected,
    MRA: Agent._mra,
    RTU: Agent._rtu,
    DREQ: Agent._dreq_received,
    DREP: Agent._drep_received,
    SIDR_REQ: Agent._sidr_req,
    SIDR_REP: Agent._sidr_rep_received,
}


def _rejection(connection: Connection, _: Input, message: Any) -> Event:
    ari = message.ari[: message.reject_info_length]
    return Rejected(connection.comm_id, message.reason, ari, message.private_data)


#: What the user is told, of the connection, the input and the message that it was.
_TELLS: dict[Do, Callable[[Connection, Input, Any], Event]] = {
    Do.TELL_REQUEST: lambda c, _, req: ConnectRequest(c.comm_id, _listener(c), req, c.path),
    Do.TELL_SIDR_REQUEST: lambda c, _, req: SidrRequest(c.comm_id, _listener(c), req, c.path),
    Do.TELL_REPLY: lambda c, _, rep: ConnectReply(c.comm_id, rep),
    Do.TELL_SIDR_REPLY: lambda c, _, rep: SidrReply(c.comm_id, rep),
    Do.TELL_REJECTED: _rejection,
    Do.TELL_ESTABLISHED: lambda c, *_: Established(c.comm_id),
    Do.TELL_UNREACHABLE: lambda c, *_: Unreachable(c.comm_id),
    Do.TELL_DISCONNECT_REQUESTED: lambda c, *_: DisconnectRequested(c.comm_id),
    Do.TELL_DISCONNECTED: lambda c, what, _: Disconnected(c.comm_id, what is Input.EXHAUSTED),
    Do.TELL_TIMEWAIT_EXIT: lambda c, *_: TimewaitExit(c.comm_id, c.local_qpn),
}


def _listener(connection: Connection) -> Listener:
    assert connection.listener is not None
    return connection.listener
