"""The state of one listener: the next request, and the connections that ``accept`` has not returned."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import replace
from functools import partial
from socket import AF_INET, AF_INET6
from typing import TypeAlias

from rdmacm.address import InetAddr, SockAddr, format_address, lookup_address
from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.endpoint.admission import RTU_GRACE, Admission
from rdmacm.endpoint.connection_state import ConnectionOptions, ConnectionState
from rdmacm.endpoint.dispatcher import Dispatcher, Expired, Observable, Routine, Wait
from rdmacm.errors import CmTimeoutError, RdmaError, cm_error

#: What :func:`rdmacm.listen` accepts as an address.
ListenAddress: TypeAlias = "SockAddr | tuple[None, int]"

#: Maximum number of connections in progress, or established and not returned by ``accept``; further requests wait.
_MAX_IN_PROGRESS = 64
#: Bytes of private data in a REP (InfiniBand Architecture 12.6.8: 196).
_MAX_ACCEPT_DATA = 196
#: Returned by :meth:`ListenerState._take_connection` when requests wait for room.
_FULL = object()
#: Returned there when a request was answered. The wait goes on at once, after the connections have been served.
_ANSWERED = object()


class IncomingRequest:
    """A connection request that waits for an answer."""

    def __init__(self, dispatcher: Dispatcher, cmid: CmId, event: CmEvent, options: ConnectionOptions) -> None:
        #: The id of the request, which its connection takes over.
        self.cmid = cmid
        #: Private data of the REQ, padded with zeros.
        self.private_data: bytes = event.private_data
        self.dispatcher = dispatcher
        #: The options of the connection.
        self._options = options
        #: Whether the request was accepted, rejected or dropped.
        self._is_answered = False

    def start_accept(self, private_data: bytes) -> ConnectionState:
        """Send the REP without waiting for the RTU. On failure the id is destroyed and the error raised."""
        self.claim("accept")
        options = replace(self._options, private_data=private_data)
        state = ConnectionState(self.dispatcher, self.cmid, options)
        state.private_data = self.private_data
        self.cmid.context = state
        try:
            state.open()
            self.cmid.accept(options.conn_param())
        except BaseException:
            state.release()
            raise
        return state

    def accept(self, private_data: bytes) -> Routine[ConnectionState]:
        """Accept, and wait until the connection is established.

        Raises EINVAL for an answered request or too much private data, ECONNABORTED when the peer gives up.
        """
        _check_private_data(private_data)
        state = self.dispatcher.drive_once(lambda: self.start_accept(private_data))
        try:
            yield Wait(state.lifecycle, lambda: state.is_established or state.close_reason)
            if not state.is_established:
                raise cm_error(errno.ECONNABORTED, str(state.close_reason), "accept", state.cmid.peer_addr_text)
        except Expired as expired:
            state.release()
            text = f"the peer did not confirm the connection within {expired.timeout} s"
            raise CmTimeoutError(errno.ETIMEDOUT, text, "accept", state.cmid.peer_addr_text) from None
        except BaseException:
            state.release()
            raise
        return state

    def reject(self, private_data: bytes) -> None:
        """Send a REJ and destroy the id."""
        self.claim("reject")
        try:
            self.cmid.reject(private_data)
        finally:
            self.cmid.destroy()

    def claim(self, step: str) -> None:
        """Mark the request as answered; raises EINVAL when it already is."""
        if self._is_answered:
            raise cm_error(errno.EINVAL, "the request has already been answered", step, self.cmid.peer_addr_text)
        self._is_answered = True

    def drop(self) -> None:
        """Destroy the id of a request that will not be answered, which rejects the request."""
        if not self._is_answered:
            self._is_answered = True
            self.cmid.destroy()


class ListenerState(Observable):
    """The state of a listener. Changes when a request arrives, a connection is ready or the listener ends.

    Methods must be called with the provider's lock held. Routines take it themselves.
    """

    def __init__(
        self, dispatcher: Dispatcher, address: ListenAddress, backlog: int, options: ConnectionOptions
    ) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        #: The options of each accepted connection.
        self.options = options
        #: Why the listener has ended, as the error of further calls: errno and text; None while it listens.
        self._end: tuple[int, str] | None = None
        #: Whether :meth:`close` has been called.
        self.is_closed: bool = False
        #: The error of the last request that could not be accepted.
        self.last_error: RdmaError | None = None
        #: The next request to answer. The others are in the backlog of the listening id, where they cost little.
        self._request: IncomingRequest | None = None
        #: The connections that no call of ``accept`` has returned.
        self._admission: Admission[ConnectionState] = Admission(dispatcher.clock, self.changed)
        #: The listening id.
        self.cmid: CmId = create_bound_id(dispatcher, address)
        try:
            self.cmid.context = self
            self.cmid.allow_requests(1)
            self.cmid.listen(backlog)
        except BaseException:
            self.cmid.destroy()
            raise
        dispatcher.retain()

    def handle(self, event: CmEvent) -> None:
        """Process an event of the listening id."""
        if event.type is CmEventType.CONNECT_REQUEST:
            self._request = IncomingRequest(self.dispatcher, event.id, event, self.options)
            self.changed()
        elif event.type is CmEventType.DEVICE_REMOVAL:
            self._end = errno.ENODEV, event.message or "the device was removed"
            self.changed()

    def _check_listening(self, step: str) -> None:
        if self._end is not None:
            code, reason = self._end
            hint = "a new listener, on another device" if code == errno.ENODEV else None
            raise cm_error(code, reason, step, format_address(self.cmid.local_addr), hint)

    # -- requests -------------------------------------------------------------------------------------

    def get_request(self) -> Routine[IncomingRequest]:
        """Return the next request, which the caller accepts or rejects."""
        try:
            incoming: IncomingRequest = yield Wait(self, self._take_request)
        except Expired as expired:
            raise _timeout_error(expired, "get_request") from None
        return incoming

    def _take_request(self) -> IncomingRequest | None:
        self._check_listening("get_request")
        return self._next_request()

    def _next_request(self) -> IncomingRequest | None:
        """Take a request, and fetch another one from the backlog."""
        incoming, self._request = self._request, None
        if incoming is not None:
            self.cmid.allow_requests(1)
        return incoming

    # -- connections ----------------------------------------------------------------------------------

    def accept(self, private_data: bytes) -> Routine[ConnectionState]:
        """Accept requests, and return the next connection that is established."""
        _check_private_data(private_data)
        is_full = False
        try:
            while True:
                # When half-open connections exhaust the limit, room comes with time alone: no event ends the wait.
                until = self.dispatcher.clock() + RTU_GRACE if is_full else None
                found = yield Wait(self, partial(self._take_connection, private_data, is_full), until)
                if isinstance(found, ConnectionState):
                    return found
                is_full = found is _FULL
        except Expired as expired:
            raise _timeout_error(expired, "accept") from None

    def _take_connection(self, private_data: bytes, was_full: bool) -> ConnectionState | object | None:
        """Return an established connection, or None to wait.

        Or _ANSWERED after a request was answered, as there may be another; or, once, _FULL when requests wait for room.
        ``was_full``: the previous call has returned _FULL.
        """
        self._check_listening("accept")
        state = self._admission.take()
        if state is not None:
            return state
        if self._request is None:
            return None
        if not self._admission.has_room(_MAX_IN_PROGRESS):
            return None if was_full else _FULL
        incoming = self._next_request()
        assert incoming is not None
        try:
            state = incoming.start_accept(private_data)
        except RdmaError as error:  # the peer gave up, or asked for something impossible; serve the others
            self.last_error = _without_frames(error)
            return _ANSWERED
        self._admission.add(state)
        return _ANSWERED

    def close(self) -> None:
        """Stop listening; drop all requests, and all connections that ``accept`` has not returned."""
        if self.dispatcher.drive_once(self._begin_close):
            if self._request is not None:
                self._request.drop()
            self._admission.close()
            self._request = None
            self.cmid.context = None
            self.cmid.destroy()
            self.dispatcher.release()

    def _begin_close(self) -> bool:
        if self.is_closed:
            return False
        self.is_closed = True
        self._end = errno.EBADF, "the listener is closed"
        self.changed()
        with contextlib.suppress(RdmaError):
            self.cmid.write_cm_event()  # wakes threads in accept() and get_request()
        return True


def _without_frames(error: RdmaError) -> RdmaError:
    """The error without the frames that raised it, which would keep the objects of the request, as its PD, alive."""
    error.__context__ = None
    return error.with_traceback(None)


def _check_private_data(private_data: bytes) -> None:
    """Raise EINVAL for more private data than a REP carries. Failing later would lose a request."""
    if len(private_data) > _MAX_ACCEPT_DATA:
        text = f"the message carries up to {_MAX_ACCEPT_DATA} bytes of private data, not {len(private_data)}"
        raise cm_error(errno.EINVAL, text, "accept")


def _timeout_error(expired: Expired, step: str) -> RdmaError:
    return CmTimeoutError(errno.ETIMEDOUT, f"no connection request arrived within {expired.timeout} s", step)


def listening_hosts(address: ListenAddress) -> list[str]:
    """The name or numeric address of an argument of :func:`rdmacm.listen`; none for any address."""
    return [address[0]] if isinstance(address, tuple) and address and address[0] and isinstance(address[0], str) else []


def create_bound_id(dispatcher: Dispatcher, address: ListenAddress) -> CmId:
    """Return an id bound to an address. Without a host, that is the wildcard address of IPv6 (and IPv4).

    On a host without IPv6, it is the wildcard address of IPv4.
    """
    host, port = (address[0], address[1]) if isinstance(address, tuple) else (address, 0)
    if host not in ("", None):
        choices = [lookup_address(address)]  # type: ignore[arg-type]
    else:
        choices = [InetAddr.any(AF_INET6, int(port)), InetAddr.any(AF_INET, int(port))]
    for choice in choices:
        cmid = CmId(dispatcher.channel, PortSpace.TCP)
        try:
            cmid.bind_addr(choice.sockaddr if isinstance(choice, InetAddr) else choice)
        except RdmaError as error:
            cmid.destroy()
            if error.errno != errno.EAFNOSUPPORT or choice is choices[-1]:
                raise
        except BaseException:
            cmid.destroy()
            raise
        else:
            return cmid
    raise AssertionError("unreachable")
