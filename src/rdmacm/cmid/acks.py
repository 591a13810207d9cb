"""Acknowledgement of events, and waiting for it: rdma_ack_cm_event(3), rdma_destroy_id(3).

There is one lock and one condition for all ids. Waiting is rare, and a lock for each of ten thousand ids costs memory.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from rdmacm.errors import cm_error
from rdmacm.interrupts.handlers import checkpoint
from rdmacm.interrupts.protection import hold_during_fork

#: Seconds after which a wait is interrupted at the latest. A condition itself must not be: it would lose its lock.
_LATENCY = 0.05
#: How many of these a wait takes until it is told: a second.
_PATIENCE = 20

#: Guards the counts of events. Re-entrant: the garbage collector may acknowledge an event while its thread holds it.
ACK_LOCK = threading.RLock()
hold_during_fork(ACK_LOCK)
_changed = threading.Condition(ACK_LOCK)
#: How many threads wait: notifying takes time even where none does.
waiters: int = 0


def wake_waiters() -> None:
    """Wake the threads that wait for an acknowledgement (ACK_LOCK is held)."""
    _changed.notify_all()


def wait_acked(done: Callable[[], bool], call: str) -> None:
    """Wait until ``done()`` is true; it is evaluated after each acknowledgement, with the lock held.

    ``call`` is what waits. If it takes a second, it is told: a program that forgets an event waits for ever.
    """
    global waiters
    waits = 0
    with _changed:
        while not done():
            waiters += 1
            try:
                waits += not _changed.wait(_LATENCY)
            finally:
                waiters -= 1
            if waits == _PATIENCE:
                waits += 1
                import logging

                text = "%s waits for another thread to ack() an event that it has fetched (rdmacm doctor C4)"
                logging.getLogger("rdmacm").warning(text, call)
            checkpoint()


class EventOwner:
    """Counts events that are fetched and acknowledged: those of an id, or of one join of a group."""

    __slots__ = {
        "_events_completed": "How many events were acknowledged; ACK_LOCK guards it.",
        "_holders": "The threads that hold an event that was fetched, once for each event.",
        "_reported": "See :class:`rdmacm.provider.Owner`.",
    }

    def __init__(self) -> None:
        self._events_completed = 0
        self._holders: list[int] = []
        self._reported = self._holders.append

    def _acknowledged(self, thread: int) -> None:
        """Count an event that ``thread`` fetched as acknowledged (ACK_LOCK is held)."""
        self._events_completed += 1
        if thread in self._holders:
            self._holders.remove(thread)

    def _check_holder(self, call: str, what: str, address: str | None = None, hint: str = "") -> None:
        """Raise EDEADLK if this thread holds an event: it would wait for itself."""
        if threading.get_ident() in self._holders:
            text = f"this thread holds an event of the {what}, and would wait for itself"
            raise cm_error(errno.EDEADLK, text, call, address, f"ack() the event first{hint}")
