"""Extended queue pairs: ibv_create_qp_ex(3), and work requests that are built by calls, ibv_wr_post(3).

A batch begins with :meth:`QPEx.wr_start` and is posted by :meth:`QPEx.wr_complete`, whole or not at all::

    qp.wr_start()
    qp.wr_id, qp.wr_flags = 7, SendFlag.SIGNALED
    qp.wr_rdma_write(rkey, remote_addr)
    qp.wr_set_sge(mr.sge(0, 64))
    qp.wr_complete()

Each request is a :class:`~rdmacm.verbs.SendWR`, with the checks and the completions of one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rdmacm.errors import RdmaError, cm_error
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.checks import check_kind, flags, member
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import QPType, SendFlag, SendOpsFlag, WROpcode
from rdmacm.verbs.mw import MW
from rdmacm.verbs.pd import PD
from rdmacm.verbs.posting import REFUSALS, REQUIRED_OPERANDS, refuse
from rdmacm.verbs.qp import QP, QPInitAttr, QPInitAttrEx
from rdmacm.verbs.wr import SGE, MWBindInfo, SendWR

S = TypeVar("S", bound=Sequence[Any])

_INLINE = int(SendFlag.INLINE)


@dataclass(slots=True)
class DataBuffer:
    """``struct ibv_data_buf``: inline data.

    - ``addr``: any contiguous buffer.
    - ``length``: how many of its bytes, from the first.
    """

    addr: Buffer
    length: int


def _opcodes_asked_for(init_attr: QPInitAttr) -> frozenset[WROpcode]:
    """The operations that a queue pair is made for; EOPNOTSUPP for one that its type lacks."""
    qp_type = member(QPType, init_attr.qp_type, "qp_type", "create_qp")
    supported = frozenset(REQUIRED_OPERANDS.get(qp_type, ()))
    if not isinstance(init_attr, QPInitAttrEx):
        return supported
    asked = flags(SendOpsFlag, init_attr.send_ops_flags, "send_ops_flags", "create_qp")
    opcodes = frozenset(WROpcode[str(each.name)] for each in asked) or supported
    lacking = opcodes - supported
    if lacking:
        text = f"{qp_type.name} has no {', '.join(sorted(each.name for each in lacking))}"
        raise cm_error(errno.EOPNOTSUPP, text, "create_qp")
    return opcodes


class QPEx(QP):
    """An extended queue pair, ``struct ibv_qp_ex``: a :class:`QP` that also builds requests by calls, ibv_wr_post(3).

    Made with a :class:`QPInitAttr`, every operation of the type that the device has may be used. EOPNOTSUPP: an
    operation of ``send_ops_flags`` that the type or the device lacks; :class:`QP` has the arguments and the other
    errors.

    Between :meth:`wr_start` and :meth:`wr_complete`, a call such as :meth:`wr_send` begins a request with the present
    :attr:`wr_id` and :attr:`wr_flags`; the ``wr_set`` calls after it belong to that request. What is wrong with them
    is the error of :meth:`wr_complete`, which then posts nothing. Outside a batch, each of them raises EINVAL. A batch
    is of one thread: C makes other threads wait in ``wr_start``, where they get EBUSY here.
    """

    __slots__ = {
        "wr_id": "The ``wr_id`` of the requests that begin from now on.",
        "wr_flags": "Their ``send_flags``, a :class:`SendFlag`. INLINE is added by the calls that set inline data.",
        "_batch": "The requests since wr_start(); None outside a batch.",
        "_fault": "The first error of the batch.",
        "_has_data": "Whether the data of the last request are set.",
        "_opcodes": "What it was made for.",
        "_send_ops": "``send_ops_flags`` of ``init_attr``.",
    }

    def __init__(self, creator: PD | Context, init_attr: QPInitAttr, qp_attr: QPAttr | None = None) -> None:
        self._closed = True
        check_kind("init_attr", init_attr, QPInitAttr, "create_qp")
        self._opcodes = _opcodes_asked_for(init_attr)
        asked = init_attr.send_ops_flags if isinstance(init_attr, QPInitAttrEx) else 0
        self._send_ops = SendOpsFlag(int(asked))
        self.wr_id: int = 0
        self.wr_flags: int = 0
        self._batch: list[SendWR] | None = None
        self._fault: RdmaError | None = None
        self._has_data = False
        super().__init__(creator, init_attr, qp_attr)

    # -- batches --------------------------------------------------------------------------------------

    def wr_start(self) -> None:
        """Begin a batch, ibv_wr_start(3). EBUSY: one has begun."""
        self._check_open("wr_start")
        if self._batch is not None:
            raise cm_error(errno.EBUSY, "a batch has begun", "wr_start", hint="wr_complete() or wr_abort()")
        self._batch = []
        self._fault = None

    def wr_complete(self) -> None:
        """Post the requests of the batch and end it, ibv_wr_complete(3).

        If one of them is refused, none is posted, and the error's ``bad_wr`` is that request. Errors are those of
        :meth:`QP.post_send`; EINVAL also for a request that the queue pair was not made for, or whose data are set
        twice.
        """
        batch, fault = self._end("wr_complete")
        if fault is not None:
            raise fault
        if not batch:
            return
        if not self._takes_sends():
            raise self._takes_no_sends(batch)
        for wr in batch:
            try:
                self._send_rules.check(wr)
            except REFUSALS as error:
                refuse(wr, error)
        self.backend.post_send_all(batch)

    def wr_abort(self) -> None:
        """Drop the requests of the batch and end it, ibv_wr_abort(3)."""
        self._end("wr_abort")

    def _end(self, step: str) -> tuple[list[SendWR], RdmaError | None]:
        batch, self._batch = self._batch, None
        if batch is None:
            raise _no_batch(step)
        fault, self._fault = self._fault, None
        return batch, fault

    # -- requests -------------------------------------------------------------------------------------

    def wr_send(self) -> None:
        """Begin a SEND."""
        self._begin("wr_send", WROpcode.SEND)

    def wr_send_imm(self, imm_data: int) -> None:
        """Begin a SEND with immediate data, a number of 32 bits."""
        self._begin("wr_send_imm", WROpcode.SEND_WITH_IMM).imm_data = imm_data

    def wr_send_inv(self, invalidate_rkey: int) -> None:
        """Begin a SEND that revokes one of the peer's keys."""
        self._begin("wr_send_inv", WROpcode.SEND_WITH_INV).invalidate_rkey = invalidate_rkey

    def wr_rdma_write(self, rkey: int, remote_addr: int) -> None:
        """Begin an RDMA WRITE to the peer's memory."""
        self._begin("wr_rdma_write", WROpcode.RDMA_WRITE).set_wr_rdma(rkey, remote_addr)

    def wr_rdma_write_imm(self, rkey: int, remote_addr: int, imm_data: int) -> None:
        """Begin an RDMA WRITE with immediate data, a number of 32 bits."""
        wr = self._begin("wr_rdma_write_imm", WROpcode.RDMA_WRITE_WITH_IMM)
        wr.set_wr_rdma(rkey, remote_addr)
        wr.imm_data = imm_data

    def wr_rdma_read(self, rkey: int, remote_addr: int) -> None:
        """Begin an RDMA READ of the peer's memory."""
        self._begin("wr_rdma_read", WROpcode.RDMA_READ).set_wr_rdma(rkey, remote_addr)

    def wr_atomic_cmp_swp(self, rkey: int, remote_addr: int, compare: int, swap: int) -> None:
        """Begin a COMPARE & SWAP of 8 bytes of the peer's memory."""
        wr = self._begin("wr_atomic_cmp_swp", WROpcode.ATOMIC_CMP_AND_SWP)
        wr.set_wr_atomic(rkey, remote_addr, compare, swap)

    def wr_atomic_fetch_add(self, rkey: int, remote_addr: int, add: int) -> None:
        """Begin a FETCH & ADD of 8 bytes of the peer's memory."""
        self._begin("wr_atomic_fetch_add", WROpcode.ATOMIC_FETCH_AND_ADD).set_wr_atomic(rkey, remote_addr, add)

    def wr_bind_mw(self, mw: MW, rkey: int, bind_info: MWBindInfo) -> None:
        """Begin to bind a memory window of type 2; ``rkey`` is its new key (:func:`inc_rkey`)."""
        wr = self._begin("wr_bind_mw", WROpcode.BIND_MW)
        wr.mw, wr.bind_info, wr.rkey = mw, bind_info, rkey

    def wr_local_inv(self, invalidate_rkey: int) -> None:
        """Begin to revoke a key of this side's."""
        self._begin("wr_local_inv", WROpcode.LOCAL_INV).invalidate_rkey = invalidate_rkey

    def wr_flush(self, rkey: int, remote_addr: int, length: int, type: int, level: int) -> None:
        """Begin a FLUSH of the peer's memory.

        ``type``: a :class:`PlacementType`; ``level``: a :class:`SelectivityLevel`.
        """
        self._begin("wr_flush", WROpcode.FLUSH).set_wr_flush(rkey, remote_addr, length, type, level)

    def wr_atomic_write(self, rkey: int, remote_addr: int, atomic_wr: Buffer) -> None:
        """Begin an ATOMIC WRITE of the first 8 bytes of a buffer, which are copied, to the peer's memory."""
        step = "wr_atomic_write"
        self._begin(step, WROpcode.ATOMIC_WRITE).set_wr_rdma(rkey, remote_addr)
        with self._recording_errors(step):
            self._set_inline(step, [DataBuffer(atomic_wr, 8)])

    def _begin(self, step: str, opcode: WROpcode) -> SendWR:
        if self._batch is None:
            raise _no_batch(step)
        wr = SendWR(self.wr_id, opcode, (), self.wr_flags)
        self._batch.append(wr)
        self._has_data = False
        if opcode not in self._opcodes:
            known = ", ".join(sorted(each.name for each in self._opcodes))
            self._fail(wr, f"the queue pair was not made for {opcode.name}", step, known)
        return wr

    # -- their operands -------------------------------------------------------------------------------

    def wr_set_sge(self, sge: SGE) -> None:
        """Set the data of the request, one element."""
        self._set_data("wr_set_sge", (sge,))

    def wr_set_sge_list(self, num_sge: int, sg_list: Sequence[SGE]) -> None:
        """Set the data of the request: the first ``num_sge`` elements of a list, which is copied."""
        step = "wr_set_sge_list"
        with self._recording_errors(step):
            self._set_data(step, tuple(_first(num_sge, sg_list, "num_sge")))

    def wr_set_inline_data(self, addr: Buffer, length: int | None = None) -> None:
        """Set the data of the request, inline: the first ``length`` bytes of a buffer, None for all. They are copied.

        They may be changed at once, and need no region.
        """
        step = "wr_set_inline_data"
        with self._recording_errors(step):
            self._set_inline(step, [DataBuffer(addr, len(byte_view(addr)) if length is None else length)])

    def wr_set_inline_data_list(self, num_buf: int, buf_list: Sequence[DataBuffer]) -> None:
        """Set the data of the request, inline, from the first ``num_buf`` buffers of a list. They are copied."""
        step = "wr_set_inline_data_list"
        with self._recording_errors(step):
            self._set_inline(step, _first(num_buf, buf_list, "num_buf"))

    def wr_set_ud_addr(self, ah: AH, remote_qpn: int, remote_qkey: int) -> None:
        """Set the destination of a datagram."""
        self._last("wr_set_ud_addr").set_wr_ud(ah, remote_qpn, remote_qkey)

    def wr_set_xrc_srqn(self, remote_srqn: int) -> None:
        """Set the number of the peer's shared receive queue, on a queue pair of type XRC_SEND."""
        self._last("wr_set_xrc_srqn").set_qp_type_xrc(remote_srqn)

    def _set_inline(self, step: str, buffers: Sequence[DataBuffer]) -> None:
        wr = self._last(step)
        data = b"".join(_first(each.length, byte_view(each.addr), "length") for each in buffers)
        wr.send_flags = int(wr.send_flags) | _INLINE
        self._set_data(step, (data,))

    def _set_data(self, step: str, pieces: Sequence[SGE | Buffer]) -> None:
        wr = self._last(step)
        if self._has_data:
            self._fail(wr, "the data are set already", step)
        self._has_data = True
        wr.sg = pieces

    def _last(self, step: str) -> SendWR:
        """The request that has begun."""
        if not self._batch:
            if self._batch is None:
                raise _no_batch(step)
            raise cm_error(errno.EINVAL, "no request has begun", step, hint="wr_send() or another operation")
        return self._batch[-1]

    @contextmanager
    def _recording_errors(self, step: str) -> Iterator[None]:
        """What is wrong with arguments is the error of :meth:`wr_complete`."""
        wr = self._last(step)
        try:
            yield
        except (TypeError, ValueError, AttributeError, BufferError) as error:
            self._fail(wr, str(error), step)

    def _fail(self, wr: SendWR, why: str, step: str, hint: str | None = None) -> None:
        if self._fault is None:
            self._fault = cm_error(errno.EINVAL, why, step, f"wr_id {wr.wr_id}", hint)
            self._fault.bad_wr = wr


def _first(count: int, items: S, name: str) -> S:
    """The first ``count`` items; ValueError if there are fewer."""
    if not 0 <= count <= len(items):
        raise ValueError(f"{name} is {count}, and there are {len(items)}")
    return items[:count]  # type: ignore[return-value]


def _no_batch(step: str) -> RdmaError:
    return cm_error(errno.EINVAL, "no batch has begun", step, hint="wr_start()")
