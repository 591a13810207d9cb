"""The queries of SaAccess, answered by OpenSM."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infiniband.fabric import SimulatedFabric, missing
from rdmacm.address import Gid
from rdmacm.errors import RdmaError
from rdmacm.ib.access import SaAccess
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.sa.subnet import JoinState, NodeInfoType, ServiceRecord
from support.clock import eventually

#: The broadcast group of IPoIB, which OpenSM creates.
BROADCAST = Gid("ff12:401b:ffff::ffff:ffff")


@contextmanager
def access(fabric: SimulatedFabric, node: str, timeout: float = 5.0, tries: int = 10) -> Iterator[SaAccess]:
    with SaAccess(IbsimTransport(node, fabric.base), timeout=timeout, tries=tries) as sa:
        yield sa


@pytest.fixture
def host_a(fabric: SimulatedFabric) -> Iterator[SaAccess]:
    with access(fabric, "HostA") as sa:
        yield sa


@pytest.fixture
def host_b(fabric: SimulatedFabric) -> Iterator[SaAccess]:
    with access(fabric, "HostB") as sa:
        yield sa


def failed(error: pytest.ExceptionInfo[RdmaError]) -> int | None:
    return error.value.errno


def test_path_connects_the_two_ports(host_a: SaAccess, host_b: SaAccess) -> None:
    path = host_a.path(host_b.port.gids[0])
    assert (path.sgid, path.dgid) == (host_a.port.gids[0], host_b.port.gids[0])
    assert (path.slid, path.dlid) == (host_a.port.lid, host_b.port.lid)
    assert (path.pkey, path.mtu_bytes, path.reversible) == (0xFFFF, 2048, True)


def test_path_to_an_unknown_gid_raises(host_a: SaAccess) -> None:
    with pytest.raises(RdmaError, match="fe80::dead") as raised:
        host_a.path(Gid("fe80::dead"))
    assert failed(raised) in (errno.ENOENT, errno.EADDRNOTAVAIL)


def test_path_with_an_unavailable_mtu_raises(host_a: SaAccess, host_b: SaAccess) -> None:
    with pytest.raises(RdmaError, match="no record matches") as raised:
        host_a.path(host_b.port.gids[0], mtu=5)
    assert failed(raised) == errno.ENOENT


def test_path_table_is_truncated_without_rmpp(host_a: SaAccess) -> None:
    """OpenSM leaves the segmentation of its answers to the kernel, which ibsim does not simulate."""
    paths = host_a.paths(sgid=host_a.port.gids[0])
    assert all(path.sgid == host_a.port.gids[0] for path in paths)
    assert len(paths) == 3
    assert paths.is_cut


def test_concurrent_queries_get_their_own_answers(host_a: SaAccess, host_b: SaAccess) -> None:
    here, there = host_a.port, host_b.port
    questions = [host_a.query_path(port.gids[0]) for port in (here, there) * 10]
    answers = [host_a.result(question)[0].dlid for question in reversed(questions)]
    assert answers == [there.lid, here.lid] * 10


def test_registered_service_is_found_until_withdrawn(host_a: SaAccess, host_b: SaAccess) -> None:
    assert host_b.services("demo.service") == []
    host_a.register(0x10001, "demo.service", service_data8=bytes(range(16)))
    (found,) = host_b.services("demo.service")
    assert (found.service_id, found.service_gid) == (0x10001, host_a.port.gids[0])
    assert found.service_data8 == bytes(range(16))
    assert [record.name for record in host_b.services(service_id=0x10001)] == ["demo.service"]
    assert host_b.services("Demo.service") == []
    host_a.register(0x10001, "demo.service", service_data8=bytes(16))
    (found,) = host_b.services("demo.service")
    assert found.service_data8 == bytes(16)
    assert host_a.withdraw(0x10001).service_name == b"demo.service"
    assert host_b.services("demo.service") == []
    with pytest.raises(RdmaError) as raised:
        host_a.withdraw(0x10001)
    assert failed(raised) == errno.ENOENT


def test_service_is_gone_when_its_lease_expires(host_a: SaAccess, host_b: SaAccess) -> None:
    host_a.register(0x10002, "short.service", lease=1)
    assert host_b.services("short.service")
    eventually(lambda: not host_b.services("short.service"), "the lease expires")


def test_multicast_group_is_joined_and_left(host_a: SaAccess, host_b: SaAccess) -> None:
    member = host_a.join(BROADCAST)
    assert (member.mgid, member.port_gid, member.q_key) == (BROADCAST, host_a.port.gids[0], 0xB1B)
    assert member.mlid >= 0xC000
    assert host_b.join(BROADCAST, JoinState.SEND_ONLY_NON_MEMBER).mlid == member.mlid
    host_b.leave(BROADCAST, JoinState.SEND_ONLY_NON_MEMBER)
    host_a.leave(BROADCAST)
    with pytest.raises(RdmaError):
        host_a.leave(BROADCAST)


def test_joining_with_all_parameters_creates_a_multicast_group(host_a: SaAccess) -> None:
    mgid = Gid("ff15:a01b::7")
    with pytest.raises(RdmaError):
        host_a.join(mgid)
    member = host_a.join(mgid, pkey=0xFFFF, q_key=0x1234, sl=0, flow_label=0, traffic_class=0)
    assert (member.mgid, member.q_key, member.join_state) == (mgid, 0x1234, JoinState.FULL_MEMBER)
    host_a.leave(mgid)


def test_node_record_describes_the_port(host_a: SaAccess) -> None:
    (node,) = host_a.nodes(lid=host_a.port.lid)
    assert (node.node_guid, node.port_guid) == (host_a.port.node_guid, host_a.port.port_guid)
    assert (node.node_type, node.description) == (NodeInfoType.CHANNEL_ADAPTER, "HostA")


def test_class_port_info_has_versions_and_capabilities(host_a: SaAccess) -> None:
    info = host_a.class_port_info()
    assert (info.base_version, info.class_version) == (1, 2)
    assert info.capability_mask & 1 << 9  # multicast


def test_invalid_query_raises(host_a: SaAccess) -> None:
    with pytest.raises(RdmaError) as raised:
        host_a.result(host_a.query(SaMethod.SET, ServiceRecord, None, service_name=b"nameless"))
    assert failed(raised) == errno.EINVAL


def test_restarted_sa_answers_again(own_fabric: SimulatedFabric) -> None:
    with access(own_fabric, "HostA", timeout=0.3, tries=3) as sa:
        sa.register(0x10001, "demo.service")
        own_fabric.kill_opensm()
        with pytest.raises(TimeoutError, match="no response"):
            sa.class_port_info()
        own_fabric.start_opensm()
        assert sa.services("demo.service") == []
        assert sa.path(sa.port.gids[0]).dlid == sa.port.lid


def test_outstanding_query_is_answered_after_an_sa_restart(own_fabric: SimulatedFabric) -> None:
    with access(own_fabric, "HostA", timeout=30.0, tries=300) as sa:
        gid = sa.port.gids[0]
        own_fabric.kill_opensm()
        question = sa.query_path(gid)
        own_fabric.start_opensm()
        assert sa.result(question)[0].dgid == gid


def test_unplugged_port_has_no_path(own_fabric: SimulatedFabric) -> None:
    with access(own_fabric, "HostA", timeout=0.3) as here, access(own_fabric, "HostC", timeout=0.3) as there:
        gid = there.port.gids[0]
        assert here.path(gid).dgid == gid
        own_fabric.unlink("HostC")
        with pytest.raises(RdmaError) as raised:
            here.path(gid)
        assert failed(raised) in (errno.ENOENT, errno.EADDRNOTAVAIL)
        with pytest.raises(TimeoutError):
            there.path(gid)
        own_fabric.relink("HostC")
        assert here.path(gid).dgid == gid
        assert there.path(gid).dgid == gid


@pytest.mark.infiniband
def test_query_without_a_subnet_manager_raises() -> None:
    if reason := missing("ibsim"):
        pytest.skip(reason)
    with SimulatedFabric(managed=False) as fabric:
        with access(fabric, "HostA") as sa, pytest.raises(RdmaError, match="no subnet manager") as raised:
            sa.class_port_info()
        assert failed(raised) == errno.ENETUNREACH


def test_query_after_the_fabric_died_raises(own_fabric: SimulatedFabric) -> None:
    with access(own_fabric, "HostA", timeout=0.2) as sa:
        sa.class_port_info()
        own_fabric.kill_ibsim()
        with pytest.raises(TimeoutError):
            sa.class_port_info()
        with pytest.raises(RdmaError) as raised:
            sa.class_port_info()
        assert failed(raised) == errno.ECONNREFUSED
