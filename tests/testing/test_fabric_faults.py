"""Faults of a fabric's links, hosts and processes that a program asks for."""

from __future__ import annotations

import errno

import pytest

from rdmacm import CmEventType, CmId, EventChannel
from rdmacm.testing import Fabric, Host, Outcome, SimulationError
from rdmacm.verbs import MR, AccessFlag
from support.fabric import ENDS, received, route, sealed, two

E = CmEventType
PORT = 7471


def send(fabric: Fabric, source: str, count: int = 100) -> None:
    """Send packets from a to b or back, and let them arrive."""
    host, ends = fabric.hosts[source], ENDS if source == "a" else ENDS[::-1]
    way = route(host, *ends)
    for psn in range(count):
        host.wire.send(way, [sealed(way, b"x", psn)])
    fabric.run()


def test_link_has_faults_of_its_own() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    fabric.link("a", "b").loss = 0.5
    fabric.link("b", "a").latency = 1.0
    send(fabric, "a")
    assert 20 < len(received(b)) < 80
    send(fabric, "b")
    assert (len(received(a)), fabric.now) == (100, 1.00002)
    fabric.loss, fabric.link("a", "b").loss = 1.0, None
    send(fabric, "a")
    assert not received(b)
    with pytest.raises(ValueError, match="no host c"):
        fabric.link("a", "c")


def test_groups_are_partitioned_and_heal_at_a_given_time() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    fabric.host("c", "10.0.0.3")
    fabric.partition(["a", "c"], ["b"], one_way=True)
    fabric.call_at(2.0, fabric.heal)
    send(fabric, "a", 1)
    assert (received(b), fabric.now) == ([], 2.0)
    send(fabric, "b", 1)
    send(fabric, "a", 1)
    assert (len(received(a)), len(received(b))) == (1, 1)
    called: list[float] = []
    fabric.call_at(1.0, lambda: called.append(fabric.now))  # in the past: at once
    fabric.run(seconds=0)
    assert called == [fabric.now]


def test_paused_host_works_through_its_queue_afterwards() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    with EventChannel(b.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr(("10.0.0.9", PORT), timeout_ms=1000)
        b.wire.capacity = 10
        fabric.pause("b")
        send(fabric, "a")
        assert (fabric.log.count(Outcome.DELIVERED), fabric.log.count(Outcome.OVERRUN)) == (10, 90)
        fabric.run(seconds=2)
        with pytest.raises(SimulationError, match="is paused"):
            channel.get_event(timeout=1)
        fabric.resume("b")
        with channel.get_event() as event:
            assert (event.type, fabric.now) == (E.ADDR_ERROR, 2.00002)
    assert a.runs


def test_jump_makes_deadlines_due_at_once() -> None:
    fabric = Fabric()
    two(fabric)
    with EventChannel(fabric.hosts["a"].provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr(("10.0.0.9", PORT), timeout_ms=1000)
        fabric.jump(3600)
        with channel.get_event() as event:
            assert (event.type, fabric.now) == (E.ADDR_ERROR, 3600.0)
    with pytest.raises(ValueError, match="cannot advance"):
        fabric.jump(-1)


def test_resources_run_out() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    a.limit(max_qp=1)
    a.limit(max_mr=1)
    with CmId(provider=a.provider) as one, CmId(provider=a.provider) as two_:
        for cmid in (one, two_):
            cmid.resolve_addr(("10.0.0.2", PORT))
        one.create_qp()
        with pytest.raises(OSError) as raised:
            two_.create_qp()
        assert raised.value.errno == errno.ENOMEM
        with MR(one.pd, bytearray(8), AccessFlag.LOCAL_WRITE), pytest.raises(OSError) as raised:
            MR(one.pd, bytearray(8), AccessFlag.LOCAL_WRITE)
        assert raised.value.errno == errno.ENOMEM
        a.limit(max_qp=2)
        two_.create_qp()


def test_wire_that_cannot_be_opened() -> None:
    fabric = Fabric()
    b = fabric.host("b", "10.0.0.2")
    b.wire.open_error = errno.EMFILE
    with EventChannel(b.provider) as channel, CmId(channel) as listener:
        listener.bind_addr(("10.0.0.2", PORT))
        with pytest.raises(OSError) as raised:
            listener.listen()
        assert raised.value.errno == errno.EMFILE
        b.wire.open_error = 0
        listener.listen()


class Listener:
    """Accepts each request to a port, and disconnects when the peer does."""

    def __init__(self, host: Host, port: int) -> None:
        self.accepted: list[CmId] = []
        self.channel = EventChannel(host.provider)
        self.cmid = CmId(self.channel)
        self.cmid.bind_addr((host.addresses[0], port))
        self.cmid.listen()
        host.on_event(self.channel, lambda event: self.accept(event.type, event.id))

    def accept(self, kind: E, cmid: CmId) -> None:
        if kind is E.CONNECT_REQUEST:
            cmid.create_qp()
            cmid.accept()
            self.accepted.append(cmid)
        elif kind is E.DISCONNECTED:
            cmid.disconnect()


def test_processes_share_the_port_of_their_host() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    second = fabric.process("b", "b2")
    assert ([process.wire.slot for process in b.processes], second.addresses) == ([1, 2], b.addresses)
    listeners = [Listener(b, PORT), Listener(second, PORT + 1)]
    with EventChannel(second.provider) as channel, CmId(channel) as third, pytest.raises(OSError) as raised:
        third.bind_addr(("10.0.0.2", PORT))  # as on a real host, the port is the other process's
    assert raised.value.errno == errno.EADDRINUSE
    ids = []
    for port in (PORT, PORT + 1):
        cmid = CmId(provider=a.provider)
        cmid.resolve_addr(("10.0.0.2", port))
        cmid.resolve_route()
        cmid.create_qp()
        cmid.connect()
        ids.append(cmid)
    fabric.run(seconds=0.001)
    assert [len(listener.accepted) for listener in listeners] == [1, 1]
    assert {entry.packet.dest_qp for entry in fabric.log} == {1}

    fabric.crash("b2")  # the other process keeps its connection, and the port is free again
    ids[0].disconnect()
    assert fabric.log.count(kind="DREQ") == 1
    again = fabric.process("b", "b2")
    assert (again.wire.slot, again.incarnation) == (2, 2)
    Listener(again, PORT + 1)
    with pytest.raises(ValueError, match="already exists"):
        fabric.process("b", "a")
    for cmid in ids:
        cmid.destroy()


def resolved(host: Host, address: str) -> CmId:
    """An id with a queue pair and a route to the address."""
    cmid = CmId(provider=host.provider)
    cmid.resolve_addr((address, PORT))
    cmid.resolve_route()
    cmid.create_qp()
    return cmid


def test_request_is_lost_where_another_process_does_not_forward_it() -> None:
    fabric = Fabric(seed=2)
    a, b = two(fabric)
    second = fabric.process("b", "b2")
    Listener(second, PORT)
    for loss, copies in ((1.0, {1, 2}), (0.0, {1})):  # each of the two processes may be the one that reads it
        second.forward_loss = loss
        sent = set()
        for _ in range(8):
            before = fabric.log.count(Outcome.DELIVERED, "REQ") + fabric.log.count(Outcome.OVERRUN, "REQ")
            with resolved(a, "10.0.0.2") as cmid:
                cmid.connect()
            sent.add(fabric.log.count(Outcome.DELIVERED, "REQ") + fabric.log.count(Outcome.OVERRUN, "REQ") - before)
        assert copies <= sent
        assert loss or sent == copies
    assert b.runs


def test_packets_for_a_process_that_was_killed_come_to_the_others() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    Listener(b, PORT + 1)
    Listener(fabric.process("b", "b2"), PORT)
    with resolved(a, "10.0.0.2") as cmid:
        fabric.call_at(fabric.now + fabric.latency / 2, lambda: fabric.crash("b2"))  # the request is under way
        with pytest.raises(OSError, match="nobody listens") as raised:
            cmid.connect()
        assert raised.value.errno == errno.ECONNREFUSED


def test_processes_of_a_host_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmacm.testing.host.MAX_SLOT", 3)
    fabric = Fabric()
    fabric.host("b", "10.0.0.2")
    for number in range(2, 4):
        fabric.process("b", f"b{number}")
    with pytest.raises(OSError, match="own all 3 slots"):
        fabric.process("b", "b256")
    fabric.crash("b")
    with pytest.raises(ValueError, match="down"):
        fabric.process("b", "b256")
