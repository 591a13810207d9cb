"""What both sides of a check say to each other over TCP: one JSON object in each line. No input and output here.

=====  ==============================================================================================
from   line
=====  ==============================================================================================
client ``{"hello": 1, "from": IP, "to": IP, "key": N, "qpn": N, "qkey": N, "path_mtu": N}``
server the same with its own numbers, and ``hardware_address``, ``interface``, ``interfaces``; with ``no_way_back``
       and ``hint`` instead of numbers if it has no route to the client
client ``{"receive": N}``: make ready for N datagrams
server ``{"ready": N}``, perhaps fewer
client ``{"report": true}``, once all are sent
server ``{"received": [[payload, class sent, count], ...], "classes": [[sent, came], ...], "source": IP or ""}``
client ``{"send": [[payload, class, count], ...]}``
server ``{"sent": [[payload, class, count], ...]}``, once all are sent
either ``{"error": TEXT}``, and the end
=====  ==============================================================================================

The other side may be anybody: every line is bounded, each field is checked, and what is wrong is a :class:`LineError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from ipaddress import ip_address

#: Bytes of a line.
LONGEST_LINE = 16384
#: Datagrams of one direction, rows of a plan, and bytes of a datagram.
MOST_DATAGRAMS, MOST_ROWS, LONGEST_PAYLOAD = 2048, 32, 4096
_MOST_INTERFACES, _LONGEST_TEXT = 64, 400

#: Rows of payload, traffic class, count.
Rows = list[tuple[int, int, int]]


class LineError(ValueError):
    """The other side has sent what is no line of the protocol."""


def pack(**fields: object) -> bytes:
    """A line."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> dict[str, object]:
    """The object of a line. LineError if it is none, or if the other side reports an error."""
    if len(line) > LONGEST_LINE:
        raise LineError("a line is too long")
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise LineError("a line is not JSON") from None
    if not isinstance(found, dict):
        raise LineError("a line is not an object")
    if "error" in found:
        raise LineError(text_of(found, "error"))
    return found


def number_of(line: dict[str, object], name: str, most: int, least: int = 0) -> int:
    """An integer of a line within limits."""
    return _number(line.get(name), name, least, most)


def _number(value: object, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise LineError(f"{name} is no number from {least} to {most}")
    return value


def text_of(line: dict[str, object], name: str) -> str:
    """A text of a line, without characters that a terminal acts on; empty if it is not there."""
    value = line.get(name, "")
    if not isinstance(value, str):
        raise LineError(f"{name} is no text")
    return "".join(char if char.isprintable() else "?" for char in value[:_LONGEST_TEXT])


def address_of(line: dict[str, object], name: str) -> str:
    """An IP address of a line."""
    try:
        return str(ip_address(text_of(line, name)))
    except ValueError:
        raise LineError(f"{name} is no IP address") from None


def rows_of(line: dict[str, object], name: str) -> Rows:
    """Rows of payload, traffic class and count, which is at most :data:`MOST_DATAGRAMS` altogether."""
    rows = [
        (
            _number(payload, "payload", 0, LONGEST_PAYLOAD),
            _number(traffic_class, "class", 0, 255),
            _number(count, "count", 0, MOST_DATAGRAMS),
        )
        for payload, traffic_class, count in _lists(line.get(name), name, 3, MOST_ROWS)
    ]
    if sum(count for _, _, count in rows) > MOST_DATAGRAMS:
        raise LineError("too many datagrams")
    return rows


def classes_of(line: dict[str, object], name: str) -> dict[int, int]:
    """Traffic classes on arrival, by those sent."""
    pairs = _lists(line.get(name), name, 2, 256)
    return {_number(sent, "class", 0, 255): _number(came, "class", 0, 255) for sent, came in pairs}


def interfaces_of(line: dict[str, object]) -> dict[str, str]:
    """Names of interfaces by their hardware addresses."""
    found = line.get("interfaces", {})
    if not isinstance(found, dict) or len(found) > _MOST_INTERFACES:
        raise LineError("interfaces is no object")
    return {text_of({"key": key}, "key"): text_of(found, key) for key in found}


def _lists(value: object, name: str, length: int, most: int) -> Iterable[list[object]]:
    if not isinstance(value, list) or len(value) > most:
        raise LineError(f"{name} is no list")
    for row in value:
        if not isinstance(row, list) or len(row) != length:
            raise LineError(f"{name} has a row that is none")
        yield row
