"""The deadlines of many objects. Each object has at most one deadline, which changes often."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Stale entries are dropped once the heap has more entries than this plus four for each object.
_STALE_ENTRIES = 64


class LazyTimerHeap(Generic[K]):
    """A heap of deadlines that finds the objects whose deadline has passed.

    Objects are identified by hashable keys. ``deadline_of(key)`` returns the current deadline of an object in seconds,
    or None when it has no deadline or no longer exists.

    A retransmission timer is set again with every packet and rarely fires. Therefore a deadline that becomes later or
    is cancelled costs nothing: its heap entry stays, and the current deadline is read when the entry is due. A deadline
    that becomes earlier gets another entry, and the old one is stale. Stale entries are dropped once there are many.

    >>> deadlines = {"a": 3.0, "b": 2.0}
    >>> heap = LazyTimerHeap(deadlines.get)
    >>> for key, deadline in deadlines.items():
    ...     heap.schedule(key, deadline)
    >>> deadlines["b"] = 5.0
    >>> heap.earliest, heap.next_deadline()
    (2.0, 3.0)
    >>> heap.pop_due(4.0), heap.pop_due(4.0)
    ('a', None)
    """

    __slots__ = ("_count", "_deadline_of", "_heap", "earliest", "entry_times")

    def __init__(self, deadline_of: Callable[[K], float | None]) -> None:
        #: Returns the current deadline of a key, in seconds.
        self._deadline_of = deadline_of
        #: Entries (time in seconds, serial number, key). The serial number prevents the comparison of keys.
        self._heap: list[tuple[float, int, K]] = []
        #: The last serial number.
        self._count = 0
        #: The time of the entry of each key. An entry with another time is stale. A caller with many deadlines can see
        #: here that :meth:`schedule` has nothing to do for one.
        self.entry_times: dict[K, float] = {}
        #: No deadline is before this time (seconds); infinity without deadlines. An attribute, not a property, because
        #: loops read it for every packet.
        self.earliest: float = inf

    def __len__(self) -> int:
        """The number of entries, including stale ones."""
        return len(self._heap)

    def schedule(self, key: K, deadline: float) -> None:
        """Record a deadline (seconds) that was set or changed. Cheap if the key has an entry at or before it."""
        if self.entry_times.get(key, inf) <= deadline:
            return
        self.entry_times[key] = deadline
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, key))
        self.earliest = min(self.earliest, deadline)
        if len(self._heap) > _STALE_ENTRIES + 4 * len(self.entry_times):
            self._drop_stale_entries()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline in seconds, or None without any."""
        heap = self._heap
        while heap:
            when, _, key = heap[0]
            deadline = None
            if self.entry_times.get(key) == when:
                deadline = self._deadline_of(key)
                if deadline is not None and deadline <= when:
                    self.earliest = when
                    return when
                del self.entry_times[key]
            heapq.heappop(heap)
            if deadline is not None:
                self.schedule(key, deadline)
        self.earliest = inf
        return None

    def pop_due(self, now: float) -> K | None:
        """Remove a deadline that is not after ``now`` (seconds) and return its key; None without such a deadline."""
        heap = self._heap
        while heap and heap[0][0] <= now:  # as next_deadline(), without calling it for each of many
            when, _, key = heapq.heappop(heap)
            if self.entry_times.get(key) == when:
                del self.entry_times[key]
                deadline = self._deadline_of(key)
                if deadline is not None:
                    if deadline <= when:
                        self.earliest = heap[0][0] if heap else inf
                        return key
                    self.schedule(key, deadline)
        self.earliest = heap[0][0] if heap else inf
        return None

    def discard(self, key: K) -> None:
        """Remove the deadline of an object that ceases to exist."""
        if self.entry_times.pop(key, None) is None:
            return
        if len(self._heap) > _STALE_ENTRIES + 4 * len(self.entry_times):
            self._drop_stale_entries()

    def _drop_stale_entries(self) -> None:
        times = self.entry_times
        # In place, as next_deadline() may be at work on the list.
        self._heap[:] = [entry for entry in self._heap if times.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
        self.earliest = self._heap[0][0] if self._heap else inf

    def clear(self) -> None:
        """Remove all deadlines."""
        self._heap.clear()
        self.entry_times.clear()
        self.earliest = inf
