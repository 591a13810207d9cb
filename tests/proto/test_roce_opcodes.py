"""The tables of opcodes against the specification's list."""

from __future__ import annotations

from rdmacm.proto.roce import opcodes
from rdmacm.proto.roce.opcodes import ExtendedHeader as H
from rdmacm.proto.roce.opcodes import Opcode, Operation, TransportService
from support.rows import for_each

# Written by hand, not by rule: opcode, name, extended headers, header length, and letters for the packet's properties:
# Q request, P response, S start, E end, D may carry data, R consumes a receive.
RC = [
    (0x00, "SEND_FIRST", 0, 12, "QSDR"),
    (0x01, "SEND_MIDDLE", 0, 12, "QD"),
    (0x02, "SEND_LAST", 0, 12, "QED"),
    (0x03, "SEND_LAST_WITH_IMMEDIATE", H.IMM_DT, 16, "QED"),
    (0x04, "SEND_ONLY", 0, 12, "QSEDR"),
    (0x05, "SEND_ONLY_WITH_IMMEDIATE", H.IMM_DT, 16, "QSEDR"),
    (0x06, "RDMA_WRITE_FIRST", H.RETH, 28, "QSD"),
    (0x07, "RDMA_WRITE_MIDDLE", 0, 12, "QD"),
    (0x08, "RDMA_WRITE_LAST", 0, 12, "QED"),
    (0x09, "RDMA_WRITE_LAST_WITH_IMMEDIATE", H.IMM_DT, 16, "QEDR"),
    (0x0A, "RDMA_WRITE_ONLY", H.RETH, 28, "QSED"),
    (0x0B, "RDMA_WRITE_ONLY_WITH_IMMEDIATE", H.RETH | H.IMM_DT, 32, "QSEDR"),
    (0x0C, "RDMA_READ_REQUEST", H.RETH, 28, "QSE"),
    (0x0D, "RDMA_READ_RESPONSE_FIRST", H.AETH, 16, "PSD"),
    (0x0E, "RDMA_READ_RESPONSE_MIDDLE", 0, 12, "PD"),
    (0x0F, "RDMA_READ_RESPONSE_LAST", H.AETH, 16, "PED"),
    (0x10, "RDMA_READ_RESPONSE_ONLY", H.AETH, 16, "PSED"),
    (0x11, "ACKNOWLEDGE", H.AETH, 16, "PSE"),
    (0x12, "ATOMIC_ACKNOWLEDGE", H.AETH | H.ATOMIC_ACK_ETH, 24, "PSE"),
    (0x13, "COMPARE_SWAP", H.ATOMIC_ETH, 40, "QSE"),
    (0x14, "FETCH_ADD", H.ATOMIC_ETH, 40, "QSE"),
    (0x16, "SEND_LAST_WITH_INVALIDATE", H.IETH, 16, "QED"),
    (0x17, "SEND_ONLY_WITH_INVALIDATE", H.IETH, 16, "QSEDR"),
    (0x1C, "FLUSH", H.FETH | H.RETH, 32, "QSE"),
    (0x1D, "ATOMIC_WRITE", H.RETH, 28, "QSED"),
]
UC = [(row[0] + 0x20, *row[1:]) for row in RC if row[0] <= 0x0B]
XRC = [
    (number + 0xA0, name, headers | (H.XRCETH if "Q" in letters else 0), length + 4 * ("Q" in letters), letters)
    for number, name, headers, length, letters in RC
    if number < 0x1C
]
UD = [
    (0x64, "SEND_ONLY", H.DETH, 20, "QSEDR"),
    (0x65, "SEND_ONLY_WITH_IMMEDIATE", H.DETH | H.IMM_DT, 24, "QSEDR"),
]
ALL = [
    (number, f"{transport}_{name}", headers, length, letters)
    for transport, rows in (("RC", RC), ("UC", UC), ("UD", UD), ("XRC", XRC))
    for number, name, headers, length, letters in rows
]
LETTERS = {
    "Q": opcodes.IS_REQUEST,
    "P": opcodes.IS_RESPONSE,
    "S": opcodes.IS_START,
    "E": opcodes.IS_END,
    "D": opcodes.HAS_PAYLOAD,
    "R": opcodes.NEEDS_RECV,
}


@for_each(("number", "name", "headers", "length", "letters"), ALL, ids=[row[1] for row in ALL])
def test_opcodes_match_the_specification(number: int, name: str, headers: int, length: int, letters: str) -> None:
    assert Opcode(number).name == name
    assert TransportService(number & opcodes.TRANSPORT_MASK).name == name.split("_", maxsplit=1)[0]
    assert opcodes.EXTENDED_HEADERS[number] == headers
    assert opcodes.HEADER_LENGTH[number] == length
    assert {letter for letter, table in LETTERS.items() if table[number]} == set(letters)
    assert Operation(opcodes.OPERATION[number]).name in name or number & 0x5F in (0x13, 0x14)
    assert (Operation(opcodes.OPERATION[number]) is Operation.ATOMIC) is (number & 0x5F in (0x13, 0x14))


def test_other_opcodes_are_unknown() -> None:
    assert sorted(Opcode) == sorted(row[0] for row in ALL)
    unknown = set(range(256)) - {row[0] for row in ALL}
    tables = [*LETTERS.values(), opcodes.HEADER_LENGTH, opcodes.EXTENDED_HEADERS, opcodes.OPERATION]
    for table in tables:
        assert len(table) == 256
        assert not any(table[number] for number in unknown)
