"""What errors say of a network that carries only a part of the packets: the cause, with its numbers and the cure."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator

import pytest

import rdmacm
from rdmacm import RdmaError
from support.endpoints import in_thread
from support.filters import add_rules, needs_nft
from support.netns import Host, TwoHosts, jumbo_hosts, needs_netns, two_hosts
from support.servers import Server

pytestmark = needs_netns

PORT = 7471
#: As IP counts it, and as UDP's length field does.
LONGEST = 1500
DROP_LONG = f"udp dport 4791 meta length > {LONGEST} drop"


@pytest.fixture
def jumbo() -> Iterator[TwoHosts]:
    """Two hosts with an MTU of 9000; ``b`` drops longer packets than a link with 1500 would carry."""
    with jumbo_hosts() as net, net.a.enter():
        add_rules(net.b, f"input {DROP_LONG}")
        yield net


@needs_nft
class TestHole:
    @pytest.fixture
    def connection(self, jumbo: TwoHosts) -> Iterator[rdmacm.Connection]:
        with jumbo.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))
        with listener:
            peers: list[rdmacm.Connection] = []
            server = threading.Thread(target=lambda: peers.append(listener.accept(timeout=10)))
            server.start()
            with rdmacm.connect(("10.7.0.2", PORT), timeout=10) as connection:
                server.join()
                yield connection
            peers[0].close()

    def test_send(self, connection: rdmacm.Connection) -> None:
        connection.send(bytes(1000))
        with pytest.raises(TimeoutError) as caught:
            connection.send(bytes(3000))
        assert str(caught.value) == (
            "send 10.7.0.2:7471: packets of up to 1044 bytes arrive, and one of 3044 does not: a link on the way has "
            "a smaller MTU (RETRY_EXC_ERR) [ETIMEDOUT]; try: 'ip route replace 10.7.0.2 dev va mtu 1500' on the host "
            "that connects, or the same MTU on every link and switch of the way"
        )

    def test_the_cure(self, jumbo: TwoHosts) -> None:
        jumbo.a.ip("route", "replace", "10.7.0.2", "dev", "va", "mtu", "1500")
        with jumbo.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))
        with listener:
            received: list[bytes] = []

            def serve() -> None:
                with listener.accept(timeout=10) as peer:
                    received.append(peer.recv(10))
                    peer.send(b"")

            with in_thread(serve), rdmacm.connect(("10.7.0.2", PORT), timeout=10) as connection:
                connection.send(bytes(3000))
                assert connection.recv(10) == b""
        assert received == [bytes(3000)]

    def test_asyncio(self, jumbo: TwoHosts) -> None:
        with jumbo.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))

        accepted: list[rdmacm.Connection] = []

        async def send() -> None:
            async with await rdmacm.aio.connect(("10.7.0.2", PORT), timeout=10) as connection:
                await connection.send(bytes(3000))

        with listener, in_thread(lambda: accepted.append(listener.accept(timeout=10))):
            with pytest.raises(TimeoutError, match="packets of up to 60 bytes arrive, and one of 3044 does not"):
                asyncio.run(send())
        accepted[0].close()

    def test_tools(self, jumbo: TwoHosts) -> None:
        with Server("perf", "-s", "-b", "10.7.0.2", "-p", "0", host=jumbo.b) as server:
            argv = ["perf", "-c", "10.7.0.2", "-p", str(server.port), "--op", "write", "--size", "8000"]
            done = jumbo.a.python(["-m", "rdmacm", *argv, "--count", "4"], check=False)
        assert done.returncode == 1
        assert "and one of 4140 does not: a link on the way has a smaller MTU" in done.stderr
        assert "'ip route replace 10.7.0.2 dev va mtu 1500'" in done.stderr


@needs_nft
def test_a_peer_that_is_gone_is_no_hole() -> None:
    with two_hosts(9000) as net, net.a.enter():
        with net.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))
        with listener:
            accepted: list[rdmacm.Connection] = []
            server = threading.Thread(target=lambda: accepted.append(listener.accept(timeout=10)))
            server.start()
            with rdmacm.connect(("10.7.0.2", PORT), timeout=10) as connection:
                server.join()
                add_rules(net.b, "input udp dport 4791 drop")
                with pytest.raises(TimeoutError, match="the peer does not answer"):
                    connection.send(bytes(3000))
            accepted[0].close()


def test_different_mtus_are_told_with_both_numbers() -> None:
    with two_hosts() as net, net.a.enter():
        net.b.ip("link", "set", "vb", "mtu", "1000")
        with net.b.enter():
            listener = rdmacm.listen(("10.7.0.2", PORT))
        with listener, pytest.raises(rdmacm.CmRejectedError) as caught:
            rdmacm.connect(("10.7.0.2", PORT), timeout=10)
    assert caught.value.reason == 26
    assert caught.value.strerror == "the path MTU is 1024 bytes here, and the peer's port has up to 512 bytes"
    assert "ip route replace" in str(caught.value.hint)


@needs_nft
@pytest.mark.parametrize("code", ["net-prohibited", "host-prohibited", "admin-prohibited"])
def test_a_firewall_that_rejects(net: TwoHosts, code: str) -> None:
    add_rules(net.b, f"input udp dport 4791 reject with icmp {code}")
    with pytest.raises(PermissionError, match=r"10\.7\.0\.2 reports that this is prohibited") as caught:
        rdmacm.connect(("10.7.0.2", PORT), timeout=10)
    assert caught.value.errno == errno.EACCES
    assert "UDP port 4791 in the firewalls" in str(getattr(caught.value, "hint", ""))


@needs_nft
def test_a_firewall_that_rejects_ipv6(net: TwoHosts) -> None:
    add_rules(net.b, "input udp dport 4791 reject with icmpv6 admin-prohibited")
    with pytest.raises(PermissionError, match="fd07::2 reports that this is prohibited"):
        rdmacm.connect(("fd07::2", PORT), timeout=10)


def test_link_local_addresses_are_shown_with_the_name_of_their_interface(net: TwoHosts) -> None:
    with pytest.raises(RdmaError) as caught:
        rdmacm.connect((f"{net.vb.link_local}%va", PORT))
    assert f"[{net.vb.link_local}%va]:{PORT}" in str(caught.value)


def test_loopback_that_is_down() -> None:
    with Host(loopback=False) as host:
        with host.enter(), pytest.raises(RdmaError, match="the loopback interface is down") as caught:
            rdmacm.listen(("127.0.0.1", PORT))
        assert caught.value.hint == "'ip link set lo up'"
        done = host.python(["-m", "rdmacm", "demo"], check=False)
    assert "'ip link set lo up'" in done.stderr
    assert "not an address" not in done.stderr
