"""Events and completions of many endpoints, dispatched to the endpoint they belong to.

Each endpoint operation is written once, as a generator (:data:`Routine`) that yields a :class:`Wait` wherever it has to
wait. :func:`run` executes a routine in the calling thread, :mod:`rdmacm.aio` executes it in an event loop. A routine
that does not finish (timeout, cancelled task, Ctrl-C) is closed and cleans up in its ``finally`` clauses.

The provider's lock protects the state of all endpoints. :meth:`Dispatcher.dispatch` and the ``ready`` functions of
waits are called with the lock held; :meth:`Dispatcher.drive_once` takes it for everything else.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeAlias, TypeVar

from rdmacm.cmid import CmEvent, CmId, EventChannel
from rdmacm.errors import CmWouldBlockError, check_timeout, cm_error
from rdmacm.progress.containment import InternalErrors
from rdmacm.provider import Provider

T = TypeVar("T")


class Observable:
    """An object that calls ``wakers`` after each change of its state, with the provider's lock held."""

    __slots__ = ("wakers",)

    def __init__(self) -> None:
        self.wakers: list[Callable[[], None]] = []

    def changed(self) -> None:
        """Call all wakers."""
        for waker in tuple(self.wakers):
            waker()


class Wait:
    """Wait until ``ready()`` returns a true value. Only a change of ``subject`` can make it true.

    The routine is resumed with that value, or with None at ``until`` (seconds, on the dispatcher's clock).
    """

    __slots__ = ("ready", "subject", "until")

    def __init__(self, subject: Observable, ready: Callable[[], object], until: float | None = None) -> None:
        self.subject: Observable = subject
        self.ready: Callable[[], object] = ready
        self.until: float | None = until


#: An operation of an endpoint: yields waits, is resumed with their values, and returns its result.
Routine: TypeAlias = Generator[Wait, Any, T]


class Expired(Exception):
    """Thrown into a routine when its time is up. ``timeout`` is the caller's, in seconds."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.timeout = timeout


class CompletionSource(Protocol):
    """The owner of a completion queue: a connection."""

    #: Whether the dispatcher is going to call :meth:`poll`.
    is_scheduled: bool

    def poll(self) -> bool:
        """Process a bounded number of completions; return whether there may be more."""

    def end(self, reason: str) -> None:
        """Disconnect."""


class Dispatcher:
    """One event channel and the completion queues of all endpoints that share it.

    The dispatcher counts its users and closes the channel when the last one releases it.

    ``on_ready()`` is called with the provider's lock held, from any thread, when :meth:`dispatch` has work to do.
    ``on_close()``, if given, must close the channel.
    """

    def __init__(
        self,
        provider: str | Provider | None = None,
        on_ready: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.channel: EventChannel = EventChannel(provider)
        self.provider: Provider = self.channel.provider
        #: The provider's clock, in seconds. A simulated provider has virtual time.
        self.clock: Callable[[], float] = self.provider.clock
        self._on_ready = on_ready
        self._on_close = on_close
        #: Faults of endpoints that were contained.
        self.errors: InternalErrors = InternalErrors()
        #: Endpoints, and calls under way, that need the channel.
        self._users = 1
        #: Events in the channel that :meth:`dispatch` has not fetched.
        self._pending_events = 0
        #: Sources with completions, in the order in which they are polled.
        self._scheduled: deque[CompletionSource] = deque()
        self.channel._queue.notify = self._event_posted

    # -- users ----------------------------------------------------------------------------------------

    def retain(self) -> None:
        """Add a user."""
        self.drive_once(lambda: self._count(1))

    def release(self) -> None:
        """Remove a user."""
        if not self.drive_once(lambda: self._count(-1)):
            self.channel._queue.notify = None
            if self._on_close is not None:
                self._on_close()
            else:
                self.channel.close()

    def _count(self, change: int) -> int:
        self._users += change
        return self._users

    # -- dispatch -------------------------------------------------------------------------------------

    def _event_posted(self) -> None:
        self._pending_events += 1
        if self._on_ready is not None:
            self._on_ready()

    def schedule(self, source: CompletionSource) -> None:
        """Poll a source that has completions in the next :meth:`dispatch`. The caller holds the provider's lock."""
        if not source.is_scheduled:
            source.is_scheduled = True
            self._scheduled.append(source)
            if self._on_ready is not None:
                self._on_ready()

    def dispatch(self, limit: int = -1) -> bool:
        """Deliver events to their endpoints and poll scheduled sources; return whether work is left.

        ``limit`` bounds the events, and the polls, of this call; the default is no bound. The caller holds the
        provider's lock.
        """
        while self._pending_events or self._scheduled:
            if not limit:
                return True
            limit -= 1
            if self._pending_events:
                self._pending_events -= 1
                self._deliver_event()
            if self._scheduled:
                source = self._scheduled.popleft()
                source.is_scheduled = False
                try:
                    has_more = source.poll()
                except Exception as error:
                    self._end(source, error)
                    continue
                if has_more and not source.is_scheduled:
                    source.is_scheduled = True
                    self._scheduled.append(source)
        return False

    def _deliver_event(self) -> None:
        if self.channel.closed or self.channel._is_inherited:
            return
        try:
            event = self.channel.get_event(0)
        except CmWouldBlockError:  # the id was destroyed, and its events with it
            self._pending_events = 0
            return
        event.ack()
        target = event.id.context if event.listen_id is None else event.listen_id.context
        handle: Callable[[CmEvent], None] | None = getattr(target, "handle", None)
        if handle is not None:
            try:
                handle(event)
            except Exception as error:
                self._end(target if event.listen_id is None else event.id, error)

    def _end(self, ended: object, error: Exception) -> None:
        """An endpoint has raised, or for a listener a request: it ends, and no other does."""
        self.errors.report("endpoint", f"{ended!r} has ended", error)
        try:
            if isinstance(ended, CmId):
                ended.destroy()
            elif hasattr(ended, "end"):
                ended.end("an internal error has ended the connection")
        except Exception as second:
            self.errors.report("endpoint", f"{ended!r} is not disconnected", second)

    def check_fork(self) -> None:
        """Raise EBADF in a child of fork(2): the endpoints are the parent's."""
        if self.channel._is_inherited:
            text = "the connection or listener was made before fork(2)"
            raise cm_error(errno.EBADF, text, hint="make it in the child")

    # -- the provider's lock --------------------------------------------------------------------------

    def drive_once(self, work: Callable[[], T]) -> T:
        """Call ``work()`` with the provider's lock held, and return its result.

        A provider offers its lock only through :meth:`rdmacm.provider.Provider.drive`. So this call may also receive
        and send packets and run timers, before it returns. It never waits.
        """
        return self.provider.drive(lambda: (work(),), 0)[0]

    def wait(self, ready: Callable[[], T], timeout: float | None) -> T:
        """Dispatch in this thread until ``ready()`` is true, for at most ``timeout`` seconds; return its last value."""

        def done() -> T:
            self.dispatch()
            return ready()

        return self.provider.drive(done, timeout)


def run(dispatcher: Dispatcher, routine: Routine[T], timeout: float | None = None) -> T:
    """Execute a routine in this thread, for at most ``timeout`` seconds (None: no limit).

    ValueError for a negative timeout.
    """
    limit = None if timeout is None else dispatcher.clock() + timeout
    try:
        check_timeout(timeout)
        dispatcher.check_fork()
        wait = next(routine)
        while True:
            ends = [end for end in (limit, wait.until) if end is not None]
            found = dispatcher.wait(wait.ready, max(0.0, min(ends) - dispatcher.clock()) if ends else None)
            if not found and timeout is not None and limit is not None and dispatcher.clock() >= limit:
                wait = routine.throw(Expired(timeout))
            else:
                wait = routine.send(found or None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        routine.close()
