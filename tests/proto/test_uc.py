"""The engine of unreliable connections: packets to the byte, what is executed, what is dropped, completions."""

from __future__ import annotations

import random
from hashlib import shake_128
from itertools import pairwise
from pathlib import Path

import pytest

from rdmacm.enums import AccessFlag, WCOpcode, WCStatus, WROpcode
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes, SharedReceives
from rdmacm.proto.roce.opcodes import IS_END, Opcode
from rdmacm.proto.roce.uc import UcEngine, UnreliableEngine
from rdmacm.proto.roce.uc_states import TRANSITIONS, Arrival, Step, UcState
from rdmacm.proto.work import WC, RecvWork, SendWork
from rdmacm.soft.device.memory import INACCESSIBLE
from support.pcap import Datagram, roce
from support.rc import BASE, RKEY, Region, flows, make_shared, make_uc, packets, statuses, view
from support.roce_packets import RocePacket
from support.rows import for_each

MTU = 256
PSN = 0xFFFFFE
W, O = WROpcode, Opcode  # noqa: E741
KINDS = {
    W.SEND: ("UC_SEND", ""),
    W.SEND_WITH_IMM: ("UC_SEND", "_WITH_IMMEDIATE"),
    W.RDMA_WRITE: ("UC_RDMA_WRITE", ""),
    W.RDMA_WRITE_WITH_IMM: ("UC_RDMA_WRITE", "_WITH_IMMEDIATE"),
}


class Link:
    """Two engines in RTS, and the way from the first to the second."""

    def __init__(self, *, ipv6: bool = False, mtu: int = MTU, shared: SharedReceives | None = None) -> None:
        self.flows = flows(ipv6=ipv6)
        self.memory = Region()
        self.left = make_uc(0x11, Region())
        self.counters = EngineCounters()
        self.right = make_uc(0x12, self.memory, shared, self.counters)
        hosts = (bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]))
        if ipv6:
            hosts = (b"\xfd" + bytes(14) + b"\1", b"\xfd" + bytes(14) + b"\2")
        for index, end in enumerate((self.left, self.right)):
            end.set_route(hosts[index], hosts[1 - index], 50000 + index)
            end.set_peer_port(50001 - index)
            end.ready_to_receive(RtrAttributes(0x12 - index, PSN, path_mtu=mtu))
            end.ready_to_send(RtsAttributes(PSN))

    def post(self, data: bytes = b"hello", opcode: WROpcode = W.SEND, **more: object) -> None:
        changes = {"wr_id": 1, "segments": (view(data),), "remote_addr": BASE, "rkey": RKEY, "imm": 7, **more}
        self.left.post_send(SendWork(opcode=opcode, **changes))  # type: ignore[arg-type]

    def packets(self, limit: int = 1000) -> list[bytes]:
        """What the first engine sends, without ICRCs."""
        return [packet[:-4] for datagram in self.left.datagrams(0, limit, 0) for packet in packets(datagram)]

    def deliver(self, *found: bytes) -> list[bool]:
        """Whether the second engine accepts each packet, to which the ICRC is added."""
        return [bool(self.right.received(memoryview(each + self.flows[0].seal([each])), 0, 0)) for each in found]

    def message(self, data: bytes, opcode: WROpcode = W.SEND, **more: object) -> list[bytes]:
        self.post(data, opcode, **more)
        return self.packets()

    @property
    def next_psn(self) -> int:
        """The PSN that the rest of the message in progress has."""
        found: int = getattr(self.right, "_expected_psn" if isinstance(self.right, UcEngine) else "expected_psn")
        return found

    @property
    def state(self) -> UcState:
        """The message in progress."""
        return UcState(getattr(self.right, "_state" if isinstance(self.right, UcEngine) else "operation"))

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.counters.dropped)


def taken(engine: UnreliableEngine) -> list[WC]:
    found = engine.completed[:]
    engine.completed.clear()
    return found


def data_of(size: int) -> bytes:
    return shake_128(b"%d" % size).digest(size)


# -- messages -------------------------------------------------------------------------------------------------------


@for_each("ipv6", [False, True])
@for_each("opcode", list(KINDS))
@for_each("size", [0, 3, 256, 257, 513, 1000])
def test_message_is_cut_at_the_path_mtu_and_arrives(ipv6: bool, opcode: WROpcode, size: int) -> None:
    link = Link(ipv6=ipv6)
    data, buffer = data_of(size), view(bytes(1200))
    link.right.post_recv(RecvWork(2, [buffer[:30], buffer[30:347], buffer[347:]]))
    third = size // 3
    found = link.message(data, opcode, segments=(view(data[:third]), view(data[third:])), solicited=True)
    name, last = KINDS[opcode]
    count = max(1, -(-size // MTU))
    names = ["FIRST", *["MIDDLE"] * (count - 2), "LAST" + last] if count > 1 else ["ONLY" + last]
    parsed = [RocePacket.unpack(each) for each in found]
    assert [O(each.bth.opcode).name for each in parsed] == [f"{name}_{each}" for each in names]
    assert [each.bth.psn for each in parsed] == [PSN + n & 0xFFFFFF for n in range(count)]
    assert [each.bth.se for each in parsed] == [False] * (count - 1) + [True]
    assert not any(each.bth.ack_req for each in parsed), "nothing is acknowledged"
    assert b"".join(bytes(each.payload) for each in parsed) == data
    (sent,) = taken(link.left)
    assert (sent.wr_id, sent.status, sent.byte_len) == (1, WCStatus.SUCCESS, size)
    assert link.deliver(*found) == [True] * count
    is_write, has_immediate = "WRITE" in name, bool(last)
    if is_write:
        assert parsed[0].reth is not None
        assert parsed[0].reth.dma_length == size
        assert link.memory.bytes[:size] == data
        assert sent.opcode is WCOpcode.RDMA_WRITE
    if is_write and not has_immediate:
        assert not taken(link.right)
        return
    (wc,) = taken(link.right)
    assert (wc.wr_id, wc.byte_len, wc.solicited, wc.imm_data) == (2, size, True, 7 if has_immediate else None)
    assert wc.opcode is (WCOpcode.RECV_RDMA_WITH_IMM if is_write else WCOpcode.RECV)
    if not is_write:
        assert bytes(buffer[:size]) == data


def test_nothing_is_answered_and_no_timer_runs() -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(bytes(2000))]))
    link.deliver(*link.message(bytes(1500)))
    assert (link.right.datagrams(0, 100, 0), link.right.to_send, link.right.deadline) == ([], 0, None)
    assert (link.left.deadline, [*link.left.probe()]) == (None, [])


@for_each("limit", [1, 2, 3, 7])
def test_turns_cut_messages_anywhere(limit: int) -> None:
    link = Link()
    sizes = [1000, 0, 300, 5, 2000]
    for number, size in enumerate(sizes):
        link.right.post_recv(RecvWork(number, [view(bytes(2000))]))
        link.post(data_of(size), wr_id=number)
    count = 0
    while found := link.packets(limit):
        assert len(found) <= limit
        count += len(found)
        assert all(link.deliver(*found))
    assert count == sum(max(1, -(-size // MTU)) for size in sizes)
    assert [(wc.wr_id, wc.byte_len) for wc in taken(link.right)] == list(enumerate(sizes))
    assert [wc.wr_id for wc in taken(link.left)] == list(range(5))


def test_trains_are_received_as_they_were_sent() -> None:
    link = Link()
    data, buffer = data_of(20_000), view(bytes(20_000))
    link.right.post_recv(RecvWork(1, [buffer]))
    link.post(data, segments=(view(data[:7000]), view(data[7000:])))
    found = link.left.datagrams(0, 1000, 65_507)
    assert len(found) < 10
    for pieces, segment in found:
        train = b"".join(pieces)
        assert link.right.received(memoryview(train), segment, 0) == -(-len(train) // (segment or len(train)))
    assert [wc.byte_len for wc in taken(link.right)] == [20_000]
    assert bytes(buffer) == data


def test_psn_wraps_in_a_run_of_middle_packets() -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(bytes(5000))]))
    found = link.message(bytes(5000))
    assert [int.from_bytes(each[9:12], "big") for each in found] == [PSN + n & 0xFFFFFF for n in range(20)]
    assert all(link.deliver(*found))


def test_pause_finishes_the_message_that_has_begun() -> None:
    link = Link()
    link.post(bytes(1000))
    link.post(b"later", wr_id=2)
    link.packets(2)
    link.left.pause()
    assert not link.left.drained
    assert len(link.packets()) == 2
    assert link.left.drained
    assert (link.packets(), link.left.to_send) == ([], 0)
    link.left.resume()
    assert len(link.packets()) == 1
    assert [wc.wr_id for wc in taken(link.left)] == [1, 2]


CAPTURE = Path(__file__).parent.parent / "data" / "captures" / "rxe-uc.pcap"
SIZES = [0, 5, 1027, 2053]


def captured() -> dict[int, list[Datagram]]:
    """The packets of rdma_rxe, by destination queue pair."""
    found: dict[int, list[Datagram]] = {}
    for datagram in roce(CAPTURE):
        found.setdefault(RocePacket.unpack(datagram.payload[:-4]).bth.dest_qpn, []).append(datagram)
    assert len(found) == len(KINDS)
    return found


def test_messages_of_rxe_are_received() -> None:
    for qpn, datagrams in captured().items():
        first = RocePacket.unpack(datagrams[0].payload[:-4])
        is_write = "WRITE" in O(first.bth.opcode).name
        memory = Captured(first.reth.rkey if first.reth else 0)
        engine = make_uc(qpn, memory)
        engine.set_route(datagrams[0].destination, datagrams[0].source, 1)
        engine.set_peer_port(datagrams[0].sport)
        engine.ready_to_receive(RtrAttributes(1, first.bth.psn, path_mtu=1024))
        buffers = [view(bytes(3000)) for _ in SIZES]
        for number, buffer in enumerate(buffers):
            engine.post_recv(RecvWork(number, [buffer]))
        for datagram in datagrams:
            assert engine.received(memoryview(datagram.payload), 0, 0) == 1
        done = taken(engine)
        if is_write and not done:
            assert [length for _, length in memory.asked] == SIZES[1:]
            continue
        assert [(wc.wr_id, wc.byte_len) for wc in done] == list(enumerate(SIZES))
        if not is_write:
            payload = b"".join(bytes(RocePacket.unpack(each.payload[:-4]).payload) for each in datagrams)
            assert b"".join(bytes(b[:size]) for b, size in zip(buffers, SIZES, strict=True)) == payload


class Captured:
    """Memory of any address, with the key of a capture."""

    def __init__(self, rkey: int) -> None:
        self.rkey = rkey
        #: Address and length of each WRITE, as the first packet names them.
        self.asked: list[tuple[int, int]] = []

    def permits(self, rkey: int, access: AccessFlag) -> bool:
        raise AssertionError("UC has no FLUSH")

    def bind(self, bind: object) -> bool:
        raise AssertionError("UC sends no BIND_MW")

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        if rkey != self.rkey or access is not AccessFlag.REMOTE_WRITE:
            return None
        if (address, length) not in self.asked:
            self.asked.append((address, length))
        return view(bytes(length))

    def invalidate(self, rkey: int) -> bool:
        return False


def test_packets_of_rxe_are_made_again() -> None:
    """The same messages as the same packets, to the byte."""
    for datagrams in captured().values():
        parsed = [RocePacket.unpack(datagram.payload[:-4]) for datagram in datagrams]
        engine = make_uc(1, Region())
        engine.ready_to_receive(RtrAttributes(parsed[0].bth.dest_qpn, 0, path_mtu=1024))
        engine.ready_to_send(RtsAttributes(parsed[0].bth.psn))
        start = 0
        for end, last in enumerate(parsed):
            if not IS_END[last.bth.opcode]:
                continue
            first = parsed[start]
            data = b"".join(bytes(packet.payload) for packet in parsed[start : end + 1])
            is_write = first.reth is not None
            plain, immediate = (W.RDMA_WRITE, W.RDMA_WRITE_WITH_IMM) if is_write else (W.SEND, W.SEND_WITH_IMM)
            work = SendWork(start, immediate if last.imm_dt else plain, [view(data)])
            if first.reth is not None:
                work.remote_addr, work.rkey = first.reth.virtual_address, first.reth.rkey
            if last.imm_dt is not None:
                work.imm = int.from_bytes(last.imm_dt.data, "big")
            engine.post_send(work)
            start = end + 1
        made = [packet[:-4] for datagram in engine.datagrams(0, 100, 0) for packet in packets(datagram)]
        assert made == [bytes(datagram.payload[:-4]) for datagram in datagrams]


# -- the responder's table ------------------------------------------------------------------------------------------

#: InfiniBand Architecture 9.8.2.2, in the order of the table.
B, C, R, A, D = Step
SPECIFIED = {
    UcState.BETWEEN: (B, B, D, D, D),
    UcState.IN_SEND: (R, R, C, A, A),
    UcState.IN_WRITE: (R, R, A, C, A),
}


@for_each(("state", "arrival"), [(state, arrival) for state in UcState for arrival in Arrival])
def test_every_cell(state: UcState, arrival: Arrival) -> None:
    """The packet, in the state, has the effect of the step."""
    link = Link()
    step = SPECIFIED[state][arrival]
    assert TRANSITIONS[state][arrival] is step
    for number in range(3):
        link.right.post_recv(RecvWork(number, [view(bytes(1000))]))
    send, write = link.message(bytes(600)), link.message(bytes(600), W.RDMA_WRITE)
    if state is not UcState.BETWEEN:
        begun = send if state is UcState.IN_SEND else write
        assert link.deliver(begun[0]) == [True]
    psn = link.next_psn
    packet = (send[0], write[0], send[1], write[1], send[1])[arrival]
    number = psn if arrival is not Arrival.GAP else psn + 1
    packet = packet[:8] + (number & 0xFFFFFF).to_bytes(4, "big") + packet[12:]
    accepted = step in (Step.BEGIN, Step.CONTINUE, Step.RESTART)
    assert link.deliver(packet) == [accepted]
    assert link.dropped == ({} if accepted else {"sequence": 1})
    after = UcState.BETWEEN
    if accepted:
        after = UcState.IN_SEND if arrival in (Arrival.SEND_START, Arrival.SEND_REST) else UcState.IN_WRITE
    assert link.state is after
    link.deliver(*link.message(b"next"))
    (wc,) = taken(link.right)
    assert (wc.wr_id, wc.byte_len) == (0, 4), "the next message takes the first receive, from its beginning"


# -- loss -----------------------------------------------------------------------------------------------------------


@for_each("lost", [0, 1, 2, 3])
@for_each("opcode", list(KINDS))
def test_lost_packet_drops_its_message_and_nothing_else(opcode: WROpcode, lost: int) -> None:
    link = Link()
    buffers = [view(bytes(1000)) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        link.right.post_recv(RecvWork(number, [buffer]))
    messages = [link.message(data_of(1000 - n), opcode, imm=n, remote_addr=BASE + 2000 * n) for n in range(3)]
    for number, message in enumerate(messages):
        link.deliver(*(packet for at, packet in enumerate(message) if (number, at) != (1, lost)))
    found = taken(link.right)
    if opcode is W.RDMA_WRITE:
        assert not found
    else:
        assert [(wc.wr_id, wc.byte_len) for wc in found] == [(0, 1000), (1, 998)]
        assert statuses(found) == [(0, "SUCCESS"), (1, "SUCCESS")]
    if opcode in (W.RDMA_WRITE, W.RDMA_WRITE_WITH_IMM):
        assert link.memory.bytes[:1000] == data_of(1000)
        assert link.memory.bytes[4000:4998] == data_of(998)
    else:
        assert bytes(buffers[1][:998]) == data_of(998)


def lossy(seed: int) -> None:
    """Messages of every kind while packets are lost, repeated and late: what completes is right, once, and in order."""
    chance = random.Random(seed)
    link = Link()
    buffers = [view(bytes(2000)) for _ in range(80)]
    for number, buffer in enumerate(buffers):
        link.right.post_recv(RecvWork(number, [buffer]))
    flying: list[bytes] = []
    lengths = []
    for number in range(60):
        lengths.append(chance.choice((0, 5, 256, 700, 1800)))
        opcode = chance.choice((W.SEND_WITH_IMM, W.RDMA_WRITE_WITH_IMM, W.SEND_WITH_IMM))
        link.post(data_of(lengths[-1] + number), opcode, wr_id=number, imm=number, remote_addr=BASE + number * 1000)
        for packet in link.packets(chance.randrange(1, 9)):
            if chance.random() > 0.1:
                flying += [packet] * (1 + (chance.random() < 0.05))
        if chance.random() < 0.1:
            chance.shuffle(flying)
        while flying and chance.random() < 0.9:
            link.deliver(flying.pop(0))
    link.deliver(*flying, *link.packets())
    found = taken(link.right)
    assert [wc.wr_id for wc in found] == list(range(len(found)))
    assert len({wc.imm_data for wc in found}) > 20
    for wc in found:
        assert wc.imm_data is not None
        expected = data_of(lengths[wc.imm_data] + wc.imm_data)
        assert wc.byte_len == len(expected)
        if wc.opcode is WCOpcode.RECV:
            assert bytes(buffers[wc.wr_id][: len(expected)]) == expected
    assert [wc.wr_id for wc in taken(link.left)] == list(range(60))


def test_loss_with_some_seeds() -> None:
    for seed in range(5):
        lossy(seed)


@pytest.mark.slow
def test_loss_with_many_seeds() -> None:
    for seed in range(5, 250):
        lossy(seed)


# -- what is dropped ------------------------------------------------------------------------------------------------


def test_message_without_a_receive_is_dropped() -> None:
    link = Link()
    send, write = link.message(bytes(600)), link.message(b"x" * 300, W.RDMA_WRITE_WITH_IMM)
    assert link.deliver(*send) == [False] * 3
    assert link.deliver(*write) == [True, False], "only the packet with the immediate data needs a receive"
    assert link.dropped == {"no receive": 2, "sequence": 2}
    assert not any(link.memory.bytes[256:]), "of that packet nothing is written"
    link.right.post_recv(RecvWork(5, [view(bytes(600))]))
    assert all(link.deliver(*send))
    assert statuses(taken(link.right)) == [(5, "SUCCESS")]


def test_receive_that_is_too_short_stays_posted() -> None:
    link = Link()
    buffer = view(bytes(300))
    link.right.post_recv(RecvWork(1, [buffer]))
    assert link.deliver(*link.message(bytes(600))) == [True, False, False]
    assert link.dropped == {"receive too short": 1, "sequence": 1}
    assert link.deliver(*link.message(b"fits")) == [True]
    assert statuses(taken(link.right)) == [(1, "SUCCESS")]
    assert bytes(buffer[:4]) == b"fits"


def test_receive_of_a_shared_queue_is_used_for_the_next_message() -> None:
    shared = make_shared()
    for number in range(2):
        shared.post_work(RecvWork(number, [view(bytes(1000))]))
    link = Link(shared=shared)
    first, _, last = link.message(bytes(600))
    assert link.deliver(first, last) == [True, False]
    assert len(shared) == 1
    link.deliver(*link.message(b"a"), *link.message(b"b"), *link.message(b"c"))
    assert statuses(taken(link.right)) == [(0, "SUCCESS"), (1, "SUCCESS")]
    assert link.dropped == {"sequence": 1, "no receive": 1}


def test_receive_that_cannot_be_written_ends_the_queue_pair() -> None:
    link = Link()
    for number in range(2):
        link.right.post_recv(RecvWork(number, INACCESSIBLE if number == 0 else [view(bytes(10))]))
    link.deliver(*link.message(b"abc"))
    assert statuses(taken(link.right)) == [(0, "LOC_QP_OP_ERR"), (1, "WR_FLUSH_ERR")]
    assert (link.right.failed, link.right.failure) == (True, "LOC_QP_OP_ERR of a receive")
    assert link.deliver(*link.message(b"abc")) == [False]
    assert link.dropped == {"state": 1}


def test_flush_completes_the_receive_of_an_incomplete_message_first() -> None:
    link = Link()
    for number in range(3):
        link.right.post_recv(RecvWork(number, [view(bytes(1000))]))
    link.deliver(link.message(bytes(600))[0])
    link.right.flush()
    link.right.post_recv(RecvWork(3, []))
    link.right.post_send(SendWork(9, W.SEND))
    assert statuses(taken(link.right)) == [(n, "WR_FLUSH_ERR") for n in (0, 1, 2, 3, 9)]


def test_request_whose_memory_cannot_be_read_flushes_the_others() -> None:
    link = Link()
    link.post(wr_id=1)
    link.post(wr_id=2, segments=INACCESSIBLE)
    link.post(wr_id=3)
    assert len(link.packets()) == 1
    link.post(wr_id=4)
    assert statuses(taken(link.left)) == [
        (1, "SUCCESS"),
        (2, "LOC_PROT_ERR"),
        (3, "WR_FLUSH_ERR"),
        (4, "WR_FLUSH_ERR"),
    ]
    assert (link.left.failed, link.left.send_failed) == (False, True)
    link.left.resume()
    link.post(wr_id=5)
    assert len(link.packets()) == 1


@for_each(
    ("address", "rkey", "length"),
    [
        (BASE - 1, RKEY, 600),
        (BASE + (1 << 16) - 599, RKEY, 600),
        ((1 << 64) - 1, RKEY, 600),
        ((1 << 64) - 600, RKEY, 601),
        (BASE, RKEY ^ 1, 600),
        (BASE, RKEY, (1 << 31) + 1),
        (BASE, RKEY, 0xFFFFFFFF),
        (BASE, RKEY, 0),
        (BASE, RKEY, 255),
        (BASE, RKEY, 256),
    ],
)
def test_write_to_memory_that_is_not_the_peers_is_dropped(address: int, rkey: int, length: int) -> None:
    link = Link()
    first, *others = link.message(b"x" * 600, W.RDMA_WRITE)
    reth = address.to_bytes(8, "big") + rkey.to_bytes(4, "big") + length.to_bytes(4, "big")
    assert link.deliver(first[:12] + reth + first[28:], *others) == [False] * 3
    assert link.dropped == {"refused": 1, "sequence": 2}
    assert not any(link.memory.bytes)
    assert all(link.deliver(*link.message(b"y" * 600, W.RDMA_WRITE)))


def test_write_may_not_be_longer_or_shorter_than_it_says() -> None:
    link = Link()
    first, *_, last = link.message(b"x" * 600, W.RDMA_WRITE)
    for length, expected in ((520, [True, True, False]), (513, [True, True, False]), (700, [True, True, False])):
        middle = link.message(b"x" * 600, W.RDMA_WRITE)[1]
        changed = [
            each[:8] + (psn & 0xFFFFFF).to_bytes(4, "big") + each[12:]
            for psn, each in enumerate((first[:24] + length.to_bytes(4, "big") + first[28:], middle, last), 70)
        ]
        assert link.deliver(*changed) == expected
    assert link.dropped == {"refused": 3}
    assert not any(link.memory.bytes[512:])


def test_write_is_dropped_when_the_memory_is_deregistered_or_the_permission_ends() -> None:
    link = Link()
    found = link.message(b"x" * 600, W.RDMA_WRITE)
    assert link.deliver(found[0]) == [True]
    link.memory.remove(RKEY)
    assert link.deliver(found[1], found[2]) == [False, False]
    link.memory.add(RKEY)
    link.right.set_access(AccessFlag.LOCAL_WRITE)
    assert link.deliver(*link.message(b"y" * 600, W.RDMA_WRITE)) == [False] * 3
    assert b"y" not in link.memory.bytes
    assert bytes(link.memory.bytes[256:600]) == bytes(344)


@for_each(
    ("opcode", "size"),
    [
        (O.UC_SEND_FIRST, MTU - 4),
        (O.UC_SEND_FIRST, 0),
        (O.UC_SEND_FIRST, MTU + 4),
        (O.UC_SEND_ONLY, MTU + 4),
        (O.UC_SEND_ONLY_WITH_IMMEDIATE, MTU + 4),
        (O.UC_RDMA_WRITE_FIRST, MTU - 4),
        (O.UC_RDMA_WRITE_ONLY, MTU + 4),
        (O.UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, MTU + 4),
    ],
)
def test_start_of_a_wrong_size_is_dropped(opcode: Opcode, size: int) -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(bytes(4096))]))
    name = "WRITE" if "WRITE" in opcode.name else "SEND"
    model = link.message(bytes(600), W.RDMA_WRITE if name == "WRITE" else W.SEND)[0]
    extra = b"\0\0\0\7" if "IMMEDIATE" in opcode.name else b""
    reth = model[12:24] + size.to_bytes(4, "big") if name == "WRITE" else b""
    assert link.deliver(bytes([opcode]) + model[1:12] + reth + extra + bytes(size)) == [False]
    assert link.dropped == {"refused": 1}
    assert not taken(link.right)


@for_each("size", [0, 4, MTU - 4, MTU + 4])
@for_each("name", ["MIDDLE", "LAST", "LAST_WITH_IMMEDIATE"])
@for_each("opcode", [W.SEND, W.RDMA_WRITE])
def test_rest_of_a_wrong_size_is_dropped(opcode: WROpcode, name: str, size: int) -> None:
    if name != "MIDDLE" and 0 < size <= MTU:
        return
    link = Link()
    link.right.post_recv(RecvWork(1, [view(bytes(4096))]))
    first, middle, _ = link.message(bytes(600), opcode)
    number = O[f"{KINDS[opcode][0]}_{name}"]
    extra = b"\0\0\0\7" if "IMMEDIATE" in name else b""
    assert link.deliver(first, bytes([number]) + middle[1:12] + extra + bytes(size)) == [True, False]
    assert link.dropped == {"refused": 1}
    assert not taken(link.right)


@for_each(
    ("at", "value", "reason"),
    [
        (0, O.RC_SEND_ONLY, "opcode"),
        (0, O.UD_SEND_ONLY, "opcode"),
        (0, 0x2C, "opcode"),
        (0, 0xFF, "opcode"),
        (0, O.UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, "length"),
        (1, 0x01, "version"),
        (2, 0x7F, ""),
        (3, 0xFE, "pkey"),
        (7, 0x13, "qpn"),
    ],
)
def test_headers_are_checked(at: int, value: int, reason: str) -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(bytes(100))]))
    (packet,) = link.message(b"12345678")
    changed = bytearray(packet)
    changed[at] = value
    assert link.deliver(bytes(changed)) == [not reason]
    assert link.dropped == ({reason: 1} if reason else {})


def test_damage_and_odd_lengths_are_dropped() -> None:
    link = Link()
    (packet,) = link.message(b"12345678")
    sealed = packet + link.flows[0].seal([packet])
    for data in (sealed[:-1], sealed[:15], sealed + bytes(5000), bytes([sealed[0]]) + bytes(15)):
        assert link.right.received(memoryview(data), 0, 0) == 0
    damaged = bytearray(sealed)
    damaged[14] ^= 1
    assert link.right.received(memoryview(damaged), 0, 0) == 0
    assert link.dropped["icrc"] == 1
    assert link.right.received(memoryview(b""), 0, 0) == 0


def test_identification_of_a_peer_that_counts_is_found() -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(bytes(2000))]))
    for number, packet in enumerate(link.message(bytes(1000)), 40_000):
        data = packet + link.flows[0].seal([packet], number)
        assert link.right.received(memoryview(data), 0, 0) == 1
    assert statuses(taken(link.right)) == [(1, "SUCCESS")]


def test_states_before_rts() -> None:
    counters = EngineCounters()
    engine = make_uc(0x12, Region())
    with pytest.raises(ValueError, match="ready to receive"):
        engine.ready_to_send(RtsAttributes(0))
    engine.ready_to_receive(RtrAttributes(0x11, 0, path_mtu=MTU))
    with pytest.raises(ValueError, match="not ready to send"):
        engine.post_send(SendWork(1, W.SEND))
    for opcode in (W.RDMA_READ, W.ATOMIC_FETCH_AND_ADD, W.SEND_WITH_INV):
        with pytest.raises(ValueError, match="unreliable connection"):
            engine.post_send(SendWork(1, opcode))
    idle = make_uc(0x12, Region(), None, counters)
    idle.set_route(bytes(4), bytes(4), 1)
    assert idle.received(memoryview(bytes([O.UC_SEND_ONLY, 0, 255, 255, 0, 0, 0, 0x12]) + bytes(8)), 0, 0) == 0
    assert counters.dropped == {"state": 1}


def test_arbitrary_packets_never_raise() -> None:
    """Sealed packets of every opcode with arbitrary fields: memory changes only where the peer may write."""
    chance = random.Random(5)
    link = Link()
    for number in range(2000):
        link.right.post_recv(RecvWork(number, [view(bytes(chance.choice((0, 5, 300, 1000))))]))
    expected = 0
    for _ in range(1500):
        opcode = chance.choice((*range(0x20, 0x2E), chance.randrange(256)))
        expected = chance.choice((expected + 1, link.next_psn, chance.getrandbits(24))) & 0xFFFFFF
        head = bytes([opcode, chance.choice((0, 0x80, 0x10, 0x30)), 255, 255, 0, 0, 0, 0x12]) + expected.to_bytes(
            4, "big"
        )
        address = chance.choice((BASE, BASE + 65_000, (1 << 64) - 1, chance.getrandbits(64)))
        length = chance.choice((0, 4, 256, 600, 1 << 31, 0xFFFFFFFF))
        reth = address.to_bytes(8, "big") + RKEY.to_bytes(4, "big") + length.to_bytes(4, "big")
        body = (reth if chance.random() < 0.7 else b"") + bytes(chance.choice((0, 4, 8, 252, 256, 260, 4096)))
        link.deliver(head + body)
    done = taken(link.right)
    assert {wc.status for wc in done} == {WCStatus.SUCCESS}
    assert all(a.wr_id + 1 == b.wr_id for a, b in pairwise(done))
    assert len(link.memory.bytes) == 1 << 16
