"""The invariant CRC of RoCEv2 packets (InfiniBand Architecture 7.8.1 and annex A17).

CRC-32, as Ethernet has it, over eight bytes of ones and the packet from its IP header to its last pad byte, with what
routers may change set to ones: type of service, time to live and header checksum of IPv4; traffic class, flow label
and hop limit of IPv6; the UDP checksum; FECN, BECN and the six bits after them.  It follows the packet with its least
significant byte first.

A packet is a few dozen bytes of headers a CRC has to run over again each time, only because two lengths and an
identification are among them.  Here the headers of a flow are run over once, which rests on the CRC being affine: for
messages of one length, ``crc(a ^ b) = crc(a) ^ crc(b) ^ crc(0)``.  So what a length, an identification or the
masked byte of the BTH do to the CRC is a number that depends neither on the flow nor on the data, and is exclusive-ored
to what the CRC starts with.  Per packet that leaves one pass over the bytes as they are sent, in as many pieces as
there are, none of them copied or masked.

The IPv4 identification is the one thing the CRC covers that a socket does not tell its reader.  The same property
finds it.  Running the CRC over n bytes is a linear map that can be inverted, so the difference between the CRC
received and the one computed for identification 0 can be carried back to the end of the UDP header.  There each
of the 16 bits of an identification stands for one known difference, and the 65536 that can come of them are exact
matches; the other 2^32 - 2^16 are a damaged packet.  That leaves damage a chance of one in 65536 to pass, next to
the checks of the links below.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

from rdmacm.proto.roce.opcodes import BTH_LENGTH
from rdmacm.proto.wire import Buffer, WireError

__all__ = ["ICRC_LENGTH", "RESIDUE", "Icrc", "crc32", "icrc_between"]

ICRC_LENGTH = 4


def _find_crc32() -> Callable[[Buffer, int], int]:
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib.crc32
    found: Callable[[Buffer, int], int] = zlib_ng.crc32
    return found


#: zlib-ng's where it is installed, which is seven times as quick on long packets, else zlib's.
crc32 = _find_crc32()

#: What ``crc32`` comes to when it runs over a packet and its own right value as well.
RESIDUE = 0x2144DF1C

# The headers, with the variable parts named: total length, identification, addresses, source port, destination port,
# UDP length.
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
    """What a UDP payload's length does to the CRC of the headers, compared to 0 in the length fields."""

    #: Longer ones are not RoCE packets, so their place is not worth keeping.
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
# A map is kept as four tables, what it makes of each byte in each of its four places: applying it is four look-ups.

_Map: TypeAlias = tuple["array[int]", "array[int]", "array[int]", "array[int]"]


def _map(columns: Sequence[int]) -> _Map:
    """The map that takes bit i to ``columns[i]``."""
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
    """The map that takes a difference in the CRC back to before a byte."""
    # A byte takes s to (s >> 8) ^ T[s & 0xFF], and all the T[i] differ in their top bytes.
    table = [crc32(bytes([i]), 0xFFFFFFFF) ^ 0xFFFFFFFF for i in range(256)]
    by_top = {value >> 24: i for i, value in enumerate(table)}
    columns = []
    for value in _BITS:
        i = by_top[value >> 24]
        columns.append((value ^ table[i]) << 8 & 0xFFFFFFFF | i)
    return _map(columns)


#: _UNWIND[k] takes a difference back over 2^k bytes.
_UNWIND = [_unwind_byte()]
for _ in range(15):
    _UNWIND.append(_map([_apply(_UNWIND[-1], _apply(_UNWIND[-1], bit)) for bit in _BITS]))


def _unwound(count: int, columns: Iterable[int]) -> list[int]:
    """``columns`` taken back over ``count`` bytes."""
    result = list(columns)
    for k, linear in enumerate(_UNWIND):
        if count >> k & 1:
            result = [_apply(linear, column) for column in result]
    return result


def _identifications() -> list[int]:
    """What each bit of an identification does to the CRC of the headers."""
    none = crc32(_ipv4(0, 0, bytes(4), bytes(4), 0, 0), 0)
    return [crc32(_ipv4(0, 1 << i, bytes(4), bytes(4), 0, 0), 0) ^ none for i in range(16)]


#: What an identification does to the CRC of the headers.
_IDENTIFICATION = _map(_identifications() + [0] * 16)

#: What a byte 4 of the BTH does to the CRC, as a difference before the BTH.
_BTH4 = tuple(_unwound(4, range(256)))


def _solutions() -> list[int]:
    """The columns of the map from a difference after the headers to the identification it comes of.

    The differences of the 16 bits are made a basis of all 32 with any others that are independent of them.  In that
    basis a difference an identification can make has the identification for its low half and 0 for its high half.
    """
    basis: list[tuple[int, int]] = []  # reduced: a vector with a highest bit of its own, and its coordinates

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
    """Maps that take a difference back over ``step`` bytes as often as their key says, made when first needed.

    A packet's length is split in two, so that a few dozen maps serve all of them, and so that there cannot be more
    than a few hundred however many lengths a stranger sends.
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

    Addresses are binary, 4 or 16 bytes.  Packets are given as sequences of buffers, from the BTH on; the first
    buffer holds at least the whole BTH.

    ``identification`` is that of the IPv4 header: 0 for what an unconnected UDP socket with IP_PMTUDISC_DO sends,
    i for segment i of what it sends with UDP_SEGMENT.  With IPv6 there is none, and it is not looked at.

    >>> flow = Icrc(bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]), 50000)
    >>> packet = bytes.fromhex("0430ffff 00000013 80fedcba 68656c6c 6f000000")
    >>> flow.seal([packet]).hex()
    '069f330b'
    >>> flow.seal([packet], 0x1234).hex()
    '97361772'
    >>> hex(flow.solve([packet, bytes.fromhex("97361772")]))
    '0x1234'
    """

    __slots__ = ("base", "deltas", "is_ipv6", "lengths")

    def __init__(self, source: Buffer, destination: Buffer, sport: int, dport: int = 4791) -> None:
        source, destination = bytes(source), bytes(destination)
        if len(source) != len(destination) or len(source) not in (4, 16):
            raise ValueError(f"addresses have 4 or 16 bytes each, not {len(source)} and {len(destination)}")
        self.is_ipv6 = len(source) == 16
        #: For loops: what the first 256 identifications do to :meth:`start`, by exclusive or.
        self.deltas: Sequence[int] = bytes(256) if self.is_ipv6 else _IDENTIFICATION[0]
        if self.is_ipv6:
            header = _ipv6(0, source, destination, sport, dport)
            self.lengths: dict[int, int] = _LENGTHS6
        else:
            header = _ipv4(0, 0, source, destination, sport, dport)
            self.lengths = _LENGTHS4
        # As if every BTH had 0 for byte 4, which is what is nearly always sent, and that were the mask.
        #: For the short way: ``base ^ lengths[length]`` is :meth:`start`.
        self.base = crc32(header, 0) ^ _BTH4[0xFF]

    def start(self, length: int, identification: int = 0) -> int:
        """What ``crc32`` starts with for a packet of ``length`` bytes from its BTH to the end of its ICRC.

        For loops: of a packet sent with FECN, BECN and the bits after them 0, the ICRC is ``crc32`` of all its
        bytes from there.
        """
        start = self.base ^ self.lengths[length]
        if identification and not self.is_ipv6:
            start ^= _IDENTIFICATION[0][identification & 0xFF] ^ _IDENTIFICATION[1][identification >> 8]
        return start

    def starts(self, length: int, identification: int, count: int) -> list[int]:
        """:meth:`start` for ``count`` packets of ``length`` bytes, with identifications that count up and wrap."""
        if identification + count <= 256:
            start = self.base ^ self.lengths[length]
            return [start ^ delta for delta in self.deltas[identification : identification + count]]
        return [self.start(length, number & 0xFFFF) for number in range(identification, identification + count)]

    def _run(self, buffers: Sequence[Buffer], missing: int, identification: int) -> tuple[int, int]:
        """The CRC over a packet that goes on for ``missing`` bytes after the buffers, and its whole length."""
        length = missing
        for buffer in buffers:
            length += len(buffer)
        if length < BTH_LENGTH + ICRC_LENGTH:
            raise WireError(f"no packet has {length} bytes after its UDP header")
        crc = self.start(length, identification)
        if masked := buffers[0][4]:
            crc ^= _BTH4[masked]
        for buffer in buffers:
            crc = crc32(buffer, crc)
        return crc, length

    def compute(self, buffers: Sequence[Buffer], identification: int = 0) -> int:
        """The ICRC of a packet that is given without it, as a number; WireError where there is no whole BTH."""
        return self._run(buffers, ICRC_LENGTH, identification)[0]

    def seal(self, buffers: Sequence[Buffer], identification: int = 0) -> bytes:
        """The four bytes that go after a packet; WireError where there is no whole BTH."""
        return self._run(buffers, ICRC_LENGTH, identification)[0].to_bytes(4, "little")

    def check(self, buffers: Sequence[Buffer], identification: int = 0) -> bool:
        """Whether the last four bytes are the ICRC of those before them, with this identification."""
        try:
            return self._run(buffers, 0, identification)[0] == RESIDUE
        except WireError:
            return False

    def solve(self, buffers: Sequence[Buffer], guess: int = 0) -> int | None:
        """The identification that makes the last four bytes the ICRC of those before them; None for a damaged packet.

        It is quickest when ``guess`` is right.  With IPv6 the answer for a packet that is right is ``guess``.
        """
        try:
            crc, length = self._run(buffers, 0, guess)
        except WireError:
            return None
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
