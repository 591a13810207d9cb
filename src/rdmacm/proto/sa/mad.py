"""MADs of the subnet administration class (InfiniBand Architecture 15.2.1), their methods and statuses."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from rdmacm.proto.mad import BASE_VERSION, MAD_SIZE, MgmtClass
from rdmacm.proto.sa.rmpp import HEADER_SIZE, NO_RMPP, SEGMENT_SIZE, RmppHeader
from rdmacm.proto.wire import Buffer, WireError

CLASS_VERSION = 2

#: Bytes of a MAD before its records.
HEADER_LENGTH = MAD_SIZE - SEGMENT_SIZE

#: Base version, class, class version, method, status, transaction id, attribute id, attribute modifier.
_HEADER = struct.Struct("!BBBBHxxQHxxI")
#: SM_Key, AttributeOffset, component mask. The RMPP header is between the two.
_SA_HEADER = struct.Struct("!QHxxQ")
_SA_HEADER_OFFSET = _HEADER.size + HEADER_SIZE


class SaMethod(IntEnum):
    """Methods of the subnet administrator (InfiniBand Architecture 15.2.2)."""

    GET = 0x01
    SET = 0x02
    REPORT = 0x06
    GET_TABLE = 0x12
    GET_TRACE_TABLE = 0x13
    GET_MULTI = 0x14
    DELETE = 0x15
    GET_RESP = 0x81
    REPORT_RESP = 0x86
    GET_TABLE_RESP = 0x92
    GET_MULTI_RESP = 0x94
    DELETE_RESP = 0x95

    @property
    def response(self) -> SaMethod:
        """The method of the response to this one."""
        return _RESPONSES.get(self, self)


_RESPONSES = {
    SaMethod.GET: SaMethod.GET_RESP,
    SaMethod.SET: SaMethod.GET_RESP,
    SaMethod.REPORT: SaMethod.REPORT_RESP,
    SaMethod.GET_TABLE: SaMethod.GET_TABLE_RESP,
    SaMethod.GET_TRACE_TABLE: SaMethod.GET_TABLE_RESP,
    SaMethod.GET_MULTI: SaMethod.GET_MULTI_RESP,
    SaMethod.DELETE: SaMethod.DELETE_RESP,
}


class SaStatus(IntEnum):
    """The status of a response (InfiniBand Architecture 13.4.7, 15.2.3).

    The lower byte is common to all classes, the upper one specific to this class. Bit 0, BUSY, may be set with any of
    the others.
    """

    OK = 0x0000
    BUSY = 0x0001
    REDIRECT = 0x0002
    BAD_VERSION = 0x0004
    UNSUPPORTED_METHOD = 0x0008
    UNSUPPORTED_METHOD_ATTRIBUTE = 0x000C
    INVALID_ATTRIBUTE_VALUE = 0x001C
    NO_RESOURCES = 0x0100
    REQ_INVALID = 0x0200
    NO_RECORDS = 0x0300
    TOO_MANY_RECORDS = 0x0400
    REQ_INVALID_GID = 0x0500
    REQ_INSUFFICIENT_COMPONENTS = 0x0600
    REQ_DENIED = 0x0700
    PRIORITY_SUGGESTED = 0x0800


_WORDS: dict[int, str] = {
    SaStatus.OK: "success",
    SaStatus.BUSY: "the subnet administrator is busy",
    SaStatus.REDIRECT: "the query is redirected to another port",
    SaStatus.BAD_VERSION: "the version is not supported",
    SaStatus.UNSUPPORTED_METHOD: "the method is not supported",
    SaStatus.UNSUPPORTED_METHOD_ATTRIBUTE: "the method is not supported for this attribute",
    SaStatus.INVALID_ATTRIBUTE_VALUE: "an attribute or a modifier has an invalid value",
    SaStatus.NO_RESOURCES: "the subnet administrator has no resources left",
    SaStatus.REQ_INVALID: "the request is invalid",
    SaStatus.NO_RECORDS: "no record matches",
    SaStatus.TOO_MANY_RECORDS: "more than one record matches",
    SaStatus.REQ_INVALID_GID: "a GID is invalid",
    SaStatus.REQ_INSUFFICIENT_COMPONENTS: "the request lacks components",
    SaStatus.REQ_DENIED: "the request is denied",
    SaStatus.PRIORITY_SUGGESTED: "another priority is suggested",
}


def describe_status(status: int) -> str:
    """A status in words."""
    words = _WORDS.get(status)
    if words is None:
        words = _WORDS.get(status & 0xFF00) if status & 0xFF00 else _WORDS.get(status & 0x1C or status & 0x3)
    return words or f"status {status:#06x}"


@dataclass(frozen=True, slots=True)
class SaMad:
    """A MAD of the subnet administration class.

    ``method``, ``attribute_id``, ``attribute_modifier`` and ``status`` are plain numbers, because a peer may send any
    value. ``transaction_id``, 64 bits, is the same in a request and its response. ``component_mask`` selects the fields
    of the record that count in a request. ``attribute_offset`` is the size of a record in the table, in units of 8
    bytes. ``data`` are the records: up to 200 bytes, or more in a response that was reassembled. ``sm_key`` is 0
    except for trusted requests. ``rmpp`` is the header of a segment.
    """

    method: int
    attribute_id: int
    transaction_id: int
    component_mask: int = 0
    data: bytes = b""
    status: int = 0
    attribute_modifier: int = 0
    attribute_offset: int = 0
    sm_key: int = 0
    rmpp: RmppHeader = NO_RMPP

    def pack(self, *, fill: bool = True) -> bytes:
        """The bytes on the wire, padded to 256 with ``fill``; ValueError for a field out of range."""
        try:
            packed = (
                _HEADER.pack(
                    BASE_VERSION,
                    MgmtClass.SUBN_ADM,
                    CLASS_VERSION,
                    self.method,
                    self.status,
                    self.transaction_id,
                    self.attribute_id,
                    self.attribute_modifier,
                )
                + self.rmpp.pack()
                + _SA_HEADER.pack(self.sm_key, self.attribute_offset, self.component_mask)
                + self.data
            )
        except struct.error as problem:
            raise ValueError(f"a field of the MAD is out of range: {problem}") from None
        return packed.ljust(MAD_SIZE, b"\0") if fill else packed

    @classmethod
    def unpack(cls, data: Buffer) -> SaMad:
        """The MAD in 56 bytes or more; WireError for fewer bytes, or another class or version."""
        if len(data) < HEADER_LENGTH:
            raise WireError(f"a MAD of this class has {HEADER_LENGTH} bytes or more, not {len(data)}")
        base, mgmt_class, version, method, status, tid, attribute, modifier = _HEADER.unpack_from(data)
        if (base, mgmt_class, version) != (BASE_VERSION, MgmtClass.SUBN_ADM, CLASS_VERSION):
            raise WireError(f"class {mgmt_class:#04x}, version {base}.{version} is not subnet administration")
        sm_key, offset, mask = _SA_HEADER.unpack_from(data, _SA_HEADER_OFFSET)
        return cls(
            method=method,
            attribute_id=attribute,
            transaction_id=tid,
            component_mask=mask,
            data=bytes(data[HEADER_LENGTH:]),
            status=status,
            attribute_modifier=modifier,
            attribute_offset=offset,
            sm_key=sm_key,
            rmpp=RmppHeader.unpack(data[_HEADER.size : _SA_HEADER_OFFSET]),
        )
