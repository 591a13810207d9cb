"""Which source, device, port and GID a destination is reached with.

The host's routing decides how a packet leaves: through which interface and, unless the caller gave one, from
which source address. The rules below are what is left to decide, in the order they are asked. Each looks at one
candidate (a row of a port's GID table) and either lets it pass or says why not; the first to object is the reason
shown by ``rdmacm explain``. Where several candidates pass, the preferences order them.

The rules are pure and judge a candidate by itself, so looking only at the rows that hold the source address, as
:func:`choose` does, gives the same answer as judging all of them, as :func:`judge` does for the explanation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple

from rdmacm.address import InetAddr
from rdmacm.explanation import Candidate
from rdmacm.net.types import RouteEntry
from rdmacm.resolution.hosts import DeviceView, HostView
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import GidType

__all__ = ["PREFERENCES", "RULES", "Query", "Rule", "choose", "judge"]


class Query(NamedTuple):
    """What is known when the choice is made.

    ``source`` is packed; ``origin`` says where it came from ("given", "bound", "route"). ``bound_ifindex`` is
    the interface of the device the id is already bound to, else 0. ``egress`` is where the route leaves by.
    """

    destination: InetAddr
    source: bytes
    origin: str
    route: RouteEntry
    egress: str
    bound_ifindex: int
    bound_device: str


def _family(query: Query, view: DeviceView, row: GidEntry) -> str | None:
    wanted = 4 if query.destination.family == AF_INET else 16
    if len(row.gid.ip) == wanted:
        return None
    return "the destination is IPv4, this GID is IPv6" if wanted == 4 else "the destination is IPv6, this GID is IPv4"


def _gid_type(query: Query, view: DeviceView, row: GidEntry) -> str | None:
    return None if row.gid_type is GidType.ROCE_V2 else f"GID type is {row.gid_type.name}, want ROCE_V2"


def _bound_device(query: Query, view: DeviceView, row: GidEntry) -> str | None:
    if not query.bound_ifindex or view.ifindex == query.bound_ifindex:
        return None
    return f"the id is bound to {query.bound_device}"


def _source_address(query: Query, view: DeviceView, row: GidEntry) -> str | None:
    if row.gid.ip == query.source:
        return None
    source = inet_ntop(query.destination.family, query.source)
    return {
        "given": f"the caller asked for source {source}",
        "bound": f"the id is bound to source {source}",
    }.get(query.origin, f"the route prefers source {source}")


def _egress(query: Query, view: DeviceView, row: GidEntry) -> str | None:
    # To one of our own addresses any of our devices will do: the packet does not leave the host.
    if query.route.kind == "local" or view.ifindex == query.route.ifindex:
        return None
    return f"the route leaves by {query.egress}"


def _port_state(query: Query, view: DeviceView, row: GidEntry) -> str | None:
    return None if view.is_active else "the port is down"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its name, its sentence in the documentation, and the test (None: no objection)."""

    name: str
    text: str
    objection: Callable[[Query, DeviceView, GidEntry], str | None]


RULES: tuple[Rule, ...] = (
    Rule("address-family", "The GID is of the destination's address family.", _family),
    Rule("gid-type", "The GID is a RoCE v2 one.", _gid_type),
    Rule("bound-device", "An id bound to a device stays on it.", _bound_device),
    Rule(
        "source-address",
        "The GID is the source address: the given or bound one, else the one the route prefers.",
        _source_address,
    ),
    Rule(
        "egress-interface",
        "The device is on the interface the route leaves by; to the host's own addresses, any device will do.",
        _egress,
    ),
    Rule("port-state", "The port is active.", _port_state),
)


def _owns_destination(query: Query, view: DeviceView, row: GidEntry) -> bool:
    return view.row_of(query.destination.ip) is None


def _index(query: Query, view: DeviceView, row: GidEntry) -> tuple[int, int]:
    return view.ifindex, row.gid_index


#: Among candidates that pass: lower keys first, compared in this order.
PREFERENCES: tuple[tuple[str, str, Callable[[Query, DeviceView, GidEntry], object]], ...] = (
    ("owns-destination", "A device that owns the destination address itself.", _owns_destination),
    ("lowest-index", "The lowest interface index, then the lowest GID index.", _index),
)


def _key(query: Query, view: DeviceView, row: GidEntry) -> tuple[object, ...]:
    return tuple(key(query, view, row) for _, _, key in PREFERENCES)


def _objection(query: Query, view: DeviceView, row: GidEntry) -> tuple[str, str] | None:
    for rule in RULES:
        reason = rule.objection(query, view, row)
        if reason is not None:
            return rule.name, reason
    return None


def choose(query: Query, host: HostView) -> tuple[DeviceView, GidEntry] | None:
    """The device and GID to use, None where every candidate meets an objection."""
    rows = host.by_ip.get(query.source, ())
    passed = [pair for pair in rows if _objection(query, *pair) is None]
    if len(passed) > 1:
        passed.sort(key=lambda pair: _key(query, *pair))
    return passed[0] if passed else None


def only_down(query: Query, host: HostView) -> DeviceView | None:
    """The device that would do if its port were up."""
    for view, row in host.by_ip.get(query.source, ()):
        objection = _objection(query, view, row)
        if objection is not None and objection[0] == "port-state":
            return view
    return None


def judge(query: Query, host: HostView) -> tuple[Candidate, ...]:
    """Every candidate of the host with the rule that decided on it; the chosen one first."""
    judged: list[tuple[bool, tuple[object, ...], DeviceView, GidEntry, tuple[str, str] | None]] = []
    for view in host.devices:
        for row in view.rows:
            objection = _objection(query, view, row)
            judged.append((objection is not None, _key(query, view, row), view, row, objection))
    judged.sort(key=lambda item: item[:2])
    survivors = [item for item in judged if item[4] is None]
    out = []
    for position, (_, key, view, row, objection) in enumerate(judged):
        if objection is not None:
            rule, reason = objection
        elif position == 0:
            rule, reason = "chosen", "the only candidate no rule objects to"
            if len(survivors) > 1:
                rule, reason = _preference(key, survivors[1][1])
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
    for (name, text, _), a, b in zip(PREFERENCES, better, worse, strict=True):
        if a != b:
            return name, text
    return PREFERENCES[-1][0], PREFERENCES[-1][1]
