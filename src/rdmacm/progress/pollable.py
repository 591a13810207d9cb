"""A descriptor for a reader in select(2) or an event loop.

It is an epoll descriptor over the provider's descriptors, the owner's wake-up and the next timer. It polls readable
when the owner has something to read *or progress can be made*. A read with timeout 0 makes that progress, and may then
return nothing.
"""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable
from typing import Protocol

from rdmacm.progress.timers import TimerDescriptor
from rdmacm.progress.wake import Wake


class Source(Protocol):
    """The runtime as a :class:`Pollable` uses it (:class:`rdmacm.progress.runtime.Runtime`)."""

    clock: Callable[[], float]
    is_real_time: bool
    #: The pollables whose descriptor exists; each adds and removes itself.
    pollables: set[Pollable]

    def filenos(self) -> tuple[int, ...]: ...

    def next_deadline(self) -> float | None: ...


class Pollable:
    """A descriptor for one reader, as the module describes. Every method is called with the runtime's lock held."""

    __slots__ = ("_epoll", "_fds", "_source", "_timer", "_wake")

    def __init__(self, source: Source) -> None:
        self._source = source
        # Most owners are never polled, so the first call of fileno() makes the three descriptors.
        #: Readable while the owner has something to read.
        self._wake: Wake | None = None
        #: Readable when one of the others is; None where there is no epoll(7).
        self._epoll: select.epoll | None = None
        #: Readable when a timer is due; None in virtual time.
        self._timer: TimerDescriptor | None = None
        #: The provider's descriptors that the epoll descriptor watches.
        self._fds: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether there is a descriptor."""
        return self._wake is not None

    def fileno(self, on: bool) -> int:
        """The descriptor, which the first call makes. ``on``: see :meth:`signal`."""
        source = self._source
        if self._wake is None:
            self._wake = Wake()
            source.pollables.add(self)
            if sys.platform == "linux":  # elsewhere, the wake-up alone is the descriptor
                self._epoll = select.epoll()
                self._epoll.register(self._wake.fd, select.EPOLLIN)
                if source.is_real_time:
                    self._timer = TimerDescriptor()
                    self._epoll.register(self._timer.fd, select.EPOLLIN)
                self.watch()
                self.rearm(source.next_deadline())
        self.signal(on)
        return self._wake.fd if self._epoll is None else self._epoll.fileno()

    def signal(self, on: bool) -> None:
        """Set whether the owner has something to read. Without a descriptor, nothing."""
        if self._wake is not None and self._wake.raised is not on:
            if on:
                self._wake.set()
            else:
                self._wake.clear()

    def rearm(self, deadline: float | None) -> None:
        """Set when the next timer is due; None for never."""
        if self._timer is not None:
            self._timer.set(deadline, self._source.clock())

    def watch(self) -> None:
        """Follow a change of the provider's descriptors."""
        fds = self._source.filenos()
        if self._epoll is not None and fds != self._fds:
            for fd in set(self._fds) - set(fds):
                with contextlib.suppress(OSError):  # the transport may have closed it
                    self._epoll.unregister(fd)
            for fd in set(fds) - set(self._fds):
                self._epoll.register(fd, select.EPOLLIN)
            self._fds = fds

    def close(self) -> None:
        """Release the descriptors."""
        self._source.pollables.discard(self)
        for part in (self._epoll, self._timer, self._wake):
            if part is not None:
                part.close()
        self._epoll = self._timer = self._wake = None
        self._fds = ()
