"""Trains with packets of several queue pairs: joining packets looks at addresses, ports and lengths only."""

from __future__ import annotations

from collections.abc import Iterator


def parts_of_train(train: memoryview, segment: int) -> Iterator[memoryview]:
    """The packets of a train of ``segment`` bytes each, those joined that follow one another for one queue pair."""
    if _is_for_one(train, segment):
        yield train
        return
    start, before = 0, train[5:8]
    for position in range(segment, len(train), segment):
        qpn = train[position + 5 : position + 8]
        if qpn != before:
            yield train[start:position]
            start, before = position, qpn
    yield train[start:]


def _is_for_one(train: memoryview, segment: int) -> bool:
    """Whether all packets of a train are for one queue pair."""
    if not (segment | len(train)) & 3:  # as of every sender that follows the specification
        column = train.cast("I")[1 :: segment >> 2].tobytes()
        if column == column[:4] * (len(column) >> 2):
            return True
    return all(_is_same(train[byte::segment]) for byte in (5, 6, 7))


def _is_same(column: memoryview) -> bool:
    values = column.tobytes()
    return values.count(values[0]) == len(values)
