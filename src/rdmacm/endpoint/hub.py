"""Who waits for what: one event channel, those whose events come there, and the completion queues that have news.

What an endpoint does is written once, as a generator (:data:`Steps`) that yields a :class:`Wait` wherever it has to
wait. :func:`run` carries one out in a thread; :mod:`rdmacm.aio` does in an event loop. A generator that is left early
(its time is up, its task was cancelled, Ctrl-C) is closed, and cleans up in its ``finally``.

The state of endpoints is protected by the provider's lock: :meth:`Hub.pump`, which takes in what has happened, and the
``ready`` functions of waits run under it, :meth:`Hub.locked` is for everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeAlias, TypeVar

from rdmacm.cmid import CmEvent, EventChannel
from rdmacm.errors import CmWouldBlockError
from rdmacm.provider import Provider

__all__ = ["Expired", "Hub", "Source", "Steps", "Wait", "Watched", "run"]

T = TypeVar("T")


class Watched:
    """Something that changes. ``wakers`` are called when it does, under the provider's lock."""

    __slots__ = ("wakers",)

    def __init__(self) -> None:
        self.wakers: list[Callable[[], None]] = []

    def changed(self) -> None:
        """Tell those who wait for it."""
        for waker in tuple(self.wakers):
            waker()


class Wait:
    """Until ``ready()`` returns something true, which may be so after each change of ``subject``.

    It is sent into the generator then; None is, once ``until`` (on the hub's clock) has come.
    """

    __slots__ = ("ready", "subject", "until")

    def __init__(self, subject: Watched, ready: Callable[[], object], until: float | None = None) -> None:
        self.subject = subject
        self.ready = ready
        self.until = until


#: Something that is done in steps: yields waits, is sent what they brought, returns its result.
Steps: TypeAlias = Generator[Wait, Any, T]


class Expired(Exception):
    """Thrown into steps whose time is up; ``timeout`` is what the caller gave, in seconds."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.timeout = timeout


class Source(Protocol):
    """Something with a completion queue."""

    is_marked: bool

    def poll(self) -> bool:
        """Take in a bounded number of completions; whether there may be more."""


class Hub:
    """See the module. Counts its users, and closes its channel with the last.

    ``on_news()`` is called under the provider's lock, by any thread, when there is something to pump; ``on_close()``,
    where it is given, has to close the channel.
    """

    def __init__(
        self,
        provider: str | Provider | None = None,
        on_news: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.channel = EventChannel(provider)
        self.provider = self.channel.provider
        #: The provider's idea of time, in seconds; a simulated one has its own.
        self.clock = self.provider.clock
        self._on_news = on_news
        self._on_close = on_close
        self._users = 1
        self._events = 0
        self._marked: deque[Source] = deque()
        self.channel.queue.notify = self._event_posted

    # -- users ----------------------------------------------------------------------------------------

    def retain(self) -> None:
        """One user more."""
        self.locked(lambda: self._count(1))

    def release(self) -> None:
        """One less."""
        if not self.locked(lambda: self._count(-1)):
            self.channel.queue.notify = None
            if self._on_close is not None:
                self._on_close()
            else:
                self.channel.close()

    def _count(self, change: int) -> int:
        self._users += change
        return self._users

    # -- news -----------------------------------------------------------------------------------------

    def _event_posted(self) -> None:
        self._events += 1
        if self._on_news is not None:
            self._on_news()

    def mark(self, source: Source) -> None:
        """A source has completions (the provider's lock is held)."""
        if not source.is_marked:
            source.is_marked = True
            self._marked.append(source)
            if self._on_news is not None:
                self._on_news()

    def pump(self, limit: int = -1) -> bool:
        """Take in what has happened (the provider's lock is held); whether something is left.

        ``limit``: how many events, and as many turns of sources, at the most; without, whatever there is.
        """
        while self._events or self._marked:
            if not limit:
                return True
            limit -= 1
            if self._events:
                self._events -= 1
                self._fetch()
            if self._marked:
                source = self._marked.popleft()
                source.is_marked = False
                if source.poll() and not source.is_marked:
                    source.is_marked = True
                    self._marked.append(source)
        return False

    def _fetch(self) -> None:
        if self.channel.closed:
            return
        try:
            event = self.channel.get_event(0)
        except CmWouldBlockError:  # its id was destroyed meanwhile
            self._events = 0
            return
        event.ack()
        target = event.id.context if event.listen_id is None else event.listen_id.context
        handle: Callable[[CmEvent], None] | None = getattr(target, "handle", None)
        if handle is not None:
            handle(event)

    def locked(self, work: Callable[[], T]) -> T:
        """``work()`` under the provider's lock."""
        return self.provider.drive(lambda: (work(),), 0)[0]

    def wait(self, ready: Callable[[], T], timeout: float | None) -> T:
        """Wait in this thread until ``ready()`` is true, taking in what happens; what it said last."""

        def done() -> T:
            self.pump()
            return ready()

        return self.provider.drive(done, timeout)


def run(hub: Hub, steps: Steps[T], timeout: float | None = None) -> T:
    """Carry out steps in this thread, for ``timeout`` seconds (None: for ever)."""
    limit = None if timeout is None else hub.clock() + timeout
    try:
        wait = next(steps)
        while True:
            ends = [end for end in (limit, wait.until) if end is not None]
            found = hub.wait(wait.ready, max(0.0, min(ends) - hub.clock()) if ends else None)
            if not found and timeout is not None and limit is not None and hub.clock() >= limit:
                wait = steps.throw(Expired(timeout))
            else:
                wait = steps.send(found or None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()
