"""A connection whose active end is killed without a word, while another process of its host keeps the UDP port open.

    python3 -m interop.lost_peer server ADDRESS
    python3 -m interop.lost_peer client ADDRESS

So no ICMP message tells the kernel, at the passive end, that nobody is there: the retries of its keepalive do.
"""

from __future__ import annotations

import os
import signal
import sys

import rdmacm

PORT = 7493


def serve(address: str) -> None:
    with rdmacm.listen((address, PORT), keepalive=1.0) as listener:
        print("listening", flush=True)
        with listener.accept() as peer:
            try:
                peer.recv(timeout=100)
            except rdmacm.RdmaError as error:
                print(error, flush=True)


def connect(address: str) -> None:
    connection = rdmacm.connect((address, PORT), timeout=20)
    os.kill(os.getpid(), signal.SIGKILL)
    connection.close()


if __name__ == "__main__":
    {"server": serve, "client": connect}[sys.argv[1]](sys.argv[2])
