"""Registered memory: which bytes a key stands for, and who may touch them.

A region is known by one key for local and remote use, 32 random bits, so that a peer that was not told it cannot
guess it. Addresses are those the buffer has in this process. While a region is registered, its buffer is exported:
a bytearray cannot be resized beneath it.
"""

from __future__ import annotations

import errno
import random
from functools import cache
from typing import TYPE_CHECKING, Any

from rdmacm.enums import AccessFlag
from rdmacm.errors import cm_error
from rdmacm.proto.wire import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryTable", "Region", "RemoteMemory"]

# Plain numbers: an operation of two enum members takes as long as the rest of a look-up.
_LOCAL_WRITE = int(AccessFlag.LOCAL_WRITE)
_WRITES = int(AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC)
_REMOTE = int(AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC)


@cache
def _address_of() -> Callable[[memoryview], int]:
    """How to ask a buffer for its address; ctypes takes long to import and only this needs it."""
    import ctypes

    class PyBuffer(ctypes.Structure):
        """``Py_buffer`` of CPython's stable ABI: what counts here is its first field."""

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

    get: Any = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = (ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int)
    release: Any = ctypes.pythonapi.PyBuffer_Release
    release.argtypes = (ctypes.POINTER(PyBuffer),)

    def address(view: memoryview) -> int:
        found = PyBuffer()
        get(view, ctypes.byref(found), 0)
        try:
            return found.buf or 0
        finally:
            release(ctypes.byref(found))

    return address


class Region:
    """A memory region; see :class:`rdmacm.verbs.backend.MRBackend`. ``view`` is its bytes, empty once revoked."""

    __slots__ = ("_table", "access", "addr", "length", "lkey", "pd", "rkey", "view")

    def __init__(self, table: MemoryTable, pd: object, view: memoryview, access: int, key: int) -> None:
        self._table = table
        self.pd = pd
        self.view = view
        self.access = access
        self.addr = _address_of()(view)
        self.length = len(view)
        self.lkey = self.rkey = key

    def dereg(self) -> None:
        """Revoke the keys and let go of the buffer. What is posted or under way keeps its own hold on it."""
        self._table.forget(self)


class MemoryTable:
    """The regions of a device, by key. Used under the provider's lock."""

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self._regions: dict[int, Region] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, pd: object, buffer: Buffer, access: AccessFlag) -> Region:
        """A new region. EACCES where the buffer is read-only and ``access`` would have it written."""
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        if view.readonly and len(view) and access & _WRITES:
            raise cm_error(errno.EACCES, "the buffer is read-only", "reg_mr", hint="a bytearray, or only REMOTE_READ")
        key = 0
        while not key or key in self._regions:
            key = self._random.getrandbits(32)
        region = self._regions[key] = Region(self, pd, view, int(access), key)
        return region

    def forget(self, region: Region) -> None:
        """The region's keys mean nothing from now on."""
        if self._regions.pop(region.lkey, None) is not None:
            region.view = memoryview(b"")

    def local(self, pd: object, lkey: int, address: int, length: int, write: bool) -> memoryview | None:
        """The bytes of a scatter/gather element, None where key, range or permission is wrong."""
        region = self._regions.get(lkey)
        if region is None or region.pd != pd or (write and not region.access & _LOCAL_WRITE):
            return None
        offset = address - region.addr
        if offset < 0 or offset + length > region.length:
            return None
        return region.view[offset : offset + length]

    def remote(self, pd: object, rkey: int, address: int, length: int, access: int) -> memoryview | None:
        """The same for a peer's queue pair in protection domain ``pd``."""
        region = self._regions.get(rkey)
        if region is None or region.pd != pd or access & ~region.access:
            return None
        offset = address - region.addr
        if offset < 0 or offset + length > region.length:
            return None
        return region.view[offset : offset + length]

    def invalidate(self, pd: object, rkey: int) -> bool:
        """Take a region's remote permissions away; its owner still has it. False where the key is not one of ``pd``."""
        region = self._regions.get(rkey)
        if region is None or region.pd != pd:
            return False
        region.access &= ~_REMOTE
        return True


class RemoteMemory:
    """What the peer of a queue pair may touch: :class:`rdmacm.work.Memory` for one protection domain."""

    __slots__ = ("_pd", "_table")

    def __init__(self, table: MemoryTable, pd: object) -> None:
        self._table = table
        self._pd = pd

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        return self._table.remote(self._pd, rkey, address, length, int(access))

    def invalidate(self, rkey: int) -> bool:
        return self._table.invalidate(self._pd, rkey)
