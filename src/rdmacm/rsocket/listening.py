"""The state of a listener: requests are answered as they come, up to the backlog, as TCP's are."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import replace

from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType
from rdmacm.endpoint.admission import Admission
from rdmacm.endpoint.dispatcher import Dispatcher, Observable
from rdmacm.endpoint.listening import ListenAddress, create_bound_id
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.wire import WireError
from rdmacm.rsocket.options import StreamOptions
from rdmacm.rsocket.stream import StreamState, faults

#: Connections that wait to be accepted, at most; librdmacm's listeners have the same limit of requests.
_MAX_BACKLOG = 1024


def listen_for_streams(dispatcher: Dispatcher, address: ListenAddress, backlog: int) -> StreamListener:
    """A listener with the usual options. An empty host is any address of both families. The lock is held."""
    cmid = create_bound_id(dispatcher, address)
    try:
        return StreamListener(dispatcher, cmid, StreamOptions(), backlog)
    except BaseException:
        cmid.destroy()
        raise


class StreamListener(Observable):
    """One listener. Changes when a connection is ready and when it is closed.

    Methods are called with the provider's lock held, unless they say otherwise.
    """

    def __init__(self, dispatcher: Dispatcher, cmid: CmId, options: StreamOptions, backlog: int) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        #: The listening id.
        self.cmid = cmid
        self.options = options
        #: How many connections may wait to be accepted.
        self._limit = min(max(backlog, 1), _MAX_BACKLOG)
        #: Whether the id may report a request.
        self._is_asking = False
        #: Why it has ended; None while it listens.
        self.error: RdmaError | None = None
        self.is_closed: bool = False
        self._admission: Admission[StreamState] = Admission(dispatcher.clock, self._admitted)
        cmid.context = self
        self.ask()
        cmid.listen(0)
        dispatcher.retain()

    def set_backlog(self, backlog: int) -> None:
        """A further listen()."""
        self._limit = min(max(backlog, 1), _MAX_BACKLOG)
        self.ask()

    def ask(self) -> None:
        """Have the id report one more request, if there is room. The others wait in its backlog, and cost little."""
        if not self._is_asking and not self.is_closed and self._admission.has_room(self._limit):
            self._is_asking = True
            self.cmid.allow_requests(1)

    def handle(self, event: CmEvent) -> None:
        """Process an event of the listening id."""
        if event.type is CmEventType.CONNECT_REQUEST:
            self._is_asking = False
            self._answer(event.id, event.private_data)
            self.ask()
        elif event.type is CmEventType.DEVICE_REMOVAL:
            self.error = cm_error(errno.ENODEV, event.message or "the device was removed", "accept")
            self.changed()

    def _answer(self, cmid: CmId, private_data: bytes) -> None:
        state = StreamState(self.dispatcher, cmid, replace(self.options))
        try:
            state.accept(private_data)
        except WireError:
            faults["NO_RSOCKET"] += 1
            with contextlib.suppress(RdmaError):
                cmid.reject()
            state.release()
        except RdmaError:  # the peer gave up, or the device lacks something; serve the others
            state.release()
        else:
            self._admission.add(state)

    def _admitted(self) -> None:
        self.ask()
        self.changed()

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` returns a connection, or raises."""
        return self._admission.is_ready or self.error is not None or self.is_closed

    def take(self) -> StreamState | None:
        """The next connection, or None if there is none yet. EBADF: it is closed; ENODEV: its device was removed."""
        if self.is_closed:
            raise cm_error(errno.EBADF, "the socket is closed", "accept")
        state = self._admission.take()
        if state is None and self.error is not None:
            raise self.error
        self.ask()
        return state

    def release(self) -> None:
        """Stop listening, and drop all connections that were not accepted. The lock is not held."""
        if self.dispatcher.drive_once(self._begin_release):
            self._admission.close()
            self.cmid.context = None
            self.cmid.destroy()
            self.wakers.clear()
            self.dispatcher.release()

    def _begin_release(self) -> bool:
        if self.is_closed:
            return False
        self.is_closed = True
        self.changed()
        with contextlib.suppress(RdmaError):
            self.cmid.write_cm_event()  # wakes threads in accept()
        return True
