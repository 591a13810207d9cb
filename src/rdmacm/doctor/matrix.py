"""A matrix of all pairs of hosts, as JSON data, and as a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

#: Hosts up to which a cell shows its number.
_WITH_NUMBERS = 16


@dataclass(frozen=True)
class Pair:
    """How a connection of a pair went: the round trip in microseconds, or the step that failed, and why."""

    ok: bool
    rtt_us: float | None
    step: str
    meaning: str = ""


@dataclass(frozen=True)
class Matrix:
    """The pairs by (from, to)."""

    hosts: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Pair]


def parse(data: object) -> Matrix:
    """``{"hosts": [...], "pairs": [{"from", "to", "ok", "rtt_us", "step", "meaning"}]}``; ValueError else.

    ``rdmacm check --all-pairs --json`` writes it.
    """
    if not isinstance(data, dict) or not isinstance(data.get("pairs"), list):
        raise ValueError("no list of pairs")
    pairs: dict[tuple[str, str], Pair] = {}
    for each in data["pairs"]:
        if not isinstance(each, dict) or not isinstance(each.get("from"), str) or not isinstance(each.get("to"), str):
            raise ValueError("a pair without from and to")
        pairs[each["from"], each["to"]] = Pair(
            bool(each.get("ok")), _time(each.get("rtt_us")), *(str(each.get(key) or "") for key in ("step", "meaning"))
        )
    named = data.get("hosts")
    hosts = [host for host in named if isinstance(host, str)] if isinstance(named, list) else []
    hosts += [host for pair in pairs for host in pair]
    return Matrix(tuple(dict.fromkeys(hosts)), pairs)


def _time(value: object) -> float | None:
    """A round trip, which has to be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def heat_map(matrix: Matrix) -> str:
    """The matrix as a table of HTML: rows connect to columns, what failed is marked."""
    times = [pair.rtt_us for pair in matrix.pairs.values() if pair.ok and pair.rtt_us]
    low, high = (min(times), max(times)) if times else (1.0, 1.0)
    failed = sum(not pair.ok for pair in matrix.pairs.values())
    head = "".join(f'<th scope="col"><span>{escape(host)}</span></th>' for host in matrix.hosts)
    rows = [
        f'<tr><th scope="row">{escape(host)}</th>'
        + "".join(_cell(matrix, host, other, low, high) for other in matrix.hosts)
        + "</tr>"
        for host in matrix.hosts
    ]
    legend = f"{len(matrix.pairs)} pairs, {failed} failed; rows connect to columns"
    if times:
        legend += f"; round trips from {low:.1f} to {high:.1f} µs, a stronger colour is slower"
    table = f'<table class="heat"><tr><td></td>{head}</tr>{"".join(rows)}</table>'
    return f'<p class="legend">{legend}</p><div class="scroll">{table}</div>'


def _cell(matrix: Matrix, host: str, other: str, low: float, high: float) -> str:
    pair = matrix.pairs.get((host, other))
    if pair is None:
        return '<td class="none"></td>'
    where = f"{host} to {other}"
    if not pair.ok:
        why = f"{f' at {pair.step}' if pair.step else ''}{f': {pair.meaning}' if pair.meaning else ''}"
        title = escape(f"{where}: failed{why}", quote=True)
        return f'<td class="failed" title="{title}">✕</td>'
    if pair.rtt_us is None:
        return f'<td class="heat0" title="{escape(f"{where}: ok", quote=True)}">ok</td>'
    part = math.log(pair.rtt_us / low) / math.log(high / low) if high > low and pair.rtt_us > 0 else 0.0
    step = round(max(0.0, min(1.0, part)) * 6)
    title = escape(f"{where}: {pair.rtt_us:.1f} µs", quote=True)
    shown = f"{pair.rtt_us:.0f}" if len(matrix.hosts) <= _WITH_NUMBERS else ""
    return f'<td class="heat{step}" title="{title}">{shown}</td>'
