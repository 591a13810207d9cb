"""Event queues: the events of a channel that are not fetched yet."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rdmacm.constants import CmEventType
from rdmacm.errors import cm_error
from rdmacm.progress.runtime import Runtime
from rdmacm.provider import Owner, QueuedEvent
from rdmacm.provider.multicast import GroupJoin


class QueueMember(Protocol):
    """An id that posts its events to a queue."""

    def destroy(self) -> None: ...


class PendingRequest(NamedTuple):
    """A CONNECT_REQUEST that the application has not fetched. It has no id yet."""

    #: The API object of the listener.
    owner: Owner
    #: Makes the id and its event; None if the peer has withdrawn the request, or it was displaced by others.
    take: Callable[[], QueuedEvent | None]


class SoftQueue:
    """See :class:`rdmacm.provider.EventQueue`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        #: Oldest first.
        self._events: deque[QueuedEvent | PendingRequest] = deque()
        self._pollable = runtime.pollable()
        self._closed = False
        #: Called after an event is added.
        self.notify: Callable[[], None] | None = None
        #: The ids that post their events here.
        self.ids: dict[QueueMember, None] = {}

    def post(self, event: QueuedEvent) -> None:
        with self._runtime.lock:
            self.add(event)

    def add(self, event: QueuedEvent | PendingRequest) -> None:
        """As :meth:`post`, with the lock held."""
        if self._closed:
            return
        self._events.append(event)
        self._pollable.signal(True)
        waiters = self._runtime.waiters
        if waiters.polling:
            waiters.wake()
        if self.notify is not None:
            self.notify()

    def has(self, owner: object, kind: CmEventType) -> bool:
        """Whether an event of a kind is queued for an owner."""
        with self._runtime.lock:
            return any(
                event.owner is owner and event.type is kind for event in self._events if isinstance(event, QueuedEvent)
            )

    @property
    def ready(self) -> bool:
        """Whether there is an event to fetch."""
        return bool(self._events)

    def take(self, owner: object) -> list[QueuedEvent]:
        if not self._events:  # as nearly always: nobody posts for an id that is being destroyed
            return []
        return [event for event in self.take_all(owner) if isinstance(event, QueuedEvent)]

    def drop_join(self, join: GroupJoin) -> None:
        """Remove the events of a join of a multicast group."""
        with self._runtime.lock:
            kept = deque(e for e in self._events if isinstance(e, PendingRequest) or e.join is not join)
            if len(kept) != len(self._events):
                self._events = kept
                self._pollable.signal(bool(kept))

    def take_all(self, owner: object) -> list[QueuedEvent | PendingRequest]:
        """As :meth:`take`, with the requests that have no id yet."""
        with self._runtime.lock:
            if not self._events:
                return []
            taken = [event for event in self._events if event.owner is owner]
            if taken:
                self._events = deque(event for event in self._events if event.owner is not owner)
                self._pollable.signal(bool(self._events))
            return taken

    def get(self, timeout: float | None) -> QueuedEvent | None:
        runtime = self._runtime
        if self._events and runtime.clock() < runtime.progress_due:
            with runtime.lock:
                event = self._pop()
            if event is not None:
                return event
        return runtime.drive(self._pop, timeout)

    def _pop(self) -> QueuedEvent | None:
        if self._closed or self._runtime.abandoned:
            why = "the channel is closed" if self._closed else "the channel was made before fork(2)"
            raise cm_error(errno.EBADF, why, "get_cm_event")
        found: QueuedEvent | None = None
        while self._events:
            event = self._events.popleft()
            found = event if isinstance(event, QueuedEvent) else event.take()
            if found is not None:
                found.owner._reported()  # under the lock: a thread that destroys the id counts it or discards it
                if found.join is not None:
                    found.join._reported()
                break
        self._pollable.signal(bool(self._events))
        return found

    def fileno(self) -> int:
        with self._runtime.lock:
            if self._closed:
                return -1
            return self._pollable.fileno(bool(self._events))

    def close(self) -> None:
        with self._runtime.lock:
            if self._closed:
                return
            for waiting in list(self.ids):  # as the kernel does when the descriptor of a channel is closed
                waiting.destroy()
            self._closed = True
            self._events.clear()
            self._pollable.close()
            self._runtime.waiters.wake()
        self._runtime.release(self)
