"""The host that the soft provider's ids live on: its devices, ports and connection managers.

:class:`SoftHost` gives ids the views that a resolution reads, the tables of bound ids, and the connection managers. It
follows the changes that the network reports, and drives the wire. :mod:`rdmacm.soft.provider` is the API around it.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence, Sized
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from rdmacm.errors import cm_error
from rdmacm.net.types import Change, Neighbour, Network
from rdmacm.progress.runtime import Runtime
from rdmacm.provider.counters import Counters
from rdmacm.provider.statistics import CountersServer
from rdmacm.resolution.hosts import HostView, IpoibInterface, PortKey, PortView, RocePortView
from rdmacm.resolution.ipoib import with_infiniband
from rdmacm.resolution.neighbours import PendingNeighbours
from rdmacm.resolution.path import PathMaker
from rdmacm.soft.connection_manager import ConnectionManager
from rdmacm.soft.counters import cm_counters, udp_counters
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR, SoftDevice
from rdmacm.soft.device.multiplexer import QPMultiplexer
from rdmacm.soft.devices import PORT_NUM, PROVIDER, read_host, with_link_speed
from rdmacm.soft.helper import Helper
from rdmacm.soft.ib.ports import IbDevice, IbPorts
from rdmacm.soft.port_table import EPHEMERAL, PortTable
from rdmacm.soft.wire.base import TRAFFIC, Wire
from rdmacm.verbs.device import Context, Device

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

#: Seconds between two looks at the network's reports. A resolution looks at once.
_LOOK_INTERVAL = 0.005


#: Hardware addresses of next hops that are kept.
_MAX_NEXT_HOPS = 1024


class BoundId(Protocol):
    """An id that is bound to a port."""

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        """A neighbour on the port's interface has another hardware address than before, perhaps."""

    def device_changed(self, before: RocePortView, after: RocePortView | None) -> None:
        """The device was removed (None), or its interface or its GIDs have changed."""

    def ipoib_changed(self, before: IpoibInterface, after: IpoibInterface | None) -> None:
        """An IPoIB interface was removed (None) or has changed; the id is on an InfiniBand port, not always on its."""


class SoftHost:
    """See the module. Used with the runtime's lock held; the runtime's :class:`rdmacm.progress.runtime.Driver`."""

    #: The provider's name, for explanations.
    provider_name = PROVIDER

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
        #: Interfaces, routes and neighbours of the system.
        self.network = network
        #: Makes numbers that peers must not guess.
        self.random = random
        #: The queue pairs of the RoCE devices, on the wire.
        self.mux: QPMultiplexer = QPMultiplexer(runtime, wire, random)
        self.mux.on_open = self._wire_opened
        #: The connection manager of the RoCE devices. Each InfiniBand port has its own (:attr:`ib`).
        self.cm: ConnectionManager = ConnectionManager(runtime, random, self.mux.gsi)
        #: The InfiniBand ports.
        self.ib: IbPorts = IbPorts(runtime, random, infiniband, self._infiniband_opened)
        #: The ids that wait for a neighbour.
        self.neighbours: PendingNeighbours = PendingNeighbours(runtime, network)
        #: Makes the path records of RoCE.
        self.paths: PathMaker = PathMaker(network)
        #: Tells other processes the counters of this one.
        self.statistics: CountersServer = CountersServer(self._locked_counters)
        #: Serves peers while the application does not wait or poll.
        self.helper: Helper = Helper(runtime, self.mux, self.statistics)
        #: The port table: the one that the processes of a network namespace share, or that the caller gave.
        self.ports: PortTable = ports or PortTable(
            namespace, read_range=partial(network.setting, "net/ipv4/ip_local_port_range", *EPHEMERAL)
        )
        #: The current view; None before the first look.
        self._view: HostView | None = None
        #: A RoCE device without and with the speed of its link, by port.
        self._link_speeds: dict[PortKey, tuple[Device, Device]] = {}
        #: The last hardware address of each neighbour that the network has reported, by interface and packed address.
        self._next_hops: dict[tuple[int, bytes], bytes] = {}
        #: Whether the network reports changes; otherwise each look reads everything.
        self._is_monitored = False
        #: On the runtime's clock: when to look at the network's reports again.
        self._look_due = 0.0
        #: The ids that are bound to each port. Dicts keep their order, so that a simulated run repeats.
        self._bound: dict[PortKey, dict[BoundId, None]] = {}
        #: Devices in use, by device index.
        self._devices: dict[int, SoftDevice | IbDevice] = {}
        #: The limits of the RoCE devices.
        self._device_attr = SOFT_DEVICE_ATTR
        #: Contexts that ids share, by device index and name. The default protection domains refer to them as well, and
        #: the events of an id's queue pair belong to the context of its domain.
        self._contexts: dict[tuple[int, str], Context] = {}

    # -- views ----------------------------------------------------------------------------------------

    def view(self) -> HostView:
        """The interfaces and RoCE devices as they are now."""
        self._look_due = self.runtime.now + _LOOK_INTERVAL
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
        """The view of the last look, without another look."""
        return self._view if self._view is not None else self.view()

    def ip_view(self) -> HostView:
        """As :meth:`view`, with the addresses of IPoIB interfaces on their InfiniBand ports."""
        view = self.view()
        return self._with_infiniband(view) if view.ipoib else view

    def last_ip_view(self) -> HostView:
        """As :meth:`last_view`, with the addresses of IPoIB interfaces on their InfiniBand ports."""
        return self._with_infiniband(self.last_view())

    def _with_infiniband(self, view: HostView) -> HostView:
        return with_infiniband(view, self.ib.views()) if view.ipoib else view

    def device(self, index: int) -> Device | None:
        """The device with an index as it is now; its name may have changed. None once it has been removed.

        The index of a RoCE device is its interface's; that of an InfiniBand device is negative.
        """
        with self.runtime.lock:
            if index < 0:
                port = self.ib.view_of_device(index)
                return self._with_interfaces(port.device, self.view()) if port else None
            view = self.view().by_key.get((index, PORT_NUM))
            return self._described(view) if view else None

    def devices(self) -> tuple[Device, ...]:
        """Every device as it is now. The GIDs of InfiniBand ports are shown with their IPoIB interfaces."""
        with self.runtime.lock:
            host = self.view()
            roce = [self._described(view) for view in host.ports]
            return (*roce, *(self._with_interfaces(view.device, host) for view in self.ib.views()))

    @staticmethod
    def _with_interfaces(device: Device, host: HostView) -> Device:
        """An InfiniBand device whose GIDs have the name and the index of their first IPoIB interface."""
        names = {one.address.gid: one.interface for one in reversed(host.ipoib)}
        if not names:
            return device
        ports = []
        for port in device.ports:
            rows = tuple(
                replace(row, ndev_name=names[row.gid].name, ndev_ifindex=names[row.gid].index)
                if row.gid in names
                else row
                for row in port.gids
            )
            ports.append(replace(port, gids=rows))
        return replace(device, ports=tuple(ports))

    def _described(self, view: RocePortView) -> Device:
        """The device of a port, with the speed of its link."""
        known = self._link_speeds.get(view.key)
        if known is None or known[0] is not view.device:
            known = self._link_speeds[view.key] = view.device, with_link_speed(view, self.network)
        return known[1]

    def last_device(self, index: int) -> Device | None:
        """The RoCE device with an index in the view of the last look, without another look."""
        view = self.last_view().by_key.get((index, PORT_NUM))
        return view.device if view else None

    def _apply(self, change: Change) -> None:
        if change.links or change.lost:
            self._reread()
        if change.lost or change.links or change.routes:
            self.neighbours.network_changed()
        for neighbour in change.neighbours:
            self.neighbours.neighbour_changed(neighbour)
            if neighbour.state.is_valid:
                self._neighbour_changed(neighbour)

    def _neighbour_changed(self, neighbour: Neighbour) -> None:
        """Tell the ids of an interface that a neighbour there has another hardware address."""
        known, hop = self._next_hops, (neighbour.ifindex, neighbour.ip)
        if known.get(hop) != neighbour.link_layer_address:  # most notifications repeat it
            if len(known) >= _MAX_NEXT_HOPS:
                known.clear()
            known[hop] = neighbour.link_layer_address
            for bound in list(self._bound.get((neighbour.ifindex, PORT_NUM), ())):
                bound.neighbour_changed(neighbour)

    def _reread(self) -> None:
        before = self._view
        self._view = after = read_host(self.network, before)
        self.paths.forget()
        self._link_speeds.clear()
        for used in self._devices.values():
            if isinstance(used, SoftDevice):
                used.look_at_addresses()
        if before is None:
            return
        for view in before.ports:
            now = after.by_key.get(view.key)
            device = self._devices.get(view.device.index)
            if isinstance(device, SoftDevice):
                device.changed(view.device, now.device if now is not None else None)
            if now is None or now.interface != view.interface or now.rows != view.rows:
                for bound in list(self._bound.get(view.key, ())):
                    bound.device_changed(view, now)
        for ipoib in before.ipoib:
            after_it = next((one for one in after.ipoib if one.interface.index == ipoib.interface.index), None)
            if after_it != ipoib:
                for bound in [one for key, ids in self._bound.items() if key[0] < 0 for one in ids]:
                    bound.ipoib_changed(ipoib, after_it)

    # -- bound ids and devices in use -----------------------------------------------------------------

    def attach(self, bound: BoundId, view: PortView) -> Context:
        """An id has been bound to a port. Returns the context that all ids share that are bound to that device, under
        its present name.
        """
        index, name = view.device.index, view.device.name
        self._bound.setdefault((index, view.port.port_num), {})[bound] = None
        context = self._contexts.get((index, name))
        if context is None:
            context = Context(name, partial(self.device, index), partial(self.open_device, index), shared=True)
            self._contexts[index, name] = context
        return context

    def detach(self, bound: BoundId, view: PortView) -> None:
        """Undo :meth:`attach`."""
        key = view.device.index, view.port.port_num
        ids = self._bound.get(key)
        if ids is not None:
            ids.pop(bound, None)
            if not ids:
                del self._bound[key]

    @property
    def bound_ids(self) -> int:
        """How many ids are bound to a port."""
        return sum(map(len, self._bound.values()))

    def open_device(self, index: int) -> SoftDevice | IbDevice:
        """The device with an index, to be used; ENODEV once it has been removed."""
        with self.runtime.lock:
            device = self._devices.get(index)
            if device is None:
                found = self.device(index)
                if found is None:
                    raise cm_error(errno.ENODEV, "the device has been removed", "open_device")
                device = self._devices[index] = (
                    IbDevice(found.name, found.node_guid)
                    if index < 0
                    else SoftDevice(self.runtime, self.mux, self.random, found, self.last_device, self._device_attr)
                )
            return device

    def _locked_counters(self) -> Counters:
        with self.runtime.lock:
            return self.query_counters()

    def query_counters(self) -> Counters:
        """See :meth:`rdmacm.provider.Provider.query_counters`."""
        self.mux.count_strays()
        self.mux.count_traffic()
        managers = [self.cm, *(subnet.cm for subnet in self.ib.subnets)]
        devices = [device for device in self._devices.values() if isinstance(device, SoftDevice)]
        return Counters(
            {device.name: device.query_counters() for device in devices},
            cm_counters(managers),
            udp_counters(self.mux.wire.counters, self.mux.dropped),
            dict(self.runtime.errors.counts),
            {name: self.mux.wire.traffic[name] for name in TRAFFIC},
        )

    def limit_devices(self, max_qp: int | None, max_mr: int | None) -> None:
        """Change limits of the RoCE devices, for simulations; None leaves one as it is."""
        with self.runtime.lock:
            before = self._device_attr
            max_qp = before.max_qp if max_qp is None else max_qp
            max_mr = before.max_mr if max_mr is None else max_mr
            self._device_attr = replace(before, max_qp=max_qp, max_mr=max_mr)
            for device in self._devices.values():
                if isinstance(device, SoftDevice):
                    device.attr = replace(device.attr, max_qp=max_qp, max_mr=max_mr)

    # -- the runtime's driver -------------------------------------------------------------------------

    def filenos(self) -> tuple[int, ...]:
        monitor = self.network.fileno()
        wire = tuple(self.mux.filenos())
        if self.ib.subnets:
            wire += self.ib.filenos()
        return (monitor, *wire) if monitor >= 0 else wire

    def progress(self, now: float, result_queue: Sized) -> None:
        is_due = now >= self._look_due or not self.runtime.is_real_time or self.neighbours.waiting
        if is_due and self._view is not None:
            self.view()
        self.mux.progress(result_queue, now=now)
        if self.ib.subnets:
            self.ib.progress()

    def poll(self, now: float, result_queue: Sized) -> bool:
        return self.mux.progress(result_queue, True, now)

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
        self.ports.close()
        self._view = None
        self._link_speeds.clear()
        self._next_hops.clear()
        self.paths.forget()

    def _wire_opened(self) -> None:
        self.runtime.descriptors_changed()
        if self.mux.filenos():
            self.helper.start()

    def _infiniband_opened(self) -> None:
        """The transport of an InfiniBand port has been opened."""
        if self.runtime.in_use:
            self.runtime.descriptors_changed()
            if self.ib.filenos():  # none in virtual time
                self.helper.start()

    def abandon(self) -> None:
        """In a child of fork(2): close what is shared with the parent. The runtime is abandoned first."""
        self.helper.abandon()
        self.cm.close()  # what is destroyed from here on has no peer to tell
        self.network.close()
        self.ib.abandon()
        self.mux.abandon()
        self.ports.abandon()
