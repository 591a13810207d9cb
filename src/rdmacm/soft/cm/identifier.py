"""One rdma_cm_id of the software device: its addresses, its state, its resolutions.

Each call runs to its end under the provider's lock; what has to be waited for goes to
:class:`rdmacm.resolution.neighbours.Pending`, which calls back. States change only by :mod:`rdmacm.cmstate`'s table.
"""

from __future__ import annotations

import errno
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from socket import AF_INET
from time import perf_counter_ns
from typing import TYPE_CHECKING

from rdmacm.address import AF_IB, ALL_BITS_64, DEFAULT_PKEY, Gid, InetAddr, SockAddrIB, is_link_local, service_id
from rdmacm.cmstate import OPTION_STATES, TRANSITIONS, State, Trigger, refusal
from rdmacm.constants import CmEventType, IbOption, IdOption, OptionLevel, PathFlag, PortSpace
from rdmacm.errors import CmStateError, RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.provider import Address, EventQueue, IdOptions, QueuedEvent
from rdmacm.resolution import lookup as resolver
from rdmacm.resolution.hosts import DeviceView
from rdmacm.resolution.lookup import Failure, Lookup
from rdmacm.soft.ib.ports import IbLookup, IbView
from rdmacm.soft.port_table import PortOwner
from rdmacm.verbs.device import Context, GidEntry
from rdmacm.verbs.enums import QPType

if TYPE_CHECKING:
    from rdmacm.soft.event_queue import SoftQueue
    from rdmacm.soft.provider import SoftProvider

#: Port spaces an AF_IB address may be bound in, by the id's own, in the order they are tried.
_IB_SPACES = {
    PortSpace.IB: (PortSpace.IB, PortSpace.TCP, PortSpace.UDP),
    PortSpace.TCP: (PortSpace.TCP,),
    PortSpace.UDP: (PortSpace.UDP,),
    PortSpace.IPOIB: (PortSpace.IPOIB,),
}

_NO_GID = Gid()
_NO_IPOIB = "port space IPOIB needs an InfiniBand interface"


class ResolvingId:
    """The part of an id that finds out where; :class:`rdmacm.soft.cm.connecting.SoftId` is the whole."""

    __slots__ = (
        "__weakref__",
        "_device",
        "_lookup",
        "_owner",
        "_port_owner",
        "_provider",
        "_steps",
        "_wait_started",
        "cm",
        "dgid",
        "gid_index",
        "local_addr",
        "options",
        "paths",
        "peer_addr",
        "pkey",
        "port_num",
        "port_space",
        "qp_type",
        "queue",
        "sgid",
        "state",
        "verbs",
    )

    def __init__(
        self, provider: SoftProvider, queue: SoftQueue, owner: object | None, port_space: int, qp_type: int
    ) -> None:
        self._provider = provider
        self._owner: Callable[[], object | None] = _nobody if owner is None else weakref.ref(owner)
        self.queue = queue
        queue.ids[self] = None
        self.port_space = port_space if type(port_space) is PortSpace else PortSpace(port_space)
        self.qp_type = qp_type
        self.state = State.IDLE
        self.options = IdOptions()
        self.local_addr: Address | None = None
        self.peer_addr: Address | None = None
        self.verbs: Context | None = None
        self.port_num = 0
        self.gid_index = 0
        self.sgid = self.dgid = _NO_GID
        self.pkey = 0
        self.paths: tuple[PathRecord, ...] = ()
        self._device: DeviceView | IbView | None = None
        #: Who connects it: the RoCE devices' connection manager, or its InfiniBand port's.
        self.cm = provider.cm
        self._port_owner: PortOwner | None = None
        self._lookup: Lookup | IbLookup | None = None
        #: Step, nanoseconds, and what is put into words only when somebody asks.
        self._steps: list[tuple[str, int, object]] = []
        self._wait_started = 0

    # -- small things ---------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[Step, ...]:
        found = [*self._steps, *(self._lookup.steps if self._lookup else ())]
        order = {"bind": 0, "route": 1, "select": 2, "neighbour": 3, "path": 4}
        found.sort(key=lambda step: order.get(step[0], 9))
        return tuple(Step(name, ns / 1000, str(detail)) for name, ns, detail in found)

    def _note(self, name: str, started: int, detail: object) -> None:
        """A step has been taken, perhaps again."""
        self._steps = [step for step in self._steps if step[0] != name]
        self._steps.append((name, perf_counter_ns() - started, detail))

    def _may(self, trigger: Trigger) -> bool:
        """Whether the state allows it."""
        return trigger in TRANSITIONS[self.state]

    def _move(self, trigger: Trigger) -> None:
        """Change state, or refuse the user's call."""
        after = TRANSITIONS[self.state].get(trigger)
        if after is None:
            raise self._refuse(trigger.value)
        self.state = after

    def _refuse(self, call: str) -> CmStateError:
        hints = {
            State.DEVICE_REMOVAL: "destroy the id and start over",
            State.IDLE: "bind_addr() or resolve_addr() first",
            State.ADDR_BOUND: "resolve_addr() first",
            State.ADDR_QUERY: "wait for ADDR_RESOLVED or ADDR_ERROR",
            State.ROUTE_QUERY: "wait for ROUTE_RESOLVED or ROUTE_ERROR",
        }
        return CmStateError(
            refusal(self.state), f"not allowed in state {self.state.name}", call, hint=hints.get(self.state)
        )

    def _post(
        self,
        kind: CmEventType,
        status: int = 0,
        explain: Callable[[], Explanation] | None = None,
        message: str = "",
    ) -> None:
        owner = self._owner()
        if owner is not None:
            self.queue.post(QueuedEvent(owner, kind, status, 0, explain, message))

    def _attach(self, view: DeviceView | IbView, pkey: int = DEFAULT_PKEY) -> None:
        if self._device is not None:
            self._provider.detach(self, self._device)
        self._device = view
        self._provider.attach(self, view)
        self.verbs = self._provider.context_of(view)
        self.cm = view.subnet.cm if isinstance(view, IbView) else self._provider.cm
        self.port_num = view.port_num
        self.pkey = pkey

    def _detach(self) -> None:
        if self._device is not None:
            self._provider.detach(self, self._device)
        self._device = self.verbs = None
        self.cm = self._provider.cm
        self.port_num = self.gid_index = self.pkey = 0
        self.sgid = _NO_GID

    # -- binding --------------------------------------------------------------------------------------

    def bind_addr(self, address: Address) -> None:
        with self._provider.lock:
            self._provider.check_fork("bind_addr")
            if not self._may(Trigger.BIND_ADDR):
                raise self._refuse(Trigger.BIND_ADDR.value)
            self._bind(address)
            self._move(Trigger.BIND_ADDR)

    def _bind(self, address: Address) -> None:
        """Device first, then port, as the kernel does; whatever fails leaves the id as it was."""
        started = perf_counter_ns()
        try:
            bound: Address = self._bind_ib(address) if isinstance(address, SockAddrIB) else self._bind_ip(address)
        except RdmaError as error:  # the port
            self._detach()
            error.address = str(address)
            error.explanation = self._bind_failure(address, error, perf_counter_ns() - started)
            raise
        except Failure as failure:  # the device
            self._detach()
            refused = cm_error(failure.errno, failure.message, "bind_addr", str(address), failure.hint)
            refused.explanation = self._bind_failure(address, refused, perf_counter_ns() - started)
            raise refused from None
        self.local_addr = bound
        self._steps = [("bind", perf_counter_ns() - started, bound)]

    @staticmethod
    def _bind_failure(address: Address, error: RdmaError, nanoseconds: int) -> Explanation:
        return Explanation(
            node=address.host if isinstance(address, InetAddr) else str(address.addr),
            service=str(address.port),
            provider="soft",
            steps=(Step("bind", nanoseconds / 1000, str(error.strerror)),),
            error="bind",
            errno=error.errno or 0,
            errno_name=error.code_name,
            message=str(error.strerror),
            hint=error.hint,
        )

    def _bind_ip(self, address: InetAddr) -> InetAddr:
        if address.is_link_local and not address.scope_id:
            raise Failure(errno.EINVAL, "bind", "a link-local address needs a scope", f"{address.host}%INTERFACE")
        specific = not address.is_any
        if specific:
            self._bind_device(address)
        afonly = self.options.afonly
        if afonly is None:
            afonly = address.family == AF_INET or bool(self._provider.network.setting("net/ipv6/bindv6only", 0)[0])
        family, ip, port, flowinfo, scope_id = address
        port = self._take_port(self.port_space, port, family, ip, address.link, not specific, afonly)
        return InetAddr(family, ip, port, flowinfo, scope_id)

    def _bind_device(self, address: InetAddr) -> None:
        host = self._provider.host()
        rows = [
            (view, row)
            for view, row in host.by_ip.get(address.ip, ())
            if not address.link or view.ifindex == address.link
        ]
        if not rows and address.family == AF_INET and address.is_loopback and host.loopback is not None:
            # All of 127/8 is ours although only 127.0.0.1 is configured.
            rows = [(host.loopback, row) for row in host.loopback.rows if len(row.gid.ip) == 4][:1]
        if not rows:
            scope = f" on {host.interface_name(address.link)}" if address.link else ""
            raise Failure(
                errno.EADDRNOTAVAIL,
                "bind",
                f"{address.host} is not an address of this host{scope}",
                "'rdmacm devices' for the addresses there are, or the wildcard address",
            )
        if self.port_space is PortSpace.IPOIB:
            raise Failure(errno.EINVAL, "bind", _NO_IPOIB, "port space UDP")
        view, row = rows[0]
        self._attach(view)
        self.sgid, self.gid_index = row.gid, row.gid_index

    def _bind_ib(self, address: SockAddrIB) -> SockAddrIB:
        if any(address.addr):
            self._bind_gid(address)
        for space in _IB_SPACES[self.port_space]:
            if (address.sid ^ service_id(space, 0)) & address.sid_mask & ~0xFFFF == 0:
                break
        else:
            raise Failure(
                errno.EPROTONOSUPPORT,
                "bind",
                f"service id 0x{address.sid:x} is of another port space than the id's, {self.port_space.name}",
                f"service ids from 0x{service_id(self.port_space, 0):x}",
            )
        port = self._take_port(space, address.port, AF_IB, bytes(address.addr), 0, True, bool(self.options.afonly))
        return SockAddrIB(
            address.addr, service_id(space, port), ALL_BITS_64, address.pkey, address.flowinfo, address.scope_id
        )

    def _bind_gid(self, address: SockAddrIB) -> None:
        provider, gid = self._provider, address.addr
        for view in provider.ib.views():
            for row in view.rows:
                if row.gid == gid:
                    if not view.has_pkey(address.pkey):
                        raise Failure(
                            errno.EINVAL,
                            "bind",
                            f"P_Key 0x{address.pkey:04x} is not in the table of {view.device.name} port {row.port_num}",
                            "one of " + ", ".join(f"0x{pkey:04x}" for pkey in view.port.pkeys),
                        )
                    self._attach(view, address.pkey)
                    self.sgid, self.gid_index = gid, row.gid_index
                    return
        for roce in provider.host().devices:
            if any(row.gid == gid for row in roce.rows):
                raise Failure(
                    errno.ENODEV,
                    "bind",
                    f"GID {gid} is on {roce.device.name}, which is RoCE; AF_IB is for InfiniBand ports",
                    "the IP address the GID stands for",
                )
        raise Failure(errno.ENODEV, "bind", f"no InfiniBand port has the GID {gid}; {provider.ib.why_not()}")

    def _take_port(
        self, space: PortSpace, port: int, family: int, ip: bytes, scope_id: int, is_any: bool, afonly: bool
    ) -> int:
        owner = PortOwner(space, port, family, ip, scope_id, is_any, self.options.reuseaddr, afonly)
        self._provider.ports.bind(owner)
        self._port_owner = owner
        return owner.port

    # -- resolving an address -------------------------------------------------------------------------

    def resolve_addr(self, source: Address | None, destination: Address, timeout_ms: int) -> None:
        with self._provider.lock:
            self._provider.check_fork("resolve_addr")
            if not self._may(Trigger.RESOLVE_ADDR):
                raise self._refuse(Trigger.RESOLVE_ADDR.value)
            if timeout_ms < 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is negative", "resolve_addr")
            if source is not None and _family(source) != _family(destination):
                raise cm_error(
                    errno.EINVAL,
                    f"source {source} is of another address family",
                    "resolve_addr",
                    str(destination),
                    "a source of the destination's family, or none",
                )
            origin = "bound"
            if self.state is State.IDLE:
                self._bind(source or _wildcard(destination))
                self._move(Trigger.BIND_ADDR)
                origin = "given" if source is not None else "bound"
            else:
                self._check_bound(source, destination)
            if isinstance(destination, SockAddrIB):
                self._resolve_gid(destination)
            else:
                self._resolve(destination, origin, timeout_ms)

    def _check_bound(self, source: Address | None, destination: Address) -> None:
        """A bound id has its source already: another one cannot be honoured, so it is refused."""
        local = self.local_addr
        assert local is not None
        if _family(local) != _family(destination):
            raise cm_error(
                errno.EINVAL,
                f"the id is bound to {local}, of another address family",
                "resolve_addr",
                str(destination),
                "a new id",
            )
        if source is None:
            return
        if _host(source) != _host(local) or source.port not in (0, local.port):
            raise cm_error(
                errno.EINVAL,
                f"source {source} was given, but the id is bound to {local}",
                "resolve_addr",
                str(destination),
                "no source, or a new id",
            )

    def _resolve_gid(self, destination: SockAddrIB) -> None:
        """There is no neighbour to wait for, so the outcome is there at once; it is an event all the same."""
        local, view = self.local_addr, self._device
        assert isinstance(local, SockAddrIB)
        self._move(Trigger.RESOLVE_ADDR)
        self._lookup = lookup = IbLookup(destination)
        self.peer_addr = destination
        try:
            lookup.choose(self._provider.ib, self._bound_port(view) if isinstance(view, IbView) else None)
        except Failure as failure:
            self._move(Trigger.ADDR_FAILED)
            raise self._failed(lookup, failure, "resolve_addr") from None
        assert lookup.view is not None and lookup.row is not None
        self._attach(lookup.view, destination.pkey)
        self.sgid, self.gid_index = lookup.row.gid, lookup.row.gid_index
        if not any(destination.addr):  # "this host", as for sockets
            self.peer_addr = destination = replace(destination, addr=self.sgid)
        self.dgid = destination.addr
        self.local_addr = replace(local, addr=self.sgid, pkey=destination.pkey)
        self._move(Trigger.ADDR_DONE)
        self._post(CmEventType.ADDR_RESOLVED)

    def _bound_port(self, view: IbView) -> tuple[IbView, GidEntry]:
        """The port the id is bound to, as it is now."""
        fresh = view.subnet.view()
        if fresh is None:
            raise Failure(errno.ENODEV, "select", f"the port is gone: {view.subnet.why()}", "'rdmacm devices'")
        row = next((row for row in fresh.rows if row.gid == self.sgid), None)
        if row is None:
            why = f"{fresh.device.name} port {fresh.port_num} does not have the GID {self.sgid} any more"
            raise Failure(errno.ENODEV, "select", why, "a new id")
        return fresh, row

    def _resolve(self, destination: InetAddr, origin: str, timeout_ms: int) -> None:
        if destination.is_any:  # "this host", as for sockets
            destination = InetAddr.loopback(destination.family, destination.port)
        local = self.local_addr
        assert isinstance(local, InetAddr)
        if destination.is_link_local and not destination.scope_id:
            scope = local.scope_id or (self._device.ifindex if self._device else 0)
            destination = destination._replace(scope_id=scope)
        self._move(Trigger.RESOLVE_ADDR)
        lookup = Lookup(
            self._provider.host(), destination, None if local.is_any else local, origin, self.options.tos or 0
        )
        self._lookup = lookup
        self.peer_addr = destination
        self._wait_started = perf_counter_ns()
        try:
            self._find(lookup)
        except Failure as failure:
            self._move(Trigger.ADDR_FAILED)
            if failure.step == "select" and failure.errno in (errno.ENODEV, errno.EINVAL):
                # Routed, but by no device that will do: the kernel finds that out afterwards, and reports it by event.
                explain = partial(self._explain_failure, lookup, failure)
                self._post(CmEventType.ADDR_ERROR, -failure.errno, explain, failure.message)
                return
            raise self._failed(lookup, failure, "resolve_addr") from None
        if not self._provider.pending.add(self, lookup, self._provider.clock() + timeout_ms / 1000):
            self.address_found(lookup)

    def _find(self, lookup: Lookup) -> None:
        resolver.find(
            self._provider.network,
            lookup.host,
            lookup.destination,
            lookup.source,
            lookup.origin,
            lookup.tos,
            self._device if isinstance(self._device, DeviceView) else None,
            lookup,
        )
        if self.port_space is PortSpace.IPOIB:
            raise Failure(errno.EINVAL, "select", _NO_IPOIB, "port space UDP")

    def _failed(self, lookup: Lookup | IbLookup, failure: Failure, call: str) -> RdmaError:
        """What a call raises that failed at once."""
        explanation = self._explain_failure(lookup, failure)
        return cm_error(failure.errno, failure.message, call, str(lookup.destination), failure.hint, explanation)

    def _explain_failure(self, lookup: Lookup | IbLookup, failure: Failure) -> Explanation:
        bind = tuple(Step(name, ns / 1000, str(detail)) for name, ns, detail in self._steps if name == "bind")
        return lookup.explain(None, failure, bind)

    def explain(self) -> Explanation:
        with self._provider.lock:
            if self._lookup is None:
                return Explanation(node=None, service=None, provider="soft", steps=self.steps)
            explanation = self._lookup.explain(None, None)
            path = self.paths[0] if self.paths else None
            return explanation.replace(
                steps=self.steps,
                path=None
                if path is None
                else {
                    "sgid": str(path.sgid),
                    "dgid": str(path.dgid),
                    "mtu": path.mtu_bytes,
                    **({"slid": path.slid, "dlid": path.dlid, "sl": path.sl} if path.dlid else {}),
                    "hop_limit": path.hop_limit,
                    "traffic_class": path.traffic_class,
                    "flow_label": path.flow_label,
                    "pkey": path.pkey,
                },
            )

    def address_found(self, lookup: Lookup) -> None:
        """The next hop is known: bind to the device and say so (also called by Pending)."""
        if lookup is not self._lookup or not self._may(Trigger.ADDR_DONE):
            return
        view, row, query, local = lookup.device, lookup.row, lookup.query, self.local_addr
        assert view is not None and row is not None and query is not None and isinstance(local, InetAddr)
        if lookup.next_hop is not None:
            state = lookup.neighbour.state.name.lower() if lookup.neighbour else "not visible"
            lookup.steps.append(("neighbour", perf_counter_ns() - self._wait_started, state))
        if self._device is not view:
            self._attach(view)
        self.sgid, self.gid_index = row.gid, row.gid_index
        self.dgid = Gid.from_ip(lookup.destination.ip)
        if local.is_any:
            scope = view.ifindex if is_link_local(query.source) else 0
            self.local_addr = InetAddr(local.family, query.source, local.port, 0, scope)
        self._move(Trigger.ADDR_DONE)
        self._post(CmEventType.ADDR_RESOLVED)

    def address_failed(self, lookup: Lookup, failure: Failure) -> None:
        """The resolution ended without a neighbour, or its ground gave way (called by Pending)."""
        if lookup is not self._lookup or not self._may(Trigger.ADDR_FAILED):
            return
        lookup.steps.append(("neighbour", perf_counter_ns() - self._wait_started, failure.message))
        self._move(Trigger.ADDR_FAILED)
        explain = partial(self._explain_failure, lookup, failure)
        self._post(CmEventType.ADDR_ERROR, -failure.errno, explain, failure.message)

    def reconsider(self, lookup: Lookup, deadline: float) -> None:
        """Something about the host has changed while this waited: look again, keep waiting where that is the answer."""
        host = self._provider.host_now()
        fresh = Lookup(host, lookup.destination, lookup.source, lookup.origin, lookup.tos)
        pending = self._provider.pending
        failure: Failure | None = None
        source = lookup.source
        if source is not None and not source.is_loopback and not host.owns(source.ip, source.link):
            failure = Failure(
                errno.EADDRNOTAVAIL,
                "route",
                f"source {source.host} was removed from this host while resolving",
                "a new id, with a source that is there",
            )
        else:
            try:
                self._find(fresh)
            except Failure as error:
                failure = error
        if failure is not None:
            pending.remove(self, lookup)
            lookup.steps += fresh.steps
            self.address_failed(lookup, failure)
        elif fresh.next_hop != lookup.next_hop:
            pending.remove(self, lookup)
            self._lookup = fresh
            if not pending.add(self, fresh, deadline):
                self.address_found(fresh)
        else:
            lookup.host, lookup.device, lookup.row, lookup.query = fresh.host, fresh.device, fresh.row, fresh.query

    # -- resolving a route ----------------------------------------------------------------------------

    def resolve_route(self, timeout_ms: int) -> None:
        with self._provider.lock:
            if not self._may(Trigger.RESOLVE_ROUTE):
                raise self._refuse(Trigger.RESOLVE_ROUTE.value)
            if timeout_ms <= 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is not positive", "resolve_route")
            local, peer, lookup = self.local_addr, self.peer_addr, self._lookup
            assert isinstance(local, InetAddr) and isinstance(peer, InetAddr) and isinstance(lookup, Lookup)
            started = perf_counter_ns()
            ack_timeout = self.options.ack_timeout
            lookup.tos = self.options.tos or 0
            try:
                path = self._provider.path_of(
                    lookup,
                    local.port,
                    service_id=service_id(self.port_space, peer.port),
                    lifetime=resolver.ROCE_PACKET_LIFETIME if ack_timeout is None else max(0, ack_timeout - 1),
                )
            except Failure as failure:
                raise self._failed(lookup, failure, "resolve_route") from None
            self.paths = (path,)
            self._note("path", started, "from the interface")
            # Nothing to wait for on RoCE: the query is answered as it is asked.
            self._move(Trigger.RESOLVE_ROUTE)
            self._move(Trigger.ROUTE_DONE)
            self._post(CmEventType.ROUTE_RESOLVED)

    # -- options --------------------------------------------------------------------------------------

    def set_option(self, level: int, name: int, value: int | bytes) -> None:
        with self._provider.lock:
            if level == OptionLevel.ID and name in (IdOption.TOS, IdOption.ACK_TIMEOUT):
                self._set_byte(IdOption(name), _number(value, 1, 0xFF))
            elif level == OptionLevel.ID and name == IdOption.REUSEADDR:
                self._set_reuseaddr(bool(_number(value, 4, 0x7FFFFFFF)))
            elif level == OptionLevel.ID and name == IdOption.AFONLY:
                self._set_afonly(bool(_number(value, 4, 0x7FFFFFFF)))
            elif level == OptionLevel.IB and name == IbOption.PATH:
                self._set_path(value)
            else:
                raise cm_error(errno.ENOSYS, f"no option {name} at level {level}", "set_option")

    def _option_state(self, option: str) -> None:
        if self.state not in OPTION_STATES[option]:
            raise CmStateError(refusal(self.state), f"{option} cannot be set in state {self.state.name}", "set_option")

    def _set_byte(self, name: IdOption, value: int) -> None:
        self._option_state(name.name)
        if name is IdOption.TOS:
            self.options.tos = value
        elif self.qp_type != QPType.RC:
            raise cm_error(errno.EINVAL, "ACK_TIMEOUT is for ids whose QP type is RC", "set_option")
        else:
            self.options.ack_timeout = value

    def _set_reuseaddr(self, on: bool) -> None:
        self._option_state("REUSEADDR on" if on else "REUSEADDR off")
        self.options.reuseaddr = on
        if on and self._port_owner is not None:
            self._provider.ports.share(self._port_owner)

    def _set_afonly(self, on: bool) -> None:
        self._option_state("AFONLY")
        if self._port_owner is not None:
            self._provider.ports.set_afonly(self._port_owner, on)
        self.options.afonly = on

    def _set_path(self, value: int | bytes) -> None:
        if not isinstance(value, bytes | bytearray | memoryview) or not value or len(value) % 72:
            raise cm_error(errno.EINVAL, "IB_PATH takes an array of 72-byte ibv_path_data", "set_option")
        if not self._may(Trigger.SET_PATH):
            raise self._refuse(Trigger.SET_PATH.value)
        for start in range(0, len(value), 72):
            data = PathData.unpack(value[start : start + 72])
            if data.flags == PATH_FLAGS:
                self.paths = (data.path,)
                self._move(Trigger.SET_PATH)
                self._post(CmEventType.ROUTE_RESOLVED)
                return
        wanted = PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL
        raise cm_error(errno.EINVAL, f"no record with flags {int(wanted)} (GMP, PRIMARY, BIDIRECTIONAL)", "set_option")

    # -- the device changes ---------------------------------------------------------------------------

    def device_changed(self, before: DeviceView, after: DeviceView | None) -> None:
        """The device this id is bound to is gone, or its interface or addresses are others."""
        if after is None:
            if self._may(Trigger.DEVICE_GONE):
                self._stop_waiting()
                self._move(Trigger.DEVICE_GONE)
                name = before.device.name
                self._post(CmEventType.DEVICE_REMOVAL, 0, None, f"{name}: interface {before.interface.name} is gone")
            return
        self._device = after
        for status, message in self._address_changes(before, after):
            self._post(CmEventType.ADDR_CHANGE, -status, None, message)
            return

    def _address_changes(self, before: DeviceView, after: DeviceView) -> list[tuple[int, str]]:
        name = after.interface.name
        changes = []
        if before.interface.is_running and not after.interface.is_running:
            changes.append((errno.ENETDOWN, f"interface {name} went down"))
        had = any(row.gid == self.sgid for row in before.rows)
        if had and not any(row.gid == self.sgid for row in after.rows):
            changes.append((errno.EADDRNOTAVAIL, f"{self.sgid} was removed from interface {name}"))
        if before.interface.address != after.interface.address:
            changes.append((0, f"interface {name} has another hardware address"))
        return changes

    # -- the end --------------------------------------------------------------------------------------

    def _stop_waiting(self) -> None:
        """Nothing that is under way for this id matters any more."""
        if isinstance(self._lookup, Lookup):
            self._provider.pending.remove(self, self._lookup)

    def migrate(self, queue: EventQueue) -> None:
        with self._provider.lock:
            if not self._may(Trigger.MIGRATE):
                raise self._refuse(Trigger.MIGRATE.value)
            owner, old = self._owner(), self.queue
            assert isinstance(queue, type(old))
            old.ids.pop(self, None)
            queue.ids[self] = None
            self.queue = queue
            if owner is not None:
                for event in old.take(owner):
                    queue.post(event)

    def destroy(self) -> None:
        with self._provider.lock:
            if self.state is State.DESTROYING:
                return
            self._stop_waiting()
            self._move(Trigger.DESTROY)
            self._detach()
            if self._port_owner is not None:
                self._provider.ports.release(self._port_owner)
                self._port_owner = None
            self.queue.ids.pop(self, None)


def _nobody() -> None:
    """The owner of an id that has none (yet)."""


def _family(address: Address) -> int:
    return AF_IB if isinstance(address, SockAddrIB) else address.family


def _host(address: Address) -> bytes:
    return bytes(address.addr) if isinstance(address, SockAddrIB) else address.ip


def _wildcard(destination: Address) -> Address:
    """Where an id is bound that is given no source."""
    if isinstance(destination, InetAddr):
        return InetAddr.any(destination.family)
    return SockAddrIB(pkey=destination.pkey)


def _number(value: int | bytes, size: int, limit: int) -> int:
    """An option's value: a number, or the C representation of one."""
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise cm_error(errno.EINVAL, f"the option has {size} bytes, not {len(value)}", "set_option")
        value = int.from_bytes(value, sys.byteorder)
    if isinstance(value, float) or not isinstance(value, int) or not 0 <= value <= limit:
        raise cm_error(errno.EINVAL, f"the option takes 0..{limit}, not {value!r}", "set_option")
    return int(value)
