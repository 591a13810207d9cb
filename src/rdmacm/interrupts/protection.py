"""What may happen in the midst of a call of this package: by its frames on the stack of the thread.

Python runs signal handlers and finalizers between any two instructions of a thread. The innermost frame of this package
on its stack tells what the thread is doing. In a function that is marked with :func:`interruptible` it waits, holds no
lock that it needs for itself, and changes nothing. In any other it is at work: signal handlers are deferred
(:mod:`rdmacm.interrupts.handlers`), and so are finalizers that take locks, because the thread may hold any lock
already.

Another thread may fork meanwhile, and in the child the thread that holds a lock does not exist. A lock that an object
has is replaced there (:func:`renew_in_child`). One that is a global name of several modules is held during the fork
(:func:`hold_during_fork`), so it must be one that no thread waits with.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType, FunctionType
from typing import Any, Protocol, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __name__.removesuffix("interrupts.protection")
#: Modules that use the rest of the package as an application does, and hold no lock of it.
_TOOLS = tuple(_PACKAGE + name for name in ("tools", "check", "interrupts.command", "__main__"))
#: The same for signals: a simulation may be interrupted, except in an engine. Of this module and that of the handlers,
#: the caller's frame decides.
OUTSIDE = (*_TOOLS, *(_PACKAGE + name for name in ("testing", "interrupts")))

#: What a thread executes before, around and after its run().
_BOOTSTRAP = cast("Any", threading.Thread)._bootstrap_inner.__code__
#: Modules of Python with callbacks of weak references, and what these are called there.
_WEAK_MODULES, _WEAK_CALLBACKS = ("weakref", "_weakrefset"), ("remove", "_remove")
#: The identities of the code objects of interruptible functions.
_interruptible: set[int] = set()
#: The finalizers that wait for :func:`run_finalizers`.
deferred_finalizers: deque[Callable[[], object]] = deque()


def interruptible(function: F) -> F:
    """Decorate a function in which a handler may run and raise."""
    _interruptible.add(id(cast("FunctionType", function).__code__))
    return function


def is_at_work(frame: FrameType | None, outside: tuple[str, ...] = OUTSIDE) -> bool:
    """Whether the innermost frame of this package, from ``frame`` on, is not of an interruptible function.

    Frames of the modules that begin with one of ``outside`` do not count.
    """
    while frame is not None:
        if id(frame.f_code) in _interruptible:
            return False
        name = frame.f_globals.get("__name__")
        if type(name) is str and name.startswith(_PACKAGE) and not name.startswith(outside):
            return True
        frame = frame.f_back
    return False


def loses_exceptions(frame: FrameType | None) -> bool:
    """Whether Python would ignore an exception.

    It does so in a ``__del__``, in a callback of a weak collection, and in one of ``gc.callbacks``; in callbacks of
    other weak references, too, but nothing tells them from functions.
    """
    collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        name = code.co_name
        if name == "__del__" or (name in _WEAK_CALLBACKS and frame.f_globals.get("__name__") in _WEAK_MODULES):
            return True
        if code in collecting:
            return True
        frame = frame.f_back
    return False


def finalize(
    owner: object,
    work: Callable[..., object],
    *arguments: object,
    unclosed: str = "",
    warn: Callable[..., None] = warnings.warn,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> None:
    """What a ``__del__`` does: it calls ``work``, which may take locks, and warns where ``unclosed`` names the object.

    A thread may hold the lock that another one waits for, and be made to wait for that one's by a finalizer. So inside
    of this package, and in a thread that is about to start, a finalizer is left to the next progress of any provider.
    While the interpreter exits, ``work`` is not called: a lock may belong to a thread that has ended. A module's names
    are None then, so a ``__del__`` has this function, and this one has what it uses, as the default of a parameter.
    """
    is_exiting, text = is_finalizing(), ""
    if unclosed:
        try:
            text = repr(owner)
        except Exception:
            if not is_exiting:
                raise
            text = object.__repr__(owner)  # the other needs names that are gone
    if not is_exiting:
        _call_or_defer(partial(work, *arguments))
    if unclosed:
        warn(f"{unclosed} {text}", ResourceWarning, stacklevel=3, source=owner)


def _call_or_defer(work: Callable[[], object]) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__del__":
        frame = frame.f_back
    if is_at_work(frame, _TOOLS) or _is_starting(frame):
        deferred_finalizers.append(work)
    else:
        work()


def _is_starting(frame: FrameType | None) -> bool:
    """Whether a thread has not begun its work, or has ended it: the one that starts it waits, and may hold any lock."""
    inner: FrameType | None = None
    while frame is not None:
        if frame.f_code is _BOOTSTRAP:
            return inner is None or inner.f_code.co_name != "run"
        inner, frame = frame, frame.f_back
    return False


def run_finalizers() -> None:
    """Call the deferred finalizers. The caller holds no lock but a runtime's."""
    while deferred_finalizers:
        try:
            work = deferred_finalizers.popleft()
        except IndexError:  # another thread has taken it
            return
        with contextlib.suppress(Exception):  # nobody can handle it
            work()


class _LockHolder(Protocol):
    _lock: threading.RLock


_lock_holders: weakref.WeakSet[_LockHolder] = weakref.WeakSet()


def renew_in_child(holder: _LockHolder) -> None:
    """Give an object another ``_lock`` in each child of fork(2)."""
    _lock_holders.add(holder)


def hold_during_fork(lock: threading.RLock) -> None:
    """Let fork(2) wait until no other thread has a lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def _renew_locks() -> None:
    for holder in _lock_holders:
        holder._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
