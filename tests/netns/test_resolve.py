"""Resolving addresses and routes on real networks: what comes out, what fails, when and why."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import select
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_DGRAM, if_nametoindex, inet_pton, socket

import pytest

from rdmacm import (
    CmEvent,
    CmEventType,
    CmId,
    CmTimeoutError,
    CmWouldBlockError,
    EventChannel,
    Explanation,
    Gid,
    IdOption,
    OptionLevel,
    PortSpace,
    RdmaError,
    SockAddr,
    State,
    devices,
    explain,
)
from rdmacm.address import service_id
from support.netns import Host, Topology, TwoHosts, needs_netns, three_hosts, two_hosts

pytestmark = needs_netns

PORT = 7471

_TUNSETIFF, _IFF_TUN = 0x400454CA, 1


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    """Two hosts; the test runs in ``a``."""
    with two_hosts() as net, net.a.enter():
        yield net


@contextlib.contextmanager
def an_id(port_space: PortSpace = PortSpace.TCP) -> Iterator[tuple[EventChannel, CmId]]:
    with EventChannel() as channel, CmId(channel, port_space) as cmid:
        yield channel, cmid


def expect(channel: EventChannel, kind: CmEventType, status: int = 0, timeout: float = 5.0) -> CmEvent:
    event = channel.get_event(timeout)
    event.ack()
    assert (event.type, event.status) == (kind, status), event.message
    return event


def no_event(channel: EventChannel) -> None:
    with pytest.raises(CmWouldBlockError):
        channel.get_event(0)


def resolve(
    channel: EventChannel, cmid: CmId, dst: SockAddr, src: SockAddr | None = None, timeout_ms: int = 5000
) -> None:
    """Both steps, each of which must succeed."""
    cmid.resolve_addr(dst, src, timeout_ms)
    expect(channel, CmEventType.ADDR_RESOLVED)
    assert state_of(cmid) is State.ADDR_RESOLVED
    cmid.resolve_route(timeout_ms)
    expect(channel, CmEventType.ROUTE_RESOLVED)
    assert state_of(cmid) is State.ROUTE_RESOLVED


def state_of(cmid: CmId) -> State:
    return cmid.state


def device_of(cmid: CmId) -> str:
    assert cmid.verbs is not None
    return cmid.verbs.name


def source_of(cmid: CmId) -> str:
    assert isinstance(cmid.local_addr, tuple)
    return cmid.local_addr[0]


def gid_of(address: str) -> Gid:
    return Gid.from_ip(inet_pton(AF_INET6 if ":" in address else AF_INET, address))


def row_index(device: str, gid: Gid) -> int:
    (found,) = (d for d in devices() if d.name == device)
    (index,) = (row.gid_index for port in found.ports for row in port.gids if row.gid == gid)
    return index


def neighbours(host: Host) -> dict[str, str]:
    """Address → state of the neighbour entries that have been asked for."""
    return {entry["dst"]: entry["state"][0] for entry in json.loads(host.ip("-j", "neigh"))}


def connect_errno(family: int, host: str) -> int:
    """What a socket's connect() says of a destination."""
    with socket(family, SOCK_DGRAM) as sock:
        return sock.connect_ex((host, 4791))


def failure(dst: SockAddr, src: SockAddr | None = None, timeout_ms: int = 200) -> RdmaError:
    """The exception with which an address is not resolved; it must be raised at once, and no event follow."""
    with an_id() as (channel, cmid):
        with pytest.raises(RdmaError) as caught:
            cmid.resolve_addr(dst, src, timeout_ms)
        no_event(channel)
    return caught.value


def assert_explained(explanation: Explanation | None, step: str, number: int, hint: str = "") -> Explanation:
    assert explanation is not None
    assert not explanation.ok
    assert explanation.chosen is None
    assert (explanation.error, explanation.errno) == (step, number)
    assert explanation.errno_name == errno.errorcode[number]
    assert explanation.hint
    assert hint in explanation.hint
    text = explanation.text()
    assert f"FAILED at {step}" in text
    assert errno.errorcode[number] in text
    assert explanation.hint in text
    assert json.loads(json.dumps(explanation.as_dict()))["errno"] == number
    return explanation


def assert_agrees(explanation: Explanation | None, dst: str, timeout_ms: int = 200) -> None:
    """explain() names the same step, errno and hint for the destination."""
    other = explain(dst, PORT, timeout_ms=timeout_ms)
    assert explanation is not None
    assert (other.error, other.errno_name, other.message, other.hint) == (
        explanation.error,
        explanation.errno_name,
        explanation.message,
        explanation.hint,
    )
    assert other.route == explanation.route


# -- reaching somebody ---------------------------------------------------------------------------------------


class TestOnLink:
    @pytest.mark.parametrize(("dst", "src"), [("10.7.0.2", "10.7.0.1"), ("fd07::2", "fd07::1")])
    @pytest.mark.parametrize("port_space", [PortSpace.TCP, PortSpace.UDP])
    def test_address_then_route(self, net: TwoHosts, dst: str, src: str, port_space: PortSpace) -> None:
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
            assert cmid.verbs is not None
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

    def test_synchronously(self, net: TwoHosts) -> None:
        with CmId() as cmid:
            cmid.resolve_addr(("10.7.0.2", PORT))
            cmid.resolve_route()
            assert cmid.event is not None
            assert cmid.event.type is CmEventType.ROUTE_RESOLVED
            assert cmid.route.num_paths == 1

    @pytest.mark.parametrize(
        ("interface_mtu", "path_mtu"),
        [(1280, 1024), (1500, 1024), (2144, 2048), (4096, 2048), (4191, 2048), (4192, 4096), (9000, 4096)],
    )
    def test_mtu(self, interface_mtu: int, path_mtu: int) -> None:
        with two_hosts(interface_mtu) as net, net.a.enter():
            for dst in ("10.7.0.2", "fd07::2"):
                with an_id() as (channel, cmid):
                    resolve(channel, cmid, (dst, PORT))
                    (path,) = cmid.route.path_rec
                    assert path.mtu_bytes == path_mtu
                    assert path.mtu == {1024: 3, 2048: 4, 4096: 5}[path_mtu]
                    assert cmid.verbs is not None
                    port = cmid.verbs.query_port(1)
                    assert port.active_mtu is not None
                    assert (port.active_mtu.bytes, port.max_mtu.bytes) == (path_mtu, 4096)

    def test_an_mtu_too_small_for_any_packet(self) -> None:
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

    def test_a_routes_own_mtu_and_hop_limit(self, net: TwoHosts) -> None:
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

    def test_the_hosts_own_hop_limit(self, net: TwoHosts) -> None:
        net.a.sysctl("net.ipv4.ip_default_ttl", 33)
        net.a.sysctl("net.ipv6.conf.va.hop_limit", 44)
        for dst, hops in (("10.7.0.2", 33), ("fd07::2", 44)):
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (dst, PORT))
                assert cmid.route.path_rec[0].hop_limit == hops

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_options_shape_the_path(self, net: TwoHosts, dst: str) -> None:
        with an_id() as (channel, cmid):
            cmid.set_option(OptionLevel.ID, IdOption.TOS, 0x6A)
            cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 15)
            resolve(channel, cmid, (dst, PORT))
            (path,) = cmid.route.path_rec
            assert path.traffic_class == 0x6A
            assert path.packet_life_time == 14

    def test_tos_set_between_address_and_route(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.2", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED)
            cmid.set_option(OptionLevel.ID, IdOption.TOS, b"\x20")
            cmid.resolve_route()
            expect(channel, CmEventType.ROUTE_RESOLVED)
            assert cmid.route.path_rec[0].traffic_class == 0x20

    def test_ipv6_flow_information_is_the_flow_label(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("fd07::2", PORT, 0x6ABCDE, 0))
            assert cmid.route.path_rec[0].flow_label == 0xABCDE

    def test_all_of_a_port_is_in_the_flow_label(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("0.0.0.0", 65535))
            resolve(channel, cmid, ("10.7.0.2", 65535))
            assert cmid.route.path_rec[0].flow_label == (65535 * 31 + 65535) & 0xFFFFF

    def test_route_again_only_after_address(self, net: TwoHosts) -> None:
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

    def test_a_channel_keeps_its_network_wherever_it_is_used(self) -> None:
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

    def test_both_ends_at_once(self, net: TwoHosts) -> None:
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
    def test_the_gateway_is_the_neighbour(self, dst: str, gateway: str, src: str) -> None:
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
    def test_a_gateway_that_is_gone(self, dst: str) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.r.ip("link", "set", "dev", "ra", "arp", "off")
            net.r.ip("address", "flush", "dev", "ra")
            cmid.resolve_addr((dst, PORT), timeout_ms=100)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
            explanation = assert_explained(event.explanation, "neighbour", errno.ETIMEDOUT, "gateway")
            assert explanation.route is not None
            assert str(explanation.route.gateway) in explanation.message

    def test_an_ipv6_gateway_for_ipv4(self) -> None:
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

    def test_an_ipv6_gateway_that_is_gone(self) -> None:
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
    def test_a_gateway_outside_every_subnet(self, dst: str, gateway: str, lines: tuple[str, ...]) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.r.ip_batch(*lines)
            net.r.settle("ra")
            net.a.ip("route", "replace", dst, "via", gateway, "dev", "va", "onlink")
            resolve(channel, cmid, (dst, PORT))
            assert gateway in neighbours(net.a)

    def test_several_next_hops(self) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.r.ip("address", "add", "10.7.1.253/24", "dev", "ra")
            hops = ("nexthop", "via", "10.7.1.254", "nexthop", "via", "10.7.1.253")
            net.a.ip("route", "replace", "default", *hops)
            resolve(channel, cmid, ("10.7.2.1", PORT))
            route = cmid.explain().route
            assert route is not None
            assert route.gateway in ("10.7.1.254", "10.7.1.253")
            assert route.gateway in neighbours(net.a)

    def test_a_next_hop_object(self) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.a.ip_batch(
                "nexthop add id 7 via 10.7.1.254 dev va", "route replace default nhid 7", "neigh flush dev va"
            )
            resolve(channel, cmid, ("10.7.2.1", PORT))
            route = cmid.explain().route
            assert route is not None
            assert route.gateway == "10.7.1.254"


# -- nobody answers ------------------------------------------------------------------------------------------


def read_waiting(channel: EventChannel, timeout: float) -> CmEvent:
    return channel.get_event(timeout)


def read_epoll(channel: EventChannel, timeout: float) -> CmEvent:
    deadline = time.monotonic() + timeout
    with select.epoll() as poller:
        poller.register(channel.fileno(), select.EPOLLIN)
        wakeups = 0
        while True:
            assert poller.poll(deadline - time.monotonic()), "the descriptor never polled readable"
            wakeups += 1
            assert wakeups < 100, "the descriptor polls readable without progress"
            with contextlib.suppress(CmWouldBlockError):
                return channel.get_event(0)


def read_select(channel: EventChannel, timeout: float) -> CmEvent:
    deadline = time.monotonic() + timeout
    channel.blocking = False
    wakeups = 0
    while True:
        assert select.select([channel], [], [], deadline - time.monotonic())[0], "never readable"
        wakeups += 1
        assert wakeups < 100, "the descriptor polls readable without progress"
        with contextlib.suppress(CmWouldBlockError):
            return channel.get_event()


class TestSilence:
    @pytest.mark.parametrize("read", [read_waiting, read_epoll, read_select])
    def test_the_timeout_is_kept(self, net: TwoHosts, read: Callable[[EventChannel, float], CmEvent]) -> None:
        started: dict[CmId, float] = {}
        wanted: dict[CmId, float] = {}
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(EventChannel())
            # The longest first, so that a deadline is moved forward; two families, one neighbour or several.
            for timeout_ms in (1500, 300, 700):
                for dst in ("10.7.0.99", "fd07::99", f"10.7.0.{timeout_ms // 10}"):
                    cmid = stack.enter_context(CmId(channel))
                    started[cmid] = time.monotonic()
                    wanted[cmid] = timeout_ms / 1000
                    cmid.resolve_addr((dst, PORT), timeout_ms=timeout_ms)
                    assert cmid.state is State.ADDR_QUERY
            while wanted:
                with read(channel, 3.0) as event:
                    elapsed = time.monotonic() - started[event.id]
                    timeout = wanted.pop(event.id)
                    assert (event.type, event.status) == (CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
                    assert timeout * 0.98 <= elapsed <= timeout * 1.2
                    assert event.id.state is State.ADDR_BOUND
                    assert isinstance(event.error, CmTimeoutError)
                    assert_explained(event.explanation, "neighbour", errno.ETIMEDOUT, "va")
            no_event(channel)

    @pytest.mark.parametrize("dst", ["10.7.0.99", "fd07::99"])
    def test_no_time_at_all(self, net: TwoHosts, dst: str) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=0)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT, timeout=0.5)
            assert event.error is not None
            assert event.error.hint
        # A neighbour that is known needs no time.
        net.a.ip("neigh", "replace", dst, "lladdr", "02:00:00:00:00:99", "dev", "va", "nud", "permanent")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=0)
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)

    def test_synchronously(self, net: TwoHosts) -> None:
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

    def test_explain_agrees(self, net: TwoHosts) -> None:
        for dst in ("10.7.0.99", "fd07::99"):
            with an_id() as (channel, cmid):
                cmid.resolve_addr((dst, PORT), timeout_ms=50)
                event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
                assert_agrees(event.explanation, dst, 50)

    def test_destroying_an_id_that_waits(self, net: TwoHosts) -> None:
        with EventChannel() as channel:
            with CmId(channel) as cmid:
                cmid.resolve_addr(("10.7.0.99", PORT), timeout_ms=50)
            with CmId(channel) as other:
                other.resolve_addr(("10.7.0.98", PORT), timeout_ms=100)
                assert channel.get_event(2).id is other
            no_event(channel)

    def test_a_failed_entry_is_asked_for_again(self, net: TwoHosts) -> None:
        # The kernel's own tries are over: it has an entry, and the entry says that nobody is there.
        net.a.ip("neigh", "add", "10.7.0.3", "dev", "va", "nud", "failed")
        assert neighbours(net.a) == {"10.7.0.3": "FAILED"}
        net.b.ip("address", "add", "10.7.0.3/24", "dev", "vb")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.3", PORT))


class TestNeighbours:
    @pytest.mark.parametrize("state", ["permanent", "stale", "reachable", "noarp"])
    @pytest.mark.parametrize("dst", ["10.7.0.77", "fd07::77"])
    def test_a_known_neighbour_answers_at_once(self, net: TwoHosts, dst: str, state: str) -> None:
        net.a.ip("neigh", "add", dst, "lladdr", "02:00:00:00:00:77", "dev", "va", "nud", state)
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            neighbour = cmid.explain().neighbour
            assert neighbour is not None
            assert (neighbour.link_layer_address, neighbour.state) == ("02:00:00:00:00:77", state)

    @pytest.mark.parametrize("dst", ["10.7.0.77", "fd07::77"])
    @pytest.mark.parametrize("read", [read_waiting, read_epoll])
    def test_a_late_neighbour(self, net: TwoHosts, dst: str, read: Callable[[EventChannel, float], CmEvent]) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=5000)
            with pytest.raises(CmTimeoutError):
                channel.get_event(0.3)
            before = time.monotonic()
            net.a.ip("neigh", "replace", dst, "lladdr", "02:00:00:00:00:77", "dev", "va", "nud", "reachable")
            with read(channel, 2) as event:
                assert event.type is CmEventType.ADDR_RESOLVED
            assert time.monotonic() - before < 0.3

    @pytest.mark.parametrize(("dst", "family"), [("10.7.0.2", "ipv4"), ("fd07::2", "ipv6")])
    def test_a_peer_that_comes_up_late(self, net: TwoHosts, dst: str, family: str) -> None:
        # Silent, but with the carrier on: the link exists and nobody is behind it.
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

    def test_five_hundred_wait_for_one_answer(self, net: TwoHosts) -> None:
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

    def test_one_answer_is_not_anothers(self, net: TwoHosts) -> None:
        with EventChannel() as channel, CmId(channel) as silent, CmId(channel) as heard:
            silent.resolve_addr(("10.7.0.99", PORT), timeout_ms=300)
            heard.resolve_addr(("10.7.0.2", PORT), timeout_ms=5000)
            assert expect(channel, CmEventType.ADDR_RESOLVED).id is heard
            assert expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT).id is silent

    @pytest.mark.parametrize("dst", ["10.7.0.99", "fd07::99"])
    def test_an_interface_without_arp(self, net: TwoHosts, dst: str) -> None:
        net.a.ip("link", "set", "dev", "va", "arp", "off")
        net.a.settle("va")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert cmid.explain().neighbour is None
            assert device_of(cmid) == "soft_va"

    @pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no tun devices here")
    @pytest.mark.parametrize(("dst", "src"), [("10.50.0.2", "10.50.0.1"), ("fd50::2", "fd50::1")])
    def test_a_tunnel(self, net: TwoHosts, dst: str, src: str) -> None:
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


# -- routes that lead nowhere --------------------------------------------------------------------------------


class TestNowhere:
    @pytest.mark.parametrize("dst", ["192.0.2.1", "2001:db8::1"])
    def test_no_route(self, net: TwoHosts, dst: str) -> None:
        error = failure((dst, PORT))
        assert error.errno == errno.ENETUNREACH == connect_errno(AF_INET6 if ":" in dst else AF_INET, dst)
        assert error.step == "resolve_addr"
        assert error.address == (f"[{dst}]:{PORT}" if ":" in dst else f"{dst}:{PORT}")
        assert error.hint
        assert f"no route to {dst}" in str(error)
        assert_explained(error.explanation, "route", errno.ENETUNREACH, "ip route get")
        assert_agrees(error.explanation, dst)

    @pytest.mark.parametrize(("prefix", "dst"), [("10.66.0.0/16", "10.66.0.1"), ("fd66::/32", "fd66::1")])
    @pytest.mark.parametrize(
        ("kind", "number"),
        [
            ("blackhole", errno.EINVAL),
            ("unreachable", errno.EHOSTUNREACH),
            ("prohibit", errno.EACCES),
            ("throw", errno.ENETUNREACH),
        ],
    )
    def test_a_route_that_refuses(self, net: TwoHosts, prefix: str, dst: str, kind: str, number: int) -> None:
        net.a.ip("route", "add", kind, prefix)
        assert connect_errno(AF_INET6 if ":" in dst else AF_INET, dst) == number
        error = failure((dst, PORT))
        assert error.errno == number
        assert isinstance(error, PermissionError) == (kind == "prohibit")
        if kind != "throw":
            assert kind in str(error)
        assert_explained(error.explanation, "route", number, f"ip route get {dst}")
        assert_agrees(error.explanation, dst)

    @pytest.mark.parametrize(("dst", "src"), [("192.0.2.1", "10.7.0.1"), ("10.66.0.1", "10.7.0.1")])
    def test_a_bound_id_takes_its_interface_for_the_way(self, net: TwoHosts, dst: str, src: str) -> None:
        # A bound id asks for a way out of its interface. Where no route leads out of that, the kernel's IPv4
        # takes everybody to be on link, and so the connection manager asks for a neighbour nobody is.
        net.a.ip("route", "add", "blackhole", "10.66.0.0/16")
        with an_id() as (channel, cmid):
            cmid.bind_addr((src, 0))
            cmid.resolve_addr((dst, PORT), timeout_ms=50)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
            assert_explained(event.explanation, "neighbour", errno.ETIMEDOUT)
            assert cmid.state is State.ADDR_BOUND

    @pytest.mark.parametrize(
        ("kind", "number"),
        [("blackhole", errno.EINVAL), ("unreachable", errno.EHOSTUNREACH), ("prohibit", errno.EACCES)],
    )
    def test_a_bound_id_and_an_ipv6_route_that_refuses(self, net: TwoHosts, kind: str, number: int) -> None:
        net.a.ip("route", "add", kind, "fd66::/32")
        with an_id() as (channel, cmid):
            cmid.bind_addr(("fd07::1", 0))
            with pytest.raises(RdmaError) as caught:
                cmid.resolve_addr(("fd66::1", PORT))
            assert caught.value.errno == number
            assert_explained(caught.value.explanation, "route", number)
            assert cmid.state is State.ADDR_BOUND
            no_event(channel)

    @pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit"])
    def test_a_rule_that_refuses(self, net: TwoHosts, kind: str) -> None:
        net.a.ip("rule", "add", "to", "10.7.0.2", "type", kind)
        assert failure(("10.7.0.2", PORT)).errno == connect_errno(AF_INET, "10.7.0.2")

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_without_carrier(self, net: TwoHosts, dst: str) -> None:
        net.b.ip("link", "set", "dev", "vb", "down")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            explanation = assert_explained(event.explanation, "select", errno.ENODEV, "va")
            assert "va is down" in explanation.message
            judged = {c.source: c.rule for c in explanation.candidates}
            assert judged["fd07::1" if ":" in dst else "10.7.0.1"] == "port-state"
            assert_agrees(explanation, dst)

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_the_interface_is_down(self, net: TwoHosts, dst: str) -> None:
        net.a.ip("link", "set", "dev", "va", "down")
        assert failure((dst, PORT)).errno == errno.ENETUNREACH

    def test_the_id_is_bound_and_tries_again(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            with pytest.raises(RdmaError):
                cmid.resolve_addr(("192.0.2.1", PORT))
            assert cmid.state is State.ADDR_BOUND
            port = cmid.src_port
            assert port
            net.a.ip("route", "add", "192.0.2.0/24", "via", "10.7.0.2")
            resolve(channel, cmid, ("192.0.2.1", PORT))
            assert cmid.src_port == port

    def test_a_mapped_address(self, net: TwoHosts) -> None:
        error = failure(("::ffff:10.7.0.2", PORT))
        assert error.errno == errno.ENETUNREACH
        assert_explained(error.explanation, "route", errno.ENETUNREACH)


# -- rules and tables ----------------------------------------------------------------------------------------


@pytest.fixture
def two_ways() -> Iterator[TwoHosts]:
    """Two links between the hosts, and 10.9.9.9, fd09::9 behind both; the main table goes by the first.

    The second link: ``wa`` 10.8.0.1, fd08::1 to ``wb`` 10.8.0.2, fd08::2. Table 100 goes by that.
    """
    with two_hosts() as net:
        net.topology.link(
            net.a,
            "wa",
            net.b,
            "wb",
            addresses_a=("10.8.0.1/24", "fd08::1/64"),
            addresses_b=("10.8.0.2/24", "fd08::2/64"),
        )
        net.b.ip_batch("address add 10.9.9.9/32 dev lo", "address add fd09::9/128 dev lo")
        net.a.ip_batch(
            "route add 10.9.0.0/16 via 10.7.0.2",
            "route add 10.9.0.0/16 via 10.8.0.2 table 100",
            "route add fd09::/64 via fd07::2",
            "route add fd09::/64 via fd08::2 table 100",
        )
        with net.a.enter():
            yield net


FAR = pytest.mark.parametrize(
    ("dst", "first", "second"), [("10.9.9.9", "10.7.0.1", "10.8.0.1"), ("fd09::9", "fd07::1", "fd08::1")]
)


class TestRules:
    @FAR
    def test_without_rules_the_main_table(self, two_ways: TwoHosts, dst: str, first: str, second: str) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT))
            assert (device_of(cmid), source_of(cmid)) == ("soft_va", first)
            route = cmid.explain().route
            assert route is not None
            assert route.table == 254

    @FAR
    @pytest.mark.parametrize("selector", ["to {dst}", "ipproto udp dport 4791", "ipproto udp"])
    def test_a_rule_for_all_sources(self, two_ways: TwoHosts, dst: str, first: str, second: str, selector: str) -> None:
        family = "-6" if ":" in dst else "-4"
        two_ways.a.ip(family, "rule", "add", *selector.format(dst=dst).split(), "lookup", "100")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT))
            assert (device_of(cmid), source_of(cmid)) == ("soft_wa", second)
            route = cmid.explain().route
            assert route is not None
            assert route.table == 100
        assert ("fd08::2" if ":" in dst else "10.8.0.2") in neighbours(two_ways.a)

    @FAR
    @pytest.mark.parametrize("selector", ["ipproto udp dport 7471", "ipproto tcp dport 4791"])
    def test_a_rule_for_other_traffic(
        self, two_ways: TwoHosts, dst: str, first: str, second: str, selector: str
    ) -> None:
        family = "-6" if ":" in dst else "-4"
        two_ways.a.ip(family, "rule", "add", *selector.split(), "lookup", "100")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT))
            assert device_of(cmid) == "soft_va"

    @FAR
    def test_a_rule_for_one_source(self, two_ways: TwoHosts, dst: str, first: str, second: str) -> None:
        family = "-6" if ":" in dst else "-4"
        two_ways.a.ip(family, "rule", "add", "from", second, "lookup", "100")
        for source, device in ((None, "soft_va"), (first, "soft_va"), (second, "soft_wa")):
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (dst, PORT), (source, 0) if source else None)
                assert device_of(cmid) == device
                assert source_of(cmid) == (source or first)

    @FAR
    def test_a_source_the_routes_do_not_suit(self, two_ways: TwoHosts, dst: str, first: str, second: str) -> None:
        two_ways.b.sysctl("net.ipv4.conf.all.arp_ignore", 1)  # answer for the interface's own addresses only
        # Bound to the second interface, out of which no route leads. IPv4 tries there all the same, in vain;
        # IPv6 goes by the first, where the source does not belong.
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), (second, 0), timeout_ms=50)
            step, number = ("select", errno.ENODEV) if ":" in dst else ("neighbour", errno.ETIMEDOUT)
            event = expect(channel, CmEventType.ADDR_ERROR, -number)
            assert_explained(event.explanation, step, number)
            assert "wa" in event.explanation.text() if event.explanation else False


# -- sources -------------------------------------------------------------------------------------------------


class TestSource:
    @pytest.fixture
    def one_subnet(self, net: TwoHosts) -> TwoHosts:
        """Two interfaces of ``a`` on one subnet, each of them joined to ``b``."""
        net.topology.link(net.a, "wa", net.b, "wb", addresses_a=("10.7.0.3/24", "fd07::3/64"))
        return net

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    @pytest.mark.parametrize("way", ["src_addr", "bind_addr"])
    def test_two_interfaces_on_one_subnet(self, one_subnet: TwoHosts, dst: str, way: str) -> None:
        if ":" in dst:  # unlike ARP, solicitations are answered for the interface's own addresses
            one_subnet.b.ip("address", "add", f"{dst}/128", "dev", "wb", "nodad")
        prefix = "fd07::" if ":" in dst else "10.7.0."
        for host, device in (("3", "soft_wa"), ("1", "soft_va")):
            with an_id() as (channel, cmid):
                source = (prefix + host, 0)
                if way == "bind_addr":
                    cmid.bind_addr(source)
                    assert device_of(cmid) == device
                resolve(channel, cmid, (dst, PORT), source if way == "src_addr" else None)
                assert (device_of(cmid), source_of(cmid)) == (device, source[0])
                route = cmid.explain().route
                assert route is not None
                assert f"soft_{route.interface}" == device

    def test_the_other_interface_is_explained(self, one_subnet: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.2", PORT), ("10.7.0.3", 0))
            rejected = {(c.device, c.source): c.rule for c in cmid.explain().candidates if not c.kept}
        assert rejected["soft_va", "10.7.0.1"] == "bound-device"
        assert rejected["soft_va", "fd07::1"] == "address-family"

    def test_binding_takes_the_port(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.2", PORT), ("10.7.0.1", 4321))
            expect(channel, CmEventType.ADDR_RESOLVED)
            assert cmid.local_addr == ("10.7.0.1", 4321)
            with CmId(channel) as other, pytest.raises(RdmaError) as caught:
                other.resolve_addr(("10.7.0.2", PORT), ("10.7.0.1", 4321))
            assert caught.value.errno == errno.EADDRINUSE

    def test_a_second_address_of_the_interface(self, net: TwoHosts) -> None:
        net.a.ip("address", "add", "10.7.0.11/24", "dev", "va")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.2", PORT), ("10.7.0.11", 0))
            assert source_of(cmid) == "10.7.0.11"
            assert cmid.route.sgid == gid_of("10.7.0.11")
            assert cmid.gid_index == row_index("soft_va", gid_of("10.7.0.11"))

    def test_a_wildcard_source_leaves_the_choice(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("0.0.0.0", 4322))
            assert cmid.verbs is None
            resolve(channel, cmid, ("10.7.0.2", PORT))
            assert cmid.local_addr == ("10.7.0.1", 4322)

    @pytest.mark.parametrize(("dst", "src"), [("10.7.0.2", "10.7.0.200"), ("fd07::2", "fd07::200")])
    def test_not_ours(self, net: TwoHosts, dst: str, src: str) -> None:
        error = failure((dst, PORT), (src, 0))
        assert error.errno == errno.EADDRNOTAVAIL
        assert src in str(error)
        assert error.hint
        other = explain(dst, PORT, src_addr=(src, 0))
        assert other.errno_name == "EADDRNOTAVAIL"

    def test_another_than_the_bound_one(self, net: TwoHosts) -> None:
        net.a.ip("address", "add", "10.7.0.11/24", "dev", "va")
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            for source in (("10.7.0.11", 0), ("10.7.0.1", cmid.src_port ^ 1), ("fd07::1", 0)):
                with pytest.raises(RdmaError) as caught:
                    cmid.resolve_addr(("10.7.0.2", PORT), source)
                assert caught.value.errno == errno.EINVAL
                assert cmid.state is State.ADDR_BOUND
            resolve(channel, cmid, ("10.7.0.2", PORT), ("10.7.0.1", cmid.src_port))

    def test_of_another_family(self, net: TwoHosts) -> None:
        assert failure(("10.7.0.2", PORT), ("fd07::1", 0)).errno == errno.EINVAL
        with an_id() as (_, cmid):
            cmid.bind_addr(("fd07::1", 0))
            with pytest.raises(RdmaError) as caught:
                cmid.resolve_addr(("10.7.0.2", PORT))
            assert caught.value.errno == errno.EINVAL

    def test_the_routes_preference(self, net: TwoHosts) -> None:
        net.a.ip_batch("address add 10.7.0.11/24 dev va", "route add 10.9.0.0/16 via 10.7.0.2 src 10.7.0.11")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.9.9.9", PORT))
            assert source_of(cmid) == "10.7.0.11"

    def test_a_preferred_source_on_the_loopback_has_no_device(self, net: TwoHosts) -> None:
        net.a.ip_batch("address add 10.9.0.1/32 dev lo", "route add 10.9.9.0/24 via 10.7.0.2 src 10.9.0.1")
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.9.9.9", PORT))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            explanation = assert_explained(event.explanation, "select", errno.ENODEV)
            assert "10.9.0.1" in explanation.message
            judged = {(c.device, c.source): c.rule for c in explanation.candidates}
            assert judged["soft_lo", "10.9.0.1"] == "egress-interface"
            assert judged["soft_va", "10.7.0.1"] == "source-address"
            assert_agrees(explanation, "10.9.9.9")
            assert cmid.state is State.ADDR_BOUND
        # An address of the interface itself, asked for, helps.
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.9.9.9", PORT), ("10.7.0.1", 0))
            assert device_of(cmid) == "soft_va"

    def test_the_loopback_address_does_not_leave_the_host(self, net: TwoHosts) -> None:
        error = failure(("10.7.0.2", PORT), ("127.0.0.1", 0))
        assert error.errno == errno.EINVAL
        assert "127.0.0.1" in str(error.strerror)
        assert "blackhole" not in str(error)
        assert_explained(error.explanation, "route", errno.EINVAL)
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("fd07::2", PORT), ("::1", 0))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            assert "::1" in event.message

    def test_an_interface_without_addresses(self, net: TwoHosts) -> None:
        # Routed by an interface that has no address: another interface's is taken, not one of the device.
        net.topology.link(net.a, "wa", net.b, "wb")
        net.a.ip("route", "add", "10.44.0.0/24", "dev", "wa")
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.44.0.1", PORT))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            assert_explained(event.explanation, "select", errno.ENODEV)


class TestLinkLocal:
    def test_by_name(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (f"{net.vb.link_local}%va", PORT))
            assert cmid.local_addr == (net.va.link_local, cmid.src_port, 0, net.va.index)
            assert cmid.peer_addr == (net.vb.link_local, PORT, 0, net.va.index)
            assert cmid.route.sgid == gid_of(net.va.link_local)
            assert cmid.gid_index == row_index("soft_va", gid_of(net.va.link_local))

    def test_by_number(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (net.vb.link_local, PORT, 0, net.va.index))
            assert device_of(cmid) == "soft_va"

    def test_without_a_scope(self, net: TwoHosts) -> None:
        error = failure((net.vb.link_local, PORT))
        assert error.errno == errno.EINVAL == connect_errno(AF_INET6, net.vb.link_local)
        assert_explained(error.explanation, "route", errno.EINVAL, "%")
        assert_agrees(error.explanation, net.vb.link_local)
        with CmId() as cmid, pytest.raises(RdmaError) as caught:
            cmid.bind_addr((net.va.link_local, 0))
        assert caught.value.errno == errno.EINVAL

    def test_the_bound_address_lends_its_scope(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr((f"{net.va.link_local}%va", 0))
            assert device_of(cmid) == "soft_va"
            resolve(channel, cmid, (net.vb.link_local, PORT))
            assert cmid.peer_addr == (net.vb.link_local, PORT, 0, net.va.index)

    def test_an_interface_that_does_not_exist(self, net: TwoHosts) -> None:
        error = failure((net.vb.link_local, PORT, 0, 9999))
        with socket(AF_INET6, SOCK_DGRAM) as sock:
            assert error.errno == errno.ENETUNREACH == sock.connect_ex((net.vb.link_local, PORT, 0, 9999))
        assert_explained(error.explanation, "route", errno.ENETUNREACH)
        with CmId() as cmid, pytest.raises(RdmaError) as caught:
            cmid.bind_addr((net.va.link_local, 0, 0, 9999))
        assert caught.value.errno == errno.EADDRNOTAVAIL

    def test_one_address_on_two_interfaces(self, net: TwoHosts) -> None:
        net.topology.link(net.a, "wa", net.b, "wb")
        for host, names in ((net.a, ("va", "wa")), (net.b, ("vb", "wb"))):
            for name in names:
                address = "fe80::a/64" if host is net.a else "fe80::b/64"
                host.ip("address", "add", address, "dev", name, "nodad")
                host.settle(name)
        for name in ("wa", "va"):
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (f"fe80::b%{name}", PORT))
                assert device_of(cmid) == f"soft_{name}"
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (f"fe80::b%{name}", PORT), (f"fe80::a%{name}", 0))
                assert device_of(cmid) == f"soft_{name}"
                assert cmid.local_addr == ("fe80::a", cmid.src_port, 0, if_nametoindex(name))

    def test_nobody_there(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("fe80::dead%va", PORT), timeout_ms=50)
            expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)


# -- this host -----------------------------------------------------------------------------------------------


class TestThisHost:
    @pytest.mark.parametrize("dst", ["10.7.0.1", "fd07::1"])
    def test_an_address_of_our_own(self, net: TwoHosts, dst: str) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert (device_of(cmid), source_of(cmid)) == ("soft_va", dst)
            assert cmid.route.sgid == cmid.route.dgid == gid_of(dst)
            explanation = cmid.explain()
            assert explanation.neighbour is None
            assert explanation.route is not None
            assert (explanation.route.kind, explanation.route.table) == ("local", 255)
            cmid.resolve_route()
            expect(channel, CmEventType.ROUTE_RESOLVED)
        assert dst not in neighbours(net.a)

    @pytest.mark.parametrize(
        ("dst", "src"), [("10.7.0.1", "10.8.0.1"), ("10.7.0.1", "127.0.0.1"), ("fd07::1", "fd08::1")]
    )
    def test_from_another_address_of_our_own(self, two_ways: TwoHosts, dst: str, src: str) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT), (src, 0))
            assert source_of(cmid) == src
            assert cmid.route.sgid == gid_of(src)

    @pytest.mark.parametrize("dst", ["127.0.0.1", "127.0.0.5", "::1", "0.0.0.0", "::"])
    def test_loopback(self, net: TwoHosts, dst: str) -> None:
        source = "::1" if ":" in dst else "127.0.0.1"
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert (device_of(cmid), source_of(cmid)) == ("soft_lo", source)
            assert cmid.route.sgid == gid_of(source)
            assert cmid.route.dgid == gid_of(source if dst in ("0.0.0.0", "::") else dst)
            cmid.resolve_route()
            expect(channel, CmEventType.ROUTE_RESOLVED)
            assert cmid.route.path_rec[0].mtu_bytes == 4096

    @pytest.mark.parametrize("dst", ["127.0.0.1", "127.0.0.5", "::1", "0.0.0.0", "::"])
    def test_the_loopback_interface_is_down(self, dst: str) -> None:
        with Host(loopback=False) as host, host.enter():
            error = failure((dst, PORT))
            assert error.errno == errno.ENETUNREACH
            assert_explained(error.explanation, "route", errno.ENETUNREACH, "ip link set lo up")
            assert_agrees(error.explanation, "::1" if ":" in dst else "127.0.0.1")

    def test_the_loopback_interface_was_taken_down(self, net: TwoHosts) -> None:
        # The kernel keeps IPv4's routes to it then, though nothing passes any more; the device says so.
        net.a.ip("link", "set", "dev", "lo", "down")
        for dst in ("127.0.0.1", "127.0.0.5", "0.0.0.0"):
            with an_id() as (channel, cmid):
                cmid.resolve_addr((dst, PORT))
                event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
                explanation = assert_explained(event.explanation, "select", errno.ENODEV, "ip link set lo up")
                assert "lo is down" in explanation.message
        for dst in ("::1", "::"):
            error = failure((dst, PORT))
            assert error.errno == errno.ENETUNREACH
            assert_explained(error.explanation, "route", errno.ENETUNREACH, "ip link set lo up")
        # Addresses of other interfaces do without it.
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.1", PORT))

    def test_no_network_at_all(self) -> None:
        with Host() as host, host.enter():
            assert failure(("10.7.0.2", PORT)).errno == errno.ENETUNREACH
            with an_id() as (channel, cmid):
                resolve(channel, cmid, ("127.0.0.1", PORT))


class TestMulticast:
    def test_ipv4(self, net: TwoHosts) -> None:
        assert failure(("224.0.0.77", PORT)).errno == errno.ENETUNREACH
        net.a.ip("route", "add", "default", "via", "10.7.0.2")
        with an_id(PortSpace.UDP) as (channel, cmid):
            cmid.resolve_addr(("224.0.0.77", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert (device_of(cmid), source_of(cmid)) == ("soft_va", "10.7.0.1")
            assert cmid.explain().neighbour is None

    @pytest.mark.parametrize("dst", ["ff1e::77", "ff1e::77%va", "ff02::77%va"])
    def test_ipv6(self, net: TwoHosts, dst: str) -> None:
        with an_id(PortSpace.UDP) as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert device_of(cmid) == "soft_va"
            assert cmid.explain().neighbour is None

    def test_by_the_source_given(self, two_ways: TwoHosts) -> None:
        two_ways.a.ip_batch("route add 224.0.0.0/4 dev va", "route add 224.0.0.0/4 dev wa metric 10")
        for dst, sources in (("224.0.0.77", ("10.7.0.1", "10.8.0.1")), ("ff1e::77", ("fd07::1", "fd08::1"))):
            for source, device in zip(sources, ("soft_va", "soft_wa"), strict=True):
                with an_id(PortSpace.UDP) as (channel, cmid):
                    cmid.resolve_addr((dst, PORT), (source, 0))
                    expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
                    assert (device_of(cmid), source_of(cmid)) == (device, source)
