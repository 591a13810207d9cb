"""Calls of the standard library that wait or read a clock, for the programs of a fabric.

While a program has its turn, they stand in for the originals: in the program's threads they wait in virtual time and
let other programs run, in all other threads they are the originals. Each waits by looking: whether a lock is free,
whether a descriptor is ready. Conditions, events, semaphores and queues are made of these locks.
"""

from __future__ import annotations

import asyncio
import queue
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar

S = TypeVar("S")

#: What time.time() returns at time 0 of a host's clock: 1 January 2000.
_EPOCH = 946_684_800


class Blockable(ABC):
    """A program, as its calls see it."""

    @abstractmethod
    def now(self) -> float:
        """The time of its host's clock, in seconds."""

    @abstractmethod
    def block(self, ready: Callable[[], S] | None, seconds: float | None) -> S | None:
        """Let others run until ``ready()`` returns something true, for so many seconds of its host's clock at most."""

    @abstractmethod
    def adopt(self, thread: threading.Thread) -> Callable[[], bool]:
        """Take over a thread that is about to start; returns a function that says whether it has ended."""

    @abstractmethod
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """An event loop in virtual time."""


class _Caller(threading.local):
    program: Blockable | None = None


_caller = _Caller()


def calls_blockable() -> Blockable | None:
    """The program that the calling thread belongs to."""
    return _caller.program


@contextmanager
def calling(program: Blockable | None) -> Iterator[None]:
    """Let the calling thread be one of a program's, or of none."""
    before, _caller.program = _caller.program, program
    try:
        yield
    finally:
        _caller.program = before


# The originals.
_Lock, _PyRLock, _RLock = threading.Lock, threading._PyRLock, threading.RLock  # type: ignore[attr-defined]
_start, _join = threading.Thread.start, threading.Thread.join
_sleep, _select, _poll = time.sleep, select.select, select.poll
_SimpleQueue: Any = queue.SimpleQueue
_new_event_loop = asyncio.new_event_loop


class _ProgramLock:
    """A lock that a program has made."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        program = _caller.program
        if program is None or not blocking:
            return self._lock.acquire(blocking, timeout)
        return bool(program.block(lambda: self._lock.acquire(False), None if timeout < 0 else timeout))

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock = _Lock()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()


class _ProgramPoll:
    """select.poll() of a program."""

    def __init__(self) -> None:
        poll = self._poll = _poll()
        self.register, self.modify, self.unregister = poll.register, poll.modify, poll.unregister

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        program = _caller.program
        if program is None:
            return self._poll.poll(timeout)
        is_endless = timeout is None or timeout < 0
        return program.block(lambda: self._poll.poll(0), None if is_endless else timeout / 1000) or []  # type: ignore[operator]


def _program_select(
    readers: Any, writers: Any, others: Any, timeout: float | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    program = _caller.program
    if program is None:
        return _select(readers, writers, others, timeout)

    def look() -> tuple[list[Any], list[Any], list[Any]] | None:
        found = _select(readers, writers, others, 0)
        return found if any(found) else None

    return program.block(look, timeout) or ([], [], [])


def _program_sleep(seconds: float) -> None:
    program = _caller.program
    if program is None or seconds < 0:  # the original raises
        _sleep(seconds)
    else:
        program.block(None, seconds)


def _program_start(thread: threading.Thread) -> None:
    program = _caller.program
    if program is not None:
        thread._has_ended = program.adopt(thread)  # type: ignore[attr-defined]
    with calling(None):  # it waits until the thread runs, which then waits for its first turn
        _start(thread)


def _program_join(thread: threading.Thread, timeout: float | None = None) -> None:
    program, has_ended = _caller.program, getattr(thread, "_has_ended", None)
    if program is None or has_ended is None or thread is threading.current_thread():
        _join(thread, timeout)
    elif program.block(has_ended, timeout):
        with calling(None):
            _join(thread)


def _clock(original: Callable[[], Any], read: Callable[[float], float]) -> Callable[[], Any]:
    @wraps(original)
    def clock() -> Any:
        program = _caller.program
        return original() if program is None else read(program.now())

    return clock


def _nanoseconds(now: float) -> int:
    return round(now * 1e9)


def _choosing(original: Callable[..., Any], programs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        return (original if _caller.program is None else programs)(*args, **kwargs)

    return make


def _program_event_loop() -> asyncio.AbstractEventLoop:
    program = _caller.program
    return _new_event_loop() if program is None else program.new_event_loop()


_monotonic = _clock(time.monotonic, float)
_make_lock = _choosing(_Lock, _ProgramLock)

#: Modules, names, and what stands there while a program has its turn.
_STAND_INS: list[tuple[Any, str, Any]] = [
    (threading, "Lock", _make_lock),
    (threading, "_allocate_lock", _make_lock),
    (threading, "RLock", _choosing(_RLock, _PyRLock)),
    (threading, "_time", _monotonic),
    (threading.Thread, "start", _program_start),
    (threading.Thread, "join", _program_join),
    (queue, "SimpleQueue", _choosing(_SimpleQueue, queue._PySimpleQueue)),  # type: ignore[attr-defined]
    (queue, "time", _monotonic),
    (select, "select", _program_select),
    (select, "poll", _choosing(_poll, _ProgramPoll)),
    (time, "sleep", _program_sleep),
    (time, "monotonic", _monotonic),
    (time, "monotonic_ns", _clock(time.monotonic_ns, _nanoseconds)),
    (time, "perf_counter", _clock(time.perf_counter, float)),
    (time, "perf_counter_ns", _clock(time.perf_counter_ns, _nanoseconds)),
    (time, "time", _clock(time.time, lambda now: _EPOCH + now)),
    (time, "time_ns", _clock(time.time_ns, lambda now: _nanoseconds(_EPOCH) + _nanoseconds(now))),
    (asyncio, "new_event_loop", _program_event_loop),
    (sys.modules["asyncio.events"], "new_event_loop", _program_event_loop),
]


@contextmanager
def blocking_calls() -> Iterator[None]:
    """Let the calls of programs wait in virtual time."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _STAND_INS]
    for owner, name, stand_in in _STAND_INS:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
