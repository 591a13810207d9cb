"""A process that has ended: another one of its port group answers the peers that repeat their last message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.soft.wire import heirs
from rdmacm.soft.wire.udp import UdpWire
from support.processes import MakeWorker, Server, Worker, linux_only
from support.wires import collect, mad, packet, path, sealed, taken, wait

pytestmark = linux_only

HERE = path("127.0.0.1", "127.0.0.1")


@pytest.fixture
def wire(port: int) -> Iterator[UdpWire]:
    """The wire of this process, which is the group's first member."""
    wire = UdpWire(port=port)
    wire.open()
    yield wire
    wire.close()


def joined(wire: UdpWire, worker: Worker) -> int:
    """Have a worker join the group, and say that it has talked to peers. Returns its slot."""
    worker.begin(Server.open)
    while not worker.control.poll():
        wire.receive()
    worker.slot = worker.result()
    worker(Server.talk)
    return worker.slot


def leave(wire: UdpWire, worker: Worker) -> None:
    """Have a worker close its wire; this process has taken what it gave away."""
    before = len(wire._inheritance._slots)
    worker(Server.close)
    while len(wire._inheritance._slots) == before:
        wait([wire])
        wire.receive()


def ask(wire: UdpWire, slot: int, number: int = 1, attribute: int = AttributeId.DREQ) -> bytes:
    """Send a message to the communication id with this number of a slot; returns it."""
    body = mad(attribute, remote_id=slot << 20 | number)
    route = wire.route(HERE)
    for sent in sealed(wire, route, [body]):
        wire.send(route, [sent])
    return body


def test_disconnect_request_of_a_process_that_has_left_is_received_by_another(
    wire: UdpWire, worker: MakeWorker
) -> None:
    member = worker()
    slot = joined(wire, member)
    leave(wire, member)
    body = ask(wire, slot)
    assert [found.body for found in collect(wire, 1)] == [body]


def test_nothing_else_for_a_process_that_has_left_is_received(wire: UdpWire, worker: MakeWorker) -> None:
    member = worker()
    slot = joined(wire, member)
    leave(wire, member)
    route = wire.route(HERE)
    for sent in sealed(wire, route, [packet(slot << 12 | 7, b"data")]):
        wire.send(route, [sent])
    ask(wire, slot, attribute=AttributeId.REP)
    body = ask(wire, slot)
    assert [found.body for found in collect(wire, 1)] == [body]
    assert wire.counters["stray"] == 2


def test_slot_of_a_process_that_has_left_is_not_claimed(wire: UdpWire, worker: MakeWorker) -> None:
    first, second = worker(), worker()
    slot = joined(wire, first)
    leave(wire, first)
    assert joined(wire, second) != slot


def test_slots_beyond_the_limit_are_free_again(
    wire: UdpWire, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heirs, "_MOST", 1)
    members = [worker() for _ in range(3)]
    slots = [joined(wire, member) for member in members[:2]]
    leave(wire, members[0])
    members[1](Server.close)
    while wire._inheritance._slots[0].sockets[0].getsockname() != b"\0" + wire._group.slot_name(slots[1]).encode():  # type: ignore[union-attr]
        wait([wire])
        wire.receive()
    assert joined(wire, members[2]) == slots[0]


def test_slot_is_free_after_its_time(wire: UdpWire, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heirs, "_SECONDS", 0.0)
    first, second = worker(), worker()
    slot = joined(wire, first)
    leave(wire, first)
    ask(wire, slot)
    assert len(collect(wire, 1)) == 1
    assert not wire._inheritance._slots
    assert joined(wire, second) == slot


def test_process_that_has_talked_to_no_peer_leaves_nothing(wire: UdpWire, worker: MakeWorker) -> None:
    first, second = worker(), worker()
    first.begin(Server.open)
    while not first.control.poll():
        wire.receive()
    slot = first.result()
    first(Server.close)
    assert joined(wire, second) == slot
    assert not wire._inheritance._slots


def test_killed_process_leaves_its_slot_to_the_next(wire: UdpWire, worker: MakeWorker) -> None:
    first, second = worker(), worker()
    slot = joined(wire, first)
    first.kill()
    assert joined(wire, second) == slot
    assert taken(wire) == []
