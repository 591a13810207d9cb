"""``rdmacm udaddy``: exchange datagrams between pairs of queue pairs, with the protocol of udaddy(1).

The client finds a queue pair of the server for each of its own, by a request of the connection manager. Then it sends
its messages, each with the number of its queue pair as immediate data. When the server has received all messages of all
its queue pairs, it sends as many back, to the address in the GRH of the first one. The number and the size of the
messages are not sent: both ends must be started with the same values.
"""

from __future__ import annotations

import argparse
from abc import abstractmethod
from contextlib import suppress
from functools import partial
from types import TracebackType

from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType, IdOption, OptionLevel, PortSpace
from rdmacm.errors import RdmaError
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.tools.arguments import add_address, add_host, add_provider, add_wait_limit, integer_between, take_host
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.connection import completion_failure
from rdmacm.tools.exchange import SEND, TIMEOUT_MS, DatagramEnd, DatagramNode, add_counts, add_format, run_exchange
from rdmacm.tools.output import Page, Parser
from rdmacm.tools.serving import announce
from rdmacm.tools.waiting import next_event
from rdmacm.verbs.ah import AH
from rdmacm.verbs.enums import WC, SendFlag, WCStatus

PAGE = Page(
    command="udaddy",
    summary=COMMANDS["udaddy"],
    description="""
        The client finds queue pairs of the server, sends datagrams to each, and the server sends as many back.
        Protocol, options and output are those of udaddy(1) of librdmacm, which may run at the other end. The client is
        the end with HOST.

        A server reports its address on standard error. Both ends must be given the same -c, -C and -S. Datagrams that
        the network loses are not sent again: a client that misses some gives up after --timeout. With no messages, or
        messages of 0 bytes, the queue pairs find each other, and nothing is sent.

        With --json, each end writes one object instead, if it succeeds: role (client or server), connections,
        messages, size, sent and received (bytes), and seconds.
    """,
    examples=(
        ("rdmacm udaddy", "Serve a client with one queue pair."),
        ("rdmacm udaddy localhost", "Run that client."),
        ("rdmacm udaddy -b ::1 --port 7200 -c 100", "Serve a client with a hundred queue pairs."),
        ("rdmacm udaddy storage-7 -C 100 -S 1024 --json", "Exchange 100 datagrams of 1 KiB and print a summary."),
    ),
    see_also="udaddy(1), rdmacm ucmatose",
    environment=("RDMACM_PROVIDER",),
)

_PORT_SPACES = {"udp": PortSpace.UDP, "ipoib": PortSpace.IPOIB}
#: C's older option for the port space, a number.
_NUMBERS = {number: int(number, 0) for number in ("0x0111", "0x111", "273", "0x0002", "0x2", "2")}
_PORT = 7174
_MAX_CONNECTIONS = 10_000


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm udaddy``."""
    add = parser.add_argument
    add_host(parser)
    add("-s", "--server", metavar="ADDR", help="Run as the client of the server at this address, as HOST.")
    add_address(parser)
    add_format(parser)
    add("-P", "--port-space", choices=_PORT_SPACES, default="udp", help="The port space (default: %(default)s).")
    add("-p", choices=_NUMBERS, dest="number", help="The port space as a number: 0x0111 is udp, 0x0002 ipoib.")
    add_counts(
        parser,
        _MAX_CONNECTIONS,
        "Number of queue pairs at each end",
        "Number of messages in each direction of each queue pair",
        "Size of a message in bytes, at most the MTU of the port",
    )
    add("-t", "--tos", type=integer_between(0, 255), metavar="N", help="The type of service; client only.")
    add(
        "--port",
        type=integer_between(0, 65535),
        default=_PORT,
        help="The server's port; the server takes 0 for any free port (default: %(default)s, which is udaddy's).",
    )
    add("--json", action="store_true", help="Write one JSON object instead of the progress.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    take_host(args, "server")
    is_server = args.server is None
    if is_server and args.tos is not None:
        args.parser.error("-t is an option of the client, and needs HOST")
    if is_server:
        return run_exchange(args, "udaddy", "server", _Server)
    return run_exchange(args, "udaddy", "client", _Client)


class _Node(DatagramNode):
    """An id whose queue pair exchanges messages with one of the peer's."""

    def __init__(self, endpoint: _Endpoint, cmid: CmId) -> None:
        super().__init__(cmid, endpoint.messages, endpoint.args.size)
        self.peer = cmid.peer_addr_text
        self._endpoint = endpoint

    def open(self) -> None:
        """Create the queue pair and post the receives. EINVAL: messages above the MTU."""
        self.check_size(self._endpoint.args, "udaddy", "both")
        self.create_qp(self.count)

    def await_completions(self) -> None:
        """Wait until as many requests are complete as there are messages."""
        endpoint, cq = self._endpoint, self.cq
        left = self.count
        while left:
            if endpoint.waits is not None:
                endpoint.waits.until(cq.wait)
            else:
                cq.wait(None)
            for wc in cq.poll(left):
                left -= 1
                self._take(wc)

    def _take(self, wc: WC) -> None:
        endpoint = self._endpoint
        if wc.status is not WCStatus.SUCCESS:
            raise completion_failure(wc, self.peer)
        if wc.wr_id == SEND:
            endpoint.sent += 1
            return
        endpoint.received += 1
        endpoint.received_bytes += wc.byte_len - GRH_LENGTH
        if self.ah is None:
            # The replies go to the sender of the first message, with the Q_Key of the queue pair that received it.
            qp = self.cmid.qp
            assert qp is not None
            self.ah = AH(self.cmid.pd, wc=wc, grh=self.inbox.buf, port_num=self.cmid.port_num)
            self.remote_qpn = wc.src_qp if wc.imm_data is None else wc.imm_data
            self.remote_qkey = qp.query()[0].qkey


class _Endpoint(DatagramEnd[_Node]):
    """What the server and the client have in common."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(
            args, "udaddy", PortSpace(_NUMBERS[args.number]) if args.number else _PORT_SPACES[args.port_space]
        )
        #: Number of nodes whose peer is known, or that were accepted.
        self.connected = 0

    @abstractmethod
    def advance(self, event: CmEvent) -> None:
        """Start the next step of a node."""

    def await_nodes(self) -> None:
        """Process events until all nodes are connected."""
        while self.connected < self.args.connections:
            if self.waits is None:
                event = self.channel.get_event()
            else:
                event = self.waits.until(partial(next_event, self.channel))
            with event:
                self.check_event(event, "connect", event.id.peer_addr_text)
                self.advance(event)

    def await_messages(self) -> None:
        """Wait for the completions of all nodes."""
        for node in self.nodes.values():
            node.await_completions()


class _Server(_Endpoint):
    """The server: listens, receives, and replies."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._listener = CmId(self.channel, self.space)

    def work(self) -> None:
        self.bind_listener(self._listener)
        self._listener.listen(0)
        announce(self._listener)
        self.await_nodes()
        if not self.messages:
            return
        self.say("receiving data transfers")
        self.await_messages()
        self.say("sending replies")
        for node in self.nodes.values():
            node.post_messages(SendFlag.SIGNALED)
        self.await_messages()
        self.say("data transfers complete")

    def advance(self, event: CmEvent) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            return
        cmid = event.id
        node = self.nodes[cmid] = _Node(self, cmid)
        try:
            node.open()
        except RdmaError:
            self.say("udaddy: failing connection request")
            with suppress(RdmaError):
                cmid.reject()
            raise
        cmid.accept(ConnParam(qp_num=cmid.qp.qp_num))
        self.connected += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.destroy()
        super().__exit__(kind, error, tb)


class _Client(_Endpoint):
    """The client: finds the server's queue pairs, sends, and receives the replies."""

    def work(self) -> None:
        args = self.args
        source = None if args.bind is None else self.own_address(0)
        destination = self.find_server(source)
        self.say("udaddy: connecting")
        self.wait_for(destination, lambda: f"{self.connected} of {args.connections} queue pairs found")
        for _ in range(args.connections):
            cmid = CmId(self.channel, self.space)
            self.nodes[cmid] = _Node(self, cmid)
            if args.tos is not None:
                cmid.set_option(OptionLevel.ID, IdOption.TOS, args.tos)
            cmid.resolve_addr(destination, source, TIMEOUT_MS)
        self.await_nodes()
        if not self.messages:
            return
        self.say("initiating data transfers")
        for node in self.nodes.values():
            node.post_messages(SendFlag(0))
            self.sent += self.messages
        self.say("receiving data transfers")
        self.await_messages()
        self.say("data transfers complete")

    def advance(self, event: CmEvent) -> None:
        node = self.nodes[event.id]
        if event.type is CmEventType.ADDR_RESOLVED:
            event.id.resolve_route(TIMEOUT_MS)
        elif event.type is CmEventType.ROUTE_RESOLVED:
            node.open()
            event.id.connect()
        elif event.type is CmEventType.ESTABLISHED:
            assert isinstance(event.param, UdParam)
            node.send_to(event.param)
            self.connected += 1
