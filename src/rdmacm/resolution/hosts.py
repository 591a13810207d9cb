"""What a resolution reads of a host: views of its ports, interfaces and addresses.

A *view* shows something as it was at one moment. It is immutable, and replaced as a whole when something changes, so
that a decision and its explanation rest on the same facts. Each provider makes a :class:`HostView` of its own devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from rdmacm.address import Gid
from rdmacm.net.types import Interface
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import Mtu, PortState

__all__ = ["HostView", "PortKey", "PortView", "RocePortView", "mtu_code"]

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
class RocePortView(PortView):
    """One port of a RoCE device."""

    #: The port's own network interface. A row of the GID table may be of another one, such as a VLAN on top of it.
    interface: Interface


@dataclass(frozen=True, slots=True)
class HostView:
    """The RoCE ports, interfaces and addresses of a host."""

    #: The name of the provider whose devices these are, for explanations.
    provider: str
    #: Every port of every device.
    ports: tuple[RocePortView, ...]
    #: By interface index.
    interfaces: dict[int, Interface]
    by_key: dict[PortKey, RocePortView]
    #: The ports and GID table rows of each local address (packed).
    by_ip: dict[bytes, tuple[tuple[RocePortView, GidEntry], ...]]

    @classmethod
    def of(cls, provider: str, ports: Sequence[RocePortView], interfaces: dict[int, Interface]) -> HostView:
        """The view of a host that has these ports and interfaces."""
        by_ip: dict[bytes, list[tuple[RocePortView, GidEntry]]] = {}
        for view in ports:
            for row in view.rows:
                by_ip.setdefault(row.gid.ip, []).append((view, row))
        by_key = {view.key: view for view in ports}
        return cls(provider, tuple(ports), interfaces, by_key, {ip: tuple(rows) for ip, rows in by_ip.items()})

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
        return any(ifindex in (0, row.ndev_ifindex) for _, row in self.by_ip.get(ip, ()))

    def rows_of(self, ip: bytes, ifindex: int = 0) -> tuple[tuple[RocePortView, GidEntry], ...]:
        """The ports and rows of a local address, on one interface if ``ifindex`` is not 0.

        All of 127/8 belongs to this host, but only 127.0.0.1 is in a GID table; it stands for the others.
        """
        rows = self.by_ip.get(ip, ())
        if ifindex:
            rows = tuple(pair for pair in rows if pair[1].ndev_ifindex == ifindex)
        if not rows and len(ip) == 4 and ip[0] == 127:
            rows = tuple(
                (view, row)
                for view in self.ports
                for row in view.rows
                if len(row.gid.ip) == 4 and self.is_loopback(row.ndev_ifindex)
            )[:1]
        return rows
