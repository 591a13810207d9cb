"""Asynchronous events: ibv_get_async_event(3), ibv_ack_async_event(3)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rdmacm.interrupts.protection import finalize
from rdmacm.verbs.backend import AsyncQueueBackend
from rdmacm.verbs.enums import EventType
from rdmacm.verbs.resource import Resource


class _OpenDevice(Protocol):
    @property
    def _async_queue(self) -> AsyncQueueBackend:
        """The queue of its events."""


class _Element(Protocol):
    @property
    def context(self) -> _OpenDevice:
        """The open device that the object was made from."""


class EventOwner(weakref.ref[_Element]):
    """The owner of an object's events (:class:`rdmacm.verbs.backend.AsyncEvents`).

    It is weak, as events that nobody reads would keep a forgotten object alive. It is equal to itself only, so that
    the events can be dropped when the object is gone.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def post(self, event: EventType) -> None:
        element = self()
        if element is not None:
            element.context._async_queue.post(self, event)


class AsyncEvent:
    """An asynchronous event, ``struct ibv_async_event``; made by :meth:`rdmacm.Context.get_async_event`.

    Acknowledge it with :meth:`ack`, or by leaving a ``with`` block: until then, its queue pair, completion queue or
    shared receive queue cannot be closed (EBUSY). An event that is garbage collected acknowledges itself.
    """

    __slots__ = {
        "event_type": "The :class:`EventType`.",
        "element": "The QP, CQ or SRQ it is about; the number of a port, from 1; 0 for an event of the device.",
        "__weakref__": "Weak references to it.",
        "_pending": "Whether it is still to be acknowledged.",
    }

    def __init__(self, event_type: EventType, element: Resource | int) -> None:
        self._pending = False
        self.event_type: EventType = event_type
        self.element: object = element

    @classmethod
    def _of(cls, event_type: EventType, owner: object) -> AsyncEvent | None:
        """The event of an object (a weak reference) or a port number; None if the object is closed."""
        if isinstance(owner, int):
            return cls(event_type, owner)
        element = owner() if isinstance(owner, weakref.ref) else None
        if not isinstance(element, Resource):
            return None
        event = cls(event_type, element)
        event._pending = element._hold(event)
        return event if event._pending else None

    def ack(self) -> None:
        """Acknowledge the event, ibv_ack_async_event(3). More than once does nothing."""
        if self._pending:
            self._pending = False
            assert isinstance(self.element, Resource)
            self.element._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ack()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if self._pending:
            finalize(self, self.ack)

    def __repr__(self) -> str:
        element = f"port {self.element}" if isinstance(self.element, int) else repr(self.element)
        return f"<AsyncEvent {self.event_type} {element}>"
