"""Packets for captures: frames of RoCEv2, of TCP and ICMP between two hosts, and files that hold them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from rdmacm.address import service_id
from rdmacm.constants import PortSpace
from rdmacm.proto.cm.codes import MessageKind
from rdmacm.proto.cm.messages import DREP, DREQ, REJ, REP, REQ, RTU, Message, pack_message
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.frames import udp_frame
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, Opcode
from rdmacm.trace.files import CaptureFile
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import Judge, Verdict
from support.cm import request

A, B = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2))
QPN_A, QPN_B = 0x11, 0x22
#: The first PSNs of the requests of both ends.
PSN_A, PSN_B = 1000, 5000
ID_A, ID_B = 0xA, 0xB
PORT = 7471
MTU = 1024
_START = 1_700_000_000 * 10**9

#: A time in nanoseconds, and a frame of Ethernet.
Frame = tuple[int, bytes]


class Wire:
    """Two hosts, A and B, and what passes between them: each call adds a packet, a millisecond after the last."""

    def __init__(self, a: bytes = A, b: bytes = B) -> None:
        self.hosts = a, b
        self.frames: list[Frame] = []
        self.now = _START
        self.tos = 0
        #: Where frames of A go to; empty: as the address gives it.
        self.mac = b""
        self.pkey = 0xFFFF
        self._said: list[tuple[int, Message]] = []

    def frame(self, data: bytes) -> None:
        self.now += 10**6
        self.frames.append((self.now, data))

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * 10**9)

    def udp(self, side: int, payload: bytes) -> bytes:
        """A datagram for the port of RoCEv2; returns the frame."""
        source, destination = self.hosts[side], self.hosts[1 - side]
        data = udp_frame(source, destination, 50000, 4791, payload, tos=self.tos)
        if self.mac and not side:
            data = self.mac + data[6:]
        self.frame(data)
        return data

    # -- RoCEv2 --------------------------------------------------------------------------------------------------

    def packet(self, side: int, opcode: int, psn: int, body: bytes = b"", qpn: int | None = None) -> bytes:
        """A packet of either end to the other's queue pair, or to another one; ``body`` is what follows the BTH."""
        to = qpn if qpn is not None else (QPN_B, QPN_A)[side]
        padding = -len(body) & 3
        head = struct.pack("!BBHII", opcode, 0x40 | padding << 4, self.pkey, to, psn & 0xFFFFFF)
        return self.udp(side, head + body + bytes(padding) + b"icrc")

    def send(self, side: int, psn: int, size: int = 64, opcode: int = Opcode.RC_SEND_ONLY) -> bytes:
        return self.packet(side, opcode, psn, bytes(HEADER_LENGTH[opcode] - 12) + bytes(size))

    def write(self, side: int, psn: int, packets: int, first: int = 0) -> None:
        """A WRITE of full packets, from the packet ``first`` on."""
        for number in range(first, packets):
            opcode = Opcode.RC_RDMA_WRITE_FIRST if number == 0 else Opcode.RC_RDMA_WRITE_MIDDLE
            opcode = Opcode.RC_RDMA_WRITE_LAST if number == packets - 1 else opcode
            opcode = Opcode.RC_RDMA_WRITE_ONLY if packets == 1 else opcode
            reth = struct.pack("!QII", 0x1000, 7, packets * MTU) if HEADER_LENGTH[opcode] > 12 else b""
            self.packet(side, opcode, psn + number, reth + bytes(MTU))

    def read(self, side: int, psn: int, size: int) -> None:
        self.packet(side, Opcode.RC_RDMA_READ_REQUEST, psn, struct.pack("!QII", 0x1000, 7, size))

    def responses(self, side: int, psn: int, packets: int) -> None:
        """The responses to a READ of the other end."""
        for number in range(packets):
            opcode = Opcode.RC_RDMA_READ_RESPONSE_FIRST if number == 0 else Opcode.RC_RDMA_READ_RESPONSE_MIDDLE
            opcode = Opcode.RC_RDMA_READ_RESPONSE_LAST if number == packets - 1 else opcode
            opcode = Opcode.RC_RDMA_READ_RESPONSE_ONLY if packets == 1 else opcode
            aeth = struct.pack("!I", 0x1F000001) if HEADER_LENGTH[opcode] > 12 else b""
            self.packet(side, opcode, psn + number, aeth + bytes(MTU))

    def ack(self, side: int, psn: int, syndrome: int = 0x1F) -> None:
        self.packet(side, Opcode.RC_ACKNOWLEDGE, psn, struct.pack("!I", syndrome << 24 | 1))

    def notice(self, side: int) -> None:
        """A congestion notification."""
        self.packet(side, 0x81, 0, bytes(16))

    # -- management ----------------------------------------------------------------------------------------------

    def cm(self, side: int, message: Message, tid: int = 1) -> bytes:
        deth = struct.pack("!II", 0x80010000, 1)
        if (side, message) in self._said:  # a manager repeats itself only after a while
            self.wait(0.1)
        self._said.append((side, message))
        return self.packet(side, Opcode.UD_SEND_ONLY, 0, deth + pack_message(message, tid), qpn=1)

    def req(self, **fields: Any) -> bytes:
        return self.cm(0, self.request(**fields))

    def request(self, port: int = PORT, space: int = PortSpace.TCP, **fields: Any) -> REQ:
        a, b = self.hosts
        header = PrivateDataHeader(4 if len(a) == 4 else 6, 40000, a, b).pack()
        known = {"service_id": service_id(space, port), "local_comm_id": ID_A, "local_qpn": QPN_A}
        return request(**{**known, "starting_psn": PSN_B, "private_data": header, **fields})

    def rep(self, **fields: Any) -> None:
        known = {"local_comm_id": ID_B, "remote_comm_id": ID_A, "local_qpn": QPN_B, "starting_psn": PSN_A}
        self.cm(1, REP(**{**known, **fields}))

    def rtu(self) -> None:
        self.cm(0, RTU(ID_A, ID_B))

    def connect(self, **fields: Any) -> None:
        self.req(**fields)
        self.rep()
        self.rtu()

    def rej(self, reason: int, side: int = 1, **fields: Any) -> None:
        ids = (0, ID_A) if side else (ID_A, 0)
        self.cm(side, REJ(*ids, MessageKind.REQ, reason, **fields))

    def disconnect(self, side: int = 0) -> None:
        ids = (ID_A, ID_B) if side == 0 else (ID_B, ID_A)
        self.cm(side, DREQ(*ids, (QPN_B, QPN_A)[side]))
        self.cm(1 - side, DREP(*ids[::-1]))

    # -- other protocols -----------------------------------------------------------------------------------------

    def ip(self, side: int, protocol: int, payload: bytes, sender: bytes | None = None) -> None:
        """A packet of IPv4 or IPv6, whose check sums are not set."""
        source, destination = sender or self.hosts[side], self.hosts[1 - side]
        if len(source) == 4:
            head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0)
            kind = 0x0800
        else:
            head = struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64)
            kind = 0x86DD
        self.frame(bytes(12) + struct.pack("!H", kind) + head + source + destination + payload)

    def icmp(self, side: int, kind: int, code: int, about: bytes, mtu: int = 0, sender: bytes | None = None) -> None:
        """An error about a frame that the other end has sent."""
        version = 4 if len(self.hosts[0]) == 4 else 6
        quoted = about[14:][:120]
        rest = struct.pack("!HH", 0, mtu) if version == 4 else struct.pack("!I", mtu)
        self.ip(side, 1 if version == 4 else 58, struct.pack("!BBH", kind, code, 0) + rest + quoted, sender)

    def neighbour(self, side: int, *, is_answer: bool = False, sender: bytes | None = None) -> None:
        """A question of either end for the hardware address of the other, or the answer to the other's."""
        own, other = sender if sender is not None else self.hosts[side], self.hosts[1 - side]
        if len(own) == 4:
            form = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2 if is_answer else 1)
            self.frame(bytes(12) + struct.pack("!H", 0x0806) + form + bytes(6) + own + bytes(6) + other)
        else:
            head = struct.pack("!BBHI", 136 if is_answer else 135, 0, 0, 0)
            self.ip(side, 58, head + (self.hosts[side] if is_answer else other), own)

    def tcp(
        self, side: int, seq: int, payload: bytes = b"", flags: int = 0x10, ports: Sequence[int] = (40000, PORT)
    ) -> None:
        sport, dport = ports if side == 0 else (ports[1], ports[0])
        head = struct.pack("!HHIIBBHHH", sport, dport, seq & 0xFFFFFFFF, 0, 0x50, flags, 65535, 0, 0)
        self.ip(side, 6, head + payload)


def pcap(frames: Iterable[Frame], order: str = "<", *, nanoseconds: bool = True, link_type: int = 1) -> bytes:
    """A pcap file."""
    magic = 0xA1B23C4D if nanoseconds else 0xA1B2C3D4
    parts = [struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262144, link_type)]
    unit = 1 if nanoseconds else 1000
    for time, data in frames:
        parts.append(struct.pack(order + "IIII", time // 10**9, time % 10**9 // unit, len(data), len(data)) + data)
    return b"".join(parts)


def pcapng(frames: Iterable[Frame], order: str = "<", *, resolution: int = 9, link_type: int = 1) -> bytes:
    """A pcapng file of one section and one interface."""

    def block(kind: int, body: bytes) -> bytes:
        size = len(body) + 12
        return struct.pack(order + "II", kind, size) + body + struct.pack(order + "I", size)

    parts = [block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))]
    option = struct.pack(order + "HHBxxxI", 9, 1, resolution, 0)
    parts.append(block(1, struct.pack(order + "HHI", link_type, 0, 0) + option))
    for time, data in frames:
        base = 1 << (resolution & 0x7F) if resolution & 0x80 else 10**resolution
        units = time * base // 10**9
        head = struct.pack(order + "IIIII", 0, units >> 32, units & 0xFFFFFFFF, len(data), len(data))
        parts.append(block(6, head + data + bytes(-len(data) & 3)))
    return b"".join(parts)


class Bytes:
    """A file in memory that returns a few bytes at a time."""

    def __init__(self, data: bytes, step: int = 1 << 20) -> None:
        self._data, self._step, self._at = data, step, 0

    def read(self, size: int) -> bytes:
        part = self._data[self._at : self._at + min(size, self._step)]
        self._at += len(part)
        return part


def traced(data: bytes, step: int = 1 << 20) -> tuple[Tracer, CaptureFile]:
    """The connections in the bytes of a capture file."""
    tracer = Tracer()
    file = CaptureFile(Bytes(data, step).read)
    tracer.feed(file)
    return tracer, file


def verdicts(wire: Wire) -> list[Verdict]:
    """The verdicts of all connections of a wire."""
    tracer, file = traced(pcap(wire.frames))
    assert (tracer.malformed, tracer.cut, file.damage) == (0, 0, "")
    judge = Judge(tracer)
    return [judge.verdict(each) for each in tracer.found()]


def verdict(wire: Wire) -> Verdict:
    """The verdict of the only connection."""
    (found,) = verdicts(wire)
    return found
