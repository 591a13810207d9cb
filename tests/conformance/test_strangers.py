"""Requests of strangers: with forged addresses, and more than can be served."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from ipaddress import ip_address
from random import Random

import pytest

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.address import Gid
from rdmacm.proto.cm.admission import PERMITS, RATE
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.cm.connection import DropReason
from rdmacm.proto.cm.messages import APR, DREP, DREQ, LAP, MRA, REJ, REP, REQ, RTU, SIDR_REP, Message, unpack_message
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.mad import Mad
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.provider.connparam import ConnParam
from rdmacm.testing import LOSE, Fabric, Host, Outcome
from rdmacm.verbs import QPCap, QPInitAttr, SendFlag, WCStatus
from support.hostile import ADDRESSES, FAMILIES, PORT, Server, Talk, asking, equipped, management, sealed, throw, trio
from support.roce_packets import BTH, RocePacket

E = CmEventType
SERVER, CLIENT, STRANGER = ADDRESSES
THIRD = "10.0.0.77"


@pytest.fixture(autouse=True, params=FAMILIES)
def _family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attack comes by IPv4 and by IPv6."""
    third = THIRD if ":" not in request.param[0] else "fd00::77"
    for name, address in zip(("SERVER", "CLIENT", "STRANGER", "THIRD"), (*request.param, third), strict=True):
        monkeypatch.setitem(globals(), name, address)


def ask(host: Host, request: REQ, tid: int = 1) -> None:
    throw(host, SERVER, sealed(host, SERVER, management(request, tid)))


def bytes_between(fabric: Fabric, one: str, other: str) -> tuple[int, int]:
    """Bytes of UDP payload that each host has sent to the other."""
    sent = {one: 0, other: 0}
    for entry in fabric.log:
        packet = entry.packet
        if {packet.source, packet.destination} == {one, other}:
            sent[packet.source] += len(packet.data)
    return sent[one], sent[other]


@pytest.mark.parametrize(
    ("names", "reason", "has_ari"),
    [
        (("THIRD", "SERVER", "STRANGER", "SERVER"), RejectReason.INVALID_GID, True),
        (("STRANGER", "THIRD", "STRANGER", "SERVER"), RejectReason.INVALID_GID, True),
        (("fe80::1", "SERVER", "STRANGER", "SERVER"), RejectReason.INVALID_GID, True),
        (("STRANGER", "SERVER", "THIRD", "SERVER"), RejectReason.CONSUMER_DEFINED, False),
        (("CLIENT", "SERVER", "CLIENT", "SERVER"), RejectReason.INVALID_GID, True),
    ],
)
def test_request_that_names_other_addresses_than_its_own_is_rejected(
    names: tuple[str, str, str, str], reason: RejectReason, has_ari: bool
) -> None:
    """``names``: the sender's and the receiver's address in the GIDs, and in the private data."""
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, _, stranger):
        before, start = len(server.seen), len(fabric.log)
        request = asking(STRANGER, SERVER, 7)
        local, remote, source, destination = (ip_address(globals().get(name, name)).packed for name in names)
        primary = replace(request.primary, local_gid=Gid.from_ip(local), remote_gid=Gid.from_ip(remote))
        header = PrivateDataHeader(4 if len(source) == 4 else 6, 7, source, destination).pack()
        ask(stranger, replace(request, primary=primary, private_data=header))
        fabric.run(seconds=200)
        (answer,) = [entry.packet for entry in list(fabric.log)[start:] if entry.packet.source == "a"]
        rej = unpack_message(Mad.unpack(answer.data[20:-4]))
        assert isinstance(rej, REJ)
        assert rej.reason == reason
        assert rej.ari[: rej.reject_info_length] == (bytes(Gid.from_ip(ip_address(SERVER).packed)) if has_ari else b"")
        assert len(server.seen) == before


class Greeter(Server):
    """A server that sends messages as soon as it has accepted."""

    GREETINGS = 8

    def serve(self, event: CmEvent) -> None:
        super().serve(event)
        if event.type is E.CONNECT_REQUEST:
            for number in range(self.GREETINGS):
                event.id.post_send(number, bytes([number]) * 64, flags=SendFlag.INLINE)


def test_address_that_does_not_answer_gets_three_times_what_it_has_sent() -> None:
    """The application speaks first, and the connection manager repeats its REP for a minute."""
    fabric = Fabric(1)
    a, c = fabric.host("a", SERVER), fabric.host("c", STRANGER)
    c.wire.open()
    server = Greeter(a)
    request = replace(asking(STRANGER, SERVER, 7), max_cm_retries=15, local_cm_response_timeout=20)
    for copies in (1, 2):
        ask(c, request)
        fabric.run(seconds=1)
        received, sent = bytes_between(fabric, "c", "a")
        assert 0 < sent <= 3 * received, copies
    fabric.run(seconds=300)
    received, sent = bytes_between(fabric, "c", "a")
    assert sent == 3 * received
    assert server.seen == [E.CONNECT_REQUEST, E.UNREACHABLE]
    server.close()


@pytest.mark.parametrize("lost_rtu", [False, True])
def test_first_messages_of_a_server_wait_for_the_peer(lost_rtu: bool) -> None:
    """They are sent with the RTU; if it is lost, with the peer's first packet."""
    fabric = Fabric(1)
    server = Greeter(fabric.host("a", SERVER))
    client = CmId(provider=fabric.host("b", CLIENT).provider)
    client.resolve_addr((SERVER, PORT))
    client.resolve_route()
    region = equipped(client)
    for slot in range(4, 8):
        client.post_recv(slot, region, slot * 256, 256)
    if lost_rtu:
        fabric.faults = lambda packet: LOSE if packet.kind == "RTU" else None
    client.connect()
    if lost_rtu:
        fabric.run(seconds=1)
        assert not fabric.log.count(Outcome.DELIVERED, "SEND_ONLY")
        client.post_send(0, b"hello", flags=SendFlag.INLINE)
    found = [client.get_recv_comp(60) for _ in range(Greeter.GREETINGS)]
    assert [wc.status for wc in found] == [WCStatus.SUCCESS] * Greeter.GREETINGS
    assert region.read(64, 7 * 256) == bytes([7]) * 64
    assert fabric.now < 2.0
    client.disconnect()
    fabric.run(seconds=1)
    client.destroy()
    region.close()
    server.close()


def test_request_takes_no_id_before_it_is_fetched() -> None:
    fabric = Fabric(1)
    a, c = fabric.host("a", SERVER), fabric.host("c", STRANGER)
    c.wire.open()
    channel = EventChannel(a.provider)
    listener = CmId(channel)
    listener.bind_addr((SERVER, PORT))
    listener.listen(64)
    for number in range(1, 101):
        ask(c, asking(STRANGER, SERVER, number), number)
    fabric.run(seconds=1)
    host = a.provider.host
    assert len(host.cm.agent) == 64
    assert host.bound_ids == 1
    assert len(channel._queue.ids) == 1  # type: ignore[attr-defined]
    with channel.get_event(0) as event:
        assert event.type is E.CONNECT_REQUEST
    assert host.bound_ids == 2
    event.id.destroy()
    listener.destroy()
    with pytest.raises(BlockingIOError):
        channel.get_event(0)
    fabric.run(seconds=60)
    assert len(host.cm.agent) == 0
    assert fabric.log.count(kind="REJ") == 64
    channel.close()


def test_request_that_is_withdrawn_is_not_reported() -> None:
    fabric = Fabric(1)
    a, c = fabric.host("a", SERVER), fabric.host("c", STRANGER)
    c.wire.open()
    channel = EventChannel(a.provider)
    listener = CmId(channel)
    listener.bind_addr((SERVER, PORT))
    listener.listen()
    for number in (1, 2):
        ask(c, asking(STRANGER, SERVER, number), number)
    guid = asking(STRANGER, SERVER, 1).local_ca_guid.to_bytes(8, "big")
    throw(c, SERVER, sealed(c, SERVER, management(REJ(1, 0, 2, RejectReason.TIMEOUT, 8, guid))))
    fabric.run(seconds=1)
    with channel.get_event(0) as event:
        assert event.type is E.CONNECT_REQUEST
        assert event.id.dst_port == 2
    with pytest.raises(BlockingIOError):
        channel.get_event(0)
    event.id.destroy()
    listener.destroy()
    channel.close()


def test_reply_to_a_request_that_was_given_up_is_rejected() -> None:
    """The REJ of the client is lost. The server learns it when it sends the REP, and not after all its retries."""
    fabric = Fabric(1)
    server = Server(fabric.host("a", SERVER))
    channel = EventChannel(fabric.host("b", CLIENT).provider)
    client = CmId(channel)
    client.resolve_addr((SERVER, PORT))
    channel.get_event().ack()
    client.resolve_route()
    channel.get_event().ack()
    equipped(client).close()
    client.connect()
    fabric.faults = lambda packet: LOSE if packet.kind == "REJ" and packet.source == "b" else None
    client.destroy()
    fabric.faults = None
    fabric.run(seconds=1)
    assert [(entry.outcome, entry.packet.source, entry.packet.kind) for entry in fabric.log] == [
        (Outcome.LOST, "b", "REJ"),
        (Outcome.DELIVERED, "b", "REQ"),
        (Outcome.DELIVERED, "a", "REP"),
        (Outcome.DELIVERED, "b", "REJ"),
    ]
    assert server.seen == [E.CONNECT_REQUEST, E.REJECTED]
    server.close()
    channel.close()


def test_every_packet_of_a_stranger_that_has_no_effect_is_counted() -> None:
    """No id of any connection is known, nothing is kept, and nobody gets more answers than 1,024 at once."""
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        random = Random(1)
        ours, theirs = random.getrandbits(32), random.getrandbits(32)
        gids = Gid("fe80::1"), Gid("fe80::2")
        unknown: list[Message] = [
            *(RTU(ours, theirs), DREP(ours, theirs)),
            *(REJ(ours, theirs, 0, 28), MRA(ours, theirs, 0, 24), SIDR_REP(theirs)),
            LAP(ours, theirs, 5, 20, 1, 2, *gids, 0, 0, 64, 2, 0, False, 14),
            APR(ours, theirs, 0),
        ]
        mads = [management(message) for message in unknown for _ in range(50)]
        for offset, value in ((20 + 17, 0x42), (20 + 17, 0x1B), (20 + 1, 0x21), (20 + 1, 0x81)):
            mad = bytearray(management(RTU(ours, theirs)))
            mad[offset] = value  # attribute, class
            mads += [bytes(mad)] * 50
        reps, dreqs = 500, 1500  # they are answered
        mads += [management(REP(local_comm_id=ours, remote_comm_id=theirs))] * reps
        mads += [management(DREQ(ours, theirs, 5))] * dreqs
        server_qpn, _ = talk.qpns
        packets = [RocePacket(BTH(Opcode.RC_SEND_ONLY, qpn, 0), payload=bytes(8)).pack() for qpn in (server_qpn, 77)]
        mux, cm = server.host.provider.host.mux, server.host.provider.host.cm
        before, log_length = Counter(mux.dropped), len(fabric.log)
        for packet in (*mads, *packets * 50):
            throw(stranger, SERVER, sealed(stranger, SERVER, packet))
            if random.random() < 0.02:
                fabric.run(seconds=0.0001)
        fabric.run(seconds=0.01)
        allowed = cm.dropped[DropReason.UNKNOWN] - 50 * len(unknown)
        assert 1024 <= allowed < 1100, "and some more in that time"
        assert cm.dropped == {
            DropReason.UNKNOWN: 50 * len(unknown) + allowed,
            DropReason.MALFORMED: 200,
        }
        assert mux.dropped - before == {"request_flood": reps + dreqs - allowed, "address": 50, "unknown_qp": 50}
        answers = [entry.packet.kind for entry in list(fabric.log)[log_length:] if entry.packet.source == "a"]
        assert answers == ["REJ"] * reps + ["DREP"] * (allowed - reps)
        assert len(cm.agent) == 1


def test_peer_that_answers_when_all_are_accepted_is_not_kept_waiting() -> None:
    """It sends an RTU only once it has the REPs to all its requests, which are more than there are permits."""
    fabric = Fabric(1)
    server, client = fabric.host("a", SERVER), fabric.host("b", CLIENT)
    accepted, seen = EventChannel(server.provider), EventChannel(client.provider)
    ended: Counter[CmEventType] = Counter()
    served: list[CmId] = []

    def serve(event: CmEvent) -> None:
        ended[event.type] += 1
        if event.type is E.CONNECT_REQUEST:
            served.append(event.id)
            event.id.create_qp(QPInitAttr(cap=QPCap(1, 1)))
            event.id.accept()

    server.on_event(accepted, serve)
    answered: list[CmId] = []
    client.on_event(seen, lambda event: answered.append(event.id) if event.type is E.CONNECT_RESPONSE else None)
    listener = CmId(accepted)
    listener.bind_addr((SERVER, PORT))
    listener.listen(1024)
    ids = []
    for number in range(PERMITS + 400):
        cmid = CmId(provider=client.provider)
        cmid.resolve_addr((SERVER, PORT))
        cmid.resolve_route()
        cmid.migrate(seen)
        cmid.connect(ConnParam(qp_num=1000 + number))
        ids.append(cmid)
    assert fabric.run(lambda: len(answered) == len(ids), seconds=0.5), "of 6 seconds in which permits are replaced"
    assert fabric.log.count(Outcome.DELIVERED, "REQ") == len(ids)
    assert fabric.log.count(Outcome.DELIVERED, "MRA") >= 400
    assert ended == {E.CONNECT_REQUEST: len(ids)}
    udp = server.provider.query_counters().udp
    assert udp["request_waited"] > 0
    assert "rx_request_flood" not in udp
    for cmid in ids:
        cmid.establish()
    assert fabric.run(lambda: ended[E.ESTABLISHED] == len(ids), seconds=1)
    for cmid in (*ids, *served, listener):
        cmid.destroy()
    accepted.close()
    seen.close()


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True])
def test_strangers_do_not_keep_a_newcomer_out(many: bool) -> None:
    """Forged requests of one source or many, thousands a second, at a server that accepts them all."""
    with trio((SERVER, CLIENT, STRANGER)) as (fabric, server, talk, stranger):
        gsi = server.host.provider.host.mux.gsi
        for number in range(1, 2001):
            network = f"10.1.{number >> 8}.{number & 255}" if "." in SERVER else f"fd01:0:0:{number:x}::1"
            source = network if many else STRANGER
            packet = management(asking(source, SERVER, number), number)
            icrc = Icrc(ip_address(source).packed, ip_address(SERVER).packed, 50_000).seal([packet])
            # As from the server's wire: a host of a fabric sends from its own addresses only.
            gsi.received(memoryview(packet + icrc), (source, 50_000), ip_address(SERVER).packed, fabric.now)
            if number % 200 == 0:
                talk.on(1)
                fabric.run(seconds=0.05)
        assert stranger.addresses == (STRANGER,)
        processed = server.seen.count(E.CONNECT_REQUEST)
        assert processed <= PERMITS + 2 * RATE + 2, "of a few thousand"
        before = fabric.now
        newcomer = Talk(server, fabric.host("n", "10.0.0.9" if "." in SERVER else "fd00:0:0:9::9"))
        # Among many, the newcomer has to repeat its REQ once, which it does after 4.8 s.
        assert fabric.now - before < (5.0 if many else 0.1)
        newcomer.on(2)
        newcomer.end()
        fabric.run(seconds=100)
