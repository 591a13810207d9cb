"""The states of an rdma_cm_id, and the calls that each state allows.

The two tables below are the only place that decides whether a call is allowed and which state follows.

An id starts IDLE. Binding gives it a source address and a port number and, where the address is a specific one, a
device: ADDR_BOUND. It continues in one of three ways.

- The active side resolves: ADDR_QUERY while the next hop is being resolved, ADDR_RESOLVED once the destination is
  known and a device and GID are chosen, ROUTE_QUERY, ROUTE_RESOLVED, then CONNECT. Resolving an unbound id binds it (to
  the wildcard address and a free port). A failed address resolution leaves the id bound to its port, and a failed route
  resolution leaves the address resolved; both may be repeated. A failed connect may not: the id stays in CONNECT and
  can only be destroyed.
- The active side on InfiniBand may ask the subnet administrator for a service instead: ADDRINFO_QUERY,
  ADDRINFO_RESOLVED. The first record becomes the destination, and the route is resolved next. resolve_addr chooses
  another record.
- The passive side listens: LISTEN. Each connection request is a new id that starts in CONNECT.

DISCONNECT follows CONNECT when either side disconnects. After the device is removed, which may happen at any time, the
id can only be destroyed (DEVICE_REMOVAL). DESTROYING is final.

A call that is not in the tables is refused with EINVAL, or with ENXIO after the device was removed, as the kernel does
once it has closed the id. The triggers are calls of the user and outcomes of what the calls have started. An outcome
that is not in the tables is ignored: the id was destroyed in the meantime, for example.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import ClassVar

from rdmacm.errors import CmStateError


class State(IntEnum):
    """The kernel's states of an id. Values are those of ``enum rdma_cm_state``; the last two were added in 2025."""

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
    """A call or an outcome that moves an id. The value is the name of the call, or describes the outcome."""

    __hash__: ClassVar[Callable[[object], int]] = object.__hash__  # Enum's own is written in Python and slower

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
    DISCONNECTED = "peer disconnected"
    DEVICE_GONE = "device removed"


_S, _T = State, Trigger

#: state → trigger → next state. A call that is missing is refused (:func:`refusal`).
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
    _S.LISTEN: {},
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

# Destroying, migration and device removal are possible in every state of a living id.
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


def destroyed(call: str) -> CmStateError:
    """The error of a call on an id in DESTROYING."""
    return CmStateError(errno.ENXIO, "the id has been destroyed", call, hint="a new id")


def refusal(state: State) -> int:
    """The errno of a call that ``state`` does not allow."""
    return errno.ENXIO if state in (State.DEVICE_REMOVAL, State.DESTROYING) else errno.EINVAL
