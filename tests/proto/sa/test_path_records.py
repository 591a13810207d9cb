"""Packing and unpacking of path records and path data."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import Gid
from rdmacm.constants import PathFlag
from rdmacm.proto.sa import PathData, PathRecord
from support.rows import for_each

#: A record with a different value in every field. FIELDS are its bytes in a MAD.
RECORD = PathRecord(
    dgid=Gid("fe80::d0d1:d2d3:d4d5:d6d7"),
    sgid=Gid("fe80::5051:5253:5455:5657"),
    service_id=0x0102030405060708,
    dlid=0x1112,
    slid=0x2122,
    flow_label=0xABCDE,
    hop_limit=0x3F,
    traffic_class=0x44,
    reversible=True,
    numb_path=0x55,
    pkey=0x8001,
    qos_class=0x678,
    sl=0x9,
    mtu_selector=2,
    mtu=4,
    rate_selector=3,
    rate=0x0B,
    packet_life_time_selector=1,
    packet_life_time=0x12,
    preference=0x77,
)
FIELDS = [
    (0, "0102030405060708"),  # service_id
    (8, "fe80000000000000 d0d1d2d3d4d5d6d7"),  # dgid
    (24, "fe80000000000000 5051525354555657"),  # sgid
    (40, "1112"),  # dlid
    (42, "2122"),  # slid
    (44, "0abcde3f"),  # flow label in bits 27..8, hop limit in 7..0
    (48, "44"),  # traffic class
    (49, "d5"),  # reversible in bit 7, number of paths
    (50, "8001"),  # P_Key
    (52, "6789"),  # QoS class in bits 15..4, SL in 3..0
    (54, "84"),  # MTU: selector in bits 7..6
    (55, "cb"),  # rate: the same
    (56, "52"),  # packet life time: the same
    (57, "77"),  # preference
    (58, "000000000000"),  # reserved
]
BYTES = b"".join(bytes.fromhex(text) for _, text in FIELDS)

_two, _six, _byte, _word = st.integers(0, 3), st.integers(0, 63), st.integers(0, 255), st.integers(0, 0xFFFF)
_gids = st.binary(min_size=16, max_size=16).map(Gid)
records = st.builds(
    PathRecord,
    dgid=_gids,
    sgid=_gids,
    service_id=st.integers(0, (1 << 64) - 1),
    dlid=_word,
    slid=_word,
    flow_label=st.integers(0, (1 << 20) - 1),
    hop_limit=_byte,
    traffic_class=_byte,
    reversible=st.booleans(),
    numb_path=st.integers(0, 127),
    pkey=_word,
    qos_class=st.integers(0, 0xFFF),
    sl=st.integers(0, 15),
    mtu_selector=_two,
    mtu=_six,
    rate_selector=_two,
    rate=_six,
    packet_life_time_selector=_two,
    packet_life_time=_six,
    preference=_byte,
)
flags = st.integers(0, 0xFFFFFFFF).map(PathFlag)


class TestPathRecord:
    def test_listed_fields_cover_the_record(self) -> None:
        assert len(BYTES) == 64
        for offset, text in FIELDS:
            field = bytes.fromhex(text)
            assert BYTES[offset : offset + len(field)] == field

    def test_pack_returns_the_specified_bytes(self) -> None:
        packed = RECORD.pack()
        for offset, text in FIELDS:
            field = bytes.fromhex(text)
            assert packed[offset : offset + len(field)] == field, f"at offset {offset}"
        assert packed == BYTES

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_unpack_returns_the_fields(self, kind: Callable[[bytes], bytes]) -> None:
        record = PathRecord.unpack(kind(BYTES))
        assert record == RECORD
        assert (type(record.dgid), type(record.sgid)) == (Gid, Gid)
        assert record.reversible is True

    def test_irreversible_path_clears_the_reversible_bit(self) -> None:
        data = BYTES[:49] + b"\x55" + BYTES[50:]
        assert PathRecord.unpack(data) == RECORD.replace(reversible=False)
        assert RECORD.replace(reversible=False).pack() == data

    def test_reserved_bits_are_not_read(self) -> None:
        data = BYTES[:44] + b"\xfa" + BYTES[45:58] + b"\xff" * 6
        assert PathRecord.unpack(data) == RECORD

    def test_defaults_are_those_of_a_usable_path(self) -> None:
        record = PathRecord(dgid=Gid("fe80::1"), sgid=Gid("fe80::2"))
        packed = record.pack()
        assert packed[49:52] == b"\x81\xff\xff"
        assert packed[54:57] == b"\x80\x80\x80"  # each exactly
        assert set(packed[:8] + packed[40:49] + packed[52:54] + packed[57:]) == {0}

    @given(records)
    def test_any_values_round_trip(self, record: PathRecord) -> None:
        data = record.pack()
        assert len(data) == 64
        assert PathRecord.unpack(data) == record
        assert pickle.loads(pickle.dumps(record)) == record

    @given(st.binary(min_size=64, max_size=64))
    def test_any_bytes_of_the_right_length_unpack(self, data: bytes) -> None:
        record = PathRecord.unpack(data)
        again = record.pack()
        assert PathRecord.unpack(again) == record
        assert (again[:44], again[45:58]) == (data[:44], data[45:58])

    @for_each("size", [0, 1, 63, 65, 72, 128])
    def test_wrong_length_raises_value_error(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"64 bytes, not {size}$"):
            PathRecord.unpack(bytes(size))

    @for_each(("code", "size"), [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096), (0, 0), (6, 0)])
    def test_mtu_code_is_converted_to_bytes(self, code: int, size: int) -> None:
        assert RECORD.replace(mtu=code).mtu_bytes == size

    @for_each(
        ("field", "limit"),
        [
            ("service_id", 1 << 64),
            ("dlid", 1 << 16),
            ("slid", 1 << 16),
            ("flow_label", 1 << 20),
            ("traffic_class", 1 << 8),
            ("pkey", 1 << 16),
            ("qos_class", 1 << 12),
            ("preference", 1 << 8),
        ],
    )
    def test_pack_rejects_fields_out_of_range(self, field: str, limit: int) -> None:
        with pytest.raises(ValueError, match=field):
            RECORD.replace(**{field: limit}).pack()

    def test_record_is_immutable_and_hashable(self) -> None:
        record: Any = RECORD
        with pytest.raises(AttributeError):
            record.mtu = 1
        assert hash(RECORD) == hash(RECORD.replace())


class TestPathData:
    DATA = PathData(RECORD, PathFlag.GMP | PathFlag.OUTBOUND | PathFlag.INBOUND)

    def test_pack_returns_the_specified_bytes(self) -> None:
        packed = self.DATA.pack()
        assert len(packed) == 72
        assert packed[:8] == struct.pack("=II", 1 | 8 | 16, 0)
        assert packed[8:] == BYTES

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_unpack_returns_the_fields(self, kind: Callable[[bytes], bytes]) -> None:
        data = PathData.unpack(kind(self.DATA.pack()))
        assert data == self.DATA
        assert type(data.flags) is PathFlag

    def test_defaults_are_those_of_a_usable_path(self) -> None:
        assert PathData(RECORD).flags == PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL == 43

    def test_reserved_word_is_ignored(self) -> None:
        packed = self.DATA.pack()
        assert PathData.unpack(packed[:4] + b"\xff" * 4 + packed[8:]) == self.DATA

    @given(records, flags)
    def test_any_values_round_trip(self, record: PathRecord, flag: PathFlag) -> None:
        data = PathData(record, flag)
        assert PathData.unpack(data.pack()) == data

    @for_each("size", [0, 8, 64, 71, 73, 144])
    def test_wrong_length_raises_value_error(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"72 bytes, not {size}$"):
            PathData.unpack(bytes(size))
