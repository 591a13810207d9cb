"""A thread that serves peers while nobody here waits or polls.

One-sided traffic, retransmissions and connection requests want an answer although the application is busy with
something else. The thread waits for descriptors and timers like any other waiter, but holds back: what it is woken
for is first left to the application for a moment (``_GRACE``), and while the application makes progress by itself the
thread looks up ever more rarely. So a caller that waits or polls does not have to share the interpreter with it, and
an idle process does nothing at all. What the wire leaves to other processes it takes as well, if they have not after
that moment.

An ACK may wait until the application comes back with its next call (:meth:`QPMultiplexer.progress`). It may never come,
so ACKs wait only while the thread looks up often, as it does where they have lately; it sends what nobody else does.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rdmacm.progress.wake import Waiter

if TYPE_CHECKING:
    from rdmacm.progress.runtime import Runtime
    from rdmacm.soft.device.multiplexer import QPMultiplexer

__all__ = ["Helper"]

#: Seconds.
_GRACE = 0.002
_LONGEST_TICK = 0.04


class Helper:
    """The thread of one provider; :meth:`start` it with the wire, :meth:`stop` it with the last user."""

    def __init__(self, runtime: Runtime, mux: QPMultiplexer) -> None:
        self._runtime = runtime
        self._mux = mux
        self._stop: threading.Event | None = None
        self._waiter: Waiter | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look after the provider (its lock is held)."""
        if self._stop is None:
            self._stop = threading.Event()
            self._waiter = Waiter()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop, self._waiter), name="rdmacm-progress", daemon=True
            )
            self._thread.start()

    def wake(self) -> None:
        """The provider's descriptors or its first deadline have changed (its lock is held)."""
        if self._waiter is not None:
            self._waiter.wake.set()

    def stop(self) -> None:
        """Let the thread end (the provider's lock is held)."""
        if self._stop is not None:
            self.wake()  # first: the thread closes the descriptor as soon as it sees that it is to stop
            self._stop.set()
            self._stop = self._waiter = None

    def join(self) -> None:
        """Wait for the end of a thread that was told to stop (the provider's lock is not held)."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """In a child of fork(2), which has no such thread."""
        if self._waiter is not None:
            self._waiter.wake.close()
        self._stop = self._waiter = self._thread = None

    def _run(self, stop: threading.Event, waiter: Waiter) -> None:
        runtime, mux = self._runtime, self._mux
        wire = mux.wire
        seen, serving, tick = -1, False, _GRACE
        deferrals = 0
        while not stop.is_set():
            with runtime.lock:
                if stop.is_set():
                    break
                deadline = runtime.next_deadline()
                seconds = None if deadline is None else deadline - runtime.clock()
                waiter.prepare((*runtime.filenos(), *wire.unread_request_fds()), seconds)
            waiter.wait(None)
            with runtime.lock:
                others, seen = runtime.progress_count != seen, runtime.progress_count
            if not serving or others:
                if stop.wait(tick if others else _GRACE):
                    break
                with runtime.lock:
                    left = wire.resume_requests()
                if runtime.progress_count != seen and not left:
                    serving, tick = False, min(2 * tick, _LONGEST_TICK)
                    if mux.deferrals != deferrals:
                        deferrals, tick = self._watch(stop), _GRACE
                    seen = runtime.progress_count
                    continue
            tick = _GRACE
            with runtime.lock:
                if not stop.is_set():
                    wire.resume_requests()
                    runtime.progress()
                    seen, serving = runtime.progress_count, True
        waiter.wake.close()

    def _watch(self, stop: threading.Event) -> int:
        """Let ACKs wait for the application while it keeps coming; returns how often they did, so far."""
        runtime, mux = self._runtime, self._mux
        deferrals = seen = -1
        while deferrals != mux.deferrals and runtime.progress_count != seen:
            deferrals, seen = mux.deferrals, runtime.progress_count
            mux.may_defer_acks = True
            if stop.wait(_GRACE):
                break
            with runtime.lock:
                if mux.wire.resume_requests():
                    break
        with runtime.lock:
            mux.may_defer_acks = False
            mux.acknowledge()
        return deferrals
