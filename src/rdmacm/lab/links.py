"""Make and set the interfaces of a network namespace by rtnetlink(7); no program is needed.

A :class:`Links` works in the namespace in which it is made. Layouts: ``linux/if_link.h``, ``linux/veth.h``,
``linux/pkt_sched.h``. The kernel's answer to each message is awaited.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from ipaddress import ip_interface
from types import TracebackType
from typing import Self

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_IFINFO = struct.Struct("=BxHiII")  # ifinfomsg: family, ARP type, index, flags, change
_IFADDR = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
_TCMSG = struct.Struct("=BxxxiIII")  # tcmsg: family, index, handle, parent, info
_NETEM = struct.Struct("=IIIIII")  # tc_netem_qopt: latency, limit, loss, gap, duplicate, jitter
_ERROR = struct.Struct("=i")

_NLMSG_ERROR = 2
_REQUEST, _ACK, _EXCL, _CREATE = 0x1, 0x4, 0x200, 0x400
_NEWLINK, _DELLINK, _NEWADDR, _NEWQDISC = 16, 17, 20, 36
_IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_TXQLEN, _IFLA_LINKINFO, _IFLA_NET_NS_PID = 3, 4, 10, 13, 18, 19
_IFLA_GSO_MAX_SEGS = 40
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_NODAD = 0x02
_TCA_KIND, _TCA_OPTIONS, _TCA_NETEM_LATENCY64 = 1, 2, 10
_TC_H_ROOT = 0xFFFFFFFF
_IFF_UP = 1
#: Packets that wait in a qdisc: more than the rate of a software device times the delays of a test.
_LIMIT = 100_000


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("=I", value))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")


class Links:
    """The interfaces of the network namespace of this thread. OSError if the kernel refuses something."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def add_veth(self, name: str, mtu: int, peer: str, pid: int) -> None:
        """Make a pair of interfaces, veth(4), of which one is in the namespace of a process."""
        other = _IFINFO.pack(0, 0, 0, 0, 0) + _text(_IFLA_IFNAME, peer) + _number(_IFLA_MTU, mtu)
        other += _number(_IFLA_NET_NS_PID, pid)
        self._add_link(name, "veth", _attribute(_VETH_INFO_PEER, other), _number(_IFLA_MTU, mtu))

    def add_bridge(self, name: str) -> None:
        """Make a bridge."""
        self._add_link(name, "bridge", b"", b"")

    def _add_link(self, name: str, kind: str, data: bytes, more: bytes) -> None:
        info = _text(_IFLA_INFO_KIND, kind) + (_attribute(_IFLA_INFO_DATA, data) if data else b"")
        body = _IFINFO.pack(0, 0, 0, 0, 0) + _text(_IFLA_IFNAME, name) + more + _attribute(_IFLA_LINKINFO, info)
        self._ask(_NEWLINK, _CREATE | _EXCL, body, f"{kind} {name}")

    def remove(self, name: str) -> None:
        """Remove an interface, and its peer."""
        self._ask(_DELLINK, 0, _IFINFO.pack(0, 0, socket.if_nametoindex(name), 0, 0), name)

    def set_up(self, name: str, *, mtu: int | None = None, master: str | None = None, queue: int | None = None) -> None:
        """Set an interface up, with an MTU, as a port of a bridge, with a queue of so many packets."""
        attributes = b"" if mtu is None else _number(_IFLA_MTU, mtu)
        attributes += b"" if master is None else _number(_IFLA_MASTER, socket.if_nametoindex(master))
        attributes += b"" if queue is None else _number(_IFLA_TXQLEN, queue)
        self._set(name, _IFF_UP, attributes)

    def cut_trains(self, name: str) -> None:
        """Let an interface send each packet by itself, as what loses a train would lose many packets at once."""
        self._set(name, 0, _number(_IFLA_GSO_MAX_SEGS, 1))

    def _set(self, name: str, flags: int, attributes: bytes) -> None:
        body = _IFINFO.pack(0, 0, socket.if_nametoindex(name), flags, flags)
        self._ask(_NEWLINK, 0, body + attributes, name)

    def add_address(self, name: str, address: str) -> None:
        """Give an interface an address with its prefix length, which can be used at once."""
        found = ip_interface(address)
        family = socket.AF_INET if found.version == 4 else socket.AF_INET6
        body = _IFADDR.pack(family, found.network.prefixlen, 0, 0, socket.if_nametoindex(name))
        body += _attribute(_IFA_LOCAL, found.ip.packed) + _attribute(_IFA_ADDRESS, found.ip.packed)
        body += _number(_IFA_FLAGS, _IFA_F_NODAD)
        self._ask(_NEWADDR, _CREATE | _EXCL, body, f"{address} on {name}")

    def add_netem(self, name: str, loss: float, delay: float) -> bool:
        """Lose and hold up what an interface sends, tc-netem(8); False if the kernel does not have it."""
        options = _NETEM.pack(0, _LIMIT, round(loss * 0xFFFFFFFF), 0, 0, 0)
        options += _attribute(_TCA_NETEM_LATENCY64, struct.pack("=q", round(delay * 1e9)))
        body = _TCMSG.pack(0, socket.if_nametoindex(name), 0, _TC_H_ROOT, 0)
        body += _text(_TCA_KIND, "netem") + _attribute(_TCA_OPTIONS, options)
        try:
            self._ask(_NEWQDISC, _CREATE | _EXCL, body, f"netem on {name}")
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def _ask(self, kind: int, flags: int, body: bytes, what: str) -> None:
        self._sequence += 1
        length = _HEADER.size + len(body)
        self._socket.send(_HEADER.pack(length, kind, _REQUEST | _ACK | flags, self._sequence, 0) + body)
        while True:
            answer = self._socket.recv(65536)
            _, answered, _, sequence, _ = _HEADER.unpack_from(answer)
            if answered == _NLMSG_ERROR and sequence == self._sequence:
                break
        number = -_ERROR.unpack_from(answer, _HEADER.size)[0]
        if number:
            raise OSError(number, os.strerror(number), what)
