"""``rdmacm devices``: list the devices, their ports and GID tables."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Sequence
from socket import AF_INET, inet_ntop

from rdmacm.capabilities import INFINIBAND, Feature
from rdmacm.diagnosis.explain import devices
from rdmacm.errors import RdmaError
from rdmacm.provider import get_provider
from rdmacm.provider.choice import choose
from rdmacm.tools.arguments import add_provider
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.core_name import core_line, core_name
from rdmacm.tools.output import Page, Parser, bold, dim, table, write, write_error, write_json
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, TransportType

PAGE = Page(
    command="devices",
    summary=COMMANDS["devices"],
    description="""
        Lists every device in the current network namespace: first one line for each port, then the GIDs of
        each port and interface. Each network interface that can carry IP has a software device, with a GID for each
        address of the interface. A GID keeps its index as long as its address exists. An IPoIB interface has no device
        of its own: it is shown at the GID of its InfiniBand port, if RDMACM_IB names that port.

        MTU is the largest payload of a packet, in bytes, that the port can send now. IPV4 is the address of an
        IPv4-mapped GID.

        The kernel's RDMA devices come first, with driver and firmware, if the host has some and its connection
        manager can be used. A provider that is named lists its own devices only.

        The last lines say whether the software devices run with the compiled core, and why the kernel's devices are
        listed but not used, if so.

        With --json, writes a list of objects: name, index, provider, node_type, transport_type, node_guid, driver,
        fw_ver (null without a driver, or without firmware), core (c or python; null for a device of the kernel), ports,
        capabilities, and unused (why the provider auto uses no device of the kernel, or null). Capabilities are
        transports, families, and features: for each yes, no, or device where its driver decides.
        A port has port_num, state, link_layer, max_mtu and active_mtu (in bytes; null when no packet fits), gids
        and pkeys (numbers). A GID has gid, gid_index, port_num, gid_type, ndev_name, ndev_ifindex and ipv4 (or
        null). Types and states are names of the verbs enumerations, such as ACTIVE and ROCE_V2.
    """,
    examples=(
        ("rdmacm devices", "List the devices."),
        ("rdmacm devices --json | jq -r '.[].name'", "Print only their names."),
    ),
    see_also="rdmacm explain, rdma_get_devices(3), ibv_devinfo(1), ip-address(8)",
    environment=("RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_CORE", "NO_COLOR"),
)

_LINK_LAYERS = {LinkLayer.INFINIBAND: "InfiniBand", LinkLayer.ETHERNET: "Ethernet"}
_GID_TYPES = {GidType.IB: "IB", GidType.ROCE_V1: "RoCEv1", GidType.ROCE_V2: "RoCEv2"}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm devices``."""
    add_provider(parser)
    parser.add_argument("--json", action="store_true", help="Write a list of JSON objects.")


def run(args: argparse.Namespace) -> int:
    """List the devices."""
    found, reason = _found(args.provider), choose(args.provider).reason
    if args.json:
        unused = {"kernel": reason or None}  # why auto leaves the kernel's devices unused
        write_json([device_json(device) | {"unused": unused.get(device.provider)} for device in found])
    elif not found:
        write("no devices\n")
    else:
        write(_text(found, reason))
    return 0


def _found(provider: str | None) -> list[Device]:
    """The devices of a provider; unless one is named, those of the kernel as well as the software devices."""
    if provider or os.environ.get("RDMACM_PROVIDER"):
        return devices(provider)
    try:
        of_kernel = devices("kernel")
    except RdmaError as error:
        if error.errno != errno.ENODEV:  # the host has a connection manager, which may not be opened
            write_error(f"without the kernel's devices: {error}")
        of_kernel = []
    return [*of_kernel, *devices("soft")]


def _text(found: Sequence[Device], reason: str) -> str:
    ports = [(f"{device.name}/{port.port_num}", device, port) for device in found for port in device.ports]
    has_driver = any(device.driver for device in found)
    summary = table(
        ("DEVICE/PORT", "STATE", "LINK LAYER", "MTU", "NODE GUID", "P_KEYS", *(("DRIVER",) if has_driver else ())),
        [
            (
                name,
                port.state.name,
                _LINK_LAYERS.get(port.link_layer, ""),
                str(port.active_mtu.bytes) if port.active_mtu else "",
                device.guid_text,
                " ".join(f"0x{pkey:04x}" for pkey in port.pkeys),
                *((f"{device.driver} {device.fw_ver}".strip(),) if has_driver else ()),
            )
            for name, device, port in ports
        ],
        right=("MTU",),
    )
    gids = [
        f"{bold(_heading(name, port, interface))}\n{_gid_table(device, entries)}"
        for name, device, port in ports
        for interface, entries in _by_interface(port).items()
    ]
    unused = [f"provider auto is soft, because {reason}\n"] if reason else []
    cores = sorted({core_line(device.provider, "devices") for device in found} - {""})
    return "\n".join([summary, *(gids or [f"{dim('no GIDs')}\n"]), *cores, *unused])


def _heading(name: str, port: Port, interface: str) -> str:
    if not interface:
        return name if port.link_layer is LinkLayer.INFINIBAND else f"{name}, interface in another network namespace"
    kind = "IPoIB interface" if port.link_layer is LinkLayer.INFINIBAND else "interface"
    return f"{name}, {kind} {interface}"


def _by_interface(port: Port) -> dict[str, list[GidEntry]]:
    found: dict[str, list[GidEntry]] = {}
    for entry in port.gids:
        found.setdefault(entry.ndev_name, []).append(entry)
    return found


def _gid_table(device: Device, entries: Sequence[GidEntry]) -> str:
    is_iwarp = device.transport_type is TransportType.IWARP
    rows = [
        (
            str(entry.gid_index),
            str(entry.gid),
            "iWARP" if is_iwarp else _GID_TYPES[entry.gid_type],
            _ipv4(entry) or "",
        )
        for entry in entries
    ]
    return table(("INDEX", "GID", "TYPE", "IPV4"), rows, right=("INDEX",))


def _ipv4(entry: GidEntry) -> str | None:
    ip = entry.gid.ip
    return inet_ntop(AF_INET, ip) if len(ip) == 4 else None


def device_json(device: Device) -> dict[str, object]:
    """Return a device as JSON data."""
    return {
        "name": device.name,
        "index": device.index,
        "provider": device.provider,
        "node_type": device.node_type.name,
        "transport_type": device.transport_type.name,
        "node_guid": device.guid_text,
        "driver": device.driver or None,
        "fw_ver": device.fw_ver or None,
        "core": core_name(device.provider),
        "capabilities": _capabilities_json(device),
        "ports": [_port_json(port) for port in device.ports],
    }


def _capabilities_json(device: Device) -> dict[str, object]:
    is_infiniband = any(port.link_layer is LinkLayer.INFINIBAND for port in device.ports)
    is_bare = is_infiniband and device.provider == INFINIBAND.provider
    known = INFINIBAND if is_bare else get_provider(device.provider).capabilities
    return {
        "transports": list(known.transports),
        "families": list(known.families),
        "features": {feature.name.lower(): known.support(feature) for feature in Feature},
    }


def _port_json(port: Port) -> dict[str, object]:
    return {
        "port_num": port.port_num,
        "state": port.state.name,
        "link_layer": port.link_layer.name,
        "max_mtu": port.max_mtu.bytes,
        "active_mtu": port.active_mtu.bytes if port.active_mtu else None,
        "gids": [
            {
                "gid": str(entry.gid),
                "gid_index": entry.gid_index,
                "port_num": entry.port_num,
                "gid_type": entry.gid_type.name,
                "ndev_name": entry.ndev_name,
                "ndev_ifindex": entry.ndev_ifindex,
                "ipv4": _ipv4(entry),
            }
            for entry in port.gids
        ],
        "pkeys": list(port.pkeys),
    }
