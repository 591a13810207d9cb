"""The memory of operations: its layout, its content, and checks of the received bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from interop.ends import Access, Completion, Region, WcFlag, WcOpcode, pattern

__all__ = [
    "BLANK",
    "EVERY_ACCESS",
    "GAP",
    "blank",
    "check",
    "check_immediates",
    "check_lengths",
    "check_opcodes",
    "filled",
    "immediate",
    "message_sizes",
    "words_as_bytes",
    "places",
]

#: The byte that fills memory where nothing should be written.
BLANK = b"\xa5"
_WORD = struct.Struct("=Q")
#: Bytes left blank before and after each piece.
GAP = 8
EVERY_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC


def message_sizes(mtu: int) -> tuple[int, ...]:
    return (0, 1, mtu - 1, mtu, mtu + 1, 3 * mtu + 5, 100_000)


def places(sizes: Sequence[int]) -> list[int]:
    """The offsets of pieces of these sizes, with a gap around each."""
    places = [GAP]
    for size in sizes:
        places.append(places[-1] + size + GAP)
    return places[:-1]


def filled(sizes: Sequence[int], salt: int = 0) -> bytes:
    """Memory with a pattern in each piece."""
    memory = bytearray(blank(sizes))
    for place, size in zip(places(sizes), sizes, strict=True):
        memory[place : place + size] = pattern(size, salt + size)
    return bytes(memory)


def blank(sizes: Sequence[int]) -> bytes:
    return BLANK * (sum(sizes) + GAP * (len(sizes) + 1))


def check(region: Region, expected: bytes, what: str) -> None:
    found = region.read()
    if found != expected:
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
        raise AssertionError(f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, from {wrong[0]} to {wrong[-1]}")


def check_opcodes(completions: Sequence[Completion], opcode: WcOpcode) -> None:
    assert {wc.opcode for wc in completions} == {opcode}, completions


def check_lengths(completions: Sequence[Completion], sizes: Sequence[int]) -> None:
    lengths = [wc.byte_len for wc in completions]
    assert lengths == list(sizes), f"lengths {lengths}, not {sizes}"


def immediate(i: int) -> int:
    return 0xDEAD0000 + i


def check_immediates(completions: Sequence[Completion], expected: bool) -> None:
    found = [wc.extra if wc.flags & WcFlag.WITH_IMM else None for wc in completions]
    assert found == [immediate(i) if expected else None for i in range(len(found))], found


def words_as_bytes(*words: int) -> bytes:
    return b"".join(map(_WORD.pack, words))
