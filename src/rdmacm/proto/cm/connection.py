"""What the engine remembers: a connection, a listener, and why it dropped something."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rdmacm.address import ALL_BITS_64
from rdmacm.proto.cm.messages import REP, REQ, SIDR_REQ
from rdmacm.proto.cm.states import State

__all__ = ["Accepts", "Connection", "Drop", "Listener"]


#: Whether a listener takes a request that came over a path.
Accepts: TypeAlias = Callable[[REQ | SIDR_REQ, Hashable], bool]


class Drop(Enum):
    """Why a MAD had no effect, or none but a refusal."""

    MALFORMED = "no message of communication management"
    UNSUPPORTED = "a message this agent does not serve"
    UNKNOWN = "no such connection"
    WRONG_PATH = "of another peer than the connection's"
    WRONG_QPN = "a DREQ for another queue pair"
    UNEXPECTED = "not in this state: a duplicate, or late, or wrong"
    NO_LISTENER = "nobody listens for the service id"
    NO_MATCH = "who listens for the service id does not take it"
    STALE = "the peer's queue pair is in another connection"
    BACKLOG = "too many requests wait for the listener"
    FULL = "too many connections"


@dataclass(slots=True, eq=False)
class Listener:
    """Who takes requests for a service id; ``pending`` of at most ``backlog`` wait for the user.

    ``accepts`` says which of them are for this listener; None for all.
    """

    service_id: int
    mask: int = ALL_BITS_64
    backlog: int = 128
    pending: int = 0
    accepts: Accepts | None = None


@dataclass(slots=True)
class Connection:
    """A connection or a service id resolution. For reading only, outside of the engine.

    ``starting_psn`` is what the peer is to send first, so the local queue pair's receive PSN. ``request`` is the
    one sent or received, ``reply`` too; ``remote_*`` are None until the peer has told.
    """

    comm_id: int
    path: Hashable
    is_active: bool
    request: REQ | SIDR_REQ
    transaction_id: int
    state: State = State.IDLE
    starting_psn: int = 0
    local_guid: int = 0
    local_qpn: int = 0
    reply: REP | None = None
    listener: Listener | None = None

    remote_comm_id: int | None = None
    remote_guid: int | None = None
    remote_qpn: int | None = None

    packet_life_time: int = 0
    av_timeout: int = 0
    interval: float = 0.0
    retries: int = 0
    retries_left: int = 0
    deadline: float | None = None
    #: Repeated until answered.
    pending: bytes = b""
    #: One MRA counts for each copy sent, or a peer could keep this side waiting for ever.
    was_extended: bool = False
    is_hushed: bool = False

    rtu: bytes = b""
    dreq_transaction_id: int = 0
    drep_private_data: bytes = b""
