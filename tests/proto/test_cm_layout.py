"""The generated codec of each layout compared with a bit-by-bit reading of its table."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rdmacm.proto.cm.messages import APR, DREP, DREQ, LAP, MRA, REJ, REP, REQ, RTU, SIDR_REP, SIDR_REQ, Path
from rdmacm.proto.layout import Bits, Bytes, Layout
from rdmacm.proto.wire import WireError
from support.examples import EXAMPLES
from support.rows import for_each

KINDS: list[Any] = [REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP, LAP, APR, Path]


def bit_positions(layout: Layout) -> dict[str, list[int]]:
    """The bit positions of each numeric field in the message, highest bit first."""
    found: dict[str, list[int]] = {}
    for field in layout.fields:
        if isinstance(field, Bits):
            first = field.offset * 8 + field.before
            found.setdefault(field.name, []).extend(range(first, first + field.width))
    return found


def unpacked_bit_by_bit(layout: Layout, data: bytes) -> dict[str, Any]:
    text = "".join(f"{byte:08b}" for byte in data)
    values: dict[str, Any] = {
        name: int("".join(text[bit] for bit in bits), 2) for name, bits in bit_positions(layout).items()
    }
    for field in layout.fields:
        if isinstance(field, Bytes):
            values[field.name] = field.type(data[field.offset : field.offset + field.length])
    return values


def with_unused_bits_cleared(layout: Layout, data: bytes) -> bytes:
    used = {bit for bits in bit_positions(layout).values() for bit in bits}
    for field in layout.fields:
        if isinstance(field, Bytes):
            whole = data[field.offset : field.offset + field.length]
            packed = whole if isinstance(field.type(whole), bytes) else field.type(whole).pack()
            ones = int.from_bytes(packed, "big")
            end = (field.offset + field.length) * 8
            used |= {end - 1 - place for place in range(field.length * 8) if ones >> place & 1}
    kept = sum(1 << (len(data) * 8 - 1 - bit) for bit in used)
    return (int.from_bytes(data, "big") & kept).to_bytes(len(data), "big")


@for_each("kind", KINDS, ids=lambda kind: kind.__name__)
def test_generated_functions_match_the_layout_table(kind: Any) -> None:
    source = random.Random(kind.__name__)
    layout = kind._LAYOUT
    for _ in range(2 * EXAMPLES):
        data = source.randbytes(layout.size)
        assert layout.unpack(data) == unpacked_bit_by_bit(layout, data)
        assert layout.unpack(memoryview(data)) == unpacked_bit_by_bit(layout, data)
        assert kind.unpack(data).pack() == with_unused_bits_cleared(layout, data)


@for_each("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_field_bit_round_trips_alone(kind: Any) -> None:
    layout = kind._LAYOUT
    for name, bits in bit_positions(layout).items():
        for bit in bits:
            data = (1 << (layout.size * 8 - 1 - bit)).to_bytes(layout.size, "big")
            values = layout.unpack(data)
            assert values[name] == 1 << (len(bits) - 1 - bits.index(bit))
            assert kind(**values).pack() == data


@for_each("kind", KINDS, ids=lambda kind: kind.__name__)
@for_each("by", [-1, 1])
def test_wrong_length_raises_wire_error(kind: Any, by: int) -> None:
    with pytest.raises(WireError, match=f"{kind._LAYOUT.size} bytes"):
        kind.unpack(bytes(kind._LAYOUT.size + by))
