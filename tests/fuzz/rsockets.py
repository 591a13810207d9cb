"""Streams of rsockets: connection data, and a peer that says and writes anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from fuzz.harness import Source, target
from rdmacm.proto.rsocket.headers import ServiceHeader, ServiceOperation, SourceHeader
from rdmacm.proto.rsocket.messages import ConnectionData, Control, Mapping, Operation, Target, immediate
from rdmacm.proto.rsocket.peers import MAX_RESOLVING, PeerAction, PeerKey, PeerState, PeerTable
from rdmacm.proto.rsocket.states import Trigger
from rdmacm.proto.wire import WireError
from support.rsocket import Memory, Pair

_SHUT = (Trigger.SHUT_READING, Trigger.SHUT_WRITING, Trigger.SHUT_BOTH)
_SIZE, _MAPPINGS = 256, 2


def connection_seeds() -> Iterator[bytes]:
    yield ConnectionData(384, 0, Target(1 << 47, 7, 2), Target(1 << 46, 9, 65536), 2).pack()
    yield ConnectionData(16, 256, Target(1, 2, 1), Target(3, 4, 0), 3).pack() + bytes(56)


@target(connection_seeds)
def rsocket_connection(data: bytes) -> None:
    with suppress(WireError):
        found = ConnectionData.unpack(data)
        assert ConnectionData.unpack(found.pack()) == found
    if len(data) >= 24:
        for order in ("little", "big"):
            assert Target.unpack(data, 0, order).pack(order) == data[:16]
            assert Mapping.unpack(data, 0, order).pack(order) == data[:24]


def stream_seeds() -> Iterator[bytes]:
    """Steps of :func:`rsocket_stream`."""
    yield bytes((0, 40, 1, 0, 0, 0, 20, 2, 100, 3, 1, 6, 1))
    for operation in (*Operation, 1, 2, 3, 5):
        for argument in (*Control, 3, 128, 129, 1 << 16, (1 << 29) - 1):
            yield b"\x01" + immediate(operation, argument).to_bytes(4, "big") + bytes((2, 50, 0, 50, 5, 8))
    for last in (Target((1 << 64) - 9, 6, 99).pack("little"), Mapping(0, (1 << 64) - 9, 6, 99).pack("little")):
        yield bytes((4, 56)) + last.rjust(56, b"\0") + b"\x01" + immediate(Operation.IOMAP, 1).to_bytes(4, "big")
    yield bytes((4, 16)) + Target(5, 6, 7).pack("little") + b"\x01" + immediate(Operation.SGL, 9).to_bytes(4, "big")


@target(stream_seeds)
def rsocket_stream(data: bytes) -> None:
    """An engine whose peer is any sequence of messages, and of writes into the control memory."""
    source = Source(data)
    memory = Memory(1, size=_SIZE, credits=4, mappings=_MAPPINGS)
    pair = Pair(memory, Memory(2, credits=8, mappings=_MAPPINGS), slots=8, starts=False)
    engine = pair.engines[0]
    taken = arrived = 0
    while not source.is_empty:
        step = source.number() % 7
        if step == 0:
            engine.write(memoryview(bytes(source.number())))
        elif step == 1:
            imm = source.number(4)
            before = engine.unread
            engine.received(imm)
            arrived += engine.unread - before
        elif step == 2:
            size = min(source.number(), engine.unread)
            assert sum(map(len, engine.pieces(size))) == size
            engine.consume(size)
            taken += size
        elif step == 3:
            engine.shut(_SHUT[source.number() % 3])
        elif step == 4:
            written = source.take(source.number())[: len(memory.control)]
            memory.control[: len(written)] = written
        elif step == 5:
            engine.completed(source.number())
        else:
            engine.write_mapped(memoryview(bytes(source.number())), source.number())
            engine.map(source.number() % _MAPPINGS, Mapping(1, 2, 3, 4))
        while engine.work:
            work = engine.work.popleft()
            assert 0 <= work.remote_addr < 1 << 64
            for offset, length in work.local:
                assert 0 <= offset <= offset + length <= _SIZE
        assert len(engine._outstanding) <= 8, "the send queue has room for all requests"
        assert engine._slots >= 0
        assert engine._control_slots >= 0
        assert 0 <= engine.unread <= _SIZE
        assert 0 <= engine._room <= _SIZE
        assert taken <= arrived
        assert (engine.fault is None) or engine.failure == engine.fault.value


_ADDRESSES = {4: bytes((10, 0, 0, 1)), 6: bytes(16)}


def datagram_seeds() -> Iterator[bytes]:
    """Steps of :func:`rsocket_datagrams`."""
    for version, address in _ADDRESSES.items():
        for operation in ServiceOperation:
            sent = ServiceHeader(operation, 0x123456, address).pack() + b"data"
            yield bytes((version, 0, 1, len(sent))) + sent + bytes((3, 1, 1, 1, 1, 2, 1))
        sent = SourceHeader(address, 7174).pack() + b"data"
        yield bytes((version, 2, 1, len(sent))) + sent


@target(datagram_seeds)
def rsocket_datagrams(data: bytes) -> None:
    """A table of peers, to which anybody says anything."""
    source = Source(data)
    version = 4 if source.number() % 8 < 5 else 6
    table = PeerTable(version)
    now = 0.0
    while not source.is_empty:
        step = source.number() % 5
        key: PeerKey = (_ADDRESSES[version], source.number() % 40, 0)
        if step == 0:
            datagram = memoryview(source.take(source.number()))
            found = table.service_received(datagram, key, now)
            assert found is None or len(found) < len(datagram)
        elif step == 1:
            qpn = table.send(key, now)
            assert qpn is None or (table.state(key) is PeerState.KNOWN and 0 <= qpn < 1 << 24)
        elif step == 2:
            message = memoryview(source.take(source.number()))
            arrived = table.message_received(message, 0, now)
            assert arrived is None or (len(arrived[0][0]) in (4, 16) and len(arrived[2]) < len(message))
        elif step == 3:
            table.resolved(key)
        else:
            table.unreachable(key)
            now += 5
        for action, about in table.work:
            assert action is not PeerAction.RESOLVE or table.state(about) is PeerState.RESOLVING
        table.work.clear()
        resolving = sum(peer.state is PeerState.RESOLVING for peer in table._peers.values())
        assert resolving == table._resolving <= MAX_RESOLVING
