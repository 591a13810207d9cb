"""The 40 bytes before the payload of a received datagram: the global route header (InfiniBand Architecture 8.3).

On RoCEv2 they hold the packet's IP header (annex A17.4.5.2): that of IPv6 as it is; that of IPv4 in the last 20 bytes,
after 20 bytes that are undefined, and 0 here. Which of the two it is, a reader finds out as ``ibv_init_ah_from_wc(3)``
of libibverbs does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rdmacm.address import Gid
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.proto.wire import Buffer, WireError

#: The next header, or protocol, of RoCEv2.
NEXT_HEADER_UDP = 17
#: Linux's hop limit.
DEFAULT_HOP_LIMIT = 64

_IPV6 = struct.Struct("!IHBB16s16s")
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV4_AT = GRH_LENGTH - _IPV4.size
_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_VERSION_AND_LENGTH = 0x45
_DONT_FRAGMENT = 0x4000
_UDP_HEADER = 8


@dataclass(frozen=True, slots=True)
class GRH:
    """``struct ibv_grh``, or the IPv4 header in its place: the first 40 bytes of a received datagram.

    - ``sgid``, ``dgid``: the sender and the receiver, or the multicast group; of IPv4 as mapped GIDs.
    - ``paylen``: the bytes after this header; on RoCEv2 from the UDP header on.
    - ``version``: 6, or 4 for an IPv4 header.
    - ``traffic_class``: 8 bits; IPv4's type of service.
    - ``flow_label``: 20 bits; 0 with IPv4.
    - ``hop_limit``: 8 bits; IPv4's time to live.
    - ``next_hdr``: 17 (UDP) on RoCEv2, 0x1B on InfiniBand.
    - ``identification``: IPv4's, 16 bits.
    """

    sgid: Gid
    dgid: Gid
    paylen: int
    version: int = 6
    traffic_class: int = 0
    flow_label: int = 0
    hop_limit: int = DEFAULT_HOP_LIMIT
    next_hdr: int = NEXT_HEADER_UDP
    identification: int = 0

    @property
    def version_tclass_flow(self) -> int:
        """The first 32 bits of the header of IPv6."""
        return 6 << 28 | self.traffic_class << 20 | self.flow_label

    @classmethod
    def of_packet(
        cls,
        source: bytes,
        destination: bytes,
        length: int,
        identification: int = 0,
        traffic_class: int = 0,
        hop_limit: int = DEFAULT_HOP_LIMIT,
    ) -> GRH:
        """The header of a RoCEv2 packet between two packed IP addresses; ``length``: bytes from BTH to ICRC."""
        return cls(
            Gid.from_ip(source),
            Gid.from_ip(destination),
            _UDP_HEADER + length,
            version=4 if len(source) == 4 else 6,
            traffic_class=traffic_class,
            hop_limit=hop_limit,
            identification=identification,
        )

    def pack(self) -> bytes:
        """The 40 bytes."""
        if self.version == 4:
            total, source, destination = _IPV4.size + self.paylen, self.sgid[12:], self.dgid[12:]
            fields = (
                *(_VERSION_AND_LENGTH, self.traffic_class, total, self.identification, _DONT_FRAGMENT),
                *(self.hop_limit, self.next_hdr),
            )
            header = _IPV4.pack(*fields, 0, source, destination)
            return bytes(_IPV4_AT) + _IPV4.pack(*fields, _checksum(header), source, destination)
        return _IPV6.pack(self.version_tclass_flow, self.paylen, self.next_hdr, self.hop_limit, self.sgid, self.dgid)

    @classmethod
    def unpack(cls, data: Buffer) -> GRH:
        """The header in the first 40 bytes of ``data``; WireError if they are neither an IPv4 nor an IPv6 header."""
        if len(data) < GRH_LENGTH:
            raise WireError(f"a GRH has {GRH_LENGTH} bytes, not {len(data)}")
        header = bytes(memoryview(data)[:GRH_LENGTH])
        # The 20 bytes before an IPv4 header may be anything, so the header itself has to decide.
        ipv4 = header[_IPV4_AT:]
        looks_like_ipv6 = header[0] >> 4 == 6
        if looks_like_ipv6 and (ipv4[0] != _VERSION_AND_LENGTH or _checksum(ipv4)):
            word, length, next_hdr, hop_limit, source, destination = _IPV6.unpack(header)
            return cls(
                *(Gid(source), Gid(destination), length, 6, word >> 20 & 0xFF, word & 0xFFFFF),
                *(hop_limit, next_hdr),
            )
        if ipv4[0] >> 4 != 4:
            raise WireError("a GRH is neither an IPv6 header nor one of IPv4 after 20 bytes")
        _, tos, total, identification, _, ttl, protocol, _, source, destination = _IPV4.unpack(ipv4)
        return cls(
            *(Gid(_IPV4_MAPPED + source), Gid(_IPV4_MAPPED + destination), max(0, total - _IPV4.size), 4, tos, 0),
            *(ttl, protocol, identification),
        )


def _checksum(header: bytes) -> int:
    """The checksum of an IPv4 header; 0 for one that has its checksum in it."""
    total: int = sum(struct.unpack("!10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
