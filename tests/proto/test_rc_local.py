"""BIND_MW and LOCAL_INV, which send nothing: when they are executed, how they complete, and how they fail."""

from __future__ import annotations

import pytest

from rdmacm.enums import WROpcode
from rdmacm.proto.work import RecvWork, SendWork
from support.rc import BASE, RKEY, Pair, send, statuses, view

NEW = 0x7777


def bind(wr_id: int, key: int = NEW, signaled: bool = True) -> SendWork:
    return SendWork(wr_id, WROpcode.BIND_MW, bind=key, signaled=signaled)


def local_inv(wr_id: int, key: int = RKEY) -> SendWork:
    return SendWork(wr_id, WROpcode.LOCAL_INV, invalidate_rkey=key)


def test_local_operations_complete_in_order_without_a_packet() -> None:
    pair = Pair()
    a = pair.ends[0]
    a.post_send(bind(1))
    a.post_send(local_inv(2))
    a.post_send(bind(3, RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]
    assert [wc.opcode.name for wc in pair.done[0]] == ["BIND_MW", "LOCAL_INV", "BIND_MW"]
    assert (pair.sent, pair.memory[0].keys) == ([], {NEW, RKEY})
    a.post_send(bind(4, 5, signaled=False))
    pair.run()
    assert len(pair.done[0]) == 3


@pytest.mark.parametrize("opcode", [WROpcode.SEND, WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD])
def test_local_operation_waits_for_the_requests_before_it(opcode: WROpcode) -> None:
    pair = Pair()
    a, b = pair.ends
    b.post_recv(RecvWork(9, [view(bytes(1000))]))
    b.post_recv(RecvWork(8, [view(bytes(1000))]))
    a.post_send(SendWork(1, opcode, [view(bytes(8))], remote_addr=BASE, rkey=RKEY))
    a.post_send(bind(2))
    a.post_send(send(3, b"after it"))
    sent = pair.wanted(0)
    assert len(sent) == 1, "the requests after it wait as well"
    assert pair.memory[0].keys == {RKEY}
    pair.deliver(1, sent[0])
    for packet in pair.wanted(1):
        pair.deliver(0, packet)
    assert a.to_send
    assert len(pair.wanted(0)) == 1
    assert pair.memory[0].keys == {RKEY, NEW}
    assert statuses(a.completions()) == [(1, "SUCCESS"), (2, "SUCCESS")]


@pytest.mark.parametrize(
    ("work", "status"), [(bind(2, RKEY), "MW_BIND_ERR"), (local_inv(2, 5), "LOC_QP_OP_ERR")], ids=["bind", "invalidate"]
)
def test_refusal_ends_the_connection(work: SendWork, status: str) -> None:
    pair = Pair()
    a, b = pair.ends
    b.post_recv(RecvWork(9, [view(bytes(8))]))
    a.post_recv(RecvWork(7))
    a.post_send(send(1, b"before"))
    a.post_send(work)
    a.post_send(send(3, b"after"))
    a.post_send(bind(4))
    pair.run()
    assert statuses(pair.done[0]) == [
        *((1, "SUCCESS"), (2, status), (3, "WR_FLUSH_ERR"), (4, "WR_FLUSH_ERR"), (7, "WR_FLUSH_ERR"))
    ]
    assert (a.failure, pair.memory[0].keys) == (status, {RKEY})
    a.post_send(bind(5))
    assert statuses(a.completions()) == [(5, "WR_FLUSH_ERR")]


def test_local_operations_wait_in_sqd() -> None:
    pair = Pair()
    a = pair.ends[0]
    a.pause()
    a.post_send(bind(1))
    assert (a.to_send, pair.wanted(0), a.completions(), a.drained) == (0, [], [], True)
    a.resume()
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]


def test_local_operation_is_executed_once_after_retransmissions() -> None:
    for seed in range(100):
        pair = Pair(seed, loss=0.2, twice=0.1, late=0.1)
        a, b = pair.ends
        inbox = [bytearray(600) for _ in range(20)]
        for number in range(20):
            b.post_recv(RecvWork(number, [view(inbox[number])]))
        for number in range(20):
            a.post_send(send(2 * number, bytes([number]) * 600))
            a.post_send(bind(2 * number + 1, 1000 + number))
        pair.run()
        assert statuses(pair.done[0]) == [(number, "SUCCESS") for number in range(40)], seed
        assert inbox == [bytes([number]) * 600 for number in range(20)]
        assert pair.memory[0].keys == {RKEY, *range(1000, 1020)}
