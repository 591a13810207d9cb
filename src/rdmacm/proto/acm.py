"""The protocol between ibacm(8) and its clients: names and addresses in, paths out.

One message each way, on a stream socket: a header of 16 bytes and up to eight endpoints of 72, which is what
``infiniband/acm.h`` calls ``struct acm_msg``. Both ends are on one host, so the numbers of RESOLVE are in its own byte
order; addresses and path records are in network order, as everywhere.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from socket import AF_INET, AF_INET6

from rdmacm.address import ALL_BITS_64, InetAddr
from rdmacm.constants import PathFlag
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.proto.wire import Buffer, WireError

__all__ = [
    "HEADER_SIZE",
    "MAX_ENDPOINTS",
    "AcmReply",
    "AcmStatus",
    "decode_reply",
    "reply_size",
    "resolve_request",
]

_HEADER = struct.Struct("=BBB3xHQ")
_ENDPOINT = struct.Struct("=IHH64s")
HEADER_SIZE = _HEADER.size
#: Endpoints of one message, in either direction.
MAX_ENDPOINTS = 8

_VERSION = 1
_RESOLVE = 1
#: Marks an answer.  The daemon leaves it out of most.
_ACK = 0x80

_SOURCE = 1 << 0
_DESTINATION = 1 << 1
_NODELAY = 1 << 30

#: Types of endpoints.
_IP, _IP6, _PATH = 2, 3, 0x10
_FAMILIES = {_IP: (AF_INET, 4), _IP6: (AF_INET6, 16)}
_TYPES = {int(AF_INET): _IP, int(AF_INET6): _IP6}


class AcmStatus(IntEnum):
    """What became of a request; other numbers may come."""

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


@dataclass(frozen=True, slots=True)
class AcmReply:
    """An answer to RESOLVE: paths, best first, and the source address the daemon chose where it tells one.

    ``status`` is an :class:`AcmStatus`; anything but 0 comes without paths.
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
    """A RESOLVE message: which paths lead from an address to another, or between the GIDs of a path record.

    ``nodelay``: the daemon answers ENODATA at once where it would have to ask the network about the destination.
    ``tid`` has 64 bits and comes back. ValueError for one that does not fit.
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
    """How many bytes the answer to request ``tid`` has, header included, by its first 16.

    WireError where they are not the beginning of an answer to it.
    """
    return _parse_header(header, tid)[1]


def _parse_header(data: Buffer, tid: int) -> tuple[int, int]:
    """Status and size."""
    if len(data) < HEADER_SIZE:
        raise WireError(f"the header of an ibacm message has {HEADER_SIZE} bytes, not {len(data)}")
    version, opcode, status, size, answered = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise WireError(f"version {version} of ibacm's protocol is not {_VERSION}")
    if opcode & ~_ACK != _RESOLVE:
        raise WireError(f"operation 0x{opcode:x} does not answer RESOLVE")
    if answered != tid:
        raise WireError(f"an answer to request {answered}, not {tid}")
    count, rest = divmod(size - HEADER_SIZE, _ENDPOINT.size)
    if rest or not 0 <= count <= MAX_ENDPOINTS:
        raise WireError(f"no ibacm message has {size} bytes")
    return status, size


def decode_reply(data: Buffer, tid: int) -> AcmReply:
    """The answer to request ``tid``; WireError for anything else."""
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
