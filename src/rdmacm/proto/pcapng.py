"""Capture files in the pcapng format (IETF draft-ietf-opsawg-pcapng), as Wireshark and tcpdump read them.

A file has a section header, a description of each interface, and a block for each packet. A block has its length at
both ends, so a file that ends between two blocks is complete, and one that ends within a block is readable up to there.
All numbers are little-endian; the magic number in the section header gives the byte order.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from rdmacm.proto.wire import Buffer, WireError

LINKTYPE_ETHERNET = 1

_SECTION_HEADER = 0x0A0D0D0A
_INTERFACE_DESCRIPTION = 1
_ENHANCED_PACKET = 6
_BYTE_ORDER_MAGIC = 0x1A2B3C4D
_UNKNOWN_LENGTH = 0xFFFFFFFFFFFFFFFF

# Option codes: of any block, then those of each block.
_END_OF_OPTIONS, _COMMENT = 0, 1
_SHB_OS, _SHB_USERAPPL = 3, 4
_IF_NAME, _IF_TSRESOL = 2, 9
_EPB_FLAGS = 2

_OPTION = struct.Struct("<HH")
_BLOCK = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_SHB = struct.Struct("<IHHQ")
_IDB = struct.Struct("<HHI")
_EPB = struct.Struct("<IIIIIII")


class Direction(IntEnum):
    """The direction of a packet: the low bits of epb_flags."""

    UNKNOWN = 0
    INBOUND = 1
    OUTBOUND = 2


def _option(code: int, value: bytes) -> bytes:
    if len(value) > 0xFFFF:
        raise WireError(f"an option of a capture file has at most 65535 bytes, not {len(value)}")
    return _OPTION.pack(code, len(value)) + value + bytes(-len(value) & 3)


def _text(code: int, value: str) -> bytes:
    return _option(code, value.encode(errors="backslashreplace")) if value else b""


def _block(kind: int, body: bytes) -> bytes:
    length = len(body) + 12
    return _BLOCK.pack(kind, length) + body + _LENGTH.pack(length)


_END = _option(_END_OF_OPTIONS, b"")


def section_header(application: str, system: str = "") -> bytes:
    """The first block of a file, with the program that writes it and the operating system it runs on."""
    options = _text(_SHB_OS, system) + _text(_SHB_USERAPPL, application)
    return _block(_SECTION_HEADER, _SHB.pack(_BYTE_ORDER_MAGIC, 1, 0, _UNKNOWN_LENGTH) + options + _END)


def interface_description(name: str) -> bytes:
    """An interface with Ethernet frames and times in nanoseconds. Packets number interfaces from 0, in file order."""
    options = _text(_IF_NAME, name) + _option(_IF_TSRESOL, b"\x09")
    return _block(_INTERFACE_DESCRIPTION, _IDB.pack(LINKTYPE_ETHERNET, 0, 0) + options + _END)


#: The options of a packet without a comment.
_FLAGS = [_option(_EPB_FLAGS, _LENGTH.pack(direction)) + _END for direction in Direction]


def enhanced_packet(
    frame: Buffer, nanoseconds: int, direction: Direction = Direction.UNKNOWN, comment: str = "", interface: int = 0
) -> bytes:
    """A packet: a whole frame with its timestamp in nanoseconds since 1970-01-01 UTC."""
    size = len(frame)
    options = _text(_COMMENT, comment) + _FLAGS[direction]
    padding = -size & 3
    length = _EPB.size + size + padding + len(options) + 4
    head = _EPB.pack(
        _ENHANCED_PACKET,
        length,
        interface,
        nanoseconds >> 32 & 0xFFFFFFFF,
        nanoseconds & 0xFFFFFFFF,
        size,
        size,
    )
    return b"".join((head, frame, bytes(padding), options, _LENGTH.pack(length)))
