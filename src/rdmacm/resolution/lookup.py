"""From a destination to a route, a source, a device, a port and a GID.

:func:`find` does what needs no waiting: the routing tables and the policy. What may have to be waited for, the
neighbour, is the id's business (:mod:`rdmacm.soft.ids.identifier`); :func:`rdmacm.getaddrinfo` does without it.
"""

from __future__ import annotations

import errno
from socket import AF_INET, AF_INET6, inet_ntop
from time import perf_counter_ns

from rdmacm.address import DEFAULT_PKEY, Gid, InetAddr
from rdmacm.errors import errno_name
from rdmacm.explanation import Explanation, NeighbourUsed, RouteUsed, Step
from rdmacm.failure import Failure
from rdmacm.net.types import Neighbour, Network, RouteEntry
from rdmacm.proto.sa import PathRecord
from rdmacm.resolution import policy
from rdmacm.resolution.hosts import DeviceView, HostView, mtu_code
from rdmacm.verbs.device import GidEntry

#: Packet lifetime exponent of RoCE paths, where no ACK timeout was set: 4.096 µs · 2^16, a quarter of a second. (Older
#: Linux kernels have 18, with which a lost packet that nothing else tells of costs two seconds.)
ROCE_PACKET_LIFETIME = 16

#: Megabits per second → ``enum ibv_rate``, as the kernel rates a RoCE port; 0 is "the port's own rate".
_RATES = ((40000, 7), (30000, 4), (20000, 6), (10000, 3))


class Lookup:
    """A resolution on its way: what was asked, and what has been found so far."""

    __slots__ = (
        "destination",
        "device",
        "host",
        "neighbour",
        "next_hop",
        "origin",
        "query",
        "route",
        "row",
        "source",
        "steps",
        "tos",
    )

    def __init__(self, host: HostView, destination: InetAddr, source: InetAddr | None, origin: str, tos: int) -> None:
        self.host = host
        self.destination = destination
        self.source = source
        self.origin = origin
        self.tos = tos
        self.route: RouteEntry | None = None
        self.query: policy.Query | None = None
        self.device: DeviceView | None = None
        self.row: GidEntry | None = None
        self.neighbour: Neighbour | None = None
        #: (family, interface, address) of the neighbour to find, None where none is needed.
        self.next_hop: tuple[int, int, bytes] | None = None
        self.steps: list[tuple[str, int, str]] = []

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, as data."""
        route = self.route
        explanation = Explanation(
            node=node or self.destination.host,
            service=str(self.destination.port),
            provider=self.host.provider,
            candidates=policy.judge(self.query, self.host) if self.query else (),
            route=self._route_used(route) if route else None,
            neighbour=self._neighbour_used() if self.next_hop else None,
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

    def _neighbour_used(self) -> NeighbourUsed:
        assert self.next_hop is not None
        _, ifindex, ip = self.next_hop
        name = self.host.interface_name(ifindex)
        entry = self.neighbour
        if entry is None:
            return NeighbourUsed(str(_text(ip)), name, None, "absent")
        return NeighbourUsed(str(_text(ip)), name, entry.link_layer_address.hex(":") or None, entry.state.name.lower())


def _text(ip: bytes | None) -> str | None:
    return None if ip is None else inet_ntop(AF_INET if len(ip) == 4 else AF_INET6, ip)


def _route_failure(lookup: Lookup, code: int, ifindex: int) -> Failure:
    """What a routing error means, in words, and what to try."""
    dst, source = lookup.destination, lookup.source
    ask = f"'ip route get {dst.host}' to see what the kernel would do, and add the route that is missing"
    given = source is not None and not source.is_any and not source.is_loopback
    if code == errno.EINVAL and source is not None and given and not lookup.host.owns(source.ip):
        return Failure(
            errno.EADDRNOTAVAIL, "route", f"source {source.host} is not an address of this host", "'rdmacm devices'"
        )
    if code == errno.EINVAL and dst.is_link_local and not ifindex:
        return Failure(code, "route", "a link-local address needs a scope", _scope_hint(dst))
    if code == errno.EINVAL and source is not None and source.is_loopback:
        return Failure(code, "route", f"source {source.host} cannot leave this host", "another source, or none")
    if code == errno.EINVAL:
        return Failure(code, "route", f"a blackhole route covers {dst.host}", f"'ip route get {dst.host}'")
    if code == errno.EACCES:
        return Failure(code, "route", f"a prohibit route covers {dst.host}", f"'ip route get {dst.host}'")
    if code == errno.EHOSTUNREACH:
        return Failure(code, "route", f"an unreachable route covers {dst.host}, or its next hop failed", ask)
    if code == errno.ENETUNREACH:
        if dst.is_loopback:
            loopback = lookup.host.loopback
            if loopback is not None and loopback.is_active:
                enable = "IPv4" if dst.family == AF_INET else "IPv6 (sysctl net.ipv6.conf.lo.disable_ipv6=0)"
                return Failure(
                    code, "route", f"{loopback.interface.name} has no address {dst.host}", f"enable {enable}"
                )
            return Failure(code, "route", "the loopback interface is down", "'ip link set lo up'")
        if dst.family == AF_INET6 and dst.ip.startswith(bytes(10) + b"\xff\xff"):
            return Failure(code, "route", f"{dst.host} is an IPv4-mapped address", "the IPv4 address itself")
        where = f" out of {lookup.host.interface_name(ifindex)}" if ifindex else ""
        return Failure(code, "route", f"no route to {dst.host}{where}", ask)
    if code == errno.ENODEV:
        return Failure(code, "route", f"interface {ifindex} does not exist", "'ip link'")
    return Failure(code, "route", f"the routing lookup for {dst.host} failed ({errno_name(code)})", ask)


def _unusable(lookup: Lookup, given: bytes | None, ifindex: int) -> Failure | None:
    """What the routing tables would be asked in vain, or answer in spite of."""
    dst, source = lookup.destination, lookup.source
    if dst.is_link_local and not ifindex and not lookup.host.owns(dst.ip):
        return Failure(errno.EINVAL, "route", "a link-local address needs a scope", _scope_hint(dst))
    if given is not None and source is not None and not source.is_loopback and not lookup.host.owns(given):
        return Failure(
            errno.EADDRNOTAVAIL, "route", f"source {source.host} is not an address of this host", "'rdmacm devices'"
        )
    return None


def _scope_hint(dst: InetAddr) -> str:
    return f"{dst.host}%INTERFACE; for a GID, AF_IB with RAI_FAMILY"


def find(
    network: Network,
    host: HostView,
    destination: InetAddr,
    source: InetAddr | None = None,
    origin: str = "route",
    tos: int = 0,
    bound: DeviceView | None = None,
    lookup: Lookup | None = None,
) -> Lookup:
    """RouteEntry and choose; Failure where that cannot be done.

    ``source``: a specific source address and its ``origin``; its interface, or that of the ``bound`` device, pins
    the way out. ``lookup``: one to fill, so that a caller can explain a failure from it.
    """
    if lookup is None:
        lookup = Lookup(host, destination, source, origin, tos)
    given = source.ip if source is not None and not source.is_any else None
    ifindex = destination.scope_id if destination.is_link_local or destination.is_multicast else 0
    if not ifindex and given is not None and source is not None:
        owner = bound.ifindex if bound else next((v.ifindex for v, _ in host.by_ip.get(given, ())), 0)
        # Pinning the loopback would make every destination but our own unreachable; the kernel does not either.
        ifindex = 0 if bound and bound.interface.is_loopback else owner
        if destination.is_loopback or host.owns(destination.ip):
            ifindex = 0
    started = perf_counter_ns()
    wrong = _unusable(lookup, given, ifindex)
    if wrong is not None:
        lookup.steps.append(("route", perf_counter_ns() - started, wrong.message))
        raise wrong
    try:
        route = network.route(destination.family, destination.ip, given, ifindex, tos)
    except OSError as error:
        failure = _route_failure(lookup, error.errno or errno.EIO, ifindex)
        lookup.steps.append(("route", perf_counter_ns() - started, failure.message))
        raise failure from None
    lookup.route = route
    routed = perf_counter_ns()
    lookup.steps.append(("route", routed - started, route.kind))

    chosen_source = given or route.source
    egress = host.interface_name(route.ifindex)
    if chosen_source is None:
        family = "IPv4" if destination.family == AF_INET else "IPv6"
        raise Failure(
            errno.EADDRNOTAVAIL,
            "select",
            f"interface {egress}, by which the route leaves, has no {family} address",
            f"'ip addr add ADDRESS dev {egress}'",
        )
    if chosen_source[0] == 127 and len(chosen_source) == 4 and chosen_source not in host.by_ip:
        # All of 127/8 is local, but only 127.0.0.1 is in the GID table.
        loopback = host.loopback
        first = next((row for row in loopback.rows if len(row.gid.ip) == 4), None) if loopback else None
        chosen_source = first.gid.ip if first else chosen_source
    lookup.query = query = policy.Query(
        destination,
        chosen_source,
        origin if given else "route",
        route,
        egress,
        bound.ifindex if bound else 0,
        bound.device.name if bound else "",
    )
    pair = policy.choose(query, host)
    lookup.steps.append(("select", perf_counter_ns() - routed, pair[0].device.name if pair else "no candidate passed"))
    if pair is None:
        if (view := policy.only_down(query, host)) is not None:
            name = view.interface.name
            raise Failure(
                errno.ENODEV,
                "select",
                f"interface {name} is down",
                f"'ip link set {name} up'"
                if not view.interface.is_up
                else f"whether the cable of {name} is plugged in",
            )
        raise Failure(
            errno.ENODEV,
            "select",
            f"no RDMA device has the source address {_text(chosen_source)} on {egress}, where the route leaves",
            f"a source address that is on {egress}, or 'rdmacm explain {destination.host}' for the candidates",
        )
    lookup.device, lookup.row = pair
    interface = host.interfaces.get(route.ifindex)
    if route.kind == "unicast" and (interface is None or interface.needs_neighbour):
        hop = route.gateway or destination.ip
        lookup.next_hop = (AF_INET if len(hop) == 4 else AF_INET6, route.ifindex, hop)
    return lookup


def link_rate(network: Network, view: DeviceView) -> int:
    """The ``ibv_rate`` code of a device's link."""
    speed = network.link_speed(view.interface.name)
    return next((code for floor, code in _RATES if speed >= floor), 0)


def default_hop_limit(network: Network, family: int, interface: str) -> int:
    """Hop limit of packets whose route sets none."""
    if family == AF_INET:
        return network.setting("net/ipv4/ip_default_ttl", 64)[0]
    return network.setting(f"net/ipv6/conf/{interface}/hop_limit", 64)[0]


def make_path(
    lookup: Lookup,
    rate: int,
    default_hops: int,
    src_port: int,
    *,
    service_id: int = 0,
    lifetime: int = ROCE_PACKET_LIFETIME,
) -> PathRecord:
    """The path record of a RoCEv2 path, as rdma_resolve_route(3) makes it; EINVAL where no packet would fit."""
    assert lookup.route is not None and lookup.device is not None and lookup.row is not None
    destination, route = lookup.destination, lookup.route
    interface = lookup.device.interface
    mtu = mtu_code(min(route.mtu or interface.mtu, interface.mtu))
    if mtu is None:
        raise Failure(
            errno.EINVAL,
            "path",
            f"the MTU of {interface.name}, {interface.mtu}, is too small for RoCE",
            f"'ip link set {interface.name} mtu 1500'",
        )
    given = (lookup.source.flowinfo if lookup.source is not None else 0) & 0xFFFFF or destination.flowinfo & 0xFFFFF
    flow = given or (src_port * 31 + destination.port) & 0xFFFFF
    return PathRecord(
        dgid=Gid.from_ip(destination.ip),
        sgid=lookup.row.gid,
        service_id=service_id,
        flow_label=flow,
        hop_limit=route.hop_limit or default_hops,
        traffic_class=lookup.tos,
        pkey=DEFAULT_PKEY,
        mtu=mtu,
        rate=rate,
        packet_life_time=lifetime,
    )
