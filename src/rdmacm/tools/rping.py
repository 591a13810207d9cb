"""``rdmacm rping``: ping-pong by RDMA READ and WRITE, with the protocol of rping(1).

In each ping the client advertises a buffer with text; the server reads it and sends a go-ahead. Then the client
advertises another buffer; the server writes the text to it and sends a go-ahead. Advertisements and go-aheads are
messages of 16 bytes: address, rkey and size in network byte order. The protocol has no version number, so a peer that
runs something else is recognized only by the size of its messages.
"""

from __future__ import annotations

import argparse
import errno
import struct
import time
from itertools import count

from rdmacm.address import format_address
from rdmacm.cmid import CmId
from rdmacm.errors import CmDisconnectedError, RdmaError, cm_error, printable
from rdmacm.provider.connparam import ConnParam
from rdmacm.tools.arguments import (
    add_host,
    add_number,
    add_port,
    add_provider,
    add_roles,
    add_wait_limit,
    integer_between,
    take_host,
)
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.connection import ToolConnection, find_server
from rdmacm.tools.measure import Samples, size_text, time_text
from rdmacm.tools.output import Page, Parser, ReportedError, error_json, write, write_error, write_json
from rdmacm.tools.serving import listening, serve
from rdmacm.tools.waiting import PeerWait
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import AccessFlag, SendFlag, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

PAGE = Page(
    command="rping",
    summary=COMMANDS["rping"],
    description="""
        The client connects to the server and advertises a buffer with text; the server reads it (RDMA READ) and
        writes it back (RDMA WRITE) to another buffer. Protocol, options and output are those of rping(1) of
        librdmacm, which may run at the other end.

        Without -C the client pings until it is interrupted. At its end it says how many pings came back, and how long
        they took, but with -v shows what rping(1) does. A server ends with its client; with -P it serves any
        number of clients at a time until it is interrupted. The client sets the size. A server reports its address on
        standard error.

        With --json, the client writes one object at the end, even when interrupted: peer, size, pings, bytes (both
        directions), seconds, validated, round_trip_us, the time of a whole ping (min, mean, p50, p99, max; the
        percentiles are of the latest 100,000), and error, if a ping failed. The server writes one object for each
        client: peer, pings, bytes, validated.
    """,
    examples=(
        ("rdmacm rping -s -v", "Serve one client and show its data."),
        ("rdmacm rping localhost -v -C 5", "Ping a server on this host five times."),
        ("rdmacm rping -s -P -a ::1 -p 7200", "Serve any number of clients at an IPv6 address and port 7200."),
        ("rdmacm rping storage-7 -V -S 4096 -C 1000 --json", "Report the times of a thousand checked pings."),
    ),
    see_also="rping(1), rdmacm perf, rdmacm cmtime",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE"),
)

#: A message of the protocol: address, rkey, size.
_MESSAGE = struct.Struct(">QII")
#: Limits of the size of a ping, in bytes.
_SHORTEST, _LONGEST = 23, 65536
#: The greatest number of pings, C's INT_MAX.
_MOST = (1 << 31) - 1
#: The wr_id of each kind of work request.
_RECV, _SEND, _READ, _WRITE = range(1, 5)
#: The characters that rping(1) sends, from "A" to "z".
_ALPHABET = bytes(range(65, 123))
_CAP = QPCap(max_send_wr=16, max_recv_wr=2, max_send_sge=1, max_recv_sge=1)
_PARAM = ConnParam(responder_resources=1, initiator_depth=1, retry_count=7, rnr_retry_count=7)
_REMOTE = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm rping``."""
    add_host(parser)
    add_roles(parser, host=False)
    what = "The server's address, to listen on or to connect to; ADDR:PORT and [IPV6]:PORT name its port too."
    parser.add_argument("-a", "--address", metavar="ADDR", help=what)
    parser.add_argument("-I", "--source", metavar="ADDR", help="The client's local address.")
    add_port(parser, 7174)
    what = "Number of pings, 0 for no limit; client only"
    add_number(parser, ("-C", "--count"), integer_between(0, _MOST), 0, "N", what)
    what = f"Size of a ping in bytes, {_SHORTEST} to {_LONGEST}; client only"
    add_number(parser, ("-S", "--size"), integer_between(_SHORTEST, _LONGEST), 64, "BYTES", what)
    parser.add_argument("-v", "--verbose", action="store_true", help="Show the data of each ping.")
    parser.add_argument("-V", "--validate", action="store_true", help="Check the data of each ping.")
    parser.add_argument("-P", "--persistent", action="store_true", help="Serve any number of clients.")
    parser.add_argument("-q", "--own-qp", action="store_true", help="Create the queue pair apart from the id.")
    parser.add_argument("-d", "--debug", action="store_true", help="Report events on standard error.")
    parser.add_argument("--json", action="store_true", help="Write JSON objects instead of the data.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    if args.host is not None:
        if args.server:
            args.parser.error("-s and HOST exclude each other")
        args.client = True
    if args.server == args.client:
        args.parser.error("one of -s and -c is needed, or the server's HOST")
    take_host(args, "address")
    if args.client:
        if args.address is None:
            args.parser.error("the client needs HOST, the server's address")
        return _client(args)
    with listening(args.address, args.port, 3, args.provider) as listener:
        serve(listener, lambda cmid: _serve(args, cmid), persistent=args.persistent)
    return 0


def ping_text(ping: int, size: int) -> bytes:
    """Return the data of a ping: its number, characters from "A" to "z" in rotation, and a final NUL."""
    text = b"rdma-ping-%d: " % ping
    start = ping % len(_ALPHABET)
    turned = _ALPHABET[start:] + _ALPHABET[:start]
    return (text + turned * (size // len(turned) + 1))[: size - 1] + b"\0"


class _Endpoint:
    """One end of a connection with rping's messages. Server and client share it."""

    def __init__(self, connection: ToolConnection) -> None:
        self.connection = connection
        self._send_buffer = bytearray(_MESSAGE.size)
        self._send_region = connection.register(self._send_buffer)
        self._receive_buffer = bytearray(_MESSAGE.size)
        self._receive_region = connection.register(self._receive_buffer)
        self._post_receive()

    def _post_receive(self) -> None:
        self.connection.qp.post_recv(RecvWR(_RECV, [self._receive_region.sge()]))

    def send(self, address: int = 0, rkey: int = 0, size: int = 0) -> None:
        """Send a message and wait until the peer has received it."""
        _MESSAGE.pack_into(self._send_buffer, 0, address, rkey, size)
        self.connection.qp.post_send(SendWR(_SEND, WROpcode.SEND, [self._send_region.sge()], SendFlag.SIGNALED))
        self.connection.wait_for(_SEND)

    def receive(self) -> tuple[int, int, int]:
        """Return the address, rkey and size of the next message."""
        wc = self.connection.wait_for(_RECV)
        if wc.byte_len != _MESSAGE.size:
            raise self.protocol_error(f"a message of {wc.byte_len} bytes instead of {_MESSAGE.size}")
        message: tuple[int, int, int] = _MESSAGE.unpack(self._receive_buffer)
        self._post_receive()
        return message

    def rdma(self, opcode: WROpcode, piece: SGE, address: int, rkey: int) -> None:
        """Read or write the peer's memory and wait for the completion."""
        wr_id = _READ if opcode is WROpcode.RDMA_READ else _WRITE
        wr = SendWR(wr_id, opcode, [piece], SendFlag.SIGNALED, remote_addr=address, rkey=rkey)
        self.connection.qp.post_send(wr)
        self.connection.wait_for(wr_id)

    def protocol_error(self, what: str) -> Exception:
        """Return the error for a peer that does not follow rping's protocol."""
        return cm_error(errno.EPROTO, what, "rping", self.connection.peer, "rping at the other end")


# -- the client ----------------------------------------------------------------------------------------------


def _client(args: argparse.Namespace) -> int:
    cmid, _ = find_server(args.address, args.port, source=args.source, provider=args.provider)
    _debug(args, f"{cmid.verbs}: {format_address(cmid.local_addr)} -> {format_address(cmid.peer_addr)}")
    times = Samples()
    began = time.perf_counter()
    with ToolConnection(cmid, _CAP, own_qp=args.own_qp) as connection:
        endpoint = _Endpoint(connection)
        start, sink = bytearray(args.size), bytearray(args.size)
        source, target = connection.register(start, _REMOTE), connection.register(sink, _REMOTE)
        waits = PeerWait(connection.peer, args.timeout)
        connection.connect(_PARAM, waits)
        _debug(args, "connected")
        begun = 0
        waits.progress = lambda: f"{begun} ping{'' if begun == 1 else 's'} sent, {times.count} came back"
        began = time.perf_counter()
        try:
            for ping in range(args.count) if args.count else count():
                before = time.perf_counter()
                begun = ping + 1
                start[:] = ping_text(ping, args.size)
                endpoint.send(source.addr, source.rkey, args.size)
                endpoint.receive()
                endpoint.send(target.addr, target.rkey, args.size)
                endpoint.receive()
                times.add(time.perf_counter() - before)
                if args.validate and start != sink:
                    at = next(i for i in range(args.size) if start[i] != sink[i])
                    text = f"ping {ping} was returned with wrong data at byte {at}"
                    raise cm_error(errno.EIO, text, "rping", connection.peer)
                if args.verbose and not args.json:
                    write(f"ping data: {_shown(sink)}\n")
        except RdmaError as error:
            _summary(args, connection, times, began, error)
            raise ReportedError(error) from None
        except KeyboardInterrupt:
            _summary(args, connection, times, began)
            raise
        _summary(args, connection, times, began)
    return 0


def _summary(
    args: argparse.Namespace, connection: ToolConnection, times: Samples, began: float, error: RdmaError | None = None
) -> None:
    """Write what a client has done that began at a time of time.perf_counter()."""
    if not args.json:
        found = times.microseconds()
        if found and not args.verbose:  # -v shows each ping, in the form of rping(1)
            checked = ", all correct" if args.validate and error is None else ""
            pings = f"{times.count} ping{'' if times.count == 1 else 's'} of {size_text(args.size)}"
            write(
                f"{pings} to {connection.peer} came back{checked}; min {time_text(found['min'])},"
                f" median {time_text(found['p50'])}, max {time_text(found['max'])}\n"
            )
        return
    write_json(
        {
            "peer": connection.peer,
            "size": args.size,
            "pings": times.count,
            "bytes": 2 * args.size * times.count,
            "seconds": round(time.perf_counter() - began, 6),
            "validated": args.validate,
            "round_trip_us": times.microseconds(),
            **({} if error is None else {"error": error_json(error)}),
        }
    )


# -- the server ----------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace, cmid: CmId) -> None:
    pings = moved = 0
    with ToolConnection(cmid, _CAP, own_qp=args.own_qp) as connection:
        endpoint = _Endpoint(connection)
        buffer = bytearray(_LONGEST)
        region = connection.register(buffer, _REMOTE)
        connection.accept(_PARAM if args.own_qp else None)
        _debug(args, f"connected to {connection.peer}")
        try:
            for ping in count():
                address, rkey, size = endpoint.receive()
                if not 0 < size <= _LONGEST:
                    raise endpoint.protocol_error(f"a ping of {size} bytes")
                endpoint.rdma(WROpcode.RDMA_READ, region.sge(0, size), address, rkey)
                if args.validate and buffer[:size] != ping_text(ping, size):
                    raise cm_error(errno.EIO, f"ping {ping} has wrong data", "rping", connection.peer)
                if args.verbose and not args.json:
                    write(f"server ping data: {_shown(buffer[:size])}\n")
                endpoint.send()
                address, rkey, room = endpoint.receive()
                # Like rping(1), write back the text up to its NUL, which may be shorter than the advertised size.
                text = min(buffer.find(0, 0, size) + 1 or size, room)
                endpoint.rdma(WROpcode.RDMA_WRITE, region.sge(0, text), address, rkey)
                endpoint.send()
                pings, moved = ping + 1, moved + size + text
        except CmDisconnectedError:
            _debug(args, f"{connection.peer} has disconnected")
    if args.json:
        write_json({"peer": connection.peer, "pings": pings, "bytes": moved, "validated": args.validate})


def _shown(data: bytearray) -> str:
    return printable(bytes(data).partition(b"\0")[0].decode("ascii", "backslashreplace"))


def _debug(args: argparse.Namespace, text: str) -> None:
    if args.debug:
        write_error(f"rping: {text}")
