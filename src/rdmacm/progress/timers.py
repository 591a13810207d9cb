"""Timers, and a timer as a descriptor, so that a deadline wakes whoever polls: timerfd(2).

Python has the latter from 3.13; before that the C library is asked directly.
"""

from __future__ import annotations

import heapq
import os
import struct
import sys
from collections.abc import Callable

__all__ = ["Timer", "TimerDescriptor", "Timers"]

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_ITIMERSPEC = struct.Struct("@4l")


class Timer:
    """A call that is due at ``when``; :meth:`cancel` while it is not."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[float], None]) -> None:
        self.when = when
        self.callback: Callable[[float], None] | None = callback

    def cancel(self) -> None:
        """It is not due any more."""
        self.callback = None


class Timers:
    """What is due when."""

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0

    def add(self, when: float, callback: Callable[[float], None]) -> Timer:
        """Have ``callback(now)`` called once ``when`` has come."""
        timer = Timer(when, callback)
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, timer))
        return timer

    @property
    def deadline(self) -> float | None:
        """When the first is due."""
        heap = self._heap
        while heap and heap[0][2].callback is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def fire(self, now: float) -> bool:
        """Call what is due; whether there was anything. What a callback adds has to wait for the next time."""
        heap, due = self._heap, []
        while heap and heap[0][0] <= now:
            due.append(heapq.heappop(heap)[2])
        for timer in due:
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback(now)
        return bool(due)

    def clear(self) -> None:
        """Nothing is due any more."""
        self._heap.clear()


class TimerDescriptor:
    """``fd`` polls readable once the deadline has passed."""

    def __init__(self) -> None:
        self.fd = _create()

    def set(self, deadline: float | None, now: float) -> None:
        """Fire at ``deadline`` on the clock that reads ``now``; None disarms."""
        # Zero would disarm; a deadline that has passed fires after the shortest time there is.
        wait = 0.0 if deadline is None else max(deadline - now, 1e-9)
        _arm(self.fd, wait)

    def close(self) -> None:
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
