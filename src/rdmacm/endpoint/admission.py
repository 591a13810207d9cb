"""The connections of a listener that its application has not accepted.

A connection is half-open from our REP until the peer's RTU. A peer that never sends the RTU must not block others:
after ``RTU_GRACE`` seconds its connection no longer counts against the limit of connections in progress. It is
destroyed when the connection manager has repeated the REP as often as it may, or earlier when there are too many
half-open connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from rdmacm.endpoint.dispatcher import Observable

#: Seconds after which a half-open connection no longer counts as in progress.
RTU_GRACE = 0.5
#: Maximum number of half-open connections; beyond it the oldest is destroyed.
_MAX_HALF_OPEN = 256


def _nothing() -> None:
    """What a closed admission calls."""


class Admitted(Protocol):
    """A connection whose REP was sent."""

    #: Whether the connection is or was established.
    is_established: bool
    #: Changes when the connection is established and when it ends.
    lifecycle: Observable

    def release(self) -> None:
        """Disconnect, and destroy everything."""


S = TypeVar("S", bound=Admitted)


class Admission(Generic[S]):
    """Half-open and established connections. Methods are called with the provider's lock held.

    ``clock`` returns seconds. ``changed()`` is called when a half-open connection was established, or has failed.
    """

    def __init__(self, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        self._clock = clock
        self._changed = changed
        #: Connections that wait for the RTU, oldest first, with the time of their REP.
        self._half_open: dict[S, float] = {}
        #: Established connections.
        self._ready: deque[S] = deque()

    def has_room(self, limit: int) -> bool:
        """Whether fewer than ``limit`` connections are in progress or established."""
        busy, since = len(self._ready), self._clock() - RTU_GRACE
        for replied_at in reversed(self._half_open.values()):
            if replied_at <= since:
                break
            busy += 1
        return busy < limit

    def add(self, state: S) -> None:
        """Add a connection whose REP was just sent."""
        state.lifecycle.wakers.append(partial(self._lifecycle_changed, state))
        self._half_open[state] = self._clock()
        if len(self._half_open) > _MAX_HALF_OPEN:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.release()

    def _lifecycle_changed(self, state: S) -> None:
        """Process a half-open connection that was established or has failed."""
        if state not in self._half_open:
            return
        del self._half_open[state]
        state.lifecycle.wakers.clear()
        if state.is_established:
            self._ready.append(state)
        else:
            state.release()
        self._changed()

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` returns a connection."""
        return bool(self._ready)

    def take(self) -> S | None:
        """The connection that was established first, or None."""
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Release all connections, and the caller: ``changed`` is not called any more."""
        self._changed = _nothing  # else the two would keep each other, and the device, until the garbage is collected
        for state in (*self._half_open, *self._ready):
            state.lifecycle.wakers.clear()
            state.release()
        self._half_open.clear()
        self._ready.clear()
