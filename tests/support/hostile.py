"""A server, a connected client, and packets that a third host sends to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from random import Random

import pytest

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.address import Gid
from rdmacm.proto.cm.codes import MessageKind, RejectReason
from rdmacm.proto.cm.messages import (
    APR,
    DREP,
    DREQ,
    LAP,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    Message,
    Path,
    pack_message,
)
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.mad import GSI_Q_KEY
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.provider.connparam import ConnParam
from rdmacm.soft.wire.base import WirePath
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import MR, AccessFlag, QPCap, QPInitAttr, QPState, SendFlag
from support.roce_packets import BTH, DETH, RocePacket

__all__ = [
    "ADDRESSES",
    "FAMILIES",
    "IPV6_ADDRESSES",
    "PORT",
    "Server",
    "Talk",
    "asking",
    "every_message",
    "management",
    "sealed",
    "throw",
    "trio",
]

E = CmEventType
PORT = 7471
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
IPV6_ADDRESSES = ("fd00::1", "fd00::2", "fd00:0:0:3::3")
#: Parameters of tests: the addresses of the three hosts.
FAMILIES = [
    pytest.param(ADDRESSES, id="IPv4"),
    pytest.param(IPV6_ADDRESSES, id="IPv6", marks=pytest.mark.slow),
]
SIZE = 256
_ALL = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC


class Server:
    """Accepts every request, with a queue pair and memory that allows all remote access."""

    def __init__(self, host: Host, backlog: int = 0) -> None:
        self.host = host
        self.regions: dict[CmId, MR] = {}
        self.connected: list[CmId] = []
        self.seen: list[E] = []
        self.channel = EventChannel(host.provider)
        self.listener = CmId(self.channel)
        self.listener.bind_addr((host.addresses[0], PORT))
        self.listener.listen(backlog)
        host.on_event(self.channel, self.serve)

    def serve(self, event: CmEvent) -> None:
        cmid = event.id
        self.seen.append(event.type)
        if event.type is E.CONNECT_REQUEST:
            self.regions[cmid] = equipped(cmid)
            region = self.regions[cmid]
            cmid.accept(ConnParam(region.addr.to_bytes(8, "big") + region.rkey.to_bytes(4, "big")))
        elif event.type is E.ESTABLISHED:
            self.connected.append(cmid)
        elif event.type in (E.DISCONNECTED, E.UNREACHABLE, E.REJECTED):
            if cmid in self.connected:
                self.connected.remove(cmid)
            event.ack()
            cmid.destroy()
            self.regions.pop(cmid).close()

    def close(self) -> None:
        for cmid in list(self.regions):
            cmid.destroy()
            self.regions.pop(cmid).close()
        self.listener.destroy()
        self.channel.close()


def equipped(cmid: CmId) -> MR:
    """Give an id a queue pair and a region: receives use the first half, the peer accesses the second."""
    cmid.create_qp(QPInitAttr(cap=QPCap(32, 32, 1, 1, 64), sq_sig_all=True))
    region = MR(cmid.pd, bytearray(8 * SIZE), _ALL)
    for slot in range(4):
        cmid.post_recv(slot, region, slot * SIZE, SIZE)
    return region


class Talk:
    """A client and the server's end of its connection."""

    def __init__(self, server: Server, host: Host) -> None:
        self.server, self.host = server, host
        self.cmid = CmId(provider=host.provider)
        self.cmid.resolve_addr((server.host.addresses[0], PORT))
        self.cmid.resolve_route()
        self.region = equipped(self.cmid)
        before = len(server.connected)
        self.cmid.connect()
        told = self.cmid.event.private_data
        self.addr, self.rkey = int.from_bytes(told[:8], "big") + 4 * SIZE, int.from_bytes(told[8:12], "big")
        assert host.fabric.run(lambda: len(server.connected) > before, seconds=60)
        self.peer = server.connected[-1]
        self.said = 0

    def on(self, rounds: int = 3) -> None:
        """Write to the server's memory, send a message, receive the answer, read the memory back."""
        for _ in range(rounds):
            self.said += 1
            slot = (self.said - 1) % 4
            text = b"message %d " % self.said * 5
            self.cmid.post_write(1, text, self.addr, self.rkey, flags=SendFlag.INLINE)
            self.cmid.post_send(2, text, flags=SendFlag.INLINE)
            wc = self.peer.get_recv_comp(60)
            memory = self.server.regions[self.peer]
            assert (wc.status, wc.wr_id, wc.byte_len) == (0, slot, len(text)), wc
            assert memory.read(len(text), slot * SIZE) == text == memory.read(len(text), 4 * SIZE)
            self.peer.post_recv(slot, memory, slot * SIZE, SIZE)
            self.peer.post_send(3, text[::-1], flags=SendFlag.INLINE)
            wc = self.cmid.get_recv_comp(60)
            assert (wc.status, wc.wr_id, wc.byte_len) == (0, slot, len(text)), wc
            assert self.region.read(len(text), slot * SIZE) == text[::-1]
            self.cmid.post_recv(slot, self.region, slot * SIZE, SIZE)
            self.cmid.post_read(4, self.region, self.addr, self.rkey, 7 * SIZE, SIZE)
            assert [self.cmid.get_send_comp(60).status for _ in range(3)] == [0, 0, 0]
            assert self.peer.get_send_comp(60).status == 0
            assert self.region.read(len(text), 7 * SIZE) == text

    @property
    def qpns(self) -> tuple[int, int]:
        """The server's and the client's queue pair number."""
        return self.peer.qp.qp_num, self.cmid.qp.qp_num

    def end(self) -> None:
        if self.cmid.has_qp and self.cmid.qp.state is QPState.RTS:
            self.cmid.disconnect()
        self.release()

    def release(self) -> None:
        self.cmid.destroy()
        self.region.close()


@contextmanager
def trio(addresses: Sequence[str] = ADDRESSES, **options: object) -> Iterator[tuple[Fabric, Server, Talk, Host]]:
    """A fabric with a server, a connected client, and a stranger. Asserts at the end that no object is left."""
    fabric = Fabric(1, mtu=4200, **options)  # type: ignore[arg-type]
    hosts = [fabric.host(name, address) for name, address in zip("abc", addresses, strict=True)]
    hosts[2].wire.open()
    server = Server(hosts[0])
    talk = Talk(server, hosts[1])
    talk.on()
    yield fabric, server, talk, hosts[2]
    talk.on()
    talk.end()
    fabric.run()
    for host in hosts[:2]:
        assert len(host.provider.host.cm.agent) == 0
        assert len(host.provider.host.mux) == 0
    server.close()


def throw(host: Host, to: str, data: bytes) -> None:
    """Put a packet on the fabric unchanged."""
    way = WirePath(ip_address(host.addresses[0]).packed, ip_address(to).packed)
    host.wire.send(host.wire.route(way), [data])


def sealed(host: Host, to: str, packet: bytes) -> bytes:
    """The packet with its ICRC for this source and destination."""
    way = host.wire.route(WirePath(ip_address(host.addresses[0]).packed, ip_address(to).packed))
    return packet + Icrc(way.path.local, way.path.remote, way.source_port).seal([packet])


def management(message: Message, tid: int = 1) -> bytes:
    """A message of the communication manager, without ICRC."""
    return datagram(pack_message(message, tid))


def datagram(mad: bytes) -> bytes:
    """A management datagram, without ICRC."""
    return RocePacket(BTH(Opcode.UD_SEND_ONLY, 1, 0), deth=DETH(GSI_Q_KEY, 1), payload=mad).pack()


def asking(source: str, destination: str, number: int, port: int = PORT) -> REQ:
    """A connection request, distinguished from others by its number."""
    ours, theirs = ip_address(source).packed, ip_address(destination).packed
    primary = Path(Gid.from_ip(ours), Gid.from_ip(theirs), 0xFFFF, 0xFFFF, hop_limit=64, local_ack_timeout=14)
    header = PrivateDataHeader(4 if len(ours) == 4 else 6, number & 0xFFFF, ours, theirs).pack()
    return REQ(
        service_id=0x01060000 + port,
        primary=primary,
        local_comm_id=number,
        local_ca_guid=0x0200000000000003,
        local_qpn=number & 0xFFFFFF,
        path_mtu=3,
        private_data=header,
    )


def every_message(random: Random) -> list[Message]:
    """One message of each kind except requests, with communication ids that do not exist."""
    ours, theirs = random.getrandbits(32), random.getrandbits(32)
    gids = Gid.from_ip(bytes((10, 0, 0, 3))), Gid.from_ip(bytes((10, 0, 0, 1)))
    return [
        *(MRA(ours, theirs, kind, 31) for kind in MessageKind),
        *(REJ(ours, theirs, kind, reason) for kind in MessageKind for reason in RejectReason),
        REP(local_comm_id=ours, remote_comm_id=theirs, local_qpn=5),
        RTU(ours, theirs),
        DREQ(ours, theirs, random.getrandbits(24)),
        DREP(ours, theirs),
        SIDR_REQ(random.getrandbits(63), request_id=ours),
        SIDR_REP(request_id=theirs),
        LAP(ours, theirs, 5, 20, 1, 2, *gids, 0, 0, 64, 2, 0, False, 14),
        APR(ours, theirs, 0),
    ]
