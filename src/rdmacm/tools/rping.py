"""``rdmacm rping``: ping-pong by RDMA READ and WRITE, with rping(1)'s protocol.

Each ping: the client advertises a buffer with text, the server reads it and says go ahead; the client advertises
another buffer, the server writes the text into that and says go ahead. Advertisements and go-aheads are messages of 16
bytes: an address, an rkey and a size in network order. rping(1) has no version in it, so the sizes are all a peer is
known by.
"""

from __future__ import annotations

import argparse
import errno
import struct
import time
from itertools import count

from rdmacm.address import format_address
from rdmacm.cmid import CmId
from rdmacm.connparam import ConnParam
from rdmacm.errors import CmDisconnectedError, cm_error, printable
from rdmacm.tools.link import Link, add_provider, add_roles, find, listening, number, port_number, serve
from rdmacm.tools.measure import Samples
from rdmacm.tools.output import Page, Parser, complain, write, write_json
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import AccessFlag, SendFlag, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

PAGE = Page(
    command="rping",
    summary="ping-pong by RDMA READ and WRITE, as rping(1)",
    description="""
        The client connects to the server and advertises a buffer that holds a text; the server reads it (RDMA READ)
        and writes it back (RDMA WRITE) into another buffer. Protocol, options and output are those of rping(1) of
        librdmacm: each of the two may be at either end.

        Without -C the client goes on until it is interrupted. A server ends with its client, and with -P serves
        any number of clients at a time until it is interrupted. The server takes what size the client says.

        With --json, the client writes one object in the end, also when interrupted: peer, size, pings, bytes (both
        directions), seconds, validated and round_trip_us, the time of a whole ping (min, mean, p50, p99, max; the
        percentiles of the latest 100,000). The server writes one for each client: peer, pings, bytes, validated.
    """,
    examples=(
        ("rdmacm rping -s -v", "Serve one client, and show what it sends."),
        ("rdmacm rping -c -a 127.0.0.1 -v -C 5", "Ping a server on this host five times."),
        ("rdmacm rping -s -P -a ::1 -p 7200", "Serve client after client at an IPv6 address and port 7200."),
        ("rdmacm rping -c -a storage-7 -V -S 4096 -C 1000 --json", "A thousand checked pings, and their times."),
    ),
    see_also="rping(1), rdmacm perf, rdmacm cmtime",
)

_MESSAGE = struct.Struct(">QII")
_SHORTEST, _LONGEST = 26, 65535
_RECV, _SEND, _READ, _WRITE = range(1, 5)
_ALPHABET = bytes(range(65, 123))
_CAP = QPCap(max_send_wr=16, max_recv_wr=2, max_send_sge=1, max_recv_sge=1)
_PARAM = ConnParam(responder_resources=1, initiator_depth=1, retry_count=7, rnr_retry_count=7)
_REMOTE = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm rping``."""
    add_roles(parser, host=False)
    parser.add_argument("-a", "--address", metavar="ADDR", help="The server's address: to bind to, or to connect to.")
    parser.add_argument("-I", "--source", metavar="ADDR", help="The client's own address.")
    parser.add_argument(
        "-p", "--port", type=port_number, default=7174, metavar="PORT", help="The server's port (default: %(default)s)."
    )
    parser.add_argument(
        "-C", "--count", type=number(1, 1 << 31), metavar="N", help="How many pings; the client's to say."
    )
    parser.add_argument(
        "-S",
        "--size",
        type=number(_SHORTEST, _LONGEST),
        default=64,
        metavar="BYTES",
        help=f"Bytes of a ping, {_SHORTEST} to {_LONGEST}; the client's to say (default: %(default)s).",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="Show the data of each ping.")
    parser.add_argument("-V", "--validate", action="store_true", help="Check the data of each ping.")
    parser.add_argument("-P", "--persistent", action="store_true", help="Serve any number of clients.")
    parser.add_argument("-q", "--own-qp", action="store_true", help="Use a queue pair made apart from the id.")
    parser.add_argument("-d", "--debug", action="store_true", help="Say on standard error what happens.")
    parser.add_argument("--json", action="store_true", help="Write objects instead of the data.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Be one of the two."""
    if args.server == args.client:
        args.parser.error("one of -s and -c is needed")
    if args.client:
        if args.address is None:
            args.parser.error("the client needs -a ADDR, the server's address")
        return _client(args)
    with listening(args.address, args.port, 3, args.provider) as listener:
        _debug(args, f"listening on {format_address(listener.local_addr)}")
        serve(listener, lambda cmid: _serve(args, cmid), persistent=args.persistent)
    return 0


def ping_text(ping: int, size: int) -> bytes:
    """What the client sends in a ping: its number, then characters from "A" to "z" round and round, and a NUL."""
    text = b"rdma-ping-%d: " % ping
    start = ping % len(_ALPHABET)
    turned = _ALPHABET[start:] + _ALPHABET[:start]
    return (text + turned * (size // len(turned) + 1))[: size - 1] + b"\0"


class _End:
    """What both ends have: a link, and messages of 16 bytes each way."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._out_buffer = bytearray(_MESSAGE.size)
        self._out = link.register(self._out_buffer)
        self._in_buffer = bytearray(_MESSAGE.size)
        self._in = link.register(self._in_buffer)
        self._expect()

    def _expect(self) -> None:
        self.link.qp.post_recv(RecvWR(_RECV, [self._in.sge()]))

    def send(self, address: int = 0, rkey: int = 0, size: int = 0) -> None:
        """Send a message, and wait until the peer has it."""
        _MESSAGE.pack_into(self._out_buffer, 0, address, rkey, size)
        self.link.qp.post_send(SendWR(_SEND, WROpcode.SEND, [self._out.sge()], SendFlag.SIGNALED))
        self.link.wait_for(_SEND)

    def receive(self) -> tuple[int, int, int]:
        """The next message: address, rkey, size."""
        wc = self.link.wait_for(_RECV)
        if wc.byte_len != _MESSAGE.size:
            raise self.refused(f"a message of {wc.byte_len} bytes instead of {_MESSAGE.size}")
        message: tuple[int, int, int] = _MESSAGE.unpack(self._in_buffer)
        self._expect()
        return message

    def rdma(self, opcode: WROpcode, piece: SGE, address: int, rkey: int) -> None:
        """Read or write the peer's memory, and wait until it is done."""
        wr_id = _READ if opcode is WROpcode.RDMA_READ else _WRITE
        wr = SendWR(wr_id, opcode, [piece], SendFlag.SIGNALED, remote_addr=address, rkey=rkey)
        self.link.qp.post_send(wr)
        self.link.wait_for(wr_id)

    def refused(self, what: str) -> Exception:
        """The peer does not do as rping does."""
        return cm_error(errno.EPROTO, what, "rping", self.link.peer, "rping at the other end")


# -- the client ----------------------------------------------------------------------------------------------


def _client(args: argparse.Namespace) -> int:
    cmid, _ = find(args.address, args.port, source=args.source, provider=args.provider)
    _debug(args, f"{cmid.verbs}: {format_address(cmid.local_addr)} -> {format_address(cmid.peer_addr)}")
    times = Samples()
    began = time.perf_counter()
    with Link(cmid, _CAP, own_qp=args.own_qp) as link:
        end = _End(link)
        start, sink = bytearray(args.size), bytearray(args.size)
        source, target = link.register(start, _REMOTE), link.register(sink, _REMOTE)
        link.connect(_PARAM)
        _debug(args, "connected")
        began = time.perf_counter()
        try:
            for ping in range(args.count) if args.count else count():
                before = time.perf_counter()
                start[:] = ping_text(ping, args.size)
                end.send(source.addr, source.rkey, args.size)
                end.receive()
                end.send(target.addr, target.rkey, args.size)
                end.receive()
                times.add(time.perf_counter() - before)
                if args.validate and start != sink:
                    at = next(i for i in range(args.size) if start[i] != sink[i])
                    raise cm_error(errno.EIO, f"ping {ping} came back with other data at byte {at}", "rping", link.peer)
                if args.verbose and not args.json:
                    write(f"ping data: {_shown(sink)}\n")
        finally:
            if args.json:
                _summary(args, link, times, time.perf_counter() - began)
    return 0


def _summary(args: argparse.Namespace, link: Link, times: Samples, seconds: float) -> None:
    write_json(
        {
            "peer": link.peer,
            "size": args.size,
            "pings": times.count,
            "bytes": 2 * args.size * times.count,
            "seconds": round(seconds, 6),
            "validated": args.validate,
            "round_trip_us": times.microseconds(),
        }
    )


# -- the server ----------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace, cmid: CmId) -> None:
    pings = moved = 0
    with Link(cmid, _CAP, own_qp=args.own_qp) as link:
        end = _End(link)
        buffer = bytearray(_LONGEST)
        region = link.register(buffer, _REMOTE)
        link.accept(_PARAM if args.own_qp else None)
        _debug(args, f"connected to {link.peer}")
        try:
            for ping in count():
                address, rkey, size = end.receive()
                if not 0 < size <= _LONGEST:
                    raise end.refused(f"a ping of {size} bytes")
                end.rdma(WROpcode.RDMA_READ, region.sge(0, size), address, rkey)
                if args.validate and buffer[:size] != ping_text(ping, size):
                    raise cm_error(errno.EIO, f"ping {ping} is not the text it should be", "rping", link.peer)
                if args.verbose and not args.json:
                    write(f"server ping data: {_shown(buffer[:size])}\n")
                end.send()
                address, rkey, room = end.receive()
                # As rping(1): the text with its NUL, which of a peer's own data may be less than it advertised.
                text = min(buffer.find(0, 0, size) + 1 or size, room)
                end.rdma(WROpcode.RDMA_WRITE, region.sge(0, text), address, rkey)
                end.send()
                pings, moved = ping + 1, moved + size + text
        except CmDisconnectedError:
            _debug(args, f"{link.peer} has disconnected")
    if args.json:
        write_json({"peer": link.peer, "pings": pings, "bytes": moved, "validated": args.validate})


def _shown(data: bytearray) -> str:
    return printable(bytes(data).partition(b"\0")[0].decode("ascii", "backslashreplace"))


def _debug(args: argparse.Namespace, text: str) -> None:
    if args.debug:
        complain(f"rping: {text}")
