"""Bit fields at fixed places, written the way the specification's tables are.

A message of the communication manager has up to forty fields, many of them a few bits wide and two of them in
pieces. A layout names them once, by offset and width, and both directions read that one table, so they cannot
disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rdmacm.address import Gid
from rdmacm.proto.wire import WireError

__all__ = ["Bits", "Bytes", "Layout"]


class Bits(NamedTuple):
    """An unsigned field: byte offset, how many bits of that byte come before it, width in bits.

    Two entries of one name are the upper and the lower part of it, in that order.
    """

    name: str
    offset: int
    before: int
    width: int
    is_flag: bool = False


class Bytes(NamedTuple):
    """Whole bytes: an offset, a length, and the type they become.

    A shorter value is padded with zeros when packed only where ``pads`` says so, as private data is.
    """

    name: str
    offset: int
    length: int
    type: Callable[[bytes], Any] = bytes
    pads: bool = False


class Layout:
    """The fields of a message of ``size`` bytes. Bits no field claims are sent 0 and ignored."""

    __slots__ = ("_bits", "_bytes", "_flags", "_limits", "size")

    def __init__(self, size: int, fields: Sequence[Bits | Bytes]) -> None:
        self.size = size
        self._bytes = [field for field in fields if isinstance(field, Bytes)]
        bits = [field for field in fields if isinstance(field, Bits)]
        self._flags = frozenset(field.name for field in bits if field.is_flag)
        widths: dict[str, int] = {}
        pieces: list[tuple[str, int, int, int]] = []
        for field in reversed(bits):
            below = widths.get(field.name, 0)
            shift = size * 8 - field.offset * 8 - field.before - field.width
            pieces.append((field.name, shift, (1 << field.width) - 1, below))
            widths[field.name] = below + field.width
        self._bits = pieces
        self._limits = {name: (1 << width) - 1 for name, width in widths.items()}

    def pack(self, message: object) -> bytes:
        """The bytes of an object that has the fields as attributes; ValueError for a value that does not fit."""
        word = 0
        for name, limit in self._limits.items():
            value = getattr(message, name)
            if not 0 <= value <= limit:
                raise ValueError(f"{type(message).__name__}.{name} {value} is outside 0..{limit}")
        for name, shift, mask, below in self._bits:
            word |= (int(getattr(message, name)) >> below & mask) << shift
        data = bytearray(self.size)
        for field in self._bytes:
            value = getattr(message, field.name)
            raw = value if isinstance(value, bytes) else value.pack()
            if len(raw) > field.length or (len(raw) < field.length and not field.pads):
                raise ValueError(
                    f"{type(message).__name__}.{field.name} has {len(raw)} bytes, the message room for {field.length}"
                )
            data[field.offset : field.offset + len(raw)] = raw
        # A part that is a layout of its own may leave bits to the whole, so the two are united.
        return (word | int.from_bytes(data, "big")).to_bytes(self.size, "big")

    def unpack(self, data: bytes | bytearray | memoryview) -> Mapping[str, Any]:
        """Field values by name; WireError for another length."""
        if len(data) != self.size:
            raise WireError(f"the message has {self.size} bytes, not {len(data)}")
        data = bytes(data)
        word = int.from_bytes(data, "big")
        values: dict[str, Any] = {}
        for name, shift, mask, below in self._bits:
            values[name] = values.get(name, 0) | (word >> shift & mask) << below
        for name in self._flags:
            values[name] = bool(values[name])
        for field in self._bytes:
            values[field.name] = field.type(data[field.offset : field.offset + field.length])
        return values


def gid(name: str, offset: int) -> Bytes:
    """A port address."""
    return Bytes(name, offset, 16, Gid)


def private_data(offset: int, length: int) -> Bytes:
    """The rest of a message, which is the application's."""
    return Bytes("private_data", offset, length, bytes, True)
