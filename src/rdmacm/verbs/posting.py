"""The checks of work requests in ibv_post_send(3) and ibv_post_recv(3).

They are made here, once, when a request is posted; a refused request never reaches the device. The device alone knows
whether an lkey is valid: a wrong one shows in the completion (LOC_PROT_ERR).

Every error of a post has ``bad_wr``, the refused request.

A number is anything with ``__index__``, so that a float is refused before anything is queued:
``index`` raises TypeError for it, and :func:`refuse` names the field.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import NoReturn, TypeVar

from rdmacm.address import ALL_BITS_64
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.plainints import SEND_INLINE
from rdmacm.verbs.ah import AH
from rdmacm.verbs.buffers import byte_view
from rdmacm.verbs.enums import AccessFlag, PlacementType, QPType, SelectivityLevel, SendFlag, WROpcode
from rdmacm.verbs.mw import MW
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.wr import SGE, MWBindInfo, RecvWR, SendWR

#: What the check of a request raises. The last two: a value has a wrong type.
REFUSALS = (RdmaError, TypeError, AttributeError)

W = TypeVar("W", SendWR, RecvWR)

_and = int.__and__  # of two ints, also where the user has passed a SendFlag
_ALL_FLAGS = int(sum(SendFlag))
_ALL_ACCESS = int(sum(AccessFlag))
_ALL_PLACEMENTS = int(sum(PlacementType))
_LEVELS = [int(level) for level in SelectivityLevel]

# The operands that an opcode takes from its request.
_REMOTE, _IMM, _FETCH, _ATOMIC, _INVALIDATE, _DATAGRAM, _LOCAL, _BIND, _FLUSH, _SRQN = (1 << bit for bit in range(10))
_W = WROpcode
_UC: dict[WROpcode, int] = {
    _W.SEND: 0,
    _W.SEND_WITH_IMM: _IMM,
    _W.RDMA_WRITE: _REMOTE,
    _W.RDMA_WRITE_WITH_IMM: _REMOTE | _IMM,
    _W.LOCAL_INV: _LOCAL | _INVALIDATE,
    _W.BIND_MW: _LOCAL | _BIND,
}
_RELIABLE = {
    **_UC,
    _W.SEND_WITH_INV: _INVALIDATE,
    _W.RDMA_READ: _REMOTE | _FETCH,
    _W.ATOMIC_CMP_AND_SWP: _REMOTE | _FETCH | _ATOMIC,
    _W.ATOMIC_FETCH_AND_ADD: _REMOTE | _FETCH | _ATOMIC,
}
#: Type of queue pair → opcode → its operands. A type refuses the opcodes that it lacks.
REQUIRED_OPERANDS: dict[QPType, dict[WROpcode, int]] = {
    QPType.RC: {**_RELIABLE, _W.FLUSH: _REMOTE | _FLUSH, _W.ATOMIC_WRITE: _REMOTE | _ATOMIC},
    QPType.XRC_SEND: {opcode: bits if bits & _LOCAL else bits | _SRQN for opcode, bits in _RELIABLE.items()},
    QPType.XRC_RECV: {},
    QPType.UC: _UC,
    QPType.UD: {_W.SEND: _DATAGRAM, _W.SEND_WITH_IMM: _DATAGRAM | _IMM},
}
#: The same with opcodes as indices; None for opcodes that the type refuses.
_OPERANDS_BY_CODE = {
    qp_type: [legal.get(_W(code)) if code in set(_W) else None for code in range(max(_W) + 1)]
    for qp_type, legal in REQUIRED_OPERANDS.items()
}


#: The other numbers of a send request.
_NUMBERS = (
    *("send_flags", "remote_addr", "rkey", "compare_add", "swap", "imm_data", "invalidate_rkey"),
    *("flush_length", "flush_type", "flush_level", "remote_qpn", "remote_qkey", "remote_srqn"),
)


class SendRules:
    """What the send queue of one queue pair accepts."""

    __slots__ = ("_max_inline", "_max_sge", "_operands", "_pd", "_qp_type", "max_message")

    def __init__(self, qp_type: QPType, pd: PD | None, max_sge: int, max_inline: int, max_message: int) -> None:
        self._qp_type = qp_type
        self._pd = pd
        self._max_sge = max_sge
        self._max_inline = max_inline  # bytes
        self._operands = _OPERANDS_BY_CODE[qp_type]
        #: The longest message in bytes; the path MTU for datagrams.
        self.max_message: int = max_message

    def check(self, wr: SendWR) -> None:
        """EINVAL where the type, a size or a value does not allow the request."""
        opcode = wr.opcode
        try:
            operands = self._operands[opcode] if opcode >= 0 else None
        except (IndexError, TypeError):
            operands = None
        if operands is None:
            raise _refused(wr, f"{opcode!r} is not for {self._qp_type.name}")
        sg = wr.sg
        if len(sg) > self._max_sge:
            raise _refused(wr, f"{len(sg)} elements, and max_send_sge is {self._max_sge}")
        flags = wr.send_flags
        if not 0 <= flags <= _ALL_FLAGS:
            raise _refused(wr, f"unknown send_flags {flags & ~_ALL_FLAGS:#x}", "flags of SendFlag")
        inline = _and(flags, SEND_INLINE)
        index(wr.wr_id)
        length = 0
        for piece in sg:
            if isinstance(piece, SGE):
                part = index(piece.length)
                index(piece.addr)
                index(piece.lkey)
                if part < 0:
                    raise _refused(wr, f"an element of {part} bytes")
            elif not inline:
                raise _refused(wr, "a buffer that is not registered", "SendFlag.INLINE, or mr.sge()")
            elif type(piece) is bytes:
                part = len(piece)
            else:
                try:
                    part = len(byte_view(piece))
                except TypeError:
                    raise _refused(wr, f"{type(piece).__name__} is neither an SGE nor a buffer") from None
                except BufferError:
                    raise _refused(wr, "a buffer that is not contiguous") from None
            length += part
        if inline:
            if operands & _FETCH:
                raise _refused(wr, "INLINE is for data that is sent")
            # The 8 bytes of an ATOMIC WRITE are part of the request in C (ibv_wr_atomic_write()).
            if length > self._max_inline and not (operands & _ATOMIC and length == 8):
                raise _refused(wr, f"{length} bytes inline, and max_inline_data is {self._max_inline}")
        if length > self.max_message:
            raise _refused(wr, f"{length} bytes, and a message has at most {self.max_message}")
        if operands:
            self._check_operands(wr, operands, length)

    def _check_operands(self, wr: SendWR, operands: int, length: int) -> None:
        if operands & _REMOTE:
            if not 0 <= index(wr.remote_addr) <= ALL_BITS_64:
                raise _refused(wr, f"remote_addr {wr.remote_addr:#x} has more than 64 bits")
            if not 0 <= index(wr.rkey) < 1 << 32:
                raise _refused(wr, f"rkey {wr.rkey:#x} has more than 32 bits")
        if operands & _ATOMIC:
            if length != 8:
                raise _refused(wr, f"an atomic is for 8 bytes, not {length}")
            if wr.remote_addr & 7:
                raise _refused(wr, f"an atomic's remote_addr is a multiple of 8, not {wr.remote_addr:#x}")
            if not (0 <= index(wr.compare_add) <= ALL_BITS_64 and 0 <= index(wr.swap) <= ALL_BITS_64):
                raise _refused(wr, "the operands of an atomic have 64 bits")
        if operands & _FLUSH:
            self._check_flush(wr)
        if operands & _IMM and not 0 <= index(wr.imm_data) < 1 << 32:
            raise _refused(wr, f"imm_data {wr.imm_data:#x} has more than 32 bits")
        if operands & _INVALIDATE and not 0 <= index(wr.invalidate_rkey) < 1 << 32:
            raise _refused(wr, f"invalidate_rkey {wr.invalidate_rkey:#x} has more than 32 bits")
        if operands & _SRQN and not 0 <= index(wr.remote_srqn) < 1 << 24:
            raise _refused(wr, f"remote_srqn {wr.remote_srqn:#x} has more than 24 bits")
        if operands & _DATAGRAM:
            self._check_datagram(wr)
        if operands & _LOCAL:
            if wr.sg:
                raise _refused(wr, f"{_W(wr.opcode).name} has no elements")
            if operands & _BIND:
                self._check_bind(wr)

    def _check_bind(self, wr: SendWR) -> None:
        mw, info = wr.mw, wr.bind_info
        if not isinstance(mw, MW) or not isinstance(info, MWBindInfo):
            raise _refused(wr, "a bind needs a memory window and an MWBindInfo", "set_bind_wr()")
        if not isinstance(info.mr, MR | None):
            raise _refused(wr, f"mr is {info.mr!r}, not of class MR")
        for part in (mw, info.mr):
            if part is not None and part.closed:
                raise part._closed_error("post_send")
        if index(wr.rkey) >> 8 != mw.rkey >> 8:
            raise _refused(wr, f"rkey {wr.rkey:#x} differs from the window's in more than 8 bits", "inc_rkey(mw.rkey)")
        for name, value in (("addr", info.addr), ("length", info.length)):
            if not 0 <= index(value) <= ALL_BITS_64:
                raise _refused(wr, f"{name} {value:#x} has more than 64 bits")
        if info.mr is None and (info.addr or info.length):
            raise _refused(wr, "addr and length of no region")
        unknown = index(info.mw_access_flags) & ~_ALL_ACCESS
        if unknown:
            raise _refused(wr, f"unknown mw_access_flags {unknown:#x}", "flags of AccessFlag")

    def _check_flush(self, wr: SendWR) -> None:
        if wr.sg:
            raise _refused(wr, "FLUSH takes no elements", "flush_length")
        if not 0 <= index(wr.flush_length) <= self.max_message:
            raise _refused(wr, f"flush_length is {wr.flush_length}, and may be 0 to {self.max_message}")
        if not 0 < index(wr.flush_type) <= _ALL_PLACEMENTS:
            raise _refused(wr, f"flush_type is {wr.flush_type:#x}", "flags of PlacementType")
        if index(wr.flush_level) not in _LEVELS:
            raise _refused(wr, f"flush_level is {wr.flush_level}", "a SelectivityLevel")

    def _check_datagram(self, wr: SendWR) -> None:
        ah = wr.ah
        if not isinstance(ah, AH):
            raise _refused(wr, "a datagram needs an address handle", "set_wr_ud()")
        if ah.closed:
            raise ah._closed_error("post_send")
        if ah.pd is not self._pd:
            raise _refused(wr, "the address handle is of another protection domain")
        if not 0 <= index(wr.remote_qpn) < 1 << 24:
            raise _refused(wr, f"remote_qpn {wr.remote_qpn:#x} has more than 24 bits")
        if not 0 <= index(wr.remote_qkey) < 1 << 32:
            raise _refused(wr, f"remote_qkey {wr.remote_qkey:#x} has more than 32 bits")


def check_recv(wr: RecvWR, max_sge: int) -> None:
    """EINVAL for more than ``max_sge`` elements, or one that is not an SGE of 0 bytes or more."""
    sg = wr.sg
    if len(sg) > max_sge:
        raise _refused(wr, f"{len(sg)} elements, and max_recv_sge is {max_sge}")
    index(wr.wr_id)
    try:
        for sge in sg:
            index(sge.addr)
            index(sge.lkey)
            if index(sge.length) < 0:
                raise _refused(wr, f"an element of {sge.length} bytes")
    except AttributeError:
        raise _refused(wr, "a buffer that is not registered", "mr.sge()") from None


def post_list(wrs: Iterable[W], check: Callable[[W], None], post: Callable[[list[W]], None]) -> None:
    """Post the requests before the first that ``check`` refuses, and raise its error."""
    good: list[W] = []
    try:
        for wr in wrs:
            try:
                check(wr)
            except REFUSALS as error:
                refuse(wr, error)
            good.append(wr)
    finally:
        if good:
            post(good)


def first(wrs: W | Iterable[W]) -> W | None:
    """The request that a post refuses which takes none."""
    return wrs if isinstance(wrs, SendWR | RecvWR) else next(iter(wrs), None)


def refuse(wr: SendWR | RecvWR, error: Exception) -> NoReturn:
    """Raise the error of a request whose check has raised one of REFUSALS."""
    if isinstance(error, RdmaError):
        error.bad_wr = wr
        raise error
    fault = next((f"{name} is {value!r}" for name, value in _numbers(wr) if not hasattr(value, "__index__")), None)
    if isinstance(wr, SendWR | RecvWR) and not isinstance(wr.sg, Iterable):
        fault = f"sg is {wr.sg!r}, not a list of elements"
    refusal = _refused(wr, str(error) if fault is None else f"{fault}, not a whole number")
    refusal.bad_wr = wr
    raise refusal from error


def _numbers(wr: object) -> Iterator[tuple[str, object]]:
    """The numbers of a request and of its elements, with the names of the fields."""
    if isinstance(wr, SendWR | RecvWR):
        yield "wr_id", wr.wr_id
        for piece in wr.sg if isinstance(wr.sg, Iterable) else ():
            if isinstance(piece, SGE):
                yield from (("addr", piece.addr), ("length", piece.length), ("lkey", piece.lkey))
    if isinstance(wr, SendWR):
        yield from ((name, getattr(wr, name)) for name in _NUMBERS)


def _refused(wr: object, why: str, hint: str | None = None) -> RdmaError:
    step = "post_recv" if isinstance(wr, RecvWR) else "post_send"
    return cm_error(errno.EINVAL, why, step, f"wr_id {getattr(wr, 'wr_id', '-')}", hint)
