"""Unpredictable numbers: queue pair numbers, communication ids, PSNs, memory keys."""

from __future__ import annotations

import os
import struct
from random import SystemRandom

__all__ = ["DrawnAhead"]

#: Numbers of 32 bits taken from the system at a time: what some thirty connections need.
_DRAWN = 256
_WORDS = struct.Struct(f"={_DRAWN}I")


class DrawnAhead(SystemRandom):
    """``random.SystemRandom`` that goes to the system once for many numbers, as to go there takes longer than the rest.

    Not safe for threads by itself: its owner serialises the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[int] = []

    def getrandbits(self, k: int, /) -> int:
        if k > 32:
            return super().getrandbits(k)
        if not self._drawn:
            self._drawn = [*_WORDS.unpack(os.urandom(_WORDS.size))]
        return self._drawn.pop() >> (32 - k)

    def forget(self) -> None:
        """Draw anew: after fork(2) the parent has the same numbers."""
        self._drawn.clear()
