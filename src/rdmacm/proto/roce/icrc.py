"""The invariant CRC of RoCEv2 packets (InfiniBand Architecture 7.8.1 and annex A17).

It is CRC-32, as Ethernet has it, over eight bytes of ones and the packet from its IP header to its last pad byte. What
routers may change counts as ones: type of service, time to live and header checksum of IPv4; traffic class, flow label
and hop limit of IPv6; the UDP checksum; FECN, BECN and the six bits after them. It follows the packet, least
significant byte first.

The CRC covers the IPv4 identification, which a socket does not report to its reader. It is found because the CRC is
affine: for messages of one length, ``crc(a ^ b) = crc(a) ^ crc(b) ^ crc(0)``. Running the CRC over n bytes is a linear
map that can be inverted, so the difference between the received CRC and the one for identification 0 can be taken back
to the identification, where it is the identification itself. It has 16 bits; the other 2^32 - 2^16 differences mean a
damaged packet. So damage passes with a chance of one in 65536, next to the checks of the links below. The compiled core
(core/engine/icrc.c) also computes the start value of each packet of a flow from one number by this property.

Linux's rxe computes another ICRC for FLUSH, in 6.2 to 6.12 at least: it takes the headers for the payload as well,
because its table has no place for the payload of this opcode. So its CRC covers everything from the BTH to the last pad
byte twice, the second time without the mask. Methods with ``twice`` are for that.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from rdmacm.proto.constants import ICRC_LENGTH, RESIDUE, SHORTEST_PACKET
from rdmacm.proto.wire import Buffer, WireError

#: The ICRC as it follows a packet.
ICRC_STRUCT = struct.Struct("<I")


def _find_crc32() -> Callable[[Buffer, int], int]:
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib.crc32
    found: Callable[[Buffer, int], int] = zlib_ng.crc32
    return found


#: zlib-ng's if it is installed, which is seven times as fast on long packets, else zlib's.
crc32: Callable[[Buffer, int], int] = _find_crc32()


# The eight bytes of ones, and the IP and UDP headers.
_IPV4 = struct.Struct("!8s BBHH HBBH 4s4s HHHH")
_IPV6 = struct.Struct("!8s I HBB 16s16s HHHH")
_ONES = b"\xff" * 8
_DONT_FRAGMENT = 0x4000
_UDP = 17


# --- linear maps of 32 bits to 32 bits ----------------------------------------------------------------------
#
# A map is four tables, one for each byte of its argument. To apply it takes four look-ups.

_Map: TypeAlias = tuple["array[int]", "array[int]", "array[int]", "array[int]"]


def _map(columns: Sequence[int]) -> _Map:
    """The map of bit i to ``columns[i]``."""
    tables = []
    for place in range(0, 32, 8):
        table = [0]
        for column in columns[place : place + 8]:
            table += [value ^ column for value in table]
        tables.append(array("I", table))
    a, b, c, d = tables
    return a, b, c, d


def _apply(linear: _Map, value: int) -> int:
    a, b, c, d = linear
    return a[value & 0xFF] ^ b[value >> 8 & 0xFF] ^ c[value >> 16 & 0xFF] ^ d[value >> 24]


_BITS = tuple(1 << i for i in range(32))


def _unwind_byte() -> _Map:
    """The map of a difference in the CRC to the difference before the last byte."""
    # A byte takes s to (s >> 8) ^ T[s & 0xFF], and all the T[i] differ in their top bytes.
    table = [crc32(bytes([i]), 0xFFFFFFFF) ^ 0xFFFFFFFF for i in range(256)]
    by_top = {value >> 24: i for i, value in enumerate(table)}
    columns = []
    for value in _BITS:
        i = by_top[value >> 24]
        columns.append((value ^ table[i]) << 8 & 0xFFFFFFFF | i)
    return _map(columns)


#: _UNWIND[k] takes a difference back by 2^k bytes.
_UNWIND = [_unwind_byte()]
for _k in range(16):
    _UNWIND.append(_map([_apply(_UNWIND[-1], _apply(_UNWIND[-1], bit)) for bit in _BITS]))


def _unwound(count: int, difference: int) -> int:
    """``difference`` taken back by ``count`` bytes."""
    for k, linear in enumerate(_UNWIND):
        if count >> k & 1:
            difference = _apply(linear, difference)
    return difference


#: The effect of ones in byte 4 of the BTH on the CRC, as a difference before the BTH.
_BTH4 = _unwound(4, 0xFF)
#: From the first byte of the IPv4 identification to the BTH.
_IDENTIFICATION_TO_BTH = 24


class Icrc:
    """The invariant CRC of the packets from one address and port to another.

    Addresses are binary, 4 or 16 bytes. Packets are sequences of buffers, from the BTH on; the first buffer holds at
    least the whole BTH.

    ``identification`` is that of the IPv4 header: 0 for a packet of an unconnected UDP socket with IP_PMTUDISC_DO, i
    for segment i of what it sends with UDP_SEGMENT. IPv6 has none, and the argument is ignored.

    >>> flow = Icrc(bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]), 50000)
    >>> packet = bytes.fromhex("0430ffff 00000013 80fedcba 68656c6c 6f000000")
    >>> flow.seal([packet]).hex()
    '069f330b'
    >>> flow.seal([packet], 0x1234).hex()
    '97361772'
    >>> hex(flow.solve([packet, bytes.fromhex("97361772")]))
    '0x1234'
    """

    __slots__ = ("_ends", "base", "is_ipv6")

    def __init__(self, source: Buffer, destination: Buffer, sport: int, dport: int = 4791) -> None:
        source, destination = bytes(source), bytes(destination)
        if len(source) != len(destination) or len(source) not in (4, 16):
            raise ValueError(f"addresses have 4 or 16 bytes each, not {len(source)} and {len(destination)}")
        self.is_ipv6: bool = len(source) == 16
        self._ends = source, destination, sport, dport
        #: The start value if the fields for lengths and the identification were 0. The core adds their effects.
        self.base: int = self._start(0, 0, 0)

    def _start(self, ip_length: int, udp_length: int, identification: int) -> int:
        if self.is_ipv6:
            header = _IPV6.pack(_ONES, 0x6FFFFFFF, ip_length, _UDP, 0xFF, *self._ends, udp_length, 0xFFFF)
        else:
            fields = 0x45, 0xFF, ip_length, identification, _DONT_FRAGMENT, 0xFF, _UDP, 0xFFFF
            header = _IPV4.pack(_ONES, *fields, *self._ends, udp_length, 0xFFFF)
        # Byte 4 of the BTH counts as ones and nearly always is 0, so the effect of that difference is in the start.
        return crc32(header, 0) ^ _BTH4

    def start(self, length: int, identification: int = 0) -> int:
        """The start value of ``crc32`` for a packet of ``length`` bytes, from its BTH to the end of its ICRC.

        For loops: if FECN, BECN and the bits after them are 0, ``crc32`` over the packet with this start value is its
        ICRC.
        """
        udp_length = 8 + length
        ip_length = udp_length if self.is_ipv6 else 20 + udp_length
        if length <= 0 or ip_length > 0xFFFF:
            raise WireError(f"no packet has {length} bytes after its UDP header")
        return self._start(ip_length, udp_length, identification)

    def _run(self, buffers: Sequence[Buffer], missing: int, identification: int) -> tuple[int, int]:
        """The CRC over the buffers of a packet that has ``missing`` more bytes, and the length of the whole."""
        length = missing
        for buffer in buffers:
            length += len(buffer)
        if length < SHORTEST_PACKET:
            raise WireError(f"no packet has {length} bytes after its UDP header")
        crc = self.start(length, identification)
        if masked := buffers[0][4]:
            crc ^= _unwound(4, masked)
        for buffer in buffers:
            crc = crc32(buffer, crc)
        return crc, length

    def seal(self, buffers: Sequence[Buffer], identification: int = 0) -> bytes:
        """The four bytes that follow a packet. WireError if there is no whole BTH."""
        return ICRC_STRUCT.pack(self._run(buffers, ICRC_LENGTH, identification)[0])

    def check(self, buffers: Sequence[Buffer], identification: int = 0) -> bool:
        """Whether the last four bytes are the ICRC of the others, with this identification."""
        try:
            return self._run(buffers, 0, identification)[0] == RESIDUE
        except WireError:
            return False

    def seal_twice(self, packet: Buffer, identification: int = 0) -> bytes:
        """:meth:`seal` as rxe does it for FLUSH."""
        crc = self._run([packet], ICRC_LENGTH, identification)[0]
        return ICRC_STRUCT.pack(crc32(packet, crc))

    def solve_twice(self, packet: memoryview, guess: int = 0) -> int | None:
        """:meth:`solve` for a FLUSH of rxe."""
        try:
            crc, length = self._run([packet[:-ICRC_LENGTH]], ICRC_LENGTH, guess)
        except WireError:
            return None
        return self._solve(crc32(packet, crc), 2 * length - ICRC_LENGTH, guess)

    def solve(self, buffers: Sequence[Buffer], guess: int = 0) -> int | None:
        """The identification with which the last four bytes are the ICRC of the others; None for a damaged packet.

        Fastest if ``guess`` is right. For an undamaged packet of IPv6 the result is ``guess``.
        """
        try:
            crc, length = self._run(buffers, 0, guess)
        except WireError:
            return None
        return self._solve(crc, length, guess)

    def _solve(self, crc: int, length: int, guess: int) -> int | None:
        """The identification, from the CRC with ``guess`` over ``length`` bytes after the UDP header."""
        if crc == RESIDUE:
            return guess
        if self.is_ipv6:
            return None
        # The CRC has the first byte in its low bits; the identification is sent most significant byte first.
        found = _unwound(length + _IDENTIFICATION_TO_BTH, crc ^ RESIDUE)
        return guess ^ (found >> 8 | (found & 0xFF) << 8) if found < 1 << 16 else None


@lru_cache(512)
def icrc_between(source: bytes, destination: bytes, sport: int) -> Icrc:
    """The :class:`Icrc` that all queue pairs share which send from an address and port to an address."""
    return Icrc(source, destination, sport)
