"""The rows of a sequence diagram: what every form of it shows."""

from __future__ import annotations

from typing import NamedTuple

from rdmacm.trace.connection import Connection
from rdmacm.trace.verdicts import duration_text, size_text

#: Messages and events that a diagram shows one by one.
_MOST_SPANS, _MOST_EVENTS = 24, 40


class Row(NamedTuple):
    """An arrow from ``ends[sender]``, or a note of neither, in nanoseconds since the connection began.

    ``took``: of a message, the nanoseconds until it was acknowledged or answered.
    """

    time: int
    sender: int | None
    text: str
    took: int | None = None
    is_message: bool = False
    is_bad: bool = False


def rows(connection: Connection) -> list[Row]:
    """The diagram of a connection: its handshake, its first messages, what went wrong, and its end."""
    start = connection.first
    found = []
    events = connection.events
    left_out = connection.left_out
    if len(events) > _MOST_EVENTS:
        # The end of a connection is worth as much as its beginning.
        half = _MOST_EVENTS // 2
        left_out += len(events) - 2 * half
        events = [*events[:half], *events[-half:]]
    for event in events:
        bad = event.label.startswith(("NAK", "RNR", "ICMP", "REJ", "RST", "TERMINATE", "CNP"))
        text = event.text
        if event.count > 1 and event.last > event.time:
            text = f"{text[:-1]}, {duration_text(event.last - event.time)})"
        found.append(Row(event.time - start, event.sender, text, is_bad=bad))
    if left_out:
        found.append(Row(max(each.time for each in found), None, f"{left_out} more events"))
    messages = []
    for side, half_ in enumerate(connection.halves):
        if half_ is None:
            continue
        spans = [*half_.spans, *half_.outstanding]
        messages += [(span, side) for span in spans[:_MOST_SPANS]]
    messages.sort(key=lambda each: each[0].start)
    for span, side in messages[:_MOST_SPANS]:
        text = f"{span.operation} {size_text(span.octets)}"
        if span.repeats > 0:
            text += f", {span.repeats} packets sent again"
        if span.end is None and connection.is_acknowledged:
            text += ", not acknowledged"
        took = None if span.end is None else span.end - span.start
        found.append(Row(span.start - start, side, text, took, True, span.end is None and connection.is_acknowledged))
    count, octets = _all(connection)
    shown = messages[:_MOST_SPANS]
    rest = count - len(shown)
    if rest > 0 and shown:
        octets -= sum(span.octets for span, _ in shown)
        found.append(Row(shown[-1][0].start - start, None, f"{rest:,} more messages, {size_text(max(octets, 0))}"))
    # A note stands behind what has the same time.
    return sorted(found, key=lambda row: (row.time, row.sender is None))


def _all(connection: Connection) -> tuple[int, int]:
    count = octets = 0
    for half in connection.halves:
        if half is not None:
            count += sum(operation.count for operation in half.operations.values()) + len(half.outstanding)
            octets += sum(operation.octets for operation in half.operations.values())
            octets += sum(span.octets for span in half.outstanding)
    return count, octets


def heads(connection: Connection) -> tuple[str, str]:
    """What stands above the lines of a diagram: the names of both ends."""
    return (_head(connection, 0), _head(connection, 1))


def _head(connection: Connection, side: int) -> str:
    end = connection.ends[side]
    return end.name if not end.qpn else f"{end.name} QP {end.qpn:#08x}"
