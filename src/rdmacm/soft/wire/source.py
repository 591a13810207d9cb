"""The UDP sockets that the wire receives from, and how fast it reads requests."""

from __future__ import annotations

import socket
import time
from socket import AF_INET, AF_INET6

from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.held_reads import ReadMessage, held_reader

#: Management datagrams that are read as they arrive, and how many more a second.
_BURST, _RATE = 256, 4000


class Source:
    """A socket to receive from."""

    __slots__ = ("_sock", "end", "fd", "held_recvmsg_into", "info", "is_gsi", "recent", "recvmsg_into", "start")

    end: int
    info: int
    start: int

    def __init__(self, sock: socket.socket, is_gsi: bool) -> None:
        #: Whether it is one of slot 0, where management datagrams arrive.
        self.is_gsi: bool = is_gsi
        #: The source itself, if packets for queue pairs arrive there.
        self.recent: Source | None = None if is_gsi else self
        self.recvmsg_into: ReadMessage = sock.recvmsg_into
        #: The same without giving up the interpreter, after :meth:`hold_interpreter`; None where there is none.
        self.held_recvmsg_into: ReadMessage | None = None
        self._sock = sock
        self.fd: int = sock.fileno()
        # The ancillary message with the local address, and where in it that is: of in_pktinfo the address in the
        # packet's header, which the ICRC covers.
        self.info, self.start, self.end = sockets.PACKET_INFO[AF_INET6 if sock.family == AF_INET6 else AF_INET]

    def hold_interpreter(self) -> ReadMessage | None:
        """Make ``held_recvmsg_into``."""
        if self.held_recvmsg_into is None:
            self.held_recvmsg_into = held_reader(self._sock)
        return self.held_recvmsg_into


class RequestRate:
    """Says when management datagrams are to be left in the sockets for a moment, and read in batches.

    Otherwise each of them would wake every thread that waits. The helper thread resumes them.
    """

    __slots__ = ("_counted_at", "left")

    def __init__(self) -> None:
        #: How many may be read until they are left.
        self.left: float = _BURST
        #: When that was counted, in seconds of time.monotonic().
        self._counted_at = 0.0

    def permits(self, count: int) -> bool:
        """Count datagrams that were read. False if they are to be left now."""
        now = time.monotonic()
        accrued = (now - self._counted_at) * _RATE
        self._counted_at = now
        self.left = min(_BURST, self.left + accrued) - count
        return self.left >= 0
