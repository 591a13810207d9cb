"""rsocket(7) for C programs: programs of the tests, and librdmacm's tools with each other and with those here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, socket

import pytest

from rdmacm.run.command import environment_of
from rdmacm.run.server import Server
from support.clock import eventually
from support.run_programs import Runs, needs_headers

from .test_tools import ADDRESSES, needs, started

PARTS = ["vectors", "ends", "refused", "several", "duplex", "mapped", "arguments", "killed", "left", "hostile"]
DATAGRAMS = ["messages", "connected", "anywhere", "refused", "several", "many", "restarted", "closed", "flooded"]
OURS = f"{sys.executable} -m rdmacm"


@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("mark", [pytest.param("", marks=needs_headers)])
def test_program_may(runs: Runs, what: str, mark: str) -> None:
    """``sockets.c`` says what each of these is."""
    assert runs("sockets", what) == "done\n"


@pytest.mark.parametrize("family", ["4", "6"])
@pytest.mark.parametrize("what", DATAGRAMS)
@pytest.mark.parametrize("mark", [pytest.param("", marks=needs_headers)])
def test_program_may_with_datagrams(runs: Runs, what: str, family: str, mark: str) -> None:
    """``datagrams.c`` says what each of these is."""
    assert runs("datagrams", what, family) == "done\n"


@pytest.fixture
def environment(library: Path, served: Server) -> dict[str, str]:
    """Variables of programs that this server serves; those in Python find the package."""
    python = os.pathsep.join(each for each in sys.path if each)
    return {**environment_of(str(library), served.path), "PYTHONPATH": python, "PYTHONUNBUFFERED": "1"}


def talk(served: Server, environment: dict[str, str], server: str, client: str) -> str:
    """Run a server, and a client once that listens; what both print."""
    with started(server, environment) as serving:
        if server.startswith(OURS):
            assert serving.stdout is not None
            assert "listening" in serving.stdout.readline()
        else:
            eventually(lambda: served.provider.host.cm._listeners or serving.poll() is not None)
        with started(client, environment) as asking:
            printed, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0, printed[-2000:]
        heard, _ = serving.communicate(timeout=60)
    assert serving.returncode == 0, heard[-2000:]
    return heard + printed


@pytest.mark.slow
@needs("rstream", "rdmacm-utils")
@ADDRESSES
@pytest.mark.parametrize(
    "arguments",
    [
        "-S 64 -C 20 -I 10 -T v",
        "-S 300000 -C 5 -I 2 -T v",
        "-S 5000 -C 20 -I 5 -T b",
        "-S 5000 -C 20 -I 5 -T n -T v",
        "-S 5000 -C 20 -I 5 -T a -T v",
        "-S 70000 -C 5 -I 3 -i 200 -k 5",
        "-S 30000 -C 5 -I 3 -B 4096 -T r",
    ],
)
def test_rstream(served: Server, environment: dict[str, str], address: str, arguments: str) -> None:
    family = "-f ipv6" if ":" in address else ""
    printed = talk(
        *(served, environment),
        f"rstream {family} -b {address} {arguments}",
        f"rstream {family} -s {address} {arguments}",
    )
    assert printed.count("custom ") == 2, printed


@pytest.mark.slow
@needs("rstream", "rdmacm-utils")
@pytest.mark.parametrize("ends", ["rstream|ours", "ours|rstream"])
@pytest.mark.parametrize("arguments", ["-S 64 -C 20 -I 10 -T v", "-S 300000 -C 5 -I 2 -T a -T v"])
def test_rstream_and_the_command_of_this_package(
    served: Server, environment: dict[str, str], ends: str, arguments: str
) -> None:
    server, client = (f"{OURS} rstream" if each == "ours" else each for each in ends.split("|"))
    printed = talk(served, environment, f"{server} -b 127.0.0.1 {arguments}", f"{client} -s 127.0.0.1 {arguments}")
    assert printed.count("custom ") == 2, printed


@pytest.mark.slow
@needs("riostream", "rdmacm-utils")
@pytest.mark.parametrize("arguments", ["-S 64 -C 20 -I 10 -T v", "-S 50000 -C 10 -I 5 -T v"])
def test_riostream(served: Server, environment: dict[str, str], arguments: str) -> None:
    printed = talk(served, environment, f"riostream -b 127.0.0.1 {arguments}", f"riostream -s 127.0.0.1 {arguments}")
    assert printed.count("custom ") == 2, printed


@pytest.mark.slow
@needs("rcopy", "rdmacm-utils")
def test_rcopy(served: Server, environment: dict[str, str], tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(os.urandom(1 << 20))
    with started("rcopy", environment) as serving:
        eventually(lambda: served.provider.host.cm._listeners or serving.poll() is not None)
        with started(f"rcopy {source} 127.0.0.1:{copy}", environment) as asking:
            printed, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0, printed
    assert copy.read_bytes() == source.read_bytes()


@pytest.mark.slow
@needs("udpong", "rdmacm-utils")
@pytest.mark.parametrize("ends", ["udpong|udpong", "udpong|ours", "ours|udpong"])
@pytest.mark.parametrize("arguments", ["-S 64 -C 20 -T echo", "-S 1000 -C 50"])
def test_udpong(environment: dict[str, str], ends: str, arguments: str) -> None:
    """Servers do not end by themselves, and librdmacm's says nothing: it listens once its port is taken.

    Its client sends again whenever an answer takes a while: without ``-T b``, at once. So few are asked for.
    """
    server, client = ends.split("|")
    port = free_port()
    serve = f"udpong -b 127.0.0.1 -p {port}" if server == "udpong" else f"{OURS} udpong -b 127.0.0.1 -p {port}"
    ask = f"udpong -s 127.0.0.1 -p {port} -T b" if client == "udpong" else f"{OURS} udpong 127.0.0.1 -p {port}"
    with started(serve, environment) as serving:
        eventually(lambda: is_bound(port) or serving.poll() is not None)
        with started(f"{ask} {arguments}", environment) as asking:
            printed, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0, printed[-2000:]
        serving.terminate()
        serving.communicate(timeout=60)
    size, transfers = arguments.split()[1], 2 * 20 if "echo" in arguments else 50
    assert printed.split("custom")[1].split()[:2] == [size, str(transfers)], printed


def free_port() -> int:
    """A UDP port that is free."""
    with socket(AF_INET, SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_bound(port: int) -> bool:
    """Whether a UDP socket has a port."""
    return any(f":{port:04X} " in line for line in Path("/proc/net/udp").read_text().splitlines()[1:])
