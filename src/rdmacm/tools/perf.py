"""``rdmacm perf``: measure latency and bandwidth of a connection.

Each measurement has a connection of its own. The private data of the client's request describes the measurement, in 16
bytes in network byte order: ``rPf1``, operation, flags (1 latency, 2 blocking), two reserved bytes, size, depth. The
private data of the answer describes the server's buffer: ``rPf1``, rkey, address.
"""

from __future__ import annotations

import argparse
import errno
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from rdmacm.cmid import CmId
from rdmacm.connparam import ConnParam
from rdmacm.errors import CmDisconnectedError, CmRejectedError, cm_error, printable
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.tools.arguments import (
    add_address,
    add_port,
    add_provider,
    add_roles,
    add_wait_limit,
    integer_between,
    seconds_between,
)
from rdmacm.tools.connection import ToolConnection, completion_failure, find_server
from rdmacm.tools.measure import ProgressLine, Samples, size_text
from rdmacm.tools.output import COLOR_VARIABLE, PROVIDER_VARIABLE, Page, Parser, table, write, write_json
from rdmacm.tools.serving import ServerProcess, listening, serve_in_turn
from rdmacm.tools.waiting import PeerWait
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import WC, AccessFlag, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR

PAGE = Page(
    command="perf",
    summary="measure latency and bandwidth",
    description="""
        Measures one operation between a client and a server: --op send, write (RDMA WRITE) or read (RDMA READ).
        Bandwidth is measured with --depth work requests outstanding; both ends sleep until work completes. With
        --latency one operation is outstanding: the latency of send is half the time until the server's answer
        arrives, that of write and read the time until the operation completes. Both ends poll their completion
        queues, which occupies a CPU each, or sleep with --blocking.

        Without -s and -c the server is a second process on this machine. Then, unless an operation is given, a table
        is measured: the latency of 64 byte messages, polling and blocking, and the bandwidth of write and read with
        4 KiB, 64 KiB and 1 MiB.

        On a terminal a line shows the progress once a second. With --json, writes a list of objects: op, size, depth,
        mode (polling or blocking), kind (latency or bandwidth), count, bytes, seconds, latency_us (min, mean, p50,
        p99 and max, or null), bytes_per_second and messages_per_second.
    """,
    examples=(
        ("rdmacm perf", "Measure the table on this machine."),
        ("rdmacm perf -s", "Serve clients until Ctrl-C."),
        ("rdmacm perf -c storage-7 --op write --size 1048576", "Measure the bandwidth of writes to another host."),
        ("rdmacm perf --op send --latency --blocking --count 10000", "Measure the latency of blocking processes."),
    ),
    see_also="ib_send_bw(1), ib_send_lat(1), rdmacm rping, rdmacm cmtime",
    environment=(PROVIDER_VARIABLE, COLOR_VARIABLE),
)


class Op(IntEnum):
    """The operation that is measured."""

    SEND = 0
    WRITE = 1
    READ = 2


class _Flag(IntFlag):
    LATENCY = 1
    BLOCKING = 2


#: The private data of the request and of the answer, as the module describes.
_REQUEST = struct.Struct(">4sBBHII")
_ANSWER = struct.Struct(">4sIQ")
_MAGIC = b"rPf1"
#: Limits of the size in bytes and of the depth in work requests.
_MAX_SIZE, _MAX_DEPTH = 16 << 20, 1024
_OPCODES = {Op.SEND: WROpcode.SEND, Op.WRITE: WROpcode.RDMA_WRITE, Op.READ: WROpcode.RDMA_READ}
_ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE
#: The outstanding work requests are posted in this many batches, each with one signaled request.
_BATCHES = 4
#: Seconds of polling without a completion after which an end sleeps: the peer may have gone.
_SPIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A measurement. Either ``seconds`` or ``count`` is not 0 and ends it."""

    op: Op
    #: Bytes of each operation.
    size: int
    #: Work requests outstanding.
    depth: int
    #: Whether latency is measured, not bandwidth.
    latency: bool
    #: Whether both ends sleep, not poll.
    blocking: bool
    seconds: float = 0.0
    #: Number of operations.
    count: int = 0

    @property
    def flags(self) -> _Flag:
        """The flags of the request."""
        return (_Flag.LATENCY if self.latency else _Flag(0)) | (_Flag.BLOCKING if self.blocking else _Flag(0))

    @property
    def mode(self) -> str:
        """``polling`` or ``blocking``."""
        return "blocking" if self.blocking else "polling"

    def pack(self) -> bytes:
        """Return the private data of the request."""
        return _REQUEST.pack(_MAGIC, self.op, self.flags, 0, self.size, self.depth)

    @classmethod
    def unpack(cls, data: bytes) -> Plan | None:
        """Parse the private data of a request; return None for one that the server does not support."""
        if len(data) < _REQUEST.size:
            return None
        magic, op, flags, _, size, depth = _REQUEST.unpack_from(data)
        if (
            magic != _MAGIC
            or op not in _OPCODES
            or flags > 3
            or not 0 < size <= _MAX_SIZE
            or not 0 < depth <= _MAX_DEPTH
        ):
            return None
        return cls(Op(op), size, depth, bool(flags & _Flag.LATENCY), bool(flags & _Flag.BLOCKING))


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a measurement."""

    plan: Plan
    #: Number of operations measured.
    count: int
    #: Duration of the measurement.
    seconds: float
    #: ``min``, ``mean``, ``p50``, ``p99`` and ``max`` in microseconds; empty for bandwidth.
    latency_us: dict[str, float]

    @property
    def bytes_per_second(self) -> float:
        """Bytes of payload per second, in one direction."""
        return self.count * self.plan.size / self.seconds

    def as_dict(self) -> dict[str, object]:
        """Return JSON data."""
        return {
            "op": self.plan.op.name.lower(),
            "size": self.plan.size,
            "depth": self.plan.depth,
            "mode": self.plan.mode,
            "kind": "latency" if self.plan.latency else "bandwidth",
            "count": self.count,
            "bytes": self.count * self.plan.size,
            "seconds": round(self.seconds, 6),
            "latency_us": self.latency_us or None,
            "bytes_per_second": round(self.bytes_per_second),
            "messages_per_second": round(self.count / self.seconds, 1),
        }


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm perf``."""
    add_roles(parser, host=True)
    add_address(parser)
    add_port(parser, 7472)
    parser.add_argument("--op", type=str.lower, choices=[op.name.lower() for op in Op], help="The operation.")
    parser.add_argument(
        "--size",
        type=integer_between(1, _MAX_SIZE),
        metavar="BYTES",
        help="Bytes of each operation (default: 64 for latency, 65536 for bandwidth).",
    )
    parser.add_argument(
        "--depth",
        type=integer_between(1, _MAX_DEPTH),
        default=64,
        metavar="N",
        help="Outstanding operations when measuring bandwidth (default: %(default)s).",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_between(0.001, 86400),
        metavar="S",
        help="Duration of a measurement (default: 2, for the table 0.5).",
    )
    parser.add_argument(
        "--count", type=integer_between(1, 1 << 40), metavar="N", help="Number of operations to measure."
    )
    parser.add_argument("--latency", action="store_true", help="Measure latency, not bandwidth.")
    parser.add_argument("--blocking", action="store_true", help="Measure latency with both ends sleeping, not polling.")
    parser.add_argument("--json", action="store_true", help="Write a list of JSON objects.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Serve or measure."""
    if args.server and args.client is not None:
        args.parser.error("-s and -c exclude each other")
    if args.seconds is not None and args.count is not None:
        args.parser.error("--seconds and --count exclude each other")
    if args.server:
        with listening(args.bind, args.port, provider=args.provider) as listener:
            serve_in_turn(listener, serve_client)
        return 0
    if args.client is not None:
        _measure_all(args, args.client, args.port, [_plan_of(args)])
        return 0
    named = args.op or args.latency or args.blocking or args.size is not None
    plans = [_plan_of(args)] if named else _default_plans(args.seconds or 0.5, args.count or 0)
    host = args.bind or "127.0.0.1"
    argv = ("perf", "-s", "-b", host, "-p", "0")
    with ServerProcess(*argv, timeout=args.timeout, provider=args.provider) as server:
        _measure_all(args, host, server.port, plans)
    return 0


def _plan_of(args: argparse.Namespace) -> Plan:
    op = Op[(args.op or "send").upper()]
    size = args.size or (64 if args.latency else 65536)
    seconds = 0.0 if args.count else args.seconds or 2.0
    return Plan(op, size, args.depth, args.latency, args.blocking or not args.latency, seconds, args.count or 0)


def _default_plans(seconds: float, count: int) -> list[Plan]:
    seconds = 0.0 if count else seconds
    latency = [Plan(Op.SEND, 64, 1, True, blocking, seconds, count) for blocking in (False, True)]
    sizes = ((4096, 64), (65536, 32), (1 << 20, 8))
    return latency + [
        Plan(op, size, depth, False, True, seconds, count) for op in (Op.WRITE, Op.READ) for size, depth in sizes
    ]


# -- both ends -----------------------------------------------------------------------------------------------


def _open_connection(cmid: CmId, plan: Plan) -> ToolConnection:
    # The queues are twice as deep as needed: an answer may arrive before the ACK of its request, and a sender may see
    # its completion before the receiver has processed the message.
    return ToolConnection(
        cmid, QPCap(max_send_wr=2 * plan.depth, max_recv_wr=2 * plan.depth, max_send_sge=1, max_recv_sge=1)
    )


def _completions(connection: ToolConnection, most: int, blocking: bool) -> list[WC]:
    """Return the next completions, at least one; raise the error of a failed one."""
    poll = connection.cq.poll
    found = poll(most)
    if not found and not blocking:
        limit = time.perf_counter() + _SPIN_SECONDS
        while not found and time.perf_counter() < limit:
            found = poll(most)
    while not found:
        connection.wait()
        found = poll(most)
    for wc in found:
        if wc.status is not WCStatus.SUCCESS:
            raise completion_failure(wc, connection.peer)
    return found


#: The wr_id of receives, and of all other work requests.
_RECV, _SENT = 1, 2


def serve_client(cmid: CmId) -> None:
    """Serve one measurement. ``cmid`` is the id of a request, which this call destroys."""
    asked = Plan.unpack(b"" if cmid.event is None else cmid.event.private_data)
    if asked is None:
        with cmid:
            cmid.reject(b"not a request of rdmacm perf that this server supports")
        return
    with _open_connection(cmid, asked) as connection:
        region = connection.register(bytearray(asked.size), _ACCESS)
        receive = RecvWR(_RECV, [region.sge()])
        connection.qp.post_recv([receive] * (2 * asked.depth))
        answer = SendWR(_SENT, WROpcode.SEND, [region.sge()], SendFlag.SIGNALED)
        connection.accept(ConnParam(_ANSWER.pack(_MAGIC, region.rkey, region.addr)))
        with suppress(CmDisconnectedError):
            while asked.op is not Op.SEND:  # only the client is active; wait for the end of the connection
                connection.next()
            while True:
                received = sum(wc.wr_id == _RECV for wc in _completions(connection, 64, asked.blocking))
                if received:
                    if asked.latency:  # answer first, as the client waits; another receive is still posted
                        connection.qp.post_send([answer] * received)
                    connection.qp.post_recv([receive] * received)


# -- the client ----------------------------------------------------------------------------------------------


def _measure_all(args: argparse.Namespace, host: str, port: int, plans: list[Plan]) -> None:
    results = []
    progress = ProgressLine()
    try:
        for plan in plans:
            cmid, _ = find_server(host, port, source=args.bind, provider=args.provider)
            results.append(measure(cmid, plan, args.timeout, progress))
    finally:
        progress.close()
    if args.json:
        write_json([result.as_dict() for result in results])
    else:
        write(_text(results))


def measure(cmid: CmId, plan: Plan, timeout: float, progress: ProgressLine) -> Result:
    """Connect and measure. ``cmid`` has a route, and this call destroys it. ``timeout``: of each wait, in seconds."""
    with _open_connection(cmid, plan) as connection:
        region = connection.register(bytearray(plan.size), _ACCESS)
        receive = RecvWR(_RECV, [region.sge()])
        connection.qp.post_recv(receive)
        waits = PeerWait(connection.peer, timeout)
        try:
            data = connection.connect(ConnParam(plan.pack()), waits)
        except CmRejectedError as error:
            reason = printable(error.private_data.partition(b"\0")[0].decode("ascii", "backslashreplace"))
            if error.reason != RejectReason.CONSUMER_DEFINED or not reason:
                raise
            text = f"the server rejected the request: {reason}"
            raise cm_error(errno.ECONNREFUSED, text, "connect", connection.peer) from None
        magic, rkey, address = _ANSWER.unpack_from(data) if len(data) >= _ANSWER.size else (b"", 0, 0)
        if magic != _MAGIC:
            raise cm_error(errno.EPROTO, "the server is not 'rdmacm perf -s'", "connect", connection.peer)

        def request(signaled: bool) -> SendWR:
            flags = SendFlag.SIGNALED if signaled else 0
            return SendWR(_SENT, _OPCODES[plan.op], [region.sge()], flags, remote_addr=address, rkey=rkey)

        if plan.latency:
            return _latency(connection, waits, plan, request(True), receive, progress)
        return _bandwidth(connection, waits, plan, request, progress)


def _latency(
    connection: ToolConnection,
    waits: PeerWait,
    plan: Plan,
    request: SendWR,
    receive: RecvWR,
    progress: ProgressLine,
) -> Result:
    awaited = _RECV if plan.op is Op.SEND else _SENT
    clock, times = time.perf_counter, Samples()
    what = "answered" if plan.op is Op.SEND else "completed"
    waits.progress = lambda: f"{times.count} operations were {what}, the next one was posted and is not"

    def turn() -> None:
        connection.qp.post_send(request)
        if awaited == _RECV:  # for the next answer, while the current message is under way
            connection.qp.post_recv(receive)
        while all(wc.wr_id != awaited for wc in _completions(connection, 4, plan.blocking)):
            pass

    for _ in range(10):  # warm up
        turn()
    began = clock()
    limit = began + plan.seconds if plan.seconds else float("inf")
    now = began
    while now < limit and (not plan.count or times.count < plan.count):
        turn()
        before, now = now, clock()
        times.add(now - before)
        if progress.is_due(now):
            progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {times.count} in {now - began:.0f} s")
    return Result(plan, times.count, now - began, times.microseconds(0.5 if awaited == _RECV else 1.0))


def _bandwidth(
    connection: ToolConnection,
    waits: PeerWait,
    plan: Plan,
    request: Callable[[bool], SendWR],
    progress: ProgressLine,
) -> Result:
    batch_size = max(1, plan.depth // _BATCHES)
    batch = [request(False)] * (batch_size - 1) + [request(True)]
    batches = plan.depth // batch_size
    clock = time.perf_counter
    wanted = -(-plan.count // batch_size)

    posted = done = 0
    waits.progress = lambda: f"{posted * batch_size} operations posted, {done * batch_size} completed"
    # Warm up with one batch.
    connection.qp.post_send(batch)
    _completions(connection, batches, plan.blocking)
    began = clock()
    limit = began + plan.seconds if plan.seconds else float("inf")
    now = began
    while True:
        room = batches - (posted - done)
        if plan.count:
            room = min(room, wanted - posted)
        if now < limit:
            for _ in range(room):
                connection.qp.post_send(batch)
                posted += 1
        if posted == done:
            break
        done += len(_completions(connection, batches, plan.blocking))
        now = clock()
        if progress.is_due(now):
            rate = done * batch_size * plan.size / (now - began)
            progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {rate / 1e6:.0f} MB/s")
    return Result(plan, done * batch_size, now - began, {})


def _text(results: list[Result]) -> str:
    latencies = [result for result in results if result.plan.latency]
    streams = [result for result in results if not result.plan.latency]
    tables = []
    if latencies:
        head = ("latency", "size", "mode", "count", "min us", "p50 us", "p99 us", "max us")
        rows = [
            (
                f"{r.plan.op.name.lower()}{' (half a round trip)' if r.plan.op is Op.SEND else ''}",
                size_text(r.plan.size),
                r.plan.mode,
                str(r.count),
                *(f"{r.latency_us[key]:.1f}" for key in ("min", "p50", "p99", "max")),
            )
            for r in latencies
        ]
        tables.append(table(head, rows, right=("count", *head[4:])))
    if streams:
        columns = ("bandwidth", "size", "depth", "count", "MB/s", "Gbit/s", "messages/s")
        lines = [
            (
                r.plan.op.name.lower(),
                size_text(r.plan.size),
                str(r.plan.depth),
                str(r.count),
                f"{r.bytes_per_second / 1e6:.1f}",
                f"{r.bytes_per_second * 8 / 1e9:.2f}",
                f"{r.count / r.seconds:,.0f}",
            )
            for r in streams
        ]
        tables.append(table(columns, lines, right=columns[2:]))
    return "\n".join(tables)
