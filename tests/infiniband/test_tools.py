"""The command's resolving tools on a port of a simulated fabric."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from infiniband.fabric import SimulatedFabric
from infiniband.sites import OpenSM
from support.netns import python_environment
from support.servers import Result, Run


def run_at(port: str, *argv: str) -> Result:
    """``rdmacm`` as a process of its own, since the ports of a process do not change."""
    environ = python_environment() | {"RDMACM_IB": port}
    done = subprocess.run(
        [sys.executable, "-m", "rdmacm", *argv], env=environ, capture_output=True, text=True, timeout=30, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def on_a(fabric: SimulatedFabric) -> Run:
    """The command on HostA's port."""
    return partial(run_at, f"ibsim:HostA@{fabric.base}")


@pytest.fixture
def gid(fabric: SimulatedFabric) -> Iterator[str]:
    """The GID of HostB, which has a service ``storage``."""
    with OpenSM(fabric).host("HostB") as host, host.listening() as listener:
        listener.register_service("storage")
        yield str(host.gid)


def test_sa_services_shows_a_listeners_service(fabric: SimulatedFabric, gid: str) -> None:
    on_b = partial(run_at, f"ibsim:HostB@{fabric.base}")
    assert gid in on_b("devices").out
    assert "storage" in on_b("sa", "services", "storage").out


def test_devices_shows_the_port_and_its_gid(on_a: Run) -> None:
    ports, *gids = on_a("devices").out.split("\n\n")
    (port,) = (line.split() for line in ports.splitlines() if line.startswith("HostA"))
    assert (port[:4], port[-1]) == (["HostA/1", "ACTIVE", "InfiniBand", "2048"], "0xffff")
    (table,) = (each for each in gids if each.startswith("HostA"))
    assert [line.split() for line in table.splitlines()] == [
        ["HostA/1"],  # and no interface
        ["INDEX", "GID", "TYPE", "IPV4"],
        ["0", "fe80::10:3", "IB", "-"],
    ]


def test_resolve_shows_device_and_lids_of_a_gid(on_a: Run, gid: str) -> None:
    lines = on_a("resolve", "-f", "ib", "-P", "ib", gid, "7471").out.splitlines()
    facts = dict(line.split("  ", 1) for line in lines if not line.startswith("step"))
    assert facts["device"].strip() == "HostA (provider soft)"
    assert facts["destination GID"].strip() == gid
    assert facts["LIDs"].strip() == "4 -> 5, SL 0"
    assert "service ID" not in facts


def test_explain_shows_the_path_to_a_gid(on_a: Run, gid: str) -> None:
    text = on_a("explain", "-f", "ib", gid, "7471").out
    assert "-> subnet: the first active port of the GID's subnet" in text
    path = "  LID 4 -> 5, MTU 2048, SL 0, hop limit 0, traffic class 0, flow label 0x0,\n      P_Key 0xffff\n"
    assert path in text


def test_explain_shows_the_failing_step_for_an_unknown_gid(on_a: Run) -> None:
    result = on_a("explain", "-f", "ib", "fe80::dead", "7471")
    assert (result.status, "[EINVAL]" in result.error) == (1, True)
    whole = re.sub(r"\n {4,}", " ", result.out)  # lines of more than 80 columns are wrapped
    *_, path, failed, hint = whole.splitlines()
    assert path.split()[0] == "path"
    assert failed.startswith("FAILED at path: the subnet administrator of HostA port 1 knows no path to fe80::dead")
    assert "rdmacm sa nodes" in hint


def test_gid_without_family_option_has_a_hint(on_a: Run, gid: str) -> None:
    assert "for a GID, AF_IB with RAI_FAMILY" in on_a("resolve", gid, "7471").error


@pytest.mark.parametrize("tool", ["getaddrinfo", "resolve", "explain"])
def test_service_is_found_by_name(on_a: Run, gid: str, tool: str) -> None:
    result = on_a(tool, "--sa", "-", "storage")
    assert (result.status, result.err) == (0, "")
    assert f"[{gid}]:0x13f1d2f" in result.out
    assert on_a(tool, "--sa", "-", "nothing").status == 1


def test_service_entry_shows_family_and_port_space(on_a: Run, gid: str) -> None:
    assert "InfiniBand, any QP type, port space IB" in on_a("getaddrinfo", "--sa", "-", "storage").out


def test_unknown_port_is_reported(fabric: SimulatedFabric) -> None:
    port = f"ibsim:HostX@{fabric.base}"
    result = run_at(port, "devices")
    assert (result.status, "HostX" in result.out) == (0, False)
    assert result.err == f"InfiniBand port {port} is not there: there is no node 'HostX' in this fabric\n"
