"""The link of an id on RoCE: the routing tables give port and next hop, and the next hop has to answer."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from socket import AF_INET, AF_INET6
from time import perf_counter_ns
from typing import TYPE_CHECKING, NoReturn

from rdmacm.address import ALL_BITS_64, DEFAULT_PKEY, Address, Gid, InetAddr, SockAddrIB, service_id
from rdmacm.cmstate import Trigger
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import RdmaError, cm_error
from rdmacm.failure import Failure
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.cm.messages import REQ, SIDR_REQ, Path
from rdmacm.proto.sa import PathRecord
from rdmacm.resolution.hosts import RocePortView
from rdmacm.resolution.lookup import Lookup, find
from rdmacm.resolution.path import ROCE_PACKET_LIFETIME
from rdmacm.soft.ids.core import IdCore, explain_failure
from rdmacm.soft.ids.request import header_of, path_of_request
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import AHAttr, GlobalRoute
from rdmacm.verbs.enums import Mtu

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rdmacm.provider import ServiceBackend
    from rdmacm.soft.connection_manager import ConnectionManager

__all__ = ["RoceLink"]

_NO_IPOIB = "port space IPOIB needs an InfiniBand interface"
#: The LIDs in a REQ of RoCE, which has none (InfiniBand Architecture annex A16).
_LID_UNUSED = 0xFFFF
_DEFAULT_HOP_LIMIT = 64


class RoceLink:
    """See :class:`rdmacm.soft.ids.link.Link`."""

    __slots__ = ("_id", "_wait_started", "lookup")

    def __init__(self, core: IdCore) -> None:
        self._id = core
        self.lookup: Lookup | None = None
        #: When the wait for the neighbour began, in nanoseconds of perf_counter_ns().
        self._wait_started = 0

    @property
    def _view(self) -> RocePortView | None:
        """The port that the id is bound to."""
        view = self._id.port_view
        assert view is None or isinstance(view, RocePortView)  # an id with this link is bound to no other
        return view

    # -- binding --------------------------------------------------------------------------------------

    def bind(self, address: Address) -> InetAddr:
        assert isinstance(address, InetAddr)
        core = self._id
        if address.is_link_local and not address.scope_id:
            raise Failure(errno.EINVAL, "bind", "a link-local address needs a scope", f"{address.host}%INTERFACE")
        specific = not address.is_any
        if specific:
            self._bind_device(address)
        afonly = core.options.afonly
        if afonly is None:
            afonly = address.family == AF_INET or bool(core.host.network.setting("net/ipv6/bindv6only", 0)[0])
        family, ip, port, flowinfo, scope_id = address
        port = core.take_port(core.port_space, port, family, ip, address.link, not specific, afonly)
        return InetAddr(family, ip, port, flowinfo, scope_id)

    def _bind_device(self, address: InetAddr) -> None:
        core = self._id
        view = core.host.view()
        rows = view.rows_of(address.ip, address.link)
        if not rows:
            scope = f" on {view.interface_name(address.link)}" if address.link else ""
            raise Failure(
                errno.EADDRNOTAVAIL,
                "bind",
                f"{address.host} is not an address of this host{scope}",
                "one of the addresses that 'rdmacm devices' shows, or the wildcard address",
            )
        if core.port_space is PortSpace.IPOIB:
            raise Failure(errno.EINVAL, "bind", _NO_IPOIB, "port space UDP")
        core.attach(*rows[0])

    # -- resolving an address -------------------------------------------------------------------------

    def resolve_addr(self, destination: Address, origin: str, timeout_ms: int) -> None:
        core = self._id
        assert isinstance(destination, InetAddr) and isinstance(core.local_addr, InetAddr)
        local = core.local_addr
        if destination.is_any:  # "this host", as for sockets
            destination = InetAddr.loopback(destination.family, destination.port)
        if destination.is_link_local and not destination.scope_id:
            view = self._view
            destination = destination._replace(scope_id=local.scope_id or (view.interface.index if view else 0))
        core.move(Trigger.RESOLVE_ADDR)
        source = None if local.is_any else local
        host, tos = core.host.view(), core.options.tos or 0
        self.lookup = lookup = Lookup(host, destination, source, origin, tos, self._view)
        core.peer_addr = destination
        self._wait_started = perf_counter_ns()
        try:
            self._find(lookup)
        except Failure as failure:
            core.move(Trigger.ADDR_FAILED)
            if failure.step == "select" and failure.errno in (errno.ENODEV, errno.EINVAL):
                # There is a route but no device for it, which the kernel notices later and reports by an event.
                self._post_failure(lookup, failure)
                return
            raise self._error(lookup, failure, "resolve_addr") from None
        if not core.host.neighbours.add(self, lookup, core.runtime.clock() + timeout_ms / 1000):
            self.address_found(lookup)

    def _find(self, lookup: Lookup) -> None:
        core = self._id
        find(core.host.network, lookup)
        if core.port_space is PortSpace.IPOIB:
            raise Failure(errno.EINVAL, "select", _NO_IPOIB, "port space UDP")

    def address_found(self, lookup: Lookup) -> None:
        """See :class:`rdmacm.resolution.neighbours.NeighbourWaiter`; also called when there is nothing to wait for."""
        core = self._id
        if lookup is not self.lookup or not core.may(Trigger.ADDR_DONE):
            return
        found, local = lookup.found, core.local_addr
        assert found is not None and isinstance(local, InetAddr)
        if found.next_hop is not None:
            state = lookup.neighbour.state.name.lower() if lookup.neighbour else "not visible"
            lookup.note("neighbour", self._wait_started, state)
        core.attach(found.view, found.row)
        core.dgid = Gid.from_ip(lookup.destination.ip)
        if local.is_any:
            source = InetAddr(local.family, found.source, local.port, 0, 0)
            core.local_addr = source._replace(scope_id=found.row.ndev_ifindex) if source.is_link_local else source
        core.move(Trigger.ADDR_DONE)
        core.post(CmEventType.ADDR_RESOLVED)

    def address_failed(self, lookup: Lookup, failure: Failure) -> None:
        """See :class:`rdmacm.resolution.neighbours.NeighbourWaiter`."""
        core = self._id
        if lookup is not self.lookup or not core.may(Trigger.ADDR_FAILED):
            return
        lookup.note("neighbour", self._wait_started, failure.message)
        core.move(Trigger.ADDR_FAILED)
        self._post_failure(lookup, failure)

    def network_changed(self, lookup: Lookup, deadline: float) -> None:
        """The host has changed during the wait: resolve again, and keep waiting if the next hop is the same."""
        core = self._id
        host, pending = core.host.last_view(), core.host.neighbours
        fresh = Lookup(host, lookup.destination, lookup.source, lookup.origin, lookup.tos, self._view)
        failure: Failure | None = None
        source = lookup.source
        if source is not None and not source.is_loopback and not host.owns(source.ip, source.link):
            failure = Failure(
                errno.EADDRNOTAVAIL,
                "route",
                f"source {source.host} was removed from this host while resolving",
                "a new id, with another source",
            )
        else:
            try:
                self._find(fresh)
            except Failure as error:
                failure = error
        if failure is not None:
            pending.remove(self, lookup)
            lookup.steps += fresh.steps
            self.address_failed(lookup, failure)
        elif fresh.next_hop != lookup.next_hop:
            pending.remove(self, lookup)
            self.lookup = fresh
            if not pending.add(self, fresh, deadline):
                self.address_found(fresh)
        else:
            lookup.host, lookup.bound, lookup.query, lookup.found = fresh.host, fresh.bound, fresh.query, fresh.found

    def stop(self) -> None:
        if self.lookup is not None:
            self._id.host.neighbours.remove(self, self.lookup)

    def _post_failure(self, lookup: Lookup, failure: Failure) -> None:
        explain = partial(explain_failure, self._id, lookup, failure)
        self._id.post(CmEventType.ADDR_ERROR, -failure.errno, explain, failure.message)

    def _error(self, lookup: Lookup, failure: Failure, call: str) -> RdmaError:
        """The error of a call that failed at once."""
        explanation = explain_failure(self._id, lookup, failure)
        return cm_error(failure.errno, failure.message, call, str(lookup.destination), failure.hint, explanation)

    # -- resolving a route ----------------------------------------------------------------------------

    def resolve_route(self, timeout_ms: int, alternate: bool) -> None:
        """Make the path from the interface: RoCE has no subnet administrator, and no alternate paths."""
        core, lookup = self._id, self.lookup
        local, peer = core.local_addr, core.peer_addr
        assert isinstance(local, InetAddr) and isinstance(peer, InetAddr) and lookup is not None
        started = perf_counter_ns()
        ack_timeout = core.options.ack_timeout
        lookup.tos = core.options.tos or 0
        try:
            path = core.host.paths.make(
                lookup,
                local.port,
                service_id=service_id(core.port_space, peer.port),
                packet_life_time=ROCE_PACKET_LIFETIME if ack_timeout is None else max(0, ack_timeout - 1),
            )
        except Failure as failure:
            raise self._error(lookup, failure, "resolve_route") from None
        core.paths = (path,)
        core.note("path", started, "from the interface")
        core.move(Trigger.RESOLVE_ROUTE)
        core.move(Trigger.ROUTE_DONE)
        core.post(CmEventType.ROUTE_RESOLVED)

    # -- services -------------------------------------------------------------------------------------

    def resolve_service(self, service: str) -> None:
        core = self._id
        if core.port_view is None:
            raise core.refuse("resolve_addrinfo")
        raise cm_error(
            errno.EOPNOTSUPP,
            f"{core.port_view.device.name} is RoCE and has no subnet administrator to ask",
            "resolve_addrinfo",
            service,
            "RAI_DNS, or an id bound to an InfiniBand port",
        )

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> ServiceBackend:
        refuse_registration(self._id)

    # -- the passive side -----------------------------------------------------------------------------

    def accept_request(
        self, request: REQ | SIDR_REQ, path: Hashable, cm: ConnectionManager
    ) -> tuple[RejectReason, bytes] | None:
        assert isinstance(path, WirePath)
        core, header = self._id, header_of(request)
        dgid: Gid | None = None
        local_ip, remote_ip = path.local, path.remote
        if isinstance(request, REQ):
            dgid = request.primary.local_gid
            local_ip, remote_ip = request.primary.remote_gid.ip, dgid.ip
        found = core.host.last_view().rows_of(local_ip, path.scope_id)
        if not found:  # the address may have been added since
            found = core.host.view().rows_of(local_ip, path.scope_id)
        if not found or len(remote_ip) != len(local_ip):
            return RejectReason.INVALID_GID, bytes(Gid.from_ip(path.local))
        view, row = found[0]
        mtu = view.port.active_mtu or Mtu.MTU_256
        if isinstance(request, REQ) and not 0 < request.path_mtu <= mtu:
            return RejectReason.INVALID_MTU, bytes((mtu,))
        core.dgid = dgid or Gid.from_ip(remote_ip)
        if header is not None:
            family = AF_INET if header.ip_version == 4 else AF_INET6
            port = request.service_id & 0xFFFF
            core.local_addr = InetAddr(family, header.destination, port, 0, path.scope_id)
            core.peer_addr = InetAddr(family, header.source, header.source_port, 0, path.scope_id)
        else:
            core.local_addr = SockAddrIB(row.gid, request.service_id, ALL_BITS_64, DEFAULT_PKEY)
            core.peer_addr = SockAddrIB(core.dgid, 0, 0, DEFAULT_PKEY)
        core.attach(view, row)
        core.paths = (path_of_request(request, row.gid, core.dgid, mtu),)
        return None

    def pkey_index(self) -> int:
        return 0

    # -- for the connector ----------------------------------------------------------------------------

    @property
    def cm(self) -> ConnectionManager:
        return self._id.host.cm

    def managers(self) -> list[ConnectionManager]:
        return [self.cm]

    def cm_path(self) -> WirePath:
        core = self._id
        scope = core.peer_addr.scope_id if isinstance(core.peer_addr, InetAddr) else 0
        return WirePath(core.sgid.ip, core.dgid.ip, scope)

    def partition(self) -> int:
        return self._id.pkey

    def request_path(self, path: PathRecord, local_ack_timeout: int) -> Path:
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
            local_ack_timeout=local_ack_timeout,
        )

    def address_vector(self) -> AHAttr:
        core, path = self._id, self._id.paths[0]
        hop_limit = path.hop_limit or _DEFAULT_HOP_LIMIT
        route = GlobalRoute(path.dgid, core.gid_index, path.flow_label, hop_limit, path.traffic_class)
        return AHAttr(is_global=True, port_num=core.port_num, sl=path.sl, gr=route)


def refuse_registration(core: IdCore) -> NoReturn:
    """Raise the error of register_service() on an id that is on no InfiniBand port."""
    where = core.port_view.device.name if core.port_view is not None else "the id"
    raise cm_error(
        errno.EOPNOTSUPP if core.port_view is not None else errno.EINVAL,
        f"{where} is on no InfiniBand port, whose subnet administrator would keep the service",
        "register_service",
        hint="bind_addr() to a SockAddrIB with the port's GID",
    )
