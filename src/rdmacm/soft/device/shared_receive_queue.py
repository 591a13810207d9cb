"""Shared receive queues of the software device."""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.verbs.attr import SrqAttr
from rdmacm.verbs.enums import EventType, SrqAttrMask

if TYPE_CHECKING:
    from rdmacm.proto.work import RecvWork
    from rdmacm.soft.device.memory import MemoryTable, SoftMR
    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.verbs.backend import AsyncEvents
    from rdmacm.verbs.wr import RecvWR

__all__ = ["SoftSRQ"]


class SoftSRQ:
    """Implements :class:`rdmacm.verbs.backend.SRQBackend`."""

    __slots__ = ("__weakref__", "_limit", "_max_sge", "_max_wr", "_pd", "_queue", "_table", "_mux", "async_events")

    def __init__(self, mux: QPMultiplexer, table: MemoryTable, pd: object, attr: SrqAttr) -> None:
        #: Has the lock of all queues.
        self._mux = mux
        #: The registered memory of its device.
        self._table = table
        #: The protection domain whose memory its receives are in.
        self._pd = pd
        #: Receives it holds at most, and scatter/gather elements of one.
        self._max_wr = attr.max_wr
        self._max_sge = attr.max_sge
        #: Report SRQ_LIMIT_REACHED once when fewer receives than this are left; 0 for never.
        self._limit = attr.srq_limit
        #: The receives, oldest first.
        self._queue: deque[RecvWork] = deque()
        #: Takes SRQ_LIMIT_REACHED.
        self.async_events: AsyncEvents | None = None

    def post_recv(self, wrs: list[RecvWR]) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("post_srq_recv", "queue")
            for wr in wrs:
                if len(self._queue) >= self._max_wr:
                    error = cm_error(errno.ENOMEM, f"the queue holds {self._max_wr} receives", "post_srq_recv")
                    error.bad_wr = wr
                    raise error
                self._queue.append(self._table.receive(self._pd, wr))

    def region_changed(self, table: MemoryTable, pd: object, region: SoftMR) -> None:
        """As for a queue pair (:meth:`rdmacm.soft.device.work_queues.WorkQueues.region_changed`)."""
        if pd is self._pd:
            table.look_up_again(pd, region, self._queue)

    @property
    def first(self) -> RecvWork | None:
        """The receive that :meth:`take` takes."""
        return self._queue[0] if self._queue else None

    def take(self) -> RecvWork | None:
        """Take the next receive, for a queue pair that has a message; None if the queue is empty."""
        queue = self._queue
        taken = queue.popleft() if queue else None
        if len(queue) < self._limit:
            self._limit = 0
            if self.async_events is not None:
                self.async_events.post(EventType.SRQ_LIMIT_REACHED)
        return taken

    def modify(self, attr: SrqAttr, mask: SrqAttrMask) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("modify_srq", "queue")
            limit = attr.srq_limit if mask & SrqAttrMask.LIMIT else self._limit
            if mask & SrqAttrMask.MAX_WR:
                for count, what in ((len(self._queue), "receives in the queue"), (limit, "srq_limit")):
                    if count > attr.max_wr:
                        raise cm_error(errno.EINVAL, f"max_wr is {attr.max_wr}, below {count} ({what})", "modify_srq")
                self._max_wr = attr.max_wr
            self._limit = limit

    def query(self) -> SrqAttr:
        with self._mux.runtime.lock:
            return SrqAttr(self._max_wr, self._max_sge, self._limit)

    def destroy(self) -> None:
        with self._mux.runtime.lock:
            self._queue.clear()
