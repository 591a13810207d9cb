"""Completion queues and completion channels of the software device.

Polling an empty queue makes progress first, so that an application that polls drives the whole device. A wait drives it
as well, and ends when this or another thread's progress has completed something.

A channel gets one event for each time that one of its queues is armed. Its descriptor polls readable when there is an
event *or progress can be made*; ``get(0)`` makes that progress, and may then return no event.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.progress.runtime import Runtime
from rdmacm.verbs.enums import WC, EventType, WCStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.verbs.backend import AsyncEvents

__all__ = ["SoftCQ", "SoftChannel"]

# How a queue is armed: for any completion, or for solicited ones and errors.
_ANY, _SOLICITED = 1, 2


class SoftChannel:
    """See :class:`rdmacm.verbs.backend.ChannelBackend`."""

    __slots__ = ("_closed", "_events", "_pollable", "_runtime")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        #: The queues that have reported, oldest first.
        self._events: deque[SoftCQ] = deque()
        self._pollable = runtime.pollable()
        self._closed = False

    def post(self, cq: SoftCQ) -> None:
        """Add the event of an armed queue that has a completion."""
        self._events.append(cq)
        self._pollable.signal(True)

    def forget(self, cq: SoftCQ) -> None:
        """Drop the events of a queue that is being destroyed."""
        if cq in self._events:
            self._events = deque(other for other in self._events if other is not cq)
            self._pollable.signal(bool(self._events))

    def _take(self) -> SoftCQ | None:
        if self._closed or self._runtime.abandoned:
            raise cm_error(errno.EBADF, "the channel is closed", "get_cq_event")
        if not self._events:
            return None
        cq = self._events.popleft()
        self._pollable.signal(bool(self._events))
        return cq

    def get(self, timeout: float | None) -> object | None:
        cq = self._runtime.drive(self._take, timeout, self._events)
        if cq is None:
            return None
        cq.waited = True
        return cq.owner

    def fileno(self) -> int:
        with self._runtime.lock:
            if self._closed:
                return -1
            fd = self._pollable.fileno()
            self._pollable.signal(bool(self._events))
            return fd

    def close(self) -> None:
        with self._runtime.lock:
            if not self._closed:
                self._closed = True
                self._events.clear()
                self._pollable.close()
                self._runtime.waiters.wake()


class SoftCQ:
    """See :class:`rdmacm.verbs.backend.CQBackend`.

    A queue that has no room for a completion has overflowed, as in hardware: the queue pairs that report to it go to
    the error state, and once its last completion is polled, polling raises EOVERFLOW.
    """

    __slots__ = (
        "_armed",
        "_channel",
        "_is_destroyed",
        "_queue",
        "_runtime",
        "_mux",
        "cqe",
        "notify",
        "async_events",
        "overrun",
        "owner",
        "waited",
    )

    def __init__(
        self, runtime: Runtime, mux: QPMultiplexer, cqe: int, channel: SoftChannel | None, owner: object
    ) -> None:
        self._runtime = runtime
        self._mux = mux
        #: Where the queue reports when it is armed.
        self._channel = channel
        #: The completions that are not polled yet, oldest first.
        self._queue: deque[WC] = deque()
        #: 0, or how the queue is armed.
        self._armed = 0
        #: Whether :meth:`destroy` has been called; threads may still wait then.
        self._is_destroyed = False
        #: Called after completions are added, and after those of a queue pair are dropped.
        self.notify: Callable[[], None] | None = None
        #: Takes CQ_ERR when it has overflowed.
        self.async_events: AsyncEvents | None = None
        #: How many completions it has room for.
        self.cqe = cqe
        #: The API object that a channel returns.
        self.owner = owner
        #: Whether it has overflowed.
        self.overrun = False
        #: Whether a wait has ended with these completions; the next poll takes them without sending the pending ACKs.
        self.waited = False
        runtime.use(self)

    def add(self, found: list[WC]) -> None:
        """Add completions of a queue pair, oldest first."""
        if self.overrun:
            return
        queue = self._queue
        if len(queue) + len(found) > self.cqe:
            queue.extend(found[: self.cqe - len(queue)])
            self.overrun = True
            if self.async_events is not None:
                self.async_events.post(EventType.CQ_ERR)
            self._mux.cq_failed(self)
        else:
            queue.extend(found)
        if self._armed and (self._armed == _ANY or self.overrun or any(map(_is_solicited, found))):
            self._armed = 0
            if self._channel is not None:
                self._channel.post(self)
        waiters = self._runtime.waiters
        if waiters.polling:
            waiters.wake()
        if self.notify is not None:
            self.notify()

    def drop(self, qp_num: int) -> None:
        """Remove the completions of a queue pair that is reset or destroyed."""
        if self._queue and any(wc.qp_num == qp_num for wc in self._queue):
            kept = [wc for wc in self._queue if wc.qp_num != qp_num]
            self._queue.clear()
            self._queue.extend(kept)
        if self.notify is not None:
            self._runtime.waiters.wake()
            self.notify()

    def poll(self, num_entries: int) -> list[WC]:
        queue = self._queue
        if queue:
            if self.waited:
                self.waited = False
            else:
                self._acknowledge()
        else:
            self._runtime.poll(queue)
            if not queue:
                if self.overrun:
                    raise cm_error(
                        errno.EOVERFLOW,
                        f"more than {self.cqe} completions arrived between two polls, and some are lost",
                        "poll_cq",
                        hint="a larger completion queue",
                    )
                return []
        if num_entries == 1:
            try:
                return [queue.popleft()]
            except IndexError:  # another thread has taken it
                return []
        with self._runtime.lock:
            count = len(queue)
            if count <= num_entries:
                found = [*queue]
                queue.clear()
                return found
            return [queue.popleft() for _ in range(num_entries)]

    def _acknowledge(self) -> None:
        """Send the ACKs that are pending: this caller takes queued completions and makes no progress."""
        if self._mux.pending_acks:
            with self._runtime.lock:
                self._runtime.progress_count += 1
                self._mux.acknowledge()

    def wait(self, timeout: float | None) -> bool:
        self.waited = self._runtime.drive(self._ready, timeout, self._queue)
        return self.waited

    def _ready(self) -> bool:
        if self._runtime.abandoned:
            raise cm_error(errno.EBADF, "the completion queue was made before fork(2)", "poll_cq")
        if self._is_destroyed:
            raise cm_error(errno.EBADF, "the completion queue is closed", "wait")
        return bool(self._queue) or self.overrun

    def req_notify(self, solicited_only: bool) -> None:
        with self._runtime.lock:
            # A request for solicited completions does not undo one for any (InfiniBand Architecture 11.4.2.2).
            self._armed = _SOLICITED if solicited_only and self._armed != _ANY else _ANY

    def resize(self, cqe: int) -> None:
        with self._runtime.lock:
            if self.overrun:
                raise cm_error(errno.EINVAL, "the queue has overflowed", "resize_cq", hint="a new completion queue")
            count = len(self._queue)
            if count > cqe:
                text = f"the queue has {count} completions, and would have room for {cqe}"
                raise cm_error(errno.EINVAL, text, "resize_cq", hint="poll() them first")
            self.cqe = cqe

    def destroy(self) -> None:
        with self._runtime.lock:
            self._queue.clear()
            self._armed = 0
            self._is_destroyed = True
            self._runtime.waiters.wake()
            if self._channel is not None:
                self._channel.forget(self)
                self._channel = None
            self._runtime.release(self)


def _is_solicited(wc: WC) -> bool:
    return wc.solicited or wc.status is not WCStatus.SUCCESS
