"""The multicast groups that a process receives from, each on one interface.

A group has a socket of its own, bound to the group's address (:func:`rdmacm.soft.wire.sockets.open_group_socket`). The
kernel copies each packet to the sockets of all processes, so nothing is forwarded. The membership is the socket's: the
kernel sends its IGMP or MLD reports, and ends it when the process ends in any way. No other process has a descriptor
of it, as they have of the sockets of a slot.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from socket import AF_INET, AF_INET6

from rdmacm.errors import cm_error
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.base import group_key
from rdmacm.soft.wire.held_reads import ReadMessage

_NATIVE_INT = struct.Struct("=I")


class GroupSource:
    """A socket that receives the packets of one group."""

    __slots__ = ("_at", "_ifindex", "_info", "fd", "key", "recvmsg_into")

    def __init__(self, sock: socket.socket, key: bytes, ifindex: int) -> None:
        self.fd: int = sock.fileno()
        self.recvmsg_into: ReadMessage = sock.recvmsg_into
        #: The destination of its packets (:func:`rdmacm.soft.wire.base.group_key`).
        self.key: bytes = key
        self._ifindex = _NATIVE_INT.pack(ifindex)
        # Where in in_pktinfo or in6_pktinfo the interface is.
        self._at = 16 if sock.family == AF_INET6 else 0
        self._info = sockets.PACKET_INFO[AF_INET6 if sock.family == AF_INET6 else AF_INET][0]

    def has_arrived(self, control: list[tuple[int, int, bytes]]) -> bool:
        """Whether a packet with this ancillary data has arrived at the interface; IPv6 sockets get those of others."""
        at = self._at
        return any(kind == self._info and value[at : at + 4] == self._ifindex for _, kind, value in control)


class GroupSockets:
    """The sockets of the groups, by key (:func:`rdmacm.soft.wire.base.group_key`)."""

    def __init__(self) -> None:
        self._sockets: dict[bytes, socket.socket] = {}

    def join(self, group: bytes, ifindex: int, port: int) -> tuple[socket.socket, GroupSource]:
        """See :meth:`rdmacm.soft.wire.base.Wire.join_group`."""
        key = group_key(group, ifindex)
        try:
            sock = sockets.open_group_socket(group, ifindex, port)
        except OSError as error:
            code = error.errno or errno.EIO
            where = socket.inet_ntop(AF_INET if len(group) == 4 else AF_INET6, group)
            hint = "a larger net.core.optmem_max" if code == errno.ENOBUFS else None
            text = f"the host cannot join the group on interface {ifindex} ({os.strerror(code)})"
            raise cm_error(code, text, "join_multicast", where, hint) from error
        self._sockets[key] = sock
        return sock, GroupSource(sock, key, ifindex)

    def take(self, group: bytes, ifindex: int) -> socket.socket | None:
        """Remove the socket of a group and return it; None if the wire was closed meanwhile."""
        return self._sockets.pop(group_key(group, ifindex), None)

    def close(self) -> None:
        """Leave all groups; in a child of fork(2) this closes the child's copies, and the parent stays a member."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
