"""Captures for ``rdmacm trace``: files of any bytes, and frames of any bytes, raise nothing and are shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from fuzz.harness import Source, target
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.wire import WireError
from rdmacm.trace.files import CaptureFile
from rdmacm.trace.links import FINDERS
from rdmacm.trace.mermaid import mermaid
from rdmacm.trace.report import connection_json
from rdmacm.trace.svg import svg
from rdmacm.trace.text import diagram, half_rows, operation_rows, title
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import Judge
from support.traces import PSN_A, PSN_B, Bytes, Wire, pcap, pcapng

_LINKS = tuple(FINDERS)


def _shown(tracer: Tracer) -> None:
    judge = Judge(tracer)
    for number, each in enumerate(tracer.found(), 1):
        verdict = judge.verdict(each)
        assert verdict.text
        assert title(number, each).isprintable()
        assert all(line.isprintable() for line in diagram(each))
        operation_rows(each)
        half_rows(each)
        connection_json(number, each, verdict, tracer.first)
        assert mermaid(number, each, verdict)
        assert svg([(number, each, verdict)])


def _wire() -> Wire:
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 2)
    wire.ack(1, PSN_A + 1)
    return wire


def file_seeds() -> Iterator[bytes]:
    frames = [(time, frame[:120]) for time, frame in _wire().frames]
    for order in "<>":
        yield pcap(frames, order)
        yield pcapng(frames, order)
        yield pcap([], order, link_type=113)


@target(file_seeds, 2048)
def capture_file(data: bytes) -> None:
    """A file of any bytes, read in pieces of two sizes."""
    found = []
    for step in (5, 1 << 20):
        tracer = Tracer()
        with suppress(WireError):
            file = CaptureFile(Bytes(data, step).read)
            tracer.feed(file)
            found.append((tracer.packets, tracer.rdma, tracer.malformed, file.damage))
            _shown(tracer)
    assert len(set(found)) <= 1, "the size of the pieces does not matter"


def frame_seeds() -> Iterator[bytes]:
    """Steps: a number of a link type, a length, and that many bytes of a frame."""
    wire = Wire()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    wire.read(1, PSN_B, 5000)
    wire.packet(1, Opcode.RC_RDMA_READ_RESPONSE_FIRST, PSN_B, bytes(16))
    wire.packet(0, Opcode.UD_SEND_ONLY, 1, bytes(30), qpn=5)
    wire.notice(1)
    wire.tcp(0, 1, flags=2)
    wire.tcp(0, 2, b"MPA ID Req Frame\x10\x02\0\0")
    wire.icmp(1, 3, 3, wire.send(0, PSN_A + 1))
    yield b"".join(bytes((_LINKS.index(1),)) + len(frame).to_bytes(2, "little") + frame for _, frame in wire.frames)
    request = wire.req()
    yield bytes((_LINKS.index(1),)) + len(request).to_bytes(2, "little") + request
    for link in range(len(_LINKS)):
        yield bytes((link, 60, 0)) + bytes(60)


@target(frame_seeds, 2048)
def traced_frames(data: bytes) -> None:
    """Frames of any link type, one after the other."""
    source, tracer = Source(data), Tracer()
    now = 0
    while not source.is_empty:
        link = _LINKS[source.number() % len(_LINKS)]
        frame = source.take(source.number(2))
        now += 1000
        tracer.feed([(now, link, frame, 0, len(frame), len(frame))])
    _shown(tracer)
