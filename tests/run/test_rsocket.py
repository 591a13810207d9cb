"""rsocket(7) for C programs: a program of the tests, and librdmacm's tools with each other and with those here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rdmacm.run.command import environment_of
from rdmacm.run.server import Server
from support.clock import eventually
from support.run_programs import Runs, needs_headers

from .test_tools import ADDRESSES, needs, started

PARTS = ["vectors", "ends", "refused", "several", "duplex", "mapped", "arguments", "killed", "left", "hostile"]
OURS = f"{sys.executable} -m rdmacm"


@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("mark", [pytest.param("", marks=needs_headers)])
def test_program_may(runs: Runs, what: str, mark: str) -> None:
    """``sockets.c`` says what each of these is."""
    assert runs("sockets", what) == "done\n"


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
