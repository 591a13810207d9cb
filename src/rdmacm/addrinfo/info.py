"""The hints and results of rdma_getaddrinfo(3): ``struct rdma_addrinfo``."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypedDict, Unpack

from rdmacm.address import Address, InetAddr, SockAddr, SockAddrIB, format_address
from rdmacm.constants import RaiFlag
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.sa import PathData, PathRecord

# Plain ints, for the reason given in rdmacm.proto.plainints.
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

    ``flags``: :class:`RaiFlag`; ``family``: ``AF_INET``, ``AF_INET6`` or ``AF_IB`` (27); ``qp_type``: :class:`QPType`
    or 0; ``port_space``: :class:`PortSpace` or 0. ``src_addr`` and ``dst_addr`` are Python socket addresses or
    :class:`SockAddrIB`, and None where C has length 0. ``src_canonname`` and ``dst_canonname`` are the host's canonical
    name, on the passive and on the active side. ``route`` has the paths to the destination, and in hints restricts
    them; it may be given as bytes, an array of C's ``ibv_path_data`` (72 bytes each) or ``ibv_path_record`` (64 bytes
    each), and EINVAL is raised for anything else. ``connect`` has the bytes that a connection request must carry before
    the user's private data. ``device``, ``port_num`` and ``gid_index`` are not in C: the device, port and GID that the
    host would use, or None and 0 if there is no route or it was not looked up.
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

    def __post_init__(self) -> None:
        route = self.route
        is_usual = type(route) is tuple and (not route or (len(route) == 1 and type(route[0]) is PathData))
        if not is_usual:
            object.__setattr__(self, "route", _parse_route(route))

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

    ``flags``, ``family``, ``qp_type``, ``port_space``, ``src_addr`` and ``dst_addr`` are those of :class:`AddrInfo`.
    ``route`` may also be bytes: an array of C's ``ibv_path_data`` or ``ibv_path_record``.
    """

    flags: int | None
    family: int | None
    qp_type: int | None
    port_space: int | None
    src_addr: SockAddr | None
    dst_addr: SockAddr | None
    route: bytes | Sequence[PathData] | None


_NUMBERS = frozenset({"flags", "family", "qp_type", "port_space"})

#: Hints that leave everything open.
NO_HINTS = AddrInfo()


def make_hints(hints: AddrInfo | None = None, **fields: Unpack[HintFields]) -> AddrInfo | None:
    """Hints with some fields replaced; None without hints and fields.

    ``route`` may be bytes (any buffer): an array of ``ibv_path_data`` (72 bytes each) or of ``ibv_path_record`` (64
    bytes each); 576 bytes and multiples of it are read as ``ibv_path_data``. EINVAL for another length or type.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return hints
    if hints is None:
        return _hints_of(**given) if given.keys() <= _NUMBERS else AddrInfo(**given)  # type: ignore[arg-type]
    return replace(hints, **given)  # type: ignore[arg-type]


@lru_cache(maxsize=64, typed=True)
def _hints_of(**numbers: Any) -> AddrInfo:
    """Hints that consist of numbers: a program uses few, and making such an object takes longer than finding it."""
    return AddrInfo(**numbers)


def _parse_route(route: object) -> tuple[PathData, ...]:
    """The paths of a route: of ``PathData`` objects, or of the bytes of C structures."""
    if route is None:
        return ()
    try:
        data = bytes(memoryview(route))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # no buffer, or one that is released
        paths = tuple(route) if isinstance(route, Iterable) else (route,)
        for path in paths:
            if not isinstance(path, PathData):
                raise _bad_route(f"of type {type(path).__name__}") from None
        return paths
    for structure, unpack in ((PathData, PathData.unpack), (PathRecord, _unpack_record)):
        if data and len(data) % structure.SIZE == 0:
            return tuple(unpack(data[at : at + structure.SIZE]) for at in range(0, len(data), structure.SIZE))
    raise _bad_route(f"{len(data)} bytes")


def check_route(route: tuple[PathData, ...]) -> None:
    """EINVAL for a record with a field that is out of range."""
    for data in route:
        try:
            fits = PathData.unpack(data.pack()) == data
        except (struct.error, TypeError, ValueError):
            fits = False
        if not fits:
            raise cm_error(errno.EINVAL, f"a field of the route is out of range: {data.path}", "getaddrinfo")


def _unpack_record(data: bytes) -> PathData:
    return PathData(PathRecord.unpack(data))


def _bad_route(given: str) -> RdmaError:
    sizes = f"{PathData.SIZE} bytes for each ibv_path_data, or {PathRecord.SIZE} for each ibv_path_record"
    return cm_error(errno.EINVAL, f"a route cannot be {given}", "getaddrinfo", hint=f"PathData objects, {sizes}")


def sockaddr(address: Address | None) -> SockAddr | None:
    """An address in the form that users get: a Python socket address for IP, a SockAddrIB for InfiniBand."""
    return address.sockaddr if isinstance(address, InetAddr) else address
