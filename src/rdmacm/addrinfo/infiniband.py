"""InfiniBand routes of results: from ibacm if it runs, else from the subnet administrator."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from rdmacm.address import (
    AF_IB,
    DEFAULT_PKEY,
    Address,
    Gid,
    InetAddr,
    SockAddr,
    SockAddrIB,
    parse_address,
    service_id,
    service_id_mask,
)
from rdmacm.addrinfo.entries import all_that_fit, restricted, with_choice
from rdmacm.addrinfo.info import RAI_NUMERICHOST, RAI_PASSIVE, AddrInfo, sockaddr
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.provider import Provider, RouteChoice
from rdmacm.resolution import acm
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import LinkLayer, PortState

if TYPE_CHECKING:
    from rdmacm.proto.acm import AcmReply

#: The GIDs at which paths can begin: device name and GID table entry of each.
_LocalGids: TypeAlias = dict[Gid, tuple[str, GidEntry]]


def active_gids(provider: Provider) -> _LocalGids:
    """The GIDs of active InfiniBand ports, with their device names and GID table entries."""
    return {
        row.gid: (device.name, row)
        for device in provider.devices()
        for port in device.ports
        if port.link_layer is LinkLayer.INFINIBAND and port.state is PortState.ACTIVE
        for row in port.gids
    }


def with_paths(infos: list[AddrInfo], hints: AddrInfo, provider: Provider) -> list[AddrInfo]:
    """The results with the InfiniBand paths to their destinations. May wait for ibacm and the subnet administrator."""
    if hints.flags & RAI_PASSIVE:
        return infos
    gids = active_gids(provider)
    if not gids:
        return infos
    deadline = time.monotonic() + acm.DEADLINE

    def completed(info: AddrInfo) -> list[AddrInfo]:
        reply = None if hints.route else _ask_acm(info, hints, gids, deadline - time.monotonic())
        paths = [data for data in reply.paths if data.flags == PATH_FLAGS] if reply is not None else []
        if reply is None or not paths or paths[0].path.sgid not in gids:
            return [_with_sa_route(info, hints, provider)]
        if info.family == AF_IB:
            return [_with_acm_route(info, paths, gids)]
        return _alternatives(info, paths, reply.source, gids)

    return all_that_fit(infos, completed)


def lacks_path(info: AddrInfo) -> bool:
    """Whether a result's path has to be asked of the subnet administrator: to a GID, or to an IP address on IPoIB."""
    return info.dst_addr is not None and not info.route and (info.family == AF_IB or info.device is not None)


def _ask_acm(info: AddrInfo, hints: AddrInfo, gids: _LocalGids, timeout: float) -> AcmReply | None:
    """Ask ibacm for paths to the destination of a result, from the hints' source if there is one; None if it has none.

    ``timeout`` is in seconds.
    """
    if info.dst_addr is None or timeout <= 0:
        return None
    destination, source = parse_address(info.dst_addr), _parsed(hints.src_addr)
    if isinstance(destination, SockAddrIB):
        if not isinstance(source, SockAddrIB) or not any(source.addr):
            near = [gid for gid in gids if gid.subnet_prefix == destination.addr.subnet_prefix]
            source = SockAddrIB(near[0] if near else next(iter(gids)))
        return acm.CLIENT.resolve(path=acm.path_template(source, destination), timeout=timeout)
    # The protocol has no scope, which would tell the link of a link-local address.
    is_local = destination.is_any or destination.is_loopback or destination.is_link_local
    if is_local or destination.is_multicast or isinstance(source, SockAddrIB):
        return None
    if source is not None and source.is_any:
        source = None
    nodelay = bool(hints.flags & RAI_NUMERICHOST)
    return acm.CLIENT.resolve(source=source, destination=destination, nodelay=nodelay, timeout=timeout)


def _with_sa_route(info: AddrInfo, hints: AddrInfo, provider: Provider) -> AddrInfo:
    """A result with the subnet administrator's route to its destination, if that is a GID or on IPoIB."""
    if not lacks_path(info):
        return info
    source, destination = _parsed(hints.src_addr or info.src_addr), _parsed(info.dst_addr)
    assert destination is not None
    is_known = source is not None or not (hints.src_addr or info.src_addr)  # a path cannot begin at a host name
    is_of_family = source is None or isinstance(source, SockAddrIB) is isinstance(destination, SockAddrIB)
    if not is_known or not is_of_family:
        return info

    def find(like: PathRecord | None) -> RouteChoice | None:
        to = destination
        if hints.route and like is None and isinstance(to, SockAddrIB):  # its P_Key may be that of the hints' route
            to = replace(to, pkey=DEFAULT_PKEY)
        return provider.find_path(to, source, info.port_space, like)

    if not hints.route:
        choice = find(None)
    elif isinstance(destination, SockAddrIB):
        choice = restricted(find, hints, destination, destination.sid, destination.sid_mask)
    else:
        space, port = info.port_space, destination.port
        choice = restricted(find, hints, destination, service_id(space, port), service_id_mask(space, port))
    if choice is None:
        return info
    return with_choice(info, choice, source is None or _is_wildcard(source))


def _is_wildcard(source: Address) -> bool:
    return source.is_any if isinstance(source, InetAddr) else not any(source.addr)


def _with_acm_route(info: AddrInfo, paths: list[PathData], gids: _LocalGids) -> AddrInfo:
    """A result with an InfiniBand destination, with ibacm's route to it if that has the same ends."""
    path = paths[0].path
    source = info.src_addr or _ib_address(path.sgid, path, info.port_space, 0)
    if [getattr(end, "addr", None) for end in (source, info.dst_addr)] != [path.sgid, path.dgid]:
        return info
    device, row = gids[path.sgid]
    return replace(
        info,
        src_addr=source,
        route=tuple(paths),
        device=device,
        port_num=row.port_num,
        gid_index=row.gid_index,
    )


def _alternatives(info: AddrInfo, paths: list[PathData], source: InetAddr | None, gids: _LocalGids) -> list[AddrInfo]:
    """A result with an IP destination, and one with the InfiniBand address of the same host; the better one first.

    If a RoCE device reaches the IP address, that result stays first, so that a caller who takes the first result does
    not depend on whether ibacm runs.
    """
    from rdmacm.proto.cm.private_data import PrivateDataHeader

    path = paths[0].path
    device, row = gids[path.sgid]
    has_roce = info.device is not None and all(info.device != name for name, _ in gids.values())
    if not has_roce:
        info = replace(info, route=tuple(paths), src_addr=info.src_addr or sockaddr(source))
    local, remote = _parsed(info.src_addr), _parsed(info.dst_addr)
    assert isinstance(remote, InetAddr)
    if not isinstance(local, InetAddr) or local.family != remote.family:
        local = InetAddr.any(remote.family)
    infiniband = replace(
        info,
        family=AF_IB,
        src_addr=_ib_address(path.sgid, path, info.port_space, local.port),
        dst_addr=_ib_address(path.dgid, path, info.port_space, remote.port),
        route=tuple(paths),
        # The source port is not known before the connection is made. librdmacm leaves it 0 too.
        connect=PrivateDataHeader.between(local._replace(port=0), remote).pack(),
        device=device,
        port_num=row.port_num,
        gid_index=row.gid_index,
    )
    return [info, infiniband] if has_roce else [infiniband, info]


def _parsed(address: SockAddr | None) -> Address | None:
    """An address in binary; None for no address, and for a host name, which hints may have as their source."""
    try:
        return None if address is None else parse_address(address)
    except ValueError:
        return None


def _ib_address(gid: Gid, path: PathRecord, port_space: int, port: int) -> SockAddrIB:
    return SockAddrIB(gid, service_id(port_space, port), service_id_mask(port_space, port), path.pkey, path.flow_label)
