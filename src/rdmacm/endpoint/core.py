"""A connection without its waiting: queue pair, receive buffers, operations under way, messages that have come."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from mmap import ACCESS_COPY, mmap
from typing import NamedTuple

from rdmacm.cmid import CmEvent, CmId
from rdmacm.connparam import MAXIMUM, ConnParam
from rdmacm.constants import CmEventType
from rdmacm.endpoint.failures import completion_error, words
from rdmacm.endpoint.hub import Expired, Hub, Steps, Wait, Watched
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.errors import CmDisconnectedError, CmTimeoutError, RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import WC, AccessFlag, QPType, SendFlag, WCOpcode, WCStatus, WROpcode
from rdmacm.verbs.pd import MR
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.wr import Buffer, RecvWR, SendWR

__all__ = ["Core", "Message", "Shape"]

#: Send work requests numbers begin here; below are the receive buffers'.
_FIRST_SEND = 1 << 32
#: Completions taken in at a time.
_BATCH = 32
#: Up to so many bytes are copied rather than registered.
_INLINE = 256
_EVENT_COMM_EST = 4
#: Operations that are under way at a time at least; more wait in line.
_SENDS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What a connection is made of, see :func:`rdmacm.connect`."""

    depth: int = 16
    max_message: int = 65536
    private_data: bytes = b""
    responder_resources: int = MAXIMUM
    initiator_depth: int = MAXIMUM
    keepalive: float | None = 15.0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.max_message < 1:
            raise ValueError("depth and max_message are 1 at least")
        if self.keepalive is not None and self.keepalive <= 0:
            raise ValueError("keepalive is in seconds, or None")

    def param(self) -> ConnParam:
        """What connect and accept are given."""
        return ConnParam(self.private_data, self.responder_resources, self.initiator_depth)


class Message(NamedTuple):
    """A message: its bytes, and the immediate number that came along, or None."""

    data: bytes
    imm: int | None


class _Operation(Watched):
    """Something posted to the send queue, or in line for it."""

    __slots__ = ("borrows", "error", "is_done", "mr", "name", "wr")

    def __init__(self, name: str, wr: SendWR, mr: MR | None, borrows: bool) -> None:
        super().__init__()
        self.name = name
        self.wr = wr
        #: Registered for this alone.
        self.mr = mr
        #: Whether the device uses memory that the caller may change.
        self.borrows = borrows
        self.is_done = False
        self.error: RdmaError | None = None

    def finish(self, error: RdmaError | None = None) -> None:
        self.is_done = True
        self.error = error
        self.let_go()
        self.changed()

    def let_go(self) -> None:
        mr, self.mr = self.mr, None
        if mr is not None:
            mr.close()


class Core:
    """One connection, from its queue pair on. Its methods want the provider's lock unless they are steps."""

    def __init__(self, hub: Hub, cmid: CmId, shape: Shape) -> None:
        self.hub = hub
        self.cmid = cmid
        self.shape = shape
        self.private_data = b""
        self.is_established = False
        #: Told when the connection is established, or has ended before that.
        self.life = Watched()
        #: Why it has ended.
        self.over: str | None = None
        self.is_released = False
        self.is_marked = False
        self.steps: tuple[Step, ...] = ()
        self._opened = 0.0
        self._inbox: deque[WC] = deque()
        self._arrived = Watched()
        self._operations: dict[int, _Operation] = {}
        self._line: deque[_Operation] = deque()
        self._numbers = count(_FIRST_SEND)
        self._regions: set[Region] = set()
        self._heard = hub.clock()
        self._cq: CQ | None = None
        self._qp: QP | None = None
        self._mr: MR | None = None
        self._ring = memoryview(b"")
        self._room = max(shape.depth, _SENDS)
        hub.retain()

    # -- the beginning and the end --------------------------------------------------------------------

    def open(self) -> None:
        """Make the queue pair and post the receive buffers."""
        started = time.perf_counter()
        shape, cmid = self.shape, self.cmid
        context = cmid.verbs
        assert context is not None
        self._cq = CQ(context, self._room + shape.depth)
        self._cq.backend.notify = partial(self.hub.mark, self)
        cap = QPCap(self._room, shape.depth, 1, 1, _INLINE)
        self._qp = cmid.create_qp(QPInitAttr(QPType.RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=True))
        # Pages that nobody has written to take no memory: a stranger's half-made connections cost little.
        self._ring = memoryview(mmap(-1, shape.depth * shape.max_message, access=ACCESS_COPY))
        self._mr = MR(cmid.pd, self._ring, AccessFlag.LOCAL_WRITE)
        for slot in range(shape.depth):
            self._post_receive(slot)
        self._opened = time.perf_counter()
        self.steps = (*cmid.steps, Step("qp", (self._opened - started) * 1e6))

    def established(self, step: str) -> None:
        """The connection is there; ``step`` is what has taken the time since the queue pair was."""
        if not self.is_established:
            self.is_established = True
            self.steps = (*self.steps, Step(step, (time.perf_counter() - self._opened) * 1e6))
            self.life.changed()

    def _post_receive(self, slot: int) -> None:
        assert self._qp is not None
        assert self._mr is not None
        size = self.shape.max_message
        self._qp.post_recv(RecvWR(slot, [self._mr.sge(slot * size, size)]))

    def handle(self, event: CmEvent) -> None:
        """An event of the id, once this object is its context."""
        match event.type:
            case CmEventType.ESTABLISHED:
                self.established("accept")
            case CmEventType.DISCONNECTED:
                # The peer has had our RTU or has sent data before it: it counts as connected, and was.
                self.established("accept")
                self.drain()
                self.end("the peer has disconnected" if not event.status else event.message)
            case CmEventType.REJECTED | CmEventType.UNREACHABLE | CmEventType.CONNECT_ERROR:
                self.end(f"the peer did not complete the connection: {event.message}")
            case CmEventType.DEVICE_REMOVAL:
                self.end("the device was removed")

    def end(self, why: str) -> None:
        """The connection is over: nothing touches memory any more, and the peer is told."""
        if self.over is not None:
            return
        self.over = why
        with contextlib.suppress(RdmaError):  # it never was connected
            self.cmid.disconnect()
        line, self._line = self._line, deque()
        for operation in line:
            operation.finish(self._ended(operation.name))
        self._arrived.changed()
        self.life.changed()

    def release(self) -> None:
        """Destroy everything. What has arrived can be read no more. Not under the lock, if that can be helped."""
        if self.hub.locked(self._begin_release):
            self.cmid.context = None
            self.cmid.destroy()
            if self._cq is not None:
                self._cq.close()
            if self._mr is not None:
                self._mr.close()
            for region in list(self._regions):
                region.close()
            self._ring = memoryview(b"")
            self.hub.release()

    def _begin_release(self) -> bool:
        if self.is_released:
            return False
        self.end("it was closed here")
        self.drain()
        self.is_released = True
        self._inbox.clear()
        return True

    def disconnect(self) -> None:
        """Say goodbye; messages that have come can still be read."""
        self.hub.locked(self.drain)
        self.hub.locked(lambda: self.end("it was disconnected here"))

    def _ended(self, step: str) -> RdmaError:
        return CmDisconnectedError(errno.ECONNRESET, self.over or "it has ended", step, self.cmid.peer_addr_text)

    # -- completions ----------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Take in completions; see :class:`rdmacm.endpoint.hub.Source`."""
        if self.is_released or self._cq is None:
            return False
        try:
            found = self._cq.poll(_BATCH)
        except RdmaError as error:
            self.end(str(error))
            return False
        for wc in found:
            if wc.wr_id < _FIRST_SEND:
                self._received(wc)
            else:
                self._finished(wc)
        return len(found) == _BATCH

    def drain(self) -> None:
        """Take in all completions."""
        while self.poll():
            pass

    def _received(self, wc: WC) -> None:
        if wc.status is WCStatus.SUCCESS:
            self._heard = self.hub.clock()
            self._inbox.append(wc)
            self._arrived.changed()
            if not self.is_established:  # the confirmation was lost, and this is as good
                with contextlib.suppress(RdmaError):
                    self.cmid.notify(_EVENT_COMM_EST)
        elif wc.status is WCStatus.WR_FLUSH_ERR:
            self.end("the queue pair has failed: a request of the peer was not allowed")
        else:
            self.end(f"a message could not be received: {words(wc.status)}")

    def _finished(self, wc: WC) -> None:
        operation = self._operations.pop(wc.wr_id, None)
        if operation is None:
            return
        if wc.status is WCStatus.SUCCESS:
            self._heard = self.hub.clock()
            operation.finish()
        else:
            over = self.over
            if wc.status is not WCStatus.WR_FLUSH_ERR:
                self.end(f"a {operation.name} failed: {words(wc.status)}")
            operation.finish(completion_error(wc.status, operation.name, self.cmid.peer_addr_text, over))
        while self._line and len(self._operations) < self._room:
            operation = self._line.popleft()
            try:
                self._post(operation)
            except RdmaError as error:
                operation.finish(error)

    # -- messages -------------------------------------------------------------------------------------

    def receive(self) -> Steps[Message]:
        """The next message. While none comes, the peer is asked for a sign of life now and then."""
        keepalive = self.shape.keepalive
        try:
            while True:
                until = None if keepalive is None else self._heard + keepalive
                message: Message | None = yield Wait(self._arrived, self._take, until)
                if message is not None:
                    return message
                self.hub.locked(self._probe)
        except Expired as expired:
            raise self._too_late(expired, "recv", "no message came") from None

    def _take(self) -> Message | None:
        if not self._inbox:
            if self.over is not None:
                raise self._ended("recv")
            return None
        wc = self._inbox.popleft()
        start = wc.wr_id * self.shape.max_message
        length = 0 if wc.opcode is WCOpcode.RECV_RDMA_WITH_IMM else wc.byte_len
        message = Message(bytes(self._ring[start : start + length]), wc.imm_data)
        if self.over is None:
            with contextlib.suppress(RdmaError):  # the queue pair has failed, and completions are about to say so
                self._post_receive(wc.wr_id)
        return message

    def _probe(self) -> None:
        """A write of nothing: its acknowledgement says that the peer is there, its failure ends the connection."""
        keepalive = self.shape.keepalive
        now = self.hub.clock()
        if keepalive is None or self._heard + keepalive > now:
            return
        self._heard = now
        if not self._operations and self.over is None:
            self._submit(_Operation("sign of life", SendWR(opcode=WROpcode.RDMA_WRITE), None, False))

    # -- operations -----------------------------------------------------------------------------------

    def send(self, data: Buffer | Region, imm: int | None) -> Steps[None]:
        """Send a message."""
        opcode = WROpcode.SEND if imm is None else WROpcode.SEND_WITH_IMM
        return self._operate("send", SendWR(opcode=opcode, imm_data=_number(imm, 32)), data, False)

    def write(self, remote: RemoteRegion, data: Buffer | Region, imm: int | None) -> Steps[None]:
        """Write to the peer's memory."""
        size = len(data) if isinstance(data, Region) else memoryview(data).nbytes
        if size > remote.length:
            raise ValueError(f"{size} bytes do not fit into a remote region of {remote.length}")
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        wr = SendWR(opcode=opcode, imm_data=_number(imm, 32), remote_addr=remote.addr, rkey=remote.rkey)
        return self._operate("write", wr, data, False)

    def read(self, remote: RemoteRegion, into: Buffer | Region | None) -> Steps[bytes | None]:
        """Read the peer's memory."""
        wr = SendWR(opcode=WROpcode.RDMA_READ, remote_addr=remote.addr, rkey=remote.rkey)
        if into is None:
            own = bytearray(remote.length)
            yield from self._operate("read", wr, own, True, borrows=False)
            return bytes(own)
        size = len(into) if isinstance(into, Region) else memoryview(into).nbytes
        if size < remote.length:
            raise ValueError(f"a remote region of {remote.length} bytes does not fit into {size}")
        yield from self._operate("read", wr, into, True, length=remote.length)
        return None

    def atomic(self, opcode: WROpcode, remote: RemoteRegion, compare_add: int, swap: int) -> Steps[int]:
        """Change 8 bytes of the peer's memory; what they were."""
        if remote.length < 8 or remote.addr % 8:
            raise ValueError(f"an atomic operation needs 8 bytes at an address divisible by 8, not {remote}")
        name = "compare_swap" if opcode is WROpcode.ATOMIC_CMP_AND_SWP else "fetch_add"
        wr = SendWR(opcode=opcode, remote_addr=remote.addr, rkey=remote.rkey)
        wr.compare_add, wr.swap = compare_add & _MASK, swap & _MASK
        before = bytearray(8)
        yield from self._operate(name, wr, before, True, borrows=False)
        return int.from_bytes(before, _NATIVE)

    def _operate(
        self,
        name: str,
        wr: SendWR,
        data: Buffer | Region,
        fetches: bool,
        *,
        borrows: bool | None = None,
        length: int | None = None,
    ) -> Steps[None]:
        """Post a work request and wait until it has completed."""
        operation = self._prepare(name, wr, data, fetches, length)
        if borrows is not None:
            operation.borrows = borrows
        try:
            self.hub.locked(partial(self._submit, operation))
            yield Wait(operation, lambda: operation.is_done)
        except Expired as expired:
            raise self._too_late(expired, name, "it was not done") from None
        finally:
            if not operation.is_done:
                self.hub.locked(partial(self._abandon, operation))
        if operation.error is not None:
            raise operation.error

    def _prepare(self, name: str, wr: SendWR, data: Buffer | Region, fetches: bool, length: int | None) -> _Operation:
        if self.over is not None:
            raise self._ended(name)
        if isinstance(data, Region):
            if data.closed:
                raise cm_error(errno.EINVAL, "the region is closed", name, self.cmid.peer_addr_text)
            size = len(data) if length is None else length
            wr.sg = [data.mr.sge(0, size)] if size else []
            return _Operation(name, wr, None, True)
        view = memoryview(data).cast("B")
        if length is not None:
            view = view[:length]
        if not view.nbytes:
            wr.sg = []
            return _Operation(name, wr, None, False)
        if not fetches and view.nbytes <= _INLINE:
            wr.sg, wr.send_flags = [view], SendFlag.SIGNALED | SendFlag.INLINE
            return _Operation(name, wr, None, False)
        if not fetches and view.readonly and not isinstance(view.obj, bytes):
            view = memoryview(bytes(view))  # read-only for us, which does not say that nobody changes it
        mr = MR(self.cmid.pd, view, AccessFlag.LOCAL_WRITE if fetches else AccessFlag(0))
        wr.sg = [mr.sge(0, view.nbytes)]
        return _Operation(name, wr, mr, not view.readonly)

    def _submit(self, operation: _Operation) -> None:
        if self.over is not None:
            operation.finish(self._ended(operation.name))
        elif self._line or len(self._operations) >= self._room:
            self._line.append(operation)
        else:
            try:
                self._post(operation)
            except RdmaError as error:
                operation.finish(error)

    def _post(self, operation: _Operation) -> None:
        assert self._qp is not None
        number = operation.wr.wr_id = next(self._numbers)
        self._operations[number] = operation
        try:
            self._qp.post_send(operation.wr)
        except RdmaError:
            del self._operations[number]
            raise

    def _abandon(self, operation: _Operation) -> None:
        """Nobody waits for it any more."""
        if operation in self._line:
            self._line.remove(operation)
            operation.finish()
        elif operation.borrows and not operation.is_done:
            # The caller may use the memory for something else as soon as we return.
            self.end(f"a {operation.name} was given up while it was under way")
            self.drain()

    def _too_late(self, expired: Expired, step: str, what: str) -> RdmaError:
        text = f"{what} within {expired.timeout} s"
        return CmTimeoutError(errno.ETIMEDOUT, text, step, self.cmid.peer_addr_text)

    # -- memory and knowledge -------------------------------------------------------------------------

    def register(self, buffer: Buffer, access: AccessFlag) -> Region:
        """Register memory for the peer."""
        if self.over is not None:
            raise self._ended("register")
        if not memoryview(buffer).readonly or access & (AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC):
            access |= AccessFlag.LOCAL_WRITE
        region = Region(MR(self.cmid.pd, buffer, access), buffer, self._regions.discard)
        self._regions.add(region)
        return region

    def explain(self) -> Explanation:
        """How the connection came about."""
        return replace(self.cmid.explain(), steps=self.steps)


_MASK = (1 << 64) - 1
_NATIVE = sys.byteorder


def _number(value: int | None, bits: int) -> int:
    if value is None:
        return 0
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{value} is not a number of {bits} bits")
    return value
