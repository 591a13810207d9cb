"""The side that checks, with the help of ``rdmacm check --serve`` at the other side."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from rdmacm.check.datagrams import QKEY, DatagramEnd
from rdmacm.check.lines import (
    LONGEST_PAYLOAD,
    MOST_DATAGRAMS,
    LineError,
    Rows,
    classes_of,
    interfaces_of,
    number_of,
    rows_of,
    text_of,
)
from rdmacm.check.measured import Direction, Exchange, Resolution, Target
from rdmacm.check.tcp import Lines
from rdmacm.verbs.enums import Mtu

if TYPE_CHECKING:
    from rdmacm.check.measuring import Measurer

#: Seconds for the TCP connection, and for each answer.
_CONNECT_SECONDS, _ANSWER_SECONDS = 1.0, 10.0
#: The payload that loss is measured with, and how many longer datagrams there are of each payload.
_USUAL, _LONG_COUNT = 256, 8
#: Datagrams from one report to the next.
_BATCH = 256


def find_helper(found: Resolution, host: str, port: int) -> Helper | None:
    """The server at the peer, or at another of its addresses; None if there is none."""
    try:
        source = None if host else (found.source, 0)
        sock = socket.create_connection((host or found.destination, port), _CONNECT_SECONDS, source)
    except OSError:
        return None
    return Helper(Lines(sock, _ANSWER_SECONDS))


def plan(path_mtu: int, traffic_class: int, count: int) -> Rows:
    """The datagrams of one direction."""
    longer = [mtu.bytes for mtu in Mtu if _USUAL < mtu.bytes <= min(path_mtu, LONGEST_PAYLOAD)]
    most = MOST_DATAGRAMS - _LONG_COUNT * len(longer)
    return [(_USUAL, traffic_class, min(count, most)), *((size, traffic_class, _LONG_COUNT) for size in longer)]


class Helper:
    """The peer's server."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def exchange(self, measurer: Measurer, target: Target, count: int) -> Exchange | None:
        """Exchange datagrams; None if the server does not do its part."""
        cmid, resolved = measurer.resolved("udp", 0)
        if cmid is None:
            return None
        end = DatagramEnd(cmid)
        try:
            return self._exchange(end, target, resolved, count)
        except (OSError, LineError):
            return None
        finally:
            end.close()

    def _exchange(self, end: DatagramEnd, target: Target, found: Resolution, count: int) -> Exchange:
        key = secrets.randbits(63)
        lines = self._lines
        hello = lines.ask(
            hello=1,
            **{"from": found.source, "to": found.destination},
            key=key,
            qpn=end.qpn,
            qkey=end.qkey or QKEY,
            path_mtu=end.path_mtu,
        )
        where = text_of(hello, "hardware_address"), interfaces_of(hello), text_of(hello, "interface")
        if "no_way_back" in hello:
            text, hint = text_of(hello, "no_way_back") or "no route", text_of(hello, "hint")
            return Exchange(Direction(), Direction(), text, hint, *where)
        qpn, qkey = number_of(hello, "qpn", 0xFFFFFF), number_of(hello, "qkey", 0xFFFFFFFF)
        path_mtu = number_of(hello, "path_mtu", LONGEST_PAYLOAD)
        rows = plan(end.path_mtu, target.traffic_class, count)
        forward = self._forward(end, rows, qpn, qkey, key)
        back = self._back(end, plan(path_mtu, target.traffic_class, count), key)
        return Exchange(forward, back, "", "", *where, path_mtu)

    def _forward(self, end: DatagramEnd, rows: Rows, qpn: int, qkey: int, key: int) -> Direction:
        total = Direction({}, {}, {})
        for batch in batches(rows):
            self._lines.ask(receive=sum(count for _, _, count in batch))
            sent = end.send(batch, qpn, qkey, key)
            report = self._lines.ask(report=True)
            _add(total.sent, sent)
            _add(total.received, rows_of(report, "received"))
            total.classes.update(classes_of(report, "classes"))
        return total

    def _back(self, end: DatagramEnd, rows: Rows, key: int) -> Direction:
        sent: dict[tuple[int, int], int] = {}
        received: dict[tuple[int, int], int] = {}
        classes: dict[int, int] = {}
        other = ""
        for batch in batches(rows):
            end.expect(key)
            done = rows_of(self._lines.ask(send=batch), "sent")
            end.collect(sum(count for _, _, count in done))
            _add(sent, done)
            _add(received, end.rows())
            classes.update(end.classes)
            other = other or end.other_source
        return Direction(sent, received, classes, other)

    def close(self) -> None:
        """Let the server go."""
        self._lines.close()


def batches(rows: Rows) -> list[Rows]:
    """The same datagrams, no more than the other side has receives for in each part."""
    found: list[Rows] = [[]]
    room = _BATCH
    for payload, traffic_class, count in rows:
        left = count
        while left:
            if not room:
                found.append([])
                room = _BATCH
            part = min(left, room)
            found[-1].append((payload, traffic_class, part))
            left -= part
            room -= part
    return found


def _add(counts: dict[tuple[int, int], int], rows: Rows) -> None:
    for payload, traffic_class, count in rows:
        counts[payload, traffic_class] = counts.get((payload, traffic_class), 0) + count
