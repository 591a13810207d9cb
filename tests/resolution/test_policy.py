"""The rules that choose a source, device and GID: selection, explanation and documentation agree."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacm import explain
from rdmacm.address import Gid, InetAddr, parse_address
from rdmacm.net.types import RouteEntry
from rdmacm.resolution.hosts import RocePortView
from rdmacm.resolution.ipoib import with_infiniband
from rdmacm.resolution.policy import PREFERENCES, RULES, Query, choose, judge
from rdmacm.soft.devices import read_host
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing import MemoryNetwork, MemorySubnet, memory_provider
from rdmacm.verbs.enums import LinkLayer
from support.examples import MANY_EXAMPLES

#: The view of an InfiniBand port in partitions 0xFFFF and 0x8001.
SUBNET = MemorySubnet()
PORT = SUBNET.add_port("mlx5_0", pkeys=(0xFFFF, 0x8001))
PROVIDER = memory_provider(MemoryNetwork(), SUBNET.clock, infiniband=[PORT])
assert isinstance(PROVIDER, SoftProvider)
PORTS = PROVIDER.host.ib.views()
GIDS = [PORT.port().gids[0], Gid("fe80::1:2:3")]
HOSTS = ["10.0.0.1", "10.0.0.2", "10.1.0.1", "127.0.0.1", "fd00::1", "fe80::1"]


@st.composite
def queries(draw: st.DrawFn) -> tuple[MemoryNetwork, Query]:
    network = MemoryNetwork()
    for number in range(draw(st.integers(1, 4))):
        addresses = draw(st.lists(st.sampled_from(HOSTS), unique=True, max_size=4))
        texts = [f"{host}/{64 if ':' in host else 24}" for host in addresses]
        up = draw(st.booleans())
        if draw(st.booleans()):
            gid, pkey = draw(st.sampled_from(GIDS)), draw(st.sampled_from([0xFFFF, 0x8001, 0x8002]))
            network.add_ipoib_interface(f"ib{number}", *texts, gid=gid, pkey=pkey, up=up)
        else:
            network.add_interface(f"eth{number}", *texts, up=up)
    host = with_infiniband(read_host(network), PORTS)
    destination = parse_address((draw(st.sampled_from(["10.0.0.9", "10.0.0.1", "fd00::9", "fe80::1"])), 1))
    assert isinstance(destination, InetAddr)
    sources = [s for s in HOSTS if (":" in s) == (destination.family == 10)]
    source = parse_address((draw(st.sampled_from(sources)), 0))
    assert isinstance(source, InetAddr)
    egress = draw(st.sampled_from(sorted(host.interfaces)))
    kind = draw(st.sampled_from(["unicast", "local"]))
    bound = draw(st.sampled_from([None, *host.ports, *PORTS]))
    link_layer = draw(st.sampled_from([None, LinkLayer.ETHERNET, LinkLayer.INFINIBAND]))
    route = RouteEntry(kind, destination.ip, egress, None, source.ip, 254)
    origin = draw(st.sampled_from(["given", "bound", "route"]))
    return network, Query(destination, source.ip, origin, route, "egress", bound, link_layer)


@settings(max_examples=MANY_EXAMPLES)
@given(queries())
def test_selection_and_explanation_agree(network_and_query: tuple[MemoryNetwork, Query]) -> None:
    network, query = network_and_query
    host = with_infiniband(read_host(network), PORTS)
    choice = choose(query, host)
    judged = judge(query, host)
    chosen = [c for c in judged if c.chosen]
    if choice is None:
        assert chosen == []
        assert not any(c.kept for c in judged)
    else:
        view, row, _ = choice
        (candidate,) = chosen
        assert (candidate.device, candidate.gid_index, candidate.gid) == (view.device.name, row.gid_index, str(row.gid))
    addresses = sum(len(view.rows) for view in host.ports) + sum(len(one.ips) for one in host.ipoib)
    assert len(judged) == addresses, "every candidate is listed"
    names = {rule.name for rule in RULES}
    for candidate in judged:
        assert candidate.reason
        assert candidate.kept == (candidate.rule not in names)


def test_each_rule_can_decide() -> None:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24", "fd00::1/64")
    network.add_interface("eth1", "10.0.0.1/24", "10.1.0.1/24")
    network.add_interface("eth2", "10.0.0.1/24", up=False)
    host = read_host(network)
    destination = parse_address(("10.0.0.9", 1))
    assert isinstance(destination, InetAddr)
    source = parse_address(("10.0.0.1", 0))
    assert isinstance(source, InetAddr)

    def rules(bound: RocePortView | None, kind: str = "unicast") -> set[str]:
        route = RouteEntry(kind, destination.ip, eth0, None, source.ip, 254)
        return {c.rule for c in judge(Query(destination, source.ip, "route", route, "eth0", bound), host)}

    assert rules(None) == {"address-family", "source-address", "egress-interface", "chosen"}
    assert rules(host.by_key[eth0, 1]) == {"address-family", "bound-device", "chosen"}
    assert rules(None, "local") == {"address-family", "source-address", "port-state", "lowest-index"}


def test_each_rule_of_ipoib_can_decide() -> None:
    network = MemoryNetwork()
    interfaces = [
        network.add_ipoib_interface("ib0", "10.0.0.1/24", "fd00::1/64", gid=GIDS[0]),
        network.add_ipoib_interface("ib1", "10.0.0.1/24", gid=GIDS[1]),
        network.add_ipoib_interface("ib2", "10.0.0.1/24", gid=GIDS[0], pkey=0x8002),
        network.add_ipoib_interface("ib3", "10.0.0.1/24", gid=GIDS[0], up=False),
    ]
    host = with_infiniband(read_host(network), PORTS)
    destination, source = parse_address(("10.0.0.9", 1)), parse_address(("10.0.0.1", 0))
    assert isinstance(destination, InetAddr)
    assert isinstance(source, InetAddr)
    rules = []
    for ifindex in interfaces:
        route = RouteEntry("unicast", destination.ip, ifindex, None, source.ip, 254)
        judged = judge(Query(destination, source.ip, "route", route, "ib", None), host)
        rules += [c.rule for c in judged if c.interface == host.interface_name(ifindex) and c.source == "10.0.0.1"]
        assert {c.rule for c in judged if c.source == "fd00::1"} == {"address-family"}
    assert rules == ["chosen", "infiniband-port", "partition", "port-state"]
    route = RouteEntry("local", destination.ip, 1, None, source.ip, 255)
    own = Query(destination, source.ip, "route", route, "lo", None, LinkLayer.ETHERNET)
    assert {c.rule for c in judge(own, host) if c.source == "10.0.0.1"} == {"egress-interface"}


def test_documentation_lists_the_rules_in_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "resolution.md").read_text()
    documented = re.findall(r"^\d+\. \*\*([a-z-]+)\*\*: (.+)$", text, re.MULTILINE)
    assert documented == [(r.name, r.text) for r in RULES] + [(p.name, p.text) for p in PREFERENCES]


def test_explanation_lists_the_rejected_candidates() -> None:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24", "10.0.0.5/24")
    network.add_neighbour(eth0, "10.0.0.2")
    explanation = explain("10.0.0.2", 7471, provider=memory_provider(network))
    assert explanation.ok
    chosen = explanation.chosen
    assert chosen is not None
    assert (chosen.source, chosen.device, chosen.gid_index) == ("10.0.0.1", "soft_eth0", 0)
    rivals = {c.source: (c.rule, c.reason) for c in explanation.candidates if not c.chosen}
    assert rivals["10.0.0.5"] == ("source-address", "the route prefers source 10.0.0.1")
    assert [step.name for step in explanation.steps] == ["name", "bind", "route", "select", "neighbour", "path"]
    assert all(step.microseconds >= 0 for step in explanation.steps)
    assert explanation.path is not None
    assert explanation.path["mtu"] == 1024
    assert "10.0.0.2:7471" in explanation.text()


def test_explanation_covers_every_address_of_a_name() -> None:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24", "fd00::1/64")
    network.add_neighbour(eth0, "10.0.0.2")
    answers = [
        (10, 1, 6, "storage-7.example", ("2001:db8::7", 7471, 0, 0)),
        (2, 1, 6, "", ("10.0.0.2", 7471)),
        (2, 1, 6, "", ("10.0.0.3", 7471)),
    ]
    explanation = explain("storage-7", 7471, provider=memory_provider(network), resolver=lambda *_: answers)
    assert explanation.names == ("[2001:db8::7]:7471", "10.0.0.2:7471", "10.0.0.3:7471")
    assert explanation.chosen is not None
    assert explanation.chosen.destination == "10.0.0.2:7471"
    assert any("2001:db8::7" in note and "ENETUNREACH" in note for note in explanation.notes)
    later = [c for c in explanation.candidates if c.destination == "10.0.0.3:7471" and c.rule == "name-order"]
    assert len(later) == 1


def test_explanation_names_the_failed_step() -> None:
    network = MemoryNetwork()
    network.add_interface("eth0", "10.0.0.1/24")
    provider = memory_provider(network)
    unrouted = explain("192.0.2.1", 1, provider=provider)
    assert (unrouted.ok, unrouted.error, unrouted.errno_name) == (False, "route", "ENETUNREACH")
    assert unrouted.hint
    silent = explain("10.0.0.9", 1, provider=provider, timeout_ms=20)
    assert (silent.error, silent.errno_name) == ("neighbour", "ETIMEDOUT")
    assert silent.neighbour is not None
    assert silent.neighbour.state == "absent"
    assert silent.chosen is None
    assert {c.rule for c in silent.candidates if c.source == "10.0.0.1"} == {"neighbour"}
    unresolved = explain("300.1.1.1", 1, flags=2, provider=provider)
    assert (unresolved.error, unresolved.errno_name) == ("name", "EAI_NONAME")
    data = silent.as_dict()
    assert data["ok"] is False
    assert data["chosen"] is None
