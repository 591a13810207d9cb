"""Completion queues and completion channels of the software device.

A queue that is polled while empty makes progress first, so that an application which polls drives everything. One
that waits does so in the provider, which wakes when something arrives, or when another thread has made the progress
that was waited for.

A channel has one event for each time one of its queues was armed, no more. Its descriptor polls readable when there
is an event *or progress to be made*; ``get(0)`` then makes it, and may find that no event came of it.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from rdmacm.errors import cm_error
from rdmacm.soft.pollable import Pollable
from rdmacm.verbs.enums import WC, WCStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmacm.soft.transport import Transport

__all__ = ["SoftCQ", "SoftChannel", "Waiting"]

_ANY, _SOLICITED = 1, 2


class Waiting(Protocol):
    """How a thread waits for what the provider's progress brings."""

    def drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Make progress until ``done()``, at most ``timeout`` seconds (None: for ever); what ``done()`` said last.

        Called without the provider's lock.
        """

    def wake(self) -> None:
        """Progress has been made that a thread inside :meth:`drive` waits for. Called under the provider's lock."""


class SoftChannel:
    """See :class:`rdmacm.verbs.backend.ChannelBackend`."""

    __slots__ = ("_closed", "_events", "_pollable", "_transport", "_waiters", "_waiting")

    def __init__(self, transport: Transport, waiting: Waiting) -> None:
        self._transport = transport
        self._waiting = waiting
        self._events: deque[SoftCQ] = deque()
        self._pollable: Pollable | None = None
        self._waiters = 0
        self._closed = False

    def post(self, cq: SoftCQ) -> None:
        """A queue that was armed has a completion."""
        self._events.append(cq)
        if self._pollable is not None:
            self._pollable.wake.set()
        if self._waiters:
            self._waiting.wake()

    def forget(self, cq: SoftCQ) -> None:
        """Drop what a queue has reported: it is going away."""
        if cq in self._events:
            self._events = deque(other for other in self._events if other is not cq)
            self._settle()

    def _settle(self) -> None:
        if self._pollable is not None and not self._events:
            self._pollable.wake.clear()

    def _take(self) -> SoftCQ | None:
        if self._closed:
            raise cm_error(errno.EBADF, "the channel is closed", "get_cq_event")
        if not self._events:
            return None
        cq = self._events.popleft()
        self._settle()
        return cq

    def get(self, timeout: float | None) -> object | None:
        lock = self._transport.lock
        limit = None if timeout is None else time.monotonic() + timeout
        with lock:
            cq = self._take()
            if cq is None:
                self._transport.progress()
                cq = self._take()
            if cq is not None:
                return cq.owner
            if timeout is not None and timeout <= 0:
                return None
            self._waiters += 1
        try:
            while True:
                found = self._waiting.drive(lambda: bool(self._events) or self._closed, timeout)
                with lock:
                    cq = self._take()
                if cq is not None:
                    return cq.owner
                if limit is not None:  # another thread may have been quicker
                    timeout = limit - time.monotonic()
                    if not found or timeout <= 0:
                        return None
        finally:
            with lock:
                self._waiters -= 1

    def fileno(self) -> int:
        with self._transport.lock:
            if self._closed:
                return -1
            if self._pollable is None:
                self._pollable = self._transport.open_pollable()
                if self._events:
                    self._pollable.wake.set()
            return self._pollable.fd

    def close(self) -> None:
        with self._transport.lock:
            if self._closed:
                return
            self._closed = True
            self._events.clear()
            if self._pollable is not None:
                self._transport.close_pollable(self._pollable)
                self._pollable = None
            if self._waiters:
                self._waiting.wake()


class SoftCQ:
    """See :class:`rdmacm.verbs.backend.CQBackend`.

    A queue that has no room for a completion is broken, as in hardware: ``overrun`` is set, the queue pairs that
    report to it go to the error state, and once what it still holds has been polled, polling raises EOVERFLOW.
    """

    __slots__ = ("_armed", "_channel", "_queue", "_transport", "_waiters", "_waiting", "cqe", "overrun", "owner")

    def __init__(
        self, transport: Transport, waiting: Waiting, cqe: int, channel: SoftChannel | None, owner: object
    ) -> None:
        self._transport = transport
        self._waiting = waiting
        self._channel = channel
        self._queue: deque[WC] = deque()
        self._armed = 0
        self._waiters = 0
        self.cqe = cqe
        self.owner = owner
        self.overrun = False

    def add(self, found: list[WC]) -> None:
        """Completions of a queue pair, oldest first."""
        if self.overrun:
            return
        queue = self._queue
        if len(queue) + len(found) > self.cqe:
            queue.extend(found[: self.cqe - len(queue)])
            self.overrun = True
            self._transport.cq_failed(self)
        else:
            queue.extend(found)
        if self._armed and (self._armed == _ANY or self.overrun or any(map(_is_solicited, found))):
            self._armed = 0
            if self._channel is not None:
                self._channel.post(self)
        if self._waiters:
            self._waiting.wake()

    def drop(self, qp_num: int) -> None:
        """Forget the completions of a queue pair that is gone."""
        if any(wc.qp_num == qp_num for wc in self._queue):
            kept = [wc for wc in self._queue if wc.qp_num != qp_num]
            self._queue.clear()
            self._queue.extend(kept)

    def poll(self, num_entries: int) -> list[WC]:
        queue = self._queue
        if not queue:
            self._transport.progress()
            if not queue:
                if self.overrun:
                    raise cm_error(
                        errno.EOVERFLOW,
                        f"more than {self.cqe} completions came between two polls, and some are lost",
                        "poll_cq",
                        hint="a larger completion queue",
                    )
                return []
        with self._transport.lock:
            count = len(queue)
            if count <= num_entries:
                found = list(queue)
                queue.clear()
                return found
            return [queue.popleft() for _ in range(num_entries)]

    def wait(self, timeout: float | None) -> bool:
        if self._ready():
            return True
        with self._transport.lock:
            self._waiters += 1
        try:
            return self._waiting.drive(self._ready, timeout)
        finally:
            with self._transport.lock:
                self._waiters -= 1

    def _ready(self) -> bool:
        return bool(self._queue) or self.overrun

    def req_notify(self, solicited_only: bool) -> None:
        with self._transport.lock:
            # Asking for less does not take back that more was asked for (InfiniBand Architecture 11.4.2.2).
            self._armed = _SOLICITED if solicited_only and self._armed != _ANY else _ANY

    def destroy(self) -> None:
        with self._transport.lock:
            self._queue.clear()
            self._armed = 0
            if self._channel is not None:
                self._channel.forget(self)
                self._channel = None


def _is_solicited(wc: WC) -> bool:
    return wc.solicited or wc.status is not WCStatus.SUCCESS
