"""The link of an id on InfiniBand: the subnet administrator gives the path.

The addresses of the id are GIDs (AF_IB), or IP addresses of IPoIB interfaces. The queries are the same: for an IP
address, by the GID of its port, the P_Key of the interface, and the service id of port space and port.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from socket import AF_INET, AF_INET6
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from rdmacm.address import ALL_BITS_64, Address, Gid, InetAddr, SockAddrIB, service_id
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import Failure, RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.ib.session import describe_sa
from rdmacm.progress.timers import Timer
from rdmacm.proto.cm.codes import ApStatus, FailoverAccepted, RejectReason
from rdmacm.proto.cm.messages import NO_PATH, REQ, SIDR_REQ, Path
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.cm.timeouts import ack_timeout
from rdmacm.proto.constants import MULTICAST_QPN
from rdmacm.proto.ipoib import broadcast_gid, multicast_gid
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.provider.cmstate import Trigger
from rdmacm.provider.connparam import UdParam
from rdmacm.resolution import acm
from rdmacm.resolution.infiniband import IbPortView
from rdmacm.resolution.ipoib import IpoibPortView
from rdmacm.soft.ib.groups import GroupRequest, PortJoin
from rdmacm.soft.ib.path import IbPath
from rdmacm.soft.ids.alternate_path import why_no_alternate
from rdmacm.soft.ids.id_state import IdState, explain_failure, steps_of
from rdmacm.soft.ids.link import ADAPTER_ACCESS, CA_ACK_DELAY, UDP_QKEY, Refusal
from rdmacm.soft.ids.request import alternate_of_request, header_of, path_of_request
from rdmacm.verbs.attr import AHAttr, GlobalRoute
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import Mtu

if TYPE_CHECKING:
    from rdmacm.ib.registration import Registration
    from rdmacm.proto.cm.connection import CmConnection
    from rdmacm.proto.sa.subnet import MCMemberRecord, ServiceRecord
    from rdmacm.provider.multicast import GroupJoin
    from rdmacm.soft.connection_manager import ConnectionManager
    from rdmacm.soft.ib.subnet import Subnet

#: The number of paths to query when an alternate one is wanted: some may have the LIDs of the first.
_ALTERNATE_PATHS = 8
#: Seconds. The shortest timeout of a path query, after ibacm has used up the time.
_LEAST_TIMEOUT = 0.001
_DEFAULT_HOP_LIMIT = 64
#: The first LID of multicast groups; those of ports are lower.
_FIRST_MLID = 0xC000
#: Bytes 2 and 3 of the IPv6 form of MGIDs that an administrator has assigned; byte 3 of the MGIDs of port space UDP.
_ASSIGNED, _UDP_SIGNATURE = b"\xa0\x1b", b"\x01"
#: The subnet prefix of link-local GIDs, which every port has.
_DEFAULT_PREFIX = 0xFE80 << 48


class _Fit(NamedTuple):
    """Where a request arrived, and its addresses."""

    view: IbPortView
    row: GidEntry
    mtu: Mtu
    dgid: Gid
    local: Address
    peer: Address
    #: Of the IPoIB interface; None for a request between AF_IB addresses.
    broadcast_gid: Gid | None = None


class IbLink:
    """See :class:`rdmacm.soft.ids.link.Link`."""

    __slots__ = ("_acm_timer", "_id", "_joins", "_query", "_registrations")

    def __init__(self, core: IdState) -> None:
        self._id = core
        #: The query in progress, and the subnet that it was sent to.
        self._query: tuple[Subnet, int] | None = None
        #: Ends the wait for ibacm. None once ibacm has answered, or was too slow: then its answer is ignored.
        self._acm_timer: Timer | None = None
        #: The services that the id has registered.
        self._registrations: list[Registration] = []
        #: The multicast groups that the id has joined; None before the first.
        self._joins: dict[GroupJoin, PortJoin] | None = None

    @property
    def _view(self) -> IbPortView:
        """The port that the id is bound to."""
        view = self._id.port_view
        assert isinstance(view, IbPortView)  # an id with this link is bound to no other
        return view

    @property
    def _subnet(self) -> Subnet:
        """The subnet of that port."""
        return self._id.host.ib.subnet_of(self._view)

    def _local(self) -> SockAddrIB:
        """The source address; for an IP address, the AF_IB address of the same port and service."""
        return self._as_ib(self._id.local_addr, self._id.sgid)

    def _peer(self) -> SockAddrIB:
        """The destination, as :meth:`_local`."""
        return self._as_ib(self._id.peer_addr, self._id.dgid)

    def _as_ib(self, address: Address | None, gid: Gid) -> SockAddrIB:
        assert address is not None
        if isinstance(address, SockAddrIB):
            return address
        sid = service_id(self._id.port_space, address.port)
        return SockAddrIB(gid, sid, ALL_BITS_64, self._id.pkey, address.flowinfo)

    def _view_now(self, step: str) -> IbPortView:
        """The port as it is now: its LID or its administrator may have changed. ENODEV when it is gone."""
        self._id.port_view = view = self._subnet.view_now(step, self._view.device.name)
        return view

    # -- the route ------------------------------------------------------------------------------------

    def resolve_route(self, timeout_ms: int, alternate: bool) -> None:
        """Ask ibacm, if it runs, then the subnet administrator. ibacm knows no alternate paths."""
        core, started = self._id, perf_counter_ns()
        if core.port_space is PortSpace.IPOIB:
            self._subnet.learn_qkey(self._broadcast_group())
        until = core.runtime.clock() + timeout_ms / 1000
        if alternate or not self._ask_acm(until, started, timeout_ms / 1000):
            self._ask_route(until, alternate, started)
        core.move(Trigger.RESOLVE_ROUTE)

    def _ask_acm(self, until: float, started: int, timeout: float) -> bool:
        """Ask ibacm for up to half of the timeout, in seconds; False when there is no such daemon."""
        runtime, local, peer = self._id.runtime, self._local(), self._peer()
        if not runtime.is_real_time:
            return False
        patience = min(acm.DEADLINE, timeout / 2)  # the rest of the time is for the subnet administrator

        def answered(route: Sequence[PathData] | None) -> None:  # called by another thread
            with runtime.lock:
                self._acm_answered(timer, until, started, route)

        # Earlier queries may occupy the daemon for longer than this id can wait.
        timer = runtime.call_at(runtime.clock() + patience, lambda _: self._acm_answered(timer, until, started, None))
        self._acm_timer = timer
        if acm.paths_in_background(local, peer, answered, timeout=patience):
            return True
        timer.cancel()
        self._acm_timer = None
        return False

    def _acm_answered(self, timer: Timer, until: float, started: int, route: Sequence[PathData] | None) -> None:
        """Take ibacm's route; None when it has none or was too slow."""
        if self._acm_timer is not timer:
            return
        timer.cancel()
        self._acm_timer = None
        if route is not None:
            self._id.note("path", started, "from ibacm")
            self._route_found((route[0].path,))
            return
        try:
            self._ask_route(until, False, started)
        except RdmaError as error:
            failure = Failure(error.errno or errno.EIO, "path", str(error.strerror), error.hint or "")
            self._route_failed(started, failure)

    def _ask_route(self, until: float, alternate: bool, started: int) -> None:
        core, view, subnet = self._id, self._view_now("resolve_route"), self._subnet
        left = max(until - core.runtime.clock(), _LEAST_TIMEOUT)
        answered = partial(self._route_answered, view, alternate, started)
        tos, count = core.options.tos or 0, _ALTERNATE_PATHS if alternate else 1
        # As in Linux, the type of service of an IPv4 address is the QoS class of the path.
        is_ipv4 = isinstance(core.peer_addr, InetAddr) and core.peer_addr.family == AF_INET
        tos, qos_class = (0, tos) if is_ipv4 else (tos, 0)
        query = subnet.sa.query_paths(
            view.ib_port, core.sgid, self._peer(), left, answered, tos=tos, qos_class=qos_class, count=count
        )
        self._query = subnet, query

    def _route_answered(
        self, view: IbPortView, alternate: bool, started: int, paths: tuple[PathRecord, ...], failure: Failure | None
    ) -> None:
        self._query = None
        if failure is not None:
            self._route_failed(started, failure)
            return
        self._id.note("path", started, f"from {describe_sa(view.ib_port)}")
        if alternate:
            other = next((path for path in paths[1:] if not why_no_alternate(paths[0], path)), None)
            paths = paths[:1] if other is None else (paths[0], other)
        self._route_found(paths)

    def _route_failed(self, started: int, failure: Failure) -> None:
        core, lookup = self._id, self._id.lookup
        core.note("path", started, failure.message)
        explain: Callable[[], Explanation] | None = None
        if lookup is not None:
            steps = steps_of(core, lookup)

            def explain() -> Explanation:
                return explain_failure(core, lookup, failure).replace(steps=steps)

        core.move(Trigger.ROUTE_FAILED)
        core.post(CmEventType.ROUTE_ERROR, -failure.errno, explain, failure.message)

    def _route_found(self, paths: tuple[PathRecord, ...]) -> None:
        core = self._id
        timeout = core.options.ack_timeout
        if timeout is not None:
            paths = tuple(path.replace(packet_life_time=max(0, timeout - 1)) for path in paths)
        core.paths = paths
        core.move(Trigger.ROUTE_DONE)
        core.post(CmEventType.ROUTE_RESOLVED)

    # -- services -------------------------------------------------------------------------------------

    def resolve_service(self, service: str) -> None:
        core = self._id
        view, subnet = self._view_now("resolve_addrinfo"), self._subnet
        answered = partial(self._service_answered, perf_counter_ns())
        self._query = subnet, subnet.sa.query_services(view.ib_port, service, answered)
        core.services = ()
        core.move(Trigger.RESOLVE_IB_SERVICE)

    def _service_answered(self, started: int, found: tuple[ServiceRecord, ...], failure: Failure | None) -> None:
        core = self._id
        self._query = None
        core.note("service", started, failure.message if failure else f"{len(found)} found")
        if failure is not None:
            core.move(Trigger.SERVICE_FAILED)
            core.post(CmEventType.ADDRINFO_ERROR, -failure.errno, None, failure.message)
            return
        core.services = found
        first = found[0]
        core.pkey = first.service_pkey or core.pkey
        core.peer_addr = SockAddrIB(first.service_gid, first.service_id, ALL_BITS_64, core.pkey)
        core.dgid = first.service_gid
        # A service is at a GID. An id that was bound by its IPoIB address goes on by the GID of the same port.
        core.local_addr = replace(self._local(), pkey=core.pkey)
        core.resolve_gids()
        core.move(Trigger.SERVICE_DONE)
        core.post(CmEventType.ADDRINFO_RESOLVED)

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> Registration:
        core, subnet = self._id, self._subnet
        if isinstance(core.local_addr, InetAddr):
            message = f"the id has the IP address {core.local_addr}; services are at GIDs"
            hint = "bind_addr() to a SockAddrIB with the port's GID"
            raise cm_error(errno.EOPNOTSUPP, message, "register_service", hint=hint)
        self._view_now("register_service")
        local = replace(self._local(), addr=core.sgid, pkey=core.pkey)
        registration = subnet.register(local, lease, name, data, done)
        self._registrations = [one for one in self._registrations if not one.is_withdrawn]
        self._registrations.append(registration)
        return registration

    def stop(self) -> None:
        if self._acm_timer is not None:
            self._acm_timer.cancel()
            self._acm_timer = None
        if self._query is not None:
            subnet, query = self._query
            self._query = None
            subnet.sa.cancel(query)
        for registration in self._registrations:
            registration.withdraw()
        self._registrations.clear()
        for join in list(self._joins or ()):
            self.leave_multicast(join)

    # -- multicast ------------------------------------------------------------------------------------

    def join_multicast(self, join: GroupJoin, group: Address, send_only: bool) -> None:
        """Ask the subnet administrator to make the port a member."""
        core, like = self._id, self._broadcast_group()
        view = self._view_now("join_multicast")
        qkey = core.qkey or (0 if core.port_space is PortSpace.IPOIB else UDP_QKEY)
        mgid = group_gid(group, like, core.port_space)
        request = GroupRequest(mgid, like, core.sgid, core.pkey, qkey, send_only)
        answered = partial(self._group_answered, join)
        self._joins = self._joins or {}
        self._joins[join] = self._subnet.groups.join(view.ib_port, request, answered)

    def _group_answered(self, join: GroupJoin, record: MCMemberRecord | None, failure: Failure | None) -> None:
        core = self._id
        if record is None:
            assert failure is not None
            core.post(CmEventType.MULTICAST_ERROR, -failure.errno, None, failure.message, join=join)
            return
        core.qkey = core.qkey or record.q_key
        route = GlobalRoute(record.mgid, core.gid_index, record.flow_label, record.hop_limit, record.traffic_class)
        attr = AHAttr(record.mlid, record.sl, 0, record.rate, True, core.port_num, route)
        core.post(CmEventType.MULTICAST_JOIN, param=UdParam(b"", attr, MULTICAST_QPN, core.qkey), join=join)

    def leave_multicast(self, join: GroupJoin) -> None:
        found = self._joins.pop(join, None) if self._joins else None
        if found is not None:
            found.leave()

    # -- the passive side -----------------------------------------------------------------------------

    def check_request(self, connection: CmConnection, has_header: bool, cm: ConnectionManager) -> Refusal | None:
        found = self._fit(connection.request, header_of(connection.request) if has_header else None, cm)
        return None if isinstance(found, _Fit) else found

    def _fit(self, request: REQ | SIDR_REQ, header: PrivateDataHeader | None, cm: ConnectionManager) -> _Fit | Refusal:
        """The local port and the addresses of a request."""
        subnet = self._id.host.ib.subnet_with(cm)
        assert subnet is not None
        view = subnet.view()
        primary = request.primary if isinstance(request, REQ) else None
        rows = view.rows if view is not None else ()
        row = next((row for row in rows if primary is None or row.gid == primary.remote_gid), None)
        pkey = request.partition_key
        if view is None or row is None or not view.has_pkey(pkey) or not _may_be_peer(primary, row.gid):
            return RejectReason.INVALID_GID, bytes(rows[0].gid) if rows else b""
        mtu = view.port.active_mtu or Mtu.MTU_256
        if isinstance(request, REQ) and not 0 < request.path_mtu <= mtu:
            return RejectReason.INVALID_MTU, bytes((mtu,))
        dgid = primary.local_gid if primary is not None else Gid()
        if header is None:
            local: Address = SockAddrIB(row.gid, request.service_id, ALL_BITS_64, pkey)
            return _Fit(view, row, mtu, dgid, local, SockAddrIB(dgid, 0, 0, pkey))
        addresses = self._addresses(header, row, pkey, request.service_id & 0xFFFF)
        if addresses is None:
            return RejectReason.INVALID_GID, bytes(row.gid)
        return _Fit(view, row, mtu, dgid, *addresses)

    def accept_request(self, connection: CmConnection, has_header: bool, cm: ConnectionManager) -> Refusal | None:
        core, subnet = self._id, self._id.host.ib.subnet_with(cm)
        request, path = connection.request, connection.path
        assert isinstance(path, IbPath) and subnet is not None
        found = self._fit(request, header_of(request) if has_header else None, cm)
        if not isinstance(found, _Fit):
            return found
        view, pkey = found.view, request.partition_key
        core.dgid, core.local_addr, core.peer_addr = found.dgid, found.local, found.peer
        if found.broadcast_gid is not None and core.port_space is PortSpace.IPOIB:
            subnet.learn_qkey(found.broadcast_gid)
        core.attach(view, found.row, pkey)
        record = path_of_request(request, found.row.gid, core.dgid, found.mtu)
        port, slid = view.ib_port, request.primary.remote_lid if isinstance(request, REQ) else 0
        slid = slid if slid in port.lids else port.lid
        core.paths = (record.replace(slid=slid, dlid=path.lid, sl=path.sl, pkey=pkey),)
        if isinstance(request, REQ) and request.alternate is not NO_PATH and not _fault_of(request.alternate, view):
            core.paths += (alternate_of_request(request, request.alternate),)
        return None

    def _addresses(
        self, header: PrivateDataHeader, row: GidEntry, pkey: int, port: int
    ) -> tuple[InetAddr, InetAddr, Gid] | None:
        """The IP addresses of a request, and the broadcast GID of their IPoIB interface.

        None if no interface of the GID and partition has the address.
        """
        for local in self._id.host.ip_view().find_addresses(header.destination):
            view = local.view
            if isinstance(view, IpoibPortView) and local.row.gid == row.gid and not (view.pkey ^ pkey) & 0x7FFF:
                family = AF_INET if header.ip_version == 4 else AF_INET6
                own, peer = (InetAddr(family, ip, 0, 0, 0) for ip in (header.destination, header.source))
                scopes = [local.row.ndev_ifindex if end.is_link_local else 0 for end in (own, peer)]
                own = own._replace(port=port, scope_id=scopes[0])
                peer = peer._replace(port=header.source_port, scope_id=scopes[1])
                return own, peer, view.ipoib.broadcast_gid
        return None

    @property
    def pkey_index(self) -> int:
        return self._view.ib_port.pkey_index(self.partition()) or 0

    def default_qkey(self) -> int:
        """The Q_Key of the IPoIB broadcast group for port space IPOIB, as in Linux's rdma_cm, else its own constant."""
        core = self._id
        if core.port_space is not PortSpace.IPOIB:
            return UDP_QKEY
        subnet, group = self._subnet, self._broadcast_group()
        qkey = subnet.learn_qkey(group)
        if qkey is None:
            raise cm_error(
                errno.EADDRNOTAVAIL,
                f"the Q_Key of the IPoIB broadcast group {group} is not known: {subnet.why_no_qkey(group)}",
                "qkey",
                str(core.local_addr),
                "a Q_Key in ConnParam(qkey=...), or another try later ('rdmacm sa groups')",
            )
        return qkey

    def _broadcast_group(self) -> Gid:
        """The GID of the broadcast group of the id's IPoIB interface; for an AF_IB id, of its partition."""
        core = self._id
        local = core.local_addr
        if isinstance(local, InetAddr):
            for ipoib in core.host.last_view().ipoib:
                if local.ip in ipoib.ips and ipoib.address.gid == core.sgid and ipoib.pkey == core.pkey:
                    return ipoib.broadcast_gid
        return broadcast_gid(core.pkey)

    # -- for the connector ----------------------------------------------------------------------------

    access = ADAPTER_ACCESS
    no_failover = FailoverAccepted.REJECTED

    @property
    def cm(self) -> ConnectionManager:
        return self._subnet.cm

    def cm_path(self, path: PathRecord) -> IbPath:
        core, view = self._id, self._view_now("connect")
        index = view.ib_port.pkey_index(self.partition())
        if index is None:
            pkey, name = f"0x{self.partition():04x}", view.device.name
            message = f"P_Key {pkey} of the path is not in the table of {name}: {view.pkeys_text}"
            raise cm_error(errno.EINVAL, message, "connect", str(core.peer_addr))
        return IbPath(path.dlid, path.sl, index)

    def partition(self) -> int:
        """The P_Key of the path, if it has one, else of the id."""
        core = self._id
        return core.paths[0].pkey if core.paths and core.paths[0].pkey else core.pkey

    def request_path(self, path: PathRecord) -> Path:
        option = self._id.options.ack_timeout
        return Path(
            local_gid=path.sgid,
            remote_gid=path.dgid,
            local_lid=path.slid,
            remote_lid=path.dlid,
            flow_label=path.flow_label,
            packet_rate=path.rate,
            traffic_class=path.traffic_class,
            hop_limit=path.hop_limit,
            sl=path.sl,
            subnet_local=path.hop_limit <= 1,
            local_ack_timeout=ack_timeout(CA_ACK_DELAY, path.packet_life_time) if option is None else option & 31,
        )

    def path_fault(self, alternate: Path) -> ApStatus | None:
        return _fault_of(alternate, self._view)

    def why_no_alternate(self, path: PathRecord) -> str:
        view = self._view_now("load_alternate_path")
        if path.sgid not in [row.gid for row in view.rows] or path.slid not in view.ib_port.lids:
            name = view.device.name
            return f"{path.sgid}, LID {path.slid}, is not at {name} port {view.port_num}, where the connection is"
        return ""

    def address_vector(self, path: PathRecord) -> AHAttr:
        core, view = self._id, self._view
        index = next((row.gid_index for row in view.rows if row.gid == path.sgid), core.gid_index)
        hop_limit = path.hop_limit or _DEFAULT_HOP_LIMIT
        route = GlobalRoute(path.dgid, index, path.flow_label, hop_limit, path.traffic_class)
        return AHAttr(
            dlid=path.dlid,
            sl=path.sl,
            src_path_bits=path.slid & (1 << view.ib_port.lmc) - 1,
            static_rate=path.rate,
            is_global=path.hop_limit > 1,
            port_num=core.port_num,
            gr=route if path.hop_limit > 1 else GlobalRoute(),
        )


def group_gid(group: Address, broadcast: Gid, port_space: PortSpace) -> Gid:
    """The MGID of a group, in the partition and scope of a broadcast group, as Linux's rdma_cm makes it.

    A wildcard or loopback address has the zero GID: the administrator assigns one. An IPv6 address ff1x:a01b:... is a
    GID that it has assigned. Groups of the port space UDP have a signature of their own. EINVAL for other addresses.
    """
    if isinstance(group, SockAddrIB):
        return group.addr
    if group.is_any or group.is_loopback:
        return Gid()
    if not group.is_multicast:
        text = "not the address of a multicast group"
        raise cm_error(errno.EINVAL, text, "join_multicast", str(group), "224.0.0.0/4 or ff00::/8")
    if group.family == AF_INET6 and group.ip[1] & 0xF0 == 0x10 and group.ip[2:4] == _ASSIGNED:
        return Gid(group.ip)
    found = multicast_gid(group.ip, int.from_bytes(broadcast[4:6], "big"), broadcast[1] & 0x0F)
    return Gid(found[:3] + _UDP_SIGNATURE + found[4:]) if port_space is PortSpace.UDP else found


def _may_be_peer(primary: Path | None, own: Gid) -> bool:
    """Whether the GID of a peer in the path of a REQ can be that of a port which reaches the port with the GID ``own``.

    A SIDR_REQ has no path.
    """
    if primary is None:
        return True
    gid = primary.local_gid
    if gid[0] == 0xFF or not gid.interface_id:  # a multicast group, or no port
        return False
    return not primary.subnet_local or gid.subnet_prefix in (own.subnet_prefix, _DEFAULT_PREFIX)


def _fault_of(alternate: Path, view: IbPortView) -> ApStatus | None:
    """Why the peer's alternate path does not lead to the port; None if it does. The port itself is the only end."""
    port, rows = view.ib_port, view.rows
    row = next((row for row in rows if row.gid == alternate.remote_gid), None)
    if row is None or not _may_be_peer(alternate, row.gid):
        return ApStatus.INVALID_GID
    if alternate.subnet_local and not (alternate.remote_lid in port.lids and 0 < alternate.local_lid < _FIRST_MLID):
        return ApStatus.INVALID_LID
    if not alternate.subnet_local and alternate.hop_limit <= 1:
        return ApStatus.INVALID_HOP_LIMIT
    return None
