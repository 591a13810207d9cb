"""Malformed rtnetlink messages are dropped, without an exception and without an endless loop."""

from __future__ import annotations

import contextlib
import struct
from socket import AF_INET, inet_aton

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.net import netlink

# The parsers are private: the public calls read from the kernel, which sends no malformed messages.
BODIES = st.binary(max_size=200)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


@given(BODIES)
def test_arbitrary_bytes_do_not_raise(body: bytes) -> None:
    view = memoryview(body)
    for kind, sequence, inner in netlink._messages(view):
        assert 0 <= kind <= 0xFFFF
        assert 0 <= sequence <= 0xFFFFFFFF
        assert len(inner) <= len(body)
    netlink._parse_link(view)
    netlink._parse_address(view)
    netlink._parse_neighbour(view)
    if len(body) >= 12:
        with contextlib.suppress(OSError):  # a route of type unreachable, prohibit or blackhole
            assert netlink._parse_route(view, b"\0\0\0\0").kind


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 10, 15, 18]), st.binary(max_size=12)), max_size=8),
    st.integers(0, 9),
)
def test_arbitrary_attributes_do_not_raise(attributes: list[tuple[int, bytes]], cut: int) -> None:
    tail = b"".join(attribute(kind, value) for kind, value in attributes)
    tail = tail[: len(tail) - cut] if cut else tail
    for head, parse in (
        (bytes(16), netlink._parse_link),
        (struct.pack("=BBBBI", AF_INET, 24, 0, 0, 3), netlink._parse_address),
        (bytes(12), netlink._parse_neighbour),
    ):
        parse(memoryview(head + tail))
    netlink._parse_route(memoryview(bytes(12) + tail), b"\0\0\0\0")


def test_route_attributes_are_parsed() -> None:
    metrics = attribute(2, struct.pack("=I", 1400)) + attribute(10, struct.pack("=I", 33))
    body = struct.pack("=BBBBBBBBI", AF_INET, 24, 0, 0, 254, 3, 0, 1, 0) + b"".join(
        [
            attribute(4, struct.pack("=i", 7)),
            attribute(5, inet_aton("10.0.0.254")),
            attribute(7, inet_aton("10.0.0.1")),
            attribute(8, metrics),
            attribute(15, struct.pack("=I", 1000)),
        ]
    )
    route = netlink._parse_route(memoryview(body), inet_aton("10.1.0.1"))
    assert route == (
        "unicast",
        inet_aton("10.1.0.1"),
        7,
        inet_aton("10.0.0.254"),
        inet_aton("10.0.0.1"),
        1000,
        1400,
        33,
    )


@pytest.mark.parametrize("length", [0, 1, 15, 0xFFFF])
def test_wrong_lengths_end_the_parse(length: int) -> None:
    message = struct.pack("=IHHII", length, 24, 0, 1, 0) + bytes(4)
    assert list(netlink._messages(memoryview(message))) == []
    assert list(netlink._attributes(memoryview(struct.pack("=HH", 3, 1) + bytes(8)), 0)) == []
