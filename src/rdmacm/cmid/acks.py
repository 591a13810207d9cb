"""Acknowledgement of events, and waiting for it: rdma_ack_cm_event(3), rdma_destroy_id(3).

There is one lock and one condition for all ids. Waiting is rare, and a lock for each of ten thousand ids costs memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rdmacm.interrupts.handlers import checkpoint
from rdmacm.interrupts.protection import hold_during_fork

__all__ = ["ACK_LOCK", "wait_acked", "waiters", "wake_waiters"]

#: Seconds after which a wait is interrupted at the latest. A condition itself must not be: it would lose its lock.
_LATENCY = 0.05

#: Guards the counts of events. Re-entrant: the garbage collector may acknowledge an event while its thread holds it.
ACK_LOCK = threading.RLock()
hold_during_fork(ACK_LOCK)
_changed = threading.Condition(ACK_LOCK)
#: How many threads wait: notifying takes time even where none does.
waiters = 0


def wake_waiters() -> None:
    """Wake the threads that wait for an acknowledgement (ACK_LOCK is held)."""
    _changed.notify_all()


def wait_acked(done: Callable[[], bool]) -> None:
    """Wait until ``done()`` is true; it is evaluated after each acknowledgement, with the lock held."""
    global waiters
    with _changed:
        while not done():
            waiters += 1
            try:
                _changed.wait(_LATENCY)
            finally:
                waiters -= 1
            checkpoint()
