"""One result of a lookup, with the source address, device and route that the host would use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from rdmacm.address import (
    AF_IB,
    ALL_BITS_64,
    DEFAULT_PKEY,
    Address,
    Gid,
    InetAddr,
    SockAddrIB,
    parse_address,
    service_id,
    service_id_mask,
)
from rdmacm.addrinfo.checks import PORT_SPACES, check_types, family_error, gai_error
from rdmacm.addrinfo.info import NO_FLAGS, NO_HINTS, RAI_FAMILY, RAI_PASSIVE, AddrInfo, sockaddr
from rdmacm.addrinfo.names import NamedAddress, Resolver, qp_type_and_port_space, resolve_service
from rdmacm.constants import EAI, PortSpace, RaiFlag
from rdmacm.errors import GaiError
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.proto.sa.restriction import describe
from rdmacm.provider import Provider, RouteChoice

T = TypeVar("T")

_and = int.__and__  # of two ints: the operator of RaiFlag takes 1 µs


def entry_from_name(
    named: NamedAddress, hints: AddrInfo, node: str | None, service: str | None, provider: Provider | None
) -> AddrInfo:
    """The result for an address of a node and service; ``provider`` is None if no route is wanted."""
    address, qp_type, port_space, canonical = named
    family = int(address.family)
    if hints.family == AF_IB and hints.flags & RAI_FAMILY:
        if len(address.ip) != 16:
            raise gai_error(EAI.ADDRFAMILY, node, service, f"{address.host} is not a GID", "a GID in IPv6 form")
        return _gid_entry(named, hints)
    if _and(hints.flags, RAI_PASSIVE):
        info = AddrInfo(RaiFlag.PASSIVE, family, qp_type, port_space, address.sockaddr, None, canonical)
        return _with_route(info, address, None, provider)
    choice = source = None
    if provider is not None:
        source, is_numeric = (None, True) if hints.src_addr is None else _hinted_source(hints)
        choice = _find_route(provider, address, source, port_space, hints) if is_numeric else None
    if choice is None:
        return AddrInfo(NO_FLAGS, family, qp_type, port_space, hints.src_addr, address.sockaddr, None, canonical)
    # Not with_choice(), whose copy takes a sixth of a lookup.
    return AddrInfo(
        NO_FLAGS,
        family,
        qp_type,
        port_space,
        sockaddr(choice.source) if source is None or source.is_any else hints.src_addr,
        address.sockaddr,
        dst_canonname=canonical,
        route=route_of(choice),
        device=choice.device,
        port_num=choice.port_num,
        gid_index=choice.gid_index,
    )


def _gid_entry(named: NamedAddress, hints: AddrInfo) -> AddrInfo:
    """The result for a GID, which was resolved as an IPv6 address."""
    address, qp_type, port_space, canonical = named
    sid, mask = service_id(port_space, address.port), service_id_mask(port_space, address.port)
    # A node has no P_Key, so that of the route applies.
    pkey = (hints.route[0].path.pkey if hints.route else 0) or DEFAULT_PKEY
    gid = SockAddrIB(Gid(address.ip), sid, mask, pkey, address.flowinfo, address.scope_id)
    if hints.flags & RAI_PASSIVE:
        return AddrInfo(RaiFlag.PASSIVE, AF_IB, qp_type, port_space, gid, None, canonical)
    return AddrInfo(NO_FLAGS, AF_IB, qp_type, port_space, hints.src_addr, gid, None, canonical)


def _hinted_source(hints: AddrInfo) -> tuple[InetAddr | None, bool]:
    """The source of the hints, and whether it is numeric; a route cannot begin at a host name."""
    if hints.src_addr is None:
        return None, True
    try:
        source = parse_address(hints.src_addr)
    except ValueError:
        return None, False
    assert isinstance(source, InetAddr)  # resolve_name() and check_hints() refuse other families
    return source, True


def has_own_end(hints: AddrInfo | None) -> bool:
    """Whether the hints have the address that a service without a node belongs to, or a route that has it."""
    if hints is None:
        return False
    if hints.flags & RAI_PASSIVE:
        return bool(hints.src_addr or hints.route)
    return bool(hints.dst_addr or (hints.route and not hints.src_addr))


def entry_from_hints(
    hints: AddrInfo | None, service: str | None, provider: Provider | None, resolver: Resolver | None
) -> AddrInfo:
    """The result for the source, destination or route of the hints, without a node.

    ``service`` is that of the destination, or of the source if the hints are passive; it replaces the port of the
    hints.
    """
    is_passive = hints is not None and bool(hints.flags & RAI_PASSIVE)
    if hints is None or not (hints.src_addr or (hints.dst_addr and not is_passive) or hints.route):
        raise gai_error(
            EAI.NONAME, None, None, "nothing to resolve", "a node, a service, or hints with an address or route"
        )
    try:
        source = None if hints.src_addr is None else parse_address(hints.src_addr)
        destination = None if hints.dst_addr is None or is_passive else parse_address(hints.dst_addr)
    except ValueError as problem:
        raise gai_error(EAI.NONAME, None, service, str(problem)) from None
    port_space_hint = hints.port_space
    if source is None and destination is None:
        port_space_hint = port_space_hint or PortSpace.IB
        source, destination = _route_ends(hints.route[0].path, port_space_hint)
    if is_passive:
        destination = None
    known = destination or source
    if not port_space_hint and isinstance(known, SockAddrIB):
        port_space_hint = _space_of(known.sid)
        check_types(None, service, hints.qp_type, port_space_hint)
    family = AF_IB if isinstance(known, SockAddrIB) else known.family if known else hints.family
    if hints.family and family != hints.family:
        raise family_error(None, service, f"route ends at {known}, which", family, hints.family)
    if service is None:
        qp_type, port_space = qp_type_and_port_space(hints.qp_type, port_space_hint, 0, 0)
    else:
        port, qp_type, port_space = resolve_service(service, hints, port_space_hint, resolver)
        if is_passive:
            source = _with_port(source, port_space, port)
        else:
            destination = _with_port(destination, port_space, port)
    flags = RaiFlag(hints.flags & RAI_PASSIVE)
    info = AddrInfo(flags, int(family), qp_type, port_space, sockaddr(source), sockaddr(destination))
    return _with_route(info, source, destination, provider, hints)


def _space_of(sid: int) -> int:
    """The port space of a service id: IB for one that is of no other; 0 for none."""
    return PORT_SPACES.get(sid >> 16, PortSpace.IB) if sid else 0


def _with_port(address: Address | None, port_space: int, port: int) -> Address | None:
    if isinstance(address, SockAddrIB):
        return replace(address, sid=service_id(port_space, port), sid_mask=service_id_mask(port_space, port))
    return None if address is None else address._replace(port=port)


def _route_ends(path: PathRecord, port_space: int) -> tuple[SockAddrIB, SockAddrIB]:
    """The addresses at both ends of a path: its GIDs, with the service ids of a port space."""
    space_sid, space_mask = service_id(port_space, 0), service_id_mask(port_space, 0)
    sid, mask = (path.service_id, ALL_BITS_64) if path.service_id else (space_sid, space_mask)
    return (
        SockAddrIB(path.sgid, space_sid, space_mask, path.pkey),
        SockAddrIB(path.dgid, sid, mask, path.pkey, path.flow_label),
    )


def _with_route(
    info: AddrInfo,
    source: Address | None,
    destination: Address | None,
    provider: Provider | None,
    hints: AddrInfo = NO_HINTS,
) -> AddrInfo:
    """A result with the device of a passive address, or with the route to a destination."""
    if provider is None:
        return info
    if destination is None and isinstance(source, InetAddr) and not source.is_any:
        owner = provider.owner_of(source)
        return info if owner is None else replace(info, device=owner[0], port_num=owner[1])
    if not isinstance(destination, InetAddr) or not isinstance(source, InetAddr | None):
        return info
    choice = _find_route(provider, destination, source, info.port_space, hints)
    if choice is None:
        return info
    return with_choice(info, choice, source is None or source.is_any)


def _find_route(
    provider: Provider, destination: InetAddr, source: InetAddr | None, port_space: int, hints: AddrInfo
) -> RouteChoice | None:
    """What the host would use to reach an IP address, as the route of the hints allows."""
    if not hints.route:
        return provider.find_route(destination, source)
    return restricted(
        lambda like: provider.find_route(destination, source, like),
        hints,
        destination,
        service_id(port_space, destination.port),
        service_id_mask(port_space, destination.port),
    )


def restricted(
    find: Callable[[PathRecord | None], RouteChoice | None],
    hints: AddrInfo,
    destination: Address,
    sid: int,
    sid_mask: int,
) -> RouteChoice | None:
    """What ``find`` finds for the route of the hints, whose records are tried one after the other.

    None where ``find(None)`` finds nothing either. EAI_NODATA where there is a path to the destination, but none that a
    record allows. ``sid`` and ``sid_mask``: the service at the destination, which a record may name as well.
    """
    for data in hints.route:
        like = data.path
        is_service = not like.service_id or not (like.service_id ^ sid) & sid_mask
        choice = find(like) if is_service else None
        if choice is not None:
            return choice
    if find(None) is None:
        return None
    wanted = "; or ".join(describe(data.path) for data in hints.route)
    hint = "0 in the fields of the route that may have any value"
    raise gai_error(
        EAI.NODATA, None, None, f"no path to {destination} has what the hints' route asks for: {wanted}", hint
    )


def all_that_fit(items: Iterable[T], build: Callable[[T], list[AddrInfo]]) -> list[AddrInfo]:
    """The results of each item, without those that the route of the hints excludes; EAI_NODATA if it excludes all."""
    found: list[AddrInfo] = []
    refusal: GaiError | None = None
    for item in items:
        try:
            found += build(item)
        except GaiError as error:
            if error.errno != EAI.NODATA:
                raise
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return found


def route_of(choice: RouteChoice) -> tuple[PathData, ...]:
    """The path of a choice as the route of a result; empty if it is not known."""
    return () if choice.path is None else (PathData(choice.path),)


def with_choice(info: AddrInfo, choice: RouteChoice, needs_source: bool) -> AddrInfo:
    """A result with the device and route of a choice, and if ``needs_source`` with its source address."""
    return replace(
        info,
        src_addr=sockaddr(choice.source) if needs_source else info.src_addr,
        route=route_of(choice),
        device=choice.device,
        port_num=choice.port_num,
        gid_index=choice.gid_index,
    )
