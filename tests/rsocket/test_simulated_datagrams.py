"""Datagram rsockets of simulated hosts: their UDP sockets are on the fabric, too."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rdmacm import aio, rsocket
from rdmacm.testing import CORRUPT, Fabric, Host, Outcome
from rdmacm.testing.faults import FabricPacket

PORT = 7000
ADDRESSES = {socket.AF_INET: ("10.0.0.1", "10.0.0.2"), socket.AF_INET6: ("fd00::1", "fd00::2")}
both_families = pytest.mark.parametrize("family", ADDRESSES, ids=["IPv4", "IPv6"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def fabric(stack: ExitStack) -> Fabric:
    return stack.enter_context(Fabric(7))


def hosts(fabric: Fabric) -> tuple[Host, Host]:
    first, second = zip(*ADDRESSES.values(), strict=True)
    return fabric.host("a", *first), fabric.host("b", *second)


def make(stack: ExitStack, host: Host, address: str = "", port: int = 0, family: int = socket.AF_INET) -> Any:
    made = stack.enter_context(rsocket.socket(family, socket.SOCK_DGRAM, provider=host.provider))
    made.settimeout(5)
    made.bind((address, port))
    return made


def kinds(fabric: Fabric) -> list[str]:
    return [entry.packet.kind for entry in fabric.log]


@both_families
def test_two_hosts(stack: ExitStack, fabric: Fabric, family: int) -> None:
    """The first datagrams go by UDP, the others between the queue pairs."""
    first, second = ADDRESSES[socket.AddressFamily(family)]
    one, other = hosts(fabric)
    a, b = make(stack, one, first, family=family), make(stack, other, second, PORT, family)
    for number in range(5):
        a.sendto(b"there %d" % number, b.getsockname())
        assert b.recvfrom(100) == (b"there %d" % number, a.getsockname())
        b.sendto(b"back %d" % number, a.getsockname())
        assert a.recvfrom(100) == (b"back %d" % number, b.getsockname())
    assert kinds(fabric)[0] == "UDP"
    assert set(kinds(fabric)[4:]) == {"UD_SEND_ONLY"}


def test_sockets_that_are_bound_to_no_address(stack: ExitStack, fabric: Fabric) -> None:
    one, other = hosts(fabric)
    a, b = make(stack, one), make(stack, other, port=PORT)
    a.connect(("10.0.0.2", PORT))
    assert a.getsockname() == ("10.0.0.1", a.getsockname()[1])
    a.send(b"x")
    assert b.recvfrom(10) == (b"x", a.getsockname())
    without = make(stack, fabric.host("c", "fd00::3"))
    with pytest.raises(OSError, match="send") as caught:
        without.sendto(b"x", ("10.0.0.2", PORT))
    assert caught.value.errno == errno.ENETUNREACH


def served(seed: int, loss: float) -> tuple[list[bytes | None], str, float]:
    """What a client gets that asks 20 times, the log, and the time that it took."""
    answers: list[bytes | None] = []

    def serve() -> None:
        with rsocket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("", PORT))
            for _ in range(20):
                data, source = server.recvfrom(100)
                server.sendto(data.upper(), source)

    def ask() -> None:
        with rsocket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(0.5)
            for number in range(20):
                client.sendto(b"hello %d" % number, ("10.0.0.2", PORT))
                try:
                    answers.append(client.recv(100))
                except TimeoutError:
                    answers.append(None)

    with Fabric(seed, loss=loss) as fabric:
        one, other = hosts(fabric)
        other.start(serve)
        one.start(ask)
        fabric.run(lambda: len(answers) == 20)
        return answers, fabric.log.to_text(), fabric.now


def test_programs_without_loss_get_all_answers() -> None:
    answers, _, seconds = served(1, 0.0)
    assert answers == [b"HELLO %d" % number for number in range(20)]
    assert seconds < 0.5, "nobody has waited for a datagram that was lost"


def test_runs_of_one_seed_are_equal() -> None:
    found = served(2, 0.2)
    assert 0 < found[0].count(None) < 20
    assert served(2, 0.2) == found
    assert served(3, 0.2) != found


def test_select_waits_in_virtual_time(stack: ExitStack, fabric: Fabric) -> None:
    one, other = hosts(fabric)
    a, b = make(stack, one), make(stack, other, port=PORT)
    assert rsocket.select([b], [], [], 10.0) == ([], [], [])
    assert fabric.now >= 10.0
    a.sendto(b"x", ("10.0.0.2", PORT))
    assert rsocket.select([b], [], [], 10.0) == ([b], [], [])
    assert rsocket.poll([(b, select.POLLIN)], 10.0) == [(b, select.POLLIN)]


def test_an_endpoint_of_asyncio(fabric: Fabric) -> None:
    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.transport.sendto(data.upper(), addr)

    class Keep(asyncio.DatagramProtocol):
        def __init__(self) -> None:
            self.found: asyncio.Queue[bytes] = asyncio.Queue()

        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.found.put_nowait(data)

    one, other = hosts(fabric)

    async def main() -> list[bytes]:
        with other.as_default():
            server, _ = await aio.create_rsocket_datagram_endpoint(Echo, ("10.0.0.2", PORT), None)
        with one.as_default():
            client, kept = await aio.create_rsocket_datagram_endpoint(Keep, None, ("10.0.0.2", PORT))
        answers = []
        for number in range(5):
            client.sendto(b"hello %d" % number)
            answers.append(await kept.found.get())
        client.close()
        server.close()
        return answers

    assert fabric.run(main()) == [b"HELLO %d" % number for number in range(5)]


def test_a_port_is_of_one_process(stack: ExitStack, fabric: Fabric) -> None:
    one, _ = hosts(fabric)
    beside = fabric.process("a", "a2")
    make(stack, one, port=PORT)
    for host in (one, beside):
        with pytest.raises(OSError, match="bind") as caught:
            make(stack, host, "10.0.0.1", PORT)
        assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="bind") as caught:
        make(stack, one, "10.0.0.2", PORT)
    assert caught.value.errno == errno.EADDRNOTAVAIL
    free = {make(stack, host).getsockname()[1] for host in (one, one, beside)}
    assert len(free) == 3


def test_a_process_gets_what_is_for_its_socket(stack: ExitStack, fabric: Fabric) -> None:
    one, other = hosts(fabric)
    beside = fabric.process("b", "b2")
    a, first, second = make(stack, one), make(stack, other, port=PORT), make(stack, beside, port=PORT + 1)
    for _ in range(3):
        for each, data in ((first, b"first"), (second, b"second")):
            a.sendto(data, ("10.0.0.2", each.getsockname()[1]))
            assert each.recv(10) == data


def test_what_nobody_receives(stack: ExitStack, fabric: Fabric) -> None:
    one, _ = hosts(fabric)
    a = make(stack, one)
    a.sendto(b"x", ("10.0.0.2", PORT))
    fabric.run(seconds=1)
    fabric.partition("a", "b")
    a.sendto(b"x", ("10.0.0.2", PORT))
    fabric.heal()
    fabric.crash("b")
    a.sendto(b"x", ("10.0.0.2", PORT))
    fabric.run(seconds=1)
    assert [entry.outcome for entry in fabric.log] == [Outcome.REFUSED, Outcome.PARTITIONED, Outcome.CRASHED]


def test_a_damaged_datagram_is_lost(stack: ExitStack, fabric: Fabric) -> None:
    def damage(packet: FabricPacket) -> Any:
        return CORRUPT if packet.kind == "UDP" else None

    fabric.faults = damage
    one, other = hosts(fabric)
    a, b = make(stack, one), make(stack, other, port=PORT)
    a.sendto(b"x", ("10.0.0.2", PORT))
    with pytest.raises(TimeoutError):
        b.recv(10)
    assert {entry.outcome for entry in fabric.log} == {Outcome.LOST}


def test_a_flood_is_bounded(stack: ExitStack, fabric: Fabric) -> None:
    """Of the host that does not read, and of the sender's, which raises nothing."""
    one, other = hosts(fabric)
    a, b = make(stack, one), make(stack, other, port=PORT)
    other.lag = 1.0
    for _ in range(2000):
        with suppress(BlockingIOError):
            a.sendto(bytes(100), ("10.0.0.2", PORT))
    fabric.run(seconds=10)
    assert b._end is not None
    assert len(b._end.inbox) <= 1000
    b.settimeout(0)
    with pytest.raises(BlockingIOError):
        while True:
            b.recv(100)


def test_a_capture_has_its_port(stack: ExitStack, fabric: Fabric, tmp_path: Path) -> None:
    one, other = hosts(fabric)
    a, b = make(stack, one), make(stack, other, port=PORT)
    a.sendto(b"in the capture", ("10.0.0.2", PORT))
    assert b.recv(100) == b"in the capture"
    fabric.log.write_pcapng(tmp_path / "log.pcapng")
    data = (tmp_path / "log.pcapng").read_bytes()
    at = data.index(b"in the capture")
    assert PORT.to_bytes(2, "big") in data[at - 60 : at]
    assert f"port {PORT}" in fabric.log.to_text()
