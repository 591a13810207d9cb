"""Programs on top of other communication libraries: Open MPI, stores of large data."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from support.clock import eventually
from support.netns import needs_netns, two_hosts
from support.run_command import datagrams, is_listening, running, started
from support.run_programs import PROGRAMS

ADDRESS, DEVICE = "127.0.0.1", "soft_lo"
#: What Debian's mpirun is called, beside other ones.
MPIRUN = shutil.which("mpirun.openmpi")
#: One of them may have mpi4py.
PYTHONS = (sys.executable, "/usr/bin/python3")

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
    command = ("stdbuf", "-oL", "fi_pingpong", "-p", provider, "-e", endpoint, "-I", str(iterations), "-S", "1024")
    with two_hosts() as net, net.b.enter(), started(library, *command, "-B", str(port)):
        eventually(lambda: is_listening(port))
        with net.a.enter():
            before = datagrams()
            with started(library, "timeout", "60", *command, "-P", str(port), net.vb.ipv4) as client:
                assert client.stdout is not None
                results = next((line for line in client.stdout if line.startswith("1k")), "")
                # An end of rdm that is told of the other's end before it has polled its last completions destroys its
                # queue pair, and they with it. Then it reports them as flushed, or waits for them.
                assert endpoint == "rdm" or client.wait(100) == 0
            assert f"={iterations} " in results
            assert datagrams() - before >= iterations


def has_mpi4py(python: str) -> bool:
    return not subprocess.run([python, "-I", "-c", "import mpi4py"], check=False, stderr=subprocess.DEVNULL).returncode


def ranks(library: Path, parameters: dict[str, str], **variables: str) -> None:
    """Four ranks of Open MPI, without shared memory and TCP between them."""
    if MPIRUN is None:
        pytest.skip("needs openmpi-bin")
    python = next((each for each in PYTHONS if has_mpi4py(each)), None)
    if python is None:
        pytest.skip("needs python3-mpi4py, or mpi4py of PyPI")
    options = [word for pair in {**parameters, "plm_rsh_agent": "false"}.items() for word in ("--mca", *pair)]
    command = ("--host", "localhost:4", "-n", "4", *options, python, "-I", str(PROGRAMS / "ranks.py"))
    variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    before = datagrams()
    assert "done" in running(library, MPIRUN, *command, **variables).splitlines()
    assert datagrams() - before > 100


@pytest.mark.parametrize("transport", ["rc_v", "ud_verbs"])
def test_open_mpi_over_ucx(library: Path, transport: str) -> None:
    parameters = {"pml": "ucx", "osc": "ucx", "pml_ucx_tls": "any", "pml_ucx_devices": "any"}
    ranks(library, parameters, UCX_TLS=f"{transport},self", UCX_NET_DEVICES=f"{DEVICE}:1")


@needs_netns
def test_open_mpi_over_libfabric(library: Path) -> None:
    """On a host with another interface than loopback, where libfabric connects no endpoints."""
    with two_hosts() as net, net.a.enter():
        ranks(library, {"pml": "cm", "mtl": "ofi", "mtl_ofi_provider_include": "verbs;ofi_rxm", "osc": "pt2pt"})


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


@pytest.mark.skipif(not has("infinistore"), reason="needs infinistore of PyPI")
@pytest.mark.skipif(not has("uvloop"), reason="needs uvloop of PyPI")
def test_infinistore(library: Path) -> None:
    if version("uvloop") >= "0.23":
        pytest.skip("needs uvloop before 0.23: InfiniStore has a libuv of its own, which has to suit that of uvloop")
    command = (sys.executable, str(PROGRAMS / "store.py"), ADDRESS, DEVICE, "22345")
    before = datagrams()
    with started(library, *command) as server:
        assert server.stdout is not None
        assert any(line == "ready\n" for line in server.stdout)
        printed = running(library, *command, "client")
    assert "done" in printed.splitlines()
    assert datagrams() - before > 100


@pytest.mark.skipif(shutil.which("ceph-mon") is None, reason="needs ceph-mon")
@pytest.mark.skipif(shutil.which("ceph-osd") is None, reason="needs ceph-osd")
@pytest.mark.skipif(shutil.which("rados") is None, reason="needs ceph-common")
@pytest.mark.parametrize("by_librdmacm", ["false", "true"])
def test_ceph(library: Path, tmp_path: Path, by_librdmacm: str) -> None:
    before = datagrams()
    # Debian's command ceph is a script in Python of its own.
    command = ("env", "-u", "PYTHONPATH", "sh", str(PROGRAMS / "cluster.sh"), str(tmp_path), DEVICE, by_librdmacm)
    assert "done" in running(library, *command).splitlines()
    assert datagrams() - before > 100
