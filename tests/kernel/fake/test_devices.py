"""Devices, ports and address handles of kinds that no software device is."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from kernel.fake.fake_library import FakeLibrary
from rdmacm import cma
from rdmacm.address import Gid
from rdmacm.cma import ibverbs
from rdmacm.errors import RdmaError
from rdmacm.kernel import KernelProvider, verbs
from rdmacm.kernel import host as host_module
from rdmacm.kernel.host import KernelHost
from rdmacm.kernel.nldev import PortSeen
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.net import open_network
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    PD,
    QP,
    AccessFlag,
    AHAttr,
    EventType,
    GidType,
    GlobalRoute,
    LinkLayer,
    NodeType,
    PortState,
    QPCap,
    QPInitAttr,
    QPType,
    TransportType,
)

ROW = (0, Gid("fe80::1"), GidType.ROCE_V2, 1)
ATTR = AHAttr(is_global=True, port_num=1, gr=GlobalRoute(Gid("fe80::2"), 0))


def test_address_handle_is_made_by_the_device(fake: FakeLibrary) -> None:
    fake.set_gids([ROW])
    with fake.add_device() as context, PD(context) as pd:
        ah = AH(pd, ATTR)
        assert fake.controls.ahs == 1
        ah.close()
        del ah
        assert fake.controls.ahs == 0


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ETIMEDOUT])
def test_address_handle_that_the_device_refuses(fake: FakeLibrary, code: int) -> None:
    """As a device of iWARP does, which has no datagrams."""
    fake.set_gids([ROW])
    fake.controls.ah_errno = code
    with fake.add_device("iwarp0", node_type=NodeType.RNIC, transport_type=TransportType.IWARP) as context:
        with PD(context) as pd, pytest.raises(RdmaError) as caught:
            AH(pd, ATTR)
        assert caught.value.errno == code
        assert caught.value.step == "create_ah"


def test_speed_beyond_8_bits(fake: FakeLibrary) -> None:
    with fake.add_device(active_speed=128, active_speed_ex=256) as context:
        port = context.query_port(1)
        assert (port.active_speed, port.active_speed_ex) == (128, 256)


def test_device_of_a_transport_of_its_own(fake: FakeLibrary) -> None:
    """As of EFA."""
    kinds = {"node_type": NodeType.UNSPECIFIED, "transport_type": TransportType.UNSPECIFIED}
    with fake.add_device("rdmap0", link_layer=LinkLayer.UNSPECIFIED, **kinds):
        found = verbs.read_device("rdmap0")
        assert (found.node_type, found.transport_type) == (NodeType.UNSPECIFIED, TransportType.UNSPECIFIED)
        assert found.ports[0].link_layer is LinkLayer.UNSPECIFIED


def test_relaxed_ordering_is_passed_on(fake: FakeLibrary) -> None:
    access = AccessFlag.LOCAL_WRITE | AccessFlag.RELAXED_ORDERING
    with fake.add_device() as context, PD(context) as pd, MR(pd, bytearray(8), access):
        assert fake.controls.access == int(access)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM, errno.E2BIG, errno.ENOSPC])
def test_inline_data_that_the_device_refuses(fake: FakeLibrary, code: int) -> None:
    """Drivers say so by various errors; the program has the size that it has asked for."""
    fake.controls.max_inline, fake.controls.inline_errno = 100, code
    with fake.add_device() as context, PD(context) as pd, CQ(context, 8) as cq:
        with QP(pd, QPInitAttr(QPType.RC, None, cq, cq, None, QPCap(4, 4, 1, 1, 500))) as qp:
            assert qp.cap.max_inline_data == 500
        fake.controls.max_inline = -1
        with pytest.raises(RdmaError) as caught:
            QP(pd, QPInitAttr(QPType.RC, None, cq, cq, None, QPCap(4, 4, 1, 1, 500)))
        assert caught.value.errno == code


def test_event_of_a_changed_speed(fake: FakeLibrary) -> None:
    with fake.add_device() as context:
        assert context.async_fd >= 0
        fake.event(context, 20, 1)
        with context.get_async_event(timeout=10) as event:
            assert (event.event_type, event.element) == (EventType.DEVICE_SPEED_CHANGE, 1)


def test_event_of_a_newer_kernel_is_passed_over(fake: FakeLibrary) -> None:
    with fake.add_device() as context:
        assert context.async_fd >= 0
        fake.event(context, 77, 1)
        fake.event(context, EventType.PORT_ACTIVE, 1)
        with context.get_async_event(timeout=10) as event:
            assert event.event_type is EventType.PORT_ACTIVE
        assert verbs.open_device(context.name).opened.removed is False


def test_pkeys_are_read_once_for_each_change(fake: FakeLibrary) -> None:
    """A table of 128 rows takes as many system calls; it changes with an event of the port."""
    with fake.add_device("ib0", link_layer=LinkLayer.INFINIBAND, pkey_tbl_len=128) as context:
        assert context.backend.name == "ib0"  # which keeps the device open
        assert context.query_port(1).pkeys[:3] == (0xFFFF, 0x8001, 0)
        assert len(context.query_port(1).pkeys) == 128
        assert fake.controls.pkey_queries == 128
        for change in (EventType.PKEY_CHANGE, EventType.CLIENT_REREGISTER):
            before = fake.controls.pkey_queries
            fake.event(context, change, 1)
            assert len(context.query_port(1).pkeys) == 128
            assert fake.controls.pkey_queries == before + 128


def test_fork_is_made_safe_by_the_library(
    fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = KernelProvider(open_network())
    monkeypatch.setattr(ibverbs, "get_provider", lambda: provider)
    with fake.add_device() as context, PD(context) as pd, MR(pd, bytearray(100), 0):
        assert cma.ibv_is_fork_initialized() == cma.IBV_FORK_DISABLED
        fork()
        assert "call ibv_fork_init() first" in caplog.text
        fake.controls.fork_init = errno.EINVAL
        with pytest.raises(RdmaError) as caught:
            cma.ibv_fork_init()
        assert caught.value.errno == errno.EINVAL
        fake.controls.fork_init = 0
        cma.ibv_fork_init()
        assert cma.ibv_is_fork_initialized() == cma.IBV_FORK_ENABLED
        caplog.clear()
        fork()
        assert caplog.text == ""
    provider.host.network.close()


def fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def test_rows_of_a_bond_and_a_vlan(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their interfaces are here, also for a GID that is no address of them (RFC 7217); others are elsewhere."""
    port, bond, vlan, elsewhere = 3, 40, 41, 42
    hardware, stable = Gid("fe80::200:5eff:fe10:1"), Gid("fe80::1234")
    fake.set_gids(
        [
            (0, hardware, GidType.ROCE_V2, bond),
            (1, stable, GidType.ROCE_V2, bond),
            (2, Gid("::ffff:10.0.0.1"), GidType.ROCE_V2, vlan),
            (3, Gid("::ffff:10.9.0.1"), GidType.ROCE_V2, elsewhere),
        ]
    )
    fake.add_device()
    addresses = [(bond, stable.ip), (vlan, Gid("::ffff:10.0.0.1").ip), (elsewhere, b"\12\12\12\12")]
    network = SimpleNamespace(addresses=lambda: [SimpleNamespace(ifindex=index, ip=ip) for index, ip in addresses])
    monkeypatch.setattr(host_module, "port_states", lambda index: [PortSeen(1, PortState.ACTIVE, port)])
    host = KernelHost(network, Sysfs())
    placed = host._placed(verbs.read_device("mlx5_0"))
    assert [row.ndev_ifindex for row in placed[0].gids] == [bond, bond, vlan, 0]
