"""Waiting: when a thread polls before it sleeps."""

from __future__ import annotations

import threading
from collections.abc import Sized
from math import inf

import pytest

from rdmacm.progress.waiting import Waiters
from rdmacm.progress.wake import Waiter


class Spinning:
    """A runtime as far as a wait uses it, on a clock of its own: what is waited for comes with a poll."""

    is_real_time = in_use = True
    only_reads = False
    progress_due = inf
    signals_due = inf

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.now = 100.0
        self.clock = lambda: self.now
        self.waiters = Waiters(self)
        self.waiters._is_single_processor = False
        #: How many more polls it takes, how long a poll takes in seconds, and the last one.
        self.left = 0
        self.poll_time = self.last_poll_time = 0.0

    def filenos(self) -> tuple[int, ...]:
        return ()

    def next_deadline(self) -> float:
        return self.now  # no thread sleeps for longer

    def progress(self, result_queue: Sized = (), now: float | None = None) -> None: ...

    def poll(self, result_queue: Sized = ()) -> bool:
        self.left -= 1
        self.now += self.poll_time if self.left else self.last_poll_time
        return not self.left

    def wait(self, polls: int, last: float) -> None:
        self.left, self.poll_time, self.last_poll_time = polls, 10e-6, last
        assert self.waiters.drive(lambda: self.left <= 0, None)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The sleeps of the waits, by their timeout."""
    found: list[float | None] = []
    monkeypatch.setattr(Waiter, "wait", lambda self, seconds: found.append(seconds))
    return found


def test_what_comes_soon_is_polled_for(sleeps: list[float | None]) -> None:
    runtime = Spinning()
    for _ in range(100):
        runtime.wait(10, 10e-6)
    assert not sleeps


def test_what_comes_late_is_slept_for(sleeps: list[float | None]) -> None:
    runtime = Spinning()
    spins = 0
    for _ in range(1000):
        before = len(sleeps)
        runtime.wait(30, 10e-6)
        spins += len(sleeps) - before < 30
    assert 6 < spins < 24, "1, 3, 7 ... 64 waits without a spin lie between two spins"


def test_a_spin_that_loses_the_processor_is_followed_by_sleeps(sleeps: list[float | None]) -> None:
    """Although it finds what it waits for: while the other work had the processor, that has come."""
    runtime = Spinning()
    spins = 0
    for _ in range(1000):
        before = len(sleeps)
        runtime.wait(5, 0.003)
        spins += len(sleeps) == before
    begun, ended = 100.0, runtime.now
    assert 1 < spins < (ended - begun) / (32 * 0.003), "each is as long as 1 of 33 parts of the time"
    runtime.now += 1.0
    sleeps.clear()
    for _ in range(1000):  # the other work is done
        runtime.wait(5, 10e-6)
    runtime.wait(5, 0.003)  # and has something to do rarely
    runtime.wait(5, 10e-6)
    assert not sleeps
