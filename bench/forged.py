"""Forged packets for the floods of flood.py: well-formed, with a right ICRC, and each different from all others."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from ipaddress import ip_address
from random import Random

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.proto.cm.messages import (
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
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.mad import GSI_Q_KEY
from rdmacm.proto.roce.headers import BTH_DETH_STRUCT, BTH_STRUCT
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.opcodes import Opcode

__all__ = ["KINDS", "forged"]

#: Where the MAD begins in a datagram, and the message in the MAD.
_MAD, _DATA = 20, 44
_IPV4, _IPV6, _UDP = struct.Struct("!BBHHHBBH4s4s"), struct.Struct("!IHBB16s16s"), struct.Struct("!HHHH")

#: Messages that name a connection of the server by its communication id, which a stranger does not know.
_ANSWERS: dict[str, Message] = {
    "rep": REP(local_qpn=5),
    "rej": REJ(0, 0, 0, 28),
    "mra": MRA(0, 0, 0, 24),
    "rtu": RTU(0, 0),
    "dreq": DREQ(0, 0, 5),
    "drep": DREP(0, 0),
    "lap": LAP(0, 0, 5, 20, 1, 2, Gid("::1"), Gid("::2"), 0, 0, 64, 2, 0, False, 14),
}
#: A kind of each packet, and "all" of them in turn. "qp": packets of a connection, for a queue pair that exists.
KINDS = ("req", "sidr_req", *_ANSWERS, "sidr_rep", "attribute", "class", "qp", "no_qp")


class _Template:
    """A packet without its ICRC, and the places (offset, length) of what is random in it."""

    def __init__(self, kind: str, source: bytes, target: bytes, service_id: int, qpn: int) -> None:
        slot = _DATA + 4, qpn >> 16
        #: Where the top byte of a communication id of the server's process is, and that byte.
        self.slot: tuple[int, int] | None = None
        self.random = [(_MAD + 8, 8), (_DATA, 4)]  # transaction id, communication id
        self.has_source = kind == "req"
        if kind in ("qp", "no_qp"):
            self.packet = bytearray(BTH_STRUCT.pack(Opcode.RC_SEND_ONLY, 0, DEFAULT_PKEY, qpn, 0) + bytes(64))
            self.random = [(9, 3), (12, 64)] if kind == "qp" else [(6, 2), (9, 3), (12, 64)]  # QPN, PSN, payload
            return
        if kind == "req":
            message: Message = _request(source, target, service_id)
            self.random += [(_DATA + 20, 4), (_DATA + 32, 3)]  # CA GUID, queue pair
        elif kind == "sidr_req":
            message = SIDR_REQ(service_id)
        elif kind == "sidr_rep":
            message, self.slot = SIDR_REP(), (_DATA, qpn >> 16)
        else:
            message, self.slot = _ANSWERS.get(kind, RTU(0, 0)), slot
            self.random.append((_DATA + 4, 4))
        mad = bytearray(pack_message(message, 1))
        if kind == "attribute":
            mad[16:18] = b"\x00\x42"
        elif kind == "class":
            mad[1] = 0x21  # a vendor's
        self.packet = bytearray(BTH_DETH_STRUCT.pack(Opcode.UD_SEND_ONLY, 0, DEFAULT_PKEY, 1, 0, GSI_Q_KEY, 1) + mad)

    def next(self, random: Random, source: bytes) -> bytearray:
        packet = self.packet
        for offset, length in self.random:
            packet[offset : offset + length] = random.randbytes(length)
        if self.slot is not None:
            packet[self.slot[0]] = self.slot[1]
        if self.has_source:
            size = len(source)
            packet[_DATA + 72 - size : _DATA + 72] = packet[_DATA + 160 - size : _DATA + 160] = source
        return packet


def _request(source: bytes, target: bytes, service_id: int) -> REQ:
    return REQ(
        service_id=service_id,
        primary=Path(Gid.from_ip(source), Gid.from_ip(target), 0xFFFF, 0xFFFF, hop_limit=64, local_ack_timeout=14),
        path_mtu=3,
        max_cm_retries=15,
        local_cm_response_timeout=20,
        private_data=PrivateDataHeader(4 if len(source) == 4 else 6, 1000, source, target).pack(),
    )


def forged(
    kind: str, count: int, source: str, target: str, network: int | None, service_id: int, qpn: int, seed: int
) -> Iterator[tuple[bytes, bytes]]:
    """(packed source address, packet) of ``count`` packets, sent from port 4792 to a server's port 4791.

    ``network``: the first of 65,536 addresses of which each packet has one at random, those of IPv6 in as many networks
    of 64 bits; None for ``source`` alone.
    ``qpn``: the number of a queue pair of the server's. Its top byte begins the ids of the server's connections too.

    The packets are patched and sealed by hand: packing 100,000 of them would take a minute.
    """
    random = Random(seed)
    own, to = ip_address(source).packed, ip_address(target).packed
    kinds = KINDS if kind == "all" else (kind,)
    templates = [_Template(each, own, to, service_id, qpn) for each in kinds]
    for number in range(count):
        address = own
        if network is not None:
            step = 1 if len(own) == 4 else 1 << 64
            address = (network + step * random.randrange(1, 65535)).to_bytes(len(own), "big")
        packet = templates[number % len(templates)].next(random, address)
        length = len(packet) + 4
        if len(own) == 4:
            header = _IPV4.pack(0x45, 0xFF, 28 + length, 0, 0x4000, 0xFF, 17, 0xFFFF, address, to)
        else:
            header = _IPV6.pack(0x6FFFFFFF, 8 + length, 17, 0xFF, address, to)
        udp = _UDP.pack(ROCE_PORT + 1, ROCE_PORT, 8 + length, 0xFFFF)
        masked = b"".join((b"\xff" * 8, header, udp, packet[:4], b"\xff", packet[5:]))
        sealed = bytes(packet) + zlib.crc32(masked).to_bytes(4, "little")
        assert number >= len(kinds) or icrc_between(address, to, ROCE_PORT + 1).check([sealed])
        yield address, sealed
