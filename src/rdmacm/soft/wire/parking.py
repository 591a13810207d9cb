"""The queue in which the kernel keeps the sockets of all slots of a port group.

The kernel keeps the sockets of a port in the order in which they were bound. When one is closed it moves the last one
to its place. So the sockets of a slot must not be closed while any process of the group lives. They are *parked*: they
are in messages that nobody takes out of the queue of a socket pair, of which every process holds both ends.

The queue only grows, and is read with SO_PEEK_OFF. Its first messages hold the sockets of one position each, and the
later ones those of several positions, so that all positions fit into the send buffer of a process without privileges:
212,992 bytes by default (net.core.wmem_max), which the kernel doubles, and of which a message takes 768 or more.

All calls need the record lock of the group, because its processes share the offset of SO_PEEK_OFF.
"""

from __future__ import annotations

import array
import errno
import fcntl
import resource
import socket
import struct
import termios
from collections.abc import Sequence

from rdmacm.errors import cm_error
from rdmacm.proto.constants import MAX_SLOT

#: This many positions have a message of their own.
_SINGLE = 128
#: The others have one together with as many positions. A message holds 253 descriptors at most.
_BATCH = 32
#: What the queue may take. The kernel gives what net.core.wmem_max allows.
_QUEUE_BYTES = 1 << 20

_SO_PEEK_OFF = 42
#: A message: its first position.
_LABEL = struct.Struct("=H")
#: As a number, since the operators of an enumeration are functions in Python.
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_INT = array.array("i").itemsize


def rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """The ancillary data that sends copies of descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]


def receive_rights(sock: socket.socket, size: int, count: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it. (socket.recv_fds() of Python 3.11 ignores its flags.)"""
    message, control, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(count * _INT), flags | _CLOEXEC)
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _INT])
    return message, list(fds)


class Parking:
    """See the module. ``families`` is how many sockets a position has."""

    def __init__(self, ends: Sequence[socket.socket], families: int) -> None:
        #: The ends of the socket pair, to write and to read.
        self.ends = ends
        self._families = families
        for sock in ends:
            sock.setblocking(False)

    @classmethod
    def create(cls, families: int) -> Parking:
        """A new queue."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        return cls(ends, families)

    def close(self) -> None:
        """Close this process's copies of the descriptors."""
        for sock in self.ends:
            sock.close()

    def last_position(self) -> int:
        """The last position whose sockets are parked; 0 if there is none."""
        unread = array.array("i", (0,))
        fcntl.ioctl(self.ends[1].fileno(), termios.FIONREAD, unread)
        return min(_first_position(unread[0] // _LABEL.size) - 1, MAX_SLOT)

    def next_positions(self) -> range:
        """The positions whose sockets have to be parked next, together; empty if all are."""
        first = self.last_position() + 1
        return range(first, min(first + (1 if first <= _SINGLE else _BATCH), MAX_SLOT + 1))

    def park(self, first: int, fds: Sequence[int]) -> None:
        """Keep the sockets of :meth:`next_positions`, those of ``first`` in the order of families, then the others'.

        The system counts the descriptors of all messages of a user. If they are more than the limit of open files
        of a process, only the hard limit counts. ETOOMANYREFS beyond it, EAGAIN if the send buffer is too small.
        """
        message = [_LABEL.pack(first)], rights(fds)
        try:
            self.ends[0].sendmsg(*message)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
            try:
                self.ends[0].sendmsg(*message)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def copies(self, position: int) -> list[socket.socket]:
        """New descriptors of the sockets at a position, in the order of families. EMFILE if they did not arrive."""
        number, place = _message_of(position)
        self.ends[1].setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, number * _LABEL.size)
        begin, end = place * self._families, (place + 1) * self._families
        label, fds = receive_rights(self.ends[1], _LABEL.size, end, socket.MSG_PEEK)
        received = [socket.socket(fileno=fd) for fd in fds]
        wanted = received[begin:end]
        for sock in (*received[:begin], *received[end:]):
            sock.close()
        if label != _LABEL.pack(position - place) or len(wanted) != self._families:
            for sock in wanted:
                sock.close()
            raise cm_error(
                errno.EMFILE,
                f"{end} descriptors of the port group's sockets did not arrive",
                "open_device",
                hint="raise the limit of open files (RLIMIT_NOFILE)",
            )
        return wanted


def _first_position(number: int) -> int:
    """The first position of a message."""
    return min(number, _SINGLE) + max(number - _SINGLE, 0) * _BATCH + 1


def _message_of(position: int) -> tuple[int, int]:
    """The number of the message with a position, and the position's place in it."""
    if position <= _SINGLE:
        return position - 1, 0
    number, place = divmod(position - 1 - _SINGLE, _BATCH)
    return number + _SINGLE, place
