"""The codes of CM messages: attribute ids, transport services, reject reasons and statuses."""

from __future__ import annotations

from enum import IntEnum


class AttributeId(IntEnum):
    """The message in a MAD of the communication management class (InfiniBand Architecture 16.7.3)."""

    REQ = 0x0010
    MRA = 0x0011
    REJ = 0x0012
    REP = 0x0013
    RTU = 0x0014
    DREQ = 0x0015
    DREP = 0x0016
    SIDR_REQ = 0x0017
    SIDR_REP = 0x0018
    LAP = 0x0019
    APR = 0x001A


class TransportServiceType(IntEnum):
    """Transport service type of a REQ. EXTENDED: the field ``extended_transport_type`` holds it, where 1 is XRC."""

    RC = 0
    UC = 1
    RD = 2
    EXTENDED = 3


class MessageKind(IntEnum):
    """The message that an MRA acknowledges ("message MRAed") or a REJ rejects ("message rejected")."""

    REQ = 0
    REP = 1
    OTHER = 2


class FailoverAccepted(IntEnum):
    """Whether a REP accepts the alternate path ("failover accepted")."""

    ACCEPTED = 0
    UNSUPPORTED = 1
    REJECTED = 2


class RejectReason(IntEnum):
    """Reasons of a REJ (InfiniBand Architecture 12.6.7.2)."""

    NO_QP = 1
    NO_EEC = 2
    NO_RESOURCES = 3
    TIMEOUT = 4
    UNSUPPORTED = 5
    INVALID_COMM_ID = 6
    INVALID_COMM_INSTANCE = 7
    INVALID_SERVICE_ID = 8
    INVALID_TRANSPORT_TYPE = 9
    STALE_CONN = 10
    RDC_NOT_EXIST = 11
    INVALID_GID = 12
    INVALID_LID = 13
    INVALID_SL = 14
    INVALID_TRAFFIC_CLASS = 15
    INVALID_HOP_LIMIT = 16
    INVALID_PACKET_RATE = 17
    INVALID_ALT_GID = 18
    INVALID_ALT_LID = 19
    INVALID_ALT_SL = 20
    INVALID_ALT_TRAFFIC_CLASS = 21
    INVALID_ALT_HOP_LIMIT = 22
    INVALID_ALT_PACKET_RATE = 23
    PORT_CM_REDIRECT = 24
    PORT_REDIRECT = 25
    INVALID_MTU = 26
    INSUFFICIENT_RESP_RESOURCES = 27
    CONSUMER_DEFINED = 28
    INVALID_RNR_RETRY = 29
    DUPLICATE_LOCAL_COMM_ID = 30
    INVALID_CLASS_VERSION = 31
    INVALID_FLOW_LABEL = 32
    INVALID_ALT_FLOW_LABEL = 33
    VENDOR_OPTION_NOT_SUPPORTED = 35


class SidrStatus(IntEnum):
    """Status of a SIDR_REP (InfiniBand Architecture 12.11.2.1)."""

    SUCCESS = 0
    UNSUPPORTED = 1
    REJECT = 2
    NO_QP = 3
    REDIRECT = 4
    UNSUPPORTED_VERSION = 5


class ApStatus(IntEnum):
    """Status of an APR, the answer to an offered alternate path (InfiniBand Architecture 12.8.2.1)."""

    SUCCESS = 0
    INVALID_COMM_ID = 1
    UNSUPPORTED = 2
    REJECT = 3
    REDIRECT = 4
    IS_CURRENT = 5
    INVALID_QPN_EECN = 6
    INVALID_LID = 7
    INVALID_GID = 8
    INVALID_FLOW_LABEL = 9
    INVALID_TRAFFIC_CLASS = 10
    INVALID_HOP_LIMIT = 11
    INVALID_PACKET_RATE = 12
    INVALID_SL = 13


#: What a user is told of the most frequent reasons.
_NO_LISTENER = "nobody listens on that port"
_REFUSED = "the peer's application, or its connection manager, refused"
_REJECTION_TEXT = {
    RejectReason.INVALID_SERVICE_ID: _NO_LISTENER,
    RejectReason.CONSUMER_DEFINED: _REFUSED,
}
#: Path MTUs in bytes, by their code in a message.
_MTU_BYTES = {code: 128 << code for code in range(1, 6)}
_SIDR_TEXT = {
    SidrStatus.UNSUPPORTED: _NO_LISTENER,
    SidrStatus.REJECT: _REFUSED,
    SidrStatus.NO_QP: "the peer has no queue pair for it",
}


def rejection_text(reason: int, ari: bytes = b"", path_mtu: int = 0, *, is_passive: bool = False) -> str:
    """The reason of a REJ in words.

    ``ari`` is its additional information, of which INVALID_MTU has the peer's path MTU; ``path_mtu`` the code of the
    one that was asked for, 0 if that is not known. ``is_passive``: whether this side was asked to connect.
    """
    try:
        known = RejectReason(reason)
    except ValueError:
        return f"rejected, reason {reason}"
    if known is RejectReason.INVALID_MTU and path_mtu in _MTU_BYTES:
        theirs = _MTU_BYTES.get(ari[0] if ari else 0)
        at_peer = f"up to {theirs} bytes" if theirs else "only a smaller one"
        return f"the path MTU is {_MTU_BYTES[path_mtu]} bytes here, and the peer's port has {at_peer}"
    if known is RejectReason.TIMEOUT:
        missed = "the answer to its request (REP)" if is_passive else "the confirmation (RTU) of its answer"
        return f"the peer has given up: {missed} did not reach it in time"
    return _REJECTION_TEXT.get(known, f"rejected: {known.name.lower().replace('_', ' ')}")


def ap_text(status: int) -> str:
    """The status of an APR that is no success, in words."""
    try:
        known = ApStatus(status).name.lower().replace("_", " ")
    except ValueError:
        known = str(status)
    return f"the peer refused the alternate path: {known}"


def sidr_text(status: int) -> str:
    """The status of a SIDR_REP that is no success, in words."""
    return {int(known): text for known, text in _SIDR_TEXT.items()}.get(status, "the peer refused")
