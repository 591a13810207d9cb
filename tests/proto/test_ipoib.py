"""Hardware addresses and group GIDs of IPoIB: the layouts and examples of RFC 4391."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import Gid
from rdmacm.proto.ipoib import IpoibAddress, broadcast_gid, multicast_gid
from rdmacm.proto.wire import WireError


@given(st.binary(min_size=20, max_size=20))
def test_hardware_address_is_packed_as_it_was(data: bytes) -> None:
    address = IpoibAddress.unpack(data)
    assert address.pack() == data
    assert (address.flags, address.qpn, address.gid) == (data[0], int.from_bytes(data[1:4], "big"), data[4:])


@pytest.mark.parametrize("size", [0, 6, 19, 21, 32])
def test_hardware_address_has_20_bytes(size: int) -> None:
    with pytest.raises(WireError, match=f"not {size}"):
        IpoibAddress.unpack(bytes(size))


def test_broadcast_group() -> None:
    assert broadcast_gid(0xFFFF) == Gid("ff12:401b:ffff::ffff:ffff")
    assert broadcast_gid(0x8001, 5) == Gid("ff15:401b:8001::ffff:ffff")


@pytest.mark.parametrize(
    ("address", "mgid"),
    [
        ("224.0.0.1", "ff12:401b:ffff::1"),
        ("239.255.255.255", "ff12:401b:ffff::fff:ffff"),
        ("ff02::1", "ff12:601b:ffff::1"),
        ("ff3e:40:2001:db8:1:2:3:4", "ff12:601b:ffff:db8:1:2:3:4"),
    ],
)
def test_multicast_group(address: str, mgid: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    assert multicast_gid(socket.inet_pton(family, address), 0xFFFF) == Gid(mgid)
