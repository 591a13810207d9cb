"""The helper thread, which serves peers while the application neither waits nor polls.

One-sided operations, retransmissions and connection requests need an answer even if the application is busy. With the
compiled core a thread of the core answers the usual packets of queue pairs; the helper has the rest. The helper
waits for descriptors and timers like any waiting thread. When something arrives, it first gives the application a grace
period to handle it. As long as the application makes progress, the helper checks at growing intervals, so that it does
not compete with the application for the interpreter. In an idle process it sleeps. After the grace period it also takes
the requests that this process had left to other processes of the host, if none of them has.

A caller may defer ACKs to its next call (:meth:`QPMultiplexer.progress`), which may never come. So ACKs are deferred
only while the helper checks at short intervals, which it does when callers have deferred any; it then sends those whose
caller has not come back. The thread of the compiled core does this for the connections of the core.
"""

from __future__ import annotations

import errno
import select
import threading
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.interrupts.protection import run_finalizers
from rdmacm.progress.wake import Waiter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdmacm.progress.runtime import Runtime
    from rdmacm.provider.statistics import CountersServer
    from rdmacm.soft.device.multiplexer import QPMultiplexer

#: The name of the thread.
HELPER_THREAD = "rdmacm-progress"

#: Seconds. The time that the application gets to handle what has arrived.
_GRACE = 0.002
#: Seconds. The longest interval between two checks while the application makes progress; the first is the grace period.
_LONGEST_INTERVAL = 0.04


class Helper:
    """The helper thread of one provider. It runs from the opening of the wire until the last user has gone."""

    def __init__(self, runtime: Runtime, mux: QPMultiplexer, statistics: CountersServer) -> None:
        self._runtime = runtime
        self._mux = mux
        #: Tells other processes the counters of this one.
        self._statistics = statistics
        #: Set to end the thread; None while none runs.
        self._stop: threading.Event | None = None
        #: The thread waits with it; None while none runs.
        self._waiter: Waiter | None = None
        #: Seconds to the next check whether the application makes progress.
        self._interval = _GRACE
        #: The last thread that was started.
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it runs. The lock is held.

        EAGAIN if the system allows no further thread.
        """
        if self._stop is None:
            self._stop = threading.Event()
            self._waiter = Waiter()
            self._statistics.open()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop, self._waiter), name=HELPER_THREAD, daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                self.abandon()
                text = f"the helper thread cannot be started: {error}"
                raise cm_error(errno.EAGAIN, text, "open_device", hint="`ulimit -u`") from error

    def wake(self) -> None:
        """The provider's descriptors or its first deadline have changed. The lock is held."""
        if self._waiter is not None:
            self._waiter.wake.set()

    def stop(self) -> None:
        """Make the thread end. The lock is held."""
        if self._stop is not None:
            self.wake()  # before the event is set: then the thread closes the descriptor
            self._stop.set()
            self._stop = self._waiter = None
            self._statistics.close()

    def join(self) -> None:
        """Wait for the end of the thread after :meth:`stop`. The lock is not held."""
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """In a child of fork(2), which has no such thread."""
        if self._waiter is not None:
            self._waiter.wake.close()
        self._statistics.close()
        self._stop = self._waiter = self._thread = None

    def _run(self, stop: threading.Event, waiter: Waiter) -> None:
        while not stop.is_set():
            try:
                self._serve(stop, waiter)
            except Exception as error:
                self._runtime.errors.report("helper", "the helper thread begins again", error)
                self._mux.may_defer_acks = False
                waiter.forget()
                stop.wait(_LONGEST_INTERVAL)
        waiter.wake.close()

    def _serve(self, stop: threading.Event, waiter: Waiter) -> None:
        """Serve the peers whenever the application does not, until ``stop`` is set."""
        runtime, mux = self._runtime, self._mux
        wire = mux.wire
        # The last progress count seen, and whether this thread serves the peers.
        seen, serving = -1, False
        while not stop.is_set():
            with runtime.lock:
                if stop.is_set():
                    break
                deadline = runtime.next_deadline()
                seconds = None if deadline is None else deadline - runtime.clock()
                fds = mux.background_filenos(runtime.filenos())
                unread = wire.unread_request_fds()
                waiter.prepare((*fds, *unread, *self._statistics.filenos()), seconds)
            waiter.wait(None)
            if self._statistics.serve():
                continue
            if mux.progress_count != seen or not serving:
                interval = self._interval if mux.progress_count != seen else _GRACE
                serving = False
                if self._leave_to_application(stop, interval, unread):
                    seen = mux.progress_count
                    continue
            self._interval = _GRACE
            run_finalizers()
            with runtime.lock:
                if not stop.is_set():
                    wire.resume_requests()
                    mux.progress_in_background()
                    seen, serving = mux.progress_count, True

    def _leave_to_application(self, stop: threading.Event, interval: float, unread: Sequence[int]) -> bool:
        """Wait while the application makes progress. False if it has made none, and so this thread has to.

        As long as it makes progress, this thread does not wait for the lock: the application would make a system call
        each time that it releases it, and the two would compete for the interpreter. ``unread`` are the descriptors of
        requests that are left to other processes.
        """
        mux = self._mux
        deferrals, has_made_progress = mux.deferrals, False
        requests = select.poll()
        for fd in unread:
            requests.register(fd, select.POLLIN)
        while True:
            seen = mux.progress_count
            if stop.wait(interval):
                return True
            left = False
            if requests.poll(0):
                with self._runtime.lock:
                    left = mux.wire.resume_requests()
            if left or mux.progress_count == seen:
                return has_made_progress and not left
            has_made_progress = True
            interval = self._interval = min(2 * interval, _LONGEST_INTERVAL)
            if mux.deferrals != deferrals:
                deferrals, interval = self._permit_deferring(stop), _GRACE

    def _permit_deferring(self, stop: threading.Event) -> int:
        """Let callers defer ACKs as long as they come back within the grace period.

        Returns :attr:`QPMultiplexer.deferrals` as it was last read.
        """
        runtime, mux = self._runtime, self._mux
        deferrals = seen = -1
        while deferrals != mux.deferrals and mux.progress_count != seen:
            deferrals, seen = mux.deferrals, mux.progress_count
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
