"""Inline data beyond what a device takes: they are copied to registered memory of the queue pair, and sent from there.

How much inline data a device takes differs by driver and by the other sizes of a queue pair: 64 bytes on siw, 512 on
rdma_rxe. A program that runs on one device would not run on another. What the program sees is the same: it may change
its data as soon as they are posted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from ctypes import string_at
from typing import TYPE_CHECKING

from rdmacm.errors import RdmaError
from rdmacm.kernel.verbs.memory import KernelMR
from rdmacm.proto.plainints import SEND_INLINE
from rdmacm.verbs.buffers import byte_view
from rdmacm.verbs.enums import WROpcode
from rdmacm.verbs.wr import SGE, SendWR

if TYPE_CHECKING:
    from rdmacm.kernel.verbs.opened import Handle, OpenedDevice

#: What devices offer, in bytes.
MAX_INLINE = 4096
_SIZES = (2048, 1024, 512, 256, 128, 64, 0)


def sizes_to_try(wanted: int) -> list[int]:
    """The sizes to make a queue pair with, of which the first is used that the device takes."""
    return [wanted, *(size for size in _SIZES if size < wanted)]


class InlineCopies:
    """The memory of one queue pair: two slots for each request that may be in its send queue.

    So those of a call never meet those of the requests in the queue. ``limit``: bytes that the device itself takes;
    ``room``: requests in the queue at the most; ``size``: bytes of one.
    """

    __slots__ = ("_data", "_limit", "_mr", "_next", "_room", "_size")

    def __init__(self, opened: OpenedDevice, pd: Handle, limit: int, room: int, size: int) -> None:
        self._limit = limit
        self._room = room
        self._size = size
        #: The slot of the next copy.
        self._next = 0
        self._data = bytearray(2 * room * size)
        self._mr = KernelMR(opened, pd, memoryview(self._data), 0)

    def post(self, wrs: list[SendWR], post: Callable[[list[SendWR], list[SendWR]], None]) -> None:
        """Post the requests, with others in place of those that have more inline data than the device takes.

        ``post`` is called with the requests to post and those that they stand for, as many as the queue takes at most.
        """
        for start in range(0, len(wrs), self._room):
            originals, first = wrs[start : start + self._room], self._next
            made = [self._copied(wr) if wr.send_flags & SEND_INLINE else wr for wr in originals]
            try:
                post(made, originals)
            except RdmaError as error:
                # The slots of those that are not posted come next again.
                self._next = first
                for new, old in zip(made, originals, strict=True):
                    if old is error.bad_wr:
                        break
                    self._advance(new is not old)
                raise

    def _advance(self, count: int) -> None:
        self._next = (self._next + count) % (2 * self._room)

    def _copied(self, wr: SendWR) -> SendWR:
        if wr.opcode == WROpcode.ATOMIC_WRITE:  # its 8 bytes are part of the request
            return wr
        parts = [string_at(part.addr, part.length) if isinstance(part, SGE) else byte_view(part) for part in wr.sg]
        length = sum(map(len, parts))
        if length <= self._limit:
            return wr
        begin = self._next * self._size
        self._advance(1)
        self._data[begin : begin + length] = b"".join(parts)
        made = copy.copy(wr)
        made.send_flags = wr.send_flags & ~SEND_INLINE
        made.sg = [SGE(self._mr.addr + begin, length, self._mr.lkey)]
        return made

    def close(self) -> None:
        """Deregister the memory. The queue pair is destroyed."""
        self._mr.dereg()
