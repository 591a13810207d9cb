"""The states of a connection in the communication manager, and what each message, call and timer does there.

Everything that decides what follows is in the tables below; the engine looks there and never compares
states to find out. They are the InfiniBand Architecture's (12.9.5 to 12.9.7), in the form Linux gives them.

**Active side.** A REQ is sent again until something answers: REQ_SENT. A REP leads to REP_RCVD, where the user
prepares its queue pair and sends RTU: ESTABLISHED. An MRA buys the peer one longer wait for each copy sent
(MRA_REQ_RCVD). A REJ ends it; reason 10, stale connection, means the peer still holds something of an earlier
connection, so the id and the queue pair wait out TIMEWAIT first. A REP that names a queue pair of the peer's that
another connection here has is itself stale: it is rejected, and the old connection is taken down (STALE). Whoever
gives up says so with REJ reason 4, which spares the peer its retries.

**Passive side.** A REQ makes a connection in REQ_RCVD and asks the user. While the user thinks, a copy of the REQ
is answered with an MRA, but only once the agent has been told to (THINK): that is MRA_REQ_SENT. It is never sent
unasked, as nobody whose first REQ was answered in time needs it. The REP is repeated until an RTU comes, or until
data does, which proves as much (ESTABLISH). A copy of the REQ is not answered then: the REP's own timer does that.
Having sent a REP, this side may be connected in the peer's eyes, so from then on giving up or rejecting passes
through TIMEWAIT; Linux skips it where retries run out.

**Disconnecting.** A DREQ is repeated until a DREP comes, or nothing does: DREQ_SENT, then TIMEWAIT either way. A
DREQ from the peer asks the user (DREQ_RCVD), whose disconnect sends the DREP. Where both ask at once the user has
already agreed, so the DREP goes out without asking again. In TIMEWAIT a DREQ is still answered, for the DREP may
have been lost, and a late copy of the REQ is refused as stale rather than taken for a new one. A DREQ for a
connection nobody knows is answered too: the peer gets what it wants.

**Datagrams.** A SIDR_REQ is repeated until a SIDR_REP comes; the passive side forgets with its answer, and a copy
that comes later asks again.

Destroying is allowed everywhere and says goodbye in the way the state asks for, in DREQ_SENT once more; what remains
(TIMEWAIT) tells the user nothing more.

Reading the tables: a row gives, for an input, the state that follows and what is done on the way. Three things go
without saying. Leaving a state stops its timer. Entering TIMEWAIT starts that timer. Entering IDLE forgets the
connection; IDLE is where nothing is known, so what is in its row for messages is done for those that fit nothing.
None means the message is dropped and counted. A call that is not in a row is refused.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = [
    "ARRIVALS",
    "CALLS",
    "RETRYING",
    "THINKING",
    "TIMES",
    "TRANSITIONS",
    "Do",
    "Input",
    "State",
    "Step",
]


class State(Enum):
    """States of a connection, and of a service id resolution."""

    __hash__ = object.__hash__  # in C; Enum's own is in Python

    IDLE = "IDLE"
    REQ_SENT = "REQ_SENT"
    MRA_REQ_RCVD = "MRA_REQ_RCVD"
    REP_RCVD = "REP_RCVD"
    MRA_REP_SENT = "MRA_REP_SENT"
    REQ_RCVD = "REQ_RCVD"
    MRA_REQ_SENT = "MRA_REQ_SENT"
    REP_SENT = "REP_SENT"
    MRA_REP_RCVD = "MRA_REP_RCVD"
    ESTABLISHED = "ESTABLISHED"
    DREQ_SENT = "DREQ_SENT"
    DREQ_RCVD = "DREQ_RCVD"
    TIMEWAIT = "TIMEWAIT"
    SIDR_REQ_SENT = "SIDR_REQ_SENT"
    SIDR_REQ_RCVD = "SIDR_REQ_RCVD"


class Input(Enum):
    """What moves a connection: calls of the user, messages, time."""

    __hash__ = object.__hash__  # in C; Enum's own is in Python

    CONNECT = "connect"
    ACCEPT = "accept"
    REJECT = "reject"
    SEND_RTU = "send_rtu"
    THINK = "the user needs time"
    ESTABLISH = "establish"
    DISCONNECT = "disconnect"
    RESOLVE = "sidr_request"
    ANSWER = "sidr_reply"
    DESTROY = "destroy"

    REQ = "REQ"
    MRA_REQ = "MRA of a REQ"
    MRA_REP = "MRA of a REP"
    REP = "REP"
    REP_STALE = "REP with a queue pair in use"
    RTU = "RTU"
    REJ = "REJ"
    REJ_STALE = "REJ for a stale connection"
    DREQ = "DREQ"
    DREP = "DREP"
    SIDR_REQ = "SIDR_REQ"
    SIDR_REP = "SIDR_REP"

    RETRY = "no answer in time"
    EXHAUSTED = "no answer at all"
    TIMEWAIT_OVER = "timewait over"
    STALE = "the peer's queue pair is in another connection"


class Do(Enum):
    """What is done on the way."""

    __hash__ = object.__hash__  # in C; Enum's own is in Python

    SEND_REQ = "send REQ until answered"
    SEND_REP = "send REP until answered"
    SEND_RTU = "send RTU"
    SEND_MRA = "send MRA"
    SEND_REJ = "send REJ"
    SEND_REJ_TIMEOUT = "send REJ, timeout"
    SEND_REJ_STALE = "send REJ, stale connection"
    SEND_DREQ = "send DREQ until answered"
    SEND_DREQ_ONCE = "send DREQ"
    SEND_DREP = "send DREP"
    SEND_SIDR_REQ = "send SIDR_REQ until answered"
    SEND_SIDR_REP = "send SIDR_REP"
    SEND_AGAIN = "send the same again"
    EXTEND = "wait longer"
    HUSH = "tell nothing more"
    TELL_REQUEST = "ConnectRequest"
    TELL_REPLY = "ConnectReply"
    TELL_ESTABLISHED = "Established"
    TELL_REJECTED = "Rejected"
    TELL_UNREACHABLE = "Unreachable"
    TELL_DISCONNECT_REQUESTED = "DisconnectRequested"
    TELL_DISCONNECTED = "Disconnected"
    TELL_TIMEWAIT_EXIT = "TimewaitExit"
    TELL_SIDR_REQUEST = "SidrRequest"
    TELL_SIDR_REPLY = "SidrReply"


class Step(NamedTuple):
    """The state that follows, and what is done."""

    state: State
    actions: tuple[Do, ...] = ()


_S, _I = State, Input

CALLS = frozenset(
    (
        _I.CONNECT,
        _I.ACCEPT,
        _I.REJECT,
        _I.SEND_RTU,
        _I.THINK,
        _I.ESTABLISH,
        _I.DISCONNECT,
        _I.RESOLVE,
        _I.ANSWER,
        _I.DESTROY,
    )
)
TIMES = frozenset((_I.RETRY, _I.EXHAUSTED, _I.TIMEWAIT_OVER, _I.STALE))
ARRIVALS = frozenset(Input) - CALLS - TIMES

#: The user has been asked and has not answered: what a listener's backlog counts.
THINKING = frozenset((_S.REQ_RCVD, _S.MRA_REQ_SENT, _S.SIDR_REQ_RCVD))

#: A message is repeated here until it is answered.
RETRYING = frozenset(
    (_S.REQ_SENT, _S.MRA_REQ_RCVD, _S.REP_SENT, _S.MRA_REP_RCVD, _S.DREQ_SENT, _S.SIDR_REQ_SENT),
)


def _drop(*inputs: Input) -> dict[Input, Step | None]:
    return dict.fromkeys(inputs)


_NOT_SIDR = _drop(_I.SIDR_REQ, _I.SIDR_REP)
_ONLY_SIDR = _drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.REJ, _I.REJ_STALE, _I.DREQ, _I.DREP)

_ACTIVE: dict[State, dict[Input, Step | None]] = {
    _S.REQ_SENT: {
        _I.MRA_REQ: Step(_S.MRA_REQ_RCVD, (Do.EXTEND,)),
        _I.REP: Step(_S.REP_RCVD, (Do.TELL_REPLY,)),
        _I.REP_STALE: Step(_S.REQ_SENT, (Do.SEND_REJ_STALE,)),
        _I.REJ: Step(_S.IDLE, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.RETRY: Step(_S.REQ_SENT, (Do.SEND_AGAIN,)),
        _I.EXHAUSTED: Step(_S.IDLE, (Do.SEND_REJ_TIMEOUT, Do.TELL_UNREACHABLE)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_REJ_TIMEOUT,)),
        **_drop(_I.REQ, _I.MRA_REP, _I.RTU, _I.DREQ, _I.DREP),
        **_NOT_SIDR,
    },
    _S.MRA_REQ_RCVD: {
        _I.MRA_REQ: Step(_S.MRA_REQ_RCVD, (Do.EXTEND,)),
        _I.REP: Step(_S.REP_RCVD, (Do.TELL_REPLY,)),
        _I.REP_STALE: Step(_S.MRA_REQ_RCVD, (Do.SEND_REJ_STALE,)),
        _I.REJ: Step(_S.IDLE, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.RETRY: Step(_S.MRA_REQ_RCVD, (Do.SEND_AGAIN,)),
        _I.EXHAUSTED: Step(_S.IDLE, (Do.SEND_REJ_TIMEOUT, Do.TELL_UNREACHABLE)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_REJ_TIMEOUT,)),
        **_drop(_I.REQ, _I.MRA_REP, _I.RTU, _I.DREQ, _I.DREP),
        **_NOT_SIDR,
    },
    _S.REP_RCVD: {
        _I.SEND_RTU: Step(_S.ESTABLISHED, (Do.SEND_RTU,)),
        _I.THINK: Step(_S.MRA_REP_SENT),
        _I.REJECT: Step(_S.IDLE, (Do.SEND_REJ,)),
        _I.REJ: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_REJ,)),
        # A peer made ready by data may disconnect before it sees an RTU; it will ask again.
        **_drop(_I.DREQ),
        **_drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.DREP),
        **_NOT_SIDR,
    },
    _S.MRA_REP_SENT: {
        _I.SEND_RTU: Step(_S.ESTABLISHED, (Do.SEND_RTU,)),
        _I.REJECT: Step(_S.IDLE, (Do.SEND_REJ,)),
        _I.REP: Step(_S.MRA_REP_SENT, (Do.SEND_MRA,)),
        _I.REJ: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_REJ,)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP_STALE, _I.RTU, _I.DREQ, _I.DREP),
        **_NOT_SIDR,
    },
}

_PASSIVE: dict[State, dict[Input, Step | None]] = {
    _S.REQ_RCVD: {
        _I.ACCEPT: Step(_S.REP_SENT, (Do.SEND_REP,)),
        _I.REJECT: Step(_S.IDLE, (Do.SEND_REJ,)),
        _I.THINK: Step(_S.MRA_REQ_SENT),
        _I.REJ: Step(_S.IDLE, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_REJ,)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.DREQ, _I.DREP),
        **_NOT_SIDR,
    },
    _S.MRA_REQ_SENT: {
        _I.ACCEPT: Step(_S.REP_SENT, (Do.SEND_REP,)),
        _I.REJECT: Step(_S.IDLE, (Do.SEND_REJ,)),
        _I.REQ: Step(_S.MRA_REQ_SENT, (Do.SEND_MRA,)),
        _I.REJ: Step(_S.IDLE, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_REJ,)),
        **_drop(_I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.DREQ, _I.DREP),
        **_NOT_SIDR,
    },
    _S.REP_SENT: {
        _I.REJECT: Step(_S.TIMEWAIT, (Do.SEND_REJ,)),
        _I.ESTABLISH: Step(_S.ESTABLISHED, (Do.TELL_ESTABLISHED,)),
        _I.RTU: Step(_S.ESTABLISHED, (Do.TELL_ESTABLISHED,)),
        _I.MRA_REP: Step(_S.MRA_REP_RCVD, (Do.EXTEND,)),
        _I.REJ: Step(_S.IDLE, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DREQ: Step(_S.DREQ_RCVD, (Do.TELL_DISCONNECT_REQUESTED,)),
        _I.RETRY: Step(_S.REP_SENT, (Do.SEND_AGAIN,)),
        _I.EXHAUSTED: Step(_S.TIMEWAIT, (Do.SEND_REJ_TIMEOUT, Do.TELL_UNREACHABLE)),
        _I.DESTROY: Step(_S.TIMEWAIT, (Do.SEND_REJ, Do.HUSH)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.REP, _I.REP_STALE, _I.DREP),
        **_NOT_SIDR,
    },
    _S.MRA_REP_RCVD: {
        _I.REJECT: Step(_S.TIMEWAIT, (Do.SEND_REJ,)),
        _I.ESTABLISH: Step(_S.ESTABLISHED, (Do.TELL_ESTABLISHED,)),
        _I.RTU: Step(_S.ESTABLISHED, (Do.TELL_ESTABLISHED,)),
        _I.MRA_REP: Step(_S.MRA_REP_RCVD, (Do.EXTEND,)),
        _I.REJ: Step(_S.IDLE, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DREQ: Step(_S.DREQ_RCVD, (Do.TELL_DISCONNECT_REQUESTED,)),
        _I.RETRY: Step(_S.MRA_REP_RCVD, (Do.SEND_AGAIN,)),
        _I.EXHAUSTED: Step(_S.TIMEWAIT, (Do.SEND_REJ_TIMEOUT, Do.TELL_UNREACHABLE)),
        _I.DESTROY: Step(_S.TIMEWAIT, (Do.SEND_REJ, Do.HUSH)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.REP, _I.REP_STALE, _I.DREP),
        **_NOT_SIDR,
    },
}

_BOTH: dict[State, dict[Input, Step | None]] = {
    _S.IDLE: {
        _I.CONNECT: Step(_S.REQ_SENT, (Do.SEND_REQ,)),
        _I.RESOLVE: Step(_S.SIDR_REQ_SENT, (Do.SEND_SIDR_REQ,)),
        _I.REQ: Step(_S.REQ_RCVD, (Do.TELL_REQUEST,)),
        _I.SIDR_REQ: Step(_S.SIDR_REQ_RCVD, (Do.TELL_SIDR_REQUEST,)),
        _I.DREQ: Step(_S.IDLE, (Do.SEND_DREP,)),
        **_drop(_I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.REJ, _I.REJ_STALE, _I.DREP, _I.SIDR_REP),
    },
    _S.ESTABLISHED: {
        _I.ESTABLISH: Step(_S.ESTABLISHED),
        _I.DISCONNECT: Step(_S.DREQ_SENT, (Do.SEND_DREQ,)),
        # The peer has not seen the RTU.  Only an active side gets this far with a REP.
        _I.REP: Step(_S.ESTABLISHED, (Do.SEND_RTU,)),
        _I.REJ: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_REJECTED,)),
        _I.DREQ: Step(_S.DREQ_RCVD, (Do.TELL_DISCONNECT_REQUESTED,)),
        _I.STALE: Step(_S.DREQ_SENT, (Do.SEND_DREQ,)),
        _I.DESTROY: Step(_S.TIMEWAIT, (Do.SEND_DREQ_ONCE, Do.HUSH)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP_STALE, _I.RTU, _I.DREP),
        **_NOT_SIDR,
    },
    _S.DREQ_SENT: {
        _I.DISCONNECT: Step(_S.DREQ_SENT),
        _I.REJ: Step(_S.TIMEWAIT, (Do.TELL_DISCONNECTED,)),
        _I.REJ_STALE: Step(_S.TIMEWAIT, (Do.TELL_DISCONNECTED,)),
        _I.DREQ: Step(_S.TIMEWAIT, (Do.SEND_DREP, Do.TELL_DISCONNECTED)),
        _I.DREP: Step(_S.TIMEWAIT, (Do.TELL_DISCONNECTED,)),
        _I.RETRY: Step(_S.DREQ_SENT, (Do.SEND_AGAIN,)),
        _I.EXHAUSTED: Step(_S.TIMEWAIT, (Do.TELL_DISCONNECTED,)),
        # An earlier one may be lost, and from now on none is sent again.
        _I.DESTROY: Step(_S.TIMEWAIT, (Do.SEND_DREQ_ONCE, Do.HUSH)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU),
        **_NOT_SIDR,
    },
    _S.DREQ_RCVD: {
        _I.DISCONNECT: Step(_S.TIMEWAIT, (Do.SEND_DREP,)),
        _I.DESTROY: Step(_S.TIMEWAIT, (Do.SEND_DREP, Do.HUSH)),
        **_drop(_I.REQ, _I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.REJ, _I.REJ_STALE, _I.DREQ, _I.DREP),
        **_NOT_SIDR,
    },
    _S.TIMEWAIT: {
        _I.DISCONNECT: Step(_S.TIMEWAIT),
        _I.REQ: Step(_S.TIMEWAIT, (Do.SEND_REJ_STALE,)),
        _I.DREQ: Step(_S.TIMEWAIT, (Do.SEND_DREP,)),
        _I.TIMEWAIT_OVER: Step(_S.IDLE, (Do.TELL_TIMEWAIT_EXIT,)),
        _I.DESTROY: Step(_S.TIMEWAIT, (Do.HUSH,)),
        **_drop(_I.MRA_REQ, _I.MRA_REP, _I.REP, _I.REP_STALE, _I.RTU, _I.REJ, _I.REJ_STALE, _I.DREP),
        **_NOT_SIDR,
    },
}

_SIDR: dict[State, dict[Input, Step | None]] = {
    _S.SIDR_REQ_SENT: {
        _I.SIDR_REP: Step(_S.IDLE, (Do.TELL_SIDR_REPLY,)),
        _I.RETRY: Step(_S.SIDR_REQ_SENT, (Do.SEND_AGAIN,)),
        _I.EXHAUSTED: Step(_S.IDLE, (Do.TELL_UNREACHABLE,)),
        _I.DESTROY: Step(_S.IDLE),
        **_drop(_I.SIDR_REQ),
        **_ONLY_SIDR,
    },
    _S.SIDR_REQ_RCVD: {
        _I.ANSWER: Step(_S.IDLE, (Do.SEND_SIDR_REP,)),
        _I.DESTROY: Step(_S.IDLE, (Do.SEND_SIDR_REP,)),
        **_drop(_I.SIDR_REQ, _I.SIDR_REP),
        **_ONLY_SIDR,
    },
}

#: state → input → what follows; None, or nothing, where a message is dropped, a call refused.
TRANSITIONS: dict[State, dict[Input, Step | None]] = {**_BOTH, **_ACTIVE, **_PASSIVE, **_SIDR}
