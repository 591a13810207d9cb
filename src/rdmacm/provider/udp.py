"""The UDP sockets of a provider's host: datagram sockets of rsocket(7) find each other by them."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any, Protocol

from rdmacm.proto.wire import Buffer


class UdpSocket(Protocol):
    """A socket that does not block. The methods are those of :class:`socket.socket`, and raise what they raise."""

    def setsockopt(self, level: int, optname: int, value: int, /) -> None: ...

    def bind(self, address: Any, /) -> None: ...

    def connect(self, address: Any, /) -> None: ...

    def getsockname(self) -> Any: ...

    def fileno(self) -> int:
        """The descriptor; -1 of a simulated socket, and of one that is closed."""

    def sendmsg(self, buffers: Iterable[Buffer], ancdata: Iterable[Any], flags: int, address: Any, /) -> int: ...

    def recvfrom_into(self, buffer: memoryview, /) -> tuple[int, Any]: ...

    def close(self) -> None: ...


def open_udp(family: int) -> UdpSocket:
    """A UDP socket of this host."""
    opened = socket.socket(family, socket.SOCK_DGRAM)
    opened.setblocking(False)
    return opened
