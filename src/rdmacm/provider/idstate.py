"""What the ids of all providers have: state, addresses, device, paths, and the errors of calls in a wrong state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rdmacm.address import Address, Gid
from rdmacm.constants import PortSpace
from rdmacm.errors import CmStateError
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.sa import PathRecord
from rdmacm.provider import IdOptions, Owner
from rdmacm.provider.cmstate import TRANSITIONS, State, Trigger, destroyed, refusal
from rdmacm.verbs.device import Context

if TYPE_CHECKING:
    from rdmacm.proto.sa.subnet import ServiceRecord

NO_GID = Gid()
_NO_OPTIONS = IdOptions()


def no_owner() -> None:
    """The owner of an id that a request has made, until the application fetches the request."""


#: What to do about a call that the state does not allow.
_HINTS = {
    State.DEVICE_REMOVAL: "destroy the id and start over",
    State.IDLE: "bind_addr() or resolve_addr() first",
    State.ADDR_BOUND: "resolve_addr() first",
    State.ADDR_QUERY: "wait for ADDR_RESOLVED or ADDR_ERROR",
    State.ROUTE_QUERY: "wait for ROUTE_RESOLVED or ROUTE_ERROR",
}


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class CommonIdState:
    """See the module. Used with the runtime's lock held."""

    runtime: Runtime
    #: Returns the API object of the id; None before ``adopt()``, or after the object was collected.
    owner: Callable[[], Owner | None]
    #: The port space of the id's port number and service ids.
    port_space: PortSpace
    #: ``enum ibv_qp_type``.
    qp_type: int
    state: State = State.IDLE
    #: The options of rdma_set_option(3).
    options: IdOptions = _NO_OPTIONS
    #: The source address; None until bound.
    local_addr: Address | None = None
    #: The destination, or the peer of a request.
    peer_addr: Address | None = None
    #: The open device of the port that the id is bound to.
    verbs: Context | None = None
    #: The port's number, from 1; 0 while the id is bound to none.
    port_num: int = 0
    #: The GIDs of this side and the peer; the zero GID until known.
    sgid: Gid = NO_GID
    dgid: Gid = NO_GID
    #: The P_Key, 16 bits; 0 while the id is bound to no port.
    pkey: int = 0
    #: The primary path, then the alternate one if there is one.
    paths: tuple[PathRecord, ...] = ()
    #: The result of :meth:`rdmacm.provider.IdBackend.resolve_service`.
    services: tuple[ServiceRecord, ...] = ()
    #: Name, nanoseconds and result of each step taken; the result is formatted only when a user asks for it.
    taken_steps: list[tuple[str, int, object]] = field(default_factory=list)

    def may(self, trigger: Trigger) -> bool:
        """Whether the state allows ``trigger``."""
        return trigger in TRANSITIONS[self.state]

    def refuse(self, call: str) -> CmStateError:
        """The error of a call that the state does not allow."""
        if self.state is State.DESTROYING:
            return destroyed(call)
        return CmStateError(
            refusal(self.state), f"not allowed in state {self.state.name}", call, hint=_HINTS.get(self.state)
        )
