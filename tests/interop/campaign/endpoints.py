"""An end of ``rdmacm.connect`` and ``rdmacm.listen``, with the provider that RDMACM_PROVIDER names.

    python3 -m interop.campaign.endpoints serve ADDRESS PORT
    python3 -m interop.campaign.endpoints connect ADDRESS PORT CONNECTIONS MESSAGES SIZE [again]

The server returns each message to its client, for any number of clients, one after the other. The client checks them;
with "again" it makes a connection once more, in the same process, when an error has ended it.
"""

from __future__ import annotations

import sys
import time

import rdmacm
from interop.ends import pattern

PATIENCE = 60.0
#: How long an attempt to connect may take that is not the last, and how many there are.
IMPATIENCE, ATTEMPTS = 20.0, 40
#: Seconds before the next attempt: while the interface is down, the kernel refuses at once.
PAUSE = 1.0


def serve(address: str, port: int) -> None:
    with rdmacm.listen((address, port)) as listener:
        print("listening", flush=True)
        while True:
            peer = listener.accept()
            try:
                with peer:
                    for message in peer:
                        peer.send(message)
            except rdmacm.RdmaError as error:
                print(f"a client is gone: {error}", flush=True)


def connect(address: str, port: int, connections: int, messages: int, size: int, *, attempts: int) -> None:
    for _ in range(connections):
        for left in reversed(range(attempts)):
            try:
                exchange(address, port, messages, size, IMPATIENCE if left else PATIENCE)
                break
            except rdmacm.RdmaError as error:
                if not left:
                    raise
                print(f"{attempts - left}: {error}", flush=True)
                time.sleep(PAUSE)
    print("as expected")


def exchange(address: str, port: int, messages: int, size: int, patience: float) -> None:
    with rdmacm.connect((address, port), timeout=patience) as connection:
        for number in range(messages):
            message = pattern(size, number)
            connection.send(message)
            assert connection.recv(patience) == message, f"message {number} is not what was sent"


if __name__ == "__main__":
    role, address, port, *work = sys.argv[1:]
    try:
        if role == "serve":
            serve(address, int(port))
        else:
            connect(address, int(port), *map(int, work[:3]), attempts=ATTEMPTS if work[3:] == ["again"] else 1)
    except rdmacm.RdmaError as error:
        sys.exit(str(error))
