"""``--pcap``: the packets of all programs, and those of the server, in one capture file.

Programs have their own sockets, so they send what passes there to one more, which all of them share: its queue keeps
the order of all programs. What the server sends and receives itself, connection management, is written after what is in
that queue.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from rdmacm.diagnosis.captures import Capture
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tapped, TellsUndelivered
from rdmacm.run import protocol

#: Bytes of a packet of the queue, and of the queue; the system may allow less.
_MOST = protocol.TAPPED.size + 65536
_QUEUE_BYTES = 1 << 20
#: Datagrams that are written at a time.
_BATCH = 256


class Tapping:
    """See the module. ``own`` are the server's packets. OSError if the file cannot be created."""

    def __init__(self, path: str, own: Tapped) -> None:
        self.capture: Capture = Capture(path)
        self._lock = threading.RLock()
        self._buffer = memoryview(bytearray(_MOST))
        self._queue, self._program = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._queue.setblocking(False)  # not the other end: a program waits for room
        self._program.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        self._own = own
        own.tap = self._tap
        if isinstance(own, TellsUndelivered):
            own.undelivered_tap = self._undelivered

    def fileno(self) -> int:
        """The descriptor to poll for :meth:`read`."""
        return self._queue.fileno()

    def program_fileno(self) -> int:
        """The end for programs."""
        return self._program.fileno()

    def read(self) -> None:
        """Write what programs have sent, or the first of it."""
        with self._lock, suppress(BlockingIOError):
            for _ in range(_BATCH):
                self._read_one()

    def _read_all(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self._read_one()

    def _read_one(self) -> None:
        size = self._queue.recv_into(self._buffer)
        if size < protocol.TAPPED.size:
            return
        time, local, remote, length, source_port, dest_port, is_out, segment = protocol.TAPPED.unpack_from(self._buffer)
        if length not in (4, 16):
            return
        ports = (source_port, dest_port) if is_out else (dest_port, source_port)
        payload = self._buffer[protocol.TAPPED.size : size]
        self.capture.write(time, bool(is_out), local[:length], remote[:length], *ports, payload, segment)

    def _tap(
        self,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[Buffer] | memoryview,
        segment: int,
    ) -> None:
        with self._lock:
            if self._queue.fileno() >= 0:
                self._read_all()
                self.capture.tap(outgoing, local, remote, source_port, dest_port, data, segment)

    def _undelivered(self, quote: bytes, destination: bytes, code: int, reporter: bytes) -> None:
        with self._lock:
            if self._queue.fileno() >= 0:
                self._read_all()
                self.capture.undelivered(quote, destination, code, reporter)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._own.tap = None
        if isinstance(self._own, TellsUndelivered):
            self._own.undelivered_tap = None
        with self._lock:
            self._read_all()
            self._queue.close()
            self._program.close()
            self.capture.close()
