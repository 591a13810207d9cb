"""A host's network in memory, configured by the test. It replaces :class:`rdmacm.net.Network`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from ipaddress import ip_address, ip_interface, ip_network
from socket import AF_INET, AF_INET6
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.net.types import (
    ARPHRD_INFINIBAND,
    Change,
    Interface,
    InterfaceAddress,
    InterfaceFlag,
    Neighbour,
    NeighbourState,
    Network,
    RouteEntry,
)
from rdmacm.proto.constants import MULTICAST_QPN
from rdmacm.proto.ipoib import IpoibAddress, broadcast_gid
from rdmacm.provider import Provider
from rdmacm.soft.port_table import PortOwner, PortTable
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing.clock import VirtualClock, VirtualRuntime
from rdmacm.testing.subnet import MemoryPort

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

#: Hardware types of interfaces (linux/if_arp.h), and numbers of routing tables (linux/rtnetlink.h).
_ARPHRD_ETHER, _ARPHRD_LOOPBACK = 1, 772
_TABLE_MAIN, _TABLE_LOCAL = 254, 255
_CARRIER_FLAGS = InterfaceFlag.RUNNING | InterfaceFlag.LOWER_UP
_UP_FLAGS = InterfaceFlag.UP | _CARRIER_FLAGS
#: Results of a search that are kept.
_MAX_OWNERS = 256
#: The errors of routes that forbid sending, by kind.
_FAILING_KINDS = {
    "blackhole": errno.EINVAL,
    "unreachable": errno.EHOSTUNREACH,
    "prohibit": errno.EACCES,
}


class _TableRow(NamedTuple):
    """A row of the routing table, for the packed prefix and its length in bits; the rest is that of a RouteEntry."""

    prefix: bytes
    length: int
    ifindex: int
    gateway: bytes | None
    source: bytes | None
    kind: str
    mtu: int
    hop_limit: int


def _packed(text: str) -> bytes:
    return ip_address(text.partition("%")[0]).packed


def _covers(prefix: bytes, length: int, ip: bytes) -> bool:
    if len(prefix) != len(ip):
        return False
    shift = len(ip) * 8 - length
    return int.from_bytes(prefix, "big") >> shift == int.from_bytes(ip, "big") >> shift


class MemoryNetwork(Network):
    """The network of a host: interfaces, addresses, routes and neighbours.

    It starts with the interface ``lo`` (127.0.0.1 and ::1), unless ``loopback`` is False. A provider learns of changes
    the next time it makes progress, as from a real host. Methods identify an interface by its index. Changing or
    removing an unknown interface raises KeyError; invalid text for an address or a prefix raises ValueError.

    Attributes:

    - ``sees_neighbours``: whether :meth:`neighbour` works, as in :class:`rdmacm.net.Network`.
    - ``probed``: neighbours that were probed, in order, as (interface index, packed address).
    - ``speeds``: link speeds in Mb/s, by interface name; 0 when missing.
    - ``settings``: values of kernel settings, by path below /proc/sys.
    - ``boot_key``: as in :class:`rdmacm.net.Network`; the same for all hosts, so that a simulated run repeats.
    """

    sees_neighbours = True

    def __init__(self, *, loopback: bool = True) -> None:
        self.boot_key = b""
        self.probed: list[tuple[int, bytes]] = []
        self.speeds: dict[str, int] = {}
        self.settings: dict[str, tuple[int, ...]] = {}
        #: Ends of a pipe that is never readable: progress comes from calls, but a provider polls a descriptor.
        self._read, self._write = -1, -1
        #: Interfaces by index.
        self._interfaces: dict[int, Interface] = {}
        self._addresses: list[InterfaceAddress] = []
        #: What :meth:`_owner` has found, by packed address, since interfaces and addresses have changed last.
        self._owners: dict[bytes, InterfaceAddress | None] = {}
        #: The routing table, in the order in which routes were added.
        self._routes: list[_TableRow] = []
        #: Neighbours by interface index and packed address.
        self._neighbours: dict[tuple[int, bytes], Neighbour] = {}
        #: What :meth:`changes` is going to report.
        self._changed_links = self._changed_routes = self._notifications_lost = False
        #: Whether it reports neighbours: for a while, and until it is closed.
        self._watching = self._keeps_neighbours = False
        self._changed_neighbours: list[Neighbour] = []
        if loopback:
            self.add_interface("lo", "127.0.0.1/8", "::1/128", loopback=True, mtu=65536)

    # -- for tests ------------------------------------------------------------------------------------

    def add_interface(
        self,
        name: str,
        *addresses: str,
        mtu: int = 1500,
        mac: bytes | None = None,
        loopback: bool = False,
        arp: bool = True,
        up: bool = True,
        slave_kind: str | None = None,
    ) -> int:
        """Add an interface with addresses ("10.0.0.1/24", "fe80::1/64"); return its index.

        ``mtu`` is in bytes, ``mac`` has 6 bytes (default: unique on the host). ``slave_kind`` is the kind of its
        master, such as "bond".
        """
        index = max(self._interfaces, default=0) + 1
        flags = (_UP_FLAGS if up else 0) | (InterfaceFlag.LOOPBACK if loopback else InterfaceFlag.MULTICAST)
        if not arp:
            flags |= InterfaceFlag.NOARP
        hardware = bytes(6) if loopback else mac or bytes((2, 0, 0, 0, 0, index))
        arp_type = _ARPHRD_LOOPBACK if loopback else _ARPHRD_ETHER
        self._owners.clear()
        self._interfaces[index] = Interface(index, name, int(flags), mtu, arp_type, hardware, slave_kind)
        for address in addresses:
            self.add_address(index, address)
        self._changed_links = True
        return index

    def add_ipoib_interface(
        self,
        name: str,
        *addresses: str,
        gid: Gid,
        pkey: int = DEFAULT_PKEY,
        qpn: int = 0x48,
        mtu: int = 2044,
        up: bool = True,
    ) -> int:
        """Add an IPoIB interface on the InfiniBand port with the GID ``gid``; return its index.

        ``pkey`` is the P_Key of its partition, ``qpn`` the number of its queue pair. The hardware address of a
        neighbour is ``rdmacm.proto.ipoib.IpoibAddress(gid, qpn).pack()``.
        """
        index = self.add_interface(name, *addresses, mtu=mtu, mac=IpoibAddress(gid, qpn).pack(), up=up)
        broadcast = IpoibAddress(broadcast_gid(pkey), MULTICAST_QPN).pack()
        self._interfaces[index] = self._interfaces[index]._replace(arp_type=ARPHRD_INFINIBAND, broadcast=broadcast)
        return index

    def remove_interface(self, ifindex: int) -> None:
        """Remove an interface with its addresses, routes and neighbours."""
        self._owners.clear()
        del self._interfaces[ifindex]
        self._addresses = [a for a in self._addresses if a.ifindex != ifindex]
        self._routes = [r for r in self._routes if r.ifindex != ifindex]
        self._neighbours = {k: n for k, n in self._neighbours.items() if k[0] != ifindex}
        self._changed_links = self._changed_routes = True

    def set_interface(
        self,
        ifindex: int,
        *,
        up: bool | None = None,
        carrier: bool | None = None,
        mtu: int | None = None,
        mac: bytes = b"",
    ) -> None:
        """Change the state, carrier, MTU (bytes) or MAC address (6 bytes, 20 on IPoIB) of an interface.

        An interface that goes up has a carrier.
        """
        old = self._interfaces[ifindex]
        flags = old.flags
        for on, changed in ((up, _UP_FLAGS), (carrier, _CARRIER_FLAGS)):
            if on is not None:
                flags = flags | changed if on else flags & ~changed
        self._owners.clear()
        self._interfaces[ifindex] = old._replace(flags=int(flags), mtu=mtu or old.mtu, address=mac or old.address)
        self._changed_links = True

    def add_address(self, ifindex: int, address: str, *, usable: bool = True) -> None:
        """Add an address with its prefix length, and an on-link route to the prefix.

        ``usable`` is False while duplicate address detection runs or has failed.
        """
        interface = ip_interface(address)
        ip, length = interface.ip.packed, interface.network.prefixlen
        family = AF_INET if len(ip) == 4 else AF_INET6
        self._owners.clear()
        self._addresses.append(InterfaceAddress(family, ip, length, ifindex, usable))
        self._routes.append(
            _TableRow(interface.network.network_address.packed, length, ifindex, None, ip, "unicast", 0, 0)
        )
        self._changed_links = self._changed_routes = True

    def remove_address(self, ifindex: int, address: str) -> None:
        """Remove an address and its on-link route."""
        self._owners.clear()
        ip = _packed(address.partition("/")[0])
        self._addresses = [a for a in self._addresses if (a.ifindex, a.ip) != (ifindex, ip)]
        self._routes = [r for r in self._routes if (r.ifindex, r.source) != (ifindex, ip) or r.gateway]
        self._changed_links = self._changed_routes = True

    def add_route(
        self,
        destination: str,
        ifindex: int = 0,
        *,
        gateway: str | None = None,
        source: str | None = None,
        kind: str = "unicast",
        mtu: int = 0,
        hop_limit: int = 0,
    ) -> None:
        """Add a route to a prefix ("10.1.0.0/16").

        ``kind`` is "unicast", "blackhole", "unreachable" or "prohibit". ``mtu`` is in bytes; 0 sets none.
        """
        network = ip_network(destination)
        self._routes.append(
            _TableRow(
                network.network_address.packed,
                network.prefixlen,
                ifindex,
                None if gateway is None else _packed(gateway),
                None if source is None else _packed(source),
                kind,
                mtu,
                hop_limit,
            )
        )
        self._changed_routes = True

    def remove_route(self, destination: str) -> None:
        """Remove all routes to a prefix."""
        network = ip_network(destination)
        key = (network.network_address.packed, network.prefixlen)
        self._routes = [r for r in self._routes if (r.prefix, r.length) != key]
        self._changed_routes = True

    def add_neighbour(
        self,
        ifindex: int,
        address: str,
        state: NeighbourState = NeighbourState.REACHABLE,
        mac: bytes = b"\2\0\0\0\0\xff",
    ) -> None:
        """Add or change a neighbour: the result of ARP or neighbour discovery. ``mac`` has 6 bytes, 20 on IPoIB."""
        entry = Neighbour(ifindex, _packed(address), state, mac)
        self._neighbours[ifindex, entry.ip] = entry
        if self._watching or self._keeps_neighbours:
            self._changed_neighbours.append(entry)

    def lose_notifications(self) -> None:
        """Discard pending change notifications, as a kernel does when its listener is too slow."""
        self._changed_neighbours.clear()
        self._changed_links = self._changed_routes = False
        self._notifications_lost = True

    def interface_of(self, ip: bytes) -> Interface | None:
        """Return the interface that is up and has a packed address, or None."""
        address = self._owner(ip)
        return None if address is None else self._interfaces[address.ifindex]

    # -- for the provider -----------------------------------------------------------------------------

    def open(self) -> None:
        pass

    def interfaces(self) -> list[Interface]:
        return list(self._interfaces.values())

    def addresses(self) -> list[InterfaceAddress]:
        return list(self._addresses)

    def _is_up(self, ifindex: int) -> bool:
        interface = self._interfaces.get(ifindex)
        return interface is not None and interface.is_up

    def _owner(self, ip: bytes) -> InterfaceAddress | None:
        if ip not in self._owners:
            if len(self._owners) >= _MAX_OWNERS:
                self._owners.clear()
            self._owners[ip] = self._find_owner(ip)
        return self._owners[ip]

    def _find_owner(self, ip: bytes) -> InterfaceAddress | None:
        found = next((a for a in self._addresses if a.ip == ip and self._is_up(a.ifindex)), None)
        if found is None and len(ip) == 4 and ip[0] == 127:
            found = next((a for a in self._addresses if a.ip[0] == 127 and len(a.ip) == 4), None)
        return found if found is not None and self._is_up(found.ifindex) else None

    def route(self, family: int, destination: bytes, source: bytes | None, ifindex: int, tos: int) -> RouteEntry:
        if ifindex and ifindex not in self._interfaces:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        if source is not None and self._owner(source) is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if (own := self._owner(destination)) is not None and not ifindex:
            return RouteEntry("local", destination, own.ifindex, None, source or own.ip, _TABLE_LOCAL)
        multicast = destination[0] & 0xF0 == 0xE0 if family == AF_INET else destination[0] == 0xFF
        best: _TableRow | None = None
        for entry in self._routes:
            usable = entry.kind in _FAILING_KINDS or self._is_up(entry.ifindex)
            if not usable or (ifindex and entry.kind not in _FAILING_KINDS and entry.ifindex != ifindex):
                continue
            if _covers(entry.prefix, entry.length, destination) and (best is None or entry.length > best.length):
                best = entry
        if best is None and multicast:
            where = ifindex or next((i for i, it in self._interfaces.items() if it.is_up and not it.is_loopback), 0)
            if where:
                chosen = source or self._source_on(where, family)
                return RouteEntry("multicast", destination, where, None, chosen, _TABLE_MAIN)
        if best is None:
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
        if best.kind in _FAILING_KINDS:
            raise OSError(_FAILING_KINDS[best.kind], f"{best.kind} route")
        chosen = source or best.source or self._source_on(best.ifindex, family)
        kind = "multicast" if multicast else best.kind
        return RouteEntry(kind, destination, best.ifindex, best.gateway, chosen, _TABLE_MAIN, best.mtu, best.hop_limit)

    def _source_on(self, ifindex: int, family: int) -> bytes | None:
        return next((a.ip for a in self._addresses if a.ifindex == ifindex and a.family == family), None)

    def neighbour(self, family: int, ifindex: int, ip: bytes) -> Neighbour | None:
        return self._neighbours.get((ifindex, ip))

    def probe(self, family: int, ifindex: int, ip: bytes, destination: bytes | None = None) -> None:
        self.probed.append((ifindex, ip))

    def watch(self, on: bool) -> None:
        self._watching = on

    def watch_neighbours(self) -> None:
        self._keeps_neighbours = True

    @property
    def has_changed(self) -> bool:
        """Whether :meth:`changes` has something to report."""
        return bool(self._changed_links or self._changed_routes or self._changed_neighbours or self._notifications_lost)

    def changes(self) -> Change | None:
        change = Change(
            self._changed_links, self._changed_routes, tuple(self._changed_neighbours), self._notifications_lost
        )
        self._changed_links = self._changed_routes = self._notifications_lost = False
        self._changed_neighbours = []
        return change if change != (False, False, (), False) else None

    def fileno(self) -> int:
        if self._read < 0:
            self._read, self._write = os.pipe2(os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        return self._read

    def link_speed(self, name: str) -> int:
        return self.speeds.get(name, 0)

    def setting(self, name: str, *default: int) -> tuple[int, ...]:
        return self.settings.get(name, default)

    def close(self) -> None:
        for end in (self._read, self._write):
            if end >= 0:
                os.close(end)
        self._read = self._write = -1
        self._watching = self._keeps_neighbours = False

    def __del__(self) -> None:
        # A provider without channels does not close its network, and a simulation creates thousands of them.
        self.close()


class PrivatePorts(PortTable):
    """The port numbers of a host that exists only in this process: without a lock file.

    Free ports are assigned in order from ``first``, or from a random start.
    """

    def __init__(self, low: int = 32768, high: int = 60999, first: int | None = None) -> None:
        super().__init__("", (low, high))
        if first is not None:
            self._next, self._run = first - low, sys.maxsize

    def _lock(self, owner: PortOwner, *, is_held: bool = False) -> tuple[int, int] | None:
        return None

    def _unlock(self, ranges: object, owner: object) -> None:
        return None


def memory_provider(
    network: MemoryNetwork, clock: Callable[[], float] = monotonic, *, infiniband: Sequence[MadTransport] = ()
) -> Provider:
    """Return a provider: the software device on a network in memory, with port numbers of its own.

    ``clock`` returns seconds. ``infiniband``: additional InfiniBand ports, from :meth:`MemorySubnet.add_port` of a
    subnet with the same clock.

    On a :class:`VirtualClock`, a call that waits without a timeout, as those of a synchronous id do, advances the clock
    to the next deadline: at once if there is no other thread, else after a second in which no thread has advanced it.
    It raises SimulationError if nothing can end it.
    """
    low, high = network.setting("net/ipv4/ip_local_port_range", 32768, 60999)
    runtime = None
    if isinstance(clock, VirtualClock):
        runtime = VirtualRuntime(clock, {port.subnet for port in infiniband if isinstance(port, MemoryPort)})
    ports = PrivatePorts(low, high)
    return SoftProvider(network, clock=clock, runtime=runtime, ports=ports, infiniband=infiniband)
