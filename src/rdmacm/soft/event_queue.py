"""Event queues: the events of a channel that are not fetched yet."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import NamedTuple, Protocol

from rdmacm.constants import CmEventType
from rdmacm.errors import cm_error
from rdmacm.progress.runtime import Runtime
from rdmacm.provider import Owner, QueuedEvent
from rdmacm.provider.multicast import GroupJoin

#: Events that were taken are removed once there are so many more of them than of others.
_MOST_TAKEN = 64


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
        #: Oldest first, with some that were taken.
        self._events: deque[QueuedEvent | PendingRequest] = deque()
        #: The events of each owner that has any, oldest first. An event that is not in here was taken.
        self._of: dict[object, list[QueuedEvent | PendingRequest]] = {}
        #: How many were taken and are still in ``_events``.
        self._taken = 0
        self._pollable = runtime.pollable()
        #: Whether somebody has asked for the descriptor.
        self._is_polled = False
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
        own = self._of.get(event.owner)
        if own is None:
            self._of[event.owner] = [event]
        else:
            own.append(event)
        if self._is_polled:
            self._pollable.signal(True)
        waiters = self._runtime.waiters
        if waiters.polling:
            waiters.wake()
        if self.notify is not None:
            self.notify()

    def has(self, owner: object, kind: CmEventType) -> bool:
        """Whether an event of a kind is queued for an owner."""
        with self._runtime.lock:
            return any(isinstance(event, QueuedEvent) and event.type is kind for event in self._of.get(owner, ()))

    @property
    def ready(self) -> bool:
        """Whether there is an event to fetch."""
        return bool(self._of)

    def take(self, owner: object) -> list[QueuedEvent]:
        if owner not in self._of:  # as nearly always: nobody posts for an id that is being destroyed
            return []
        return [event for event in self.take_all(owner) if isinstance(event, QueuedEvent)]

    def drop_join(self, join: GroupJoin) -> None:
        """Remove the events of a join of a multicast group."""
        with self._runtime.lock:
            for owner, own in list(self._of.items()):
                kept = [event for event in own if isinstance(event, PendingRequest) or event.join is not join]
                if len(kept) != len(own):
                    self._replace(owner, own, kept)

    def take_all(self, owner: object) -> list[QueuedEvent | PendingRequest]:
        """As :meth:`take`, with the requests that have no id yet."""
        with self._runtime.lock:
            own = self._of.get(owner)
            if own is None:
                return []
            self._replace(owner, own, [])
            return own

    def _replace(
        self, owner: object, own: list[QueuedEvent | PendingRequest], kept: list[QueuedEvent | PendingRequest]
    ) -> None:
        """Take those of an owner's events that are not kept. They are not looked for among those of all owners."""
        self._taken += len(own) - len(kept)
        if kept:
            self._of[owner] = kept
        else:
            del self._of[owner]
        if self._taken > _MOST_TAKEN + len(self._events) // 2:
            left = {id(event) for events in self._of.values() for event in events}
            self._events = deque(event for event in self._events if id(event) in left)
            self._taken = 0
        self._pollable.signal(bool(self._of))

    def get(self, timeout: float | None, is_driven: bool = False) -> QueuedEvent | None:
        """See the class. ``is_driven``: take an event that is here, in the course of the progress of another call."""
        runtime = self._runtime
        if not is_driven and not (self._events and runtime.clock() < runtime.progress_due):
            return runtime.drive(partial(self.get, None, True), timeout)
        with runtime.lock:
            if self._closed or runtime.abandoned:
                why = "the channel is closed" if self._closed else "the channel was made before fork(2)"
                raise cm_error(errno.EBADF, why, "get_cm_event")
            found: QueuedEvent | None = None
            while self._events:
                event = self._events.popleft()
                own = self._of.get(event.owner)
                if own is None or own[0] is not event:
                    self._taken -= 1
                    continue
                if len(own) > 1:
                    del own[0]
                else:
                    del self._of[event.owner]
                found = event if isinstance(event, QueuedEvent) else event.take()
                if found is not None:
                    thread = get_ident()
                    found.owner._reported(thread)  # under the lock: who destroys the id waits for it or discards it
                    if found.join is not None:
                        found.join._reported(thread)
                    break
            more = runtime.has_more_events = bool(self._of)
            if self._is_polled:
                self._pollable.signal(more)
        return found if found is not None or is_driven else runtime.drive(partial(self.get, None, True), timeout)

    def fileno(self) -> int:
        with self._runtime.lock:
            if self._closed:
                return -1
            self._is_polled = True
            return self._pollable.fileno(bool(self._of))

    def close(self) -> None:
        with self._runtime.lock:
            if self._closed:
                return
            for waiting in list(self.ids):  # as the kernel does when the descriptor of a channel is closed
                waiting.destroy()
            self._closed = True
            self._events.clear()
            self._of.clear()
            self._pollable.close()
            self._runtime.waiters.wake()
        self._runtime.release(self)
