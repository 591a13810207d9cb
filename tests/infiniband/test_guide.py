"""The programs of docs/infiniband.md run, and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infiniband.fabric import SimulatedFabric
from support.netns import python_environment

TEXT = (Path(__file__).parents[2] / "docs" / "infiniband.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
SAID = dict(re.findall(r"^```console\n\$ [^\n]*python3 (\w+\.py)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))

Start = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def start(fabric: SimulatedFabric, tmp_path: Path) -> Start:
    """Start a program on a node."""

    def start(name: str, node: str) -> subprocess.Popen[str]:
        (tmp_path / name).write_text(PROGRAMS[name])
        environ = python_environment({"IBSIM_SOCKNAME": fabric.base, "RDMACM_IB": f"ibsim:{node}"})
        return subprocess.Popen([sys.executable, tmp_path / name], env=environ, stdout=subprocess.PIPE, text=True)

    return start


def without_times_and_ids(output: str) -> str:
    """The output without times and automatically chosen service ids."""
    return re.sub(r" +[\d.]+ us", " us", re.sub(r"0x13f[0-9a-f]{4}\b", "0x13f....", output))


def without_ports(output: str) -> str:
    """The output without times and automatically chosen ports."""
    return re.sub(r"0\.0\.0\.0:\d+", "0.0.0.0:", without_times_and_ids(output))


def test_every_program_of_the_guide_is_tested() -> None:
    assert set(PROGRAMS) == {"server.py", "client.py", "why.py", "nodes.py", "memory.py", "ipoib.py"}
    assert set(SAID) == set(PROGRAMS) - {"nodes.py"}


def test_server_and_client_programs_print_the_output_of_the_guide(start: Start) -> None:
    with start("server.py", "HostA") as server:
        assert server.stdout is not None
        try:
            first = server.stdout.readline()
            for name in ("why.py", "nodes.py", "client.py"):
                with start(name, "HostB") as program:
                    said = program.communicate(timeout=30)[0]
                if name == "nodes.py":
                    assert len(set(re.findall(r"\d+", said))) == 2
                else:
                    assert without_times_and_ids(said) == without_times_and_ids(SAID[name])
            rest = server.communicate(timeout=30)[0]
        finally:
            server.kill()
    assert without_times_and_ids(first + rest) == without_times_and_ids(SAID["server.py"])


def test_ipoib_program_prints_the_output_of_the_guide(start: Start) -> None:
    with start("ipoib.py", "HostB") as program:
        said = program.communicate(timeout=30)[0]
    assert without_ports(said) == without_ports(SAID["ipoib.py"])


def test_memory_program_prints_the_output_of_the_guide(start: Start) -> None:
    with start("memory.py", "HostB") as program:
        assert program.communicate(timeout=30)[0] == SAID["memory.py"]
