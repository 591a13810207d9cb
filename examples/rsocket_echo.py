"""A small program of rsocket(7), ported line by line: the server returns what a client sends, until that closes.

python3 examples/rsocket_echo.py PORT              the server, for one client
python3 examples/rsocket_echo.py PORT ADDRESS TEXT
"""

from __future__ import annotations

import sys
from socket import AF_INET, MSG_WAITALL, SHUT_WR, SOCK_STREAM

from rdmacm.cma import (
    raccept,
    rbind,
    rclose,
    rconnect,
    rgetsockname,
    rlisten,
    rread,
    rrecv,
    rsend,
    rshutdown,
    rsocket,
    rwrite,
)


def serve(port: int) -> None:
    """Serve one client."""
    buf = bytearray(4096)
    listener = rsocket(AF_INET, SOCK_STREAM, 0)
    rbind(listener, ("0.0.0.0", port))
    rlisten(listener, 1)
    print(f"listening on port {rgetsockname(listener)[1]}", flush=True)

    fd, _ = raccept(listener)
    while (size := rread(fd, buf, len(buf))) > 0:
        rwrite(fd, buf, size)
    rclose(fd)
    rclose(listener)


def ask(port: int, address: str, text: bytes) -> bytes:
    """Send a text, and return what comes back."""
    buf = bytearray(len(text))
    fd = rsocket(AF_INET, SOCK_STREAM, 0)
    rconnect(fd, (address, port))
    rsend(fd, text, len(text), 0)
    rshutdown(fd, SHUT_WR)
    rrecv(fd, buf, len(buf), MSG_WAITALL)
    rclose(fd)
    return bytes(buf)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(int(sys.argv[1]))
    else:
        print(ask(int(sys.argv[1]), sys.argv[2], sys.argv[3].encode()).decode())
