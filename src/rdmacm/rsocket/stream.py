"""The state of one connection: its id, queue pair and memory around the engine of the protocol.

Nothing in here waits. Methods are called with the provider's lock held, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter, deque
from mmap import mmap

from rdmacm.address import SockAddr
from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType, IbOption, OptionLevel, PortSpace
from rdmacm.endpoint.dispatcher import Dispatcher, Observable, Routine, Wait
from rdmacm.endpoint.failures import status_hint, status_text
from rdmacm.errors import CmDisconnectedError, RdmaError, cm_error
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.rsocket.engine import StreamEngine
from rdmacm.proto.rsocket.messages import (
    MAPPING_LENGTH,
    TARGET_LENGTH,
    TARGETS,
    ConnectionData,
    Mapping,
    Target,
    own_flags,
)
from rdmacm.proto.rsocket.states import CONNECTED, SENDING, Trigger
from rdmacm.proto.wire import WireError
from rdmacm.provider.connparam import ConnParam
from rdmacm.rsocket.options import StreamOptions
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import WC, AccessFlag, QPType, SendFlag, TransportType, WCStatus, WROpcode
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

#: The wr_id of sends; those of receives are smaller.
_SEND_WR_ID = 1 << 32
#: Completions processed by one :meth:`StreamState.poll`.
_POLL_BATCH = 64
#: Bytes of a message by SEND, where the device has no immediate data.
_MESSAGE_LENGTH = 4
#: What each entry that is sent inline needs at least.
_MIN_INLINE = MAPPING_LENGTH
_INLINE = SendFlag.INLINE
_SIGNALED = SendFlag.SIGNALED
_SIGNALED_INLINE = SendFlag.SIGNALED | SendFlag.INLINE
_UNSIGNALED = SendFlag(0)
#: Requests of which one reports its completion, at most.
_SIGNAL_INTERVAL = 16
#: Timeout of resolve_addr and of resolve_route, in milliseconds.
_RESOLVE_TIMEOUT_MS = 2000
#: IBV_EVENT_COMM_EST, for rdma_notify(3).
_EVENT_COMM_EST = 4

_FAILURES = frozenset(
    (
        CmEventType.ADDR_ERROR,
        CmEventType.ROUTE_ERROR,
        CmEventType.CONNECT_ERROR,
        CmEventType.UNREACHABLE,
        CmEventType.REJECTED,
        CmEventType.DEVICE_REMOVAL,
    )
)

#: How often peers have broken the protocol, by the name of the fault.
faults: Counter[str] = Counter()


class _Memory:
    """The registered memory of one connection, and its queue pair's receives."""

    def __init__(self, pd: PD, options: StreamOptions, *, has_immediates: bool) -> None:
        control = TARGETS * TARGET_LENGTH + options.mappings * MAPPING_LENGTH
        #: The buffers: control memory, rings, and messages by SEND.
        self.control = memoryview(mmap(-1, control))
        self.receiving = memoryview(mmap(-1, options.receive_buffer))
        self.sending = memoryview(mmap(-1, options.send_buffer))
        self.messages = memoryview(mmap(-1, options.receive_queue * _MESSAGE_LENGTH))
        by_peer = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE
        #: Their regions; the last one only where the device has no immediate data.
        self.regions: list[MR] = []
        try:
            for memory, access in (
                (self.control, by_peer),
                (self.receiving, by_peer),
                (self.sending, AccessFlag(0)),
                (self.messages, AccessFlag.LOCAL_WRITE),
            )[: 3 if has_immediates else 4]:
                self.regions.append(MR(pd, memory, access))
        except BaseException:
            self.close()
            raise

    def connection_data(self, options: StreamOptions) -> ConnectionData:
        control, receiving = self.regions[:2]
        return ConnectionData(
            options.receive_queue,
            options.mappings,
            Target(control.addr, control.rkey, TARGETS),
            Target(receiving.addr, receiving.rkey, len(self.receiving) // 2),
            own_flags(),
        )

    def piece(self, offset: int, length: int) -> SGE:
        """A piece of the sending ring."""
        return self.regions[2].sge(offset, length)

    def receive(self, number: int) -> RecvWR:
        """The receive of a number."""
        if len(self.regions) == 3:
            return RecvWR(number)
        return RecvWR(number, [self.regions[3].sge(number * _MESSAGE_LENGTH, _MESSAGE_LENGTH)])

    def message(self, number: int) -> memoryview:
        """The message by SEND that a receive has."""
        return self.messages[number * _MESSAGE_LENGTH : (number + 1) * _MESSAGE_LENGTH]

    def close(self) -> None:
        for region in self.regions:
            with contextlib.suppress(RdmaError):
                region.close()
        self.regions = []


class StreamState(Observable):
    """One connection, active or passive. Changes when something has happened that a call may wait for."""

    def __init__(self, dispatcher: Dispatcher, cmid: CmId, options: StreamOptions) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        #: The id, which owns the queue pair. Destroyed by :meth:`release`.
        self.cmid: CmId = cmid
        self.options: StreamOptions = options
        #: The protocol; None before the peer's connection data are known.
        self.engine: StreamEngine | None = None
        #: Whether the connection is or was established.
        self.is_established: bool = False
        #: Changes when the connection is established and when it has failed before that.
        self.lifecycle: Observable = Observable()
        #: Why the connection could not be made.
        self.error: RdmaError | None = None
        #: Whether the peer has ended the connection, or it has failed: nothing completes any more.
        self.is_gone: bool = False
        self._hint: str | None = None
        self.is_released: bool = False
        #: Whether the dispatcher is going to call :meth:`poll`.
        self.is_scheduled = False
        #: What :meth:`connect` was called with.
        self._destination: SockAddr | None = None
        self._was_stale = False
        self._pd: PD | None = None
        self._cq: CQ | None = None
        self._qp: QP | None = None
        self._memory: _Memory | None = None
        self._has_immediates = True
        #: Requests since the last one that reports its completion, and the bytes of the ring that they have. A
        #: completion stands for all requests before it: how many, for each that is to come.
        self._unsignaled = self._unsignaled_bytes = 0
        self._covered: deque[int] = deque()
        self._signal_interval = _SIGNAL_INTERVAL
        #: Memory that the peer may write by its offset, by index: the offset and the region.
        self._mapped: dict[int, tuple[int, MR]] = {}
        #: When bytes or a message of the peer were last seen, in seconds of the dispatcher's clock.
        self.last_heard: float = dispatcher.clock()
        cmid.context = self
        dispatcher.retain()

    # -- setup ----------------------------------------------------------------------------------------

    def connect(self, destination: SockAddr) -> None:
        """Start to connect."""
        self._destination = destination
        self.cmid.resolve_addr(destination, None, _RESOLVE_TIMEOUT_MS)

    def accept(self, private_data: bytes) -> None:
        """Accept the request of the id. WireError: the peer is no rsocket of this version."""
        peer = ConnectionData.unpack(private_data)
        self._open()
        self._begin(peer)
        assert self._memory is not None
        self.cmid.accept(self._param())

    def _param(self) -> ConnParam:
        assert self._memory is not None
        data = self._memory.connection_data(self.options).pack()
        # iWARP's devices do not connect without.
        return ConnParam(data, 0, 0 if self._has_immediates else 1, flow_control=1)

    def _open(self) -> None:
        """Create the queue pair and post all receives. Raises RdmaError when the device lacks resources."""
        context = self.cmid.verbs
        assert context is not None
        device = context.backend
        options = self.options = self.options.fitted(device.attr)
        self._has_immediates = device.transport_type is not TransportType.IWARP
        self._cq = CQ(context, options.send_queue + options.receive_queue)
        self._cq.backend.notify = self._reported
        self._pd = PD(context)
        inline = min(max(options.inline, _MIN_INLINE), max(device.attr.max_inline_data, _MIN_INLINE))
        cap = QPCap(options.send_queue, options.receive_queue, 2, 1, inline)
        attr = QPInitAttr(QPType.RC, scq=self._cq, rcq=self._cq, cap=cap)
        self._signal_interval = min(_SIGNAL_INTERVAL, options.send_queue // 4)
        self._qp = self.cmid.create_qp(attr, self._pd)
        self._memory = _Memory(self._pd, options, has_immediates=self._has_immediates)
        self._qp.post_recv([self._memory.receive(number) for number in range(options.receive_queue)])

    def _begin(self, peer: ConnectionData) -> None:
        memory, options = self._memory, self.options
        assert memory is not None
        self.engine = StreamEngine(
            memory.connection_data(options),
            peer,
            memory.control,
            memory.sending,
            memory.receiving,
            options.send_queue,
            has_immediates=self._has_immediates,
        )

    def handle(self, event: CmEvent) -> None:
        """Process an event of the id."""
        try:
            self._handle(event)
        except RdmaError as error:
            self._fail(error)

    def _handle(self, event: CmEvent) -> None:
        match event.type:
            case CmEventType.ADDR_RESOLVED if self.options.route:
                self.cmid.set_option(OptionLevel.IB, IbOption.PATH, self.options.route)
            case CmEventType.ADDR_RESOLVED:
                self.cmid.resolve_route(_RESOLVE_TIMEOUT_MS)
            case CmEventType.ROUTE_RESOLVED:
                self._open()
                self.cmid.connect(self._param())
            case CmEventType.ESTABLISHED:
                self._established(event)
            case CmEventType.DISCONNECTED:
                if self.engine is not None:
                    self._establish()  # the peer has got the REP; its RTU was lost
                self._drain()
                self.end("the peer ended the connection without the end of the stream")
            case CmEventType.UNREACHABLE if self.is_established:
                pass  # the peer has another hardware address; if it is another host, requests fail
            case CmEventType.REJECTED if event.status == RejectReason.STALE_CONN and self._may_try_again():
                self._try_again()
            case kind if kind in _FAILURES:
                self._fail(event.error or cm_error(errno.ECONNRESET, event.message, "connect"))

    def _established(self, event: CmEvent) -> None:
        if self.engine is None:
            try:
                self._begin(ConnectionData.unpack(event.private_data))
            except WireError as problem:
                text = f"the peer accepts connections, but is no rsocket of this version: {problem}"
                hint = "the address of a server of rsockets, such as rdmacm.rsocket.create_server() makes"
                self._fail(cm_error(errno.EOPNOTSUPP, text, "connect", self.cmid.peer_addr_text, hint))
                return
        self._establish()

    def _establish(self) -> None:
        if not self.is_established:
            self.is_established = True
            self.last_heard = self.dispatcher.clock()
            self._reported()
            self.flush()
            self.lifecycle.changed()

    def _may_try_again(self) -> bool:
        return self._destination is not None and not self._was_stale

    def _try_again(self) -> None:
        """Connect again: the peer had a connection of an ended process with the same number, and has released it."""
        assert self._destination is not None
        self._was_stale = True
        source, old = self.cmid.local_addr, self.cmid
        old.context = None
        self._destroy()
        self.cmid = CmId(self.dispatcher.channel, PortSpace.TCP, context=self)
        self.cmid.resolve_addr(self._destination, source, _RESOLVE_TIMEOUT_MS)

    def _fail(self, error: RdmaError) -> None:
        """The connection could not be made, or has ended."""
        if not self.is_established and self.error is None:
            self.error = error
        self.end(str(error.strerror))
        self.lifecycle.changed()

    # -- progress -------------------------------------------------------------------------------------

    def _reported(self) -> None:
        """The completion queue has completions: this is its ``notify``."""
        self.dispatcher.schedule(self)

    def poll(self) -> bool:
        """Process completions; see :class:`rdmacm.endpoint.dispatcher.CompletionSource`."""
        if self.is_released or self._cq is None or self.engine is None:
            return False
        try:
            found = self._cq.poll(_POLL_BATCH)
        except RdmaError as error:
            self.end(str(error.strerror))
            return False
        if found:
            receives = [wc.wr_id for wc in found if self._take(wc)]
            if receives and not self.is_established:  # data implies the RTU, which was lost or comes later
                with contextlib.suppress(RdmaError):
                    self.cmid.notify(_EVENT_COMM_EST)
            self._post_receives(receives)
            self.flush()
        return len(found) >= _POLL_BATCH

    def _take(self, wc: WC) -> bool:
        """Process a completion; return whether it is one of a receive, which is to be posted again."""
        engine = self.engine
        assert engine is not None
        is_receive = wc.wr_id < _SEND_WR_ID
        if wc.status is not WCStatus.SUCCESS:
            if wc.status is WCStatus.RETRY_EXC_ERR and not self.is_gone:
                self._hint = status_hint(wc.status)
            is_flushed = wc.status is WCStatus.WR_FLUSH_ERR
            self.end("the connection has ended" if is_flushed else f"the connection failed: {status_text(wc.status)}")
            return False
        if not is_receive:
            engine.completed(self._covered.popleft())
            return False
        self.last_heard = self.dispatcher.clock()
        if not self._has_immediates:
            assert self._memory is not None
            engine.received_send(self._memory.message(wc.wr_id)[: wc.byte_len])
        elif wc.imm_data is None:
            engine.received_send(b"")  # a plain SEND, which the protocol does not have here
        else:
            engine.received(wc.imm_data)
        return True

    def _post_receives(self, numbers: list[int]) -> None:
        if numbers and self._qp is not None and self._memory is not None and not self.is_gone:
            try:  # noqa: SIM105 (three calls less for each message)
                self._qp.post_recv([self._memory.receive(number) for number in numbers])
            except RdmaError:  # completions tell what has happened to the queue pair
                pass

    def flush(self) -> None:
        """Post what the engine wants posted, and tell those who wait."""
        engine = self.engine
        if engine is None or not self.is_established:
            return
        if self._unsignaled and engine.state not in SENDING:
            engine.probe()  # nothing else would tell that everything has arrived
        if engine.work:
            requests = [self._request() for _ in range(len(engine.work))]
            if self._unsignaled and engine.needs_completion:
                self._signal(requests[-1])
            if self._qp is not None and not self.is_gone:
                try:
                    self._qp.post_send(requests)
                except RdmaError as error:
                    self.end(str(error.strerror))
        if engine.fault is not None and not self.is_gone:
            faults[engine.fault.name] += 1
            self.end(engine.fault.value)
        if self.wakers:
            self.changed()

    def _request(self) -> SendWR:
        """The work request for the oldest work of the engine."""
        assert self.engine is not None and self._memory is not None
        work = self.engine.work.popleft()
        if work.is_send:
            wr = SendWR(_SEND_WR_ID, WROpcode.SEND, [work.inline], _INLINE)
        else:
            wr = SendWR(_SEND_WR_ID, WROpcode.RDMA_WRITE, remote_addr=work.remote_addr, rkey=work.key)
            if work.imm is not None:
                wr.opcode, wr.imm_data = WROpcode.RDMA_WRITE_WITH_IMM, work.imm
            if work.inline:
                wr.sg, wr.send_flags = [work.inline], _INLINE
            else:
                wr.sg, wr.send_flags = (
                    [self._memory.piece(offset, length) for offset, length in work.local],
                    _UNSIGNALED,
                )
        self._unsignaled += 1
        for _, length in work.local:
            self._unsignaled_bytes += length
        if (
            not work.local
            or self._unsignaled >= self._signal_interval
            or self._unsignaled_bytes >= len(self._memory.sending) // 4
        ):
            self._signal(wr)
        return wr

    def _signal(self, wr: SendWR) -> None:
        """Have the last request of those so far report its completion."""
        wr.send_flags = _SIGNALED_INLINE if wr.send_flags is _INLINE else _SIGNALED
        self._covered.append(self._unsignaled)
        self._unsignaled = self._unsignaled_bytes = 0

    def _drain(self) -> None:
        while self.poll():
            pass

    # -- I/O mappings ---------------------------------------------------------------------------------

    def map(self, buffer: Buffer, access: AccessFlag, offset: int) -> int:
        """Register memory, and have the peer write to it by its offset; -1 takes its address. Returns the offset."""
        engine = self.engine
        if engine is None or self._pd is None or not self.is_connected:
            raise cm_error(errno.ENOTCONN, "the socket is not connected", "riomap")
        index = next((each for each in range(engine.peer_mappings) if each not in self._mapped), None)
        if index is None:
            text = f"the peer has room for {engine.peer_mappings} mappings"
            raise cm_error(errno.ENOSPC, text, "riomap", hint="RDMA_IOMAPSIZE of the peer's socket")
        region = MR(self._pd, buffer, access)
        self._mapped[index] = offset if offset >= 0 else region.addr, region
        engine.map(index, Mapping(self._mapped[index][0], region.addr, region.rkey, region.length))
        self.flush()
        return self._mapped[index][0]

    def unmap(self, offset: int) -> None:
        """Take a mapping back: the peer cannot write to its memory any more."""
        index = next((each for each, (start, _) in self._mapped.items() if start == offset), None)
        if index is None:
            raise cm_error(errno.EINVAL, f"nothing is mapped at offset {offset}", "riounmap")
        _, region = self._mapped.pop(index)
        region.close()
        if self.engine is not None:
            self.engine.unmap(index)
            self.flush()

    # -- the end --------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether the stream still has a peer."""
        return self.is_established and not self.is_gone and self.engine is not None and self.engine.state in CONNECTED

    def end(self, reason: str) -> None:
        """Disconnect: neither the device nor the peer accesses this side's memory from here on."""
        if self.is_gone:
            return
        self.is_gone = True
        if self.engine is not None:
            self.engine.lost(reason)
            self.engine.work.clear()
        with contextlib.suppress(RdmaError):  # the id was never connected
            self.cmid.disconnect()
        self.changed()
        if not self.is_established:
            if self.error is None:
                self.error = cm_error(errno.ECONNABORTED, reason, "connect")
            self.lifecycle.changed()

    def failed(self, step: str) -> RdmaError:
        """The error of a call after the stream has failed."""
        reason = "" if self.engine is None else self.engine.failure or ""
        return CmDisconnectedError(errno.ECONNRESET, reason, step, self.cmid.peer_addr_text, self._hint)

    # -- what sockets ask -----------------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        """Whether a call that reads returns at once."""
        engine = self.engine
        return self.error is not None or (engine is not None and (engine.unread > 0 or engine.is_at_end))

    @property
    def is_writable(self) -> bool:
        """Whether a call that writes returns at once."""
        if not self.is_established or self.engine is None:
            return self.error is not None
        return self.engine.is_writable or self.engine.state not in SENDING

    def probe(self) -> None:
        """Find out whether the peer is alive: the request fails if it is not."""
        self.last_heard = self.dispatcher.clock()
        if self.engine is not None:
            if self._unsignaled:
                self.engine.probe()
            else:
                self.engine.keepalive()
            self.flush()

    def shut(self, trigger: Trigger) -> None:
        """Close one half of the stream, or both."""
        if self.engine is not None:
            self.engine.shut(trigger)
            self.flush()

    @property
    def has_lingered(self) -> bool:
        """Whether everything that was sent has arrived, or never will."""
        return not self.is_established or self.is_gone or self.engine is None or self.engine.is_idle

    def release(self) -> None:
        """Disconnect, drop unread bytes and destroy everything. Call it without the lock where possible."""
        if self.dispatcher.drive_once(self._begin_release):
            self.cmid.context = None
            self._destroy()
            self.wakers.clear()
            self.dispatcher.release()

    def _begin_release(self) -> bool:
        if self.is_released:
            return False
        self.end("the socket was closed")
        self.is_released = True
        return True

    def _destroy(self) -> None:
        if self._cq is not None:
            self._cq.backend.notify = None
        self.cmid.destroy()
        if self._cq is not None:
            self._cq.close()
        for _, region in self._mapped.values():
            region.close()
        self._mapped.clear()
        if self._memory is not None:
            self._memory.close()
        if self._pd is not None:
            self._pd.close()
        self._cq = self._qp = self._memory = self._pd = None


def connect_stream(dispatcher: Dispatcher, destination: SockAddr) -> Routine[StreamState]:
    """Connect with the usual options."""
    options = StreamOptions()
    state = dispatcher.drive_once(lambda: StreamState(dispatcher, CmId(dispatcher.channel, PortSpace.TCP), options))
    try:
        dispatcher.drive_once(lambda: state.connect(destination))
        yield Wait(state.lifecycle, lambda: state.is_established or state.error)
        if state.error is not None:
            raise state.error
    except BaseException:
        state.release()
        raise
    return state
