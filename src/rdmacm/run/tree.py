"""The devices as programs find them in files: ``/sys/class/infiniband``, its siblings, and ``/dev/infiniband``.

What the kernel has there is in its ``Documentation/ABI/stable/sysfs-class-infiniband``, and the forms of the values in
``drivers/infiniband/core/sysfs.c``. The files say what the devices were when the program was started. Counters are
missing, as nothing in the server sees the packets.

:mod:`rdmacm.run.mounts` shows a tree to a program.
"""

from __future__ import annotations

import os
import posixpath
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from rdmacm.address import DEFAULT_PKEY
from rdmacm.verbs.device import Device, GidEntry, Port

#: The directories of a tree; nothing else of ``/dev`` and ``/sys`` changes.
NODES = "/dev/infiniband"
DEVICES = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"
DATAGRAMS = "/sys/class/infiniband_mad"
#: What stands for the nodes. Making device nodes takes privileges, showing another one does not. Programs look at the
#: kind and the permissions; one that writes a command of the kernel gets ENOSPC, and not what looks like success.
STAND_IN = "/dev/full"
#: Of the kernel's interfaces: ``IB_USER_VERBS_ABI_VERSION``, that of a driver, and ``IB_USER_MAD_ABI_VERSION``.
_VERBS_ABI, _DRIVER_ABI, _MAD_ABI = "6", "1", "5"
_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_PHYS_STATES = {1: "Sleep", 2: "Polling", 3: "Disabled", 4: "PortConfigurationTraining", 5: "LinkUp"}
#: By ``active_width``: the lanes; by ``active_speed``: Gb/s of a lane, and its name.
_LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_SPEEDS = {
    1: (2.5, "SDR"),
    2: (5, "DDR"),
    4: (10, "QDR"),
    8: (10, "FDR10"),
    16: (14, "FDR"),
    32: (25, "EDR"),
    64: (50, "HDR"),
    128: (100, "NDR"),
}


@dataclass
class Tree:
    """``files``: text by path; ``links``: targets by path; ``directories``: empty ones; ``nodes``: paths of nodes."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)

    def add(self, directory: str, values: dict[str, str]) -> None:
        """Add files to a directory, each of one line."""
        for name, value in values.items():
            self.files[posixpath.join(directory, name)] = value + "\n"


def tree_of(devices: Iterable[Device], host_name: str) -> Tree:
    """The files of devices."""
    tree = Tree(nodes=[f"{NODES}/rdma_cm"])
    tree.add(VERBS, {"abi_version": _VERBS_ABI})
    tree.add(DATAGRAMS, {"abi_version": _MAD_ABI})
    for device in devices:
        _add_device(tree, device, host_name)
    return tree


def _add_device(tree: Tree, device: Device, host_name: str) -> None:
    node, path, guid = f"uverbs{device.index}", f"{DEVICES}/{device.name}", device.guid_text
    port = device.ports[0]
    tree.nodes.append(f"{NODES}/{node}")
    tree.add(
        path,
        {
            "node_guid": guid,
            "sys_image_guid": guid,
            "node_type": "1: CA",
            "node_desc": f"{host_name}:{device.name}",
            "fw_ver": device.fw_ver or "0.0.0",  # as ibv_query_device() of core/library has it
            "hca_type": "rdmacm",
            "hw_rev": "0",
            "uevent": f"NAME={device.name}",
        },
    )
    _add_parent(tree, device, node)
    _add_port(tree, f"{path}/ports/{port.port_num}", port)
    tree.add(
        f"{VERBS}/{node}", {"ibdev": device.name, "abi_version": _DRIVER_ABI, "dev": _number(STAND_IN), "uevent": ""}
    )
    tree.links[f"{VERBS}/{node}/device"] = f"{DEVICES}/{device.name}/device"


def _add_parent(tree: Tree, device: Device, node: str) -> None:
    """What would be the adapter, with its network interface. It is not that of the interface, which has no RDMA."""
    path = f"{DEVICES}/{device.name}/device"
    tree.add(path, {"numa_node": "-1", "local_cpulist": _read("/sys/devices/system/cpu/online"), "uevent": ""})
    tree.directories.append(f"{path}/infiniband/{device.name}")
    tree.directories.append(f"{path}/infiniband_verbs/{node}")
    with suppress(OSError):  # the interface has gone
        interface = socket.if_indextoname(device.index)
        tree.add(f"{DEVICES}/{device.name}", {"parent": interface})
        tree.add(f"{path}/net/{interface}", {"ifindex": str(device.index), "dev_id": "0x0", "dev_port": "0"})


def _add_port(tree: Tree, path: str, port: Port) -> None:
    phys = _PHYS_STATES.get(port.phys_state, "<unknown>")
    tree.add(
        path,
        {
            "state": f"{port.state.value}: {_STATES[port.state]}",
            "phys_state": f"{port.phys_state}: {phys}",
            "link_layer": "Ethernet",
            "rate": _rate(port),
            "lid": f"0x{port.lid:x}",
            "lid_mask_count": str(port.lmc),
            "sm_lid": f"0x{port.sm_lid:x}",
            "sm_sl": str(port.sm_sl),
            "cap_mask": f"0x{port.port_cap_flags:08x}",
        },
    )
    tree.add(f"{path}/pkeys", {"0": f"0x{DEFAULT_PKEY:04x}"})
    tree.directories += [f"{path}/{name}" for name in ("counters", "hw_counters", "gids")]
    # The kernel shows a row that has no GID as zeros, and libibumad takes no port without the first row.
    tree.add(f"{path}/gids", {"0": _gid_text(bytes(16))})
    for row in port.gids:
        _add_gid(tree, path, row)


def _add_gid(tree: Tree, path: str, row: GidEntry) -> None:
    number = str(row.gid_index)
    tree.add(f"{path}/gids", {number: _gid_text(row.gid)})
    tree.add(f"{path}/gid_attrs/types", {number: "RoCE v2"})
    if row.ndev_name:
        tree.add(f"{path}/gid_attrs/ndevs", {number: row.ndev_name})


def _gid_text(gid: bytes) -> str:
    digits = bytes(gid).hex()
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4))


def _rate(port: Port) -> str:
    lanes, (speed, name) = _LANES.get(port.active_width, 1), _SPEEDS.get(port.active_speed, _SPEEDS[1])
    return f"{lanes * speed:g} Gb/sec ({lanes}X {name})"


def _number(path: str) -> str:
    """The number of a device node, as sysfs has it in a file ``dev``."""
    try:
        number = os.stat(path).st_rdev
    except OSError:
        return "0:0"
    return f"{os.major(number)}:{os.minor(number)}"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
