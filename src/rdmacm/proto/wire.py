"""What every wire format here has in common."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Buffer", "WireError"]

#: Bytes to read, one item a byte.
Buffer: TypeAlias = bytes | bytearray | memoryview


class WireError(ValueError):
    """Bytes that are not what they should be, or a field that does not fit its place on the wire.

    Parsers of what a peer sent raise this and nothing else, whatever they are given.
    """
