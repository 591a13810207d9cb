"""Memory for RDMA: :class:`Region` is registered local memory, :class:`RemoteRegion` describes the peer's."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.pd import MR

_LAYOUT = struct.Struct("!QII")


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A range of the peer's memory: ``addr`` is its virtual address, ``rkey`` its key, ``length`` its length in bytes.

    A slice is a smaller range: ``remote[4096:8192]``. :meth:`pack` encodes it as 16 bytes for a message, in rping's
    layout.

    >>> part = RemoteRegion(0x1000, 0x77, 100)[10:30]
    >>> part
    RemoteRegion(addr=4106, rkey=119, length=20)
    >>> RemoteRegion.unpack(part.pack()) == part
    True
    """

    addr: int
    rkey: int
    length: int

    def pack(self) -> bytes:
        """Encode as 16 bytes: address (64 bits), rkey and length (32 bits each), all in network byte order.

        Raises ValueError for a length of 4 GiB or more; send slices instead.
        """
        try:
            return _LAYOUT.pack(self.addr, self.rkey, self.length)
        except struct.error:
            raise ValueError(f"{self} does not fit in 64, 32 and 32 bits") from None

    @classmethod
    def unpack(cls, data: Buffer) -> RemoteRegion:
        """Decode the first 16 bytes of a message; raises ValueError for fewer."""
        view = byte_view(data)
        if len(view) < _LAYOUT.size:
            raise ValueError(f"a packed region has {_LAYOUT.size} bytes, not {len(view)}")
        return cls(*_LAYOUT.unpack_from(view))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> RemoteRegion:
        """Return the range ``[start:stop]``, in bytes; raises IndexError when it is not within the region."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("a remote region is sliced as [start:stop]")
        start = 0 if part.start is None else part.start
        stop = self.length if part.stop is None else part.stop
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"[{start}:{stop}] is outside a remote region of {self.length} bytes")
        return RemoteRegion(self.addr + start, self.rkey, stop - start)


class Region:
    """Registered local memory, made by ``conn.register()``, until :meth:`close` or the end of its connection.

    The buffer is referenced, not copied: RDMA WRITEs of the peer appear in it. A bytearray cannot be resized while it
    is registered.

    Attributes:

    - ``mr``: the verbs memory region.
    - ``view``: the registered bytes.
    - ``remote``: the description to send to the peer.
    """

    __slots__ = ("__weakref__", "_on_close", "mr", "remote", "view")

    def __init__(self, mr: MR, buffer: Buffer, on_close: Callable[[Region], None]) -> None:
        self.mr: MR = mr
        self.view: memoryview[int] = byte_view(buffer)
        self.remote: RemoteRegion = RemoteRegion(mr.addr, mr.rkey, len(self.view))
        self._on_close: Callable[[Region], None] | None = on_close

    def close(self) -> None:
        """Deregister the memory: the rkey becomes invalid and the buffer is released. Closing twice is allowed."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)
            self.mr.close()
            with contextlib.suppress(BufferError):  # the application still holds a slice of the view
                self.view.release()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._on_close is None

    def __len__(self) -> int:
        return self.remote.length

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"0x{self.remote.addr:x}, rkey 0x{self.remote.rkey:x}"
        return f"<Region {self.remote.length} bytes, {state}>"
