"""What the engine emits about a connection: the messages to the peer and the events for the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdmacm.proto.cm.codes import ApStatus, MessageKind, RejectReason, TransportServiceType
from rdmacm.proto.cm.connection import CmConnection
from rdmacm.proto.cm.events import (
    ConnectReply,
    ConnectRequest,
    Disconnected,
    DisconnectRequested,
    Established,
    Event,
    PathAnswered,
    PathOffered,
    PeerQuestion,
    Rejected,
    SidrReply,
    SidrRequest,
    TimewaitExit,
    Unreachable,
)
from rdmacm.proto.cm.messages import APR, DREP, DREQ, LAP, MRA, REJ, REP, REQ, SIDR_REP, SIDR_REQ, pack_message
from rdmacm.proto.cm.states import Action, CmState, CmTrigger

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


def dreq(connection: CmConnection, transaction_id: int, private_data: bytes = b"") -> bytes:
    """A MAD with a DREQ, which begins a transaction of its own."""
    message = DREQ(connection.comm_id, connection.remote_comm_id or 0, connection.remote_qpn or 0, private_data)
    return pack_message(message, transaction_id)


def drep(connection: CmConnection) -> bytes:
    """A MAD with the DREP that answers the peer's DREQ."""
    message = DREP(connection.comm_id, connection.remote_comm_id or 0, connection.drep_private_data)
    return pack_message(message, connection.dreq_transaction_id)


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


def _requested(connection: CmConnection, _: CmTrigger, message: Any) -> Event:
    listener = connection.listener
    assert listener is not None
    kind = ConnectRequest if isinstance(message, REQ) else SidrRequest
    event = connection.request_event = kind(connection.comm_id, listener, message, connection.path)
    return event


def _rejected(connection: CmConnection, _: CmTrigger, message: Any) -> Event:
    ari = message.ari[: message.reject_info_length]
    return Rejected(connection.comm_id, message.reason, ari, message.private_data)


#: The event for an action that reports one, from the connection, the trigger, and the message or error that caused it.
REPORTS: dict[Action, Callable[[CmConnection, CmTrigger, Any], Event]] = {
    Action.REPORT_REQUEST: _requested,
    Action.REPORT_SIDR_REQUEST: _requested,
    Action.REPORT_REPLY: lambda c, _, rep: ConnectReply(c.comm_id, rep),
    Action.REPORT_SIDR_REPLY: lambda c, _, rep: SidrReply(c.comm_id, rep),
    Action.REPORT_REJECTED: _rejected,
    Action.REPORT_ESTABLISHED: lambda c, *_: Established(c.comm_id),
    Action.REPORT_UNREACHABLE: lambda c, _, error: Unreachable(c.comm_id, error),
    Action.REPORT_PEER_QUESTION: lambda c, *_: PeerQuestion(c.comm_id),
    Action.REPORT_DISCONNECT_REQUESTED: lambda c, *_: DisconnectRequested(c.comm_id),
    Action.REPORT_DISCONNECTED: lambda c, what, _: Disconnected(c.comm_id, what is CmTrigger.EXHAUSTED),
    Action.REPORT_PATH_OFFERED: lambda c, _, lap: PathOffered(c.comm_id, lap),
    Action.REPORT_PATH_ANSWERED: lambda c, _, apr: PathAnswered(c.comm_id, apr),
    Action.REPORT_TIMEWAIT_EXIT: lambda c, *_: TimewaitExit(c.comm_id, c.local_qpn),
}
