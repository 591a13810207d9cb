"""``rdmacm lab``: commands in hosts, their order, output and exit status; shells in hosts of a lab by its name."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.clock import eventually
from support.labs import needs_lab
from support.netns import python_environment
from support.servers import Run
from support.waiting import without_waiting

pytestmark = needs_lab

LISTEN = f"""{sys.executable} -c '
import socket, sys
with socket.create_server(("", 5000)) as listener:
    listener.accept()[0].close()
'"""
CONNECT = f"""{sys.executable} -c '
import socket
socket.create_connection(("h1", 5000)).close()
'"""
RDMACM = f"{sys.executable} -m rdmacm"


@pytest.fixture(autouse=True)
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of labs for the test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "rdmacm", "lab", *argv]


def lab(*argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*argv), env=python_environment(), capture_output=True, text=True, timeout=60, check=False, input=text
    )


class TestRun:
    def test_a_server_and_a_client_of_rdmacm(self) -> None:
        done = lab("run", f"h1: {RDMACM} rping -s", f"h2: {RDMACM} rping -c -a h1 -C 2 -v")
        assert (done.returncode, without_waiting(done.stderr)) == (
            0,
            "h1: rdmacm: listening on [::]:7174, all devices\n",
        )
        assert [line[:24] for line in done.stdout.splitlines()] == [
            f"h2: ping data: rdma-ping-{n}"[:24] for n in (0, 1)
        ]

    def test_lost_packets_are_sent_again(self) -> None:
        done = lab(
            *("run", "--loss", "0.05", "--delay", "0.002", "--seed", "3", "--mtu", "4200"),
            *(f"h1&: {RDMACM} rping -s -P", f"h2: {RDMACM} rping -c -a h1 -C 20 -V --timeout 60"),
        )
        assert done.returncode == 0, done.stderr

    def test_a_command_begins_when_the_one_before_it_listens(self) -> None:
        done = lab("run", "--patience", "1e6", f"h1: sleep 0.3; {LISTEN}", f"h2: {CONNECT}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_command_begins_when_the_one_before_it_has_ended(self) -> None:
        done = lab("run", "--patience", "1e6", *(f"h1: echo {number}" for number in range(5)))
        assert done.stdout == "".join(f"h1: {number}\n" for number in range(5))

    def test_lines_have_the_name_of_the_host(self) -> None:
        done = lab("run", "a: printf 'one\\ntwo\\n\\nlast'; printf 'error\\377\\n' >&2")
        assert (done.returncode, done.stdout, done.stderr) == (0, "a: one\na: two\na: \na: last\n", "a: error\\xff\n")

    def test_the_first_failure_ends_the_others(self) -> None:
        slow = "trap 'echo told; exit 9' TERM; while :; do sleep 0.01; done"
        done = lab("run", "--patience", "0.5", f"a: {slow}", "b: exit 3", "c: echo never")
        assert (done.returncode, done.stdout) == (3, "a: told\n")

    def test_a_command_in_the_background_ends_last(self) -> None:
        slow = "trap 'echo told; exit 9' TERM; while :; do sleep 0.01; done"
        done = lab("run", "--patience", "0.5", f"a&: {slow}", "b: echo done")
        assert (done.returncode, done.stdout) == (0, "b: done\na: told\n")

    def test_the_status_of_a_signal(self) -> None:
        assert lab("run", "a: kill -9 $$").returncode == 128 + 9

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals_reach_the_commands(self, number: signal.Signals) -> None:
        script = f"trap 'echo told; exit 0' {number.name[3:]}; echo ready; while :; do sleep 0.01; done"
        with subprocess.Popen(
            command("run", f"a: {script}"), stdout=subprocess.PIPE, text=True, env=python_environment()
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "a: ready\n"
            process.send_signal(number)
            assert process.stdout.read() == "a: told\n"
        assert process.returncode == 128 + number

    def test_a_second_signal_ends_what_does_not_end(self) -> None:
        script = "trap 'echo told' TERM; echo ready; while :; do sleep 0.01; done"
        with subprocess.Popen(
            command("run", f"a: {script}"), stdout=subprocess.PIPE, text=True, env=python_environment()
        ) as process:
            assert process.stdout is not None
            for line in ("a: ready\n", "a: told\n"):
                assert process.stdout.readline() == line
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM

    def test_sigkill_leaves_nothing(self) -> None:
        script = "setsid sleep 1000 & echo ready; sleep 1000"
        with subprocess.Popen(
            command("run", f"a: {script}"), stdout=subprocess.PIPE, text=True, env=python_environment()
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "a: ready\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.kill()
        assert len(children) == 2
        assert eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))

    def test_wrong_commands(self, run: Run) -> None:
        for operands, text in (
            ((), "no command is given; run takes 'HOST: COMMAND'"),
            (("ls",), "'ls' is no command of a host: 'h1: COMMAND', or 'h1&: COMMAND' in the background"),
            (
                ("localhost: ls",),
                "'localhost' is no name of a host: letters, digits and hyphens, beginning with a letter",
            ),
        ):
            assert run("lab", "run", *operands) == (2, "", f"rdmacm: lab: {text}; try: rdmacm lab --help\n")


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """``rdmacm lab up``, once it has made the hosts."""
    with subprocess.Popen(command("up", *argv), stdout=subprocess.PIPE, text=True, env=python_environment()) as process:
        try:
            assert process.stdout is not None
            for _ in range(2):
                process.stdout.readline()
            yield process
        finally:
            process.kill()


class TestUp:
    def test_its_hosts_are_there_until_it_is_interrupted(self) -> None:
        with running() as process:
            assert lab("list").stdout == "LAB  HOSTS\nlab  h1, h2\n"
            assert lab("shell", "h2", "uname -n; exit 7").returncode == 7
            assert lab("shell", text="uname -n\nexit 3\n").stdout == "h1\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert lab("list").stdout == ""

    def test_hosts_reach_each_other_by_their_names(self) -> None:
        with running("--name", "other", "a", "b"):
            done = lab("shell", "--name", "other", "a", "getent hosts b")
            assert done.stdout.split() == ["fd77::2", "b"]
            assert lab("shell", "h1").stderr.startswith("rdmacm: lab lab: there is no lab of this name [ENOENT]")
            done = lab("shell", "--name", "other", "h1")
            assert (done.returncode, done.stderr) == (
                1,
                "rdmacm: lab h1: the lab has no such host, but a, b [ENOENT]\n",
            )

    def test_a_name_is_for_one_lab(self) -> None:
        with running():
            done = lab("up")
            assert done.returncode == 1
            assert done.stderr == "rdmacm: lab lab: a lab of this name is there already [EEXIST]; try: --name NAME\n"
            with running("--name", "two"):
                assert lab("list").stdout == "LAB  HOSTS\nlab  h1, h2\ntwo  h1, h2\n"

    def test_a_name_is_free_after_sigkill(self) -> None:
        with running() as process:
            process.kill()
            process.wait()
            assert lab("list").stdout == ""
        with running():
            assert lab("list").stdout == "LAB  HOSTS\nlab  h1, h2\n"

    def test_a_shell_has_the_terminal(self) -> None:
        with running():
            parent, child = pty.openpty()
            environ = {**python_environment(), "SHELL": "/bin/sh", "PS1": "> "}
            script = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
            script += "; os.execv(sys.argv[1], sys.argv[1:])"
            argv = [sys.executable, "-c", script, *command("shell", "h1")]
            with subprocess.Popen(
                argv, env=environ, stdin=child, stdout=child, stderr=child, start_new_session=True
            ) as shell:
                os.close(child)
                seen = b""

                def shows(text: bytes) -> None:
                    nonlocal seen
                    while text not in seen:
                        seen += os.read(parent, 4096)
                    seen = seen.partition(text)[2]

                shows(b"> ")
                os.write(parent, b"sleep 1000\n")
                shows(b"sleep 1000")
                eventually(lambda: "sleep" in lab("shell", "h1", "ps -e -o comm=").stdout.split())
                os.write(parent, b"\x03")  # Ctrl-C ends the command, not the shell
                shows(b"> ")
                os.write(parent, b"exit 4\n")
                assert shell.wait(60) == 4
            os.close(parent)

    def test_a_directory_of_another_user_is_refused(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / f"rdmacm-lab-{os.getuid()}").mkdir(mode=0o700)
        (tmp_path / f"rdmacm-lab-{os.getuid()}").chmod(0o777)
        assert run("lab", "list").err.startswith("rdmacm: lab ")
