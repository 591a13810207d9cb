"""Multicast groups on real sockets: each process gets a copy, and nothing is left of a process that ends."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdmacm.errors import RdmaError
from rdmacm.proto.constants import MULTICAST_QPN
from rdmacm.soft.wire.base import group_key
from rdmacm.soft.wire.udp import UdpWire
from support.processes import MakeWorker, Server, Worker, linux_only
from support.wires import collect, packed, packet, path, taken, wait

pytestmark = linux_only

LO = 1
GROUP = packed("239.1.2.3")
OTHER = packed("239.1.2.4")
TO_GROUP = path("127.0.0.1", "239.1.2.3", LO)
TO_OTHER = path("127.0.0.1", "239.1.2.4", LO)
HERE = path("127.0.0.1", "127.0.0.1")


@pytest.fixture
def wire(port: int) -> Iterator[UdpWire]:
    wire = UdpWire(port=port)
    wire.open()
    yield wire
    wire.close()


def memberships() -> str:
    """The groups of the loopback interface, without their timers."""
    lines = Path("/proc/thread-self/net/igmp").read_text().splitlines()
    found = [" ".join(line.split()[:2]) for line in lines if line.startswith("\t\t\t\t")]
    return "\n".join(found) + Path("/proc/thread-self/net/igmp6").read_text()


def send(wire: UdpWire, way: object, qpn: int, payload: bytes) -> None:
    wire.send(wire.route(way), (packet(qpn, payload), bytes(4)))  # type: ignore[arg-type]


def call(wire: UdpWire, worker: Worker, function: Callable[..., object], *args: object) -> object:
    """Run a function in a worker, and make progress meanwhile."""
    worker.begin(function, *args)
    while not worker.control.poll():
        wire.receive()
    return worker.result()


def join(server: Server, group: bytes) -> None:
    server.wire.join_group(group, LO)


def test_each_process_gets_a_copy_of_a_packet(wire: UdpWire, worker: MakeWorker) -> None:
    others = [worker() for _ in range(3)]
    for other in others:
        call(wire, other, Server.open)
    for other in others[:2]:
        call(wire, other, join, GROUP)
    wire.join_group(GROUP, LO)
    wire.claim_slot()
    send(wire, TO_GROUP, MULTICAST_QPN, b"all ")
    for other in others[:2]:
        ((body, segment, host, local),) = other.collect(1)
        assert (body[12:16], segment, host, local) == (b"all ", 0, "127.0.0.1", group_key(GROUP, LO))
    (mine,) = collect(wire, 1)
    assert (mine.body[12:], mine.local) == (b"all ", group_key(GROUP, LO))
    assert others[2](Server.taken) == []
    assert not wire.receive()
    assert wire.traffic["multicast_xmit_packets"] == wire.traffic["sent_pkts"] == 1
    assert wire.traffic["multicast_rcv_packets"] == wire.traffic["rcvd_pkts"] == 1
    assert wire.traffic["rcvd_bytes"] == len(mine.body) + 4
    send(wire, HERE, wire.slot << 12 | 7, b"here")
    collect(wire, 1)
    assert wire.traffic["multicast_rcv_packets"] == wire.traffic["multicast_xmit_packets"] == 1
    assert (wire.traffic["rcvd_pkts"], wire.traffic["sent_pkts"]) == (2, 2)


def test_only_the_packets_of_joined_groups_arrive(wire: UdpWire) -> None:
    """The kernel would give a socket that is bound to every address the packets of all groups of the host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as member:
        member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, OTHER + packed("127.0.0.1"))
        wire.join_group(GROUP, LO)
        send(wire, TO_OTHER, MULTICAST_QPN, b"not ")
        send(wire, TO_OTHER, wire.slot << 12 | 7, b"not ")
        send(wire, TO_GROUP, MULTICAST_QPN, b"all ")
        assert [each.body[12:] for each in collect(wire, 1)] == [b"all "]
        wire.leave_group(GROUP, LO)
        send(wire, TO_GROUP, MULTICAST_QPN, b"late")
        send(wire, HERE, wire.slot << 12 | 7, b"end ")
        assert [each.body[12:] for each in collect(wire, 1)] == [b"end "]
    assert not wire.counters


@pytest.mark.parametrize("multicast", [True, False])
def test_packets_that_are_half_multicast_are_dropped(wire: UdpWire, multicast: bool) -> None:
    """At a group only QP 0xFFFFFF is addressed, and that QP only at a group."""
    wire.join_group(GROUP, LO)
    if multicast:
        for qpn in (wire.slot << 12 | 7, 1, 0):
            send(wire, TO_GROUP, qpn, b"evil")
        wire.send(wire.route(TO_GROUP), (b"short",))
    else:
        send(wire, HERE, MULTICAST_QPN, b"evil")
    send(wire, TO_GROUP, MULTICAST_QPN, b"good")
    send(wire, HERE, wire.slot << 12 | 7, b"good")
    assert {each.body[12:] for each in collect(wire, 2)} == {b"good"}
    assert wire.counters == ({"stray": 3, "short": 1} if multicast else {"stray": 1}), wire.counters


def test_train_to_a_group_arrives(wire: UdpWire) -> None:
    wire.join_group(GROUP, LO)
    body = packet(MULTICAST_QPN, b"all ") + bytes(4)
    wire.send(wire.route(TO_GROUP), (body * 3,), len(body))
    assert [each.body[12:] for each in collect(wire, 3)] == [b"all "] * 3


@pytest.mark.parametrize("end", ["leave", "close"])
def test_leaving_leaves_no_membership(wire: UdpWire, end: str) -> None:
    before = memberships()
    wire.join_group(GROUP, LO)
    wire.join_group(packed("ff1e::1:2"), LO)
    wire.join_group(packed("ff02::1:2"), LO)
    assert memberships() != before
    if end == "close":
        wire.close()
    else:
        for group in ("239.1.2.3", "ff1e::1:2", "ff02::1:2"):
            wire.leave_group(packed(group), LO)
    assert memberships() == before


def test_killed_process_leaves_no_membership(wire: UdpWire, worker: MakeWorker) -> None:
    before = memberships()
    victim = worker()
    call(wire, victim, Server.open)
    call(wire, victim, join, GROUP)
    assert memberships() != before
    victim.kill()
    assert memberships() == before


def test_slots_and_groups_do_not_disturb_each_other(wire: UdpWire, worker: MakeWorker) -> None:
    """The kernel finds the sockets of a slot by their position; those of groups are not among them."""
    wire.join_group(GROUP, LO)
    other = worker()
    slot = call(wire, other, Server.open)
    assert isinstance(slot, int)
    wire.leave_group(GROUP, LO)
    wire.claim_slot()
    for each in wire.slots:
        send(wire, HERE, each << 12 | 7, b"mine")
    assert len(collect(wire, 2)) == 2
    send(wire, HERE, slot << 12 | 7, b"his ")
    assert other.collect(1)[0][0][12:16] == b"his "


def test_interface_that_is_gone_is_refused(wire: UdpWire) -> None:
    for group in (GROUP, packed("ff1e::1:2")):
        with pytest.raises(RdmaError) as error:
            wire.join_group(group, 1 << 20)
        assert error.value.errno == errno.ENODEV
    wire.leave_group(GROUP, LO)
    wire.close()
    with pytest.raises(RdmaError) as error:
        wire.join_group(GROUP, LO)
    assert error.value.errno == errno.EBADF


def test_no_other_program_gets_the_address_of_a_group(wire: UdpWire) -> None:
    """As long as this process has the port, also before it joins."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for group in ("239.1.2.3", "239.1.2.4"):
            wire.join_group(GROUP, LO)
            with pytest.raises(OSError, match="in use"):
                other.bind((group, wire.port))
            wire.leave_group(GROUP, LO)


def test_flood_of_a_group_is_read_in_parts(wire: UdpWire) -> None:
    wire.join_group(GROUP, LO)
    for _ in range(64):
        send(wire, TO_GROUP, MULTICAST_QPN, b"all ")
    wait([wire])
    found = taken(wire)
    assert 0 < len(found) <= 16
