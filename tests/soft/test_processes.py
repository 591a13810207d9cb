"""How the text of an error names another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rdmacm.soft.processes import process_text

pytestmark = pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
WAIT = "print(flush=True); input()"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "a-command-with-a-long-name"
    path.write_text(f"#!{sys.executable}\n{WAIT}\n")
    path.chmod(0o755)
    return path


def text_of(*command: str | Path) -> tuple[int, str]:
    """The number of a process that runs the command, and its text."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        found = process_text(process.pid)
        process.communicate(b"\n")
    return process.pid, found


def test_a_script_started_by_its_name_is_named_with_its_arguments(script: Path) -> None:
    pid, text = text_of(script, "rping", "-s")
    assert text == f"process {pid} (a-command-with-a-long-name rping -s)"


def test_a_module_is_named_with_the_interpreter_and_a_long_line_is_cut(script: Path) -> None:
    pid, text = text_of(sys.executable, script, "x" * 40)
    assert text.startswith(f"process {pid} (python")
    assert text.endswith("...)")
    assert len(text) == len(f"process {pid} ()") + 40


def test_a_program_on_the_command_line_is_left_out() -> None:
    pid, text = text_of(sys.executable, "-c", WAIT, "argument")
    assert text.startswith(f"process {pid} (python")
    assert text.endswith(" -c)")


def test_a_process_that_does_not_exist_is_named_by_its_number() -> None:
    assert process_text(2**22 + 1) == f"process {2**22 + 1}"
