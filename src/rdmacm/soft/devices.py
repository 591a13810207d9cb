"""The software devices: one RoCEv2 device with one port for each network interface that can carry IP.

IPoIB interfaces have none: their IP addresses lead to InfiniBand ports.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from socket import AF_INET

from rdmacm.address import DEFAULT_PKEY, Gid, is_link_local
from rdmacm.net.types import Interface, InterfaceAddress, Network
from rdmacm.proto.constants import LONGEST_MESSAGE
from rdmacm.resolution.hosts import HostView, IpoibInterface, RocePortView, mtu_code
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import (
    GidType,
    LinkLayer,
    Mtu,
    NodeType,
    PortCapFlag,
    PortFlag,
    PortState,
    TransportType,
)

#: The name of the provider.
PROVIDER = "soft"
#: The one port of every software device.
PORT_NUM = 1

#: ARPHRD_* of interfaces that do not carry IP: CAN, MCTP, 802.11 monitors, 802.15.4, netlink and vsock monitors.
_NO_IP = frozenset({280, 290, 801, 802, 803, 804, 805, 824, 826})

#: The rows of a GID table, as in rxe's; the table grows if there are more addresses.
_GID_TBL_LEN = 1024

#: PortPhysicalState.
_POLLING, _DISABLED, _LINK_UP = 2, 3, 5

#: Speeds of links in Mb/s, each with the codes of width and speed that Linux reports for links up to it. The first is
#: also for links of unknown speed.
_LINK_CODES = (
    (1_000, 1, 1),
    (10_000, 1, 8),
    (20_000, 2, 2),
    (25_000, 1, 32),
    (40_000, 2, 8),
    (50_000, 16, 32),
    (100_000, 2, 32),
    (200_000, 2, 64),
    (400_000, 2, 128),
    (800_000, 4, 128),
)

#: Kinds of masters that have the addresses of their slaves.
_MASTERS = frozenset({"bond", "bridge", "team", "openvswitch"})


def _node_guid(boot_key: bytes, interface: Interface) -> int:
    """A GUID that strangers cannot compute, because it names a connection in REQ, REP and REJ.

    It is that of the interface until the host restarts, in every process of the network namespace, and changes with the
    hardware address.
    """
    identity = interface.index.to_bytes(4, "big") + interface.address
    digest = hashlib.blake2b(identity, key=boot_key, digest_size=8, person=b"rdmacm node GUID").digest()
    return int.from_bytes(bytes((digest[0] & 0xFC | 0x02,)) + digest[1:], "big")  # EUI-64, locally administered


def _order(address: InterfaceAddress) -> int:
    """Sort key of addresses that appear together in the GID table: link-local, IPv4, other IPv6."""
    if address.family == AF_INET:
        return 1
    return 0 if is_link_local(address.ip) else 2


def _gid_rows(
    interface: Interface, addresses: list[InterfaceAddress], before: tuple[GidEntry, ...]
) -> tuple[GidEntry, ...]:
    """The GID table: an address keeps its index as long as it exists; a new one takes the lowest free index."""
    wanted = {Gid.from_ip(a.ip): None for a in sorted(addresses, key=_order)}
    rows = {row.gid_index: replace(row, ndev_name=interface.name) for row in before if row.gid in wanted}
    kept = {row.gid for row in rows.values()}
    index = 0
    for gid in wanted:
        if gid in kept:
            continue
        while index in rows:
            index += 1
        rows[index] = GidEntry(gid, index, PORT_NUM, GidType.ROCE_V2, interface.name, interface.index)
    return tuple(rows[i] for i in sorted(rows))


def with_link_speed(view: RocePortView, network: Network) -> Device:
    """The device of a port, with width and speed of the link, which take long to read."""
    link_speed = network.link_speed(view.interface.name)
    _, width, speed = next((codes for codes in _LINK_CODES if link_speed <= codes[0]), _LINK_CODES[-1])
    return replace(view.device, ports=(replace(view.port, active_width=width, active_speed=speed),))


def read_host(network: Network, before: HostView | None = None) -> HostView:
    """A view of the host as it is now. Addresses keep their GID indices of the view ``before``."""
    interfaces = {interface.index: interface for interface in network.interfaces()}
    addresses: dict[int, list[InterfaceAddress]] = {}
    for address in network.addresses():
        if address.usable:
            addresses.setdefault(address.ifindex, []).append(address)
    ports: list[RocePortView] = []
    ipoib: list[IpoibInterface] = []
    for interface in sorted(interfaces.values(), key=lambda i: i.index):
        if interface.arp_type in _NO_IP or interface.slave_kind in _MASTERS:
            continue
        if interface.is_ipoib:
            own = sorted(addresses.get(interface.index, []), key=_order)
            ipoib.append(IpoibInterface(interface, tuple(address.ip for address in own)))
            continue
        old = before.by_key.get((interface.index, PORT_NUM)) if before else None
        rows = _gid_rows(interface, addresses.get(interface.index, []), old.rows if old else ())
        port = Port(
            PORT_NUM,
            PortState.ACTIVE if interface.is_running else PortState.DOWN,
            LinkLayer.ETHERNET,
            Mtu.MTU_4096,
            mtu_code(interface.mtu),
            rows,
            (DEFAULT_PKEY,),
            gid_tbl_len=max(_GID_TBL_LEN, rows[-1].gid_index + 1 if rows else 0),
            pkey_tbl_len=1,
            port_cap_flags=PortCapFlag.CM_SUP,
            flags=PortFlag.GRH_REQUIRED,
            max_msg_sz=LONGEST_MESSAGE,
            max_vl_num=1,
            phys_state=_LINK_UP if interface.is_running else _POLLING if interface.is_up else _DISABLED,
        )
        device = Device(
            f"soft_{interface.name}",
            interface.index,
            PROVIDER,
            NodeType.CA,
            TransportType.IB,
            _node_guid(network.boot_key, interface),
            (port,),
        )
        ports.append(RocePortView(device, port, interface))
    return HostView.of(PROVIDER, ports, interfaces, ipoib)
