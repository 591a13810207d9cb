"""The helper thread: it outlives its own faults, and says why it cannot be started."""

from __future__ import annotations

import errno
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import rdmacm
from rdmacm import CmId, RdmaError
from rdmacm.progress.wake import Waiter
from rdmacm.provider.cmstate import State
from rdmacm.soft import open_provider
from rdmacm.soft.helper import HELPER_THREAD, Helper
from support.clock import pause
from support.endpoints import connected

pytestmark = pytest.mark.usefixtures("faults_expected")


class Bug(Exception):
    """What raises here."""


def test_it_outlives_an_exception(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with connected() as (active, passive):
        runtime = open_provider().runtime
        before = runtime.errors.counts["helper"]
        happened, recovered = threading.Event(), threading.Event()
        prepare, forget = Waiter.prepare, Waiter.forget

        def raising(self: Waiter, *args: object) -> None:
            if threading.current_thread().name == HELPER_THREAD and not happened.is_set():
                happened.set()
                raise Bug
            prepare(self, *args)  # type: ignore[arg-type]

        def recovering(self: Waiter) -> None:
            forget(self)
            recovered.set()

        monkeypatch.setattr(Waiter, "prepare", raising)
        monkeypatch.setattr(Waiter, "forget", recovering)
        with runtime.lock:
            runtime.driver.deadlines_changed()
        assert recovered.wait(20)
        region = passive.register(bytearray(8), remote_write=True)
        active.write(region.remote, b"one side")  # the helper acknowledges what no caller waits for
        assert runtime.errors.counts["helper"] == before + 1
        runtime.errors.counts.clear()
        assert any(thread.name == HELPER_THREAD for thread in threading.enumerate())
    assert caplog.records[0].exc_info


class _Stop:
    """An event that nobody sets until the thread has waited some times."""

    def __init__(self, checks: int) -> None:
        self.waits: list[float] = []
        self._checks = checks

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) > self._checks


class _Mux:
    """A multiplexer with an application that makes progress as often as it is looked at, up to a number."""

    deferrals = 0
    gsi = SimpleNamespace(outbox=SimpleNamespace(wishes=0, may_wait=False))

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0

    @property
    def progress_count(self) -> int:
        self._count = min(self._count + 1, self._limit)
        return self._count


def test_it_takes_no_lock_while_the_application_makes_progress() -> None:
    without_a_lock: Any = SimpleNamespace(waiters=SimpleNamespace(polling=set()))
    for limit, ends in ((1000, True), (8, True), (1, False)):
        mux: Any = _Mux(limit)
        stop: Any = _Stop(checks=6)
        helper = Helper(without_a_lock, mux, without_a_lock)
        mux.progress_count  # noqa: B018 (the first look)
        assert helper._leave_to_application(stop, 0.002, ()) is ends
        assert stop.waits == [0.002, 0.004, 0.008, 0.016, 0.032, 0.04, 0.04][: len(stop.waits)]
        assert len(stop.waits) == {1000: 7, 8: 4, 1: 1}[limit]


def test_it_leaves_what_has_arrived_to_a_thread_that_waits() -> None:
    """A machine that is busy lets that thread run late; both would compete for the interpreter."""
    runtime: Any = SimpleNamespace(waiters=SimpleNamespace(polling={"a thread"}))
    mux: Any = _Mux(1)
    stop: Any = _Stop(checks=6)
    helper = Helper(runtime, mux, runtime)
    mux.progress_count  # noqa: B018 (the first look)
    for _ in range(5):
        assert helper._leave_to_application(stop, helper._interval, ())
    assert not helper._leave_to_application(stop, helper._interval, ()), "a signal handler may keep that thread"
    assert stop.waits == [0.002, 0.004, 0.008, 0.016, 0.032, 0.04]


class _Outbox:
    """Management datagrams: one always waits."""

    may_wait, sends, count, asked = False, 0, 1, 0

    @property
    def wishes(self) -> int:
        self.asked += 1
        return self.asked

    def send(self) -> None:
        self.sends += 1


def test_it_sends_what_has_waited_while_the_application_makes_progress() -> None:
    """The progress of the compiled core alone sends no management datagrams."""
    mux: Any = _Mux(1000)
    mux.gsi = SimpleNamespace(outbox=_Outbox())
    waiters = SimpleNamespace(polling=set())
    runtime: Any = SimpleNamespace(lock=threading.RLock(), has_more_events=True, waiters=waiters)
    stop: Any = _Stop(checks=6)
    nothing: Any = None
    assert Helper(runtime, mux, nothing)._leave_to_application(stop, 0.002, ())
    assert stop.waits == [0.002, 0.004, 0.008, 0.016, 0.02, 0.02, 0.02]
    assert mux.gsi.outbox.sends == 1 + 5, "at the first look it was new; then at each, and at the end"
    assert not runtime.has_more_events
    assert not mux.gsi.outbox.may_wait


def test_a_program_that_polls_slowly_makes_full_progress() -> None:
    """The helper leaves all work to a program that polls, so a timer must not wait for a number of polls."""
    with connected() as (active, _passive):
        runtime, fired = open_provider().runtime, list[float]()
        cq = active.id.send_cq
        assert cq is not None
        with runtime.lock:
            runtime.call_at(runtime.clock() + 0.01, fired.append)
        polls = 0
        while not fired and polls < 40:
            assert not cq.poll()
            pause(0.002, "the program's other work")
            polls += 1
        assert polls < 40


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_id_is_collected_in_it_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts it holds the lock, and waits until it begins."""
    set_ident = threading.Thread._set_ident  # type: ignore[attr-defined]
    cmid: Any = CmId()
    backend = cmid._backend
    cycle: list[object] = [cmid]
    cycle.append(cycle)
    forgotten = [cycle]
    del cmid, cycle

    def collecting(self: threading.Thread) -> None:
        set_ident(self)
        if self.name == HELPER_THREAD and forgotten:
            forgotten.clear()
            gc.collect()

    def listen() -> None:
        with rdmacm.listen(("127.0.0.1", 0)):
            pass

    monkeypatch.setattr(threading.Thread, "_set_ident", collecting)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the threads wait for each other"
    assert not forgotten
    open_provider().drive(lambda: True, 0)
    assert backend.state is State.DESTROYING


def test_helper_start_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_provider().host
    assert not host.mux.opened

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RdmaError) as caught:
            rdmacm.listen(("127.0.0.1", 0))
        assert caught.value.errno == errno.EAGAIN
        assert not host.mux.opened
        assert not host.mux.wire.filenos()
    with connected() as (active, passive):
        active.send(b"hello")
        assert passive.recv() == b"hello"
