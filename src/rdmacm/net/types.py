"""The data types of the network, and the interface to it."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple, Protocol

#: The UDP port of RoCEv2. A routing rule may match it, so every lookup of a route is for this port.
ROCE_PORT = 4791
#: The hardware type of IPoIB interfaces (linux/if_arp.h).
ARPHRD_INFINIBAND = 32


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


# Plain ints, for the reason given in rdmacm.proto.plainints: every resolution reads the properties below.
_UP, _LOOPBACK = int(InterfaceFlag.UP), int(InterfaceFlag.LOOPBACK)
_RUNNING, _NOARP = int(InterfaceFlag.UP | InterfaceFlag.RUNNING), int(InterfaceFlag.LOOPBACK | InterfaceFlag.NOARP)


class Interface(NamedTuple):
    """A network interface.

    ``index`` and ``name`` are the kernel's. ``flags`` are :class:`InterfaceFlag`, ``mtu`` is in bytes, ``arp_type`` is
    ``ARPHRD_*``. ``address`` and ``broadcast`` are hardware addresses: 6 bytes on Ethernet, 20 on IPoIB. ``slave_kind``
    is the kind of its master device ("bond"), if it has one.
    """

    index: int  # type: ignore[assignment]
    name: str
    flags: int
    mtu: int
    arp_type: int
    address: bytes
    slave_kind: str | None = None
    broadcast: bytes = b""

    @property
    def is_ipoib(self) -> bool:
        """Whether it carries IP over InfiniBand."""
        return self.arp_type == ARPHRD_INFINIBAND

    @property
    def is_up(self) -> bool:
        """Administratively up."""
        return self.flags & _UP != 0

    @property
    def is_running(self) -> bool:
        """Administratively up and with a carrier."""
        return self.flags & _RUNNING == _RUNNING

    @property
    def is_loopback(self) -> bool:
        """Whether packets stay on this host."""
        return self.flags & _LOOPBACK != 0

    @property
    def needs_neighbour(self) -> bool:
        """Whether packets need the link-layer address of their next hop."""
        return not self.flags & _NOARP


class InterfaceAddress(NamedTuple):
    """An address of an interface, whose index is ``ifindex``.

    ``family`` is AF_INET or AF_INET6. ``ip`` is packed; ``prefix_length`` is in bits. ``usable`` is False during
    duplicate address detection and if it has failed.
    """

    family: int
    ip: bytes
    prefix_length: int
    ifindex: int
    usable: bool = True


class RouteEntry(NamedTuple):
    """The route of packets to ``destination``. ``kind``: unicast, local, broadcast, anycast or multicast.

    Addresses are packed. ``ifindex`` is the interface through which packets leave. ``gateway`` may be of either family,
    and is None on link; ``source`` is the preferred source address, or None; ``table`` is the number of the routing
    table that has the route; ``mtu`` (bytes) and ``hop_limit`` are 0 if the route sets none.
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
        """Whether packets can be sent through the entry (the kernel's ``NUD_VALID``)."""
        return bool(self & 0xDE)


class Neighbour(NamedTuple):
    """An entry of the neighbour table, for the interface with index ``ifindex``.

    ``ip`` is packed. ``state`` is a :class:`NeighbourState`. ``link_layer_address`` is empty if it is
    unknown; it has 6 bytes on Ethernet and 20 on IPoIB; Linux allows up to 32.
    """

    ifindex: int
    ip: bytes
    state: NeighbourState
    link_layer_address: bytes


class Change(NamedTuple):
    """What has changed since the last call of :meth:`Network.changes`.

    ``links``: interfaces or addresses; ``routes``: routing tables or rules; ``neighbours``: the entries that changed;
    ``lost``: the kernel dropped notifications, so anything may have changed.
    """

    links: bool
    routes: bool
    neighbours: tuple[Neighbour, ...]
    lost: bool


class Network(Protocol):
    """The network of a host, as the resolver uses it. No method waits; an OSError carries the kernel's errno."""

    #: Whether :meth:`neighbour` is supported. If not, every next hop is assumed to be reachable.
    sees_neighbours: bool
    #: What all processes of the network namespace share until the host restarts, and no other host knows
    #: (:func:`rdmacm.net.boot.boot_key`).
    boot_key: bytes

    def open(self) -> None:
        """Open every descriptor, in the namespace of the calling thread. Otherwise each is opened at its first use."""

    def interfaces(self) -> list[Interface]:
        """Every interface."""

    def addresses(self) -> list[InterfaceAddress]:
        """Every address of every interface."""

    def route(self, family: int, destination: bytes, source: bytes | None, ifindex: int, tos: int) -> RouteEntry:
        """The route to a packed destination address, optionally from a source and out of an interface (0: any).

        ``tos`` is the type of service, 8 bits.

        OSError: ENETUNREACH, EHOSTUNREACH, EACCES (prohibit), or EINVAL (blackhole, or a source that is not local).
        """

    def neighbour(self, family: int, ifindex: int, ip: bytes) -> Neighbour | None:
        """The neighbour entry of a next hop, or None."""

    def probe(self, family: int, ifindex: int, ip: bytes, destination: bytes | None = None) -> None:
        """Make the host resolve a neighbour (ARP, ND), without waiting.

        ``destination``: if the neighbour is a gateway, an address behind it.
        """

    def watch(self, on: bool) -> None:
        """Make :meth:`changes` report neighbours and routes too, or stop that, because it is costly on a busy host."""

    def watch_neighbours(self) -> None:
        """Make :meth:`changes` report neighbours until :meth:`close`, whatever :meth:`watch` says."""

    def changes(self) -> Change | None:
        """What has changed since the last call, or None."""

    def fileno(self) -> int:
        """A descriptor that polls readable when :meth:`changes` has something to report; -1 if there is none."""

    def link_speed(self, name: str) -> int:
        """The speed of an interface in Mb/s, 0 if unknown."""

    def setting(self, name: str, *default: int) -> tuple[int, ...]:
        """The numbers of a sysctl, by its path below /proc/sys; ``default`` if it cannot be read."""

    def close(self) -> None:
        """Close every descriptor. A later call opens what it needs again."""
