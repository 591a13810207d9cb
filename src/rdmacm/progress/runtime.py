"""The runtime of one provider: one lock, one clock, the timers, and the users of the provider.

Objects of a provider take a :class:`Runtime` instead of the provider. They call :meth:`Runtime.call_at` for a deadline,
:meth:`Runtime.drive` to wait, and :meth:`Runtime.use` as long as they need the provider's descriptors. The provider
attaches a :class:`Driver`, which receives and sends; each wait and poll calls it in the calling thread, and then fires
the timers that are due.

**Which lock, for which call.** These are the rules of the whole package.

The runtime's lock
    One re-entrant lock guards everything inside one provider: ids, event queues, connection managers, engines, memory
    tables, queue pairs and wire. The methods of the seam (:mod:`rdmacm.provider`, :mod:`rdmacm.verbs.backend`) take it
    themselves, and so may be called from any thread. A class or method that is "used with the lock held" does not take
    it. The methods of a :class:`Driver` are called with the lock held, except ``poll``, which takes it. With the
    compiled core it is a lock of C, which functions of the core take as well. The thread of the core never does: what
    it shares with Python is guarded by the mutex of the core, and no thread waits for the interpreter with that
    (docs/core.md).

Callbacks
    Callbacks of timers, ``done`` of a wait, ``notify`` of a queue, :meth:`rdmacm.provider.Owner._reported` and the
    handlers of connections run with the lock held. They must not wait, and may call anything that does not wait. A tap
    may be called with or without the lock.

Waiting
    No thread waits for another with the lock held. A wait (:mod:`rdmacm.progress.waiting`) takes the lock to make
    progress, and releases it while it sleeps in poll(2).

Finalizers and signal handlers
    They may run in any thread, or in the main thread, at any moment. Inside of this package they are deferred
    (:mod:`rdmacm.interrupts.protection`, :mod:`rdmacm.interrupts.handlers`), so neither takes a lock that its thread
    may not take, and no exception of a handler comes between two steps of an engine.

Verbs objects
    They have no lock, because the garbage collector may close one in any thread, at any time, also in a thread that
    has the runtime's lock. Their bookkeeping consists of atomic operations (:mod:`rdmacm.verbs.resource`); the backends
    below them take the runtime's lock.

Endpoints
    The runtime's lock guards their state, too. They take it through :meth:`rdmacm.provider.Provider.drive`.

Acknowledgements
    ``ACK_LOCK`` (:mod:`rdmacm.cmid.acks`) guards the counts of acknowledged events of all ids, and wakes threads that
    destroy or migrate one. No other lock is taken while it is held, so it may be taken with the runtime's lock held.
    No thread waits for an acknowledgement with the runtime's lock held.

Other threads
    The helper thread (:mod:`rdmacm.soft.helper`) is one more waiting thread, and takes the lock for each step. The
    lookup threads of a channel (:mod:`rdmacm.cmid.lookups`) post their results, which takes the runtime's lock, while
    they hold the lock of the channel's lookups: so the latter is never taken with the runtime's lock held. (A channel
    that the garbage collector closes has no lookup in progress, because a lookup refers to its id.) The thread that
    queries ibacm (:mod:`rdmacm.resolution.acm`) holds no lock when it calls back.

Simulation
    :class:`rdmacm.testing.host.SimRuntime` waits by running every host of the fabric in the waiting thread, in virtual
    time. Each host has its own lock, and the rules are the same. Programs have threads, of which one runs at a time; as
    none waits with a lock held, none has one while another runs.
    :class:`rdmacm.testing.clock.VirtualRuntime` advances the clock of one host while it waits, with the lock held.

Finding a provider
    :mod:`rdmacm.soft` has a lock for the table of providers. It is taken before a runtime's lock, never after.

Fork
    The child gets a new lock of the runtime (:meth:`Runtime.abandon`), so objects keep the runtime and not its lock.
    :mod:`rdmacm.interrupts.protection` says what becomes of the others.

Locks of one module
    Each guards the data of its module: a capture file (:mod:`rdmacm.diagnosis.captures`), a simulated subnet
    (:mod:`rdmacm.testing.subnet`), the connection to ibacm and the queue of its background thread
    (:mod:`rdmacm.resolution.acm`). Code that holds one takes no other lock of the package. So each may be taken with
    the runtime's lock held, except that of ibacm's connection, which is held while the daemon is waited for.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable, Sized
from math import inf
from typing import Protocol, TypeVar, cast

from rdmacm.errors import cm_error
from rdmacm.interrupts import handlers
from rdmacm.interrupts.protection import deferred_finalizers, run_finalizers
from rdmacm.progress.containment import InternalErrors
from rdmacm.progress.pollable import Pollable
from rdmacm.progress.timers import Timer, Timers
from rdmacm.progress.waiting import Waiters
from rdmacm.proto.core_choice import compiled

T = TypeVar("T")

#: Without, the descriptors are those of all sockets, which change at any time.
_HAS_EPOLL = hasattr(select, "epoll")

#: Seconds after which a caller that polls, or finds its result queued, makes full progress. Less than the helper
#: thread's grace period, so that the helper does not start while callers make progress.
_PROGRESS_INTERVAL = 0.001
#: The same where progress only reads descriptors and there is no helper thread.
_READING_INTERVAL = 0.02
#: After this many polls in a row without a packet, the processor is yielded once: the peer may need it.
_POLLS_PER_YIELD = 16

_sched_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)


class Driver(Protocol):
    """The input and output that a runtime drives. A provider attaches one with :meth:`Runtime.attach`.

    A subclass has the last three methods only where it does something there.
    """

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that poll readable when :meth:`progress` has something to do."""

    def progress(self, now: float, result_queue: Sized) -> None:
        """Receive, send, and follow changes of the network, a bounded amount of each. Called with the lock held.

        ``result_queue`` is the caller's: once it is not empty, return and defer ACKs to the next call.
        """

    def poll(self, now: float, result_queue: Sized) -> bool:
        """Receive and send packets, and nothing else; False when there was nothing to do. Takes the lock itself."""

    def opened(self) -> None:
        """There is a first user: open what belongs to the calling thread's network namespace."""
        return

    def released(self) -> None:
        """There is no user any more: close every descriptor."""
        return

    def deadlines_changed(self) -> None:
        """The descriptors or the first deadline have changed: wake the background threads that wait for them."""
        return


class Runtime:
    """The lock, clock, timers and users of one provider. The module describes the rules of its lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: Reads the time in seconds; it never goes back.
        self.clock = clock
        #: Whether the clock is the system's; a virtual one has no descriptors and no threads.
        self.is_real_time: bool = clock is time.monotonic
        #: Guards everything inside the provider.
        self.lock: threading.RLock = self._make_lock()
        #: Whether this is a child of fork(2), where the descriptors are the parent's.
        self.abandoned: bool = False
        #: Counts calls that made progress. The helper thread sees by it whether the application makes progress.
        self.progress_count: int = 0
        #: When the last progress or poll began, in seconds of ``clock``. To read a clock may take a system call.
        self.now: float = 0.0
        #: When a caller that polls, or finds its result queued, makes full progress, in seconds of ``clock``.
        self.progress_due: float = 0.0
        #: Whether progress consists of reading descriptors that poll readable, so that a thread may sleep without it:
        #: it is woken at once.
        self.only_reads = False
        #: Whether the caller that has fetched an event has more of them to fetch, and so will be back soon.
        self.has_more_events = False
        #: When :func:`rdmacm.interrupts.handlers.refresh` looks at the signal handlers again, in seconds of ``clock``.
        self.signals_due: float = 0.0 if self.is_real_time else inf
        #: Descriptors for readers that wait in select(2) or an event loop.
        self.pollables: set[Pollable] = set()
        #: The threads that wait.
        self.waiters: Waiters = Waiters(self)
        #: Faults of this package that were contained.
        self.errors: InternalErrors = InternalErrors()
        #: The provider's input and output, from :meth:`attach` on.
        self.driver: Driver
        #: What :meth:`filenos` returns; None where it may have changed.
        self._filenos: tuple[int, ...] | None = None
        #: The calls of :meth:`call_at`.
        self._timers = Timers(self._timer_raised)
        #: The deadline that the timer descriptors of ``pollables`` are set for, in seconds; infinity for none.
        self._armed_for = inf
        #: Channels, completion queues and queries in progress. The descriptors are closed with the last one.
        self._users: dict[object, None] = {}
        #: Whether there is a user, and so the descriptors are open.
        self.in_use: bool = False
        #: Polls in a row without a packet.
        self._empty_polls = 0

    def _make_lock(self) -> threading.RLock:
        """A lock, which the compiled core can take without the interpreter."""
        if compiled is not None and self.is_real_time:
            return cast("threading.RLock", compiled.Lock())
        return threading.RLock()

    def attach(self, driver: Driver) -> None:
        """Set the driver; once, by the provider."""
        self.driver = driver

    def check_fork(self, call: str, what: str = "channel") -> None:
        """Raise EBADF in a child of fork(2), where ``what`` is the parent's."""
        if self.abandoned:
            raise cm_error(errno.EBADF, f"the {what} was made before fork(2)", call, hint="make it in the child")

    # -- progress -------------------------------------------------------------------------------------

    def progress(self, result_queue: Sized = (), now: float | None = None) -> None:
        """Receive, send, follow changes of the network, and fire the timers that are due. The lock is held.

        ``now``: the time, if the caller has just read ``clock``.
        """
        if self.abandoned:
            return
        self.progress_count += 1
        if now is None:
            now = self.clock()
        self.now = now
        self.progress_due = now + (_READING_INTERVAL if self.only_reads else _PROGRESS_INTERVAL)
        if now >= self.signals_due and handlers.refresh():
            self.signals_due = now + handlers.INTERVAL
        try:
            self.driver.progress(now, result_queue)
        except Exception as error:
            self.errors.report("progress", "a step of progress is incomplete", error)
        if self._timers.heap.earliest <= now or self._armed_for <= now:
            self.fire_timers(now)

    def poll(self, result_queue: Sized = ()) -> bool:
        """Progress for a caller that polls: packets in each call, everything else once a millisecond.

        False when there was nothing to do. Takes the lock itself.
        """
        now = self.now = self.clock()
        if now >= self.progress_due:
            if deferred_finalizers:
                run_finalizers()
            with self.lock:
                self.progress(result_queue, now)
            return True
        self.progress_count += 1
        if self.driver.poll(now, result_queue):
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
        found = self._filenos
        if found is None or not _HAS_EPOLL:
            found = self._filenos = self.driver.filenos()
        return found

    # -- timers ---------------------------------------------------------------------------------------

    def call_at(self, when: float, callback: Callable[[float], None]) -> Timer:
        """Call ``callback(now)`` at ``when``, in seconds of :attr:`clock`. The lock is held, also in the callback."""
        timers = self._timers
        is_first = when < timers.heap.earliest  # sleeping threads and timer descriptors wake up then, or before
        timer = timers.add(when, callback)
        if is_first:
            self._arm(when)
            self._wake_all()
        return timer

    def fire_timers(self, now: float | None = None) -> None:
        """Call the callbacks that are due at ``now``, by default the time of ``clock``. The lock is held."""
        if now is None:
            now = self.clock()
        if self._timers.heap.earliest <= now:
            self._timers.fire(now)
        if self._armed_for <= now:  # a timer descriptor that has fired stays readable until it is armed again
            self._arm(self._timers.heap.next_deadline())

    def _timer_raised(self, error: Exception) -> None:
        self.errors.report("timer", "a timer's call is incomplete", error)

    def _arm(self, deadline: float | None) -> None:
        self._armed_for = inf if deadline is None else deadline
        for pollable in self.pollables:
            pollable.rearm(deadline)

    def next_deadline(self) -> float | None:
        """When :meth:`progress` has to be called at the latest, in seconds of :attr:`clock`; None for never."""
        return self._timers.heap.next_deadline()

    # -- descriptors ----------------------------------------------------------------------------------

    def pollable(self) -> Pollable:
        """A descriptor for one reader."""
        return Pollable(self)

    def descriptors_changed(self) -> None:
        """The descriptors of :meth:`filenos` have changed. The lock is held."""
        self._filenos = None
        for pollable in self.pollables:
            pollable.watch()
        self._wake_all()

    def _wake_all(self) -> None:
        self.waiters.wake()
        self.driver.deadlines_changed()

    # -- users ----------------------------------------------------------------------------------------

    def use(self, user: object) -> None:
        """Keep the descriptors open for ``user``, until :meth:`release`."""
        with self.lock:
            if not self._users:
                self.driver.opened()
                self._filenos = None
                if handlers.guard(self) and self.is_real_time:
                    self.signals_due = self.clock() + handlers.INTERVAL
            self._users[user] = None
            self.in_use = True

    def release(self, user: object) -> None:
        """Undo :meth:`use`; with the last user, the descriptors are closed. No error for one that is no user."""
        with self.lock:
            if self._users.pop(user, self) is None and not self._users:
                self._close_descriptors()

    def users(self) -> list[object]:
        """The users, in the order of :meth:`use`."""
        return list(self._users)

    def retire(self) -> bool:
        """Close the descriptors if there is no user, and return whether there is none."""
        run_finalizers()
        with self.lock:
            if not self._users:
                self._close_descriptors()
            return not self._users

    def _close_descriptors(self) -> None:
        self.in_use = False
        handlers.unguard(self)
        self.driver.released()
        self._filenos = None
        self.waiters.close()
        self._timers.clear()
        self._armed_for = inf

    def abandon(self) -> None:
        """In a child of fork(2): close the child's copies of descriptors, and refuse objects made before the fork.

        A thread that does not exist in the child may hold the lock, so the child gets a new one.
        """
        self.lock = self._make_lock()
        self.abandoned = True
        self._filenos = None
        handlers.unguard(self)
        # First, without signalling: the parent's threads wait for the same descriptors.
        self.waiters.abandon()
        for pollable in list(self.pollables):
            pollable.close()
