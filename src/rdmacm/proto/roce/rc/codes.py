"""Opcodes and layouts for the hot path, where an enum member or a dataclass would cost a microsecond a packet.

Plain ints, since comparing enum members is slow and every packet is compared several times; and the layouts of
:mod:`rdmacm.proto.roce.headers`, as structures.
"""

from __future__ import annotations

import struct

from rdmacm.proto.roce.opcodes import Opcode

BTH = struct.Struct("!BBHII")
RETH = struct.Struct("!QII")
ATOMIC_ETH = struct.Struct("!QIQQ")
WORD = struct.Struct("!I")
LITTLE = struct.Struct("<I")
#: The BTH as two numbers: all that the packets in the middle of a message have in common, and the last word.
HALVES = struct.Struct("!QI")
LONG = struct.Struct("!Q")

SEND_FIRST = int(Opcode.RC_SEND_FIRST)
SEND_MIDDLE = int(Opcode.RC_SEND_MIDDLE)
SEND_LAST = int(Opcode.RC_SEND_LAST)
SEND_ONLY = int(Opcode.RC_SEND_ONLY)
WRITE_FIRST = int(Opcode.RC_RDMA_WRITE_FIRST)
WRITE_MIDDLE = int(Opcode.RC_RDMA_WRITE_MIDDLE)
WRITE_LAST = int(Opcode.RC_RDMA_WRITE_LAST)
WRITE_ONLY = int(Opcode.RC_RDMA_WRITE_ONLY)
READ_REQUEST = int(Opcode.RC_RDMA_READ_REQUEST)
READ_FIRST = int(Opcode.RC_RDMA_READ_RESPONSE_FIRST)
READ_MIDDLE = int(Opcode.RC_RDMA_READ_RESPONSE_MIDDLE)
READ_LAST = int(Opcode.RC_RDMA_READ_RESPONSE_LAST)
READ_ONLY = int(Opcode.RC_RDMA_READ_RESPONSE_ONLY)
ACKNOWLEDGE = int(Opcode.RC_ACKNOWLEDGE)
ATOMIC_ACKNOWLEDGE = int(Opcode.RC_ATOMIC_ACKNOWLEDGE)
COMPARE_SWAP = int(Opcode.RC_COMPARE_SWAP)
FETCH_ADD = int(Opcode.RC_FETCH_ADD)
SEND_LAST_INV = int(Opcode.RC_SEND_LAST_WITH_INVALIDATE)
SEND_ONLY_INV = int(Opcode.RC_SEND_ONLY_WITH_INVALIDATE)

#: In the last word of the BTH, and in its second byte.
ACK_REQUEST = 0x80000000
SOLICITED = 0x80


def prefix(opcode: int, pkey: int, dest_qp_num: int, flags: int = 0) -> bytes:
    """The BTH but for its last word."""
    return HALVES.pack(opcode << 56 | flags << 48 | pkey << 32 | dest_qp_num, 0)[:8]
