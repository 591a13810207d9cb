"""``rdmacm trace`` of a connection attempt names the rule that ``rdmacm check`` names, as far as packets tell."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rdmacm import PortSpace
from rdmacm.trace.files import CaptureFile, Packet
from rdmacm.trace.live import Interface
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import FAILED, NOTE, Judge, Verdict
from support.filters import add_rules, needs_nft
from support.listeners import asking_twice, listening
from support.netns import Host, TwoHosts, needs_netns, two_hosts
from support.servers import Server

pytestmark = [*needs_netns, pytest.mark.slow]

PEER = "10.7.0.2"
HOLE = "udp dport 4791 meta length > 1500 drop"


class _Quiet(Exception):
    """No packet has come since the last look."""


def judged(tracer: Tracer) -> list[Verdict]:
    judge = Judge(tracer)
    return [judge.verdict(each) for each in tracer.found()]


@contextmanager
def on_link(host: Host) -> Iterator[Tracer]:
    """A tracer that has the packets of the link since the beginning of the block once that has ended."""
    tracer, seen = Tracer(), [0, -1]

    def look() -> None:
        if seen[0] == seen[1]:
            raise _Quiet
        seen[1] = seen[0]

    def counted(packets: Interface) -> Iterator[Packet]:
        for packet in packets:
            seen[0] += 1
            yield packet

    with host.enter():
        interface = Interface("va", look)
    with interface:
        yield tracer
        with contextlib.suppress(_Quiet):
            tracer.feed(counted(interface))


class Seen:
    """A connection attempt: what ``rdmacm check`` says, and the verdicts from packets of another attempt.

    ``link`` is from those on the link, ``own`` from those that the client has captured itself.
    """

    def __init__(self, net: TwoHosts, file: Path, peer: str, *options: str, timeout: str = "0.7") -> None:
        with on_link(net.a) as tracer:
            done = net.a.python(["-m", "rdmacm", "check", "--json", "--timeout", "0.7", peer], check=False)
        #: The verdicts from the packets of the check itself.
        self.of_check = judged(tracer)
        steps: list[dict[str, Any]] = json.loads(done.stdout)["steps"]
        self.step = next((step for step in steps if step["result"] == "bad"), {})
        with on_link(net.a) as tracer:
            argv = ["-m", "rdmacm", "rping", peer, "--timeout", timeout, "--pcap", str(file), *options]
            net.a.python(argv, check=False)
        self.link = judged(tracer)
        with file.open("rb") as opened:
            tracer = Tracer()
            tracer.feed(CaptureFile(opened.read))
        self.own = judged(tracer)

    def agree(self, rule: str, text: str) -> None:
        """The check has found it, and both captures of the other attempt have one connection and the same rule."""
        assert self.step.get("rule") == rule, self.step
        for verdicts in (self.link, self.own):
            (verdict,) = verdicts
            assert (verdict.level, verdict.rule) == (FAILED, rule), verdict
            assert text in verdict.text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "own.pcapng"


@pytest.fixture
def jumbo() -> Iterator[TwoHosts]:
    with two_hosts(9000) as net:
        for host, name in ((net.a, "va"), (net.b, "vb")):
            host.ip("link", "set", "dev", name, "gso_max_segs", "1")  # else the rules see trains, not packets
        yield net


@pytest.fixture
def server(jumbo: TwoHosts) -> Iterator[str]:
    """The address and port of a server in ``b``."""
    with Server("rping", "-s", "-P", "-p", "0", host=jumbo.b) as server:
        yield f"{PEER}:{server.port}"


@needs_nft
@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        ("udp dport 4791 drop", "C1", "likely a firewall drops UDP 4791"),
        ("ip protocol { udp, icmp } drop", "C1", "or the host is down"),
        ("udp dport 4791 reject", "C1", "its UDP port 4791 is closed"),
        *(
            (f"udp dport 4791 reject with icmp {code}", "C1", "a firewall refuses packets")
            for code in ("net-prohibited", "host-prohibited", "admin-prohibited")
        ),
        ("udp dport 4791 reject with icmp host-unreachable", "A10", "host unreachable"),
        ("udp dport 4791 reject with icmp net-unreachable", "A3", "network unreachable"),
    ],
)
def test_firewall_of_the_peer(jumbo: TwoHosts, server: str, file: Path, rule: str, name: str, text: str) -> None:
    add_rules(jumbo.b, f"input {rule}")
    seen = Seen(jumbo, file, server)
    seen.agree(name, text)
    assert {each.rule for each in seen.of_check if each.level == FAILED} == {name}


@needs_nft
def test_own_firewall(jumbo: TwoHosts, server: str, file: Path) -> None:
    """The link has the answers that this host drops; the client's own capture cannot have them."""
    add_rules(jumbo.a, "input udp dport 4791 drop")
    seen = Seen(jumbo, file, server)
    seen.agree("C1", "")
    assert "likely 10.7.0.1 does not get it" in seen.link[0].text
    assert "nothing came from it at all" in seen.own[0].text


@needs_nft
def test_own_firewall_out(jumbo: TwoHosts, server: str, file: Path) -> None:
    """Nothing is sent, so there is nothing to see."""
    add_rules(jumbo.a, "output udp dport 4791 drop")
    seen = Seen(jumbo, file, server)
    assert seen.step["step"] == "UDP 4791"
    assert seen.link == []


@needs_nft
def test_hole_there(jumbo: TwoHosts, server: str, file: Path) -> None:
    add_rules(jumbo.b, f"input {HOLE}")
    Seen(jumbo, file, server, "-S", "8000", "-C", "1", timeout="10").agree("G8", "shorter packets did")


@needs_nft
def test_hole_on_the_way_back(jumbo: TwoHosts, server: str, file: Path) -> None:
    """A check without help measures the way there only, and what is dropped here is in no capture of the client."""
    add_rules(jumbo.a, f"input {HOLE}")
    seen = Seen(jumbo, file, server, "-S", "8000", "-C", "1", timeout="10")
    (verdict,) = seen.link
    assert verdict.rule == "G8"
    assert "never got to 10.7.0.1" in verdict.text


@needs_nft
def test_loss(jumbo: TwoHosts, server: str, file: Path) -> None:
    add_rules(jumbo.b, "input udp dport 4791 numgen inc mod 40 == 0 drop")
    seen = Seen(jumbo, file, server, "-C", "200", timeout="10")
    assert seen.step["step"] == "loss"
    for verdicts in (seen.link, seen.own):
        (verdict,) = verdicts
        assert verdict.level == NOTE
        assert "of the packets were lost" in verdict.text


def test_no_route_back(jumbo: TwoHosts, server: str, file: Path) -> None:
    jumbo.b.ip("route", "replace", "unreachable", "10.7.0.1/32")
    Seen(jumbo, file, server).agree("C1", "has no route back")


def test_dead_neighbour(jumbo: TwoHosts, file: Path) -> None:
    seen = Seen(jumbo, file, "10.7.0.77:7174")
    assert seen.step["step"] == "neighbour"
    assert seen.link == seen.own == []


def test_absent_listener(jumbo: TwoHosts, server: str, file: Path) -> None:
    del server  # it makes the host answer
    Seen(jumbo, file, f"{PEER}:9").agree("J1", "nobody at 10.7.0.2 listens on port 9 of port space TCP")


def test_other_port_space(jumbo: TwoHosts, file: Path) -> None:
    with listening(jumbo.b, PEER, PortSpace.UDP) as port:
        seen = Seen(jumbo, file, f"{PEER}:{port}")
    seen.agree("J1", f"nobody at 10.7.0.2 listens on port {port} of port space TCP")
    text = f"port space TCP is wrong: 10.7.0.2 listens on port {port} in UDP only"
    assert Verdict(FAILED, "J1", text) in seen.of_check


def test_backlog_is_full(jumbo: TwoHosts, file: Path) -> None:
    """Only who has asked the connection manager knows that the host is not silent."""
    with listening(jumbo.b, PEER, backlog=1) as port, asking_twice(jumbo.a, PEER, port):
        seen = Seen(jumbo, file, f"{PEER}:{port}")
    assert seen.step["rule"] == "C2"
    assert "C2" in {each.rule for each in seen.of_check}
    assert {each.rule for each in seen.own} == {"C1"}


def test_stopped_peer(jumbo: TwoHosts, file: Path) -> None:
    with Server("rping", "-s", "-P", "-p", "0", host=jumbo.b) as server:
        server.process.send_signal(signal.SIGSTOP)
        try:
            Seen(jumbo, file, f"{PEER}:{server.port}").agree("C1", "nothing came from it")
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_different_mtus(jumbo: TwoHosts, file: Path) -> None:
    jumbo.b.ip("link", "set", "vb", "mtu", "1000")
    with Server("rping", "-s", "-P", "-p", "0", host=jumbo.b) as server:
        Seen(jumbo, file, f"{PEER}:{server.port}").agree("G8", "takes 512")
