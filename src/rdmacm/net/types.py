"""The data of the network seam, and the seam itself."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple, Protocol


class InterfaceFlag(IntFlag):
    """``IFF_*``, netdevice(7)."""

    UP = 0x1
    BROADCAST = 0x2
    LOOPBACK = 0x8
    POINTOPOINT = 0x10
    RUNNING = 0x40
    NOARP = 0x80
    MULTICAST = 0x1000
    LOWER_UP = 0x10000


# As plain ints: the properties below are asked at every resolution, and IntFlag arithmetic costs a call.
_UP, _LOOPBACK = int(InterfaceFlag.UP), int(InterfaceFlag.LOOPBACK)
_RUNNING, _NOARP = int(InterfaceFlag.UP | InterfaceFlag.RUNNING), int(InterfaceFlag.LOOPBACK | InterfaceFlag.NOARP)


class Interface(NamedTuple):
    """A network interface. ``arp_type`` is ``ARPHRD_*``; ``slave_kind`` names the kind of master it serves."""

    index: int  # type: ignore[assignment]
    name: str
    flags: int
    mtu: int
    arp_type: int
    address: bytes
    slave_kind: str | None = None

    @property
    def is_up(self) -> bool:
        return self.flags & _UP != 0

    @property
    def is_running(self) -> bool:
        """Administratively up and with a carrier."""
        return self.flags & _RUNNING == _RUNNING

    @property
    def is_loopback(self) -> bool:
        return self.flags & _LOOPBACK != 0

    @property
    def needs_neighbour(self) -> bool:
        """Whether a next hop's link-layer address has to be found before a packet can be sent."""
        return not self.flags & _NOARP


class InterfaceAddress(NamedTuple):
    """An address of an interface. ``usable`` is False while duplicate address detection runs or has failed."""

    family: int
    ip: bytes
    prefix_length: int
    ifindex: int
    usable: bool = True


class RouteEntry(NamedTuple):
    """Where a packet for ``destination`` would go. ``kind``: unicast, local, broadcast, anycast, multicast.

    ``gateway`` is a packed address of either family, None on link; ``mtu`` and ``hop_limit`` are 0 where the
    route sets none.
    """

    kind: str
    destination: bytes
    ifindex: int
    gateway: bytes | None
    source: bytes | None
    table: int
    mtu: int = 0
    hop_limit: int = 0


class NeighbourState(IntEnum):
    """``NUD_*``, neighbour entries of rtnetlink(7)."""

    NONE = 0x00
    INCOMPLETE = 0x01
    REACHABLE = 0x02
    STALE = 0x04
    DELAY = 0x08
    PROBE = 0x10
    FAILED = 0x20
    NOARP = 0x40
    PERMANENT = 0x80

    @property
    def is_valid(self) -> bool:
        """Whether packets can be sent with this entry (the kernel's ``NUD_VALID``)."""
        return bool(self & 0xDE)


class Neighbour(NamedTuple):
    """An entry of the neighbour table."""

    ifindex: int
    ip: bytes
    state: NeighbourState
    link_layer_address: bytes


class Change(NamedTuple):
    """What has changed since the last look.

    ``links``: interfaces or addresses; ``routes``: routing tables or rules; ``neighbours``: the entries that
    did; ``lost``: the kernel dropped notifications, so anything may have.
    """

    links: bool
    routes: bool
    neighbours: tuple[Neighbour, ...]
    lost: bool


class Network(Protocol):
    """What the resolver asks of a host. Every method returns at once; OSErrors carry the kernel's errno."""

    #: Whether :meth:`neighbour` can answer at all; where not, a next hop is assumed to be reachable.
    sees_neighbours: bool

    def open(self) -> None:
        """Open every descriptor now, in the namespace of the calling thread; else each opens at first use."""

    def interfaces(self) -> list[Interface]:
        """Every interface."""

    def addresses(self) -> list[InterfaceAddress]:
        """Every address of every interface."""

    def route(self, family: int, destination: bytes, source: bytes | None, ifindex: int, tos: int) -> RouteEntry:
        """The route to a destination, optionally from a source and out of an interface (0: any).

        ENETUNREACH, EHOSTUNREACH, EACCES (prohibit) or EINVAL (blackhole, or a source that is not ours).
        """

    def neighbour(self, family: int, ifindex: int, ip: bytes) -> Neighbour | None:
        """The neighbour entry of a next hop, None where there is none."""

    def probe(self, family: int, ifindex: int, ip: bytes, destination: bytes | None = None) -> None:
        """Make the host look for a neighbour (ARP, ND), without waiting.

        ``destination``: what the neighbour is the gateway to, where it is one.
        """

    def watch(self, on: bool) -> None:
        """Have :meth:`changes` tell of neighbours and routes too; costly on a busy host, so only when needed."""

    def changes(self) -> Change | None:
        """What has changed since the last call, None for nothing."""

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`changes` has something, -1 where there is none."""

    def link_speed(self, name: str) -> int:
        """Megabits per second, 0 where unknown."""

    def setting(self, name: str, *default: int) -> tuple[int, ...]:
        """The numbers of a sysctl, by its path below /proc/sys; ``default`` where it cannot be read."""

    def close(self) -> None:
        """Release every descriptor. They come back by themselves when asked again."""
