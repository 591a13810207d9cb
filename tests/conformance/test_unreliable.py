"""Unreliable connections under loss and under attack: messages are lost or whole, and nothing else happens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from rdmacm import CmEvent, CmEventType, CmId, EventChannel, PortSpace
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, Opcode
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import MR, AccessFlag, QPCap, QPInitAttr, QPState, QPType, SendWR, WCOpcode, WCStatus, WROpcode
from support.examples import LOSS_SEEDS
from support.hostile import ADDRESSES, FAMILIES, sealed, throw, trio
from support.roce_packets import BTH, RETH, ImmDt, RocePacket

PORT = 7000
ROOM = 4096
SLOTS = 32
SERVER, CLIENT, _ = ADDRESSES
SEND, WRITE = WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM


def content(number: int) -> bytes:
    """The bytes of a message, whose length depends on its number: up to four packets of 1 KiB."""
    return hashlib.shake_128(b"%d" % number).digest(number * 137 % 3600)


def opcode_of(number: int) -> WROpcode:
    return WRITE if number % 3 == 0 else SEND


class Connection:
    """A client's and a server's id with unreliable queue pairs. The client writes to a slot for each message."""

    def __init__(self, client: Host, server: Host) -> None:
        self.channel = EventChannel(server.provider)
        self.listener = CmId(self.channel, PortSpace.IB, qp_type=QPType.UC)
        self.listener.bind_addr((server.addresses[0], PORT))
        self.listener.listen()
        server.on_event(self.channel, self.serve)
        self.client_channel = EventChannel(client.provider)
        self.client = CmId(self.client_channel, PortSpace.IB, qp_type=QPType.UC)
        self.client.resolve_addr((server.addresses[0], PORT))
        self.event(CmEventType.ADDR_RESOLVED)
        self.client.resolve_route()
        self.event(CmEventType.ROUTE_RESOLVED)
        self.client.create_qp(QPInitAttr(QPType.UC, cap=QPCap(256, 16, 1, 1, 64)))
        self.outbox = MR(self.client.pd, bytearray(SLOTS * ROOM), AccessFlag.LOCAL_WRITE)
        self.client.connect()
        self.event(CmEventType.ESTABLISHED)

    def serve(self, event: CmEvent) -> None:
        if event.type is CmEventType.ESTABLISHED:  # by the RTU, or the first message
            return
        assert event.type is CmEventType.CONNECT_REQUEST
        self.server = event.id
        self.server.create_qp(QPInitAttr(QPType.UC, cap=QPCap(16, SLOTS, 1, 1, 64)))
        access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE
        self.inbox, self.memory = (MR(self.server.pd, bytearray(SLOTS * ROOM), access) for _ in range(2))
        self.server.accept()

    def event(self, kind: CmEventType) -> None:
        with self.client_channel.get_event(300) as event:
            assert event.type is kind, event

    def post(self, slot: int) -> None:
        self.server.post_recv(slot, self.inbox, slot * ROOM, ROOM)

    def send(self, number: int) -> None:
        data, slot = content(number), number % SLOTS
        self.outbox.buf[slot * ROOM : slot * ROOM + len(data)] = data
        wr = SendWR(number, opcode_of(number), [self.outbox.sge(slot * ROOM, len(data))] if data else [])
        wr.imm_data = number
        wr.set_wr_rdma(self.memory.rkey, self.memory.addr + slot * ROOM)
        self.client.qp.post_send(wr)

    def received(self) -> list[tuple[int, int]]:
        """Slot and number of each message that has come; AssertionError for wrong bytes."""
        found = []
        for wc in self.server.recv_cq.poll(1000):
            assert wc.status is WCStatus.SUCCESS
            assert wc.imm_data is not None
            expected = content(wc.imm_data)
            assert wc.byte_len == len(expected)
            if opcode_of(wc.imm_data) is WRITE:
                assert wc.opcode is WCOpcode.RECV_RDMA_WITH_IMM
                region, start = self.memory, wc.imm_data % SLOTS * ROOM
            else:
                assert wc.opcode is WCOpcode.RECV
                region, start = self.inbox, wc.wr_id * ROOM
            assert bytes(region.buf[start : start + len(expected)]) == expected
            found.append((wc.wr_id, wc.imm_data))
        return found

    def sent(self) -> list[int]:
        return [wc.wr_id for wc in self.client.send_cq.poll(1000) if wc.status is WCStatus.SUCCESS]

    def close(self) -> None:
        for cmid in (self.client, self.server, self.listener):
            cmid.destroy()
        for region in (self.inbox, self.memory, self.outbox):
            region.close()
        self.channel.close()
        self.client_channel.close()


@contextmanager
def connected(client: Host, server: Host) -> Iterator[Connection]:
    made = Connection(client, server)
    try:
        yield made
    finally:
        made.close()


def lose(seed: int) -> None:
    """100 messages on a network that loses, repeats, reorders and damages packets; the receiver keeps posting."""
    fabric = Fabric(seed, loss=0.1, duplicate=0.02, reorder=0.02, corrupt=0.02)
    hosts = fabric.host("a", CLIENT), fabric.host("b", SERVER)
    random = Random(seed)
    with connected(*hosts) as talk:
        posted = list(range(SLOTS))
        for slot in posted:
            talk.post(slot)
        completed: list[int] = []
        numbers: list[int] = []
        for number in range(100):
            talk.send(number)
            if number % 16 == 15 or random.random() < 0.2:
                fabric.run(seconds=0.1)  # so that no packet of a WRITE comes after a later one to the same slot
            for slot, came in talk.received():
                assert slot == posted.pop(0), "each receive completes once, in order"
                numbers.append(came)
                talk.post(slot)
                posted.append(slot)
            completed += talk.sent()
        fabric.run(seconds=1)
        numbers += [came for _, came in talk.received()]
        assert completed == list(range(100)), "each send completes once, in order"
        assert 35 < len(set(numbers)) < 95
        assert len(numbers) < len(set(numbers)) + 10, "only messages of one packet that the network repeated come twice"
        assert talk.server.qp.state is QPState.RTS


def test_loss_loses_messages_and_nothing_else() -> None:
    for seed in range(3):
        lose(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, LOSS_SEEDS, 50))
def test_loss_with_many_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        lose(seed)


#: These need no more than a right length: SENDs, and WRITEs of no bytes.
_ANYBODYS = (Opcode.UC_SEND_FIRST, Opcode.UC_SEND_ONLY, Opcode.UC_SEND_ONLY_WITH_IMMEDIATE)
_WRITES = (Opcode.UC_RDMA_WRITE_FIRST, Opcode.UC_RDMA_WRITE_ONLY, Opcode.UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE)
#: The path MTU of the trio.
MTU = 4096


def hostile_packets(qpn: int, rkey: int, addr: int) -> list[bytes]:
    """Packets for an unreliable queue pair that are wrong in one way, without their ICRC."""
    found = [
        BTH(opcode, qpn, psn).pack() + bytes(max(0, HEADER_LENGTH[opcode] - 12) + size)
        for opcode in range(256)
        if opcode not in _ANYBODYS
        for size in (4, 2048, MTU)
        for psn in (0, 0xFFFFFF)
    ]
    found += [BTH(opcode, qpn, 0).pack() + bytes(4) for opcode in _WRITES]
    for opcode in _WRITES:
        imm = ImmDt(bytes(4)) if opcode is Opcode.UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE else None
        right = 2 * MTU if opcode is Opcode.UC_RDMA_WRITE_FIRST else MTU
        for address, key, length in (
            (addr, rkey ^ 1, right),
            (addr - 1, rkey, right),
            (addr + SLOTS * ROOM - right + 1, rkey, right),
            ((1 << 64) - 1, rkey, right),
            ((1 << 64) - right, rkey, right + 1),
            (addr, rkey, 0xFFFFFFFF),
            (addr, rkey, 1 << 31),
            (addr, rkey, MTU - 1),
        ):
            reth = RETH(address, key, length)
            found.append(RocePacket(BTH(opcode, qpn, 0), reth=reth, imm_dt=imm, payload=b"x" * MTU).pack())
    return found


@pytest.mark.parametrize("addresses", FAMILIES)
def test_packets_that_are_wrong_change_nothing(addresses: tuple[str, str, str]) -> None:
    """From a stranger, and with the peer's own address: connections of both types go on."""
    with trio(addresses) as (fabric, server, reliable, stranger), connected(reliable.host, server.host) as talk:
        for slot in range(SLOTS):
            talk.post(slot)
        before = server.host.provider.query_counters().devices["soft_eth0"]
        packets = hostile_packets(talk.server.qp.qp_num, talk.memory.rkey, talk.memory.addr)
        packets += hostile_packets(reliable.qpns[0], talk.memory.rkey, talk.memory.addr)
        for source in (stranger, reliable.host):
            for start in range(0, len(packets), 50):
                for packet in packets[start : start + 50]:
                    if source is stranger or packet[0] >= 0x20:  # what else is of the reliable connection's own type
                        throw(source, addresses[0], sealed(source, addresses[0], packet))
                fabric.run(seconds=0.01)
        assert talk.received() == []
        assert not any(talk.memory.buf)
        for number in range(6):
            talk.send(number)
        fabric.run(seconds=0.01)
        assert talk.received() == [(number, number) for number in range(6)]
        reliable.on(1)
        after = server.host.provider.query_counters().devices["soft_eth0"]
        dropped = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert set(dropped) == {"dropped_opcode", "dropped_length", "refused_request", "out_of_sequence"}
        assert talk.server.qp.state is QPState.RTS
