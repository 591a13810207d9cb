"""Bit fields at fixed places, written the way the specification's tables are.

A message of the communication manager has up to forty fields, many of them a few bits wide and two of them in
pieces. A layout names them once, by offset and width, and both directions read that one table, so they cannot
disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

from rdmacm.address import Gid
from rdmacm.proto.wire import Buffer, WireError

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
    """The fields of a message of ``size`` bytes. Bits no field claims are sent 0 and ignored.

    ``pack(message)`` gives the bytes of an object that has the fields as attributes; ValueError for a value that does
    not fit. ``unpack(data)`` gives the field values by name; WireError for another length.

    Both are made of the table once, as Python functions around one ``struct``: to go through the table for each message
    takes ten times as long, which was half of what a connection costs.
    """

    __slots__ = ("fields", "pack", "size", "unpack")

    pack: Callable[[object], bytes]
    unpack: Callable[[Buffer], dict[str, Any]]

    def __init__(self, size: int, fields: Sequence[Bits | Bytes]) -> None:
        self.size = size
        self.fields = tuple(fields)
        self.pack, self.unpack = _compile(size, self.fields)


def _compile(
    size: int, fields: Sequence[Bits | Bytes]
) -> tuple[Callable[[object], bytes], Callable[[Buffer], dict[str, Any]]]:
    wholes = sorted((field for field in fields if isinstance(field, Bytes)), key=lambda field: field.offset)
    bits = [field for field in fields if isinstance(field, Bits)]
    # A part that is a layout of its own may leave bits to the whole: those are put in, and read, separately.
    shared = [bit for bit in bits if any(whole.offset <= bit.offset < whole.offset + whole.length for whole in wholes)]
    # What is between the parts is taken as one number each, as long as it has to be.
    runs: list[tuple[int, int]] = []
    shape, at = "!", 0
    for whole in [*wholes, Bytes("", size, 0)]:
        while at < whole.offset:
            length = next(n for n in (8, 4, 2, 1) if n <= whole.offset - at and not _splits(bits, at + n))
            shape += "BHIQ"[length.bit_length() - 1]
            runs.append((at, length))
            at += length
        if whole.length:
            shape += f"{whole.length}s"
            at += whole.length
    codec = Struct(shape)
    names: dict[str, Any] = {"pack": codec.pack, "unpack": codec.unpack, "wrong": _check, "short": _short}
    # A Gid by way of its class is checked to have the length that it has here.
    names |= {f"type_{w.name}": partial(bytes.__new__, Gid) if w.type is Gid else w.type for w in wholes}
    names |= {"fields": fields, "size": size}
    widths = {bit.name: sum(each.width for each in bits if each.name == bit.name) for bit in bits}

    # In pieces: the lower part of a field comes later in the table.
    pieces: list[tuple[Bits, int]] = []
    below = dict.fromkeys(widths, 0)
    for bit in reversed(bits):
        pieces.append((bit, below[bit.name]))
        below[bit.name] += bit.width

    terms: dict[int, list[str]] = {start: [] for start, _ in runs}
    values: dict[str, list[str]] = {name: [] for name in widths}
    late: list[str] = []
    for bit, low in pieces:
        mask = (1 << bit.width) - 1
        part = bit.name if bit.width == widths[bit.name] else f"({bit.name} >> {low} & {mask})"
        if bit in shared:
            shift = 8 - bit.before - bit.width
            late.append(f"  data[{bit.offset}] |= {part} << {shift}")
            value = f"data[{bit.offset}] >> {shift} & {mask}"
        else:
            start, length = next(run for run in runs if run[0] <= bit.offset < sum(run))
            shift = 8 * (start + length - bit.offset) - bit.before - bit.width
            terms[start].append(f"{part} << {shift}" if shift else part)
            value = f"w{start} >> {shift} & {mask}" if bit.width < 8 * length else f"w{start}"
        values[bit.name].append(f"({value}) << {low}" if low else f"({value})")

    flags = {bit.name for bit in bits if bit.is_flag}
    order = sorted([(start, f"w{start}") for start, _ in runs] + [(whole.offset, whole.name) for whole in wholes])
    lines = ["def pack_message(message):"]
    lines += [f"  {name} = message.{name}" for name in widths]
    lines += [f"  if not 0 <= {name} <= {(1 << width) - 1}: wrong(message, fields)" for name, width in widths.items()]
    for whole in wholes:
        lines.append(f"  {whole.name} = message.{whole.name}")
        if whole.type not in (bytes, Gid):
            lines.append(f"  {whole.name} = {whole.name}.pack()")
        compare = ">" if whole.pads else "!="
        lines.append(f"  if len({whole.name}) {compare} {whole.length}: wrong(message, fields)")
    items = [" | ".join(terms[start]) or "0" if start in terms else name for start, name in order]
    lines.append(f"  data = {'bytearray' if late else ''}(pack({', '.join(items)}))")
    lines += [*late, f"  return {'bytes(data)' if late else 'data'}"]
    lines += ["def unpack_message(data):", f"  if len(data) != {size}: raise short(size, data)"]
    lines.append(f"  {', '.join(name for _, name in order)}, = unpack(data)")
    found = [(name, " | ".join(parts)) for name, parts in values.items()]
    pairs = [f"'{name}': {f'bool({value})' if name in flags else value}" for name, value in found]
    pairs += [f"'{w.name}': {w.name if w.type is bytes else f'type_{w.name}({w.name})'}" for w in wholes]
    lines.append(f"  return {{{', '.join(pairs)}}}")
    exec("\n".join(lines), names)
    return names["pack_message"], names["unpack_message"]


def _splits(bits: Sequence[Bits], place: int) -> bool:
    """Whether a number that ends before byte ``place`` would end within a field."""
    return any(bit.offset < place < bit.offset + (bit.before + bit.width + 7) // 8 for bit in bits)


def _short(size: int, data: Buffer) -> WireError:
    return WireError(f"the message has {size} bytes, not {len(data)}")


def _check(message: object, fields: Sequence[Bits | Bytes]) -> None:
    """Say which field does not fit."""
    widths: Counter[str] = Counter()
    for field in fields:
        if isinstance(field, Bits):
            widths[field.name] += field.width
    for name, width in widths.items():
        value = getattr(message, name)
        if not 0 <= value < 1 << width:
            raise ValueError(f"{type(message).__name__}.{name} {value} is outside 0..{(1 << width) - 1}")
    for field in fields:
        if isinstance(field, Bytes):
            value = getattr(message, field.name)
            raw = value if isinstance(value, bytes) else value.pack()
            if len(raw) > field.length or (len(raw) < field.length and not field.pads):
                raise ValueError(
                    f"{type(message).__name__}.{field.name} has {len(raw)} bytes, the message room for {field.length}"
                )


def gid(name: str, offset: int) -> Bytes:
    """A port address."""
    return Bytes(name, offset, 16, Gid)


def private_data(offset: int, length: int) -> Bytes:
    """The rest of a message, which is the application's."""
    return Bytes("private_data", offset, length, bytes, True)
