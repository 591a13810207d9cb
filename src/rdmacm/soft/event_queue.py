"""Event queues: what waits to be read on an event channel."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from rdmacm.constants import CmEventType
from rdmacm.errors import cm_error
from rdmacm.progress.waiting import Pollable
from rdmacm.provider import QueuedEvent

if TYPE_CHECKING:
    from rdmacm.soft.cm.connecting import SoftId
    from rdmacm.soft.cm.identifier import ResolvingId
    from rdmacm.soft.provider import SoftProvider


class SoftQueue:
    """The queue of one event channel."""

    def __init__(self, provider: SoftProvider) -> None:
        self.provider = provider
        self._events: deque[QueuedEvent] = deque()
        #: Made when its descriptor is first asked for.
        self._pollable: Pollable | None = None
        self._closed = False
        self.notify: Callable[[], None] | None = None
        #: The ids whose events come here.
        self.ids: dict[ResolvingId, None] = {}

    def post(self, event: QueuedEvent) -> None:
        with self.provider.lock:
            if self._closed:
                return
            self._events.append(event)
            if self._pollable is not None:
                self._pollable.signal(True)
            waiters = self.provider.waiters
            if waiters.polling:
                waiters.wake()
            if self.notify is not None:
                self.notify()

    @property
    def ready(self) -> bool:
        """Whether an event waits."""
        return bool(self._events)

    def take(self, owner: object) -> list[QueuedEvent]:
        with self.provider.lock:
            if not self._events:
                return []
            taken = [event for event in self._events if event.owner is owner]
            if taken:
                self._events = deque(event for event in self._events if event.owner is not owner)
                self._signal()
            return taken

    def get(self, timeout: float | None) -> QueuedEvent | None:
        provider = self.provider
        if self._events and provider.clock() < provider.progress_due:
            with provider.lock:
                event = self._pop()
            if event is not None:
                return event
        return provider.drive(self._pop, timeout)

    def _pop(self) -> QueuedEvent | None:
        if self._closed or self.provider.abandoned:
            why = "the channel is closed" if self._closed else "the channel was made before fork(2)"
            raise cm_error(errno.EBADF, why, "get_cm_event")
        if not self._events:
            return None
        event = self._events.popleft()
        event.owner.reported()  # under the lock, so that destroying the id either sees it or discards the event
        if event.type is CmEventType.CONNECT_REQUEST and event.new_id is not None:
            cast("SoftId", event.new_id).delivered()
        if self._pollable is not None:
            self._signal()
        return event

    def _signal(self) -> None:
        if self._pollable is not None:
            self._pollable.signal(bool(self._events))

    def fileno(self) -> int:
        with self.provider.lock:
            if self._closed:
                return -1
            if self._pollable is None:
                self._pollable = Pollable(self.provider)
            fd = self._pollable.fileno()
            self._signal()
            return fd

    def close(self) -> None:
        with self.provider.lock:
            if self._closed:
                return
            for waiting in list(self.ids):  # as the kernel does when the descriptor of a channel is closed
                waiting.destroy()
            self._closed = True
            self._events.clear()
            if self._pollable is not None:
                self._pollable.close()
            self.provider.waiters.wake()
        self.provider.closed(self)
