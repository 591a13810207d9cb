"""The messages of the communication manager on the wire (InfiniBand Architecture 12.6 to 12.8, 12.11).

Each message is the 232 bytes of data of a MAD; :func:`pack_message` and :func:`unpack_message` handle whole MADs.
Fields are named from the sender's point of view: "local" is the sender and "remote" the receiver.

Timeouts are 5-bit exponents, 4.096 µs · 2^n. After unpacking, private data and additional information always have their
full size, padded with zeros, because the wire does not hold the length of what was sent.

``ATTRIBUTE`` is the attribute id of a message's MAD, ``PRIVATE_DATA`` the size of its private data in bytes.

Fields with ``eecn``, ``rdc`` or ``end_to_end`` in their names are those of reliable datagrams, which no adapter has,
and are 0; but the passive side of an XRC connection has its queue pair number in ``local_eecn`` of the REP.

``attr_mod`` and ``vendor_id`` belong to enhanced connection establishment (ECE), and are 0 without it. ``attr_mod`` is
the attribute modifier of the MAD's header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import ClassVar, Self, TypeAlias

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.proto.cm.codes import AttributeId, FailoverAccepted, SidrStatus, TransportServiceType
from rdmacm.proto.layout import Bits, Bytes, Layout, Packed, gid, private_data
from rdmacm.proto.mad import BASE_VERSION, DATA_SIZE, MAD_SIZE, Mad, Method, MgmtClass
from rdmacm.proto.wire import Buffer, WireError

__all__ = [
    "APR",
    "CLASS_VERSION",
    "DREP",
    "DREQ",
    "LAP",
    "MRA",
    "NO_PATH",
    "REJ",
    "REP",
    "REQ",
    "RTU",
    "SIDR_REP",
    "SIDR_REQ",
    "Message",
    "Path",
    "pack_message",
    "unpack_mad",
    "unpack_message",
]

CLASS_VERSION = 2


# Messages are not frozen, because that makes construction four times slower. Only the sender changes a message.


@dataclass(slots=True, unsafe_hash=True)
class Path(Packed):
    """The primary or alternate path in a REQ, 44 bytes (InfiniBand Architecture 12.6.5). All zero: no path.

    ``packet_rate`` is a code of ``ibv_rate``.
    """

    _LAYOUT = Layout(
        44,
        [
            Bits("local_lid", 0, 0, 16),
            Bits("remote_lid", 2, 0, 16),
            gid("local_gid", 4),
            gid("remote_gid", 20),
            Bits("flow_label", 36, 0, 20),
            Bits("packet_rate", 39, 2, 6),
            Bits("traffic_class", 40, 0, 8),
            Bits("hop_limit", 41, 0, 8),
            Bits("sl", 42, 0, 4),
            Bits("subnet_local", 42, 4, 1, True),
            Bits("local_ack_timeout", 43, 0, 5),
        ],
    )

    local_gid: Gid = Gid()  # noqa: RUF009 (immutable)
    remote_gid: Gid = Gid()  # noqa: RUF009 (immutable)
    local_lid: int = 0
    remote_lid: int = 0
    flow_label: int = 0
    packet_rate: int = 0
    traffic_class: int = 0
    hop_limit: int = 0
    sl: int = 0
    subnet_local: bool = False
    local_ack_timeout: int = 0

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The path in these bytes; WireError for another length."""
        path = cls.__new__(cls)  # as in unpack_mad()
        cls._LAYOUT.fill(path, data)
        return path

    def pack(self) -> bytes:
        """The bytes on the wire; ValueError for a field out of range."""
        return _NO_PATH_BYTES if self is NO_PATH else self._LAYOUT.pack(self)


#: The alternate path of a request that has none.
NO_PATH = Path()
_NO_PATH_BYTES = bytes(44)


def _alternate(data: bytes) -> Path:
    # Nearly every REQ has none.
    return NO_PATH if data == _NO_PATH_BYTES else Path.unpack(data)


@dataclass(slots=True, unsafe_hash=True)
class REQ(Packed):
    """Request for communication (InfiniBand Architecture 12.6.5).

    ``path_mtu`` is a code, 1..5 for 256..4096 bytes. ``responder_resources`` and ``initiator_depth`` are numbers of
    outstanding READ and atomic requests: those the sender accepts, and those it sends. ``retry_count`` and
    ``rnr_retry_count`` are for the queue pair (an RNR retry count of 7: for ever), ``max_cm_retries`` for CM messages.
    """

    ATTRIBUTE: ClassVar = AttributeId.REQ
    PRIVATE_DATA: ClassVar = 92
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            Bits("local_comm_id", 0, 0, 32),
            Bits("vendor_id", 5, 0, 24),
            Bits("service_id", 8, 0, 64),
            Bits("local_ca_guid", 16, 0, 64),
            Bits("local_q_key", 28, 0, 32),
            Bits("local_qpn", 32, 0, 24),
            Bits("responder_resources", 35, 0, 8),
            Bits("local_eecn", 36, 0, 24),
            Bits("initiator_depth", 39, 0, 8),
            Bits("remote_eecn", 40, 0, 24),
            Bits("remote_cm_response_timeout", 43, 0, 5),
            Bits("transport_service_type", 43, 5, 2),
            Bits("end_to_end_flow_control", 43, 7, 1, True),
            Bits("starting_psn", 44, 0, 24),
            Bits("local_cm_response_timeout", 47, 0, 5),
            Bits("retry_count", 47, 5, 3),
            Bits("partition_key", 48, 0, 16),
            Bits("path_mtu", 50, 0, 4),
            Bits("rdc_exists", 50, 4, 1, True),
            Bits("rnr_retry_count", 50, 5, 3),
            Bits("max_cm_retries", 51, 0, 4),
            Bits("srq", 51, 4, 1, True),
            Bits("extended_transport_type", 51, 5, 3),
            Bytes("primary", 52, 44, Path.unpack),
            Bytes("alternate", 96, 44, _alternate),
            Bits("sap_supported", 139, 5, 1, True),
            private_data(140, 92),
        ],
    )

    service_id: int
    primary: Path
    local_comm_id: int = 0
    local_ca_guid: int = 0
    local_q_key: int = 0
    local_qpn: int = 0
    responder_resources: int = 0
    local_eecn: int = 0
    initiator_depth: int = 0
    remote_eecn: int = 0
    remote_cm_response_timeout: int = 20
    transport_service_type: int = TransportServiceType.RC
    end_to_end_flow_control: bool = False
    starting_psn: int = 0
    local_cm_response_timeout: int = 20
    retry_count: int = 7
    partition_key: int = DEFAULT_PKEY
    path_mtu: int = 0
    rdc_exists: bool = False
    rnr_retry_count: int = 0
    max_cm_retries: int = 15
    srq: bool = False
    extended_transport_type: int = 0
    alternate: Path = NO_PATH
    sap_supported: bool = False
    private_data: bytes = b""
    vendor_id: int = 0
    attr_mod: int = 0

    @property
    def transport(self) -> tuple[int, int]:
        """The transport service: its type, and if that is EXTENDED the extended type, else 0."""
        kind = self.transport_service_type
        return kind, self.extended_transport_type if kind == TransportServiceType.EXTENDED else 0


@dataclass(slots=True, unsafe_hash=True)
class MRA(Packed):
    """Message receipt acknowledgment: the answer will take longer (InfiniBand Architecture 12.6.6)."""

    ATTRIBUTE: ClassVar = AttributeId.MRA
    PRIVATE_DATA: ClassVar = 222
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            Bits("local_comm_id", 0, 0, 32),
            Bits("remote_comm_id", 4, 0, 32),
            Bits("message_mraed", 8, 0, 2),
            Bits("service_timeout", 9, 0, 5),
            private_data(10, 222),
        ],
    )

    local_comm_id: int
    remote_comm_id: int
    message_mraed: int
    service_timeout: int
    private_data: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class REJ(Packed):
    """Reject (InfiniBand Architecture 12.6.7). ``ari`` is the additional reject information of ``reason``."""

    ATTRIBUTE: ClassVar = AttributeId.REJ
    PRIVATE_DATA: ClassVar = 148
    ARI: ClassVar = 72
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            Bits("local_comm_id", 0, 0, 32),
            Bits("remote_comm_id", 4, 0, 32),
            Bits("message_rejected", 8, 0, 2),
            Bits("reject_info_length", 9, 0, 7),
            Bits("reason", 10, 0, 16),
            Bytes("ari", 12, 72, bytes, True),
            private_data(84, 148),
        ],
    )

    local_comm_id: int
    remote_comm_id: int
    message_rejected: int
    reason: int
    reject_info_length: int = 0
    ari: bytes = b""
    private_data: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class REP(Packed):
    """Reply to a REQ (InfiniBand Architecture 12.6.8). ``target_ack_delay`` is an exponent, the CA ACK delay."""

    ATTRIBUTE: ClassVar = AttributeId.REP
    PRIVATE_DATA: ClassVar = 196
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            Bits("local_comm_id", 0, 0, 32),
            Bits("remote_comm_id", 4, 0, 32),
            Bits("local_q_key", 8, 0, 32),
            Bits("local_qpn", 12, 0, 24),
            Bits("vendor_id", 15, 0, 8),
            Bits("local_eecn", 16, 0, 24),
            Bits("vendor_id", 19, 0, 8),
            Bits("starting_psn", 20, 0, 24),
            Bits("vendor_id", 23, 0, 8),
            Bits("responder_resources", 24, 0, 8),
            Bits("initiator_depth", 25, 0, 8),
            Bits("target_ack_delay", 26, 0, 5),
            Bits("failover_accepted", 26, 5, 2),
            Bits("end_to_end_flow_control", 26, 7, 1, True),
            Bits("rnr_retry_count", 27, 0, 3),
            Bits("srq", 27, 3, 1, True),
            Bits("local_ca_guid", 28, 0, 64),
            private_data(36, 196),
        ],
    )

    local_comm_id: int = 0
    remote_comm_id: int = 0
    local_q_key: int = 0
    local_qpn: int = 0
    local_eecn: int = 0
    starting_psn: int = 0
    responder_resources: int = 0
    initiator_depth: int = 0
    target_ack_delay: int = 0
    failover_accepted: int = FailoverAccepted.ACCEPTED
    end_to_end_flow_control: bool = False
    rnr_retry_count: int = 0
    srq: bool = False
    local_ca_guid: int = 0
    private_data: bytes = b""
    vendor_id: int = 0
    attr_mod: int = 0


_IDS = (Bits("local_comm_id", 0, 0, 32), Bits("remote_comm_id", 4, 0, 32))


@dataclass(slots=True, unsafe_hash=True)
class RTU(Packed):
    """Ready to use (InfiniBand Architecture 12.6.9)."""

    ATTRIBUTE: ClassVar = AttributeId.RTU
    PRIVATE_DATA: ClassVar = 224
    _LAYOUT = Layout(DATA_SIZE, [*_IDS, private_data(8, 224)])

    local_comm_id: int
    remote_comm_id: int
    private_data: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class DREQ(Packed):
    """Request to disconnect (InfiniBand Architecture 12.6.10)."""

    ATTRIBUTE: ClassVar = AttributeId.DREQ
    PRIVATE_DATA: ClassVar = 220
    _LAYOUT = Layout(DATA_SIZE, [*_IDS, Bits("remote_qpn_eecn", 8, 0, 24), private_data(12, 220)])

    local_comm_id: int
    remote_comm_id: int
    remote_qpn_eecn: int
    private_data: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class DREP(Packed):
    """Reply to a DREQ (InfiniBand Architecture 12.6.11)."""

    ATTRIBUTE: ClassVar = AttributeId.DREP
    PRIVATE_DATA: ClassVar = 224
    _LAYOUT = Layout(DATA_SIZE, [*_IDS, private_data(8, 224)])

    local_comm_id: int
    remote_comm_id: int
    private_data: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class SIDR_REQ(Packed):
    """Request to resolve a service id to a datagram queue pair (InfiniBand Architecture 12.11.1)."""

    ATTRIBUTE: ClassVar = AttributeId.SIDR_REQ
    PRIVATE_DATA: ClassVar = 216
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            Bits("request_id", 0, 0, 32),
            Bits("partition_key", 4, 0, 16),
            Bits("service_id", 8, 0, 64),
            private_data(16, 216),
        ],
    )

    service_id: int
    request_id: int = 0
    partition_key: int = DEFAULT_PKEY
    private_data: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class SIDR_REP(Packed):
    """Reply to a SIDR_REQ (InfiniBand Architecture 12.11.2)."""

    ATTRIBUTE: ClassVar = AttributeId.SIDR_REP
    PRIVATE_DATA: ClassVar = 136
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            Bits("request_id", 0, 0, 32),
            Bits("status", 4, 0, 8),
            Bits("additional_info_length", 5, 0, 8),
            Bits("vendor_id", 6, 0, 16),
            Bits("qpn", 8, 0, 24),
            Bits("vendor_id", 11, 0, 8),
            Bits("service_id", 12, 0, 64),
            Bits("q_key", 20, 0, 32),
            Bytes("additional_info", 24, 72, bytes, True),
            private_data(96, 136),
        ],
    )

    request_id: int = 0
    status: int = SidrStatus.SUCCESS
    qpn: int = 0
    service_id: int = 0
    q_key: int = 0
    additional_info_length: int = 0
    additional_info: bytes = b""
    private_data: bytes = b""
    vendor_id: int = 0
    attr_mod: int = 0


@dataclass(slots=True, unsafe_hash=True)
class LAP(Packed):
    """Load alternate path (InfiniBand Architecture 12.8.1)."""

    ATTRIBUTE: ClassVar = AttributeId.LAP
    PRIVATE_DATA: ClassVar = 168
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            *_IDS,
            Bits("remote_qpn_eecn", 12, 0, 24),
            Bits("remote_cm_response_timeout", 15, 0, 5),
            Bits("alternate_local_lid", 20, 0, 16),
            Bits("alternate_remote_lid", 22, 0, 16),
            gid("alternate_local_gid", 24),
            gid("alternate_remote_gid", 40),
            Bits("alternate_flow_label", 56, 0, 20),
            Bits("alternate_traffic_class", 59, 0, 8),
            Bits("alternate_hop_limit", 60, 0, 8),
            Bits("alternate_packet_rate", 61, 2, 6),
            Bits("alternate_sl", 62, 0, 4),
            Bits("alternate_subnet_local", 62, 4, 1, True),
            Bits("alternate_local_ack_timeout", 63, 0, 5),
            private_data(64, 168),
        ],
    )

    local_comm_id: int
    remote_comm_id: int
    remote_qpn_eecn: int
    remote_cm_response_timeout: int
    alternate_local_lid: int
    alternate_remote_lid: int
    alternate_local_gid: Gid
    alternate_remote_gid: Gid
    alternate_flow_label: int
    alternate_traffic_class: int
    alternate_hop_limit: int
    alternate_packet_rate: int
    alternate_sl: int
    alternate_subnet_local: bool
    alternate_local_ack_timeout: int
    private_data: bytes = b""

    @classmethod
    def loading(cls, path: Path) -> Self:
        """A LAP for a path. The ids, the queue pair and the timeout, which are the connection's, are 0."""
        return cls(0, 0, 0, 0, *(getattr(path, name.removeprefix(_LAP_PREFIX)) for name in _LAP_PATH))

    @property
    def alternate(self) -> Path:
        """The path, as a REQ would carry it."""
        return Path(**{name.removeprefix(_LAP_PREFIX): getattr(self, name) for name in _LAP_PATH})


_LAP_PREFIX = "alternate_"
_LAP_PATH = tuple(field.name for field in fields(LAP) if field.name.startswith(_LAP_PREFIX))


@dataclass(slots=True, unsafe_hash=True)
class APR(Packed):
    """Alternate path response, the answer to a LAP (InfiniBand Architecture 12.8.2).

    ``ap_status`` is an :class:`~rdmacm.proto.cm.codes.ApStatus`, ``additional_info`` what the status explains further.
    """

    ATTRIBUTE: ClassVar = AttributeId.APR
    PRIVATE_DATA: ClassVar = 148
    _LAYOUT = Layout(
        DATA_SIZE,
        [
            *_IDS,
            Bits("additional_info_length", 8, 0, 8),
            Bits("ap_status", 9, 0, 8),
            Bytes("additional_info", 12, 72, bytes, True),
            private_data(84, 148),
        ],
    )

    local_comm_id: int
    remote_comm_id: int
    ap_status: int
    additional_info_length: int = 0
    additional_info: bytes = b""
    private_data: bytes = b""


Message: TypeAlias = REQ | MRA | REJ | REP | RTU | DREQ | DREP | SIDR_REQ | SIDR_REP | LAP | APR

_TYPES: dict[int, type[Message]] = {
    kind.ATTRIBUTE: kind for kind in (REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP, LAP, APR)
}


#: The header of a MAD: base version, class, class version and method as bytes; transaction id, attribute, modifier.
_HEADER = struct.Struct("!4s4xQHxxI")
_HEADER_START = bytes((BASE_VERSION, MgmtClass.COM_MGT, CLASS_VERSION, Method.SEND))
_WITH_MODIFIER = (REQ, REP, SIDR_REP)


def pack_message(message: Message, transaction_id: int) -> bytes:
    """The MAD that carries ``message``."""
    modifier = message.attr_mod if isinstance(message, _WITH_MODIFIER) else 0
    try:
        header = _HEADER.pack(_HEADER_START, transaction_id, message.ATTRIBUTE, modifier)
    except struct.error as problem:
        raise ValueError(f"a field of the MAD header is out of range: {problem}") from None
    return header + message._LAYOUT.pack(message)


def unpack_message(mad: Mad) -> Message:
    """The message in a MAD; WireError for another class, class version or method, or an unknown attribute."""
    if mad.mgmt_class != MgmtClass.COM_MGT or mad.class_version != CLASS_VERSION:
        raise WireError(f"class 0x{mad.mgmt_class:02x} version {mad.class_version} is not communication management")
    if mad.method != Method.SEND:
        raise WireError(f"communication management has no method 0x{mad.method:02x}")
    kind = _TYPES.get(mad.attribute_id)
    if kind is None:
        raise WireError(f"no communication management message 0x{mad.attribute_id:04x}")
    message = kind(**kind._LAYOUT.unpack(mad.data))
    if mad.attribute_modifier and isinstance(message, _WITH_MODIFIER):
        message.attr_mod = mad.attribute_modifier
    return message


def unpack_mad(data: Buffer) -> tuple[Message, int]:
    """The message in the bytes of a MAD, and its transaction id; WireError if they do not hold one."""
    if len(data) == MAD_SIZE:
        first, tid, attribute, modifier = _HEADER.unpack_from(data)
        kind = _TYPES.get(attribute)
        if first == _HEADER_START and kind is not None:
            message = kind.__new__(kind)  # __init__() would set each field a second time
            kind._LAYOUT.fill(message, data[MAD_SIZE - DATA_SIZE :])
            if isinstance(message, _WITH_MODIFIER):
                message.attr_mod = modifier
            return message, tid
    mad = Mad.unpack(data)
    return unpack_message(mad), mad.transaction_id
