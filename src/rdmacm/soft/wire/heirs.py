"""Slots of processes that have ended: one more process of the port group answers for each.

A peer repeats its DREQ until it gets a DREP, which may be lost when the process that sent it has ended. So a process
that has sent a DREQ or DREP and ends in order gives its slots, sockets and name, to another one, the *heir*. There a
DREQ names no connection, and the connection manager answers it, as Linux does. Reports of undelivered packets are read
for the whole group, and anything else that arrives is dropped. As long as the heir has the name, no new process claims
the slot.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from rdmacm.soft.wire.base import Received
from rdmacm.soft.wire.slot_filter import is_disconnect_request
from rdmacm.soft.wire.sockets import ANCILLARY_SPACE
from rdmacm.soft.wire.source import Source

#: Slots that a process answers for at a time; a further one displaces the oldest.
_MOST = 8
#: How long it does, in seconds: longer than peers repeat a DREQ. Then the next packet ends it, or the next slot.
_SECONDS = 60.0
#: Packets that are read at a time, and their longest part that matters.
_BATCH, _LONGEST = 16, 512


class _Inherited(NamedTuple):
    """A slot of a process that has ended."""

    #: When this process ceases to answer for it, in seconds of time.monotonic().
    until: float
    #: Its name, which is not used, and its sockets.
    sockets: tuple[socket.socket, ...]
    #: The descriptors that are watched.
    watched: tuple[int, ...]


class Inheritance:
    """The slots that this process answers for.

    ``watch(fd, reader)`` and ``unwatch(fd)`` are called with descriptors to poll, and the function that reads one.
    ``counters`` counts the packets that are dropped as ``stray``. ``read_reports`` reads a socket's reports of
    undelivered packets: the kernel gives any socket of the group those of each member.
    """

    def __init__(
        self,
        watch: Callable[[int, Callable[[list[Received]], None]], None],
        unwatch: Callable[[int], None],
        counters: Counter[str],
        read_reports: Callable[[socket.socket], None],
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._counters = counters
        self._read_reports = read_reports
        self._slots: deque[_Inherited] = deque()

    def add(self, fds: list[int]) -> None:
        """Answer for a slot. ``fds``: its name and its sockets, which are this object's from now on."""
        opened = tuple(socket.socket(fileno=fd) for fd in fds)
        self._drop_old(_MOST - 1)
        data = [sock for sock in opened if sock.type == socket.SOCK_DGRAM]
        for sock in data:
            self._watch(sock.fileno(), lambda found, sock=sock: self._read(sock, found))  # type: ignore[misc]
        watched = tuple(sock.fileno() for sock in data)
        self._slots.append(_Inherited(time.monotonic() + _SECONDS, opened, watched))

    def _read(self, sock: socket.socket, found: list[Received]) -> None:
        self._read_reports(sock)
        source = Source(sock, True)
        for _ in range(_BATCH):
            try:
                data, control, _, remote = sock.recvmsg(_LONGEST, ANCILLARY_SPACE)
            except OSError:
                break
            local = b""
            for _, kind, value in control:
                if kind == source.info:
                    local = value[source.start : source.end]
            if local and is_disconnect_request(data):
                found.append((memoryview(data), 0, remote, local))
            else:
                self._counters["stray"] += 1
        self._drop_old(_MOST)

    def _drop_old(self, most: int) -> None:
        while self._slots and (len(self._slots) > most or self._slots[0].until < time.monotonic()):
            self._drop(self._slots.popleft())

    def _drop(self, slot: _Inherited) -> None:
        for fd in slot.watched:
            self._unwatch(fd)
        for sock in slot.sockets:
            sock.close()

    def close(self) -> None:
        """Answer for none any more."""
        while self._slots:
            self._drop(self._slots.pop())
