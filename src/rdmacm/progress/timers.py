"""Timers with callbacks, and a timer as a descriptor (timerfd(2)), so that a deadline wakes a thread in poll(2).

Python has timerfd from 3.13; before that, ctypes calls the C library.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable

from rdmacm.proto.timerheap import LazyTimerHeap

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_ITIMERSPEC = struct.Struct("@4l")


class Timer:
    """A call that is due at ``when``, made by :meth:`Timers.add`."""

    __slots__ = ("_timers", "callback", "when")

    def __init__(self, timers: Timers, when: float, callback: Callable[[float], None]) -> None:
        self._timers = timers
        self.when: float = when
        #: Called with the time in seconds; None once it was called or cancelled.
        self.callback: Callable[[float], None] | None = callback

    def cancel(self) -> None:
        """Do not make the call. Does nothing once it was made."""
        if self.callback is not None:
            self.callback = None
            self._timers.discard(self)


class Timers:
    """Calls that are due at given times, in seconds of one clock.

    ``raised(error)`` is called with an exception of such a call, which has no other effect.
    """

    __slots__ = ("_raised", "heap")

    def __init__(self, raised: Callable[[Exception], None]) -> None:
        #: Their deadlines; no call is due before ``heap.earliest``.
        self.heap: LazyTimerHeap[Timer] = LazyTimerHeap(_deadline_of)
        self._raised = raised

    def add(self, when: float, callback: Callable[[float], None]) -> Timer:
        """Make the call ``callback(now)`` at ``when``, or at the next :meth:`fire` after it."""
        timer = Timer(self, when, callback)
        self.heap.schedule(timer, when)
        return timer

    def discard(self, timer: Timer) -> None:
        """Forget a timer that was cancelled."""
        self.heap.discard(timer)

    def fire(self, now: float) -> None:
        """Make the calls that are due at ``now``. A call that one of them adds waits for the next :meth:`fire`."""
        heap = self.heap
        if heap.earliest > now:
            return
        due = []
        while (timer := heap.pop_due(now)) is not None:
            due.append(timer)
        due.reverse()
        try:
            while due:
                timer = due.pop()
                callback, timer.callback = timer.callback, None
                if callback is not None:
                    try:
                        callback(now)
                    except Exception as error:
                        self._raised(error)
        finally:
            for timer in due:  # none, unless the thread was interrupted
                heap.schedule(timer, timer.when)

    def clear(self) -> None:
        """Forget all timers."""
        self.heap.clear()


def _deadline_of(timer: Timer) -> float | None:
    return None if timer.callback is None else timer.when


class TimerDescriptor:
    """A timer whose descriptor, ``fd``, polls readable from its deadline on, until it is set again."""

    def __init__(self) -> None:
        self.fd: int = _create()

    def set(self, deadline: float | None, now: float) -> None:
        """Fire at ``deadline`` on the clock that reads ``now``; None disarms."""
        # 0 would disarm, so a deadline that has passed is 1 ns ahead.
        wait = 0.0 if deadline is None else max(deadline - now, 1e-9)
        _arm(self.fd, wait)

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self.fd)


if sys.version_info >= (3, 13):

    def _create() -> int:
        return os.timerfd_create(_CLOCK_MONOTONIC, flags=_TFD_NONBLOCK | _TFD_CLOEXEC)

    def _arm(fd: int, wait: float) -> None:
        os.timerfd_settime(fd, initial=wait)

else:

    def _create() -> int:
        import ctypes

        fd: int = ctypes.CDLL(None, use_errno=True).timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return fd

    def _arm(fd: int, wait: float) -> None:
        import ctypes

        seconds = int(wait)
        spec = _ITIMERSPEC.pack(0, 0, seconds, int((wait - seconds) * 1e9) or int(bool(wait)))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.timerfd_settime(fd, 0, ctypes.c_char_p(spec), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
