"""The communication manager of one device, without a network, a clock or a source of randomness of its own.

An :class:`Agent` is driven by the user's calls, by :meth:`Agent.mad_received`, :meth:`Agent.unreachable` and
:meth:`Agent.timer`. Each takes the time in seconds, of any clock that only goes forward. What an agent sends and when
it is to be woken goes straight to its user (:class:`~rdmacm.proto.cm.connection.AgentUser`), what happens to a
connection to the connection's owner (:class:`~rdmacm.proto.cm.connection.ConnectionOwner`).

A ``path`` identifies where a MAD came from or goes to. The engine does not interpret paths; it compares them, and takes
MADs for a connection from no other path than the connection's, and its alternate one if it has any. Two paths must be
equal if, and only if, they lead to the same port of the same peer. (The UDP source port is not part of a path.)

No message from a peer raises an exception or makes anything grow without bounds: ``max_connections`` limits the
connections, a listener's ``backlog`` its unanswered requests, :data:`~rdmacm.proto.cm.timeouts.MAX_EXPONENT` timeouts.
Messages beyond a limit are dropped as if they were lost, so the peer tries again. ``dropped`` counts them by reason.
When a backlog is full, a request displaces one of a source that has more (:mod:`rdmacm.proto.cm.fairqueue`). A peer
that has answered nothing yet gets at most three MADs for each request that it sends: its address may be forged.

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
from rdmacm.proto.cm.codes import ApStatus, MessageKind, RejectReason, SidrStatus
from rdmacm.proto.cm.connection import (
    AMPLIFICATION,
    Accepts,
    AgentUser,
    CmConnection,
    CmListener,
    ConnectionOwner,
    DropReason,
    NetworkError,
)
from rdmacm.proto.cm.machine import StateMachine
from rdmacm.proto.cm.messages import (
    APR,
    DREP,
    DREQ,
    LAP,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    Message,
    Path,
    pack_message,
    unpack_mad,
)
from rdmacm.proto.cm.registry import Connections, Listeners
from rdmacm.proto.cm.states import AWAITING_USER, CONNECTED, TRANSITIONS, CmState, CmTrigger
from rdmacm.proto.cm.timeouts import ack_timeout, seconds
from rdmacm.proto.entropy import RandomSource
from rdmacm.proto.timerheap import LazyTimerHeap
from rdmacm.proto.wire import WireError

#: Linux's timeout (an exponent) and retries for a SIDR_REQ. No field of the message holds them.
_SIDR_RESPONSE_TIMEOUT = 20
_SIDR_RETRIES = 15

#: The reason of the REJ of a REQ that no listener takes. Without one the REQ is dropped.
_REASONS = {
    DropReason.NO_LISTENER: RejectReason.INVALID_SERVICE_ID,
    DropReason.NO_MATCH: RejectReason.CONSUMER_DEFINED,
    DropReason.TRANSPORT: RejectReason.INVALID_TRANSPORT_TYPE,
}

_GUID_SIZE = 8

#: How many lower bits of a communication id do not belong to its prefix.
_ID_BITS = 20
_ID_MASK = (1 << _ID_BITS) - 1

#: States of the passive side in which the peer may not have got the REP.
_BEFORE_RTU = AWAITING_USER | {CmState.REP_SENT, CmState.MRA_REP_RCVD}

#: Messages that show that the peer has got the REP. A REJ need not have the id that the REP has told.
_ANSWERS = frozenset((CmTrigger.RTU, CmTrigger.MRA_REP, CmTrigger.DREQ))


class Agent:
    """The connections and listeners of one node, for one user.

    ``guid`` is the CA GUID of requests and replies that the caller gives none. ``max_connections`` bounds the
    connections, including those in TIMEWAIT. ``mra_service_timeout`` is the exponent an MRA announces; None for an
    agent that sends no MRA. ``id_prefix`` is the upper 12 bits of every communication id, where several agents share
    one QP 1 and the ids tell which of them a MAD is for; None for random ids of 32 bits. ``source_of(path)`` is what
    shares of a backlog are given to, for example a host; each path has its own by default.
    ``trusts_sources``: nobody can forge the source of a MAD, so a peer that has not answered gets all copies of a REP.
    """

    machine: StateMachine

    def __init__(
        self,
        user: AgentUser,
        guid: int,
        random: RandomSource,
        *,
        max_connections: int = 65536,
        mra_service_timeout: int | None = 24,
        id_prefix: int | None = None,
        source_of: Callable[[Any], Hashable] = lambda path: path,
        trusts_sources: bool = False,
    ) -> None:
        self._user = user
        self._send = user.send
        self.guid = guid
        self.max_connections = max_connections
        self._id_prefix = id_prefix
        self._source_of = source_of
        self._trusts_sources = trusts_sources
        #: MADs that had no effect or were only rejected, and reports of the network without effect, by reason.
        self.dropped: Counter[DropReason] = Counter()
        self._random = random
        self._mra_service_timeout = mra_service_timeout
        self._connections = Connections(user.wake_at)
        self._listeners = Listeners()
        self.machine = StateMachine(user, self._connections, guid, random, mra_service_timeout, self.dropped)
        self._step = self.machine.step
        #: The connection with a local communication id, or None once it is gone.
        self.connection: Callable[[int], CmConnection | None] = self._connections.get
        #: Forgets a connection in whatever state it is, without a message or an event.
        self.forget: Callable[[CmConnection], None] = self._connections.remove
        #: When :meth:`timer` has something to do, or None.
        self.next_deadline: Callable[[], float | None] = self._connections.timers.next_deadline
        #: The deadlines of the timers that run, by local communication id.
        self.timers: LazyTimerHeap[int] = self._connections.timers

    def close(self) -> None:
        """Forget every connection: calls for one find that it has ended."""
        self._connections.clear()

    def __len__(self) -> int:
        """The number of connections, including those in TIMEWAIT."""
        return len(self._connections)

    # -- calls: listening -------------------------------------------------------------------------------------

    def listen(
        self,
        service_id: int,
        *,
        mask: int = ALL_BITS_64,
        backlog: int = 128,
        accepts: Accepts | None = None,
        transport: tuple[int, int] | None = None,
    ) -> CmListener:
        """Take requests for the service ids equal to ``service_id`` under ``mask``; EADDRINUSE if it is taken.

        Among several masks that match a request, the one with the most bits wins. Several listeners may share a service
        id if each has ``accepts(request, path)``, which selects its requests. The first listener that accepts a request
        gets it; a request that none accepts is rejected, and so is a REQ for another ``transport`` than the listener's.
        """
        listener = self._listeners.add(service_id, mask, backlog, accepts, transport)
        if listener is None:
            raise cm_error(errno.EADDRINUSE, "the service id is taken", "listen", f"0x{service_id:x}")
        return listener

    def unlisten(self, listener: CmListener) -> None:
        """Take no more requests. Requests that the user has not answered yet can still be answered."""
        self._listeners.remove(listener)

    def delivered(self, comm_id: int) -> None:
        """The user has fetched a request, so it no longer counts in its listener's backlog."""
        connection = self._connections.get(comm_id)
        if connection is not None and connection.listener is not None:
            connection.listener.requests.discard(comm_id)
            connection.listener = None

    def next_request(self, listener: CmListener) -> CmConnection | None:
        """Take a request from a listener's backlog, by turns of their sources; None if there is none."""
        comm_id = listener.requests.take()
        connection = None if comm_id is None else self._connections.get(comm_id)
        if connection is not None:
            connection.listener = None
        return connection

    # -- calls: connecting ------------------------------------------------------------------------------------

    def connect(
        self,
        path: Hashable,
        request: REQ,
        now: float,
        *,
        packet_life_time: int = 16,
        owner: ConnectionOwner | None = None,
    ) -> int:
        """Send a REQ and return the local communication id.

        Fills in the communication id and starting PSN of ``request``, and the CA GUID if it has none.
        """
        comm_id = self._new_comm_id("connect")
        request.local_comm_id = comm_id
        request.local_ca_guid = request.local_ca_guid or self.guid
        drawn = self._random.getrandbits(56)
        request.starting_psn = drawn >> 32
        tid = comm_id << 32 | drawn & 0xFFFFFFFF
        packed = pack_message(request, tid)
        connection = CmConnection(
            comm_id=comm_id,
            path=path,
            is_active=True,
            request=request,
            transaction_id=tid,
            owner=owner,
            starting_psn=request.starting_psn,
            local_guid=request.local_ca_guid,
            local_qpn=request.local_qpn,
            packet_life_time=packet_life_time,
            av_timeout=packet_life_time + 1,
            retry_interval=2 * seconds(packet_life_time) + seconds(request.remote_cm_response_timeout),
            retries=request.max_cm_retries,
        )
        self._connections.by_id[comm_id] = connection
        self._step(connection, CmTrigger.CONNECT, now, packed=packed)
        return comm_id

    def accept(self, comm_id: int, reply: REP, now: float) -> None:
        """Answer a REQ with a REP. Fills in its ids and starting PSN, and the CA GUID if it has none."""
        connection = self._allowed(comm_id, CmTrigger.ACCEPT)
        reply.local_comm_id = comm_id
        reply.remote_comm_id = connection.remote_comm_id or 0
        reply.starting_psn = connection.starting_psn
        reply.local_ca_guid = reply.local_ca_guid or self.guid
        packed = pack_message(reply, connection.transaction_id)
        connection.reply = reply
        connection.local_guid = reply.local_ca_guid
        connection.local_qpn = outgoing.peer_qpn(connection.request, reply)
        self._step(connection, CmTrigger.ACCEPT, now, packed=packed)
        if connection.allowance is not None:
            self._connections.unasked[comm_id] = None

    def reject(
        self,
        comm_id: int,
        now: float,
        reason: int = RejectReason.CONSUMER_DEFINED,
        private_data: bytes = b"",
        ari: bytes = b"",
    ) -> None:
        """Answer a REQ or a REP with a REJ; ``ari`` is the additional reject information."""
        connection = self._allowed(comm_id, CmTrigger.REJECT)
        packed = outgoing.rej(connection, reason, private_data, ari)
        self._step(connection, CmTrigger.REJECT, now, packed=packed)

    def send_rtu(self, comm_id: int, now: float, private_data: bytes = b"") -> None:
        """Answer a REP with an RTU: the connection is established."""
        connection = self._allowed(comm_id, CmTrigger.SEND_RTU)
        connection.rtu_mad = outgoing.rtu(connection, private_data)
        self._step(connection, CmTrigger.SEND_RTU, now)

    def establish(self, comm_id: int, now: float) -> None:
        """Data has arrived before the RTU: the connection is established."""
        connection = self._allowed(comm_id, CmTrigger.ESTABLISH)
        if connection.allowance is not None:
            self._answered(connection)
        self._step(connection, CmTrigger.ESTABLISH, now)

    def ask_peers(self) -> None:
        """Send each REP that its peer has not answered once more, now.

        A peer answers a copy at once: with an RTU, or with an MRA if its user takes long. Each REP is sent early once.
        """
        unasked = self._connections.unasked
        for comm_id in unasked:
            connection = self._connections.get(comm_id)
            if connection is not None and connection.state is CmState.REP_SENT:
                self.machine.repeat(connection)
        unasked.clear()

    def disconnect(self, comm_id: int, now: float, private_data: bytes = b"") -> None:
        """Send a DREQ, or the DREP that answers the peer's DREQ."""
        connection = self._allowed(comm_id, CmTrigger.DISCONNECT)
        packed = b""
        if connection.state is CmState.DREQ_RCVD:
            connection.drep_private_data = private_data
            packed = outgoing.drep(connection)
        elif connection.state in CONNECTED:
            packed = self.machine.new_dreq(connection, private_data)
        self._step(connection, CmTrigger.DISCONNECT, now, packed=packed)

    def destroy(self, comm_id: int, now: float) -> None:
        """Give up a connection in any state. Its owner is told nothing more."""
        connection = self._connections.get(comm_id)
        if connection is not None:
            connection.owner = None
            self._step(connection, CmTrigger.DESTROY, now)

    # -- calls: alternate paths -------------------------------------------------------------------------------

    def set_alternate(self, comm_id: int, path: Hashable) -> None:
        """Take the peer's messages from another path as well, of which both sides know; from none if it is None."""
        connection = self._connections.get(comm_id)
        if connection is not None:
            connection.alternate = path

    def load_path(self, comm_id: int, path: Path, now: float) -> None:
        """Offer the peer another alternate path with a LAP; ``path_answered`` follows.

        Only the active side of a connection may, and only one at a time.
        """
        connection = self._allowed(comm_id, CmTrigger.LOAD_PATH)
        if not connection.is_active:
            why = "only the side that has sent the REQ may offer a path"
            raise CmStateError(errno.EINVAL, why, CmTrigger.LOAD_PATH.value, f"0x{comm_id:08x}")
        request = connection.request
        assert isinstance(request, REQ)
        lap = LAP.loading(path)
        lap.local_comm_id, lap.remote_comm_id = comm_id, connection.remote_comm_id or 0
        lap.remote_qpn_eecn = connection.remote_qpn or 0
        lap.remote_cm_response_timeout = request.remote_cm_response_timeout
        tid = self.machine.new_transaction_id(comm_id)
        packed = pack_message(lap, tid)
        connection.lap, connection.lap_transaction_id = lap, tid
        self._step(connection, CmTrigger.LOAD_PATH, now, packed=packed)

    def answer_path(self, comm_id: int, status: int, now: float, info: bytes = b"") -> None:
        """Answer a LAP with an APR. ``info``: up to 72 bytes that explain the status."""
        connection = self._allowed(comm_id, CmTrigger.ANSWER_PATH)
        self._step(connection, CmTrigger.ANSWER_PATH, now, packed=outgoing.apr(connection, status, info))

    def migrate(self, comm_id: int, now: float) -> None:
        """The queue pair has changed to the alternate path: messages take it too, and the old path is the alternate."""
        connection = self._allowed(comm_id, CmTrigger.MIGRATE)
        if connection.alternate is None:
            why = "the connection has no alternate path"
            raise CmStateError(errno.EINVAL, why, CmTrigger.MIGRATE.value, f"0x{comm_id:08x}")
        self._step(connection, CmTrigger.MIGRATE, now)

    # -- calls: service id resolution (SIDR) ------------------------------------------------------------------

    def sidr_request(
        self, path: Hashable, request: SIDR_REQ, now: float, *, owner: ConnectionOwner | None = None
    ) -> int:
        """Send a SIDR_REQ and return its request id, which is filled in."""
        comm_id = self._new_comm_id("sidr_request")
        request.request_id = comm_id
        tid = self.machine.new_transaction_id(comm_id)
        packed = pack_message(request, tid)
        connection = CmConnection(
            comm_id=comm_id,
            path=path,
            is_active=True,
            request=request,
            transaction_id=tid,
            owner=owner,
            retry_interval=seconds(_SIDR_RESPONSE_TIMEOUT),
            retries=_SIDR_RETRIES,
        )
        self._connections.by_id[comm_id] = connection
        self._step(connection, CmTrigger.RESOLVE, now, packed=packed)
        return comm_id

    def sidr_reply(self, comm_id: int, reply: SIDR_REP, now: float) -> None:
        """Answer a SIDR_REQ. Fills in the request id and service id of ``reply``."""
        connection = self._allowed(comm_id, CmTrigger.ANSWER)
        self._step(connection, CmTrigger.ANSWER, now, packed=outgoing.sidr_rep(connection, reply))

    # -- input ------------------------------------------------------------------------------------------------

    def timer(self, now: float) -> None:
        """Handle the timers that are due."""
        try:
            while (comm_id := self.timers.pop_due(now)) is not None:
                connection = self._connections.by_id[comm_id]
                connection.deadline = None
                if connection.state is CmState.TIMEWAIT:
                    trigger = CmTrigger.TIMEWAIT_OVER
                elif connection.retries_left > 0:
                    trigger = CmTrigger.RETRY
                else:
                    trigger = CmTrigger.EXHAUSTED
                self._step(connection, trigger, now)
        finally:
            self._connections.arm()

    def mad_received(self, data: bytes | bytearray | memoryview, path: Hashable, now: float) -> DropReason | None:
        """Handle a MAD that arrived on ``path``; return why it had no effect or was only rejected, if so."""
        try:
            message, tid = unpack_mad(data)
        except WireError:
            self.dropped[DropReason.MALFORMED] += 1
            return DropReason.MALFORMED
        if isinstance(message, _FOLLOWING):
            trigger = CmTrigger.RTU if isinstance(message, RTU) else CmTrigger.DREP
            drop = self._deliver(self._connections.of_message(message), path, trigger, now, message)
        else:
            drop = _HANDLERS[type(message)](self, message, tid, path, now)
        if drop is not None:
            self.dropped[drop] += 1
        return drop

    def unreachable(
        self, comm_id: int, transaction_id: int, is_path: Callable[[Any], bool], error: NetworkError, now: float
    ) -> None:
        """Handle the network's report that a REQ or SIDR_REQ of this agent was not delivered.

        The ids are those of the request. ``is_path(path)`` tells whether a path leads to where the request was sent.
        The report ends a connection that still waits for the first answer to this request, which is unreachable. Any
        other report is dropped and counted.
        """
        connection = self._connections.get(comm_id)
        if connection is None:
            self.dropped[DropReason.UNKNOWN] += 1
        elif not connection.is_active or connection.transaction_id != transaction_id:
            self.dropped[DropReason.WRONG_REPORT] += 1
        elif not is_path(connection.path):
            self.dropped[DropReason.WRONG_PATH] += 1
        elif not self._step(connection, CmTrigger.NETWORK_ERROR, now, error):
            self.dropped[DropReason.UNEXPECTED] += 1

    def peer_activity(self, comm_id: int, activity: Hashable, now: float) -> None:
        """Answer ``peer_questioned``, after a packet was sent to the peer that it has to answer.

        ``activity`` changes with whatever arrives from the peer, so a difference from the first call for a question
        means that the peer is there. None: there is no way to ask, and the connection ends.
        """
        connection, question = self._connections.get(comm_id), self.machine.questions.get(comm_id)
        if connection is None or question is None:
            return
        rejection, first = question
        if activity is None or (activity == first and not connection.retries_left):
            self._step(connection, CmTrigger.EXHAUSTED, now)
        elif first is None:
            self.machine.questions[comm_id] = rejection, activity
        elif activity != first:
            del self.machine.questions[comm_id]
            self._step(connection, CmTrigger.PEER_ANSWERED, now, packed=rejection)

    def _handle_req(self, req: REQ, tid: int, path: Hashable, now: float) -> DropReason | None:
        known = self._connections.of_peer((req.local_comm_id, req.local_ca_guid, path))
        if known is not None:
            if known.is_active:
                return DropReason.UNEXPECTED
            if known.state is not CmState.TIMEWAIT or tid == known.transaction_id:
                return self._deliver(known, path, CmTrigger.REQ, now, req)
            self._connections.release_peer_id(known)
        qpn = req.local_qpn
        old = self._connections.of_qpn((qpn, req.local_ca_guid, path))
        if old is not None:
            rejection = outgoing.refusal(req, RejectReason.STALE_CONN, tid)
            if not self._asks_peer(old, rejection, now):
                self._send(path, rejection)
            return DropReason.STALE
        found = self._find_listener(req, path)
        if isinstance(found, DropReason):
            reason = _REASONS.get(found)
            if reason is not None:
                self._send(path, outgoing.refusal(req, reason, tid))
            return found
        connection = self._new_passive(req, tid, path, found)
        connection.starting_psn = self._random.getrandbits(24)
        connection.remote_comm_id = req.local_comm_id
        connection.remote_guid = req.local_ca_guid
        connection.remote_qpn = qpn
        connection.av_timeout = req.primary.local_ack_timeout
        connection.retry_interval = seconds(req.local_cm_response_timeout)
        connection.retries = req.max_cm_retries
        self._connections.by_id[connection.comm_id] = connection
        self._connections.add_remote(connection)
        self._step(connection, CmTrigger.REQ, now, req)
        if self._mra_service_timeout is not None:
            self._step(connection, CmTrigger.ALLOW_MRA, now)
        return None

    def _handle_rep(self, rep: REP, tid: int, path: Hashable, now: float) -> DropReason | None:
        connection = self._connections.get(rep.remote_comm_id)
        if connection is None:
            # Of a request that was given up. Its REJ was lost, and the peer would repeat the REP for a long time.
            self._send(path, outgoing.rej_unknown(rep, tid))
            return DropReason.UNKNOWN
        if not connection.is_active or isinstance(connection.request, SIDR_REQ):
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
        old = self._connections.of_qpn((qpn, rep.local_ca_guid, path))
        if old is not None:
            if not self._asks_peer(old, outgoing.rej_stale(connection, rep), now):
                self._step(connection, CmTrigger.REP_STALE, now, rep)
            return DropReason.STALE
        if self._connections.of_peer((rep.local_comm_id, rep.local_ca_guid, path)) is not None:
            return DropReason.UNEXPECTED
        connection.remote_comm_id = rep.local_comm_id
        connection.remote_guid = rep.local_ca_guid
        connection.remote_qpn = qpn
        connection.reply = rep
        connection.av_timeout = ack_timeout(rep.target_ack_delay, connection.packet_life_time)
        self._connections.add_remote(connection)
        self._step(connection, CmTrigger.REP, now, rep)
        if self._mra_service_timeout is not None and connection.state is CmState.REP_RCVD:
            self._step(connection, CmTrigger.ALLOW_MRA, now)
        return None

    def _handle_rej(self, rej: REJ, _: int, path: Hashable, now: float) -> DropReason | None:
        connection = None
        if rej.reason == RejectReason.TIMEOUT and rej.reject_info_length >= _GUID_SIZE:
            # A peer that gives up may not know our communication id. Its own id and its GUID identify the connection.
            guid = int.from_bytes(rej.ari[:_GUID_SIZE], "big")
            connection = self._connections.of_peer((rej.local_comm_id, guid, path))
            if connection is not None and rej.remote_comm_id != connection.comm_id:
                # A peer that does not know our id has not got the REP, and so cannot be connected.
                if rej.remote_comm_id or connection.state not in _BEFORE_RTU:
                    return DropReason.UNKNOWN
        if connection is None and rej.message_rejected == MessageKind.REQ:
            connection = self._connections.requesting(rej.remote_comm_id)
        if connection is None:
            connection = self._connections.of_message(rej)
        trigger = CmTrigger.REJ_STALE if rej.reason == RejectReason.STALE_CONN else CmTrigger.REJ
        return self._deliver(connection, path, trigger, now, rej)

    def _handle_mra(self, mra: MRA, _: int, path: Hashable, now: float) -> DropReason | None:
        if mra.message_mraed == MessageKind.REQ:
            return self._deliver(self._connections.requesting(mra.remote_comm_id), path, CmTrigger.MRA_REQ, now, mra)
        trigger = _MRA_TRIGGERS.get(mra.message_mraed)
        if trigger is None:
            return DropReason.UNSUPPORTED
        return self._deliver(self._connections.of_message(mra), path, trigger, now, mra)

    def _handle_dreq(self, dreq: DREQ, tid: int, path: Hashable, now: float) -> DropReason | None:
        connection = self._connections.of_message(dreq)
        if connection is None:
            self._send(path, pack_message(DREP(dreq.remote_comm_id, dreq.local_comm_id), tid))
            return DropReason.UNKNOWN
        if path == connection.path or connection.is_from_peer(path):
            if dreq.remote_qpn_eecn != connection.local_qpn:
                return DropReason.WRONG_QPN
            connection.dreq_transaction_id = tid
        return self._deliver(connection, path, CmTrigger.DREQ, now, dreq)

    def _handle_lap(self, lap: LAP, tid: int, path: Hashable, now: float) -> DropReason | None:
        connection = self._connections.of_message(lap)
        if connection is None:
            self._send(path, outgoing.apr_refusal(lap, ApStatus.INVALID_COMM_ID, tid))
            return DropReason.UNKNOWN
        if not connection.is_from_peer(path):
            return DropReason.WRONG_PATH
        if connection.is_active:
            return DropReason.UNEXPECTED
        if connection.state in CONNECTED and lap.remote_qpn_eecn != connection.local_qpn:
            self._send(path, outgoing.apr_refusal(lap, ApStatus.INVALID_QPN_EECN, tid))
            return DropReason.WRONG_QPN
        is_copy = tid == connection.lap_transaction_id
        if is_copy and connection.apr_mad:
            return self._deliver(connection, path, CmTrigger.LAP_COPY, now, lap)
        if connection.state is CmState.ESTABLISHED:
            connection.lap, connection.lap_transaction_id, connection.apr_mad = lap, tid, b""
        elif not is_copy:
            return DropReason.UNEXPECTED
        drop = self._deliver(connection, path, CmTrigger.LAP, now, lap)
        if drop is None and self._mra_service_timeout is not None:
            self._step(connection, CmTrigger.ALLOW_MRA, now)
        return drop

    def _handle_apr(self, apr: APR, tid: int, path: Hashable, now: float) -> DropReason | None:
        connection = self._connections.of_message(apr)
        # It may answer an earlier LAP, which was given up. A system may change the upper half of a transaction id.
        if connection is not None and (tid ^ connection.lap_transaction_id) & 0xFFFFFFFF:
            return DropReason.UNEXPECTED
        return self._deliver(connection, path, CmTrigger.APR, now, apr)

    def _handle_sidr_req(self, req: SIDR_REQ, tid: int, path: Hashable, now: float) -> DropReason | None:
        known = self._connections.of_peer((req.request_id, None, path))
        if known is not None:
            return self._deliver(known, path, CmTrigger.SIDR_REQ, now, req)
        found = self._find_listener(req, path)
        if isinstance(found, DropReason):
            if found in (DropReason.NO_LISTENER, DropReason.NO_MATCH):
                status = SidrStatus.UNSUPPORTED if found is DropReason.NO_LISTENER else SidrStatus.REJECT
                reply = SIDR_REP(request_id=req.request_id, status=status, service_id=req.service_id)
                self._send(path, pack_message(reply, tid))
            return found
        connection = self._new_passive(req, tid, path, found)
        connection.remote_comm_id = req.request_id
        self._connections.by_id[connection.comm_id] = connection
        self._connections.add_remote(connection)
        self._step(connection, CmTrigger.SIDR_REQ, now, req)
        return None

    def _handle_sidr_rep(self, rep: SIDR_REP, _: int, path: Hashable, now: float) -> DropReason | None:
        return self._deliver(self._connections.get(rep.request_id), path, CmTrigger.SIDR_REP, now, rep)

    def _find_listener(self, request: REQ | SIDR_REQ, path: Hashable) -> CmListener | DropReason:
        listeners = self._listeners.find(request.service_id)
        if not listeners:
            return DropReason.NO_LISTENER
        found = DropReason.NO_MATCH
        for listener in listeners:
            if listener.accepts is None or listener.accepts(request, path):
                if listener.transport is not None and isinstance(request, REQ):
                    if request.transport != listener.transport:
                        found = DropReason.TRANSPORT
                        continue
                if len(listener.requests.sources) >= listener.backlog and not self._make_room(listener, path):
                    return DropReason.BACKLOG
                return DropReason.FULL if len(self._connections.by_id) >= self.max_connections else listener
        return found

    def _make_room(self, listener: CmListener, path: Hashable) -> bool:
        """Forget a request of the source that has the most in a full backlog, unless that is the source of ``path``."""
        displaced = listener.requests.displaced_by(self._source_of(path))
        connection = None if displaced is None else self._connections.get(displaced)
        if connection is None:
            return False
        self.dropped[DropReason.BACKLOG] += 1
        listener.requests.discard(connection.comm_id)
        connection.state = CmState.IDLE
        self._connections.remove(connection)
        return True

    def _new_passive(self, request: REQ | SIDR_REQ, tid: int, path: Hashable, listener: CmListener) -> CmConnection:
        comm_id = self._new_comm_id("")
        listener.requests.add(self._source_of(path), comm_id)
        return CmConnection(
            comm_id=comm_id,
            path=path,
            is_active=False,
            request=request,
            transaction_id=tid,
            listener=listener,
            allowance=None if self._trusts_sources else AMPLIFICATION,
        )

    def _asks_peer(self, old: CmConnection, rejection: bytes, now: float) -> bool:
        """Ask the peer of a connection whose queue pair another REQ or REP names; False unless it is established.

        ``rejection`` is the REJ of that message, to be sent if the peer answers.
        """
        questions = self.machine.questions
        if old.comm_id not in questions:
            questions[old.comm_id] = rejection, None
            if not self._step(old, CmTrigger.STALE, now):
                del questions[old.comm_id]
                return False
        return True

    def _deliver(
        self, connection: CmConnection | None, path: Hashable, trigger: CmTrigger, now: float, message: Message
    ) -> DropReason | None:
        """Pass a message to the state machine of its connection, if it came on the connection's path."""
        if connection is None:
            return DropReason.UNKNOWN
        if connection.path != path and not connection.is_from_peer(path):
            return DropReason.WRONG_PATH
        if connection.allowance is not None:
            # A copy of the request has been sent by the address that it names, or by anybody who forges that address.
            if trigger is CmTrigger.REQ or trigger is CmTrigger.SIDR_REQ:
                connection.allowance += AMPLIFICATION
            elif trigger in _ANSWERS:
                self._answered(connection)
            else:
                connection.allowance = None
        return None if self._step(connection, trigger, now, message) else DropReason.UNEXPECTED

    def _answered(self, connection: CmConnection) -> None:
        """The peer has got the REP, so it has the address that its request came from."""
        connection.allowance = None
        self._connections.unasked.pop(connection.comm_id, None)
        self._user.peer_answered()

    # -- calls and ids ------------------------------------------------------------------------------------------------

    def _allowed(self, comm_id: int, call: CmTrigger) -> CmConnection:
        """The connection of a call; CmStateError if its state does not allow the call."""
        connection = self._connections.get(comm_id)
        state = connection.state if connection is not None else CmState.IDLE
        if connection is None or TRANSITIONS[state].get(call) is None:
            raise CmStateError(errno.EINVAL, f"not possible in state {state.value}", call.value, f"0x{comm_id:08x}")
        return connection

    def _new_comm_id(self, step: str) -> int:
        """A random communication id that no connection has, or had a moment ago; ENOMEM if there are too many."""
        if len(self._connections.by_id) >= self.max_connections:
            raise cm_error(
                errno.ENOMEM,
                f"the limit of {self.max_connections} connections is reached",
                step,
                hint="fewer connections at a time; one that has ended counts until its TIMEWAIT is over",
            )
        used, freed = self._connections.by_id, self._connections.freed
        while True:
            comm_id = self._random.getrandbits(32)
            if self._id_prefix is not None:
                comm_id = self._id_prefix << _ID_BITS | comm_id & _ID_MASK
            if comm_id and comm_id not in used and comm_id not in freed:
                return comm_id


#: What an MRA of a message other than a REQ is to the connection that has sent the message.
_MRA_TRIGGERS: dict[int, CmTrigger] = {MessageKind.REP: CmTrigger.MRA_REP, MessageKind.OTHER: CmTrigger.MRA_LAP}

#: Messages that are nothing else than a trigger of their connection.
_FOLLOWING = (RTU, DREP)

#: The handler of each other message.
_HANDLERS: dict[type[Message], Callable[[Agent, Any, int, Hashable, float], DropReason | None]] = {
    REQ: Agent._handle_req,
    REP: Agent._handle_rep,
    REJ: Agent._handle_rej,
    MRA: Agent._handle_mra,
    DREQ: Agent._handle_dreq,
    LAP: Agent._handle_lap,
    APR: Agent._handle_apr,
    SIDR_REQ: Agent._handle_sidr_req,
    SIDR_REP: Agent._handle_sidr_rep,
}
