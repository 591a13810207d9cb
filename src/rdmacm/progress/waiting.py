"""Waiting: a thread that waits makes the provider's progress.

A background thread that received packets would compete with the waiting thread for the interpreter, which costs
milliseconds a round trip. So :meth:`Waiters.drive` polls the provider's descriptors in the thread that waits and makes
progress there. When another thread's progress completes what a thread waits for, :meth:`Waiters.wake` wakes it; that
costs nothing while no thread is inside poll(2).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sized
from typing import Protocol, TypeVar

from rdmacm.progress.wake import Waiter
from rdmacm.protection import deferred_finalizers, run_finalizers

__all__ = ["Progress", "Waiters"]

T = TypeVar("T")

#: The number of idle waiters that are kept for the next wait. Each has a descriptor.
_KEPT = 4

#: Seconds that a wait polls before it sleeps, which is longer than a small reply takes. Sleeping and waking up would
#: cost more than the reply.
_SPIN = 0.0001
#: After a spin that found nothing, the next wait sleeps at once; after two such spins the next 3 waits do, then the
#: next 7, and so on up to this many.
_MOST_SKIPPED = 64


class Progress(Protocol):
    """The runtime as waiting threads use it (:class:`rdmacm.progress.runtime.Runtime`)."""

    lock: threading.RLock
    clock: Callable[[], float]
    is_real_time: bool
    #: When progress has to be made again, in seconds of ``clock``.
    progress_due: float

    @property
    def in_use(self) -> bool: ...

    def progress(self, result_queue: Sized = ()) -> None: ...

    def poll(self, result_queue: Sized = ()) -> bool: ...

    def filenos(self) -> tuple[int, ...]: ...

    def next_deadline(self) -> float | None: ...


class Waiters:
    """The threads that wait on one provider."""

    def __init__(self, runtime: Progress) -> None:
        self._runtime = runtime
        #: Waiters that no thread uses.
        self._idle: list[Waiter] = []
        #: With one processor, a thread that spins would keep it from the peer.
        self._is_single_processor = _count_cpus() < 2
        #: Whether a thread spins; one at a time does.
        self._is_spinning = False
        #: How many waits sleep without a spin before the next spin, and how many of them have.
        self._skip = self._skipped = 0
        #: The waiters of threads that are inside poll(2), or about to be.
        self.polling: set[Waiter] = set()

    def drive(self, done: Callable[[], T], timeout: float | None, result_queue: Sized = ()) -> T:
        """Make progress until ``done()`` returns a true value; returns its last value. It is called with the lock held.

        ``timeout`` is in seconds: None waits for ever, 0 makes progress once.
        ``result_queue`` is the queue, if any, that ``done()`` looks at: once it is not empty, progress returns early
        and defers ACKs to the next call.
        """
        runtime = self._runtime
        if deferred_finalizers:
            run_finalizers()
        with runtime.lock:
            found = done()
            if found:
                # A caller that takes queued results makes progress too, now and then. Otherwise the helper thread
                # would start to, and the two would compete for the interpreter.
                if runtime.clock() >= runtime.progress_due:
                    runtime.progress(result_queue)
                return found
            if timeout is not None and timeout <= 0:
                runtime.progress(result_queue)
                return done()
        limit = None if timeout is None else time.monotonic() + timeout
        seen = self._spin(done, timeout, result_queue)
        if seen:
            return seen
        with runtime.lock:
            runtime.progress(result_queue)
            found = done()
            if found:
                return found
            waiter = self._idle.pop() if self._idle else Waiter()
        try:
            return self._sleep(waiter, done, limit, result_queue)
        finally:
            with runtime.lock:
                self.polling.discard(waiter)
                self._put_back(waiter)

    def _sleep(self, waiter: Waiter, done: Callable[[], T], limit: float | None, result_queue: Sized) -> T:
        """Sleep and make progress in turn, until ``done()`` or ``limit``."""
        runtime = self._runtime
        while True:
            with runtime.lock:
                found = done()  # another thread may have made the progress
                if found:
                    return found
                deadline = runtime.next_deadline()
                waiter.prepare(runtime.filenos(), None if deadline is None else deadline - runtime.clock())
                self.polling.add(waiter)
            waiter.wait(limit)
            with runtime.lock:
                self.polling.discard(waiter)
                runtime.poll(result_queue)
                found = done()
                if not found:
                    runtime.progress(result_queue)
                    found = done()
            if found or (limit is not None and time.monotonic() >= limit):
                return found

    def _spin(self, done: Callable[[], T], timeout: float | None, result_queue: Sized) -> T | None:
        """Poll for a moment, unless the last spins found nothing; returns what ``done()`` returned last."""
        runtime = self._runtime
        with runtime.lock:
            if self._is_single_processor or self._is_spinning or not runtime.is_real_time or not runtime.in_use:
                return None
            if self._skipped < self._skip:
                self._skipped += 1
                return None
            self._is_spinning = True
        until = time.monotonic() + (_SPIN if timeout is None else min(_SPIN, timeout))
        found = None
        try:
            while not found and time.monotonic() < until:
                if runtime.poll(result_queue):
                    with runtime.lock:
                        found = done()
        finally:
            with runtime.lock:
                self._is_spinning = False
                self._skipped = 0
                self._skip = 0 if found else min(2 * self._skip + 1, _MOST_SKIPPED)
        return found

    def _put_back(self, waiter: Waiter) -> None:
        if len(self._idle) < _KEPT and self._runtime.in_use and waiter.wake.fd >= 0:
            self._idle.append(waiter)
        else:
            waiter.wake.close()
        self.wake()  # the others may rely on this thread for the first deadline

    def wake(self) -> None:
        """Make every waiting thread call its ``done()`` again. The lock is held."""
        for waiter in self.polling:
            waiter.wake.set()

    def close(self) -> None:
        """Release the descriptors of idle waiters."""
        for waiter in self._idle:
            waiter.wake.close()
        self._idle.clear()

    def abandon(self) -> None:
        """In a child of fork(2), which has none of the waiting threads."""
        self.polling.clear()
        self.close()


def _count_cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
