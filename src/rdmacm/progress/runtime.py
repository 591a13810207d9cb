"""The runtime of one provider: one lock, one clock, the timers, and who uses the provider.

Objects of a provider take a :class:`Runtime` instead of the provider. They call :meth:`Runtime.call_at` for a deadline,
:meth:`Runtime.drive` to wait, and :meth:`Runtime.use` for as long as they need the provider's descriptors.

**Locks.** There is one reentrant lock. A callback of a timer, of a descriptor or of :meth:`Runtime.drive` runs with the
lock held and must not wait. No thread waits with the lock held.

**Progress** runs in the calling thread. The provider attaches a :class:`Driver`, which receives, sends and looks at the
network; the runtime calls it from every wait and poll, then fires the timers that are due.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sized
from typing import Protocol, TypeVar

from rdmacm.errors import cm_error
from rdmacm.progress.pollable import Pollable
from rdmacm.progress.timers import Timer, Timers
from rdmacm.progress.waiting import Waiters

__all__ = ["Driver", "Runtime"]

T = TypeVar("T")

#: Seconds. A caller that only takes what is queued makes progress after this long; less than the helper's grace period.
_PROGRESS_INTERVAL = 0.001
#: Of so many polls for packets, one makes full progress.
_POLLS_PER_PROGRESS = 128
#: After so many polls without a packet, the processor is yielded once: the peer may need it.
_POLLS_PER_YIELD = 16

_sched_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)


class Driver(Protocol):
    """The input and output that a runtime drives. A provider attaches one with :meth:`Runtime.attach`."""

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that poll readable when :meth:`progress` has something to do."""

    def progress(self, now: float, result_queue: Sized) -> None:
        """Receive, send, and look at the network, a bounded amount of each. Called with the lock held.

        ``result_queue`` is the caller's: once it is not empty, return and defer ACKs to the next call.
        """

    def poll(self, result_queue: Sized) -> bool:
        """Receive and send packets only; False when there was nothing to do. Takes the lock itself."""

    def opened(self) -> None:
        """The first user has come: open what belongs to the calling thread's network namespace."""

    def released(self) -> None:
        """The last user has gone: close every descriptor."""

    def deadlines_changed(self) -> None:
        """The descriptors, or the first deadline, are not what they were: wake background threads."""


class Runtime:
    """See the module. ``clock`` reads seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        #: Whether the clock is the system's; a virtual one has no descriptors and no threads.
        self.is_real_time = clock is time.monotonic
        self.lock = threading.RLock()
        #: Whether this is a child of fork(2), where the descriptors are the parent's.
        self.abandoned = False
        #: Counts calls that made progress; the helper thread compares it with what it saw.
        self.progress_count = 0
        #: On ``clock``: when a caller that only takes what is queued has to make progress as well.
        self.progress_due = 0.0
        #: Descriptors for readers that wait in select(2) or an event loop.
        self.pollables: set[Pollable] = set()
        self.waiters = Waiters(self)
        self._driver: Driver | None = None
        self._timers = Timers()
        #: Channels, completion queues and questions in progress; the descriptors are closed with the last one.
        self._users: dict[object, None] = {}
        #: Polls so far, and those of them without a packet.
        self._polls = 0
        self._empty_polls = 0

    def attach(self, driver: Driver) -> None:
        """Set what this runtime drives; once, by the provider."""
        self._driver = driver

    @property
    def driver(self) -> Driver:
        """What this runtime drives."""
        assert self._driver is not None
        return self._driver

    def check_fork(self, call: str) -> None:
        """Raise EBADF for an object that was made before fork(2)."""
        if self.abandoned:
            raise cm_error(errno.EBADF, "the channel was made before fork(2)", call, hint="a channel of this process")

    # -- progress -------------------------------------------------------------------------------------

    def progress(self, result_queue: Sized = ()) -> None:
        """Receive, send, look at the network, and fire the timers that are due. The lock is held."""
        if self.abandoned:
            return
        self.progress_count += 1
        now = self.clock()
        self.progress_due = now + _PROGRESS_INTERVAL
        self.driver.progress(now, result_queue)
        self.fire_timers()

    def poll(self, result_queue: Sized = ()) -> bool:
        """Progress for a caller that polls: packets each time, everything else in one call of 128.

        False when there was nothing to do. Takes the lock itself.
        """
        self._polls += 1
        if self._polls % _POLLS_PER_PROGRESS == 0:
            with self.lock:
                self.progress(result_queue)
            return True
        self.progress_count += 1
        if self.driver.poll(result_queue):
            self._empty_polls = 0
            return True
        self._empty_polls += 1
        if self._empty_polls % _POLLS_PER_YIELD == 0 and _sched_yield is not None:
            _sched_yield()
        return False

    def drive(self, done: Callable[[], T], timeout: float | None, result_queue: Sized = ()) -> T:
        """Make progress until ``done()`` returns something true (:meth:`rdmacm.progress.waiting.Waiters.drive`)."""
        return self.waiters.drive(done, timeout, result_queue)

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that poll readable when :meth:`progress` has something to do."""
        return self.driver.filenos()

    # -- timers ---------------------------------------------------------------------------------------

    def call_at(self, when: float, callback: Callable[[float], None]) -> Timer:
        """Call ``callback(now)`` once ``when`` has come, on :attr:`clock`. The lock is held, then and now."""
        before = self._timers.deadline
        timer = self._timers.add(when, callback)
        if before is None or when < before:
            for pollable in self.pollables:
                pollable.rearm(when)
            self._wake_all()
        return timer

    def fire_timers(self) -> None:
        """Call the callbacks that are due."""
        if self._timers.fire(self.clock()):
            # Timer descriptors that have fired stay readable until they are armed again.
            deadline = self._timers.deadline
            for pollable in self.pollables:
                pollable.rearm(deadline)

    def next_deadline(self) -> float | None:
        """When :meth:`progress` has to be called at the latest, on :attr:`clock`; None for never."""
        return self._timers.deadline

    # -- descriptors ----------------------------------------------------------------------------------

    def pollable(self) -> Pollable:
        """A descriptor for one reader; made when it is first asked for."""
        return Pollable(self)

    def descriptors_changed(self) -> None:
        """:meth:`filenos` returns other descriptors than before."""
        for pollable in self.pollables:
            pollable.watch()
        self._wake_all()

    def _wake_all(self) -> None:
        self.waiters.wake()
        self.driver.deadlines_changed()

    # -- users ----------------------------------------------------------------------------------------

    def use(self, user: object) -> None:
        """Keep the descriptors open for ``user``, until :meth:`closed`."""
        with self.lock:
            if not self._users:
                self.driver.opened()
            self._users[user] = None

    def closed(self, user: object) -> None:
        """``user`` needs the descriptors no more; with the last user they are closed."""
        with self.lock:
            if self._users.pop(user, self) is None and not self._users:
                self._release()

    @property
    def in_use(self) -> bool:
        """Whether there is a user."""
        return bool(self._users)

    def users(self) -> list[object]:
        """The users, in the order they came."""
        return list(self._users)

    def retire(self) -> bool:
        """Close everything if there is no user; True if that was so."""
        with self.lock:
            if not self._users:
                self._release()
            return not self._users

    def _release(self) -> None:
        self.driver.released()
        self.waiters.close()
        self._timers.clear()

    def abandon(self) -> None:
        """In a child of fork(2): close our copies of descriptors, and refuse objects made before.

        The lock is a new one, as a thread that exists in the parent only may hold the old one.
        """
        self.lock = threading.RLock()
        self.abandoned = True
        # A wake-up that is set or cleared here would reach the parent's threads.
        self.waiters.abandon()
        for pollable in list(self.pollables):
            pollable.close()
