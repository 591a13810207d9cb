"""The link of an id on InfiniBand: addresses are GIDs, and the subnet administrator gives the path."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

from rdmacm import acm
from rdmacm.address import AF_IB, ALL_BITS_64, Address, Gid, SockAddrIB, service_id
from rdmacm.cmstate import Trigger
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.failure import Failure
from rdmacm.ib.session import describe_sa
from rdmacm.progress.timers import Timer
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.cm.messages import REQ, SIDR_REQ, Path
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.resolution.infiniband import IbLookup, IbPortView
from rdmacm.soft.ib.path import IbPath
from rdmacm.soft.ids.core import IdCore, explain_failure, steps_of
from rdmacm.soft.ids.request import path_of_request
from rdmacm.soft.ids.roce_link import refuse_registration
from rdmacm.verbs.attr import AHAttr, GlobalRoute
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import Mtu

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rdmacm.ib.registration import Registration
    from rdmacm.proto.sa.subnet import ServiceRecord
    from rdmacm.soft.connection_manager import ConnectionManager
    from rdmacm.soft.ib.subnet import Subnet

__all__ = ["IbLink"]

#: The port spaces in which an AF_IB address may be bound, by that of the id, in the order in which they are tried.
_IB_SPACES = {
    PortSpace.IB: (PortSpace.IB, PortSpace.TCP, PortSpace.UDP),
    PortSpace.TCP: (PortSpace.TCP,),
    PortSpace.UDP: (PortSpace.UDP,),
    PortSpace.IPOIB: (PortSpace.IPOIB,),
}
#: The number of paths to query when an alternate one is wanted: some may have the LIDs of the first.
_ALTERNATE_PATHS = 8
#: Seconds. The shortest timeout of a path query, after ibacm has used up the time.
_LEAST_TIMEOUT = 0.001
_DEFAULT_HOP_LIMIT = 64


class IbLink:
    """See :class:`rdmacm.soft.ids.link.Link`."""

    __slots__ = ("_acm_timer", "_id", "_query", "_registrations", "lookup")

    def __init__(self, core: IdCore) -> None:
        self._id = core
        self.lookup: IbLookup | None = None
        #: The query in progress, and the subnet that it was sent to.
        self._query: tuple[Subnet, int] | None = None
        #: Ends the wait for ibacm. None once ibacm has answered, or was too slow: then its answer is ignored.
        self._acm_timer: Timer | None = None
        #: The services that the id has registered.
        self._registrations: list[Registration] = []

    @property
    def _view(self) -> IbPortView | None:
        """The port that the id is bound to."""
        view = self._id.port_view
        assert view is None or isinstance(view, IbPortView)  # an id with this link is bound to no other
        return view

    @property
    def _subnet(self) -> Subnet | None:
        """The subnet of the port that the id is bound to."""
        view = self._view
        return None if view is None else self._id.host.ib.subnet_of(view)

    def _bound_subnet(self) -> Subnet:
        subnet = self._subnet
        assert subnet is not None
        return subnet

    def _local(self) -> SockAddrIB:
        address = self._id.local_addr
        assert isinstance(address, SockAddrIB)
        return address

    def _peer(self) -> SockAddrIB:
        address = self._id.peer_addr
        assert isinstance(address, SockAddrIB)
        return address

    def _view_now(self, step: str) -> IbPortView:
        """The port as it is now: its LID or its administrator may have changed. ENODEV when it is gone."""
        before = self._view
        assert before is not None
        self._id.port_view = view = self._bound_subnet().view_now(step, before.device.name)
        return view

    # -- binding --------------------------------------------------------------------------------------

    def bind(self, address: Address) -> SockAddrIB:
        assert isinstance(address, SockAddrIB)
        core = self._id
        if any(address.addr):
            self._bind_gid(address)
        for space in _IB_SPACES[core.port_space]:
            if (address.sid ^ service_id(space, 0)) & address.sid_mask & ~0xFFFF == 0:
                break
        else:
            raise Failure(
                errno.EPROTONOSUPPORT,
                "bind",
                f"service id 0x{address.sid:x} is of another port space than the id's, {core.port_space.name}",
                f"service ids from 0x{service_id(core.port_space, 0):x}",
            )
        port = core.take_port(space, address.port, AF_IB, bytes(address.addr), 0, True, bool(core.options.afonly))
        return SockAddrIB(
            address.addr, service_id(space, port), ALL_BITS_64, address.pkey, address.flowinfo, address.scope_id
        )

    def _bind_gid(self, address: SockAddrIB) -> None:
        host, gid = self._id.host, address.addr
        found = host.ib.row_of(gid)
        if found is not None:
            view, row = found
            if not view.has_pkey(address.pkey):
                raise Failure(
                    errno.EINVAL,
                    "bind",
                    f"P_Key 0x{address.pkey:04x} is not in the table of {view.device.name} port {row.port_num}",
                    "one of " + _pkey_table(view),
                )
            self._id.attach(view, row, address.pkey)
            return
        for roce in host.view().ports:
            if roce.row_of(gid) is not None:
                raise Failure(
                    errno.ENODEV,
                    "bind",
                    f"GID {gid} is on {roce.device.name}, which is RoCE; AF_IB is for InfiniBand ports",
                    "the IP address that the GID stands for",
                )
        raise Failure(errno.ENODEV, "bind", f"no InfiniBand port has the GID {gid}; {host.ib.why_none()}")

    # -- resolving an address -------------------------------------------------------------------------

    def resolve_addr(self, destination: Address, origin: str, timeout_ms: int) -> None:
        """There is no neighbour to wait for, so the event is posted at once."""
        assert isinstance(destination, SockAddrIB)
        core, local = self._id, self._local()
        core.move(Trigger.RESOLVE_ADDR)
        self.lookup = lookup = IbLookup(destination, core.host.provider_name)
        core.peer_addr = destination
        try:
            ports = core.host.ib
            view, row = lookup.choose(ports.views(), self._bound_row(), ports.why_none)
        except Failure as failure:
            core.move(Trigger.ADDR_FAILED)
            explanation = explain_failure(core, lookup, failure)
            call, address = "resolve_addr", str(destination)
            raise cm_error(failure.errno, failure.message, call, address, failure.hint, explanation) from None
        core.attach(view, row, destination.pkey)
        if not any(destination.addr):  # "this host", as for sockets
            core.peer_addr = destination = replace(destination, addr=core.sgid)
        core.dgid = destination.addr
        core.local_addr = replace(local, addr=core.sgid, pkey=destination.pkey)
        core.move(Trigger.ADDR_DONE)
        core.post(CmEventType.ADDR_RESOLVED)

    def _bound_row(self) -> tuple[IbPortView, GidEntry] | None:
        """The port and GID that the id is bound to, as they are now; Failure when one of them is gone."""
        core, subnet = self._id, self._subnet
        if subnet is None:
            return None
        view = subnet.view()
        if view is None:
            raise Failure(errno.ENODEV, "select", f"the port is gone: {subnet.why()}", "'rdmacm devices'")
        row = view.row_of(core.sgid)
        if row is None:
            message = f"{view.device.name} port {view.port_num} no longer has the GID {core.sgid}"
            raise Failure(errno.ENODEV, "select", message, "a new id")
        return view, row

    # -- the route ------------------------------------------------------------------------------------

    def resolve_route(self, timeout_ms: int, alternate: bool) -> None:
        """Ask ibacm, if it runs, then the subnet administrator. ibacm knows no alternate paths."""
        core, started = self._id, perf_counter_ns()
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
        core, view, subnet = self._id, self._view_now("resolve_route"), self._bound_subnet()
        left = max(until - core.runtime.clock(), _LEAST_TIMEOUT)
        answered = partial(self._route_answered, view, alternate, started)
        tos, count = core.options.tos or 0, _ALTERNATE_PATHS if alternate else 1
        query = subnet.sa.query_paths(view.ib_port, core.sgid, self._peer(), left, answered, tos=tos, count=count)
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
            other = next((path for path in paths if (path.dlid, path.slid) != (paths[0].dlid, paths[0].slid)), None)
            paths = paths[:1] if other is None else (paths[0], other)
        self._route_found(paths)

    def _route_failed(self, started: int, failure: Failure) -> None:
        core, lookup = self._id, self.lookup
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
        if core.port_view is None:
            raise core.refuse("resolve_addrinfo")
        view, subnet = self._view_now("resolve_addrinfo"), self._bound_subnet()
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
        core.local_addr = replace(self._local(), pkey=core.pkey)
        core.move(Trigger.SERVICE_DONE)
        core.post(CmEventType.ADDRINFO_RESOLVED)

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> Registration:
        core, subnet = self._id, self._subnet
        if subnet is None:
            refuse_registration(core)
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

    # -- the passive side -----------------------------------------------------------------------------

    def accept_request(
        self, request: REQ | SIDR_REQ, path: Hashable, cm: ConnectionManager
    ) -> tuple[RejectReason, bytes] | None:
        core, subnet = self._id, self._id.host.ib.subnet_with(cm)
        assert isinstance(path, IbPath) and subnet is not None
        view = subnet.view()
        primary = request.primary if isinstance(request, REQ) else None
        rows = view.rows if view is not None else ()
        row = next((row for row in rows if primary is None or row.gid == primary.remote_gid), None)
        pkey = request.partition_key
        if view is None or row is None or not view.has_pkey(pkey):
            return RejectReason.INVALID_GID, bytes(rows[0].gid) if rows else b""
        mtu = view.port.active_mtu or Mtu.MTU_256
        if isinstance(request, REQ) and not 0 < request.path_mtu <= mtu:
            return RejectReason.INVALID_MTU, bytes((mtu,))
        core.dgid = primary.local_gid if primary is not None else Gid()
        core.local_addr = SockAddrIB(row.gid, request.service_id, ALL_BITS_64, pkey)
        core.peer_addr = SockAddrIB(core.dgid, 0, 0, pkey)
        core.attach(view, row, pkey)
        found = path_of_request(request, row.gid, core.dgid, mtu)
        core.paths = (found.replace(slid=view.ib_port.lid, dlid=path.lid, sl=path.sl, pkey=pkey),)
        return None

    def pkey_index(self) -> int:
        view = self._view
        assert view is not None
        return view.ib_port.pkey_index(self.partition()) or 0

    # -- for the connector ----------------------------------------------------------------------------

    @property
    def cm(self) -> ConnectionManager:
        subnet = self._subnet
        return self._id.host.cm if subnet is None else subnet.cm

    def managers(self) -> list[ConnectionManager]:
        """A wildcard GID listens on RoCE too: a REQ there may come from an AF_IB address."""
        subnet, host = self._subnet, self._id.host
        if subnet is not None:
            return [subnet.cm]
        subnets = (host.ib.subnet_of(view) for view in host.ib.views())
        return [host.cm, *(subnet.cm for subnet in subnets if subnet.transport.carries_cm)]

    def cm_path(self) -> IbPath:
        core = self._id
        path, view = core.paths[0], self._view_now("connect")
        index = view.ib_port.pkey_index(self.partition())
        if index is None:
            pkey, name = f"0x{self.partition():04x}", view.device.name
            message = f"P_Key {pkey} of the path is not in the table of {name}: {_pkey_table(view)}"
            raise cm_error(errno.EINVAL, message, "connect", str(core.peer_addr))
        return IbPath(path.dlid, path.sl, index)

    def partition(self) -> int:
        """The P_Key of the path, if it has one, else of the id."""
        core = self._id
        return core.paths[0].pkey if core.paths and core.paths[0].pkey else core.pkey

    def request_path(self, path: PathRecord, local_ack_timeout: int) -> Path:
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
            local_ack_timeout=local_ack_timeout,
        )

    def address_vector(self) -> AHAttr:
        core, path, view = self._id, self._id.paths[0], self._view
        assert view is not None
        lmc = view.ib_port.lmc
        hop_limit = path.hop_limit or _DEFAULT_HOP_LIMIT
        route = GlobalRoute(path.dgid, core.gid_index, path.flow_label, hop_limit, path.traffic_class)
        return AHAttr(
            dlid=path.dlid,
            sl=path.sl,
            src_path_bits=path.slid & (1 << lmc) - 1,
            static_rate=path.rate,
            is_global=path.hop_limit > 1,
            port_num=core.port_num,
            gr=route if path.hop_limit > 1 else GlobalRoute(),
        )


def _pkey_table(view: IbPortView) -> str:
    """The P_Key table of a port, in words."""
    return ", ".join(f"0x{pkey:04x}" for pkey in view.port.pkeys)
