"""One connection of a program to the server: requests and replies, with descriptors."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from rdmacm.run import protocol
from rdmacm.soft.wire.parking import rights

#: Descriptors of a request at most; what is beyond that the kernel does not deliver.
_MOST_DESCRIPTORS = 4
_INT = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _INT)
#: As numbers: to combine members of an enumeration takes longer than a system call.
_CLOEXEC, _CUT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class Gone(Exception):
    """The program has closed the connection, or broken the rules of the protocol."""


class Packet(NamedTuple):
    """A request. Its descriptors are the receiver's, to be closed."""

    type: int
    channel: int
    body: bytes
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)


class Connection:
    """See the module."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        #: Whether a request waits for its reply: no other one is read.
        self.is_busy = False

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._sock.fileno()

    def receive(self) -> Packet | None:
        """The next request; None if there is none. Gone if there will be no other one."""
        try:
            data, control, flags, _ = self._sock.recvmsg(protocol.MOST, _ROOM, _CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Gone from error
        fds = array.array("i")
        for level, kind, value in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(value[: len(value) - len(value) % _INT])
        if len(data) < protocol.REQUEST.size or flags & _CUT:
            Packet(0, 0, b"", list(fds)).close()
            raise Gone
        kind, channel = protocol.REQUEST.unpack_from(data)
        return Packet(kind, channel, data[protocol.REQUEST.size :], list(fds))

    def reply(self, error: int, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send a reply. Gone if there is no room: the program asks and does not read the answers."""
        try:
            self._sock.sendmsg([protocol.REPLY.pack(error), body], rights(fds) if fds else [], socket.MSG_NOSIGNAL)
        except OSError as failure:
            raise Gone from failure

    def peer_pid(self) -> int:
        """The process that has connected."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * _INT)
        return array.array("i", credentials)[0]

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._sock.close()


def error_number(error: OSError) -> int:
    """The errno of a reply."""
    return error.errno or errno.EIO
