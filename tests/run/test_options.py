"""The options of ``rdmacm run``: devices, explanations, captures, faults."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmacm.constants import CmEventType
from rdmacm.errors import RdmaError
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.provider.connparam import ConnParam
from rdmacm.run import protocol
from rdmacm.run.options import Options
from rdmacm.run.protocol import Request
from rdmacm.run.server import Server
from rdmacm.trace.verdicts import Judge
from support.clock import Stopwatch, eventually
from support.netns import TwoHosts, needs_netns, two_hosts
from support.pcap import roce
from support.run_client import Channel, Client, Id
from support.run_programs import Runs, needs_headers
from support.traces import traced

HOST = "127.0.0.1"
LOCAL, REMOTE = (socket.inet_aton(host) for host in (HOST, "127.0.0.2"))


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    """Two hosts; the server runs in ``a``."""
    with two_hosts() as net, net.a.enter():
        yield net


# -- --device ---------------------------------------------------------------------------------------------------


@needs_netns
@pytest.mark.parametrize("options", [Options(devices=frozenset({"soft_va"}))])
def test_a_program_sees_the_devices_that_are_named(net: TwoHosts, options: Options, served: Server) -> None:
    with Client(served.path) as client:
        assert [*client.devices()] == ["soft_va"]


@needs_netns
@pytest.mark.parametrize("options", [Options(devices=frozenset({"soft_va"}))])
def test_requests_that_come_to_another_device_are_refused(net: TwoHosts, options: Options, served: Server) -> None:
    with Client(served.path) as client:
        channel = Channel(client)
        listener, active = Id(channel, 1), Id(channel, 2)
        port = listener.listen("0.0.0.0")
        active.resolve(HOST, port)  # the library then finds no device
        active.connect(ConnParam(qp_num=5))
        assert channel.get_event().type is CmEventType.REJECTED


def test_an_unknown_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RdmaError, match=r"no such device.*soft_lo") as caught:
        Server(str(tmp_path / "socket"), Options(devices=frozenset({"none"})))
    assert caught.value.code_name == "ENODEV"


# -- --explain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [Options(explains=True)])
def test_resolutions_are_explained(options: Options, client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    channel = Channel(client)
    cmid = Id(channel, 1)
    cmid.resolve(HOST, 7471)
    text = capfd.readouterr().err
    assert "this is resolved\n  127.0.0.1:7471 (provider soft)\n" in text
    assert "=> 127.0.0.1:7471 from 127.0.0.1, device soft_lo port 1 GID index 0" in text
    cmid = Id(channel, 2)
    cmid.resolve_addr(HOST, 7472)
    channel.expect(CmEventType.ADDR_RESOLVED)
    assert capfd.readouterr().err == ""
    cmid.destroy()
    assert "127.0.0.1:7472 (provider soft)" in capfd.readouterr().err


@pytest.mark.parametrize("options", [Options(explains=True)])
def test_failures_are_explained(options: Options, client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError):
        Id(Channel(client), 1).resolve_addr("192.0.2.1", 7471)
    text = capfd.readouterr().err
    assert "this is not resolved" in text
    assert "FAILED at" in text
    hints = protocol.ADDRINFO.pack(1, 2, 0, 0, 0, 0, 0, b"", b"")
    client.ask_all(Request.ADDRINFO, hints + b"256.1.1.1\0" + b"7471\0")
    assert "rdma_getaddrinfo: " in capfd.readouterr().err
    client.ask_all(Request.ADDRINFO, hints + b"127.0.0.1\0" + b"7471\0")
    assert "rdma_getaddrinfo: 127.0.0.1:7471 is 127.0.0.1:7471" in capfd.readouterr().err


# -- --pcap -----------------------------------------------------------------------------------------------------


class TestCapture:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "capture.pcapng"

    @pytest.fixture
    def options(self, path: Path) -> Options:
        return Options(pcap=str(path))

    def test_packets_of_programs_and_of_the_server_are_in_order(self, client: Client, path: Path) -> None:
        error, _, fds = client.ask_all(Request.TAP)
        assert not error
        first, last = packet(1), packet(2)
        with socket.socket(fileno=fds[0]) as tap:
            tap.send(tapped(first, is_out=True))
            channel = Channel(client)
            listener, active = Id(channel, 1), Id(channel, 2)
            active.resolve(HOST, listener.listen(HOST))
            active.connect(ConnParam(qp_num=5))
            channel.expect(CmEventType.CONNECT_REQUEST)
            tap.send(tapped(last, is_out=True))
            eventually(lambda: [found.payload for found in roce(path)][-1:] == [last])
        payloads = [found.payload for found in roce(path)]
        assert payloads[0] == first
        assert len(payloads) >= 4  # the request as it was sent, and as it has arrived

    @needs_netns
    @pytest.mark.usefixtures("net")
    def test_icmp_errors_about_requests(self, client: Client, path: Path) -> None:
        channel = Channel(client)
        active = Id(channel, 1)
        active.resolve("10.7.0.2", 7471)  # nobody there has opened a device
        active.connect(ConnParam(qp_num=5))
        assert channel.get_event().type is CmEventType.UNREACHABLE
        tracer, _ = traced(path.read_bytes())
        (found,) = (Judge(tracer).verdict(each) for each in tracer.found())
        assert (found.rule, "UDP port 4791 is closed" in found.text) == ("C1", True)

    def test_a_train_is_cut_and_nonsense_is_ignored(self, client: Client, path: Path) -> None:
        _, _, fds = client.ask_all(Request.TAP)
        train = [packet(number, number) for number in range(3)]
        with socket.socket(fileno=fds[0]) as tap:
            tap.send(b"short")
            tap.send(tapped(train[0], is_out=True, length=5))
            tap.send(tapped(b"".join(train), is_out=True, segment=len(train[0])))
            eventually(lambda: len([*roce(path)]) >= 3)
        found = [*roce(path)]
        assert [each.payload for each in found] == train
        assert [each.identification for each in found] == [0, 1, 2]
        assert (found[0].source, found[0].destination) == (LOCAL, REMOTE)

    @pytest.mark.parametrize("threads", [pytest.param("2", marks=needs_headers)])
    def test_a_program_is_captured(self, runs: Runs, path: Path, threads: str) -> None:
        assert runs("exchange", threads, "5") == "done\n"
        # Nothing is lost here, so each packet is there as it was sent, and as it has arrived.
        eventually(lambda: {count % 2 for count in Counter(found.payload for found in roce(path)).values()} == {0})


def packet(number: int, identification: int = 0) -> bytes:
    """A packet with a valid ICRC."""
    body = bytes((4, 0, 0xFF, 0xFF)) + number.to_bytes(8, "big")
    return body + Icrc(LOCAL, REMOTE, 4791).seal([body], identification)


def tapped(payload: bytes, *, is_out: bool, length: int = 4, segment: int = 0) -> bytes:
    """A datagram as a program reports it."""
    return protocol.TAPPED.pack(1_000_000_000, LOCAL, REMOTE, length, 4791, 4791, is_out, segment) + payload


def test_without_a_capture_there_is_no_tap(client: Client) -> None:
    assert client.ask_all(Request.TAP)[0] == errno.ENOENT


# -- --loss, --delay, --seed ------------------------------------------------------------------------------------


def welcome(path: str) -> tuple[int, int, float, float, int]:
    """What the server tells a program."""
    with Client(path, hello=False) as client:
        body = client.ask(Request.HELLO, protocol.HELLO.pack(protocol.VERSION, 0))
    version, is_captured, loss, delay, seed = protocol.WELCOME.unpack(body)
    return version, is_captured, loss, delay, seed


@pytest.mark.parametrize("options", [Options(loss=0.25, delay=0.5, seed=2**64 - 1)])
def test_programs_are_told_of_the_faults_and_have_seeds_of_their_own(options: Options, served: Server) -> None:
    found = []
    for _ in range(2):
        found.append(welcome(served.path))
        eventually(lambda: served.is_idle)
    assert found == [(1, 0, 0.25, 0.5, 2**64 - 1), (1, 0, 0.25, 0.5, 0)]


@pytest.mark.parametrize(
    "options",
    [Options(loss=0.03, seed=5), Options(delay=0.001), Options(loss=0.03, delay=0.0005, seed=6)],
    ids=["loss", "delay", "both"],
)
@pytest.mark.parametrize("threads", [pytest.param("2", marks=needs_headers)])
def test_messages_arrive_in_spite_of_faults(options: Options, runs: Runs, threads: str) -> None:
    assert runs("exchange", threads, "8", *(["lossy"] if options.loss else [])) == "done\n"


@pytest.mark.parametrize("options", [Options(delay=0.2)])
@pytest.mark.parametrize("threads", [pytest.param("1", marks=needs_headers)])
def test_packets_are_held_up(options: Options, runs: Runs, threads: str) -> None:
    watch = Stopwatch()
    assert runs("exchange", threads, "1") == "done\n"
    assert watch.seconds > 0.4
