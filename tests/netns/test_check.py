"""``rdmacm check`` names the cause, and nothing on a way that is in order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rdmacm import PortSpace
from support.filters import add_rules, needs_nft
from support.listeners import asking_twice, listening
from support.netns import Host, TwoHosts, needs_netns, python_environment, three_hosts, two_hosts
from support.servers import Server

pytestmark = needs_netns

PEER = "10.7.0.2"
HOLE = "udp dport 4791 meta length > 1500 drop"
Found = dict[str, Any]


def check(host: Host, *argv: str, peer: str = PEER) -> Found:
    """Run the command; return its JSON, and assert that the status is that of the step."""
    done = host.python(["-m", "rdmacm", "check", "--json", "--timeout", "0.7", *argv, peer], check=False)
    assert done.stderr == "", done.stderr
    found: Found = json.loads(done.stdout)
    assert done.returncode == found["status"]
    return found


def failed(found: Found) -> tuple[str, str]:
    """The step that failed, and what it means; "" if none has."""
    for step in found["steps"]:
        if step["result"] == "bad":
            assert step["step"] == found["failed"]
            return step["step"], f"{step['meaning']}; try: {step['command']}"
    assert found["ok"]
    return "", ""


def step(found: Found, name: str) -> Found:
    (result,) = (each for each in found["steps"] if each["step"] == name)
    return dict(result)


@contextmanager
def helper(host: Host) -> Iterator[None]:
    """``rdmacm check --serve`` on a host."""
    child = host.popen_python(["-m", "rdmacm", "check", "--serve"], stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert "helping checks at TCP port 4792" in child.stderr.readline()
    try:
        yield
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(30)
        child.stderr.close()


@pytest.fixture(scope="module", params=[1500, 9000])
def healthy(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    with two_hosts(request.param) as net:
        yield net


class TestHealthy:
    @pytest.mark.parametrize("peer", [PEER, "fd07::2"])
    def test_helped(self, healthy: TwoHosts, peer: str) -> None:
        with helper(healthy.b):
            found = check(healthy.a, "-t", "104", peer=peer)
        assert failed(found) == ("", "")
        assert {each["result"] for each in found["steps"]} == {"good"}
        assert step(found, "loss")["lost"] == 0
        assert step(found, "class")["figure"] == "104 (DSCP 26), as sent in both directions"

    @pytest.mark.parametrize("peer", [PEER, "fd07::2"])
    def test_alone(self, healthy: TwoHosts, peer: str) -> None:
        with Server("rping", "-s", "-P", "-p", "0", host=healthy.b) as server:
            assert failed(check(healthy.a, peer=peer)) == ("", "")
            found = check(healthy.a, peer=f"[{peer}]:{server.port}")
        assert failed(found) == ("", "")
        assert "accepts in" in step(found, "manager")["figure"]
        assert step(found, "path MTU")["result"] == "good"

    def test_itself(self, healthy: TwoHosts) -> None:
        with helper(healthy.b):
            assert failed(check(healthy.b)) == ("", "")


@pytest.fixture
def jumbo() -> Iterator[TwoHosts]:
    with two_hosts(9000) as net:
        for host, name in ((net.a, "va"), (net.b, "vb")):
            host.ip("link", "set", "dev", name, "gso_max_segs", "1")  # else the rules see trains, not packets
        yield net


FIREWALLS: list[tuple[str, str, str, str, str]] = [
    ("b", "input udp dport 4791 drop", "UDP 4791", "packets come back, and none reaches the peer", "at the peer: nft"),
    ("a", "input udp dport 4791 drop", "UDP 4791", "packets reach the peer, and none comes back", "here: nft"),
    ("b", f"input {HOLE}", "path MTU", "of up to 1076 bytes arrive, longer ones to the peer do not", "va mtu 1500"),
    ("a", f"input {HOLE}", "path MTU", "of up to 1076 bytes arrive, longer ones from the peer do not", "va mtu 1500"),
    ("b", "input udp dport 4791 numgen inc mod 100 == 0 drop", "loss", "packets are lost (", "ethtool -S"),
    ("b", "input udp dport 4791 ip dscp set 0", "class", "class 104 arrive at the peer with 0", "nft list ruleset"),
    ("a", "output udp dport 4791 drop", "UDP 4791", "a firewall of this host", "here: nft"),
    *(
        ("b", f"input udp dport 4791 reject with icmp {code}", "UDP 4791", "a firewall rejects", f"at {PEER}: nft")
        for code in ("net-prohibited", "host-prohibited", "admin-prohibited")
    ),
]


@pytest.mark.slow
@needs_nft
@pytest.mark.parametrize(("where", "rule", "name", "text", "command"), FIREWALLS)
def test_firewalls_with_help(jumbo: TwoHosts, where: str, rule: str, name: str, text: str, command: str) -> None:
    with helper(jumbo.b):
        add_rules(jumbo.a if where == "a" else jumbo.b, rule)
        found_step, found = failed(check(jumbo.a, "-t", "104"))
    assert found_step == name, found
    assert text in found
    assert command in found


@pytest.mark.slow
@needs_nft
@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("input udp dport 4791 drop", "drops UDP port 4791, or the process at the peer is stopped"),
        ("input udp dport 4791 reject", "nothing at the peer has UDP port 4791"),
        ("input ip protocol { udp, icmp } drop", "the host is down, or drops everything"),
        *(
            (f"input udp dport 4791 reject with icmp {code}", "a firewall rejects UDP port 4791")
            for code in ("net-prohibited", "host-prohibited", "admin-prohibited")
        ),
        ("input udp dport 4791 reject with icmp host-unreachable", "not in use on its network"),
        ("input udp dport 4791 reject with icmp net-unreachable", "no route to the peer"),
    ],
)
def test_firewalls_alone(jumbo: TwoHosts, rule: str, text: str) -> None:
    with listening(jumbo.b, PEER):
        add_rules(jumbo.b, rule)
        name, found = failed(check(jumbo.a))
    assert name == "UDP 4791"
    assert text in found


def test_real_hole_alone(switched: TwoHosts) -> None:
    """A switch port with a smaller MTU drops long frames without a word."""
    with listening(switched.b, PEER):
        name, found = failed(check(switched.a))
    assert name == "path MTU"
    assert "packets of up to 1076 bytes arrive, and of 2100 none does" in found
    assert "ip route replace 10.7.0.2 dev va mtu 1500" in found


def test_longest_packet_of_a_connection(switched: TwoHosts) -> None:
    with Server("rping", "-s", "-P", "-p", "0", host=switched.b) as server:
        name, found = failed(check(switched.a, peer=f"{PEER}:{server.port}"))
    assert name == "path MTU"
    assert "short packets arrive, and one of 4156 bytes does not" in found


@pytest.fixture
def switched() -> Iterator[TwoHosts]:
    """Two hosts with an MTU of 9000, and a switch with 1500 on the side of ``b``."""
    with two_hosts() as net:
        switch = net.topology.host()
        net.a.ip("link", "delete", "va")
        net.topology.link(net.a, "va", switch, "sa", 9000, addresses_a=("10.7.0.1/24",))
        net.topology.link(net.b, "vb", switch, "sb", 9000, addresses_a=("10.7.0.2/24",))
        switch.ip_batch(
            "link add br0 type bridge",
            "link set sa master br0",
            "link set sb master br0",
            "link set sb mtu 1500",
            "link set br0 up",
        )
        yield net


def test_dead_neighbour(net: TwoHosts) -> None:
    name, found = failed(check(net.a, peer="10.7.0.77"))
    assert name == "neighbour"
    assert "10.7.0.77 did not answer on va in time" in found


def test_no_route(net: TwoHosts) -> None:
    name, found = failed(check(net.a, peer="10.99.0.1"))
    assert name == "route"
    assert "no route to 10.99.0.1" in found


def test_unknown_name(net: TwoHosts) -> None:
    assert failed(check(net.a, peer="nobody.invalid"))[0] == "name"


def test_wrong_route_back(two_ways: TwoHosts) -> None:
    """The peer answers over another link, where no datagram to this side's address may leave from its own."""
    with helper(two_ways.b):
        two_ways.b.ip("route", "replace", "unreachable", "10.7.0.1/32")
        name, found = failed(check(two_ways.a, "--via", "10.8.0.2"))
    assert name == "UDP 4791"
    assert "the peer has no way back: an unreachable route covers 10.7.0.1" in found
    assert "at the peer: 'ip route get 10.7.0.1'" in found


@needs_nft
def test_help_over_another_network(two_ways: TwoHosts) -> None:
    """The address to check is not proven by the TCP connection: it gets as much as has come from there."""
    with helper(two_ways.b):
        found = check(two_ways.a, "--via", "10.8.0.2")
        assert failed(found) == ("", "")
        assert step(found, "UDP 4791")["figure"] == "516 of 516 there, 516 of 516 back"
        add_rules(two_ways.b, "input iifname vb udp dport 4791 drop")
        name, text = failed(check(two_ways.a, "--via", "10.8.0.2"))
    assert name == "UDP 4791"
    assert "no packet reaches the peer, and none was sent back" in text


def test_no_route_back_alone() -> None:
    with three_hosts() as net, listening(net.c, "10.7.2.1"):
        assert failed(check(net.a, peer="10.7.2.1")) == ("", "")
        net.c.ip("route", "delete", "default", "via", "10.7.2.254")
        name, found = failed(check(net.a, peer="10.7.2.1"))
    assert name == "UDP 4791"
    assert "or has no route back" in found


class TestListener:
    def test_absent(self, net: TwoHosts) -> None:
        with listening(net.b, PEER):
            name, found = failed(check(net.a, peer=f"{PEER}:9"))
        assert name == "manager"
        assert "nobody listens on port 9 (tcp)" in found

    def test_other_port_space(self, net: TwoHosts) -> None:
        with listening(net.b, PEER, PortSpace.UDP) as port:
            name, found = failed(check(net.a, peer=f"{PEER}:{port}"))
        assert name == "manager"
        assert f"nobody listens on port {port} (tcp), and somebody in port space udp" in found
        assert "--port-space udp" in found

    def test_backlog_is_full(self, net: TwoHosts) -> None:
        with listening(net.b, PEER, backlog=1) as port, asking_twice(net.a, PEER, port):
            name, found = failed(check(net.a, peer=f"{PEER}:{port}"))
        assert name == "manager"
        assert "its backlog is full, or its process is stopped or busy" in found

    def test_stopped_process(self, net: TwoHosts) -> None:
        """Alone on its host, nothing answers any more; beside another, only its listener does not."""
        with Server("rping", "-s", "-P", "-p", "0", host=net.b) as server:
            with _stopped(server):
                name, found = failed(check(net.a))
            assert name == "UDP 4791"
            assert "or the process at the peer is stopped" in found
            with helper(net.b), _stopped(server):
                name, found = failed(check(net.a, peer=f"{PEER}:{server.port}"))
            assert name == "manager"
            assert "the listener does not answer" in found


@contextmanager
def _stopped(server: Server) -> Iterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_different_mtus(net: TwoHosts) -> None:
    net.b.ip("link", "set", "vb", "mtu", "1000")
    with Server("rping", "-s", "-P", "-p", "0", host=net.b) as server:
        name, found = failed(check(net.a, peer=f"{PEER}:{server.port}"))
    assert name == "path MTU"
    assert "1024 bytes here, and the peer's port has up to 512 bytes" in found


def test_arp_flux(two_ways: TwoHosts) -> None:
    """Both links of the peer are in one network, and the wrong one answers."""
    two_ways.b.ip_batch("address add 10.8.0.3/24 dev vb")
    with helper(two_ways.b):
        name, found = failed(check(two_ways.a, peer="10.8.0.3"))
    assert name == "neighbour"
    assert "10.8.0.3 is an address of the peer's vb, and its wb answers for it (ARP flux)" in found


def test_text(net: TwoHosts) -> None:
    done = net.a.python(["-m", "rdmacm", "check", PEER], check=False, env=_ascii())
    lines = done.stdout.splitlines()
    assert lines[0] == "+ name       10.7.0.2"
    assert lines[3] == "x UDP 4791   10.7.0.2 reports that the port is closed"
    assert lines[-1] == "- class      not reached"
    assert done.returncode == 13


def _ascii() -> dict[str, str]:
    from support.netns import python_environment

    return python_environment({"PYTHONIOENCODING": "ascii"})


@needs_nft
def test_watch(net: TwoHosts) -> None:
    """A fault that comes between two rounds is in the second."""
    with helper(net.b):
        argv = ["-m", "rdmacm", "check", "--watch", "--json", "--timeout", "0.7", "-i", "0.1", PEER]
        child = net.a.popen_python(argv, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert failed(json.loads(child.stdout.readline())) == ("", "")
        add_rules(net.b, "input udp dport 4791 drop")
        assert any(failed(json.loads(child.stdout.readline()))[0] == "UDP 4791" for _ in range(3))
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)
    assert child.returncode == 130


#: What Debian's mpirun is called, beside other ones.
MPIRUN = shutil.which("mpirun.openmpi")
#: One of them may have mpi4py.
PYTHONS = (sys.executable, "/usr/bin/python3")


def has_mpi4py(python: str) -> bool:
    return not subprocess.run([python, "-c", "import mpi4py"], check=False, stderr=subprocess.DEVNULL).returncode


#: What stands for a launcher, by its name.
LAUNCHERS = {
    "ssh": """#!/bin/sh
test "$1 $2 $3 $4 $#" = "-o BatchMode=yes -o ConnectTimeout=10 6" || exit 2
exec ip netns exec "$5" sh -c "$6"
""",
    "srun": """#!/bin/sh
test "$1 $2 $3 $4" = "--overlap -N1 -n1 -w" || exit 2
host="$5"
shift 5
exec ip netns exec "$host" "$@"
""",
}


class TestAllPairs:
    @pytest.fixture
    def hosts(self, net: TwoHosts, tmp_path: Path) -> str:
        file = tmp_path / "hosts"
        file.write_text(f"{net.a.name} 10.7.0.1  # a comment\n{net.b.name} {PEER} slots=2\n")
        return str(file)

    def check(self, net: TwoHosts, hosts: str, *options: str) -> subprocess.CompletedProcess[str]:
        launch = ["--launch", "ip netns exec {host}", "--remote", f"{sys.executable} -m rdmacm", "--timeout", "0.7"]
        return net.a.python(["-m", "rdmacm", "check", "--all-pairs", hosts, *launch, *options], check=False)

    def test_json(self, net: TwoHosts, hosts: str) -> None:
        found = json.loads(self.check(net, hosts, "--json").stdout)
        assert found["hosts"] == [net.a.name, net.b.name]
        assert {(pair["from"], pair["to"]) for pair in found["pairs"]} == {
            (net.a.name, net.b.name),
            (net.b.name, net.a.name),
        }
        assert all(pair["ok"] and pair["step"] is None and pair["rtt_us"] > 0 for pair in found["pairs"])

    @pytest.mark.parametrize("launcher", LAUNCHERS)
    def test_launchers(self, net: TwoHosts, hosts: str, launcher: str, tmp_path: Path) -> None:
        """Stand-ins for ssh and srun: they take the arguments that these get, and run the command in a namespace."""
        program = tmp_path / "bin" / launcher
        program.parent.mkdir()
        program.write_text(LAUNCHERS[launcher])
        program.chmod(0o755)
        environment = {**python_environment(), "PATH": f"{program.parent}:{os.environ['PATH']}"}
        environment |= {"SLURM_JOB_ID": "1"} if launcher == "srun" else {}
        argv = ["-m", "rdmacm", "check", "--all-pairs", hosts, "--remote", f"{sys.executable} -m rdmacm"]
        done = net.a.python([*argv, "--timeout", "0.7"], check=False, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        head, *rows = done.stdout.splitlines()
        assert head.split() == ["from", "\\", "to", net.a.name, net.b.name]
        assert [row.split()[0] for row in rows[:2]] == [net.a.name, net.b.name]
        assert {row.split()[1] for row in rows[2:]} == {net.a.name, net.b.name}
        # A host that the launcher does not reach is told, and the others are checked.
        Path(hosts).write_text(f"{Path(hosts).read_text()}nowhere 10.7.0.3\n")
        found = json.loads(net.a.python([*argv, "--timeout", "0.7", "--json"], check=False, env=environment).stdout)
        failed = {(pair["from"], pair["to"]): pair["step"] for pair in found["pairs"] if not pair["ok"]}
        assert failed.keys() == {("nowhere", net.a.name), ("nowhere", net.b.name), *((host, "nowhere") for host in
                                 (net.a.name, net.b.name))}  # fmt: skip
        assert failed["nowhere", net.a.name] == "start"
        assert failed[net.a.name, "nowhere"] == "neighbour"

    @pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (Debian package openmpi-bin)")
    def test_ranks_of_mpi(self, net: TwoHosts, tmp_path: Path) -> None:
        """Both ranks are at one host, each with an address: Open MPI joins processes of one network namespace."""
        python = next((each for each in PYTHONS if has_mpi4py(each)), None)
        if python is None:
            pytest.skip("needs python3-mpi4py, or mpi4py of PyPI")
        file = tmp_path / "ranks"
        file.write_text("zero 10.7.0.1\none 10.7.0.3\n")
        net.a.ip("address", "add", "10.7.0.3/24", "dev", "va")
        argv = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", "false", "-n", "2"]
        argv += [python, "-m", "rdmacm", "check", "--all-pairs", str(file), "--launch", "mpi"]
        argv += ["--timeout", "0.7", "--json"]
        done = net.a.run(argv, env=python_environment(), timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["hosts"] == ["zero", "one"]
        assert {(pair["from"], pair["to"], pair["ok"]) for pair in found["pairs"]} == {
            ("zero", "one", True),
            ("one", "zero", True),
        }

    @needs_nft
    def test_report_of_doctor(self, net: TwoHosts, hosts: str, tmp_path: Path) -> None:
        """``rdmacm doctor`` draws the matrix as it is written."""
        add_rules(net.b, "input udp dport 4791 ip saddr 10.7.0.1 drop")
        matrix, report = tmp_path / "matrix.json", tmp_path / "report.html"
        matrix.write_text(self.check(net, hosts, "--json").stdout)
        argv = ["-m", "rdmacm", "doctor", "--report", str(report), "--matrix", str(matrix)]
        assert net.a.python(argv, check=False).stderr == ""
        page = report.read_text(encoding="utf-8")
        assert "2 pairs, 2 failed" in page
        assert f"{net.a.name} to {net.b.name}: failed at UDP 4791: packets come back, and none reaches the peer" in page
        for cell in (net.a.name, net.b.name):
            assert f'<th scope="row">{cell}</th>' in page

    @needs_nft
    def test_matrix(self, net: TwoHosts, hosts: str) -> None:
        add_rules(net.b, "input udp dport 4791 drop")
        done = self.check(net, hosts)
        assert done.returncode == 13
        assert f"{net.a.name} -> {net.b.name}: UDP 4791: packets come back, and none reaches the peer" in done.stdout
        assert f"{net.b.name} -> {net.a.name}: UDP 4791: packets reach the peer, and none comes back" in done.stdout
        assert done.stdout.splitlines()[-2].split() == [net.a.name, ".", "UDP", "4791"]

    def test_host_without_rdmacm(self, net: TwoHosts, hosts: str) -> None:
        done = net.a.python(
            ["-m", "rdmacm", "check", "--all-pairs", hosts, "--launch", "sh -c 'echo gone >&2; exit 1'", "--json"],
            check=False,
        )
        assert done.returncode == 1
        assert {pair["step"] for pair in json.loads(done.stdout)["pairs"]} == {"start"}
        assert {pair["meaning"] for pair in json.loads(done.stdout)["pairs"]} == {"gone"}
