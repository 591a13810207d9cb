"""The protocol engines: whatever arrives, they keep their limits, and a connection that was not concerned works on."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import pairwise
from typing import Any

from fuzz.harness import Source, target
from rdmacm.enums import WCOpcode, WCStatus, WROpcode
from rdmacm.errors import CmStateError, RdmaError
from rdmacm.proto.cm.connection import NetworkError
from rdmacm.proto.cm.messages import APR, DREQ, MRA, REJ, REP, RTU, SIDR_REP, SIDR_REQ, pack_message, unpack_mad
from rdmacm.proto.mad import MAD_SIZE, MadAddress
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, Operation
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.roce.rc.responder import MAX_FLUSHES
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.client import SaClient
from rdmacm.proto.sa.mad import SaMad, SaMethod
from rdmacm.proto.sa.rmpp import SEGMENT_SIZE, Receiver, RmppFlag, RmppHeader, RmppType, Sender
from rdmacm.proto.wire import WireError
from rdmacm.proto.work import WC, RecvWork, SendWork
from support import rc
from support.cm import GUIDS, PATH, SERVICE, communication_ids, is_empty, lap, reply, request
from support.cm_events import Agent, ConnectReply, ConnectRequest, SidrRequest
from support.rc import ALL, BASE, RKEY, Pair, packets, send, view

# -- the engine of a reliable connection ---------------------------------------------------------------------------

#: Of the connections below.
MTU, DEPTH = 256, 4
_WORK = 20


def _equipped(receives: int = 4, **changes: Any) -> Pair:
    """Two engines with receives, the second with so many; the first has requests of every kind under way."""
    pair = Pair(access=ALL, path_mtu=MTU, max_dest_rd_atomic=DEPTH, max_rd_atomic=DEPTH, **changes)
    for end, count in zip(pair.ends, (4, receives), strict=True):
        for number in range(count):
            end.post_recv(RecvWork(number, [view(bytes(100)), view(bytes(400))]))
    first = pair.ends[0]
    first.post_send(SendWork(_WORK, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    atomic = SendWork(_WORK + 1, WROpcode.ATOMIC_FETCH_AND_ADD, [view(bytes(8))], remote_addr=BASE, rkey=RKEY)
    atomic.compare_add = 1
    first.post_send(atomic)
    first.post_send(send(_WORK + 2, bytes(600), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    first.post_send(send(_WORK + 3, b"hello"))
    first.post_send(SendWork(_WORK + 4, WROpcode.FLUSH, remote_addr=BASE, rkey=RKEY, flush=(600, 1, 0)))
    value = [view(b"8 bytes!")]
    first.post_send(SendWork(_WORK + 5, WROpcode.ATOMIC_WRITE, value, remote_addr=BASE + 8, rkey=RKEY))
    return pair


def with_each_engine(check: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """The same for the engine in Python and that of the compiled core."""

    @wraps(check)
    def run(data: bytes) -> None:
        before = rc.chosen
        try:
            for name in rc.ENGINES:
                rc.chosen = name
                check(data)
        finally:
            rc.chosen = before

    return run


def _check_bounds(engine: RcEngine) -> None:
    assert len(engine.counters.dropped) <= 12, "counted by reason, not by content"
    if not isinstance(engine, RcEngine):
        return
    flushes = sum(1 for r in engine.responses if r.resource and r.resource.operation == Operation.FLUSH)
    assert flushes <= MAX_FLUSHES
    assert len(engine.responses) <= 4 * DEPTH + 2 + 2 * flushes
    assert len(engine.resources) <= DEPTH
    assert engine.failed or 0 <= engine.send_index <= len(engine.outstanding)


def _check_completions(found: list[WC]) -> None:
    sent = [wc.wr_id for wc in found if wc.wr_id >= _WORK]
    received = [wc.wr_id for wc in found if wc.wr_id < _WORK]
    assert sent == sorted(set(sent)), "each request completes once, in order"
    assert received == sorted(set(received)), "each receive completes once, in order"
    failed = [wc.status is not WCStatus.SUCCESS for wc in found if wc.wr_id >= _WORK]
    assert all(later or not earlier for earlier, later in pairwise(failed)), "nothing succeeds after a failure"


def unsealed_trains() -> Iterator[bytes]:
    pair = _equipped()
    found = [packet for datagram in pair.ends[0].datagrams(0.0, 100, 0) for packet in packets(datagram)]
    for packet in found:
        damaged = bytearray(packet)
        damaged[-1] ^= 1
        yield bytes(2) + bytes(damaged)
    yield (0x110).to_bytes(2, "big") + b"".join(packet.ljust(0x110, b"\0") for packet in found)


@target(unsealed_trains, 2304)
@with_each_engine
def rc_unsealed(data: bytes) -> None:
    """Bytes without a valid ICRC change nothing: all work of both ends completes."""
    pair = _equipped()
    segment = int.from_bytes(data[:2], "big") % 1200
    body = data[2:]
    count = -(-len(body) // segment) if segment else bool(body)
    for index, end in enumerate(pair.ends):
        flow = pair.flows[1 - index]
        pieces = [body[at : at + segment] for at in range(0, len(body), segment)] if segment else [body]
        if any(len(piece) >= 16 and flow.solve((piece,)) is not None for piece in pieces):
            return  # the fuzzer has found a valid ICRC
        before = end.counters.dropped.total()
        accepted = end.received(memoryview(body), segment, 0.0)
        assert accepted == 0
        assert end.counters.dropped.total() == before + count
        _check_bounds(end)
    pair.run()
    assert [(wc.wr_id, wc.status) for wc in pair.done[0]] == [(_WORK + i, WCStatus.SUCCESS) for i in range(6)]
    assert [(wc.wr_id, wc.status, wc.byte_len) for wc in pair.done[1]] == [(0, WCStatus.SUCCESS, 5)]


#: The opcodes of a reliable connection, and others.
_OPCODES = (*range(0x1A), 0x1C, 0x1D, 0x2C, 0x64, 0x81, 0xFF)
_ADDRESSES = (BASE, BASE + 8, BASE + 1, BASE + 0xFFF8, BASE + 0xFFFF, BASE - 1, 0, (1 << 64) - 1, (1 << 64) - 8)
_LENGTHS = (0, 1, 4, 8, 256, 257, 512, 600, 0x10000, 0x10001, 1 << 31, (1 << 31) + 1, 0xFFFFFFFF)


def packet_steps() -> Iterator[bytes]:
    """One step for each opcode; see :func:`rc_sealed`."""
    for number, opcode in enumerate(_OPCODES):
        yield bytes((0, number, 0x80, 0, 0, 0, 0, 3, 100))
        yield bytes((1, number, 0x80, 0, 0, 0, 0, 3, HEADER_LENGTH[opcode]))
        yield bytes((1, number, 0x80, 0, 0, 0, 0, 5, 0)) + bytes((1, number, 0x80, 0x80, 1, 0, 0, 5, 1))
        yield bytes((0x81, number, 0x80, 0, 0, 0, 0, 3, 5, 1, 6, 6, 6, 3)) * 3


def _crafted(source: Source, pair: Pair, to: int, at: int) -> bytes:
    """A packet with a valid header for one end, and with a body that its opcode may have, or that is cut short."""
    opcode = source.choice(_OPCODES)
    flags = source.number()
    psn = pair.starts[1 - to] if opcode not in range(0x0D, 0x13) else pair.starts[to]
    psn += at + (0, 0, 0, 0, 1, 2, -1, 1 << 23)[source.number() >> 5]
    address, length = source.choice(_ADDRESSES), source.choice(_LENGTHS)
    key = RKEY if source.number() < 0xF0 else RKEY + 1
    size = (0, 1, 3, 4, 255, MTU, MTU + 1, 252)[source.number() >> 5]
    cut = source.number()
    room = HEADER_LENGTH[opcode] - 12 if HEADER_LENGTH[opcode] else 0
    syndrome = cut << 24 | 1
    extended = {
        16: struct.pack("!QII", address, key, length),
        20: struct.pack("!IQII", cut & 0x3F, address, key, length)
        if opcode == 0x1C
        else struct.pack("!QIII", address, key, length, 7),
        28: struct.pack("!QIQQ", address, key, 1, 2),
        4: struct.pack("!I", syndrome if opcode in range(0x0D, 0x13) else key),
        12: struct.pack("!IQ", syndrome, 5),
    }.get(room, bytes(max(0, room)))
    body = extended + bytes(size)
    if cut >= 0xE0:
        body = body[: cut - 0xE0]
    pad = -len(body) & 3 if flags < 0xC0 else flags & 3
    word = psn & 0xFFFFFF | (flags & 0x80) << 24
    head = struct.pack("!BBHII", opcode, flags & 0xC0 | pad << 4, 0xFFFF, 0x11 + to, word)
    return head + body + (bytes(pad) if flags < 0xC0 else b"")


@target(packet_steps, 256)
@with_each_engine
def rc_sealed(data: bytes) -> None:
    """Packets that only the peer can send: nothing outside the buffers is touched, each request completes once."""
    source = Source(data)
    pair = _equipped(receives=0)
    inbox, answer = view(bytes(700)), view(bytes(2500))
    pair.ends[1].post_recv(RecvWork(0, [inbox[:100], inbox[100:600]]))
    pair.ends[0].post_send(
        SendWork(_WORK + 6, WROpcode.RDMA_READ, [answer[:2000]], remote_addr=BASE, rkey=RKEY, fence=True)
    )
    found: tuple[list[WC], list[WC]] = ([], [])
    before = bytes(pair.memory[1].bytes)
    for at in range(24):
        if source.is_empty:
            break
        to = source.number()
        end = pair.ends[to & 1]
        if to & 0x10:
            pair.wanted(to & 1, to & 0xF)
        packet = _crafted(source, pair, to & 1, at if to & 0x40 else 0)
        if to & 0x80:  # two packets of a train
            packet = packet + pair.flows[1 - (to & 1)].seal([packet], 0)
            following = _crafted(source, pair, to & 1, at + 1)[: len(packet) - 4]
            end.received(memoryview(packet + following + pair.flows[1 - (to & 1)].seal([following], 1)), len(packet), 0)
        else:
            pair.deliver(to & 1, packet)
        if end.deadline is not None and to & 0x20:
            pair.now = max(pair.now, end.deadline)
            end.timer(pair.now)
        for done, each in zip(found, pair.ends, strict=True):
            done.extend(each.completions())
            _check_bounds(each)
    for done in found:
        _check_completions(done)
    assert len([wc for wc in found[1] if wc.opcode is WCOpcode.RECV]) <= 1
    assert not any(inbox[600:]), "a receive is not written beyond its buffer"
    assert not any(answer[2000:]), "a response is not written beyond its buffer"
    assert len(pair.memory[1].bytes) == len(before)
    pair.memory[1].remove(RKEY)
    pair.memory[1].bytes.append(0)  # BufferError while a view of it is left
    for end in pair.ends:  # and each end comes to rest
        end.flush()
        assert end.drained


# -- the communication manager -------------------------------------------------------------------------------------

_PATHS = ("a", "b")
_LIMIT = 12


def cm_seeds() -> Iterator[bytes]:
    """Steps of :func:`cm_agent`: MADs that arrive, calls, and time that passes."""
    asked = request(local_comm_id=5, local_qpn=9, local_ca_guid=GUIDS[1])
    yield _arrival(asked)
    yield _arrival(asked) + b"\1\0" + _arrival(RTU(5, 0)) + b"\3\0" + _arrival(DREQ(5, 0, 0x22)) + b"\3\0"
    yield _arrival(asked) * 2 + b"\2\0" + _arrival(asked)
    yield b"\5\0" + _arrival(REP(7, 0, 0, 9, local_ca_guid=GUIDS[1])) + b"\4\0\3\0" + b"\6\1" * 3
    yield b"\5\0" + _arrival(REJ(0, 0, 0, 28)) + b"\6\1"
    yield _arrival(SIDR_REQ(SERVICE, 7)) + b"\7\0" + b"\x08\0" + _arrival(SIDR_REP(0))
    yield b"\5\0\5\1\x09\0\6\1\6\1\6\1"
    connected = _arrival(asked) + b"\1\0" + _arrival(RTU(5, 0))
    yield connected + _arrival(lap(5, 0, 0x22)) + b"\x0e\0" + _arrival(lap(5, 0, 0x22)) + b"\x0e\2\x0e\3\3\0"
    yield b"\5\0" + _arrival(REP(7, 0, 0, 9, local_ca_guid=GUIDS[1])) + b"\4\0\x0d\0" + _arrival(APR(7, 0, 0), 0x20)
    yield b"\5\0" + _arrival(REP(7, 0, 0, 9, local_ca_guid=GUIDS[1])) + b"\4\0\x0d\0" + _arrival(MRA(7, 0, 2, 9))
    for number, message in enumerate((asked, request(local_comm_id=6, local_qpn=9, local_ca_guid=GUIDS[1]))):
        yield _arrival(asked) + b"\1\0" + _arrival(message) + bytes((6, number))


def _arrival(message: Any, tag: int = 0) -> bytes:
    packed = pack_message(message, 5)
    return bytes((0, tag)) + packed.rstrip(b"\0").ljust(_SHORT, b"\0")[:_SHORT]


#: Of a MAD in the input of :func:`cm_agent`; private data matters little there.
_SHORT = 180


class _User:
    """Calls an agent as an application may, whatever state its connections are in."""

    def __init__(self) -> None:
        self.agent = Agent(GUIDS[0], random.Random(1), max_connections=_LIMIT)
        self.listener = self.agent.listen(SERVICE, backlog=4)
        self.now = 0.0
        self.known: list[int] = []

    def call(self, what: int, value: int) -> None:
        agent, now = self.agent, self.now
        comm_id = self.known[value % len(self.known)] if self.known else value
        try:
            match what:
                case 1:
                    agent.accept(comm_id, reply(), now)
                case 2:
                    agent.reject(comm_id, now, value)
                case 3:
                    agent.disconnect(comm_id, now, bytes(value % 220))
                case 4:
                    agent.send_rtu(comm_id, now)
                case 5:
                    self.known.append(agent.connect(_PATHS[value & 1], request(local_qpn=value), now))
                case 7:
                    agent.sidr_reply(comm_id, SIDR_REP(qpn=value), now)
                case 8:
                    self.known.append(agent.sidr_request(_PATHS[value & 1], SIDR_REQ(SERVICE), now))
                case 9:
                    connection = agent.connection(comm_id)
                    tid = connection.transaction_id if connection is not None else 0
                    agent.unreachable(comm_id, tid, lambda path: True, NetworkError(113, b""), now)
                case 10:
                    agent.destroy(comm_id, now)
                case 11:
                    agent.establish(comm_id, now)
                case 12:
                    agent.delivered(comm_id)
                case 13:
                    agent.load_path(comm_id, PATH, now)
                case 14 if value & 3 == 2:
                    agent.set_alternate(comm_id, _PATHS[value >> 7])
                case 14 if value & 3 == 3:
                    agent.migrate(comm_id, now)
                case 14:
                    agent.answer_path(comm_id, value, now)
        except CmStateError:
            pass
        except RdmaError:
            assert len(agent) == _LIMIT

    def look(self) -> None:
        """Take the output, and check the limits."""
        agent = self.agent
        for _, mad in agent.mads_to_send():
            unpack_mad(mad)
        for event in agent.events():
            if isinstance(event, ConnectRequest | SidrRequest | ConnectReply) and event.comm_id not in self.known:
                self.known.append(event.comm_id)
        assert len(agent) <= _LIMIT
        assert 0 <= self.listener.pending <= 4
        assert len(agent.timers) <= 2 * _LIMIT + 64
        for comm_id in communication_ids(agent):
            assert agent.connection(comm_id) is not None


def _addressed(mad: bytes, user: _User, tag: int) -> bytes:
    """The MAD with a communication id and transaction id of this agent where a peer would repeat them."""
    if not user.known or tag & 0x0F == 0x0F:
        return mad
    comm_id = user.known[tag % len(user.known)]
    connection = user.agent.connection(comm_id)
    tid = int.from_bytes(mad[8:16], "big")
    if connection is not None and tag & 0x30:
        tid = connection.transaction_id if tag & 0x10 else connection.lap_transaction_id
    at = 24 if mad[16:18] == b"\0\x18" else 28  # a SIDR_REP begins with the id of the request
    is_answer = mad[17:18] not in (b"\x10", b"\x17")
    mad = mad[:8] + tid.to_bytes(8, "big") + mad[16:]
    return mad[:at] + comm_id.to_bytes(4, "big") + mad[at + 4 :] if is_answer else mad


@target(cm_seeds, 1200)
def cm_agent(data: bytes) -> None:
    """MADs and calls in any order: tables are bounded, and at the end nothing is left."""
    source = Source(data)
    user = _User()
    for _ in range(40):
        if source.is_empty:
            break
        what, value = source.number() & 0xF, source.number()
        if what == 0:
            mad = source.take(_SHORT).ljust(MAD_SIZE, b"\0")
            user.agent.mad_received(_addressed(mad, user, value), _PATHS[value >> 7], user.now)
        elif what == 6:
            deadline = user.agent.next_deadline()
            user.now = max(user.now + value, deadline or 0.0) if value & 1 else user.now + value / 256
            user.agent.timer(user.now)
        else:
            user.call(what, value)
        user.look()
    _check_service(user)
    for comm_id in communication_ids(user.agent):
        user.agent.destroy(comm_id, user.now)
    for _ in range(10_000):
        deadline = user.agent.next_deadline()
        if deadline is None:
            break
        user.now = max(user.now, deadline)
        user.agent.timer(user.now)
        user.look()
    assert is_empty(user.agent)


def _check_service(user: _User) -> None:
    """A new peer is still served, unless a table is full."""
    agent = user.agent
    if len(agent) >= _LIMIT or user.listener.pending >= 4:
        return
    fresh = request(local_comm_id=0x7FFF0001, local_qpn=0x7F01, local_ca_guid=0x77)
    agent.mad_received(pack_message(fresh, 3), "new", user.now)
    (asked,) = [event for event in agent.events() if isinstance(event, ConnectRequest)]
    agent.accept(asked.comm_id, reply(), user.now)
    ((_, mad),) = agent.mads_to_send()
    message, _ = unpack_mad(mad)
    assert isinstance(message, REP)
    assert message.remote_comm_id == 0x7FFF0001
    user.known.append(asked.comm_id)


# -- the subnet administrator ---------------------------------------------------------------------------------------

_SM = MadAddress(1)
_MAX_SIZE = 2000


def sa_steps() -> Iterator[bytes]:
    def segment(flags: int, number: int, length: int, kind: int = RmppType.DATA, method: int = 0x92) -> bytes:
        header = RmppHeader(1, kind, 0, RmppFlag.ACTIVE | flags, 0, number, length)
        return b"\0" + SaMad(method, 0x35, 0, data=bytes(8), attribute_offset=8, rmpp=header).pack()[:_SA_SHORT]

    yield segment(RmppFlag.FIRST | RmppFlag.LAST, 1, 220)
    yield segment(RmppFlag.FIRST, 1, 440) + segment(RmppFlag.LAST, 2, 84)
    yield segment(RmppFlag.FIRST, 1, 440) * 2 + segment(0, 3, 0) + segment(0, 2, 0) + segment(RmppFlag.LAST, 4, 84) * 2
    yield segment(0, 0, 0, RmppType.STOP) + segment(0, 0, 0, RmppType.ABORT)
    yield segment(RmppFlag.FIRST, 1, 440) + segment(0, 1, 65, RmppType.ACK) + b"\4\xff"
    plain = SaMad(SaMethod.GET_RESP, 0x35, 0, data=bytes(8), attribute_offset=8)
    yield b"\1" + plain.pack()[:_SA_SHORT] + b"\4\1"
    yield b"\1" + SaMad(SaMethod.GET_RESP, 0x35, 0, status=1).pack()[:_SA_SHORT] + b"\4\xff\4\xff"


#: Of a MAD in the input of :func:`sa_client`: all headers and some of the records.
_SA_SHORT = 64


@target(sa_steps, 800)
def sa_client(data: bytes) -> None:
    """Responses of the SA in any order: each query has one outcome, and memory is bounded."""
    source = Source(data)
    client = SaClient(random.Random(1), reassembles=bool(data[:1] >= b"\x80"), max_queries=4, max_size=_MAX_SIZE)
    now, numbers, outcomes = 0.0, [], []
    record = PathRecord.unpack(bytes(64)).pack()
    tids = []
    for method in (SaMethod.GET_TABLE, SaMethod.GET):
        numbers.append(client.query(method, 0x35, 0, record, _SM, now, timeout=2.0, tries=3))
        tids.append(SaMad.unpack(client.mads_to_send()[0][1]).transaction_id)
    for _ in range(40):
        if source.is_empty:
            break
        what = source.number()
        if what & 7 == 4:
            now += source.number() / 64
            client.timer(now)
        elif what & 7 == 5:
            client.cancel(numbers[what >> 7])
        else:
            mad = bytearray(source.take(_SA_SHORT).ljust(MAD_SIZE, b"\0"))
            if what & 0x40 == 0:
                mad[8:16] = tids[what & 1].to_bytes(8, "big")
            client.mad_received(_SM if what & 0x20 == 0 else MadAddress(2), bytes(mad), now)
        for address, mad_sent in client.mads_to_send():
            assert address == _SM
            assert len(mad_sent) == MAD_SIZE
        outcomes += client.events()
        assert len(client.dropped) <= 16
    client.timer(now + 10)
    outcomes += client.events()
    assert len(client) == 0
    assert client.next_deadline() is None
    assert len({outcome.query for outcome in outcomes}) == len(outcomes), "a query has one outcome"
    for outcome in outcomes:
        assert sum(map(len, outcome.records)) <= max(_MAX_SIZE, SEGMENT_SIZE)


def rmpp_headers() -> Iterator[bytes]:
    headers = [RmppHeader(1, kind, 0, 1 | flags, 0, 1, 220) for kind in RmppType for flags in (0, 2, 4, 6)]
    yield b"".join(header.pack() + b"\1" for header in headers)
    for header in headers:
        yield header.pack() + b"\1"
    yield b"".join(RmppHeader(1, RmppType.ACK, 0, 1, 0, at, at + 64).pack() + b"\1" for at in range(1, 12))


@target(rmpp_headers, 400)
def rmpp(data: bytes) -> None:
    """Both ends of a segmented transfer: neither grows, loops, or completes with other data than was sent."""
    source = Source(data)
    sent = bytes(range(256)) * 8
    receiver = Receiver(30.0, max_size=_MAX_SIZE)
    sender = Sender(sent, 0.0, timeout=0.5)
    now = 0.0
    while not source.is_empty:
        raw = source.take(12)
        now += source.number() / 256
        try:
            header = RmppHeader.unpack(raw)
        except WireError:
            break
        was_complete = receiver.is_complete
        reply_header = receiver.received(header, bytes(SEGMENT_SIZE), now)
        assert reply_header is None or len(reply_header.pack()) == 12
        assert receiver.is_complete or not was_complete, "a complete response stays"
        assert len(receiver.data) <= _MAX_SIZE
        sender.received(header, now)
        sender.timer(now)
        for out, records in sender.to_send():
            at = (out.segment - 1) * SEGMENT_SIZE
            assert records == sent[at : at + SEGMENT_SIZE]
        assert not (sender.is_complete and sender.error is not None)
    for _ in range(200):
        deadline = sender.next_deadline()
        if deadline is None:
            break
        now = max(now, deadline)
        sender.timer(now)
        sender.to_send()
    assert sender.is_done
