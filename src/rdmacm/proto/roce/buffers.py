"""Slices of scattered buffers, without copying."""

from __future__ import annotations

from collections.abc import Sequence


def total(segments: Sequence[memoryview]) -> int:
    """Bytes in all."""
    return sum(len(segment) for segment in segments)


def slices(segments: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """The pieces that make up ``[offset, offset + length)``."""
    if len(segments) == 1:
        return [segments[0][offset : offset + length]] if length else []
    out = []
    for segment in segments:
        if length <= 0:
            break
        if offset >= len(segment):
            offset -= len(segment)
            continue
        piece = segment[offset : offset + length]
        out.append(piece)
        length -= len(piece)
        offset = 0
    return out


def scatter(segments: Sequence[memoryview], offset: int, data: memoryview) -> None:
    """Copy ``data`` to ``offset`` on; the caller has checked that it fits."""
    position = 0
    for piece in slices(segments, offset, len(data)):
        piece[:] = data[position : position + len(piece)]
        position += len(piece)


def padded(pieces: list[memoryview], length: int) -> tuple[list[memoryview], int]:
    """The pieces with the zero bytes that round them up to four, and how many those are (PadCnt)."""
    pad = -length & 3
    if pad:
        pieces.append(memoryview(bytes(pad)))
    return pieces, pad
