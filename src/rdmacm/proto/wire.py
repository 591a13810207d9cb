"""Types that all wire formats share."""

from __future__ import annotations

from typing import TypeAlias

#: Data to read; the items of a memoryview are single bytes.
Buffer: TypeAlias = bytes | bytearray | memoryview


class WireError(ValueError):
    """Bytes that are not a valid message, or a field that is out of range on the wire.

    Parsers of received data raise this and no other exception.
    """
