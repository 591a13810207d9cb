"""The descriptors of the kernel provider, and what is called when one becomes readable.

Each descriptor is watched edge-triggered, epoll(7): it is reported once for each event that comes, also if nobody
fetches the events before. So a thread that waits is not woken again and again by events that another part will fetch.
"""

from __future__ import annotations

import contextlib
import importlib
import select
import time
import weakref
from collections.abc import Callable, Sized
from typing import Any

from rdmacm.progress.runtime import Driver, Runtime

_MOST_EVENTS = 64


class Descriptors(Driver):
    """A driver of a runtime; used with the runtime's lock held, except :meth:`poll`.

    The runtime is that of the devices, so that a thread that waits sees their completions as well. Without libibverbs
    it is one of this object's own.
    """

    def __init__(self, unused: Callable[[], None]) -> None:
        """``unused`` is called when the last descriptor is no longer watched."""
        self._unused = unused
        #: The descriptors of the devices, to which this object's is added; None without devices.
        self._devices: Any = None
        try:
            watch = importlib.import_module("rdmacm.kernel.verbs.watch")
        except ImportError:
            self.runtime: Runtime = Runtime(time.monotonic)
            self.runtime.attach(self)
        else:
            self.runtime = watch.runtime()
            self._devices = self.runtime.driver
        #: Reports the descriptors that have become readable; None while there are none.
        self._epoll: select.epoll | None = None
        #: By descriptor.
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable()`` with the lock held whenever a descriptor becomes readable. It never waits."""
        with self.runtime.lock:
            if self._epoll is None:
                self._epoll = select.epoll()
                if self._devices is not None:
                    self._devices.add(self._epoll.fileno(), weakref.WeakMethod(self._look))
                else:
                    self.runtime.descriptors_changed()
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            self._callbacks[fd] = on_readable

    def unwatch(self, fd: int) -> None:
        """Undo :meth:`watch`; before the descriptor is closed."""
        with self.runtime.lock:
            if self._callbacks.pop(fd, None) is not None and self._epoll is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)
                if not self._callbacks:
                    if self._devices is not None:
                        self._devices.remove(self._epoll.fileno())
                    self._epoll.close()
                    self._epoll = None
                    if self._devices is None:
                        self.runtime.descriptors_changed()
                    self._unused()

    # -- the driver -----------------------------------------------------------------------------------

    def filenos(self) -> tuple[int, ...]:
        return () if self._epoll is None else (self._epoll.fileno(),)

    def progress(self, now: float, result_queue: Sized) -> None:
        self._look()

    def poll(self, now: float, result_queue: Sized) -> bool:
        with self.runtime.lock:
            return self._look()

    def _look(self) -> bool:
        if self._epoll is None:
            return False
        found = self._epoll.poll(0, _MOST_EVENTS)
        for fd, _ in found:
            callback = self._callbacks.get(fd)
            if callback is not None:
                callback()
        if found:
            # They may wait for the same descriptor, which is not reported again.
            self.runtime.waiters.wake()
        return bool(found)

    def abandon(self) -> None:
        """In a child of fork(2): close the child's copy of the descriptor, which the parent goes on to use."""
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None
        self._callbacks.clear()
