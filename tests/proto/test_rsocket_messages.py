"""The bytes of the stream protocol of rsocket(7), and those that librdmacm's rsockets have sent."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest

from rdmacm.proto.cm.messages import REP, REQ, unpack_mad
from rdmacm.proto.cm.private_data import HEADER_SIZE
from rdmacm.proto.roce.headers import peek
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.rsocket import messages as m
from rdmacm.proto.rsocket.messages import ConnectionData, Control, Mapping, Operation, Target
from rdmacm.proto.wire import WireError
from support.pcap import roce
from support.pcap_cm import mads
from support.rows import for_each

CAPTURE = Path(__file__).parent.parent / "data" / "captures" / "rxe-rsocket.pcap"

#: The opcodes of messages, and where the immediate data stand: after the BTH, and a RETH of 16 bytes.
_WRITES = {Opcode.RC_RDMA_WRITE_LAST_WITH_IMMEDIATE: 12, Opcode.RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE: 28}

#: Private data of an rsocket of librdmacm, as in the capture, without the zeros that follow.
GOLDEN = bytes.fromhex(
    "01 02 0180 000000 00"  # version, flags, 384 credits, no mappings
    "00007f0000001000 00000123 00000002"  # the target SGL
    "00007f0000002000 00000456 00010000"  # half of the receive buffer
)


def test_the_connection_data_are_big_endian() -> None:
    data = ConnectionData.unpack(GOLDEN + bytes(16))
    assert data == ConnectionData(
        384, 0, Target(0x7F0000001000, 0x123, 2), Target(0x7F0000002000, 0x456, 0x10000), m.ConnectionFlag.MAPPINGS
    )
    assert data.pack() == GOLDEN


@for_each(
    "data, why",
    [
        (GOLDEN[:39], "40 bytes"),
        (b"", "40 bytes"),
        (b"\x02" + GOLDEN[1:], "version 2"),
        (b"\x00" + GOLDEN[1:], "version 0"),
        (GOLDEN[:20] + bytes(4) + GOLDEN[24:], "without entries"),
    ],
)
def test_other_data_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        ConnectionData.unpack(data)


def test_a_field_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        ConnectionData(1 << 16, 0, Target(0, 0, 2), Target(0, 0, 0), 0).pack()


@for_each(
    "size, code, back", [(0, 0, 0), (1, 1, 1), (128, 128, 128), (200, 128, 128), (256, 129, 256), (32512, 255, 32512)]
)
def test_the_size_of_a_table_has_8_bits(size: int, code: int, back: int) -> None:
    assert m.encoded_size(size) == code
    assert m.decoded_size(code) == back


@for_each("order, sign", [("little", "<"), ("big", ">")])
def test_entries_are_in_the_order_of_their_memory(order: str, sign: str) -> None:
    target, mapping = Target(0x1122334455667788, 0x99AABBCC, 0x10000), Mapping(5, 0x1122334455667788, 0x99AABBCC, 7)
    assert target.pack(order) == struct.pack(f"{sign}QII", 0x1122334455667788, 0x99AABBCC, 0x10000)
    assert mapping.pack(order) == struct.pack(f"{sign}QQII", 5, 0x1122334455667788, 0x99AABBCC, 7)
    assert Target.unpack(bytes(16) + target.pack(order), 1, order) == target
    assert Mapping.unpack(mapping.pack(order), 0, order) == mapping


def test_an_entry_beyond_the_memory_is_refused() -> None:
    with pytest.raises(WireError):
        Target.unpack(bytes(32), 2, "little")
    with pytest.raises(WireError):
        Mapping.unpack(bytes(47), 1, "little")


def test_immediate_data_have_an_operation_and_an_argument() -> None:
    assert m.immediate(Operation.CONTROL, Control.SHUTDOWN) == 0xE0000002
    assert m.immediate(Operation.SGL, 0x17F) == 0x8000017F
    assert m.operation_of(0xC0000003) == Operation.IOMAP
    assert m.argument_of(0x1FFFFFFF) == m.MAX_ARGUMENT


def _of_capture() -> tuple[list[ConnectionData], Counter[int], int]:
    """The connection data of both ends, how often each operation was sent, and the bytes of DATA."""
    data: list[ConnectionData] = []
    operations: Counter[int] = Counter()
    size = 0
    for _, _, mad in mads(CAPTURE.name):
        message = unpack_mad(mad)[0]
        if isinstance(message, REQ | REP):
            data.append(ConnectionData.unpack(message.private_data[HEADER_SIZE if isinstance(message, REQ) else 0 :]))
    for datagram in roce(CAPTURE):
        opcode = Opcode(peek(datagram.payload)[0])
        if opcode in _WRITES:
            imm = int.from_bytes(datagram.payload[_WRITES[opcode] :][:4], "big")
            operations[m.operation_of(imm)] += 1
            if m.operation_of(imm) == Operation.DATA:
                size += m.argument_of(imm)
    return data, operations, size


def test_librdmacms_rsockets_say_what_is_described() -> None:
    data, operations, size = _of_capture()
    assert len(data) == 2
    for each in data:
        assert each.credits == 384
        assert each.flags & m.ConnectionFlag.MAPPINGS
        assert each.control.length == m.TARGETS
        assert each.buffer.length % 2 == 0
        assert ConnectionData.unpack(each.pack()) == each
    assert set(operations) == {Operation.DATA, Operation.SGL, Operation.CONTROL}
    assert size > 0
