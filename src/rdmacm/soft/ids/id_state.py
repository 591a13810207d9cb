"""What the parts of one id share: its addresses, state, options and device, and the events it posts.

An id is a :class:`rdmacm.soft.ids.identifier.SoftId`. Its *resolver* resolves addresses and its *link* routes
(:mod:`rdmacm.soft.ids.link`), and its *connector* (:mod:`rdmacm.soft.ids.connector`) connects. All work on the id's
:class:`IdState`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from socket import AF_INET, AF_INET6
from time import perf_counter_ns

from rdmacm.address import AF_IB, DEFAULT_PKEY, Address, InetAddr, SockAddrIB
from rdmacm.capabilities import INFINIBAND, SOFT, Feature
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import Failure
from rdmacm.explanation import Explanation, Step
from rdmacm.net.types import Neighbour
from rdmacm.provider import IdOptions, QueuedEvent, log
from rdmacm.provider.cmstate import TRANSITIONS, State, Trigger
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.provider.idstate import NO_GID, CommonIdState
from rdmacm.provider.multicast import GroupJoin
from rdmacm.resolution.hosts import IpoibInterface, PortView, RocePortView
from rdmacm.resolution.ipoib import IpoibPortView
from rdmacm.soft.event_queue import PendingRequest, SoftQueue
from rdmacm.soft.host import SoftHost
from rdmacm.soft.ids.link import AddressLookup
from rdmacm.soft.port_table import PortOwner
from rdmacm.verbs.device import Context, GidEntry
from rdmacm.verbs.enums import LinkLayer

_make_tuple = tuple.__new__
_WILDCARD_V4, _WILDCARD_V6 = InetAddr.any(AF_INET), InetAddr.any(AF_INET6)
#: The order of the steps in an explanation; others come last.
_STEP_ORDER = {"bind": 0, "route": 1, "select": 2, "neighbour": 3, "path": 4}


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class IdState(CommonIdState):
    """See the module. Used with the runtime's lock held; the state changes by :mod:`rdmacm.provider.cmstate` alone."""

    host: SoftHost
    #: Where the events go.
    queue: SoftQueue
    #: The last address resolution, finished or not; None before the first.
    lookup: AddressLookup | None = None
    #: The port that the id is bound to, as of the last look at the host; None while it is bound to none.
    port_view: PortView | None = None
    #: The row of ``sgid`` in the port's GID table.
    gid_index: int = 0
    #: The Q_Key of a datagram id, 0 while it has none.
    qkey: int = 0
    #: The id's entry in the port table.
    port_owner: PortOwner | None = None

    # -- state ----------------------------------------------------------------------------------------

    def require(self, trigger: Trigger) -> None:
        """Raise CmStateError unless the state allows the call, and EBADF in a child of fork(2)."""
        if self.runtime.abandoned:
            self.runtime.check_fork(trigger.value)
        if trigger not in TRANSITIONS[self.state]:
            raise self.refuse(trigger.value)

    def move(self, *triggers: Trigger) -> None:
        """Change the state by one trigger after the other; CmStateError when the table has no such transition."""
        for trigger in triggers:
            before = self.state
            after = TRANSITIONS[before].get(trigger)
            if after is None:
                raise self.refuse(trigger.value)
            self.state: State = after
            if log.enabled:
                log.ID.debug("%s: %s -> %s (%s)", str(self), before.name, after.name, trigger.value)

    def enter_connect(self, options: IdOptions) -> None:
        """Begin as the passive side: a peer's request has made this id, for a listener with these options."""
        self.options = options
        self.state = State.CONNECT
        if log.enabled:
            log.ID.debug("%s: CONNECT by a request of the peer", str(self))

    @property
    def is_infiniband(self) -> bool:
        """Whether the id is bound to an InfiniBand port."""
        return self.port_view is not None and self.port_view.port.link_layer is LinkLayer.INFINIBAND

    def require_feature(self, feature: Feature, call: str) -> None:
        """Raise EOPNOTSUPP if the id's port lacks a feature."""
        (INFINIBAND if self.is_infiniband else SOFT).require(feature, call, str(self.peer_addr))

    # -- events ---------------------------------------------------------------------------------------

    def post(
        self,
        kind: CmEventType,
        status: int = 0,
        explain: Callable[[], Explanation] | None = None,
        message: str = "",
        param: ConnParam | UdParam | None = None,
        join: GroupJoin | None = None,
    ) -> None:
        """Queue an event for the id's owner."""
        if log.enabled:
            self._log_event(kind, status, message)
        owner = self.owner()
        if owner is not None:
            # Not by the class, whose constructor is a function in Python.
            self.queue.add(_make_tuple(QueuedEvent, (owner, kind, status, 0, explain, message, param, None, join)))

    def _log_event(self, kind: CmEventType, status: int, message: str) -> None:
        text = str(self)
        log.ID.debug("%s: event %s, status %d%s", text, kind.name, status, f": {message}" if message else "")
        if kind is CmEventType.ADDR_RESOLVED and self.port_view is not None:
            place = f"{self.port_view.device.name} port {self.port_num}, GID index {self.gid_index}"
            log.RESOLUTION.debug("%s: %s: %s -> %s", text, place, self.sgid, self.dgid)
        elif kind is CmEventType.ROUTE_RESOLVED:
            for path in self.paths:
                lids = f", LID {path.slid} -> {path.dlid}" if path.dlid else ""
                found = f"{path.sgid} -> {path.dgid}, MTU {path.mtu_bytes}, P_Key 0x{path.pkey:04x}{lids}"
                log.RESOLUTION.debug("%s: path %s", text, found)
        elif kind in (CmEventType.ADDR_ERROR, CmEventType.ROUTE_ERROR, CmEventType.ADDRINFO_ERROR):
            log.RESOLUTION.debug("%s: %s", text, message)

    def __str__(self) -> str:
        """Port space and addresses, for messages."""
        peer = f" -> {self.peer_addr}" if self.peer_addr is not None else ""
        return f"{self.port_space.name} {self.local_addr if self.local_addr is not None else 'unbound'}{peer}"

    def post_request(self, take: Callable[[], QueuedEvent | None]) -> None:
        """See :class:`rdmacm.soft.ids.ib_cm.IbCmUser`."""
        owner = self.owner()
        if owner is not None:
            self.queue.add(_make_tuple(PendingRequest, (owner, take)))

    def note(self, step: str, started: int, result: object) -> None:
        """Record a step that began at ``started`` (perf_counter_ns); it replaces an earlier step of that name."""
        for taken in self.taken_steps:
            if taken[0] == step:
                self.taken_steps.remove(taken)
                break
        self.taken_steps.append((step, perf_counter_ns() - started, result))

    # -- device and port ------------------------------------------------------------------------------

    def attach(self, view: PortView | IpoibPortView, row: GidEntry, pkey: int = DEFAULT_PKEY) -> None:
        """Bind the id to a port and one of its GIDs; of an IPoIB interface, to its InfiniBand port and its P_Key."""
        raise NotImplementedError

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        if self.port_view is not None:
            self.host.detach(self, self.port_view)
        self.port_view = None
        self.verbs: Context | None = None
        self.port_num = self.pkey = self.gid_index = 0
        self.sgid = NO_GID

    def resolve_gids(self) -> None:
        """Resolve AF_IB addresses from now on."""
        raise NotImplementedError

    def device_changed(self, before: RocePortView, after: RocePortView | None) -> None:
        """See :class:`rdmacm.soft.host.BoundId`."""
        raise NotImplementedError

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        """See :class:`rdmacm.soft.host.BoundId`."""
        raise NotImplementedError

    def ipoib_changed(self, before: IpoibInterface, after: IpoibInterface | None) -> None:
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


def steps_of(core: IdState, lookup: AddressLookup | None) -> tuple[Step, ...]:
    """The steps an id has taken, in the order of a resolution."""
    found = [*core.taken_steps, *(lookup.steps if lookup else ())]
    found.sort(key=lambda step: _STEP_ORDER.get(step[0], len(_STEP_ORDER)))
    return tuple(Step(name, ns / 1000, str(detail)) for name, ns, detail in found)


def explain_failure(core: IdState, lookup: AddressLookup, failure: Failure) -> Explanation:
    """The explanation of a failed address resolution, which begins with the id's binding."""
    bind = tuple(Step(name, ns / 1000, str(detail)) for name, ns, detail in core.taken_steps if name == "bind")
    return lookup.explain(None, failure, bind)


def family_of(address: Address) -> int:
    """The address family: AF_INET, AF_INET6 or AF_IB."""
    return AF_IB if isinstance(address, SockAddrIB) else address.family


def host_of(address: Address) -> bytes:
    """The packed IP address, or the GID."""
    return bytes(address.addr) if isinstance(address, SockAddrIB) else address.ip


def wildcard_of(destination: Address) -> Address:
    """The address that an id is bound to if no source is given."""
    if isinstance(destination, InetAddr):
        return _WILDCARD_V4 if destination.family == AF_INET else _WILDCARD_V6
    return SockAddrIB(pkey=destination.pkey)
