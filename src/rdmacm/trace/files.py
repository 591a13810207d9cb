"""Readers of capture files: pcap and pcapng, in both byte orders, packet by packet.

A file may come from anywhere, and may end within a packet. What cannot be read any more is left out, and
:attr:`CaptureFile.damage` says so. Only a file that is no capture at all is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from rdmacm.proto.wire import WireError

#: Bytes of one read.
_CHUNK = 1 << 20
#: A packet or a block that is said to be longer is damaged. Loopback interfaces capture up to 64 KiB, others less.
_LONGEST = 1 << 24
_SECOND = 1_000_000_000

#: Magic numbers of pcap, as little-endian numbers: the byte order of the file and nanoseconds per unit of time. Those
#: of "modified" pcap have 8 bytes more in each header.
_PCAP_MAGIC = {
    0xA1B2C3D4: ("<", 1000, 16),
    0xA1B23C4D: ("<", 1, 16),
    0xA1B2CD34: ("<", 1000, 24),
    0xD4C3B2A1: (">", 1000, 16),
    0x4D3CB2A1: (">", 1, 16),
    0x34CDB2A1: (">", 1000, 24),
}
_SECTION_HEADER = 0x0A0D0D0A
_INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _ENHANCED_PACKET = 1, 2, 3, 6
_END_OF_OPTIONS, _TIME_RESOLUTION, _TIME_OFFSET = 0, 9, 14
_BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
#: A section has few interfaces; more are damage.
_MOST_INTERFACES = 4096

#: A packet: nanoseconds since 1970, link type, the bytes that hold it, where it begins in them and where it ends, and
#: its length on the wire.
Packet: TypeAlias = "tuple[int, int, bytes, int, int, int]"


class _Interface(NamedTuple):
    link_type: int
    #: Nanoseconds of a unit of time, as a fraction; and what is added, in nanoseconds.
    numerator: int
    denominator: int
    offset: int


class CaptureFile:
    """The packets of a capture file, in its order. WireError if the file is no capture.

    ``read(size)`` returns up to ``size`` bytes of the file, and nothing at its end.

    - ``damage``: why the rest of the file was left out, or "".
    - ``kind``: ``pcap`` or ``pcapng``.
    """

    damage: str = ""
    kind: str = ""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._data = b""
        #: Bytes of the file before ``_data``.
        self._before = 0
        self._fill(0, 12)
        if len(self._data) < 12:
            raise WireError("too short for a capture file" if self._data else "an empty file")
        magic = int.from_bytes(self._data[:4], "little")
        if magic == _SECTION_HEADER:
            self.kind, self._packets = "pcapng", self._pcapng()
        elif magic in _PCAP_MAGIC:
            self.kind, self._packets = "pcap", self._pcap(*_PCAP_MAGIC[magic])
        else:
            raise WireError("not a capture file (pcap or pcapng)")

    def __iter__(self) -> Iterator[Packet]:
        return self._packets

    def _fill(self, at: int, size: int) -> bool:
        """Drop what stands before ``at`` and read on, until ``size`` bytes are there; False at the end of the file."""
        self._before += at
        parts = [self._data[at:]]
        found = len(parts[0])
        while found < size:
            part = self._read(_CHUNK)
            if not part:
                break
            parts.append(part)
            found += len(part)
        self._data = b"".join(parts)
        return found >= size

    def _ends(self, what: str) -> None:
        self.damage = f"the file ends within a {what}, after {self._before + len(self._data)} bytes"

    def _bad(self, at: int, what: str) -> None:
        self.damage = f"{what} at byte {self._before + at}; the rest is left out"

    # -- pcap --------------------------------------------------------------------------------------------------

    def _pcap(self, order: str, unit: int, header: int) -> Iterator[Packet]:
        if not self._fill(0, 24):
            self._ends("header")
            return
        # The upper bits of the link type say whether a frame check sequence follows.
        link_type = struct.unpack_from(order + "I", self._data, 20)[0] & 0x0FFFFFFF
        unpack = struct.Struct(order + "IIII").unpack_from
        at, data = 24, self._data
        limit = len(data) - header
        while True:
            if at > limit:
                if not self._fill(at, header):
                    if self._data:
                        self._ends("packet")
                    return
                at, data = 0, self._data
                limit = len(data) - header
            seconds, fraction, captured, length = unpack(data, at)
            start = at + header
            end = start + captured
            if captured > _LONGEST:
                self._bad(at, f"a packet of {captured} bytes")
                return
            if end > len(data):
                if not self._fill(at, header + captured):
                    self._ends("packet")
                    return
                at, data = 0, self._data
                start, end = header, header + captured
                limit = len(data) - header
            yield seconds * _SECOND + fraction * unit, link_type, data, start, end, length
            at = end

    # -- pcapng ------------------------------------------------------------------------------------------------

    def _pcapng(self) -> Iterator[Packet]:
        order = "<"
        interfaces: list[_Interface] = []
        head = packet = struct.Struct("<II")
        at, data = 0, self._data
        last = 0
        while True:
            if at + 28 > len(data):
                # A block has at least 12 bytes, an enhanced packet block 32.
                self._fill(at, 28)
                at, data = 0, self._data
                if len(data) < 12:
                    if data:
                        self._ends("block")
                    return
            if data[at : at + 4] == b"\n\r\r\n":
                order = _BYTE_ORDERS.get(data[at + 8 : at + 12], "")
                if not order:
                    self._bad(at, "a section without byte order")
                    return
                interfaces = []
                head, packet = struct.Struct(order + "II"), struct.Struct(order + "IIIIIII")
            kind, size = head.unpack_from(data, at)
            if size < 12 or size & 3 or size > _LONGEST:
                self._bad(at, f"a block of {size} bytes")
                return
            if at + size > len(data):
                if not self._fill(at, size):
                    self._ends("block")
                    return
                at, data = 0, self._data
            if kind in (_ENHANCED_PACKET, _OLD_PACKET) and size >= 32:
                if kind == _ENHANCED_PACKET:
                    _, _, number, high, low, captured, length = packet.unpack_from(data, at)
                else:
                    number, _, high, low, captured, length = struct.unpack_from(order + "HHIIII", data, at + 8)
                if captured > size - 32 or number >= len(interfaces):
                    self._bad(at, "a packet that does not fit its block or interface")
                    return
                link_type, numerator, denominator, offset = interfaces[number]
                last = (high << 32 | low) * numerator // denominator + offset
                yield last, link_type, data, at + 28, at + 28 + captured, length
            elif kind == _INTERFACE and size >= 20:
                if len(interfaces) == _MOST_INTERFACES:
                    self._bad(at, "too many interfaces")
                    return
                interfaces.append(_interface(data[at + 8 : at + size - 4], order))
            elif kind == _SIMPLE_PACKET and size >= 16 and interfaces:
                length = struct.unpack_from(order + "I", data, at + 8)[0]
                yield last, interfaces[0].link_type, data, at + 12, at + 12 + min(length, size - 16), length
            at += size


def _interface(body: bytes, order: str) -> _Interface:
    """The interface of a description block: its link type and its unit of time, which is a microsecond by default."""
    resolution, seconds = 6, 0
    at = 8
    while at + 4 <= len(body):
        code, size = struct.unpack_from(order + "HH", body, at)
        value = body[at + 4 : at + 4 + size]
        if code == _END_OF_OPTIONS or len(value) < size:
            break
        if code == _TIME_RESOLUTION and size == 1:
            resolution = value[0]
        elif code == _TIME_OFFSET and size == 8:
            seconds = int.from_bytes(value, "little" if order == "<" else "big", signed=True)
        at += 4 + size + (-size & 3)
    # The highest bit: a power of two instead of ten.
    denominator = 1 << (resolution & 0x7F) if resolution & 0x80 else 10 ** min(resolution, 30)
    return _Interface(struct.unpack_from(order + "H", body)[0], _SECOND, denominator, seconds * _SECOND)
