"""Sums that need the same memory for any number of packets: durations, and bytes over time."""

from __future__ import annotations

#: Buckets of a histogram for each doubling of the duration.
_FINE = 8
#: Bins of a series; when there would be more, two become one.
_BINS = 64
_FIRST_WIDTH = 1000


class Durations:
    """Durations in nanoseconds: how many, their sum, the shortest and the longest, and percentiles to about 10 %."""

    __slots__ = ("_buckets", "count", "least", "most", "total")

    count: int
    total: int
    least: int
    most: int

    def __init__(self) -> None:
        self.count = self.total = self.least = self.most = 0
        self._buckets: dict[int, int] = {}

    def add(self, duration: int) -> None:
        """Count a duration; time may run backwards in a capture, which counts as 0."""
        if duration < 0:  # noqa: PLR1730 (a call takes longer)
            duration = 0
        if duration < self.least or not self.count:
            self.least = duration
        if duration > self.most:  # noqa: PLR1730 (a call takes longer)
            self.most = duration
        self.count += 1
        self.total += duration
        octave = duration.bit_length() - 4
        bucket = octave * _FINE + (duration >> octave) if octave > 0 else duration
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> int:
        """The mean, or 0 if there is none."""
        return self.total // self.count if self.count else 0

    def percentile(self, part: float) -> int:
        """The duration below which this part of all lies; 0 if there is none."""
        wanted = part * self.count
        for bucket in sorted(self._buckets):
            wanted -= self._buckets[bucket]
            if wanted <= 0:
                octave = max(bucket // _FINE - 1, 0)
                return min(max((bucket - octave * _FINE << octave) + (1 << octave >> 1), self.least), self.most)
        return self.most

    def as_dict(self) -> dict[str, int]:
        """The sums, in nanoseconds."""
        return {
            "count": self.count,
            "min_ns": self.least,
            "p50_ns": self.percentile(0.5),
            "p99_ns": self.percentile(0.99),
            "max_ns": self.most,
        }


class Series:
    """Bytes by time, in bins that become wider as time goes on.

    A writer adds up bytes by itself, and calls :meth:`roll` with the sum once the time has reached ``end``.
    """

    __slots__ = ("_seen", "bins", "end", "start", "width")

    def __init__(self, start: int) -> None:
        self.start: int = start
        self.width: int = _FIRST_WIDTH
        self.end: int = start + self.width
        #: Bytes of each bin that has ended.
        self.bins: list[int] = []
        self._seen = 0

    def roll(self, now: int, octets: int) -> None:
        """Begin the bin of ``now``; up to here, ``octets`` bytes have passed in all."""
        self.bins.append(octets - self._seen)
        self._seen = octets
        wanted = (now - self.start) // self.width
        while wanted >= _BINS:
            pairs = self.bins if len(self.bins) % 2 == 0 else [*self.bins, 0]
            self.bins = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
            self.width *= 2
            wanted = (now - self.start) // self.width
        # The bin that has ended may be the one of now, since they have become wider.
        if len(self.bins) > wanted:
            kept = sum(self.bins[wanted:])
            self.bins = self.bins[:wanted]
            self._seen -= kept
        self.bins += [0] * (wanted - len(self.bins))
        self.end = self.start + (wanted + 1) * self.width

    def closed(self, octets: int) -> list[int]:
        """All bins, the last one included."""
        return [*self.bins, octets - self._seen]
