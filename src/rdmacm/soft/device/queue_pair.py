"""Queue pairs and shared receive queues of the software device.

The protocol is :class:`rdmacm.proto.roce.rc.RcEngine`'s. What is here is around it: the states and attributes of the
verbs, the sizes of the queues, scatter/gather elements into buffers, completions into the queues they belong to, and
the address vector, which says whose packets are let in.

A work request whose elements are not registered memory of its protection domain is queued as others are, and fails
in its turn, as in hardware: the engine is given a buffer that nobody can touch.
"""

from __future__ import annotations

import copy
import errno
from collections import deque
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from rdmacm.address import is_link_local
from rdmacm.errors import cm_error
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.rc import ACK_ONLY, NOTHING, RcEngine, RtrAttributes, RtsAttributes
from rdmacm.soft.device.memory import RemoteMemory
from rdmacm.soft.wire.base import WirePath, WireRoute
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPAttr, QPCap, SrqAttr
from rdmacm.verbs.enums import (
    WC,
    AccessFlag,
    QPAttrMask,
    QPState,
    SendFlag,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from rdmacm.verbs.wr import SGE, Buffer, RecvWR, SendWR
from rdmacm.work import RecvWork, SendWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rdmacm.soft.device.completion import SoftCQ
    from rdmacm.soft.device.memory import MemoryTable
    from rdmacm.soft.device.transport import Remote, Transport

__all__ = ["AsyncEvent", "SoftQP", "SoftSRQ"]

#: The longest message (``max_msg_sz``).
MAX_MESSAGE = 1 << 31

_FENCE, _SIGNALED = int(SendFlag.FENCE), int(SendFlag.SIGNALED)
_SOLICITED, _INLINE = int(SendFlag.SOLICITED), int(SendFlag.INLINE)
_ATOMICS = (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)
_RECV = int(WCOpcode.RECV)
# A name of the module is found quicker than a member of an enumeration.
_STATE, _AV, _ACCESS_FLAGS, _MIN_RNR_TIMER = map(
    int, (QPAttrMask.STATE, QPAttrMask.AV, QPAttrMask.ACCESS_FLAGS, QPAttrMask.MIN_RNR_TIMER)
)
_RESET, _INIT, _RTR, _RTS, _SQD, _SQE, _ERR = QPState
_SUCCESS = WCStatus.SUCCESS
# By opcode, as lists: to hash an enum member takes longer than the rest of a post's checks.
_CODES = range(max(WROpcode) + 1)
_CONNECTED = [
    opcode
    in (
        *(WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.SEND_WITH_INV, WROpcode.RDMA_READ),
        *(WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM, *_ATOMICS),
    )
    for opcode in _CODES
]
#: Whether it has its local memory written.
_FETCHES = [opcode in (WROpcode.RDMA_READ, *_ATOMICS) for opcode in _CODES]
#: Which attributes each bit of the mask stands for.
_FIELDS: tuple[tuple[int, str], ...] = (
    (int(QPAttrMask.EN_SQD_ASYNC_NOTIFY), "en_sqd_async_notify"),
    (int(QPAttrMask.ACCESS_FLAGS), "qp_access_flags"),
    (int(QPAttrMask.PKEY_INDEX), "pkey_index"),
    (int(QPAttrMask.PORT), "port_num"),
    (int(QPAttrMask.QKEY), "qkey"),
    (int(QPAttrMask.PATH_MTU), "path_mtu"),
    (int(QPAttrMask.TIMEOUT), "timeout"),
    (int(QPAttrMask.RETRY_CNT), "retry_cnt"),
    (int(QPAttrMask.RNR_RETRY), "rnr_retry"),
    (int(QPAttrMask.RQ_PSN), "rq_psn"),
    (int(QPAttrMask.MAX_QP_RD_ATOMIC), "max_rd_atomic"),
    (int(QPAttrMask.MIN_RNR_TIMER), "min_rnr_timer"),
    (int(QPAttrMask.SQ_PSN), "sq_psn"),
    (int(QPAttrMask.MAX_DEST_RD_ATOMIC), "max_dest_rd_atomic"),
    (int(QPAttrMask.DEST_QPN), "dest_qp_num"),
)
#: Shared by all queue pairs whose attributes say nothing yet; a query hands out copies.
_NO_CAP, _NO_PATH = QPCap(), AHAttr()
#: What the state table lets change in SQD, and this device does not.
_FIXED = int(
    QPAttrMask.TIMEOUT
    | QPAttrMask.RETRY_CNT
    | QPAttrMask.RNR_RETRY
    | QPAttrMask.MAX_QP_RD_ATOMIC
    | QPAttrMask.MAX_DEST_RD_ATOMIC
)


@lru_cache(256)
def _fields_of(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _FIELDS if bits & bit)


# copy.copy() takes ten times as long.
def _same_path(path: AHAttr) -> AHAttr:
    gr = path.gr
    route = GlobalRoute(gr.dgid, gr.sgid_index, gr.flow_label, gr.hop_limit, gr.traffic_class)
    return AHAttr(path.dlid, path.sl, path.src_path_bits, path.static_rate, path.is_global, path.port_num, route)


def _receive(engine: RcEngine, attr: QPAttr) -> None:
    """INIT to RTR."""
    engine.ready_to_receive(
        RtrAttributes(
            dest_qp_num=attr.dest_qp_num,
            rq_psn=attr.rq_psn,
            path_mtu=128 << attr.path_mtu,
            max_dest_rd_atomic=attr.max_dest_rd_atomic,
            min_rnr_timer=attr.min_rnr_timer,
            access=AccessFlag(attr.qp_access_flags),
        )
    )


def _send(engine: RcEngine, attr: QPAttr) -> None:
    """RTR to RTS."""
    engine.ready_to_send(
        RtsAttributes(
            sq_psn=attr.sq_psn,
            timeout=4.096e-6 * (1 << attr.timeout) if attr.timeout else 0,
            retry_cnt=attr.retry_cnt,
            rnr_retry=attr.rnr_retry,
            max_rd_atomic=attr.max_rd_atomic,
        )
    )


class AsyncEvent(IntEnum):
    """What a queue pair or shared receive queue reports by itself; values are ``enum ibv_event_type``'s."""

    QP_FATAL = 1
    COMM_EST = 4
    SQ_DRAINED = 5
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16


class _Quiet(int):
    """The ``wr_id`` of a request that asked for no completion: the engine gives one, so that its place is known to
    be free, and it goes no further."""

    __slots__ = ()


def _untouchable() -> tuple[memoryview]:
    view = memoryview(b"")
    view.release()
    return (view,)


#: In place of the buffers of a request that has a wrong element.
_UNTOUCHABLE = _untouchable()


def _gather(table: MemoryTable, pd: object, elements: Sequence[SGE | Buffer], write: bool) -> Sequence[memoryview]:
    """The bytes of scatter/gather elements."""
    if len(elements) == 1 and isinstance(element := elements[0], SGE) and element.length:
        view = table.local(pd, element.lkey, element.addr, element.length, write)
        return _UNTOUCHABLE if view is None else (view,)
    found = []
    for element in elements:
        if not isinstance(element, SGE):
            found.append(memoryview(bytes(element)))  # inline data
        elif element.length:
            view = table.local(pd, element.lkey, element.addr, element.length, write)
            if view is None:
                return _UNTOUCHABLE
            found.append(view)
    return found


class SoftSRQ:
    """See :class:`rdmacm.verbs.backend.SRQBackend`. ``on_async_event`` hears SRQ_LIMIT_REACHED."""

    __slots__ = ("_limit", "_max_sge", "_max_wr", "_pd", "_queue", "_table", "_transport", "on_async_event")

    def __init__(self, transport: Transport, table: MemoryTable, pd: object, attr: SrqAttr) -> None:
        self._transport = transport
        self._table = table
        self._pd = pd
        self._max_wr = attr.max_wr
        self._max_sge = attr.max_sge
        self._limit = attr.srq_limit
        self._queue: deque[RecvWork] = deque()
        self.on_async_event: Callable[[SoftSRQ, AsyncEvent], None] | None = None

    def post_recv(self, wrs: list[RecvWR]) -> None:
        with self._transport.lock:
            for wr in wrs:
                if len(self._queue) >= self._max_wr:
                    raise cm_error(errno.ENOMEM, f"the queue holds {self._max_wr} receives", "post_srq_recv")
                self._queue.append(RecvWork(wr.wr_id, _gather(self._table, self._pd, wr.sg, True)))

    def take(self) -> RecvWork | None:
        """The next receive, for a queue pair that has a message."""
        if not self._queue:
            return None
        taken = self._queue.popleft()
        if len(self._queue) < self._limit:
            self._limit = 0  # it is told once
            if self.on_async_event is not None:
                self.on_async_event(self, AsyncEvent.SRQ_LIMIT_REACHED)
        return taken

    def modify(self, attr: SrqAttr) -> None:
        with self._transport.lock:
            self._limit = attr.srq_limit

    def query(self) -> SrqAttr:
        with self._transport.lock:
            return SrqAttr(self._max_wr, self._max_sge, self._limit)

    def destroy(self) -> None:
        with self._transport.lock:
            self._queue.clear()


class SoftQP:
    """A reliable connected queue pair; see :class:`rdmacm.verbs.backend.QPBackend`.

    ``on_async_event(qp, event)`` hears what happens by itself: COMM_EST with the first packet that is accepted,
    QP_FATAL when the queue pair fails, SQ_DRAINED, QP_LAST_WQE_REACHED. It is called under the provider's lock.

    ``find_source(sgid_index)`` is the device's: the packed address and the interface index of a GID.
    """

    __slots__ = (
        *("_attr", "_cap", "_closed", "_drained", "_engine", "_find_source", "_flow", "_heard", "_local", "_pd"),
        *("_recv_cq", "_recv_flow", "_recvs", "_remote", "_route", "_send_cq", "_sends", "_signal_all", "_srq"),
        *("_table", "_transport", "in_line", "on_async_event", "qp_num", "state", "timers"),
    )

    def __init__(
        self,
        transport: Transport,
        table: MemoryTable,
        find_source: Callable[[int], tuple[bytes, int]],
        pd: object,
        cap: QPCap,
        sq_sig_all: bool,
        send_cq: SoftCQ,
        recv_cq: SoftCQ,
        srq: SoftSRQ | None,
    ) -> None:
        self._transport = transport
        self._table = table
        self._find_source = find_source
        self._pd = pd
        self._cap = cap
        self._signal_all = sq_sig_all
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        self._srq = srq
        self.qp_num = 0
        self._closed = False
        self.in_line = False
        self.timers: tuple[float, ...] = ()
        self.on_async_event: Callable[[SoftQP, AsyncEvent], None] | None = None
        self._clear()
        transport.attach(self)

    def _clear(self) -> None:
        """As in RESET."""
        self.state = _RESET
        self._attr: QPAttr | None = None
        self._engine: RcEngine | None = None
        self._route: WireRoute | None = None
        self._flow: Icrc | None = None
        self._recv_flow: Icrc | None = None
        #: Where the last packet that was let in came from, and where it came to; whatever does so as well is let in.
        self._remote: Remote | None = None
        self._local = b""
        self._sends = 0  # requests that occupy the send queue, and the receive queue
        self._recvs = 0
        self._heard = False
        self._drained = False

    # -- states and attributes ------------------------------------------------------------------------

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        with self._transport.lock:
            if self._transport.owing:
                self._transport.acknowledge()
            before = self.state
            bits = mask.value
            state = QPState(attr.qp_state) if bits & _STATE else before
            if state is _RESET:
                self._reset()
                return
            if before >= _RTS and bits & _FIXED:
                raise cm_error(errno.EOPNOTSUPP, "timeouts and depths are as they were on the way to RTS", "modify_qp")
            route = self._route_to(attr) if bits & _AV else None
            kept = self.attr
            for name in _fields_of(bits):
                setattr(kept, name, getattr(attr, name))
            if route is not None:
                kept.ah_attr = _same_path(attr.ah_attr)
                self._use_route(*route)
            engine = self._engine
            if engine is not None and bits & _ACCESS_FLAGS:
                engine.set_access(AccessFlag(kept.qp_access_flags))
            if engine is not None and bits & _MIN_RNR_TIMER:
                engine.set_min_rnr_timer(kept.min_rnr_timer)
            self.state = state
            if state is not before:
                self._enter(state, before, kept)

    @property
    def attr(self) -> QPAttr:
        """Its attributes, for :meth:`advance`; what they share is not to be changed."""
        if self._attr is None:
            self._attr = QPAttr(cap=_NO_CAP, ah_attr=_NO_PATH, alt_ah_attr=_NO_PATH)
        return self._attr

    def advance(self, state: QPState) -> None:
        """To INIT, or to RTS through the states before it, with what :attr:`attr` has; EINVAL where that is not ahead.

        This is how an id takes its queue pair along, which answers for the values.
        """
        with self._transport.lock:
            if self._closed:
                raise cm_error(errno.EBADF, "the queue pair is closed", "modify_qp")
            if self.state is not _RESET and (self.state is not _INIT or state is _INIT):
                raise cm_error(errno.EINVAL, f"no way from {self.state.name} to {state.name}", "modify_qp")
            attr = self._attr or self.attr
            if state is _RTS:
                self._use_route(*self._route_to(attr))
            self.state = state
            if self._engine is not None and state is _RTS:
                _receive(self._engine, attr)
                _send(self._engine, attr)

    def fail(self) -> None:
        """To ERR, as the end of its connection: everything posted is flushed. In RESET there is nothing to flush."""
        with self._transport.lock:
            if self._transport.owing:
                self._transport.acknowledge()
            if self.state is not _RESET and self.state is not _ERR:
                self._fail()

    def _enter(self, state: QPState, before: QPState, attr: QPAttr) -> None:
        if state is _ERR:
            self._fail()
        elif state is _SQD:
            engine = self._started()
            engine.pause()
            self._drained = False
            self._after(engine)
        elif self._engine is None:
            return
        elif state is _RTR:
            _receive(self._engine, attr)
        elif state is _RTS and before is _RTR:
            _send(self._engine, attr)
        elif state is _RTS:
            self._engine.resume()
            self._transport.send_now(self, self._transport.clock())

    def _started(self) -> RcEngine:
        """The engine: from the first work request or packet; a queue pair that is only there costs little."""
        engine = self._engine
        if engine is None:
            memory = RemoteMemory(self._table, self._pd)
            engine = RcEngine(self.qp_num, memory, self._take_shared if self._srq is not None else None)
            self._engine = engine
            state = self.state
            if state is _ERR:
                engine.flush()
            elif state >= _RTR:
                _receive(engine, self.attr)
                if state is not _RTR:
                    _send(engine, self.attr)
                if state is _SQD:
                    engine.pause()
        return engine

    def _route_to(self, attr: QPAttr) -> tuple[WireRoute, Icrc]:
        vector = attr.ah_attr
        if not vector.is_global:
            raise cm_error(errno.EINVAL, "an address vector needs a destination GID here", "modify_qp")
        local, ifindex = self._find_source(vector.gr.sgid_index)
        remote = vector.gr.dgid.ip
        if len(local) != len(remote):
            raise cm_error(errno.EINVAL, "one GID is of IPv4, the other of IPv6", "modify_qp", str(vector.gr.dgid))
        scope_id = ifindex if is_link_local(remote) else 0
        return self._transport.route(WirePath(local, remote, scope_id), vector.gr.traffic_class)

    def _use_route(self, route: WireRoute, flow: Icrc) -> None:
        self._route = route
        self._flow = flow
        self._remote = None

    def query(self) -> QPAttr:
        with self._transport.lock:
            found = copy.deepcopy(self._attr) if self._attr is not None else QPAttr()
            found.qp_state = found.cur_qp_state = self.state
            found.cap = copy.copy(self._cap)
            found.sq_draining = int(self.state is QPState.SQD and self._engine is not None and not self._engine.drained)
            return found

    def _reset(self) -> None:
        """Everything posted is gone, with the completions nobody has seen."""
        self._clear()
        self._send_cq.drop(self.qp_num)
        if self._recv_cq is not self._send_cq:
            self._recv_cq.drop(self.qp_num)

    def destroy(self) -> None:
        with self._transport.lock:
            if self._transport.owing:
                self._transport.acknowledge()
            self._closed = True
            self._reset()
            self._transport.detach(self)

    # -- work -----------------------------------------------------------------------------------------

    def post_send(self, wrs: list[SendWR]) -> None:
        transport = self._transport
        with transport.lock:
            if self._sends + len(wrs) > self._cap.max_send_wr:
                transport.progress()  # an ACK may be here that nobody has looked for
            if len(wrs) == 1 and self.state is _RTS and transport.opened and not self.in_line:
                self._send(wrs[0])
                return
            if self.state < _RTS:
                raise cm_error(errno.EINVAL, f"a queue pair in {self.state.name} does not send", "post_send")
            engine = self._started()
            try:
                for wr in wrs:
                    engine.post_send(self._work(wr))
                    self._sends += 1
            finally:
                if self.state is _ERR:
                    self._after(engine)
                else:
                    transport.send_now(self, transport.clock())

    def _send(self, wr: SendWR) -> None:
        """A single request, with nothing in line before it: a small one leaves at once."""
        engine, flow, route = self._engine or self._started(), self._flow, self._route
        assert flow is not None
        assert route is not None
        work = self._work(wr)
        transport = self._transport
        now = transport.clock()
        packet = engine.send(work, flow, now)
        self._sends += 1
        if packet is None:
            transport.send_now(self, now)
            return
        transport.wire.send(route, packet)
        deadline, timers = engine.deadline, self.timers
        if deadline is not None and not (timers and timers[-1] <= deadline):
            transport.watch(self)
        if transport.owing:
            transport.acknowledge()

    def _work(self, wr: SendWR) -> SendWork:
        """A work request as the engine wants it."""
        if self._sends >= self._cap.max_send_wr:
            raise cm_error(errno.ENOMEM, f"the send queue holds {self._cap.max_send_wr} requests", "post_send")
        opcode, elements = wr.opcode, wr.sg
        if not _CONNECTED[opcode]:
            raise cm_error(errno.EINVAL, f"{opcode!r} is not for a reliable connection", "post_send")
        flags = int(wr.send_flags)
        segments: Sequence[memoryview]
        if len(elements) == 1 and type(element := elements[0]) is not SGE:
            assert not isinstance(element, SGE)
            segments = (memoryview(bytes(element)),)
            length = len(segments[0])
        else:
            segments = _gather(self._table, self._pd, elements, _FETCHES[opcode])
            if segments is _UNTOUCHABLE:
                length = 8
            else:
                length = len(segments[0]) if len(segments) == 1 else sum(map(len, segments))
                if flags & _INLINE:
                    segments = (memoryview(b"".join(segments)),)
        if length > MAX_MESSAGE or (length < 8 and opcode in _ATOMICS):
            raise cm_error(errno.EINVAL, f"{length} bytes are not for {opcode.name}", "post_send")
        return SendWork(
            wr.wr_id if flags & _SIGNALED or self._signal_all else _Quiet(wr.wr_id),
            opcode,
            segments,
            True,
            flags & _SOLICITED != 0,
            flags & _FENCE != 0,
            wr.remote_addr,
            wr.rkey,
            wr.imm_data,
            wr.compare_add,
            wr.swap,
            wr.invalidate_rkey,
        )

    def post_recv(self, wrs: list[RecvWR]) -> None:
        with self._transport.lock:
            if self.state is _RESET:
                raise cm_error(errno.EINVAL, "a queue pair in RESET takes no receives", "post_recv")
            if self._srq is not None:
                raise cm_error(errno.EINVAL, "receives come from the shared receive queue", "post_recv")
            engine = self._engine or self._started()
            most = self._cap.max_recv_wr
            try:
                for wr in wrs:
                    if self._recvs >= most:
                        raise cm_error(errno.ENOMEM, f"the receive queue holds {most} requests", "post_recv")
                    engine.post_recv(RecvWork(wr.wr_id, _gather(self._table, self._pd, wr.sg, True)))
                    self._recvs += 1
            finally:
                if self.state is _ERR:
                    self._after(engine)

    def _take_shared(self) -> RecvWork | None:
        """A receive from the shared queue."""
        assert self._srq is not None
        work = self._srq.take()
        if work is not None:
            self._recvs += 1
        return work

    # -- completions ----------------------------------------------------------------------------------

    def _after(self, engine: RcEngine) -> None:
        """The engine has been given something: hand on what it has finished, and see what has become of it."""
        if engine.completed:
            self._complete(engine)
        if self.state is _ERR:
            return
        if engine.failed:
            self._fail()
            self._tell(AsyncEvent.QP_FATAL)
        elif self.state is _SQD and not self._drained and engine.drained:
            self._drained = True
            if self._attr is not None and self._attr.en_sqd_async_notify:
                self._tell(AsyncEvent.SQ_DRAINED)

    def _fail(self) -> None:
        """To the error state: everything that is posted completes, in order."""
        engine = self._engine
        self.state = _ERR
        self._remote = None
        if engine is not None:
            if not engine.failed:  # one that failed by itself still tells its peer why
                engine.flush()
            self._complete(engine)
        if self._srq is not None:
            self._tell(AsyncEvent.QP_LAST_WQE_REACHED)

    def _complete(self, engine: RcEngine) -> None:
        """What the engine has finished, each to its queue."""
        completed = engine.completed
        found = completed[:]
        completed.clear()
        if len(found) == 1 and found[0].opcode & _RECV:
            self._recvs -= 1
            self._recv_cq.add(found)
            return
        sends: list[WC] = []
        recvs = sends if self._recv_cq is self._send_cq else []
        for wc in found:
            if wc.opcode & _RECV:
                self._recvs -= 1
                recvs.append(wc)
                continue
            self._sends -= 1
            if type(wc.wr_id) is _Quiet:
                if wc.status is _SUCCESS:
                    continue
                wc.wr_id = int(wc.wr_id)
            sends.append(wc)
        if sends:
            self._send_cq.add(sends)
        if recvs and recvs is not sends:
            self._recv_cq.add(recvs)

    def cq_failed(self, cq: object) -> None:
        if cq in (self._send_cq, self._recv_cq) and self.state not in (_RESET, _ERR):
            self._fail()
            self._tell(AsyncEvent.QP_FATAL)

    def _tell(self, event: AsyncEvent) -> None:
        if self.on_async_event is not None:
            self.on_async_event(self, event)

    # -- packets --------------------------------------------------------------------------------------

    def received(self, data: memoryview, segment: int, remote: Remote, local: bytes, now: float) -> None:
        """Packets for this queue pair, by number; whose they are is seen here and in the engine."""
        if (remote != self._remote or local != self._local) and not self._let_in(remote, local):
            return
        engine, flow = self._engine, self._recv_flow
        assert engine is not None
        assert flow is not None
        if not engine.received(data, segment, flow, now):
            self._transport.dropped["packet"] += 1
        elif not self._heard:
            self._heard = True
            self._tell(AsyncEvent.COMM_EST)
        if engine.completed:
            self._complete(engine)
        if engine.failed or self.state is not _RTS:
            self._after(engine)
        # What was not accepted may have to be answered as well.
        to_send = engine.to_send
        if to_send == NOTHING:
            deadline, timers = engine.deadline, self.timers
            if deadline is not None and not (timers and timers[-1] <= deadline):
                self._transport.watch(self)
        elif to_send == ACK_ONLY:
            self._transport.owing[self] = None
        else:
            self._transport.ready(self)

    def _let_in(self, remote: Remote, local: bytes) -> bool:
        """Whether packets from there to here may be the peer's, and are welcome now."""
        route = self._route
        if route is None or not _RTR <= self.state <= _SQE:
            self._transport.dropped["state"] += 1
            return False
        path = route.path
        if remote[0] != route.remote_host or local != path.local or (path.scope_id and path.scope_id != remote[-1]):
            self._transport.dropped["address"] += 1
            return False
        self._remote, self._local = remote, local
        self._recv_flow = Icrc(path.remote, path.local, remote[1])
        self._started()
        return True

    def transmit(self, now: float, limit: int) -> int:
        engine, flow, route = self._engine, self._flow, self._route
        if engine is None or flow is None or route is None:
            return 0
        transport = self._transport
        sent = 0
        send = transport.wire.send
        for pieces, segment in engine.datagrams(flow, now, limit, transport.train):
            send(route, pieces, segment)
            sent += -(-sum(map(len, pieces)) // segment) if segment else 1
        if engine.failed and self.state is not _ERR:  # memory it reads has been revoked, or was never there
            self._after(engine)
        deadline, timers = engine.deadline, self.timers
        if deadline is not None and not (timers and timers[-1] <= deadline):
            transport.watch(self)
        return sent

    @property
    def deadline(self) -> float | None:
        return self._engine.deadline if self._engine is not None else None

    def timer(self, now: float) -> None:
        if self._engine is not None:
            self._engine.timer(now)
            self._after(self._engine)
