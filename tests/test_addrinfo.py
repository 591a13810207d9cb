"""rdmacm.getaddrinfo: what the host adds, hints, and whatever comes."""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable
from dataclasses import replace
from socket import AF_INET, AF_INET6
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacm.address import AF_IB, Gid, SockAddr, SockAddrIB, parse_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo, make_hints
from rdmacm.constants import EAI, PathFlag, PortSpace, RaiFlag
from rdmacm.errors import RdmaError
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.verbs.enums import QPType
from support.lookups import (
    ALL_ONES,
    FAMILY,
    IB,
    NOROUTE,
    NUMERICHOST,
    OTHER_PATH,
    PASSIVE,
    PATH,
    RC,
    SA,
    SPACE_ONLY,
    TCP,
    UC,
    UD,
    UDP,
    NotToBeAsked,
    Nowhere,
    Reaching,
    Resolver,
    fails,
    glibc_only,
    h,
    no_such_name,
    on,
    stream,
    to,
)
from support.rows import for_each

# -- what the host adds ---------------------------------------------------------------------------------


class TestRoute:
    def test_source_device_and_route_are_filled_in(self) -> None:
        host = Reaching()
        (info,) = getaddrinfo("10.0.0.1", 7471, port_space=TCP, provider=host)
        assert info == AddrInfo(
            flags=RaiFlag(0),
            family=AF_INET,
            qp_type=RC,
            port_space=TCP,
            src_addr=("10.0.0.2", 0),
            dst_addr=("10.0.0.1", 7471),
            route=(PathData(PATH),),
            device="stub0",
            port_num=1,
            gid_index=3,
        )
        assert info.route_len == 72
        assert info.route[0].flags == PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL
        assert host.asked == [(parse_address(("10.0.0.1", 7471)), None)]

    def test_each_answer_has_its_route(self) -> None:
        host = Reaching()
        resolver = Resolver(stream("10.0.0.1", 7471), stream("10.0.0.9", 7471))
        found = getaddrinfo("name.test", 7471, provider=host, resolver=resolver)
        assert [(info.dst_addr, info.device) for info in found] == [
            (("10.0.0.1", 7471), "stub0"),
            (("10.0.0.9", 7471), "stub0"),
        ]
        assert [str(destination) for destination, _ in host.asked] == ["10.0.0.1:7471", "10.0.0.9:7471"]

    def test_noroute_suppresses_routes(self) -> None:
        found = getaddrinfo("10.0.0.1", 7471, flags=NOROUTE, provider=NotToBeAsked())
        assert found == [to(("10.0.0.1", 7471))]

    def test_noroute_needs_no_provider(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RDMACM_PROVIDER", "no-such-provider")
        assert getaddrinfo("10.0.0.1", 7471, flags=NOROUTE) == [to(("10.0.0.1", 7471))]
        with pytest.raises(RdmaError, match="no-such-provider") as caught:
            getaddrinfo("10.0.0.1", 7471)
        assert caught.value.errno == errno.ENODEV

    def test_unreachable_destination_has_no_route(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, provider=Nowhere())
        assert info == to(("10.0.0.1", 7471))
        assert (info.src_len, info.route_len, info.device, info.port_num) == (0, 0, None, 0)

    def test_source_hint_selects_the_route(self) -> None:
        host = Reaching()
        (info,) = getaddrinfo("10.0.0.1", 7471, src_addr=("10.0.0.3", 5), provider=host)
        assert info.src_addr == ("10.0.0.3", 5)
        assert (info.device, info.gid_index, info.route) == ("stub0", 3, (PathData(PATH),))
        assert host.asked == [(parse_address(("10.0.0.1", 7471)), parse_address(("10.0.0.3", 5)))]

    def test_wildcard_source_becomes_the_actual_source(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, src_addr=("0.0.0.0", 0), provider=Reaching())
        assert info.src_addr == ("10.0.0.2", 0)

    @pytest.mark.parametrize("source", [("2001:db8::1", 0, 0, 0), SockAddrIB(Gid("fe80::1"))])
    def test_source_of_another_family_has_no_route(self, source: SockAddr) -> None:
        destination = ("10.0.0.1", 7471)
        for found in (
            getaddrinfo(*destination, src_addr=source, provider=Reaching()),
            getaddrinfo(src_addr=source, dst_addr=destination, provider=Reaching()),
        ):
            assert found == [to(destination, src=source)]

    def test_route_hint_is_kept(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, route=[PathData(OTHER_PATH)], provider=Reaching())
        assert info.route == (PathData(OTHER_PATH),)
        assert info.device == "stub0"

    def test_route_hint_is_kept_without_a_route(self) -> None:
        for flags in (0, NOROUTE):
            (info,) = getaddrinfo("10.0.0.1", 7471, flags=flags, route=OTHER_PATH.pack(), provider=Nowhere())
            assert info.route == (PathData(OTHER_PATH),)

    def test_destination_hint_alone(self) -> None:
        (info,) = getaddrinfo(dst_addr=("10.0.0.1", 7471), provider=Reaching())
        assert (info.src_addr, info.dst_addr) == (("10.0.0.2", 0), ("10.0.0.1", 7471))
        assert (info.device, info.port_num, info.gid_index) == ("stub0", 1, 3)
        assert info.route == (PathData(PATH),)

    def test_destination_hint_alone_with_noroute(self) -> None:
        found = getaddrinfo(dst_addr=("10.0.0.1", 7471), flags=NOROUTE, provider=NotToBeAsked())
        assert found == [to(("10.0.0.1", 7471))]

    def test_hints_alone_keep_source_and_route(self) -> None:
        (info,) = getaddrinfo(
            src_addr=("10.0.0.3", 5),
            dst_addr=("10.0.0.1", 7471),
            route=[PathData(OTHER_PATH)],
            provider=Reaching(),
        )
        assert (info.src_addr, info.route, info.device) == (("10.0.0.3", 5), (PathData(OTHER_PATH),), "stub0")

    def test_gid_destinations_are_not_routed_by_ip(self) -> None:
        provider = Nowhere()
        (info,) = getaddrinfo("fe80::1", 1, h(FAMILY, AF_IB, ps=IB), provider=provider)
        assert (info.dst_addr, info.device) == (SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES), None)
        assert provider.asked == []

    def test_noroute_with_a_gid(self) -> None:
        (info,) = getaddrinfo("fe80::1", 1, h(FAMILY | NOROUTE, AF_IB, ps=IB), provider=NotToBeAsked())
        assert (info.dst_addr, info.route) == (SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES), ())


class TestListener:
    def test_passive_answer_has_the_device_of_its_address(self) -> None:
        for found in (
            getaddrinfo("10.0.0.2", 7471, flags=PASSIVE, provider=Reaching()),
            getaddrinfo(src_addr=("10.0.0.2", 7471), flags=PASSIVE, provider=Reaching()),
        ):
            assert found == [replace(on(("10.0.0.2", 7471)), device="stub0", port_num=2)]

    def test_foreign_address_has_no_device(self) -> None:
        found = getaddrinfo("10.0.0.9", 7471, flags=PASSIVE, provider=Reaching())
        assert found == [on(("10.0.0.9", 7471))]

    def test_wildcard_has_no_device(self) -> None:
        found = getaddrinfo(None, 7471, flags=PASSIVE, family=AF_INET, provider=NotToBeAsked())
        assert found == [on(("0.0.0.0", 7471))]

    def test_noroute_leaves_out_the_device(self) -> None:
        found = getaddrinfo("10.0.0.2", 7471, flags=PASSIVE | NOROUTE, provider=NotToBeAsked())
        assert found == [on(("10.0.0.2", 7471))]


class TestHintsAlone:
    def test_infiniband_destination(self) -> None:
        target = SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES)
        (info,) = getaddrinfo(dst_addr=target, port_space=IB, provider=Nowhere())
        assert info == to(target, RC, IB)

    def test_source_alone(self) -> None:
        (info,) = getaddrinfo(src_addr=("10.0.0.2", 5), provider=Nowhere())
        assert info == AddrInfo(RaiFlag(0), AF_INET, RC, TCP, ("10.0.0.2", 5))

    def test_route_alone_gives_both_addresses(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), pkey=0x8001, flow_label=0x12345)
        (info,) = getaddrinfo(route=path.pack(), provider=Nowhere())
        assert (info.family, info.qp_type, info.port_space) == (AF_IB, RC, IB)
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x13F0000, SPACE_ONLY, 0x8001)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x13F0000, SPACE_ONLY, 0x8001, 0x12345)
        assert info.route == (PathData(path),)
        assert (info.src_len, info.dst_len, info.route_len) == (48, 48, 72)

    def test_route_takes_the_service_of_the_destination(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), service_id=0x1061D2F)
        (info,) = getaddrinfo(route=[PathData(path)], port_space=TCP, provider=Nowhere())
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x1060000, SPACE_ONLY)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x1061D2F, ALL_ONES)

    def test_passive_route_gives_the_source(self) -> None:
        (info,) = getaddrinfo(flags=PASSIVE, route=PATH.pack(), provider=Nowhere())
        assert (info.flags, info.dst_addr) == (PASSIVE, None)
        assert info.src_addr == SockAddrIB(PATH.sgid, 0x13F0000, SPACE_ONLY)

    def test_destination_hint_beside_a_service_is_ignored(self) -> None:
        (info,) = getaddrinfo(flags=PASSIVE, route=PATH.pack(), dst_addr=("10.0.0.1", 7471), provider=Nowhere())
        assert info.dst_addr is None
        assert info.src_addr == SockAddrIB(PATH.sgid, 0x13F0000, SPACE_ONLY)

    def test_destination_alone_is_not_passive(self) -> None:
        assert fails(flags=PASSIVE, dst_addr=("10.0.0.1", 7471)).errno == EAI.NONAME

    def test_address_of_another_family(self) -> None:
        error = fails(family=AF_INET6, dst_addr=("10.0.0.1", 7471))
        assert error.errno == EAI.ADDRFAMILY
        assert "10.0.0.1:7471" in str(error)

    def test_name_instead_of_an_address(self) -> None:
        for hints in (h(dst=("name.test", 1)), h(src=("name.test", 1), dst=("10.0.0.1", 1))):
            error = fails(hints=hints)
            assert error.errno == EAI.NONAME
            assert "name.test" in str(error)


# -- hints ----------------------------------------------------------------------------------------------


class TestMakeHints:
    def test_no_arguments_are_no_hints(self) -> None:
        assert make_hints() is None

    def test_hints_are_not_modified(self) -> None:
        hints = h(PASSIVE)
        assert make_hints(hints) is hints

    def test_keywords_become_hints(self) -> None:
        made = make_hints(
            flags=PASSIVE,
            family=AF_INET,
            qp_type=UD,
            port_space=IB,
            src_addr=("10.0.0.2", 1),
            dst_addr=("10.0.0.1", 2),
        )
        assert made == AddrInfo(PASSIVE, AF_INET, UD, IB, ("10.0.0.2", 1), ("10.0.0.1", 2))

    def test_keywords_override_hints(self) -> None:
        hints = AddrInfo(PASSIVE, AF_INET, UD, UDP, ("10.0.0.2", 1), ("10.0.0.1", 2), route=(PathData(PATH),))
        assert make_hints(hints, flags=0) == replace(hints, flags=0)
        assert make_hints(hints, family=AF_INET6) == replace(hints, family=AF_INET6)
        assert make_hints(hints, qp_type=0, port_space=0) == replace(hints, qp_type=0, port_space=0)
        assert make_hints(hints, src_addr=("::1", 3)) == replace(hints, src_addr=("::1", 3))
        assert make_hints(hints, dst_addr=("::1", 3)) == replace(hints, dst_addr=("::1", 3))
        assert make_hints(hints, route=()) == replace(hints, route=())
        assert hints.flags == PASSIVE

    def test_keywords_override_hints_of_a_lookup(self) -> None:
        found = getaddrinfo("10.0.0.1", 7471, h(PASSIVE, ps=TCP), flags=0, port_space=UDP, provider=Nowhere())
        assert found == [to(("10.0.0.1", 7471), UD, UDP)]

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_route_of_one_record(self, kind: Callable[[bytes], bytes]) -> None:
        made = make_hints(route=kind(PATH.pack()))
        assert made is not None
        assert made.route == (PathData(PATH),)

    @for_each("kind", [bytes, bytearray, memoryview])
    @for_each("count", [1, 2, 5])
    def test_route_of_several_records(self, count: int, kind: Callable[[bytes], bytes]) -> None:
        route = tuple(PathData(PATH.replace(dlid=each), PathFlag.OUTBOUND) for each in range(count))
        made = make_hints(route=kind(b"".join(each.pack() for each in route)))
        assert made is not None
        assert made.route == route
        assert made.route_len == 72 * count

    def test_route_of_path_data_objects(self) -> None:
        made = make_hints(route=[PathData(PATH), PathData(OTHER_PATH)])
        assert made is not None
        assert made.route == (PathData(PATH), PathData(OTHER_PATH))

    @for_each("count", [2, 3, 8, 10])
    def test_route_of_several_plain_records(self, count: int) -> None:
        records = tuple(PATH.replace(dlid=each) for each in range(count))
        made = make_hints(route=b"".join(record.pack() for record in records))
        assert made is not None
        assert made.route == tuple(map(PathData, records))
        assert made.route_len == 72 * count

    def test_ambiguous_length_is_of_path_data(self) -> None:
        route = (PathData(PATH, PathFlag.OUTBOUND),) * 8
        made = make_hints(route=b"".join(path.pack() for path in route))
        assert made is not None
        assert made.route == route

    def test_route_in_any_buffer(self) -> None:
        words = array("I", PathData(PATH).pack())
        made = make_hints(route=words)  # type: ignore[arg-type]
        assert made is not None
        assert made.route == (PathData(PATH),)

    @for_each("route", [PATH.pack(), PathData(PATH).pack(), bytearray(PathData(PATH).pack()), [PathData(PATH)]])
    def test_route_of_an_address(self, route: Any) -> None:
        info = AddrInfo(route=route)
        assert (info.route, info.route_len) == ((PathData(PATH),), 72)
        assert replace(AddrInfo(), route=route) == info
        assert hash(info) == hash(AddrInfo(route=(PathData(PATH),)))

    def test_no_route(self) -> None:
        none: Any = None
        assert (AddrInfo(route=none).route, AddrInfo(route=none).route_len) == ((), 0)

    @for_each("size", [0, 1, 63, 65, 71, 73, 127, 143])
    def test_route_of_invalid_length(self, size: int) -> None:
        data: Any = bytes(size)
        for use in (
            lambda: make_hints(route=data),
            lambda: getaddrinfo("10.0.0.1", 7471, route=data, provider=Nowhere()),
            lambda: AddrInfo(route=data),
        ):
            with pytest.raises(RdmaError, match=f"a route cannot be {size} bytes") as caught:
                use()
            assert caught.value.errno == errno.EINVAL

    @for_each("route", ["text", 7, 1.5, [PATH], [PathData(PATH), None], object()])
    def test_route_of_an_invalid_type(self, route: Any) -> None:
        for use in (lambda: make_hints(route=route), lambda: AddrInfo(route=route)):
            with pytest.raises(RdmaError, match="a route cannot be of type") as caught:
                use()
            assert caught.value.errno == errno.EINVAL


# -- whatever comes -------------------------------------------------------------------------------------

_texts = st.one_of(
    st.none(),
    st.text(max_size=70),
    st.text("0123456789.:%-+ abcdefx*\0", max_size=20),
    st.ip_addresses().map(str),
    st.integers().map(str),
    st.integers(0, 65535).map(str),
)
_sockaddrs: st.SearchStrategy[SockAddr | None] = st.one_of(
    st.none(),
    st.tuples(st.ip_addresses().map(str), st.integers(0, 65535)),
    st.tuples(st.text(max_size=20), st.integers(0, 65535)),
    st.builds(SockAddrIB, st.binary(min_size=16, max_size=16).map(Gid), st.integers(0, ALL_ONES)),
)
_flags = st.integers(0, 0x3F).map(lambda flags: flags & ~SA)
_types = st.sampled_from([(0, 0), (0, TCP), (0, UDP), (RC, 0), (UD, 0), (RC, IB), (UD, IB), (UC, TCP)])
_families = st.sampled_from([0, 0, 0, int(AF_INET), int(AF_INET6), AF_IB])
_likely_hints = st.builds(
    lambda flags, family, types, src, dst: AddrInfo(flags, family, types[0], types[1], src, dst),
    _flags,
    _families,
    _types,
    _sockaddrs,
    _sockaddrs,
)
_any_hints = st.builds(
    AddrInfo, st.integers(), st.integers(0, 30), st.integers(0, 11), st.integers(), _sockaddrs, _sockaddrs
)
_hints = st.one_of(_likely_hints, _likely_hints, _any_hints)
_NASTY = ["a\nb", "a\rb", "a\u2028b", "a\x85b", "\ud800", "a\x1b[2J"]


def _structures(count: int) -> st.SearchStrategy[bytes]:
    """The bytes of so many path records or ``ibv_path_data``, with arbitrary fields."""
    return st.sampled_from([64, 72]).flatmap(lambda size: st.binary(min_size=size * count, max_size=size * count))


def _sound(found: list[AddrInfo] | RdmaError) -> None:
    """Answers anybody can use, or an error with a number."""
    if isinstance(found, RdmaError):
        assert found.errno
        return
    assert found
    for info in found:
        ends = [each for each in (info.src_addr, info.dst_addr) if each is not None]
        assert ends
        assert info.qp_type in list(QPType)
        assert info.port_space in list(PortSpace)
        assert info.family in (AF_INET, AF_INET6, AF_IB)
        end = info.src_addr if info.flags & PASSIVE else info.dst_addr or info.src_addr
        assert end is not None
        parsed = parse_address(end)
        assert info.family == (AF_IB if isinstance(parsed, SockAddrIB) else parsed.family)
        assert 0 <= parsed.port <= 65535


def _outcome(*args: Any, **kwargs: Any) -> list[AddrInfo] | RdmaError:
    """The answers of a lookup, or its error, which is one of ours."""
    try:
        return getaddrinfo(*args, **kwargs)
    except RdmaError as error:
        return error


class TestArbitraryArguments:
    @settings(max_examples=300)
    @given(
        route=st.one_of(st.binary(max_size=300), st.integers(1, 4).flatmap(_structures)),
        hints=_likely_hints,
        node=st.sampled_from([None, "10.0.0.1"]),
    )
    def test_arbitrary_routes_give_an_answer_or_a_library_error(
        self, route: bytes, hints: AddrInfo, node: str | None
    ) -> None:
        _sound(_outcome(node, None, hints, route=route, provider=Reaching(), resolver=no_such_name()))

    @settings(max_examples=300)
    @given(node=_texts, service=st.one_of(_texts, st.integers()), hints=st.one_of(st.none(), _hints))
    def test_arbitrary_arguments_give_an_answer_or_a_library_error(
        self, node: str | None, service: str | int | None, hints: AddrInfo | None
    ) -> None:
        _sound(_outcome(node, service, hints, provider=Reaching(), resolver=no_such_name()))

    @settings(max_examples=300)
    @given(hints=_hints)
    def test_arbitrary_hints_give_an_answer_or_a_library_error(self, hints: AddrInfo) -> None:
        _sound(_outcome(None, None, hints, provider=Reaching(), resolver=no_such_name()))

    @glibc_only
    @settings(max_examples=300, deadline=None)
    @given(node=_texts, service=_texts, flags=_flags, hints=_hints)
    def test_arbitrary_numeric_hosts_give_an_answer_or_a_library_error(
        self, node: str | None, service: str | None, flags: int, hints: AddrInfo
    ) -> None:
        """The same with the resolver of the system, which NUMERICHOST keeps from asking anybody."""
        _sound(_outcome(node, service, hints, flags=flags | NUMERICHOST, provider=Nowhere()))

    @given(
        node=st.one_of(st.text(max_size=40), st.sampled_from(_NASTY)),
        service=st.one_of(st.none(), st.text(max_size=40), st.sampled_from(_NASTY)),
    )
    def test_errors_are_one_printable_line(self, node: str, service: str | None) -> None:
        resolver = no_such_name()
        text = str(_outcome(node, service, flags=NOROUTE, resolver=resolver))
        assert text.splitlines() == [text]
        assert text.isprintable()
