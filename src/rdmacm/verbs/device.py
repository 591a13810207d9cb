"""Devices, ports and their GID tables, as seen at one moment.

A :class:`Device` is an immutable picture. A :class:`Context` is the open device, and asks the provider again at
each query, so a table read through it is current.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rdmacm.address import Gid
from rdmacm.errors import cm_error
from rdmacm.verbs.attr import DeviceAttr
from rdmacm.verbs.backend import DeviceBackend
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType

__all__ = ["Context", "Device", "GidEntry", "Port"]


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One row of a port's GID table (``struct ibv_gid_entry``).

    ``ndev_name``/``ndev_ifindex``: the network interface the address is on.
    """

    gid: Gid
    gid_index: int
    port_num: int
    gid_type: GidType
    ndev_name: str
    ndev_ifindex: int


@dataclass(frozen=True, slots=True)
class Port:
    """A port: ``struct ibv_port_attr`` and its tables. ``active_mtu`` is None where no packet would fit."""

    port_num: int
    state: PortState
    link_layer: LinkLayer
    max_mtu: Mtu
    active_mtu: Mtu | None
    gids: tuple[GidEntry, ...]
    pkeys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A device: ``struct ibv_device`` with its ports. ``node_guid`` is 64 bits in host order."""

    name: str
    index: int
    provider: str
    node_type: NodeType
    transport_type: TransportType
    node_guid: int
    ports: tuple[Port, ...]

    @property
    def guid_text(self) -> str:
        """``0200:5eff:fe10:0001``, as ibv_devinfo(1) prints it."""
        digits = f"{self.node_guid:016x}"
        return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


class Context:
    """An open device (``struct ibv_context``): what ``id.verbs`` is once an id is bound to a device.

    ``read`` returns the device as it is now, None once it is gone. ``open`` gives what a provider offers to make
    queue pairs and the like on, the same object each time it is asked; without it a context can only be looked at.
    """

    __slots__ = ("_backend", "_open", "_read", "name")

    def __init__(
        self, name: str, read: Callable[[], Device | None], open: Callable[[], DeviceBackend] | None = None
    ) -> None:
        self.name = name
        self._read = read
        self._open = open
        self._backend: DeviceBackend | None = None

    @classmethod
    def open(
        cls,
        name: str,
        devices: Callable[[], Iterable[Device]],
        backend: Callable[[], DeviceBackend] | None = None,
    ) -> Context:
        """The context of a named device among those that ``devices()`` lists; ``backend`` is what opens it."""
        return cls(name, lambda: next((device for device in devices() if device.name == name), None), backend)

    @property
    def backend(self) -> DeviceBackend:
        """The device as its provider offers it, opened when first asked for; EOPNOTSUPP where it offers none.

        Two contexts are of one device where this is the same object.
        """
        if self._backend is None:
            if self._open is None:
                raise cm_error(
                    errno.EOPNOTSUPP, "the provider has no queue pairs, memory or completions here", "open", self.name
                )
            self._backend = self._open()
        return self._backend

    def query_device(self) -> DeviceAttr:
        """What the device can do at most, ibv_query_device(3)."""
        return self.backend.attr

    @property
    def device(self) -> Device:
        """The device as it is now; ENODEV where it has been removed."""
        device = self._read()
        if device is None:
            raise cm_error(errno.ENODEV, "the device has been removed", "device", self.name)
        return device

    def query_port(self, port_num: int = 1) -> Port:
        """State, MTU and tables of a port, ibv_query_port(3); EINVAL for a port the device lacks."""
        for port in self.device.ports:
            if port.port_num == port_num:
                return port
        raise cm_error(errno.EINVAL, f"no port {port_num}", "query_port", self.name)

    def query_gid(self, port_num: int, index: int) -> Gid:
        """One GID, ibv_query_gid(3); ENODATA where the index is empty."""
        for entry in self.query_port(port_num).gids:
            if entry.gid_index == index:
                return entry.gid
        raise cm_error(errno.ENODATA, f"no GID at index {index}", "query_gid", self.name)

    def query_gid_table(self) -> list[GidEntry]:
        """Every valid GID of every port, ibv_query_gid_table(3)."""
        return [entry for port in self.device.ports for entry in port.gids]

    def query_pkey(self, port_num: int, index: int) -> int:
        """One P_Key, ibv_query_pkey(3); EINVAL outside the table."""
        pkeys = self.query_port(port_num).pkeys
        if not 0 <= index < len(pkeys):
            raise cm_error(errno.EINVAL, f"no P_Key at index {index}", "query_pkey", self.name)
        return pkeys[index]

    def __repr__(self) -> str:
        return f"<Context {self.name}>"
