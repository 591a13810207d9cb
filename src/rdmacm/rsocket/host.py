"""The dispatcher that all rsockets of a provider share, beside those of event loops.

It handles events and completions as they come, in the thread whose progress brings them: a waiting thread, or the
provider's own where it has one. So requests are answered and receives are posted again while the application computes,
as far as its provider makes progress then, and no thread of this package's is needed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rdmacm.endpoint.dispatcher import Dispatcher
from rdmacm.provider import Provider

T = TypeVar("T")


class HostDispatcher(Dispatcher):
    """A dispatcher that needs nobody to call :meth:`dispatch`."""

    #: By the identity of the provider; each is there as long as it has users.
    _all: dict[int, HostDispatcher] = {}

    def __init__(self, provider: Provider) -> None:
        #: How many calls are at work, during which nothing is dispatched: a handler must not run inside another.
        self._held = 0
        super().__init__(provider, self._ready, self._forget)
        self._all[id(self.provider)] = self

    @classmethod
    def get(cls, provider: Provider) -> HostDispatcher:
        """The dispatcher of a provider, which the caller must release."""
        found = cls._all.get(id(provider))
        return found if found is not None and found.drive_once(found._is_retained) else cls(provider)

    def _is_retained(self) -> bool:
        """Retain it, unless another thread has released it as its last user, and is about to close it."""
        return self._users > 0 and self._count(1) > 0

    def _forget(self) -> None:
        if self._all.get(id(self.provider)) is self:
            del self._all[id(self.provider)]
        self.channel.close()

    def _ready(self) -> None:
        self.dispatch()

    def dispatch(self, limit: int = -1) -> bool:
        """As :meth:`Dispatcher.dispatch`; inside another call nothing, because that one dispatches at its end."""
        if self._held or not (self._pending_events or self._scheduled):
            return False
        self._held += 1
        try:
            return super().dispatch(limit)
        finally:
            self._held -= 1

    def drive_once(self, work: Callable[[], T]) -> T:
        """As :meth:`Dispatcher.drive_once`."""
        return super().drive_once(lambda: self._call(work))

    def wait(self, ready: Callable[[], T], timeout: float | None) -> T:
        """As :meth:`Dispatcher.wait`."""

        def done() -> T:
            # What ready() posts may complete at once, and make it true.
            while True:
                if self._pending_events or self._scheduled:
                    self.dispatch()
                self._held += 1  # as _hold() does, without a call
                try:
                    found = ready()
                finally:
                    self._held -= 1
                if not (self._pending_events or self._scheduled):
                    return found
                if found:
                    self.dispatch()
                    return found

        return self.provider.drive(done, timeout)

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return self._hold(work)
        finally:
            self.dispatch()

    def _hold(self, work: Callable[[], T]) -> T:
        self._held += 1
        try:
            return work()
        finally:
            self._held -= 1
