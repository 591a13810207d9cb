"""What an id of the software device does once it knows where: connect, accept, reject, disconnect.

The messages are the agent's business (:mod:`rdmacm.soft.cm.manager`); here they get their contents and become the
events and the queue pair attributes that the manual pages promise. An id with a queue pair of its own takes it through its
states by itself: on the passive side before the REP is sent, on the active side when the REP arrives, so that data
may flow at once.
"""

from __future__ import annotations

import contextlib
import errno
from socket import AF_INET
from typing import TYPE_CHECKING, Any

from rdmacm.address import AF_IB, InetAddr, SockAddrIB, service_id
from rdmacm.cmstate import Trigger
from rdmacm.connparam import ConnParam, Ece, UdParam
from rdmacm.constants import CmEventType
from rdmacm.errors import CmStateError, RdmaError, cm_error
from rdmacm.proto.cm import states
from rdmacm.proto.cm.codes import RejectReason, SidrStatus
from rdmacm.proto.cm.connection import CmConnection
from rdmacm.proto.cm.events import (
    ConnectReply,
    Disconnected,
    DisconnectRequested,
    Established,
    Event,
    Rejected,
    SidrReply,
    TimewaitExit,
    Unreachable,
)
from rdmacm.proto.cm.messages import REJ, REP, REQ, SIDR_REP, SIDR_REQ, Message, Path
from rdmacm.proto.cm.private_data import PrivateDataHeader, user_capacity
from rdmacm.proto.cm.timeouts import ack_timeout
from rdmacm.proto.sa import PathRecord
from rdmacm.provider import Address, QueuedEvent
from rdmacm.soft.cm.listening import NO_ECE, ListeningId
from rdmacm.soft.device.queue_pair import AsyncEvent, SoftQP
from rdmacm.soft.ib.ports import IbPath, IbView
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPAttr
from rdmacm.verbs.enums import AccessFlag, Mtu, QPAttrMask, QPState, QPType

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmacm.soft.event_queue import SoftQueue
    from rdmacm.soft.provider import SoftProvider
    from rdmacm.verbs.qp import QP

__all__ = ["SoftId"]

#: Exponent of 4.096 µs: how long this device may take to acknowledge, 0.13 s.
CA_ACK_DELAY = 15
#: Linux's rdma_cm asks for this Q_Key on the port spaces UDP and IB.
UDP_QKEY = 0x01234567
#: A receiver that is not ready asks for 0.64 ms (InfiniBand Architecture 9.7.5.2.8); rdma_cm's 0 would mean 655 ms.
_MIN_RNR_TIMER = 12
_LID_UNUSED = 0xFFFF
_EVENT_COMM_EST = 4

_M = QPAttrMask
#: What is said on the way to each state; flags are slow to combine.
_TO_INIT = _M.STATE | _M.ACCESS_FLAGS | _M.PKEY_INDEX | _M.PORT
_TO_RTR = _M.STATE | _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN | _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
_TO_RTS = _M.STATE | _M.SQ_PSN | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC | _M.TIMEOUT
_MTUS = {int(mtu): mtu for mtu in Mtu}
#: A path record has more room for it than a request.
_HIGHEST_MTU = 15
_ANY_REMOTE = AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC


class SoftId(ListeningId):
    """See :class:`rdmacm.provider.IdBackend`."""

    __slots__ = (
        "_accept",
        "_is_disconnected",
        "_local_ece",
        "_soft_qp",
        "qkey",
        "qp",
    )

    def __init__(
        self, provider: SoftProvider, queue: SoftQueue, owner: object | None, port_space: int, qp_type: int
    ) -> None:
        super().__init__(provider, queue, owner, port_space, qp_type)
        self.qp: QP | None = None
        self._soft_qp: SoftQP | None = None
        self.qkey = 0
        self._accept: ConnParam | None = None
        self._is_disconnected = False
        self._local_ece: Ece | None = None

    # -- connecting -----------------------------------------------------------------------------------

    def connect(self, param: ConnParam) -> None:
        with self._provider.lock:
            self._provider.check_fork("connect")
            if not self._may(Trigger.CONNECT):
                raise self._refuse(Trigger.CONNECT.value)
            peer, local = self.peer_addr, self.local_addr
            kind = SIDR_REQ if self.qp_type == QPType.UD else REQ
            _check_size(param.private_data, kind, "connect", peer)
            private_data = param.private_data
            if isinstance(peer, InetAddr):
                assert isinstance(local, InetAddr)
                private_data = PrivateDataHeader.between(local, peer).pack() + private_data
                service = service_id(self.port_space, peer.port)
            else:
                assert peer is not None
                service = peer.sid
            cm, now, path = self.cm, self._provider.clock(), self._wire_path()
            self._move(Trigger.CONNECT)
            try:
                if kind is SIDR_REQ:
                    request = SIDR_REQ(service, private_data=private_data)
                    comm_id = cm.agent.sidr_request(path, request, now)
                else:
                    life = self.paths[0].packet_life_time
                    req = self._req(service, private_data, param)
                    comm_id = cm.agent.connect(path, req, now, packet_life_time=life)
            except BaseException:
                self._move(Trigger.CONNECT_REFUSED)
                raise
            self._connection = cm.own(comm_id, self)
            cm.pump()

    def _wire_path(self) -> WirePath | IbPath:
        if isinstance(self._device, IbView):
            path, view = self.paths[0], self._now("connect")
            index = view.port.pkey_index(self._partition())
            if index is None:
                table = ", ".join(f"0x{pkey:04x}" for pkey in view.port.pkeys)
                raise cm_error(
                    errno.EINVAL,
                    f"P_Key 0x{self._partition():04x} of the path is not in the table of {view.device.name}: {table}",
                    "connect",
                    str(self.peer_addr),
                )
            return IbPath(path.dlid, path.sl, index)
        scope = self.peer_addr.scope_id if isinstance(self.peer_addr, InetAddr) else 0
        return WirePath(self.sgid.ip, self.dgid.ip, scope)

    def _partition(self) -> int:
        """The P_Key of the connection: on InfiniBand the path says it."""
        path = self.paths[0] if self.paths else None
        return path.pkey if isinstance(self._device, IbView) and path is not None and path.pkey else self.pkey

    def _req(self, service: int, private_data: bytes, param: ConnParam) -> REQ:
        path, ece = self.paths[0], self._local_ece or NO_ECE
        if path.mtu > _HIGHEST_MTU:  # whoever has said it
            raise cm_error(errno.EINVAL, f"{path.mtu} is no path MTU", "connect", str(self.peer_addr))
        return REQ(
            service_id=service,
            local_ca_guid=self._node_guid(),
            local_qpn=self.qp.qp_num if self.qp is not None else param.qp_num,
            responder_resources=param.responder_resources,
            initiator_depth=param.initiator_depth,
            end_to_end_flow_control=bool(param.flow_control),
            retry_count=min(param.retry_count, 7),
            rnr_retry_count=min(param.rnr_retry_count, 7),
            path_mtu=path.mtu,
            srq=bool(param.srq),
            partition_key=self._partition(),
            primary=self._req_path(path),
            alternate=self._req_path(self.paths[1]) if len(self.paths) > 1 else Path(),
            private_data=private_data,
            vendor_id=ece.vendor_id,
            attr_mod=ece.options,
        )

    def _req_path(self, path: PathRecord) -> Path:
        timeout = self.options.ack_timeout
        has_lids = isinstance(self._device, IbView)
        return Path(
            local_gid=path.sgid,
            remote_gid=path.dgid,
            local_lid=path.slid if has_lids else _LID_UNUSED,
            remote_lid=path.dlid if has_lids else _LID_UNUSED,
            flow_label=path.flow_label,
            packet_rate=path.rate if has_lids else 0,
            traffic_class=path.traffic_class,
            hop_limit=path.hop_limit,
            sl=path.sl,
            subnet_local=path.hop_limit <= 1,
            local_ack_timeout=ack_timeout(CA_ACK_DELAY, path.packet_life_time) if timeout is None else timeout & 31,
        )

    def _node_guid(self) -> int:
        assert self._device is not None
        return self._device.device.node_guid

    def establish(self) -> None:
        with self._provider.lock:
            if not self._may(Trigger.ACCEPT) or self._connection is None:
                raise self._refuse("establish")
            self.cm.agent.send_rtu(self._connection.comm_id, self._provider.clock())
            self.cm.pump()

    # -- answering ------------------------------------------------------------------------------------

    def accept(self, param: ConnParam) -> None:
        with self._provider.lock:
            self._provider.check_fork("accept")
            connection = self._connection
            if not self._may(Trigger.ACCEPT) or connection is None or self._is_accepted:
                raise self._refuse(Trigger.ACCEPT.value)
            agent, now = self.cm.agent, self._provider.clock()
            kind = SIDR_REP if self.qp_type == QPType.UD else REP
            _check_size(param.private_data, kind, "accept", self.peer_addr)
            if connection.state not in states.AWAITING_USER:
                raise CmStateError(
                    errno.EINVAL, "the peer has given up meanwhile", "accept", str(self.peer_addr), "destroy the id"
                )
            self._accept = param
            if kind is SIDR_REP:
                qpn = self.qp.qp_num if self.qp is not None else param.qp_num
                self.qkey = self.qkey or param.qkey or UDP_QKEY
                agent.sidr_reply(
                    connection.comm_id, SIDR_REP(qpn=qpn, q_key=self.qkey, private_data=param.private_data), now
                )
            else:
                self._accept_connection(connection, param, now)
            self._is_accepted = True
            self.cm.pump()

    def _accept_connection(self, connection: CmConnection, param: ConnParam, now: float) -> None:
        agent, ece = self.cm.agent, self._local_ece or NO_ECE
        reply = REP(
            local_qpn=self.qp.qp_num if self.qp is not None else param.qp_num,
            responder_resources=param.responder_resources,
            initiator_depth=param.initiator_depth,
            target_ack_delay=CA_ACK_DELAY,
            end_to_end_flow_control=bool(param.flow_control),
            rnr_retry_count=min(param.rnr_retry_count, 7),
            srq=bool(param.srq),
            local_ca_guid=self._node_guid(),
            private_data=param.private_data,
            vendor_id=ece.vendor_id,
            attr_mod=ece.options,
        )
        try:
            if self._soft_qp is not None:
                self._make_ready(self._soft_qp)
            agent.accept(connection.comm_id, reply, now)
        except BaseException:  # as the kernel does: the peer need not wait for an answer that will not come
            self._fail_qp()
            with contextlib.suppress(CmStateError):
                agent.reject(connection.comm_id, now)
            self.cm.pump()
            raise

    def reject(self, private_data: bytes, reason: int) -> None:
        with self._provider.lock:
            if not self._may(Trigger.REJECT) or self._connection is None:
                raise self._refuse(Trigger.REJECT.value)
            comm_id = self._connection.comm_id
            if reason not in (RejectReason.CONSUMER_DEFINED, RejectReason.VENDOR_OPTION_NOT_SUPPORTED):
                raise cm_error(errno.EINVAL, f"reason {reason} is not the application's to give", "reject")
            datagram = self.qp_type == QPType.UD
            kind = SIDR_REP if datagram else REJ
            _check_size(private_data, kind, "reject", self.peer_addr)
            agent, now = self.cm.agent, self._provider.clock()
            if datagram:
                agent.sidr_reply(comm_id, SIDR_REP(status=SidrStatus.REJECT, private_data=private_data), now)
            else:
                agent.reject(comm_id, now, reason, private_data)
            self.cm.pump()

    # -- connected ------------------------------------------------------------------------------------

    def notify(self, event: int) -> None:
        with self._provider.lock:
            connection = self._connection
            if not self._may(Trigger.NOTIFY) or connection is None:
                raise self._refuse(Trigger.NOTIFY.value)
            if event != _EVENT_COMM_EST:
                raise cm_error(errno.EINVAL, f"asynchronous event {event} is none to be notified of", "notify")
            if connection.state is states.CmState.ESTABLISHED:
                raise cm_error(errno.EISCONN, "the connection is established already", "notify")
            self.cm.agent.establish(connection.comm_id, self._provider.clock())
            self.cm.pump()

    def communication_established(self) -> None:
        """Data has come before the RTU, which may be lost: it proves as much."""
        if self._connection is not None:
            with contextlib.suppress(CmStateError):
                self.cm.agent.establish(self._connection.comm_id, self._provider.clock())
                self.cm.pump()

    def disconnect(self) -> bool:
        with self._provider.lock:
            connection = self._connection
            if not self._may(Trigger.DISCONNECT) or connection is None:
                raise self._refuse(Trigger.DISCONNECT.value)
            self._fail_qp()
            follows = not self._is_disconnected
            try:
                self.cm.agent.disconnect(connection.comm_id, self._provider.clock())
            except CmStateError:  # there is nothing to end (any more), which is no error
                follows = False
            self.cm.pump()
            self.cm.hold_qpn(connection)
            return follows

    def attach_qp(self, qp: QP | None) -> None:
        with self._provider.lock:
            if qp is None:
                self.qp = self._soft_qp = None
                return
            backend = qp.backend
            assert isinstance(backend, SoftQP)
            self._initial_attr(backend.attr)
            backend.advance(QPState.INIT)
            backend.on_async_event = self._queue_pair_event
            self.qp, self._soft_qp = qp, backend

    def _queue_pair_event(self, _: SoftQP, event: AsyncEvent) -> None:
        if event is AsyncEvent.COMM_EST:
            self.communication_established()

    def _fail_qp(self) -> None:
        if self._soft_qp is not None:
            self._soft_qp.fail()

    # -- what the connection manager tells ------------------------------------------------------------

    def connection_event(self, event: Event) -> None:
        """Something happened to this id's connection."""
        _HEARD[type(event)](self, event)

    def _established(self, _: Established) -> None:
        self._tell(CmEventType.ESTABLISHED)

    def _rejected(self, event: Rejected) -> None:
        self._fail_qp()
        param = ConnParam(event.private_data, 0, 0, retry_count=0, rnr_retry_count=0)
        self._tell(CmEventType.REJECTED, event.reason, param, _rejection(event.reason))

    def _unreachable(self, _: Unreachable) -> None:
        self._fail_qp()
        self._tell(CmEventType.UNREACHABLE, -errno.ETIMEDOUT, None, "nobody answered")

    def _timewait_over(self, _: TimewaitExit) -> None:
        self._tell(CmEventType.TIMEWAIT_EXIT)

    def _tell(
        self, kind: CmEventType, status: int = 0, param: ConnParam | UdParam | None = None, text: str = ""
    ) -> None:
        owner = self._owner()
        if owner is not None and self._is_accepted:  # nobody waits for news of a request that is not answered yet
            self.queue.post(QueuedEvent(owner, kind, status, message=text, param=param))

    def _replied(self, event: ConnectReply) -> None:
        reply, comm_id = event.reply, event.comm_id
        if reply.vendor_id:
            self._remote_ece = Ece(reply.vendor_id, reply.attr_mod)
        param = ConnParam(
            private_data=reply.private_data,
            responder_resources=reply.initiator_depth,
            initiator_depth=reply.responder_resources,
            flow_control=int(reply.end_to_end_flow_control),
            retry_count=0,
            rnr_retry_count=reply.rnr_retry_count,
            srq=int(reply.srq),
            qp_num=reply.local_qpn,
        )
        if self._soft_qp is None:
            self._tell(CmEventType.CONNECT_RESPONSE, 0, param)
            return
        agent, now = self.cm.agent, self._provider.clock()
        try:
            self._make_ready(self._soft_qp)
        except RdmaError as error:
            agent.reject(comm_id, now)
            self._fail_qp()
            self._tell(CmEventType.CONNECT_ERROR, -(error.errno or errno.EIO), None, str(error.strerror))
            return
        agent.send_rtu(comm_id, now)
        self._tell(CmEventType.ESTABLISHED, 0, param)

    def _disconnected(self, event: DisconnectRequested | Disconnected) -> None:
        status = -errno.ETIMEDOUT if isinstance(event, Disconnected) and event.timed_out else 0
        if not self._is_disconnected:
            self._is_disconnected = True
            if self._may(Trigger.DISCONNECTED):
                self._move(Trigger.DISCONNECTED)
            self._tell(CmEventType.DISCONNECTED, status, None, "the peer never confirmed" if status else "")

    def _resolved_service(self, event: SidrReply) -> None:
        reply = event.reply
        if reply.status != SidrStatus.SUCCESS:
            self._tell(CmEventType.UNREACHABLE, reply.status, None, _SIDR_TEXT.get(reply.status, "the peer refused"))
            return
        self.qkey = reply.q_key
        param = UdParam(reply.private_data, self._ah_attr(), reply.qpn, reply.q_key)
        self._tell(CmEventType.ESTABLISHED, 0, param)

    # -- queue pair attributes ------------------------------------------------------------------------

    def _make_ready(self, qp: SoftQP) -> None:
        connection = self._connection
        assert connection is not None
        attr = self._connected_attr(qp.attr, connection)
        attr.qp_access_flags = self._access(connection)  # it has been in INIT without
        qp.advance(QPState.RTS)

    def init_qp_attr(self, state: QPState) -> tuple[QPAttr, QPAttrMask]:
        with self._provider.lock:
            if self._device is None:
                raise cm_error(errno.EINVAL, "the id is not bound to a device", "init_qp_attr", hint="resolve_addr()")
            try:
                attr = QPAttr(qp_state=QPState(state), port_num=self.port_num)
            except ValueError:
                raise cm_error(errno.EINVAL, f"unknown state {state}", "init_qp_attr") from None
            if self.qp_type == QPType.UD:
                return self._datagram_attr(attr)
            if attr.qp_state is QPState.INIT:
                return self._initial_attr(attr), _TO_INIT
            if attr.qp_state not in (QPState.RTR, QPState.RTS):
                return attr, _M.STATE
            connection = self._connection
            if connection is None or connection.state is states.CmState.IDLE:
                raise self._refuse("init_qp_attr")
            return self._connected_attr(attr, connection), _TO_RTR if attr.qp_state is QPState.RTR else _TO_RTS

    def _datagram_attr(self, attr: QPAttr) -> tuple[QPAttr, QPAttrMask]:
        if attr.qp_state is QPState.INIT:
            attr.qkey = self.qkey = self.qkey or UDP_QKEY
            if isinstance(self._device, IbView):
                attr.pkey_index = self._device.port.pkey_index(self._partition()) or 0
            return attr, _M.STATE | _M.PKEY_INDEX | _M.PORT | _M.QKEY
        return attr, _M.STATE | _M.SQ_PSN if attr.qp_state is QPState.RTS else _M.STATE

    def _initial_attr(self, attr: QPAttr) -> QPAttr:
        """What takes a queue pair to INIT."""
        attr.port_num = self.port_num
        if isinstance(self._device, IbView):
            attr.pkey_index = self._device.port.pkey_index(self._partition()) or 0
        connection = self._connection
        if connection is not None:
            attr.qp_access_flags = self._access(connection)
        return attr

    def _connected_attr(self, attr: QPAttr, connection: CmConnection) -> QPAttr:
        """What takes a queue pair on to RTR and to RTS."""
        request = connection.request
        if not isinstance(request, REQ):
            raise self._refuse("init_qp_attr")
        peer = connection.reply if connection.is_active else request
        if peer is None:
            raise self._refuse("init_qp_attr")
        mtu = _MTUS.get(request.path_mtu)
        if mtu is None:  # of a path record that the application has set
            raise cm_error(errno.EINVAL, f"{request.path_mtu} is no path MTU", "init_qp_attr", str(self.peer_addr))
        attr.port_num = self.port_num
        attr.ah_attr = self._ah_attr()
        attr.path_mtu = mtu
        attr.dest_qp_num = peer.local_qpn
        attr.rq_psn = connection.starting_psn
        attr.max_rd_atomic, attr.max_dest_rd_atomic = self._resources(connection)
        attr.min_rnr_timer = _MIN_RNR_TIMER
        attr.sq_psn = peer.starting_psn
        attr.retry_cnt = request.retry_count
        attr.rnr_retry = peer.rnr_retry_count
        attr.timeout = connection.av_timeout if self.options.ack_timeout is None else self.options.ack_timeout & 31
        return attr

    def _access(self, connection: CmConnection) -> AccessFlag:
        return _ANY_REMOTE if self._resources(connection)[1] else AccessFlag.REMOTE_WRITE

    def _resources(self, connection: CmConnection) -> tuple[int, int]:
        """READs and atomics of ours at a time, and of the peer's."""
        if not connection.is_active:
            if self._accept is not None:
                return self._accept.initiator_depth, self._accept.responder_resources
            asked = connection.request  # a queue pair of the user's own is made ready before the answer
            return (asked.responder_resources, asked.initiator_depth) if isinstance(asked, REQ) else (0, 0)
        reply = connection.reply
        if reply is not None:
            return reply.responder_resources, reply.initiator_depth
        assert isinstance(connection.request, REQ)
        return connection.request.initiator_depth, connection.request.responder_resources

    def _ah_attr(self) -> AHAttr:
        path = self.paths[0]
        route = GlobalRoute(path.dgid, self.gid_index, path.flow_label, path.hop_limit or 64, path.traffic_class)
        if isinstance(self._device, IbView):
            return AHAttr(
                dlid=path.dlid,
                sl=path.sl,
                src_path_bits=path.slid & (1 << self._device.port.lmc) - 1,
                static_rate=path.rate,
                is_global=path.hop_limit > 1,
                port_num=self.port_num,
                gr=route if path.hop_limit > 1 else GlobalRoute(),
            )
        return AHAttr(is_global=True, port_num=self.port_num, sl=path.sl, gr=route)

    # -- enhanced connection establishment ------------------------------------------------------------

    def set_local_ece(self, ece: Ece) -> None:
        self._local_ece = ece

    def remote_ece(self) -> Ece:
        return self._remote_ece

    # -- the end --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        with self._provider.lock:
            self._unlisten()
            if self._connection is not None:
                connection, self._connection = self._connection, None
                self.cm.leave(connection)
            super().destroy()


_HEARD: dict[type[Event], Callable[[SoftId, Any], None]] = {
    ConnectReply: SoftId._replied,
    Established: SoftId._established,
    Rejected: SoftId._rejected,
    Unreachable: SoftId._unreachable,
    DisconnectRequested: SoftId._disconnected,
    Disconnected: SoftId._disconnected,
    TimewaitExit: SoftId._timewait_over,
    SidrReply: SoftId._resolved_service,
}
#: How much private data is the application's: with IP addresses, and with InfiniBand's, which need no header.
_ROOM: dict[type[Message], int] = {kind: user_capacity(kind, AF_INET) for kind in (REQ, REP, REJ, SIDR_REQ, SIDR_REP)}
_ROOM_IB: dict[type[Message], int] = {kind: user_capacity(kind, AF_IB) for kind in _ROOM}
_SIDR_TEXT: dict[int, str] = {
    SidrStatus.UNSUPPORTED: "nobody listens on that port",
    SidrStatus.REJECT: "the peer's application, or its connection manager, refused",
    SidrStatus.NO_QP: "the peer has no queue pair for it",
}


def _check_size(private_data: bytes, kind: type[Message], step: str, address: Address | None) -> None:
    room = (_ROOM_IB if isinstance(address, SockAddrIB) else _ROOM)[kind]
    if len(private_data) > room:
        raise cm_error(
            errno.EINVAL,
            f"{len(private_data)} bytes of private data do not fit, {room} do",
            step,
            str(address),
            "send the rest as a message once connected",
        )


def _rejection(reason: int) -> str:
    try:
        name = RejectReason(reason).name.lower().replace("_", " ")
    except ValueError:
        return f"rejected, reason {reason}"
    return {
        RejectReason.INVALID_SERVICE_ID: "nobody listens on that port",
        RejectReason.CONSUMER_DEFINED: "the peer's application, or its connection manager, refused",
    }.get(RejectReason(reason), f"rejected: {name}")
