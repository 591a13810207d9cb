"""The descriptors of the wire of a host, and what reads each of them."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence

from rdmacm.proto.constants import SHORTEST_PACKET
from rdmacm.soft.wire.arrivals import arrivals
from rdmacm.soft.wire.base import Received
from rdmacm.soft.wire.udp_sender import UdpSender

__all__ = ["Pollers"]


class Pollers(UdpSender):
    """See :class:`rdmacm.soft.wire.udp.UdpWire`, which documents the public attributes."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        #: What reads each descriptor of the poller; the poller is None while the wire is closed.
        self._readers: dict[int, Callable[[list[Received]], None]] = {}
        self._poller: select.epoll | select.poll | None = None
        #: With the compiled core: another poller, of all but the sockets of queue pairs.
        self._others: select.epoll | None = None

    def _sort(self, received: Received, words: memoryview, found: list[Received]) -> None:
        """Keep what is for this process, and forward the rest. ``words`` are the data and perhaps more."""
        raise NotImplementedError

    def _open_pollers(self) -> None:
        # One call for all descriptors takes a quarter of the time that reading an empty socket takes.
        if not hasattr(select, "epoll"):
            self._poller = select.poll()
            return
        self._poller = select.epoll()
        if self.core_wire is not None:
            self._others = select.epoll()
            self._watch(self.core_wire.open(self._poller.fileno()), self._core_signals)

    def _close_pollers(self) -> None:
        # They are closed before their descriptors: after fork(2) both processes share their lists of these.
        if self._poller is not None and hasattr(self._poller, "close"):
            self._poller.close()
        self._poller = None
        if self._others is not None:
            self._others.close()
            self._others = None
        self._readers.clear()
        if self.core_wire is not None:
            self.core_wire.close()

    def _core_signals(self, found: list[Received]) -> None:
        assert self.core_wire is not None
        self.core_wire.clear_signal()
        self._take_arrivals(found)

    def _watch(self, fd: int, reader: Callable[[list[Received]], None], is_data: bool = False) -> None:
        assert self._poller is not None
        self._readers[fd] = reader
        self._poller.register(fd, select.POLLIN)
        if self._others is not None and not is_data:
            self._others.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._poller is not None:
            del self._readers[fd]
            self._poller.unregister(fd)
            if self._others is not None:
                self._others.unregister(fd)

    def filenos(self) -> Sequence[int]:
        if self._poller is None:
            return ()
        return (self._poller.fileno(),) if hasattr(self._poller, "fileno") else tuple(self._readers)

    def background_filenos(self) -> Sequence[int]:
        """The same without what a thread of the compiled core serves, while there is one."""
        is_served = self.core_wire is not None and self.core_wire.is_served
        return (self._others.fileno(),) if self._others is not None and is_served else self.filenos()

    def _take_arrivals(self, found: list[Received]) -> None:
        """Take what the compiled core has read and not processed."""
        assert self.core_wire is not None
        for received in arrivals(self.core_wire):
            data = received[0]
            if len(data) < SHORTEST_PACKET or not received[3]:
                self.counters["short"] += 1
            else:
                self._sort(received, data[: len(data) & ~3].cast("I"), found)
