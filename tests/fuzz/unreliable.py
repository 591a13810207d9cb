"""The engine of an unreliable connection: whatever arrives, memory is written only where the peer may write."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from fuzz.engines import with_each_engine
from fuzz.harness import Source, target
from rdmacm.enums import WCOpcode, WCStatus
from rdmacm.proto.engine import EngineCounters, RtrAttributes
from rdmacm.proto.roce.opcodes import EXTENDED_HEADERS, ExtendedHeader, Opcode
from rdmacm.proto.roce.uc import UcEngine, UnreliableEngine
from rdmacm.proto.work import RecvWork
from rdmacm.soft.device.memory import INACCESSIBLE
from support.rc import BASE, RKEY, Region, flows, make_uc, view

_MTU, _SIZE = 256, 2048
_HOSTS = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])
_OPCODES = (*(opcode for opcode in Opcode if opcode.name.startswith("UC")), 0x2C, 0x04, 0x64, 0xFF)
_ADDRESSES = (BASE, BASE + 1, BASE + _SIZE - _MTU, BASE + _SIZE - 1, BASE - 1, 0, (1 << 64) - 1, (1 << 64) - _MTU)
_LENGTHS = (_MTU, 2 * _MTU, 400, 0, 1, _SIZE, _SIZE + 1, 1 << 31, (1 << 31) + 1, 0xFFFFFFFF)
_KEYS = (RKEY, RKEY, RKEY, 0)
_SIZES = (_MTU, _MTU, _MTU, 4, 1, 36, 0, _MTU + 4)
_ROOMS = (4000, _MTU, _MTU - 1, 0, 800, 2 * _MTU)


def message_steps() -> Iterator[bytes]:
    """Messages of each opcode, in order and with gaps; see :func:`uc_engine`."""
    for number in range(len(_OPCODES)):
        yield b"\4\0" + bytes((0, number, 0, 0, 0, 0, 0, 0))
    for first, middle, last in ((0, 1, 2), (0, 1, 3), (6, 7, 8), (6, 7, 9)):
        steps = [bytes((0, opcode, 0, 0, 0, 0, 1, size)) for opcode, size in ((first, 0), (middle, 0), (last, 3))]
        yield b"\4\0\4\0" + b"".join(steps)
        yield b"\4\0\4\0" + b"".join(steps[::2] + steps)
        yield b"\4\0" + bytes((1, first, 0, 0, 0, 0, 1, 0, middle, 0, 0, 0, 0, 0, 0))
    yield bytes((5, 4, 0, 0, 4, 0, 0, 0, 0, 0, 0))


def _crafted(source: Source, psn: int) -> bytes:
    """A packet without its ICRC."""
    opcode, flags, jump = source.choice(_OPCODES), source.number(), source.number()
    head = struct.pack("!BBHII", opcode, flags & 0xB0, 0xFFFF, 0x12, psn + jump & 0xFFFFFF)
    headers = EXTENDED_HEADERS[opcode]
    if headers & ExtendedHeader.RETH:
        head += struct.pack("!QII", source.choice(_ADDRESSES), source.choice(_KEYS), source.choice(_LENGTHS))
    else:
        source.take(3)
    size = source.choice(_SIZES)
    return head + bytes(4 if headers & ExtendedHeader.IMM_DT else 0) + b"d" * (size + (-size & 3))


def _next_psn(engine: UnreliableEngine) -> int:
    found: int = getattr(engine, "_expected_psn" if isinstance(engine, UcEngine) else "expected_psn")
    return found


@target(message_steps, 400)
@with_each_engine
def uc_engine(data: bytes) -> None:
    """Packets with and without a valid ICRC, trains, receives of every size, permissions that change."""
    source = Source(data)
    counters, region = EngineCounters(), Region(_SIZE)
    engine = make_uc(0x12, region, None, counters)
    engine.set_route(_HOSTS[1], _HOSTS[0], 50001)
    engine.set_peer_port(50000)
    engine.ready_to_receive(RtrAttributes(0x11, 0xFFFFFE, path_mtu=_MTU))
    flow = flows()[0]
    memory: list[bytearray] = []
    packets = accepted = inaccessible = 0
    for _ in range(40):
        if source.is_empty:
            break
        what = source.number() % 9
        if what == 4:
            memory.append(bytearray(source.choice(_ROOMS) + 8))
            buffer = memoryview(memory[-1])[:-8]
            engine.post_recv(RecvWork(len(memory), [buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]]))
        elif what == 5:
            memory.append(bytearray(8))
            inaccessible += 1
            engine.post_recv(RecvWork(len(memory), INACCESSIBLE))
        elif what == 6:
            packets += 1
            accepted += engine.received(view(source.take(source.number()) or b"\0"), 0, 0)
        elif what == 7:
            if region.keys:
                region.remove(RKEY)
            else:
                region.add(RKEY)
        else:
            packet = _crafted(source, _next_psn(engine))
            train = packet + flow.seal([packet])
            if what == 1:
                following = _crafted(source, _next_psn(engine) + 1)[: len(packet)]
                train += following + flow.seal([following], 1)
            count = -(-len(train) // (len(packet) + 4))
            packets += count
            accepted += engine.received(memoryview(train), len(packet) + 4 if count > 1 else 0, 0)
    assert packets == accepted + counters.dropped.total()
    assert len(counters.dropped) <= 11
    assert not engine.failed or inaccessible
    found = engine.completed
    assert [wc.wr_id for wc in found] == list(range(1, len(found) + 1)), "each receive completes once, in order"
    for wc in found:
        content = memory[wc.wr_id - 1]
        assert not any(content[-8:]), "nothing beyond the receive"
        if wc.status is WCStatus.SUCCESS and wc.opcode is WCOpcode.RECV:
            assert wc.byte_len <= len(content) - 8
    for content in memory[len(found) + 1 :]:
        assert not any(content), "a receive that was not begun was not written"
    engine.flush()
    assert len(engine.completed) == len(memory)
