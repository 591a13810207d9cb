"""The state of one connection: queue pair, receive buffers, operations under way and received messages.

Nothing in here waits. Operations are routines (:data:`rdmacm.endpoint.dispatcher.Routine`), which a thread or an event
loop executes.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import NamedTuple

from rdmacm.address import ALL_BITS_64
from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType
from rdmacm.endpoint.dispatcher import Dispatcher, Expired, Observable, Routine, Wait
from rdmacm.endpoint.failures import completion_error, status_text
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.endpoint.receive_buffers import ReceiveBuffers
from rdmacm.endpoint.silence import ASK_SECONDS, MANAGER_INTERVAL, SHORT, PacketSizes, PeerWatch, ask_manager
from rdmacm.errors import CmDisconnectedError, CmTimeoutError, RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.provider.cmstate import State
from rdmacm.provider.connparam import MAXIMUM, ConnParam
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import WC, AccessFlag, QPType, SendFlag, WCOpcode, WCStatus, WROpcode
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.wr import SendWR

#: The wr_id of the first send work request. Smaller ones are indexes of receive buffers.
_FIRST_SEND_WR_ID = 1 << 32
#: Completions processed by one :meth:`ConnectionState.poll`.
_POLL_BATCH = 32
#: The device copies payloads of up to this many bytes (IBV_SEND_INLINE), or of its own limit; longer ones are
#: registered.
_MAX_INLINE = 256
#: IBV_EVENT_COMM_EST, for rdma_notify(3).
_EVENT_COMM_EST = 4
#: Minimum size of the send queue, in work requests. Further operations wait in the backlog.
_MIN_SEND_DEPTH = 16


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Sizes and connection parameters of one connection; see :func:`rdmacm.connect`. ``keepalive`` is in seconds."""

    depth: int = 16
    max_message: int = 65536
    private_data: bytes = b""
    responder_resources: int = MAXIMUM
    initiator_depth: int = MAXIMUM
    keepalive: float | None = 15.0
    #: The protection domain, which the connection does not close; None for one of its own.
    pd: PD | None = None

    def __post_init__(self) -> None:
        if self.depth < 1 or self.max_message < 1:
            raise ValueError("depth and max_message must be at least 1")
        if self.keepalive is not None and self.keepalive <= 0:
            raise ValueError("keepalive must be a positive number of seconds, or None")

    def conn_param(self) -> ConnParam:
        """The parameters for rdma_connect(3) or rdma_accept(3)."""
        return ConnParam(self.private_data, self.responder_resources, self.initiator_depth)


class Message(NamedTuple):
    """A received message: ``data`` are its bytes, ``imm`` is its 32-bit immediate data or None."""

    data: bytes
    imm: int | None


class _Operation(Observable):
    """A send work request, posted or in the backlog. Changes when it is done."""

    __slots__ = ("borrows", "error", "is_done", "is_unanswered", "mr", "name", "size", "wr")

    def __init__(self, name: str, wr: SendWR, size: int = 0, mr: MR | None = None, *, borrows: bool = False) -> None:
        super().__init__()
        #: The method of the connection, for error messages.
        self.name = name
        self.wr = wr
        #: Bytes of its message.
        self.size = size
        #: Whether it has failed because the peer did not answer.
        self.is_unanswered = False
        #: Memory region that exists for this operation only; None if it needs none.
        self.mr = mr
        #: Whether the device accesses memory that the caller may change or reuse.
        self.borrows = borrows
        self.is_done = False
        #: Why the operation has failed; None before that and after success.
        self.error: RdmaError | None = None

    def finish(self, error: RdmaError | None = None) -> None:
        self.is_done = True
        self.error = error
        mr, self.mr = self.mr, None
        if mr is not None:
            mr.close()
        self.changed()


class ConnectionState:
    """One connection, from the creation of its queue pair.

    Methods must be called with the provider's lock held. Routines take it themselves.
    """

    def __init__(self, dispatcher: Dispatcher, cmid: CmId, options: ConnectionOptions) -> None:
        self.dispatcher = dispatcher
        #: The id of the connection, which owns the queue pair. Destroyed by :meth:`release`.
        self.cmid = cmid
        self.options = options
        #: Private data of the peer's REQ or REP.
        self.private_data = b""
        #: Whether the connection is or was established.
        self.is_established: bool = False
        #: Changes when the connection is established and when it ends.
        self.lifecycle: Observable = Observable()
        #: Why the connection has ended; None before that.
        self.close_reason: str | None = None
        #: Whether :meth:`release` has been called: queue pair and memory are destroyed.
        self.is_released: bool = False
        #: Whether the dispatcher is going to call :meth:`poll`.
        self.is_scheduled = False
        #: How long each step of the connection setup took.
        self.steps: tuple[Step, ...] = ()
        #: When the queue pair was ready, in seconds of ``time.perf_counter``.
        self._opened = 0.0
        #: Completions of messages that :meth:`receive` has not returned yet; their buffers hold the data.
        self._inbox: deque[WC] = deque()
        #: Changes when a message arrives and when the connection ends.
        self._arrived = Observable()
        #: Operations posted to the send queue, by wr_id.
        self._operations: dict[int, _Operation] = {}
        #: Operations that do not fit into the send queue yet, in order.
        self._backlog: deque[_Operation] = deque()
        #: The wr_ids of send work requests to come.
        self._send_wr_ids = count(_FIRST_SEND_WR_ID)
        #: Regions the application has registered and not closed.
        self._regions: set[Region] = set()
        #: When the peer was last known to be alive, in seconds of the dispatcher's clock.
        self._last_activity = dispatcher.clock()
        #: Completion queue of sends and receives; None before :meth:`open`, as ``_qp`` and ``_buffers``.
        self._cq: CQ | None = None
        #: Completions that :meth:`_reported` has fetched for :meth:`poll`.
        self._fetched: list[WC] = []
        #: The protection domain that :meth:`open` has made; None before that, and with one of the application's.
        self._own_pd: PD | None = None
        self._qp: QP | None = None
        self._buffers: ReceiveBuffers | None = None
        #: How many bytes of payload the device copies.
        self._max_inline = 0
        #: Bytes of the longest message that has arrived: at the peer, and by a READ here.
        self._longest_sent = self._longest_read = 0
        #: Size of the send queue in work requests.
        self._send_depth = max(options.depth, _MIN_SEND_DEPTH)
        dispatcher.retain()

    # -- setup and teardown ---------------------------------------------------------------------------

    def open(self) -> None:
        """Create the queue pair and post the receive buffers. Raises RdmaError when the device lacks resources."""
        started = time.perf_counter()
        options, cmid = self.options, self.cmid
        context = cmid.verbs
        self._cq = CQ(context, self._send_depth + options.depth)
        self._cq.backend.notify = self._reported
        pd = options.pd
        if pd is None:
            pd = self._own_pd = PD(context)
        self._max_inline = min(_MAX_INLINE, context.backend.attr.max_inline_data)
        cap = QPCap(self._send_depth, options.depth, 1, 1, self._max_inline)
        self._qp = cmid.create_qp(QPInitAttr(QPType.RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=True), pd)
        self._buffers = ReceiveBuffers(self._qp, cmid.pd, options.depth, options.max_message)
        self._buffers.begin()
        self._opened = time.perf_counter()
        self.steps = (*cmid.steps, Step("qp", (self._opened - started) * 1e6))

    def established(self, step: str) -> None:
        """Record that the connection is established. ``step`` names the time since the queue pair was created."""
        if not self.is_established:
            self.is_established = True
            self.steps = (*self.steps, Step(step, (time.perf_counter() - self._opened) * 1e6))
            self.lifecycle.changed()

    def handle(self, event: CmEvent) -> None:
        """Process an event of the id whose context this object is."""
        match event.type:
            case CmEventType.ESTABLISHED:
                self.established("accept")
            case CmEventType.DISCONNECTED:
                # The peer has received our RTU, or sent data before that, so the connection was established.
                self.established("accept")
                self.drain()
                self.end("the peer has disconnected" if not event.status else event.message)
            case CmEventType.UNREACHABLE if self.is_established:
                pass  # the peer has another hardware address; if it is another host, operations fail
            case CmEventType.REJECTED | CmEventType.UNREACHABLE | CmEventType.CONNECT_ERROR:
                self.end(f"the peer did not complete the connection: {event.message}")
            case CmEventType.DEVICE_REMOVAL:
                self.end("the device was removed")

    def end(self, reason: str) -> None:
        """Disconnect. From here on neither the device nor the peer accesses this side's memory."""
        if self.close_reason is not None:
            return
        self.close_reason = reason
        with contextlib.suppress(RdmaError):  # the id was never connected
            self.cmid.disconnect()
        backlog, self._backlog = self._backlog, deque()
        for operation in backlog:
            operation.finish(self._disconnected_error(operation.name))
        self._arrived.changed()
        self.lifecycle.changed()

    def release(self) -> None:
        """Disconnect, drop unread messages and destroy everything. Call it without the lock where possible."""
        if self.dispatcher.drive_once(self._begin_release):
            self.cmid.context = None
            if self._cq is not None:
                self._cq.backend.notify = None
            self.cmid.destroy()
            if self._cq is not None:
                self._cq.close()
            if self._buffers is not None:
                self._buffers.close()
            for region in list(self._regions):
                region.close()
            if self._own_pd is not None:
                with contextlib.suppress(RdmaError):  # EBUSY: connections that share it close it with the last of them
                    self._own_pd.close()
            self.dispatcher.release()

    def _begin_release(self) -> bool:
        if self.is_released:
            return False
        self.end("the connection was closed locally")
        self.drain()
        self.is_released = True
        self._inbox.clear()
        return True

    def disconnect(self) -> None:
        """End the connection. Received messages can still be read."""
        self.dispatcher.drive_once(self.drain)
        self.dispatcher.drive_once(lambda: self.end("the connection was disconnected locally"))

    def _disconnected_error(self, step: str) -> RdmaError:
        reason = self.close_reason or "the connection has ended"
        return CmDisconnectedError(errno.ECONNRESET, reason, step, self.cmid.peer_addr_text)

    # -- completions ----------------------------------------------------------------------------------

    def _reported(self) -> None:
        """The completion queue has completions: this is its ``notify``.

        Posts the other receive buffers in time. :meth:`poll` would be late, because it waits for the application.
        """
        buffers = self._buffers
        if buffers is not None and buffers.can_grow and self._cq is not None:
            with contextlib.suppress(RdmaError):  # poll() meets it too
                self._fetched += self._cq.poll(_POLL_BATCH)
            arrived = sum(wc.wr_id < _FIRST_SEND_WR_ID for wc in self._fetched)
            buffers.grow(len(self._inbox) + arrived)
        self.dispatcher.schedule(self)

    def poll(self) -> bool:
        """Process completions; see :class:`rdmacm.endpoint.dispatcher.CompletionSource`."""
        if self.is_released or self._cq is None:
            return False
        found, self._fetched = self._fetched, []
        try:
            found += self._cq.poll(_POLL_BATCH)
        except RdmaError as error:
            self.end(str(error.strerror))
            if not found:
                return False
        if not found and self._qp is not None and self._qp.closed:
            self._lose_queue_pair()
            return False
        for wc in found:
            if wc.wr_id < _FIRST_SEND_WR_ID:
                self._received(wc)
            else:
                self._finished(wc)
        return len(found) >= _POLL_BATCH

    def _lose_queue_pair(self) -> None:
        """The application has destroyed the id or its queue pair, and nothing completes any more."""
        self.end("the id or its queue pair was destroyed")
        operations, self._operations = self._operations, {}
        for operation in operations.values():
            operation.finish(self._disconnected_error(operation.name))

    def drain(self) -> None:
        """Process all completions."""
        while self.poll():
            pass

    def _received(self, wc: WC) -> None:
        if wc.status is WCStatus.SUCCESS:
            self._last_activity = self.dispatcher.clock()
            self._inbox.append(wc)
            self._arrived.changed()
            if not self.is_established:  # data implies the RTU, which was lost
                with contextlib.suppress(RdmaError):
                    self.cmid.notify(_EVENT_COMM_EST)
        elif wc.status is WCStatus.WR_FLUSH_ERR:
            if self.cmid.state is State.DISCONNECT:  # the event comes with the next progress
                self.end("the peer has disconnected")
            else:
                self.end("the queue pair has failed: a request of the peer was not allowed")
        else:
            self.end(f"a message could not be received: {status_text(wc.status)}")

    def _finished(self, wc: WC) -> None:
        operation = self._operations.pop(wc.wr_id, None)
        if operation is None:
            return
        if wc.status is WCStatus.SUCCESS:
            self._last_activity = self.dispatcher.clock()
            if operation.wr.opcode is WROpcode.RDMA_READ:
                self._longest_read = max(self._longest_read, operation.size)
            elif operation.size > self._longest_sent:
                self._longest_sent = operation.size
            operation.finish()
        else:
            operation.is_unanswered = wc.status is WCStatus.RETRY_EXC_ERR
            reason = self.close_reason
            if wc.status is not WCStatus.WR_FLUSH_ERR:
                self.end(f"a {operation.name} failed: {status_text(wc.status)}")
            operation.finish(completion_error(wc.status, operation.name, self.cmid.peer_addr_text, reason))
        while self._backlog and len(self._operations) < self._send_depth:
            self._post(self._backlog.popleft())

    # -- messages -------------------------------------------------------------------------------------

    def receive(self) -> Routine[Message]:
        """Return the next message. While none arrives, probe the peer every ``keepalive`` seconds."""
        keepalive = self.options.keepalive
        try:
            while True:
                until = None if keepalive is None else self._last_activity + keepalive
                message: Message | None = yield Wait(self._arrived, self._take, until)
                if message is not None:
                    return message
                self.dispatcher.drive_once(self._probe)
        except Expired as expired:
            raise self._timed_out(expired, "recv", "no message arrived") from None

    def _take(self) -> Message | None:
        if not self._inbox:
            if self.close_reason is not None:
                raise self._disconnected_error("recv")
            return None
        wc = self._inbox.popleft()
        assert self._buffers is not None
        length = 0 if wc.opcode is WCOpcode.RECV_RDMA_WITH_IMM else wc.byte_len
        message = Message(self._buffers.read(wc.wr_id, length), wc.imm_data)
        if self.close_reason is None:
            # If the queue pair has failed, flushed completions will end the connection.
            with contextlib.suppress(RdmaError):
                self._buffers.post(wc.wr_id)
        return message

    def _probe(self) -> None:
        """Post an empty RDMA WRITE: its ACK proves that the peer is alive, its failure ends the connection."""
        keepalive = self.options.keepalive
        now = self.dispatcher.clock()
        if keepalive is None or self._last_activity + keepalive > now:
            return
        self._last_activity = now
        if not self._operations and self.close_reason is None:
            self._submit(_Operation("keepalive probe", SendWR(opcode=WROpcode.RDMA_WRITE)))

    # -- operations -----------------------------------------------------------------------------------

    def send(self, data: Buffer | Region, imm: int | None) -> Routine[None]:
        """Send a message. Raises ValueError for immediate data of more than 32 bits."""
        opcode = WROpcode.SEND if imm is None else WROpcode.SEND_WITH_IMM
        return self._operate("send", SendWR(opcode=opcode, imm_data=_checked_imm(imm)), data)

    def write(self, remote: RemoteRegion, data: Buffer | Region, imm: int | None) -> Routine[None]:
        """Write to the peer's memory. Raises ValueError for data longer than ``remote``, and for invalid ``imm``."""
        size = len(data if isinstance(data, Region) else byte_view(data))
        if size > remote.length:
            raise ValueError(f"{size} bytes do not fit into a remote region of {remote.length} bytes")
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        wr = SendWR(opcode=opcode, imm_data=_checked_imm(imm), remote_addr=remote.addr, rkey=remote.rkey)
        return self._operate("write", wr, data)

    def read(self, remote: RemoteRegion, into: Buffer | Region | None) -> Routine[bytes | None]:
        """Read the peer's memory; return its bytes, or None when they were written to ``into``.

        Raises ValueError when ``into`` is shorter than ``remote``.
        """
        wr = SendWR(opcode=WROpcode.RDMA_READ, remote_addr=remote.addr, rkey=remote.rkey)
        if into is None:
            own = bytearray(remote.length)
            yield from self._operate("read", wr, own, fetches=True, borrows=False)
            return bytes(own)
        size = len(into if isinstance(into, Region) else byte_view(into))
        if size < remote.length:
            raise ValueError(f"a remote region of {remote.length} bytes does not fit into a buffer of {size} bytes")
        yield from self._operate("read", wr, into, fetches=True, length=remote.length)
        return None

    def atomic(self, opcode: WROpcode, remote: RemoteRegion, compare_add: int, swap: int) -> Routine[int]:
        """Change 8 bytes of the peer's memory atomically; return their previous value.

        Raises ValueError for fewer than 8 bytes and for an address that is not divisible by 8.
        """
        if remote.length < 8 or remote.addr % 8:
            raise ValueError(f"an atomic operation needs 8 bytes at an address divisible by 8, not {remote}")
        name = "compare_swap" if opcode is WROpcode.ATOMIC_CMP_AND_SWP else "fetch_add"
        wr = SendWR(opcode=opcode, remote_addr=remote.addr, rkey=remote.rkey)
        wr.compare_add, wr.swap = compare_add & ALL_BITS_64, swap & ALL_BITS_64
        before = bytearray(8)
        yield from self._operate(name, wr, before, fetches=True, borrows=False)
        return int.from_bytes(before, sys.byteorder)

    def _operate(
        self,
        name: str,
        wr: SendWR,
        data: Buffer | Region,
        *,
        fetches: bool = False,
        borrows: bool | None = None,
        length: int | None = None,
    ) -> Routine[None]:
        """Post a work request and wait for its completion.

        ``fetches``: the device writes to ``data`` (READ, atomics). ``borrows`` overrides :attr:`_Operation.borrows`.
        ``length``: the bytes of ``data`` to use (None: all).
        """
        operation = self._prepare(name, wr, data, fetches, length)
        if borrows is not None:
            operation.borrows = borrows
        try:
            self.dispatcher.drive_once(partial(self._submit, operation))
            if operation.size <= SHORT:
                yield Wait(operation, lambda: operation.is_done)
            else:
                yield from self._completion(operation)
        except Expired as expired:
            raise self._timed_out(expired, name, "the operation did not complete") from None
        finally:
            if not operation.is_done:
                self.dispatcher.drive_once(partial(self._abandon, operation))
        if operation.error is not None:
            raise operation.error

    def _completion(self, operation: _Operation) -> Routine[None]:
        """Wait until a long operation is done. If that takes long, find out whether the peer gets long packets."""
        until = self.dispatcher.clock() + ASK_SECONDS
        yield Wait(operation, lambda: operation.is_done, until)
        if operation.is_done:
            return
        assert self._qp is not None
        is_read = operation.wr.opcode is WROpcode.RDMA_READ
        watch = PeerWatch(self._qp)

        def sizes() -> PacketSizes:
            return PacketSizes(self.cmid, self._longest_read if is_read else self._longest_sent)

        for number in count():
            self.dispatcher.drive_once(watch.ask)
            watch.warn(sizes, operation.size, operation.name, self.cmid)
            if not watch.can_ask and number % MANAGER_INTERVAL == 0 and not operation.is_done:
                yield from ask_manager(self.dispatcher, self.cmid, watch, operation)
            if operation.is_done:
                break
            yield Wait(operation, lambda: operation.is_done, self.dispatcher.clock() + ASK_SECONDS)
        known = sizes()
        if operation.is_unanswered and watch.answers and known.of(operation.size) > known.arrived:
            operation.error = known.error(operation.size, operation.name, self.cmid)

    def _prepare(self, name: str, wr: SendWR, data: Buffer | Region, fetches: bool, length: int | None) -> _Operation:
        """An operation on memory that the device may access: a region, inline data, or memory registered for it."""
        if self.close_reason is not None:
            raise self._disconnected_error(name)
        if isinstance(data, Region):
            if data.closed:
                raise cm_error(errno.EINVAL, "the region is closed", name, self.cmid.peer_addr_text)
            if data.mr.pd is not self.cmid.pd:
                text = "the region is of a connection with another protection domain"
                hint = "registering the memory on this connection, or one protection domain for both (pd=)"
                raise cm_error(errno.EINVAL, text, name, self.cmid.peer_addr_text, hint)
            size = len(data) if length is None else length
            wr.sg = [data.mr.sge(0, size)] if size else []
            return _Operation(name, wr, size, borrows=True)
        view = byte_view(data)
        if length is not None:
            view = view[:length]
        if not view.nbytes:
            wr.sg = []
            return _Operation(name, wr)
        if not fetches and view.nbytes <= self._max_inline:
            wr.sg, wr.send_flags = [view], SendFlag.SIGNALED | SendFlag.INLINE
            return _Operation(name, wr, view.nbytes)
        if not fetches and view.readonly and not isinstance(view.obj, bytes):
            view = memoryview(bytes(view))  # the owner of the memory below a read-only view may change it
        mr = MR(self.cmid.pd, view, AccessFlag.LOCAL_WRITE if fetches else AccessFlag(0))
        wr.sg = [mr.sge(0, view.nbytes)]
        return _Operation(name, wr, view.nbytes, mr, borrows=not view.readonly)

    def _submit(self, operation: _Operation) -> None:
        if self.close_reason is not None:
            operation.finish(self._disconnected_error(operation.name))
        elif self._backlog or len(self._operations) >= self._send_depth:
            self._backlog.append(operation)
        else:
            self._post(operation)

    def _post(self, operation: _Operation) -> None:
        """Post an operation, which is done at once if it cannot be posted."""
        assert self._qp is not None
        number = operation.wr.wr_id = next(self._send_wr_ids)
        self._operations[number] = operation
        try:
            self._qp.post_send(operation.wr)
        except RdmaError as error:
            del self._operations[number]
            operation.finish(error)

    def _abandon(self, operation: _Operation) -> None:
        """Handle an operation whose caller has stopped waiting, after a timeout or a cancellation."""
        if operation in self._backlog:
            self._backlog.remove(operation)
            operation.finish()
        elif operation.borrows and not operation.is_done:
            # The caller may reuse the memory as soon as this returns.
            self.end(f"a {operation.name} was abandoned before it completed")
            self.drain()

    def _timed_out(self, expired: Expired, step: str, what: str) -> RdmaError:
        text = f"{what} within {expired.timeout} s"
        return CmTimeoutError(errno.ETIMEDOUT, text, step, self.cmid.peer_addr_text)

    # -- memory and explanation -----------------------------------------------------------------------

    def register(self, buffer: Buffer, access: AccessFlag) -> Region:
        """Register memory for remote access, until the region or the connection is closed."""
        if self.close_reason is not None:
            raise self._disconnected_error("register")
        if not byte_view(buffer).readonly or access & (AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC):
            access |= AccessFlag.LOCAL_WRITE
        region = Region(MR(self.cmid.pd, buffer, access), buffer, self._regions.discard)
        self._regions.add(region)
        return region

    def explain(self) -> Explanation:
        """Explain how the connection was set up."""
        return replace(self.cmid.explain(), steps=self.steps)


def _checked_imm(value: int | None) -> int:
    if value is None:
        return 0
    if not 0 <= value < 1 << 32:
        raise ValueError(f"immediate data has 32 bits; {value} does not fit")
    return value
