"""A queue in which no source of requests crowds out the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Items of many sources. The sources take turns; the items of one source are taken oldest first.

    A call takes the same time, however many items and sources there are; only the first :meth:`displaced_by` since the
    queue was empty counts the items of each source. The caller bounds the number of items:
    when the queue is full, :meth:`displaced_by` names the item that makes room for one of another source.

    >>> queue = FairQueue()
    >>> for source, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4)]:
    ...     queue.add(source, item)
    >>> queue.displaced_by("a"), queue.displaced_by("b"), queue.displaced_by("c")
    (None, 1, 1)
    >>> [queue.take() for _ in range(5)]
    [1, 4, 2, 3, None]
    """

    __slots__ = ("_by_source", "_largest", "_sizes", "sources")

    def __init__(self) -> None:
        #: The items of each source, oldest first; the source whose turn it is comes first.
        self._by_source: OrderedDict[Hashable, OrderedDict[T, None]] = OrderedDict()
        #: The source of each item; to be read only.
        self.sources: dict[T, Hashable] = {}
        #: The sources with a number of items, for each such number; and the largest number. None until they are needed,
        #: and again when the queue is empty.
        self._sizes: dict[int, OrderedDict[Hashable, None]] | None = None
        self._largest = 0

    def __len__(self) -> int:
        return len(self.sources)

    def __contains__(self, item: T) -> bool:
        return item in self.sources

    def count(self, source: Hashable) -> int:
        """How many items a source has."""
        return len(self._by_source.get(source, ()))

    def add(self, source: Hashable, item: T) -> None:
        """Add an item, which the queue does not have yet."""
        items = self._by_source.get(source)
        if items is None:
            items = self._by_source[source] = OrderedDict()
        items[item] = None
        self.sources[item] = source
        if self._sizes is not None:
            self._resized(self._sizes, source, len(items) - 1, len(items))

    def take(self) -> T | None:
        """Remove and return the oldest item of the source whose turn it is; None if the queue is empty."""
        for source, items in self._by_source.items():
            item = next(iter(items))
            self.discard(item)
            if items:
                self._by_source.move_to_end(source)
            return item
        return None

    def discard(self, item: T) -> None:
        """Remove an item; no error if the queue does not have it."""
        if item not in self.sources:
            return
        source = self.sources.pop(item)
        items = self._by_source[source]
        del items[item]
        if not self.sources:
            self._sizes, self._largest = None, 0
        elif self._sizes is not None:
            self._resized(self._sizes, source, len(items) + 1, len(items))
        if not items:
            del self._by_source[source]

    def displaced_by(self, source: Hashable) -> T | None:
        """The item to remove from a full queue in favour of a new one from ``source``; None if there is none.

        It is the oldest item of the source with the most items, if that source has more than ``source`` would have.
        """
        if self._sizes is None:
            self._sizes = {}
            for each, items in self._by_source.items():
                self._resized(self._sizes, each, 0, len(items))
        if self._largest <= len(self._by_source.get(source, ())) + 1:
            return None
        largest = next(iter(self._sizes[self._largest]))
        return next(iter(self._by_source[largest]))

    def _resized(
        self, sizes: dict[int, OrderedDict[Hashable, None]], source: Hashable, before: int, after: int
    ) -> None:
        """The number of a source's items has changed by one, or is counted for the first time."""
        if before:
            group = sizes[before]
            del group[source]
            if not group:
                del sizes[before]
        if after:
            sizes.setdefault(after, OrderedDict())[source] = None
        if after > self._largest or (before == self._largest and before not in sizes):
            self._largest = after
