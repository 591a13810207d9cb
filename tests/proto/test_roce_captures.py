"""Packets captured from Linux round-trip through the codec and have a valid ICRC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rdmacm.proto.roce import opcodes
from rdmacm.proto.roce.headers import AethType, peek
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from support.pcap import Datagram, frames, roce
from support.roce_packets import RocePacket, pad_count
from support.roce_vectors import VECTORS
from support.rows import for_each

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
FILES = sorted(CAPTURES.glob("*.pcap*"))
#: Size of a RoCE packet with a MAD, the segment size of the captures made with UDP_SEGMENT.
MAD = 12 + 8 + 256 + 4
MTU = 1024

files = for_each("path", FILES, ids=[path.name for path in FILES])


def packets(path: Path) -> list[tuple[Datagram, bytes, int]]:
    """Datagrams with their payloads and IP identifications; trains are split into their packets."""
    found = []
    for datagram in roce(path):
        if path.stem.endswith("gso") and len(datagram.payload) > MAD:
            for i in range(len(datagram.payload) // MAD):
                cut = datagram.payload[i * MAD : (i + 1) * MAD]
                found.append((datagram, cut, 0 if len(datagram.source) == 16 else datagram.identification + i))
        else:
            found.append((datagram, datagram.payload, datagram.identification))
    return found


def flow_of(datagram: Datagram) -> Icrc:
    return Icrc(datagram.source, datagram.destination, datagram.sport)


@files
def test_every_packet_round_trips(path: Path) -> None:
    found = packets(path)
    assert found
    for datagram, data, identification in found:
        packet = RocePacket.unpack(data[:-4])
        bth = packet.bth
        assert packet.pack() == data[:-4]
        assert peek(data) == (bth.opcode, bth.pad_cnt, bth.dest_qpn, bth.ack_req, bth.psn)
        flow = flow_of(datagram)
        if bth.opcode == Opcode.RC_FLUSH:  # rxe covers it twice
            assert flow.seal_twice(data[:-4], identification) == data[-4:]
            assert flow.solve_twice(memoryview(data)) == identification
            continue
        assert flow.seal([data[:-4]], identification) == data[-4:]
        assert flow.check([data], identification)
        assert flow.solve([data]) == identification


@files
def test_linux_never_sets_reserved_fields(path: Path) -> None:
    for _, data, _ in packets(path):
        packet = RocePacket.unpack(data[:-4])
        bth = packet.bth
        assert (bth.tver, bth.pkey, bth.migreq, bth.fecn, bth.becn, bth.resv6, bth.resv7) == (0, 0xFFFF, *[0] * 5)
        assert bth.pad_cnt == pad_count(len(packet.payload))
        assert not any(data[len(data) - 4 - bth.pad_cnt : -4])
        if not opcodes.HAS_PAYLOAD[bth.opcode]:
            assert not packet.payload
        if bth.opcode not in (Opcode.UD_SEND_ONLY, Opcode.UD_SEND_ONLY_WITH_IMMEDIATE):
            if not opcodes.IS_END[bth.opcode]:
                assert len(packet.payload) == MTU
            elif not opcodes.IS_START[bth.opcode]:
                assert 0 < len(packet.payload) <= MTU
        if packet.aeth and packet.aeth.type is AethType.ACK:
            assert packet.aeth.credits is None


def test_captures_cover_all_but_the_listed_opcodes() -> None:
    seen = {data[0] for path in FILES for _, data, _ in packets(path)}
    send_with_immediate = {Opcode.RC_SEND_LAST_WITH_IMMEDIATE, Opcode.RC_SEND_ONLY_WITH_IMMEDIATE}
    invalidate = {Opcode.RC_SEND_LAST_WITH_INVALIDATE, Opcode.RC_SEND_ONLY_WITH_INVALIDATE}
    rest = {Opcode.RC_RDMA_WRITE_LAST_WITH_IMMEDIATE}
    xrc = {each for each in Opcode if each.name.startswith("XRC")}  # rdma_rxe does not have it
    assert set(Opcode) - seen == send_with_immediate | invalidate | rest | xrc


def test_captures_have_nonzero_ip_identifications() -> None:
    found = {identification for path in FILES for _, _, identification in packets(path)}
    assert len(found) > 300
    assert {0, 1} <= found


@files
def test_capture_reader_skips_nothing(path: Path) -> None:
    assert all(len(frame) >= 14 for _, frame in frames(path))


@pytest.fixture(scope="module")
def scapy() -> Any:
    reason = "scapy is not installed, and these tests compare with it"
    contrib = pytest.importorskip("scapy.contrib.roce", reason=reason)
    inet, inet6 = pytest.importorskip("scapy.layers.inet"), pytest.importorskip("scapy.layers.inet6")
    return lambda data: (inet.IP if data[0] >> 4 == 4 else inet6.IPv6)(data)[contrib.BTH]


class TestScapy:
    """Comparison with scapy, if it is installed."""

    def test_headers_match_scapy(self, scapy: Any) -> None:
        for vector in VECTORS:
            theirs, ours = scapy(vector.data), RocePacket.unpack(vector.body).bth
            assert (theirs.opcode, theirs.solicited, theirs.migreq, theirs.padcount, theirs.version, theirs.pkey) == (
                *(ours.opcode, ours.se, ours.migreq, ours.pad_cnt, ours.tver, ours.pkey),
            ), vector.name
            assert (theirs.fecn, theirs.becn, theirs.dqpn, theirs.ackreq, theirs.psn) == (
                *(ours.fecn, ours.becn, ours.dest_qpn, ours.ack_req, ours.psn),
            ), vector.name

    def test_icrc_matches_scapy(self, scapy: Any) -> None:
        for vector in VECTORS:
            theirs = scapy(vector.data)
            theirs.icrc = None
            datagram = vector.datagram
            ours = flow_of(datagram).seal([vector.body], datagram.identification)
            assert bytes(theirs.underlayer.underlayer)[-4:] == ours, vector.name
