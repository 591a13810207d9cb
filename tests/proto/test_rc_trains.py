"""Trains of packets: how an engine forms them, and how it processes received ones."""

from __future__ import annotations

import random
import struct

from rdmacm.enums import WROpcode
from rdmacm.proto.engine import Datagram
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.work import RecvWork, SendWork
from support.rc import BASE, RKEY, TRAIN, Pair, packets, send, statuses, view
from support.rows import for_each

SIZE = 100_000
DATA = random.Random(4).randbytes(SIZE)


def cut(data: bytes, *sizes: int) -> list[memoryview]:
    """Cut data into pieces of these sizes, repeated."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(view(data[at : at + size]))
        at, turn = at + size, turn + 1
    return pieces


def works() -> list[SendWork]:
    return [
        send(1, DATA, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY),
        send(2, DATA[:30_001], WROpcode.RDMA_WRITE_WITH_IMM, remote_addr=BASE, rkey=RKEY, imm=5),
        SendWork(3, WROpcode.RDMA_READ, [view(bytes(SIZE))], remote_addr=BASE, rkey=RKEY),
        SendWork(4, WROpcode.SEND, cut(DATA[:40_000], 1000, 1024, 4096, 3, 9000)),
        *(send(number, DATA[number : number + 64]) for number in range(5, 100)),
    ]


def exchange(train: int, *, ipv6: bool = False, mtu: int = 1024) -> tuple[list[tuple[int, bytes]], list[Datagram]]:
    """All packets of some work requests, without ICRCs, and the datagrams that carried them."""
    pair = Pair(train=train, ipv6=ipv6, size=1 << 18, path_mtu=mtu)
    for number in range(100):
        pair.ends[1].post_recv(RecvWork(number, cut(bytes(50_000), 5000, 7)))
    for work in works():
        pair.ends[0].post_send(work)
    sent: list[Datagram] = []
    transmit = pair.transmit

    def record(source: int, datagram: Datagram) -> None:
        sent.append(datagram)
        transmit(source, datagram)

    pair.transmit = record  # type: ignore[method-assign]
    pair.run()
    assert statuses(pair.done[0]) == [(n, "SUCCESS") for n in range(1, 100)]
    assert pair.memory[1].bytes[:SIZE] == DATA
    assert not pair.ends[1].counters.dropped
    return pair.sent, sent


def requests(sent: list[tuple[int, bytes]]) -> list[bytes]:
    """The packets of end 0, with the AckReq bit cleared."""
    return [packet[:8] + b"\0" + packet[9:] for source, packet in sent if source == 0]


@for_each("ipv6", [False, True])
@for_each("mtu", [256, 1024, 4096])
def test_train_is_the_same_packets_with_an_icrc_each(mtu: int, ipv6: bool) -> None:
    alone, _ = exchange(0, mtu=mtu, ipv6=ipv6)
    joined, datagrams = exchange(TRAIN, mtu=mtu, ipv6=ipv6)  # every ICRC is checked on the way
    # With trains an ACK may cover more packets, which moves the AckReq bit. All else is the same.
    assert requests(joined) == requests(alone)
    assert len(datagrams) < len(joined) / (5 if mtu < 4096 else 3)


def test_train_fits_udp_segmentation() -> None:
    _, datagrams = exchange(TRAIN)
    for datagram in datagrams:
        buffers, segment = datagram
        cuts = packets(datagram)
        assert len(cuts) <= 64
        assert len(buffers) <= 1024
        assert sum(map(len, cuts)) <= TRAIN
        assert {len(packet) for packet in cuts[:-1]} <= {segment}
        assert len(cuts) == 1 or 0 < len(cuts[-1]) <= segment


def test_equal_small_messages_form_one_train() -> None:
    pair = Pair(train=TRAIN)
    for number in range(40):
        pair.ends[0].post_send(send(number, bytes(64)))
    pair.ends[0].post_send(send(40, bytes(20)))
    (datagram,) = pair.ends[0].datagrams(0.0, 1000, TRAIN)
    assert datagram[1] == 80
    assert [len(packet) for packet in packets(datagram)] == [80] * 40 + [36]


def test_train_stays_within_iov_max() -> None:
    pair = Pair(train=TRAIN)
    for number in range(100):
        pair.ends[0].post_send(SendWork(number, WROpcode.SEND, cut(bytes(64), 2)))
    for buffers, _ in pair.ends[0].datagrams(0.0, 1000, TRAIN):
        assert len(buffers) <= 1024


def test_train_length_follows_the_limit() -> None:
    pair = Pair(size=1 << 18, path_mtu=1024)
    pair.ends[0].post_send(send(1, DATA, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    longest = []
    for limit, train in [(30, TRAIN), (30, 4200), (10, 1500), (10, 0)]:
        found = pair.ends[0].datagrams(0.0, limit, train)
        assert sum(len(packets(datagram)) for datagram in found) == limit
        longest.append(max(len(packets(datagram)) for datagram in found))
        for datagram in found:
            pair.transmit(0, datagram)
    assert longest == [28, 4, 1, 1], "the first packet of the message is longer"
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert pair.memory[1].bytes[:SIZE] == DATA


def one_train(pair: Pair) -> tuple[bytearray, int, int]:
    """A train from the middle of a WRITE, after delivery of all before it: bytes, segment size, packets delivered."""
    pair.ends[0].post_send(send(1, DATA, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    first, second, *_ = pair.ends[0].datagrams(0.0, 1000, TRAIN)
    data = bytearray(b"".join(first[0]))
    arrived = len(packets(first))
    assert pair.ends[1].received(memoryview(data), first[1], 0.0) == arrived
    return bytearray(b"".join(second[0])), second[1], arrived


@for_each("broken", [0, 1, 7, 19])
@for_each("place", [4, 9, 13, 900, 1039])
def test_corrupted_packet_of_a_train_is_one_lost_packet(broken: int, place: int) -> None:
    pair = Pair(size=1 << 18, path_mtu=1024)
    data, segment, before = one_train(pair)
    data[broken * segment + place] ^= 0x10
    good = len(data) // segment
    accepted = pair.ends[1].received(memoryview(data), segment, 0.0)
    if place == 4:  # the ICRC does not cover it
        assert accepted == good
        return
    assert accepted == broken
    assert pair.ends[1].counters.dropped == {"icrc": 1, "sequence": good - broken - 1}
    end = (before + broken) * 1024
    assert pair.memory[1].bytes[:end] == DATA[:end]
    assert not any(pair.memory[1].bytes[end:])
    (nak,) = pair.wanted(1)
    assert struct.unpack_from("!I", nak, 8)[0] == pair.starts[0] + before + broken & 0xFFFFFF
    assert nak[12] == 0x60
    pair.deliver(0, nak)
    pair.run()
    assert pair.memory[1].bytes[:SIZE] == DATA
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]


def reseal(flow: Icrc, data: bytearray, segment: int, identifications: list[int]) -> None:
    for number, identification in enumerate(identifications):
        at = number * segment
        packet = data[at : at + segment - 4]
        data[at + segment - 4 : at + segment] = flow.seal([packet], identification)


@for_each(
    "identifications",
    [
        [0] * 20,
        [*range(9), *range(11)],  # two trains that GRO has joined
        list(range(500, 520)),
        [0xFFFE, 0xFFFF, *range(18)],
        random.Random(3).sample(range(1 << 16), 20),
    ],
)
def test_ip_identifications_of_a_train_are_found(identifications: list[int]) -> None:
    pair = Pair(size=1 << 18, path_mtu=1024)
    data, segment, before = one_train(pair)
    data = data[: 20 * segment]
    reseal(pair.flows[0], data, segment, identifications)
    assert pair.ends[1].received(memoryview(data), segment, 0.0) == 20
    end = (before + 20) * 1024
    assert pair.memory[1].bytes[:end] == DATA[:end]


def test_packet_for_another_qp_in_a_train_is_dropped() -> None:
    pair = Pair(size=1 << 18, path_mtu=1024)
    data, segment, _ = one_train(pair)
    data[5 * segment + 7] = 0x77  # the number of another queue pair
    reseal(pair.flows[0], data, segment, list(range(len(data) // segment)))
    assert pair.ends[1].received(memoryview(data), segment, 0.0) == 5
    assert pair.ends[1].counters.dropped["qpn"] == 1


@for_each("seed", range(12))
def test_long_messages_survive_loss(seed: int) -> None:
    pair = Pair(seed, 0.02, 0.02, 0.1, train=TRAIN, size=1 << 18, path_mtu=[256, 1024, 4096][seed % 3])
    pair.memory[1].bytes[SIZE : 2 * SIZE] = DATA[::-1]
    answer, inbox = bytearray(SIZE), cut(bytes(SIZE), 30_000, 11, 50_001)
    pair.ends[1].post_recv(RecvWork(1, inbox))
    pair.ends[0].post_send(send(1, DATA, WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, scatter_list(answer), remote_addr=BASE + SIZE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(3, WROpcode.SEND, cut(DATA, 777, 9000)))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]
    assert pair.memory[1].bytes[:SIZE] == DATA
    assert answer == DATA[::-1]
    assert b"".join(inbox) == DATA


def scatter_list(buffer: bytearray) -> list[memoryview]:
    whole = memoryview(buffer)
    return [whole[:40_000], whole[40_000:40_000], whole[40_000:40_003], whole[40_003:]]


def test_long_read_is_requested_in_half_windows() -> None:
    pair = Pair(train=TRAIN, size=1 << 20, path_mtu=4096)
    answer = bytearray(1 << 20)
    pair.memory[1].bytes[:] = random.Random(9).randbytes(1 << 20)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(answer)], remote_addr=BASE, rkey=RKEY))
    asked = [struct.unpack_from("!QII", request, 12) for request in pair.wanted(0)]
    assert asked == [(BASE, RKEY, 128 * 1024), (BASE + 128 * 1024, RKEY, 128 * 1024)]
    pair = Pair(train=TRAIN, size=1 << 20, path_mtu=4096, max_rd_atomic=1, max_dest_rd_atomic=1)
    pair.memory[1].bytes[:] = random.Random(9).randbytes(1 << 20)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(answer)], remote_addr=BASE, rkey=RKEY))
    pair.ends[0].post_send(SendWork(2, WROpcode.RDMA_READ, [view(bytes(10))], remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert answer == pair.memory[1].bytes
    assert sum(1 for source, packet in pair.sent if source == 0 and packet[0] == 0x0C) == 9


def test_long_message_requests_few_acks() -> None:
    pair = Pair(train=TRAIN, size=1 << 20, path_mtu=4096)
    pair.ends[0].post_send(send(1, bytes(1 << 20), WROpcode.RDMA_WRITE, remote_addr=BASE, rkey=RKEY))
    pair.run()
    assert statuses(pair.done[0]) == [(1, "SUCCESS")]
    assert sum(packet[8] >> 7 for source, packet in pair.sent if source == 0) == 8
