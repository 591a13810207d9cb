"""The events of a channel: in order, and those of an owner are taken without a look at the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdmacm.constants import CmEventType
from rdmacm.provider import QueuedEvent
from rdmacm.soft.event_queue import SoftQueue
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider


class Owner:
    reported = 0

    def _reported(self, _: int, /) -> None:
        self.reported += 1


@pytest.fixture
def queue() -> Iterator[SoftQueue]:
    queue = memory_provider(MemoryNetwork(), VirtualClock()).open_queue()
    assert isinstance(queue, SoftQueue)
    yield queue
    queue.close()


def user_event(owner: Owner, number: int) -> QueuedEvent:
    return QueuedEvent(owner, CmEventType.USER, 0, number)


def fetched(queue: SoftQueue) -> list[int]:
    found = []
    while (event := queue.get(0)) is not None:
        found.append(event.arg)
    return found


def test_taken_events_are_not_fetched_and_the_others_stay_in_order(queue: SoftQueue) -> None:
    first, second = Owner(), Owner()
    for number in range(6):
        queue.post(user_event(second if number % 2 else first, number))
    assert [event.arg for event in queue.take(first)] == [0, 2, 4]
    assert queue.take(first) == []
    assert not queue.has(first, CmEventType.USER)
    queue.post(user_event(first, 6))
    assert fetched(queue) == [1, 3, 5, 6]
    assert (first.reported, second.reported) == (1, 3)
    assert not queue.ready


def test_queue_whose_events_are_all_taken_is_empty(queue: SoftQueue) -> None:
    owner = Owner()
    queue.post(user_event(owner, 1))
    assert queue.ready
    queue.take(owner)
    assert not queue.ready
    assert fetched(queue) == []


def test_taken_events_take_no_memory(queue: SoftQueue) -> None:
    stays = Owner()
    queue.post(user_event(stays, 1))
    for number in range(1000):
        owner = Owner()
        queue.post(user_event(owner, number))
        queue.take(owner)
    queue.post(user_event(stays, 2))
    assert len(queue._events) < 200
    assert fetched(queue) == [1, 2]
