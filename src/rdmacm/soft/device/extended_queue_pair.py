"""Extended reliable connected (XRC) queue pairs of the software device, their domains and shared receive queues.

A target (XRC_RECV) has no queues of its own: each request names a shared receive queue of the target's XRC domain. The
request takes its receive from that queue, touches the memory of that queue's protection domain, and completes on that
queue's completion queue, with the target's number. An initiator (XRC_SEND) is a reliable queue pair that only sends.
"""

from __future__ import annotations

import errno
from itertools import groupby
from typing import TYPE_CHECKING, cast

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.engines import make_xrc_initiator, make_xrc_target
from rdmacm.soft.device.memory import RemoteMemory
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.soft.device.requests import refused
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.verbs.enums import EventType, QPState

if TYPE_CHECKING:
    from random import Random

    from rdmacm.proto import _core
    from rdmacm.proto.engine import EngineCounters, EngineFactory, SharedReceives
    from rdmacm.proto.roce.xrc import SharedQueue, TargetEngine
    from rdmacm.proto.work import WC, Memory, SendWork
    from rdmacm.soft.device.completion import SoftCQ
    from rdmacm.soft.device.memory import MemoryTable
    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.soft.device.work_queues import DeviceParts
    from rdmacm.verbs.attr import QPCap, SrqAttr
    from rdmacm.verbs.backend import AsyncEvents
    from rdmacm.verbs.wr import RecvWR, SendWR

_SRQN_BITS = 24


class XrcDomain:
    """An XRC domain: the shared receive queues that the targets in it may use."""

    __slots__ = ("__weakref__", "_queues", "core")

    def __init__(self, queues: dict[int, SoftXrcSRQ], table: MemoryTable) -> None:
        #: The XRC shared receive queues of the device, of all domains, by number.
        self._queues = queues
        #: Those of this domain for the compiled core; None without it.
        self.core: _core.XrcDomain | None = None
        if compiled is not None and table.core_regions is not None:
            self.core = compiled.XrcDomain(table.core_regions)

    def find(self, number: int) -> SoftXrcSRQ | None:
        """The queue with a number in this domain."""
        queue = self._queues.get(number)
        return queue if queue is not None and queue.domain is self else None

    def all(self) -> list[SoftXrcSRQ]:
        """The queues in this domain."""
        return [queue for queue in self._queues.values() if queue.domain is self]

    def add(self, queue: SoftXrcSRQ, random: Random) -> int:
        """Give a queue its number, which no other of the device has."""
        number = 0
        while not number or number in self._queues:
            number = random.getrandbits(_SRQN_BITS)
        self._queues[number] = queue
        if self.core is not None:
            queue.join(self.core, number)
        return number

    def remove(self, number: int) -> None:
        """The queue is closed."""
        if self._queues.pop(number, None) is not None and self.core is not None:
            self.core.remove(number)


class SoftXrcSRQ(SoftSRQ):
    """An XRC shared receive queue; implements :class:`rdmacm.verbs.backend.XrcSRQBackend`."""

    __slots__ = ("_cq", "domain", "srq_num")

    def __init__(
        self, mux: QPMultiplexer, table: MemoryTable, pd: object, attr: SrqAttr, domain: XrcDomain, cq: SoftCQ
    ) -> None:
        super().__init__(mux, table, pd, attr)
        #: Where its receives complete.
        self._cq = cq
        self.domain: XrcDomain = domain
        self.srq_num: int = domain.add(self, mux.random)

    def join(self, domain: _core.XrcDomain, number: int) -> None:
        """Be one of the domain in the compiled core, by a number."""
        assert compiled is not None
        assert self.core is not None
        queue = self._cq.queue
        domain.add(number, self.core, queue if isinstance(queue, compiled.CompletionQueue) else None)

    @property
    def pd(self) -> object:
        """The protection domain whose memory its requests may touch."""
        return self._pd

    def complete(self, found: list[WC]) -> None:
        """Add completions of its receives."""
        self._cq.add(found)

    def drop(self, qp_num: int) -> None:
        """Drop the completions of a queue pair that are not polled."""
        self._cq.drop(qp_num)

    def completes_on(self, cq: object) -> bool:
        """Whether its receives complete on a queue."""
        return self._cq is cq

    def destroy(self) -> None:
        with self._mux.runtime.lock:
            self.domain.remove(self.srq_num)
            super().destroy()


class SoftXrcSendQP(SoftQP):
    """The initiator of XRC connections; implements :class:`rdmacm.verbs.backend.QPBackend`."""

    __slots__ = ()

    def __init__(self, parts: DeviceParts, pd: object, cap: QPCap, sq_sig_all: bool, send_cq: SoftCQ) -> None:
        super().__init__(parts, pd, cap, sq_sig_all, send_cq, send_cq, None)

    def _make_engine(self) -> EngineFactory:
        return make_xrc_initiator

    def _work(self, wr: SendWR) -> SendWork:
        work = super()._work(wr)
        work.remote_srqn = wr.remote_srqn
        return work

    def post_recv(self, wrs: list[RecvWR]) -> None:
        raise refused(wrs[0], errno.EINVAL, "a queue pair of type XRC_SEND takes no receives", "post_recv")


class SoftXrcRecvQP(SoftQP):
    """The target of XRC connections; implements :class:`rdmacm.verbs.backend.XrcTargetBackend`."""

    __slots__ = ("_current", "_domain", "_is_released", "_opened", "_shared", "_target")

    def __init__(self, parts: DeviceParts, domain: XrcDomain, cap: QPCap) -> None:
        self._domain = domain
        #: Take its events for the handles of ibv_open_qp(3).
        self._opened: list[AsyncEvents] = []
        #: Whether the handle that it was made with is closed.
        self._is_released = False
        # Everything of it that completes does so on the completion queue of a shared receive queue.
        no_cq = cast("SoftCQ", None)
        super().__init__(parts, domain, cap, False, no_cq, no_cq, None)

    def _enter_reset(self) -> None:
        super()._enter_reset()
        #: Its engine, also once that was aborted.
        self._target: TargetEngine | None = None
        #: Of an engine in Python: the queue that the last request was for; and what the engine uses of it.
        self._current: SoftXrcSRQ | None = None
        self._shared: SharedQueue | None = None

    def _make_engine(self) -> EngineFactory:
        return self._make_target

    def _make_target(
        self, qp_num: int, memory: Memory, _shared: SharedReceives | None, counters: EngineCounters
    ) -> TargetEngine:
        self._target = make_xrc_target(qp_num, memory, counters, self._find_queue, self._domain.core)
        return self._target

    def _find_queue(self, number: int) -> SharedQueue | None:
        queue = self._domain.find(number)
        if queue is not self._current:
            if self._engine is not None and self._engine.completed:
                self._complete(self._engine.completed)
            self._current = queue
            self._shared = None if queue is None else (RemoteMemory(self._table, queue.pd), queue)
        return self._shared

    def _complete(self, _completed: list[WC]) -> None:
        if self._target is None:
            return
        for number, found in groupby(self._target.take_completed(), lambda item: item[0]):
            queue = self._domain.find(number)
            if queue is not None:
                queue.complete([wc for _, wc in found])

    def _drop_completions(self) -> None:
        for queue in self._domain.all():
            queue.drop(self.qp_num)

    def cq_failed(self, cq: object) -> None:
        queue = self._domain.find(self._target.srqn) if self._target is not None else None
        is_used = queue is not None and queue.completes_on(cq)
        if is_used and self.state not in (QPState.RESET, QPState.ERR):
            self._fail("a completion queue has overflowed")
            self._report(EventType.QP_FATAL)

    @property
    def _core_queues(self) -> tuple[_core.CompletionQueue | None, _core.CompletionQueue | None]:
        return None, None

    def core_reached_limit(self) -> None:
        for queue in self._domain.all():
            queue.see_limit()

    # -- handles --------------------------------------------------------------------------------------

    def open(self, domain: XrcDomain, events: AsyncEvents) -> bool:
        """Give it another handle; False if it is not in the domain."""
        if domain is not self._domain:
            return False
        self._opened.append(events)
        return True

    def close_opened(self, events: AsyncEvents) -> None:
        with self._mux.runtime.lock:
            self._opened.remove(events)
            self._destroy_unused()

    def destroy(self) -> None:
        """Close the handle that it was made with."""
        with self._mux.runtime.lock:
            self._is_released = True
            self.async_events: AsyncEvents | None = None
            self._destroy_unused()

    def _destroy_unused(self) -> None:
        if self._is_released and not self._opened:
            super().destroy()

    def _report(self, event: EventType) -> None:
        super()._report(event)
        for events in self._opened:
            events.post(event)

    # -- work requests --------------------------------------------------------------------------------

    def post_send(self, wrs: list[SendWR]) -> None:
        raise refused(wrs[0], errno.EINVAL, "a queue pair of type XRC_RECV takes no sends", "post_send")

    def post_recv(self, wrs: list[RecvWR]) -> None:
        raise refused(wrs[0], errno.EINVAL, "receives are posted to the shared receive queues", "post_recv")

    def ask_peer(self) -> None:
        """Ask nothing: only the initiator sends requests."""
