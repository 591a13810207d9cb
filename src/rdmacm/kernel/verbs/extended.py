"""Work requests by the functions of ``struct ibv_qp_ex``, ibv_wr_post(3): the only way to post FLUSH and ATOMIC WRITE.

A queue pair has them if it was made by ibv_create_qp_ex(3) with the operations that it is for. From ``wr_start`` to
``wr_complete`` the library holds a lock of the queue pair, which other threads wait for without giving up Python's. So
threads take turns by a lock of this package before they enter the library, for posts of either form.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char, string_at
from socket import htonl
from typing import Any

from rdmacm.errors import cm_error
from rdmacm.kernel.differences import RULES, To
from rdmacm.kernel.verbs.layouts import SGE as SGE_FORMAT
from rdmacm.kernel.verbs.layouts import ibv_mw_bind_info, ibv_qp_ex, ibv_sge
from rdmacm.kernel.verbs.library import short_function
from rdmacm.kernel.verbs.memory import KernelMR, KernelMW
from rdmacm.proto.plainints import SEND_INLINE
from rdmacm.verbs.buffers import byte_view
from rdmacm.verbs.enums import DeviceCapFlag, MWType, QPType, SendOpsFlag, WROpcode
from rdmacm.verbs.posting import REQUIRED_OPERANDS
from rdmacm.verbs.wr import SGE, SendWR

#: Operations that ibv_post_send(3) has no room for.
EXTENDED_ONLY = frozenset({WROpcode.FLUSH, WROpcode.ATOMIC_WRITE})
_64_BITS = (1 << 64) - 1
#: The operations of a device whose library or driver knows fewer: each is left out with those before it.
_NEWEST = (SendOpsFlag.FLUSH, SendOpsFlag.ATOMIC_WRITE, SendOpsFlag.LOCAL_INV)
#: What a device must have for an operation, any of these flags.
_NEEDED = {
    SendOpsFlag.FLUSH: DeviceCapFlag.FLUSH_GLOBAL | DeviceCapFlag.FLUSH_PERSISTENT,
    SendOpsFlag.ATOMIC_WRITE: DeviceCapFlag.ATOMIC_WRITE,
}


#: The function that begins a request, by opcode.
_BEGINNINGS: dict[int, str] = {
    WROpcode.SEND: "wr_send",
    WROpcode.SEND_WITH_IMM: "wr_send_imm",
    WROpcode.SEND_WITH_INV: "wr_send_inv",
    WROpcode.RDMA_WRITE: "wr_rdma_write",
    WROpcode.RDMA_WRITE_WITH_IMM: "wr_rdma_write_imm",
    WROpcode.RDMA_READ: "wr_rdma_read",
    WROpcode.ATOMIC_CMP_AND_SWP: "wr_atomic_cmp_swp",
    WROpcode.ATOMIC_FETCH_AND_ADD: "wr_atomic_fetch_add",
    WROpcode.LOCAL_INV: "wr_local_inv",
    WROpcode.BIND_MW: "wr_bind_mw",
    WROpcode.FLUSH: "wr_flush",
    WROpcode.ATOMIC_WRITE: "wr_atomic_write",
}
#: The other functions.
_OTHERS = ("wr_set_ud_addr", "wr_set_inline_data", "wr_set_sge_list", "wr_start", "wr_complete", "wr_abort")
#: Requests without data of their own.
_WITHOUT_DATA = frozenset({WROpcode.LOCAL_INV, WROpcode.BIND_MW, WROpcode.FLUSH, WROpcode.ATOMIC_WRITE})


def _takes_no_list(wr: SendWR) -> bool:
    return wr.opcode in _WITHOUT_DATA or bool(wr.send_flags & SEND_INLINE)


def operations_to_try(qp_type: QPType, asked: SendOpsFlag, flags: int) -> list[SendOpsFlag]:
    """The operations to make an extended queue pair for, of which the first is used that the device takes.

    ``asked``: those that the program has named; 0 for all that the device has. ``flags``: its ``device_cap_flags_ex``.
    A library may know operations that the device has not; a queue pair with them would fail at the first such request.
    """
    lacking = SendOpsFlag(0)
    for operation, needed in _NEEDED.items():
        if not flags & needed:
            lacking |= operation
    if asked:
        return [] if asked & lacking else [asked]
    every = SendOpsFlag(0)
    for opcode in REQUIRED_OPERANDS[qp_type]:
        every |= SendOpsFlag[opcode.name] & ~lacking
    tries = [every]
    for flag in _NEWEST:
        if every & flag:
            every &= ~flag
            tries.append(every)
    return [flags for flags in tries if flags]


class ExtendedPosting:
    """The functions of one queue pair. ``operations``: those that it was made for."""

    def __init__(self, address: int, qp_type: QPType, operations: SendOpsFlag) -> None:
        self._qp = ibv_qp_ex.from_address(address)
        self._address = address
        self._beginnings: dict[int, Any] = {}
        for opcode, name in _BEGINNINGS.items():
            if operations & SendOpsFlag[WROpcode(opcode).name]:
                function = short_function(self._qp, name)
                if function is not None:
                    self._beginnings[opcode] = function
        others = set(_OTHERS) if RULES[qp_type].to is To.HANDLE else set(_OTHERS) - {"wr_set_ud_addr"}
        self._others = {name: short_function(self._qp, name) for name in others}
        self._lock = threading.RLock()
        self._is_posting = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """For ``with``: no other thread posts to the queue pair, or releases it."""
        with self._lock:
            if self._is_posting:  # a finalizer of the program that runs in the midst of a post
                raise cm_error(errno.EBUSY, "this thread is posting to the queue pair already", "post_send")
            self._is_posting = True
            try:
                yield
            finally:
                self._is_posting = False

    def takes(self, wr: SendWR) -> bool:
        """Whether there is a function for a request that does it right.

        A window of type 1 is bound by another call. rdma_rxe's ``wr_set_sge_list`` of rdma-core 44 takes the length of
        the first element for that of each, so elements of different lengths are left to ibv_post_send(3).
        """
        if len({element.length for element in wr.sg if isinstance(element, SGE)}) > 1 and not _takes_no_list(wr):
            return False
        if wr.opcode == WROpcode.BIND_MW:
            window = None if wr.mw is None else wr.mw.backend
            return wr.opcode in self._beginnings and isinstance(window, KernelMW) and window.type is MWType.TYPE_2
        return wr.opcode in self._beginnings

    def post(self, wrs: Sequence[SendWR], handles: Sequence[int]) -> int:
        """Post requests, all or none; the result of ``wr_complete``. Called in a :meth:`turn`.

        ``handles``: of datagrams, the addresses of the library's address handles.
        """
        kept: list[object] = []  # what the library reads until it has copied it
        prepared = [self._prepare(wr, kept) for wr in wrs]
        qp, address, others = self._qp, self._address, self._others
        others["wr_start"](address)
        try:
            for number, (wr, (flags, arguments, data)) in enumerate(zip(wrs, prepared, strict=True)):
                qp.wr_id, qp.wr_flags = wr.wr_id & _64_BITS, flags
                self._beginnings[wr.opcode](address, *arguments)
                if handles:
                    others["wr_set_ud_addr"](address, handles[number], wr.remote_qpn, wr.remote_qkey)
                if data is not None:
                    name, *rest = data
                    others[name](address, *rest)
        except BaseException:
            others["wr_abort"](address)
            raise
        return int(others["wr_complete"](address))

    def _prepare(self, wr: SendWR, kept: list[object]) -> tuple[int, tuple[Any, ...], tuple[Any, ...] | None]:
        """The flags of a request, the arguments of the function that begins it, and the call that sets its data."""
        flags, opcode = int(wr.send_flags), wr.opcode
        if opcode == WROpcode.ATOMIC_WRITE:
            if not flags & SEND_INLINE:
                text = "ATOMIC WRITE takes its 8 bytes inline through libibverbs"
                error = cm_error(errno.EINVAL, text, "post_send", f"wr_id {wr.wr_id}", "SendFlag.INLINE")
                error.bad_wr = wr
                raise error
            flags &= ~SEND_INLINE
        if opcode in _WITHOUT_DATA:
            return flags, self._arguments(wr, kept), None
        if flags & SEND_INLINE:
            where, length = _kept_bytes(wr, kept)
            return flags, self._arguments(wr, kept), ("wr_set_inline_data", where, length)
        elements = (ibv_sge * max(len(wr.sg), 1))()
        for number, piece in enumerate(wr.sg):
            assert isinstance(piece, SGE)
            SGE_FORMAT.pack_into(elements, number * SGE_FORMAT.size, piece.addr, piece.length, piece.lkey)
        kept.append(elements)
        return flags, self._arguments(wr, kept), ("wr_set_sge_list", len(wr.sg), addressof(elements))

    def _arguments(self, wr: SendWR, kept: list[object]) -> tuple[Any, ...]:
        opcode = wr.opcode
        remote = wr.rkey, wr.remote_addr
        if opcode == WROpcode.SEND:
            return ()
        if opcode == WROpcode.SEND_WITH_IMM:
            return (htonl(wr.imm_data),)
        if opcode in (WROpcode.SEND_WITH_INV, WROpcode.LOCAL_INV):
            return (wr.invalidate_rkey,)
        if opcode == WROpcode.RDMA_WRITE_WITH_IMM:
            return *remote, htonl(wr.imm_data)
        if opcode == WROpcode.ATOMIC_CMP_AND_SWP:
            return *remote, wr.compare_add, wr.swap
        if opcode == WROpcode.ATOMIC_FETCH_AND_ADD:
            return *remote, wr.compare_add
        if opcode == WROpcode.FLUSH:
            return *remote, wr.flush_length, int(wr.flush_type), int(wr.flush_level)
        if opcode == WROpcode.ATOMIC_WRITE:
            return *remote, _kept_bytes(wr, kept)[0]
        if opcode == WROpcode.BIND_MW:
            return self._bind_arguments(wr, kept)
        return remote

    def _bind_arguments(self, wr: SendWR, kept: list[object]) -> tuple[Any, ...]:
        mw, info = wr.mw, wr.bind_info
        assert mw is not None
        assert info is not None
        window, region = mw.backend, None if info.mr is None else info.mr.backend
        assert isinstance(window, KernelMW)
        address = region.address if isinstance(region, KernelMR) else None
        given = ibv_mw_bind_info(address, info.addr, info.length, int(info.mw_access_flags))
        kept.append(given)
        return window.address, wr.rkey, addressof(given)


def _kept_bytes(wr: SendWR, kept: list[object]) -> tuple[int, int]:
    """The inline data of a request: address and length of a copy that ``kept`` keeps."""
    data = bytearray(
        b"".join(string_at(part.addr, part.length) if isinstance(part, SGE) else byte_view(part) for part in wr.sg)
    )
    length = len(data)
    data += b"\0"  # an empty buffer has no address
    kept.append(data)
    return addressof(c_char.from_buffer(data)), length
