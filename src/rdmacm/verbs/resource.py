"""What the verbs objects have in common: dependents, closing once, and a warning for an object that was never closed.

An object refers to those it needs, so they outlive it. An object with dependents cannot be closed (EBUSY). A PD or an
AH has nothing in the provider that stays behind, so it may be forgotten without a warning.

There is no lock: the garbage collector may close a forgotten object at any time, also in a thread that is inside a
provider's critical section. Single operations on sets and lists are atomic instead. A new dependent registers, then
checks that the object is open; close() marks the object closed, then checks for dependents. Both may back off; they
never both go ahead.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.errors import RdmaError, cm_error
from rdmacm.interrupts.protection import finalize, hold_during_fork

T = TypeVar("T")

#: Among the class names of dependents: an asynchronous event that is not acknowledged.
_EVENT = "AsyncEvent"
#: Shared by all objects that never had a dependent; it stays empty.
_NO_DEPENDENTS: set[tuple[str, int]] = set()
#: Held to replace it.
_FIRST_EVENT = threading.RLock()
hold_during_fork(_FIRST_EVENT)


class Resource:
    """An object that is made of others, may have dependents, and is closed once."""

    __slots__ = ("__weakref__", "_closed", "_dependents", "_forgotten", "_needs", "_open_token")

    #: The objects it is made of.
    _needs: tuple[Resource, ...]
    #: Whether other objects are made of it. If not, only its events are dependents, and it has no set before the first.
    _is_needed = True
    #: Whether something in the provider stays until it is closed, so that a forgotten one makes a ResourceWarning.
    _warns = True

    def _make(self, step: str, needs: tuple[Resource, ...], create: Callable[[], T]) -> T:
        """Become a dependent of ``needs``, then call ``create`` and return its result; undo the first if it fails."""
        self._closed = True
        key = (type(self).__name__, id(self))
        try:
            for need in needs:
                need._dependents.add(key)
                if not need._open_token:
                    raise need._closed_error(step)
            made = create()
        except BaseException:
            for need in needs:
                need._remove_dependent(key)
            raise
        #: One item while it is open. The call of close() that pops it releases the object.
        self._open_token: list[None] = [None]
        #: The class names and identities of the objects that need this one.
        self._dependents: set[tuple[str, int]] = set() if self._is_needed else _NO_DEPENDENTS
        #: Whether the last reference is gone, and it is to be closed with its last dependent.
        self._forgotten = False
        self._needs = needs
        self._closed = False
        return made

    def _replace_need(self, step: str, old: Resource, new: Resource, change: Callable[[], None]) -> None:
        """Call ``change``, and be made of ``new`` instead of ``old`` then."""
        key = (type(self).__name__, id(self))
        if new is not old:
            new._dependents.add(key)
        try:
            if not new._open_token:
                raise new._closed_error(step)
            change()
        except BaseException:
            if new is not old:
                new._remove_dependent(key)
            raise
        if new is not old:
            self._needs = tuple(new if need is old else need for need in self._needs)
            old._remove_dependent(key)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def close(self) -> None:
        """Release it. More than once does nothing; EBUSY while other objects need it."""
        try:
            self._open_token.pop()
        except IndexError:
            return
        try:
            self._check_close()
        except BaseException:
            self._open_token.append(None)
            raise
        self._closed = True
        key = (type(self).__name__, id(self))
        try:
            self._destroy()
        finally:
            for need in self._needs:
                need._dependents.discard(key)
                if need._forgotten:
                    need._remove_dependent(key)

    def _hold(self, event: object) -> bool:
        """Become unclosable until :meth:`_release` of an asynchronous event; False if it is closed."""
        key = (_EVENT, id(event))
        if self._dependents is _NO_DEPENDENTS:
            with _FIRST_EVENT:
                if self._dependents is _NO_DEPENDENTS:
                    self._dependents = set()
        self._dependents.add(key)
        if self._open_token:
            return True
        self._remove_dependent(key)
        return False

    def _release(self, event: object) -> None:
        """An asynchronous event is acknowledged."""
        self._remove_dependent((_EVENT, id(event)))

    def _release_events(self) -> None:
        """Acknowledge all events that were fetched."""
        for key in list(self._dependents):
            if key[0] == _EVENT:
                self._dependents.discard(key)

    def _closed_error(self, step: str) -> RdmaError:
        """EBADF, for a call on an object that is closed."""
        return cm_error(errno.EBADF, f"the {type(self).__name__} is closed", step)

    def _check_open(self, step: str) -> None:
        if self._closed:
            raise self._closed_error(step)

    def _check_close(self) -> None:
        """Raise where it cannot be closed."""
        if self._dependents:
            kinds = Counter(kind for kind, _ in list(self._dependents))
            text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            hint = "ack() the events" if _EVENT in kinds else "close those first"
            raise cm_error(errno.EBUSY, f"still needed by {text}", "close", repr(self), hint)

    def _destroy(self) -> None:
        """Release what ``create`` made."""

    def _remove_dependent(self, key: tuple[str, int]) -> None:
        self._dependents.discard(key)
        if self._forgotten and not self._dependents:
            with contextlib.suppress(Exception):
                self.close()

    def _close_forgotten(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._closed:
            self._release_events()
        self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if getattr(self, "_closed", True):
            return
        # In a cycle of garbage the collector may finalize this object before its dependents.
        self._forgotten = True
        finalize(self, self._close_forgotten, unclosed="unclosed" if self._warns else "")
