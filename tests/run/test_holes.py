"""A link that drops long packets: the user is told, as the program gets a status only."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from rdmacm.run import protocol
from rdmacm.run.options import Options
from rdmacm.run.protocol import Request
from support.filters import add_rules, needs_nft
from support.netns import TwoHosts, two_hosts
from support.run_client import Client
from support.run_programs import Runs, needs_headers

pytestmark = needs_nft
FAILED = "transport retry counter exceeded\n"
SENTENCE = (
    "127.0.0.1: packets of up to 60 bytes arrive, and one of 1068 does not: a link on the way has a smaller MTU "
    "(RETRY_EXC_ERR) [ETIMEDOUT]; try: 'ip route replace 127.0.0.1 dev lo mtu 352' on the host that connects, or the "
    "same MTU on every link and switch of the way\n"
)


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    """Two hosts; the server runs in ``a``, whose loopback interface drops long packets."""
    with two_hosts() as net, net.a.enter():
        add_rules(net.a, "input iif lo udp dport 4791 meta length > 500 drop")
        yield net


@pytest.fixture
def options() -> Options:
    return Options(devices=frozenset({"soft_lo"}))


class TestPrograms:
    pytestmark = needs_headers

    @pytest.fixture
    def runs(self, net: TwoHosts, runs: Runs) -> Runs:
        assert net
        return runs

    def test_long_packets(self, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
        assert runs("hole", "400") == "success\n"
        assert capfd.readouterr().err == ""
        assert runs("hole", "4000") == FAILED
        told = capfd.readouterr().err
        assert told.startswith("hole[")
        assert told.endswith(SENTENCE)
        assert len(told.splitlines()) == 1

    def test_a_peer_that_is_gone_is_no_hole(self, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
        assert runs("hole", "4000", "gone") == FAILED
        assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("net")
def test_a_peer_is_told_once(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    body = protocol.HOLE.pack(socket.inet_aton("127.0.0.1"), 4, 0x123456, 60, 1068)
    for _ in range(2):
        assert client.ask(Request.HOLE, body) == b""
    told = capfd.readouterr().err
    assert told.endswith(f"QP 0x123456 {SENTENCE}")
    assert len(told.splitlines()) == 1
    other = protocol.HOLE.pack(socket.inet_pton(socket.AF_INET6, "fd99::1"), 16, 1, 80, 1064)
    assert client.ask(Request.HOLE, other) == b""
    assert "QP 0x000001 fd99::1: packets of up to 80 bytes" in capfd.readouterr().err
    for wrong in (protocol.HOLE.pack(b"", 5, 1, 60, 1068), body[:-1]):
        with pytest.raises(OSError) as caught:
            client.ask(Request.HOLE, wrong)
        assert caught.value.errno == errno.EINVAL
