"""Kills one end of connections of the provider ``kernel`` at random moments; the next process is served.

    python3 -m interop.kernel_killed SEED COUNT

A server and a client connect, move messages and disconnect again and again. Either is killed. A client ends with an
error when its server is killed, and a server goes on when its client is.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable

import rdmacm
from interop.kernel_churn import resources
from support.clock import eventually, pause

HERE, PORT = "10.0.0.1", 7490
PATIENCE = 20.0
#: Seconds from the start of an end to its death at the latest: several connections.
_MOMENT = 0.3
#: Statuses of a client: served, and stopped by an error of the connection.
SERVED, FAILED = 0, 3


class Process:
    """A child that has called ``main``, and has told that it is ready."""

    def __init__(self, main: Callable[[Callable[[], object]], int]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                status = main(lambda: os.write(writing, b"x"))
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writing)
        assert os.read(reading, 1) == b"x", "a process has failed before it was ready"
        os.close(reading)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitpid(self.pid, 0)[1] == signal.SIGKILL, "it has ended before it was killed"

    def status(self) -> int:
        """The status of one that ends."""
        found: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            found.append(status)
            return pid != 0

        eventually(has_ended, "the process does not end")
        return os.waitstatus_to_exitcode(found[-1])


def serve(ready: Callable[[], object]) -> int:
    with rdmacm.listen((HERE, PORT), provider="kernel") as listener:
        ready()
        while True:
            try:
                with listener.accept() as peer:
                    for message in peer:
                        peer.send(message)
            except rdmacm.RdmaError:  # the client was killed
                continue


def exchange() -> None:
    with rdmacm.connect((HERE, PORT), provider="kernel", timeout=PATIENCE) as connection:
        for number in range(4):
            message = b"%d" % number * (1 << 4 * number)
            connection.send(message)
            assert connection.recv(PATIENCE) == message


def connect_for_ever(ready: Callable[[], object]) -> int:
    ready()
    while True:
        try:
            exchange()
        except rdmacm.CmTimeoutError:
            raise
        except rdmacm.RdmaError:
            return FAILED


def connect_once(ready: Callable[[], object]) -> int:
    ready()
    exchange()
    return SERVED


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    moments = random.Random(seed)
    before = resources()
    server = Process(serve)
    killed = {"client": 0, "server": 0}
    for _ in range(count):
        client = Process(connect_for_ever)
        victim = moments.choice(["client", "server"])
        pause(moments.uniform(0, _MOMENT), "it is killed at a random moment")
        killed[victim] += 1
        if victim == "client":
            client.kill()
        else:
            server.kill()
            assert client.status() == FAILED
            server = Process(serve)
        assert Process(connect_once).status() == SERVED
    server.kill()
    eventually(lambda: resources() == before, before)
    print(f"killed: {killed}; the kernel counts {before}")


if __name__ == "__main__":
    main()
