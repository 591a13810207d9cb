"""A descriptor that wakes a thread in poll(2), and the poll object of one waiting thread."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence

from rdmacm.interrupts.protection import interruptible

#: The longest wait in milliseconds: poll(2) does not notice that a virtual clock was advanced.
_LONGEST_WAIT = 3_600_000.0
#: The same for a thread that cannot be woken, because the process has no descriptor left.
_WAIT_WITHOUT_WAKE = 5.0


class Wake:
    """A descriptor to wake a thread by: eventfd(2), or a socket pair where there is none."""

    __slots__ = ("_pair", "fd", "raised")

    def __init__(self) -> None:
        #: The reading and the writing end; None with eventfd(2).
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if sys.platform == "linux":
            self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self.fd = self._pair[0].fileno()
        #: Whether the descriptor is readable.
        self.raised: bool = False

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


class _NoWake(Wake):
    """Takes the place of a wake-up while the process can open no descriptor: the thread looks at short intervals."""

    __slots__ = ()

    def __init__(self) -> None:
        self.fd = -1
        self.raised = False

    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


class Waiter:
    """For one waiting thread: its wake-up, and a poll object over it and the provider's descriptors."""

    __slots__ = ("_fds", "_longest", "_milliseconds", "_poll", "wake")

    def __init__(self) -> None:
        #: The longest wait in milliseconds.
        self._longest = _LONGEST_WAIT
        try:
            self.wake: Wake | _NoWake = Wake()
        except OSError:
            self.wake = _NoWake()
            self._longest = _WAIT_WITHOUT_WAKE
        #: The provider's descriptors that the poll object has.
        self._fds: Sequence[int] = ()
        self.forget()
        #: The timeout of the next wait, in milliseconds.
        self._milliseconds = 0.0

    def prepare(self, fds: Sequence[int], seconds: float | None) -> None:
        """Let the next wait end when one of ``fds`` is readable, or after ``seconds`` if given. The lock is held."""
        if fds != self._fds:
            for fd in self._fds:
                self._poll.unregister(fd)
            for fd in fds:
                self._poll.register(fd, select.POLLIN)
            self._fds = fds
        longest = self._longest
        self._milliseconds = longest if seconds is None else min(max(0.0, seconds) * 1000, longest)
        self.wake.clear()

    def forget(self) -> None:
        """Begin with a new poll object."""
        self._poll = select.poll()
        if self.wake.fd >= 0:
            self._poll.register(self.wake.fd, select.POLLIN)
        self._fds = ()

    @interruptible
    def wait(self, seconds: float | None) -> None:
        """Wait for ``seconds`` at the longest, if given. The lock is not held."""
        milliseconds = self._milliseconds
        if seconds is not None:
            milliseconds = min(milliseconds, seconds * 1000)
        self._poll.poll(milliseconds)
