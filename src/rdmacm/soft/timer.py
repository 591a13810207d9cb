"""A timer as a descriptor, so that a deadline wakes whoever polls: timerfd(2).

Python has it from 3.13; before that the C library is asked directly.
"""

from __future__ import annotations

import os
import struct
import sys

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_ITIMERSPEC = struct.Struct("@4l")


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
