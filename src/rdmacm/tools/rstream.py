"""``rdmacm rstream``: send bytes to and fro through an rsocket, with the protocol of rstream(1).

Before each test, the ends exchange 16 bytes. Then the client sends the transfers of an iteration, and the server as
many back. Sizes and counts are not sent: both ends must be started with the same values.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import socket as tcp
import time
from collections.abc import Iterator
from typing import NamedTuple, Self, TypeAlias

from rdmacm import rsocket
from rdmacm.address import format_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.constants import PortSpace
from rdmacm.errors import CmDisconnectedError, cm_error
from rdmacm.tools.arguments import (
    add_address,
    add_host,
    add_number,
    add_port,
    add_provider,
    add_wait_limit,
    integer_between,
    take_host,
)
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.names import looking_up
from rdmacm.tools.output import Page, Parser, write, write_error, write_json
from rdmacm.tools.serving import announce

PAGE = Page(
    command="rstream",
    summary=COMMANDS["rstream"],
    description="""
        The client sends bytes through a stream socket to the server, which sends as many back, for several sizes: first
        one transfer at a time (names in _lat), then many (_bw). With -I, -C or -S there is one test, named custom.
        Protocol, options and output are those of rstream(1) of librdmacm, which may run at the other end. The client is
        the end with HOST.

        A server reports its address on standard error, and serves one client. Both ends must be given the same -I, -C
        and -S. Calls block, as with -T b of librdmacm's, whose default is to try again at once.

        The columns are the name of the test, the bytes of a transfer, transfers in an iteration, iterations, the bytes
        of both directions, the time, and what follows from it: the rate, and the time of a transfer. With --json, each
        end writes one object instead: role (client or server) and tests, each with name, size, transfers, iterations,
        bytes and seconds.
    """,
    examples=(
        ("rdmacm rstream", "Serve a client with the usual tests."),
        ("rdmacm rstream localhost", "Run that client."),
        ("rdmacm rstream storage-7:7200 -S 4096 -C 100 -I 10 -T v", "Run one test and check the data."),
        ("rdmacm rstream storage-7 -T s", "Run the tests through TCP, for comparison."),
    ),
    see_also="rstream(1), rsocket(7), rdmacm rcopy, rdmacm perf",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE"),
)

#: What the tool needs of a socket: those of TCP and of RDMA have it.
Socket: TypeAlias = "tcp.socket | rsocket.socket"

SYNC = bytes(16)
#: Bytes of both buffers without -B.
_BUFFER = 1 << 19
#: The exponents of sizes: each size, and the one half as long again.
_EXPONENTS = range(7, 23)
_USUAL_SIZES = (1 << 6, 1 << 12, 1 << 16, 1 << 20)
#: How many transfers a test has, by the least size.
_COUNTS = ((1 << 20, 100), (1 << 16, 1000), (1 << 10, 10_000), (0, 100_000))
#: The letters of -T, and their words.
TESTS = {
    "s": "socket",
    "a": "async",
    "b": "blocking",
    "f": "fork",
    "n": "nonblocking",
    "r": "resolve",
    "v": "verify",
}


class StreamTest(NamedTuple):
    """A test: its name, the bytes of a transfer, transfers in an iteration, and iterations."""

    name: str
    size: int
    transfers: int
    iterations: int

    @property
    def total(self) -> int:
        """Bytes of both directions."""
        return 2 * self.size * self.transfers * self.iterations


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm rstream``."""
    add_stream_arguments(parser, TESTS)
    most = integer_between(0, (1 << 31) - 1)
    what = "Probe a peer that has sent nothing for so long."
    parser.add_argument("-k", "--keepalive", type=most, metavar="SECONDS", help=what)


def add_stream_arguments(parser: Parser, tests: dict[str, str]) -> None:
    """Add the arguments that ``rdmacm riostream`` has as well. ``tests``: the letters of -T, and their words."""
    add = parser.add_argument
    add_host(parser)
    add("-s", "--server", metavar="ADDR", help="Run as the client of the server at this address, as HOST.")
    add_address(parser)
    what = "The address format: ip or ipv6, which look up no name, or name (default: %(default)s)."
    add("-f", "--format", choices=("name", "ip", "ipv6"), default="name", help=what)
    most = integer_between(0, (1 << 31) - 1)
    add("-B", "--buffer", type=most, default=_BUFFER, metavar="BYTES", help="Size of both buffers (default: 524288).")
    add_number(parser, ("-i", "--inline"), most, 64, "BYTES", "Inline data of a work request")
    add("-I", "--iterations", type=most, metavar="N", help="How often the transfers are made (default: 1).")
    add("-C", "--transfers", type=most, metavar="N", help="Transfers of an iteration (default: 1000).")
    add("-S", "--size", metavar="BYTES", help="Bytes of a transfer (default: 1000); all: 31 sizes.")
    add_port(parser, 7471)
    names = "; ".join(f"{letter} or {word}" for letter, word in tests.items())
    add("-T", "--test", action="append", default=[], metavar="OPTION", help=f"{names}. May be repeated.")
    add("--json", action="store_true", help="Write one JSON object instead of the table.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    return run_tests(args, TESTS, StreamTests)


def run_tests(args: argparse.Namespace, letters: dict[str, str], kind: type[StreamTests]) -> int:
    """Run as the server or the client, with the tests of a tool."""
    take_host(args, "server")
    tests = kind(args, chosen_letters(args, letters))
    sizes = list(tests_of(args))
    with tests:
        write_head(args)
        for group in sizes:
            tests.run(group)
    if args.json:
        write_json({"role": "client" if args.server else "server", "tests": tests.done})
    return 0


def chosen_letters(args: argparse.Namespace, letters: dict[str, str]) -> frozenset[str]:
    """The letters of the options -T; ends the command for a wrong one."""
    chosen = {letter_of(text, letters) for text in args.test}
    if None in chosen:
        args.parser.error(f"-T is one of {', '.join(letters.values())}, or its first letter")
    return frozenset(letter for letter in chosen if letter)


def write_head(args: argparse.Namespace) -> None:
    """Write the names of the columns."""
    if not args.json:
        columns = f"{'name':<10}{'bytes':<8}{'xfers':<8}{'iters':<8}{'total':<8}"
        write(f"{columns}{'time':>8} {'Gb/sec':>10}{'usec/xfer':>13}\n")


def letter_of(text: str, letters: dict[str, str]) -> str | None:
    """The letter that an option -T means; None for a wrong one."""
    if len(text) == 1:
        return text if text in letters else None
    return next((letter for letter, word in letters.items() if text.lower().startswith(word[:5])), None)


def tests_of(args: argparse.Namespace) -> Iterator[list[StreamTest]]:
    """The tests of each connection."""
    is_all = args.size == "all"
    if args.iterations is not None or args.transfers is not None or (args.size is not None and not is_all):
        try:
            size = 1000 if args.size is None or is_all else integer_between(1, (1 << 31) - 1)(args.size)
        except argparse.ArgumentTypeError as problem:
            args.parser.error(f"-S: {problem}")
        # As in C, where iterations have another default than its page says.
        iterations = 1 if args.iterations is None else args.iterations
        yield [StreamTest("custom", size, 1000 if args.transfers is None else args.transfers, iterations)]
        return
    sizes = [1 << 6, *(part for each in _EXPONENTS for part in (1 << each, 3 << each - 1))]
    sizes = [size for size in sizes if is_all or size in _USUAL_SIZES]
    counts = {size: next(count for least, count in _COUNTS if size >= least) for size in sizes}
    yield [StreamTest(f"{size_text(size)}_lat", size, 1, counts[size]) for size in sizes]
    yield [StreamTest(f"{size_text(size)}_bw", size, counts[size], 1) for size in sizes]


class StreamTests:
    """One end."""

    next_sent: int
    next_seen: int

    def __init__(self, args: argparse.Namespace, chosen: frozenset[str]) -> None:
        self.args = args
        self.is_client: bool = args.server is not None
        self.chosen = chosen
        #: The tests that were made, as in the output.
        self.done: list[dict[str, object]] = []
        self._listener: Socket | None = None
        #: The next byte that is sent, and that is expected; -T v counts them.
        self.next_sent = self.next_seen = 0

    @property
    def _is_tcp(self) -> bool:
        return bool(self.chosen & {"s", "f"})

    def __enter__(self) -> Self:
        if not self.is_client:
            self._listener = self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()

    # -- connecting -----------------------------------------------------------------------------------

    def make(self, family: int) -> Socket:
        made = tcp.socket(family) if self._is_tcp else rsocket.socket(family, provider=self.args.provider)
        for option in (tcp.SO_SNDBUF, tcp.SO_RCVBUF):
            made.setsockopt(tcp.SOL_SOCKET, option, self.args.buffer or _BUFFER)
        made.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_NODELAY, 1)
        if not self._is_tcp:
            made.setsockopt(rsocket.SOL_RDMA, rsocket.RDMA_INLINE, self.args.inline)
        if getattr(self.args, "keepalive", None):
            made.setsockopt(tcp.SOL_SOCKET, tcp.SO_KEEPALIVE, 1)
            made.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_KEEPIDLE, self.args.keepalive)
            if not self.args.json:
                write(f"Keepalive: ON\n  time: {self.args.keepalive}\n")
        return made

    def _look_up(self, host: str | None, *, is_passive: bool) -> tuple[int, tuple[str, int], AddrInfo | None]:
        args = self.args
        family = {"ipv6": tcp.AF_INET6}.get(args.format, 0)
        if "r" in self.chosen and not is_passive:
            info = getaddrinfo(host, args.port, port_space=PortSpace.TCP, family=family, provider=args.provider)[0]
            if isinstance(info.dst_addr, tuple):
                return info.family, info.dst_addr[:2], info
        flags = tcp.AI_PASSIVE * is_passive | tcp.AI_NUMERICHOST * (args.format != "name")
        with looking_up(host, args.port):
            found = tcp.getaddrinfo(host, args.port, family, tcp.SOCK_STREAM, 0, flags)[0]
        return found[0], found[4], None  # type: ignore[return-value]

    def _listen(self) -> Socket:
        family, address, _ = self._look_up(self.args.bind, is_passive=True)
        made = self.make(family)
        try:
            made.setsockopt(tcp.SOL_SOCKET, tcp.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(1)
        except BaseException:
            made.close()
            raise
        if isinstance(made, rsocket.socket) and made.id is not None:
            announce(made.id)
        else:
            write_error(f"listening on {format_address(made.getsockname())}, TCP")
        return made

    def _connect(self) -> Socket:
        family, address, info = self._look_up(self.args.server, is_passive=False)
        made = self.make(family)
        try:
            made.settimeout(self.args.timeout)
            if self.args.bind:
                with looking_up(self.args.bind, 0):
                    made.bind((self.args.bind, 0))
            if info is not None and info.route and not self._is_tcp:
                route = b"".join(path.pack() for path in info.route)
                made.setsockopt(rsocket.SOL_RDMA, rsocket.RDMA_ROUTE, route)
            made.connect(address)
        except BaseException:
            made.close()
            raise
        return made

    # -- tests ----------------------------------------------------------------------------------------

    def run(self, tests: list[StreamTest]) -> None:
        """Make the tests of one connection."""
        if self._listener is None:
            stream = self._connect()
        else:
            stream = self._listener.accept()[0]
        if "f" in self.chosen and not self.is_client:
            self._run_in_child(stream, tests)
            return
        self._run(stream, tests)

    def _run_in_child(self, stream: Socket, tests: list[StreamTest]) -> None:
        child = os.fork()
        if not child:
            status = 1
            try:
                self._run(stream, tests)
                status = 0
            finally:
                os._exit(status)
        stream.close()
        if os.waitpid(child, 0)[1]:
            raise cm_error(errno.ECHILD, "the process of the client has failed", "fork")

    def _run(self, stream: Socket, tests: list[StreamTest]) -> None:
        with stream:
            buffer = memoryview(bytearray(max(test.size for test in tests) + len(SYNC)))
            for test in tests:
                self.measure(stream, test, buffer)
            try:
                stream.shutdown(tcp.SHUT_RDWR)
            except OSError as error:
                if error.errno != errno.ENOTCONN:  # the peer was faster
                    raise

    def measure(self, stream: Socket, test: StreamTest, buffer: memoryview) -> None:
        first, second = (self.send, self.receive) if self.is_client else (self.receive, self.send)
        first(stream, buffer[: len(SYNC)])
        second(stream, buffer[: len(SYNC)])
        part = buffer[: test.size]
        started = time.perf_counter()
        for _ in range(test.iterations):
            for _ in range(test.transfers):
                first(stream, part)
            for _ in range(test.transfers):
                second(stream, part)
        self.report(test, time.perf_counter() - started)

    def send(self, stream: Socket, data: memoryview) -> None:
        if "v" in self.chosen:
            data[:] = pattern(self.next_sent, len(data))
            self.next_sent += len(data)
        if not self.chosen & {"n", "a"}:
            stream.sendall(data)
            return
        done = 0
        while done < len(data):
            self.poll(stream, select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                done += stream.send(data[done:], tcp.MSG_DONTWAIT)

    def receive(self, stream: Socket, into: memoryview) -> None:
        done = 0
        while done < len(into):
            self.poll(stream, select.POLLIN)
            try:
                got = stream.recv_into(into[done:], 0, tcp.MSG_DONTWAIT if self.chosen & {"n", "a"} else 0)
            except BlockingIOError:
                continue
            if not got:
                raise CmDisconnectedError(errno.ECONNRESET, "the peer has closed the stream", "recv")
            done += got
        if "v" in self.chosen:
            expected = pattern(self.next_seen, len(into))
            if into != expected:
                at = next(number for number, byte in enumerate(into) if byte != expected[number])
                raise cm_error(errno.EIO, f"data verification failed byte {self.next_seen + at}", "recv")
            self.next_seen += len(into)

    def poll(self, stream: Socket, bits: int) -> None:
        if "a" in self.chosen and not rsocket.poll([(stream, bits)], self.args.timeout if self.is_client else None):
            raise cm_error(errno.ETIMEDOUT, f"no answer within {self.args.timeout:g} s", "poll", str(self.args.server))

    def report(self, test: StreamTest, seconds: float) -> None:
        if self.args.json:
            fields = test._asdict()
            self.done.append({**fields, "bytes": test.total, "seconds": round(seconds, 6)})
            return
        microseconds = max(seconds * 1e6, 1.0)
        write(
            f"{test.name:<10}{size_text(test.size):<8}{count_text(test.transfers):<8}{count_text(test.iterations):<8}"
            f"{size_text(test.total):<8}{seconds:8.2f}s{test.total * 8 / 1000 / microseconds:10.2f}"
            f"{microseconds / max(test.iterations, 1) / max(2 * test.transfers, 1):11.2f}\n"
        )


def pattern(start: int, length: int) -> bytes:
    """Bytes that count up, modulo 256."""
    start %= 256
    return (bytes(range(256)) * (length // 256 + 2))[start : start + length]


def size_text(size: int) -> str:
    """A number of bytes as librdmacm's tools write it: ``64``, ``1.5k``, ``100m``."""
    for exponent, unit in ((30, "g"), (20, "m"), (10, "k")):
        if size >= 1 << exponent:
            tenths = (size % (1 << exponent)) * 10 >> exponent if size >> exponent < 10 else 0
            return f"{size >> exponent}.{tenths}{unit}" if tenths else f"{size >> exponent}{unit}"
    return str(size)


def count_text(count: int) -> str:
    """A count as librdmacm's tools write it: ``100``, ``10k``."""
    for limit, unit in ((10**9, "b"), (10**6, "m"), (1000, "k")):
        if count >= limit:
            return f"{count // limit}{unit}"
    return str(count)
