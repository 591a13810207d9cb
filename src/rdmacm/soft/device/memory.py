"""Registered memory: the bytes that a key stands for, and who may access them.

A region has one key for local and remote use, 32 random bits: a peer that was not given the key cannot guess it. The
key of a region that was deregistered does not come back soon. A peer cannot invalidate it: only windows of type 2 are
invalidated (:mod:`rdmacm.soft.device.memory_window`). No window has a key with the upper 24 bits of a region's key.
Addresses are those of the buffer in this process. While a region is registered its buffer is exported, so a bytearray
cannot be resized.
"""

from __future__ import annotations

import errno
import random
from itertools import count
from typing import TYPE_CHECKING

from rdmacm.capabilities import RARE_ACCESS, SOFT
from rdmacm.errors import cm_error
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.freed import FreedNumbers
from rdmacm.proto.plainints import (
    ACCESS_FLUSH_PERSISTENT,
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_ATOMIC,
    ACCESS_REMOTE_WRITE,
)
from rdmacm.proto.work import RecvWork
from rdmacm.soft.device.memory_window import Bind, Bindings, SoftMW
from rdmacm.verbs.buffers import Buffer, address_of, byte_view
from rdmacm.verbs.enums import MWType
from rdmacm.verbs.wr import SGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rdmacm.enums import AccessFlag
    from rdmacm.progress.runtime import Runtime
    from rdmacm.proto._core import Regions
    from rdmacm.verbs.wr import RecvWR

#: Keys of deregistered regions, and of deallocated windows, that are not given again yet.
_FREED_KEYS = 1024

_queue_pair_numbers = count(1)
_RARE = sum(RARE_ACCESS)
_WRITES = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC


def _released_view() -> memoryview:
    view = memoryview(b"")
    view.release()
    return view


#: Stands for the buffers of a work request with a wrong key: any access raises ValueError.
INACCESSIBLE = (_released_view(),)


def _check_access(access: int, step: str) -> None:
    """Refuse what the device lacks, as rdma_rxe does.

    EOPNOTSUPP for ZERO_BASED, ON_DEMAND and HUGETLB; EINVAL for FLUSH_PERSISTENT, as from rdma_rxe for memory that is
    not persistent: this device knows of none that is.
    """
    if access & ACCESS_FLUSH_PERSISTENT:
        raise cm_error(errno.EINVAL, "the memory is not persistent", step, hint="FLUSH_GLOBAL alone")
    if access & _RARE:
        for flag, feature in RARE_ACCESS.items():
            if access & flag:
                SOFT.require(feature, step)


class SoftMR:
    """A memory region; implements :class:`rdmacm.verbs.backend.MRBackend`."""

    __slots__ = ("_table", "access", "addr", "bindings", "length", "lkey", "pd", "rkey", "view")

    lkey: int
    rkey: int

    def __init__(self, table: MemoryTable, pd: object, view: memoryview, access: int, key: int) -> None:
        self._table = table
        self.pd: object = pd
        #: Its bytes, none once it is deregistered.
        self.view: memoryview[int] = view
        #: Bits of ``AccessFlag``.
        self.access: int = access
        #: Address and length of the buffer, in bytes.
        self.addr: int = address_of(view)
        self.length: int = len(view)
        self.lkey = self.rkey = key
        #: Without the compiled core: memory windows that are bound to it.
        self.bindings: int = 0

    @property
    def windows(self) -> int:
        """Memory windows that are bound to it."""
        return self._table.bindings.bound(self.lkey)

    def rereg(self, pd: object | None, view: memoryview | None, access: AccessFlag | None) -> None:
        runtime = self._table.runtime
        with runtime.lock:
            runtime.check_fork("rereg_mr", "region")
            before = self.pd
            if access is not None:
                _check_access(access, "rereg_mr")
            self._table.hide(self, "rereg_mr")
            if pd is not None:
                self.pd = pd
            if view is not None:
                self.view, self.addr, self.length = view, address_of(view), len(view)
            if access is not None:
                self.access = int(access)
            self._table.show(self)
            self._table.changed(before, self)

    def dereg(self) -> None:
        """Revoke the keys and let go of the buffer. Requests that were posted keep their own hold on it."""
        with self._table.runtime.lock:
            self._table.remove(self)


class MemoryTable:
    """The regions of a device, by key, and its memory windows. The runtime's lock is held for every call."""

    def __init__(self, source: random.Random, runtime: Runtime, *, with_core: bool = True) -> None:
        """``source`` makes the keys; ``runtime`` is the device's."""
        self._random = source
        #: Its lock is for the methods of regions and windows that the API calls.
        self.runtime = runtime
        self._regions: dict[int, SoftMR] = {}
        #: The same for the compiled core; None without it.
        self.core_regions: Regions | None = compiled.Regions() if with_core and compiled is not None else None
        #: What windows are bound to.
        self.bindings: Bindings | Regions
        self.bindings = Bindings(self._regions) if self.core_regions is None else self.core_regions
        #: By the upper 24 bits of their keys.
        self._windows: dict[int, SoftMW] = {}
        #: The keys that were revoked last.
        self._freed = FreedNumbers(_FREED_KEYS)
        #: The upper 24 bits of those of windows.
        self._freed_windows = FreedNumbers(_FREED_KEYS)
        #: Called when a region was registered anew, with the domain that it was in: receives that were posted with its
        #: key are looked up again. The device sets it.
        self.changed: Callable[[object, SoftMR], None] = lambda pd, region: None  # noqa: ARG005

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def windows(self) -> int:
        """How many windows are allocated."""
        return len(self._windows)

    def register(self, pd: object, view: memoryview, access: AccessFlag) -> SoftMR:
        """Register the bytes of a view.

        EACCES if it is read-only and ``access`` allows to write it; also the errors of :func:`_check_access`.
        """
        _check_access(access, "reg_mr")
        if view.readonly and len(view) and access & _WRITES:
            raise cm_error(errno.EACCES, "the buffer is read-only", "reg_mr", hint="a bytearray, or only REMOTE_READ")
        key = 0
        while not key or self._is_known(key) or key >> 8 in self._windows or key >> 8 in self._freed_windows:
            key = self._random.getrandbits(32)
        region = self._regions[key] = SoftMR(self, pd, view, int(access), key)
        self.show(region)
        return region

    def show(self, region: SoftMR) -> None:
        """Tell the compiled core what a region is."""
        if self.core_regions is not None:
            self.core_regions.add(region.lkey, region.addr, region.view, region.access, region.pd, region)

    def hide(self, region: SoftMR, step: str) -> None:
        """Have the compiled core forget a region. EBUSY while windows are bound to it; no other can be after this."""
        bound = region.bindings if self.core_regions is None else self.core_regions.remove(region.lkey)
        if bound:
            hint = "deallocate or invalidate them first"
            raise cm_error(errno.EBUSY, f"memory windows are bound to it: {bound}", step, hint=hint)

    def _is_known(self, key: int) -> bool:
        """Whether a key is that of a region, or of one that was deregistered last."""
        return key in self._regions or key in self._freed

    def allocate(self, pd: object, mw_type: MWType) -> SoftMW:
        """Allocate a window."""
        index = 0
        while (
            not index
            or index in self._windows
            or index in self._freed_windows
            or any(self._is_known(index << 8 | tag) for tag in range(256))
        ):
            index = self._random.getrandbits(24)
        key = index << 8 | self._random.getrandbits(8)
        binding = self.bindings.allocate_window(pd, mw_type is MWType.TYPE_2, key)
        window = self._windows[index] = SoftMW(self.deallocate, pd, mw_type, key, binding)
        return window

    def deallocate(self, window: SoftMW) -> None:
        """Deallocate a window, and take its region away."""
        index = window.rkey >> 8
        with self.runtime.lock:
            if self._windows.get(index) is window:
                del self._windows[index]
                self._freed_windows.add(index)
                window.close()

    def remove(self, region: SoftMR) -> None:
        """Revoke a region's keys. EBUSY while windows are bound to it."""
        if self._regions.get(region.lkey) is region:
            self.hide(region, "dereg_mr")
            del self._regions[region.lkey]
            self._freed.add(region.lkey)
            region.view = memoryview(b"")

    def local(self, pd: object, lkey: int, address: int, length: int, write: bool) -> memoryview | None:
        """Return the bytes of a scatter/gather element, None if key, range or permission is wrong."""
        region = self._regions.get(lkey)
        if region is None or region.pd != pd or (write and not region.access & ACCESS_LOCAL_WRITE):
            return None
        offset = address - region.addr
        if offset < 0 or offset + length > region.length:
            return None
        return region.view[offset : offset + length]

    def gather(self, pd: object, elements: Sequence[SGE | Buffer], write: bool) -> Sequence[memoryview]:
        """Return the bytes of scatter/gather elements; INACCESSIBLE if one is wrong. Plain buffers are inline data."""
        if len(elements) == 1 and isinstance(element := elements[0], SGE) and element.length:
            view = self.local(pd, element.lkey, element.addr, element.length, write)
            return INACCESSIBLE if view is None else (view,)
        found = []
        for element in elements:
            if not isinstance(element, SGE):
                found.append(memoryview(bytes(byte_view(element))))
            elif element.length:
                view = self.local(pd, element.lkey, element.addr, element.length, write)
                if view is None:
                    return INACCESSIBLE
                found.append(view)
        return found

    def receive(self, pd: object, wr: RecvWR) -> RecvWork:
        """A receive with the bytes of its elements; they are INACCESSIBLE if one is wrong."""
        sg = wr.sg
        segments = self.gather(pd, sg, True)
        if len(sg) == 1:
            return RecvWork(wr.wr_id, segments, (sg[0].lkey,))
        return RecvWork(wr.wr_id, segments, tuple(element.lkey for element in sg if element.length))

    def look_up_again(self, pd: object, region: SoftMR, works: Iterable[RecvWork]) -> None:
        """Take the memory away from receives that were posted with a key which does not stand for it any more."""
        key = region.lkey
        for work in works:
            if key not in work.lkeys or work.segments is INACCESSIBLE:
                continue
            for segment, lkey in zip(work.segments, work.lkeys, strict=False):
                if lkey == key and self.local(pd, key, address_of(segment), len(segment), True) is None:
                    work.segments = INACCESSIBLE
                    break

    def remote(self, pd: object, rkey: int, address: int, length: int, access: int, qp: int = 0) -> memoryview | None:
        """Return the bytes that a peer names, for a queue pair of ``pd``; None if key, range or permission is wrong.

        ``qp`` stands for the queue pair, for windows of type 2.
        """
        region = self._regions.get(rkey)
        if region is None:
            return self.bindings.find_window(pd, qp, rkey, address, length, access)
        if region.pd != pd or access & ~region.access:
            return None
        offset = address - region.addr
        if offset < 0 or offset + length > region.length:
            return None
        return region.view[offset : offset + length]

    def permits(self, pd: object, rkey: int, access: int) -> bool:
        """Whether a peer may access the whole region of a key so, by a queue pair of ``pd``."""
        region = self._regions.get(rkey)
        return region is not None and region.pd == pd and not access & ~region.access

    def invalidate(self, pd: object, qp: int, rkey: int) -> bool:
        """Make a window of type 2 free; False if the key is not that of one that ``qp``, of ``pd``, has bound."""
        done = self.bindings.invalidate(pd, qp, rkey)
        window = self._windows.get(rkey >> 8)
        if done and window is not None:
            window.let_go()
        return done

    def free_windows(self, qp: int) -> None:
        """Make the windows of type 2 free that a queue pair has bound."""
        self.bindings.free_windows(qp)
        for window in self._windows.values():
            window.let_go()


class RemoteMemory:
    """The memory that a queue pair's peer may touch: :class:`rdmacm.proto.work.Memory` for one protection domain.

    Its number stands for the queue pair, to which windows of type 2 are bound.
    """

    __slots__ = ("_table", "number", "pd")

    def __init__(self, table: MemoryTable, pd: object) -> None:
        self._table = table
        #: The protection domain.
        self.pd: object = pd
        self.number: int = next(_queue_pair_numbers)

    @property
    def regions(self) -> Regions | None:
        """The regions and windows as the compiled core has them; None without it."""
        return self._table.core_regions

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        return self._table.remote(self.pd, rkey, address, length, int(access), self.number)

    def permits(self, rkey: int, access: AccessFlag) -> bool:
        return self._table.permits(self.pd, rkey, int(access))

    def invalidate(self, rkey: int) -> bool:
        return self._table.invalidate(self.pd, self.number, rkey)

    def bind(self, bind: object) -> bool:
        assert isinstance(bind, Bind)
        return self._table.bindings.bind(self.pd, self.number, bind)

    def close(self) -> None:
        """The queue pair is reset or destroyed."""
        self._table.free_windows(self.number)
