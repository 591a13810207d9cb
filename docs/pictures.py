"""What the pictures of the pages have in common: SVG with colours for light and dark pages, and diagrams of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
text{font:13px system-ui,sans-serif;fill:#1c2733}.b{font-weight:600}.s{fill:#5b6875;font-size:12px}
.bg{fill:#fff}.l{stroke:#9aa5b1}.a{stroke:#1f6feb}.x{stroke:#c93838}.ta{fill:#1f6feb}.tx{fill:#c93838}
.l,.a,.x{stroke-width:1.5;fill:none}.box{fill:#eef3fb;stroke:#9aa5b1}.hot{fill:#d8f0e3;stroke:#1a7f5a}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa7b4}.bg{fill:#0d1117}.l{stroke:#59636e}
.a{stroke:#6cb0ff}.x{stroke:#ff7b72}.ta{fill:#6cb0ff}.tx{fill:#ff7b72}.box{fill:#1a2330;stroke:#59636e}
.hot{fill:#12352a;stroke:#3fb98a}}
"""


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    """A file of SVG."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect class="bg" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


def text(x: int, y: int, what: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(what)}</text>'


# --- states -------------------------------------------------------------------------------------------------

#: Pixels: the box of a state; room for labels beside it; between lanes, between lines in a box, between boxes.
BOX_LEFT, BOX_WIDTH, LABELS, LANE, LINE, GAP = 110, 190, 170, 16, 20, 48
#: Of the arrows between neighbours, from the middle of a box.
ASIDE = 24


@dataclass
class Way:
    """A transition between states that are no neighbours: it leaves its box at the right and comes back by a lane."""

    start: str
    end: str
    label: str
    lane: int = 0


def state_diagram(order: Sequence[str], transitions: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """A diagram: the states from top to bottom, and an arrow for each transition with what leads to it.

    ``transitions``: (state, next state) to triggers. Those from a state to itself are listed in its box.
    """
    place = {name: at for at, name in enumerate(order)}
    ways = [
        Way(start, end, ", ".join(triggers))
        for (start, end), triggers in transitions.items()
        if abs(place[start] - place[end]) > 1
    ]
    stays = {start: triggers for (start, end), triggers in transitions.items() if start == end}
    ways.sort(key=lambda way: (abs(place[way.start] - place[way.end]), place[way.start]))
    lanes = _give_lanes(ways, place)
    # Each end of a way has a line of its own in its box, so that no two labels share one.
    lines = {name: [way for way in ways if name in (way.start, way.end)] for name in order}
    tops, bottoms, y = {}, {}, 20
    for name in order:
        tops[name] = y
        bottoms[name] = y + max(LINE * len(lines[name]), LINE * (1 + len(stays.get(name, ())))) + 14
        y = bottoms[name] + GAP
    right = BOX_LEFT + BOX_WIDTH
    parts: list[str] = []
    for (start, end), triggers in transitions.items():
        if abs(place[start] - place[end]) == 1:
            parts += _neighbours(tops, bottoms, start, end, ", ".join(triggers))
    at = {(name, id(way)): tops[name] + 17 + LINE * line for name in order for line, way in enumerate(lines[name])}
    for way in ways:
        x, y1, y2 = right + LABELS + LANE * way.lane, at[way.start, id(way)], at[way.end, id(way)]
        parts.append(f'<path class="a" d="M{right} {y1}H{x}V{y2}H{right}"/>')
        parts.append(f'<path class="ta" d="M{right} {y2}l9 -4v8z"/>')
        parts.append(text(right + 12, y1 - 5, way.label, "s"))
    for name in order:
        height = bottoms[name] - tops[name]
        parts.append(
            f'<rect class="box" x="{BOX_LEFT}" y="{tops[name]}" width="{BOX_WIDTH}" height="{height}" rx="4"/>'
        )
        parts.append(text(BOX_LEFT + 12, tops[name] + 22, name, "b"))
        for line, trigger in enumerate(stays.get(name, ()), 1):
            parts.append(text(BOX_LEFT + 12, tops[name] + 22 + LINE * line, f"↻ {trigger}", "s"))
    return picture(right + LABELS + LANE * lanes + 12, y - GAP + 20, parts)


def _give_lanes(ways: Sequence[Way], place: Mapping[str, int]) -> int:
    """Give each way a lane in which it meets no other, the shortest ways first. Returns the number of lanes."""
    taken: list[list[range]] = []
    for way in ways:
        first, last = sorted((place[way.start], place[way.end]))
        for way.lane, others in enumerate(taken):
            if all(last < other.start or first >= other.stop for other in others):
                break
        else:
            way.lane = len(taken)
            taken.append([])
        taken[way.lane].append(range(first, last + 1))
    return len(taken)


def _neighbours(
    tops: Mapping[str, int], bottoms: Mapping[str, int], start: str, end: str, label: str
) -> tuple[str, str, str]:
    """An arrow down, on the right of the middle, or up, on its left; the label is beside it."""
    is_down = tops[end] > tops[start]
    x = BOX_LEFT + BOX_WIDTH // 2 + (ASIDE if is_down else -ASIDE)
    y1, y2 = (bottoms[start], tops[end]) if is_down else (tops[start], bottoms[end])
    head = -9 if is_down else 9
    return (
        f'<path class="a" d="M{x} {y1}V{y2}"/>',
        f'<path class="ta" d="M{x} {y2}l-4 {head}h8z"/>',
        text(x + 8 if is_down else x - 8, (y1 + y2) // 2 + 4, label, "s", "start" if is_down else "end"),
    )
