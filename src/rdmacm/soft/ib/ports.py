"""The InfiniBand ports of a host, beside its software devices.

A port is a transport of management datagrams (:mod:`rdmacm.ib.transport`). That is enough for addresses, path records,
services, and connections up to ESTABLISHED. To move data takes the adapter's driver, which this package does not have.

A transport is opened when its port is first asked for, and closed with the provider's last channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rdmacm.address import Gid
from rdmacm.capabilities import INFINIBAND
from rdmacm.provider.bare_device import BareDevice
from rdmacm.resolution.infiniband import IbPortView
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import AtomicCap, DeviceCapFlag, TransportType

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from rdmacm.ib.transport import MadTransport
    from rdmacm.progress.runtime import Runtime
    from rdmacm.soft.connection_manager import ConnectionManager
    from rdmacm.soft.ib.subnet import Subnet


class IbPorts:
    """The InfiniBand ports of one host. Used with the runtime's lock held.

    ``opened()`` is called when a transport has been opened.
    """

    def __init__(
        self, runtime: Runtime, random: Random, transports: Sequence[MadTransport], opened: Callable[[], None]
    ) -> None:
        self._runtime = runtime
        #: In the order in which the ports were named.
        self.subnets: tuple[Subnet, ...] = ()
        #: By device index. The indices are negative, because those of RoCE devices are interface indices.
        self._by_device_index: dict[int, Subnet] = {}
        if transports:
            from rdmacm.soft.ib.subnet import Subnet  # most hosts need none of the modules behind it

            indices = range(-1, -1 - len(transports), -1)
            self._by_device_index = {
                index: Subnet(runtime, random, transport, index, opened)
                for index, transport in zip(indices, transports, strict=True)
            }
            self.subnets = tuple(self._by_device_index.values())

    def views(self) -> list[IbPortView]:
        """The ports as they are now; without those that are gone."""
        found = [view for subnet in self.subnets if (view := subnet.view()) is not None]
        if not self._runtime.in_use:
            self.close()
        return found

    def subnet_of(self, view: IbPortView) -> Subnet:
        """The subnet of a port."""
        return self._by_device_index[view.device.index]

    def subnet_with(self, cm: ConnectionManager) -> Subnet | None:
        """The subnet whose connection manager this is; None for that of the RoCE devices."""
        return next((subnet for subnet in self.subnets if subnet.cm is cm), None)

    def view_of_device(self, index: int) -> IbPortView | None:
        """The port of the device with this index, as it is now."""
        subnet = self._by_device_index.get(index)
        if subnet is None:
            return None
        view = subnet.view()
        if not self._runtime.in_use:
            subnet.close()
        return view

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that poll readable when :meth:`progress` has something to do."""
        return tuple(
            subnet.transport.fileno() for subnet in self.subnets if subnet.is_open and subnet.transport.fileno() >= 0
        )

    def progress(self) -> None:
        """Receive and answer."""
        for subnet in self.subnets:
            if subnet.is_open:
                subnet.progress()

    def close(self) -> None:
        """Close every transport."""
        for subnet in self.subnets:
            subnet.close()

    def abandon(self) -> None:
        """In a child of fork(2)."""
        for subnet in self.subnets:
            subnet.abandon()

    def row_of(self, gid: Gid) -> tuple[IbPortView, GidEntry] | None:
        """The port that has a GID, and its row in the GID table."""
        return next(((view, row) for view in self.views() for row in view.rows if row.gid == gid), None)

    def why_none(self) -> str:
        """Why a port is not among :meth:`views`, in words."""
        if not self.subnets:
            return "AF_IB addresses name ports of an InfiniBand device, and this host has none"
        missing = [f"{s.transport.name}: {s.why()}" for s in self.subnets if s.problem]
        return "; ".join(missing) or f"there is {', '.join(s.transport.name for s in self.subnets)}"


class IbDevice(BareDevice):
    """An InfiniBand device without a driver: the limits are for a connection whose queue pair is a driver's."""

    def __init__(self, name: str, node_guid: int = 0) -> None:
        attr = replace(
            SOFT_DEVICE_ATTR,
            fw_ver="",
            node_guid=node_guid,
            vendor_id=0,
            page_size_cap=0,
            device_cap_flags=DeviceCapFlag(0),
            device_cap_flags_ex=DeviceCapFlag(0),
            atomic_cap=AtomicCap.NONE,
            **dict.fromkeys(("max_qp", "max_cq", "max_mr", "max_srq", "max_res_rd_atom"), 0),
        )
        super().__init__(name, TransportType.IB, attr, INFINIBAND)
