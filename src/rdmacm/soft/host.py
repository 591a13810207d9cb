"""The host that the soft provider's ids live on: its devices, ports and connection managers, as they are now.

:class:`SoftHost` is what an id takes: the pictures that a resolution reads, the tables that bound ids are in, and what
carries connections. It takes in what the network reports, and drives the wire; :mod:`rdmacm.soft.provider` is the API
around it.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence, Sized
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from rdmacm.errors import cm_error
from rdmacm.net.types import Change, Network
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.sa import PathRecord
from rdmacm.resolution import lookup as resolver
from rdmacm.resolution.hosts import DeviceView, HostView
from rdmacm.resolution.infiniband import IbView
from rdmacm.resolution.neighbours import PendingNeighbours
from rdmacm.soft.connection_manager import ConnectionManager
from rdmacm.soft.device.device import SoftDevice
from rdmacm.soft.device.multiplexer import QPMultiplexer
from rdmacm.soft.devices import read_host
from rdmacm.soft.helper import Helper
from rdmacm.soft.ib.ports import IbDevice, IbHost
from rdmacm.soft.port_table import PortTable
from rdmacm.soft.wire.base import Wire
from rdmacm.verbs.device import Context, Device

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

__all__ = ["BoundId", "SoftHost"]

#: Seconds between two looks at what the network reports. A resolution looks at once.
_LOOK_INTERVAL = 0.001


class BoundId(Protocol):
    """An id that is bound to a device."""

    def device_changed(self, before: DeviceView, after: DeviceView | None) -> None:
        """The device is gone (None), or its interface or its GIDs are not what they were."""


class SoftHost:
    """See the module. Used with the runtime's lock held; the runtime's :class:`rdmacm.progress.runtime.Driver`."""

    #: The provider's name, in explanations.
    provider_name = "soft"

    def __init__(
        self,
        runtime: Runtime,
        network: Network,
        wire: Wire,
        random: Random,
        *,
        namespace: str = "",
        ports: PortTable | None = None,
        infiniband: Sequence[MadTransport] = (),
    ) -> None:
        self.runtime = runtime
        self.network = network
        self.random = random
        #: The RoCE devices' queue pairs, on the wire.
        self.mux = QPMultiplexer(runtime, wire, random)
        self.mux.on_open = self._wire_opened
        #: The RoCE devices' connection manager; each InfiniBand port has its own (:attr:`ib`).
        self.cm = ConnectionManager(runtime, random, self.mux.gsi)
        self.ib = IbHost(runtime, random, infiniband, self._infiniband_opened)
        self.neighbours = PendingNeighbours(runtime, network)
        self.helper = Helper(runtime, self.mux)
        #: Names the port table that the processes of a network namespace share.
        self._namespace = namespace
        #: A port table given by the caller, which is never closed for good.
        self._given_ports = ports
        self._ports = ports
        #: The current picture; None before the first look.
        self._view: HostView | None = None
        #: Whether the network reports changes; otherwise each look reads everything.
        self._is_monitored = False
        #: On the runtime's clock: when to look at what the network reports.
        self._look_due = 0.0
        #: The ids of each interface. Dicts keep the order, so that a simulated run repeats.
        self._bound: dict[int, dict[BoundId, None]] = {}
        #: Devices in use, by interface index.
        self._devices: dict[int, SoftDevice | IbDevice] = {}
        #: Open devices that ids share, by interface index and name.
        self._contexts: dict[tuple[int, str], Context] = {}
        #: ``ibv_rate`` and default hop limit, by interface index and address family.
        self._link_facts: dict[tuple[int, int], tuple[int, int]] = {}

    # -- pictures -------------------------------------------------------------------------------------

    def view(self) -> HostView:
        """The current picture, after taking in what the network has reported since the last look."""
        if self._view is None:
            self._is_monitored = self.network.fileno() >= 0  # before the first look, so that no change is missed
            self._view = read_host(self.network)
        elif not self._is_monitored:
            self._reread()
        elif (change := self.network.changes()) is not None:
            self._apply(change)
        assert self._view is not None
        return self._view

    def last_view(self) -> HostView:
        """The current picture, without another look."""
        return self._view if self._view is not None else self.view()

    def devices(self) -> list[DeviceView | IbView]:
        """Every device as it is now."""
        return [*self.view().devices, *self.ib.views()]

    def device_at(self, ifindex: int) -> Device | None:
        """The device with this interface index as it is now, whatever its name has become."""
        with self.runtime.lock:
            view = self.ib.view_at(ifindex) if ifindex < 0 else self.view().by_ifindex.get(ifindex)
            return view.device if view else None

    def last_device_at(self, ifindex: int) -> Device | None:
        """The RoCE device on an interface in the current picture, without another look."""
        view = self.last_view().by_ifindex.get(ifindex)
        return view.device if view else None

    @property
    def ports(self) -> PortTable:
        """The namespace's port table."""
        if self._ports is None:
            low, high = self.network.setting("net/ipv4/ip_local_port_range", 32768, 60999)
            self._ports = PortTable(self._namespace, (low, high))
        return self._ports

    def path_of(self, lookup: resolver.Lookup, src_port: int, **more: int) -> PathRecord:
        """The path record of a finished lookup (:func:`rdmacm.resolution.lookup.make_path`)."""
        assert lookup.device is not None
        view, family = lookup.device, lookup.destination.family
        facts = self._link_facts.get((view.ifindex, family))
        if facts is None:  # read from /sys and /proc, which is slow; link notifications tell of changes
            facts = self._link_facts[view.ifindex, family] = (
                resolver.link_rate(self.network, view),
                resolver.default_hop_limit(self.network, family, view.interface.name),
            )
        return resolver.make_path(lookup, facts[0], facts[1], src_port, **more)

    def _apply(self, change: Change) -> None:
        if change.links or change.lost:
            self._reread()
        if change.lost or change.links or change.routes:
            self.neighbours.reconsider()
        for neighbour in change.neighbours:
            self.neighbours.neighbour_changed(neighbour)

    def _reread(self) -> None:
        before = self._view
        self._view = after = read_host(self.network, before)
        self._link_facts.clear()
        if before is None:
            return
        for view in before.devices:
            now = after.by_ifindex.get(view.ifindex)
            if now is None or now.interface != view.interface or now.rows != view.rows:
                for bound in list(self._bound.get(view.ifindex, ())):
                    bound.device_changed(view, now)

    # -- ids and devices in use -----------------------------------------------------------------------

    def attach(self, bound: BoundId, view: DeviceView | IbView) -> None:
        """An id is bound to a device."""
        self._bound.setdefault(view.ifindex, {})[bound] = None

    def detach(self, bound: BoundId, view: DeviceView | IbView) -> None:
        """An id is bound to a device no more."""
        ids = self._bound.get(view.ifindex)
        if ids is not None:
            ids.pop(bound, None)
            if not ids:
                del self._bound[view.ifindex]

    @property
    def bound_ids(self) -> int:
        """How many ids are bound to a device."""
        return sum(map(len, self._bound.values()))

    def context_of(self, view: DeviceView | IbView) -> Context:
        """The open device that all ids share that are bound to it under its present name."""
        key = view.ifindex, view.device.name
        context = self._contexts.get(key)
        if context is None:
            ifindex = view.ifindex
            context = self._contexts[key] = Context(
                view.device.name, partial(self.device_at, ifindex), partial(self.open_device_at, ifindex)
            )
        return context

    def open_device_at(self, ifindex: int) -> SoftDevice | IbDevice:
        """The device with this interface index, to be used; ENODEV once it has been removed."""
        with self.runtime.lock:
            device = self._devices.get(ifindex)
            if device is None:
                picture = self.device_at(ifindex)
                if picture is None:
                    raise cm_error(errno.ENODEV, "the device has been removed", "open_device")
                device = self._devices[ifindex] = (
                    IbDevice(picture.name) if ifindex < 0 else self._soft_device(picture.name, ifindex)
                )
            return device

    def _soft_device(self, name: str, ifindex: int) -> SoftDevice:
        return SoftDevice(self.runtime, self.mux, self.random, name, ifindex, self.last_device_at)

    # -- the runtime's driver -------------------------------------------------------------------------

    def filenos(self) -> tuple[int, ...]:
        monitor = self.network.fileno()
        wire = tuple(self.mux.filenos())
        if self.ib.subnets:
            wire += self.ib.filenos()
        return (monitor, *wire) if monitor >= 0 else wire

    def progress(self, now: float, result_queue: Sized) -> None:
        if self._view is not None and (now >= self._look_due or not self.runtime.is_real_time or len(self.neighbours)):
            self._look_due = now + _LOOK_INTERVAL
            self.view()
        self.mux.progress(result_queue)
        self.ib.progress()

    def poll(self, result_queue: Sized) -> bool:
        return self.mux.progress(result_queue, True)

    def opened(self) -> None:
        self.network.open()

    def deadlines_changed(self) -> None:
        self.helper.wake()

    def released(self) -> None:
        self.helper.stop()
        self.cm.close()
        self.ib.close()
        self.mux.close()
        self.network.close()
        if self._ports is not None:
            self._ports.close()
            self._ports = self._given_ports
        self._view = None
        self._contexts.clear()
        self._link_facts.clear()

    def _wire_opened(self) -> None:
        self.runtime.descriptors_changed()
        if self.mux.filenos():
            self.helper.start()

    def _infiniband_opened(self) -> None:
        """An InfiniBand port has a descriptor now."""
        if self.runtime.in_use:
            self.runtime.descriptors_changed()
            if self.ib.filenos():  # none in virtual time
                self.helper.start()

    def abandon(self) -> None:
        """In a child of fork(2): close what is shared with the parent. The runtime is abandoned first."""
        self.helper.abandon()
        self.network.close()
        self.ib.abandon()
        self.mux.abandon()
        if self._ports is not None:
            self._ports.abandon()
