"""The benchmarks run, and say so when something they compare with is missing or fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType

import pytest

from rdmacm.address import Gid
from rdmacm.proto.cm.messages import REQ, unpack_message
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.mad import Mad
from support.netns import python_environment

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "bench" / "peers.py"


def load(name: str) -> ModuleType:
    """A module of the benchmarks."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", PEERS.with_stem(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    return load("peers")


def run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **python_environment()} | ({} if path is None else {"PATH": path})
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asyncio", "rsocket"])
def test_socket_peer(name: str) -> None:
    done = run(str(PEERS), name, "--rounds", "1", "--effort", "0.005", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["peers"][name]
    assert found["half_round_trip_us"] > 0
    assert set(found["bandwidth"]["send"]) == {"4096", "65536", "1048576"}
    assert min(found["bandwidth"]["send"].values()) > 0
    assert 0 < found["connections"]["p50_us"] <= found["connections"]["p99_us"]


@pytest.mark.slow
def test_datagrams() -> None:
    done = run(
        str(ROOT / "bench" / "datagrams.py"), "rdmacm", "sockets", "--rounds", "1", "--effort", "0.002", "--json"
    )
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout)["peers"].values():
        for name in ("half_round_trip_us", "half_round_trip_asleep_us", "sent"):
            assert set(found[name]) == {"64", "1024"}
            assert min(found[name].values()) > 0, name
        assert all(0 < found["received"][size] <= found["sent"][size] for size in found["sent"])


@pytest.mark.slow
def test_busy() -> None:
    done = run(str(ROOT / "bench" / "busy.py"), "--rounds", "1", "--reads", "10")
    assert done.returncode == 0, done.stderr
    waits, computes, ratio = done.stdout.splitlines()
    assert "waits" in waits
    assert "computes" in computes
    assert ratio.startswith("ratio of the p99s: ")


@pytest.mark.slow
def test_multicast() -> None:
    done = run(str(ROOT / "bench" / "multicast.py"), "--rounds", "1", "--effort", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["per_second"]
    assert len(found) == 5
    assert min(found.values()) > 0


@pytest.mark.slow
def test_rdmacm_peer() -> None:
    done = run(str(PEERS), "rdmacm", "--rounds", "1", "--effort", "0.005", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["peers"]["rdmacm"]
    assert min(found["half_round_trip_us"], found["half_round_trip_asleep_us"]) > 0
    assert set(found["bandwidth"]) == {"send", "write", "read", "ping-pong"}
    for name, sizes in found["bandwidth"].items():
        assert set(sizes) == {"4096", "65536", "1048576"}, name
        assert min(sizes.values()) > 0
    assert found["connections"]["per_second"] > 0
    assert found["connections_at_once"] > 0
    assert set(found["messages"]) == {"one by one", "in lists"}
    assert min(found["messages"].values()) > 0
    assert {"resolve_addr", "create_qp", "connect", "disconnect", "destroy"} <= set(found["steps"])
    assert all(0 < step["p50_us"] <= step["p99_us"] for step in found["steps"].values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="trains are Linux's")
def test_sockets_only_peer() -> None:
    done = run(str(PEERS), "sockets", "--rounds", "1", "--effort", "0.005", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["peers"]["sockets"]
    assert min(found["half_round_trip_us"], found["half_round_trip_asleep_us"]) > 0
    assert set(found["bandwidth"]["send"]) == {"4096", "65536", "1048576"}
    assert min(found["bandwidth"]["send"].values()) > 0
    assert 0 < found["connections"]["p50_us"] <= found["connections"]["p99_us"]
    assert found["connections_at_once"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LIBFABRIC", "UCX"])
def test_connections_of_libraries(peers: ModuleType, name: str) -> None:
    program = getattr(peers, name)
    if peers.built(program.source, *program.libraries) is None:
        pytest.skip(f"needs gcc and {program.package}")
    found = peers.with_connections(peers.Figures(), program, 0.01)
    assert 0 < found.connections.p50_us <= found.connections.p99_us
    assert min(found.connections.per_second, found.connections_at_once) > 0
    assert found.lacking is None


def test_library_without_headers(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "built", lambda *_: None)
    found = peers.with_connections(peers.Figures(1.0), peers.LIBFABRIC, 0.01)
    assert found.connections is None
    line = peers.table({"fi-tcp": found}).splitlines()[-1]
    assert line.startswith("fi-tcp: no connections: libfabric_connections.c cannot be built; to build it: apt-get ")


def test_programs_in_c_have_as_many_connections_at_once(peers: ModuleType) -> None:
    assert f"#define AT_ONCE {peers.AT_ONCE}\n" in (PEERS.parent / "connections.h").read_text()


@pytest.mark.slow
def test_connection_takes_few_calls() -> None:
    """More calls than these are a longer way: shorten it, or say here why it has to be longer."""
    done = run(str(ROOT / "bench" / "connections.py"), "50", "--window", "16", "--calls", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for side, most in (("client", 258), ("server", 250)):
        end = found[side]
        assert 100 < end["python"] - end["turns"] < most, (side, end["rooms"])


#: Stands for ucx_perftest: half a million messages a second of four elements, and it fails for all others.
UCX_PERFTEST = f"""\
#!{sys.executable}
import signal, socket, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
if "-t" in options:
    if [options.get(name) for name in ("-t", "-O", "-s", "-D")] != ["tag_bw", "64", "16,16,16,16", "iov,contig"]:
        sys.exit("Unsupported operation")
    print("8000,1.0,1.0,2.0,32.0,32.0,500000,500000")
else:
    listener = socket.create_server(("127.0.0.1", int(options["-p"])))
    signal.pause()
"""


def rates(output: str) -> dict[str, list[float]]:
    """The columns of each kind of request that bench/operations.py has measured."""
    return {
        name: [float(column.replace(",", "")) for column in columns]
        for name, *columns in (line.split() for line in output.splitlines()[1:] if ":" not in line)
    }


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="listeners are looked up in Linux's table")
def test_operations_beside_ucx(tmp_path: Path) -> None:
    program = tmp_path / "ucx_perftest"
    program.write_text(UCX_PERFTEST)
    program.chmod(0o755)
    arguments = [str(ROOT / "bench" / "operations.py"), "--rounds", "1", "--seconds", "0.02"]
    done = run(*arguments, "--kinds", "send_uc,send_4,send", path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = rates(done.stdout)
    (rate, median, of_plain), (ours, _, _, best, _, ratio) = found["send_uc"], found["send_4"]
    assert rate == median > 0
    assert of_plain == pytest.approx(rate / found["send"][0], rel=0.01, abs=0.01)
    assert best == 500_000
    assert ratio == pytest.approx(ours / best, rel=0.01, abs=0.01)
    assert len(found["send"]) == 3
    assert "ucx-tcp: ucx_perftest: exit 1: Unsupported operation" in done.stdout


@pytest.mark.slow
def test_operations_without_ucx(tmp_path: Path) -> None:
    arguments = [str(ROOT / "bench" / "operations.py"), "--rounds", "1", "--seconds", "0.02", "--kinds", "fetch_add"]
    done = run(*arguments, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert min(rates(done.stdout)["fetch_add"]) > 0
    assert "ucx-tcp: ucx_perftest is not installed; to install it: apt-get install" in done.stdout
    assert "ucx" not in run(*arguments, "--alone", path=str(tmp_path)).stdout.partition("\n")[2]


def test_missing_peers_are_reported(tmp_path: Path) -> None:
    done = run(str(PEERS), "fi-tcp", "ucx-tcp", path=str(tmp_path))
    assert done.returncode == 1
    assert "fi-tcp: fi_pingpong is not installed; to install it: apt-get install" in done.stdout
    assert "ucx-utils" in done.stdout


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="listeners are looked up in Linux's table")
def test_failing_peer_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = tmp_path / "fi_pingpong"
    broken.write_text("#!/bin/sh\necho out of order\nexit 3\n")
    broken.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = run(str(PEERS), "fi-tcp", "asyncio", "--rounds", "1", "--effort", "0.001", path=path)
    assert done.returncode == 0, done.stderr
    assert "fi-tcp: the server ended with 3: out of order" in done.stdout
    assert "half round trip" in done.stdout


def test_output_of_the_programs(peers: ModuleType) -> None:
    pingpong = """\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      2k      =2k      250k        0.04s      6.14      10.42       0.10
"""
    assert peers.parse_fi_pingpong(pingpong) == 10.42
    perftest = """\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
 500,5.107,157.690,157.690,6341.55,6341.55,6342,6342
"""
    microseconds, gigabytes = peers.parse_ucx_perftest(perftest)
    assert gigabytes == pytest.approx((1 << 20) / microseconds / 1e3, rel=1e-4)
    for parse in (peers.parse_fi_pingpong, peers.parse_ucx_perftest, peers.Figures.from_json):
        for nothing in ("", "no route to host\n", "[]", '{"bandwidth": 3}'):
            with pytest.raises(peers.PeerError):
                parse(nothing)


def test_rounds_are_reported_as_medians(peers: ModuleType) -> None:
    rounds = [
        peers.Figures(us, {"send": {4096: us / 10}}, peers.Connections(us * 2, us * 3, us * 4))
        for us in (1.0, 9.0, 2.0)
    ]
    turns = iter(rounds)
    ours = peers.Peer("ours", lambda effort: next(turns))
    found = peers.contest([ours], 3, 1.0)["ours"]
    assert found == peers.Figures(2.0, {"send": {4096: 0.2}}, peers.Connections(4.0, 6.0, 8.0))


def test_higher_ratio_is_better(peers: ModuleType) -> None:
    outcome = {"a": peers.Figures(10.0, {"send": {4096: 1.0}}), "b": peers.Figures(5.0, {"send": {4096: 3.0}})}
    lines = peers.table(outcome, against="a").splitlines()
    assert lines[0] == "In brackets: the speed as a multiple of that of a; larger is better."
    assert [line.split()[-1] for line in lines[1:]] == ["b", "(2.00x)", "(3.00x)"]


def test_documents_have_our_speed_as_a_multiple(peers: ModuleType) -> None:
    ours = peers.Figures(10.0, {"send": {4096: 1.0}}, connections_at_once=50.0)
    outcome = {"rdmacm": ours, "b": peers.Figures(5.0, {"send": {4096: 0.25}}), "c": peers.Missing("not there")}
    assert peers.markdown(outcome, 3).splitlines()[4:] == [
        "| | rdmacm | b |",
        "|---|---|---|",
        "| 64 B half round trip, us | 10.0 | 5.000 (0.50) |",
        "| send 4 KiB, GB/s | 1.000 | 0.250 (4.00) |",
        "| the same, 64 at once | 50.0 |  |",
    ]


def test_benchmarks_by_name() -> None:
    done = run(str(ROOT / "dev.py"), "bench", "asyncio_streams")
    assert done.returncode == 1
    assert "the benchmarks are resolve, peers" in done.stderr
    done = run(str(ROOT / "dev.py"), "bench", "peers", "--help")
    assert done.returncode == 0
    assert "--against" in done.stdout


@pytest.mark.parametrize(("target", "network"), [("10.0.0.1", "10.82.0.0"), ("fd00::1", "fd82::1")])
def test_forged_requests_name_their_own_address(target: str, network: str) -> None:
    first = int(ip_address(network))
    seen = set()
    for source, packet in load("forged").forged("req", 20, target, target, first, 1, 0x123456, 1):
        request = unpack_message(Mad.unpack(packet[20:-4]))
        assert isinstance(request, REQ)
        header = PrivateDataHeader.unpack(request.private_data)
        assert request.primary.local_gid == Gid.from_ip(source)
        assert (header.source, header.destination) == (source, ip_address(target).packed)
        seen.add(source[:8])
    assert len(seen) > 15, "each has a share of its own in the backlog"
