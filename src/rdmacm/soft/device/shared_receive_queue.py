"""Shared receive queues of the software device."""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.work import RecvWork
from rdmacm.verbs.attr import SrqAttr
from rdmacm.verbs.enums import EventType, SrqAttrMask

if TYPE_CHECKING:
    from rdmacm.proto._core import SharedReceives
    from rdmacm.soft.device.memory import MemoryTable, SoftMR
    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.verbs.backend import AsyncEvents
    from rdmacm.verbs.wr import RecvWR


class PythonReceives(deque[RecvWork]):
    """The receives of a queue, oldest first: what SharedReceives is in the compiled core."""

    __slots__ = ("_is_limit_reached", "limit", "max_wr")

    def __init__(self, max_wr: int) -> None:
        super().__init__()
        #: Receives it holds at most.
        self.max_wr: int = max_wr
        #: Once fewer than this are left it becomes 0, which is to be reported; 0 for never.
        self.limit: int = 0
        self._is_limit_reached = False

    @property
    def first(self) -> RecvWork | None:
        """The receive that :meth:`take` takes."""
        return self[0] if self else None

    def post_work(self, work: RecvWork) -> bool:
        """Queue a receive; False if there is no room."""
        if len(self) >= self.max_wr:
            return False
        self.append(work)
        return True

    def take(self) -> RecvWork | None:
        """Take the oldest receive, for a message."""
        taken = self.popleft() if self else None
        if len(self) < self.limit:
            self.limit = 0
            self._is_limit_reached = True
        return taken

    def take_limit_reached(self) -> bool:
        """Whether the limit was reached since the last call."""
        is_reached, self._is_limit_reached = self._is_limit_reached, False
        return is_reached


class SoftSRQ:
    """Implements :class:`rdmacm.verbs.backend.SRQBackend`."""

    __slots__ = ("__weakref__", "_max_sge", "_mux", "_pd", "_receives", "_table", "async_events", "core")

    def __init__(self, mux: QPMultiplexer, table: MemoryTable, pd: object, attr: SrqAttr) -> None:
        #: Has the lock of all queues.
        self._mux = mux
        #: The registered memory of its device.
        self._table = table
        #: The protection domain whose memory its receives are in.
        self._pd = pd
        #: Scatter/gather elements of a receive at most.
        self._max_sge = attr.max_sge
        #: See :class:`rdmacm.verbs.backend.SRQBackend`; connections of the compiled core take from it.
        self.core: SharedReceives | None = None
        if compiled is not None:
            self.core = compiled.SharedReceives(attr.max_wr, attr.max_sge, table.core_regions, pd, mux.core_wire)
        #: The receives.
        self._receives: SharedReceives | PythonReceives = (
            PythonReceives(attr.max_wr) if self.core is None else self.core
        )
        self._receives.limit = attr.srq_limit
        #: Takes SRQ_LIMIT_REACHED.
        self.async_events: AsyncEvents | None = None

    def post_recv(self, wrs: list[RecvWR]) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("post_srq_recv", "queue")
            receives = self._receives
            for wr in wrs:
                if not receives.post_work(self._table.receive(self._pd, wr)):
                    error = cm_error(errno.ENOMEM, f"the queue holds {receives.max_wr} receives", "post_srq_recv")
                    error.bad_wr = wr
                    raise error

    def region_changed(self, table: MemoryTable, pd: object, region: SoftMR) -> None:
        """As for a queue pair (:meth:`rdmacm.soft.device.work_queues.WorkQueues.region_changed`)."""
        if pd is not self._pd:
            return
        if isinstance(self._receives, PythonReceives):
            table.look_up_again(pd, region, self._receives)
        else:
            self._receives.look_up_again(region.lkey)

    @property
    def first(self) -> RecvWork | None:
        """The receive that :meth:`take` takes."""
        assert isinstance(self._receives, PythonReceives)
        return self._receives.first

    def take(self) -> RecvWork | None:
        """Take the next receive, for an engine in Python that has a message; None if the queue is empty."""
        assert isinstance(self._receives, PythonReceives)
        taken = self._receives.take()
        self.see_limit()
        return taken

    def see_limit(self) -> None:
        """Report that the limit was reached, if a receive was taken since the last call."""
        if self._receives.take_limit_reached() and self.async_events is not None:
            self.async_events.post(EventType.SRQ_LIMIT_REACHED)

    def modify(self, attr: SrqAttr, mask: SrqAttrMask) -> None:
        with self._mux.runtime.lock:
            self._mux.runtime.check_fork("modify_srq", "queue")
            receives = self._receives
            self.see_limit()
            if mask & SrqAttrMask.MAX_WR:
                limit = attr.srq_limit if mask & SrqAttrMask.LIMIT else receives.limit
                for count, what in ((len(receives), "receives in the queue"), (limit, "srq_limit")):
                    if count > attr.max_wr:
                        raise cm_error(errno.EINVAL, f"max_wr is {attr.max_wr}, below {count} ({what})", "modify_srq")
                receives.max_wr = attr.max_wr
            if mask & SrqAttrMask.LIMIT:
                receives.limit = attr.srq_limit

    def query(self) -> SrqAttr:
        with self._mux.runtime.lock:
            return SrqAttr(self._receives.max_wr, self._max_sge, self._receives.limit)

    def destroy(self) -> None:
        with self._mux.runtime.lock:
            self.core = None
            self._receives.clear()
