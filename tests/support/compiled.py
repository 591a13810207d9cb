"""What the tests of the compiled core have in common."""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar, cast

from rdmacm.proto.core_choice import compiled
from rdmacm.proto.work import RecvWork
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.soft.device.shared_receive_queue import PythonReceives
from rdmacm.soft.wire.udp import UdpWire

__all__ = ["CoreEnd", "Mischief", "Receiver", "Transcript", "assert_collected", "compare", "is_held"]


class Transcript(Protocol):
    """Engines that a random source drives, and what was seen of them."""

    observed: list[object]

    def step(self, number: int) -> None: ...

    def finish(self) -> list[object]: ...


T = TypeVar("T", bound=Transcript)


def compare(make: Callable[[bool], T], steps: int) -> T:
    """Drive engines with the core and engines without it by the same steps; everything is the same after each.

    Returns those with the core.
    """
    core, python = make(True), make(False)
    for number in range(steps):
        core.step(number)
        python.step(number)
        for mine, theirs in zip(core.observed, python.observed, strict=True):
            assert mine == theirs, f"step {number}"
        core.observed.clear()
        python.observed.clear()
    assert core.finish() == python.finish()
    return core


class Receiver(Protocol):
    """An engine that takes receives."""

    @property
    def qp_num(self) -> int: ...

    def post_recv(self, work: RecvWork, /) -> None: ...


class Mischief:
    """What transcripts have in common: a source of faults, and shared receive queues."""

    random: Random
    #: 0: no fault; 1: the most.
    mischief: float
    #: What was seen since the last comparison.
    observed: list[object]
    #: The shared receive queues of the engines 1, 2, ...; None: it has receives of its own.
    queues: Sequence[PythonReceives | None]

    def shared(self, *, with_core: bool) -> PythonReceives:
        if not with_core:
            return PythonReceives(48)
        assert compiled is not None
        return cast("PythonReceives", compiled.SharedReceives(48, 32, compiled.Regions(), self, None))

    def receive(self, end: Receiver, work: RecvWork) -> None:
        queue = self.queues[end.qp_num - 1]
        if queue is None:
            end.post_recv(work)
        else:
            self.observed.append(queue.post_work(work))

    def see_shared(self) -> None:
        """Observe the shared receive queues, and set the limit of one at times."""
        for queue in self.queues:
            if queue is not None:
                if self.random.random() < 0.1:
                    queue.limit = self.random.choice((0, 2, 20, 48))
                self.observed.append((len(queue), queue.limit, queue.take_limit_reached()))

    def often(self, chance: float) -> bool:
        """Whether a fault comes."""
        return self.random.random() < chance * self.mischief


def is_held(buffer: bytearray) -> bool:
    """Whether the buffer has exports."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    del buffer[-1]
    return False


class _Cycle:
    def __init__(self, post: Callable[[memoryview, memoryview], object], views: list[memoryview]) -> None:
        self.itself = self
        self.views = views
        self.ends = post(*views)


def assert_collected(post: Callable[[memoryview, memoryview], object]) -> None:
    """``post`` makes engines with a send and a receive of these buffers; a cycle with them is collected.

    CPython crashes if its collector clears a memoryview that is in use.
    """
    buffers = [bytearray(64) for _ in range(2)]
    cycle = _Cycle(post, [memoryview(buffer) for buffer in buffers])  # older objects are cleared first
    gone = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert gone() is None
    assert not any(map(is_held, buffers))


class CoreEnd(ABC):
    """A queue pair of the software device that the core may have."""

    @property
    @abstractmethod
    def backend(self) -> SoftQP | SoftUdQP: ...

    @property
    def wire(self) -> UdpWire:
        wire = self.backend._mux.wire
        assert isinstance(wire, UdpWire)
        return wire

    @property
    def taken(self) -> int:
        """Datagrams that the core has processed."""
        assert self.wire.core_wire is not None
        return self.wire.core_wire.taken
