"""The rules that choose the port and GID for a destination.

The host's routing tables decide through which interface a packet leaves and, unless the caller gave a source address,
from which one. The rules decide the rest. A candidate is one row of one port's GID table. The rules are applied in
order, and the first that objects drops the candidate. If several candidates pass, the preferences decide between them.

``rdmacm explain`` shows the decision on each candidate (:class:`rdmacm.explanation.Candidate`): ``rule`` names the rule
that dropped it or the preference that decided, and ``reason`` says why. The rule of the chosen candidate is "chosen" if
no other candidate passed.

A rule is a pure function of one candidate. So :func:`choose`, which looks only at rows with the source address, agrees
with :func:`judge`, which looks at all rows for the explanation.

These rules are for IP destinations; for a destination that is a GID, :mod:`rdmacm.resolution.infiniband` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple

from rdmacm.address import Gid, InetAddr
from rdmacm.explanation import Candidate
from rdmacm.net.types import RouteEntry
from rdmacm.resolution.hosts import HostView, RocePortView
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import GidType

__all__ = ["PREFERENCES", "RULES", "Preference", "Query", "Rule", "choose", "inactive_candidate", "judge"]


class Query(NamedTuple):
    """The facts that the rules judge a candidate by."""

    destination: InetAddr
    #: The source address, packed.
    source: bytes
    #: Where the source address comes from: "given" by the caller, "bound" by the id, or the "route".
    origin: str
    route: RouteEntry
    #: The name of the interface through which the route leaves.
    egress: str
    #: The port that the id is bound to, if any.
    bound: RocePortView | None


def _family(query: Query, view: RocePortView, row: GidEntry) -> str | None:
    wanted = 4 if query.destination.family == AF_INET else 16
    if len(row.gid.ip) == wanted:
        return None
    return "the destination is IPv4, this GID is IPv6" if wanted == 4 else "the destination is IPv6, this GID is IPv4"


def _gid_type(query: Query, view: RocePortView, row: GidEntry) -> str | None:
    return None if row.gid_type is GidType.ROCE_V2 else f"GID type is {row.gid_type.name}, not ROCE_V2"


def _bound_device(query: Query, view: RocePortView, row: GidEntry) -> str | None:
    bound = query.bound
    if bound is None or view.key == bound.key:
        return None
    port = f" port {bound.port_num}" if len(bound.device.ports) > 1 else ""
    return f"the id is bound to {bound.device.name}{port}"


def _source_address(query: Query, view: RocePortView, row: GidEntry) -> str | None:
    if row.gid.ip == query.source:
        return None
    source = inet_ntop(query.destination.family, query.source)
    return {
        "given": f"the caller asked for source {source}",
        "bound": f"the id is bound to source {source}",
    }.get(query.origin, f"the route prefers source {source}")


def _egress(query: Query, view: RocePortView, row: GidEntry) -> str | None:
    # A packet to an address of this host does not leave it, so any port can send it.
    if query.route.kind == "local" or row.ndev_ifindex == query.route.ifindex:
        return None
    return f"the route leaves through {query.egress}"


def _port_state(query: Query, view: RocePortView, row: GidEntry) -> str | None:
    return None if view.is_active else f"the port is {view.port.state.name}, not ACTIVE"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the choice."""

    name: str
    #: The rule as a sentence, as it stands in the documentation.
    text: str
    #: Returns why the candidate is dropped; None if it passes.
    objection: Callable[[Query, RocePortView, GidEntry], str | None]


RULES: tuple[Rule, ...] = (
    Rule("address-family", "The GID has the address family of the destination.", _family),
    Rule("gid-type", "The GID has type RoCE v2.", _gid_type),
    Rule("bound-device", "An id that is bound to a port stays on it.", _bound_device),
    Rule(
        "source-address",
        "The GID is the source address: the given or bound one, else the one that the route prefers.",
        _source_address,
    ),
    Rule(
        "egress-interface",
        "The GID is on the route's interface; to the host's own addresses, any interface will do.",
        _egress,
    ),
    Rule("port-state", "The port is active.", _port_state),
)


def _owns_destination(query: Query, view: RocePortView, row: GidEntry) -> bool:
    """False, the lower key, if the port has the destination address."""
    return view.row_of(Gid.from_ip(query.destination.ip)) is None


def _index(query: Query, view: RocePortView, row: GidEntry) -> tuple[int, ...]:
    return row.ndev_ifindex, view.device.index, view.port_num, row.gid_index


@dataclass(frozen=True, slots=True)
class Preference:
    """Decides between candidates that all rules let pass."""

    name: str
    #: The preference as a sentence, as it stands in the documentation.
    text: str
    #: The candidate with the lowest key is preferred.
    key: Callable[[Query, RocePortView, GidEntry], object]


#: A later preference decides between candidates that are equal by the earlier ones.
PREFERENCES: tuple[Preference, ...] = (
    Preference("owns-destination", "A port that has the destination address itself.", _owns_destination),
    Preference("lowest-index", "The lowest interface index, then device index, port number and GID index.", _index),
)


def _keys(query: Query, view: RocePortView, row: GidEntry) -> tuple[object, ...]:
    """The keys of a candidate, one per preference."""
    return tuple(preference.key(query, view, row) for preference in PREFERENCES)


def _objection(query: Query, view: RocePortView, row: GidEntry) -> tuple[str, str] | None:
    """Name and reason of the first rule that drops a candidate."""
    for rule in RULES:
        reason = rule.objection(query, view, row)
        if reason is not None:
            return rule.name, reason
    return None


def choose(query: Query, host: HostView) -> tuple[RocePortView, GidEntry] | None:
    """The port and GID to use; None if every candidate is dropped."""
    rows = host.by_ip.get(query.source, ())
    passed = [pair for pair in rows if _objection(query, *pair) is None]
    if len(passed) > 1:
        passed.sort(key=lambda pair: _keys(query, *pair))
    return passed[0] if passed else None


def inactive_candidate(query: Query, host: HostView) -> tuple[RocePortView, GidEntry] | None:
    """The candidate that would pass if its port were active."""
    for view, row in host.by_ip.get(query.source, ()):
        objection = _objection(query, view, row)
        if objection is not None and objection[0] == "port-state":
            return view, row
    return None


def judge(query: Query, host: HostView) -> tuple[Candidate, ...]:
    """Every candidate of the host, with the rule that decided on it; the chosen one first."""
    judged = [
        _Judgement(_objection(query, view, row), _keys(query, view, row), view, row)
        for view in host.ports
        for row in view.rows
    ]
    passed = sorted((one for one in judged if one.objection is None), key=lambda one: one.keys)
    dropped = sorted((one for one in judged if one.objection is not None), key=lambda one: one.keys)
    candidates = []
    for one in passed:
        if one is not passed[0]:
            rule, text = _deciding_preference(passed[0].keys, one.keys)
            reason = f"passes, but another is preferred ({text})"
        elif len(passed) > 1:
            rule, reason = _deciding_preference(one.keys, passed[1].keys)
        else:
            rule, reason = "chosen", "the only candidate no rule objects to"
        candidates.append(_candidate(query, one, rule, reason, chosen=one is passed[0]))
    candidates += [_candidate(query, one, *one.objection, chosen=False) for one in dropped if one.objection]
    return tuple(candidates)


class _Judgement(NamedTuple):
    """A candidate, judged for a query."""

    #: Name and reason of the rule that drops it; None if it passes.
    objection: tuple[str, str] | None
    #: The keys by which the preferences compare it.
    keys: tuple[object, ...]
    view: RocePortView
    row: GidEntry


def _candidate(query: Query, judged: _Judgement, rule: str, reason: str, *, chosen: bool) -> Candidate:
    view, row = judged.view, judged.row
    return Candidate(
        str(query.destination),
        inet_ntop(AF_INET if len(row.gid.ip) == 4 else AF_INET6, row.gid.ip),
        view.device.name,
        row.port_num,
        row.gid_index,
        str(row.gid),
        judged.objection is None,
        chosen,
        rule,
        reason,
    )


def _deciding_preference(better: tuple[object, ...], worse: tuple[object, ...]) -> tuple[str, str]:
    """Name and sentence of the preference that decides between two candidates, by their keys."""
    differing = (one for one, a, b in zip(PREFERENCES, better, worse, strict=True) if a != b)
    decisive = next(differing, PREFERENCES[-1])
    return decisive.name, decisive.text
