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

import struct
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Self, TypeAlias

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.proto.cm.codes import AttributeId, FailoverAccepted, SidrStatus, TransportServiceType
from rdmacm.proto.layout import Packed, bits, laid_out, rest, whole
from rdmacm.proto.mad import BASE_VERSION, DATA_SIZE, MAD_SIZE, Mad, Method, MgmtClass
from rdmacm.proto.wire import Buffer, WireError

CLASS_VERSION = 2


# Messages are not frozen, because that makes construction four times slower. Only the sender changes a message.


@dataclass(slots=True, unsafe_hash=True)
@laid_out(44)
class Path(Packed):
    """The primary or alternate path in a REQ, 44 bytes (InfiniBand Architecture 12.6.5). All zero: no path.

    ``packet_rate`` is a code of ``ibv_rate``.
    """

    local_gid: Annotated[Gid, whole(4, 16)] = Gid()  # noqa: RUF009 (immutable)
    remote_gid: Annotated[Gid, whole(20, 16)] = Gid()  # noqa: RUF009 (immutable)
    local_lid: Annotated[int, bits(0, 16)] = 0
    remote_lid: Annotated[int, bits(2, 16)] = 0
    flow_label: Annotated[int, bits(36, 20)] = 0
    packet_rate: Annotated[int, bits(39, 6, before=2)] = 0
    traffic_class: Annotated[int, bits(40, 8)] = 0
    hop_limit: Annotated[int, bits(41, 8)] = 0
    sl: Annotated[int, bits(42, 4)] = 0
    subnet_local: Annotated[bool, bits(42, 1, before=4)] = False
    local_ack_timeout: Annotated[int, bits(43, 5)] = 0

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
@laid_out(DATA_SIZE)
class REQ(Packed):
    """Request for communication (InfiniBand Architecture 12.6.5).

    ``path_mtu`` is a code, 1..5 for 256..4096 bytes. ``responder_resources`` and ``initiator_depth`` are numbers of
    outstanding READ and atomic requests: those the sender accepts, and those it sends. ``retry_count`` and
    ``rnr_retry_count`` are for the queue pair (an RNR retry count of 7: for ever), ``max_cm_retries`` for CM messages.
    """

    ATTRIBUTE: ClassVar = AttributeId.REQ

    service_id: Annotated[int, bits(8, 64)]
    primary: Annotated[Path, whole(52, 44, Path.unpack)]
    local_comm_id: Annotated[int, bits(0, 32)] = 0
    local_ca_guid: Annotated[int, bits(16, 64)] = 0
    local_q_key: Annotated[int, bits(28, 32)] = 0
    local_qpn: Annotated[int, bits(32, 24)] = 0
    responder_resources: Annotated[int, bits(35, 8)] = 0
    local_eecn: Annotated[int, bits(36, 24)] = 0
    initiator_depth: Annotated[int, bits(39, 8)] = 0
    remote_eecn: Annotated[int, bits(40, 24)] = 0
    remote_cm_response_timeout: Annotated[int, bits(43, 5)] = 20
    transport_service_type: Annotated[int, bits(43, 2, before=5)] = TransportServiceType.RC
    end_to_end_flow_control: Annotated[bool, bits(43, 1, before=7)] = False
    starting_psn: Annotated[int, bits(44, 24)] = 0
    local_cm_response_timeout: Annotated[int, bits(47, 5)] = 20
    retry_count: Annotated[int, bits(47, 3, before=5)] = 7
    partition_key: Annotated[int, bits(48, 16)] = DEFAULT_PKEY
    path_mtu: Annotated[int, bits(50, 4)] = 0
    rdc_exists: Annotated[bool, bits(50, 1, before=4)] = False
    rnr_retry_count: Annotated[int, bits(50, 3, before=5)] = 0
    max_cm_retries: Annotated[int, bits(51, 4)] = 15
    srq: Annotated[bool, bits(51, 1, before=4)] = False
    extended_transport_type: Annotated[int, bits(51, 3, before=5)] = 0
    alternate: Annotated[Path, whole(96, 44, _alternate)] = NO_PATH
    sap_supported: Annotated[bool, bits(139, 1, before=5)] = False
    private_data: Annotated[bytes, rest(140)] = b""
    vendor_id: Annotated[int, bits(5, 24)] = 0
    attr_mod: int = 0

    @property
    def transport(self) -> tuple[int, int]:
        """The transport service: its type, and if that is EXTENDED the extended type, else 0."""
        kind = self.transport_service_type
        return kind, self.extended_transport_type if kind == TransportServiceType.EXTENDED else 0


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class MRA(Packed):
    """Message receipt acknowledgment: the answer will take longer (InfiniBand Architecture 12.6.6)."""

    ATTRIBUTE: ClassVar = AttributeId.MRA

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    message_mraed: Annotated[int, bits(8, 2)]
    service_timeout: Annotated[int, bits(9, 5)]
    private_data: Annotated[bytes, rest(10)] = b""


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class REJ(Packed):
    """Reject (InfiniBand Architecture 12.6.7). ``ari`` is the additional reject information of ``reason``."""

    ATTRIBUTE: ClassVar = AttributeId.REJ

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    message_rejected: Annotated[int, bits(8, 2)]
    reason: Annotated[int, bits(10, 16)]
    reject_info_length: Annotated[int, bits(9, 7)] = 0
    ari: Annotated[bytes, whole(12, 72, pads=True)] = b""
    private_data: Annotated[bytes, rest(84)] = b""


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class REP(Packed):
    """Reply to a REQ (InfiniBand Architecture 12.6.8). ``target_ack_delay`` is an exponent, the CA ACK delay."""

    ATTRIBUTE: ClassVar = AttributeId.REP

    local_comm_id: Annotated[int, bits(0, 32)] = 0
    remote_comm_id: Annotated[int, bits(4, 32)] = 0
    local_q_key: Annotated[int, bits(8, 32)] = 0
    local_qpn: Annotated[int, bits(12, 24)] = 0
    local_eecn: Annotated[int, bits(16, 24)] = 0
    starting_psn: Annotated[int, bits(20, 24)] = 0
    responder_resources: Annotated[int, bits(24, 8)] = 0
    initiator_depth: Annotated[int, bits(25, 8)] = 0
    target_ack_delay: Annotated[int, bits(26, 5)] = 0
    failover_accepted: Annotated[int, bits(26, 2, before=5)] = FailoverAccepted.ACCEPTED
    end_to_end_flow_control: Annotated[bool, bits(26, 1, before=7)] = False
    rnr_retry_count: Annotated[int, bits(27, 3)] = 0
    srq: Annotated[bool, bits(27, 1, before=3)] = False
    local_ca_guid: Annotated[int, bits(28, 64)] = 0
    private_data: Annotated[bytes, rest(36)] = b""
    vendor_id: Annotated[int, bits(15, 8), bits(19, 8), bits(23, 8)] = 0
    attr_mod: int = 0


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class RTU(Packed):
    """Ready to use (InfiniBand Architecture 12.6.9)."""

    ATTRIBUTE: ClassVar = AttributeId.RTU

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    private_data: Annotated[bytes, rest(8)] = b""


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class DREQ(Packed):
    """Request to disconnect (InfiniBand Architecture 12.6.10)."""

    ATTRIBUTE: ClassVar = AttributeId.DREQ

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    remote_qpn_eecn: Annotated[int, bits(8, 24)]
    private_data: Annotated[bytes, rest(12)] = b""


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class DREP(Packed):
    """Reply to a DREQ (InfiniBand Architecture 12.6.11)."""

    ATTRIBUTE: ClassVar = AttributeId.DREP

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    private_data: Annotated[bytes, rest(8)] = b""


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class SIDR_REQ(Packed):
    """Request to resolve a service id to a datagram queue pair (InfiniBand Architecture 12.11.1)."""

    ATTRIBUTE: ClassVar = AttributeId.SIDR_REQ

    service_id: Annotated[int, bits(8, 64)]
    request_id: Annotated[int, bits(0, 32)] = 0
    partition_key: Annotated[int, bits(4, 16)] = DEFAULT_PKEY
    private_data: Annotated[bytes, rest(16)] = b""


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class SIDR_REP(Packed):
    """Reply to a SIDR_REQ (InfiniBand Architecture 12.11.2)."""

    ATTRIBUTE: ClassVar = AttributeId.SIDR_REP

    request_id: Annotated[int, bits(0, 32)] = 0
    status: Annotated[int, bits(4, 8)] = SidrStatus.SUCCESS
    qpn: Annotated[int, bits(8, 24)] = 0
    service_id: Annotated[int, bits(12, 64)] = 0
    q_key: Annotated[int, bits(20, 32)] = 0
    additional_info_length: Annotated[int, bits(5, 8)] = 0
    additional_info: Annotated[bytes, whole(24, 72, pads=True)] = b""
    private_data: Annotated[bytes, rest(96)] = b""
    vendor_id: Annotated[int, bits(6, 16), bits(11, 8)] = 0
    attr_mod: int = 0


@dataclass(slots=True, unsafe_hash=True)
@laid_out(DATA_SIZE)
class LAP(Packed):
    """Load alternate path (InfiniBand Architecture 12.8.1)."""

    ATTRIBUTE: ClassVar = AttributeId.LAP

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    remote_qpn_eecn: Annotated[int, bits(12, 24)]
    remote_cm_response_timeout: Annotated[int, bits(15, 5)]
    alternate_local_lid: Annotated[int, bits(20, 16)]
    alternate_remote_lid: Annotated[int, bits(22, 16)]
    alternate_local_gid: Annotated[Gid, whole(24, 16)]
    alternate_remote_gid: Annotated[Gid, whole(40, 16)]
    alternate_flow_label: Annotated[int, bits(56, 20)]
    alternate_traffic_class: Annotated[int, bits(59, 8)]
    alternate_hop_limit: Annotated[int, bits(60, 8)]
    alternate_packet_rate: Annotated[int, bits(61, 6, before=2)]
    alternate_sl: Annotated[int, bits(62, 4)]
    alternate_subnet_local: Annotated[bool, bits(62, 1, before=4)]
    alternate_local_ack_timeout: Annotated[int, bits(63, 5)]
    private_data: Annotated[bytes, rest(64)] = b""

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
@laid_out(DATA_SIZE)
class APR(Packed):
    """Alternate path response, the answer to a LAP (InfiniBand Architecture 12.8.2).

    ``ap_status`` is an :class:`~rdmacm.proto.cm.codes.ApStatus`, ``additional_info`` what the status explains further.
    """

    ATTRIBUTE: ClassVar = AttributeId.APR

    local_comm_id: Annotated[int, bits(0, 32)]
    remote_comm_id: Annotated[int, bits(4, 32)]
    ap_status: Annotated[int, bits(9, 8)]
    additional_info_length: Annotated[int, bits(8, 8)] = 0
    additional_info: Annotated[bytes, whole(12, 72, pads=True)] = b""
    private_data: Annotated[bytes, rest(84)] = b""


Message: TypeAlias = REQ | MRA | REJ | REP | RTU | DREQ | DREP | SIDR_REQ | SIDR_REP | LAP | APR

_TYPES: dict[int, type[Message]] = {
    kind.ATTRIBUTE: kind for kind in (REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP, LAP, APR)
}


#: The header of a MAD: base version, class, class version and method as bytes; transaction id, attribute, modifier.
HEADER = struct.Struct("!4s4xQHxxI")
HEADER_START = bytes((BASE_VERSION, MgmtClass.COM_MGT, CLASS_VERSION, Method.SEND))
_WITH_MODIFIER = (REQ, REP, SIDR_REP)


def pack_message(message: Message, transaction_id: int) -> bytes:
    """The MAD that carries ``message``."""
    modifier = message.attr_mod if isinstance(message, _WITH_MODIFIER) else 0
    try:
        header = HEADER.pack(HEADER_START, transaction_id, message.ATTRIBUTE, modifier)
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
        first, tid, attribute, modifier = HEADER.unpack_from(data)
        kind = _TYPES.get(attribute)
        if first == HEADER_START and kind is not None:
            message = kind.__new__(kind)  # __init__() would set each field a second time
            kind._LAYOUT.fill(message, data[MAD_SIZE - DATA_SIZE :])
            if isinstance(message, _WITH_MODIFIER):
                message.attr_mod = modifier
            return message, tid
    mad = Mad.unpack(data)
    return unpack_message(mad), mad.transaction_id
