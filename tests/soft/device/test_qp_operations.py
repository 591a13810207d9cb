"""Queue pairs of the software device: each operation, and the error of a wrong key or range."""

from __future__ import annotations

import errno
import random
from typing import Any

import pytest

from rdmacm import RdmaError
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.buffers import address_of
from rdmacm.verbs.enums import (
    AccessFlag,
    PlacementType,
    QPAttrMask,
    QPState,
    SelectivityLevel,
    SendFlag,
    WROpcode,
)
from rdmacm.verbs.wr import SGE, RecvWR, SendWR
from support.softdev import ALL, Connected, Pair, sge, to_init, told

INLINE, SIGNALED = SendFlag.INLINE, SendFlag.SIGNALED
FLUSH = AccessFlag.FLUSH_GLOBAL


def state_names(left: SoftQP, right: SoftQP) -> list[str]:
    return [left.state.name, right.state.name]


@pytest.mark.parametrize("family", [0, 1, 2], ids=["ipv4", "ipv6", "link-local"])
@pytest.mark.parametrize("size", [0, 1, 1024, 5000, 200_000])
def test_message_arrives_in_its_receive(pair: Pair, family: int, size: int) -> None:
    ends = Connected(pair, family)
    inbox, outbox = pair.b.region(size + 10), pair.a.region(random.Random(size).randbytes(size))
    ends.right.post_recv([RecvWR(7, [sge(inbox)])])
    ends.left.post_send([SendWR(3, sg=[sge(outbox)])])
    assert [(wc.wr_id, wc.byte_len, wc.qp_num) for wc in ends.at_right()] == [(7, size, ends.right.qp_num)]
    assert [(wc.wr_id, wc.status.name, wc.qp_num) for wc in ends.at_left()] == [(3, "SUCCESS", ends.left.qp_num)]
    assert inbox.view[:size] == outbox.view


def test_messages_are_gathered_and_scattered(pair: Pair) -> None:
    ends = Connected(pair)
    outbox, inbox = pair.a.region(bytes(range(200)) * 10), pair.b.region(4000)
    ends.right.post_recv([RecvWR(1, [sge(inbox, 2000, 900), sge(inbox, 0, 0), sge(inbox, 0, 900)])])
    ends.left.post_send([SendWR(1, sg=[sge(outbox, 1000, 700), sge(outbox, 0, 800)])])
    ends.at_right()
    sent = bytes(outbox.view[1000:1700]) + bytes(outbox.view[:800])
    assert bytes(inbox.view[2000:2900]) + bytes(inbox.view[:600]) == sent


@pytest.mark.parametrize("plain", [False, True], ids=["members", "ints"])
def test_atomics_by_the_number_of_their_opcode(pair: Pair, plain: bool) -> None:
    """A COMPARE & SWAP that was posted by its number once executed as a FETCH & ADD."""
    ends = Connected(pair)
    fetched, counter = pair.a.region(8), pair.b.region((5).to_bytes(8, "little"))
    for opcode, before, after in ((WROpcode.ATOMIC_CMP_AND_SWP, 5, 9), (WROpcode.ATOMIC_FETCH_AND_ADD, 9, 14)):
        number: Any = int(opcode) if plain else opcode
        wr = SendWR(1, number, [sge(fetched)], remote_addr=counter.addr, rkey=counter.rkey, compare_add=5, swap=9)
        ends.left.post_send([wr])
        assert told(ends.at_left()) == [(1, "SUCCESS")]
        assert int.from_bytes(fetched.view, "little") == before
        assert int.from_bytes(counter.view, "little") == after


def test_inline_buffer_is_reusable_at_once(pair: Pair) -> None:
    ends = Connected(pair)
    inbox, outbox = pair.b.region(64), pair.a.region(b"registered")
    ends.right.post_recv([RecvWR(1, [sge(inbox)])])
    plain = bytearray(b"plain ")
    pair.net.lost = lambda datagram: True  # so that it is retransmitted later
    ends.left.post_send([SendWR(1, sg=[plain, b"", sge(outbox)], send_flags=INLINE | SIGNALED)])
    plain[:], outbox.view[:] = b"!!!!!!", b"??????????"
    plain.clear()
    pair.net.lost = lambda datagram: False
    ends.at_right()
    assert bytes(inbox.view[:16]) == b"plain registered"


@pytest.mark.parametrize("lkey", [0, 0x77, None], ids=["0", "unknown", "of another domain"])
def test_inline_data_need_no_registration(pair: Pair, lkey: int | None) -> None:
    """ibv_post_send(3) says of IBV_SEND_INLINE that the L_Key will not be checked."""
    ends = Connected(pair)
    inbox, plain = pair.b.region(64), bytearray(b"not registered")
    there = address_of(memoryview(plain))
    element = SGE(there, len(plain), pair.a.region(bytes(14)).lkey if lkey is None else lkey)
    ends.right.post_recv([RecvWR(1, [sge(inbox)])])
    ends.left.post_send([SendWR(1, sg=[element], send_flags=INLINE | SIGNALED)])
    plain[:] = b"!" * len(plain)
    ends.at_right()
    assert bytes(inbox.view[:14]) == b"not registered"
    element.lkey, element.addr = 0, there + 4
    element.length = 3
    target = pair.b.region(8)
    wr = SendWR(2, WROpcode.RDMA_WRITE, [element, b"..", element], INLINE | SIGNALED, remote_addr=target.addr)
    wr.rkey = target.rkey
    ends.left.post_send([wr])
    assert told(ends.at_left(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert bytes(target.view) == b"!!!..!!!"


@pytest.mark.parametrize("address", [0, 8, (1 << 64) - 4096, -4096])
def test_inline_data_at_an_address_without_memory_fail(pair: Pair, address: int) -> None:
    ends = Connected(pair)
    ends.left.post_send([SendWR(1, sg=[SGE(address, 16, 0)], send_flags=INLINE | SIGNALED)])
    assert told(ends.at_left()) == [(1, "LOC_PROT_ERR")]


def test_write_with_immediate_completes_a_receive(pair: Pair) -> None:
    ends = Connected(pair)
    target, outbox = pair.b.region(10_000), pair.a.region(b"x" * 5000)
    ends.right.post_recv([RecvWR(1), RecvWR(2, [sge(target)])])
    ends.left.post_send(
        [
            SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey),
            SendWR(
                2, WROpcode.RDMA_WRITE_WITH_IMM, [sge(outbox)],
                remote_addr=target.addr + 5000, rkey=target.rkey, imm_data=0x01020304,
            ),
            SendWR(3, WROpcode.SEND_WITH_IMM, imm_data=5),
        ]
    )  # fmt: skip
    assert [(wc.wr_id, wc.opcode.name, wc.imm_data) for wc in ends.at_right(2)] == [
        (1, "RECV_RDMA_WITH_IMM", 0x01020304),
        (2, "RECV", 5),
    ]
    assert told(ends.at_left(3)) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]
    assert bytes(target.view) == b"x" * 10_000


def test_reads_and_atomics_return_the_remote_memory(pair: Pair) -> None:
    ends = Connected(pair)
    source, inbox = pair.b.region(random.Random(1).randbytes(70_000)), pair.a.region(70_016)
    counter = pair.b.region((40).to_bytes(8, "little"))
    ends.left.post_send(
        [
            SendWR(1, WROpcode.RDMA_READ, [sge(inbox, 0, 70_000)], remote_addr=source.addr, rkey=source.rkey),
            SendWR(
                2, WROpcode.ATOMIC_FETCH_AND_ADD, [sge(inbox, 70_000, 8)],
                remote_addr=counter.addr, rkey=counter.rkey, compare_add=2,
            ),
            SendWR(
                3, WROpcode.ATOMIC_CMP_AND_SWP, [sge(inbox, 70_008, 8)],
                remote_addr=counter.addr, rkey=counter.rkey, compare_add=42, swap=7,
            ),
        ]
    )  # fmt: skip
    assert [(wc.opcode.name, wc.status.name) for wc in ends.at_left(3)] == [
        ("RDMA_READ", "SUCCESS"),
        ("FETCH_ADD", "SUCCESS"),
        ("COMP_SWAP", "SUCCESS"),
    ]
    assert inbox.view[:70_000] == source.view
    assert [inbox.view[70_000], inbox.view[70_008], counter.view[0]] == [40, 42, 7]


def test_flush_and_atomic_write(pair: Pair) -> None:
    ends = Connected(pair)
    for qp in (ends.left, ends.right):
        qp.modify(QPAttr(qp_access_flags=ALL | FLUSH), QPAttrMask.ACCESS_FLAGS)
    target, value = pair.b.region(64, ALL | FLUSH), pair.a.region(b"8 bytes!")
    flushes = [SendWR(1, WROpcode.FLUSH), SendWR(2, WROpcode.FLUSH)]
    flushes[0].set_wr_flush(target.rkey, target.addr, 64, PlacementType.GLOBAL, SelectivityLevel.RANGE)
    flushes[1].set_wr_flush(target.rkey, 0, 0, PlacementType.GLOBAL, SelectivityLevel.MR)
    writes = [
        SendWR(3, WROpcode.ATOMIC_WRITE, [sge(value)]),
        SendWR(4, WROpcode.ATOMIC_WRITE, [b"inline!!"], INLINE | SIGNALED),
    ]
    writes[0].set_wr_rdma(target.rkey, target.addr)
    writes[1].set_wr_rdma(target.rkey, target.addr + 8)
    ends.left.post_send([*flushes, *writes])
    assert [(wc.wr_id, wc.status.name, wc.opcode.name, wc.byte_len) for wc in ends.at_left(4)] == [
        (1, "SUCCESS", "FLUSH", 64),
        (2, "SUCCESS", "FLUSH", 0),
        (3, "SUCCESS", "ATOMIC_WRITE", 8),
        (4, "SUCCESS", "ATOMIC_WRITE", 8),
    ]
    assert bytes(target.view[:17]) == b"8 bytes!inline!!\0"


def test_memory_is_never_persistent(pair: Pair) -> None:
    for access in (FLUSH | AccessFlag.FLUSH_PERSISTENT, AccessFlag.FLUSH_PERSISTENT):
        with pytest.raises(RdmaError, match="the memory is not persistent") as raised:
            pair.a.region(8, ALL | access)
        assert raised.value.errno == errno.EINVAL


@pytest.mark.parametrize("fault", ["key", "deregistered", "another domain"])
def test_flush_of_a_whole_region_needs_its_key(pair: Pair, fault: str) -> None:
    """It names no range, so nothing but the key and the permission can refuse it."""
    ends = Connected(pair)
    ends.right.modify(QPAttr(qp_access_flags=ALL | FLUSH), QPAttrMask.ACCESS_FLAGS)
    region = pair.b.region(64, ALL | FLUSH)
    rkey = region.rkey ^ (fault == "key")
    if fault == "deregistered":
        region.dereg()
    elif fault == "another domain":
        region.dereg()
        rkey = pair.b.device.reg_mr(object(), memoryview(bytearray(8)), ALL | FLUSH).rkey
    ends.left.post_send([SendWR(1, WROpcode.FLUSH, flush_type=1, flush_level=1, rkey=rkey)])
    assert told(ends.at_left()) == [(1, "REM_ACCESS_ERR")]
    assert state_names(ends.left, ends.right) == ["ERR", "ERR"]


def test_atomic_write_of_other_memory_is_a_local_error(pair: Pair) -> None:
    ends = Connected(pair)
    target = pair.b.region(64)
    wr = SendWR(1, WROpcode.ATOMIC_WRITE, [SGE(target.addr, 8, 1)], remote_addr=target.addr, rkey=target.rkey)
    ends.left.post_send([wr])
    assert told(ends.at_left()) == [(1, "LOC_PROT_ERR")]
    assert not any(target.view)


def test_everything_arrives_despite_loss(pair: Pair) -> None:
    ends = Connected(pair)
    dice = random.Random(5)
    pair.net.lost = lambda datagram: dice.random() < 0.2
    target, outbox = pair.b.region(50_000), pair.a.region(dice.randbytes(50_000))
    for number in range(10):
        ends.left.post_send(
            [SendWR(number, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)]
        )
    assert told(ends.at_left(10)) == [(number, "SUCCESS") for number in range(10)]
    assert target.view == outbox.view


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        (WROpcode.RDMA_WRITE, ALL & ~AccessFlag.REMOTE_WRITE),
        (WROpcode.RDMA_READ, ALL & ~AccessFlag.REMOTE_READ),
        (WROpcode.ATOMIC_FETCH_AND_ADD, ALL & ~AccessFlag.REMOTE_ATOMIC),
    ],
)
@pytest.mark.parametrize("wrong", ["permission", "key", "range", "domain", "revoked"])
def test_remote_memory_is_protected(pair: Pair, opcode: WROpcode, access: AccessFlag, wrong: str) -> None:
    ends = Connected(pair)
    local = pair.a.region(bytes(range(8)))
    host = pair.b
    if wrong == "domain":
        host.pd = object()
    target = host.region(b"untouched", access if wrong == "permission" else ALL)
    address, key = target.addr, target.rkey
    if address % 8:  # atomics need an aligned address
        pytest.skip("the allocator aligns to less than eight bytes")
    if wrong == "key":
        key ^= 0x100
    elif wrong == "range":
        address += 8
    elif wrong == "revoked":
        target.dereg()
    buffer = target.view.obj
    ends.left.post_send([SendWR(1, opcode, [sge(local)], remote_addr=address, rkey=key, compare_add=1)])
    assert told(ends.at_left()) == [(1, "REM_ACCESS_ERR")]
    pair.settle()
    assert state_names(ends.left, ends.right) == ["ERR", "ERR"]
    if wrong != "revoked":
        assert buffer == b"untouched"
    assert bytes(local.view) == bytes(range(8))


def test_zero_length_operations_need_no_key(pair: Pair) -> None:
    ends = Connected(pair)
    ends.left.post_send([SendWR(1, WROpcode.RDMA_WRITE, rkey=0x666), SendWR(2, WROpcode.RDMA_READ, rkey=0x666)])
    assert told(ends.at_left(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]


def test_access_flags_of_the_qp_are_enforced(pair: Pair) -> None:
    left, right = pair.a.qp(), pair.b.qp()
    to_init(right, AccessFlag.LOCAL_WRITE)
    pair.connect(left, right)
    target, outbox = pair.b.region(10), pair.a.region(b"0123456789")
    left.post_send([SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)])
    pair.run(lambda: left.state is QPState.ERR)
    assert bytes(target.view) == bytes(10)


def test_revoked_region_is_read_no_further(pair: Pair) -> None:
    ends = Connected(pair)
    source, inbox = pair.b.region(b"s" * 2_000_000), pair.a.region(2_000_000)
    ends.left.post_send(
        [SendWR(1, WROpcode.RDMA_READ, [sge(inbox)], remote_addr=source.addr, rkey=source.rkey)]
    )  # fmt: skip
    pair.b.mux.progress()
    source.dereg()
    assert told(ends.at_left()) == [(1, "REM_ACCESS_ERR")]
    assert bytes(inbox.view[-1000:]) == bytes(1000)
    assert state_names(ends.left, ends.right) == ["ERR", "ERR"]


@pytest.mark.parametrize("change", ["domain", "buffer", "access"])
def test_posted_receive_does_not_use_what_its_key_stood_for(pair: Pair, change: str) -> None:
    """The key is looked up when the message arrives."""
    ends, old, new = Connected(pair), bytearray(8), bytearray(8)
    inbox, outbox = pair.b.region(old), pair.a.region(b"message!")
    ends.right.post_recv([RecvWR(7, [sge(inbox)])])
    domain, view = object() if change == "domain" else None, memoryview(new) if change == "buffer" else None
    inbox.rereg(domain, view, AccessFlag(0) if change == "access" else None)
    ends.left.post_send([SendWR(3, sg=[sge(outbox)])])
    assert (told(ends.at_right()), told(ends.at_left())) == ([(7, "LOC_QP_OP_ERR")], [(3, "REM_OP_ERR")])
    assert (bytes(old), bytes(new)) == (bytes(8), bytes(8))
    if change == "buffer":
        old.append(0)  # nothing holds it any more


def test_posted_receives_that_a_change_does_not_concern(pair: Pair) -> None:
    """Those of other keys for the same memory, and of one that still stands for it."""
    ends, memory = Connected(pair), bytearray(8)
    inbox, other = pair.b.region(memory), pair.b.region(memory)
    outbox = pair.a.region(b"message!")
    ends.right.post_recv([RecvWR(1, [sge(other)]), RecvWR(2, [sge(inbox, 0, 4), sge(other, 4, 4)])])
    inbox.rereg(None, None, AccessFlag.LOCAL_WRITE)
    for number in (1, 2):
        ends.left.post_send([SendWR(number, sg=[sge(outbox)])])
        assert (told(ends.at_right()), told(ends.at_left())) == ([(number, "SUCCESS")], [(number, "SUCCESS")])
    assert bytes(memory) == b"message!"


def test_posted_receives_keep_the_memory_of_a_region_that_is_deregistered(pair: Pair) -> None:
    ends, memory = Connected(pair), bytearray(8)
    inbox, outbox = pair.b.region(memory), pair.a.region(b"message!")
    ends.right.post_recv([RecvWR(7, [sge(inbox)])])
    inbox.dereg()
    ends.left.post_send([SendWR(3, sg=[sge(outbox)])])
    assert (told(ends.at_right()), told(ends.at_left())) == ([(7, "SUCCESS")], [(3, "SUCCESS")])
    assert bytes(memory) == b"message!"


def bad_element(pair: Pair, wrong: str) -> SGE:
    """A scatter/gather element of host ``a`` that READ may not use."""
    pd = pair.a.pd
    if wrong == "domain":
        pair.a.pd = object()
    region = pair.a.region(64, AccessFlag.REMOTE_READ if wrong == "permission" else ALL)
    pair.a.pd = pd
    element = sge(region)
    if wrong == "key":
        element.lkey ^= 1
    elif wrong == "range":
        element.length += 1
    return element


@pytest.mark.parametrize("wrong", ["permission", "key", "range", "domain"])
def test_invalid_send_sge_fails_in_order(pair: Pair, wrong: str) -> None:
    ends = Connected(pair)
    source, inbox = pair.b.region(b"q" * 5000), pair.a.region(5000)

    def read(number: int, element: SGE) -> SendWR:
        return SendWR(number, WROpcode.RDMA_READ, [element], remote_addr=source.addr, rkey=source.rkey)

    ends.left.post_recv([RecvWR(9)])
    ends.left.post_send([read(1, sge(inbox)), read(2, bad_element(pair, wrong)), read(3, sge(inbox))])
    ends.left.post_send([read(4, sge(inbox))])
    assert state_names(ends.left, ends.right) == ["RTS", "RTS"]
    assert sorted(told(ends.at_left(5))) == [
        (1, "SUCCESS"),
        (2, "LOC_PROT_ERR"),
        (3, "WR_FLUSH_ERR"),
        (4, "WR_FLUSH_ERR"),
        (9, "WR_FLUSH_ERR"),
    ]
    assert bytes(inbox.view) == b"q" * 5000
    assert state_names(ends.left, ends.right) == ["ERR", "RTS"]


def test_invalid_send_sge_after_a_failure_is_flushed(pair: Pair) -> None:
    ends = Connected(pair)
    outbox = pair.a.region(b"x")
    ends.left.post_send(
        [
            SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], rkey=1, remote_addr=1),
            SendWR(2, sg=[bad_element(pair, "key")]),
        ]
    )
    assert told(ends.at_left(2)) == [(1, "REM_ACCESS_ERR"), (2, "WR_FLUSH_ERR")]


def test_invalid_receive_sge_fails_when_used(pair: Pair) -> None:
    ends = Connected(pair)
    inbox, outbox = pair.a.region(8), pair.b.region(8)
    ends.left.post_recv([RecvWR(1, [sge(inbox)]), RecvWR(2, [bad_element(pair, "range")]), RecvWR(3, [sge(inbox)])])
    ends.right.post_send([SendWR(n, sg=[sge(outbox)]) for n in (1, 2, 3)])
    assert told(ends.at_left(3)) == [(1, "SUCCESS"), (2, "LOC_QP_OP_ERR"), (3, "WR_FLUSH_ERR")]
    assert told(ends.at_right(3)) == [(1, "SUCCESS"), (2, "REM_OP_ERR"), (3, "WR_FLUSH_ERR")]


def test_message_longer_than_its_receive_fails_both_ends(pair: Pair) -> None:
    ends = Connected(pair)
    inbox, outbox = pair.b.region(10), pair.a.region(11)
    ends.right.post_recv([RecvWR(1, [sge(inbox)])])
    ends.left.post_send([SendWR(2, sg=[sge(outbox)])])
    assert told(ends.at_right()) == [(1, "LOC_LEN_ERR")]
    assert told(ends.at_left()) == [(2, "REM_INV_REQ_ERR")]


def test_send_is_retried_until_a_receive_is_posted(pair: Pair) -> None:
    ends = Connected(pair, min_rnr_timer=14)
    inbox, outbox = pair.b.region(8), pair.a.region(b"patience")
    ends.left.post_send([SendWR(1, sg=[sge(outbox)])])
    pair.settle()
    assert ends.left_cq.poll(1) == []
    ends.right.post_recv([RecvWR(1, [sge(inbox)])])
    assert told(ends.at_left()) == [(1, "SUCCESS")]
    assert bytes(inbox.view) == b"patience"


def test_send_without_a_peer_exceeds_its_retries(pair: Pair) -> None:
    ends = Connected(pair, retry_cnt=2)
    ends.right.destroy()
    ends.left.post_send([SendWR(1), SendWR(2)])
    started = pair.clock.now
    assert told(ends.at_left(2)) == [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")]
    assert 0.15 < pair.clock.now - started < 0.5
    assert pair.b.mux.dropped["unknown_qp"] >= 3
