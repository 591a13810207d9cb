"""The engine of streams for C programs, compared with the one in Python: both are told the same, and do the same."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest

from rdmacm.proto.rsocket.engine import Fault, StreamEngine, Work
from rdmacm.proto.rsocket.messages import (
    TARGETS,
    ConnectionData,
    ConnectionFlag,
    Control,
    Mapping,
    Operation,
    Target,
    immediate,
    own_flags,
)
from rdmacm.proto.rsocket.states import State, Trigger
from rdmacm.proto.wire import WireError
from support.run_programs import engine_of, needs_headers

pytestmark = needs_headers

FAULTS = [None, *Fault]
STATES = list(State)
TRIGGERS = list(Trigger)


class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class CWork(ctypes.Structure):
    _fields_ = [
        ("remote", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("immediate", ctypes.c_uint32),
        ("has_immediate", ctypes.c_bool),
        ("inlined", ctypes.c_void_p),
        ("inlined_length", ctypes.c_size_t),
        ("pieces", Piece * 2),
        ("count", ctypes.c_int),
    ]


POST = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(CWork))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of ``stream.c``."""
    library = engine_of("stream", tmp_path_factory)
    library.make.restype = ctypes.c_void_p
    for name in ("rs_stream_write", "rs_stream_peek", "rs_stream_write_mapped", "unread_in"):
        getattr(library, name).restype = ctypes.c_size_t
    for name in ("rs_stream_is_writable", "is_idle", "map", "pack_again"):
        getattr(library, name).restype = ctypes.c_bool
    return library


class Both:
    """One end of a stream in both engines, with memory of their own."""

    def __init__(self, library: ctypes.CDLL, own: ConnectionData, peer: ConnectionData, sizes: tuple[int, int, int]):
        self.library = library
        sending, receiving, slots = sizes
        self.posted: list[Work] = []
        lengths = {"control": TARGETS * 16 + own.mappings * 24, "sending": sending, "receiving": receiving}
        self.memory = {name: (bytearray(size), (ctypes.c_uint8 * size)()) for name, size in lengths.items()}
        self.post = POST(self.take)
        views = {name: memoryview(ours) for name, (ours, _) in self.memory.items()}
        self.ours = StreamEngine(own, peer, views["control"], views["sending"], views["receiving"], slots)
        control, sends, receives = (theirs for _, theirs in self.memory.values())
        self.theirs = ctypes.c_void_p(
            library.make(
                *(own.pack(), peer.pack(), control, sends, ctypes.c_size_t(sending)),
                *(receives, ctypes.c_size_t(receiving), ctypes.c_uint32(slots), self.post),
            )
        )
        self.compare()

    def take(self, owner: object, work: Any) -> None:
        it = work.contents
        start = ctypes.addressof(self.memory["sending"][1])
        self.posted.append(
            Work(
                it.remote,
                it.key,
                it.immediate if it.has_immediate else None,
                tuple((piece.start - start, piece.length) for piece in it.pieces[: it.count]),
                ctypes.string_at(it.inlined, it.inlined_length) if it.inlined_length else b"",
            )
        )

    def write_memory(self, name: str, offset: int, data: bytes) -> None:
        """As the peer does."""
        ours, theirs = self.memory[name]
        ours[offset : offset + len(data)] = data
        ctypes.memmove(ctypes.addressof(theirs) + offset, data, len(data))

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.library, name)(self.theirs, *arguments)

    def compare(self) -> None:
        """What both want posted, the state, the fault, what can be done."""
        assert self.posted == list(self.ours.work)
        self.posted.clear()
        self.ours.work.clear()
        assert STATES[self.call("state_of")] is self.ours.state
        assert FAULTS[self.call("fault_of")] is self.ours.fault
        assert self.call("unread_in") == self.ours.unread
        assert self.call("is_idle") == self.ours.is_idle
        assert self.call("rs_stream_is_writable") == self.ours.is_writable

    def compare_memory(self) -> None:
        assert all(bytes(ours) == bytes(theirs) for ours, theirs in self.memory.values())

    def read(self, size: int, skip: int) -> None:
        data = (ctypes.c_uint8 * size)()
        count = self.call("rs_stream_peek", ctypes.c_size_t(skip), data, ctypes.c_size_t(size))
        unread = self.ours.unread
        assert bytes(data[:count]) == (b"".join(self.ours.pieces(size, skip)) if skip <= unread else b"")

    def close(self) -> None:
        self.call("destroy")


def address(rng: random.Random) -> int:
    """Of the peer's memory; perhaps so high that what is added to it begins again at 0."""
    return rng.choice([rng.getrandbits(48), rng.getrandbits(48), (1 << 64) - 1 - rng.getrandbits(6)])


def connection(rng: random.Random, *, receive: int = 4096, credits: int = 64, mappings: int = 0) -> ConnectionData:
    flags = own_flags() ^ (ConnectionFlag.BIG_ENDIAN if rng.random() < 0.3 else 0)
    control = Target(address(rng), rng.getrandbits(32), TARGETS)
    return ConnectionData(credits, mappings, control, Target(address(rng), 7, receive // 2), flags)


def step(rng: random.Random, both: Both) -> None:
    """Tell both engines one thing, usually what an honest peer would."""
    ours, size = both.ours, rng.choice([0, 1, 100, 3000, 70000])
    data = rng.randbytes(size)

    def write() -> None:
        done = both.call("rs_stream_write", data, ctypes.c_size_t(size))
        assert done == ours.write(memoryview(data))

    def complete() -> None:
        both.call("rs_stream_completed")
        ours.completed()

    def consume() -> None:
        both.read(size, rng.choice([0, 0, 5]))
        both.call("rs_stream_consume", ctypes.c_size_t(size))
        ours.consume(size)

    def receive(imm: int) -> None:
        both.call("rs_stream_received", ctypes.c_uint32(imm))
        ours.received(imm)

    def data_arrive() -> None:
        room = ours._granted - ours._taken - ours.unread
        both.write_memory("receiving", 0, rng.randbytes(min(size, len(both.memory["receiving"][0]))))
        receive(immediate(Operation.DATA, rng.randint(0, room) if rng.random() < 0.98 else size))

    def credits_arrive() -> None:
        if rng.random() < 0.5:
            target = Target(address(rng), rng.getrandbits(32), rng.choice([0, 500, 5000]))
            both.write_memory("control", ours._next_entry * 16, target.pack(ours._order))
        more = ours._peer.credits if rng.random() < 0.98 else rng.getrandbits(16)
        receive(immediate(Operation.SGL, ours._sent + more & 0x1FFFF))

    def mapping_arrives() -> None:
        index = rng.randrange(ours._own.mappings + (rng.random() < 0.02) or 1)
        if index < ours._own.mappings:
            entry = Mapping(index << 20, address(rng), 9, rng.choice([0, 1000]))
            both.write_memory("control", TARGETS * 16 + index * 24, entry.pack(ours._order))
        receive(immediate(Operation.IOMAP, index))

    def map_own() -> None:
        if ours.peer_mappings:
            both.call("map", *map(ctypes.c_uint64, (size, 77)), *map(ctypes.c_uint32, (5, size)))
            ours.map(0, Mapping(size, 77, 5, size))

    def write_mapped() -> None:
        offset = rng.choice([0, 999, 1 << 20, 1 << 40])
        done = both.call("rs_stream_write_mapped", data, ctypes.c_size_t(size), ctypes.c_uint64(offset))
        assert done == ours.write_mapped(memoryview(data), offset)

    def shut() -> None:
        trigger = rng.choice((Trigger.SHUT_READING, Trigger.SHUT_WRITING, Trigger.SHUT_BOTH, Trigger.LOST))
        both.call("rs_stream_change", TRIGGERS.index(trigger))
        if trigger is Trigger.LOST:
            ours.lost("")
        else:
            ours.shut(trigger)

    def probe() -> None:
        both.call("rs_stream_keepalive")
        ours.keepalive()

    often: list[Callable[[], None]] = [write, complete, complete, consume, data_arrive, credits_arrive]
    some: list[Callable[[], None]] = [mapping_arrives, map_own, write_mapped, probe]
    kind = rng.random()
    if kind < 0.9:
        rng.choice(often)()
    elif kind < 0.99:
        rng.choice(some)()
    elif kind < 0.997:
        rng.choice((shut, lambda: receive(immediate(Operation.CONTROL, rng.choice([*Control, 3])))))()
    else:
        receive(rng.getrandbits(32))


def test_both_engines_do_the_same(engine: ctypes.CDLL) -> None:
    visited: set[State] = set()
    faults: set[Fault | None] = set()
    for seed in range(100):
        rng = random.Random(seed)
        receive = rng.choice([64, 4096, 1 << 17])
        own = connection(rng, receive=receive, credits=rng.choice([16, 384]), mappings=rng.choice([0, 2]))
        buffer = Target(rng.getrandbits(48), 7, receive // 2)
        own = ConnectionData(own.credits, own.mappings, own.control, buffer, own_flags())
        peer = connection(rng, credits=rng.choice([1, 16, 384]), mappings=rng.choice([0, 1]))
        both = Both(engine, own, peer, (rng.choice([32, 5000, 1 << 17]), receive, rng.choice([16, 50])))
        for _ in range(300):
            step(rng, both)
            both.compare()
            visited.add(both.ours.state)
        both.compare_memory()
        faults.add(both.ours.fault)
        both.close()
    assert visited == set(State)
    assert faults >= {Fault.MORE_BYTES, Fault.MORE_TARGETS, Fault.UNKNOWN_CONTROL, Fault.UNKNOWN_OPERATION}


def test_connection_data(engine: ctypes.CDLL) -> None:
    """What is understood is that of the Python codec, and is packed as it packs it."""
    rng = random.Random(1)
    again = ctypes.create_string_buffer(40)
    for _ in range(300):
        data = bytearray(connection(rng, mappings=rng.choice([0, 1, 128, 256, 32512])).pack())
        if rng.random() < 0.3:
            data[rng.choice([0, 20, 21, 22, 23])] ^= rng.choice([0, 1, 2])
        data = data[: rng.choice([40, 40, 40, 39, 0])]
        done = engine.pack_again(bytes(data), ctypes.c_size_t(len(data)), again)
        try:
            expected = ConnectionData.unpack(data).pack()
        except WireError:
            assert not done
        else:
            assert done
            assert again.raw == expected
