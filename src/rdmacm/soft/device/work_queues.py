"""What queue pairs of every type have: the state and the attributes, the depths of the queues, completions, events.

A queue pair has an engine for the protocol of its wire, and makes it when it is first needed.
"""

from __future__ import annotations

import copy
import errno
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from rdmacm.enums import QPState, WCStatus
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.plainints import QP_ALT_PATH, QP_EN_SQD_ASYNC_NOTIFY, QP_STATE, WC_RECV
from rdmacm.provider import log
from rdmacm.soft.device.attributes import named_fields
from rdmacm.soft.device.requests import UnsignaledWrId, refused
from rdmacm.verbs.attr import AHAttr, QPAttr, QPCap
from rdmacm.verbs.enums import EventType

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from rdmacm.address import Gid
    from rdmacm.proto._core import Addresses, Connection, Datagrams
    from rdmacm.proto._core import Wire as CoreWire
    from rdmacm.proto.engine import EngineCounters
    from rdmacm.proto.work import WC, RecvWork
    from rdmacm.soft.device.completion import SoftCQ
    from rdmacm.soft.device.memory import MemoryTable, SoftMR
    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.soft.device.shared_receive_queue import SoftSRQ
    from rdmacm.soft.wire.base import SocketAddress
    from rdmacm.verbs.backend import AsyncEvents
    from rdmacm.verbs.enums import QPAttrMask
    from rdmacm.verbs.wr import RecvWR, SendWR

_RESET, _INIT, _RTR, _RTS, _SQD, _SQE, _ERR = QPState
_SUCCESS = WCStatus.SUCCESS
#: Shared by the attributes of all queue pairs that have none of their own yet; a query returns copies.
_NO_CAP, _NO_PATH = QPCap(), AHAttr()


class Engine(Protocol):
    """What the engines of all types have (:class:`rdmacm.proto.engine.QPEngine` says what each does)."""

    completed: list[WC]
    failed: bool

    def post_recv(self, work: RecvWork) -> None: ...

    def look_up_again(self, lkey: int, look_up: Callable[[Iterable[RecvWork]], None]) -> None: ...

    def flush(self) -> None: ...


E = TypeVar("E", bound=Engine)


class DeviceParts(NamedTuple):
    """The parts of a device that its queue pairs use."""

    mux: QPMultiplexer
    memory: MemoryTable
    #: What its engines count.
    counters: EngineCounters
    #: Returns the packed address and the interface index of the GID at an index.
    find_source: Callable[[int], tuple[bytes, int]]
    #: Returns the MTU of the port in bytes.
    find_mtu: Callable[[], int]
    #: Whether a packed address is the device's; with the interface index of one that is link-local, else 0.
    is_own: Callable[[bytes, int], bool]
    #: The index of the device's interface.
    ifindex: int
    #: Its addresses as the compiled core has them; None without it.
    core_addresses: Addresses | None


class WorkQueues(Generic[E]):
    """The part of a queue pair that does not depend on its type. ``E`` is its engine."""

    __slots__ = (
        *("_attr", "_cap", "_closed", "_counters", "_engine", "_find_source", "_mux", "_pd", "_recv_cq", "_recvs"),
        *("_send_cq", "_sends", "_signal_all", "_srq", "_table", "async_events", "core", "qp_num", "state"),
    )

    #: None until there is a work request or a packet.
    _engine: E | None

    def __init__(
        self,
        parts: DeviceParts,
        pd: object,
        cap: QPCap,
        sq_sig_all: bool,
        send_cq: SoftCQ,
        recv_cq: SoftCQ,
        srq: SoftSRQ | None,
    ) -> None:
        #: What it sends and receives with, and the registered memory and the counters of its device.
        self._mux = parts.mux
        self._table = parts.memory
        self._counters = parts.counters
        #: See :attr:`DeviceParts.find_source`.
        self._find_source = parts.find_source
        #: The protection domain, whose memory the peer may touch.
        self._pd = pd
        #: The depths of the queues.
        self._cap = cap
        #: Whether requests without SIGNALED have completions too.
        self._signal_all = sq_sig_all
        #: Where sends and receives complete.
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        #: Where receives come from; None for a receive queue of its own.
        self._srq = srq
        #: Set by the multiplexer.
        self.qp_num = 0
        #: See :class:`rdmacm.verbs.backend.QPBackend`.
        self.core: Connection | Datagrams | None = None
        #: Whether it was destroyed.
        self._closed = False
        #: Takes its asynchronous events.
        self.async_events: AsyncEvents | None = None
        self._set_up(parts)
        self._enter_reset()

    def _set_up(self, parts: DeviceParts) -> None:
        """Set what a type has for good, and join the multiplexer."""
        raise NotImplementedError

    def _enter_reset(self) -> None:
        #: Changes by ``modify``, with the connection of an id, and to ERR and SQE by itself.
        self.state: QPState = _RESET
        #: What was set, None before.
        self._attr: QPAttr | None = None
        self._engine = None
        #: Requests that occupy the send queue, and the receive queue, which with a shared receive queue is unused.
        self._sends = 0
        self._recvs = 0

    def _start_engine(self) -> E:
        """Return the engine, made if there is none, in the state of the queue pair."""
        raise NotImplementedError

    @property
    def _is_draining(self) -> bool:
        """Whether requests that have begun are not complete yet, in SQD."""
        return False

    # -- for the multiplexer: see MultiplexedQP -------------------------------------------------------

    def received(self, data: memoryview, segment: int, source: SocketAddress, destination: bytes, now: float) -> None:
        raise NotImplementedError

    def transmit(self, now: float, limit: int) -> int:
        raise NotImplementedError

    def ask_peer(self) -> Hashable:
        return None

    def sent_again(self) -> int:
        return 0

    @property
    def deadline(self) -> float | None:
        return None

    def timer(self, now: float) -> None: ...

    # -- states and attributes ------------------------------------------------------------------------

    @property
    def attr(self) -> QPAttr:
        """Its attributes, for ``advance``. ``cap`` and the address vectors may be shared: replace them."""
        if self._attr is None:
            self._attr = QPAttr(cap=_NO_CAP, ah_attr=_NO_PATH, alt_ah_attr=_NO_PATH)
        return self._attr

    def query(self) -> QPAttr:
        with self._mux.runtime.lock:
            found = copy.deepcopy(self._attr) if self._attr is not None else QPAttr()
            found.qp_state = found.cur_qp_state = self.state
            found.cap = copy.copy(self._cap)
            found.sq_draining = int(self.state is _SQD and self._is_draining)
            return found

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("modify_qp", "queue pair")
            self._mux.acknowledge()
            self._leave_core()
            before, bits = self.state, mask.value
            state = QPState(attr.qp_state) if bits & QP_STATE else before
            if state is _RESET:
                if log.enabled:
                    self._log_change(before, "modify_qp", _RESET)
                self._reset()
                return
            self._check_change(state, bits)
            self._take_attributes(attr, bits)
            self.state = state
            self._tell_core_wire()
            if state is not before:
                if log.enabled:
                    self._log_change(before, "modify_qp")
                self._enter(state, before, self.attr)

    def _take_attributes(self, attr: QPAttr, bits: int) -> None:
        """Take the attributes that a mask names, and give the engine those that it has."""
        for name in named_fields(bits):
            setattr(self.attr, name, getattr(attr, name))

    def _enter(self, state: QPState, before: QPState, attr: QPAttr) -> None:
        """Take the engine from one state to another."""
        raise NotImplementedError

    def _check_change(self, state: QPState, bits: int) -> None:
        """Refuse what :meth:`modify` does not do here: an alternate path, or RTS while the send queue drains."""
        if bits & QP_ALT_PATH:
            why = "the device has no alternate paths: RoCE has no path migration"
            raise cm_error(errno.EINVAL, why, "modify_qp", hint="leave out ALT_PATH")
        if self.state is _SQD:
            if state is _RTS and self._is_draining:
                why = "requests are still in progress"
                raise cm_error(errno.EINVAL, why, "modify_qp", hint="wait until sq_draining is 0, or for SQ_DRAINED")
        elif state is _SQD and not bits & QP_EN_SQD_ASYNC_NOTIFY:
            self.attr.en_sqd_async_notify = 0  # the value of the last time does not count

    def _log_change(self, before: QPState, why: str, after: QPState | None = None) -> None:
        peer = f" (to 0x{self._attr.dest_qp_num:06x})" if self._attr is not None and self._attr.dest_qp_num else ""
        log.QP.debug("QP 0x%06x%s: %s -> %s, %s", self.qp_num, peer, before.name, (after or self.state).name, why)

    def fail(self) -> None:
        """To ERR at the end of its connection: everything posted is flushed. In RESET nothing is posted."""
        with self._mux.runtime.lock:
            if self._mux.runtime.abandoned:
                return
            if self._engine is not None:
                self._mux.acknowledge()
            if self.state is not _RESET and self.state is not _ERR:
                try:
                    self._fail("the connection has ended")
                except BaseException as error:
                    self._mux.engine_raised(self, error)

    def _fail(self, why: str) -> None:
        """To the error state: everything posted completes, in order."""
        engine = self._engine
        if self.core is not None:
            self._leave_core()
        if log.enabled and self.state is not _ERR:
            self._log_change(self.state, why, _ERR)
        self.state = _ERR
        self._tell_core_wire()
        if engine is not None:
            if not engine.failed:  # an engine that failed by itself still has to tell the peer why
                engine.flush()
            self._complete(engine.completed)
        if self._srq is not None:
            self._report(EventType.QP_LAST_WQE_REACHED)

    def abort(self) -> None:
        """To ERR because the engine has raised. What it still has is flushed, and it is not used again."""
        engine, self._engine = self._engine, None
        self._leave_core()
        was_failed = self.state is _ERR
        if self.state is not _RESET:
            if log.enabled and not was_failed:
                self._log_change(self.state, "an internal error", _ERR)
            self.state = _ERR
        self._tell_core_wire()
        try:
            if engine is not None:
                engine.failed = False  # it may have raised in the midst of its own flush
                engine.flush()
                self._complete(engine.completed)
        finally:
            self._sends = self._recvs = 0
            if not was_failed:
                self._report(EventType.QP_FATAL)
                if self._srq is not None:
                    self._report(EventType.QP_LAST_WQE_REACHED)

    def _reset(self) -> None:
        """Forget everything posted, and the completions that were not polled."""
        if self.core is not None:
            self._leave_core()
        self._enter_reset()
        if not self._closed:
            self._tell_core_wire()
        self._drop_completions()

    def _drop_completions(self) -> None:
        """Drop the completions that were not polled."""
        self._send_cq.drop(self.qp_num)
        if self._recv_cq is not self._send_cq:
            self._recv_cq.drop(self.qp_num)

    def attach_mcast(self, _gid: Gid, _lid: int) -> None:
        raise cm_error(errno.EINVAL, "only a datagram queue pair receives from multicast groups", "attach_mcast")

    def detach_mcast(self, _gid: Gid, _lid: int) -> None:
        raise cm_error(errno.EINVAL, "only a datagram queue pair receives from multicast groups", "detach_mcast")

    def destroy(self) -> None:
        with self._mux.runtime.lock:
            if self._engine is not None:
                self._mux.acknowledge()
            self._closed = True
            self._reset()
            self._mux.detach(self)

    # -- work requests --------------------------------------------------------------------------------

    def post_send(self, wrs: list[SendWR]) -> None:
        raise NotImplementedError

    def _check_send(self, wr: SendWR) -> None:
        """Raise where :meth:`post_send` would refuse a request that :mod:`rdmacm.verbs.posting` has not refused."""

    def post_send_all(self, wrs: list[SendWR]) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("post_send", "queue pair")
            if self.core is not None:
                self._settle()
            if len(wrs) > 1:
                most = self._cap.max_send_wr
                if self._sends + len(wrs) > most:
                    self._mux.progress()  # an ACK that has arrived may make room
                    self._settle()
                    if self._sends + len(wrs) > most:
                        first = wrs[max(0, most - self._sends)]
                        raise refused(first, errno.ENOMEM, f"the send queue holds {most} requests", "post_send")
                for wr in wrs:
                    self._check_send(wr)
            self.post_send(wrs)

    def post_recv(self, wrs: list[RecvWR]) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("post_recv", "queue pair")
            if self.state is _RESET:  # another thread has moved it since QP.post_recv() has looked
                raise refused(wrs[0], errno.EINVAL, "a queue pair in RESET takes no receives", "post_recv")
            engine = self._engine or self._start_engine()
            if self.core is not None:
                self._settle()
            most = self._cap.max_recv_wr
            try:
                for wr in wrs:
                    if self._recvs >= most:
                        raise refused(wr, errno.ENOMEM, f"the receive queue holds {most} requests", "post_recv")
                    work = self._table.receive(self._pd, wr)
                    try:
                        engine.post_recv(work)
                    except BaseException as error:
                        raise self._post_raised(wr, error, "post_recv") from error
                    self._recvs += 1
            finally:
                if self.state is _ERR and engine.completed:
                    self._complete(engine.completed)

    def region_changed(self, table: MemoryTable, pd: object, region: SoftMR) -> None:
        """A region was registered anew, which was in this domain: look up the keys of the posted receives again."""
        engine = self._engine
        if table is self._table and pd is self._pd and self._srq is None and engine is not None:
            self._mux.acknowledge()
            engine.look_up_again(region.lkey, partial(table.look_up_again, pd, region))

    def _post_raised(self, wr: SendWR | RecvWR, error: BaseException, step: str) -> RdmaError:
        """The error of a request that made the engine raise. The queue pair has ended, and the request is not posted.

        Raises ``error`` itself if it is no Exception.
        """
        self._mux.engine_raised(self, error)
        return refused(wr, errno.EIO, "an internal error has ended the queue pair", step)

    # -- completions and events -----------------------------------------------------------------------

    def _complete(self, completed: list[WC]) -> None:
        """Pass the engine's completions on to the completion queues."""
        found = completed[:]
        completed.clear()
        if len(found) == 1 and found[0].opcode & WC_RECV:
            self._recvs -= 1
            self._recv_cq.add(found)
            return
        sends: list[WC] = []
        recvs = sends if self._recv_cq is self._send_cq else []
        for wc in found:
            if wc.opcode & WC_RECV:
                self._recvs -= 1
                recvs.append(wc)
                continue
            self._sends -= 1
            if type(wc.wr_id) is UnsignaledWrId:
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
            self._fail("a completion queue has overflowed")
            self._report(EventType.QP_FATAL)

    # -- the compiled core ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """Count what the compiled core has posted and completed."""
        if self.core is not None:
            sends, recvs = self.core.take_posted_counts()
            self._sends += sends
            self._recvs += recvs

    def count(self, counts: list[tuple[str, str, int]]) -> None:
        """Add what the compiled core has counted."""
        self._counters.add(counts)

    def _core_limits(self) -> tuple[int, int, int, int, int, bool]:
        """What the compiled core has to know of requests that are posted to it (``Connection``, ``sizes``)."""
        cap = self._cap
        sizes = cap.max_send_wr, cap.max_recv_wr, cap.max_inline_data
        return *sizes, cap.max_send_sge, cap.max_recv_sge, self._signal_all

    def core_failed(self) -> None:
        """The engine of the compiled core has failed by itself."""

    def core_reached_limit(self) -> None:
        """The compiled core may have taken a receive that was at the limit of the shared receive queue."""
        if self._srq is not None:
            self._srq.see_limit()

    def _serve(self, core_wire: CoreWire) -> None:
        """Have the core's thread serve the peers, once a queue pair has joined."""
        if core_wire.serve():
            self._mux.runtime.driver.deadlines_changed()  # the helper leaves some descriptors to that thread

    def _tell_core_wire(self) -> None:
        """Tell the compiled core whose packets the queue pair accepts: after a change of the state or the peer.

        Also in Python, the next packet is checked anew.
        """

    def _leave_core(self) -> None:
        """Have everything done in Python, until :meth:`_join_core`."""
        core = self.core
        if core is not None:
            self._settle()
            self._counters.add(core.take_counts())
            self.core = None
            core.detach()
            self.core_reached_limit()

    def _report(self, event: EventType) -> None:
        if self.async_events is not None:
            self.async_events.post(event)
