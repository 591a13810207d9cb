"""Ids on a network in memory and in virtual time: resolving, binding and host changes, as in the manual pages."""

from __future__ import annotations

import errno
import re
import socket

import pytest

import rdmacm
from rdmacm import CmEventType, CmId, Gid, IdOption, OptionLevel, PortSpace, QPType, SockAddrIB, State
from rdmacm.net import NeighbourState
from rdmacm.verbs.device import named_context
from support.world import World

# -- kinds of ids ---------------------------------------------------------------------------------------


def test_port_space_decides_the_qp_type(world: World) -> None:
    expected = {
        PortSpace.TCP: QPType.RC,
        PortSpace.UDP: QPType.UD,
        PortSpace.IPOIB: QPType.UD,
        PortSpace.IB: QPType.RC,
    }
    for port_space, qp_type in expected.items():
        with CmId(world.channel, port_space) as cmid:
            assert cmid.qp_type is qp_type
    with CmId(world.channel, PortSpace.IB, qp_type=QPType.UD) as cmid:
        assert cmid.qp_type is QPType.UD
    with CmId(world.channel, PortSpace.TCP, qp_type=QPType.UD) as cmid:
        assert cmid.qp_type is QPType.RC
    with pytest.raises(OSError, match="port space") as failed:
        CmId(world.channel, 0x1234)
    assert failed.value.errno == errno.EINVAL


# -- resolving ------------------------------------------------------------------------------------------


def test_resolve_addr_binds_and_finds_the_route(world: World) -> None:
    with CmId(world.channel, PortSpace.TCP) as cmid:
        assert (cmid.is_bound, cmid.port_num, cmid.src_port, cmid.route.src_addr) == (False, 0, 0, None)
        cmid.resolve_addr(("10.0.0.2", 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.state is State.ADDR_RESOLVED
        assert cmid.verbs.name == "soft_eth0"
        assert cmid.port_num == 1
        assert cmid.local_addr == ("10.0.0.1", cmid.src_port)
        assert 32768 <= cmid.src_port <= 60999
        assert cmid.dst_port == 7471
        route = cmid.route
        assert (str(route.sgid), str(route.dgid), route.pkey) == ("::ffff:10.0.0.1", "::ffff:10.0.0.2", 0xFFFF)
        assert cmid.verbs.query_gid(1, cmid.gid_index) == route.sgid
        assert route.num_paths == 0
        cmid.resolve_route()
        world.one(CmEventType.ROUTE_RESOLVED)
        (path,) = cmid.route.path_rec
        assert (path.sgid, path.dgid) == (route.sgid, route.dgid)
        assert (path.mtu_bytes, path.hop_limit, path.pkey, path.packet_life_time) == (1024, 64, 0xFFFF, 16)
        assert path.service_id == 0x01061D2F
        assert path.flow_label == (cmid.src_port * 31 + 7471) & 0xFFFFF
        assert path.reversible


def test_tos_and_ack_timeout_options_set_the_path(world: World) -> None:
    world.network.speeds["eth0"] = 25000
    with CmId(world.channel) as cmid:
        cmid.set_option(OptionLevel.ID, IdOption.TOS, b"\x68")
        cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 15)
        cmid.resolve_addr(("10.0.0.2", 1))
        cmid.resolve_route()
        world.events()
        (path,) = cmid.route.path_rec
        assert (path.traffic_class, path.packet_life_time, path.rate) == (0x68, 14, 6)


def test_route_metrics_set_mtu_and_hop_limit_of_the_path(world: World) -> None:
    world.network.add_route("10.9.0.0/16", world.eth0, gateway="10.0.0.2", source="10.0.0.1", mtu=600, hop_limit=7)
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.9.1.1", 1))
        cmid.resolve_route()
        world.events()
        assert cmid.route.path_rec[0].mtu_bytes == 256 * 1
        assert cmid.route.path_rec[0].hop_limit == 7


def test_mtu_too_small_for_roce_fails_resolve_route(world: World) -> None:
    world.network.set_interface(world.eth0, mtu=300)
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        world.one(CmEventType.ADDR_RESOLVED)
        with pytest.raises(OSError, match="MTU of eth0") as failed:
            cmid.resolve_route()
        assert failed.value.errno == errno.EINVAL
        assert cmid.state is State.ADDR_RESOLVED


@pytest.mark.parametrize("elapsed", [0.0, 0.3, 0.999])
def test_neighbour_answer_before_the_deadline_resolves_the_address(world: World, elapsed: float) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        assert world.events() == []
        assert cmid.state is State.ADDR_QUERY
        world.clock.advance(elapsed)
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        world.one(CmEventType.ADDR_RESOLVED)
        assert world.provider.runtime.next_deadline() is None, "the timer of the timeout is cancelled"


def test_silent_neighbour_times_out(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 7471), timeout_ms=2500)
        for _ in range(24):
            world.clock.advance(0.1)
            assert world.events() == []
        world.clock.advance(0.1)
        with world.channel.get_event(0) as event:
            assert (event.type, event.status) == (CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
            error, explanation = event.error, event.explanation
        assert isinstance(error, TimeoutError)
        assert "10.0.0.3:7471" in str(error)
        assert "try:" in str(error)
        assert explanation is not None
        assert (explanation.error, explanation.errno_name) == ("neighbour", "ETIMEDOUT")
        assert cmid.state is State.ADDR_BOUND
        assert world.network.probed == [(world.eth0, socket.inet_aton("10.0.0.3"))] * 3
        # A second attempt keeps the port.
        port = cmid.src_port
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        cmid.resolve_addr(("10.0.0.3", 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.src_port == port


def test_timeout_zero_uses_known_neighbours_only(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=0)
        world.one(CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
        cmid.resolve_addr(("10.0.0.2", 1), timeout_ms=0)
        world.one(CmEventType.ADDR_RESOLVED)


def test_lost_notification_is_recovered(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=5000)
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        world.network.lose_notifications()
        world.clock.advance(1.0)
        world.one(CmEventType.ADDR_RESOLVED)


@pytest.mark.parametrize(
    "state", [NeighbourState.INCOMPLETE, NeighbourState.FAILED, NeighbourState.NONE], ids=lambda s: s.name
)
def test_unusable_neighbour_entries_are_ignored(world: World, state: NeighbourState) -> None:
    world.network.add_neighbour(world.eth0, "10.0.0.3", state)
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        world.network.add_neighbour(world.eth0, "10.0.0.3", state)
        assert world.events() == []
        world.network.add_neighbour(world.eth0, "10.0.0.3", NeighbourState.STALE)
        world.one(CmEventType.ADDR_RESOLVED)


def test_gateway_is_resolved_as_the_neighbour(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("8.8.8.8", 1), timeout_ms=1000)
        assert world.network.probed == [(world.eth0, socket.inet_aton("10.0.0.254"))]
        world.network.add_neighbour(world.eth0, "10.0.0.254")
        world.one(CmEventType.ADDR_RESOLVED)
        explanation = cmid.explain()
        assert explanation.route is not None
        assert explanation.route.gateway == "10.0.0.254"
        assert str(cmid.route.dgid) == "::ffff:8.8.8.8"


def test_ids_share_one_neighbour_lookup(world: World) -> None:
    ids = [CmId(world.channel) for _ in range(300)]
    for cmid in ids:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
    assert len(world.network.probed) == 1, "one probe serves all ids"
    world.network.add_neighbour(world.eth0, "10.0.0.3")
    assert world.events() == [(CmEventType.ADDR_RESOLVED, 0)] * 300
    assert len({cmid.src_port for cmid in ids}) == 300
    for cmid in ids:
        cmid.destroy()


@pytest.mark.parametrize(
    ("kind", "code"),
    [("blackhole", errno.EINVAL), ("unreachable", errno.EHOSTUNREACH), ("prohibit", errno.EACCES)],
)
def test_refusing_route_raises_its_errno(world: World, kind: str, code: int) -> None:
    world.network.add_route("10.66.0.0/16", kind=kind)
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match=kind) as failed:
            cmid.resolve_addr(("10.66.0.1", 1))
        assert failed.value.errno == code
        assert isinstance(failed.value, rdmacm.RdmaError)
        assert failed.value.explanation is not None
        assert failed.value.explanation.error == "route"
        assert world.events() == []
        assert cmid.state is State.ADDR_BOUND


def test_missing_route_raises_at_once(world: World) -> None:
    world.network.remove_route("0.0.0.0/0")
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match="no route to") as failed:
            cmid.resolve_addr(("8.8.8.8", 1))
        assert failed.value.errno == errno.ENETUNREACH
        assert world.events() == []


def test_route_without_rdma_device_raises_addr_error(world: World) -> None:
    world.network.add_address(1, "10.44.0.1/32")  # on lo
    world.network.add_route("10.5.0.0/16", world.eth0, gateway="10.0.0.2", source="10.44.0.1")
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.5.0.1", 1))
        with world.channel.get_event(0) as event:
            assert (event.type, event.status) == (CmEventType.ADDR_ERROR, -errno.ENODEV)
            assert event.explanation is not None
            assert event.explanation.chosen is None
            reasons = {c.source: c.rule for c in event.explanation.candidates}
        assert reasons["10.44.0.1"] == "egress-interface"
        assert reasons["10.0.0.1"] == "source-address"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "0.0.0.0", "::1", "::"])
def test_loopback_address_resolves_to_the_loopback_device(world: World, host: str) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr((host, 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.verbs.name == "soft_lo"
        assert str(cmid.route.sgid) in ("::ffff:127.0.0.1", "::1")


def test_own_address_uses_its_device(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.1", 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.verbs.name == "soft_eth0"
        assert cmid.route.sgid == cmid.route.dgid


def test_multicast_needs_no_neighbour(world: World) -> None:
    with CmId(world.channel, PortSpace.UDP) as cmid:
        cmid.resolve_addr(("224.1.2.3", 0))
        world.one(CmEventType.ADDR_RESOLVED)


def test_link_local_destinations_need_a_scope(world: World) -> None:
    world.network.add_neighbour(world.eth0, "fe80::2")
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("fe80::2", 1, 0, world.eth0))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.local_addr == ("fe80::1", cmid.src_port, 0, world.eth0)
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("fe80::1", 0, 0, world.eth0))
        cmid.resolve_addr(("fe80::2", 1))  # the bound interface gives the scope
        world.one(CmEventType.ADDR_RESOLVED)
    with CmId(world.channel) as cmid, pytest.raises(OSError, match="scope") as failed:
        cmid.bind_addr(("fe80::1", 0))
    assert failed.value.errno == errno.EINVAL


# -- binding --------------------------------------------------------------------------------------------


def test_specific_address_binds_the_device(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 7471))
        assert (cmid.verbs.name, cmid.port_num, cmid.src_port) == ("soft_eth0", 1, 7471)
        assert str(cmid.route.sgid) == "::ffff:10.0.0.1"
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("", 7471))
        assert (cmid.is_bound, cmid.port_num) == (False, 0)
        assert cmid.local_addr == ("0.0.0.0", 7471)


def test_bind_to_a_foreign_address_fails(world: World) -> None:
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match=r"10\.0\.0\.77 is not an address of this host") as failed:
            cmid.bind_addr(("10.0.0.77", 0))
        assert failed.value.errno == errno.EADDRNOTAVAIL
        assert isinstance(failed.value, rdmacm.RdmaError)
        assert failed.value.explanation is not None
        assert (failed.value.explanation.error, failed.value.explanation.errno_name) == ("bind", "EADDRNOTAVAIL")
        assert (cmid.state, cmid.is_bound) == (State.IDLE, False)
        cmid.bind_addr(("10.0.0.1", 0))  # the id can still be bound


@pytest.mark.parametrize("gid", ["::ffff:10.0.0.1", "fe80::77"])
def test_ib_addresses_need_infiniband(world: World, gid: str) -> None:
    with CmId(world.channel, PortSpace.IB) as cmid:
        with pytest.raises(OSError, match="InfiniBand") as failed:
            cmid.bind_addr(SockAddrIB(Gid(gid)))
        assert failed.value.errno == errno.ENODEV
        with pytest.raises(OSError, match="InfiniBand") as failed:
            cmid.resolve_addr(SockAddrIB(Gid(gid)))
        assert failed.value.errno == errno.ENODEV


def test_bind_to_an_ib_wildcard_assigns_a_port(world: World) -> None:
    with CmId(world.channel, PortSpace.IB) as cmid:
        cmid.bind_addr(SockAddrIB(sid=0x01060000, sid_mask=0xFFFFFFFFFFFF0000))
        local = cmid.local_addr
        assert isinstance(local, SockAddrIB)
        assert local.sid >> 16 == 0x0106
        assert local.port == cmid.src_port != 0
        assert local.sid_mask == 0xFFFFFFFFFFFFFFFF
    with CmId(world.channel, PortSpace.TCP) as cmid, pytest.raises(OSError, match="port space") as failed:
        cmid.bind_addr(SockAddrIB(sid=0x01110000, sid_mask=0xFFFFFFFFFFFF0000))
    assert failed.value.errno == errno.EPROTONOSUPPORT


def test_scope_of_a_global_address_is_ignored(world: World) -> None:
    with CmId(world.channel) as one, CmId(world.channel) as other:
        one.bind_addr(("fd00::1", 4000, 0, 77))
        assert one.local_addr == ("fd00::1", 4000, 0, 77)
        with pytest.raises(OSError) as failed:
            other.bind_addr(("fd00::1", 4000))
        assert failed.value.errno == errno.EADDRINUSE


def test_flowinfo_becomes_the_flow_label(world: World) -> None:
    """The source's flowinfo, as in the kernel, else the destination's."""
    world.network.add_neighbour(world.eth0, "fd00::2")
    for source, destination, label in ((0x12345, 0, 0x12345), (0, 0x54321, 0x54321), (0x12345, 0x54321, 0x12345)):
        with CmId(world.channel) as cmid:
            cmid.resolve_addr(("fd00::2", 1, destination, 0), ("fd00::1", 0, source, 0))
            world.one(CmEventType.ADDR_RESOLVED)
            cmid.resolve_route()
            world.one(CmEventType.ROUTE_RESOLVED)
            assert cmid.route.path_rec[0].flow_label == label


def test_ipoib_needs_an_infiniband_interface(world: World) -> None:
    with CmId(world.channel, PortSpace.IPOIB) as cmid, pytest.raises(OSError, match="IPOIB") as failed:
        cmid.bind_addr(("10.0.0.1", 0))
    assert failed.value.errno == errno.EINVAL
    with CmId(world.channel, PortSpace.IPOIB) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        world.one(CmEventType.ADDR_ERROR, -errno.EINVAL)


def test_source_address_binds_the_id(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1), ("10.0.0.1", 4000))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.local_addr == ("10.0.0.1", 4000)
    with CmId(world.channel) as cmid, pytest.raises(OSError, match="not an address") as failed:
        cmid.resolve_addr(("10.0.0.2", 1), ("10.0.0.66", 0))
    assert failed.value.errno == errno.EADDRNOTAVAIL
    with CmId(world.channel) as cmid, pytest.raises(OSError, match="family") as failed:
        cmid.resolve_addr(("10.0.0.2", 1), ("fd00::1", 0))
    assert failed.value.errno == errno.EINVAL


def test_bound_id_keeps_its_source(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 4000))
        with pytest.raises(OSError, match="bound to") as failed:
            cmid.resolve_addr(("10.0.0.2", 1), ("127.0.0.1", 0))
        assert failed.value.errno == errno.EINVAL
        with pytest.raises(OSError, match="family") as failed:
            cmid.resolve_addr(("fd00::2", 1))
        assert failed.value.errno == errno.EINVAL
        cmid.resolve_addr(("10.0.0.2", 1), ("10.0.0.1", 0))
        world.one(CmEventType.ADDR_RESOLVED)


def test_source_address_selects_the_interface_on_a_shared_subnet(world: World) -> None:
    eth1 = world.network.add_interface("eth1", "10.0.0.7/24")
    world.network.add_neighbour(eth1, "10.0.0.2")
    for source, device in (("10.0.0.1", "soft_eth0"), ("10.0.0.7", "soft_eth1")):
        with CmId(world.channel) as cmid:
            cmid.resolve_addr(("10.0.0.2", 1), (source, 0))
            world.one(CmEventType.ADDR_RESOLVED)
            assert cmid.verbs.name == device


# -- host changes ---------------------------------------------------------------------------------------


def test_device_removal_raises_an_event(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        world.one(CmEventType.ADDR_RESOLVED)
        context = cmid.verbs
        world.network.remove_interface(world.eth0)
        world.one(CmEventType.DEVICE_REMOVAL)
        assert cmid.state is State.DEVICE_REMOVAL
        assert context is not None
        with pytest.raises(OSError, match="removed") as failed:
            context.query_port()
        assert failed.value.errno == errno.ENODEV


def test_device_removal_ends_a_resolution(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        world.network.remove_interface(world.eth0)
        world.one(CmEventType.DEVICE_REMOVAL)
        world.clock.advance(2)
        assert world.events() == []


def test_source_removal_fails_a_resolution(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=60000)
        world.network.remove_address(world.eth0, "10.0.0.1/24")
        found = world.events()
        assert (CmEventType.ADDR_ERROR, -errno.EADDRNOTAVAIL) in found
        assert cmid.state is State.ADDR_BOUND


def test_route_removal_fails_a_resolution(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("8.8.8.8", 1), timeout_ms=60000)
        world.network.remove_route("0.0.0.0/0")
        world.one(CmEventType.ADDR_ERROR, -errno.ENETUNREACH)


def test_explanation_of_a_lost_carrier_shows_the_host_without_it(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=60000)
        world.network.set_interface(world.eth0, carrier=False)
        with world.channel.get_event() as event:
            assert (event.type, event.status) == (CmEventType.ADDR_ERROR, -errno.ENODEV)
            explanation = event.explanation
        assert explanation is not None
        assert "eth0 is down" in (explanation.message or "")
        assert {c.source: c.rule for c in explanation.candidates}["10.0.0.1"] == "port-state"
        assert not any(candidate.kept for candidate in explanation.candidates)


def test_new_route_is_used_by_a_running_resolution(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("8.8.8.8", 1), timeout_ms=60000)
        world.network.add_route("8.8.0.0/16", world.eth0, gateway="10.0.0.2", source="10.0.0.1")
        world.one(CmEventType.ADDR_RESOLVED)


@pytest.mark.parametrize("change", ["down", "mac", "address"])
def test_address_change_is_reported_to_a_resolved_id(world: World, change: str) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        world.one(CmEventType.ADDR_RESOLVED)
        if change == "down":
            world.network.set_interface(world.eth0, up=False)
            world.one(CmEventType.ADDR_CHANGE, -errno.ENETDOWN)
            assert cmid.verbs.query_port().state == 1
        elif change == "mac":
            world.network.set_interface(world.eth0, mac=b"\2\xaa\0\0\0\1")
            world.one(CmEventType.ADDR_CHANGE)
        else:
            world.network.remove_address(world.eth0, "10.0.0.1/24")
            world.one(CmEventType.ADDR_CHANGE, -errno.EADDRNOTAVAIL)
        assert cmid.state is State.ADDR_RESOLVED


def test_gid_indices_are_stable(world: World) -> None:
    def table() -> dict[str, int]:
        (device,) = [d for d in rdmacm.devices(world.provider) if d.name == "soft_eth0"]
        return {str(row.gid): row.gid_index for row in device.ports[0].gids}

    assert table() == {"fe80::1": 0, "::ffff:10.0.0.1": 1, "fd00::1": 2}
    world.network.add_address(world.eth0, "10.0.0.8/24")
    world.network.remove_address(world.eth0, "10.0.0.1/24")
    assert table() == {"fe80::1": 0, "fd00::1": 2, "::ffff:10.0.0.8": 1}
    world.network.add_address(world.eth0, "10.0.0.9/24", usable=False)
    assert "::ffff:10.0.0.9" not in table(), "a tentative address has no GID"


# -- devices --------------------------------------------------------------------------------------------


def test_devices_are_listed_and_queried(world: World) -> None:
    devices = rdmacm.devices(world.provider)
    assert [d.name for d in devices] == ["soft_lo", "soft_eth0"]
    assert all(d.node_guid for d in devices)
    assert re.fullmatch(r"[0-9a-f]{4}(:[0-9a-f]{4}){3}", devices[1].guid_text)
    (port,) = devices[1].ports
    assert port.active_mtu is not None
    assert (port.state.name, port.link_layer.name, port.active_mtu.bytes) == ("ACTIVE", "ETHERNET", 1024)
    assert port.pkeys == (0xFFFF,)
    context = named_context("soft_eth0", lambda: rdmacm.devices(world.provider))
    assert context.query_pkey(1, 0) == 0xFFFF
    assert [str(row.gid) for row in context.query_gid_table()] == ["fe80::1", "::ffff:10.0.0.1", "fd00::1"]
    assert context.query_gid(1, 9) == rdmacm.Gid()
    for query in (lambda: context.query_port(2), lambda: context.query_gid_ex(1, 9), lambda: context.query_pkey(1, 1)):
        with pytest.raises(OSError):
            query()


def test_bond_slaves_have_no_device(world: World) -> None:
    world.network.add_interface("eth9", slave_kind="bond")
    world.network.add_interface("vrf0", "10.9.9.9/24", slave_kind="vrf")
    names = [d.name for d in rdmacm.devices(world.provider)]
    assert "soft_eth9" not in names
    assert "soft_vrf0" in names
