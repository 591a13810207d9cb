"""Connections as JSON data. Times are in nanoseconds since the first packet of the capture."""

from __future__ import annotations

from rdmacm.trace.connection import Connection, Half, address_text
from rdmacm.trace.internet import describe
from rdmacm.trace.management import private_text
from rdmacm.trace.opcodes import NAKS
from rdmacm.trace.verdicts import Verdict


def connection_json(number: int, connection: Connection, verdict: Verdict, start: int) -> dict[str, object]:
    """A connection with all that is known of it."""
    rejected = connection.rejected
    return {
        "number": number,
        "kind": connection.kind,
        "ends": [
            {"address": end.host, "port": end.port, "qpn": end.qpn, "comm_id": end.comm_id, "psn": end.psn}
            for end in connection.ends
        ],
        "service_id": connection.service_id,
        "port_space": connection.port_space or None,
        "mtu": connection.mtu or None,
        "pkeys": sorted(connection.pkeys),
        "first_ns": connection.first - start,
        "last_ns": connection.last - start,
        "established_ns": None if connection.established is None else connection.established - start,
        "closed_by": connection.closed_by,
        "messages": connection.sent,
        "rejected": None
        if rejected is None
        else {
            "by": connection.rejected_by,
            "reason": rejected.reason,
            "private_data": rejected.private_data.rstrip(b"\0").hex(),
        },
        "refusal": connection.refusal or None,
        "terminated": connection.terminated or None,
        "private_data": private_text(connection.private_data) or None,
        "unreachable": [
            {
                "from": address_text(each.sender),
                "type": each.type,
                "code": each.code,
                "text": describe(each),
                "count": each.count,
            }
            for each in connection.unreachable
        ],
        "events": [
            {
                "ns": event.time - start,
                "last_ns": event.last - start,
                "from": event.sender,
                "label": event.label,
                "detail": event.detail,
                "count": event.count,
            }
            for event in connection.events
        ],
        "directions": [None if half is None else half_json(half, start) for half in connection.halves],
        "verdict": {"level": verdict.level, "rule": verdict.rule or None, "text": verdict.text},
    }


def half_json(half: Half, start: int) -> dict[str, object]:
    """The packets from one end."""
    series = half.series
    return {
        "packets": half.packets,
        "bytes": half.octets,
        "missing": half.missing,
        "unseen": half.unseen + half.missing_responses,
        "reordered": half.reordered,
        "lost": half.lost,
        "repeated": half.repeated + half.repeated_responses,
        "naks": {NAKS.get(code, str(code)): count for code, count in sorted(half.naks.items())},
        "rnr_naks": half.rnr,
        "congestion": {"marked": half.marked, "markable": half.markable, "notices": half.congestion_notices},
        "round_trip": half.round_trips.as_dict(),
        "operations": {
            name: {"count": each.count, "bytes": each.octets, "duration": each.durations.as_dict()}
            for name, each in sorted(half.operations.items())
        },
        "unfinished": len(half.outstanding) + half.unwatched,
        "spans": [
            {
                "operation": span.operation,
                "bytes": span.octets,
                "ns": span.start - start,
                "took_ns": None if span.end is None else span.end - span.start,
                "repeats": max(span.repeats, 0),
            }
            for span in half.spans
        ],
        "throughput": {
            "start_ns": series.start - start,
            "bin_ns": series.width,
            "bytes": series.closed(half.octets),
        },
    }
