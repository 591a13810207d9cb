"""Rules D1 to D9, N1 to N7 and C4, by trees of /sys, /proc and /dev for adapters that this machine does not have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdmacm.doctor import RULES, Found, examine
from rdmacm.doctor.descriptors import is_readable
from support.doctor import Tree, fires, link_local, silent

ZERO = ("::", "")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_healthy_host_has_neither_findings_nor_notes(tree: Tree) -> None:
    found = examine(tree.host())
    assert [answer for answer in found.answers if isinstance(answer.outcome, Found)] == []
    assert len(found.answers) == len(RULES)


def test_no_device(tree: Tree, tmp_path: Path) -> None:
    silent(tree.host(), "D1")
    empty = Tree(tmp_path / "empty", adapter=False)
    fires(empty.host("kernel"), "D1", "/sys/class/infiniband is empty", "rdma link add")
    fires(empty.host("soft"), "D1", "software devices", note=True)
    assert examine(empty.host("soft")).findings == []


def test_ucm_is_not_loaded(tree: Tree) -> None:
    silent(tree.host(), "D2")
    tree.remove("dev/infiniband/rdma_cm")
    silent(tree.host(), "D2")  # it is loaded: the file is missing, which is D4
    fires(tree.host(), "D4", "/dev/infiniband/rdma_cm is not there")
    tree.write("proc/modules", "ib_core 1 0 - - 0x0")
    fires(tree.host(), "D2", "modprobe rdma_ucm")


def test_ucm_is_built_in(tree: Tree) -> None:
    tree.remove("dev/infiniband/rdma_cm")
    tree.write("proc/modules", "")
    tree.write("sys/class/misc/rdma_cm/dev", "10:58")
    silent(tree.host(), "D2")


def test_library_of_the_device_is_missing(tree: Tree) -> None:
    silent(tree.host(), "D3")
    tree.remove("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav59.so")
    fires(tree.host(), "D3", "mlx5_0 (mlx5_core)", "ibverbs-providers")
    tree.write("usr/local/etc/libibverbs.d/mlx5.driver", "driver mlx5")
    fires(tree.host(), "D3", "/usr/local/etc/libibverbs.d", "/etc/libibverbs.d/")
    tree.remove("usr/lib/x86_64-linux-gnu/libibverbs.so.1")
    fires(tree.host(), "D3", "libibverbs.so.1 is not installed")


def test_device_file_may_not_be_opened(tree: Tree) -> None:
    silent(tree.host(), "D4")
    tree.denied = {"uverbs0"}
    fires(tree.host(), "D4", "/dev/infiniband/uverbs0 may not be opened", "--device=/dev/infiniband/uverbs0")


def test_one_device_of_two_may_not_be_opened(tree: Tree) -> None:
    tree.device("mlx5_1", "mlx5_core")
    silent(tree.host(), "D5")
    tree.denied = {"uverbs1"}
    assert "passes over" in str(silent(tree.host(), "D5"))  # librdmacm is new
    tree.remove("usr/lib/x86_64-linux-gnu/librdmacm.so.1.3.56.0")
    tree.write("usr/lib/x86_64-linux-gnu/librdmacm.so.1.2.28.0")
    fires(tree.host(), "D5", "mlx5_1", "rdma-core 28")


def test_node_guid_is_zero(tree: Tree) -> None:
    silent(tree.host(), "D6")
    tree.write("sys/class/infiniband/mlx5_0/node_guid", "0000:0000:0000:0000")
    silent(tree.host(), "D6")
    tree.remove("usr/lib/x86_64-linux-gnu/librdmacm.so.1.3.56.0")
    tree.write("usr/lib/x86_64-linux-gnu/librdmacm.so.1.3.44.0")
    fires(tree.host(), "D6", "mlx5_0", "node_guid")


def test_locked_memory(tree: Tree) -> None:
    silent(tree.host(), "D7")
    tree.limit(str(64 << 20))
    silent(tree.host(), "D7")
    tree.limit(str(8 << 20))
    fires(tree.host(), "D7", "8192 KiB", "--ulimit memlock=-1")
    tree.write("proc/self/status", "CapEff:\t0000000000004000")
    assert "CAP_IPC_LOCK" in str(silent(tree.host(), "D7"))


def test_unit_of_systemd(tree: Tree) -> None:
    silent(tree.host(), "D8")
    tree.write("usr/lib/systemd/system/osd.service", "[Service]\nPrivateDevices=yes\n")
    fires(tree.host(unit="osd"), "D8", "PrivateDevices=yes", "no LimitMEMLOCK", "systemctl edit osd.service")
    tree.write("etc/systemd/system/osd.service.d/rdma.conf", "[Service]\nPrivateDevices=no\nLimitMEMLOCK=infinity\n")
    silent(tree.host(unit="osd"), "D8")
    tree.write("etc/systemd/system/osd.service.d/rdma.conf", "[Service]\nPrivateDevices=no\nLimitMEMLOCK=8M:64M\n")
    fires(tree.host(unit="osd"), "D8", "LimitMEMLOCK=8M:64M caps")
    tree.write("etc/systemd/system/osd.service.d/rdma.conf", "[Service]\nPrivateDevices=no\nLimitMEMLOCK=1G\n")
    silent(tree.host(unit="osd"), "D8")
    tree.write("proc/self/cgroup", "0::/system.slice/osd.service")
    tree.write("etc/systemd/system/osd.service.d/z.conf", "[Service]\nDevicePolicy=closed\n")
    fires(tree.host(), "D8", "DevicePolicy=closed", "DeviceAllow=/dev/infiniband/rdma_cm rw")
    tree.write("etc/systemd/system/osd.service.d/z2.conf", "[Service]\nDeviceAllow=char-infiniband_verbs rw\n")
    silent(tree.host(), "D8")


def test_no_ipv6_for_rxe(tmp_path: Path) -> None:
    tree = Tree(tmp_path, adapter=False)
    silent(tree.host(), "D9")
    tree.remove("proc/sys/net/ipv6")
    assert "does without" in str(silent(tree.host(), "D9"))
    tree.write("proc/sys/kernel/osrelease", "5.10.0-35-amd64")
    fires(tree.host(), "D9", "Linux 5.10", "err = -97")
    tree.write("proc/modules", "rdma_rxe 1 0 - - 0x0")
    silent(tree.host(), "D9")


def test_interface_is_in_another_namespace(tree: Tree) -> None:
    silent(tree.host(), "N1")
    tree.tables.faces = [face for face in tree.tables.faces if face.name != "eth0"]
    tree.tables.ips = [each for each in tree.tables.ips if each.ifindex != 2]
    fires(tree.host(), "N1", "mlx5_0", "eth0", "rdma system: shared", "rdma system set netns exclusive")
    # Another interface of this name, as every container has one.
    tree.tables.add(7, "eth0", "172.17.0.2/16", mac=bytes.fromhex("0242ac110002"))
    fires(tree.host(), "N1", "another network namespace")


def test_plugin_wants_shared_devices(tree: Tree) -> None:
    silent(tree.host(), "N2")
    tree.write("proc/77/comm", "k8s-rdma-shared")
    silent(tree.host(), "N2")
    tree.write("sys/module/ib_core/parameters/netns_mode", "N")
    fires(tree.host(), "N2", "k8s-rdma-shared", "rdma system set netns shared")


def test_every_gid_is_zero(tree: Tree) -> None:
    silent(tree.host(), "N3")
    tree.gids("mlx5_0", ZERO, ZERO, ZERO)
    fires(tree.host(), "N3", "all 3 GIDs of mlx5_0", "macvlan")


def test_first_gids_are_of_other_namespaces(tree: Tree) -> None:
    silent(tree.host(), "N4")
    tree.gids("mlx5_0", ("::ffff:10.9.9.9", "RoCE v2", "eth7"), ("::ffff:10.0.0.1", "RoCE v2"))
    fires(tree.host(), "N4", "the first of this network namespace is 1", "NCCL_IB_GID_INDEX=1", note=True)


def rxe(tree: Tree) -> None:
    """An rxe device on eth0."""
    tree.device("rxe0", "rdma_rxe")
    tree.write("sys/class/infiniband/rxe0/parent", "eth0")
    tree.gids("rxe0", (link_local(tree.tables.faces[1].address), "RoCE v2"), ("::ffff:10.0.0.1", "RoCE v2"))


def test_rxe_listens_in_another_namespace(tree: Tree) -> None:
    silent(tree.host(), "N5")
    rxe(tree)
    silent(tree.host(), "N5")  # the machine's namespace
    tree.remove("proc/sys/net/core/netdev_max_backlog")
    fires(tree.host(), "N5", "rxe0", "nothing comes back")
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    tree.write(
        "proc/net/udp", f"{head}\n 1: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 0 2"
    )
    assert "rxe has UDP port 4791" in str(silent(tree.host(), "N5"))


def test_rxe_has_the_port(tree: Tree) -> None:
    rxe(tree)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    tree.write(
        "proc/net/udp", f"{head}\n 1: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 0 2"
    )
    fires(tree.host("soft"), "D10", "0.0.0.0 is the kernel's", "--provider kernel")
    fires(tree.host("kernel"), "D10", "rdma_rxe", note=True)


def test_kernel_without_namespaces(tree: Tree) -> None:
    tree.remove("proc/sys/net/core/netdev_max_backlog")
    silent(tree.host(), "N7")
    tree.write("proc/sys/kernel/osrelease", "4.15.0-213-generic")
    fires(tree.host(), "N7", "Linux 4.15", "4.19")


def test_devices_of_one_name_in_two_namespaces(tree: Tree) -> None:
    def process(pid: str, namespace: int, sees: str) -> None:
        tree.link(f"proc/{pid}/ns/net", f"net:[{namespace}]")
        if sees:
            (tree.root / f"proc/{pid}/root/sys/class/infiniband/{sees}").mkdir(parents=True)
        else:
            tree.link(f"proc/{pid}/root/sys", str(tree.root / "sys"))

    tree.link("proc/self/ns/net", "net:[1]")
    process("76", 1, "mlx5_0")  # of this namespace, in another mount namespace
    process("77", 2, "mlx5_1")
    process("78", 3, "")  # has the sysfs of this namespace
    silent(tree.host(), "N6")
    tree.write("sys/module/ib_core/parameters/netns_mode", "N")
    silent(tree.host(), "N6")
    process("79", 4, "mlx5_0")
    fires(tree.host(), "N6", "mlx5_0 is here and in the network namespace of process 79", "rdma dev set", note=True)
    tree.write("sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_mode", "RoCE v2")
    fires(tree.host(), "N6", "/sys/kernel/config/rdma_cm/mlx5_0 is one for both")


def test_events_that_nobody_reads(tree: Tree) -> None:
    """A pipe of this process has the place of a channel of rdma_cm."""
    reader, writer = os.pipe()
    try:
        tree.write(f"proc/{os.getpid()}/comm", "server")
        tree.link(f"proc/{os.getpid()}/fd/{reader}", "/dev/infiniband/rdma_cm")
        silent(tree.host(), "C4")
        os.write(writer, b"event")
        if not is_readable(os.getpid(), reader):
            pytest.skip("needs pidfd_getfd(2)")
        fires(tree.host(), "C4", f"process {os.getpid()} (server) does not read", f"gdb -p {os.getpid()}", note=True)
        os.read(reader, 5)
        silent(tree.host(), "C4")
        tree.remove("dev/infiniband/rdma_cm")
        assert "no /dev/infiniband/rdma_cm" in str(silent(tree.host(), "C4"))
    finally:
        os.close(reader)
        os.close(writer)


def bond(mode: str, *failures: int) -> str:
    """What Linux writes of a bond (drivers/net/bonding/bond_procfs.c)."""
    members = "".join(f"\nSlave Interface: eth{at}\nLink Failure Count: {count}\n" for at, count in enumerate(failures))
    return f"Ethernet Channel Bonding Driver: v6.12.0\n\nBonding Mode: {mode}\nMII Status: up\n{members}"


@pytest.mark.parametrize("mode", ["fault-tolerance (active-backup) (fail_over_mac active)", "adaptive load balancing"])
def test_bond_that_changes_its_address(tree: Tree, mode: str) -> None:
    silent(tree.host(), "C5")
    tree.write("proc/net/bonding/bond0", bond(mode, 2, 1))
    silent(tree.host(), "C5")  # no RDMA interface
    tree.write("proc/net/bonding/eth0", bond(mode, 2, 1))
    fires(tree.host(), "C5", f"eth0 has another MAC address after a failure of a link ({mode}), 3 so far", note=True)
    for harmless in ("fault-tolerance (active-backup)", "IEEE 802.3ad Dynamic link aggregation"):
        tree.write("proc/net/bonding/eth0", bond(harmless, 2, 1))
        silent(tree.host(), "C5")


def test_vlan_on_a_bond_that_changes_its_address(tree: Tree) -> None:
    tree.write("proc/net/vlan/config", "VLAN Dev name | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\n"
               "eth0           | 10  | bond0")  # fmt: skip
    tree.write("proc/net/bonding/bond0", bond("fault-tolerance (active-backup) (fail_over_mac active)", 0))
    fires(tree.host(), "C5", "bond0 has another MAC address", note=True)


def test_no_descriptor_of_a_process_that_is_gone() -> None:
    assert not is_readable(1 << 22, 0)
    assert not is_readable(os.getpid(), 1 << 20)
