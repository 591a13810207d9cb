"""Slices of the scattered buffers of a work request, without copying.

All functions raise :class:`LocalProtectionError` if a buffer cannot be accessed any more.
"""

from __future__ import annotations

from collections.abc import Sequence


class LocalProtectionError(Exception):
    """A local buffer was released, or is read-only and has to be written."""


def total(segments: Sequence[memoryview]) -> int:
    """The bytes of all segments together."""
    try:
        return sum(map(len, segments))
    except ValueError as error:
        raise LocalProtectionError from error


def slices(segments: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """The pieces of the segments that hold ``length`` bytes from ``offset`` on."""
    out = []
    try:
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
    except ValueError as error:
        raise LocalProtectionError from error
    return out


def scatter(segments: Sequence[memoryview], offset: int, data: memoryview) -> None:
    """Copy ``data`` into the segments from ``offset`` on. The caller has checked that it fits."""
    try:
        if len(segments) == 1:
            segments[0][offset : offset + len(data)] = data
            return
        position = 0
        for piece in slices(segments, offset, len(data)):
            piece[:] = data[position : position + len(piece)]
            position += len(piece)
    except (ValueError, TypeError) as error:
        raise LocalProtectionError from error


_PADDING = tuple(memoryview(bytes(count)) for count in range(4))


def padded(pieces: list[memoryview], length: int) -> tuple[list[memoryview], int]:
    """The pieces with the zero bytes that pad them to a multiple of four, and the number of those (PadCnt)."""
    pad = -length & 3
    if pad:
        pieces.append(_PADDING[pad])
    return pieces, pad
