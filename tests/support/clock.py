"""The clock, for tests. No other module of them reads it or sleeps; ruff refuses that.

A test asserts order or outcome. Where the outcome is another thread's, process's or machine's, :func:`eventually` waits
for it. Parts of the package that take a clock get a virtual one, or :data:`REAL`. What has to see real time carries the
mark ``wallclock``: it runs alone, after the others, and measures with :class:`Stopwatch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["LONGEST", "REAL", "Stopwatch", "eventually", "pause"]

T = TypeVar("T")

#: Seconds after which what is waited for does not come any more, on the slowest machine.
LONGEST = 60.0
#: The real clock, for parts that take one.
REAL: Callable[[], float] = time.monotonic


def eventually(condition: Callable[[], T], what: object = "") -> T:
    """Call ``condition`` until it is true, and return that. AssertionError, with ``what``, if it never is."""
    limit = time.monotonic() + LONGEST
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < limit, what or condition
        time.sleep(0.001)


def pause(seconds: float, why: str) -> None:
    """Sleep where nothing can be awaited: ``why`` says what happens meanwhile, for the reader alone."""
    assert why
    time.sleep(seconds)


class Stopwatch:
    """Seconds since it was made, or since :meth:`restart`; for tests with the mark ``wallclock``."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began
