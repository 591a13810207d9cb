"""Connections for asyncio: :func:`connect` and :func:`listen` as in :mod:`rdmacm`, with calls that are awaited.

One driver for each event loop and provider waits for one descriptor of the provider's. When it is readable the driver
makes progress, and wakes those tasks for which something has changed. It does a bounded amount at a time, so that a
busy connection does not keep the loop from anything else.

Any await may be cancelled (``asyncio.timeout`` does that). A ``connect`` or ``accept`` that is cancelled leaves nothing
behind, a ``recv`` no message lost. An operation under way with memory that the caller may change (a bytearray, a
:class:`~rdmacm.Region`) can only be given up with the whole connection: cancelling it ends the connection, and from
then on the memory is the caller's. One whose data was copied or cannot change (bytes, up to 256 bytes of anything, a
``read`` without ``into``) leaves the connection as it is, and may be carried out nevertheless.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.address import InetAddr, SockAddr, lookup_address, parse_address
from rdmacm.connparam import MAXIMUM
from rdmacm.endpoint.core import Message, Shape
from rdmacm.endpoint.hub import Expired, Hub, Steps
from rdmacm.endpoint.listening import ListenAddress, ListenerCore
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.endpoint.race import Target, connecting
from rdmacm.endpoint.shell import ConnectionShell, ListenerShell, RequestShell
from rdmacm.errors import CmDisconnectedError, RdmaError
from rdmacm.provider import Provider, get_provider
from rdmacm.verbs.enums import WROpcode
from rdmacm.verbs.wr import Buffer

__all__ = ["AsyncConnection", "AsyncListener", "AsyncRequest", "connect", "listen"]

T = TypeVar("T")

#: Events, and turns of connections, taken in before the loop gets to do something else.
_TURNS = 64


class _Driver:
    """What one event loop does for one provider, while anything uses it."""

    _all: dict[tuple[asyncio.AbstractEventLoop, int], _Driver] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop, provider: Provider) -> None:
        self._loop = loop
        self._key = (loop, id(provider))
        self._thread = threading.get_ident()
        # Whether _run() will be called, or is at work and will look once more.
        self._is_awake = False
        self.hub = Hub(provider, self._news, self._close)
        self._fd = self.hub.channel.fileno()
        loop.add_reader(self._fd, self._run)
        self._all[self._key] = self

    @classmethod
    def get(cls, provider: str | Provider | None) -> Hub:
        """The hub of the running loop; release it."""
        loop, chosen = asyncio.get_running_loop(), get_provider(provider)
        driver = cls._all.get((loop, id(chosen)))
        if driver is None:
            return cls(loop, chosen).hub
        driver.hub.retain()
        return driver.hub

    def _news(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            call = self._loop.call_soon
            if threading.get_ident() != self._thread:
                call = self._loop.call_soon_threadsafe
            with contextlib.suppress(RuntimeError):  # the loop is closed
                call(self._run)

    def _run(self) -> None:
        self._is_awake = True
        self.hub.provider.drive(_nothing, 0)
        if self.hub.locked(self._pump):
            self._loop.call_soon(self._run)

    def _pump(self) -> bool:
        self._is_awake = self.hub.pump(_TURNS)
        return self._is_awake

    def _close(self) -> None:
        del self._all[self._key]
        if threading.get_ident() == self._thread or self._loop.is_closed():
            self._shut()
        else:  # the garbage collector does not choose its thread
            try:
                self._loop.call_soon_threadsafe(self._shut)
            except RuntimeError:  # closed meanwhile
                self._shut()

    def _shut(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self.hub.channel.close()


def _nothing() -> None:
    pass


async def _run(hub: Hub, steps: Steps[T], timeout: float | None = None) -> T:
    """Carry out steps in the running event loop."""
    loop = asyncio.get_running_loop()
    limit = None if timeout is None else hub.clock() + timeout
    try:
        wait = next(steps)
        while True:
            found = hub.locked(wait.ready)
            if found:
                wait = steps.send(found)
                continue
            now = hub.clock()
            if timeout is not None and limit is not None and now >= limit:
                wait = steps.throw(Expired(timeout))
                continue
            if wait.until is not None and now >= wait.until:
                wait = steps.send(None)
                continue
            future = loop.create_future()
            waker = partial(_wake, future)
            ends = [end for end in (limit, wait.until) if end is not None]
            timer = loop.call_later(max(0.0, min(ends) - now), waker) if ends else None
            wait.subject.wakers.append(waker)
            try:
                await future
            finally:
                wait.subject.wakers.remove(waker)
                if timer is not None:
                    timer.cancel()
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncConnection(ConnectionShell):
    """:class:`rdmacm.Connection` with calls that are awaited; see the module for what cancelling them does."""

    async def send(self, data: Buffer | Region, imm: int | None = None) -> None:
        """Send a message, and wait until the peer's device has acknowledged it; see :meth:`rdmacm.Connection.send`."""
        await _run(self._core.hub, self._core.send(data, imm))

    async def recv(self) -> bytes:
        """The next message. Those that came before the peer disconnected are delivered; CmDisconnectedError then."""
        return (await _run(self._core.hub, self._core.receive())).data

    async def recv_message(self) -> Message:
        """As :meth:`recv`, with the immediate number."""
        return await _run(self._core.hub, self._core.receive())

    def __aiter__(self) -> Self:
        """Messages as they come, until the peer disconnects."""
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except CmDisconnectedError:
            raise StopAsyncIteration from None

    async def write(self, remote: RemoteRegion, data: Buffer | Region, imm: int | None = None) -> None:
        """Write to the peer's memory; see :meth:`rdmacm.Connection.write`."""
        await _run(self._core.hub, self._core.write(remote, data, imm))

    async def read(self, remote: RemoteRegion, into: Buffer | Region | None = None) -> bytes | None:
        """Read the peer's memory; see :meth:`rdmacm.Connection.read`."""
        return await _run(self._core.hub, self._core.read(remote, into))

    async def compare_swap(self, remote: RemoteRegion, compare: int, swap: int) -> int:
        """See :meth:`rdmacm.Connection.compare_swap`."""
        steps = self._core.atomic(WROpcode.ATOMIC_CMP_AND_SWP, remote, compare, swap)
        return await _run(self._core.hub, steps)

    async def fetch_add(self, remote: RemoteRegion, add: int) -> int:
        """See :meth:`rdmacm.Connection.fetch_add`."""
        return await _run(self._core.hub, self._core.atomic(WROpcode.ATOMIC_FETCH_AND_ADD, remote, add, 0))

    async def disconnect(self) -> None:
        """End the connection. What was sent is there; messages that have come can still be received."""
        self._core.disconnect()

    async def close(self) -> None:
        """End the connection and release everything, regions included. Never waits."""
        self._core.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._core.release()


class AsyncRequest(RequestShell):
    """:class:`rdmacm.endpoint.Request` for asyncio."""

    async def accept(self, private_data: bytes = b"") -> AsyncConnection:
        """Accept, with up to 196 bytes of private data, and wait for the peer's confirmation."""
        return AsyncConnection(await _run(self._incoming.hub, self._incoming.accepting(private_data)))


class AsyncListener(ListenerShell):
    """Takes connections. ``async for`` gives them one after the other, until it is closed."""

    async def accept(self, *, private_data: bytes = b"") -> AsyncConnection:
        """The next connection; ``private_data``: up to 196 bytes for the peer."""
        return AsyncConnection(await _run(self._core.hub, self._core.accepting(private_data)))

    async def get_request(self) -> AsyncRequest:
        """The next connection request, to be accepted or rejected."""
        return AsyncRequest(await _run(self._core.hub, self._core.requesting()))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncConnection:
        try:
            return await self.accept()
        except RdmaError:
            if self.closed:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


async def connect(
    address: Target,
    *,
    private_data: bytes = b"",
    timeout: float | None = None,
    source: SockAddr | None = None,
    depth: int = 16,
    max_message: int = 65536,
    responder_resources: int = MAXIMUM,
    initiator_depth: int = MAXIMUM,
    keepalive: float | None = 15.0,
    provider: str | Provider | None = None,
    family: int = 0,
) -> AsyncConnection:
    """Connect to a listener; arguments and errors are :func:`rdmacm.connect`'s. Host names are looked up elsewhere."""
    shape = Shape(depth, max_message, private_data, responder_resources, initiator_depth, keepalive)
    hub = _Driver.get(provider)
    try:
        return AsyncConnection(await _run(hub, connecting(hub, address, shape, source, family), timeout))
    finally:
        hub.release()


async def listen(
    address: ListenAddress,
    *,
    backlog: int = 0,
    depth: int = 16,
    max_message: int = 65536,
    keepalive: float | None = 15.0,
    provider: str | Provider | None = None,
) -> AsyncListener:
    """Listen for connections; arguments and errors are :func:`rdmacm.listen`'s."""
    shape = Shape(depth, max_message, keepalive=keepalive)
    if isinstance(address, tuple) and address[0]:
        try:
            parse_address(address)
        except ValueError:  # a name
            address = await asyncio.get_running_loop().run_in_executor(None, _numeric, address)
    hub = _Driver.get(provider)
    try:
        return AsyncListener(ListenerCore(hub, address, backlog, shape))
    finally:
        hub.release()


def _numeric(address: SockAddr) -> SockAddr:
    found = lookup_address(address)
    return found.sockaddr if isinstance(found, InetAddr) else found
