"""``rdmacm perf``: measure latency and bandwidth of a connection, or of datagrams.

Each measurement has a connection of its own; :mod:`rdmacm.tools.perf_plan` has what its ends tell each other. This
module measures over RC, :mod:`rdmacm.tools.perf_unreliable` over UC and UD.
"""

from __future__ import annotations

import argparse
import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from rdmacm.cmid import CmId
from rdmacm.errors import CmDisconnectedError, CmRejectedError, RdmaError, cm_error, printable
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.provider.connparam import ConnParam
from rdmacm.tools import perf_unreliable
from rdmacm.tools.arguments import (
    add_address,
    add_host,
    add_number,
    add_port,
    add_provider,
    add_roles,
    add_wait_limit,
    integer_between,
    seconds_between,
    take_host,
)
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.connection import ToolConnection, find_server
from rdmacm.tools.core_name import core_line, core_name
from rdmacm.tools.measure import Intervals, ProcessorUse, ProgressLine, Samples, size_text
from rdmacm.tools.output import Page, Parser, write, write_error, write_json
from rdmacm.tools.perf_plan import (
    ACCESS,
    BATCHES,
    MAX_DEPTH,
    MAX_SIZE,
    OPCODES,
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
from rdmacm.tools.perf_report import PLOT_ENDINGS, Rows, bars, plot_problem, server_line, write_plot
from rdmacm.tools.serving import ServerProcess, listening, own_host, serve_in_turn
from rdmacm.tools.waiting import PeerWait
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import WC, QPType, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.pd import MR
from rdmacm.verbs.wr import RecvWR, SendWR

PAGE = Page(
    command="perf",
    summary=COMMANDS["perf"],
    description="""
        Measures one operation between a client and a server: --op send, write (RDMA WRITE) or read (RDMA READ).
        Bandwidth is measured with --depth work requests outstanding; both ends sleep until work completes. With
        --latency one operation is outstanding: the latency of send is half the time until the server's answer
        arrives, that of write and read the time until the operation completes. Both ends poll their completion
        queues, which occupies a CPU each, or sleep with --blocking.

        --type uc measures an unreliable connection (send and write), --type ud datagrams (send, up to the MTU); the
        server needs the same --type. There the receiver counts the messages and reports every fourth part of --depth;
        the bandwidth is that of the messages that have arrived, and the others are shown as lost.

        Without -s and a host the server is a second process on this machine. Then, unless an operation is given, a
        table is measured: the latency of 64 byte messages, polling and blocking, and the bandwidth of write and read
        with 4 KiB, 64 KiB and 1 MiB.

        Each row is shown when it is measured; its last column has what part of a processor client and server have
        used, in percent. On a terminal a line shows the progress once a second. Ctrl-C ends the measurement and shows
        what was measured. A server shows a line for each measurement of a client.

        With --json, writes a list of objects, also when interrupted: type, op, size, depth, mode (polling or
        blocking), kind (latency or bandwidth), core (c or python; null on the kernel's devices), count, lost (UC and
        UD, or null), received (of the other direction with --bidirectional, or null), bytes (in both directions),
        seconds, latency_us (min, mean, p50, p99 and max, or null), bytes_per_second, messages_per_second, processors
        (what client and server have used, 1.0 for one processor, or null), interrupted, and intervals (with
        --interval, or null: for each the seconds since the begin, count and bytes_per_second). A server writes an
        object for each measurement, with peer as well; one that ended without a result has only the members up to
        kind.
    """,
    examples=(
        ("rdmacm perf", "Measure the table on this machine."),
        ("rdmacm perf -s", "Serve clients until Ctrl-C."),
        ("rdmacm perf storage-7 --op write --size 1048576", "Measure the bandwidth of writes to another host."),
        ("rdmacm perf -a --op write --plot write.svg", "Plot the bandwidth of writes of 2 bytes to 8 MiB."),
        ("rdmacm perf --type ud --size 1024 --interval 1", "Measure datagrams, with a line every second."),
        ("rdmacm perf --op send --latency --blocking --count 10000", "Measure the latency of blocking processes."),
    ),
    see_also="ib_send_bw(1), ib_send_lat(1), rdmacm rping, rdmacm cmtime",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"),
)

#: Seconds of polling without a completion after which an end sleeps: the peer may have gone.
_SPIN_SECONDS = 1.0
#: The sizes of a sweep, in bytes; the outstanding operations of each have at most so many bytes together.
_SWEEP = tuple(1 << bits for bits in range(1, 24))
_SWEEP_BYTES = 8 << 20
_TYPES = {"rc": QPType.RC, "uc": QPType.UC, "ud": QPType.UD}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm perf``."""
    add_host(parser)
    add_roles(parser, host=True)
    add_address(parser)
    add_port(parser, 7472)
    parser.add_argument("--op", type=str.lower, choices=[op.name.lower() for op in Op], help="The operation.")
    parser.add_argument(
        "--type", type=str.lower, choices=_TYPES, default="rc", help="The type of the queue pairs (default: rc)."
    )
    parser.add_argument(
        "--size",
        type=integer_between(1, MAX_SIZE),
        metavar="BYTES",
        help="Bytes of each operation (default: 64 for latency, 1024 for ud, else 65536).",
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="Measure each power of two from 2 bytes to 8 MiB, for ud to the MTU."
    )
    what = "Outstanding operations when measuring bandwidth; with -a at most 8 MiB"
    add_number(parser, ("--depth",), integer_between(1, MAX_DEPTH), 64, "N", what)
    parser.add_argument(
        "-l",
        "--post-list",
        type=integer_between(1, MAX_DEPTH),
        default=0,
        metavar="N",
        help="Operations that are posted together when measuring bandwidth (default: a fourth of --depth).",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_between(0.001, 86400),
        metavar="S",
        help="Duration of a measurement (default: 2, for the table and -a 0.5).",
    )
    parser.add_argument(
        "--count", type=integer_between(1, 1 << 40), metavar="N", help="Number of operations to measure."
    )
    parser.add_argument("--latency", action="store_true", help="Measure latency, not bandwidth.")
    parser.add_argument("--blocking", action="store_true", help="Measure latency with both ends sleeping, not polling.")
    parser.add_argument(
        "--bidirectional",
        action="store_true",
        help="Measure bandwidth while the server does the same in the other direction; the sum is shown.",
    )
    parser.add_argument(
        "--interval",
        type=seconds_between(0.01, 86400),
        default=0.0,
        metavar="S",
        help="Write a line about every S seconds of a measurement.",
    )
    parser.add_argument(
        "--plot",
        type=_plot_file,
        metavar="FILE",
        help="Also draw the results, over the size or --interval, to a file (.svg, .png or .pdf) by matplotlib; without"
        " matplotlib, and with -, as bars on standard output.",
    )
    parser.add_argument("--json", action="store_true", help="Write a list of JSON objects.")
    add_wait_limit(parser)
    add_provider(parser)


def _plot_file(text: str) -> str:
    if text != "-" and not text.endswith(PLOT_ENDINGS):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(PLOT_ENDINGS)}")
    return text


def run(args: argparse.Namespace) -> int:
    """Serve or measure."""
    take_host(args, "client")
    if args.server and args.plot is not None:
        args.parser.error("--plot is an option of the client")
    if args.json and args.plot == "-":
        args.parser.error("--json and --plot - both write to standard output")
    if args.server and args.client is not None:
        args.parser.error("-s and -c exclude each other")
    if args.seconds is not None and args.count is not None:
        args.parser.error("--seconds and --count exclude each other")
    if args.all and args.size is not None:
        args.parser.error("-a and --size exclude each other")
    qp_type = _TYPES[args.type]
    if args.server:
        with listening(args.bind, args.port, provider=args.provider, qp_type=qp_type) as listener:
            serve_in_turn(listener, partial(serve_client, show=partial(_show_client, args)))
        return 0
    named = args.op or args.latency or args.blocking or args.size is not None or args.all or args.bidirectional
    named = named or args.post_list
    if named or args.client is not None or qp_type is not QPType.RC:
        plans = _plans_of(args)
    else:
        plans = _default_plans(args.seconds or 0.5, args.count or 0, args.interval)
    if plans[0].fault:
        args.parser.error(plans[0].fault)
    if args.client is not None:
        return _measure_all(args, args.client, args.port, plans)
    host = args.bind or own_host(args.provider)
    argv = ("perf", "-s", "-b", host, "-p", "0", "--type", args.type)
    with ServerProcess(*argv, timeout=args.timeout, provider=args.provider) as server:
        return _measure_all(args, host, server.port, plans)


def _plans_of(args: argparse.Namespace) -> list[Plan]:
    op, qp_type = Op[(args.op or "send").upper()], _TYPES[args.type]
    size = args.size or (64 if args.latency else 1024 if qp_type is QPType.UD else 65536)
    seconds = 0.0 if args.count else args.seconds or (0.5 if args.all else 2.0)
    plan = Plan(
        op,
        size,
        args.depth,
        args.latency,
        args.blocking or not args.latency,
        seconds,
        args.count or 0,
        qp_type,
        args.bidirectional,
        args.interval,
        args.post_list,
    )
    if not args.all:
        return [plan]
    sweep = [replace(plan, size=each, depth=min(args.depth, max(1, _SWEEP_BYTES // each))) for each in _SWEEP]
    return [replace(each, post_list=min(each.post_list, each.depth)) for each in sweep]


def _default_plans(seconds: float, count: int, interval: float) -> list[Plan]:
    seconds = 0.0 if count else seconds
    latency = [Plan(Op.SEND, 64, 1, True, blocking, seconds, count) for blocking in (False, True)]
    sizes = ((4096, 64), (65536, 32), (1 << 20, 8))
    plans = latency + [
        Plan(op, size, depth, False, True, seconds, count) for op in (Op.WRITE, Op.READ) for size, depth in sizes
    ]
    return [replace(plan, interval=interval) for plan in plans]


# -- both ends -----------------------------------------------------------------------------------------------


def _boxes(connection: ToolConnection, plan: Plan) -> tuple[MR, MR]:
    """Register memory for the messages of a peer, and for what is told at the end."""
    room = SUMMARY_SIZE + 1
    inbox = connection.register(bytearray(max(room, plan.size if plan.op is Op.SEND else 0)))
    return inbox, connection.register(bytearray(room))


def _open_connection(cmid: CmId, plan: Plan) -> ToolConnection:
    # The queues are twice as deep as needed: an answer may arrive before the ACK of its request, and a sender may see
    # its completion before the receiver has processed the message. The others are for the messages after batches.
    depth = 2 * plan.depth + 2 * BATCHES
    return ToolConnection(cmid, QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1))


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
            raise connection.failure(wc)
    return found


#: The wr_id of receives, and of all other work requests.
_RECV, _SENT = 1, 2


@dataclass(frozen=True, slots=True)
class _Requests:
    """The work requests of one end: the operation on the peer's buffer, and receives."""

    plan: Plan
    region: MR
    #: Where messages arrive. Not the region, which the peer's operations may overwrite after a message.
    inbox: MR
    #: What is told at the end.
    outbox: MR
    rkey: int
    address: int

    def operation(self, signaled: bool) -> SendWR:
        """The operation."""
        flags = SendFlag.SIGNALED if signaled else 0
        opcode = OPCODES[self.plan.op]
        return SendWR(_SENT, opcode, [self.region.sge()], flags, remote_addr=self.address, rkey=self.rkey)

    def batch(self, *, is_reported: bool = False) -> list[SendWR]:
        """A batch of operations, the last one signaled.

        ``is_reported``: an empty message follows that tells the peer of one-sided operations, once they are complete.
        """
        found = [self.operation(False)] * (self.plan.batch - 1) + [self.operation(True)]
        if is_reported and self.plan.op is not Op.SEND:
            found.append(SendWR(_SENT, WROpcode.SEND, [], SendFlag.FENCE))
        return found

    @property
    def receive(self) -> RecvWR:
        """A receive."""
        return RecvWR(_RECV, [self.inbox.sge()])

    def tell(self, connection: ToolConnection, figures: bytes) -> None:
        """Send the peer what this end has measured."""
        self.outbox.buf[: len(figures)] = figures
        piece = self.outbox.sge(0, self.plan.told_apart(len(figures)))
        connection.qp.post_send(SendWR(_SENT, WROpcode.SEND, [piece], SendFlag.SIGNALED))

    @property
    def per_message(self) -> int:
        """The operations of the peer that a message of a bidirectional measurement stands for."""
        return 1 if self.plan.op is Op.SEND else self.plan.batch


# -- the server ----------------------------------------------------------------------------------------------


def serve_client(cmid: CmId, show: Callable[[str, Plan, Result | None], None] = lambda *_: None) -> None:
    """Serve one measurement. ``cmid`` is the id of a request, which this call destroys.

    ``show`` gets the client's address, what it has asked for, and its result; None if it ended without.
    """
    data = cmid.event.private_data
    asked = Plan.unpack(data, cmid.qp_type)
    if asked is None:
        with cmid:
            cmid.reject(b"not a request of rdmacm perf that this server supports")
        return
    result: Result | None = None
    if asked.qp_type is not QPType.RC:
        with perf_unreliable.open_connection(cmid, asked) as connection:
            result = perf_unreliable.serve(connection, asked, Plan.buffer_of(data))
            peer = connection.peer
        show(peer, asked, result)
        return
    with _open_connection(cmid, asked) as connection:
        region = connection.register(bytearray(asked.size), ACCESS)
        requests = _Requests(asked, region, *_boxes(connection, asked), *Plan.buffer_of(data))
        connection.qp.post_recv([requests.receive] * (2 * asked.depth))
        connection.accept(ConnParam(pack_answer(region.rkey, region.addr)))
        with suppress(CmDisconnectedError):
            serving = _serve_both_ways if asked.bidirectional else _serve_one_way
            result = serving(connection, requests)
            while True:  # the client ends the connection
                _completions(connection, 64, True)
        peer = connection.peer
    show(peer, asked, result)


def _show_client(args: argparse.Namespace, peer: str, asked: Plan, result: Result | None) -> None:
    if args.json:
        write_json({"peer": peer} | (asked if result is None else result).as_dict())
    else:
        write(server_line(peer, asked, result))


def _end(connection: ToolConnection, requests: _Requests, use: ProcessorUse) -> Result | None:
    """Take the client's result, which has arrived, and tell it what this end has used of the processor."""
    share = use.share()
    requests.tell(connection, pack_use(share))
    return result_of(requests.inbox.buf, requests.plan, share)


def _serve_one_way(connection: ToolConnection, requests: _Requests) -> Result | None:
    asked, receive, use = requests.plan, requests.receive, ProcessorUse()
    answer = SendWR(_SENT, WROpcode.SEND, [requests.region.sge()], SendFlag.SIGNALED)
    while True:
        received = 0
        for wc in _completions(connection, 64, asked.blocking):
            if wc.wr_id == _RECV:
                received += 1
                if not asked.is_data(wc.byte_len):
                    return _end(connection, requests, use)
        if received:
            if asked.latency:  # answer first, as the client waits; another receive is still posted
                connection.qp.post_send([answer] * received)
            connection.qp.post_recv([receive] * received)


def _serve_both_ways(connection: ToolConnection, requests: _Requests) -> Result | None:
    asked, batch, use = requests.plan, requests.batch(is_reported=True), ProcessorUse()
    for _ in range(asked.depth // asked.batch):
        connection.qp.post_send(batch)
    while True:
        found = _completions(connection, 64, asked.blocking)
        received = 0
        for wc in found:
            if wc.wr_id == _RECV:
                received += 1
                if not asked.is_data(wc.byte_len):
                    return _end(connection, requests, use)
        if received:
            connection.qp.post_recv([requests.receive] * received)
        for _ in range(len(found) - received):
            connection.qp.post_send(batch)


# -- the client ----------------------------------------------------------------------------------------------


def _measure_all(args: argparse.Namespace, host: str, port: int, plans: list[Plan]) -> int:
    results: list[Result] = []
    provider = ""
    progress = ProgressLine()
    rows = Rows(plans)
    problem = None if args.plot in (None, "-") else plot_problem()
    if problem is not None:
        write_error(f"{problem}; bars follow instead of {args.plot}")

    def show(text: str) -> None:
        if not args.json:
            progress.close()
            write(text)

    try:
        for at, plan in enumerate(plans, 1):
            progress.head = f"{at} of {len(plans)}: " if len(plans) > 1 else ""
            cmid, _ = find_server(host, port, source=args.bind, provider=args.provider, qp_type=plan.qp_type)
            provider = cmid.channel.provider.name
            if results and perf_unreliable.fault_of(cmid, plan):  # the end of a sweep
                cmid.destroy()
                break
            if plan.interval and len(plans) > 1:
                show(f"{plan.op.name.lower()} {size_text(plan.size)}\n")
            results.append(measure(cmid, plan, args.timeout, progress, show))
            show(rows.row(results[-1]))
            if results[-1].is_interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        _finish(args, results, provider, progress, problem)
        raise
    finally:
        progress.close()
    _finish(args, results, provider, progress, problem)
    return 0 if problem is None else 1


def _finish(
    args: argparse.Namespace, results: list[Result], provider: str, progress: ProgressLine, problem: RdmaError | None
) -> None:
    """Write what follows the last measurement."""
    progress.close()
    if args.json:
        write_json([result.as_dict() | {"core": core_name(provider)} for result in results])
    elif results:
        if results[-1].is_interrupted:
            write_error(f"interrupted after {results[-1].seconds:.2f} s of the last measurement")
        write("".join(f"\n{line}" for line in filter(None, [core_line(provider)])))
    if args.plot is None or not results:
        return
    if args.plot != "-" and problem is None:
        write_plot(results, args.plot)
    elif not args.json:
        write(f"\n{bars(results)}")


@contextmanager
def _rejections(peer: str) -> Iterator[None]:
    """The server's text in the error of a request that it has rejected."""
    try:
        yield
    except CmRejectedError as error:
        reason = printable(error.private_data.partition(b"\0")[0].decode("ascii", "backslashreplace"))
        if error.reason != RejectReason.CONSUMER_DEFINED or not reason:
            raise
        why = f"the server rejected the request: {reason}"
        raise cm_error(errno.ECONNREFUSED, why, "connect", peer) from None


def measure(
    cmid: CmId, plan: Plan, timeout: float, progress: ProgressLine, show: Callable[[str], None] = write
) -> Result:
    """Connect and measure. ``cmid`` has a route, and this call destroys it. ``timeout``: of each wait, in seconds.

    ``show`` writes the lines of ``--interval``.
    """
    fault = perf_unreliable.fault_of(cmid, plan)
    if fault:
        cmid.destroy()
        raise cm_error(errno.EINVAL, fault, "perf", hint="a smaller --size")
    if plan.qp_type is not QPType.RC:
        with perf_unreliable.open_connection(cmid, plan) as connection, _rejections(connection.peer):
            return perf_unreliable.measure(connection, plan, PeerWait(connection.peer, timeout), progress, show)
    with _open_connection(cmid, plan) as connection:
        region = connection.register(bytearray(plan.size), ACCESS)
        inbox, outbox = _boxes(connection, plan)
        connection.qp.post_recv([RecvWR(_RECV, [inbox.sge()])] * (2 * plan.depth if plan.bidirectional else 1))
        waits = PeerWait(connection.peer, timeout)
        with _rejections(connection.peer):
            data = connection.connect(ConnParam(plan.pack(region.rkey, region.addr)), waits)
        requests = _Requests(plan, region, inbox, outbox, *answer_of(data, connection.peer))
        intervals = Intervals(plan.interval, plan.size, show)
        measuring = _latency if plan.latency else _bandwidth
        use = ProcessorUse()
        result = replace(measuring(connection, waits, requests, progress, intervals), client_use=use.share())
        with suppress(RdmaError):  # what was measured counts, even if the server has gone
            result = replace(result, server_use=_exchange(connection, requests, result))
        return result


def _exchange(connection: ToolConnection, requests: _Requests, result: Result) -> float | None:
    """Tell the server the result; return what part of a processor it has used."""
    requests.tell(connection, result.pack())
    while True:
        for wc in _completions(connection, 64, True):
            if wc.wr_id == _RECV:
                if not requests.plan.is_data(wc.byte_len):
                    return use_of(requests.inbox.buf)
                connection.qp.post_recv(requests.receive)


def _latency(
    connection: ToolConnection, waits: PeerWait, requests: _Requests, progress: ProgressLine, intervals: Intervals
) -> Result:
    plan, request, receive = requests.plan, requests.operation(True), requests.receive
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
    intervals.begin(began)
    limit = began + plan.seconds if plan.seconds else float("inf")
    now = began
    is_interrupted = False
    try:
        while now < limit and (not plan.count or times.count < plan.count):
            turn()
            before, now = now, clock()
            times.add(now - before)
            if intervals.is_due(now):
                intervals.report(now, times.count)
            if progress.is_due(now):
                progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {times.count} in {now - began:.0f} s")
    except KeyboardInterrupt:
        if not times.count:
            raise
        is_interrupted = True
    statistics = times.microseconds(0.5 if awaited == _RECV else 1.0)
    return Result(
        plan, times.count, now - began, statistics, intervals=intervals.reports, is_interrupted=is_interrupted
    )


def _bandwidth(
    connection: ToolConnection, waits: PeerWait, requests: _Requests, progress: ProgressLine, intervals: Intervals
) -> Result:
    plan, batch = requests.plan, requests.batch()
    batches = plan.depth // plan.batch
    clock = time.perf_counter
    wanted = -(-plan.count // plan.batch)

    posted = done = received = 0
    waits.progress = lambda: f"{posted * plan.batch} operations posted, {done * plan.batch} completed"

    def take() -> int:
        """Wait for completions; return how many batches have completed."""
        nonlocal received
        found = _completions(connection, 64, plan.blocking)
        messages = sum(wc.wr_id == _RECV for wc in found)
        if messages:
            connection.qp.post_recv([requests.receive] * messages)
            received += messages * requests.per_message
        return len(found) - messages

    connection.qp.post_send(batch)  # warm up
    while not take():
        pass
    received = 0
    began = clock()
    intervals.begin(began)
    limit = began + plan.seconds if plan.seconds else float("inf")
    now = began
    is_interrupted = False
    try:
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
            done += take()
            now = clock()
            if intervals.is_due(now):
                intervals.report(now, done * plan.batch + received)
            if progress.is_due(now):
                rate = (done * plan.batch + received) * plan.size / (now - began)
                progress.show(f"{plan.op.name.lower()} {size_text(plan.size)}: {rate / 1e6:.0f} MB/s")
    except KeyboardInterrupt:
        if not done:
            raise
        is_interrupted = True
    return Result(
        plan, done * plan.batch, now - began, {}, 0, received, intervals.reports, is_interrupted=is_interrupted
    )
