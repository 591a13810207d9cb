"""The asynchronous events of a device that are not fetched yet, one queue for each of the API's contexts.

The kernel has one queue for each open device, which several contexts share here. What is read from it
(:meth:`rdmacm.kernel.verbs.opened.OpenedDevice.read_events`) is added to the queues of the contexts concerned.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.verbs.enums import EventType

if TYPE_CHECKING:
    from rdmacm.kernel.verbs.opened import OpenedDevice

#: Events in a queue that nothing reads.
MAX_EVENTS = 1024


class KernelAsyncQueue:
    """See :class:`rdmacm.verbs.backend.AsyncQueueBackend`. Once a device is removed and that is fetched: ENODEV."""

    __slots__ = ("__weakref__", "_closed", "_events", "_opened", "_pollable")

    def __init__(self, opened: OpenedDevice) -> None:
        self._opened = opened
        #: Each event of an owner once, oldest first. Owners are compared by identity, which the values keep alive.
        self._events: OrderedDict[tuple[int, EventType], tuple[EventType, object]] = OrderedDict()
        self._pollable = opened.runtime.pollable()
        self._closed = False
        with opened.runtime.lock:
            opened.sinks.add(self)

    def post(self, owner: object, event: EventType) -> None:
        if self._closed:
            return
        self._events.setdefault((_key(owner), event), (event, owner))
        if len(self._events) > MAX_EVENTS:
            self._events.popitem(last=False)
        self._pollable.signal(bool(self._events))
        self._opened.runtime.waiters.wake()

    def forget(self, owner: object) -> None:
        with self._opened.runtime.lock:
            wanted = _key(owner)
            for key in [key for key in self._events if key[0] == wanted]:
                del self._events[key]
            self._pollable.signal(bool(self._events))

    def _pop(self) -> tuple[EventType, object] | None:
        if self._closed or self._opened.abandoned:
            why = "the context is closed" if self._closed else "the context was opened before fork(2)"
            raise cm_error(errno.EBADF, why, "get_async_event")
        if not self._events:
            if self._opened.removed:
                raise self._opened.gone("get_async_event")
            return None
        _, found = self._events.popitem(last=False)
        self._pollable.signal(bool(self._events))
        return found

    def get(self, timeout: float | None) -> tuple[EventType, object] | None:
        return self._opened.runtime.drive(self._pop, timeout)

    def fileno(self) -> int:
        with self._opened.runtime.lock:
            if self._closed:
                return -1
            if not self._pollable.is_open:
                self._opened.check("async_fd")
            return self._pollable.fileno(bool(self._events))

    def close(self) -> None:
        with self._opened.runtime.lock:
            if not self._closed:
                self._closed = True
                self._events.clear()
                self._pollable.close()
                self._opened.runtime.waiters.wake()


def _key(owner: object) -> int:
    """A port's number, or the identity of an object."""
    return owner if isinstance(owner, int) else -id(owner)
