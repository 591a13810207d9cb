"""What measuring tools share: time samples, text with units, a progress line on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque

__all__ = ["ProgressLine", "Samples", "resident_bytes", "size_text", "time_text"]

#: Percentiles are computed from the latest samples; minimum, mean and maximum from all.
_MAX_SAMPLES = 100_000


class Samples:
    """Times of one kind, in seconds."""

    def __init__(self) -> None:
        #: The number of samples.
        self.count = 0
        #: The sum of all samples, in seconds.
        self.total = 0.0
        #: The least and the greatest sample.
        self._least = float("inf")
        self._most = 0.0
        #: The latest samples, oldest first.
        self._latest: deque[float] = deque(maxlen=_MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        """Add a sample."""
        self.count += 1
        self.total += seconds
        self._latest.append(seconds)
        self._least = min(self._least, seconds)
        self._most = max(self._most, seconds)

    def microseconds(self, share: float = 1.0) -> dict[str, float]:
        """Return ``min``, ``mean``, ``p50``, ``p99`` and ``max`` in microseconds, times ``share``.

        Empty without samples.
        """
        if not self.count:
            return {}
        ordered = sorted(self._latest)
        statistics = {
            "min": self._least,
            "mean": self.total / self.count,
            "p50": ordered[len(ordered) // 2],
            "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "max": self._most,
        }
        return {name: round(seconds * share * 1e6, 2) for name, seconds in statistics.items()}


class ProgressLine:
    """A line on standard error that is updated once a second, if standard error is a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        #: When the line is due, in seconds of time.monotonic().
        self._next = time.monotonic() + 1
        #: The length of the text that is shown.
        self._width = 0

    def is_due(self, now: float) -> bool:
        """Whether :meth:`show` would write."""
        return self._is_shown and now >= self._next

    def show(self, text: str) -> None:
        """Overwrite the line with ``text``."""
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\r{text:<{self._width}}")
            sys.stderr.flush()
        self._width = len(text)
        self._next = time.monotonic() + 1

    def close(self) -> None:
        """Erase the line."""
        if self._width:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"\r{'':<{self._width}}\r")
                sys.stderr.flush()
            self._width = 0


def time_text(microseconds: float) -> str:
    """Format a time: ``8.4 us``, ``12.3 ms``, ``1.20 s``."""
    if microseconds < 10_000:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def size_text(size: int) -> str:
    """Format a size in the largest unit of which it is a whole number: ``64 B``, ``4 KiB``, ``1 MiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on systems without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()
