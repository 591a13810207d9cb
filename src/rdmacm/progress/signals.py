"""Signal handlers run where a call of this package waits, or after it, and never in the midst of its work.

Python runs a signal handler in the main thread, between any two instructions. An exception of the handler, such as the
KeyboardInterrupt of Ctrl-C, would leave an engine or a table half changed, lose a completion that was just taken, or
leave behind what a call has made so far. So while a provider is in use, the handlers in Python are wrapped, and the
wrapper looks at the frames of the interrupted thread. The innermost frame of this package decides:

- In a function that is marked with :func:`interruptible`, and if there is no such frame, the handler runs at once.
- In any other, the wrapper simulates the signal again. The interpreter calls it before the next instructions, and so on
  until the thread waits in an interruptible function, or the call has returned.

So a call that is interrupted ends where it waits, as if its time were up, and cleans up undisturbed. Trio protects its
own code from KeyboardInterrupt in this way. It costs nothing but a look at the handlers every 2 ms, for those that are
new, while the main thread makes progress.

A call of this package that does not return within 5 s has a fault; a handler may run in its midst after that time.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, TypeVar, cast

try:
    # "signal" makes enumerations of all results, which takes microseconds.
    import _signal  # type: ignore[import-not-found]
except ImportError:
    import signal as _signal

__all__ = ["INTERVAL", "checkpoint", "guard", "interruptible", "refresh", "unguard"]

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds between two looks for new handlers.
INTERVAL = 0.002
#: Seconds after which a deferred signal is let through.
_PATIENCE = 5.0

_PACKAGE = __name__.removesuffix("progress.signals")
#: Modules whose frames do not count: they call the rest of the package as an application does, or are this one.
_OUTSIDE = tuple(_PACKAGE + name for name in ("tools", "testing", "interrupt", "__main__", "progress.signals"))
#: Faults of the program, and signals that cannot be handled.
_EXCLUDED = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSTOP", "SIGSYS", "SIGTRAP")
_SIGNALS = tuple(
    sorted(
        {int(number) for number in _signal.valid_signals() if number < 32}
        - {int(getattr(_signal, name, 0)) for name in _EXCLUDED}
    )
)

#: Lets the interpreter find a signal as if it had just come. Unlike signal.raise_signal(), it calls no handler itself.
_simulate: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]
#: The identities of the code objects of interruptible functions.
_interruptible: set[int] = set()
#: The runtimes in use.
_users: set[object] = set()


def interruptible(function: F) -> F:
    """Decorate a function in which a handler may run and raise. It must hold no lock and change nothing."""
    _interruptible.add(id(cast("FunctionType", function).__code__))
    return function


@interruptible
def checkpoint() -> None:
    """Run the handlers that were deferred, and raise what they raise: for loops that wait in virtual time."""


def guard(user: object) -> None:
    """Protect the calls of this package until :meth:`unguard`."""
    _users.add(user)
    refresh()


def unguard(user: object) -> None:
    """Undo :func:`guard`. After the last user, the handlers are as they were."""
    _users.discard(user)
    if not _users and _is_main_thread():
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if type(handler) is _Deferring:
                with contextlib.suppress(ValueError, OSError):
                    _signal.signal(number, handler.handler)


def refresh() -> None:
    """Wrap the handlers that are new. Does nothing in other threads than the main one."""
    if not _is_main_thread():
        return
    getsignal = _signal.getsignal
    for number in _SIGNALS:
        handler = getsignal(number)
        if type(handler) is not _Deferring and callable(handler) and not _is_asyncio(handler):
            with contextlib.suppress(ValueError, OSError):  # a sub-interpreter handles no signals
                _signal.signal(number, _Deferring(handler))


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _is_asyncio(handler: object) -> bool:
    """Whether asyncio has installed a handler: it cancels a task, and asyncio expects to find it again."""
    function = getattr(handler, "func", handler)
    return str(getattr(function, "__module__", "")).startswith("asyncio.")


class _Deferring:
    """A handler that is called when the interrupted thread can be interrupted."""

    __slots__ = ("_since", "handler")

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        #: The handler that was found.
        self.handler = handler
        #: Since when its signal is deferred, in seconds of time.monotonic(); 0 if it is not.
        self._since = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> object:
        if not _is_protected(frame) or self._is_overdue():
            self._since = 0.0
            return self.handler(signum, frame)
        again = map(_simulate, (signum,))
        # Not a call: after a call, the interpreter would run this handler inside of itself, without end.
        (_,) = again
        return None

    def _is_overdue(self) -> bool:
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since > _PATIENCE


def _is_protected(frame: FrameType | None) -> bool:
    """Whether the innermost frame of this package must not be interrupted."""
    while frame is not None:
        if id(frame.f_code) in _interruptible:
            return False
        name = frame.f_globals.get("__name__")
        if type(name) is str and name.startswith(_PACKAGE) and not name.startswith(_OUTSIDE):
            return True
        frame = frame.f_back
    return False
