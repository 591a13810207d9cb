"""The reasons for the result of a resolution, as data and as text.

:func:`rdmacm.explain` returns an :class:`Explanation`, and the exception of a failed resolution has one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["Candidate", "Explanation", "NeighbourUsed", "RouteUsed", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One timed step of a resolution or connection setup: its ``name``, and its duration in ``microseconds``.

    ``detail`` is its result as text, and may be empty.
    """

    name: str
    microseconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RouteUsed:
    """The kernel's route to the destination, as ``ip route get`` shows it.

    ``destination``, ``gateway`` and ``source`` are addresses as text; without a gateway the destination is on link.
    ``interface`` is the name of the interface that packets leave by. ``kind`` is the route type (``unicast``,
    ``local``, ``multicast``), ``table`` the number of the routing table. ``mtu``, in bytes, and ``hop_limit`` are 0 if
    the route sets none.
    """

    destination: str
    kind: str
    interface: str
    gateway: str | None
    source: str | None
    table: int
    hop_limit: int
    mtu: int

    def command_with_mtu(self, mtu: int) -> str:
        """The command that limits packets to the destination to ``mtu`` bytes.

        >>> RouteUsed("10.0.0.2", "unicast", "eth0", None, "10.0.0.1", 254, 0, 0).command_with_mtu(1500)
        'ip route replace 10.0.0.2 dev eth0 mtu 1500'
        """
        via = f" via {self.gateway}" if self.gateway else ""
        return f"ip route replace {self.destination}{via} dev {self.interface} mtu {mtu}"


@dataclass(frozen=True, slots=True)
class NeighbourUsed:
    """The next hop's entry in the neighbour table (ARP, ND).

    ``address`` is the next hop's, as text; ``interface`` the name of the interface to it. ``link_layer_address`` is
    text, None if it is unknown. ``state`` is the kernel's name of the state, or ``absent`` without an entry.
    """

    address: str
    interface: str
    link_layer_address: str | None
    state: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of destination, source, device, port and GID, and the rule that decided on it.

    ``destination``, ``source`` and ``gid`` are text, ``device`` is the device's name, ``port_num`` the port's number,
    from 1, and ``gid_index`` the row of its GID table. ``kept`` is False when a rule dropped the candidate, and
    ``chosen`` is True for the one that was used. ``rule`` is the rule that dropped it or the preference that chose it,
    and ``reason`` explains that. ``interface`` is the IPoIB interface of the source; empty on RoCE, and if the source
    is a GID.
    """

    destination: str
    source: str
    device: str
    port_num: int
    gid_index: int
    gid: str
    kept: bool
    chosen: bool
    rule: str
    reason: str
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A resolution from name to device, port, GID and route, as far as it succeeded.

    - ``node``, ``service``: the name and the service to resolve, as passed to :func:`rdmacm.explain`.
    - ``provider``: the provider's name.
    - ``provider_reason``: why ``auto`` did not choose the kernel's devices; empty where it did, where the provider was
      named, and on a host without RDMA devices of the kernel.
    - ``names``: the addresses of the name, as text, in the order in which they are tried.
    - ``candidates``: all combinations that were considered, including dropped ones.
    - ``route``: the kernel's route to the destination; None when the resolution did not get that far.
    - ``neighbour``: the next hop's neighbour entry; None when the resolution did not get that far.
    - ``path``: fields of the path record, by name; ``mtu`` is in bytes.
    - ``steps``: the steps of the resolution, in order.
    - ``notes``: facts that explain the result and belong to no other field, each as one line of text.
    - ``error``: the step that failed; None when the resolution succeeded.
    - ``errno``: the errno that librdmacm would report, or a negative EAI code; 0 when the resolution succeeded.
    - ``errno_name``: the name of ``errno``, such as ``"ENETUNREACH"``.
    - ``message``: why the step failed, as text.
    - ``hint``: what the user may try.
    """

    node: str | None
    service: str | None
    provider: str
    names: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    route: RouteUsed | None = None
    neighbour: NeighbourUsed | None = None
    path: dict[str, Any] | None = None
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None
    errno: int = 0
    errno_name: str = ""
    message: str = ""
    hint: str | None = None
    provider_reason: str = ""

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that was used; None when no candidate was."""
        return next((c for c in self.candidates if c.chosen), None)

    @property
    def ok(self) -> bool:
        """Whether the resolution succeeded."""
        return self.error is None

    def replace(self, **changes: Any) -> Explanation:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, including ``chosen`` and ``ok``."""
        data = asdict(self)
        chosen = self.chosen
        data["chosen"] = asdict(chosen) if chosen else None
        data["ok"] = self.ok
        return data

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the explanation as text for people, without a final newline."""
        return "\n".join(_render(self))


def _render(ex: Explanation) -> list[str]:
    """The lines of the text, in the order of the resolution.

    The result comes last: on a terminal, the last line is the one that is always visible.
    """
    node = f"[{ex.node}]" if ex.node and ex.service and ":" in ex.node else ex.node
    what = ":".join(part for part in (node, ex.service) if part) or "-"
    reason = f", because {ex.provider_reason}" if ex.provider_reason else ""
    out = [f"{what} (provider {ex.provider}{reason})"]
    if ex.names and ex.names != (what,):
        out.append("names")
        out += [f"  {name}" for name in ex.names]
    if ex.route:
        r = ex.route
        via = f"via gateway {r.gateway}" if r.gateway else "on link" if r.kind == "unicast" else r.kind
        mtu = f" (MTU {r.mtu})" if r.mtu else ""
        source = f", source {r.source}" if r.source else ""
        table = {254: "main", 255: "local", 253: "default"}.get(r.table, str(r.table))
        out += ["route", f"  {r.destination} {via}, interface {r.interface}{mtu}{source}, table {table}"]
    if ex.neighbour:
        n = ex.neighbour
        out += ["neighbour", f"  {n.address} on {n.interface}: {n.state}"]
        if n.link_layer_address:
            out[-1] += f" at {n.link_layer_address}"
    destinations = list(dict.fromkeys(c.destination for c in ex.candidates))
    for destination in destinations:
        out.append(f"candidates for {destination}" if len(destinations) > 1 else "candidates")
        out += _render_candidates([c for c in ex.candidates if c.destination == destination])
    if ex.path:
        out.append("path")
        rest = dict(ex.path)
        if "sgid" in rest and "dgid" in rest:
            out.append(f"  {rest.pop('sgid')} -> {rest.pop('dgid')}")
        for key in ("flow_label", "pkey"):
            if key in rest:
                rest[key] = f"0x{rest[key]:x}"
        if "slid" in rest and "dlid" in rest:
            rest = {"LID": f"{rest.pop('slid')} -> {rest.pop('dlid')}", **rest}
        labels = {"mtu": "MTU", "pkey": "P_Key", "sl": "SL"}
        out.append("  " + ", ".join(f"{labels.get(key, key.replace('_', ' '))} {value}" for key, value in rest.items()))
    if ex.steps:
        out.append("steps")
        out += [f"  {s.name:<12}{s.microseconds:>10.1f} us  {s.detail}".rstrip() for s in ex.steps]
    out += [f"note: {note}" for note in ex.notes]
    if ex.error:
        out.append(f"FAILED at {ex.error}: {ex.message} [{ex.errno_name}]")
        if ex.hint:
            out.append(f"try: {ex.hint}")
    elif (c := ex.chosen) is not None:
        out.append(f"=> {c.destination} from {c.source}, device {c.device} port {c.port_num} GID index {c.gid_index}")
    return out


def _render_candidates(candidates: list[Candidate]) -> list[str]:
    """The lines for candidates, grouped by rule: a host has many candidates, but few reasons to drop them."""
    verdicts: dict[tuple[str, str, str], list[Candidate]] = {}
    for c in sorted(candidates, key=lambda c: (not c.chosen, not c.kept)):
        mark = "->" if c.chosen else "ok" if c.kept else "no"
        verdicts.setdefault((mark, c.rule, c.reason), []).append(c)
    width = max(len(c.device) + len(str(c.port_num)) for c in candidates) + 1
    out = []
    for (mark, rule, reason), group in verdicts.items():
        out.append(f"  {mark} {rule}: {reason}" if reason else f"  {mark} {rule}")
        for c in group:
            source = f"  {c.source} on {c.interface}, IPoIB" if c.interface else ""
            out.append(f"       {f'{c.device}/{c.port_num}':<{width}}  GID {c.gid_index:<2} {c.gid}{source}")
    return out
