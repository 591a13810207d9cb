"""Rules of GIDs, RoCE versions and MTU: G1 to G9."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from socket import AF_INET, AF_INET6

from rdmacm.address import is_link_local
from rdmacm.doctor.address_rules import NO_TARGET
from rdmacm.doctor.device_rules import NO_DEVICE
from rdmacm.doctor.namespace_rules import roce_ports
from rdmacm.doctor.rule import Evidence, Found, Outcome, Quiet, Rule, Unasked
from rdmacm.doctor.view import Host, eui64, packed
from rdmacm.net.tables import Route
from rdmacm.resolution.hosts import mtu_code
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import GidType, PortState

#: The variables that choose a GID by its index.
INDEX_VARIABLES = ("NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX", "MC_GID_INDEX")
ROCE_V1 = "IB/RoCE v1"
_ADDRESS_LENGTHS: dict[int, int] = {AF_INET: 4, AF_INET6: 16}


def _chosen_rows(host: Host) -> list[tuple[str, int, str, GidEntry | None]]:
    """(variable, index, port, row) of each GID that the environment chooses; no row where that GID is zero."""
    found = []
    for variable in INDEX_VARIABLES:
        text = host.environment.get(variable, "")
        if not text.isdigit():
            continue
        for device, port in roce_ports(host):
            row = next((row for row in port.port.gids if row.gid_index == int(text)), None)
            found.append((variable, int(text), f"{device.name}/{port.port.port_num}", row))
    return found


def _better_row(host: Host) -> GidEntry | None:
    """The RoCEv2 GID of an address that can be routed."""
    rows = [row for _, port in roce_ports(host) for row in port.port.gids if host.is_here(row)]
    routed = [row for row in rows if row.gid_type is GidType.ROCE_V2 and not is_link_local(row.gid.ip)]
    return next((row for row in routed if len(row.gid.ip) == 4), routed[0] if routed else None)


def index_of_v1(host: Host) -> Outcome:
    chosen = [each for each in _chosen_rows(host) if each[3] is not None]
    if not chosen:
        return Unasked(f"the environment chooses no GID index ({', '.join(INDEX_VARIABLES)})")
    for variable, index, port, row in chosen:
        assert row is not None
        why = "is RoCE v1" if row.gid_type is GidType.ROCE_V1 else "is link-local" if is_link_local(row.gid.ip) else ""
        if why:
            better = _better_row(host)
            command = (
                f"unset {variable}" if better is None else f"{variable}={better.gid_index}  # {better.gid}, RoCE v2"
            )
            return Found(f"{variable}={index}: GID {row.gid} of {port} {why}, which no router forwards", command)
    return Quiet(", ".join(f"{variable}={index} is RoCE v2 and routed" for variable, index, _, _ in chosen))


def zero_index(host: Host) -> Outcome:
    for variable, index, where, row in _chosen_rows(host):
        if row is None:
            better = _better_row(host)
            command = f"{variable}={better.gid_index}" if better else "ip addr add ADDRESS dev IF"
            return Found(f"{variable}={index}: that GID of {where} is zero", command)
    if not host.devices:
        return NO_DEVICE
    for device, port in roce_ports(host):
        rows = [row for row in port.port.gids if host.is_here(row)]
        if port.port.state is PortState.ACTIVE and rows and all(is_link_local(row.gid.ip) for row in rows):
            name = rows[0].ndev_name
            text = f"{device.name} has link-local GIDs only: {name} has no IPv4 or routed IPv6 address"
            return Found(text, f"ip addr add 10.0.0.1/24 dev {name}")
    return Quiet("each active RoCE port has a GID of an address that can be routed")


def v1_mode(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    v1 = [(device, port) for device, port in roce_ports(host) if port.roce_mode == ROCE_V1]
    if not v1:
        return Quiet("default_roce_mode is RoCE v2, or not set")
    device, port = v1[0]
    found = host.target.explanation if host.target is not None else None
    gateway = found.route.gateway if found is not None and found.route is not None else None
    via = f", and {gateway} is a gateway" if gateway else ""
    number = port.port.port_num
    return Found(
        f"default_roce_mode of {device.name} port {number} is IB/RoCE v1: no IP header, so no router forwards it{via}",
        f'echo "RoCE v2" > /sys/kernel/config/rdma_cm/{device.name}/ports/{number}/default_roce_mode',
    )


def only_v1(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    for device, port in roce_ports(host):
        if port.port.gids and all(row.gid_type is GidType.ROCE_V1 for row in port.port.gids):
            text = (
                f"every GID of {device.name} is RoCE v1: peers with RoCE v2 (rxe, rdmacm, most adapters) do not hear it"
            )
            return Found(text, "firmware or driver with RoCE v2; else RoCE v1 at the peer as well")
    return Quiet("each RoCE port has GIDs of RoCE v2")


def stale_mac(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    for device, port in roce_ports(host):
        by_name: dict[str, list[GidEntry]] = {}
        for row in port.port.gids:
            if row.gid.ip[:2] == b"\xfe\x80" and row.gid[11:13] == b"\xff\xfe":
                by_name.setdefault(row.ndev_name, []).append(row)
        for name, rows in by_name.items():
            face = host.interface(name)
            if face is None or len(face.address) != 6 or device.parent not in ("", name):
                continue
            if all(row.gid[8:] != eui64(face.address) for row in rows) and _has_address(host, port.port.gids, name):
                text = f"GID {rows[0].gid} of {device.name} is not of the MAC {face.address.hex(':')} that {name} has"
                return Found(text, f"ip link set {name} down; ip link set {name} up; or Linux 7.0 (9af0feae8016)")
    return Quiet("the GIDs are of the MACs that the interfaces have")


def _has_address(host: Host, rows: tuple[GidEntry, ...], name: str) -> bool:
    """Whether an interface is here: one of its GIDs is an address of it."""
    face = host.interface(name)
    ips = {each.ip for each in host.addresses_of(face.index)} if face else set()
    return any(row.ndev_name == name and row.gid.ip in ips for row in rows)


def vlan_without_gid(host: Host) -> Outcome:
    rxe = [device for device in host.devices if device.driver == "rdma_rxe"]
    if not rxe:
        return Unasked("no rxe device")
    carried = {row.ndev_name for device in rxe for port in device.ports for row in port.port.gids}
    carried |= {device.parent for device in rxe}
    for name, lower in host.vlans.items():
        face = host.interface(name)
        below = next((device for device in rxe if device.parent == lower), None)
        if face is not None and below is not None and name not in carried and host.addresses_of(face.index):
            text = f"{name} has an address, and {below.name} is on {lower} below it, with no GID for {name}"
            return Found(text, f"rdma link add rxe_{name.replace('.', '_')} type rxe netdev {name}")
    return Quiet("no VLAN over an interface of rxe lacks a device")


def path_mtu(host: Host) -> Outcome:
    small = [face for face in host.rdma_interfaces() if face.is_up and mtu_code(face.mtu) is None]
    if small:
        text = (
            f"MTU {small[0].mtu} of {small[0].name} has no room for the smallest packet (256 bytes and 96 of headers)"
        )
        return Found(text, f"ip link set {small[0].name} mtu 1500")
    target = host.target
    found = target.explanation if target is not None else None
    if found is None or found.route is None or found.path is None:
        mtus = ", ".join(f"{face.name} {face.mtu}" for face in host.rdma_interfaces())
        return Quiet(f"MTU of {mtus or 'no interface'}; the way to a destination: --to ADDRESS")
    path, wire = int(found.path.get("mtu", 0)), found.route.mtu
    face = host.interface(found.route.interface)
    if wire and path + 96 > wire:
        text = (
            f"the path MTU is {path}, with headers {path + 96}, but the way to {found.route.destination} takes {wire}"
        )
        return Found(text, f"ip link set {found.route.interface} mtu {wire}; or a larger MTU on the way")
    return Quiet(
        f"path MTU {path}, interface MTU {face.mtu if face else 'unknown'}, MTU of the route {wire or 'not set'}"
    )


def by_gateway(host: Host) -> Outcome:
    if host.target is None or not host.target.node:
        return NO_TARGET
    if not host.uses_kernel:
        return Quiet("software devices send by the routing tables")
    found = host.target.explanation
    route = found.route if found is not None else None
    if route is None or not route.gateway:
        return Quiet("the destination is on link")
    text = (
        f"{host.target.node} is behind the gateway {route.gateway}: a queue pair made by hand needs the gateway's MAC"
    )
    return Found(text, "connect through rdma_cm, which finds it", is_note=True)


def _leads_to(route: Route, ip: bytes) -> bool:
    """Whether a line of a routing table is of a destination."""
    if len(ip) != _ADDRESS_LENGTHS[route.family] or route.kind != "unicast":
        return False
    return route.destination == "default" or ip_address(ip) in ip_network(route.destination)


def unequal_rails(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.address:
        return NO_TARGET
    if not host.uses_kernel:
        return Quiet("software devices send by the routing tables")
    ip = target.address
    families = {(each.ifindex, len(each.ip)) for each in host.addresses}
    rails = [face for face in host.rdma_interfaces() if (face.index, len(ip)) in families]
    ways = {route.ifindex for route in host.routes if _leads_to(route, ip)}
    if len(rails) < 2 or is_link_local(ip) or host.owner_of(ip) is not None or 0 in ways:  # 0: several next hops
        return Quiet("one RDMA interface, or a destination that needs no rail")
    with_way = [face.name for face in rails if face.index in ways]
    without = [face.name for face in rails if face.index not in ways]
    if not with_way or not without:
        return Quiet(f"{', '.join(with_way or without)}: a route to {target.node} by {'each' if with_way else 'none'}")
    source = host.owner_of(packed(target.source)) if target.source else None
    text = f"{target.node} is on the way of {', '.join(with_way)}, and {', '.join(without)} has no route to it"
    command = f"pair equal rails (NCCL_CROSS_NIC=0); or ip route add {target.node} via GATEWAY dev {without[0]}"
    return Found(
        f"{text}: a queue pair made by hand there finds no MAC (RTR errno 110)",
        command,
        is_note=source is None or source.name not in without,
    )


RULES = (
    Rule(
        "G1",
        "A GID index of RoCE v1, or link-local",
        Evidence.TESTED,
        "GID, its type and index",
        (
            "IBV_WC_RETRY_EXC_ERR (12) right after connecting, vendor error 129 (0x81) or 0xa",
            "works with -x 3 or NCCL_IB_GID_INDEX=3",
        ),
        "The GID at the index in NCCL_IB_GID_INDEX, UCX_IB_GID_INDEX, NVSHMEM_IB_GID_INDEX or MC_GID_INDEX: its type, "
        "and whether it is link-local.",
        "Index 0 is link-local and, on mlx5, RoCE v1.",
        "the index of the RoCE v2 entry of the routed address (mlx5: 3 is IPv4, 1 is IPv6; irdma: 1 is IPv4)",
        "NVIDIA/nccl#426, ofiwg/libfabric#12673, uccl-project/uccl#803",
        index_of_v1,
    ),
    Rule(
        "G2",
        "The GID is zero",
        Evidence.TESTED,
        "GID, its type and index",
        ("Failed to modify QP to RTR: errno 22", "ibv_modify_qp failed with error 22 Invalid argument"),
        "The GID at an index of the environment is zero, or an active port has link-local GIDs only.",
        "The interface has no address of that family, so there is no such GID.",
        "`ip addr add ADDRESS dev IF`",
        "ml-explore/mlx#4191, SoftRoCE/rxe-dev#79, linux-rdma list c50392683",
        zero_index,
    ),
    Rule(
        "G3",
        "Ids use RoCE v1",
        Evidence.SOURCE,
        "GID, its type and index",
        ("RDMA_CM_EVENT_ROUTE_ERROR -22, or UNREACHABLE, across a router, and the same subnet works",),
        "default_roce_mode in configfs is IB/RoCE v1.",
        "RoCE v1 has no IP header, and cannot be routed.",
        '`echo "RoCE v2" > /sys/kernel/config/rdma_cm/DEV/ports/1/default_roce_mode`',
        "drivers/infiniband/core/addr.c, roce_resolve_route_from_path",
        v1_mode,
    ),
    Rule(
        "G4",
        "The device has RoCE v1 only",
        Evidence.MAINTAINER,
        "GID, its type and index",
        ("peers of one subnet never hear each other", "UCX: Destination is unreachable"),
        "Each GID of a port is of type IB/RoCE v1. (The peer's types are seen by a doctor there.)",
        "A RoCE v1 device and a RoCE v2 device do not hear each other; rxe and rdmacm have v2 only.",
        "the same version at both ends",
        "openucx/ucx#4512, #4688, ceph/ceph#12648, SoftRoCE/librxe-dev#6, ydb-platform/ydb#29878",
        only_v1,
    ),
    Rule(
        "G5",
        "A gateway is in the way of queue pairs made by hand",
        Evidence.MAINTAINER,
        "source and route",
        ("transport retry counter exceeded across subnets, and the same subnet works",),
        "The route to the destination has a gateway, on a device of the kernel. A note.",
        "Without rdma_cm, the address handle has the peer's MAC instead of the gateway's.",
        "connect through rdma_cm",
        "kvcache-ai/Mooncake#2468",
        by_gateway,
    ),
    Rule(
        "G6",
        "GIDs of an old MAC",
        Evidence.SOURCE,
        "GID, its type and index",
        ("GIDs of virtual functions carry an old MAC after boot",),
        "No link-local GID of an interface is made of the MAC that it has (EUI-64).",
        "Events of the interface were lost while the device was registered.",
        "`ip link set IF down; ip link set IF up`; Linux 7.0, or the backport of 9af0feae8016",
        "NVIDIA/NV-Kernels#358",
        stale_mac,
    ),
    Rule(
        "G7",
        "A VLAN without a GID",
        Evidence.INFERRED,
        "GID, its type and index",
        ("rping over eth0.10 fails with rxe",),
        "A VLAN interface with an address lies over the interface of an rxe device, and no GID is of the VLAN.",
        "rxe that was made on the parent does not serve the VLAN.",
        "`rdma link add rxe1 type rxe netdev eth0.10`",
        "SoftRoCE/rxe-dev#71",
        vlan_without_gid,
    ),
    Rule(
        "G8",
        "The path MTU does not fit",
        Evidence.TESTED,
        "MTU",
        ("1024 bytes work, 1025 fail", "large messages hang", "IBV_WC_LOC_LEN_ERR"),
        "The MTU of an RDMA interface leaves no room for 256 bytes and 96 of headers; or path MTU + 96 is more than "
        "the MTU of the route to the destination.",
        "The path MTU is larger than what the wire takes, or differs between the ends.",
        "MTU 1500 for a path MTU of 1024, 4192 or more for 4096; `ping -M do -s 1472 PEER`",
        "NVIDIA/nccl#1524, tensorflow/tensorflow#9432, #9667, SoftRoCE/rxe-dev#76, autoscriptlabs/nccl-mesh-plugin#12",
        path_mtu,
    ),
    Rule(
        "G9",
        "Rails that are not routed to each other",
        Evidence.TESTED,
        "source and route",
        ("some pairs of ranks fail (QP to RTR errno 110), and rings work",),
        "Of several RDMA interfaces of the kernel, some have a route to the destination (`--to`), in any table, and "
        "some have none. A note, unless `--from` is an address of one that has none. `--report --matrix` shows all "
        "pairs.",
        "The fabric joins equal rails only: what is sent by another rail waits for a neighbour that is not there.",
        "pair equal rails; `NCCL_CROSS_NIC=0`; a route by each rail",
        "NVIDIA/nccl#2013",
        unequal_rails,
    ),
)
