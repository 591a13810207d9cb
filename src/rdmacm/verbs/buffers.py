"""Buffers of the program: any object with Python's buffer protocol, seen as bytes without a copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

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


def address_of(view: memoryview) -> int:
    """The address of a buffer's first byte in this process."""
    return _address_function()(view)


def bytes_at(address: int, length: int) -> bytes | None:
    """A copy of the memory at an address of this process; None where not all of it is readable."""
    try:
        # The kernel checks the address: to read a wrong one directly would end the process.
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # another system
        from ctypes import string_at

        return string_at(address, length)
    try:
        found = os.pread(memory, length, address)
    except (OSError, OverflowError):
        return None
    finally:
        os.close(memory)
    return found if len(found) == length else None


@cache
def _address_function() -> Callable[[memoryview], int]:
    """It needs ctypes, which takes long to import."""
    import ctypes

    class PyBuffer(ctypes.Structure):
        """``Py_buffer`` of CPython's stable ABI; only its first field is read."""

        _fields_ = (
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.c_void_p),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        )

    # Prototypes for this module alone: the functions of ctypes.pythonapi are shared by all code of the process.
    get = ctypes.cast(
        ctypes.pythonapi.PyObject_GetBuffer,
        ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int),
    )
    release = ctypes.cast(ctypes.pythonapi.PyBuffer_Release, ctypes.PYFUNCTYPE(None, ctypes.POINTER(PyBuffer)))

    def address(view: memoryview) -> int:
        found = PyBuffer()
        get(view, ctypes.byref(found), 0)
        try:
            return found.buf or 0
        finally:
            release(ctypes.byref(found))

    return address
