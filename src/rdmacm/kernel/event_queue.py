"""Event queues: an open file of the kernel's connection manager, and the events that this process adds to it.

The descriptor is the one of the character device. An event that the application writes (rdma_write_cm_event(3)), and
the outcome of a name resolution, go through the kernel as well where it takes them. Elsewhere they wait in this
process, and the descriptor becomes readable by an event of an id that exists for this alone.

A queue whose :attr:`~KernelQueue.notify` is set is read by the provider, as events come. Its descriptor is then one
that polls readable whenever there is progress to be made.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from socket import AF_INET
from threading import get_ident
from typing import Protocol

from rdmacm.address import InetAddr
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import cm_error
from rdmacm.interrupts.protection import run_finalizers
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command, Response
from rdmacm.kernel.descriptors import Descriptors
from rdmacm.kernel.ucma import Ucma
from rdmacm.progress.runtime import Runtime
from rdmacm.provider import QueuedEvent
from rdmacm.provider.multicast import GroupJoin
from rdmacm.verbs.enums import QPType

#: The cookie of the ids that only make the descriptor readable.
BELL = 1


class QueueMember(Protocol):
    """An id whose events come to a queue."""

    def destroy(self) -> None: ...


class KernelQueue:
    """See :class:`rdmacm.provider.EventQueue`.

    ``translate`` makes the event for the API of one that the kernel has reported; None where there is none.
    ``own_addresses`` are the IPv4 addresses of this host.
    """

    #: False once the kernel has refused to add an event that a process writes.
    _writes_events: bool | None = None

    def __init__(
        self,
        runtime: Runtime,
        descriptors: Descriptors,
        translate: Callable[[KernelQueue, abi.Event], QueuedEvent | None],
        own_addresses: Callable[[], Iterable[InetAddr]],
    ) -> None:
        self._runtime = runtime
        self._descriptors = descriptors
        self._translate = translate
        self._own_addresses = own_addresses
        #: The open file.
        self.ucma: Ucma = Ucma()
        #: Events that are not in the kernel (any more), oldest first; all of them are older than the kernel's.
        self._events: deque[QueuedEvent] = deque()
        #: Called after events are added. The API sets it.
        self.notify: Callable[[], None] | None = None
        #: The ids whose events come here.
        self.ids: dict[QueueMember, None] = {}
        #: For a queue that the provider reads: the descriptor for its reader.
        self._pollable = runtime.pollable()
        #: Whether the file's descriptor was given out.
        self._is_polled = False
        #: The id that makes the descriptor readable, while its event is in the kernel; None for none.
        self._bell: int | None = None
        descriptors.watch(self.ucma.fd, self._readable)

    # -- reading ----------------------------------------------------------------------------------------

    def get(self, timeout: float | None) -> QueuedEvent | None:
        return self._runtime.drive(self._pop, timeout)

    def _pop(self) -> QueuedEvent | None:
        if self._runtime.abandoned or self.ucma.fd < 0:
            why = "the channel is closed" if self.ucma.fd < 0 else "the channel was made before fork(2)"
            raise cm_error(errno.EBADF, why, "get_cm_event")
        event = self._events.popleft() if self._events else self._fetch()
        if event is not None:
            thread = get_ident()
            event.owner._reported(thread)  # under the lock: who destroys the id waits for this event or discards it
            if event.join is not None:
                event.join._reported(thread)
            self._pollable.signal(bool(self._events))
        return event

    def _fetch(self) -> QueuedEvent | None:
        """The kernel's oldest event that is one for the API; None when the kernel has no more."""
        while True:
            try:
                data = self.ucma.ask(Command.GET_EVENT, abi.get_event, Response.EVENT)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EINTR):
                    return None
                raise cm_error(error.errno or errno.EIO, error.strerror or "", "get_cm_event") from None
            raw = abi.unpack_event(data)
            if raw.uid == BELL:
                self._silence(raw.id)
                continue
            event = self._translate(self, raw)
            if event is not None:
                return event

    def drain(self) -> None:
        """Fetch the events that the kernel has, so that what they report is known. They stay in the queue.

        The descriptor is not readable any more because of them: the reader of the queue, and the threads that wait, are
        told as of any event.
        """
        if self._fetch_all():
            self._ring()
            self._runtime.waiters.wake()

    @property
    def ready(self) -> bool:
        """Whether there is an event to fetch."""
        with self._runtime.lock:
            if not self._events and self.ucma.fd >= 0:
                self.drain()
            return bool(self._events)

    def _readable(self) -> None:
        """The provider has seen that the kernel has events; those of a queue that has a callback are fetched now."""
        if self.notify is not None:
            self._fetch_all()

    def _fetch_all(self) -> bool:
        """Fetch and add the events that the kernel has; whether there were any."""
        found = False
        while (event := self._fetch()) is not None:
            self._add(event)
            found = True
        return found

    def _add(self, event: QueuedEvent) -> None:
        self._events.append(event)
        self._pollable.signal(True)
        if self.notify is not None:
            self.notify()

    # -- the events of this process -------------------------------------------------------------------

    def post(self, event: QueuedEvent) -> None:
        with self._runtime.lock:
            if self.ucma.fd < 0:
                return
            self._fetch_all()  # they are older
            self._add(event)
            self._ring()
            self._runtime.waiters.wake()

    def take(self, owner: object) -> list[QueuedEvent]:
        with self._runtime.lock:
            if not self._events:
                return []
            taken = [event for event in self._events if event.owner is owner]
            if taken:
                self._events = deque(event for event in self._events if event.owner is not owner)
            return taken

    def receive_moved(self, events: list[QueuedEvent]) -> None:
        """An id has moved here: add these events of it, then those that the kernel has moved.

        The kernel wakes nobody for these, neither a poll(2) that waits nor epoll(7). So they are fetched now, and
        reported as the events of this process are.
        """
        with self._runtime.lock:
            for event in events:
                self._add(event)
            self._fetch_all()
            self._ring()
            self._runtime.waiters.wake()

    def drop_join(self, join: GroupJoin) -> None:
        """Remove the events of a join of a multicast group."""
        self._events = deque(event for event in self._events if event.join is not join)

    # -- the descriptor -------------------------------------------------------------------------------

    def fileno(self) -> int:
        with self._runtime.lock:
            if self.ucma.fd < 0:
                return -1
            if self.notify is None:
                self._is_polled = True
                self._ring()
                return self.ucma.fd
            return self._pollable.fileno(bool(self._events))

    def _ring(self) -> None:
        """Make the descriptor readable while events wait in this process, if someone may poll it.

        A new kernel adds an event to an id. With any other, an id that is resolved to an address of this host has an
        event at once, whatever the outcome.
        """
        if not self._events or not self._is_polled or self._bell is not None or self.notify is not None:
            return
        ucma = self.ucma
        try:
            number = abi.unpack_number(
                ucma.ask(
                    Command.CREATE_ID,
                    lambda address: abi.create_id(address, BELL, PortSpace.TCP, QPType.RC),
                    Response.CREATE_ID,
                )
            )
        except OSError:
            return
        self._bell = number
        if self._write_event(number):
            return
        for address in (InetAddr.loopback(AF_INET), *self._own_addresses()):
            try:
                ucma.tell(Command.RESOLVE_ADDR, abi.resolve_addr(number, None, address, 0))
                return
            except OSError:
                continue
        self._silence(number)

    def _write_event(self, number: int) -> bool:
        """Have the kernel add an event of an id, which kernels before 6.17 cannot do."""
        if KernelQueue._writes_events is False:
            return False
        try:
            self.ucma.tell(Command.WRITE_CM_EVENT, abi.write_cm_event(number, CmEventType.USER, 0, 0))
        except OSError:
            KernelQueue._writes_events = False
            return False
        return True

    def _silence(self, number: int) -> None:
        """Destroy the id of :meth:`_ring`, with the events that it still has."""
        if number == self._bell:
            self._bell = None
            self.ucma.ask(Command.DESTROY_ID, lambda address: abi.destroy_id(address, number), Response.COUNT)

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._runtime.lock:
            if self.ucma.fd < 0:
                return
            for each in list(self.ids):
                each.destroy()
            self._descriptors.unwatch(self.ucma.fd)
            self.ucma.close()
            self._events.clear()
            self._pollable.close()
            self._runtime.waiters.wake()
        self._runtime.release(self)
        run_finalizers()  # with the last channel the devices of its ids are closed

    def abandon(self) -> None:
        """In a child of fork(2): close the child's copy of the descriptor. The parent's ids live on."""
        self.ucma.close()
