"""The invariant CRC of RoCEv2 packets (InfiniBand Architecture 7.8.1 and annex A17).

It is CRC-32, as Ethernet has it, over eight bytes of ones and the packet from its IP header to its last pad byte. What
routers may change counts as ones: type of service, time to live and header checksum of IPv4; traffic class, flow label
and hop limit of IPv6; the UDP checksum; FECN, BECN and the six bits after them. It follows the packet, least
significant byte first.

The IP and UDP headers of two packets of one flow differ only in their lengths and in the IPv4 identification. So the
CRC of the headers is computed once for a flow. This works because the CRC is affine: for messages of one
length, ``crc(a ^ b) = crc(a) ^ crc(b) ^ crc(0)``. The effect of a length, an identification or the masked byte of the
BTH on the CRC is a number that depends neither on the flow nor on the data, and is exclusive-ored to the start value of
the CRC. What is left for each packet is one pass over the bytes as they are sent, in any number of pieces, without a
copy or a mask.

The CRC covers the IPv4 identification, which a socket does not report to its reader. It is found by the same property.
Running the CRC over n bytes is a linear map that can be inverted, so the difference between the received CRC and the
one for identification 0 can be taken back to the end of the UDP header. There each bit of an identification stands for
one known difference. The 65536 combinations of these are exact matches; the other 2^32 - 2^16 differences mean a
damaged packet. So damage passes with a chance of one in 65536, next to the checks of the links below.

Linux's rxe computes another ICRC for FLUSH, in 6.2 to 6.12 at least: it takes the headers for the payload as well,
because its table has no place for the payload of this opcode. So its CRC covers everything from the BTH to the last pad
byte twice, the second time without the mask. Methods with ``twice`` are for that.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
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
crc32 = _find_crc32()


# The eight bytes of ones, and the IP and UDP headers.
_IPV4 = struct.Struct("!8s BBHH HBBH 4s4s HHHH")
_IPV6 = struct.Struct("!8s I HBB 16s16s HHHH")
_ONES = b"\xff" * 8
_DONT_FRAGMENT = 0x4000
_UDP = 17


def _ipv4(length: int, identification: int, source: bytes, destination: bytes, sport: int, dport: int) -> bytes:
    total = 28 + length if length else 0
    return _IPV4.pack(
        *(_ONES, 0x45, 0xFF, total, identification, _DONT_FRAGMENT, 0xFF, _UDP, 0xFFFF, source, destination),
        *(sport, dport, total and 8 + length, 0xFFFF),
    )


def _ipv6(length: int, source: bytes, destination: bytes, sport: int, dport: int) -> bytes:
    total = 8 + length if length else 0
    return _IPV6.pack(_ONES, 0x6FFFFFFF, total, _UDP, 0xFF, source, destination, sport, dport, total, 0xFFFF)


class _Lengths(dict[int, int]):
    """The effect of a UDP payload's length on the CRC of the headers, compared to 0 in the length fields."""

    #: Longer payloads are no RoCE packets, and their effects are not kept.
    KEEP = 8192

    def __init__(self, header: Callable[[int], bytes], longest: int) -> None:
        self._header = header
        self._none = crc32(header(0), 0)
        self._longest = longest

    def __missing__(self, length: int) -> int:
        if not 0 < length <= self._longest:
            raise WireError(f"no packet has {length} bytes after its UDP header")
        delta = crc32(self._header(length), 0) ^ self._none
        if length <= self.KEEP:
            self[length] = delta
        return delta


_LENGTHS4 = _Lengths(lambda length: _ipv4(length, 0, bytes(4), bytes(4), 0, 0), 65535 - 28)
_LENGTHS6 = _Lengths(lambda length: _ipv6(length, bytes(16), bytes(16), 0, 0), 65535 - 8)


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
for _ in range(15):
    _UNWIND.append(_map([_apply(_UNWIND[-1], _apply(_UNWIND[-1], bit)) for bit in _BITS]))


def _unwound(count: int, columns: Iterable[int]) -> list[int]:
    """``columns`` taken back by ``count`` bytes."""
    result = list(columns)
    for k, linear in enumerate(_UNWIND):
        if count >> k & 1:
            result = [_apply(linear, column) for column in result]
    return result


def _identifications() -> list[int]:
    """The effect of each bit of an identification on the CRC of the headers."""
    none = crc32(_ipv4(0, 0, bytes(4), bytes(4), 0, 0), 0)
    return [crc32(_ipv4(0, 1 << i, bytes(4), bytes(4), 0, 0), 0) ^ none for i in range(16)]


#: The effect of an identification on the CRC of the headers.
_IDENTIFICATION = _map(_identifications() + [0] * 16)

#: The effect of byte 4 of the BTH on the CRC, as a difference before the BTH.
_BTH4 = tuple(_unwound(4, range(256)))


def _solutions() -> list[int]:
    """The columns of the map of a difference after the headers to the identification that causes it.

    The differences of the 16 bits are extended to a basis of all 32 dimensions. In that basis the low half of a
    difference that an identification causes is the identification, and the high half is 0.
    """
    basis: list[tuple[int, int]] = []  # reduced: vectors with different highest bits, and their coordinates

    def reduce(vector: int, coordinates: int) -> tuple[int, int]:
        for other, theirs in basis:
            if vector ^ other < vector:
                vector, coordinates = vector ^ other, coordinates ^ theirs
        return vector, coordinates

    for candidate in [*_identifications(), *_BITS]:
        vector, coordinates = reduce(candidate, 1 << len(basis))
        if vector:
            basis.append((vector, coordinates))
            basis.sort(reverse=True)
    return [reduce(bit, 0)[1] for bit in _BITS]


class _Unwinding(dict[int, _Map]):
    """Maps that take a difference back by ``step`` bytes times their key, made when first needed.

    The length of a packet is split in two, so that a few dozen maps serve all usual lengths, and a few hundred serve
    every length that a damaged or forged packet may have.
    """

    def __init__(self, step: int, then: Sequence[int] = _BITS) -> None:
        self._step = step
        self._then = _map(then)

    def __missing__(self, times: int) -> _Map:
        self[times] = linear = _map([_apply(self._then, column) for column in _unwound(self._step * times, _BITS)])
        return linear


_SPLIT = 7
_LOW = (1 << _SPLIT) - 1
_COARSE = _Unwinding(1 << _SPLIT)
_FINE = _Unwinding(1, _solutions())


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

    __slots__ = ("base", "is_ipv6", "lengths")

    def __init__(self, source: Buffer, destination: Buffer, sport: int, dport: int = 4791) -> None:
        source, destination = bytes(source), bytes(destination)
        if len(source) != len(destination) or len(source) not in (4, 16):
            raise ValueError(f"addresses have 4 or 16 bytes each, not {len(source)} and {len(destination)}")
        self.is_ipv6 = len(source) == 16
        if self.is_ipv6:
            header = _ipv6(0, source, destination, sport, dport)
            self.lengths: dict[int, int] = _LENGTHS6
        else:
            header = _ipv4(0, 0, source, destination, sport, dport)
            self.lengths = _LENGTHS4
        # Byte 4 of the BTH counts as ones and nearly always is 0, so the effect of that difference is in the base.
        #: What :meth:`start` begins with.
        self.base = crc32(header, 0) ^ _BTH4[0xFF]

    def start(self, length: int, identification: int = 0) -> int:
        """The start value of ``crc32`` for a packet of ``length`` bytes, from its BTH to the end of its ICRC.

        For loops: if FECN, BECN and the bits after them are 0, ``crc32`` over the packet with this start value is its
        ICRC.
        """
        start = self.base ^ self.lengths[length]
        if identification and not self.is_ipv6:
            start ^= _IDENTIFICATION[0][identification & 0xFF] ^ _IDENTIFICATION[1][identification >> 8]
        return start

    def _run(self, buffers: Sequence[Buffer], missing: int, identification: int) -> tuple[int, int]:
        """The CRC over the buffers of a packet that has ``missing`` more bytes, and the length of the whole."""
        length = missing
        for buffer in buffers:
            length += len(buffer)
        if length < SHORTEST_PACKET:
            raise WireError(f"no packet has {length} bytes after its UDP header")
        crc = self.start(length, identification)
        if masked := buffers[0][4]:
            crc ^= _BTH4[masked]
        for buffer in buffers:
            crc = crc32(buffer, crc)
        return crc, length

    def compute(self, buffers: Sequence[Buffer], identification: int = 0) -> int:
        """The ICRC of a packet without it, as a number. WireError if there is no whole BTH."""
        return self._run(buffers, ICRC_LENGTH, identification)[0]

    def seal(self, buffers: Sequence[Buffer], identification: int = 0) -> bytes:
        """The four bytes that follow a packet. WireError if there is no whole BTH."""
        return self._run(buffers, ICRC_LENGTH, identification)[0].to_bytes(4, "little")

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
        difference = crc ^ RESIDUE
        if times := length >> _SPLIT:
            a, b, c, d = _COARSE[times]
            difference = (
                a[difference & 0xFF] ^ b[difference >> 8 & 0xFF] ^ c[difference >> 16 & 0xFF] ^ d[difference >> 24]
            )
        a, b, c, d = _FINE[length & _LOW]
        found = a[difference & 0xFF] ^ b[difference >> 8 & 0xFF] ^ c[difference >> 16 & 0xFF] ^ d[difference >> 24]
        return guess ^ found if found < 1 << 16 else None


@lru_cache(512)
def icrc_between(source: bytes, destination: bytes, sport: int) -> Icrc:
    """The :class:`Icrc` that all queue pairs share which send from an address and port to an address."""
    return Icrc(source, destination, sport)
