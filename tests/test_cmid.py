"""Ids, events and channels as the manual pages describe them, on a network in memory and virtual time."""

from __future__ import annotations

import errno
import gc
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import rdmacm
from rdmacm import (
    AddrInfo,
    CmEventType,
    CmId,
    EventChannel,
    Gid,
    IdOption,
    OptionLevel,
    PortSpace,
    QPType,
    RaiFlag,
    SockAddrIB,
    State,
)
from rdmacm.net import NeighbourState
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider


@dataclass
class World:
    """A host on 10.0.0.0/24 whose neighbour 10.0.0.2 answers and whose gateway is 10.0.0.254."""

    network: MemoryNetwork
    eth0: int
    clock: VirtualClock
    provider: SoftProvider
    channel: EventChannel

    def events(self) -> list[tuple[CmEventType, int]]:
        """Everything that waits, acknowledged."""
        found = []
        while True:
            try:
                with self.channel.get_event(0) as event:
                    found.append((event.type, event.status))
            except BlockingIOError:
                return found

    def one(self, kind: CmEventType, status: int = 0) -> None:
        assert self.events() == [(kind, status)]


@pytest.fixture
def world() -> Iterator[World]:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24", "fd00::1/64", "fe80::1/64")
    network.add_route("0.0.0.0/0", eth0, gateway="10.0.0.254", source="10.0.0.1")
    network.add_neighbour(eth0, "10.0.0.2")
    clock = VirtualClock()
    provider = memory_provider(network, clock)
    with EventChannel(provider) as channel:
        yield World(network, eth0, clock, provider, channel)


# -- resolving ------------------------------------------------------------------------------------------


def test_resolving_binds_and_routes(world: World) -> None:
    with CmId(world.channel, PortSpace.TCP) as cmid:
        assert (cmid.verbs, cmid.port_num, cmid.src_port, cmid.local_addr) == (None, 0, 0, None)
        cmid.resolve_addr(("10.0.0.2", 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.state is State.ADDR_RESOLVED
        assert cmid.verbs is not None
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
        assert (path.mtu_bytes, path.hop_limit, path.pkey, path.packet_life_time) == (1024, 64, 0xFFFF, 18)
        assert path.service_id == 0x01061D2F
        assert path.flow_label == (cmid.src_port * 31 + 7471) & 0xFFFFF
        assert path.reversible


def test_options_shape_the_path(world: World) -> None:
    world.network.speeds["eth0"] = 25000
    with CmId(world.channel) as cmid:
        cmid.set_option(OptionLevel.ID, IdOption.TOS, b"\x68")
        cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 15)
        cmid.resolve_addr(("10.0.0.2", 1))
        cmid.resolve_route()
        world.events()
        (path,) = cmid.route.path_rec
        assert (path.traffic_class, path.packet_life_time, path.rate) == (0x68, 14, 6)


def test_route_metrics_win(world: World) -> None:
    world.network.add_route("10.9.0.0/16", world.eth0, gateway="10.0.0.2", source="10.0.0.1", mtu=600, hop_limit=7)
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.9.1.1", 1))
        cmid.resolve_route()
        world.events()
        assert cmid.route.path_rec[0].mtu_bytes == 256 * 1
        assert cmid.route.path_rec[0].hop_limit == 7


def test_an_mtu_too_small_for_roce(world: World) -> None:
    world.network.set_interface(world.eth0, mtu=300)
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        world.one(CmEventType.ADDR_RESOLVED)
        with pytest.raises(OSError, match="MTU of eth0") as failed:
            cmid.resolve_route()
        assert failed.value.errno == errno.EINVAL
        assert cmid.state is State.ADDR_RESOLVED


@pytest.mark.parametrize("elapsed", [0.0, 0.3, 0.999])
def test_a_late_neighbour_is_in_time(world: World, elapsed: float) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        assert world.events() == []
        assert cmid.state is State.ADDR_QUERY
        world.clock.advance(elapsed)
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        world.one(CmEventType.ADDR_RESOLVED)
        assert world.provider.next_deadline() is None, "no timer outlives what it was for"


def test_silence_ends_at_the_deadline(world: World) -> None:
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
        # It may be tried again, and keeps its port.
        port = cmid.src_port
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        cmid.resolve_addr(("10.0.0.3", 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.src_port == port


def test_timeout_zero_takes_what_is_known(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=0)
        world.one(CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
        cmid.resolve_addr(("10.0.0.2", 1), timeout_ms=0)
        world.one(CmEventType.ADDR_RESOLVED)


def test_a_lost_notification_is_made_up_for(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=5000)
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        world.network.lose_notifications()
        world.clock.advance(1.0)
        world.one(CmEventType.ADDR_RESOLVED)


@pytest.mark.parametrize(
    "state", [NeighbourState.INCOMPLETE, NeighbourState.FAILED, NeighbourState.NONE], ids=lambda s: s.name
)
def test_useless_neighbour_entries_do_not_count(world: World, state: NeighbourState) -> None:
    world.network.add_neighbour(world.eth0, "10.0.0.3", state)
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        world.network.add_neighbour(world.eth0, "10.0.0.3", state)
        assert world.events() == []
        world.network.add_neighbour(world.eth0, "10.0.0.3", NeighbourState.STALE)
        world.one(CmEventType.ADDR_RESOLVED)


def test_the_gateway_is_the_neighbour(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("8.8.8.8", 1), timeout_ms=1000)
        assert world.network.probed == [(world.eth0, socket.inet_aton("10.0.0.254"))]
        world.network.add_neighbour(world.eth0, "10.0.0.254")
        world.one(CmEventType.ADDR_RESOLVED)
        explanation = cmid.explain()
        assert explanation.route is not None
        assert explanation.route.gateway == "10.0.0.254"
        assert str(cmid.route.dgid) == "::ffff:8.8.8.8"


def test_many_ids_wait_for_one_neighbour_together(world: World) -> None:
    ids = [CmId(world.channel) for _ in range(300)]
    for cmid in ids:
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
    assert len(world.network.probed) == 1, "one question serves all"
    world.network.add_neighbour(world.eth0, "10.0.0.3")
    assert world.events() == [(CmEventType.ADDR_RESOLVED, 0)] * 300
    assert len({cmid.src_port for cmid in ids}) == 300
    for cmid in ids:
        cmid.destroy()


@pytest.mark.parametrize(
    ("kind", "code"),
    [("blackhole", errno.EINVAL), ("unreachable", errno.EHOSTUNREACH), ("prohibit", errno.EACCES)],
)
def test_routes_that_refuse(world: World, kind: str, code: int) -> None:
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


def test_no_route_raises_at_once(world: World) -> None:
    world.network.remove_route("0.0.0.0/0")
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match="no route to") as failed:
            cmid.resolve_addr(("8.8.8.8", 1))
        assert failed.value.errno == errno.ENETUNREACH
        assert world.events() == []


def test_routed_but_by_no_device(world: World) -> None:
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
def test_this_host_is_reached_over_its_loopback(world: World, host: str) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr((host, 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.verbs is not None
        assert cmid.verbs.name == "soft_lo"
        assert str(cmid.route.sgid) in ("::ffff:127.0.0.1", "::1")


def test_an_own_address_is_reached_over_its_device(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.1", 7471))
        world.one(CmEventType.ADDR_RESOLVED)
        assert cmid.verbs is not None
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
        cmid.resolve_addr(("fe80::2", 1))  # the bound interface says which link is meant
        world.one(CmEventType.ADDR_RESOLVED)
    with CmId(world.channel) as cmid, pytest.raises(OSError, match="scope") as failed:
        cmid.bind_addr(("fe80::1", 0))
    assert failed.value.errno == errno.EINVAL


# -- binding --------------------------------------------------------------------------------------------


def test_a_specific_address_binds_the_device_and_a_wildcard_does_not(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 7471))
        assert cmid.verbs is not None
        assert (cmid.verbs.name, cmid.port_num, cmid.src_port) == ("soft_eth0", 1, 7471)
        assert str(cmid.route.sgid) == "::ffff:10.0.0.1"
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("", 7471))
        assert (cmid.verbs, cmid.port_num) == (None, 0)
        assert cmid.local_addr == ("0.0.0.0", 7471)


def test_binding_what_is_not_here(world: World) -> None:
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match=r"10\.0\.0\.77 is not an address of this host") as failed:
            cmid.bind_addr(("10.0.0.77", 0))
        assert failed.value.errno == errno.EADDRNOTAVAIL
        assert isinstance(failed.value, rdmacm.RdmaError)
        assert failed.value.explanation is not None
        assert (failed.value.explanation.error, failed.value.explanation.errno_name) == ("bind", "EADDRNOTAVAIL")
        assert (cmid.state, cmid.verbs) == (State.IDLE, None)
        cmid.bind_addr(("10.0.0.1", 0))  # the id is as it was


@pytest.mark.parametrize("gid", ["::ffff:10.0.0.1", "fe80::77"])
def test_ib_addresses_need_infiniband(world: World, gid: str) -> None:
    with CmId(world.channel, PortSpace.IB) as cmid:
        with pytest.raises(OSError, match="InfiniBand") as failed:
            cmid.bind_addr(SockAddrIB(Gid(gid)))
        assert failed.value.errno == errno.ENODEV
        with pytest.raises(OSError, match="InfiniBand") as failed:
            cmid.resolve_addr(SockAddrIB(Gid(gid)))
        assert failed.value.errno == errno.ENODEV


def test_an_ib_wildcard_can_be_bound(world: World) -> None:
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


def test_ipoib_wants_an_infiniband_interface(world: World) -> None:
    with CmId(world.channel, PortSpace.IPOIB) as cmid, pytest.raises(OSError, match="IPOIB") as failed:
        cmid.bind_addr(("10.0.0.1", 0))
    assert failed.value.errno == errno.EINVAL


def test_a_given_source_binds(world: World) -> None:
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


def test_a_bound_id_keeps_its_source(world: World) -> None:
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


def test_two_interfaces_on_one_subnet(world: World) -> None:
    eth1 = world.network.add_interface("eth1", "10.0.0.7/24")
    world.network.add_neighbour(eth1, "10.0.0.2")
    for source, device in (("10.0.0.1", "soft_eth0"), ("10.0.0.7", "soft_eth1")):
        with CmId(world.channel) as cmid:
            cmid.resolve_addr(("10.0.0.2", 1), (source, 0))
            world.one(CmEventType.ADDR_RESOLVED)
            assert cmid.verbs is not None
            assert cmid.verbs.name == device


# -- the host changes -----------------------------------------------------------------------------------


def test_the_device_goes_away(world: World) -> None:
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


def test_the_device_goes_away_while_resolving(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        world.network.remove_interface(world.eth0)
        world.one(CmEventType.DEVICE_REMOVAL)
        world.clock.advance(2)
        assert world.events() == []


def test_the_source_goes_away_while_resolving(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=60000)
        world.network.remove_address(world.eth0, "10.0.0.1/24")
        found = world.events()
        assert (CmEventType.ADDR_ERROR, -errno.EADDRNOTAVAIL) in found
        assert cmid.state is State.ADDR_BOUND


def test_the_route_goes_away_while_resolving(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("8.8.8.8", 1), timeout_ms=60000)
        world.network.remove_route("0.0.0.0/0")
        world.one(CmEventType.ADDR_ERROR, -errno.ENETUNREACH)


def test_the_route_moves_to_a_gateway_that_answers(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("8.8.8.8", 1), timeout_ms=60000)
        world.network.add_route("8.8.0.0/16", world.eth0, gateway="10.0.0.2", source="10.0.0.1")
        world.one(CmEventType.ADDR_RESOLVED)


@pytest.mark.parametrize("change", ["down", "mac", "address"])
def test_the_link_changes_under_a_bound_id(world: World, change: str) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        world.one(CmEventType.ADDR_RESOLVED)
        if change == "down":
            world.network.set_interface(world.eth0, up=False)
            world.one(CmEventType.ADDR_CHANGE, -errno.ENETDOWN)
            assert cmid.verbs is not None
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
    assert "::ffff:10.0.0.9" not in table(), "an address is no GID while it may be a duplicate"


# -- names ----------------------------------------------------------------------------------------------


def test_addrinfo_resolution_is_an_event(world: World) -> None:
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match="no resolved list") as failed:
            cmid.query_addrinfo()
        assert failed.value.errno == errno.ENOENT
        cmid.resolve_addrinfo("10.0.0.2", "7471", port_space=PortSpace.TCP)
        with pytest.raises(OSError, match="not over") as failed:
            cmid.resolve_addrinfo("10.0.0.2", "7471")
        assert failed.value.errno == errno.EBUSY
        world.one(CmEventType.ADDRINFO_RESOLVED)
        found = cmid.query_addrinfo()
        assert found == rdmacm.getaddrinfo("10.0.0.2", "7471", port_space=PortSpace.TCP, provider=world.provider)
        assert found[0].device == "soft_eth0"
        with pytest.raises(OSError, match="no resolved list") as failed:
            cmid.query_addrinfo()
        assert failed.value.errno == errno.ENOENT


def test_addrinfo_failure_is_an_event_too(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addrinfo("300.1.1.1", "7471", flags=RaiFlag.NUMERICHOST)
        with world.channel.get_event(0) as event:
            assert (event.type, event.status) == (CmEventType.ADDRINFO_ERROR, rdmacm.EAI.NONAME)
            assert isinstance(event.error, rdmacm.GaiError)
            assert "300.1.1.1" in str(event.error)
        cmid.resolve_addrinfo("10.0.0.2", "7471")  # and another may follow
        world.one(CmEventType.ADDRINFO_RESOLVED)


def test_names_are_looked_up_elsewhere(world: World) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(*_: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
        asked.set()
        assert answer.wait(10)
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.2", 7471))]

    with CmId(world.channel) as cmid:
        cmid.resolve_addrinfo("storage-7", "7471", resolver=slow)
        assert asked.wait(10)
        assert world.events() == [], "the caller went on while the resolver waits"
        answer.set()
        with world.channel.get_event(10) as event:
            assert event.type is CmEventType.ADDRINFO_RESOLVED
        assert cmid.query_addrinfo()[0].dst_addr == ("10.0.0.2", 7471)


def test_destroying_cancels_a_lookup(world: World) -> None:
    asked, answer, done = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
        asked.set()
        answer.wait(10)
        done.set()
        return []

    cmid = CmId(world.channel)
    cmid.resolve_addrinfo("storage-7", "7471", resolver=slow)
    assert asked.wait(10)
    cmid.destroy()
    answer.set()
    assert done.wait(10)
    for thread in threading.enumerate():
        if thread.name == "rdmacm-lookup":
            thread.join(10)
    assert world.events() == []


def test_a_resolver_that_breaks_ends_in_an_event(world: World) -> None:
    def broken(*_: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
        raise KeyError("oops")

    with CmId(world.channel) as cmid:
        cmid.resolve_addrinfo("storage-7", "7471", resolver=broken)
        with world.channel.get_event(10) as event:
            assert event.type is CmEventType.ADDRINFO_ERROR
            assert "oops" in str(event.error)


@pytest.mark.parametrize(
    ("node", "service", "flags", "bound", "code"),
    [
        ("10.0.0.2", "1", RaiFlag.SA, True, errno.EOPNOTSUPP),
        (None, "1", RaiFlag.SA | RaiFlag.DNS, True, errno.EOPNOTSUPP),
        (None, None, RaiFlag.SA, True, errno.EINVAL),
        (None, "1", RaiFlag.SA, False, errno.EINVAL),
        (None, "1", RaiFlag.SA, True, errno.EOPNOTSUPP),
    ],
)
def test_sa_resolution_that_cannot_start(
    world: World, node: str | None, service: str | None, flags: RaiFlag, bound: bool, code: int
) -> None:
    with CmId(world.channel) as cmid:
        if bound:
            cmid.bind_addr(("10.0.0.1", 0))
        with pytest.raises(OSError) as failed:
            cmid.resolve_addrinfo(node, service, flags=flags)
        assert failed.value.errno == code
        assert world.events() == []
        cmid.resolve_addrinfo("10.0.0.2", "1")  # nothing had started
        world.one(CmEventType.ADDRINFO_RESOLVED)


# -- events, acknowledgements, the end ------------------------------------------------------------------


def test_user_events(world: World) -> None:
    with CmId(world.channel, context="mine") as cmid:
        cmid.write_cm_event(CmEventType.USER, -5, 77)
        with world.channel.get_event(0) as event:
            assert (event.id, event.type, event.status, event.arg) == (cmid, CmEventType.USER, -5, 77)
            assert event.id.context == "mine"
        with pytest.raises(OSError, match="USER") as failed:
            cmid.write_cm_event(CmEventType.ESTABLISHED)
        assert failed.value.errno == errno.EINVAL


def test_event_names() -> None:
    assert rdmacm.event_str(0) == "RDMA_CM_EVENT_ADDR_RESOLVED"
    assert rdmacm.event_str(CmEventType.USER) == "RDMA_CM_EVENT_USER"
    assert rdmacm.event_str(99) == "UNKNOWN EVENT"


def test_destroy_waits_for_other_threads_events(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    held, release, destroyed = threading.Event(), threading.Event(), threading.Event()

    def reader() -> None:
        with world.channel.get_event(0):
            held.set()
            release.wait(10)
            assert not destroyed.is_set()

    def destroyer() -> None:
        cmid.destroy()
        destroyed.set()

    threads = [threading.Thread(target=reader)]
    threads[0].start()
    assert held.wait(10)
    threads.append(threading.Thread(target=destroyer))
    threads[1].start()
    assert not destroyed.wait(0.05)
    release.set()
    assert destroyed.wait(10)
    for thread in threads:
        thread.join()


def test_destroy_refuses_to_wait_for_itself(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    event = world.channel.get_event(0)
    with pytest.raises(OSError, match="holds an event") as failed:
        cmid.destroy()
    assert failed.value.errno == errno.EDEADLK
    assert cmid.state is State.IDLE, "nothing was destroyed"
    event.ack()
    event.ack()
    cmid.destroy()
    cmid.destroy()
    assert (cmid.events_reported, cmid.events_completed) == (1, 1)


def test_a_dropped_event_acknowledges_itself(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    world.channel.get_event(0)
    gc.collect()
    cmid.destroy()


def test_destroying_discards_what_waits(world: World) -> None:
    cmid, other = CmId(world.channel), CmId(world.channel)
    cmid.write_cm_event()
    other.write_cm_event(arg=1)
    cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=10)
    cmid.destroy()
    world.clock.advance(1)
    world.one(CmEventType.USER)
    assert cmid.state is State.DESTROYING
    other.destroy()


def test_leaks_are_told(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.bind_addr(("", 7471))
    with pytest.warns(ResourceWarning, match="undestroyed id"):
        del cmid
        gc.collect()
    with CmId(world.channel) as again:
        again.bind_addr(("", 7471))  # and cleaned up after
    channel = EventChannel(world.provider)
    with pytest.warns(ResourceWarning, match="unclosed event channel"):
        del channel
        gc.collect()


def test_migration_takes_the_events_along(world: World) -> None:
    with EventChannel(world.provider) as second, CmId(world.channel) as cmid:
        cmid.write_cm_event(arg=1)
        cmid.write_cm_event(arg=2)
        world.channel.get_event(0).ack()
        cmid.migrate(second)
        assert cmid.channel is second
        assert world.events() == []
        cmid.resolve_addr(("10.0.0.2", 1))
        with second.get_event(0) as event:
            assert event.arg == 2
        with second.get_event(0) as event:
            assert event.type is CmEventType.ADDR_RESOLVED


def test_migration_to_and_from_synchronous_mode(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.migrate(None)
        assert cmid.is_synchronous
        with pytest.raises(OSError, match="already") as failed:
            cmid.migrate(None)
        assert failed.value.errno == errno.EINVAL
        cmid.resolve_addr(("10.0.0.2", 1))
        assert cmid.event is not None
        assert cmid.event.type is CmEventType.ADDR_RESOLVED
        cmid.migrate(world.channel)
        assert not cmid.is_synchronous
        cmid.resolve_route()
        world.one(CmEventType.ROUTE_RESOLVED)
        with EventChannel(memory_provider(MemoryNetwork())) as stranger, pytest.raises(OSError, match="provider"):
            cmid.migrate(stranger)


# -- synchronous mode -----------------------------------------------------------------------------------


def test_synchronous_calls_wait_and_raise() -> None:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24")
    network.add_neighbour(eth0, "10.0.0.2")
    with CmId(provider=memory_provider(network)) as cmid:
        with pytest.raises(TimeoutError) as failed:
            cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=30)
        assert isinstance(failed.value, rdmacm.RdmaError)
        assert failed.value.explanation is not None
        assert failed.value.explanation.neighbour is not None
        cmid.resolve_addr(("10.0.0.2", 1))
        cmid.resolve_route()
        assert cmid.state is State.ROUTE_RESOLVED
        with pytest.raises(rdmacm.GaiError):
            cmid.resolve_addrinfo("300.1.1.1", "1", AddrInfo(flags=RaiFlag.NUMERICHOST))
        cmid.resolve_addrinfo("10.0.0.2", "1")
        assert cmid.query_addrinfo()[0].dst_addr == ("10.0.0.2", 1)


def test_synchronous_calls_are_not_fooled_by_other_events(world: World) -> None:
    with CmId(provider=world.provider) as cmid:
        cmid.write_cm_event(arg=5)
        cmid.resolve_addr(("10.0.0.2", 1))
        assert cmid.event is not None
        assert cmid.event.type is CmEventType.ADDR_RESOLVED


# -- channels -------------------------------------------------------------------------------------------


def test_port_spaces_and_qp_types(world: World) -> None:
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


def test_waiting_for_events(world: World) -> None:
    with pytest.raises(BlockingIOError) as nothing:
        world.channel.get_event(0)
    assert nothing.value.errno == errno.EAGAIN
    with pytest.raises(TimeoutError):
        world.channel.get_event(0.01)
    world.channel.blocking = False
    with pytest.raises(BlockingIOError):
        world.channel.get_event()


def test_a_channel_polls_readable_for_an_event(world: World) -> None:
    poll = select.poll()
    poll.register(world.channel, select.POLLIN)
    assert poll.poll(0) == []
    with CmId(world.channel) as cmid:
        cmid.write_cm_event()
        assert poll.poll(0)
        world.channel.get_event(0).ack()
        assert poll.poll(0) == []
        threading.Thread(target=cmid.write_cm_event).start()
        assert poll.poll(5000)
        assert world.events() == [(CmEventType.USER, 0)]
        cmid.write_cm_event()
        assert poll.poll(0)
    assert poll.poll(0) == [], "the event went with its id"


def test_a_channel_polls_readable_for_a_deadline() -> None:
    network = MemoryNetwork()
    network.add_interface("eth0", "10.0.0.1/24")
    with EventChannel(memory_provider(network)) as channel, CmId(channel) as cmid:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=30)
        assert poll.poll(5000)
        with channel.get_event(1) as event:
            assert event.status == -errno.ETIMEDOUT
        assert poll.poll(0) == []


def test_another_threads_work_wakes_a_reader(world: World) -> None:
    found: list[CmEventType] = []

    def reader() -> None:
        with world.channel.get_event(10) as event:
            found.append(event.type)

    thread = threading.Thread(target=reader)
    thread.start()
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        thread.join(10)
        assert found == [CmEventType.ADDR_RESOLVED]


def test_another_threads_deadline_wakes_a_reader() -> None:
    network = MemoryNetwork()
    network.add_interface("eth0", "10.0.0.1/24")
    with EventChannel(memory_provider(network)) as channel, CmId(channel) as cmid:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(channel.get_event(10).status))
        thread.start()
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=50)
        thread.join(5)
        assert found == [-errno.ETIMEDOUT]


def test_closing_ends_a_wait_and_an_iteration(world: World) -> None:
    seen: list[CmEventType] = []
    started = threading.Event()

    def reader() -> None:
        for event in world.channel:
            with event:
                seen.append(event.type)
                started.set()

    thread = threading.Thread(target=reader)
    thread.start()
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    assert started.wait(10)
    world.channel.close()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == [CmEventType.USER]
    assert world.channel.queue._wake is None, "the last reader closes the descriptor it waited on"  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="closed") as failed:
        world.channel.get_event(0)
    assert failed.value.errno == errno.EBADF
    assert world.channel.fileno() == -1
    cmid.destroy()


def test_closing_a_channel_ends_its_ids(world: World) -> None:
    waiting, bound = CmId(world.channel), CmId(world.channel)
    waiting.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
    bound.bind_addr(("", 4444))
    world.channel.close()
    assert (waiting.state, bound.state) == (State.DESTROYING, State.DESTROYING)
    with pytest.raises(OSError, match="DESTROYING") as failed:
        bound.resolve_addr(("10.0.0.2", 1))
    assert failed.value.errno == errno.ENXIO
    waiting.destroy()
    bound.destroy()
    with EventChannel(world.provider) as channel, CmId(channel) as cmid:
        cmid.bind_addr(("", 4444))
        # Nothing of the old wait is in the way of a new one.
        other = CmId(channel)
        other.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        with channel.get_event(0) as event:
            assert event.type is CmEventType.ADDR_RESOLVED
        other.destroy()


def test_devices(world: World) -> None:
    devices = rdmacm.devices(world.provider)
    assert [d.name for d in devices] == ["soft_lo", "soft_eth0"]
    assert all(d.node_guid for d in devices)
    assert devices[1].guid_text == "0000:00ff:fe00:0002"
    (port,) = devices[1].ports
    assert port.active_mtu is not None
    assert (port.state.name, port.link_layer.name, port.active_mtu.bytes) == ("ACTIVE", "ETHERNET", 1024)
    assert port.pkeys == (0xFFFF,)
    context = rdmacm.Context.open("soft_eth0", lambda: rdmacm.devices(world.provider))
    assert context.query_pkey(1, 0) == 0xFFFF
    assert [str(row.gid) for row in context.query_gid_table()] == ["fe80::1", "::ffff:10.0.0.1", "fd00::1"]
    for query in (lambda: context.query_port(2), lambda: context.query_gid(1, 9), lambda: context.query_pkey(1, 1)):
        with pytest.raises(OSError):
            query()


def test_slaves_have_no_device(world: World) -> None:
    world.network.add_interface("eth9", slave_kind="bond")
    world.network.add_interface("vrf0", "10.9.9.9/24", slave_kind="vrf")
    names = [d.name for d in rdmacm.devices(world.provider)]
    assert "soft_eth9" not in names
    assert "soft_vrf0" in names


def test_the_provider_is_chosen_by_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_PROVIDER", "quantum")
    with pytest.raises(OSError, match="environment variable RDMACM_PROVIDER") as failed:
        EventChannel()
    assert failed.value.errno == errno.ENODEV
    with pytest.raises(OSError, match="argument"):
        EventChannel("wormhole")
    with EventChannel("soft") as channel:
        assert channel.provider.name == "soft"
    monkeypatch.delenv("RDMACM_PROVIDER")
    with EventChannel() as channel:
        assert channel.provider.name == "soft"
