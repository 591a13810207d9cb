"""An open device of the kernel as its objects use it: the library, the context, its events and its parts.

Objects of the device register here by the address that the library gave them, so that an event finds its object. The
parts that no call of the seam makes or releases, the protection domains and address handles, are made here at the first
use and released with the last object that refers to them.

The kernel may refuse to release a part, as a queue that another thread's call uses at the moment (EBUSY). Where the
program can try again, as with a memory region, it gets the error. Else the part is released later
(:meth:`OpenedDevice.discard`), or with the context at the latest.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from collections.abc import Callable
from ctypes import byref
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

from rdmacm.errors import RdmaError, cm_error, errno_name
from rdmacm.interrupts.protection import deferred_finalizers, finalize
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.kernel.verbs import removals
from rdmacm.kernel.verbs.attributes import fill_ah_attr
from rdmacm.kernel.verbs.layouts import ibv_ah_attr, ibv_async_event, ibv_context, ibv_device
from rdmacm.kernel.verbs.library import Library, Operations, code_of, last_error
from rdmacm.kernel.verbs.refusals import made
from rdmacm.kernel.verbs.watch import Watch
from rdmacm.progress.runtime import Runtime
from rdmacm.provider import log
from rdmacm.verbs.enums import EventType, TransportType
from rdmacm.verbs.wr import AddressHandle

#: Events of a port, and of the device.
_PORT_EVENTS = frozenset(
    {
        EventType.PORT_ACTIVE,
        EventType.PORT_ERR,
        EventType.LID_CHANGE,
        EventType.PKEY_CHANGE,
        EventType.SM_CHANGE,
        EventType.CLIENT_REREGISTER,
        EventType.GID_CHANGE,
        EventType.DEVICE_SPEED_CHANGE,
    }
)
#: Seconds until the release of a part that was refused again is tried once more.
_RETRIES = (0.01, 0.1, 1.0)


class Element(Protocol):
    """A queue pair, completion queue or shared receive queue, as its events find it."""

    def happened(self, event: EventType) -> None:
        """It has this event. The lock is held."""

    def lost(self) -> None:
        """The device has been removed: use it no more. The lock is held."""

    def abandon(self) -> None:
        """In a child of fork(2): belong to the parent from now on."""


class Rank(IntEnum):
    """The order in which parts of a device are released."""

    QP = 0
    MW = 1
    SRQ = 2
    CQ = 3
    MR = 4
    AH = 5
    CHANNEL = 6
    DOMAIN = 7


class Part(NamedTuple):
    """An object of the library that is to be released."""

    rank: Rank
    release: Callable[[int], int]
    address: int


def _release(parts: list[Part]) -> list[tuple[Part, int]]:
    """Release parts in their order, and return those that are refused, each with its errno."""
    parts.sort(key=lambda part: part.rank)
    return [(part, code_of(code)) for part in parts if (code := part.release(part.address))]


class Handle:
    """A domain or an address handle of the library, released with the last object that refers to it."""

    __slots__ = ("_needs", "_opened", "address")

    def __init__(self, opened: OpenedDevice, rank: Rank, release: Callable[[int], int], address: int, *needs: object):
        self._opened = opened
        #: The address that the library gave it.
        self.address: int = address
        self._needs = needs
        opened.hold(self, rank, release, address)

    def __del__(self) -> None:
        # No lock is needed, so any thread may do this at any time.
        self._opened.discard(self)


class _Call:
    """A call of the library in progress."""

    __slots__ = ("_opened", "_step")

    def __init__(self, opened: OpenedDevice, step: str) -> None:
        self._opened = opened
        self._step = step

    def __enter__(self) -> None:
        opened = self._opened
        opened.calls.append(None)
        if opened.abandoned or opened.removed:
            self.__exit__()
            opened.check(self._step)

    def __exit__(self, *error: object) -> None:
        opened = self._opened
        opened.calls.pop()
        if opened.removed:
            opened.settle()


class OpenedDevice:
    """A context of libibverbs. See the module.

    ``dev_name``: the name of its node in ``/dev/infiniband``.
    """

    async_fd: Any

    def __init__(self, name: str, dev_name: str, library: Library, context: int, runtime: Runtime) -> None:
        self.name = name
        self.library = library
        #: The address of its ``ibv_context``.
        self.context = context
        self.runtime = runtime
        #: Whether this is a child of fork(2), and the device is the parent's.
        self.abandoned: bool = False
        #: Whether the kernel has taken the device away.
        self.removed: bool = False
        #: Whether the last reference is gone, and the context is to be closed with its last part.
        self._is_forgotten = False
        #: What was made from the context and is not released yet, by the identity of our object.
        self._parts: dict[int, Part] = {}
        #: The same of objects that are gone, because the kernel has refused to release it.
        self._refused: list[Part] = []
        #: Whether it is going to be tried again.
        self._is_trying = False
        #: One item for each call that uses the context or a part, while it is in progress.
        self.calls: list[None] = []
        #: One item while the context is open. The thread that pops it closes the context.
        self._open_token: list[None] = [None]
        #: Elements that a request may have.
        self.max_sge = 0
        #: Whether it checks the IP checksums of what it receives.
        self.checks_sums = True
        driver = Sysfs().driver(name)
        #: The greatest retry_cnt of its queue pairs: rdma_rxe takes 7 for "for ever".
        self.most_retries = 6 if driver == "rdma_rxe" else 7
        #: Whether a refused release may be tried again. siw's library unmaps the queues before it asks the kernel, so
        #: a second call would unmap what the process has mapped there meanwhile.
        self._releases_again = driver != "siw"
        self.operations: Operations = Operations(context)
        #: Queue pairs, completion queues and shared receive queues by address.
        self.elements: dict[int, Element] = {}
        #: Queue pairs by number.
        self.queue_pairs: dict[int, Any] = {}
        #: Descriptors of completion channels.
        self.channel_fds: set[int] = set()
        #: The queues of asynchronous events of the API's contexts.
        self.sinks: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The P_Key tables that were read since the last event of a port, by port. Each event begins a new dict.
        self.pkeys: dict[int, tuple[int, ...]] = {}
        #: Protection domains and address handles by the API's objects.
        self._pds: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
        self._ahs: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
        #: Reused for each event.
        self._event = ibv_async_event()
        found = ibv_context.from_address(context)
        #: Whether its transport is iWARP.
        self.is_iwarp: Any = ibv_device.from_address(found.device).transport_type == TransportType.IWARP
        self._cmd_fd, self.async_fd = found.cmd_fd, found.async_fd
        os.set_blocking(self.async_fd, False)
        with runtime.lock:
            self.watch.add(self.async_fd, weakref.WeakMethod(self.read_events))
            removals.follow(self.watch, id(self), dev_name, weakref.WeakMethod(self.lose))
        _opened.add(self)

    @property
    def watch(self) -> Watch:
        """The descriptors of the runtime."""
        driver = self.runtime.driver
        assert isinstance(driver, Watch)
        return driver

    def check(self, step: str) -> None:
        """Raise EBADF in a child of fork(2), ENODEV once the device has been removed."""
        if self.abandoned:
            raise cm_error(errno.EBADF, "the device was opened before fork(2)", step, self.name, "open it in the child")
        if self.removed:
            raise self.gone(step)

    def gone(self, step: str) -> RdmaError:
        """ENODEV, for a device that has been removed."""
        return cm_error(errno.ENODEV, "the device has been removed", step, self.name)

    def call(self, step: str) -> _Call:
        """For ``with``: a call that uses the context or its parts, which are not released meanwhile; :meth:`check`."""
        return _Call(self, step)

    # -- parts ----------------------------------------------------------------------------------------

    def pd(self, pd: object) -> Handle:
        """The library's protection domain for an object that stands for one."""
        found = self._pds.get(pd)
        if found is None:
            with self.call("alloc_pd"):
                address = made(self.library.ibv_alloc_pd(self.context), "alloc_pd", self.name)
                found = self._pds[pd] = Handle(self, Rank.DOMAIN, self.library.ibv_dealloc_pd, address)
        return found

    def ah(self, pd: Handle, ah: AddressHandle) -> Handle:
        """The library's address handle for one of the API's."""
        found = self._ahs.get(ah)
        if found is None:
            attr = ibv_ah_attr()
            fill_ah_attr(attr, ah.attr)
            with self.call("create_ah"):
                address = made(self.library.ibv_create_ah(pd.address, byref(attr)), "create_ah", self.name)
                found = self._ahs[ah] = Handle(self, Rank.AH, self.library.ibv_destroy_ah, address, pd)
        return found

    # -- asynchronous events --------------------------------------------------------------------------

    def read_events(self) -> None:
        """Read the asynchronous events that are there, and report each to its object. The lock is held."""
        library, event = self.library, self._event
        while not self.abandoned and not self.removed:
            if library.ibv_get_async_event(self.context, byref(event)):
                if last_error() not in (errno.EAGAIN, errno.EINTR):
                    self.lose()
                return
            number = event.event_type
            # A union: the pointer is of the object that the event is of, whatever its type.
            port, pointer = event.element.port_num, event.element.cq
            # Acknowledged at once: what waits for this is the library's destroy, which would wait under the lock.
            library.ibv_ack_async_event(byref(event))
            try:
                kind = EventType(number)
            except ValueError:  # of a newer kernel
                log.DEVICE.debug("%s: unknown asynchronous event %d", self.name, number)
                continue
            if log.enabled:
                log.DEVICE.debug("%s: %s", self.name, kind.name)
            if kind is EventType.DEVICE_FATAL:
                self.lose()
            elif kind in _PORT_EVENTS:
                self.pkeys = {}
                self.report(port, kind)
            else:
                element = self.elements.get(pointer or 0)
                if element is not None:
                    element.happened(kind)

    def report(self, port_num: int, event: EventType) -> None:
        """Add an event of a port, 0 for the device, to the queue of each context. The lock is held."""
        for sink in list(self.sinks):
            sink.post(port_num, event)

    # -- the end --------------------------------------------------------------------------------------

    def lose(self) -> None:
        """The device has been removed, or is about to be, or has failed for good. The lock is held.

        Everything that was made from it is released at once: the kernel waits for that before it removes a device whose
        driver cannot take it away from a process, as rdma_rxe's.
        """
        if self.removed or self.abandoned:
            return
        self.removed = True
        for fd in (self.async_fd, *self.channel_fds):
            self.watch.remove(fd)  # they stay readable, and there is nothing to read
        self.report(0, EventType.DEVICE_FATAL)
        for element in list(self.elements.values()):
            element.lost()
        self.settle()
        self.runtime.waiters.wake()

    def hold(self, part: object, rank: Rank, release: Callable[[int], int], address: int) -> None:
        """Something was made from the context, which stays open until :meth:`release`."""
        self._parts[id(part)] = Part(rank, release, address)

    def release(self, part: object) -> int:
        """Release what was made for ``part``, unless it is released already; returns 0 or an errno.

        Where that is refused, it stays as it was. In a child of fork(2) it is the parent's.
        """
        return self._end(part, is_gone=False)

    def discard(self, part: object) -> None:
        """:meth:`release` for an object that nobody closes again. Where it is refused, it is tried again later."""
        self._end(part, is_gone=True)

    def _end(self, part: object, is_gone: bool) -> int:
        if self.abandoned:
            return 0
        self.calls.append(None)
        try:
            found = self._parts.pop(id(part), None)
            code = found.release(found.address) if found is not None else 0
            if code and not self.removed and found is not None:
                code = code_of(code)
                if not is_gone:
                    self._parts[id(part)] = found
                    return code
                self._try_later(found, code)
        finally:
            self.calls.pop()
        if self._is_forgotten:
            self.settle()
        elif self.removed:
            deferred_finalizers.append(self.settle)  # the caller may hold a lock
        return 0

    def _try_later(self, part: Part, code: int) -> None:
        """Keep a part whose release was refused."""
        self._refused.append(part)
        if not self._releases_again:
            self._warn_of([(part, code)])
        elif not self._is_trying:
            self._is_trying = True
            deferred_finalizers.append(partial(self._release_refused, _RETRIES))  # the caller may hold a lock

    def _release_refused(self, waits: tuple[float, ...]) -> None:
        """Try to release what was refused, and once more after each of ``waits``, in seconds."""
        with self.runtime.lock:
            if self.abandoned:
                return
            parts: list[Part] = []
            while self._refused:
                parts.append(self._refused.pop())
            refused = _release(parts)
            self._refused += [part for part, _ in refused]
            if refused and waits:
                self.runtime.call_at(self.runtime.clock() + waits[0], lambda _: self._release_refused(waits[1:]))
            else:
                self._is_trying = False
                self._warn_of(refused)

    def _warn_of(self, refused: list[tuple[Part, int]]) -> None:
        for part, code in refused:
            text = "%s: the kernel does not destroy a %s, which stays until the device is closed: %s"
            logging.getLogger("rdmacm").warning(text, self.name, part.rank.name, errno_name(code))

    def settle(self) -> None:
        """Close the context of a device that is removed or forgotten; if it is removed, release its parts first."""
        with self.runtime.lock:
            if self.calls or self.abandoned:
                return
            parts: list[Part] = []
            if self.removed:
                for key in list(self._parts):
                    part = self._parts.pop(key, None)
                    if part is not None:
                        parts.append(part)
            elif self._parts or not self._is_forgotten:
                return
            if self._releases_again:
                parts += self._refused
            self._refused.clear()
            _release(parts)
            try:
                self._open_token.pop()
            except IndexError:
                return
            self.channel_fds.clear()
            self.watch.remove(self.async_fd)
            removals.forget(self.watch, id(self))
            self.library.ibv_close_device(self.context)

    def abandon(self) -> None:
        """In a child of fork(2): close the child's copies of the descriptors; the objects are the parent's."""
        self.abandoned = True
        if self._open_token:
            for fd in (self._cmd_fd, self.async_fd, *self.channel_fds):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.channel_fds.clear()
        for element in list(self.elements.values()):
            element.abandon()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        # In a cycle of garbage the collector may finalize this object before its parts.
        self._is_forgotten = True
        finalize(self, self.settle)


#: Every open device of this process.
_opened: weakref.WeakSet[OpenedDevice] = weakref.WeakSet()


def _warn_of_fork() -> None:
    """Before fork(2): where the kernel does not copy registered memory, the parent may lose what the device writes."""
    if any(opened._parts and opened.library.fork_status() == 0 for opened in list(_opened)):
        logging.getLogger("rdmacm").warning(
            "fork(2) with registered memory, which Linux before 5.12 may move: call ibv_fork_init() first"
        )


def _forget_parent() -> None:
    removals.abandon()
    for opened in list(_opened):
        opened.abandon()
    _opened.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_warn_of_fork, after_in_child=_forget_parent)
