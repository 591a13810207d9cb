"""The package reads the same from the kernel as ``ip``, and does with less where netlink is missing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_INET, AF_INET6, inet_ntop
from typing import Any
from unittest.mock import Mock

import pytest

from rdmacm import CmEventType, CmId, EventChannel, PortSpace, State, devices, explain
from rdmacm.address import InetAddr
from rdmacm.net import InterfaceFlag, Neighbour, NeighbourState
from rdmacm.net.netlink import _LINK_GROUPS, NetlinkNetwork
from rdmacm.net.portable import PortableNetwork
from rdmacm.net.types import ARPHRD_INFINIBAND, RouteEntry
from rdmacm.provider import get_provider
from rdmacm.soft import SoftProvider
from rdmacm.soft.port_table import PortTable
from support.netns import Host, TwoHosts, needs_netns
from support.resolving import PORT, packed

pytestmark = needs_netns

_ARPHRD_TUNNEL6 = 769


@pytest.fixture
def network(net: TwoHosts) -> Iterator[NetlinkNetwork]:
    network = NetlinkNetwork()
    yield network
    network.close()


def text(ip: bytes | None) -> str | None:
    return None if ip is None else inet_ntop(AF_INET if len(ip) == 4 else AF_INET6, ip)


def ask_ip(host: Host, *args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(host.ip("-j", "-d", *args))
    return found


def shrink(network: NetlinkNetwork, size: int) -> None:
    """Give the network a small buffer. The real one holds any table that a test can make."""
    network._view.release()
    network._buffer = bytearray(size)
    network._view = memoryview(network._buffer)


class TestInterfaces:
    def test_interfaces_match_ip(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        net.topology.link(net.a, "wa", net.b, "wb", 9000)
        net.a.ip_batch(
            "link add name br0 mtu 1400 type bridge",
            "link set dev wa master br0",
            "link set dev br0 up",
            "link set dev va arp off",
        )
        found = {link.name: link for link in network.interfaces()}
        wanted = {link["ifname"]: link for link in ask_ip(net.a, "link", "show")}
        assert found.keys() == wanted.keys() == {"lo", "va", "wa", "br0"}
        for name, link in wanted.items():
            one = found[name]
            assert (one.index, one.mtu) == (link["ifindex"], link["mtu"])
            assert one.address.hex(":") == link["address"]
            for flag in ("UP", "LOOPBACK", "BROADCAST", "NOARP", "MULTICAST", "LOWER_UP"):
                assert bool(one.flags & InterfaceFlag[flag]) == (flag in link["flags"]), (name, flag)
            assert one.is_loopback == (name == "lo")
            assert one.needs_neighbour == (name in ("wa", "br0"))
            assert one.arp_type == (772 if name == "lo" else 1)
            assert one.slave_kind == link.get("linkinfo", {}).get("info_slave_kind")
        assert found["wa"].slave_kind == "bridge"

    def test_interface_flags_show_down_and_no_carrier(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        def va() -> tuple[bool, bool]:
            (one,) = (link for link in network.interfaces() if link.name == "va")
            return one.is_up, one.is_running

        assert va() == (True, True)
        net.b.ip("link", "set", "dev", "vb", "down")
        net.a.settle_without_carrier("va")
        assert va() == (True, False)
        net.a.ip("link", "set", "dev", "va", "down")
        assert va() == (False, False)


class TestAddresses:
    def wanted(self, host: Host) -> set[tuple[int, str, int]]:
        return {
            (link["ifindex"], address["local"], address["prefixlen"])
            for link in ask_ip(host, "address", "show")
            for address in link["addr_info"]
        }

    def found(self, network: NetlinkNetwork) -> set[tuple[int, str, int]]:
        return {(a.ifindex, str(text(a.ip)), a.prefix_length) for a in network.addresses()}

    def test_addresses_match_ip(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        net.a.ip_batch(
            "address add 10.7.0.11/24 dev va",
            "address add 10.60.0.1 peer 10.60.0.2/32 dev va",
            "address add 192.0.2.1/32 dev lo",
            "address add fd60::1 peer fd60::2/128 dev va nodad",
        )
        assert self.found(network) == self.wanted(net.a)
        assert all(address.usable for address in network.addresses())
        assert {address.family for address in network.addresses()} == {AF_INET, AF_INET6}

    def test_unusable_addresses_are_marked(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        net.a.sysctl("net.ipv6.conf.va.accept_dad", 1)
        net.a.ip("address", "add", "fd07::5/64", "dev", "va")
        unusable = {text(address.ip) for address in network.addresses() if not address.usable}
        assert unusable == {"fd07::5"}

    @pytest.mark.parametrize("size", [64, 4096, 1 << 16])
    def test_dump_larger_than_the_buffer_is_read_completely(
        self, net: TwoHosts, network: NetlinkNetwork, size: int
    ) -> None:
        net.a.ip_batch(*(f"address add 10.77.{i // 200}.{i % 200 + 1}/16 dev va" for i in range(300)))
        shrink(network, size)
        assert len(network.addresses()) >= 300
        assert self.found(network) == self.wanted(net.a)
        assert {link.name for link in network.interfaces()} == {"lo", "va"}
        # Also through the device, its GID table and an id.
        (va,) = (d for d in devices() if d.name == "soft_va")
        assert len(va.ports[0].gids) == 303
        with EventChannel() as channel, CmId(channel) as cmid:
            cmid.bind_addr(("10.77.1.100", 0))
            cmid.resolve_addr(("10.77.0.1", PORT))
            with channel.get_event(2) as event:
                assert event.type is CmEventType.ADDR_RESOLVED


ROUTES = (
    "address add 10.7.0.11/24 dev va",
    "route add 10.9.0.0/16 via 10.7.0.2",
    "route add 10.10.0.0/16 via 10.7.0.2 src 10.7.0.11 mtu 1400 hoplimit 9",
    "route add 10.11.0.0/16 via inet6 fd07::2 dev va",
    "route add 10.12.0.0/16 dev va",
    "route add 10.13.0.0/16 via 10.7.0.2 table 100",
    "rule add to 10.13.0.0/16 lookup 100",
    "route add 10.14.0.0/16 nexthop via 10.7.0.2 nexthop via 10.7.0.3",
    "route add fd09::/64 via fd07::2",
    "route add fd10::/64 via fd07::2 mtu 1400 hoplimit 9",
    "route add fd12::/64 dev va",
    "route add fd13::/64 via fd07::3 table 1000",
    "route add 224.0.0.0/4 dev va",
)


class TestRoutes:
    @pytest.mark.parametrize(
        "dst",
        [
            "10.7.0.2",
            "10.7.0.255",
            "10.7.0.1",
            "127.0.0.1",
            "127.3.4.5",
            "224.1.2.3",
            "10.9.1.1",
            "10.10.1.1",
            "10.11.1.1",
            "10.12.1.1",
            "10.13.1.1",
            "10.14.1.1",
            "fd07::2",
            "fd07::1",
            "::1",
            "fd09::9",
            "fd10::9",
            "fd12::9",
            "fd13::9",
            "ff1e::1",
        ],
    )
    def test_routes_match_ip(self, net: TwoHosts, network: NetlinkNetwork, dst: str) -> None:
        net.a.ip_batch(*ROUTES)
        net.a.ip("-6", "rule", "add", "to", "fd13::/64", "lookup", "1000")
        found = network.route(AF_INET6 if ":" in dst else AF_INET, packed(dst), None, 0, 0)
        (wanted,) = ask_ip(net.a, "route", "get", dst, "ipproto", "udp", "dport", "4791")
        kinds = {"10.7.0.255": "broadcast", "10.7.0.1": "local", "127.0.0.1": "local", "127.3.4.5": "local"}
        kind = kinds.get(dst) or wanted.get("type", "unicast")
        assert found.kind == kind
        indices = {link.index: link.name for link in network.interfaces()}
        assert indices[found.ifindex] == wanted["dev"]
        assert text(found.gateway) == (wanted.get("gateway") or wanted.get("via", {}).get("host"))
        assert text(found.source) == wanted.get("prefsrc")
        assert found.destination == packed(dst)
        if kind == "unicast":
            assert found.table == {"10.13.1.1": 100, "fd13::9": 1000}.get(dst, 254)
        if dst in ("10.10.1.1", "fd10::9"):
            assert (found.mtu, found.hop_limit) == (1400, 9)
        else:
            assert found.mtu in (0, 1500, 65536)

    def test_route_leaves_by_the_given_interface(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        net.topology.link(net.a, "wa", net.b, "wb", addresses_a=("10.7.0.3/24", "fd07::3/64"))
        for name, sources in (("va", ("10.7.0.1", "fd07::1")), ("wa", ("10.7.0.3", "fd07::3"))):
            index = socket.if_nametoindex(name)
            for dst, source in zip(("10.7.0.2", "fd07::2"), sources, strict=True):
                route = network.route(AF_INET6 if ":" in dst else AF_INET, packed(dst), None, index, 0)
                assert (route.ifindex, text(route.source)) == (index, source)

    @pytest.mark.parametrize(
        ("kind", "number"),
        [
            ("blackhole", errno.EINVAL),
            ("unreachable", errno.EHOSTUNREACH),
            ("prohibit", errno.EACCES),
            ("throw", errno.ENETUNREACH),
        ],
    )
    @pytest.mark.parametrize(("prefix", "dst"), [("10.66.0.0/16", "10.66.0.1"), ("fd66::/32", "fd66::1")])
    def test_refusing_routes_raise_the_kernels_errno(
        self, net: TwoHosts, network: NetlinkNetwork, kind: str, number: int, prefix: str, dst: str
    ) -> None:
        net.a.ip("route", "add", kind, prefix)
        with pytest.raises(OSError) as caught:
            network.route(AF_INET6 if ":" in dst else AF_INET, packed(dst), None, 0, 0)
        assert caught.value.errno == number
        # The next request does not read the rest of this answer.
        route = network.route(AF_INET, packed("10.7.0.2"), None, 0, 0)
        assert text(route.source) == "10.7.0.1"

    def test_foreign_source_is_eaddrnotavail(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        with pytest.raises(OSError) as caught:
            network.route(AF_INET, packed("10.7.0.2"), packed("10.7.0.200"), 0, 0)
        assert caught.value.errno in (errno.EINVAL, errno.ENETUNREACH)  # older kernels, newer ones
        # The kernel accepts the source in IPv6. The library reports the source as wrong in both families.
        for dst, source in (("10.7.0.2", "10.7.0.200"), ("fd07::2", "fd07::200")):
            family = AF_INET6 if ":" in dst else AF_INET
            there, here = InetAddr(family, packed(dst), PORT), InetAddr(family, packed(source))
            explanation = get_provider().explain_route(there, here)
            assert (explanation.error, explanation.errno_name) == ("route", "EADDRNOTAVAIL")
            assert source in explanation.message
            assert get_provider().find_route(there, here) is None


class TestNeighbours:
    @pytest.mark.parametrize("single", [True, False])
    def test_neighbours_match_ip(self, net: TwoHosts, network: NetlinkNetwork, single: bool) -> None:
        states = ("permanent", "noarp", "stale", "reachable", "failed")
        for i, state in enumerate(states):
            for dst in (f"10.7.0.{50 + i}", f"fd07::{50 + i}"):
                link = [] if state == "failed" else ["lladdr", f"02:00:00:00:00:{50 + i}"]
                net.a.ip("neigh", "add", dst, *link, "dev", "va", "nud", state)
        # Kernels before 5.0 have no RTM_GETNEIGH for a single entry.
        network._has_neighbour_get = single
        listed = {
            entry["dst"]: entry
            for family in ("-4", "-6")
            for entry in ask_ip(net.a, family, "neigh", "show", "nud", "all", "dev", "va")
            if entry["state"] != ["NOARP"] or not entry["dst"].startswith(("224.", "ff"))
        }
        for i, state in enumerate(states):
            for dst in (f"10.7.0.{50 + i}", f"fd07::{50 + i}"):
                family = AF_INET6 if ":" in dst else AF_INET
                entry = network.neighbour(family, net.va.index, packed(dst))
                assert entry is not None
                assert [entry.state.name] == listed[dst]["state"] == [state.upper()]
                assert entry.state is NeighbourState[state.upper()]
                assert entry.link_layer_address.hex(":") == listed[dst].get("lladdr", "")
                assert (entry.ifindex, entry.ip) == (net.va.index, packed(dst))
                assert entry.state.is_valid == (state != "failed")
        for dst in ("10.7.0.99", "fd07::99"):
            assert network.neighbour(AF_INET6 if ":" in dst else AF_INET, net.va.index, packed(dst)) is None
        assert network.neighbour(AF_INET, socket.if_nametoindex("lo"), packed("10.7.0.50")) is None
        assert network._has_neighbour_get == single

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2", "10.7.0.99"])
    def test_id_resolves_by_neighbour_table_dumps(self, net: TwoHosts, dst: str) -> None:
        with EventChannel() as channel, CmId(channel) as cmid:
            assert isinstance(channel.provider, SoftProvider)
            kernel = channel.provider.host.network
            assert isinstance(kernel, NetlinkNetwork)
            # As with a kernel before 5.0.
            kernel._has_neighbour_get = False
            try:
                cmid.resolve_addr((dst, PORT), timeout_ms=100 if dst == "10.7.0.99" else 3000)
                with channel.get_event(4) as event:
                    status = -errno.ETIMEDOUT if dst == "10.7.0.99" else 0
                    assert event.status == status
            finally:
                kernel._has_neighbour_get = True

    @pytest.mark.parametrize("dst", ["10.7.0.2", "fd07::2"])
    def test_probe_triggers_neighbour_discovery(self, net: TwoHosts, network: NetlinkNetwork, dst: str) -> None:
        family = AF_INET6 if ":" in dst else AF_INET
        assert network.neighbour(family, net.va.index, packed(dst)) is None
        network.watch(True)
        network.probe(family, net.va.index, packed(dst))
        seen: list[Neighbour] = []
        while not seen or not seen[-1].state.is_valid:
            assert select.select([network.fileno()], [], [], 3)[0]
            change = network.changes()
            seen += [n for n in change.neighbours if n.ip == packed(dst)] if change else []
        assert seen[-1].link_layer_address.hex(":") == net.vb.mac
        assert seen[-1] == network.neighbour(family, net.va.index, packed(dst))

    @pytest.mark.parametrize(
        ("change", "undo"),
        [
            ("route replace 10.99.0.0/24 dev va src 10.7.0.1", "route del 10.99.0.0/24"),
            ("rule add to 10.99.0.1 prohibit", "rule del to 10.99.0.1"),
            ("addr add 10.99.0.1/32 dev va", "addr del 10.99.0.1/32 dev va"),
            ("link set va down", "link set va up"),
        ],
        ids=["route", "rule", "address", "link"],
    )
    def test_route_that_is_kept_ends_with_the_first_change(
        self, net: TwoHosts, network: NetlinkNetwork, monkeypatch: pytest.MonkeyPatch, change: str, undo: str
    ) -> None:
        def ask() -> RouteEntry | int:
            try:
                return network.route(AF_INET, packed("10.99.0.1"), None, 0, 0)
            except OSError as error:
                return error.errno or 0

        net.a.ip("route", "add", "10.99.0.0/24", "via", "10.7.0.2")
        network.open()
        query = Mock(wraps=network._query_route)
        monkeypatch.setattr(network, "_query_route", query)
        before = [ask() for _ in range(5)]
        assert before == [before[0]] * 5
        assert query.call_count == 2, "the second answer is kept"
        assert network.changes() is None
        net.a.ip(*change.split())
        try:
            after = ask()  # nobody has called changes() yet
            assert after != before[0]
            assert after == ask()
            assert network.changes() is not None
            assert network._groups == _LINK_GROUPS, "routes are not reported any more"
            assert ask() == after
        finally:
            net.a.ip(*undo.split())

    def test_route_that_is_kept_is_asked_for_again_after_a_second(
        self, net: TwoHosts, network: NetlinkNetwork, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr("rdmacm.net.netlink.time.monotonic", lambda: now)
        network.open()
        for _ in range(3):
            found = network.route(AF_INET, packed("10.7.0.2"), None, 0, 0)
        fresh = found._replace(mtu=1400)
        monkeypatch.setattr(network, "_query_route", lambda *_: fresh)
        assert network.route(AF_INET, packed("10.7.0.2"), None, 0, 0) == found
        now += 1
        assert network.route(AF_INET, packed("10.7.0.2"), None, 0, 0) == fresh

    def test_watched_neighbours_are_reported_until_the_network_is_closed(
        self, net: TwoHosts, network: NetlinkNetwork
    ) -> None:
        network.watch_neighbours()
        network.watch(True)
        network.watch(False)
        for last in (1, 2):
            mac = f"02:00:00:00:00:{last:02}"
            net.a.ip("neigh", "replace", "10.7.0.60", "lladdr", mac, "dev", "va", "nud", "reachable")
            seen: list[str] = []
            while mac not in seen:
                assert select.select([network.fileno()], [], [], 3)[0]
                change = network.changes()
                seen += [n.link_layer_address.hex(":") for n in change.neighbours] if change else []
        net.a.ip("route", "add", "10.99.0.0/24", "via", "10.7.0.2")
        network.changes()
        network.close()
        network.fileno()
        net.a.ip("neigh", "replace", "10.7.0.60", "lladdr", "02:00:00:00:00:03", "dev", "va", "nud", "reachable")
        assert network.changes() is None


@contextlib.contextmanager
def tap(host: Host, name: str, arp_type: int, *addresses: str) -> Iterator[int]:
    """A tap of any hardware type; yields its index. The kernel chooses the length of its hardware address by the type.

    tun.c knows none of 20 bytes, so an interface of type InfiniBand has no hardware address.
    """
    tun_set_iff, tun_set_link, tap_without_header = 0x400454CA, 0x400454CD, 0x1002
    with open("/dev/net/tun", "r+b", buffering=0) as file:
        fcntl.ioctl(file, tun_set_iff, struct.pack("16sH22x", name.encode(), tap_without_header))
        fcntl.ioctl(file, tun_set_link, arp_type)
        host.ip("link", "set", name, "up")
        for address in addresses:
            host.ip("addr", "add", address, "dev", name)
        yield socket.if_nametoindex(name)


needs_tun = pytest.mark.skipif(not os.access("/dev/net/tun", os.R_OK | os.W_OK), reason="needs /dev/net/tun")


@needs_tun
class TestHardwareTypes:
    def test_neighbour_with_16_bytes(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        """The longest hardware addresses that a kernel without InfiniBand has: those of IPv6 tunnels."""
        address = bytes(range(1, 17))
        with tap(net.a, "t6", _ARPHRD_TUNNEL6, "10.9.0.1/24") as index:
            net.a.ip("neigh", "add", "10.9.0.2", "lladdr", address.hex(":"), "dev", "t6")
            entry = network.neighbour(AF_INET, index, packed("10.9.0.2"))
            assert entry is not None
            assert entry.link_layer_address == address

    def test_ipoib_interface_is_no_roce_device(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        with tap(net.a, "ib0", ARPHRD_INFINIBAND, "10.9.0.1/24") as index:
            (link,) = (one for one in network.interfaces() if one.index == index)
            assert (link.is_ipoib, link.address, link.broadcast) == (True, b"", b"")
            assert "soft_ib0" not in {device.name for device in devices()}
            for source in (None, ("10.9.0.1", 0)):
                with CmId() as cmid, pytest.raises(OSError, match="ib0 is IPoIB") as failed:
                    cmid.resolve_addr(("10.9.0.2", PORT), source)
                assert failed.value.errno == errno.ENODEV


class TestChanges:
    def test_network_without_changes_reports_none(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        assert network.changes() is None
        assert not select.select([network.fileno()], [], [], 0)[0]

    @pytest.mark.parametrize(
        ("line", "links", "routes"),
        [
            ("link set dev va mtu 1400", True, False),
            ("address add 10.7.0.11/32 dev va", True, True),
            ("address add fd07::11/128 dev va nodad", True, True),
            ("route add 10.9.0.0/16 via 10.7.0.2", False, True),
            ("route add fd09::/64 via fd07::2", False, True),
            ("rule add to 10.9.0.0/16 lookup 100", False, True),
        ],
    )
    @pytest.mark.parametrize("watching", [True, False])
    def test_changes_name_the_changed_tables(
        self, net: TwoHosts, network: NetlinkNetwork, line: str, links: bool, routes: bool, watching: bool
    ) -> None:
        network.watch(watching)
        assert network.changes() is None
        net.a.ip(*line.split())
        if not links and not watching:
            assert network.changes() is None
            return
        # The kernel announces IPv6 addresses from a work queue, after "ip" has returned.
        wanted, seen = (links, routes and watching), (False, False)
        while seen != wanted:
            assert select.select([network.fileno()], [], [], 3)[0], seen
            change = network.changes()
            assert change is not None
            assert not change.lost
            seen = (seen[0] or change.links, seen[1] or change.routes)

    def test_closed_network_reopens_on_use(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        network.watch(True)
        network.close()
        assert {link.name for link in network.interfaces()} == {"lo", "va"}
        assert network.changes() is None
        net.a.ip("address", "add", "10.7.0.11/32", "dev", "va")
        change = network.changes()
        assert change is not None
        assert change.links

    def test_lost_notifications_are_reported(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        with socket.socket(fileno=socket.dup(network.fileno())) as monitor:
            monitor.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        network.watch(True)
        flood(net.a)
        assert select.select([network.fileno()], [], [], 3)[0]
        change = network.changes()
        assert change is not None
        assert change.lost
        assert network.changes() is None
        net.a.ip("link", "set", "dev", "va", "mtu", "1400")
        change = network.changes()
        assert change is not None
        assert (change.links, change.lost) == (True, False)

    def test_tables_are_reread_after_lost_notifications(self, net: TwoHosts) -> None:
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(EventChannel())
            bound, waiting, going = (stack.enter_context(CmId(channel)) for _ in range(3))
            net.a.ip("address", "add", "10.7.0.11/24", "dev", "va")
            bound.bind_addr(("10.7.0.11", PORT))
            net.a.ip("route", "add", "10.9.0.0/16", "via", "10.7.0.98")
            waiting.resolve_addr(("10.7.0.99", PORT), timeout_ms=20000)
            going.resolve_addr(("10.9.0.1", PORT), timeout_ms=20000)
            assert isinstance(channel.provider, SoftProvider)
            with socket.socket(fileno=socket.dup(channel.provider.host.network.fileno())) as monitor:
                monitor.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            flood(net.a)
            # The flood has filled the buffer, so the notifications of these changes are lost.
            net.a.ip_batch(
                "address add 10.7.0.12/24 dev va",
                "address del 10.7.0.11/24 dev va",
                "route replace 10.9.0.0/16 via 10.7.0.2",
                "neigh replace 10.7.0.99 lladdr 02:00:00:00:00:99 dev va",
            )
            outcomes: dict[CmId, tuple[CmEventType, int]] = {}
            while len(outcomes) < 3:
                with channel.get_event(4) as event:
                    outcomes[event.id] = (event.type, event.status)
            assert outcomes == {
                bound: (CmEventType.ADDR_CHANGE, -errno.EADDRNOTAVAIL),
                waiting: (CmEventType.ADDR_RESOLVED, 0),
                going: (CmEventType.ADDR_RESOLVED, 0),
            }
            (va,) = (d for d in devices() if d.name == "soft_va")
            wanted = {a["local"] for a in ask_ip(net.a, "address", "show", "dev", "va")[0]["addr_info"]}
            assert {str(row.gid).removeprefix("::ffff:") for row in va.ports[0].gids} == wanted
            assert "10.7.0.12" in wanted
            assert bound.state is State.ADDR_BOUND


def flood(host: Host) -> None:
    """Change links and addresses far more often than a small receive buffer holds, and undo the changes."""
    host.ip_batch(
        *(f"address add 10.78.{i // 200}.{i % 200 + 1}/16 dev va" for i in range(300)),
        *(f"link set dev va mtu {1500 - i}" for i in range(50)),
        "link set dev va mtu 1500",
        *(f"address del 10.78.{i // 200}.{i % 200 + 1}/16 dev va" for i in reversed(range(300))),
    )


class TestSettings:
    def test_setting_is_read_in_the_namespace(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        net.a.sysctl("net.ipv4.ip_local_port_range", "40000 40100")
        assert network.setting("net/ipv4/ip_local_port_range", 1, 2) == (40000, 40100)
        assert network.setting("net/ipv4/ip_local_port_range", 7) == (7,)
        assert network.setting("net/ipv4/no_such_setting", 7) == (7,)

    def test_link_speed_is_in_megabits_per_second(self, net: TwoHosts, network: NetlinkNetwork) -> None:
        code = """
import socket
from rdmacm.net.netlink import _LINK_GROUPS, NetlinkNetwork
network = NetlinkNetwork()
print(network.link_speed("va"), network.link_speed("lo"), network.link_speed("nosuch"))
network.close()
"""
        assert net.a.python(code).stdout.split() == ["10000", "0", "0"]


# -- without netlink -----------------------------------------------------------------------------------------


@pytest.fixture
def portable(net: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> PortableNetwork:
    # The machine's own name may resolve to addresses outside this namespace.
    monkeypatch.setattr(socket, "gethostname", lambda: "10.7.0.1")
    net.a.ip_batch("route add default via 10.7.0.2", "route add default via fd07::2")
    return PortableNetwork()


class TestPortable:
    def test_portable_network_lists_the_interfaces(self, net: TwoHosts, portable: PortableNetwork) -> None:
        found = {link.name: link for link in portable.interfaces()}
        assert found.keys() == {"lo", "va"}
        assert found["va"].index == net.va.index
        assert all(link.is_running for link in found.values())
        assert [name for name, link in found.items() if link.is_loopback] == ["lo"]

    def test_portable_network_lists_the_addresses(self, net: TwoHosts, portable: PortableNetwork) -> None:
        assert {(a.ifindex, text(a.ip)) for a in portable.addresses()} == {
            (1, "127.0.0.1"),
            (1, "::1"),
            (net.va.index, "10.7.0.1"),
            (net.va.index, "fd07::1"),
        }

    @pytest.mark.parametrize(
        ("dst", "source", "kind"),
        [
            ("10.7.0.2", "10.7.0.1", "unicast"),
            ("fd07::2", "fd07::1", "unicast"),
            ("192.0.2.7", "10.7.0.1", "unicast"),
            ("10.7.0.1", "10.7.0.1", "local"),
            ("fd07::1", "fd07::1", "local"),
            ("127.0.0.1", "127.0.0.1", "local"),
            ("127.0.0.9", "127.0.0.1", "local"),
            ("::1", "::1", "local"),
        ],
    )
    def test_portable_route_has_source_and_interface(
        self, net: TwoHosts, portable: PortableNetwork, dst: str, source: str, kind: str
    ) -> None:
        route = portable.route(AF_INET6 if ":" in dst else AF_INET, packed(dst), None, 0, 0)
        assert (text(route.source), route.kind) == (source, kind)
        assert route.ifindex == (1 if source in ("127.0.0.1", "::1") else net.va.index)

    def test_portable_route_honours_the_source(self, net: TwoHosts, portable: PortableNetwork) -> None:
        net.a.ip("address", "add", "10.7.0.11/24", "dev", "va")
        route = portable.route(AF_INET, packed("10.7.0.2"), packed("10.7.0.11"), 0, 0)
        assert text(route.source) == "10.7.0.11"
        with pytest.raises(OSError) as caught:
            portable.route(AF_INET, packed("10.7.0.2"), packed("10.7.0.200"), 0, 0)
        assert caught.value.errno == errno.EINVAL

    @pytest.mark.parametrize(
        ("prefix", "kind", "dst", "number"),
        [
            ("", "", "192.0.2.7", errno.ENETUNREACH),
            ("", "", "2001:db8::7", errno.ENETUNREACH),
            ("10.66.0.0/16", "unreachable", "10.66.0.1", errno.EHOSTUNREACH),
            ("10.66.0.0/16", "prohibit", "10.66.0.1", errno.EACCES),
            ("10.66.0.0/16", "blackhole", "10.66.0.1", errno.EINVAL),
        ],
    )
    def test_portable_route_raises_the_kernels_errno(
        self, net: TwoHosts, portable: PortableNetwork, prefix: str, kind: str, dst: str, number: int
    ) -> None:
        net.a.ip_batch("route del default", "route del default via fd07::2")
        if prefix:
            net.a.ip("route", "add", kind, prefix)
        with pytest.raises(OSError) as caught:
            portable.route(AF_INET6 if ":" in dst else AF_INET, packed(dst), None, 0, 0)
        assert caught.value.errno == number

    @pytest.fixture
    def provider(self, portable: PortableNetwork, tmp_path: Path) -> SoftProvider:
        return SoftProvider(portable, ports=PortTable("test", directory=str(tmp_path)))

    @pytest.mark.parametrize(
        ("dst", "device", "source"),
        [
            ("10.7.0.2", "soft_va", "10.7.0.1"),
            ("fd07::2", "soft_va", "fd07::1"),
            ("192.0.2.7", "soft_va", "10.7.0.1"),
            ("10.7.0.1", "soft_va", "10.7.0.1"),
            ("127.0.0.1", "soft_lo", "127.0.0.1"),
            ("::1", "soft_lo", "::1"),
        ],
    )
    def test_id_resolves_without_netlink(self, provider: SoftProvider, dst: str, device: str, source: str) -> None:
        with EventChannel(provider) as channel, CmId(channel) as cmid:
            cmid.resolve_addr((dst, PORT))
            with channel.get_event(1) as event:
                assert event.type is CmEventType.ADDR_RESOLVED
            assert cmid.verbs.name == device
            assert isinstance(cmid.local_addr, tuple)
            assert cmid.local_addr[0] == source
            cmid.resolve_route()
            with channel.get_event(1) as event:
                assert event.type is CmEventType.ROUTE_RESOLVED
            assert cmid.route.path_rec[0].mtu_bytes in (1024, 4096)

    def test_id_binds_without_netlink(self, provider: SoftProvider) -> None:
        with EventChannel(provider) as channel, CmId(channel, PortSpace.UDP) as cmid, CmId(channel) as other:
            cmid.bind_addr(("10.7.0.1", PORT))
            assert cmid.verbs.name == "soft_va"
            with pytest.raises(OSError) as caught:
                other.bind_addr(("10.7.0.200", PORT))
            assert caught.value.errno == errno.EADDRNOTAVAIL

    def test_explain_works_without_netlink(self, net: TwoHosts, provider: SoftProvider) -> None:
        found = explain("10.7.0.2", PORT, provider=provider)
        assert found.ok
        assert found.chosen is not None
        assert (found.chosen.device, found.chosen.source) == ("soft_va", "10.7.0.1")
        net.a.ip_batch("route del default", "address flush dev va")
        nowhere = explain("192.0.2.7", PORT, provider=provider)
        assert (nowhere.error, nowhere.errno_name) == ("route", "ENETUNREACH")
        assert nowhere.hint


def test_portable_network_is_used_without_netlink(net: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    from rdmacm.net import open_network

    real: Callable[..., socket.socket] = socket.socket

    def forbidden(family: int = AF_INET, *args: int, **more: Any) -> socket.socket:
        if family == socket.AF_NETLINK:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return real(family, *args, **more)

    monkeypatch.setattr("rdmacm.net.netlink.socket.socket", forbidden)
    assert isinstance(open_network(), PortableNetwork)
