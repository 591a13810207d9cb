"""``rdmacm rstream`` and ``rdmacm rcopy`` between two processes: their protocols, their output, what they refuse."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from rdmacm import rsocket
from rdmacm.tools.rstream import count_text, size_text
from support.rows import for_each
from support.servers import Run, Server

HEAD = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer\n"
CUSTOM = ("-S", "4000", "-C", "5", "-I", "3")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_output_matches_rstream(run: Run, address: str) -> None:
    with Server("rstream", "-b", address, "-p", "0", *CUSTOM, "-T", "v") as server:
        client = run("rstream", "-s", address, "-p", str(server.port), *CUSTOM, "-T", "verify")
        served = server.end()
    for each in (client, served):
        assert each.status == 0
        assert each.out.startswith(HEAD)
        line = r"custom    3\.9k    5       3       117k    +\d+\.\d\ds +\d+\.\d\d +\d+\.\d\d\n"
        assert re.fullmatch(line, each.out[len(HEAD) :]), each.out


@pytest.mark.parametrize("test", ["n", "a", "r"])
def test_each_way_to_wait(run: Run, test: str) -> None:
    with Server("rstream", "-b", "127.0.0.1", "-p", "0", *CUSTOM, "-T", "v", "-T", test, "--json") as server:
        argv = ("-T", "v", "-T", test, "--json")
        found = run("rstream", f"127.0.0.1:{server.port}", *CUSTOM, *argv).json
        served = server.end().json
    assert (found["role"], served["role"]) == ("client", "server")
    (done,) = found["tests"]
    assert done.pop("seconds") > 0
    assert done == {"name": "custom", "size": 4000, "transfers": 5, "iterations": 3, "bytes": 120_000}


def test_the_server_forks_for_its_client(run: Run) -> None:
    """With TCP, as a connection over RDMA does not survive fork(2); rstream's -T f has TCP, too."""
    with Server("rstream", "-b", "127.0.0.1", "-p", "0", *CUSTOM, "-T", "v", "-T", "f") as server:
        client = run("rstream", f"127.0.0.1:{server.port}", *CUSTOM, "-T", "v", "-T", "s")
        served = server.end()
    assert (client.status, served.status) == (0, 0)
    assert "custom" in client.out
    assert "custom" in served.out


def test_data_that_differ_are_an_error(run: Run) -> None:
    """The server checks, and the client sends zeros."""
    with Server("rstream", "-b", "127.0.0.1", "-p", "0", *CUSTOM, "-T", "v") as server:
        run("rstream", f"127.0.0.1:{server.port}", *CUSTOM)
        served = server.end()
    assert served.status == 1
    assert "data verification failed byte 1" in served.err


@for_each("argv", [("-T", "x"), ("-S", "0"), ("-S", "many"), ("-f", "gid")])
def test_wrong_usage(run: Run, argv: tuple[str, str]) -> None:
    assert run("rstream", *argv).status == 2


UNKNOWN = "no.such.host.invalid"


@for_each(
    "argv",
    [
        ("rstream", UNKNOWN),
        ("rstream", "-b", UNKNOWN),
        ("rstream", "-b", UNKNOWN, "127.0.0.1"),
        ("riostream", UNKNOWN),
        ("udpong", UNKNOWN),
        ("udpong", "-b", UNKNOWN, "127.0.0.1"),
        ("rcopy", __file__, f"{UNKNOWN}:copy"),
        ("rping", "-s", "-a", UNKNOWN),
        ("perf", "-s", "-b", UNKNOWN),
        ("cmtime", "-b", UNKNOWN, "-s", "127.0.0.1"),
    ],
)
def test_an_unknown_host_is_an_error_of_one_line(run: Run, argv: tuple[str, ...]) -> None:
    done = run(*argv)
    assert done.status == 1
    assert re.fullmatch(rf"rdmacm: getaddrinfo {UNKNOWN}:\d+: .*; try: .*\n", done.err), done.err


def test_a_file_that_is_not_there(run: Run) -> None:
    done = run("rcopy", "/no/such/file", "127.0.0.1:copy")
    assert (done.status, done.err) == (1, "rdmacm: open /no/such/file: No such file or directory [ENOENT]\n")


@for_each("size, text", [(64, "64"), (1000, "1000"), (1536, "1.5k"), (4000, "3.9k"), (12288, "12k"), (1 << 31, "2g")])
def test_sizes_as_librdmacms_tools_write_them(size: int, text: str) -> None:
    assert size_text(size) == text


@for_each("count, text", [(1, "1"), (999, "999"), (1000, "1k"), (100_000, "100k"), (2_500_000, "2m")])
def test_counts_as_librdmacms_tools_write_them(count: int, text: str) -> None:
    assert count_text(count) == text


# -- rcopy -----------------------------------------------------------------------------------------------------


def test_a_file_is_copied(run: Run, tmp_path: Path) -> None:
    original, directory = tmp_path / "original", tmp_path / "there"
    directory.mkdir()
    original.write_bytes(os.urandom(300_003))
    original.chmod(0o640)
    (tmp_path / "empty").touch()
    with Server("rcopy", "-p", "0", "--directory", str(directory)) as server:
        done = run("rcopy", str(original), "127.0.0.1:copy", "-p", str(server.port))
        assert done.status == 0, done.err
        assert re.fullmatch(
            r"opening\.\.\.transferring\.\.\.closing\.\.\.done\n300003 bytes in \d+\.\d\d seconds = \d+\.\d\d Gb/sec\n",
            done.out,
        )
        found = run("rcopy", str(tmp_path / "empty"), "[::1]:nothing", "-p", str(server.port), "--json").json
        assert (found["path"], found["bytes"]) == ("nothing", 0)
        refused = run("rcopy", str(original), "127.0.0.1:../outside", "-p", str(server.port))
        assert refused.status == 1
        assert "EACCES" in refused.err
        missing = run("rcopy", str(original), "127.0.0.1:no/such/place", "-p", str(server.port))
        assert "ENOENT" in missing.err
        server.end(signal.SIGINT)
    assert (directory / "copy").read_bytes() == original.read_bytes()
    assert (directory / "copy").stat().st_mode & 0o777 == 0o640 & ~_umask()
    assert (directory / "nothing").read_bytes() == b""
    assert not (tmp_path / "outside").exists()


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_client_that_says_something_else_ends_its_own_connection(run: Run, tmp_path: Path) -> None:
    with Server("rcopy", "-p", "0", "--directory", str(tmp_path)) as server:
        with rsocket.create_connection(("127.0.0.1", server.port), 20) as client:
            client.sendall(b"\x07" * 16)
            assert client.recv(1) == b""
        (tmp_path / "source").write_bytes(b"served")
        assert run("rcopy", str(tmp_path / "source"), "127.0.0.1:copy", "-p", str(server.port)).status == 0
        server.end(signal.SIGINT)
    assert (tmp_path / "copy").read_bytes() == b"served"
