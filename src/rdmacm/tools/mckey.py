"""``rdmacm mckey``: send datagrams to a multicast group and receive them, with the protocol of mckey(1).

Each end joins the group with its queue pairs. The sender pauses, until the switches on the way know the new members,
and then sends its messages with each queue pair, with the number of the queue pair as immediate data. The receiver has
posted as many receives for each of its queue pairs as there are messages, and ends when all are complete. The number
and the size of the messages are not sent: both ends must be started with the same values.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from types import TracebackType

from rdmacm.address import Gid, SockAddr, SockAddrIB, format_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.capabilities import Feature, absent
from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType, McJoinFlag, PortSpace, RaiFlag
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.provider.connparam import UdParam
from rdmacm.tools.arguments import add_number, add_provider, add_wait_limit, seconds_between
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.connection import completion_failure
from rdmacm.tools.exchange import TIMEOUT_MS, DatagramEnd, DatagramNode, add_counts, run_exchange
from rdmacm.tools.output import Page, Parser
from rdmacm.tools.waiting import PeerWait, next_event
from rdmacm.verbs.enums import SendFlag, WCStatus

PAGE = Page(
    command="mckey",
    summary=COMMANDS["mckey"],
    description="""
        Joins a multicast group with one or more queue pairs; with -s sends datagrams to it, else receives them.
        Protocol, options and output are those of mckey(1) of librdmacm, which may run at the other ends.

        Start the receivers first, any number of them, on any hosts, also several on one host. All ends must be given
        the same -C and -S. A receiver waits without limit for the first message, and then --timeout for each further
        one: datagrams that the network loses are not sent again.

        With --json, each end writes one object instead, if it succeeds: role (client, the sender, or server),
        connections, messages, size, sent and received (bytes), group (the MGID), and seconds.
    """,
    examples=(
        ("rdmacm mckey -m 239.1.2.3 -b 127.0.0.1", "Receive ten messages."),
        ("rdmacm mckey -m 239.1.2.3 -b 127.0.0.1 -s", "Send them."),
        ("rdmacm mckey -m ff1e::7 -b fd00::1 -C 100 -S 1024 --json", "Receive 100 messages of 1 KiB by IPv6."),
    ),
    see_also="mckey(1), rdmacm udaddy, ip-maddress(8)",
    environment=("RDMACM_PROVIDER",),
)

#: The port space, a number as in C.
_SPACES = {number: PortSpace(int(number, 0)) for number in ("0x0111", "0x111", "273", "0x0002", "0x2", "2")}
_MAX_CONNECTIONS = 1000


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm mckey``."""
    add = parser.add_argument
    add("-m", "--group", metavar="ADDR", help="The IP address of the group.")
    add("-M", "--gid", type=_gid, metavar="GID", help="The GID of the group, instead of -m; needs -b.")
    add("-s", "--send", action="store_true", help="Send datagrams to the group.")
    add("-b", "--bind", metavar="ADDR", help="The local address, whose device joins the group.")
    add_counts(
        parser,
        _MAX_CONNECTIONS,
        "Number of queue pairs that join the group",
        "Number of messages that each queue pair sends or receives",
        "Size of a message in bytes, at most the MTU of the port",
    )
    add(
        "-p",
        "--port-space",
        choices=_SPACES,
        default="0x0111",
        help="The port space as a number: 0x0111 is udp, 0x0002 ipoib (default: %(default)s).",
    )
    add("-o", "--send-only", action="store_true", help="Join the group as a send-only full member.")
    add(
        "-l",
        "--no-loopback",
        action="store_true",
        help="Keep the messages from the receivers of this host. No software device can do that.",
    )
    what = "How long the sender waits after it has joined, while switches learn of it"
    add_number(parser, ("--pause",), seconds_between(0, 3600), 3.0, "SECONDS", what)
    add("--json", action="store_true", help="Write one JSON object instead of the progress.")
    add_wait_limit(parser)
    add_provider(parser)


def _gid(text: str) -> Gid:
    try:
        return Gid("::" if text == "0" else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Join the group, and send or receive."""
    if (args.group is None) == (args.gid is None):
        args.parser.error("either -m ADDR or -M GID is needed")
    if args.gid is not None and args.bind is None:
        args.parser.error("-M needs -b ADDR: unmapped multicast address requires binding to source address")
    return run_exchange(args, "mckey", "client" if args.send else "server", _Endpoint)


class _Node(DatagramNode):
    """An id whose queue pair joins the group."""

    def __init__(self, endpoint: _Endpoint, cmid: CmId) -> None:
        super().__init__(cmid, endpoint.messages, endpoint.args.size)
        self._endpoint = endpoint

    def open(self) -> None:
        """Create the queue pair, and post the receives of a receiver. EINVAL: messages above the MTU."""
        args = self._endpoint.args
        self.check_size(args, "mckey", "all")
        if args.no_loopback:
            raise absent(Feature.MULTICAST_TO_OTHERS, "create_qp", self.cmid.verbs.name, hint="no -l")
        self.create_qp(0 if args.send else self.count)

    def joined(self, param: UdParam) -> None:
        """The group can be sent to."""
        attr = param.ah_attr
        self._endpoint.dgid = str(attr.gr.dgid)
        self._endpoint.say(f"mckey: joined dgid: {attr.gr.dgid} mlid 0x{attr.dlid:x} sl {attr.sl}")
        self.send_to(param)

    def receive(self) -> None:
        """Wait until all receives are complete."""
        endpoint, cq = self._endpoint, self.cq
        left = self.count
        while left:
            if endpoint.received:
                endpoint.waits.until(cq.wait)
            else:
                cq.wait(None)
            for wc in cq.poll(left):
                if wc.status is not WCStatus.SUCCESS:
                    raise completion_failure(wc, endpoint.waits.whom)
                left -= 1
                endpoint.received += 1
                endpoint.received_bytes += wc.byte_len - GRH_LENGTH


class _Endpoint(DatagramEnd[_Node]):
    """The sender or a receiver."""

    waits: PeerWait

    def __init__(self, args: argparse.Namespace) -> None:
        #: The group, and its MGID as text.
        self._group: SockAddr = SockAddrIB(args.gid) if args.gid is not None else _find(args, args.group, RaiFlag(0))
        self.dgid = ""
        super().__init__(args, "mckey", _SPACES[args.port_space])
        #: Number of nodes that have joined the group.
        self._joined = 0
        self.waits = PeerWait(format_address(self._group), args.timeout)
        self.waits.progress = lambda: (
            f"{self._joined} of {args.connections} queue pairs have joined,"
            f" {self.received} of {0 if args.send else self.messages * args.connections} messages received"
        )
        self.waits.hint = (
            "checking that the sender has the same -C and -S, that firewalls let UDP port 4791 and IGMP or MLD pass"
            " (rdmacm doctor C1), or a longer --timeout"
        )

    def facts(self) -> dict[str, object]:
        return {"group": self.dgid}

    def work(self) -> None:
        args = self.args
        source = None if args.bind is None else _find(args, args.bind, RaiFlag.PASSIVE)
        self.say("mckey: joining")
        for _ in range(args.connections):
            cmid = CmId(self.channel, self.space)
            node = self.nodes[cmid] = _Node(self, cmid)
            if source is not None:
                cmid.bind_addr(source)
            if isinstance(self._group, SockAddrIB):
                self._join(node)
            else:
                cmid.resolve_addr(self._group, source, TIMEOUT_MS)
        while self._joined < args.connections:
            with self.waits.until(partial(next_event, self.channel)) as event:
                self._advance(event)
        if self.messages:
            self._move_data()

    def _advance(self, event: CmEvent) -> None:
        self.check_event(event, "join_multicast", self.waits.whom)
        if event.type is CmEventType.ADDR_RESOLVED:
            self._join(self.nodes[event.id])
        elif event.type is CmEventType.MULTICAST_JOIN:
            assert isinstance(event.param, UdParam)
            self.nodes[event.id].joined(event.param)
            self._joined += 1

    def _join(self, node: _Node) -> None:
        node.open()
        flag = McJoinFlag.SENDONLY_FULLMEMBER if self.args.send_only else McJoinFlag.FULLMEMBER
        node.cmid.join_multicast_ex(self._group, flag, node)

    def _move_data(self) -> None:
        if self.args.send:
            time.sleep(self.args.pause)
            self.say("initiating data transfers")
            for node in self.nodes.values():
                node.post_messages(SendFlag(0))
                self.sent += self.messages
        else:
            self.say("receiving data transfers")
            for node in self.nodes.values():
                node.receive()
        self.say("data transfers complete")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            for cmid in self.nodes:
                cmid.leave_multicast(self._group)
        super().__exit__(kind, error, tb)


def _find(args: argparse.Namespace, host: str, flags: RaiFlag) -> SockAddr:
    """The first address of a host or a group."""
    hints = AddrInfo(flags=flags | RaiFlag.NOROUTE, port_space=_SPACES[args.port_space])
    found = getaddrinfo(host, None, hints, provider=args.provider)[0]
    address = found.src_addr if flags else found.dst_addr
    assert address is not None
    return address
