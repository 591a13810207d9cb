"""The command's servers as processes, and the command in this process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from support.netns import Host, python_environment
from support.waiting import without_waiting


class Result(NamedTuple):
    """The result of a run of the command."""

    status: int
    out: str
    #: Without the lines that say that something takes long: a slow machine has them in any test.
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The only line of standard error, without its prefix."""
        lines = self.err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("rdmacm: ")
        assert self.err.endswith("\n")
        return lines[0].removeprefix("rdmacm: ")


Run: TypeAlias = Callable[..., Result]


class Server:
    """``rdmacm ARGV`` as a process that listens on ``port``, which its first line on standard error names.

    It runs on this host, or on one of :mod:`support.netns`.
    """

    def __init__(self, *argv: str, host: Host | None = None) -> None:
        self.start(*argv, host=host)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.fullmatch(r"rdmacm: listening on \S+:(\d+), (all devices|device \w+|TCP)", line.rstrip())
        assert found is not None, line or self.process.communicate()
        self.port = int(found[1])

    def start(self, *argv: str, host: Host | None = None) -> None:
        """Start the process."""
        popen: Callable[..., subprocess.Popen[str]] = host.popen if host is not None else subprocess.Popen
        self.process = popen(
            [sys.executable, "-m", "rdmacm", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=python_environment(),
            text=True,
        )

    def end(self, by: signal.Signals | None = None) -> Result:
        """Wait for the process to end, after a signal if given; returns its output after the first line."""
        if by is not None:
            self.process.send_signal(by)
        out, err = self.process.communicate(timeout=20)
        return Result(self.process.returncode, out, without_waiting(err))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
