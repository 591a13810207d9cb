"""RC engines in each queue pair state, and the packets that each state accepts."""

from __future__ import annotations

import struct

import pytest

from rdmacm.enums import AccessFlag, WROpcode
from rdmacm.proto.engine import RtrAttributes, RtsAttributes
from rdmacm.proto.work import RecvWork, SendWork
from support.rc import (
    ACK,
    ALL,
    BASE,
    PEER,
    PSN,
    QPN,
    READ,
    RKEY,
    SEND_ONLY,
    TRAIN,
    WRITE_ONLY,
    Pair,
    Region,
    ack,
    answers,
    connect,
    give,
    make_rc,
    make_shared,
    packet,
    receiver,
    reth,
    send,
    statuses,
    syndromes,
    view,
)
from support.rows import for_each

# -- states -------------------------------------------------------------------------------------------


def test_init_accepts_receives_only() -> None:
    engine = make_rc(QPN, Region())
    connect(engine, 1)
    engine.post_recv(RecvWork(1, [view(bytes(8))]))
    assert give(engine, packet(SEND_ONLY, b"early")) == 0
    assert engine.counters.dropped == {"state": 1}
    assert answers(engine) == []
    assert engine.deadline is None
    with pytest.raises(ValueError, match="not ready to send"):
        engine.post_send(send(1, b"x"))
    with pytest.raises(ValueError, match="ready to receive before"):
        engine.ready_to_send(RtsAttributes(0))
    engine.ready_to_receive(RtrAttributes(PEER, PSN))
    assert give(engine, packet(SEND_ONLY, b"in time")) == 1
    assert statuses(engine.completions()) == [(1, "SUCCESS")]


def test_init_can_be_flushed() -> None:
    engine = make_rc(QPN, Region())
    engine.post_recv(RecvWork(1))
    engine.flush()
    engine.post_recv(RecvWork(2))
    engine.post_send(send(3, b"x"))
    assert statuses(engine.completions()) == [(n, "WR_FLUSH_ERR") for n in (1, 2, 3)]
    assert engine.failed


def test_rtr_serves_requests_and_ignores_responses() -> None:
    memory = Region()
    memory.bytes[:4] = b"data"
    engine = receiver(memory)
    assert give(engine, packet(WRITE_ONLY, reth(4, BASE + 8) + b"more")) == 1
    assert give(engine, packet(READ, reth(4), psn=PSN + 1)) == 1
    assert give(engine, ack(QPN, PSN)) == 0
    assert engine.counters.dropped == {"state": 1}
    first, second = answers(engine)
    assert (first[0], second[0], second[16:]) == (ACK, 0x10, b"data")
    assert memory.bytes[8:12] == b"more"
    engine.ready_to_send(RtsAttributes(5))
    engine.post_send(send(1, b"x"))
    assert len(answers(engine)) == 1
    assert give(engine, ack(QPN, 5)) == 1
    assert statuses(engine.completions()) == [(1, "SUCCESS")]


def test_completions_carry_the_qp_number() -> None:
    pair = Pair()
    pair.ends[1].post_recv(RecvWork(1, [view(bytes(8))]))
    pair.ends[0].post_send(send(2, b"x"))
    pair.run()
    pair.ends[0].post_recv(RecvWork(3))
    pair.ends[0].flush()
    assert [c.qp_num for c in pair.done[1]] == [0x12]
    assert [c.qp_num for c in pair.done[0] + pair.ends[0].completions()] == [0x11, 0x11]


def test_error_state_flushes_in_order_and_sends_nothing() -> None:
    pair = Pair(max_rd_atomic=1)
    end = pair.ends[0]
    for number in range(3):
        end.post_recv(RecvWork(10 + number))
    for number in range(3):
        end.post_send(SendWork(number, WROpcode.RDMA_READ, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    psn = pair.starts[1]
    pair.deliver(0, struct.pack("!BBHII", READ, 0, 0xFFFF, 0x11, psn) + reth(8))
    end.flush()
    assert statuses(end.completions()) == [(n, "WR_FLUSH_ERR") for n in (0, 1, 2, 10, 11, 12)]
    assert pair.wanted(0) == [], "earlier requests get no response either"
    assert end.deadline is None
    assert pair.deliver(0, struct.pack("!BBHII", READ, 0, 0xFFFF, 0x11, psn + 1) + reth(8)) == 0
    assert end.counters.dropped == {"state": 1}
    end.flush()
    end.timer(1.0)
    end.post_send(send(20, b"x"))
    assert statuses(end.completions()) == [(20, "WR_FLUSH_ERR")]


def test_pending_nak_is_sent_after_the_error_state() -> None:
    engine = receiver()
    give(engine, packet(WRITE_ONLY, reth(4, rkey=9) + b"nope"))
    assert engine.failed
    engine.flush()
    assert syndromes(engine) == [(ACK, 0x62)]


def test_receives_come_from_the_shared_receive_queue() -> None:
    queue, taken = make_shared(), [RecvWork(n, [view(bytes(600))]) for n in range(2)]
    assert all(map(queue.post_work, taken))
    engine = make_rc(QPN, Region(), queue)
    connect(engine, 1)
    engine.ready_to_receive(RtrAttributes(PEER, PSN, path_mtu=256, min_rnr_timer=9))
    assert give(engine, packet(SEND_ONLY, b"first")) == 1
    assert bytes(taken[0].segments[0][:5]) == b"first"
    assert give(engine, packet(0x00, bytes(256), psn=PSN + 1)) == 1
    assert give(engine, packet(0x02, b"end", psn=PSN + 2)) == 1
    assert give(engine, packet(SEND_ONLY, b"none left", psn=PSN + 3)) == 0
    assert syndromes(engine) == [(ACK, 0x20 | 9)]
    assert all(map(queue.post_work, [RecvWork(2, [view(bytes(600))]), RecvWork(3)]))
    assert give(engine, packet(0x00, bytes(256), psn=PSN + 3)) == 1
    engine.flush()
    assert statuses(engine.completions()) == [(0, "SUCCESS"), (1, "SUCCESS"), (2, "WR_FLUSH_ERR")]
    assert len(queue) == 1, "unused receives stay in the shared queue"


def test_sqd_finishes_the_message_in_progress() -> None:
    pair = Pair(train=TRAIN)
    end = pair.ends[0]
    end.post_send(send(1, bytes(2000), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    end.post_send(send(2, b"later", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    (datagram,) = end.datagrams(0.0, 3, 0)[:1]
    pair.lost = {2}
    pair.transmit(0, datagram)
    assert not end.drained
    end.pause()
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert end.drained
    end.post_send(send(3, b"queued", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert len(pair.done[0]) == 1
    end.resume()
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in (1, 2, 3)]


def test_sqd_answers_requests() -> None:
    pair = Pair()
    pair.ends[0].pause()
    assert pair.ends[0].drained
    pair.ends[1].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[1]) == [(1, "SUCCESS")]


def test_access_flags_change_in_rts() -> None:
    pair = Pair(access=ALL & ~AccessFlag.REMOTE_WRITE)
    pair.ends[1].set_access(ALL & ~AccessFlag.REMOTE_READ)
    pair.ends[0].post_send(send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "REM_INV_REQ_ERR")]


def test_rnr_timer_changes_in_rts() -> None:
    engine = receiver(min_rnr_timer=1)
    engine.set_min_rnr_timer(20)
    give(engine, packet(SEND_ONLY, b"x"))
    assert syndromes(engine) == [(ACK, 0x20 | 20)]


# -- dropped packets ----------------------------------------------------------------------------------


@for_each(
    ("ours", "theirs", "accepted"),
    [
        (0xFFFF, 0xFFFF, 1),
        (0xFFFF, 0x7FFF, 1),
        (0x7FFF, 0xFFFF, 1),
        (0x7FFF, 0x7FFF, 0),  # two limited members
        (0x8001, 0x8001, 1),
        (0x8001, 0xFFFF, 0),
        (0x8000, 0x8000, 0),  # no partition
        (0x0000, 0x8000, 0),
        (0xFFFF, 0x0000, 0),
    ],
)
def test_pkeys_match_by_partition_and_membership(ours: int, theirs: int, accepted: int) -> None:
    engine = receiver(pkey=ours)
    engine.post_recv(RecvWork(1, [view(bytes(8))]))
    assert give(engine, packet(SEND_ONLY, b"x", pkey=theirs)) == accepted
    assert engine.counters.dropped == ({} if accepted else {"pkey": 1})


@for_each(
    ("place", "value", "reason"),
    [
        (0, 0x24, "opcode"),  # unreliable
        (0, 0x1F, "opcode"),
        (0, 0x1B, "opcode"),
        (0, 0x14, "length"),  # an atomic has more headers
        (1, 0x01, "version"),
        (7, 0x13, "qpn"),
        (2, 0x12, "pkey"),
        (11, 0x00, "sequence"),
    ],
)
def test_invalid_packets_are_counted_by_reason(place: int, value: int, reason: str) -> None:
    engine = receiver()
    data = bytearray(packet(SEND_ONLY, bytes(24)))
    data[place] = value
    if reason == "sequence":
        data[9:12] = b"\0\0\x20"
    assert give(engine, bytes(data)) == 0
    assert engine.counters.dropped == {reason: 1}


def test_congestion_bits_are_ignored() -> None:
    engine = receiver()
    engine.post_recv(RecvWork(1, [view(bytes(8))]))
    data = bytearray(packet(SEND_ONLY, b"x"))
    data[4] = 0xC0
    assert give(engine, bytes(data)) == 1


def test_padding_without_payload_is_dropped() -> None:
    engine = receiver()
    data = bytearray(packet(READ, reth(8)))
    data[1] = 0x30
    assert give(engine, bytes(data)) == 0
    assert engine.counters.dropped == {"length": 1}


@for_each("size", [0, 1, 11, 12, 15])
def test_truncated_packets_are_dropped(size: int) -> None:
    engine = receiver()
    assert engine.received(memoryview(bytes(size)), 0, 0.0) == 0
    assert engine.counters.dropped.total() == (1 if size else 0)


def test_ack_or_nak_of_completed_requests_is_ignored() -> None:
    pair = Pair()
    end = pair.ends[0]
    for number in range(4):
        end.post_send(send(number, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    assert len(pair.wanted(0)) == 4
    pair.deliver(0, ack(0x11, pair.starts[0] + 2))
    assert pair.deliver(0, ack(0x11, pair.starts[0] + 1)) == 0
    assert pair.deliver(0, ack(0x11, pair.starts[0] + 1, 0x60)) == 0
    assert statuses(end.completions()) == [(n, "SUCCESS") for n in range(3)]
    assert pair.wanted(0) == [], "nothing is sent again"
    assert not end.drained
    pair.deliver(0, ack(0x11, pair.starts[0] + 3))
    assert end.drained


def test_reserved_syndromes_are_dropped() -> None:
    pair = Pair()
    pair.ends[0].post_send(send(1, b"x"))
    pair.wanted(0)
    for syndrome in (0x40, 0x5F, 0x64, 0x7F, 0x80, 0xFF):
        assert pair.deliver(0, ack(0x11, pair.starts[0], syndrome)) == 0
    assert pair.ends[0].counters.dropped == {"answer": 6}
    assert not pair.ends[0].failed
