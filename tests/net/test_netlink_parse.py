"""Malformed rtnetlink messages are dropped, without an exception and without an endless loop."""

from __future__ import annotations

import contextlib
import struct
import sys
from socket import AF_INET, inet_aton

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import Gid
from rdmacm.net import NeighbourState, netlink
from rdmacm.proto.ipoib import IpoibAddress, broadcast_gid

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


def test_errno_of_an_error_message_is_valid() -> None:
    for number, code in ((-2, 2), (0, 0), (-4095, 4095), (-4096, 71), (5, 71), (-(1 << 31), 71), (1 << 30, 71)):
        assert netlink._error_code(memoryview(struct.pack("=i", number))) == code
    assert netlink._error_code(memoryview(b"\0\0")) == 71, "EPROTO"


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


#: The messages about an IPoIB interface and a neighbour on it, written by the layouts of rtnetlink(7).
IPOIB_LINK = bytes.fromhex(
    "00 00 20 00  05 00 00 00  43 10 01 00  00 00 00 00"  # ifinfomsg: type 32, index 5; UP, RUNNING and others
    "08 00 03 00  69 62 30 00"  # IFLA_IFNAME: ib0
    "08 00 04 00  fc 07 00 00"  # IFLA_MTU: 2044
    "18 00 01 00  80 00 00 48  fe 80 00 00 00 00 00 00  00 02 c9 03 00 00 00 03"  # IFLA_ADDRESS
    "18 00 02 00  00 ff ff ff  ff 12 40 1b 80 01 00 00  00 00 00 00 ff ff ff ff"  # IFLA_BROADCAST
)
IPOIB_NEIGHBOUR = bytes.fromhex(
    "02 00 00 00  05 00 00 00  02 00 00 01"  # ndmsg: AF_INET, index 5, REACHABLE
    "08 00 01 00  0a 09 00 02"  # NDA_DST: 10.9.0.2
    "18 00 02 00  80 00 00 49  fe 80 00 00 00 00 00 00  00 02 c9 03 00 00 00 05"  # NDA_LLADDR
)


@pytest.mark.skipif(sys.byteorder != "little", reason="the messages are from a little-endian machine")
def test_ipoib_interface_and_neighbour() -> None:
    link = netlink._parse_link(memoryview(IPOIB_LINK))
    assert link is not None
    assert (link.name, link.index, link.mtu, link.is_ipoib, link.is_running) == ("ib0", 5, 2044, True, True)
    assert IpoibAddress.unpack(link.address) == (Gid("fe80::2:c903:0:3"), 0x48, 0x80)
    assert IpoibAddress.unpack(link.broadcast) == (broadcast_gid(0x8001), 0xFFFFFF, 0)
    neighbour = netlink._parse_neighbour(memoryview(IPOIB_NEIGHBOUR))
    assert neighbour is not None
    assert (neighbour.ifindex, neighbour.ip, neighbour.state) == (5, inet_aton("10.9.0.2"), NeighbourState.REACHABLE)
    assert IpoibAddress.unpack(neighbour.link_layer_address) == (Gid("fe80::2:c903:0:5"), 0x49, 0x80)


@pytest.mark.parametrize("size", [0, 4, 6, 16, 20, 32])
def test_hardware_address_of_any_length(size: int) -> None:
    """The kernel's limit, MAX_ADDR_LEN, is 32 bytes."""
    address = bytes(range(size))
    link = netlink._parse_link(memoryview(bytes(16) + attribute(1, address) + attribute(2, address[::-1])))
    assert link is not None
    assert (link.address, link.broadcast) == (address, address[::-1])
    neighbour = netlink._parse_neighbour(memoryview(bytes(12) + attribute(1, b"\n\0\0\1") + attribute(2, address)))
    assert neighbour is not None
    assert neighbour.link_layer_address == address


@pytest.mark.parametrize("length", [0, 1, 15, 0xFFFF])
def test_wrong_lengths_end_the_parse(length: int) -> None:
    message = struct.pack("=IHHII", length, 24, 0, 1, 0) + bytes(4)
    assert list(netlink._messages(memoryview(message))) == []
    assert list(netlink._attributes(memoryview(struct.pack("=HH", 3, 1) + bytes(8)), 0)) == []
