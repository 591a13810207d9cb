"""Rules of addresses, routes, neighbours, ports and connections: faults that are made in network namespaces."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rdmacm import listen
from rdmacm.doctor import Host, Quiet, collect, examine
from rdmacm.doctor.ask import ask
from rdmacm.doctor.view import Attempt, Bond, Target, packed
from rdmacm.explanation import Explanation, RouteUsed
from rdmacm.net.tables import Tables
from support import netns
from support.doctor import Tree, fires, silent
from support.listeners import rejecting
from support.netns import TwoHosts, needs_netns, two_hosts

pytestmark = needs_netns


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    with two_hosts() as net:
        yield net


def seen(host: netns.Host, node: str = "", source: str = "", port: int = 0, *, timeout_ms: int = 2000) -> Host:
    """What is measured on a host, with the software devices."""
    with host.enter():
        target = ask(node, source, port, "soft", timeout_ms) if node or port else None
        return replace(collect(provider="soft"), target=target)


def with_kernel(host: Host, tree: Tree, node: str = "", source: str = "") -> Host:
    """The same host, with an adapter of the kernel's on its first interface."""
    devices = tree.host().devices
    ports = [replace(port, port=replace(port.port, gids=())) for port in devices[0].ports]
    device = replace(devices[0], ports=tuple(ports), parent="va")
    target = Target(node, source, addresses=(packed(node),)) if node else None
    return replace(host, provider="kernel", devices=(device,), target=target)


def test_two_hosts_are_healthy(net: TwoHosts) -> None:
    assert examine(seen(net.a, "10.7.0.2")).findings == []
    assert examine(seen(net.a, "fd07::2", "fd07::1")).findings == []


def test_tables_of_routing(net: TwoHosts) -> None:
    net.a.ip("rule", "add", "from", "10.7.0.1", "table", "100")
    net.a.ip("route", "add", "10.3.0.0/16", "via", "10.7.0.2", "table", "100")
    with net.a.enter():
        tables = Tables()
        routes, rules = tables.routes(), tables.rules()
        tables.close()
    assert ("10.3.0.0/16", packed("10.7.0.2"), 100) in [(each.destination, each.gateway, each.table) for each in routes]
    assert 100 in {rule.table for rule in rules}


def test_source_without_a_device(net: TwoHosts) -> None:
    silent(seen(net.a, "10.7.0.2"), "A1")
    silent(seen(net.a), "A1")
    # The address is on the loopback interface, whose device does not lead there.
    net.a.ip_batch("address add 10.8.0.1/32 dev lo", "route replace 10.7.0.0/24 dev va src 10.8.0.1")
    fires(seen(net.a, "10.7.0.2"), "A1", "leaves by va, source 10.8.0.1", "10.7.0.1")


def test_own_address_on_loopback(net: TwoHosts, tmp_path: Path) -> None:
    host, tree = seen(net.a), Tree(tmp_path)
    silent(seen(net.a, "127.0.0.1"), "A2")
    silent(with_kernel(host, tree, "10.7.0.1"), "A2")
    fires(with_kernel(host, tree, "127.0.0.1"), "A2", "127.0.0.1", "10.7.0.1, an address of an RDMA interface")


def test_no_route(net: TwoHosts) -> None:
    silent(seen(net.a, "10.7.0.2"), "A3")
    fires(seen(net.a, "10.9.0.1"), "A3", "no route to 10.9.0.1", "ENETUNREACH")
    net.a.ip("route", "add", "unreachable", "10.9.0.0/16")
    fires(seen(net.a, "10.9.0.1"), "A3", "unreachable route", "EHOSTUNREACH")
    net.a.ip("route", "replace", "prohibit", "10.9.0.0/16")
    net.a.ip("rule", "add", "from", "10.7.0.77", "table", "77")
    fires(seen(net.a, "10.9.0.1"), "A3", "prohibit", "tables 77")


def test_source_is_gone(net: TwoHosts) -> None:
    silent(seen(net.a, "10.7.0.2", "10.7.0.1"), "A4")
    silent(seen(net.a, "10.7.0.2"), "A4")
    fires(seen(net.a, "10.7.0.2", "10.7.0.99"), "A4", "10.7.0.99 is no address", "10.7.0.1")


def test_few_ports(net: TwoHosts) -> None:
    silent(seen(net.a), "A5")
    net.a.sysctl("net.ipv4.ip_local_port_range", "40000 40009")
    fires(seen(net.a), "A5", "40000 40009 has 10 ports", "sysctl net.ipv4.ip_local_port_range")
    net.a.sysctl("net.ipv4.ip_local_port_range", "40000 50000")
    silent(replace(seen(net.a), cm_ids=100), "A5")
    fires(replace(seen(net.a), cm_ids=9900), "A5", "9900 ids of rdma_cm")


def test_link_local_without_scope(net: TwoHosts) -> None:
    address = net.vb.link_local
    silent(seen(net.a, f"{address}%va"), "A6")
    fires(seen(net.a, address), "A6", f"{address}%va")


def test_families_differ(net: TwoHosts) -> None:
    silent(seen(net.a, "fd07::2", "fd07::1"), "A7")
    fires(seen(net.a, "fd07::2", "10.7.0.1"), "A7", "10.7.0.1 is IPv4", "fd07::2 IPv6")


def test_port_is_taken(net: TwoHosts) -> None:
    with net.a.enter(), listen(("10.7.0.1", 7471), provider="soft"):
        fires(seen(net.a, "", "10.7.0.1", 7471), "A8", "port 7471 is in use", "source port 0")
        silent(seen(net.a, "", "10.7.0.1", 7472), "A8")
    silent(seen(net.a, "", "10.7.0.1", 7471), "A8")


def test_privileged_port(net: TwoHosts) -> None:
    """A process without the capability is in test_tool.py."""
    host = seen(net.a, port=80)
    silent(host, "A9")
    fires(replace(host, capabilities=0, target=Target(port=80)), "A9", "port 80 is below 1024", "setcap")
    denied = Attempt(False, "bind_addr", errno.EACCES, 0, "port 80 is privileged")
    fires(replace(host, target=Target(port=80, attempt=denied)), "A9", "port 80 is privileged")
    silent(replace(host, capabilities=0, target=Target(port=7471)), "A9")


def test_next_hop_does_not_answer(net: TwoHosts) -> None:
    silent(seen(net.a, "10.7.0.2"), "A10")
    fires(seen(net.a, "10.7.0.77", timeout_ms=200), "A10", "10.7.0.77 on va does not answer", "ping -I va 10.7.0.77")


def test_two_interfaces_in_one_subnet(net: TwoHosts) -> None:
    silent(seen(net.a), "A11")
    net.topology.link(net.a, "wa", net.b, "wb", addresses_a=("10.7.0.3/24",))
    fires(seen(net.a), "A11", "va, wa are in one subnet, 10.7.0.0/24", "arp_ignore 0")
    net.a.sysctl("net.ipv4.conf.all.arp_ignore", 1)
    net.a.sysctl("net.ipv4.conf.all.arp_announce", 2)
    silent(seen(net.a), "A11")
    net.a.sysctl("net.ipv4.conf.wa.rp_filter", 1)
    fires(seen(net.a), "A11", "wa rp_filter 1")


def test_two_ports_of_one_host(net: TwoHosts, tmp_path: Path) -> None:
    net.topology.link(net.a, "wa", net.b, "wb", addresses_a=("10.8.0.1/24", "fd08::1/64"))
    tree = Tree(tmp_path)
    fires(with_kernel(seen(net.a), tree, "10.8.0.1", "10.7.0.1"), "A12", "va accept_local 0", "accept_local=1")
    fires(with_kernel(seen(net.a), tree, "fd08::1", "fd07::1"), "A13", "on wa, the source on va")
    silent(with_kernel(seen(net.a), tree, "10.8.0.1", "10.7.0.1"), "A13")
    silent(with_kernel(seen(net.a), tree, "10.7.0.2", "10.7.0.1"), "A12")
    net.a.sysctl("net.ipv4.conf.all.accept_local", 1)
    silent(with_kernel(seen(net.a), tree, "10.8.0.1", "10.7.0.1"), "A12")


def test_vlan_on_a_bond(net: TwoHosts, tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    silent(with_kernel(seen(net.a), tree), "A15")
    net.a.ip_batch("rule add from 10.7.0.1 table 101", "rule add from 10.8.0.1 table 102")
    stacked = replace(with_kernel(seen(net.a), tree), vlans={"va": "bond0"}, bonds={"bond0": Bond("")})
    fires(stacked, "A15", "va are VLANs on a bond", "tables 101, 102")
    net.a.ip("rule", "delete", "table", "102")
    silent(replace(stacked, rules=seen(net.a).rules), "A15")


def test_name_leads_to_loopback(net: TwoHosts) -> None:
    host = seen(net.a)
    fires(replace(host, target=Target("node7", is_name=True, addresses=(b"\x7f\0\1\1",))), "A16", "node7 is 127.0.1.1")
    silent(replace(host, target=Target("node7", is_name=True, addresses=(packed("10.7.0.2"),))), "A16")
    silent(seen(net.a, "localhost"), "A16")


def test_one_bad_address_of_two(net: TwoHosts) -> None:
    host = seen(net.a)
    route = RouteUsed("10.7.0.2", "unicast", "va", None, "10.7.0.1", 254, 0, 1500)
    both = Target("peer", addresses=(packed("10.9.0.1"), packed("10.7.0.2")), is_name=True)
    note = "10.9.0.1: no route to 10.9.0.1 [ENETUNREACH]"
    bad = replace(both, explanation=Explanation("peer", None, "soft", route=route, notes=(note,)))
    fires(replace(host, target=bad), "A17", "of 2 addresses of peer", note, note=True)
    silent(replace(host, target=replace(both, explanation=Explanation("peer", None, "soft", route=route))), "A17")


def test_interface_is_down(net: TwoHosts) -> None:
    silent(seen(net.a), "A18")
    net.a.ip("link", "set", "va", "down")
    fires(seen(net.a), "A18", "interface va is down", "ip link set va up")


def test_interface_without_carrier(net: TwoHosts) -> None:
    net.b.ip("link", "set", "vb", "down")
    net.a.settle_without_carrier("va")
    fires(seen(net.a), "A18", "interface va has no carrier")


def test_small_mtu(net: TwoHosts) -> None:
    silent(seen(net.a), "G8")
    net.a.ip("-4", "address", "flush", "dev", "va")
    net.a.ip("link", "set", "va", "mtu", "300")
    net.a.ip("address", "add", "10.7.0.1/24", "dev", "va")
    fires(seen(net.a), "G8", "MTU 300 of va", "ip link set va mtu 1500")


def test_port_of_packets_is_taken(net: TwoHosts) -> None:
    silent(seen(net.a), "D10")
    with net.a.enter(), listen(("10.7.0.1", 0), provider="soft"):
        assert "sockets of rdmacm" in str(silent(seen(net.a), "D10"))
    with net.b.enter(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 4791))
        fires(seen(net.b), "D10", "UDP port 4791 of 0.0.0.0 is taken by process", "kill")


# -- connections ---------------------------------------------------------------------------------------------


def test_nobody_listens(net: TwoHosts) -> None:
    with net.b.enter(), listen(("10.7.0.2", 7471), provider="soft"):
        fires(seen(net.a, "10.7.0.2", port=7472), "J1", "10.7.0.2 port 7472: reason 8", "start the listener")
    silent(seen(net.a, "10.7.0.2"), "J1")


def test_application_refuses(net: TwoHosts) -> None:
    def serve(is_taken: bool) -> None:
        request = listener.get_request(timeout=60)
        if is_taken:
            request.accept().close()
        else:
            request.reject(b"no")

    with net.b.enter():
        listener = listen(("10.7.0.2", 7471), provider="soft")
    with listener:
        for is_taken in (False, True):
            thread = threading.Thread(target=serve, args=(is_taken,))
            thread.start()
            host = seen(net.a, "10.7.0.2", port=7471)
            thread.join()
            if is_taken:
                silent(host, "J3")
                silent(host, "J1")
                assert examine(host).findings == []
            else:
                fires(host, "J3", "reason 28", "the log of the listener")


@pytest.mark.parametrize(
    ("rule", "reason", "texts"),
    [("J2", 10, ("reason 10", "timewait")), ("J5", 4, ("reason 4", "max_wr")), ("J2", 8, ()), ("J5", 8, ())],
)
def test_peer_rejects(net: TwoHosts, rule: str, reason: int, texts: tuple[str, ...]) -> None:
    """A REJ on the wire, of a peer that is not rdmacm: J2 fires, and J5; J6 says what an errno of that number is."""
    with rejecting(net.b, "10.7.0.2", reason):
        host = seen(net.a, "10.7.0.2", port=7471)
    if not texts:
        silent(host, "J2")
        silent(host, "J5")
    elif rule == "J2":
        fires(host, "J2", *texts)
    else:
        fires(host, "J5", *texts)
    text = f'status {reason} of REJECTED is a reason; as an errno, a program prints "{os.strerror(reason)}"'
    fires(host, "J6", text, note=True)


def test_no_reject(net: TwoHosts) -> None:
    host = seen(net.a, "10.7.0.2", port=7471)  # nobody has the port
    for rule in (silent(host, "J2"), silent(host, "J5"), silent(host, "J6")):
        assert isinstance(rule, Quiet)
    silent(seen(net.a, "10.7.0.2"), "J6")


def test_gateway(net: TwoHosts, tmp_path: Path) -> None:
    net.a.ip("route", "add", "10.3.0.0/16", "via", "10.7.0.2")
    for node in ("10.3.0.1", "10.7.0.2"):
        host = seen(net.a, node)
        host = replace(with_kernel(host, Tree(tmp_path / node), node), target=host.target)
        if node == "10.3.0.1":
            fires(host, "G5", "10.3.0.1 is behind the gateway 10.7.0.2", note=True)
        else:
            silent(host, "G5")


def test_rails_of_a_host(net: TwoHosts, tmp_path: Path) -> None:
    """Two rails, and a peer in the subnet of one of them, by the tables of the system."""
    net.topology.link(net.a, "wa", net.b, "wb", addresses_a=("10.8.0.1/24",), addresses_b=("10.8.0.2/24",))
    tree = Tree(tmp_path)
    tree.device("mlx5_1", "mlx5_core")

    def rails(node: str) -> Host:
        host = with_kernel(seen(net.a), tree, node)
        other = replace(host.devices[0], name="mlx5_1", parent="wa")
        return replace(host, devices=(*host.devices, other))

    fires(rails("10.8.0.2"), "G9", "10.8.0.2 is on the way of wa, and va has no route to it", note=True)
    net.a.ip("route", "add", "10.8.0.2", "via", "10.7.0.2", "table", "77")
    silent(rails("10.8.0.2"), "G9")


def test_nothing_comes_back(net: TwoHosts) -> None:
    """The peer's kernel says that the port is closed; where a firewall drops the packets, nothing comes."""
    fires(seen(net.a, "10.7.0.2", port=7471), "C1", "answers that UDP port 4791 is closed")
    if shutil.which("nft") is None:
        pytest.skip("needs nft (Debian package nftables)")
    net.b.run(["nft", "add table ip f; add chain ip f i { type filter hook input priority 0; }"])
    net.b.run(["nft", "add rule ip f i udp dport 4791 drop"])
    fires(seen(net.a, "10.7.0.2", port=7471, timeout_ms=300), "C1", "10.7.0.2 port 7471: no answer came")
    fires(seen(net.b), "C1", "dropped by rule ip f i")
