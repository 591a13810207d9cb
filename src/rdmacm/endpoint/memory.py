"""Memory that peers may touch: :class:`Region` is ours, :class:`RemoteRegion` says where the peer's is."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rdmacm.verbs.pd import MR
from rdmacm.verbs.wr import Buffer

__all__ = ["Region", "RemoteRegion"]

_LAYOUT = struct.Struct("!QII")


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A range of a peer's memory: where it is, the key to it, and how many bytes.

    A slice is a part of it: ``remote[4096:8192]``. :meth:`pack` makes the 16 bytes that go into a message, the layout
    of rping's.

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
        """16 bytes: address (64 bits), key and length (32 bits each) in network order.

        ValueError for a region of 4 GiB or more: send a part of it.
        """
        try:
            return _LAYOUT.pack(self.addr, self.rkey, self.length)
        except struct.error:
            raise ValueError(f"{self} does not fit in 64, 32 and 32 bits") from None

    @classmethod
    def unpack(cls, data: Buffer) -> RemoteRegion:
        """The region in the first 16 bytes of a message; ValueError where there are fewer."""
        if len(data) < _LAYOUT.size:
            raise ValueError(f"a region has {_LAYOUT.size} bytes, not {len(data)}")
        return cls(*_LAYOUT.unpack_from(data))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> RemoteRegion:
        """The part from ``start`` up to ``stop``; IndexError where that is not within the region."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("a part of a region is [start:stop]")
        start = 0 if part.start is None else part.start
        stop = self.length if part.stop is None else part.stop
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"[{start}:{stop}] is not within {self.length} bytes")
        return RemoteRegion(self.addr + start, self.rkey, stop - start)


class Region:
    """Registered memory of ours, made by ``conn.register()``; it ends with :meth:`close`, or with its connection.

    ``mr`` is the memory region of the verbs, ``view`` its bytes, ``remote`` what to tell the peer. The buffer is
    referred to, not copied: what the peer writes appears in it. A bytearray cannot be resized meanwhile.
    """

    __slots__ = ("__weakref__", "_forget", "mr", "remote", "view")

    def __init__(self, mr: MR, buffer: Buffer, forget: Callable[[Region], None]) -> None:
        self.mr = mr
        self.view = memoryview(buffer).cast("B")
        self.remote = RemoteRegion(mr.addr, mr.rkey, len(self.view))
        self._forget: Callable[[Region], None] | None = forget

    def close(self) -> None:
        """Revoke the key and let go of the buffer. More than once does nothing."""
        forget, self._forget = self._forget, None
        if forget is not None:
            forget(self)
            self.mr.close()
            with contextlib.suppress(BufferError):  # somebody made something of it, and keeps the buffer with it
                self.view.release()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._forget is None

    def __len__(self) -> int:
        return self.remote.length

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"0x{self.remote.addr:x}, rkey 0x{self.remote.rkey:x}"
        return f"<Region {self.remote.length} bytes, {state}>"
