"""Connecting by the InfiniBand connection manager, for RoCE and InfiniBand ids.

The connector turns parameters and private data into REQ, REP, REJ and SIDR messages, and what the agent tells
(:mod:`rdmacm.proto.cm.engine`) into calls of its user. The agent orders and repeats the messages.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Hashable
from functools import partial
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Protocol

from rdmacm.address import AF_IB, WILDCARDS, Address, InetAddr, SockAddrIB, service_id
from rdmacm.errors import CmStateError, cm_error
from rdmacm.proto.cm import states
from rdmacm.proto.cm.codes import (
    ApStatus,
    FailoverAccepted,
    RejectReason,
    SidrStatus,
    TransportServiceType,
    rejection_text,
    sidr_text,
)
from rdmacm.proto.cm.connection import CmConnection, CmListener, NetworkError
from rdmacm.proto.cm.engine import Agent
from rdmacm.proto.cm.messages import APR, LAP, NO_PATH, REJ, REP, REQ, SIDR_REP, SIDR_REQ, Message
from rdmacm.proto.cm.private_data import PrivateDataHeader, user_capacity
from rdmacm.proto.cm.timeouts import ack_timeout
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.sa import PathRecord
from rdmacm.provider import QueuedEvent
from rdmacm.provider.connparam import MIN_RNR_TIMER, ConnParam, Ece, UdParam
from rdmacm.soft.connection_manager import ConnectionManager
from rdmacm.soft.ids.alternate_path import AlternatePath
from rdmacm.soft.ids.connector import ConnectorUser
from rdmacm.soft.ids.id_state import IdState
from rdmacm.soft.ids.link import CA_ACK_DELAY, Link, Refusal, Resolver
from rdmacm.soft.ids.request import header_of, param_of_request
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import AHAttr, QPAttr
from rdmacm.verbs.enums import AccessFlag, MigState, Mtu, QPType

_RC = int(TransportServiceType.RC), 0
_XRC = int(TransportServiceType.EXTENDED), 1
#: The transport service of queue pairs in a REQ, by QP type (InfiniBand Architecture 12.7.9).
_TRANSPORTS = {
    int(QPType.RC): _RC,
    int(QPType.UC): (int(TransportServiceType.UC), 0),
    int(QPType.XRC_SEND): _XRC,
    int(QPType.XRC_RECV): _XRC,
}

#: The path MTU field of a REQ has 4 bits; that of a path record has 6.
_MAX_REQ_MTU = 15
#: The retry count fields of REQ and REP have 3 bits.
_MAX_RETRIES = 7
NO_ECE = Ece(0)

_MTUS = {int(mtu): mtu for mtu in Mtu}
_MESSAGES_WITH_PRIVATE_DATA: tuple[type[Message], ...] = (REQ, REP, REJ, SIDR_REQ, SIDR_REP)
#: Bytes of private data that the application may fill: beside the header of IP addresses, and without that header.
_ROOM_IP: dict[type[Message], int] = {kind: user_capacity(kind, AF_INET) for kind in _MESSAGES_WITH_PRIVATE_DATA}
_ROOM_IB: dict[type[Message], int] = {kind: user_capacity(kind, AF_IB) for kind in _MESSAGES_WITH_PRIVATE_DATA}

#: What the network reports of a request.
_NETWORK_ERRORS = {
    errno.ECONNREFUSED: "that the port is closed",
    errno.EHOSTUNREACH: "that the host is unreachable",
    errno.ENETUNREACH: "that the network is unreachable",
    errno.EACCES: "that this is prohibited",
    errno.EPERM: "that this is prohibited",
}


class IbCmUser(ConnectorUser, Protocol):
    """An id that connects by the InfiniBand connection manager."""

    link: Link

    @property
    def resolver(self) -> Resolver:
        """How it resolves addresses."""

    def other_link(self) -> Link:
        """The link for a request to a wildcard listener that has come through an InfiniBand port."""

    def post_request(self, take: Callable[[], QueuedEvent | None]) -> None:
        """Queue a CONNECT_REQUEST for the application. ``take()`` makes the event when the application fetches it.

        It returns None if the request has been withdrawn.
        """

    def take_request(self, request: CmConnection, cm: ConnectionManager) -> QueuedEvent | Refusal:
        """Make an id of a request, and its CONNECT_REQUEST; or return why the request does not fit this host."""


class IbCmConnector:
    """See :class:`rdmacm.soft.ids.connector.Connector`; ``core`` and ``user`` are two sides of the same id."""

    __slots__ = (
        "_accepted",
        "_agent",
        "_alternate",
        "_id",
        "_listeners",
        "_to_post",
        "_user",
        "connection",
        "peer_ece",
    )

    #: The agent of the connection; set with it.
    _agent: Agent

    def __init__(self, core: IdState, user: IbCmUser) -> None:
        #: The id, as its link and its connector share it.
        self._id = core
        #: The id, as the connector reports to it.
        self._user = user
        #: The connection managers that it listens with: several for a wildcard GID.
        self._listeners: list[tuple[ConnectionManager, CmListener]] = []
        #: How many requests may be posted yet; None for all of the backlog.
        self._to_post: int | None = None
        #: The agent's record of the connection; None before the request, and after :meth:`close`.
        self.connection: CmConnection | None = None
        #: The alternate path, once the application has asked for it.
        self._alternate: AlternatePath | None = None
        #: The parameters of :meth:`accept`, from :meth:`prepare_accept` on.
        self._accepted: ConnParam | None = None
        #: See :class:`rdmacm.soft.ids.connector.Connector`.
        self.peer_ece: Ece = NO_ECE

    @property
    def is_established(self) -> bool:
        return self.connection is not None and self.connection.state in states.CONNECTED

    @property
    def is_put_off(self) -> bool:
        return self.connection is not None and self.connection.is_put_off

    def _open(self) -> CmConnection:
        assert self.connection is not None
        return self.connection

    def _now(self) -> float:
        return self._id.runtime.clock()

    # -- listening ------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        local = self._id.local_addr
        assert local is not None
        if isinstance(local, SockAddrIB):
            service, ip = local.sid, None
        else:
            service, ip = service_id(self._id.port_space, local.port), None if local.is_any else local.ip
        try:
            for cm in self._user.resolver.managers():
                listener = cm.listen(self, service, ip, backlog, self._takes, _TRANSPORTS.get(self._id.qp_type))
                self._listeners.append((cm, listener))
        except BaseException:
            self._unlisten()
            raise

    def _unlisten(self) -> None:
        for cm, listener in self._listeners:
            cm.unlisten(listener)
        self._listeners.clear()

    def _takes(self, request: REQ | SIDR_REQ, path: Hashable) -> bool:
        """Whether a request to the id's port is for this id: QP type, address family, address and interface agree."""
        core = self._id
        local = core.local_addr
        if (core.qp_type == QPType.UD) is isinstance(request, REQ):
            return False
        # On InfiniBand, the private data of a request between AF_IB addresses may look like a header.
        is_roce = isinstance(path, WirePath)
        header = header_of(request) if is_roce or isinstance(local, InetAddr) else None
        if header is None:
            return isinstance(local, SockAddrIB)
        if not isinstance(local, InetAddr) or header.version:
            return False
        if local.ip in WILDCARDS:
            afonly = core.port_owner is not None and core.port_owner.afonly
            return header.family == local.family or (local.family == AF_INET6 and not afonly)
        scope_id = path.scope_id if isinstance(path, WirePath) else 0
        return header.destination == local.ip and (not local.scope_id or scope_id in (0, local.scope_id))

    def requested(self, request: CmConnection, cm: ConnectionManager) -> None:
        """See :class:`rdmacm.soft.connection_manager.RequestHandler`.

        The request stays in the backlog until the application fetches its event; it has no id before.
        """
        link = self._user.link
        if cm is not link.cm:
            link = self._user.other_link()
        refusal = link.check_request(request, isinstance(self._id.local_addr, InetAddr), cm)
        if refusal is not None:
            self._refuse(request, refusal, cm)
        elif request.listener is not None:
            self._post_requests(cm, request.listener)

    def _refuse(self, request: CmConnection, refusal: Refusal, cm: ConnectionManager) -> None:
        if isinstance(request.request, REQ):
            cm.agent.reject(request.comm_id, self._now(), refusal[0], ari=refusal[1])
        else:
            cm.agent.destroy(request.comm_id, self._now())

    def allow_requests(self, count: int) -> None:
        self._to_post = (self._to_post or 0) + count
        for cm, listener in self._listeners:
            self._post_requests(cm, listener)

    def _post_requests(self, cm: ConnectionManager, listener: CmListener) -> None:
        """Post an event for each request of the backlog that has none, as far as that is wanted."""
        while listener.posted < len(listener.requests.sources) and self._to_post != 0:  # a handler may take it at once
            if self._to_post is not None:
                self._to_post -= 1
            listener.posted += 1
            self._user.post_request(partial(self._take, cm, listener))

    def _take(self, cm: ConnectionManager, listener: CmListener) -> QueuedEvent | None:
        """Take the next request from the backlog, in the turn of its source: not always the one that was posted."""
        listener.posted -= 1
        while (request := cm.agent.next_request(listener)) is not None:
            try:
                found = self._user.take_request(request, cm)
            except Exception as error:  # it ends this request only
                cm.raised(request, error)
            else:
                if isinstance(found, QueuedEvent):
                    return found
                self._refuse(request, found, cm)
        if self._to_post is not None:
            self._to_post += 1
        return None

    def begin_passive(self, connection: CmConnection, cm: ConnectionManager) -> ConnParam | UdParam:
        """Take over the connection of a request. Returns the parameters of the request."""
        request = connection.request
        if isinstance(request, REQ) and request.vendor_id:
            self.peer_ece = Ece(request.vendor_id, request.attr_mod)
        self._agent, self.connection = cm.agent, connection
        connection.owner = self
        if len(self._id.paths) > 1:
            cm.agent.set_alternate(connection.comm_id, self._user.link.cm_path(self._id.paths[1]))
        return param_of_request(request, isinstance(self._id.local_addr, InetAddr))

    # -- connecting -----------------------------------------------------------------------------------

    def connect(self, param: ConnParam, qp_num: int, ece: Ece) -> None:
        core, link = self._id, self._user.link
        peer, local = core.peer_addr, core.local_addr
        is_datagram = core.qp_type == QPType.UD
        private_data = param.private_data
        if private_data:
            self._check_size(private_data, SIDR_REQ if is_datagram else REQ, "connect")
        if isinstance(peer, InetAddr):
            assert isinstance(local, InetAddr)
            private_data = PrivateDataHeader.pack_between(local, peer) + private_data
            service = service_id(core.port_space, peer.port)
        else:
            assert peer is not None
            service = peer.sid
        path, now = link.cm_path(core.paths[0]), core.runtime.clock()
        agent = link.cm.agent
        agent.machine.stepping = None
        try:
            if is_datagram:
                query = SIDR_REQ(service, partition_key=link.partition(), private_data=private_data)
                comm_id = agent.sidr_request(path, query, now, owner=self)
            else:
                request = self._request(service, private_data, param, qp_num, ece)
                life = core.paths[0].packet_life_time
                comm_id = agent.connect(path, request, now, packet_life_time=life, owner=self)
                if len(core.paths) > 1:
                    agent.set_alternate(comm_id, link.cm_path(core.paths[1]))
        except BaseException:
            link.cm.request_raised()
            raise
        self._agent, self.connection = agent, agent.connection(comm_id)

    def _request(self, service: int, private_data: bytes, param: ConnParam, qp_num: int, ece: Ece) -> REQ:
        core, link = self._id, self._user.link
        path, view = core.paths[0], core.port_view
        assert view is not None
        if path.mtu > _MAX_REQ_MTU:  # possible in a path record that the application has set
            raise cm_error(errno.EINVAL, f"{path.mtu} is no path MTU", "connect", str(core.peer_addr))
        transport, extended = _TRANSPORTS.get(core.qp_type, _RC)
        return REQ(
            service_id=service,
            transport_service_type=transport,
            extended_transport_type=extended,
            local_ca_guid=view.device.node_guid,
            local_qpn=qp_num,
            responder_resources=param.responder_resources,
            initiator_depth=param.initiator_depth,
            end_to_end_flow_control=bool(param.flow_control),
            retry_count=min(param.retry_count, _MAX_RETRIES),
            rnr_retry_count=min(param.rnr_retry_count, _MAX_RETRIES),
            path_mtu=path.mtu,
            srq=bool(param.srq),
            partition_key=link.partition(),
            primary=link.request_path(path),
            alternate=link.request_path(core.paths[1]) if len(core.paths) > 1 else NO_PATH,
            private_data=private_data,
            vendor_id=ece.vendor_id,
            attr_mod=ece.options,
        )

    def confirm(self) -> None:
        connection = self.connection
        assert connection is not None
        self._agent.send_rtu(connection.comm_id, self._id.runtime.clock())

    def refuse(self) -> None:
        with contextlib.suppress(CmStateError):
            self._agent.reject(self._open().comm_id, self._now())

    # -- answering ------------------------------------------------------------------------------------

    def _failover_accepted(self) -> FailoverAccepted:
        connection = self.connection
        assert connection is not None
        request = connection.request
        if not isinstance(request, REQ) or request.alternate is NO_PATH or len(self._id.paths) > 1:
            return FailoverAccepted.ACCEPTED
        return self._user.link.no_failover

    def prepare_accept(self, param: ConnParam) -> None:
        peer = self._id.peer_addr
        if param.private_data:
            self._check_size(param.private_data, SIDR_REP if self._id.qp_type == QPType.UD else REP, "accept")
        if self.connection is None or self.connection.state not in states.AWAITING_USER:
            raise CmStateError(errno.EINVAL, "the peer has given up meanwhile", "accept", str(peer), "destroy the id")
        self._accepted = param

    def accept(self, param: ConnParam, qp_num: int, ece: Ece) -> None:
        is_xrc, view = self._id.qp_type == QPType.XRC_RECV, self._id.port_view
        assert view is not None
        reply = REP(
            local_qpn=0 if is_xrc else qp_num,
            local_eecn=qp_num if is_xrc else 0,
            responder_resources=param.responder_resources,
            initiator_depth=param.initiator_depth,
            target_ack_delay=CA_ACK_DELAY,
            end_to_end_flow_control=bool(param.flow_control),
            failover_accepted=self._failover_accepted(),
            rnr_retry_count=min(param.rnr_retry_count, _MAX_RETRIES),
            srq=is_xrc or bool(param.srq),
            local_ca_guid=view.device.node_guid,
            private_data=param.private_data,
            vendor_id=ece.vendor_id,
            attr_mod=ece.options,
        )
        connection = self.connection
        assert connection is not None
        self._agent.accept(connection.comm_id, reply, self._id.runtime.clock())

    def accept_datagram(self, param: ConnParam, qp_num: int, qkey: int) -> None:
        reply = SIDR_REP(qpn=qp_num, q_key=qkey, private_data=param.private_data)
        self._agent.sidr_reply(self._open().comm_id, reply, self._now())

    def reject(self, private_data: bytes, reason: int) -> None:
        if reason not in (RejectReason.CONSUMER_DEFINED, RejectReason.VENDOR_OPTION_NOT_SUPPORTED):
            raise cm_error(errno.EINVAL, f"reason {reason} is not one that an application may give", "reject")
        is_datagram = self._id.qp_type == QPType.UD
        if private_data:
            self._check_size(private_data, SIDR_REP if is_datagram else REJ, "reject")
        agent, comm_id, now = self._agent, self._open().comm_id, self._now()
        if is_datagram:
            agent.sidr_reply(comm_id, SIDR_REP(status=SidrStatus.REJECT, private_data=private_data), now)
        else:
            agent.reject(comm_id, now, reason, private_data)

    def _check_size(self, private_data: bytes, kind: type[Message], step: str) -> None:
        address: Address | None = self._id.peer_addr
        room = (_ROOM_IB if isinstance(address, SockAddrIB) else _ROOM_IP)[kind]
        if len(private_data) > room:
            raise cm_error(
                errno.EINVAL,
                f"the message carries up to {room} bytes of private data, not {len(private_data)}",
                step,
                str(address),
                "send the rest as a message once connected",
            )

    # -- connected ------------------------------------------------------------------------------------

    def notify_established(self) -> None:
        connection = self._open()
        if connection.state in states.CONNECTED:
            raise cm_error(errno.EISCONN, "the connection is established already", "notify")
        self._agent.establish(connection.comm_id, self._now())

    def notify_migrated(self) -> None:
        core = self._id
        self._agent.migrate(self._open().comm_id, self._now())
        core.paths = core.paths[1::-1]

    def alternate_path(self) -> AlternatePath:
        if self._alternate is None:
            self._alternate = AlternatePath(self._id, self._user.link, self._open())
        return self._alternate

    def data_arrived(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(CmStateError):
                self._agent.establish(self.connection.comm_id, self._now())

    def disconnect(self) -> bool:
        connection = self.connection
        assert connection is not None
        try:
            self._agent.disconnect(connection.comm_id, self._id.runtime.clock())
        except CmStateError:  # already disconnected, which is no error
            return False
        return True

    def close(self) -> None:
        if self._listeners:
            self._unlisten()
        if self.connection is not None:
            connection, self.connection = self.connection, None
            if self._alternate is not None:
                self._alternate.end(errno.ECANCELED, "the id was destroyed")
                self._alternate = None
            self._user.link.cm.leave(connection)

    # -- messages and timers --------------------------------------------------------------------------

    # See :class:`rdmacm.proto.cm.connection.ConnectionOwner`.

    def established(self, _: CmConnection, __: Message | None) -> None:
        self._user.established()

    def rejected(self, connection: CmConnection, rej: REJ) -> None:
        mtu = self._id.paths[0].mtu if self._id.paths else 0
        ari = rej.ari[: rej.reject_info_length]
        text = rejection_text(rej.reason, ari, mtu, is_passive=not connection.is_active)
        self._user.rejected(rej.reason, rej.private_data, text)
        self._end_alternate()

    def unreachable(self, connection: CmConnection, error: NetworkError | None) -> None:
        if error is not None:
            self._user.unreachable(-error.errno, self._undelivered_text(error))
        else:
            is_active = connection.is_active
            text = "the peer did not answer" if is_active else "the peer's confirmation (RTU) has not arrived"
            if connection.is_put_off:
                text = "the peer has the request, and no program there has accepted it"
            self._user.unreachable(-errno.ETIMEDOUT, text)
        self._end_alternate()

    def disconnect_requested(self, _: CmConnection, __: Message) -> None:
        self._user.disconnected(0, "")
        if self._alternate is not None:
            self._end_alternate()

    def disconnected(self, _: CmConnection, answer: Message | None) -> None:
        if answer is None:
            self._user.disconnected(-errno.ETIMEDOUT, "the peer did not confirm")
        else:
            self._user.disconnected(0, "")
        if self._alternate is not None:
            self._end_alternate()

    def failed(self, _: CmConnection, was_established: bool) -> None:
        self.connection = None
        self._user.failed(was_established, "an internal error has ended the connection")
        self._end_alternate()

    def timewait_over(self, _: CmConnection, __: None) -> None:
        self._user.timewait_over()

    def path_offered(self, connection: CmConnection, lap: LAP) -> None:
        if self._alternate is not None:
            self._alternate.was_offered(lap)
        else:
            self._agent.answer_path(connection.comm_id, ApStatus.UNSUPPORTED, self._now())

    def path_answered(self, _: CmConnection, apr: APR | None) -> None:
        if self._alternate is not None:
            self._alternate.was_answered(apr)

    def _end_alternate(self) -> None:
        if self._alternate is not None:
            self._alternate.end(errno.ECONNRESET, "the connection has ended")

    def _undelivered_text(self, error: NetworkError) -> str:
        path = self._user.link.cm_path(self._id.paths[0])
        request = "SIDR_REQ" if self._id.qp_type == QPType.UD else "REQ"
        reporter = "this host"
        if error.reporter and isinstance(path, WirePath) and error.reporter != path.local:
            reporter = inet_ntop(AF_INET if len(error.reporter) == 4 else AF_INET6, error.reporter)
        why = _NETWORK_ERRORS.get(error.errno) or f'"{os.strerror(error.errno)}"'
        return f"the {request} to UDP port {ROCE_PORT} was not delivered: {reporter} reports {why}"

    def replied(self, connection: CmConnection, reply: REP) -> None:
        if reply.vendor_id:
            self.peer_ece = Ece(reply.vendor_id, reply.attr_mod)
        if reply.failover_accepted != FailoverAccepted.ACCEPTED:
            self._id.paths = self._id.paths[:1]
            self._agent.set_alternate(connection.comm_id, None)
        self._user.replied(
            ConnParam(  # by position, which takes half the time
                reply.private_data,
                reply.initiator_depth,
                reply.responder_resources,
                int(reply.end_to_end_flow_control),
                0,
                reply.rnr_retry_count,
                int(reply.srq),
                connection.remote_qpn or 0,
            )
        )

    def sidr_replied(self, _: CmConnection, reply: SIDR_REP) -> None:
        if reply.status != SidrStatus.SUCCESS:
            refusal = UdParam(reply.private_data, AHAttr(), 0, 0)
            self._user.unreachable(reply.status, sidr_text(reply.status), refusal)
            return
        vector = self._user.link.address_vector(self._id.paths[0])
        self._user.datagram_resolved(UdParam(reply.private_data, vector, reply.qpn, reply.q_key))

    # -- queue pair attributes ------------------------------------------------------------------------

    def connected_attributes(self, attr: QPAttr) -> Hashable:
        core, connection = self._id, self.connection
        if connection is None or connection.state is states.CmState.IDLE:
            raise core.refuse("init_qp_attr")
        request = connection.request
        if not isinstance(request, REQ):
            raise core.refuse("init_qp_attr")
        peer = connection.reply if connection.is_active else request
        if peer is None:
            raise core.refuse("init_qp_attr")
        mtu = _MTUS.get(request.path_mtu)
        if mtu is None:  # possible in a path record that the application has set
            raise cm_error(errno.EINVAL, f"{request.path_mtu} is no path MTU", "init_qp_attr", str(core.peer_addr))
        attr.port_num = core.port_num
        attr.path_mtu = mtu
        attr.dest_qp_num = connection.remote_qpn or 0
        attr.rq_psn = connection.starting_psn
        attr.max_rd_atomic, attr.max_dest_rd_atomic = depths = self._read_depths(connection)
        attr.qp_access_flags = self._user.link.access[bool(depths[1])]
        attr.min_rnr_timer = MIN_RNR_TIMER
        attr.sq_psn = peer.starting_psn
        attr.retry_cnt = request.retry_count
        attr.rnr_retry = peer.rnr_retry_count
        option = core.options.ack_timeout
        attr.timeout = connection.av_timeout if option is None else option & 31
        if len(core.paths) > 1:
            self._alternate_attributes(attr, core.paths[1], peer)
        return connection.path

    def _alternate_attributes(self, attr: QPAttr, path: PathRecord, peer: REQ | REP) -> None:
        link, option = self._user.link, self._id.options.ack_timeout
        attr.alt_ah_attr = link.address_vector(path)
        attr.alt_port_num = self._id.port_num
        attr.alt_pkey_index = link.pkey_index
        if option is not None:
            attr.alt_timeout = option & 31
        elif isinstance(peer, REP):
            attr.alt_timeout = ack_timeout(peer.target_ack_delay, path.packet_life_time)
        else:
            attr.alt_timeout = path.packet_life_time + 1  # the peer's message had this number, from which the path came
        attr.path_mig_state = MigState.REARM

    def access(self) -> AccessFlag:
        assert self.connection is not None
        return self._user.link.access[bool(self._read_depths(self.connection)[1])]

    def _read_depths(self, connection: CmConnection) -> tuple[int, int]:
        """How many READs and atomics may be in progress: from this side, and from the peer."""
        if not connection.is_active:
            if self._accepted is not None:
                return self._accepted.initiator_depth, self._accepted.responder_resources
            asked = connection.request  # not accepted yet: the application makes its queue pair ready first
            return (asked.responder_resources, asked.initiator_depth) if isinstance(asked, REQ) else (0, 0)
        reply = connection.reply
        if reply is not None:
            return reply.responder_resources, reply.initiator_depth
        assert isinstance(connection.request, REQ)
        return connection.request.initiator_depth, connection.request.responder_resources
