"""Slices of scattered buffers, without copying.

All of these raise :class:`LocalProtectionError` where a buffer cannot be touched any more.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LocalProtectionError", "located", "padded", "scatter", "slices", "total"]


class LocalProtectionError(Exception):
    """A local buffer that was released, or is read-only and was to be written."""


def total(segments: Sequence[memoryview]) -> int:
    """Bytes in all."""
    try:
        return len(segments[0]) if len(segments) == 1 else sum(map(len, segments))
    except ValueError as error:
        raise LocalProtectionError from error


def located(segments: Sequence[memoryview], offset: int) -> tuple[memoryview, int]:
    """The segment that byte ``offset`` is in, and where in it; the caller has checked that there is one."""
    try:
        for segment in segments:
            if offset < len(segment):
                break
            offset -= len(segment)
    except ValueError as error:
        raise LocalProtectionError from error
    return segment, offset


def slices(segments: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """The pieces that make up ``[offset, offset + length)``."""
    out = []
    try:
        if len(segments) == 1:
            return [segments[0][offset : offset + length]] if length else []
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
    """Copy ``data`` to ``offset`` on; the caller has checked that it fits."""
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
    """The pieces with the zero bytes that round them up to four, and how many those are (PadCnt)."""
    pad = -length & 3
    if pad:
        pieces.append(_PADDING[pad])
    return pieces, pad
