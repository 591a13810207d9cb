"""Why the kernel refuses a call: what an errno means there, what to try, and the command that shows it."""

from __future__ import annotations

import errno
import os
from socket import AF_INET
from typing import TYPE_CHECKING, NamedTuple

from rdmacm.address import Address, InetAddr, is_link_local
from rdmacm.verbs.enums import LinkLayer

if TYPE_CHECKING:
    from rdmacm.kernel.host import KernelHost
    from rdmacm.verbs.device import Device


class Reason(NamedTuple):
    """The text of an error, and its hint."""

    text: str
    hint: str | None = None


_NO_ROUTE = Reason("no route to the destination", "'ip route get ADDRESS' shows what the routing tables answer")
_PORTS_IN_USE = "'rdma resource show cm_id' for the ports in use"

#: By call and errno; what is not here has the errno's own text.
_REASONS: dict[tuple[str, int], Reason] = {
    ("bind_addr", errno.EADDRNOTAVAIL): Reason(
        "it is not an address of this host, or the port is taken by or for a wildcard, or no port is free",
        f"'ip addr'; {_PORTS_IN_USE}; 'sysctl net.ipv4.ip_local_port_range'",
    ),
    ("bind_addr", errno.EADDRINUSE): Reason("address and port are taken", _PORTS_IN_USE),
    ("bind_addr", errno.EACCES): Reason(
        "a port below 1024 takes the capability CAP_NET_BIND_SERVICE",
        "a port above 1023; 'grep CapEff /proc/self/status' shows the capabilities (rdmacm doctor A9)",
    ),
    ("bind_addr", errno.ENODEV): Reason(
        "no RDMA device has this address",
        "an address of an interface with an RDMA device; 'rdmacm devices' shows them",
    ),
    ("bind_addr", errno.EINVAL): Reason(
        "a link-local address needs its interface, or the address is not valid", "fe80::1%IF with an interface's name"
    ),
    ("resolve_addr", errno.ENODEV): Reason(
        "no RDMA device on the way to the destination",
        "'rdma link' for the devices and their interfaces",
    ),
    ("resolve_addr", errno.ENETUNREACH): _NO_ROUTE,
    ("resolve_addr", errno.EHOSTUNREACH): _NO_ROUTE,
    ("resolve_addr", errno.EADDRINUSE): Reason("the source port is taken", f"source port 0; {_PORTS_IN_USE}"),
    ("resolve_addr", errno.EINVAL): Reason(
        "source and destination are of different families, or a link-local address has no interface",
        "both from one entry of getaddrinfo(); fe80::1%IF with an interface's name",
    ),
    ("resolve_route", errno.ENODEV): Reason(
        "the port has no network interface for this path", "'rdma link' for the devices and their interfaces"
    ),
    ("resolve_addrinfo", errno.EOPNOTSUPP): Reason(
        "the id's port has no subnet administrator, as on Ethernet", "'rdmacm devices' shows the link layers"
    ),
    ("listen", errno.EADDRINUSE): Reason(
        "address and port are taken (on iWARP, a TCP socket takes them as well)", f"{_PORTS_IN_USE}; 'ss -ltn'"
    ),
    ("connect", errno.ECONNREFUSED): Reason(
        "nobody listens on that port", "checking that a listener runs there, and on that port (rdmacm doctor J1)"
    ),
    ("connect", errno.ENETUNREACH): _NO_ROUTE,
    ("connect", errno.EHOSTUNREACH): _NO_ROUTE,
    ("connect", errno.ETIMEDOUT): Reason(
        "the peer did not answer",
        "checking that the peer is up, and the routes and firewalls on the way (rdmacm doctor C1)",
    ),
    ("connect", errno.EINVAL): Reason(
        "the private data do not fit, or a parameter is out of range (on iWARP the number of a queue pair)"
    ),
    ("accept", errno.EINVAL): Reason("there is no request to accept any more, or the private data do not fit"),
    ("reject", errno.EINVAL): Reason("there is no request to reject, or the private data do not fit"),
    ("notify", errno.EISCONN): Reason("the connection is established already"),
    ("join_multicast", errno.ENOSYS): Reason(
        "the device has no multicast groups, as all of iWARP", "an address of a RoCE or InfiniBand device"
    ),
    ("join_multicast", errno.ENODEV): Reason(
        "the id is bound to no network interface that could join", "an id bound to an address of the device"
    ),
}


def reason_of(call: str, code: int) -> Reason:
    """What an errno of the kernel means for a call."""
    return _REASONS.get((call, code)) or Reason(os.strerror(code))


def no_group(is_ethernet: bool, group: Address, send_only: bool) -> Reason:
    """Why joining a group gives EOPNOTSUPP."""
    if is_ethernet and not (isinstance(group, InetAddr) and group.family == AF_INET):
        return Reason("the kernel has no IPv6 groups on RoCEv2", "an IPv4 group, such as 239.1.2.3")
    if send_only:
        return Reason("the port joins no group for sending only", "a join without send_only")
    return Reason("the port does not join this group")


def not_local(host: KernelHost, address: InetAddr) -> Reason:
    """About an address that no interface of this network namespace has. The runtime's lock is held."""
    for device in host.devices():
        if any(row.gid.ip == address.ip and not row.ndev_name for port in device.ports for row in port.gids):
            return Reason(
                f"{address.host} is an address of {device.name} in another network namespace", _moving(device)
            )
    return Reason(
        f"{address.host} is not an address of this host",
        "one of the addresses that 'ip addr' and 'rdmacm devices' show, or the wildcard address",
    )


def address_of_device(host: KernelHost, address: InetAddr) -> str | None:
    """An address of the same family that an active device here has, as text; None if none has. The lock is held."""
    known = (each.ip for each in host.view().addresses if each.view.is_active)
    ip = next((ip for ip in known if len(ip) == len(address.ip) and not is_link_local(ip)), None)
    return None if ip is None else f"{InetAddr(address.family, ip).host}, an address of an RDMA device"


def inactive_port(host: KernelHost, name: str, port_num: int, interface: str = "") -> Reason | None:
    """Why a port neither sends nor receives; None where it does. The runtime's lock is held."""
    state = host.sysfs.inactive_state(name, port_num)
    if not state:
        return None
    link = f"'ip link set {interface or 'IF'} up', the cable, the peer's interface; 'rdma link' shows the state"
    return Reason(f"port {port_num} of {name} is {state}", link)


def inactive_port_of(host: KernelHost, interface: str) -> Reason | None:
    """As :func:`inactive_port`, for the device of an interface."""
    for device in host.devices():
        for port in device.ports:
            if any(row.ndev_name == interface for row in port.gids):
                return inactive_port(host, device.name, port.port_num, interface)
    return None


def loopback_listener(host: KernelHost, address: InetAddr) -> str:
    """A warning: what a listener on a loopback address does in the kernel. The runtime's lock is held."""
    other = address_of_device(host, address)
    hint = "the provider soft" if other is None else f"{other}, or the provider soft at both ends"
    return (
        f"listen {address}: the kernel's devices have no loopback interface: requests to each of their addresses reach "
        f"this listener, also from the network, and on RoCE and iWARP none to {address.host}; try: {hint}"
    )


def _moving(device: Device) -> str:
    return (
        f"moving the interface here ('ip link set IF netns NAME'), or with 'rdma system set netns exclusive' also "
        f"the device ('rdma dev set {device.name} netns NAME'); 'rdma system' and 'rdma link' show where they are "
        "(rdmacm doctor N1)"
    )


def no_device(host: KernelHost) -> Reason | None:
    """Why no address of this network namespace has a device; None where some have. The runtime's lock is held."""
    if host.view().addresses:
        return None
    devices = host.devices()
    if not devices:
        return Reason(
            "there is no RDMA device in this network namespace",
            "loading the adapter's driver, 'rdma link add rxe0 type rxe netdev IF', or the provider soft; "
            "'rdma link' and 'rdma system' show what is there (rdmacm doctor D1)",
        )
    elsewhere = [
        device
        for device in devices
        if any(port.gids and port.link_layer is LinkLayer.ETHERNET for port in device.ports)
        and not any(row.ndev_name for port in device.ports for row in port.gids)
    ]
    if elsewhere:
        names = ", ".join(device.name for device in elsewhere)
        text = f"the network interface of {names} is in another network namespace"
        return Reason(text, _moving(elsewhere[0]))
    return Reason(
        "no RDMA device of this network namespace has an IP address",
        "'ip addr add ADDRESS dev IF' for the interface of a device; 'rdmacm devices' shows the GIDs",
    )
