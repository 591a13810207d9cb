"""Management datagrams (MADs): a header of 24 bytes, and 232 bytes of data."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from rdmacm.address import Gid
from rdmacm.proto.wire import WireError

HEADER_SIZE = 24
DATA_SIZE = 232
MAD_SIZE = HEADER_SIZE + DATA_SIZE

#: The Q_Key of QP 1, which every MAD to a QP 1 carries.
GSI_Q_KEY = 0x80010000

#: The bit of a method that marks a response.
RESPONSE = 0x80

_HEADER = struct.Struct("!BBBBHHQHxxI")
BASE_VERSION = 1


class MgmtClass(IntEnum):
    """Management classes (InfiniBand Architecture 13.4.4)."""

    SUBN_LID_ROUTED = 0x01
    SUBN_ADM = 0x03
    PERF = 0x04
    BM = 0x05
    DEV_MGT = 0x06
    COM_MGT = 0x07
    SNMP = 0x08
    DEV_ADM = 0x10
    CONGESTION = 0x21
    SUBN_DIRECTED_ROUTE = 0x81


class Method(IntEnum):
    """The methods common to all classes (InfiniBand Architecture 13.4.5); bit 7 marks a response."""

    GET = 0x01
    SET = 0x02
    SEND = 0x03
    TRAP = 0x05
    REPORT = 0x06
    TRAP_REPRESS = 0x07
    GET_RESP = 0x81
    REPORT_RESP = 0x86


class MadStatus(IntEnum):
    """The lower byte of the status (InfiniBand Architecture 13.4.7). The upper byte is specific to the class."""

    OK = 0x00
    BUSY = 0x01
    REDIRECT = 0x02
    BAD_VERSION = 0x04
    UNSUPPORTED_METHOD = 0x08
    UNSUPPORTED_METHOD_ATTRIBUTE = 0x0C
    INVALID_ATTRIBUTE_VALUE = 0x1C


class MadAddress(NamedTuple):
    """The source or destination of a MAD on an InfiniBand subnet (``struct ib_mad_addr`` of ib_umad).

    ``lid`` and ``qpn`` are the LID and the queue pair number of the other end; the latter is 1 except for subnet
    management. ``sl`` is the service level. ``pkey_index`` and ``gid_index`` are rows of the local port's tables.
    ``gid`` is that of the other end, None without a GRH; ``flow_label``, ``traffic_class`` and ``hop_limit`` are those
    of the GRH.
    """

    lid: int
    qpn: int = 1
    sl: int = 0
    pkey_index: int = 0
    gid: Gid | None = None
    gid_index: int = 0
    flow_label: int = 0
    traffic_class: int = 0
    hop_limit: int = 0


@dataclass(frozen=True, slots=True)
class Mad:
    """A management datagram (InfiniBand Architecture 13.4.2, 13.4.3), 256 bytes.

    Class, method and status are plain numbers, because a peer may send any value; compare them with
    :class:`MgmtClass`, :class:`Method` and :class:`MadStatus`.
    """

    mgmt_class: int
    class_version: int
    method: int
    attribute_id: int
    transaction_id: int
    status: int = 0
    class_specific: int = 0
    attribute_modifier: int = 0
    data: bytes = bytes(DATA_SIZE)

    def pack(self) -> bytes:
        """The 256 bytes on the wire; ValueError for a field out of range or data of another length than 232."""
        if len(self.data) != DATA_SIZE:
            raise ValueError(f"the data of a MAD has {DATA_SIZE} bytes, not {len(self.data)}")
        try:
            header = _HEADER.pack(
                BASE_VERSION,
                self.mgmt_class,
                self.class_version,
                self.method,
                self.status,
                self.class_specific,
                self.transaction_id,
                self.attribute_id,
                self.attribute_modifier,
            )
        except struct.error as problem:
            raise ValueError(f"a field of the MAD header is out of range: {problem}") from None
        return header + self.data

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Mad:
        """The MAD in 256 bytes; WireError for another length or base version."""
        if len(data) != MAD_SIZE:
            raise WireError(f"a MAD has {MAD_SIZE} bytes, not {len(data)}")
        base_version, mgmt_class, class_version, method, status, specific, tid, attribute, modifier = (
            _HEADER.unpack_from(data)
        )
        if base_version != BASE_VERSION:
            raise WireError(f"MAD base version {base_version} is not {BASE_VERSION}")
        return cls(
            mgmt_class=mgmt_class,
            class_version=class_version,
            method=method,
            attribute_id=attribute,
            transaction_id=tid,
            status=status,
            class_specific=specific,
            attribute_modifier=modifier,
            data=bytes(data[_HEADER.size :]),
        )
