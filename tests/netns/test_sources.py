"""Source addresses of resolutions, link-local addresses, this host's own addresses, and multicast."""

from __future__ import annotations

import errno
from socket import AF_INET6, SOCK_DGRAM, if_nametoindex, socket

import pytest

from rdmacm import CmEventType, CmId, PortSpace, RdmaError, State, explain
from support.netns import Host, TwoHosts, needs_netns
from support.resolving import (
    PORT,
    an_id,
    assert_agrees,
    assert_explained,
    connect_errno,
    device_of,
    expect,
    failure,
    gid_of,
    neighbours,
    resolve,
    row_index,
    source_of,
)

pytestmark = needs_netns


# -- sources -------------------------------------------------------------------------------------------------


class TestSource:
    @pytest.fixture
    def one_subnet(self, net: TwoHosts) -> TwoHosts:
        """Two interfaces of ``a`` on one subnet, each of them joined to ``b``."""
        net.topology.link(net.a, "wa", net.b, "wb", addresses_a=("10.7.0.3/24", "fd07::3/64"))
        return net

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    @pytest.mark.parametrize("way", ["src_addr", "bind_addr"])
    def test_source_selects_between_interfaces_on_one_subnet(self, one_subnet: TwoHosts, dst: str, way: str) -> None:
        if ":" in dst:  # solicitations are answered for the receiving interface's addresses only, unlike ARP
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

    def test_explanation_lists_the_rejected_interface(self, one_subnet: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.2", PORT), ("10.7.0.3", 0))
            rejected = {(c.device, c.source): c.rule for c in cmid.explain().candidates if not c.kept}
        assert rejected["soft_va", "10.7.0.1"] == "bound-device"
        assert rejected["soft_va", "fd07::1"] == "address-family"

    def test_given_source_port_is_kept(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.2", PORT), ("10.7.0.1", 4321))
            expect(channel, CmEventType.ADDR_RESOLVED)
            assert cmid.local_addr == ("10.7.0.1", 4321)
            with CmId(channel) as other, pytest.raises(RdmaError) as caught:
                other.resolve_addr(("10.7.0.2", PORT), ("10.7.0.1", 4321))
            assert caught.value.errno == errno.EADDRINUSE

    def test_secondary_address_can_be_the_source(self, net: TwoHosts) -> None:
        net.a.ip("address", "add", "10.7.0.11/24", "dev", "va")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.2", PORT), ("10.7.0.11", 0))
            assert source_of(cmid) == "10.7.0.11"
            assert cmid.route.sgid == gid_of("10.7.0.11")
            assert cmid.gid_index == row_index("soft_va", gid_of("10.7.0.11"))

    def test_wildcard_source_becomes_the_address_of_the_route(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("0.0.0.0", 4322))
            assert not cmid.is_bound
            resolve(channel, cmid, ("10.7.0.2", PORT))
            assert cmid.local_addr == ("10.7.0.1", 4322)

    @pytest.mark.parametrize(("dst", "src"), [("10.7.0.2", "10.7.0.200"), ("fd07::2", "fd07::200")])
    def test_foreign_source_is_eaddrnotavail(self, net: TwoHosts, dst: str, src: str) -> None:
        error = failure((dst, PORT), (src, 0))
        assert error.errno == errno.EADDRNOTAVAIL
        assert src in str(error)
        assert error.hint
        other = explain(dst, PORT, src_addr=(src, 0))
        assert other.errno_name == "EADDRNOTAVAIL"

    def test_source_other_than_the_bound_address_is_einval(self, net: TwoHosts) -> None:
        net.a.ip("address", "add", "10.7.0.11/24", "dev", "va")
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            for source in (("10.7.0.11", 0), ("10.7.0.1", cmid.src_port ^ 1), ("fd07::1", 0)):
                with pytest.raises(RdmaError) as caught:
                    cmid.resolve_addr(("10.7.0.2", PORT), source)
                assert caught.value.errno == errno.EINVAL
                assert cmid.state is State.ADDR_BOUND
            resolve(channel, cmid, ("10.7.0.2", PORT), ("10.7.0.1", cmid.src_port))

    def test_source_of_another_family_is_einval(self, net: TwoHosts) -> None:
        assert failure(("10.7.0.2", PORT), ("fd07::1", 0)).errno == errno.EINVAL
        with an_id() as (_, cmid):
            cmid.bind_addr(("fd07::1", 0))
            with pytest.raises(RdmaError) as caught:
                cmid.resolve_addr(("10.7.0.2", PORT))
            assert caught.value.errno == errno.EINVAL

    def test_preferred_source_of_the_route_is_used(self, net: TwoHosts) -> None:
        net.a.ip_batch("address add 10.7.0.11/24 dev va", "route add 10.9.0.0/16 via 10.7.0.2 src 10.7.0.11")
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.9.9.9", PORT))
            assert source_of(cmid) == "10.7.0.11"

    def test_preferred_source_on_loopback_has_no_device(self, net: TwoHosts) -> None:
        net.a.ip_batch("address add 10.9.0.1/32 dev lo", "route add 10.9.9.0/24 via 10.7.0.2 src 10.9.0.1")
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.9.9.9", PORT))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            explanation = assert_explained(event.explanation, "select", errno.ENODEV)
            assert "10.9.0.1" in explanation.message
            rules = {(c.device, c.source): c.rule for c in explanation.candidates}
            assert rules["soft_lo", "10.9.0.1"] == "egress-interface"
            assert rules["soft_va", "10.7.0.1"] == "source-address"
            assert_agrees(explanation, "10.9.9.9")
            assert cmid.state is State.ADDR_BOUND
        # With an address of the route's interface as the source, it resolves.
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.9.9.9", PORT), ("10.7.0.1", 0))
            assert device_of(cmid) == "soft_va"

    @pytest.mark.parametrize("source", ["127.0.0.1", "127.1.2.3"])
    def test_loopback_source_cannot_leave_the_host(self, net: TwoHosts, source: str) -> None:
        error = failure(("10.7.0.2", PORT), (source, 0))
        assert error.errno == errno.EINVAL
        assert f"source {source} cannot leave this host" in str(error.strerror)
        assert "blackhole" not in str(error)
        assert_explained(error.explanation, "route", errno.EINVAL)
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("fd07::2", PORT), ("::1", 0))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            assert "::1" in event.message

    def test_route_over_an_interface_without_addresses_is_enodev(self, net: TwoHosts) -> None:
        # The route's interface has no address, so the kernel's source is one of another interface.
        net.topology.link(net.a, "wa", net.b, "wb")
        net.a.ip("route", "add", "10.44.0.0/24", "dev", "wa")
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.44.0.1", PORT))
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENODEV)
            assert_explained(event.explanation, "select", errno.ENODEV)


class TestLinkLocal:
    def test_scope_is_accepted_by_name(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (f"{net.vb.link_local}%va", PORT))
            assert cmid.local_addr == (net.va.link_local, cmid.src_port, 0, net.va.index)
            assert cmid.peer_addr == (net.vb.link_local, PORT, 0, net.va.index)
            assert cmid.route.sgid == gid_of(net.va.link_local)
            assert cmid.gid_index == row_index("soft_va", gid_of(net.va.link_local))

    def test_scope_is_accepted_by_number(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (net.vb.link_local, PORT, 0, net.va.index))
            assert device_of(cmid) == "soft_va"

    def test_link_local_without_a_scope_is_einval(self, net: TwoHosts) -> None:
        error = failure((net.vb.link_local, PORT))
        assert error.errno == errno.EINVAL == connect_errno(AF_INET6, net.vb.link_local)
        assert_explained(error.explanation, "route", errno.EINVAL, "%")
        assert_agrees(error.explanation, net.vb.link_local)
        with CmId() as cmid, pytest.raises(RdmaError) as caught:
            cmid.bind_addr((net.va.link_local, 0))
        assert caught.value.errno == errno.EINVAL

    def test_bound_address_supplies_the_scope(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr((f"{net.va.link_local}%va", 0))
            assert device_of(cmid) == "soft_va"
            resolve(channel, cmid, (net.vb.link_local, PORT))
            assert cmid.peer_addr == (net.vb.link_local, PORT, 0, net.va.index)

    @pytest.mark.parametrize("scope", [9999, 0x80000000, 0xFFFFFFFF])
    def test_unknown_scope_is_enetunreach(self, net: TwoHosts, scope: int) -> None:
        error = failure((net.vb.link_local, PORT, 0, scope))
        with socket(AF_INET6, SOCK_DGRAM) as sock:
            assert error.errno == errno.ENETUNREACH == sock.connect_ex((net.vb.link_local, PORT, 0, scope))
        assert_explained(error.explanation, "route", errno.ENETUNREACH)
        with CmId() as cmid, pytest.raises(RdmaError) as caught:
            cmid.bind_addr((net.va.link_local, 0, 0, scope))
        assert caught.value.errno == errno.EADDRNOTAVAIL

    def test_scope_selects_between_equal_addresses(self, net: TwoHosts) -> None:
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

    def test_silent_link_local_neighbour_times_out(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("fe80::dead%va", PORT), timeout_ms=50)
            expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)


# -- this host -----------------------------------------------------------------------------------------------


class TestThisHost:
    @pytest.mark.parametrize("dst", ["10.7.0.1", "fd07::1"])
    def test_own_address_resolves_at_once(self, net: TwoHosts, dst: str) -> None:
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
    def test_own_address_keeps_another_own_source(self, two_ways: TwoHosts, dst: str, src: str) -> None:
        with an_id() as (channel, cmid):
            resolve(channel, cmid, (dst, PORT), (src, 0))
            assert source_of(cmid) == src
            assert cmid.route.sgid == gid_of(src)

    @pytest.mark.parametrize("dst", ["127.0.0.1", "127.0.0.5", "::1", "0.0.0.0", "::"])
    def test_loopback_addresses_resolve_to_the_loopback_device(self, net: TwoHosts, dst: str) -> None:
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
    def test_loopback_that_was_never_up_is_enetunreach(self, dst: str) -> None:
        with Host(loopback=False) as host, host.enter():
            error = failure((dst, PORT))
            assert error.errno == errno.ENETUNREACH
            assert_explained(error.explanation, "route", errno.ENETUNREACH, "ip link set lo up")
            assert_agrees(error.explanation, "::1" if ":" in dst else "127.0.0.1")

    def test_ipv6_loopback_without_ipv6_is_explained(self) -> None:
        with Host() as host:
            host.sysctl("net.ipv6.conf.all.disable_ipv6", "1")
            with host.enter():
                error = failure(("::1", PORT))
                assert error.errno == errno.ENETUNREACH
                explanation = assert_explained(error.explanation, "route", errno.ENETUNREACH, "disable_ipv6")
                assert "lo has no address ::1" in explanation.message

    def test_loopback_that_went_down_is_explained(self, net: TwoHosts) -> None:
        # The kernel keeps the IPv4 routes to lo, although lo transmits nothing; the port of the device is down.
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
        # Addresses of other interfaces do not need lo.
        with an_id() as (channel, cmid):
            resolve(channel, cmid, ("10.7.0.1", PORT))

    def test_host_without_interfaces_resolves_loopback_only(self) -> None:
        with Host() as host, host.enter():
            assert failure(("10.7.0.2", PORT)).errno == errno.ENETUNREACH
            with an_id() as (channel, cmid):
                resolve(channel, cmid, ("127.0.0.1", PORT))


class TestMulticast:
    def test_ipv4_multicast_follows_its_route(self, net: TwoHosts) -> None:
        assert failure(("224.0.0.77", PORT)).errno == errno.ENETUNREACH
        net.a.ip("route", "add", "default", "via", "10.7.0.2")
        with an_id(PortSpace.UDP) as (channel, cmid):
            cmid.resolve_addr(("224.0.0.77", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert (device_of(cmid), source_of(cmid)) == ("soft_va", "10.7.0.1")
            assert cmid.explain().neighbour is None

    @pytest.mark.parametrize("dst", ["ff1e::77", "ff1e::77%va", "ff02::77%va"])
    def test_ipv6_multicast_needs_no_neighbour(self, net: TwoHosts, dst: str) -> None:
        with an_id(PortSpace.UDP) as (channel, cmid):
            cmid.resolve_addr((dst, PORT))
            expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
            assert device_of(cmid) == "soft_va"
            assert cmid.explain().neighbour is None

    def test_source_selects_the_multicast_interface(self, two_ways: TwoHosts) -> None:
        two_ways.a.ip_batch("route add 224.0.0.0/4 dev va", "route add 224.0.0.0/4 dev wa metric 10")
        for dst, sources in (("224.0.0.77", ("10.7.0.1", "10.8.0.1")), ("ff1e::77", ("fd07::1", "fd08::1"))):
            for source, device in zip(sources, ("soft_va", "soft_wa"), strict=True):
                with an_id(PortSpace.UDP) as (channel, cmid):
                    cmid.resolve_addr((dst, PORT), (source, 0))
                    expect(channel, CmEventType.ADDR_RESOLVED, timeout=0)
                    assert (device_of(cmid), source_of(cmid)) == (device, source)
