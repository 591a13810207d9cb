"""The rdma_cm header in the private data of a request, and the room it leaves to the application.

A service id holds the port number but no address, so a REQ and a SIDR_REQ carry the IP addresses of both ends at the
start of their private data. Requests between InfiniBand addresses (AF_IB) have no such header, and the application has
the whole private data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from socket import AF_INET, AF_INET6

from rdmacm.address import InetAddr
from rdmacm.proto.cm.messages import DREP, DREQ, REJ, REP, REQ, RTU, SIDR_REP, SIDR_REQ, Message
from rdmacm.proto.wire import WireError

_HEADER = struct.Struct("!BBH16s16s")
HEADER_SIZE = _HEADER.size

_FAMILIES = {4: AF_INET, 6: AF_INET6}
#: The IP versions of a header. Other private data has none.
IP_VERSIONS = frozenset(_FAMILIES)
_WITH_HEADER = (REQ, SIDR_REQ)
_CARRIERS = (REQ, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP)


@dataclass(slots=True, unsafe_hash=True)  # not frozen, for the reason given for messages
class PrivateDataHeader:
    """The rdma_cm header, 36 bytes (InfiniBand Architecture annex A11, IP addressing).

    ``version`` is the first byte: major version in the upper half, minor in the lower. Only 0 is defined, and requests
    with another are refused. If ``ip_version`` is neither 4 nor 6, there is no header, but the private data of an
    AF_IB request. Addresses are packed: 4 bytes for IPv4, else 16.
    """

    ip_version: int
    source_port: int
    source: bytes
    destination: bytes
    version: int = 0

    @classmethod
    def between(cls, source: InetAddr, destination: InetAddr) -> PrivateDataHeader:
        """The header of a request from one socket address to another of the same family."""
        if source.family != destination.family:
            raise ValueError(f"{source} and {destination} are of different address families")
        return cls(4 if source.family == AF_INET else 6, source.port, source.ip, destination.ip)

    @property
    def family(self) -> int | None:
        """AF_INET, AF_INET6, or None if this is not a header."""
        return _FAMILIES.get(self.ip_version)

    @staticmethod
    def pack_between(source: InetAddr, destination: InetAddr) -> bytes:
        """``between(source, destination).pack()``, for addresses of one family."""
        ip_version = 0x40 if source.family == AF_INET else 0x60
        return _HEADER.pack(0, ip_version, source.port, source.ip.rjust(16, b"\0"), destination.ip.rjust(16, b"\0"))

    def pack(self) -> bytes:
        """The 36 bytes on the wire; ValueError for a field out of range."""
        want = 4 if self.ip_version == 4 else 16
        if len(self.source) != want or len(self.destination) != want:
            raise ValueError(f"addresses of IP version {self.ip_version} have {want} bytes")
        if not 0 <= self.ip_version <= 0xF:
            raise ValueError(f"IP version {self.ip_version} is outside 0..15")
        try:
            return _HEADER.pack(
                self.version,
                self.ip_version << 4,
                self.source_port,
                self.source.rjust(16, b"\0"),
                self.destination.rjust(16, b"\0"),
            )
        except struct.error as problem:
            raise ValueError(f"a field of the header is out of range: {problem}") from None

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> PrivateDataHeader:
        """The header at the start of private data; WireError if the data is too short."""
        if len(data) < HEADER_SIZE:
            raise WireError(f"the rdma_cm header has {HEADER_SIZE} bytes, not {len(data)}")
        version, ip_version, port, source, destination = _HEADER.unpack_from(data)
        ip_version >>= 4
        if ip_version == 4:
            source, destination = source[12:], destination[12:]
        return cls(ip_version, port, source, destination, version)


def user_capacity(kind: type[Message], family: int) -> int:
    """Bytes of private data a message leaves to the application, for addresses of ``family``."""
    if kind not in _CARRIERS:
        raise ValueError(f"an application does not send a {kind.__name__}")
    reserved = HEADER_SIZE if kind in _WITH_HEADER and family in (AF_INET, AF_INET6) else 0
    return kind.PRIVATE_DATA - reserved
