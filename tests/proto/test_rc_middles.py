"""Runs of middle packets give the same results as the packets one by one; packets are as the codec has them."""

from __future__ import annotations

import random

import pytest

from rdmacm.enums import AccessFlag, WROpcode
from rdmacm.proto.engine import RtrAttributes, RtsAttributes
from rdmacm.proto.roce.headers import AETH, BTH, RETH, RocePacket
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.roce.rc import RcEngine, middles
from rdmacm.proto.roce.rc.state import RcState
from rdmacm.proto.work import RecvWork, SendWork
from support.examples import EXAMPLES
from support.rc import ALL, connect
from support.rows import for_each

MTU = 256
A, B = b"\x7f\0\0\1", b"\x7f\0\0\2"
SIZES = (0, 1, 2, 3, 4, 63, 64, MTU - 1, MTU, MTU + 1, 3 * MTU, 9 * MTU)
OPCODES = (
    *(WROpcode.SEND, WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM),
    *(WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.FLUSH, WROpcode.ATOMIC_WRITE),
)


class Region:
    def __init__(self) -> None:
        self.view = memoryview(bytearray(10 * MTU))

    def remote(self, _rkey: int, address: int, length: int, _access: AccessFlag) -> memoryview | None:
        return self.view[address : address + length] if address + length <= len(self.view) else None

    def permits(self, _rkey: int, _access: AccessFlag) -> bool:
        return True

    def invalidate(self, _rkey: int) -> bool:
        return True

    def bind(self, _bind: object) -> bool:
        return True


def work(source: random.Random, number: int) -> SendWork:
    opcode = source.choice(OPCODES)
    size = 8 if opcode in (WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.ATOMIC_WRITE) else source.choice(SIZES)
    data = bytearray(source.randbytes(size))
    cut = source.choice((0, 0, size // 2))
    segments = [memoryview(data)[:cut], memoryview(data)[cut:]] if cut else [memoryview(data)] if size else []
    if source.random() < 0.01 and segments:
        segments[-1].release()
    solicited, fence, signaled = (source.random() < 0.2 for _ in range(3))
    address = source.choice((0, 8, 64) if source.random() < 0.99 else (1 << 20,))
    if opcode is WROpcode.FLUSH:
        return SendWork(number, opcode, (), not signaled, solicited, fence, address, 7, flush=(size, 1, size & 1))
    return SendWork(
        number, opcode, segments, not signaled, solicited, fence, address, 7, imm=number, compare_add=number
    )


def recv(source: random.Random, number: int) -> RecvWork:
    data = memoryview(bytearray(source.choice((3 * MTU, 9 * MTU, 10 * MTU) if source.random() < 0.98 else (40,))))
    if source.random() < 0.01:
        data = data.toreadonly()
    return RecvWork(number, (data[:100], data[100:]) if source.random() < 0.3 else (data,))


def transcript(seed: int) -> list[object]:
    """Everything observable of an exchange: packets, completions, deadlines, memory and drop counters."""
    source = random.Random(seed)
    memory = (Region(), Region())
    ends = (RcEngine(1, memory[0]), RcEngine(2, memory[1]))
    for index, end in enumerate(ends):
        connect(end, index)
        end.ready_to_receive(RtrAttributes(2 - index, 0xFFFFFA, path_mtu=MTU, access=ALL))
        end.ready_to_send(RtsAttributes(0xFFFFFA, timeout=0.5, retry_cnt=3))
    observed: list[object] = []
    buffers: list[RecvWork] = []
    now = 0.0
    for step in range(120):
        now += 0.01 if step % 10 else 0.6
        for index, end in enumerate(ends):
            if source.random() < 0.6 or step == 0:
                posted = recv(source, step)
                buffers.append(posted)
                end.post_recv(posted)
            for _ in range(source.choice((0, 1, 1, 2))):
                end.post_send(work(source, step))
            observed.append(end.deadline)
            if end.deadline is not None and end.deadline <= now:
                end.timer(now)
            for pieces, segment in end.datagrams(now, 64, 65507):
                train = b"".join(pieces)
                observed.append(train)
                fate = source.random()
                if fate < 0.02:
                    continue
                if fate < 0.05:
                    at = source.randrange(len(train))
                    train = train[:at] + bytes([train[at] ^ 1]) + train[at + 1 :]
                copies = 2 if fate > 0.98 else 1
                observed.extend(ends[1 - index].received(memoryview(train), segment, now) for _ in range(copies))
            observed.append(end.completions())
            observed.append(dict(end.counters.dropped))
        observed.append([region.view.tobytes() for region in memory])
    observed.append([[piece.tobytes() for piece in buffer.segments] for buffer in buffers])
    return observed


@for_each("seed", range(EXAMPLES))
def test_runs_match_single_packets(seed: int) -> None:
    runs = transcript(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(middles, "receive", lambda *_: 0)
        assert runs == transcript(seed)


def test_middle_packets_come_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare single packets with themselves."""
    counts = []

    def recorded(rc: RcState, data: memoryview, at: int, now: float) -> int:
        counts.append(receive(rc, data, at, now))
        return counts[-1]

    receive = middles.receive
    monkeypatch.setattr(middles, "receive", recorded)
    transcript(1)
    assert max(counts) > 1
    assert 0 in counts


@for_each("opcode", [WROpcode.SEND, WROpcode.RDMA_WRITE])
@for_each("solicited", [False, True])
@for_each("size", range(1, 9))
def test_packets_match_the_codec(opcode: WROpcode, solicited: bool, size: int) -> None:
    flow = Icrc(A, B, 50000)
    sender, receiver = RcEngine(0x10203, Region()), RcEngine(0x30201, Region())
    for end, other, local, remote in ((sender, receiver, A, B), (receiver, sender, B, A)):
        end.set_route(local, remote, 50000)
        end.set_peer_port(50000)
        end.ready_to_receive(RtrAttributes(other.qp_num, 0xFFFFFF, path_mtu=MTU, pkey=0x8123))
        end.ready_to_send(RtsAttributes(0xFFFFFF))
    receiver.post_recv(RecvWork(1, (memoryview(bytearray(8)),)))
    data = bytes(range(size))
    work = SendWork(1, opcode, (memoryview(data),), solicited=solicited, remote_addr=8, rkey=0x89ABCDEF)
    sender.post_send(work)
    ((pieces, _),) = sender.datagrams(0.0, 64, 0)
    packet = b"".join(pieces)
    write = opcode is WROpcode.RDMA_WRITE
    expected = RocePacket(
        BTH(
            Opcode.RC_RDMA_WRITE_ONLY if write else Opcode.RC_SEND_ONLY,
            dest_qpn=0x30201,
            psn=0xFFFFFF,
            ack_req=True,
            se=solicited,
            pad_cnt=-size & 3,
            pkey=0x8123,
        ),
        reth=RETH(8, 0x89ABCDEF, size) if write else None,
        payload=data,
    ).pack()
    assert packet == expected + flow.seal([expected])
    assert receiver.received(memoryview(packet), 0, 0.0) == 1
    ((pieces, _),) = receiver.datagrams(0.0, 64, 0)
    answer = RocePacket(
        BTH(Opcode.RC_ACKNOWLEDGE, dest_qpn=0x10203, psn=0xFFFFFF, pkey=0x8123), aeth=AETH.ack(1)
    ).pack()
    assert b"".join(pieces) == answer + Icrc(B, A, 50000).seal([answer])
