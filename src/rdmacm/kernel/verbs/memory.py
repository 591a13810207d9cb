"""Memory regions and memory windows of a kernel's device."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import weakref
from typing import TYPE_CHECKING

from rdmacm.capabilities import Feature, absent
from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.verbs.layouts import ibv_mr, ibv_mw
from rdmacm.kernel.verbs.library import last_error
from rdmacm.kernel.verbs.opened import Rank
from rdmacm.kernel.verbs.refusals import made, not_registered, refusal
from rdmacm.proto.plainints import ACCESS_ZERO_BASED
from rdmacm.verbs.buffers import address_of
from rdmacm.verbs.enums import MWType, ReregMRFlag

if TYPE_CHECKING:
    from rdmacm.enums import AccessFlag
    from rdmacm.kernel.verbs.opened import Handle, OpenedDevice


class KernelMR:
    """See :class:`rdmacm.verbs.backend.MRBackend`."""

    __slots__ = (
        *("__weakref__", "_access", "_opened", "_pd", "_view"),
        *("addr", "address", "length", "lkey", "rkey", "windows"),
    )

    addr: int
    length: int

    def __init__(self, opened: OpenedDevice, pd: Handle, view: memoryview, access: int) -> None:
        where = address_of(view)
        addr = 0 if access & ACCESS_ZERO_BASED else where
        # A view of its own keeps the buffer exported also where the program releases the other.
        self._begin(opened, pd, memoryview(view), addr, len(view), access)
        with opened.call("reg_mr"):
            made_at = opened.library.ibv_reg_mr_iova2(pd.address, where, self.length, addr, access)
            if not made_at:
                raise not_registered(last_error(), access, opened.name)
            self._registered(made_at)

    def _begin(self, opened: OpenedDevice, pd: Handle, view: memoryview, addr: int, length: int, access: int) -> None:
        self._opened = opened
        self._pd = pd
        self._access = access
        self._view = view
        #: The windows for which a bind has named it, once that is posted.
        self.windows: weakref.WeakSet[KernelMW] = weakref.WeakSet()
        self.addr, self.length = addr, length

    def _registered(self, address: int) -> None:
        #: The address that the library gave it.
        self.address = address
        self._opened.hold(self, Rank.MR, self._opened.library.ibv_dereg_mr, address)
        self._read_keys()

    def _read_keys(self) -> None:
        found = ibv_mr.from_address(self.address)
        self.lkey: int = found.lkey
        self.rkey: int = found.rkey

    def rereg(self, pd: object | None, view: memoryview | None, access: AccessFlag | None) -> None:
        opened = self._opened
        self._check_unbound("rereg_mr")
        flags = 0
        handle, new = self._pd, self._view
        if view is not None:
            flags |= ReregMRFlag.CHANGE_TRANSLATION
            new = memoryview(view)
        if pd is not None:
            flags |= ReregMRFlag.CHANGE_PD
            handle = opened.pd(pd)
        if access is not None:
            flags |= ReregMRFlag.CHANGE_ACCESS
        where, length = (None, 0) if view is None else (address_of(new), len(new))
        with opened.call("rereg_mr"):
            ctypes.set_errno(0)
            code = opened.library.ibv_rereg_mr(self.address, flags, handle.address, where, length, int(access or 0))
            if code:
                # Negative: which of the steps failed (enum ibv_rereg_mr_err_code); errno has the cause.
                raise refusal(ctypes.get_errno() or errno.EINVAL, "rereg_mr", opened.name)
            self._read_keys()
        self._pd = handle
        if access is not None:
            self._access = int(access)
        if view is not None:
            self._view.release()
            self._view, self.length = new, len(new)
            self.addr = where or 0

    def _check_unbound(self, step: str) -> None:
        count = sum(window.region is self for window in self.windows)
        if count:
            text, hint = f"memory windows are bound to it: {count}", "close the windows, or invalidate them"
            raise cm_error(errno.EBUSY, text, step, self._opened.name, hint)

    def dereg(self) -> None:
        code = self._opened.release(self)
        if code:
            if code in (errno.EINVAL, errno.EBUSY):
                self._check_unbound("dereg_mr")
            raise refusal(code, "dereg_mr", self._opened.name)
        self._view.release()


class KernelDmaBufMR(KernelMR):
    """A region of memory that is not the process's; ``addr`` is the address that was asked for."""

    __slots__ = ()

    def __init__(
        self, opened: OpenedDevice, pd: Handle, offset: int, length: int, iova: int, fd: int, access: int
    ) -> None:
        self._begin(opened, pd, memoryview(b""), iova, length, access)
        register, step = opened.library.ibv_reg_dmabuf_mr, "reg_dmabuf_mr"
        if register is None:
            raise absent(Feature.DMA_BUFS, step, opened.name, "libibverbs", hint="rdma-core 34")
        with opened.call(step):
            self._registered(made(register(pd.address, offset, length, iova, fd, access), step, opened.name))


class KernelMW:
    """See :class:`rdmacm.verbs.backend.MWBackend`."""

    __slots__ = ("__weakref__", "_opened", "_pd", "address", "owner", "region", "rkey", "type")

    def __init__(self, opened: OpenedDevice, pd: Handle, mw_type: MWType) -> None:
        self._opened = opened
        self._pd = pd
        self.type: MWType = mw_type
        #: The address that the library gave it; 0 once it is released.
        self.address: int = 0
        self._alloc()
        #: The region that the last bind names, and the API's object of it, which must not be collected.
        self.region: KernelMR | None = None
        self.owner: object = None

    def _alloc(self) -> None:
        opened = self._opened
        alloc, dealloc = opened.operations.alloc_mw, opened.operations.dealloc_mw
        if alloc is None or dealloc is None:
            raise absent(Feature.MEMORY_WINDOWS, "alloc_mw", opened.name, "the device")
        with opened.call("alloc_mw"):
            self.address = made(alloc(self._pd.address, int(self.type)), "alloc_mw", opened.name)
            opened.hold(self, Rank.MW, dealloc, self.address)
            self.rkey: int = ibv_mw.from_address(self.address).rkey

    def renew(self) -> None:
        """Replace the library's window by one that is not bound; refused by the device, the window is of no more use.

        For the end of the queue pair that it was bound by, for which rdma_rxe would wait a minute otherwise.
        """
        if self.address and not self._opened.release(self):
            self.region = self.owner = None
            with contextlib.suppress(RdmaError):
                self._alloc()

    def bind_posted(self, rkey: int, region: KernelMR | None, owner: object) -> None:
        """A bind was posted. ``owner``: the API's object of the region."""
        # The library takes the present key of the next bind from here, and of type 2 leaves it to its user to set it.
        ibv_mw.from_address(self.address).rkey = self.rkey = rkey
        self.region, self.owner = region, owner
        if region is not None:
            region.windows.add(self)

    def dealloc(self) -> None:
        self._opened.discard(self)
        self.address = 0
        self.region = self.owner = None
