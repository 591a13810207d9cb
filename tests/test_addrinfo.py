"""rdmacm.getaddrinfo: routes and devices of the host, hints, and arbitrary arguments."""

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
from support.examples import MANY_EXAMPLES
from support.lookups import (
    ALL_ONES,
    FAMILY,
    IB,
    IPOIB,
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
    usual_services,
)
from support.rows import for_each

# -- routes and devices of the host ---------------------------------------------------------------------------------


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

    def test_route_hint_restricts(self) -> None:
        like = PATH.replace(mtu=2)
        (info,) = getaddrinfo("10.0.0.1", 7471, route=[PathData(like)], provider=Reaching())
        assert (info.route, info.device) == ((PathData(like),), "stub0")
        assert fails("10.0.0.1", 7471, route=[PathData(OTHER_PATH)], provider=Reaching()).errno == EAI.NODATA

    def test_route_hint_is_no_route(self) -> None:
        for flags in (0, NOROUTE):
            (info,) = getaddrinfo("10.0.0.1", 7471, flags=flags, route=OTHER_PATH.pack(), provider=Nowhere())
            assert info.route == ()

    def test_destination_hint_alone_gets_source_and_route(self) -> None:
        (info,) = getaddrinfo(dst_addr=("10.0.0.1", 7471), provider=Reaching())
        assert (info.src_addr, info.dst_addr) == (("10.0.0.2", 0), ("10.0.0.1", 7471))
        assert (info.device, info.port_num, info.gid_index) == ("stub0", 1, 3)
        assert info.route == (PathData(PATH),)

    def test_destination_hint_alone_with_noroute_has_no_route(self) -> None:
        found = getaddrinfo(dst_addr=("10.0.0.1", 7471), flags=NOROUTE, provider=NotToBeAsked())
        assert found == [to(("10.0.0.1", 7471))]

    def test_hints_alone_keep_source_and_restriction(self) -> None:
        like = PATH.replace(mtu=2)
        (info,) = getaddrinfo(
            src_addr=("10.0.0.3", 5),
            dst_addr=("10.0.0.1", 7471),
            route=[PathData(like)],
            provider=Reaching(),
        )
        assert (info.src_addr, info.route, info.device) == (("10.0.0.3", 5), (PathData(like),), "stub0")

    def test_gid_destinations_are_not_routed_by_ip(self) -> None:
        provider = Nowhere()
        (info,) = getaddrinfo("fe80::1", 1, h(FAMILY, AF_IB, ps=IB), provider=provider)
        assert (info.dst_addr, info.device) == (SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES), None)
        assert provider.asked == []

    def test_noroute_with_a_gid_asks_for_no_route(self) -> None:
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
    def test_infiniband_destination_alone_is_completed(self) -> None:
        target = SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES)
        (info,) = getaddrinfo(dst_addr=target, port_space=IB, provider=Nowhere())
        assert info == to(target, RC, IB)

    @for_each(
        ("sid", "expected"),
        [
            (0x01061D2F, (RC, TCP)),
            (0x01111D2F, (UD, UDP)),
            (0x013F1D2F, (RC, IB)),
            (0x00021D2F, (UD, PortSpace.IPOIB)),
            (0x1234567890, (RC, IB)),
            (0, (RC, TCP)),
        ],
    )
    def test_port_space_of_an_infiniband_address(self, sid: int, expected: tuple[int, int]) -> None:
        target = SockAddrIB(Gid("fe80::1"), sid, ALL_ONES)
        for fields in ({"dst_addr": target}, {"src_addr": target, "flags": PASSIVE}):
            (info,) = getaddrinfo(provider=Nowhere(), **fields)
            assert (info.qp_type, info.port_space) == expected
        (info,) = getaddrinfo(dst_addr=target, port_space=UDP, provider=Nowhere())
        assert (info.qp_type, info.port_space) == (UD, UDP), "as hinted"

    def test_port_space_of_an_address_that_does_not_go_with_the_qp_type_raises(self) -> None:
        target = SockAddrIB(Gid("fe80::1"), 0x01061D2F, ALL_ONES)
        assert fails(dst_addr=target, qp_type=UD).errno == EAI.QPTYPE

    def test_source_alone_is_completed(self) -> None:
        (info,) = getaddrinfo(src_addr=("10.0.0.2", 5), provider=Nowhere())
        assert info == AddrInfo(RaiFlag(0), AF_INET, RC, TCP, ("10.0.0.2", 5))

    def test_route_alone_gives_both_addresses(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), pkey=0x8001, flow_label=0x12345)
        (info,) = getaddrinfo(route=path.pack(), provider=Nowhere())
        assert (info.family, info.qp_type, info.port_space) == (AF_IB, RC, IB)
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x13F0000, SPACE_ONLY, 0x8001)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x13F0000, SPACE_ONLY, 0x8001, 0x12345)
        assert (info.src_len, info.dst_len, info.route_len) == (48, 48, 0)

    def test_route_takes_the_service_of_the_destination(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), service_id=0x1061D2F)
        (info,) = getaddrinfo(route=[PathData(path)], port_space=TCP, provider=Nowhere())
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x1060000, SPACE_ONLY)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x1061D2F, ALL_ONES)

    def test_passive_route_gives_the_source(self) -> None:
        (info,) = getaddrinfo(flags=PASSIVE, route=PATH.pack(), provider=Nowhere())
        assert (info.flags, info.dst_addr) == (PASSIVE, None)
        assert info.src_addr == SockAddrIB(PATH.sgid, 0x13F0000, SPACE_ONLY)

    def test_passive_route_ignores_the_destination(self) -> None:
        (info,) = getaddrinfo(flags=PASSIVE, route=PATH.pack(), dst_addr=("10.0.0.1", 7471), provider=Nowhere())
        assert info.dst_addr is None
        assert info.src_addr == SockAddrIB(PATH.sgid, 0x13F0000, SPACE_ONLY)

    def test_passive_lookup_with_a_destination_alone_raises(self) -> None:
        assert fails(flags=PASSIVE, dst_addr=("10.0.0.1", 7471)).errno == EAI.NONAME

    def test_name_instead_of_an_address_raises(self) -> None:
        for hints in (h(dst=("name.test", 1)), h(src=("name.test", 1), dst=("10.0.0.1", 1))):
            error = fails(hints=hints)
            assert error.errno == EAI.NONAME
            assert "name.test" in str(error)


class TestServiceAlone:
    """A service without a node belongs to the addresses of the hints."""

    def test_destination(self) -> None:
        for service in (7471, "7471"):
            (info,) = getaddrinfo(None, service, dst_addr=("10.0.0.2", 0), provider=Nowhere())
            assert info == to(("10.0.0.2", 7471))

    def test_destination_with_its_route(self) -> None:
        (info,) = getaddrinfo(None, 7471, dst_addr=("10.0.0.1", 0), provider=Reaching())
        assert (info.src_addr, info.dst_addr) == (("10.0.0.2", 0), ("10.0.0.1", 7471))
        assert (info.device, info.route) == ("stub0", (PathData(PATH),))

    def test_service_replaces_the_port(self) -> None:
        (info,) = getaddrinfo(None, 7471, dst_addr=("fd00::1%7", 5), provider=Nowhere())
        assert info.dst_addr == ("fd00::1", 7471, 0, 7)

    def test_source_keeps_its_port(self) -> None:
        (info,) = getaddrinfo(None, 7471, src_addr=("10.0.0.3", 5), dst_addr=("10.0.0.1", 6), provider=Nowhere())
        assert info == to(("10.0.0.1", 7471), src=("10.0.0.3", 5))

    @glibc_only
    @for_each(("source", "loopback"), [("10.0.0.3", ("127.0.0.1", 7471)), ("fd00::3", ("::1", 7471, 0, 0))])
    def test_source_alone_selects_the_loopback_address(self, source: str, loopback: SockAddr) -> None:
        (info,) = getaddrinfo(None, 7471, src_addr=(source, 5), provider=Nowhere())
        assert (info.src_addr, info.dst_addr) == ((source, 5), loopback)

    def test_passive_source(self) -> None:
        found = getaddrinfo(None, 7471, flags=PASSIVE, src_addr=("10.0.0.2", 5), provider=Reaching())
        assert found == [replace(on(("10.0.0.2", 7471)), device="stub0", port_num=2)]
        found = getaddrinfo(None, 7471, flags=PASSIVE, src_addr=("::", 0), provider=Nowhere())
        assert found == [on(("::", 7471, 0, 0))]

    @glibc_only
    def test_passive_destination_is_ignored(self) -> None:
        found = getaddrinfo(None, 7471, flags=PASSIVE, family=AF_INET, dst_addr=("fd00::1", 5), provider=Nowhere())
        assert found == [on(("0.0.0.0", 7471))]

    @for_each(
        ("qp", "ps", "types"),
        [(0, 0, (RC, TCP)), (UD, 0, (UD, UDP)), (0, UDP, (UD, UDP)), (RC, IB, (RC, IB)), (0, IPOIB, (UD, IPOIB))],
    )
    def test_types(self, qp: int, ps: int, types: tuple[int, int]) -> None:
        (info,) = getaddrinfo(None, 7471, qp_type=qp, port_space=ps, dst_addr=("10.0.0.2", 0), provider=Nowhere())
        assert info == to(("10.0.0.2", 7471), *types)

    @glibc_only
    def test_service_name(self) -> None:
        if (reason := usual_services()) is not None:
            pytest.skip(reason)
        for hints, address in (
            (h(dst=("fd00::1", 5)), ("fd00::1", 69, 0, 0)),
            (h(dst=("10.0.0.2", 0)), ("10.0.0.2", 69)),
        ):
            (info,) = getaddrinfo(None, "tftp", hints, provider=Nowhere())
            assert info == to(address, UD, UDP)
        (info,) = getaddrinfo(None, "http", flags=PASSIVE, src_addr=("10.0.0.2", 0), provider=Nowhere())
        assert info == on(("10.0.0.2", 80))
        assert fails(None, "tftp", port_space=TCP, dst_addr=("10.0.0.2", 0)).errno == EAI.SERVICE

    def test_unknown_service(self) -> None:
        for service, code in (("no-such-service", EAI.NONAME), ("*", EAI.NONAME), ("70000", EAI.SERVICE)):
            assert fails(None, service, dst_addr=("10.0.0.2", 0)).errno == code
            assert fails(None, service, flags=PASSIVE, src_addr=("10.0.0.2", 0)).errno == code

    def test_infiniband_destination(self) -> None:
        target = SockAddrIB(Gid("fe80::1"), pkey=0x8001, flowinfo=5, scope_id=2)
        (info,) = getaddrinfo(None, 7471, dst_addr=target, port_space=TCP, provider=Nowhere())
        assert info == to(replace(target, sid=0x1061D2F, sid_mask=ALL_ONES), RC, TCP)

    def test_passive_infiniband_source(self) -> None:
        source = SockAddrIB(Gid("fe80::1"))
        (info,) = getaddrinfo(None, 7471, flags=PASSIVE, src_addr=source, port_space=IB, provider=Nowhere())
        assert info == on(SockAddrIB(Gid("fe80::1"), 0x13F1D2F, ALL_ONES), RC, IB)

    def test_route(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), service_id=9)
        (info,) = getaddrinfo(None, 7471, route=[PathData(path)], provider=Nowhere())
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x13F0000, SPACE_ONLY)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x13F1D2F, ALL_ONES)
        assert (info.family, info.qp_type, info.port_space) == (AF_IB, RC, IB)

    def test_passive_route(self) -> None:
        (info,) = getaddrinfo(None, 7471, flags=PASSIVE, route=PATH.pack(), provider=Nowhere())
        assert (info.src_addr, info.dst_addr) == (SockAddrIB(PATH.sgid, 0x13F1D2F, ALL_ONES), None)

    @glibc_only
    def test_node_takes_precedence(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, dst_addr=("10.0.0.2", 5), provider=Nowhere())
        assert info == to(("10.0.0.1", 7471))
        (info,) = getaddrinfo("10.0.0.1", 7471, flags=PASSIVE, src_addr=("10.0.0.2", 5), provider=Nowhere())
        assert info == on(("10.0.0.1", 7471))

    def test_name_instead_of_an_address(self) -> None:
        for error in (fails(None, 1, dst_addr=("name.test", 1)), fails(None, 1, flags=PASSIVE, src_addr=("a.test", 1))):
            assert error.errno == EAI.NONAME


_IPV4, _IPV6, _GID = ("10.0.0.1", 7471), ("fd00::1", 7471), SockAddrIB(Gid("fe80::1"))


@glibc_only
class TestFamilies:
    """Families that do not go together are EAI_ADDRFAMILY."""

    @for_each(
        "hints",
        [
            h(src=_IPV6, dst=_IPV4),
            h(src=_IPV4, dst=_IPV6),
            h(src=_GID, dst=_IPV4),
            h(src=_IPV4, dst=_GID),
            h(family=AF_INET6, dst=_IPV4),
            h(family=AF_INET, dst=_IPV6),
            h(family=AF_INET, dst=_GID),
            h(family=AF_IB, dst=_IPV4),
            h(family=AF_INET6, src=_IPV4),
            h(family=AF_IB, src=_IPV6),
            h(family=AF_INET6, src=_IPV6, dst=_IPV4),
            h(family=AF_INET6, src=_IPV4, dst=_IPV6),
            h(PASSIVE, AF_INET6, src=_IPV4),
            h(PASSIVE, AF_IB, src=_IPV4),
        ],
    )
    @for_each(("node", "service"), [(None, None), (None, "7471"), (None, "http"), ("10.0.0.1", "7471"), ("fd00::1", 1)])
    def test_hints(self, hints: AddrInfo, node: str | None, service: str | None) -> None:
        for flags in (0, NOROUTE, NUMERICHOST, FAMILY):
            error = fails(node, service, hints, flags=hints.flags | flags, provider=Reaching())
            assert error.errno == EAI.ADDRFAMILY
            assert "the hints' " in str(error)
            assert error.hint

    @for_each(
        ("node", "hints"),
        [
            ("10.0.0.1", h(src=_IPV6)),
            ("fd00::1", h(src=_IPV4)),
            ("10.0.0.1", h(src=_GID)),
            ("fd00::1", h(src=_GID)),
            ("fd00::1", h(family=AF_IB, src=_GID)),
            ("10.0.0.1", h(FAMILY, AF_IB)),
            ("10.0.0.1", h(FAMILY, AF_IB, src=_GID)),
            ("10.0.0.1", h(FAMILY, AF_INET6)),
            ("10.0.0.1", h(PASSIVE, src=_IPV6)),
            ("fd00::1", h(PASSIVE, src=_IPV4)),
            ("10.0.0.1", h(PASSIVE, src=_GID)),
        ],
    )
    def test_node(self, node: str, hints: AddrInfo) -> None:
        for flags in (0, NOROUTE, NUMERICHOST):
            error = fails(node, 7471, hints, flags=hints.flags | flags, provider=Reaching())
            assert error.errno == EAI.ADDRFAMILY
            assert node in str(error)
            assert error.hint

    def test_service_alone_with_an_infiniband_source(self) -> None:
        assert fails(None, 7471, src_addr=_GID).errno == EAI.ADDRFAMILY

    def test_route(self) -> None:
        for service in (None, 7471):
            error = fails(None, service, family=AF_INET, route=PATH.pack())
            assert error.errno == EAI.ADDRFAMILY

    def test_infiniband_node(self) -> None:
        (info,) = getaddrinfo("fe80::2", 7471, h(FAMILY, AF_IB, src=_GID), provider=Nowhere())
        assert (info.src_addr, info.family) == (_GID, AF_IB)

    def test_source_selects_the_addresses_of_a_name(self) -> None:
        asked = []

        def resolver(node: Any, service: Any, family: int, *rest: Any) -> Any:
            asked.append(family)
            return [stream("fd00::1", 7471, 0, 0), stream("10.0.0.1", 7471)]

        (info,) = getaddrinfo("name.test", 7471, src_addr=("10.0.0.3", 0), provider=Nowhere(), resolver=resolver)
        assert (asked, info.dst_addr) == ([AF_INET], ("10.0.0.1", 7471))


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
    def test_route_may_be_the_bytes_of_one_record(self, kind: Callable[[bytes], bytes]) -> None:
        made = make_hints(route=kind(PATH.pack()))
        assert made is not None
        assert made.route == (PathData(PATH),)

    @for_each("kind", [bytes, bytearray, memoryview])
    @for_each("count", [1, 2, 5])
    def test_route_may_be_the_bytes_of_several_records(self, count: int, kind: Callable[[bytes], bytes]) -> None:
        route = tuple(PathData(PATH.replace(dlid=each), PathFlag.OUTBOUND) for each in range(count))
        made = make_hints(route=kind(b"".join(each.pack() for each in route)))
        assert made is not None
        assert made.route == route
        assert made.route_len == 72 * count

    def test_route_may_be_path_data_objects(self) -> None:
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
        uses: list[Callable[[], object]] = [
            lambda: make_hints(route=data),
            lambda: getaddrinfo("10.0.0.1", 7471, route=data, provider=Nowhere()),
            lambda: AddrInfo(route=data),
        ]
        for use in uses:
            with pytest.raises(RdmaError, match=f"a route cannot be {size} bytes") as caught:
                use()
            assert caught.value.errno == errno.EINVAL

    @for_each("route", ["text", 7, 1.5, [PATH], [PathData(PATH), None], object()])
    def test_route_of_an_invalid_type(self, route: Any) -> None:
        uses: list[Callable[[], object]] = [lambda: make_hints(route=route), lambda: AddrInfo(route=route)]
        for use in uses:
            with pytest.raises(RdmaError, match="a route cannot be of type") as caught:
                use()
            assert caught.value.errno == errno.EINVAL


# -- arbitrary arguments -------------------------------------------------------------------------------------

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


def _check(found: list[AddrInfo] | RdmaError) -> None:
    """Assert that each answer has a family, types and an address, or that the error has a number."""
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
    """The answers of a lookup, or its RdmaError."""
    try:
        return getaddrinfo(*args, **kwargs)
    except RdmaError as error:
        return error


class TestArbitraryArguments:
    @settings(max_examples=MANY_EXAMPLES)
    @given(
        route=st.one_of(st.binary(max_size=300), st.integers(1, 4).flatmap(_structures)),
        hints=_likely_hints,
        node=st.sampled_from([None, "10.0.0.1"]),
    )
    def test_arbitrary_routes_give_an_answer_or_a_library_error(
        self, route: bytes, hints: AddrInfo, node: str | None
    ) -> None:
        _check(_outcome(node, None, hints, route=route, provider=Reaching(), resolver=no_such_name()))

    @settings(max_examples=MANY_EXAMPLES)
    @given(node=_texts, service=st.one_of(_texts, st.integers()), hints=st.one_of(st.none(), _hints))
    def test_arbitrary_arguments_give_an_answer_or_a_library_error(
        self, node: str | None, service: str | int | None, hints: AddrInfo | None
    ) -> None:
        _check(_outcome(node, service, hints, provider=Reaching(), resolver=no_such_name()))

    @settings(max_examples=MANY_EXAMPLES)
    @given(hints=_hints)
    def test_arbitrary_hints_give_an_answer_or_a_library_error(self, hints: AddrInfo) -> None:
        _check(_outcome(None, None, hints, provider=Reaching(), resolver=no_such_name()))

    @glibc_only
    @settings(max_examples=MANY_EXAMPLES)
    @given(node=_texts, service=_texts, flags=_flags, hints=_hints)
    def test_arbitrary_numeric_hosts_give_an_answer_or_a_library_error(
        self, node: str | None, service: str | None, flags: int, hints: AddrInfo
    ) -> None:
        """The same with the system's resolver, which sends no query with NUMERICHOST."""
        _check(_outcome(node, service, hints, flags=flags | NUMERICHOST, provider=Nowhere()))

    @given(
        node=st.one_of(st.text(max_size=40), st.sampled_from(_NASTY)),
        service=st.one_of(st.none(), st.text(max_size=40), st.sampled_from(_NASTY)),
    )
    def test_errors_are_one_printable_line(self, node: str, service: str | None) -> None:
        resolver = no_such_name()
        text = str(_outcome(node, service, flags=NOROUTE, resolver=resolver))
        assert text.splitlines() == [text]
        assert text.isprintable()
