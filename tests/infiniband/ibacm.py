"""The real ibacm(8), on a host of a simulated fabric.

umad2sim gives it the fabric's ports, and ``verbs_stub.c`` a verbs device. Its run directory is fixed, so it runs in a
mount namespace in which ``/run`` is a temporary directory: the machine's files are not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from infiniband.fabric import SimulatedFabric, Talker, command, missing
from rdmacm.address import Gid
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.ib.transport import IbPort

STUB = Path(__file__).with_name("verbs_stub.c")


def lacking() -> str | None:
    """The reason why ibacm cannot be started here, or None."""
    if reason := missing("ibacm", "ibsim", "opensm", "cc", "unshare"):
        return reason
    if os.geteuid() != 0:
        return "needs root, for a mount namespace"
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    return f"needs a mount namespace: {probe.stderr.strip()}" if probe.returncode else None


def built_stub(directory: Path) -> Path:
    """Compile the verbs device; skips the test if its header is missing."""
    library = directory / "verbs_stub.so"
    compiler = ["cc", "-shared", "-fPIC", "-o", str(library), str(STUB), "-ldl"]
    done = subprocess.run(compiler, capture_output=True, text=True, check=False)
    if "infiniband/verbs.h" in done.stderr:
        pytest.skip("needs infiniband/verbs.h: on Debian and Ubuntu, apt install libibverbs-dev")
    assert done.returncode == 0, done.stderr
    return library


def port_of(fabric: SimulatedFabric, host: str) -> IbPort:
    """The present attributes of a host's port."""
    transport = IbsimTransport(host, fabric.base)
    transport.open()
    try:
        return transport.port()
    finally:
        transport.close()


@contextlib.contextmanager
def ibacm(
    fabric: SimulatedFabric, stub: Path, host: str, *, own: str, known: Mapping[str, Gid], tcp_port: int = 0
) -> Iterator[Path]:
    """Run the daemon on a host whose IP address is ``own``; ``known`` has the GIDs of other addresses. Yields its run
    directory.

    It serves clients on ``tcp_port`` of this machine if given, else on a Unix socket.
    """
    port = port_of(fabric, host)
    room = fabric.directory / f"ibacm-{host}"
    run = room / "run"
    run.mkdir(parents=True)
    (room / "addresses").write_text(f"{own} ibsim0 1 default\n")
    (room / "hosts").write_text("".join(f"{address} {gid}\n" for address, gid in known.items()))
    options = {
        "server_mode": "loop" if tcp_port else "unix",
        "server_port": tcp_port,
        "log_file": "stdout",
        "log_level": 2,
        "lock_file": room / "lock",
        "support_ips_in_addr_cfg": 1,
        "addr_preload": "acm_hosts",
        "addr_data_file": room / "hosts",
        "route_prot": "sa",
    }
    (room / "options").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    environ = fabric.environ(host)
    environ["PRELOAD"] = f"{stub}:{environ.pop('LD_PRELOAD')}"
    environ.update(STUB_GUID=hex(port.port_guid), STUB_LID=str(port.lid))
    script = 'mount --bind "$1/run" /run && LD_PRELOAD=$PRELOAD exec "$2" -P -A "$1/addresses" -O "$1/options"'
    daemon = Talker(["unshare", "-m", "sh", "-c", script, "sh", str(room), command("ibacm")], environ, fabric.directory)
    try:
        # Two threads log these in either order; before the daemon has joined the group, every address is unknown.
        daemon.await_text("join successful")
        daemon.await_text("listen active")
        yield run
    finally:
        daemon.end()
        shutil.rmtree(room)
