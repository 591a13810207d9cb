"""Waiting for several sockets: rsockets, and whatever else has a descriptor.

A descriptor of an rsocket says only that there is something to do (:meth:`rdmacm.rsocket.socket.fileno`). So these
functions ask rsockets themselves what they are ready for, and wait for the descriptors of their providers.
"""

from __future__ import annotations

import contextlib
import select as _select
import selectors
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Protocol, TypeAlias

from rdmacm.endpoint.dispatcher import Dispatcher
from rdmacm.interrupts.protection import interruptible
from rdmacm.progress.wake import Wake
from rdmacm.rsocket.sockets import socket


class HasFileno(Protocol):
    """An object with a descriptor: an rsocket, an ordinary socket, a file."""

    def fileno(self) -> int:
        """The descriptor."""


#: A descriptor, or an object that has one.
FileLike: TypeAlias = int | HasFileno

_ALWAYS = _select.POLLERR | _select.POLLHUP | _select.POLLNVAL


def poll(entries: Iterable[tuple[FileLike, int]], timeout: float | None = None) -> list[tuple[FileLike, int]]:
    """Wait until some of the objects are ready; return those, each with what it is ready for. rpoll in rsocket(7).

    ``entries``: objects, each with the bits of poll(2) to wait for (``select.POLLIN``, ``POLLOUT``): rsockets, ordinary
    sockets, numbers of descriptors. POLLERR and POLLHUP are reported always, POLLNVAL of a closed socket. ``timeout``
    is in seconds; None waits for ever, 0 not at all. Without any ready object the list is empty.
    """
    wanted = list(entries)
    own = [(entry, bits) for entry, bits in wanted if isinstance(entry, socket)]
    others = [(entry, bits) for entry, bits in wanted if not isinstance(entry, socket)]
    dispatchers = {id(each._dispatcher): each._dispatcher for each, _ in own if each._dispatcher is not None}
    if not others and len(dispatchers) == 1 and all(each._descriptor_beside() < 0 for each, _ in own):
        (only,) = dispatchers.values()
        only.check_fork()
        return only.wait(lambda: _ready(own), timeout)
    return _poll_descriptors(own, others, list(dispatchers.values()), timeout)


def _ready(own: list[tuple[socket, int]]) -> list[tuple[FileLike, int]]:
    found: list[tuple[FileLike, int]] = []
    for each, bits in own:
        events = _select.POLLNVAL if each._is_closed else each._poll() & (bits | _ALWAYS)
        if events:
            found.append((each, events))
    return found


def _poll_descriptors(
    own: list[tuple[socket, int]],
    others: list[tuple[FileLike, int]],
    dispatchers: list[Dispatcher],
    timeout: float | None,
) -> list[tuple[FileLike, int]]:
    until = None if timeout is None else monotonic() + timeout
    poller = _select.poll()
    by_number: dict[int, list[FileLike]] = {}
    for entry, bits in others:
        number = entry if isinstance(entry, int) else entry.fileno()
        if number < 0:
            return [(entry, _select.POLLNVAL)]
        by_number.setdefault(number, []).append(entry)
        poller.register(number, bits)
    for dispatcher in dispatchers:
        poller.register(dispatcher.channel.fileno(), _select.POLLIN)
    for each, _ in own:
        if each._descriptor_beside() >= 0:
            poller.register(each._descriptor_beside(), _select.POLLIN)
    with _woken(own) as wake:
        poller.register(wake.fd, _select.POLLIN)
        while True:
            wake.clear()
            for dispatcher in dispatchers:
                dispatcher.check_fork()
                dispatcher.wait(_nothing, 0)
            for each, _ in own:
                each._serve()
            found = _ready(own)
            left = 0.0 if found else None if until is None else max(until - monotonic(), 0.0)
            for number, events in _sleep(poller, left):
                found += [(entry, events) for entry in by_number.get(number, ())]
            if found or (until is not None and monotonic() >= until):
                return found


@interruptible
def _sleep(poller: _select.poll, seconds: float | None) -> list[tuple[int, int]]:
    return poller.poll(None if seconds is None else seconds * 1000)


@contextlib.contextmanager
def _woken(own: list[tuple[socket, int]]) -> Iterator[Wake]:
    """A descriptor that is readable when one of the sockets has changed."""
    wake = Wake()
    watched = [each._observed() for each, _ in own]
    try:
        for part in watched:
            if part is not None:
                part.wakers.append(wake.set)
        yield wake
    finally:
        for part in watched:
            if part is not None and wake.set in part.wakers:
                part.wakers.remove(wake.set)
        wake.close()


def _nothing() -> None:
    pass


def select(
    rlist: Iterable[FileLike], wlist: Iterable[FileLike], xlist: Iterable[FileLike], timeout: float | None = None
) -> tuple[list[FileLike], list[FileLike], list[FileLike]]:
    """As :func:`select.select`, also for rsockets; rselect in rsocket(7). Nothing exceptional happens to an rsocket."""
    readers, writers, others = list(rlist), list(wlist), list(xlist)
    entries = [(each, _select.POLLIN) for each in readers]
    entries += [(each, _select.POLLOUT) for each in writers]
    entries += [(each, _select.POLLPRI) for each in others if not isinstance(each, socket)]
    found = poll(entries, timeout)
    ended = _select.POLLERR | _select.POLLHUP

    def those(given: list[FileLike], bits: int) -> list[FileLike]:
        ready = [id(entry) for entry, events in found if events & bits]
        return [entry for entry in given if id(entry) in ready]

    return (
        those(readers, _select.POLLIN | ended),
        those(writers, _select.POLLOUT | _select.POLLERR),
        those(others, _select.POLLPRI),
    )


class Selector(selectors._BaseSelectorImpl):
    """A selector of the module :mod:`selectors` for rsockets, ordinary sockets and descriptors."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The keys of ready objects, each with what it is ready for; ``timeout`` in seconds, None for ever."""
        keys = {id(key.fileobj): key for key in self.get_map().values()}
        bits = {selectors.EVENT_READ: _select.POLLIN, selectors.EVENT_WRITE: _select.POLLOUT}
        entries = [
            (key.fileobj, sum(bit for event, bit in bits.items() if key.events & event)) for key in keys.values()
        ]
        found = []
        for fileobj, events in poll(entries, timeout if timeout is None else max(timeout, 0.0)):
            key = keys[id(fileobj)]
            ready = selectors.EVENT_READ * bool(events & ~_select.POLLOUT)
            ready |= selectors.EVENT_WRITE * bool(events & ~_select.POLLIN)
            if ready & key.events:
                found.append((key, ready & key.events))
        return found
