"""Devices, ports and their tables: ibv_query_device(3), ibv_query_port(3), ibv_query_gid(3), ibv_query_pkey(3).

A :class:`Device` is a snapshot. A :class:`Context` is the open device; each query asks the provider again, so what it
returns is current.
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
    """One row of a port's GID table, ``struct ibv_gid_entry``."""

    gid: Gid
    #: The row's number, from 0.
    gid_index: int
    #: The port's number, from 1.
    port_num: int
    gid_type: GidType
    #: The network interface that has the address, by name and index. On InfiniBand the first IPoIB interface of the
    #: GID; empty and 0 if there is none.
    ndev_name: str
    ndev_ifindex: int


@dataclass(frozen=True, slots=True)
class Port:
    """A port: ``struct ibv_port_attr`` and its tables."""

    #: From 1.
    port_num: int
    state: PortState
    link_layer: LinkLayer
    #: The largest path MTU of the device.
    max_mtu: Mtu
    #: The largest path MTU of the link at present; None if the link's MTU is too small for the smallest path MTU.
    active_mtu: Mtu | None
    #: The rows of the GID table that are in use.
    gids: tuple[GidEntry, ...]
    #: The P_Key table, 16 bits each.
    pkeys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A device: ``struct ibv_device`` with its ports, as it was at one moment."""

    name: str
    #: A number that no other device of the provider has.
    index: int
    #: The name of the provider.
    provider: str
    node_type: NodeType
    transport_type: TransportType
    #: 64 bits, as a number.
    node_guid: int
    ports: tuple[Port, ...]

    @property
    def guid_text(self) -> str:
        """``0200:5eff:fe10:0001``, as ibv_devinfo(1) prints it."""
        digits = f"{self.node_guid:016x}"
        return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


class Context:
    """An open device, ``struct ibv_context``; ``id.verbs`` of an id that is bound to a device.

    ``read`` returns the device as it is now, None once it has been removed. ``open`` returns the provider's backend,
    the same object each time; without it a context answers queries only.
    """

    __slots__ = ("_backend", "_open", "_read", "name")

    def __init__(
        self, name: str, read: Callable[[], Device | None], open: Callable[[], DeviceBackend] | None = None
    ) -> None:
        #: The device's name when it was opened.
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
        """The context of the device ``name`` among those that ``devices()`` returns; ``backend`` opens the device."""
        return cls(name, lambda: next((device for device in devices() if device.name == name), None), backend)

    @property
    def backend(self) -> DeviceBackend:
        """The provider's backend, opened at the first use; EOPNOTSUPP where there is none.

        Two contexts are of the same device if they have the same backend object.
        """
        if self._backend is None:
            if self._open is None:
                raise cm_error(
                    errno.EOPNOTSUPP, "the provider has no queue pairs, memory or completions here", "open", self.name
                )
            self._backend = self._open()
        return self._backend

    def query_device(self) -> DeviceAttr:
        """The device's limits, ibv_query_device(3)."""
        return self.backend.attr

    @property
    def device(self) -> Device:
        """The device as it is now; ENODEV once it has been removed."""
        device = self._read()
        if device is None:
            raise cm_error(errno.ENODEV, "the device has been removed", "device", self.name)
        return device

    def query_port(self, port_num: int = 1) -> Port:
        """State, MTU and tables of a port, ibv_query_port(3); EINVAL for a port the device lacks."""
        for port in self.device.ports:
            if port.port_num == port_num:
                return port
        raise cm_error(errno.EINVAL, f"no port {port_num}", "query_port", self.name, "context.device.ports")

    def query_gid(self, port_num: int, index: int) -> Gid:
        """One GID, ibv_query_gid(3); ENODATA where the index is empty."""
        for entry in self.query_port(port_num).gids:
            if entry.gid_index == index:
                return entry.gid
        raise cm_error(errno.ENODATA, f"no GID at index {index}", "query_gid", self.name, "context.query_gid_table()")

    def query_gid_table(self) -> list[GidEntry]:
        """The GIDs of all ports, ibv_query_gid_table(3)."""
        return [entry for port in self.device.ports for entry in port.gids]

    def query_pkey(self, port_num: int, index: int) -> int:
        """One P_Key, ibv_query_pkey(3); EINVAL for an index outside the table."""
        pkeys = self.query_port(port_num).pkeys
        if not 0 <= index < len(pkeys):
            hint = f"an index below {len(pkeys)}"
            raise cm_error(errno.EINVAL, f"no P_Key at index {index}", "query_pkey", self.name, hint)
        return pkeys[index]

    def __repr__(self) -> str:
        return f"<Context {self.name}>"
