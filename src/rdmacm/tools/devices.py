"""``rdmacm devices``: list the devices, their ports and GID tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from socket import AF_INET, inet_ntop

from rdmacm.explain import devices
from rdmacm.tools.arguments import add_provider
from rdmacm.tools.output import (
    COLOR_VARIABLE,
    PORTS_VARIABLE,
    PROVIDER_VARIABLE,
    Page,
    Parser,
    bold,
    dim,
    table,
    write,
    write_json,
)
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer

PAGE = Page(
    command="devices",
    summary="list the RDMA devices, their ports and GID tables",
    description="""
        Lists every device in the current network namespace: first one line for each port, then the GIDs of
        each port and interface. Each network interface that can carry IP has a software device, with a GID for each
        address of the interface. A GID keeps its index as long as its address exists. An IPoIB interface has no device
        of its own: it is shown at the GID of its InfiniBand port, if RDMACM_IB names that port.

        MTU is the largest payload of a packet, in bytes, that the port can send now. IPV4 is the address of an
        IPv4-mapped GID.

        With --json, writes a list of objects: name, index, provider, node_type, transport_type, node_guid and ports.
        A port has port_num, state, link_layer, max_mtu and active_mtu (in bytes; null when no packet fits), gids
        and pkeys (numbers). A GID has gid, gid_index, port_num, gid_type, ndev_name, ndev_ifindex and ipv4 (or
        null). Types and states are names of the verbs enumerations, such as ACTIVE and ROCE_V2.
    """,
    examples=(
        ("rdmacm devices", "List the devices."),
        ("rdmacm devices --json | jq -r '.[].name'", "Print only their names."),
    ),
    see_also="rdmacm explain, rdma_get_devices(3), ibv_devinfo(1), ip-address(8)",
    environment=(PROVIDER_VARIABLE, PORTS_VARIABLE, COLOR_VARIABLE),
)

_LINK_LAYERS = {LinkLayer.INFINIBAND: "InfiniBand", LinkLayer.ETHERNET: "Ethernet"}
_GID_TYPES = {GidType.IB: "IB", GidType.ROCE_V1: "RoCEv1", GidType.ROCE_V2: "RoCEv2"}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm devices``."""
    add_provider(parser)
    parser.add_argument("--json", action="store_true", help="Write a list of JSON objects.")


def run(args: argparse.Namespace) -> int:
    """List the devices."""
    found = devices(args.provider)
    if args.json:
        write_json([device_json(device) for device in found])
    elif not found:
        write("no devices\n")
    else:
        write(_text(found))
    return 0


def _text(found: Sequence[Device]) -> str:
    ports = [(f"{device.name}/{port.port_num}", device, port) for device in found for port in device.ports]
    summary = table(
        ("DEVICE/PORT", "STATE", "LINK LAYER", "MTU", "NODE GUID", "P_KEYS"),
        [
            (
                name,
                port.state.name,
                _LINK_LAYERS.get(port.link_layer, ""),
                str(port.active_mtu.bytes) if port.active_mtu else "",
                device.guid_text,
                " ".join(f"0x{pkey:04x}" for pkey in port.pkeys),
            )
            for name, device, port in ports
        ],
        right=("MTU",),
    )
    gids = [
        f"{bold(_heading(name, port, interface))}\n{_gid_table(entries)}"
        for name, _, port in ports
        for interface, entries in _by_interface(port).items()
    ]
    return "\n".join([summary, *(gids or [f"{dim('no GIDs')}\n"])])


def _heading(name: str, port: Port, interface: str) -> str:
    if not interface:
        return name
    kind = "IPoIB interface" if port.link_layer is LinkLayer.INFINIBAND else "interface"
    return f"{name}, {kind} {interface}"


def _by_interface(port: Port) -> dict[str, list[GidEntry]]:
    found: dict[str, list[GidEntry]] = {}
    for entry in port.gids:
        found.setdefault(entry.ndev_name, []).append(entry)
    return found


def _gid_table(entries: Sequence[GidEntry]) -> str:
    return table(
        ("INDEX", "GID", "TYPE", "IPV4"),
        [(str(entry.gid_index), str(entry.gid), _GID_TYPES[entry.gid_type], _ipv4(entry) or "") for entry in entries],
        right=("INDEX",),
    )


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
        "ports": [_port_json(port) for port in device.ports],
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
