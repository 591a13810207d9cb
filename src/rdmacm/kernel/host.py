"""The host that the kernel's ids live on: its devices, and the ids of this process by the cookies of their events."""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from socket import AF_INET
from typing import TYPE_CHECKING, Any

from rdmacm.address import InetAddr
from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.bare_device import BareDevice
from rdmacm.kernel.descriptors import Descriptors
from rdmacm.kernel.nldev import device_indices, port_states
from rdmacm.kernel.sysfs import PROVIDER, Sysfs
from rdmacm.net.types import InterfaceAddress, Network
from rdmacm.resolution.hosts import HostView, IpoibInterface, IpPortView, LocalAddress, RocePortView
from rdmacm.verbs.device import Context, Device, Port
from rdmacm.verbs.enums import LinkLayer, TransportType

if TYPE_CHECKING:
    from rdmacm.kernel.event_queue import QueueMember
    from rdmacm.progress.runtime import Runtime
    from rdmacm.provider.multicast import GroupJoin
    from rdmacm.verbs.backend import DeviceBackend


@dataclass(frozen=True, slots=True)
class IwarpPortView(IpPortView):
    """One port of an iWARP device: its addresses are those of its interface, and its GID stands for none of them."""

    #: The addresses of the interface, packed.
    ips: tuple[bytes, ...]

    @property
    def addresses(self) -> tuple[LocalAddress, ...]:
        return tuple(LocalAddress(self, self.rows[0], ip) for ip in self.ips) if self.rows else ()

    def has_address(self, ip: bytes) -> bool:
        return ip in self.ips


def verbs_module() -> Any:
    """The module of libibverbs' devices; None where there is none."""
    try:
        return importlib.import_module("rdmacm.kernel.verbs")
    except ImportError:
        return None


class KernelHost:
    """See the module. Used with the runtime's lock held."""

    #: The provider's name, for explanations.
    provider_name = PROVIDER

    def __init__(self, network: Network, sysfs: Sysfs) -> None:
        #: What the waiting threads poll.
        self.descriptors: Descriptors = Descriptors(self._release_all)
        self.runtime: Runtime = self.descriptors.runtime
        #: Interfaces, routes and neighbours of the system.
        self.network = network
        self.sysfs = sysfs
        #: The ids by their cookies, which come back in each event.
        self.ids: dict[int, QueueMember] = {}
        #: The joins of multicast groups by their cookies, each with its id.
        self.joins: dict[int, tuple[QueueMember, GroupJoin]] = {}
        #: Numbers for cookies; 0 and 1 have a meaning of their own.
        self.cookies: Iterator[int] = count(2)
        #: The kernel's indices of devices, by name.
        self._indices: dict[str, int] = {}
        #: The contexts that ids share, by name and index of the device.
        self._contexts: dict[tuple[str, int], Context] = {}
        #: The devices that these contexts have opened.
        self._shared: list[DeviceBackend] = []
        #: Whether devices that ids are bound to have the transport iWARP, and whether their ports are InfiniBand.
        self._iwarp: dict[str, bool] = {}
        self._infiniband: dict[tuple[str, int], bool] = {}
        #: The driver and the firmware's version of a device, by name and index.
        self._versions: dict[tuple[str, int], tuple[str, str]] = {}
        #: Devices in use that libibverbs does not open, by name.
        self._bare: dict[str, BareDevice] = {}
        #: What the rules predict from; None before the first look.
        self._view: HostView | None = None

    # -- devices --------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        """Every device as it is now."""
        self._indices = device_indices()
        found = (self._look_at(name) for name in self.visible())
        return tuple(device for device in found if device is not None)

    def _look_at(self, name: str) -> Device | None:
        """A device as it is now, with the interfaces of this network namespace alone."""
        found = self._read_device(name)
        return None if found is None else replace(found, ports=self._placed(found))

    def _read_device(self, name: str) -> Device | None:
        """A device as libibverbs shows it, or sysfs, which has one file for each row of a GID table."""
        verbs = verbs_module()
        if verbs is not None:
            with contextlib.suppress(RdmaError):
                found: Device = verbs.read_device(name)
                key = name, found.index
                if key not in self._versions:
                    self._versions[key] = self.sysfs.driver(name), self.sysfs.firmware(name)
                driver, firmware = self._versions[key]
                return replace(found, driver=driver, fw_ver=firmware)
        interfaces = {interface.name: interface for interface in self.network.interfaces()}
        return self.sysfs.device(name, self._indices.get(name), interfaces)

    def _placed(self, device: Device) -> tuple[Port, ...]:
        """The ports of a device, with the interfaces of this network namespace alone.

        The kernel shows the index of a row's interface also where that is in another namespace, and here it may be the
        index of another interface.
        """
        try:
            own = {port.port_num: port.ifindex for port in port_states(device.index)}
        except OSError:
            return device.ports
        every = (row for port in device.ports for row in port.gids)
        rows = [row for row in every if row.ndev_ifindex not in (0, own.get(row.port_num))]
        if not rows:
            return device.ports
        addresses = {(address.ifindex, address.ip) for address in self.network.addresses()}
        # An interface of this namespace, such as a bond or a VLAN, may have a row for a link-local address that is made
        # of its hardware address, and another link-local address (RFC 7217).
        here = {row.ndev_ifindex for row in rows if (row.ndev_ifindex, row.gid.ip) in addresses}
        foreign = {row for row in rows if row.ndev_ifindex not in here}
        return tuple(
            replace(
                port,
                gids=tuple(replace(row, ndev_name="", ndev_ifindex=0) if row in foreign else row for row in port.gids),
            )
            for port in device.ports
        )

    def visible(self) -> list[str]:
        """The names of the devices of this network namespace: sysfs also shows others."""
        names = self.sysfs.names() or list(self._indices)  # a container may have no sysfs
        return [name for name in names if name in self._indices] if self._indices else names

    def device(self, name: str, index: int | None = None) -> Device | None:
        """A device as it is now; None once it has been removed, or is another one of that name."""
        with self.runtime.lock:
            if name not in self._indices or (index is not None and self._indices[name] != index):
                self._indices = device_indices()
            known = self._indices.get(name)
            if index is not None and known != index:
                return None
            return self._look_at(name)

    def name_of(self, node_guid: int, index: int | None) -> str | None:
        """The name of the device with these, of which an older kernel tells only the first."""
        for attempt in range(2):
            if attempt or not self._indices:
                self._indices = device_indices()
            if index is not None:
                name = next((name for name, known in self._indices.items() if known == index), None)
            else:
                name = next((name for name in self.visible() if self.sysfs.node_guid(name) == node_guid), None)
            if name is not None:
                return name
        return None

    def context_of(self, name: str) -> Context:
        """The context that all ids of a device share."""
        key = name, self._indices.get(name, -1)
        context = self._contexts.get(key)
        if context is None:
            for other in [known for known in self._contexts if known[0] == name]:  # of a device that is gone
                del self._contexts[other]
            self._iwarp.clear()
            self._infiniband.clear()
            read = partial(self.device, name, key[1] if key[1] >= 0 else None)
            context = self._contexts[key] = Context(name, read, partial(self._open_shared, name), shared=True)
        return context

    def _open_shared(self, name: str) -> DeviceBackend:
        opened = self.open_device(name)
        self._shared.append(opened)
        return opened

    def _release_all(self) -> None:
        """No channel is open any more: close the devices of the ids, with their default domains, and the network.

        What the program has made of a device keeps it open.
        """
        for opened in self._shared:
            opened.default_pds.clear()
        self._shared.clear()
        self._contexts.clear()
        self.network.close()
        self._view = None

    def is_iwarp(self, name: str) -> bool:
        """Whether a device that an id is bound to has the transport iWARP."""
        known = self._iwarp.get(name)
        if known is None:
            device = None if self.sysfs.names() else self.device(name)
            is_iwarp = self.sysfs.is_iwarp(name) if device is None else device.transport_type is TransportType.IWARP
            known = self._iwarp[name] = is_iwarp
        return known

    def is_infiniband(self, name: str, port_num: int) -> bool:
        """Whether a port that an id is bound to has the link layer InfiniBand."""
        known = self._infiniband.get((name, port_num))
        if known is None:
            device = None if self.sysfs.names() else self.device(name)
            if device is None:
                known = self.sysfs.is_infiniband(name, port_num)
            else:
                layers = {port.port_num: port.link_layer for port in device.ports}
                known = layers.get(port_num) is LinkLayer.INFINIBAND
            self._infiniband[name, port_num] = known
        return known

    def open_device(self, name: str) -> DeviceBackend:
        """The device of a name, to be used; ENODEV where there is none. Without libibverbs it only connects."""
        with self.runtime.lock:
            if name not in (self.sysfs.names() or device_indices()):
                hint = "'rdmacm devices' lists them"
                raise cm_error(errno.ENODEV, "there is no such device", "open_device", name, hint)
            verbs, reason = verbs_module(), None
            if verbs is not None:
                try:
                    opened: DeviceBackend = verbs.open_device(name)
                    return opened
                except RdmaError as error:
                    reason = error
            if name not in self._bare:
                self._bare[name] = BareDevice(name, self.sysfs, reason)
            return self._bare[name]

    def own_addresses(self) -> list[InetAddr]:
        """The IPv4 addresses of this host."""
        return [InetAddr(AF_INET, each.ip) for each in self.network.addresses() if each.family == AF_INET]

    # -- the rules' view ------------------------------------------------------------------------------

    def view(self, *, fresh: bool = False) -> HostView:
        """Interfaces, addresses and RoCE ports as they are now; ``fresh``: also if nothing has reported a change."""
        is_monitored = self.network.fileno() >= 0
        if self._view is None or fresh or not is_monitored or self.network.changes() is not None:
            self._view = self._read()
        return self._view

    def _read(self) -> HostView:
        interfaces = {interface.index: interface for interface in self.network.interfaces()}
        by_name = {interface.name: interface for interface in interfaces.values()}
        addresses: dict[int, list[InterfaceAddress]] = {}
        for address in self.network.addresses():
            if address.usable:
                addresses.setdefault(address.ifindex, []).append(address)
        ports: list[RocePortView] = []
        iwarp: list[IpPortView] = []
        for device in self.devices():
            for port in device.ports:
                name = next((row.ndev_name for row in port.gids if row.ndev_name in by_name), None)
                if name is not None and device.transport_type is TransportType.IWARP:
                    ips = tuple(address.ip for address in addresses.get(by_name[name].index, ()))
                    iwarp.append(IwarpPortView(device, port, by_name[name], ips))
                elif name is not None and port.link_layer is LinkLayer.ETHERNET:
                    ports.append(RocePortView(device, port, by_name[name]))
        ipoib = [
            IpoibInterface(interface, tuple(address.ip for address in addresses.get(interface.index, ())))
            for interface in interfaces.values()
            if interface.is_ipoib
        ]
        return HostView.of(self.provider_name, ports, interfaces, ipoib, iwarp)
