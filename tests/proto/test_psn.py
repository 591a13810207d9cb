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


@given(psns, st.integers(-HALF, HALF - 1))
def test_difference_undoes_addition(start: int, count: int) -> None:
    assert psn.difference(start + count & PSN_MASK, start) == count
