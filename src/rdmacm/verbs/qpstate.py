"""The states of a queue pair: ibv_modify_qp(3), InfiniBand Architecture 10.3.1 and 11.2.5.2.

A queue pair begins in RESET, where it does nothing. The user moves it on, one ``modify`` at a time:

- INIT: receives may be posted; no packet is sent or accepted yet. The transition sets the port and what the peer may
  do.
- RTR, ready to receive: packets of the peer are accepted. The transition sets the peer and the path to it; a datagram
  queue pair has no peer.
- RTS, ready to send: requests are sent. The transition sets timeouts and retry counts.

From RTS it can be halted: SQD finishes the requests in progress and starts none, so that attributes can change. Once
they are finished (SQ_DRAINED, ``sq_draining`` is 0), RTS resumes. Two states follow errors: SQE, after an error of
sending (never in a reliable connection), from which RTS recovers; and ERR, where everything posted completes with
WR_FLUSH_ERR. The user may move to ERR from every state but RESET, and to RESET from every state. RESET drops everything
without completions; it is the only way out of ERR.

Each transition has attributes that it requires and attributes that it allows, by type of queue pair. Any other
attribute is refused with EINVAL, as is a transition that is not in the table. The mask names the attributes that are
set. STATE, the new state, is the transition itself and is not listed; ``modify`` without it stays in the state, which
is a transition as well (INIT → INIT, RTS → RTS, SQD → SQD). CUR_STATE, where allowed, is the state that the user
believes the queue pair to be in.
"""

from __future__ import annotations

from typing import NamedTuple

from rdmacm.verbs.enums import QPAttrMask, QPState, QPType

_S, _M = QPState, QPAttrMask
RC, UC, UD = QPType.RC, QPType.UC, QPType.UD
XRC_SEND, XRC_RECV = QPType.XRC_SEND, QPType.XRC_RECV
NONE = QPAttrMask(0)


class Needs(NamedTuple):
    """The attributes of one transition, without STATE."""

    required: QPAttrMask = NONE
    optional: QPAttrMask = NONE

    @property
    def allowed(self) -> QPAttrMask:
        """The required and the optional attributes together."""
        return self.required | self.optional


_ADDRESSED = _M.PKEY_INDEX | _M.PORT
_CONNECTED = _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN
_RELIABLE_IN = _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
_RELIABLE_OUT = _M.TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
_PATHS = _M.ALT_PATH | _M.PATH_MIG_STATE

_ANY = {RC: Needs(), UC: Needs(), UD: Needs(), XRC_SEND: Needs(), XRC_RECV: Needs()}
_RUNNING = {
    RC: Needs(optional=_M.CUR_STATE | _M.ACCESS_FLAGS | _M.MIN_RNR_TIMER | _PATHS),
    UC: Needs(optional=_M.CUR_STATE | _M.ACCESS_FLAGS | _PATHS),
    UD: Needs(optional=_M.CUR_STATE | _M.QKEY),
    XRC_SEND: Needs(optional=_M.CUR_STATE | _M.ACCESS_FLAGS | _PATHS),
    XRC_RECV: Needs(optional=_M.CUR_STATE | _M.ACCESS_FLAGS | _M.MIN_RNR_TIMER | _PATHS),
}

#: (state, next state) → type → attributes.
TRANSITIONS: dict[tuple[QPState, QPState], dict[QPType, Needs]] = {
    (_S.RESET, _S.INIT): {
        **dict.fromkeys(_ANY, Needs(_ADDRESSED | _M.ACCESS_FLAGS)),
        UD: Needs(_ADDRESSED | _M.QKEY),
    },
    (_S.INIT, _S.INIT): {
        **dict.fromkeys(_ANY, Needs(optional=_ADDRESSED | _M.ACCESS_FLAGS)),
        UD: Needs(optional=_ADDRESSED | _M.QKEY),
    },
    (_S.INIT, _S.RTR): {
        RC: Needs(_CONNECTED | _RELIABLE_IN, _M.ALT_PATH | _M.ACCESS_FLAGS | _M.PKEY_INDEX),
        UC: Needs(_CONNECTED, _M.ALT_PATH | _M.ACCESS_FLAGS | _M.PKEY_INDEX),
        UD: Needs(optional=_M.PKEY_INDEX | _M.QKEY),
        XRC_SEND: Needs(_CONNECTED, _M.ALT_PATH | _M.ACCESS_FLAGS | _M.PKEY_INDEX),
        XRC_RECV: Needs(_CONNECTED | _RELIABLE_IN, _M.ALT_PATH | _M.ACCESS_FLAGS | _M.PKEY_INDEX),
    },
    (_S.RTR, _S.RTS): {
        RC: Needs(_M.SQ_PSN | _RELIABLE_OUT, _RUNNING[RC].optional),
        UC: Needs(_M.SQ_PSN, _RUNNING[UC].optional),
        UD: Needs(_M.SQ_PSN, _RUNNING[UD].optional),
        XRC_SEND: Needs(_M.SQ_PSN | _RELIABLE_OUT, _RUNNING[XRC_SEND].optional),
        XRC_RECV: Needs(_M.SQ_PSN | _M.TIMEOUT, _RUNNING[XRC_RECV].optional),
    },
    (_S.RTS, _S.RTS): _RUNNING,
    (_S.RTS, _S.SQD): dict.fromkeys(_ANY, Needs(optional=_M.EN_SQD_ASYNC_NOTIFY)),
    (_S.SQD, _S.RTS): _RUNNING,
    (_S.SQD, _S.SQD): {
        RC: Needs(optional=_ADDRESSED | _M.AV | _RELIABLE_OUT | _RELIABLE_IN | _M.ACCESS_FLAGS | _PATHS),
        UC: Needs(optional=_M.PKEY_INDEX | _M.AV | _M.ACCESS_FLAGS | _PATHS),
        UD: Needs(optional=_M.PKEY_INDEX | _M.QKEY),
        XRC_SEND: Needs(optional=_ADDRESSED | _M.AV | _RELIABLE_OUT | _M.ACCESS_FLAGS | _PATHS),
        XRC_RECV: Needs(optional=_ADDRESSED | _M.AV | _M.TIMEOUT | _RELIABLE_IN | _M.ACCESS_FLAGS | _PATHS),
    },
    (_S.SQE, _S.RTS): {
        UC: Needs(optional=_M.CUR_STATE | _M.ACCESS_FLAGS),
        UD: Needs(optional=_M.CUR_STATE | _M.QKEY),
    },
}

for _state in _S:
    TRANSITIONS[_state, _S.RESET] = _ANY
    if _state is not _S.RESET:
        TRANSITIONS[_state, _S.ERR] = _ANY

#: The states in which receives may be posted; in ERR they are flushed at once.
RECV_STATES = frozenset(_S) - {_S.RESET}
#: The states in which sends may be posted; in SQD they wait, in SQE and ERR they are flushed at once.
SEND_STATES = frozenset({_S.RTS, _S.SQD, _S.SQE, _S.ERR})

_ALL = QPAttrMask(sum(_M))
#: Transitions without fault so far, each as type, state, next state and mask: every connection makes the same few.
_faultless: set[tuple[int, int, int, int]] = set()
_MAX_FAULTLESS = 256
_LADDER = (_S.INIT, _S.RTR, _S.RTS)


def names(mask: QPAttrMask) -> str:
    """``AV, PATH_MTU``: the attributes of a mask, in the order of their bits."""
    return ", ".join(str(flag.name) for flag in mask)


def find_fault(qp_type: QPType, before: QPState, after: QPState, mask: QPAttrMask) -> str | None:
    """Why a transition with these attributes is not allowed; None if it is."""
    key = int(qp_type), int(before), int(after), int(mask)
    if key in _faultless:
        return None
    needs = TRANSITIONS.get((before, after), {}).get(qp_type)
    if needs is None:
        return f"no transition from {before.name} to {after.name} for {qp_type.name}"
    faults = []
    if missing := needs.required & ~mask:
        faults.append(f"missing {names(missing)}")
    if unexpected := mask & _ALL & ~(needs.allowed | _M.STATE):
        faults.append(f"unexpected {names(unexpected)}")
    if unknown := int(mask) & ~int(_ALL):
        faults.append(f"unknown attribute bits {unknown:#x}")
    if faults:
        return f"{before.name} to {after.name} of {qp_type.name}: {'; '.join(faults)}"
    if len(_faultless) < _MAX_FAULTLESS:
        _faultless.add(key)
    return None


def states_between(before: QPState, after: QPState) -> tuple[QPState, ...]:
    """The states to move to, one after the other, on the way from ``before`` to ``after``."""
    if before in (_S.RESET, _S.INIT, _S.RTR) and after in _LADDER:
        return tuple(state for state in _LADDER if before < state <= after) or (after,)
    return (after,)


def step_mask(qp_type: QPType, before: QPState, after: QPState) -> QPAttrMask:
    """The mask of one step: STATE and the attributes that it requires; for INIT → INIT those of RESET → INIT."""
    if before is after is _S.INIT:
        before = _S.RESET
    return _M.STATE | TRANSITIONS.get((before, after), {}).get(qp_type, Needs()).required
