"""ICMP errors at the sockets: reports of requests reach the process that sent them, and no error loses a packet."""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.soft.wire.base import Undelivered
from rdmacm.soft.wire.udp import UdpWire
from support.clock import eventually
from support.icmp import HOST_UNREACHABLE, PORT_UNREACHABLE, TOO_LONG, gsi_packet, needs_raw_sockets, send_error
from support.processes import MakeWorker, Server, Worker, linux_only
from support.wires import collect, packed, packet, path, sealed, taken

pytestmark = [linux_only, needs_raw_sockets]

HERE = path("127.0.0.1", "127.0.0.1")


@pytest.fixture
def reports() -> list[Undelivered]:
    """The reports of :func:`wire`."""
    return []


@pytest.fixture
def wire(port: int, reports: list[Undelivered]) -> Iterator[UdpWire]:
    """A wire of this process: the first."""
    wire = UdpWire(port=port)
    wire.on_undelivered = reports.append
    wire.open()
    yield wire
    wire.close()


def request(slot: int, attribute: int = AttributeId.REQ) -> bytes:
    """A REQ or SIDR_REQ of the process in a slot."""
    header = struct.pack("!BBBBHHQHHI", 1, 7, 2, 3, 0, 0, 0x1234, attribute, 0, 0)
    return gsi_packet((header + struct.pack("!IIQ", slot << 20 | 5, 0, 0x106_0001)).ljust(256, b"\0"))


def read_all(wire: UdpWire) -> int:
    """Receive until there is nothing to do; return how many calls that took."""
    calls = 0
    while select.select(wire.filenos(), [], [], 0)[0]:
        assert not wire.receive()
        calls += 1
        assert calls < 10_000, "the wire stays readable"
    return calls


def joins(wire: UdpWire, worker: Worker) -> int:
    worker.begin(Server.open)
    while not worker.control.poll():
        wire.receive()
    worker.slot = worker.result()
    return worker.slot


class TestReports:
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    @pytest.mark.parametrize("attribute", [AttributeId.REQ, AttributeId.SIDR_REQ])
    @pytest.mark.parametrize(
        ("error", "code"), [(PORT_UNREACHABLE, errno.ECONNREFUSED), (HOST_UNREACHABLE, errno.EHOSTUNREACH)]
    )
    def test_report_of_a_request(
        self,
        wire: UdpWire,
        reports: list[Undelivered],
        host: str,
        attribute: int,
        error: dict[int, tuple[int, int]],
        code: int,
    ) -> None:
        other = "127.0.0.9" if host == "127.0.0.1" else "fd00::9"
        sent = request(wire.slot, attribute)
        send_error(host, other, wire.port, sent, error=error)
        read_all(wire)
        (report,) = reports
        assert sent.startswith(report.quote)
        assert report[1:] == (packed(other), code, packed(host))
        assert wire.counters == {"undelivered": 1}

    @pytest.mark.parametrize("length", [0, 1, 8, 20, 44, 59])
    def test_short_quote_is_ignored(self, wire: UdpWire, reports: list[Undelivered], length: int) -> None:
        send_error("127.0.0.1", "127.0.0.9", wire.port, request(wire.slot)[:length])
        read_all(wire)
        assert not reports
        assert wire.counters == {"undelivered": 1, "undelivered_ignored": 1}

    def test_reports_of_other_packets_are_ignored(self, wire: UdpWire, reports: list[Undelivered]) -> None:
        others = [
            request(wire.slot, AttributeId.REP),
            request(wire.slot, AttributeId.RTU),
            packet(wire.slot << 12 | 5, bytes(256)),
            gsi_packet(bytes(256)),
        ]
        for other in others:
            send_error("127.0.0.1", "127.0.0.9", wire.port, other)
        send_error("127.0.0.1", "127.0.0.9", wire.port, request(wire.slot), error=TOO_LONG)
        read_all(wire)
        assert not reports
        assert wire.counters == {"undelivered": 5, "undelivered_ignored": 5}


class TestNothingIsLost:
    @pytest.mark.parametrize("trains", [False, True])
    def test_packets_sent_after_an_error_arrive(self, wire: UdpWire, trains: bool) -> None:
        """The kernel reports an error by failing the next sendmsg(2), which then sends nothing."""
        route, got = wire.route(HERE), 0
        bodies = [packet(wire.slot << 12 | 5, bytes([n]) * 100, n) for n in range(4)]
        segment = len(bodies[0]) + 4 if trains and wire.can_segment() else 0
        for count in range(50):
            for last in range(8):  # the error of any socket of the group
                send_error("127.0.0.1", f"127.0.{count}.{last}", wire.port, request(wire.slot, AttributeId.REP))
            if segment:
                assert wire.send(route, sealed(wire, route, bodies), segment)
            else:
                for data in sealed(wire, route, bodies[:1]) * 4:
                    assert wire.send(route, (data,))
            got += len(collect(wire, 4))
        assert got == 200
        read_all(wire)
        assert wire.counters == {"undelivered": 400, "undelivered_ignored": 400}

    def test_train_is_still_sent_as_a_train(self, wire: UdpWire) -> None:
        if not wire.can_segment():
            pytest.skip("no trains on this system")
        route = wire.route(HERE)
        train = sealed(wire, route, [packet(wire.slot << 12 | 5, bytes(100), n) for n in range(4)])
        sock = wire._out.sockets[0]
        assert sock is not None
        for last in range(32):
            send_error("127.0.0.1", f"127.0.0.{last}", wire.port, request(wire.slot), error=TOO_LONG)
            send_error("127.0.0.1", f"127.0.0.{last}", wire.port, request(wire.slot), error={4: (3, 2)})
        assert wire.send(route, train, len(train[0]))
        assert not wire.counters["trains_cut"]

    def test_flood_is_read_bit_by_bit(self, wire: UdpWire, reports: list[Undelivered]) -> None:
        route = wire.route(HERE)
        for count in range(1000):
            send_error("127.0.0.1", f"127.0.{count >> 8}.{count & 255}", wire.port, request(wire.slot))
        (data,) = sealed(wire, route, [packet(wire.slot << 12 | 5, b"data")])
        for _ in range(10):
            assert wire.send(route, (data,))
        got = calls = 0
        while got < 10:
            before = wire.counters["undelivered"]
            got += len(taken(wire))
            assert wire.counters["undelivered"] - before <= 64, "32 of each socket: of the slot's, and of slot 0's"
            calls += 1
        assert calls < 30
        assert len(reports) < 1000, "packets come before the last report"
        read_all(wire)
        assert len(reports) == 1000


class TestGroup:
    def test_reports_reach_the_sender_whichever_socket_gets_them(
        self, wire: UdpWire, reports: list[Undelivered], worker: MakeWorker
    ) -> None:
        """The kernel chooses a socket of the group by a hash of the addresses."""
        members = [worker(), worker()]
        for member in members:
            joins(wire, member)
        hosts = [f"127.0.0.{last}" for last in range(2, 102)]
        for host in hosts:
            send_error("127.0.0.1", host, wire.port, request(wire.slot))

        def all_arrived() -> bool:
            wire.receive()
            return len(reports) >= len(hosts)

        eventually(all_arrived, reports)
        assert {report.destination for report in reports} == set(map(packed, hosts))
        assert {report[2:] for report in reports} == {(errno.ECONNREFUSED, packed("127.0.0.1"))}
        forwarded = [member(Server.counters).get("forwarded", 0) for member in members]
        assert all(forwarded)
        read_all(wire)
        assert len(reports) == len(hosts)

    def test_report_for_no_process(self, wire: UdpWire, reports: list[Undelivered]) -> None:
        send_error("127.0.0.1", "127.0.0.9", wire.port, request(wire.slot % 4095 + 1))
        read_all(wire)
        assert not reports
        assert wire.counters == {"undelivered": 1, "stray": 1}

    def test_process_that_leaves_requests_to_others_reads_reports(
        self, wire: UdpWire, reports: list[Undelivered]
    ) -> None:
        wire._leave_requests(True)
        wire.send(wire.route(HERE), (request(0), bytes(4)))
        hosts = [f"127.0.0.{last}" for last in range(2, 34)]
        for host in hosts:
            send_error("127.0.0.1", host, wire.port, request(wire.slot))
        read_all(wire)
        assert len(reports) == len(hosts)
        assert wire.resume_requests(), "the request still waits"
        assert len(collect(wire, 1)) == 1

    def test_new_owner_of_a_slot_gets_no_old_errors(self, wire: UdpWire, worker: MakeWorker) -> None:
        member = worker()
        slot = joins(wire, member)
        member.kill()
        for last in range(64):
            send_error("127.0.0.1", f"127.0.0.{last}", wire.port, request(slot))
        wire.send(wire.route(HERE), (packet(slot << 12 | 5, b"stale"), bytes(4)))
        read_all(wire)
        assert 0 < wire.counters["stray"] < 64, "the others are in the sockets that nobody reads"
        heir = worker()
        assert joins(wire, heir) == slot
        wire.send(wire.route(HERE), (packet(slot << 12 | 5, b"fresh"), bytes(4)))
        (got,) = heir.collect(1)
        assert got[0][12:-4] == b"fresh"
        assert not heir(Server.counters)


class Refusing(socket.socket):
    """Sends nothing."""

    calls = 0

    def sendmsg(self, *_: object) -> int:
        self.calls += 1
        raise OSError(errno.EHOSTUNREACH, "")


@pytest.fixture
def refusing(wire: UdpWire) -> Iterator[Refusing]:
    """The socket that the wire sends from."""
    before = wire._out.sockets[0]
    with Refusing(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        wire._out.sockets[0] = sock
        yield sock
        wire._out.sockets[0] = before


def test_system_that_reports_nothing(
    wire: UdpWire, refusing: Refusing, reports: list[Undelivered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmacm.soft.wire.sockets.REPORTS_ERRORS", False)
    assert not wire.send(wire.route(HERE), (request(wire.slot), bytes(4)))
    assert (refusing.calls, reports) == (1, [])
    assert wire.counters == {"EHOSTUNREACH": 1}


@pytest.mark.usefixtures("refusing")
def test_train_that_is_refused_is_a_report_of_each_request(wire: UdpWire, reports: list[Undelivered]) -> None:
    train = [request(wire.slot), bytes(4), request(wire.slot, AttributeId.RTU), bytes(4), request(wire.slot), bytes(4)]
    assert not wire.send(wire.route(HERE), train, 280)
    packets = [train[0] + bytes(4), train[4] + bytes(4)]
    assert reports == [Undelivered(each, packed("127.0.0.1"), errno.EHOSTUNREACH, b"") for each in packets]
    assert wire.counters == {"EHOSTUNREACH": 1}
    assert wire.traffic["send_err"] == 3
