"""Resolution on hardware devices, which have several ports, VLANs, port states and port MTUs."""

from __future__ import annotations

import errno

import pytest

from rdmacm.address import DEFAULT_PKEY, Gid, InetAddr, parse_address
from rdmacm.errors import Failure
from rdmacm.net.types import InterfaceFlag
from rdmacm.resolution.hosts import HostView, RocePortView
from rdmacm.resolution.lookup import Found, Lookup, find
from rdmacm.resolution.path import PathMaker
from rdmacm.testing import MemoryNetwork
from rdmacm.verbs.device import Device, GidEntry, Port
from rdmacm.verbs.enums import GidType, LinkLayer, Mtu, NodeType, PortState, TransportType

PROVIDER = "kernel"
UP = int(InterfaceFlag.UP | InterfaceFlag.RUNNING)


def ip(text: str) -> bytes:
    return address(text).ip


def address(text: str) -> InetAddr:
    parsed = parse_address((text, 7471))
    assert isinstance(parsed, InetAddr)
    return parsed


class Host:
    """A host with an adapter of two ports, ``mlx5_0``: port 1 on ``eth0`` and its VLAN, port 2 on ``eth1``.

    The device index has nothing to do with the interface indices.
    """

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.eth0 = self.network.add_interface("eth0", "10.0.0.1/24", mtu=9000)
        self.vlan = self.network.add_interface("eth0.5", "10.0.5.1/24", mtu=1500)
        self.eth1 = self.network.add_interface("eth1", "10.1.0.1/24", mtu=9000)
        self.interfaces = {interface.index: interface for interface in self.network.interfaces()}
        #: State and active MTU of each port.
        self.ports = {1: (PortState.ACTIVE, Mtu.MTU_4096), 2: (PortState.ACTIVE, Mtu.MTU_1024)}

    def row(self, port_num: int, index: int, text: str, ifindex: int, gid_type: GidType = GidType.ROCE_V2) -> GidEntry:
        name = self.interfaces[ifindex].name
        return GidEntry(Gid.from_ip(ip(text)), index, port_num, gid_type, name, ifindex)

    def port(self, port_num: int, rows: tuple[GidEntry, ...]) -> Port:
        state, mtu = self.ports[port_num]
        return Port(port_num, state, LinkLayer.ETHERNET, Mtu.MTU_4096, mtu, rows, (DEFAULT_PKEY,))

    def view(self) -> HostView:
        first = (
            self.row(1, 2, "10.0.0.1", self.eth0, GidType.ROCE_V1),
            self.row(1, 3, "10.0.0.1", self.eth0),
            self.row(1, 5, "10.0.5.1", self.vlan),
        )
        ports = self.port(1, first), self.port(2, (self.row(2, 3, "10.1.0.1", self.eth1),))
        device = Device("mlx5_0", 0, PROVIDER, NodeType.CA, TransportType.IB, 0x0200, ports)
        interfaces = self.interfaces[self.eth0], self.interfaces[self.eth1]
        views = [RocePortView(device, port, interface) for port, interface in zip(ports, interfaces, strict=True)]
        return HostView.of(PROVIDER, views, self.interfaces)

    def lookup(self, destination: str, source: str | None = None, bound: int | None = None) -> Lookup:
        view = self.view()
        given = None if source is None else address(source)
        return Lookup(view, address(destination), given, "given", 0, None if bound is None else view.ports[bound - 1])

    def find(self, lookup: Lookup) -> Found:
        return find(self.network, lookup)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize(
    ("destination", "port_num", "gid_index"),
    [("10.0.0.9", 1, 3), ("10.0.5.9", 1, 5), ("10.1.0.9", 2, 3)],
    ids=["first port", "VLAN of the first port", "second port"],
)
def test_route_selects_the_port_and_the_gid(host: Host, destination: str, port_num: int, gid_index: int) -> None:
    lookup = host.lookup(destination)
    found = host.find(lookup)
    assert (found.view.device.name, found.view.port_num, found.row.gid_index) == ("mlx5_0", port_num, gid_index)
    assert found.next_hop is not None
    assert found.next_hop[1] == found.row.ndev_ifindex
    explanation = lookup.explain(None, None)
    assert (explanation.ok, explanation.provider) == (True, PROVIDER)
    assert explanation.chosen is not None
    assert (explanation.chosen.port_num, explanation.chosen.gid_index) == (port_num, gid_index)
    assert len(explanation.candidates) == 4
    assert f"device mlx5_0 port {port_num} GID index {gid_index}" in explanation.text()


def test_choice_that_was_made_before_is_explained_alike(host: Host) -> None:
    first, second = host.lookup("10.0.0.9"), host.lookup("10.0.0.9")
    second.host = first.host
    assert host.find(first) == host.find(second)
    assert [name for name, _, _ in second.steps] == [name for name, _, _ in first.steps] == ["route", "select"]
    known, again = (lookup.explain(None, None).replace(steps=()) for lookup in (first, second))
    assert known == again
    assert len(known.candidates) == 4


def test_explanation_gives_the_rule_that_excluded_each_gid(host: Host) -> None:
    lookup = host.lookup("10.0.0.9")
    host.find(lookup)
    rules = {(c.port_num, c.gid_index): c.rule for c in lookup.explain(None, None).candidates}
    assert rules == {(1, 3): "chosen", (1, 2): "gid-type", (1, 5): "source-address", (2, 3): "source-address"}


def test_source_address_on_a_vlan_selects_the_vlan(host: Host) -> None:
    host.network.add_route("192.0.2.0/24", host.eth1)
    with pytest.raises(Failure) as caught:
        host.find(host.lookup("192.0.2.1", "10.0.5.1"))
    assert (caught.value.step, caught.value.errno) == ("route", errno.ENETUNREACH)
    assert "through eth0.5" in caught.value.message
    assert host.find(host.lookup("10.0.5.9", "10.0.5.1")).row.gid_index == 5


def test_bound_id_resolves_only_on_its_port(host: Host) -> None:
    assert host.find(host.lookup("10.1.0.9", bound=2)).view.port_num == 2
    lookup = host.lookup("10.1.0.9", bound=1)
    with pytest.raises(Failure) as caught:
        host.find(lookup)
    assert (caught.value.step, caught.value.errno) == ("select", errno.ENODEV)
    reasons = {c.port_num: c.reason for c in lookup.explain(None, caught.value).candidates if c.rule == "bound-device"}
    assert reasons == {2: "the id is bound to mlx5_0 port 1"}


@pytest.mark.parametrize("state", [PortState.DOWN, PortState.INIT, PortState.ARMED])
def test_inactive_port_is_not_selected(host: Host, state: PortState) -> None:
    host.ports[2] = state, Mtu.MTU_1024
    lookup = host.lookup("10.1.0.9")
    with pytest.raises(Failure) as caught:
        host.find(lookup)
    assert (caught.value.step, caught.value.errno) == ("select", errno.ENODEV)
    assert caught.value.message == f"mlx5_0 port 2 is {state.name}, not ACTIVE"
    explanation = lookup.explain(None, caught.value)
    assert explanation.chosen is None
    assert {c.rule for c in explanation.candidates if c.port_num == 2} == {"port-state"}
    assert host.find(host.lookup("10.0.0.9")).view.port_num == 1, "the other port is ACTIVE"


def test_active_port_is_selected_without_carrier_on_its_interface(host: Host) -> None:
    interface = host.interfaces[host.eth1]
    host.interfaces[host.eth1] = interface._replace(flags=interface.flags & ~UP)
    assert host.find(host.lookup("10.1.0.9")).view.port_num == 2


@pytest.mark.parametrize(
    ("destination", "route_mtu", "mtu"),
    [("10.0.0.9", 0, 4096), ("10.0.5.9", 0, 1024), ("10.1.0.9", 0, 1024), ("192.0.2.1", 600, 256)],
    ids=["port and interface", "VLAN interface", "port", "route"],
)
def test_path_mtu_is_the_minimum_of_port_interface_and_route(
    host: Host, destination: str, route_mtu: int, mtu: int
) -> None:
    if route_mtu:
        host.network.add_route("192.0.2.0/24", host.eth0, mtu=route_mtu)
    lookup = host.lookup(destination)
    found = host.find(lookup)
    path = PathMaker(host.network).make(lookup, 4711)
    assert path.mtu_bytes == mtu
    assert (path.sgid, path.dgid) == (found.row.gid, Gid.from_ip(ip(destination)))


def test_lower_device_index_wins_on_a_shared_interface(host: Host) -> None:
    view = host.view()
    rows = (host.row(1, 0, "10.0.0.1", host.eth0),)
    other = Device("rxe0", 7, PROVIDER, NodeType.CA, TransportType.IB, 0x0201, (host.port(1, rows),))
    both = [RocePortView(other, other.ports[0], host.interfaces[host.eth0]), *view.ports]
    for ports in (both, both[::-1]):
        lookup = Lookup(HostView.of(PROVIDER, ports, host.interfaces), address("10.0.0.9"), None, "given")
        assert host.find(lookup).view.device.name == "mlx5_0"
        rules = {c.device: c.rule for c in lookup.explain(None, None).candidates if c.kept}
        assert rules == {"mlx5_0": "lowest-index", "rxe0": "lowest-index"}
