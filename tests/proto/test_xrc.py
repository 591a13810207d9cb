"""The engines of extended reliable connections: packets, the queue and memory they use, what is refused."""

from __future__ import annotations

import struct
from hashlib import shake_128
from typing import cast

import pytest

from rdmacm.enums import WCOpcode, WCStatus, WROpcode
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.work import WC, SendWork
from support.rc import BASE, RKEY, Pair, XrcQueues, connect, make_initiator, statuses, view
from support.roce_packets import RocePacket
from support.rows import for_each

W, O = WROpcode, Opcode  # noqa: E741
MTU = 256
#: The numbers of the two shared receive queues of the target's domain.
FIRST, SECOND = 0x000001, 0xABCDEF


class XrcPair(Pair):
    """An initiator (end 0) and a target (end 1) whose domain has two queues."""

    def __init__(self, seed: int = 0, **faults: float) -> None:
        super().__init__(seed, **faults)  # type: ignore[arg-type]
        self.counters = EngineCounters()
        self.queues = XrcQueues(self.memory[1], (FIRST, SECOND))
        self.initiator = make_initiator(0x11, self.memory[0], self.counters)
        self.target = self.queues.make_target(0x12, self.counters)
        self.ends = (self.initiator, cast("RcEngine", self.target))
        for index, end in enumerate(self.ends):
            connect(end, index)
            end.ready_to_receive(RtrAttributes(0x12 - index, self.starts[1 - index], path_mtu=MTU))
            end.ready_to_send(RtsAttributes(self.starts[index], timeout=0.01))

    def take(self) -> None:
        """Give the target's completions to the queues that they are for."""
        self.queues.take(self.target)

    def completed(self, index: int) -> list[WC]:
        return [] if index else self.initiator.completions()

    def run(self, steps: int = 200_000) -> None:
        for _ in range(steps):
            self.take()
            if not self.step():
                self.take()
                return
        raise AssertionError("the connection does not come to rest")

    def post(self, wr_id: int, srqn: int, data: bytes, opcode: WROpcode = W.SEND, **more: int) -> None:
        rkey = self.queues[srqn].region.key if srqn in self.queues else RKEY
        changes = {"remote_addr": BASE, "rkey": rkey, **more}
        self.initiator.post_send(
            SendWork(wr_id, opcode, [view(data)] if data else [], remote_srqn=srqn, **changes)  # type: ignore[arg-type]
        )

    def key(self, srqn: int) -> int:
        """The R_Key of the memory of a queue."""
        return self.queues[srqn].region.key

    def give(self, packet: bytes) -> int:
        """Give the target a packet without ICRC."""
        return self.deliver(1, packet)

    def answers(self) -> list[tuple[int, int]]:
        """The opcode and syndrome of each packet that the target sends."""
        return [(each[0], each[12]) for each in self.wanted(1)]


def data_of(size: int) -> bytes:
    return shake_128(b"%d" % size).digest(size)


def request(pair: XrcPair, opcode: int, srqn: int, body: bytes = b"", *, psn: int = 0) -> bytes:
    """A request as the target expects it next, without ICRC."""
    head = struct.pack("!BBHII", opcode, 0, 0xFFFF, 0x12, pair.starts[0] + psn & 0xFFFFFF | 1 << 31)
    return head + struct.pack("!I", srqn) + body


@for_each("opcode", [W.SEND, W.SEND_WITH_IMM, W.RDMA_WRITE, W.RDMA_WRITE_WITH_IMM])
@for_each("size", [0, 3, 256, 257, 1000])
def test_each_packet_of_a_message_names_the_queue(opcode: WROpcode, size: int) -> None:
    pair = XrcPair()
    data = data_of(size)
    queue = pair.queues[SECOND]
    buffer = queue.post(7)
    pair.post(1, SECOND, data, opcode, imm=9)
    sent = [RocePacket.unpack(each) for each in pair.wanted(0)]
    count = max(1, -(-size // MTU))
    assert [each.xrceth and each.xrceth.srqn for each in sent] == [SECOND] * count
    assert all(each.bth.opcode & 0xE0 == 0xA0 for each in sent)
    assert b"".join(bytes(each.payload) for each in sent) == data
    assert [pair.give(each.pack()) for each in sent] == [1] * count
    (answer,) = pair.wanted(1)
    assert answer[0] == O.XRC_ACKNOWLEDGE, "a response has no XRCETH"
    assert len(answer) == 16
    pair.deliver(0, answer)
    assert statuses(pair.initiator.completions()) == [(1, "SUCCESS")]
    pair.take()
    if opcode is W.RDMA_WRITE:
        assert not queue.done
    else:
        (wc,) = queue.done
        assert (wc.wr_id, wc.byte_len, wc.qp_num) == (7, size, 0x12)
        assert wc.imm_data == (None if opcode is W.SEND else 9)
    assert bytes(queue.region.bytes if "WRITE" in opcode.name else buffer)[:size] == data
    assert not pair.queues[FIRST].done


def test_reads_and_atomics_use_the_memory_of_the_queue_they_name() -> None:
    pair = XrcPair()
    for queue, salt in ((pair.queues[FIRST], b"f"), (pair.queues[SECOND], b"s")):
        queue.region.bytes[:1000] = salt * 1000
    memory = [view(bytes(1000)) for _ in range(4)]
    for wr_id, (srqn, buffer) in enumerate(zip((FIRST, SECOND, FIRST), memory, strict=False)):
        work = SendWork(wr_id, W.RDMA_READ, [buffer], remote_addr=BASE, rkey=pair.key(srqn), remote_srqn=srqn)
        pair.initiator.post_send(work)
    atomic = SendWork(
        3, W.ATOMIC_FETCH_AND_ADD, [memory[3][:8]], remote_addr=BASE, rkey=pair.key(SECOND), compare_add=1
    )
    atomic.remote_srqn = SECOND
    pair.initiator.post_send(atomic)
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in range(4)]
    assert [bytes(each[:2]) for each in memory] == [b"ff", b"ss", b"ff", b"ss"]
    assert [bytes(each[998:]) for each in memory[:3]] == [b"ff", b"ss", b"ff"]
    assert pair.queues[FIRST].region.bytes[:8] == b"f" * 8
    assert pair.queues[SECOND].region.bytes[:8] != b"s" * 8


def test_read_response_has_the_memory_it_was_asked_of() -> None:
    pair = XrcPair()
    pair.queues[FIRST].region.bytes[:4] = b"ours"
    pair.queues[SECOND].region.remove(pair.key(SECOND))
    reth = struct.pack("!QII", BASE, pair.key(FIRST), 4)
    assert pair.give(request(pair, O.XRC_RDMA_READ_REQUEST, FIRST, reth))
    assert pair.give(request(pair, O.XRC_RDMA_WRITE_ONLY, SECOND, struct.pack("!QII", 0, 0, 0), psn=1))
    response, ack = pair.wanted(1)
    assert (response[0], response[16:]) == (O.XRC_RDMA_READ_RESPONSE_ONLY, b"ours")
    assert ack[0] == O.XRC_ACKNOWLEDGE


@for_each("seed", list(range(12)))
def test_messages_arrive_once_and_in_order_over_a_lossy_network(seed: int) -> None:
    pair = XrcPair(seed, loss=0.05, twice=0.05, late=0.1, train=65507 if seed % 2 else 0)
    buffers: dict[int, list[memoryview]] = {srqn: [] for srqn in pair.queues}
    messages: list[tuple[int, bytes]] = []
    for number in range(60):
        srqn = pair.random.choice((FIRST, SECOND))
        buffers[srqn].append(pair.queues[srqn].post(number))
        messages.append((srqn, data_of(pair.random.choice((0, 5, 256, 700, 2000)))))
        pair.post(number, *messages[-1])
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in range(60)]
    for srqn, queue in pair.queues.items():
        expected = [data for to, data in messages if to == srqn]
        assert [wc.byte_len for wc in queue.done] == [len(data) for data in expected]
        assert [bytes(b[: len(d)]) for b, d in zip(buffers[srqn], expected, strict=True)] == expected


def test_empty_queue_is_not_ready_and_does_not_use_another_ones_receive() -> None:
    pair = XrcPair()
    pair.queues[FIRST].post(1)
    assert not pair.give(request(pair, O.XRC_SEND_ONLY, SECOND))
    assert [(opcode, syndrome >> 5) for opcode, syndrome in pair.answers()] == [(O.XRC_ACKNOWLEDGE, 1)]
    pair.queues[SECOND].post(2)
    assert pair.give(request(pair, O.XRC_SEND_ONLY, SECOND))
    pair.take()
    assert statuses(pair.queues[SECOND].done) == [(2, "SUCCESS")]
    assert len(pair.queues[FIRST].receives) == 1


def test_unknown_queue_is_refused() -> None:
    pair = XrcPair()
    pair.post(1, 0x777777, b"hello")
    pair.post(2, FIRST, b"hello")
    pair.queues[FIRST].post(1)
    pair.run()
    assert statuses(pair.done[0]) == [(1, "REM_INV_REQ_ERR"), (2, "WR_FLUSH_ERR")]
    assert pair.target.failed
    assert not pair.target.take_completed()
    assert len(pair.queues[FIRST].receives) == 1


@for_each("then", [SECOND, 0x777777])
def test_message_keeps_to_one_queue(then: int) -> None:
    pair = XrcPair()
    queue = pair.queues[FIRST]
    queue.post(1)
    assert pair.give(request(pair, O.XRC_SEND_FIRST, FIRST, bytes(MTU)))
    assert not pair.give(request(pair, O.XRC_SEND_LAST, then, b"last", psn=1))
    assert pair.answers() == [(O.XRC_ACKNOWLEDGE, 0x61)]
    pair.take()
    assert statuses(queue.done) == [(1, "REM_INV_REQ_ERR")]


def test_queue_that_is_closed_during_a_message_is_refused() -> None:
    pair = XrcPair()
    queue = pair.queues[FIRST]
    buffer = queue.post(1)
    pair.give(request(pair, O.XRC_SEND_FIRST, FIRST, bytes(MTU)))
    pair.queues.close(FIRST)
    assert not pair.give(request(pair, O.XRC_SEND_LAST, FIRST, b"last", psn=1))
    assert pair.target.failed
    assert not any(buffer[MTU:])


@for_each("opcode", [*(o for o in Opcode if not o.name.startswith("XRC")), 0xBC, 0xBD, 0xB5, 0xFF])
def test_packets_of_other_services_are_dropped(opcode: int) -> None:
    pair = XrcPair()
    pair.queues[FIRST].post(1)
    for end in (0, 1):
        packet = request(pair, opcode, FIRST, bytes(40))
        packet = packet[:4] + struct.pack("!I", 0x11 + end) + packet[8:]
        assert not pair.deliver(end, packet)
    assert pair.counters.dropped == {"opcode": 2}


def test_each_end_drops_packets_for_the_other() -> None:
    pair = XrcPair()
    assert not pair.deliver(0, request(pair, O.XRC_SEND_ONLY, FIRST))
    assert not pair.deliver(1, request(pair, O.XRC_ACKNOWLEDGE, 0))
    assert pair.counters.dropped == {"opcode": 2}


@for_each("opcode", [o for o in Opcode if o.name.startswith("XRC")])
def test_cut_headers_are_dropped(opcode: Opcode) -> None:
    pair = XrcPair()
    pair.queues[FIRST].post(1)
    whole = request(pair, opcode, FIRST, bytes(40))
    end = 0 if "RESPONSE" in opcode.name or "ACKNOWLEDGE" in opcode.name else 1
    whole = whole[:4] + struct.pack("!I", 0x11 + end) + whole[8:]
    shortest = RocePacket.unpack(whole)
    length = len(whole) - len(shortest.payload)
    for size in range(12, length, 4):
        assert not pair.deliver(end, whole[:size])
    assert set(pair.counters.dropped) <= {"length"}
    assert not pair.target.failed


def test_probe_is_answered_and_changes_nothing() -> None:
    pair = XrcPair()
    (before, *_) = pair.initiator.peer_activity
    probe = b"".join(pair.initiator.probe())
    assert not pair.target.received(memoryview(probe), 0, 0)
    (answer,) = pair.wanted(1)
    pair.deliver(0, answer)
    assert pair.initiator.peer_activity[2] == 1
    assert pair.initiator.peer_activity[0] == before
    assert not pair.target.failed


def test_send_with_invalidate_and_local_requests() -> None:
    pair = XrcPair()
    queue = pair.queues[FIRST]
    queue.post(1)
    pair.initiator.post_send(SendWork(1, W.BIND_MW, bind=0x55))
    pair.post(2, FIRST, b"done", W.SEND_WITH_INV, invalidate_rkey=pair.key(FIRST))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS")]
    (wc,) = queue.done
    assert (wc.status, wc.opcode, wc.invalidated_rkey) == (WCStatus.SUCCESS, WCOpcode.RECV, pair.key(FIRST))
    assert not queue.region.keys
    assert pair.queues[SECOND].region.keys == {pair.key(SECOND)}


def test_memory_of_another_queue_is_refused() -> None:
    pair = XrcPair()
    pair.post(1, FIRST, b"hello", W.RDMA_WRITE, rkey=pair.key(SECOND))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "REM_ACCESS_ERR")]
    assert not any(pair.queues[SECOND].region.bytes)


def test_opcodes_of_reliable_connections_alone_are_refused() -> None:
    pair = XrcPair()
    for opcode in (W.FLUSH, W.ATOMIC_WRITE):
        with pytest.raises(ValueError, match="reliable connection"):
            pair.initiator.post_send(SendWork(1, opcode, [view(bytes(8))]))
