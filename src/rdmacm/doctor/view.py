"""What the rules judge: the measurements of one host, as plain data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

from rdmacm.explanation import Explanation
from rdmacm.net.tables import Route, RoutingRule
from rdmacm.net.types import Interface, InterfaceAddress
from rdmacm.verbs.device import GidEntry, Port
from rdmacm.verbs.enums import LinkLayer, TransportType

#: The capabilities that matter here, as bits of ``CapEff`` (capabilities(7)).
CAP_NET_BIND_SERVICE, CAP_IPC_LOCK, CAP_SYS_PTRACE = 10, 14, 19
#: A limit that is none.
UNLIMITED = -1


def ip_text(ip: bytes) -> str:
    """A packed address as text."""
    return inet_ntop(AF_INET if len(ip) == 4 else AF_INET6, ip)


def packed(text: str) -> bytes:
    """A numeric address, with or without a scope, packed; empty for anything else."""
    host = text.partition("%")[0]
    for family in (AF_INET, AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            return inet_pton(family, host)
    return b""


@dataclass(frozen=True)
class KernelPort:
    """A port of a device of the kernel. ``port`` has the GIDs that are not zero; ``gid_rows`` counts all."""

    port: Port
    #: ``default_roce_mode`` and ``default_roce_tos`` of configfs; empty and None where they are not there.
    roce_mode: str = ""
    roce_tos: int | None = None
    #: Messages of the connection manager: ``tx_req``, ``rx_rep``, ``tx_retries_req``, ``rx_duplicates_req``.
    cm: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_ethernet(self) -> bool:
        return self.port.link_layer is LinkLayer.ETHERNET

    @property
    def is_infiniband(self) -> bool:
        return self.port.link_layer is LinkLayer.INFINIBAND


@dataclass(frozen=True)
class KernelDevice:
    """A device of the kernel."""

    name: str
    driver: str
    node_guid: int
    transport: TransportType
    ports: tuple[KernelPort, ...]
    #: The network interface that an rxe or siw device was made on; empty for adapters.
    parent: str = ""
    #: The file of the device in ``/dev/infiniband``; empty where sysfs names none.
    node: str = ""
    #: Why that file may not be opened; empty where it may.
    closed: str = ""
    #: The file of libibverbs's driver; empty if none is found.
    library: str = ""

    @property
    def is_iwarp(self) -> bool:
        return self.transport is TransportType.IWARP


@dataclass(frozen=True)
class PortOwner:
    """A socket that has UDP port 4791. ``pid`` 0: not known; ``is_kernel``: the socket belongs to no process."""

    address: str
    pid: int
    process: str
    is_kernel: bool
    is_ours: bool


@dataclass(frozen=True)
class Verdict:
    """What a firewall does with RoCEv2 packets. ``drops``: the rule or policy that drops them, as text."""

    drops: str
    #: Whether only packets with other properties as well (an interface, a source) are dropped.
    is_partial: bool = False
    direction: str = "input"


@dataclass(frozen=True)
class Firewall:
    """What could be read of packet filters: ``sources`` are the commands that answered, ``unread`` why others not."""

    sources: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Bond:
    """A bond. ``mode``: as /proc/net/bonding has it; ``failures``: how often links of its members have failed."""

    mode: str
    failures: int = 0

    @property
    def moves_address(self) -> bool:
        """Whether its peers are told another MAC address when a link fails."""
        return "fail_over_mac active" in self.mode or self.mode == "adaptive load balancing"


@dataclass(frozen=True)
class Unit:
    """A unit of systemd. ``settings`` are those of its files, the last wins.

    ``is_asked``: the user named it; else it is that of this process, whose limits are measured.
    """

    name: str
    settings: Mapping[str, str]
    is_asked: bool = True


@dataclass(frozen=True)
class Attempt:
    """How a connection to the target went: ``ok``, or the step, errno, reject reason and text."""

    ok: bool
    step: str = ""
    errno: int = 0
    reason: int = 0
    text: str = ""


@dataclass(frozen=True)
class Target:
    """What was asked for with ``--to``, ``--from`` and ``--port``."""

    node: str = ""
    source: str = ""
    port: int = 0
    #: The addresses that the name gives, packed.
    addresses: tuple[bytes, ...] = ()
    #: Whether the node is a name and no number.
    is_name: bool = False
    explanation: Explanation | None = None
    attempt: Attempt | None = None

    @property
    def address(self) -> bytes:
        """The first address, packed; empty without one."""
        return self.addresses[0] if self.addresses else b""


@dataclass(frozen=True)
class Host:
    """The measurements. What could not be read is empty or None, and the rules then say so."""

    #: Which provider's devices carry connections: ``kernel`` or ``soft``, and why ``auto`` did not take the kernel's.
    provider: str = "soft"
    provider_reason: str = ""
    #: Whether the provider was named by the user.
    is_named: bool = False
    release: tuple[int, int] = (0, 0)
    devices: tuple[KernelDevice, ...] = ()
    modules: frozenset[str] = frozenset()
    #: Why ``/dev/infiniband/rdma_cm`` may not be opened; empty where it may. ``has_rdma_cm``: whether it is there.
    has_rdma_cm: bool = False
    rdma_cm_closed: str = ""
    #: Whether the kernel has registered rdma_cm, loaded as a module or built in.
    has_ucma: bool = False
    #: librdmacm's version as rdma-core counts, 0 if it is not installed; whether libibverbs is.
    librdmacm: int = 0
    has_libibverbs: bool = True
    #: Folders of libibverbs's configuration that are there.
    driver_folders: tuple[str, ...] = ()
    #: RLIMIT_MEMLOCK in bytes, and the effective capabilities.
    memlock: int = UNLIMITED
    capabilities: int = 0
    unit: Unit | None = None
    #: ``shared`` or ``exclusive``; empty where the kernel has no RDMA.
    netns_mode: str = ""
    #: Whether this is the network namespace of the machine; None if that is not known.
    is_first_namespace: bool | None = None
    #: The names of processes of device plugins of Kubernetes.
    plugins: tuple[str, ...] = ()
    has_ipv6: bool = True
    interfaces: tuple[Interface, ...] = ()
    addresses: tuple[InterfaceAddress, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[RoutingRule, ...] = ()
    #: The interface below each VLAN, and the bonds, by name.
    vlans: Mapping[str, str] = field(default_factory=dict)
    bonds: Mapping[str, Bond] = field(default_factory=dict)
    #: sysctls by path below /proc/sys; those that are not there are missing.
    sysctls: Mapping[str, str] = field(default_factory=dict)
    owners: tuple[PortOwner, ...] = ()
    firewall: Firewall = field(default_factory=Firewall)
    #: Ports held by ids of rdma_cm, and TCP ports that are listened on.
    cm_ids: int | None = None
    tcp_listeners: frozenset[int] = frozenset()
    #: The taint flags of the kernel.
    taint: int = 0
    #: ECN and PFC: priorities with flow control, by interface; None where it is not known.
    pfc: Mapping[str, frozenset[int]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The devices of other network namespaces, by a process there; only where each namespace has its own.
    foreign: Mapping[int, frozenset[str]] = field(default_factory=dict)
    #: Processes that have left events of rdma_cm unread, each with its name.
    unread: Mapping[int, str] = field(default_factory=dict)
    target: Target | None = None

    # -- what rules ask --------------------------------------------------------------------------------------

    @property
    def uses_kernel(self) -> bool:
        """Whether connections are carried by the kernel's devices."""
        return self.provider == "kernel"

    def interface(self, index_or_name: int | str) -> Interface | None:
        """An interface by its index or name."""
        return next((each for each in self.interfaces if index_or_name in (each.index, each.name)), None)

    def name_of(self, index: int) -> str:
        """The name of an interface, or its number as text."""
        found = self.interface(index)
        return found.name if found else str(index)

    def addresses_of(self, index: int) -> tuple[InterfaceAddress, ...]:
        return tuple(each for each in self.addresses if each.ifindex == index)

    def owner_of(self, ip: bytes) -> Interface | None:
        """The interface that has an address."""
        found = next((each for each in self.addresses if each.ip == ip), None)
        return self.interface(found.ifindex) if found else None

    def is_here(self, row: GidEntry) -> bool:
        """Whether the interface of a GID is in this network namespace.

        Sysfs has its name, wherever it is, and another interface may have that name here.
        """
        interface = self.interface(row.ndev_name) if row.ndev_name else None
        if interface is None:
            return False
        ips = {each.ip for each in self.addresses_of(interface.index)}
        return row.gid.ip in ips or (row.gid.ip[:2] == b"\xfe\x80" and eui64(interface.address) == row.gid[8:])

    def kernel_ports(self) -> list[tuple[KernelDevice, KernelPort]]:
        return [(device, port) for device in self.devices for port in device.ports]

    def rdma_interfaces(self) -> list[Interface]:
        """The interfaces that carry RDMA: those of the kernel's GIDs, else all that a software device is on."""
        if self.uses_kernel:
            rows = [row for _, port in self.kernel_ports() for row in port.port.gids if self.is_here(row)]
            names = {row.ndev_name for row in rows}
            names |= {device.parent for device in self.devices if device.parent}
            return [each for each in self.interfaces if each.name in names or each.is_ipoib]
        return [each for each in self.interfaces if not each.is_loopback and self.addresses_of(each.index)]

    def sysctl(self, path: str) -> int | None:
        """The number of a sysctl; None where it is not there."""
        text = self.sysctls.get(path, "").split()
        return int(text[0]) if text and text[0].lstrip("-").isdigit() else None

    def may(self, capability: int) -> bool:
        return bool(self.capabilities >> capability & 1)

    def network_of(self, address: InterfaceAddress) -> IPv4Network | IPv6Network:
        """The subnet of an address."""
        kind = IPv4Network if address.family == AF_INET else IPv6Network
        return kind((address.ip, address.prefix_length), strict=False)


def eui64(mac: bytes) -> bytes:
    """The interface identifier that a MAC gives (RFC 4291, appendix A), as the kernel's default GIDs have it."""
    if len(mac) != 6:
        return b""
    return bytes((mac[0] ^ 2, mac[1], mac[2], 0xFF, 0xFE, mac[3], mac[4], mac[5]))
