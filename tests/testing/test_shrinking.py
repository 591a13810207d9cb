"""The shortest part of a list that fails."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rdmacm.testing.shrinking import shortest


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_what_fails_by_a_set_of_items_shrinks_to_the_set(drawn: tuple[int, set[int]]) -> None:
    count, needed = drawn
    asked: list[tuple[int, ...]] = []

    def fails(part: Sequence[int]) -> bool:
        asked.append(tuple(part))
        return needed <= set(part)

    assert shortest(range(count), fails) == (sorted(needed), True)
    assert len(asked) == len(set(asked)), "a part was tried twice"


@given(st.lists(st.booleans(), max_size=200))
def test_the_result_fails_and_does_not_without_any_one_item(outcomes: list[bool]) -> None:
    """Also where a longer part may pass that has a shorter one which fails."""

    def fails(part: Sequence[int]) -> bool:
        return len(part) == 12 or (len(outcomes) > 0 and outcomes[sum(part) % len(outcomes)])

    found, is_shortest = shortest(range(12), fails)
    assert is_shortest
    assert fails(found)
    if len(found) > 1:
        assert not any(fails([item for item in found if item != left_out]) for left_out in found)


def test_a_search_without_time_gives_what_it_has() -> None:
    answers = iter([False, True, None])
    assert shortest(range(8), lambda _: next(answers)) == ([0, 1, 2, 3], False)
    assert shortest(range(8), lambda _: None) == (list(range(8)), False)


def test_nothing_is_tried_without_items() -> None:
    assert shortest([], lambda _: 1 / 0 > 0) == ([], True)
