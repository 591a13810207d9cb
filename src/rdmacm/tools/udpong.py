"""``rdmacm udpong``: datagrams to and fro through rsockets, with the protocol of udpong(1).

Each message begins with 8 bytes: the operation, the client's id, a number, 0, and a count of 4 bytes in network byte
order. LOGIN gives the client an id; START sets the server's count for it to 0; ECHO and DATA count, and END returns the
count. The server sends all but DATA back. The client numbers what it expects back, and sends it again if nothing comes:
datagrams may be lost. Control messages have 16 bytes, DATA and ECHO the size of a transfer.
"""

from __future__ import annotations

import argparse
import errno
import select
import socket as udp
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from rdmacm import rsocket
from rdmacm.errors import CmTimeoutError
from rdmacm.tools.arguments import (
    add_address,
    add_host,
    add_port,
    add_provider,
    add_wait_limit,
    integer_between,
    take_host,
)
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.names import looking_up
from rdmacm.tools.output import Page, Parser, write, write_error, write_json
from rdmacm.tools.rstream import chosen_letters, count_text, size_text
from rdmacm.tools.serving import announce_address

PAGE = Page(
    command="udpong",
    summary=COMMANDS["udpong"],
    description="""
        The client sends datagrams to the server, for several sizes: first one at a time, which the server sends back
        (names in _lat), then many, which the server counts (_bw). With -C or -S there is one test, named custom; -T
        echo has its datagrams sent back. Protocol, options and output are those of udpong(1) of librdmacm, which may
        run at the other end. The client is the end with HOST.

        A server reports its address on standard error, and serves clients until it is interrupted. A client that hears
        nothing for --timeout gives up. Calls block, as with -T b of librdmacm's, whose default is to try again at once.
        Tests of datagrams that are longer than the way to the server carries are left out.

        The columns are the name of the test, the bytes of a datagram, how many the server has got (with echo: those of
        both directions), their bytes, the time, and what follows from it: the rate, and the time of a datagram. With
        --json, the client writes one object instead: tests, each with name, size, transfers, received, bytes and
        seconds.
    """,
    examples=(
        ("rdmacm udpong", "Serve clients."),
        ("rdmacm udpong localhost", "Run a client with the usual tests."),
        ("rdmacm udpong storage-7:7200 -S 512 -C 1000 -T echo", "Run one test."),
        ("rdmacm udpong storage-7 -T s", "Run the tests through UDP, for comparison."),
    ),
    see_also="udpong(1), rsocket(7), rdmacm udaddy, rdmacm rstream",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE"),
)

#: What the tool needs of a socket.
_Socket: TypeAlias = "udp.socket | rsocket.socket"

_HEADER = struct.Struct("!BBBxI")
_CONTROL_SIZE = 16
#: Bytes of the longest message.
_MAX_SIZE = _HEADER.size + 2048
_BUFFER = 1 << 19
_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536)
#: How many datagrams a test has, by the least size; a tenth of it one at a time.
_COUNTS = ((1 << 10, 10_000), (0, 100_000))
#: The letters of -T, and their words.
_TESTS = {"s": "socket", "a": "async", "b": "blocking", "n": "nonblocking", "e": "echo"}
#: Seconds after which a message that was not answered is sent again.
_AGAIN_SECONDS = 0.1


class _Operation(IntEnum):
    LOGIN = 0
    START = 1
    DATA = 2
    ECHO = 3
    END = 4


class _Test(NamedTuple):
    name: str
    size: int
    transfers: int
    is_echo: bool


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm udpong``."""
    add = parser.add_argument
    add_host(parser)
    add("-s", "--server", metavar="ADDR", help="Run as the client of the server at this address, as HOST.")
    add_address(parser)
    most = integer_between(0, (1 << 31) - 1)
    add("-B", "--buffer", type=most, default=_BUFFER, metavar="BYTES", help="Size of both buffers (default: 524288).")
    add("-C", "--transfers", type=most, metavar="N", help="Datagrams of the test (default: 1000).")
    size = integer_between(_CONTROL_SIZE, _MAX_SIZE)
    add("-S", "--size", type=size, metavar="BYTES", help="Bytes of a datagram, 16 or more (default: 1000).")
    add_port(parser, 7174)
    names = "; ".join(f"{letter} or {word}" for letter, word in _TESTS.items())
    add("-T", "--test", action="append", default=[], metavar="OPTION", help=f"{names}. May be repeated.")
    add("--json", action="store_true", help="Write one JSON object instead of the table; client only.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    take_host(args, "server")
    chosen = chosen_letters(args, _TESTS)
    if args.server is None:
        if args.json:
            args.parser.error("--json is an option of the client, and needs HOST")
        return _serve(args, chosen)
    return _Client(args, chosen).work()


def _open(args: argparse.Namespace, chosen: frozenset[str], host: str | None) -> tuple[_Socket, Any]:
    """A socket for an address, and the address."""
    with looking_up(host, args.port):
        family, kind, _, _, address = udp.getaddrinfo(host, args.port, 0, udp.SOCK_DGRAM, 0, udp.AI_PASSIVE)[0]
    made = udp.socket(family, kind) if "s" in chosen else rsocket.socket(family, kind, provider=args.provider)
    for option in (udp.SO_SNDBUF, udp.SO_RCVBUF):
        made.setsockopt(udp.SOL_SOCKET, option, args.buffer or _BUFFER)
    return made, address


# -- the server ------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace, chosen: frozenset[str]) -> int:
    made, address = _open(args, chosen, args.bind)
    with made:
        made.bind(address)
        cmid = made.id if isinstance(made, rsocket.socket) else None
        announce_address(made.getsockname(), cmid.verbs.name if cmid is not None else None)
        counts = [0] * 256
        clients = 0
        message = memoryview(bytearray(_MAX_SIZE))
        while True:
            size, source = _receive(made, message, chosen)
            if size < _HEADER.size:
                continue
            operation, number, sequence, count = _HEADER.unpack_from(message)
            if operation == _Operation.LOGIN:
                write(f"client login from {source[0]}\n")
                number, clients = clients % 256, clients + 1
            if operation in (_Operation.LOGIN, _Operation.START):
                counts[number] = 0
            elif operation == _Operation.END:
                count = counts[number]
            else:
                counts[number] += 1
            if operation in (_Operation.LOGIN, _Operation.START, _Operation.ECHO, _Operation.END):
                _HEADER.pack_into(message, 0, operation, number, sequence, count)
                _send(made, message[:size], source, chosen)


def _receive(made: _Socket, message: memoryview, chosen: frozenset[str]) -> tuple[int, Any]:
    while True:
        if chosen & {"a", "n"}:
            rsocket.poll([(made, select.POLLIN)])
        with suppress(BlockingIOError):
            return made.recvfrom_into(message, 0, udp.MSG_DONTWAIT if chosen & {"a", "n"} else 0)


def _send(made: _Socket, message: memoryview, address: Any, chosen: frozenset[str]) -> None:
    """Send to an address, or to that of connect() if it is None."""
    while True:
        if "a" in chosen:
            rsocket.poll([(made, select.POLLOUT)])
        with suppress(BlockingIOError):
            flags = udp.MSG_DONTWAIT if chosen & {"a", "n"} else 0
            made.send(message, flags) if address is None else made.sendto(message, flags, address)
            return


# -- the client ------------------------------------------------------------------------------------------------


class _Client:
    def __init__(self, args: argparse.Namespace, chosen: frozenset[str]) -> None:
        self._args = args
        self._chosen = chosen
        self._message = memoryview(bytearray(_MAX_SIZE))
        self._answer = memoryview(bytearray(_MAX_SIZE))
        self._id = self._next = 0
        self._done: list[dict[str, object]] = []

    def work(self) -> int:
        """Make the tests."""
        args = self._args
        made, address = _open(args, self._chosen, args.server)
        with made:
            if args.bind:
                with looking_up(args.bind, 0):
                    made.bind((args.bind, 0))
            if not args.json:
                write(f"{'name':<10}{'bytes':<8}{'xfers':<8}{'total':<8}{'time':>8} {'Gb/sec':>10}{'usec/xfer':>13}\n")
            made.connect(address)
            self._ask(made, _Operation.LOGIN, _CONTROL_SIZE)
            self._id = self._answer[1]
            for test in self._tests():
                self._run(made, test)
        if args.json:
            write_json({"tests": self._done})
        return 0

    def _tests(self) -> Iterator[_Test]:
        args = self._args
        if args.size is not None or args.transfers is not None:
            size, transfers = args.size or 1000, 1000 if args.transfers is None else args.transfers
            yield _Test("custom", size, transfers, "e" in self._chosen)
            return
        for is_echo, name in ((True, "lat"), (False, "bw")):
            for size in _SIZES:
                count = next(count for least, count in _COUNTS if size >= least)
                yield _Test(f"{size_text(size)}_{name}", size, count // 10 if is_echo else count, is_echo)

    def _run(self, made: _Socket, test: _Test) -> None:
        try:
            self._ask(made, _Operation.START, _CONTROL_SIZE)
            started = time.perf_counter()
            for _ in range(test.transfers):
                if test.is_echo:
                    self._ask(made, _Operation.ECHO, test.size)
                else:
                    self._post(made, _Operation.DATA, test.size)
            self._ask(made, _Operation.END, _CONTROL_SIZE)
        except OSError as error:
            if error.errno != errno.EMSGSIZE or test.name == "custom":
                raise
            write_error(f"{test.name}: {error}")
        else:
            self._report(test, _HEADER.unpack_from(self._answer)[3], time.perf_counter() - started)

    def _post(self, made: _Socket, operation: _Operation, size: int) -> None:
        _HEADER.pack_into(self._message, 0, operation, self._id, self._next, 0)
        _send(made, self._message[:size], None, self._chosen)

    def _ask(self, made: _Socket, operation: _Operation, size: int) -> None:
        """Send a message until its answer comes."""
        until = time.monotonic() + self._args.timeout
        while True:
            self._post(made, operation, size)
            if self._await(made, size, time.monotonic() + _AGAIN_SECONDS):
                self._next = (self._next + 1) % 256
                return
            if time.monotonic() > until:
                text = f"no answer to {operation.name} within {self._args.timeout:g} s"
                raise CmTimeoutError(errno.ETIMEDOUT, text, "recv", str(self._args.server))

    def _await(self, made: _Socket, size: int, until: float) -> bool:
        """Wait for the answer of the present number; those of earlier messages that were sent twice do not count."""
        while (left := until - time.monotonic()) > 0:
            if not rsocket.poll([(made, select.POLLIN)], left):
                return False
            try:
                got = made.recv_into(self._answer, 0, udp.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionRefusedError):
                continue
            if got == size and self._answer[2] == self._next:
                return True
        return False

    def _report(self, test: _Test, received: int, seconds: float) -> None:
        transfers = 2 * test.transfers if test.is_echo else received
        total = transfers * test.size
        if self._args.json:
            shown = {"name": test.name, "size": test.size, "transfers": test.transfers, "received": received}
            self._done.append({**shown, "bytes": total, "seconds": round(seconds, 6)})
            return
        microseconds = max(seconds * 1e6, 1.0)
        write(
            f"{test.name:<10}{size_text(test.size):<8}{count_text(transfers):<8}{size_text(total):<8}"
            f"{seconds:8.2f}s{total * 8 / 1000 / microseconds:10.2f}{microseconds / max(transfers, 1):11.2f}\n"
        )
