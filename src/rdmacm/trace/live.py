"""Packets as they arrive: of a network interface, or at the end of a file that another program writes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rdmacm.trace.files import Packet
from rdmacm.trace.links import ETHERNET

#: linux/if_ether.h, linux/if_packet.h, asm-generic/socket.h.
_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_IGNORE_OUTGOING = 263, 6, 23
_PACKET_OUTGOING = 4
_SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 33, 35
_TIMESPEC = struct.Struct("@qq")
#: linux/if_arp.h: hardware types whose frames begin with an Ethernet header, and with an IP header.
_ETHERNET_LIKE, _RAW = (1, 772), 101
_BUFFER = 64 << 20
#: Seconds between two calls of ``tick``, and packets between two looks at the clock.
_TICK, _AT_ONCE = 0.2, 256


def is_supported() -> bool:
    """Whether this system has sockets for packets."""
    return hasattr(socket, "AF_PACKET")


class Interface:
    """The packets of a network interface. OSError if they may not be had; PermissionError without CAP_NET_RAW.

    ``tick`` is called some times a second. ``lost`` is how many packets there was no room for.
    """

    def __init__(self, name: str, tick: Callable[[], None], *, seconds: float | None = None) -> None:
        self._tick = tick
        self._until = None if seconds is None else time.monotonic() + seconds
        self._is_loopback = name == "lo"
        self.lost: int = 0
        # Bound to no protocol until it has its interface: it would get packets of others meanwhile.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
                    break
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            if self._is_loopback:  # which shows each packet twice
                with contextlib.suppress(OSError):  # Linux before 4.20
                    self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            self._socket.bind((name, _ETH_P_ALL))
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def __iter__(self) -> Iterator[Packet]:
        due = time.monotonic() + _TICK
        while True:
            now = time.monotonic()
            if now >= due:
                self._tick()
                due = now + _TICK
            if self._until is not None and now >= self._until:
                return
            wait = due - now if self._until is None else min(due, self._until) - now
            select.select([self._socket], [], [], max(wait, 0))
            for _ in range(_AT_ONCE):
                try:
                    data, extra, _, address = self._socket.recvmsg(1 << 17, 64)
                except BlockingIOError:
                    break
                if self._is_loopback and address[2] == _PACKET_OUTGOING:
                    continue
                link_type = ETHERNET if address[3] in _ETHERNET_LIKE else _RAW
                yield _time(extra), link_type, data, 0, len(data), len(data)

    def close(self) -> None:
        """End."""
        with contextlib.suppress(OSError):
            _, self.lost = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _time(extra: list[tuple[int, int, bytes]]) -> int:
    for level, kind, value in extra:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(value) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            return int(seconds * 10**9 + nanoseconds)
    return time.time_ns()


class Growing:
    """A file that grows: :meth:`read` waits at its end.

    ``seconds``: how long to wait in all; without it, there is no end.
    """

    def __init__(self, descriptor: int, tick: Callable[[], None], *, seconds: float | None = None) -> None:
        self._descriptor = descriptor
        self._tick = tick
        self._until = None if seconds is None else time.monotonic() + seconds

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; nothing once the time is over."""
        while True:
            data = os.read(self._descriptor, size)
            if data:
                return data
            self._tick()
            if self._until is not None and time.monotonic() >= self._until:
                return b""
            time.sleep(_TICK)
