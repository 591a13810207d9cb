"""pcapng blocks, field by field as in the file format."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.proto.pcapng import Direction, enhanced_packet, interface_description, section_header
from rdmacm.proto.wire import WireError


def parse(block: bytes, fixed: str) -> tuple[int, tuple[int, ...], bytes]:
    """A block's type, its fixed fields, and the bytes after them."""
    kind, length = struct.unpack_from("<II", block)
    assert length == len(block) == struct.unpack("<I", block[-4:])[0]
    assert length % 4 == 0
    return kind, struct.unpack_from("<" + fixed, block, 8), block[8 + struct.calcsize("<" + fixed) : -4]


def options(data: bytes) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while True:
        code, size = struct.unpack_from("<HH", data)
        if code == 0:
            assert data == bytes(4), "nothing follows the end of the options"
            return found
        found.append((code, data[4 : 4 + size]))
        padded = size + (-size & 3)
        assert not any(data[4 + size : 4 + padded])
        data = data[4 + padded :]


def test_section_header_names_the_application_and_the_system() -> None:
    kind, fields, rest = parse(section_header("rdmacm", "Linux 6.1"), "IHHq")
    assert kind == 0x0A0D0D0A
    assert fields == (0x1A2B3C4D, 1, 0, -1)
    assert options(rest) == [(3, b"Linux 6.1"), (4, b"rdmacm")]


def test_interface_description_names_the_interface() -> None:
    kind, fields, rest = parse(interface_description("eth0"), "HHI")
    assert kind == 1
    assert fields == (1, 0, 0), "Ethernet, no limit of the packet length"
    assert options(rest) == [(2, b"eth0"), (9, b"\x09")]


@given(
    st.binary(max_size=70),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(Direction),
    st.text("aß\ud800", max_size=9),
    st.integers(0, 9),
)
def test_enhanced_packet_carries_frame_time_direction_and_comment(
    frame: bytes, time: int, direction: Direction, comment: str, interface: int
) -> None:
    block = enhanced_packet(memoryview(frame), time, direction, comment, interface)
    kind, (number, high, low, captured, original), rest = parse(block, "IIIII")
    assert kind == 6
    assert (number, high << 32 | low) == (interface, time)
    assert captured == original == len(frame)
    assert rest[: len(frame)] == frame
    padded = len(frame) + (-len(frame) & 3)
    found = dict(options(rest[padded:]))
    assert found.pop(2) == struct.pack("<I", direction)
    text = comment.encode(errors="backslashreplace")
    assert found == ({1: text} if comment else {})


def test_too_long_comment_raises_wire_error() -> None:
    with pytest.raises(WireError):
        enhanced_packet(b"", 0, comment="x" * 65536)
