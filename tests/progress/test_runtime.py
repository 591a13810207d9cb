"""The runtime: timers, and the descriptors that a reader polls."""

from __future__ import annotations

import select
from collections.abc import Sized
from functools import partial

import pytest

from rdmacm.interrupts import handlers
from rdmacm.progress.runtime import Runtime
from rdmacm.testing import VirtualClock
from support.clock import REAL


class IdleDriver:
    """A driver that does no I/O."""

    def filenos(self) -> tuple[int, ...]:
        return ()

    def progress(self, now: float, result_queue: Sized) -> None: ...

    def poll(self, now: float, result_queue: Sized) -> bool:
        return False

    def opened(self) -> None: ...

    def released(self) -> None: ...

    def deadlines_changed(self) -> None: ...


def make_runtime(clock: VirtualClock | None = None) -> Runtime:
    runtime = Runtime() if clock is None else Runtime(clock)
    runtime.attach(IdleDriver())
    return runtime


def test_timers_fire_in_deadline_order() -> None:
    clock = VirtualClock(0.0)
    runtime, fired = make_runtime(clock), list[tuple[str, float]]()

    def note(name: str, now: float) -> None:
        fired.append((name, now))

    for name, when in (("b", 2.0), ("c", 3.0), ("a", 1.0), ("a'", 1.0)):
        runtime.call_at(when, partial(note, name))
    clock.advance(2.5)
    runtime.fire_timers()
    assert fired == [("a", 2.5), ("a'", 2.5), ("b", 2.5)]
    assert runtime.next_deadline() == 3.0


def test_timer_added_by_a_callback_fires_in_the_next_round() -> None:
    clock = VirtualClock(0.0)
    runtime, fired = make_runtime(clock), list[float]()

    def again(now: float) -> None:
        fired.append(now)
        runtime.call_at(now, again)

    runtime.call_at(1.0, again)
    clock.advance(1.0)
    runtime.fire_timers()
    assert fired == [1.0]
    assert runtime.next_deadline() == 1.0


def test_callback_can_cancel_another_timer() -> None:
    clock = VirtualClock(0.0)
    runtime, fired = make_runtime(clock), list[str]()
    runtime.call_at(1.0, lambda _: second.cancel())
    second = runtime.call_at(1.0, lambda _: fired.append("second"))
    clock.advance(1.0)
    runtime.fire_timers()
    assert fired == []
    assert runtime.next_deadline() is None


def test_cancelled_timers_are_removed() -> None:
    runtime = make_runtime(VirtualClock(0.0))
    for number in range(10_000):
        runtime.call_at(1000.0 + number, lambda _: None).cancel()
    # The private heap: cancelled timers have no effect except memory.
    assert len(runtime._timers.heap) < 100
    assert runtime.next_deadline() is None


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="descriptors have a timer only with epoll")
def test_progress_clears_the_readiness_of_a_cancelled_timer() -> None:
    runtime = make_runtime()
    pollable = runtime.pollable()
    with runtime.lock:
        fd = pollable.fileno(False)
        timer = runtime.call_at(REAL() + 0.02, lambda _: None)
        timer.cancel()
        assert runtime.next_deadline() is None
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(5000), "the descriptor was armed for the cancelled timer"
    with runtime.lock:
        runtime.progress()
    assert not poll.poll(0)
    with runtime.lock:
        pollable.close()


def test_signal_handlers_are_looked_at_once_when_a_runtime_gets_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []

    def refresh() -> bool:
        looks.append(None)
        return True

    monkeypatch.setattr(handlers, "refresh", refresh)
    monkeypatch.setattr(handlers, "INTERVAL", 1000.0)
    runtime, user = make_runtime(), object()
    runtime.use(user)
    for _ in range(3):
        runtime.drive(lambda: True, 0)
    assert len(looks) == 1
    runtime.release(user)
