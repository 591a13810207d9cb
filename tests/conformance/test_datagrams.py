"""Datagrams under loss and under attack: each message arrives whole or not at all, and other work goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from rdmacm import CmEvent, CmId, ConnParam, EventChannel, PortSpace, UdParam
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, Opcode
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import AH, MR, QPCap, QPInitAttr, QPState, QPType, SendFlag, SendWR, WCStatus, WROpcode
from support.examples import LOSS_SEEDS
from support.hostile import ADDRESSES, FAMILIES, sealed, throw, trio
from support.roce_packets import BTH, DETH, RocePacket

QKEY = 0x01234567
PORT = 7000
ROOM = 1064
SERVER, CLIENT, _ = ADDRESSES


def content(number: int) -> bytes:
    """The bytes of a message, whose length depends on its number."""
    return hashlib.shake_128(b"%d" % number).digest(number * 37 % 1025)


class Datagrams:
    """A client's and a server's datagram id on two hosts, which know each other."""

    def __init__(self, client: Host, server: Host, receives: int) -> None:
        self.receives = receives
        self.channel = EventChannel(server.provider)
        self.listener = CmId(self.channel, PortSpace.UDP)
        self.listener.bind_addr((server.addresses[0], PORT))
        self.listener.listen()
        self.accepted: list[CmId] = []
        server.on_event(self.channel, self.accept)
        self.client_channel = EventChannel(client.provider)
        self.client = CmId(self.client_channel, PortSpace.UDP)
        self.client.resolve_addr((server.addresses[0], PORT))
        self.event(self.client_channel)
        self.client.resolve_route()
        self.event(self.client_channel)
        self.client.create_qp(QPInitAttr(QPType.UD, cap=QPCap(256, 16, 1, 1, 1024)))
        self.client.connect()
        with self.client_channel.get_event(300) as answer:
            assert isinstance(answer.param, UdParam)
            self.ah, self.qpn = AH(self.client.pd, answer.param.ah_attr), answer.param.qp_num

    def accept(self, event: CmEvent) -> None:
        """The first request has a queue pair. Another one comes if the answer was lost, as from Linux."""
        self.accepted.append(event.id)
        if len(self.accepted) == 1:
            self.server = event.id
            self.server.create_qp(QPInitAttr(QPType.UD, cap=QPCap(16, self.receives, 1, 1, 1024)))
            self.region: MR = self.server.reg_msgs(bytearray(self.receives * ROOM))
        event.id.accept(ConnParam(qp_num=self.server.qp.qp_num))

    @staticmethod
    def event(channel: EventChannel) -> None:
        channel.get_event(300).ack()

    def post(self, slot: int) -> None:
        self.server.post_recv(slot, self.region, slot * ROOM, ROOM)

    def send(self, number: int) -> None:
        wr = SendWR(number, WROpcode.SEND_WITH_IMM, [content(number)], SendFlag.SIGNALED | SendFlag.INLINE)
        wr.imm_data = number
        wr.set_wr_ud(self.ah, self.qpn, QKEY)
        self.client.qp.post_send(wr)

    def received(self) -> list[tuple[int, int]]:
        """Slot and number of each message that has come; AssertionError for wrong bytes."""
        found = []
        for wc in self.server.recv_cq.poll(1000):
            assert wc.status is WCStatus.SUCCESS
            assert wc.imm_data is not None
            expected = content(wc.imm_data)
            assert wc.byte_len == 40 + len(expected)
            start = wc.wr_id * ROOM + 40
            assert bytes(self.region.buf[start : start + len(expected)]) == expected
            found.append((wc.wr_id, wc.imm_data))
        return found

    def close(self) -> None:
        self.ah.close()
        for cmid in (self.client, *self.accepted, self.listener):
            cmid.destroy()
        self.region.close()
        self.channel.close()
        self.client_channel.close()


@contextmanager
def talking(client: Host, server: Host, receives: int = 64) -> Iterator[Datagrams]:
    made = Datagrams(client, server, receives)
    try:
        yield made
    finally:
        made.close()


def lose(seed: int) -> None:
    """200 messages on a network that loses, repeats, reorders and damages packets; the receiver keeps posting."""
    fabric = Fabric(seed, loss=0.1, duplicate=0.05, reorder=0.1, corrupt=0.05)
    hosts = fabric.host("a", CLIENT), fabric.host("b", SERVER)
    random = Random(seed)
    with talking(*hosts) as talk:
        posted = list(range(64))
        for slot in posted:
            talk.post(slot)
        completed: list[int] = []
        numbers: list[int] = []
        for number in range(200):
            talk.send(number)
            if random.random() < 0.2:
                fabric.run(seconds=random.random() / 100)
            for slot, came in talk.received():
                assert slot == posted.pop(0), "each receive completes once, in order"
                numbers.append(came)
                talk.post(slot)
                posted.append(slot)
            completed += [wc.wr_id for wc in talk.client.send_cq.poll(1000) if wc.status is WCStatus.SUCCESS]
        fabric.run(seconds=1)
        numbers += [came for _, came in talk.received()]
        assert completed == list(range(200)), "each send completes once, in order"
        assert 130 < len(set(numbers)) < 200
        assert len(numbers) < len(set(numbers)) + 40, "only packets that the network repeated come twice"


def test_loss_loses_messages_and_nothing_else() -> None:
    for seed in range(3):
        lose(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, LOSS_SEEDS, 50))
def test_loss_with_many_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        lose(seed)


def packets_for(qpn: int) -> list[bytes]:
    """Packets of every opcode and of datagrams that are wrong in one way, for a queue pair, without their ICRC."""
    found = []
    for opcode in range(256):
        for size in (0, 4, 64):
            body = bytes(max(0, HEADER_LENGTH[opcode] - 12) + size)
            if opcode in (Opcode.UD_SEND_ONLY, Opcode.UD_SEND_ONLY_WITH_IMMEDIATE):
                body = DETH(QKEY + 1, 5).pack() + body[8:]
            found.append(BTH(opcode, qpn, 0).pack() + body)
    good = RocePacket(BTH(Opcode.UD_SEND_ONLY, qpn, 0), deth=DETH(QKEY, 5), payload=bytes(64)).pack()
    found += [good[:length] for length in range(12, 20)]
    for payload in (bytes(1028), bytes(4096), bytes(8000)):
        found.append(RocePacket(BTH(Opcode.UD_SEND_ONLY, qpn, 0), deth=DETH(QKEY, 5), payload=payload).pack())
    found.append(RocePacket(BTH(Opcode.UD_SEND_ONLY, qpn, 0, pkey=0x7FFE), deth=DETH(QKEY, 5)).pack())
    found.append(RocePacket(BTH(Opcode.UD_SEND_ONLY, qpn, 0, tver=1), deth=DETH(QKEY, 5)).pack())
    return found


@pytest.mark.parametrize("addresses", FAMILIES)
def test_packets_of_a_stranger_are_dropped(addresses: tuple[str, str, str]) -> None:
    """Whatever lacks the Q_Key changes nothing, for queue pairs of both types; connections go on."""
    with trio(addresses) as (fabric, server, talk, stranger), talking(talk.host, server.host) as datagrams:
        for slot in range(64):
            datagrams.post(slot)
        before = server.host.provider.query_counters().devices["soft_eth0"]
        packets = packets_for(datagrams.qpn) + packets_for(talk.qpns[0])
        for start in range(0, len(packets), 50):
            for packet in packets[start : start + 50]:
                throw(stranger, addresses[0], sealed(stranger, addresses[0], packet))
            fabric.run(seconds=0.01)
        assert datagrams.received() == []
        datagrams.send(20)
        fabric.run(seconds=0.01)
        assert datagrams.received() == [(0, 20)]
        talk.on(1)
        after = server.host.provider.query_counters().devices["soft_eth0"]
        dropped = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert set(dropped) == {
            *("dropped_opcode", "dropped_length", "dropped_short_receive"),
            *("dropped_qkey", "dropped_pkey", "dropped_version"),
        }
        assert datagrams.server.qp.state is QPState.RTS


@pytest.mark.parametrize("addresses", FAMILIES)
def test_flood_of_datagrams_leaves_a_connection_its_turn(addresses: tuple[str, str, str]) -> None:
    with trio(addresses) as (fabric, server, talk, stranger), talking(talk.host, server.host) as datagrams:
        packet = RocePacket(BTH(Opcode.UD_SEND_ONLY, datagrams.qpn, 0), deth=DETH(QKEY, 5), payload=bytes(64)).pack()
        flood = sealed(stranger, addresses[0], packet)
        for _ in range(5):
            for _ in range(200):
                throw(stranger, addresses[0], flood)
            for number in range(200):
                datagrams.send(number)
            talk.on(1)
        fabric.run(seconds=1)
        counted = server.host.provider.query_counters().devices["soft_eth0"]
        assert counted["dropped_no_receive"] > 1000
        assert len(datagrams.client.send_cq.poll(2000)) > 0
