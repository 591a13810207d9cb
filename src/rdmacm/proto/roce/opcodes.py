"""Opcodes of the base transport header (InfiniBand Architecture, table 38) and the properties of each.

The top three bits of an opcode are its transport service (reliable connection 000, unreliable connection 001,
unreliable datagram 011, extended reliable connection 101), the other five its operation. UC, UD and XRC use the numbers
of RC for the same operations and leave out those they do not have. So the five bits have one description each, and each
service lists the opcodes it has; all tables are derived from that.

A message is one "only" packet, or a "first", any number of "middle" and a "last" packet. IS_START is true for a first
or only packet, IS_END for a last or only packet; READ requests, atomics and acknowledgements are one packet each, so
both are true. Requests go to the responder, all others to the requester.

NEEDS_RECV is true if the responder needs a receive for the packet: the start of a SEND, and the packet with the
immediate data of a WRITE.

Extended headers follow the base transport header in the order of :class:`ExtendedHeader`, for every opcode.

The tables have 256 entries, so any byte from the wire is an index. ``HEADER_LENGTH`` is 0 for an unknown opcode, and so
are all other tables. Congestion notification (0x81) is unknown: it carries nothing that a device without rate control
could use, and is dropped like other unknown opcodes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import NamedTuple

__all__ = [
    "EXTENDED_HEADERS",
    "HAS_PAYLOAD",
    "HEADER_LENGTH",
    "IS_END",
    "IS_REQUEST",
    "IS_RESPONSE",
    "IS_START",
    "NEEDS_RECV",
    "OPERATION",
    "TRANSPORT_MASK",
    "ExtendedHeader",
    "Opcode",
    "Operation",
    "TransportService",
]

#: The bits of an opcode that are the transport service.
TRANSPORT_MASK = 0xE0


class TransportService(IntEnum):
    """Transport services: the top three bits of an opcode, in place."""

    RC = 0x00
    UC = 0x20
    UD = 0x60
    XRC = 0xA0


class Opcode(IntEnum):
    """OpCode of the base transport header."""

    RC_SEND_FIRST = 0x00
    RC_SEND_MIDDLE = 0x01
    RC_SEND_LAST = 0x02
    RC_SEND_LAST_WITH_IMMEDIATE = 0x03
    RC_SEND_ONLY = 0x04
    RC_SEND_ONLY_WITH_IMMEDIATE = 0x05
    RC_RDMA_WRITE_FIRST = 0x06
    RC_RDMA_WRITE_MIDDLE = 0x07
    RC_RDMA_WRITE_LAST = 0x08
    RC_RDMA_WRITE_LAST_WITH_IMMEDIATE = 0x09
    RC_RDMA_WRITE_ONLY = 0x0A
    RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE = 0x0B
    RC_RDMA_READ_REQUEST = 0x0C
    RC_RDMA_READ_RESPONSE_FIRST = 0x0D
    RC_RDMA_READ_RESPONSE_MIDDLE = 0x0E
    RC_RDMA_READ_RESPONSE_LAST = 0x0F
    RC_RDMA_READ_RESPONSE_ONLY = 0x10
    RC_ACKNOWLEDGE = 0x11
    RC_ATOMIC_ACKNOWLEDGE = 0x12
    RC_COMPARE_SWAP = 0x13
    RC_FETCH_ADD = 0x14
    RC_SEND_LAST_WITH_INVALIDATE = 0x16
    RC_SEND_ONLY_WITH_INVALIDATE = 0x17
    RC_FLUSH = 0x1C
    RC_ATOMIC_WRITE = 0x1D

    UC_SEND_FIRST = 0x20
    UC_SEND_MIDDLE = 0x21
    UC_SEND_LAST = 0x22
    UC_SEND_LAST_WITH_IMMEDIATE = 0x23
    UC_SEND_ONLY = 0x24
    UC_SEND_ONLY_WITH_IMMEDIATE = 0x25
    UC_RDMA_WRITE_FIRST = 0x26
    UC_RDMA_WRITE_MIDDLE = 0x27
    UC_RDMA_WRITE_LAST = 0x28
    UC_RDMA_WRITE_LAST_WITH_IMMEDIATE = 0x29
    UC_RDMA_WRITE_ONLY = 0x2A
    UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE = 0x2B

    UD_SEND_ONLY = 0x64
    UD_SEND_ONLY_WITH_IMMEDIATE = 0x65

    XRC_SEND_FIRST = 0xA0
    XRC_SEND_MIDDLE = 0xA1
    XRC_SEND_LAST = 0xA2
    XRC_SEND_LAST_WITH_IMMEDIATE = 0xA3
    XRC_SEND_ONLY = 0xA4
    XRC_SEND_ONLY_WITH_IMMEDIATE = 0xA5
    XRC_RDMA_WRITE_FIRST = 0xA6
    XRC_RDMA_WRITE_MIDDLE = 0xA7
    XRC_RDMA_WRITE_LAST = 0xA8
    XRC_RDMA_WRITE_LAST_WITH_IMMEDIATE = 0xA9
    XRC_RDMA_WRITE_ONLY = 0xAA
    XRC_RDMA_WRITE_ONLY_WITH_IMMEDIATE = 0xAB
    XRC_RDMA_READ_REQUEST = 0xAC
    XRC_RDMA_READ_RESPONSE_FIRST = 0xAD
    XRC_RDMA_READ_RESPONSE_MIDDLE = 0xAE
    XRC_RDMA_READ_RESPONSE_LAST = 0xAF
    XRC_RDMA_READ_RESPONSE_ONLY = 0xB0
    XRC_ACKNOWLEDGE = 0xB1
    XRC_ATOMIC_ACKNOWLEDGE = 0xB2
    XRC_COMPARE_SWAP = 0xB3
    XRC_FETCH_ADD = 0xB4
    XRC_SEND_LAST_WITH_INVALIDATE = 0xB6
    XRC_SEND_ONLY_WITH_INVALIDATE = 0xB7


class ExtendedHeader(IntFlag):
    """The headers that may follow the base transport header, lowest bit first on the wire."""

    XRCETH = 1 << 0
    DETH = 1 << 1
    FETH = 1 << 2
    RETH = 1 << 3
    ATOMIC_ETH = 1 << 4
    AETH = 1 << 5
    ATOMIC_ACK_ETH = 1 << 6
    IMM_DT = 1 << 7
    IETH = 1 << 8


class Operation(IntEnum):
    """The operation that a packet is part of."""

    SEND = 1
    RDMA_WRITE = 2
    RDMA_READ = 3
    ATOMIC = 4
    FLUSH = 5
    ATOMIC_WRITE = 6
    RDMA_READ_RESPONSE = 7
    ACKNOWLEDGE = 8
    ATOMIC_ACKNOWLEDGE = 9


BTH_LENGTH = 12

#: Bytes of each extended header.
EXTENDED_LENGTH = {
    ExtendedHeader.XRCETH: 4,
    ExtendedHeader.DETH: 8,
    ExtendedHeader.FETH: 4,
    ExtendedHeader.RETH: 16,
    ExtendedHeader.ATOMIC_ETH: 28,
    ExtendedHeader.AETH: 4,
    ExtendedHeader.ATOMIC_ACK_ETH: 8,
    ExtendedHeader.IMM_DT: 4,
    ExtendedHeader.IETH: 4,
}


class _Traits(NamedTuple):
    operation: Operation
    headers: int = 0
    start: bool = True
    end: bool = True
    payload: bool = True
    recv: bool = False

    @property
    def request(self) -> bool:
        return self.operation < Operation.RDMA_READ_RESPONSE


def _first(operation: Operation, headers: int = 0, recv: bool = False) -> _Traits:
    return _Traits(operation, headers, end=False, recv=recv)


def _middle(operation: Operation) -> _Traits:
    return _Traits(operation, start=False, end=False)


def _last(operation: Operation, headers: int = 0, recv: bool = False) -> _Traits:
    return _Traits(operation, headers, start=False, recv=recv)


def _alone(operation: Operation, headers: int) -> _Traits:
    return _Traits(operation, headers, payload=False)


_H, _O = ExtendedHeader, Operation

#: By the low five bits of the opcode.
_TRAITS = {
    0x00: _first(_O.SEND, recv=True),
    0x01: _middle(_O.SEND),
    0x02: _last(_O.SEND),
    0x03: _last(_O.SEND, _H.IMM_DT),
    0x04: _Traits(_O.SEND, recv=True),
    0x05: _Traits(_O.SEND, _H.IMM_DT, recv=True),
    0x06: _first(_O.RDMA_WRITE, _H.RETH),
    0x07: _middle(_O.RDMA_WRITE),
    0x08: _last(_O.RDMA_WRITE),
    0x09: _last(_O.RDMA_WRITE, _H.IMM_DT, recv=True),
    0x0A: _Traits(_O.RDMA_WRITE, _H.RETH),
    0x0B: _Traits(_O.RDMA_WRITE, _H.RETH | _H.IMM_DT, recv=True),
    0x0C: _alone(_O.RDMA_READ, _H.RETH),
    0x0D: _first(_O.RDMA_READ_RESPONSE, _H.AETH),
    0x0E: _middle(_O.RDMA_READ_RESPONSE),
    0x0F: _last(_O.RDMA_READ_RESPONSE, _H.AETH),
    0x10: _Traits(_O.RDMA_READ_RESPONSE, _H.AETH),
    0x11: _alone(_O.ACKNOWLEDGE, _H.AETH),
    0x12: _alone(_O.ATOMIC_ACKNOWLEDGE, _H.AETH | _H.ATOMIC_ACK_ETH),
    0x13: _alone(_O.ATOMIC, _H.ATOMIC_ETH),
    0x14: _alone(_O.ATOMIC, _H.ATOMIC_ETH),
    0x16: _last(_O.SEND, _H.IETH),
    0x17: _Traits(_O.SEND, _H.IETH, recv=True),
    0x1C: _alone(_O.FLUSH, _H.FETH | _H.RETH),
    0x1D: _Traits(_O.ATOMIC_WRITE, _H.RETH),
}


def _describe(opcode: int) -> _Traits:
    traits = _TRAITS[opcode & ~TRANSPORT_MASK]
    if opcode & TRANSPORT_MASK == TransportService.UD:
        return traits._replace(headers=traits.headers | _H.DETH)
    if opcode & TRANSPORT_MASK == TransportService.XRC and traits.request:
        return traits._replace(headers=traits.headers | _H.XRCETH)
    return traits


def _table(value: Callable[[_Traits], int]) -> bytes:
    table = bytearray(256)
    for opcode in Opcode:
        table[opcode] = value(_describe(opcode))
    return bytes(table)


#: :class:`ExtendedHeader` bits of each opcode.
EXTENDED_HEADERS = tuple(int(_describe(opcode).headers) if opcode in set(Opcode) else 0 for opcode in range(256))
#: Bytes of the base transport header and the extended ones; 0 where the opcode is not known.
HEADER_LENGTH = _table(
    lambda traits: BTH_LENGTH + sum(size for header, size in EXTENDED_LENGTH.items() if traits.headers & header)
)
#: 1 for packets of a requester.
IS_REQUEST = _table(lambda traits: traits.request)
#: 1 for packets of a responder.
IS_RESPONSE = _table(lambda traits: not traits.request)
#: 1 for the first packet of a message, or its only one.
IS_START = _table(lambda traits: traits.start)
#: 1 for the last packet of a message, or its only one.
IS_END = _table(lambda traits: traits.end)
#: 1 where data may follow the headers.
HAS_PAYLOAD = _table(lambda traits: traits.payload)
#: 1 where the responder needs a receive work request.
NEEDS_RECV = _table(lambda traits: traits.recv)
#: :class:`Operation` of each opcode.
OPERATION = _table(lambda traits: traits.operation)
