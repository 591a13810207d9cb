"""The lookup itself, from arguments and hints to a list of results."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from rdmacm.address import AF_IB, ALL_BITS_64, Gid, SockAddrIB, service_id, service_id_mask
from rdmacm.addrinfo.checks import check_hints, gai_error
from rdmacm.addrinfo.entries import all_that_fit, entry_from_hints, entry_from_name, has_own_end
from rdmacm.addrinfo.infiniband import active_gids, lacks_path, with_paths
from rdmacm.addrinfo.info import (
    NO_HINTS,
    RAI_DNS,
    RAI_NOROUTE,
    RAI_NUMERICHOST,
    RAI_PASSIVE,
    RAI_SA,
    AddrInfo,
    HintFields,
    check_route,
    make_hints,
)
from rdmacm.addrinfo.names import Resolver, is_numeric, resolve_name
from rdmacm.constants import EAI, PortSpace, RaiFlag
from rdmacm.errors import cm_error
from rdmacm.provider import Provider, get_provider
from rdmacm.resolution import acm

if TYPE_CHECKING:
    from rdmacm.proto.sa.subnet import ServiceRecord


def getaddrinfo(
    node: str | None = None,
    service: str | int | None = None,
    hints: AddrInfo | None = None,
    *,
    provider: str | Provider | None = None,
    resolver: Resolver | None = None,
    **fields: Unpack[HintFields],
) -> list[AddrInfo]:
    """Resolve a node and service to RDMA addresses, rdma_getaddrinfo(3).

    ``node``: a host name, an IPv4 address, an IPv6 address (``%scope`` allowed), or with ``RaiFlag.FAMILY`` and
    family ``AF_IB`` a GID. ``service``: a port number or a name of services(5). Without a node, the source,
    destination or route of the hints is resolved; ``service`` then replaces the port of the destination, or of the
    source with ``RaiFlag.PASSIVE``. The keywords are fields of the hints, and override those of ``hints``.
    ``resolver`` replaces socket.getaddrinfo for names.

    Returns a non-empty list, best first. On the active side each result has the source address, device and route that
    the host would use, unless ``RaiFlag.NOROUTE`` is set or the destination cannot be reached (rdma_resolve_addr then
    says why). The route to an InfiniBand address, or to an IP address on IPoIB, comes from ibacm(8) if it runs and
    knows one, else from the subnet administrator, which may take up to 2 s. A route in the hints restricts the paths:
    what is set in its records is asked for, what is 0 is open, and the answer has the first record's that can be met.
    If ibacm knows an InfiniBand path to an IP address, an ``AF_IB`` result with that path is added: after the result of
    the same destination, or before it if only InfiniBand reaches that destination.

    Raises :class:`GaiError`, whose ``errno`` is an EAI code: EAI_ADDRFAMILY if the node has no address of the family of
    the hints or of their source, or if the hints contradict themselves; EAI_NODATA if there are paths to the node, but
    none that the route of the hints allows; EAI_NONAME for an unknown node or service; EAI_SERVICE for a service of
    another protocol. EINVAL for a route in bytes of another length than C's structures, or with a field out of range.
    With ``RaiFlag.SA``, raises RdmaError: EOPNOTSUPP (a node or ``DNS`` is given too), EINVAL (no service) or ENOENT
    (no port's subnet administrator knows the service).
    Differences from librdmacm are listed in ``docs/parity.md``.

    >>> getaddrinfo("127.0.0.1", 7471, port_space=PortSpace.TCP)[0].dst_addr
    ('127.0.0.1', 7471)
    """
    hints = make_hints(hints, **fields)
    if service is not None and not isinstance(service, str):
        service = str(service)
    flags = 0
    if hints is not None:
        flags = int(hints.flags)
        check_hints(node, service, hints, flags)
        check_route(hints.route)
        if flags & RAI_SA:
            return _from_sa(node, service, flags, get_provider(provider))
    routing = None if flags & RAI_NOROUTE else get_provider(provider, () if node is None else (node,))
    if node is None and (service is None or has_own_end(hints)):
        found = [entry_from_hints(hints, service, routing, resolver)]
    else:
        named, known = resolve_name(node, service, hints, resolver), hints or NO_HINTS
        if known.route:
            found = all_that_fit(named, lambda one: [entry_from_name(one, known, node, service, routing)])
        else:
            found = [entry_from_name(one, known, node, service, routing) for one in named]
    if routing is not None and (acm.CLIENT.is_there() or any(map(lacks_path, found))):
        found = with_paths(found, hints or NO_HINTS, routing)
    return found if hints is None or hints.family != AF_IB else _of_infiniband(found, node, service)


def _of_infiniband(infos: list[AddrInfo], node: str | None, service: str | None) -> list[AddrInfo]:
    """The results with AF_IB addresses, as the hints want; EAI_ADDRFAMILY if there are only IP addresses."""
    found = [info for info in infos if info.family == AF_IB]
    if not found:
        what = "the service" if node is None else node
        cause = f"{what} is looked up as an IP address without RAI_FAMILY, and no AF_IB address is known for it"
        raise gai_error(EAI.ADDRFAMILY, node, service, cause, "RAI_FAMILY for a GID, or another family")
    return found


def needs_lookup(node: str | None, hints: AddrInfo | None, provider: Provider) -> bool:
    """Whether resolving ``node`` may take long, because a name server, ibacm or the subnet administrator is asked."""
    flags = 0 if hints is None else int(hints.flags)
    if flags & RAI_SA:
        return False
    if node is not None and not flags & RAI_NUMERICHOST and not is_numeric(node):
        return True
    return not flags & (RAI_NOROUTE | RAI_PASSIVE) and bool(active_gids(provider))


def _from_sa(node: str | None, service: str | None, flags: int, provider: Provider) -> list[AddrInfo]:
    """RAI_SA: ask the subnet administrator of each active InfiniBand port for the service."""
    if node is not None or flags & RAI_DNS:
        other = "a node" if node is not None else "RAI_DNS"
        raise cm_error(
            errno.EOPNOTSUPP, f"RAI_SA does not go with {other}", "getaddrinfo", service, f"RAI_SA without {other}"
        )
    if service is None:
        raise cm_error(errno.EINVAL, "RAI_SA needs a service name or id", "getaddrinfo", None, "a service")
    found = provider.find_services(service)
    if found is None:
        raise cm_error(
            errno.ENOENT,
            "no active InfiniBand port has a subnet administrator that knows the service",
            "getaddrinfo",
            service,
            "'rdmacm devices' for the ports, 'rdmacm sa services' for what they know; or a node name (RAI_DNS)",
        )
    return [
        replace(info, device=found.device, port_num=found.port_num) for info in from_services(found.records, found.gid)
    ]


def from_services(records: Sequence[ServiceRecord], source: Gid) -> list[AddrInfo]:
    """One result per service record, as rdma_getaddrinfo(3) describes; ``source`` is the GID of the querying port."""
    space = PortSpace.IB
    return [
        AddrInfo(
            RaiFlag.SA,
            AF_IB,
            0,
            space,
            SockAddrIB(source, service_id(space, 0), service_id_mask(space, 0), record.service_pkey),
            SockAddrIB(record.service_gid, record.service_id, ALL_BITS_64, record.service_pkey),
        )
        for record in records
    ]
