"""Unpredictable numbers: queue pair numbers, communication ids, PSNs, memory keys."""

from __future__ import annotations

import os
from random import SystemRandom

__all__ = ["DrawnAhead"]

#: Bytes taken from the system at a time: what some fifty connections need.
_DRAWN = 1024


class DrawnAhead(SystemRandom):
    """``random.SystemRandom`` that goes to the system once for many numbers, as to go there takes longer than the rest.

    Not safe for threads by itself: its owner serialises the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn = b""
        self._used = 0

    def getrandbits(self, k: int, /) -> int:
        size = (k + 7) // 8
        begin = self._used
        end = self._used = begin + size
        if end > len(self._drawn):
            self._drawn = os.urandom(max(size, _DRAWN))
            begin, end = 0, size
            self._used = size
        return int.from_bytes(self._drawn[begin:end], "big") >> (size * 8 - k)

    def forget(self) -> None:
        """Draw anew: after fork(2) the parent has the same numbers."""
        self._drawn = b""
        self._used = 0
