"""Several processes share one port: each receives its own packets while others join, leave or die."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.constants import MAX_SLOT
from rdmacm.soft.wire import parking
from rdmacm.soft.wire import port_group as sharing
from rdmacm.soft.wire.port_group import PortGroup
from rdmacm.soft.wire.udp import UdpWire
from support.clock import eventually, pause
from support.netns import needs_netns, two_hosts
from support.processes import CallFailed, MakeWorker, Server, Worker, linux_only, workers
from support.wires import SERVICE, Packet, collect, mad, packed, packet, path, sealed, taken, wait

pytestmark = linux_only

NOBODY = 65534

HERE = path("127.0.0.1", "127.0.0.1")

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


@pytest.fixture
def wire(port: int) -> Iterator[UdpWire]:
    """The wire of this process, which is the group's first member."""
    wire = UdpWire(port=port)
    wire.open()
    yield wire
    wire.close()


def following(slot: int, count: int) -> int:
    """The slot of the process that joins a group ``count`` processes after the owner of ``slot``."""
    return (slot + count - 1) % MAX_SLOT + 1


def admit(wire: UdpWire, worker: Worker) -> int:
    """Have a worker open its wire, and admit it to the group. Returns its slot."""
    worker.begin(Server.open)
    while not worker.control.poll():
        wire.receive()
    worker.slot = worker.result()
    return worker.slot


def bodies(found: list[tuple[bytes, int, str, bytes]]) -> list[bytes]:
    return [body[:-4] for body, _, _, _ in found]


class TestJoining:
    def test_each_process_gets_its_own_packets(self, worker: MakeWorker) -> None:
        members = [worker() for _ in range(4)]
        slots = [member.open() for member in members]
        assert slots == [following(slots[0], n) for n in range(4)]
        for member in members:
            for other in members:
                member(Server.send, other.slot << 12 | 7, b"=%d %d" % (member.slot, other.slot))
        for member in members:
            got = bodies(member.collect(4))
            assert sorted(body[12:] for body in got) == sorted(b"=%d %d" % (n, member.slot) for n in slots)

    @pytest.mark.slow
    def test_many_processes_join_at_once(self, worker: MakeWorker) -> None:
        members = [worker() for _ in range(12)]
        for member in members:
            member.begin(Server.open)
        slots = [member.result() for member in members]
        assert sorted(slots) in [sorted(following(slot, n) for n in range(12)) for slot in slots]
        for member, slot in zip(members, slots, strict=True):
            members[0](Server.send, slot << 12 | 7, b"=%d" % slot)
            assert [body[12:] for body in bodies(member.collect(1))] == [b"=%d" % slot]

    def test_slot_of_a_dead_process_is_reused(self, worker: MakeWorker) -> None:
        members = [worker() for _ in range(3)]
        _, second, third = slots = [member.open() for member in members]
        assert slots == [following(slots[0], n) for n in range(3)]
        members[1].kill()
        # Packets for the dead process are not delivered to its successor.
        members[0](Server.send, second << 12 | 7, b"old")
        successor = worker()
        assert successor.open() == second
        members[0](Server.send, second << 12 | 7, b"new")
        assert [body[12:] for body in bodies(successor.collect(1))] == [b"new"]
        # The last slot has not moved.
        members[0](Server.send, third << 12 | 7, b"3")
        assert [body[12:] for body in bodies(members[2].collect(1))] == [b"3"]

    def test_process_can_leave_and_rejoin(self, wire: UdpWire, worker: MakeWorker) -> None:
        other = worker()
        first = wire.slot
        assert admit(wire, other) == following(first, 1)
        wire.close()
        assert other(Server.pings) == (0, 0, 0), "the process is alive"
        third = worker()
        assert third.open() == first
        wire.open()
        assert wire.slot == following(first, 2)

    def test_new_group_starts_after_all_members_died(self, worker: MakeWorker) -> None:
        members = [worker() for _ in range(3)]
        slots = [member.open() for member in members]
        for member in members:
            member.kill()
        again = [worker() for _ in range(2)]
        first, second = [member.open() for member in again]
        assert second == following(first, 1)
        again[0](Server.send, second << 12 | 7, b"new")
        assert [body[12:] for body in bodies(again[1].collect(1))] == [b"new"]
        assert len(slots) == 3

    @pytest.mark.slow
    def test_join_fails_without_a_free_slot(
        self, wire: UdpWire, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parking, "MAX_SLOT", 2)
        assert admit(wire, worker()) == following(wire.slot, 1)
        with pytest.raises(CallFailed, match="own all 4095 slots") as caught:
            admit(wire, worker())
        assert caught.value.errno == errno.EUSERS

    def test_group_survives_a_process_killed_while_joining(
        self, wire: UdpWire, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A process calls nothing public between its admission and the parking of its sockets.
        await_order = sharing._await_order

        def die(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(sharing, "_await_order", die)
        victim = worker()
        victim.begin(Server.open)
        monkeypatch.setattr(sharing, "_await_order", await_order)
        while not victim.control.poll():
            wire.receive()
        victim.kill()
        member = worker()
        second = admit(wire, member)
        assert second == following(wire.slot, 1)
        assert admit(wire, worker()) == following(wire.slot, 2)
        wire.send(wire.route(HERE), (packet(second << 12 | 7, b"2"), bytes(4)))
        assert [body[12:] for body in bodies(member.collect(1))] == [b"2"]

    def test_join_fails_if_no_member_answers(self, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.2)
        first, second = worker(), worker()
        slot = first.open()
        second.open()
        first.kill()
        second.signal(signal.SIGSTOP)
        with pytest.raises(
            CallFailed, match=rf"process {second.pid}, .* does not admit this process.*continue or end"
        ) as caught:
            worker().open()
        assert caught.value.errno == errno.EBUSY
        second.signal(signal.SIGCONT)
        assert worker().open() == slot

    def test_join_fails_while_a_joining_process_is_stopped(
        self, wire: UdpWire, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A process calls nothing public between its admission and the parking of its sockets.
        await_order = sharing._await_order

        def stop(*args: object) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        monkeypatch.setattr(sharing, "_await_order", stop)
        stuck = worker()
        stuck.begin(Server.open)
        monkeypatch.setattr(sharing, "_await_order", await_order)
        monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.2)
        while os.waitpid(stuck.pid, os.WUNTRACED | os.WNOHANG) == (0, 0):
            wire.receive()
        with pytest.raises(CallFailed, match=f"process {stuck.pid} is joining") as caught:
            admit(wire, worker())
        assert caught.value.errno == errno.EBUSY
        stuck.signal(signal.SIGCONT)
        assert stuck.result() == following(wire.slot, 1)
        assert admit(wire, worker()) == following(wire.slot, 2)

    def test_open_fails_if_another_program_shares_the_port(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("", port))
            with pytest.raises(OSError, match="a program of the same user has the port too") as caught:
                UdpWire(port=port).open()
        assert caught.value.errno == errno.EADDRINUSE

    def test_open_fails_if_the_port_is_held_without_reuseport(self, port: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", port))
            named = rf"in use by process {os.getpid()} \(.*\) of user {os.geteuid()}"
            with pytest.raises(OSError, match=named) as caught:
                UdpWire(port=port).open()
        assert caught.value.errno == errno.EADDRINUSE

    @needs_root
    def test_open_fails_if_another_user_holds_the_port(self, wire: UdpWire, worker: MakeWorker) -> None:
        other = worker()
        other(Server.become, NOBODY)
        with pytest.raises(CallFailed, match=f"process {os.getpid()} of user 0 has the port.*run as user 0") as caught:
            other.open()
        assert caught.value.errno == errno.EACCES
        wire.receive()  # closes the other user's connection

    @needs_root
    def test_unprivileged_processes_share_the_port(self, port: int, worker: MakeWorker) -> None:
        members = [worker() for _ in range(3)]
        for member in members:
            member(Server.become, NOBODY)
        third = [member.open() for member in members][2]
        members[1].kill()
        members[0](Server.send, third << 12 | 7, b"3")
        assert [body[12:] for body in bodies(members[2].collect(1))] == [b"3"]
        with pytest.raises(OSError, match=f"of user {NOBODY} has the port") as caught:
            UdpWire(port=port).open()
        assert caught.value.errno == errno.EACCES

    def test_descriptors_are_closed_on_exec(self, port: int, worker: MakeWorker) -> None:
        member = worker()
        member.open()
        before = set(os.listdir("/proc/self/fd"))
        wire = UdpWire(port=port)
        wire.open()
        wire.listen(SERVICE, None)
        wire.send(wire.route(HERE), (mad(AttributeId.REQ, SERVICE + 1), bytes(4)))
        opened = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
        assert len(opened) >= 8
        assert not any(os.get_inheritable(fd) for fd in opened)
        wire.close()
        assert len(os.listdir("/proc/self/fd")) <= len(before)


class TestFork:
    def test_forked_child_is_a_new_member(self, wire: UdpWire) -> None:
        token = wire.listen(SERVICE, None)
        ready, done = os.pipe()
        next_slot = following(wire.slot, 1)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                wire.abandon()
                mine = UdpWire(port=wire.port)
                mine.open()
                (first,) = collect(mine, 1)
                status = 0 if mine.slot == next_slot and first.body[12:] == b"child" else 2
            finally:
                os._exit(status)
        os.close(ready)
        os.close(done)
        route = wire.route(HERE)
        got: list[Packet] = []
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            got += taken(wire)
            wire.send(route, (packet(next_slot << 12 | 7, b"child"), bytes(4)))
            wire.send(route, (packet(wire.slot << 12 | 7, b"parent"), bytes(4)))
        assert {each.body[12:] for each in got} <= {b"parent"}
        # The child has exited, and the parent still receives its requests.
        wire.send(route, (mad(AttributeId.REQ), bytes(4)))
        while mad(AttributeId.REQ) not in [each.body for each in collect(wire, 1)]:
            pass
        wire.unlisten(token)


class TestRequests:
    @pytest.mark.parametrize("attribute", [AttributeId.REQ, AttributeId.SIDR_REQ])
    def test_requests_reach_the_listener_in_any_process(self, worker: MakeWorker, attribute: int) -> None:
        members = [worker() for _ in range(3)]
        for number, member in enumerate(members):
            member.open()
            member(Server.listen, SERVICE + number, None)
        sent = []
        for count in range(60):
            data = mad(attribute, SERVICE + count % 3, tail=bytes((count,)))
            sent.append(data)
            members[count % 2](Server.send, 1, data[12:])
        for number, member in enumerate(members):
            got = member.collect(20)
            # Requests that another process has read are forwarded, and may arrive later.
            assert sorted(bodies(got)) == sorted(sent[number::3])
            assert {(segment, remote, local) for _, segment, remote, local in got} == {(0, *HERE_TEXT)}
        assert not any(member(Server.taken) for member in members)

    def test_rejection_without_an_id_reaches_every_process(self, worker: MakeWorker) -> None:
        """A peer that gives up before the REP does not know an id of this host."""
        members = [worker() for _ in range(3)]
        for member in members:
            member.open()
        data = mad(AttributeId.REJ)
        members[0](Server.send, 1, data[12:])
        for member in members:
            assert bodies(member.collect(1)) == [data]
        assert not any(member(Server.taken) for member in members)

    def test_listener_with_an_address_precedes_the_wildcard(self, wire: UdpWire, worker: MakeWorker) -> None:
        exact, of_family, of_any = worker(), worker(), worker()
        for member, local in ((exact, packed("127.0.0.2")), (of_family, bytes(4)), (of_any, None)):
            admit(wire, member)
            member(Server.listen, SERVICE, local)
        places = {
            ("127.0.0.1", "127.0.0.2"): exact,
            ("127.0.0.1", "127.0.0.3"): of_family,
            ("::1", "::1"): of_any,
        }
        for ends, member in places.items():
            wire.send(wire.route(path(*ends)), (mad(AttributeId.REQ), bytes(4)))
            ((body, _, remote, local),) = member.collect(1)
            assert body[:-4] == mad(AttributeId.REQ)
            assert (remote, local) == (ends[0], packed(ends[1]))

    def test_request_without_listener_stays_with_its_reader(self, wire: UdpWire, worker: MakeWorker) -> None:
        route = wire.route(HERE)
        member = worker()
        admit(wire, member)
        member.signal(signal.SIGSTOP)
        wire.send(route, (mad(AttributeId.REQ), bytes(4)))
        assert [each.body for each in collect(wire, 1)] == [mad(AttributeId.REQ)]
        member.signal(signal.SIGCONT)

    def test_request_to_a_killed_listener_stays_with_its_reader(self, wire: UdpWire, worker: MakeWorker) -> None:
        member = worker()
        admit(wire, member)
        member(Server.listen, SERVICE, None)
        member.signal(signal.SIGSTOP)  # so that this process reads the requests
        route = wire.route(HERE)
        wire.send(route, (mad(AttributeId.REQ), bytes(4)))
        read_all(wire)
        assert wire.counters["forwarded"] == 1
        member.kill()
        wire.send(route, (mad(AttributeId.REQ), bytes(4)))
        assert [each.body for each in collect(wire, 1)] == [mad(AttributeId.REQ)]

    def test_process_without_listener_stops_reading_requests(self, wire: UdpWire, worker: MakeWorker) -> None:
        member = worker()
        admit(wire, member)
        member(Server.listen, SERVICE, None)
        member.signal(signal.SIGSTOP)
        route = wire.route(HERE)
        sent = [mad(AttributeId.REQ, tail=bytes((count,))) for count in range(4)]
        wire.send(route, (sent[0], bytes(4)))
        read_all(wire)
        assert wire.counters["forwarded"] == 1, "this process has found the listener"
        assert not wire.resume_requests()
        wire.send(route, (sent[1], bytes(4)))
        assert not wire.receive()
        member.signal(signal.SIGCONT)
        assert sorted(bodies(member.collect(2))) == sorted(body for body in sent[:2])
        assert wire.counters["forwarded"] == 1
        # A request that has waited is read and forwarded. After it, this process stops reading again.
        member.signal(signal.SIGSTOP)
        wire.send(route, (sent[2], bytes(4)))
        wait([wire])
        assert not wire.receive()
        assert wire.resume_requests()
        read_all(wire)
        assert wire.counters["forwarded"] == 2
        wire.send(route, (sent[3], bytes(4)))
        assert not wire.receive()
        # A process with a listener of its own reads requests at once.
        wire.listen(SERVICE + 1, None)
        read_all(wire)
        assert wire.counters["forwarded"] == 3
        assert not wire.unread_request_fds() or not wire.resume_requests()
        member.signal(signal.SIGCONT)
        assert sorted(bodies(member.collect(2))) == sorted(sent[2:])

    def test_burst_is_queued_for_a_slow_listener(self, wire: UdpWire, worker: MakeWorker) -> None:
        member, other = worker(), worker()
        admit(wire, member)
        admit(wire, other)
        member(Server.listen, SERVICE, None)
        other(Server.listen, SERVICE + 1, None)
        member.signal(signal.SIGSTOP)
        other.signal(signal.SIGSTOP)
        route = wire.route(HERE)
        sent = [mad(AttributeId.REQ, tail=count.to_bytes(2, "big")) for count in range(100)]
        for data in sent:
            wire.send(route, (data, bytes(4)))
            read_all(wire)
        other.signal(signal.SIGCONT)
        wire.send(route, (mad(AttributeId.REQ, SERVICE + 1), bytes(4)))
        assert len(other.collect(1)) == 1
        member.signal(signal.SIGCONT)
        assert bodies(member.collect(100)) == sent

    def test_process_that_never_reads_blocks_no_other(self, wire: UdpWire, worker: MakeWorker) -> None:
        member = worker()
        admit(wire, member)
        member(Server.listen, SERVICE, None)
        member.signal(signal.SIGSTOP)
        route = wire.route(HERE)
        while not wire.counters["forward_full"]:
            assert wire.send(route, (mad(AttributeId.REQ), bytes(4)))
            assert not taken(wire)
        wire.send(route, (mad(AttributeId.REQ, SERVICE + 1), bytes(4)))
        assert len(collect(wire, 1)) == 1
        member.signal(signal.SIGCONT)

    def test_service_id_is_free_after_unlisten(self, wire: UdpWire, worker: MakeWorker) -> None:
        member = worker()
        admit(wire, member)
        member(Server.listen, SERVICE, None)
        with pytest.raises(OSError, match="another process listens on service id 0x1061d2f") as caught:
            wire.listen(SERVICE, None)
        assert caught.value.errno == errno.EADDRINUSE
        member(Server.unlisten)
        first, second = wire.listen(SERVICE, None), wire.listen(SERVICE, None)
        wire.unlisten(first)
        wire.unlisten(first)  # does not affect the second
        with pytest.raises(CallFailed, match="another process"):
            member(Server.listen, SERVICE, None)
        wire.unlisten(second)
        member(Server.listen, SERVICE, None)

    def test_replies_go_directly_to_the_requester(self, wire: UdpWire, worker: MakeWorker) -> None:
        member = worker()
        admit(wire, member)
        answer = mad(AttributeId.REP, remote_id=member.slot << 20 | 5)
        wire.send(wire.route(HERE), (answer, bytes(4)))
        assert bodies(member.collect(1)) == [answer]
        assert not wire.counters

    def test_packets_for_unused_slots_are_counted(self, wire: UdpWire) -> None:
        route = wire.route(HERE)
        unused = following(wire.slot, 8)
        for data in (packet(unused << 12 | 1), packet(5), mad(AttributeId.REP, remote_id=unused << 20 | 1)):
            wire.send(route, (data, bytes(4)))
        read_all(wire)
        assert wire.counters["stray"] == 3


@needs_netns
class TestFromAnotherHost:
    def test_each_process_gets_its_own_packets(self) -> None:
        with two_hosts() as net, net.b.enter(), workers(4791) as make:
            members = [make(), make()]
            for number, member in enumerate(members):
                member.open()
                member(Server.listen, SERVICE + number, None)
            with net.a.enter():
                wire = UdpWire()
                wire.open()
            try:
                for number, member in enumerate(members):
                    for ends in ((net.va.ipv4, net.vb.ipv4), (net.va.ipv6, net.vb.ipv6)):
                        route = wire.route(path(*ends))
                        train = sealed(wire, route, [packet(member.slot << 12 | 7, bytes(1000))] * 5)
                        request = mad(AttributeId.REQ, SERVICE + number)
                        assert wire.send(route, train, len(train[0]))
                        assert wire.send(route, (request, bytes(4)))
                        found = member.collect(6)
                        assert sorted(bodies(found)) == sorted([*(each[:-4] for each in train), request])
                        assert {(remote, local) for _, _, remote, local in found} == {(ends[0], packed(ends[1]))}
            finally:
                wire.close()


HERE_TEXT = ("127.0.0.1", packed("127.0.0.1"))


def read_all(wire: UdpWire) -> None:
    """Read until nothing is left, and expect no packet for this process."""
    wait([wire])
    while wire.receive() or select.select(wire.filenos(), [], [], 0)[0]:
        pass


class TestMixedTrains:
    def test_train_is_split_by_process(self, wire: UdpWire, worker: MakeWorker) -> None:
        """GRO admit packets of one source and one length, even those for different processes."""
        member, listener = worker(), worker()
        admit(wire, member)
        admit(wire, listener)
        listener(Server.listen, SERVICE, None)
        mine = [packet(wire.slot << 12 | 7, bytes((count,)) * 264) for count in range(3)]
        theirs = [packet(member.slot << 12 | 7, bytes((count,)) * 264) for count in range(3)]
        answer = mad(AttributeId.REP, remote_id=member.slot << 20)
        for order in ([mine[0], theirs[0], mine[1], theirs[1]], [theirs[2], mad(AttributeId.REQ), answer, mine[2]]):
            route = wire.route(HERE)
            train = sealed(wire, route, order)
            assert wire.send(route, train, len(train[0]))
        got: list[Packet] = []
        while len(got) < 3:
            wait([wire])
            got += taken(wire)
        assert [each.body for each in got] == mine
        assert sorted(bodies(member.collect(4))) == sorted([*theirs, answer])
        assert bodies(listener.collect(1)) == [mad(AttributeId.REQ)]


@pytest.mark.slow
class TestChurn:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_surviving_processes_lose_nothing(self, worker: MakeWorker, seed: int) -> None:
        dice = random.Random(seed)
        a, b = worker(), worker()
        a.open()
        b.open()
        a(Server.ping, b.slot)
        b(Server.ping, a.slot)
        others: list[Worker] = []
        born = 0
        for _ in range(200):
            if len(others) < 8 and dice.random() < 0.5:
                member = worker()
                member.begin(Server.open)
                others.append(member)
                born += 1
            elif others:
                member = dice.choice(others)
                action = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, None])
                if action is signal.SIGKILL:
                    member.kill()
                    others.remove(member)
                elif action:
                    member.signal(action)
                elif not member.slot and member.control.poll():
                    member.slot = member.result()
                    owners = [each.slot for each in [a, b, *others] if each.slot]
                    assert len(owners) == len(set(owners)), f"two processes own one slot of {owners}"
            pause(dice.random() * 0.01, "processes join, and a and b ask each other")
        for member in others:
            member.signal(signal.SIGCONT)
        for member in others:
            member.slot = member.slot or member.result()
        living = [a, b, *others]
        slots = [member.slot for member in living]
        assert len(slots) == len(set(slots))
        assert born > 5
        # at most ten processes at a time, and as many that were killed while they joined
        assert any(all((slot - start) % MAX_SLOT < 2 * 10 for slot in slots) for start in slots)
        # Every packet still arrives at its process.
        for member in living:
            a(Server.send, member.slot << 12 | 7, b"=%d" % member.slot)
        for member in living:
            assert b"=%d" % member.slot in [body[12:] for body in bodies(member.collect(1))]
            assert member(Server.pings)[2] == 0, "a packet came to the wrong process"
        eventually(lambda: min(member(Server.pings)[0] for member in (a, b)) > 100, "few pings are answered")
        for member in (a, b):
            _, lost, _ = member(Server.pings)
            assert lost == 0


class TestMembership:
    def test_failed_join_leaves_no_descriptors(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.05)
        before = len(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as other:
            other.bind(("::", port))
            with pytest.raises(OSError):
                PortGroup.join(port)
        assert len(os.listdir("/proc/self/fd")) == before
