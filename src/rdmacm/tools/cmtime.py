"""``rdmacm cmtime``: measure the time of each step of a connection, and the memory of an open one."""

from __future__ import annotations

import argparse
import errno
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rdmacm.address import SockAddr, format_address
from rdmacm.cmid import CmEvent, CmId, EventChannel
from rdmacm.constants import CmEventType
from rdmacm.errors import CmTimeoutError, RdmaError, cm_error
from rdmacm.provider.connparam import ConnParam
from rdmacm.tools.arguments import (
    add_address,
    add_host,
    add_number,
    add_port,
    add_provider,
    add_resolution_timeout,
    add_wait_limit,
    integer_between,
    take_host,
)
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.connection import find_server
from rdmacm.tools.core_name import core_line, core_name
from rdmacm.tools.measure import ProgressLine, Samples, resident_bytes
from rdmacm.tools.output import Page, Parser, bold, write, write_json
from rdmacm.tools.serving import ServerProcess, announce, bind, own_host
from rdmacm.tools.waiting import PeerWait, next_event
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import QPState
from rdmacm.verbs.qp import QP, QPInitAttr

PAGE = Page(
    command="cmtime",
    summary=COMMANDS["cmtime"],
    description="""
        The client, the end with HOST, connects N times to the server and reports the time of each step: creating the
        id, resolving address and route, creating the queue pair, connecting (until the server's answer has arrived),
        moving the queue pair to ready-to-send, confirming, disconnecting and destroying. Options are those of
        cmtime(1) of librdmacm, and the first columns of the table are its columns. With --local the server is a
        second process on this machine.

        With --serial, each connection completes all steps before the next one starts. With --concurrent, all
        connections complete a step before the next step, up to 256 at a time. With --hold, all connections stay open
        until the last one is established, and the memory of each is reported: the growth of the resident memory of
        both processes divided by the number of connections. The server reports its own memory in the private data of
        its answers.

        With --json, writes one object: server, core (c or python; null on the kernel's devices), connections, mode,
        hold, steps (name, count, total_us, min, mean, p50, p99 and max in microseconds), seconds,
        connections_per_second (both without disconnecting and destroying) and memory (client_bytes and server_bytes
        of each connection; null without --hold).
    """,
    examples=(
        ("rdmacm cmtime --local -c 1000", "Time a thousand connections to a second process on this machine."),
        ("rdmacm cmtime --local -c 10000 --concurrent --hold", "Keep ten thousand connections open at once."),
        ("rdmacm cmtime", "Serve clients until Ctrl-C."),
        ("rdmacm cmtime storage-7 --json", "Time a hundred connections to another host."),
    ),
    see_also="cmtime(1), rdmacm rping, rdmacm perf",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"),
)

#: Maximum number of connections that wait for an event at a time.
_WINDOW = 256
_MAX_CONNECTIONS = 100_000
#: The greatest number of retries of a resolution.
_MAX_RETRIES = 1000
_CAP = QPCap(max_send_wr=1, max_recv_wr=1)
#: The private data of the server's answer: magic number, and resident memory of the server in bytes.
_ANSWER = struct.Struct(">8sQ")
_MAGIC = b"cmtime 1"
#: Steps that do not count as setup.
_TEARDOWN = ("disconnect", "destroy")
#: Events of a resolution that failed.
_UNRESOLVED = (CmEventType.ADDR_ERROR, CmEventType.ROUTE_ERROR)
_ENDED = frozenset((CmEventType.DISCONNECTED, CmEventType.CONNECT_ERROR, CmEventType.UNREACHABLE, CmEventType.REJECTED))


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm cmtime``."""
    add = parser.add_argument
    add_host(parser)
    add("-s", "--server", metavar="ADDR", help="Run as the client of the server at this address, as HOST.")
    add_address(parser)
    what = "Number of connections; the server takes any number"
    add_number(parser, ("-c", "--connections"), integer_between(1, _MAX_CONNECTIONS), 100, "N", what)
    add_port(parser, 7471)
    what = "How often to repeat the resolution of an address or a route that times out"
    add_number(parser, ("-r", "--retries"), integer_between(0, _MAX_RETRIES), 2, "N", what)
    add_resolution_timeout(parser)
    add("--local", action="store_true", help="Start the server as a second process on this machine.")
    add("--serial", action="store_true", help="Set up one connection after the other (the default).")
    add("--concurrent", action="store_true", help="Set up all connections step by step.")
    add("--hold", action="store_true", help="Keep all connections open, and measure their memory.")
    add("--json", action="store_true", help="Write one JSON object.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Serve or measure."""
    take_host(args, "server")
    if args.local and args.server is not None:
        args.parser.error("-s and --local exclude each other")
    if args.serial and args.concurrent:
        args.parser.error("--serial and --concurrent exclude each other")
    if args.server is not None:
        return _measure(args, args.server, args.port)
    if not args.local:
        return _serve(args)
    host = args.bind or own_host(args.provider)
    argv = ("cmtime", "-b", host, "-p", "0")
    with ServerProcess(*argv, timeout=args.timeout, provider=args.provider) as server:
        return _measure(args, host, server.port)


# -- the server ----------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    queues: dict[str, CQ] = {}
    ids: set[CmId] = set()
    with EventChannel(args.provider) as channel, CmId(channel) as listener:
        try:
            bind(listener, args.bind, args.port)
            listener.listen()
            announce(listener)
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
    """Answer a request; return whether it was accepted."""
    context = cmid.verbs
    try:
        if number_open > _MAX_CONNECTIONS:  # a client has one more than it measures
            cmid.reject(b"too many connections")
            return False
        queue = queues.get(context.name)
        if queue is None:
            queue = queues[context.name] = CQ(context, 16)
        cmid.create_qp(QPInitAttr(scq=queue, rcq=queue, cap=_CAP))
        cmid.accept(ConnParam(_ANSWER.pack(_MAGIC, resident_bytes())))
    except RdmaError:  # the client gave up meanwhile, or a resource is exhausted
        with suppress(RdmaError):
            cmid.reject()
        return False
    return True


# -- the client ----------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _TimedConnection:
    """One connection of the client."""

    cmid: CmId
    qp: QP | None = None


class _StepTimer:
    """Executes the steps of connections and measures their times."""

    def __init__(
        self, channel: EventChannel, find_cq: Callable[[Context], CQ], waits: PeerWait, timeout_ms: int, retries: int
    ) -> None:
        self.channel = channel
        #: Times of a step for one connection, by name of the step.
        self.steps: dict[str, Samples] = {}
        #: Total time of a step for all connections, in seconds.
        self.seconds: dict[str, float] = {}
        #: The server's resident memory in bytes, from each of its answers.
        self.server_memory: list[int] = []
        #: Whether the answer to a request has established the connection, as on iWARP, which has no third message.
        self._is_iwarp = False
        #: Returns the completion queue of a device.
        self._find_cq = find_cq
        self._waits = waits
        #: The timeout of a resolution in milliseconds, and how often one that times out is repeated.
        self._timeout_ms, self._retries = timeout_ms, retries

    def set_up(self, count: int, destination: SockAddr, source: SockAddr | None) -> list[_TimedConnection]:
        """Set up ``count`` connections, each step for all of them before the next step."""
        batch: list[_TimedConnection] = []
        try:
            with self._timed("create id"):
                at = time.perf_counter()
                for _ in range(count):
                    batch.append(_TimedConnection(CmId(self.channel)))
                    before, at = at, time.perf_counter()
                    self.steps["create id"].add(at - before)
            if source is not None:
                self.step("bind addr", batch, lambda each: each.cmid.bind_addr(source))
            self.step(
                "resolve addr",
                batch,
                lambda each: each.cmid.resolve_addr(destination, timeout_ms=self._timeout_ms),
                CmEventType.ADDR_RESOLVED,
            )
            self.step(
                "resolve route",
                batch,
                lambda each: each.cmid.resolve_route(self._timeout_ms),
                CmEventType.ROUTE_RESOLVED,
            )
            self.step("create qp", batch, self._create_qp)
            self.step("connect", batch, self._connect, CmEventType.CONNECT_RESPONSE)
            if not self._is_iwarp:
                self.step("modify qp", batch, self._make_ready)
                self.step("establish", batch, lambda each: each.cmid.establish())
        except BaseException:
            for each in batch:
                self.destroy(each)
            raise
        return batch

    def take_down(self, batch: list[_TimedConnection]) -> None:
        """Disconnect and destroy connections."""
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
        batch: list[_TimedConnection],
        call: Callable[[_TimedConnection], None],
        outcome: CmEventType | None = None,
    ) -> None:
        """Execute one step for each connection; with ``outcome``, wait for that event of each connection."""
        under_way: dict[CmId, float] = {}
        retried: dict[CmId, int] = {}
        begun = 0

        def take_event() -> None:
            assert outcome is not None
            failed = self._take_event(under_way, outcome, samples)
            if failed is None:
                return
            # A resolution that timed out.
            cmid, error = failed
            retried[cmid] = retried.get(cmid, 0) + 1
            if retried[cmid] > self._retries:
                raise error
            call(next(each for each in batch if each.cmid is cmid))

        self._waits.step = name
        self._waits.progress = lambda: f"{begun} begun, {begun - len(under_way)} answered"
        with self._timed(name):
            samples = self.steps[name]
            at = time.perf_counter()
            for each in batch:
                call(each)
                before, at = at, time.perf_counter()
                if outcome is None:
                    samples.add(at - before)
                    continue
                begun += 1
                under_way[each.cmid] = before
                if len(under_way) >= _WINDOW:
                    take_event()
                    at = time.perf_counter()
            while under_way and outcome is not None:
                take_event()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.steps.setdefault(name, Samples())
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def _take_event(
        self, under_way: dict[CmId, float], outcome: CmEventType, samples: Samples
    ) -> tuple[CmId, RdmaError] | None:
        """Take one event. Returns the id and the error of a resolution that timed out; raises any other error."""
        with self._waits.briefly(partial(next_event, self.channel)) as event:
            error = event.error
            kind = event.type
            if kind is CmEventType.ESTABLISHED:
                self._is_iwarp, kind = True, CmEventType.CONNECT_RESPONSE
            if kind is outcome and not event.status:
                at = under_way.pop(event.id, None)
                if at is not None:
                    samples.add(time.perf_counter() - at)
                    if outcome is CmEventType.CONNECT_RESPONSE:
                        self._note_memory(event)
            elif event.type in _UNRESOLVED and isinstance(error, CmTimeoutError):
                return event.id, error
            elif error is not None:
                raise error
            elif event.type is CmEventType.DISCONNECTED:
                raise cm_error(
                    errno.ECONNRESET, "the server has ended the connection", "cmtime", event.id.peer_addr_text
                )
        return None

    def _note_memory(self, event: CmEvent) -> None:
        data = event.private_data[: _ANSWER.size]
        if len(data) == _ANSWER.size:
            magic, memory = _ANSWER.unpack(data)
            if magic == _MAGIC and 0 < memory < 1 << 48:
                self.server_memory.append(memory)

    def _create_qp(self, each: _TimedConnection) -> None:
        context = each.cmid.verbs
        queue = self._find_cq(context)
        each.qp = QP(each.cmid.pd, QPInitAttr(scq=queue, rcq=queue, cap=_CAP))
        each.qp.modify(*each.cmid.init_qp_attr(QPState.INIT))

    @staticmethod
    def _connect(each: _TimedConnection) -> None:
        assert each.qp is not None
        each.cmid.connect(ConnParam(qp_num=each.qp.qp_num))

    @staticmethod
    def _make_ready(each: _TimedConnection) -> None:
        assert each.qp is not None
        for state in (QPState.INIT, QPState.RTR, QPState.RTS):
            each.qp.modify(*each.cmid.init_qp_attr(state))

    @staticmethod
    def destroy(each: _TimedConnection) -> None:
        """Release everything. May be called twice."""
        if each.qp is not None:
            each.qp.close()
            each.qp = None
        each.cmid.destroy()


def _measure(args: argparse.Namespace, host: str, port: int) -> int:
    cmid, _ = find_server(
        host, port, source=args.bind, timeout_ms=args.timeout_ms, retries=args.retries, provider=args.provider
    )
    with cmid:
        destination = cmid.route.dst_addr
    assert destination is not None
    server = format_address(destination)
    waits = PeerWait(server, args.timeout)
    waits.hint = (
        "checking that a server listens on that port and runs, that firewalls let UDP port 4791 pass (rdmacm doctor"
        " C1), or a longer --timeout"
    )
    source = None if args.bind is None else (args.bind, 0)
    queues: dict[str, CQ] = {}  # one for each device
    progress = ProgressLine()
    held: list[_TimedConnection] = []

    def find_cq(context: Context) -> CQ:
        if context.name not in queues:
            queues[context.name] = stack.enter_context(CQ(context, 16))
        return queues[context.name]

    with EventChannel(args.provider) as channel, ExitStack() as stack:
        # So that initialization of the process is not measured. It stays open: the connections of librdmacm's server
        # share the completion queues of its first connection, and it refuses clients once that has ended.
        warm_up = _StepTimer(channel, find_cq, waits, args.timeout_ms, args.retries)
        first = warm_up.set_up(1, destination, source)
        timer = _StepTimer(channel, find_cq, waits, args.timeout_ms, args.retries)
        memory = resident_bytes()
        try:
            left = args.connections
            while left:
                count = left if args.concurrent else 1
                batch = timer.set_up(count, destination, source)
                left -= count
                if args.hold or args.concurrent:
                    held += batch
                else:
                    timer.take_down(batch)
                if progress.is_due(time.monotonic()):
                    progress.show(f"{args.connections - left} of {args.connections} connections")
            grown = resident_bytes() - memory
            timer.take_down(held)
            warm_up.take_down(first)
        except BaseException:
            for each in first + held:
                timer.destroy(each)
            raise
        finally:
            progress.close()
    _report(args, server, channel.provider.name, timer, grown)
    return 0


def _report(args: argparse.Namespace, server: str, provider: str, timer: _StepTimer, grown: int) -> None:
    mode = "concurrent" if args.concurrent else "serial"
    seconds = sum(spent for name, spent in timer.seconds.items() if name not in _TEARDOWN)
    memory = None
    if args.hold:
        reported = timer.server_memory
        server_grown = (reported[-1] - reported[0]) / max(1, len(reported) - 1) if reported else 0
        memory = {"client_bytes": round(grown / args.connections), "server_bytes": round(server_grown)}
    if args.json:
        steps = [
            {"name": name, "count": each.count, "total_us": round(timer.seconds[name] * 1e6, 1), **each.microseconds()}
            for name, each in timer.steps.items()
        ]
        write_json(
            {
                "server": server,
                "core": core_name(provider),
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
    write(_table(timer) + core_line(provider))
    rate = args.connections / seconds
    write(f"{args.connections} connections to {server}, {mode}: {rate:,.0f} a second\n")
    if memory is not None:
        client, served = (f"{memory[name] / 1024:.1f} KiB" for name in ("client_bytes", "server_bytes"))
        write(f"memory for each of {args.connections} open at once: client {client}, server {served}\n")


def _table(timer: _StepTimer) -> str:
    """The times of the steps: the columns of cmtime(1) first, in its format."""
    head = ("total ms", "max ms", "min us", "us / conn")
    lines = [bold(f"{'step':<14}" + "".join(f"{title:>11}" for title in head) + f"{'p50 us':>10}{'p99 us':>10}")]
    for name, each in timer.steps.items():
        times = each.microseconds()
        cells = (timer.seconds[name] * 1e3, times["max"] / 1e3, times["min"], timer.seconds[name] * 1e6 / each.count)
        own = (times["p50"], times["p99"])
        lines.append(f"{name:<13}:" + "".join(f"{cell:11.2f}" for cell in cells) + "".join(f"{t:10.2f}" for t in own))
    return "\n".join(lines) + "\n"
