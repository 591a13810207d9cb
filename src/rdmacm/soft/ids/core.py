"""What the parts of one id share: its addresses, state, options and device, and the events it posts.

An id is a :class:`rdmacm.soft.ids.identifier.SoftId`. It has a *link* (:mod:`rdmacm.soft.ids.link`), which finds the
way to the peer, and a *connector* (:mod:`rdmacm.soft.ids.connector`), which connects. Both work on the id's
:class:`IdCore`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter_ns

from rdmacm.address import DEFAULT_PKEY, Address, Gid
from rdmacm.cmstate import TRANSITIONS, State, Trigger, refusal
from rdmacm.connparam import ConnParam, UdParam
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import CmStateError
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.provider import IdOptions, QueuedEvent
from rdmacm.resolution.hosts import DeviceView
from rdmacm.resolution.infiniband import IbView
from rdmacm.soft.event_queue import SoftQueue
from rdmacm.soft.host import SoftHost
from rdmacm.soft.ids.link import LookupOfLink
from rdmacm.soft.port_table import PortOwner
from rdmacm.verbs.device import Context

__all__ = ["IdCore", "steps_of"]

_NO_GID = Gid()

#: What to do about a call that the state does not allow.
_HINTS = {
    State.DEVICE_REMOVAL: "destroy the id and start over",
    State.IDLE: "bind_addr() or resolve_addr() first",
    State.ADDR_BOUND: "resolve_addr() first",
    State.ADDR_QUERY: "wait for ADDR_RESOLVED or ADDR_ERROR",
    State.ROUTE_QUERY: "wait for ROUTE_RESOLVED or ROUTE_ERROR",
}


_STEP_ORDER = {"bind": 0, "route": 1, "select": 2, "neighbour": 3, "path": 4}


class IdCore:
    """See the module. Used with the runtime's lock held; the state changes only by :mod:`rdmacm.cmstate`'s table."""

    __slots__ = (
        "__weakref__",
        "device",
        "dgid",
        "gid_index",
        "host",
        "local_addr",
        "options",
        "owner",
        "paths",
        "peer_addr",
        "pkey",
        "port_num",
        "port_owner",
        "port_space",
        "qkey",
        "qp_type",
        "queue",
        "runtime",
        "services",
        "sgid",
        "state",
        "taken_steps",
        "verbs",
    )

    def __init__(self, host: SoftHost, queue: SoftQueue, owner: object | None, port_space: int, qp_type: int) -> None:
        self.host = host
        self.runtime = host.runtime
        #: Returns the API object that the id works for, None before :meth:`adopt` or after it was collected.
        self.owner: Callable[[], object | None] = _no_owner if owner is None else weakref.ref(owner)
        #: Where the events go.
        self.queue = queue
        self.port_space = port_space if type(port_space) is PortSpace else PortSpace(port_space)
        #: ``enum ibv_qp_type``.
        self.qp_type = qp_type
        self.state = State.IDLE
        self.options = IdOptions()
        self.local_addr: Address | None = None
        self.peer_addr: Address | None = None
        #: The open device; None while the id is bound to none.
        self.verbs: Context | None = None
        #: The picture of that device's port, as of the last look.
        self.device: DeviceView | IbView | None = None
        self.port_num = 0
        #: Of ``sgid`` in the port's GID table.
        self.gid_index = 0
        self.sgid = self.dgid = _NO_GID
        self.pkey = 0
        #: The Q_Key of a datagram id, 0 while it has none.
        self.qkey = 0
        #: The primary path, and the alternate one if there is one.
        self.paths: tuple[PathRecord, ...] = ()
        #: What :meth:`rdmacm.provider.IdBackend.resolve_service` has found.
        self.services: tuple[ServiceRecord, ...] = ()
        #: The id's place in the port table.
        self.port_owner: PortOwner | None = None
        #: Name, nanoseconds and detail of each step taken; the detail is put into words when it is asked for.
        self.taken_steps: list[tuple[str, int, object]] = []

    # -- state ----------------------------------------------------------------------------------------

    def may(self, trigger: Trigger) -> bool:
        """Whether the state allows ``trigger``."""
        return trigger in TRANSITIONS[self.state]

    def require(self, trigger: Trigger) -> None:
        """Raise CmStateError unless the state allows the call."""
        if trigger not in TRANSITIONS[self.state]:
            raise self.refuse(trigger.value)

    def move(self, trigger: Trigger) -> None:
        """Change the state; CmStateError when the table has no such transition."""
        after = TRANSITIONS[self.state].get(trigger)
        if after is None:
            raise self.refuse(trigger.value)
        self.state = after

    def refuse(self, call: str) -> CmStateError:
        """The error of a call that the state does not allow."""
        return CmStateError(
            refusal(self.state), f"not allowed in state {self.state.name}", call, hint=_HINTS.get(self.state)
        )

    # -- events ---------------------------------------------------------------------------------------

    def post(
        self,
        kind: CmEventType,
        status: int = 0,
        explain: Callable[[], Explanation] | None = None,
        message: str = "",
        param: ConnParam | UdParam | None = None,
    ) -> None:
        """Queue an event for the id's owner."""
        owner = self.owner()
        if owner is not None:
            self.queue.post(QueuedEvent(owner, kind, status, 0, explain, message, param))

    def note(self, name: str, started: int, detail: object) -> None:
        """Record a step that began at ``started`` (perf_counter_ns); it replaces an earlier step of that name."""
        self.taken_steps = [step for step in self.taken_steps if step[0] != name]
        self.taken_steps.append((name, perf_counter_ns() - started, detail))

    # -- device and port ------------------------------------------------------------------------------

    def attach(self, view: DeviceView | IbView, pkey: int = DEFAULT_PKEY) -> None:
        """Bind the id to a device's port."""
        if self.device is not None:
            self.host.detach(self, self.device)
        self.device = view
        self.host.attach(self, view)
        self.verbs = self.host.context_of(view)
        self.port_num = view.port_num
        self.pkey = pkey

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        if self.device is not None:
            self.host.detach(self, self.device)
        self.device = self.verbs = None
        self.port_num = self.gid_index = self.pkey = 0
        self.sgid = _NO_GID

    def device_changed(self, before: DeviceView, after: DeviceView | None) -> None:
        """See :class:`rdmacm.soft.host.BoundId`."""
        raise NotImplementedError

    def take_port(
        self, space: PortSpace, port: int, family: int, ip: bytes, scope_id: int, is_any: bool, afonly: bool
    ) -> int:
        """Take a port number in the port table, a free one if ``port`` is 0; EADDRINUSE when it is taken."""
        owner = PortOwner(space, port, family, ip, scope_id, is_any, self.options.reuseaddr, afonly)
        self.host.ports.bind(owner)
        self.port_owner = owner
        return owner.port

    def release_port(self) -> None:
        """Undo :meth:`take_port`."""
        if self.port_owner is not None:
            self.host.ports.release(self.port_owner)
            self.port_owner = None


def steps_of(core: IdCore, lookup: LookupOfLink | None) -> tuple[Step, ...]:
    """The steps an id has taken, in the order of a resolution."""
    found = [*core.taken_steps, *(lookup.steps if lookup else ())]
    found.sort(key=lambda step: _STEP_ORDER.get(step[0], len(_STEP_ORDER)))
    return tuple(Step(name, ns / 1000, str(detail)) for name, ns, detail in found)


def _no_owner() -> None:
    """The owner of an id that a request has made and the application has not taken yet."""
