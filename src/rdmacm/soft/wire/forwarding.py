"""Packets handed from one process of a host to another, over abstract AF_UNIX sockets of the network namespace.

A mailbox is a name. Whoever has something for it connects and keeps the connection, so that an owner that died is
noticed (there is nobody to connect to) and one that is slow is given as much room as a socket's send buffer has. Both
ends make sure that the other one is the same user's.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from rdmacm.proto.wire import Buffer
from rdmacm.soft.wire.base import Received

__all__ = ["Credentials", "Delivery", "Mailbox", "Post", "bound", "credentials"]

_BACKLOG = 256
#: Connections kept at either end: every process of the host may have one.
_KEPT = 256
_QUEUE_BYTES = 4 << 20
_LONGEST = 1 << 16

# address length, port, scope id, segment; remote and local address
_HEADER = struct.Struct("=BxHII16s16s")
_UCRED = struct.Struct("=iii")


class Credentials(NamedTuple):
    """Who is at the other end. ``pid`` is 0 for a process of a PID namespace that cannot be seen from here."""

    pid: int
    uid: int
    gid: int


def credentials(sock: socket.socket) -> Credentials:
    """Of a connection's other end; where that listened, of the last process that called listen(2)."""
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


class Mailbox:
    """What others hand to us at a name, given as a bound socket.

    ``watch(fd, reader)`` and ``unwatch(fd)`` tell what to poll, and what reads it then.
    """

    def __init__(
        self,
        sock: socket.socket,
        watch: Callable[[int, Callable[[list[Received]], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._senders: dict[int, socket.socket] = {}
        self._sock = sock
        sock.listen(_BACKLOG)
        watch(sock.fileno(), self._accept)

    def _accept(self, _: list[Received]) -> None:
        try:
            sender, _ = self._sock.accept()
        except OSError:  # another thread's or process's it was, or no descriptor is left
            return
        if credentials(sender).uid != os.geteuid() or len(self._senders) >= _KEPT:
            sender.close()
            return
        sender.setblocking(False)
        fd = sender.fileno()
        self._senders[fd] = sender
        self._watch(fd, lambda found: self._take(sender, found))

    def _take(self, sender: socket.socket, found: list[Received]) -> None:
        try:
            message = sender.recv(_HEADER.size + _LONGEST)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message:
            if len(message) > _HEADER.size:
                found.append(_unpack(message))
        else:
            fd = sender.fileno()
            self._unwatch(fd)
            del self._senders[fd]
            sender.close()

    def close(self) -> None:
        """Give the name up."""
        for sock in (self._sock, *self._senders.values()):
            if sock.fileno() >= 0:
                self._unwatch(sock.fileno())
                sock.close()
        self._senders.clear()


def bound(name: str) -> socket.socket:
    """A nonblocking socket bound to a name; EADDRINUSE where somebody has that."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.bind("\0" + name)
    except OSError:
        sock.close()
        raise
    return sock


def _unpack(message: bytes) -> Received:
    size, port, scope_id, segment, remote, local = _HEADER.unpack_from(message)
    data = memoryview(message)[_HEADER.size :]
    if size == 4:
        return data, segment, (socket.inet_ntop(socket.AF_INET, remote[:4]), port), local[:4]
    return data, segment, (socket.inet_ntop(socket.AF_INET6, remote), port, 0, scope_id), local


def _pack(received: Received) -> Sequence[Buffer]:
    data, segment, remote, local = received
    family = socket.AF_INET if len(local) == 4 else socket.AF_INET6
    scope_id = remote[3] if len(remote) == 4 else 0
    address = socket.inet_pton(family, remote[0])
    return _HEADER.pack(len(local), remote[1], scope_id, segment, address, local), data


class Delivery(Enum):
    """What became of a message."""

    SENT = 1
    #: Lost: the owner does not keep up, or there is no descriptor for another connection.
    FULL = 2
    NOBODY = 3


class Post:
    """Sends to mailboxes."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, socket.socket] = OrderedDict()

    def send(self, name: str, received: Received) -> Delivery:
        """Hand over what was received."""
        message = _pack(received)
        for _ in range(2):  # of a connection to an owner that is gone one learns by using it
            sock = self._open.get(name)
            if sock is None:
                try:
                    sock = self._connect(name)
                except OSError as error:
                    return Delivery.NOBODY if error.errno == errno.ECONNREFUSED else Delivery.FULL
            self._open.move_to_end(name)
            try:
                sock.sendmsg(message, (), socket.MSG_NOSIGNAL)
                return Delivery.SENT
            except BlockingIOError:
                return Delivery.FULL
            except OSError:
                self._open.pop(name).close()
        return Delivery.NOBODY

    def _connect(self, name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.connect("\0" + name)
            if credentials(sock).uid != os.geteuid():
                raise OSError(errno.ECONNREFUSED, "the name is another user's")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        except OSError:
            sock.close()
            raise
        if len(self._open) >= _KEPT:
            self._open.popitem(last=False)[1].close()
        self._open[name] = sock
        return sock

    def close(self) -> None:
        """Close all connections."""
        for sock in self._open.values():
            sock.close()
        self._open.clear()
