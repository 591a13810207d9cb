"""The engine of a datagram queue pair: whatever arrives, only the memory of receives is written, each once."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fuzz.harness import Source, target
from rdmacm.enums import WCStatus
from rdmacm.proto.constants import GRH_LENGTH
from rdmacm.proto.engine import EngineCounters
from rdmacm.proto.roce.engines import make_ud_engine
from rdmacm.proto.roce.grh import GRH
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.roce.ud import UdEngine, flow_between
from rdmacm.proto.wire import WireError
from rdmacm.proto.work import RecvWork
from rdmacm.soft.device.memory import INACCESSIBLE
from support.rc import Region

_QPN, _QKEY, _MTU = 0x15, 0x01234567, 256
_FLOWS = (
    flow_between(bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2)), 50_000),
    flow_between(bytes(15) + b"\1", bytes(15) + b"\2", 50_000),
)
_OPCODES = (Opcode.UD_SEND_ONLY, Opcode.UD_SEND_ONLY_WITH_IMMEDIATE, *range(0x20), 0x24, 0x60, 0x66, 0x81, 0xFF)
_QKEYS = (_QKEY, _QKEY, _QKEY, 0, _QKEY ^ 1, 0x80010000)
_PKEYS = (0xFFFF, 0xFFFF, 0x7FFF, 0, 0x8000, 0xFFFE)
_SIZES = (0, 1, 4, 100, _MTU - 1, _MTU, _MTU + 1, _MTU + 4)
_ROOMS = (0, 39, 40, 44, 140, 40 + _MTU, 1000)


def datagram_steps() -> Iterator[bytes]:
    """One step for each opcode; see :func:`ud_engine`."""
    for number in range(len(_OPCODES)):
        yield b"\4\6" + bytes((0, number, 0, 0, 0, 3, 0))
        yield b"\4\6\4\6" + bytes((2, number, 0x80, 0, 0, 2, 0)) * 2
        yield b"\x0c\6\x0c\6" + bytes((2, number, 0x80, 0, 0, 2, 0)) * 2
    for size in range(len(_SIZES)):
        yield b"\4\6\4\4\4\2" + bytes((0, 0, 0x80, 0, 0, size, 0, 0, 1, 0x30, 0, 0, size, 7))
    yield bytes((4, 6, 0, 0, 0, 3, 0, 2, 0, 0, 0, 0, 3, 0, 2, 0, 5, 0, 0, 0, 0))
    yield bytes((5, 0, 0, 0, 0, 0, 0, 1, 0, 4, 6, 6, 0))


def _crafted(source: Source) -> bytes:
    """A packet without its ICRC, perhaps cut short."""
    opcode, flags = source.choice(_OPCODES), source.number()
    pkey, qkey, size = source.choice(_PKEYS), source.choice(_QKEYS), source.choice(_SIZES)
    cut = source.number()
    pad = -size & 3 if flags & 0x40 == 0 else flags >> 4 & 3
    head = struct.pack("!BBHIIII", opcode, flags & 0x8F | pad << 4, pkey, _QPN, 7, qkey, 0xAB0016)
    packet = head + bytes(4 if opcode & 1 else 0) + b"d" * size + bytes(-size & 3)
    return packet[:cut] if 0 < cut < 64 else packet


@target(datagram_steps, 400)
def ud_engine(data: bytes) -> None:
    """Packets with and without a valid ICRC, trains, and receives of every size."""
    source = Source(data)
    counters = EngineCounters()
    engine: UdEngine[None] = make_ud_engine(_QPN, Region(), None, counters)
    engine.qkey, engine.max_payload = _QKEY, _MTU
    memory: list[bytearray] = []
    packets = accepted = inaccessible = 0
    for _ in range(40):
        if source.is_empty:
            break
        what = source.number()
        flow = _FLOWS[what & 1]
        if what & 7 == 4:
            memory.append(bytearray(source.choice(_ROOMS) + 8))
            view = memoryview(memory[-1])[:-8]
            half = 0 if what & 8 else len(view) // 2
            engine.post_recv(RecvWork(len(memory), [view[:half], view[half:]] if half else [view]))
        elif what & 7 == 5:
            memory.append(bytearray(8))
            inaccessible += 1
            engine.post_recv(RecvWork(len(memory), INACCESSIBLE))
        elif what & 7 == 6:
            packets += 1
            accepted += engine.received(memoryview(source.take(source.number())), 0, flow)
        else:
            packet = _crafted(source)
            if len(packet) < 12:
                continue
            packet += flow.icrc.seal([packet], source.number() & 1)
            if what & 2:
                following = _crafted(source)[: len(packet) - 4]
                count = 2 if following else 1
                packets += count
                seal = flow.icrc.seal([following], 1) if len(following) >= 12 else b""
                accepted += engine.received(memoryview(packet + following + seal), len(packet), flow)
            else:
                packets += 1
                accepted += engine.received(memoryview(packet), 0, flow)
    assert packets == accepted + counters.dropped.total()
    assert len(counters.dropped) <= 8
    assert not engine.failed or inaccessible
    found = engine.completed
    assert [wc.wr_id for wc in found] == list(range(1, len(found) + 1)), "each receive completes once, in order"
    good = [wc for wc in found if wc.status is WCStatus.SUCCESS]
    assert len(good) <= accepted <= len(good) + inaccessible
    for wc in good:
        content = memory[wc.wr_id - 1]
        assert GRH_LENGTH <= wc.byte_len <= min(GRH_LENGTH + _MTU, len(content) - 8)
        assert not any(content[wc.byte_len :]), "nothing after the message"
        assert GRH.unpack(content).sgid.ip in (bytes((10, 0, 0, 1)), bytes(15) + b"\1")
    for content in memory[len(found) :]:
        assert not any(content), "a receive that is left was not written"
    engine.flush()
    assert len(engine.completed) == len(memory)


@target(lambda: [GRH.of_packet(bytes(4), bytes(4), 9).pack(), GRH.of_packet(bytes(16), bytes(16), 9).pack()], 64)
def grh(data: bytes) -> None:
    """Any bytes: a header, or WireError."""
    try:
        found = GRH.unpack(data)
    except WireError:
        return
    assert found.version in (4, 6)
    again = GRH.unpack(found.pack())
    assert (again.sgid, again.dgid, again.traffic_class, again.hop_limit) == (
        *(found.sgid, found.dgid, found.traffic_class, found.hop_limit),
    )
