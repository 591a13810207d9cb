"""The engine through the states of a queue pair, its attributes, and every way a work request can end."""

from __future__ import annotations

import random
import struct
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rdmacm.proto.roce.rc import RcEngine, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.work import WC, AccessFlag, RecvWork, SendWork, WCOpcode, WCStatus, WROpcode
from support.rc import ALL, BASE, RKEY, TRAIN, Pair, Region, ack, flows, packets, send, statuses, view

THERE, BACK = flows()
QPN, PEER, PSN = 0x12, 0x11, 0xFFFFFE


def receiver(memory: Region | None = None, **attributes: int) -> RcEngine:
    """An engine in RTR, at the end that :data:`THERE` goes to."""
    engine = RcEngine(QPN, memory or Region())
    engine.ready_to_receive(RtrAttributes(PEER, PSN, path_mtu=256, **attributes))  # type: ignore[arg-type]
    return engine


def packet(opcode: int, body: bytes = b"", *, psn: int = PSN, ask: bool = True, pkey: int = 0xFFFF) -> bytes:
    pad = -len(body) & 3
    word = psn & 0xFFFFFF | ask << 31
    return struct.pack("!BBHII", opcode, pad << 4, pkey, QPN, word) + body + bytes(pad)


def give(engine: RcEngine, data: bytes, now: float = 0.0) -> int:
    return engine.received(memoryview(data + THERE.seal([data])), 0, THERE, now)


def answers(engine: RcEngine, limit: int = 1000) -> list[bytes]:
    return [p[:-4] for d in engine.datagrams(BACK, 0.0, limit, 0) for p in packets(d)]


def syndromes(engine: RcEngine) -> list[tuple[int, int]]:
    """Opcode and AETH syndrome of what an engine answers."""
    return [(p[0], p[12]) for p in answers(engine)]


SEND_ONLY, WRITE_FIRST, WRITE_MIDDLE, WRITE_ONLY, READ, ACK, FETCH_ADD = 0x04, 0x06, 0x07, 0x0A, 0x0C, 0x11, 0x14


def reth(length: int, address: int = BASE, rkey: int = RKEY) -> bytes:
    return struct.pack("!QII", address, rkey, length)


# -- states -------------------------------------------------------------------------------------------


def test_init_takes_receives_and_nothing_else() -> None:
    engine = RcEngine(QPN, Region())
    engine.post_recv(RecvWork(1, [view(bytes(8))]))
    assert give(engine, packet(SEND_ONLY, b"early")) == 0
    assert engine.dropped == {"state": 1}
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
    engine = RcEngine(QPN, Region())
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
    assert engine.dropped == {"state": 1}
    first, second = answers(engine)
    assert (first[0], second[0], second[16:]) == (ACK, 0x10, b"data")
    assert memory.bytes[8:12] == b"more"
    engine.ready_to_send(RtsAttributes(5))
    engine.post_send(send(1, b"x"))
    assert len(answers(engine)) == 1
    assert give(engine, ack(QPN, 5)) == 1
    assert statuses(engine.completions()) == [(1, "SUCCESS")]


def test_completions_say_whose_they_are() -> None:
    pair = Pair()
    pair.ends[1].post_recv(RecvWork(1, [view(bytes(8))]))
    pair.ends[0].post_send(send(2, b"x"))
    pair.run()
    pair.ends[0].post_recv(RecvWork(3))
    pair.ends[0].flush()
    assert [c.qp_num for c in pair.done[1]] == [0x12]
    assert [c.qp_num for c in pair.done[0] + pair.ends[0].completions()] == [0x11, 0x11]


def test_flushed_in_order_and_then_silent() -> None:
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
    assert pair.wanted(0) == [], "not even what was asked before"
    assert end.deadline is None
    assert pair.deliver(0, struct.pack("!BBHII", READ, 0, 0xFFFF, 0x11, psn + 1) + reth(8)) == 0
    assert end.dropped == {"state": 1}
    end.flush()
    end.timer(1.0)
    end.post_send(send(20, b"x"))
    assert statuses(end.completions()) == [(20, "WR_FLUSH_ERR")]


def test_what_refuses_is_still_said_after_a_flush() -> None:
    engine = receiver()
    give(engine, packet(WRITE_ONLY, reth(4, rkey=9) + b"nope"))
    assert engine.failed
    engine.flush()
    assert syndromes(engine) == [(ACK, 0x62)]


def test_a_shared_receive_queue() -> None:
    queue = [RecvWork(n, [view(bytes(600))]) for n in range(2)]
    taken = list(queue)
    engine = RcEngine(QPN, Region(), lambda: queue.pop(0) if queue else None)
    engine.ready_to_receive(RtrAttributes(PEER, PSN, path_mtu=256, min_rnr_timer=9))
    assert give(engine, packet(SEND_ONLY, b"first")) == 1
    assert bytes(taken[0].segments[0][:5]) == b"first"
    assert give(engine, packet(0x00, bytes(256), psn=PSN + 1)) == 1
    assert give(engine, packet(0x02, b"end", psn=PSN + 2)) == 1
    assert give(engine, packet(SEND_ONLY, b"none left", psn=PSN + 3)) == 0
    assert syndromes(engine) == [(ACK, 0x20 | 9)]
    queue += [RecvWork(2, [view(bytes(600))]), RecvWork(3)]
    assert give(engine, packet(0x00, bytes(256), psn=PSN + 3)) == 1
    engine.flush()
    assert statuses(engine.completions()) == [(0, "SUCCESS"), (1, "SUCCESS"), (2, "WR_FLUSH_ERR")]
    assert [work.wr_id for work in queue] == [3], "what nobody took is left to the others"


def test_sqd_finishes_the_message_in_progress() -> None:
    pair = Pair(train=TRAIN)
    end = pair.ends[0]
    end.post_send(send(1, bytes(2000), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    end.post_send(send(2, b"later", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    (datagram,) = end.datagrams(pair.flows[0], 0.0, 3, 0)[:1]
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


def test_sqd_serves_the_peer() -> None:
    pair = Pair()
    pair.ends[0].pause()
    assert pair.ends[0].drained
    pair.ends[1].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[1]) == [(1, "SUCCESS")]


def test_access_changes_while_it_runs() -> None:
    pair = Pair(access=ALL & ~AccessFlag.REMOTE_WRITE)
    pair.ends[1].set_access(ALL & ~AccessFlag.REMOTE_READ)
    pair.ends[0].post_send(send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "REM_INV_REQ_ERR")]


def test_the_rnr_timer_changes_while_it_runs() -> None:
    engine = receiver(min_rnr_timer=1)
    engine.set_min_rnr_timer(20)
    give(engine, packet(SEND_ONLY, b"x"))
    assert syndromes(engine) == [(ACK, 0x20 | 20)]


# -- what is not for us -------------------------------------------------------------------------------


@pytest.mark.parametrize(
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
def test_partitions(ours: int, theirs: int, accepted: int) -> None:
    engine = receiver(pkey=ours)
    engine.post_recv(RecvWork(1, [view(bytes(8))]))
    assert give(engine, packet(SEND_ONLY, b"x", pkey=theirs)) == accepted
    assert engine.dropped == ({} if accepted else {"pkey": 1})


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, 0x24, "opcode"),  # unreliable
        (0, 0x1F, "opcode"),
        (0, 0x1C, "opcode"),  # FLUSH
        (0, 0x14, "length"),  # an atomic has more headers
        (1, 0x01, "version"),
        (7, 0x13, "qpn"),
        (2, 0x12, "pkey"),
        (11, 0x00, "sequence"),
    ],
)
def test_why_a_packet_is_dropped(place: int, value: int, reason: str) -> None:
    engine = receiver()
    data = bytearray(packet(SEND_ONLY, bytes(24)))
    data[place] = value
    if reason == "sequence":
        data[9:12] = b"\0\0\x20"
    assert give(engine, bytes(data)) == 0
    assert engine.dropped == {reason: 1}


def test_congestion_bits_do_not_matter() -> None:
    engine = receiver()
    engine.post_recv(RecvWork(1, [view(bytes(8))]))
    data = bytearray(packet(SEND_ONLY, b"x"))
    data[4] = 0xC0
    assert give(engine, bytes(data)) == 1


def test_padding_is_not_part_of_the_headers() -> None:
    engine = receiver()
    data = bytearray(packet(READ, reth(8)))
    data[1] = 0x30
    assert give(engine, bytes(data)) == 0
    assert engine.dropped == {"length": 1}


@pytest.mark.parametrize("size", [0, 1, 11, 12, 15])
def test_a_packet_that_is_none(size: int) -> None:
    engine = receiver()
    assert engine.received(memoryview(bytes(size)), 0, THERE, 0.0) == 0
    assert engine.dropped.total() == (1 if size else 0)


def test_a_late_acknowledgement_takes_nothing_back() -> None:
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


def test_answers_of_a_reserved_kind() -> None:
    pair = Pair()
    pair.ends[0].post_send(send(1, b"x"))
    pair.wanted(0)
    for syndrome in (0x40, 0x5F, 0x64, 0x7F, 0x80, 0xFF):
        assert pair.deliver(0, ack(0x11, pair.starts[0], syndrome)) == 0
    assert pair.ends[0].dropped == {"answer": 6}
    assert not pair.ends[0].failed


# -- how work ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("syndrome", "status"),
    [
        (0x61, WCStatus.REM_INV_REQ_ERR),
        (0x62, WCStatus.REM_ACCESS_ERR),
        (0x63, WCStatus.REM_OP_ERR),
    ],
)
def test_a_nak_ends_the_request_it_names(syndrome: int, status: WCStatus) -> None:
    pair = Pair()
    for number in range(3):
        pair.ends[0].post_send(send(number, b"x"))
    pair.wanted(0)
    pair.deliver(0, ack(0x11, pair.starts[0] + 1, syndrome))
    assert statuses(pair.ends[0].completions()) == [(0, "SUCCESS"), (1, status.name), (2, "WR_FLUSH_ERR")]
    assert pair.wanted(0) == []
    assert pair.ends[0].deadline is None


@pytest.mark.parametrize(
    ("opcode", "size"), [(0x0D, 255), (0x0D, 260), (0x0D, 0), (0x0F, 256), (0x10, 256), (0x10, 255), (0x0E, 252)]
)
def test_a_bad_beginning_of_an_answer(opcode: int, size: int) -> None:
    pair = Pair()
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    header = struct.pack("!BBHII", opcode, (-size & 3) << 4, 0xFFFF, 0x11, pair.starts[0])
    aeth = b"" if opcode == 0x0E else bytes(4)
    pair.deliver(0, header + aeth + bytes(size + (-size & 3)))
    assert statuses(pair.ends[0].completions()) == [(1, "BAD_RESP_ERR")]


def test_an_answer_to_what_needs_none() -> None:
    pair = Pair()
    pair.ends[0].post_send(send(1, b"x" * 8, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    for opcode, body in [(0x10, bytes(12)), (0x12, bytes(12))]:
        data = struct.pack("!BBHII", opcode, 0, 0xFFFF, 0x11, pair.starts[0]) + body
        assert pair.deliver(0, data) == 0
    assert pair.ends[0].dropped == {"answer": 2}
    assert not pair.ends[0].failed


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ((255,), "f"),
        ((257,), "f"),
        ((257,), "o"),
        ((256, 255), "fm"),
        ((256, 260), "fm"),
        ((256, 0), "fl"),
        ((256, 257), "fl"),
        ((256,), "l"),
        ((256,), "m"),
        ((256, 256), "ff"),
        ((256, 10), "fo"),
        ((256, 256), "fM"),  # of the other operation
    ],
)
def test_messages_cut_wrong(sizes: tuple[int, ...], kinds: str, write: bool) -> None:
    engine = receiver()
    engine.post_recv(RecvWork(1, [view(bytes(2000))]))
    opcodes = {"f": 0, "m": 1, "l": 2, "o": 4} | {"M": 1 if write else 7}
    for number, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        opcode = opcodes[kind] + (6 if write and kind != "M" else 0)
        head = reth(max(sum(sizes), 257)) if write and kind in "fo" else b""
        accepted = give(engine, packet(opcode, head + bytes(size), psn=PSN + number))
        assert accepted == (number < len(sizes) - 1)
    assert syndromes(engine)[-1] == (ACK, 0x61)
    (found,) = engine.completions()
    begun = not write and "f" in kinds[:-1]
    assert found.status is (WCStatus.REM_INV_REQ_ERR if begun else WCStatus.WR_FLUSH_ERR)


def test_a_train_that_has_no_last_packet() -> None:
    engine = receiver()
    assert give(engine, packet(WRITE_FIRST, reth(768) + bytes(256), ask=False)) == 1
    train = b""
    for number in (1, 2):
        part = packet(WRITE_MIDDLE, b"b" * 256, psn=PSN + number, ask=False)
        train += part + THERE.seal([part], number - 1)
    assert engine.received(memoryview(train), 272, THERE, 0.0) == 1
    assert syndromes(engine) == [(ACK, 0x61)]


def test_an_answer_that_has_no_last_packet() -> None:
    pair = Pair()
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(768))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    psn = pair.starts[0]
    pair.deliver(0, struct.pack("!BBHIII", 0x0D, 0, 0xFFFF, 0x11, psn, 0x1F000001) + bytes(256))
    train = b""
    for number in (1, 2):
        part = struct.pack("!BBHII", 0x0E, 0, 0xFFFF, 0x11, psn + number & 0xFFFFFF) + bytes(256)
        train += part + pair.flows[1].seal([part], number - 1)
    pair.ends[0].received(memoryview(train), 272, pair.flows[1], 0.0)
    assert statuses(pair.ends[0].completions()) == [(1, "BAD_RESP_ERR")]


@pytest.mark.parametrize("size", [100, 300, 513])
def test_a_write_of_another_length_than_it_said(size: int) -> None:
    engine = receiver()
    assert give(engine, packet(WRITE_FIRST, reth(size) + bytes(256), ask=False)) == (size > 256)
    if size > 256:
        assert give(engine, packet(0x08, bytes(43), psn=PSN + 1)) == 0
    assert syndromes(engine) == [(ACK, 0x61)]


def test_a_message_longer_than_its_receive() -> None:
    pair = Pair()
    pair.ends[1].post_recv(RecvWork(1, [view(bytes(300))]))
    pair.ends[1].post_recv(RecvWork(2))
    pair.ends[0].post_send(send(3, bytes(301)))
    pair.run()
    assert statuses(pair.done[1]) == [(1, "LOC_LEN_ERR"), (2, "WR_FLUSH_ERR")]
    assert statuses(pair.done[0]) == [(3, "REM_INV_REQ_ERR")]


def released(size: int) -> memoryview:
    buffer = view(bytes(size))
    buffer.release()
    return buffer


@pytest.mark.parametrize("buffer", [released(1000), memoryview(bytes(1000))])
@pytest.mark.parametrize("size", [10, 1000])
def test_a_receive_that_may_not_be_written(buffer: memoryview, size: int) -> None:
    pair = Pair(train=TRAIN)
    pair.ends[1].post_recv(RecvWork(1, [buffer]))
    pair.ends[0].post_send(send(2, bytes(size)))
    pair.run()
    assert statuses(pair.done[1]) == [(1, "LOC_QP_OP_ERR")]
    assert statuses(pair.done[0]) == [(2, "REM_OP_ERR")]


def test_a_send_that_may_not_be_read() -> None:
    pair = Pair(train=TRAIN)
    pair.ends[0].post_send(send(1, bytes(700), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_WRITE, [released(10)], remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(send(3, b"x"))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "LOC_PROT_ERR"), (3, "WR_FLUSH_ERR")]


@pytest.mark.parametrize("kind", ["read", "atomic"])
def test_an_answer_that_may_not_be_written(kind: str) -> None:
    pair = Pair(train=TRAIN)
    opcode = WROpcode.RDMA_READ if kind == "read" else WROpcode.ATOMIC_FETCH_AND_ADD
    pair.ends[0].post_send(SendWork(1, opcode, [memoryview(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "LOC_PROT_ERR")]


@pytest.mark.parametrize(
    "buffers",
    [
        [memoryview(bytes(3000))],
        [view(bytes(300)), memoryview(bytes(2700))],
        [view(bytes(512)), memoryview(bytes(2488))],
    ],
)
def test_a_long_answer_that_may_not_be_written(buffers: list[memoryview]) -> None:
    pair = Pair(train=TRAIN)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, buffers, remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "LOC_PROT_ERR")]


@pytest.mark.parametrize(
    ("opcode", "ours", "theirs"),
    [
        (WROpcode.RDMA_READ, [(1, "LOC_PROT_ERR")], []),
        (WROpcode.SEND, [(1, "REM_OP_ERR")], [(2, "LOC_QP_OP_ERR")]),
        (WROpcode.RDMA_WRITE, [(1, "LOC_PROT_ERR")], [(2, "WR_FLUSH_ERR")]),
    ],
)
def test_a_buffer_that_is_released_under_way(
    opcode: WROpcode, ours: list[tuple[int, str]], theirs: list[tuple[int, str]]
) -> None:
    pair = Pair()
    local, inbox = view(bytes(3000)), view(bytes(3000))
    if theirs:
        pair.ends[1].post_recv(RecvWork(2, [inbox]))
    pair.ends[0].post_send(SendWork(1, opcode, [local], remote_addr=BASE, rkey=RKEY))
    sender = 0
    if opcode is WROpcode.RDMA_READ:
        sender = 1
        pair.deliver(1, pair.wanted(0)[0])
    for data in pair.wanted(sender, 3):
        pair.deliver(1 - sender, data)
    (inbox if opcode is WROpcode.SEND else local).release()
    pair.train = TRAIN
    pair.run()
    if opcode is WROpcode.RDMA_WRITE:
        pair.ends[1].flush()  # it hears no more of this
        pair.run()
    assert statuses(pair.done[0]) == ours
    assert statuses(pair.done[1]) == theirs


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD])
def test_a_read_with_a_peer_that_takes_none(opcode: WROpcode) -> None:
    pair = Pair(max_rd_atomic=0)
    pair.ends[0].post_send(send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, opcode, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "LOC_QP_OP_ERR")]
    pair = Pair(max_dest_rd_atomic=0)
    pair.ends[0].post_send(SendWork(2, opcode, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(2, "REM_INV_REQ_ERR")]


@pytest.mark.parametrize("opcode", [WROpcode.LOCAL_INV, WROpcode.BIND_MW, WROpcode.TSO, WROpcode.FLUSH])
def test_what_cannot_be_sent(opcode: WROpcode) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        Pair().ends[0].post_send(SendWork(1, opcode))


def test_more_reads_than_were_agreed_are_refused() -> None:
    engine = receiver(max_dest_rd_atomic=2)
    for number in range(3):
        give(engine, packet(READ, reth(8), psn=PSN + number))
    assert syndromes(engine) == [(0x10, 0x1F), (0x10, 0x1F), (ACK, 0x61)]


def test_memory_that_is_deregistered_during_a_write() -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(WRITE_FIRST, reth(768) + b"a" * 256)) == 1
    memory.keys.clear()
    train = b""
    for number in (1, 2):
        part = packet(WRITE_MIDDLE, b"b" * 256, psn=PSN + number, ask=False)
        train += part + THERE.seal([part], number - 1)
    assert engine.received(memoryview(train), 272, THERE, 0.0) == 0
    assert memory.bytes[:257] == b"a" * 256 + b"\0"
    assert syndromes(engine) == [(ACK, 0x62)]


def test_memory_that_is_deregistered_during_a_read() -> None:
    memory = Region()
    engine = receiver(memory)
    give(engine, packet(READ, reth(2000)))
    assert len(answers(engine, 3)) == 3
    memory.keys.clear()
    (nak,) = answers(engine)
    assert (nak[0], nak[12], nak[9:12]) == (ACK, 0x62, (PSN + 3 & 0xFFFFFF).to_bytes(3, "big"))
    assert engine.failed


# -- hostile ------------------------------------------------------------------------------------------


def test_what_is_still_to_be_answered_is_bounded() -> None:
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
            give(engine, packet(SEND_ONLY, b"nobody waits", psn=psn))
    assert int.from_bytes(memory.bytes[:8], sys.byteorder) == 4
    assert len(answers(engine, 10_000)) <= 20


@pytest.mark.parametrize(
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
def test_what_may_be_asked_again(opcode: int, ahead: int, body: bytes, count: int) -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(READ, reth(600))) == 1
    assert give(engine, packet(FETCH_ADD, struct.pack("!QIQQ", BASE, RKEY, 1, 0), psn=PSN + 3)) == 1
    first = answers(engine)
    assert give(engine, packet(opcode, body, psn=PSN + ahead)) == 0
    again = answers(engine)
    assert len(again) == count
    if count == 3:
        assert again[1] == first[1], "a middle packet, that has no message sequence number"
    assert not engine.failed
    assert memory.bytes[:8] == (1).to_bytes(8, sys.byteorder)


def test_impatient_repetitions_take_each_others_place() -> None:
    engine = receiver()
    give(engine, packet(READ, reth(600)))
    assert len(answers(engine)) == 3
    for _ in range(3):
        give(engine, packet(READ, reth(600)))
        assert len(answers(engine, 1)) == 1
    assert [p[0] for p in answers(engine)] == [0x0E, 0x0F]


def test_one_wait_for_a_receive_at_a_time() -> None:
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


def test_every_gap_is_reported_once() -> None:
    engine = receiver()
    for first, second in [(0, 2), (1, 4)]:
        assert give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + first, ask=False)) == 1
        for late in (second, second + 1):
            give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + late))
        (nak,) = answers(engine)
        assert (nak[12], nak[9:12]) == (0x60, (PSN + first + 1 & 0xFFFFFF).to_bytes(3, "big"))
        give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + second))
        assert answers(engine) == []


def test_a_gap_is_reported_after_one_that_a_train_has_filled() -> None:
    engine = receiver()
    assert give(engine, packet(WRITE_FIRST, reth(2000) + bytes(256), ask=False)) == 1
    give(engine, packet(WRITE_MIDDLE, bytes(256), psn=PSN + 3, ask=False))
    assert syndromes(engine) == [(ACK, 0x60)]
    train = b""
    for number in (1, 2):
        part = packet(WRITE_MIDDLE, bytes(256), psn=PSN + number, ask=False)
        train += part + THERE.seal([part], number - 1)
    assert engine.received(memoryview(train), 272, THERE, 0.0) == 2
    give(engine, packet(WRITE_MIDDLE, bytes(256), psn=PSN + 4, ask=False))
    assert syndromes(engine) == [(ACK, 0x60)]


def test_a_read_that_is_answered_acknowledges_what_was_before_it() -> None:
    pair = Pair(timeout=10)
    pair.ends[0].post_send(send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    pair.lost = {2}  # the first answer
    pair.run()
    assert pair.sent[2][1][0] == ACK
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert pair.now < 0.01


def test_memory_is_not_held_on_to_between_packets() -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(WRITE_FIRST, reth(2000) + bytes(256), ask=False)) == 1
    assert give(engine, packet(WRITE_MIDDLE, bytes(256), psn=PSN + 1)) == 1
    memory.bytes.append(0)  # BufferError where there is still a view of it


def test_a_packet_for_somebody_else_is_not_looked_into() -> None:
    engine = receiver()
    data = bytearray(packet(SEND_ONLY, b"x") + bytes(4))
    data[7] = 0x99
    engine.received(memoryview(data), 0, THERE, 0.0)
    assert engine.dropped == {"qpn": 1}


def test_a_gap_is_reported_though_old_packets_come_again() -> None:
    engine = receiver()
    give(engine, packet(WRITE_ONLY, reth(0)))
    give(engine, packet(WRITE_ONLY, reth(0), psn=PSN + 2))
    give(engine, packet(WRITE_ONLY, reth(0)))
    assert syndromes(engine) == [(ACK, 0x60)]


RAW = st.binary(max_size=400)


@settings(max_examples=300, deadline=None)
@given(RAW, st.integers(0, 300))
@example(bytes(65507), 1)
@example(bytes(65507), 0)
@example(bytes(20000), 4112)
def test_garbage_is_counted(data: bytes, segment: int) -> None:
    pair = Pair()
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(2000))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    count = -(-len(data) // segment) if segment else bool(data)
    accepted = pair.ends[0].received(memoryview(data), segment, pair.flows[1], 0.0)
    assert accepted + pair.ends[0].dropped.total() == count


BODIES = st.one_of(st.just(bytes(240)), st.just(reth(600) + bytes(240)), st.binary(max_size=260))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 0x1F), st.integers(-2, 2), st.integers(0, 255), BODIES), max_size=12),
    st.booleans(),
)
def test_trains_of_anything_do_no_harm(parts: list[tuple[int, int, int, bytes]], ours: bool) -> None:
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
    end.received(memoryview(train), 276, pair.flows[1], 0.0)
    pair.wanted(0)
    found: list[WC] = end.completions()
    assert len([c for c in found if c.opcode is WCOpcode.RECV]) <= 1
    assert not any(inbox[600:]), "a receive is not written beyond its buffer"
    assert not any(answer[2000:])
