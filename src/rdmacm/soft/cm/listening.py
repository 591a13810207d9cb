"""Listening: which requests are for an id of the software device, and the id that each of them makes."""

from __future__ import annotations

import weakref
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING, cast

from rdmacm.address import ALL_BITS_64, DEFAULT_PKEY, Gid, InetAddr, SockAddrIB, service_id
from rdmacm.cmstate import State, Trigger
from rdmacm.connparam import ConnParam, Ece
from rdmacm.constants import CmEventType
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.cm.connection import CmConnection, CmListener
from rdmacm.proto.cm.events import ConnectRequest, SidrRequest
from rdmacm.proto.cm.messages import REQ, SIDR_REQ
from rdmacm.proto.cm.private_data import HEADER_SIZE, PrivateDataHeader
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.wire import WireError
from rdmacm.provider import Address, IdOptions, QueuedEvent
from rdmacm.soft.ib.ports import IbPath, IbView
from rdmacm.soft.ib.resolution import AskingId
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.enums import Mtu, QPType

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rdmacm.resolution.hosts import DeviceView, HostView
    from rdmacm.soft.cm.connecting import SoftId
    from rdmacm.soft.cm.manager import ConnectionManager
    from rdmacm.soft.event_queue import SoftQueue
    from rdmacm.soft.provider import SoftProvider
    from rdmacm.verbs.device import GidEntry

__all__ = ["NO_ECE", "ListeningId"]

#: What a listener may have waiting at most, net.rdma_ucm.max_backlog.
_MAX_BACKLOG = 1024
NO_ECE = Ece(0)


class ListeningId(AskingId):
    """See :class:`rdmacm.soft.cm.connecting.SoftId`, which is the whole."""

    __slots__ = ("_connection", "_is_accepted", "_listeners", "_remote_ece")

    def __init__(
        self, provider: SoftProvider, queue: SoftQueue, owner: object | None, port_space: int, qp_type: int
    ) -> None:
        super().__init__(provider, queue, owner, port_space, qp_type)
        #: The managers it listens with: a wildcard's are several.
        self._listeners: list[tuple[ConnectionManager, CmListener]] = []
        self._connection: CmConnection | None = None
        #: False until the application has answered the request that made this id.
        self._is_accepted = True
        self._remote_ece = NO_ECE

    def listen(self, backlog: int) -> None:
        with self._provider.lock:
            self._provider.check_fork("listen")
            if not self._may(Trigger.LISTEN):
                raise self._refuse(Trigger.LISTEN.value)
            if self.state is State.IDLE:
                self.bind_addr(InetAddr.any(AF_INET))
            if not 0 < backlog <= _MAX_BACKLOG:
                backlog = _MAX_BACKLOG
            local = self.local_addr
            assert local is not None
            if isinstance(local, SockAddrIB):
                service, ip = local.sid, None
            else:
                service, ip = service_id(self.port_space, local.port), None if local.is_any else local.ip
            port = self._port_owner
            shared = port if port is not None and port.reuseaddr else None
            if shared is not None:
                self._provider.ports.claim(shared)
            try:
                for cm in self._managers(local):
                    self._listeners.append((cm, cm.listen(self, service, ip, backlog, self._takes)))
            except BaseException:
                self._unlisten()
                if shared is not None:
                    self._provider.ports.share(shared)
                raise
            self._move(Trigger.LISTEN)

    def _managers(self, local: Address) -> list[ConnectionManager]:
        """Whom requests for this listener may come to: its device's, or for an AF_IB wildcard all there are."""
        if self._device is not None or isinstance(local, InetAddr):
            return [self.cm]
        subnets = (view.subnet for view in self._provider.ib.views())
        return [self.cm, *(subnet.cm for subnet in subnets if subnet.transport.carries_cm)]

    def _unlisten(self) -> None:
        for cm, listener in self._listeners:
            cm.unlisten(listener)
        self._listeners.clear()

    def _takes(self, request: REQ | SIDR_REQ, path: Hashable) -> bool:
        """Whether a request for this id's port is for this id: type, address family, address and interface."""
        local = self.local_addr
        if (self.qp_type == QPType.UD) is isinstance(request, REQ):
            return False
        header = _header(request) if isinstance(path, WirePath) else None
        if header is None:
            return isinstance(local, SockAddrIB)
        if not isinstance(local, InetAddr) or not isinstance(path, WirePath) or header.version:
            return False
        if local.is_any:
            afonly = self._port_owner is not None and self._port_owner.afonly
            return header.family == local.family or (local.family == AF_INET6 and not afonly)
        same_scope = not local.scope_id or not path.scope_id or path.scope_id == local.scope_id
        return header.destination == local.ip and same_scope

    def requested(self, event: ConnectRequest | SidrRequest, cm: ConnectionManager) -> None:
        """A request has come for this listener: make it an id and tell the application."""
        request, path, header = event.request, event.path, None
        child = cast("SoftId", type(self)(self._provider, self.queue, None, self.port_space, self.qp_type))
        if isinstance(path, WirePath):
            header = _header(request)
            refusal = child._begin(request, header, path)
        else:
            assert cm.subnet is not None
            refusal = child._begin_ib(request, path, cm.subnet.view())
        if refusal is not None:
            self.queue.ids.pop(child, None)
            if isinstance(request, REQ):
                cm.agent.reject(event.comm_id, self._provider.clock(), refusal[0], ari=refusal[1])
            else:
                cm.agent.destroy(event.comm_id, self._provider.clock())
            return
        options = self.options
        child.options = IdOptions(options.tos, options.reuseaddr, options.afonly, options.ack_timeout)
        child.state = State.CONNECT
        child._is_accepted = False
        if isinstance(request, REQ) and request.vendor_id:
            child._remote_ece = Ece(request.vendor_id, request.attr_mod)
        child._connection = cm.own(event.comm_id, child)
        owner = self._owner()
        if owner is None:
            child.destroy()
            return
        param = child._request_param(request, header)
        self.queue.post(QueuedEvent(owner, CmEventType.CONNECT_REQUEST, param=param, new_id=child))

    def _begin(
        self, request: REQ | SIDR_REQ, header: PrivateDataHeader | None, path: WirePath
    ) -> tuple[RejectReason, bytes] | None:
        """Become the passive side of a request; the reason and information of a REJ where that cannot be."""
        host = self._provider.host_now()
        dgid: Gid | None = None
        ours, theirs = path.local, path.remote
        if isinstance(request, REQ):
            dgid = request.primary.local_gid
            ours, theirs = request.primary.remote_gid.ip, dgid.ip
        found = _owners(host, ours, path.scope_id)
        if not found:  # an address that has just been added
            host = self._provider.host()
            found = _owners(host, ours, path.scope_id)
        if not found and len(ours) == 4 and ours[0] == 127 and host.loopback is not None:
            found = [(host.loopback, row) for row in host.loopback.rows if len(row.gid.ip) == 4][:1]
        if not found or len(theirs) != len(ours):
            return RejectReason.INVALID_GID, bytes(Gid.from_ip(path.local))
        view, row = found[0]
        mtu = view.device.ports[0].active_mtu or Mtu.MTU_256
        if isinstance(request, REQ) and not 0 < request.path_mtu <= mtu:
            return RejectReason.INVALID_MTU, bytes((mtu,))
        self.dgid = dgid or Gid.from_ip(theirs)
        if header is not None:
            family = AF_INET if header.ip_version == 4 else AF_INET6
            self.local_addr = InetAddr(family, header.destination, request.service_id & 0xFFFF, 0, path.scope_id)
            self.peer_addr = InetAddr(family, header.source, header.source_port, 0, path.scope_id)
        else:
            self.local_addr = SockAddrIB(row.gid, request.service_id, ALL_BITS_64, DEFAULT_PKEY)
            self.peer_addr = SockAddrIB(self.dgid, 0, 0, DEFAULT_PKEY)
        self._attach(view)
        self.sgid, self.gid_index = row.gid, row.gid_index
        self.paths = (_path_of(request, row.gid, self.dgid, mtu),)
        return None

    def _begin_ib(
        self, request: REQ | SIDR_REQ, path: object, view: IbView | None
    ) -> tuple[RejectReason, bytes] | None:
        """As :meth:`_begin`, on InfiniBand: the addresses are GIDs, and the P_Key has to be one of the port's."""
        assert isinstance(path, IbPath)
        primary = request.primary if isinstance(request, REQ) else None
        rows = view.rows if view is not None else ()
        row = next((row for row in rows if primary is None or row.gid == primary.remote_gid), None)
        if view is None or row is None or not view.has_pkey(request.partition_key):
            return RejectReason.INVALID_GID, bytes(rows[0].gid) if rows else b""
        mtu = view.device.ports[0].active_mtu or Mtu.MTU_256
        if isinstance(request, REQ) and not 0 < request.path_mtu <= mtu:
            return RejectReason.INVALID_MTU, bytes((mtu,))
        self.dgid = primary.local_gid if primary is not None else Gid()
        pkey = request.partition_key
        self.local_addr = SockAddrIB(row.gid, request.service_id, ALL_BITS_64, pkey)
        self.peer_addr = SockAddrIB(self.dgid, 0, 0, pkey)
        self._attach(view, pkey)
        self.sgid, self.gid_index = row.gid, row.gid_index
        found = _path_of(request, row.gid, self.dgid, mtu)
        self.paths = (found.replace(slid=view.port.lid, dlid=path.lid, sl=path.sl, pkey=pkey),)
        return None

    @staticmethod
    def _request_param(request: REQ | SIDR_REQ, header: PrivateDataHeader | None) -> ConnParam:
        user = request.private_data if header is None else request.private_data[HEADER_SIZE:]
        if isinstance(request, SIDR_REQ):
            return ConnParam(private_data=user, responder_resources=0, initiator_depth=0)
        return ConnParam(
            private_data=user,
            responder_resources=request.initiator_depth,
            initiator_depth=request.responder_resources,
            flow_control=int(request.end_to_end_flow_control),
            retry_count=request.retry_count,
            rnr_retry_count=request.rnr_retry_count,
            srq=int(request.srq),
            qp_num=request.local_qpn,
        )

    def adopt(self, owner: object) -> None:
        """The application has got this id by its request: ``owner`` is the object that stands for it."""
        self._owner = weakref.ref(owner)

    def delivered(self) -> None:
        """The application fetches the request: it leaves the backlog."""
        if self._connection is not None:
            self.cm.agent.delivered(self._connection.comm_id)


def _owners(host: HostView, ip: bytes, scope_id: int) -> list[tuple[DeviceView, GidEntry]]:
    """The devices and GIDs of a local address."""
    return [(view, row) for view, row in host.by_ip.get(ip, ()) if scope_id in (0, view.interface.index)]


def _header(request: REQ | SIDR_REQ) -> PrivateDataHeader | None:
    """The rdma_cm header of a request; None where an AF_IB request has none."""
    try:
        header = PrivateDataHeader.unpack(request.private_data)
    except WireError:
        return None
    return header if header.family is not None else None


def _path_of(request: REQ | SIDR_REQ, sgid: Gid, dgid: Gid, mtu: Mtu) -> PathRecord:
    if isinstance(request, SIDR_REQ):
        return PathRecord(dgid, sgid, request.service_id, hop_limit=64, mtu=mtu)
    primary = request.primary
    return PathRecord(
        dgid=dgid,
        sgid=sgid,
        service_id=request.service_id,
        flow_label=primary.flow_label,
        hop_limit=primary.hop_limit,
        traffic_class=primary.traffic_class,
        pkey=request.partition_key,
        sl=primary.sl,
        mtu=request.path_mtu,
        packet_life_time=max(0, primary.local_ack_timeout - 1),
    )
