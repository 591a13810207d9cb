"""The software devices: one RoCEv2 device for each network interface that can carry IP.

A :class:`HostView` is an immutable picture of the host, replaced as a whole when something changes, so that a
decision and its explanation are taken from the same facts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cache
from socket import AF_INET

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.net.types import Interface, InterfaceAddress, Network
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType

PORT_NUM = 1

#: Bytes of the longest RoCEv2 headers over IPv6: IPv6 40, UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4.
_HEADERS = 96

#: ARPHRD_*: CAN, MCTP, 802.11 monitor interfaces, 802.15.4, netlink and vsock monitors. None of them carries IP.
_NO_IP = frozenset({280, 290, 801, 802, 803, 804, 805, 824, 826})

#: What is enslaved to one of these has its addresses on its master.
_MASTERS = frozenset({"bond", "bridge", "team", "openvswitch"})


@cache
def mtu_code(payload: int) -> Mtu | None:
    """The largest path MTU whose packets fit an interface of that MTU, None where not even 256 do."""
    for mtu in reversed(Mtu):
        if mtu.bytes + _HEADERS <= payload:
            return mtu
    return None


def _node_guid(interface: Interface) -> int:
    mac = interface.address
    if len(mac) == 6 and any(mac):
        eui = bytes((mac[0] ^ 2, mac[1], mac[2], 0xFF, 0xFE, mac[3], mac[4], mac[5]))
    else:  # loopback and tunnels have none; a GUID must be there, and not be zero
        digest = hashlib.blake2b(f"rdmacm {interface.name} {interface.index}".encode(), digest_size=8).digest()
        eui = bytes((digest[0] & 0xFC | 0x02,)) + digest[1:]
    return int.from_bytes(eui, "big")


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device and the interface beneath it."""

    device: Device
    interface: Interface
    rows: tuple[GidEntry, ...]

    @property
    def ifindex(self) -> int:
        return self.interface.index

    @property
    def port_num(self) -> int:
        return PORT_NUM

    @property
    def is_active(self) -> bool:
        return self.interface.is_running

    def row_of(self, ip: bytes) -> GidEntry | None:
        """The GID table row of an address."""
        gid = Gid.from_ip(ip)
        return next((row for row in self.rows if row.gid == gid), None)


@dataclass(frozen=True, slots=True)
class HostView:
    """The host's interfaces, devices and addresses at one moment."""

    devices: tuple[DeviceView, ...] = ()
    interfaces: dict[int, Interface] = field(default_factory=dict)
    by_ifindex: dict[int, DeviceView] = field(default_factory=dict)
    by_ip: dict[bytes, tuple[tuple[DeviceView, GidEntry], ...]] = field(default_factory=dict)

    def interface_name(self, ifindex: int) -> str:
        interface = self.interfaces.get(ifindex)
        return interface.name if interface else f"interface {ifindex}"

    def owns(self, ip: bytes, ifindex: int = 0) -> bool:
        """Whether an address is configured here (on that interface, where one is named)."""
        return any(not ifindex or view.ifindex == ifindex for view, _ in self.by_ip.get(ip, ()))

    @property
    def loopback(self) -> DeviceView | None:
        """The device of the loopback interface."""
        return next((view for view in self.devices if view.interface.is_loopback), None)


def _order(address: InterfaceAddress) -> int:
    """GID table order for addresses that appear together: link-local, IPv4, other IPv6."""
    if address.family == AF_INET:
        return 1
    return 0 if address.ip[0] == 0xFE and address.ip[1] & 0xC0 == 0x80 else 2


def _gid_rows(
    interface: Interface, addresses: list[InterfaceAddress], before: tuple[GidEntry, ...]
) -> tuple[GidEntry, ...]:
    """The GID table: an address keeps its index while it lives; a new one takes the lowest free index."""
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


def read_host(network: Network, before: HostView | None = None) -> HostView:
    """The host as it is now. ``before`` keeps GID indices stable across changes."""
    interfaces = {interface.index: interface for interface in network.interfaces()}
    addresses: dict[int, list[InterfaceAddress]] = {}
    for address in network.addresses():
        if address.usable:
            addresses.setdefault(address.ifindex, []).append(address)
    views: list[DeviceView] = []
    by_ip: dict[bytes, list[tuple[DeviceView, GidEntry]]] = {}
    for interface in sorted(interfaces.values(), key=lambda i: i.index):
        if interface.arp_type in _NO_IP or interface.slave_kind in _MASTERS:
            continue
        old = before.by_ifindex.get(interface.index) if before else None
        rows = _gid_rows(interface, addresses.get(interface.index, []), old.rows if old else ())
        port = Port(
            PORT_NUM,
            PortState.ACTIVE if interface.is_running else PortState.DOWN,
            LinkLayer.ETHERNET,
            Mtu.MTU_4096,
            mtu_code(interface.mtu),
            rows,
            (DEFAULT_PKEY,),
        )
        device = Device(
            f"soft_{interface.name}",
            interface.index,
            "soft",
            NodeType.CA,
            TransportType.IB,
            _node_guid(interface),
            (port,),
        )
        view = DeviceView(device, interface, rows)
        views.append(view)
        for row in rows:
            by_ip.setdefault(row.gid.ip, []).append((view, row))
    return HostView(
        tuple(views),
        interfaces,
        {view.ifindex: view for view in views},
        {ip: tuple(rows) for ip, rows in by_ip.items()},
    )
