"""A client whose peer does not answer: it says whom it waits for, ends in time, and says what was sent."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rdmacm.errors import CmTimeoutError
from rdmacm.tools.waiting import PeerWait, notice
from support.netns import TwoHosts, needs_netns, python_environment
from support.servers import Server

#: The clients, without the peer's address, and the address's option.
CLIENTS = {
    "rping": (["rping", "-c"], "-a"),
    "ucmatose": (["ucmatose"], "-s"),
    "cmtime": (["cmtime", "-c", "3"], "-s"),
    "perf": (["perf", "--count", "1"], "-c"),
}
NOTICE = re.compile(r"rdmacm: waiting for an answer of 10\.7\.0\.2:\d+ \.\.\. \(at most [\d.]+ s: --timeout\)")


#: What a busy machine adds.
SLOW = "rdmacm: waiting for the resolution of 10.7.0.2 ..."


def lines_of(text: str) -> list[str]:
    """The lines that do not depend on the speed of the machine."""
    return [line for line in text.splitlines() if line != SLOW]


@pytest.fixture
def silent(net: TwoHosts) -> Iterator[None]:
    """Host b receives packets and answers none."""
    with net.b.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("0.0.0.0", 4791))
        yield


def client(net: TwoHosts, *argv: str) -> subprocess.Popen[str]:
    return net.a.popen_python(
        ["-m", "rdmacm", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=python_environment()
    )


@needs_netns
class TestSilentPeer:
    @pytest.mark.usefixtures("silent")
    @pytest.mark.parametrize(
        "command", [pytest.param(name, marks=() if name == "rping" else pytest.mark.slow) for name in CLIENTS]
    )
    def test_connecting_is_reported_and_ends_in_time(self, net: TwoHosts, command: str) -> None:
        argv, option = CLIENTS[command]
        process = client(net, *argv, option, "10.7.0.2", "--timeout", "1.5")
        out, err = process.communicate(timeout=20)
        assert process.returncode == 1
        if command == "ucmatose":
            assert out.splitlines()[2:] == ["test complete", "return status -110"]
        else:
            assert out == ""
        said, error = lines_of(err)
        assert NOTICE.fullmatch(said)
        assert re.match(r"rdmacm: (connect|transfer) 10\.7\.0\.2:\d+: no answer within 1\.5 s: ", error)
        sent = {
            "ucmatose": "0 of 1 connections established, 0 messages sent, 0 of 10 messages received",
            "cmtime": "1 begun, 0 answered",
        }.get(command, "1 packet sent, none came back")
        assert f": {sent} [ETIMEDOUT]; try: checking that a server listens on " in error
        assert "UDP port 4791" in error
        assert "a longer --timeout" in error

    @pytest.mark.usefixtures("silent")
    def test_interrupt_while_waiting_is_quiet(self, net: TwoHosts) -> None:
        process = client(net, "rping", "-c", "-a", "10.7.0.2")
        assert process.stderr is not None
        while not (said := lines_of(process.stderr.readline())):
            pass
        assert NOTICE.fullmatch(said[0])
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 130

    @pytest.mark.usefixtures("silent")
    def test_json_reports_the_same(self, net: TwoHosts) -> None:
        process = client(net, "perf", "-c", "10.7.0.2", "--timeout", "0.3", "--json")
        out, err = process.communicate(timeout=20)
        error = json.loads(out)["error"]
        assert (process.returncode, error["errno_name"], error["step"]) == (1, "ETIMEDOUT", "connect")
        assert error["message"].startswith("no answer within 0.3 s")
        assert len(lines_of(err)) == 1  # no notice before a second has passed

    @pytest.mark.usefixtures("silent")
    def test_capture_has_the_packets_that_are_counted(self, net: TwoHosts, tmp_path: object) -> None:
        file = f"{tmp_path}/silent.pcapng"
        process = client(net, "rping", "-c", "-a", "10.7.0.2", "--timeout", "0.3", "--pcap", file)
        _, err = process.communicate(timeout=20)
        assert "1 packet sent, none came back" in err
        with open(file, "rb") as capture:
            assert capture.read().count(b"\x12\xb7") >= 1

    @pytest.mark.parametrize(
        ("server", "argv", "progress"),
        [
            (["rping", "-s"], ["rping", "-c", "-v", "-a"], r"\d+ pings? sent, \d+ came back"),
            (["perf", "-s"], ["perf", "--seconds", "60", "-c"], r"\d+ operations posted, \d+ completed"),
        ],
        ids=["rping", "perf"],
    )
    @pytest.mark.slow
    def test_peer_that_stops_is_reported(
        self, net: TwoHosts, server: list[str], argv: list[str], progress: str
    ) -> None:
        with Server(*server, "-p", "0", host=net.b) as stopped:
            process = client(net, *argv, "10.7.0.2", "-p", str(stopped.port), "--timeout", "1.2")
            if argv[0] == "rping":
                assert process.stdout is not None
                process.stdout.readline()  # the first ping
            stopped.process.send_signal(signal.SIGSTOP)
            try:
                _, err = process.communicate(timeout=30)
            finally:
                stopped.process.send_signal(signal.SIGCONT)
        assert process.returncode == 1
        assert NOTICE.fullmatch(lines_of(err)[0])
        assert re.search(
            rf"no answer within 1\.2 s: ({progress}|.* packets? sent, .*) \[ETIMEDOUT\]; try: checking that ", err
        )


class TestServers:
    @pytest.mark.parametrize(
        "argv", [["rping", "-s", "-a", "127.0.0.1"], ["ucmatose", "-b", "127.0.0.1"], ["cmtime", "-b", "127.0.0.1"]]
    )
    def test_address_is_on_standard_error(self, argv: list[str]) -> None:
        with Server(*argv, "-p", "0") as server:
            ended = server.end(signal.SIGINT)
        assert (ended.status, ended.err) == (130, "")
        assert "listening" not in ended.out

    def test_line_names_address_and_device(self) -> None:
        for address, line in (
            (["-a", "127.0.0.1"], r"rdmacm: listening on 127\.0\.0\.1:\d+, device soft_lo\n"),
            ([], r"rdmacm: listening on \[::\]:\d+, all devices\n"),
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "rdmacm", "rping", "-s", "-p", "0", *address],
                stderr=subprocess.PIPE,
                text=True,
                env=python_environment(),
            )
            assert process.stderr is not None
            assert re.fullmatch(line, process.stderr.readline())
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20)[1] == ""
            assert process.returncode == 130


class TestPeerWait:
    def test_time_is_divided_by_the_notice(self, capsys: pytest.CaptureFixture[str]) -> None:
        clock = [0.0]
        waits = PeerWait("host:1", 10, clock=lambda: clock[0])
        waited: list[float] = []

        def wait(seconds: float) -> bool:
            waited.append(seconds)
            clock[0] += seconds
            return False

        with pytest.raises(CmTimeoutError) as caught:
            waits.until(wait)
        assert waited == [1, 9]
        assert caught.value.strerror == "no answer within 10 s: nothing came back"
        assert capsys.readouterr().err == "rdmacm: waiting for an answer of host:1 ... (at most 10 s: --timeout)\n"

    def test_short_wait_has_no_notice(self, capsys: pytest.CaptureFixture[str]) -> None:
        clock = [0.0]
        waits = PeerWait("host:1", 0.5, clock=lambda: clock[0])
        assert waits.until(lambda seconds: seconds) == 0.5
        clock[0] = 0.5
        with pytest.raises(CmTimeoutError):
            waits.left()
        with notice("nobody"):
            pass
        assert capsys.readouterr().err == ""
