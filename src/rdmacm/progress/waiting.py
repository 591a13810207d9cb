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

from rdmacm.interrupts import handlers
from rdmacm.interrupts.protection import deferred_finalizers, run_finalizers
from rdmacm.progress.wake import Waiter

T = TypeVar("T")

#: The number of idle waiters that are kept for the next wait. Each has a descriptor.
_KEPT = 4

#: Seconds that a wait polls before it sleeps, which is longer than a small reply takes, and the answer to a connection
#: request. Sleeping and waking up would cost more than the reply.
_SPIN = 0.0002
#: After a spin that found nothing, the next wait sleeps at once; after two such spins the next 3 waits do, then the
#: next 7, and so on up to this many.
_MOST_SKIPPED = 64
#: A spin that took longer, in seconds, has lost the processor to other work. Had the thread slept, it would have been
#: woken before that. Unless spins have gone well for this many times as long since the last such loss, waits sleep at
#: once for so many times as long: at most one part in so many is lost.
_LOST, _WORTH, _PENALTY = 0.001, 10, 32
#: With one processor: how often a wait yields it to the peer before it sleeps.
_YIELDS = 8

_sched_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)


class Progress(Protocol):
    """The runtime as waiting threads use it (:class:`rdmacm.progress.runtime.Runtime`)."""

    lock: threading.RLock
    clock: Callable[[], float]
    is_real_time: bool
    #: When the last progress or poll began, and when progress has to be made again, in seconds of ``clock``.
    now: float
    progress_due: float
    #: When the signal handlers are looked at again, in seconds of ``clock``.
    signals_due: float
    #: Whether progress consists of reading descriptors that poll readable, so that a thread may sleep without it.
    only_reads: bool
    #: Whether the descriptors are open.
    in_use: bool

    def progress(self, result_queue: Sized = (), now: float | None = None) -> None: ...

    def poll(self, result_queue: Sized = ()) -> bool: ...

    def filenos(self) -> tuple[int, ...]: ...

    def next_deadline(self) -> float | None: ...


class Waiters:
    """The threads that wait on one provider."""

    def __init__(self, runtime: Progress) -> None:
        self._runtime = runtime
        #: Waiters that no thread uses.
        self._idle: list[Waiter] = []
        #: With one processor, a thread that spins would keep it from the peer, so it yields instead.
        self._is_single_processor = count_cpus() < 2
        #: Whether a thread spins; one at a time does.
        self._is_spinning = False
        #: How many waits sleep without a spin before the next spin, and how many of them have.
        self._skip = self._skipped = 0
        #: Waits sleep without a spin before, in seconds of the runtime's clock.
        self._sleeps_until = 0.0
        #: Seconds of all spins since one has lost the processor.
        self._spun = 0.0
        #: The waiters of threads that are inside poll(2), or about to be.
        self.polling: set[Waiter] = set()

    def drive(
        self,
        done: Callable[[], T],
        timeout: float | None,
        result_queue: Sized = (),
        look: Callable[[], T] | None = None,
    ) -> T:
        """Make progress until ``done()`` returns a true value; returns its last value. It is called with the lock held.

        ``timeout`` is in seconds: None waits for ever, 0 makes progress once.
        ``result_queue`` is the queue, if any, that ``done()`` looks at: once it is not empty, progress returns early
        and defers ACKs to the next call. ``look`` is called instead of ``done`` until the thread is about to sleep: it
        does not ask to be woken, as ``done`` may.
        """
        runtime = self._runtime
        if deferred_finalizers:
            run_finalizers()
        now = runtime.now = runtime.clock()
        with runtime.lock:
            if now >= runtime.signals_due and handlers.refresh():  # before a result is taken
                runtime.signals_due = now + handlers.INTERVAL
            found = done() if look is None else look()
            if found:
                # A caller that takes queued results makes progress too, now and then. Otherwise the helper thread
                # would start to, and the two would compete for the interpreter.
                if now >= runtime.progress_due:
                    runtime.progress(result_queue, now)
                return found
            if timeout is not None and timeout <= 0:
                runtime.progress(result_queue, now)
                return done()
            limit = None if timeout is None else (now if runtime.is_real_time else time.monotonic()) + timeout
            waiter = None
            spins = self._begin_spin(can_yield=look is not None)
            if not spins and runtime.only_reads:
                if look is not None:
                    found = done()
                    if found:
                        return found
                waiter = self._enter()
        if waiter is None:
            seen = self._spin(look or done, timeout, result_queue) if spins else None
            if seen:
                return seen
            with runtime.lock:
                if not runtime.only_reads:
                    runtime.progress(result_queue, runtime.now)
                found = done()
                if found:
                    return found
                waiter = self._enter()
        try:
            return self._sleep(waiter, done, timeout, limit, result_queue)
        finally:
            with runtime.lock:
                self.polling.discard(waiter)
                self._put_back(waiter)

    def _enter(self) -> Waiter:
        """A waiter for a thread that is about to sleep. The lock is held since ``done()`` has found nothing."""
        waiter = self._idle.pop() if self._idle else Waiter()
        self._prepare(waiter)
        return waiter

    def _prepare(self, waiter: Waiter) -> None:
        runtime = self._runtime
        deadline = runtime.next_deadline()
        waiter.prepare(runtime.filenos(), None if deadline is None else deadline - runtime.now)
        self.polling.add(waiter)

    def _sleep(
        self, waiter: Waiter, done: Callable[[], T], timeout: float | None, limit: float | None, result_queue: Sized
    ) -> T:
        """Sleep and make progress in turn, until ``done()`` or ``limit``, which is ``timeout`` seconds from now."""
        runtime = self._runtime
        left = timeout
        while True:
            waiter.wait(left)
            with runtime.lock:
                self.polling.discard(waiter)
                runtime.poll(result_queue)
                found = done()
                if not found:
                    runtime.progress(result_queue, runtime.now)
                    found = done()
            if found:
                return found
            if limit is not None:
                left = limit - time.monotonic()
                if left <= 0:
                    return found
            with runtime.lock:
                found = done()  # another thread may have made the progress
                if found:
                    return found
                self._prepare(waiter)

    def _begin_spin(self, *, can_yield: bool) -> bool:
        """Whether to spin now: not after spins that found nothing, or lost the processor. The lock is held.

        ``can_yield``: whether ``done()`` alone sees what others do while this thread yields the processor to them.
        """
        runtime = self._runtime
        if (self._is_single_processor and not can_yield) or self._is_spinning:
            return False
        if not runtime.is_real_time or not runtime.in_use or runtime.now < self._sleeps_until:
            return False
        self._skipped += 1
        self._is_spinning = self._skipped > self._skip
        return self._is_spinning

    def _spin(self, done: Callable[[], T], timeout: float | None, result_queue: Sized) -> T | None:
        """Poll for a moment; returns what ``done()`` returned last. :meth:`_begin_spin` has returned True."""
        runtime = self._runtime
        found = None
        begun = runtime.now
        try:
            if self._is_single_processor:
                found = self._yield(done)
            else:
                until = begun + (_SPIN if timeout is None else min(_SPIN, timeout))
                while not found and runtime.now < until:  # each poll reads the clock
                    if runtime.poll(result_queue):
                        with runtime.lock:
                            found = done()
        finally:
            ended = runtime.clock()
            with runtime.lock:
                self._count(ended - begun, ended)
                self._is_spinning = False
                self._skipped = 0
                self._skip = 0 if found else min(2 * self._skip + 1, _MOST_SKIPPED)
        return found

    def _count(self, took: float, now: float) -> None:
        """Count a spin, in seconds, that has ended now."""
        if took <= _LOST:
            self._spun += took
            return
        if self._spun < _WORTH * took:
            self._sleeps_until = now + _PENALTY * took
        self._spun = 0.0

    def _yield(self, done: Callable[[], T]) -> T | None:
        """Yield the processor a few times, until ``done()``; returns what it returned last."""
        found = None
        if _sched_yield is not None:
            for _ in range(_YIELDS):
                _sched_yield()
                with self._runtime.lock:
                    found = done()
                if found:
                    break
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


def count_cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
