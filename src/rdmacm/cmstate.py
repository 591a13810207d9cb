"""The states of an rdma_cm_id and what may be done in each.

Everything that decides whether a call is allowed, and which state follows, is in the two tables below; code that
runs ids looks there and never compares states itself.

An id starts IDLE. Binding gives it a source address and a port number and, where the address is a specific one, a
device: ADDR_BOUND. From there it goes one of three ways.

- The active side resolves: ADDR_QUERY while the next hop is being found, ADDR_RESOLVED when the destination is
  known and a device and GID are chosen, ROUTE_QUERY, ROUTE_RESOLVED, then CONNECT. An id that was never bound is
  bound on the way (to the wildcard address and a free port). A failed address resolution leaves the id bound with
  its port, a failed route resolution leaves it resolved: both may be tried again. A failed connect may not: the id
  stays in CONNECT, and all it is good for is to be destroyed.
- The active side on InfiniBand may instead ask the subnet administrator for a service: ADDRINFO_QUERY,
  ADDRINFO_RESOLVED; the first record found becomes the destination, and the route follows. resolve_addr takes another.
- The passive side listens: LISTEN. Each connection request is a new id that begins in CONNECT.

DISCONNECT follows CONNECT when either side disconnects. A device may go away at any time, which leaves nothing
but destroying (DEVICE_REMOVAL); DESTROYING ends everything.

What the tables leave out is refused with EINVAL, or with ENXIO after the device went away, which is what the
kernel answers once it has closed the id. Triggers in capitals with a verb are calls of the user; the others are
outcomes, and an outcome that arrives in a state that does not expect it (the id was destroyed meanwhile) is
ignored by whoever drives the id.
"""

from __future__ import annotations

import errno
from enum import Enum, IntEnum

__all__ = ["OPTION_STATES", "TRANSITIONS", "State", "Trigger", "refusal"]


class State(IntEnum):
    """Kernel states of an id; values equal ``enum rdma_cm_state`` with the 2025 additions last."""

    __hash__ = int.__hash__  # in C; Enum's own is in Python

    IDLE = 0
    ADDR_QUERY = 1
    ADDR_RESOLVED = 2
    ROUTE_QUERY = 3
    ROUTE_RESOLVED = 4
    CONNECT = 5
    DISCONNECT = 6
    ADDR_BOUND = 7
    LISTEN = 8
    DEVICE_REMOVAL = 9
    DESTROYING = 10
    ADDRINFO_QUERY = 11
    ADDRINFO_RESOLVED = 12


class Trigger(Enum):
    """What moves an id. The value is the name of the call, or a phrase for an outcome."""

    __hash__ = object.__hash__  # in C; Enum's own is in Python

    BIND_ADDR = "bind_addr"
    RESOLVE_ADDR = "resolve_addr"
    RESOLVE_IB_SERVICE = "resolve_ib_service"
    RESOLVE_ROUTE = "resolve_route"
    SET_PATH = "set_option IB_PATH"
    CONNECT = "connect"
    LISTEN = "listen"
    ACCEPT = "accept"
    REJECT = "reject"
    NOTIFY = "notify"
    DISCONNECT = "disconnect"
    JOIN_MULTICAST = "join_multicast"
    MIGRATE = "migrate_id"
    DESTROY = "destroy_id"

    ADDR_DONE = "address resolved"
    ADDR_FAILED = "address resolution failed"
    SERVICE_DONE = "service resolved"
    SERVICE_FAILED = "service resolution failed"
    ROUTE_DONE = "route resolved"
    ROUTE_FAILED = "route resolution failed"
    CONNECT_REFUSED = "connect could not start"
    LISTEN_REFUSED = "listen could not start"
    DISCONNECTED = "peer disconnected"
    DEVICE_GONE = "device removed"


_S, _T = State, Trigger

#: state → trigger → next state; what is not there is refused (:func:`refusal`).
TRANSITIONS: dict[State, dict[Trigger, State]] = {
    _S.IDLE: {
        _T.BIND_ADDR: _S.ADDR_BOUND,
        _T.RESOLVE_ADDR: _S.ADDR_QUERY,
        _T.LISTEN: _S.LISTEN,
    },
    _S.ADDR_BOUND: {
        _T.RESOLVE_ADDR: _S.ADDR_QUERY,
        _T.RESOLVE_IB_SERVICE: _S.ADDRINFO_QUERY,
        _T.LISTEN: _S.LISTEN,
        _T.JOIN_MULTICAST: _S.ADDR_BOUND,
    },
    _S.ADDR_QUERY: {
        _T.ADDR_DONE: _S.ADDR_RESOLVED,
        _T.ADDR_FAILED: _S.ADDR_BOUND,
    },
    _S.ADDR_RESOLVED: {
        _T.RESOLVE_ROUTE: _S.ROUTE_QUERY,
        _T.SET_PATH: _S.ROUTE_RESOLVED,
        _T.JOIN_MULTICAST: _S.ADDR_RESOLVED,
    },
    _S.ROUTE_QUERY: {
        _T.ROUTE_DONE: _S.ROUTE_RESOLVED,
        _T.ROUTE_FAILED: _S.ADDR_RESOLVED,
    },
    _S.ROUTE_RESOLVED: {
        _T.CONNECT: _S.CONNECT,
    },
    _S.CONNECT: {
        _T.CONNECT_REFUSED: _S.ROUTE_RESOLVED,
        _T.ACCEPT: _S.CONNECT,
        _T.REJECT: _S.CONNECT,
        _T.NOTIFY: _S.CONNECT,
        _T.DISCONNECT: _S.CONNECT,
        _T.DISCONNECTED: _S.DISCONNECT,
    },
    _S.DISCONNECT: {
        _T.DISCONNECT: _S.DISCONNECT,
        _T.DISCONNECTED: _S.DISCONNECT,
        _T.REJECT: _S.DISCONNECT,
        _T.NOTIFY: _S.DISCONNECT,
    },
    _S.LISTEN: {
        _T.LISTEN_REFUSED: _S.ADDR_BOUND,
    },
    _S.ADDRINFO_QUERY: {
        _T.SERVICE_DONE: _S.ADDRINFO_RESOLVED,
        _T.SERVICE_FAILED: _S.ADDR_BOUND,
    },
    _S.ADDRINFO_RESOLVED: {
        _T.RESOLVE_ROUTE: _S.ROUTE_QUERY,
        _T.RESOLVE_ADDR: _S.ADDR_QUERY,
    },
    _S.DEVICE_REMOVAL: {},
    _S.DESTROYING: {},
}

# Legal wherever the id still lives: migration, losing the device, being destroyed.
for _state, _row in TRANSITIONS.items():
    if _state is not _S.DESTROYING:
        _row[_T.DESTROY] = _S.DESTROYING
    if _state not in (_S.DESTROYING, _S.DEVICE_REMOVAL):
        _row[_T.MIGRATE] = _state
        _row[_T.DEVICE_GONE] = _S.DEVICE_REMOVAL

_LIVING = frozenset(State) - {_S.DESTROYING, _S.DEVICE_REMOVAL}

#: The states in which an option may be set; rdma_set_option(3) changes no state.
OPTION_STATES: dict[str, frozenset[State]] = {
    "TOS": _LIVING,
    "ACK_TIMEOUT": _LIVING,
    "REUSEADDR on": _LIVING - {_S.LISTEN},
    "REUSEADDR off": frozenset({_S.IDLE}),
    "AFONLY": frozenset({_S.IDLE, _S.ADDR_BOUND}),
}


def refusal(state: State) -> int:
    """The errno of a call that is not allowed in ``state``."""
    return errno.ENXIO if state in (State.DEVICE_REMOVAL, State.DESTROYING) else errno.EINVAL
