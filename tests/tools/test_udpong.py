"""``rdmacm udpong`` and ``rdmacm riostream`` between two processes: their protocols, their output, what they refuse."""

from __future__ import annotations

import re
import signal
import socket

import pytest

from support.rows import for_each
from support.servers import Run, Server

CUSTOM = ("-S", "500", "-C", "20")
SHAPE = ("-S", "4000", "-C", "5", "-I", "3")
LINE = r"custom    {size}{xfers}{total}+\d+\.\d\ds +\d+\.\d\d +\d+\.\d\d\n"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_output_matches_udpong(run: Run, address: str) -> None:
    with Server("udpong", "-b", address, "-p", "0") as server:
        done = run("udpong", "-s", address, "-p", str(server.port), *CUSTOM, "-T", "echo")
        served = server.end(signal.SIGINT)
    head = "name      bytes   xfers   total       time     Gb/sec    usec/xfer\n"
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(head)
    assert re.fullmatch(LINE.format(size="500     ", xfers="40      ", total="19k     "), done.out[len(head) :]), (
        done.out
    )
    assert served.out == f"client login from {address}\n"


@pytest.mark.parametrize("test", ["b", "n", "a", "s"])
def test_each_way_to_wait(run: Run, test: str) -> None:
    with Server("udpong", "-b", "127.0.0.1", "-p", "0", "-T", test) as server:
        argv = (f"127.0.0.1:{server.port}", *CUSTOM, "-T", test, "--json")
        (echoed,) = run("udpong", *argv, "-T", "e").json["tests"]
        (counted,) = run("udpong", *argv).json["tests"]
    assert echoed.pop("seconds") > 0
    assert echoed.pop("received") >= 20, "those that were sent again count, too"
    assert echoed == {"name": "custom", "size": 500, "transfers": 20, "bytes": 20_000}
    assert 0 < counted["received"] <= 20
    assert counted["bytes"] == 500 * counted["received"]


def test_a_client_without_a_server_gives_up(run: Run) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        done = run("udpong", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.3")
    assert done.status == 1
    assert "no answer to LOGIN" in done.err


def test_a_datagram_that_is_too_long(run: Run) -> None:
    with Server("udpong", "-b", "127.0.0.1", "-p", "0") as server:
        done = run("udpong", f"127.0.0.1:{server.port}", "-S", "2041")
    assert done.status == 1
    assert "EMSGSIZE" in done.err


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_output_matches_riostream(run: Run, address: str) -> None:
    with Server("riostream", "-b", address, "-p", "0", *SHAPE, "-T", "v") as server:
        client = run("riostream", "-s", address, "-p", str(server.port), *SHAPE, "-T", "verify")
        served = server.end()
    for each in (client, served):
        assert each.status == 0, each.err
        line = LINE.format(size=r"3\.9k    ", xfers="5       3       ", total="117k    ")
        assert re.fullmatch(line, each.out.partition("\n")[2]), each.out


@pytest.mark.parametrize("test", ["n", "a"])
def test_riostream_that_does_not_block(run: Run, test: str) -> None:
    with Server("riostream", "-b", "127.0.0.1", "-p", "0", *SHAPE, "-T", test, "--json") as server:
        found = run("riostream", f"127.0.0.1:{server.port}", *SHAPE, "-T", test, "--json").json
        served = server.end().json
    assert (found["role"], served["role"]) == ("client", "server")
    assert [test["bytes"] for test in found["tests"]] == [120_000]


def test_riostream_finds_data_that_differ(run: Run) -> None:
    """The server checks, and the client writes zeros."""
    with Server("riostream", "-b", "127.0.0.1", "-p", "0", *SHAPE, "-T", "v") as server:
        done = run("riostream", f"127.0.0.1:{server.port}", *SHAPE)
        served = server.end()
    assert served.status == 1
    assert "data verification failed byte 1" in served.err
    assert done.status == 1


@for_each(
    "argv",
    [
        ("udpong", "-T", "v"),
        ("udpong", "-S", "15"),
        ("udpong", "--json"),
        ("riostream", "-T", "s"),
        ("riostream", "-k", "1"),
    ],
)
def test_wrong_usage(run: Run, argv: tuple[str, ...]) -> None:
    assert run(*argv).status == 2
