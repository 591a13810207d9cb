"""Buffers of the program: any object with Python's buffer protocol, seen as bytes without a copy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

__all__ = ["Buffer", "byte_view"]

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
elif TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Buffer as _Buffer

    class _Array(Protocol):
        """An array of numpy, which says in Python 3.12 and later only that it is a buffer."""

        @property
        def __array_interface__(self) -> dict[str, Any]: ...

    Buffer: TypeAlias = "_Buffer | _Array"
else:
    Buffer = object  # for annotations


def byte_view(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, in the order of its memory: also of an array in Fortran order.

    TypeError: not a buffer. BufferError: not contiguous.
    """
    any_buffer: Any = buffer
    view = memoryview(any_buffer)
    if view.c_contiguous:
        # A view without items has no shape that could be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    from pickle import PickleBuffer

    return PickleBuffer(any_buffer).raw()
