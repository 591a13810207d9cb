"""What measuring tools share: time samples, text with units, a progress line on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable

#: The figures of :meth:`Samples.microseconds`, in order.
STATISTICS = ("min", "mean", "p50", "p99", "max")
#: Percentiles are computed from the latest samples; minimum, mean and maximum from all.
_MAX_SAMPLES = 100_000


class Samples:
    """Times of one kind, in seconds."""

    def __init__(self) -> None:
        #: The number of samples.
        self.count: int = 0
        #: The sum of all samples, in seconds.
        self.total: float = 0.0
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


class ProcessorUse:
    """What part of a processor this process uses, from its making on."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()

    def share(self) -> float:
        """Return it: 1.0 is all of one processor; several threads may use more."""
        return (time.process_time() - self._used) / max(time.perf_counter() - self._began, 1e-9)


class ProgressLine:
    """A line on standard error that is updated once a second, if standard error is a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        #: When the line is due, in seconds of time.monotonic().
        self._next = time.monotonic() + 1
        #: The length of the text that is shown.
        self._width = 0
        #: What the line begins with.
        self.head = ""

    def is_due(self, now: float) -> bool:
        """Whether :meth:`show` would write."""
        return self._is_shown and now >= self._next

    def show(self, text: str) -> None:
        """Overwrite the line with ``text``."""
        text = self.head + text
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


class Intervals:
    """What was done in each interval of a measurement, reported as it ends.

    ``seconds``: the length of an interval, 0 for no reports. ``size``: bytes of an operation. ``show`` writes a line.
    """

    def __init__(self, seconds: float, size: int, show: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._size = size
        self._show = show
        #: When the measurement, and the present interval, began.
        self._began = self._since = 0.0
        #: The operations before the present interval.
        self._before = 0
        #: The reports, as :attr:`rdmacm.tools.perf_plan.Result.intervals` has them.
        self.reports: list[dict[str, float]] = []

    def begin(self, now: float) -> None:
        """The measurement begins."""
        self._began = self._since = now

    def is_due(self, now: float) -> bool:
        """Whether :meth:`report` would write."""
        return self._seconds > 0 and now - self._since >= self._seconds

    def report(self, now: float, count: int) -> None:
        """Report the interval that ends now; ``count``: all operations so far."""
        done, seconds = count - self._before, now - self._since
        rate = done * self._size / seconds
        start, end = self._since - self._began, now - self._began
        self.reports.append({"seconds": round(end, 3), "count": done, "bytes_per_second": round(rate)})
        self._show(f"{start:8.2f} - {end:.2f} s  {rate / 1e6:10.1f} MB/s  {done / seconds:12,.0f} messages/s\n")
        self._since, self._before = now, count


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
        file = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            pages = int(os.read(file, 256).split()[1])
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()
