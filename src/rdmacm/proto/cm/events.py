"""Events of the engine. ``comm_id`` is the local communication id, which names a connection in every call."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from rdmacm.proto.cm.connection import CmListener
from rdmacm.proto.cm.messages import APR, LAP, REP, REQ, SIDR_REP, SIDR_REQ


class NetworkError(NamedTuple):
    """The network's report that it has not delivered a request."""

    #: ECONNREFUSED, EHOSTUNREACH or another errno.
    errno: int
    #: The packed address of the host that reports it; empty for this host.
    reporter: bytes


# Not frozen, for the reason given for messages.


@dataclass(slots=True, unsafe_hash=True)
class ConnectRequest:
    """A REQ arrived for a listener. Answered by ``accept``, ``reject`` or ``destroy``."""

    comm_id: int
    listener: CmListener
    request: REQ
    path: Hashable
    #: What the engine's user has found out about the request; the engine only keeps it, for ``next_request``.
    finding: object = field(default=None, compare=False, repr=False)


@dataclass(slots=True, unsafe_hash=True)
class ConnectReply:
    """A REP arrived. Answered by ``send_rtu`` once the queue pair is in RTS, or by ``reject``."""

    comm_id: int
    reply: REP


@dataclass(slots=True, unsafe_hash=True)
class Established:
    """The passive side is connected: an RTU or data has arrived."""

    comm_id: int


@dataclass(slots=True, unsafe_hash=True)
class Rejected:
    """A REJ arrived. ``reason`` is a :class:`~rdmacm.proto.cm.codes.RejectReason` or a number not defined there.

    If no REP was sent or received, the connection is gone; otherwise, and for a stale one, TimewaitExit follows.
    """

    comm_id: int
    reason: int
    ari: bytes
    private_data: bytes


@dataclass(slots=True, unsafe_hash=True)
class Unreachable:
    """A REQ, REP or SIDR_REQ was not answered, and its retries are exhausted; or the network reports ``error``."""

    comm_id: int
    error: NetworkError | None = None


@dataclass(slots=True, unsafe_hash=True)
class PeerQuestion:
    """A message says that the peer of an established connection has restarted. Answered by ``peer_activity``."""

    comm_id: int


@dataclass(slots=True, unsafe_hash=True)
class DisconnectRequested:
    """A DREQ arrived. Answered by ``disconnect`` or ``destroy``."""

    comm_id: int


@dataclass(slots=True, unsafe_hash=True)
class Disconnected:
    """The ``disconnect`` is complete; ``timed_out`` if the peer did not answer the DREQ."""

    comm_id: int
    timed_out: bool = False


@dataclass(slots=True, unsafe_hash=True)
class PathOffered:
    """A LAP arrived: the peer offers another alternate path. Answered by ``answer_path``."""

    comm_id: int
    lap: LAP


@dataclass(slots=True, unsafe_hash=True)
class PathAnswered:
    """The APR to the LAP of ``load_path`` arrived; None if the peer did not answer."""

    comm_id: int
    apr: APR | None


@dataclass(slots=True, unsafe_hash=True)
class Failed:
    """An exception that is a fault of this package has ended the connection, which was established or not.

    The agent does not report this event; the connection manager that has caught the exception does.
    """

    comm_id: int
    was_established: bool


@dataclass(slots=True, unsafe_hash=True)
class TimewaitExit:
    """TIMEWAIT is over: the connection is gone, and its queue pair number and PSNs may be used again."""

    comm_id: int
    local_qpn: int


@dataclass(slots=True, unsafe_hash=True)
class SidrRequest:
    """A SIDR_REQ arrived for a listener. Answered by ``sidr_reply`` or ``destroy``."""

    comm_id: int
    listener: CmListener
    request: SIDR_REQ
    path: Hashable
    #: What the engine's user has found out about the request; the engine only keeps it, for ``next_request``.
    finding: object = field(default=None, compare=False, repr=False)


@dataclass(slots=True, unsafe_hash=True)
class SidrReply:
    """A SIDR_REP arrived, with any status; the request is complete."""

    comm_id: int
    reply: SIDR_REP


Event: TypeAlias = (
    ConnectRequest
    | ConnectReply
    | Established
    | Rejected
    | Unreachable
    | PeerQuestion
    | DisconnectRequested
    | Disconnected
    | PathOffered
    | PathAnswered
    | Failed
    | TimewaitExit
    | SidrRequest
    | SidrReply
)
