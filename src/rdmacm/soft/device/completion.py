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
from rdmacm.proto.core_choice import compiled
from rdmacm.verbs.enums import WC, EventType, WCStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmacm.proto._core import CompletionQueue
    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.verbs.backend import AsyncEvents

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
            why = "the channel is closed" if self._closed else "the channel was made before fork(2)"
            raise cm_error(errno.EBADF, why, "get_cq_event")
        if not self._events:
            return None
        cq = self._events.popleft()
        self._pollable.signal(bool(self._events))
        return cq

    def get(self, timeout: float | None) -> object | None:
        cq = self._runtime.drive(self._take, timeout, self._events)
        if cq is None:
            return None
        cq.queue.waited = True
        return cq.owner

    def fileno(self) -> int:
        with self._runtime.lock:
            if self._closed:
                return -1
            return self._pollable.fileno(bool(self._events))

    def close(self) -> None:
        with self._runtime.lock:
            if not self._closed:
                self._closed = True
                self._events.clear()
                self._pollable.close()
                self._runtime.waiters.wake()


class _Completions(deque[WC]):
    """The completions of a queue, oldest first: ``CompletionQueue`` of the compiled core, in Python."""

    __slots__ = ("limit", "owner", "waited", "watched")

    waited: bool
    watched: bool

    def __init__(self, limit: int) -> None:
        super().__init__()
        #: See :class:`rdmacm.proto._core.CompletionQueue`. Nothing here reads ``watched`` and ``owner``.
        self.waited = self.watched = False
        self.owner: object = None
        self.limit: int = limit

    def add(self, found: list[WC]) -> int:
        added = found[: max(0, self.limit - len(self))]
        self.extend(added)
        return len(added)

    def resize(self, limit: int) -> int:
        if len(self) <= limit:
            self.limit = limit
        return len(self)

    def poll(self, _count: int) -> None:
        """Nothing: the caller makes the progress, and takes what there is."""

    def take(self, count: int) -> list[WC]:
        if count == 1:
            try:
                return [self.popleft()]
            except IndexError:  # another thread has taken it
                return []
        return [self.popleft() for _ in range(min(count, len(self)))]

    def drop(self, qp_num: int) -> None:
        if self and any(wc.qp_num == qp_num for wc in self):
            kept = [wc for wc in self if wc.qp_num != qp_num]
            self.clear()
            self.extend(kept)


class SoftCQ:
    """See :class:`rdmacm.verbs.backend.CQBackend`.

    A queue that has no room for a completion has overflowed, as in hardware: the queue pairs that report to it go to
    the error state, and once its last completion is polled, polling raises EOVERFLOW.
    """

    __slots__ = (
        "_armed",
        "_channel",
        "_is_destroyed",
        "_notify",
        "_runtime",
        "_mux",
        "cqe",
        "async_events",
        "overrun",
        "owner",
        "queue",
    )

    def __init__(
        self, runtime: Runtime, mux: QPMultiplexer, cqe: int, channel: SoftChannel | None, owner: object
    ) -> None:
        self._runtime = runtime
        self._mux = mux
        #: Where the queue reports when it is armed.
        self._channel = channel
        #: The completions that are not polled yet, oldest first. Its ``watched`` says whether :meth:`_reports` wants to
        #: know of what the compiled core adds, ``waited`` whether a wait has ended with these completions: the next
        #: poll takes them without sending the pending ACKs.
        self.queue: CompletionQueue | _Completions
        if compiled is None or not runtime.is_real_time:
            self.queue = _Completions(cqe)
        else:
            self.queue = compiled.CompletionQueue(mux.core_wire, cqe)
            self.queue.owner = self
        #: 0, or how the queue is armed.
        self._armed = 0
        #: Whether :meth:`destroy` has been called; threads may still wait then.
        self._is_destroyed = False
        self._notify: Callable[[], None] | None = None
        #: Takes CQ_ERR when it has overflowed.
        self.async_events: AsyncEvents | None = None
        #: How many completions it has room for.
        self.cqe: int = cqe
        #: The API object that a channel returns.
        self.owner: object = owner
        #: Whether it has overflowed.
        self.overrun: bool = False
        runtime.use(self)

    @property
    def notify(self) -> Callable[[], None] | None:
        """Called after completions are added, and after those of a queue pair are dropped."""
        return self._notify

    @notify.setter
    def notify(self, notify: Callable[[], None] | None) -> None:
        self._notify = notify
        self._watch()

    def _watch(self) -> None:
        """Have :meth:`added` called, if anybody wants to know of completions."""
        self.queue.watched = self._armed != 0 or self._notify is not None

    def add(self, found: list[WC]) -> None:
        """Add completions of a queue pair, oldest first."""
        if self.overrun:
            return
        if self.queue.add(found) < len(found):
            self._overflow()
        waiters = self._runtime.waiters
        if waiters.polling:
            waiters.wake()
        if self._armed or self._notify is not None:
            self._report(any(map(_is_solicited, found)) if self._armed == _SOLICITED else False)

    def added(self, solicited: bool, overrun: bool) -> None:
        """The compiled core has added completions, perhaps a solicited one, or one more than there was room for."""
        if overrun and not self.overrun:
            self._overflow()
        self._report(solicited)

    def _overflow(self) -> None:
        self.overrun = True
        if self.async_events is not None:
            self.async_events.post(EventType.CQ_ERR)
        self._mux.cq_failed(self)

    def _report(self, solicited: bool) -> None:
        if self._armed and (self._armed == _ANY or self.overrun or solicited):
            self._armed = 0
            self._watch()
            if self._channel is not None:
                self._channel.post(self)
        if self._notify is not None:
            self._notify()

    def drop(self, qp_num: int) -> None:
        """Remove the completions of a queue pair that is reset or destroyed."""
        self.queue.drop(qp_num)
        if self._notify is not None:
            self._runtime.waiters.wake()
            self._notify()

    def poll(self, num_entries: int) -> list[WC]:
        queue = self.queue
        if not self._mux.pending_acks:
            polled = queue.poll(num_entries)
            if polled is not None:
                return polled
        self._runtime.check_fork("poll_cq", "completion queue")
        if queue:
            if queue.waited:
                queue.waited = False
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
        if num_entries == 1 and type(queue) is _Completions:
            return queue.take(1)
        with self._runtime.lock:
            return queue.take(num_entries)

    def _acknowledge(self) -> None:
        """Send the ACKs that are pending: this caller takes queued completions and makes no progress."""
        if self._mux.pending_acks:
            with self._runtime.lock:
                self._runtime.progress_count += 1
                self._mux.acknowledge()

    def wait(self, timeout: float | None) -> bool:
        waited = self.queue.waited = self._runtime.drive(self._ready, timeout, self.queue)
        return waited

    def _ready(self) -> bool:
        self._runtime.check_fork("poll_cq", "completion queue")
        if self._is_destroyed:
            raise cm_error(errno.EBADF, "the completion queue is closed", "wait")
        return bool(self.queue) or self.overrun

    def req_notify(self, solicited_only: bool) -> None:
        with self._runtime.lock:
            # A request for solicited completions does not undo one for any (InfiniBand Architecture 11.4.2.2).
            self._armed = _SOLICITED if solicited_only and self._armed != _ANY else _ANY
            self._watch()

    def resize(self, cqe: int) -> None:
        with self._runtime.lock:
            if self.overrun:
                raise cm_error(errno.EINVAL, "the queue has overflowed", "resize_cq", hint="a new completion queue")
            count = self.queue.resize(cqe)
            if count > cqe:
                text = f"the queue has {count} completions, and would have room for {cqe}"
                raise cm_error(errno.EINVAL, text, "resize_cq", hint="poll() them first")
            self.cqe = cqe

    def destroy(self) -> None:
        with self._runtime.lock:
            self.queue.clear()
            self.queue.owner = None
            self._armed = 0
            self._is_destroyed = True
            self._runtime.waiters.wake()
            if self._channel is not None:
                self._channel.forget(self)
                self._channel = None
            self._runtime.release(self)


def _is_solicited(wc: WC) -> bool:
    return wc.solicited or wc.status is not WCStatus.SUCCESS
