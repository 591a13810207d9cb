"""How a command ends: unexpected exceptions, interrupts, and an output that cannot be written."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdmacm.tools import devices as devices_tool
from rdmacm.tools.main import main
from support.netns import TwoHosts, needs_netns, python_environment
from support.servers import Run, Server
from support.waiting import without_waiting


def run_process(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": python_environment(), **options}
    command = [sys.executable, "-m", "rdmacm", *argv]
    return subprocess.run(command, text=True, timeout=30, check=False, **options)


class TestExit:
    def test_unexpected_exceptions_propagate(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        for bug in (ZeroDivisionError("bug"), OSError(5, "not ours")):
            monkeypatch.setattr(devices_tool, "devices", _raising(bug))
            with pytest.raises(type(bug)) as caught:
                run("devices")
            assert caught.value is bug

    def test_interrupt_exits_130(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices_tool, "devices", _raising(KeyboardInterrupt()))
        assert run("devices") == (130, "", "")

    def test_termination_exits_143_and_frees_the_port(self) -> None:
        """Its handlers run: an abandoned file of ports would remain, and clients would wait for nothing."""
        with Server("rping", "-s", "-p", "0") as server:
            ended = server.end(signal.SIGTERM)
            assert (ended.status, ended.err) == (143, "")
        with Server("rping", "-s", "-p", str(server.port)) as again:
            assert again.port == server.port

    def test_characters_outside_the_output_encoding_are_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
        assert main(["explain", "\u00e4", "--numeric"]) == 1
        assert raw.getvalue().startswith(b"\\xe4 (provider soft)\n")

    def test_python_dash_m_runs_the_command(self) -> None:
        done = run_process("resolve", "--json", "127.0.0.1", "7471")
        assert (done.returncode, without_waiting(done.stderr)) == (0, "")
        assert json.loads(done.stdout)["device"] == "soft_lo"
        assert run_process("explain").returncode == 2
        done = run_process("explain", "x", "--numeric")
        assert done.returncode == 1
        assert done.stderr.startswith("rdmacm: getaddrinfo x: ")

    def test_broken_pipe_exits_141_silently(self) -> None:
        # The reading end is closed before anything is written, so the first write fails.
        reading, writing = os.pipe()
        os.close(reading)
        try:
            for argv in (["devices"], ["explain", "::1", "--json"], ["--help"], ["--version"]):
                done = run_process(*argv, stdout=writing)
                assert (done.returncode, without_waiting(done.stderr)) == (141, "")
        finally:
            os.close(writing)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
    def test_full_disk_is_reported(self) -> None:
        with open("/dev/full", "w") as full:
            done = run_process("devices", stdout=full)
        assert done.returncode == 1
        assert done.stderr == "rdmacm: write standard output: No space left on device [ENOSPC]\n"

    def test_closed_stdout_is_reported(self) -> None:
        command = [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"]
        done = subprocess.run(
            [*command, sys.executable, "-m", "rdmacm", "devices"],
            stderr=subprocess.PIPE,
            text=True,
            env=python_environment(),
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr == "rdmacm: write standard output: Bad file descriptor [EBADF]\n"

    @needs_netns
    def test_interrupt_while_waiting_for_a_neighbour_exits_130(self, net: TwoHosts) -> None:
        with net.b.open_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806)) as wire:
            wire.settimeout(30)
            child = net.a.popen_python(
                ["-m", "rdmacm", "resolve", "-t", "60000", "10.7.0.77", "7471"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            # The ARP request on the wire shows that the command waits for the neighbour.
            while wire.recv(64)[38:42] != socket.inet_aton("10.7.0.77"):
                pass
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=30) == ("", "")
        assert child.returncode == 130


def _raising(error: BaseException) -> Callable[..., object]:
    def fail(*args: object) -> object:
        raise error

    return fail
