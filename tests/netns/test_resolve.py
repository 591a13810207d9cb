"""Resolving addresses and routes on real networks: neighbours, gateways, and silent hosts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from rdmacm import (
    CmEventType,
    CmId,
    CmTimeoutError,
    EventChannel,
    IdOption,
    OptionLevel,
    PortSpace,
    RdmaError,
    State,
    explain,
)
from rdmacm.address import service_id
from support.clock import Stopwatch
from support.netns import Topology, TwoHosts, needs_netns, three_hosts, two_hosts
from support.resolving import (
    PORT,
    Reader,
    an_id,
    assert_agrees,
    assert_explained,
    device_of,
    expect,
    gid_of,
    neighbours,
    no_event,
    read_epoll,
    read_select,
    read_waiting,
    resolve,
    row_index,
    source_of,
)

pytestmark = needs_netns

_TUNSETIFF, _IFF_TUN = 0x400454CA, 1


# -- a neighbour answers -------------------------------------------------------------------------------------


class TestOnLink:
    @pytest.mark.parametrize(("dst", "src"), [("10.7.0.2", "10.7.0.1"), ("fd07::2", "fd07::1")])
    @pytest.mark.parametrize("port_space", [PortSpace.TCP, PortSpace.UDP])
    def test_address_and_route_resolve_on_link(self, net: TwoHosts, dst: str, src: str, port_space: PortSpace) -> None:
        with an_id(port_space) as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=5000)
            assert cmid.state in (State.ADDR_QUERY, State.ADDR_RESOLVED)
            event = expect(channel, CmEventType.ADDR_RESOLVED)
            assert event.id is cmid
            assert event.error is None
            assert cmid.state is State.ADDR_RESOLVED
            assert (device_of(cmid), cmid.port_num) == ("soft_va", 1)
            assert (source_of(cmid), cmid.route.sgid) == (src, gid_of(src))
            assert cmid.route.dgid == gid_of(dst)
            assert cmid.gid_index == row_index("soft_va", gid_of(src))
            assert cmid.verbs.query_gid(1, cmid.gid_index) == gid_of(src)
            assert cmid.src_port in range(32768, 61000)
            assert cmid.dst_port == PORT
            assert isinstance(cmid.peer_addr, tuple)
            assert cmid.peer_addr[:2] == (dst, PORT)
            assert cmid.route.num_paths == 0

            cmid.resolve_route(2000)
            expect(channel, CmEventType.ROUTE_RESOLVED)
            (path,) = cmid.route.path_rec
            assert (path.sgid, path.dgid) == (gid_of(src), gid_of(dst))
            assert path.mtu_bytes == 1024
            assert path.hop_limit == 64
            assert path.traffic_class == 0
            assert path.flow_label == (cmid.src_port * 31 + PORT) & 0xFFFFF
            assert path.service_id == service_id(port_space, PORT)
            assert (path.pkey, cmid.route.pkey) == (0xFFFF, 0xFFFF)
            assert (path.dlid, path.slid) == (0, 0)
            no_event(channel)

            explanation = cmid.explain()
            assert explanation.ok
            assert explanation.route is not None
            assert (explanation.route.gateway, explanation.route.interface) == (None, "va")
            assert explanation.neighbour is not None
            assert (explanation.neighbour.address, explanation.neighbour.interface) == (dst, "va")
            assert explanation.neighbour.link_layer_address == net.vb.mac
            assert explanation.chosen is not None
            assert explanation.chosen.source == src
            assert (explanation.chosen.device, explanation.chosen.gid_index) == ("soft_va", cmid.gid_index)
            assert explanation.path is not None
            assert explanation.path["mtu"] == 1024
            steps = [step.name for step in explanation.steps]
            assert steps == ["bind", "route", "select", "neighbour", "path"]

            other = explain(dst, PORT)
            assert (other.ok, other.route, other.chosen) == (True, explanation.route, explanation.chosen)
        assert neighbours(net.a)[dst] == "REACHABLE"

    def test_synchronous_id_resolves(self, net: TwoHosts) -> None:
        with CmId() as cmid:
            cmid.resolve_addr(("10.7.0.2", PORT))
            cmid.resolve_route()
            assert cmid.event.type is CmEventType.ROUTE_RESOLVED
            assert cmid.route.num_paths == 1

    @pytest.mark.parametrize(
        ("interface_mtu", "path_mtu"),
        [(1280, 1024), (1500, 1024), (2144, 2048), (4096, 2048), (4191, 2048), (4192, 4096), (9000, 4096)],
    )
    def test_path_mtu_follows_the_interface_mtu(self, interface_mtu: int, path_mtu: int) -> None:
        with two_hosts(interface_mtu) as net, net.a.enter():
            for dst in ("10.7.0.2", "fd07::2"):
                with an_id() as (channel, cmid):
                    resolve(channel, cmid, (dst, PORT))
                    (path,) = cmid.route.path_rec
                    assert path.mtu_bytes == path_mtu
                    assert path.mtu == {1024: 3, 2048: 4, 4096: 5}[path_mtu]
                    port = cmid.verbs.query_port(1)
                    assert port.active_mtu is not None
                    assert (port.active_mtu.bytes, port.max_mtu.bytes) == (path_mtu, 4096)

    def test_interface_mtu_too_small_for_roce_raises(self) -> None:
        with Topology() as net:
            a, b = net.host(), net.host()
            net.link(a, "va", b, "vb", 351, addresses_a=["10.7.0.1/24"], addresses_b=["10.7.0.2/24"])
            with a.enter(), an_id() as (channel, cmid):
                cmid.resolve_addr(("10.7.0.2", PORT))
                expect(channel, CmEventType.ADDR_RESOLVED)
                with pytest.raises(RdmaError) as caught:
                    cmid.resolve_route()
                assert caught.value.errno == errno.EINVAL
                assert_explained(caught.value.explanation, "path", errno.EINVAL, "mtu")
                assert cmid.state is State.ADDR_RESOLVED
                no_event(channel)

    def test_path_uses_mtu_and_hop_limit_of_the_route(self, net: TwoHosts) -> None:
        net.a.ip_batch(
            "link set dev va mtu 9000",
            "route replace 10.7.0.0/24 dev va src 10.7.0.1 mtu 2300 hoplimit 7",
            "route replace fd07::2/128 dev va mtu 2300 hoplimit 9",
        )
        for dst, hops in (("10.7.0.2", 7), ("fd07::2", 9)):
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (dst, PORT))
                (path,) = cmid.route.path_rec
                assert (path.mtu_bytes, path.hop_limit) == (2048, hops)
                route = cmid.explain().route
                assert route is not None
                assert (route.mtu, route.hop_limit) == (2300, hops)

    def test_path_uses_the_default_hop_limit_of_the_host(self, net: TwoHosts) -> None:
        net.a.sysctl("net.ipv4.ip_default_ttl", 33)
        net.a.sysctl("net.ipv6.conf.va.hop_limit", 44)
        for dst, hops in (("10.7.0.2", 33), ("fd07::2", 44)):
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (dst, PORT))
                assert cmid.route.path_rec[0].hop_limit == hops

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_path_uses_tos_and_ack_timeout_of_the_id(self, net: TwoHosts, dst: str) -> None:
        with an_id() as (channel, cmid):
            cmid.set_option(OptionLevel.ID, IdOption.TOS, 0x6A)
            cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 15)
            resolve(channel, cmid, (dst, PORT))
            (path,) = cmid.route.path_rec
            assert path.traffic_class == 0x6A
            assert path.packet_life_time == 14

    def test_path_uses_tos_set_after_the_address(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.2", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED)
            cmid.set_option(OptionLevel.ID, IdOption.TOS, b"\x20")
            cmid.resolve_route()
            expect(channel, CmEventType.ROUTE_RESOLVED)
            assert cmid.route.path_rec[0].traffic_class == 0x20

    def test_ipv6_flowinfo_becomes_the_flow_label(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("fd07::2", PORT, 0x6ABCDE, 0))
            assert cmid.route.path_rec[0].flow_label == 0xABCDE

    def test_flow_label_depends_on_every_port_bit(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("0.0.0.0", 65535))
            resolve(channel, cmid, ("10.7.0.2", 65535))
            assert cmid.route.path_rec[0].flow_label == (65535 * 31 + 65535) & 0xFFFFF

    def test_resolve_route_again_needs_resolve_addr(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            with pytest.raises(RdmaError) as caught:
                cmid.resolve_route()
            assert caught.value.errno == errno.EINVAL
            resolve(channel, cmid, ("10.7.0.2", PORT))
            calls: tuple[Callable[[], object], ...] = (
                lambda: cmid.resolve_addr(("10.7.0.2", PORT)),
                cmid.resolve_route,
            )
            for call in calls:
                with pytest.raises(RdmaError) as caught:
                    call()
                assert caught.value.errno == errno.EINVAL
            assert cmid.state is State.ROUTE_RESOLVED

    def test_channel_keeps_its_network_namespace(self) -> None:
        with two_hosts() as net:
            with net.a.enter():
                channel = EventChannel()
            with channel, CmId(channel) as cmid:
                resolve(channel, cmid, ("10.7.0.2", PORT))
                assert device_of(cmid) == "soft_va"
                with net.b.enter(), CmId(channel) as other:
                    other.resolve_addr(("fd07::2", PORT), ("fd07::1", 0))
                    expect(channel, CmEventType.ADDR_RESOLVED)
                    assert device_of(other) == "soft_va"
            with net.a.enter():
                assert {"10.7.0.2", "fd07::2"} <= neighbours(net.a).keys()

    def test_both_ends_resolve_each_other(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid), net.b.enter(), an_id() as (other_channel, other):
            resolve(other_channel, other, ("10.7.0.1", PORT))
            resolve(channel, cmid, ("10.7.0.2", PORT))
            assert (device_of(cmid), device_of(other)) == ("soft_va", "soft_vb")
            assert (cmid.route.sgid, cmid.route.dgid) == (other.route.dgid, other.route.sgid)


class TestGateway:
    @pytest.mark.parametrize(
        ("dst", "gateway", "src"),
        [("10.7.2.1", "10.7.1.254", "10.7.1.1"), ("fd07:2::1", "fd07:1::fe", "fd07:1::1")],
    )
    def test_gateway_is_the_neighbour(self, dst: str, gateway: str, src: str) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT))
            assert cmid.route.dgid == gid_of(dst)
            assert source_of(cmid) == src
            assert device_of(cmid) == "soft_va"
            assert gateway in neighbours(net.a)
            assert dst not in neighbours(net.a)
            explanation = cmid.explain()
            assert explanation.route is not None
            assert (explanation.route.gateway, explanation.route.source) == (gateway, src)
            assert explanation.neighbour is not None
            assert explanation.neighbour.address == gateway
            assert explanation.neighbour.link_layer_address == net.ra.mac
            assert f"via gateway {gateway}" in explanation.text()

    @pytest.mark.parametrize("dst", ["10.7.2.1", "fd07:2::1"])
    def test_silent_gateway_times_out(self, dst: str) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.r.ip("link", "set", "dev", "ra", "arp", "off")
            net.r.ip("address", "flush", "dev", "ra")
            cmid.resolve_addr((dst, PORT), timeout_ms=100)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
            explanation = assert_explained(event.explanation, "neighbour", errno.ETIMEDOUT, "gateway")
            assert explanation.route is not None
            assert str(explanation.route.gateway) in explanation.message

    def test_ipv4_route_resolves_through_an_ipv6_gateway(self) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            gateway = net.ra.link_local
            net.a.ip("route", "replace", "0.0.0.0/0", "via", "inet6", gateway, "dev", "va")
            resolve(channel, cmid, ("10.7.2.1", PORT))
            assert (source_of(cmid), cmid.route.dgid) == ("10.7.1.1", gid_of("10.7.2.1"))
            assert gateway in neighbours(net.a)
            assert "10.7.1.254" not in neighbours(net.a)
            explanation = cmid.explain()
            assert explanation.route is not None
            assert explanation.route.gateway == gateway
            assert explanation.neighbour is not None
            assert explanation.neighbour.link_layer_address == net.ra.mac

    def test_silent_ipv6_gateway_times_out(self) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.a.ip("route", "replace", "0.0.0.0/0", "via", "inet6", "fd07:1::dead", "dev", "va")
            cmid.resolve_addr(("10.7.2.1", PORT), timeout_ms=100)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
            assert "fd07:1::dead" in event.message

    @pytest.mark.parametrize(
        ("dst", "gateway", "lines"),
        [
            ("10.7.2.1", "10.99.0.1", ("address add 10.99.0.1/32 dev ra",)),
            ("fd07:2::1", "fd99::1", ("address add fd99::1/128 dev ra",)),
        ],
    )
    def test_onlink_gateway_outside_every_subnet_resolves(self, dst: str, gateway: str, lines: tuple[str, ...]) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.r.ip_batch(*lines)
            net.r.settle("ra")
            net.a.ip("route", "replace", dst, "via", gateway, "dev", "va", "onlink")
            resolve(channel, cmid, (dst, PORT))
            assert gateway in neighbours(net.a)

    def test_multipath_route_resolves_through_one_gateway(self) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.r.ip("address", "add", "10.7.1.253/24", "dev", "ra")
            hops = ("nexthop", "via", "10.7.1.254", "nexthop", "via", "10.7.1.253")
            net.a.ip("route", "replace", "default", *hops)
            resolve(channel, cmid, ("10.7.2.1", PORT))
            route = cmid.explain().route
            assert route is not None
            assert route.gateway in ("10.7.1.254", "10.7.1.253")
            assert route.gateway in neighbours(net.a)

    def test_nexthop_object_names_the_gateway(self) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.a.ip_batch(
                "nexthop add id 7 via 10.7.1.254 dev va", "route replace default nhid 7", "neigh flush dev va"
            )
            resolve(channel, cmid, ("10.7.2.1", PORT))
            route = cmid.explain().route
            assert route is not None
            assert route.gateway == "10.7.1.254"


# -- no neighbour answers ------------------------------------------------------------------------------------


class TestSilentNeighbour:
    @pytest.mark.wallclock
    @pytest.mark.parametrize("read", [read_waiting, read_epoll, read_select])
    def test_each_id_times_out_at_its_own_time(self, net: TwoHosts, read: Reader) -> None:
        watches: dict[CmId, Stopwatch] = {}
        wanted: dict[CmId, float] = {}
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(EventChannel())
            # The longest first, so that the next deadline becomes earlier; both families, one neighbour or several.
            for timeout_ms in (1500, 300, 700):
                for dst in ("10.7.0.99", "fd07::99", f"10.7.0.{timeout_ms // 10}"):
                    cmid = stack.enter_context(CmId(channel))
                    watches[cmid] = Stopwatch()
                    wanted[cmid] = timeout_ms / 1000
                    cmid.resolve_addr((dst, PORT), timeout_ms=timeout_ms)
                    assert cmid.state is State.ADDR_QUERY
            while wanted:
                with read(channel, 3.0) as event:
                    elapsed = watches[event.id].seconds
                    assert wanted[event.id] == min(wanted.values())
                    timeout = wanted.pop(event.id)
                    assert (event.type, event.status) == (CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
                    assert timeout * 0.98 <= elapsed <= timeout + 2
                    assert event.id.state is State.ADDR_BOUND
                    assert isinstance(event.error, CmTimeoutError)
                    assert_explained(event.explanation, "neighbour", errno.ETIMEDOUT, "va")
            no_event(channel)

    @pytest.mark.parametrize("dst", ["10.7.0.99", "fd07::99"])
    def test_timeout_zero_resolves_only_known_neighbours(self, net: TwoHosts, dst: str) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=0)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT, timeout=0.5)
            assert event.error is not None
            assert event.error.hint
        # A known neighbour needs no time.
        net.a.ip("neigh", "replace", dst, "lladdr", "02:00:00:00:00:99", "dev", "va", "nud", "permanent")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=0)
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)

    def test_timed_out_synchronous_id_can_resolve_again(self, net: TwoHosts) -> None:
        with CmId() as cmid:
            with pytest.raises(TimeoutError) as caught:
                cmid.resolve_addr(("10.7.0.99", PORT), timeout_ms=50)
            assert isinstance(caught.value, CmTimeoutError)
            assert caught.value.errno == errno.ETIMEDOUT
            assert "10.7.0.99" in str(caught.value)
            assert_explained(caught.value.explanation, "neighbour", errno.ETIMEDOUT)
            # The id is bound and keeps its port: the next attempt may succeed.
            port = cmid.src_port
            assert cmid.state is State.ADDR_BOUND
            cmid.resolve_addr(("10.7.0.2", PORT))
            assert cmid.src_port == port
            assert source_of(cmid) == "10.7.0.1"

    def test_explain_reports_the_same_timeout(self, net: TwoHosts) -> None:
        for dst in ("10.7.0.99", "fd07::99"):
            with an_id() as (channel, cmid):
                cmid.resolve_addr((dst, PORT), timeout_ms=50)
                event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
                assert_agrees(event.explanation, dst, 50)

    def test_destroyed_id_gets_no_event(self, net: TwoHosts) -> None:
        with EventChannel() as channel:
            with CmId(channel) as cmid:
                cmid.resolve_addr(("10.7.0.99", PORT), timeout_ms=50)
            with CmId(channel) as other:
                other.resolve_addr(("10.7.0.98", PORT), timeout_ms=100)
                assert channel.get_event(2).id is other
            no_event(channel)

    def test_failed_neighbour_entry_is_retried(self, net: TwoHosts) -> None:
        # The kernel's own tries have failed: its entry is in the state FAILED.
        net.a.ip("neigh", "add", "10.7.0.3", "dev", "va", "nud", "failed")
        assert neighbours(net.a) == {"10.7.0.3": "FAILED"}
        net.b.ip("address", "add", "10.7.0.3/24", "dev", "vb")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.3", PORT))


class TestNeighbours:
    @pytest.mark.parametrize("state", ["permanent", "stale", "reachable", "noarp"])
    @pytest.mark.parametrize("dst", ["10.7.0.77", "fd07::77"])
    def test_known_neighbour_resolves_at_once(self, net: TwoHosts, dst: str, state: str) -> None:
        net.a.ip("neigh", "add", dst, "lladdr", "02:00:00:00:00:77", "dev", "va", "nud", state)
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            neighbour = cmid.explain().neighbour
            assert neighbour is not None
            assert (neighbour.link_layer_address, neighbour.state) == ("02:00:00:00:00:77", state)

    @pytest.mark.parametrize("dst", ["10.7.0.77", "fd07::77"])
    @pytest.mark.parametrize("read", [read_waiting, read_epoll])
    def test_neighbour_added_late_resolves_the_id(self, net: TwoHosts, dst: str, read: Reader) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=5000)
            with pytest.raises(CmTimeoutError):
                channel.get_event(0.3)
            net.a.ip("neigh", "replace", dst, "lladdr", "02:00:00:00:00:77", "dev", "va", "nud", "reachable")
            with read(channel, 2) as event:
                assert event.type is CmEventType.ADDR_RESOLVED

    @pytest.mark.parametrize(("dst", "family"), [("10.7.0.2", "ipv4"), ("fd07::2", "ipv6")])
    def test_peer_coming_up_late_resolves_the_id(self, net: TwoHosts, dst: str, family: str) -> None:
        # The link has carrier, but no host on it answers.
        net.b.ip("address", "flush", "dev", "vb", "scope", "global")
        net.a.sysctl(f"net.{family}.neigh.va.retrans_time_ms", 100)
        net.a.sysctl(f"net.{family}.neigh.va.mcast_solicit", 1)  # one try, then the entry is FAILED
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=10000)
            with pytest.raises(CmTimeoutError):
                channel.get_event(0.5)
            assert neighbours(net.a)[dst] == "FAILED"
            net.b.ip("address", "add", f"{dst}/{24 if family == 'ipv4' else 64}", "dev", "vb")
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=2)

    def test_five_hundred_ids_wait_for_one_neighbour(self, net: TwoHosts) -> None:
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(EventChannel())
            waiting = {stack.enter_context(CmId(channel)) for _ in range(500)}
            for cmid in waiting:
                cmid.resolve_addr(("10.7.0.77", PORT), timeout_ms=20000)
            no_event(channel)
            net.a.ip("neigh", "replace", "10.7.0.77", "lladdr", "02:00:00:00:00:77", "dev", "va")
            while waiting:
                event = expect(channel, CmEventType.ADDR_RESOLVED)
                waiting.remove(event.id)
                assert event.id.route.dgid == gid_of("10.7.0.77")
            no_event(channel)

    def test_answers_are_matched_by_address(self, net: TwoHosts) -> None:
        with EventChannel() as channel, CmId(channel) as silent, CmId(channel) as heard:
            silent.resolve_addr(("10.7.0.99", PORT), timeout_ms=300)
            heard.resolve_addr(("10.7.0.2", PORT), timeout_ms=5000)
            assert expect(channel, CmEventType.ADDR_RESOLVED).id is heard
            assert expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT).id is silent

    @pytest.mark.parametrize("dst", ["10.7.0.99", "fd07::99"])
    def test_interface_without_arp_needs_no_neighbour(self, net: TwoHosts, dst: str) -> None:
        net.a.ip("link", "set", "dev", "va", "arp", "off")
        net.a.settle("va")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert cmid.explain().neighbour is None
            assert device_of(cmid) == "soft_va"

    @pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no tun devices here")
    @pytest.mark.parametrize(("dst", "src"), [("10.50.0.2", "10.50.0.1"), ("fd50::2", "fd50::1")])
    def test_tunnel_interface_needs_no_neighbour(self, net: TwoHosts, dst: str, src: str) -> None:
        with open("/dev/net/tun", "r+b", buffering=0) as tunnel:
            fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", b"t0", _IFF_TUN))
            net.a.ip_batch(
                "address add 10.50.0.1 peer 10.50.0.2 dev t0",
                "address add fd50::1/64 dev t0",
                "link set dev t0 up",
            )
            net.a.settle("t0")
            with an_id() as (channel, cmid):
                cmid.resolve_addr((dst, PORT))
                expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
                assert (device_of(cmid), source_of(cmid)) == ("soft_t0", src)
                assert cmid.route.dgid == gid_of(dst)
