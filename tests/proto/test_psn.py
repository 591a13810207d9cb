"""Packet sequence numbers, including wrap-around."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rdmacm.proto.constants import PSN_MASK
from rdmacm.proto.roce import psn
from support.rows import for_each

HALF = 1 << 23
psns = st.integers(0, PSN_MASK)


@for_each(
    ("start", "count", "end"),
    [(0, 0, 0), (0xFFFFFF, 1, 0), (0xFFFFFE, 5, 3), (0, -1, 0xFFFFFF), (2, -5, 0xFFFFFD), (5, 1 << 24, 5)],
)
def test_add_wraps_at_24_bits(start: int, count: int, end: int) -> None:
    assert psn.add(start, count) == end


@for_each(
    ("a", "b", "distance"),
    [
        (5, 5, 0),
        (6, 5, 1),
        (5, 6, -1),
        (0, 0xFFFFFF, 1),
        (0xFFFFFF, 0, -1),
        (HALF - 1, 0, HALF - 1),
        (HALF, 0, -HALF),
        (HALF + 1, 0, 1 - HALF),
        (0, HALF, -HALF),
    ],
)
def test_difference_is_signed_and_wraps(a: int, b: int, distance: int) -> None:
    assert psn.difference(a, b) == distance
    assert psn.after(a, b) is (distance > 0)
    assert psn.before(a, b) is (distance < 0)


@given(psns, st.integers(-HALF, HALF - 1))
def test_difference_undoes_add(start: int, count: int) -> None:
    end = psn.add(start, count)
    assert 0 <= end <= PSN_MASK
    assert psn.difference(end, start) == count


@given(psns, psns)
def test_comparison_is_a_strict_order(a: int, b: int) -> None:
    assert psn.after(a, b) + psn.before(a, b) + (a == b) == 1
    if (a - b) % (1 << 24) != HALF:
        assert psn.after(a, b) is psn.before(b, a)
