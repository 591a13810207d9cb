"""``rdmacm cmtime``: how long each step of a connection takes, and what an open one costs in memory."""

from __future__ import annotations

import argparse
import errno
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from rdmacm.address import SockAddr, format_address
from rdmacm.cmid import CmEvent, CmId, EventChannel
from rdmacm.connparam import ConnParam
from rdmacm.constants import CmEventType
from rdmacm.errors import CmTimeoutError, RdmaError, cm_error
from rdmacm.tools.link import Twin, add_provider, add_roles, bind, find, number, port_number, say_listening
from rdmacm.tools.measure import Progress, Samples, resident_bytes
from rdmacm.tools.output import Page, Parser, table, write, write_json
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import QPState
from rdmacm.verbs.qp import QP, QPInitAttr

PAGE = Page(
    command="cmtime",
    summary="time each step of setting up connections",
    description="""
        Connects N times to a server, and writes how long each step took: making the id, resolving address and
        route, making the queue pair, connecting (until the answer of the server is here), taking the queue pair to
        ready-to-send, confirming, disconnecting and destroying. Without -s and -c the server is a second process on
        this machine.

        One connection goes through all steps before the next (--serial), or all go through one step before the
        next step, up to 256 at a time (--concurrent). With --hold all stay open until the last is, and what one takes
        of memory is written: the growth of a process's resident memory by the number of connections. The server
        tells its own in the private data of its answers.

        With --json, one object: server, connections, mode, hold, steps (name, count, total_us, min, mean, p50, p99
        and max in microseconds), seconds, connections_per_second (both without disconnecting and destroying)
        and memory (client_bytes and server_bytes for each connection), which is null unless connections were held.
    """,
    examples=(
        ("rdmacm cmtime -n 1000", "Time a thousand connections to a second process on this machine."),
        ("rdmacm cmtime --connections 10000 --concurrent --hold", "Keep ten thousand open at once."),
        ("rdmacm cmtime -s", "Serve others."),
        ("rdmacm cmtime -c storage-7 -n 100 --json", "Time a hundred connections to another host."),
    ),
    see_also="cmtime(1), rdmacm rping, rdmacm perf",
)

#: Connections under way at a time.
_WINDOW = 256
_MOST = 100_000
_SECONDS = 30.0
_CAP = QPCap(max_send_wr=1, max_recv_wr=1)
#: The private data of an answer: that it is this tool's, and the resident memory of the server.
_ANSWER = struct.Struct(">8sQ")
_MAGIC = b"cmtime 1"
_TEARDOWN = ("disconnect", "destroy")
_ENDED = frozenset((CmEventType.DISCONNECTED, CmEventType.CONNECT_ERROR, CmEventType.UNREACHABLE, CmEventType.REJECTED))


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm cmtime``."""
    add_roles(parser, host=True)
    parser.add_argument("-b", "--bind", metavar="ADDR", help="The own address: to listen at, or to connect from.")
    parser.add_argument(
        "-p",
        "--port",
        type=port_number,
        default=7471,
        metavar="PORT",
        help="The server's port; 0, with -s, takes a free one (default: %(default)s).",
    )
    parser.add_argument(
        "-n",
        "--connections",
        type=number(1, _MOST),
        default=100,
        metavar="N",
        help="How many connections (default: %(default)s).",
    )
    parser.add_argument("--serial", action="store_true", help="One connection after the other; so it is by default.")
    parser.add_argument("--concurrent", action="store_true", help="All connections step by step.")
    parser.add_argument("--hold", action="store_true", help="Keep all open at once, and measure memory.")
    parser.add_argument("--json", action="store_true", help="Write one object.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Serve or measure."""
    if args.server and args.client is not None:
        args.parser.error("-s and -c exclude each other")
    if args.serial and args.concurrent:
        args.parser.error("--serial and --concurrent exclude each other")
    if args.server:
        return _serve(args)
    if args.client is not None:
        return _measure(args, args.client, args.port)
    host = args.bind or "127.0.0.1"
    with Twin("cmtime", "-s", "-b", host, "-p", "0", *(["--provider", args.provider] if args.provider else [])) as twin:
        return _measure(args, host, twin.port)


# -- the server ----------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    queues: dict[str, CQ] = {}
    ids: set[CmId] = set()
    with EventChannel(args.provider) as channel, CmId(channel) as listener:
        try:
            bind(listener, args.bind, args.port)
            listener.listen()
            say_listening(listener)
            for event in channel:
                with event:
                    cmid = event.id
                    ended = event.type in _ENDED
                    if event.type is CmEventType.CONNECT_REQUEST:
                        ended = not _accept(cmid, queues, len(ids))
                        ids.add(cmid)
                    elif ended:
                        with suppress(RdmaError):
                            cmid.disconnect()
                if ended:
                    ids.discard(cmid)
                    cmid.destroy()
        finally:
            for cmid in ids:
                cmid.destroy()
            for queue in queues.values():
                queue.close()
    return 0


def _accept(cmid: CmId, queues: dict[str, CQ], number_open: int) -> bool:
    """Answer a request; whether it was accepted."""
    context = cmid.verbs
    assert context is not None
    try:
        if number_open >= _MOST:
            cmid.reject(b"too many connections")
            return False
        queue = queues.get(context.name)
        if queue is None:
            queue = queues[context.name] = CQ(context, 16)
        cmid.create_qp(QPInitAttr(scq=queue, rcq=queue, cap=_CAP))
        cmid.accept(ConnParam(_ANSWER.pack(_MAGIC, resident_bytes())))
    except RdmaError:  # the client has given up meanwhile, or there is no more room
        with suppress(RdmaError):
            cmid.reject()
        return False
    return True


# -- the client ----------------------------------------------------------------------------------------------


class _Connection:
    """One connection being set up."""

    __slots__ = ("cmid", "qp")

    def __init__(self, channel: EventChannel) -> None:
        self.cmid = CmId(channel)
        self.qp: QP | None = None


class _Meter:
    """Takes connections through the steps, and the time of each."""

    def __init__(self, channel: EventChannel, find_cq: Callable[[Context], CQ]) -> None:
        self.channel = channel
        self.steps: dict[str, Samples] = {}
        self.seconds: dict[str, float] = {}
        self.server_memory: list[int] = []
        self._find_cq = find_cq

    def set_up(self, count: int, destination: SockAddr, source: SockAddr | None) -> list[_Connection]:
        """Connect so many at a time."""
        batch: list[_Connection] = []
        try:
            with self._timed("create id"):
                for _ in range(count):
                    at = time.perf_counter()
                    batch.append(_Connection(self.channel))
                    self.steps["create id"].add(time.perf_counter() - at)
            if source is not None:
                self.step("bind addr", batch, lambda each: each.cmid.bind_addr(source))
            self.step(
                "resolve addr", batch, lambda each: each.cmid.resolve_addr(destination), CmEventType.ADDR_RESOLVED
            )
            self.step("resolve route", batch, lambda each: each.cmid.resolve_route(), CmEventType.ROUTE_RESOLVED)
            self.step("create qp", batch, self._create_qp)
            self.step("connect", batch, self._connect, CmEventType.CONNECT_RESPONSE)
            self.step("modify qp", batch, self._make_ready)
            self.step("establish", batch, lambda each: each.cmid.establish())
        except BaseException:
            for each in batch:
                self.destroy(each)
            raise
        return batch

    def take_down(self, batch: list[_Connection]) -> None:
        """Disconnect and destroy."""
        try:
            self.step("disconnect", batch, lambda each: each.cmid.disconnect(), CmEventType.DISCONNECTED)
        except BaseException:
            for each in batch:
                self.destroy(each)
            raise
        self.step("destroy", batch, self.destroy)

    def step(
        self,
        name: str,
        batch: list[_Connection],
        call: Callable[[_Connection], None],
        outcome: CmEventType | None = None,
    ) -> None:
        """One step of each connection; where its outcome is an event, until that has come."""
        under_way: dict[CmId, float] = {}
        with self._timed(name):
            samples = self.steps[name]
            for each in batch:
                at = time.perf_counter()
                call(each)
                if outcome is None:
                    samples.add(time.perf_counter() - at)
                    continue
                under_way[each.cmid] = at
                if len(under_way) >= _WINDOW:
                    self._take(under_way, outcome, samples)
            while under_way and outcome is not None:
                self._take(under_way, outcome, samples)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.steps.setdefault(name, Samples())
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def _take(self, under_way: dict[CmId, float], outcome: CmEventType, samples: Samples) -> None:
        try:
            event = self.channel.get_event(_SECONDS)
        except CmTimeoutError:
            why = f"no {outcome.name} came within {_SECONDS:.0f} s"
            raise cm_error(errno.ETIMEDOUT, why, "cmtime") from None
        with event:
            if event.type is outcome and not event.status:
                at = under_way.pop(event.id, None)
                if at is not None:
                    samples.add(time.perf_counter() - at)
                    if outcome is CmEventType.CONNECT_RESPONSE:
                        self._note_memory(event)
            elif (error := event.error) is not None:
                raise error
            elif event.type is CmEventType.DISCONNECTED:
                raise cm_error(
                    errno.ECONNRESET, "the server has ended the connection", "cmtime", event.id.peer_addr_text
                )

    def _note_memory(self, event: CmEvent) -> None:
        data = event.private_data[: _ANSWER.size]
        if len(data) == _ANSWER.size:
            magic, memory = _ANSWER.unpack(data)
            if magic == _MAGIC and 0 < memory < 1 << 48:
                self.server_memory.append(memory)

    def _create_qp(self, each: _Connection) -> None:
        context = each.cmid.verbs
        assert context is not None
        queue = self._find_cq(context)
        each.qp = QP(each.cmid.pd, QPInitAttr(scq=queue, rcq=queue, cap=_CAP))
        each.qp.modify(*each.cmid.init_qp_attr(QPState.INIT))

    @staticmethod
    def _connect(each: _Connection) -> None:
        assert each.qp is not None
        each.cmid.connect(ConnParam(qp_num=each.qp.qp_num))

    @staticmethod
    def _make_ready(each: _Connection) -> None:
        assert each.qp is not None
        for state in (QPState.INIT, QPState.RTR, QPState.RTS):
            each.qp.modify(*each.cmid.init_qp_attr(state))

    @staticmethod
    def destroy(each: _Connection) -> None:
        """Say goodbye and release everything; again is no matter."""
        if each.qp is not None:
            each.qp.close()
            each.qp = None
        each.cmid.destroy()


def _measure(args: argparse.Namespace, host: str, port: int) -> int:
    with find(host, port, source=args.bind, provider=args.provider)[0] as cmid:
        destination = cmid.route.dst_addr
    assert destination is not None
    server = format_address(destination)
    source = None if args.bind is None else (args.bind, 0)
    queues: dict[str, CQ] = {}  # one for each device
    progress = Progress()
    held: list[_Connection] = []

    def find_cq(context: Context) -> CQ:
        if context.name not in queues:
            queues[context.name] = stack.enter_context(CQ(context, 16))
        return queues[context.name]

    with EventChannel(args.provider) as channel, ExitStack() as stack:
        first = _Meter(channel, find_cq)  # what is done once in a process is no connection's
        first.take_down(first.set_up(1, destination, source))
        meter = _Meter(channel, find_cq)
        memory = resident_bytes()
        try:
            left = args.connections
            while left:
                count = left if args.concurrent else 1
                batch = meter.set_up(count, destination, source)
                left -= count
                if args.hold or args.concurrent:
                    held += batch
                else:
                    meter.take_down(batch)
                if progress.is_due(time.monotonic()):
                    progress.show(f"{args.connections - left} of {args.connections} connections")
            grown = resident_bytes() - memory
            meter.take_down(held)
        except BaseException:
            for each in held:
                meter.destroy(each)
            raise
        finally:
            progress.close()
    _report(args, server, meter, grown)
    return 0


def _report(args: argparse.Namespace, server: str, meter: _Meter, grown: int) -> None:
    mode = "concurrent" if args.concurrent else "serial"
    seconds = sum(spent for name, spent in meter.seconds.items() if name not in _TEARDOWN)
    memory = None
    if args.hold:
        told = meter.server_memory
        theirs = (told[-1] - told[0]) / max(1, len(told) - 1) if told else 0
        memory = {"client_bytes": round(grown / args.connections), "server_bytes": round(theirs)}
    if args.json:
        steps = [
            {"name": name, "count": each.count, "total_us": round(meter.seconds[name] * 1e6, 1), **each.microseconds()}
            for name, each in meter.steps.items()
        ]
        write_json(
            {
                "server": server,
                "connections": args.connections,
                "mode": mode,
                "hold": args.hold,
                "steps": steps,
                "seconds": round(seconds, 6),
                "connections_per_second": round(args.connections / seconds, 1),
                "memory": memory,
            }
        )
        return
    head = ("step", "total ms", "average us", "p50 us", "p99 us", "max us")
    rows = []
    for name, each in meter.steps.items():
        times = each.microseconds()
        cells = [f"{times[key]:.1f}" for key in ("mean", "p50", "p99", "max")]
        rows.append((name, f"{meter.seconds[name] * 1e3:.1f}", *cells))
    write(table(head, rows, right=head[1:]))
    rate = args.connections / seconds
    write(f"{args.connections} connections to {server}, {mode}: {rate:,.0f} a second\n")
    if memory is not None:
        client, served = (f"{memory[name] / 1024:.1f} KiB" for name in ("client_bytes", "server_bytes"))
        write(f"memory for each of {args.connections} open at once: client {client}, server {served}\n")
