"""The timer heap: keys in the order of their deadlines, and few stale entries when deadlines move often."""

from __future__ import annotations

import random

from rdmacm.proto.timerheap import LazyTimerHeap


def test_due_keys_are_returned_in_the_order_of_their_deadlines() -> None:
    deadlines = {"a": 3.0, "b": 1.0, "c": 2.0}
    heap = LazyTimerHeap[str](deadlines.get)
    for key, deadline in deadlines.items():
        heap.schedule(key, deadline)
    assert [heap.pop_due(2.5) for _ in range(3)] == ["b", "c", None]
    assert heap.next_deadline() == heap.earliest == 3.0


def test_deadline_moved_back_is_due_later() -> None:
    deadlines: dict[str, float | None] = {"a": 1.0}
    heap = LazyTimerHeap[str](deadlines.get)
    heap.schedule("a", 1.0)
    deadlines["a"] = 2.0
    assert heap.pop_due(1.5) is None
    assert heap.pop_due(2.0) == "a"


def test_cancelled_deadline_is_dropped() -> None:
    deadlines: dict[str, float | None] = {"a": 1.0}
    heap = LazyTimerHeap[str](deadlines.get)
    heap.schedule("a", 1.0)
    deadlines["a"] = None
    assert heap.pop_due(5.0) is None
    assert heap.earliest > 5.0


def test_discarded_key_can_be_scheduled_again() -> None:
    deadlines: dict[str, float | None] = {"a": 1.0}
    heap = LazyTimerHeap[str](deadlines.get)
    heap.schedule("a", 1.0)
    heap.discard("a")
    deadlines["a"] = 4.0
    heap.schedule("a", 4.0)
    assert heap.next_deadline() == 4.0


def test_random_moves_agree_with_a_plain_table_and_leave_few_stale_entries() -> None:
    source = random.Random(1)
    deadlines: dict[int, float] = {}
    heap = LazyTimerHeap[int](deadlines.get)
    now = 0.0
    for _ in range(20_000):
        key = source.randrange(8)
        if source.random() < 0.2:
            deadlines.pop(key, None)
        else:
            deadlines[key] = now + source.choice((0.01, 5.0)) * source.random()
            heap.schedule(key, deadlines[key])
        now += 0.002 * source.random()
        due = {key for key, deadline in deadlines.items() if deadline <= now}
        while (found := heap.pop_due(now)) is not None:
            due.remove(found)
            del deadlines[found]
        assert not due
        assert heap.next_deadline() == min(deadlines.values(), default=None)
        assert len(heap) <= 64 + 4 * 8 + 1
