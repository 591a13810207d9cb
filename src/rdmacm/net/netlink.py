"""Links, addresses, routes and neighbours from Linux's rtnetlink, with the standard library alone.

There are two unprivileged sockets. ``_query`` sends one request at a time and reads its reply; ``_monitor`` only
receives notifications. Each is opened at its first use.

A route that is asked for again within a second is kept, and from then on the kernel reports changes of routes: its
notification is on the monitor before the change returns to who makes it. The first such change ends both, so that a
host whose routes change all the time costs nothing.

Message layouts: rtnetlink(7), ``linux/rtnetlink.h``, ``linux/if_link.h``, ``linux/neighbour.h``. Integers are in native
byte order. Although the peer is the kernel, lengths are checked: a message with an invalid length ends the parsing of
its buffer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from socket import AF_INET, AF_INET6

from rdmacm.address import is_link_local
from rdmacm.net.boot import boot_key
from rdmacm.net.types import ROCE_PORT, Change, Interface, InterfaceAddress, Neighbour, NeighbourState, RouteEntry

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ATTR = struct.Struct("=HH")  # rtattr: length, type
_IFINFO = struct.Struct("=BxHiII")  # ifinfomsg: family, ARP type, index, flags, change
_IFADDR = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
_RTMSG = struct.Struct("=BBBBBBBBI")  # rtmsg: family, dst/src length, tos, table, protocol, scope, type, flags
_NDMSG = struct.Struct("=BxxxiHBB")  # ndmsg: family, index, state, flags, type
_INT = struct.Struct("=i")
_UINT = struct.Struct("=I")

_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_NEWRULE, _DELRULE = 32, 33

_SOL_NETLINK, _ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 270, 1, 2
_GROUP_LINK, _GROUP_NEIGH = 1, 3
_GROUP_IPV4_ADDR, _GROUP_IPV4_ROUTE, _GROUP_IPV4_RULE = 5, 7, 8
_GROUP_IPV6_ADDR, _GROUP_IPV6_ROUTE, _GROUP_IPV6_RULE = 9, 11, 19
#: The groups of notifications that are always received, and those that only :meth:`NetlinkNetwork.watch` joins.
_LINK_GROUPS = frozenset((_GROUP_LINK, _GROUP_IPV4_ADDR, _GROUP_IPV6_ADDR))
_ROUTE_GROUPS = frozenset((_GROUP_IPV4_ROUTE, _GROUP_IPV6_ROUTE, _GROUP_IPV4_RULE, _GROUP_IPV6_RULE))

# The attributes that are read or sent, by the kind of message.
_IFLA_ADDRESS, _IFLA_BROADCAST, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_INFO_SLAVE_KIND = 1, 2, 3, 4, 18, 4
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_NDA_DST, _NDA_LLADDR = 1, 2
_RTA_DST, _RTA_SRC, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC, _RTA_METRICS, _RTA_TABLE, _RTA_VIA = 1, 2, 4, 5, 7, 8, 15, 18
_RTA_IP_PROTO, _RTA_DPORT = 27, 29
_RTAX_MTU, _RTAX_HOPLIMIT = 2, 10
#: Of the type of an attribute: the bits above are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
_ATTR_TYPE_MASK = 0x3FFF

_LOOKUP_TABLE = 0x1000  # RTM_F_LOOKUP_TABLE: report the table the answer came from
#: Route types (``RTN_*``) by number.
_ROUTE_KINDS = {
    1: "unicast",
    2: "local",
    3: "broadcast",
    4: "anycast",
    5: "multicast",
    6: "blackhole",
    7: "unreachable",
    8: "prohibit",
    9: "throw",
}
#: The errors of route types that forbid sending, as the kernel's.
_ROUTE_ERRORS = {
    "blackhole": errno.EINVAL,
    "unreachable": errno.EHOSTUNREACH,
    "prohibit": errno.EACCES,
    "throw": errno.ENETUNREACH,
}

#: Routing rules may match the protocol and port ("ip rule add ipproto udp dport 4791"), so a route request has those of
#: RoCEv2 packets.
_ROCE_FLOW = (
    _ATTR.pack(5, _RTA_IP_PROTO)
    + struct.pack("B3x", socket.IPPROTO_UDP)
    + _ATTR.pack(6, _RTA_DPORT)
    + struct.pack("!H2x", ROCE_PORT)
)

#: The highest errno of the kernel.
_MAX_ERRNO = 4095

#: IFA_F_TENTATIVE and IFA_F_DADFAILED: duplicate address detection is going on, or has failed.
_TENTATIVE, _DADFAILED = 0x40, 0x08

_IP_PKTINFO = 8  # linux/in.h
#: The discard service, to which the empty datagrams that make the kernel resolve a neighbour are sent.
_DISCARD_PORT = 9


def _attributes(data: memoryview, offset: int) -> Iterator[tuple[int, memoryview]]:
    """The (type, value) pairs of the attributes from ``offset`` on."""
    end = len(data)
    while offset + 4 <= end:
        length, kind = _ATTR.unpack_from(data, offset)
        if length < 4 or offset + length > end:
            return
        yield kind & _ATTR_TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _messages(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The (type, sequence number, body) of each message in a datagram."""
    offset, end = 0, len(data)
    while offset + 16 <= end:
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < 16 or offset + length > end:
            return
        yield kind, sequence, data[offset + 16 : offset + length]
        offset += (length + 3) & ~3


def _error_code(body: memoryview) -> int:
    """The errno of an error message, 0 for none; EPROTO for a message that has no valid one."""
    code = -_INT.unpack_from(body)[0] if len(body) >= 4 else errno.EPROTO
    return code if 0 <= code <= _MAX_ERRNO else errno.EPROTO


def _text(value: memoryview) -> str:
    return bytes(value).split(b"\0", 1)[0].decode(errors="replace")


def _ip(value: memoryview) -> bytes | None:
    return bytes(value) if len(value) in (4, 16) else None


def _parse_link(body: memoryview) -> Interface | None:
    if len(body) < _IFINFO.size:
        return None
    _, arp_type, index, flags, _ = _IFINFO.unpack_from(body)
    name, mtu, address, broadcast, slave_kind = "", 0, b"", b"", None
    for kind, value in _attributes(body, _IFINFO.size):
        if kind == _IFLA_IFNAME:
            name = _text(value)
        elif kind == _IFLA_MTU and len(value) >= 4:
            mtu = _UINT.unpack_from(value)[0]
        elif kind == _IFLA_ADDRESS:
            address = bytes(value)
        elif kind == _IFLA_BROADCAST:
            broadcast = bytes(value)
        elif kind == _IFLA_LINKINFO:
            for info, text in _attributes(value, 0):
                if info == _IFLA_INFO_SLAVE_KIND:
                    slave_kind = _text(text)
    return Interface(index, name, flags, mtu, arp_type, address, slave_kind, broadcast)


def _parse_address(body: memoryview) -> InterfaceAddress | None:
    if len(body) < _IFADDR.size:
        return None
    family, prefix_length, flags, _, index = _IFADDR.unpack_from(body)
    if family not in (AF_INET, AF_INET6):
        return None
    size = 4 if family == AF_INET else 16
    local = peer = None
    for kind, value in _attributes(body, _IFADDR.size):
        if kind == _IFA_LOCAL:
            local = bytes(value)
        elif kind == _IFA_ADDRESS:  # on a point-to-point link the peer's, else the same as IFA_LOCAL
            peer = bytes(value)
        elif kind == _IFA_FLAGS and len(value) >= 4:  # all 32 bits; the header has the lower 8
            flags = _UINT.unpack_from(value)[0]
    ip = local or peer
    if ip is None or len(ip) != size:
        return None
    return InterfaceAddress(family, ip, prefix_length, index, not flags & (_TENTATIVE | _DADFAILED))


def _parse_neighbour(body: memoryview) -> Neighbour | None:
    if len(body) < _NDMSG.size:
        return None
    _, index, state, _, _ = _NDMSG.unpack_from(body)
    ip = link_layer = b""
    for kind, value in _attributes(body, _NDMSG.size):
        if kind == _NDA_DST:
            ip = bytes(value)
        elif kind == _NDA_LLADDR:
            link_layer = bytes(value)
    try:
        return Neighbour(index, ip, NeighbourState(state), link_layer)
    except ValueError:
        return Neighbour(index, ip, NeighbourState.NONE, link_layer)


def _parse_route(body: memoryview, destination: bytes) -> RouteEntry:
    fields = _RTMSG.unpack_from(body)
    kind = _ROUTE_KINDS.get(fields[7], "unicast")
    if kind in _ROUTE_ERRORS:
        raise OSError(_ROUTE_ERRORS[kind], f"{kind} route")
    ifindex, gateway, source, table, mtu, hop_limit = 0, None, None, fields[4], 0, 0
    for what, value in _attributes(body, _RTMSG.size):
        if what == _RTA_OIF and len(value) >= 4:
            ifindex = _INT.unpack_from(value)[0]
        elif what == _RTA_PREFSRC:
            source = _ip(value)
        elif what == _RTA_GATEWAY:
            gateway = _ip(value)
        elif what == _RTA_VIA:  # two bytes of address family, then a gateway of that family
            gateway = _ip(value[2:])
        elif what == _RTA_TABLE and len(value) >= 4:
            table = _UINT.unpack_from(value)[0]
        elif what == _RTA_METRICS:
            for metric, number in _attributes(value, 0):
                if metric == _RTAX_MTU and len(number) >= 4:
                    mtu = _UINT.unpack_from(number)[0]
                elif metric == _RTAX_HOPLIMIT and len(number) >= 4:
                    hop_limit = _UINT.unpack_from(number)[0]
    return RouteEntry(kind, destination, ifindex, gateway, source, table, mtu, hop_limit)


#: Seconds for which routes are kept at the longest, and how many.
_ROUTE_SECONDS = 1.0
_MAX_ROUTES = 1024


class NetlinkNetwork:
    """The :class:`rdmacm.net.Network` of the network namespace in which the sockets are opened.

    Not thread-safe: its owner serialises the calls.
    """

    sees_neighbours = True

    def __init__(self) -> None:
        self.boot_key: bytes = boot_key()
        self._query: socket.socket | None = None
        self._monitor: socket.socket | None = None
        #: UDP sockets that send the datagrams of :meth:`probe`, by address family.
        self._probes: dict[int, socket.socket] = {}
        #: The sequence number of the last request.
        self._sequence = 0
        #: Receives replies and notifications; every message is a view of it, valid until the next call.
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)
        #: The poll object of the monitor: asking it takes a quarter of the time of an empty recv().
        self._unread = select.poll()
        #: The multicast groups of the monitor.
        self._groups: frozenset[int] = frozenset()
        #: Whether the monitor receives notifications of neighbours and routes too.
        self._watching = False
        #: Whether it receives notifications of neighbours until it is closed.
        self._keeps_neighbours = False
        #: The arguments of :meth:`route` in the current second: the route, None if it was asked for once.
        self._routes: dict[tuple[int, bytes, bytes | None, int, int], RouteEntry | None] = {}
        #: When they are forgotten, in seconds of time.monotonic(): the path MTU of a route changes without a report.
        self._routes_expire = 0.0
        #: Whether any is kept.
        self._keeps_routes = False
        #: Whether the kernel can return a single neighbour entry.
        self._has_neighbour_get = True
        self._query_socket()

    def open(self) -> None:
        self._query_socket()
        self._monitor_socket()
        for family in (AF_INET, AF_INET6):
            with contextlib.suppress(OSError):  # a host without IPv6 has no IPv6 neighbours
                self._probe_socket(family)

    # -- requests -------------------------------------------------------------------------------------

    def _query_socket(self) -> socket.socket:
        if self._query is None:
            self._query = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        return self._query

    def _dump(self, kind: int, payload: bytes) -> Iterator[tuple[int, memoryview]]:
        """Request a whole table and yield its messages; OSError with the kernel's errno."""
        sock = self._query or self._query_socket()
        self._sequence = sequence = (self._sequence + 1) & 0xFFFFFFFF
        sock.send(_HEADER.pack(16 + len(payload), kind, _REQUEST | _DUMP, sequence, 0) + payload)
        while True:
            # A reply longer than the buffer would be truncated silently.
            size = sock.recv_into(self._buffer, 0, socket.MSG_PEEK | socket.MSG_TRUNC)
            if size > len(self._buffer):
                self._view.release()
                self._buffer = bytearray(size * 2)
                self._view = memoryview(self._buffer)
            size = sock.recv_into(self._buffer)
            for what, seq, body in _messages(self._view[:size]):
                if seq != sequence:
                    continue  # the rest of an earlier reply that was not read to its end
                if what == _NLMSG_DONE:
                    return
                if what == _NLMSG_ERROR:
                    code = _error_code(body)
                    if code:
                        raise OSError(code, os.strerror(code))
                    return
                yield what, body

    def _request(self, kind: int, payload: bytes, reply_kind: int, min_length: int) -> memoryview:
        """Send a request and return the body of its one reply; OSError with the kernel's errno.

        ``min_length`` is that of the body, in bytes.
        """
        sock = self._query or self._query_socket()
        self._sequence = sequence = (self._sequence + 1) & 0xFFFFFFFF
        sock.send(_HEADER.pack(16 + len(payload), kind, _REQUEST, sequence, 0) + payload)
        while True:
            size = sock.recv_into(self._buffer)
            for what, seq, body in _messages(self._view[:size]):
                if seq != sequence:
                    continue  # the rest of an earlier reply that was not read to its end
                if what == reply_kind and len(body) >= min_length:
                    return body
                code = (_error_code(body) if what == _NLMSG_ERROR else 0) or errno.EPROTO
                raise OSError(code, os.strerror(code))

    def interfaces(self) -> list[Interface]:
        parsed = [_parse_link(b) for k, b in self._dump(_GETLINK, _IFINFO.pack(0, 0, 0, 0, 0)) if k == _NEWLINK]
        return [link for link in parsed if link]

    def addresses(self) -> list[InterfaceAddress]:
        parsed = [_parse_address(b) for k, b in self._dump(_GETADDR, bytes(_IFADDR.size)) if k == _NEWADDR]
        return [address for address in parsed if address]

    def route(self, family: int, destination: bytes, source: bytes | None, ifindex: int, tos: int) -> RouteEntry:
        now, asked = time.monotonic(), (family, destination, source, ifindex, tos)
        if now >= self._routes_expire or len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
            self._routes_expire = now + _ROUTE_SECONDS
        if self._keeps_routes and self._unread.poll(0):
            self._routes.clear()
        route = self._routes.get(asked)
        if route is not None:
            return route
        is_kept = asked in self._routes and self._monitor is not None
        if is_kept and not self._keeps_routes:
            self._keeps_routes = True
            self._update_groups()
        route = self._query_route(*asked)
        self._routes[asked] = route if is_kept else None
        return route

    def _query_route(self, family: int, destination: bytes, source: bytes | None, ifindex: int, tos: int) -> RouteEntry:
        size = len(destination)
        bits = size * 8
        payload = (
            _RTMSG.pack(family, bits, bits if source else 0, tos & 0xFC, 0, 0, 0, 0, _LOOKUP_TABLE)
            + _ATTR.pack(4 + size, _RTA_DST)
            + destination
        )
        if source:
            payload += _ATTR.pack(4 + size, _RTA_SRC) + source
        if ifindex:
            payload += _ATTR.pack(8, _RTA_OIF) + _UINT.pack(ifindex)  # unsigned, because a user may pass any scope_id
        return _parse_route(self._request(_GETROUTE, payload + _ROCE_FLOW, _NEWROUTE, _RTMSG.size), destination)

    def neighbour(self, family: int, ifindex: int, ip: bytes) -> Neighbour | None:
        request = _NDMSG.pack(family, ifindex, 0, 0, 0)
        if self._has_neighbour_get:
            try:
                payload = request + _ATTR.pack(4 + len(ip), _NDA_DST) + ip
                return _parse_neighbour(self._request(_GETNEIGH, payload, _NEWNEIGH, _NDMSG.size))
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return None
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._has_neighbour_get = False  # before Linux 5.0
        found = None
        for kind, body in self._dump(_GETNEIGH, request):
            if kind == _NEWNEIGH:
                entry = _parse_neighbour(body)
                if entry and entry.ifindex == ifindex and entry.ip == ip:
                    found = entry
        return found

    def _probe_socket(self, family: int) -> socket.socket:
        sock = self._probes.get(family)
        if sock is None:
            sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            if family == AF_INET:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 1)
            self._probes[family] = sock
        return sock

    def probe(self, family: int, ifindex: int, ip: bytes, destination: bytes | None = None) -> None:
        # To send an empty datagram to the next hop, the kernel must resolve it first. Unlike a probe by netlink
        # (NTF_USE) this needs no privilege. The hop limit is 1. Errors are ignored, since the resolver has a timeout.
        with contextlib.suppress(OSError):
            sock = self._probe_socket(family)
            if family == AF_INET:
                control = (socket.IPPROTO_IP, _IP_PKTINFO, _INT.pack(ifindex) + bytes(8))
                sock.sendmsg([b""], [control], socket.MSG_DONTROUTE, (socket.inet_ntop(family, ip), _DISCARD_PORT))
            else:
                control = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, bytes(16) + _INT.pack(ifindex))
                # IPv6 has no MSG_DONTROUTE. A gateway outside every prefix (an "onlink" route) is resolved only by a
                # datagram to the destination, which the hop limit of 1 ends at the gateway.
                beyond = None if is_link_local(ip) else destination
                for host in (ip, beyond):
                    if host is not None and len(host) == 16:
                        where = (socket.inet_ntop(family, host), _DISCARD_PORT, 0, ifindex)
                        with contextlib.suppress(OSError):
                            sock.sendmsg([b""], [control], 0, where)

    # -- changes --------------------------------------------------------------------------------------

    def _monitor_socket(self) -> socket.socket:
        if self._monitor is None:
            self._monitor = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                socket.NETLINK_ROUTE,
            )
            self._monitor.bind((0, 0))
            self._unread.register(self._monitor, select.POLLIN)
            self._update_groups()
        return self._monitor

    def _update_groups(self) -> None:
        """Make the monitor receive the notifications that are wanted now."""
        monitor, wanted = self._monitor_socket(), _LINK_GROUPS
        if self._watching or self._keeps_neighbours:
            wanted |= {_GROUP_NEIGH}
        if self._watching or self._keeps_routes:
            wanted |= _ROUTE_GROUPS
        for group in wanted ^ self._groups:
            monitor.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP if group in wanted else _DROP_MEMBERSHIP, group)
        self._groups = wanted

    def watch(self, on: bool) -> None:
        if on is not self._watching:
            self._watching = on
            self._update_groups()

    def watch_neighbours(self) -> None:
        if not self._keeps_neighbours:
            self._keeps_neighbours = True
            self._update_groups()

    def changes(self) -> Change | None:
        monitor = self._monitor or self._monitor_socket()
        if not self._unread.poll(0):
            return None
        links = routes = lost = False
        neighbours: list[Neighbour] = []
        while True:
            try:
                size = monitor.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
                continue
            for kind, _, body in _messages(self._view[:size]):
                if kind in (_NEWLINK, _DELLINK, _NEWADDR, _DELADDR):
                    links = True
                elif kind in (_NEWROUTE, _DELROUTE, _NEWRULE, _DELRULE):
                    routes = True
                elif kind in (_NEWNEIGH, _DELNEIGH):
                    entry = _parse_neighbour(body)
                    if entry:
                        neighbours.append(entry)
        if links or routes or lost:
            self._routes.clear()
            if self._keeps_routes:
                self._keeps_routes = False
                self._update_groups()
        if links or routes or neighbours or lost:
            return Change(links, routes, tuple(neighbours), lost)
        return None

    def fileno(self) -> int:
        return self._monitor_socket().fileno()

    # -- settings -------------------------------------------------------------------------------------

    def link_speed(self, name: str) -> int:
        try:
            with open(f"/sys/class/net/{name}/speed") as file:
                return max(0, int(file.read()))
        except (OSError, ValueError):  # this kind of link has no speed, or the link is down
            return 0

    def setting(self, name: str, *default: int) -> tuple[int, ...]:
        try:
            with open(f"/proc/sys/{name}") as file:
                found = tuple(int(word) for word in file.read().split())
        except (OSError, ValueError):
            return default
        return found if len(found) == len(default) else default

    def _close_probes(self) -> None:
        for sock in self._probes.values():
            sock.close()
        self._probes.clear()

    def close(self) -> None:
        for sock in (self._query, self._monitor):
            if sock is not None:
                sock.close()
        self._query = self._monitor = None
        self._unread, self._groups = select.poll(), frozenset()
        self._watching = self._keeps_neighbours = self._keeps_routes = False
        self._routes.clear()
        self._close_probes()
