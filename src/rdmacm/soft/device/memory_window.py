"""Memory windows: keys for a part of a region, with rights of their own (InfiniBand Architecture 10.6.7).

Once a window is bound to a region, its key stands for a range of that region. Like rdma_rxe, the device has windows of
type 1 and type 2B. A window has one of three states:

- FREE: only type 2: it is not bound, and its key stands for nothing.
- VALID: type 2: it is bound to a region, and to the queue pair that bound it: no other queue pair's peer may use its
  key. Type 1: it is allocated; a bind of 0 bytes takes its region away.
- INVALID: it is deallocated.

====================================  ================================  =====================================
operation                             type 1                            type 2
====================================  ================================  =====================================
BIND_MW                               VALID, also to another region     FREE to VALID, refused when VALID
BIND_MW of 0 bytes                    VALID without a region            refused
LOCAL_INV, SEND_WITH_INV of the peer  refused                           VALID to FREE, on its queue pair only
its queue pair is reset or destroyed  stays as it is                    VALID to FREE
deallocation                          to INVALID                        to INVALID
====================================  ================================  =====================================

The upper 24 bits of a key are random and stay the window's; a bind sets the lower 8 to those that the program chose.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rdmacm.proto.plainints import (
    ACCESS_LOCAL_WRITE,
    ACCESS_MW_BIND,
    ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_WRITE,
    ACCESS_ZERO_BASED,
)
from rdmacm.verbs.enums import MWType

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Bind", "SoftMW", "WindowState", "may_bind"]

_REMOTE_WRITES = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC


class WindowState(Enum):
    """See the module."""

    FREE = 1
    VALID = 2
    INVALID = 3


class Region(Protocol):
    """The region that a window is bound to: :class:`rdmacm.soft.device.memory.SoftMR`."""

    pd: object
    lkey: int
    view: memoryview
    access: int
    addr: int
    length: int
    windows: int


class Bind(NamedTuple):
    """What a BIND_MW binds to what."""

    #: None for a window of another provider.
    window: SoftMW | None
    #: Its key once it is bound.
    rkey: int
    #: None for no region, and for one of another provider.
    region: Region | None
    #: The API's object of the region. The window refers to it while it is bound, so that it is not collected.
    owner: object
    #: The address of the first byte, and the number of bytes.
    addr: int
    length: int
    #: Bits of ``AccessFlag``.
    access: int


class SoftMW:
    """A memory window; implements :class:`rdmacm.verbs.backend.MWBackend`."""

    __slots__ = (
        *("_dealloc", "access", "addr", "bound_rkey", "length", "owner", "pd", "qp", "region", "rkey", "state"),
        "type",
    )

    def __init__(self, dealloc: Callable[[SoftMW], None], pd: object, mw_type: MWType, key: int) -> None:
        #: Takes it out of the device's table.
        self._dealloc = dealloc
        self.pd = pd
        self.type = mw_type
        self.state = WindowState.VALID if mw_type is MWType.TYPE_1 else WindowState.FREE
        #: The key that the last bind which was posted gives it, and the key that it has.
        self.rkey = self.bound_rkey = key
        self._forget()

    def _forget(self) -> None:
        #: The region that it is bound to, and the API's object of it; None while it is not bound.
        self.region: Region | None = None
        self.owner: object = None
        #: Type 2: stands for the queue pair that has bound it.
        self.qp: object = None
        #: The address of its first byte, and its bytes.
        self.addr = self.length = 0
        #: Bits of ``AccessFlag``.
        self.access = 0

    def dealloc(self) -> None:
        """Revoke the key."""
        self._dealloc(self)

    def bind(self, qp: object, bind: Bind) -> None:
        """Do what ``may_bind`` has allowed."""
        self.unbind()
        self.bound_rkey = bind.rkey
        self.state = WindowState.VALID
        if bind.length:
            assert bind.region is not None
            self.region, self.owner = bind.region, bind.owner
            bind.region.windows += 1
            self.addr, self.length, self.access = bind.addr, bind.length, bind.access
            self.qp = qp if self.type is MWType.TYPE_2 else None

    def unbind(self) -> None:
        """Take its region away; a window of type 2 is FREE then."""
        if self.region is not None:
            self.region.windows -= 1
            if self.type is MWType.TYPE_2:
                self.state = WindowState.FREE
            self._forget()

    def is_of(self, pd: object, rkey: int) -> bool:
        """Whether it is bound, and this is its key in this protection domain."""
        return self.region is not None and self.bound_rkey == rkey and self.pd == pd

    def view(self, qp: object, address: int, length: int, access: int) -> memoryview | None:
        """Return the bytes that a peer names; None if the range, the permission or the queue pair is wrong."""
        region = self.region
        if region is None or access & ~self.access or (self.type is MWType.TYPE_2 and self.qp is not qp):
            return None
        offset = address if self.access & ACCESS_ZERO_BASED else address - self.addr
        if offset < 0 or offset + length > self.length:
            return None
        start = self.addr - region.addr + offset
        return region.view[start : start + length]


def may_bind(pd: object, bind: Bind) -> bool:
    """Whether a queue pair of ``pd`` may do this (InfiniBand Architecture 10.6.7.2, and rdma_rxe).

    The caller has checked that the window is allocated and the region registered.
    """
    window, region, access = bind.window, bind.region, bind.access
    if window is None or window.pd != pd:
        return False
    if window.type is MWType.TYPE_1:
        if access & ACCESS_ZERO_BASED:
            return False
        if not bind.length:
            return True
    elif window.state is not WindowState.FREE or not bind.length:
        return False
    if region is None or region.pd != pd or not region.access & ACCESS_MW_BIND:
        return False
    if access & _REMOTE_WRITES and not region.access & ACCESS_LOCAL_WRITE:
        return False
    return region.addr <= bind.addr and bind.addr + bind.length <= region.addr + region.length
