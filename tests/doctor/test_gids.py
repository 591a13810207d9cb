"""Rules of GIDs, of InfiniBand and of what configfs and counters say: trees of /sys and /proc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from socket import AF_INET

import pytest

from rdmacm.doctor.view import CAP_SYS_PTRACE, Attempt, Target
from rdmacm.explanation import Candidate, Explanation, RouteUsed
from rdmacm.net.tables import Route
from support.doctor import MAC, Tree, fires, link_local, packed, silent

V1, V2 = "IB/RoCE v1", "RoCE v2"
CONFIG = "sys/kernel/config/rdma_cm/mlx5_0/ports/1"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def infiniband(tmp_path: Path) -> Tree:
    """An InfiniBand port with an IPoIB interface."""
    tree = Tree(tmp_path / "infiniband", adapter=False)
    tree.device("mlx5_0", "mlx5_core", link="InfiniBand")
    tree.gids("mlx5_0", ("fe80::c42:a103:11:2233", "IB/RoCE v1", "ib0"))
    tree.tables.add(3, "ib0", "10.1.0.1/24", mac=bytes(20), arp_type=32)
    return tree


def chosen(device: str, path_mtu: int = 1024) -> Target:
    """A destination to which rdma_cm takes a device."""
    row = Candidate("10.0.0.2", "10.0.0.1", device, 1, 3, "::ffff:10.0.0.1", True, True, "route", "")
    explanation = Explanation("10.0.0.2", None, "kernel", candidates=(row,), path={"mtu": path_mtu})
    return Target("10.0.0.2", explanation=explanation)


def to(node: str, gateway: str | None = None, mtu: int = 1500, path_mtu: int = 1024) -> Target:
    """A destination that was resolved."""
    route = RouteUsed(node, "unicast", "eth0", gateway, "10.0.0.1", 254, 0, mtu)
    return Target(node, explanation=Explanation(node, None, "kernel", route=route, path={"mtu": path_mtu}))


def test_index_of_roce_v1(tree: Tree) -> None:
    silent(tree.host(), "G1")
    tree.environment["NCCL_IB_GID_INDEX"] = "0"
    fires(tree.host(), "G1", "NCCL_IB_GID_INDEX=0", "RoCE v1", "NCCL_IB_GID_INDEX=3")
    tree.environment["NCCL_IB_GID_INDEX"] = "1"
    fires(tree.host(), "G1", "link-local")
    tree.environment["NCCL_IB_GID_INDEX"] = "3"
    silent(tree.host(), "G1")


def test_index_of_no_gid(tree: Tree) -> None:
    silent(tree.host(), "G2")
    tree.environment["UCX_IB_GID_INDEX"] = "9"
    fires(tree.host(), "G2", "UCX_IB_GID_INDEX=9: that GID of mlx5_0/1 is zero", "UCX_IB_GID_INDEX=3")


def test_interface_without_an_address(tree: Tree) -> None:
    tree.gids("mlx5_0", (link_local(MAC), V1), (link_local(MAC), V2))
    fires(tree.host(), "G2", "link-local GIDs only", "ip addr add")


def test_ids_use_roce_v1(tree: Tree) -> None:
    tree.write(f"{CONFIG}/default_roce_mode", "RoCE v2")
    silent(tree.host(), "G3")
    tree.write(f"{CONFIG}/default_roce_mode", "IB/RoCE v1")
    fires(tree.host(), "G3", "mlx5_0 port 1", 'echo "RoCE v2"')
    fires(replace(tree.host(), target=to("10.3.0.1", gateway="10.0.0.254")), "G3", "10.0.0.254 is a gateway")


def test_device_has_roce_v1_only(tree: Tree) -> None:
    silent(tree.host(), "G4")
    tree.gids("mlx5_0", (link_local(MAC), V1), ("::ffff:10.0.0.1", V1))
    fires(tree.host(), "G4", "every GID of mlx5_0 is RoCE v1")


def test_gateway_before_the_destination(tree: Tree) -> None:
    silent(replace(tree.host(), target=to("10.0.0.2")), "G5")
    fires(replace(tree.host(), target=to("10.3.0.1", gateway="10.0.0.254")), "G5", "10.0.0.254", note=True)


def test_rails_that_are_not_routed_to_each_other(tree: Tree) -> None:
    """Two rails of one host; the peer's address is in the subnet of the first."""
    tree.device("mlx5_1", "mlx5_core")
    tree.tables.add(3, "eth1", "10.1.0.1/24", mac=MAC[:5] + b"\x44")
    tree.gids("mlx5_1", ("::ffff:10.1.0.1", V2, "eth1"))
    tree.tables.lines += [
        Route(AF_INET, "unicast", "10.0.0.0/24", 2, None, None, 254),
        Route(AF_INET, "unicast", "10.1.0.0/24", 3, None, None, 254),
    ]
    silent(tree.host(), "G9")
    peer = Target("10.0.0.2", addresses=(packed("10.0.0.2"),))
    fires(replace(tree.host(), target=peer), "G9", "on the way of eth0, and eth1 has no route", note=True)
    fires(replace(tree.host(), target=replace(peer, source="10.1.0.1")), "G9", "NCCL_CROSS_NIC=0", "dev eth1")
    fires(replace(tree.host(), target=replace(peer, source="10.0.0.1")), "G9", note=True)
    # A router joins the rails, by a table of its own.
    tree.tables.lines.append(Route(AF_INET, "unicast", "default", 3, packed("10.1.0.254"), None, 101))
    silent(replace(tree.host(), target=peer), "G9")
    # Nobody has a route: that is another rule's.
    del tree.tables.lines[:]
    silent(replace(tree.host(), target=peer), "G9")


def test_gids_of_an_old_mac(tree: Tree) -> None:
    silent(tree.host(), "G6")
    old = link_local(bytes.fromhex("0c42a1aaaaaa"))
    tree.gids("mlx5_0", (old, V1), (old, V2), ("::ffff:10.0.0.1", V2))
    fires(tree.host(), "G6", old, "0c:42:a1:11:22:33", "ip link set eth0 down")


def test_vlan_over_rxe(tree: Tree) -> None:
    silent(tree.host(), "G7")
    tree.device("rxe0", "rdma_rxe")
    tree.write("sys/class/infiniband/rxe0/parent", "eth0")
    tree.gids("rxe0", ("::ffff:10.0.0.1", V2))
    silent(tree.host(), "G7")
    tree.tables.add(9, "eth0.10", "10.10.0.1/24")
    tree.write("proc/net/vlan/config", "VLAN Dev name    | VLAN ID\nName-Type: X\neth0.10        | 10  | eth0")
    fires(tree.host(), "G7", "eth0.10 has an address", "netdev eth0.10")
    tree.device("rxe1", "rdma_rxe")
    tree.write("sys/class/infiniband/rxe1/parent", "eth0.10")
    silent(tree.host(), "G7")


def test_path_mtu(tree: Tree) -> None:
    silent(tree.host(), "G8")
    silent(replace(tree.host(), target=to("10.0.0.2")), "G8")
    fires(replace(tree.host(), target=to("10.0.0.2", path_mtu=4096)), "G8", "4192", "takes 1500")


# -- InfiniBand ----------------------------------------------------------------------------------------------


def test_no_subnet_manager(infiniband: Tree, tree: Tree) -> None:
    silent(infiniband.host(), "R1")
    silent(tree.host(), "R1")
    infiniband.port_file("sm_lid", "0x0")
    fires(infiniband.host(), "R1", "sm_lid is 0", "opensm")


def test_no_path(infiniband: Tree) -> None:
    silent(infiniband.host(), "R2")
    infiniband.port_file("pkeys/0", "0x7fff")
    fires(infiniband.host(), "R2", "0x7fff", "partitions.conf")
    infiniband.port_file("state", "2: INIT")
    fires(infiniband.host(), "R2", "INIT, not ACTIVE")


def test_no_ipoib(infiniband: Tree) -> None:
    silent(infiniband.host(), "J4")
    infiniband.tables.faces[-1] = infiniband.tables.faces[-1]._replace(flags=0)
    fires(infiniband.host(), "J4", "no IPoIB interface is up", "ip link set ib0 up")
    del infiniband.tables.faces[-1]
    fires(infiniband.host(), "J4", "none is there", "modprobe ib_ipoib")


# -- counters and settings -----------------------------------------------------------------------------------


def test_requests_leave_and_nothing_comes(tree: Tree) -> None:
    tree.port_file("cm_tx_msgs/req", "40")
    tree.port_file("cm_tx_retries/req", "30")
    tree.port_file("cm_rx_msgs/rep", "3")
    silent(tree.host(), "C1")
    tree.port_file("cm_rx_msgs/rep", "0")
    fires(tree.host(), "C1", "mlx5_0 sent 40 requests and 30 repetitions", "4791")


def test_listeners_are_busy(tree: Tree) -> None:
    silent(tree.host(), "C2")
    tree.port_file("cm_rx_msgs/req", "100")
    tree.port_file("cm_rx_duplicates/req", "9")
    silent(tree.host(), "C2")
    tree.port_file("cm_rx_duplicates/req", "50")
    fires(tree.host(), "C2", "100 requests and 50 repetitions")
    tree.write("proc/sys/net/rdma_ucm/max_backlog", "16")
    fires(tree.host(), "C2", "max_backlog is 16", "sysctl net.rdma_ucm.max_backlog=4096")


def test_kernel_had_a_fault(tree: Tree) -> None:
    tree.write("proc/sys/kernel/tainted", "128")
    silent(tree.host(), "C3")  # no rxe
    tree.device("rxe0", "rdma_rxe")
    fires(tree.host(), "C3", "tainted 128")
    tree.write("proc/sys/kernel/tainted", "4608")
    silent(tree.host(), "C3")


def test_iwarp_port_is_a_tcp_port(tree: Tree) -> None:
    tree.device("siw0", "siw", kind="4: RNIC")
    host = replace(tree.host(), target=Target(port=7471, attempt=Attempt(True)))
    silent(host, "J7")
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    tree.write("proc/net/tcp", f"{head}\n 0: 00000000:1D2F 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 77 1")
    fires(replace(tree.host(), target=host.target), "J7", "port 7471", "siw0")


def test_class_without_flow_control(tree: Tree) -> None:
    shown = ("dcb", "pfc", "show", "dev", "eth0", "prio-pfc")
    tree.write(f"{CONFIG}/default_roce_tos", "0")
    tree.commands[shown] = (0, "prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off\n", "")
    silent(tree.host(), "Q2")
    tree.commands[shown] = (0, "prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off\n", "")
    fires(tree.host(), "Q2", "priority 3", "default_roce_tos (DSCP 26)")
    tree.write(f"{CONFIG}/default_roce_tos", "104")
    silent(tree.host(), "Q2")


def test_tos_with_both_ecn_bits(tree: Tree) -> None:
    tree.write(f"{CONFIG}/default_roce_tos", "106")
    silent(tree.host(), "Q3")
    tree.write(f"{CONFIG}/default_roce_tos", "107")
    fires(tree.host(), "Q3", "107", "echo 106")


def test_another_device_than_the_first(tree: Tree) -> None:
    silent(tree.host(), "Q1")
    silent(replace(tree.host(), target=chosen("mlx5_0", 4096)), "Q1")
    text = "path MTU 1024, to 10.0.0.2; without rdma_cm, queue pairs take the port's, 4096"
    fires(replace(tree.host(), target=chosen("mlx5_0")), "Q1", text, note=True)
    tree.device("mlx5_1", "mlx5_core")
    tree.gids("mlx5_1", ("::ffff:10.1.0.1", V2))
    text = "rdma_cm takes mlx5_1 port 1, path MTU 4096, to 10.0.0.2; without -d, ib_write_bw and others take mlx5_0"
    fires(replace(tree.host(), target=chosen("mlx5_1", 4096)), "Q1", text, note=True)


@pytest.mark.parametrize(
    ("variable", "value", "is_found"),
    [
        ("NCCL_IB_HCA", "mlx5_0", True),
        ("NCCL_IB_HCA", "^mlx5_1:1", True),
        ("NCCL_IB_HCA", "mlx5", False),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", False),
        ("UCX_NET_DEVICES", "mlx5_0:1", True),
        ("UCX_NET_DEVICES", "mlx5:1", False),
        ("UCX_NET_DEVICES", "eth0", False),
    ],
)
def test_another_device_than_the_environment_names(tree: Tree, variable: str, value: str, is_found: bool) -> None:
    tree.device("mlx5_1", "mlx5_core")
    tree.gids("mlx5_1", ("::ffff:10.1.0.1", V2))
    tree.environment[variable] = value
    host = replace(tree.host(), target=chosen("mlx5_1", 4096))
    fires(host, "Q1", f"{variable} names mlx5_0" if is_found else "ib_write_bw", note=not is_found)


def test_class_of_one_end(tree: Tree) -> None:
    silent(tree.host(), "Q4")
    tree.write(f"{CONFIG}/default_roce_tos", "104")
    silent(tree.host(), "Q4")
    tree.environment["UCX_IB_TRAFFIC_CLASS"] = "106"
    silent(tree.host(), "Q4")  # only the bits of ECN differ
    tree.environment["NCCL_IB_TC"] = "0"
    fires(tree.host(), "Q4", "NCCL_IB_TC=0 is DSCP 0", "mlx5_0 that accepts has 26", "echo 0 >")
    del tree.environment["NCCL_IB_TC"]
    tree.device("mlx5_1", "mlx5_core")
    tree.gids("mlx5_1", ("::ffff:10.1.0.1", V2))
    fires(tree.host(), "Q4", "UCX_IB_TRAFFIC_CLASS=106", "mlx5_1/ports/1/default_roce_tos")
    tree.environment.clear()
    fires(tree.host(), "Q4", "of mlx5_0 is 104 (DSCP 26), and ids of mlx5_1 have DSCP 0", note=True)


def test_ptrace(tree: Tree) -> None:
    silent(tree.host(), "Q5")
    tree.write("proc/sys/kernel/yama/ptrace_scope", "1")
    fires(tree.host(), "Q5", "ptrace_scope is 1", note=True)
    tree.write("proc/sys/kernel/yama/ptrace_scope", "2")
    fires(tree.host(), "Q5", "ptrace_scope is 2", "SYS_PTRACE")
    silent(replace(tree.host(), capabilities=1 << CAP_SYS_PTRACE), "Q5")


def test_port_is_down(tree: Tree) -> None:
    silent(tree.host(), "A18")
    tree.port_file("state", "1: DOWN")
    tree.tables.faces[1] = tree.tables.faces[1]._replace(flags=0x1003)
    fires(tree.host(), "A18", "port 1 of mlx5_0 is DOWN: interface eth0 is up without carrier", "ip link set eth0 up")
    tree.device("mlx5_1", "mlx5_core")
    fires(tree.host(), "A18", note=True)  # another one is ACTIVE


def test_interface_without_arp(tree: Tree) -> None:
    silent(tree.host(), "A14")
    tree.tables.faces[1] = tree.tables.faces[1]._replace(flags=0x11043 | 0x80)
    fires(tree.host(), "A14", "eth0 has the flag NOARP", "ip link set eth0 arp on")
    tree.write("proc/sys/kernel/osrelease", "6.18.0")
    silent(tree.host(), "A14")
