"""What the objects have in common: who needs whom, closing once, and a word about those that were forgotten.

An object holds those it is made of, so what it needs outlives it; what is still needed cannot be closed (EBUSY).
Only those with something behind them in a provider mind being forgotten.

There is no lock, because the garbage collector may close a forgotten object in the middle of anything, a provider's
critical section included. Single operations on sets and lists are atomic instead, and their order does the rest:
who begins to need an object says so first and looks second whether it is being closed, who closes it does the
reverse. Both may give way to the other; never do both go ahead.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.errors import cm_error

__all__ = ["Resource"]

T = TypeVar("T")


class Resource:
    """An object that is made, needed by others, and closed."""

    __slots__ = ("__weakref__", "_closed", "_door", "_forgotten", "_needs", "_users")

    _needs: tuple[Resource, ...]
    #: Whether there is something behind it that stays until it is closed.
    _warns = True

    def _make(self, step: str, needs: tuple[Resource, ...], create: Callable[[], T]) -> T:
        """Take hold of what is needed, then create; nothing is held where that fails."""
        self._closed = True
        token = (type(self).__name__, id(self))
        try:
            for need in needs:
                need._users.add(token)
                if not need._door:
                    raise need.closed_error(step)
            made = create()
        except BaseException:
            for need in needs:
                need._let_go(token)
            raise
        #: One item while it is open: whoever takes it closes.
        self._door: list[None] = [None]
        self._users: set[tuple[str, int]] = set()
        self._forgotten = False
        self._needs = needs
        self._closed = False
        return made

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def close(self) -> None:
        """Release it. A second time does nothing; EBUSY while other objects need it."""
        try:
            self._door.pop()
        except IndexError:
            return
        try:
            self._check_close()
        except BaseException:
            self._door.append(None)
            raise
        self._closed = True
        token = (type(self).__name__, id(self))
        try:
            self._destroy()
        finally:
            for need in self._needs:
                need._users.discard(token)
                if need._forgotten:
                    need._let_go(token)

    def _check_close(self) -> None:
        """Raise where it must stay."""
        if self._users:
            kinds = Counter(kind for kind, _ in list(self._users))
            text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            raise cm_error(errno.EBUSY, f"still needed by {text}", "close", repr(self), "close those first")

    def _destroy(self) -> None:
        """Undo what ``create`` did."""

    def _let_go(self, token: tuple[str, int]) -> None:
        self._users.discard(token)
        if self._forgotten and not self._users:
            with contextlib.suppress(Exception):
                self.close()

    def closed_error(self, step: str) -> Exception:
        return cm_error(errno.EBADF, f"the {type(self).__name__} is closed", step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        text = repr(self)
        # In a cycle of garbage the collector may come here before it comes to those that need this one.
        self._forgotten = True
        if not sys.is_finalizing():  # a thread that is gone may hold a lock
            with contextlib.suppress(Exception):
                self.close()
        if self._warns:
            warnings.warn(f"unclosed {text}", ResourceWarning, stacklevel=2, source=self)
