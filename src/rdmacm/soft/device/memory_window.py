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

What a window is bound to is known to the compiled core alone, where it is there (core/engine/windows.c), as its thread
binds and invalidates without the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from rdmacm.proto.plainints import (
    ACCESS_LOCAL_WRITE,
    ACCESS_MW_BIND,
    ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_WRITE,
    ACCESS_ZERO_BASED,
)
from rdmacm.verbs.enums import MWType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rdmacm.proto._core import Window

_REMOTE_WRITES = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC
_bind_numbers = count(1)


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
    bindings: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Bind:
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
    #: Another one for each.
    number: int = field(init=False, default_factory=_bind_numbers.__next__)


class SoftMW:
    """A memory window; implements :class:`rdmacm.verbs.backend.MWBackend`."""

    __slots__ = ("_dealloc", "_kept", "binding", "is_closed", "pd", "rkey", "type")

    def __init__(
        self, dealloc: Callable[[SoftMW], None], pd: object, mw_type: MWType, key: int, binding: Binding | Window
    ) -> None:
        #: Takes it out of the device's table.
        self._dealloc = dealloc
        self.pd: object = pd
        self.type: MWType = mw_type
        #: The key that the last bind which was posted gives it.
        self.rkey: int = key
        #: What it is bound to.
        self.binding: Binding | Window = binding
        self.is_closed: bool = False
        #: Owners of regions by the numbers of their binds, some of which may be over: the compiled core ends a bind
        #: in a thread without the interpreter.
        self._kept: list[tuple[int, ref[Bind], object]] = []

    @property
    def state(self) -> WindowState:
        if self.is_closed:
            return WindowState.INVALID
        return WindowState.VALID if self.type is MWType.TYPE_1 or self.binding.number else WindowState.FREE

    def posted(self, bind: Bind) -> None:
        """A bind of it is posted: the owner of the region has to live as long as that is in force."""
        self.rkey = bind.rkey
        self.let_go()
        self._kept.append((bind.number, ref(bind), bind.owner))

    def let_go(self) -> None:
        """Let go of the owners of regions that it is not bound to, and will not be."""
        if self._kept:
            # A request that is not complete refers to its bind; the core may execute it after this look at it.
            over = {number for number, bind, _ in self._kept if bind() is None} - {self.binding.number}
            self._kept = [kept for kept in self._kept if kept[0] not in over]

    def dealloc(self) -> None:
        """Revoke the key."""
        self._dealloc(self)

    def close(self) -> None:
        """It is deallocated: take its region away."""
        self.is_closed = True
        self.binding.close()
        self._kept.clear()


class Binding:
    """What a window is bound to, without the compiled core."""

    __slots__ = ("_drop", "access", "addr", "is_type_2", "key", "length", "number", "pd", "qp", "region")

    addr: int
    length: int

    def __init__(self, drop: Callable[[int], object], pd: object, is_type_2: bool, key: int) -> None:
        #: Takes it out of the table, by the upper 24 bits of its key.
        self._drop = drop
        self.pd: object = pd
        self.is_type_2: bool = is_type_2
        #: The key that the last bind has given it.
        self.key: int = key
        #: None while it is not bound; the number of the bind, or 0.
        self.region: Region | None = None
        self.number: int = 0
        #: Type 2: stands for the queue pair that has bound it.
        self.qp: int = 0
        #: The address of its first byte, and its bytes.
        self.addr = self.length = 0
        #: Bits of ``AccessFlag``.
        self.access: int = 0

    def bind(self, qp: int, bind: Bind) -> None:
        """Do what is allowed."""
        self.unbind()
        self.key = bind.rkey
        if bind.length:
            assert bind.region is not None
            bind.region.bindings += 1
            self.region, self.number, self.qp = bind.region, bind.number, qp
            self.addr, self.length, self.access = bind.addr, bind.length, bind.access

    def unbind(self) -> None:
        if self.region is not None:
            self.region.bindings -= 1
            self.region, self.number = None, 0

    def close(self) -> None:
        """It is deallocated."""
        self.unbind()
        self._drop(self.key >> 8)

    def view(self, qp: int, address: int, length: int, access: int) -> memoryview | None:
        """Return the bytes that a peer names; None if the range, the permission or the queue pair is wrong."""
        region = self.region
        if region is None or access & ~self.access or (self.is_type_2 and self.qp != qp):
            return None
        offset = address if self.access & ACCESS_ZERO_BASED else address - self.addr
        if offset < 0 or offset + length > self.length:
            return None
        start = self.addr - region.addr + offset
        return region.view[start : start + length]


class Bindings:
    """What the windows of a device are bound to, without the compiled core.

    Its methods are those of ``Regions`` of the core. ``qp`` is a number that stands for a queue pair of ``pd``.
    """

    def __init__(self, regions: Mapping[int, Region]) -> None:
        self._regions = regions
        #: By the upper 24 bits of their keys.
        self._bindings: dict[int, Binding] = {}

    def allocate_window(self, pd: object, is_type_2: bool, key: int) -> Binding:
        binding = self._bindings[key >> 8] = Binding(self._bindings.pop, pd, is_type_2, key)
        return binding

    def bound(self, key: int) -> int:
        """How many windows are bound to a region."""
        region = self._regions.get(key)
        return 0 if region is None else region.bindings

    def find_window(self, pd: object, qp: int, rkey: int, address: int, length: int, access: int) -> memoryview | None:
        """Return the bytes that a peer names by the key of a window."""
        binding = self._find(pd, rkey)
        return None if binding is None else binding.view(qp, address, length, access)

    def _find(self, pd: object, rkey: int) -> Binding | None:
        """The window that has this key in this protection domain."""
        binding = self._bindings.get(rkey >> 8)
        return binding if binding is not None and binding.key == rkey and binding.pd == pd else None

    def bind(self, pd: object, qp: int, bind: Bind) -> bool:
        """Bind a window; False where that is not allowed."""
        window, region = bind.window, bind.region
        binding = None if window is None else self._bindings.get(bind.rkey >> 8)
        if window is None or binding is None or binding is not window.binding:
            return False
        if region is not None and self._regions.get(region.lkey) is not region:
            return False
        if not _may_bind(pd, binding, bind):
            return False
        binding.bind(qp, bind)
        return True

    def invalidate(self, pd: object, qp: int, rkey: int) -> bool:
        """Make a window of type 2 free; False if the key is not that of one that the queue pair has bound."""
        binding = self._find(pd, rkey)
        if binding is None or binding.region is None or not binding.is_type_2 or binding.qp != qp:
            return False
        binding.unbind()
        return True

    def free_windows(self, qp: int) -> None:
        """Make the windows of type 2 free that a queue pair has bound."""
        for binding in self._bindings.values():
            if binding.is_type_2 and binding.qp == qp:
                binding.unbind()


def _may_bind(pd: object, binding: Binding, bind: Bind) -> bool:
    """Whether a queue pair of ``pd`` may do this (InfiniBand Architecture 10.6.7.2, and rdma_rxe).

    The window is allocated and the region registered.
    """
    region, access = bind.region, bind.access
    if binding.pd != pd:
        return False
    if not binding.is_type_2:
        if access & ACCESS_ZERO_BASED:
            return False
        if not bind.length:
            return True
    elif binding.region is not None or not bind.length:
        return False
    if region is None or region.pd != pd or not region.access & ACCESS_MW_BIND:
        return False
    if access & _REMOTE_WRITES and not region.access & ACCESS_LOCAL_WRITE:
        return False
    return region.addr <= bind.addr and bind.addr + bind.length <= region.addr + region.length
