"""Event channels and events: rdma_create_event_channel(3), rdma_get_cm_event(3), rdma_ack_cm_event(3).

A channel has a descriptor, and a reader that waits elsewhere (select(2), an event loop) polls it. The soft device
makes its progress in whoever waits, so *readable* means "there is an event, or progress to be made": call
:meth:`EventChannel.get_event` with ``timeout=0`` and be prepared for :class:`CmWouldBlockError`.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rdmacm.constants import CmEventType
from rdmacm.errors import CmRejectedError, CmTimeoutError, CmWouldBlockError, GaiError, RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.provider import EventQueue, Provider, QueuedEvent, get_provider

if TYPE_CHECKING:
    from rdmacm.cmid import CmId

__all__ = ["CmEvent", "EventChannel", "event_str"]

#: Signalled at every acknowledgement while somebody waits for one. One for all ids: waiting for acknowledgements
#: is rare, and a lock for each of ten thousand ids is not.
_ACKNOWLEDGING = threading.RLock()
ACKED = threading.Condition(_ACKNOWLEDGING)


class _Acknowledged:
    """How many threads wait for ``ACKED``, which guards it: to notify takes a while even where nobody does."""

    waiting = 0


_acknowledged = _Acknowledged()

#: Invalid service id, as a REJ says it and as a SIDR_REP does (InfiniBand Architecture 12.6.7.2, 12.11.2.1).
_NO_LISTENER = {(CmEventType.REJECTED, 8), (CmEventType.UNREACHABLE, 1)}

#: Threads of one channel that may wait for name servers at a time.
_LOOKUP_THREADS = 8


class CmEvent:
    """One event: ``struct rdma_cm_event``. It must be acknowledged, by :meth:`ack` or by leaving ``with``.

    ``id``: the id it is about; ``type``: a :class:`CmEventType`; ``status``: 0, a negative errno, a positive code
    of the transport, or for ``ADDRINFO_ERROR`` an EAI code; ``arg``: the number given to ``write_cm_event``;
    ``message``: the cause in words, where there is one; ``param``: a ConnParam or UdParam for connection events, and
    ``private_data`` the bytes in it. CONNECT_REQUEST has the new id in ``id`` and the listener in ``listen_id``, whose
    event it is. Destroying an id waits until its events are acknowledged; an
    event that is garbage collected acknowledges itself.
    """

    __slots__ = (
        "_error",
        "_explain",
        "_owner",
        "_pending",
        "_thread",
        "arg",
        "id",
        "listen_id",
        "message",
        "param",
        "status",
        "type",
    )

    def __init__(self, queued: QueuedEvent) -> None:
        self._pending = False
        self._owner: CmId = queued.owner
        self.id = self._owner
        self.listen_id: CmId | None = None
        if queued.new_id is not None:
            self.listen_id = self._owner
            self.id = self._owner.take_request(queued.new_id, queued.param)
        self.param = queued.param
        self.type = queued.type
        self.status = queued.status
        self.arg = queued.arg
        self.message = queued.message
        self._explain = queued.explain
        self._error: RdmaError | None = None
        self._thread = threading.get_ident()
        self._pending = True

    @property
    def private_data(self) -> bytes:
        """What the peer's application sent along: the message's whole field, padded with zeros; empty without."""
        return b"" if self.param is None else self.param.private_data

    @property
    def explanation(self) -> Explanation | None:
        """The whole resolution as data, for a failed one."""
        return self._explain() if self._explain is not None else None

    @property
    def error(self) -> RdmaError | None:
        """The exception a synchronous call would have raised; None where ``status`` is 0."""
        if self.status == 0:
            return None
        if self._error is not None:
            return self._error
        if self.type is CmEventType.REJECTED or (self.type is CmEventType.UNREACHABLE and self.status > 0):
            nobody = (self.type, self.status) in _NO_LISTENER
            hint = "whether a listener runs there, and on that port" if nobody else None
            address = str(self.id.peer_addr_text)
            return CmRejectedError(self.message, address, hint, reason=self.status, private_data=self.private_data)
        explanation = self.explanation
        return cm_error(
            abs(self.status),
            self.message or str(self.type),
            _STEPS.get(self.type, str(self.type)),
            str(self.id.peer_addr_text),
            explanation.hint if explanation else None,
            explanation,
        )

    def ack(self) -> None:
        """Give the event back, rdma_ack_cm_event(3). More than once does nothing."""
        with _ACKNOWLEDGING:  # itself: a Condition's with statement takes three times as long
            if not self._pending:
                return
            self._pending = False
            self._owner.acknowledged(self._thread)
            if _acknowledged.waiting:
                ACKED.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ack()

    def __del__(self) -> None:
        if self._pending and not sys.is_finalizing():
            self.ack()

    def __repr__(self) -> str:
        status = f" status={self.status}" if self.status else ""
        return f"<CmEvent {event_str(self.type)}{status} {self.message}".rstrip() + ">"


_STEPS = {
    CmEventType.ADDR_ERROR: "resolve_addr",
    CmEventType.ROUTE_ERROR: "resolve_route",
    CmEventType.ADDRINFO_ERROR: "resolve_addrinfo",
    CmEventType.CONNECT_ERROR: "connect",
    CmEventType.UNREACHABLE: "connect",
    CmEventType.REJECTED: "connect",
}


def event_str(event: int) -> str:
    """``RDMA_CM_EVENT_ADDR_RESOLVED`` for 0, rdma_event_str(3); ``UNKNOWN EVENT`` for a number that is none."""
    try:
        return f"RDMA_CM_EVENT_{CmEventType(event).name}"
    except ValueError:
        return "UNKNOWN EVENT"


class EventChannel:
    """Where the events of ids arrive. Close it after its ids are destroyed.

    ``provider``: a name or object, see :func:`rdmacm.provider.get_provider`. A channel belongs to the network
    namespace of the thread that makes it. Any number of threads may read; each event goes to one of them.

    >>> with EventChannel() as channel:
    ...     channel.get_event(timeout=0)
    Traceback (most recent call last):
    rdmacm.errors.CmWouldBlockError: get_cm_event: no event is waiting [EAGAIN]
    """

    def __init__(self, provider: str | Provider | None = None) -> None:
        self._closed = True
        self.provider = get_provider(provider)
        self.queue: EventQueue = self.provider.open_queue()
        self.lookups = _Lookups()
        self.blocking = True
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def fileno(self) -> int:
        """A pollable descriptor (see the module for what readable means); -1 once closed."""
        return self.queue.fileno()

    def get_event(self, timeout: float | None = None) -> CmEvent:
        """The next event, waiting for one, rdma_get_cm_event(3).

        ``timeout`` is in seconds: None waits for ever, 0 not at all. CmTimeoutError when it runs out;
        CmWouldBlockError for 0, or where ``channel.blocking`` is False; EBADF once the channel is closed.
        """
        if timeout is None and not self.blocking:
            timeout = 0
        queued = self.queue.get(timeout)
        if queued is None:
            if not timeout:
                raise CmWouldBlockError(errno.EAGAIN, "no event is waiting", "get_cm_event")
            raise CmTimeoutError(errno.ETIMEDOUT, f"no event came within {timeout} s", "get_cm_event")
        event = CmEvent(queued)
        if queued.type is CmEventType.ADDRINFO_ERROR:
            event._error = event.id.addrinfo_failed()
        return event

    def __iter__(self) -> Iterator[CmEvent]:
        """Events as they come, until the channel is closed; acknowledge each."""
        while True:
            try:
                event = self.get_event()
            except CmWouldBlockError:
                return
            except RdmaError as error:
                if error.errno == errno.EBADF and self._closed:
                    return
                raise
            yield event

    def close(self) -> None:
        """Release the descriptor, rdma_destroy_event_channel(3). A thread that waits for an event gets EBADF."""
        if not self._closed:
            self._closed = True
            self.lookups.close()
            self.queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"unclosed event channel {self!r}", ResourceWarning, stacklevel=2, source=self)
            if sys.is_finalizing():  # a thread that is gone may hold a lock
                return
            with contextlib.suppress(Exception):
                self.close()

    def __repr__(self) -> str:
        return f"<EventChannel {self.provider.name}{' closed' if self._closed else ''}>"


class Lookup:
    """One name resolution under way; ``cancelled`` once nobody wants its result."""

    __slots__ = ("cancelled", "done", "work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any, GaiError | RdmaError | None], None]) -> None:
        self.work = work
        self.done = done
        self.cancelled = False

    def run(self, lock: AbstractContextManager[object]) -> None:
        """Do the work; with ``lock`` held, hand over what came of it unless it was cancelled."""
        result, failure = None, None
        try:
            result = self.work()
        except RdmaError as error:
            failure = error
        except Exception as error:  # a resolver the user brought may raise anything; it must end in an event
            failure = cm_error(errno.EIO, f"the resolver raised {error!r}", "resolve_addrinfo")
            failure.__cause__ = error
        with lock:
            if not self.cancelled:
                self.done(result, failure)


class _Lookups:
    """Name resolutions of one channel, in a few threads that exist only while there is work.

    getaddrinfo(3) cannot be interrupted: a cancelled lookup that a name server keeps waiting ends in a daemon thread
    by itself, and its result is dropped.
    """

    def __init__(self) -> None:
        # Re-entrant: collecting garbage inside it may close another channel.
        self._lock = threading.RLock()
        self._waiting: deque[Lookup] = deque()
        self._threads = 0

    def submit(self, lookup: Lookup) -> None:
        with self._lock:
            self._waiting.append(lookup)
            if self._threads >= _LOOKUP_THREADS:
                return
            self._threads += 1
        threading.Thread(target=self._work, name="rdmacm-lookup", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                lookup = self._waiting.popleft() if self._waiting else None
                if lookup is None:
                    self._threads -= 1
                    return
            lookup.run(self._lock)

    def cancel(self, lookup: Lookup) -> None:
        with self._lock:
            lookup.cancelled = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(lookup)

    def close(self) -> None:
        with self._lock:
            for lookup in self._waiting:
                lookup.cancelled = True
            self._waiting.clear()


def wait_acked(done: Callable[[], bool], timeout: float | None) -> bool:
    """Wait until ``done()``, looked at after each acknowledgement; False when the time runs out."""
    limit = None if timeout is None else time.monotonic() + timeout
    with ACKED:
        while not done():
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return False
            _acknowledged.waiting += 1
            try:
                ACKED.wait(left)
            finally:
                _acknowledged.waiting -= 1
    return True
