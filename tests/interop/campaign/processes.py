"""The processes of a draw: programs in a network namespace, with their output in a file."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from interop.campaign.draws import End
from interop.campaign.tools import Command
from interop.machine.warm import enter, run_and_exit

__all__ = ["Process", "waits"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Process:
    """A program that has been started: ours, and rdma-core's in Python, as forks of this process."""

    def __init__(self, end: End, command: Command, output: Path) -> None:
        self.output = output
        #: Whether it keeps a device of rdma_rxe from being removed: librdmacm's tools do, ours give it back.
        self.holds_device = end.device == "rxe" and not end.is_ours
        output.unlink(missing_ok=True)
        self._status: int | None = None
        # A signal that arrives while Python is still forking would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(end, command, output)
            finally:
                os._exit(126)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; returns whether the process still ran."""
        if self.status() is not None:
            return False
        os.kill(self.pid, number)
        return True

    def end(self) -> None:
        """Kill it if it runs."""
        if self.send(signal.SIGKILL):
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def _become(end: End, command: Command, output: Path) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(found, stream)
    os.close(found)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ["RDMACM_PROVIDER"] = end.provider
    if end.namespace:
        enter(end.namespace)
    if command.is_python:
        faulthandler.register(signal.SIGUSR1)
        run_and_exit(list(command.argv))
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command.argv[0], command.argv)


def waits(process: Process) -> str:
    """Where each thread of a process waits in the kernel."""
    lines = []
    for task in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"thread {task.name}, state {state}: {(task / 'wchan').read_text()}")
        except OSError:
            continue
    return "\n".join(lines)
