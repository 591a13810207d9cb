"""A running machine, and the scripts it is given. ``qemu`` and ``user_mode`` have the two kinds."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

__all__ = ["Machine", "MachineError", "Result", "copy_project"]

PROJECT = Path(__file__).parents[3]
#: The parts of the project that the machine has at /project.
COPIED = ("src", "tests/conformance", "tests/interop", "tests/support", "bench", "examples")
#: Seconds: for starting the machine, and for a script's own limit to take effect. An emulated machine is slow.
STARTING, SLACK = 180.0, 30.0
#: The status of a script that exceeded its limit.
LATE = 124
#: How often one machine may be started.
STARTS = 4


class MachineError(Exception):
    """The machine failed. The message ends with the last lines of its console."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a script ended."""

    #: The script's exit status; LATE if it exceeded its limit.
    status: int
    #: Its standard output and standard error.
    output: str


def copy_project(folder: Path) -> None:
    """Copy :data:`COPIED` into ``folder``, so that an edit of the project does not change a running machine.

    With RDMACM_CORE=python in the environment, the machine has no compiled core either.
    """
    left_out = ["artifacts"]
    if os.environ.get("RDMACM_CORE") == "python":
        left_out.append("_core.*.so")
    for name in COPIED:
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns(*left_out))


class Machine(ABC):
    """A running machine; a context manager that ends it.

    A machine that does not answer is ended, and the next script starts it again, a few times.
    """

    #: Where its kernel is from and how it runs, after "Linux 6.12": "in user mode".
    description: str
    #: Whether a script that fails is run again in a new machine, as this kind may be slow or stop responding.
    flaky = False

    def __init__(self, share: Path, *, terminal: bool = False) -> None:
        """Start it.

        Args:
            share: the folder of the host that the machine sees as /mnt/share; scripts and their output go there.
            terminal: connect the machine's terminal to ours, for :meth:`shell`.
        """
        self.prepare()
        #: The folder shared with the machine.
        self.share = share
        #: The release of the running kernel, as uname(1) prints it.
        self.kernel = ""
        #: The failure of each script that ran again in a new machine.
        self.stuck: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="rdmacm-guest-")
        #: Temporary files of this machine.
        self.folder = Path(self._folder.name)
        self._console = self.folder / "console"
        self._terminal = terminal
        self._numbers = count(1)
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        #: Bytes of answers not yet read as lines.
        self._received = b""
        try:
            self.make_files()
            self._start()
        except BaseException:
            self.close()
            raise

    @classmethod
    @abstractmethod
    def prepare(cls, *, update: bool = False) -> None:
        """Fill the cache with what such machines start from; ``update``: from today's packages.

        Raises:
            Unavailable: something that is needed is missing.
        """

    @abstractmethod
    def make_files(self) -> None:
        """Make the files that the machine starts from, in :attr:`folder`."""

    @abstractmethod
    def command(self, orders: int, console: Path, *, terminal: bool) -> list[str]:
        """The command that starts the machine.

        Args:
            orders: a socket's descriptor, to be connected to the agent.
            console: the file that the kernel's messages are appended to.
            terminal: whether standard input and output are the machine's terminal.
        """

    def _start(self) -> None:
        self._starts += 1
        if self._starts > STARTS:
            raise MachineError(f"the machine was started {STARTS} times already")
        self._received = b""
        self._orders, theirs = socket.socketpair()
        with theirs, self._console.open("ab") as console:
            self._process = subprocess.Popen(
                self.command(theirs.fileno(), self._console, terminal=self._terminal),
                stdin=None if self._terminal else subprocess.DEVNULL,
                stdout=None if self._terminal else subprocess.DEVNULL,
                stderr=console,
                pass_fds=[theirs.fileno()],
            )
        self.kernel = self._answer("ready", STARTING)

    def run(self, script: str, timeout: float = 60.0, echo: TextIO | None = None) -> Result:
        """Run a bash script that may use the functions of ``net.sh``.

        Args:
            script: the text.
            timeout: its limit in seconds; when it is exceeded or the script ends, all it started is killed.
            echo: receives the output while the script runs.

        Raises:
            MachineError: the machine ended or does not answer.
        """
        if self._process is None:
            self._start()
        name = f"order-{next(self._numbers)}"
        (self.share / f"{name}.sh").write_text(script)
        output = self.share / f"{name}.out"
        output.write_bytes(b"")
        self._orders.sendall(f"{name} {timeout:.0f}\n".encode())
        if echo is not None:
            self._follow(output, echo, timeout + SLACK)
        status = int(self._answer(name, timeout + SLACK))
        return Result(status, output.read_text(errors="replace"))

    def insist(self, script: str, timeout: float = 60.0) -> Result:
        """:meth:`run`, and once more in a new machine if a flaky one stopped responding.

        ``script`` must not depend on what earlier scripts made.

        Raises:
            MachineError: as :meth:`run`; also when the script exceeds its limit.
        """
        try:
            result = self.run(script, timeout)
        except MachineError as error:
            said = str(error)
        else:
            if result.status != LATE:
                return result
            said = result.output[-5000:]
        if not self.flaky:
            raise MachineError(said)
        self.stuck.append(f"{script}\n{said}")
        if self._process is not None:
            self._end()
        return self.run(script, timeout)

    def shell(self) -> int:
        """Run bash on our terminal until it ends; returns its status."""
        self._orders.sendall(b"shell 0\n")
        return int(self._answer("shell", None))

    def _follow(self, output: Path, echo: TextIO, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with output.open(errors="replace") as lines:
            # The answer stays in the socket until _answer() reads it.
            while not self._is_answered(0.1) and time.monotonic() < deadline:
                echo.write(lines.read())
                echo.flush()
            echo.write(lines.read())
            echo.flush()

    def _is_answered(self, seconds: float) -> bool:
        self._orders.settimeout(seconds)
        try:
            return self._orders.recv(1, socket.MSG_PEEK) is not None
        except TimeoutError:
            return False

    def _answer(self, name: str, seconds: float | None) -> str:
        """The rest of the line that begins with ``name``. Answers to scripts that were given up are skipped."""
        self._orders.settimeout(seconds)
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                said, _, status = line.decode(errors="replace").strip().partition(" ")
                if said == name:
                    return status
                continue
            try:
                received = self._orders.recv(4096)
            except TimeoutError:
                raise MachineError(f"no answer to {name} in {seconds:g} s; {self._end()}") from None
            except ConnectionError:
                received = b""
            if not received:
                raise MachineError(f"the machine has ended; {self._end()}")
            self._received += received

    def _end(self) -> str:
        """End the machine; returns what is known of its end."""
        assert self._process is not None
        self._orders.close()
        try:
            # If it has closed its end of the socket, it ends by itself.
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status, self._process = self._process.wait(), None
        return f"it ended with {status}; its console ends: {self._console.read_text(errors='replace')[-2000:]}"

    def close(self) -> None:
        """End the machine and remove its files."""
        if self._process is not None:
            self._process.kill()
            self._end()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
