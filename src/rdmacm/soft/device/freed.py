"""Numbers that were freed a moment ago and are not given again yet."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["FreedNumbers"]


class FreedNumbers:
    """The last numbers that were freed, at most ``limit``: packets for their last owner may still arrive."""

    __slots__ = ("_limit", "_numbers")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: The oldest first.
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int) -> None:
        """A number has been freed."""
        numbers = self._numbers
        numbers[number] = None
        if len(numbers) > self._limit:
            numbers.popitem(last=False)

    def clear(self) -> None:
        """All numbers may be given again."""
        self._numbers.clear()
