"""``rdmacm ucmatose``: exchange messages over several connections, with the protocol of ucmatose(1).

Once all connections are established, the server sends its messages on each. A client that has received all of them
sends as many back, from the buffer it received into, so that the server can compare the data. The server disconnects.
The number and the size of the messages are not sent: both ends must be started with the same values.
"""

from __future__ import annotations

import argparse
import errno
import selectors
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from types import TracebackType

from rdmacm.cmid import CmEvent, CmId, EventChannel
from rdmacm.constants import CmEventType, IdOption, OptionLevel, PortSpace
from rdmacm.errors import CmWouldBlockError, RdmaError, cm_error
from rdmacm.provider.connparam import ConnParam
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
from rdmacm.tools.connection import completion_failure, connection_ended
from rdmacm.tools.exchange import RECV, SEND, TIMEOUT_MS, End, add_counts, add_format, run_exchange
from rdmacm.tools.output import Page, Parser
from rdmacm.tools.serving import announce
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WC, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.pd import MR
from rdmacm.verbs.qp import QPInitAttr
from rdmacm.verbs.wr import RecvWR, SendWR

PAGE = Page(
    command="ucmatose",
    summary=COMMANDS["ucmatose"],
    description="""
        The client opens a number of connections to the server. When all are established, the server sends messages on
        each, the client sends as many back, and the server disconnects. Protocol, options and output are those of
        ucmatose(1) of librdmacm, which may run at the other end. The client is the end with HOST.

        A server reports its address on standard error. Both ends must be given the same -c, -C and -S. With no
        messages, or messages of 0 bytes, the connections are established and closed, and nothing is sent.

        With --json, each end writes one object instead, if it succeeds: role (client or server), connections,
        messages, size, sent and received (bytes), validated, and seconds, from the start of the first connection to
        the end of the last one.
    """,
    examples=(
        ("rdmacm ucmatose", "Serve a client with one connection."),
        ("rdmacm ucmatose localhost", "Run that client."),
        ("rdmacm ucmatose -b ::1 -p 7200 -c 100 -V", "Serve a hundred connections and check the returned data."),
        ("rdmacm ucmatose storage-7:7200 -c 100 --json", "Open a hundred connections and print a summary."),
    ),
    see_also="ucmatose(1), rdmacm rping, rdmacm cmtime",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE"),
)

_PORT_SPACES = {"tcp": PortSpace.TCP, "ib": PortSpace.IB}
_MAX_CONNECTIONS = 10_000
#: The parameters of the client's requests, as ucmatose(1) sends them.
_CONNECT_PARAM = ConnParam(responder_resources=1, initiator_depth=1, retry_count=5, rnr_retry_count=0)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm ucmatose``."""
    add = parser.add_argument
    add_host(parser)
    add("-s", "--server", metavar="ADDR", help="Run as the client of the server at this address, as HOST.")
    add_address(parser)
    add_format(parser)
    add("-P", "--port-space", choices=_PORT_SPACES, default="tcp", help="The port space (default: %(default)s).")
    add_counts(
        parser,
        _MAX_CONNECTIONS,
        "Number of connections",
        "Number of messages in each direction of each connection",
        "Size of a message in bytes",
    )
    add("-t", "--tos", type=integer_between(0, 255), metavar="N", help="The type of service; client only.")
    add(
        "-a",
        "--ack-timeout",
        type=integer_between(0, 31),
        metavar="N",
        help="The ACK timeout: 4.096 us times 2 to the power of N.",
    )
    add_port(parser, 7471)
    add("-m", "--migrate", action="store_true", help="Move all ids to another event channel before disconnecting.")
    add("-V", "--validate", action="store_true", help="Check that each message is returned unchanged; server only.")
    add("--json", action="store_true", help="Write one JSON object instead of the progress.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    take_host(args, "server")
    is_server = args.server is None
    if is_server and args.tos is not None:
        args.parser.error("-t is an option of the client, and needs HOST")
    if args.validate and not is_server:
        args.parser.error("-V is an option of the server, and excludes HOST")
    if is_server:
        return run_exchange(args, "cmatose", "server", _Server)
    return run_exchange(args, "cmatose", "client", _Client)


class _Exchange:
    """The exchange of messages on one connection: its queue pair, memory and completions."""

    def __init__(self, endpoint: _Endpoint, cmid: CmId) -> None:
        self.endpoint = endpoint
        self.cmid = cmid
        #: Whether the peer has disconnected.
        self.has_ended = False
        #: Whether requests were flushed. The event that tells why may come after them.
        self._is_flushed = False
        #: Number of messages received.
        self.received = 0
        #: The registered buffers: to send from first, to receive into last.
        self._regions: list[MR] = []
        self._cq: CQ | None = None

    def open(self, outbox: bytearray, inbox: bytearray) -> None:
        """Create the queue pair and post the receives. Both buffers may be the same."""
        cmid, count = self.cmid, self.endpoint.messages
        self._cq = CQ(cmid.verbs, max(1, 2 * count), self.endpoint.completion_channel(cmid.verbs), self)
        cap = QPCap(max_send_wr=max(1, count), max_recv_wr=max(1, count))
        cmid.create_qp(QPInitAttr(scq=self._cq, rcq=self._cq, cap=cap))
        self._inbox, self._outbox = inbox, outbox
        self._cq.req_notify()
        if count:
            self._regions.append(cmid.reg_msgs(outbox))
            if inbox is not outbox:
                self._regions.append(cmid.reg_msgs(inbox))
            cmid.qp.post_recv([RecvWR(RECV, [self._regions[-1].sge()])] * count)

    def send(self) -> None:
        """Post all messages."""
        message = SendWR(SEND, WROpcode.SEND, [self._regions[0].sge()], SendFlag.SIGNALED)
        self.cmid.qp.post_send([message] * self.endpoint.messages)

    def take(self) -> None:
        """Process completions."""
        assert self._cq is not None
        self._cq.req_notify()
        while found := self._cq.poll(64):
            for wc in found:
                if wc.status is WCStatus.WR_FLUSH_ERR and not self.has_ended:
                    self._is_flushed = True
                    continue
                if wc.status is not WCStatus.SUCCESS:
                    raise self._failure(wc)
                if wc.wr_id == SEND:
                    self.endpoint.sent += 1
                else:
                    self._take_message(wc)

    def _take_message(self, wc: WC) -> None:
        self.received += 1
        self.endpoint.received += 1
        self.endpoint.received_bytes += wc.byte_len
        args = self.endpoint.args
        if args.validate and (wc.byte_len != args.size or self._inbox != self._outbox):
            raise self._error(errno.EIO, f"message {self.received} was returned with wrong data")

    def _failure(self, wc: WC) -> RdmaError:
        if wc.status is WCStatus.RNR_RETRY_EXC_ERR:
            return self._error(errno.EPROTO, "the peer expects fewer messages", "the same -C at both ends")
        if wc.status in (WCStatus.LOC_LEN_ERR, WCStatus.REM_INV_REQ_ERR):
            text = "a message is longer than the receiver's buffer"
            return self._error(errno.EPROTO, text, "the same -S at both ends")
        peer = self.cmid.peer_addr_text
        return connection_ended(peer) if self.has_ended else completion_failure(wc, peer)

    def _error(self, code: int, text: str, hint: str | None = None) -> RdmaError:
        return cm_error(code, text, "transfer", self.cmid.peer_addr_text, hint)

    def peer_has_ended(self) -> None:
        """Handle a disconnect by the peer; raises an error when messages are missing."""
        self.has_ended = True
        self.take()  # messages that arrived before the disconnect
        if self._is_flushed or self.received < self.endpoint.messages:
            raise connection_ended(self.cmid.peer_addr_text)

    def close(self) -> None:
        """Release everything."""
        self.cmid.destroy_qp()
        self.cmid.destroy()
        for region in self._regions:
            region.close()
        if self._cq is not None:
            self._cq.close()


class _Endpoint(End):
    """The server or the client: an event channel, the connections, and one selector for events and completions."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, "cmatose", _PORT_SPACES[args.port_space])
        self.connections: dict[CmId, _Exchange] = {}
        #: Number of connections that have been established, and that have ended.
        self.established = self.ended = 0
        #: Whether connections are being disconnected; flushed completions are ignored then.
        self._is_ending = False
        #: Completion channels by name of the device.
        self._completion_channels: dict[str, CompChannel] = {}
        self._selector = selectors.DefaultSelector()
        self.channel = self._open_channel()

    def _open_channel(self) -> EventChannel:
        channel = EventChannel(self.args.provider)
        self._selector.register(channel, selectors.EVENT_READ, self._take_events)
        return channel

    def completion_channel(self, context: Context) -> CompChannel:
        """Return the completion channel of a device."""
        if context.name not in self._completion_channels:
            channel = self._completion_channels[context.name] = CompChannel(context)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._take_completions, channel))
        return self._completion_channels[context.name]

    def facts(self) -> dict[str, object]:
        return {"validated": self.args.validate}

    def set_options(self, cmid: CmId) -> None:
        """Set the options from the command line on an id."""
        if self.args.ack_timeout is not None:
            cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, self.args.ack_timeout)

    # -- waiting --------------------------------------------------------------------------------------

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Process events and completions until ``done()`` is true."""
        progress = None
        while not done():
            timeout = None
            if self.waits is not None:
                # The selector also returns for timers of the device, which are no progress.
                before, progress = progress, (self.established, self.sent, self.received, self.ended)
                if progress != before:
                    self.waits.restart()
                timeout = self.waits.left()
            for key, _ in self._selector.select(timeout):
                key.data()

    def _take_completions(self, channel: CompChannel) -> None:
        with suppress(CmWouldBlockError):
            while True:
                cq = channel.get_cq_event(0)
                cq.ack_events()
                assert isinstance(cq.cq_context, _Exchange)
                if not self._is_ending:
                    cq.cq_context.take()

    def _take_events(self) -> None:
        with suppress(CmWouldBlockError):
            while True:
                with self.channel.get_event(0) as event:
                    is_kept = self._take_event(event)
                if not is_kept:
                    event.id.destroy()

    def _take_event(self, event: CmEvent) -> bool:
        """Process an event; return False when its id is to be destroyed."""
        self.check_event(event, "transfer", event.id.peer_addr_text)
        if event.type is CmEventType.ESTABLISHED:
            self.established += 1
        elif event.type is CmEventType.DISCONNECTED:
            self.ended += 1
            if self._is_ending:
                event.id.disconnect()
            else:
                self.connections[event.id].peer_has_ended()
        else:
            return self.advance(event)
        return True

    @abstractmethod
    def advance(self, event: CmEvent) -> bool:
        """Start the next step of a connection; return False when the id is to be destroyed."""

    # -- steps ----------------------------------------------------------------------------------------

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
        """Wait until all messages have been received."""
        self._wait_until(lambda: self.received == self.messages * self.args.connections)

    def await_ends(self, *, is_first: bool) -> None:
        """Disconnect, or answer the peer's disconnects, until all connections have ended."""
        self._is_ending = True
        for connection in self.connections.values():
            if is_first or connection.has_ended:
                connection.cmid.disconnect()
        self._wait_until(lambda: self.ended == self.args.connections)

    def migrate(self, *ids: CmId) -> None:
        """With ``-m``, migrate ids to a new event channel."""
        if not self.args.migrate:
            return
        self.say("migrating to new event channel")
        old, self.channel = self.channel, self._open_channel()
        for cmid in ids:
            cmid.migrate(self.channel)
        self._selector.unregister(old)
        old.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for connection in self.connections.values():
            connection.close()
        for channel in self._completion_channels.values():
            channel.close()
        self._selector.close()
        self.channel.close()


class _Server(_Endpoint):
    """The server: listens, sends first, and disconnects."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._message = bytearray(islice(cycle(range(256)), args.size))
        self._listener = CmId(self.channel, self.space)

    def work(self) -> None:
        self.bind_listener(self._listener)
        self._listener.listen(self.args.connections)
        announce(self._listener)
        self.await_connections()
        if self.messages:
            self.say("initiating data transfers")
            self.send()
            self.say("completing sends")
            self.await_sent()
            self.say("receiving data transfers")
            self.await_received()
            self.say("data transfers complete")
        self.migrate(self._listener, *self.connections)
        self.say("cmatose: disconnecting")
        self.await_ends(is_first=True)
        self.say("disconnected")

    def advance(self, event: CmEvent) -> bool:
        if event.type is not CmEventType.CONNECT_REQUEST:
            return True
        cmid = event.id
        if len(self.connections) == self.args.connections:
            self.say("cmatose: failing connection request")
            cmid.reject()
            return False
        connection = self.connections[cmid] = _Exchange(self, cmid)
        self.set_options(cmid)
        connection.open(self._message, bytearray(self.args.size))
        cmid.accept()
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.destroy()
        super().__exit__(kind, error, tb)


class _Client(_Endpoint):
    """The client: connects, and sends the received messages back."""

    def work(self) -> None:
        self.say("cmatose: connecting")
        args = self.args
        source = None if self.args.bind is None else self.own_address(0)
        destination = self.find_server(source)
        self.wait_for(
            destination,
            lambda: f"{self.established} of {args.connections} connections established, {self.sent} messages sent",
        )
        for _ in range(self.args.connections):
            cmid = CmId(self.channel, self.space)
            self.connections[cmid] = _Exchange(self, cmid)
            self.set_options(cmid)
            if self.args.tos is not None:
                cmid.set_option(OptionLevel.ID, IdOption.TOS, self.args.tos)
            cmid.resolve_addr(destination, source, TIMEOUT_MS)
        self.await_connections()
        if self.messages:
            self.say("receiving data transfers")
            self.await_received()
            self.say("sending replies")
            self.send()
            self.await_sent()
            self.say("data transfers complete")
        self.migrate(*self.connections)
        self.await_ends(is_first=False)

    def advance(self, event: CmEvent) -> bool:
        if event.type is CmEventType.ADDR_RESOLVED:
            event.id.resolve_route(TIMEOUT_MS)
        elif event.type is CmEventType.ROUTE_RESOLVED:
            buffer = bytearray(self.args.size)
            self.connections[event.id].open(buffer, buffer)
            event.id.connect(_CONNECT_PARAM)
        return True
