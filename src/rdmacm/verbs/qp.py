"""Queue pairs, shared receive queues, address handles: ibv_create_qp(3), ibv_create_srq(3), ibv_create_ah(3).

What a work request says is checked when it is posted, and nothing that is refused reaches the device. Whether its
memory is what its keys say is known only there, and shows in its completion (LOC_PROT_ERR).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rdmacm.address import ALL_BITS_64
from rdmacm.errors import RdmaError, cm_error
from rdmacm.verbs.attr import AHAttr, QPAttr, QPCap, QPInitAttr, SrqAttr, SrqInitAttr
from rdmacm.verbs.checks import check_av, check_caps, check_srq, check_values
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import QPAttrMask, QPState, QPType, SendFlag, WROpcode
from rdmacm.verbs.pd import PD
from rdmacm.verbs.qpstate import RECV_STATES, SEND_STATES, path, problem, steps_mask
from rdmacm.verbs.resource import Resource
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

if TYPE_CHECKING:
    from rdmacm.verbs.backend import QPBackend, SRQBackend

__all__ = ["AH", "QP", "SRQ"]

W = TypeVar("W", SendWR, RecvWR)

# Posting is the hot path. Members of enumerations are slow to hash and to combine, so there are lists that they are
# an index of, and plain numbers.
_MAY_SEND = [state in SEND_STATES for state in QPState]
_MAY_RECV = [state in RECV_STATES for state in QPState]
_INLINE = int(SendFlag.INLINE)
_STATE, _CUR_STATE, _PORT = map(int, (QPAttrMask.STATE, QPAttrMask.CUR_STATE, QPAttrMask.PORT))
_TO_ERROR = QPAttr(qp_state=QPState.ERR)
_and = int.__and__

# What a work request has to bring along.
_REMOTE, _IMM, _FETCH, _ATOMIC, _INVALIDATE, _DATAGRAM = (1 << bit for bit in range(6))
_W = WROpcode
_UC: dict[WROpcode, int] = {
    _W.SEND: 0,
    _W.SEND_WITH_IMM: _IMM,
    _W.RDMA_WRITE: _REMOTE,
    _W.RDMA_WRITE_WITH_IMM: _REMOTE | _IMM,
}
_LEGAL: dict[QPType, dict[WROpcode, int]] = {
    QPType.RC: {
        **_UC,
        _W.SEND_WITH_INV: _INVALIDATE,
        _W.RDMA_READ: _REMOTE | _FETCH,
        _W.ATOMIC_CMP_AND_SWP: _REMOTE | _FETCH | _ATOMIC,
        _W.ATOMIC_FETCH_AND_ADD: _REMOTE | _FETCH | _ATOMIC,
    },
    QPType.UC: _UC,
    QPType.UD: {_W.SEND: _DATAGRAM, _W.SEND_WITH_IMM: _DATAGRAM | _IMM},
}
#: The same with opcodes as indices; None is not for the type.
_BRINGS = {
    kind: [legal.get(_W(code)) if code in set(_W) else None for code in range(16)] for kind, legal in _LEGAL.items()
}


class AH(Resource):
    """An address handle: where a datagram goes. ``attr`` is the address vector, ``pd`` the domain it is for.

    EINVAL: an address vector the device cannot send to.
    """

    __slots__ = ("attr", "pd")

    _minds = False

    def __init__(self, pd: PD, attr: AHAttr) -> None:
        self._closed = True
        check_av(pd.context, attr, "create_ah")
        self.pd = pd
        self.attr = replace(attr, gr=replace(attr.gr))
        self._make("create_ah", (pd,), lambda: None)

    def __repr__(self) -> str:
        return f"<AH {self.attr.gr.dgid}{' closed' if self._closed else ''}>"


class SRQ(Resource):
    """A shared receive queue: queue pairs made with it take their receives from here.

    EINVAL: sizes the device does not have. It cannot be closed while a queue pair uses it.
    """

    __slots__ = ("backend", "_max_sge", "pd", "srq_context")

    def __init__(self, pd: PD, init_attr: SrqInitAttr | None = None) -> None:
        self._closed = True
        init = init_attr or SrqInitAttr()
        device = pd.context.backend
        attr = replace(init.attr)
        check_srq(attr, device.attr)
        self.pd = pd
        self.srq_context = init.srq_context
        self._max_sge = attr.max_sge
        self.backend: SRQBackend = self._make("create_srq", (pd,), lambda: device.create_srq(pd, attr))

    def post_recv(self, wr: RecvWR | Iterable[RecvWR]) -> None:
        """Queue receives, ibv_post_srq_recv(3); see :meth:`QP.post_recv`."""
        if self._closed:
            raise self._gone("post_srq_recv")
        if isinstance(wr, RecvWR):
            _check_recv(wr, self._max_sge)
            self.backend.post_recv([wr])
        else:
            _post_list(wr, lambda each: _check_recv(each, self._max_sge), self.backend.post_recv)

    def modify(self, attr: SrqAttr) -> None:
        """Set ``srq_limit``, below which SRQ_LIMIT_REACHED is raised, ibv_modify_srq(3); EINVAL above ``max_wr``."""
        if self._closed:
            raise self._gone("modify_srq")
        most = self.backend.query().max_wr
        if not 0 <= attr.srq_limit <= most:
            raise cm_error(errno.EINVAL, f"srq_limit is {attr.srq_limit}, and may be 0 to {most}", "modify_srq")
        self.backend.modify(attr)

    def query(self) -> SrqAttr:
        """Its sizes and limit, ibv_query_srq(3)."""
        if self._closed:
            raise self._gone("query_srq")
        return self.backend.query()

    def _destroy(self) -> None:
        self.backend.destroy()

    def __repr__(self) -> str:
        return f"<SRQ {self.pd.context.name}{' closed' if self._closed else ''}>"


class QP(Resource):
    """A queue pair, in RESET.

    ``init_attr`` is copied; ``cap`` tells the sizes there are. With a shared receive queue ``max_recv_wr`` and
    ``max_recv_sge`` count for nothing. EINVAL: no completion queues, sizes the device does not have, or parts of
    different devices; EOPNOTSUPP: a type other than RC, UC, UD.
    """

    __slots__ = (
        "backend",
        "_brings",
        "_init_attr",
        "_max_inline",
        "_max_message",
        "_max_recv_sge",
        "_max_send_sge",
        "pd",
        "qp_num",
        "qp_type",
    )

    def __init__(self, pd: PD, init_attr: QPInitAttr) -> None:
        self._closed = True
        context = pd.context
        device = context.backend
        attr = self._init_attr = _copied(init_attr)
        scq, rcq, srq = attr.scq, attr.rcq, attr.srq
        if attr.qp_type not in _LEGAL:
            raise cm_error(errno.EOPNOTSUPP, f"no queue pairs of type {attr.qp_type.name}", "create_qp")
        if scq is None or rcq is None:
            raise cm_error(errno.EINVAL, "a queue pair needs two completion queues", "create_qp", hint="scq and rcq")
        for other in (scq.context, rcq.context, context if srq is None else srq.pd.context):
            if other is not context and other.backend is not device:
                raise cm_error(errno.EINVAL, "its parts are of different devices", "create_qp")
        check_caps(attr, device.attr)
        if srq is not None:
            attr.cap.max_recv_wr = attr.cap.max_recv_sge = 0
        self.pd = pd
        self.qp_type = attr.qp_type
        needs: tuple[Resource, ...] = (pd, scq, rcq) if srq is None else (pd, scq, rcq, srq)
        # The provider has the queues in its own terms. The objects would keep each other alive through its tables.
        told = QPInitAttr(attr.qp_type, cap=attr.cap, sq_sig_all=attr.sq_sig_all)
        shared = None if srq is None else srq.backend
        self.backend: QPBackend = self._make(
            "create_qp", needs, lambda: device.create_qp(pd, told, scq.backend, rcq.backend, shared)
        )
        self.qp_num = self.backend.qp_num
        self._brings = _BRINGS[attr.qp_type]
        self._max_send_sge = attr.cap.max_send_sge
        self._max_recv_sge = attr.cap.max_recv_sge
        self._max_inline = attr.cap.max_inline_data
        self._max_message = device.attr.max_msg_sz

    # -- what there is --------------------------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """The state it is in; ERR may come by itself."""
        return self.backend.state

    @property
    def qp_state(self) -> QPState:
        """The same, as pyverbs calls it."""
        return self.backend.state

    @property
    def cap(self) -> QPCap:
        """The sizes of its queues."""
        return replace(self._init_attr.cap)

    @property
    def scq(self) -> CQ | None:
        """Where sends complete."""
        return self._init_attr.scq

    @property
    def rcq(self) -> CQ | None:
        """Where receives complete."""
        return self._init_attr.rcq

    @property
    def srq(self) -> SRQ | None:
        """Where receives are taken from, where that is not its own queue."""
        return self._init_attr.srq

    @property
    def qp_context(self) -> object:
        """What ``init_attr`` had for it."""
        return self._init_attr.qp_context

    def query(self) -> tuple[QPAttr, QPInitAttr]:
        """Every attribute as it is now, and what it was made of, ibv_query_qp(3)."""
        if self._closed:
            raise self._gone("query_qp")
        return self.backend.query(), replace(self._init_attr, cap=self.cap)

    # -- states ---------------------------------------------------------------------------------------

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        """Change the attributes that ``mask`` names, with STATE also the state, ibv_modify_qp(3).

        :mod:`rdmacm.verbs.qpstate` says which attributes which transition requires and allows. EINVAL: it says
        otherwise, or a value is none.
        """
        if self._closed:
            raise self._gone("modify_qp")
        if type(mask) is not QPAttrMask:
            mask = QPAttrMask(mask)
        bits = mask.value
        state = self.backend.state
        try:
            after = QPState(attr.qp_state) if bits & _STATE else state
        except ValueError:
            raise cm_error(errno.EINVAL, f"no state {attr.qp_state}", "modify_qp") from None
        if bits & _CUR_STATE and attr.cur_qp_state != state:
            raise cm_error(errno.EINVAL, f"the queue pair is in {state.name}, not in cur_qp_state", "modify_qp")
        wrong = problem(self.qp_type, state, after, mask)
        if wrong is not None:
            raise cm_error(errno.EINVAL, wrong, "modify_qp")
        check_values(self.pd.context, attr, mask)
        self.backend.modify(attr, mask)
        if self.qp_type is QPType.UD and bits & _PORT:
            port = self.pd.context.query_port(attr.port_num)
            self._max_message = (port.active_mtu or port.max_mtu).bytes

    def to_init(self, attr: QPAttr) -> None:
        """RESET to INIT, with the attributes that requires."""
        self._to(QPState.INIT, attr)

    def to_rtr(self, attr: QPAttr) -> None:
        """On to RTR, through INIT where it is not there yet, with the attributes that requires."""
        self._to(QPState.RTR, attr)

    def to_rts(self, attr: QPAttr) -> None:
        """On to RTS, through the states before it, with the attributes that requires; back to it from SQD or SQE."""
        self._to(QPState.RTS, attr)

    def to_error(self) -> None:
        """To ERR: everything posted completes with WR_FLUSH_ERR. EINVAL in RESET, where nothing can be posted."""
        self.modify(_TO_ERROR, QPAttrMask.STATE)

    def _to(self, state: QPState, attr: QPAttr) -> None:
        before = self.backend.state
        for after in path(before, state):
            self.modify(replace(attr, qp_state=after), steps_mask(self.qp_type, before, after))
            before = after

    # -- work -----------------------------------------------------------------------------------------

    def post_send(self, wr: SendWR | Iterable[SendWR]) -> None:
        """Queue work, one request or several in order, ibv_post_send(3).

        Of several, those before one that is refused are queued. A request and what its elements point to must be left
        alone until it completes; inline data may be used again at once. EINVAL: the state, the type, a size or a value
        does not allow it; ENOMEM: the queue is full.
        """
        backend = self.backend
        if self._closed:
            raise self._gone("post_send")
        if not _MAY_SEND[backend.state]:
            raise cm_error(errno.EINVAL, f"a queue pair in {backend.state.name} takes no sends", "post_send")
        if isinstance(wr, SendWR):
            self._check_send(wr)
            backend.post_send([wr])
        else:
            _post_list(wr, self._check_send, backend.post_send)

    def post_recv(self, wr: RecvWR | Iterable[RecvWR]) -> None:
        """Queue receives, one or several in order, ibv_post_recv(3).

        Of several, those before one that is refused are queued. EINVAL: the state or a size does not allow it, or
        receives come from a shared receive queue; ENOMEM: the queue is full.
        """
        backend = self.backend
        if self._closed:
            raise self._gone("post_recv")
        if not _MAY_RECV[backend.state]:
            raise cm_error(errno.EINVAL, "a queue pair in RESET takes no receives", "post_recv")
        if self._init_attr.srq is not None:
            raise cm_error(errno.EINVAL, "receives come from a shared receive queue", "post_recv", hint="srq.post_recv")
        if isinstance(wr, RecvWR):
            _check_recv(wr, self._max_recv_sge)
            backend.post_recv([wr])
        else:
            _post_list(wr, lambda each: _check_recv(each, self._max_recv_sge), backend.post_recv)

    def _check_send(self, wr: SendWR) -> None:
        try:
            brings = self._brings[wr.opcode]
        except IndexError:
            brings = None
        if brings is None:
            raise _refused(wr, f"{wr.opcode!r} is not for {self.qp_type.name}")
        sg = wr.sg
        if len(sg) > self._max_send_sge:
            raise _refused(wr, f"{len(sg)} elements, and max_send_sge is {self._max_send_sge}")
        inline = _and(wr.send_flags, _INLINE)
        length = 0
        for piece in sg:
            if isinstance(piece, SGE):
                part = piece.length
                if part < 0:
                    raise _refused(wr, f"an element of {part} bytes")
            elif not inline:
                raise _refused(wr, "a buffer that is not registered", "SendFlag.INLINE, or mr.sge()")
            elif type(piece) is bytes:
                part = len(piece)
            else:
                try:
                    view = memoryview(piece)
                except TypeError:
                    raise _refused(wr, f"{type(piece).__name__} is neither an SGE nor a buffer") from None
                if not view.c_contiguous:
                    raise _refused(wr, "a buffer that is not contiguous")
                part = view.nbytes
            length += part
        if inline:
            if brings & _FETCH:
                raise _refused(wr, "INLINE is for data that is sent")
            if length > self._max_inline:
                raise _refused(wr, f"{length} bytes inline, and max_inline_data is {self._max_inline}")
        if length > self._max_message:
            raise _refused(wr, f"{length} bytes, and a message has at most {self._max_message}")
        if brings:
            self._check_operands(wr, brings, length)

    def _check_operands(self, wr: SendWR, brings: int, length: int) -> None:
        if brings & _REMOTE:
            if not 0 <= wr.remote_addr <= ALL_BITS_64:
                raise _refused(wr, f"remote_addr {wr.remote_addr:#x} has more than 64 bits")
            if not 0 <= wr.rkey < 1 << 32:
                raise _refused(wr, f"rkey {wr.rkey:#x} has more than 32 bits")
        if brings & _ATOMIC:
            if length != 8:
                raise _refused(wr, f"an atomic fetches 8 bytes, not {length}")
            if wr.remote_addr & 7:
                raise _refused(wr, f"an atomic's remote_addr is a multiple of 8, not {wr.remote_addr:#x}")
            if not (0 <= wr.compare_add <= ALL_BITS_64 and 0 <= wr.swap <= ALL_BITS_64):
                raise _refused(wr, "the operands of an atomic have 64 bits")
        if brings & _IMM and not 0 <= wr.imm_data < 1 << 32:
            raise _refused(wr, f"imm_data {wr.imm_data:#x} has more than 32 bits")
        if brings & _INVALIDATE and not 0 <= wr.invalidate_rkey < 1 << 32:
            raise _refused(wr, f"invalidate_rkey {wr.invalidate_rkey:#x} has more than 32 bits")
        if brings & _DATAGRAM:
            if wr.ah is None:
                raise _refused(wr, "a datagram needs an address handle", "set_wr_ud()")
            if wr.ah.closed:
                raise wr.ah._gone("post_send")
            if wr.ah.pd is not self.pd:
                raise _refused(wr, "the address handle is of another protection domain")
            if not 0 <= wr.remote_qpn < 1 << 24:
                raise _refused(wr, f"remote_qpn {wr.remote_qpn:#x} has more than 24 bits")
            if not 0 <= wr.remote_qkey < 1 << 32:
                raise _refused(wr, f"remote_qkey {wr.remote_qkey:#x} has more than 32 bits")

    def _destroy(self) -> None:
        self.backend.destroy()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.backend.state.name
        return f"<QP {self.qp_type.name} 0x{self.qp_num:x} {state}>"


def _copied(attr: QPInitAttr) -> QPInitAttr:
    """A copy with sizes of its own; replace() takes four times as long."""
    cap = attr.cap
    sizes = QPCap(cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data)
    return QPInitAttr(attr.qp_type, attr.qp_context, attr.scq, attr.rcq, attr.srq, sizes, attr.sq_sig_all)


def _check_recv(wr: RecvWR, max_sge: int) -> None:
    sg = wr.sg
    if len(sg) > max_sge:
        raise _refused(wr, f"{len(sg)} elements, and max_recv_sge is {max_sge}")
    try:
        for sge in sg:
            if sge.length < 0:
                raise _refused(wr, f"an element of {sge.length} bytes")
    except AttributeError:
        raise _refused(wr, "a buffer that is not registered", "mr.sge()") from None


def _refused(wr: SendWR | RecvWR, why: str, hint: str | None = None) -> RdmaError:
    step = "post_send" if isinstance(wr, SendWR) else "post_recv"
    return cm_error(errno.EINVAL, why, step, f"wr_id {wr.wr_id}", hint)


def _post_list(wrs: Iterable[W], check: Callable[[W], None], post: Callable[[list[W]], None]) -> None:
    """Post those before the first that is refused."""
    good: list[W] = []
    try:
        for wr in wrs:
            check(wr)
            good.append(wr)
    finally:
        if good:
            post(good)
