"""Deadlines of many objects, each of which has one deadline that moves often."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar

__all__ = ["LazyTimerHeap"]

K = TypeVar("K", bound=Hashable)

#: Entries that are kept at least before stale ones are dropped, besides four for each object.
_STALE_ENTRIES = 64


class LazyTimerHeap(Generic[K]):
    """Finds the objects whose deadlines have come.

    Objects are named by hashable keys. ``deadline_of(key)`` reads an object's deadline as it is now, in seconds; None
    if it has none, or is gone.

    A retransmission timer is set again with every packet and rarely fires, so a deadline that moves back or is
    cancelled costs nothing here: its heap entry stays, and when it comes due the object is asked again. A deadline
    that moves forward takes another entry, and the later one is counted on for afterwards: a peer who makes a deadline
    move to and fro takes up no memory.

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

    __slots__ = ("_count", "_deadline_of", "_heap", "_scheduled", "earliest")

    def __init__(self, deadline_of: Callable[[K], float | None]) -> None:
        self._deadline_of = deadline_of
        #: (when, serial number, key): the serial number keeps keys from being compared.
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        #: When the entries of each key are due, the next one last. Entries that are not listed are stale.
        self._scheduled: dict[K, tuple[float, ...]] = {}
        #: No deadline is before this; infinity if there is none. A plain attribute, for loops that read it often.
        self.earliest = inf

    def __len__(self) -> int:
        """The number of entries, stale ones included."""
        return len(self._heap)

    def schedule(self, key: K, deadline: float) -> None:
        """Note a deadline that was set or moved. Cheap if an entry at or before it exists."""
        times = self._scheduled.get(key, ())
        if times and times[-1] <= deadline:
            return
        self._scheduled[key] = (*times, deadline)
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, key))
        self.earliest = min(self.earliest, deadline)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, None if there is none."""
        heap = self._heap
        while heap:
            when, _, key = heap[0]
            times = self._scheduled.get(key)
            if times is None or times[-1] != when:  # of an object that was discarded
                self._pop()
                continue
            deadline = self._deadline_of(key)
            if deadline is not None and deadline <= when:
                return when
            self._pop()
            if deadline is not None:
                self.schedule(key, deadline)
        return None

    def pop_due(self, now: float) -> K | None:
        """Return a key whose deadline is not after ``now``, and forget that deadline; None if there is none."""
        if self.earliest > now:
            return None
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        return self._pop()

    def discard(self, key: K) -> None:
        """Forget an object that is going away."""
        self._scheduled.pop(key, None)
        if len(self._heap) > _STALE_ENTRIES + 4 * len(self._scheduled):
            self._heap = [entry for entry in self._heap if entry[0] in self._scheduled.get(entry[2], ())]
            heapq.heapify(self._heap)
            self.earliest = self._heap[0][0] if self._heap else inf

    def clear(self) -> None:
        """Forget all objects."""
        self._heap.clear()
        self._scheduled.clear()
        self.earliest = inf

    def _pop(self) -> K:
        when, _, key = heapq.heappop(self._heap)
        times = self._scheduled.get(key)
        if times is not None and times[-1] == when:
            if len(times) > 1:
                self._scheduled[key] = times[:-1]
            else:
                del self._scheduled[key]
        self.earliest = self._heap[0][0] if self._heap else inf
        return key
