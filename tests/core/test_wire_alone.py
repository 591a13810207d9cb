"""A wire of the compiled core without an owner or a thread: what it leaves and drops, and what it sends when."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from rdmacm.enums import WROpcode
from rdmacm.proto.constants import (
    EVENT_TIMER,
    GSI_QPN,
    MOST_SENT,
    MULTICAST_QPN,
    QPN_BITS,
    TURN,
)
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.roce.ud import UdSend
from rdmacm.proto.work import RecvWork, SendWork
from rdmacm.soft.wire.sockets import SOL_UDP, UDP_SEGMENT, open_socket, report_ip_fields, set_trains
from rdmacm.verbs import SendFlag
from support.clock import LONGEST, eventually
from support.compiled import is_held
from support.netns import needs_netns, two_hosts
from support.rc import ALL, BASE, RKEY, Region
from support.roce_packets import BTH, RocePacket
from support.ud import make_ud

if TYPE_CHECKING:
    from rdmacm.proto._core import ConnectedEngine
    from rdmacm.proto._core import Connection as CoreConnection

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

SIGNALED, INLINE = SendFlag.SIGNALED, SendFlag.INLINE
RC, UC = 0x00, 0x20
SENDS = RtsAttributes(5)
QPN = 5 << QPN_BITS | 1
#: The most datagrams that wait for the owner: of one queue pair, and of other processes.
MOST, MOST_OF_OTHERS = 1024, 64
#: The same in bytes, of one queue pair.
MOST_BYTES = 4 << 20


class Port:
    """A wire that reads one socket, and a socket that sends to it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        assert compiled is not None
        self.wire = compiled.Wire(compiled.Lock(), lambda: None, ())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = open_socket(family, 0)
        assert sock is not None
        self.sock = sock
        set_trains(sock, True)
        self.wire.add_source(sock.fileno())
        self.sender = socket.socket(family, socket.SOCK_DGRAM)
        self.sender.bind((host, 0))
        self.number = sock.getsockname()[1]
        self.host, self.address = socket.inet_pton(family, host), (host, self.number)

    def packet(self, qpn: int, payload: int = 4, psn: int = 0) -> bytes:
        body = RocePacket(BTH(Opcode.RC_SEND_ONLY, qpn, psn), payload=bytes(payload)).pack()
        return bytes(body) + icrc_between(self.host, self.host, self.sender.getsockname()[1]).seal([body])

    def send(self, data: bytes, segment: int = 0) -> None:
        """Send a datagram, or a train of packets of so many bytes, and have the wire read it."""
        control = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", segment))] if segment else []
        self.sender.sendmsg([data], control, 0, self.address)
        self.read()

    def read(self) -> None:
        """Have the wire read what comes next."""
        assert select.select([self.sock], [], [], 10)[0], "nothing has come"
        assert self.wire.receive(self.sock.fileno()) > 0

    def taken(self) -> list[tuple[int, int, int]]:
        """What is left to the owner: queue pair, PSN, and the bytes of a packet where it is a train."""
        return [
            (int.from_bytes(data[5:8], "big"), int.from_bytes(data[9:12], "big"), segment)
            for data, segment, *_ in self.wire.take_arrivals()
        ]

    def strays(self) -> dict[str, int]:
        """What was dropped, by its name."""
        strays, refused = self.wire.take_strays() or ([], [])
        assert not refused
        return {name: count for _, name, count in strays}

    def close(self) -> None:
        self.wire.close()
        self.sock.close()
        self.sender.close()


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.close()


# -- datagrams that no queue pair of the core takes ----------------------------------------------------------------


def test_a_process_that_shares_the_port_keeps_what_others_may_want(port: Port) -> None:
    """The system gives it packets of their slots in trains alone: those are forwarded, others are strays."""
    port.wire.set_slots((5, 12))
    for qpn, is_train, kept, counted in (
        (GSI_QPN, False, True, {}),
        (MULTICAST_QPN, False, False, {"stray": 1}),
        (2, True, False, {"stray": 1}),  # slot 0
        (QPN, False, False, {"unknown_qp": 1}),
        (12 << QPN_BITS, True, False, {"unknown_qp": 1}),
        (6 << QPN_BITS, False, False, {"stray": 1}),
        (13 << QPN_BITS, False, False, {"stray": 1}),
        (6 << QPN_BITS, True, True, {}),
    ):
        packet = port.packet(qpn)
        port.send(packet * 2 if is_train else packet, len(packet) if is_train else 0)
        assert port.taken() == [(qpn, 0, len(packet) if is_train else 0)] * kept, qpn
        assert port.strays() == counted, qpn
    port.wire.set_slots(None)
    for qpn, kept in ((MULTICAST_QPN, True), (6 << QPN_BITS, False)):
        port.send(port.packet(qpn))
        assert port.taken() == [(qpn, 0, 0)] * kept
        assert port.strays() == ({} if kept else {"unknown_qp": 1})


def test_datagrams_that_wait_for_the_owner_are_limited(port: Port) -> None:
    """Those that it has taken wait until it has processed them; then there is room again."""
    port.wire.set_slots((5,))
    port.wire.accept(QPN, 0)
    for number in range(MOST + 2):
        port.send(port.packet(QPN, psn=number))
        assert port.taken() == [(QPN, number, 0)] * (number < MOST)
    assert port.strays() == {"backlog_full": 2}
    foreign = 6 << QPN_BITS
    packet = port.packet(foreign)
    for number in range(MOST_OF_OTHERS + 3):
        port.send(2 * packet, len(packet))
        assert port.taken() == [(foreign, 0, len(packet))] * (number < MOST_OF_OTHERS)
    assert port.strays() == {"backlog_full": 3}
    port.wire.end_arrivals()
    for number in range(2):
        port.send(port.packet(QPN, psn=number))
        assert port.taken() == [(QPN, number, 0)]
        port.send(2 * packet, len(packet))
        assert port.taken() == [(foreign, 0, len(packet))]
    assert port.strays() == {}


def test_bytes_that_wait_for_the_owner_are_limited(port: Port) -> None:
    for qpn in (QPN, QPN + 1):
        port.wire.accept(qpn, 0)
    train = 16 * port.packet(QPN, 2032)
    for number in range(MOST_BYTES // len(train) + 1):
        port.send(train, len(train) // 16)
        assert len(port.taken()) == (number * len(train) < MOST_BYTES)
    assert port.strays() == {"backlog_full": 16}
    port.send(port.packet(QPN + 1))
    assert port.taken() == [(QPN + 1, 0, 0)], "another queue pair has its own"
    port.wire.end_arrivals()
    port.send(train, len(train) // 16)
    assert len(port.taken()) == 1


def test_packets_that_are_too_short_are_counted_one_by_one(port: Port) -> None:
    for size, segment, counted in ((15, 0, 1), (20, 5, 4), (21, 5, 5), (31, 15, 3)):
        port.send(bytes(size), segment)
        assert port.strays() == {"short": counted}, (size, segment)
    port.wire.accept(QPN, 0)
    packet = port.packet(QPN)
    port.send(packet + packet[:15], len(packet))
    assert port.taken() == [(QPN, 0, 0)]
    port.wire.end_arrivals()
    assert port.strays() == {"short": 1}
    port.send(port.packet(QPN + 1) + port.packet(QPN, psn=7), len(packet))
    assert port.taken() == [(QPN, 7, 0)], "the second packet alone"
    port.wire.end_arrivals()
    assert port.strays() == {"unknown_qp": 1}
    port.send(packet + packet[:16], len(packet))  # the shortest packet
    assert port.taken() == [(QPN, 0, len(packet))]
    assert port.strays() == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_fields_of_the_ip_header_are_those_that_the_system_says(host: str) -> None:
    """Other ancillary data says nothing of them."""
    port = Port(host)
    is_ipv6, level = ":" in host, socket.IPPROTO_IPV6 if ":" in host else socket.IPPROTO_IP
    port.wire.accept(QPN, 0)
    port.sock.setsockopt(level, 74 if is_ipv6 else 20, 1)  # IPV6_RECVORIGDSTADDR, IP_RECVORIGDSTADDR
    port.sock.setsockopt(socket.SOL_SOCKET, 29, 1)  # SO_TIMESTAMP
    port.sender.setsockopt(level, socket.IPV6_TCLASS if is_ipv6 else socket.IP_TOS, 0x2E)
    port.sender.setsockopt(level, socket.IPV6_UNICAST_HOPS if is_ipv6 else socket.IP_TTL, 9)
    for fields in ((-1, -1), (0x2E, 9)):
        port.send(port.packet(QPN))
        ((_, segment, source, local, group, *found),) = port.wire.take_arrivals()
        assert (segment, source[:2], local, group) == (0, (port.host, port.sender.getsockname()[1]), port.host, 0)
        assert tuple(found) == fields
        port.wire.end_arrivals()
        report_ip_fields(port.sock)
    port.close()


def test_address_of_a_peer_has_a_scope_in_ipv6_alone() -> None:
    """A packet of the same link-local address on another link is not the peer's."""
    for host, scope, is_taken in (("127.0.0.1", 7, True), ("::1", 0, True), ("::1", 7, False)):
        port = Port(host)
        port.wire.accept(QPN, 2, port.host, port.host, scope)
        port.send(port.packet(QPN))
        assert port.taken() == [(QPN, 0, 0)] * is_taken, (host, scope)
        assert port.strays() == ({} if is_taken else {"address": 1}), (host, scope)
        port.close()


@pytest.mark.parametrize(("host", "group"), [("127.0.0.1", "239.9.8.7"), ("::1", "ff15::1")])
def test_group_that_is_left_is_not_read_any_more(host: str, group: str) -> None:
    """Nothing is left of it for packets that the owner still processes, either."""
    port = Port(host)
    sock = open_socket(port.sock.family, 0)
    assert sock is not None
    key = socket.inet_pton(sock.family, group) + socket.if_nametoindex("lo").to_bytes(4, "big")
    port.wire.add_group(sock.fileno(), key)

    def send(qpn: int) -> int:
        port.sender.sendto(port.packet(qpn), (host, sock.getsockname()[1]))
        assert select.select([sock], [], [], 10)[0]
        count: int = port.wire.receive(sock.fileno())
        return count

    assert (send(MULTICAST_QPN), port.strays()) == (1, {"group": 1})
    port.wire.accept(QPN, 0)
    port.wire.set_members(key, (QPN,))
    assert (send(QPN), port.strays()) == (1, {"stray": 1})
    assert send(MULTICAST_QPN) == 1
    assert [each[4] for each in port.wire.take_arrivals()] == [socket.if_nametoindex("lo")]
    port.wire.remove_group(sock.fileno())
    port.wire.end_arrivals()
    assert (send(MULTICAST_QPN), port.strays()) == (0, {})
    sock.close()
    port.close()


def test_refused_packets_are_counted_for_their_queue_pairs(port: Port) -> None:
    for qpn in (QPN, QPN + 1):
        port.wire.accept(qpn, 0)
        for _ in range(2):
            *packet, last = port.packet(qpn)
            port.send(bytes((*packet, last ^ 1)))
    strays, refused = port.wire.take_strays() or ([], [])
    assert (strays, sorted(refused)) == ([], [(QPN, "icrc", 2), (QPN + 1, "icrc", 2)])
    assert port.taken() == []
    assert port.wire.take_strays() is None


# -- connections -----------------------------------------------------------------------------------------------------


class End(Port):
    """One end of connections between such wires, with a queue for the completions of all."""

    #: Readable when the thread has something for the owner.
    signals = -1

    def __init__(self, host: str = "127.0.0.1", room: int = 64) -> None:
        super().__init__(host)
        assert compiled is not None
        self.queue = compiled.CompletionQueue(self.wire, room)
        self.queue.owner = self

    def connect(
        self,
        peer: Port,
        transport: int = RC,
        qpn: int = QPN,
        *,
        scope: int = 0,
        train: int = 0,
        sends: RtsAttributes = SENDS,
    ) -> Connection:
        """A connection to the queue pair of the same number."""
        assert compiled is not None
        engine = compiled.ConnectedEngine(qpn, Region(), None, EngineCounters(), transport)
        engine.set_route(self.host, self.host, self.number)
        engine.set_peer_port(peer.number)
        engine.ready_to_receive(RtrAttributes(qpn, 5, path_mtu=256, access=ALL))
        engine.ready_to_send(sends)
        core = compiled.Connection(
            *(self.wire, engine, self, self.queue, self.queue),
            (self.host, scope, self.host),
            (self.sock.fileno(), peer.number, 0, [], train),
            (64, 64, 1 << 20, 4, 4, False),
        )
        return Connection(engine, core)

    def wait_for_thread(self) -> None:
        """Wait until the thread has read a packet; then it waits for the next one."""
        self.sender.sendto(b"short", self.address)
        eventually(lambda: self.strays() == {"short": 1}, "the thread reads nothing")

    @property
    def has_packets(self) -> bool:
        return bool(select.select([self.sock], [], [], 0)[0])


@dataclass
class Connection:
    engine: ConnectedEngine
    core: CoreConnection

    def send(self, data: bytes) -> None:
        assert self.core.post_part(1, WROpcode.SEND, data, 0, None, SIGNALED | INLINE, 0, 0)

    def receive(self, count: int) -> list[bytearray]:
        buffers = [bytearray(64) for _ in range(count)]
        for number, buffer in enumerate(buffers):
            self.engine.post_recv(RecvWork(number, (memoryview(buffer),)))
        return buffers


@pytest.fixture
def pair() -> Iterator[tuple[End, End]]:
    ends = End(), End(room=2)
    yield ends
    for end in ends:
        end.close()


def test_queue_that_nobody_watches_tells_of_its_overrun(pair: tuple[End, End]) -> None:
    """What comes after that is lost, and its buffer is let go of."""
    left, right = pair
    one, other = left.connect(right), right.connect(left)
    buffers = other.receive(5)
    assert not right.queue.watched
    for number in range(4):
        one.send(b"%d" % number)
        right.read()
        right.wire.end_turn(None, 0)
        left.read()
        assert right.wire.take_added() == ([(right, False, True)] if number == 2 else [])
        if number == 2:
            assert [wc.wr_id for wc in right.queue.take(8)] == [0, 1]
            right.wire.take_added()
    assert right.queue.poll(8) is None, "Python says why there is none"
    assert list(map(is_held, buffers)) == [False] * 4 + [True]
    assert [wc.status.name for wc in left.queue.take(8)] == ["SUCCESS"] * 4


def test_acks_are_deferred_where_somebody_sends_them(pair: tuple[End, End]) -> None:
    left, right = pair
    one, other = left.connect(right), right.connect(left)
    other.receive(3)
    for has_result, may_defer, deferrals in ((False, True, 0), (True, False, 1), (True, True, 2)):
        right.wire.may_defer_acks = may_defer
        one.send(b"x")
        right.read()
        assert not left.has_packets, "one ACK may do for more packets"
        right.wire.end_turn(has_result, 0)
        assert right.wire.deferrals == deferrals
        if has_result and may_defer:
            assert not left.has_packets
            right.wire.acknowledge()
        left.read()
        assert len(left.queue.take(2)) == 1


def test_train_is_acknowledged_at_once(pair: tuple[End, End]) -> None:
    """Its sender has more, and waits for room in its window."""
    left, right = pair
    one, other = left.connect(right, train=65507), right.connect(left)
    buffer = bytearray(1024)
    other.engine.post_recv(RecvWork(1, [memoryview(buffer)]))
    one.send(bytes(range(256)) * 4)
    right.read()
    assert buffer == bytes(range(256)) * 4
    left.read()
    assert len(left.queue.take(2)) == 1


def test_acks_leave_with_what_another_queue_pair_posts(pair: tuple[End, End]) -> None:
    left, right = pair
    one, other = left.connect(right), right.connect(left)
    another = right.connect(right, UC, QPN + 1)
    other.receive(1)
    one.send(b"x")
    right.read()
    assert not left.has_packets
    another.send(b"y")
    left.read()
    assert len(left.queue.take(2)) == 1


def test_read_is_answered_at_once(pair: tuple[End, End]) -> None:
    left, right = pair
    one, _ = left.connect(right), right.connect(left)
    one.engine.post_send(SendWork(1, WROpcode.RDMA_READ, [memoryview(bytearray(8))], remote_addr=BASE, rkey=RKEY))
    assert one.core.transmit(0.0, 1) == 1
    right.read()
    left.read()
    assert [wc.byte_len for wc in left.queue.take(2)] == [8]


def test_packets_that_a_connection_refuses_are_counted(pair: tuple[End, End]) -> None:
    left, right = pair
    _, other = left.connect(right), right.connect(left)
    packet = left.packet(QPN)
    for refused in (packet[:-4] + bytes(4), bytes((Opcode.RC_RDMA_WRITE_ONLY,)) + packet[1:16], packet[:-4] + bytes(4)):
        left.sock.sendto(refused, right.address)
        right.read()
    assert other.engine.to_send == 0
    strays, found = right.wire.take_strays() or ([], [])
    assert (strays, sorted(found)) == ([], [(QPN, "icrc", 2), (QPN, "length", 1)])
    assert right.wire.take_strays() is None


def test_packets_that_the_system_refuses_are_counted(pair: tuple[End, End]) -> None:
    """Each of a train by itself."""
    left, right = pair
    single, train = left.connect(right, UC), left.connect(right, UC, QPN + 1, train=4096)
    with open(os.devnull) as file:
        os.dup2(file.fileno(), left.sock.fileno())
    single.send(b"x")
    train.send(bytes(256 * 5))
    left.wire.end_turn(None, left.wire.taken)
    assert left.wire.take_traffic() == (0, 0, 0, 0, 6, 0, 0)
    assert left.wire.take_traffic() == (0, 0, 0, 0, 0, 0, 0)
    assert left.wire.take_counts() == [(errno.ENOTSOCK, 2)]


def test_queue_pairs_take_turns(pair: tuple[End, End]) -> None:
    """A long message leaves as far as it may in one call; a short one does not wait for its rest."""
    left, right = pair
    long, short = left.connect(right, UC), left.connect(right, UC, QPN + 1)
    long.send(bytes(256 * 3 * MOST_SENT))
    short.send(b"x")
    while left.wire.has_more:
        assert left.wire.end_turn(None, left.wire.taken) is left.wire.has_more
    assert len(left.queue.take(8)) == 2
    found = [int.from_bytes(right.sock.recv(512)[5:8], "big") for _ in range(3 * MOST_SENT + 1)]
    before = TURN + MOST_SENT + TURN  # at once, in the turns of that call, and once more
    assert found == [QPN] * before + [QPN + 1] + [QPN] * (3 * MOST_SENT - before)


def test_queue_pair_that_has_more_to_send_keeps_its_place(pair: tuple[End, End]) -> None:
    """It may post more meanwhile, or leave."""
    left, right = pair
    queue_pairs = [left.connect(right, UC, QPN + number) for number in range(3)]
    for one in queue_pairs:
        one.send(bytes(4 * 256 * MOST_SENT))
    for one in queue_pairs:
        one.send(b"x")
    queue_pairs[2].core.detach()
    while left.wire.has_more:
        left.wire.end_turn(None, left.wire.taken)
    assert sorted(wc.qp_num for wc in left.queue.take(8)) == [QPN, QPN, QPN + 1, QPN + 1]


def test_deadline_begins_when_a_request_has_its_turn(pair: tuple[End, End]) -> None:
    left, right = pair
    others = [left.connect(right, UC, QPN + number) for number in range(1, 5)]
    one = left.connect(right)
    for other in others:
        other.send(bytes(4 * 256 * MOST_SENT))
    one.send(b"x")
    assert left.wire.take_events() == []
    while left.wire.has_more:
        left.wire.end_turn(None, left.wire.taken)
    ((owner, events, deadline, _),) = left.wire.take_events()
    assert (owner, events, deadline) == (left, EVENT_TIMER, one.engine.deadline)
    assert deadline is not None


def test_queue_pair_that_is_forgotten_has_left(pair: tuple[End, End]) -> None:
    left, right = pair
    one = left.connect(right)
    assert left.wire.is_active
    left.wire.forget(QPN)
    assert not left.wire.is_active
    assert one.core.transmit(0.0, 1) is None
    requests = [object()]
    assert one.core.post_send(requests) is requests


def test_packets_of_another_scope_are_left_to_the_owner() -> None:
    for host, scope, is_taken in (("127.0.0.1", 7, True), ("::1", 0, True), ("::1", 7, False)):
        left, right = End(host), End(host)
        one, other = left.connect(right), right.connect(left, scope=scope)
        other.receive(1)
        one.send(b"x")
        right.read()
        assert len(right.queue.take(2)) == right.wire.taken == is_taken, (host, scope)
        assert len(right.taken()) == (not is_taken)
        left.close()
        right.close()


@needs_netns
@pytest.mark.parametrize("is_own", [True, False])
def test_link_local_address_is_that_of_a_device_on_its_link(is_own: bool) -> None:
    assert compiled is not None
    with two_hosts() as net:
        there, here = net.va.link_local, net.vb.link_local
        with net.a.enter():
            sender = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        with net.b.enter():
            port = Port("::1")
        with sender:
            sender.bind((there, 0, 0, net.va.index))
            remote, local = (socket.inet_pton(socket.AF_INET6, each) for each in (there, here))
            addresses = compiled.Addresses(net.vb.index if is_own else net.vb.index + 1)
            addresses.set([bytes(4), local])
            queue, engine = compiled.CompletionQueue(port.wire, 4), make_ud(QPN, name="c")
            engine.qkey = 5
            engine.ready_to_send(0)
            engine.post_recv(RecvWork(1, [memoryview(bytearray(64))]))
            sizes = 4, 4, 4, 4, 4, False
            queue_pair = compiled.Datagrams(port.wire, engine, port, queue, queue, addresses, (-1, -1), sizes)
            peer = make_ud(QPN, name="c")
            icrc = icrc_between(remote, local, sender.getsockname()[1])
            peer.post_send(UdSend(SendWork(1, WROpcode.SEND, [memoryview(b"text")]), "way", icrc, QPN, 5))
            ((_, pieces, _),) = peer.datagrams(1, 0)
            sender.sendto(b"".join(pieces), (here, port.number, 0, net.va.index))
            port.read()
            port.wire.accept(QPN + 1, 2, remote, local, net.vb.index if is_own else net.vb.index + 1)
            packet = bytes(RocePacket(BTH(Opcode.RC_SEND_ONLY, QPN + 1, 0), payload=b"text").pack())
            sender.sendto(packet + icrc.seal([packet]), (here, port.number, 0, net.va.index))
            port.read()
            assert port.strays() == ({} if is_own else {"address": 2})
            assert len(queue.take(2)) == len(port.taken()) == is_own
            queue_pair.detach()
            port.close()


# -- the thread that serves peers ------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[End]:
    """An end whose thread waits for its socket."""
    end = End()
    with select.epoll() as descriptors:
        end.signals = end.wire.open(descriptors.fileno())
        connection = end.connect(end, qpn=QPN - 1)
        assert end.wire.serve()
        end.wait_for_thread()
        yield end
        end.close()
        del connection


def test_thread_reads_a_socket_that_is_added_while_it_waits(served: End) -> None:
    with ExitStack() as stack:
        for number in range(8):
            sock = open_socket(socket.AF_INET, 0)
            assert sock is not None
            stack.enter_context(sock)
            served.wire.add_group(sock.fileno(), bytes((239, 0, 0, number)) + bytes(4))
            served.sender.sendto(b"short", sock.getsockname())
            eventually(lambda: served.strays() == {"short": 1}, "it is not read")
        served.close()


def test_thread_leaves_to_the_owner_what_that_processes(served: End) -> None:
    """The owner takes some at a time; what it has taken makes room for as much."""
    served.wire.accept(QPN, 0)
    train = 16 * served.packet(QPN, 2032)
    for data, count in ((served.packet(QPN), MOST), *[(train, MOST_BYTES // len(train))] * 5):
        segment = len(train) // 16 if data is train else 0
        control = [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", segment))] if segment else []
        for number in range(count):
            served.sender.sendmsg([data], control, 0, served.address)
            if number % 16 == 15:  # so many have room in the socket
                served.wait_for_thread()
        taken = []
        while lot := served.taken():
            taken.append(len(lot))
        assert taken == [256] * (count // 256) + [count % 256] * (count % 256 > 0)
        served.wire.end_arrivals()


def test_thread_does_not_look_at_a_socket_that_is_gone(served: End) -> None:
    sock = open_socket(socket.AF_INET, 0)
    assert sock is not None
    served.wire.add_group(sock.fileno(), bytes((239, 0, 0, 1)) + bytes(4))
    served.wait_for_thread()
    served.wire.remove_group(sock.fileno())
    sock.close()
    served.wait_for_thread()
    served.wire.clear_signal()
    for _ in range(4):
        served.wait_for_thread()
    assert not select.select([served.signals], [], [], 0)[0], "a descriptor that is closed is an error of poll(2)"


def test_thread_reads_again_when_a_capture_ends(served: End, port: Port) -> None:
    """Meanwhile every packet is the owner's."""
    served.wire.is_enabled = False
    served.sender.sendto(b"short", served.address)
    for _ in range(200):  # what happens elsewhere gives it time to see that
        port.send(b"short")
    assert served.strays() == {}
    served.wire.is_enabled = True
    eventually(lambda: served.strays() == {"short": 1}, "it is not read")


def test_thread_notices_a_deadline_that_begins_while_it_waits(served: End) -> None:
    nobody = Port()
    for number in range(8):
        sends = RtsAttributes(5, timeout=0.001, retry_cnt=0)
        one = served.connect(nobody, qpn=QPN + number, sends=sends)
        served.wait_for_thread()
        one.send(b"x")
        eventually(lambda: len(served.queue) == 1, "it has not ended")
        assert [wc.status.name for wc in served.queue.take(2)] == ["RETRY_EXC_ERR"]
    nobody.close()


def test_thread_tells_the_owner_of_what_it_completes(served: End) -> None:
    """It sends what a caller has left over."""
    nobody = Port()
    one = served.connect(nobody, UC)
    for _ in range(4):
        served.wait_for_thread()
        served.wire.clear_signal()
        one.send(bytes(256 * (TURN + MOST_SENT + 9)))
        eventually(lambda: len(served.queue) == 1, "it is not sent")
        assert select.select([served.signals], [], [], LONGEST)[0]
        assert len(served.queue.take(2)) == 1
    nobody.close()


def test_thread_leaves_reports_of_undelivered_packets_to_the_owner(served: End) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = closed.getsockname()
    served.wire.clear_signal()
    served.sock.sendto(b"nobody is there", nobody)
    assert select.select([served.signals], [], [], LONGEST)[0]
