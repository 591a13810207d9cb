"""A switch that loses and holds up frames, where the kernel has no netem: it reads and writes TAP interfaces."""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import select
import struct
import time
from collections.abc import Iterable, Sequence
from random import Random

from rdmacm.lab.wiring import Wiring

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
#: The longest frame: the most bytes of an MTU, and the Ethernet header.
_MAX_FRAME = 65536
#: Frames that are held up, and frames that are read of one interface before the next.
_MAX_WAITING, _BATCH = 1 << 16, 64


def open_tap(name: str) -> int:
    """Make an interface in the network namespace of this thread; returns the descriptor of its other end."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Switch:
    """Where the frames of a port go, when, and which are lost. Has no descriptors and no clock."""

    def __init__(self, ports: int, wiring: Wiring) -> None:
        self._ports = range(ports)
        self._wiring = wiring
        #: One for each port, so that what goes to one host does not change what another one loses.
        self._random = [Random(f"{wiring.seed}/{port}") for port in self._ports]
        self._places: dict[bytes, int] = {}
        #: Heap of (time, number, port, frame).
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def take(self, port: int, frame: bytes, now: float) -> None:
        """Take a frame that a host has sent."""
        if len(frame) < 14:
            return
        self._places[frame[6:12]] = port
        known = self._places.get(frame[:6])
        for to in self._ports if known is None or frame[0] & 1 else (known,):
            if to == port or len(self._waiting) >= _MAX_WAITING:
                continue
            if self._random[to].random() >= self._wiring.loss:
                self._count += 1
                heapq.heappush(self._waiting, (now + self._wiring.delay, self._count, to, frame))

    def due(self, now: float) -> Iterable[tuple[int, bytes]]:
        """The ports and frames whose time has come."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._waiting)
            yield port, frame

    def next_time(self) -> float | None:
        """When the next frame is due."""
        return self._waiting[0][0] if self._waiting else None


def forward(descriptors: Sequence[int], wiring: Wiring) -> None:
    """Be the switch between TAP interfaces, until the process ends."""
    switch = Switch(len(descriptors), wiring)
    ports = {descriptor: port for port, descriptor in enumerate(descriptors)}
    while True:
        due = switch.next_time()
        # select(2), as the time of epoll_wait(2) is in milliseconds.
        ready, _, _ = select.select(descriptors, [], [], None if due is None else max(0.0, due - time.monotonic()))
        for descriptor in ready:
            for _ in range(_BATCH):
                try:
                    frame = os.read(descriptor, _MAX_FRAME)
                except BlockingIOError:
                    break
                switch.take(ports[descriptor], frame, time.monotonic())
        for port, frame in switch.due(time.monotonic()):
            try:
                os.write(descriptors[port], frame)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EIO, errno.EINVAL):  # full, set down, or not a frame
                    raise
