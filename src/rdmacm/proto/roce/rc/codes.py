"""BTH opcodes of the reliable connected service, as plain ints, and the parts of headers that hot loops pack.

:mod:`rdmacm.plainints` says why ints; the names are those of :class:`rdmacm.proto.roce.opcodes.Opcode`.
"""

from __future__ import annotations

import struct

from rdmacm.proto.roce.icrc import ICRC_LENGTH
from rdmacm.proto.roce.opcodes import Opcode

#: A BTH as two numbers: the first eight bytes, which all middle packets of a message share, and the word with the PSN.
BTH_HALVES = struct.Struct("!QI")
#: A BTH as above, and an AETH.
BTH_HALVES_AETH = struct.Struct("!QII")
WORD = struct.Struct("!I")
#: The first half of a BTH without the opcode, SE, M, PadCnt, FECN, BECN and the reserved bits that follow these.
FIXED_BTH_BITS = 0x000FFFFF00FFFFFF
#: The longest packet, in bytes: all headers and the largest path MTU.
LONGEST_PACKET = 40 + 4096 + ICRC_LENGTH

SEND_FIRST = int(Opcode.RC_SEND_FIRST)
SEND_MIDDLE = int(Opcode.RC_SEND_MIDDLE)
SEND_LAST = int(Opcode.RC_SEND_LAST)
SEND_LAST_WITH_IMMEDIATE = int(Opcode.RC_SEND_LAST_WITH_IMMEDIATE)
SEND_ONLY = int(Opcode.RC_SEND_ONLY)
SEND_ONLY_WITH_IMMEDIATE = int(Opcode.RC_SEND_ONLY_WITH_IMMEDIATE)
WRITE_FIRST = int(Opcode.RC_RDMA_WRITE_FIRST)
WRITE_MIDDLE = int(Opcode.RC_RDMA_WRITE_MIDDLE)
WRITE_LAST = int(Opcode.RC_RDMA_WRITE_LAST)
WRITE_LAST_WITH_IMMEDIATE = int(Opcode.RC_RDMA_WRITE_LAST_WITH_IMMEDIATE)
WRITE_ONLY = int(Opcode.RC_RDMA_WRITE_ONLY)
WRITE_ONLY_WITH_IMMEDIATE = int(Opcode.RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE)
READ_REQUEST = int(Opcode.RC_RDMA_READ_REQUEST)
READ_RESPONSE_FIRST = int(Opcode.RC_RDMA_READ_RESPONSE_FIRST)
READ_RESPONSE_MIDDLE = int(Opcode.RC_RDMA_READ_RESPONSE_MIDDLE)
READ_RESPONSE_LAST = int(Opcode.RC_RDMA_READ_RESPONSE_LAST)
READ_RESPONSE_ONLY = int(Opcode.RC_RDMA_READ_RESPONSE_ONLY)
ACKNOWLEDGE = int(Opcode.RC_ACKNOWLEDGE)
ATOMIC_ACKNOWLEDGE = int(Opcode.RC_ATOMIC_ACKNOWLEDGE)
COMPARE_SWAP = int(Opcode.RC_COMPARE_SWAP)
FETCH_ADD = int(Opcode.RC_FETCH_ADD)
SEND_LAST_WITH_INVALIDATE = int(Opcode.RC_SEND_LAST_WITH_INVALIDATE)
SEND_ONLY_WITH_INVALIDATE = int(Opcode.RC_SEND_ONLY_WITH_INVALIDATE)
FLUSH = int(Opcode.RC_FLUSH)
ATOMIC_WRITE = int(Opcode.RC_ATOMIC_WRITE)

#: The A bit, in the word with the PSN.
ACK_REQUEST = 0x80000000
#: The SE bit, in the second byte of the BTH.
SOLICITED_EVENT = 0x80

#: Syndromes of an AETH (InfiniBand Architecture, tables 57 and 58). No credits are counted. The low five bits of an
#: RNR NAK are its timer code.
ACK_SYNDROME = 0x1F
RNR_NAK = 0x20
NAK_PSN_SEQUENCE_ERROR = 0x60
NAK_INVALID_REQUEST = 0x61
NAK_REMOTE_ACCESS_ERROR = 0x62
NAK_REMOTE_OPERATIONAL_ERROR = 0x63
#: The kind of answer, the upper three bits of a syndrome.
SYNDROME_KIND = 0xE0
#: The lowest AETH, as a number, that is not an ACK.
LOWEST_NAK_AETH = RNR_NAK << 24
