"""The link of an id on RoCE: the path is made from the route and the interface."""

from __future__ import annotations

import errno
from collections.abc import Callable
from socket import AF_INET, AF_INET6
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from rdmacm.address import (
    ALL_BITS_64,
    DEFAULT_PKEY,
    V4_MAPPED,
    Address,
    Gid,
    InetAddr,
    SockAddrIB,
    inet_addr,
    is_multicast,
    service_id,
)
from rdmacm.capabilities import SOFT, Feature, absent
from rdmacm.constants import CmEventType
from rdmacm.errors import Failure, RdmaError, cm_error
from rdmacm.proto.cm.codes import ApStatus, FailoverAccepted, RejectReason
from rdmacm.proto.cm.messages import REQ, Path
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.cm.timeouts import ack_timeout
from rdmacm.proto.constants import MULTICAST_QPN
from rdmacm.proto.sa import PathRecord
from rdmacm.provider.cmstate import Trigger
from rdmacm.provider.connparam import UdParam
from rdmacm.resolution.hosts import HostView, PortView, RocePortView
from rdmacm.resolution.lookup import Lookup
from rdmacm.resolution.path import ROCE_PACKET_LIFETIME
from rdmacm.soft.device.attributes import DEFAULT_HOP_LIMIT, vector_of
from rdmacm.soft.ids.id_state import IdState, explain_failure
from rdmacm.soft.ids.link import CA_ACK_DELAY, SOFTWARE_ACCESS, UDP_QKEY, Refusal
from rdmacm.soft.ids.request import header_of, path_of_request
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import AHAttr, GlobalRoute
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import Mtu

if TYPE_CHECKING:
    from rdmacm.proto.cm.connection import CmConnection
    from rdmacm.provider import ServiceBackend
    from rdmacm.provider.multicast import GroupJoin
    from rdmacm.soft.connection_manager import ConnectionManager

#: Makes what each connection needs: the constructor of a named tuple is a function in Python.
_make_tuple = tuple.__new__

#: The LIDs in a REQ of RoCE, which has none (InfiniBand Architecture annex A16).
_LID_UNUSED = 0xFFFF


class _Fit(NamedTuple):
    """Where a request arrived: the port, the row of its GID table, and its MTU; as of one view of the host."""

    host: HostView
    #: The IP addresses of the request; None for a request between AF_IB addresses.
    header: PrivateDataHeader | None
    view: PortView
    row: GidEntry
    mtu: Mtu


class RoceLink:
    """See :class:`rdmacm.soft.ids.link.Link`."""

    __slots__ = ("_groups", "_id", "cm")

    access = SOFTWARE_ACCESS
    pkey_index = 0
    no_failover = FailoverAccepted.UNSUPPORTED

    def __init__(self, core: IdState) -> None:
        self._id = core
        #: See :class:`rdmacm.soft.ids.link.Link`.
        self.cm: ConnectionManager = core.host.cm
        #: The group and the interface of each join that receives; None until the first.
        self._groups: dict[GroupJoin, tuple[bytes, int]] | None = None

    # -- resolving a route ----------------------------------------------------------------------------

    def resolve_route(self, timeout_ms: int, alternate: bool) -> None:
        """Make the path from the interface: RoCE has no subnet administrator, and no alternate paths."""
        core, lookup = self._id, self._id.lookup
        local, peer = core.local_addr, core.peer_addr
        assert isinstance(local, InetAddr) and isinstance(peer, InetAddr) and isinstance(lookup, Lookup)
        started = perf_counter_ns()
        option = core.options.ack_timeout
        lookup.tos = core.options.tos or 0
        try:
            path = core.host.paths.make(
                lookup,
                local.port,
                dgid=core.dgid,
                service_id=service_id(core.port_space, peer.port),
                packet_life_time=ROCE_PACKET_LIFETIME if option is None else max(0, option - 1),
            )
        except Failure as failure:
            explanation, call = explain_failure(core, lookup, failure), "resolve_route"
            raise cm_error(
                failure.errno, failure.message, call, str(lookup.destination), failure.hint, explanation
            ) from None
        if lookup.neighbour is not None:
            core.host.network.watch_neighbours()
        core.paths = (path,)
        core.taken_steps.append(("path", perf_counter_ns() - started, "from the interface"))
        core.move(Trigger.RESOLVE_ROUTE, Trigger.ROUTE_DONE)
        core.post(CmEventType.ROUTE_RESOLVED)

    # -- services -------------------------------------------------------------------------------------

    def resolve_service(self, service: str) -> None:
        core = self._id
        if core.port_view is None:
            raise core.refuse("resolve_addrinfo")
        raise absent(Feature.SUBNET_ADMINISTRATOR, "resolve_addrinfo", service, SOFT)

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> ServiceBackend:
        hint = "bind_addr() to a SockAddrIB with the port's GID"
        if self._id.port_view is None:
            text = "the id is on no InfiniBand port, whose subnet administrator would keep the service"
            raise cm_error(errno.EINVAL, text, "register_service", hint=hint)
        raise absent(Feature.SERVICE_REGISTRATION, "register_service", who=SOFT, hint=hint)

    # -- the passive side -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave the multicast groups. A route takes no time."""
        if self._groups:
            for join in list(self._groups):
                self.leave_multicast(join)

    # -- multicast ------------------------------------------------------------------------------------

    def join_multicast(self, join: GroupJoin, group: Address, send_only: bool) -> None:
        """Join a group by the host's own means, IGMP or MLD: RoCE has no subnet administrator.

        Of a SockAddrIB, the GID is that of the group.
        """
        core = self._id
        view = core.port_view
        assert isinstance(view, RocePortView)
        ip = group.ip if isinstance(group, InetAddr) else group.addr.ip
        if not is_multicast(ip):
            text = "not the address of a multicast group"
            raise cm_error(errno.EINVAL, text, "join_multicast", str(group), "224.0.0.0/4 or ff00::/8")
        if len(ip) != len(core.sgid.ip):
            text = f"the id is bound to {core.local_addr}, of another address family"
            raise cm_error(errno.EINVAL, text, "join_multicast", str(group))
        if not send_only:
            core.host.mux.groups.join(ip, view.interface.index)
            self._groups = self._groups or {}
            self._groups[join] = ip, view.interface.index
        core.qkey = core.qkey or UDP_QKEY
        route = GlobalRoute(Gid.from_ip(ip), core.gid_index, 0, DEFAULT_HOP_LIMIT, core.options.tos or 0)
        param = UdParam(b"", AHAttr(is_global=True, port_num=core.port_num, gr=route), MULTICAST_QPN, core.qkey)
        core.post(CmEventType.MULTICAST_JOIN, param=param, join=join)

    def leave_multicast(self, join: GroupJoin) -> None:
        member = self._groups.pop(join, None) if self._groups else None
        if member is not None:
            self._id.host.mux.groups.leave(*member)

    def check_request(self, connection: CmConnection, has_header: bool, cm: ConnectionManager) -> Refusal | None:
        """Find the local port of a request. Refuses one that names other addresses than those it was sent between.

        Replies go to the source of the request, and data to the GID in it. If the two could differ, a forged REQ would
        send the data of this host to any other.
        """
        request, path = connection.request, connection.path
        assert isinstance(path, WirePath)
        local = path.local
        if isinstance(request, REQ):
            primary = request.primary
            if len(local) == 4:
                expected = V4_MAPPED + local, V4_MAPPED + path.remote
            else:
                expected = local, path.remote
            if (primary.remote_gid, primary.local_gid) != expected:
                return RejectReason.INVALID_GID, bytes(Gid.from_ip(local))
        header = header_of(request) if has_header else None
        if header is not None and (header.source, header.destination) != (path.remote, local):
            return RejectReason.CONSUMER_DEFINED, b""
        host = self._id.host.last_view()
        found = host.find_addresses(local, path.scope_id)
        if not found:  # the address may have been added since
            host = self._id.host.view()
            found = host.find_addresses(local, path.scope_id)
        is_default_partition = not (request.partition_key ^ DEFAULT_PKEY) & 0x7FFF
        if not found or not is_default_partition:
            return RejectReason.INVALID_GID, bytes(Gid.from_ip(local))
        view, row, _ = found[0]
        mtu = view.port.active_mtu or Mtu.MTU_256
        if isinstance(request, REQ) and not 0 < request.path_mtu <= mtu:
            return RejectReason.INVALID_MTU, bytes((mtu,))
        connection.finding = _make_tuple(_Fit, (host, header, view, row, mtu))
        return None

    def accept_request(self, connection: CmConnection, has_header: bool, cm: ConnectionManager) -> Refusal | None:
        core, request, path = self._id, connection.request, connection.path
        assert isinstance(path, WirePath)
        found = connection.finding
        if not isinstance(found, _Fit) or found.host is not core.host.last_view():  # the host has changed since
            refusal = self.check_request(connection, has_header, cm)
            if refusal is not None:
                return refusal
            found = connection.finding
            assert isinstance(found, _Fit)
        _, header, view, row, mtu = found
        core.dgid = request.primary.local_gid if isinstance(request, REQ) else Gid.from_ip(path.remote)
        if header is not None:
            family = AF_INET if header.ip_version == 4 else AF_INET6
            port = request.service_id & 0xFFFF
            core.local_addr = inet_addr((family, header.destination, port, 0, path.scope_id))
            core.peer_addr = inet_addr((family, header.source, header.source_port, 0, path.scope_id))
        else:
            core.local_addr = SockAddrIB(row.gid, request.service_id, ALL_BITS_64, DEFAULT_PKEY)
            core.peer_addr = SockAddrIB(core.dgid, 0, 0, DEFAULT_PKEY)
        core.attach(view, row)
        core.paths = (path_of_request(request, row.gid, core.dgid, mtu),)
        return None

    def default_qkey(self) -> int:
        return UDP_QKEY

    # -- for the connector ----------------------------------------------------------------------------

    def cm_path(self, _: PathRecord) -> WirePath:
        core, peer = self._id, self._id.peer_addr
        if isinstance(peer, InetAddr):
            return _make_tuple(WirePath, (core.sgid.ip, peer.ip, peer.scope_id))
        return WirePath(core.sgid.ip, core.dgid.ip)

    def partition(self) -> int:
        return self._id.pkey

    def request_path(self, path: PathRecord) -> Path:
        option = self._id.options.ack_timeout
        return Path(
            local_gid=path.sgid,
            remote_gid=path.dgid,
            local_lid=_LID_UNUSED,
            remote_lid=_LID_UNUSED,
            flow_label=path.flow_label,
            packet_rate=0,
            traffic_class=path.traffic_class,
            hop_limit=path.hop_limit,
            sl=path.sl,
            subnet_local=path.hop_limit <= 1,
            local_ack_timeout=ack_timeout(CA_ACK_DELAY, path.packet_life_time) if option is None else option & 31,
        )

    def path_fault(self, _: Path) -> ApStatus:
        return ApStatus.UNSUPPORTED

    def why_no_alternate(self, _: PathRecord) -> str:
        return "RoCE has no alternate paths"

    def address_vector(self, path: PathRecord) -> AHAttr:
        return vector_of(path, self._id.gid_index, self._id.port_num)
