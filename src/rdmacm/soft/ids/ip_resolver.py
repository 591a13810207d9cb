"""The resolver of an id with IP addresses: the routing tables give port and next hop, and the next hop has to answer.

On IPoIB, the next hop is the destination itself, and its hardware address gives the GID of its port.
"""

from __future__ import annotations

import errno
from functools import partial
from socket import AF_INET, AF_INET6
from time import perf_counter_ns
from typing import TYPE_CHECKING

from rdmacm.address import WILDCARDS, Address, InetAddr, inet_addr, is_link_local
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import Failure, RdmaError, cm_error
from rdmacm.provider.cmstate import TRANSITIONS, Trigger
from rdmacm.resolution.hosts import HostView, RocePortView
from rdmacm.resolution.infiniband import IbPortView
from rdmacm.resolution.ipoib import IpoibPortView, no_partition, no_port
from rdmacm.resolution.lookup import Found, Lookup, destination_gid, find
from rdmacm.resolution.routing import loopback_down
from rdmacm.soft.ids.id_state import IdState, explain_failure

if TYPE_CHECKING:
    from rdmacm.net.types import Neighbour
    from rdmacm.soft.connection_manager import ConnectionManager

_NO_IPOIB = "port space IPOIB needs an InfiniBand interface"


def _require_ipoib(found: Found) -> None:
    if not isinstance(found.view, IpoibPortView):
        raise Failure(errno.EINVAL, "select", _NO_IPOIB, "port space UDP")


class IpResolver:
    """See :class:`rdmacm.soft.ids.link.Resolver`."""

    __slots__ = ("_id", "_lookup", "_wait_started")

    def __init__(self, core: IdState) -> None:
        self._id = core
        #: The last resolution; None before the first.
        self._lookup: Lookup | None = None
        #: When the wait for the neighbour began, in nanoseconds of perf_counter_ns().
        self._wait_started = 0

    # -- binding --------------------------------------------------------------------------------------

    def bind(self, address: Address) -> InetAddr:
        assert isinstance(address, InetAddr)
        core, is_any = self._id, address.ip in WILDCARDS
        if not is_any:
            if address.is_link_local and not address.scope_id:
                raise Failure(errno.EINVAL, "bind", "a link-local address needs a scope", f"{address.host}%INTERFACE")
            self._bind_device(address)
        afonly = core.options.afonly
        if afonly is None:
            afonly = address.family == AF_INET or bool(core.host.network.setting("net/ipv6/bindv6only", 0)[0])
        family, ip, port, flowinfo, scope_id = address
        link = address.link if scope_id else 0
        port = core.take_port(core.port_space, port, family, ip, link, is_any, afonly)
        return inet_addr((family, ip, port, flowinfo, scope_id))

    def _bind_device(self, address: InetAddr) -> None:
        core = self._id
        host = core.host.ip_view()
        found = host.find_addresses(address.ip, address.link)
        if not found:
            if address.is_loopback and (down := loopback_down(host)) is not None:
                raise Failure(errno.EADDRNOTAVAIL, "bind", *down)
            scope = f" on {host.interface_name(address.link)}" if address.link else ""
            raise Failure(
                errno.EADDRNOTAVAIL,
                "bind",
                f"{address.host} is not an address of this host{scope}",
                "one of the addresses that 'rdmacm devices' shows, or the wildcard address",
            )
        view = found[0].view
        if isinstance(view, IpoibPortView):
            if view.infiniband is None:
                raise no_port(view.ipoib, "bind")
            if not view.infiniband.has_pkey(view.pkey):
                raise no_partition(view, "bind", errno.EINVAL)
        elif core.port_space is PortSpace.IPOIB:
            raise Failure(errno.EINVAL, "bind", _NO_IPOIB, "port space UDP")
        core.attach(view, found[0].row)

    # -- resolving an address -------------------------------------------------------------------------

    def resolve_addr(self, destination: Address, origin: str, timeout_ms: int) -> None:
        core = self._id
        assert isinstance(destination, InetAddr) and isinstance(core.local_addr, InetAddr)
        local = core.local_addr
        host, tos = core.host.ip_view(), core.options.tos or 0
        if destination.ip in WILDCARDS:  # "this host", as for sockets
            destination = InetAddr.loopback(destination.family, destination.port)
        if (core.port_space is PortSpace.IPOIB or isinstance(core.port_view, IbPortView)) and destination.is_loopback:
            destination = self._own_address(host, destination, local)
        if destination.family == AF_INET6 and not destination.scope_id and is_link_local(destination.ip):
            destination = destination._replace(scope_id=local.scope_id or self._bound_interface(host, local))
        core.move(Trigger.RESOLVE_ADDR)
        source = None if local.ip in WILDCARDS else local
        self._lookup = core.lookup = lookup = Lookup(host, destination, source, origin, tos, core.port_view)
        core.peer_addr = destination
        try:
            found = find(core.host.network, lookup)
            if core.port_space is PortSpace.IPOIB:
                _require_ipoib(found)
        except Failure as failure:
            core.move(Trigger.ADDR_FAILED)
            if failure.step == "select" and failure.errno in (errno.ENODEV, errno.EINVAL):
                # There is a route but no device for it, which the kernel notices later and reports by an event.
                self._post_failure(lookup, failure)
                return
            raise self._error(lookup, failure, "resolve_addr") from None
        if found.next_hop is not None:
            self._wait_started = perf_counter_ns()
            if core.host.neighbours.add(self, lookup, core.runtime.clock() + timeout_ms / 1000):
                return
        self.address_found(lookup)

    def _own_address(self, host: HostView, destination: InetAddr, local: InetAddr) -> InetAddr:
        """An IPoIB address of this host in place of a loopback address; the loopback address if that leads to RoCE."""
        core = self._id
        if isinstance(core.port_view, IbPortView):
            return destination._replace(ip=local.ip, scope_id=local.scope_id)
        if core.port_space is PortSpace.IPOIB and not local.is_loopback:
            for view, row, ip in host.addresses:
                if isinstance(view, IpoibPortView) and len(ip) == len(destination.ip):
                    own = destination._replace(ip=ip)
                    return own._replace(scope_id=row.ndev_ifindex) if own.is_link_local else own
        return destination

    def _bound_interface(self, host: HostView, local: InetAddr) -> int:
        """The index of the interface that the id is bound to; 0 if it is bound to none."""
        view = self._id.port_view
        if isinstance(view, RocePortView):
            return view.interface.index
        own = host.find_addresses(local.ip, local.link)
        return own[0].row.ndev_ifindex if view is not None and own else 0

    def address_found(self, lookup: Lookup) -> None:
        """See :class:`rdmacm.resolution.neighbours.NeighbourWaiter`; also called when there is nothing to wait for."""
        core = self._id
        if lookup is not self._lookup or Trigger.ADDR_DONE not in TRANSITIONS[core.state]:
            return
        found, local = lookup.found, core.local_addr
        assert found is not None and isinstance(local, InetAddr)
        try:
            dgid = found.dgid or destination_gid(lookup)
        except Failure as failure:
            self.address_failed(lookup, failure)
            return
        if found.next_hop is not None:
            state = lookup.neighbour.state.name.lower() if lookup.neighbour else "not visible"
            if isinstance(found.view, IpoibPortView):
                state += f", GID {dgid}"
            lookup.note("neighbour", self._wait_started, state)
        core.attach(found.view, found.row)
        core.dgid = dgid
        if local.ip in WILDCARDS:
            scope_id = 0
            if local.family == AF_INET6 and is_link_local(found.source):
                scope_id = found.row.ndev_ifindex
            core.local_addr = inet_addr((local.family, found.source, local.port, 0, scope_id))
        core.move(Trigger.ADDR_DONE)
        core.post(CmEventType.ADDR_RESOLVED)

    def address_failed(self, lookup: Lookup, failure: Failure) -> None:
        """See :class:`rdmacm.resolution.neighbours.NeighbourWaiter`."""
        core = self._id
        if lookup is not self._lookup or not core.may(Trigger.ADDR_FAILED):
            return
        lookup.note("neighbour", self._wait_started, failure.message)
        core.move(Trigger.ADDR_FAILED)
        self._post_failure(lookup, failure)

    def network_changed(self, lookup: Lookup, deadline: float) -> None:
        """The host has changed during the wait: resolve again, and keep waiting if the next hop is the same."""
        core = self._id
        host, pending = core.host.last_ip_view(), core.host.neighbours
        fresh = Lookup(host, lookup.destination, lookup.source, lookup.origin, lookup.tos, core.port_view)
        failure: Failure | None = None
        source = lookup.source
        if source is not None and not source.is_loopback and not host.owns(source.ip, source.link):
            failure = Failure(
                errno.EADDRNOTAVAIL,
                "route",
                f"source {source.host} was removed from this host while resolving",
                "a new id, with another source",
            )
            fresh.route, fresh.query = lookup.route, lookup.query
        else:
            try:
                found = find(core.host.network, fresh)
                if core.port_space is PortSpace.IPOIB:
                    _require_ipoib(found)
            except Failure as error:
                failure = error
        if failure is not None:
            pending.remove(self, lookup)
            # The explanation shows the host as it is now, since that is what the failure is about.
            fresh.steps[:0] = lookup.steps
            self._lookup = core.lookup = fresh
            self.address_failed(fresh, failure)
        elif fresh.next_hop != lookup.next_hop:
            pending.remove(self, lookup)
            self._lookup = core.lookup = fresh
            if not pending.add(self, fresh, deadline):
                self.address_found(fresh)
        else:
            lookup.host, lookup.bound, lookup.query, lookup.found = fresh.host, fresh.bound, fresh.query, fresh.found

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        lookup = self._lookup
        if lookup is None or lookup.neighbour is None or lookup.next_hop is None:
            return
        # As in Linux, a gateway does not count.
        if lookup.next_hop[1:] != (neighbour.ifindex, neighbour.ip) or neighbour.ip != lookup.destination.ip:
            return
        before, now = lookup.neighbour.link_layer_address, neighbour.link_layer_address
        if before != now:
            lookup.neighbour = neighbour
            if self._id.queue.has(self._id.owner(), CmEventType.UNREACHABLE):
                return  # neighbours can change addresses as often as they like, and the application may read no events
            macs = f"{now.hex(':')}, before {before.hex(':')}"
            text = f"{lookup.destination.host} has another hardware address: {macs} (rdmacm doctor C5)"
            self._id.post(CmEventType.UNREACHABLE, -errno.ETIMEDOUT, None, text)

    def stop(self) -> None:
        if self._lookup is not None and self._id.host.neighbours.waiting:
            self._id.host.neighbours.remove(self, self._lookup)

    def _post_failure(self, lookup: Lookup, failure: Failure) -> None:
        explain = partial(explain_failure, self._id, lookup, failure)
        self._id.post(CmEventType.ADDR_ERROR, -failure.errno, explain, failure.message)

    def _error(self, lookup: Lookup, failure: Failure, call: str) -> RdmaError:
        """The error of a call that failed at once."""
        explanation = explain_failure(self._id, lookup, failure)
        return cm_error(failure.errno, failure.message, call, str(lookup.destination), failure.hint, explanation)

    # -- listening ------------------------------------------------------------------------------------

    def managers(self) -> list[ConnectionManager]:
        """A wildcard listens on RoCE and on every InfiniBand port with an IPoIB interface."""
        core, host = self._id, self._id.host
        bound = core.port_view
        if bound is not None and not isinstance(bound, IbPortView):
            return [host.cm]
        views = [address.view for address in host.ip_view().addresses]
        ports = {
            view.key: view.infiniband
            for view in views
            if isinstance(view, IpoibPortView) and view.infiniband and (bound is None or view.key == bound.key)
        }
        subnets = [host.ib.subnet_of(port) for port in ports.values()]
        if core.port_space is PortSpace.IPOIB:
            # The Q_Keys are needed as soon as a request is accepted.
            for view in views:
                if isinstance(view, IpoibPortView) and view.infiniband and view.key in ports:
                    host.ib.subnet_of(view.infiniband).learn_qkey(view.ipoib.broadcast_gid)
        if bound is not None:
            return [subnet.cm for subnet in subnets]
        found = [subnet.cm for subnet in subnets if subnet.transport.carries_cm]
        return found if core.port_space is PortSpace.IPOIB else [host.cm, *found]
