"""Programs on top of other communication libraries: libfabric's, Open MPI's over UCX, and Mooncake's."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from support.clock import eventually
from support.netns import needs_netns, two_hosts
from support.run_command import datagrams, is_listening, running, started
from support.run_programs import PROGRAMS

ADDRESS, DEVICE = "127.0.0.1", "soft_lo"
#: What Debian's mpirun is called, beside other ones.
MPIRUN = shutil.which("mpirun.openmpi")

pytestmark = pytest.mark.slow


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@needs_netns
@pytest.mark.skipif(shutil.which("fi_pingpong") is None, reason="needs libfabric-bin")
@pytest.mark.parametrize("endpoint", ["msg", "rdm", "dgram"])
def test_fi_pingpong(library: Path, endpoint: str) -> None:
    """Between two hosts, as libfabric connects no endpoints on loopback."""
    port, iterations = 13338, 10
    provider = "verbs;ofi_rxm" if endpoint == "rdm" else "verbs"
    command = ("fi_pingpong", "-p", provider, "-e", endpoint, "-I", str(iterations), "-S", "1024")
    with two_hosts() as net, net.b.enter(), started(library, *command, "-B", str(port)):
        eventually(lambda: is_listening(port))
        with net.a.enter():
            before = datagrams()
            running(library, *command, "-P", str(port), net.vb.ipv4)
            assert datagrams() - before >= iterations


@pytest.mark.skipif(MPIRUN is None, reason="needs openmpi-bin")
@pytest.mark.skipif(not has("mpi4py"), reason="needs mpi4py of PyPI")
@pytest.mark.parametrize("transport", ["rc_v", "ud_verbs"])
def test_four_ranks_of_open_mpi(library: Path, transport: str) -> None:
    assert MPIRUN is not None
    parameters = {"pml": "ucx", "osc": "ucx", "pml_ucx_tls": "any", "pml_ucx_devices": "any", "plm_rsh_agent": "false"}
    options = [word for name, value in parameters.items() for word in ("--mca", name, value)]
    before = datagrams()
    printed = running(
        library,
        *(MPIRUN, "--host", "localhost:4", "-n", "4", *options, sys.executable, str(PROGRAMS / "ranks.py")),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        UCX_TLS=f"{transport},self",  # without shared memory, and without TCP
        UCX_NET_DEVICES=f"{DEVICE}:1",
    )
    assert "done" in printed.splitlines()
    assert datagrams() - before > 100


@pytest.mark.skipif(not has("mooncake.engine" if has("mooncake") else "mooncake"), reason="needs Mooncake of PyPI")
def test_mooncake(library: Path) -> None:
    variables = {"MC_FORCE_HCA": "1"}  # else it uses TCP where it finds no device
    command = (sys.executable, str(PROGRAMS / "transfer.py"), ADDRESS, DEVICE)
    before = datagrams()
    with started(library, *command, **variables) as server:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("ready "))
        _, port, memory = line.split()
        printed = running(library, *command, f"{ADDRESS}:{port}", memory, **variables)
    assert "done" in printed.splitlines()
    assert "installTransport, type=rdma" in printed
    assert datagrams() - before > 100
