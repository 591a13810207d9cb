"""The attributes of software devices and ports: complete, those of rdma_rxe, and limits that are enforced."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial

import pytest

from rdmacm import CmId, RdmaError
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR, SoftDevice
from rdmacm.soft.ib.ports import IbDevice
from rdmacm.testing import Fabric
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    UNLIMITED,
    AccessFlag,
    AtomicCap,
    Context,
    DeviceAttr,
    DeviceCapFlag,
    LinkLayer,
    Mtu,
    Port,
    PortCapFlag,
    PortCapFlag2,
    PortFlag,
    PortState,
    QPCap,
    QPInitAttr,
    ReregMRFlag,
    SrqAttr,
    SrqInitAttr,
)
from support.softdev import Pair

#: The fields of ``struct ibv_device_attr`` and ``struct ibv_port_attr`` in infiniband/verbs.h.
_DEVICE = """fw_ver node_guid sys_image_guid max_mr_size page_size_cap vendor_id vendor_part_id hw_ver max_qp max_qp_wr
    device_cap_flags max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom
    max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp max_raw_ethy_qp
    max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr max_map_per_fmr max_srq max_srq_wr
    max_srq_sge max_pkeys local_ca_ack_delay phys_port_cnt"""
_PORT = """state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr pkey_tbl_len
    lid sm_lid lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer flags
    port_cap_flags2"""
_DEVICE_EX = """orig_attr comp_mask odp_caps completion_timestamp_mask hca_core_clock device_cap_flags_ex tso_caps
    rss_caps max_wq_type_rq packet_pacing_caps raw_packet_caps tm_caps cq_mod_caps max_dm_size pci_atomic_caps
    xrc_odp_caps phys_port_cnt_ex"""
_CAPS = {
    "odp_caps": "general_caps rc_odp_caps uc_odp_caps ud_odp_caps xrc_odp_caps",
    "tso_caps": "max_tso supported_qpts",
    "rss_caps": "supported_qpts max_rwq_indirection_tables max_rwq_indirection_table_size rx_hash_fields_mask "
    "rx_hash_function",
    "packet_pacing_caps": "qp_rate_limit_min qp_rate_limit_max supported_qpts",
    "tm_caps": "max_rndv_hdr_size max_num_tags flags max_ops max_sge",
    "cq_mod_caps": "max_cq_count max_cq_period",
    "pci_atomic_caps": "fetch_add swap compare_swap",
}
#: The capabilities that ibv_devinfo(1) shows for 0x01223C76.
_CAPABILITIES = """BAD_PKEY_CNTR BAD_QKEY_CNTR AUTO_PATH_MIG CHANGE_PHY_PORT UD_AV_PORT_ENFORCE PORT_ACTIVE_EVENT
    SYS_IMAGE_GUID RC_RNR_NAK_GEN SRQ_RESIZE MEM_WINDOW MEM_MGT_EXTENSIONS MEM_WINDOW_TYPE_2B"""
C_DEVICE, C_PORT = _DEVICE.split(), _PORT.split()


@contextmanager
def opened(fabric: Fabric | None = None, speed: int = 0) -> Iterator[Context]:
    host = (fabric or Fabric()).host("a", "10.0.0.1")
    host.network.speeds["eth0"] = speed
    with CmId(provider=host.provider) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        yield cmid.verbs


def test_every_field_of_c() -> None:
    assert [name for name in C_DEVICE if name not in {field.name for field in fields(DeviceAttr)}] == []
    assert [name for name in C_PORT if name not in {field.name for field in fields(Port)}] == []
    assert DeviceCapFlag(0x01223C76) == sum(DeviceCapFlag[name] for name in _CAPABILITIES.split())
    assert (DeviceCapFlag.MANAGED_FLOW_STEERING, DeviceCapFlag.XRC) == (1 << 29, 1 << 20)
    assert (PortCapFlag.CM_SUP, PortCapFlag.IP_BASED_GIDS, PortCapFlag2.LINK_SPEED_NDR_SUP) == (
        1 << 16,
        1 << 26,
        1 << 10,
    )


def test_capabilities_beyond_32_bits() -> None:
    """rdma_rxe has FLUSH_PERSISTENT too, which no memory here can be registered for."""
    with opened() as context:
        attr = context.query_device()
        beyond = DeviceCapFlag.FLUSH_GLOBAL | DeviceCapFlag.ATOMIC_WRITE
        assert attr.device_cap_flags_ex == attr.device_cap_flags | beyond
        assert attr.device_cap_flags < 1 << 32
    assert IbDevice("ib0").attr.device_cap_flags_ex == 0


def test_device() -> None:
    with opened() as context:
        attr = context.query_device()
        guid = context.device.node_guid
    assert (attr.node_guid, attr.sys_image_guid) == (guid, guid)
    # As ibv_devinfo(1) shows an rxe device.
    assert (attr.fw_ver, attr.vendor_id, attr.vendor_part_id, attr.hw_ver) == ("0.0.0", 0xFFFFFF, 0, 0)
    assert (attr.page_size_cap, attr.local_ca_ack_delay, attr.phys_port_cnt) == (0xFFFFF000, 15, 1)
    assert (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom, attr.atomic_cap) == (128, 128, AtomicCap.HCA)
    # What this device lacks.
    zero = [name for name in C_DEVICE if name.startswith(("max_ee", "max_rdd", "max_raw", "max_fmr"))]
    assert {name: getattr(attr, name) for name in [*zero, "max_map_per_fmr"]} == dict.fromkeys(
        [*zero, "max_map_per_fmr"], 0
    )
    assert attr.device_cap_flags & DeviceCapFlag.SRQ_RESIZE
    assert not attr.device_cap_flags & (DeviceCapFlag.MEM_WINDOW_TYPE_2A | DeviceCapFlag.AUTO_PATH_MIG)
    assert DeviceCapFlag.XRC in attr.device_cap_flags
    assert DeviceCapFlag.MEM_WINDOW | DeviceCapFlag.MEM_WINDOW_TYPE_2B in attr.device_cap_flags
    assert attr.max_mw == 1 << 16
    assert (attr.max_mcast_grp, attr.max_mcast_qp_attach, attr.max_total_mcast_qp_attach) == (1024, 1024, 1 << 20)


def test_guid_follows_the_hardware_address() -> None:
    host = Fabric().host("a", "10.0.0.1")
    with CmId(provider=host.provider) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        context = cmid.verbs
        before = context.query_device().node_guid
        network = host.network
        (ifindex,) = (each.index for each in network.interfaces() if each.name == "eth0")
        network.set_interface(ifindex, mac=bytes.fromhex("02aabbccddee"))
        assert context.device.node_guid != before
        assert context.query_device().node_guid == context.device.node_guid


def test_port() -> None:
    with opened(speed=10_000) as context:
        port = context.query_port(1)
        assert port.max_msg_sz == context.query_device().max_msg_sz
        assert port.pkey_tbl_len == len(port.pkeys) == context.query_device().max_pkeys
    assert (port.state, port.phys_state, port.link_layer) == (PortState.ACTIVE, 5, LinkLayer.ETHERNET)
    assert (port.max_mtu, port.active_mtu, port.gid_tbl_len) == (Mtu.MTU_4096, Mtu.MTU_1024, 1024)
    assert (port.port_cap_flags, port.port_cap_flags2, port.flags) == (PortCapFlag.CM_SUP, 0, PortFlag.GRH_REQUIRED)
    assert (port.lid, port.lmc, port.sm_lid, port.sm_sl, port.max_vl_num) == (0, 0, 0, 0, 1)
    assert (port.subnet_timeout, port.init_type_reply, port.bad_pkey_cntr, port.qkey_viol_cntr) == (0, 0, 0, 0)
    assert (port.active_width, port.active_speed) == (1, 8)


@pytest.mark.parametrize(
    ("speed", "codes"),
    [(0, (1, 1)), (1000, (1, 1)), (25_000, (1, 32)), (100_000, (2, 32)), (400_000, (2, 128)), (1_600_000, (4, 128))],
)
def test_speed_of_the_link(speed: int, codes: tuple[int, int]) -> None:
    with opened(speed=speed) as context:
        port = context.device.ports[0]
        assert (port.active_width, port.active_speed) == codes


@pytest.mark.parametrize(
    ("flags", "state", "phys_state"),
    [(0x1 | 0x40, "ACTIVE", 5), (0x1, "DOWN", 2), (0, "DOWN", 3)],
)
def test_state_of_the_link(monkeypatch: pytest.MonkeyPatch, flags: int, state: str, phys_state: int) -> None:
    host = Fabric().host("a", "10.0.0.1")
    interfaces = [each._replace(flags=flags) for each in host.network.interfaces()]
    monkeypatch.setattr(host.network, "interfaces", lambda: interfaces)
    (port,) = next(device for device in host.provider.devices() if device.name == "soft_eth0").ports
    assert (port.state.name, port.phys_state) == (state, phys_state)


def refused(make: Callable[[], object], code: int) -> None:
    with pytest.raises(RdmaError) as raised:
        make()
    assert raised.value.errno == code


def test_sizes_are_enforced() -> None:
    with opened() as context, PD(context) as pd, CQ(context, 1) as cq:
        attr = context.query_device()
        most = QPCap(attr.max_qp_wr, attr.max_qp_wr, attr.max_sge, attr.max_sge, attr.max_inline_data)
        QP(pd, QPInitAttr(scq=cq, rcq=cq, cap=most)).close()
        for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data"):
            cap = replace(most, **{name: getattr(most, name) + 1})
            refused(lambda cap=cap: QP(pd, QPInitAttr(scq=cq, rcq=cq, cap=cap)), errno.EINVAL)  # type: ignore[misc]
        SRQ(pd, SrqInitAttr(SrqAttr(attr.max_srq_wr, attr.max_srq_sge))).close()
        refused(lambda: SRQ(pd, SrqInitAttr(SrqAttr(attr.max_srq_wr + 1))), errno.EINVAL)
        refused(lambda: SRQ(pd, SrqInitAttr(SrqAttr(1, attr.max_srq_sge + 1))), errno.EINVAL)
        CQ(context, attr.max_cqe).close()
        refused(lambda: CQ(context, attr.max_cqe + 1), errno.EINVAL)


@pytest.mark.parametrize("flag", [AccessFlag.ON_DEMAND, AccessFlag.HUGETLB])
def test_regions_are_not_paged_on_demand(flag: AccessFlag) -> None:
    with opened() as context, PD(context) as pd:
        refused(lambda: MR(pd, bytearray(8), flag), errno.EOPNOTSUPP)
        refused(lambda: MR(pd, bytearray(8), flag | AccessFlag.LOCAL_WRITE), errno.EOPNOTSUPP)


def test_access_that_a_region_cannot_have_cannot_be_given_later() -> None:
    buffer = bytearray(8)
    with opened() as context, PD(context) as pd, MR(pd, buffer, AccessFlag.LOCAL_WRITE) as mr:
        for flag in (AccessFlag.FLUSH_PERSISTENT, AccessFlag.ZERO_BASED, AccessFlag.ON_DEMAND, AccessFlag.HUGETLB):
            code = errno.EINVAL if flag is AccessFlag.FLUSH_PERSISTENT else errno.EOPNOTSUPP
            refused(partial(mr.rereg, ReregMRFlag.CHANGE_ACCESS, access=flag), code)
            refused(partial(mr.rereg, ReregMRFlag(7), pd, bytearray(4), access=flag), code)
            assert (mr.access, mr.length, mr.buf.obj) == (AccessFlag.LOCAL_WRITE, 8, buffer)


def test_numbers_are_enforced(pair: Pair) -> None:
    """Those of queue pairs and regions; the others have no limit."""
    unlimited = {name for name in C_DEVICE if getattr(SOFT_DEVICE_ATTR, name) == UNLIMITED}
    assert unlimited == {"max_cq", "max_pd", "max_ah", "max_srq"}
    host = pair.a
    found = next(device for device in host.provider.devices() if device.index == host.ifindex)
    small = replace(SOFT_DEVICE_ATTR, max_mr=2)
    device = SoftDevice(host.provider.runtime, host.mux, host.provider.host.random, found, lambda _: found, small)
    with ExitStack() as stack:
        for _ in range(2):
            stack.callback(device.reg_mr(host.pd, memoryview(bytearray(8)), AccessFlag.LOCAL_WRITE).dereg)
        refused(lambda: device.reg_mr(host.pd, memoryview(bytearray(8)), AccessFlag.LOCAL_WRITE), errno.ENOMEM)


def test_device_without_driver() -> None:
    """It has what a connection is checked against, and none of the queues that it refuses."""
    attr = IbDevice("mlx5_0", 0x1234).attr
    assert (attr.node_guid, attr.vendor_id, attr.fw_ver) == (0x1234, 0, "")
    assert (attr.max_qp, attr.max_cq, attr.max_mr, attr.max_srq) == (0, 0, 0, 0)
    assert (attr.max_qp_rd_atom, attr.atomic_cap, attr.device_cap_flags) == (128, AtomicCap.NONE, 0)


def test_extended_attributes() -> None:
    """Every field of ``struct ibv_device_attr_ex`` and of the structures in it: 0 for what rdma_rxe lacks, too."""
    with opened() as context:
        found = context.query_device_ex()
        assert found.orig_attr == context.query_device()
        assert found.device_cap_flags_ex & 0xFFFFFFFF == found.orig_attr.device_cap_flags
        with pytest.raises(RdmaError) as raised:
            context.query_rt_values_ex(1)
    assert raised.value.errno == errno.EOPNOTSUPP
    assert (found.phys_port_cnt_ex, found.comp_mask, found.xrc_odp_caps) == (1, 0, 0)
    assert [name for name in _DEVICE_EX.split() if not hasattr(found, name)] == []
    numbers = ("completion_timestamp_mask", "hca_core_clock", "max_wq_type_rq", "raw_packet_caps", "max_dm_size")
    assert [getattr(found, name) for name in numbers] == [0] * 5
    for name, members in _CAPS.items():
        caps = getattr(found, name)
        assert {field.name: getattr(caps, field.name) for field in fields(caps)} == dict.fromkeys(members.split(), 0)
