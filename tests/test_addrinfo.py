"""rdmacm.getaddrinfo: the table of cases, what the host adds, what a resolver may answer, and every error."""

from __future__ import annotations

import errno
import functools
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_RAW, SOCK_STREAM
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacm.address import AF_IB, Gid, InetAddr, SockAddr, SockAddrIB, parse_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo, make_hints, needs_lookup
from rdmacm.constants import EAI, PathFlag, PortSpace, RaiFlag
from rdmacm.errors import GaiError, RdmaError, gai_strerror
from rdmacm.explanation import Explanation
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.provider import EventQueue, IdBackend, Owner, RouteChoice
from rdmacm.verbs.device import Device
from rdmacm.verbs.enums import QPType

PASSIVE, NUMERICHOST, NOROUTE = RaiFlag.PASSIVE, RaiFlag.NUMERICHOST, RaiFlag.NOROUTE
FAMILY, SA, DNS = RaiFlag.FAMILY, RaiFlag.SA, RaiFlag.DNS
RC, UC, UD = QPType.RC, QPType.UC, QPType.UD
RAW_PACKET, XRC_SEND, XRC_RECV = QPType.RAW_PACKET, QPType.XRC_SEND, QPType.XRC_RECV
TCP, UDP, IPOIB, IB = PortSpace.TCP, PortSpace.UDP, PortSpace.IPOIB, PortSpace.IB

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc's getaddrinfo(3) does")


# -- hosts ----------------------------------------------------------------------------------------------


class Nowhere:
    """A provider with nothing to offer: no device, no route."""

    name = "nowhere"

    def __init__(self) -> None:
        self.asked: list[tuple[InetAddr, InetAddr | None]] = []

    def devices(self) -> tuple[Device, ...]:
        return ()

    def open_queue(self) -> EventQueue:
        raise NotImplementedError

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> IdBackend:
        raise NotImplementedError

    def find_route(self, destination: InetAddr, source: InetAddr | None) -> RouteChoice | None:
        self.asked.append((destination, source))
        return None

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        raise NotImplementedError

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        return None


class NotToBeAsked(Nowhere):
    """A provider that lookups without a route have no business with."""

    def find_route(self, destination: InetAddr, source: InetAddr | None) -> RouteChoice | None:
        raise AssertionError("asked for a route")

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        raise AssertionError("asked for an owner")


PATH = PathRecord(dgid=Gid("::ffff:10.0.0.1"), sgid=Gid("::ffff:10.0.0.2"), mtu=5, hop_limit=64)
OTHER_PATH = PathRecord(dgid=Gid("::ffff:10.0.0.1"), sgid=Gid("::ffff:10.0.0.3"), mtu=1)
SOURCE = InetAddr(AF_INET, bytes([10, 0, 0, 2]))


class Reaching(Nowhere):
    """A provider that reaches every destination in the same way, and owns 10.0.0.2."""

    name = "reaching"

    def find_route(self, destination: InetAddr, source: InetAddr | None) -> RouteChoice | None:
        super().find_route(destination, source)
        return RouteChoice(SOURCE, "stub0", 1, 3, PATH)

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        return ("stub0", 2) if address.ip == SOURCE.ip else None


# -- resolvers ------------------------------------------------------------------------------------------


_Answer: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]


class Resolver:
    """In the place of socket.getaddrinfo: gives these answers or this error, and keeps the questions."""

    def __init__(self, *answers: _Answer, error: BaseException | None = None) -> None:
        self.answers = answers
        self.error = error
        self.asked: list[tuple[str | None, str | None, int, int, int, int]] = []

    def __call__(
        self, node: str | None, service: str | None, family: int, kind: int, proto: int, flags: int
    ) -> Sequence[_Answer]:
        self.asked.append((node, service, family, kind, proto, flags))
        if self.error is not None:
            raise self.error
        return self.answers


def stream(*sockaddr: Any, name: str = "") -> _Answer:
    return (AF_INET6 if len(sockaddr) == 4 else AF_INET), SOCK_STREAM, socket.IPPROTO_TCP, name, sockaddr


def datagram(*sockaddr: Any, name: str = "") -> _Answer:
    return (AF_INET6 if len(sockaddr) == 4 else AF_INET), SOCK_DGRAM, socket.IPPROTO_UDP, name, sockaddr


def no_such_name() -> Resolver:
    return Resolver(error=socket.gaierror(socket.EAI_NONAME, "Name or service not known"))


def fails(*args: Any, provider: Nowhere | None = None, **kwargs: Any) -> GaiError:
    """The GaiError of a lookup."""
    with pytest.raises(GaiError) as caught:
        getaddrinfo(*args, provider=provider or Nowhere(), **kwargs)
    return caught.value


# -- the table ------------------------------------------------------------------------------------------


def h(
    flags: int = 0,
    family: int = 0,
    qp: int = 0,
    ps: int = 0,
    src: SockAddr | None = None,
    dst: SockAddr | None = None,
) -> AddrInfo:
    """Hints."""
    return AddrInfo(flags, family, qp, ps, src, dst)


def _family(address: SockAddr) -> int:
    if isinstance(address, SockAddrIB):
        return AF_IB
    return AF_INET if len(address) == 2 else AF_INET6


def to(dst: SockAddr, qp: int = RC, ps: int = TCP, src: SockAddr | None = None) -> AddrInfo:
    """An answer of the active side."""
    return AddrInfo(RaiFlag(0), _family(dst), qp, ps, src, dst)


def on(src: SockAddr, qp: int = RC, ps: int = TCP) -> AddrInfo:
    """An answer of the passive side."""
    return AddrInfo(PASSIVE, _family(src), qp, ps, src)


ALL_ONES = 0xFFFFFFFFFFFFFFFF
SPACE_ONLY = 0xFFFFFFFFFFFF0000


def ib(sid: int, mask: int = ALL_ONES) -> SockAddrIB:
    return SockAddrIB(Gid("fe80::2:c903:1:2"), sid, mask, pkey=0xFFFF, flowinfo=0, scope_id=0)


def _usable_ipv6() -> str | None:
    try:
        with socket.socket(AF_INET6, SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return f"IPv6 is off: {error}"
    return None


def _ipv6_beyond_loopback() -> str | None:
    # Without hints getaddrinfo(3) leaves out families of which the host has the loopback address only.
    table = Path("/proc/net/if_inet6")
    lines = table.read_text().splitlines() if table.exists() else []
    if all(line.split()[-1] == "lo" for line in lines):
        return "no IPv6 address but that of loopback"
    return _usable_ipv6()


def _usual_services() -> str | None:
    def port(name: str, protocol: str) -> int | None:
        try:
            return socket.getservbyname(name, protocol)
        except OSError:
            return None

    found = {name: port(*name.split("/")) for name in ("http/tcp", "http/udp", "tftp/tcp", "tftp/udp")}
    if found != {"http/tcp": 80, "http/udp": None, "tftp/tcp": None, "tftp/udp": 69}:
        return f"/etc/services is not the usual: {found}"
    return None


def _lo() -> str | None:
    return None if (1, "lo") in socket.if_nameindex() else "no interface lo with index 1"


@dataclass(frozen=True)
class Case:
    """A row: what is asked, and the answers, the EAI code or the errno that must come.

    ``page`` is there where the answer is not the C library's: ``c`` is what that gives, ``page`` why the
    manual page has it otherwise.  ``named``: the answers have a canonical name.  ``needs`` says why the row
    cannot be tried here, None where it can.  ``resolver`` stands for a name server.
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
_PORT = "A service that is not available is EAI_SERVICE, and no service has a port above 65535."

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
    # Sides and sources.
    37: Case("10.0.0.1", "7471", h(PASSIVE, ps=TCP), (on(("10.0.0.1", 7471)),)),
    38: Case("10.0.0.1", None, h(PASSIVE, ps=TCP), (on(("10.0.0.1", 0)),)),
    39: Case("10.0.0.1", "7471", h(ps=TCP, src=("10.0.0.2", 0)), (to(("10.0.0.1", 7471), src=("10.0.0.2", 0)),)),
    40: Case(
        "10.0.0.1",
        "7471",
        h(ps=TCP, src=("2001:db8::1", 0, 0, 0)),
        (to(("10.0.0.1", 7471), src=("2001:db8::1", 0, 0, 0)),),
    ),
    41: Case(None, "7471", h(PASSIVE, AF_INET, ps=TCP, src=("10.0.0.2", 9)), (on(("0.0.0.0", 7471)),)),
    # Families.
    42: Case("::1", "7471", h(NUMERICHOST, ps=TCP), (to(("::1", 7471, 0, 0)),)),
    43: Case("::1", "7471", h(family=AF_INET, ps=TCP), EAI.ADDRFAMILY),
    44: Case("127.0.0.1", "7471", h(family=AF_INET6, ps=TCP), EAI.ADDRFAMILY),
    45: Case("127.0.0.1", "7471", h(FAMILY, AF_INET, ps=TCP), (to(("127.0.0.1", 7471)),)),
    46: Case("::ffff:10.0.0.1", "7471", h(NUMERICHOST, ps=TCP), (to(("::ffff:10.0.0.1", 7471, 0, 0)),)),
    47: Case("::ffff:10.0.0.1", "7471", h(NUMERICHOST, AF_INET, ps=TCP), (to(("10.0.0.1", 7471)),)),
    # Nodes that are names, or look like some.
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
    62: Case("127.0.0.1", "abc", h(ps=TCP), EAI.SERVICE),
    63: Case("127.0.0.1", "0x10", h(ps=TCP), EAI.SERVICE),
    64: Case("127.0.0.1", "7471 ", h(ps=TCP), EAI.SERVICE),
    65: Case("127.0.0.1", "http", h(ps=TCP), (to(("127.0.0.1", 80)),), needs=_usual_services),
    66: Case("127.0.0.1", "http", h(ps=UDP), EAI.SERVICE, needs=_usual_services),
    67: Case("127.0.0.1", "tftp", h(ps=UDP), (to(("127.0.0.1", 69), UD, UDP),), needs=_usual_services),
    68: Case("127.0.0.1", "tftp", h(ps=TCP), EAI.SERVICE, needs=_usual_services),
    # InfiniBand addresses.
    69: Case("127.0.0.1", "7471", h(family=AF_IB, ps=TCP), (to(("127.0.0.1", 7471)),)),
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
        (to(("fe80::2:c903:1:2", 7471, 0, 0), RC, IB),),
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
    78: Case("fe80::1%lo", "7471", h(NUMERICHOST, ps=TCP), (to(("fe80::1", 7471, 0, 1)),), needs=_lo),
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
    93: Case(None, "abc", h(PASSIVE), EAI.SERVICE),
}


def check(case: Case, hints: AddrInfo | None, provider: Nowhere) -> None:
    if case.needs is not None and (reason := case.needs()) is not None:
        pytest.skip(reason)
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


@glibc_only
class TestCaseTable:
    def test_it_is_complete(self) -> None:
        assert list(CASES) == list(range(1, 94))
        assert [number for number, case in CASES.items() if (case.c is None) != (case.page is None)] == []

    @pytest.mark.parametrize("number", CASES)
    def test_row(self, number: int) -> None:
        check(CASES[number], CASES[number].hints, Nowhere())

    @pytest.mark.parametrize(
        "number", [n for n, case in CASES.items() if not (case.hints or AddrInfo()).flags & NOROUTE]
    )
    def test_row_without_route(self, number: int) -> None:
        """RAI_NOROUTE changes no answer of a host with nothing to offer, and asks the host for nothing."""
        hints = CASES[number].hints or AddrInfo()
        check(CASES[number], replace(hints, flags=hints.flags | NOROUTE), NotToBeAsked())


class TestLengths:
    """``src_len`` and ``dst_len`` are those of C's structures."""

    @pytest.mark.parametrize(
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
            ("10.0.0.1", h(src=("2001:db8::1", 0)), (28, 16)),
        ],
    )
    def test_of_addresses(self, node: str, hints: AddrInfo, lengths: tuple[int, int]) -> None:
        (info,) = getaddrinfo(node, 7471, hints, provider=Nowhere())
        assert (info.src_len, info.dst_len) == lengths
        assert (info.route_len, info.connect_len) == (0, 0)

    def test_of_route_and_connect_data(self) -> None:
        info = AddrInfo(route=(PathData(PATH), PathData(OTHER_PATH)), connect=b"abc")
        assert (info.route_len, info.connect_len) == (144, 3)
        assert (info.src_len, info.dst_len) == (0, 0)

    def test_answers_carry_enumerations(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, flags=1, port_space=0x111, provider=Nowhere())
        assert repr((info.flags, info.qp_type, info.port_space)) == repr((PASSIVE, UD, UDP))


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

    def test_of_every_answer(self) -> None:
        host = Reaching()
        resolver = Resolver(stream("10.0.0.1", 7471), stream("10.0.0.9", 7471))
        found = getaddrinfo("name.test", 7471, provider=host, resolver=resolver)
        assert [(info.dst_addr, info.device) for info in found] == [
            (("10.0.0.1", 7471), "stub0"),
            (("10.0.0.9", 7471), "stub0"),
        ]
        assert [str(destination) for destination, _ in host.asked] == ["10.0.0.1:7471", "10.0.0.9:7471"]

    def test_not_when_suppressed(self) -> None:
        found = getaddrinfo("10.0.0.1", 7471, flags=NOROUTE, provider=NotToBeAsked())
        assert found == [to(("10.0.0.1", 7471))]

    def test_suppressed_it_needs_no_provider(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RDMACM_PROVIDER", "no-such-provider")
        assert getaddrinfo("10.0.0.1", 7471, flags=NOROUTE) == [to(("10.0.0.1", 7471))]
        with pytest.raises(RdmaError, match="no-such-provider") as caught:
            getaddrinfo("10.0.0.1", 7471)
        assert caught.value.errno == errno.ENODEV

    def test_of_an_unreachable_destination_is_left_out(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, provider=Nowhere())
        assert info == to(("10.0.0.1", 7471))
        assert (info.src_len, info.route_len, info.device, info.port_num) == (0, 0, None, 0)

    def test_from_the_hinted_source(self) -> None:
        host = Reaching()
        (info,) = getaddrinfo("10.0.0.1", 7471, src_addr=("10.0.0.3", 5), provider=host)
        assert info.src_addr == ("10.0.0.3", 5)
        assert (info.device, info.gid_index, info.route) == ("stub0", 3, (PathData(PATH),))
        assert host.asked == [(parse_address(("10.0.0.1", 7471)), parse_address(("10.0.0.3", 5)))]

    def test_a_hinted_wildcard_becomes_the_source_used(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, src_addr=("0.0.0.0", 0), provider=Reaching())
        assert info.src_addr == ("10.0.0.2", 0)

    @pytest.mark.parametrize("source", [("2001:db8::1", 0, 0, 0), SockAddrIB(Gid("fe80::1"))])
    def test_a_source_of_another_family_is_kept_and_leads_nowhere(self, source: SockAddr) -> None:
        destination = ("10.0.0.1", 7471)
        for found in (
            getaddrinfo(*destination, src_addr=source, provider=Reaching()),
            getaddrinfo(src_addr=source, dst_addr=destination, provider=Reaching()),
        ):
            assert found == [to(destination, src=source)]

    def test_the_hinted_route_is_kept(self) -> None:
        (info,) = getaddrinfo("10.0.0.1", 7471, route=[PathData(OTHER_PATH)], provider=Reaching())
        assert info.route == (PathData(OTHER_PATH),)
        assert info.device == "stub0"

    def test_the_hinted_route_is_kept_without_another(self) -> None:
        for flags in (0, NOROUTE):
            (info,) = getaddrinfo("10.0.0.1", 7471, flags=flags, route=OTHER_PATH.pack(), provider=Nowhere())
            assert info.route == (PathData(OTHER_PATH),)

    def test_of_hints_alone(self) -> None:
        (info,) = getaddrinfo(dst_addr=("10.0.0.1", 7471), provider=Reaching())
        assert (info.src_addr, info.dst_addr) == (("10.0.0.2", 0), ("10.0.0.1", 7471))
        assert (info.device, info.port_num, info.gid_index) == ("stub0", 1, 3)
        assert info.route == (PathData(PATH),)

    def test_of_hints_alone_not_when_suppressed(self) -> None:
        found = getaddrinfo(dst_addr=("10.0.0.1", 7471), flags=NOROUTE, provider=NotToBeAsked())
        assert found == [to(("10.0.0.1", 7471))]

    def test_of_hints_alone_keeps_source_and_route(self) -> None:
        (info,) = getaddrinfo(
            src_addr=("10.0.0.3", 5),
            dst_addr=("10.0.0.1", 7471),
            route=[PathData(OTHER_PATH)],
            provider=Reaching(),
        )
        assert (info.src_addr, info.route, info.device) == (("10.0.0.3", 5), (PathData(OTHER_PATH),), "stub0")

    def test_the_host_is_not_asked_about_gids(self) -> None:
        (info,) = getaddrinfo("fe80::1", 1, h(FAMILY, AF_IB, ps=IB), provider=NotToBeAsked())
        assert (info.dst_addr, info.device) == (SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES), None)


class TestListener:
    def test_has_the_device_that_owns_its_address(self) -> None:
        for found in (
            getaddrinfo("10.0.0.2", 7471, flags=PASSIVE, provider=Reaching()),
            getaddrinfo(src_addr=("10.0.0.2", 7471), flags=PASSIVE, provider=Reaching()),
        ):
            assert found == [replace(on(("10.0.0.2", 7471)), device="stub0", port_num=2)]

    def test_of_a_foreign_address_has_no_device(self) -> None:
        found = getaddrinfo("10.0.0.9", 7471, flags=PASSIVE, provider=Reaching())
        assert found == [on(("10.0.0.9", 7471))]

    def test_of_a_wildcard_has_no_device_and_asks_for_none(self) -> None:
        found = getaddrinfo(None, 7471, flags=PASSIVE, family=AF_INET, provider=NotToBeAsked())
        assert found == [on(("0.0.0.0", 7471))]

    def test_has_the_device_only_when_routes_are_wanted(self) -> None:
        found = getaddrinfo("10.0.0.2", 7471, flags=PASSIVE | NOROUTE, provider=NotToBeAsked())
        assert found == [on(("10.0.0.2", 7471))]


class TestHintsAlone:
    def test_an_infiniband_destination(self) -> None:
        target = SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES)
        (info,) = getaddrinfo(dst_addr=target, port_space=IB, provider=NotToBeAsked())
        assert info == to(target, RC, IB)

    def test_a_source_alone(self) -> None:
        (info,) = getaddrinfo(src_addr=("10.0.0.2", 5), provider=Nowhere())
        assert info == AddrInfo(RaiFlag(0), AF_INET, RC, TCP, ("10.0.0.2", 5))

    def test_a_route_alone_names_both_ends(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), pkey=0x8001, flow_label=0x12345)
        (info,) = getaddrinfo(route=path.pack(), provider=NotToBeAsked())
        assert (info.family, info.qp_type, info.port_space) == (AF_IB, RC, IB)
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x13F0000, SPACE_ONLY, 0x8001)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x13F0000, SPACE_ONLY, 0x8001, 0x12345)
        assert info.route == (PathData(path),)
        assert (info.src_len, info.dst_len, info.route_len) == (48, 48, 72)

    def test_the_service_of_a_route_is_that_of_its_destination(self) -> None:
        path = PathRecord(dgid=Gid("fe80::d"), sgid=Gid("fe80::5"), service_id=0x1061D2F)
        (info,) = getaddrinfo(route=[PathData(path)], port_space=TCP, provider=Nowhere())
        assert info.src_addr == SockAddrIB(Gid("fe80::5"), 0x1060000, SPACE_ONLY)
        assert info.dst_addr == SockAddrIB(Gid("fe80::d"), 0x1061D2F, ALL_ONES)

    def test_a_route_on_the_passive_side_is_its_source(self) -> None:
        (info,) = getaddrinfo(flags=PASSIVE, route=PATH.pack(), provider=Nowhere())
        assert (info.flags, info.dst_addr) == (PASSIVE, None)
        assert info.src_addr == SockAddrIB(PATH.sgid, 0x13F0000, SPACE_ONLY)

    def test_a_destination_alone_says_nothing_of_the_passive_side(self) -> None:
        assert fails(flags=PASSIVE, dst_addr=("10.0.0.1", 7471)).errno == EAI.NONAME

    def test_an_address_of_another_family(self) -> None:
        error = fails(family=AF_INET6, dst_addr=("10.0.0.1", 7471))
        assert error.errno == EAI.ADDRFAMILY
        assert "10.0.0.1:7471" in str(error)

    def test_a_name_in_the_place_of_an_address(self) -> None:
        for hints in (h(dst=("name.test", 1)), h(src=("name.test", 1), dst=("10.0.0.1", 1))):
            error = fails(hints=hints)
            assert error.errno == EAI.NONAME
            assert "name.test" in str(error)


# -- what resolvers answer ------------------------------------------------------------------------------


class TestAnswers:
    def test_all_come_back_in_order(self) -> None:
        resolver = Resolver(
            stream("fd00::2", 80, 0, 0, name="canonical.test"),
            stream("10.0.0.9", 80),
            stream("fe80::1", 80, 0, 3),
            stream("10.0.0.1", 80),
        )
        found = getaddrinfo("name.test", "http", port_space=TCP, provider=Nowhere(), resolver=resolver)
        assert [info.dst_addr for info in found] == [
            ("fd00::2", 80, 0, 0),
            ("10.0.0.9", 80),
            ("fe80::1", 80, 0, 3),
            ("10.0.0.1", 80),
        ]
        assert {(info.qp_type, info.port_space, info.flags) for info in found} == {(RC, TCP, 0)}
        assert [info.family for info in found] == [AF_INET6, AF_INET, AF_INET6, AF_INET]

    def test_the_canonical_name_is_that_of_all(self) -> None:
        resolver = Resolver(stream("10.0.0.9", 80, name="canonical.test"), stream("10.0.0.1", 80))
        for flags, names in ((0, (None, "canonical.test")), (PASSIVE, ("canonical.test", None))):
            found = getaddrinfo("alias.test", 80, flags=flags, provider=Nowhere(), resolver=resolver)
            assert [(info.src_canonname, info.dst_canonname) for info in found] == [names] * 2

    def test_an_address_comes_once(self) -> None:
        resolver = Resolver(
            stream("10.0.0.9", 80),
            datagram("10.0.0.9", 80),
            (AF_INET, SOCK_RAW, 0, "", ("10.0.0.9", 80)),
            stream("fd00::9", 80, 0, 0),
            datagram("fd00::9", 80, 0, 0),
            stream("10.0.0.9", 80),
        )
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert found == [to(("10.0.0.9", 80)), to(("fd00::9", 80, 0, 0))]

    def test_a_link_local_address_comes_once_a_link(self) -> None:
        resolver = Resolver(stream("fe80::1", 80, 0, 2), stream("fe80::1", 80, 0, 3))
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert [info.dst_addr for info in found] == [("fe80::1", 80, 0, 2), ("fe80::1", 80, 0, 3)]

    def test_streams_are_preferred_whatever_comes_first(self) -> None:
        resolver = Resolver(
            datagram("10.0.0.9", 80), stream("10.0.0.9", 80), datagram("10.0.0.1", 80), stream("10.0.0.1", 80)
        )
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert found == [to(("10.0.0.9", 80)), to(("10.0.0.1", 80))]

    def test_what_exists_for_datagrams_only_is_that(self) -> None:
        resolver = Resolver(datagram("10.0.0.9", 69))
        assert getaddrinfo("name.test", "tftp", provider=Nowhere(), resolver=resolver) == [
            to(("10.0.0.9", 69), UD, UDP)
        ]

    @pytest.mark.parametrize(
        ("hints", "qp", "ps"),
        [
            (h(qp=RAW_PACKET, ps=IB), RAW_PACKET, IB),
            (h(qp=UC), UC, TCP),
            (h(qp=RC), RC, TCP),
            (h(ps=TCP), RC, TCP),
            (h(qp=UD), UD, UDP),
            (h(ps=UDP), UD, UDP),
            (h(ps=IPOIB), UD, IPOIB),
        ],
    )
    def test_hints_overrule_the_kind_of_an_answer(self, hints: AddrInfo, qp: int, ps: int) -> None:
        """A resolver that was brought along, a cache say, may answer for another kind than was asked for."""
        for answers in (
            [stream("10.0.0.9", 80)],
            [datagram("10.0.0.9", 80)],
            [stream("10.0.0.9", 80), datagram("10.0.0.9", 80)],
        ):
            found = getaddrinfo("name.test", 80, hints, provider=Nowhere(), resolver=Resolver(*answers))
            assert found == [to(("10.0.0.9", 80), qp, ps)]

    def test_other_families_are_passed_over(self) -> None:
        strange = (int(socket.AF_UNIX), int(SOCK_STREAM), 0, "", ("/run/name",))
        resolver = Resolver(strange, stream("10.0.0.9", 80))
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert found == [to(("10.0.0.9", 80))]
        assert fails("name.test", 80, resolver=Resolver(strange)).errno == EAI.NODATA

    def test_a_looked_up_gid(self) -> None:
        resolver = Resolver(stream("fe80::2:c903:1:2", 7471, 0, 0))
        found = getaddrinfo("name.test", 7471, h(FAMILY, AF_IB, ps=IB), provider=Nowhere(), resolver=resolver)
        assert found == [to(ib(0x13F1D2F), RC, IB)]

    def test_numbers_ask_nobody(self) -> None:
        resolver = no_such_name()
        for node in ("10.0.0.1", "fd00::1", "::ffff:10.0.0.1"):
            getaddrinfo(node, 7471, provider=Nowhere(), resolver=resolver)
        assert resolver.asked == []


_STREAM, _DGRAM = int(SOCK_STREAM), int(SOCK_DGRAM)
_NAME, _NUMBER, _ANY = int(socket.AI_CANONNAME), int(socket.AI_NUMERICHOST), int(socket.AI_PASSIVE)


class TestQuestions:
    """What a resolver is asked: family, type, protocol and flags of getaddrinfo(3)."""

    @pytest.mark.parametrize(
        ("hints", "question"),
        [
            (h(), (0, 0, 0, _NAME)),
            (h(PASSIVE), (0, 0, 0, _NAME | _ANY)),
            (h(NUMERICHOST), (0, 0, 0, _NUMBER)),
            (h(PASSIVE | NUMERICHOST | NOROUTE | DNS), (0, 0, 0, _NUMBER | _ANY)),
            (h(family=AF_INET), (AF_INET, 0, 0, _NAME)),
            (h(FAMILY, AF_INET6), (AF_INET6, 0, 0, _NAME)),
            (h(family=AF_IB), (0, 0, 0, _NAME)),
            (h(FAMILY, AF_IB), (AF_INET6, 0, 0, _NAME)),
            (h(qp=RC), (0, _STREAM, 0, _NAME)),
            (h(qp=UC), (0, _STREAM, 0, _NAME)),
            (h(qp=XRC_SEND), (0, _STREAM, 0, _NAME)),
            (h(qp=XRC_RECV), (0, _STREAM, 0, _NAME)),
            (h(qp=UD), (0, _DGRAM, 0, _NAME)),
            (h(qp=RAW_PACKET), (0, 0, 0, _NAME)),
            (h(ps=TCP), (0, 0, socket.IPPROTO_TCP, _NAME)),
            (h(ps=UDP), (0, 0, socket.IPPROTO_UDP, _NAME)),
            (h(ps=IPOIB), (0, 0, socket.IPPROTO_UDP, _NAME)),
            (h(ps=IB), (0, 0, 0, _NAME)),
            (h(qp=RC, ps=IB), (0, _STREAM, socket.IPPROTO_TCP, _NAME)),
            (h(qp=UD, ps=IB), (0, _DGRAM, socket.IPPROTO_UDP, _NAME)),
            (h(qp=UD, ps=IPOIB), (0, _DGRAM, socket.IPPROTO_UDP, _NAME)),
        ],
    )
    def test_follow_the_hints(self, hints: AddrInfo, question: tuple[int, int, int, int]) -> None:
        resolver = no_such_name()
        assert fails("name.test", "service", hints, resolver=resolver).errno == EAI.NONAME
        assert resolver.asked == [("name.test", "service", *question)]

    def test_without_hints_leave_out_unused_families(self) -> None:
        resolver = no_such_name()
        fails("name.test", 80, resolver=resolver)
        assert resolver.asked == [
            ("name.test", "80", 0, 0, 0, _NAME | int(socket.AI_ADDRCONFIG) | int(socket.AI_V4MAPPED))
        ]

    def test_without_a_node_want_no_name(self) -> None:
        resolver = Resolver(stream("0.0.0.0", 80))
        found = getaddrinfo(None, "service", flags=PASSIVE, provider=Nowhere(), resolver=resolver)
        assert found == [on(("0.0.0.0", 80))]
        assert resolver.asked == [(None, "service", 0, 0, 0, _ANY)]


class TestServices:
    @pytest.mark.parametrize(
        ("service", "port"), [(0, 0), (7471, 7471), (65535, 65535), ("00080", 80), ("0" * 30 + "80", 80)]
    )
    def test_numbers(self, service: str | int, port: int) -> None:
        (info,) = getaddrinfo("10.0.0.1", service, provider=Nowhere())
        assert info.dst_addr == ("10.0.0.1", port)

    @glibc_only
    @pytest.mark.parametrize("service", [" 7471", "\t7471", "+7471"])
    def test_numbers_as_strtoul_reads_them(self, service: str) -> None:
        (info,) = getaddrinfo("10.0.0.1", service, provider=Nowhere())
        assert info.dst_addr == ("10.0.0.1", 7471)

    @glibc_only
    @pytest.mark.parametrize(
        "service",
        [
            -1,
            -80,
            65536,
            1 << 64,
            (1 << 64) + 80,
            "+65536",
            " 70000",
            "-80",
            "-4294967216",  # 80, to 32 bits
            "0" * 30 + "70000",
            "9" * 100,
        ],
    )
    def test_numbers_that_are_no_port(self, service: str | int) -> None:
        for node in ("10.0.0.1", None):
            error = fails(node, service)
            assert EAI(error.errno or 0) is EAI.SERVICE
            assert str(service) in str(error)

    def test_a_number_of_any_length_is_looked_at(self) -> None:
        assert fails("10.0.0.1", "1" * 10_000).errno == EAI.SERVICE
        (info,) = getaddrinfo("10.0.0.1", "0" * 10_000 + "80", provider=Nowhere())
        assert info.dst_addr == ("10.0.0.1", 80)

    def test_a_port_that_is_none_asks_nobody(self) -> None:
        resolver = Resolver(stream("10.0.0.1", 4464))
        assert fails("name.test", 70000, resolver=resolver).errno == EAI.SERVICE
        assert resolver.asked == []

    @glibc_only
    def test_names_are_those_of_the_protocol(self) -> None:
        if (reason := _usual_services()) is not None:
            pytest.skip(reason)
        assert getaddrinfo("10.0.0.1", "tftp", provider=Nowhere()) == [to(("10.0.0.1", 69), UD, UDP)]
        assert getaddrinfo("10.0.0.1", "http", provider=Nowhere()) == [to(("10.0.0.1", 80))]


@glibc_only
class TestNodes:
    """Forms the table leaves out."""

    def test_a_gid_with_scope(self) -> None:
        if (reason := _lo()) is not None:
            pytest.skip(reason)
        hints = h(FAMILY | NUMERICHOST, AF_IB, ps=IB)
        (info,) = getaddrinfo("fe80::1%lo", 1, hints, provider=Nowhere())
        assert info.dst_addr == SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES, scope_id=1)

    def test_a_numeric_scope(self) -> None:
        (info,) = getaddrinfo("fe80::1%7", 1, flags=NUMERICHOST, provider=Nowhere())
        assert info.dst_addr == ("fe80::1", 1, 0, 7)

    @pytest.mark.parametrize("flags", [0, PASSIVE, NUMERICHOST])
    def test_an_asterisk_is_no_name(self, flags: int) -> None:
        """getaddrinfo(3) takes ``*`` for NULL: for the host itself, or for a wildcard."""
        assert EAI(fails("*", 7471, flags=flags).errno or 0) is EAI.NONAME
        assert EAI(fails("127.0.0.1", "*", flags=flags).errno or 0) is EAI.SERVICE

    @pytest.mark.parametrize("node", ["127.0.0.1\0.name.test", "localhost\0", "\0", "fe80::1\0%lo"])
    def test_with_a_nul_are_unknown(self, node: str) -> None:
        for flags in (0, NUMERICHOST):
            assert EAI(fails(node, 80, flags=flags).errno or 0) is EAI.NONAME

    @pytest.mark.parametrize("service", ["80\0", "80\0abc", "http\0", "\0"])
    def test_with_a_nul_in_the_service(self, service: str) -> None:
        assert EAI(fails("127.0.0.1", service).errno or 0) is EAI.SERVICE

    @pytest.mark.parametrize("node", ["a" * 64, f"{'a' * 64}.test", "a..test", ".", "é" * 64, "\ud800"])
    def test_that_cannot_be_names_are_unknown(self, node: str) -> None:
        error = fails(node, 80, flags=NUMERICHOST)
        assert EAI(error.errno or 0) is EAI.NONAME
        assert error.errno == socket.EAI_NONAME

    def test_a_label_too_long_says_so(self) -> None:
        assert "too long" in str(fails("a" * 64, 80))


class TestNeedsLookup:
    @pytest.mark.parametrize(
        ("node", "hints", "needed"),
        [
            ("name.test", None, True),
            ("name.test", h(), True),
            ("name.test", h(PASSIVE), True),
            ("name.test", h(NUMERICHOST), False),
            (None, None, False),
            (None, h(PASSIVE), False),
            ("10.0.0.1", None, False),
            ("fd00::1", h(), False),
            (None, h(SA), False),
        ],
    )
    def test_is_for_names(self, node: str | None, hints: AddrInfo | None, needed: bool) -> None:
        assert needs_lookup(node, hints) is needed


# -- hints ----------------------------------------------------------------------------------------------


class TestMakeHints:
    def test_nothing_is_no_hints(self) -> None:
        assert make_hints() is None

    def test_hints_stay_what_they_are(self) -> None:
        hints = h(PASSIVE)
        assert make_hints(hints) is hints

    def test_keywords_are_hints(self) -> None:
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
    def test_a_route_of_one_record(self, kind: Callable[[bytes], bytes]) -> None:
        made = make_hints(route=kind(PATH.pack()))
        assert made is not None
        assert made.route == (PathData(PATH),)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_a_route_of_an_array(self, count: int, kind: Callable[[bytes], bytes]) -> None:
        route = tuple(PathData(PATH.replace(dlid=each), PathFlag.OUTBOUND) for each in range(count))
        made = make_hints(route=kind(b"".join(each.pack() for each in route)))
        assert made is not None
        assert made.route == route
        assert made.route_len == 72 * count

    def test_a_route_of_objects(self) -> None:
        made = make_hints(route=[PathData(PATH), PathData(OTHER_PATH)])
        assert made is not None
        assert made.route == (PathData(PATH), PathData(OTHER_PATH))

    @pytest.mark.parametrize("size", [0, 1, 63, 65, 71, 73, 128, 143])
    def test_a_route_of_another_length(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"{size}"):
            make_hints(route=bytes(size))
        with pytest.raises(ValueError, match=f"{size}"):
            getaddrinfo("10.0.0.1", 7471, route=bytes(size), provider=Nowhere())


# -- errors ---------------------------------------------------------------------------------------------


class TestErrors:
    @pytest.mark.parametrize("code", EAI)
    def test_of_a_resolver_are_passed_on(self, code: EAI) -> None:
        cause = socket.gaierror(int(code), "whatever")
        error = fails("name.test", "some-service", resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is code
        assert error.code_name == f"EAI_{code.name}"
        assert error.__cause__ is cause
        assert error.step == "getaddrinfo"
        text = str(error)
        for part in (gai_strerror(code), "name.test", "some-service", f"[EAI_{code.name}]"):
            assert part in text

    @pytest.mark.parametrize("code", EAI)
    def test_can_be_caught_as_what_they_are(self, code: EAI) -> None:
        resolver = Resolver(error=socket.gaierror(int(code), ""))
        for kind in (GaiError, RdmaError, socket.gaierror, OSError):
            with pytest.raises(kind) as caught:
                getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
            assert caught.value.errno == code

    @pytest.mark.parametrize(
        ("code", "part"),
        [
            (EAI.NONAME, "no such host or service"),
            (EAI.AGAIN, "no name server answered"),
            (EAI.FAIL, "refused"),
            (EAI.NODATA, "has no IPv6 address"),
            (EAI.ADDRFAMILY, "has no IPv6 address"),
            (EAI.SERVICE, "no service 'some-service'"),
            (EAI.QPTYPE, "do not go together"),
        ],
    )
    def test_of_a_resolver_say_what_was_wrong_and_what_to_try(self, code: EAI, part: str) -> None:
        resolver = Resolver(error=socket.gaierror(int(code), ""))
        error = fails("name.test", "some-service", family=AF_INET6, resolver=resolver)
        assert part in (error.strerror or "")
        assert error.hint
        assert str(error).endswith(f"; try: {error.hint}")

    @pytest.mark.parametrize(
        ("code", "node", "service", "hints", "part"),
        [
            (EAI.BADFLAGS, "10.0.0.1", "7471", h(0x40), "0x40"),
            (EAI.BADFLAGS, "10.0.0.1", "7471", h(-1), "flags"),
            (EAI.FAMILY, "10.0.0.1", "7471", h(family=99), "99"),
            (EAI.QPTYPE, "10.0.0.1", "7471", h(qp=77), "77"),
            (EAI.QPTYPE, "10.0.0.1", "7471", h(ps=0x1234), "0x1234"),
            (EAI.QPTYPE, "10.0.0.1", "7471", h(qp=UD, ps=TCP), "UD does not go with port space TCP"),
            (EAI.SERVICE, "10.0.0.1", "70000", h(), "65535"),
            (EAI.NONAME, None, None, None, "nothing to resolve"),
        ],
    )
    def test_of_our_own_say_what_was_wrong(
        self, code: EAI, node: str | None, service: str | None, hints: AddrInfo | None, part: str
    ) -> None:
        error = fails(node, service, hints)
        assert EAI(error.errno or 0) is code
        assert error.hint
        for each in (gai_strerror(code), part, f"[EAI_{code.name}]", node or "", service or ""):
            assert each in str(error)

    def test_of_a_resolver_without_answers(self) -> None:
        error = fails("name.test", 80, resolver=Resolver())
        assert EAI(error.errno or 0) is EAI.NODATA
        assert gai_strerror(EAI.NODATA) in str(error)

    def test_of_the_system(self) -> None:
        cause = OSError(errno.EMFILE, "Too many open files")
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert (error.errno, error.system_errno) == (EAI.SYSTEM, errno.EMFILE)
        assert error.__cause__ is cause
        for part in (gai_strerror(EAI.SYSTEM), "Too many open files", "EMFILE", "[EAI_SYSTEM]"):
            assert part in str(error)

    def test_of_the_system_have_an_errno(self) -> None:
        error = fails("name.test", 80, resolver=Resolver(error=OSError("broken")))
        assert (error.errno, error.system_errno) == (EAI.SYSTEM, errno.EIO)
        assert "broken" in str(error)

    def test_others_have_no_system_errno(self) -> None:
        assert fails("name.test", 80, resolver=no_such_name()).system_errno == 0

    def test_of_memory(self) -> None:
        cause = MemoryError()
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is EAI.MEMORY
        assert error.__cause__ is cause
        assert gai_strerror(EAI.MEMORY) in str(error)

    @pytest.mark.parametrize(
        "cause", [UnicodeError("label too long"), ValueError("embedded null character")], ids=["label", "nul"]
    )
    def test_of_encoding(self, cause: ValueError) -> None:
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is EAI.NONAME
        assert error.__cause__ is cause
        assert str(cause) in str(error)

    @pytest.mark.parametrize(
        "cause", [socket.gaierror(-99, "strange"), socket.gaierror(12345, ""), socket.gaierror("strange")]
    )
    def test_of_an_unknown_code_are_failures(self, cause: socket.gaierror) -> None:
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is EAI.FAIL
        assert error.__cause__ is cause

    def test_name_the_address_as_it_was_given(self) -> None:
        assert fails("fd00::1", "x", resolver=no_such_name()).address == "[fd00::1]:x"
        assert fails("name.test", None, resolver=no_such_name()).address == "name.test"
        assert fails(None, "x", resolver=no_such_name()).address == ":x"

    @pytest.mark.parametrize(
        ("node", "service", "flags", "part"),
        [
            ("10.0.0.1", "svc", SA, "a node"),
            (None, "svc", SA | DNS, "RAI_DNS"),
            (None, None, SA, "service"),
            (None, "svc", SA, "InfiniBand"),
        ],
    )
    def test_of_the_subnet_administrator(
        self, node: str | None, service: str | None, flags: RaiFlag, part: str
    ) -> None:
        with pytest.raises(RdmaError, match=part) as caught:
            getaddrinfo(node, service, flags=flags, provider=Nowhere())
        assert caught.value.step == "getaddrinfo"
        assert not isinstance(caught.value, socket.gaierror)

    def test_of_the_call_itself(self) -> None:
        wrong: Any = 7
        with pytest.raises(TypeError):
            getaddrinfo(wrong, 80, provider=Nowhere())
        with pytest.raises(TypeError):
            getaddrinfo(dst_addr=wrong, provider=Nowhere())


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


class TestAnything:
    @settings(max_examples=300)
    @given(node=_texts, service=st.one_of(_texts, st.integers()), hints=st.one_of(st.none(), _hints))
    def test_ends_in_an_answer_or_an_error_of_ours(
        self, node: str | None, service: str | int | None, hints: AddrInfo | None
    ) -> None:
        _sound(_outcome(node, service, hints, provider=Reaching(), resolver=no_such_name()))

    @settings(max_examples=300)
    @given(hints=_hints)
    def test_hints_alone_end_in_an_answer_or_an_error_of_ours(self, hints: AddrInfo) -> None:
        _sound(_outcome(None, None, hints, provider=Reaching(), resolver=no_such_name()))

    @glibc_only
    @settings(max_examples=300, deadline=None)
    @given(node=_texts, service=_texts, flags=_flags, hints=_hints)
    def test_numeric_ends_in_an_answer_or_an_error_of_ours(
        self, node: str | None, service: str | None, flags: int, hints: AddrInfo
    ) -> None:
        """The same with the resolver of the system, which NUMERICHOST keeps from asking anybody."""
        _sound(_outcome(node, service, hints, flags=flags | NUMERICHOST, provider=Nowhere()))

    @given(
        node=st.one_of(st.text(max_size=40), st.sampled_from(_NASTY)),
        service=st.one_of(st.none(), st.text(max_size=40), st.sampled_from(_NASTY)),
    )
    def test_errors_are_one_line_that_can_be_printed(self, node: str, service: str | None) -> None:
        resolver = no_such_name()
        text = str(_outcome(node, service, flags=NOROUTE, resolver=resolver))
        assert text.splitlines() == [text]
        assert text.isprintable()
