"""How a connection fared, in one sentence.

A rule is one of a failure that is known from practice; its letter is what it is about: A the address and its neighbour,
C no answer, G the GID, its version and the MTU, J a refusal, Q the class of traffic, R the route. What a capture cannot
prove, the sentence calls likely.
"""

from __future__ import annotations

from typing import NamedTuple

from rdmacm.proto.cm.codes import RejectReason, SidrStatus
from rdmacm.proto.constants import DEFAULT_PKEY, PKEY_BITS
from rdmacm.proto.mad import MAD_SIZE
from rdmacm.trace.connection import ARP, IWARP, ND, SA, TCP, UD, Connection, Half, Unreachable, address_text
from rdmacm.trace.internet import describe, is_too_big
from rdmacm.trace.management import mtu_of, private_text, rejection_name
from rdmacm.trace.opcodes import ACCESS_ERROR, INVALID_REQUEST, OPERATIONAL_ERROR
from rdmacm.trace.tracer import Tracer

OK, NOTE, FAILED = "ok", "note", "failed"
#: A part of lost packets that is worth a sentence of its own.
_LOSS = 0.001
#: Bytes of IPv4 that carry a management datagram, and are known to pass once a handshake has.
_HANDSHAKE_WIRE = 20 + 8 + 12 + 8 + 256 + 4


class Verdict(NamedTuple):
    """``level``: ok, note (it works, but) or failed; ``rule``: the rule that fits, or ""."""

    level: str
    rule: str
    text: str


class Judge:
    """Judges the connections of a capture."""

    def __init__(self, tracer: Tracer) -> None:
        #: Addresses that have sent anything of RDMA to another one, both joined.
        self._heard = tracer.managers.heard | {half.pair for half in tracer.connections.halves.values() if half.packets}
        #: Port spaces in which somebody has a port, by address and port.
        self._listening: dict[tuple[bytes, int], set[str]] = {}
        for each in tracer.connections.all.values():
            end = each.ends[1]
            if each.port_space and end.port is not None and self._has_listener(each):
                self._listening.setdefault((end.address, end.port), set()).add(each.port_space)

    def verdict(self, connection: Connection) -> Verdict:
        """The verdict of a connection."""
        if connection.kind == SA:
            return _administrator(connection)
        if connection.kind == TCP:
            return _attempt(connection)
        if connection.kind in (ARP, ND):
            return _neighbour(connection)
        if connection.kind == IWARP:
            return _iwarp(connection) or _worked(connection)
        early = not connection.is_connected
        return (
            (_unreachable(connection) if early else None)
            or self._rejected(connection)
            or (self._unanswered(connection) if early else None)
            or _data(connection)
            or _worked(connection)
        )

    # -- the handshake -----------------------------------------------------------------------------------------

    def _has_listener(self, connection: Connection) -> bool:
        """Whether somebody listens. A host that answers others would say so if nobody did."""
        if connection.is_connected:
            return True
        first, second = connection.ends
        if connection.unreachable or second.address + first.address not in self._heard:
            return False
        rejection = connection.rejected
        is_nobody = rejection is not None and rejection.reason == RejectReason.INVALID_SERVICE_ID
        return not is_nobody and connection.status != SidrStatus.UNSUPPORTED

    def _rejected(self, connection: Connection) -> Verdict | None:
        rejection = connection.rejected
        peer = connection.ends[1].host
        if rejection is None:
            if connection.kind != UD or not connection.status:
                return None
            if connection.status == SidrStatus.UNSUPPORTED:
                return self._nobody(connection)
            why = connection.refusal or f"status {connection.status}"
            text = private_text(connection.private_data)
            return Verdict(FAILED, "J3", f"{peer} refused: {why}{f', private data {text}' if text else ''}")
        by = connection.ends[connection.rejected_by].host
        reason = rejection.reason
        text = private_text(rejection.private_data)
        if reason == RejectReason.INVALID_SERVICE_ID:
            return self._nobody(connection)
        if reason == RejectReason.STALE_CONN:
            qpn = connection.ends[0].qpn
            which = f"QP {qpn:#08x}" if qpn is not None else "this queue pair"
            return Verdict(
                FAILED, "J2", f"{by} still holds a connection with {which} (stale connection): wait, and connect again"
            )
        if reason == RejectReason.CONSUMER_DEFINED:
            private = f"private data {text}" if text else "without private data"
            return Verdict(FAILED, "J3", f"the application at {by} refused (reason 28, {private})")
        if reason == RejectReason.INVALID_MTU:
            theirs = mtu_of(rejection.ari[0]) if rejection.ari else 0
            at_most = f"takes {theirs}" if theirs else "does not say what it takes"
            return Verdict(FAILED, "G8", f"the request has a path MTU of {connection.mtu}, {by} {at_most}")
        others = connection.pkeys | ({connection.request.partition_key & PKEY_BITS} if connection.request else set())
        others -= {DEFAULT_PKEY & PKEY_BITS}
        if reason == RejectReason.INVALID_GID and others:
            return Verdict(FAILED, "R2", f"{by} does not take the request: P_Key {_pkeys(others)} is not in its table")
        if reason == RejectReason.TIMEOUT:
            if connection.rejected_by == 0:
                found = None if connection.is_connected else self._unanswered(connection)
                if found is not None:
                    return found
                return Verdict(FAILED, "", f"{by} gave up waiting (reason 4)")
            return Verdict(FAILED, "J5", f"{by} gave up (reason 4, timeout): likely its queue pair could not be made")
        return Verdict(FAILED, "", f"{by} rejected: reason {rejection_name(reason)}")

    def _nobody(self, connection: Connection) -> Verdict:
        end = connection.ends[1]
        space = connection.port_space
        if not space or end.port is None:
            return Verdict(FAILED, "J1", f"nobody at {end.host} listens on service id {connection.service_id or 0:#x}")
        others = sorted(self._listening.get((end.address, end.port), set()) - {space})
        if others:
            where = " and ".join(others)
            return Verdict(
                FAILED, "J1", f"port space {space} is wrong: {end.host} listens on port {end.port} in {where} only"
            )
        fits = "UDP" if connection.kind == UD else "TCP"
        if space in ("TCP", "UDP") and space != fits:
            return Verdict(
                FAILED, "J1", f"port space {space} does not fit {connection.kind}: nobody listens on port {end.port}"
            )
        return Verdict(FAILED, "J1", f"nobody at {end.host} listens on port {end.port} of port space {space}")

    def _unanswered(self, connection: Connection) -> Verdict | None:
        asked, named = ("SIDR_REQ", "SIDR_REP") if connection.kind == UD else ("REQ", "REP")
        count = connection.sent.get(asked, 0)
        first, second = connection.ends
        if connection.sent.get(named):
            again = connection.sent[named]
            times = f"sent {_times(again)}" if again > 1 else "sent"
            return Verdict(FAILED, "C1", f"the REP was {times}, and no RTU came: likely {first.host} does not get it")
        if not count:
            return None
        during = duration_text(connection.last_request - connection.first_request)
        times = f"{_times(count)} in {during}" if count > 1 else "once"
        head = f"{second.host} did not answer, {asked} was sent {times}"
        if connection.sent.get("MRA"):
            return Verdict(FAILED, "C2", f"{head}: it asked for more time, and its application did not accept")
        pkeys = connection.pkeys - {DEFAULT_PKEY & PKEY_BITS}
        if pkeys:
            return Verdict(
                FAILED, "R2", f"{head}: likely P_Key {_pkeys(pkeys)} is not in its table, as such packets are dropped"
            )
        if second.address + first.address in self._heard:
            return Verdict(FAILED, "C2", f"{head} although it sends other packets: likely its backlog is full")
        return Verdict(
            FAILED,
            "C1",
            f"{head}: likely a firewall drops UDP 4791, or the host is down or has no route back; nothing came from it "
            "at all",
        )


# -- no connection ---------------------------------------------------------------------------------------------


def _unreachable(connection: Connection) -> Verdict | None:
    if not connection.unreachable or (connection.rejected is not None and connection.rejected_by == 1):
        return None
    return _undelivered(connection, connection.unreachable[-1])


def _undelivered(connection: Connection, error: Unreachable) -> Verdict:
    """What an ICMP error says, whether of requests or of data."""
    end = connection.ends[1 - error.about]
    by = "" if error.sender == end.address else f", says {address_text(error.sender)}"
    peer = end.host
    what = describe(error)
    count = f" ({_times(error.count)})" if error.count > 1 else ""
    if is_too_big(error):
        return Verdict(FAILED, "G8", f"packets to {peer} are too big for the way{by}: {what}{count}")
    if what == "port unreachable":
        return Verdict(
            FAILED,
            "C1",
            f"no RDMA device of {peer} takes packets: its UDP port 4791 is closed (ICMP {what}{count}){by}",
        )
    if "prohibited" in what or "policy" in what or "reject" in what:
        return Verdict(FAILED, "C1", f"a firewall refuses packets to {peer} (ICMP {what}{count}){by}")
    rule = "A10" if what.startswith(("host", "address")) else "A3"
    return Verdict(FAILED, rule, f"{peer} cannot be reached (ICMP {what}{count}){by}")


def _administrator(connection: Connection) -> Verdict:
    asked, answered = connection.sent.get("query", 0), connection.sent.get("answer", 0)
    who = connection.ends[1].host
    if not answered:
        return Verdict(FAILED, "R1", f"the subnet administrator at {who} did not answer {_times(asked, 'query')}")
    if connection.status:
        return Verdict(FAILED, "R2", f"the subnet administrator has nothing: {connection.refusal}")
    return Verdict(OK, "", f"healthy: {_times(answered, 'answer')} of the subnet administrator")


def _attempt(connection: Connection) -> Verdict:
    """A stream of TCP that never got as far as MPA."""
    end = connection.ends[1]
    if connection.sent.get("RST") and not connection.sent.get("SYN, ACK"):
        return Verdict(FAILED, "J1", f"nobody at {end.host} listens on TCP port {end.port} (RST)")
    if not connection.sent.get("SYN, ACK"):
        if connection.unreachable:
            found = _unreachable(connection)
            if found is not None and found.rule:
                return found
        count = connection.sent.get("SYN", 0)
        return Verdict(FAILED, "C1", f"{end.host} did not answer {_times(count, 'SYN')}: likely a firewall drops them")
    return Verdict(NOTE, "", "a stream of TCP without MPA's request so far")


def _neighbour(connection: Connection) -> Verdict:
    """Questions for the hardware address of a neighbour, which got no answer."""
    first, second = connection.ends
    count, during = connection.sent["question"], duration_text(connection.last_request - connection.first_request)
    how = "ARP" if connection.kind == ARP else "neighbour discovery"
    asked = f"{first.host} asked {_times(count)} in {during} for its hardware address"
    return Verdict(FAILED, "A10", f"{second.host} does not answer {how}: {asked}, without which nothing else is sent")


def _iwarp(connection: Connection) -> Verdict | None:
    peer = connection.ends[1].host
    if connection.refusal:
        text = private_text(connection.private_data)
        private = f"private data {text}" if text else "without private data"
        return Verdict(FAILED, "J3", f"the application at {peer} refused (MPA reject, {private})")
    if not connection.is_connected:
        return Verdict(FAILED, "C2", f"{peer} took the connection of TCP, and did not answer MPA's request")
    if connection.terminated:
        return Verdict(FAILED, "", f"the stream was terminated: {connection.terminated}")
    if connection.sent.get("RST"):
        return Verdict(NOTE, "", f"connected, and ended by an RST; {_moved(connection)}")
    return None


# -- data --------------------------------------------------------------------------------------------------------


def _data(connection: Connection) -> Verdict | None:
    halves = [half for half in connection.halves if half is not None]
    for half in halves:
        by = connection.ends[connection.halves.index(half)].host
        for code, what in (
            (ACCESS_ERROR, "remote access error: a wrong R_Key, address or permission"),
            (INVALID_REQUEST, "invalid request: too long for the receive, or not permitted by the queue pair"),
            (OPERATIONAL_ERROR, "remote operational error: the responder has failed"),
        ):
            if half.naks[code]:
                return Verdict(FAILED, "", f"{by} refused a request with a NAK, {what}")
    if connection.is_acknowledged:
        for half in halves:
            found = _stuck(connection, half)
            if found is not None:
                return found
    pkeys = {half.pkey for half in halves if half.pkey >= 0}
    if len(pkeys) > 1:
        return Verdict(FAILED, "", f"the ends use different P_Keys, {_pkeys(pkeys)}: each drops the other's packets")
    return _slowed(connection, halves) or _gone(connection) or _odd(connection, halves)


def _gone(connection: Connection) -> Verdict | None:
    """A connection whose end only one side has noticed."""
    asked = [event for event in connection.events if event.label == "DREQ"]
    if connection.sent.get("DREP") or len(asked) != 1 or asked[0].count < 2 or asked[0].sender is None:
        return None
    who = connection.ends[1 - asked[0].sender].host
    times = _times(asked[0].count, "DREQ")
    return Verdict(NOTE, "", f"{who} did not answer {times}: it is gone, or its answers are lost; {_moved(connection)}")


def _stuck(connection: Connection, half: Half) -> Verdict | None:
    """A half whose oldest request is sent again and again, and never acknowledged."""
    peer = connection.ends[1 - connection.halves.index(half)].host
    reverse = half.reverse
    oldest = half.outstanding[0] if half.outstanding else half.current
    if half.rounds >= 2 or half.asked_again >= 2:
        # Errors of before, such as those of a request that came before its listener, are not the cause.
        since = oldest.start if oldest is not None else half.last
        for error in reversed(connection.unreachable):
            if error.last >= since and not is_too_big(error):
                return _undelivered(connection, error)
    if half.asked_again >= 2 and reverse is not None and reverse.longest_payload > MAD_SIZE:
        return Verdict(
            FAILED,
            "G8",
            f"the path MTU is larger than the way: responses to a READ, of {reverse.longest_payload} bytes each, never "
            f"got to {connection.ends[connection.halves.index(half)].host}, which asked for them again "
            f"{_times(half.asked_again)}, shorter packets did",
        )
    if half.rounds < 2 or oldest is None:
        return None
    if reverse is not None and reverse.rnr and reverse.last >= half.last - 2 * 10**9:
        times = _times(reverse.rnr, "RNR NAK")
        return Verdict(FAILED, "", f"{peer} never got ready to receive ({times}): its application posts no receives")
    wire, passed = half.stuck_wire, half.longest_acknowledged
    if not passed and connection.sent.get("REP"):
        passed = _HANDSHAKE_WIRE
    big = [each for each in connection.unreachable if is_too_big(each)]
    rounds = f"sent again {_times(half.rounds)}"
    if big or (passed and wire > passed):
        says = f"; {address_text(big[-1].sender)} says: {describe(big[-1])}" if big else ""
        return Verdict(
            FAILED,
            "G8",
            f"the path MTU is larger than the way: packets of {wire} bytes never got to {peer} ({rounds}), "
            f"those of up to {passed} did{says}",
        )
    first = half.outstanding[0] if half.outstanding else None
    if first is not None and first.operation == "READ" and reverse is not None and passed:
        expected = min(first.octets, connection.mtu or first.octets)
        if expected > max(reverse.longest_payload, MAD_SIZE):
            return Verdict(
                FAILED,
                "G8",
                f"the path MTU is larger than the way: responses to a READ, of {expected} bytes each, never came from "
                f"{peer} ({rounds}), shorter packets did",
            )
    if not passed:
        return Verdict(
            FAILED, "G1", f"{peer} never acknowledged anything ({rounds}): likely a GID of another version or network"
        )
    mac = _other_mac(connection)
    if mac:
        return Verdict(
            FAILED, "C5", f"{peer} stopped once the next hop had another MAC ({mac}), requests were {rounds}"
        )
    ago = duration_text(max(half.last - (reverse.last if reverse is not None else half.first), 0))
    return Verdict(FAILED, "", f"{peer} stopped: it acknowledged nothing in the last {ago}, requests were {rounds}")


def _other_mac(connection: Connection) -> str:
    """Which MAC address became another one for good, or "". Those of several ways at once change again and again."""
    for half in connection.halves:
        if half is not None and half.mac_changes == 1 and half.macs:
            at = 0 if half.macs[:6] != half.macs_before[:6] else 6
            before, now = (macs[at : at + 6].hex(":") for macs in (half.macs_before, half.macs))
            who = connection.ends[connection.halves.index(half)].host
            return f"{before} became {now}, which packets of {who} {'have' if at else 'go to'}"
    return ""


def _odd(connection: Connection, halves: list[Half]) -> Verdict | None:
    """What works, and may fail where the ends notice it."""
    mac = _other_mac(connection)
    if mac:
        text = f"the next hop has another MAC ({mac}): ids of Linux 6.0 and newer get UNREACHABLE; {_moved(connection)}"
        return Verdict(NOTE, "C5", text)
    senders = [half for half in halves if half.packets]
    classes = [half.tos >> 2 for half in senders]
    if len(set(classes)) > 1:
        who = [connection.ends[connection.halves.index(half)].host for half in senders]
        text = (
            f"packets of {who[0]} have DSCP {classes[0]}, those of {who[1]} {classes[1]}: the class is set at one end, "
            f"or changed on the way; {_moved(connection)}"
        )
        return Verdict(NOTE, "Q4", text)
    return None


def _slowed(connection: Connection, halves: list[Half]) -> Verdict | None:
    """What works, but not well."""
    packets = sum(half.packets for half in halves)
    marked, markable = (sum(getattr(half, name) for half in halves) for name in ("marked", "markable"))
    notices = sum(half.congestion_notices for half in halves)
    for half in halves:
        if half.packets >= 4 and half.marked == half.packets:
            who = connection.ends[connection.halves.index(half)].host
            return Verdict(
                NOTE, "Q3", f"every packet of {who} is marked as congested: its TOS has both bits of ECN set"
            )
    rnr = sum(half.rnr for half in halves)
    missing = sum(half.lost for half in halves)
    part = missing / max(packets + missing, 1)
    if part >= _LOSS:
        default = all(half.tos >> 2 == 0 for half in halves)
        rule, why = ("Q2", ", which have DSCP 0") if default and packets >= 1000 else ("", "")
        again = sum(half.repeated + half.repeated_responses for half in halves)
        return Verdict(
            NOTE,
            rule,
            f"{part * 100:.1f} % of the packets were lost{why}: {_times(missing, 'packet')}, {again} sent again; "
            f"{_moved(connection)}",
        )
    unseen = sum(half.unseen + half.missing_responses for half in halves)
    if unseen / max(packets + unseen, 1) >= _LOSS:
        return Verdict(
            NOTE, "", f"the capture lacks packets, at least {unseen}, that were not sent again; {_moved(connection)}"
        )
    if rnr:
        return Verdict(NOTE, "", f"receives came late {_times(rnr)} (RNR NAK): post more of them; {_moved(connection)}")
    if marked or notices:
        return Verdict(
            NOTE,
            "",
            f"congested: {marked} of {markable} packets were marked, {_times(notices, 'CNP')}; {_moved(connection)}",
        )
    return None


def _worked(connection: Connection) -> Verdict:
    tries = connection.sent.get("REQ", 0) + connection.sent.get("SIDR_REQ", 0)
    parts = []
    if tries > 1:
        unanswered = "the first request" if tries == 2 else f"the first {tries - 1} requests"
        parts.append(f"connected, though {unanswered} got no answer")
    elif tries and connection.established is not None:
        parts.append(f"connected in {duration_text(connection.established - connection.first_request)}")
    parts.append(_moved(connection))
    if connection.sent.get("REQ") and not connection.sent.get("REP"):
        parts.append("the capture lacks what the other end has sent")
    if connection.closed_by is not None:
        parts.append(f"ended by {connection.ends[connection.closed_by].host}")
    if connection.kind == UD and not connection.is_connected and not any(half for half in connection.halves):
        return Verdict(NOTE, "", "no datagram was sent")
    return Verdict(NOTE if tries > 1 else OK, "", f"healthy: {', '.join(parts)}")


# -- words -------------------------------------------------------------------------------------------------------


def _moved(connection: Connection) -> str:
    counts: dict[str, int] = {}
    octets = 0
    for half in connection.halves:
        for name, operation in half.operations.items() if half is not None else ():
            counts[name] = counts.get(name, 0) + operation.count
            octets += operation.octets
    if not counts:
        return "no data"
    return f"{', '.join(f'{count} {name}' for name, count in sorted(counts.items()))} of {size_text(octets)}"


def size_text(octets: int) -> str:
    """Bytes for people: ``864 bytes``, ``1.2 MB``."""
    if octets < 10_000:
        return f"{octets} bytes"
    for unit, size in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if octets < size * 1000 or unit == "GB":
            return f"{octets / size:.1f} {unit}"
    raise AssertionError


def duration_text(nanoseconds: int) -> str:
    """A duration for people, with three digits or more."""
    if nanoseconds >= 10**9:
        return f"{nanoseconds / 10**9:.1f} s"
    return f"{nanoseconds / 10**6:.1f} ms" if nanoseconds >= 10**6 else f"{nanoseconds / 1000:.1f} us"


def _times(count: int, what: str = "") -> str:
    if what:
        plural = what[:-1] + "ies" if what.endswith("y") else what + "s"
        return f"{count} {what if count == 1 else plural}"
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def _pkeys(pkeys: set[int]) -> str:
    return " and ".join(f"{pkey | 0x8000:#06x}" for pkey in sorted(pkeys))
