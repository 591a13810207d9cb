"""The records of the engine: a connection, a listener, and why a MAD was dropped."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from rdmacm.address import ALL_BITS_64
from rdmacm.proto.cm.fairqueue import FairQueue
from rdmacm.proto.cm.messages import LAP, REP, REQ, SIDR_REQ
from rdmacm.proto.cm.states import CmState

#: How many bytes an address may get for each byte that it has sent, before it has answered (RFC 9000, 8.1). All MADs
#: have one size, so it is also the number of MADs.
AMPLIFICATION = 3

#: accepts(request, path): whether a listener takes a request that arrived on a path.
Accepts: TypeAlias = Callable[[REQ | SIDR_REQ, Hashable], bool]


class DropReason(Enum):
    """Why a MAD had no effect, or no other effect than a rejection; or why a report of the network had none."""

    MALFORMED = "not a valid CM message"
    UNSUPPORTED = "a message this agent does not support"
    UNKNOWN = "no such connection"
    WRONG_PATH = "not from the peer of the connection"
    WRONG_REPORT = "a report of the network about another request"
    WRONG_QPN = "a DREQ or LAP for another queue pair"
    UNEXPECTED = "not expected in this state: duplicate, late or wrong"
    NO_LISTENER = "no listener for the service id"
    NO_MATCH = "no listener for the service id takes this request"
    TRANSPORT = "the listener has queue pairs of another transport service"
    STALE = "the peer's queue pair is used by another connection"
    BACKLOG = "the listener's backlog is full"
    UNANSWERED = "not sent: the peer has not answered, and would get more than three times what it has sent"
    FULL = "too many connections"


@dataclass(slots=True, eq=False)
class CmListener:
    """A listener for the service ids that are equal to ``service_id`` in the bits of ``mask``.

    ``accepts`` selects the requests that are for this listener; None for all. ``transport`` is the transport service of
    its queue pairs (:attr:`~rdmacm.proto.cm.messages.REQ.transport`); None for any. At most ``backlog`` requests wait
    for the user.
    """

    service_id: int
    mask: int = ALL_BITS_64
    backlog: int = 128
    accepts: Accepts | None = None
    transport: tuple[int, int] | None = None
    #: The communication ids of the requests that wait for the user.
    requests: FairQueue[int] = field(default_factory=FairQueue)
    #: How many of them the engine's user has told its own user about. The engine only keeps this number.
    posted: int = 0

    @property
    def pending(self) -> int:
        """How many requests wait for the user."""
        return len(self.requests)


@dataclass(slots=True)
class CmConnection:
    """A connection or a service id resolution (SIDR). Read-only outside of the engine."""

    #: Local communication id; for SIDR, the request id of a SIDR_REQ sent, or a number of our own for one received.
    comm_id: int
    #: The path of its first message, as the engine's user names it.
    path: Hashable
    #: Whether this side has sent the request.
    is_active: bool
    #: The REQ or SIDR_REQ, sent or received.
    request: REQ | SIDR_REQ
    #: That of the request, which its answers repeat.
    transaction_id: int
    state: CmState = CmState.IDLE
    #: The PSN the peer starts with: the receive PSN of the local queue pair.
    starting_psn: int = 0
    #: CA GUID and queue pair number in the REQ or REP of this side.
    local_guid: int = 0
    local_qpn: int = 0
    #: The REP, sent or received.
    reply: REP | None = None
    #: The listener whose backlog this connection counts in; None once the user has the request.
    listener: CmListener | None = None
    #: The ConnectRequest or SidrRequest, until the user takes it.
    request_event: Any = None

    #: The peer's; None until a message has brought them.
    remote_comm_id: int | None = None
    remote_guid: int | None = None
    remote_qpn: int | None = None

    #: Packet life time of the path, an exponent of 4.096 µs.
    packet_life_time: int = 0
    #: Local ACK timeout of the path, an exponent of 4.096 µs: how long TIMEWAIT lasts.
    av_timeout: int = 0
    #: Seconds from one copy of a message to the next.
    retry_interval: float = 0.0
    #: How often a message is repeated, and how often the current one may still be.
    retries: int = 0
    retries_left: int = 0
    #: When the timer is due, in seconds on the engine's clock; None while it is stopped.
    deadline: float | None = None
    #: The MAD that is repeated until it is answered.
    unanswered_mad: bytes = b""
    #: Whether an MRA has extended the wait after the last copy. One may; otherwise a peer could prolong it without end.
    was_extended: bool = False
    #: Whether an MRA has answered the REQ: the peer's user takes long, or does not answer at all.
    is_put_off: bool = False
    #: How many MADs may be sent to a peer that has not answered yet; None once it has, and for an active side.
    allowance: int | None = None
    #: The user has destroyed the connection and gets no more events.
    is_muted: bool = False

    #: The path that messages take after a migration; None while they take the first one.
    migrated: Hashable = None
    #: The path that the queue pair may change to; None if there is none.
    alternate: Hashable = None
    #: The LAP sent last or received last, its transaction id, and the APR that has answered the one received.
    lap: LAP | None = None
    lap_transaction_id: int = 0
    apr_mad: bytes = b""

    #: The RTU, to send again when the REP arrives again.
    rtu_mad: bytes = b""
    #: For the DREP: the transaction id of the peer's DREQ, and the user's private data.
    dreq_transaction_id: int = 0
    drep_private_data: bytes = b""

    @property
    def current_path(self) -> Hashable:
        """The path that messages to the peer take."""
        return self.path if self.migrated is None else self.migrated

    def is_from_peer(self, path: Hashable) -> bool:
        """Whether messages of the peer arrive on a path. It may be the first to change to the alternate one."""
        return path == self.path or (path is not None and path in (self.migrated, self.alternate))
