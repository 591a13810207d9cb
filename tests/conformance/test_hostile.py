"""Hostile packets do not disturb a server and its client."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from ipaddress import ip_address
from random import Random

import pytest

from rdmacm import CmEventType, CmId, ConnParam, EventChannel
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.cm.connection import DropReason
from rdmacm.proto.cm.messages import DREQ, REJ, REP, unpack_message
from rdmacm.proto.mad import Mad
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.testing import Fabric, Host, Outcome
from rdmacm.verbs import MR, PD, AccessFlag, QPState, SendFlag, SendWR, WCStatus, WROpcode
from support.echo import EchoClient, EchoServer
from support.hostile import (
    ADDRESSES,
    FAMILIES,
    PORT,
    Server,
    Talk,
    asking,
    datagram,
    every_message,
    management,
    sealed,
    throw,
    trio,
)
from support.roce_packets import BTH, RETH, AtomicETH, RocePacket

E = CmEventType
SERVER, CLIENT, STRANGER = ADDRESSES
#: Packets that are thrown at a time.
BATCH = 50


@pytest.fixture(autouse=True, params=FAMILIES)
def _family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attack comes by IPv4 and by IPv6."""
    for name, address in zip(("SERVER", "CLIENT", "STRANGER"), request.param, strict=True):
        monkeypatch.setitem(globals(), name, address)


def send_in_batches(fabric: Fabric, host: Host, to: str, packets: list[bytes], talk: Callable[[], None]) -> None:
    """Send packets in batches, and exchange messages on the connection in between."""
    for start in range(0, len(packets), BATCH):
        for packet in packets[start : start + BATCH]:
            throw(host, to, packet)
        if start // BATCH % 10 == 0:
            talk()
    fabric.run(seconds=0.01)


def test_garbage_of_every_length_is_dropped() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        random = Random(1)
        qpns = [qpn.to_bytes(3, "big") for qpn in (1, *talk.qpns)]
        for host in (stranger, talk.host):
            garbage = []
            for length in range(2001):
                data = bytearray(random.randbytes(length))
                if length > 8 and length % 2:  # for an existing QPN
                    data[5:8] = qpns[length // 2 % 3]
                garbage.append(bytes(data))
            before = server.host.provider.host.mux.dropped.total()
            send_in_batches(fabric, host, SERVER, garbage, lambda: talk.on(1))
            assert server.host.provider.host.mux.dropped.total() - before == 2001
        assert len(server.host.provider.host.mux.dropped) < 10, "counted by reason, not by content"


def packets_of_a_connection(fabric: Fabric, server: Server, host: Host) -> list[tuple[str, bytes]]:
    """All packets of a finished connection: (sender, packet)."""
    start = len(fabric.log)
    talk = Talk(server, host)
    talk.on(4)
    talk.end()
    fabric.run(seconds=5)
    return [(entry.packet.source, entry.packet.data) for entry in list(fabric.log)[start:]]


def damaged(random: Random, packet: bytes) -> bytes:
    if random.random() < 0.3:
        return packet[: random.randrange(len(packet))]
    data = bytearray(packet)
    for _ in range(random.choice((1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data) if data != packet else b""


def test_damaged_packets_are_dropped() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, _):
        random = Random(2)
        start = len(fabric.log)
        talk.on(4)
        packets = [entry.packet for entry in list(fabric.log)[start:] if entry.outcome is Outcome.DELIVERED]
        packets += [entry.packet for entry in list(fabric.log)[:start] if entry.packet.dest_qp == 1]
        hosts = {"a": (server.host, CLIENT), "b": (talk.host, SERVER)}
        for _ in range(60):
            for packet in random.choices(packets, k=100):
                host, to = hosts[packet.source]
                throw(host, to, damaged(random, packet.data))
            talk.on(1)
        for host in (server.host, talk.host):
            dropped = host.provider.host.mux.dropped
            assert dropped["short"] > 50, dropped
            assert dropped["icrc"] + dropped["gsi_length"] > 50, dropped
            assert len(host.provider.host.cm.agent) == 1


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_replayed_packets_of_an_old_connection_are_harmless(pause: float) -> None:
    """A replayed REQ counts as a new request once the old connection is forgotten. Its REP stays unanswered."""
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, _):
        old = packets_of_a_connection(fabric, server, talk.host)
        fabric.run(seconds=pause)
        random = Random(3)
        packets = random.choices(old, k=1000)
        for start in range(0, len(packets), BATCH):
            for source, data in packets[start : start + BATCH]:
                host, to = (server.host, CLIENT) if source == "a" else (talk.host, SERVER)
                throw(host, to, data)
            talk.on(1)
            assert len(server.host.provider.host.cm.agent) <= 3
        # The REP to a replayed REQ is retransmitted until it times out.
        fabric.run(seconds=200)
        assert len(server.regions) == 1


def test_forged_packets_with_the_right_qpn_and_psn_are_dropped() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        peer, _ = talk.qpns
        attr = talk.cmid.qp.query()[0]
        memory = server.regions[talk.peer]
        before = memory.read(memory.length)
        for psn in range(attr.sq_psn, attr.sq_psn + 200):
            bth = BTH(Opcode.RC_RDMA_WRITE_ONLY, peer, psn & 0xFFFFFF, ack_req=True)
            packet = RocePacket(bth, reth=RETH(memory.addr, memory.rkey, 8), payload=b"stranger").pack()
            throw(stranger, SERVER, sealed(stranger, SERVER, packet))
            # With the client's ICRC, but from another address.
            throw(stranger, SERVER, sealed(talk.host, SERVER, packet))
        (accepted,) = fabric.log.select(Outcome.DELIVERED, "REP")
        rep = unpack_message(Mad.unpack(accepted.packet.data[20:-4]))
        assert isinstance(rep, REP)
        dreq = DREQ(rep.remote_comm_id, rep.local_comm_id, rep.local_qpn)
        throw(stranger, SERVER, sealed(stranger, SERVER, management(dreq)))
        fabric.run(seconds=1)
        assert memory.read(memory.length) == before
        assert server.host.provider.host.mux.dropped["address"] == 400
        assert server.host.provider.host.cm.agent.dropped[DropReason.WRONG_PATH] == 1
        assert not [entry for entry in fabric.log if entry.packet.destination == "c"]


def test_cm_messages_for_unknown_communication_ids_are_dropped() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        random = Random(4)
        messages = [message for _ in range(40) for message in every_message(random)]
        packets = [sealed(stranger, SERVER, management(message, tid)) for tid, message in enumerate(messages)]
        random.shuffle(packets)
        send_in_batches(fabric, stranger, SERVER, packets, lambda: talk.on(1))
        agent = server.host.provider.host.cm.agent
        assert len(agent) == 1
        assert agent.dropped.total() == len(messages)
        assert agent.dropped[DropReason.UNSUPPORTED] == 0
        # Only REP, DREQ and SIDR_REQ are answered, by REJ, DREP and SIDR_REP.
        kinds = [entry.packet.kind for entry in fabric.log.select(Outcome.DELIVERED) if entry.packet.destination == "c"]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == {"REJ": 40, "DREP": 40, "SIDR_REP": 40}


def test_malformed_mads_are_dropped() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        random = Random(5)
        mads = [management(message)[20:] for message in every_message(random)]
        mads.append(management(asking(STRANGER, SERVER, 77))[20:])
        packets = []
        for _ in range(2000):
            mad = bytearray(random.choice(mads)) if random.random() < 0.8 else bytearray(random.randbytes(256))
            for _ in range(random.choice((1, 2, 30))):
                mad[random.randrange(len(mad))] = random.getrandbits(8)
            packets.append(sealed(stranger, SERVER, datagram(bytes(mad))))
        send_in_batches(fabric, stranger, SERVER, packets, lambda: talk.on(1))
        agent = server.host.provider.host.cm.agent
        assert agent.dropped[DropReason.MALFORMED] > 100
        assert agent.dropped.total() > 1500
        fabric.run(seconds=600)  # requests that were well-formed by chance are given up
        assert len(agent) == 1


def test_requests_for_a_service_without_listener_are_rejected() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        for number in range(1, 501):
            throw(stranger, SERVER, sealed(stranger, SERVER, management(asking(STRANGER, SERVER, number, PORT + 1))))
            if number % 100 == 0:
                talk.on(1)
        fabric.run(seconds=1)
        assert len(server.host.provider.host.cm.agent) == 1
        answers = [entry.packet for entry in fabric.log.select(Outcome.DELIVERED, "REJ")]
        refused = [unpack_message(Mad.unpack(packet.data[20:-4])) for packet in answers]
        assert all(isinstance(rej, REJ) and rej.reason == RejectReason.INVALID_SERVICE_ID for rej in refused)
        assert [rej.remote_comm_id for rej in refused if isinstance(rej, REJ)] == list(range(1, 501))


# -- full backlogs --------------------------------------------------------------------------------------


def idle_listener(host: Host, backlog: int, port: int = PORT) -> tuple[EventChannel, CmId]:
    """A listener whose application reads no events."""
    channel = EventChannel(host.provider)
    listener = CmId(channel)
    listener.bind_addr((host.addresses[0], port))
    listener.listen(backlog)
    return channel, listener


def test_flood_of_requests_is_limited_to_the_backlog() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        channel, listener = idle_listener(server.host, 16, PORT + 2)
        agent = server.host.provider.host.cm.agent
        for number in range(1, 2001):
            throw(stranger, SERVER, sealed(stranger, SERVER, management(asking(STRANGER, SERVER, number, PORT + 2))))
            if number % 200 == 0:
                talk.on(1)
                assert len(agent) == 17
        fabric.run(seconds=1)
        waiting = len(server.host.provider.host.mux.gsi._admission.waiting)
        assert agent.dropped[DropReason.BACKLOG] + waiting == 2000 - 16
        assert not fabric.log.count(kind="REJ")
        for _ in range(16):  # now the application reads its events
            with channel.get_event(0) as event:
                assert event.type is E.CONNECT_REQUEST
            event.id.reject()
            event.id.destroy()
        with pytest.raises(BlockingIOError):
            channel.get_event(0)
        listener.destroy()
        channel.close()
        fabric.run(seconds=60)
        assert len(agent) == 1


def test_unaccepted_requests_are_rejected_when_the_listener_closes() -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        channel, listener = idle_listener(server.host, 16, PORT + 2)
        for number in range(1, 100):
            throw(stranger, SERVER, sealed(stranger, SERVER, management(asking(STRANGER, SERVER, number, PORT + 2))))
        fabric.run(seconds=1)
        talk.on(1)
        listener.destroy()
        channel.close()
        fabric.run(seconds=60)
        assert len(server.host.provider.host.cm.agent) == 1


def test_request_beyond_the_backlog_is_accepted_later() -> None:
    fabric = Fabric(1)
    a, b = fabric.host("a", SERVER), fabric.host("b", CLIENT)
    channel, listener = idle_listener(a, 1)
    events: list[tuple[float, CmId, E]] = []
    clients = EventChannel(b.provider)
    b.on_event(clients, lambda event: events.append((fabric.now, event.id, event.type)))
    first, second = CmId(clients), CmId(clients)
    for cmid in (first, second):
        cmid.resolve_addr((SERVER, PORT))
        fabric.run(seconds=0.01)
        cmid.resolve_route()
        fabric.run(seconds=0.01)
        cmid.create_qp()
        cmid.connect()
    events.clear()
    fabric.run(seconds=20)
    assert not events, "neither accepted nor refused"
    assert a.provider.host.cm.agent.dropped[DropReason.BACKLOG] > 1
    assert not fabric.log.count(kind="REJ")
    accepted: list[CmId] = []
    while len(accepted) < 2:
        with channel.get_event(timeout=60) as event:
            if event.type is E.CONNECT_REQUEST:
                accepted.append(event.id)
                event.id.create_qp()
                event.id.accept()
    assert fabric.run(lambda: len(events) == 2, seconds=10)
    assert [(cmid, kind) for _, cmid, kind in events] == [(first, E.ESTABLISHED), (second, E.ESTABLISHED)]
    for cmid in (*accepted, listener, first, second):
        cmid.destroy()
    channel.close()
    clients.close()


# -- forbidden remote access ----------------------------------------------------------------------------

TOP = 1 << 64


@pytest.mark.parametrize(
    ("opcode", "address", "length"),
    [
        (WROpcode.RDMA_WRITE, lambda addr, end: addr - 1, 1),
        (WROpcode.RDMA_WRITE, lambda addr, end: end, 1),
        (WROpcode.RDMA_WRITE, lambda addr, end: end - 7, 8),
        (WROpcode.RDMA_WRITE, lambda addr, end: TOP - 8, 16),
        (WROpcode.RDMA_WRITE, lambda addr, end: 0, 8),
        (WROpcode.RDMA_READ, lambda addr, end: end - 7, 8),
        (WROpcode.RDMA_READ, lambda addr, end: TOP - 8, 16),
        (WROpcode.RDMA_READ, lambda addr, end: addr - 2000, 2048),
        (WROpcode.ATOMIC_FETCH_AND_ADD, lambda addr, end: end, 8),
        (WROpcode.ATOMIC_FETCH_AND_ADD, lambda addr, end: TOP - 8, 8),
        (WROpcode.ATOMIC_CMP_AND_SWP, lambda addr, end: (addr & ~7) - 8, 8),
    ],
)
def test_access_beyond_the_region_is_refused(opcode: WROpcode, address: Callable[[int, int], int], length: int) -> None:
    with trio((SERVER, CLIENT, STRANGER)) as (_, server, talk, _):
        other = Talk(server, talk.host)
        memory = server.regions[other.peer]
        before = hashlib.sha256(memory.buf).digest()
        target = address(memory.addr, memory.addr + memory.length)
        if opcode is WROpcode.ATOMIC_FETCH_AND_ADD:
            target &= ~7
        wr = SendWR(9, opcode, [other.region.sge(0, length)], remote_addr=target, rkey=memory.rkey)
        if opcode in (WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.ATOMIC_CMP_AND_SWP):
            wr.set_wr_atomic(memory.rkey, target, 1, 1)
        other.cmid.qp.post_send(wr)
        wc = other.cmid.get_send_comp(60)
        assert (wc.wr_id, wc.status) == (9, WCStatus.REM_ACCESS_ERR)
        assert other.cmid.qp.state is QPState.ERR
        assert other.peer.qp.state is QPState.ERR, "the responder's queue pair fails too"
        assert hashlib.sha256(memory.buf).digest() == before
        assert [other.peer.get_recv_comp(60).status for _ in range(4)] == [WCStatus.WR_FLUSH_ERR] * 4
        other.cmid.disconnect()
        other.end()


#: Syndromes of NAKs.
INVALID, ACCESS = 0x61, 0x62


@pytest.mark.parametrize(
    ("make", "syndrome"),
    [
        (
            lambda bth, addr, rkey: RocePacket(bth(Opcode.RC_RDMA_READ_REQUEST), reth=RETH(addr, rkey, 0xFFFFFFFF)),
            INVALID,
        ),
        (lambda bth, addr, rkey: RocePacket(bth(Opcode.RC_RDMA_READ_REQUEST), reth=RETH(addr, rkey, 1 << 30)), ACCESS),
        (lambda bth, addr, rkey: RocePacket(bth(Opcode.RC_RDMA_READ_REQUEST), reth=RETH(addr, rkey ^ 1, 8)), ACCESS),
        (
            lambda bth, addr, rkey: RocePacket(
                bth(Opcode.RC_RDMA_WRITE_ONLY), reth=RETH(addr, rkey, 0xFFFFFFFF), payload=b"stranger"
            ),
            INVALID,
        ),
        (
            lambda bth, addr, rkey: RocePacket(
                bth(Opcode.RC_RDMA_WRITE_ONLY), reth=RETH(addr, rkey, 4), payload=bytes(8)
            ),
            INVALID,
        ),
        (
            lambda bth, addr, rkey: RocePacket(
                bth(Opcode.RC_RDMA_WRITE_FIRST), reth=RETH(addr, rkey, 1 << 30), payload=bytes(4096)
            ),
            ACCESS,
        ),
        (lambda bth, addr, rkey: RocePacket(bth(Opcode.RC_RDMA_WRITE_MIDDLE), payload=bytes(4096)), INVALID),
        (lambda bth, addr, rkey: RocePacket(bth(Opcode.RC_SEND_LAST), payload=b"what?   "), INVALID),
        (
            lambda bth, addr, rkey: RocePacket(
                bth(Opcode.RC_FETCH_ADD), atomic_eth=AtomicETH((addr & ~7) + 4, rkey, 1, 0)
            ),
            INVALID,
        ),
        (
            lambda bth, addr, rkey: RocePacket(
                bth(Opcode.RC_COMPARE_SWAP), atomic_eth=AtomicETH((addr & ~7) + 8, rkey ^ 1, 0, 1)
            ),
            ACCESS,
        ),
    ],
)
def test_invalid_requests_are_answered_with_nak(
    make: Callable[[Callable[[Opcode], BTH], int, int], RocePacket], syndrome: int
) -> None:
    """Crafted packets with the expected PSN and a valid ICRC get the NAK of their error, and nothing else."""
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, _):
        other = Talk(server, talk.host)
        other.on(1)
        memory = server.regions[other.peer]
        before = hashlib.sha256(memory.buf).digest()
        peer, own = other.qpns
        sent = [entry.packet for entry in fabric.log if entry.packet.dest_qp == peer]
        psn = (sent[-1].psn + 1) & 0xFFFFFF  # the last was a READ of one packet
        packet = make(lambda opcode: BTH(opcode, peer, psn, ack_req=True), memory.addr, memory.rkey)
        throw(talk.host, SERVER, sealed(talk.host, SERVER, packet.pack()))
        fabric.run(seconds=0.01)
        (nak,) = [entry.packet for entry in list(fabric.log)[-2:] if entry.packet.dest_qp == own]
        assert (nak.psn, nak.data[12]) == (psn, syndrome)
        assert other.peer.qp.state is QPState.ERR
        assert hashlib.sha256(memory.buf).digest() == before
        other.end()


def test_rkey_of_another_protection_domain_is_refused() -> None:
    """A region's key is valid only on queue pairs of its protection domain."""
    with trio((SERVER, CLIENT, STRANGER)) as (_, server, talk, _):
        other = Talk(server, talk.host)
        domain = PD(other.peer.verbs)
        region = MR(domain, bytearray(64), AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE)
        other.cmid.post_write(5, b"x" * 8, region.addr, region.rkey, flags=SendFlag.INLINE)
        assert other.cmid.get_send_comp(60).status is WCStatus.REM_ACCESS_ERR
        assert bytes(region.buf) == bytes(64)
        region.close()
        domain.close()
        other.cmid.disconnect()
        other.end()


def test_crashed_clients_leave_nothing_behind() -> None:
    """A hundred times, a client's host crashes during a connection and reboots."""
    fabric = Fabric(1)
    server = Server(fabric.host("a", SERVER))
    for round_ in range(100):
        host = fabric.host("b", CLIENT)
        talk = Talk(server, host)
        talk.on(1)
        talk.cmid.post_send(1, b"last words", flags=SendFlag.INLINE)
        fabric.crash("b")
        if round_ % 2:
            talk.peer.disconnect()
        talk.release()
        fabric.run(seconds=0.001)
    for cmid in list(server.connected):
        cmid.disconnect()
    fabric.run(seconds=300)
    assert len(server.host.provider.host.cm.agent) == 0
    assert len(server.host.provider.host.mux) == 0
    assert not server.regions
    server.close()


# -- real sockets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("_family", [ADDRESSES], indirect=True)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_server_in_another_process_survives_hostile_packets(host: str) -> None:
    """The same packets from an ordinary UDP socket, to the port that both processes share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ours = ip_address(host).packed
    random = Random(6)
    with EchoServer(host) as server, EchoClient(host, server.port) as client, socket.socket(family, 2) as stranger:
        assert client.wait() == 0
        client.echo()
        assert isinstance(client.param, ConnParam)
        stranger.bind((host, 0))
        flow = Icrc(ours, ours, stranger.getsockname()[1])
        qpns = [qpn.to_bytes(3, "big") for qpn in (1, client.param.qp_num, client.cmid.qp.qp_num, 0xFFFFFF)]
        messages = [management(message) for _ in range(20) for message in every_message(random)]
        for source, destination in ((host, host), ("10.0.0.3", "10.0.0.1"), ("fd00::3", "fd00::1")):
            messages += [management(asking(source, destination, number, server.port)) for number in range(1, 67)]
        packets = [packet + flow.seal([packet]) for packet in messages]
        packets += [damaged(random, packet) for packet in random.choices(packets, k=500)]
        for length in range(2001):
            data = bytearray(random.randbytes(length))
            if length > 8:
                data[5:8] = random.choice(qpns)
            packets.append(bytes(data))
        for qpn in (client.param.qp_num, client.cmid.qp.qp_num):  # from another port than the peer's, with any PSN
            for opcode in range(256):
                packet = BTH(opcode, qpn, random.getrandbits(24), ack_req=True).pack() + random.randbytes(32)
                packets.append(packet + flow.seal([packet]))
        random.shuffle(packets)
        before = server.resident
        for start in range(0, len(packets), 100):
            for packet in packets[start : start + 100]:
                stranger.sendto(packet, (host, 4791))
            client.echo()
        client.echo(10)
        assert server.process.poll() is None
        assert server.resident < before + (16 << 20)
        with EchoClient(host, server.port) as another:
            assert another.wait() == 0
            another.echo(3)
