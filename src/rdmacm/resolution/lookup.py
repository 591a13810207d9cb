"""From an IP address to a route, a source address, a port, a GID and a next hop.

:func:`find` takes the steps that need no waiting. :mod:`rdmacm.resolution.neighbours` waits for the link-layer address
of the next hop.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from socket import AF_INET, AF_INET6, inet_ntop
from time import perf_counter_ns
from typing import NamedTuple

from rdmacm.address import Gid, InetAddr, is_link_local
from rdmacm.errors import Failure
from rdmacm.explanation import Explanation, NeighbourUsed, RouteUsed, Step
from rdmacm.net.types import Neighbour, Network, RouteEntry
from rdmacm.proto.ipoib import IpoibAddress, multicast_gid
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.wire import WireError
from rdmacm.resolution import policy
from rdmacm.resolution.hosts import HostView, IpPortView, PortView
from rdmacm.resolution.ipoib import IpoibPortView, no_partition, no_port
from rdmacm.resolution.routing import find_route
from rdmacm.verbs.device import GidEntry

#: How many choices a view of the host keeps.
_MAX_CHOICES = 1024


class Found(NamedTuple):
    """The results of a resolution that succeeded."""

    route: RouteEntry
    #: The port that packets leave through.
    view: IpPortView
    #: The GID of the source address, as a row of the port's GID table.
    row: GidEntry
    #: The source address, packed.
    source: bytes
    #: (family, interface index, packed address) of the neighbour to find; None if none is needed.
    next_hop: tuple[int, int, bytes] | None
    #: The GID of the destination; None on IPoIB, where :func:`destination_gid` finds it.
    dgid: Gid | None


@dataclass(slots=True, eq=False, repr=False)
class Lookup:
    """The question and the results so far of one resolution of an IP address."""

    #: The view of the host that the resolution is made on.
    host: HostView
    destination: InetAddr
    #: The source address that was asked for; None or a wildcard if the route chooses it.
    source: InetAddr | None
    #: Where a specific source address comes from: "given" by the caller, or "bound" by the id.
    origin: str
    #: Type of service, 8 bits.
    tos: int = 0
    #: The port that the id is bound to, if any.
    bound: PortView | None = None
    #: None until it is found. The explanation of a failure shows it too.
    route: RouteEntry | None = None
    #: What the rules judge by; None until there is a route and a source address.
    query: policy.Query | None = None
    #: None until :func:`find` has succeeded.
    found: Found | None = None
    #: The entry of the next hop in the neighbour table; None if it has none or was not looked up.
    neighbour: Neighbour | None = None
    #: Name, nanoseconds and result of each step taken.
    steps: list[tuple[str, int, str]] = field(default_factory=list)

    @property
    def next_hop(self) -> tuple[int, int, bytes] | None:
        """:attr:`Found.next_hop`."""
        return self.found.next_hop if self.found is not None else None

    def note(self, step: str, started: int, result: str) -> None:
        """Record a step that began at ``started`` (perf_counter_ns)."""
        self.steps.append((step, perf_counter_ns() - started, result))

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, ending in ``failure`` if there is one; ``extra`` steps come first."""
        route = self.route
        explanation = Explanation(
            node=node or self.destination.host,
            service=str(self.destination.port),
            provider=self.host.provider,
            candidates=policy.judge(self.query, self.host) if self.query else (),
            route=self._route_used(route) if route else None,
            neighbour=self._neighbour_used(*self.next_hop) if self.next_hop else None,
            steps=extra + tuple(Step(name, ns / 1000, detail) for name, ns, detail in self.steps),
        )
        return explanation if failure is None else failure.explained(explanation)

    def _route_used(self, route: RouteEntry) -> RouteUsed:
        interface = self.host.interfaces.get(route.ifindex)
        return RouteUsed(
            self.destination.host,
            route.kind,
            self.host.interface_name(route.ifindex),
            _text(route.gateway),
            _text(self.query.source if self.query else route.source),
            255 if route.kind == "local" else route.table,
            route.hop_limit,
            route.mtu or (interface.mtu if interface else 0),
        )

    def _neighbour_used(self, family: int, ifindex: int, ip: bytes) -> NeighbourUsed:
        address, interface = inet_ntop(family, ip), self.host.interface_name(ifindex)
        entry = self.neighbour
        if entry is None:
            return NeighbourUsed(address, interface, None, "absent")
        return NeighbourUsed(address, interface, entry.link_layer_address.hex(":") or None, entry.state.name.lower())


def source_like(
    host: HostView, destination: InetAddr, source: InetAddr | None, like: PathRecord | None
) -> InetAddr | None:
    """The source of a lookup whose path has to be like ``like``: its SGID, if the caller gives no source.

    A SGID that is no address of this host changes nothing; the path then differs from ``like``.
    """
    if like is None or (source is not None and not source.is_any) or not host.owns(like.sgid.ip):
        return source
    ip = like.sgid.ip
    if len(ip) != (4 if destination.family == AF_INET else 16):
        return source
    scope_id = destination.scope_id if is_link_local(ip) else 0
    return InetAddr(destination.family, ip, source.port if source else 0, 0, scope_id)


def find(network: Network, lookup: Lookup) -> Found:
    """Find route, source address, port, GID and next hop, without waiting; set :attr:`Lookup.found`.

    Failure at step "route" or "select"; the results until then stay in ``lookup``, for its explanation.
    """
    host, started = lookup.host, perf_counter_ns()
    try:
        route = find_route(network, host, lookup.destination, lookup.source, lookup.bound, lookup.tos)
    except Failure as failure:
        lookup.note("route", started, failure.message)
        raise
    lookup.route = route
    found_at = perf_counter_ns()
    lookup.steps.append(("route", found_at - started, route.kind))
    bound = lookup.bound.key if lookup.bound is not None else None
    question = lookup.destination, lookup.source, lookup.origin, bound, route
    known: tuple[policy.Query, Found] | None = host.choices.get(question)
    if known is not None:
        lookup.query, lookup.found = known
        lookup.steps.append(("select", perf_counter_ns() - found_at, known[1].view.device.name))
        return known[1]
    lookup.query = query = _query(lookup, route)
    chosen = policy.choose(query, host)
    text = chosen.view.device.name if chosen else "no candidate passed"
    lookup.steps.append(("select", perf_counter_ns() - found_at, text))
    if chosen is None:
        raise _no_port(host, query)
    next_hop = _next_hop(host, lookup.destination, route, chosen.view)
    dgid = None if isinstance(chosen.view, IpoibPortView) else Gid.from_ip(lookup.destination.ip)
    lookup.found = found = Found(route, chosen.view, chosen.row, query.source, next_hop, dgid)
    if len(host.choices) < _MAX_CHOICES:
        host.choices[question] = query, found
    return found


def _query(lookup: Lookup, route: RouteEntry) -> policy.Query:
    """What the rules are to judge by; Failure (EADDRNOTAVAIL) when neither caller nor route has a source address."""
    host, destination, source = lookup.host, lookup.destination, lookup.source
    egress = host.interface_name(route.ifindex)
    if source is not None and not source.is_any:
        ip, origin = source.ip, lookup.origin
    elif route.source is not None:
        ip, origin = route.source, "route"
    else:
        family = "IPv4" if destination.family == AF_INET else "IPv6"
        message = f"interface {egress}, through which the route leaves, has no {family} address"
        raise Failure(errno.EADDRNOTAVAIL, "select", message, f"'ip addr add ADDRESS dev {egress}'")
    if ip not in host.by_ip and (own := host.find_addresses(ip)):  # an address in 127/8
        ip = own[0].ip
    owners = host.find_addresses(destination.ip) if route.kind == "local" else ()
    link_layer = owners[0].view.port.link_layer if owners else None
    return policy.Query(destination, ip, origin, route, egress, lookup.bound, link_layer)


def _no_port(host: HostView, query: policy.Query) -> Failure:
    """No candidate has passed the rules."""
    unusable = policy.unusable_port(query, host)
    if unusable is None:
        egress = query.egress
        return Failure(
            errno.ENODEV,
            "select",
            f"no RDMA device has the source address {_text(query.source)} on {egress}, through which the route leaves",
            f"a source address that is on {egress}, or 'rdmacm explain {query.destination.host}' for the candidates",
        )
    (view, row, _), rule = unusable
    if isinstance(view, IpoibPortView) and rule == "infiniband-port":
        return no_port(view.ipoib, "select")
    if isinstance(view, IpoibPortView) and rule == "partition":
        return no_partition(view, "select")
    interface = host.interfaces.get(row.ndev_ifindex)
    if interface is None or interface.is_running:
        message = f"{view.device.name} port {view.port_num} is {view.port.state.name}, not ACTIVE"
        return Failure(errno.ENODEV, "select", message, "'rdmacm devices' for the ports' states")
    name = interface.name
    hint = f"checking that the cable of {name} is plugged in" if interface.is_up else f"'ip link set {name} up'"
    return Failure(errno.ENODEV, "select", f"interface {name} is down", f"{hint} (rdmacm doctor A18)")


def _next_hop(
    host: HostView, destination: InetAddr, route: RouteEntry, view: IpPortView
) -> tuple[int, int, bytes] | None:
    """The neighbour that packets go to: the gateway, else the destination; None where none has to be found.

    Failure (EADDRNOTAVAIL) for a gateway on IPoIB: its hardware address is not that of the destination's port.
    """
    interface = host.interfaces.get(route.ifindex)
    if route.gateway and isinstance(view, IpoibPortView):
        message = f"{destination.host} is behind the gateway {_text(route.gateway)}, and IP routers do not route RDMA"
        hint = "an address in a subnet of this host's IPoIB interfaces, or the GID of its port (AF_IB)"
        raise Failure(errno.EADDRNOTAVAIL, "route", message, hint)
    if route.kind != "unicast" or (interface is not None and not interface.needs_neighbour):
        return None
    ip = route.gateway or destination.ip
    return AF_INET if len(ip) == 4 else AF_INET6, route.ifindex, ip


def destination_gid(lookup: Lookup) -> Gid:
    """The GID of the destination of a lookup that :func:`find` has found, once its neighbour is known.

    On IPoIB, Failure at step "neighbour" (EADDRNOTAVAIL) if the neighbour table has no IPoIB address for it.
    """
    found, destination = lookup.found, lookup.destination
    assert found is not None
    view, kind = found.view, found.route.kind
    if not isinstance(view, IpoibPortView):
        assert found.dgid is not None
        return found.dgid
    if kind == "local":
        owners = lookup.host.find_addresses(destination.ip)
        return next((owner for owner in owners if owner.view is view), owners[0]).row.gid
    if kind == "broadcast":
        return view.ipoib.broadcast_gid
    if kind == "multicast":
        return multicast_gid(destination.ip, view.pkey, view.ipoib.broadcast_gid[1] & 0x0F)
    entry = lookup.neighbour
    try:
        return IpoibAddress.unpack(entry.link_layer_address if entry else b"").gid
    except WireError:
        message = f"the neighbour {destination.host} on {view.interface.name} has no IPoIB hardware address"
        raise Failure(errno.EADDRNOTAVAIL, "neighbour", message, "'ip neigh'") from None


def _text(ip: bytes | None) -> str | None:
    return None if ip is None else inet_ntop(AF_INET if len(ip) == 4 else AF_INET6, ip)
