"""The header of management datagrams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.proto.mad import DATA_SIZE, MAD_SIZE, RESPONSE, Mad, MadStatus, Method, MgmtClass
from rdmacm.proto.wire import WireError
from support.roce_vectors import expand
from support.rows import for_each

# The header of an SA GetResp(PathRecord), from the specification's vectors.
GET_RESP = expand("010302810000000000000009000000010035{238}")


def integers(top: int = 0xFF) -> st.SearchStrategy[int]:
    return st.integers(0, top)


MADS = st.builds(
    Mad,
    mgmt_class=integers(),
    class_version=integers(),
    method=integers(),
    attribute_id=integers(0xFFFF),
    transaction_id=integers((1 << 64) - 1),
    status=integers(0xFFFF),
    class_specific=integers(0xFFFF),
    attribute_modifier=integers((1 << 32) - 1),
    data=st.binary(min_size=DATA_SIZE, max_size=DATA_SIZE),
)


def test_unpack_returns_every_header_field() -> None:
    mad = Mad.unpack(GET_RESP)
    assert mad.mgmt_class == MgmtClass.SUBN_ADM
    assert mad.class_version == 2
    assert mad.method == Method.GET_RESP
    assert mad.method & RESPONSE
    assert mad.status == MadStatus.OK
    assert mad.transaction_id == 0x0000000900000001
    assert mad.attribute_id == 0x0035
    assert mad.attribute_modifier == 0
    assert mad.pack() == GET_RESP


def test_pack_puts_each_field_at_its_offset() -> None:
    mad = Mad(0x81, 3, 0x86, 0x1213, 0x08090A0B0C0D0E0F, 0x0405, 0x0607, 0x14151617, bytes(DATA_SIZE))
    assert mad.pack()[:24] == expand("01810386 04050607 08090a0b0c0d0e0f 12130000 14151617")


@given(MADS)
def test_mads_round_trip(mad: Mad) -> None:
    packed = mad.pack()
    assert len(packed) == MAD_SIZE
    assert Mad.unpack(packed) == mad
    assert Mad.unpack(memoryview(packed)) == mad


@given(st.binary(max_size=300) | st.binary(min_size=MAD_SIZE, max_size=MAD_SIZE))
def test_arbitrary_bytes_unpack_or_raise_wire_error(data: bytes) -> None:
    try:
        mad = Mad.unpack(data)
    except WireError:
        assert len(data) != MAD_SIZE or data[0] != 1
    else:
        packed = mad.pack()
        assert packed[:18] == data[:18]
        assert packed[20:] == data[20:], "bytes 18 and 19 are reserved"


@for_each("size", [0, 23, 24, 255, 257])
def test_wrong_length_raises_wire_error(size: int) -> None:
    with pytest.raises(WireError, match="256"):
        Mad.unpack(b"\x01" * size)


def test_pack_rejects_fields_out_of_range() -> None:
    with pytest.raises(ValueError, match="232"):
        Mad(7, 2, 3, 0x10, 1, data=b"").pack()
    with pytest.raises(ValueError, match="range"):
        Mad(7, 2, 3, 0x10, 1 << 64).pack()
