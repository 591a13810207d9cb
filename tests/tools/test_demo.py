"""``rdmacm demo`` and ``dev.py demo``: a whole connection on one screen, or the reason why it fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.netns import needs_netns, python_environment, two_hosts
from support.pcap import frames
from support.servers import Run
from support.waiting import without_waiting

ROOT = Path(__file__).parents[2]
STEPS = [
    *("create qp", "connect", "SEND", "WRITE", "check CRC-32", "READ", "FETCH_AND_ADD", "CMP_AND_SWP", "disconnect"),
]


def test_output_fits_one_screen() -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(ROOT / "dev.py"), "demo"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, without_waiting(done.stderr)) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for word in ("localhost", "device", "GID", "why", "path", *STEPS):
        assert any(line.startswith(word) for line in lines), word
    assert [re.sub(r"^[\d,]+ ", "", line) for line in lines[-2:]] == [
        "MB/s out (WRITE of 1 MiB)",
        "MB/s back (READ of 1 MiB)",
    ]


@pytest.mark.parametrize("place", ["before", "after", "joined"])
def test_demo_prints_json_and_writes_a_capture(run: Run, tmp_path: Path, place: str) -> None:
    file = tmp_path / "demo.pcapng"
    argv = {
        "before": ("--pcap", str(file), "demo", "--json"),
        "after": ("demo", "--json", "--pcap", str(file)),
        "joined": (f"--pcap={file}", "demo", "--json"),
    }
    result = run(*argv[place])
    assert (result.status, result.err) == (0, "")
    found = result.json
    assert set(found) == {"resolution", "pid", "steps", "throughput"}
    assert found["resolution"]["chosen"]["device"] == "soft_lo"
    assert found["pid"] > 0
    assert [step["name"] for step in found["steps"]][-len(STEPS) :] == STEPS
    assert all(step["microseconds"] >= 0 for step in found["steps"])
    assert [each["op"] for each in found["throughput"]] == ["write", "read"]
    assert all(each["bytes_per_second"] > 0 for each in found["throughput"])
    # opcodes of the WRITE's first packet (6), the READ (12), and both atomics (19, 20)
    assert {6, 12, 19, 20} <= {packet[42] for _, packet in frames(file) if packet[12:14] == b"\x08\x00"} | {
        packet[62] for _, packet in frames(file) if packet[12:14] == b"\x86\xdd"
    }


@needs_netns
def test_port_in_use_is_reported() -> None:
    taken = (
        "import socket, subprocess, sys\n"
        "other = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)\n"
        "other.bind(('::', 4791))\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'rdmacm', 'demo']).returncode)\n"
    )
    with two_hosts() as net:
        done = net.a.run(
            [sys.executable, "-c", taken], capture_output=True, text=True, env=python_environment(), check=False
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"rdmacm: second process: open_device UDP port 4791: the port is in use by process \d+ \(python.*\) of "
        r"user \d+ \[EADDRINUSE\]; try: end that process\n",
        done.stderr,
    )


def test_unknown_provider_is_reported(run: Run) -> None:
    result = run("demo", "--provider", "none")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("rdmacm: provider: no provider 'none'")
    assert result.err.count("\n") == 1
