"""The counters of other processes: each tells its own to processes of the same user, when they ask.

A software device lives in its process. The process listens at an abstract AF_UNIX name of the network namespace, which
begins with :data:`PREFIX`, has the process id and is shown in /proc/net/unix. Who connects gets one packet, a JSON
object, if the system says that both belong to one user, or that the reader is root. A process may also tell what
others have counted that it knows: ``rdmacm run`` tells that of its programs.
"""

from __future__ import annotations

import errno
import importlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rdmacm.provider.counters import Counters

PREFIX = "rdmacm.counters."
#: struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")
#: The longest answer, in bytes, and how long one may take, in seconds.
_LONGEST = 1 << 20
_PATIENCE = 2.0
#: The parts of the counters.
_PARTS = ("devices", "cm", "udp", "errors", "traffic")
#: The longest command line that is told, in characters.
_COMMAND = 200


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """What the software devices of one process have counted."""

    #: The process.
    pid: int
    #: Its command line, shortened.
    command: str
    #: Its counters.
    counters: Counters


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class CountersServer:
    """Tells the counters of this process. ``counters`` returns them; it is called by the thread that serves."""

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self._counters = counters
        #: Returns those of other processes; called by the same thread.
        self.others: Callable[[], list[ProcessCounters]] = list
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Listen, in the network namespace of the calling thread. Where that is not possible, nobody can ask."""
        if self._listener is not None or sys.platform != "linux":
            return
        with suppress(OSError):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                sock.bind(f"\0{PREFIX}{os.getpid()}.{os.urandom(4).hex()}")
                sock.listen(16)
            except OSError:
                sock.close()
                raise
            self._listener = sock

    def filenos(self) -> tuple[int, ...]:
        """The descriptor that is readable when somebody asks."""
        listener = self._listener
        return () if listener is None else (listener.fileno(),)

    def serve(self) -> bool:
        """Answer who has asked; whether somebody has."""
        listener = self._listener
        if listener is None:
            return False
        try:
            sock, _ = listener.accept()
        except OSError:  # nobody, or closed by another thread
            return False
        with sock, suppress(OSError):
            if _peer_of(sock)[1] in (os.geteuid(), 0):
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)  # the system takes less, too
                others = self.others()
                while not _is_sent(sock, self._answer(others)) and others:
                    others = others[: len(others) // 2]
        return True

    def _answer(self, others: list[ProcessCounters]) -> bytes:
        path, *arguments = getattr(sys, "argv", None) or [""]
        program = os.path.basename(path)
        if program == "__main__.py":  # of python -m
            program = os.path.basename(os.path.dirname(path))
        command = " ".join([program, *arguments])[:_COMMAND]
        import json

        own = _as_dict(ProcessCounters(os.getpid(), command, self._counters()))
        return json.dumps({**own, "others": [_as_dict(each) for each in others]}).encode()

    def close(self) -> None:
        """Stop listening."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def _is_sent(sock: socket.socket, packet: bytes) -> bool:
    """Whether a packet was not too long for the socket, and for who reads it."""
    if len(packet) > _LONGEST:
        return False
    try:
        sock.send(packet)
    except OSError as error:
        if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM):
            raise
        return False
    return True


def _as_dict(each: ProcessCounters) -> dict[str, Any]:
    return {"pid": each.pid, "command": each.command, **asdict(each.counters)}


def _of_dict(told: dict[str, Any], pid: int = 0) -> ProcessCounters:
    """``pid`` is 0 where the system does not tell it."""
    counters = Counters(*({**told[part]} for part in _PARTS))
    return ProcessCounters(pid or int(told["pid"]), str(told["command"]), counters)


def process_counters() -> list[ProcessCounters]:
    """Return the counters of each process of this network namespace that has a software device open, by process id.

    So has each program of ``rdmacm run`` that has made a queue pair. Processes of other users are left out, unless this
    one is root's. Each counts from its own beginning.
    """
    import json

    found = {}
    for name in _names():
        with (
            suppress(OSError, ValueError, TypeError, KeyError),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
        ):
            sock.settimeout(_PATIENCE)
            sock.connect(f"\0{name}")
            pid, user = _peer_of(sock)
            if os.geteuid() not in (user, 0):
                continue  # the name is anybody's
            told = json.loads(sock.recv(_LONGEST))
            for each in (_of_dict(told, pid), *map(_of_dict, told["others"])):
                found[each.pid] = each
    return [found[pid] for pid in sorted(found)]


def kernel_counters() -> Counters | None:
    """Return the counters of the kernel's devices of this network namespace; None if it has none."""
    read: Callable[[], Counters | None] = importlib.import_module("rdmacm.kernel").read_counters
    return read()


def _names() -> list[str]:
    try:
        with open("/proc/thread-self/net/unix", encoding="utf-8", errors="backslashreplace") as file:
            names = {line.rpartition(" @")[2].rstrip() for line in file}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(PREFIX))
