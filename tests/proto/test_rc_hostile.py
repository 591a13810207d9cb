"""RC engines with duplicate, excessive and invalid packets."""

from __future__ import annotations

import random
import struct
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rdmacm.enums import WCOpcode, WROpcode
from rdmacm.proto.work import WC, RecvWork, SendWork
from support.examples import MANY_EXAMPLES
from support.rc import (
    ACK,
    BASE,
    FETCH_ADD,
    PSN,
    READ,
    RKEY,
    SEND_ONLY,
    THERE,
    WRITE_FIRST,
    WRITE_MIDDLE,
    WRITE_ONLY,
    Pair,
    Region,
    ack,
    answers,
    give,
    packet,
    receiver,
    reth,
    send,
    statuses,
    syndromes,
    view,
)
from support.rows import for_each


def test_pending_responses_are_bounded() -> None:
    memory = Region()
    engine = receiver(memory, max_dest_rd_atomic=4)
    psn, rng = PSN, random.Random(8)
    for _ in range(4):
        give(engine, packet(FETCH_ADD, struct.pack("!QIQQ", BASE, RKEY, 1, 0), psn=psn))
        psn += 1
    for _ in range(2000):
        kind = rng.randrange(5)
        if kind == 0:
            give(engine, packet(FETCH_ADD, struct.pack("!QIQQ", BASE, RKEY, 1, 0), psn=PSN + rng.randrange(4)))
        elif kind == 1:
            psn += give(engine, packet(WRITE_ONLY, reth(0), psn=psn))
        elif kind == 2:
            give(engine, packet(WRITE_ONLY, reth(0), psn=psn + 9))
        elif kind == 3:
            give(engine, packet(WRITE_ONLY, reth(0), psn=psn - 1))
        else:
            give(engine, packet(SEND_ONLY, b"no receive", psn=psn))
    assert int.from_bytes(memory.bytes[:8], sys.byteorder) == 4
    assert len(answers(engine, 10_000)) <= 20


@for_each(
    ("opcode", "ahead", "body", "count"),
    [
        (READ, 0, reth(600), 3),
        (READ, 1, reth(344, BASE + 256), 2),
        (READ, 1, reth(100, BASE + 256), 1),
        (READ, 0, reth(601), 0),
        (READ, 1, reth(600), 0),
        (READ, 0, reth(600, BASE - 1), 0),
        (READ, 0, reth(600, rkey=RKEY + 1), 0),
        (READ, 0, reth(0xFFFFFFFF), 0),
        (FETCH_ADD, 1, struct.pack("!QIQQ", BASE, RKEY, 1, 0), 0),
        (FETCH_ADD, 3, struct.pack("!QIQQ", BASE, RKEY, 1, 0), 1),
        (READ, 3, reth(8), 0),
        (READ, -1, reth(8), 0),
    ],
)
def test_duplicate_requests_are_answered_but_not_executed(opcode: int, ahead: int, body: bytes, count: int) -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(READ, reth(600))) == 1
    assert give(engine, packet(FETCH_ADD, struct.pack("!QIQQ", BASE, RKEY, 1, 0), psn=PSN + 3)) == 1
    first = answers(engine)
    assert give(engine, packet(opcode, body, psn=PSN + ahead)) == 0
    again = answers(engine)
    assert len(again) == count
    if count == 3:
        assert again[1] == first[1], "a middle packet has no MSN"
    assert not engine.failed
    assert memory.bytes[:8] == (1).to_bytes(8, sys.byteorder)


def test_newest_duplicate_replaces_the_pending_responses() -> None:
    engine = receiver()
    give(engine, packet(READ, reth(600)))
    assert len(answers(engine)) == 3
    for _ in range(3):
        give(engine, packet(READ, reth(600)))
        assert len(answers(engine, 1)) == 1
    assert [p[0] for p in answers(engine)] == [0x0E, 0x0F]


def test_second_rnr_nak_does_not_restart_the_timer() -> None:
    pair = Pair(rnr_retry=1)
    for number in range(2):
        pair.ends[0].post_send(send(number, b"x"))
    assert len(pair.wanted(0)) == 2
    pair.deliver(0, ack(0x11, pair.starts[0], 0x20 | 14))
    until = pair.ends[0].deadline
    assert until == pytest.approx(0.00128)
    pair.deliver(0, ack(0x11, pair.starts[0], 0x20 | 31))
    assert pair.ends[0].deadline == until
    assert pair.wanted(0) == []
    pair.ends[0].timer(0.001)
    assert pair.wanted(0) == [], "too early"
    pair.ends[0].timer(0.002)
    assert len(pair.wanted(0)) == 2
    pair.deliver(0, ack(0x11, pair.starts[0], 0x20 | 14))
    assert statuses(pair.ends[0].completions()) == [(0, "RNR_RETRY_EXC_ERR"), (1, "WR_FLUSH_ERR")]


def test_each_gap_is_reported_once() -> None:
    engine = receiver()
    for first, second in [(0, 2), (1, 4)]:
        assert give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + first, ask=False)) == 1
        for late in (second, second + 1):
            give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + late))
        (nak,) = answers(engine)
        assert (nak[12], nak[9:12]) == (0x60, (PSN + first + 1 & 0xFFFFFF).to_bytes(3, "big"))
        give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + second))
        assert answers(engine) == []


def test_new_gap_is_reported_after_a_filled_one() -> None:
    engine = receiver()
    assert give(engine, packet(WRITE_FIRST, reth(2000) + bytes(256), ask=False)) == 1
    give(engine, packet(WRITE_MIDDLE, bytes(256), psn=PSN + 3, ask=False))
    assert syndromes(engine) == [(ACK, 0x60)]
    train = b""
    for number in (1, 2):
        part = packet(WRITE_MIDDLE, bytes(256), psn=PSN + number, ask=False)
        train += part + THERE.seal([part], number - 1)
    assert engine.received(memoryview(train), 272, 0.0) == 2
    give(engine, packet(WRITE_MIDDLE, bytes(256), psn=PSN + 4, ask=False))
    assert syndromes(engine) == [(ACK, 0x60)]


def test_read_response_acknowledges_earlier_requests() -> None:
    pair = Pair(timeout=10)
    pair.ends[0].post_send(send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    pair.lost = {2}  # the first response
    pair.run()
    assert pair.sent[2][1][0] == ACK
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert pair.now < 0.01


def test_regions_are_not_held_between_packets() -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(WRITE_FIRST, reth(2000) + bytes(256), ask=False)) == 1
    assert give(engine, packet(WRITE_MIDDLE, bytes(256), psn=PSN + 1)) == 1
    memory.remove(RKEY)
    memory.bytes.append(0)  # raises BufferError while a view of it is left


def test_packet_for_another_qpn_is_ignored() -> None:
    engine = receiver()
    data = bytearray(packet(SEND_ONLY, b"x") + bytes(4))
    data[7] = 0x99
    engine.received(memoryview(data), 0, 0.0)
    assert engine.counters.dropped == {"qpn": 1}


def test_gap_is_reported_despite_duplicates() -> None:
    engine = receiver()
    give(engine, packet(WRITE_ONLY, reth(0)))
    give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + 2))
    give(engine, packet(WRITE_ONLY, reth(0)))
    assert syndromes(engine) == [(ACK, 0x60)]


RAW = st.binary(max_size=400)


@settings(max_examples=MANY_EXAMPLES)
@given(RAW, st.integers(0, 300))
@example(bytes(65507), 1)
@example(bytes(65507), 0)
@example(bytes(20000), 4112)
def test_malformed_packets_are_counted(data: bytes, segment: int) -> None:
    pair = Pair()
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(2000))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    count = -(-len(data) // segment) if segment else bool(data)
    accepted = pair.ends[0].received(memoryview(data), segment, 0.0)
    assert accepted + pair.ends[0].counters.dropped.total() == count


BODIES = st.one_of(st.just(bytes(240)), st.just(reth(600) + bytes(240)), st.binary(max_size=260))


@settings(max_examples=MANY_EXAMPLES)
@given(
    st.lists(st.tuples(st.integers(0, 0x1F), st.integers(-2, 2), st.integers(0, 255), BODIES), max_size=12),
    st.booleans(),
)
def test_arbitrary_trains_do_not_raise(parts: list[tuple[int, int, int, bytes]], ours: bool) -> None:
    pair = Pair(path_mtu=256)
    end = pair.ends[0]
    inbox = view(bytes(700))
    end.post_recv(RecvWork(1, [inbox[:100], inbox[100:600]]))
    answer = view(bytes(2500))
    end.post_send(SendWork(2, WROpcode.RDMA_READ, [answer[:2000]], remote_addr=BASE, rkey=RKEY))
    end.post_send(send(3, b"x"))
    pair.wanted(0)
    train, psn = b"", pair.starts[0 if ours else 1]
    for number, (opcode, ahead, flags, body) in enumerate(parts):
        body = body.ljust(260, b"\0")[:260]
        word = psn + ahead + number & 0xFFFFFF | (flags & 1) << 31
        data = struct.pack("!BBHII", opcode, flags & 0xF0, 0xFFFF, 0x11, word) + body
        train += data + pair.flows[1].seal([data], number)
    end.received(memoryview(train), 276, 0.0)
    pair.wanted(0)
    found: list[WC] = end.completions()
    assert len([c for c in found if c.opcode is WCOpcode.RECV]) <= 1
    assert not any(inbox[600:]), "a receive is not written beyond its buffer"
    assert not any(answer[2000:])
