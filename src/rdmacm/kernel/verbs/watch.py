"""The descriptors of the kernel that have events for this process, and the runtime that waits for them.

The kernel moves the data and answers the peers, so the runtime's progress is no more than reading events: each
descriptor has a function that reads what is there. All descriptors are in one epoll(7) descriptor, which every thread
that waits polls.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Sized

from rdmacm.progress.runtime import Driver, Runtime

#: Events of one look at the descriptors.
_MOST_EVENTS = 64


class Watch(Driver):
    """A driver of a runtime: descriptors, and what reads them.

    Every method is called with the runtime's lock held.
    """

    def __init__(self) -> None:
        #: By descriptor: what to call when it is readable or has failed. It reads without waiting.
        self._readers: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}
        #: None while there is no descriptor.
        self._epoll: select.epoll | None = None
        #: The descriptor to poll, if any.
        self._filenos: tuple[int, ...] = ()
        #: Called once in a while where nobody waits.
        self.changed: Callable[[], object] = lambda: None

    def add(self, fd: int, reader: weakref.WeakMethod[Callable[[], object]]) -> None:
        """Call ``reader()()`` when ``fd`` is readable or has failed, until :meth:`remove`."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._filenos = (self._epoll.fileno(),)
            self.changed()
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def remove(self, fd: int) -> None:
        """Undo :meth:`add`, before the descriptor is closed. A descriptor that is not there does nothing."""
        if self._readers.pop(fd, None) is None or self._epoll is None:
            return
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        if not self._readers:
            self._epoll.close()
            self._epoll, self._filenos = None, ()
            self.changed()

    def filenos(self) -> tuple[int, ...]:
        return self._filenos

    def progress(self, now: float, result_queue: Sized) -> None:  # noqa: ARG002
        if self._epoll is not None:
            for fd, _ in self._epoll.poll(0, _MOST_EVENTS):
                reader = self._readers.get(fd)
                read = None if reader is None else reader()
                if read is not None:
                    read()

    def poll(self, now: float, result_queue: Sized) -> bool:  # noqa: ARG002
        """Nothing is received here. True: a waiting thread looks at its completion queue for a moment first."""
        return True

    def abandon(self) -> None:
        """In a child of fork(2): close the child's descriptor, and leave the parent's registrations as they are."""
        if self._epoll is not None:
            self._epoll.close()
        self._epoll, self._filenos = None, ()
        self._readers.clear()


_runtime: Runtime | None = None
_lock = threading.Lock()


def runtime() -> Runtime:
    """The runtime of the kernel's devices, one for the process. Its driver is a :class:`Watch`."""
    global _runtime
    with _lock:
        if _runtime is None:
            watch = Watch()
            _runtime = Runtime()
            _runtime.only_reads = True
            _runtime.attach(watch)
            watch.changed = _runtime.descriptors_changed
        return _runtime


def _forget_parent() -> None:
    global _runtime, _lock
    _lock = threading.Lock()
    if _runtime is not None:
        watch = _runtime.driver
        _runtime.abandon()
        assert isinstance(watch, Watch)
        watch.abandon()
        _runtime = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
