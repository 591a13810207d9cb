"""IPoIB: from an interface to the InfiniBand port below it, and from a neighbour to the GID of its port.

An IPoIB interface has a hardware address of 20 bytes, with the GID of the InfiniBand port that it is on
(:mod:`rdmacm.proto.ipoib`). The routing and neighbour tables resolve an IP address as on Ethernet; the neighbour's
hardware address then gives the destination GID, and the subnet administrator the path (rdma_resolve_addr(3)).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rdmacm.errors import Failure
from rdmacm.resolution.hosts import HostView, IpoibInterface, IpPortView, LocalAddress
from rdmacm.resolution.infiniband import IbPortView
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType


@dataclass(frozen=True, slots=True)
class IpoibPortView(IpPortView):
    """The InfiniBand port of an IPoIB interface, with the interface's addresses.

    If no InfiniBand port has the interface's GID, it shows a port that is down, of a device with the interface's name.
    """

    ipoib: IpoibInterface
    #: The port; None if no InfiniBand port has the interface's GID.
    infiniband: IbPortView | None
    #: The port's row of the interface's GID.
    row: GidEntry

    @property
    def addresses(self) -> tuple[LocalAddress, ...]:
        return tuple(LocalAddress(self, self.row, ip) for ip in self.ipoib.ips)

    def has_address(self, ip: bytes) -> bool:
        return ip in self.ipoib.ips

    @property
    def pkey(self) -> int:
        """The P_Key of the interface's partition."""
        return self.ipoib.pkey

    @property
    def is_active(self) -> bool:
        return self.port.state is PortState.ACTIVE and self.interface.is_running


def with_infiniband(host: HostView, ports: Sequence[IbPortView]) -> HostView:
    """The view of a host with the addresses of its IPoIB interfaces, each on the one of ``ports`` that has its GID."""
    views = [_port_of(ipoib, ports, host.provider) for ipoib in host.ipoib]
    return HostView.of(host.provider, host.ports, host.interfaces, host.ipoib, views)


def _port_of(ipoib: IpoibInterface, ports: Sequence[IbPortView], provider: str) -> IpoibPortView:
    interface, gid = ipoib.interface, ipoib.address.gid
    for view in ports:
        row = view.row_of(gid)
        if row is not None and any(gid):
            row = replace(row, ndev_name=interface.name, ndev_ifindex=interface.index)
            return IpoibPortView(view.device, view.port, interface, ipoib, view, row)
    row = GidEntry(gid, 0, 1, GidType.IB, interface.name, interface.index)
    port = Port(1, PortState.DOWN, LinkLayer.INFINIBAND, Mtu.MTU_4096, None, (row,), ())
    device = Device(interface.name, 0, provider, NodeType.CA, TransportType.IB, 0, (port,))
    return IpoibPortView(device, port, interface, ipoib, None, row)


def no_port(ipoib: IpoibInterface, step: str) -> Failure:
    """The failure of a resolution on an IPoIB interface whose InfiniBand port is unknown."""
    name, gid = ipoib.interface.name, ipoib.address.gid
    return Failure(
        errno.ENODEV,
        step,
        f"{name} is IPoIB on the InfiniBand port with the GID {gid}, which is none of this process's ports",
        f"RDMACM_IB=umad:DEVICE/PORT ('ls /sys/class/net/{name}/device/infiniband'), then 'rdmacm devices'",
    )


def no_partition(view: IpoibPortView, step: str, code: int = errno.ENODEV) -> Failure:
    """The failure of a resolution on an IPoIB interface whose P_Key the port does not have, or no longer."""
    assert view.infiniband is not None
    name, table = view.device.name, view.infiniband.pkeys_text
    message = f"P_Key 0x{view.pkey:04x} of {view.interface.name} is not in the table of {name}: {table}"
    return Failure(code, step, message, "a port in that partition, or an interface of another one (rdmacm doctor R2)")
