"""``rdmacm trace`` of a connection attempt names the rule that ``rdmacm check`` names, as far as packets tell."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import rdmacm
from rdmacm import PortSpace
from rdmacm.check.findings import Finding, Step
from rdmacm.check.measured import Target
from rdmacm.check.measuring import Measurer
from rdmacm.check.running import run_check
from rdmacm.trace.connection import RC
from rdmacm.trace.files import CaptureFile, Packet
from rdmacm.trace.live import Interface
from rdmacm.trace.tracer import Tracer
from rdmacm.trace.verdicts import FAILED, NOTE, Judge, Verdict
from support.endpoints import in_thread
from support.filters import add_rules, needs_nft, rules
from support.listeners import asking_twice, listening
from support.netns import Host, TwoHosts, jumbo_hosts, needs_netns
from support.servers import Server

pytestmark = [*needs_netns, pytest.mark.slow]

PEER = "10.7.0.2"
#: What nft may reject with: the rule, and what the trace says.
REJECTIONS = {
    "port-unreachable": ("C1", "its UDP port 4791 is closed (ICMP port unreachable"),
    "net-prohibited": ("C1", "a firewall refuses packets to 10.7.0.12 (ICMP network administratively prohibited"),
    "host-prohibited": ("C1", "a firewall refuses packets to 10.7.0.13 (ICMP host administratively prohibited"),
    "admin-prohibited": ("C1", "a firewall refuses packets to 10.7.0.14 (ICMP communication administratively"),
}
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


def checked(peer: str, timeout: float = 0.7, count: int = 500) -> Finding | None:
    """What ``rdmacm check`` says of a peer, as ADDRESS or ADDRESS:PORT; None if nothing is wrong."""
    host, _, port = peer.partition(":")
    target = Target(host, int(port or 0))
    return run_check(target, Measurer(target, None, None, timeout, count), control=None, count=count).failure


class Seen:
    """A connection attempt: what ``rdmacm check`` says, and the verdicts from packets of another attempt.

    ``link`` is from those on the link, ``own`` from those that the client has captured itself.
    """

    def __init__(self, net: TwoHosts, file: Path, peer: str, *options: str, timeout: str = "0.7") -> None:
        with on_link(net.a) as tracer, net.a.enter():
            self.failure = checked(peer)
        #: The verdicts from the packets of the check itself.
        self.of_check = judged(tracer)
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
        assert self.failure is not None
        assert self.failure.rule == rule, self.failure
        for verdicts in (self.link, self.own):
            (verdict,) = verdicts
            assert (verdict.level, verdict.rule) == (FAILED, rule), verdict
            assert text in verdict.text


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "own.pcapng"


@pytest.fixture(scope="module")
def shared() -> Iterator[TwoHosts]:
    """Two hosts, and a server in ``b``, for tests after which nothing is sent any more: no request has arrived."""
    with jumbo_hosts() as net:
        yield net


@pytest.fixture(scope="module")
def shared_server(shared: TwoHosts) -> Iterator[str]:
    with Server("rping", "-s", "-P", "-p", "0", host=shared.b) as server:
        yield f"{PEER}:{server.port}"


@pytest.fixture
def jumbo() -> Iterator[TwoHosts]:
    with jumbo_hosts() as net:
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
def test_firewall_of_the_peer(
    shared: TwoHosts, shared_server: str, file: Path, rule: str, name: str, text: str
) -> None:
    with rules(shared.b, f"input {rule}"):
        seen = Seen(shared, file, shared_server)
    seen.agree(name, text)
    assert {each.rule for each in seen.of_check if each.level == FAILED} == {name}


@needs_nft
def test_firewall_that_comes_later(jumbo: TwoHosts) -> None:
    """Data of four connections is rejected, of each with another code: a check then says what the trace says."""
    addresses = {code: f"10.7.0.{11 + at}" for at, code in enumerate(REJECTIONS)}
    jumbo.b.ip_batch(*(f"address add {address}/24 dev vb" for address in addresses.values()))
    with jumbo.b.enter():
        listener = rdmacm.listen(("", 0))
    with jumbo.a.enter(), listener, ExitStack() as stack, on_link(jumbo.a) as tracer, ExitStack() as clients:

        def accept() -> None:
            for _ in addresses:
                stack.enter_context(listener.accept(timeout=60))

        with in_thread(accept):
            connections = [
                clients.enter_context(rdmacm.connect((address, listener.port), timeout=60))
                for address in addresses.values()
            ]
        rejecting = "input ip daddr {} udp dport 4791 reject with icmp {}"
        add_rules(jumbo.b, *(rejecting.format(address, code) for code, address in addresses.items()))

        def send(connection: rdmacm.Connection) -> None:
            with pytest.raises(rdmacm.RdmaError):
                connection.send(bytes(1000))

        with ThreadPoolExecutor(len(connections)) as pool:
            list(pool.map(send, connections))
        failures = {code: checked(address, 0.3, 1) for code, address in addresses.items()}
    judge = Judge(tracer)
    found = {each.ends[1].host: judge.verdict(each) for each in tracer.found() if each.kind == RC}
    for code, (rule, text) in REJECTIONS.items():
        verdict, failure = found[addresses[code]], failures[code]
        assert failure is not None
        assert (verdict.level, verdict.rule, failure.rule) == (FAILED, rule, rule), (code, verdict, failure)
        assert text in verdict.text


@needs_nft
def test_own_firewall(jumbo: TwoHosts, server: str, file: Path) -> None:
    """The link has the answers that this host drops; the client's own capture cannot have them."""
    with rules(jumbo.a, "input udp dport 4791 drop"):
        seen = Seen(jumbo, file, server)
    seen.agree("C1", "")
    assert "likely 10.7.0.1 does not get it" in seen.link[0].text
    assert "nothing came from it at all" in seen.own[0].text


@needs_nft
def test_own_firewall_out(shared: TwoHosts, shared_server: str, file: Path) -> None:
    """Nothing is sent, so there is nothing to see."""
    with rules(shared.a, "output udp dport 4791 drop"):
        seen = Seen(shared, file, shared_server)
    assert seen.failure is not None
    assert seen.failure.step is Step.PORT
    assert seen.link == []


@needs_nft
def test_hole_there(jumbo: TwoHosts, server: str, file: Path) -> None:
    with rules(jumbo.b, f"input {HOLE}"):
        seen = Seen(jumbo, file, server, "-S", "8000", "-C", "1", timeout="10")
    seen.agree("G8", "shorter packets did")


@needs_nft
def test_hole_on_the_way_back(jumbo: TwoHosts, server: str, file: Path) -> None:
    """A check without help measures the way there only, and what is dropped here is in no capture of the client."""
    with rules(jumbo.a, f"input {HOLE}"):
        seen = Seen(jumbo, file, server, "-S", "8000", "-C", "1", timeout="10")
    (verdict,) = seen.link
    assert verdict.rule == "G8"
    assert "never got to 10.7.0.1" in verdict.text


@needs_nft
def test_loss(jumbo: TwoHosts, server: str, file: Path) -> None:
    with rules(jumbo.b, "input udp dport 4791 numgen inc mod 100 == 0 drop"):
        seen = Seen(jumbo, file, server, "-C", "200", timeout="10")
    assert seen.failure is not None
    assert seen.failure.step is Step.LOSS
    for verdicts in (seen.link, seen.own):
        (verdict,) = verdicts
        assert verdict.level == NOTE
        assert "of the packets were lost" in verdict.text


def test_no_route_back(jumbo: TwoHosts, server: str, file: Path) -> None:
    jumbo.b.ip("route", "replace", "unreachable", "10.7.0.1/32")
    try:
        seen = Seen(jumbo, file, server)
    finally:
        jumbo.b.ip("route", "delete", "unreachable", "10.7.0.1/32")
    seen.agree("C1", "has no route back")


def test_dead_neighbour(shared: TwoHosts, file: Path) -> None:
    # The three questions of an attempt follow each other fast, so that none of the first one's is left for the second.
    shared.a.ip("ntable", "change", "name", "arp_cache", "dev", "va", "retrans", "100")
    seen = Seen(shared, file, "10.7.0.77:7174")
    assert seen.failure is not None
    assert seen.failure.step is Step.NEIGHBOUR
    (verdict,) = seen.link
    assert (verdict.level, verdict.rule) == (FAILED, seen.failure.rule)
    assert "10.7.0.77 does not answer ARP: 10.7.0.1 asked" in verdict.text
    assert seen.own == []


def test_absent_listener(shared: TwoHosts, shared_server: str, file: Path) -> None:
    del shared_server  # it makes the host answer
    Seen(shared, file, f"{PEER}:9").agree("J1", "nobody at 10.7.0.2 listens on port 9 of port space TCP")


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
    assert seen.failure is not None
    assert seen.failure.rule == "C2"
    assert "C2" in {each.rule for each in seen.of_check}
    assert {each.rule for each in seen.own} == {"C1"}


def test_stopped_peer(net: TwoHosts, file: Path) -> None:
    with Server("rping", "-s", "-P", "-p", "0", host=net.b) as server:
        server.process.send_signal(signal.SIGSTOP)
        try:
            Seen(net, file, f"{PEER}:{server.port}").agree("C1", "nothing came from it")
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_different_mtus(net: TwoHosts, file: Path) -> None:
    net.b.ip("link", "set", "vb", "mtu", "1000")
    with Server("rping", "-s", "-P", "-p", "0", host=net.b) as server:
        Seen(net, file, f"{PEER}:{server.port}").agree("G8", "takes 512")
