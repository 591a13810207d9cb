"""Numbers that were freed a moment ago and are not given again yet."""

from __future__ import annotations

from collections import OrderedDict


class FreedNumbers(OrderedDict[int, None]):
    """The last numbers that were freed, the oldest first: packets for their last owner may still arrive."""

    __slots__ = ("_limit",)

    def __init__(self, limit: int) -> None:
        """``limit``: how many are kept."""
        super().__init__()
        self._limit = limit

    def add(self, number: int) -> None:
        """A number has been freed."""
        self[number] = None
        if len(self) > self._limit:
            self.popitem(last=False)
