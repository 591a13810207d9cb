"""Work requests in the form in which libibverbs takes them: many at a time, in arrays that are reused.

A list of requests is an array of ``ibv_send_wr`` or ``ibv_recv_wr``, each of which points to the next, and an array of
``ibv_sge``. Inline data that are plain buffers are copied to a third array.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from ctypes import addressof, c_char, sizeof
from socket import htonl

from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.differences import RULES, To
from rdmacm.kernel.verbs.extended import EXTENDED_ONLY
from rdmacm.kernel.verbs.layouts import (
    ATOMIC_WR,
    BIND_WR,
    DATAGRAM_WR,
    ONE_RECV,
    RDMA_WR,
    RECV_WR,
    XRC_SRQN,
    ibv_recv_wr,
    ibv_send_wr,
)
from rdmacm.kernel.verbs.layouts import SGE as SGE_FORMAT
from rdmacm.kernel.verbs.memory import KernelMR, KernelMW
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.enums import MWType, QPType, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

_SGE_BYTES, _SEND_BYTES, _RECV_BYTES = SGE_FORMAT.size, sizeof(ibv_send_wr), sizeof(ibv_recv_wr)
_BIND_AT, _SRQN_AT = ibv_send_wr.bind_mw.offset, ibv_send_wr.qp_type.offset
_64_BITS = (1 << 64) - 1
#: How many requests an array has room for at least.
_FEWEST = 16

# What an opcode puts into a request: remote memory (or nothing), with immediate data or a key to invalidate as well; an
# atomic's operands; a destination; a window. NONE: ibv_send_wr has no room for it.
_RDMA, _RDMA_IMM, _RDMA_INVALIDATE, _ATOMIC, _DATAGRAM, _DATAGRAM_IMM, _BIND, _NONE = range(8)
_RELIABLE: dict[int, int] = {
    WROpcode.RDMA_WRITE: _RDMA,
    WROpcode.RDMA_WRITE_WITH_IMM: _RDMA_IMM,
    WROpcode.SEND: _RDMA,
    WROpcode.SEND_WITH_IMM: _RDMA_IMM,
    WROpcode.RDMA_READ: _RDMA,
    WROpcode.ATOMIC_CMP_AND_SWP: _ATOMIC,
    WROpcode.ATOMIC_FETCH_AND_ADD: _ATOMIC,
    WROpcode.LOCAL_INV: _RDMA_INVALIDATE,
    WROpcode.BIND_MW: _BIND,
    WROpcode.SEND_WITH_INV: _RDMA_INVALIDATE,
}
_DATAGRAMS: dict[int, int] = {WROpcode.SEND: _DATAGRAM, WROpcode.SEND_WITH_IMM: _DATAGRAM_IMM}

_put_sge, _put_rdma, _put_recv = SGE_FORMAT.pack_into, RDMA_WR.pack_into, RECV_WR.pack_into
_put_one = ONE_RECV.pack_into


class _Memory:
    """Bytes with a fixed address, until they grow."""

    __slots__ = ("address", "data")

    def __init__(self) -> None:
        self.grow(0)

    def grow(self, size: int) -> None:
        """Have room for ``size`` bytes. What was there is lost."""
        self.data = bytearray(max(size, 1))
        self.address = addressof(c_char.from_buffer(self.data))


class SendArray:
    """The send requests of one call. One thread at a time uses it."""

    __slots__ = ("_elements", "_forms", "_inline", "_max_inline", "_max_sge", "_room", "_wrs", "has_binds")

    def __init__(self, qp_type: QPType, max_sge: int, max_inline: int) -> None:
        self._max_sge = max(max_sge, 1)
        self._max_inline = max_inline
        forms = _DATAGRAMS if RULES[qp_type].to is To.HANDLE else _RELIABLE
        #: By opcode.
        self._forms = [forms.get(opcode, _NONE) for opcode in range(max(WROpcode) + 1)]
        self._wrs, self._elements, self._inline = _Memory(), _Memory(), _Memory()
        #: How many requests there is room for.
        self._room = 0
        #: Whether the last requests bind windows.
        self.has_binds: bool = False

    @property
    def address(self) -> int:
        """The address of the first request."""
        return self._wrs.address

    def index_of(self, address: int | None) -> int:
        """The index of a request by its address; 0 for none."""
        return (address - self._wrs.address) // _SEND_BYTES if address else 0

    def fill(self, wrs: Sequence[SendWR], is_xrc: bool, handles: Sequence[int]) -> int:
        """Translate requests, and return how many of them; the next one needs a call of its own, if any is left.

        Those are the binds of windows of type 1, and what :func:`refused` refuses. ``handles``: of datagrams, the
        addresses of the library's address handles.
        """
        if len(wrs) > self._room:
            self._make_room(len(wrs))
        self.has_binds = False
        data, elements, forms = self._wrs.data, self._elements.data, self._forms
        where, next_wr = self._elements.address, self._wrs.address
        at = done = end = 0
        for wr in wrs:
            form, begin = forms[wr.opcode], end
            next_wr += _SEND_BYTES
            try:
                for piece in wr.sg:
                    if type(piece) is SGE:
                        _put_sge(elements, end, piece.addr, piece.length, piece.lkey)
                    else:
                        self._put_other(piece, end, done)
                    end += _SGE_BYTES
                count = (end - begin) // _SGE_BYTES
                if form == _RDMA:
                    _put_rdma(
                        *(data, at, wr.wr_id & _64_BITS, next_wr, where + begin, count, wr.opcode, wr.send_flags, 0),
                        *(wr.remote_addr, wr.rkey),
                    )
                elif not self._put(wr, form, at, next_wr, where + begin, count, handles[done] if handles else 0):
                    break
                if is_xrc:
                    XRC_SRQN.pack_into(data, at + _SRQN_AT, wr.remote_srqn)
            except struct.error:
                break
            at += _SEND_BYTES
            done += 1
        if done:
            self._end(at - _SEND_BYTES)
        return done

    def _put(self, wr: SendWR, form: int, at: int, next_wr: int, where: int, count: int, handle: int) -> bool:
        """Translate a request of another form than RDMA; False if it needs a call of its own."""
        imm = 0
        if form in (_RDMA_IMM, _DATAGRAM_IMM):
            imm = htonl(wr.imm_data)
        elif form == _RDMA_INVALIDATE:
            imm = wr.invalidate_rkey
        data = self._wrs.data
        head = wr.wr_id & _64_BITS, next_wr, where, count, wr.opcode, wr.send_flags, imm
        if form in (_RDMA_IMM, _RDMA_INVALIDATE):
            _put_rdma(data, at, *head, wr.remote_addr, wr.rkey)
        elif form == _ATOMIC:
            ATOMIC_WR.pack_into(data, at, *head, wr.remote_addr, wr.compare_add, wr.swap, wr.rkey)
        elif form in (_DATAGRAM, _DATAGRAM_IMM):
            DATAGRAM_WR.pack_into(data, at, *head, handle, wr.remote_qpn, wr.remote_qkey)
        else:
            return form == _BIND and self._put_bind(wr, at, head)
        return True

    def _end(self, at: int) -> None:
        """Make the request at this offset the last one."""
        data = self._wrs.data
        data[at + 8 : at + 16] = bytes(8)

    def _make_room(self, count: int) -> None:
        room = self._room = max(_FEWEST, 1 << (count - 1).bit_length())
        self._wrs.grow(room * _SEND_BYTES)
        self._elements.grow(room * self._max_sge * _SGE_BYTES)
        if self._max_inline:
            self._inline.grow(room * self._max_inline)

    def _put_other(self, piece: SGE | Buffer, at: int, number: int) -> None:
        """An element that is a buffer to send inline, or of a subclass."""
        elements = self._elements.data
        if isinstance(piece, SGE):
            _put_sge(elements, at, piece.addr, piece.length, piece.lkey)
            return
        view = byte_view(piece)
        # The request's elements have this place one after the other, each in front of the next element's bytes.
        begin = number * self._max_inline + self._inline_used(at, number)
        self._inline.data[begin : begin + len(view)] = view
        _put_sge(elements, at, self._inline.address + begin, len(view), 0)

    def _inline_used(self, at: int, number: int) -> int:
        """How many bytes of its place the elements before this one have taken."""
        begin = self._inline.address + number * self._max_inline
        end = begin + self._max_inline
        used = 0
        while at >= _SGE_BYTES:
            at -= _SGE_BYTES
            address, length, _ = SGE_FORMAT.unpack_from(self._elements.data, at)
            if begin <= address <= end:
                used = address - begin + length
                break
        return used

    def _put_bind(self, wr: SendWR, at: int, head: tuple[int, ...]) -> bool:
        """A bind of a window of type 2; False for another."""
        mw, info = wr.mw, wr.bind_info
        assert mw is not None
        assert info is not None
        window, region = mw.backend, None if info.mr is None else info.mr.backend
        if not isinstance(window, KernelMW) or window.type is not MWType.TYPE_2:
            return False
        self.has_binds = True
        address = region.address if isinstance(region, KernelMR) else 0
        _put_rdma(self._wrs.data, at, *head, 0, 0)
        values = window.address, wr.rkey, address, info.addr, info.length, int(info.mw_access_flags)
        BIND_WR.pack_into(self._wrs.data, at + _BIND_AT, *values)
        return True


class RecvArray:
    """The receive requests of one call. One thread at a time uses it."""

    __slots__ = ("_data", "_max_sge", "_slot_bytes", "_slots", "_wrs")

    def __init__(self, max_sge: int) -> None:
        self._max_sge = max(max_sge, 1)
        #: A request and its elements follow each other.
        self._slot_bytes = _RECV_BYTES + self._max_sge * _SGE_BYTES
        self._wrs = _Memory()
        self._data = self._wrs.data
        #: Of each slot: its offset, the address of the next one, the address of its elements.
        self._slots: list[tuple[int, int, int]] = []

    @property
    def address(self) -> int:
        """The address of the first request."""
        return self._wrs.address

    def index_of(self, address: int | None) -> int:
        """The index of a request by its address; 0 for none."""
        return (address - self._wrs.address) // self._slot_bytes if address else 0

    def fill(self, wrs: Sequence[RecvWR]) -> int:
        """Translate requests, and return how many of them; the next one has a value that is out of range."""
        if len(wrs) > len(self._slots):
            self._make_room(len(wrs))
        data, done, at = self._data, 0, 0
        try:
            for wr, (at, next_wr, where) in zip(wrs, self._slots, strict=False):
                sg = wr.sg
                if len(sg) == 1:
                    (piece,) = sg
                    _put_one(data, at, wr.wr_id & _64_BITS, next_wr, where, 1, piece.addr, piece.length, piece.lkey)
                else:
                    _put_recv(data, at, wr.wr_id & _64_BITS, next_wr, where, len(sg))
                    end = at + _RECV_BYTES
                    for piece in sg:
                        _put_sge(data, end, piece.addr, piece.length, piece.lkey)
                        end += _SGE_BYTES
                done += 1
        except struct.error:
            at -= self._slot_bytes
        if done:
            data[at + 8 : at + 16] = bytes(8)
        return done

    def _make_room(self, count: int) -> None:
        room, size = max(_FEWEST, 1 << (count - 1).bit_length()), self._slot_bytes
        self._wrs.grow(room * size)
        self._data, base = self._wrs.data, self._wrs.address
        self._slots = [(at, base + at + size, base + at + _RECV_BYTES) for at in range(0, room * size, size)]


def refused(wr: SendWR | RecvWR, step: str, device: str) -> RdmaError:
    """The error of a request that could not be translated."""
    hint = None
    if isinstance(wr, SendWR) and wr.opcode in EXTENDED_ONLY:
        text = f"the queue pair was not made for {WROpcode(wr.opcode).name}, or the device has none"
        code, hint = errno.EOPNOTSUPP, "a QPEx, with send_ops_flags, on a device that has it"
    else:
        code, text = errno.EINVAL, "a number is out of range"
    error = cm_error(code, text, step, device, hint)
    error.bad_wr = wr
    return error
