"""``rdmacm run``: programs, their exit status, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.clock import eventually


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the place of the library: no program of these tests takes one of its names."""
    found = tmp_path / "library.so"
    found.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    monkeypatch.setenv("RDMACM_RUN_LIBRARY", str(found))
    return found


@contextmanager
def start(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``rdmacm run``; at the end it is none."""
    path = os.pathsep.join(each for each in sys.path if each)
    with subprocess.Popen(
        [sys.executable, "-m", "rdmacm", "run", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*argv: str) -> tuple[int, str, str]:
    """Run it: exit status, output, errors."""
    with start(*argv) as process:
        out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


@pytest.mark.usefixtures("library")
def test_the_exit_status_and_the_output_are_the_programs() -> None:
    assert run("--", "sh", "-c", "echo $1; exit 7", "sh", "--serve")[:2] == (7, "--serve\n")
    assert run("sh", "-c", "exit 0")[0] == 0
    assert run("--", "sh", "-c", "kill -9 $$")[0] == 137


@pytest.mark.usefixtures("library")
def test_a_program_finds_the_library_and_the_server() -> None:
    _, out, _ = run("--", "sh", "-c", "ls ${LD_LIBRARY_PATH%%:*}; test -S $RDMACM_RUN_SOCKET && echo found")
    assert {"libibverbs.so.1", "librdmacm.so.1", "socket", "found"} <= set(out.split())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("chosen", [None, "kernel"])
def test_this_package_uses_its_own_devices_there_unless_others_are_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """The library would show it the same devices once more, as those of a kernel."""
    monkeypatch.delenv("RDMACM_PROVIDER", raising=False)
    if chosen is not None:
        monkeypatch.setenv("RDMACM_PROVIDER", chosen)
    _, out, _ = run("--", "sh", "-c", "echo $RDMACM_PROVIDER")
    assert out == f"{chosen or 'soft'}\n"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_program(number: signal.Signals) -> None:
    script = f"trap 'echo caught; exit 3' {number.name[3:]}; echo ready; while :; do sleep 0.01; done"
    # A shell cannot catch what it was started with as ignored, as nohup(1) does it.
    with start("--", "env", "--default-signal", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "caught\n"
        assert process.wait(60) == 3


@pytest.mark.usefixtures("library")
def test_a_program_has_the_signals_of_the_caller() -> None:
    _, out, _ = run("--", "sh", "-c", "grep -E '^Sig(Blk|Ign)' /proc/self/status")
    _, *blocked = out.split()[:2]
    assert int(blocked[0], 16) == 0
    assert int(out.split()[-1], 16) & 1 << signal.SIGPIPE - 1 == 0


@pytest.mark.usefixtures("library")
def test_programs_that_cannot_be_run(tmp_path: Path) -> None:
    status, _, errors = run("--", "no-such-program")
    assert (status, "ENOENT" in errors) == (127, True)
    assert run("--", str(tmp_path))[0] == 126
    elf = bytearray(Path(sys.executable).resolve().read_bytes()[:64])
    elf[56:58] = bytes(2)  # no program headers, so no dynamic linker
    static = tmp_path / "static"
    static.write_bytes(elf)
    static.chmod(0o755)
    status, _, errors = run("--", str(static))
    assert (status, "statically" in errors) == (126, True)
    elf[18] ^= 0xFF
    static.write_bytes(elf)
    assert "another kind of machine" in run("--", str(static))[2]
    program = Path(sys.executable).resolve().read_bytes()
    if b"ld-linux" in program:
        static.write_bytes(program.replace(b"ld-linux", b"ld-musl-", 1))
        status, _, errors = run("--", str(static))
        assert (status, "musl or glibc" in errors) == (126, True)
    assert run("--")[0] == 2


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RDMACM_RUN_LIBRARY", str(tmp_path / "missing"))
    status, _, errors = run("--", "true")
    assert (status, "the library" in errors) == (1, True)


@pytest.mark.usefixtures("library")
def test_serve_prints_the_environment_of_programs() -> None:
    with start("--serve") as process:
        assert process.stdout is not None
        name, _, path = process.stdout.readline().rstrip("\n").partition("=")
        assert name == "RDMACM_RUN_SOCKET"
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        process.terminate()
        assert process.wait(60) == 0
    eventually(lambda: not os.path.exists(path))
