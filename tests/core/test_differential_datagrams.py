"""The compiled core and the engine in Python do the same with the same datagrams and calls.

As test_differential.py does it for connections: three queue pairs with the core and three without it are driven by
the same random source. They have receives of their own or shared receive queues, and two of them are attached to a
multicast group. Datagrams, completions, counters, memory and fields are the same after each step.
"""

from __future__ import annotations

import os
import random
import struct

import pytest

from rdmacm.enums import WROpcode
from rdmacm.proto.constants import MULTICAST_QPN, OWN_QKEY
from rdmacm.proto.core_choice import compiled, description
from rdmacm.proto.engine import EngineCounters
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.ud import UdEngine, UdSend, flow_between
from rdmacm.proto.work import RecvWork, SendWork
from rdmacm.soft.device.memory import INACCESSIBLE
from support.compiled import Mischief, compare
from support.examples import EXAMPLES
from support.rc import Region
from support.rows import for_each
from support.ud import ENGINES

pytestmark = pytest.mark.skipif(compiled is None, reason=f"runs {description()}")

MTU = 256
QKEY = 0x01234567
HOSTS = (
    (bytes((192, 0, 2, 1)), bytes((192, 0, 2, 2)), bytes((192, 0, 2, 3))),
    (b"\xfd" + bytes(14) + b"\1", b"\xfd" + bytes(14) + b"\2", b"\xfd" + bytes(14) + b"\3"),
)
SIZES = (0, 1, 2, 3, 4, 64, 64, 64, MTU - 1, MTU)
#: The number of the group in place of a queue pair, and its address by family.
GROUP = 3
GROUPS = bytes((239, 1, 2, 3)), b"\xff\x1e" + bytes(13) + b"\1"
_FIELDS = ("qp_num", "qkey", "psn", "max_payload", "is_ready", "is_paused", "failed", "send_failed", "has_pending")


class Run(Mischief):
    """Three engines, their memory, and a source of mischief."""

    def __init__(self, seed: int, *, with_core: bool, mischief: float) -> None:
        self.random = random.Random(seed)
        self.mischief = mischief
        self.train = self.random.choice((0, 300, 4000, 65507))
        self.buffers: list[bytearray] = []
        self.observed: list[object] = []
        #: Recipient, datagram, segment, sender's address and port.
        self.flying: list[tuple[int, bytes, int, bytes, int]] = []
        self.family = self.random.random() < 0.3
        make = ENGINES["c" if with_core else "python"]
        #: The shared receive queues of the ends, which may be one; None: an end has receives of its own.
        one, other = (self.shared(with_core=with_core) for _ in range(2))
        self.queues = self.random.choice(((None, None, None), (None, one, None), (one, other, None), (one, one, one)))
        self.ends: list[UdEngine[int]] = [
            make(1 + n, Region(), queue, EngineCounters()) for n, queue in enumerate(self.queues)
        ]
        for end in self.ends:
            end.qkey, end.max_payload = QKEY, MTU
            end.ready_to_send(self.random.choice((5, 0xFFFFF0)))

    def buffer(self, size: int) -> memoryview:
        self.buffers.append(bytearray(self.random.randbytes(size)))
        return memoryview(self.buffers[-1])

    def receives(self, end: UdEngine[int], number: int) -> None:
        for _ in range(self.random.choice((0, 1, 2, 9)) if self.mischief else 9):
            size = self.random.choice((0, 39, 40, 44, 2 * MTU)) if self.often(0.05) else 40 + MTU
            view = self.buffer(size)
            half = self.random.random() < 0.5
            if self.often(0.01):
                self.receive(end, RecvWork(number, INACCESSIBLE))
            elif self.often(0.2):
                ends = sorted(self.random.choices(range(size + 1), k=self.random.choice((1, 3, 31))))
                parts = [view[begin:end] for begin, end in zip([0, *ends], [*ends, size], strict=True)]
                self.receive(end, RecvWork(number, parts))
            else:
                self.receive(end, RecvWork(number, (view,) if size or half else ()))

    def sends(self, index: int, number: int) -> None:
        source, end = self.random, self.ends[index]
        size = source.choice(SIZES)
        for _ in range(source.choice((0, 1, 1, 2, 5, 9))):
            if source.random() < 0.4:
                size = source.choice(SIZES)
            if self.often(0.02):
                size = MTU + 4
            view = self.buffer(size)
            segments = [view] if size or source.random() < 0.5 else []
            if self.often(0.1):
                segments = [view[at : at + 9] for at in range(0, size, 9)]
            opcode = source.choice((WROpcode.SEND, WROpcode.SEND, WROpcode.SEND_WITH_IMM))
            work = SendWork(number, opcode, segments, True, source.random() < 0.2, imm=source.getrandbits(32))
            if self.often(0.01):
                work.segments = INACCESSIBLE
            qkey = source.choice((QKEY, QKEY, QKEY, OWN_QKEY)) if not self.often(0.02) else QKEY ^ 1
            #: The place that a packet leaves from: of one, or another address, or port; or to the group.
            route = source.choice((0, 0, 0, 1, 2, GROUP))
            target = GROUP if route == GROUP else (index + 1) % 3
            icrc = icrc_between(*self.way(index, target, route))
            number_of_target = MULTICAST_QPN if route == GROUP else 1 + target
            end.post_send(UdSend(work, route, icrc, number_of_target if not self.often(0.02) else 7, qkey))

    def way(self, sender: int, target: int, route: int) -> tuple[bytes, bytes, int]:
        """Source, destination and source port of a route."""
        hosts = HOSTS[self.family]
        destination = GROUPS[self.family] if target == GROUP else hosts[target]
        return hosts[2 if route == 1 else sender], destination, 50_000 + route

    def fly(self, index: int, route: int, data: bytes, segment: int) -> None:
        target = GROUP if route == GROUP else (index + 1) % 3
        source, destination, port = self.way(index, target, route)
        step = segment or len(data)
        packets = [data[at : at + step] for at in range(0, len(data), step)]
        icrc = icrc_between(source, destination, port)
        if self.random.random() < 0.1:  # a peer that counts identifications in another way
            first = self.random.getrandbits(16)
            packets = [p[:-4] + icrc.seal([p[:-4]], first + i & 0xFFFF) for i, p in enumerate(packets)]
        if self.often(0.02):
            packets.append(self.random.choice(packets))
        if self.often(0.02):
            self.random.shuffle(packets)
        for at in range(len(packets)):
            if self.often(0.1):
                changed = self.changed(packets[at])
                if len(changed) >= 16 and self.random.random() < 0.9:
                    changed = changed[:-4] + icrc.seal([changed[:-4]])
                packets[at] = changed
        if len({len(packet) for packet in packets[:-1]} | {max(map(len, packets))}) == 1 and self.random.random() < 0.8:
            size = len(packets[0]) if len(packets) > 1 else 0
            self.flying.append((target, b"".join(packets), size, source, port))
        else:
            self.flying += [(target, packet, 0, source, port) for packet in packets]

    def changed(self, packet: bytes) -> bytes:
        """A packet with something odd about it."""
        source, changed = self.random, bytearray(packet)
        if len(changed) < 24:  # cut off before
            return packet
        kind = source.randrange(10)
        if kind == 0:
            changed[0] = source.choice((0x04, 0x24, 0x64, 0x65, 0x66, source.randrange(256)))
        elif kind == 1:
            changed[1] ^= source.choice((0x80, 0x40, 0x10, 0x20, 0x30))
        elif kind == 2:
            changed[2:4] = struct.pack("!H", source.choice((0x7FFF, 0x8000, 0, 0xFFFE)))
        elif kind == 3:
            changed[4] = source.choice((0x80, 0x40, 0x01))
        elif kind == 4:
            changed[5:8] = source.choice((MULTICAST_QPN, 9)).to_bytes(3, "big")
        elif kind == 5:
            changed[12:16] = source.choice((0, QKEY ^ 1, OWN_QKEY)).to_bytes(4, "big")
        elif kind == 6:
            return bytes(changed[: source.randrange(len(changed) + 1)])
        elif kind == 7:
            changed[1] ^= source.choice((0x01, 0x0F))
        elif kind == 8:
            return bytes(changed) + bytes(source.choice((1, 2, 3, 4, MTU, 5000)))
        else:
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
        return bytes(changed)

    def step(self, number: int) -> None:
        source = self.random
        for index, end in enumerate(self.ends):
            self.receives(end, number)
            self.sends(index, number)
            if self.often(0.02):
                end.pause()
            if self.often(0.2) or not self.mischief:
                end.resume()
            if self.often(0.01):
                end.qkey = source.choice((QKEY, QKEY ^ 1))
            if self.often(0.01):
                end.max_payload = source.choice((64, MTU))
            if self.often(0.003):
                end.flush()
            for route, pieces, segment in end.datagrams(source.choice((1, 3, 64, 128)), self.train):
                data = b"".join(pieces)
                self.observed.append((route, segment, data))
                self.fly(index, route, data, segment)
        while self.flying and source.random() < 0.8:
            target, data, segment, host, port = self.flying.pop(source.randrange(min(3, len(self.flying))))
            destination = GROUPS[self.family] if target == GROUP else HOSTS[self.family][target]
            flow, fields = flow_between(host, destination, port), source.choice(((0, 64), (0x2E, 7)))
            for end in self.ends[1:] if target == GROUP else (self.ends[target],):
                self.observed.append(end.received(memoryview(data), segment, flow, fields))
        for end in self.ends:
            self.observed.append((end.completed[:], dict(end.counters.dropped)))
            end.completed.clear()
            self.observed.append([(name, getattr(end, name)) for name in _FIELDS])
        self.see_shared()

    def finish(self) -> list[object]:
        for end in self.ends:
            end.flush()
            self.observed.append(end.completed[:])
        self.observed.append([bytes(buffer) for buffer in self.buffers])
        return self.observed


def compare_seed(seed: int, mischief: float) -> Run:
    return compare(lambda with_core: Run(seed, with_core=with_core, mischief=mischief), STEPS)


#: Steps of three queue pairs, and how often: more than 5,000 steps in all where CI is set.
STEPS = 40
SEEDS = int(os.environ.get("RDMACM_DIFFERENTIAL_SEEDS") or (150 if os.environ.get("CI") else EXAMPLES))


@for_each("seed", range(SEEDS))
def test_core_and_python_agree(seed: int) -> None:
    compare_seed(seed, mischief=(0.1, 0.3, 1.0)[seed % 3])


@for_each("seed", range(SEEDS // 3))
def test_both_agree_without_faults(seed: int) -> None:
    run = compare_seed(seed, mischief=0.0)
    assert all(set(end.counters.dropped) <= {"no receive"} for end in run.ends)
