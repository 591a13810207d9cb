"""Packet sequence numbers (InfiniBand Architecture 9.7.2; message sequence numbers count the same way).

A PSN has 24 bits and wraps: which of two is the later is only known while they are less than 2^23 apart.

>>> from rdmacm.proto.roce import psn
>>> psn.difference(1, 0xFFFFFF)
2
"""

from __future__ import annotations

from rdmacm.proto.constants import PSN_HALF, PSN_MASK


def difference(a: int, b: int) -> int:
    """How far ``a`` is after ``b``, from -2^23 to 2^23 - 1; negative if it is before."""
    return (a - b + PSN_HALF & PSN_MASK) - PSN_HALF
