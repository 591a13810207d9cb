"""Unpredictable numbers: queue pair numbers, communication ids, PSNs, memory keys."""

from __future__ import annotations

import os
import struct
from random import SystemRandom

#: Numbers of 64 bits that are read from the system at a time. Sixty connections need about as many.
_BUFFERED = 256
_WORDS = struct.Struct(f"={_BUFFERED}Q")


class BufferedSystemRandom(SystemRandom):
    """``random.SystemRandom`` that asks the system for many numbers at once: the system call takes most of the time.

    Not safe for threads: its owner serialises the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer: list[int] = []

    def getrandbits(self, k: int, /) -> int:
        if k > 64:
            return super().getrandbits(k)
        if not self._buffer:
            self._buffer = [*_WORDS.unpack(os.urandom(_WORDS.size))]
        return self._buffer.pop() >> (64 - k)

    def forget(self) -> None:
        """Discard the buffer: after fork(2) the parent has the same numbers in its own."""
        self._buffer.clear()
