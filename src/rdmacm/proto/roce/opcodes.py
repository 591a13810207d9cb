"""Opcodes of the base transport header (InfiniBand Architecture, table 38) and what each of them means.

The top three bits of an opcode say which transport it belongs to (reliable connection 000, unreliable connection
001, unreliable datagram 011), the other five what the packet does there.  UC and UD use the numbers RC uses for
the same thing and leave out what they cannot do.  Everything is derived from that: the five bits have one
description each, and a transport is a list of those it takes.

A message is one "only" packet, or a "first", any number of "middle" and a "last" one.  A packet that *starts* is a
first or an only, a packet that *ends* is a last or an only; READ requests, atomics and acknowledgements are one
packet each, so they do both.  Requests go to the responder's queue, everything else is an answer to the requester.

A packet *needs a receive* where the responder has to have a receive work request for it: the start of a SEND, and
the packet that carries the immediate data of a WRITE.

The extended headers follow the base transport header in the order :class:`ExtendedHeader` counts them in; no opcode
has them in another order.

The tables have 256 entries, so that a byte from the wire is an index that always works.  ``HEADER_LENGTH`` is 0 for
an opcode that is not known, and then all the others are 0 too.  Congestion notification (0x81) is not known: it
carries nothing a device without rate control could use, and is dropped as other unknown opcodes are.
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
    "Transport",
]

#: The bits of an opcode that name the transport.
TRANSPORT_MASK = 0xE0


class Transport(IntEnum):
    """The top three bits of an opcode, in place."""

    RC = 0x00
    UC = 0x20
    UD = 0x60


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


class ExtendedHeader(IntFlag):
    """The headers that may follow the base transport header, lowest bit first on the wire."""

    DETH = 1 << 0
    FETH = 1 << 1
    RETH = 1 << 2
    ATOMIC_ETH = 1 << 3
    AETH = 1 << 4
    ATOMIC_ACK_ETH = 1 << 5
    IMM_DT = 1 << 6
    IETH = 1 << 7


class Operation(IntEnum):
    """What a packet is part of, whichever part it is."""

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
    if opcode & TRANSPORT_MASK == Transport.UD:
        return traits._replace(headers=traits.headers | _H.DETH)
    return traits


def _table(value: Callable[[_Traits], int]) -> bytes:
    table = bytearray(256)
    for opcode in Opcode:
        table[opcode] = value(_describe(opcode))
    return bytes(table)


#: :class:`ExtendedHeader` bits of each opcode.
EXTENDED_HEADERS = _table(lambda traits: traits.headers)
#: Bytes of the base transport header and the extended ones; 0 where the opcode is not known.
HEADER_LENGTH = _table(
    lambda traits: BTH_LENGTH + sum(size for header, size in EXTENDED_LENGTH.items() if traits.headers & header)
)
#: 1 for what a requester sends.
IS_REQUEST = _table(lambda traits: traits.request)
#: 1 for what a responder sends.
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
