"""Socket addresses, GIDs and service ids."""

from __future__ import annotations

import copy
import ipaddress
import pickle
import socket
import sys
from socket import AF_INET, AF_INET6
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import (
    AF_IB,
    Gid,
    InetAddr,
    SockAddr,
    SockAddrIB,
    format_address,
    lookup_address,
    parse_address,
    service_id,
    service_id_mask,
    unpack_address,
)
from rdmacm.constants import PortSpace
from support.rows import for_each

ports = st.integers(0, 0xFFFF)
words = st.integers(0, 0xFFFFFFFF)
quads = st.integers(0, (1 << 64) - 1)
gids = st.binary(min_size=16, max_size=16).map(Gid)

FE80_1 = b"\xfe\x80" + bytes(13) + b"\x01"


class TestParse:
    @for_each(
        ("given_address", "parsed"),
        [
            (("10.0.0.1", 7471), InetAddr(AF_INET, b"\x0a\0\0\x01", 7471)),
            (("0.0.0.0", 0), InetAddr(AF_INET, bytes(4))),
            (("", 7471), InetAddr(AF_INET, bytes(4), 7471)),
            (("255.255.255.255", 65535), InetAddr(AF_INET, b"\xff" * 4, 65535)),
            (("::", 1), InetAddr(AF_INET6, bytes(16), 1)),
            (("fd00::1", 1), InetAddr(AF_INET6, b"\xfd" + bytes(14) + b"\x01", 1)),
            (("fd00::1", 1, 2), InetAddr(AF_INET6, b"\xfd" + bytes(14) + b"\x01", 1, 2)),
            (("fd00::1", 1, 2, 3), InetAddr(AF_INET6, b"\xfd" + bytes(14) + b"\x01", 1, 2, 3)),
            (("::ffff:10.0.0.1", 1), InetAddr(AF_INET6, bytes(10) + b"\xff\xff\x0a\0\0\x01", 1)),
            (("fe80::1%7", 1), InetAddr(AF_INET6, FE80_1, 1, 0, 7)),
            (("fe80::1%0", 1), InetAddr(AF_INET6, FE80_1, 1)),
            (("fe80::1%4294967295", 1), InetAddr(AF_INET6, FE80_1, 1, 0, 0xFFFFFFFF)),
        ],
    )
    def test_numeric_addresses_are_parsed(self, given_address: SockAddr, parsed: InetAddr) -> None:
        assert parse_address(given_address) == parsed

    def test_scope_may_be_a_numeric_interface_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "if_nametoindex", {"7": 70}.__getitem__)
        assert parse_address(("fe80::1%7", 1)) == InetAddr(AF_INET6, FE80_1, 1, 0, 70)
        assert parse_address(("fe80::1%7", 1, 0, 9)) == InetAddr(AF_INET6, FE80_1, 1, 0, 9)

    def test_scope_may_be_an_interface_name(self) -> None:
        for index, name in socket.if_nameindex():
            parsed = parse_address((f"fe80::1%{name}", 7471))
            assert (parsed.port, parsed.scope_id) == (7471, index)

    def test_port_may_be_a_string_of_digits(self) -> None:
        as_users_type_it: Any = ("10.0.0.1", "7471")
        assert parse_address(as_users_type_it) == InetAddr(AF_INET, b"\x0a\0\0\x01", 7471)

    def test_parsed_address_is_returned_unchanged(self) -> None:
        for address in (InetAddr(AF_INET, bytes(4), 1), SockAddrIB(Gid("fe80::1"))):
            as_parsed: Any = address
            assert parse_address(as_parsed) is address

    @for_each(
        ("address", "part"),
        [
            (("name.test", 1), "name.test"),
            (("10.0.0.1.5", 1), "10.0.0.1.5"),
            (("10.1", 1), "10.1"),
            (("256.0.0.1", 1), "256.0.0.1"),
            (("10.0.0.1%1", 1), "10.0.0.1%1"),
            (("fe80::1::2", 1), "fe80::1::2"),
            (("[fe80::1]", 1), "fe80::1"),
            (("10.0.0.1", 1, 0, 0), "10.0.0.1"),
            (("10.0.0.1\0", 1), "10.0.0.1"),
            (("::1\0", 1), "::1"),
            (("\ud800", 1), "numeric"),
            (("fe80::1%nosuch", 1), "nosuch"),
            (("fe80::1%", 1), "scope"),
            (("fe80::1%-1", 1), "-1"),
            (("fe80::1%4294967296", 1), "4294967296"),
            (("fe80::1%\0", 1), "scope"),
            (("10.0.0.1", -1), "-1"),
            (("10.0.0.1", 65536), "65536"),
            (("10.0.0.1", "65536"), "65536"),
            (("fe80::1", 1, 1 << 32), "flowinfo"),
            (("fe80::1", 1, 0, 1 << 32), "scope_id"),
            (("fe80::1", 1, 0, -1), "scope_id"),
        ],
    )
    def test_invalid_numeric_addresses_raise(self, address: Any, part: str) -> None:
        with pytest.raises(ValueError) as caught:
            parse_address(address)
        assert part in str(caught.value)

    @for_each(
        "address",
        [
            None,
            "10.0.0.1",
            "10.0.0.1:7471",
            ["10.0.0.1", 7471],
            (),
            ("10.0.0.1",),
            ("fe80::1", 1, 0, 0, 0),
            (b"10.0.0.1", 1),
            (1, 1),
            (None, 1),
            ("10.0.0.1", None),
            ("10.0.0.1", 1.0),
            ("10.0.0.1", True),
            ("10.0.0.1", "http"),
            ("10.0.0.1", ""),
            ("10.0.0.1", "-1"),
            ("fe80::1", 1, None),
            ("fe80::1", 1, 0, "lo"),
        ],
    )
    def test_invalid_types_raise(self, address: Any) -> None:
        with pytest.raises(TypeError):
            parse_address(address)

    @given(st.ip_addresses(v=4), ports)
    def test_ipv4_address_survives_a_round_trip(self, ip: ipaddress.IPv4Address, port: int) -> None:
        parsed = parse_address((str(ip), port))
        assert isinstance(parsed, InetAddr)
        assert parsed == InetAddr(AF_INET, ip.packed, port, 0, 0)
        assert parsed.sockaddr == (str(ip), port)
        assert parsed.host == str(ip)

    @given(st.ip_addresses(v=6), ports, words, words)
    def test_ipv6_address_survives_a_round_trip(
        self, ip: ipaddress.IPv6Address, port: int, flowinfo: int, scope: int
    ) -> None:
        parsed = parse_address((str(ip), port, flowinfo, scope))
        assert isinstance(parsed, InetAddr)
        assert parsed == InetAddr(AF_INET6, ip.packed, port, flowinfo, scope)
        assert parse_address(parsed.sockaddr) == parsed
        assert ipaddress.ip_address(parsed.host) == ip
        assert parse_address((f"{ip}%{scope}", port)) == InetAddr(AF_INET6, ip.packed, port, 0, scope)

    @given(st.one_of(st.text(), st.text("0123456789.:%abcdef")), st.one_of(ports, st.integers()))
    def test_arbitrary_text_is_an_address_or_a_value_error(self, host: str, port: int) -> None:
        try:
            parsed = parse_address((host, port))
        except ValueError:
            return
        assert isinstance(parsed, InetAddr)
        assert parsed.port == port
        assert parse_address(parsed.sockaddr) == parsed


class TestLookup:
    def test_numeric_hosts_are_not_looked_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(socket, "getaddrinfo")
        assert lookup_address(("10.0.0.1", 1)) == InetAddr(AF_INET, b"\x0a\0\0\x01", 1)
        assert lookup_address(SockAddrIB()) == SockAddrIB()

    def test_first_answer_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[Any, ...]] = []

        def answer(*args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
            asked.append(args)
            return [
                (AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 7471, 0, 3)),
                (AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7471)),
            ]

        monkeypatch.setattr(socket, "getaddrinfo", answer)
        assert lookup_address(("name.test", 7471)) == parse_address(("fe80::1", 7471, 0, 3))
        assert asked == [("name.test", 7471)]

    def test_name_without_an_answer_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def answer(*args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", answer)
        with pytest.raises(socket.gaierror) as caught:
            lookup_address(("name.test", 7471))
        assert caught.value.errno == socket.EAI_NONAME

    @pytest.mark.parametrize(
        "address",
        [
            ("fe80::1%nosuch", 1),
            ("fe80:::1", 1),
            ("name.test", 65536),
            # getaddrinfo(3) would take these for "localhost" and NULL.
            ("localhost\0.name.test", 1),
            ("*", 1),
        ],
    )
    def test_invalid_names_are_not_looked_up(self, address: SockAddr, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(socket, "getaddrinfo")
        with pytest.raises(ValueError):
            lookup_address(address)

    def test_answer_of_another_family_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = [(int(socket.AF_UNIX), 1, 0, "", ("/run/name",))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: answer)
        with pytest.raises(ValueError, match=r"name\.test"):
            lookup_address(("name.test", 7471))


class TestFormat:
    @for_each(
        ("address", "text"),
        [
            (None, "-"),
            (("10.0.0.1", 7471), "10.0.0.1:7471"),
            (("fd00::1", 7471), "[fd00::1]:7471"),
            (("fd00::1", 7471, 0, 0), "[fd00::1]:7471"),
            (("fe80::1", 7471, 0, 4000000000), "[fe80::1%4000000000]:7471"),
            (("fe80::1", 7471, 0, 1), f"[fe80::1%{socket.if_indextoname(1)}]:7471"),
            (("fe80::1%eth0", 7471), "[fe80::1%eth0]:7471"),
            (("fe80::1%eth0", 7471, 0, 2), "[fe80::1%eth0]:7471"),
            (("name.test", "http"), "name.test:http"),
            (InetAddr(AF_INET, b"\x0a\0\0\x01", 7471), "10.0.0.1:7471"),
            (InetAddr(AF_INET6, FE80_1, 7471, 0, 4000000000), "[fe80::1%4000000000]:7471"),
            (SockAddrIB(Gid("fe80::1"), 0x13F1D2F), "[fe80::1]:0x13f1d2f"),
        ],
    )
    def test_addresses_are_formatted(self, address: Any, text: str) -> None:
        assert format_address(address) == text
        if isinstance(address, InetAddr | SockAddrIB):
            assert str(address) == text

    @pytest.mark.parametrize("address", [(), ("10.0.0.1",), 7, "10.0.0.1"])
    def test_formatting_other_objects_does_not_raise(self, address: Any) -> None:
        assert format_address(address)

    @given(st.ip_addresses(), ports)
    def test_formatted_address_separates_host_and_port(
        self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
    ) -> None:
        host, _, tail = format_address((str(ip), port)).rpartition(":")
        assert (host.strip("[]"), int(tail)) == (str(ip), port)


class TestInetAddr:
    @for_each(
        ("host", "is_any", "loopback", "link_local", "multicast"),
        [
            ("0.0.0.0", True, False, False, False),
            ("::", True, False, False, False),
            ("0.0.0.1", False, False, False, False),
            ("::1:0", False, False, False, False),
            ("127.0.0.1", False, True, False, False),
            ("127.255.255.254", False, True, False, False),
            ("126.0.0.1", False, False, False, False),
            ("128.0.0.1", False, False, False, False),
            ("::1", False, True, False, False),
            ("::2", False, False, False, False),
            ("fe80::1", False, False, True, False),
            ("febf::1", False, False, True, False),
            ("fe7f::1", False, False, False, False),
            ("fec0::1", False, False, False, False),
            ("fd00::1", False, False, False, False),
            ("169.254.0.1", False, False, False, False),
            ("224.0.0.1", False, False, False, True),
            ("239.255.255.255", False, False, False, True),
            ("223.255.255.255", False, False, False, False),
            ("240.0.0.1", False, False, False, False),
            ("255.255.255.255", False, False, False, False),
            ("ff02::1", False, False, False, True),
            ("ff00::", False, False, False, True),
            ("10.0.0.1", False, False, False, False),
        ],
    )
    def test_address_classes_are_recognized(
        self, host: str, is_any: bool, loopback: bool, link_local: bool, multicast: bool
    ) -> None:
        address = parse_address((host, 1))
        assert isinstance(address, InetAddr)
        assert (address.is_any, address.is_loopback) == (is_any, loopback)
        assert (address.is_link_local, address.is_multicast) == (link_local, multicast)

    def test_wildcard_and_loopback_addresses_are_made_for_a_family(self) -> None:
        assert InetAddr.any(AF_INET, 7).sockaddr == ("0.0.0.0", 7)
        assert InetAddr.any(AF_INET6, 7, 3).sockaddr == ("::", 7, 0, 3)
        assert InetAddr.loopback(AF_INET, 7).sockaddr == ("127.0.0.1", 7)
        assert InetAddr.loopback(AF_INET6).sockaddr == ("::1", 0, 0, 0)
        for family in (AF_INET, AF_INET6):
            assert InetAddr.any(family).is_any
            assert InetAddr.loopback(family).is_loopback

    def test_sockets_accept_the_sockaddr(self) -> None:
        with socket.socket(AF_INET, socket.SOCK_DGRAM) as there:
            there.bind(InetAddr.loopback(AF_INET).sockaddr)
            assert parse_address(there.getsockname()) == InetAddr.loopback(AF_INET, there.getsockname()[1])


class TestGid:
    def test_gid_is_made_from_text_or_bytes(self) -> None:
        assert Gid("fe80::1") == Gid(FE80_1) == FE80_1
        assert Gid() == bytes(16)
        assert str(Gid("FE80:0::0:1")) == "fe80::1"
        assert repr(Gid("fe80::1")) == "Gid('fe80::1')"

    @for_each("wrong", ["", "fe80", "10.0.0.1", "fe80::1%lo", "fe80::1\0", b"", bytes(15), bytes(17), bytes(4)])
    def test_invalid_gids_raise(self, wrong: str | bytes) -> None:
        with pytest.raises(ValueError):
            Gid(wrong)

    def test_error_names_the_expected_format(self) -> None:
        with pytest.raises(ValueError, match=r"not a GID: '10\.0\.0\.1'"):
            Gid("10.0.0.1")
        with pytest.raises(ValueError, match="16 bytes, not 15"):
            Gid(bytes(15))

    def test_gid_is_made_from_an_ip_address(self) -> None:
        assert str(Gid.from_ip(bytes([10, 0, 0, 1]))) == "::ffff:10.0.0.1"
        assert Gid.from_ip(bytes([10, 0, 0, 1])).ip == bytes([10, 0, 0, 1])
        assert Gid.from_ip(Gid("fd00::1")).ip == Gid("fd00::1")
        with pytest.raises(ValueError):
            Gid.from_ip(bytes(5))

    @given(st.ip_addresses())
    def test_ip_address_of_a_gid_is_the_one_it_was_made_from(
        self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address
    ) -> None:
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        assert Gid.from_ip(ip.packed).ip == (mapped or ip).packed

    def test_gid_has_subnet_prefix_and_interface_id(self) -> None:
        gid = Gid(bytes(range(16)))
        assert gid.subnet_prefix == 0x0001020304050607
        assert gid.interface_id == 0x08090A0B0C0D0E0F

    @given(gids)
    def test_gid_survives_text_pickle_and_copy(self, gid: Gid) -> None:
        for again in (Gid(str(gid)), pickle.loads(pickle.dumps(gid)), copy.deepcopy(gid)):
            assert again == gid
            assert type(again) is Gid

    def test_gid_is_hashable(self) -> None:
        assert {Gid("fe80::1"): 1}[Gid("fe80:0::1")] == 1


class TestSockAddrIB:
    #: family (host order), P_Key, flow information, address, service id, mask, scope (host order)
    ADDRESS = SockAddrIB(
        Gid("fe80::2:c903:1:2"),
        sid=0x0102030405060708,
        sid_mask=0xFFFFFFFFFFFF0000,
        pkey=0x8001,
        flowinfo=0x000ABCDE,
        scope_id=0x1122334455667788,
    )
    BYTES = (
        AF_IB.to_bytes(2, sys.byteorder)
        + bytes.fromhex("8001 000abcde fe80000000000000 0002c90300010002 0102030405060708 ffffffffffff0000")
        + (0x1122334455667788).to_bytes(8, sys.byteorder)
    )

    def test_af_ib_is_27(self) -> None:
        assert AF_IB == 27

    def test_sockaddr_ib_has_the_layout_of_c(self) -> None:
        assert len(self.BYTES) == 48
        assert self.ADDRESS.pack() == self.BYTES
        assert SockAddrIB.unpack(self.BYTES) == self.ADDRESS

    @pytest.mark.parametrize(
        ("field", "offset", "size"),
        [("pkey", 2, 2), ("flowinfo", 4, 4), ("sid", 24, 8), ("sid_mask", 32, 8)],
    )
    def test_each_field_has_the_offset_of_c(self, field: str, offset: int, size: int) -> None:
        value = int.from_bytes(range(0xA1, 0xA1 + size), "big")
        fields: dict[str, Any] = {"pkey": 0, field: value}
        data = SockAddrIB(**fields).pack()
        assert data[offset : offset + size] == value.to_bytes(size, "big")
        assert set(data[2:offset] + data[offset + size :]) <= {0}

    def test_pkey_defaults_to_the_default_partition(self) -> None:
        assert SockAddrIB() == SockAddrIB(Gid(), 0, 0, 0xFFFF, 0, 0)

    @given(st.builds(SockAddrIB, gids, sid=quads, sid_mask=quads, pkey=ports, flowinfo=words, scope_id=quads))
    def test_sockaddr_ib_survives_a_round_trip(self, address: SockAddrIB) -> None:
        data = address.pack()
        assert len(data) == 48
        again = SockAddrIB.unpack(data)
        assert again == address
        assert type(again.addr) is Gid
        assert pickle.loads(pickle.dumps(address)) == address

    @for_each("data", [b"", BYTES[:-1], BYTES + b"\0", bytes(48), bytes([2]) + bytes(47)])
    def test_unpacking_invalid_bytes_raises(self, data: bytes) -> None:
        with pytest.raises(ValueError):
            SockAddrIB.unpack(data)

    def test_port_follows_the_service_id_mask(self) -> None:
        assert SockAddrIB(sid=0x1061D2F, sid_mask=0xFFFFFFFFFFFFFFFF).port == 7471
        assert SockAddrIB(sid=0x1061D2F, sid_mask=0xFFFFFFFFFFFF0000).port == 0

    def test_sockaddr_ib_is_immutable_and_hashable(self) -> None:
        address: Any = SockAddrIB()
        with pytest.raises(AttributeError):
            address.sid = 1
        assert hash(SockAddrIB(sid=1)) == hash(SockAddrIB(sid=1))


class TestServiceId:
    @for_each(
        ("space", "port", "sid", "mask"),
        [
            (PortSpace.TCP, 7471, 0x1061D2F, 0xFFFFFFFFFFFFFFFF),
            (PortSpace.TCP, 0, 0x1060000, 0xFFFFFFFFFFFF0000),
            (PortSpace.UDP, 7471, 0x1111D2F, 0xFFFFFFFFFFFFFFFF),
            (PortSpace.IB, 7471, 0x13F1D2F, 0xFFFFFFFFFFFFFFFF),
            (PortSpace.IB, 0, 0x13F0000, 0xFFFFFFFFFFFF0000),
            (PortSpace.IPOIB, 65535, 0x2FFFF, 0xFFFFFFFFFFFFFFFF),
            (0, 7471, 0x1D2F, 0xFFFF),
            (0, 0, 0, 0),
        ],
    )
    def test_service_id_and_mask_follow_port_space_and_port(self, space: int, port: int, sid: int, mask: int) -> None:
        assert service_id(space, port) == sid
        assert service_id_mask(space, port) == mask
        assert SockAddrIB(sid=sid, sid_mask=mask).port == port


@pytest.mark.skipif(sys.byteorder == "big", reason="the expected bytes are little-endian")
def test_socket_addresses_are_those_of_c() -> None:
    ipv4, ipv6 = parse_address(("10.0.0.1", 7471)), parse_address(("fe80::1", 7471, 5, 3))
    gid = Gid("fe80::1")
    assert ipv4.pack() == bytes.fromhex("0200 1d2f 0a000001") + bytes(8)
    assert ipv6.pack() == bytes.fromhex("0a00 1d2f 00000005") + gid + bytes.fromhex("03000000")
    for address in (ipv4, ipv6, SockAddrIB(gid, 5, 7)):
        assert unpack_address(address.pack().ljust(128, b"\0")) == address
    for unset in (b"", b"\2", bytes(128), b"\2\0", b"\x0a\0" + bytes(10), b"\x1b\0" + bytes(10)):
        assert unpack_address(unset) is None
