"""The states of a connection in the communication manager, and the effect of each message, call and timer.

The tables below decide what each trigger does in each state. They are the InfiniBand Architecture's (12.9.5 to 12.9.7),
as Linux implements them.

**Active side.** The REQ is repeated until a message answers it: REQ_SENT. A REP leads to REP_RCVD, where the user
prepares its queue pair and sends the RTU: ESTABLISHED. An MRA gives the peer one longer wait for each copy sent
(MRA_REQ_RCVD). A REJ ends the connection. REJ reason 10, stale connection, means that the peer still holds state of an
earlier connection, so the id and the queue pair first pass through TIMEWAIT. A REP is itself stale if it names a peer
queue pair that another connection here already uses.
The side that gives up sends a REJ with reason 4, timeout, so that the peer need not run out of retries too.

**Passive side.** A REQ creates a connection in REQ_RCVD and is reported to the user. Until the user answers, a copy of
the REQ is answered with an MRA, but only after ALLOW_MRA (MRA_REQ_SENT). The first REQ is never answered with an MRA,
because a peer whose first REQ is answered in time does not need one. The REP is repeated until an RTU arrives, or until
data arrives, which proves the same (ESTABLISH). A copy of the REQ is then ignored, since the REP is repeated by its own
timer. After a REP the peer may already be connected, so giving up or rejecting passes through TIMEWAIT; Linux skips
TIMEWAIT when the retries run out.

**Disconnecting.** The DREQ is repeated until a DREP arrives or the retries run out: DREQ_SENT, then TIMEWAIT in both
cases. A DREQ from the peer is reported to the user (DREQ_RCVD), whose disconnect sends the DREP. If both sides send a
DREQ at once, the user has already agreed, so the DREP is sent without asking again. In TIMEWAIT a DREQ is still
answered, because the DREP may have been lost, and a late copy of the REQ is rejected as stale and not taken for a new
one. A REQ with the same communication id and another transaction id is a new one: the peer has chosen the id again,
perhaps after a restart. Linux rejects that too. A DREQ for an unknown connection is answered, so that the peer can end
its side.

**Stale connections.** A REQ or REP that names a peer queue pair which another connection uses (STALE) means that one of
the two is not real: the peer has restarted, or somebody has forged the message. If the older connection is established,
its peer is asked over its queue pair (PeerQuestion), which only a live peer answers, and the message is dropped.
If the peer answers, the message is rejected with reason 10. If it does not, the older connection ends, and the next
copy of the message is taken. In any other state the message is rejected at once, and the older connection stays. Linux
rejects the message and ends an established connection without asking, so one forged REQ ends it.

**Alternate paths.** A connection on InfiniBand may have a second path, which its queue pairs use when the first one
fails. The REQ may bring it; the active side loads another with a LAP, which is repeated until the APR answers it
(LAP_SENT, MRA_LAP_RCVD). On the passive side the LAP is reported to the user (LAP_RCVD), whose answer sends the APR.
Until the user answers, a copy of the LAP is answered with an MRA, after ALLOW_MRA (MRA_LAP_SENT). A copy of a LAP that
is answered already (LAP_COPY) gets the same APR again, because the first one may have been lost. All four states are
states of an established connection: it carries data, and ends like any other, with or without an APR. A LAP that is not
answered leaves the connection as it was. MIGRATE says that the queue pair has changed to the other path, and messages
follow it. It has to wait for the APR. Linux no longer sends LAPs, and reports those it gets to nobody.

**Datagrams.** A SIDR_REQ is repeated until a SIDR_REP arrives. The passive side forgets the request once it has
answered; a later copy is reported as a new request.

**Errors of the network.** The network may report that a REQ or SIDR_REQ was not delivered: the port is closed, or the
host cannot be reached. That ends the connection at once, if nothing has answered the request yet. In every other state
the report has no effect, because the peer is there. Linux ignores such reports and repeats the request.

**Destroying** is allowed in every state and sends the message that ends the connection in that state; in DREQ_SENT it
sends one more DREQ. The TIMEWAIT that remains reports no more events.

Reading the tables: a row gives, for a trigger, the next state and the actions on the way. Three rules hold everywhere
and are not repeated. Leaving a state stops its timer. Entering TIMEWAIT starts the TIMEWAIT timer. Entering IDLE
forgets the connection. IDLE is the state of unknown connections, so its row for messages applies to messages that match
no connection. None means that the message is dropped and counted. A call that is missing from a row is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import ClassVar, NamedTuple


class CmState(Enum):
    """States of a connection, and of a service id resolution (SIDR)."""

    __hash__: ClassVar[Callable[[object], int]] = object.__hash__  # Enum's own is written in Python and slower

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
    LAP_SENT = "LAP_SENT"
    MRA_LAP_RCVD = "MRA_LAP_RCVD"
    LAP_RCVD = "LAP_RCVD"
    MRA_LAP_SENT = "MRA_LAP_SENT"
    DREQ_SENT = "DREQ_SENT"
    DREQ_RCVD = "DREQ_RCVD"
    TIMEWAIT = "TIMEWAIT"
    SIDR_REQ_SENT = "SIDR_REQ_SENT"
    SIDR_REQ_RCVD = "SIDR_REQ_RCVD"


class CmTrigger(Enum):
    """What moves a connection: calls of the user, messages, timers."""

    __hash__: ClassVar[Callable[[object], int]] = object.__hash__  # Enum's own is written in Python and slower

    CONNECT = "connect"
    ACCEPT = "accept"
    REJECT = "reject"
    SEND_RTU = "send_rtu"
    ALLOW_MRA = "MRA allowed"
    ESTABLISH = "establish"
    DISCONNECT = "disconnect"
    RESOLVE = "sidr_request"
    ANSWER = "sidr_reply"
    LOAD_PATH = "load_path"
    ANSWER_PATH = "answer_path"
    MIGRATE = "migrate"
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
    LAP = "LAP"
    LAP_COPY = "LAP that is answered"
    MRA_LAP = "MRA of a LAP"
    APR = "APR"
    SIDR_REQ = "SIDR_REQ"
    SIDR_REP = "SIDR_REP"

    RETRY = "response timeout"
    EXHAUSTED = "retries exhausted"
    NETWORK_ERROR = "request not delivered"
    TIMEWAIT_OVER = "TIMEWAIT over"
    STALE = "the peer's queue pair is named by another REQ or REP"
    PEER_ANSWERED = "the peer answers over the queue pair"


class Action(Enum):
    """What the engine does on a transition."""

    __hash__: ClassVar[Callable[[object], int]] = object.__hash__  # Enum's own is written in Python and slower

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
    SEND_LAP = "send LAP until answered"
    SEND_APR = "send APR"
    CHANGE_PATH = "use the other path"
    SEND_SIDR_REQ = "send SIDR_REQ until answered"
    SEND_SIDR_REP = "send SIDR_REP"
    RESEND = "repeat the last message"
    AWAIT_ANSWER = "wait for the peer's answer"
    AWAIT_ANSWER_AGAIN = "wait once more for the peer's answer"
    STOP_WAITING = "wait no more"
    RELEASE_QPN = "let the peer use its queue pair again"
    EXTEND_WAIT = "wait longer for the answer"
    REPORT_REQUEST = "ConnectRequest"
    REPORT_REPLY = "ConnectReply"
    REPORT_PEER_QUESTION = "PeerQuestion"
    REPORT_ESTABLISHED = "Established"
    REPORT_REJECTED = "Rejected"
    REPORT_UNREACHABLE = "Unreachable"
    REPORT_DISCONNECT_REQUESTED = "DisconnectRequested"
    REPORT_DISCONNECTED = "Disconnected"
    REPORT_TIMEWAIT_EXIT = "TimewaitExit"
    REPORT_PATH_OFFERED = "PathOffered"
    REPORT_PATH_ANSWERED = "PathAnswered"
    REPORT_SIDR_REQUEST = "SidrRequest"
    REPORT_SIDR_REPLY = "SidrReply"


class Transition(NamedTuple):
    """The next state, and what is done on the way."""

    state: CmState
    actions: tuple[Action, ...] = ()


_S, _T = CmState, CmTrigger

#: Triggers by where they come from: calls of the user, received messages, and the engine itself or the network below.
CALLS = frozenset(
    (
        _T.CONNECT,
        _T.ACCEPT,
        _T.REJECT,
        _T.SEND_RTU,
        _T.ALLOW_MRA,
        _T.ESTABLISH,
        _T.DISCONNECT,
        _T.RESOLVE,
        _T.ANSWER,
        _T.LOAD_PATH,
        _T.ANSWER_PATH,
        _T.MIGRATE,
        _T.DESTROY,
    )
)
INTERNAL = frozenset((_T.RETRY, _T.EXHAUSTED, _T.NETWORK_ERROR, _T.TIMEWAIT_OVER, _T.STALE, _T.PEER_ANSWERED))
MESSAGES = frozenset(CmTrigger) - CALLS - INTERNAL

#: States in which the user has not answered a request yet. A listener's backlog counts them.
AWAITING_USER = frozenset((_S.REQ_RCVD, _S.MRA_REQ_SENT, _S.SIDR_REQ_RCVD))

#: States of an established connection.
CONNECTED = frozenset((_S.ESTABLISHED, _S.LAP_SENT, _S.MRA_LAP_RCVD, _S.LAP_RCVD, _S.MRA_LAP_SENT))

#: States in which a message is repeated until it is answered.
RETRYING = frozenset(
    (
        _S.REQ_SENT,
        _S.MRA_REQ_RCVD,
        _S.REP_SENT,
        _S.MRA_REP_RCVD,
        _S.LAP_SENT,
        _S.MRA_LAP_RCVD,
        _S.DREQ_SENT,
        _S.SIDR_REQ_SENT,
    ),
)


def _drop(*triggers: CmTrigger) -> dict[CmTrigger, Transition | None]:
    return dict.fromkeys(triggers)


_NOT_SIDR = _drop(_T.SIDR_REQ, _T.SIDR_REP)
_NO_PATHS = _drop(_T.LAP, _T.LAP_COPY, _T.MRA_LAP, _T.APR)
_ONLY_SIDR = {
    **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU, _T.REJ, _T.REJ_STALE, _T.DREQ, _T.DREP),
    **_NO_PATHS,
}

_ACTIVE: dict[CmState, dict[CmTrigger, Transition | None]] = {
    _S.REQ_SENT: {
        _T.MRA_REQ: Transition(_S.MRA_REQ_RCVD, (Action.EXTEND_WAIT,)),
        _T.REP: Transition(_S.REP_RCVD, (Action.REPORT_REPLY,)),
        _T.REP_STALE: Transition(_S.REQ_SENT, (Action.SEND_REJ_STALE,)),
        _T.REJ: Transition(_S.IDLE, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.RETRY: Transition(_S.REQ_SENT, (Action.RESEND,)),
        _T.EXHAUSTED: Transition(_S.IDLE, (Action.SEND_REJ_TIMEOUT, Action.REPORT_UNREACHABLE)),
        _T.NETWORK_ERROR: Transition(_S.IDLE, (Action.REPORT_UNREACHABLE,)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_REJ_TIMEOUT,)),
        **_drop(_T.REQ, _T.MRA_REP, _T.RTU, _T.DREQ, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.MRA_REQ_RCVD: {
        _T.MRA_REQ: Transition(_S.MRA_REQ_RCVD, (Action.EXTEND_WAIT,)),
        _T.REP: Transition(_S.REP_RCVD, (Action.REPORT_REPLY,)),
        _T.REP_STALE: Transition(_S.MRA_REQ_RCVD, (Action.SEND_REJ_STALE,)),
        _T.REJ: Transition(_S.IDLE, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.RETRY: Transition(_S.MRA_REQ_RCVD, (Action.RESEND,)),
        _T.EXHAUSTED: Transition(_S.IDLE, (Action.SEND_REJ_TIMEOUT, Action.REPORT_UNREACHABLE)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_REJ_TIMEOUT,)),
        **_drop(_T.REQ, _T.MRA_REP, _T.RTU, _T.DREQ, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.REP_RCVD: {
        _T.SEND_RTU: Transition(_S.ESTABLISHED, (Action.SEND_RTU,)),
        _T.ALLOW_MRA: Transition(_S.MRA_REP_SENT),
        _T.REJECT: Transition(_S.IDLE, (Action.SEND_REJ,)),
        _T.REJ: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_REJ,)),
        # A peer that data has established may disconnect before it receives the RTU. It repeats the DREQ.
        **_drop(_T.DREQ),
        **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.MRA_REP_SENT: {
        _T.SEND_RTU: Transition(_S.ESTABLISHED, (Action.SEND_RTU,)),
        _T.REJECT: Transition(_S.IDLE, (Action.SEND_REJ,)),
        _T.REP: Transition(_S.MRA_REP_SENT, (Action.SEND_MRA,)),
        _T.REJ: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_REJ,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP_STALE, _T.RTU, _T.DREQ, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
}

_PASSIVE: dict[CmState, dict[CmTrigger, Transition | None]] = {
    _S.REQ_RCVD: {
        _T.ACCEPT: Transition(_S.REP_SENT, (Action.SEND_REP,)),
        _T.REJECT: Transition(_S.IDLE, (Action.SEND_REJ,)),
        _T.ALLOW_MRA: Transition(_S.MRA_REQ_SENT),
        _T.REJ: Transition(_S.IDLE, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_REJ,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU, _T.DREQ, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.MRA_REQ_SENT: {
        _T.ACCEPT: Transition(_S.REP_SENT, (Action.SEND_REP,)),
        _T.REJECT: Transition(_S.IDLE, (Action.SEND_REJ,)),
        _T.REQ: Transition(_S.MRA_REQ_SENT, (Action.SEND_MRA,)),
        _T.REJ: Transition(_S.IDLE, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_REJ,)),
        **_drop(_T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU, _T.DREQ, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.REP_SENT: {
        _T.REJECT: Transition(_S.TIMEWAIT, (Action.SEND_REJ,)),
        _T.ESTABLISH: Transition(_S.ESTABLISHED, (Action.REPORT_ESTABLISHED,)),
        _T.RTU: Transition(_S.ESTABLISHED, (Action.REPORT_ESTABLISHED,)),
        _T.MRA_REP: Transition(_S.MRA_REP_RCVD, (Action.EXTEND_WAIT,)),
        _T.REJ: Transition(_S.IDLE, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DREQ: Transition(_S.DREQ_RCVD, (Action.REPORT_DISCONNECT_REQUESTED,)),
        _T.RETRY: Transition(_S.REP_SENT, (Action.RESEND,)),
        _T.EXHAUSTED: Transition(_S.TIMEWAIT, (Action.SEND_REJ_TIMEOUT, Action.REPORT_UNREACHABLE)),
        _T.DESTROY: Transition(_S.TIMEWAIT, (Action.SEND_REJ,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.REP, _T.REP_STALE, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.MRA_REP_RCVD: {
        _T.REJECT: Transition(_S.TIMEWAIT, (Action.SEND_REJ,)),
        _T.ESTABLISH: Transition(_S.ESTABLISHED, (Action.REPORT_ESTABLISHED,)),
        _T.RTU: Transition(_S.ESTABLISHED, (Action.REPORT_ESTABLISHED,)),
        _T.MRA_REP: Transition(_S.MRA_REP_RCVD, (Action.EXTEND_WAIT,)),
        _T.REJ: Transition(_S.IDLE, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DREQ: Transition(_S.DREQ_RCVD, (Action.REPORT_DISCONNECT_REQUESTED,)),
        _T.RETRY: Transition(_S.MRA_REP_RCVD, (Action.RESEND,)),
        _T.EXHAUSTED: Transition(_S.TIMEWAIT, (Action.SEND_REJ_TIMEOUT, Action.REPORT_UNREACHABLE)),
        _T.DESTROY: Transition(_S.TIMEWAIT, (Action.SEND_REJ,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.REP, _T.REP_STALE, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
}

_BOTH: dict[CmState, dict[CmTrigger, Transition | None]] = {
    _S.IDLE: {
        _T.CONNECT: Transition(_S.REQ_SENT, (Action.SEND_REQ,)),
        _T.RESOLVE: Transition(_S.SIDR_REQ_SENT, (Action.SEND_SIDR_REQ,)),
        _T.REQ: Transition(_S.REQ_RCVD, (Action.REPORT_REQUEST,)),
        _T.SIDR_REQ: Transition(_S.SIDR_REQ_RCVD, (Action.REPORT_SIDR_REQUEST,)),
        # The REP is for a request that was given up, and whose REJ was lost.
        _T.REP: Transition(_S.IDLE, (Action.SEND_REJ,)),
        _T.DREQ: Transition(_S.IDLE, (Action.SEND_DREP,)),
        **_drop(_T.MRA_REQ, _T.MRA_REP, _T.REP_STALE, _T.RTU, _T.REJ, _T.REJ_STALE, _T.DREP, _T.SIDR_REP),
        # A LAP for an unknown connection is answered like a DREQ, so that the peer need not run out of retries.
        _T.LAP: Transition(_S.IDLE, (Action.SEND_APR,)),
        **_drop(_T.LAP_COPY, _T.MRA_LAP, _T.APR),
    },
    _S.ESTABLISHED: {
        _T.ESTABLISH: Transition(_S.ESTABLISHED),
        _T.DISCONNECT: Transition(_S.DREQ_SENT, (Action.SEND_DREQ,)),
        # The peer has not received the RTU. Only an active side can receive a REP here.
        _T.REP: Transition(_S.ESTABLISHED, (Action.SEND_RTU,)),
        _T.REJ: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_REJECTED,)),
        _T.DREQ: Transition(_S.DREQ_RCVD, (Action.REPORT_DISCONNECT_REQUESTED,)),
        _T.STALE: Transition(_S.ESTABLISHED, (Action.AWAIT_ANSWER, Action.REPORT_PEER_QUESTION)),
        _T.PEER_ANSWERED: Transition(_S.ESTABLISHED, (Action.STOP_WAITING, Action.SEND_REJ_STALE)),
        # The timer runs here only while the peer is being asked.
        _T.RETRY: Transition(_S.ESTABLISHED, (Action.AWAIT_ANSWER_AGAIN, Action.REPORT_PEER_QUESTION)),
        _T.EXHAUSTED: Transition(_S.DREQ_SENT, (Action.RELEASE_QPN, Action.SEND_DREQ)),
        _T.DESTROY: Transition(_S.TIMEWAIT, (Action.SEND_DREQ_ONCE,)),
        # Only the active side sends a LAP, and only the passive side can receive one.
        _T.LOAD_PATH: Transition(_S.LAP_SENT, (Action.SEND_LAP,)),
        _T.LAP: Transition(_S.LAP_RCVD, (Action.REPORT_PATH_OFFERED,)),
        _T.LAP_COPY: Transition(_S.ESTABLISHED, (Action.SEND_APR,)),
        _T.MIGRATE: Transition(_S.ESTABLISHED, (Action.CHANGE_PATH,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP_STALE, _T.RTU, _T.DREP, _T.MRA_LAP, _T.APR),
        **_NOT_SIDR,
    },
    _S.DREQ_SENT: {
        _T.DISCONNECT: Transition(_S.DREQ_SENT),
        _T.REJ: Transition(_S.TIMEWAIT, (Action.REPORT_DISCONNECTED,)),
        _T.REJ_STALE: Transition(_S.TIMEWAIT, (Action.REPORT_DISCONNECTED,)),
        _T.DREQ: Transition(_S.TIMEWAIT, (Action.SEND_DREP, Action.REPORT_DISCONNECTED)),
        _T.DREP: Transition(_S.TIMEWAIT, (Action.REPORT_DISCONNECTED,)),
        _T.RETRY: Transition(_S.DREQ_SENT, (Action.RESEND,)),
        _T.EXHAUSTED: Transition(_S.TIMEWAIT, (Action.REPORT_DISCONNECTED,)),
        # Earlier DREQs may have been lost, and none is repeated from now on.
        _T.DESTROY: Transition(_S.TIMEWAIT, (Action.SEND_DREQ_ONCE,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.DREQ_RCVD: {
        _T.DISCONNECT: Transition(_S.TIMEWAIT, (Action.SEND_DREP,)),
        _T.DESTROY: Transition(_S.TIMEWAIT, (Action.SEND_DREP,)),
        **_drop(_T.REQ, _T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU, _T.REJ, _T.REJ_STALE, _T.DREQ, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
    _S.TIMEWAIT: {
        _T.DISCONNECT: Transition(_S.TIMEWAIT),
        _T.REQ: Transition(_S.TIMEWAIT, (Action.SEND_REJ_STALE,)),
        _T.DREQ: Transition(_S.TIMEWAIT, (Action.SEND_DREP,)),
        _T.TIMEWAIT_OVER: Transition(_S.IDLE, (Action.REPORT_TIMEWAIT_EXIT,)),
        _T.DESTROY: Transition(_S.TIMEWAIT),
        **_drop(_T.MRA_REQ, _T.MRA_REP, _T.REP, _T.REP_STALE, _T.RTU, _T.REJ, _T.REJ_STALE, _T.DREP),
        **_NO_PATHS,
        **_NOT_SIDR,
    },
}

_CALLS_ON_PATHS = (_T.LOAD_PATH, _T.MIGRATE)
_ASKING = (_T.STALE, _T.PEER_ANSWERED, _T.RETRY, _T.EXHAUSTED)


def _connected(
    state: CmState, without: tuple[CmTrigger, ...], changes: dict[CmTrigger, Transition | None]
) -> dict[CmTrigger, Transition | None]:
    """The row of ESTABLISHED for another state of an established connection, without some triggers, and changed."""
    row = {trigger: step for trigger, step in _BOTH[_S.ESTABLISHED].items() if trigger not in without}
    for trigger, step in row.items():
        if step is not None and step.state is _S.ESTABLISHED:
            row[trigger] = Transition(state, step.actions)
    return {**row, **changes}


def _loading(state: CmState) -> dict[CmTrigger, Transition | None]:
    answered = Transition(_S.ESTABLISHED, (Action.REPORT_PATH_ANSWERED,))
    return _connected(
        state,
        (*_CALLS_ON_PATHS, *_ASKING),
        {
            _T.MRA_LAP: Transition(_S.MRA_LAP_RCVD, (Action.EXTEND_WAIT,)),
            _T.APR: answered,
            # The timer is that of the LAP, so the peer is not asked here whether it has restarted.
            _T.RETRY: Transition(state, (Action.RESEND,)),
            _T.EXHAUSTED: answered,
            **_drop(_T.LAP, _T.LAP_COPY),
        },
    )


def _offered(state: CmState, copy: Transition | None) -> dict[CmTrigger, Transition | None]:
    answer = Transition(_S.ESTABLISHED, (Action.SEND_APR,))
    return _connected(state, _CALLS_ON_PATHS, {_T.LAP: copy, _T.ANSWER_PATH: answer, **_drop(_T.LAP_COPY)})


_PATHS: dict[CmState, dict[CmTrigger, Transition | None]] = {
    _S.LAP_SENT: _loading(_S.LAP_SENT),
    _S.MRA_LAP_RCVD: _loading(_S.MRA_LAP_RCVD),
    _S.LAP_RCVD: {**_offered(_S.LAP_RCVD, None), _T.ALLOW_MRA: Transition(_S.MRA_LAP_SENT)},
    _S.MRA_LAP_SENT: _offered(_S.MRA_LAP_SENT, Transition(_S.MRA_LAP_SENT, (Action.SEND_MRA,))),
}

_SIDR: dict[CmState, dict[CmTrigger, Transition | None]] = {
    _S.SIDR_REQ_SENT: {
        _T.SIDR_REP: Transition(_S.IDLE, (Action.REPORT_SIDR_REPLY,)),
        _T.RETRY: Transition(_S.SIDR_REQ_SENT, (Action.RESEND,)),
        _T.EXHAUSTED: Transition(_S.IDLE, (Action.REPORT_UNREACHABLE,)),
        _T.NETWORK_ERROR: Transition(_S.IDLE, (Action.REPORT_UNREACHABLE,)),
        _T.DESTROY: Transition(_S.IDLE),
        **_drop(_T.SIDR_REQ),
        **_ONLY_SIDR,
    },
    _S.SIDR_REQ_RCVD: {
        _T.ANSWER: Transition(_S.IDLE, (Action.SEND_SIDR_REP,)),
        _T.DESTROY: Transition(_S.IDLE, (Action.SEND_SIDR_REP,)),
        **_drop(_T.SIDR_REQ, _T.SIDR_REP),
        **_ONLY_SIDR,
    },
}

#: state → trigger → transition. None: the message is dropped. Missing: the call is refused.
TRANSITIONS: dict[CmState, dict[CmTrigger, Transition | None]] = {**_BOTH, **_ACTIVE, **_PASSIVE, **_PATHS, **_SIDR}
