"""A queue of the kernel's provider tells its reader of each event, also of one that another call has fetched.

The kernel's file is replaced by a list of its events.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Sized

import pytest

from rdmacm.constants import CmEventType
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command
from rdmacm.kernel.event_queue import KernelQueue
from rdmacm.progress.runtime import Runtime
from rdmacm.provider import QueuedEvent
from support.clock import REAL, eventually

#: Seconds that a thread may take which has been woken.
PATIENCE = 20
REQUEST, REJECTED = CmEventType.CONNECT_REQUEST, CmEventType.REJECTED


class File:
    """The kernel's side of an open file."""

    def __init__(self) -> None:
        self.fd = 1000
        self.events: list[CmEventType] = []

    def ask(self, command: Command, payload: Callable[[int], bytes], size: int) -> bytes:
        assert command is Command.GET_EVENT
        if not self.events:
            raise BlockingIOError(errno.EAGAIN, "no event")
        return struct.pack("=QIIi304sI2I", 7, 7, self.events.pop(0), 0, bytes(304), 0, 0, 0)

    def close(self) -> None:
        self.fd = -1


class Driver:
    """Its one descriptor is not readable: somebody else has fetched the events."""

    def __init__(self) -> None:
        self.runtime = Runtime(REAL)
        self.runtime.only_reads = True
        self.runtime.attach(self)

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...

    def filenos(self) -> tuple[int, ...]:
        return ()

    def progress(self, now: float, result_queue: Sized) -> None: ...

    def poll(self, now: float, result_queue: Sized) -> bool:
        return False

    def opened(self) -> None: ...

    def released(self) -> None: ...

    def deadlines_changed(self) -> None: ...


class Id:
    def _reported(self, _: int, /) -> None: ...


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> KernelQueue:
    monkeypatch.setattr("rdmacm.kernel.event_queue.Ucma", File)
    driver, owner = Driver(), Id()

    def translate(_: KernelQueue, raw: abi.Event) -> QueuedEvent:
        return QueuedEvent(owner, CmEventType(raw.type), raw.status)

    made = KernelQueue(driver.runtime, driver, translate, lambda: ())  # type: ignore[arg-type]
    driver.runtime.use(made)
    return made


def kernel_has(queue: KernelQueue, *kinds: CmEventType) -> None:
    assert isinstance(queue.ucma, File)
    queue.ucma.events += kinds


def test_the_reader_is_told_of_events_that_a_disconnection_fetches(queue: KernelQueue) -> None:
    told: list[None] = []
    queue.notify = lambda: told.append(None)
    kernel_has(queue, REJECTED, REQUEST)
    queue.drain()
    assert len(told) == 2
    found = [queue.get(0), queue.get(0)]
    assert [event.type for event in found if event is not None] == [REJECTED, REQUEST]
    queue.close()


def test_a_thread_that_waits_gets_the_event_that_a_disconnection_fetches(queue: KernelQueue) -> None:
    found: list[QueuedEvent | None] = []
    thread = threading.Thread(target=lambda: found.append(queue.get(None)), daemon=True)
    thread.start()
    eventually(lambda: queue._runtime.waiters.polling, "the thread waits")
    with queue._runtime.lock:
        kernel_has(queue, REQUEST)
        queue.drain()
    thread.join(PATIENCE)
    assert [event.type for event in found if event is not None] == [REQUEST]
    queue.close()
