"""The helper thread, which serves peers while the application neither waits nor polls.

One-sided operations, retransmissions and connection requests need an answer even if the application is busy. With the
compiled core a thread of the core answers the usual packets of queue pairs; the helper has the rest. The helper waits
for descriptors and timers like any waiting thread. When something arrives, it first gives the application a grace
period to handle it. As long as the application makes progress, the helper checks at growing intervals, so that it does
not compete with the application for the interpreter. It does so, too, while a thread of the application waits: what has
arrived has woken that thread, which needs a processor or the interpreter, and the helper would take them from it. A
thread that does nothing for 0.1 s may be in a signal handler, so then the helper takes over. In an idle process it
sleeps. After the grace period it also takes the requests that this process had left to other processes of the host, if
none of them has.

A caller may defer ACKs to its next call (:meth:`QPMultiplexer.progress`), which may never come. So ACKs are deferred
only while the helper checks at short intervals, which it does when callers have deferred any; it then sends those whose
caller has not come back. The thread of the compiled core does this for the connections of the core. In the same way
management datagrams wait only while the helper checks every 20 ms; it then sends those that have waited since the last
check.
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
#: Seconds. The interval between two checks while management datagrams may wait.
_MAD_INTERVAL = 0.02
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
        #: How often management datagrams had been sent at the last look at those that wait.
        self._sends_seen = -1
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
                interval = self._interval if mux.progress_count != seen or runtime.waiters.polling else _GRACE
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
        """Wait while the application makes progress. False if it makes none, and so this thread has to.

        As long as it makes progress, this thread does not wait for the lock: the application would make a system call
        each time that it releases it, and the two would compete for the interpreter. ``unread`` are the descriptors of
        requests that are left to other processes.
        """
        mux, outbox = self._mux, self._mux.gsi.outbox
        deferrals, wishes, has_made_progress = mux.deferrals, outbox.wishes, False
        requests = select.poll()
        for fd in unread:
            requests.register(fd, select.POLLIN)
        try:
            while True:
                seen = mux.progress_count
                if stop.wait(interval):
                    return True
                left = False
                if requests.poll(0):
                    with self._runtime.lock:
                        left = mux.wire.resume_requests()
                if left:
                    return False
                if mux.progress_count == seen:
                    if interval >= _LONGEST_INTERVAL or not self._runtime.waiters.polling:
                        return has_made_progress
                    self._interval = min(2 * interval, _LONGEST_INTERVAL)
                    return True
                has_made_progress = True
                interval = self._interval = min(2 * interval, _LONGEST_INTERVAL)
                if outbox.wishes != wishes:
                    wishes, outbox.may_wait, interval = outbox.wishes, True, min(interval, _MAD_INTERVAL)
                    self._send_old()
                elif outbox.may_wait:
                    self._stop_waiting()
                if mux.deferrals != deferrals:
                    deferrals, interval = self._permit_deferring(stop), _GRACE
        finally:
            if outbox.may_wait:
                self._stop_waiting()

    def _send_old(self) -> None:
        """Send the management datagrams if they have waited since the last call. As a rule it takes no lock."""
        outbox = self._mux.gsi.outbox
        if outbox.count and outbox.sends == self._sends_seen:
            with self._runtime.lock:
                self._runtime.has_more_events = False  # its caller may not be back for long
                outbox.send()
        self._sends_seen = outbox.sends

    def _stop_waiting(self) -> None:
        """From now on no management datagram waits."""
        with self._runtime.lock:
            self._mux.gsi.outbox.may_wait = False
            self._mux.gsi.outbox.send()

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
            self._send_old()
            with runtime.lock:
                if mux.wire.resume_requests():
                    break
        with runtime.lock:
            mux.may_defer_acks = False
            mux.acknowledge()
        return deferrals
