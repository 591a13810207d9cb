"""``rdmacm ucmatose``: several connections, messages there and back over each, with ucmatose(1)'s protocol.

Once all its connections are established, the server sends the messages on each; a client that has them all sends as
many back, from the buffer it received into, so that a server may know its own data again. The server disconnects.
Nothing on the wire says how many or how long: both ends are to be told the same.
"""

from __future__ import annotations

import argparse
import errno
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from types import TracebackType
from typing import Self

from rdmacm.address import SockAddr, format_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.cmid import CmEvent, CmId, EventChannel, event_str
from rdmacm.connparam import ConnParam
from rdmacm.constants import AddressFamily, CmEventType, IdOption, OptionLevel, PortSpace, RaiFlag
from rdmacm.errors import CmRejectedError, CmWouldBlockError, RdmaError, cm_error
from rdmacm.explain import resolve
from rdmacm.tools.explain import error_of
from rdmacm.tools.link import add_provider, bind, ended_by, failure_of, number, port_number
from rdmacm.tools.output import Page, Parser, complain, write, write_json
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WC, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.pd import MR
from rdmacm.verbs.qp import QPInitAttr
from rdmacm.verbs.wr import RecvWR, SendWR

PAGE = Page(
    command="ucmatose",
    summary="messages over several connections at once, as ucmatose(1)",
    description="""
        The client makes a number of connections to the server. When all are there, the server sends messages on each,
        the client sends as many back, and the server disconnects. Protocol, options and output are those of
        ucmatose(1) of librdmacm: each of the two may be at either end. Who has -s is the client.

        Both ends have to be given the same -c, -C and -S. Without messages, or with messages of 0 bytes, the
        connections are made and ended, and nothing is sent.

        With --json, each end writes one object instead, when it has succeeded: role (client or server), connections,
        messages and size, sent and received (bytes), validated and seconds, from the first connection's beginning
        to the last one's end.
    """,
    examples=(
        ("rdmacm ucmatose", "Serve a client with one connection."),
        ("rdmacm ucmatose -s 127.0.0.1", "Be that client."),
        ("rdmacm ucmatose -b ::1 -p 7200 -c 100 -V", "Serve a hundred connections, and check what comes back."),
        ("rdmacm ucmatose -s storage-7 -p 7200 -c 100 --json", "Make a hundred, and sum up."),
    ),
    see_also="ucmatose(1), rdmacm rping, rdmacm cmtime",
)

_SPACES = {"tcp": PortSpace.TCP, "ib": PortSpace.IB}
#: How the addresses are written: the family that says so, 0 for any.
_FORMATS = {"name": 0, "ip": AddressFamily.INET, "ipv6": AddressFamily.INET6, "gid": AddressFamily.IB}
_MOST_CONNECTIONS = 10_000
_MOST_MESSAGES = 32_768
_LARGEST = 1 << 30
_RECV, _SEND = 1, 2
_TIMEOUT_MS = 2000
_PARAM = ConnParam(responder_resources=1, initiator_depth=1, retry_count=5, rnr_retry_count=0)
_FAILED = frozenset(
    (
        CmEventType.ADDR_ERROR,
        CmEventType.ROUTE_ERROR,
        CmEventType.CONNECT_ERROR,
        CmEventType.UNREACHABLE,
        CmEventType.REJECTED,
    )
)


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm ucmatose``."""
    add = parser.add_argument
    add("-s", "--server", metavar="ADDR", help="The server's address: be its client.")
    add("-b", "--bind", metavar="ADDR", help="The own address: to listen at, or to connect from.")
    add(
        "-f",
        "--format",
        choices=_FORMATS,
        default="name",
        help="How the addresses are written: name takes all forms, the others theirs alone (default: %(default)s).",
    )
    add("-P", "--port-space", choices=_SPACES, default="tcp", help="The port space (default: %(default)s).")
    add(
        "-c",
        "--connections",
        type=number(1, _MOST_CONNECTIONS),
        default=1,
        metavar="N",
        help="How many connections (default: %(default)s).",
    )
    add(
        "-C",
        "--messages",
        type=number(0, _MOST_MESSAGES),
        default=10,
        metavar="N",
        help="How many messages each way over each connection (default: %(default)s).",
    )
    add(
        "-S",
        "--size",
        type=number(0, _LARGEST),
        default=100,
        metavar="BYTES",
        help="Bytes of a message (default: %(default)s).",
    )
    add("-t", "--tos", type=number(0, 255), metavar="N", help="The client's type of service.")
    add(
        "-a",
        "--ack-timeout",
        type=number(0, 31),
        metavar="N",
        help="How long to wait for acknowledgements: 4.096 us times 2 to the power of N.",
    )
    add(
        "-p", "--port", type=port_number, default=7471, metavar="PORT", help="The server's port (default: %(default)s)."
    )
    add("-m", "--migrate", action="store_true", help="Move all ids to another event channel before disconnecting.")
    add("-V", "--validate", action="store_true", help="The server's: check that each message comes back as it was.")
    add("-d", "--debug", action="store_true", help="Say on standard error what happens.")
    add("--json", action="store_true", help="Write an object instead of what is done.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Be one of the two."""
    is_server = args.server is None
    if is_server and args.tos is not None:
        args.parser.error("-t is the client's, and needs -s ADDR")
    if args.validate and not is_server:
        args.parser.error("-V is the server's, and does not go with -s")
    _say(args, f"cmatose: starting {'server' if is_server else 'client'}")
    began = time.perf_counter()
    try:
        with _Server(args) if is_server else _Client(args) as end:
            end.establish()
            if end.messages:
                end.move_data()
            end.disconnect()
    except RdmaError as error:
        _complete(args, error.reason if isinstance(error, CmRejectedError) else -(error.errno or errno.EIO))
        raise
    _complete(args, 0)
    if args.json:
        write_json(
            {
                "role": "server" if is_server else "client",
                "connections": args.connections,
                "messages": args.messages,
                "size": args.size,
                "sent": args.size * end.sent,
                "received": end.received_bytes,
                "validated": args.validate,
                "seconds": round(time.perf_counter() - began, 6),
            }
        )
    return 0


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        write(f"{line}\n")


def _complete(args: argparse.Namespace, status: int) -> None:
    _say(args, "test complete")
    _say(args, f"return status {status}")


class _Connection:
    """One connection: its queue pair, its memory, its completions. ``end`` is what it belongs to."""

    def __init__(self, end: _End, cmid: CmId) -> None:
        self.end = end
        self.cmid = cmid
        self.is_over = False
        self.received = 0
        self._regions: list[MR] = []
        self._cq: CQ | None = None

    def open(self, outbox: bytearray, inbox: bytearray) -> None:
        """Make the queue pair, and post what is to be received. Both buffers may be one."""
        cmid, count = self.cmid, self.end.messages
        assert cmid.verbs is not None
        self._cq = CQ(cmid.verbs, max(1, 2 * count), self.end.reports(cmid.verbs), self)
        cap = QPCap(max_send_wr=max(1, count), max_recv_wr=max(1, count))
        cmid.create_qp(QPInitAttr(scq=self._cq, rcq=self._cq, cap=cap))
        self._inbox, self._outbox = inbox, outbox
        self._cq.req_notify()
        if count:
            self._regions.append(cmid.reg_msgs(outbox))
            if inbox is not outbox:
                self._regions.append(cmid.reg_msgs(inbox))
            assert cmid.qp is not None
            cmid.qp.post_recv([RecvWR(_RECV, [self._regions[-1].sge()])] * count)

    def send(self) -> None:
        """Post all messages."""
        assert self.cmid.qp is not None
        message = SendWR(_SEND, WROpcode.SEND, [self._regions[0].sge()], SendFlag.SIGNALED)
        self.cmid.qp.post_send([message] * self.end.messages)

    def take(self) -> None:
        """Look at what has completed."""
        assert self._cq is not None
        self._cq.req_notify()
        while found := self._cq.poll(64):
            for wc in found:
                if wc.status is not WCStatus.SUCCESS:
                    raise self._failure(wc)
                if wc.wr_id == _SEND:
                    self.end.sent += 1
                else:
                    self._take_message(wc)

    def _take_message(self, wc: WC) -> None:
        self.received += 1
        self.end.received += 1
        self.end.received_bytes += wc.byte_len
        args = self.end.args
        if args.validate and (wc.byte_len != args.size or self._inbox != self._outbox):
            raise self._error(errno.EIO, f"message {self.received} came back with other data")

    def _failure(self, wc: WC) -> RdmaError:
        if wc.status is WCStatus.RNR_RETRY_EXC_ERR:
            return self._error(errno.EPROTO, "the peer takes fewer messages", "the same -C at both ends")
        if wc.status in (WCStatus.LOC_LEN_ERR, WCStatus.REM_INV_REQ_ERR):
            return self._error(errno.EPROTO, "a message is longer than its receiver takes", "the same -S at both ends")
        peer = self.cmid.peer_addr_text
        return ended_by(peer) if self.is_over else failure_of(wc, peer)

    def _error(self, code: int, text: str, hint: str | None = None) -> RdmaError:
        return cm_error(code, text, "transfer", self.cmid.peer_addr_text, hint)

    def peer_has_ended(self) -> None:
        """The peer has disconnected, which is too early where there was more to come."""
        self.take()  # what came before that
        self.is_over = True
        if self.received < self.end.messages:
            raise ended_by(self.cmid.peer_addr_text)

    def close(self) -> None:
        """Release everything."""
        self.cmid.destroy_qp()
        self.cmid.destroy()
        for region in self._regions:
            region.close()
        if self._cq is not None:
            self._cq.close()


class _End(ABC):
    """What both ends have: a channel, connections, and one place to wait for events and completions."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.messages = args.messages if args.size else 0
        self.space = _SPACES[args.port_space]
        #: Of all connections; messages, and what came in bytes.
        self.sent = self.received = self.received_bytes = 0
        self.connections: dict[CmId, _Connection] = {}
        self.established = self.over = 0
        self._is_ending = False
        self._reports: dict[str, CompChannel] = {}  # one for each device
        self._selector = selectors.DefaultSelector()
        self.channel = self._open_channel()

    def _open_channel(self) -> EventChannel:
        channel = EventChannel(self.args.provider)
        self._selector.register(channel, selectors.EVENT_READ, self._take_events)
        return channel

    def reports(self, context: Context) -> CompChannel:
        """Where completion queues of a device report."""
        if context.name not in self._reports:
            channel = self._reports[context.name] = CompChannel(context)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._take_completions, channel))
        return self._reports[context.name]

    def say(self, line: str) -> None:
        """What is done."""
        _say(self.args, line)

    def set_options(self, cmid: CmId) -> None:
        """What the command line asks of each id."""
        if self.args.ack_timeout is not None:
            cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, self.args.ack_timeout)

    def hints(self, flags: RaiFlag) -> AddrInfo:
        """How the addresses of the command line are to be read."""
        family = _FORMATS[self.args.format]
        if family:
            flags |= RaiFlag.NUMERICHOST
        if family == AddressFamily.IB:
            flags |= RaiFlag.FAMILY
        return AddrInfo(flags=flags, family=family, port_space=self.space)

    def own_address(self, port: int) -> SockAddr:
        """The address to bind to."""
        hints = self.hints(RaiFlag.PASSIVE | RaiFlag.NOROUTE)
        address = getaddrinfo(self.args.bind, port, hints, provider=self.args.provider)[0].src_addr
        assert address is not None
        return address

    # -- waiting --------------------------------------------------------------------------------------

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Take events and completions as they come."""
        while not done():
            for key, _ in self._selector.select():
                key.data()

    def _take_completions(self, channel: CompChannel) -> None:
        with suppress(CmWouldBlockError):
            while True:
                cq = channel.get_cq_event(0)
                cq.ack_events()
                assert isinstance(cq.cq_context, _Connection)
                if not self._is_ending:  # what is flushed then is no matter
                    cq.cq_context.take()

    def _take_events(self) -> None:
        with suppress(CmWouldBlockError):
            while True:
                with self.channel.get_event(0) as event:
                    has_place = self._take_event(event)
                if not has_place:
                    event.id.destroy()

    def _take_event(self, event: CmEvent) -> bool:
        """React to an event; False where its id has no place here."""
        if event.type in _FAILED:
            self.say(f"cmatose: event: {event_str(event.type)}, error: {event.status}")
            assert event.error is not None
            raise event.error
        if event.type is CmEventType.DEVICE_REMOVAL:
            raise cm_error(errno.ENODEV, "the device is gone", "transfer", event.id.peer_addr_text)
        if event.type is CmEventType.ESTABLISHED:
            self.established += 1
        elif event.type is CmEventType.DISCONNECTED:
            self.over += 1
            if self._is_ending:
                event.id.disconnect()
            else:
                self.connections[event.id].peer_has_ended()
        else:
            return self.advance(event)
        return True

    @abstractmethod
    def advance(self, event: CmEvent) -> bool:
        """Go on with what an event says is done; False where its id has no place here."""

    # -- what both do ---------------------------------------------------------------------------------

    @abstractmethod
    def establish(self) -> None:
        """Make the connections."""

    @abstractmethod
    def move_data(self) -> None:
        """Send and receive the messages."""

    @abstractmethod
    def disconnect(self) -> None:
        """End the connections."""

    def await_connections(self) -> None:
        """Wait until all connections are established."""
        self._wait_until(lambda: self.established == self.args.connections)

    def send(self) -> None:
        """Post the messages of all connections."""
        for connection in self.connections.values():
            connection.send()

    def await_sent(self) -> None:
        """Wait until all messages have arrived."""
        self._wait_until(lambda: self.sent == self.messages * self.args.connections)

    def await_received(self) -> None:
        """Wait until all messages are here."""
        self._wait_until(lambda: self.received == self.messages * self.args.connections)

    def await_ends(self, *, is_first: bool) -> None:
        """Disconnect, or answer those who do, until all connections are over."""
        self._is_ending = True
        for connection in self.connections.values():
            if is_first or connection.is_over:
                connection.cmid.disconnect()
        self._wait_until(lambda: self.over == self.args.connections)

    def migrate(self, *ids: CmId) -> None:
        """With ``-m``, move ids to a channel of their own."""
        if not self.args.migrate:
            return
        self.say("migrating to new event channel")
        old, self.channel = self.channel, self._open_channel()
        for cmid in ids:
            cmid.migrate(self.channel)
        self._selector.unregister(old)
        old.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for connection in self.connections.values():
            connection.close()
        for reports in self._reports.values():
            reports.close()
        self._selector.close()
        self.channel.close()


class _Server(_End):
    """Listens, sends first, disconnects."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._message = bytearray(islice(cycle(range(256)), args.size))
        self._listener = CmId(self.channel, self.space)

    def establish(self) -> None:
        listener, args = self._listener, self.args
        if args.bind is None:
            bind(listener, None, args.port)
        else:
            listener.bind_addr(self.own_address(args.port))
        listener.listen(args.connections)
        if args.debug:
            complain(f"ucmatose: listening on {format_address(listener.local_addr)}")
        self.await_connections()

    def advance(self, event: CmEvent) -> bool:
        if event.type is not CmEventType.CONNECT_REQUEST:
            return True
        cmid = event.id
        if len(self.connections) == self.args.connections:
            self.say("cmatose: failing connection request")
            cmid.reject()
            return False
        connection = self.connections[cmid] = _Connection(self, cmid)
        self.set_options(cmid)
        connection.open(self._message, bytearray(self.args.size))
        cmid.accept()
        return True

    def move_data(self) -> None:
        self.say("initiating data transfers")
        self.send()
        self.say("completing sends")
        self.await_sent()
        self.say("receiving data transfers")
        self.await_received()
        self.say("data transfers complete")

    def disconnect(self) -> None:
        self.migrate(self._listener, *self.connections)
        self.say("cmatose: disconnecting")
        self.await_ends(is_first=True)
        self.say("disconnected")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.destroy()
        super().__exit__(kind, error, tb)


class _Client(_End):
    """Connects, and sends back what it has received."""

    def establish(self) -> None:
        self.say("cmatose: connecting")
        source = None if self.args.bind is None else self.own_address(0)
        destination = self._find(source)
        for _ in range(self.args.connections):
            cmid = CmId(self.channel, self.space)
            self.connections[cmid] = _Connection(self, cmid)
            self.set_options(cmid)
            if self.args.tos is not None:
                cmid.set_option(OptionLevel.ID, IdOption.TOS, self.args.tos)
            cmid.resolve_addr(destination, source, _TIMEOUT_MS)
        self.await_connections()

    def _find(self, source: SockAddr | None) -> SockAddr:
        """The first of the server's addresses that can be reached."""
        hints = replace(self.hints(RaiFlag(0)), src_addr=source)
        args = self.args
        found, explanation = resolve(args.server, args.port, hints, timeout_ms=_TIMEOUT_MS, provider=args.provider)
        if found is None:
            raise error_of(explanation, None)
        with found:
            assert found.route.dst_addr is not None
            return found.route.dst_addr

    def advance(self, event: CmEvent) -> bool:
        if event.type is CmEventType.ADDR_RESOLVED:
            event.id.resolve_route(_TIMEOUT_MS)
        elif event.type is CmEventType.ROUTE_RESOLVED:
            buffer = bytearray(self.args.size)
            self.connections[event.id].open(buffer, buffer)
            event.id.connect(_PARAM)
        return True

    def move_data(self) -> None:
        self.say("receiving data transfers")
        self.await_received()
        self.say("sending replies")
        self.send()
        self.await_sent()
        self.say("data transfers complete")

    def disconnect(self) -> None:
        self.migrate(*self.connections)
        self.await_ends(is_first=False)
