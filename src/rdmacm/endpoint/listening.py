"""A listener without its waiting: requests that have come, connections that are half made, and those that are made.

A connection is half made between our answer and the peer's confirmation. A peer that never confirms holds up nobody:
after a moment its connection does not count any more among those that are being made, and it is dropped when the
connection manager has given up, or when there are too many of its kind.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from dataclasses import replace
from functools import partial
from socket import AF_INET, AF_INET6
from typing import TypeAlias

from rdmacm.address import InetAddr, SockAddr, format_address, lookup_address
from rdmacm.cmid import CmEvent, CmId
from rdmacm.connparam import ConnParam
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.endpoint.core import Core, Shape
from rdmacm.endpoint.hub import Expired, Hub, Steps, Wait, Watched
from rdmacm.errors import CmTimeoutError, RdmaError, cm_error

__all__ = ["Incoming", "ListenerCore", "ListenAddress"]

#: What :func:`rdmacm.listen` listens on.
ListenAddress: TypeAlias = "SockAddr | tuple[None, int]"

#: Requests that may wait, as for rdma_listen(3).
_MOST_WAITING = 1024
#: So many connections are being made at a time; requests that come meanwhile wait.
_WINDOW = 64
#: Seconds after which one that is half made does not count among them.
_PATIENCE = 0.5
#: So many may be half made altogether; of more, the oldest is dropped.
_HALF_MADE = 256
#: Bytes of private data that an acceptance, and a refusal, can carry.
_ACCEPT_DATA = 196
_FULL = object()


class Incoming:
    """A connection request: what an application may want to know before it answers."""

    def __init__(self, hub: Hub, cmid: CmId, event: CmEvent, shape: Shape) -> None:
        self.cmid = cmid
        self.private_data = event.private_data
        self.hub = hub
        self._shape = shape
        self._is_answered = False

    def begin(self, private_data: bytes) -> Core:
        """Accept; the connection is established later. Destroys the id where that cannot be."""
        self.answer("accept")
        shape = replace(self._shape, private_data=private_data)
        core = Core(self.hub, self.cmid, shape)
        core.private_data = self.private_data
        self.cmid.context = core
        try:
            core.open()
            self.cmid.accept(shape.param())
        except BaseException:
            core.release()
            raise
        return core

    def accepting(self, private_data: bytes) -> Steps[Core]:
        """Accept, and wait until the connection is established."""
        check_private_data(private_data)
        core = self.hub.locked(lambda: self.begin(private_data))
        try:
            yield Wait(core.life, lambda: core.is_established or core.over)
            if not core.is_established:
                raise cm_error(errno.ECONNABORTED, str(core.over), "accept", core.cmid.peer_addr_text)
        except Expired as expired:
            core.release()
            text = f"the peer did not confirm within {expired.timeout} s"
            raise CmTimeoutError(errno.ETIMEDOUT, text, "accept", core.cmid.peer_addr_text) from None
        except BaseException:
            core.release()
            raise
        return core

    def reject(self, private_data: bytes) -> None:
        """Refuse."""
        self.answer("reject")
        try:
            self.cmid.reject(private_data)
        finally:
            self.cmid.destroy()

    def answer(self, step: str) -> None:
        """EINVAL where there has been an answer already."""
        if self._is_answered:
            raise cm_error(errno.EINVAL, "the request has been answered already", step, self.cmid.peer_addr_text)
        self._is_answered = True

    def drop(self) -> None:
        """Nobody will answer."""
        if not self._is_answered:
            self._is_answered = True
            self.cmid.destroy()


class ListenerCore(Watched):
    """See the module. Its methods want the provider's lock unless they are steps."""

    def __init__(self, hub: Hub, address: ListenAddress, backlog: int, shape: Shape) -> None:
        super().__init__()
        self.hub = hub
        self.shape = shape
        self.over: str | None = None
        self.is_closed = False
        #: Why the last request that could not be accepted could not be.
        self.last_error: RdmaError | None = None
        self._backlog = backlog if 0 < backlog <= _MOST_WAITING else _MOST_WAITING
        self._requests: deque[Incoming] = deque()
        #: When each was begun, the oldest first.
        self._half: dict[Core, float] = {}
        self._made: deque[Core] = deque()
        self.cmid = _bound(hub, address)
        try:
            self.cmid.context = self
            self.cmid.listen(backlog)
        except BaseException:
            self.cmid.destroy()
            raise
        hub.retain()

    def handle(self, event: CmEvent) -> None:
        """An event of the listening id."""
        if event.type is CmEventType.CONNECT_REQUEST:
            if not isinstance(event.param, ConnParam) or len(self._requests) >= self._backlog:
                event.id.destroy()
            else:
                self._requests.append(Incoming(self.hub, event.id, event, self.shape))
                self.changed()
        elif event.type is CmEventType.DEVICE_REMOVAL:
            self.over = "the device was removed"
            self.changed()

    def _check(self, step: str) -> None:
        if self.over is not None:
            raise cm_error(errno.EBADF, self.over, step, format_address(self.cmid.local_addr))

    # -- requests -------------------------------------------------------------------------------------

    def requesting(self) -> Steps[Incoming]:
        """The next request, unanswered."""
        try:
            incoming: Incoming = yield Wait(self, self._take_request)
        except Expired as expired:
            raise _nobody(expired, "get_request") from None
        return incoming

    def _take_request(self) -> Incoming | None:
        self._check("get_request")
        return self._requests.popleft() if self._requests else None

    # -- connections ----------------------------------------------------------------------------------

    def accepting(self, private_data: bytes) -> Steps[Core]:
        """The next connection."""
        check_private_data(private_data)
        is_full = False
        try:
            while True:
                # Where the window is full of peers that say nothing, only time makes room.
                until = self.hub.clock() + _PATIENCE if is_full else None
                found = yield Wait(self, partial(self._take_connection, private_data, is_full), until)
                if isinstance(found, Core):
                    return found
                is_full = found is _FULL
        except Expired as expired:
            raise _nobody(expired, "accept") from None

    def _take_connection(self, private_data: bytes, was_full: bool) -> Core | object | None:
        """A connection; _FULL where requests have to wait, and that is news."""
        self._check("accept")
        while self._requests and self._has_room():
            incoming = self._requests.popleft()
            try:
                core = incoming.begin(private_data)
            except RdmaError as error:  # the peer has given up, or asked for what cannot be: no reason to stop
                self.last_error = error
                continue
            core.life.wakers.append(partial(self._progressed, core))
            self._half[core] = self.hub.clock()
            if len(self._half) > _HALF_MADE:
                oldest = next(iter(self._half))
                del self._half[oldest]
                oldest.release()
        if self._made:
            return self._made.popleft()
        return _FULL if self._requests and not was_full else None

    def _has_room(self) -> bool:
        busy, since = len(self._made), self.hub.clock() - _PATIENCE
        for begun in reversed(self._half.values()):
            if begun <= since:
                break
            busy += 1
        return busy < _WINDOW

    def _progressed(self, core: Core) -> None:
        """A half made connection is whole, or broken."""
        if core not in self._half:
            return
        del self._half[core]
        core.life.wakers.clear()
        if core.is_established:
            self._made.append(core)
        else:
            core.release()
        self.changed()

    def close(self) -> None:
        """Listen no more; connections that nobody has taken are ended."""
        if self.hub.locked(self._begin_close):
            for incoming in self._requests:
                incoming.drop()
            for core in (*self._half, *self._made):
                core.life.wakers.clear()
                core.release()
            self._requests.clear()
            self._half.clear()
            self._made.clear()
            self.cmid.context = None
            self.cmid.destroy()
            self.hub.release()

    def _begin_close(self) -> bool:
        if self.is_closed:
            return False
        self.is_closed = True
        self.over = "the listener is closed"
        self.changed()
        with contextlib.suppress(RdmaError):
            self.cmid.write_cm_event()  # wakes threads that wait for something
        return True


def check_private_data(private_data: bytes) -> None:
    """Raise EINVAL for more than an acceptance can carry, before a request is lost to it."""
    if len(private_data) > _ACCEPT_DATA:
        text = f"{len(private_data)} bytes of private data do not fit, {_ACCEPT_DATA} do"
        raise cm_error(errno.EINVAL, text, "accept")


def _nobody(expired: Expired, step: str) -> RdmaError:
    return CmTimeoutError(errno.ETIMEDOUT, f"nobody connected within {expired.timeout} s", step)


def _bound(hub: Hub, address: ListenAddress) -> CmId:
    """An id bound to the address; without a host, to any of either family, where the system has both."""
    host, port = (address[0], address[1]) if isinstance(address, tuple) else (address, 0)
    if host not in ("", None):
        choices = [lookup_address(address)]  # type: ignore[arg-type]
    else:
        choices = [InetAddr.any(AF_INET6, int(port)), InetAddr.any(AF_INET, int(port))]
    for choice in choices:
        cmid = CmId(hub.channel, PortSpace.TCP)
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
