"""What measurements mean. Pure functions: no input, no output, no clock."""

from __future__ import annotations

import errno
import re
from dataclasses import replace

from rdmacm.check.findings import Finding, Sign, Step
from rdmacm.check.measured import (
    Answer,
    Direction,
    Exchange,
    Listener,
    Refusal,
    Requests,
    Resolution,
    Sizes,
    Target,
)
from rdmacm.explanation import Explanation
from rdmacm.proto.cm.codes import RejectReason

#: The parts of an explanation that failed, by the step of the check that shows it.
_FAILED_AT = {"name": Step.NAME, "neighbour": Step.NEIGHBOUR}
#: Headers of a datagram around its payload, without the IP header: UDP, BTH, DETH, ICRC.
_DATAGRAM_HEADERS = 8 + 12 + 8 + 4
#: The MTU that a link has where nobody has set one.
_USUAL_MTU = 1500

#: The rules of ``rdmacm doctor`` about a resolution that fails.
_RESOLUTION_RULES = {Step.NAME: "A16", Step.ROUTE: "A3", Step.NEIGHBOUR: "A10"}

_ACCEPT = "nft insert rule inet filter input udp dport 4791 accept"
_SERVE = "'rdmacm check --serve' at the peer, which tells in which direction"


def length_of(payload: int, source: str) -> int:
    """The length of the IP packet of a datagram from an address."""
    return payload + _DATAGRAM_HEADERS + (40 if ":" in source else 20)


# -- resolution -------------------------------------------------------------------------------------------------


def judge_resolution(found: Resolution) -> list[Finding]:
    """The findings of name, route and neighbour, up to the first that is not good."""
    ex = found.explanation
    failed = None if ex.error is None else _FAILED_AT.get(ex.error, Step.ROUTE)
    if ex.error == "resolve_addr" and ex.errno == errno.ETIMEDOUT:
        failed = Step.NEIGHBOUR  # of the kernel, which says no more
    findings: list[Finding] = []
    for step, figure in ((Step.NAME, _name(found)), (Step.ROUTE, _route(found)), (Step.NEIGHBOUR, _neighbour(found))):
        if step is failed:
            text = f"{ex.message} [{ex.errno_name}]"
            command = ex.hint or ""
            if not command and step is Step.NEIGHBOUR and ex.route is not None:
                command = f"ping -I {ex.route.interface} {ex.route.gateway or ex.route.destination}"
            findings.append(Finding(step, Sign.BAD, figure or "-", text, command, rule=_resolution_rule(ex, step)))
            break
        findings.append(Finding(step, Sign.GOOD, figure))
    before = found.hardware_address_before
    if before and failed is None:
        text = f"it was {before} before: connected ids of Linux 6.0 and newer get UNREACHABLE"
        command = "taking that as a disconnect, and connecting again"
        findings[-1] = replace(findings[-1], meaning=text, command=command, rule="C5")
    return findings


def _resolution_rule(ex: Explanation, step: Step) -> str:
    named = re.search(r"rdmacm doctor ([A-Z]\d+)", ex.hint or "")
    if named:
        return named[1]
    if ex.error in ("path", "resolve_route"):  # which ask a subnet administrator
        return "R1" if ex.errno == errno.ETIMEDOUT else "R2"
    return _RESOLUTION_RULES[step]


def _name(found: Resolution) -> str:
    names = [name.rpartition(":")[0] for name in found.explanation.names]
    shown = ", ".join(dict.fromkeys(names))
    node = str(found.explanation.node)
    return f"{node} is {shown}" if shown and shown.strip("[]") != node else node


def _route(found: Resolution) -> str:
    ex = found.explanation
    if ex.route is None:
        return ""
    way = f"via {ex.route.gateway}" if ex.route.gateway else "on link" if ex.route.kind == "unicast" else ex.route.kind
    chosen = f", {ex.chosen.device} port {ex.chosen.port_num}" if ex.chosen else ""
    source = f" from {found.source}" if found.source else ""
    mtu = f", MTU {found.interface_mtu}" if found.interface_mtu else ""
    return f"{way} by {ex.route.interface}{source}{chosen}{mtu}"


def _neighbour(found: Resolution) -> str:
    near = found.explanation.neighbour
    if near is None:
        return "none needed" if found.explanation.error is None else ""
    at = f" is at {near.link_layer_address}" if near.link_layer_address else ""
    return f"{near.address}{at} ({near.state})"


def judge_neighbour(found: Resolution, exchange: Exchange) -> Finding | None:
    """ARP flux: the neighbour entry names another interface of the peer. None if it does not."""
    ex, seen = found.explanation, found.hardware_address
    if ex.route is None or ex.route.gateway or not seen or not exchange.hardware_address:
        return None
    if seen == exchange.hardware_address or seen not in exchange.interfaces:
        return None
    text = (
        f"{found.destination} is an address of the peer's {exchange.interface}, and its {exchange.interfaces[seen]} "
        "answers for it (ARP flux)"
    )
    command = "at the peer: sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2"
    return Finding(Step.NEIGHBOUR, Sign.BAD, _neighbour(found), text, command, rule="A11")


# -- UDP port 4791 -----------------------------------------------------------------------------------------------


def judge_port(target: Target, found: Resolution, asked: Requests, exchange: Exchange | None) -> Finding:
    """Whether packets to UDP port 4791 arrive, and packets from there."""
    step = Step.PORT
    if asked.error:
        return Finding(step, Sign.BAD, "no packet was sent", asked.error, asked.hint)
    if exchange is not None and exchange.no_way_back:
        text = f"the peer has no way back: {exchange.no_way_back}"
        return Finding(step, Sign.BAD, _ways(exchange), text, f"at the peer: {exchange.way_back_hint}", rule="A3")
    if asked.refusal is not None and not asked.round_trips:
        return _refused(target, found, asked)
    if exchange is not None:
        return _both_ways(found, exchange)
    if asked.round_trips:
        return Finding(step, Sign.GOOD, "packets arrive, and answers come back")
    host = {True: ", the host answers pings", False: ", the host answers no ping", None: ""}[asked.echo]
    if asked.echo is False:
        text = "the host is down, or drops everything, or has no route back; or a link on the way is broken"
        return Finding(step, Sign.BAD, f"no answer{host}", text, f"ping {found.destination}", likely=True, rule="C1")
    text = "a firewall there or on the way drops UDP port 4791, or the process at the peer is stopped"
    return Finding(
        step, Sign.BAD, f"no answer{host}", text, f"at the peer: {_ACCEPT}; {_SERVE}", likely=True, rule="C1"
    )


def _refused(target: Target, found: Resolution, asked: Requests) -> Finding:
    assert asked.refusal is not None
    is_own = asked.reporter in ("", found.source)
    figure = f"{'this host' if is_own else asked.reporter} reports {asked.refusal.value}"
    if is_own and asked.refusal is not Refusal.HOST:
        text = "a firewall of this host, or a route, rejects packets to UDP port 4791"
        return Finding(
            Step.PORT,
            Sign.BAD,
            figure,
            text,
            f"here: {_ACCEPT.replace('input', 'output')}; ip route get {found.destination}",
        )
    meaning, command = {
        Refusal.CLOSED: (
            "nothing at the peer has UDP port 4791: no RDMA device, or no process that uses the software device",
            f"starting the program at {target.host}; for a kernel's device 'rdma link' there",
        ),
        Refusal.PROHIBITED: (
            "a firewall rejects UDP port 4791",
            f"at {asked.reporter}: {_ACCEPT}",
        ),
        Refusal.HOST: ("the peer's address is not in use on its network, or a route rejects it", "ip neigh; ip route"),
        Refusal.NETWORK: ("a router on the way has no route to the peer", f"ip route, at {asked.reporter}"),
    }[asked.refusal]
    rule = {Refusal.CLOSED: "C1", Refusal.PROHIBITED: "C1", Refusal.HOST: "A10", Refusal.NETWORK: "A3"}[asked.refusal]
    return Finding(Step.PORT, Sign.BAD, figure, meaning, command, rule=rule)


def _ways(exchange: Exchange) -> str:
    return ", ".join(
        f"{came} of {sent} {word}"
        for word, (sent, came) in (("there", exchange.forward.count()), ("back", exchange.back.count()))
        if sent
    )


def _both_ways(found: Resolution, exchange: Exchange) -> Finding:
    there, back = (way.count(way.payloads[0] if way.payloads else None)[1] for way in (exchange.forward, exchange.back))
    figure = _ways(exchange)
    if there and back:
        if exchange.back.other_source:
            text = f"the peer sends from {exchange.back.other_source}, not from {found.destination}"
            return Finding(Step.PORT, Sign.BAD, figure, text, f"at the peer: ip route get {found.source}")
        return Finding(Step.PORT, Sign.GOOD, figure)
    if there:
        text = f"packets reach the peer, and none comes back: they are dropped here or on the way to {found.source}"
        return Finding(Step.PORT, Sign.BAD, figure, text, f"here: {_ACCEPT}", rule="C1")
    if not exchange.back.sent:
        where = target_of(found)
        text = f"no packet reaches the peer, and none was sent back: they are dropped there or on the way to {where}"
        return Finding(Step.PORT, Sign.BAD, figure, text, f"at the peer: {_ACCEPT}", rule="C1")
    if back:
        text = (
            f"packets come back, and none reaches the peer: they are dropped there or on the way to {target_of(found)}"
        )
        return Finding(Step.PORT, Sign.BAD, figure, text, f"at the peer: {_ACCEPT}", rule="C1")
    text = "UDP port 4791 is dropped in both directions, though TCP passes"
    return Finding(Step.PORT, Sign.BAD, figure, text, f"on both sides: {_ACCEPT}; the firewalls on the way", rule="C1")


def target_of(found: Resolution) -> str:
    """The address of the peer."""
    return found.destination or str(found.explanation.node)


# -- connection manager -------------------------------------------------------------------------------------------


def judge_manager(target: Target, asked: Requests, listener: Listener | None) -> Finding:
    """Whether the peer's connection manager answers, and a listener at the port."""
    step = Step.MANAGER
    if not asked.round_trips:
        text = "datagrams pass, and the connection manager does not answer: its process is stopped, or overloaded"
        return Finding(step, Sign.BAD, f"none of {asked.sent} requests answered", text, "'ps' at the peer", likely=True)
    values: dict[str, object] = {"rtt_us": round(min(asked.round_trips), 1)}
    figure = f"answers in {min(asked.round_trips):.0f} us"
    if listener is None:
        return Finding(step, Sign.GOOD, figure, values=values)
    where = f"port {target.port} ({target.space})"
    match listener.answer:
        case Answer.ACCEPTED:
            figure += f", {where} accepts in {listener.microseconds:.0f} us"
            return Finding(step, Sign.GOOD, figure, values=values)
        case Answer.SILENT:
            text = f"the listener does not answer: its backlog is full, or its process is stopped or busy ({where})"
            command = "at the peer: 'ps', and a larger backlog (sysctl net.rdma_ucm.max_backlog)"
            return Finding(step, Sign.BAD, f"{figure}, {where} does not", text, command, True, values, "C2")
        case Answer.FAILED:
            return Finding(step, Sign.BAD, figure, listener.text, listener.hint, values=values)
        case Answer.REJECTED:
            return _rejected(figure, where, target, listener, values)


def _rejected(figure: str, where: str, target: Target, listener: Listener, values: dict[str, object]) -> Finding:
    is_datagram = target.space == "udp"
    nobody = 1 if is_datagram else int(RejectReason.INVALID_SERVICE_ID)
    refused = 2 if is_datagram else int(RejectReason.CONSUMER_DEFINED)
    if not is_datagram and listener.reason == RejectReason.INVALID_MTU:  # the next step says so
        return Finding(Step.MANAGER, Sign.GOOD, figure, values=values)
    if listener.reason == refused:
        figure = f"{figure}, {where} refuses"
        return Finding(Step.MANAGER, Sign.GOOD, figure, values=values)
    if listener.reason == nobody and listener.elsewhere:
        space = listener.elsewhere[0]
        text = f"nobody listens on {where}, and somebody in port space {space}: the two sides use different ones"
        return Finding(
            Step.MANAGER, Sign.BAD, figure, text, f"--port-space {space}; RDMA_PS_* of both", values=values, rule="J1"
        )
    if listener.reason == nobody:
        text = f"nobody listens on {where}"
        return Finding(
            Step.MANAGER, Sign.BAD, figure, text, f"starting the server at {target.host}", values=values, rule="J1"
        )
    if not is_datagram and listener.reason == RejectReason.INVALID_GID:
        text = f"{listener.text}: the peer does not take this partition (P_Key), or not this address"
        return Finding(
            Step.MANAGER, Sign.BAD, figure, text, "'rdmacm devices --json' on both sides: pkeys", True, values, "R2"
        )
    return Finding(Step.MANAGER, Sign.BAD, figure, listener.text, listener.hint, values=values)


# -- path MTU ----------------------------------------------------------------------------------------------------


def judge_mtu(
    target: Target, found: Resolution, listener: Listener | None, sizes: Sizes | None, exchange: Exchange | None
) -> Finding:
    """Whether packets of the path MTU arrive."""
    figure = f"{found.path_mtu}"
    if listener is not None and listener.answer is Answer.REJECTED and target.space != "udp":
        if listener.reason == RejectReason.INVALID_MTU:
            return Finding(Step.MTU, Sign.BAD, figure, listener.text, listener.hint, rule="G8")
    if exchange is not None:
        return _mtu_both_ways(found, exchange)
    if listener is not None and listener.long_arrived is not None:
        if listener.long_arrived:
            return Finding(Step.MTU, Sign.GOOD, f"{figure}, packets of {listener.longest} bytes arrive")
        text = (
            f"short packets arrive, and one of {listener.longest} bytes does not: a link on the way has a smaller MTU"
        )
        return Finding(Step.MTU, Sign.BAD, figure, text, cure(found, min(_USUAL_MTU, listener.longest - 1)), rule="G8")
    if sizes is None or sizes.error or not any(sizes.answered.values()):
        why = sizes.error if sizes is not None and sizes.error else "the host answers no probe"
        return Finding(Step.MTU, Sign.UNKNOWN, f"{figure}, not measured: {why}", command=f"a PORT, or {_SERVE}")
    good = max(length for length, came in sizes.answered.items() if came)
    lost = [length for length, came in sizes.answered.items() if not came and length > good]
    if sizes.reported_mtu and lost:
        text = f"a router on the way reports MTU {sizes.reported_mtu}: longer packets do not pass"
        return Finding(Step.MTU, Sign.BAD, figure, text, cure(found, sizes.reported_mtu), rule="G8")
    if lost:
        text = (
            f"packets of up to {good} bytes arrive, and of {min(lost)} none does: a link on the way has a smaller MTU"
        )
        return Finding(
            Step.MTU, Sign.BAD, figure, text, cure(found, _mtu_between(good, min(lost))), likely=True, rule="G8"
        )
    return Finding(Step.MTU, Sign.GOOD, f"{figure}, packets of {good} bytes arrive", likely=True)


def _mtu_between(good: int, lost: int) -> int:
    return _USUAL_MTU if good <= _USUAL_MTU < lost else good


def cure(found: Resolution, mtu: int) -> str:
    """The command that limits packets to the peer."""
    route = found.explanation.route
    if route is None:
        return f"a route with MTU {mtu}, at both sides"
    return f"{route.command_with_mtu(mtu)}, and at the peer the same for {found.source}"


def _mtu_both_ways(found: Resolution, exchange: Exchange) -> Finding:
    figure = f"{found.path_mtu}"
    ways = ((exchange.forward, "to the peer"), (exchange.back, "from the peer"))
    longest = []
    for way, word in ways:
        came = [size for size in way.payloads if way.count(size)[1]]
        lost = [size for size in way.payloads if not way.count(size)[1] and came and size > max(came)]
        if lost:
            good, bad = length_of(max(came), found.source), length_of(min(lost), found.source)
            text = (
                f"packets of up to {good} bytes arrive, longer ones {word} do not: a link on the way has a smaller MTU"
            )
            return Finding(Step.MTU, Sign.BAD, figure, text, cure(found, _mtu_between(good, bad)), rule="G8")
        longest += came[-1:]
    if exchange.path_mtu and exchange.path_mtu != found.path_mtu:
        text = f"the path MTU is {found.path_mtu} bytes here and {exchange.path_mtu} at the peer"
        if exchange.path_mtu < found.path_mtu:
            return Finding(
                Step.MTU, Sign.BAD, figure, f"{text}: it rejects connections", cure(found, exchange.path_mtu + 96)
            )
        return Finding(Step.MTU, Sign.GOOD, f"{figure} ({exchange.path_mtu} at the peer)")
    shown = f", packets of {length_of(min(longest), found.source)} bytes arrive both ways" if longest else ""
    return Finding(Step.MTU, Sign.GOOD, figure + shown)


# -- loss and traffic class ---------------------------------------------------------------------------------------


def judge_loss(asked: Requests, exchange: Exchange | None) -> Finding:
    """How many packets are lost, and the round trip."""
    trips = (exchange.round_trips if exchange is not None else ()) or asked.round_trips
    if exchange is not None:
        ways = [("there", *_lost(exchange.forward)), ("back", *_lost(exchange.back))]
    else:
        ways = [("both ways", asked.sent - len(asked.round_trips), asked.sent)]
    lost, sent = sum(way[1] for way in ways), sum(way[2] for way in ways)
    share = 100 * lost / sent if sent else 0.0
    values: dict[str, object] = {"sent": sent, "lost": lost}
    figure = f"{share:.1f} % of {sent}"
    if trips:
        ordered = sorted(trips)
        middle = ordered[len(ordered) // 2]
        values |= {
            "rtt_min_us": round(ordered[0], 1),
            "rtt_p50_us": round(middle, 1),
            "rtt_max_us": round(ordered[-1], 1),
        }
        figure += f", round trip {ordered[0]:.0f}/{middle:.0f}/{ordered[-1]:.0f} us (min/median/max)"
    if not lost:
        return Finding(Step.LOSS, Sign.GOOD, figure, values=values)
    where = ", ".join(f"{count} of {of} {word}" for word, count, of in ways if count)
    text = f"packets are lost ({where}): each costs the reliable connection a retransmission, and much of its rate"
    command = "'ip -s link' and 'ethtool -S IF' for drops on both sides; PFC or ECN on the switches"
    return Finding(Step.LOSS, Sign.BAD, figure, text, command, exchange is None, values)


def _lost(way: Direction) -> tuple[int, int]:
    """Packets lost and sent, of the payloads that arrive at all."""
    counts = [way.count(size) for size in way.payloads]
    return sum(sent - came for sent, came in counts if came), sum(sent for sent, came in counts if came)


def judge_class(target: Target, exchange: Exchange | None) -> Finding:
    """Whether the traffic class arrives as it was sent."""
    wanted = target.traffic_class
    figure = f"{wanted} (DSCP {wanted >> 2})"
    if exchange is None:
        return Finding(Step.CLASS, Sign.UNKNOWN, f"{figure} here, what arrives is not known", command=_SERVE)
    for way, word in ((exchange.forward, "at the peer"), (exchange.back, "here")):
        for sent, came in way.classes.items():
            if sent >> 2 != came >> 2:
                text = f"packets with traffic class {sent} arrive {word} with {came}: a switch or a rule changes it"
                command = "trust DSCP on the switch ports; 'tc filter show' and 'nft list ruleset' on both sides"
                return Finding(Step.CLASS, Sign.BAD, figure, text, command, rule="Q2")
            if came & 3 == 3:
                text = f"packets arrive {word} marked as congestion experienced"
                return Finding(
                    Step.CLASS, Sign.BAD, figure, text, "ECN thresholds of the switches; tos without bits 0, 1"
                )
    return Finding(Step.CLASS, Sign.GOOD, f"{figure}, as sent in both directions")
