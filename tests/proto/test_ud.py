"""The engine of datagram queue pairs: packets to the byte, checks of what arrives, completions."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rdmacm.enums import WCStatus, WROpcode
from rdmacm.proto.constants import GRH_LENGTH, OWN_QKEY
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.grh import GRH, NEXT_HEADER_UDP
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.roce.ud import NO_RECEIVE, TOO_SHORT, UdEngine, UdSend, flow_between
from rdmacm.proto.wire import WireError
from rdmacm.proto.work import WC, RecvWork, SendWork
from rdmacm.soft.device.memory import INACCESSIBLE
from rdmacm.soft.device.shared_receive_queue import PythonReceives
from support.pcap import Datagram, roce
from support.roce_packets import RocePacket
from support.roce_vectors import VECTORS
from support.ud import make_ud

QKEY = 0x01234567
CAPTURES = Path(__file__).parent.parent / "data" / "captures"
ENDS = {
    "ipv4": (bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2))),
    "ipv6": (bytes(15) + b"\1", b"\xfd" + bytes(14) + b"\2"),
}
PORT = 50_000


def captured() -> list[Datagram]:
    """The datagrams of udaddy, without the messages of the connection managers."""
    return [
        each for each in roce(CAPTURES / "rxe-udaddy.pcap") if RocePacket.unpack(each.payload[:-4]).bth.dest_qpn > 1
    ]


def view(data: bytes | int) -> memoryview:
    return memoryview(bytearray(data))


def engine(qpn: int = 0x15, *, qkey: int = QKEY) -> UdEngine[str]:
    made: UdEngine[str] = make_ud(qpn)
    made.qkey = qkey
    return made


def make_shared(one: UdEngine[str]) -> PythonReceives:
    """A shared receive queue for engines like this one."""
    if isinstance(one, UdEngine):
        return PythonReceives(64)
    assert compiled is not None
    return cast("PythonReceives", compiled.SharedReceives(64, 32, compiled.Regions(), None, None))


def taken(one: UdEngine[str]) -> list[WC]:
    found = one.completed[:]
    one.completed.clear()
    return found


class Link:
    """Two engines and the way from the first to the second."""

    def __init__(self, family: str = "ipv4") -> None:
        self.left, self.right = engine(0x16), engine(0x15)
        self.source, self.destination = ENDS[family]
        self.icrc = icrc_between(self.source, self.destination, PORT)
        self.flow = flow_between(self.source, self.destination, PORT)

    def post(self, data: bytes = b"hello", **more: object) -> None:
        changes = {"wr_id": 1, "opcode": WROpcode.SEND, "segments": (view(data),), **more}
        qkey = changes.pop("qkey", QKEY)
        assert isinstance(qkey, int)
        self.left.post_send(UdSend(SendWork(**changes), "way", self.icrc, 0x15, qkey))  # type: ignore[arg-type]

    def packets(self, limit: int = 100) -> list[bytes]:
        return [b"".join(bytes(piece) for piece in pieces) for _, pieces, _ in self.left.datagrams(limit, 0)]

    def deliver(self, packet: bytes, segment: int = 0) -> int:
        return self.right.received(memoryview(packet), segment, self.flow)

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.right.counters.dropped)

    def resealed(self, packet: bytes, at: int, *values: int) -> bytes:
        """The packet with other bytes from ``at`` on, and the right ICRC."""
        body = packet[:at] + bytes(values) + packet[at + len(values) : -4]
        return body + self.icrc.seal([body])


@pytest.mark.parametrize("name", ["ud_send_only", "ud_send_imm"])
def test_packet_matches_scapy_bytes(name: str) -> None:
    vector = next(each for each in VECTORS if each.name == name)
    packet, datagram = vector.packet, vector.datagram
    assert packet.deth is not None
    sender = engine(packet.deth.src_qpn)
    sender.psn = packet.bth.psn
    imm = int.from_bytes(packet.imm_dt.data, "big") if packet.imm_dt else 0
    work = SendWork(
        1, WROpcode.SEND_WITH_IMM if packet.imm_dt else WROpcode.SEND, [view(bytes(packet.payload))], imm=imm
    )
    icrc = icrc_between(datagram.source, datagram.destination, datagram.sport)
    sender.post_send(UdSend(work, "way", icrc, packet.bth.dest_qpn, packet.deth.qkey))
    ((route, pieces, segment),) = sender.datagrams(10, 65_507)
    assert (route, segment) == ("way", 0)
    assert b"".join(map(bytes, pieces)) == datagram.payload


def test_packets_of_udaddy_are_received_and_made_again() -> None:
    found = captured()
    assert len(found) == 4
    for datagram in found:
        packet = RocePacket.unpack(datagram.payload[:-4])
        assert packet.deth is not None
        assert packet.imm_dt is not None
        end = engine(packet.bth.dest_qpn)
        buffer = view(200)
        end.post_recv(RecvWork(7, [buffer]))
        flow = flow_between(datagram.source, datagram.destination, datagram.sport)
        assert end.received(memoryview(datagram.payload), 0, flow) == 1
        (wc,) = taken(end)
        assert (wc.wr_id, wc.status, wc.byte_len, wc.has_grh) == (7, WCStatus.SUCCESS, 140, True)
        assert (wc.src_qp, wc.imm_data) == (packet.deth.src_qpn, packet.deth.src_qpn)
        assert bytes(buffer[40:140]) == bytes(packet.payload)
        assert bytes(buffer[20:40]) == datagram.header[:20], "the IP header as it was on the wire"
        assert not any(buffer[:20])


@pytest.mark.parametrize("family", ENDS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 1023, 4096])
def test_message_arrives_with_the_addresses_before_it(family: str, size: int) -> None:
    link = Link(family)
    data, buffer = random.Random(size).randbytes(size), view(5000)
    link.right.post_recv(RecvWork(2, [buffer[:30], buffer[30:47], buffer[47:]]))
    link.post(data, solicited=True, segments=(view(data[:1]), view(data[1:])))
    (packet,) = link.packets()
    assert link.deliver(packet) == 1
    (sent,), (wc,) = taken(link.left), taken(link.right)
    assert (sent.status, sent.byte_len) == (WCStatus.SUCCESS, size)
    assert (wc.byte_len, wc.src_qp, wc.solicited, wc.imm_data) == (GRH_LENGTH + size, 0x16, True, None)
    assert bytes(buffer[40 : 40 + size]) == data
    grh = GRH.unpack(buffer)
    assert (grh.sgid.ip, grh.dgid.ip) == (link.source, link.destination)
    assert (grh.version, grh.next_hdr) == (4 if family == "ipv4" else 6, NEXT_HEADER_UDP)
    assert grh.paylen == 8 + len(packet)


def test_psn_counts_and_wraps() -> None:
    link = Link()
    link.left.psn = 0xFFFFFF
    link.post()
    link.post()
    assert [RocePacket.unpack(packet[:-4]).bth.psn for packet in link.packets()] == [0xFFFFFF, 0]


def test_limit_of_a_turn() -> None:
    link = Link()
    for _ in range(5):
        link.post()
    assert [len(link.packets(2)) for _ in range(4)] == [2, 2, 1, 0]


def test_q_key_with_its_highest_bit_stands_for_the_queue_pairs_own() -> None:
    link = Link()
    link.left.qkey = 0x42
    link.post(qkey=OWN_QKEY | 0x80010000)
    packet = RocePacket.unpack(link.packets()[0][:-4])
    assert packet.deth is not None
    assert packet.deth.qkey == 0x42


def test_packets_to_one_place_are_a_train_whose_last_may_be_shorter() -> None:
    link = Link()
    for data in (bytes(8), b"12345678", b"1234", bytes(20), bytes(8), bytes(8), bytes(8)):
        link.post(data)
    link.left.post_send(UdSend(SendWork(1, WROpcode.SEND, [view(8)]), "another way", link.icrc, 0x15, QKEY))
    found = link.left.datagrams(100, 100)
    assert [(way, segment) for way, _, segment in found] == [
        ("way", 32),
        ("way", 44),
        ("way", 32),
        ("another way", 0),
    ]
    buffer = view(100)
    numbers = []
    for _, pieces, segment in found:
        train = b"".join(map(bytes, pieces))
        for number, start in enumerate(range(0, len(train), segment or len(train))):
            packet = train[start : start + (segment or len(train))]
            assert link.icrc.check([packet], number), "the identification counts"
            link.right.post_recv(RecvWork(1, [buffer]))
            assert link.deliver(packet) == 1
            numbers.append(RocePacket.unpack(packet[:-4]).bth.psn)
            assert GRH.unpack(buffer).identification == number
    assert numbers == list(range(8))


def test_train_is_received_packet_by_packet() -> None:
    link = Link()
    for number in range(3):
        link.right.post_recv(RecvWork(number, [view(100)]))
        link.post(bytes(8) if number < 2 else b"end!")
    packets = link.packets()
    assert link.deliver(b"".join(packets), len(packets[0])) == 3
    assert [wc.byte_len for wc in taken(link.right)] == [48, 48, 44]


# -- what is dropped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "values", "reason"),
    [
        (0, [Opcode.RC_SEND_ONLY], "opcode"),
        (0, [Opcode.UC_SEND_ONLY], "opcode"),
        (0, [0x66], "opcode"),
        (0, [0xFF], "opcode"),
        (1, [0x01], "version"),
        (1, [0x0F], "version"),
        (2, [0x7F, 0xFE], "pkey"),
        (2, [0x80, 0x00], "pkey"),
        (12, [0, 0, 0, 0], "qkey"),
        (12, [0x80, 0x01, 0, 0], "qkey"),
    ],
)
def test_packet_that_is_not_for_this_queue_pair(at: int, values: list[int], reason: str) -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(100)]))
    link.post(b"four")
    (packet,) = link.packets()
    assert link.deliver(link.resealed(packet, at, *values)) == 0
    assert link.dropped == {reason: 1}
    assert link.deliver(link.resealed(packet, 2, 0x7F, 0xFF)) == 1, "a limited member of the partition"
    assert not link.left.failed


def test_damaged_packet() -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(100)]))
    link.post(b"four")
    (packet,) = link.packets()
    for at in range(20, len(packet)):
        assert link.deliver(packet[:at] + bytes((packet[at] ^ 0x10,)) + packet[at + 1 :]) == 0
    assert link.dropped == {"icrc": len(packet) - 20}
    assert not taken(link.right)


def test_packets_of_wrong_length() -> None:
    link = Link()
    link.right.post_recv(RecvWork(1, [view(10_000)]))
    link.right.max_payload = 256
    link.post(bytes(260), opcode=WROpcode.SEND_WITH_IMM)
    (packet,) = link.packets()
    dropped = 0
    for length in (0, 12, 16, 20, 23, 24, 27):
        assert link.deliver(packet[:length]) == 0
        dropped += 1
    assert link.deliver(packet) == 0, "longer than the MTU"
    padded = link.resealed(packet[:28], 1, 0x30)  # three pad bytes, and none there
    assert link.deliver(padded) == 0
    assert link.dropped == {"length": dropped + 2}
    link.post(bytes(256), opcode=WROpcode.SEND_WITH_IMM)
    assert link.deliver(link.packets()[0]) == 1


def test_message_without_a_receive_is_dropped_and_the_next_one_arrives() -> None:
    link = Link()
    link.post(b"lost")
    assert link.deliver(link.packets()[0]) == 0
    buffer = view(44)
    link.right.post_recv(RecvWork(1, [buffer]))
    link.post(b"here")
    assert link.deliver(link.packets()[0]) == 1
    assert bytes(buffer[40:]) == b"here"
    assert link.dropped == {NO_RECEIVE: 1}


@pytest.mark.parametrize("room", [0, 4, 39, 40, 43])
def test_receive_that_is_too_short_stays_posted(room: int) -> None:
    link = Link()
    buffer = view(b"?" * room)
    link.right.post_recv(RecvWork(1, [buffer]))
    link.post(b"four")
    assert link.deliver(link.packets()[0]) == 0
    assert (link.dropped, taken(link.right), bytes(buffer)) == ({TOO_SHORT: 1}, [], b"?" * room)
    link.right.flush()
    assert [wc.status for wc in taken(link.right)] == [WCStatus.WR_FLUSH_ERR]


# -- errors ---------------------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_read_flushes_the_sends_only() -> None:
    link = Link()
    link.post(wr_id=1)
    link.post(wr_id=2, segments=INACCESSIBLE)
    link.post(wr_id=3)
    assert len(link.packets()) == 1
    link.post(wr_id=4)
    assert [(wc.wr_id, wc.status) for wc in taken(link.left)] == [
        (1, WCStatus.SUCCESS),
        (2, WCStatus.LOC_PROT_ERR),
        (3, WCStatus.WR_FLUSH_ERR),
        (4, WCStatus.WR_FLUSH_ERR),
    ]
    assert link.left.send_failed
    assert not link.left.failed
    link.left.resume()
    link.post(wr_id=5)
    assert len(link.packets()) == 1


def test_memory_that_cannot_be_written_ends_the_queue_pair() -> None:
    link = Link()
    for number, segments in enumerate((INACCESSIBLE, [view(100)])):
        link.right.post_recv(RecvWork(number, segments))
    link.post()
    assert link.deliver(link.packets()[0]) == 1
    assert link.right.failed
    link.right.post_recv(RecvWork(2, [view(100)]))
    assert [(wc.wr_id, wc.status) for wc in taken(link.right)] == [
        (0, WCStatus.LOC_PROT_ERR),
        (1, WCStatus.WR_FLUSH_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]


def test_packets_after_the_end_are_dropped() -> None:
    """Those of the train that has ended it as well, and a shared receive queue keeps its receives."""
    link = Link()
    queue = make_shared(link.right)
    for number, segments in enumerate((INACCESSIBLE, [view(100)])):
        queue.post_work(RecvWork(number, segments))
    link.right = make_ud(0x15, queue)
    link.right.qkey = QKEY
    for _ in range(3):
        link.post(b"four")
    packets = link.packets()
    assert link.deliver(b"".join(packets), len(packets[0])) == 1
    assert [(wc.wr_id, wc.status) for wc in taken(link.right)] == [(0, WCStatus.LOC_PROT_ERR)]
    assert link.dropped == {"state": 2}
    assert len(queue) == 1


def test_shared_receive_queue_gives_those_that_have_room() -> None:
    link = Link()
    queue = make_shared(link.right)
    link.right = make_ud(0x15, queue)
    link.right.qkey = QKEY
    queue.limit = 1
    buffers = [view(44), view(45)]
    for number, buffer in enumerate(buffers):
        queue.post_work(RecvWork(number, [buffer[:20], buffer[20:]]))
    for data in (b"five5", b"four", b"five5", b"none"):
        link.post(data)
    assert [link.deliver(packet) for packet in link.packets()] == [0, 1, 1, 0]
    assert [(wc.wr_id, wc.byte_len) for wc in taken(link.right)] == [(0, 44), (1, 45)]
    assert [bytes(buffer[40:]) for buffer in buffers] == [b"four", b"five5"]
    assert link.dropped == {TOO_SHORT: 1, NO_RECEIVE: 1}
    assert queue.take_limit_reached()
    link.right.flush()
    assert not taken(link.right)


def test_packet_with_congestion_bits_arrives() -> None:
    """Those of FECN and BECN, which the ICRC does not cover."""
    link = Link()
    link.post(b"four")
    (packet,) = link.packets()
    for bits in (0x80, 0x40, 0xFF):
        link.right.post_recv(RecvWork(1, [view(100)]))
        assert link.deliver(packet[:4] + bytes((bits,)) + packet[5:]) == 1
    (buffer,) = [view(100)]
    link.right.post_recv(RecvWork(1, [buffer]))
    assert link.deliver(packet[:-4] + link.icrc.seal([packet[:-4]], 0x1234)) == 1
    assert GRH.unpack(buffer).identification == 0x1234


def test_paused_engine_sends_nothing() -> None:
    link = Link()
    link.left.pause()
    link.post()
    assert (link.left.has_pending, link.packets()) == (False, [])
    link.left.resume()
    assert link.left.has_pending
    assert len(link.packets()) == 1


# -- the header before the payload ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENDS)
def test_header_round_trips(family: str) -> None:
    more: dict[str, Any] = {"identification": 0x1234} if family == "ipv4" else {"flow_label": 0xABCDE}
    grh = replace(GRH.of_packet(*ENDS[family], 100), traffic_class=0x2E, hop_limit=7, **more)
    assert GRH.unpack(grh.pack()) == grh
    assert len(grh.pack()) == GRH_LENGTH


def test_ipv4_header_counts_after_bytes_that_look_like_ipv6() -> None:
    """The 20 bytes before it may be anything; a right check sum decides."""
    grh = GRH.of_packet(*ENDS["ipv4"], 100)
    packed = b"\x60" + grh.pack()[1:]
    assert GRH.unpack(packed) == grh
    assert GRH.unpack(packed[:30] + b"\0\0" + packed[32:]).version == 6


def test_checksum_of_an_ipv4_header_whose_carries_make_another_one() -> None:
    def header(word: int) -> bytes:
        """That of a message from 10.0 and these two bytes."""
        link = Link()
        source = bytes((10, 0)) + word.to_bytes(2, "big")
        link.icrc = icrc_between(source, link.destination, PORT)
        link.post()
        buffer = bytearray(100)
        link.right.post_recv(RecvWork(1, [memoryview(buffer)]))
        (packet,) = link.packets()
        link.right.received(memoryview(packet), 0, flow_between(source, link.destination, PORT), (0, 255))
        return bytes(buffer[20:40])

    words = struct.unpack("!10H", header(0))
    words = struct.unpack("!10H", header(words[5] + 1))
    assert sum(words) - words[5] == 0x1FFFF
    assert words[5] == 0xFFFE


@pytest.mark.parametrize("data", [bytes(40), b"\x45" + bytes(39), b"\x60" * 39, b""])
def test_bytes_that_are_no_header(data: bytes) -> None:
    with pytest.raises(WireError):
        GRH.unpack(data)
