"""rdma_getaddrinfo(3) of librdmacm and ours differ only as the rows of docs/parity.md say.

``RDMACM_DIFFERENTIAL_SEED`` gives other questions, ``RDMACM_DIFFERENTIAL_COUNT`` sets their number.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from socket import AF_INET, AF_INET6
from typing import Any

import pytest

from interop.differential import (
    AF_IB,
    DNS,
    FAMILY,
    HOSTS,
    IB,
    IPOIB,
    NOROUTE,
    NUMERICHOST,
    PASSIVE,
    RC,
    SA,
    SERVICES,
    TCP,
    UC,
    UD,
    UDP,
    XRC_RECV,
    XRC_SEND,
    Json,
    Questions,
    ask_in_child,
    unpack,
)
from interop.differing import LOCAL, SEED, Matching, Rules
from interop.machine.run import Machine
from rdmacm.address import SockAddrIB
from rdmacm.addrinfo import AddrInfo
from test_addrinfo_table import CASES

KNOWN_FLAGS = PASSIVE | NUMERICHOST | NOROUTE | FAMILY | SA | DNS
KNOWN_QP_TYPES = {0, RC, UC, UD, 8, XRC_SEND, XRC_RECV, 0xFF}
KNOWN_SPACES = {0, IPOIB, TCP, UDP, IB}
BADFLAGS, NONAME, NODATA, EAI_FAMILY, QPTYPE, SERVICE, ADDRFAMILY = -1, -2, -5, -6, -7, -8, -9
ALL_ONES = 0xFFFFFFFFFFFFFFFF


@dataclass
class Question:
    """A question; missing hints are zero."""

    node: str | None
    service: str | None
    hints: Json | None

    def __getattr__(self, name: str) -> Any:
        return (self.hints or {}).get(name, None if name.endswith(("addr", "route")) else 0)

    @property
    def alone(self) -> bool:
        return self.node is None and self.service is None

    @property
    def passive(self) -> bool:
        return bool(self.flags & PASSIVE)

    @property
    def own_address(self) -> list[Any] | None:
        """The address in the hints that a service without a node belongs to."""
        return self.src_addr if self.passive else self.dst_addr  # type: ignore[no-any-return]

    @property
    def own_end(self) -> bool:
        """Whether the hints have an address or a route for a service without a node."""
        if self.node is not None or self.service is None:
            return False
        return bool(self.own_address or (self.route and (self.passive or not self.src_addr)))

    @property
    def source_family(self) -> int:
        """The IP family of the hints' source, which a node has to have too; 0 for none."""
        return _family(self.src_addr) if self.src_addr and self.src_addr[0] != "ib" else 0

    @property
    def wants_gid(self) -> bool:
        return self.family == AF_IB and bool(self.flags & FAMILY)


rule = Rules("differential", lambda question: Question(**question))


def _scope(part: Any) -> Any:
    """A part of a question's address as in answers, which have the number of an interface."""
    return Matching("the number of va", lambda number: isinstance(number, int) and number > 0) if part == "va" else part


def changed(answer: Json, **fields: Any) -> Json:
    """The answer with these fields of its first entry replaced."""
    first, *rest = answer["entries"]
    return {"entries": [{**first, **fields}, *rest]}


# -- impossible hints -----------------------------------------------------------------------------------


@rule("node, service and hints all NULL", last=True)
def _(q: Question, c: Json) -> Any:
    return {"eai": NONAME} if q.alone and q.hints is None else None


@rule("unknown flags", last=True)
def _(q: Question, c: Json) -> Any:
    return {"eai": BADFLAGS} if q.flags & ~KNOWN_FLAGS else None


@rule("an address family that does not exist", last=True)
def _(q: Question, c: Json) -> Any:
    if q.family in (0, AF_INET, AF_INET6, AF_IB) or not (q.alone or q.node == "*" or q.service == "*"):
        return None
    return {"eai": EAI_FAMILY}


@rule("a QP type or port space that does not exist", last=True)
def _(q: Question, c: Json) -> Any:
    if q.family not in (0, AF_INET, AF_INET6, AF_IB):
        return None
    return {"eai": QPTYPE} if q.qp_type not in KNOWN_QP_TYPES or q.port_space not in KNOWN_SPACES else None


@rule("QP type and port space that contradict each other", last=True)
def _(q: Question, c: Json) -> Any:
    stream = q.qp_type in (RC, UC, XRC_SEND, XRC_RECV) and q.port_space in (UDP, IPOIB)
    if not stream and not (q.qp_type == UD and q.port_space == TCP):
        return None
    return {"eai": QPTYPE} if q.alone or q.node == "*" or q.service == "*" else None


@rule("source, destination and family of the hints that are not of one family", last=True)
def _(q: Question, c: Json) -> Any:
    ends = [q.src_addr, None if q.passive else q.dst_addr]
    families = {q.family or None, *(_family(end) if end else None for end in ends)} - {None}
    if c.get("eai") in (EAI_FAMILY, QPTYPE):
        return None
    return {"eai": ADDRFAMILY} if len(families) > 1 else None


@rule("RAI_SA: with a node, with RAI_DNS; without a service; no InfiniBand port", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.flags & SA or c.get("eai") in (EAI_FAMILY, QPTYPE):
        return None
    return {"errno": "ENOTSUP" if q.node is not None or q.flags & DNS else "EINVAL" if q.service is None else "ENOENT"}


# -- hints alone ----------------------------------------------------------------------------------------


@rule("hints without any address, and no node or service", last=True)
def _(q: Question, c: Json) -> Any:
    usable = q.src_addr or q.route or (q.dst_addr and not q.passive)
    return {"eai": NONAME} if q.alone and not usable else None


def _family(address: Sequence[Any]) -> int:
    return AF_IB if address[0] == "ib" else AF_INET if len(address) == 2 else AF_INET6


def _types(q: Question, usual_space: int = 0) -> Json:
    """The QP type and port space that follow from those of the hints."""
    qp, space = q.qp_type, q.port_space or usual_space
    datagram = space in (UDP, IPOIB) or (space != TCP and qp == UD)
    return {"qp_type": qp or (UD if datagram else RC), "port_space": space or (UDP if datagram else TCP)}


def _space(q: Question) -> int:
    """The port space of an AF_IB address in the hints, if they have none themselves; 0 if it does not say."""
    known = q.src_addr if q.passive or not q.dst_addr else q.dst_addr
    if q.port_space or not known or known[0] != "ib" or not known[2]:
        return 0
    space: int = known[2] >> 16
    return space if space in KNOWN_SPACES else IB


@rule("a route in the hints and nothing else", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.alone or q.src_addr or (q.dst_addr and not q.passive):
        return None
    if q.family not in (0, AF_IB):
        return {"eai": ADDRFAMILY}
    types = _types(q, IB)
    sid, mask = types["port_space"] << 16, ALL_ONES & ~0xFFFF
    source, destination = (["ib", f"::ffff:10.0.0.{host}", sid, mask, 0xFFFF, 0, 0] for host in (1, 2))
    return changed(
        c,
        **types,
        flags=q.flags & PASSIVE,
        family=AF_IB,
        src_addr=source,
        dst_addr=None if q.passive else destination,
    )


@rule("passive, destination in the hints")
def _(q: Question, c: Json) -> Any:
    return changed(c, dst_addr=None) if q.alone and q.passive and q.dst_addr else None


@rule("the port space of an AF_IB address in the hints", last=True)
def _(q: Question, c: Json) -> Any:
    """A service is then looked up in that port space."""
    if not (q.alone or q.own_end) or not _space(q) or c.get("eai") in (EAI_FAMILY, QPTYPE):
        return None
    if q.qp_type == UD and _space(q) == TCP:
        return {"eai": QPTYPE}
    if q.alone:
        return None
    return Matching(
        "an answer in the port space of the address, or without the service",
        lambda mine: mine.get("eai") in (SERVICE, NONAME) or mine["entries"][0]["port_space"] == _space(q),
    )


@rule("addresses only in the hints")
def _(q: Question, c: Json) -> Any:
    if not q.alone:
        return None
    known = q.src_addr if q.passive or not q.dst_addr else q.dst_addr
    return changed(c, **_types(q, _space(q)), flags=q.flags & PASSIVE, family=_family(known))


# -- names ----------------------------------------------------------------------------------------------


@rule("the hints' source and the node are not of one family", last=True)
def _(q: Question, c: Json) -> Any:
    if c.get("eai") in (EAI_FAMILY, QPTYPE) or q.alone or q.own_end or q.wants_gid or not q.src_addr:
        return None
    return {"eai": ADDRFAMILY} if _family(q.src_addr) == AF_IB and q.node is not None else None


@rule("a service without a node, active, with only a source in the hints", last=True)
def _(q: Question, c: Json) -> Any:
    if c.get("eai") in (EAI_FAMILY, QPTYPE) or q.alone or q.own_end or q.wants_gid or not q.src_addr:
        return None
    return {"eai": ADDRFAMILY} if _family(q.src_addr) == AF_IB else None


@rule("a service without a node, with an address or route in the hints", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.own_end or c.get("eai") in (EAI_FAMILY, QPTYPE):
        return None
    return {"eai": ADDRFAMILY} if not q.own_address and q.family not in (0, AF_IB) else None


@rule("a port above 65535 or below 0", last=True)
def _(q: Question, c: Json) -> Any:
    if c.get("eai") in (EAI_FAMILY, QPTYPE) or not re.fullmatch(r"[ \t-\r]*[+-]?[0-9]+", q.service or ""):
        return None
    return {"eai": SERVICE} if not 0 <= int(q.service or "") <= 65535 else None


@rule("node or service `*`", last=True)
def _(q: Question, c: Json) -> Any:
    return {"eai": NONAME} if q.service == "*" or q.node == "*" else None


def _is_service(service: str | None) -> bool:
    """Whether our services(5) has a service for any protocol."""
    return any(service in (name, *aliases) for name, _, *aliases in map(str.split, SERVICES.splitlines()))


@rule("an unknown service", last=True)
def _(q: Question, c: Json) -> Any:
    return {"eai": NONAME} if c.get("eai") == SERVICE and not _is_service(q.service) else None


@rule("a service without a node, with an address or route in the hints")
def _(q: Question, c: Json) -> Any:
    if not q.own_end or "entries" not in c:
        return None
    entry = c["entries"][0]
    found = entry["src_addr"] if q.passive else entry["dst_addr"]
    port = found[2] & 0xFFFF if found[0] == "ib" else found[1]
    space = q.port_space or (0 if q.own_address or (q.passive and q.src_addr) else IB) or entry["port_space"]
    space = space or (UDP if entry["qp_type"] == UD else TCP)
    sid, mask = (space << 16) + port, ALL_ONES if port else ALL_ONES & ~0xFFFF

    def at_port(address: list[Any]) -> list[Any]:
        if address[0] == "ib":
            return [*address[:2], sid, mask, *address[4:]]
        host, _, *scope = address
        return [host, port, *(_scope(each) for each in scope)]

    source: Any = q.src_addr
    destination: Any = None if q.passive else q.dst_addr
    if not q.own_address:
        ends = [["ib", f"::ffff:10.0.0.{host}", space << 16, ALL_ONES & ~0xFFFF, 0xFFFF, 0, 0] for host in (1, 2)]
        source, destination = ends[0], None if q.passive else ends[1]
    if q.passive:
        source = at_port(source)
    else:
        destination = at_port(destination)
        source = None if source is None else [_scope(each) for each in source] if source[0] != "ib" else source
    return changed(
        c,
        family=_family(destination or source),
        port_space=space,
        src_addr=source,
        dst_addr=destination,
    )


def _named(node: str | None) -> list[tuple[str, str]]:
    """The addresses of a name, each with its canonical name, from our /etc/hosts."""
    lines = [line.split() for line in HOSTS.splitlines()]
    wanted = (node or "").lower()
    if wanted.isdecimal():  # parsed as a number before it is looked up
        return []
    return [(ip, names[0]) for ip, *names in lines if wanted in map(str.lower, names)]


def _of_source_family(q: Question, c: Json) -> list[Any] | None:
    """The addresses of the node in the family of the hints' source; None if C's answer has that family already."""
    if "entries" not in c or q.alone or q.own_end or q.family or not q.source_family:
        return None
    found = c["entries"][0]["src_addr" if q.passive else "dst_addr"]
    if _family(found) == q.source_family:
        return None
    named = [ip for ip, _ in _named(q.node)] if not q.flags & NUMERICHOST else []
    if q.node is None:
        named = ["127.0.0.1", "::1"]
    if not named:  # numeric: only an IPv4-mapped address has a form in the other family
        named = [found[0]]
    if q.source_family == AF_INET:
        return [[ip.removeprefix("::ffff:"), found[1]] for ip in named if ":" not in ip.removeprefix("::ffff:")]
    return [[ip, found[1], 0, 0] for ip in named if ":" in ip]


@rule("the hints' source and the node are not of one family", last=True)
def _(q: Question, c: Json) -> Any:
    return {"eai": ADDRFAMILY} if _of_source_family(q, c) == [] else None


@rule("the hints' source and the node are not of one family")
def _(q: Question, c: Json) -> Any:
    """getaddrinfo(3) does not look at the scope of an IPv6 address when it is asked for IPv4."""
    if c.get("eai") != NONAME or q.family or q.source_family != AF_INET or ":" not in (q.node or ""):
        return None
    return {"eai": Matching("EAI_NONAME or EAI_ADDRFAMILY", lambda code: code in (NONAME, ADDRFAMILY))}


@rule("the hints' source and the node are not of one family")
def _(q: Question, c: Json) -> Any:
    addresses = _of_source_family(q, c)
    if addresses is None or q.node is None:
        return None
    return changed(c, family=q.source_family, **{"src_addr" if q.passive else "dst_addr": addresses[0]})


@rule("a service without a node, active, with only a source in the hints")
def _(q: Question, c: Json) -> Any:
    addresses = _of_source_family(q, c)
    if addresses is None or q.node is not None:
        return None
    return changed(c, family=q.source_family, dst_addr=addresses[0])


@rule("RAI_FAMILY with AF_IB and an IPv4 node", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.wants_gid or "entries" not in c or q.node is None:
        return None
    entry = c["entries"][0]
    found = entry["src_addr"] if q.passive else entry["dst_addr"]
    numeric = not _named(q.node) and (q.flags & NUMERICHOST or len(found) == 2)
    return {"eai": ADDRFAMILY} if numeric and ":" not in q.node else None


@rule("a name beyond ASCII, or with a label that is empty or longer than 63", last=True)
def _(q: Question, c: Json) -> Any:
    if q.node is None or c.get("eai") in (EAI_FAMILY, QPTYPE):
        return None
    labels = q.node.split(".")
    if q.node.isascii() and all(labels[:-1]) and len(max(labels, key=len)) < 64:
        return None
    try:
        encoded = q.node.encode("idna").decode()
    except UnicodeError:
        return {"eai": NONAME}
    if encoded == q.node or "errno" in c:
        return None
    known = bool(_named(encoded)) or encoded.isdecimal()

    def as_encoded(ours: Json) -> bool:
        return ours in ({"eai": NONAME}, c) or (known and ("entries" in ours or ours == {"eai": ADDRFAMILY}))

    return Matching(f"the answer for {encoded}", as_encoded)


@rule("a name that only has addresses of another family", last=True)
def _(q: Question, c: Json) -> Any:
    is_name = any("%" not in ip for ip, _ in _named(q.node)) and not q.flags & NUMERICHOST
    return (
        {"eai": ADDRFAMILY}
        if is_name and q.family in (AF_INET, AF_INET6) and c.get("eai") in (NONAME, NODATA)
        else None
    )


@rule("RAI_FAMILY with AF_IB")
def _(q: Question, c: Json) -> Any:
    if not q.wants_gid or q.alone or q.own_end or "entries" not in c:
        return None
    side = "src_addr" if q.passive else "dst_addr"
    found, space = c["entries"][0][side], c["entries"][0]["port_space"]
    if found[0] == "ib" and q.node is not None:
        return None
    if found[0] == "ib" or len(found) == 2:  # an IPv4 answer: ours is among those of IPv6
        port = found[2] & 0xFFFF if found[0] == "ib" else found[1]
        ips = ["::" if q.passive else "::1"] if q.node is None else [ip for ip, _ in _named(q.node) if ":" in ip]
        if not ips:
            return {"eai": ADDRFAMILY}
        found = [ips[0], port, 0, 0]
    host, port, flow, scope = found
    mask = ALL_ONES if port else ALL_ONES & ~0xFFFF
    return changed(c, family=AF_IB, **{side: ["ib", host, (space << 16) + port, mask, 0xFFFF, flow, scope]})


@rule("a service of neither TCP nor UDP")
def _(q: Question, c: Json) -> Any:
    if "entries" not in c or q.alone or c["entries"][0]["port_space"]:
        return None
    return changed(c, port_space=UDP if c["entries"][0]["qp_type"] == UD else TCP)


@rule("canonical names")
def _(q: Question, c: Json) -> Any:
    if "entries" not in c or q.flags & NUMERICHOST or not _named(q.node):
        return None
    side = "src_canonname" if q.passive else "dst_canonname"
    canonical = [name for _, name in _named(q.node)]
    return changed(c, **{side: Matching(f"one of {canonical}", lambda name: name in canonical)})


def _is_local(address: list[Any]) -> bool:
    return (address[0] in LOCAL or str(address[0]).startswith("fe80::")) and address[1] == 0


@rule("source address, active side")
def _(q: Question, c: Json) -> Any:
    if "entries" not in c or q.passive or q.flags & NOROUTE:
        return None
    entry = c["entries"][0]
    src, dst = entry["src_addr"], entry["dst_addr"]
    if dst is None or _family(dst) == AF_IB:
        return None
    if src is not None and _family(src) != _family(dst):
        return None
    if src is not None and src[0] not in ("0.0.0.0", "::"):
        return changed(c, route=Matching("a path or none", lambda n: n in (0, 72)))
    given = Matching("an address of this host or none", lambda mine: mine == src or _is_local(mine))
    return changed(c, src_addr=given, route=Matching("a path or none", lambda n: n in (0, 72)))


@rule("results")
def _(q: Question, c: Json) -> Any:
    if "entries" not in c or q.alone or q.own_end:
        return None
    ips = {ip for ip, _ in _named(q.node)}
    if q.node is None:
        ips = {"0.0.0.0", "::"} if q.passive else {"127.0.0.1", "::1"}
    family = q.family if q.wants_gid or q.family in (AF_INET, AF_INET6) else q.source_family
    if family:
        ips = {ip for ip in ips if (":" in ip) == (family != AF_INET)}
    ips = {ip.partition("%")[0] for ip in ips}
    if len(ips) < 2:
        return None
    side = "src_addr" if q.passive else "dst_addr"
    first = c["entries"][0]
    same = [name for name in first if name not in ("src_addr", "dst_addr", "family", "route")]

    def all_of_them(entries: Any) -> bool:
        hosts = {entry[side][1 if entry[side][0] == "ib" else 0] for entry in entries}
        return (
            entries[0] == first
            and len(hosts) == len(entries)
            and hosts == ips
            and all(entry[name] == first[name] for entry in entries for name in same)
        )

    return {"entries": Matching(f"{first} and others of {ips}", all_of_them)}


@rule("ai_family AF_IB without RAI_FAMILY", last=True)
def _(q: Question, c: Json) -> Any:
    if q.family != AF_IB or q.wants_gid or q.alone or q.own_end or "entries" not in c:
        return None
    return {
        "eai": Matching(
            "EAI_ADDRFAMILY, or EAI_NODATA", lambda code: code == ADDRFAMILY or (q.route and code == NODATA)
        )
    }


@rule("a route in the hints that no path has", last=True)
def _(q: Question, c: Json) -> Any:
    """That of the questions begins at 10.0.0.1 and ends at 10.0.0.2."""
    if not q.route or q.passive or q.flags & NOROUTE or "entries" not in c:
        return None

    def fits(entry: Json) -> bool:
        return not entry["route"] or entry["dst_addr"][0] == "10.0.0.2"

    return Matching(
        f"EAI_NODATA, or those of {c} that have such a path or none",
        lambda mine: mine == {"eai": NODATA} or all(map(fits, mine["entries"])),
    )


@pytest.mark.parametrize("provider", ["soft", "kernel"])
def test_getaddrinfo_differs_from_librdmacm_only_as_documented(machine: Machine, provider: str) -> None:
    seen = rule.check(machine, Questions(SEED), 2400, provider)
    print(*(f"{count:6} {row}" for row, count in seen.most_common()), sep="\n")


def _plain(hints: AddrInfo) -> Json:
    """Hints as in a question."""
    fields: Json = {name: int(getattr(hints, name)) for name in ("flags", "family", "qp_type", "port_space")}
    for side in ("src_addr", "dst_addr"):
        address = getattr(hints, side)
        if isinstance(address, SockAddrIB):
            fields[side] = unpack(address.pack())
        elif address is not None:
            fields[side] = list(address)
    if hints.route:
        fields["route"] = b"".join(path.pack() for path in hints.route).hex()
    return {name: value for name, value in {**fields, "connect": hints.connect.hex()}.items() if value}


@pytest.mark.parametrize("provider", ["soft", "kernel"])
def test_cases_of_the_table_differ_from_librdmacm_only_as_documented(machine: Machine, provider: str) -> None:
    questions = [
        {"node": case.node, "service": case.service, "hints": None if case.hints is None else _plain(case.hints)}
        for case in CASES.values()
    ]
    rule.check(machine, questions, len(questions), provider)


def test_crash_of_the_library_is_answered_with_its_signal() -> None:
    def ask(question: Json) -> Json:
        if question["node"] == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"eai": NONAME}

    out = io.StringIO()
    ask_in_child([json.dumps({"node": node}) for node in ("deadly", "a", "deadly", "b")], ask, out)
    crash = {"crash": "SIGKILL"}
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [crash, {"eai": -2}, crash, {"eai": -2}]
