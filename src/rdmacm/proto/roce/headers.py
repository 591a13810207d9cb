"""Transport headers of RoCEv2 packets (InfiniBand Architecture, chapter 9).

After the UDP header a packet has the base transport header (BTH), the extended headers that its opcode asks for, the
payload, up to three pad bytes and the invariant CRC, which is in :mod:`rdmacm.proto.roce.icrc`. The structs check only
that the bytes are there: the caller masks 24-bit values. The tests hold them equal to classes that name and check every
field (tests/support/roce_packets.py).
"""

from __future__ import annotations

import struct
from enum import IntEnum

from rdmacm.proto.constants import BTH_LENGTH, PSN_MASK, QPN_MASK
from rdmacm.proto.wire import Buffer, WireError

# The fields of a BTH: opcode; SE, M, PadCnt, TVer; P_Key; FECN, BECN, reserved, destination QPN; A, reserved, PSN.
BTH_STRUCT = struct.Struct("!BBHII")
#: A BTH as two numbers: the first eight bytes, which all middle packets of a message share, and the word with the PSN.
BTH_HALVES = struct.Struct("!QI")
#: A BTH as above, and an AETH.
BTH_HALVES_AETH = struct.Struct("!QII")
WORD = struct.Struct("!I")
XRCETH_STRUCT = struct.Struct("!I")
BTH_DETH_STRUCT = struct.Struct("!BBHIIII")
FETH_STRUCT = struct.Struct("!I")
RETH_STRUCT = struct.Struct("!QII")
ATOMIC_ETH_STRUCT = struct.Struct("!QIQQ")
AETH_STRUCT = struct.Struct("!I")
ATOMIC_ACK_ETH_STRUCT = struct.Struct("!Q")
IMM_DT_STRUCT = struct.Struct("!I")


class AethType(IntEnum):
    """The type of acknowledgement: bits 6-5 of a syndrome (InfiniBand Architecture, table 57)."""

    ACK = 0
    RNR_NAK = 1
    RESERVED = 2
    NAK = 3


#: By the top three bits of a syndrome. The highest bit is reserved.
AETH_TYPES = (AethType.ACK, AethType.RNR_NAK, AethType.RESERVED, AethType.NAK) + (AethType.RESERVED,) * 4


def peek(data: Buffer) -> tuple[int, int, int, int, int]:
    """Opcode, PadCnt, destination QPN, AckReq (0 or 1) and PSN of a packet; WireError if it is shorter than a BTH."""
    try:
        opcode, flags, _, qpn, psn = BTH_STRUCT.unpack_from(data)
    except struct.error:
        raise WireError(f"BTH has {BTH_LENGTH} bytes, not {len(data)}") from None
    return opcode, flags >> 4 & 3, qpn & QPN_MASK, psn >> 31, psn & PSN_MASK
