"""The multiplexer between queue pairs and the wire: QPNs, dispatch, fairness, timers, MADs, hostile packets."""

from __future__ import annotations

import errno
import random
import struct

import pytest

from rdmacm import RdmaError
from rdmacm.errors import cm_error
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.soft.device import multiplexer as module
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.enums import Mtu, QPState, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR
from support.softdev import Connected, Pair, sge, to_init, to_rtr, to_rts, told

LEFT, RIGHT = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
PATH = WirePath(LEFT, RIGHT)
MAD = bytes(range(256))


def record_mads(pair: Pair) -> list[tuple[bytes, WirePath, float]]:
    heard: list[tuple[bytes, WirePath, float]] = []
    pair.b.mux.open()
    pair.b.mux.gsi.on_mad = lambda mad, path, now: heard.append((bytes(mad), path, now))
    return heard


def sealed(packet: bytes, path: WirePath = PATH, port: int = 50_000) -> bytes:
    return packet + Icrc(path.local, path.remote, port).seal([packet])


# -- queue pair numbers -------------------------------------------------------------------------------------


def test_qp_numbers_carry_the_slot_and_are_unique(pair: Pair) -> None:
    cq = pair.b.cq()
    numbers = [pair.b.qp(cq).qp_num for _ in range(3000)]
    assert len(set(numbers)) == 3000
    assert {number >> 12 for number in numbers} == {2}
    assert numbers != sorted(numbers)


def test_multicast_qpn_is_never_allocated(pair: Pair) -> None:
    pair.a.wire.slots = (4095,)
    draws = iter([0xFFF, 0xFFF, 5])
    pair.a.mux.random.getrandbits = lambda bits: next(draws)  # type: ignore[method-assign]
    assert pair.a.qp().qp_num == 0xFFF005


def test_released_qp_number_is_not_reused_at_once(pair: Pair) -> None:
    qp = pair.a.qp()
    number = qp.qp_num
    mux = pair.a.mux
    mux.hold_qpn(number, pair.clock.now + 5)
    mux.hold_qpn(number, pair.clock.now + 1)  # the longer time counts
    qp.destroy()
    mux._freed.clear()
    draws = iter([number & 0xFFF, 7, number & 0xFFF])
    mux.random.getrandbits = lambda bits: next(draws)  # type: ignore[method-assign]
    pair.clock.advance(4)
    assert pair.a.qp().qp_num == 1 << 12 | 7
    pair.clock.advance(2)
    assert pair.a.qp().qp_num == number


def test_number_of_a_closed_qp_comes_back_after_many_others(pair: Pair) -> None:
    qp = pair.a.qp()
    number = qp.qp_num
    qp.destroy()
    draws = iter([number & 0xFFF, 7])
    mux = pair.a.mux
    drawn, mux.random.getrandbits = mux.random.getrandbits, lambda bits: next(draws)  # type: ignore[method-assign]
    assert pair.a.qp().qp_num == 1 << 12 | 7
    mux.random.getrandbits = drawn  # type: ignore[method-assign]
    for _ in range(512):
        pair.a.qp().destroy()
    mux.random.getrandbits = lambda bits: number & 0xFFF  # type: ignore[method-assign]
    assert pair.a.qp().qp_num == number


def test_held_numbers_are_removed_when_their_time_is_over(pair: Pair) -> None:
    mux = pair.a.mux
    for count in range(20_000):
        mux.hold_qpn(count, pair.clock.now + 2)
        pair.clock.advance(0.01)
        assert len(mux._held) <= 512, "200 of them are held, and no more than twice as many are kept"
    assert min(until for until in sorted(mux._held.values())[-199:]) > pair.clock.now


@pytest.mark.parametrize(("rate", "slots"), [(6_640, 2), (20_000, 3)])
def test_numbers_suffice_for_many_connections_a_second(
    pair: Pair, rate: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number is held for a TIMEWAIT of half a second, and finding one takes a few steps."""
    mux, random_bits, sweep = pair.a.mux, pair.a.mux.random.getrandbits, pair.a.mux._sweep
    steps, held, cq = 0, dict[int, float](), pair.a.cq()

    def draw(bits: int) -> int:
        nonlocal steps
        steps += 1
        return random_bits(bits)

    def counted_sweep(now: float) -> None:
        nonlocal steps
        steps += len(mux._held)
        sweep(now)

    monkeypatch.setattr(mux.random, "getrandbits", draw)
    monkeypatch.setattr(mux, "_sweep", counted_sweep)
    for _ in range(rate):
        qp = pair.a.qp(cq)
        assert held.get(qp.qp_num, 0.0) <= pair.clock.now
        held[qp.qp_num] = pair.clock.now + 0.5
        mux.hold_qpn(qp.qp_num, held[qp.qp_num])
        qp.destroy()
        pair.clock.now += 1 / rate
    assert len(mux.wire.slots) == slots
    assert steps < 20 * rate


def test_slot_is_claimed_when_numbers_run_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOT_QPNS", 3)
    qps = [pair.a.qp() for _ in range(3)]
    assert [*pair.a.wire.slots] == [1]
    qps.append(pair.a.qp())
    assert [*pair.a.wire.slots] == [1, 3]
    qps += [pair.a.qp(), pair.a.qp()]
    assert {qp.qp_num >> 12 for qp in qps} == {1, 3}
    assert len({qp.qp_num for qp in qps}) == 6
    pair.a.mux.hold_qpn(qps[5].qp_num, pair.clock.now + 5)
    qps.pop().destroy()
    pair.a.mux._freed.clear()
    pair.clock.advance(4)
    qps.append(pair.a.qp())  # the number that is held counts
    assert [*pair.a.wire.slots] == [1, 3, 5]


def test_create_qp_fails_without_a_free_number(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOT_QPNS", 3)

    def refuse() -> None:
        raise cm_error(errno.EUSERS, "all slots are owned", "open_device")

    pair.a.wire.claim_slot = refuse  # type: ignore[method-assign]
    qps = [pair.a.qp() for _ in range(3)]
    with pytest.raises(RdmaError, match=r"3 queue pairs are in use, 0 were .*all slots are owned") as caught:
        pair.a.qp()
    assert caught.value.errno == errno.ENOMEM
    pair.a.mux.hold_qpn(qps[0].qp_num, pair.clock.now + 1)
    qps[0].destroy()
    pair.a.mux._freed.clear()
    with pytest.raises(RdmaError, match="2 queue pairs are in use, 1 were"):
        pair.a.qp()
    pair.clock.advance(2)
    pair.a.qp()


# -- dispatch -----------------------------------------------------------------------------------------------


def test_packets_from_another_source_are_dropped(pair: Pair) -> None:
    ends = Connected(pair)
    target, outbox = pair.b.region(8), pair.a.region(b"eviltwin")
    pair.net.lost = lambda datagram: True
    ends.left.post_send([SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)])
    datagram = pair.net.sent[-1][1]
    packet = datagram[:-4]
    dropped = pair.b.mux.dropped

    stranger = WirePath(bytes([10, 0, 0, 3]), RIGHT)
    pair.net.inject(stranger, sealed(packet, stranger))
    pair.settle()
    assert dropped["address"] == 1
    pair.net.inject(PATH, datagram[:-1] + bytes([datagram[-1] ^ 1]))
    unknown = packet[:5] + b"\x02\x00\x00" + packet[8:]
    pair.net.inject(PATH, sealed(unknown))
    pair.net.inject(PATH, datagram[:15])
    pair.settle()
    assert (dropped["unknown_qp"], dropped["short"]) == (1, 1)
    assert bytes(target.view) == bytes(8)
    pair.net.inject(PATH, sealed(packet, port=1234), port=1234)  # the port is the sender's choice
    pair.settle()
    assert bytes(target.view) == b"eviltwin"


def test_link_local_peers_are_matched_by_scope(pair: Pair) -> None:
    ends = Connected(pair, family=2)
    ends.right.post_recv([RecvWR(1)])
    pair.net.lost = lambda datagram: True
    ends.left.post_send([SendWR(1)])
    path, datagram, _ = pair.net.sent[-1]
    pair.net.inject(path._replace(scope_id=path.scope_id + 1), datagram)
    pair.settle()
    assert (ends.right_cq.poll(1), pair.b.mux.dropped["address"]) == ([], 1)
    pair.net.inject(path, datagram)
    assert told(ends.right_cq.poll(1)) == [(1, "SUCCESS")]


def test_queue_pair_receives_nothing_before_rtr(pair: Pair) -> None:
    left, right = pair.a.qp(), pair.b.qp()
    to_init(right)
    to_rtr(left, right.qp_num, RIGHT, pair.a.gid_index(LEFT))
    to_rts(left)
    left.post_send([SendWR(1)])
    pair.settle()
    assert pair.b.mux.dropped["state"] == 1
    pair.connect(pair.a.qp(), right)


def test_train_is_split_between_its_queue_pairs(pair: Pair) -> None:
    """All connections of two hosts use one pair of UDP ports, so that GRO may join their packets."""
    cq, inbox = pair.b.cq(), pair.b.region(8)
    lefts, rights = [pair.a.qp() for _ in range(3)], [pair.b.qp(cq) for _ in range(3)]
    for left, right in zip(lefts, rights, strict=True):
        pair.connect(left, right)
        right.post_recv([RecvWR(n, [sge(inbox)]) for n in range(4)])
    pair.net.lost = lambda datagram: True
    before = len(pair.net.sent)
    outbox = pair.a.region(b"segment!")
    for left in (lefts[0], lefts[0], lefts[1], lefts[2], lefts[0]):
        left.post_send([SendWR(1, sg=[sge(outbox)])])
    packets = [datagram for _, datagram, _ in pair.net.sent[before:]]
    assert len(packets) == 5
    assert len({len(packet) for packet in packets}) == 1
    size = len(packets[0])
    pair.net.inject(PATH, b"".join(packets) + b"tail", size)
    pair.settle()
    assert [(wc.qp_num, wc.wr_id) for wc in cq.poll(9)] == [
        (rights[0].qp_num, 0),
        (rights[0].qp_num, 1),
        (rights[1].qp_num, 0),
        (rights[2].qp_num, 0),
        (rights[0].qp_num, 2),
    ]


# -- fairness and timers ------------------------------------------------------------------------------------


def test_bulk_transfer_does_not_delay_others(pair: Pair) -> None:
    bulk = Connected(pair, path_mtu=Mtu.MTU_256)
    small = Connected(pair)
    target, outbox = pair.b.region(4 << 20), pair.a.region(4 << 20)
    wr = SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)
    bulk.left.post_send([wr])
    for number in range(5):
        small.right.post_recv([RecvWR(number)])
        small.left.post_send([SendWR(number)])
        for _ in range(6):
            pair.a.mux.progress()
            pair.b.mux.progress()
        assert told(small.left_cq.poll(1)) == [(number, "SUCCESS")]
        assert bulk.left_cq.poll(1) == []
    assert told(bulk.at_left()) == [(1, "SUCCESS")]


def test_progress_step_is_bounded(pair: Pair) -> None:
    pairs = [Connected(pair, path_mtu=Mtu.MTU_256) for _ in range(20)]
    target, outbox = pair.b.region(1 << 20), pair.a.region(1 << 20)
    for ends in pairs:
        ends.left.post_send([SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)])
    while True:
        before = len(pair.net.sent)
        worked = pair.a.mux.progress()
        packets = sum(-(-len(d) // s) if s else 1 for _, d, s in pair.net.sent[before:])
        assert packets <= 256 + 64
        if not worked:
            break
        pair.b.mux.progress()
    # The private queue: poll() would make progress, and this test is about progress without it.
    pair.run(lambda: all(len(ends.left_cq.queue) for ends in pairs))
    assert all(told(ends.left_cq.poll(9)) == [(1, "SUCCESS")] for ends in pairs)


def test_repeated_rnr_naks_do_not_accumulate_timers(pair: Pair) -> None:
    ends = Connected(pair, min_rnr_timer=1, timeout=20)
    ends.left.post_send([SendWR(1)])
    for _ in range(300):
        pair.settle()
        pair.clock.advance(0.001)
        pair.fire()
    # Stale timers have no effect except memory: there are 64 at most, beside four for each queue pair.
    assert len(pair.a.mux._timers) <= 68
    assert len(pair.a.provider.runtime._timers.heap) <= 4
    ends.right.post_recv([RecvWR(1)])
    assert told(ends.at_left()) == [(1, "SUCCESS")]


def test_destroyed_queue_pairs_leave_no_timers_behind(pair: Pair) -> None:
    pair.net.lost = lambda datagram: True
    for _ in range(300):
        ends = Connected(pair, timeout=31)
        ends.left.post_send([SendWR(1)])
        ends.left.destroy()
        ends.right.destroy()
    # Stale timers have no effect except memory: there are 64 at most, beside four for each queue pair.
    assert len(pair.a.mux._timers) <= 65
    assert len(pair.a.mux) == 0


def test_timers_and_descriptors_alone_finish_all_transfers(pair: Pair) -> None:
    """Readable descriptors and timers are enough to finish many long transfers."""
    pairs = [Connected(pair, path_mtu=Mtu.MTU_256) for _ in range(10)]
    target, outbox = pair.b.region(300_000), pair.a.region(300_000)
    for ends in pairs:
        ends.left.post_send([SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)])
    for _ in range(10_000):
        for host in (pair.a, pair.b):
            if host.wire.inbox:
                host.mux.progress()
        pair.fire()
        # The private queue: poll() would make progress, and this test is about progress without it.
        if all(ends.left_cq.queue for ends in pairs):
            break
        if not pair.a.wire.inbox and not pair.b.wire.inbox:
            pair.clock.advance(1e-6)
    assert all(told(ends.left_cq.poll(2)) == [(1, "SUCCESS")] for ends in pairs)
    assert pair.clock.now < 1000.05  # no transfer has waited for a timeout


# -- management datagrams -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [PATH, WirePath(b"\xfd" + bytes(14) + b"\x01", b"\xfd" + bytes(14) + b"\x02")],
    ids=["ipv4", "ipv6"],
)
def test_mad_is_delivered(pair: Pair, path: WirePath) -> None:
    heard = record_mads(pair)
    pair.a.mux.gsi.send_mad(path, MAD)
    pair.a.mux.gsi.send_mad(path, MAD[::-1], 8)
    pair.settle()
    back = WirePath(path.remote, path.local)
    assert heard == [(MAD, back, pair.clock.now), (MAD[::-1], back, pair.clock.now)]


def test_mad_from_a_link_local_address_carries_its_interface(pair: Pair) -> None:
    heard = record_mads(pair)
    local, remote = pair.a.addresses[2], pair.b.addresses[2]
    pair.a.mux.gsi.send_mad(WirePath(local, remote, pair.a.ifindex), MAD)
    pair.settle()
    assert [path for _, path, _ in heard] == [WirePath(remote, local, pair.a.ifindex)]


def test_train_of_mads_is_delivered(pair: Pair) -> None:
    heard = record_mads(pair)
    for mad in (MAD, bytes(256), MAD):
        pair.a.mux.gsi.send_mad(PATH, mad)
    train = b"".join(datagram for _, datagram, _ in pair.net.sent)
    pair.b.wire.inbox.clear()
    pair.net.inject(PATH, train, len(train) // 3)
    pair.settle()
    assert [mad for mad, _, _ in heard] == [MAD, bytes(256), MAD]


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"\x04", "gsi_opcode"),
        (1, b"\x01", "gsi_opcode"),
        (2, b"\x12\x34", "gsi_key"),
        (12, b"\x01", "gsi_key"),
        (276, b"more", "gsi_length"),
        (272, b"", "gsi_length"),
    ],
)
def test_invalid_mads_are_dropped(pair: Pair, offset: int, value: bytes, reason: str) -> None:
    heard = record_mads(pair)
    packet = bytearray(struct.pack("!BBHIIII", 0x64, 0, 0xFFFF, 1, 1, 0x80010000, 1) + MAD)
    pair.net.inject(PATH, sealed(bytes(packet)))
    pair.net.inject(PATH, bytes(packet) + bytes(4))
    packet[offset : offset + len(value) if value else None] = value
    pair.net.inject(PATH, sealed(bytes(packet)))
    pair.settle()
    assert len(heard) == 1
    assert pair.b.mux.dropped == {reason: 1, "icrc": 1}


# -- hostile packets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_arbitrary_packets_do_not_raise(pair: Pair, seed: int) -> None:
    """Recorded packets that are changed, truncated, joined to trains, and sealed again with a valid ICRC."""
    dice = random.Random(seed)
    heard = record_mads(pair)
    target, outbox = pair.b.region(20_000), pair.a.region(20_000)
    spare = bytes(pair.b.region(b"mine" * 100).view)

    def work(ends: Connected) -> None:
        ends.right.post_recv([RecvWR(n, [sge(target, 0, 3000)]) for n in range(8)])
        for opcode in (*WROpcode.__members__.values(),)[:7]:
            length = 8 if "ATOMIC" in opcode.name else dice.choice([0, 5, 3000])
            wr = SendWR(1, opcode, [sge(outbox, 0, length)], remote_addr=target.addr & ~7, rkey=target.rkey)
            ends.left.post_send([wr])

    recorder = Connected(pair)
    work(recorder)
    pair.a.mux.gsi.send_mad(PATH, MAD)
    pair.settle()
    seen = [(path, datagram) for path, datagram, segment in pair.net.sent if path.remote == RIGHT]
    answers = [(path, datagram) for path, datagram, segment in pair.net.sent if path.remote == LEFT]
    for _ in range(150):
        ends = Connected(pair)
        if dice.random() < 0.5:
            work(ends)
        for _ in range(20):
            path, datagram = dice.choice(seen if dice.random() < 0.7 else answers)
            packet = bytearray(datagram[:-4])
            victim = ends.right if path.remote == RIGHT else ends.left
            if dice.random() < 0.9 and packet[7] != 1:
                packet[4:8] = struct.pack("!I", victim.qp_num)
            if dice.random() < 0.7:
                packet[8:12] = struct.pack("!I", (100 + dice.randrange(-3, 12)) & 0xFFFFFF | dice.getrandbits(1) << 31)
            for _ in range(dice.choice([0, 0, 1, 3])):
                packet[dice.randrange(len(packet))] = dice.getrandbits(8)
            if dice.random() < 0.2:
                del packet[dice.randrange(12, len(packet) + 1) :]
            if dice.random() < 0.1:
                packet[0] = dice.getrandbits(8)
            if dice.random() < 0.9 and len(packet) >= 12:
                packet = bytearray(sealed(bytes(packet), path))
            segment = 0
            if dice.random() < 0.2:
                segment = dice.choice([len(packet), 16, 17, 7, 1])
                packet = packet * dice.randrange(1, 5) + packet[: dice.randrange(len(packet))]
            pair.net.inject(path, bytes(packet), segment)
        pair.settle()
        ends.left_cq.poll(999)
        ends.right_cq.poll(999)
        ends.left.destroy()
        ends.right.destroy()
    assert bytes(pair.b.region(b"mine" * 100).view) == spare
    assert heard
    # Both hosts still work.
    fresh = Connected(pair)
    fresh.right.post_recv([RecvWR(1)])
    fresh.left.post_send([SendWR(1)])
    assert told(fresh.at_left()) == [(1, "SUCCESS")]
    assert fresh.left.state is QPState.RTS
