"""The log of a simulated network as a picture in text, and as a capture file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from rdmacm.proto.frames import udp_frame
from rdmacm.proto.pcapng import enhanced_packet, interface_description, section_header
from rdmacm.proto.wire import WireError
from rdmacm.testing.faults import FabricPacket, Outcome

#: The least and the greatest distance of two columns.
_LEAST, _MOST = 16, 48
#: Outcomes of packets that go on: another entry says where they have ended.
_UNDER_WAY = frozenset((Outcome.DUPLICATED, Outcome.DELAYED, Outcome.CORRUPTED))


class Entry(Protocol):
    """An entry of the log; :class:`rdmacm.testing.LogEntry` is one."""

    @property
    def time(self) -> float:
        """In seconds of virtual time."""

    @property
    def outcome(self) -> Outcome:
        """What has happened to the packet."""

    @property
    def packet(self) -> FabricPacket:
        """The packet as it was sent."""

    @property
    def data(self) -> bytes:
        """Its bytes at this time."""


def diagram(entries: Sequence[Entry], limit: int | None, discarded: int) -> str:
    """A sequence diagram; see :meth:`FabricLog.to_diagram`."""
    hosts = list(dict.fromkeys(name for each in entries for name in (each.packet.source, each.packet.destination)))
    hosts = sorted(name for name in hosts if name)
    shown = entries if limit is None else entries[max(0, len(entries) - limit) :]
    left_out = discarded + len(entries) - len(shown)
    distance = max((len(_label(each)) + 9 for each in shown), default=0)
    distance = max(_LEAST, min(_MOST, distance))
    places = {name: at * distance for at, name in enumerate(hosts)}
    head = " " * 14 + "".join(f"{name[: distance - 1]:<{distance}}" for name in hosts)
    lines = [f"... {left_out} earlier entries"] if left_out else []
    lines += [head.rstrip(), *(_row(each, places, distance) for each in shown)]
    return "\n".join(lines)


def _label(entry: Entry) -> str:
    return f"{entry.packet.kind} #{entry.packet.number}"


def _row(entry: Entry, places: dict[str, int], distance: int) -> str:
    """The line of an entry: its time, its arrow, and what happened if it is not that it arrived."""
    width = max(places.values(), default=0) + 1
    cells = [" "] * max(width, distance)
    for place in places.values():
        cells[place] = "|"
    source = places[entry.packet.source]
    to = places.get(entry.packet.destination, source)
    arrives = entry.outcome is Outcome.DELIVERED
    if to == source:  # to itself, or to nobody
        text = f"-- {_label(entry)} {'->' if arrives else '-x'}"
        cells[source + 1 : source + 1 + len(text)] = text
    else:
        left, right = min(source, to), max(source, to)
        label = _label(entry)[: distance - 8]
        length = right - left - 1
        tip = ">" if arrives else "~" if entry.outcome in _UNDER_WAY else "x"
        if to > source:
            end = "x  " if tip == "x" else tip
            text = f"-- {label} ".ljust(length - len(end), "-") + end
        else:
            start = {">": "<", "x": "  x"}.get(tip, tip)
            text = f"{start}-- {label} ".ljust(length, "-")
        cells[left + 1 : right] = text
    what = "" if arrives else f"  {entry.outcome.value}"
    return f"{entry.time:12.6f}  {''.join(cells)}{what}".rstrip()


def capture_of(entries: Iterable[Entry]) -> list[bytes]:
    """The blocks of a capture file: the header, and one for each packet."""
    blocks = [section_header("rdmacm") + interface_description("fabric")]
    for entry in entries:
        packet = entry.packet
        if entry.outcome in _UNDER_WAY:
            continue
        comment = f"{packet.source} > {packet.destination or '?'} #{packet.number}: {entry.outcome.value}"
        if entry.data != packet.data:
            comment += ", corrupted"
        with suppress(WireError):  # longer than a UDP datagram
            frame = udp_frame(
                packet.local,
                packet.remote,
                packet.source_port,
                packet.port,
                entry.data,
                identification=packet.identification,
                tos=packet.traffic_class,
            )
            blocks.append(enhanced_packet(frame, round(entry.time * 1e9), comment=comment))
    return blocks
