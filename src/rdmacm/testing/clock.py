"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """A clock that reads ``now`` (seconds) and moves by :meth:`advance` alone. Call it to read it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass; ValueError for going back."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self.now += seconds
