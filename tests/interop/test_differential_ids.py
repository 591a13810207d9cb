"""rdma_bind_addr(3), rdma_resolve_addr(3) and rdma_resolve_route(3) of librdmacm and ours differ only as the rows of
docs/parity.md say.

Both libraries run on the same host, with the kernel's devices and ours on the same interfaces. They send nothing but
neighbour solicitations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interop.differential import IPOIB, Json
from interop.differential_ids import Questions
from interop.differing import LOCAL, SEED, Matching, Rules
from interop.machine.run import Machine

Address = list[Any]

#: The prefixes of the interface without a kernel device.
WITHOUT_DEVICE = ("10.7.0.", "fd07::")
#: Our link-local address with its scope, and without: EINVAL for both as the source on another link.
LINK_LOCAL = (("fe80::1", "va"), ("fe80::1", 0))
ANYTHING = Matching("anything", lambda ours: True)


def is_any(address: Address) -> bool:
    return address[0] in ("0.0.0.0", "::")


def is_loopback(address: Address) -> bool:
    return address[0] == "::1" or (len(address) == 2 and address[0].startswith("127."))


def is_ib(address: Address | None) -> bool:
    return address is not None and address[0] == "ib"


def is_elsewhere(address: Address) -> bool:
    """Link-local, with the scope of another link."""
    return address[0].startswith(("fe80::", "ff02::")) and (address[0], address[3]) not in LINK_LOCAL


def family(address: Address) -> int:
    return 27 if is_ib(address) else len(address)


@dataclass
class Question:
    """What an id does, and with which addresses."""

    space: int
    tos: int
    bind: Address | None
    src: Address | None
    dst: Address | None

    @property
    def source(self) -> Address | None:
        """The source address that the id has when it resolves."""
        return self.bind or self.src


rule = Rules("differential_ids", lambda question: Question(**question))


def resolves(c: Json, outcome: str) -> Json:
    """The answer if resolving the address had this outcome, with all that follows from it."""
    kept: Json = {name: c[name] for name in ("create", "bind", "bound") if name in c}
    if outcome != "ok":
        return {**kept, "resolve": outcome}
    return {**kept, "resolve": "ok", "resolved": c.get("resolved", ANYTHING), "route": "ok", "path": ANYTHING}


def binds(c: Json, outcome: str) -> Json:
    return {"create": c["create"], "bind": outcome}


# -- binding --------------------------------------------------------------------------------------------


@rule("RDMA_PS_IPOIB without InfiniBand", last=True)
def _(q: Question, c: Json) -> Any:
    if q.space != IPOIB or not q.bind or is_ib(q.bind):
        return None
    if is_loopback(q.bind):
        return binds(c, "EINVAL")
    # An address of another host is refused first.
    return binds(c, "EADDRNOTAVAIL") if c["bind"] == "EINVAL" and is_elsewhere(q.bind) else None


@rule("127.0.0.1")
def _(q: Question, c: Json) -> Any:
    if not q.bind or not is_loopback(q.bind) or c["bind"] != "ok":
        return None
    sgid = "::1" if len(q.bind) == 4 else "::ffff:127.0.0.1"
    return {**c, "bound": {**c["bound"], "interface": "lo", "port_num": 1, "sgid": sgid}}


@rule("source and destination of two families", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.src or not q.dst or c.get("resolve") is None or family(q.src) == family(q.dst):
        return None
    return resolves(c, "EINVAL")


@rule("resolve_addr's source on a bound id", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.bind or not q.src or c.get("resolve") is None or is_ib(q.dst):
        return None
    same = q.src[0] == q.bind[0] and q.src[1] in (0, q.bind[1])
    return None if same else resolves(c, "EINVAL")


@rule("a link-local destination on another link than the source", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.source or is_loopback(q.source) or not q.dst or q.dst[0] != "fe80::2" or q.dst[3] == 0:
        return None
    if c.get("resolve") not in ("ok", "-ETIMEDOUT", "-EINVAL"):
        return None
    if q.dst[3] == "va":  # there is such a link, but its device does not have the source
        return resolves(c, "-ENODEV") if q.source[0] == "fd01::1" else None
    return resolves(c, "ENETUNREACH")


@rule("RDMA_PS_IPOIB without InfiniBand", last=True)
def _(q: Question, c: Json) -> Any:
    if q.space != IPOIB or is_ib(q.source) or is_ib(q.dst) or not q.dst or "resolve" not in c:
        return None
    if not q.bind and q.src and c["resolve"] == "EINVAL" and is_elsewhere(q.src):
        return resolves(c, "EADDRNOTAVAIL")
    if not q.bind and q.src and (is_loopback(q.src) or q.src[0].startswith(WITHOUT_DEVICE)):
        return resolves(c, "EINVAL")
    unbound = not q.source or is_any(q.source)
    if unbound and q.dst[0] == "10.8.8.8":  # no device has the route's source, which is found first
        return resolves(c, "-ENODEV")
    if unbound and (q.dst[0], q.dst[-1]) == ("fe80::2", 0):
        return resolves(c, "EINVAL")
    return resolves(c, "-EINVAL") if c["resolve"] in ("ok", "-ETIMEDOUT", "-ENODEV") else None


@rule("an address of this host on another interface than the source's", last=True)
def _(q: Question, c: Json) -> Any:
    if c.get("resolve") != "-ETIMEDOUT" or not q.source or not q.dst or q.dst[0] not in LOCAL:
        return None
    return resolves(c, "ok") if q.source[0] in LOCAL and q.source[0] != q.dst[0] else None


@rule("an interface without an RDMA device", last=True)
def _(q: Question, c: Json) -> Any:
    def ours_uses_interface_7(ours: Json) -> bool:
        known = ours.get("resolved", ours.get("bound"))
        return known is None or known["interface"] == "7"

    if q.source and is_loopback(q.source):
        return None
    there = [a for a in (q.source, q.dst) if a and a[0].startswith(WITHOUT_DEVICE)]
    if not there or is_ib(q.source) or is_ib(q.dst):
        return None
    outcome = c.get("resolve", c.get("bind"))
    if outcome not in ("ENODEV", "-ENODEV"):
        return None
    return Matching("on interface 7, or an error from there", ours_uses_interface_7)


@rule("a link-local source that is not on its link", last=True)
def _(q: Question, c: Json) -> Any:
    given = q.source
    if (
        given is None
        or not given[0].startswith(("fe80::", "ff02::"))
        or given[:1] + given[3:] in (["fe80::1", 0], ["fe80::1", "va"])
    ):
        return None
    if q.bind:
        return binds(c, "EADDRNOTAVAIL") if c["bind"] == "ENODEV" else None
    same = q.dst is not None and family(q.dst) == family(given)
    return resolves(c, "EADDRNOTAVAIL") if same and c.get("resolve") == "ENODEV" else None


# -- resolving ------------------------------------------------------------------------------------------


@rule("AF_IB addresses on RoCE", last=True)
def _(q: Question, c: Json) -> Any:
    if is_ib(q.dst) and c.get("resolve") in ("ok", "EINVAL", "EADDRNOTAVAIL", "EPROTONOSUPPORT", "ENODEV"):
        return resolves(c, "ENODEV")
    return None


@rule("127.0.0.1", last=True)
def _(q: Question, c: Json) -> Any:
    """The loopback interface reaches this host and multicast groups; the kernel has no device for it."""
    if not q.source or not q.dst or not is_loopback(q.source) or is_loopback(q.dst):
        return None
    if c.get("resolve") not in ("ENODEV", "-ENODEV") or family(q.dst) != family(q.source):
        return None
    if q.dst[0] == "fe80::2":
        return None if q.dst[3] == "va" else resolves(c, "ENETUNREACH")
    reached = q.dst[0] in LOCAL or q.dst[0] in ("224.0.0.1", "255.255.255.255")
    return resolves(c, "ok") if reached else None


@rule("a link-local destination without scope", last=True)
def _(q: Question, c: Json) -> Any:
    if not q.dst or (q.dst[0], q.dst[-1]) != ("fe80::2", 0) or (q.source and not is_any(q.source)):
        return None
    return resolves(c, "EINVAL") if c.get("resolve") == "ok" else None


@rule("a source on another interface than the route's", last=True)
def _(q: Question, c: Json) -> Any:
    """IPv6 only: the kernel assumes an IPv4 destination of that kind to be on the link."""
    if not q.source or not q.dst or len(q.dst) != 4 or is_any(q.source) or is_ib(q.source) or c.get("resolve") != "ok":
        return None
    by = {"fd00:0:0:1::": "va", "fd09::": "va", "fd01::": "wa", "fd08::": "wa", "fd07::": "7"}
    leaves = next((by[prefix] for prefix in by if q.dst[0].startswith(prefix)), None)
    here = next((by[prefix] for prefix in by if q.source[0].startswith(prefix)), "va")
    return resolves(c, "-ENODEV") if leaves and here != leaves and q.dst[0] not in LOCAL else None


@rule("destination 0.0.0.0 or ::")
def _(q: Question, c: Json) -> Any:
    if not q.dst or not is_any(q.dst) or "resolved" not in c:
        return None
    loopback = "::1" if len(q.dst) == 4 else "127.0.0.1"
    dgid = "::1" if len(q.dst) == 4 else "::ffff:127.0.0.1"
    return {**c, "resolved": {**c["resolved"], "peer": [loopback, *q.dst[1:]], "dgid": dgid}}


@rule("127.0.0.1")
def _(q: Question, c: Json) -> Any:
    if not q.dst or "resolved" not in c or not (is_any(q.dst) or is_loopback(q.dst)):
        return None
    if q.source and not is_any(q.source) and not is_loopback(q.source):
        return None
    local = [q.source[0], *c["resolved"]["local"][1:]] if q.source and is_loopback(q.source) else c["resolved"]["local"]
    path = {"mtu": 5, "hop_limit": 64, "traffic_class": q.tos, "sl": ANYTHING, "rate": 0, "packet_life_time": 18}
    made = {**path, "flow_label": ANYTHING}
    return {**c, "resolved": {**c["resolved"], "interface": "lo", "local": local}, "route": "ok", "path": made}


@rule("scope of a destination that is not link-local")
def _(q: Question, c: Json) -> Any:
    if not q.dst or len(q.dst) != 4 or not q.dst[3] or "resolved" not in c or q.dst[0].startswith(("fe80:", "ff02:")):
        return None
    if q.source and not is_any(q.source):
        return None
    return {**c, "resolved": {**c["resolved"], "local": [*c["resolved"]["local"][:3], 0]}}


@rule("a link-local destination without scope")
def _(q: Question, c: Json) -> Any:
    if not q.dst or (q.dst[0], q.dst[-1]) != ("fe80::2", 0) or "resolved" not in c:
        return None
    resolved = c["resolved"]
    return {**c, "resolved": {**resolved, "peer": [*resolved["peer"][:3], resolved["local"][3]]}}


@rule("scope of a source that is found to be link-local")
def _(q: Question, c: Json) -> Any:
    if not q.source or not is_any(q.source) or "resolved" not in c or not c["resolved"]["local"][0].startswith("fe80:"):
        return None
    return {**c, "resolved": {**c["resolved"], "local": [*c["resolved"]["local"][:3], c["resolved"]["peer"][3]]}}


# -- paths ----------------------------------------------------------------------------------------------


@rule("hop limit of a path to this host")
def _(q: Question, c: Json) -> Any:
    return {**c, "path": {**c["path"], "hop_limit": 64}} if c.get("path") and c["path"]["hop_limit"] == 0 else None


@rule("rate of a path")
def _(q: Question, c: Json) -> Any:
    if not c.get("path") or c["resolved"]["interface"] == "lo":
        return None
    return {**c, "path": {**c["path"], "rate": 3}} if c["path"]["rate"] == 0 else None


@rule("RoCE packet life time")
def _(q: Question, c: Json) -> Any:
    return {**c, "path": {**c["path"], "packet_life_time": 16}} if c.get("path") else None


@rule("flow label of a path")
def _(q: Question, c: Json) -> Any:
    if not c.get("path") or not q.dst or c["path"]["flow_label"] == "free":
        return None
    label = c["path"]["flow_label"] & 0xFFFFF
    if len(q.dst) == 4 and q.dst[2]:
        label = (q.source[2] if q.source and not is_any(q.source) else 0) or q.dst[2]
    return {**c, "path": {**c["path"], "flow_label": label}}


def test_ids_differ_from_librdmacms_only_as_documented(machine: Machine) -> None:
    seen = rule.check(machine, Questions(SEED), 600, "soft")
    print(*(f"{count:6} {row}" for row, count in seen.most_common()), sep="\n")
