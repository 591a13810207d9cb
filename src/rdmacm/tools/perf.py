"""``rdmacm perf``: latency and bandwidth of a connection.

The client's request carries what is to be measured in its private data, 16 bytes in network order: ``rPf1``, the
operation, flags (1 latency, 2 blocking), two bytes of nothing, the size and the depth. The answer's names the server's
buffer: ``rPf1``, its rkey, its address. One connection is one measurement, and ends with it.
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
from rdmacm.tools.link import (
    Link,
    Twin,
    add_provider,
    add_roles,
    failure_of,
    find,
    listening,
    number,
    port_number,
    say_listening,
    serve_in_turn,
)
from rdmacm.tools.measure import Progress, Samples, size_text
from rdmacm.tools.output import Page, Parser, table, write, write_json
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import WC, AccessFlag, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR

PAGE = Page(
    command="perf",
    summary="measure latency and bandwidth",
    description="""
        Measures one operation between a client and a server: --op send, write (RDMA WRITE) or read (RDMA READ).
        Bandwidth is what a queue of --depth work requests moves; both ends sleep until something completes. With
        --latency there is one at a time: of send, half the time until the server's answer is here; of write and
        read, the time until the operation is complete. Both ends then poll their completion queues, which takes a
        CPU each, or with --blocking sleep here too.

        Without -s and -c the server is a second process on this machine, and unless an operation is named a small
        table is measured: the latency of 64 byte messages, polling and blocking, and the bandwidth of write and read
        with 4 KiB, 64 KiB and 1 MiB.

        On a terminal a line says once a second how far it is. With --json, a list of objects: op, size, depth, mode
        (polling or blocking), kind (latency or bandwidth), count, bytes, seconds, latency_us (min, mean, p50, p99
        and max, or null), bytes_per_second and messages_per_second.
    """,
    examples=(
        ("rdmacm perf", "The small table, of this machine."),
        ("rdmacm perf -s", "Serve clients until Ctrl-C."),
        ("rdmacm perf -c storage-7 --op write --size 1048576", "How fast memory of another host is written."),
        ("rdmacm perf --op send --latency --blocking --count 10000", "Latency of sleeping processes."),
    ),
    see_also="ib_send_bw(1), ib_send_lat(1), rdmacm rping, rdmacm cmtime",
)


class Op(IntEnum):
    SEND = 0
    WRITE = 1
    READ = 2


class _Flag(IntFlag):
    LATENCY = 1
    BLOCKING = 2


_REQUEST = struct.Struct(">4sBBHII")
_ANSWER = struct.Struct(">4sIQ")
_MAGIC = b"rPf1"
#: Reason of a rejection by the application, whose private data says why.
_CONSUMER = 28
_LARGEST, _DEEPEST = 16 << 20, 1024
_OPCODES = {Op.SEND: WROpcode.SEND, Op.WRITE: WROpcode.RDMA_WRITE, Op.READ: WROpcode.RDMA_READ}
_ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE
#: A queue of work requests is posted in so many parts, and one completion asked for of each.
_PARTS = 4
#: Seconds an end polls in vain before it sleeps after all: the other may be gone, or never have meant it.
_SPIN = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; ``seconds`` or ``count`` says for how long."""

    op: Op
    size: int
    depth: int
    latency: bool
    blocking: bool
    seconds: float = 0.0
    count: int = 0

    @property
    def flags(self) -> _Flag:
        """How the request says it."""
        return (_Flag.LATENCY if self.latency else _Flag(0)) | (_Flag.BLOCKING if self.blocking else _Flag(0))

    @property
    def mode(self) -> str:
        """How completions are waited for."""
        return "blocking" if self.blocking else "polling"

    def pack(self) -> bytes:
        """The private data of the request."""
        return _REQUEST.pack(_MAGIC, self.op, self.flags, 0, self.size, self.depth)

    @classmethod
    def unpack(cls, data: bytes) -> Plan | None:
        """What a client asks for; None where that is nothing this server does."""
        if len(data) < _REQUEST.size:
            return None
        magic, op, flags, _, size, depth = _REQUEST.unpack_from(data)
        if magic != _MAGIC or op not in _OPCODES or flags > 3 or not 0 < size <= _LARGEST or not 0 < depth <= _DEEPEST:
            return None
        return cls(Op(op), size, depth, bool(flags & _Flag.LATENCY), bool(flags & _Flag.BLOCKING))


@dataclass(frozen=True, slots=True)
class Result:
    """What came out; ``latency_us`` is empty for bandwidth."""

    plan: Plan
    count: int
    seconds: float
    latency_us: dict[str, float]

    @property
    def bytes_per_second(self) -> float:
        """Payload in one direction."""
        return self.count * self.plan.size / self.seconds

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.001 to 86400")
    return seconds


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm perf``."""
    add_roles(parser, host=True)
    parser.add_argument("-b", "--bind", metavar="ADDR", help="The own address: to listen at, or to connect from.")
    parser.add_argument(
        "-p",
        "--port",
        type=port_number,
        default=7472,
        metavar="PORT",
        help="The server's port; 0, with -s, takes a free one (default: %(default)s).",
    )
    parser.add_argument("--op", type=str.lower, choices=[op.name.lower() for op in Op], help="The operation.")
    parser.add_argument(
        "--size",
        type=number(1, _LARGEST),
        metavar="BYTES",
        help="Bytes of each operation (default: 64 for latency, 65536 for bandwidth).",
    )
    parser.add_argument(
        "--depth",
        type=number(1, _DEEPEST),
        default=64,
        metavar="N",
        help="Operations under way at a time, for bandwidth (default: %(default)s).",
    )
    parser.add_argument(
        "--seconds", type=_seconds, metavar="S", help="How long to measure (default: 2; the table 0.5)."
    )
    parser.add_argument("--count", type=number(1, 1 << 40), metavar="N", help="How many operations to measure.")
    parser.add_argument("--latency", action="store_true", help="Measure latency.")
    parser.add_argument("--blocking", action="store_true", help="Measure latency sleeping, not polling.")
    parser.add_argument("--json", action="store_true", help="Write a list of objects.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Serve or measure."""
    if args.server and args.client is not None:
        args.parser.error("-s and -c exclude each other")
    if args.seconds is not None and args.count is not None:
        args.parser.error("--seconds and --count exclude each other")
    if args.server:
        with listening(args.bind, args.port, provider=args.provider) as listener:
            say_listening(listener)
            serve_in_turn(listener, serve_client)
        return 0
    if args.client is not None:
        _measure_all(args, args.client, args.port, [_plan_of(args)])
        return 0
    named = args.op or args.latency or args.blocking or args.size is not None
    plans = [_plan_of(args)] if named else _small_table(args.seconds or 0.5, args.count or 0)
    host = args.bind or "127.0.0.1"
    with Twin("perf", "-s", "-b", host, "-p", "0", *(["--provider", args.provider] if args.provider else [])) as twin:
        _measure_all(args, host, twin.port, plans)
    return 0


def _plan_of(args: argparse.Namespace) -> Plan:
    op = Op[(args.op or "send").upper()]
    size = args.size or (64 if args.latency else 65536)
    seconds = 0.0 if args.count else args.seconds or 2.0
    return Plan(op, size, args.depth, args.latency, args.blocking or not args.latency, seconds, args.count or 0)


def _small_table(seconds: float, count: int) -> list[Plan]:
    seconds = 0.0 if count else seconds
    latency = [Plan(Op.SEND, 64, 1, True, blocking, seconds, count) for blocking in (False, True)]
    sizes = ((4096, 64), (65536, 32), (1 << 20, 8))
    return latency + [
        Plan(op, size, depth, False, True, seconds, count) for op in (Op.WRITE, Op.READ) for size, depth in sizes
    ]


# -- both ends -----------------------------------------------------------------------------------------------


def _link(cmid: CmId, plan: Plan) -> Link:
    # Twice as deep as messages are under way: an answer may be here before what it answers is acknowledged, and a
    # sender may have been told of what the receiver has not looked at yet.
    return Link(cmid, QPCap(max_send_wr=2 * plan.depth, max_recv_wr=2 * plan.depth, max_send_sge=1, max_recv_sge=1))


def _completions(link: Link, most: int, blocking: bool) -> list[WC]:
    """The next completions, at least one; all of them successful."""
    poll = link.cq.poll
    found = poll(most)
    if not found and not blocking:
        limit = time.perf_counter() + _SPIN
        while not found and time.perf_counter() < limit:
            found = poll(most)
    while not found:
        link.cq.wait(None)
        found = poll(most)
    for wc in found:
        if wc.status is not WCStatus.SUCCESS:
            raise failure_of(wc, link.peer)
    return found


_RECV, _SENT = 1, 2


def serve_client(cmid: CmId) -> None:
    asked = Plan.unpack(b"" if cmid.event is None else cmid.event.private_data)
    if asked is None:
        with cmid:
            cmid.reject(b"not a request of rdmacm perf that can be served")
        return
    with _link(cmid, asked) as link:
        region = link.register(bytearray(asked.size), _ACCESS)
        receive = RecvWR(_RECV, [region.sge()])
        link.qp.post_recv([receive] * (2 * asked.depth))
        answer = SendWR(_SENT, WROpcode.SEND, [region.sge()], SendFlag.SIGNALED)
        link.accept(ConnParam(_ANSWER.pack(_MAGIC, region.rkey, region.addr)))
        with suppress(CmDisconnectedError):
            while asked.op is not Op.SEND:  # the client does it all: until it is gone
                link.next()
            while True:
                received = sum(wc.wr_id == _RECV for wc in _completions(link, 64, asked.blocking))
                if received:
                    if asked.latency:  # which the peer waits for; there is another receive
                        link.qp.post_send([answer] * received)
                    link.qp.post_recv([receive] * received)


# -- the client ----------------------------------------------------------------------------------------------


def _measure_all(args: argparse.Namespace, host: str, port: int, plans: list[Plan]) -> None:
    results = []
    progress = Progress()
    try:
        for plan in plans:
            cmid, _ = find(host, port, source=args.bind, provider=args.provider)
            results.append(measure(cmid, plan, progress))
    finally:
        progress.close()
    if args.json:
        write_json([result.as_dict() for result in results])
    else:
        write(_text(results))


def measure(cmid: CmId, plan: Plan, progress: Progress) -> Result:
    with _link(cmid, plan) as link:
        region = link.register(bytearray(plan.size), _ACCESS)
        receive = RecvWR(_RECV, [region.sge()])
        link.qp.post_recv(receive)
        try:
            data = link.connect(ConnParam(plan.pack()))
        except CmRejectedError as error:
            said = printable(error.private_data.partition(b"\0")[0].decode("ascii", "backslashreplace"))
            if error.reason != _CONSUMER or not said:
                raise
            raise cm_error(errno.ECONNREFUSED, f"the server refused: {said}", "connect", link.peer) from None
        magic, rkey, address = _ANSWER.unpack_from(data) if len(data) >= _ANSWER.size else (b"", 0, 0)
        if magic != _MAGIC:
            raise cm_error(errno.EPROTO, "the server is not one of 'rdmacm perf -s'", "connect", link.peer)

        def request(signaled: bool) -> SendWR:
            flags = SendFlag.SIGNALED if signaled else 0
            return SendWR(_SENT, _OPCODES[plan.op], [region.sge()], flags, remote_addr=address, rkey=rkey)

        if plan.latency:
            return _latency(link, plan, request(True), receive, progress)
        return _bandwidth(link, plan, request, progress)


def _latency(link: Link, plan: Plan, request: SendWR, receive: RecvWR, progress: Progress) -> Result:
    awaited = _RECV if plan.op is Op.SEND else _SENT
    clock, times = time.perf_counter, Samples()

    def turn() -> None:
        link.qp.post_send(request)
        if awaited == _RECV:  # for the answer after the next one, while this one is under way
            link.qp.post_recv(receive)
        while all(wc.wr_id != awaited for wc in _completions(link, 4, plan.blocking)):
            pass

    for _ in range(10):  # what is done once is not measured
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


def _bandwidth(link: Link, plan: Plan, request: Callable[[bool], SendWR], progress: Progress) -> Result:
    part = max(1, plan.depth // _PARTS)
    batch = [request(False)] * (part - 1) + [request(True)]
    parts = plan.depth // part
    clock = time.perf_counter
    wanted = -(-plan.count // part)

    # one part to warm up, which is not measured
    link.qp.post_send(batch)
    _completions(link, parts, plan.blocking)
    began = clock()
    limit = began + plan.seconds if plan.seconds else float("inf")
    posted = done = 0
    now = began
    while True:
        room = parts - (posted - done)
        if plan.count:
            room = min(room, wanted - posted)
        if now < limit:
            for _ in range(room):
                link.qp.post_send(batch)
                posted += 1
        if posted == done:
            break
        done += len(_completions(link, parts, plan.blocking))
        now = clock()
        if progress.is_due(now):
            rate = done * part * plan.size / (now - began)
            progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {rate / 1e6:.0f} MB/s")
    return Result(plan, done * part, now - began, {})


def _text(results: list[Result]) -> str:
    latencies = [result for result in results if result.plan.latency]
    streams = [result for result in results if not result.plan.latency]
    parts = []
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
        parts.append(table(head, rows, right=("count", *head[4:])))
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
        parts.append(table(columns, lines, right=columns[2:]))
    return "\n".join(parts)
