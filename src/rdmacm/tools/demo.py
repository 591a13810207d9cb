"""``rdmacm demo``: two processes connect, move data and check it, on one screen."""

from __future__ import annotations

import argparse
import errno
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rdmacm.cmid import CmId
from rdmacm.errors import CmDisconnectedError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.provider.connparam import ConnParam
from rdmacm.tools import perf
from rdmacm.tools.arguments import add_provider, add_wait_limit
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.connection import ToolConnection, find_server
from rdmacm.tools.measure import ProgressLine, size_text, time_text
from rdmacm.tools.output import Page, Parser, labelled_lines, table, write, write_json
from rdmacm.tools.perf_plan import Op, Plan, Result
from rdmacm.tools.serving import ServerProcess, listening, own_host, serve_in_turn
from rdmacm.tools.waiting import PeerWait
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import AccessFlag, SendFlag, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

PAGE = Page(
    command="demo",
    summary=COMMANDS["demo"],
    description="""
        Starts a second process on this machine, resolves an address of this machine to its device, GID and path,
        connects, and moves data: a SEND that is answered, an RDMA WRITE that the other process confirms by its CRC-32,
        an RDMA READ of the same memory, a fetch-and-add and a compare-and-swap. Then it measures the throughput of
        WRITE and READ.
        Shows the result of the resolution and its reason, the time of each step, and the outcome of each check.

        With --json, writes one object: resolution (as in 'rdmacm explain --json'), pid (of the second process), steps
        (a list of objects with name, microseconds and detail) and throughput (a list as in 'rdmacm perf --json').
    """,
    examples=(
        ("rdmacm demo", "Run the demonstration."),
        ("rdmacm demo --pcap demo.pcapng", "Run it and capture the packets for Wireshark."),
    ),
    see_also="rdmacm explain, rdmacm rping, rdmacm perf",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"),
)

#: Bytes of the RDMA WRITE and READ, and of the largest message.
_SIZE = 1 << 20
_MESSAGE = 256
#: The private data of the server's answer: magic number, rkey and address of its memory, process id.
_ANSWER = struct.Struct(">4sIQI")
_MAGIC = b"demo"
_CRC = struct.Struct(">I")
_ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC
_CAP = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
#: The wr_id of receives, and of all other work requests.
_RECV, _SENT = 1, 2
#: Seconds of each measurement of throughput.
_SECONDS = 0.4


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm demo``."""
    parser.add_argument("-s", "--server", action="store_true", help="Run as the second process; for internal use.")
    parser.add_argument("--json", action="store_true", help="Write one JSON object.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the first process, or as the second."""
    if args.server:
        with listening(own_host(args.provider, "localhost"), 0, provider=args.provider) as listener:
            serve_in_turn(listener, _serve)
        return 0
    # With a capture, move a fixed amount: a timed measurement would write hundreds of megabytes.
    seconds, count = (0.0, 4) if args.pcap else (_SECONDS, 0)
    plans = [Plan(op, _SIZE, 8, False, True, seconds, count) for op in (Op.WRITE, Op.READ)]
    host = own_host(args.provider, "localhost")
    with ServerProcess("demo", "--server", timeout=args.timeout, provider=args.provider) as server:
        cmid, explanation = find_server(host, server.port, provider=args.provider)
        demonstration = _Demonstration(cmid, explanation, args.timeout)
        demonstration.run()
        throughput = [
            perf.measure(
                find_server(host, server.port, provider=args.provider)[0],
                plan,
                args.timeout,
                ProgressLine(),
            )
            for plan in plans
        ]
    if args.json:
        write_json(
            {
                "resolution": explanation.as_dict(),
                "pid": demonstration.pid,
                "steps": [
                    {"name": name, "microseconds": round(spent, 1), "detail": detail}
                    for name, spent, detail in demonstration.steps
                ],
                "throughput": [result.as_dict() for result in throughput],
            }
        )
    else:
        write(_text(host, explanation, demonstration, throughput))
    return 0


# -- the second process --------------------------------------------------------------------------------------


def _serve(cmid: CmId) -> None:
    data = cmid.event.private_data
    if not data.startswith(_MAGIC):
        perf.serve_client(cmid)
        return
    with ToolConnection(cmid, _CAP) as connection:
        memory, message, reply = bytearray(_SIZE + 8), bytearray(_MESSAGE), bytearray(_MESSAGE)
        region = connection.register(memory, _ACCESS)
        inbox, outbox = connection.register(message), connection.register(reply)
        connection.qp.post_recv(RecvWR(_RECV, [inbox.sge()]))
        connection.accept(ConnParam(_ANSWER.pack(_MAGIC, region.rkey, region.addr, os.getpid())))
        with suppress(CmDisconnectedError):
            while True:
                length = min(connection.wait_for(_RECV).byte_len, _MESSAGE - _CRC.size)
                reply[: length + _CRC.size] = message[:length] + _CRC.pack(zlib.crc32(memory))
                connection.qp.post_recv(RecvWR(_RECV, [inbox.sge()]))
                answer = SendWR(_SENT, WROpcode.SEND, [outbox.sge(0, length + _CRC.size)], SendFlag.SIGNALED)
                connection.qp.post_send(answer)
                connection.wait_for(_SENT)


# -- the first process ---------------------------------------------------------------------------------------


class _Demonstration:
    """The steps of the demonstration on one connection."""

    def __init__(self, cmid: CmId, explanation: Explanation, timeout: float) -> None:
        #: Name, duration in microseconds, and result of each step.
        self.steps = [(step.name, step.microseconds, step.detail) for step in explanation.steps]
        #: Process id of the server.
        self.pid = 0
        self._cmid = cmid
        self._waits = PeerWait(f"the second process at {cmid.peer_addr_text}", timeout)
        self._waits.hint = "checking that the second process is not stopped, or a longer --timeout"
        #: The result of the current step.
        self._detail = ""

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._waits.progress = lambda: f"the steps before {name} are done, and {name} is not"
        began = time.perf_counter()
        yield
        self.steps.append((name, (time.perf_counter() - began) * 1e6, self._detail))
        self._detail = ""

    def run(self) -> None:
        """Connect, move data and check it, disconnect."""
        with self._step("create qp"):
            connection = ToolConnection(self._cmid, _CAP)
            self._detail = f"number 0x{connection.qp.qp_num:06x}"
        with connection:
            inbox = bytearray(_MESSAGE)
            received = connection.register(inbox)
            connection.qp.post_recv(RecvWR(_RECV, [received.sge()]))
            with self._step("connect"):
                answer = connection.connect(ConnParam(_MAGIC), self._waits)
                if len(answer) < _ANSWER.size or not answer.startswith(_MAGIC):
                    raise cm_error(errno.EPROTO, "the server is not that of 'rdmacm demo'", "connect", connection.peer)
                _, rkey, address, self.pid = _ANSWER.unpack_from(answer)
                self._detail = f"process {os.getpid()} to process {self.pid}"
            self._move_data(connection, inbox, [received.sge()], rkey, address)

    def _move_data(
        self, connection: ToolConnection, inbox: bytearray, receive: list[SGE], rkey: int, address: int
    ) -> None:
        # The atomic operations use the first aligned 64-bit word of the remote memory.
        at = -address % 8
        data, back, word = bytearray(os.urandom(_SIZE + 8)), bytearray(_SIZE + 8), bytearray(8)
        data[at : at + 8] = (41).to_bytes(8, "little")
        source, target, old = (connection.register(buffer) for buffer in (data, back, word))

        def execute(opcode: WROpcode, piece: SGE, offset: int = 0, compare_add: int = 0, swap: int = 0) -> None:
            wr = SendWR(_SENT, opcode, [piece], SendFlag.SIGNALED, remote_addr=address + offset, rkey=rkey)
            wr.compare_add, wr.swap = compare_add, swap
            connection.qp.post_send(wr)
            connection.wait_for(_SENT)

        def exchange(text: bytes) -> int:
            """Send a message, check that it is returned, and return the CRC-32 of the other process's memory."""
            back[: len(text)] = text
            execute(WROpcode.SEND, target.sge(0, len(text)))
            length = connection.wait_for(_RECV).byte_len
            connection.qp.post_recv(RecvWR(_RECV, receive))
            _expect(length == len(text) + _CRC.size and inbox[: len(text)] == text, "the answer", connection)
            return int(_CRC.unpack_from(inbox, len(text))[0])

        size = size_text(_SIZE)
        with self._step("SEND"):
            exchange(b"hello")
            self._detail = "'hello' sent and returned: correct"
        with self._step("WRITE"):
            execute(WROpcode.RDMA_WRITE, source.sge())
            self._detail = f"{size} of random bytes written"
        with self._step("check CRC-32"):
            _expect(exchange(b"crc") == zlib.crc32(data), "the CRC-32 of the written data", connection)
            self._detail = "the other process has the same CRC-32: correct"
        with self._step("READ"):
            execute(WROpcode.RDMA_READ, target.sge())
            _expect(back == data, "the data read back", connection)
            self._detail = f"{size} read back: correct"
        with self._step("FETCH_AND_ADD"):
            execute(WROpcode.ATOMIC_FETCH_AND_ADD, old.sge(), at, 1)
            _expect(int.from_bytes(word, "little") == 41, "the word before the addition", connection)
            self._detail = "a remote word was 41, 1 added: correct"
        with self._step("CMP_AND_SWP"):
            execute(WROpcode.ATOMIC_CMP_AND_SWP, old.sge(), at, 42, 7)
            _expect(int.from_bytes(word, "little") == 42, "the word before the swap", connection)
            self._detail = "it was 42 and is now 7: correct"
        with self._step("disconnect"):
            connection.cmid.disconnect()


def _expect(is_right: bool, what: str, connection: ToolConnection) -> None:
    if not is_right:
        raise cm_error(errno.EIO, f"{what} is wrong", "demo", connection.peer)


# -- output --------------------------------------------------------------------------------------------------

#: Columns; longer lines are cut.
_WIDTH = 80


def _text(host: str, explanation: Explanation, demonstration: _Demonstration, throughput: list[Result]) -> str:
    chosen, path = explanation.chosen, explanation.path or {}
    found = [(host, ", ".join(explanation.names))]
    if chosen is not None:
        found += [
            ("device", f"{chosen.device} port {chosen.port_num}, provider {explanation.provider}"),
            ("GID", f"{chosen.gid}, index {chosen.gid_index}"),
            ("why", f"{chosen.rule}: {chosen.reason}" if chosen.reason else chosen.rule),
        ]
    found.append(("path", f"{path.get('sgid')} -> {path.get('dgid')}, MTU {path.get('mtu')}"))
    rows = [(name, time_text(spent), detail) for name, spent, detail in demonstration.steps]
    text = labelled_lines(found) + "\n" + table(("step", "time", "result"), rows, right=("time",)) + "\n"
    for result, way in zip(throughput, ("out", "back"), strict=True):
        text += f"{result.bytes_per_second / 1e6:,.0f} MB/s {way} ({result.plan.op.name} of {size_text(_SIZE)})\n"
    return "".join(f"{_cut(line)}\n" for line in text.splitlines())


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
