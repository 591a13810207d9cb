"""Name resolutions that run in threads, so that resolve_addrinfo never waits for a name server."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from rdmacm.addrinfo import AddrInfo
from rdmacm.errors import RdmaError, cm_error
from rdmacm.interrupts.protection import renew_in_child

#: The most threads of one channel, and so the most name servers it waits for at a time.
_MAX_THREADS = 8

#: Takes the addresses, or None and the error.
_Done: TypeAlias = Callable[[list[AddrInfo] | None, RdmaError | None], None]


class NameLookup:
    """One name resolution: ``work`` finds the addresses, ``done`` takes the outcome."""

    __slots__ = ("_done", "_work", "cancelled")

    def __init__(self, work: Callable[[], list[AddrInfo]], done: _Done) -> None:
        self._work = work
        self._done = done
        #: Whether the outcome is to be dropped.
        self.cancelled: bool = False

    def run(self, lock: AbstractContextManager[object]) -> None:
        """Do the work, then call ``done`` with ``lock`` held unless the lookup was cancelled."""
        result, failure = None, None
        try:
            result = self._work()
        except RdmaError as error:
            failure = error
        except Exception as error:  # a resolver of the user's may raise anything; it must end in an event
            failure = cm_error(errno.EIO, f"the resolver raised {error!r}", "resolve_addrinfo")
            failure.__cause__ = error
        with lock:
            if not self.cancelled:
                self._done(result, failure)


@dataclass(slots=True)
class AddrinfoOutcome:
    """What resolve_addrinfo of an id has begun and found, until the outcome is fetched."""

    #: None if the subnet administrator is asked for a service instead: the id's backend has the list.
    lookup: NameLookup | None
    found: list[AddrInfo] | None = None
    failure: RdmaError | None = None


class NameLookups:
    """The name resolutions of one channel, in threads that exist only while there is work.

    getaddrinfo(3) cannot be interrupted: after a cancellation its daemon thread runs on until the name server has
    answered, and drops the result.
    """

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may close another channel while this thread holds the lock.
        self._lock = threading.RLock()
        renew_in_child(self)
        self._waiting: deque[NameLookup] = deque()
        self._threads = 0

    def submit(self, lookup: NameLookup) -> None:
        """Run a lookup in a thread, after those submitted before where all threads are busy."""
        with self._lock:
            self._waiting.append(lookup)
            if self._threads >= _MAX_THREADS:
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

    def cancel(self, lookup: NameLookup) -> None:
        """Drop a lookup's outcome. Once this has returned, ``done`` is not called."""
        with self._lock:
            lookup.cancelled = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(lookup)

    def close(self) -> None:
        """Cancel the lookups that have not started."""
        with self._lock:
            for lookup in self._waiting:
                lookup.cancelled = True
            self._waiting.clear()
