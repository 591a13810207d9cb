"""Ctrl-C at any moment ends the command with status 130 and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from rdmacm.interrupts import command as interrupt
from support.netns import python_environment
from support.waiting import without_waiting

ROOT = Path(__file__).parents[2]
#: Sends SIGINT to the process itself at its n-th import after the command has taken over, or at its exit. Writes the
#: number of imports to a file.
SITECUSTOMIZE = """
import atexit, os, signal, sys
at, seen, taken_over = os.environ["INTERRUPT_AT"], [0], []
def hook(event, args):
    if event == "import" and os.getpid() == process:
        if args[0] in ("rdmacm.interrupts", "rdmacm.interrupts.command"):
            taken_over[:] = [True]
            return
        if args[0] == "argparse":  # the first import of dev.py
            taken_over[:] = [True]
        if taken_over:
            seen[0] += 1
            if at == str(seen[0]):
                os.kill(process, signal.SIGINT)
def end():
    with open(os.environ["INTERRUPT_COUNT"], "w") as file:
        file.write(str(seen[0]))
    if at == "exit":
        os.kill(process, signal.SIGINT)
process = os.getpid()
if os.environ.pop("INTERRUPT_ME", None):  # not the processes that it starts
    sys.addaudithook(hook)
    atexit.register(end)
"""
#: What pip writes for an entry point.
SCRIPT = """#!{python}
import sys
from {module} import {function}
if __name__ == '__main__':
    sys.exit({function}())
"""


def console_script(directory: Path) -> list[str]:
    """The script that an installation makes."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"]["rdmacm"].partition(":")
    script = directory / "rdmacm"
    script.write_text(SCRIPT.format(python=sys.executable, module=module, function=function))
    return [sys.executable, str(script)]


def command(kind: str, directory: Path) -> list[str]:
    if kind == "script":
        return [*console_script(directory), "demo", "--json"]
    if kind == "dev.py":
        return [sys.executable, str(ROOT / "dev.py"), "demo"]
    return [sys.executable, "-m", "rdmacm", "demo", "--json"]


def interrupted(argv: Sequence[str], at: str, directory: Path) -> tuple[int, str, int]:
    """Status, standard error and number of imports of a run that is interrupted at one moment."""
    (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
    count = directory / "count"
    count.write_text("0")
    environment = python_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(directory), environment.get("PYTHONPATH", "")])
    environment |= {"INTERRUPT_AT": at, "INTERRUPT_ME": "1", "INTERRUPT_COUNT": str(count)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, without_waiting(done.stderr), int(count.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "script", "dev.py"])
def test_interrupt_during_any_import_is_quiet(kind: str, tmp_path: Path) -> None:
    argv = command(kind, tmp_path)
    status, err, imports = interrupted(argv, "never", tmp_path)
    assert (status, err) == (0, "")
    assert imports > 50
    moments = [1, 2, 3, 5, 8, *range(12, imports, 1 + imports // 8), imports]
    for moment in moments:
        assert interrupted(argv, str(moment), tmp_path)[:2] == (130, ""), moment


@pytest.mark.parametrize(
    "kind", ["module", pytest.param("script", marks=pytest.mark.slow), pytest.param("dev.py", marks=pytest.mark.slow)]
)
def test_interrupt_at_exit_is_quiet(kind: str, tmp_path: Path) -> None:
    assert interrupted(command(kind, tmp_path), "exit", tmp_path)[:2] == (130, "")


@pytest.mark.parametrize("is_slow", [False, True])
def test_interrupt_in_a_finalizer_is_delivered_again(is_slow: bool) -> None:
    """Also where the thread that delivers it has time before the finalizer has ended."""
    code = (
        "import os, signal, sys, threading, time\n"
        "from rdmacm.tools import main as tool\n"
        "start = threading.Thread.start\n"
        "def start_slowly(thread):\n"
        "    start(thread)\n"
        "    thread.join(0.3)\n"
        f"if {is_slow}:\n"
        "    threading.Thread.start = start_slowly\n"
        "class Late:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0)\n"
        "def main():\n"
        "    Late()\n"
        "    signal.pause()\n"
        "tool.main, real = (lambda: _guarded(main)), tool.main\n"
        "def _guarded(work):\n"
        "    try:\n"
        "        work()\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "tool.command()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False, env=python_environment()
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_programs_keep_their_handler(tmp_path: Path) -> None:
    program = tmp_path / "rdmacm"
    program.write_text("import signal, rdmacm\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=30, check=True, env=python_environment()
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        ("-m", ["python3", "-m", "rdmacm", "devices"], True),
        ("-m", ["python3", "-mrdmacm"], True),
        ("-m", ["python3", "-m", "pytest", "rdmacm"], False),
        ("-m", ["python3", "-m"], False),
        ("", [], False),
        ("/nowhere/rdmacm", ["/nowhere/rdmacm"], False),
    ],
)
def test_command_is_recognized(
    monkeypatch: pytest.MonkeyPatch, program: str, options: list[str], expected: bool
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "orig_argv", options)
    assert interrupt.is_command() is expected


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt.exit_when_interrupted()
        interrupt.raise_when_interrupted()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
