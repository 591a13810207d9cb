"""A process that owns several slots of a port: its packets, and what is left when it ends."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator

import pytest

from rdmacm.proto.constants import MAX_SLOT
from rdmacm.soft.wire import parking
from rdmacm.soft.wire import port_group as sharing
from rdmacm.soft.wire.slot_filter import position_of
from rdmacm.soft.wire.udp import UdpWire
from support.processes import CallFailed, Server, Worker, linux_only, workers
from support.wires import collect, free_port, packet, path, sealed, wait

pytestmark = linux_only

HERE = path("127.0.0.1", "127.0.0.1")
#: A user without processes: the system counts the descriptors that a user has under way.
NOBODY_ELSE = 48_792


@pytest.fixture
def wire() -> Iterator[UdpWire]:
    """The wire of this process, which is the group's first member."""
    wire = UdpWire(port=free_port())
    wire.open()
    yield wire
    wire.close()


@pytest.fixture
def worker(wire: UdpWire) -> Iterator[Callable[[], Worker]]:
    with workers(wire.port) as make:
        yield make


def call(wire: UdpWire, worker: Worker, function: Callable[..., object], *args: object) -> object:
    """Run a function in a worker, and make progress meanwhile."""
    worker.begin(function, *args)
    while not worker.control.poll():
        wire.receive()
    return worker.result()


def claim(server: Server, count: int = 1) -> list[int]:
    """Own so many slots more; returns all."""
    for _ in range(count):
        server.wire.claim_slot()
    return list(server.wire.slots)


def following(slot: int, count: int) -> int:
    return (slot + count - 1) % MAX_SLOT + 1


def test_packets_for_all_slots_arrive(wire: UdpWire, worker: Callable[[], Worker]) -> None:
    other = worker()
    theirs = call(wire, other, Server.open)
    assert isinstance(theirs, int)
    wire.claim_slot()
    wire.claim_slot()
    first = wire.slot
    assert wire.slots == (first, following(first, 2), following(first, 3))
    assert theirs == following(first, 1)
    sent = [packet(slot << 12 | 7, b"=%d" % slot) for slot in (*wire.slots, theirs)]
    for data in sent:
        wire.send(wire.route(HERE), (data, bytes(4)))
    assert sorted(each.body for each in collect(wire, 3)) == sorted(sent[:3])
    assert [body[:-4] for body, *_ in other.collect(1)] == sent[3:]
    assert wire.slot == first, "communication ids stay in the first slot"


def test_train_for_several_slots_of_a_process_is_not_split(wire: UdpWire, worker: Callable[[], Worker]) -> None:
    other = worker()
    theirs = call(wire, other, Server.open)
    assert isinstance(theirs, int)
    wire.claim_slot()
    route = wire.route(HERE)

    def received(*qpns: int) -> list[list[int]]:
        """The queue pair numbers of each train that receive() returns for a train with these."""
        train = sealed(wire, route, [packet(qpn, bytes(264)) for qpn in qpns])
        assert wire.send(route, train, len(train[0]))
        wait([wire])
        return [
            [int.from_bytes(data[start + 5 : start + 8], "big") for start in range(0, len(data), segment or len(data))]
            for data, segment, _, _ in wire.receive()
        ]

    a, b = (slot << 12 for slot in wire.slots)
    assert received(a | 7, a | 7, a | 7) == [[a | 7, a | 7, a | 7]]
    assert received(a | 7, a | 8, b | 9) == [[a | 7, a | 8, b | 9]]
    assert received(a | 7, theirs << 12 | 7, b | 9) == [[a | 7], [b | 9]]
    assert len(other.collect(1)) == 1


def test_slots_of_a_killed_process_are_reused(wire: UdpWire, worker: Callable[[], Worker]) -> None:
    victim, heirs = worker(), [worker() for _ in range(2)]
    call(wire, victim, Server.open)
    slots = call(wire, victim, claim, 2)
    assert slots == [following(wire.slot, n) for n in (1, 2, 3)]
    victim.kill()
    assert isinstance(slots, list)
    wire.send(wire.route(HERE), (packet(slots[1] << 12 | 7, b"old"), bytes(4)))
    assert [call(wire, heir, Server.open) for heir in heirs] == slots[:2]
    wire.claim_slot()
    assert wire.slots == (wire.slot, slots[2])
    for slot in slots:
        wire.send(wire.route(HERE), (packet(slot << 12 | 7, b"new"), bytes(4)))
    for heir in heirs:
        assert [body[12:-4] for body, *_ in heir.collect(1)] == [b"new"]
    assert [each.body[12:] for each in collect(wire, 1)] == [b"new"]


def test_no_slot_is_left(wire: UdpWire, worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "MAX_SLOT", 3)
    wire.claim_slot()
    other = worker()
    call(wire, other, Server.open)
    with pytest.raises(OSError, match="own all 4095 slots") as caught:
        wire.claim_slot()
    assert caught.value.errno == errno.EUSERS
    other.kill()
    wire.claim_slot()
    assert len(wire.slots) == 3


def test_slots_beyond_those_with_a_message_of_their_own(
    wire: UdpWire, worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "_SINGLE", 2)
    monkeypatch.setattr(parking, "_BATCH", 3)
    members = [worker() for _ in range(7)]
    slots = [call(wire, member, Server.open) for member in members]
    assert slots == [following(wire.slot, n + 1) for n in range(7)]
    for member, slot in zip(members, slots, strict=True):
        assert isinstance(slot, int)
        wire.send(wire.route(HERE), (packet(slot << 12 | 7, b"=%d" % slot), bytes(4)))
        assert [body[12:-4] for body, *_ in member.collect(1)] == [b"=%d" % slot]


def test_process_at_a_later_position_admits_if_no_other_answers(
    wire: UdpWire, worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_ADMITTERS", 1)
    monkeypatch.setattr(sharing, "_ADMISSION_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sharing, "_FEW_SECONDS", 0.02)
    assert wire._group is not None
    assert len(wire._group.admission) == 2
    member = worker()
    second = call(wire, member, Server.open)
    # This process, at the first position, makes no progress now.
    newcomer = worker()
    assert newcomer.open() == following(wire.slot, 2)
    assert position_of(newcomer.slot, wire._group._handles.shift) == 3
    assert second == following(wire.slot, 1)


def test_alone_all_slots_belong_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int) -> None:
        raise sharing.CannotShare

    monkeypatch.setattr("rdmacm.soft.wire.udp.PortGroup.join", refuse)
    wire = UdpWire(port=free_port())
    wire.open()
    wire.claim_slot()
    wire.claim_slot()
    assert len(set(wire.slots)) == 3
    assert all(1 <= slot <= MAX_SLOT for slot in wire.slots)
    monkeypatch.setattr("rdmacm.soft.wire.udp.MAX_SLOT", 3)
    with pytest.raises(OSError, match="this process owns all 3 slots") as caught:
        wire.claim_slot()
    assert caught.value.errno == errno.EUSERS
    wire.close()
    assert not wire.slots


def become_nobody(server: Server) -> None:
    """Be a user that may open enough descriptors, and has nearly as many under way in messages as it may have."""
    os.setgroups([])
    os.setgid(NOBODY_ELSE)
    os.setuid(NOBODY_ELSE)
    limit = len(os.listdir("/proc/self/fd")) + 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    server.under_way = socket.socketpair()  # type: ignore[attr-defined]
    sender, wanted = server.under_way[0], limit - 20  # type: ignore[attr-defined]
    for first in range(0, wanted, 250):
        socket.send_fds(sender, [b" "], [sender.fileno()] * min(250, wanted - first))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_limit_of_open_files_is_named() -> None:
    with workers(free_port()) as make:
        member = make()
        member(become_nobody)
        member.open()
        with pytest.raises(CallFailed, match=r"more than the limit of open files, \d+, .*RLIMIT_NOFILE") as caught:
            for _ in range(MAX_SLOT):
                member(claim)
                member(forget_last_slot)
        assert caught.value.errno == errno.ETOOMANYREFS
        # What it has works, and a slot that is given back can be claimed.
        assert len(set(member(claim, 0))) == 1


def forget_last_slot(server: Server) -> None:
    """Keep no descriptors of the last slot, as if another process owned it: its name stays bound."""
    group = server.wire._group
    assert group is not None
    owned = group.slots.pop()
    server.wire.slots = server.wire.slots[:-1]
    for sock in owned.data:
        if sock is not None:
            server.wire._pollers.unwatch(sock.fileno())
            sock.close()
