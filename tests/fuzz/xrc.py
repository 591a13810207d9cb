"""The target of an XRC connection: whatever arrives, it uses the queue and the memory that the request names."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import cast

from fuzz.engines import with_each_engine
from fuzz.harness import Source, target
from rdmacm.enums import AccessFlag
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.opcodes import EXTENDED_HEADERS, ExtendedHeader, Opcode
from rdmacm.proto.roce.rc.engine import RcEngine
from support.rc import BASE, RKEY, Region, XrcQueues, connect, flows, packets, view

_MTU, _SIZE = 256, 2048
_OPCODES = (*(opcode for opcode in Opcode if opcode.name.startswith("XRC")), 0xBC, 0x04, 0x24, 0xFF)
_NUMBERS = (1, 1, 1, 2, 2, 3, 0, 0xFFFFFF)
_ADDRESSES = (BASE, BASE + 8, BASE + _SIZE - _MTU, BASE + _SIZE - 1, BASE - 1, 0, (1 << 64) - 1)
_LENGTHS = (_MTU, 2 * _MTU, 400, 0, 1, _SIZE, _SIZE + 1, 1 << 31, 0xFFFFFFFF)
_SIZES = (_MTU, _MTU, 4, 1, 0, _MTU + 4)


def xrc_steps() -> Iterator[bytes]:
    """Each opcode by itself, and messages to two queues; see :func:`xrc_target`."""
    for number in range(len(_OPCODES)):
        yield b"\4\0\4\1" + bytes((0, number, 0, 0, 0, 0, 0, 0, 0, 0))
    for first, middle, last in ((0, 1, 2), (6, 7, 8), (6, 7, 9)):
        for queue in (0, 3, 6):
            steps = [bytes((0, opcode, 0, 0, 0, 0, 0, 1, 0)) for opcode in (first, middle)]
            yield b"\4\0\4\1" + b"".join(steps) + bytes((0, last, 0, 0, queue, 0, 0, 1, 2))


def _crafted(source: Source, psn: int) -> bytes:
    """A packet without its ICRC."""
    opcode, flags, jump = source.choice(_OPCODES), source.number(), source.number() % 3
    head = struct.pack("!BBHII", opcode, flags & 0x80, 0xFFFF, 0x12, (psn + jump & 0xFFFFFF) | 1 << 31)
    headers = EXTENDED_HEADERS[opcode]
    number = source.choice(_NUMBERS)
    if headers & ExtendedHeader.XRCETH:
        head += struct.pack("!I", number)
    address, length = source.choice(_ADDRESSES), source.choice(_LENGTHS)
    key = RKEY + (1 if flags & 2 else number & 3)
    if headers & ExtendedHeader.RETH:
        head += struct.pack("!QII", address, key, length)
    if headers & ExtendedHeader.ATOMIC_ETH:
        head += struct.pack("!QIQQ", address, key, 1, 1)
    size = source.choice(_SIZES)
    body = head + bytes(4 if headers & (ExtendedHeader.IMM_DT | ExtendedHeader.IETH) else 0) + b"d" * size
    return (body + bytes(-size & 3))[: max(12, len(body) - source.number() % 40) if flags & 1 else None]


@target(xrc_steps, 400)
@with_each_engine
def xrc_target(data: bytes) -> None:
    """Packets with and without a valid ICRC, receives on two queues, a queue that comes and goes."""
    source = Source(data)
    counters = EngineCounters()
    access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    queues = XrcQueues(Region(0), (1, 2), _SIZE, access)
    every = dict(queues)
    engine = queues.make_target(0x12, counters)
    connect(cast("RcEngine", engine), 1)
    engine.ready_to_receive(RtrAttributes(0x11, 0xFFFFFE, path_mtu=_MTU))
    engine.ready_to_send(RtsAttributes(0))
    flow = flows()[0]
    posted = {1: 0, 2: 0}
    for _ in range(40):
        if source.is_empty:
            break
        what = source.number() % 8
        if what == 4:
            number = 1 + source.number() % 2
            posted[number] += 1
            every[number].post(posted[number], 800)
        elif what == 5:
            if 2 in queues:
                queues.close(2)
            else:
                queues.open(2, every[2])
        elif what == 6:
            engine.received(view(source.take(source.number()) or b"\0"), 0, 0)
        else:
            packet = _crafted(source, cast("RcEngine", engine).expected_psn)
            engine.received(memoryview(packet + flow.seal([packet])), 0, 0)
        queues.take(engine)
        for datagram in engine.datagrams(0, 100, 0):
            assert all(each[0] & 0xE0 == 0xA0 for each in packets(datagram))
    assert len(counters.dropped) <= 11
    engine.flush()
    queues.take(engine)
    for number, queue in every.items():
        ids = [wc.wr_id for wc in queue.done]
        assert ids == sorted(set(ids)), "each receive completes once, in order"
        assert len(ids) <= posted[number]
