"""Event queues: where a reader waits, and while it waits, drives the device.

Progress runs in whoever waits (a thread of ours would fight the reader for the interpreter). A reader inside
:meth:`SoftQueue.get` polls the network monitor, its own wake-up descriptor and the next timer. A reader that waits
somewhere else, in select(2) or an event loop, asks for :meth:`SoftQueue.fileno`: an epoll descriptor holding the
same three, so that it polls readable when there is an event *or progress to be made*; ``get(0)`` then makes it, and
may find that no event came of it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.provider import QueuedEvent
from rdmacm.soft.timer import TimerDescriptor

if TYPE_CHECKING:
    from rdmacm.soft.ids import SoftId
    from rdmacm.soft.provider import SoftProvider

#: A reader without a deadline still looks up once in a while: a clock that is not the system's may have moved.
_LONGEST_WAIT = 3600.0


class _Wake:
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


class SoftQueue:
    """The queue of one event channel."""

    def __init__(self, provider: SoftProvider) -> None:
        self.provider = provider
        self._events: deque[QueuedEvent] = deque()
        self._wake: _Wake | None = None
        self._waiting = 0
        self._pollable: select.epoll | None = None
        self._timer: TimerDescriptor | None = None
        self._closed = False
        #: The ids whose events come here.
        self.ids: set[SoftId] = set()

    # -- from the device ------------------------------------------------------------------------------

    def post(self, event: QueuedEvent) -> None:
        with self.provider.lock:
            if self._closed:
                return
            self._events.append(event)
            self._signal()

    def _signal(self) -> None:
        if self._wake is not None and (self._waiting or self._pollable is not None):
            self._wake.set()

    def rearm(self, deadline: float | None) -> None:
        """The provider's next timer has changed (called with its lock held)."""
        if self._timer is not None:
            self._timer.set(deadline, self.provider.clock())
        elif self._waiting and self._wake is not None:
            self._wake.set()

    def take(self, owner: object) -> list[QueuedEvent]:
        with self.provider.lock:
            taken = [event for event in self._events if event.owner is owner]
            if taken:
                self._events = deque(event for event in self._events if event.owner is not owner)
                self._settle()
            return taken

    # -- from the reader ------------------------------------------------------------------------------

    def get(self, timeout: float | None) -> QueuedEvent | None:
        provider = self.provider
        with provider.lock:
            event = self._pop()
            if event is not None:
                return event
            provider.progress()
            event = self._pop()
            if event is not None or (timeout is not None and timeout <= 0):
                return event
            if self._wake is None:
                self._wake = _Wake()
            self._waiting += 1
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            return self._wait(limit)
        finally:
            with provider.lock:
                self._waiting -= 1
                if not self._waiting and self._wake is not None:
                    if self._closed:  # close() left it to the last reader
                        self._wake.close()
                        self._wake = None
                    self._settle()
                elif self._wake is not None:
                    self._wake.set()  # the others look at the clock again: this one may have seen to it for them

    def _pop(self) -> QueuedEvent | None:
        if self._closed or self.provider.abandoned:
            why = "the channel is closed" if self._closed else "the channel was made before fork(2)"
            raise cm_error(errno.EBADF, why, "get_cm_event")
        if self._events:
            event = self._events.popleft()
            event.owner.reported()  # under the lock, so that destroying the id either sees it or discards the event
            self._settle()
            return event
        self._settle()
        return None

    def _settle(self) -> None:
        """Stop polling readable where no event is left. While a reader waits, the signal is the reader's."""
        if self._wake is not None and not self._events and not self._waiting and not self._closed:
            self._wake.clear()

    def _wait(self, limit: float | None) -> QueuedEvent | None:
        provider = self.provider
        assert self._wake is not None
        poll = select.poll()
        poll.register(self._wake.fd, select.POLLIN)
        if (monitor := provider.monitor_fd()) >= 0:
            poll.register(monitor, select.POLLIN)
        while True:
            with provider.lock:
                if not self._events and not self._closed:
                    self._wake.clear()
                deadline = provider.next_deadline()
                wait = _LONGEST_WAIT if deadline is None else max(0.0, deadline - provider.clock())
                if limit is not None:
                    wait = min(wait, max(0.0, limit - time.monotonic()))
                if self._events or self._closed:
                    wait = 0.0
            poll.poll(min(wait, _LONGEST_WAIT) * 1000)
            with provider.lock:
                if not self._closed:
                    provider.progress()
                event = self._pop()
            if event is not None or (limit is not None and time.monotonic() >= limit):
                return event

    def fileno(self) -> int:
        with self.provider.lock:
            if self._closed:
                return -1
            if self._wake is None:
                self._wake = _Wake()
            if sys.platform != "linux":  # no notifications and no timers there: a wake-up says it all
                self._signal_if_waiting()
                return self._wake.fd
            if self._pollable is None:
                self._pollable = select.epoll()
                self._pollable.register(self._wake.fd, select.EPOLLIN)
                if (monitor := self.provider.monitor_fd()) >= 0:
                    self._pollable.register(monitor, select.EPOLLIN)
                if self.provider.clock is time.monotonic:
                    self._timer = TimerDescriptor()
                    self._pollable.register(self._timer.fd, select.EPOLLIN)
                    self._timer.set(self.provider.next_deadline(), self.provider.clock())
                self._signal_if_waiting()
            return self._pollable.fileno()

    def _signal_if_waiting(self) -> None:
        if self._events and self._wake is not None:
            self._wake.set()

    def close(self) -> None:
        with self.provider.lock:
            if self._closed:
                return
            for waiting in list(self.ids):  # as the kernel does when the descriptor of a channel is closed
                waiting.destroy()
            self._closed = True
            self._events.clear()
            if self._pollable is not None:
                self._pollable.close()
                self._pollable = None
            if self._timer is not None:
                self._timer.close()
                self._timer = None
            wake = self._wake
            if wake is not None and not self._waiting:
                wake.close()
                self._wake = None
            elif wake is not None:
                wake.set()  # the last reader closes it
        self.provider.queue_closed(self)
