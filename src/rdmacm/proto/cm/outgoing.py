"""The messages that the engine sends to a peer."""

from __future__ import annotations

import struct

from rdmacm.proto.cm.codes import ApStatus, AttributeId, MessageKind, RejectReason, TransportServiceType
from rdmacm.proto.cm.connection import CmConnection
from rdmacm.proto.cm.messages import (
    APR,
    DREP,
    DREQ,
    HEADER,
    HEADER_START,
    LAP,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    pack_message,
)
from rdmacm.proto.cm.states import CmState

#: Which message a REJ rejects, by the state it is sent in.
_REJECTED_MESSAGE = {
    CmState.REQ_RCVD: MessageKind.REQ,
    CmState.MRA_REQ_SENT: MessageKind.REQ,
    CmState.REP_RCVD: MessageKind.REP,
    CmState.MRA_REP_SENT: MessageKind.REP,
}


def rej(connection: CmConnection, reason: int, private_data: bytes = b"", ari: bytes = b"") -> bytes:
    """A MAD with a REJ; ``ari`` is its additional reject information."""
    message = REJ(
        # In REQ_RCVD the peer cannot know our id yet. Linux sends 0 too.
        local_comm_id=0 if connection.state is CmState.REQ_RCVD else connection.comm_id,
        remote_comm_id=connection.remote_comm_id or 0,
        message_rejected=_REJECTED_MESSAGE.get(connection.state, MessageKind.OTHER),
        reason=reason,
        reject_info_length=len(ari),
        ari=ari,
        private_data=private_data,
    )
    return pack_message(message, connection.transaction_id)


def rej_timeout(connection: CmConnection, guid: int) -> bytes:
    """A MAD with the REJ of a side that gives up. ``guid`` is its CA GUID, by which the peer knows it."""
    return rej(connection, RejectReason.TIMEOUT, ari=guid.to_bytes(8, "big"))


def rej_stale(connection: CmConnection, message: REQ | REP) -> bytes:
    """A MAD with the REJ of a REQ or REP that belongs to an earlier connection."""
    if isinstance(message, REQ):
        refusal = REJ(0, message.local_comm_id, MessageKind.REQ, RejectReason.STALE_CONN)
    else:
        refusal = REJ(connection.comm_id, message.local_comm_id, MessageKind.REP, RejectReason.STALE_CONN)
    return pack_message(refusal, connection.transaction_id)


def rej_unknown(rep: REP, transaction_id: int) -> bytes:
    """A MAD with the REJ of a REP that answers no request."""
    message = REJ(rep.remote_comm_id, rep.local_comm_id, MessageKind.REP, RejectReason.INVALID_COMM_ID)
    return pack_message(message, transaction_id)


def refusal(req: REQ, reason: RejectReason, transaction_id: int, ari: bytes = b"") -> bytes:
    """A MAD with the REJ of a REQ that makes no connection; ``ari`` is its additional reject information."""
    message = REJ(0, req.local_comm_id, MessageKind.REQ, reason, len(ari), ari)
    return pack_message(message, transaction_id)


def mra(connection: CmConnection, service_timeout: int) -> bytes:
    """A MAD with an MRA; ``service_timeout`` is the exponent within which the answer follows."""
    kind, tid = MessageKind.REP if connection.is_active else MessageKind.REQ, connection.transaction_id
    if connection.state is CmState.MRA_LAP_SENT:
        kind, tid = MessageKind.OTHER, connection.lap_transaction_id
    message = MRA(connection.comm_id, connection.remote_comm_id or 0, kind, service_timeout)
    return pack_message(message, tid)


# The messages of which each connection sends some are packed by a template, as pack_message() would pack them.

_IDS = struct.Struct(f"{HEADER.format}II{RTU.PRIVATE_DATA}s")
_IDS_AND_QPN = struct.Struct(f"{HEADER.format}III{DREQ.PRIVATE_DATA}s")
_RTU, _DREQ, _DREP = int(AttributeId.RTU), int(AttributeId.DREQ), int(AttributeId.DREP)


def rtu(connection: CmConnection, private_data: bytes = b"") -> bytes:
    """A MAD with the RTU that confirms the peer's REP."""
    comm_id, remote_comm_id, tid = connection.comm_id, connection.remote_comm_id or 0, connection.transaction_id
    if len(private_data) > RTU.PRIVATE_DATA:
        return pack_message(RTU(comm_id, remote_comm_id, private_data), tid)
    return _IDS.pack(HEADER_START, tid, _RTU, 0, comm_id, remote_comm_id, private_data)


def dreq(connection: CmConnection, transaction_id: int, private_data: bytes = b"") -> bytes:
    """A MAD with a DREQ, which begins a transaction of its own."""
    ids = connection.comm_id, connection.remote_comm_id or 0
    qpn = connection.remote_qpn or 0
    if len(private_data) > DREQ.PRIVATE_DATA:
        return pack_message(DREQ(*ids, qpn, private_data), transaction_id)
    return _IDS_AND_QPN.pack(HEADER_START, transaction_id, _DREQ, 0, *ids, qpn << 8, private_data)


def drep(connection: CmConnection) -> bytes:
    """A MAD with the DREP that answers the peer's DREQ."""
    ids = connection.comm_id, connection.remote_comm_id or 0
    private_data, tid = connection.drep_private_data, connection.dreq_transaction_id
    if len(private_data) > DREP.PRIVATE_DATA:
        return pack_message(DREP(*ids, private_data), tid)
    return _IDS.pack(HEADER_START, tid, _DREP, 0, *ids, private_data)


def apr(connection: CmConnection, status: int, info: bytes = b"") -> bytes:
    """A MAD with the APR that answers the peer's LAP; ``info`` is its additional information."""
    message = APR(connection.comm_id, connection.remote_comm_id or 0, status, len(info), info)
    return pack_message(message, connection.lap_transaction_id)


def apr_refusal(lap: LAP, status: ApStatus, transaction_id: int) -> bytes:
    """A MAD with the APR to a LAP that is not for a connection and its queue pair."""
    return pack_message(APR(lap.remote_comm_id, lap.local_comm_id, status), transaction_id)


def sidr_rep(connection: CmConnection, reply: SIDR_REP) -> bytes:
    """A MAD with a SIDR_REP; request id and service id are filled in."""
    reply.request_id = connection.remote_comm_id or 0
    reply.service_id = connection.request.service_id
    return pack_message(reply, connection.transaction_id)


def peer_qpn(request: REQ | SIDR_REQ, message: REQ | REP) -> int:
    """The sender's queue pair number in a REQ, or in the REP that answers ``request``; ``message`` is either."""
    # The passive side of an XRC connection has its number in the EE context field.
    if isinstance(message, REP) and isinstance(request, REQ):
        if request.transport_service_type == TransportServiceType.EXTENDED:
            return message.local_eecn
    return message.local_qpn
