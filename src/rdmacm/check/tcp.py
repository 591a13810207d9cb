"""Lines over a TCP connection."""

from __future__ import annotations

import contextlib
import socket
import time

from rdmacm.check.lines import LONGEST_LINE, LineError, pack, unpack


class Lines:
    """A connection that carries lines. OSError and LineError end it. ``seconds``: how long the other side may take."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._seconds = seconds
        self._read = b""

    def send(self, **fields: object) -> None:
        """Send a line."""
        self._sock.settimeout(self._seconds)
        self._sock.sendall(pack(**fields))

    def receive(self) -> dict[str, object] | None:
        """The next line; None if the other side has ended the connection."""
        until = time.monotonic() + self._seconds
        while b"\n" not in self._read:
            if len(self._read) > LONGEST_LINE:
                raise LineError("a line is too long")
            # For the whole line, so that a side that sends it byte by byte cannot take longer.
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            data = self._sock.recv(4096)
            if not data:
                return None
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return unpack(line)

    def ask(self, **fields: object) -> dict[str, object]:
        """Send a line and return the answer."""
        self.send(**fields)
        answer = self.receive()
        if answer is None:
            raise LineError("the peer has ended the connection")
        return answer

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._sock.close()
