"""``rdmacm demo``: the whole job on one screen."""

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
from rdmacm.connparam import ConnParam
from rdmacm.errors import CmDisconnectedError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.tools import perf
from rdmacm.tools.link import Link, Twin, add_provider, find, listening, say_listening, serve_in_turn
from rdmacm.tools.measure import Progress, size_text, time_text
from rdmacm.tools.output import Page, Parser, facts, table, write, write_json
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import AccessFlag, SendFlag, WROpcode
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

PAGE = Page(
    command="demo",
    summary="two processes connect, move data both ways and check it",
    description="""
        Starts a second process on this machine, resolves localhost to its device, GID and path, connects, and moves
        data: a SEND that is answered, an RDMA WRITE of which the other process tells the CRC-32, an RDMA READ of
        the same memory, a fetch-and-add and a compare-and-swap. Then it measures the throughput of WRITE and READ.
        Writes what was resolved and why, the time of each step, and what was found to be right.

        With --json, one object: resolution (as 'rdmacm explain --json' has it), pid (of the second process), steps (a
        list of objects with name, microseconds and detail) and throughput (objects as 'rdmacm perf --json' has
        them).
    """,
    examples=(
        ("rdmacm demo", "Show it."),
        ("rdmacm demo --pcap demo.pcapng", "Show it, and keep the packets for Wireshark."),
    ),
    see_also="rdmacm explain, rdmacm rping, rdmacm perf",
)

_SIZE = 1 << 20
_MESSAGE = 256
#: The private data of an answer: that it is the demo's, the rkey and address of the memory, the process.
_ANSWER = struct.Struct(">4sIQI")
_MAGIC = b"demo"
_CRC = struct.Struct(">I")
_ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC
_CAP = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
_RECV, _SENT = 1, 2
_SECONDS = 0.4


def add_arguments(parser: Parser) -> None:
    """The arguments of ``rdmacm demo``."""
    parser.add_argument("-s", "--server", action="store_true", help="Be the second process, which the first starts.")
    parser.add_argument("--json", action="store_true", help="Write one object.")
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Be the first process, or the second."""
    if args.server:
        with listening("localhost", 0, provider=args.provider) as listener:
            say_listening(listener)
            serve_in_turn(listener, _serve)
        return 0
    # A capture of all that goes through in that time would be hundreds of megabytes.
    seconds, count = (0.0, 4) if args.pcap else (_SECONDS, 0)
    plans = [perf.Plan(op, _SIZE, 8, False, True, seconds, count) for op in (perf.Op.WRITE, perf.Op.READ)]
    with Twin("demo", "--server", *(["--provider", args.provider] if args.provider else [])) as twin:
        cmid, explanation = find("localhost", twin.port, provider=args.provider)
        story = _Story(cmid, explanation)
        story.move()
        throughput = [
            perf.measure(
                find("localhost", twin.port, provider=args.provider)[0],
                plan,
                Progress(),
            )
            for plan in plans
        ]
    if args.json:
        write_json(
            {
                "resolution": explanation.as_dict(),
                "pid": story.pid,
                "steps": [
                    {"name": name, "microseconds": round(spent, 1), "detail": detail}
                    for name, spent, detail in story.steps
                ],
                "throughput": [result.as_dict() for result in throughput],
            }
        )
    else:
        write(_screen(explanation, story, throughput))
    return 0


# -- the second process --------------------------------------------------------------------------------------


def _serve(cmid: CmId) -> None:
    data = b"" if cmid.event is None else cmid.event.private_data
    if not data.startswith(_MAGIC):
        perf.serve_client(cmid)
        return
    with Link(cmid, _CAP) as link:
        memory, message, reply = bytearray(_SIZE + 8), bytearray(_MESSAGE), bytearray(_MESSAGE)
        region, inbox, outbox = link.register(memory, _ACCESS), link.register(message), link.register(reply)
        link.qp.post_recv(RecvWR(_RECV, [inbox.sge()]))
        link.accept(ConnParam(_ANSWER.pack(_MAGIC, region.rkey, region.addr, os.getpid())))
        with suppress(CmDisconnectedError):
            while True:
                length = min(link.wait_for(_RECV).byte_len, _MESSAGE - _CRC.size)
                reply[: length + _CRC.size] = message[:length] + _CRC.pack(zlib.crc32(memory))
                link.qp.post_recv(RecvWR(_RECV, [inbox.sge()]))
                answer = SendWR(_SENT, WROpcode.SEND, [outbox.sge(0, length + _CRC.size)], SendFlag.SIGNALED)
                link.qp.post_send(answer)
                link.wait_for(_SENT)


# -- the first process ---------------------------------------------------------------------------------------


class _Story:
    """What is done with one connection, step by step."""

    def __init__(self, cmid: CmId, explanation: Explanation) -> None:
        self.steps = [(step.name, step.microseconds, step.detail) for step in explanation.steps]
        self.pid = 0
        self._cmid = cmid
        self._detail = ""

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.steps.append((name, (time.perf_counter() - began) * 1e6, self._detail))
        self._detail = ""

    def move(self) -> None:
        """Connect, move data, look at it, disconnect."""
        with self._step("create qp"):
            link = Link(self._cmid, _CAP)
            self._detail = f"number 0x{link.qp.qp_num:06x}"
        with link:
            inbox = bytearray(_MESSAGE)
            received = link.register(inbox)
            link.qp.post_recv(RecvWR(_RECV, [received.sge()]))
            with self._step("connect"):
                answer = link.connect(ConnParam(_MAGIC))
                if len(answer) < _ANSWER.size or not answer.startswith(_MAGIC):
                    raise cm_error(errno.EPROTO, "the server is not the demo's", "connect", link.peer)
                _, rkey, address, self.pid = _ANSWER.unpack_from(answer)
                self._detail = f"process {os.getpid()} to process {self.pid}"
            self._move(link, inbox, [received.sge()], rkey, address)

    def _move(self, link: Link, inbox: bytearray, receive: list[SGE], rkey: int, address: int) -> None:
        # The counter is the first whole 64-bit word of the memory.
        at = -address % 8
        data, back, word = bytearray(os.urandom(_SIZE + 8)), bytearray(_SIZE + 8), bytearray(8)
        data[at : at + 8] = (41).to_bytes(8, "little")
        source, target, old = (link.register(buffer) for buffer in (data, back, word))

        def do(opcode: WROpcode, piece: SGE, offset: int = 0, compare_add: int = 0, swap: int = 0) -> None:
            wr = SendWR(_SENT, opcode, [piece], SendFlag.SIGNALED, remote_addr=address + offset, rkey=rkey)
            wr.compare_add, wr.swap = compare_add, swap
            link.qp.post_send(wr)
            link.wait_for(_SENT)

        def ask(text: bytes) -> int:
            """Send a message; the CRC-32 of the other process's memory is in its answer."""
            back[: len(text)] = text
            do(WROpcode.SEND, target.sge(0, len(text)))
            length = link.wait_for(_RECV).byte_len
            link.qp.post_recv(RecvWR(_RECV, receive))
            _expect(length == len(text) + _CRC.size and inbox[: len(text)] == text, "the answer", link)
            return int(_CRC.unpack_from(inbox, len(text))[0])

        size = size_text(_SIZE)
        with self._step("SEND"):
            ask(b"hello")
            self._detail = "'hello' there and back: right"
        with self._step("WRITE"):
            do(WROpcode.RDMA_WRITE, source.sge())
            self._detail = f"{size} of random bytes there"
        with self._step("check there"):
            _expect(ask(b"crc") == zlib.crc32(data), "the CRC-32 of what was written", link)
            self._detail = "the other process's CRC-32 of them: right"
        with self._step("READ"):
            do(WROpcode.RDMA_READ, target.sge())
            _expect(back == data, "what was read", link)
            self._detail = f"{size} back: equal"
        with self._step("FETCH_AND_ADD"):
            do(WROpcode.ATOMIC_FETCH_AND_ADD, old.sge(), at, 1)
            _expect(int.from_bytes(word, "little") == 41, "the word before the addition", link)
            self._detail = "a word there was 41, add 1"
        with self._step("CMP_AND_SWP"):
            do(WROpcode.ATOMIC_CMP_AND_SWP, old.sge(), at, 42, 7)
            _expect(int.from_bytes(word, "little") == 42, "the word before the swap", link)
            self._detail = "it was 42, so it is 7 now: right"
        with self._step("disconnect"):
            link.cmid.disconnect()


def _expect(is_right: bool, what: str, link: Link) -> None:
    if not is_right:
        raise cm_error(errno.EIO, f"{what} is not what it should be", "demo", link.peer)


# -- the screen ----------------------------------------------------------------------------------------------

_WIDTH = 100


def _screen(explanation: Explanation, story: _Story, throughput: list[perf.Result]) -> str:
    chosen, path = explanation.chosen, explanation.path or {}
    found = [("localhost", ", ".join(explanation.names))]
    if chosen is not None:
        found += [
            ("device", f"{chosen.device} port {chosen.port_num}, provider {explanation.provider}"),
            ("GID", f"{chosen.gid}, index {chosen.gid_index}"),
            ("why", f"{chosen.rule}: {chosen.reason}" if chosen.reason else chosen.rule),
        ]
    found.append(("path", f"{path.get('sgid')} -> {path.get('dgid')}, MTU {path.get('mtu')}"))
    rows = [(name, time_text(spent), detail) for name, spent, detail in story.steps]
    text = facts(found) + "\n" + table(("step", "time", "what"), rows, right=("time",)) + "\n"
    for result, way in zip(throughput, ("there", "back"), strict=True):
        text += f"{result.bytes_per_second / 1e6:,.0f} MB/s {way} ({result.plan.op.name} of {size_text(_SIZE)})\n"
    return "".join(f"{_cut(line)}\n" for line in text.splitlines())


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
