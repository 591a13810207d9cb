"""The engine of the compiled core and that in Python do the same with the same packets, calls and clock.

Two connections of two engines each are driven by the same random source. Everything observable is compared: datagrams,
completions, deadlines, counters, memory, and the fields of the state.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import ClassVar

import pytest

from rdmacm.enums import AccessFlag, WROpcode
from rdmacm.errors import RdmaError
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.core_choice import compiled, description
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.roce.rc.state import RcState
from rdmacm.proto.work import WC, RecvWork, SendWork
from rdmacm.soft.device.memory import MemoryTable, RemoteMemory
from rdmacm.soft.device.memory_window import Bind, SoftMW
from rdmacm.soft.device.shared_receive_queue import PythonReceives
from rdmacm.verbs.enums import MWType
from rdmacm.verbs.wr import inc_rkey
from support.compiled import Mischief, compare
from support.examples import EXAMPLES
from support.rc import ALL, BASE, ENGINES, RKEY, Region, connect, flows
from support.rows import for_each

pytestmark = pytest.mark.skipif(compiled is None, reason=f"runs {description()}")

#: The path MTUs, the smallest more often: its connections take the least time.
MTUS = (256, 256, 256, 512, 1024, 2048, 4096)
MTU = 256
#: What a reliable connection sends.
OPCODES = (
    *(WROpcode.SEND, WROpcode.RDMA_WRITE, WROpcode.RDMA_READ) * 4,
    *(WROpcode.BIND_MW, WROpcode.LOCAL_INV, WROpcode.SEND_WITH_INV) * 3,
    *(WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM, WROpcode.ATOMIC_WRITE),
    *(WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.FLUSH),
)
_ATOMICS = (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.ATOMIC_WRITE)
_SENDS = (WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.SEND_WITH_INV)
#: The fields of the state that both engines have.
_FIELDS = [
    (field.name, field.name)
    for field in fields(RcState)
    if field.name not in ("completed", "counters") and hasattr(ENGINES.get("c"), field.name)
]


class Memory(RemoteMemory):
    """The memory of an end: a region, and windows, which the core knows or does not know."""

    def __init__(self, seed: int, size: int, *, with_core: bool, table: MemoryTable | None = None) -> None:
        """``table`` is that of another protection domain of the device."""
        self.table = table or MemoryTable(random.Random(seed), Runtime(), with_core=with_core)
        super().__init__(self.table, object())
        self.bytes = bytearray(size)
        self.register()
        #: The peer uses the first ones, and invalidates that of type 2; the others are for this end alone.
        self.windows = [self.table.allocate(self.pd, kind) for kind in (*MWType, *MWType)]
        #: Those that will not be bound, once everything posted is executed. The third one is bound again and again.
        self.free = {self.windows[0], self.windows[1], self.windows[3]}
        #: Another queue pair of the domain.
        self.other = RemoteMemory(self.table, self.pd)

    def register(self) -> None:
        self.region = self.table.register(self.pd, memoryview(self.bytes), ALL | AccessFlag.MW_BIND)
        self.region.addr = BASE  # the same in both runs
        self.region.rereg(None, None, None)

    def come_or_go(self) -> object:
        """Deregister the region, or register it with another key."""
        if not self.region.view:
            self.register()
            return self.region.rkey
        try:
            self.region.dereg()
        except RdmaError as error:
            return error.errno
        return None

    def addresses(self, window: SoftMW) -> int:
        """What a peer's addresses in a window count from."""
        return 0 if window is self.windows[1] and not window.rkey & 1 else BASE

    @property
    def state(self) -> object:
        return self.region.windows, [(w.rkey, w.state, bool(w.binding.number)) for w in self.windows]


class Run(Mischief):
    """Two engines, their memory, and a source of mischief."""

    #: What the connection sends.
    opcodes: ClassVar[tuple[WROpcode, ...]] = OPCODES
    #: How many of a memory's windows the peer uses.
    windows: ClassVar[int] = 2
    #: The names of the fields that both engines have: in Python, and in the core.
    fields: ClassVar[list[tuple[str, str]]] = _FIELDS

    def __init__(self, seed: int, *, with_core: bool, mischief: float) -> None:
        self.random = random.Random(seed)
        self.with_core = with_core
        self.mischief = mischief
        self.now = 0.0
        self.is_ipv6 = self.random.random() < 0.3
        self.train = self.random.choice((0, 0, 4000, 65507))
        self.flows = flows(ipv6=self.is_ipv6)
        self.mtu = self.random.choice(MTUS)
        self.size = 64 * self.mtu
        self.memory = self.make_memory()
        self.counters = EngineCounters(), EngineCounters()
        self.buffers: list[bytearray] = []
        self.observed: list[object] = []
        #: (recipient, datagram, segment)
        self.flying: list[tuple[int, bytes, int]] = []
        depth, starts = self.random.choice((1, 2, 16)), [0xFFFFF0, self.random.getrandbits(24)]
        retries, rnr_retries = (self.random.choice((0, 1, 7, 7, 7, 7)) if mischief else 7 for _ in range(2))
        self.queues = self.make_queues()
        self.ends = self.make(0), self.make(1)
        for index, end in enumerate(self.ends):
            connect(end, index, ipv6=self.is_ipv6)
            rtr = RtrAttributes(2 - index, starts[1 - index], path_mtu=self.mtu, access=ALL, max_dest_rd_atomic=depth)
            end.ready_to_receive(rtr)
            end.ready_to_send(RtsAttributes(starts[index], 0.5, retries, rnr_retries, depth))

    def make_memory(self) -> tuple[Memory, ...]:
        return tuple(Memory(index, self.size, with_core=self.with_core) for index in range(2))

    def make_queues(self) -> tuple[PythonReceives | None, ...]:
        """The shared receive queues of the ends, which may be one; None: an end has receives of its own."""
        one, other = (self.shared(with_core=self.with_core) for _ in range(2))
        return self.random.choice(((None, None), (None, None), (one, None), (one, other), (one, one)))

    def make(self, index: int) -> RcEngine:
        """The engine of an end."""
        engine = ENGINES["c" if self.with_core else "python"]
        return engine(index + 1, self.memory[index], self.queues[index], self.counters[index])

    def buffer(self, size: int) -> memoryview:
        self.buffers.append(bytearray(self.random.randbytes(size)))
        return memoryview(self.buffers[-1])

    def post(self, end: RcEngine, number: int) -> None:
        self.post_receives(end, number)
        self.post_sends(end, number)

    def post_receives(self, end: RcEngine, number: int) -> None:
        # Without mischief, enough for every SEND of the peer.
        receives = 5
        if self.mischief:
            receives = 2 if self.random.random() < 0.9 and not self.often(0.3) else 0
        for _ in range(receives):
            size = self.random.choice((40, 3 * self.mtu)) if self.often(0.1) else 6 * self.mtu
            self.receive(end, RecvWork(number, self.scattered(size)))

    def target(self, end: RcEngine) -> tuple[Memory, int]:
        """The memory that a request of an end names, and the shared receive queue."""
        return self.memory[1 - self.ends.index(end)], 0

    def post_sends(self, end: RcEngine, number: int) -> None:
        source = self.random
        for _ in range(source.choice((0, 1, 1, 2, 5))):
            opcode = source.choice(self.opcodes)
            mtu = self.mtu
            size = source.choice((0, 1, 3, 64, 512, 513, mtu - 1, mtu, mtu + 1, 3 * mtu, 5 * mtu + 2))
            if opcode not in _SENDS and source.random() < 0.2:
                size *= 9
            if opcode in _ATOMICS:
                size = 8
            elif opcode is WROpcode.FLUSH:
                size = 0
            memory = self.memory[self.ends.index(end)]
            peer, srqn = self.target(end)
            start, rkey, by_window = self.named(peer)
            address = start + source.choice((0, 8, 4 * mtu)) if not self.often(0.01) else 2**64 - 4
            rkey += self.often(0.005)
            # The key of a READ may be invalidated when its response is complete.
            fence = source.random() < 0.05 or (opcode is WROpcode.SEND_WITH_INV and not self.often(0.5))
            invalidated, bind = 0, None
            if opcode is WROpcode.BIND_MW:
                bind, size = self.bound(memory), 0
            elif opcode is WROpcode.LOCAL_INV:
                invalidated, size = self.invalidated(memory, memory.windows[3]), 0
            elif opcode is WROpcode.SEND_WITH_INV:
                invalidated = self.invalidated(peer, peer.windows[1])
            if not (bind or invalidated) and opcode in (WROpcode.BIND_MW, WROpcode.LOCAL_INV, WROpcode.SEND_WITH_INV):
                continue
            work = SendWork(number, opcode, self.scattered(size), source.random() < 0.7, source.random() < 0.2, fence,
                            remote_addr=address, rkey=rkey, imm=number, compare_add=number, swap=3 * number,
                            invalidate_rkey=invalidated, bind=bind, remote_srqn=srqn)  # fmt: skip
            if opcode is WROpcode.FLUSH:
                is_whole_region = source.random() < 0.3 and (not by_window or self.often(0.1))
                work.flush = source.choice((0, 8, mtu)), 1, int(is_whole_region)
            end.post_send(work)

    def named(self, peer: Memory) -> tuple[int, int, bool]:
        """An address that a request names, its key, and whether that is a window's, in force unless by mischief."""
        window = (
            self.random.choice(peer.windows) if self.often(0.05) else self.random.choice(peer.windows[: self.windows])
        )
        usable = window.binding.number and window not in peer.free
        if self.random.random() < 0.3 and (usable or self.often(0.05)):
            return peer.addresses(window), window.rkey, True
        return BASE, peer.region.rkey, False

    def bound(self, memory: Memory) -> Bind | None:
        """A bind that is allowed, unless by mischief."""
        source, often = self.random, self.often
        number = source.randrange(4)
        window = memory.windows[number]
        is_free = number == 2 or (window in memory.free and (number == 3 or not window.binding.number))
        if not is_free and not often(0.1 if number == 0 else 0.02):
            return None
        memory.free.discard(window)
        rkey, length = inc_rkey(window.rkey), self.size - 8 * self.mtu
        access = ALL
        if often(0.02):
            access = source.choice((AccessFlag(0), AccessFlag.REMOTE_READ, ALL | AccessFlag.ZERO_BASED))
        if number == 2 and source.random() < 0.2:
            length = 0
        elif often(0.02):
            length = source.choice((0, 1, self.size, self.size + 1, 2**64 - 1))
        offset = source.choice((-8, 8, self.size)) if often(0.02) else 0
        region = None if often(0.01) else memory.region
        if number == 1 and not rkey & 1:
            access |= AccessFlag.ZERO_BASED
        bind = Bind(window, rkey, region, None, BASE + offset, length, int(access))
        window.posted(bind)
        return bind

    def invalidated(self, memory: Memory, window: SoftMW) -> int:
        """A key that may be invalidated, unless by mischief; 0 for none."""
        if self.often(0.03):
            return self.random.choice((*(each.rkey for each in memory.windows), window.rkey ^ 1, memory.region.rkey))
        if window in memory.free or not window.binding.number:
            return 0
        memory.free.add(window)
        return window.rkey

    def scattered(self, size: int) -> list[memoryview]:
        """A new buffer, often in several elements; sometimes it was released, and so cannot be accessed."""
        source, view = self.random, self.buffer(size)
        if not size and not self.often(0.5):
            return []
        if self.often(0.002):
            view.release()
        elif size and source.random() < 0.2:
            ends = sorted(source.choices(range(size + 1), k=source.choice((1, 3, 11))))
            return [view[begin:end] for begin, end in zip([0, *ends], [*ends, size], strict=True)]
        return [view]

    def fly(self, sender: RcEngine, data: bytes, segment: int) -> None:
        index = self.ends.index(sender)
        step = segment or len(data)
        packets = [data[at : at + step] for at in range(0, len(data), step)]
        if self.random.random() < 0.1:  # a peer that counts identifications in another way
            first = self.random.getrandbits(16)
            packets = [p[:-4] + self.flows[index].seal([p[:-4]], first + i & 0xFFFF) for i, p in enumerate(packets)]
        for _ in range(2):
            if self.often(0.02):
                packets.pop(self.random.randrange(len(packets)))
            if not packets:
                return
            if self.often(0.02):
                packets.append(self.random.choice(packets))
            if self.often(0.02):
                self.random.shuffle(packets)
            if self.often(0.03):
                at = self.random.randrange(len(packets))
                packets[at] = self.changed(index, packets[at])
        if len({len(packet) for packet in packets[:-1]} | {max(map(len, packets))}) == 1 and self.random.random() < 0.8:
            self.flying.append((1 - index, b"".join(packets), len(packets[0]) if len(packets) > 1 else 0))
        else:
            self.flying += [(1 - index, packet, 0) for packet in packets]

    def changed(self, sender: int, packet: bytes) -> bytes:
        """A packet with something odd about it, mostly with the right ICRC."""
        source, changed = self.random, bytearray(packet)
        if len(changed) < 16:  # cut off before
            return packet
        kind = source.randrange(8)
        if kind == 0:
            changed[0] = source.randrange(256)
        elif kind == 1 and len(changed) >= 32:  # the length of a RETH, or payload
            changed[24:28] = struct.pack("!I", source.choice((0, 1, self.mtu, 1 << 31, (1 << 31) + 1, 0xFFFFFFFF)))
        elif kind == 2 and len(changed) >= 32:  # its address
            changed[12:20] = struct.pack("!Q", source.choice((0, BASE + self.size, BASE + self.size - 1, 2**64 - 1)))
        elif kind == 3:
            changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
        elif kind == 4:
            changed[1] ^= source.choice((0x80, 0x40, 0x10, 0x20, 0x01))
        elif kind == 5:
            psn = int.from_bytes(changed[9:12], "big") + source.choice((-1, 1, 5, 1 << 23))
            changed[9:12] = struct.pack("!I", psn & 0xFFFFFF)[1:]
        elif kind == 6:
            return bytes(changed[: source.randrange(len(changed) + 1)])
        else:
            changed[4] = source.choice((0x80, 0x40, 0x01))
        if len(changed) >= 16 and source.random() < 0.9:
            changed[-4:] = self.flows[sender].seal([changed[:-4]])
        return bytes(changed)

    def step(self, number: int) -> None:
        self.now += 0.6 if self.often(0.05) else 0.01
        for end in self.ends:
            self.post(end, number)
            if end.deadline is not None:
                end.timer(self.now)
            if self.random.random() < 0.8:
                for pieces, segment in end.datagrams(self.now, self.random.choice((1, 3, 64, 128)), self.train):
                    data = b"".join(pieces)
                    self.observed.append((segment, data))
                    self.fly(end, data, segment)
        if self.often(0.01):
            self.observed += [memory.come_or_go() for memory in self.memory]
        if self.often(0.03):
            self.disturb(self.random.choice(self.memory))
        while self.flying and self.random.random() < 0.8:
            at = self.random.randrange(min(3, len(self.flying))) if self.often(0.1) else 0
            target, data, segment = self.flying.pop(at)
            end = self.ends[target]
            self.observed.append(end.received(memoryview(data), segment, self.now))
        for end in self.ends:
            self.observed.append((end.to_send, self.completed(end), end.failure))
            self.observed.append([(names[0], getattr(end, names[self.with_core])) for names in self.fields])
        self.observed += [(dict(each.dropped), dict(each.errors)) for each in self.counters]
        self.observed += [memory.state for memory in self.memory]
        self.see_shared()

    def completed(self, end: RcEngine) -> list[WC]:
        """Take the completions of an engine."""
        found = end.completed[:]
        end.completed.clear()
        return found

    def disturb(self, memory: Memory) -> None:
        """What others do with windows."""
        number = self.random.randrange(4)
        window = memory.windows[number]
        kind = self.random.randrange(6)
        if kind == 0:
            window.dealloc()
            memory.windows[number] = memory.table.allocate(memory.pd, window.type)
        elif kind == 1:
            memory.close()
        elif kind == 2:
            memory.other.close()
        elif kind == 3:
            bind = Bind(window, window.rkey, memory.region, None, BASE, self.mtu, int(AccessFlag.REMOTE_READ))
            self.observed.append(memory.other.bind(bind))
        else:
            self.observed.append((memory.other if kind == 4 else memory).invalidate(window.rkey))

    def finish(self) -> list[object]:
        for end in self.ends:
            end.flush()
            self.observed.append(self.completed(end))
        self.see_shared()
        self.observed.append([bytes(memory.bytes) for memory in self.memory])
        self.observed.append([bytes(buffer) for buffer in self.buffers])
        return self.observed


def compare_seed(seed: int, mischief: float, kind: type[Run] = Run) -> None:
    compare(lambda with_core: kind(seed, with_core=with_core, mischief=mischief), STEPS)


#: Steps of a connection, and connections: with UC and XRC more than 20,000 steps where CI is set.
STEPS = 60
SEEDS = int(os.environ.get("RDMACM_DIFFERENTIAL_SEEDS") or (120 if os.environ.get("CI") else EXAMPLES))


def mischief_of(seed: int) -> float:
    return (0.1, 0.3, 1.0)[seed % 3]


@for_each("seed", range(SEEDS))
def test_core_and_python_agree(seed: int) -> None:
    compare_seed(seed, mischief_of(seed))


@for_each("seed", range(SEEDS // 3))
def test_both_agree_without_faults(seed: int) -> None:
    compare_seed(seed, mischief=0.0)


@pytest.mark.parametrize("with_core", [True, False])
@pytest.mark.parametrize("losses", [1, 7, 8])
def test_lost_packets_are_sent_again(losses: int, with_core: bool) -> None:
    run = Run(1, with_core=with_core, mischief=0.0)
    sender, receiver = run.ends
    rkey = run.memory[1].region.rkey
    for opcode in (WROpcode.RDMA_WRITE, WROpcode.SEND, WROpcode.RDMA_READ):
        sender.post_send(SendWork(1, opcode, [run.buffer(3 * MTU)], remote_addr=BASE, rkey=rkey))
    run.receive(receiver, RecvWork(1, (run.buffer(3 * MTU),)))
    sent = []
    for _ in range(losses):
        sent.append(sender.datagrams(run.now, 64, 0))
        assert sender.deadline == run.now + 0.5
        run.now += 0.5
        sender.timer(run.now)
    assert sent == sent[:1] * losses
    assert sender.counters.errors["local_ack_timeout_err"] == losses
    assert sender.counters.errors["completer_retry_err"] == min(losses, 7)
    if losses == 8:
        assert sender.failed
        assert [wc.status.name for wc in sender.completions()] == ["RETRY_EXC_ERR", "WR_FLUSH_ERR", "WR_FLUSH_ERR"]
        return
    for _ in range(3):
        for one, other in (run.ends, run.ends[::-1]):
            for pieces, segment in one.datagrams(run.now, 64, 0):
                other.received(memoryview(b"".join(pieces)), segment, run.now)
    assert [wc.status.name for wc in sender.completions()] == ["SUCCESS"] * 3
    assert (sender.retransmitting, sender.retries_left, sender.deadline) == (False, 7, None)


@pytest.mark.parametrize("with_core", [True, False])
def test_connection_without_a_timeout_has_no_deadline(with_core: bool) -> None:
    """It sends again what a NAK asks for, and waits for that as long as it takes."""
    run = Run(1, with_core=with_core, mischief=0.0)
    sender, receiver = run.ends
    sender.set_send_attributes(RtsAttributes(0, 0.0), run.now)
    for number in range(2):
        sender.post_send(SendWork(number, WROpcode.SEND, [run.buffer(8)]))
    (_, first), (pieces, _) = sender.datagrams(run.now, 64, 0)
    assert (sender.deadline, first) == (None, 0)
    receiver.received(memoryview(b"".join(pieces)), 0, run.now)  # the first is lost
    ((pieces, _),) = receiver.datagrams(run.now, 64, 0)
    sender.received(memoryview(b"".join(pieces)), 0, run.now)
    assert sender.counters.errors["completer_retry_err"] == 1
    assert sender.deadline is None
    assert len(sender.datagrams(run.now, 64, 0)) == 2
    assert sender.deadline is None


def direct(*, with_core: bool) -> tuple[RcEngine, RcEngine]:
    """Two engines with a path MTU of 256 and two receives each, on a network that the test stands for."""
    make = ENGINES["c" if with_core else "python"]
    ends = make(1, Region(), None, EngineCounters()), make(2, Region(), None, EngineCounters())
    for index, end in enumerate(ends):
        connect(end, index)
        end.ready_to_receive(RtrAttributes(2 - index, 5, path_mtu=256, access=ALL))
        end.ready_to_send(RtsAttributes(5))
        for _ in range(2):
            end.post_recv(RecvWork(1, (memoryview(bytearray(1 << 15)),)))
    return ends


def read_and_send(sender: RcEngine, sizes: Sequence[int], *, with_read: bool) -> list[bytes]:
    """Post a READ if that is wanted, and SENDs; the packets."""
    if with_read:
        sender.post_send(SendWork(1, WROpcode.RDMA_READ, [memoryview(bytearray(8))], remote_addr=BASE, rkey=RKEY))
    for size in sizes:
        sender.post_send(SendWork(2, WROpcode.SEND, [memoryview(bytes(size))]))
    return [b"".join(pieces) for pieces, _ in sender.datagrams(0.0, 100, 0)]


def answered(receiver: RcEngine, packets: Sequence[bytes]) -> list[bytes]:
    """What an engine answers to packets."""
    for packet in packets:
        receiver.received(memoryview(packet), 0, 0.0)
    return [b"".join(pieces) for pieces, _ in receiver.datagrams(0.0, 100, 0)]


@pytest.mark.parametrize("with_core", [True, False])
@pytest.mark.parametrize("with_read", [True, False])
def test_duplicate_does_not_replace_a_nak(with_read: bool, with_core: bool) -> None:
    """A NAK that waits to be sent acknowledges as much; one that was sent does not matter any more."""
    sender, receiver = direct(with_core=with_core)
    sent = read_and_send(sender, (8, 8, 8), with_read=with_read)
    first, _, third = sent[with_read:]
    *_, nak = answered(receiver, [*sent[:with_read], first, third, first])
    assert (nak[9:12], nak[12]) == (sent[-2][9:12], 0x60)
    (ack,) = answered(receiver, [first])
    assert (ack[9:12], ack[12]) == (first[9:12], 0x1F)


@pytest.mark.parametrize("with_core", [True, False])
@pytest.mark.parametrize("with_read", [True, False])
def test_duplicate_takes_no_ack_back(with_read: bool, with_core: bool) -> None:
    """The ACK that waits to be sent is that of a later packet, in the midst of a message."""
    sender, receiver = direct(with_core=with_core)
    sent = read_and_send(sender, (8, 1 << 15), with_read=with_read)
    wants = [index for index, packet in enumerate(sent) if packet[8] & 0x80]
    assert wants[-1] > wants[-2] + 1, "of the short message, and of one of the packets of the long one"
    answers = answered(receiver, [*sent, sent[with_read]])
    assert len(answers) == 1 + with_read
    assert answers[-1][9:12] == sent[wants[-1]][9:12]


@pytest.mark.parametrize("size", [64, 65])
def test_train_of_packets_in_many_pieces_is_as_long_as_in_python(size: int) -> None:
    """The system takes 1024 pieces; with padding there is another one in each packet."""
    found = []
    for with_core in (True, False):
        sender = Run(1, with_core=with_core, mischief=0.0).ends[0]
        for number in range(60):
            view = memoryview(bytearray(size))
            pieces = [*(view[at : at + 2] for at in range(0, 62, 2)), view[62:]]
            sender.post_send(SendWork(number, WROpcode.SEND, pieces))
        datagrams = sender.datagrams(0.0, 64, 65507)
        assert max(len(pieces) for pieces, _ in datagrams) <= 1024
        found.append([(sum(map(len, pieces)), segment) for pieces, segment in datagrams])
    assert found[0] == found[1]
    assert len(found[0]) > 1


def test_permissions_are_checked() -> None:
    run = Run(1, with_core=True, mischief=0.0)
    run.ends[1].set_access(AccessFlag.LOCAL_WRITE)
    rkey = run.memory[1].region.rkey
    run.ends[0].post_send(SendWork(1, WROpcode.RDMA_WRITE, [run.buffer(8)], remote_addr=BASE, rkey=rkey))
    before = bytes(run.memory[1].bytes)
    for sender, receiver in (run.ends, run.ends[::-1]):
        for pieces, segment in sender.datagrams(0.0, 64, 0):
            receiver.received(memoryview(b"".join(pieces)), segment, 0.0)
    assert [wc.status.name for wc in run.ends[0].completions()] == ["REM_INV_REQ_ERR"]
    assert bytes(run.memory[1].bytes) == before
