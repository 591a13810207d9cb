"""Hours of connections that come and go, with loss and interrupts: what do two processes still hold at the end?

    python3 dev.py bench soak [--minutes 120] [--warm-up 10] [--rate 20] [--loss 0.01] [--json]

A server sends each message back. A client exchanges messages on one connection that stays, while signals interrupt its
main thread at random moments, and its other threads open, use and close connections: --rate a second in all. A third
process does the same and is killed every few seconds. Each process drops a part of its packets (--loss). A message with
a wrong byte, a connection that is lost, and an error that neither loss nor the kills explain end the run.

Each minute prints what the server and the client hold. The result is the slope of their resident memory after the
warm-up, by least squares, and the growth of their descriptors and threads from the first sample after it to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import rdmacm
from rdmacm.proto.wire import Buffer
from rdmacm.soft import open_provider
from rdmacm.soft.wire.base import WireRoute
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.tools.measure import resident_bytes

HOST = "127.0.0.1"
THREADS = 4
#: The longest message in bytes: more than one packet has.
LONGEST = 20_000
#: Seconds that a call may take: more than the connection manager's last retry.
PATIENCE = 120.0
#: The longest life of the process that is killed, in seconds.
LIFE = 10.0


class Interrupted(Exception):
    """What the handler of the signals raises."""


def lose_packets(share: float) -> None:
    """Drop this share of the packets and trains that this process sends."""
    send, chance = UdpWire.send, random.random

    def lossy(self: UdpWire, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        return chance() < share or send(self, route, buffers, segment)

    UdpWire.send = lossy  # type: ignore[method-assign]


# -- the server -----------------------------------------------------------------------------------------------------


def echo(connection: rdmacm.Connection) -> None:
    with suppress(rdmacm.RdmaError), connection:
        for message in connection:
            connection.send(message)


def serve() -> None:
    with rdmacm.listen((HOST, 0)) as listener:
        print(listener.port, flush=True)
        threading.Thread(target=answer, daemon=True).start()
        while True:
            threading.Thread(target=echo, args=(listener.accept(),), daemon=True).start()


def answer() -> None:
    """For each line of input, print what this process holds; end with the input."""
    for _ in sys.stdin:
        print(json.dumps(held()), flush=True)
    os._exit(0)


def held() -> dict[str, int]:
    host: Any = open_provider().host
    return {
        "kB": resident_bytes() >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "queue pairs": len(host.mux),
        "timers": len(host.cm.agent.timers),
    }


# -- the clients ----------------------------------------------------------------------------------------------------


class Client:
    """Opens and closes connections in several threads, and counts how each ends."""

    def __init__(self, port: int, rate: float) -> None:
        self.address = HOST, port
        self.ends: Counter[str] = Counter()
        self.fault: BaseException | None = None
        self._pause = THREADS / rate
        for number in range(THREADS):
            threading.Thread(target=self._churn, args=(number,), daemon=True).start()

    def _churn(self, seed: int) -> None:
        chance = random.Random(seed)
        while True:
            began = time.monotonic()
            try:
                self.visit(chance)
                self.ends["closed"] += 1
            except rdmacm.RdmaError as error:
                self.ends[type(error).__name__] += 1
            except BaseException as fault:
                self.fault = fault
                raise
            time.sleep(max(0.0, self._pause - (time.monotonic() - began)))

    def visit(self, chance: random.Random) -> None:
        with rdmacm.connect(self.address, timeout=PATIENCE) as connection:
            for _ in range(chance.randrange(4)):
                exchange(connection, chance)


def exchange(connection: rdmacm.Connection, chance: random.Random) -> None:
    message = chance.randbytes(chance.randrange(1, LONGEST))
    connection.send(message, timeout=PATIENCE)
    received = connection.recv(PATIENCE)
    assert received == message, f"{len(message)} bytes came back as {len(received)} others"


class Interrupts:
    """Signals at random moments, from once to a hundred times a second."""

    def __init__(self) -> None:
        self.armed = False
        self.raised = 0
        signal.signal(signal.SIGALRM, self._handle)
        self._next()

    def _next(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 10 ** random.uniform(-2, 0))

    def _handle(self, *_: object) -> None:
        self._next()
        if self.armed:
            self.armed = False
            self.raised += 1
            raise Interrupted


class Lasting:
    """The connection that stays: messages with a number, which come back in order."""

    def __init__(self, port: int) -> None:
        self.connection = rdmacm.connect((HOST, port), timeout=PATIENCE)
        self.messages = 0
        #: The numbers of the last message that was sent, and of the last that is no longer expected.
        self._sent = self._given_up = 0
        self._last = b"0"

    def turn(self, interrupts: Interrupts) -> None:
        """Send the next message, or receive one. An interrupt may come at any moment."""
        try:
            interrupts.armed = True
            if self._sent - max(int(self._last), self._given_up) < 4:
                # Counted first: an interrupted send() may have sent its message, or not.
                self._sent += 1
                self.connection.send(b"%d" % self._sent)
            else:
                before, self._last = self._last, self.connection.recv(0.5)
                assert int(self._last) > int(before)
                self.messages += 1
        except Interrupted:
            pass
        except rdmacm.CmTimeoutError:
            self._given_up = self._sent  # interrupts came before the messages were sent
        finally:
            interrupts.armed = False


def victim(port: int, rate: float) -> None:
    Client(port, rate)
    print("ready", flush=True)
    sys.stdin.read()


# -- the run --------------------------------------------------------------------------------------------------------


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ask(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    found: dict[str, int] = json.loads(line_of(process))
    return found


class Victim:
    """The process that is killed every few seconds."""

    def __init__(self, *arguments: object) -> None:
        self.kills = 0
        self._arguments = arguments
        self._process = start("--victim", *arguments)
        self._end = time.monotonic() + LIFE

    def look(self) -> None:
        if time.monotonic() > self._end:
            self.kill()
            self._process = start("--victim", *self._arguments)
            self._end = time.monotonic() + random.uniform(1.0, LIFE)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
        self.kills += 1


def run(options: argparse.Namespace) -> dict[str, Any]:
    chosen = ("--loss", options.loss, "--rate", options.rate)
    server = start("--serve", *chosen)
    port = int(line_of(server))
    client, lasting = Client(port, options.rate), Lasting(port)
    killed = Victim(port, *chosen)
    interrupts = Interrupts()
    began = time.monotonic()
    samples: list[dict[str, dict[str, int]]] = []
    try:
        while len(samples) < options.minutes:
            while time.monotonic() < began + 60 * (len(samples) + 1):
                lasting.turn(interrupts)
                killed.look()
                if client.fault is not None:
                    raise client.fault
            samples.append({"server": ask(server), "client": held()})
            ends = ", ".join(f"{count} {name}" for name, count in client.ends.most_common())
            print(f"{len(samples):4} min: {samples[-1]}; {interrupts.raised} interrupts; {ends}", flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        killed.kill()
        server.kill()
        server.communicate()
    return {
        "minutes": len(samples),
        "connections": dict(client.ends),
        "messages": lasting.messages,
        "interrupts": interrupts.raised,
        "kills": killed.kills,
        "errors": dict(open_provider().query_counters().errors),
        **{side: growth([sample[side] for sample in samples[options.warm_up :]]) for side in ("server", "client")},
    }


def growth(samples: list[dict[str, int]]) -> dict[str, float]:
    """Memory in kB a minute; descriptors and threads from the first sample to the last."""
    if len(samples) < 2:
        return {}
    memory = statistics.linear_regression(range(len(samples)), [sample["kB"] for sample in samples]).slope
    return {
        "kB a minute": round(memory, 2),
        **{name: samples[-1][name] - samples[0][name] for name in ("descriptors", "threads")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev.py bench soak", description="Hours of connections that come and go.")
    parser.add_argument("--minutes", type=int, default=120, help="how long (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=10, help="minutes that do not count (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="connections a second (default: %(default)s)")
    parser.add_argument("--loss", type=float, default=0.01, help="share of lost packets (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--victim", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lose_packets(options.loss)
    if options.serve:
        serve()
    elif options.victim is not None:
        victim(options.victim, options.rate)
    else:
        found = run(options)
        print(json.dumps(found, indent=2) if options.json else "\n".join(f"{k}: {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
