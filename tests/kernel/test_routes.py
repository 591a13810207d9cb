"""Routes without an id, as the kernel's provider predicts them: a RoCE and an iWARP device of a folder as sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rdmacm import AddrInfo, GaiError, PathData, PathRecord, getaddrinfo
from rdmacm.address import Gid
from rdmacm.constants import EAI
from rdmacm.kernel.provider import KernelProvider
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.testing import MemoryNetwork

OPEN = PathRecord(Gid(), Gid(), pkey=0)
#: The peers on the networks of the two devices.
ROCE, IWARP = "10.0.0.2", "10.1.0.2"


def write_device(root: Path, name: str, node_type: str, interface: str, gid: str) -> None:
    port = root / "class" / "infiniband" / name / "ports" / "1"
    full = ":".join(f"{int.from_bytes(Gid(gid)[i : i + 2], 'big'):04x}" for i in range(0, 16, 2))
    for path, text in {
        port.parents[1] / "node_type": node_type,
        port / "state": "4: ACTIVE",
        port / "link_layer": "Ethernet",
        port / "gids" / "0": full,
        port / "gid_attrs" / "types" / "0": "RoCE v2",
        port / "gid_attrs" / "ndevs" / "0": interface,
        port / "pkeys" / "0": "0xffff",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelProvider:
    monkeypatch.setenv("RDMACM_ACM_RUNDIR", "")
    monkeypatch.setattr("rdmacm.kernel.host.device_indices", dict)  # the folder has all devices
    network = MemoryNetwork()
    for interface, address, peer in (("eth0", "10.0.0.1/24", ROCE), ("eth1", "10.1.0.1/24", IWARP)):
        network.add_neighbour(network.add_interface(interface, address), peer)
    write_device(tmp_path, "folder_roce", "1: CA", "eth0", "::ffff:10.0.0.1")
    write_device(tmp_path, "folder_iwarp", "4: RNIC", "eth1", "0200:0000:0001::")
    return KernelProvider(network, sysfs=Sysfs(str(tmp_path)))


def lookup(provider: KernelProvider, peer: str, **fields: Any) -> AddrInfo:
    like = OPEN.replace(**fields)
    (info,) = getaddrinfo(peer, 7471, route=[PathData(like)] if fields else None, provider=provider)
    return info


@pytest.mark.parametrize("fields", [{}, {"sgid": Gid("::ffff:10.0.0.1")}, {"mtu": 2}, {"pkey": 0x7FFF, "sl": 1}])
def test_route_of_the_hints_restricts_on_roce(provider: KernelProvider, fields: dict[str, Any]) -> None:
    info = lookup(provider, ROCE, **fields)
    (path,) = (data.path for data in info.route)
    assert (info.device, path.sgid, path.dgid) == ("folder_roce", Gid("::ffff:10.0.0.1"), Gid("::ffff:10.0.0.2"))
    assert (path.mtu, path.sl) == (fields.get("mtu", 3), fields.get("sl", 0))


@pytest.mark.parametrize(
    "fields", [{"pkey": 0x8001}, {"sgid": Gid("::ffff:10.1.0.1")}, {"dgid": Gid("fe80::9")}, {"mtu": 5}]
)
def test_restriction_that_no_path_of_roce_meets_is_nodata(provider: KernelProvider, fields: dict[str, Any]) -> None:
    with pytest.raises(GaiError) as caught:
        lookup(provider, ROCE, **fields)
    assert caught.value.errno == EAI.NODATA


@pytest.mark.parametrize("fields", [{}, {"mtu": 2}, {"pkey": 0x8001}])
def test_iwarp_has_no_routing_data(provider: KernelProvider, fields: dict[str, Any]) -> None:
    info = lookup(provider, IWARP, **fields)
    assert (info.device, info.src_addr, info.route_len) == ("folder_iwarp", ("10.1.0.1", 0), 0)


def test_mtu_that_is_too_small_for_roce_leaves_the_route_out(provider: KernelProvider) -> None:
    network = provider.host.network
    assert isinstance(network, MemoryNetwork)
    network.set_interface(next(each.index for each in network.interfaces() if each.name == "eth0"), mtu=300)
    assert lookup(provider, ROCE).route_len == 0
