"""What the engine tells its user. ``comm_id`` is the local communication id, the name of a connection in every call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

from rdmacm.proto.cm.connection import Listener
from rdmacm.proto.cm.messages import REP, REQ, SIDR_REP, SIDR_REQ

__all__ = [
    "ConnectReply",
    "ConnectRequest",
    "DisconnectRequested",
    "Disconnected",
    "Established",
    "Event",
    "Rejected",
    "SidrReply",
    "SidrRequest",
    "TimewaitExit",
    "Unreachable",
]


# As with messages, nobody changes one.


@dataclass(slots=True, unsafe_hash=True)
class ConnectRequest:
    """A REQ came for a listener: ``accept``, ``reject`` or ``destroy`` it."""

    comm_id: int
    listener: Listener
    request: REQ
    path: Hashable


@dataclass(slots=True, unsafe_hash=True)
class ConnectReply:
    """A REP came: make the queue pair ready, then ``send_rtu``, or ``reject``."""

    comm_id: int
    reply: REP


@dataclass(slots=True, unsafe_hash=True)
class Established:
    """The passive side is connected: an RTU came, or data did."""

    comm_id: int


@dataclass(slots=True, unsafe_hash=True)
class Rejected:
    """A REJ came; ``reason`` is a :class:`~rdmacm.proto.cm.messages.RejectReason` or a number it does not know.

    Before a REP was sent or received the connection is gone; otherwise, and for a stale one, TimewaitExit follows.
    """

    comm_id: int
    reason: int
    ari: bytes
    private_data: bytes


@dataclass(slots=True, unsafe_hash=True)
class Unreachable:
    """Nobody answered a REQ, a REP or a SIDR_REQ."""

    comm_id: int


@dataclass(slots=True, unsafe_hash=True)
class DisconnectRequested:
    """A DREQ came: ``disconnect`` or ``destroy`` answers it."""

    comm_id: int


@dataclass(slots=True, unsafe_hash=True)
class Disconnected:
    """What ``disconnect`` asked for is done; ``timed_out`` where the peer never said so."""

    comm_id: int
    timed_out: bool = False


@dataclass(slots=True, unsafe_hash=True)
class TimewaitExit:
    """The connection is forgotten, and its queue pair and PSNs may be used again."""

    comm_id: int
    local_qpn: int


@dataclass(slots=True, unsafe_hash=True)
class SidrRequest:
    """A SIDR_REQ came for a listener: ``sidr_reply`` answers it."""

    comm_id: int
    listener: Listener
    request: SIDR_REQ
    path: Hashable


@dataclass(slots=True, unsafe_hash=True)
class SidrReply:
    """A SIDR_REP came, whatever its status, and that was all."""

    comm_id: int
    reply: SIDR_REP


Event: TypeAlias = (
    ConnectRequest
    | ConnectReply
    | Established
    | Rejected
    | Unreachable
    | DisconnectRequested
    | Disconnected
    | TimewaitExit
    | SidrRequest
    | SidrReply
)
