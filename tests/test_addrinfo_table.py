"""rdmacm.getaddrinfo: the table of cases, and lengths as in C."""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_DGRAM

import pytest

from rdmacm.address import AF_IB
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.constants import EAI
from rdmacm.errors import GaiError, RdmaError
from rdmacm.proto.sa import PathData
from support.lookups import (
    DNS,
    FAMILY,
    IB,
    IPOIB,
    NOROUTE,
    NUMERICHOST,
    OTHER_PATH,
    PASSIVE,
    PATH,
    RAW_PACKET,
    RC,
    SA,
    SPACE_ONLY,
    TCP,
    UC,
    UD,
    UDP,
    XRC_RECV,
    XRC_SEND,
    NotToBeAsked,
    Nowhere,
    Resolver,
    glibc_only,
    h,
    ib,
    lo,
    no_such_name,
    on,
    to,
    usual_services,
)
from support.netns import needs_netns, two_hosts
from support.rows import for_each


def _usable_ipv6() -> str | None:
    try:
        with socket.socket(AF_INET6, SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"IPv6 is off: {error}"
    return None


def _ipv6_beyond_loopback() -> str | None:
    # Without hints getaddrinfo(3) omits families of which the host has only the loopback address.
    table = Path("/proc/net/if_inet6")
    lines = table.read_text().splitlines() if table.exists() else []
    if all(line.split()[-1] == "lo" for line in lines):
        return "no IPv6 address but that of loopback"
    return _usable_ipv6()


@dataclass(frozen=True)
class Case:
    """A row: the arguments, and the expected answers, EAI code or errno.

    If the C library's answer differs, ``c`` describes it, and ``page`` says what the manual page requires.
    ``named``: the answers have a canonical name.  ``needs`` returns the reason why the row cannot run here, or
    None.  ``resolver`` replaces the system's resolver.
    """

    node: str | None
    service: str | None
    hints: AddrInfo | None
    want: tuple[AddrInfo, ...] | EAI | int
    c: str | None = None
    page: str | None = None
    named: bool = False
    needs: Callable[[], str | None] | None = None
    resolver: Callable[[], Resolver] | None = None


_NOTHING = "With node and service NULL and no address or route in the hints, the error is EAI_NONAME."
_COMPLETE = "The result has what is needed to communicate: family, QP type and port space are filled in."
_LIST = "The result is a list: every address of the node or the local host is in it, the best first."
_FLAGS = "Flags in the hints that are not valid are EAI_BADFLAGS."
_QPTYPE = "A QP type or port space that cannot be served is EAI_QPTYPE."
_AF_IB = "ai_family is the address family of the answers; only with RAI_FAMILY does it say how the node is read."
_PORT = "A service that is not available is EAI_SERVICE, and no service has a port above 65535."
_UNKNOWN = "A service that is not known is EAI_NONAME; EAI_SERVICE is for one of another QP type."

CASES: dict[int, Case] = {
    # Hints alone.
    1: Case(None, None, None, EAI.NONAME, c="-1 EINVAL", page=_NOTHING),
    2: Case(None, None, h(), EAI.NONAME, c="an answer without any field", page=_NOTHING),
    3: Case(None, None, h(PASSIVE), EAI.NONAME, c="an answer with flags alone", page=_NOTHING),
    4: Case(None, None, h(NUMERICHOST | NOROUTE, qp=RC, ps=TCP), EAI.NONAME, c="the hints, echoed", page=_NOTHING),
    5: Case(
        None,
        None,
        h(family=AF_INET, dst=("10.0.0.1", 7471)),
        (to(("10.0.0.1", 7471)),),
        c="QP type 0, port space 0",
        page=_COMPLETE,
    ),
    6: Case(
        None,
        None,
        h(src=("10.0.0.2", 0), dst=("10.0.0.1", 7471)),
        (to(("10.0.0.1", 7471), src=("10.0.0.2", 0)),),
        c="family 0, QP type 0, port space 0",
        page=_COMPLETE,
    ),
    7: Case(
        None,
        None,
        h(PASSIVE, src=("10.0.0.2", 5), dst=("10.0.0.1", 6)),
        (on(("10.0.0.2", 5)),),
        c="the destination too, family 0",
        page=f"ai_dst_len is 0 if RAI_PASSIVE is set. {_COMPLETE}",
    ),
    8: Case(None, None, h(0x80000000), EAI.BADFLAGS, c="the flag, echoed", page=_FLAGS),
    # Nodes and services.
    9: Case("127.0.0.1", "7471", None, (to(("127.0.0.1", 7471)),)),
    10: Case("127.0.0.1", None, None, (to(("127.0.0.1", 0)),)),
    11: Case(
        None,
        "7471",
        None,
        (to(("::1", 7471, 0, 0)), to(("127.0.0.1", 7471))),
        c="the first",
        page=_LIST,
        needs=_ipv6_beyond_loopback,
    ),
    12: Case(
        None,
        "7471",
        h(),
        (to(("::1", 7471, 0, 0)), to(("127.0.0.1", 7471))),
        c="the first",
        page=_LIST,
        needs=_usable_ipv6,
    ),
    13: Case(
        None,
        "7471",
        h(PASSIVE),
        (on(("0.0.0.0", 7471)), on(("::", 7471, 0, 0))),
        c="the first",
        page=_LIST,
        needs=_usable_ipv6,
    ),
    14: Case(None, "7471", h(PASSIVE, AF_INET), (on(("0.0.0.0", 7471)),)),
    15: Case(None, "7471", h(PASSIVE, AF_INET6), (on(("::", 7471, 0, 0)),)),
    16: Case(None, "7471", h(PASSIVE, AF_INET6, ps=UDP), (on(("::", 7471, 0, 0), UD, UDP),)),
    # QP types and port spaces.
    17: Case("10.0.0.1", "7471", h(ps=TCP), (to(("10.0.0.1", 7471)),)),
    18: Case("10.0.0.1", "7471", h(ps=UDP), (to(("10.0.0.1", 7471), UD, UDP),)),
    19: Case("10.0.0.1", "7471", h(ps=IPOIB), (to(("10.0.0.1", 7471), UD, IPOIB),)),
    20: Case("10.0.0.1", "7471", h(ps=IB), (to(("10.0.0.1", 7471), RC, IB),)),
    21: Case("10.0.0.1", "7471", h(qp=RC), (to(("10.0.0.1", 7471)),)),
    22: Case("10.0.0.1", "7471", h(qp=UD), (to(("10.0.0.1", 7471), UD, UDP),)),
    23: Case("10.0.0.1", "7471", h(qp=UC), (to(("10.0.0.1", 7471), UC, TCP),)),
    24: Case("10.0.0.1", "7471", h(qp=RAW_PACKET), (to(("10.0.0.1", 7471), RAW_PACKET, TCP),)),
    25: Case("10.0.0.1", "7471", h(qp=77), EAI.QPTYPE, c="QP type 77", page=_QPTYPE),
    26: Case("10.0.0.1", "7471", h(ps=0x1234), EAI.QPTYPE, c="port space 0x1234", page=_QPTYPE),
    27: Case("10.0.0.1", "7471", h(qp=RC, ps=TCP), (to(("10.0.0.1", 7471)),)),
    28: Case("10.0.0.1", "7471", h(qp=UD, ps=UDP), (to(("10.0.0.1", 7471), UD, UDP),)),
    29: Case("10.0.0.1", "7471", h(qp=UD, ps=IB), (to(("10.0.0.1", 7471), UD, IB),)),
    30: Case("10.0.0.1", "7471", h(qp=XRC_SEND, ps=IB), (to(("10.0.0.1", 7471), XRC_SEND, IB),)),
    31: Case(
        None,
        "7471",
        h(PASSIVE, qp=XRC_RECV, ps=IB),
        (on(("0.0.0.0", 7471), XRC_RECV, IB), on(("::", 7471, 0, 0), XRC_RECV, IB)),
        c="the first",
        page=_LIST,
        needs=_usable_ipv6,
    ),
    32: Case("10.0.0.1", "7471", h(qp=UD, ps=TCP), EAI.QPTYPE),
    33: Case("10.0.0.1", "7471", h(qp=RC, ps=UDP), EAI.QPTYPE),
    34: Case("10.0.0.1", None, h(qp=RC, ps=IPOIB), EAI.QPTYPE),
    35: Case("10.0.0.1", "7471", h(qp=UC, ps=TCP), (to(("10.0.0.1", 7471), UC, TCP),)),
    36: Case("10.0.0.1", "7471", h(qp=RAW_PACKET, ps=UDP), (to(("10.0.0.1", 7471), RAW_PACKET, UDP),)),
    # Active and passive sides, and sources.
    37: Case("10.0.0.1", "7471", h(PASSIVE, ps=TCP), (on(("10.0.0.1", 7471)),)),
    38: Case("10.0.0.1", None, h(PASSIVE, ps=TCP), (on(("10.0.0.1", 0)),)),
    39: Case("10.0.0.1", "7471", h(ps=TCP, src=("10.0.0.2", 0)), (to(("10.0.0.1", 7471), src=("10.0.0.2", 0)),)),
    40: Case(
        "10.0.0.1",
        "7471",
        h(ps=TCP, src=("2001:db8::1", 0, 0, 0)),
        EAI.ADDRFAMILY,
        c="both addresses",
        page="ai_family is the address family of the source and of the destination.",
    ),
    41: Case(
        None,
        "7471",
        h(PASSIVE, AF_INET, ps=TCP, src=("10.0.0.2", 9)),
        (on(("10.0.0.2", 7471)),),
        c="0.0.0.0:7471",
        page="If node is not given, the addresses of the hints are resolved.",
    ),
    # Families.
    42: Case("::1", "7471", h(NUMERICHOST, ps=TCP), (to(("::1", 7471, 0, 0)),)),
    43: Case("::1", "7471", h(family=AF_INET, ps=TCP), EAI.ADDRFAMILY),
    44: Case("127.0.0.1", "7471", h(family=AF_INET6, ps=TCP), EAI.ADDRFAMILY),
    45: Case("127.0.0.1", "7471", h(FAMILY, AF_INET, ps=TCP), (to(("127.0.0.1", 7471)),)),
    46: Case("::ffff:10.0.0.1", "7471", h(NUMERICHOST, ps=TCP), (to(("::ffff:10.0.0.1", 7471, 0, 0)),)),
    47: Case("::ffff:10.0.0.1", "7471", h(NUMERICHOST, AF_INET, ps=TCP), (to(("10.0.0.1", 7471)),)),
    # Nodes that are names or look like names.
    48: Case("localhost", "7471", h(NUMERICHOST, ps=TCP), EAI.NONAME),
    49: Case(
        "localhost",
        "7471",
        h(family=AF_INET, ps=TCP),
        (to(("127.0.0.1", 7471)),),
        c="no canonical name",
        page="ai_dst_canonname is the canonical name of the destination.",
        named=True,
    ),
    50: Case("no.such.host.invalid", "7471", h(ps=TCP), EAI.NONAME, resolver=no_such_name),
    51: Case("no.such.host.invalid", "7471", h(NUMERICHOST, ps=TCP), EAI.NONAME),
    52: Case("", "7471", h(ps=TCP), EAI.NONAME),
    53: Case("256.1.1.1", "7471", h(NUMERICHOST), EAI.NONAME),
    54: Case("127.1", "7471", h(NUMERICHOST, ps=TCP), (to(("127.0.0.1", 7471)),)),
    55: Case("0x7f000001", "7471", h(NUMERICHOST, ps=TCP), (to(("127.0.0.1", 7471)),)),
    # Services.
    56: Case("127.0.0.1", "0", h(ps=TCP), (to(("127.0.0.1", 0)),)),
    57: Case("127.0.0.1", "", h(ps=TCP), (to(("127.0.0.1", 0)),)),
    58: Case("127.0.0.1", "65535", h(ps=TCP), (to(("127.0.0.1", 65535)),)),
    59: Case("127.0.0.1", "65536", h(ps=TCP), EAI.SERVICE, c="port 0", page=_PORT),
    60: Case("127.0.0.1", "70000", h(ps=TCP), EAI.SERVICE, c="port 4464", page=_PORT),
    61: Case("127.0.0.1", "-1", h(ps=TCP), EAI.SERVICE),
    62: Case("127.0.0.1", "abc", h(ps=TCP), EAI.NONAME, c="EAI_SERVICE", page=_UNKNOWN),
    63: Case("127.0.0.1", "0x10", h(ps=TCP), EAI.NONAME, c="EAI_SERVICE", page=_UNKNOWN),
    64: Case("127.0.0.1", "7471 ", h(ps=TCP), EAI.NONAME, c="EAI_SERVICE", page=_UNKNOWN),
    65: Case("127.0.0.1", "http", h(ps=TCP), (to(("127.0.0.1", 80)),), needs=usual_services),
    66: Case("127.0.0.1", "http", h(ps=UDP), EAI.SERVICE, needs=usual_services),
    67: Case("127.0.0.1", "tftp", h(ps=UDP), (to(("127.0.0.1", 69), UD, UDP),), needs=usual_services),
    68: Case("127.0.0.1", "tftp", h(ps=TCP), EAI.SERVICE, needs=usual_services),
    # InfiniBand addresses.
    69: Case("127.0.0.1", "7471", h(family=AF_IB, ps=TCP), EAI.ADDRFAMILY, c="ignored", page=_AF_IB),
    70: Case("fe80::2:c903:1:2", "7471", h(FAMILY | NUMERICHOST, AF_IB, ps=IB), (to(ib(0x13F1D2F), RC, IB),)),
    71: Case(
        "fe80::2:c903:1:2",
        None,
        h(FAMILY | NUMERICHOST, AF_IB, ps=IB),
        (to(ib(0x13F0000, SPACE_ONLY), RC, IB),),
    ),
    72: Case("fe80::2:c903:1:2", "7471", h(FAMILY | NUMERICHOST, AF_IB, ps=TCP), (to(ib(0x1061D2F), RC, TCP),)),
    73: Case("fe80::2:c903:1:2", "7471", h(FAMILY | NUMERICHOST, AF_IB, qp=UD), (to(ib(0x1111D2F), UD, UDP),)),
    74: Case(
        "fe80::2:c903:1:2",
        "7471",
        h(FAMILY, AF_IB, ps=IB),
        (to(ib(0x13F1D2F), RC, IB),),
        c="an IPv6 address",
        page="RAI_FAMILY alone makes ai_family say how the node is to be read.",
    ),
    75: Case(
        "fe80::2:c903:1:2",
        "7471",
        h(NUMERICHOST, AF_IB, ps=IB),
        EAI.ADDRFAMILY,
        c="an IPv6 address",
        page=_AF_IB,
    ),
    76: Case(
        "fe80::2:c903:1:2",
        "7471",
        h(PASSIVE | FAMILY | NUMERICHOST, AF_IB, ps=IB),
        (on(ib(0x13F1D2F), RC, IB),),
    ),
    77: Case(
        "10.0.0.1",
        "7471",
        h(FAMILY | NUMERICHOST, AF_IB, ps=IB),
        EAI.ADDRFAMILY,
        c="undefined",
        page="A node without an address of the family asked for is EAI_ADDRFAMILY.",
    ),
    # Scopes.
    78: Case("fe80::1%lo", "7471", h(NUMERICHOST, ps=TCP), (to(("fe80::1", 7471, 0, 1)),), needs=lo),
    79: Case("fe80::1%nodev", "7471", h(NUMERICHOST, ps=TCP), EAI.NONAME),
    # Families and flags.
    80: Case("127.0.0.1", "7471", h(family=1, ps=TCP), EAI.FAMILY),
    81: Case("127.0.0.1", "7471", h(family=99), EAI.FAMILY),
    82: Case("127.0.0.1", "7471", h(0xF000, ps=TCP), EAI.BADFLAGS, c="the flags ignored", page=_FLAGS),
    83: Case("127.0.0.1", "7471", h(NOROUTE, ps=TCP), (to(("127.0.0.1", 7471)),)),
    84: Case("127.0.0.1", "7471", h(DNS, ps=TCP), (to(("127.0.0.1", 7471)),)),
    85: Case("127.0.0.1", "7471", h(SA), errno.EOPNOTSUPP),
    86: Case(None, "svc", h(SA | DNS), errno.EOPNOTSUPP),
    87: Case(None, None, h(SA), errno.EINVAL),
    88: Case(None, "0x1234", h(SA), errno.ENOENT),
    # Addresses of a special kind.
    89: Case("224.0.0.1", "7471", h(NUMERICHOST, ps=UDP), (to(("224.0.0.1", 7471), UD, UDP),)),
    90: Case("0.0.0.0", "7471", h(NUMERICHOST, ps=TCP), (to(("0.0.0.0", 7471)),)),
    91: Case("::", "7471", h(PASSIVE | NUMERICHOST, ps=TCP), (on(("::", 7471, 0, 0)),)),
    92: Case(
        "10.0.0.1",
        "7471",
        h(),
        (to(("10.0.0.1", 7471)),),
        c="-1 ENODEV",
        page="An answer may lack source and route: their lengths are 0 if none was found.",
    ),
    93: Case(None, "abc", h(PASSIVE), EAI.NONAME, c="EAI_SERVICE", page=_UNKNOWN),
}


def check(case: Case, hints: AddrInfo | None, provider: Nowhere) -> None:
    lookup = functools.partial(
        getaddrinfo,
        case.node,
        case.service,
        hints,
        provider=provider,
        resolver=case.resolver() if case.resolver else None,
    )
    if isinstance(case.want, tuple):
        found = lookup()
        assert [bool(info.dst_canonname) for info in found] == [case.named] * len(found)
        assert [replace(info, dst_canonname=None) for info in found] == list(case.want)
    elif isinstance(case.want, EAI):
        with pytest.raises(GaiError) as caught:
            lookup()
        assert EAI(caught.value.errno or 0) is case.want
    else:
        with pytest.raises(RdmaError) as refused:
            lookup()
        assert not isinstance(refused.value, GaiError)
        assert refused.value.errno == case.want


def check_without_route(number: int) -> None:
    hints = CASES[number].hints or AddrInfo()
    check(CASES[number], replace(hints, flags=hints.flags | NOROUTE), NotToBeAsked())


#: Rows that hold on every system.
EVERYWHERE = [number for number, case in CASES.items() if case.needs is None]
#: Rows whose hints already have RAI_NOROUTE.
WITHOUT_ROUTE = [number for number, case in CASES.items() if (case.hints or AddrInfo()).flags & NOROUTE]


@glibc_only
class TestCaseTable:
    def test_table_is_complete(self) -> None:
        assert list(CASES) == list(range(1, 94))
        assert [number for number, case in CASES.items() if (case.c is None) != (case.page is None)] == []

    @for_each("number", EVERYWHERE)
    def test_row_gives_its_answer(self, number: int) -> None:
        check(CASES[number], CASES[number].hints, Nowhere())

    @for_each("number", [number for number in EVERYWHERE if number not in WITHOUT_ROUTE])
    def test_row_gives_the_same_answer_with_noroute(self, number: int) -> None:
        """The host has no routes to add; with RAI_NOROUTE it is not even asked."""
        check_without_route(number)

    @pytest.mark.parametrize("number", [number for number in CASES if number not in EVERYWHERE])
    def test_row_for_some_systems_gives_its_answer(self, number: int) -> None:
        needs = CASES[number].needs
        if needs is not None and (reason := needs()) is not None:
            pytest.skip(reason)
        check(CASES[number], CASES[number].hints, Nowhere())
        if number not in WITHOUT_ROUTE:
            check_without_route(number)

    @needs_netns
    def test_rows_for_a_host_with_ipv6_give_their_answers(self) -> None:
        with two_hosts() as net, net.a.enter():
            for case in CASES.values():
                if case.needs is _ipv6_beyond_loopback:
                    assert _ipv6_beyond_loopback() is None
                    check(case, case.hints, Nowhere())


class TestLengths:
    """``src_len`` and ``dst_len`` are those of C's structures."""

    @for_each(
        ("node", "hints", "lengths"),
        [
            ("10.0.0.1", h(), (0, 16)),
            ("fd00::1", h(), (0, 28)),
            ("fe80::1", h(FAMILY, AF_IB), (0, 48)),
            ("10.0.0.1", h(PASSIVE), (16, 0)),
            ("fd00::1", h(PASSIVE), (28, 0)),
            ("fe80::1", h(PASSIVE | FAMILY, AF_IB), (48, 0)),
            ("10.0.0.1", h(src=("10.0.0.2", 0)), (16, 16)),
            ("fd00::1", h(src=("fd00::2", 0)), (28, 28)),
        ],
    )
    def test_address_lengths_are_those_of_c(self, node: str, hints: AddrInfo, lengths: tuple[int, int]) -> None:
        (info,) = getaddrinfo(node, 7471, hints, provider=Nowhere())
        assert (info.src_len, info.dst_len) == lengths
        assert (info.route_len, info.connect_len) == (0, 0)

    def test_route_and_connect_lengths_are_in_bytes(self) -> None:
        info = AddrInfo(route=(PathData(PATH), PathData(OTHER_PATH)), connect=b"abc")
        assert (info.route_len, info.connect_len) == (144, 3)
        assert (info.src_len, info.dst_len) == (0, 0)

    def test_answers_have_enumerations(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, flags=1, port_space=0x111, provider=Nowhere())
        assert repr((info.flags, info.qp_type, info.port_space)) == repr((PASSIVE, UD, UDP))
