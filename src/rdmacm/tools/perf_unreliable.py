"""``rdmacm perf`` over UC and UD: every message has a number, and what does not arrive is counted.

The immediate data of a message has its kind in the upper two bits, and a number in the others:

- DATA: the message with this number; the numbers count from 0.
- REPORT: this message, and those before it, have arrived or are lost. Sent for the last message of each batch; with
  latency for each message, and as long as that.
- END: the client tells what it has measured and asks how many messages have arrived; the server answers with the
  number, and what it has used of the processor.
- DONE: the client has that answer. The server of datagrams learns of the end by this, or by silence.

An end has ``depth`` messages under way that no REPORT has named. If none comes for a while, they are lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from enum import IntEnum

from rdmacm.cmid import CmId
from rdmacm.errors import CmDisconnectedError
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.tools.connection import ToolConnection, completion_failure
from rdmacm.tools.measure import Intervals, ProcessorUse, ProgressLine, Samples, size_text
from rdmacm.tools.perf_plan import (
    ACCESS,
    SUMMARY_SIZE,
    Op,
    Plan,
    Result,
    answer_of,
    pack_answer,
    pack_use,
    result_of,
    use_of,
)
from rdmacm.tools.waiting import PeerWait
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import WC, QPType, SendFlag, WCOpcode, WCStatus, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR


class _Kind(IntEnum):
    DATA = 0
    REPORT = 1
    END = 2
    DONE = 3


_NUMBER_BITS = 30
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
#: Seconds without a REPORT after which what is under way counts as lost, and the time for an answer to a DATA or END.
_LOST_AFTER = 0.1
#: Seconds of silence after which a server takes the next client.
_IDLE = 5.0
#: How often DONE is sent.
_DONES = 3
#: Seconds of polling without a completion after which an end sleeps.
_SPIN_SECONDS = 1.0
#: Work requests of either queue beside those of DATA: REPORTs and ENDs.
_OTHERS = 64


def open_connection(cmid: CmId, plan: Plan) -> ToolConnection:
    """The connection of either end."""
    depth = 2 * plan.depth + _OTHERS
    return ToolConnection(cmid, QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1))


def fault_of(cmid: CmId, plan: Plan) -> str:
    """Why the device that an id is bound to cannot do it; an empty text if it can."""
    context = cmid.verbs
    mtu = context.query_port(cmid.port_num).active_mtu
    if plan.qp_type is QPType.UD and mtu is not None and plan.size > mtu.bytes:
        return f"a datagram has at most {mtu.bytes} bytes here, not {plan.size}"
    return ""


class _Stream:
    """One end: what it has sent and received."""

    def __init__(self, connection: ToolConnection, plan: Plan) -> None:
        self._connection = connection
        self._qp, self._cq = connection.qp, connection.cq
        self.plan = plan
        self._begin = GRH_LENGTH if plan.qp_type is QPType.UD else 0
        self._inbox = connection.register(bytearray(self._begin + max(plan.size, SUMMARY_SIZE)))
        self._outbox = connection.register(bytearray(plan.size), ACCESS)
        self._figures = connection.register(bytearray(SUMMARY_SIZE))
        self._receive = RecvWR(0, [self._inbox.sge()])
        self._qp.post_recv([self._receive] * (2 * plan.depth + _OTHERS))
        #: The peer's buffer.
        self.rkey = self.address = 0
        #: UD: the destination.
        self._ah: AH | None = None
        self._remote_qpn = self._remote_qkey = 0
        #: The number of the next message, and the first one of which nothing is known.
        self.next = self.confirmed = 0
        #: When a message was sent or confirmed, and when one arrived.
        self.moved = self.heard = time.perf_counter()
        #: Messages that have arrived.
        self.arrived = 0
        #: Whether an END has come, and its number: how many messages the server has got; and what it has told.
        self.has_ended = False
        self.told = b""
        self.peer_has: int | None = None
        #: Whether the client has the answer.
        self.is_done = False

    @property
    def buffer(self) -> tuple[int, int]:
        """R_Key and address of this end's buffer."""
        return self._outbox.rkey, self._outbox.addr

    def close(self) -> None:
        """Release the destination."""
        if self._ah is not None:
            self._ah.close()
            self._ah = None

    # -- sending --------------------------------------------------------------------------------------

    def send_to(self, param: UdParam) -> None:
        """UD: send to the queue pair of an answer from now on."""
        self._ah = AH(self._connection.cmid.pd, param.ah_attr)
        self._remote_qpn, self._remote_qkey = param.qp_num, param.qkey

    def _answer_to(self, wc: WC) -> None:
        """UD: send to the sender of a message from now on."""
        cmid = self._connection.cmid
        self._ah = AH(cmid.pd, wc=wc, grh=self._inbox.buf, port_num=cmid.port_num)
        self._remote_qpn, self._remote_qkey = wc.src_qp, self._qp.query()[0].qkey

    @property
    def can_send(self) -> bool:
        """Whether it knows where to send."""
        return self.plan.qp_type is not QPType.UD or self._ah is not None

    def _request(self, kind: _Kind, number: int, sg: list[SGE], signaled: bool = True) -> SendWR:
        is_write = kind is _Kind.DATA and self.plan.op is Op.WRITE
        opcode = WROpcode.RDMA_WRITE_WITH_IMM if is_write else WROpcode.SEND_WITH_IMM
        wr = SendWR(0, opcode, sg, SendFlag.SIGNALED if signaled else 0)
        wr.imm_data = kind << _NUMBER_BITS | number & _NUMBER_MASK
        if is_write:
            wr.set_wr_rdma(self.rkey, self.address)
        if self._ah is not None:
            wr.set_wr_ud(self._ah, self._remote_qpn, self._remote_qkey)
        return wr

    def send(self, kind: _Kind, number: int = 0, size: int = 0) -> None:
        """Send one message."""
        self._qp.post_send(self._request(kind, number, [self._outbox.sge(0, size)] if size else []))

    def send_end(self, figures: bytes, number: int = 0) -> None:
        """Send an END with the figures of this end."""
        self._figures.buf[: len(figures)] = figures
        self._qp.post_send(self._request(_Kind.END, number, [self._figures.sge(0, len(figures))]))

    def fill(self, now: float, most: int = 0) -> None:
        """Send batches as long as fewer than ``depth`` messages are under way; ``most``: in all, 0 for no limit."""
        plan = self.plan
        if self.next != self.confirmed and now - self.moved > _LOST_AFTER:
            self.confirmed = self.next
        while self.next - self.confirmed + plan.batch <= plan.depth and not 0 < most <= self.next:
            last = self.next + plan.batch - 1
            numbers = range(self.next, last + 1)
            sg = [self._outbox.sge(0, plan.size)]
            self._qp.post_send([self._request(_Kind.DATA, n, sg, n == last) for n in numbers])
            self.next += plan.batch
            self.moved = now

    # -- receiving ------------------------------------------------------------------------------------

    def progress(self, seconds: float) -> None:
        """Process what has completed; wait for it up to so many seconds."""
        poll, clock = self._cq.poll, time.perf_counter
        found = poll(64)
        now = clock()
        if not found and (self.plan.blocking or now - max(self.heard, self.moved) > _SPIN_SECONDS):
            self._cq.wait(max(seconds, 0.0))
            found = poll(64)
        limit = now + seconds
        while not found and clock() < limit and not self.plan.blocking:
            found = poll(64)
        received = 0
        for wc in found:
            if wc.status is not WCStatus.SUCCESS:
                raise completion_failure(wc, self._connection.peer)
            if wc.opcode & WCOpcode.RECV:
                received += 1
                self._take(wc)
        if received:
            self._qp.post_recv([self._receive] * received)

    def _take(self, wc: WC) -> None:
        if wc.imm_data is None:
            return
        self.heard = time.perf_counter()
        if not self.can_send:
            self._answer_to(wc)
        kind, number = wc.imm_data >> _NUMBER_BITS, wc.imm_data & _NUMBER_MASK
        if kind == _Kind.DATA:
            self.arrived += 1
            if self.plan.latency:
                self.send(_Kind.REPORT, number, self.plan.size)
            elif (number + 1) % self.plan.batch == 0:
                self.send(_Kind.REPORT, number)
        elif kind == _Kind.REPORT:
            step = number + 1 - self.confirmed & _NUMBER_MASK
            if step <= self.next - self.confirmed:
                self.confirmed += step
                self.moved = self.heard
        elif kind == _Kind.END:
            self.peer_has, self.has_ended = number, True
            self.told = bytes(self._inbox.buf[self._begin : self._begin + SUMMARY_SIZE])
        else:
            self.is_done = True


# -- the server ----------------------------------------------------------------------------------------------


def serve(connection: ToolConnection, plan: Plan, buffer: tuple[int, int]) -> Result | None:
    """Serve one measurement; return what the client has told. ``buffer``: R_Key and address of the client's buffer."""
    result = None
    with closing(_Stream(connection, plan)) as stream:
        stream.rkey, stream.address = buffer
        connection.accept(ConnParam(pack_answer(*stream.buffer)))
        use = ProcessorUse()
        with suppress(CmDisconnectedError):
            while not stream.is_done and time.perf_counter() - stream.heard < _IDLE:
                stream.progress(0.05)
                if stream.has_ended:
                    if stream.peer_has is not None:  # an END that is not answered yet
                        stream.peer_has = None
                        share = use.share()
                        result = result_of(stream.told, plan, share)
                        stream.send_end(pack_use(share), stream.arrived)
                elif plan.bidirectional and stream.arrived:
                    stream.fill(time.perf_counter())
    if result is not None and not plan.latency:  # the client cannot know yet how many were lost
        result = replace(result, lost=max(0, result.count - stream.arrived))
    return result


# -- the client ----------------------------------------------------------------------------------------------


def measure(
    connection: ToolConnection, plan: Plan, waits: PeerWait, progress: ProgressLine, show: Callable[[str], None]
) -> Result:
    """Connect and measure; ``show`` writes the lines of ``--interval``."""
    with closing(_Stream(connection, plan)) as stream:
        data = connection.connect(ConnParam(plan.pack(*stream.buffer)), waits)
        stream.rkey, stream.address = answer_of(data, connection.peer)
        if isinstance(connection.answer, UdParam):
            stream.send_to(connection.answer)
        intervals = Intervals(plan.interval, plan.size, show)
        waits.progress = lambda: (
            f"{stream.next} messages sent, the last report came {time.perf_counter() - stream.heard:.1f} s ago"
        )
        measuring, use = (_latency if plan.latency else _bandwidth), ProcessorUse()
        result = replace(measuring(stream, waits, progress, intervals), client_use=use.share())
        lost = _lost(stream, waits, result.pack())
        return replace(result, lost=result.lost if plan.latency else lost, server_use=use_of(stream.told))


def _bandwidth(stream: _Stream, waits: PeerWait, progress: ProgressLine, intervals: Intervals) -> Result:
    plan, clock = stream.plan, time.perf_counter
    began = now = clock()
    intervals.begin(began)
    limit = began + plan.seconds if plan.seconds else float("inf")
    is_interrupted = False
    try:
        while now < limit and not 0 < plan.count <= stream.next:
            stream.fill(now, plan.count)
            stream.progress(0.02)
            now = clock()
            if now - stream.heard > waits.seconds:
                _lost(stream, waits)  # whether the server is still there
                break
            done = stream.confirmed + stream.arrived
            if intervals.is_due(now):
                intervals.report(now, done)
            if progress.is_due(now):
                rate = done * plan.size / (now - began)
                progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {rate / 1e6:.0f} MB/s")
    except KeyboardInterrupt:
        if not stream.next:
            raise
        is_interrupted = True
    while stream.confirmed != stream.next and now - stream.moved < _LOST_AFTER:
        stream.progress(0.02)
        now = clock()
    seconds = max(max(stream.moved, stream.heard) - began, 1e-6)
    received = stream.arrived if plan.bidirectional else 0
    return Result(plan, stream.next, seconds, {}, 0, received, intervals.reports, is_interrupted=is_interrupted)


def _lost(stream: _Stream, waits: PeerWait, figures: bytes = b"") -> int:
    """Tell the server what was measured and ask how many messages have arrived; return how many have not."""

    def ask(seconds: float) -> bool:
        stream.send_end(figures)
        stream.moved = time.perf_counter()
        limit = stream.moved + min(seconds, _LOST_AFTER)
        while not stream.has_ended and time.perf_counter() < limit:
            stream.progress(0.02)
        return stream.has_ended

    waits.until(ask)
    for _ in range(_DONES):
        stream.send(_Kind.DONE)
    assert stream.peer_has is not None
    # The network may have repeated a message.
    return max(0, (stream.next - stream.peer_has + (1 << 29) & _NUMBER_MASK) - (1 << 29))


def _latency(stream: _Stream, waits: PeerWait, progress: ProgressLine, intervals: Intervals) -> Result:
    plan, clock, times = stream.plan, time.perf_counter, Samples()

    def turn(_seconds: float = 0.0) -> bool:
        """Send a message; return whether its answer has come."""
        number = stream.next
        stream.moved = clock()
        stream.send(_Kind.DATA, number, plan.size)
        stream.next += 1
        limit = stream.moved + _LOST_AFTER
        while stream.confirmed <= number:
            stream.progress(limit - clock())
            if stream.confirmed <= number and clock() >= limit:
                stream.confirmed = stream.next
                return False
        return True

    for _ in range(10):  # warm up
        waits.until(turn)
    sent = lost = 0
    began = now = clock()
    intervals.begin(began)
    limit = began + plan.seconds if plan.seconds else float("inf")
    is_interrupted = False
    try:
        while now < limit and not 0 < plan.count <= sent:
            is_answered = turn()
            sent += 1
            before, now = now, clock()
            if is_answered:
                times.add(now - before)
            else:
                lost += 1
                waits.until(turn)  # whether the server is still there
                now = clock()
            if intervals.is_due(now):
                intervals.report(now, times.count)
            if progress.is_due(now):
                progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {times.count} in {now - began:.0f} s")
    except KeyboardInterrupt:
        if not times.count:
            raise
        is_interrupted = True
    statistics = times.microseconds(0.5)
    return Result(plan, sent, now - began, statistics, lost, 0, intervals.reports, is_interrupted=is_interrupted)
