"""The kernel's devices as a folder shows them that is laid out as sysfs."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

import pytest

from rdmacm import RdmaError
from rdmacm.address import Gid
from rdmacm.kernel import nldev
from rdmacm.kernel import sysfs as sysfs_module
from rdmacm.kernel.id_state import preferred_index
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.kernel.ucma import Ucma, abi_version
from rdmacm.net.types import Interface
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortFlag, PortState, TransportType

ETH0 = Interface(7, "eth0", 0x43, 1500, 1, bytes(6))


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def device(tmp_path: Path) -> Path:
    root = tmp_path / "class" / "infiniband" / "mlx5_0"
    write(root, node_type="1: CA", node_guid="0c42:a103:0011:2233", fw_ver="20.40.1000", node_desc="host")
    driver = tmp_path / "drivers" / "mlx5_core"
    driver.mkdir(parents=True)
    (root / "device").mkdir()
    (root / "device" / "driver").symlink_to(driver)
    port = root / "ports" / "1"
    write(port, state="4: ACTIVE", phys_state="5: LinkUp", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    write(port, cap_mask="0x00010000", lid="0x0", lid_mask_count="0", sm_lid="0x0", sm_sl="0")
    gids = ("fe80::1", "fe80::1", "::", "::ffff:10.0.0.1")
    for number, gid in enumerate(gids):
        text = ":".join(f"{int.from_bytes(Gid(gid)[i : i + 2], 'big'):04x}" for i in range(0, 16, 2))
        write(port, **{f"gids__{number}": text})
        if gid != "::":
            kind = "IB/RoCE v1" if number == 0 else "RoCE v2"
            write(port, **{f"gid_attrs__types__{number}": kind, f"gid_attrs__ndevs__{number}": "eth0"})
    write(port, pkeys__0="0xffff", pkeys__1="0x0000", hw_counters__out_of_buffer="3", hw_counters__lifespan="10")
    write(port, counters__port_xmit_wait="5", counters__unsupported="N/A")
    write(root, hw_counters__resets="1")
    write(port, cm_tx_msgs__req="2", cm_rx_msgs__rep="1")
    return tmp_path


def test_a_device_is_read_with_its_tables(device: Path) -> None:
    sysfs = Sysfs(str(device))
    assert sysfs.names() == ["mlx5_0"]
    found = sysfs.device("mlx5_0", 3, {"eth0": ETH0})
    assert found is not None
    assert (found.index, found.provider, found.node_type) == (3, "kernel", NodeType.CA)
    assert (found.transport_type, found.node_guid) == (TransportType.IB, 0x0C42A10300112233)
    assert (found.driver, found.fw_ver) == ("mlx5_core", "20.40.1000")
    (port,) = found.ports
    assert (port.state, port.link_layer, port.phys_state) == (PortState.ACTIVE, LinkLayer.ETHERNET, 5)
    assert (port.active_width, port.active_speed, port.active_mtu) == (2, 32, Mtu.MTU_1024)
    assert [(row.gid_index, row.gid_type, row.ndev_ifindex) for row in port.gids] == [
        (0, GidType.ROCE_V1, 7),
        (1, GidType.ROCE_V2, 7),
        (3, GidType.ROCE_V2, 7),
    ]
    assert port.gids[2].gid == Gid("::ffff:10.0.0.1")
    assert (port.pkeys, port.pkey_tbl_len, port.gid_tbl_len) == ((0xFFFF,), 2, 4)


@pytest.mark.parametrize(
    ("rate", "codes"),
    [("800 Gb/sec (4X XDR)", (2, 128, 256)), ("400 Gb/sec (4X NDR)", (2, 128, 0)), ("10 Gb/sec (1X QDR)", (1, 8, 0))],
)
def test_speed_of_a_link(device: Path, rate: str, codes: tuple[int, int, int]) -> None:
    write(device / "class/infiniband/mlx5_0/ports/1", rate=rate)
    found = Sysfs(str(device)).device("mlx5_0", 3, {"eth0": ETH0})
    assert found is not None
    (port,) = found.ports
    assert (port.active_width, port.active_speed, port.active_speed_ex) == codes


def test_device_that_is_neither_roce_nor_infiniband(device: Path) -> None:
    """As of EFA, which has a transport of its own."""
    write(device / "class/infiniband/mlx5_0", node_type="7: unspecified")
    write(device / "class/infiniband/mlx5_0/ports/1", link_layer="Unspecified")
    found = Sysfs(str(device)).device("mlx5_0", 3, {"eth0": ETH0})
    assert found is not None
    assert (found.node_type, found.transport_type) == (NodeType.UNSPECIFIED, TransportType.UNSPECIFIED)
    (port,) = found.ports
    assert (port.link_layer, port.flags) == (LinkLayer.UNSPECIFIED, PortFlag(0))
    assert port.gids[0].gid_type is GidType.IB


def test_infiniband_port_counts_with_an_interface(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without IPoIB nobody can connect to an address there."""
    monkeypatch.setattr(sysfs_module, "device_indices", lambda: {"mlx5_0": 0})
    monkeypatch.setattr(sysfs_module, "port_states", lambda index: [nldev.PortSeen(1, PortState.ACTIVE, 0)])
    sysfs = Sysfs(str(device))
    ports = device / "class/infiniband/mlx5_0/ports/1"
    write(ports, link_layer="Ethernet")
    assert sysfs.why_unusable(["mlx5_0"]) == "the network interface of mlx5_0 is in another network namespace"
    write(ports, link_layer="InfiniBand")
    without = "mlx5_0 has no IPoIB interface in this network namespace"
    assert sysfs.why_unusable(["mlx5_0"]) == without
    write(device / "class/net/ib0", type="32")
    write(device / "class/net/eth0", type="1")
    for name in ("ib0", "eth0"):
        (device / "class/net" / name / "device").symlink_to(device / "class/infiniband/mlx5_0/device")
    assert sysfs.why_unusable(["mlx5_0"]) is None
    write(device / "class/net/ib0", type="1")
    assert sysfs.why_unusable(["mlx5_0"]) == without


def test_type_of_gids_is_that_of_configfs(device: Path) -> None:
    sysfs = Sysfs(str(device))
    assert sysfs.default_gid_type("mlx5_0", 1) is GidType.ROCE_V2
    folder = device / "kernel/config/rdma_cm/mlx5_0/ports/1"
    for text, gid_type in (("IB/RoCE v1", GidType.ROCE_V1), ("RoCE v2", GidType.ROCE_V2)):
        write(folder, default_roce_mode=text)
        assert sysfs.default_gid_type("mlx5_0", 1) is gid_type


def test_row_of_an_id_among_those_of_its_gid() -> None:
    gid = Gid("fe80::1")
    rows = [
        GidEntry(gid, number, 1, gid_type, "", ifindex)
        for number, (gid_type, ifindex) in enumerate(
            [(GidType.ROCE_V1, 7), (GidType.ROCE_V2, 7), (GidType.ROCE_V1, 8), (GidType.ROCE_V2, 8)]
        )
    ]
    assert preferred_index(rows, GidType.ROCE_V2, 0) == 1
    assert preferred_index(rows, GidType.ROCE_V2, 8) == 3
    assert preferred_index(rows, GidType.ROCE_V1, 0) == 0
    assert preferred_index(rows, GidType.ROCE_V1, 8) == 2
    assert preferred_index(rows[:1], GidType.ROCE_V2, 8) == 0
    assert preferred_index([], GidType.ROCE_V2, 0) == 0


def test_counters_are_those_of_the_driver_and_of_the_connection_manager(device: Path) -> None:
    sysfs = Sysfs(str(device))
    assert sysfs.counters("mlx5_0") == {"resets": 1, "port_xmit_wait": 5, "out_of_buffer": 3}
    assert sysfs.cm_counters() == {"tx_req": 2, "rx_rep": 1}


def test_a_device_that_is_gone_is_none(device: Path) -> None:
    assert Sysfs(str(device)).device("mlx5_1", None, {}) is None
    assert Sysfs(str(device / "nowhere")).names() == []
    assert Sysfs(str(device)).node_guid("mlx5_1") == 0


# -- netlink ----------------------------------------------------------------------------------------------


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body


def test_netlink_names_devices_and_ports() -> None:
    number = struct.Struct("=I").pack
    devices = message(5 << 10 | 1, attribute(1, number(4)) + attribute(2, b"mlx5_0\0"))
    devices += message(5 << 10 | 1, attribute(1, number(5)) + attribute(2, b"rxe0\0"))
    found: dict[str, int] = {}
    nldev.parse_devices(devices, found)
    assert found == {"mlx5_0": 4, "rxe0": 5}
    body = attribute(1, number(4)) + attribute(3, number(1)) + attribute(12, b"\4") + attribute(50, number(7))
    ports: list[nldev.PortSeen] = []
    nldev.parse_ports(message(5 << 10 | 5, body), ports)
    assert ports == [(1, 4, 7)]


def test_an_invalid_netlink_message_is_an_error() -> None:
    for data in (struct.pack("=IHHII", 4, 3, 0, 0, 0), struct.pack("=IHHII", 400, 3, 0, 0, 0)):
        with pytest.raises(OSError, match="invalid length"):
            nldev.parse_devices(data, {})
    found: dict[str, int] = {}
    nldev.parse_devices(message(5 << 10 | 1, b"\2\0\1\0"), found)
    assert not found


# -- the device file --------------------------------------------------------------------------------------


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(RdmaError, match=r"rdma_ucm is not loaded.*modprobe rdma_ucm") as failed:
        Ucma(str(tmp_path), str(tmp_path))
    assert failed.value.errno == errno.ENODEV
    assert abi_version(str(tmp_path)) is None


def test_a_device_file_that_is_missing_in_a_container_is_named(tmp_path: Path) -> None:
    write(tmp_path, class__misc__rdma_cm__abi_version="4")
    with pytest.raises(RdmaError, match=r"is loaded, but .*/infiniband/rdma_cm is not there.*--device="):
        Ucma(str(tmp_path), str(tmp_path))


def test_another_version_of_the_interface_is_refused(tmp_path: Path) -> None:
    write(tmp_path, class__misc__rdma_cm__abi_version="5", infiniband__rdma_cm="")
    with pytest.raises(RdmaError, match=r"version 5.*speaks 4") as failed:
        Ucma(str(tmp_path), str(tmp_path))
    assert failed.value.errno == errno.EPROTONOSUPPORT


def test_a_missing_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, class__misc__rdma_cm__abi_version="4", infiniband__rdma_cm="")
    path = tmp_path / "infiniband" / "rdma_cm"

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    path.chmod(0o600)
    with pytest.raises(PermissionError, match=r"no permission to read and write .mode 600."):
        Ucma(str(tmp_path), str(tmp_path))
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="device cgroup"):
        Ucma(str(tmp_path), str(tmp_path))


def test_the_devices_of_this_host_can_be_asked_for() -> None:
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20).close()
    except OSError:
        pytest.skip("the kernel has no netlink for RDMA")
    assert isinstance(nldev.device_indices(), dict)
