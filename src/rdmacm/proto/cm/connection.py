"""The records of the engine: a connection, a listener, and why a MAD was dropped; and those whom it tells things."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from rdmacm.address import ALL_BITS_64
from rdmacm.proto.cm.fairqueue import FairQueue
from rdmacm.proto.cm.messages import APR, LAP, REJ, REP, REQ, SIDR_REP, SIDR_REQ, Message
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


class NetworkError(NamedTuple):
    """The network's report that it has not delivered a request."""

    #: ECONNREFUSED, EHOSTUNREACH or another errno.
    errno: int
    #: The packed address of the host that reports it; empty for this host.
    reporter: bytes


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


@dataclass(slots=True, eq=False)
class CmConnection:
    """A connection or a service id resolution (SIDR). Read-only outside of the engine, but for its owner."""

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
    #: Who is told what happens to it; None: nobody, as once the user has destroyed it.
    owner: ConnectionOwner | None = None
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
    #: What the engine's user has found out about the request. The engine only keeps it.
    finding: object = None

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


class ConnectionOwner(Protocol):
    """Is told what happens to a connection, at once: it may call the agent again.

    The second argument is the message or report that is the cause, and None for a timer or a call.
    """

    def replied(self, connection: CmConnection, rep: REP, /) -> None:
        """A REP arrived. Answered by ``send_rtu`` once the queue pair is in RTS, or by ``reject``."""

    def established(self, connection: CmConnection, _: Message | None, /) -> None:
        """The passive side is connected: an RTU or data has arrived."""

    def rejected(self, connection: CmConnection, rej: REJ, /) -> None:
        """A REJ arrived. Its reason is a :class:`~rdmacm.proto.cm.codes.RejectReason`, or not defined there.

        If no REP was sent or received, the connection is gone; otherwise, and for a stale one, it is in TIMEWAIT.
        """

    def unreachable(self, connection: CmConnection, error: NetworkError | None, /) -> None:
        """A REQ, REP or SIDR_REQ was not answered, and its retries are exhausted; or the network reports ``error``."""

    def disconnect_requested(self, connection: CmConnection, _: Message, /) -> None:
        """A DREQ arrived. Answered by ``disconnect`` or ``destroy``."""

    def disconnected(self, connection: CmConnection, answer: Message | None, /) -> None:
        """The ``disconnect`` is complete; without ``answer``, the peer did not answer the DREQ."""

    def path_offered(self, connection: CmConnection, lap: LAP, /) -> None:
        """A LAP arrived: the peer offers another alternate path. Answered by ``answer_path``."""

    def path_answered(self, connection: CmConnection, apr: APR | None, /) -> None:
        """The APR to the LAP of ``load_path`` arrived; None if the peer did not answer."""

    def timewait_over(self, connection: CmConnection, _: None, /) -> None:
        """The connection is gone, and its queue pair number and PSNs may be used again."""

    def sidr_replied(self, connection: CmConnection, rep: SIDR_REP, /) -> None:
        """A SIDR_REP arrived, with any status; the request is complete."""

    def failed(self, connection: CmConnection, was_established: bool, /) -> None:
        """An exception that is a fault of this package has ended the connection. The agent's user tells this."""


class AgentUser(Protocol):
    """Drives an agent: sends its MADs and calls its timer. What it is told is told at once, as to an owner."""

    #: Counts the messages that were sent again because no answer came.
    retries: int

    def send(self, path: Hashable, mad: bytes, /) -> None:
        """Send a MAD along a path."""

    def wake_at(self, when: float, /) -> None:
        """Call ``timer`` at a time, or before. A time that was asked for earlier counts too."""

    def hold_qpn(self, qpn: int, until: float, /) -> None:
        """A connection is in TIMEWAIT until then: give the number of its queue pair to no other."""

    def requested(self, connection: CmConnection, request: REQ | SIDR_REQ, /) -> None:
        """A request arrived for a listener. Answered by ``accept``, ``sidr_reply``, ``reject`` or ``destroy``."""

    def peer_questioned(self, connection: CmConnection, _: Message | None, /) -> None:
        """A message says that the peer of an established connection has restarted. Answered by ``peer_activity``."""

    def peer_answered(self) -> None:
        """A peer has answered a REP for the first time. Not with ``trusts_sources``."""

    def raised(self, connection: CmConnection, error: Exception, /) -> None:
        """Somebody who was told of something has raised an exception."""
