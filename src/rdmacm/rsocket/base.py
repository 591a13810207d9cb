"""What the parts of a socket have in common: its timeout, and how a call waits."""

from __future__ import annotations

import errno
import socket as _socket
from collections.abc import Callable
from typing import TypeVar

from rdmacm.cmid import CmId
from rdmacm.endpoint.admission import RTU_GRACE
from rdmacm.endpoint.dispatcher import Dispatcher
from rdmacm.errors import CmTimeoutError, CmWouldBlockError, cm_error
from rdmacm.rsocket.listening import StreamListener
from rdmacm.rsocket.options import StreamOptions
from rdmacm.rsocket.stream import StreamState

T = TypeVar("T")

#: A plain number, as the flags of :mod:`socket` are slow to combine.
DONTWAIT = int(getattr(_socket, "MSG_DONTWAIT", 0))


class SocketBase:
    """The part of :class:`rdmacm.rsocket.socket` that the others build on."""

    def __init__(self, family: int, timeout: float | None) -> None:
        self._family = family
        self._timeout = timeout
        self._options = StreamOptions()
        self._is_closed = False
        #: From bind() or connect() on; then the id is there, too, until the connection or the listener has it.
        self._dispatcher: Dispatcher | None = None
        self._cmid: CmId | None = None
        self._state: StreamState | None = None
        self._listener: StreamListener | None = None

    # -- attributes -----------------------------------------------------------------------------------

    @property
    def family(self) -> int:
        """AF_INET or AF_INET6."""
        return self._family

    @property
    def type(self) -> int:
        """SOCK_STREAM or SOCK_DGRAM."""
        return _socket.SOCK_STREAM

    @property
    def proto(self) -> int:
        """0."""
        return 0

    @property
    def timeout(self) -> float | None:
        """The timeout in seconds; None to block, 0.0 not to."""
        return self._timeout

    def gettimeout(self) -> float | None:
        """:attr:`timeout`."""
        return self._timeout

    def settimeout(self, value: float | None) -> None:
        """Set the timeout of further calls in seconds; None to block, 0 not to. ValueError: it is negative."""
        if value is not None and not value >= 0:
            raise ValueError("Timeout value out of range")
        self._timeout = None if value is None else float(value)

    def setblocking(self, flag: bool) -> None:
        """``settimeout(None)`` or ``settimeout(0)``."""
        self._timeout = None if flag else 0.0

    def getblocking(self) -> bool:
        """Whether calls may wait."""
        return self._timeout != 0

    @property
    def id(self) -> CmId | None:
        """The :class:`rdmacm.CmId` below it; None before it is bound or connects."""
        owner = self._state or self._listener
        return self._cmid if owner is None else owner.cmid

    # -- waiting --------------------------------------------------------------------------------------

    def _check_open(self, step: str) -> None:
        if self._is_closed:
            raise cm_error(errno.EBADF, "the socket is closed", step)
        if self._dispatcher is not None:
            self._dispatcher.check_fork()

    def _wait(self, ready: Callable[[], T | None], flags: int, step: str, until: float | None = None) -> T:
        """The first true value of ``ready()``, within the timeout, or before ``until`` on the provider's clock."""
        dispatcher = self._dispatcher
        assert dispatcher is not None
        timeout = 0.0 if flags & DONTWAIT else self._timeout
        clock = dispatcher.clock
        if until is None and timeout is not None:
            until = clock() + timeout
        while True:
            left = timeout if timeout == 0 or until is None else max(until - clock(), 0.0)
            pause = self._next_look() if self._listener is not None or self._options.keepalive else None
            found = dispatcher.wait(ready, left if pause is None else pause if left is None else min(left, pause))
            if found:
                return found
            if timeout == 0:
                raise CmWouldBlockError(errno.EAGAIN, "the call would have to wait", step)
            if until is not None and clock() >= until:
                raise CmTimeoutError(errno.ETIMEDOUT, "timed out", step, self._peer_text())
            dispatcher.drive_once(self._look)

    def _next_look(self) -> float | None:
        """Seconds after which something has to be done that no event is for; None for never."""
        if self._listener is not None:
            return RTU_GRACE
        state = self._state
        if state is None or not self._options.keepalive or not state.is_connected:
            return None
        return max(state.last_heard + self._options.keep_idle - state.dispatcher.clock(), 0.0)

    def _look(self) -> None:
        if self._listener is not None:
            self._listener.ask()
        elif self._next_look() == 0 and self._state is not None:
            self._state.probe()

    def _stream(self, step: str) -> StreamState:
        state = self._state
        if state is None or self._is_closed or state.dispatcher.channel._is_inherited:
            self._check_open(step)
            raise cm_error(errno.ENOTCONN, "the socket is not connected", step)
        return state

    def _peer_text(self) -> str:
        return "" if self._state is None else self._state.cmid.peer_addr_text
