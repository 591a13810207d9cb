"""Packets and trains over UDP sockets: they arrive unchanged, sealed for the IP identification they were sent with."""

from __future__ import annotations

import errno
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.wire import Buffer
from rdmacm.soft.wire.base import Wire
from rdmacm.soft.wire.udp import _HELD_BATCH, UdpWire
from support.netns import TwoHosts, needs_netns, two_hosts
from support.wires import Packet, collect, free_port, packed, packet, path, sealed, taken, wait

LOOPBACKS = ("127.0.0.1", "::1")

_IP_RECVTOS, _IPV6_RECVTCLASS = 13, 66
_IP_RECVTTL, _IPV6_RECVHOPLIMIT = 12, 51
_NO_CHECKSUM = {False: (socket.SOL_SOCKET, 11), True: (17, 101)}  # SO_NO_CHECK, UDP_NO_CHECK6_TX

OpenWire: TypeAlias = Callable[..., UdpWire]


@pytest.fixture
def open_wire() -> Iterator[OpenWire]:
    """Opens wires on a free port of this host."""
    port = free_port()
    with ExitStack() as stack:

        def make(trains: bool = True) -> UdpWire:
            wire = UdpWire(port=port, trains=trains)
            stack.callback(wire.close)
            wire.open()
            return wire

        yield make


@pytest.fixture
def wire(open_wire: OpenWire) -> UdpWire:
    return open_wire()


def bodies(wire: UdpWire, count: int, size: int = 1024) -> list[bytes]:
    return [packet(wire.slot << 12 | 5, bytes([index]) * size, index) for index in range(count)]


class TestPackets:
    @pytest.mark.parametrize("host", LOOPBACKS)
    def test_packet_is_received_with_both_addresses(self, wire: UdpWire, host: str) -> None:
        route = wire.route(path(host, host))
        (data,) = sealed(wire, route, bodies(wire, 1))
        assert wire.send(route, (data[:12], memoryview(data)[12:]))
        (got,) = collect(wire, 1)
        assert got.data == data
        assert got.local == packed(host)
        assert got.remote[0] == route.remote_host == host
        assert got.remote[1] == route.source_port == wire.port
        assert got.identification == 0

    def test_packet_is_sent_from_the_paths_source(self, wire: UdpWire) -> None:
        route = wire.route(path("127.0.0.7", "127.0.0.9"))
        assert wire.send(route, sealed(wire, route, bodies(wire, 1)))
        (got,) = collect(wire, 1)
        assert (got.remote[0], got.local) == ("127.0.0.7", packed("127.0.0.9"))

    def test_receive_returns_nothing_when_nothing_has_arrived(self, wire: UdpWire) -> None:
        assert not wire.receive()

    def test_packets_are_received_in_order_and_bounded_batches(self, wire: UdpWire) -> None:
        route = wire.route(path("127.0.0.1", "127.0.0.1"))
        sent = bodies(wire, 100)
        for body in sent:
            assert wire.send(route, (body, bytes(4)))
        got: list[Packet] = []
        while len(got) < 100:
            wait([wire])
            batch = taken(wire)
            assert 0 < len(batch) <= _HELD_BATCH  # of 16, unless another thread had the interpreter
            got += batch
        assert [each.body for each in got] == sent

    def test_short_packets_are_counted_and_dropped(self, wire: UdpWire) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for size in (0, 1, 15):
                stranger.sendto(bytes(size), ("127.0.0.1", wire.port))
            route = wire.route(path("127.0.0.1", "127.0.0.1"))
            wire.send(route, sealed(wire, route, bodies(wire, 1)))
            got = taken(wire)
            while wire.counters["short"] < 3 or not got:
                wait([wire])
                got += taken(wire)
            assert [each.body for each in got] == bodies(wire, 1)

    def test_closed_wire_is_silent_until_it_is_opened_again(self, open_wire: OpenWire) -> None:
        wire = open_wire()
        assert wire.filenos()
        route = wire.route(path("127.0.0.1", "127.0.0.1"))
        wire.close()
        assert not wire.filenos()
        assert not wire.receive()
        assert not wire.send(route, (bytes(16),))
        wire.open()
        assert wire.send(route, sealed(wire, route, bodies(wire, 1)))
        assert len(collect(wire, 1)) == 1

    def test_udp_wire_implements_the_wire_protocol(self, wire: UdpWire) -> None:
        seam: Wire = wire
        assert seam.slot >= 1

    def test_route_refuses_addresses_of_two_families(self, wire: UdpWire) -> None:
        with pytest.raises(ValueError, match="two addresses"):
            wire.route(path("127.0.0.1", "::1"))


class TestTrains:
    @pytest.mark.parametrize("host", LOOPBACKS)
    def test_train_is_sealed_for_identifications_from_0(self, wire: UdpWire, host: str) -> None:
        route = wire.route(path(host, host))
        train = sealed(wire, route, [*bodies(wire, 9), packet(wire.slot << 12 | 5, b"the short last one..")])
        assert len(b"".join(train)) <= wire.can_segment()
        # buffers do not end where packets end
        joined = memoryview(b"".join(train))
        assert wire.send(route, (joined[:12], joined[12:3000], joined[3000:]), len(train[0]))
        got = collect(wire, 10)
        assert [each.data for each in got] == train
        assert [each.identification for each in got] == (list(range(10)) if host == "127.0.0.1" else [0] * 10)

    def test_train_of_one_packet_is_received(self, wire: UdpWire) -> None:
        route = wire.route(path("127.0.0.1", "127.0.0.1"))
        (data,) = sealed(wire, route, bodies(wire, 1))
        assert wire.send(route, (data,), len(data))
        (got,) = collect(wire, 1)
        assert got.identification == 0

    def test_longest_train_is_received_whole(self, wire: UdpWire) -> None:
        route = wire.route(path("127.0.0.1", "127.0.0.1"))
        size = len(bodies(wire, 1, 4096)[0]) + 4
        count = wire.can_segment() // size
        assert count == 15
        train = sealed(wire, route, bodies(wire, count, 4096))
        assert wire.send(route, train, size)
        wait([wire])
        ((data, segment, _, _),) = wire.receive()
        assert (bytes(data), segment) == (b"".join(train), size)

    def test_packets_are_received_singly_without_gro(self, open_wire: OpenWire) -> None:
        wire = open_wire(trains=False)
        assert wire.can_segment() == 0
        route = wire.route(path("127.0.0.1", "127.0.0.1"))
        train = sealed(wire, route, bodies(wire, 5))
        # A train nevertheless arrives, packet by packet, each sealed for the identification it was sent with.
        assert wire.send(route, train, len(train[0]))
        got = collect(wire, 5)
        assert [(each.body, each.place, each.identification) for each in got] == [
            (body, 0, 0) for body in bodies(wire, 5)
        ]

    @pytest.mark.parametrize("host", LOOPBACKS)
    def test_train_is_cut_on_a_path_without_gso(self, wire: UdpWire, host: str) -> None:
        route = wire.route(path(host, host))
        train = sealed(wire, route, bodies(wire, 5))
        # No public option makes the kernel refuse trains.
        sock = wire._out.sockets[":" in host]
        assert sock is not None
        # The kernel refuses trains without UDP checksums, as it does on a path with IPsec.
        sock.setsockopt(*_NO_CHECKSUM[":" in host], 1)
        for number in (1, 2):
            assert wire.send(route, train, len(train[0]))
            got = collect(wire, 5)
            assert [(each.body, each.identification) for each in got] == [(body, 0) for body in bodies(wire, 5)]
            assert wire.counters["trains_cut"] == number
        # Only this route is marked, so that a new one still sends trains.
        sock.setsockopt(*_NO_CHECKSUM[":" in host], 0)
        assert wire.send(wire.route(path(host, host)), train, len(train[0]))
        assert [each.data for each in collect(wire, 5)] == train
        assert wire.counters["trains_cut"] == 2

    def test_train_beyond_the_gso_limit_is_cut(self, wire: UdpWire) -> None:
        route = wire.route(path("127.0.0.1", "127.0.0.1"))
        train = sealed(wire, route, bodies(wire, 200, 4))
        assert wire.send(route, train, len(train[0]))
        got = collect(wire, 200)
        assert [each.body for each in got] == bodies(wire, 200, 4)
        assert {each.identification for each in got} == {0}
        # shorter trains are still sent as such
        assert wire.send(route, train[:5], len(train[0]))
        assert [each.identification for each in collect(wire, 5)] == [0, 1, 2, 3, 4]


class TestUnsharedPort:
    """A system without port sharing and without epoll."""

    @pytest.fixture
    def alone(self, open_wire: OpenWire, monkeypatch: pytest.MonkeyPatch) -> UdpWire:
        monkeypatch.setattr(sys, "platform", "other")
        monkeypatch.delattr(select, "epoll", raising=False)
        return open_wire()

    @pytest.mark.parametrize("host", LOOPBACKS)
    def test_packets_of_all_slots_are_received(self, alone: UdpWire, host: str) -> None:
        route = alone.route(path(host, host))
        assert 1 <= alone.slot <= 4095
        for qpn in (1, 1 << 12 | 5, 900 << 12 | 5):  # all slots belong to this process
            assert alone.send(route, sealed(alone, route, [packet(qpn)]))
            (got,) = collect(alone, 1)
            assert got.body == packet(qpn)
        token = alone.listen(1, None)
        alone.unlisten(token)

    def test_port_is_exclusive(self, alone: UdpWire) -> None:
        with pytest.raises(OSError, match="the port is in use by process") as caught:
            UdpWire(port=alone.port).open()
        assert caught.value.errno == errno.EADDRINUSE


class TestTap:
    def test_tap_sees_both_directions(self, wire: UdpWire) -> None:
        seen: list[tuple[bool, bytes, bytes, int, int, bytes, int]] = []

        def tap(
            outgoing: bool,
            local: bytes,
            remote: bytes,
            sport: int,
            dport: int,
            data: Sequence[Buffer] | memoryview,
            segment: int,
        ) -> None:
            whole = bytes(data) if isinstance(data, memoryview) else b"".join(data)
            seen.append((outgoing, local, remote, sport, dport, whole, segment))

        here, there = "127.0.0.1", "127.0.0.2"
        route = wire.route(path(here, there))
        train = sealed(wire, route, bodies(wire, 3))
        wire.tap = tap
        wire.send(route, train, len(train[0]))
        collect(wire, 3)
        ends = packed(here), packed(there)
        rest = wire.port, wire.port, b"".join(train), len(train[0])
        assert seen == [(True, *ends, *rest), (False, *reversed(ends), *rest)]


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    with two_hosts() as net:
        yield net


def wires(net: TwoHosts, stack: ExitStack) -> tuple[UdpWire, UdpWire]:
    opened = []
    for host in (net.a, net.b):
        with host.enter():
            wire = UdpWire()
            stack.callback(wire.close)
            wire.open()
            opened.append(wire)
    return opened[0], opened[1]


@needs_netns
class TestTwoHosts:
    @pytest.mark.parametrize("family", ["ipv4", "ipv6", "link_local"])
    def test_packets_and_trains_arrive_with_their_identifications(self, net: TwoHosts, family: str) -> None:
        with ExitStack() as stack:
            a, b = wires(net, stack)
            scope = net.va.index if family == "link_local" else 0
            way = path(getattr(net.va, family), getattr(net.vb, family), scope)
            route = a.route(way)
            single = sealed(a, route, bodies(b, 1))
            train = sealed(a, route, bodies(b, 8))
            assert a.send(route, single)
            assert a.send(route, train, len(train[0]))
            got = collect(b, 9)
            assert [each.data for each in got] == single + train
            expected = [0, *range(8)] if family == "ipv4" else [0] * 9
            assert [each.identification for each in got] == expected
            remote = got[0].remote
            # and back to the received address
            back = b.route(path(getattr(net.vb, family), remote[0], remote[3] if len(remote) == 4 else 0))
            assert back.remote_host == remote[0]
            assert b.send(back, sealed(b, back, bodies(a, 1)))
            (answer,) = collect(a, 1)
            assert answer.identification == 0
            assert answer.local == way.local
            assert answer.remote[0] == route.remote_host

    @pytest.mark.parametrize("family", ["ipv4", "ipv6"])
    def test_traffic_class_and_hop_limit_are_set_in_the_ip_header(self, net: TwoHosts, family: str) -> None:
        inet = socket.AF_INET if family == "ipv4" else socket.AF_INET6
        with ExitStack() as stack, net.b.open_socket(inet, socket.SOCK_DGRAM) as receiver:
            if inet == socket.AF_INET:
                level, tos, ttl = socket.IPPROTO_IP, _IP_RECVTOS, _IP_RECVTTL
            else:
                level, tos, ttl = socket.IPPROTO_IPV6, _IPV6_RECVTCLASS, _IPV6_RECVHOPLIMIT
            for option in (tos, ttl):
                receiver.setsockopt(level, option, 1)
            receiver.bind(("", 4791))
            receiver.settimeout(5)
            with net.a.enter():
                wire = UdpWire()
                stack.callback(wire.close)
                wire.open()
            way = path(getattr(net.va, family), getattr(net.vb, family))
            for traffic_class, hop_limit in ((0, 0), (0x68, 0), (0xFC, 7), (0, 255)):
                route = wire.route(way, traffic_class, hop_limit)
                for count in (1, 3):
                    packets = sealed(wire, route, bodies(wire, count))
                    assert wire.send(route, packets, len(packets[0]) if count > 1 else 0)
                    for _ in range(count):
                        _, ancillary, _, _ = receiver.recvmsg(2048, 64)
                        assert sorted(value[0] for _, _, value in ancillary) == sorted((traffic_class, hop_limit or 64))

    @pytest.mark.parametrize("family", ["ipv4", "ipv6"])
    def test_traffic_class_and_hop_limit_are_reported_where_asked_for(self, net: TwoHosts, family: str) -> None:
        with ExitStack() as stack:
            a, b = wires(net, stack)
            way = path(getattr(net.va, family), getattr(net.vb, family))
            for traffic_class, hop_limit, expected in ((0x68, 7, (0, 64)), (0x68, 7, (0x68, 7)), (0, 0, (0, 64))):
                route = a.route(way, traffic_class, hop_limit)
                for count in (1, 3):
                    packets = sealed(a, route, bodies(b, count))
                    assert a.send(route, packets, len(packets[0]) if count > 1 else 0)
                    received = 0
                    while received < count:
                        wait([b])
                        for data, segment, _, local in b.receive():
                            assert data.obj.ip_fields == expected  # type: ignore[attr-defined]
                            assert local == way.remote
                            received += len(data) // segment if segment else 1
                b.report_ip_fields()

    def test_send_error_loses_one_packet(self, net: TwoHosts) -> None:
        with ExitStack() as stack:
            a, b = wires(net, stack)
            way = path(net.va.ipv4, net.vb.ipv4)
            route = a.route(way)
            assert not a.send(route, (bytes(2000),))  # longer than the MTU, and not to be fragmented
            assert not a.send(route, (bytes(2000), bytes(2000)), 2000)
            assert a.counters["EMSGSIZE"] >= 2
            assert a.traffic["send_err"] == 3, "each packet of a train by itself"
            assert not a.send(a.route(path(net.va.ipv4, "192.0.2.1")), (bytes(16),))
            assert a.counters["ENETUNREACH"] == 1
            # The path still carries trains.
            train = sealed(a, route, bodies(b, 3))
            assert a.send(route, train, len(train[0]))
            assert [each.identification for each in collect(b, 3)] == [0, 1, 2]

    def test_full_socket_buffer_blocks_briefly(self, net: TwoHosts) -> None:
        try:
            net.a.run(
                ["tc", "qdisc", "add", "dev", "va", "root", "tbf", "rate", "8kbit", "burst", "1600", "limit", "1m"]
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no token bucket filter: {error.stderr}")
        with ExitStack() as stack:
            a, _ = wires(net, stack)
            # A wire has no option for the buffer size.
            sock = a._out.sockets[0]
            assert sock is not None
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel raises it to its minimum
            route = a.route(path(net.va.ipv4, net.vb.ipv4))
            sent = [a.send(route, (bytes(1000),)) for _ in range(8)]
            assert sent[0]
            assert not sent[-1]
            assert a.counters["no_room"] == sent.count(False)

    def test_icmp_errors_do_not_fail_later_sends(self, net: TwoHosts) -> None:
        with ExitStack() as stack:
            a, b = wires(net, stack)
            b.close()
            route = a.route(path(net.va.ipv4, net.vb.ipv4))
            for _ in range(3):  # the peer's host answers each with an ICMP error
                assert a.send(route, sealed(a, route, bodies(a, 1)))
            assert not a.receive()

    def test_ipv6_packet_with_zero_udp_checksum_is_received(self, net: TwoHosts) -> None:
        with ExitStack() as stack, net.b.enter():
            _, b = wires(net, stack)
            with net.a.open_socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(*_NO_CHECKSUM[True], 1)  # as adapters send
                sender.bind((net.va.ipv6, 0))
                sport = sender.getsockname()[1]
                (body,) = bodies(b, 1)
                data = body + Icrc(packed(net.va.ipv6), packed(net.vb.ipv6), sport).seal([body])
                sender.sendto(data, (net.vb.ipv6, 4791))
            (got,) = collect(b, 1)
            assert got.data == data
            assert got.remote[1] == sport

    def test_wire_works_on_a_host_without_ipv6(self, net: TwoHosts) -> None:
        net.b.sysctl("net.ipv6.conf.all.disable_ipv6", 1)
        with ExitStack() as stack:
            a, b = wires(net, stack)
            route = a.route(path(net.va.ipv4, net.vb.ipv4))
            assert a.send(route, sealed(a, route, bodies(b, 1)))
            assert collect(b, 1)[0].identification == 0
            assert not b.send(b.route(path(net.vb.ipv6, net.va.ipv6)), (bytes(16),))

    @pytest.mark.parametrize("host", ["", "10.7.0.1"])
    def test_open_fails_if_the_port_is_in_use(self, net: TwoHosts, host: str) -> None:
        with net.a.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as other, net.a.enter():
            other.bind((host, 4791))
            with pytest.raises(OSError, match=r"in use by process \d+ \(.*\) of user 0") as caught:
                UdpWire().open()
            assert caught.value.errno == errno.EADDRINUSE
