"""Connects to itself, moves a message, and prints which of rdma-core's libraries the process has loaded.

python3 -m interop.libraries PROVIDER ADDRESS
"""

from __future__ import annotations

import sys
import threading

from rdmacm import connect, devices, listen

PORT = 7530


def main(provider: str, address: str) -> None:
    assert devices(provider)
    with listen((address, PORT), provider=provider) as listener:
        sending = threading.Thread(target=send, args=(provider, address))
        sending.start()
        with listener.accept(10) as connection:
            assert connection.recv(timeout=10) == b"hello"
        sending.join()
    with open("/proc/self/maps") as file:
        maps = file.read()
    print(*[name for name in ("librdmacm", "libibverbs", "libibumad") if f"{name}.so" in maps] or ["none"])


def send(provider: str, address: str) -> None:
    with connect((address, PORT), provider=provider, timeout=10) as connection:
        connection.send(b"hello", timeout=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
