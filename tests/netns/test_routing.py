"""Routes of resolutions: missing and refusing routes, rules and tables."""

from __future__ import annotations

import errno
from socket import AF_INET, AF_INET6

import pytest

from rdmacm import CmEventType, RdmaError, State
from support.netns import TwoHosts, needs_netns
from support.resolving import (
    PORT,
    an_id,
    assert_agrees,
    assert_explained,
    connect_errno,
    device_of,
    expect,
    failure,
    neighbours,
    no_event,
    resolve,
    source_of,
)

pytestmark = needs_netns


# -- missing and refusing routes -----------------------------------------------------------------------------


class TestUnreachable:
    @pytest.mark.parametrize("dst", ["192.0.2.1", "2001:db8::1"])
    def test_destination_without_a_route_is_enetunreach(self, net: TwoHosts, dst: str) -> None:
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
    def test_refusing_routes_raise_the_errno_of_connect(
        self, net: TwoHosts, prefix: str, dst: str, kind: str, number: int
    ) -> None:
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
    def test_bound_id_without_route_uses_its_interface(self, net: TwoHosts, dst: str, src: str) -> None:
        # A bound id asks for a route out of its interface. If there is none, the kernel treats an IPv4
        # destination as on link, so the connection manager asks for a neighbour that does not exist.
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
    def test_refusing_ipv6_route_applies_to_a_bound_id(self, net: TwoHosts, kind: str, number: int) -> None:
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
    def test_refusing_rule_raises_the_errno_of_connect(self, net: TwoHosts, kind: str) -> None:
        net.a.ip("rule", "add", "to", "10.7.0.2", "type", kind)
        assert failure(("10.7.0.2", PORT)).errno == connect_errno(AF_INET, "10.7.0.2")

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_interface_without_carrier_is_enodev(self, net: TwoHosts, dst: str) -> None:
        net.b.ip("link", "set", "dev", "vb", "down")
        net.a.settle_without_carrier("va")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            explanation = assert_explained(event.explanation, "select", errno.ENODEV, "va")
            assert "va is down" in explanation.message
            rules = {c.source: c.rule for c in explanation.candidates}
            assert rules["fd07::1" if ":" in dst else "10.7.0.1"] == "port-state"
            assert_agrees(explanation, dst)

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_interface_that_is_down_is_enetunreach(self, net: TwoHosts, dst: str) -> None:
        net.a.ip("link", "set", "dev", "va", "down")
        assert failure((dst, PORT)).errno == errno.ENETUNREACH

    def test_failed_resolve_leaves_the_id_bound(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            with pytest.raises(RdmaError):
                cmid.resolve_addr(("192.0.2.1", PORT))
            assert cmid.state is State.ADDR_BOUND
            port = cmid.src_port
            assert port
            net.a.ip("route", "add", "192.0.2.0/24", "via", "10.7.0.2")
            resolve(channel, cmid, ("192.0.2.1", PORT))
            assert cmid.src_port == port

    def test_ipv4_mapped_address_has_no_route(self, net: TwoHosts) -> None:
        error = failure(("::ffff:10.7.0.2", PORT))
        assert error.errno == errno.ENETUNREACH
        assert_explained(error.explanation, "route", errno.ENETUNREACH)


# -- rules and tables ----------------------------------------------------------------------------------------


FAR = pytest.mark.parametrize(
    ("dst", "first", "second"), [("10.9.9.9", "10.7.0.1", "10.8.0.1"), ("fd09::9", "fd07::1", "fd08::1")]
)


class TestRules:
    @FAR
    def test_main_table_is_used_without_rules(self, two_ways: TwoHosts, dst: str, first: str, second: str) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT))
            assert (device_of(cmid), source_of(cmid)) == ("soft_va", first)
            route = cmid.explain().route
            assert route is not None
            assert route.table == 254

    @FAR
    @pytest.mark.parametrize("selector", ["to {dst}", "ipproto udp dport 4791", "ipproto udp"])
    def test_rule_for_the_destination_or_roce_traffic_selects_its_table(
        self, two_ways: TwoHosts, dst: str, first: str, second: str, selector: str
    ) -> None:
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
    def test_rule_for_other_traffic_is_ignored(
        self, two_ways: TwoHosts, dst: str, first: str, second: str, selector: str
    ) -> None:
        family = "-6" if ":" in dst else "-4"
        two_ways.a.ip(family, "rule", "add", *selector.split(), "lookup", "100")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT))
            assert device_of(cmid) == "soft_va"

    @FAR
    def test_rule_for_a_source_needs_that_source(self, two_ways: TwoHosts, dst: str, first: str, second: str) -> None:
        family = "-6" if ":" in dst else "-4"
        two_ways.a.ip(family, "rule", "add", "from", second, "lookup", "100")
        for source, device in ((None, "soft_va"), (first, "soft_va"), (second, "soft_wa")):
            with an_id() as (channel, cmid):
                resolve(channel, cmid, (dst, PORT), (source, 0) if source else None)
                assert device_of(cmid) == device
                assert source_of(cmid) == (source or first)

    @FAR
    def test_source_without_a_matching_route_fails(self, two_ways: TwoHosts, dst: str, first: str, second: str) -> None:
        two_ways.b.sysctl("net.ipv4.conf.all.arp_ignore", 1)  # answers ARP for the receiving interface's addresses only
        # No route leaves by the source's interface. IPv4 asks for the neighbour there all the same, and times out;
        # IPv6 takes the route of the other interface, which does not have the source.
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), (second, 0), timeout_ms=50)
            step, number = ("select", errno.ENODEV) if ":" in dst else ("neighbour", errno.ETIMEDOUT)
            event = expect(channel, CmEventType.ADDR_ERROR, -number)
            assert_explained(event.explanation, step, number)
            assert "wa" in event.explanation.text() if event.explanation else False
