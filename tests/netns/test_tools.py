"""The tools that move data, between two hosts on one link."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from support.netns import Host, TwoHosts, needs_netns, two_hosts
from support.servers import Server
from support.waiting import without_waiting

pytestmark = needs_netns


@pytest.fixture(scope="module")
def net() -> Iterator[TwoHosts]:
    with two_hosts() as net:
        yield net


def rdmacm(host: Host, *argv: str) -> str:
    """Run the command on a host; returns its output."""
    done = host.python(["-m", "rdmacm", *argv])
    assert without_waiting(done.stderr) == ""
    return done.stdout


def addresses(net: TwoHosts) -> dict[str, str]:
    """The addresses of ``b`` for ``a``."""
    return {"ipv4": "10.7.0.2", "ipv6": "fd07::2", "link-local": f"{net.vb.link_local}%va"}


@pytest.mark.parametrize("kind", ["ipv4", "ipv6", "link-local"])
def test_rping_works_between_hosts(net: TwoHosts, kind: str) -> None:
    with Server("rping", "-s", "-V", "-d", "-p", "0", host=net.b) as server:
        out = rdmacm(
            net.a,
            "rping",
            "-c",
            "-a",
            addresses(net)[kind],
            "-p",
            str(server.port),
            "-V",
            "-C",
            "5",
            "-S",
            "5000",
            "-v",
        )
        assert out.count("ping data: rdma-ping-") == 5
        assert server.end().status == 0


@pytest.mark.slow
def test_cmtime_and_perf_work_between_hosts(net: TwoHosts) -> None:
    with Server("cmtime", "-p", "0", host=net.b) as server:
        out = rdmacm(net.a, "cmtime", "-s", "10.7.0.2", "-p", str(server.port), "-c", "20", "--concurrent", "--json")
        assert json.loads(out)["connections"] == 20
        assert server.end(signal.SIGINT).status == 130
    with Server("perf", "-s", "-b", "fd07::2", "-p", "0", host=net.b) as server:
        for op in ("send", "write", "read"):
            argv = ["--op", op, "--size", "100000", "--count", "64", "--json"]
            (found,) = json.loads(rdmacm(net.a, "perf", "-c", "fd07::2", "-p", str(server.port), *argv))
            assert found["count"] == 64


def test_rping_to_a_silent_host_reports_the_wait_and_the_reason(net: TwoHosts) -> None:
    done = net.a.python(["-m", "rdmacm", "rping", "-c", "-a", "10.7.0.77"], check=False)
    assert (done.returncode, done.stdout) == (1, "")
    notice, reason = done.stderr.splitlines()
    assert notice == "rdmacm: waiting for the resolution of 10.7.0.77 ..."
    assert reason.startswith("rdmacm: neighbour 10.7.0.77:7174: 10.7.0.77 did not answer ")
