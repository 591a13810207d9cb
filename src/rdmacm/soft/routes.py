"""Routes and services that are asked for without an id: what rdma_getaddrinfo(3) fills in."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rdmacm.address import ALL_BITS_64, Address, Gid, InetAddr, SockAddrIB, is_link_local, service_id
from rdmacm.errors import Failure, RdmaError
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.restriction import made_like, meets, same_partition, why_unusable
from rdmacm.provider import FoundServices, RouteChoice
from rdmacm.resolution.infiniband import IbLookup, IbPortView
from rdmacm.resolution.ipoib import IpoibPortView
from rdmacm.resolution.lookup import Lookup, destination_gid, find, source_like
from rdmacm.soft.host import SoftHost
from rdmacm.verbs.device import GidEntry

T = TypeVar("T")

#: Seconds. The timeout of :meth:`SubnetQueries.find_path`, which is that of rdma_create_ep(3) for a route.
ROUTE_TIMEOUT = 2.0


def find_route(
    host: SoftHost, destination: InetAddr, source: InetAddr | None, like: PathRecord | None
) -> RouteChoice | None:
    """See :meth:`rdmacm.provider.Provider.find_route`. With the runtime's lock held."""
    view = host.ip_view()
    lookup = Lookup(view, destination, source_like(view, destination, source, like), "given")
    try:
        found = find(host.network, lookup)
        # On IPoIB, the path takes a query, and often a wait for the neighbour.
        is_ipoib = isinstance(found.view, IpoibPortView)
        path: PathRecord | None = None if is_ipoib else host.paths.make(lookup, 0)
    except Failure:
        return None
    if path is not None and like is not None:
        path = made_like(path, like)
        if path is None:
            return None
    chosen = _source_of(lookup, found.source, found.row)
    return RouteChoice(chosen, found.view.device.name, found.view.port_num, found.row.gid_index, path)


def _source_of(lookup: Lookup, ip: bytes, row: GidEntry) -> InetAddr:
    """The source address of a finished lookup, with the port of the source asked for."""
    scope_id = row.ndev_ifindex if is_link_local(ip) else 0
    return InetAddr(lookup.destination.family, ip, lookup.source.port if lookup.source else 0, 0, scope_id)


class _NeighbourWait:
    """See :class:`rdmacm.resolution.neighbours.NeighbourWaiter`."""

    def __init__(self) -> None:
        #: The lookup whose wait is over, and why it was in vain.
        self.ended: Lookup | None = None
        self.failure: Failure | None = None

    def address_found(self, lookup: Lookup) -> None:
        self.ended = lookup

    def address_failed(self, lookup: Lookup, failure: Failure) -> None:
        self.ended, self.failure = lookup, failure

    def network_changed(self, lookup: Lookup, deadline: float) -> None:
        """Keep waiting: the answer is that of the host as it was when it was asked."""


class SubnetQueries:
    """Questions to subnet administrators that the calling thread waits for."""

    def __init__(self, host: SoftHost) -> None:
        self._host = host
        self._runtime = host.runtime

    # -- paths ----------------------------------------------------------------------------------------

    def find_path(
        self, destination: Address, source: Address | None, port_space: int, like: PathRecord | None
    ) -> RouteChoice | None:
        """See :meth:`rdmacm.provider.Provider.find_path`."""
        user = object()
        until = self._runtime.clock() + ROUTE_TIMEOUT
        self._runtime.use(user)
        try:
            if isinstance(destination, InetAddr):
                assert isinstance(source, InetAddr | None)
                return self._find_ipoib_path(destination, source, port_space, like, until)
            assert isinstance(source, SockAddrIB | None)
            return self._find_gid_path(destination, source, like, until)
        finally:
            self._runtime.release(user)

    def _find_gid_path(
        self, destination: SockAddrIB, source: SockAddrIB | None, like: PathRecord | None, until: float
    ) -> RouteChoice | None:
        ports = self._host.ib
        begin = source.addr if source is not None and any(source.addr) else like.sgid if like is not None else Gid()
        with self._runtime.lock:
            bound = ports.row_of(begin) if any(begin) else None
            if bound is None and any(begin):
                return None
            try:
                lookup = IbLookup(destination, self._host.provider_name)
                view, row = lookup.choose(ports.views(), bound, ports.why_none)
            except Failure:
                return None
        local = replace(source or SockAddrIB(pkey=destination.pkey), addr=row.gid)
        return self._with_path(RouteChoice(local, "", 0, 0, None), view, row, destination, like, until)

    def _find_ipoib_path(
        self, destination: InetAddr, source: InetAddr | None, port_space: int, like: PathRecord | None, until: float
    ) -> RouteChoice | None:
        """Find the GID of the neighbour, perhaps by ARP or neighbour discovery; then the path as between GIDs."""
        host, runtime, waiter = self._host, self._runtime, _NeighbourWait()
        with runtime.lock:
            seen = host.ip_view()
            lookup = Lookup(seen, destination, source_like(seen, destination, source, like), "given")
            try:
                found = find(host.network, lookup)
            except Failure:
                return None
            view = found.view
            if not isinstance(view, IpoibPortView) or view.infiniband is None:
                return None
            choice = RouteChoice(_source_of(lookup, found.source, found.row), "", 0, 0, None)
            must_wait = host.neighbours.add(waiter, lookup, until)
        if must_wait:
            try:
                runtime.drive(lambda: waiter.ended, None)
            finally:
                with runtime.lock:
                    host.neighbours.remove(waiter, lookup)
        try:
            gid = destination_gid(lookup)
        except Failure:  # it has not answered, or has no such address
            return _on(choice, view.infiniband, found.row, None)
        service = service_id(port_space, destination.port)
        peer = SockAddrIB(gid, service, ALL_BITS_64, view.pkey, destination.flowinfo)
        return self._with_path(choice, view.infiniband, found.row, peer, like, until)

    def _with_path(
        self,
        choice: RouteChoice,
        view: IbPortView,
        row: GidEntry,
        destination: SockAddrIB,
        like: PathRecord | None,
        until: float,
    ) -> RouteChoice | None:
        """A choice with its port, and with the path from there to a GID; None where there is no such path."""
        if like is not None:
            ends = ((row.gid, like.sgid), (destination.addr, like.dgid))
            is_there = all(not any(wanted) or gid == wanted for gid, wanted in ends)
            if not is_there or not same_partition(destination.pkey, like.pkey):
                return None
        session = self._host.ib.subnet_of(view).sa
        left = max(until - self._runtime.clock(), 0.001)
        paths = self._ask(view, partial(session.query_paths, view.ib_port, row.gid, destination, left, like=like))
        if paths is None:  # no answer
            return _on(choice, view, row, None)
        for path in paths:
            if why_unusable(path, has_lids=True) is None and (like is None or meets(path, like)):
                return _on(choice, view, row, path)
        return None

    # -- services -------------------------------------------------------------------------------------

    def find_services(self, service: str) -> FoundServices | None:
        """See :meth:`rdmacm.provider.Provider.find_services`."""
        with self._runtime.lock:
            views = [view for view in self._host.ib.views() if view.is_active and view.rows]
        for view in views:
            session = self._host.ib.subnet_of(view).sa
            records = self._ask(view, partial(session.query_services, view.ib_port, service))
            if records:
                return FoundServices(view.rows[0].gid, view.device.name, view.port_num, records)
        return None

    def _ask(
        self, view: IbPortView, ask: Callable[[Callable[[tuple[T, ...], Failure | None], None]], int]
    ) -> tuple[T, ...] | None:
        """Ask a subnet administrator and wait: the records, none where it knows or allows none; None without answer."""
        answers: list[tuple[tuple[T, ...], Failure | None]] = []
        user = object()
        subnet = self._host.ib.subnet_of(view)
        self._runtime.use(user)
        try:
            with self._runtime.lock:
                subnet.view()  # opens the transport
                try:
                    query = ask(lambda found, failure: answers.append((found, failure)))
                except RdmaError:
                    return None
            try:
                found, failure = self._runtime.drive(lambda: answers, None)[0]
            finally:
                with self._runtime.lock:
                    subnet.sa.cancel(query)
        finally:
            self._runtime.release(user)
        return None if failure is not None and failure.errno in (errno.ETIMEDOUT, errno.EIO) else found


def _on(choice: RouteChoice, view: IbPortView, row: GidEntry, path: PathRecord | None) -> RouteChoice:
    return RouteChoice(choice.source, view.device.name, view.port_num, row.gid_index, path)
