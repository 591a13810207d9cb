"""Run commands in the hosts of a lab, one after the other listening, and show what they write."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from rdmacm.lab.lab import Lab
from rdmacm.lab.wiring import NAME

#: Signals that are passed on to the commands.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds between two looks whether a command listens.
_LOOK = 0.02
#: Seconds that commands have to end when they are told to.
_GRACE = 5.0
#: The state of a listening socket in /proc/net/tcp, and UDP port 4791, of RoCEv2, as /proc/net/udp has it.
_LISTEN, _ROCE = "0A", ":12B7"
#: The longest piece of a line that is shown by itself.
_MAX_LINE = 1 << 16

_TASK = re.compile(rf"\s*({NAME.pattern})\s*(&?)\s*:\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Task:
    """A command of a host.

    - ``host``: the name of the host.
    - ``command``: what the shell of the host executes.
    - ``is_background``: whether it ends when the others have ended.
    """

    host: str
    command: str
    is_background: bool = False

    @classmethod
    def parse(cls, text: str) -> Task:
        """``HOST: COMMAND``, or ``HOST&: COMMAND`` for one in the background; ValueError for another text."""
        found = _TASK.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no command of a host: 'h1: COMMAND', or 'h1&: COMMAND' in the background")
        return cls(found[1], found[4].strip(), found[3] == "&")


#: What gets each line of output: the name of the host, whether it is of standard error, the line with its end.
Show = Callable[[str, bool, bytes], object]


class _Running:
    """A command that runs."""

    def __init__(self, lab: Lab, task: Task) -> None:
        self.task = task
        self.host = lab.hosts[task.host]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.child: subprocess.Popen[Any] = self.host.popen(
            ["/bin/sh", "-c", task.command], stdin=subprocess.DEVNULL, bufsize=0, **pipes
        )
        self.pidfd = os.pidfd_open(self.child.pid)
        self.status: int | None = None

    def listens(self) -> bool:
        """Whether its host has a listening socket, of TCP or of RoCEv2."""
        return any(_has_listener(f"/proc/{self.host.pid}/net/{table}") for table in ("tcp", "tcp6", "udp", "udp6"))

    def tell(self, number: int) -> None:
        """Send a signal."""
        if self.status is None:
            self.child.send_signal(number)


def _has_listener(path: str) -> bool:
    try:
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
    except OSError:
        return False
    if "/udp" in path:
        return any(row[1].endswith(_ROCE) for row in rows)
    return any(row[3] == _LISTEN for row in rows)


class Crew:
    """Commands, of which each begins when the one before it listens, or has ended, or ``patience`` seconds are over.

    When one fails, the others are told to end. What does not end then, ends with the lab.
    """

    def __init__(self, lab: Lab, tasks: Sequence[Task], show: Show, patience: float) -> None:
        self._lab = lab
        self._tasks = list(tasks)
        self._show = show
        self._patience = patience
        self._selector = selectors.DefaultSelector()
        self._running: list[_Running] = []
        self._rest: dict[int, bytes] = {}
        #: When the next command begins at the latest, and when commands end that have been told to.
        self._next = 0.0
        self._end: float | None = None
        self._status = 0
        self._is_stopped = False

    def run(self) -> int:
        """Run all; returns 0, or the exit status of the first that has failed, or 128 and the number of a signal."""
        with self._selector, _signals() as woken:
            self._selector.register(woken, selectors.EVENT_READ, self._signalled)
            while not self._is_over():
                self._begin()
                for key, _ in self._selector.select(self._timeout()):
                    key.data(key.fileobj)
            self._lab.close()
            for running in self._running:  # what was written before the end
                for is_error, pipe in ((False, running.child.stdout), (True, running.child.stderr)):
                    while pipe is not None and not pipe.closed:
                        self._read(running, is_error, pipe)
        for running in self._running:
            if running.status is None:
                os.close(running.pidfd)
        return self._status

    # -- what is next ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the next command if it is its turn."""
        if not self._tasks or self._is_stopped:
            return
        if self._running:
            last = self._running[-1]
            if last.status is None and time.monotonic() < self._next and not last.listens():
                return
        running = _Running(self._lab, self._tasks.pop(0))
        self._running.append(running)
        self._next = time.monotonic() + self._patience
        self._selector.register(running.pidfd, selectors.EVENT_READ, lambda _: self._ended(running))
        for is_error, pipe in ((False, running.child.stdout), (True, running.child.stderr)):
            assert pipe is not None
            self._rest[pipe.fileno()] = b""
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, running, is_error))

    def _timeout(self) -> float | None:
        if self._end is not None:
            return max(0.0, self._end - time.monotonic())
        return _LOOK if self._tasks else None

    def _is_over(self) -> bool:
        if self._end is not None and time.monotonic() >= self._end:
            return True
        left = [running for running in self._running if running.status is None]
        if (self._tasks and not self._is_stopped) or any(not running.task.is_background for running in left):
            return False
        self._stop(signal.SIGTERM)
        return not left

    def _stop(self, number: int) -> None:
        """Tell all to end."""
        if not self._is_stopped:
            self._is_stopped = True
            self._end = time.monotonic() + _GRACE
            for running in self._running:
                running.tell(number)

    # -- what happens ---------------------------------------------------------------------------------

    def _signalled(self, woken: socket.socket) -> None:
        for number in woken.recv(64):
            if self._is_stopped:
                self._end = 0.0
            self._status = self._status or 128 + number
            self._stop(number)

    def _ended(self, running: _Running) -> None:
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        running.status = running.child.wait()
        if running.status and not running.task.is_background:
            if not self._is_stopped:
                self._status = running.status if running.status > 0 else 128 - running.status
            self._stop(signal.SIGTERM)

    def _read(self, running: _Running, is_error: bool, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), 65536)
        text = self._rest[pipe.fileno()] + data
        *lines, rest = text.split(b"\n")
        if rest and (not data or len(rest) > _MAX_LINE):
            lines, rest = [*lines, rest], b""
        for line in lines:
            self._show(running.task.host, is_error, line + b"\n")
        self._rest[pipe.fileno()] = rest
        if not data:
            self._selector.unregister(pipe)
            pipe.close()


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that has the numbers of the signals that come, which do nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in PASSED_ON}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def wait_for_signal() -> int:
    """Wait until a signal comes that ends a lab; returns its number."""
    with _signals() as woken:
        with suppress(InterruptedError):
            return woken.recv(1)[0]
    return 0
