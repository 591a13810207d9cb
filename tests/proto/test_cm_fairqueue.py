"""The queue that gives each source of requests its share."""

from __future__ import annotations

from collections import Counter
from random import Random

from rdmacm.proto.cm.fairqueue import FairQueue


def test_sources_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.add(item[0], item)
    assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "c2", "a3", None]


def test_one_source_is_a_plain_queue() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(5):
        queue.add("only", item)
    queue.discard(2)
    queue.discard(2)
    assert queue.displaced_by("only") is None
    assert [queue.take() for _ in range(4)] == [0, 1, 3, 4]


def test_a_full_queue_takes_from_the_largest_source() -> None:
    """Whatever one source adds, others keep their items, and a newcomer gets in."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(100):
        queue.add("flood", ("flood", number))
    for number in range(10):
        oldest = queue.displaced_by(f"peer {number}")
        assert oldest == ("flood", number)
        queue.discard(oldest)
        queue.add(f"peer {number}", ("peer", number))
    assert queue.displaced_by("flood") is None
    assert len(queue) == 100


def test_random_use_agrees_with_a_list() -> None:
    random = Random(1)
    queue: FairQueue[int] = FairQueue()
    items: dict[int, int] = {}
    for number in range(5000):
        source = random.randrange(8) * random.randrange(2)
        if len(items) == 50:
            sizes = Counter(items.values())
            victim = queue.displaced_by(source)
            largest = max(sizes.values())
            assert (victim is None) == (largest <= sizes[source] + 1)
            if victim is None:
                continue
            assert sizes[items[victim]] == largest
            assert victim == min(item for item in items if items[item] == items[victim])
            queue.discard(victim)
            del items[victim]
        elif random.random() < 0.2:
            taken = queue.take()
            if taken is not None:
                assert taken == min(item for item in items if items[item] == items[taken])
                del items[taken]
        queue.add(source, number)
        items[number] = source
        assert len(queue) == len(items)
        assert all(item in queue for item in items)
    while items:
        del items[queue.take()]  # type: ignore[arg-type]
    assert queue.take() is None
