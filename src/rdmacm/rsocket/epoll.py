"""epoll(7) for rsockets: the calls ``repoll_create1`` and its kin, which later versions of librdmacm have.

An object that is registered is an rsocket, an ordinary socket or another object with a descriptor, or the number of a
descriptor. A wait is one of :func:`rdmacm.rsocket.poll`, so events are reported as long as they last, or once with
EPOLLONESHOT.
"""

from __future__ import annotations

import errno
import select
import signal
import threading
from collections.abc import Collection
from time import monotonic
from typing import NamedTuple

from rdmacm.errors import cm_error
from rdmacm.progress.wake import Wake
from rdmacm.rsocket.polling import FileLike, poll
from rdmacm.rsocket.sockets import socket

CTL_ADD, CTL_DEL, CTL_MOD = 1, 2, 3
#: Bits that poll(2) and epoll(7) have in common; those above change how epoll reports.
_EVENTS = 0xFFFF
ONESHOT = 1 << 30
_KNOWN = _EVENTS | ONESHOT


class _Entry(NamedTuple):
    file: FileLike
    #: What to wait for; 0 once an entry with EPOLLONESHOT was reported.
    events: int
    data: object


class Epoll:
    """What ``repoll_create1`` makes. Several threads may use it. A closed socket is no longer part of it."""

    def __init__(self) -> None:
        #: By descriptor, or by the identity of an rsocket. What was reported last stands behind the others.
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._lock = threading.Lock()
        #: For each thread that waits, what wakes it to look at the entries again.
        self._waiting: list[Wake] = []
        self._is_closed = False

    def ctl(self, operation: int, file: FileLike, event: tuple[int, object] | None) -> None:
        """repoll_ctl: ``event`` has the events to wait for, and the user's data; EPOLL_CTL_DEL needs none.

        EEXIST: it is registered already; ENOENT: it is not; EBADF: it is closed; EINVAL: another operation, no event,
        or a bit of ``events`` that is neither one of poll(2) nor EPOLLONESHOT.
        """
        if operation not in (CTL_ADD, CTL_DEL, CTL_MOD):
            raise cm_error(errno.EINVAL, f"there is no operation {operation}", "repoll_ctl")
        if _is_gone(file):
            raise cm_error(errno.EBADF, "the descriptor is closed", "repoll_ctl")
        key = _key(file)
        with self._lock:
            self._check("repoll_ctl")
            if operation == CTL_ADD and key in self._entries:
                raise cm_error(errno.EEXIST, "it is registered already", "repoll_ctl", hint="EPOLL_CTL_MOD")
            if operation != CTL_ADD and key not in self._entries:
                raise cm_error(errno.ENOENT, "it is not registered", "repoll_ctl", hint="EPOLL_CTL_ADD")
            if operation == CTL_DEL:
                del self._entries[key]
            else:
                if event is None or event[0] & ~_KNOWN:
                    text = "no event" if event is None else f"events 0x{event[0] & ~_KNOWN:x} are not reported"
                    raise cm_error(errno.EINVAL, text, "repoll_ctl", hint="bits of poll(2), and EPOLLONESHOT")
                # Errors are reported always, so an entry that waits for nothing else has a bit too.
                self._entries[key] = _Entry(file, event[0] | select.POLLERR, event[1])
            for wake in self._waiting:
                wake.set()

    def wait(self, most: int, timeout: float | None, mask: Collection[int] | None = None) -> list[tuple[int, object]]:
        """repoll_wait: up to ``most`` events, each with the user's data; none after ``timeout`` seconds.

        ``mask``: signals that are blocked meanwhile, as in repoll_pwait. EINVAL: ``most`` is not positive; EBADF: the
        epoll is closed.
        """
        if most <= 0:
            raise cm_error(errno.EINVAL, f"room for {most} events", "repoll_wait")
        before = None if mask is None else signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return self._wait(most, timeout)
        finally:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait(self, most: int, timeout: float | None) -> list[tuple[int, object]]:
        until = None if timeout is None else monotonic() + timeout
        wake = Wake()
        with self._lock:
            self._waiting.append(wake)
        try:
            while True:
                wake.clear()
                with self._lock:
                    self._check("repoll_wait")
                    for key in [key for key, entry in self._entries.items() if _is_gone(entry.file)]:
                        del self._entries[key]
                    wanted = [(entry.file, entry.events & _EVENTS) for entry in self._entries.values() if entry.events]
                left = None if until is None else max(until - monotonic(), 0.0)
                ready = poll([*wanted, (wake.fd, select.POLLIN)], left)
                found = self._take(most, ready)
                if found or (until is not None and monotonic() >= until):
                    return found
        finally:
            with self._lock:
                self._waiting.remove(wake)
            wake.close()

    def _take(self, most: int, ready: list[tuple[FileLike, int]]) -> list[tuple[int, object]]:
        found: list[tuple[int, object]] = []
        with self._lock:
            for file, events in ready:
                key = _key(file)
                entry = self._entries.get(key)
                # Another thread may have changed the entry, or taken an event that is reported once.
                if entry is None or not entry.events or len(found) == most:
                    continue
                del self._entries[key]
                if events & select.POLLNVAL:
                    continue
                self._entries[key] = entry._replace(events=0) if entry.events & ONESHOT else entry
                found.append((events, entry.data))
        return found

    def close(self) -> None:
        """rclose: threads that wait get EBADF. The sockets stay open."""
        with self._lock:
            self._is_closed = True
            self._entries.clear()
            for wake in self._waiting:
                wake.set()

    def _check(self, call: str) -> None:
        if self._is_closed:
            raise cm_error(errno.EBADF, "the epoll is closed", call)


def _key(file: FileLike) -> tuple[str, int]:
    if isinstance(file, socket):
        return "rsocket", id(file)
    return "descriptor", file if isinstance(file, int) else file.fileno()


def _is_gone(file: FileLike) -> bool:
    if isinstance(file, socket):
        return file._is_closed
    return not isinstance(file, int) and file.fileno() < 0
