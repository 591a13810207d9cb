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

__all__ = ["PREFERENCES", "RULES", "Query", "Rule", "choose", "inactive_candidate", "judge"]


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
    return view.row_of(Gid.from_ip(query.destination.ip)) is None


def _index(query: Query, view: RocePortView, row: GidEntry) -> tuple[int, ...]:
    return row.ndev_ifindex, view.device.index, view.port_num, row.gid_index


#: Name, sentence and sort key of each preference. Candidates that pass are compared by these keys in turn; the lower
#: key wins.
PREFERENCES: tuple[tuple[str, str, Callable[[Query, RocePortView, GidEntry], object]], ...] = (
    ("owns-destination", "A port that has the destination address itself.", _owns_destination),
    ("lowest-index", "The lowest interface index, then device index, port number and GID index.", _index),
)


def _key(query: Query, view: RocePortView, row: GidEntry) -> tuple[object, ...]:
    return tuple(key(query, view, row) for _, _, key in PREFERENCES)


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
        passed.sort(key=lambda pair: _key(query, *pair))
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
    judged: list[tuple[bool, tuple[object, ...], RocePortView, GidEntry, tuple[str, str] | None]] = []
    for view in host.ports:
        for row in view.rows:
            objection = _objection(query, view, row)
            judged.append((objection is not None, _key(query, view, row), view, row, objection))
    judged.sort(key=lambda item: item[:2])
    passed = [item for item in judged if item[4] is None]
    out = []
    for position, (_, key, view, row, objection) in enumerate(judged):
        if objection is not None:
            rule, reason = objection
        elif position == 0:
            rule, reason = "chosen", "the only candidate no rule objects to"
            if len(passed) > 1:
                rule, reason = _preference(key, passed[1][1])
        else:
            rule, reason = _preference(judged[0][1], key)
            reason = f"passes, but another is preferred ({reason})"
        out.append(
            Candidate(
                str(query.destination),
                inet_ntop(AF_INET if len(row.gid.ip) == 4 else AF_INET6, row.gid.ip),
                view.device.name,
                row.port_num,
                row.gid_index,
                str(row.gid),
                objection is None,
                position == 0 and objection is None,
                rule,
                reason,
            )
        )
    return tuple(out)


def _preference(better: tuple[object, ...], worse: tuple[object, ...]) -> tuple[str, str]:
    """Name and sentence of the preference that decides between two keys."""
    for (name, text, _), a, b in zip(PREFERENCES, better, worse, strict=True):
        if a != b:
            return name, text
    return PREFERENCES[-1][0], PREFERENCES[-1][1]
