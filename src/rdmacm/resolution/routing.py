"""The route of a resolution: what the routing tables are asked, and what their errors mean."""

from __future__ import annotations

import errno
from socket import AF_INET, AF_INET6

from rdmacm.address import V4_MAPPED, InetAddr
from rdmacm.errors import Failure, errno_name
from rdmacm.net.types import Network, RouteEntry
from rdmacm.resolution.hosts import HostView, PortView


def find_route(
    network: Network,
    host: HostView,
    destination: InetAddr,
    source: InetAddr | None,
    bound: PortView | None,
    tos: int,
) -> RouteEntry:
    """The route to ``destination``; Failure at step "route" when there is none.

    ``source`` restricts it to a source address and, unless it is a wildcard, to the interface of that address; see
    :func:`pinned_interface` for ``bound``.
    """
    given = source.ip if source is not None and not source.is_any else None
    ifindex = 0
    if given is not None or destination.scope_id:
        ifindex = pinned_interface(host, destination, given, bound)
    if not ifindex and destination.family == AF_INET6 and destination.is_link_local and not host.owns(destination.ip):
        raise _scope_needed(destination)
    if source is not None and given is not None and not source.is_loopback and not host.owns(given):
        raise _not_local(source)
    try:
        return network.route(destination.family, destination.ip, given, ifindex, tos)
    except OSError as error:
        raise _failure(host, destination, source, ifindex, error.errno or errno.EIO) from None


def pinned_interface(host: HostView, destination: InetAddr, source: bytes | None, bound: PortView | None) -> int:
    """Index of the interface through which packets have to leave; 0 if the routing tables are free to choose.

    That is the scope of a link-local or multicast destination, else the interface of a given source address: on the
    port that the id is ``bound`` to, if any. To an address of this host, the kernel always uses the loopback interface.
    A source on the loopback interface pins nothing, as in the kernel: only this host could be reached.
    """
    if destination.scope_id and (destination.is_link_local or destination.is_multicast):
        return destination.scope_id
    if source is None or destination.is_loopback or host.owns(destination.ip):
        return 0
    for view, row, _ in host.by_ip.get(source, ()):
        if bound is None or view.key == bound.key:
            return 0 if host.is_loopback(row.ndev_ifindex) else row.ndev_ifindex
    return 0


def loopback_down(host: HostView) -> tuple[str, str] | None:
    """What to say of an address of the loopback interface while that is down, and what to try; None where it is up."""
    loopback = host.loopback
    if loopback is not None and loopback.is_running:
        return None
    return "the loopback interface is down", "'ip link set lo up'"


def _not_local(source: InetAddr) -> Failure:
    message = f"source {source.host} is not an address of this host"
    return Failure(errno.EADDRNOTAVAIL, "route", message, "'rdmacm devices' (rdmacm doctor A4)")


def _scope_needed(destination: InetAddr) -> Failure:
    hint = f"{destination.host}%INTERFACE; for a GID, AF_IB with RAI_FAMILY (rdmacm doctor A6)"
    return Failure(errno.EINVAL, "route", "a link-local address needs a scope", hint)


def _failure(host: HostView, destination: InetAddr, source: InetAddr | None, ifindex: int, code: int) -> Failure:
    """What an errno of the routing tables means, and what to try."""
    name = destination.host
    show_route = f"'ip route get {name}'"
    add_route = f"{show_route} to see what the kernel would do, and add the route that is missing (rdmacm doctor A3)"
    if code == errno.EINVAL:
        return _invalid(host, destination, source, ifindex)
    if code == errno.ENETUNREACH:
        return _unreachable(host, destination, ifindex, add_route)
    message, hint = {
        errno.EACCES: (f"a prohibit route covers {name}", show_route),
        errno.EHOSTUNREACH: (f"an unreachable route covers {name}, or its next hop failed", add_route),
        errno.ENODEV: (f"interface {ifindex} does not exist", "'ip link'"),
    }.get(code, (f"the routing lookup for {name} failed ({errno_name(code)})", add_route))
    return Failure(code, "route", message, hint)


def _invalid(host: HostView, destination: InetAddr, source: InetAddr | None, ifindex: int) -> Failure:
    """EINVAL: a source that is not local, a missing scope, a source on loopback, or a blackhole route."""
    if source is not None and not source.is_any and not source.is_loopback and not host.owns(source.ip):
        return _not_local(source)
    if destination.is_link_local and not ifindex:
        return _scope_needed(destination)
    if source is not None and source.is_loopback:
        message = f"source {source.host} cannot leave this host: it is a loopback address"
        return Failure(errno.EINVAL, "route", message, "another source, or none")
    message, hint = f"a blackhole route covers {destination.host}", f"'ip route get {destination.host}'"
    return Failure(errno.EINVAL, "route", message, hint)


def _unreachable(host: HostView, destination: InetAddr, ifindex: int, add_route: str) -> Failure:
    """ENETUNREACH: no route, a loopback address that is missing, or an address that is really IPv4."""
    code, name = errno.ENETUNREACH, destination.host
    if destination.is_loopback:
        down = loopback_down(host)
        if down is not None:
            return Failure(code, "route", *down)
        assert host.loopback is not None  # it is up
        family = "IPv4" if destination.family == AF_INET else "IPv6 (sysctl net.ipv6.conf.lo.disable_ipv6=0)"
        return Failure(code, "route", f"{host.loopback.name} has no address {name}", f"enable {family}")
    if destination.family == AF_INET6 and destination.ip.startswith(V4_MAPPED):
        return Failure(code, "route", f"{name} is an IPv4-mapped address", "the IPv4 address itself")
    where = f" through {host.interface_name(ifindex)}" if ifindex else ""
    return Failure(code, "route", f"no route to {name}{where}", add_route)
