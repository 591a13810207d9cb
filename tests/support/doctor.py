"""Hosts for the rules of ``rdmacm doctor``: a tree of files as /sys, /proc and /dev have them, and a network."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rdmacm.address import Gid
from rdmacm.doctor import BY_ID, Found, Host, Quiet, Sources, Unasked, collect
from rdmacm.doctor.view import eui64
from rdmacm.net.tables import Route, RoutingRule
from rdmacm.net.types import Interface, InterfaceAddress

MAC = bytes.fromhex("0c42a1112233")
_V1, _V2 = "IB/RoCE v1", "RoCE v2"


def packed(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def link_local(mac: bytes) -> str:
    """The link-local address that a MAC gives."""
    return str(ipaddress.ip_address(b"\xfe\x80" + bytes(6) + eui64(mac)))


@dataclass
class Tables:
    """The network of a host as data."""

    faces: list[Interface] = field(default_factory=list)
    ips: list[InterfaceAddress] = field(default_factory=list)
    lines: list[Route] = field(default_factory=list)
    rule_lines: list[RoutingRule] = field(default_factory=list)

    def interfaces(self) -> list[Interface]:
        return self.faces

    def addresses(self) -> list[InterfaceAddress]:
        return self.ips

    def routes(self) -> list[Route]:
        return self.lines

    def rules(self) -> list[RoutingRule]:
        return self.rule_lines

    def add(self, index: int, name: str, *addresses: str, mac: bytes = MAC, flags: int = 0x11043, **more: Any) -> None:
        """An interface with addresses, such as ``10.0.0.1/24``."""
        mtu, arp_type = more.pop("mtu", 4200), more.pop("arp_type", 1)
        self.faces.append(Interface(index, name, flags, mtu, arp_type, mac, **more))
        for each in addresses:
            ip = ipaddress.ip_interface(each)
            family = 2 if ip.version == 4 else 10
            self.ips.append(InterfaceAddress(family, ip.ip.packed, ip.network.prefixlen, index))


class Tree:
    """The files of a host that has nothing wrong: an adapter ``mlx5_0`` with the interface eth0, 10.0.0.1/24."""

    def __init__(self, root: Path, *, adapter: bool = True) -> None:
        self.root = root
        self.tables = Tables()
        self.denied: set[str] = set()
        self.commands: dict[tuple[str, ...], tuple[int, str, str]] = {}
        self.environment: dict[str, str] = {}
        self.tables.add(1, "lo", "127.0.0.1/8", "::1/128", mac=bytes(6), flags=0x10049)
        self.tables.add(2, "eth0", "10.0.0.1/24", f"{link_local(MAC)}/64")
        self.system()
        if adapter:
            self.device("mlx5_0", "mlx5_core")
            self.gids("mlx5_0", (link_local(MAC), _V1), (link_local(MAC), _V2), ("::ffff:10.0.0.1", _V1),
                      ("::ffff:10.0.0.1", _V2))  # fmt: skip

    def write(self, name: str, text: str = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        return path

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            for each in path.iterdir():
                self.remove(str(each.relative_to(self.root)))
            path.rmdir()
        else:
            path.unlink()

    def system(self) -> None:
        self.write("proc/sys/kernel/osrelease", "6.12.0-1-generic")
        self.write("proc/sys/kernel/tainted", "0")
        self.write("proc/sys/net/core/somaxconn", "4096")
        self.write("proc/sys/net/core/netdev_max_backlog", "1000")
        self.write("proc/sys/net/ipv6/conf/all/disable_ipv6", "0")
        self.write("proc/sys/net/ipv4/ip_local_port_range", "32768 60999")
        self.write("proc/sys/net/rdma_ucm/max_backlog", "1024")
        self.write("proc/modules", "ib_core 1 1 rdma_cm - 0x0\nrdma_ucm 1 0 - - 0x0\nib_uverbs 1 0 - - 0x0")
        self.limit("unlimited")
        self.write("proc/self/status", "CapEff:\t0000000000000000")
        self.write("sys/module/ib_core/parameters/netns_mode", "Y")
        self.write("dev/infiniband/rdma_cm")
        for name in ("libibverbs.so.1", "librdmacm.so.1.3.56.0", "libibverbs/libmlx5-rdmav59.so"):
            self.write(f"usr/lib/x86_64-linux-gnu/{name}")
        self.write("usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav59.so")
        self.write("etc/libibverbs.d/mlx5.driver", "driver mlx5")

    def limit(self, memlock: str) -> None:
        self.write("proc/self/limits", f"Max locked memory         {memlock}            {memlock}            bytes")

    def device(self, name: str, driver: str, *, kind: str = "1: CA", link: str = "Ethernet", **port: str) -> None:
        """A device with one port that is active."""
        number = len(list(self.root.glob("sys/class/infiniband/*")))
        folder = f"sys/class/infiniband/{name}"
        self.write(f"{folder}/node_type", kind)
        self.write(f"{folder}/node_guid", f"0c42:a103:0011:{number:04x}")
        self.write(f"{folder}/node_desc", "rxe" if driver == "rdma_rxe" else "host")
        self.write(f"drivers/{driver}/module")
        (self.root / folder / "device").mkdir()
        if driver != "rdma_rxe":
            (self.root / folder / "device" / "driver").symlink_to(self.root / "drivers" / driver)
        values = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": link, "rate": "100 Gb/sec (4X EDR)"}
        values |= {"sm_lid": "0x1" if link == "InfiniBand" else "0x0", "lid": "0x2", "cap_mask": "0x0"} | port
        for key, value in values.items():
            self.write(f"{folder}/ports/1/{key}", value)
        self.write(f"{folder}/ports/1/pkeys/0", "0xffff")
        self.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        self.write(f"dev/infiniband/uverbs{number}")

    def gids(self, name: str, *rows: tuple[str, str] | tuple[str, str, str]) -> None:
        """The GID table of a device: GID, type, and interface (eth0)."""
        port = f"sys/class/infiniband/{name}/ports/1"
        if (self.root / port / "gids").exists():
            self.remove(f"{port}/gids")
        for number, row in enumerate(rows):
            gid = Gid(row[0])
            self.write(f"{port}/gids/{number}", ":".join(gid.hex()[at : at + 4] for at in range(0, 32, 4)))
            if any(gid):
                self.write(f"{port}/gid_attrs/types/{number}", row[1])
                self.write(f"{port}/gid_attrs/ndevs/{number}", row[2] if len(row) == 3 else "eth0")

    def port_file(self, name: str, text: str, device: str = "mlx5_0") -> None:
        self.write(f"sys/class/infiniband/{device}/ports/1/{name}", text)

    def run(self, argv: Sequence[str]) -> tuple[int, str, str]:
        return self.commands.get(tuple(argv), (127, "", f"{argv[0]} is not installed"))

    def host(self, provider: str = "kernel", unit: str = "") -> Host:
        """What is measured."""
        sources = Sources(
            f"{self.root}/",
            self.tables,
            self.run,
            self.environment,
            lambda path, mode: Path(path).exists() and Path(path).name not in self.denied,
        )
        return collect(sources, provider, unit, reason="")


def fires(host: Host, rule: str, *texts: str, note: bool = False) -> Found:
    """The finding of a rule, which has some texts in its measurement or command."""
    outcome = BY_ID[rule].outcome(host)
    assert isinstance(outcome, Found), f"{rule}: {outcome}"
    assert outcome.is_note is note, outcome
    for text in texts:
        assert text in f"{outcome.text} | {outcome.command}", outcome
    return outcome


def silent(host: Host, rule: str) -> Quiet | Unasked:
    """What a rule that finds nothing has seen."""
    outcome = BY_ID[rule].outcome(host)
    assert not isinstance(outcome, Found), f"{rule}: {outcome}"
    return outcome


__all__ = ["MAC", "Tables", "Tree", "fires", "link_local", "packed", "replace", "silent"]
