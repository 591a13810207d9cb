"""SA MADs: headers and status texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.proto.sa.mad import HEADER_LENGTH, SaMad, SaMethod, SaStatus, describe_status
from rdmacm.proto.sa.rmpp import RmppFlag, RmppHeader, RmppType
from rdmacm.proto.wire import WireError
from support import sa_vectors
from support.rows import for_each

VECTORS = {name: value for name, value in vars(sa_vectors).items() if isinstance(value, bytes)}


@for_each("name", VECTORS)
def test_vectors_round_trip(name: str) -> None:
    assert SaMad.unpack(VECTORS[name]).pack(fill=False) == VECTORS[name]


def test_unpack_returns_the_header_of_a_table() -> None:
    mad = SaMad.unpack(sa_vectors.NODE_ANSWER)
    assert (mad.method, mad.attribute_id, mad.transaction_id) == (SaMethod.GET_TABLE_RESP, 0x11, 0x900000004)
    assert (mad.attribute_offset, mad.component_mask, len(mad.data)) == (14, 1, 200)
    assert mad.rmpp == RmppHeader(1, RmppType.DATA, 0, RmppFlag.ACTIVE | RmppFlag.FIRST | RmppFlag.LAST, 0, 1, 132)
    assert mad.rmpp.is_active


def test_opensm_table_in_one_mad_is_not_rmpp() -> None:
    mad = SaMad.unpack(sa_vectors.TABLE_ANSWER)
    assert mad.rmpp.flags == RmppFlag.ACTIVE
    assert not mad.rmpp.is_active
    assert len(mad.data) == 176


@given(st.binary(max_size=600))
def test_arbitrary_bytes_unpack_or_raise_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        SaMad.unpack(data)
    whole = b"\1\3\2" + data[3:]
    if len(whole) >= HEADER_LENGTH:
        again = SaMad.unpack(whole)
        assert SaMad.unpack(again.pack(fill=False)) == again


@pytest.mark.parametrize("mad", [SaMad(256, 1, 1), SaMad(1, 1, 1 << 64), SaMad(1, 1, 1, rmpp=RmppHeader(flags=8))])
def test_pack_rejects_fields_out_of_range(mad: SaMad) -> None:
    with pytest.raises(ValueError):
        mad.pack()


def test_rmpp_header_of_a_wrong_length_raises_wire_error() -> None:
    with pytest.raises(WireError):
        RmppHeader.unpack(bytes(11))


def test_every_status_has_a_description() -> None:
    words = [describe_status(status) for status in SaStatus]
    assert len(set(words)) == len(words)
    assert describe_status(0x0300) == "no record matches"
    assert describe_status(0x0301) == "no record matches"
    assert describe_status(0x0005) == describe_status(SaStatus.BAD_VERSION), "busy as well"
    assert describe_status(0xFF00) == "status 0xff00"
    for status in range(0x10000):
        assert describe_status(status)


def test_methods_name_their_response_method() -> None:
    assert SaMethod.SET.response is SaMethod.GET_RESP
    assert SaMethod.DELETE.response is SaMethod.DELETE_RESP
    assert SaMethod.GET_RESP.response is SaMethod.GET_RESP
