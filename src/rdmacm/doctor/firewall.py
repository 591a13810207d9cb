"""What packet filters do with a datagram to UDP port 4791, of the text that nft(8) and iptables-save(8) print.

The datagram is the first of its flow, on an interface that is not the loopback, of an address that is not known. So a
rule matches, does not match, or matches some such datagrams.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rdmacm.doctor.view import Verdict
from rdmacm.net.types import ROCE_PORT

#: Hooks through which packets come, and those through which they leave.
_HOOKS = {
    "ingress": "input",
    "prerouting": "input",
    "input": "input",
    "output": "output",
    "postrouting": "output",
    "egress": "output",
}
_UDP = ("udp", 17)
#: Chains of iptables, by the hook that they are at.
_BUILT_IN = {"PREROUTING": "prerouting", "INPUT": "input", "OUTPUT": "output", "POSTROUTING": "postrouting"}
_DROPS = frozenset(("drop", "reject"))
#: Chains may jump to each other so deep (the kernel's limit is 16).
_DEPTH = 16


class Match(Enum):
    """Whether a rule matches the datagram."""

    NO = 0
    SOME = 1
    YES = 2


@dataclass
class Line:
    """A rule: ``action`` is accept, drop, reject, return, jump or goto, or empty for what passes no verdict."""

    match: Match
    action: str
    target: str
    text: str


@dataclass
class Chain:
    """A chain; ``hook`` is empty if it is only jumped to."""

    name: str
    hook: str = ""
    policy: str = "accept"
    priority: int = 0
    lines: list[Line] = field(default_factory=list)


def verdicts(chains: Mapping[str, Chain]) -> list[Verdict]:
    """What the chains of one table drop."""
    found = []
    for chain in sorted(chains.values(), key=lambda chain: chain.priority):
        direction = _HOOKS.get(chain.hook)
        if direction is None:
            continue
        walk = _Walk(chains)
        end = walk.through(chain, 0)
        if end == "" and chain.policy in _DROPS:
            end = f"the policy {chain.policy} of chain {chain.name}"
            if walk.accepts_some:
                walk.partial.append(end)
                end = "accept"
        if end not in ("", "accept"):
            found.append(Verdict(end, False, direction))
        elif walk.partial:
            found.append(Verdict(walk.partial[0], True, direction))
    return found


class _Walk:
    """The way of the datagram through chains."""

    def __init__(self, chains: Mapping[str, Chain]) -> None:
        self._chains = chains
        self.partial: list[str] = []
        self.accepts_some = False

    def through(self, chain: Chain, depth: int, *, is_some: bool = False) -> str:
        """``accept``, the text of what drops, or empty if the chain ends without a verdict."""
        for line in chain.lines:
            if line.match is Match.NO or not line.action:
                continue
            some = is_some or line.match is Match.SOME
            end = line.action
            if line.action in ("jump", "goto"):
                target = self._chains.get(line.target)
                end = self.through(target, depth + 1, is_some=some) if target is not None and depth < _DEPTH else ""
                if not end and line.action == "goto" and not some:
                    return ""
            elif line.action in _DROPS:
                end = line.text
            elif line.action == "return":
                if not some:
                    return ""
                end = ""
            if not end:
                continue
            if not some:
                return end
            if is_some:  # the rule that jumped here decides
                return end if line.match is Match.YES else self._note(end)
            self._note(end)
        return ""

    def _note(self, end: str) -> str:
        if end == "accept":
            self.accepts_some = True
        elif end not in self.partial:
            self.partial.append(end)
        return ""


def _all(matches: Sequence[Match]) -> Match:
    return min(matches, key=lambda match: match.value, default=Match.YES)


def _not(match: Match) -> Match:
    return {Match.NO: Match.YES, Match.YES: Match.NO, Match.SOME: Match.SOME}[match]


# -- nft -----------------------------------------------------------------------------------------------------


def of_nft(text: str, *, skip_xt: bool) -> list[Verdict]:
    """The verdicts of what ``nft -j list ruleset`` prints. ``skip_xt``: leave out what iptables-save shows better."""
    try:
        entries = json.loads(text)["nftables"]
    except (ValueError, KeyError, TypeError):
        return []
    tables: dict[tuple[str, str], dict[str, Chain]] = {}
    foreign: set[tuple[str, str]] = set()
    for entry in entries:
        if (chain := entry.get("chain")) is not None:
            table = tables.setdefault((chain["family"], chain["table"]), {})
            name = f"{chain['family']} {chain['table']} {chain['name']}"
            priority = chain.get("prio", 0)
            table[chain["name"]] = Chain(
                name, chain.get("hook", ""), chain.get("policy", "accept"), priority if isinstance(priority, int) else 0
            )
        elif (rule := entry.get("rule")) is not None:
            key = rule["family"], rule["table"]
            expressions = rule.get("expr", [])
            if any("xt" in each for each in expressions if isinstance(each, dict)):
                foreign.add(key)
            chain_of = tables.setdefault(key, {}).setdefault(rule["chain"], Chain(rule["chain"]))
            chain_of.lines += _nft_lines(expressions, f"{chain_of.name} handle {rule.get('handle', '?')}")
    found = []
    for key, chains in tables.items():
        if not (skip_xt and key in foreign) and key[0] not in ("arp", "bridge"):
            found += verdicts(chains)
    return found


def _nft_lines(expressions: Sequence[Any], where: str) -> Iterator[Line]:
    """A rule as lines; a verdict map is one for each of its entries."""
    matches: list[Match] = []
    for each in expressions:
        if not isinstance(each, dict):
            matches.append(Match.SOME)
            continue
        ((kind, value),) = list(each.items())[:1] or [("", None)]
        if kind == "match":
            matches.append(_nft_match(value.get("op", "=="), value.get("left"), value.get("right")))
        elif kind in ("accept", "drop", "reject", "return"):
            yield Line(_all(matches), kind, "", f"rule {where} ({kind})")
        elif kind in ("jump", "goto"):
            yield Line(_all(matches), kind, value["target"], where)
        elif kind == "vmap":
            for item, verdict in _pairs(value.get("data")):
                hit = _nft_match("==", value.get("key"), item)
                ((action, target),) = list(verdict.items())[:1]
                name = target["target"] if isinstance(target, dict) and "target" in target else ""
                yield Line(_all([*matches, hit]), action, name, f"rule {where} ({action})")
        elif kind == "xt":
            if value.get("type") == "target" and value.get("name") in ("REJECT", "DROP"):
                yield Line(_all([*matches, Match.SOME]), "drop", "", f"rule {where} ({value['name']})")
            else:
                matches.append(Match.SOME)
        elif kind == "limit":
            matches.append(Match.SOME)


def _pairs(data: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The entries of a verdict map; none for one that is named."""
    entries = data.get("set", []) if isinstance(data, dict) else []
    return [(entry[0], entry[1]) for entry in entries if isinstance(entry, list) and isinstance(entry[1], dict)]


def _nft_match(op: str, left: Any, right: Any) -> Match:
    found = _nft_equal(left, right) if op in ("==", "in", "!=") else Match.SOME
    return _not(found) if op == "!=" else found


def _nft_equal(left: Any, right: Any) -> Match:
    """Whether an expression is a value, or one of a set."""
    if not isinstance(left, dict):
        return Match.SOME
    ((kind, what),) = list(left.items())[:1] or [("", {})]
    if kind == "payload" and isinstance(what, dict) and "protocol" in what:
        protocol, name = what["protocol"], what.get("field")
        if protocol in ("udp", "th") and name == "dport":
            return _contains(right, ROCE_PORT)
        if (protocol, name) in (("ip", "protocol"), ("ip6", "nexthdr")):
            return max((_contains(right, each) for each in _UDP), key=lambda match: match.value)
        return Match.NO if protocol in ("tcp", "icmp", "icmpv6", "sctp", "dccp", "esp", "ah", "igmp") else Match.SOME
    if kind == "meta" and isinstance(what, dict):
        if what.get("key") == "l4proto":
            return max((_contains(right, each) for each in _UDP), key=lambda match: match.value)
        if what.get("key") in ("iifname", "iif", "oifname", "oif"):
            return Match.NO if right == "lo" else Match.SOME
    if kind == "ct" and isinstance(what, dict) and what.get("key") == "state":
        return _contains(right, "new")
    return Match.SOME


def _contains(right: Any, value: int | str) -> Match:
    """Whether a value, a list, a range or a set contains a value."""
    if isinstance(right, dict):
        if "range" in right and isinstance(value, int):
            low, high = right["range"]
            return Match.YES if low <= value <= high else Match.NO
        items = right.get("set", right.get("|"))
        return Match.SOME if items is None else _contains(items, value)
    if isinstance(right, list):
        return max((_contains(item, value) for item in right), key=lambda match: match.value, default=Match.NO)
    if isinstance(right, str) and right.startswith("@"):
        return Match.SOME
    return Match.YES if right == value else Match.NO


# -- iptables ------------------------------------------------------------------------------------------------


def of_iptables(text: str, what: str = "iptables") -> list[Verdict]:
    """The verdicts of what ``iptables-save`` or ``ip6tables-save`` prints."""
    found: list[Verdict] = []
    chains: dict[str, Chain] = {}
    for line in [*text.splitlines(), "COMMIT"]:
        if line.startswith(":"):
            name, policy = line[1:].split()[:2]
            chains[name] = Chain(f"{name} of {what}", _BUILT_IN.get(name, ""), policy.lower())
        elif line.startswith("-A "):
            words = shlex.split(line)
            chain = chains.setdefault(words[1], Chain(words[1]))
            chain.lines.append(_iptables_line(words[2:], f"{what} {line}"))
        elif line == "COMMIT":
            found += verdicts(chains)
            chains = {}
    return found


def _iptables_line(words: Sequence[str], text: str) -> Line:
    matches, action, target, is_not = [], "", "", False
    rest = iter(words)
    for word in rest:
        if word == "!":
            is_not = True
            continue
        if word in ("-j", "-g"):
            target = next(rest, "")
            action = {"ACCEPT": "accept", "DROP": "drop", "REJECT": "reject", "RETURN": "return"}.get(target, "")
            if not action:
                action = "jump" if word == "-j" else "goto"
            break  # what follows are options of the target
        if word == "-m":
            next(rest, "")
            continue
        match = _iptables_match(word, next(rest, ""))
        if match is not None:
            matches.append(_not(match) if is_not else match)
        is_not = False
    return Line(_all(matches), action, target, text)


def _iptables_match(option: str, value: str) -> Match | None:
    """What an option of a match says; None for a comment."""
    if option == "--comment":
        return None
    if option == "-p":
        return Match.YES if value in ("udp", "17", "all") else Match.NO
    if option in ("--dport", "--dports", "--ports"):
        return Match.YES if any(_in_ports(part) for part in value.split(",")) else Match.NO
    if option in ("-i", "-o"):
        return Match.NO if value == "lo" else Match.SOME
    if option in ("--ctstate", "--state"):
        return Match.YES if "NEW" in value.split(",") else Match.NO
    return Match.SOME


def _in_ports(text: str) -> bool:
    low, _, high = text.partition(":")
    return low.isdigit() and int(low) <= ROCE_PORT <= int(high if high.isdigit() else low)
