"""Waking a thread that waits for descriptors: eventfd(2), and one thread's place to wait."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Sequence

__all__ = ["Waiter", "Wake"]

#: Milliseconds. The longest wait: a virtual clock, or one that was set, may have moved meanwhile.
_LONGEST_WAIT = 3_600_000.0


class Wake:
    """A descriptor one thread signals and another waits on: eventfd(2), or a socket pair where there is none."""

    __slots__ = ("_pair", "fd", "raised")

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if sys.platform == "linux":
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self.fd = self._pair[0].fileno()
        #: Whether the descriptor is readable.
        self.raised = False

    def set(self) -> None:
        """Make the descriptor readable."""
        if not self.raised:
            self.raised = True
            if self._pair:
                self._pair[1].send(b"\0")
            else:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable."""
        if self.raised:
            self.raised = False
            if self._pair:
                self._pair[0].recv(16)
            else:
                os.eventfd_read(self.fd)

    def close(self) -> None:
        """Release the descriptor."""
        if self._pair:
            for end in self._pair:
                end.close()
        else:
            os.close(self.fd)


class Waiter:
    """One thread's place to wait: its wake-up, and a poll object over it and the provider's descriptors."""

    __slots__ = ("_fds", "_milliseconds", "_poll", "wake")

    def __init__(self) -> None:
        self.wake = Wake()
        self._poll = select.poll()
        self._poll.register(self.wake.fd, select.POLLIN)
        self._fds: Sequence[int] = ()
        self._milliseconds = 0.0

    def prepare(self, fds: Sequence[int], seconds: float | None) -> None:
        """Set what the next wait waits for: ``fds``, or ``seconds`` (None for no deadline). The lock is held."""
        if fds != self._fds:
            for fd in self._fds:
                self._poll.unregister(fd)
            for fd in fds:
                self._poll.register(fd, select.POLLIN)
            self._fds = fds
        self._milliseconds = _LONGEST_WAIT if seconds is None else min(max(0.0, seconds) * 1000, _LONGEST_WAIT)
        self.wake.clear()

    def wait(self, limit: float | None) -> None:
        """Wait, until ``limit`` on the system's monotonic clock at the longest."""
        milliseconds = self._milliseconds
        if limit is not None:
            milliseconds = min(milliseconds, max(0.0, limit - time.monotonic()) * 1000)
        self._poll.poll(milliseconds)
