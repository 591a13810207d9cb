"""The source of randomness that a caller passes to the engines."""

from __future__ import annotations

from typing import Protocol


class RandomSource(Protocol):
    """A source of unpredictable numbers, such as ``random.SystemRandom()``."""

    def getrandbits(self, k: int, /) -> int: ...
