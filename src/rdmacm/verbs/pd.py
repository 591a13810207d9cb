"""Protection domains and memory regions: ibv_alloc_pd(3), ibv_reg_mr(3)."""

from __future__ import annotations

import contextlib
import errno

from rdmacm.address import ALL_BITS_64
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.plainints import ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_WRITE
from rdmacm.verbs import checks
from rdmacm.verbs.backend import MRBackend
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import AccessFlag, ReregMRFlag
from rdmacm.verbs.resource import Resource
from rdmacm.verbs.wr import SGE

_REMOTE_WRITES = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC


class PD(Resource):
    """A protection domain, ``struct ibv_pd``. A queue pair uses only memory regions and address handles of its domain.

    EOPNOTSUPP: the provider has no queue pairs and memory on this device; EBADF: the context is closed.
    """

    __slots__ = {"context": "The :class:`Context` of its device."}

    _warns = False

    def __init__(self, context: Context) -> None:
        self._closed = True
        checks.check_context(context, "alloc_pd")
        self.context: Context = context
        self._make("alloc_pd", (), lambda: context.backend)

    def __repr__(self) -> str:
        return f"<PD {self.context.name}{' closed' if self._closed else ''}>"


class InDomain(Resource):
    """An object of a protection domain."""

    __slots__ = {"pd": "Its protection domain."}

    pd: PD

    @property
    def context(self) -> Context:
        """The open device that it was made from."""
        return self.pd.context


class MR(InDomain):
    """A memory region, ``struct ibv_mr``: a buffer of the program that the device may use. Nothing is copied.

    ``buffer``: a contiguous object with Python's buffer protocol (bytearray, mmap, array, memoryview, a numpy array).
    ``access``: an :class:`AccessFlag`; with 0 only requests of this side may read it. A flag that allows writing needs
    a writable buffer. A bytearray cannot be resized while it is registered (BufferError).

    TypeError: not a buffer. EINVAL: empty, read-only, not contiguous, larger than the device's ``max_mr_size``; unknown
    access flags, or REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE. ENOMEM: too many regions. EOPNOTSUPP: access
    that the device lacks (software devices: ZERO_BASED, ON_DEMAND, HUGETLB).

    While a memory window is bound to it, it cannot be closed (EBUSY).
    """

    __slots__ = {
        "access": "The :class:`AccessFlag`.",
        "buf": "The buffer's bytes, a memoryview.",
        "addr": "The address of its first byte, 64 bits.",
        "length": "Its length in bytes.",
        "lkey": "The key for this side's work requests, 32 bits.",
        "rkey": "The key for the peer's work requests, 32 bits.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
    }

    def __init__(self, pd: PD, buffer: Buffer, access: int) -> None:
        self._closed = True
        device = pd.context.backend
        allowed = checks.flags(AccessFlag, access, "access flags", "reg_mr")
        view = _bytes_of(buffer, int(allowed), device.attr.max_mr_size)
        self.pd: PD = pd
        self.access: AccessFlag = allowed
        self.buf: memoryview[int] = view
        self.backend: MRBackend = self._make("reg_mr", (pd,), lambda: device.reg_mr(pd, view, self.access))
        self._take_keys()

    def _take_keys(self) -> None:
        backend = self.backend
        self.lkey: int = backend.lkey
        self.rkey: int = backend.rkey
        self.addr: int = backend.addr
        self.length: int = backend.length

    def sge(self, offset: int = 0, length: int | None = None) -> SGE:
        """``length`` bytes at ``offset`` for a work request, None for the rest; EINVAL outside the region."""
        if length is None:
            length = self.length - offset
        if offset < 0 or length < 0 or offset + length > self.length or self._closed:
            raise self._outside("sge", offset, length)
        return SGE(self.addr + offset, length, self.lkey)

    def read(self, length: int, offset: int = 0) -> bytes:
        """A copy of ``length`` bytes at ``offset``; EINVAL outside the region."""
        if offset < 0 or length < 0 or offset + length > self.length or self._closed:
            raise self._outside("read", offset, length)
        return bytes(self.buf[offset : offset + length])

    def write(self, data: Buffer | str, length: int | None = None, offset: int = 0) -> None:
        """Copy ``data``, or its first ``length`` bytes, to ``offset``; text is encoded as UTF-8. EINVAL: no room."""
        source = byte_view(data.encode() if isinstance(data, str) else data)
        if length is None:
            length = len(source)
        if length > len(source):
            raise cm_error(errno.EINVAL, f"{length} bytes of a buffer of {len(source)} bytes", "write")
        if offset < 0 or length < 0 or offset + length > self.length or self._closed:
            raise self._outside("write", offset, length)
        self.buf[offset : offset + length] = source[:length]

    def rereg(
        self, flags: int, pd: PD | None = None, buffer: Buffer | None = None, length: int | None = None, access: int = 0
    ) -> None:
        """Change the domain, the buffer or the access, and keep the keys, ibv_rereg_mr(3).

        ``flags``: a :class:`ReregMRFlag` for each of ``pd``, ``buffer`` (its first ``length`` bytes; None: all) and
        ``access`` that changes; the others are not used. Requests that were posted before use the old memory.

        Errors as for :class:`MR`, and EBUSY while a memory window is bound to it; after any error it is as it was.
        """
        self._check_open("rereg_mr")
        changes = checks.flags(ReregMRFlag, flags, "flags", "rereg_mr")
        if not changes:
            raise cm_error(errno.EINVAL, "flags is 0", "rereg_mr", hint="flags of ReregMRFlag")
        view = new_access = new_pd = None
        if changes & ReregMRFlag.CHANGE_ACCESS:
            new_access = checks.flags(AccessFlag, access, "access flags", "rereg_mr")
        if changes & ReregMRFlag.CHANGE_PD:
            checks.check_kind("pd", pd, PD, "rereg_mr")
            new_pd = pd
            if new_pd is not None and new_pd.context.backend is not self.context.backend:
                raise cm_error(errno.EINVAL, "the domain is of another device", "rereg_mr")
        after = int(self.access if new_access is None else new_access)
        limit = self.context.backend.attr.max_mr_size
        if changes & ReregMRFlag.CHANGE_TRANSLATION:
            if buffer is None:
                raise cm_error(errno.EINVAL, "buffer is None", "rereg_mr")
            whole = _bytes_of(buffer, after, limit)
            view = whole if length is None else _bytes_of(whole[:length], after, limit)
            if length is not None and len(view) != length:
                raise cm_error(errno.EINVAL, f"{length} bytes of a buffer of {len(whole)} bytes", "rereg_mr")
        else:
            _bytes_of(self.buf, after, limit)
        self._replace_need("rereg_mr", self.pd, new_pd or self.pd, lambda: self.backend.rereg(new_pd, view, new_access))
        self.pd, self.access = new_pd or self.pd, AccessFlag(after)
        if view is not None:
            self._release_buf()
            self.buf = view
            self.addr, self.length = self.backend.addr, self.backend.length

    def _outside(self, step: str, offset: int, length: int) -> Exception:
        if self._closed:
            return self._closed_error(step)
        return cm_error(errno.EINVAL, f"{length} bytes at {offset} of a region of {self.length} bytes", step)

    def _check_close(self) -> None:
        super()._check_close()
        self.backend.dereg()  # refused while a window is bound, which only the device knows

    def _destroy(self) -> None:
        self._release_buf()

    def _release_buf(self) -> None:
        with contextlib.suppress(BufferError):  # a slice of buf exists; it keeps the buffer exported
            self.buf.release()

    def __repr__(self) -> str:
        if self._closed:
            return "<MR closed>"
        return f"<MR addr=0x{self.addr:x} length={self.length} lkey=0x{self.lkey:x} rkey=0x{self.rkey:x}>"


class DmaBufMR(MR):
    """A memory region of a dma-buf, ibv_reg_dmabuf_mr(3): memory of another device, such as a graphics processor.

    ``length`` bytes at ``offset`` of the dma-buf that ``fd`` is a descriptor of, which may be closed afterwards.
    ``iova``: the address of the first byte in work requests, None for ``offset``.

    The process does not see the memory: ``buf`` is empty, :meth:`read`, :meth:`write` and :meth:`rereg` are EOPNOTSUPP,
    and a request with it cannot be inline. Errors of registering: those of :class:`MR`, and the kernel's for a
    descriptor that is none of a dma-buf. EOPNOTSUPP: the device, or its driver, has no such regions (software devices,
    rdma_rxe and siw).
    """

    __slots__ = ()

    def __init__(self, pd: PD, length: int, access: int, fd: int, offset: int = 0, iova: int | None = None) -> None:
        self._closed = True
        step, device = "reg_dmabuf_mr", pd.context.backend
        allowed = checks.flags(AccessFlag, access, "access flags", step)
        if allowed & _REMOTE_WRITES and not allowed & ACCESS_LOCAL_WRITE:
            text = "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well"
            raise cm_error(errno.EINVAL, text, step, hint="LOCAL_WRITE | REMOTE_WRITE")
        address = offset if iova is None else iova
        checks.check_number("length", length, 1, device.attr.max_mr_size, step)
        for name, value in (("offset", offset), ("iova", address)):
            checks.check_number(name, value, 0, ALL_BITS_64 + 1 - length, step)
        checks.check_number("fd", fd, 0, 0x7FFFFFFF, step)
        self.pd: PD = pd
        self.access: AccessFlag = allowed
        self.buf: memoryview[int] = memoryview(b"")
        self.backend: MRBackend = self._make(
            step, (pd,), lambda: device.reg_dmabuf_mr(pd, offset, length, address, fd, self.access)
        )
        self._take_keys()

    def _unseen(self, step: str) -> RdmaError:
        return cm_error(errno.EOPNOTSUPP, "the memory of a dma-buf is not the process's", step)

    def read(self, length: int, offset: int = 0) -> bytes:  # noqa: ARG002 (MR's)
        """EOPNOTSUPP."""
        raise self._unseen("read")

    def write(self, data: Buffer | str, length: int | None = None, offset: int = 0) -> None:  # noqa: ARG002 (MR's)
        """EOPNOTSUPP."""
        raise self._unseen("write")

    def rereg(
        self,
        flags: int,  # noqa: ARG002 (MR's)
        pd: PD | None = None,  # noqa: ARG002
        buffer: Buffer | None = None,  # noqa: ARG002
        length: int | None = None,  # noqa: ARG002
        access: int = 0,  # noqa: ARG002
    ) -> None:
        """EOPNOTSUPP."""
        raise self._unseen("rereg_mr")


def _bytes_of(buffer: Buffer, access: int, limit: int) -> memoryview:
    """The bytes of a buffer, checked for registration with ``access``."""
    try:
        view = byte_view(buffer)
    except TypeError:
        raise TypeError(f"a memory region needs a buffer such as a bytearray, not {type(buffer).__name__}") from None
    except BufferError:
        raise cm_error(errno.EINVAL, "the buffer is not contiguous", "reg_mr", hint="a copy of it") from None
    fault, hint = "", None
    if not view.nbytes:
        fault = "the buffer is empty"
    elif view.nbytes > limit:
        fault = f"{view.nbytes} bytes, the device registers at most {limit}"
    elif access & _REMOTE_WRITES and not access & ACCESS_LOCAL_WRITE:
        fault, hint = "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well", "LOCAL_WRITE | REMOTE_WRITE"
    elif view.readonly and access & (ACCESS_LOCAL_WRITE | _REMOTE_WRITES):
        fault, hint = "the buffer is read-only", "a bytearray, or access without LOCAL_WRITE"
    if fault:
        raise cm_error(errno.EINVAL, fault, "reg_mr", hint=hint)
    return view
