"""The descriptors of the wire of a host, and what reads each of them."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rdmacm.soft.wire.base import Received

#: Reads a descriptor, and appends what is for this process.
Reader: TypeAlias = Callable[[list[Received]], None]


class Pollers:
    """One call for all descriptors takes a quarter of the time that reading an empty socket takes."""

    def __init__(self) -> None:
        #: What reads each descriptor of the poller; the poller is None while the wire is closed.
        self.readers: dict[int, Reader] = {}
        self.poller: select.epoll | select.poll | None = None
        #: The sockets of queue pairs and of multicast groups.
        self._data: set[int] = set()
        #: With the compiled core: another poller, of all but these.
        self._others: select.epoll | None = None

    def open(self, *, with_core: bool) -> None:
        if not hasattr(select, "epoll"):
            self.poller = select.poll()
            return
        self.poller = select.epoll()
        if with_core:
            self._others = select.epoll()

    def close(self) -> None:
        # They are closed before their descriptors: after fork(2) both processes share their lists of these.
        if self.poller is not None and hasattr(self.poller, "close"):
            self.poller.close()
        self.poller = None
        if self._others is not None:
            self._others.close()
            self._others = None
        self._data.clear()
        self.readers.clear()

    def watch(self, fd: int, reader: Reader, is_data: bool = False) -> None:
        """Have ``reader`` called while ``fd`` is readable. ``is_data``: it is the socket of queue pairs or a group."""
        assert self.poller is not None
        self.readers[fd] = reader
        self.poller.register(fd, select.POLLIN)
        if is_data:
            self._data.add(fd)
        elif self._others is not None:
            self._others.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        if self.poller is not None:
            del self.readers[fd]
            self.poller.unregister(fd)
            if fd in self._data:
                self._data.remove(fd)
            elif self._others is not None:
                self._others.unregister(fd)

    def pause(self, fd: int, paused: bool) -> None:
        """Have only the errors of ``fd`` reported, or all again."""
        for poller in (self.poller, self._others):
            if poller is not None:
                poller.modify(fd, 0 if paused else select.POLLIN)

    def filenos(self, *, without_data: bool = False) -> Sequence[int]:
        """The descriptors to poll, perhaps without the sockets of queue pairs and groups."""
        if without_data and self._others is not None:
            return (self._others.fileno(),)
        if self.poller is None:
            return ()
        return (self.poller.fileno(),) if hasattr(self.poller, "fileno") else tuple(self.readers)
