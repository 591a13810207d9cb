"""Connections as text for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence

from rdmacm.trace.connection import Connection, Half
from rdmacm.trace.rows import Row, heads, rows
from rdmacm.trace.verdicts import Verdict, duration_text, size_text

_TIME = 11
#: Characters between the lines of a diagram, at least.
_LEAST = 40
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = " .:-=+*#"
_SHADES = 16


def title(number: int, connection: Connection) -> str:
    """The first line about a connection."""
    first, second = connection.ends
    parts = [f"{number}  {connection.kind}  {first.name} -> {second.name}"]
    if connection.port_space:
        parts.append(f"port space {connection.port_space}")
    elif connection.service_id is not None:
        parts.append(f"service id {connection.service_id:#x}")
    if connection.mtu:
        parts.append(f"MTU {connection.mtu}")
    return ", ".join(parts)


def verdict_text(verdict: Verdict) -> str:
    """The verdict with its rule."""
    return f"{verdict.text} (rdmacm doctor {verdict.rule})" if verdict.rule else verdict.text


def diagram(connection: Connection, columns: int = 80, *, plain: bool = False) -> list[str]:
    """The sequence diagram, line by line. ``plain``: in ASCII."""
    bar, dash, left, right = ("|", "-", "<", ">") if plain else ("│", "─", "◀", "▶")
    width = max(columns - _TIME - 3, _LEAST)
    first, second = heads(connection)
    lines = []
    if len(first) + len(second) + 2 <= width:
        lines.append(f"{'':{_TIME}} {first}{second:>{width + 2 - len(first)}}")
    else:
        lines += [f"{'':{_TIME}} {first}", f"{'':{_TIME}} {second:>{width + 2}}"]
    for row in rows(connection):
        text = _label(row)
        head = f"{duration_text(row.time):>{_TIME}} "
        room = width - 8
        while len(text) > room:
            # What does not fit beside the arrow stands above it.
            cut = text.rfind(" ", 0, room)
            cut = cut if cut > 0 else room
            lines.append(f"{'':{_TIME}} {bar}{text[:cut].center(width)}{bar}")
            text = text[cut:].strip()
        if row.sender is None:
            lines.append(f"{head}{bar}{f'({text})'.center(width)}{bar}")
        else:
            line = f" {text} ".center(width - 2, dash)
            arrow = f"{dash}{line}{right}" if row.sender == 0 else f"{left}{line}{dash}"
            lines.append(f"{head}{bar}{arrow}{bar}")
    return lines


def _label(row: Row) -> str:
    return f"{row.text}, {duration_text(row.took)}" if row.is_message and row.took else row.text


def _senders(connection: Connection) -> tuple[str, str]:
    first, second = connection.ends
    if first.address == second.address:
        return first.name, second.name
    return first.host, second.host


def operation_rows(connection: Connection) -> list[list[str]]:
    """Sender, operation, count, bytes, and the median and the longest duration of each operation."""
    found = []
    senders = _senders(connection)
    for side, half in enumerate(connection.halves):
        for name, each in sorted(half.operations.items()) if half is not None else ():
            durations = each.durations
            timed = durations.most > 0
            found.append(
                [
                    senders[side],
                    name,
                    f"{each.count:,}",
                    size_text(each.octets),
                    duration_text(durations.percentile(0.5)) if timed else "",
                    duration_text(durations.percentile(0.99)) if timed else "",
                ]
            )
    return found


def half_rows(connection: Connection, *, plain: bool = False) -> list[list[str]]:
    """Sender, packets, bytes, lost, sent again, median round trip, throughput, and throughput over time."""
    found = []
    senders = _senders(connection)
    for side, half in enumerate(connection.halves):
        if half is None or not half.packets:
            continue
        took = half.last - half.first
        trips = half.round_trips
        found.append(
            [
                senders[side],
                f"{half.packets:,}",
                size_text(half.octets),
                str(half.lost),
                str(half.repeated + half.repeated_responses),
                duration_text(trips.percentile(0.5)) if trips.count else "",
                f"{half.octets * 1000 / took:,.1f}" if took > 0 else "",
                over_time(half, plain=plain),
            ]
        )
    return found


def over_time(half: Half, *, plain: bool = False) -> str:
    """The throughput as a row of characters, the highest of which stands for the largest."""
    bins = shrunk(half.series.closed(half.octets), _SHADES)
    most = max(bins, default=0)
    if not most or len(bins) < 2:
        return ""
    levels = _ASCII_LEVELS if plain else _LEVELS
    return "".join(levels[min(value * len(levels) // (most + 1), len(levels) - 1)] for value in bins)


def shrunk(bins: Sequence[int], most: int) -> list[int]:
    """The bins, each the sum of so many that at most ``most`` are left."""
    step = -(-len(bins) // most) or 1
    return [sum(bins[at : at + step]) for at in range(0, len(bins), step)]
