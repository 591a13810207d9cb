"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """A clock that only :meth:`advance` moves. Calling it returns its time in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        #: The time in seconds.
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock; raises ValueError for a negative number of seconds."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds} seconds")
        self.now += seconds
