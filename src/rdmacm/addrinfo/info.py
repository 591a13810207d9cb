"""The hints and results of rdma_getaddrinfo(3): ``struct rdma_addrinfo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from rdmacm.address import Address, InetAddr, SockAddr, SockAddrIB, format_address
from rdmacm.constants import RaiFlag
from rdmacm.proto.sa import PathData, PathRecord

__all__ = [
    "NO_FLAGS",
    "NO_HINTS",
    "RAI_DNS",
    "RAI_FAMILY",
    "RAI_NOROUTE",
    "RAI_NUMERICHOST",
    "RAI_PASSIVE",
    "RAI_SA",
    "AddrInfo",
    "HintFields",
    "make_hints",
    "sockaddr",
]

# Plain ints, for the reason given in rdmacm.plainints.
RAI_PASSIVE = int(RaiFlag.PASSIVE)
RAI_NUMERICHOST = int(RaiFlag.NUMERICHOST)
RAI_NOROUTE = int(RaiFlag.NOROUTE)
RAI_FAMILY = int(RaiFlag.FAMILY)
RAI_SA = int(RaiFlag.SA)
RAI_DNS = int(RaiFlag.DNS)

NO_FLAGS = RaiFlag(0)


@dataclass(frozen=True, slots=True)
class AddrInfo:
    """``struct rdma_addrinfo``; the fields have C's names without ``ai_``. In hints, 0 and None mean "any".

    ``flags``: :class:`RaiFlag`; ``family``: ``AF_INET``, ``AF_INET6`` or ``AF_IB`` (27); ``qp_type``:
    :class:`QPType` or 0; ``port_space``: :class:`PortSpace` or 0. Addresses are Python socket addresses or
    :class:`SockAddrIB`, and None where C has length 0. ``src_canonname`` and ``dst_canonname`` are the host's canonical
    name, on the passive and on the active side. ``route`` has the paths to the destination. ``connect`` has the bytes
    that a connection request must carry before the user's private data. ``device``, ``port_num`` and ``gid_index`` are
    not in C: the device, port and GID that the host would use, or None and 0 if there is no route or it was not looked
    up.
    """

    flags: int = NO_FLAGS
    family: int = 0
    qp_type: int = 0
    port_space: int = 0
    src_addr: SockAddr | None = None
    dst_addr: SockAddr | None = None
    src_canonname: str | None = None
    dst_canonname: str | None = None
    route: tuple[PathData, ...] = ()
    connect: bytes = b""
    device: str | None = None
    port_num: int = 0
    gid_index: int = 0

    @property
    def src_len(self) -> int:
        """Size of the C sockaddr in bytes: 16, 28 or 48; 0 for none."""
        return _sockaddr_size(self.src_addr)

    @property
    def dst_len(self) -> int:
        """Size of the C sockaddr in bytes: 16, 28 or 48; 0 for none."""
        return _sockaddr_size(self.dst_addr)

    @property
    def route_len(self) -> int:
        """Size of the route in bytes: 72 per path."""
        return PathData.SIZE * len(self.route)

    @property
    def connect_len(self) -> int:
        """Size of the connect data in bytes."""
        return len(self.connect)

    def __str__(self) -> str:
        source = f"from {format_address(self.src_addr)}" if self.src_addr else ""
        destination = format_address(self.dst_addr) if self.dst_addr else ""
        return " ".join(part for part in (destination, source, self.device) if part)


def _sockaddr_size(address: SockAddr | None) -> int:
    if address is None:
        return 0
    if isinstance(address, SockAddrIB):
        return 48
    return 28 if len(address) > 2 or ":" in address[0] else 16


class HintFields(TypedDict, total=False):
    """The fields of hints as keyword arguments; None leaves a field unchanged.

    ``route`` may also be bytes: one ``ibv_path_record`` (64), or an array of ``ibv_path_data`` (72 each).
    """

    flags: int | None
    family: int | None
    qp_type: int | None
    port_space: int | None
    src_addr: SockAddr | None
    dst_addr: SockAddr | None
    route: bytes | Sequence[PathData] | None


#: Hints that leave everything open.
NO_HINTS = AddrInfo()


def make_hints(hints: AddrInfo | None = None, **fields: Unpack[HintFields]) -> AddrInfo | None:
    """Hints with some fields replaced; None without hints and fields.

    ``route`` may be bytes: one ``ibv_path_record`` (64), or an array of ``ibv_path_data`` (72 each). ValueError for
    another length.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return hints
    if "route" in given:
        given["route"] = _parse_route(given["route"])  # type: ignore[arg-type]
    return AddrInfo(**given) if hints is None else replace(hints, **given)  # type: ignore[arg-type]


def _parse_route(route: bytes | Sequence[PathData]) -> tuple[PathData, ...]:
    if not isinstance(route, bytes | bytearray | memoryview):
        return tuple(route)
    if len(route) == PathRecord.SIZE:
        return (PathData(PathRecord.unpack(route)),)
    if not route or len(route) % PathData.SIZE:
        raise ValueError(f"a route is {PathRecord.SIZE} bytes or a multiple of {PathData.SIZE}, not {len(route)}")
    return tuple(PathData.unpack(route[at : at + PathData.SIZE]) for at in range(0, len(route), PathData.SIZE))


def sockaddr(address: Address | None) -> SockAddr | None:
    """An address in the form that users get: a Python socket address for IP, a SockAddrIB for InfiniBand."""
    return address.sockaddr if isinstance(address, InetAddr) else address
