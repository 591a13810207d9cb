"""Rules of network namespaces and containers: N1 to N7."""

from __future__ import annotations

from rdmacm.doctor.device_rules import NO_DEVICE
from rdmacm.doctor.rule import Evidence, Found, Outcome, Quiet, Rule, Unasked
from rdmacm.doctor.view import Host, KernelDevice, KernelPort
from rdmacm.verbs.device import GidEntry

#: Linux from which rdma_cm knows network namespaces on RoCE.
_KNOWS_NAMESPACES = (4, 19)


def roce_ports(host: Host) -> list[tuple[KernelDevice, KernelPort]]:
    """The ports of RoCE devices."""
    return [(device, port) for device, port in host.kernel_ports() if port.is_ethernet and not device.is_iwarp]


def _split(host: Host, port: KernelPort) -> tuple[list[GidEntry], list[GidEntry]]:
    """The GIDs whose interface is here, and those whose is elsewhere."""
    here = [row for row in port.port.gids if host.is_here(row)]
    return here, [row for row in port.port.gids if row not in here]


def interface_elsewhere(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    split = [(device, *_split(host, port)) for device, port in roce_ports(host)]
    elsewhere = [(device, away) for device, here, away in split if away and not here]
    if not elsewhere or host.netns_mode == "exclusive":
        return Quiet(f"rdma system: {host.netns_mode or 'unknown'}; {len(elsewhere)} devices with GIDs from elsewhere")
    device, away = elsewhere[0]
    names = sorted({row.ndev_name for row in away if row.ndev_name})
    text = (
        f"{device.name} is seen here, but its GIDs ({away[0].gid} ...) are of "
        f"{', '.join(names) or 'an interface'} in another network namespace "
        f"(rdma system: {host.netns_mode or 'unknown'})"
    )
    return Found(
        text,
        "ip link set IF netns NAME; or, before any container starts, rdma system set netns exclusive (at boot: options "
        f"ib_core netns_mode=0) and rdma dev set {device.name} netns NAME, as rdma-cni does",
    )


def exclusive_with_plugin(host: Host) -> Outcome:
    if not host.plugins:
        return Quiet("no shared device plugin runs here")
    if host.netns_mode != "exclusive":
        return Quiet(f"{host.plugins[0]} runs, and rdma system is {host.netns_mode or 'unknown'}")
    text = f"rdma system is exclusive while {host.plugins[0]} runs, which hands out shared devices"
    return Found(text, "rdma system set netns shared (at boot: options ib_core netns_mode=1)")


def all_gids_zero(host: Host) -> Outcome:
    ports = roce_ports(host)
    if not ports:
        return NO_DEVICE if not host.devices else Unasked("no RoCE port")
    empty = [(device, port) for device, port in ports if not port.port.gids]
    if not empty:
        return Quiet("each RoCE port has GIDs")
    device, port = empty[0]
    here = ", ".join(each.name for each in host.interfaces if not each.is_loopback) or "none"
    return Found(
        f"all {port.port.gid_tbl_len} GIDs of {device.name} port {port.port.port_num} are zero here; "
        f"interfaces here: {here}",
        "a second network on the adapter: macvlan or ipvlan with the RoCE interface as master, or a virtual function; "
        "or the network of the host (hostNetwork)",
    )


def index_not_zero(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    for device, port in roce_ports(host):
        here, away = _split(host, port)
        lower = [row for row in away if here and row.gid_index < here[0].gid_index]
        if lower:
            text = (
                f"GIDs {lower[0].gid_index}..{lower[-1].gid_index} of {device.name} are of interfaces elsewhere; "
                f"the first of this network namespace is {here[0].gid_index}"
            )
            return Found(text, f"choose by address, or NCCL_IB_GID_INDEX={here[-1].gid_index} here", is_note=True)
    return Quiet("the first GIDs of each port are of this network namespace")


def rxe_without_socket(host: Host) -> Outcome:
    rxe = [device for device in host.devices if device.driver == "rdma_rxe"]
    if not rxe:
        return Unasked("no rxe device")
    if host.is_first_namespace is not False:
        return Quiet("this is the machine's network namespace, or it is not known")
    if not any(host.is_here(row) for device in rxe for port in device.ports for row in port.port.gids):
        return Quiet("the interfaces of rxe are in another network namespace")
    if any(owner.is_kernel for owner in host.owners):
        return Quiet("rxe has UDP port 4791 in this network namespace")
    text = f"{rxe[0].name} is on an interface of this network namespace, but the kernel listens on 4791 in another: "
    return Found(
        text + "requests leave, and nothing comes back",
        "a kernel with sockets of rxe for each network namespace; the machine's own; or --provider soft",
    )


def namesakes(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    if host.netns_mode != "exclusive":
        return Quiet(f"rdma system: {host.netns_mode or 'unknown'}: each name is there once")
    for device, port in host.kernel_ports():
        pid = next((pid for pid, names in host.foreign.items() if device.name in names), 0)
        if pid:
            folder = f"/sys/kernel/config/rdma_cm/{device.name}"
            text = f"{device.name} is here and in the network namespace of process {pid}, and {folder} is one for both"
            return Found(text, f"rdma dev set {device.name} name {device.name}_b", is_note=not port.roce_mode)
    return Quiet(f"no device of {len(host.foreign)} other network namespaces has the name of one here")


def old_kernel(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    release = f"Linux {host.release[0]}.{host.release[1]}"
    if host.is_first_namespace is not False or host.release >= _KNOWS_NAMESPACES:
        return Quiet(release)
    text = f"{release} in a network namespace: rdma_cm knows none on RoCE before 4.19"
    return Found(text, "Linux 4.19 or newer, or the network of the host")


RULES = (
    Rule(
        "N1",
        "The device is here, its interface is not",
        Evidence.TESTED,
        "network namespace",
        ("RDMA_CM_EVENT_ADDR_ERROR, error: -19", "ENODEV in a pod with a virtual function of SR-IOV"),
        "The GIDs of a port belong to interfaces that are not in this network namespace, and `rdma system` is shared.",
        "In shared mode sysfs shows every device; only those whose interface is here carry connections.",
        "`ip link set IF netns NAME`; `rdma system set netns exclusive` before any container exists, or at boot "
        "`options ib_core netns_mode=0`; rdma-cni moves the device",
        "k8snetworkplumbingwg/sriov-network-device-plugin#342, rdma-cni#39, #37",
        interface_elsewhere,
    ),
    Rule(
        "N2",
        "Exclusive mode under a shared device plugin",
        Evidence.MAINTAINER,
        "network namespace",
        ("incorrect RDMA subsystem network namespace",),
        "`rdma system` is exclusive, and a process k8s-rdma-shared-dp runs.",
        "The reverse of N1: the plugin wants devices that every namespace sees.",
        "`rdma system set netns shared` (at boot `options ib_core netns_mode=1`)",
        "Mellanox/k8s-rdma-shared-dev-plugin#84, #87",
        exclusive_with_plugin,
    ),
    Rule(
        "N3",
        "All GIDs are zero",
        Evidence.MAINTAINER,
        "network namespace",
        (
            "Failed to modify QP to RTR",
            "Unable to Connect the HCA's through the link",
            "show_gids: n_gids_found=0",
        ),
        "A port with link layer Ethernet, whose rows of the GID table are all zero here.",
        "GIDs of RoCE follow the network interface, and an overlay (veth, calico, bridge) has none.",
        "macvlan or ipvlan with the RoCE interface as master, or a virtual function; or hostNetwork",
        "projectcalico/calico#8482, shared-dev-plugin#72, #101, k8s-rdma-sriov-dev-plugin#33",
        all_gids_zero,
    ),
    Rule(
        "N4",
        "GID indices differ between namespaces",
        Evidence.TESTED,
        "GID, its type and index",
        ("a GID index that works on the host fails in a container", "pods need different GID indices"),
        "The lowest GID index whose interface is here is not the port's lowest. A note.",
        "The table is the port's, and several macvlans share it.",
        "choose by address; or set NCCL_IB_GID_INDEX to an index that `rdmacm doctor -v` lists here",
        "NVIDIA/nccl#551, #1427",
        index_not_zero,
    ),
    Rule(
        "N5",
        "rxe listens in another namespace",
        Evidence.SOURCE,
        "UDP port 4791",
        ("rxe in a network namespace: requests leave, nothing comes back",),
        "An rxe device on an interface of a namespace that is not the machine's, and /proc/net/udp has no socket of "
        "the kernel on port 4791.",
        "Older rxe listens on port 4791 in the machine's namespace only.",
        "a kernel with sockets of rxe for each namespace; the machine's namespace; the software device of rdmacm",
        "linux-rdma list 2a71240bf, 32dc312a9",
        rxe_without_socket,
    ),
    Rule(
        "N6",
        "configfs is one for all namespaces",
        Evidence.SOURCE,
        "class of traffic",
        ("default_roce_mode or default_roce_tos acts on the wrong device",),
        "`rdma system` is exclusive, and a process of another network namespace that has a sysfs of its own sees a "
        "device of the name of one here (/proc/PID/root/sys). A note as long as configfs has no folder of that name.",
        "/sys/kernel/config/rdma_cm is global, and names devices by their names.",
        "`rdma dev set NAME name NEW`",
        "linux-rdma list c5262df3f",
        namesakes,
    ),
    Rule(
        "N7",
        "A kernel whose rdma_cm knows no namespaces",
        Evidence.MAINTAINER,
        "network namespace",
        ("rdma_resolve_route failed between containers, while perftest works",),
        "Linux before 4.19, in a namespace that is not the machine's, with a device of the kernel.",
        "rdma_cm knew no network namespaces on RoCE then.",
        "Linux 4.19 or newer",
        "Mellanox/docker-sriov-plugin#10, k8s-rdma-sriov-dev-plugin#22",
        old_kernel,
    ),
)
