"""Descriptors that other waiting loops can wait on: a wake-up, and one descriptor that stands for several things."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Iterable

from rdmacm.soft.timer import TimerDescriptor

__all__ = ["Pollable", "Wake"]


class Wake:
    """A descriptor one thread signals and another waits on: eventfd(2), or a socket pair where there is none."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if sys.platform == "linux":
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self.fd = self._pair[0].fileno()
        self.raised = False

    def set(self) -> None:
        if not self.raised:
            self.raised = True
            if self._pair:
                self._pair[1].send(b"\0")
            else:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        if self.raised:
            self.raised = False
            if self._pair:
                self._pair[0].recv(16)
            else:
                os.eventfd_read(self.fd)

    def close(self) -> None:
        if self._pair:
            for end in self._pair:
                end.close()
        else:
            os.close(self.fd)


class Pollable:
    """``fd`` polls readable while :attr:`wake` is set, once the deadline has passed, or as one of ``filenos`` does.

    Where there is no epoll(7), it is the wake-up alone.
    """

    def __init__(self, clock: Callable[[], float], filenos: Iterable[int] = ()) -> None:
        self._clock = clock
        self.wake = Wake()
        self._epoll: select.epoll | None = None
        self._timer: TimerDescriptor | None = None
        if sys.platform == "linux":
            self._epoll = select.epoll()
            self._timer = TimerDescriptor()
            for fd in (self.wake.fd, self._timer.fd, *filenos):
                self._epoll.register(fd, select.EPOLLIN)

    @property
    def fd(self) -> int:
        return self._epoll.fileno() if self._epoll is not None else self.wake.fd

    def watch(self, filenos: Iterable[int]) -> None:
        """Descriptors that were opened since."""
        if self._epoll is not None:
            for fd in filenos:
                self._epoll.register(fd, select.EPOLLIN)

    def set_deadline(self, deadline: float | None) -> None:
        """Poll readable from ``deadline`` on, by the clock; None for never."""
        if self._timer is not None:
            self._timer.set(deadline, self._clock())

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        if self._timer is not None:
            self._timer.close()
        self.wake.close()
