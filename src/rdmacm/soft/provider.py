"""The software provider of one network namespace: its devices, its ids, its connections, its timers.

Everything happens under one lock, in the thread that calls. :meth:`SoftProvider.progress` is the heart: it takes in
what the network reports and delivers, and lets timers fire; whoever waits calls it. Descriptors (a netlink
socket or two, the port table, the wire) are opened at first use and closed with the last event channel.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, TypeVar

from rdmacm.address import InetAddr, SockAddrIB, is_link_local
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.net.types import Change, Network
from rdmacm.progress.timers import Timer, Timers
from rdmacm.progress.waiting import Pollable, Waiters
from rdmacm.proto.sa import PathRecord
from rdmacm.provider import EventQueue, FoundServices, Owner, RouteChoice, Tap
from rdmacm.resolution import lookup as resolver
from rdmacm.resolution.hosts import PORT_NUM, DeviceView, HostView, read_host
from rdmacm.resolution.neighbours import Pending
from rdmacm.soft.cm.connecting import SoftId
from rdmacm.soft.cm.identifier import ResolvingId
from rdmacm.soft.cm.manager import ConnectionManager
from rdmacm.soft.device.device import SoftDevice
from rdmacm.soft.device.transport import Transport
from rdmacm.soft.entropy import DrawnAhead
from rdmacm.soft.event_queue import SoftQueue
from rdmacm.soft.helper import Helper
from rdmacm.soft.ib.ports import IbDevice, IbHost, IbLookup, IbView
from rdmacm.soft.port_table import PortTable
from rdmacm.soft.wire.base import Wire
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.verbs.device import Context, Device

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

__all__ = ["SoftProvider"]

T = TypeVar("T")

_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)
#: Polls in vain after which others may have the processor: where they are scarce, the peer may be waiting for this one.
_PATIENCE = 16

#: Seconds between two times that somebody makes progress who only takes what waits; less than the helper's patience.
_PROGRESS_INTERVAL = 0.001

#: Seconds that a path may take which getaddrinfo asks for, as rdma_create_ep(3) allows a route.
ROUTE_TIMEOUT = 2.0

#: Seconds between two looks at what the network reports, where nobody waits for that. Who needs the host as it is at
#: this moment looks himself.
_LOOK_INTERVAL = 0.001


class SoftProvider:
    """See :class:`rdmacm.provider.Provider`.

    ``network``, ``wire`` and ``clock`` (seconds, monotonic) are the world; ``namespace`` names the shared port table,
    and ``ports`` replaces it; ``random`` is where unpredictable numbers come from. ``infiniband`` are the InfiniBand
    ports there are beside the devices of the network's interfaces.
    """

    name = "soft"

    def __init__(
        self,
        network: Network,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        ports: PortTable | None = None,
        wire: Wire | None = None,
        random: Random | None = None,
        infiniband: Sequence[MadTransport] = (),
    ) -> None:
        self.network = network
        self.clock = clock
        self.random = random or DrawnAhead()
        self.lock = threading.RLock()
        self.abandoned = False
        self.pending = Pending(self)
        self.waiters = Waiters(self)
        self.pollables: set[Pollable] = set()
        self.helper = Helper(self)
        #: Grows whenever somebody makes progress.
        self.progress_count = 0
        #: When whoever takes what waits has to make progress as well, on ``clock``.
        self.progress_due = 0.0
        self._look_due = 0.0
        self._polls = 0
        self._in_vain = 0
        self.transport = Transport(self.lock, clock, self.call_at, wire or UdpWire(), self.random)
        self.transport.on_open = self._wire_opened
        self.cm = ConnectionManager(self, self.transport)
        self.ib = IbHost(self, infiniband)
        self._namespace = namespace
        self._given_ports = ports
        self._ports = ports
        self._host: HostView | None = None
        self._monitored = False
        #: Channels and completion queues in use: with the last one, every descriptor goes.
        self._users: dict[object, None] = {}
        #: The ids of each interface, in a dict for its order: runs on a simulated network are to repeat.
        self._bound: dict[int, dict[ResolvingId, None]] = {}
        self._opened: dict[int, SoftDevice | IbDevice] = {}
        self._contexts: dict[tuple[int, str], Context] = {}
        self._timers = Timers()
        self._link_facts: dict[tuple[int, int], tuple[int, int]] = {}

    # -- what the API asks ----------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        with self.lock:
            return tuple(view.device for view in self._views())

    def _views(self) -> list[DeviceView | IbView]:
        return [*self.host().devices, *self.ib.views()]

    def open_queue(self) -> SoftQueue:
        with self.lock:
            self.check_fork("create_event_channel")
            queue = SoftQueue(self)
            self.use(queue)
            return queue

    @property
    def tap(self) -> Tap | None:
        """What is shown the packets that pass."""
        return self.transport.wire.tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        self.transport.wire.tap = tap

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> SoftId:
        self.check_fork("create_id")
        assert isinstance(queue, SoftQueue)
        return SoftId(self, queue, owner, port_space, qp_type)

    def check_fork(self, call: str) -> None:
        """Refuse what was made before fork(2): its descriptors are the parent's."""
        if self.abandoned:
            raise cm_error(errno.EBADF, "the channel was made before fork(2)", call, hint="a channel of this process")

    def find_route(self, destination: InetAddr, source: InetAddr | None) -> RouteChoice | None:
        with self.lock:
            try:
                lookup = resolver.find(self.network, self.host(), destination, source, "given")
                path = self.path_of(lookup, 0)
            except resolver.Failure:
                return None
            assert lookup.device is not None and lookup.row is not None and lookup.query is not None
            chosen = InetAddr(
                destination.family,
                lookup.query.source,
                source.port if source else 0,
                0,
                lookup.device.ifindex if is_link_local(lookup.query.source) else 0,
            )
            return RouteChoice(chosen, lookup.device.device.name, PORT_NUM, lookup.row.gid_index, path)

    def find_path(
        self, destination: SockAddrIB, source: SockAddrIB | None, like: PathRecord | None
    ) -> RouteChoice | None:
        with self.lock:
            lookup = IbLookup(destination)
            bound = None
            if source is not None and any(source.addr):
                bound = self.ib.owner_of(source.addr)
                if bound is None:
                    return None
            try:
                lookup.choose(self.ib, bound)
            except resolver.Failure:
                return None
            view, row = lookup.view, lookup.row
            assert view is not None and row is not None
        ask = partial(view.subnet.ask_paths, view, row.gid, destination, ROUTE_TIMEOUT, like=like)
        paths: tuple[PathRecord, ...] = self._asked(view, ask)
        if not paths:
            return None
        local = replace(source or SockAddrIB(pkey=destination.pkey), addr=row.gid)
        return RouteChoice(local, view.device.name, view.port_num, row.gid_index, paths[0])

    def find_services(self, service: str) -> FoundServices | None:
        with self.lock:
            views = [view for view in self.ib.views() if view.is_active and view.rows]
        for view in views:
            records = self._asked(view, partial(view.subnet.ask_services, view, service))
            if records:
                return FoundServices(view.rows[0].gid, view.device.name, view.port_num, records)
        return None

    def _asked(
        self, view: IbView, ask: Callable[[Callable[[tuple[T, ...], resolver.Failure | None], None]], int]
    ) -> tuple[T, ...]:
        """Ask a subnet administrator and wait for what it knows; nothing where it cannot be asked or says nothing."""
        answers: list[tuple[T, ...]] = []
        user = object()
        self.use(user)
        try:
            with self.lock:
                view.subnet.view()  # open
                try:
                    query = ask(lambda found, _: answers.append(found))
                except RdmaError:
                    return ()
            try:
                return self.drive(lambda: answers, None)[0]
            finally:
                with self.lock:
                    view.subnet.cancel(query)
        finally:
            self.closed(user)

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        with self.lock:
            lookup = resolver.Lookup(self.host(), destination, source, "given", 0)
            failure: resolver.Failure | None = None
            try:
                resolver.find(self.network, lookup.host, destination, source, "given", lookup=lookup)
            except resolver.Failure as error:
                failure = error
            return lookup.explain(None, failure)

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        with self.lock:
            for view, _ in self.host().by_ip.get(address.ip, ()):
                if not address.link or view.ifindex == address.link:
                    return view.device.name, PORT_NUM
        return None

    # -- the host as it is now ------------------------------------------------------------------------

    def host(self) -> HostView:
        """The current picture, after taking in what has changed since the last look."""
        if self._host is None:
            self._monitored = self.network.fileno() >= 0  # listen first, or a change in between would be missed
            self._host = read_host(self.network)
        elif not self._monitored:
            self._reread()
        elif (change := self.network.changes()) is not None:
            self._take_in(change)
        assert self._host is not None
        return self._host

    def host_now(self) -> HostView:
        """The current picture, without another look."""
        return self._host if self._host is not None else self.host()

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that are readable when :meth:`progress` has something to do."""
        monitor = self.network.fileno()
        wire = tuple(self.transport.filenos())
        if self.ib.subnets:
            wire += self.ib.filenos()
        return (monitor, *wire) if monitor >= 0 else wire

    def device_at(self, ifindex: int) -> Device | None:
        """The device on an interface, as it is now, whatever its name has become."""
        with self.lock:
            view = self.ib.view_at(ifindex) if ifindex < 0 else self.host().by_ifindex.get(ifindex)
            return view.device if view else None

    def device_now(self, ifindex: int) -> Device | None:
        """The device on an interface in the current picture, without another look."""
        view = self.host_now().by_ifindex.get(ifindex)
        return view.device if view else None

    @property
    def ports(self) -> PortTable:
        """The namespace's ports."""
        if self._ports is None:
            low, high = self.network.setting("net/ipv4/ip_local_port_range", 32768, 60999)
            self._ports = PortTable(self._namespace, (low, high))
        return self._ports

    def path_of(self, lookup: resolver.Lookup, src_port: int, **more: int) -> PathRecord:
        """The path record of a finished lookup."""
        assert lookup.device is not None
        view, family = lookup.device, lookup.destination.family
        facts = self._link_facts.get((view.ifindex, family))
        if facts is None:  # files under /sys and /proc: slow to read, and told of by link notifications
            facts = self._link_facts[view.ifindex, family] = (
                resolver.link_rate(self.network, view),
                resolver.default_hop_limit(self.network, family, view.interface.name),
            )
        return resolver.make_path(lookup, facts[0], facts[1], src_port, **more)

    # -- progress -------------------------------------------------------------------------------------

    def progress(self, wanted: Sized = ()) -> None:
        """Take in what the network reports and delivers, and let timers that are due fire.

        ``wanted`` is what the caller hopes to find filled (:meth:`Transport.progress`).
        """
        if self.abandoned:
            return
        self.progress_count += 1
        now = self.clock()
        self.progress_due = now + _PROGRESS_INTERVAL
        if self._host is not None and (now >= self._look_due or self.clock is not time.monotonic or len(self.pending)):
            self._look_due = now + _LOOK_INTERVAL
            self.host()
        self.transport.progress(wanted)
        self.ib.progress()
        self.fire_timers()

    def poll(self, wanted: Sized = ()) -> bool:
        """Progress for a caller that polls: what else the network reports waits for one call in a hundred.

        False where there was nothing to do.
        """
        self._polls += 1
        if self._polls % 128 == 0:
            with self.lock:
                self.progress(wanted)
            return True
        self.progress_count += 1
        if self.transport.progress(wanted, True):
            self._in_vain = 0
            return True
        self._in_vain += 1
        if self._in_vain % _PATIENCE == 0 and _yield is not None:
            _yield()
        return False

    def acknowledge(self) -> None:
        """Send what peers are owed, for a caller that makes no progress."""
        if self.transport.owing:
            with self.lock:
                self.progress_count += 1
                self.transport.acknowledge()

    def fire_timers(self) -> None:
        """Let timers that are due fire."""
        if self._timers.fire(self.clock()):
            # The descriptors have fired: they stay readable until they are set anew.
            deadline = self._timers.deadline
            for pollable in self.pollables:
                pollable.rearm(deadline)

    def call_at(self, when: float, callback: Callable[[float], None]) -> Timer:
        """Have ``callback(now)`` called once ``when`` has come."""
        before = self._timers.deadline
        timer = self._timers.add(when, callback)
        if before is None or when < before:
            for pollable in self.pollables:
                pollable.rearm(when)
            self.waiters.wake()
            self.helper.wake()
        return timer

    def next_deadline(self) -> float | None:
        """When :meth:`progress` wants to be called at the latest, on :attr:`clock`."""
        return self._timers.deadline

    def drive(self, done: Callable[[], T], timeout: float | None, wanted: Sized = ()) -> T:
        """Wait until ``done()`` returns something true (:class:`rdmacm.progress.waiting.Waiters`)."""
        return self.waiters.drive(done, timeout, wanted)

    def descriptors_changed(self) -> None:
        """:meth:`filenos` has others than before."""
        for pollable in self.pollables:
            pollable.watch()
        self.waiters.wake()
        self.helper.wake()

    def ib_opened(self) -> None:
        """An InfiniBand port has a descriptor now."""
        if self.in_use:
            self.descriptors_changed()
            if self.ib.filenos():  # not where time is virtual
                self.helper.start()

    def _wire_opened(self) -> None:
        self.descriptors_changed()
        if self.transport.filenos():
            self.helper.start()

    def _take_in(self, change: Change) -> None:
        if change.links or change.lost:
            self._reread()
        if change.lost or change.links or change.routes:
            self.pending.reconsider()
        for neighbour in change.neighbours:
            self.pending.neighbour_changed(neighbour)

    def _reread(self) -> None:
        before = self._host
        self._host = after = read_host(self.network, before)
        self._link_facts.clear()
        if before is None:
            return
        for view in before.devices:
            now = after.by_ifindex.get(view.ifindex)
            if now is None or now.interface != view.interface or now.rows != view.rows:
                for bound in list(self._bound.get(view.ifindex, ())):
                    bound.device_changed(view, now)

    def attach(self, bound: ResolvingId, view: DeviceView | IbView) -> None:
        """An id is bound to a device from now on."""
        self._bound.setdefault(view.ifindex, {})[bound] = None

    def detach(self, bound: ResolvingId, view: DeviceView | IbView) -> None:
        """An id is no longer."""
        ids = self._bound.get(view.ifindex)
        if ids is not None:
            ids.pop(bound, None)
            if not ids:
                del self._bound[view.ifindex]

    # -- devices in use -------------------------------------------------------------------------------

    def open_device(self, name: str) -> SoftDevice | IbDevice:
        with self.lock:
            self.check_fork("open_device")
            for view in self._views():
                if view.device.name == name:
                    return self.open_device_at(view.ifindex)
        raise cm_error(errno.ENODEV, "there is no such device", "open_device", name, "'rdmacm devices' lists them")

    def context_of(self, view: DeviceView | IbView) -> Context:
        """The open device that all ids share which are bound to it under its present name."""
        key = view.ifindex, view.device.name
        context = self._contexts.get(key)
        if context is None:
            ifindex = view.ifindex
            context = self._contexts[key] = Context(
                view.device.name, partial(self.device_at, ifindex), partial(self.open_device_at, ifindex)
            )
        return context

    def open_device_at(self, ifindex: int) -> SoftDevice | IbDevice:
        """The device on an interface, to be used."""
        with self.lock:
            device = self._opened.get(ifindex)
            if device is None:
                picture = self.device_at(ifindex)
                if picture is None:
                    raise cm_error(errno.ENODEV, "the device has been removed", "open_device")
                device = IbDevice(picture.name) if ifindex < 0 else SoftDevice(self, picture.name, ifindex)
                self._opened[ifindex] = device
            return device

    # -- the end --------------------------------------------------------------------------------------

    def use(self, user: object) -> None:
        """A channel or completion queue is in use from now on."""
        with self.lock:
            if not self._users:
                self.network.open()  # here and now: the thread may be in another namespace later
            self._users[user] = None

    @property
    def in_use(self) -> bool:
        """Whether a channel or completion queue is."""
        return bool(self._users)

    def leave(self) -> None:
        """The process ends: destroy the ids that are left. What needs a thread has to be over before threads are."""
        with self.lock:
            for user in list(self._users):
                if isinstance(user, SoftQueue):
                    user.close()
            self.helper.stop()
        self.helper.join()

    def closed(self, user: object) -> None:
        """It is not used any more."""
        with self.lock:
            if self._users.pop(user, self) is None and not self._users:
                self._release()

    def retire(self) -> bool:
        """Let go of everything if nothing is in use; whether that was so."""
        with self.lock:
            if not self._users:
                self._release()
            return not self._users

    def _release(self) -> None:
        self.helper.stop()
        self.cm.close()
        self.ib.close()
        self.transport.close()
        self.network.close()
        self.waiters.close()
        if self._ports is not None:
            self._ports.close()
            self._ports = self._given_ports
        self._host = None
        self._contexts.clear()
        self._timers.clear()
        self._link_facts.clear()

    def abandon(self) -> None:
        """In a child of fork(2): close what is shared with the parent, and refuse what was made before."""
        self.lock = threading.RLock()
        self.abandoned = True
        # Whoever sets or clears a wake-up here would do it to the parent's threads.
        self.helper.abandon()
        self.waiters.abandon()
        for pollable in list(self.pollables):
            pollable.close()
        if isinstance(self.random, DrawnAhead):
            self.random.forget()
        self.network.close()
        self.ib.abandon()
        self.transport.abandon()
        if self._ports is not None:
            self._ports.abandon()
