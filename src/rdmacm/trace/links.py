"""What a frame carries: the packet of IP or InfiniBand behind the headers of the link.

Each link type (LINKTYPE of tcpdump.org) has a function from the bytes, where the frame begins and where it ends to the
protocol of the packet, an EtherType or one of the numbers below, and where that begins. Bytes that are not there make
the protocol :data:`NOTHING`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

IPV4, IPV6 = 0x0800, 0x86DD
ARP_PACKET = 0x0806
#: RoCEv1: a GRH follows the Ethernet header.
ROCE_V1 = 0x8915
#: Not EtherTypes: a frame without a packet, and a packet of InfiniBand, which begins with its LRH.
NOTHING, INFINIBAND = 0, 1

ETHERNET = 1

_VLAN = frozenset((0x8100, 0x88A8, 0x9100))
#: Tags that a frame has at most.
_MOST_TAGS = 4
#: Address families of IPv6 as the loopback interfaces of BSDs, macOS and Linux number them.
_FAMILY_IPV4, _FAMILIES_IPV6 = 2, frozenset((10, 24, 28, 30))
_ERF_ETHERNET, _ERF_INFINIBAND = frozenset((2, 11, 16, 20)), 21

Finder: TypeAlias = "Callable[[bytes, int, int], tuple[int, int]]"


def _tagged(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The protocol whose number stands at ``at``, behind VLAN tags."""
    for _ in range(_MOST_TAGS + 1):
        if at + 2 > end:
            return NOTHING, at
        kind = data[at] << 8 | data[at + 1]
        if kind not in _VLAN:
            return (kind if kind > INFINIBAND else NOTHING), at + 2
        at += 4
    return NOTHING, at


def _ethernet(data: bytes, at: int, end: int) -> tuple[int, int]:
    return _tagged(data, at + 12, end)


def _cooked(data: bytes, at: int, end: int) -> tuple[int, int]:
    return _tagged(data, at + 14, end)


def _cooked2(data: bytes, at: int, end: int) -> tuple[int, int]:
    kind = int.from_bytes(data[at : at + 2], "big") if at + 20 <= end else NOTHING
    # The tag stands in the place of the next protocol, behind the header.
    return _tagged(data, at + 22, end) if kind in _VLAN else ((kind if kind > INFINIBAND else NOTHING), at + 20)


def _raw(data: bytes, at: int, end: int) -> tuple[int, int]:
    version = data[at] >> 4 if at < end else 0
    return (IPV4 if version == 4 else IPV6 if version == 6 else NOTHING), at


def _loopback(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at + 4 > end:
        return NOTHING, at
    # In the byte order of the host that captured, but a family is below 256.
    family = data[at] or data[at + 3]
    return (IPV4 if family == _FAMILY_IPV4 else IPV6 if family in _FAMILIES_IPV6 else NOTHING), at + 4


def _infiniband(data: bytes, at: int, end: int) -> tuple[int, int]:  # noqa: ARG001
    return INFINIBAND, at


def _erf(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Endace's record: 16 bytes, then extension headers, whose first bit says whether another one follows."""
    if at + 16 > end:
        return NOTHING, at
    more, kind = data[at + 8] & 0x80, data[at + 8] & 0x7F
    at += 16
    while more:
        if at + 8 > end:
            return NOTHING, at
        more = data[at] & 0x80
        at += 8
    if kind in _ERF_ETHERNET:
        return _ethernet(data, at + 2, end)
    return (INFINIBAND if kind == _ERF_INFINIBAND else NOTHING), at


#: The link types that are read.
FINDERS: dict[int, Finder] = {
    0: _loopback,
    ETHERNET: _ethernet,
    12: _raw,
    14: _raw,
    101: _raw,
    108: _loopback,
    113: _cooked,
    197: _erf,
    228: _raw,
    229: _raw,
    247: _infiniband,
    276: _cooked2,
}
