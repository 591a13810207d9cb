"""``rdmacm run`` by users without privileges, and beside those of other users."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmacm.run.server import Server as RunServer
from support.netns import needs_netns, two_hosts
from support.processes import Server, workers
from support.run_client import Client
from support.run_programs import LIBRARIES, compile_program, needs_headers

NOBODY = 65534

#: A user may be unable to read this Python's files, so what is needed is imported before.
AS_NOBODY = """
import os, sys
import rdmacm.run.command, rdmacm.run.mounts
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(rdmacm.run.command.run_program(sys.argv[1:]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can write to."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o777)
        yield path


@needs_netns
def test_an_ordinary_user_needs_no_privilege(public: Path, library: Path) -> None:
    if missing := [mark for mark in needs_headers if mark.args[0]]:
        pytest.skip(missing[0].kwargs["reason"])
    for name in LIBRARIES:
        shutil.copy(library / name, public / name)
    compile_program("exchange", public / "exchange", library)
    temporary = public / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    script = f"id -u; grep CapEff /proc/self/status; ls /sys/class/infiniband; {public}/exchange 2 10; exit 3"
    with two_hosts() as net, net.a.enter():
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "sh", "-c", script],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
                "RDMACM_RUN_LIBRARY": str(public / LIBRARIES[0]),
                "TMPDIR": str(temporary),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 3, done.stderr
    user, _, capabilities, *devices, last = done.stdout.split()
    assert (user, int(capabilities, 16), last) == (str(NOBODY), 0, "done"), done.stdout
    if not done.stderr:  # else the system refuses namespaces, and the program is told
        assert "soft_lo" in devices
    assert list(temporary.iterdir()) == []


@needs_netns
def test_a_port_of_another_user_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with two_hosts() as net, net.a.enter(), workers(4791) as make:
        stranger = make()
        stranger(Server.become, NOBODY)
        stranger.open()
        holder = f"process {stranger.pid} of user {NOBODY} has the port"
        served = RunServer(str(tmp_path / "socket"))
        stopped = threading.Event()
        thread = threading.Thread(target=served.serve, args=(stopped.is_set,))
        thread.start()
        try:
            with Client(served.path) as client:
                for _ in range(2):
                    with pytest.raises(PermissionError):
                        client.slot()
        finally:
            stopped.set()
            served.wake()
            thread.join()
            served.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("rdmacm run: ")
    assert holder in line


def test_directories_of_servers_that_were_killed_are_removed(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    place = tmp_path / "tmp"
    place.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        "RDMACM_RUN_LIBRARY": str(library),
        "TMPDIR": str(place),
    }
    command = [sys.executable, "-m", "rdmacm", "run"]

    def serve() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen([*command, "--serve"], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().rstrip("\n").partition("=")[2]).parent

    (killed, left), (living, kept) = serve(), serve()
    with killed, living:
        killed.kill()
        killed.wait()
        assert stat.S_ISSOCK((left / "socket").stat().st_mode)
        (place / "rdmacm-run-other").mkdir()
        subprocess.run([*command, "--", "true"], env=environment, check=True)
        assert {*place.iterdir()} == {kept, place / "rdmacm-run-other"}
        living.terminate()
        assert living.wait(60) == 0
    assert not kept.exists()
