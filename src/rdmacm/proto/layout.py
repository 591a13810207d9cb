"""Messages with bit fields at fixed offsets, declared the way the specification's tables are.

A CM message has up to forty fields, many of them a few bits wide and some of them split in parts. A :class:`Layout`
lists each field once, by offset and width. Packing and unpacking are both generated from that list, so they cannot
disagree. A dataclass may say where its fields are in their annotations (:func:`laid_out`)::

    @dataclass(slots=True)
    @laid_out(8)
    class Ids(Packed):
        local_comm_id: Annotated[int, bits(0, 32)]
        remote_comm_id: Annotated[int, bits(4, 32)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

from rdmacm.address import Gid
from rdmacm.proto.wire import Buffer, WireError


class Bits(NamedTuple):
    """An unsigned field: byte offset, bits of that byte before the field, width in bits.

    Entries with the same name are the parts of one field, the upper ones first. A field that ``is_flag`` is a bool.
    """

    name: str
    offset: int
    before: int
    width: int
    is_flag: bool = False


class Bytes(NamedTuple):
    """Whole bytes: byte offset, length in bytes, and the type they are converted to.

    With ``pads`` a shorter value is padded with zeros when packed, as private data is.
    """

    name: str
    offset: int
    length: int
    type: Callable[[bytes], Any] = bytes
    pads: bool = False


Field: TypeAlias = Bits | Bytes


def bits(offset: int, width: int, *, before: int = 0) -> Bits:
    """:class:`Bits`, in the annotation of a field."""
    return Bits("", offset, before, width)


def whole(offset: int, length: int, type: Callable[[bytes], Any] | None = None, *, pads: bool = False) -> Bytes:
    """:class:`Bytes`, in the annotation of a field, which is of this type, or of the annotation's."""
    return Bytes("", offset, length, type or bytes, pads)


def rest(offset: int) -> Bytes:
    """The padded bytes up to the end of the message, in the annotation of a field."""
    return Bytes("", offset, 0, bytes, True)


class Layout:
    """The fields of a message of ``size`` bytes. Bits that no field covers are sent as 0 and ignored on receipt.

    ``pack(message)`` returns the bytes of an object that has the fields as attributes; ValueError for a value out of
    range. ``unpack(data)`` returns the field values by name; WireError for another length. ``fill(message, data)`` sets
    them as attributes, which takes half the time of a call of the class with them.

    They are generated at the first use, as Python functions around one ``struct``. Interpreting the list of fields for
    each message takes ten times as long, which was half of the cost of a connection.
    """

    __slots__ = ("fields", "fill", "pack", "size", "unpack")

    pack: Callable[[object], bytes]
    unpack: Callable[[Buffer], dict[str, Any]]
    fill: Callable[[object, Buffer], None]

    def __init__(self, size: int, fields: Sequence[Field]) -> None:
        self.size: int = size
        self.fields: tuple[Field, ...] = tuple(fields)

    if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name

        def __getattr__(self, name: str) -> object:
            """A function that is not generated yet; no program needs those of all messages."""
            if name not in ("pack", "unpack", "fill"):
                raise AttributeError(f"a Layout has no attribute {name!r}")
            self.pack, self.unpack, self.fill = _compile(self.size, self.fields)
            return object.__getattribute__(self, name)


class Packed:
    """A message that is packed and unpacked by its layout."""

    __slots__ = ()

    _LAYOUT: ClassVar[Layout]
    #: The size of the private data in bytes, of a message that has some.
    PRIVATE_DATA: ClassVar[int]

    def pack(self) -> bytes:
        """The bytes on the wire; ValueError for a field out of range."""
        return self._LAYOUT.pack(self)

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The message in these bytes; WireError for another length."""
        return cls(**cls._LAYOUT.unpack(data))


T = TypeVar("T", bound=Packed)


def laid_out(size: int) -> Callable[[type[T]], type[T]]:
    """Decorate what becomes a dataclass of ``size`` bytes on the wire, whose annotations say where its fields are.

    They are the types alone afterwards. The module that defines it may not have annotations as strings.
    """

    def decorate(kind: type[T]) -> type[T]:
        hints = kind.__annotations__
        placed = {name: hint for name, hint in hints.items() if hasattr(hint, "__metadata__")}
        hints.update((name, hint.__origin__) for name, hint in placed.items())
        fields = [
            _placed(place, name, hints[name], size) for name, hint in placed.items() for place in hint.__metadata__
        ]
        kind._LAYOUT = Layout(size, fields)
        for field in fields:
            if field.name == "private_data" and isinstance(field, Bytes):
                kind.PRIVATE_DATA = field.length
        return kind

    return decorate


def _placed(place: Field, name: str, kind: object, size: int) -> Field:
    if isinstance(place, Bits):
        return place._replace(name=name, is_flag=kind is bool)
    type = Gid if kind is Gid else place.type
    return place._replace(name=name, length=place.length or size - place.offset, type=type)


# -- planning ---------------------------------------------------------------------------------------------------------


class _Word(NamedTuple):
    """An integer item of the struct, which bit fields are shifted into; offset and length in bytes."""

    offset: int
    length: int

    @property
    def variable(self) -> str:
        return f"w{self.offset}"


class _Part(NamedTuple):
    """A bit field or one of its parts; ``low`` counts the bits of the field's value below this part."""

    bits: Bits
    low: int


class _Plan(NamedTuple):
    """How a layout maps to one ``struct`` format."""

    #: The format of the ``struct``, whose items are the words and blocks by offset.
    format: str
    words: list[_Word]
    blocks: list[Bytes]
    parts: list[_Part]
    #: Width in bits of each bit field, all parts together.
    widths: dict[str, int]

    def word_of(self, bits: Bits) -> _Word | None:
        """The word that holds a bit field; None for one that lies within a block, such as a nested layout."""
        return next((word for word in self.words if word.offset <= bits.offset < word.offset + word.length), None)

    def items(self) -> list[tuple[int, str]]:
        """(offset, variable) of each item of the struct, in order."""
        words = [(word.offset, word.variable) for word in self.words]
        return sorted(words + [(block.offset, block.name) for block in self.blocks])


def _plan(size: int, fields: Sequence[Field]) -> _Plan:
    """Cover the bytes between the blocks with the largest words that split no bit field."""
    blocks = sorted((field for field in fields if isinstance(field, Bytes)), key=lambda block: block.offset)
    bit_fields = [field for field in fields if isinstance(field, Bits)]
    words: list[_Word] = []
    struct_format, offset = "!", 0
    end = Bytes("", size, 0)
    for block in [*blocks, end]:
        while offset < block.offset:
            room = block.offset - offset
            length = next(n for n in (8, 4, 2, 1) if n <= room and not _splits(bit_fields, offset + n))
            struct_format += "BHIQ"[length.bit_length() - 1]
            words.append(_Word(offset, length))
            offset += length
        if block.length:
            struct_format += f"{block.length}s"
            offset += block.length
    widths: dict[str, int] = {}
    for bits in bit_fields:
        widths[bits.name] = widths.get(bits.name, 0) + bits.width
    # The lower part of a field comes later in the list of fields.
    parts: list[_Part] = []
    low = dict.fromkeys(widths, 0)
    for bits in reversed(bit_fields):
        parts.append(_Part(bits, low[bits.name]))
        low[bits.name] += bits.width
    return _Plan(struct_format, words, blocks, parts, widths)


def _splits(fields: Sequence[Bits], offset: int) -> bool:
    """Whether a word that ends before byte ``offset`` would end within a field."""
    return any(bits.offset < offset < bits.offset + (bits.before + bits.width + 7) // 8 for bits in fields)


# -- generating the functions -----------------------------------------------------------------------------------------


def _pack_source(plan: _Plan) -> list[str]:
    """The lines of ``pack_message(message)``."""
    terms: dict[str, list[str]] = {word.variable: [] for word in plan.words}
    overlaid: list[str] = []  # statements for bit fields within a block
    for bits, low in plan.parts:
        value = bits.name
        if bits.width != plan.widths[bits.name]:
            value = f"({value} >> {low} & {(1 << bits.width) - 1})"
        word = plan.word_of(bits)
        if word is None:
            overlaid.append(f"  data[{bits.offset}] |= {value} << {8 - bits.before - bits.width}")
        else:
            shift = _shift(bits, word)
            terms[word.variable].append(f"{value} << {shift}" if shift else value)
    lines = ["def pack_message(message):"]
    lines += [f"  {name} = message.{name}" for name in plan.widths]
    if plan.widths:  # what is left of a value to the left of its field; of a negative one, always something
        beyond = " | ".join(f"{name} >> {width}" for name, width in plan.widths.items())
        lines.append(f"  if {beyond}: raise out_of_range(message)")
    for block in plan.blocks:
        lines.append(f"  {block.name} = message.{block.name}")
        if block.type not in (bytes, Gid):
            lines.append(f"  {block.name} = {block.name}.pack()")
        compare = ">" if block.pads else "!="
        lines.append(f"  if len({block.name}) {compare} {block.length}: raise out_of_range(message)")
    items = [" | ".join(terms[name]) or "0" if name in terms else name for _, name in plan.items()]
    packed = f"pack({', '.join(items)})"
    if overlaid:
        return [*lines, f"  data = bytearray({packed})", *overlaid, "  return bytes(data)"]
    return [*lines, f"  return {packed}"]


def _unpack_source(plan: _Plan, size: int) -> list[str]:
    """The lines of ``unpack_message(data)`` and of ``fill_message(message, data)``."""
    values: dict[str, list[str]] = {name: [] for name in plan.widths}
    for bits, low in plan.parts:
        mask = (1 << bits.width) - 1
        word = plan.word_of(bits)
        if word is None:
            value = f"data[{bits.offset}] >> {8 - bits.before - bits.width} & {mask}"
        elif bits.width < 8 * word.length:
            value = f"{word.variable} >> {_shift(bits, word)} & {mask}"
        else:
            value = word.variable
        values[bits.name].append(f"({value}) << {low}" if low else f"({value})")
    flags = {bits.name for bits, _ in plan.parts if bits.is_flag}
    terms = {name: " | ".join(parts) for name, parts in values.items()}
    found = {name: f"bool({term})" if name in flags else term for name, term in terms.items()}
    for block in plan.blocks:
        found[block.name] = block.name if block.type is bytes else f"type_{block.name}({block.name})"
    read = [
        f"  if len(data) != {size}: raise wrong_length(data)",
        f"  {', '.join(name for _, name in plan.items())}, = unpack(data)",
    ]
    return [
        "def unpack_message(data):",
        *read,
        f"  return {{{', '.join(f'{name!r}: {value}' for name, value in found.items())}}}",
        "def fill_message(message, data):",
        *read,
        *(f"  message.{name} = {value}" for name, value in found.items()),
    ]


def _shift(bits: Bits, word: _Word) -> int:
    """How many bits of the word are below a field."""
    return 8 * (word.offset + word.length - bits.offset) - bits.before - bits.width


def _compile(
    size: int, fields: Sequence[Field]
) -> tuple[Callable[[object], bytes], Callable[[Buffer], dict[str, Any]], Callable[[object, Buffer], None]]:
    plan = _plan(size, fields)
    codec = Struct(plan.format)
    names: dict[str, Any] = {
        "pack": codec.pack,
        "unpack": codec.unpack,
        "out_of_range": lambda message: _out_of_range(message, plan),
        "wrong_length": lambda data: WireError(f"the message has {size} bytes, not {len(data)}"),
    }
    for block in plan.blocks:
        # Gid() would check the length, which is fixed here.
        names[f"type_{block.name}"] = partial(bytes.__new__, Gid) if block.type is Gid else block.type
    exec("\n".join([*_pack_source(plan), *_unpack_source(plan, size)]), names)
    return names["pack_message"], names["unpack_message"], names["fill_message"]


def _out_of_range(message: object, plan: _Plan) -> ValueError:
    """The error that names the first field that does not fit."""
    kind = type(message).__name__
    for name, width in plan.widths.items():
        value = getattr(message, name)
        if not 0 <= value < 1 << width:
            return ValueError(f"{kind}.{name} {value} is outside 0..{(1 << width) - 1}")
    for block in plan.blocks:
        value = getattr(message, block.name)
        raw = value if isinstance(value, bytes) else value.pack()
        if len(raw) > block.length or (len(raw) < block.length and not block.pads):
            return ValueError(f"{kind}.{block.name} has {len(raw)} bytes, the message room for {block.length}")
    raise AssertionError(f"every field of {message!r} fits")
