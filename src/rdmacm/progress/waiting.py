"""Waiting: whoever waits drives the provider, and whoever waits elsewhere has a descriptor to poll.

A thread of ours that received packets would fight the waiting one for the interpreter, which costs milliseconds a
round trip. So :meth:`Waiters.drive` polls the provider's descriptors and makes its progress in the thread that
waits. What another thread's progress completes is told by :meth:`Waiters.wake`, which costs nothing while nobody
is inside poll(2).

:class:`Pollable` is for readers in select(2) or an event loop: an epoll descriptor that polls readable when there is
something for its owner *or progress to be made*; asking the owner then makes it, and may find that nothing came of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, TypeVar

from rdmacm.progress.timers import TimerDescriptor

if TYPE_CHECKING:
    from rdmacm.soft.provider import SoftProvider

__all__ = ["Pollable", "Waiter", "Waiters", "Wake"]

T = TypeVar("T")

#: Places to wait that are kept for the next wait.
_KEPT = 4

#: How long a wait looks again and again before it sleeps, seconds: more than an answer takes that is on its way. To
#: fall asleep and to be woken costs more than all the rest of a small message.
_SPIN = 0.0001
#: So many waits at most are not begun that way after it was for nothing.
_MOST_SKIPPED = 64

#: A wait without a deadline still looks up once in a while: a clock that is not the system's may have moved.
_LONGEST_WAIT = 3600.0


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
        self.raised = False

    def set(self) -> None:
        if not self.raised:
            self.raised = True
            if self._pair:
                self._pair[1].send(b"\0")
            else:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        if self.raised:
            self.raised = False
            if self._pair:
                self._pair[0].recv(16)
            else:
                os.eventfd_read(self.fd)

    def close(self) -> None:
        if self._pair:
            for end in self._pair:
                end.close()
        else:
            os.close(self.fd)


class Waiter:
    """One thread's place to wait: its wake-up and a poll object over it and the provider's descriptors."""

    __slots__ = ("_fds", "_milliseconds", "_poll", "wake")

    def __init__(self) -> None:
        self.wake = Wake()
        self._poll = select.poll()
        self._poll.register(self.wake.fd, select.POLLIN)
        self._fds: tuple[int, ...] = ()
        self._milliseconds = 0.0

    def prepare(self, provider: SoftProvider, more: Sequence[int] = ()) -> None:
        """Get ready to wait for what makes progress possible, or for ``more`` (the provider's lock is held)."""
        fds = (*provider.filenos(), *more) if more else provider.filenos()
        if fds != self._fds:
            for fd in self._fds:
                self._poll.unregister(fd)
            for fd in fds:
                self._poll.register(fd, select.POLLIN)
            self._fds = fds
        deadline = provider.next_deadline()
        wait = _LONGEST_WAIT if deadline is None else min(deadline - provider.clock(), _LONGEST_WAIT)
        self._milliseconds = max(0.0, wait) * 1000
        self.wake.clear()

    def wait(self, limit: float | None) -> None:
        """Wait, until ``limit`` on the system's clock at the longest."""
        milliseconds = self._milliseconds
        if limit is not None:
            milliseconds = min(milliseconds, max(0.0, limit - time.monotonic()) * 1000)
        self._poll.poll(milliseconds)


class Waiters:
    """The threads that wait on one provider."""

    def __init__(self, provider: SoftProvider) -> None:
        self._provider = provider
        self._idle: list[Waiter] = []
        self._alone = _count_cpus() < 2  # who would answer needs the processor that is spun on
        self._spinning = False
        self._skip = self._skipped = 0
        #: The waiters that are inside poll(2), or about to be.
        self.polling: set[Waiter] = set()

    def drive(self, done: Callable[[], T], timeout: float | None, wanted: Sized = ()) -> T:
        """Make progress until ``done()``, called with the provider's lock held, returns something true.

        Returns what it returned last. ``timeout`` is in seconds: None waits for ever, 0 makes progress once.
        ``wanted`` is what the caller hopes to find filled, where ``done()`` is that it is.
        """
        provider = self._provider
        with provider.lock:
            found = done()
            if found:
                # Who works off what waits goes on making progress, or the helper thread would begin to, and the two
                # would be in each other's way.
                if provider.clock() >= provider.progress_due:
                    provider.progress(wanted)
                return found
            if timeout is not None and timeout <= 0:
                provider.progress(wanted)
                return done()
        limit = None if timeout is None else time.monotonic() + timeout
        seen = self._spin(done, timeout, wanted)
        if seen:
            return seen
        with provider.lock:
            provider.progress(wanted)
            found = done()
            if found:
                return found
            waiter = self._idle.pop() if self._idle else Waiter()
        try:
            while True:
                with provider.lock:
                    found = done()  # another thread may have seen to it
                    if found:
                        return found
                    waiter.prepare(provider)
                    self.polling.add(waiter)
                waiter.wait(limit)
                with provider.lock:
                    self.polling.discard(waiter)
                    provider.poll(wanted)
                    found = done()
                    if not found:
                        provider.progress(wanted)
                        found = done()
                if found or (limit is not None and time.monotonic() >= limit):
                    return found
        finally:
            with provider.lock:
                self.polling.discard(waiter)
                self._put_back(waiter)

    def _spin(self, done: Callable[[], T], timeout: float | None, wanted: Sized) -> T | None:
        """Look again for a moment, where that has paid lately; what ``done()`` returned when it was true."""
        provider = self._provider
        with provider.lock:
            if self._alone or self._spinning or provider.clock is not time.monotonic or not provider.in_use:
                return None
            if self._skipped < self._skip:
                self._skipped += 1
                return None
            self._spinning = True
        until = time.monotonic() + (_SPIN if timeout is None else min(_SPIN, timeout))
        found = None
        try:
            while not found and time.monotonic() < until:
                if provider.poll(wanted):
                    with provider.lock:
                        found = done()
        finally:
            with provider.lock:
                self._spinning = False
                self._skipped = 0
                self._skip = 0 if found else min(2 * self._skip + 1, _MOST_SKIPPED)
        return found

    def _put_back(self, waiter: Waiter) -> None:
        if len(self._idle) < _KEPT and self._provider.in_use:
            self._idle.append(waiter)
        else:
            waiter.wake.close()
        self.wake()  # the others look at the clock again: this one may have seen to it for them

    def wake(self) -> None:
        """Something has changed that somebody may be waiting for (called with the provider's lock held)."""
        for waiter in self.polling:
            waiter.wake.set()

    def close(self) -> None:
        """Nobody will wait for a while."""
        for waiter in self._idle:
            waiter.wake.close()
        self._idle.clear()

    def abandon(self) -> None:
        """In a child of fork(2), which has none of the threads that wait."""
        self.polling.clear()
        self.close()


def _count_cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pollable:
    """A descriptor for a reader that waits elsewhere, made when it is first asked for."""

    __slots__ = ("_epoll", "_fds", "_provider", "_timer", "_wake")

    def __init__(self, provider: SoftProvider) -> None:
        self._provider = provider
        self._wake: Wake | None = None
        self._epoll: select.epoll | None = None
        self._timer: TimerDescriptor | None = None
        self._fds: tuple[int, ...] = ()

    def fileno(self) -> int:
        """The descriptor (the provider's lock is held)."""
        provider = self._provider
        if self._wake is None:
            self._wake = Wake()
            provider.pollables.add(self)
            if sys.platform == "linux":  # elsewhere a wake-up has to say it all
                self._epoll = select.epoll()
                self._epoll.register(self._wake.fd, select.EPOLLIN)
                if provider.clock is time.monotonic:
                    self._timer = TimerDescriptor()
                    self._epoll.register(self._timer.fd, select.EPOLLIN)
                self.watch()
                self.rearm(provider.next_deadline())
        return self._wake.fd if self._epoll is None else self._epoll.fileno()

    def signal(self, on: bool) -> None:
        """Whether there is something for the owner."""
        if self._wake is not None and self._wake.raised is not on:
            if on:
                self._wake.set()
            else:
                self._wake.clear()

    def rearm(self, deadline: float | None) -> None:
        """The provider's next timer has changed."""
        if self._timer is not None:
            self._timer.set(deadline, self._provider.clock())

    def watch(self) -> None:
        """The provider's descriptors have changed."""
        fds = self._provider.filenos()
        if self._epoll is not None and fds != self._fds:
            for fd in set(self._fds) - set(fds):
                with contextlib.suppress(OSError):  # whoever had it may have closed it
                    self._epoll.unregister(fd)
            for fd in set(fds) - set(self._fds):
                self._epoll.register(fd, select.EPOLLIN)
            self._fds = fds

    def close(self) -> None:
        """Release the descriptor."""
        self._provider.pollables.discard(self)
        for part in (self._epoll, self._timer, self._wake):
            if part is not None:
                part.close()
        self._epoll = self._timer = self._wake = None
        self._fds = ()
