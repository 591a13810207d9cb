"""One of many processes that are connected to each other at random: ``python many_processes.py INDEX PORTS SEED``.

It listens on the port of its index, echoes messages, and lets peers read some memory; it connects to other processes,
has its messages echoed and reads their memory. Every line of output is a JSON list, mostly about a connection that it
made. After a line of input it makes no more connections; it ends when its input ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from random import Random

import rdmacm
from support.clock import REAL

#: Seconds after which a missing event is a failure; no machine is that slow.
PATIENCE = 15.0
SHOWN = 50_000


def shown(pid: int) -> bytes:
    """The memory that a process lets its peers read."""
    return hashlib.shake_128(b"%d" % pid).digest(SHOWN)


def tell(*what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")  # in one write, so that threads do not mix their lines


def serve(connection: rdmacm.Connection) -> None:
    try:
        with connection:
            region = connection.register(shown(os.getpid()), remote_read=True)
            connection.send(region.remote.pack(), timeout=PATIENCE)
            for message in connection:
                connection.send(message, timeout=PATIENCE)
    except rdmacm.RdmaError:
        pass  # the peer reports that


def accept(listener: rdmacm.Listener) -> None:
    while True:
        connection = listener.accept(private_data=os.getpid().to_bytes(4, "big"))
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def visit(random: Random, index: int, port: int, stop: threading.Event) -> None:
    """Make one connection to another process and print its outcome."""
    began, talked, step, pid = REAL(), 0, "connect", 0
    try:
        with rdmacm.connect(("127.0.0.1", port), timeout=PATIENCE, keepalive=1.0) as connection:
            pid = int.from_bytes(connection.private_data[:4], "big")
            step = "greeting"
            remote = rdmacm.RemoteRegion.unpack(connection.recv(PATIENCE))
            for _ in range(random.choice((1, 5, 30))):
                step = "echo"
                message = random.randbytes(random.choice((1, 100, 1024, 20_000)))
                connection.send(message, timeout=PATIENCE)
                if connection.recv(PATIENCE) != message:
                    tell("wrong", index, pid, "echo")
                step = "read"
                start = random.randrange(SHOWN)
                if connection.read(remote[start:], timeout=PATIENCE) != shown(pid)[start:]:
                    tell("wrong", index, pid, "read")
                talked += 1
                if stop.is_set():
                    break
    except rdmacm.RdmaError as error:
        tell("failed", index, pid, began, REAL(), talked, f"{step}: {error!r}")
    else:
        tell("worked", index, pid, began, REAL(), talked)


def roam(random: Random, own: int, ports: list[int], stop: threading.Event) -> None:
    others = [index for index in range(len(ports)) if index != own]
    while not stop.is_set():
        index = random.choice(others)
        visit(random, index, ports[index], stop)


def main(own: int, ports: list[int], seed: str) -> None:
    with rdmacm.listen(("127.0.0.1", ports[own])) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        stop = threading.Event()
        roaming = [
            threading.Thread(target=roam, args=(Random(f"{seed}/{own}/{number}"), own, ports, stop))
            for number in range(2)
        ]
        tell("ready")
        for thread in roaming:
            thread.start()
        sys.stdin.readline()
        stop.set()
        for thread in roaming:
            thread.join()
        tell("end")
        sys.stdin.read()  # serve other processes until the input ends
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
