"""FLUSH and ATOMIC WRITE on RC engines (InfiniBand Architecture, annex A19), without sockets."""

from __future__ import annotations

import ctypes
import random
import struct
import threading
from typing import Any

import pytest

from rdmacm.enums import AccessFlag, PlacementType, SelectivityLevel, WCOpcode, WROpcode
from rdmacm.proto.roce.rc.responder import MAX_FLUSHES
from rdmacm.proto.work import RecvWork, SendWork
from support.rc import (
    ACK,
    ALL,
    BASE,
    FETCH_ADD,
    PSN,
    READ,
    RKEY,
    WRITE_ONLY,
    Pair,
    Region,
    ack,
    answers,
    give,
    packet,
    packets,
    receiver,
    reth,
    send,
    statuses,
    syndromes,
    view,
)
from support.roce_packets import FETH, RETH, RocePacket
from support.rows import for_each

FLUSH, ATOMIC_WRITE, READ_RESPONSE_ONLY = 0x1C, 0x1D, 0x10
GLOBAL, PERSISTENT = PlacementType.GLOBAL, PlacementType.PERSISTENT
RANGE, MR = SelectivityLevel.RANGE, SelectivityLevel.MR
NAK_INVALID, NAK_ACCESS = 0x61, 0x62
TOP = (1 << 64) - 1


def flush(
    wr_id: int, length: int = 8, placement: int = GLOBAL, level: int = RANGE, remote_addr: int = BASE
) -> SendWork:
    flushed = length, placement, level
    return SendWork(wr_id, WROpcode.FLUSH, remote_addr=remote_addr, rkey=RKEY, flush=flushed)


def atomic_write(wr_id: int, value: bytes, remote_addr: int = BASE) -> SendWork:
    return SendWork(wr_id, WROpcode.ATOMIC_WRITE, [view(value)], remote_addr=remote_addr, rkey=RKEY)


def feth(placement: int = GLOBAL, level: int = RANGE) -> bytes:
    return struct.pack("!I", level << 4 | placement)


def empty_response(qp_num: int, psn: int, syndrome: int = 0x1F, data: bytes = b"") -> bytes:
    return struct.pack("!BBHIII", READ_RESPONSE_ONLY, 0, 0xFFFF, qp_num, psn & 0xFFFFFF, syndrome << 24 | 1) + data


def open_pair(**attributes: Any) -> Pair:
    return Pair(access=ALL, **attributes)


# -- on the wire ----------------------------------------------------------------------------------------------


def test_packets_are_those_of_rxe() -> None:
    pair = open_pair()
    pair.ends[0].post_send(flush(1, 100, GLOBAL | PERSISTENT, MR))
    pair.ends[0].post_send(atomic_write(2, b"8 bytes!", remote_addr=BASE + 8))
    first, second = (RocePacket.unpack(sent) for sent in pair.wanted(0))
    assert (first.bth.opcode, first.feth, first.reth) == (FLUSH, FETH(1, 3), RETH(BASE, RKEY, 100))
    assert (second.bth.opcode, second.reth, bytes(second.payload)) == (
        ATOMIC_WRITE,
        RETH(BASE + 8, RKEY, 8),
        b"8 bytes!",
    )
    assert first.bth.ack_req
    assert second.bth.ack_req
    assert second.bth.psn == first.bth.psn + 1 & 0xFFFFFF


def test_responses_are_read_responses_without_data() -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    assert give(engine, packet(ATOMIC_WRITE, reth(8) + b"8 bytes!")) == 1
    assert give(engine, packet(FLUSH, feth() + reth(8), psn=PSN + 1)) == 1
    found = [RocePacket.unpack(sent) for sent in answers(engine)]
    assert [(p.bth.opcode, p.bth.psn) for p in found] == [(READ_RESPONSE_ONLY, PSN), (READ_RESPONSE_ONLY, PSN + 1)]
    assert [(p.aeth.syndrome, p.aeth.msn) for p in found if p.aeth] == [(0x1F, 1), (0x1F, 2)]
    assert not any(p.payload for p in found)
    assert memory.bytes[:9] == b"8 bytes!\0"


@for_each("ipv6", [False, True])
def test_completions_name_the_operation_and_its_bytes(ipv6: bool) -> None:
    pair = open_pair(ipv6=ipv6)
    end = pair.ends[0]
    end.post_send(send(1, b"w" * 600, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    end.post_send(flush(2, 600))
    end.post_send(flush(3, 1 << 31, level=MR, remote_addr=TOP))
    end.post_send(flush(4, 0))
    end.post_send(atomic_write(5, b"8 bytes!"))
    end.post_send(SendWork(6, WROpcode.ATOMIC_WRITE, [view(b"in "), view(b"parts")], remote_addr=BASE + 8, rkey=RKEY))
    pair.run()
    assert [(c.wr_id, c.status.name, c.opcode, c.byte_len) for c in pair.done[0]] == [
        (1, "SUCCESS", WCOpcode.RDMA_WRITE, 600),
        (2, "SUCCESS", WCOpcode.FLUSH, 600),
        (3, "SUCCESS", WCOpcode.FLUSH, 1 << 31),
        (4, "SUCCESS", WCOpcode.FLUSH, 0),
        (5, "SUCCESS", WCOpcode.ATOMIC_WRITE, 8),
        (6, "SUCCESS", WCOpcode.ATOMIC_WRITE, 8),
    ]
    assert pair.memory[1].bytes[:17] == b"8 bytes!in partsw"
    assert pair.done[1] == []


@for_each("placement, needed", [(GLOBAL, AccessFlag.FLUSH_GLOBAL), (PERSISTENT, AccessFlag.FLUSH_PERSISTENT)])
def test_each_placement_needs_its_permission_and_no_other(placement: int, needed: AccessFlag) -> None:
    for access in (AccessFlag.FLUSH_GLOBAL, AccessFlag.FLUSH_PERSISTENT):
        engine = receiver(Region(access=access), access=access)
        assert give(engine, packet(FLUSH, feth(placement) + reth(8))) == (access is needed)


# -- resources and order --------------------------------------------------------------------------------------


def test_both_take_a_resource_of_the_peer() -> None:
    """rxe's responder has one for each, though its requester does not count its FLUSHes."""
    pair = open_pair(max_rd_atomic=2)
    for number in range(6):
        pair.ends[0].post_send(atomic_write(number, b"8 bytes!") if number % 3 else flush(number))
    assert [sent[0] for sent in pair.wanted(0)] == [FLUSH, ATOMIC_WRITE]
    pair.deliver(0, empty_response(0x11, pair.starts[0]))
    assert [sent[0] for sent in pair.wanted(0)] == [ATOMIC_WRITE]
    pair.deliver(0, empty_response(0x11, pair.starts[0] + 2))
    assert [sent[0] for sent in pair.wanted(0)] == [FLUSH, ATOMIC_WRITE]
    pair.deliver(0, ack(0x11, pair.starts[0] + 5))  # also of one that was not sent yet
    assert statuses(pair.ends[0].completions()) == [(number, "SUCCESS") for number in range(6)]
    assert not pair.ends[0].outstanding_reads


@for_each("work", [flush(1), atomic_write(1, b"8 bytes!")])
def test_requester_without_resources_sends_neither(work: SendWork) -> None:
    pair = open_pair(max_rd_atomic=0)
    pair.ends[0].post_send(work)
    pair.run()
    assert statuses(pair.done[0]) == [(1, "LOC_QP_OP_ERR")]


def test_responder_without_resources_takes_a_flush_only() -> None:
    pair = open_pair(max_dest_rd_atomic=0)
    pair.ends[0].post_send(flush(1))
    pair.ends[0].post_send(atomic_write(2, b"8 bytes!"))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "REM_INV_REQ_ERR")]


@for_each("first", [flush(1), atomic_write(1, b"8 bytes!")])
def test_fenced_request_waits(first: SendWork) -> None:
    pair = open_pair()
    pair.ends[0].post_send(first)
    pair.ends[0].post_send(send(2, b"x", fence=True))
    assert len(pair.wanted(0)) == 1
    pair.deliver(0, empty_response(0x11, pair.starts[0]))
    assert [sent[0] for sent in pair.wanted(0)] == [0x04]


def test_ack_of_a_later_request_completes_both() -> None:
    """Responses leave in order, so theirs were sent and lost; rxe completes them as well."""
    pair = open_pair(max_rd_atomic=2, timeout=10)
    end = pair.ends[0]
    end.post_send(flush(1))
    end.post_send(atomic_write(2, b"8 bytes!"))
    end.post_send(send(3, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    end.post_send(atomic_write(4, b"another!"))
    assert len(pair.wanted(0)) == 3
    pair.deliver(0, ack(0x11, pair.starts[0] + 2))
    assert statuses(end.completions()) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]
    assert [sent[0] for sent in pair.wanted(0)] == [ATOMIC_WRITE], "the resource is free again"


@for_each("behind", [flush(2), atomic_write(2, b"8 bytes!", remote_addr=BASE + 4096)])
def test_response_after_a_lost_read_response_requests_the_read_again(behind: SendWork) -> None:
    pair = open_pair(timeout=10)
    answer = view(bytes(600))
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [answer], remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(behind)
    pair.lost = {2, 3, 4}  # the READ response
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert pair.now < 0.01


# -- loss and repetition --------------------------------------------------------------------------------------


@for_each(("lost", "duplicates"), [({0}, 0), ({1}, 1), ({0, 2}, 1), ({1, 3}, 2)])
def test_lost_atomic_write_or_its_response_is_repeated(lost: set[int], duplicates: int) -> None:
    pair = open_pair()
    pair.ends[0].post_send(atomic_write(1, b"8 bytes!"))
    pair.lost = lost
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert not pair.ends[0].outstanding_reads
    assert pair.ends[1].counters.dropped["duplicate"] == duplicates


@for_each("lost", [{0}, {1}, {0, 2}, {0, 2, 3}, {1, 2}, {1, 2, 4}, {1, 2, 4, 5}])
def test_lost_flush_or_its_response_is_repeated(lost: set[int]) -> None:
    pair = open_pair()
    pair.ends[0].post_send(flush(1))
    pair.lost = lost
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert pair.now < 0.05


def test_duplicate_write_precedes_a_repeated_flush() -> None:
    """rxe does not answer a FLUSH again, but acknowledges all that it has executed to whoever repeats a WRITE."""
    pair = open_pair(timeout=0.01)
    end = pair.ends[0]
    for number in (1, 2):
        end.post_send(flush(number))
    assert [sent[0] for sent in pair.wanted(0)] == [FLUSH, FLUSH]
    end.timer(0.02)
    repeated = [RocePacket.unpack(sent).bth for sent in pair.wanted(0)]
    assert [bth.opcode for bth in repeated] == [WRITE_ONLY, FLUSH, FLUSH]
    assert repeated[0].psn == pair.starts[0] - 1 & 0xFFFFFF
    pair.deliver(0, ack(0x11, pair.starts[0] + 1))
    assert statuses(end.completions()) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert end.deadline is None
    end.post_send(flush(3))
    assert [sent[0] for sent in pair.wanted(0)] == [FLUSH]
    end.timer(0.04)
    assert [sent[0] for sent in pair.wanted(0, 1)] == [FLUSH], "no more packets than there is room for"


def test_repeated_atomic_write_does_not_write_again() -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    give(engine, packet(ATOMIC_WRITE, reth(8) + b"8 bytes!"))
    (first,) = answers(engine)
    give(engine, packet(WRITE_ONLY, reth(8) + b"after it", psn=PSN + 1, ask=False))
    # rxe repeats a request with the address 0 (its req_retry restores that of READ, WRITE and atomics only).
    for again in (reth(8) + b"8 bytes!", reth(8, 0) + b"8 bytes!", reth(8) + b"another!", reth(4) + b"four", reth(0)):
        assert give(engine, packet(ATOMIC_WRITE, again)) == 0
        (repeated,) = answers(engine)
        assert (repeated[:12], repeated[12]) == (first[:12], first[12])
        assert memory.bytes[:9] == b"after it\0"
    assert not engine.failed


def test_repeated_flush_is_answered_by_its_psn() -> None:
    engine = receiver(access=ALL, max_dest_rd_atomic=1)
    for number in range(3):
        give(engine, packet(FLUSH, feth() + reth(8), psn=PSN + number))
    assert len(answers(engine)) == 3
    for number in (0, 1, 2):
        give(engine, packet(FLUSH, feth() + reth(8, 0), psn=PSN + number))
    found = [RocePacket.unpack(sent).bth for sent in answers(engine)]
    assert [(bth.opcode, bth.psn) for bth in found] == [(READ_RESPONSE_ONLY, PSN + i & 0xFFFFFF) for i in range(3)]


@for_each(
    ("opcode", "body"),
    [
        (READ, reth(0)),
        (READ, reth(8)),
        (FETCH_ADD, struct.pack("!QIQQ", BASE, RKEY, 1, 0)),
    ],
)
def test_duplicate_of_another_operation_is_not_answered(opcode: int, body: bytes) -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    give(engine, packet(ATOMIC_WRITE, reth(8) + b"8 bytes!"))
    answers(engine)
    give(engine, packet(opcode, body))
    assert answers(engine) == []
    assert memory.bytes[:8] == b"8 bytes!"
    engine = receiver(memory, access=ALL)
    give(engine, packet(opcode, body))
    answers(engine)
    before = bytes(memory.bytes)
    give(engine, packet(ATOMIC_WRITE, reth(8) + b"9 bytes!"))
    assert answers(engine) == []
    assert memory.bytes == before


def test_flood_of_flushes_is_bounded() -> None:
    engine = receiver(access=ALL)
    accepted = sum(give(engine, packet(FLUSH, feth() + reth(8), psn=PSN + number)) for number in range(300))
    assert accepted == MAX_FLUSHES
    for number in range(300):
        give(engine, packet(FLUSH, feth() + reth(8), psn=PSN + number % MAX_FLUSHES))
        give(engine, packet(WRITE_ONLY, reth(0), psn=PSN - 1))
    assert [p[0] for p in answers(engine)].count(READ_RESPONSE_ONLY) == MAX_FLUSHES
    assert not engine.failed
    assert give(engine, packet(FLUSH, feth() + reth(8), psn=PSN + MAX_FLUSHES)) == 1


#: Requests on one word: a lost, repeated or reordered one would show in the values that FETCH & ADD finds.
def _mixed(number: int, source: random.Random) -> SendWork:
    kind = source.randrange(5)
    if kind == 0:
        return flush(number, 8, GLOBAL, source.choice((RANGE, MR)))
    if kind == 1:
        return send(number, struct.pack("=Q", number << 32), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY)
    if kind == 2:
        work = SendWork(number, WROpcode.ATOMIC_FETCH_AND_ADD, [view(bytes(8))], remote_addr=BASE, rkey=RKEY)
        work.compare_add = 1
        return work
    if kind == 3:
        return SendWork(number, WROpcode.RDMA_READ, [view(bytes(700))], remote_addr=BASE, rkey=RKEY)
    return atomic_write(number, struct.pack("=Q", number << 32))


def _check_word(works: list[SendWork], final: bytes) -> None:
    value = 0
    for work in works:
        if work.opcode in (WROpcode.RDMA_WRITE, WROpcode.ATOMIC_WRITE):
            value = work.wr_id << 32
        elif work.opcode is WROpcode.ATOMIC_FETCH_AND_ADD:
            assert struct.unpack("=Q", work.segments[0]) == (value,)
            value += 1
        elif work.opcode is WROpcode.RDMA_READ:
            # A repeated READ is answered from the memory as it is then, as in rxe.
            assert struct.unpack_from("=Q", work.segments[0])[0] >= value
    assert final == struct.pack("=Q", value)


def _lossy(seed: int) -> None:
    source = random.Random(seed)
    pair = open_pair(
        seed=seed,
        loss=0.1,
        twice=0.1,
        late=0.1,
        train=source.choice((0, 65507)),
        ipv6=bool(seed & 1),
        retry_cnt=1000,
        max_rd_atomic=source.choice((1, 2, 4)),
        max_dest_rd_atomic=4,
    )
    works = [_mixed(number, source) for number in range(40)]
    for work in works:
        pair.ends[0].post_send(work)
    pair.run()
    assert statuses(pair.done[0]) == [(number, "SUCCESS") for number in range(40)]
    assert pair.done[1] == []
    assert not pair.ends[0].outstanding_reads
    _check_word(works, bytes(pair.memory[1].bytes[:8]))


@for_each("seed", range(12))
def test_lossy_network_neither_loses_nor_repeats_a_request(seed: int) -> None:
    _lossy(seed)


@pytest.mark.slow
def test_many_lossy_networks() -> None:
    for seed in range(250):
        _lossy(seed)


def test_readers_in_other_threads_see_whole_values() -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    word = ctypes.c_uint64.from_buffer(memory.bytes)
    valid = {int.from_bytes(bytes([byte]) * 8, "little") for byte in range(256)}
    seen: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(word.value)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2000):
        give(engine, packet(ATOMIC_WRITE, reth(8) + bytes([number & 0xFF]) * 8, psn=PSN + number))
        answers(engine)
    done.set()
    reader.join()
    assert seen <= valid
    assert word.value == int.from_bytes(bytes([1999 & 0xFF]) * 8, "little")


# -- the ICRC of FLUSH ----------------------------------------------------------------------------------------


@for_each("ipv6", [False, True])
def test_both_forms_of_the_icrc_are_taken(ipv6: bool) -> None:
    pair = open_pair(ipv6=ipv6)
    flow = pair.flows[0]
    for number, identification in enumerate((0, 1, 0x1234, 0xFFFF) * 2):
        data = struct.pack("!BBHII", FLUSH, 0, 0xFFFF, 0x12, pair.starts[0] + number & 0xFFFFFF) + feth() + reth(8)
        icrc = flow.seal_twice(data, identification) if number < 4 else flow.seal([data], identification)
        assert pair.ends[1].received(memoryview(data + icrc), 0, 0.0) == 1
    data = data[:9] + (pair.starts[0] + 8 & 0xFFFFFF).to_bytes(3, "big") + data[12:]
    damaged = bytes([flow.seal_twice(data)[0] ^ 1]) + flow.seal_twice(data)[1:]
    assert pair.ends[1].received(memoryview(data + damaged), 0, 0.0) in ((0,) if ipv6 else (0, 1))


def test_other_form_is_sent_when_the_first_is_not_answered() -> None:
    """rxe's is first. A peer that takes the specification's only loses the first FLUSH, and no later one."""
    pair = open_pair()
    end, flow = pair.ends[0], pair.flows[0]

    def sent(now: float) -> list[str]:
        kinds = []
        for datagram in end.datagrams(now, 100, 0):
            for data in packets(datagram):
                if data[0] == FLUSH:
                    kinds.append("specification" if flow.check([data]) else "rxe")
                assert flow.check([data]) or data[-4:] == flow.seal_twice(data[:-4])
        return kinds

    for number in range(3):
        end.post_send(flush(number))
    assert sent(0.0) == ["rxe"] * 3
    end.timer(0.02)
    assert sent(0.02) == ["specification"] * 3
    end.timer(0.05)
    assert sent(0.05) == ["rxe"] * 3
    end.timer(0.1)
    assert sent(0.1) == ["specification"] * 3
    for number in range(3):
        pair.deliver(0, empty_response(0x11, pair.starts[0] + number))
    for number in (3, 4):
        end.post_send(flush(number))
        assert sent(0.1) == ["specification"]
        pair.deliver(0, empty_response(0x11, pair.starts[0] + number))
    assert statuses(end.completions()) == [(number, "SUCCESS") for number in range(5)]


# -- refusals -------------------------------------------------------------------------------------------------


@for_each(
    ("body", "expected"),
    [
        # placement types and levels that are unknown, or none
        (feth(0) + reth(8), NAK_INVALID),
        (feth(4) + reth(8), NAK_INVALID),
        (feth(5) + reth(8), NAK_INVALID),
        (feth(8) + reth(8), NAK_INVALID),
        (feth(15) + reth(8), NAK_INVALID),
        (feth(GLOBAL, 2) + reth(8), NAK_INVALID),
        (feth(GLOBAL, 3) + reth(8), NAK_INVALID),
        # what the queue pair does not permit, and what the region does not
        (feth(PERSISTENT) + reth(8), NAK_INVALID),
        (feth(GLOBAL | PERSISTENT, MR) + reth(8), NAK_INVALID),
        # ranges
        (feth() + reth(8, BASE - 1), NAK_ACCESS),
        (feth() + reth(8, BASE + 0xFFF9), NAK_ACCESS),
        (feth() + reth(0x10001), NAK_ACCESS),
        (feth() + reth(1 << 31), NAK_ACCESS),
        (feth() + reth((1 << 31) + 1), NAK_INVALID),
        (feth() + reth(0xFFFFFFFF), NAK_INVALID),
        (feth() + reth(0xFFFF, TOP), NAK_ACCESS),
        (feth() + reth(8, TOP - 6), NAK_ACCESS),
        (feth() + reth(8, TOP - 7), NAK_ACCESS),
        (feth() + reth(0x2001, TOP - 0x1000), NAK_ACCESS),
        (feth() + reth(0, BASE - 1), NAK_ACCESS),
        (feth() + reth(0, BASE + 0x10001), NAK_ACCESS),
        # keys, also of 0 bytes and of the whole region
        (feth() + reth(8, rkey=RKEY + 1), NAK_ACCESS),
        (feth() + reth(0, rkey=RKEY + 1), NAK_ACCESS),
        (feth(GLOBAL, MR) + reth(0, rkey=RKEY + 1), NAK_ACCESS),
    ],
)
def test_refused_flush(body: bytes, expected: int) -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    assert give(engine, packet(FLUSH, body)) == 0
    assert syndromes(engine) == [(ACK, expected)]
    assert engine.failed
    assert not any(memory.bytes)


@for_each(
    "body",
    [
        feth() + reth(0),
        feth() + reth(0, BASE + 0x10000),
        feth() + reth(0x10000),
        feth(GLOBAL, MR) + reth(0, 0),
        feth(GLOBAL, MR) + reth(8, TOP),
        struct.pack("!I", 0xFFFFFFC0 | GLOBAL) + reth(8),  # reserved bits
        feth() + reth(8) + b"data that has no place in a FLUSH",
    ],
)
def test_permitted_flush(body: bytes) -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    assert give(engine, packet(FLUSH, body)) == 1
    assert syndromes(engine) == [(READ_RESPONSE_ONLY, 0x1F)]
    assert not any(memory.bytes)


def test_flush_needs_the_permission_of_the_queue_pair_and_of_the_region() -> None:
    global_, persistent = AccessFlag.FLUSH_GLOBAL, AccessFlag.FLUSH_PERSISTENT
    for of_qp, of_region, placement, expected in (
        (ALL, ALL & ~global_, GLOBAL, NAK_ACCESS),
        (ALL & ~global_, ALL, GLOBAL, NAK_INVALID),
        (ALL | persistent, ALL, PERSISTENT, NAK_ACCESS),
        (ALL | persistent, ALL, GLOBAL | PERSISTENT, NAK_ACCESS),
        (ALL, ALL | persistent, GLOBAL | PERSISTENT, NAK_INVALID),
    ):
        for level in SelectivityLevel:
            engine = receiver(Region(access=of_region), access=of_qp)
            assert give(engine, packet(FLUSH, feth(placement, level) + reth(8))) == 0
            assert syndromes(engine) == [(ACK, expected)], (of_qp, of_region, placement, level)


@for_each(
    ("body", "expected"),
    [
        # lengths
        (reth(0), NAK_INVALID),
        (reth(8), NAK_INVALID),
        (reth(8) + b"seven b", NAK_INVALID),
        (reth(8) + b"nine byte", NAK_INVALID),
        (reth(7) + b"seven b", NAK_INVALID),
        (reth(16) + b"sixteen bytes ..", NAK_INVALID),
        (reth(0) + b"8 bytes!", NAK_INVALID),
        (reth(4) + b"8 bytes!", NAK_INVALID),
        (reth(8) + bytes(256), NAK_INVALID),
        (reth(264) + bytes(264), NAK_INVALID),
        (reth((1 << 31) + 1) + b"8 bytes!", NAK_INVALID),
        (reth(0xFFFFFFFF) + b"8 bytes!", NAK_INVALID),
        # alignment
        *((reth(8, BASE + offset) + b"8 bytes!", NAK_INVALID) for offset in range(1, 8)),
        # ranges and keys
        (reth(8, BASE - 8) + b"8 bytes!", NAK_ACCESS),
        (reth(8, BASE + 0x10000) + b"8 bytes!", NAK_ACCESS),
        (reth(8, BASE + 0xFFFC) + b"8 bytes!", NAK_ACCESS),
        (reth(8, TOP - 7) + b"8 bytes!", NAK_ACCESS),
        (reth(8, TOP - 6) + b"8 bytes!", NAK_ACCESS),
        (reth(8, rkey=RKEY + 1) + b"8 bytes!", NAK_ACCESS),
        (reth(0, rkey=RKEY + 1), NAK_ACCESS),
    ],
)
def test_refused_atomic_write(body: bytes, expected: int) -> None:
    memory = Region()
    engine = receiver(memory, access=ALL)
    assert give(engine, packet(ATOMIC_WRITE, body)) == 0
    assert syndromes(engine) == [(ACK, expected)]
    assert engine.failed
    assert not any(memory.bytes)


def test_atomic_write_needs_remote_write_on_both() -> None:
    without = ALL & ~AccessFlag.REMOTE_WRITE
    for of_qp, of_region, expected in ((without, ALL, NAK_INVALID), (ALL, without, NAK_ACCESS)):
        memory = Region(access=of_region)
        engine = receiver(memory, access=of_qp)
        assert give(engine, packet(ATOMIC_WRITE, reth(8) + b"8 bytes!")) == 0
        assert syndromes(engine) == [(ACK, expected)]
        assert not any(memory.bytes)
    engine = receiver(access=AccessFlag.REMOTE_WRITE)
    assert give(engine, packet(ATOMIC_WRITE, reth(8) + b"8 bytes!")) == 1, "it is no atomic in the sense of the flags"


@for_each("body", [feth() + reth(8), reth(8) + b"8 bytes!"])
def test_neither_may_interrupt_a_message(body: bytes) -> None:
    engine = receiver(access=ALL)
    opcode = FLUSH if len(body) == 20 else ATOMIC_WRITE
    assert give(engine, packet(0x06, reth(600) + bytes(256), ask=False)) == 1
    assert give(engine, packet(opcode, body, psn=PSN + 1)) == 0
    assert syndromes(engine) == [(ACK, NAK_INVALID)]


@for_each("opcode", [0x3C, 0x3D, 0x7C, 0x7D, 0x5C, 0xBC])
def test_other_transports_have_neither(opcode: int) -> None:
    engine = receiver(access=ALL)
    assert give(engine, packet(opcode, feth() + reth(8))) == 0
    assert engine.counters.dropped == {"opcode": 1}
    assert answers(engine) == []


@for_each(("nak", "status"), [(0x61, "REM_INV_REQ_ERR"), (0x62, "REM_ACCESS_ERR"), (0x63, "REM_OP_ERR")])
def test_nak_ends_the_connection(nak: int, status: str) -> None:
    for work in (flush(1), atomic_write(1, b"8 bytes!")):
        pair = open_pair()
        pair.ends[0].post_send(work)
        pair.ends[0].post_send(send(2, b"x"))
        pair.wanted(0)
        pair.deliver(0, ack(0x11, pair.starts[0], nak))
        assert statuses(pair.ends[0].completions()) == [(1, status), (2, "WR_FLUSH_ERR")]


@for_each(
    "change",
    [
        (0x10, 0x1F, b"data"),
        (0x10, 0x62, b""),
        (0x0D, 0x1F, b""),
        (0x0F, 0x1F, b""),
    ],
)
def test_wrong_response_ends_the_connection(change: tuple[int, int, bytes]) -> None:
    opcode, syndrome, data = change
    for work in (flush(1), atomic_write(1, b"8 bytes!")):
        pair = open_pair()
        pair.ends[0].post_send(work)
        pair.wanted(0)
        response = bytes([opcode]) + empty_response(0x11, pair.starts[0], syndrome, data)[1:]
        pair.deliver(0, response)
        assert statuses(pair.ends[0].completions()) == [(1, "BAD_RESP_ERR")]


def test_atomic_acknowledge_is_no_response_to_either() -> None:
    for work in (flush(1), atomic_write(1, b"8 bytes!")):
        pair = open_pair()
        pair.ends[0].post_send(work)
        pair.wanted(0)
        pair.deliver(0, struct.pack("!BBHIIIQ", 0x12, 0, 0xFFFF, 0x11, pair.starts[0], 0x1F000001, 7))
        assert pair.ends[0].completions() == []
        assert pair.ends[0].counters.dropped["answer"] == 1


def test_released_buffer_is_a_local_error() -> None:
    pair = open_pair()
    work = atomic_write(1, b"8 bytes!")
    work.segments[0].release()
    pair.ends[0].post_recv(RecvWork(2, []))
    pair.ends[0].post_send(work)
    assert pair.wanted(0) == []
    assert statuses(pair.ends[0].completions()) == [(1, "LOC_PROT_ERR"), (2, "WR_FLUSH_ERR")]
