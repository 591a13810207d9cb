"""Helpers for the tests of getaddrinfo: providers, resolvers, hints and answers in short."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Sequence
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM
from typing import Any, TypeAlias, TypeVar

import pytest

from rdmacm.address import AF_IB, Address, Gid, InetAddr, SockAddr, SockAddrIB
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.capabilities import SOFT
from rdmacm.constants import PortSpace, RaiFlag
from rdmacm.errors import GaiError
from rdmacm.explanation import Explanation
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.restriction import made_like
from rdmacm.provider import EventQueue, FoundServices, IdBackend, Owner, RouteChoice, Tap
from rdmacm.provider.counters import Counters
from rdmacm.provider.udp import UdpSocket
from rdmacm.verbs.backend import DeviceBackend
from rdmacm.verbs.device import Device
from rdmacm.verbs.enums import QPType
from support.clock import REAL

T = TypeVar("T")

PASSIVE, NUMERICHOST, NOROUTE = RaiFlag.PASSIVE, RaiFlag.NUMERICHOST, RaiFlag.NOROUTE
FAMILY, SA, DNS = RaiFlag.FAMILY, RaiFlag.SA, RaiFlag.DNS
RC, UC, UD = QPType.RC, QPType.UC, QPType.UD
RAW_PACKET, XRC_SEND, XRC_RECV = QPType.RAW_PACKET, QPType.XRC_SEND, QPType.XRC_RECV
TCP, UDP, IPOIB, IB = PortSpace.TCP, PortSpace.UDP, PortSpace.IPOIB, PortSpace.IB

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc's getaddrinfo(3) does")


# -- hosts ----------------------------------------------------------------------------------------------


class Nowhere:
    """A provider without a device or a route."""

    name = "nowhere"
    capabilities = SOFT
    tap: Tap | None = None
    clock: Callable[[], float] = staticmethod(REAL)

    def __init__(self) -> None:
        self.asked: list[tuple[InetAddr, InetAddr | None]] = []

    def devices(self) -> tuple[Device, ...]:
        return ()

    def query_counters(self) -> Counters:
        raise NotImplementedError

    def open_device(self, name: str) -> DeviceBackend:
        raise NotImplementedError

    def fork_init(self) -> None:
        raise NotImplementedError

    def fork_status(self) -> int:
        raise NotImplementedError

    def open_queue(self) -> EventQueue:
        raise NotImplementedError

    def drive(self, done: Callable[[], T], timeout: float | None) -> T:
        raise NotImplementedError

    def open_udp(self, family: int, on_readable: Callable[[], None]) -> UdpSocket:
        raise NotImplementedError

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> IdBackend:
        raise NotImplementedError

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        self.asked.append((destination, source))
        return None

    def find_path(
        self, destination: Address, source: Address | None, port_space: int, like: PathRecord | None = None
    ) -> RouteChoice | None:
        return None

    def find_services(self, service: str) -> FoundServices | None:
        return None

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        raise NotImplementedError

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        return None


class NotToBeAsked(Nowhere):
    """A provider that raises if it is asked for a route or an owner, which RAI_NOROUTE does not need."""

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        raise AssertionError("asked for a route")

    def find_path(
        self, destination: Address, source: Address | None, port_space: int, like: PathRecord | None = None
    ) -> RouteChoice | None:
        raise AssertionError("asked for a path")

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        raise AssertionError("asked for an owner")


PATH = PathRecord(dgid=Gid("::ffff:10.0.0.1"), sgid=Gid("::ffff:10.0.0.2"), mtu=5, hop_limit=64)
OTHER_PATH = PathRecord(dgid=Gid("::ffff:10.0.0.1"), sgid=Gid("::ffff:10.0.0.3"), mtu=1)
SOURCE = InetAddr(AF_INET, bytes([10, 0, 0, 2]))


class Reaching(Nowhere):
    """A provider with the same route on RoCE to every destination, and the address 10.0.0.2."""

    name = "reaching"

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        super().find_route(destination, source)
        path = PATH if like is None else made_like(PATH, like)
        return None if path is None else RouteChoice(SOURCE, "stub0", 1, 3, path)

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        return ("stub0", 2) if address.ip == SOURCE.ip else None


# -- resolvers ------------------------------------------------------------------------------------------


ResolverAnswer: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]


class Resolver:
    """Replaces socket.getaddrinfo: returns these answers or raises this error, and records the calls."""

    def __init__(self, *answers: ResolverAnswer, error: BaseException | None = None) -> None:
        self.answers = answers
        self.error = error
        self.asked: list[tuple[str | None, str | None, int, int, int, int]] = []

    def __call__(
        self, node: str | None, service: str | None, family: int, kind: int, proto: int, flags: int
    ) -> Sequence[ResolverAnswer]:
        self.asked.append((node, service, family, kind, proto, flags))
        if self.error is not None:
            raise self.error
        return self.answers


def stream(*sockaddr: Any, name: str = "") -> ResolverAnswer:
    return (AF_INET6 if len(sockaddr) == 4 else AF_INET), SOCK_STREAM, socket.IPPROTO_TCP, name, sockaddr


def datagram(*sockaddr: Any, name: str = "") -> ResolverAnswer:
    return (AF_INET6 if len(sockaddr) == 4 else AF_INET), SOCK_DGRAM, socket.IPPROTO_UDP, name, sockaddr


def no_such_name() -> Resolver:
    return Resolver(error=socket.gaierror(socket.EAI_NONAME, "Name or service not known"))


def fails(*args: Any, provider: Nowhere | None = None, **kwargs: Any) -> GaiError:
    """The GaiError of a lookup."""
    with pytest.raises(GaiError) as caught:
        getaddrinfo(*args, provider=provider or Nowhere(), **kwargs)
    return caught.value


# -- hints and answers ----------------------------------------------------------------------------------


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


# -- requirements that some hosts lack ------------------------------------------------------------------


def usual_services() -> str | None:
    def port(name: str, protocol: str) -> int | None:
        try:
            return socket.getservbyname(name, protocol)
        except OSError:
            return None

    found = {name: port(*name.split("/")) for name in ("http/tcp", "http/udp", "tftp/tcp", "tftp/udp")}
    if found != {"http/tcp": 80, "http/udp": None, "tftp/tcp": None, "tftp/udp": 69}:
        return f"/etc/services is not the usual: {found}"
    return None


def lo() -> str | None:
    return None if (1, "lo") in socket.if_nameindex() else "no interface lo with index 1"
