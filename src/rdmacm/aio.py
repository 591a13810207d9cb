"""Connections for asyncio: :func:`connect` and :func:`listen` as in :mod:`rdmacm`, with coroutine methods.

:func:`start_server` runs a handler for each client. :func:`open_rsocket_connection` and :func:`start_rsocket_server`
have the streams of :mod:`asyncio` for rsockets (:mod:`rdmacm.rsocket`), :func:`create_rsocket_datagram_endpoint` its
datagrams.
:func:`async_events` iterates over the asynchronous events of a device.

Each event loop has one driver for each provider. The driver watches one file descriptor of the provider; when that is
readable, it makes progress and wakes the tasks concerned. It processes a bounded number of events at a time, so that a
busy connection does not block the loop.

Every await may be cancelled, for example by ``asyncio.timeout``. A cancelled ``connect`` or ``accept`` leaves no
connection behind, and a cancelled ``recv`` loses no message. Cancelling an operation on memory that the caller may
change (a bytearray, a :class:`~rdmacm.Region`) ends the connection, since the device can stop using that memory in no
other way. When the data was copied or is immutable (bytes, up to 256 bytes of any type, a ``read`` without ``into``),
the connection survives, and the operation may still be executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from errno import ENOENT
from functools import partial
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.address import InetAddr, SockAddr, lookup_address, parse_address
from rdmacm.addrinfo import AddrInfo
from rdmacm.endpoint.base import ConnectionBase, ListenerBase, RequestBase
from rdmacm.endpoint.connection_state import ConnectionOptions, Message
from rdmacm.endpoint.dispatcher import Dispatcher, Expired, Routine
from rdmacm.endpoint.listening import ListenerState, listening_hosts
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.endpoint.race import connect_routine, hosts_of
from rdmacm.errors import CmDisconnectedError, CmWouldBlockError, RdmaError, check_timeout, cm_error
from rdmacm.interrupts.protection import interruptible
from rdmacm.provider import Provider, get_provider
from rdmacm.provider.choice import noting_the_choice
from rdmacm.provider.connparam import MAXIMUM
from rdmacm.rsocket.datagram_transport import DatagramTransport
from rdmacm.rsocket.datagrams import DatagramState, destination_of
from rdmacm.rsocket.listening import listen_for_streams
from rdmacm.rsocket.options import StreamOptions
from rdmacm.rsocket.stream import connect_stream
from rdmacm.rsocket.transport import StreamServer, open_streams
from rdmacm.verbs.async_event import AsyncEvent
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WROpcode
from rdmacm.verbs.pd import PD

__all__ = [
    "AsyncConnection",
    "AsyncListener",
    "AsyncRequest",
    "AsyncServer",
    "StreamServer",
    "async_events",
    "connect",
    "create_rsocket_datagram_endpoint",
    "get_async_event",
    "listen",
    "open_rsocket_connection",
    "start_rsocket_server",
    "start_server",
]

T = TypeVar("T")
P = TypeVar("P", bound=asyncio.DatagramProtocol)

#: Events, and polls of connections, processed before other callbacks of the loop may run.
_DISPATCH_LIMIT = 64


class _Driver:
    """Drives one provider from one event loop, as long as the provider has endpoints there."""

    #: Drivers by event loop and id of the provider.
    _all: dict[tuple[asyncio.AbstractEventLoop, int], _Driver] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop, provider: Provider) -> None:
        self._loop = loop
        if (check := getattr(provider, "check_event_loop", None)) is not None:  # a simulated one
            check(loop)
        #: The key of this driver in ``_all``.
        self._key = (loop, id(provider))
        #: The thread of the loop.
        self._thread = threading.get_ident()
        #: Whether the loop is going to call _run(), or _run() is active and will check for work again.
        self._is_awake = False
        self.dispatcher = Dispatcher(provider, self._wake, self._close)
        #: Readable when the provider has work to do.
        self._fd = self.dispatcher.channel.fileno()
        loop.add_reader(self._fd, self._run)
        self._all[self._key] = self

    @classmethod
    def get(cls, chosen: Provider) -> Dispatcher:
        """Return the dispatcher of the running event loop, which the caller must release."""
        loop = asyncio.get_running_loop()
        driver = cls._all.get((loop, id(chosen)))
        if driver is None:
            return cls(loop, chosen).dispatcher
        driver.dispatcher.retain()
        return driver.dispatcher

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            call = self._loop.call_soon
            if threading.get_ident() != self._thread:
                call = self._loop.call_soon_threadsafe
            with contextlib.suppress(RuntimeError):  # the loop is closed
                call(self._run)

    def _run(self) -> None:
        self._is_awake = True
        self.dispatcher.provider.drive(_nothing, 0)
        if self.dispatcher.drive_once(self._dispatch):
            self._loop.call_soon(self._run)

    def _dispatch(self) -> bool:
        self._is_awake = self.dispatcher.dispatch(_DISPATCH_LIMIT)
        return self._is_awake

    def _close(self) -> None:
        del self._all[self._key]
        if self.dispatcher.channel._is_inherited:  # the loop is the parent's
            self.dispatcher.channel.close()
        elif threading.get_ident() == self._thread or self._loop.is_closed():
            self._close_channel()
        else:  # the garbage collector may run in any thread
            try:
                self._loop.call_soon_threadsafe(self._close_channel)
            except RuntimeError:  # the loop was closed meanwhile
                self._close_channel()

    def _close_channel(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self.dispatcher.channel.close()


def _nothing() -> None:
    pass


async def _execute(dispatcher: Dispatcher, routine: Routine[T], timeout: float | None = None) -> T:
    """Execute a routine in the running event loop, for at most ``timeout`` seconds (None: no limit)."""
    loop = asyncio.get_running_loop()
    limit = None if timeout is None else dispatcher.clock() + timeout
    try:
        check_timeout(timeout)
        dispatcher.check_fork()
        wait = next(routine)
        while True:
            found = dispatcher.drive_once(wait.ready)
            if found:
                wait = routine.send(found)
                continue
            now = dispatcher.clock()
            if timeout is not None and limit is not None and now >= limit:
                wait = routine.throw(Expired(timeout))
                continue
            if wait.until is not None and now >= wait.until:
                wait = routine.send(None)
                continue
            future = loop.create_future()
            waker = partial(_set_done, future)
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
        routine.close()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncConnection(ConnectionBase):
    """:class:`rdmacm.Connection` with coroutine methods, made by :func:`connect` and :meth:`AsyncListener.accept`.

    The module describes the effect of cancelling them.
    """

    async def send(self, data: Buffer | Region, imm: int | None = None) -> None:
        """Send a message and wait until the peer's device has acknowledged it; see :meth:`rdmacm.Connection.send`."""
        await _execute(self._state.dispatcher, self._state.send(data, imm))

    async def recv(self) -> bytes:
        """Return the next message.

        Messages that arrived before the peer disconnected are delivered first; then CmDisconnectedError is raised.
        """
        return (await _execute(self._state.dispatcher, self._state.receive())).data

    async def recv_message(self) -> Message:
        """As :meth:`recv`, with the immediate data; see :meth:`rdmacm.Connection.recv_message`."""
        return await _execute(self._state.dispatcher, self._state.receive())

    def __aiter__(self) -> Self:
        """Iterate over messages until the peer disconnects."""
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except CmDisconnectedError:
            raise StopAsyncIteration from None

    async def write(self, remote: RemoteRegion, data: Buffer | Region, imm: int | None = None) -> None:
        """Write to the peer's memory; see :meth:`rdmacm.Connection.write`."""
        await _execute(self._state.dispatcher, self._state.write(remote, data, imm))

    async def read(self, remote: RemoteRegion, into: Buffer | Region | None = None) -> bytes | None:
        """Read the peer's memory; see :meth:`rdmacm.Connection.read`."""
        return await _execute(self._state.dispatcher, self._state.read(remote, into))

    async def compare_swap(self, remote: RemoteRegion, compare: int, swap: int) -> int:
        """Compare and swap a 64-bit number in the peer's memory; see :meth:`rdmacm.Connection.compare_swap`."""
        routine = self._state.atomic(WROpcode.ATOMIC_CMP_AND_SWP, remote, compare, swap)
        return await _execute(self._state.dispatcher, routine)

    async def fetch_add(self, remote: RemoteRegion, add: int) -> int:
        """Add to a 64-bit number in the peer's memory; see :meth:`rdmacm.Connection.fetch_add`."""
        return await _execute(self._state.dispatcher, self._state.atomic(WROpcode.ATOMIC_FETCH_AND_ADD, remote, add, 0))

    async def disconnect(self) -> None:
        """End the connection. Completed sends have arrived; messages received so far can still be read."""
        self._state.disconnect()

    async def close(self) -> None:
        """End the connection and release all its resources, including regions. Never waits."""
        self._state.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._state.release()


class AsyncRequest(RequestBase):
    """A request for a connection, made by :meth:`AsyncListener.get_request`, to inspect before it is answered."""

    async def accept(self, private_data: bytes = b"") -> AsyncConnection:
        """Accept the request, with up to 196 bytes of private data, and wait for the peer's confirmation (RTU).

        Errors are those of :meth:`rdmacm.Request.accept`.
        """
        return AsyncConnection(await _execute(self._incoming.dispatcher, self._incoming.accept(private_data)))


class AsyncListener(ListenerBase):
    """A listener, made by :func:`listen`. ``async for`` accepts connections until it is closed."""

    async def accept(self, *, private_data: bytes = b"") -> AsyncConnection:
        """Accept and return the next connection. ``private_data``: up to 196 bytes for the peer.

        ENODEV: the device of the listener's address was removed; EBADF: the listener is closed.
        """
        return AsyncConnection(await _execute(self._state.dispatcher, self._state.accept(private_data)))

    async def get_request(self) -> AsyncRequest:
        """Return the next connection request, to accept or reject."""
        return AsyncRequest(await _execute(self._state.dispatcher, self._state.get_request()))

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


class AsyncServer:
    """A server made by :func:`start_server`: it runs a handler for each connection, in a task of its own.

    ``async with`` closes it at the end, and waits for the handlers; when the block is left by an exception, the
    handlers are cancelled.
    """

    def __init__(self, listener: AsyncListener, handler: Callable[[AsyncConnection], Awaitable[None]]) -> None:
        #: The listener; its ``address`` and ``port`` say where clients connect.
        self.listener = listener
        self._handler = handler
        #: The tasks of the handlers that run.
        self._handlers: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="rdmacm server")

    @property
    def address(self) -> SockAddr:
        """The local socket address, with the port that was assigned."""
        return self.listener.address

    @property
    def port(self) -> int:
        """The port number of :attr:`address`."""
        return self.listener.port

    @property
    def connections(self) -> int:
        """How many handlers run."""
        return len(self._handlers)

    def is_serving(self) -> bool:
        """Whether clients are accepted."""
        return not self._accepting.done()

    async def _accept(self) -> None:
        async for connection in self.listener:
            task = asyncio.create_task(self._handle(connection), name=f"rdmacm server of {connection.peer_addr}")
            self._handlers.add(task)
            task.add_done_callback(self._handlers.discard)

    @interruptible  # the handler is the application's
    async def _handle(self, connection: AsyncConnection) -> None:
        async with connection:
            try:
                await self._handler(connection)
            except Exception as error:
                if isinstance(error, CmDisconnectedError) and connection._state.close_reason is not None:
                    return  # the client has gone
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "the handler of a connection failed", "exception": error, "connection": connection}
                )

    async def serve_forever(self) -> None:
        """Serve until the server is closed, or this is cancelled, which closes it; raises what ended the listener."""
        try:
            await asyncio.shield(self._accepting)
        finally:
            self.close()

    def close(self) -> None:
        """Accept no more clients. Handlers that run go on. Closing twice is allowed."""
        self.listener.close()

    def close_clients(self) -> None:
        """Cancel the handlers that run, which closes their connections."""
        for task in self._handlers:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the server is closed and no handler runs."""
        await asyncio.wait([self._accepting])
        while self._handlers:
            await asyncio.wait(self._handlers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
        if kind is not None:
            self.close_clients()
        await self.wait_closed()

    def __repr__(self) -> str:
        return f"<AsyncServer {self.listener!r} {self.connections} connections>"


async def connect(
    address: SockAddr | AddrInfo | Sequence[AddrInfo],
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
    pd: PD | None = None,
) -> AsyncConnection:
    """Connect to a listener. Arguments and errors are those of :func:`rdmacm.connect`.

    Host names are looked up in another thread.
    """
    options = ConnectionOptions(depth, max_message, private_data, responder_resources, initiator_depth, keepalive, pd)
    hosts = hosts_of(address)
    dispatcher = _Driver.get(get_provider(provider, hosts))
    try:
        with noting_the_choice(provider, hosts):
            return AsyncConnection(
                await _execute(dispatcher, connect_routine(dispatcher, address, options, source, family), timeout)
            )
    finally:
        dispatcher.release()


async def listen(
    address: SockAddr | tuple[None, int],
    *,
    backlog: int = 0,
    depth: int = 16,
    max_message: int = 65536,
    keepalive: float | None = 15.0,
    provider: str | Provider | None = None,
    pd: PD | None = None,
) -> AsyncListener:
    """Listen for connections. Arguments and errors are those of :func:`rdmacm.listen`."""
    options = ConnectionOptions(depth, max_message, keepalive=keepalive, pd=pd)
    if isinstance(address, tuple) and address[0]:
        try:
            parse_address(address)
        except ValueError:  # a host name; the lookup may block
            address = await asyncio.get_running_loop().run_in_executor(None, _look_up, address)
    hosts = listening_hosts(address)
    dispatcher = _Driver.get(get_provider(provider, hosts))
    try:
        with noting_the_choice(provider, hosts):
            return AsyncListener(ListenerState(dispatcher, address, backlog, options))
    finally:
        dispatcher.release()


async def start_server(
    handler: Callable[[AsyncConnection], Awaitable[None]],
    host: str | None = None,
    port: int = 0,
    *,
    backlog: int = 0,
    depth: int = 16,
    max_message: int = 65536,
    keepalive: float | None = 15.0,
    provider: str | Provider | None = None,
    pd: PD | None = None,
) -> AsyncServer:
    """Listen, and run ``handler(connection)`` for each client, in a task of its own, as asyncio.start_server does.

    The connection is closed when the handler returns. An exception of a handler is reported to the event loop, and ends
    its own connection only; a :class:`CmDisconnectedError` because the client has gone is not reported. ``host`` None
    is any address, ``port`` 0 a free port. The other arguments and the errors are those of :func:`listen`.
    """
    listener = await listen(
        (host or "", port),
        backlog=backlog,
        depth=depth,
        max_message=max_message,
        keepalive=keepalive,
        provider=provider,
        pd=pd,
    )
    return AsyncServer(listener, handler)


async def open_rsocket_connection(
    host: str, port: int, *, limit: int = 1 << 16, provider: str | Provider | None = None, family: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect an rsocket, as :func:`asyncio.open_connection` connects a TCP socket; return its reader and writer.

    The addresses of the host are tried one after the other, and the last error is raised. ``limit``: the bytes that the
    reader may hold, after which it pauses the peer. ``family``: AF_INET or AF_INET6, to use only such addresses. The
    transport is of :mod:`rdmacm.rsocket`: ``writer.get_extra_info`` knows ``peername``, ``sockname`` and ``cmid``.
    """
    last: OSError | None = None
    found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=SOCK_STREAM)
    for kind, _, _, _, address in found:
        if kind not in (AF_INET, AF_INET6):
            continue
        dispatcher = _Driver.get(get_provider(provider, [host]))
        try:
            destination = (str(address[0]), *address[1:])
            with noting_the_choice(provider, [host]):
                state = await _execute(dispatcher, connect_stream(dispatcher, destination))
            return open_streams(state, limit)
        except OSError as error:
            last = error
        finally:
            dispatcher.release()
    raise last or cm_error(ENOENT, "the host has no address", "open_rsocket_connection", host)


async def start_rsocket_server(
    client_connected_cb: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    host: str | None = None,
    port: int = 0,
    *,
    limit: int = 1 << 16,
    backlog: int = 100,
    provider: str | Provider | None = None,
) -> StreamServer:
    """Listen for rsockets, as :func:`asyncio.start_server` listens for TCP sockets.

    ``client_connected_cb(reader, writer)`` is called for each client; a coroutine runs as a task. ``host`` None is any
    address, ``port`` 0 a free port. Errors are those of :meth:`rdmacm.rsocket.socket.bind`.
    """
    address: SockAddr | tuple[None, int] = (host or "", port)
    if host:
        with contextlib.suppress(socket.gaierror):  # bind_addr() says what is wrong with it
            address = await asyncio.get_running_loop().run_in_executor(None, _look_up, (host, port))
    hosts = listening_hosts(address)
    dispatcher = _Driver.get(get_provider(provider, hosts))
    try:
        with noting_the_choice(provider, hosts):
            listener = dispatcher.drive_once(lambda: listen_for_streams(dispatcher, address, backlog))
            return StreamServer(listener, client_connected_cb, limit)
    finally:
        dispatcher.release()


async def create_rsocket_datagram_endpoint(
    protocol_factory: Callable[[], P],
    local_addr: tuple[str, int] | None = None,
    remote_addr: tuple[str, int] | None = None,
    *,
    family: int = 0,
    provider: str | Provider | None = None,
) -> tuple[asyncio.DatagramTransport, P]:
    """Make a datagram rsocket, as asyncio's ``loop.create_datagram_endpoint`` makes a UDP socket.

    ``local_addr``: the address to bind to; without it any address, and a free port. ``remote_addr``: the only address
    that datagrams go to and come from. ``family``: AF_INET or AF_INET6; without it that of the addresses. Returns the
    transport and the protocol. ValueError: neither an address nor a family is given. Other errors are those of
    :meth:`rdmacm.rsocket.socket.bind`.
    """
    remote = None if remote_addr is None else await _datagram_address(remote_addr, family)
    family = family if remote is None else remote.family
    if local_addr is None and not family:
        raise ValueError("unexpected address family")
    local = InetAddr.any(family) if local_addr is None else await _datagram_address(local_addr, family)
    peer = None if remote is None else destination_of(remote, "connect")
    hosts = [local.host if peer is None or not local.is_any else peer.host]
    dispatcher = _Driver.get(get_provider(provider, hosts))
    try:
        with noting_the_choice(provider, hosts):
            state = dispatcher.drive_once(lambda: DatagramState(dispatcher, local, StreamOptions()))
    finally:
        dispatcher.release()
    try:
        protocol = protocol_factory()
        transport = DatagramTransport(asyncio.get_running_loop(), state, peer, protocol)
    except BaseException:
        state.release()
        raise
    try:
        await asyncio.sleep(0)  # until connection_made() was called
    except BaseException:
        transport.abort()
        raise
    return transport, protocol


async def _datagram_address(address: tuple[str, int], family: int) -> InetAddr:
    """The first address of a host that datagrams may have; an empty host is any address."""
    host, port = address[:2]
    if not host:
        return InetAddr.any(family or AF_INET)._replace(port=port)
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=SOCK_DGRAM)
    for kind, _, _, _, found in answers:
        if kind in (AF_INET, AF_INET6):
            parsed = lookup_address((str(found[0]), *found[1:]))
            if isinstance(parsed, InetAddr):
                return parsed
    raise cm_error(ENOENT, "the host has no address", "create_rsocket_datagram_endpoint", host)


def _look_up(address: SockAddr) -> SockAddr:
    """Return the numeric address of a host name. Blocks while the name is looked up."""
    found = lookup_address(address)
    return found.sockaddr if isinstance(found, InetAddr) else found


async def get_async_event(context: Context) -> AsyncEvent:
    """Return the next asynchronous event of a device, as :meth:`rdmacm.Context.get_async_event`.

    A cancelled call loses no event. EBADF once the context is closed, also in tasks that were waiting.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return context.get_async_event(0)
        except CmWouldBlockError:
            pass
        readable = loop.create_future()
        wake = partial(_wake, loop, readable)  # a loop does not see that a descriptor was closed
        context._on_close.append(wake)
        try:
            if (shared := context.async_fd) < 0:
                continue
            # A copy, because a loop has one reader for each descriptor, and several tasks may wait.
            fd = os.dup(shared)
            loop.add_reader(fd, _set_done, readable)
            try:
                await readable
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        finally:
            context._on_close.remove(wake)


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_set_done, future)


async def async_events(context: Context) -> AsyncIterator[AsyncEvent]:
    """Iterate over the asynchronous events of a device; acknowledge each, for example by ``with event:``."""
    while True:
        yield await get_async_event(context)
