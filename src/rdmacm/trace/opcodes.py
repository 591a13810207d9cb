"""What the tracer does with a packet of each opcode, from the tables of the package's engines."""

from __future__ import annotations

from rdmacm.proto.constants import ICRC_LENGTH
from rdmacm.proto.roce.opcodes import (
    EXTENDED_HEADERS,
    HEADER_LENGTH,
    IS_END,
    IS_REQUEST,
    IS_START,
    OPERATION,
    TRANSPORT_MASK,
    ExtendedHeader,
    Operation,
    TransportService,
)

#: Kinds of packets. The first two are most of all packets, and leave no trace but sums.
MIDDLE, RESPONSE_MIDDLE, FIRST, LAST, ONLY, QUERY, RESPONSE_FIRST, RESPONSE_END, ACKNOWLEDGE, DATAGRAM, CNP, UNKNOWN = (
    range(12)
)

#: Congestion notification (InfiniBand Architecture, annex A17.9.3), which the engines do not know.
CNP_OPCODE = 0x81

#: Requests of one packet that are answered by a response with data.
_QUERIES = (Operation.RDMA_READ, Operation.ATOMIC, Operation.FLUSH, Operation.ATOMIC_WRITE)
_RESPONSES = (Operation.RDMA_READ_RESPONSE, Operation.ATOMIC_ACKNOWLEDGE)


def _kind(opcode: int) -> int:
    if opcode == CNP_OPCODE:
        return CNP
    if not HEADER_LENGTH[opcode]:
        return UNKNOWN
    if opcode & TRANSPORT_MASK == TransportService.UD:
        return DATAGRAM
    operation = OPERATION[opcode]
    if operation == Operation.ACKNOWLEDGE:
        return ACKNOWLEDGE
    if operation in _QUERIES:
        return QUERY
    starts, ends = IS_START[opcode], IS_END[opcode]
    if IS_REQUEST[opcode]:
        return (ONLY if starts else LAST) if ends else (FIRST if starts else MIDDLE)
    return RESPONSE_END if ends else RESPONSE_FIRST if starts else RESPONSE_MIDDLE


#: The kind of each opcode.
KINDS = bytes(map(_kind, range(256)))
#: Bytes of headers and ICRC of each opcode.
OVERHEAD = bytes((length or 12) + ICRC_LENGTH for length in HEADER_LENGTH)


def _offset(opcode: int, header: ExtendedHeader) -> int:
    has = EXTENDED_HEADERS[opcode]
    if not has & header:
        return 0
    lengths = {ExtendedHeader.XRCETH: 4, ExtendedHeader.DETH: 8, ExtendedHeader.FETH: 4, ExtendedHeader.RETH: 16}
    return 12 + sum(length for before, length in lengths.items() if has & before and before < header)


#: Where the AETH and the RETH begin, from the BTH on; 0 without one.
AETH_AT = bytes(_offset(opcode, ExtendedHeader.AETH) for opcode in range(256))
RETH_AT = bytes(_offset(opcode, ExtendedHeader.RETH) for opcode in range(256))

#: Names of operations, as verbs and their users have them.
NAMES = {
    Operation.SEND: "SEND",
    Operation.RDMA_WRITE: "WRITE",
    Operation.RDMA_READ: "READ",
    Operation.ATOMIC: "ATOMIC",
    Operation.FLUSH: "FLUSH",
    Operation.ATOMIC_WRITE: "ATOMIC_WRITE",
}
_ATOMICS = {0x13: "CMP_AND_SWP", 0x14: "FETCH_AND_ADD"}
#: The name of the operation of each opcode of a request, "" for other packets.
OPERATION_NAMES: tuple[str, ...] = tuple(
    _ATOMICS.get(opcode & 0x1F, "")
    if OPERATION[opcode] == Operation.ATOMIC
    else NAMES.get(OPERATION[opcode] or Operation.ACKNOWLEDGE, "")  # type: ignore[call-overload]
    for opcode in range(256)
)
SERVICES = {
    int(TransportService.RC): "RC",
    int(TransportService.UC): "UC",
    int(TransportService.UD): "UD",
    int(TransportService.XRC): "XRC",
}

#: NAKs by their code (InfiniBand Architecture, table 58).
NAKS = {
    0: "PSN sequence error",
    1: "invalid request",
    2: "remote access error",
    3: "remote operational error",
    4: "invalid RD request",
}
SEQUENCE_ERROR, INVALID_REQUEST, ACCESS_ERROR, OPERATIONAL_ERROR = range(4)
