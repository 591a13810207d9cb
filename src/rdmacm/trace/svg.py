"""Sequence diagrams as SVG, in one file that needs no other: arrows, durations of messages, and the throughput."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rdmacm.trace.connection import Connection
from rdmacm.trace.rows import Row, heads, rows
from rdmacm.trace.text import title, verdict_text
from rdmacm.trace.verdicts import NOTE, OK, Verdict, duration_text, size_text

_WIDTH, _LEFT, _RIGHT, _STEP, _TOP, _CHART = 900, 150, 750, 30, 110, 90
_STYLE = """
text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1c2733}
.t{font-weight:bold;font-size:14px}.s{fill:#66727f}.l{stroke:#9aa5b1;stroke-width:1.5}
.a{stroke:#1f6feb;stroke-width:1.5;fill:none}.m{stroke:#1a7f5a}.b{stroke:#c93838}
.ok{fill:#1a7f5a}.note{fill:#9a6700}.failed{fill:#c93838}
.span{fill:#1a7f5a;fill-opacity:.18}.c0{fill:#1f6feb;fill-opacity:.7}.c1{fill:#bf5af2;fill-opacity:.7}
"""


def svg(connections: Sequence[tuple[int, Connection, Verdict]]) -> str:
    """The diagrams of some connections, one below the other."""
    parts: list[str] = []
    at = 0
    for number, connection, verdict in connections:
        part, height = _one(number, connection, verdict)
        parts.append(f'<g transform="translate(0,{at})">{part}</g>')
        at += height
    marks = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
        for name, color in (("a", "#1f6feb"), ("m", "#1a7f5a"), ("b", "#c93838"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {at}" width="{_WIDTH}" height="{at}">'
        f'<style>{_STYLE}</style><defs>{marks}</defs><rect width="{_WIDTH}" height="{at}" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _one(number: int, connection: Connection, verdict: Verdict) -> tuple[str, int]:
    found = rows(connection)
    first, second = heads(connection)
    bottom = _TOP + _STEP * (len(found) + 1)
    parts = [
        _text(20, 28, title(number, connection), "t"),
        *(
            _text(20, 50 + 16 * line, text, {OK: "ok", NOTE: "note"}.get(verdict.level, "failed"))
            for line, text in enumerate(_wrapped(verdict_text(verdict), 118))
        ),
        _text(_LEFT, _TOP - 10, first, "", "middle" if len(first) < 36 else "start"),
        _text(_RIGHT, _TOP - 10, second, "", "middle" if len(second) < 36 else "end"),
        *(f'<path class="l" d="M{x} {_TOP}V{bottom}"/>' for x in (_LEFT, _RIGHT)),
    ]
    longest = max((row.took or 0 for row in found), default=0)
    for place, row in enumerate(found, 1):
        parts.append(_arrow(row, _TOP + place * _STEP, longest))
    chart = _chart(connection, bottom + 20)
    return "".join(parts) + chart, bottom + (_CHART + 50 if chart else 30)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)[:2] or [""]


def _arrow(row: Row, y: int, longest: int) -> str:
    label = f"{row.text}, {duration_text(row.took)}" if row.took else row.text
    middle = (_LEFT + _RIGHT) // 2
    parts = [_text(_LEFT - 12, y, duration_text(row.time), "s", "end")]
    if row.sender is None:
        return "".join([*parts, _text(middle, y, f"({label})", "s", "middle")])
    if row.took and longest:
        # A bar beside the end that waits, as long as the message took.
        length = max(2, 110 * row.took // longest)
        x = _RIGHT - 4 - length if row.sender else _LEFT + 4
        parts.append(f'<rect class="span" x="{x}" y="{y - 12}" width="{length}" height="16"/>')
    kind = "b" if row.is_bad else "m" if row.is_message else "a"
    start, end = (_LEFT, _RIGHT) if row.sender == 0 else (_RIGHT, _LEFT)
    parts.append(f'<path class="a {kind}" marker-end="url(#{kind})" d="M{start} {y}H{end}"/>')
    parts.append(_text(middle, y - 5, label, "", "middle"))
    return "".join(parts)


def _chart(connection: Connection, y: int) -> str:
    """The throughput of both directions over time."""
    parts = []
    halves = [half for half in connection.halves if half is not None and half.octets]
    if not halves or max(half.last for half in halves) <= min(half.first for half in halves):
        return ""
    begin = min(half.series.start for half in halves)
    end = max(half.series.end for half in halves)
    rates = {
        side: (half, half.series.closed(half.octets))
        for side, half in enumerate(connection.halves)
        if half is not None and half.octets
    }
    best = max(max(bins) * 10**9 / half.series.width for half, bins in rates.values()) or 1
    for side, (half, bins) in rates.items():
        scale = (_RIGHT - _LEFT) / (end - begin)
        width = half.series.width * scale
        for place, value in enumerate(bins):
            height = value * 10**9 / half.series.width / best * _CHART
            x = _LEFT + (half.series.start - begin) * scale + place * width
            if height >= 0.1:
                parts.append(
                    f'<rect class="c{side}" x="{x:.1f}" y="{y + _CHART - height:.1f}" width="{max(width, 0.5):.1f}"'
                    f' height="{height:.1f}"/>'
                )
    parts.append(f'<path class="l" d="M{_LEFT} {y + _CHART}H{_RIGHT}"/>')
    parts.append(_text(_LEFT - 12, y + 12, f"{size_text(int(best))}/s", "s", "end"))
    parts.append(_text(_RIGHT, y + _CHART + 16, duration_text(end - begin), "s", "end"))
    for side in rates:
        name = f"from {connection.ends[side].name}"
        parts.append(_text(_LEFT + 250 * side, y + _CHART + 16, name, f"c{side}"))
    return "".join(parts)
