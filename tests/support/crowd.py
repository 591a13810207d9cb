"""Many processes of one host that open the device at once: ``python crowd.py COUNT KILLED SEED``.

Each listens, and every second one connects to its neighbour and exchanges a message with it. Then some are killed, as
many new ones take their slots, and each new one exchanges a message with one of those that live. The processes are
forked from one that has imported everything. The output is a JSON object with what each of them reported.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from random import Random

import rdmacm
import rdmacm.endpoint
import rdmacm.net.netlink
import rdmacm.soft.provider
from rdmacm.provider import get_provider
from rdmacm.soft.provider import SoftProvider
from support.clock import Stopwatch

#: Seconds after which a missing answer is a failure; no machine is that slow.
PATIENCE = 120.0


def available() -> int:
    """The memory of this machine that is free, in kB."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


class Process:
    """A process of the crowd, as the parent knows it."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.number = number
        self.slot = self.port = 0
        order_out, self.order = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for other in crowd.living.values():
                os.close(other.order)
            os.close(self.order)
            status = 1
            try:
                run(number, crowd.report_in, order_out)
                status = 0
            finally:
                os._exit(status)
        os.close(order_out)


class Crowd:
    """The parent of all."""

    def __init__(self) -> None:
        report_out, self.report_in = os.pipe()
        self.reports = os.fdopen(report_out)
        self.living: dict[int, Process] = {}
        #: Seconds that each process needed to open the device, and to connect and exchange a message.
        self.opened: list[float] = []
        self.talked: list[float] = []

    def fork(self, number: int) -> Process:
        process = self.living[number] = Process(self, number)
        return process

    def order(self, process: Process, *what: object) -> None:
        os.write(process.order, json.dumps(what).encode() + b"\n")

    def await_reports(self, kind: str, count: int) -> None:
        """Read reports until ``count`` of a kind, or of errors, have come. Ends the program if there were errors."""
        errors = []
        while count:
            what, number, *rest = json.loads(self.reports.readline())
            if what == "error":
                errors.append(f"process {number}: {rest[0]}")
            elif what == "open":
                self.living[number].slot, self.living[number].port, seconds = rest
                self.opened.append(seconds)
            elif what == "talked":
                self.talked.append(rest[0])
            count -= what in (kind, "error")
        if errors:
            raise SystemExit("\n".join([f"{len(errors)} errors instead of {kind!r}", *errors[:10]]))

    def kill(self, process: Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        os.close(process.order)
        del self.living[process.number]


def run(number: int, report: int, orders: int) -> None:
    """A process: do what the parent orders, and echo the messages of others meanwhile."""

    def say(*what: object) -> None:
        os.write(report, json.dumps(what).encode() + b"\n")  # in one write, so that lines do not mix

    lines = os.fdopen(orders)
    try:
        lines.readline()
        watch = Stopwatch()
        with rdmacm.listen(("127.0.0.1", 0)) as listener:
            provider = get_provider()
            assert isinstance(provider, SoftProvider)
            say("open", number, provider.host.mux.wire.slot, listener.port, watch.seconds)
            for line in lines:
                word, *rest = json.loads(line)
                if word == "talk":
                    watch.restart()
                    with rdmacm.connect(("127.0.0.1", rest[0]), timeout=PATIENCE) as connection:
                        message = b"%d" % number
                        connection.send(message, timeout=PATIENCE)
                        assert connection.recv(PATIENCE) == message[::-1]
                    say("talked", number, watch.seconds)
                else:
                    with listener.accept(PATIENCE) as connection:
                        connection.send(connection.recv(PATIENCE)[::-1], timeout=PATIENCE)
    except Exception as error:
        say("error", number, repr(error))


def main(count: int, killed: int, seed: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()  # so that the collector of a child does not copy the parent's memory
    before = available()
    random, crowd = Random(seed), Crowd()
    for number in range(count):
        crowd.fork(number)
    for process in crowd.living.values():
        crowd.order(process)
    crowd.await_reports("open", count)
    pairs = list(crowd.living.values())
    for server, client in zip(pairs[::2], pairs[1::2], strict=False):
        crowd.order(server, "serve")
        crowd.order(client, "talk", server.port)
    crowd.await_reports("talked", count // 2)
    slots = [process.slot for process in crowd.living.values()]

    victims = random.sample(pairs, killed)
    for process in victims:
        crowd.kill(process)
    living = random.sample(list(crowd.living.values()), killed)
    heirs = [crowd.fork(count + index) for index in range(killed)]
    for process in heirs:
        crowd.order(process)
    crowd.await_reports("open", killed)
    for server, client in zip(living, heirs, strict=True):
        crowd.order(server, "serve")
        crowd.order(client, "talk", server.port)
    crowd.await_reports("talked", killed)
    result = {
        "slots": slots,
        "killed": [process.slot for process in victims],
        "reused": [process.slot for process in heirs],
        "kilobytes": (before - available()) // count,
        "opened": sorted(crowd.opened),
        "talked": sorted(crowd.talked),
    }
    for process in list(crowd.living.values()):
        crowd.kill(process)
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
