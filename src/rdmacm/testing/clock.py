"""Virtual time: a clock that the test advances, and waits that advance it."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterable, Sized
from math import inf, nextafter
from typing import Protocol, TypeVar

from rdmacm.interrupts.handlers import checkpoint
from rdmacm.progress.runtime import Runtime
from rdmacm.soft.helper import HELPER_THREAD

T = TypeVar("T")

#: Seconds of real time. How long a wait leaves the clock to other threads before it advances the clock itself.
_GRACE = 1.0
#: Seconds of real time. How often a wait looks whether another thread has advanced the clock.
_INTERVAL = 0.02


class SimulationError(RuntimeError):
    """The simulation cannot continue: a wait that nothing can end, or a run that does not end.

    It is no OSError, so that code under test does not mistake it for an error of the network.
    """


class VirtualClock:
    """A clock that :meth:`advance` moves, and nothing else but waits (:func:`memory_provider`).

    Calling it returns its time in seconds.

    Attributes:

    - ``now``: the time in seconds.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now: float = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock; raises ValueError for a negative number of seconds."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} seconds")
        self.now += seconds


class HostClock:
    """The clock of a host on a fabric. It may run faster or slower than the fabric's, and be ahead of it or behind.

    Calling it returns its time in seconds.

    Attributes:

    - ``rate``: its seconds in one second of the fabric's clock; see :meth:`set_rate`.
    """

    def __init__(self, base: VirtualClock) -> None:
        self._base = base
        self.rate: float = 1.0
        #: A time of the fabric's clock, and the host's at that moment.
        self._from = self._at = 0.0
        #: Whether it shows the fabric's time.
        self._is_plain = True

    def __call__(self) -> float:
        now = self._base.now
        return now if self._is_plain else self._at + (now - self._from) * self.rate

    def set_rate(self, rate: float) -> None:
        """Let the clock run at a rate from now on; ValueError unless it is positive and finite."""
        if not 0 < rate < inf:
            raise ValueError(f"a clock cannot run at rate {rate}")
        self._from, self._at, self.rate, self._is_plain = self._base.now, self(), rate, False

    def advance(self, seconds: float) -> None:
        """Let the clock jump forward; ValueError for a negative number of seconds."""
        if not 0 <= seconds < inf:
            raise ValueError(f"a clock cannot jump by {seconds} seconds")
        self._from, self._at, self._is_plain = self._base.now, self() + seconds, False

    def when(self, time: float) -> float:
        """The fabric's time at which this clock shows a time, or a later one for the first time."""
        if self._is_plain:
            return time
        at = self._from + (time - self._at) / self.rate
        while self._at + (at - self._from) * self.rate < time:  # rounded down
            at = nextafter(at, inf)
        return at

    def after(self, seconds: float) -> float:
        """The fabric's time after so many seconds of this clock."""
        return self.when(self() + max(0.0, seconds))


class Subnet(Protocol):
    """A simulated network with deadlines of its own; :class:`rdmacm.testing.MemorySubnet` is one."""

    def next_deadline(self) -> float | None:
        """The next deadline on the clock, in seconds; None without any."""


class VirtualRuntime(Runtime):
    """A runtime on a :class:`VirtualClock`. A wait without a timeout advances the clock if no other thread does."""

    def __init__(self, clock: VirtualClock, subnets: Iterable[Subnet] = ()) -> None:
        super().__init__(clock)
        self._virtual = clock
        self._subnets = tuple(subnets)

    def drive(self, done: Callable[[], T], timeout: float | None, result_queue: Sized = ()) -> T:
        """As :meth:`Runtime.drive`; ``timeout`` is in seconds of real time.

        Without a timeout, the clock advances to the next deadline: at once if there is no other thread, else after a
        second in which no thread has advanced it. Raises SimulationError if there is neither a deadline nor another
        thread.
        """
        if timeout is not None:
            return super().drive(done, timeout, result_queue)
        clock, until = self._virtual, time.monotonic() + _GRACE
        while True:
            before, has_others = clock.now, _has_other_threads()
            found = super().drive(done, _INTERVAL if has_others else 0, result_queue)
            if found:
                return found
            checkpoint()
            if clock.now != before:
                until = time.monotonic() + _GRACE
            elif not self._has_input() and (not has_others or time.monotonic() >= until):
                self._advance(has_others)
                until = time.monotonic() + _GRACE

    def _has_input(self) -> bool:
        """Whether packets or notifications have arrived that are not read yet."""
        poll = select.poll()
        for fd in self.filenos():
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def _advance(self, has_others: bool) -> None:
        """Advance the clock to the next deadline."""
        with self.lock:
            deadlines = [self.next_deadline(), *(subnet.next_deadline() for subnet in self._subnets)]
            deadline = min((at for at in deadlines if at is not None), default=None)
            if deadline is not None:
                self._virtual.now = max(self._virtual.now, deadline)
            elif not has_others:
                raise SimulationError(
                    f"the call would wait for ever: no timer is set at {self._virtual.now:.9f} s of the virtual clock, "
                    "and no other thread runs; try: a timeout, or let the awaited event happen before the call"
                )


def _has_other_threads() -> bool:
    """Whether a thread that may act is alive: any but this one and the helper threads of providers."""
    this = threading.current_thread()
    return any(thread is not this and thread.name != HELPER_THREAD for thread in threading.enumerate())
