"""What a resolution of an IP address reads of a host: views of its ports, interfaces and addresses.

A *view* shows something as it was at one moment. It is immutable, and replaced as a whole when something changes, so
that a decision and its explanation rest on the same facts. Each provider makes a :class:`HostView` of its own devices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.net.types import Interface
from rdmacm.proto.ipoib import HARDWARE_ADDRESS_SIZE, IpoibAddress
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import Mtu, PortState

#: Device index and port number: the same port has the same key in every view.
PortKey: TypeAlias = tuple[int, int]

#: Bytes of the longest RoCEv2 headers over IPv6: IPv6 40, UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4.
_HEADERS = 96


@cache
def mtu_code(interface_mtu: int) -> Mtu | None:
    """The largest path MTU whose packets fit an interface MTU, in bytes; None if not even 256 does."""
    for mtu in reversed(Mtu):
        if mtu.bytes + _HEADERS <= interface_mtu:
            return mtu
    return None


@dataclass(frozen=True, slots=True)
class PortView:
    """One port of a device, RoCE or InfiniBand."""

    device: Device
    port: Port

    @property
    def key(self) -> PortKey:
        return self.device.index, self.port.port_num

    @property
    def port_num(self) -> int:
        return self.port.port_num

    @property
    def rows(self) -> tuple[GidEntry, ...]:
        """The GID table."""
        return self.port.gids

    @property
    def is_active(self) -> bool:
        return self.port.state is PortState.ACTIVE

    def row_of(self, gid: Gid) -> GidEntry | None:
        """The GID table row of a GID."""
        return next((row for row in self.rows if row.gid == gid), None)


@dataclass(frozen=True, slots=True)
class IpPortView(PortView):
    """One port that has IP addresses."""

    #: The port's network interface.
    interface: Interface

    @property
    def addresses(self) -> tuple[LocalAddress, ...]:
        """The port's IP addresses."""
        raise NotImplementedError

    def has_address(self, ip: bytes) -> bool:
        """Whether it has a packed IP address."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RocePortView(IpPortView):
    """One port of a RoCE device.

    A row of the GID table may be of another interface than the port's own, such as a VLAN on top of it.
    """

    @property
    def addresses(self) -> tuple[LocalAddress, ...]:
        return tuple(LocalAddress(self, row, row.gid.ip) for row in self.rows)

    def has_address(self, ip: bytes) -> bool:
        return self.row_of(Gid.from_ip(ip)) is not None


class LocalAddress(NamedTuple):
    """An IP address of a host, on one of its ports."""

    view: IpPortView
    #: The GID that stands for the address: a row of the port's GID table.
    row: GidEntry
    #: Packed.
    ip: bytes


@dataclass(frozen=True, slots=True)
class IpoibInterface:
    """An IPoIB interface. :mod:`rdmacm.resolution.ipoib` finds the InfiniBand port that it is on."""

    interface: Interface
    #: Its usable addresses, packed.
    ips: tuple[bytes, ...]

    @property
    def address(self) -> IpoibAddress:
        """Its hardware address, with the GID of its port and its queue pair number; all zero if it has none."""
        return _unpacked(self.interface.address)

    @property
    def broadcast_gid(self) -> Gid:
        """The GID of its broadcast group; zero if the interface has no broadcast address."""
        return _unpacked(self.interface.broadcast).gid

    @property
    def pkey(self) -> int:
        """The P_Key of its partition, which is in the GID of its broadcast group (RFC 4391, section 4)."""
        return int.from_bytes(self.broadcast_gid[4:6], "big") or DEFAULT_PKEY


def _unpacked(address: bytes) -> IpoibAddress:
    return IpoibAddress.unpack(address[:HARDWARE_ADDRESS_SIZE].ljust(HARDWARE_ADDRESS_SIZE, b"\0"))


@dataclass(frozen=True, slots=True)
class HostView:
    """The RoCE ports, interfaces and addresses of a host.

    The addresses of IPoIB interfaces are in :attr:`addresses` and :attr:`by_ip` only if their ports were looked up
    (:func:`rdmacm.resolution.ipoib.with_infiniband`), because that is slower.
    """

    #: The name of the provider whose devices these are, for explanations.
    provider: str
    #: Every port of every RoCE device.
    ports: tuple[RocePortView, ...]
    #: By interface index.
    interfaces: dict[int, Interface]
    by_key: dict[PortKey, RocePortView]
    #: Every address of every port.
    addresses: tuple[LocalAddress, ...]
    #: The same, by IP address (packed).
    by_ip: dict[bytes, tuple[LocalAddress, ...]]
    #: In the order of their indices.
    ipoib: tuple[IpoibInterface, ...] = ()
    #: What the rules have chosen on this view, by question (:func:`rdmacm.resolution.lookup.find`).
    choices: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        provider: str,
        ports: Sequence[RocePortView],
        interfaces: dict[int, Interface],
        ipoib: Sequence[IpoibInterface] = (),
        ipoib_ports: Sequence[IpPortView] = (),
    ) -> HostView:
        """The view of a host that has these ports and interfaces; ``ipoib_ports``: those of the IPoIB interfaces."""
        addresses = tuple(address for view in (*ports, *ipoib_ports) for address in view.addresses)
        by_ip: dict[bytes, list[LocalAddress]] = {}
        for address in addresses:
            by_ip.setdefault(address.ip, []).append(address)
        return cls(
            provider,
            tuple(ports),
            interfaces,
            {view.key: view for view in ports},
            addresses,
            {ip: tuple(found) for ip, found in by_ip.items()},
            tuple(ipoib),
        )

    def interface_name(self, ifindex: int) -> str:
        interface = self.interfaces.get(ifindex)
        return interface.name if interface else f"interface {ifindex}"

    def is_loopback(self, ifindex: int) -> bool:
        """Whether this is the index of the loopback interface."""
        interface = self.interfaces.get(ifindex)
        return interface is not None and interface.is_loopback

    @property
    def loopback(self) -> Interface | None:
        """The loopback interface."""
        return next((interface for interface in self.interfaces.values() if interface.is_loopback), None)

    def owns(self, ip: bytes, ifindex: int = 0) -> bool:
        """Whether a port has this address, on one interface if ``ifindex`` is not 0."""
        return any(ifindex in (0, address.row.ndev_ifindex) for address in self.by_ip.get(ip, ()))

    def find_addresses(self, ip: bytes, ifindex: int = 0) -> tuple[LocalAddress, ...]:
        """The ports and rows of a local address, on one interface if ``ifindex`` is not 0.

        All of 127/8 belongs to this host, but only 127.0.0.1 is in a GID table; it stands for the others.
        """
        found = self.by_ip.get(ip, ())
        if ifindex:
            found = tuple(address for address in found if address.row.ndev_ifindex == ifindex)
        if not found and len(ip) == 4 and ip[0] == 127:
            found = tuple(
                address
                for address in self.addresses
                if len(address.ip) == 4 and self.is_loopback(address.row.ndev_ifindex)
            )[:1]
        return found
