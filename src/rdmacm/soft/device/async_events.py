"""The asynchronous events of a software device that are not fetched yet, one queue for each context.

Nothing has to read the queue, so it is bounded: it holds an event of an object once, forgets the events of an object
that is destroyed, and drops the oldest event when it is full.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.verbs.enums import EventType

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmacm.progress.runtime import Runtime

#: Events in a queue that nothing reads.
MAX_EVENTS = 1024


class SoftAsyncQueue:
    """See :class:`rdmacm.verbs.backend.AsyncQueueBackend`.

    ``look()`` looks at the device, so that its changes are followed from then on. ``keep_open``: the provider's
    descriptors stay open from the first call of a reader on.
    """

    __slots__ = (
        "__weakref__",
        "_closed",
        "_events",
        "_events_of",
        "_is_open",
        "_keep_open",
        "_look",
        "_number",
        "_pollable",
        "_runtime",
    )

    def __init__(self, runtime: Runtime, look: Callable[[], object], keep_open: bool) -> None:
        self._runtime = runtime
        self._look = look
        self._keep_open = keep_open
        #: Whether this queue is a user of the runtime.
        self._is_open = False
        #: Events and their owners by consecutive numbers, oldest first.
        self._events: OrderedDict[int, tuple[EventType, object]] = OrderedDict()
        #: The numbers of each owner's events.
        self._events_of: dict[object, dict[EventType, int]] = {}
        #: The number of the last event.
        self._number = 0
        self._pollable = runtime.pollable()
        self._closed = False

    def post(self, owner: object, event: EventType) -> None:
        own = self._events_of.setdefault(owner, {})
        if event in own or self._closed:
            return
        self._number += 1
        own[event] = self._number
        self._events[self._number] = event, owner
        if len(self._events) > MAX_EVENTS:
            self._take_oldest()
        self._pollable.signal(True)
        waiters = self._runtime.waiters
        if waiters.polling:
            waiters.wake()

    def _take_oldest(self) -> tuple[EventType, object]:
        _, (event, owner) = self._events.popitem(last=False)
        own = self._events_of.get(owner)
        if own is not None:
            own.pop(event, None)
            if not own:
                self._events_of.pop(owner, None)
        return event, owner

    def forget(self, owner: object) -> None:
        if owner in self._events_of:
            with self._runtime.lock:
                for number in self._events_of.pop(owner, {}).values():
                    self._events.pop(number, None)
                self._pollable.signal(bool(self._events))

    def _pop(self) -> tuple[EventType, object] | None:
        if self._closed or self._runtime.abandoned:
            why = "the context is closed" if self._closed else "the context was opened before fork(2)"
            raise cm_error(errno.EBADF, why, "get_async_event")
        if not self._events:
            return None
        found = self._take_oldest()
        self._pollable.signal(bool(self._events))
        return found

    def get(self, timeout: float | None) -> tuple[EventType, object] | None:
        runtime = self._runtime
        runtime.check_fork("get_async_event")
        if self._keep_open:
            self._open()
        if self._is_open or (timeout is not None and timeout <= 0):
            return runtime.drive(self._pop, timeout)
        user = object()  # keeps the descriptors open during the wait
        runtime.use(user)
        try:
            with runtime.lock:
                self._look()
            return runtime.drive(self._pop, timeout)
        finally:
            runtime.release(user)

    def _open(self) -> None:
        """Keep the provider's descriptors open, and follow the changes of the device, until :meth:`close`."""
        with self._runtime.lock:
            if not self._is_open and not self._closed:
                self._runtime.use(self)
                self._is_open = True
                self._look()

    def fileno(self) -> int:
        with self._runtime.lock:
            if self._closed:
                return -1
            if not self._pollable.is_open:
                self._runtime.check_fork("async_fd")
                if self._keep_open:
                    self._open()
                self._look()
            return self._pollable.fileno(bool(self._events))

    def close(self) -> None:
        with self._runtime.lock:
            if self._closed:
                return
            self._closed = True
            self._events.clear()
            self._events_of.clear()
            self._pollable.close()
            self._runtime.waiters.wake()
        self._runtime.release(self)
