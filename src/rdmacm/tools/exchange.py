"""What ``rdmacm ucmatose``, ``udaddy`` and ``mckey`` have in common: they send a number of messages of one size.

They are librdmacm's tools of these names, which share options, lines of output and the end of the run.
"""

from __future__ import annotations

import argparse
import errno
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Generic, TypeVar

from rdmacm.address import SockAddr, format_address
from rdmacm.addrinfo import AddrInfo, getaddrinfo
from rdmacm.cmid import CmEvent, CmId, EventChannel, event_str
from rdmacm.constants import AddressFamily, CmEventType, PortSpace, RaiFlag
from rdmacm.diagnosis.explain import resolve
from rdmacm.errors import CmRejectedError, RdmaError, cm_error
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.provider.connparam import UdParam
from rdmacm.tools.arguments import add_number, integer_between
from rdmacm.tools.explain import error_of
from rdmacm.tools.output import Parser, write, write_json
from rdmacm.tools.serving import bind
from rdmacm.tools.waiting import PeerWait, notice
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import QPType, SendFlag, WROpcode
from rdmacm.verbs.pd import MR
from rdmacm.verbs.qp import QPInitAttr
from rdmacm.verbs.wr import RecvWR, SendWR

_MAX_MESSAGES = 32_768
#: The longest message in bytes.
_MAX_SIZE = 1 << 30
#: Format of the addresses, and the family it implies; 0 for any.
_FORMATS = {"name": 0, "ip": AddressFamily.INET, "ipv6": AddressFamily.INET6, "gid": AddressFamily.IB}
#: The wr_id of receives, and of sends.
RECV, SEND = 1, 2
#: Timeout of resolve_addr and of resolve_route, in milliseconds.
TIMEOUT_MS = 2000
#: Events of an id that could not be connected, or join a group.
FAILURES = frozenset(
    (
        CmEventType.ADDR_ERROR,
        CmEventType.ROUTE_ERROR,
        CmEventType.CONNECT_ERROR,
        CmEventType.UNREACHABLE,
        CmEventType.REJECTED,
        CmEventType.MULTICAST_ERROR,
    )
)


# -- options and output ---------------------------------------------------------------------------------


def add_format(parser: Parser) -> None:
    """Add ``-f``."""
    parser.add_argument(
        "-f",
        "--format",
        choices=_FORMATS,
        default="name",
        help="Format of the addresses; name accepts all formats (default: %(default)s).",
    )


def add_counts(parser: Parser, most: int, connections: str, messages: str, size: str) -> None:
    """Add ``-c``, up to ``most``, ``-C`` and ``-S``; the last arguments say what they are."""
    add_number(parser, ("-c", "--connections"), integer_between(1, most), 1, "N", connections)
    add_number(parser, ("-C", "--messages"), integer_between(0, _MAX_MESSAGES), 10, "N", messages)
    add_number(parser, ("-S", "--size"), integer_between(0, _MAX_SIZE), 100, "BYTES", size)


def say(args: argparse.Namespace, line: str) -> None:
    """Write a line of output, unless ``--json`` is given."""
    if not args.json:
        write(f"{line}\n")


def complete(args: argparse.Namespace, status: int) -> None:
    """Write the last lines."""
    say(args, "test complete")
    say(args, f"return status {status}")


def run_exchange(args: argparse.Namespace, name: str, role: str, make_end: Callable[[argparse.Namespace], End]) -> int:
    """Run an end of an exchange, between the first line of output of tool ``name`` and the last.

    Returns the exit status.
    """
    say(args, f"{name}: starting {role}")
    began = time.perf_counter()
    try:
        with make_end(args) as end:
            end.work()
    except RdmaError as error:
        complete(args, error.reason if isinstance(error, CmRejectedError) else -(error.errno or errno.EIO))
        raise
    complete(args, 0)
    if args.json:
        counts = {"connections": args.connections, "messages": args.messages, "size": args.size}
        moved = {"sent": args.size * end.sent, "received": end.received_bytes, **end.facts()}
        write_json({"role": role, **counts, **moved, "seconds": round(time.perf_counter() - began, 6)})
    return 0


# -- ends -----------------------------------------------------------------------------------------------


class End(AbstractContextManager["End"]):
    """The server or the client of a tool: its arguments, counters, and the addresses of both ends.

    Attributes:

    - ``args``: the arguments.
    - ``messages``: number of messages in each direction of each connection.
    - ``name``: the tool's name in its lines of output.
    - ``space``: the port space of the ids.
    - ``sent``: messages sent on all connections.
    - ``received``, ``received_bytes``: messages received on all connections, and their bytes.
    - ``waits``: the limits of waiting for the peer; None for the server, which waits without limit.
    """

    def __init__(self, args: argparse.Namespace, name: str, space: PortSpace) -> None:
        self.args = args
        self.name = name
        self.messages: int = args.messages if args.size else 0
        self.space = space
        self.sent = self.received = self.received_bytes = 0
        self.waits: PeerWait | None = None

    @abstractmethod
    def work(self) -> None:
        """Connect, exchange the messages and disconnect."""

    def facts(self) -> dict[str, object]:
        """What the object of ``--json`` has before the seconds."""
        return {}

    def say(self, line: str) -> None:
        """Write one line of the tool's output."""
        say(self.args, line)

    def check_event(self, event: CmEvent, step: str, peer: str | None) -> None:
        """Raise the error of an event that tells of a failure."""
        if event.type in FAILURES:
            self.say(f"{self.name}: event: {event_str(event.type)}, error: {event.status}")
            assert event.error is not None
            raise event.error
        if event.type is CmEventType.DEVICE_REMOVAL:
            raise cm_error(errno.ENODEV, "the device was removed", step, peer)

    def own_address(self, port: int) -> SockAddr:
        """The address of ``-b``."""
        hints = self._hints(RaiFlag.PASSIVE | RaiFlag.NOROUTE)
        address = getaddrinfo(self.args.bind, port, hints, provider=self.args.provider)[0].src_addr
        assert address is not None
        return address

    def bind_listener(self, listener: CmId) -> None:
        """Bind to the address of ``-b``, or to every address, and the port."""
        if self.args.bind is None:
            bind(listener, None, self.args.port)
        else:
            listener.bind_addr(self.own_address(self.args.port))

    def find_server(self, source: SockAddr | None) -> SockAddr:
        """The first of the server's addresses that can be resolved."""
        hints, args = replace(self._hints(RaiFlag(0)), src_addr=source), self.args
        with notice(f"the resolution of {args.server}"):
            found, explanation = resolve(args.server, args.port, hints, timeout_ms=TIMEOUT_MS, provider=args.provider)
        if found is None:
            raise error_of(explanation, None)
        with found:
            assert found.route.dst_addr is not None
            return found.route.dst_addr

    def wait_for(self, server: SockAddr, progress: Callable[[], str]) -> None:
        """From now on wait for the server no longer than ``--timeout``; ``progress`` says how far the run is."""
        self.waits = PeerWait(format_address(server), self.args.timeout)
        self.waits.progress = lambda: (
            f"{progress()}, {self.received} of {self.messages * self.args.connections} messages received"
        )
        self.waits.hint = (
            "checking that a server listens on that port and has the same -c, -C and -S, that firewalls let UDP port"
            " 4791 pass (rdmacm doctor C1), or a longer --timeout"
        )

    def _hints(self, flags: RaiFlag) -> AddrInfo:
        family = _FORMATS[self.args.format]
        if family:
            flags |= RaiFlag.NUMERICHOST
        if family == AddressFamily.IB:
            flags |= RaiFlag.FAMILY
        return AddrInfo(flags=flags, family=family, port_space=self.space)


# -- datagrams ------------------------------------------------------------------------------------------


class DatagramNode:
    """A datagram id with its queue pair, its memory, and the destination of its messages.

    Attributes:

    - ``cmid``: the id.
    - ``count``, ``size``: number of messages, and bytes of each.
    - ``ah``, ``remote_qpn``, ``remote_qkey``: the destination; ``ah`` is None until it is known.
    """

    remote_qkey: int
    remote_qpn: int

    def __init__(self, cmid: CmId, count: int, size: int) -> None:
        self.cmid = cmid
        self.count = count
        self.size = size
        self.ah: AH | None = None
        self.remote_qpn = self.remote_qkey = 0
        self._cq: CQ | None = None
        self._region: MR | None = None

    def check_size(self, args: argparse.Namespace, tool: str, ends: str) -> None:
        """EINVAL, and a line of output, for messages that are longer than the MTU of the port."""
        port = self.cmid.verbs.query_port(self.cmid.port_num)
        mtu = (port.active_mtu or port.max_mtu).bytes
        if self.count and self.size > mtu:
            say(args, f"{tool}: message_size {self.size} is larger than active mtu {mtu}")
            text = f"messages of {self.size} bytes are longer than the port's MTU of {mtu}"
            raise cm_error(errno.EINVAL, text, "create_qp", self.cmid.verbs.name, f"-S {mtu} at {ends} ends")

    def create_qp(self, receives: int) -> None:
        """Create the queue pair and post receives, all into the same memory."""
        cmid, count = self.cmid, self.count
        self._cq = CQ(cmid.verbs, max(1, 2 * count))
        cap = QPCap(max_send_wr=max(1, count), max_recv_wr=max(1, count))
        qp = cmid.create_qp(QPInitAttr(QPType.UD, scq=self._cq, rcq=self._cq, cap=cap))
        if count:
            self._region = cmid.reg_msgs(bytearray(GRH_LENGTH + self.size))
            qp.post_recv([RecvWR(RECV, [self._region.sge()])] * receives)

    def send_to(self, param: UdParam) -> None:
        """Send to the destination that an event has told."""
        self.ah = AH(self.cmid.pd, param.ah_attr)
        self.remote_qpn, self.remote_qkey = param.qp_num, param.qkey

    def post_messages(self, flags: SendFlag) -> None:
        """Post all messages, with the number of the queue pair as immediate data."""
        qp, region = self.cmid.qp, self._region
        assert qp is not None
        assert region is not None
        message = SendWR(
            SEND,
            WROpcode.SEND_WITH_IMM,
            [region.sge(GRH_LENGTH)],
            flags,
            imm_data=qp.qp_num,
            ah=self.ah,
            remote_qpn=self.remote_qpn,
            remote_qkey=self.remote_qkey,
        )
        qp.post_send([message] * self.count)

    @property
    def cq(self) -> CQ:
        """The completion queue."""
        assert self._cq is not None
        return self._cq

    @property
    def inbox(self) -> MR:
        """The memory that messages are received into, after the GRH."""
        assert self._region is not None
        return self._region

    def close(self) -> None:
        """Release everything."""
        if self.ah is not None:
            self.ah.close()
        self.cmid.destroy_qp()
        self.cmid.destroy()
        if self._region is not None:
            self._region.close()
        if self._cq is not None:
            self._cq.close()


N = TypeVar("N", bound=DatagramNode)


class DatagramEnd(End, Generic[N]):
    """An end of a tool that exchanges datagrams: ``nodes`` by id, and the ``channel`` of the ids."""

    def __init__(self, args: argparse.Namespace, name: str, space: PortSpace) -> None:
        super().__init__(args, name, space)
        self.nodes: dict[CmId, N] = {}
        self.channel: EventChannel = EventChannel(args.provider)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for node in self.nodes.values():
            node.close()
        self.channel.close()
