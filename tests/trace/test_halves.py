"""Packets of a connection: messages and their durations, trains, connections without a handshake, and bounds."""

from __future__ import annotations

import struct

import pytest

from rdmacm.address import Gid
from rdmacm.proto.cm.messages import LAP, SIDR_REP, SIDR_REQ, Path
from rdmacm.proto.frames import udp_frame
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import SaMad, SaMethod, SaStatus
from rdmacm.trace import registry
from rdmacm.trace.connection import Connection, Half
from rdmacm.trace.halves import MOST_SPANS
from rdmacm.trace.mermaid import mermaid
from rdmacm.trace.statistics import Durations, Series
from rdmacm.trace.text import diagram
from rdmacm.trace.verdicts import Judge
from support.traces import ID_A, ID_B, MTU, PSN_A, PSN_B, QPN_A, QPN_B, A, B, Wire, pcap, traced


def found(wire: Wire) -> list[Connection]:
    return traced(pcap(wire.frames))[0].found()


def halves(connection: Connection) -> tuple[Half, Half]:
    forth, back = connection.halves
    assert forth is not None
    assert back is not None
    return forth, back


def test_durations_of_messages() -> None:
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 3)
    wire.ack(1, PSN_A + 2)
    wire.read(0, PSN_A + 3, 2 * MTU)
    wire.responses(1, PSN_A + 3, 2)
    forth, back = halves(found(wire)[0])
    assert [(span.operation, span.octets, span.end and span.end - span.start) for span in forth.spans] == [
        ("WRITE", 3 * MTU, 3 * 10**6),
        ("READ", 2 * MTU, 2 * 10**6),
    ]
    assert (forth.round_trips.count, back.octets, forth.next_psn) == (2, 2 * MTU, PSN_A + 5)


def test_a_read_without_a_known_mtu_is_followed_by_anything() -> None:
    wire = Wire()
    wire.read(0, PSN_A, 5 * MTU)
    wire.send(0, PSN_A + 5)
    wire.responses(1, PSN_A, 5)
    wire.ack(1, PSN_A + 5)
    (connection,) = found(wire)
    forth, back = halves(connection)
    assert (forth.lost, forth.operations["READ"].octets, back.octets, connection.mtu) == (0, 5 * MTU, 5 * MTU, MTU)


def test_an_acknowledgement_that_is_asked_for_was_lost() -> None:
    def probe(psn: int) -> None:
        wire.packet(0, Opcode.RC_RDMA_WRITE_ONLY, psn, bytes(16))

    wire = Wire()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    probe(PSN_A)  # the other end may be gone
    wire.send(0, PSN_A + 1)
    wire.ack(1, PSN_A + 1)  # lost behind the capture
    probe(PSN_A)
    probe(PSN_A)
    wire.ack(1, PSN_A + 1)
    wire.send(0, PSN_A + 2)  # lost behind the capture
    probe(PSN_A + 1)
    wire.send(0, PSN_A + 2)  # for the same reason
    wire.ack(1, PSN_A + 2)
    wire.send(0, PSN_A + 3)
    wire.ack(1, PSN_A + 3, 1 << 5)
    probe(PSN_A + 2)  # the other end is not ready for it
    forth, back = halves(found(wire)[0])
    assert (forth.lost, forth.repeated, back.lost) == (2, 1, 0)


def test_halves_without_a_handshake_find_each_other() -> None:
    wire = Wire()
    # Both directions send before either acknowledges.
    wire.send(0, PSN_A)
    wire.send(1, PSN_B)
    wire.ack(1, PSN_A)
    wire.ack(0, PSN_B)
    (connection,) = found(wire)
    assert (connection.ends[0].qpn, connection.ends[1].qpn) == (QPN_A, QPN_B)
    assert [half.operations["SEND"].count for half in halves(connection)] == [1, 1]


def test_a_train_is_as_many_packets_as_it_has() -> None:
    wire, apart = Wire(), Wire()
    for each in (wire, apart):
        each.connect()
    apart.write(0, PSN_A, 4)
    apart.read(0, PSN_A + 4, 2 * MTU)
    apart.read(0, PSN_A + 6, 2 * MTU)
    bodies = [frame[42:] for _, frame in apart.frames[3:]]
    for train in (bodies[:1], bodies[1:4], bodies[4:]):
        wire.frame(udp_frame(A, B, 50000, 4791, b"".join(train)))
    forth, _ = halves(found(wire)[0])
    expected, _ = halves(found(apart)[0])
    assert (forth.packets, forth.octets, forth.next_psn) == (expected.packets, expected.octets, PSN_A + 8)
    assert [(span.operation, span.octets) for span in forth.outstanding] == [
        ("WRITE", 4 * MTU),
        ("READ", 2 * MTU),
        ("READ", 2 * MTU),
    ]


def test_packets_out_of_order_have_their_whole_size() -> None:
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 8)
    del wire.frames[5]
    wire.write(0, PSN_A, 8, first=2)
    wire.ack(1, PSN_A + 7)
    forth, _ = halves(found(wire)[0])
    assert (forth.octets, forth.operations["WRITE"].octets) == (13 * MTU, 8 * MTU)


def test_a_queue_pair_that_is_used_again_is_another_connection() -> None:
    wire = Wire()
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    wire.disconnect()
    wire.req(local_comm_id=0x77, starting_psn=9)
    wire.rep(local_comm_id=0x88, remote_comm_id=0x77, starting_psn=100)
    wire.send(0, 100)
    wire.ack(1, 100)
    first, second = found(wire)
    assert [halves(each)[0].operations["SEND"].count for each in (first, second)] == [1, 1]
    assert second.closed_by is None


def test_datagrams() -> None:
    wire = Wire()
    wire.cm(0, SIDR_REQ(0x01111C06, request_id=5, private_data=wire.request().private_data))
    wire.cm(1, SIDR_REP(5, 0, qpn=QPN_B, q_key=7))
    deth = struct.pack("!II", 7, QPN_A)
    for _ in range(3):
        wire.packet(0, Opcode.UD_SEND_ONLY, 0, deth + bytes(100))
    wire.packet(1, Opcode.UD_SEND_ONLY, 0, struct.pack("!II", 7, QPN_B) + bytes(50))
    (connection,) = found(wire)
    forth, back = halves(connection)
    assert (connection.kind, forth.octets, back.octets, connection.port) == ("UD", 300, 50, 7174)


def test_alternate_paths_are_shown() -> None:
    wire = Wire()
    wire.connect()
    message = LAP.loading(Path(Gid("fe80::1"), Gid("fe80::2")))
    message.local_comm_id, message.remote_comm_id = ID_A, ID_B
    wire.cm(0, message)
    assert [event.label for event in found(wire)[0].events] == ["REQ", "REP", "RTU", "LAP"]


def test_queries_to_the_subnet_administrator() -> None:
    def query(wire: Wire, side: int, tid: int, method: int, status: int = 0) -> None:
        mad = SaMad(method, Attribute.PATH_RECORD, tid, status=status, data=PathRecord(Gid(), Gid()).pack())
        wire.packet(side, Opcode.UD_SEND_ONLY, 0, struct.pack("!II", 0x80010000, 1) + mad.pack(), qpn=1)

    verdicts = []
    for statuses in ((SaStatus.OK,), (SaStatus.OK, SaStatus.NO_RECORDS), ()):
        wire = Wire()
        for tid in range(2):
            query(wire, 0, tid, SaMethod.GET)
        for tid, status in enumerate(statuses):
            query(wire, 1, tid, SaMethod.GET_RESP, status)
        tracer, _ = traced(pcap(wire.frames))
        (connection,) = tracer.found()
        verdict = Judge(tracer).verdict(connection)
        verdicts.append((connection.kind, verdict.level, verdict.rule))
    assert verdicts == [("SA", "ok", ""), ("SA", "failed", "R2"), ("SA", "failed", "R1")]


def test_diagrams() -> None:
    wire = Wire()
    wire.req()
    wire.connect()
    for number in range(100):
        wire.send(0, PSN_A + number)
        wire.ack(1, PSN_A + number)
    wire.ack(1, PSN_A + 100, 0x62)
    tracer, _ = traced(pcap(wire.frames))
    (connection,) = tracer.found()
    for columns in (80, 120):
        lines = diagram(connection, columns, plain=True)
        assert {len(line) for line in lines} == {columns}
        text = "\n".join(lines)
        assert text.isascii()
        words = ("REQ", "2 times", "REP", "RTU", "76 more messages", "NAK")
        assert [word for word in words if word not in text] == []
    drawn = mermaid(1, connection, Judge(tracer).verdict(connection))
    assert drawn.startswith("sequenceDiagram\n    participant A as 10.0.0.1:40000 QP 0x000011\n")
    assert "B-xA: " in drawn


# -- bounds --------------------------------------------------------------------------------------------------------


def test_what_is_kept_of_a_connection_is_bounded() -> None:
    wire = Wire()
    wire.connect()
    for number in range(3000):
        wire.send(0, PSN_A + 2 * number)  # each second one is missing
        wire.ack(1, PSN_A + 2 * number, 0x60 + number % 32)
        wire.req(local_comm_id=ID_A, starting_psn=PSN_B)
    (connection,) = found(wire)
    forth, _ = halves(connection)
    assert len(forth.spans) <= MOST_SPANS
    assert len(forth.outstanding) <= 1024
    assert len(forth.gaps) <= 64
    assert len(connection.events) <= 128
    assert len(forth.series.closed(forth.octets)) <= 65
    assert sum(forth.series.closed(forth.octets)) == forth.octets == 3000 * 64


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    for number in range(40):
        wire.req(local_comm_id=number + 1, local_qpn=number + 100)
        wire.packet(0, Opcode.RC_SEND_ONLY, 1, bytes(8), qpn=5000 + number)
    monkeypatch.setattr(registry, "MOST_CONNECTIONS", 50)
    tracer, _ = traced(pcap(wire.frames))
    assert (len(tracer.found()), tracer.connections.left_out) == (50, 30)


def test_replies_and_partitions_are_bounded() -> None:
    wire = Wire()
    wire.req()
    for number in range(200):
        wire.rep(local_comm_id=number + 1, local_qpn=number + 2)
        wire.pkey = 0x8000 | number
        wire.send(0, PSN_A + number, 8)
    tracer, _ = traced(pcap(wire.frames))
    assert len(tracer.connections.halves) < 20
    assert max(len(each.pkeys) for each in tracer.found()) <= 16


def test_series_become_wider() -> None:
    series, octets = Series(0), 0
    for now in (0, 500, 999, 1000, 10**6, 10**9, 10**18, 10**18 + 1):
        if now >= series.end:
            series.roll(now, octets)
        octets += 10
    assert sum(series.closed(octets)) == octets
    assert len(series.closed(octets)) <= 65


def test_percentiles() -> None:
    durations = Durations()
    assert (durations.mean, durations.percentile(0.5)) == (0, 0)
    for value in range(1, 1001):
        durations.add(value * 1000)
    durations.add(-5)
    assert (durations.count, durations.least, durations.most) == (1001, 0, 10**6)
    for part in (0.1, 0.5, 0.9, 0.99):
        assert abs(durations.percentile(part) - part * 10**6) <= 0.1 * part * 10**6


def test_datagrams_between_two_queue_pairs_of_one_host() -> None:
    wire = Wire(A, A)
    for _ in range(2):
        wire.packet(0, Opcode.UD_SEND_ONLY, 0, struct.pack("!II", 7, QPN_A) + bytes(100))
        wire.packet(1, Opcode.UD_SEND_ONLY, 0, struct.pack("!II", 7, QPN_B) + bytes(50))
    (connection,) = found(wire)
    forth, back = halves(connection)
    assert (forth.octets, back.octets, connection.ends[0].qpn, connection.ends[1].qpn) == (200, 100, QPN_A, QPN_B)


def test_a_connection_of_one_host_to_itself() -> None:
    wire = Wire(A, A)
    wire.connect()
    wire.write(0, PSN_A, 3)
    wire.ack(1, PSN_A + 2)
    wire.send(1, PSN_B)
    wire.ack(0, PSN_B)
    wire.disconnect(1)
    (connection,) = found(wire)
    assert [[*half.operations] for half in halves(connection)] == [["WRITE"], ["SEND"]]
    assert (connection.closed_by, [event.sender for event in connection.events]) == (1, [0, 1, 0, 1, 0])
