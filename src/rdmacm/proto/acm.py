"""The protocol between ibacm(8) and its clients, which resolves addresses to paths.

A request and its reply are one message each on a stream socket: a header of 16 bytes and up to eight endpoints of 72
bytes (``struct acm_msg`` of ``infiniband/acm.h``). Both ends run on one host, so the integers of RESOLVE are in native
byte order. Addresses and path records are in network byte order.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from socket import AF_INET, AF_INET6
from typing import NamedTuple

from rdmacm.address import ALL_BITS_64, InetAddr
from rdmacm.constants import PathFlag
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.proto.wire import Buffer, WireError

_HEADER = struct.Struct("=BBB3xHQ")
_ENDPOINT = struct.Struct("=IHH64s")
HEADER_SIZE = _HEADER.size
#: The most endpoints in a message.
MAX_ENDPOINTS = 8

_VERSION = 1
_RESOLVE = 1
#: Marks a reply. The daemon omits it from most replies.
_ACK = 0x80

_SOURCE = 1 << 0
_DESTINATION = 1 << 1
_NODELAY = 1 << 30

#: Endpoint types.
_IP, _IP6, _PATH = 2, 3, 0x10
_FAMILIES = {_IP: (AF_INET, 4), _IP6: (AF_INET6, 16)}
_TYPES = {int(AF_INET): _IP, int(AF_INET6): _IP6}


class AcmStatus(IntEnum):
    """The status of a reply. The daemon may send other numbers."""

    SUCCESS = 0
    ENOMEM = 1
    EINVAL = 2
    ENODATA = 3
    ENOTCONN = 5
    ETIMEDOUT = 6
    ESRCADDR = 7
    ESRCTYPE = 8
    EDESTADDR = 9
    EDESTTYPE = 10


class AcmReply(NamedTuple):
    """A reply to RESOLVE: paths, best first, and the source address that the daemon chose, if the reply has one.

    ``status`` is an :class:`AcmStatus`. A reply with another status than 0 has no paths.
    """

    status: int
    paths: tuple[PathData, ...] = ()
    source: InetAddr | None = None


def resolve_request(
    tid: int,
    *,
    source: InetAddr | None = None,
    destination: InetAddr | None = None,
    path: PathRecord | None = None,
    nodelay: bool = False,
) -> bytes:
    """A RESOLVE message, for the paths from one address to another or between the GIDs of a path record.

    ``nodelay``: the daemon replies ENODATA at once if it would have to query the network about the destination.
    ``tid`` is the transaction id, which the reply repeats; ValueError if it does not fit into 64 bits.
    """
    endpoints = []
    if source is not None:
        endpoints.append(_ENDPOINT.pack(_SOURCE, _TYPES[source.family], 0, source.ip))
    if destination is not None:
        flags = _DESTINATION | _NODELAY if nodelay else _DESTINATION
        endpoints.append(_ENDPOINT.pack(flags, _TYPES[destination.family], 0, destination.ip))
    if path is not None:
        endpoints.append(_ENDPOINT.pack(0, _PATH, 0, path.pack()))
    if not 0 <= tid <= ALL_BITS_64:
        raise ValueError(f"transaction id {tid} does not fit 64 bits")
    size = HEADER_SIZE + len(endpoints) * _ENDPOINT.size
    return _HEADER.pack(_VERSION, _RESOLVE, 0, size, tid) + b"".join(endpoints)


def reply_size(header: Buffer, tid: int) -> int:
    """The size in bytes of the reply to request ``tid``, header included, from its first 16 bytes.

    WireError if they are not the header of a reply to that request.
    """
    return _parse_header(header, tid)[1]


def _parse_header(data: Buffer, tid: int) -> tuple[int, int]:
    """Status and size in bytes."""
    if len(data) < HEADER_SIZE:
        raise WireError(f"the header of an ibacm message has {HEADER_SIZE} bytes, not {len(data)}")
    version, opcode, status, size, answered = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise WireError(f"version {version} of ibacm's protocol is not {_VERSION}")
    if opcode & ~_ACK != _RESOLVE:
        raise WireError(f"operation 0x{opcode:x} is not a reply to RESOLVE")
    if answered != tid:
        raise WireError(f"a reply to request {answered}, not {tid}")
    count, rest = divmod(size - HEADER_SIZE, _ENDPOINT.size)
    if rest or not 0 <= count <= MAX_ENDPOINTS:
        raise WireError(f"no ibacm message has {size} bytes")
    return status, size


def decode_reply(data: Buffer, tid: int) -> AcmReply:
    """The reply to request ``tid``; WireError for anything else."""
    status, size = _parse_header(data, tid)
    if len(data) != size:
        raise WireError(f"an ibacm message of {size} bytes has {len(data)}")
    if status:
        return AcmReply(status)
    paths, source = [], None
    for flags, kind, _, info in _ENDPOINT.iter_unpack(memoryview(data)[HEADER_SIZE:]):
        if kind == _PATH:
            paths.append(PathData(PathRecord.unpack(info), PathFlag(flags)))
        elif kind in _FAMILIES and flags & _SOURCE:
            family, length = _FAMILIES[kind]
            source = InetAddr(family, info[:length])
    return AcmReply(status, tuple(paths), source)
