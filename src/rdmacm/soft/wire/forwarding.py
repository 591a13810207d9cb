"""Packets, and reports of undelivered packets, forwarded from one process of a host to another.

They pass through abstract AF_UNIX sockets of the network namespace.

A receiver has a name. A sender connects to the name and keeps the connection. So a receiver whose process has ended is
noticed (the connection is refused), and a slow one has as much room as the send buffer of a socket. Both ends check
that the other is a process of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from rdmacm.proto.wire import Buffer
from rdmacm.soft.wire.base import Received, Undelivered
from rdmacm.soft.wire.parking import receive_rights, rights

_BACKLOG = 256
#: Connections that either end keeps. A host may have more processes: then those that were used last are kept.
_MAX_CONNECTIONS = 256
_QUEUE_BYTES = 4 << 20
#: How long a name that had no receiver is not asked again. A process that begins to listen is found after that.
_ABSENT_SECONDS = 0.002
_LONGEST = 1 << 16

# Of a packet: address length, kind, port, scope id, segment; remote and local address. Of a report: address length,
# kind, 0, 0, errno; destination and reporter.
_HEADER = struct.Struct("=BBHII16s16s")
# Of a slot that is given away: zeros, with the kind; its descriptors come along.
_PACKET, _REPORT, _SLOT = 0, 1, 2
#: Descriptors of a slot: its name, and a socket for each address family.
_MOST_DESCRIPTORS = 3
_UCRED = struct.Struct("=iii")


class Credentials(NamedTuple):
    """The process at the other end. ``pid`` is 0 if its PID namespace cannot be seen from here."""

    pid: int
    uid: int
    gid: int


def credentials(sock: socket.socket) -> Credentials:
    """The credentials of the other end; if that listened, of the last process that called listen(2)."""
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


class ForwardReceiver:
    """Receives what other processes forward to a name.

    ``sock`` is bound to the name. ``watch(fd, reader)`` and ``unwatch(fd)`` are called with descriptors to poll, and
    the function that reads one when it is readable. ``on_undelivered`` is called with each report, ``on_slot`` with the
    descriptors of each slot that is given to this process.
    """

    def __init__(
        self,
        sock: socket.socket,
        watch: Callable[[int, Callable[[list[Received]], None]], None],
        unwatch: Callable[[int], None],
        on_undelivered: Callable[[Undelivered], None],
        on_slot: Callable[[list[int]], None],
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._on_undelivered = on_undelivered
        self._on_slot = on_slot
        #: Connections of senders, by descriptor, least recently used first.
        self._senders: OrderedDict[int, socket.socket] = OrderedDict()
        self._sock = sock
        sock.listen(_BACKLOG)
        watch(sock.fileno(), self._accept)

    def _accept(self, found: list[Received]) -> None:
        try:
            sender, _ = self._sock.accept()
        except OSError:  # another thread or process accepted it, or no descriptor is left
            return
        if credentials(sender).uid != os.geteuid():
            sender.close()
            return
        if len(self._senders) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._senders))
            before = -1
            while oldest in self._senders and len(found) != before:  # its sender connects again if it has more
                before = len(found)
                self._receive(self._senders[oldest], found)
            self._drop(oldest)
        sender.setblocking(False)
        fd = sender.fileno()
        self._senders[fd] = sender
        self._watch(fd, lambda found: self._receive(sender, found))

    def _receive(self, sender: socket.socket, found: list[Received]) -> None:
        try:
            message, fds = receive_rights(sender, _HEADER.size + _LONGEST, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        fd = sender.fileno()
        if message:
            self._senders.move_to_end(fd)
            if fds:
                self._on_slot(fds)
            elif len(message) > _HEADER.size:
                if message[1] == _REPORT:
                    self._on_undelivered(_unpack_report(message))
                else:
                    found.append(_unpack(message))
        else:
            for right in fds:
                os.close(right)
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        sender = self._senders.pop(fd, None)
        if sender is not None:
            self._unwatch(fd)
            sender.close()

    def close(self) -> None:
        """Release the name."""
        for sock in (self._sock, *self._senders.values()):
            if sock.fileno() >= 0:
                self._unwatch(sock.fileno())
                sock.close()
        self._senders.clear()


def bind_name(name: str) -> socket.socket:
    """Return a nonblocking socket bound to a name. EADDRINUSE if the name is taken."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.bind("\0" + name)
    except OSError:
        sock.close()
        raise
    return sock


def _unpack(message: bytes) -> Received:
    size, _, port, scope_id, segment, remote, local = _HEADER.unpack_from(message)
    data = memoryview(message)[_HEADER.size :]
    if size == 4:
        return data, segment, (socket.inet_ntop(socket.AF_INET, remote[:4]), port), local[:4]
    return data, segment, (socket.inet_ntop(socket.AF_INET6, remote), port, 0, scope_id), local


def _pack(received: Received) -> Sequence[Buffer]:
    data, segment, remote, local = received
    family = socket.AF_INET if len(local) == 4 else socket.AF_INET6
    scope_id = remote[3] if len(remote) == 4 else 0
    address = socket.inet_pton(family, remote[0])
    return _HEADER.pack(len(local), _PACKET, remote[1], scope_id, segment, address, local), data


def _unpack_report(message: bytes) -> Undelivered:
    size, _, _, _, code, destination, reporter = _HEADER.unpack_from(message)
    return Undelivered(message[_HEADER.size :], destination[:size], code, reporter[:size])


def _pack_report(report: Undelivered) -> Sequence[Buffer]:
    quote, destination, code, reporter = report
    return _HEADER.pack(len(destination), _REPORT, 0, 0, code, destination, reporter), quote


class Delivery(Enum):
    """The outcome of :meth:`ForwardSender.send`."""

    SENT = 1
    #: Lost: the receiver does not keep up, or there is no descriptor for another connection.
    FULL = 2
    NO_RECEIVER = 3


def give_slot(name: str, fds: Sequence[int]) -> bool:
    """Give the descriptors of a slot to the process that receives at a name; False if there is none, or no room."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.connect("\0" + name)
        if credentials(sock).uid != os.geteuid():
            return False
        header = _HEADER.pack(0, _SLOT, 0, 0, 0, b"", b"")
        return sock.sendmsg([header], rights(fds), socket.MSG_NOSIGNAL) > 0
    return False


class ForwardSender:
    """Forwards packets and reports to receivers of other processes."""

    def __init__(self) -> None:
        #: Connections by name, least recently used first.
        self._connections: OrderedDict[str, socket.socket] = OrderedDict()
        #: Names that had no receiver, and until when they are not asked again: asking takes longer than a request does.
        self._absent: dict[str, float] = {}

    def send(self, name: str, received: Received | Undelivered) -> Delivery:
        """Forward a packet, train or report to a name."""
        absent_until = self._absent.get(name)
        if absent_until is not None:
            if time.monotonic() < absent_until:
                return Delivery.NO_RECEIVER
            del self._absent[name]
        message = _pack_report(received) if isinstance(received, Undelivered) else _pack(received)
        for _ in range(2):  # a connection to a process that has ended fails when it is used
            sock = self._connections.get(name)
            if sock is None:
                try:
                    sock = self._connect(name)
                except OSError as error:
                    return self._no_receiver(name) if error.errno == errno.ECONNREFUSED else Delivery.FULL
            self._connections.move_to_end(name)
            try:
                sock.sendmsg(message, (), socket.MSG_NOSIGNAL)
                return Delivery.SENT
            except BlockingIOError:
                return Delivery.FULL
            except OSError:
                self._connections.pop(name).close()
        return self._no_receiver(name)

    def _no_receiver(self, name: str) -> Delivery:
        if len(self._absent) >= _MAX_CONNECTIONS:
            self._absent.clear()
        self._absent[name] = time.monotonic() + _ABSENT_SECONDS
        return Delivery.NO_RECEIVER

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
        self._drop_ended()
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._connections.popitem(last=False)[1].close()
        self._connections[name] = sock
        return sock

    def _drop_ended(self) -> None:
        """Close the connections to processes that have ended. Most names are random, so they are not used again."""
        names = {sock.fileno(): name for name, sock in self._connections.items()}
        poll = select.poll()
        for fd in names:
            poll.register(fd, 0)
        for fd, _ in poll.poll(0):  # POLLHUP
            self._connections.pop(names[fd]).close()

    def close(self) -> None:
        """Close all connections."""
        for sock in self._connections.values():
            sock.close()
        self._connections.clear()
