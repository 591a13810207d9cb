"""The calls of ``rdma/rdma_cma.h``, except for queue pairs and endpoints, which are in :mod:`rdmacm.cma.verbs`."""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING

from rdmacm.address import SockAddr
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.cma.constants import (
    RDMA_CM_JOIN_MC_ATTR_ADDRESS,
    RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
    RDMA_CM_JOIN_MC_ATTR_RESERVED,
    RDMA_PS_TCP,
)
from rdmacm.cma.names import is_c_name
from rdmacm.cma.structures import rdma_addrinfo, rdma_cm_id, rdma_cm_join_mc_attr_ex
from rdmacm.cmid import CmEvent, CmId, EventChannel, event_str
from rdmacm.errors import cm_error
from rdmacm.errors import gai_strerror as gai_strerror  # noqa: PLC0414 (for type checkers it is exported)
from rdmacm.provider import get_provider
from rdmacm.provider.connparam import ConnParam, Ece
from rdmacm.verbs.device import Context, named_context


def rdma_create_event_channel() -> EventChannel:
    """rdma_create_event_channel(3)."""
    return EventChannel()


def rdma_destroy_event_channel(channel: EventChannel) -> None:
    """rdma_destroy_event_channel(3)."""
    channel.close()


def rdma_create_id(channel: EventChannel | None, context: object = None, ps: int = RDMA_PS_TCP) -> rdma_cm_id:
    """rdma_create_id(3); a synchronous id if ``channel`` is None."""
    return rdma_cm_id(channel, ps, context=context)


def rdma_destroy_id(id: CmId) -> None:
    """rdma_destroy_id(3)."""
    id.destroy()


def rdma_bind_addr(id: CmId, addr: SockAddr | None) -> None:
    """rdma_bind_addr(3)."""
    id.bind_addr(addr)


def rdma_resolve_addr(id: CmId, src_addr: SockAddr | None, dst_addr: SockAddr | None, timeout_ms: int) -> None:
    """rdma_resolve_addr(3); the source comes first, as on the page."""
    id.resolve_addr(dst_addr, src_addr, timeout_ms)


def rdma_resolve_route(id: CmId, timeout_ms: int) -> None:
    """rdma_resolve_route(3)."""
    id.resolve_route(timeout_ms)


def rdma_getaddrinfo(
    node: str | None, service: str | int | None = None, hints: AddrInfo | None = None
) -> list[rdma_addrinfo]:
    """rdma_getaddrinfo(3); a list of the entries, which ``ai_next`` links as in C."""
    return rdma_addrinfo.linked(getaddrinfo(node, service, hints))


def rdma_freeaddrinfo(res: list[rdma_addrinfo] | None) -> None:
    """rdma_freeaddrinfo(3); empties the list, so that a use after it shows."""
    if res is not None:
        res.clear()


def rdma_resolve_addrinfo(
    id: CmId, node: str | None = None, service: str | int | None = None, hints: AddrInfo | None = None
) -> None:
    """rdma_resolve_addrinfo(3)."""
    id.resolve_addrinfo(node, service, hints)


def rdma_query_addrinfo(id: CmId) -> list[rdma_addrinfo]:
    """rdma_query_addrinfo(3)."""
    return rdma_addrinfo.linked(id.query_addrinfo())


def rdma_get_cm_event(channel: EventChannel) -> CmEvent:
    """rdma_get_cm_event(3); waits unless ``channel.blocking`` is False."""
    return channel.get_event()


def rdma_ack_cm_event(event: CmEvent) -> None:
    """rdma_ack_cm_event(3)."""
    event.ack()


def rdma_event_str(event: int) -> str:
    """rdma_event_str(3)."""
    return event_str(event)


def rdma_get_src_port(id: CmId) -> int:
    """rdma_get_src_port(3), in host order."""
    return id.src_port


def rdma_get_dst_port(id: CmId) -> int:
    """rdma_get_dst_port(3), in host order."""
    return id.dst_port


def rdma_get_local_addr(id: CmId) -> SockAddr | None:
    """rdma_get_local_addr(3); None before the id is bound."""
    return id.route.src_addr


def rdma_get_peer_addr(id: CmId) -> SockAddr | None:
    """rdma_get_peer_addr(3); None before an address is resolved."""
    return id.route.dst_addr


def rdma_get_devices() -> list[Context]:
    """rdma_get_devices(3); a device is opened when something is created on it."""
    provider = get_provider()
    return [
        named_context(device.name, provider.devices, partial(provider.open_device, device.name))
        for device in provider.devices()
    ]


def rdma_free_devices(devices: list[Context]) -> None:
    """rdma_free_devices(3); empties the list, so that a use after it shows."""
    devices.clear()


def rdma_set_option(id: CmId, level: int, optname: int, optval: int | bytes) -> None:
    """rdma_set_option(3); ``optval`` is a number, or the bytes that C points to."""
    id.set_option(level, optname, optval)


def rdma_migrate_id(id: CmId, channel: EventChannel | None) -> None:
    """rdma_migrate_id(3)."""
    id.migrate(channel)


def rdma_write_cm_event(id: CmId, event: int, status: int = 0, arg: int = 0) -> None:
    """rdma_write_cm_event(3)."""
    id.write_cm_event(event, status, arg)


def rdma_listen(id: CmId, backlog: int) -> None:
    """rdma_listen(3); a backlog of 0 means 1024."""
    id.listen(backlog)


def rdma_get_request(listen: CmId) -> CmId:
    """rdma_get_request(3)."""
    return listen.get_request()


def rdma_connect(id: CmId, conn_param: ConnParam | None = None) -> None:
    """rdma_connect(3); with None for C's NULL, the resources are the device's maxima."""
    id.connect(conn_param)


def rdma_accept(id: CmId, conn_param: ConnParam | None = None) -> None:
    """rdma_accept(3); with None for C's NULL, the resources are those the peer asked for."""
    id.accept(conn_param)


def rdma_reject(id: CmId, private_data: bytes = b"") -> None:
    """rdma_reject(3)."""
    id.reject(private_data)


def rdma_reject_ece(id: CmId, private_data: bytes = b"") -> None:
    """rdma_reject_ece(3)."""
    id.reject_ece(private_data)


def rdma_establish(id: CmId) -> None:
    """rdma_establish(3)."""
    id.establish()


def rdma_notify(id: CmId, event: int) -> None:
    """rdma_notify(3)."""
    id.notify(event)


def rdma_disconnect(id: CmId) -> None:
    """rdma_disconnect(3)."""
    id.disconnect()


def rdma_set_local_ece(id: CmId, ece: Ece) -> None:
    """rdma_set_local_ece(3)."""
    id.set_local_ece(ece)


def rdma_get_remote_ece(id: CmId) -> Ece:
    """rdma_get_remote_ece(3)."""
    return id.get_remote_ece()


def rdma_join_multicast(id: CmId, addr: SockAddr, context: object = None) -> None:
    """rdma_join_multicast(3); events have ``context`` as ``join_context``, not in the private data."""
    id.join_multicast(addr, context)


def rdma_join_multicast_ex(id: CmId, mc_join_attr: rdma_cm_join_mc_attr_ex, context: object = None) -> None:
    """rdma_join_multicast_ex(3); ENOTSUP for unknown bits of ``comp_mask``, EINVAL without an address or join flags."""
    mask, needed = mc_join_attr.comp_mask, RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
    if mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED:
        raise cm_error(errno.ENOTSUP, f"comp_mask 0x{mask:x} has unknown bits", "join_multicast")
    if mask != needed or mc_join_attr.addr is None:
        raise cm_error(errno.EINVAL, "comp_mask has to have the address and the join flags", "join_multicast")
    id.join_multicast_ex(mc_join_attr.addr, mc_join_attr.join_flags, context)


def rdma_leave_multicast(id: CmId, addr: SockAddr) -> None:
    """rdma_leave_multicast(3)."""
    id.leave_multicast(addr)


if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if is_c_name(name, value, __name__)]
    __all__ += ["gai_strerror"]
