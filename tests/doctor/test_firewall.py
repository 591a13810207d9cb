"""C1: what is read of nft and iptables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from rdmacm.doctor import collect
from rdmacm.doctor.firewall import of_iptables, of_nft
from support.doctor import fires, silent
from support.netns import Host, needs_netns

DPORT = {"payload": {"protocol": "udp", "field": "dport"}}
STATE = {"ct": {"key": "state"}}


def ruleset(*rules: list[Any], policy: str = "accept", hook: str = "input", **chains: list[list[Any]]) -> str:
    """What ``nft -j list ruleset`` prints of a base chain and others."""
    base = {"family": "inet", "table": "t", "name": "base", "hook": hook, "policy": policy, "prio": 0}
    entries: list[dict[str, Any]] = [{"metainfo": {}}, {"table": {"family": "inet", "name": "t"}}, {"chain": base}]
    for name, lines in {"base": list(rules), **chains}.items():
        if name != "base":
            entries.append({"chain": {"family": "inet", "table": "t", "name": name}})
        entries += [
            {"rule": {"family": "inet", "table": "t", "chain": name, "handle": at, "expr": line}}
            for at, line in enumerate(lines, 1)
        ]
    return json.dumps({"nftables": entries})


def match(left: Any, right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


DROP, ACCEPT = {"drop": None}, {"accept": None}
IS_ROCE = match(DPORT, 4791)
ESTABLISHED = [match(STATE, {"set": ["established", "related"]}, "in"), ACCEPT]
LOOPBACK = [match({"meta": {"key": "iifname"}}, "lo"), ACCEPT]


@pytest.mark.parametrize(
    "text",
    [
        ruleset([IS_ROCE, DROP]),
        ruleset([match(DPORT, {"set": [22, {"range": [4000, 5000]}]}), {"reject": {"type": "port-unreachable"}}]),
        ruleset(LOOPBACK, ESTABLISHED, policy="drop"),
        ruleset([match({"meta": {"key": "l4proto"}}, "udp"), {"jump": {"target": "udp"}}], udp=[[IS_ROCE, DROP]]),
        ruleset([match(DPORT, [53, 67], "!="), DROP]),
        ruleset([{"vmap": {"key": STATE, "data": {"set": [["established", ACCEPT], ["new", DROP]]}}}]),
        ruleset([match({"payload": {"protocol": "ip", "field": "protocol"}}, "udp"), DROP], hook="output"),
    ],
)
def test_what_drops_is_seen(text: str) -> None:
    (verdict,) = of_nft(text, skip_xt=True)
    assert not verdict.is_partial
    assert verdict.direction == ("output" if '"output"' in text else "input")


@pytest.mark.parametrize(
    "text",
    [
        ruleset(),
        "not JSON",
        ruleset([IS_ROCE, ACCEPT], policy="drop"),
        ruleset([match({"payload": {"protocol": "tcp", "field": "dport"}}, 4791), DROP]),
        ruleset([match(DPORT, {"range": [1, 1024]}), DROP]),
        ruleset([match({"meta": {"key": "iifname"}}, "lo"), DROP]),
        ruleset([{"jump": {"target": "other"}}, [IS_ROCE][0], DROP][:1], other=[[IS_ROCE, {"return": None}], [DROP]]),
        ruleset([IS_ROCE, DROP], hook="forward"),
        ruleset([{"vmap": {"key": DPORT, "data": {"set": [[4791, ACCEPT]]}}}], [DROP]),
    ],
)
def test_what_lets_pass_is_silent(text: str) -> None:
    assert of_nft(text, skip_xt=True) == []


def test_some_packets_only() -> None:
    source = match({"payload": {"protocol": "ip", "field": "saddr"}}, "10.0.0.9")
    (verdict,) = of_nft(ruleset([source, IS_ROCE, DROP]), skip_xt=True)
    assert verdict.is_partial
    (verdict,) = of_nft(ruleset([source, IS_ROCE, ACCEPT], policy="drop"), skip_xt=True)
    assert (verdict.is_partial, "policy drop" in verdict.drops) == (True, True)


IPTABLES = """\
*nat
:PREROUTING ACCEPT [0:0]
COMMIT
*filter
:INPUT {policy} [0:0]
:OUTPUT ACCEPT [0:0]
:ours - [0:0]
-A INPUT -i lo -j ACCEPT
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
{rule}
-A ours -p udp -m udp --dport 4791 -m comment --comment "no RDMA" -j REJECT --reject-with icmp-port-unreachable
COMMIT
"""


@pytest.mark.parametrize(
    ("policy", "rule", "count"),
    [
        ("ACCEPT", "-A INPUT -p udp -m udp --dport 4791 -j DROP", 1),
        ("ACCEPT", "-A INPUT -p udp -m multiport --dports 53,4000:5000 -j DROP", 1),
        ("ACCEPT", "-A INPUT -j ours", 1),
        ("DROP", "", 1),
        ("ACCEPT", "", 0),
        ("ACCEPT", "-A INPUT -p tcp -m tcp --dport 4791 -j DROP", 0),
        ("ACCEPT", "-A INPUT -p udp -m udp ! --dport 4791 -j DROP", 0),
        ("DROP", "-A INPUT -p udp -m udp --dport 4791 -j ACCEPT", 0),
        ("ACCEPT", "-A INPUT -j LOG --log-prefix dropped", 0),
    ],
)
def test_iptables(policy: str, rule: str, count: int) -> None:
    found = of_iptables(IPTABLES.format(policy=policy, rule=rule))
    assert [verdict.is_partial for verdict in found] == [False] * count


def test_rules_of_iptables_in_nft_are_left_to_iptables() -> None:
    text = ruleset(
        [{"match": {"op": "==", "left": DPORT, "right": 4791}}, {"xt": {"type": "match", "name": "udp"}}, DROP]
    )
    assert of_nft(text, skip_xt=True) == []
    assert len(of_nft(text, skip_xt=False)) == 1


@needs_netns
class TestForReal:
    @pytest.fixture
    def host(self) -> Iterator[Host]:
        if shutil.which("nft") is None:
            pytest.skip("needs nft (Debian package nftables)")
        with Host() as host:
            yield host

    def test_a_rule_of_nft(self, host: Host) -> None:
        with host.enter():
            silent(collect(provider="soft"), "C1")
        host.run(["nft", "add table inet f; add chain inet f in { type filter hook input priority 0; }"])
        host.run(["nft", "add rule inet f in iifname eth9 udp dport { 53, 4791 } counter drop"])
        with host.enter():
            fires(collect(provider="soft"), "C1", "some packets", note=True)
        host.run(["nft", "insert rule inet f in udp dport 4000-5000 reject"])
        with host.enter():
            assert fires(collect(provider="soft"), "C1", "inet f in", "(reject)", "firewall-cmd").is_sure

    def test_a_policy(self, host: Host) -> None:
        host.run(["nft", "add table ip f; add chain ip f in { type filter hook input priority 0; policy drop; }"])
        host.run(["nft", "add rule ip f in ct state established,related accept"])
        with host.enter():
            fires(collect(provider="soft"), "C1", "the policy drop of chain ip f in")
        host.run(["nft", "add rule ip f in udp dport 4791 accept"])
        with host.enter():
            silent(collect(provider="soft"), "C1")
