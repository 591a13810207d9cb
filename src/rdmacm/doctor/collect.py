"""Measure a host: read files below a root, netlink, and what packet filters print. Nothing is changed or sent."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rdmacm.doctor import firewall
from rdmacm.doctor.connection_rules import CLASS_VARIABLES, DEVICE_VARIABLES
from rdmacm.doctor.descriptors import is_readable
from rdmacm.doctor.gid_rules import INDEX_VARIABLES
from rdmacm.doctor.view import UNLIMITED, Bond, Firewall, Host, KernelDevice, KernelPort, PortOwner, Unit, ip_text
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.net import open_network
from rdmacm.net.tables import Route, RoutingRule, Tables
from rdmacm.net.types import ROCE_PORT, Interface, InterfaceAddress
from rdmacm.provider.choice import choose
from rdmacm.verbs.device import Port

#: Drivers of libibverbs by the drivers of the kernel; others have the same name.
_LIBRARIES = {
    "mlx5_core": "mlx5",
    "mlx5_ib": "mlx5",
    "mlx4_core": "mlx4",
    "mlx4_ib": "mlx4",
    "rdma_rxe": "rxe",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "i40e": "irdma",
    "qede": "qedr",
    "hfi1": "hfi1verbs",
    "ib_qib": "ipathverbs",
    "iw_cxgb4": "cxgb4",
    "ib_mthca": "mthca",
    "hns_roce_hw_v2": "hns",
    "hns3": "hns",
}
_LIBRARY_FOLDERS = ("usr/lib", "usr/lib64", "lib", "lib64", "usr/local/lib", "usr/local/lib64")
_DRIVER_FOLDERS = ("etc/libibverbs.d", "usr/local/etc/libibverbs.d")
_UNIT_FOLDERS = ("lib/systemd/system", "usr/lib/systemd/system", "run/systemd/system", "etc/systemd/system")
_SYSCTLS = (
    "net/ipv4/ip_local_port_range",
    "net/rdma_ucm/max_backlog",
    "kernel/yama/ptrace_scope",
    *(f"net/ipv4/conf/all/{name}" for name in ("arp_ignore", "arp_announce", "rp_filter", "accept_local")),
)
_OF_INTERFACE = ("arp_ignore", "arp_announce", "rp_filter", "accept_local")
#: The comm of the shared device plugin, as long as the kernel keeps it.
_PLUGIN = "k8s-rdma-shared"
#: How the memfd of a group of rdmacm's processes is called, and their names of AF_UNIX.
_OURS = f"rdmacm-{ROCE_PORT}-"
_CHANNEL = "dev/infiniband/rdma_cm"
#: The variables that rules judge.
_VARIABLES = (*INDEX_VARIABLES, *DEVICE_VARIABLES, *CLASS_VARIABLES)
_COMMAND_SECONDS = 10
_NO_LIMIT = "unlimited"


class NetworkTables(Protocol):
    """What is read of the network; :class:`rdmacm.net.tables.Tables` implements it."""

    def interfaces(self) -> list[Interface]: ...
    def addresses(self) -> list[InterfaceAddress]: ...
    def routes(self) -> list[Route]: ...
    def rules(self) -> list[RoutingRule]: ...


def run_command(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a program; returns its status, output and errors. 127 if it is not installed."""
    path = shutil.which(argv[0], path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        return 127, "", f"{argv[0]} is not installed"
    try:
        done = subprocess.run(
            [path, *argv[1:]], capture_output=True, text=True, errors="replace", timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 126, "", f"{argv[0]}: {error}"
    return done.returncode, done.stdout, done.stderr


@dataclass
class Sources:
    """Where measurements come from. Tests give a root with files of their own, tables and commands."""

    root: str = "/"
    tables: NetworkTables | None = None
    run: Callable[[Sequence[str]], tuple[int, str, str]] = run_command
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    #: Network and processes are those of the calling thread only where the root is the machine's.
    access: Callable[[str, int], bool] = os.access
    readable: Callable[[int, int], bool] = is_readable

    @property
    def is_live(self) -> bool:
        return self.root == "/"

    def path(self, name: str) -> Path:
        return Path(self.root) / name

    def text(self, name: str) -> str:
        """A file without white space around; empty if it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, name: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def link(self, name: str) -> str:
        """What a symbolic link has; empty if it cannot be read."""
        try:
            return os.readlink(self.path(name))
        except OSError:
            return ""

    def identity(self, name: str) -> tuple[int, int] | None:
        """Which file this is: its device and number; None if that cannot be read."""
        try:
            found = os.stat(self.path(name))
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def net(self, name: str) -> str:
        """A file of ``/proc/net`` of the calling thread."""
        return self.text(f"proc/thread-self/net/{name}" if self.is_live else f"proc/net/{name}")


def collect(
    sources: Sources | None = None, provider: str | None = None, unit: str = "", reason: str | None = None
) -> Host:
    """Measure the host. ``provider``: as for CmId. ``unit``: a unit of systemd, else that of this process.

    ``reason``, with a provider: why auto chose it, in tests.
    """
    sources = sources or Sources()
    unread = _unread(sources)
    choice = choose(provider)
    chosen, why = choice if reason is None else (provider or "soft", reason)
    interfaces, addresses, rules, routes = _network(sources)
    devices = _devices(sources, interfaces)
    modules = frozenset(line.split()[0] for line in sources.text("proc/modules").splitlines() if line)
    has_rxe = "rdma_rxe" in modules or any(device.driver == "rdma_rxe" for device in devices)
    vlans, bonds = _stacked(sources)
    has_rdma_cm, rdma_cm_closed = _node(sources, "rdma_cm")
    netns_mode = _netns_mode(sources)
    status = dict(line.split(":", 1) for line in sources.text("proc/self/status").splitlines() if ":" in line)
    return Host(
        provider=chosen,
        provider_reason=why,
        is_named=bool(provider),
        release=_release(sources),
        devices=devices,
        modules=modules,
        has_rdma_cm=has_rdma_cm,
        rdma_cm_closed=rdma_cm_closed,
        has_ucma="rdma_ucm" in modules
        or sources.path("sys/class/misc/rdma_cm").exists()
        or sources.path("sys/module/rdma_ucm").exists(),
        librdmacm=_librdmacm(sources),
        has_libibverbs=bool(_library_files(sources, "libibverbs.so.1")),
        driver_folders=tuple(f"/{name}" for name in _DRIVER_FOLDERS if sources.names(name)),
        memlock=_memlock(sources),
        capabilities=int(status.get("CapEff", "0").strip() or "0", 16),
        unit=_unit(sources, unit),
        netns_mode=netns_mode,
        is_first_namespace=_is_first(sources),
        plugins=_plugins(sources),
        has_ipv6=sources.path("proc/sys/net/ipv6").is_dir(),
        interfaces=interfaces,
        addresses=addresses,
        routes=routes,
        rules=rules,
        vlans=vlans,
        bonds=bonds,
        sysctls=_sysctls(sources, interfaces),
        owners=_owners(sources, has_rxe),
        firewall=_firewall(sources),
        cm_ids=_cm_ids(sources, devices),
        tcp_listeners=_tcp_listeners(sources),
        taint=int(sources.text("proc/sys/kernel/tainted") or 0),
        pfc=_pfc(sources, devices),
        environment={name: sources.environment[name] for name in _VARIABLES if name in sources.environment},
        foreign=_foreign(sources) if netns_mode == "exclusive" else {},
        # What is unread now and was before any of this, nobody reads.
        unread={pid: sources.text(f"proc/{pid}/comm") for pid, _ in sorted(unread and unread & _unread(sources))},
    )


# -- devices -------------------------------------------------------------------------------------------------


def _devices(sources: Sources, interfaces: Sequence[Interface]) -> tuple[KernelDevice, ...]:
    sysfs = Sysfs(str(sources.path("sys")))
    by_name = {each.name: each for each in interfaces}
    nodes = {
        sources.text(f"sys/class/infiniband_verbs/{node}/ibdev"): node
        for node in sources.names("sys/class/infiniband_verbs")
    }
    found = []
    for name in sysfs.names():
        device = sysfs.device(name, None, by_name)
        if device is None:
            continue
        driver, node = sysfs.driver(name), nodes.get(name, "")
        folder = f"sys/class/infiniband/{name}"
        found.append(
            KernelDevice(
                name,
                driver,
                device.node_guid,
                device.transport_type,
                tuple(_port(sources, sysfs, name, port) for port in device.ports),
                sources.text(f"{folder}/parent"),
                node,
                _node(sources, node)[1] if node else "",
                _library(sources, driver),
            )
        )
    return tuple(found)


def _port(sources: Sources, sysfs: Sysfs, name: str, port: Port) -> KernelPort:
    settings = f"sys/kernel/config/rdma_cm/{name}/ports/{port.port_num}"
    tos = sources.text(f"{settings}/default_roce_tos")
    counts = sysfs.cm_counters_of(name, str(port.port_num))
    return KernelPort(port, sources.text(f"{settings}/default_roce_mode"), int(tos) if tos.isdigit() else None, counts)


def _node(sources: Sources, name: str) -> tuple[bool, str]:
    """Whether a file of /dev/infiniband is there, and why it may not be opened."""
    path = sources.path(f"dev/infiniband/{name}")
    shown = f"/dev/infiniband/{name}"
    if not path.exists():
        return False, f"{shown} is not there"
    if not sources.access(str(path), os.R_OK | os.W_OK):
        return True, f"{shown} may not be opened (mode {path.stat().st_mode & 0o777:o})"
    if sources.is_live:
        try:  # access() knows nothing of the device cgroup
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return True, f"{shown}: {error.strerror}: the device cgroup forbids it"
    return True, ""


def _library_files(sources: Sources, pattern: str) -> list[Path]:
    """Files in the folders of libraries, also in those of an architecture, that match."""
    found = []
    for folder in _LIBRARY_FOLDERS:
        for prefix in ("", "*-linux-*/", "libibverbs/", "*-linux-*/libibverbs/"):
            found += list(sources.path(folder).glob(f"{prefix}{pattern}"))
    return found


def _library(sources: Sources, driver: str) -> str:
    if not driver:
        return ""
    files = _library_files(sources, f"lib{_LIBRARIES.get(driver, driver)}-rdmav*.so")
    return files[0].name if files else ""


def _librdmacm(sources: Sources) -> int:
    """The version of rdma-core that librdmacm is of: librdmacm.so.1.3.44.0 is of 44."""
    for path in _library_files(sources, "librdmacm.so.1.*"):
        if found := re.fullmatch(r"librdmacm\.so\.1\.\d+\.(\d+)\.\d+", path.name):
            return int(found[1])
    return 0


def _cm_ids(sources: Sources, devices: Sequence[KernelDevice]) -> int | None:
    """How many ids of rdma_cm the kernel has, by rdma(8); None if that is not known."""
    if not devices or not sources.is_live:
        return None
    status, out, _ = sources.run(["rdma", "resource", "show"])
    counts = re.findall(r"\bcm_id (\d+)", out) if status == 0 else []
    return sum(map(int, counts)) if counts else None


def _pfc(sources: Sources, devices: Sequence[KernelDevice]) -> dict[str, frozenset[int]]:
    """The priorities with flow control of the interfaces of devices, by dcb(8); none where it is not installed."""
    names = {row.ndev_name for device in devices for port in device.ports for row in port.port.gids if row.ndev_name}
    found = {}
    for name in sorted(names):
        status, out, _ = sources.run(["dcb", "pfc", "show", "dev", name, "prio-pfc"])
        if status == 0:
            found[name] = frozenset(int(number) for number in re.findall(r"(\d):on", out))
    return found


# -- network -------------------------------------------------------------------------------------------------


def _network(
    sources: Sources,
) -> tuple[
    tuple[Interface, ...],
    tuple[InterfaceAddress, ...],
    tuple[RoutingRule, ...],
    tuple[Route, ...],
]:
    tables = sources.tables
    if tables is None and sys.platform != "linux":
        network = open_network()
        return tuple(network.interfaces()), tuple(network.addresses()), (), ()
    try:
        own = None if tables is not None else Tables()
    except OSError:  # a sandbox without netlink
        return (), (), (), ()
    tables = tables or own
    assert tables is not None
    try:
        return (
            tuple(tables.interfaces()),
            tuple(tables.addresses()),
            tuple(tables.rules()),
            tuple(tables.routes()),
        )
    finally:
        if own is not None:
            own.close()


def _stacked(sources: Sources) -> tuple[dict[str, str], dict[str, Bond]]:
    """The interface below each VLAN, and the bonds, of /proc/net."""
    vlans = dict(re.findall(r"^(\S+)\s*\|\s*\d+\s*\|\s*(\S+)", sources.net("vlan/config"), re.MULTILINE))
    folder = "proc/thread-self/net/bonding" if sources.is_live else "proc/net/bonding"
    return vlans, {name: _bond(sources.text(f"{folder}/{name}")) for name in sources.names(folder)}


def _bond(text: str) -> Bond:
    mode = re.search(r"^Bonding Mode: (.*)", text, re.MULTILINE)
    failures = re.findall(r"^Link Failure Count: (\d+)", text, re.MULTILINE)
    return Bond(mode[1] if mode else "", sum(map(int, failures)))


def _sysctls(sources: Sources, interfaces: Sequence[Interface]) -> dict[str, str]:
    names = [*_SYSCTLS, *(f"net/ipv4/conf/{face.name}/{name}" for face in interfaces for name in _OF_INTERFACE)]
    found = {name: sources.text(f"proc/sys/{name}") for name in names}
    return {name: text for name, text in found.items() if text}


def _sockets(sources: Sources, name: str) -> list[tuple[str, int, str, int, int]]:
    """(address, port, state, user, inode) of the sockets in a file of /proc/net."""
    found = []
    for line in sources.net(name).splitlines()[1:]:
        fields = line.split()
        with contextlib.suppress(IndexError, ValueError):
            address, _, port = fields[1].partition(":")
            ip = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
            found.append((ip_text(ip), int(port, 16), fields[3], int(fields[7]), int(fields[9])))
    return found


def _owners(sources: Sources, has_rxe: bool) -> tuple[PortOwner, ...]:
    """Who has UDP port 4791. A socket of root that no process shows is the kernel's, where it has rxe."""
    sockets = [each for name in ("udp", "udp6") for each in _sockets(sources, name) if each[1] == ROCE_PORT]
    if not sockets:
        return ()
    names = sources.net("unix")
    in_group = f"@{_OURS}" in names
    found = []
    processes = _processes_of({inode for *_, inode in sockets if inode}, sources)
    for address, _, _, user, inode in sockets:
        pid, is_ours = processes.get(inode, (0, False))
        command = sources.text(f"proc/{pid}/cmdline").replace("\0", " ").strip() if pid else ""
        is_kernel = not pid and not user and has_rxe
        is_ours = is_ours or (in_group and not pid and not is_kernel)
        found.append(PortOwner(address, pid, command[:60], is_kernel, is_ours))
    return tuple(found)


def _processes_of(inodes: set[int], sources: Sources) -> dict[int, tuple[int, bool]]:
    """The process that has a socket, by inode, and whether it is one of rdmacm."""
    found: dict[int, tuple[int, bool]] = {}
    links = {f"socket:[{inode}]": inode for inode in inodes}
    for pid in filter(str.isdigit, sources.names("proc")):
        targets = set()
        for fd in sources.names(f"proc/{pid}/fd"):
            targets.add(sources.link(f"proc/{pid}/fd/{fd}"))
        is_ours = any(target.startswith(f"/memfd:{_OURS}") for target in targets)
        for link in targets & links.keys():
            inode = links[link]
            if is_ours or inode not in found:
                found[inode] = int(pid), is_ours
    return found


def _tcp_listeners(sources: Sources) -> frozenset[int]:
    listening = "0A"
    return frozenset(
        port for name in ("tcp", "tcp6") for _, port, state, *_ in _sockets(sources, name) if state == listening
    )


def _firewall(sources: Sources) -> Firewall:
    read, unread, verdicts = [], [], []
    is_legacy = bool(sources.net("ip_tables_names"))
    saved = {}
    for command in ("iptables-save", "ip6tables-save"):
        status, version, _ = sources.run([command, "--version"])
        # The legacy programs load modules of the kernel, which asking must not do.
        if status == 0 and ("nf_tables" in version or is_legacy):
            status, out, errors = sources.run([command])
            if status == 0:
                saved[command] = out
            else:
                unread.append(_first_line(errors) or command)
    for command, out in saved.items():
        read.append(command)
        verdicts += firewall.of_iptables(out, command.removesuffix("-save"))
    status, out, errors = sources.run(["nft", "-j", "list", "ruleset"])
    if status == 0:
        read.append("nft")
        verdicts += firewall.of_nft(out, skip_xt=bool(saved))
    else:
        unread.append(_first_line(errors) or "nft")
    return Firewall(tuple(read), tuple(unread), tuple(dict.fromkeys(verdicts)))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


# -- system --------------------------------------------------------------------------------------------------


def _release(sources: Sources) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", sources.text("proc/sys/kernel/osrelease"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _memlock(sources: Sources) -> int:
    """The soft limit of locked memory in bytes."""
    for line in sources.text("proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            word = line.split()[3]
            return UNLIMITED if word == _NO_LIMIT else int(word)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _netns_mode(sources: Sources) -> str:
    """What ``rdma system`` says: the parameter of ib_core is the variable that it shows."""
    return {"Y": "shared", "N": "exclusive"}.get(sources.text("sys/module/ib_core/parameters/netns_mode"), "")


def _foreign(sources: Sources) -> dict[int, frozenset[str]]:
    """The devices of other network namespaces: what a process sees there in a sysfs of its own."""
    own = "thread-self" if sources.is_live else "self"
    namespaces, trees = {sources.link(f"proc/{own}/ns/net")}, {sources.identity("sys")}
    found = {}
    for pid in filter(str.isdigit, sources.names("proc")):
        namespace, tree = sources.link(f"proc/{pid}/ns/net"), sources.identity(f"proc/{pid}/root/sys")
        # A process without a sysfs of its own sees the devices of the namespace in which its sysfs was mounted.
        if namespace and tree and namespace not in namespaces and tree not in trees:
            namespaces.add(namespace)
            trees.add(tree)
            found[int(pid)] = frozenset(sources.names(f"proc/{pid}/root/sys/class/infiniband"))
    return found


def _unread(sources: Sources) -> set[tuple[int, int]]:
    """(process, descriptor) of the channels of rdma_cm that have an event to read."""
    if not sources.path(_CHANNEL).exists():
        return set()
    return {
        (int(pid), int(fd))
        for pid in filter(str.isdigit, sources.names("proc"))
        for fd in sources.names(f"proc/{pid}/fd")
        if sources.link(f"proc/{pid}/fd/{fd}") == f"/{_CHANNEL}" and sources.readable(int(pid), int(fd))
    }


def _is_first(sources: Sources) -> bool | None:
    """Whether this is the machine's network namespace, which alone has the sysctls that are not of a namespace."""
    if not sources.path("proc/sys/net/core/somaxconn").exists():
        return None
    return sources.path("proc/sys/net/core/netdev_max_backlog").exists()


def _plugins(sources: Sources) -> tuple[str, ...]:
    found = []
    for pid in filter(str.isdigit, sources.names("proc")):
        name = sources.text(f"proc/{pid}/comm")
        if name.startswith(_PLUGIN):
            found.append(f"{name} (process {pid})")
    return tuple(found)


def _unit(sources: Sources, name: str) -> Unit | None:
    """The unit of a name, or the service that this process is in."""
    is_asked = bool(name)
    if not name:
        services = re.findall(r"/([^/\s]+\.service)$", sources.text("proc/self/cgroup"), re.MULTILINE)
        # A login session, a user's manager or an agent says nothing of a daemon.
        name = next((each for each in services if not each.startswith(("user@", "session"))), "")
        if not name:
            return None
    elif "." not in name:
        name += ".service"
    settings: dict[str, str] = {}
    is_there = False
    for folder in _UNIT_FOLDERS:
        files = [f"{folder}/{name}", *(f"{folder}/{name}.d/{each}" for each in sources.names(f"{folder}/{name}.d"))]
        for file in files:
            text = sources.text(file)
            is_there = is_there or bool(text)
            for line in text.splitlines():
                key, equals, value = line.partition("=")
                if equals and key[:1].isalpha():
                    key, value = key.strip(), value.strip()
                    is_list = key == "DeviceAllow" and value
                    settings[key] = f"{settings[key]} {value}" if is_list and settings.get(key) else value
    return Unit(name, settings, is_asked) if is_there else None
