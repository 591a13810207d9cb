"""One packet of every operation of a reliable connection."""

from __future__ import annotations

from rdmacm.proto.roce.opcodes import (
    EXTENDED_HEADERS,
    HAS_PAYLOAD,
    TRANSPORT_MASK,
    ExtendedHeader,
    Opcode,
    TransportService,
)
from support.roce_packets import AETH, BTH, FETH, IETH, RETH, AtomicAckETH, AtomicETH, ImmDt, RocePacket, pad_count

__all__ = ["RC_PACKETS"]


def _packet(opcode: Opcode, psn: int) -> RocePacket:
    headers = EXTENDED_HEADERS[opcode]
    payload = b"" if not HAS_PAYLOAD[opcode] else bytes(8) if opcode is Opcode.RC_ATOMIC_WRITE else b"hello"
    bth = BTH(
        opcode, dest_qpn=0x10013, psn=psn, ack_req=bool(psn & 1), se=bool(psn & 2), pad_cnt=pad_count(len(payload))
    )
    return RocePacket(
        bth,
        feth=FETH(0, 1) if headers & ExtendedHeader.FETH else None,
        reth=RETH(0x7F0012345000, 0xA41, len(payload)) if headers & ExtendedHeader.RETH else None,
        atomic_eth=AtomicETH(0x7F0012345008, 0xA42, 7, 9) if headers & ExtendedHeader.ATOMIC_ETH else None,
        aeth=AETH.ack(0x123456) if headers & ExtendedHeader.AETH else None,
        atomic_ack_eth=AtomicAckETH(0x2222222222222222) if headers & ExtendedHeader.ATOMIC_ACK_ETH else None,
        imm_dt=ImmDt(bytes.fromhex("deadbeef")) if headers & ExtendedHeader.IMM_DT else None,
        ieth=IETH(0xB42) if headers & ExtendedHeader.IETH else None,
        payload=payload,
    )


RC_PACKETS = [_packet(opcode, 0xFEDCBA + opcode) for opcode in Opcode if opcode & TRANSPORT_MASK == TransportService.RC]
