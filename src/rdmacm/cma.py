"""The manual pages' names: an example in C ports line by line.

Each function is thin: arguments in the page's order, an exception where C returns -1 and sets errno, a return value
where C fills an out-parameter. Ports come in host order, where C's ``rdma_get_src_port`` gives network order.
"""

from __future__ import annotations

from rdmacm.address import SockAddr
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.channel import CmEvent, EventChannel, event_str
from rdmacm.cmid import CmId
from rdmacm.constants import (
    AddressFamily,
    CmEventType,
    IbOption,
    IdOption,
    OptionLevel,
    PortSpace,
    RaiFlag,
)
from rdmacm.explain import devices
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import QPType

AF_IB = AddressFamily.IB

RDMA_CM_EVENT_ADDR_RESOLVED = CmEventType.ADDR_RESOLVED
RDMA_CM_EVENT_ADDR_ERROR = CmEventType.ADDR_ERROR
RDMA_CM_EVENT_ROUTE_RESOLVED = CmEventType.ROUTE_RESOLVED
RDMA_CM_EVENT_ROUTE_ERROR = CmEventType.ROUTE_ERROR
RDMA_CM_EVENT_CONNECT_REQUEST = CmEventType.CONNECT_REQUEST
RDMA_CM_EVENT_CONNECT_RESPONSE = CmEventType.CONNECT_RESPONSE
RDMA_CM_EVENT_CONNECT_ERROR = CmEventType.CONNECT_ERROR
RDMA_CM_EVENT_UNREACHABLE = CmEventType.UNREACHABLE
RDMA_CM_EVENT_REJECTED = CmEventType.REJECTED
RDMA_CM_EVENT_ESTABLISHED = CmEventType.ESTABLISHED
RDMA_CM_EVENT_DISCONNECTED = CmEventType.DISCONNECTED
RDMA_CM_EVENT_DEVICE_REMOVAL = CmEventType.DEVICE_REMOVAL
RDMA_CM_EVENT_MULTICAST_JOIN = CmEventType.MULTICAST_JOIN
RDMA_CM_EVENT_MULTICAST_ERROR = CmEventType.MULTICAST_ERROR
RDMA_CM_EVENT_ADDR_CHANGE = CmEventType.ADDR_CHANGE
RDMA_CM_EVENT_TIMEWAIT_EXIT = CmEventType.TIMEWAIT_EXIT
RDMA_CM_EVENT_ADDRINFO_RESOLVED = CmEventType.ADDRINFO_RESOLVED
RDMA_CM_EVENT_ADDRINFO_ERROR = CmEventType.ADDRINFO_ERROR
RDMA_CM_EVENT_USER = CmEventType.USER

RDMA_PS_IPOIB = PortSpace.IPOIB
RDMA_PS_TCP = PortSpace.TCP
RDMA_PS_UDP = PortSpace.UDP
RDMA_PS_IB = PortSpace.IB

RAI_PASSIVE = RaiFlag.PASSIVE
RAI_NUMERICHOST = RaiFlag.NUMERICHOST
RAI_NOROUTE = RaiFlag.NOROUTE
RAI_FAMILY = RaiFlag.FAMILY
RAI_SA = RaiFlag.SA
RAI_DNS = RaiFlag.DNS

RDMA_OPTION_ID = OptionLevel.ID
RDMA_OPTION_IB = OptionLevel.IB
RDMA_OPTION_ID_TOS = IdOption.TOS
RDMA_OPTION_ID_REUSEADDR = IdOption.REUSEADDR
RDMA_OPTION_ID_AFONLY = IdOption.AFONLY
RDMA_OPTION_ID_ACK_TIMEOUT = IdOption.ACK_TIMEOUT
RDMA_OPTION_IB_PATH = IbOption.PATH

IBV_QPT_RC = QPType.RC
IBV_QPT_UC = QPType.UC
IBV_QPT_UD = QPType.UD
IBV_QPT_RAW_PACKET = QPType.RAW_PACKET
IBV_QPT_XRC_SEND = QPType.XRC_SEND
IBV_QPT_XRC_RECV = QPType.XRC_RECV
IBV_QPT_DRIVER = QPType.DRIVER


def rdma_create_event_channel() -> EventChannel:
    """rdma_create_event_channel(3)."""
    return EventChannel()


def rdma_destroy_event_channel(channel: EventChannel) -> None:
    """rdma_destroy_event_channel(3)."""
    channel.close()


def rdma_create_id(channel: EventChannel | None, context: object = None, ps: int = RDMA_PS_TCP) -> CmId:
    """rdma_create_id(3); a synchronous id where ``channel`` is None."""
    return CmId(channel, ps, context=context)


def rdma_destroy_id(id: CmId) -> None:
    """rdma_destroy_id(3)."""
    id.destroy()


def rdma_bind_addr(id: CmId, addr: SockAddr) -> None:
    """rdma_bind_addr(3)."""
    id.bind_addr(addr)


def rdma_resolve_addr(id: CmId, src_addr: SockAddr | None, dst_addr: SockAddr, timeout_ms: int) -> None:
    """rdma_resolve_addr(3); note the page's order, source first."""
    id.resolve_addr(dst_addr, src_addr, timeout_ms)


def rdma_resolve_route(id: CmId, timeout_ms: int) -> None:
    """rdma_resolve_route(3)."""
    id.resolve_route(timeout_ms)


def rdma_getaddrinfo(
    node: str | None, service: str | int | None = None, hints: AddrInfo | None = None
) -> list[AddrInfo]:
    """rdma_getaddrinfo(3); the list that C links through ``ai_next``."""
    return getaddrinfo(node, service, hints)


def rdma_freeaddrinfo(res: list[AddrInfo] | None) -> None:
    """rdma_freeaddrinfo(3): nothing to free here, but the list is emptied, as nobody may use it any more."""
    if res is not None:
        res.clear()


def rdma_resolve_addrinfo(
    id: CmId, node: str | None = None, service: str | int | None = None, hints: AddrInfo | None = None
) -> None:
    """rdma_resolve_addrinfo(3)."""
    id.resolve_addrinfo(node, service, hints)


def rdma_query_addrinfo(id: CmId) -> list[AddrInfo]:
    """rdma_query_addrinfo(3)."""
    return id.query_addrinfo()


def rdma_get_cm_event(channel: EventChannel) -> CmEvent:
    """rdma_get_cm_event(3); waits, unless ``channel.blocking`` is False."""
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
    return id.local_addr


def rdma_get_peer_addr(id: CmId) -> SockAddr | None:
    """rdma_get_peer_addr(3); None before an address is resolved."""
    return id.peer_addr


def rdma_get_devices() -> list[Context]:
    """rdma_get_devices(3): an open context of each device."""
    return [Context.open(device.name, devices) for device in devices()]


def rdma_free_devices(devices: list[Context]) -> None:
    """rdma_free_devices(3): nothing to free here, but the list is emptied, as nobody may use it any more."""
    devices.clear()


def rdma_set_option(id: CmId, level: int, optname: int, optval: int | bytes) -> None:
    """rdma_set_option(3); ``optval`` is a number, or the bytes C would point to."""
    id.set_option(level, optname, optval)


def rdma_migrate_id(id: CmId, channel: EventChannel | None) -> None:
    """rdma_migrate_id(3)."""
    id.migrate(channel)


def rdma_write_cm_event(id: CmId, event: int, status: int = 0, arg: int = 0) -> None:
    """rdma_write_cm_event(3)."""
    id.write_cm_event(event, status, arg)
