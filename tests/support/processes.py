"""Other processes of this host, each with its own wire, that run the calls a test sends them.

They are forked, so that one costs milliseconds. Each echo contains the process that answered.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import pytest

from rdmacm.proto.constants import MULTICAST_QPN
from rdmacm.soft.wire.base import Received
from rdmacm.soft.wire.udp import UdpWire
from support.clock import REAL, eventually
from support.wires import PATIENCE, packet, path

__all__ = ["CallFailed", "MakeWorker", "Server", "Worker", "workers"]

HERE = path("127.0.0.1", "127.0.0.1")
#: Seconds after which an unanswered ping counts as lost. No machine is that slow.
LOST_SECONDS = 2.0


class CallFailed(Exception):
    """The OSError of a call."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.errno = number


class Server:
    """Runs in the other process: a wire, an echo, pings to others, and the packets that are neither."""

    def __init__(self, control: Connection, port: int) -> None:
        self.control = control
        self.wire = UdpWire(port=port)
        self.other: list[tuple[bytes, int, str, bytes]] = []
        self.wrong = 0
        self.target = 0
        self.sequence = self.answered = self.lost = 0
        self.asked_at = 0.0
        self.tokens: list[object] = []

    def serve(self) -> None:
        while True:
            timeout = max(0.0, self.asked_at + LOST_SECONDS - REAL()) if self.target else None
            fds = [self.control.fileno(), *self.wire.filenos(), *self.wire.unread_request_fds()]
            ready, _, _ = select.select(fds, [], [], timeout)
            self.wire.resume_requests()
            for received in self.wire.receive():
                self.take(received)
            if self.target and REAL() > self.asked_at + LOST_SECONDS:
                self.lost += 1
                self.ask()
            if self.control.fileno() in ready:
                self.run_call()

    def run_call(self) -> None:
        call, args = self.control.recv()
        try:
            self.control.send((True, call(self, *args)))
        except OSError as error:
            self.control.send((False, (error.errno, str(error))))

    def take(self, received: Received) -> None:
        data, segment, remote, local = received
        for start in range(0, len(data), segment or len(data)):
            body = bytes(data[start : start + segment] if segment else data)
            qpn = int.from_bytes(body[5:8], "big")
            if qpn not in (1, MULTICAST_QPN) and qpn >> 12 != self.wire.slot:
                self.wrong += 1
            elif body[12:13] == b"?":
                answer = b"!" + body[16:20] + os.getpid().to_bytes(4, "big")
                self.send(int.from_bytes(body[13:16], "big"), answer)
            elif body[12:13] == b"!" and self.target:
                if body[13:17] == self.sequence.to_bytes(4, "big"):
                    self.answered += 1
                    self.ask()
            else:
                self.other.append((body, segment, remote[0], local))

    def send(self, qpn: int, payload: bytes) -> None:
        self.wire.send(self.wire.route(HERE), (packet(qpn, payload), bytes(4)))

    def ask(self) -> None:
        self.sequence += 1
        self.asked_at = REAL()
        reply = (self.wire.slot << 12 | 2).to_bytes(3, "big")
        self.send(self.target, b"?" + reply + self.sequence.to_bytes(4, "big"))

    # -- calls for a Worker ---------------------------------------------------------------------------

    def become(self, user: int) -> None:
        """Be another user, for good."""
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)

    def open(self) -> int:
        self.wire.open()
        return self.wire.slot

    def close(self) -> None:
        self.wire.close()

    def talk(self) -> None:
        """As after a message of a connection manager."""
        self.wire.leaves_peers = True

    def ping(self, slot: int) -> None:
        """Ping a slot without end, sending the next ping when the last is answered."""
        self.target = slot << 12 | 3
        self.ask()

    def pings(self) -> tuple[int, int, int]:
        """(answered, lost, packets that came to the wrong process)."""
        return self.answered, self.lost, self.wrong

    def listen(self, service_id: int, local: bytes | None) -> None:
        self.tokens.append(self.wire.listen(service_id, local))

    def unlisten(self) -> None:
        self.wire.unlisten(self.tokens.pop(0))

    def taken(self) -> list[tuple[bytes, int, str, bytes]]:
        """The received packets that were no pings: (packet or train, segment, remote, local)."""
        taken, self.other = self.other, []
        return taken

    def counters(self) -> dict[str, int]:
        return dict(self.wire.counters)


class Worker:
    """A process with a :class:`Server`. ``worker(Server.open)`` calls the method there, or any function of a module."""

    def __init__(self, port: int) -> None:
        self.control, theirs = Pipe()
        self.slot = 0
        self.stopped = False
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                self.control.close()
                for wire in [each for each in gc.get_objects() if isinstance(each, UdpWire)]:
                    wire.abandon()  # those the test has open
                Server(theirs, port).serve()
            except EOFError:
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()

    def __call__(self, call: Callable[..., Any], *args: object) -> Any:
        self.begin(call, *args)
        return self.result()

    def begin(self, call: Callable[..., Any], *args: object) -> None:
        self.control.send((call, args))

    def result(self) -> Any:
        assert self.control.poll(PATIENCE), f"process {self.pid} does not answer"
        done, result = self.control.recv()
        if not done:
            raise CallFailed(*result)
        return result

    def open(self) -> int:
        self.slot = self(Server.open)
        return self.slot

    def collect(self, count: int) -> list[tuple[bytes, int, str, bytes]]:
        """At least ``count`` packets that were no pings."""
        found = self(Server.taken)
        while len(found) < count:
            found += eventually(lambda: self(Server.taken), f"{len(found)} of {count} arrived")
        return found  # type: ignore[no-any-return]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        self.stopped = number == signal.SIGSTOP

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self.control.close()


MakeWorker: TypeAlias = Callable[[], Worker]


@contextlib.contextmanager
def workers(port: int) -> Iterator[MakeWorker]:
    """A function that makes workers for a port, which end with the block."""
    made: list[Worker] = []

    def make() -> Worker:
        worker = Worker(port)
        made.append(worker)
        return worker

    try:
        yield make
    finally:
        for worker in made:
            worker.kill()


linux_only = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="sharing is Linux's")
