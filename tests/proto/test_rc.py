"""Reliable connections between two RC engines, on a simulated network and in virtual time."""

from __future__ import annotations

import random
import struct
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacm.enums import AccessFlag, WCOpcode, WCStatus, WROpcode
from rdmacm.proto.work import RecvWork, SendWork
from support.examples import MANY_EXAMPLES
from support.rc import ALL, BASE, RKEY, TRAIN, Pair, ack, send, statuses, view
from support.roce_packets import RocePacket
from support.rows import for_each


@for_each("size", [0, 1, 3, 255, 256, 257, 1024, 5000])
def test_every_operation_transfers_any_size(size: int, rc_engine: str) -> None:
    # Where the compiled core is, a peer invalidates keys of windows alone (test_differential.py).
    invalidate = WROpcode.SEND_WITH_INV if rc_engine == "python" else WROpcode.SEND
    pair = Pair()
    a, b = pair.ends
    payload = bytes(random.Random(size).randbytes(size))
    pair.memory[1].bytes[8192 : 8192 + size] = payload[::-1]
    inbox = [bytearray(size + 3) for _ in range(5)]
    for number, buffer in enumerate(inbox):
        b.post_recv(RecvWork(100 + number, [view(buffer)]))
    answer = bytearray(size)
    a.post_send(send(1, payload))
    a.post_send(send(2, payload, WROpcode.SEND_WITH_IMM, imm=0xDEADBEEF, solicited=True))
    a.post_send(send(3, payload, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    a.post_send(send(4, payload, WROpcode.RDMA_WRITE_WITH_IMM, remote_addr=BASE + 16384, rkey=RKEY, imm=7))
    a.post_send(SendWork(5, WROpcode.RDMA_READ, [view(answer)] if size else [], remote_addr=BASE + 8192, rkey=RKEY))
    a.post_send(send(6, payload, invalidate, invalidate_rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in range(1, 7)]
    assert [c.opcode for c in pair.done[0]] == [0, 0, 1, 1, 2, 0]
    assert statuses(pair.done[1]) == [(n, "SUCCESS") for n in range(100, 104)]
    first, second, third, fourth = pair.done[1]
    assert (first.byte_len, first.imm_data, first.solicited) == (size, None, False)
    assert (second.byte_len, second.imm_data, second.solicited) == (size, 0xDEADBEEF, True)
    assert (third.opcode, third.byte_len, third.imm_data) == (WCOpcode.RECV_RDMA_WITH_IMM, size, 7)
    assert [bytes(inbox[n][:size]) for n in (0, 1, 3)] == [payload] * 3
    assert bytes(inbox[2]) == bytes(size + 3), "an RDMA WRITE with immediate consumes a receive, but not its buffer"
    assert bytes(pair.memory[1].bytes[:size]) == payload
    assert bytes(pair.memory[1].bytes[16384 : 16384 + size]) == payload
    assert bytes(answer) == payload[::-1]
    if rc_engine == "python":
        assert fourth.invalidated_rkey == RKEY
        assert not pair.memory[1].keys, "SEND with invalidate revoked the key"


def test_messages_are_gathered_and_scattered() -> None:
    pair = Pair()
    pieces = [b"a" * 100, b"", b"b" * 300, b"c" * 5]
    inbox = [bytearray(1), bytearray(399), bytearray(50)]
    pair.ends[1].post_recv(RecvWork(1, [view(piece) for piece in inbox]))
    pair.ends[0].post_send(SendWork(2, WROpcode.SEND, [view(piece) for piece in pieces]))
    pair.run()
    assert b"".join(inbox)[:405] == b"".join(pieces)
    assert pair.done[1][0].byte_len == 405


def test_atomics_return_the_previous_value() -> None:
    pair = Pair()
    word = memoryview(pair.memory[1].bytes)[64:72]
    word[:] = (40).to_bytes(8, sys.byteorder)
    found = [bytearray(8) for _ in range(4)]
    operations = [
        (WROpcode.ATOMIC_FETCH_AND_ADD, 2, 0),
        (WROpcode.ATOMIC_CMP_AND_SWP, 42, 7),
        (WROpcode.ATOMIC_CMP_AND_SWP, 42, 9),
        (WROpcode.ATOMIC_FETCH_AND_ADD, 0xFFFFFFFFFFFFFFFF, 0),
    ]
    for number, (opcode, compare_add, swap) in enumerate(operations):
        pair.ends[0].post_send(
            SendWork(
                number,
                opcode,
                [view(found[number])],
                remote_addr=BASE + 64,
                rkey=RKEY,
                compare_add=compare_add,
                swap=swap,
            )
        )
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in range(4)]
    assert [int.from_bytes(each, sys.byteorder) for each in found] == [40, 42, 7, 7]
    assert int.from_bytes(word, sys.byteorder) == 6


def test_signaled_sends_complete_in_order() -> None:
    pair = Pair()
    for number in range(20):
        pair.ends[1].post_recv(RecvWork(number, [view(bytes(64))]))
        pair.ends[0].post_send(send(number, b"x" * 10, signaled=number % 5 == 4))
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in (4, 9, 14, 19)]
    assert statuses(pair.done[1]) == [(n, "SUCCESS") for n in range(20)]


def test_fence_waits_for_outstanding_reads() -> None:
    pair = Pair()
    answer = bytearray(5000)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(answer)], remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(send(2, b"after", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY, fence=True))
    (first,) = pair.ends[0].datagrams(0.0, 1000, 0)  # the write is held back
    pair.transmit(0, first)
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS")]


def test_outstanding_reads_are_limited() -> None:
    pair = Pair(max_rd_atomic=2)
    answers = [bytearray(10) for _ in range(6)]
    for number, answer in enumerate(answers):
        pair.ends[0].post_send(SendWork(number, WROpcode.RDMA_READ, [view(answer)], remote_addr=BASE, rkey=RKEY))
    assert len(pair.wanted(0)) == 2


@for_each(
    ("work", "status"),
    [
        (send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY + 1), WCStatus.REM_ACCESS_ERR),
        (send(1, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE - 1, rkey=RKEY), WCStatus.REM_ACCESS_ERR),
        (send(1, b"x" * 600, WROpcode.RDMA_WRITE, remote_addr=BASE + 65000, rkey=RKEY), WCStatus.REM_ACCESS_ERR),
        (send(1, b"x" * 8, WROpcode.RDMA_READ, remote_addr=BASE + 65530, rkey=RKEY), WCStatus.REM_ACCESS_ERR),
        (send(1, b"x" * 8, WROpcode.ATOMIC_FETCH_AND_ADD, remote_addr=BASE + 4, rkey=RKEY), WCStatus.REM_INV_REQ_ERR),
        (send(1, b"x" * 8, WROpcode.ATOMIC_CMP_AND_SWP, remote_addr=BASE, rkey=9), WCStatus.REM_ACCESS_ERR),
        (send(1, b"x" * 100), WCStatus.REM_INV_REQ_ERR),
        (send(1, b"x", WROpcode.SEND_WITH_INV, invalidate_rkey=77), WCStatus.REM_ACCESS_ERR),
    ],
)
def test_refused_requests_change_no_memory_and_end_the_connection(work: SendWork, status: WCStatus) -> None:
    pair = Pair()
    before = bytes(pair.memory[1].bytes)
    for number in range(3):
        pair.ends[1].post_recv(RecvWork(100 + number, [view(bytes(50))]))
    pair.ends[0].post_send(work)
    pair.ends[0].post_send(send(2, b"later"))
    pair.ends[0].post_recv(RecvWork(3, [view(bytes(50))]))
    pair.run()
    assert bytes(pair.memory[1].bytes) == before
    assert statuses(pair.done[0]) == [(1, status.name), (2, "WR_FLUSH_ERR"), (3, "WR_FLUSH_ERR")]
    assert sorted(c.wr_id for c in pair.done[1]) == [100, 101, 102]
    assert all(c.status is not WCStatus.SUCCESS for c in pair.done[1])
    pair.ends[0].post_send(send(4, b"too late"))
    pair.ends[1].post_recv(RecvWork(5, []))
    pair.run()
    assert statuses(pair.done[0])[3:] == [(4, "WR_FLUSH_ERR")]
    assert statuses(pair.done[1])[3:] == [(5, "WR_FLUSH_ERR")]


@pytest.mark.parametrize("missing", [AccessFlag.REMOTE_WRITE, AccessFlag.REMOTE_READ, AccessFlag.REMOTE_ATOMIC])
def test_access_flags_of_the_qp_are_enforced(missing: AccessFlag) -> None:
    pair = Pair(access=ALL & ~missing)
    opcode = {
        AccessFlag.REMOTE_WRITE: WROpcode.RDMA_WRITE,
        AccessFlag.REMOTE_READ: WROpcode.RDMA_READ,
        AccessFlag.REMOTE_ATOMIC: WROpcode.ATOMIC_FETCH_AND_ADD,
    }[missing]
    pair.ends[0].post_send(send(1, bytes(8), opcode, remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "REM_INV_REQ_ERR")]


def test_rnr_nak_is_retried() -> None:
    pair = Pair(min_rnr_timer=14)
    pair.ends[0].post_send(send(1, b"patience"))
    for _ in range(20):
        pair.step()
    assert pair.done == ([], [])
    inbox = bytearray(20)
    pair.ends[1].post_recv(RecvWork(2, [view(inbox)]))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert bytes(inbox[:8]) == b"patience"


def test_rnr_retries_run_out() -> None:
    pair = Pair(min_rnr_timer=14, rnr_retry=3)
    pair.ends[0].post_send(send(1, b"x"))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "RNR_RETRY_EXC_ERR")]
    assert sum(1 for source, _ in pair.sent if source == 0) == 4
    assert pair.now == pytest.approx(3 * 0.00128, abs=0.001)


def test_transport_retries_run_out() -> None:
    pair = Pair(loss=1.0, retry_cnt=4)
    pair.ends[0].post_send(send(1, b"x"))
    pair.ends[0].post_send(send(2, b"y"))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")]
    assert pair.now == pytest.approx(5 * 0.01)


def test_timeout_zero_never_expires() -> None:
    pair = Pair(loss=1.0, timeout=0)
    pair.ends[0].post_send(send(1, b"x"))
    pair.run()
    assert pair.done == ([], [])


def transfer(seed: int, loss: float, twice: float, late: float, train: int = 0) -> Pair:
    """Random work requests in both directions at once. Each must arrive once and in order."""
    pair = Pair(seed, loss, twice, late, train=train, retry_cnt=1000)  # retries never run out
    rng = random.Random(seed)
    inboxes: tuple[list[bytearray], list[bytearray]] = ([], [])
    sends: tuple[list[bytes], list[bytes]] = ([], [])
    counters = [0, 0]
    reads: list[tuple[bytearray, bytes]] = []
    for memory in pair.memory:
        memory.bytes[32768:] = rng.randbytes(32768)
    writes: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
    for side in (0, 1):
        end, other = pair.ends[side], 1 - side
        for number in range(rng.randrange(3, 12)):
            size = rng.choice([0, 1, 200, 256, 700, 3000])
            kind = rng.randrange(5)
            if kind == 0:
                data = rng.randbytes(size)
                sends[side].append(data)
                inbox = bytearray(3000)
                inboxes[other].append(inbox)
                pair.ends[other].post_recv(RecvWork(len(inboxes[other]), [view(inbox)]))
                end.post_send(send(number, data))
            elif kind == 1:
                data = rng.randbytes(size)
                writes[other][number * 3000 % 30000] = data
                end.post_send(
                    send(number, data, WROpcode.RDMA_WRITE, remote_addr=BASE + number * 3000 % 30000, rkey=RKEY)
                )
            elif kind == 2:
                start = rng.randrange(32768, 60000)
                answer = bytearray(size)
                reads.append((answer, bytes(pair.memory[other].bytes[start : start + size])))
                end.post_send(
                    SendWork(
                        number, WROpcode.RDMA_READ, [view(answer)] if size else [], remote_addr=BASE + start, rkey=RKEY
                    )
                )
            elif kind == 3:
                counters[other] += 1
                end.post_send(
                    SendWork(
                        number,
                        WROpcode.ATOMIC_FETCH_AND_ADD,
                        [view(bytes(8))],
                        remote_addr=BASE + 31000,
                        rkey=RKEY,
                        compare_add=1,
                    )
                )
            else:
                end.post_send(send(number, b"", WROpcode.RDMA_WRITE))
        pair.posted.append(number + 1)
    pair.run()
    for side in (0, 1):
        mine = [c for c in pair.done[side] if c.opcode < WCOpcode.RECV]
        assert statuses(mine) == [(n, "SUCCESS") for n in range(pair.posted[side])]
        received = [c for c in pair.done[side] if c.opcode is WCOpcode.RECV]
        assert statuses(received) == [(n + 1, "SUCCESS") for n in range(len(sends[1 - side]))]
        for inbox, data, completion in zip(inboxes[side], sends[1 - side], received, strict=True):
            assert bytes(inbox[: completion.byte_len]) == data
        for start, data in writes[side].items():
            assert bytes(pair.memory[side].bytes[start : start + len(data)]) == data
        value = int.from_bytes(pair.memory[side].bytes[31000:31008], sys.byteorder)
        assert value == counters[side], "a retransmitted atomic is executed once"
    for answer, expected in reads:
        assert bytes(answer) == expected
    assert all(end.deadline is None for end in pair.ends), "no timer outlives the work"
    return pair


@for_each("seed", range(150))
def test_lossy_network_delivers_everything_once(seed: int) -> None:
    transfer(seed, loss=0.1, twice=0.05, late=0.1, train=TRAIN if seed % 2 else 0)


def test_same_seed_replays_the_same_packets() -> None:
    assert transfer(5, 0.2, 0.1, 0.2).sent == transfer(5, 0.2, 0.1, 0.2).sent


def opcodes(pair: Pair, source: int) -> list[int]:
    return [data[0] for sender, data in pair.sent if sender == source]


@for_each("index", range(5))
def test_lost_packet_is_reported_by_nak_before_the_timeout(index: int) -> None:
    pair = Pair(timeout=10)
    pair.lost = {index}
    inbox = bytearray(2000)
    data = random.Random(1).randbytes(1500)
    pair.ends[1].post_recv(RecvWork(1, [view(inbox)]))
    pair.ends[0].post_send(send(1, data))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert bytes(inbox[:1500]) == data
    assert pair.now < 0.01, "the gap is reported at once"
    assert opcodes(pair, 1).count(0x11) == 2, "one NAK, however many packets follow the gap, and one ACK"


def test_lost_last_packet_is_resent_after_the_timeout() -> None:
    pair = Pair(timeout=0.5)
    pair.lost = {5}
    pair.ends[1].post_recv(RecvWork(1, [view(bytes(2000))]))
    pair.ends[0].post_send(send(1, bytes(1500)))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert pair.now == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("index", range(1, 5))
def test_lost_read_response_is_requested_again_from_the_gap(index: int) -> None:
    pair = Pair(timeout=10)
    pair.lost = {index}  # packet 0 is the request, 1 to 6 are the response
    answer = bytearray(1500)
    pair.memory[1].bytes[:1500] = random.Random(2).randbytes(1500)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(answer)], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert bytes(answer) == bytes(pair.memory[1].bytes[:1500])
    assert pair.now < 0.01
    requests = [data for sender, data in pair.sent if sender == 0]
    assert len(requests) == 2
    address, _, length = struct.unpack_from("!QII", requests[1], 12)
    assert (address, length) == (BASE + (index - 1) * 256, 1500 - (index - 1) * 256)


def test_lost_response_is_detected_by_a_later_ack() -> None:
    pair = Pair(timeout=10, retry_cnt=2)
    answer = bytearray(8)
    pair.ends[0].post_send(
        SendWork(1, WROpcode.ATOMIC_FETCH_AND_ADD, [view(answer)], remote_addr=BASE, rkey=RKEY, compare_add=3)
    )
    for number in range(2, 12):  # ten ACKs beyond one lost response count as one retry
        pair.ends[0].post_send(send(number, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE + 64, rkey=RKEY))
    pair.lost = {11}  # the first response
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in range(1, 12)]
    assert int.from_bytes(pair.memory[1].bytes[:8], sys.byteorder) == 3
    assert pair.now < 0.01


def psn_of(packet: bytes) -> int:
    return int.from_bytes(packet[9:12], "big")


def test_unsolicited_responses_are_dropped() -> None:
    pair = Pair()
    end = pair.ends[0]
    end.post_send(send(1, b"x"))
    (packet,) = pair.wanted(0)
    for ahead in (-1, 1, 5000, 0x7FFFFF):
        assert pair.deliver(0, ack(0x11, psn_of(packet) + ahead)) == 0
    assert end.completions() == []
    assert end.counters.dropped == {"answer": 4}


def test_read_ignores_an_atomic_response_and_fails_on_a_short_one() -> None:
    pair = Pair()
    end = pair.ends[0]
    end.post_send(SendWork(1, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    (packet,) = pair.wanted(0)
    psn = psn_of(packet)
    pair.deliver(0, struct.pack("!BBHIIIQ", 0x12, 0, 0xFFFF, 0x11, psn, 0, 0))
    assert end.completions() == [], "an ATOMIC ACKNOWLEDGE does not complete a READ"
    pair.deliver(0, struct.pack("!BBHIII", 0x10, 0, 0xFFFF, 0x11, psn, 0) + bytes(4))
    assert statuses(end.completions()) == [(1, "BAD_RESP_ERR")]


def test_acks_are_coalesced() -> None:
    pair = Pair()
    for number in range(50):
        pair.ends[0].post_send(send(number, b"x", WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    for packet in pair.wanted(0):
        pair.deliver(1, packet)
    (answer,) = pair.wanted(1)
    pair.deliver(0, answer)
    assert statuses(pair.ends[0].completions()) == [(n, "SUCCESS") for n in range(50)]


@pytest.mark.parametrize(("mtu", "after_loss"), [(256, 128), (1024, 128), (4096, 64)])
def test_packets_in_flight_are_limited_to_the_window(mtu: int, after_loss: int) -> None:
    pair = Pair(path_mtu=mtu, size=1 << 20)
    end = pair.ends[0]
    end.post_send(send(1, bytes(1 << 20), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    assert len(pair.wanted(0)) == 128
    assert pair.wanted(0) == []
    assert end.deadline is not None
    end.timer(end.deadline)
    assert len(pair.wanted(0)) == after_loss
    assert pair.wanted(0) == []


BODIES = st.binary(max_size=300)


@settings(max_examples=MANY_EXAMPLES)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(-3, 3), st.integers(0, 255), BODIES), max_size=12))
def test_arbitrary_packets_do_not_raise(packets: list[tuple[int, int, int, bytes]]) -> None:
    pair = Pair(access=ALL)
    end = pair.ends[1]
    region = pair.memory[1]
    region.access = AccessFlag.LOCAL_WRITE  # no remote access is allowed
    before = bytes(region.bytes)
    inbox = bytearray(100)
    end.post_recv(RecvWork(1, [view(inbox)[20:80]]))
    end.post_send(send(2, b"mine"))
    pair.wanted(1)
    expected = pair.starts[0]
    for opcode, offset, flags, body in packets:
        header = struct.pack("!BBHII", opcode, flags, 0xFFFF, 0x12, (expected + offset) & 0xFFFFFF | (flags & 1) << 31)
        pair.deliver(1, header + body)
        pair.wanted(1)
        end.completions()
    assert bytes(region.bytes) == before
    assert bytes(inbox[:20] + inbox[80:]) == bytes(40), "a receive is not written beyond its buffer"


@given(st.integers(0, 1000), st.integers(0, 400), st.integers(0, 7))
def test_undetected_bit_errors_do_not_raise(seed: int, where: int, bit: int) -> None:
    pair = Pair(seed)
    pair.ends[1].post_recv(RecvWork(1, [view(bytes(4000))]))
    pair.ends[0].post_send(send(1, bytes(1000)))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, [view(bytes(600))], remote_addr=BASE, rkey=RKEY))
    for count in range(400):
        if count == where % 12 and pair.flying:
            when, number, end, data, segment = pair.flying[0]
            broken = bytearray(data)
            broken[where % len(broken)] ^= 1 << bit
            pair.flying[0] = (when, number, end, bytes(broken), segment)
        if not pair.step():
            break


def test_every_packet_matches_the_codec() -> None:
    for seed in range(20):
        for _, data in transfer(seed, 0.1, 0.05, 0.1).sent:
            packet = RocePacket.unpack(memoryview(data))
            assert packet.pack() == data
            assert packet.bth.dest_qpn in (0x11, 0x12)
            assert packet.bth.tver == 0
