"""Pictures of a host's RoCE devices, as the resolution reads them.

A :class:`HostView` is immutable and replaced as a whole when something changes, so that a decision and its explanation
rest on the same facts. Each provider makes it from its own devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from rdmacm.address import Gid
from rdmacm.net.types import Interface
from rdmacm.verbs.device import Device, GidEntry
from rdmacm.verbs.enums import Mtu

__all__ = ["DeviceView", "HostView", "mtu_code"]

#: Bytes of the longest RoCEv2 headers over IPv6: IPv6 40, UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4.
_HEADERS = 96


@cache
def mtu_code(payload: int) -> Mtu | None:
    """The largest path MTU whose packets fit an interface with an MTU of ``payload`` bytes; None if not even 256 do."""
    for mtu in reversed(Mtu):
        if mtu.bytes + _HEADERS <= payload:
            return mtu
    return None


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One port of a RoCE device, and the network interface of its GIDs."""

    device: Device
    interface: Interface
    #: The port's GID table.
    rows: tuple[GidEntry, ...]
    port_num: int = 1

    @property
    def ifindex(self) -> int:
        return self.interface.index

    @property
    def is_active(self) -> bool:
        return self.interface.is_running

    def row_of(self, ip: bytes) -> GidEntry | None:
        """The GID table row of an address."""
        gid = Gid.from_ip(ip)
        return next((row for row in self.rows if row.gid == gid), None)


@dataclass(frozen=True, slots=True)
class HostView:
    """The host's interfaces, RoCE devices and addresses at one moment.

    ``by_ip`` has, for each local address, the ports and GIDs that carry it; ``provider`` names whose devices these are.
    """

    devices: tuple[DeviceView, ...] = ()
    interfaces: dict[int, Interface] = field(default_factory=dict)
    by_ifindex: dict[int, DeviceView] = field(default_factory=dict)
    by_ip: dict[bytes, tuple[tuple[DeviceView, GidEntry], ...]] = field(default_factory=dict)
    provider: str = "soft"

    @classmethod
    def of(cls, views: Sequence[DeviceView], interfaces: dict[int, Interface], provider: str) -> HostView:
        """The picture that these devices and interfaces make."""
        by_ip: dict[bytes, list[tuple[DeviceView, GidEntry]]] = {}
        for view in views:
            for row in view.rows:
                by_ip.setdefault(row.gid.ip, []).append((view, row))
        return cls(
            tuple(views),
            interfaces,
            {view.ifindex: view for view in views},
            {ip: tuple(rows) for ip, rows in by_ip.items()},
            provider,
        )

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
