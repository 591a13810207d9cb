"""UDP sockets for RoCEv2 packets, and the ancillary data of datagrams.

A packet's ICRC covers the identification of its IPv4 header. An unconnected socket that must not fragment
(IP_PMTUDISC_DO) sends 0 there, and 0, 1, 2... in the packets that UDP_SEGMENT makes of one buffer. All sockets are made
here, with these options.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable
from socket import AF_INET, AF_INET6

from rdmacm.errors import RdmaError, cm_error
from rdmacm.soft.processes import process_text
from rdmacm.soft.wire.base import IpFields, Undelivered

FAMILIES = (AF_INET, AF_INET6)


# Numbers of Linux: the socket module of Python 3.11 has few of them.
SOL_UDP = 17
UDP_SEGMENT, UDP_GRO = 103, 104
_UDP_NO_CHECK6_RX = 102
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_DO = 10, 23, 2
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_ORIGIN_ICMP, _ORIGIN_ICMP6 = 2, 3
_IP_MULTICAST_ALL, _IPV6_MULTICAST_ALL = 49, 29
_IP_RECVTTL = 12
#: The ancillary messages with the type of service or traffic class, and with the time to live or hop limit.
_TRAFFIC_CLASS = ((socket.IPPROTO_IP, socket.IP_TOS), (socket.IPPROTO_IPV6, socket.IPV6_TCLASS))
_HOP_LIMIT = ((socket.IPPROTO_IP, socket.IP_TTL), (socket.IPPROTO_IPV6, socket.IPV6_HOPLIMIT))

_IS_LINUX = sys.platform == "linux"

#: Whether the system reports packets that were not delivered. Then sendmsg(2) and recvmsg(2) fail with the errno of
#: such a packet, whatever they are called for, and sendmsg(2) has not sent its packet. The failure clears the error.
REPORTS_ERRORS = _IS_LINUX
_IP_PKTINFO = 8 if _IS_LINUX else 26
_IPV6_PKTINFO: int = getattr(socket, "IPV6_PKTINFO", 50)

#: The ancillary message with the destination address of a packet, and where in it the address begins and ends.
PACKET_INFO = {AF_INET: (_IP_PKTINFO, 8, 12), AF_INET6: (_IPV6_PKTINFO, 0, 16)}

#: Bytes of ancillary data of a received datagram at most: in6_pktinfo, the segment size, and two fields of the header.
ANCILLARY_SPACE = 128

#: The size requested for send and receive buffers, in bytes; the system gives what it allows. A path with a large
#: bandwidth-delay product has megabytes under way.
_QUEUE_BYTES = 4 << 20

_IN_PKTINFO = struct.Struct("=I4s4s")
_IN6_PKTINFO = struct.Struct("=16sI")
_IP_MREQN = struct.Struct("=4s4si")
_IPV6_MREQ = struct.Struct("=16si")
_INT = struct.Struct("=i")
_U16 = struct.Struct("=H")
#: errno, origin, type and code of struct sock_extended_err, which the reporter's socket address follows.
_EXTENDED_ERROR = struct.Struct("=IBBB9x")
_REPORTER = {_ORIGIN_ICMP: slice(20, 24), _ORIGIN_ICMP6: slice(24, 40)}
#: (origin, type, code) of a firewall's refusal: network, host, communication prohibited. Of IPv4, the kernel's errno
#: says "unreachable" (RFC 1812, 5.2.7.1); of IPv6 it says EACCES.
_PROHIBITED = {(_ORIGIN_ICMP, 3, code) for code in (9, 10, 13)}
#: How many bytes of an undelivered packet are read: they include the service id of a request.
_QUOTE_BYTES = 64
_ERROR_SPACE = 256
#: Errors that are discarded from a socket at once. No socket has more.
_STALE_ERRORS = 1 << 15

Control = list[tuple[int, int, bytes]]


def try_option(sock: socket.socket, level: int, option: int, value: int) -> bool:
    """Set a socket option; False if the system refuses."""
    try:
        sock.setsockopt(level, option, value)
    except OSError:
        return False
    return True


def set_queue_bytes(sock: socket.socket, count: int = _QUEUE_BYTES) -> None:
    """Have the system queue as many bytes in each direction, or what it allows; it allows a few thousand at least."""
    for forced, option in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        if not (_IS_LINUX and try_option(sock, socket.SOL_SOCKET, forced, count)):
            try_option(sock, socket.SOL_SOCKET, option, count)


def _set_options(sock: socket.socket, family: int) -> None:
    """Set the options that every socket has. OSError if one fails that is needed."""
    set_queue_bytes(sock)
    if family == AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    if not _IS_LINUX:
        return
    # With MULTICAST_ALL a socket bound to every address gets the packets of all groups that the host is a member of.
    if family == AF_INET:
        try_option(sock, socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
        try_option(sock, socket.IPPROTO_IP, _IP_RECVERR, 1)
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_DO)
    else:
        try_option(sock, socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL, 0)
        try_option(sock, socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_DO)
        # Adapters send RoCEv2 over IPv6 with a UDP checksum of 0. By default the system drops such packets.
        sock.setsockopt(SOL_UDP, _UDP_NO_CHECK6_RX, 1)


def open_socket(family: int, port: int, *, shared: bool = False) -> socket.socket | None:
    """Return a socket bound to a port of every address of a family, or None if the host does not have the family.

    With ``shared``, other processes of this user can bind the port too. EADDRINUSE if the port is taken.
    """
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        if family == AF_INET6 and error.errno in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EINVAL):
            return None
        raise
    try:
        sock.setblocking(False)
        _set_options(sock, family)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("::" if family == AF_INET6 else "", port))
    except OSError as error:
        sock.close()
        if family == AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return sock


def open_group_socket(group: bytes, ifindex: int, port: int) -> socket.socket:
    """Return a socket that receives the packets of a multicast group which arrive at an interface.

    It is bound to the group's address. So it is not among the sockets of the port that are bound to every address, and
    the kernel gives it a copy of each packet, beside those of other processes. OSError if it cannot be a member.
    """
    family = AF_INET if len(group) == 4 else AF_INET6
    host = socket.inet_ntop(family, group)
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        _set_options(sock, family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port) if family == AF_INET else (host, port, 0, ifindex))
        join_group(sock, group, ifindex)
    except OSError:
        sock.close()
        raise
    return sock


def join_group(sock: socket.socket, group: bytes, ifindex: int, *, leave: bool = False) -> None:
    """Make a socket a member of a multicast group at an interface; with ``leave`` end that."""
    if len(group) == 4:
        option = socket.IP_DROP_MEMBERSHIP if leave else socket.IP_ADD_MEMBERSHIP
        sock.setsockopt(socket.IPPROTO_IP, option, _IP_MREQN.pack(group, bytes(4), ifindex))
    else:
        option = socket.IPV6_LEAVE_GROUP if leave else socket.IPV6_JOIN_GROUP
        sock.setsockopt(socket.IPPROTO_IPV6, option, _IPV6_MREQ.pack(group, ifindex))


def set_trains(sock: socket.socket, on: bool) -> bool:
    """Receive packets as trains if the system can. Return whether it can send trains."""
    if not _IS_LINUX:
        return False
    try_option(sock, SOL_UDP, UDP_GRO, on)
    # A system without UDP_SEGMENT would send a train as a single datagram.
    return on and try_option(sock, SOL_UDP, UDP_SEGMENT, 0)


def report_ip_fields(sock: socket.socket) -> None:
    """Have what :func:`ip_fields` reads in the ancillary data of received packets, if the system can."""
    if sock.family == AF_INET:
        options = socket.IPPROTO_IP, _IP_RECVTTL, socket.IP_RECVTOS
    else:
        options = socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, socket.IPV6_RECVTCLASS
    level, *names = options
    for name in names:
        try_option(sock, level, name, 1)


def ip_fields(ancillary: Iterable[tuple[int, int, bytes]]) -> IpFields:
    """The fields of the IP header of a packet that was received with this ancillary data."""
    traffic_class, hop_limit = IpFields()
    for level, kind, value in ancillary:
        if (level, kind) in _TRAFFIC_CLASS:
            traffic_class = int.from_bytes(value[:4], sys.byteorder)  # IPv4's is one byte
        elif (level, kind) in _HOP_LIMIT:
            hop_limit = int.from_bytes(value[:4], sys.byteorder)
    return IpFields(traffic_class & 0xFF, hop_limit & 0xFF)


def control(local: bytes, scope_id: int, traffic_class: int, hop_limit: int = 0) -> Control:
    """The ancillary data of datagrams from an address, through an interface if ``scope_id`` is not 0.

    Traffic class 0 and hop limit 0 are those of the system.
    """
    is_ipv4 = len(local) == 4
    level = socket.IPPROTO_IP if is_ipv4 else socket.IPPROTO_IPV6
    if is_ipv4:
        found = [(level, _IP_PKTINFO, _IN_PKTINFO.pack(scope_id, local, bytes(4)))]
    else:
        found = [(level, _IPV6_PKTINFO, _IN6_PKTINFO.pack(local, scope_id))]
    if traffic_class:
        found.append((level, socket.IP_TOS if is_ipv4 else socket.IPV6_TCLASS, _INT.pack(traffic_class)))
    if hop_limit:
        found.append((level, socket.IP_TTL if is_ipv4 else socket.IPV6_HOPLIMIT, _INT.pack(hop_limit)))
    return found


def segment_control(segment: int) -> tuple[int, int, bytes]:
    """The ancillary message that makes the system send a buffer as packets of ``segment`` bytes."""
    return SOL_UDP, UDP_SEGMENT, _U16.pack(segment)


# -- packets that were not delivered ------------------------------------------------------------------------------


def read_error(sock: socket.socket) -> Undelivered | None:
    """The next report of a packet that was not delivered; None for one that is about a packet's length.

    BlockingIOError if there is none.
    """
    quote, control, _, remote = sock.recvmsg(_QUOTE_BYTES, _ERROR_SPACE, _MSG_ERRQUEUE)
    family = AF_INET6 if sock.family == AF_INET6 else AF_INET
    wanted = (socket.IPPROTO_IPV6, _IPV6_RECVERR) if family == AF_INET6 else (socket.IPPROTO_IP, _IP_RECVERR)
    for level, kind, value in control:
        if (level, kind) == wanted and len(value) >= _EXTENDED_ERROR.size:
            code, origin, kind_of_icmp, code_of_icmp = _EXTENDED_ERROR.unpack_from(value)
            if (origin, kind_of_icmp, code_of_icmp) in _PROHIBITED:
                code = errno.EACCES
            if origin in _REPORTER and remote:
                destination = socket.inet_pton(family, remote[0].partition("%")[0])
                return Undelivered(quote, destination, code, value[_REPORTER[origin]])
    return None


def discard_errors(sock: socket.socket) -> None:
    """Discard all reports, and the error that the next call would fail with."""
    with contextlib.suppress(OSError):
        for _ in range(_STALE_ERRORS):
            sock.recv(1, _MSG_ERRQUEUE)
    sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


# -- the owner of a port -----------------------------------------------------------------------------------------


def _listed(family: int, port: int) -> list[tuple[bool, int, int]]:
    """(bound to every address, user, inode) of the sockets of a port in this thread's network namespace."""
    path = "/proc/thread-self/net/" + ("udp" if family == AF_INET else "udp6")
    found = []
    try:
        with open(path) as file:
            next(file)
            for line in file:
                fields = line.split(None, 10)
                address, _, number = fields[1].partition(":")
                if int(number, 16) == port:
                    found.append((not address.strip("0"), int(fields[7]), int(fields[9])))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    return found


def wildcard_sockets(family: int, port: int) -> int:
    """How many sockets are bound to a port of every address; 0 if the system does not report it."""
    return sum(wildcard for wildcard, _, _ in _listed(family, port))


def _owner(inode: int) -> int:
    """The process that has a socket open, 0 if it cannot be found."""
    link = f"socket:[{inode}]"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                # A descriptor may be closed by now. In this process, the one that listed the directory is.
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}") == link:
                        return int(pid)
    return 0


def bind_error(code: int, port: int) -> RdmaError:
    """The error of a port that could not be bound, with its owner if the system reports that."""
    where = f"UDP port {port}"
    if code != errno.EADDRINUSE:
        return cm_error(code, f"the port cannot be bound ({os.strerror(code)})", "open_device", where)
    for family in FAMILIES:
        for _, user, inode in _listed(family, port):
            pid = _owner(inode) if inode else 0
            if not pid and user == 0:  # the kernel's sockets are root's, and in no process
                text = "the port is in use by the kernel itself (rdma_rxe), or by a process of root that is not shown"
                hint = (
                    "'modprobe -r rdma_rxe' (the kernel keeps the port when the last link is deleted); a network "
                    "namespace without rdma_rxe; or the provider kernel, with an address that 'rdmacm devices' shows "
                    "(rdmacm doctor D10)"
                )
                return cm_error(code, text, "open_device", where, hint)
            who = f"{process_text(pid)} of user {user}" if pid else f"a process of user {user}"
            return cm_error(code, f"the port is in use by {who}", "open_device", where, hint="end that process")
    return cm_error(code, "the port is in use by another process", "open_device", where, hint="`ss -uanp` shows it")
