"""Signal handlers run where a call of this package waits, or after it, and never in the midst of its work.

Python runs a signal handler in the main thread, between any two instructions. An exception of the handler, such as the
KeyboardInterrupt of Ctrl-C, would leave an engine or a table half changed, lose a completion that was just taken, or
leave behind what a call has made so far. So while a provider is in use, the handlers in Python are wrapped, and the
wrapper looks at the frames of the interrupted thread. The innermost frame of this package decides:

- In a function that is marked with :func:`interruptible`, and if there is no such frame, the handler runs at once.
- In any other, and where Python would ignore an exception (in a ``__del__``, say), the wrapper simulates the signal
  again. The interpreter calls it before the next instructions, and so on until the thread waits in an interruptible
  function, or the call has returned.

So a call that is interrupted ends where it waits, as if its time were up, and cleans up undisturbed. Trio protects its
own code from KeyboardInterrupt in this way. It costs nothing but a look at the handlers every 2 ms, for those that are
new, while the main thread makes progress.

A call of this package that goes on for 5 s of processor time, or for a minute, has a fault; a handler may run in its
midst after that time. A busy machine may well make a call of milliseconds take 5 s.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import FrameType

from rdmacm.interrupts.protection import interruptible, is_at_work, loses_exceptions

try:
    # "signal" makes enumerations of all results, which takes microseconds.
    import _signal  # type: ignore[import-not-found]
except ImportError:
    import signal as _signal

#: Seconds between two looks for new handlers.
INTERVAL = 0.002
#: Seconds of this thread's processor time after which a deferred signal is let through, and of real time.
_PATIENCE, _LONGEST = 5.0, 60.0

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
#: The runtimes in use.
_users: set[object] = set()
#: The signals whose handlers have been wrapped.
_wrapped: set[int] = set()
#: The main thread, which is asked for with each look. In a child of fork(2) it is the thread that has forked.
_main_thread = threading.main_thread().ident


def _forked() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@interruptible
def checkpoint() -> None:
    """Run the handlers that were deferred, and raise what they raise: for loops that wait in virtual time."""


def guard(user: object) -> bool:
    """Protect the calls of this package until :meth:`unguard`; returns what :func:`refresh` returns."""
    _users.add(user)
    return refresh()


def unguard(user: object) -> None:
    """Undo :func:`guard`. After the last user, the handlers are as they were."""
    _users.discard(user)
    if not _users and threading.get_ident() == _main_thread:
        for number in tuple(_wrapped):  # a handler that is restored may run at once
            _wrapped.discard(number)
            handler = _signal.getsignal(number)
            if type(handler) is _Deferring:
                with contextlib.suppress(ValueError, OSError):
                    _signal.signal(number, handler.handler)


def refresh() -> bool:
    """Wrap the handlers that are new. False in other threads than the main one, which cannot."""
    if threading.get_ident() != _main_thread:
        return False
    getsignal = _signal.getsignal
    for number in _SIGNALS:
        handler = getsignal(number)
        kind = type(handler)  # int: SIG_DFL or SIG_IGN
        if kind is not int and kind is not _Deferring and callable(handler) and not _is_asyncio(handler):
            with contextlib.suppress(ValueError, OSError):  # a sub-interpreter handles no signals
                _wrapped.add(number)
                _signal.signal(number, _Deferring(handler))
    return True


def _is_asyncio(handler: object) -> bool:
    """Whether asyncio has installed a handler: it cancels a task, and asyncio expects to find it again."""
    function = getattr(handler, "func", handler)
    return str(getattr(function, "__module__", "")).startswith("asyncio.")


class _Deferring:
    """A handler that is called when the interrupted thread can be interrupted."""

    __slots__ = ("_decides", "_since", "handler")

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        #: The handler that was found.
        self.handler = handler
        #: Since when its signal is deferred, in seconds of processor time and of real time; None if it is not.
        self._since: tuple[float, float] | None = None
        #: Whether a call is looking at what the interrupted thread does.
        self._decides = False

    def __call__(self, signum: int, frame: FrameType | None) -> object:
        if self._decides:
            # The signal has come again, and its handler was not called yet. Where signals come faster than it takes to
            # look, these calls would run inside of each other, without end.
            return None
        again, is_due = map(_simulate, (signum,)), False
        self._decides = True
        try:
            is_due = not (is_at_work(frame) or loses_exceptions(frame)) or self._is_overdue()
        finally:  # also where the handler of another signal raises
            self._decides = False
            if not is_due:
                # Not a call: after a call, the interpreter would run this handler inside of itself, without end.
                (_,) = again
        if not is_due:
            return None
        self._since = None
        return self.handler(signum, frame)

    def _is_overdue(self) -> bool:
        worked, now = time.thread_time(), time.monotonic()
        since = self._since = self._since or (worked, now)
        return worked - since[0] > _PATIENCE or now - since[1] > _LONGEST
