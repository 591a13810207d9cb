"""Ids and devices while the network changes."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from socket import AF_INET, AF_INET6, inet_pton

import pytest

from rdmacm import (
    CmEvent,
    CmEventType,
    CmId,
    CmTimeoutError,
    Device,
    EventChannel,
    Gid,
    IdOption,
    OptionLevel,
    RdmaError,
    State,
    devices,
)
from rdmacm.verbs import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType
from support import resolving
from support.clock import eventually
from support.netns import TwoHosts, needs_netns, three_hosts
from support.resolving import PORT, SOON, Reader, an_id, no_event, read_epoll, read_waiting

pytestmark = needs_netns

#: The timeout of a resolution that a change must end far sooner.
LONG_MS = 20000
expect = functools.partial(resolving.expect, timeout=SOON)
READERS = pytest.mark.parametrize("read", [read_waiting, read_epoll])


def outcome(channel: EventChannel) -> CmEvent:
    """The event that ends a resolution; ADDR_CHANGE may come before it."""
    while True:
        event = channel.get_event(SOON)
        event.ack()
        if event.type is not CmEventType.ADDR_CHANGE:
            return event


def until(condition: Callable[[], bool], channel: EventChannel, what: str) -> None:
    """Wait for a change that wakes the channel without an event."""

    def holds() -> bool:
        if not condition():
            with contextlib.suppress(CmTimeoutError):
                channel.get_event(0.02)
            return False
        return True

    eventually(holds, what)


def device(name: str) -> Device:
    (found,) = (d for d in devices() if d.name == name)
    return found


def names() -> set[str]:
    return {d.name for d in devices()}


def table(name: str) -> dict[int, str]:
    """The GID table without link-local addresses."""
    return {
        row.gid_index: str(row.gid)
        for port in device(name).ports
        for row in port.gids
        if not str(row.gid).startswith("fe80")
    }


# -- while an address is being resolved ----------------------------------------------------------------------


class TestWhileResolving:
    @pytest.mark.parametrize(("dst", "src", "bits"), [("10.7.0.99", "10.7.0.1", 24), ("fd07::99", "fd07::1", 64)])
    @READERS
    def test_removed_source_ends_the_resolution(
        self, net: TwoHosts, dst: str, src: str, bits: int, read: Reader
    ) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), (src, 0), LONG_MS)
            no_event(channel)
            net.a.ip("address", "del", f"{src}/{bits}", "dev", "va")
            event = read(channel)
            event.ack()
            if event.type is CmEventType.ADDR_CHANGE:  # the id was also bound to the address
                assert event.status == -errno.EADDRNOTAVAIL
                event = read(channel)
                event.ack()
            assert (event.type, event.status) == (CmEventType.ADDR_ERROR, -errno.EADDRNOTAVAIL)
            assert src in event.message
            assert event.explanation is not None
            assert event.explanation.errno_name == "EADDRNOTAVAIL"
            assert event.explanation.hint
            assert cmid.state is State.ADDR_BOUND

    @pytest.mark.parametrize(("dst", "src", "bits"), [("10.7.0.99", "10.7.0.1", 24), ("fd07::99", "fd07::1", 64)])
    def test_removed_only_address_leaves_no_route(self, net: TwoHosts, dst: str, src: str, bits: int) -> None:
        # The source was not given: with the address, the kernel removes the route to the destination.
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip("address", "del", f"{src}/{bits}", "dev", "va")
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENETUNREACH)
            assert event.explanation is not None
            assert (event.explanation.error, event.explanation.errno_name) == ("route", "ENETUNREACH")

    def test_new_source_of_the_route_replaces_a_removed_one(self, net: TwoHosts) -> None:
        net.a.ip_batch("address add 10.70.0.1/24 dev va", "route add 10.9.0.0/16 via 10.7.0.99 src 10.70.0.1")
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.9.9.9", PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip_batch("address del 10.70.0.1/24 dev va", "route replace 10.9.0.0/16 via 10.7.0.2")
            expect(channel, CmEventType.ADDR_RESOLVED)
            assert cmid.local_addr == ("10.7.0.1", cmid.src_port)
            assert cmid.route.sgid == Gid("::ffff:10.7.0.1")

    @pytest.mark.parametrize("dst", ["10.9.9.9", "fd09::9"])
    def test_removed_route_ends_the_resolution(self, net: TwoHosts, dst: str) -> None:
        gateway = "fd07::99" if ":" in dst else "10.7.0.99"
        net.a.ip("route", "add", dst, "via", gateway)
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip("route", "del", dst)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENETUNREACH)
            assert dst in event.message
            assert cmid.state is State.ADDR_BOUND

    @pytest.mark.parametrize(("dst", "far"), [("10.7.2.1", "10.7.1.99"), ("fd07:2::1", "fd07:1::99")])
    @READERS
    def test_changed_gateway_is_resolved(self, dst: str, far: str, read: Reader) -> None:
        with three_hosts() as net, net.a.enter(), an_id() as (channel, cmid):
            net.a.ip("route", "add", dst, "via", far)
            cmid.resolve_addr((dst, PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip("route", "replace", dst, "via", net.ra.ipv6 if ":" in dst else net.ra.ipv4)
            expect(channel, CmEventType.ADDR_RESOLVED, read=read)
            route = cmid.explain().route
            assert route is not None
            assert route.gateway == (net.ra.ipv6 if ":" in dst else net.ra.ipv4)

    @pytest.mark.parametrize("dst", ["10.9.9.9", "fd09::9"])
    def test_new_rule_selects_another_table(self, net: TwoHosts, dst: str) -> None:
        family, near = ("-6", "fd07::2") if ":" in dst else ("-4", "10.7.0.2")
        silent = f"{near}9"
        net.a.ip_batch(f"route add {dst} via {silent}", f"route add {dst} via {near} table 100")
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip(family, "rule", "add", "to", dst, "lookup", "100")
            expect(channel, CmEventType.ADDR_RESOLVED)
            route = cmid.explain().route
            assert route is not None
            assert (route.gateway, route.table) == (near, 100)

    def test_route_over_another_interface_changes_the_device(self, net: TwoHosts) -> None:
        net.topology.link(net.a, "wa", net.b, "wb", addresses_a=["10.8.0.1/24"], addresses_b=["10.8.0.2/24"])
        net.a.ip("route", "add", "10.9.0.0/16", "via", "10.7.0.99")
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.9.9.9", PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip("route", "replace", "10.9.0.0/16", "via", "10.8.0.2")
            expect(channel, CmEventType.ADDR_RESOLVED)
            assert cmid.verbs.name == "soft_wa"
            assert cmid.local_addr == ("10.8.0.1", cmid.src_port)

    def test_destination_that_becomes_local_resolves(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.99", PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip("address", "add", "10.7.0.99/24", "dev", "va")
            expect(channel, CmEventType.ADDR_RESOLVED)
            assert cmid.explain().route is not None

    @pytest.mark.parametrize("dst", ["10.7.0.99", "fd07::99"])
    @pytest.mark.parametrize("command", [["link", "set", "dev", "va", "down"], ["link", "del", "dev", "va"]])
    def test_removed_interface_ends_the_resolution(self, net: TwoHosts, dst: str, command: list[str]) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr((dst, PORT), timeout_ms=LONG_MS)
            no_event(channel)
            net.a.ip(*command)
            event = expect(channel, CmEventType.ADDR_ERROR, -errno.ENETUNREACH)
            assert event.explanation is not None
            assert cmid.state is State.ADDR_BOUND

    def test_resolving_bound_id_gets_only_device_removal(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.99", PORT), ("10.7.0.1", 0), LONG_MS)
            no_event(channel)
            net.a.ip("link", "del", "dev", "va")
            assert outcome(channel).type is CmEventType.DEVICE_REMOVAL
            assert cmid.state is State.DEVICE_REMOVAL
            no_event(channel)

    def test_unrelated_changes_do_not_end_the_resolution(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.99", PORT), ("10.7.0.1", 0), 400)
            net.a.ip_batch(
                "address add 10.7.0.11/24 dev va",
                "address add fd07::11/64 dev va",
                "route add 10.9.0.0/16 via 10.7.0.2",
                "address del 10.7.0.11/24 dev va",
                "link add name br0 type bridge",
                "link set dev br0 up",
                "neigh add 10.7.0.98 lladdr 02:00:00:00:00:98 dev va",
            )
            expect(channel, CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)

    def test_synchronous_resolution_ends_when_its_route_is_removed(self, net: TwoHosts) -> None:
        net.a.ip("route", "add", "10.9.9.9", "via", "10.7.0.99")
        with CmId() as cmid:
            caught: list[BaseException] = []

            def work() -> None:
                try:
                    cmid.resolve_addr(("10.9.9.9", PORT), timeout_ms=LONG_MS)
                except RdmaError as error:
                    caught.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            while cmid.state is not State.ADDR_QUERY:
                thread.join(0.001)
            net.a.ip("route", "del", "10.9.9.9")
            thread.join(SOON)
            assert not thread.is_alive()
            (error,) = caught
            assert isinstance(error, RdmaError)
            assert error.errno == errno.ENETUNREACH


# -- while an id is bound ------------------------------------------------------------------------------------


class TestRemoval:
    @READERS
    @pytest.mark.parametrize("how", ["deleted", "moved away", "enslaved"])
    def test_removed_interface_sends_device_removal(self, net: TwoHosts, read: Reader, how: str) -> None:
        commands = {
            "deleted": ["link del dev va"],
            "moved away": [f"link set dev va netns {net.b.name}"],
            "enslaved": ["link add name br0 type bridge", "link set dev va master br0"],
        }
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", PORT))
            verbs = cmid.verbs
            assert verbs is not None
            assert verbs.device.name == "soft_va"
            net.a.ip_batch(*commands[how])
            event = read(channel)
            while event.type is CmEventType.ADDR_CHANGE:  # the interface may go down first
                event.ack()
                event = read(channel)
            with event:
                assert (event.type, event.status) == (CmEventType.DEVICE_REMOVAL, 0)
                assert event.id is cmid
                assert "va" in event.message
            assert cmid.state is State.DEVICE_REMOVAL
            calls: tuple[Callable[[], object], ...] = (
                lambda: cmid.bind_addr(("0.0.0.0", 0)),
                lambda: cmid.resolve_addr(("10.7.0.2", PORT)),
                cmid.resolve_route,
                lambda: cmid.set_option(OptionLevel.ID, IdOption.TOS, 1),
                lambda: cmid.migrate(None),
            )
            for call in calls:
                with pytest.raises(RdmaError) as caught:
                    call()
                assert caught.value.errno == errno.ENXIO
            with pytest.raises(RdmaError) as caught:
                verbs.query_port(1)
            assert caught.value.errno == errno.ENODEV
            assert "soft_va" not in names()
            no_event(channel)
            cmid.destroy()
            with CmId(channel) as other:  # the port is free again
                other.bind_addr(("0.0.0.0", PORT))

    def test_all_bound_ids_get_device_removal(self, net: TwoHosts) -> None:
        with contextlib.ExitStack() as stack:
            channels = [stack.enter_context(EventChannel()) for _ in range(2)]
            ids = [stack.enter_context(CmId(channel)) for channel in channels for _ in range(50)]
            for cmid in ids:
                cmid.bind_addr(("10.7.0.1", 0))
            elsewhere = stack.enter_context(CmId(channels[0]))
            elsewhere.bind_addr(("127.0.0.1", 0))
            everywhere = stack.enter_context(CmId(channels[0]))
            everywhere.bind_addr(("0.0.0.0", 0))
            net.a.ip("link", "del", "dev", "va")
            heard = set()
            for channel in channels:
                for _ in range(50):
                    event = outcome(channel)
                    assert event.type is CmEventType.DEVICE_REMOVAL
                    heard.add(event.id)
                no_event(channel)
            assert heard == set(ids)
            assert elsewhere.state is everywhere.state is State.ADDR_BOUND

    def test_resolved_id_gets_device_removal(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.2", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED)
            net.a.ip("link", "del", "dev", "va")
            assert outcome(channel).type is CmEventType.DEVICE_REMOVAL
            with pytest.raises(RdmaError) as caught:
                cmid.resolve_route()
            assert caught.value.errno == errno.ENXIO

    def test_device_removal_wakes_a_waiting_reader(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            events: list[CmEvent] = []
            thread = threading.Thread(target=lambda: events.append(outcome(channel)))
            thread.start()
            net.a.ip("link", "del", "dev", "va")
            thread.join(SOON)
            assert not thread.is_alive()
            assert events[0].type is CmEventType.DEVICE_REMOVAL

    def test_new_interface_of_the_same_name_is_another_device(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            net.a.ip("link", "del", "dev", "va")
            net.topology.link(net.a, "va", net.b, "vb", addresses_a=["10.7.0.1/24"], addresses_b=["10.7.0.2/24"])
            assert outcome(channel).type is CmEventType.DEVICE_REMOVAL
            assert cmid.state is State.DEVICE_REMOVAL
            with CmId(channel) as other:
                other.bind_addr(("10.7.0.1", 0))
                other.resolve_addr(("10.7.0.2", PORT))
                expect(channel, CmEventType.ADDR_RESOLVED)

    def test_renamed_interface_keeps_or_removes_the_device(self, net: TwoHosts) -> None:
        net.a.ip("link", "set", "dev", "va", "down")
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            net.a.ip_batch("link set dev va name vx", "link set dev vx up")
            net.a.settle("vx")
            until(lambda: "soft_vx" in names(), channel, "the device has its new name")
            # Either the device is still the same, or the id got DEVICE_REMOVAL.
            if cmid.state is not State.DEVICE_REMOVAL:
                assert cmid.verbs.query_gid(1, cmid.gid_index) == Gid("::ffff:10.7.0.1")


class TestAddressChange:
    @READERS
    @pytest.mark.parametrize("bound", ["10.7.0.1", "fd07::1"])
    def test_interface_going_down_sends_addr_change(self, net: TwoHosts, read: Reader, bound: str) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr((bound, 0))
            assert device("soft_va").ports[0].state is PortState.ACTIVE
            net.a.ip("link", "set", "dev", "va", "down")
            event = expect(channel, CmEventType.ADDR_CHANGE, -errno.ENETDOWN, read)
            assert event.id is cmid
            assert "va" in event.message
            assert device("soft_va").ports[0].state is PortState.DOWN
            assert cmid.verbs.query_port(1).state is PortState.DOWN
            assert cmid.state is State.ADDR_BOUND

    @READERS
    def test_lost_carrier_sends_addr_change(self, net: TwoHosts, read: Reader) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            net.b.ip("link", "set", "dev", "vb", "down")
            expect(channel, CmEventType.ADDR_CHANGE, -errno.ENETDOWN, read)
            assert device("soft_va").ports[0].state is PortState.DOWN
            net.b.ip("link", "set", "dev", "vb", "up")
            net.a.settle("va")
            assert device("soft_va").ports[0].state is PortState.ACTIVE
            cmid.resolve_addr(("10.7.0.2", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED)

    @READERS
    @pytest.mark.parametrize(("bound", "bits"), [("10.7.0.1", 24), ("fd07::1", 64)])
    def test_removed_address_sends_addr_change(self, net: TwoHosts, read: Reader, bound: str, bits: int) -> None:
        net.a.ip_batch("address add 10.7.0.11/32 dev va", "address add fd07::11/128 dev va nodad")
        with an_id() as (channel, cmid), CmId(channel) as other:
            cmid.bind_addr((bound, PORT))
            other.bind_addr((bound[:-1] + "11", 0))
            net.a.ip("address", "del", f"{bound}/{bits}", "dev", "va")
            event = expect(channel, CmEventType.ADDR_CHANGE, -errno.EADDRNOTAVAIL, read)
            assert event.id is cmid
            assert bound in event.message
            no_event(channel)

    @READERS
    def test_changed_mac_address_sends_addr_change(self, net: TwoHosts, read: Reader) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            before = device("soft_va").node_guid
            net.a.ip("link", "set", "dev", "va", "address", "02:00:00:00:07:01")
            event = expect(channel, CmEventType.ADDR_CHANGE, 0, read)
            assert "va" in event.message
            assert event.error is None
            assert before != device("soft_va").node_guid

    def test_all_resolved_ids_get_addr_change(self, net: TwoHosts) -> None:
        with EventChannel() as channel, CmId(channel) as first, CmId(channel) as second:
            for cmid in (first, second):
                cmid.resolve_addr(("10.7.0.2", PORT))
                expect(channel, CmEventType.ADDR_RESOLVED)
            net.a.ip("link", "set", "dev", "va", "down")
            told = {expect(channel, CmEventType.ADDR_CHANGE, -errno.ENETDOWN).id for _ in range(2)}
            assert told == {first, second}

    def test_wildcard_id_gets_no_addr_change(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("0.0.0.0", PORT))
            net.a.ip("link", "set", "dev", "va", "down")
            until(lambda: device("soft_va").ports[0].state is PortState.DOWN, channel, "the port is down")
            no_event(channel)
            assert cmid.state is State.ADDR_BOUND

    def test_unrelated_changes_send_no_event(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            net.a.ip_batch(
                "address add 10.7.0.11/24 dev va",
                "address add fd07::11/64 dev va",
                "address del fd07::11/64 dev va",
                "link set dev va mtu 1400",
                "link set dev lo down",
                "link set dev lo up",
            )
            assert "::ffff:10.7.0.11" in table("soft_va").values()
            no_event(channel)
            assert cmid.gid_index in table("soft_va")


# -- the devices ---------------------------------------------------------------------------------------------


class TestDevices:
    def test_each_interface_is_a_device(self, net: TwoHosts) -> None:
        net.topology.link(net.a, "wa", net.b, "wb", 9000)
        net.a.ip_batch("link add name br0 mtu 576 type bridge", "link set dev br0 up")
        found = {d.name: d for d in devices()}
        assert found.keys() == {"soft_lo", "soft_va", "soft_wa", "soft_br0"}
        assert len({d.node_guid for d in found.values()}) == 4
        assert all(d.node_guid for d in found.values())
        for name, one in found.items():
            (port,) = one.ports
            link = json.loads(net.a.ip("-j", "link", "show", name.removeprefix("soft_")))[0]
            assert one.index == link["ifindex"]
            assert one.provider == "soft"
            assert (one.node_type, one.transport_type) == (NodeType.CA, TransportType.IB)
            assert (port.port_num, port.link_layer, port.max_mtu) == (1, LinkLayer.ETHERNET, Mtu.MTU_4096)
            assert port.pkeys == (0xFFFF,)
            assert [row.gid_index for row in port.gids] == sorted({row.gid_index for row in port.gids})
            for row in port.gids:
                assert (row.gid_type, row.port_num) == (GidType.ROCE_V2, 1)
                assert (row.ndev_name, row.ndev_ifindex) == (link["ifname"], link["ifindex"])
        mtus = {name: d.ports[0].active_mtu for name, d in found.items()}
        assert mtus == {
            "soft_lo": Mtu.MTU_4096,
            "soft_va": Mtu.MTU_1024,
            "soft_wa": Mtu.MTU_4096,
            "soft_br0": Mtu.MTU_256,
        }
        # A stranger who knows the hardware address does not know the GUID; other processes of the host do.
        mac = bytes.fromhex(net.va.mac.replace(":", ""))
        guid = found["soft_va"].node_guid
        assert guid.to_bytes(8, "big")[:3] not in (mac[:3], bytes((mac[0] ^ 2,)) + mac[1:3])
        text = "import rdmacm\nfor d in rdmacm.devices(): print(d.name, d.node_guid)"
        shown = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        assert f"soft_va {guid}\n" in shown

    @pytest.mark.parametrize("watched", [True, False])
    def test_devices_follow_interfaces(self, net: TwoHosts, watched: bool) -> None:
        with contextlib.ExitStack() as stack:
            if watched:
                stack.enter_context(EventChannel())
            assert names() == {"soft_lo", "soft_va"}
            net.topology.link(net.a, "wa", net.b, "wb", addresses_a=["10.8.0.1/24"])
            assert names() == {"soft_lo", "soft_va", "soft_wa"}
            assert device("soft_wa").ports[0].state is PortState.ACTIVE
            net.a.ip("link", "set", "dev", "wa", "down")
            assert device("soft_wa").ports[0].state is PortState.DOWN
            net.a.ip("link", "del", "dev", "wa")
            assert names() == {"soft_lo", "soft_va"}

    def test_bridged_interface_has_no_device(self, net: TwoHosts) -> None:
        net.a.ip_batch("link add name br0 type bridge", "link set dev va master br0")
        assert names() == {"soft_lo", "soft_br0"}
        net.a.ip("link", "set", "dev", "va", "nomaster")
        assert names() == {"soft_lo", "soft_br0", "soft_va"}

    def test_each_namespace_has_its_own_devices(self, net: TwoHosts) -> None:
        assert names() == {"soft_lo", "soft_va"}
        with net.b.enter():
            assert names() == {"soft_lo", "soft_vb"}
        assert names() == {"soft_lo", "soft_va"}


class TestGidTable:
    def test_gid_keeps_its_index(self, net: TwoHosts) -> None:
        with EventChannel():
            before = table("soft_va")
            assert sorted(before.values()) == ["::ffff:10.7.0.1", "fd07::1"]
            net.a.ip("address", "add", "10.70.0.1/24", "dev", "va")
            net.a.ip("address", "add", "fd70::1/64", "dev", "va")
            net.a.settle("va")
            now = table("soft_va")
            assert now.items() > before.items()
            assert set(now.values()) - set(before.values()) == {"::ffff:10.70.0.1", "fd70::1"}

            (hole,) = (index for index, gid in before.items() if gid == "::ffff:10.7.0.1")
            net.a.ip("address", "del", "10.7.0.1/24", "dev", "va")
            less = table("soft_va")
            assert less == {index: gid for index, gid in now.items() if index != hole}

            net.a.ip("address", "add", "10.71.0.1/24", "dev", "va")  # takes the lowest free index
            assert table("soft_va") == {**less, hole: "::ffff:10.71.0.1"}

    def test_address_on_two_interfaces_is_in_both_gid_tables(self, net: TwoHosts) -> None:
        net.topology.link(net.a, "wa", net.b, "wb", addresses_a=["10.7.0.1/24"])
        assert "::ffff:10.7.0.1" in table("soft_va").values()
        assert "::ffff:10.7.0.1" in table("soft_wa").values()
        with an_id() as (channel, cmid):
            cmid.resolve_addr(("10.7.0.2", PORT))
            expect(channel, CmEventType.ADDR_RESOLVED)
            assert cmid.verbs.name == "soft_va"

    def test_tentative_address_has_no_gid(self, net: TwoHosts) -> None:
        net.a.sysctl("net.ipv6.conf.va.accept_dad", 1)
        net.a.sysctl("net.ipv6.neigh.va.retrans_time_ms", 300)
        with an_id() as (_, cmid):
            before = table("soft_va")
            net.a.ip("address", "add", "fd07::5/64", "dev", "va")
            assert table("soft_va") == before
            with pytest.raises(RdmaError) as caught:
                cmid.bind_addr(("fd07::5", 0))
            assert caught.value.errno == errno.EADDRNOTAVAIL
            net.a.settle("va")
            assert set(table("soft_va").values()) == {*before.values(), "fd07::5"}
            cmid.bind_addr(("fd07::5", 0))

    def test_duplicate_address_has_no_gid(self, net: TwoHosts) -> None:
        net.a.sysctl("net.ipv6.conf.va.accept_dad", 1)
        with EventChannel() as channel:
            before = table("soft_va")
            net.a.ip("address", "add", "fd07::2/64", "dev", "va")
            until(
                lambda: "fd07::2" in net.a.ip("address", "show", "dev", "va", "dadfailed"),
                channel,
                "the duplicate is detected",
            )
            assert table("soft_va") == before

    def test_point_to_point_interface_has_the_local_address_as_gid(self, net: TwoHosts) -> None:
        net.a.ip("address", "add", "10.60.0.1", "peer", "10.60.0.2", "dev", "va")
        assert "::ffff:10.60.0.1" in table("soft_va").values()
        assert "::ffff:10.60.0.2" not in table("soft_va").values()

    def test_context_of_a_bound_id_follows_the_gid_table(self, net: TwoHosts) -> None:
        with an_id() as (channel, cmid):
            cmid.bind_addr(("10.7.0.1", 0))
            verbs = cmid.verbs
            assert verbs is not None
            assert verbs.query_gid(1, cmid.gid_index) == Gid.from_ip(inet_pton(AF_INET, "10.7.0.1"))
            net.a.ip("address", "add", "fd07::12/64", "dev", "va", "nodad")
            net.a.settle("va")
            wanted = Gid.from_ip(inet_pton(AF_INET6, "fd07::12"))
            until(
                lambda: wanted in {row.gid for row in verbs.query_gid_table()}, channel, "the address is in the table"
            )
            (row,) = (row for row in verbs.query_gid_table() if row.gid == wanted)
            assert verbs.query_gid(1, row.gid_index) == wanted
            net.a.ip("address", "del", "fd07::12/64", "dev", "va")
            with pytest.raises(RdmaError) as caught:
                verbs.query_gid_ex(1, row.gid_index)
            assert caught.value.errno == errno.ENODATA
            assert verbs.query_gid(1, row.gid_index) == Gid()
            no_event(channel)
