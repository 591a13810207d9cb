"""rdmacm.getaddrinfo and CmId.resolve_addrinfo with a real resolver and a scripted name server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import dns
from support.dns import Answer, DnsServer, Rcode, resolve
from support.netns import Host, needs_netns

_REQUIREMENT = dns.requirement()

pytestmark = [
    *needs_netns,
    pytest.mark.skipif(_REQUIREMENT is not None, reason=_REQUIREMENT or "the resolver can be covered"),
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as host:
        yield host


# -- getaddrinfo ----------------------------------------------------------------------------------------

#: Each argument is a name and a family; prints the answers, or the code and the text of the error.
_LOOKUPS = """
import json, sys
import rdmacm

def look(name, family):
    try:
        found = rdmacm.getaddrinfo(name, 7471, family=int(family), port_space=rdmacm.PortSpace.TCP)
    except rdmacm.GaiError as error:
        return {"code": error.errno, "name": error.code_name, "text": str(error)}
    return [
        {"family": int(info.family), "host": info.dst_addr[0], "port": info.dst_addr[1],
         "name": info.dst_canonname, "qp": int(info.qp_type), "ps": int(info.port_space),
         "src": info.src_addr, "device": info.device}
        for info in found
    ]

print(json.dumps([look(*each.split(",")) for each in sys.argv[1:]]))
"""

_SCRIPT: dict[str | tuple[str, str], Answer] = {
    "many.test": Answer(a=["10.7.0.8", "10.7.0.9"], aaaa=["fd07::8", "fd07::9"]),
    "four.test": Answer(a=["10.7.0.9"]),
    "here.test": Answer(a=["127.0.0.1"]),
    "alias.test": Answer(cname="four.test", a=["10.7.0.9"]),
    "empty.test": Answer(),
    "servfail.test": Answer(rcode=Rcode.SERVFAIL),
    "nxdomain.test": Answer(rcode=Rcode.NXDOMAIN),
}


@pytest.fixture(scope="module")
def found(host: Host) -> dict[str, Any]:
    """The answers or the error of each lookup.  One process makes all lookups."""
    asked = [
        "many.test,0",
        "many.test,2",
        "many.test,10",
        "alias.test,0",
        "here.test,2",
        "four.test,10",
        "empty.test,0",
        "servfail.test,0",
        "nxdomain.test,0",
        "alias.test,10",
        "empty.test,10",
        "nxdomain.test,2",
    ]
    with DnsServer(host, _SCRIPT):
        return dict(zip(asked, resolve(host, _LOOKUPS, *asked), strict=True))


class TestGetaddrinfo:
    def test_all_addresses_are_returned(self, found: dict[str, Any]) -> None:
        assert sorted((each["family"], each["host"]) for each in found["many.test,0"]) == [
            (2, "10.7.0.8"),
            (2, "10.7.0.9"),
            (10, "fd07::8"),
            (10, "fd07::9"),
        ]
        assert {(each["port"], each["qp"], each["ps"]) for each in found["many.test,0"]} == {(7471, 2, 0x106)}

    def test_all_addresses_of_one_family_are_returned(self, found: dict[str, Any]) -> None:
        assert sorted(each["host"] for each in found["many.test,2"]) == ["10.7.0.8", "10.7.0.9"]
        assert sorted(each["host"] for each in found["many.test,10"]) == ["fd07::8", "fd07::9"]

    def test_alias_gets_its_canonical_name(self, found: dict[str, Any]) -> None:
        assert [(each["host"], each["name"]) for each in found["alias.test,0"]] == [("10.7.0.9", "four.test")]
        assert {each["name"] for each in found["many.test,0"]} == {"many.test"}

    def test_reachable_address_has_source_and_device(self, found: dict[str, Any]) -> None:
        (info,) = found["here.test,2"]
        assert info["src"] == ["127.0.0.1", 0]
        assert info["device"]

    def test_unreachable_address_has_no_source_and_device(self, found: dict[str, Any]) -> None:
        assert {(each["src"], each["device"]) for each in found["many.test,0"]} == {(None, None)}

    @pytest.mark.parametrize(
        ("asked", "code", "cause"),
        [
            ("nxdomain.test,0", "EAI_NONAME", "no such host or service"),
            ("empty.test,0", "EAI_NODATA", "has no address"),
            ("four.test,10", "EAI_ADDRFAMILY", "has no IPv6 address"),
            ("alias.test,10", "EAI_ADDRFAMILY", "has no IPv6 address"),
            ("empty.test,10", "EAI_NODATA", "has no IPv6 address"),
            ("nxdomain.test,2", "EAI_NONAME", "no such host or service"),
            ("servfail.test,0", "EAI_AGAIN", "no name server answered"),
        ],
    )
    def test_server_failures_raise(self, found: dict[str, Any], asked: str, code: str, cause: str) -> None:
        error = found[asked]
        assert error["name"] == code
        for part in (asked.partition(",")[0], "7471", cause, f"[{code}]"):
            assert part in error["text"]

    def test_unreachable_server_gives_eai_again(self, host: Host) -> None:
        (error,) = resolve(host, _LOOKUPS, "four.test,0")
        assert error["name"] == "EAI_AGAIN"

    def test_numeric_hosts_send_no_query(self, host: Host) -> None:
        code = """
import json, rdmacm
codes = []
for node in ("many.test", "256.1.1.1", "10.7.0.9", "fd07::9", "127.1"):
    try:
        codes.append(len(rdmacm.getaddrinfo(node, 7471, flags=rdmacm.RaiFlag.NUMERICHOST)))
    except rdmacm.GaiError as error:
        codes.append(error.code_name)
print(json.dumps(codes))
"""
        with DnsServer(host, _SCRIPT) as server:
            assert resolve(host, code) == ["EAI_NONAME", "EAI_NONAME", 1, 1, 1]
            assert server.queries == []


# -- CmId.resolve_addrinfo ------------------------------------------------------------------------------

_DELAY = 0.3

_EVENT = """
import json, sys, time
import rdmacm

with rdmacm.EventChannel() as channel, rdmacm.CmId(channel, rdmacm.PortSpace.TCP) as cmid:
    begin = time.monotonic()
    cmid.resolve_addrinfo(sys.argv[1], 7471, family=2)
    returned = time.monotonic() - begin
    try:
        channel.get_event(timeout=0).ack()
        early = True
    except rdmacm.CmWouldBlockError:
        early = False
    with channel.get_event(timeout=10) as event:
        delivered = time.monotonic() - begin
        kind, status = str(event.type), event.status
        error = event.error and event.error.code_name
    try:
        found = [info.dst_addr for info in cmid.query_addrinfo()]
    except rdmacm.RdmaError as refusal:
        found = refusal.code_name
print(json.dumps({"returned": returned, "early": early, "delivered": delivered, "kind": kind,
                  "status": status, "error": error, "found": found}))
"""

_DESTROY = """
import json, threading, time
import rdmacm

with rdmacm.EventChannel() as channel:
    cmid = rdmacm.CmId(channel, rdmacm.PortSpace.TCP)
    begin = time.monotonic()
    cmid.resolve_addrinfo("slow.test", 7471, family=2)
    waiting = [each for each in threading.enumerate() if each is not threading.main_thread()]
    before = time.monotonic()
    cmid.destroy()
    destroyed = time.monotonic() - before
    outstanding = any(each.is_alive() for each in waiting)
    for each in waiting:
        each.join(10)
    answered = time.monotonic() - begin
    try:
        kind = str(channel.get_event(timeout=0).type)
    except rdmacm.CmWouldBlockError:
        kind = None
print(json.dumps({"destroyed": destroyed, "outstanding": outstanding, "answered": answered, "kind": kind}))
"""


class TestResolveAddrinfo:
    """With a slow name server."""

    _SCRIPT: dict[str | tuple[str, str], Answer] = {
        "slow.test": Answer(a=["10.7.0.9"], delay=_DELAY),
        "slow-no.test": Answer(rcode=Rcode.NXDOMAIN, delay=_DELAY),
    }

    @pytest.fixture
    def server(self, host: Host) -> Iterator[DnsServer]:
        with DnsServer(host, self._SCRIPT) as server:
            yield server

    def test_resolve_addrinfo_returns_at_once_and_reports_by_event(self, host: Host, server: DnsServer) -> None:
        seen = resolve(host, _EVENT, "slow.test")
        assert seen["returned"] < _DELAY
        assert not seen["early"]
        assert seen["delivered"] >= _DELAY
        assert (seen["kind"], seen["status"]) == ("RDMA_CM_EVENT_ADDRINFO_RESOLVED", 0)
        assert seen["found"] == [["10.7.0.9", 7471]]
        assert server.queries == [("slow.test", "A")]

    def test_failure_is_reported_by_event(self, host: Host, server: DnsServer) -> None:
        seen = resolve(host, _EVENT, "slow-no.test")
        assert seen["returned"] < _DELAY
        assert seen["delivered"] >= _DELAY
        assert (seen["kind"], seen["error"]) == ("RDMA_CM_EVENT_ADDRINFO_ERROR", "EAI_NONAME")
        assert seen["status"] == -2
        assert seen["found"] == "ENOENT"

    def test_destroy_during_a_lookup_does_not_block(self, host: Host, server: DnsServer) -> None:
        seen = resolve(host, _DESTROY)
        assert seen["outstanding"]
        assert seen["destroyed"] < _DELAY
        assert seen["answered"] >= _DELAY
        assert seen["kind"] is None
        assert server.queries == [("slow.test", "A")]
