"""The rules that choose the port and GID for a destination.

The host's routing tables decide through which interface a packet leaves and, unless the caller gave a source address,
from which one. The rules decide the rest. A candidate is one IP address of one port, with a row of the port's GID
table. On RoCE, the GID is the address; on IPoIB, it is that of the InfiniBand port below the interface. The rules are
applied in order, and the first that objects drops the candidate. If several candidates pass, the preferences decide
between them.

``rdmacm explain`` shows the decision on each candidate (:class:`rdmacm.explanation.Candidate`): ``rule`` names the rule
that dropped it or the preference that decided, and ``reason`` says why. The rule of the chosen candidate is "chosen" if
no other candidate passed.

A rule is a pure function of one candidate. So :func:`choose`, which looks only at the source address, agrees with
:func:`judge`, which looks at all addresses for the explanation.

These rules are for IP destinations; for a destination that is a GID, :mod:`rdmacm.resolution.infiniband` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple

from rdmacm.address import InetAddr
from rdmacm.explanation import Candidate
from rdmacm.net.types import RouteEntry
from rdmacm.resolution.hosts import HostView, LocalAddress, PortView
from rdmacm.resolution.ipoib import IpoibPortView
from rdmacm.verbs.enums import GidType, LinkLayer, TransportType


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
    bound: PortView | None
    #: The link layer of the port that has the destination; None if the destination is not an address of this host.
    own_link_layer: LinkLayer | None = None


def _family(query: Query, candidate: LocalAddress) -> str | None:
    wanted = 4 if query.destination.family == AF_INET else 16
    if len(candidate.ip) == wanted:
        return None
    subject = "this address" if isinstance(candidate.view, IpoibPortView) else "this GID"
    if wanted == 4:
        return f"the destination is IPv4, {subject} is IPv6"
    return f"the destination is IPv6, {subject} is IPv4"


def _gid_type(query: Query, candidate: LocalAddress) -> str | None:
    gid_type = candidate.row.gid_type
    if gid_type is GidType.ROCE_V2 or isinstance(candidate.view, IpoibPortView):
        return None
    if candidate.view.device.transport_type is TransportType.IWARP:
        return None
    return f"GID type is {gid_type.name}, not ROCE_V2"


def _bound_device(query: Query, candidate: LocalAddress) -> str | None:
    bound = query.bound
    if bound is None or candidate.view.key == bound.key:
        return None
    port = f" port {bound.port_num}" if len(bound.device.ports) > 1 else ""
    return f"the id is bound to {bound.device.name}{port}"


def _source_address(query: Query, candidate: LocalAddress) -> str | None:
    if candidate.ip == query.source:
        return None
    source = inet_ntop(query.destination.family, query.source)
    return {
        "given": f"the caller asked for source {source}",
        "bound": f"the id is bound to source {source}",
    }.get(query.origin, f"the route prefers source {source}")


def _egress(query: Query, candidate: LocalAddress) -> str | None:
    if query.route.kind == "local":
        # A packet to an address of this host does not leave it, so any port of the same link layer can send it.
        if query.own_link_layer in (None, candidate.view.port.link_layer):
            return None
        other = "InfiniBand" if query.own_link_layer is LinkLayer.INFINIBAND else "Ethernet"
        return f"the destination is this host's own, on {other}"
    if candidate.row.ndev_ifindex == query.route.ifindex:
        return None
    return f"the route leaves through {query.egress}"


def _infiniband_port(query: Query, candidate: LocalAddress) -> str | None:
    view = candidate.view
    if not isinstance(view, IpoibPortView) or view.infiniband is not None:
        return None
    return f"{view.interface.name} is IPoIB, and no InfiniBand port of this process has its GID"


def _partition(query: Query, candidate: LocalAddress) -> str | None:
    view = candidate.view
    if not isinstance(view, IpoibPortView) or view.infiniband is None or view.infiniband.has_pkey(view.pkey):
        return None
    return f"P_Key 0x{view.pkey:04x} of {view.interface.name} is not in the port's table"


def _port_state(query: Query, candidate: LocalAddress) -> str | None:
    view = candidate.view
    if view.is_active:
        return None
    if isinstance(view, IpoibPortView) and not view.interface.is_running:
        return f"interface {view.interface.name} is down"
    return f"the port is {view.port.state.name}, not ACTIVE"


class Rule(NamedTuple):
    """A rule of the choice."""

    name: str
    #: The rule as a sentence, as it stands in the documentation.
    text: str
    #: Returns why the candidate is dropped; None if it passes.
    objection: Callable[[Query, LocalAddress], str | None]


RULES: tuple[Rule, ...] = (
    Rule("address-family", "It has the address family of the destination.", _family),
    Rule("gid-type", "The GID has type RoCE v2; on IPoIB, it is that of an InfiniBand port.", _gid_type),
    Rule("bound-device", "An id that is bound to a port stays on it.", _bound_device),
    Rule(
        "source-address",
        "It is the source address: the given or bound one, else the one that the route prefers.",
        _source_address,
    ),
    Rule(
        "egress-interface",
        "It is on the route's interface; to the host's own addresses, on one of the same link layer.",
        _egress,
    ),
    Rule("infiniband-port", "The GID of an IPoIB interface is that of an InfiniBand port.", _infiniband_port),
    Rule("partition", "The InfiniBand port is in the partition of the IPoIB interface.", _partition),
    Rule("port-state", "The port is active.", _port_state),
)


#: The rules that drop a candidate because its port cannot be used, whatever the destination is.
_PORT_RULES = {"infiniband-port", "partition", "port-state"}


def _owns_destination(query: Query, candidate: LocalAddress) -> bool:
    """False, the lower key, if the port has the destination address."""
    return not candidate.view.has_address(query.destination.ip)


def _index(query: Query, candidate: LocalAddress) -> tuple[int, ...]:
    view, row, _ = candidate
    return row.ndev_ifindex, view.device.index, view.port_num, row.gid_index


class Preference(NamedTuple):
    """Decides between candidates that all rules let pass."""

    name: str
    #: The preference as a sentence, as it stands in the documentation.
    text: str
    #: The candidate with the lowest key is preferred.
    key: Callable[[Query, LocalAddress], object]


#: A later preference decides between candidates that are equal by the earlier ones.
PREFERENCES: tuple[Preference, ...] = (
    Preference("owns-destination", "A port that has the destination address itself.", _owns_destination),
    Preference("lowest-index", "The lowest interface index, then device index, port number and GID index.", _index),
)


def _keys(query: Query, candidate: LocalAddress) -> tuple[object, ...]:
    """The keys of a candidate, one per preference."""
    return tuple(preference.key(query, candidate) for preference in PREFERENCES)


def _objection(query: Query, candidate: LocalAddress) -> tuple[str, str] | None:
    """Name and reason of the first rule that drops a candidate."""
    for rule in RULES:
        reason = rule.objection(query, candidate)
        if reason is not None:
            return rule.name, reason
    return None


def choose(query: Query, host: HostView) -> LocalAddress | None:
    """The port and GID to use; None if every candidate is dropped."""
    passed = [candidate for candidate in host.by_ip.get(query.source, ()) if _objection(query, candidate) is None]
    return min(passed, key=lambda candidate: _keys(query, candidate), default=None)


def unusable_port(query: Query, host: HostView) -> tuple[LocalAddress, str] | None:
    """The candidate that would pass if its port could be used, and the rule that drops it."""
    for candidate in host.by_ip.get(query.source, ()):
        objection = _objection(query, candidate)
        if objection is not None and objection[0] in _PORT_RULES:
            return candidate, objection[0]
    return None


def judge(query: Query, host: HostView) -> tuple[Candidate, ...]:
    """Every candidate of the host, with the rule that decided on it; the chosen one first."""
    judged = [_Judgement(_objection(query, one), _keys(query, one), one) for one in host.addresses]
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
            rule, reason = "chosen", "the only candidate that passes every rule"
        candidates.append(_candidate(query, one, rule, reason, chosen=one is passed[0]))
    candidates += [_candidate(query, one, *one.objection, chosen=False) for one in dropped if one.objection]
    return tuple(candidates)


class _Judgement(NamedTuple):
    """A candidate, judged for a query."""

    #: Name and reason of the rule that drops it; None if it passes.
    objection: tuple[str, str] | None
    #: The keys by which the preferences compare it.
    keys: tuple[object, ...]
    candidate: LocalAddress


def _candidate(query: Query, judged: _Judgement, rule: str, reason: str, *, chosen: bool) -> Candidate:
    view, row, ip = judged.candidate
    return Candidate(
        str(query.destination),
        inet_ntop(AF_INET if len(ip) == 4 else AF_INET6, ip),
        view.device.name,
        row.port_num,
        row.gid_index,
        str(row.gid),
        judged.objection is None,
        chosen,
        rule,
        reason,
        view.interface.name if isinstance(view, IpoibPortView) else "",
    )


def _deciding_preference(better: tuple[object, ...], worse: tuple[object, ...]) -> tuple[str, str]:
    """Name and sentence of the preference that decides between two candidates, by their keys."""
    differing = (one for one, a, b in zip(PREFERENCES, better, worse, strict=True) if a != b)
    decisive = next(differing, PREFERENCES[-1])
    return decisive.name, decisive.text
