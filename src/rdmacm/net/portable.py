"""The host's network through plain sockets, for systems without rtnetlink.

Plain sockets give the names of the interfaces, and the source address for each destination. They do not give gateways,
neighbours and changes. So every next hop is assumed to be reachable, and interfaces are read again for each lookup.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from socket import AF_INET, AF_INET6

from rdmacm.net.boot import boot_key
from rdmacm.net.types import ROCE_PORT, Change, Interface, InterfaceAddress, InterfaceFlag, Neighbour, RouteEntry

_ARPHRD_ETHER, _ARPHRD_LOOPBACK = 1, 772
_UP = InterfaceFlag.UP | InterfaceFlag.RUNNING | InterfaceFlag.LOWER_UP
_LOOPBACK_MTU, _ETHERNET_MTU = 16384, 1500

# Addresses of documentation prefixes. Connecting a UDP socket to one sends nothing, and gives the source address of the
# default route.
_DOCUMENTATION_HOSTS = ((AF_INET, "192.0.2.1"), (AF_INET6, "2001:db8::1"))


def _source_for(family: int, host: str) -> tuple[str, int] | None:
    """The source address for a destination, with its scope; None if it cannot be reached."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, ROCE_PORT))
        name = sock.getsockname()
        return _without_scope(name[0]), int(name[3]) if family == AF_INET6 else 0
    return None


def _without_scope(host: object) -> str:
    return str(host).partition("%")[0]


class PortableNetwork:
    """:class:`rdmacm.net.Network` without netlink."""

    sees_neighbours = False

    def __init__(self) -> None:
        self.boot_key: bytes = boot_key()

    def interfaces(self) -> list[Interface]:
        found = []
        for index, name in socket.if_nameindex():
            loopback = name.startswith("lo")
            found.append(
                Interface(
                    index,
                    name,
                    _UP | (InterfaceFlag.LOOPBACK if loopback else InterfaceFlag.MULTICAST),
                    _LOOPBACK_MTU if loopback else _ETHERNET_MTU,
                    _ARPHRD_LOOPBACK if loopback else _ARPHRD_ETHER,
                    b"",
                )
            )
        return found

    def addresses(self) -> list[InterfaceAddress]:
        """127.0.0.1, ::1, and the host's addresses for which an interface can be found."""
        interfaces = self.interfaces()
        loopback = next((i.index for i in interfaces if i.is_loopback), 0)
        # Wired and wireless interfaces first, because virtual ones rarely have the source address.
        interfaces.sort(key=lambda i: not i.name.startswith(("en", "eth", "wl")))
        others = [i.index for i in interfaces if not i.is_loopback]
        hosts: dict[tuple[int, str], int] = {}
        for family, host in ((AF_INET, "127.0.0.1"), (AF_INET6, "::1"), *_DOCUMENTATION_HOSTS):
            if (source := _source_for(family, host)) is not None:
                hosts.setdefault((family, source[0]), source[1])
        with contextlib.suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM):
                if family in (AF_INET, AF_INET6):
                    scope = int(address[3]) if family == AF_INET6 and len(address) > 3 else 0
                    hosts.setdefault((int(family), _without_scope(address[0])), scope)
        found = []
        for (ip_family, host), scope in hosts.items():
            ip = socket.inet_pton(ip_family, host)
            is_loopback = ip[0] == 127 if ip_family == AF_INET else ip == bytes(15) + b"\x01"
            # A socket does not tell which interface has a global address. If there are several, take the first.
            index = loopback if is_loopback else scope or (others[0] if others else 0)
            if index:
                bits = 8 if is_loopback and ip_family == AF_INET else len(ip) * 8
                found.append(InterfaceAddress(ip_family, ip, bits, index))
        return found

    def route(self, family: int, destination: bytes, source: bytes | None, ifindex: int, tos: int) -> RouteEntry:
        host = socket.inet_ntop(family, destination)
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            if source is not None:
                where = socket.inet_ntop(family, source)
                try:
                    sock.bind((where, 0) if family == AF_INET else (where, 0, 0, ifindex))
                except OSError as error:
                    raise OSError(errno.EINVAL, f"{where} is not an address of this host") from error
            sock.connect((host, ROCE_PORT) if family == AF_INET else (host, ROCE_PORT, 0, ifindex))
            name = sock.getsockname()
        chosen = socket.inet_pton(family, _without_scope(name[0]))
        owner = next((a.ifindex for a in self.addresses() if a.ip == chosen), ifindex)
        kind = "local" if chosen == destination or (destination[0] == 127 and family == AF_INET) else "unicast"
        return RouteEntry(kind, destination, owner, None, chosen, 0)

    def neighbour(self, family: int, ifindex: int, ip: bytes) -> Neighbour | None:
        return None

    def probe(self, family: int, ifindex: int, ip: bytes, destination: bytes | None = None) -> None:
        pass

    def open(self) -> None:
        pass

    def watch(self, on: bool) -> None:
        pass

    def watch_neighbours(self) -> None:
        pass

    def changes(self) -> Change | None:
        return None

    def fileno(self) -> int:
        return -1

    def link_speed(self, name: str) -> int:
        return 0

    def setting(self, name: str, *default: int) -> tuple[int, ...]:
        return default

    def close(self) -> None:
        pass
