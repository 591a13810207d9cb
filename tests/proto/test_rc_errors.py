"""The error statuses of work requests on a reliable connection."""

from __future__ import annotations

import struct

import pytest

from rdmacm.enums import WCStatus, WROpcode
from rdmacm.proto.work import RecvWork, SendWork
from support.rc import (
    ACK,
    BASE,
    PSN,
    READ,
    RKEY,
    THERE,
    TRAIN,
    WRITE_FIRST,
    WRITE_MIDDLE,
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


@pytest.mark.parametrize(
    ("syndrome", "status"),
    [
        (0x61, WCStatus.REM_INV_REQ_ERR),
        (0x62, WCStatus.REM_ACCESS_ERR),
        (0x63, WCStatus.REM_OP_ERR),
    ],
)
def test_nak_fails_the_work_request_of_its_psn(syndrome: int, status: WCStatus) -> None:
    pair = Pair()
    for number in range(3):
        pair.ends[0].post_send(send(number, b"x"))
    pair.wanted(0)
    pair.deliver(0, ack(0x11, pair.starts[0] + 1, syndrome))
    assert statuses(pair.ends[0].completions()) == [(0, "SUCCESS"), (1, status.name), (2, "WR_FLUSH_ERR")]
    assert pair.wanted(0) == []
    assert pair.ends[0].deadline is None


@for_each(("opcode", "size"), [(0x0D, 255), (0x0D, 260), (0x0D, 0), (0x0F, 256), (0x10, 256), (0x10, 255), (0x0E, 252)])
def test_invalid_first_response_packet_fails_the_read(opcode: int, size: int) -> None:
    pair = Pair()
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    header = struct.pack("!BBHII", opcode, (-size & 3) << 4, 0xFFFF, 0x11, pair.starts[0])
    aeth = b"" if opcode == 0x0E else bytes(4)
    pair.deliver(0, header + aeth + bytes(size + (-size & 3)))
    assert statuses(pair.ends[0].completions()) == [(1, "BAD_RESP_ERR")]


def test_read_or_atomic_response_to_a_write_is_dropped() -> None:
    pair = Pair()
    pair.ends[0].post_send(send(1, b"x" * 8, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    for opcode, body in [(0x10, bytes(12)), (0x12, bytes(12))]:
        data = struct.pack("!BBHII", opcode, 0, 0xFFFF, 0x11, pair.starts[0]) + body
        assert pair.deliver(0, data) == 0
    assert pair.ends[0].counters.dropped == {"answer": 2}
    assert not pair.ends[0].failed


@for_each("write", [False, True])
@for_each(
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
def test_wrong_packet_length_or_order_is_answered_with_nak(sizes: tuple[int, ...], kinds: str, write: bool) -> None:
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


def test_middle_packet_in_place_of_the_last_is_answered_with_nak() -> None:
    engine = receiver()
    assert give(engine, packet(WRITE_FIRST, reth(768) + bytes(256), ask=False)) == 1
    train = b""
    for number in (1, 2):
        part = packet(WRITE_MIDDLE, b"b" * 256, psn=PSN + number, ask=False)
        train += part + THERE.seal([part], number - 1)
    assert engine.received(memoryview(train), 272, 0.0) == 1
    assert syndromes(engine) == [(ACK, 0x61)]


def test_middle_packet_in_place_of_the_last_fails_the_read() -> None:
    pair = Pair()
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(768))], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    psn = pair.starts[0]
    pair.deliver(0, struct.pack("!BBHIII", 0x0D, 0, 0xFFFF, 0x11, psn, 0x1F000001) + bytes(256))
    train = b""
    for number in (1, 2):
        part = struct.pack("!BBHII", 0x0E, 0, 0xFFFF, 0x11, psn + number & 0xFFFFFF) + bytes(256)
        train += part + pair.flows[1].seal([part], number - 1)
    pair.ends[0].received(memoryview(train), 272, 0.0)
    assert statuses(pair.ends[0].completions()) == [(1, "BAD_RESP_ERR")]


@pytest.mark.parametrize("size", [100, 300, 513])
def test_write_length_must_match_the_reth(size: int) -> None:
    engine = receiver()
    assert give(engine, packet(WRITE_FIRST, reth(size) + bytes(256), ask=False)) == (size > 256)
    if size > 256:
        assert give(engine, packet(0x08, bytes(43), psn=PSN + 1)) == 0
    assert syndromes(engine) == [(ACK, 0x61)]


def test_message_longer_than_its_receive_fails_both_ends() -> None:
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
def test_unwritable_receive_buffer_fails_both_ends(buffer: memoryview, size: int) -> None:
    pair = Pair(train=TRAIN)
    pair.ends[1].post_recv(RecvWork(1, [buffer]))
    pair.ends[0].post_send(send(2, bytes(size)))
    pair.run()
    assert statuses(pair.done[1]) == [(1, "LOC_QP_OP_ERR")]
    assert statuses(pair.done[0]) == [(2, "REM_OP_ERR")]


def test_send_from_a_deregistered_region_fails() -> None:
    pair = Pair(train=TRAIN)
    pair.ends[0].post_send(send(1, bytes(700), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_WRITE, [released(10)], remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(send(3, b"x"))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "LOC_PROT_ERR"), (3, "WR_FLUSH_ERR")]


@pytest.mark.parametrize("kind", ["read", "atomic"])
def test_read_or_atomic_into_an_unwritable_buffer_fails(kind: str) -> None:
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
def test_long_read_into_an_unwritable_buffer_fails(buffers: list[memoryview]) -> None:
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
def test_buffer_released_during_a_transfer_fails_the_request(
    opcode: WROpcode, ours: list[tuple[int, str]], theirs: list[tuple[int, str]], rc_engine: str
) -> None:
    if rc_engine == "c":
        pytest.skip("the compiled core holds the buffers that are in use")
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
        pair.ends[1].flush()  # the responder gets no further packet
        pair.run()
    assert statuses(pair.done[0]) == ours
    assert statuses(pair.done[1]) == theirs


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD])
def test_reads_need_rd_atomic_resources_on_both_ends(opcode: WROpcode) -> None:
    pair = Pair(max_rd_atomic=0)
    pair.ends[0].post_send(send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, opcode, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "LOC_QP_OP_ERR")]
    pair = Pair(max_dest_rd_atomic=0)
    pair.ends[0].post_send(SendWork(2, opcode, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(2, "REM_INV_REQ_ERR")]


@pytest.mark.parametrize("opcode", [WROpcode.TSO])
def test_unsupported_opcodes_raise_value_error(opcode: WROpcode) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        Pair().ends[0].post_send(SendWork(1, opcode))


def test_reads_beyond_max_dest_rd_atomic_are_refused() -> None:
    engine = receiver(max_dest_rd_atomic=2)
    for number in range(3):
        give(engine, packet(READ, reth(8), psn=PSN + number))
    assert syndromes(engine) == [(0x10, 0x1F), (0x10, 0x1F), (ACK, 0x61)]


def test_duplicate_read_of_a_key_that_was_revoked_is_dropped() -> None:
    """It may be a late copy of a READ that is complete, and whose key the peer has given up."""
    memory = Region()
    engine = receiver(memory)
    request = packet(READ, reth(8))
    assert give(engine, request) == 1
    assert syndromes(engine) == [(0x10, 0x1F)]
    memory.remove(RKEY)
    give(engine, request)
    assert syndromes(engine) == []
    assert not engine.failed
    memory.add(RKEY)
    give(engine, request)
    assert syndromes(engine) == [(0x10, 0x1F)]


def test_deregistration_during_a_write_is_answered_with_nak() -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(WRITE_FIRST, reth(768) + b"a" * 256)) == 1
    memory.remove(RKEY)
    train = b""
    for number in (1, 2):
        part = packet(WRITE_MIDDLE, b"b" * 256, psn=PSN + number, ask=False)
        train += part + THERE.seal([part], number - 1)
    assert engine.received(memoryview(train), 272, 0.0) == 0
    assert memory.bytes[:257] == b"a" * 256 + b"\0"
    assert syndromes(engine) == [(ACK, 0x62)]


def test_deregistration_during_a_read_is_answered_with_nak() -> None:
    memory = Region()
    engine = receiver(memory)
    give(engine, packet(READ, reth(2000)))
    assert len(answers(engine, 3)) == 3
    memory.remove(RKEY)
    (nak,) = answers(engine)
    assert (nak[0], nak[12], nak[9:12]) == (ACK, 0x62, (PSN + 3 & 0xFFFFFF).to_bytes(3, "big"))
    assert engine.failed
