"""Streams in an event loop of asyncio: a transport, and a server that runs a handler for each client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from rdmacm.address import SockAddr
from rdmacm.errors import RdmaError
from rdmacm.interrupts.protection import interruptible
from rdmacm.proto.rsocket.states import SENDING, State, Trigger
from rdmacm.rsocket.listening import StreamListener
from rdmacm.rsocket.loop_transport import HIGH_WATER, LOW_WATER, LoopTransport
from rdmacm.rsocket.stream import StreamState

#: Bytes that are given to the protocol in one callback.
_MOST_READ = 1 << 18

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


class StreamTransport(LoopTransport, asyncio.Transport):
    """The transport of an established stream; it owns the stream from here on."""

    _state: StreamState

    #: asyncio's loops look for it: TLS may be put above (``StreamWriter.start_tls``).
    _start_tls_compatible = True

    def __init__(self, loop: asyncio.AbstractEventLoop, state: StreamState, protocol: asyncio.BaseProtocol) -> None:
        cmid = state.cmid
        extra = {"peername": cmid.peer_addr, "sockname": cmid.local_addr, "cmid": cmid}
        super().__init__(loop, state, protocol, extra)
        #: What the stream does not take yet.
        self._backlog = bytearray()
        self._high, self._low = HIGH_WATER, LOW_WATER
        #: Whether the protocol is paused, and whether it has paused this.
        self._is_writing_paused = self._is_reading_paused = False
        #: Whether the end of what is sent was asked for.
        self._is_eof_asked = False
        #: Whether the end was read, and sent.
        self._has_read_eof = self._has_shut = False
        self._begin()

    # -- progress -------------------------------------------------------------------------------------

    @interruptible  # the protocol is the application's
    def _work(self) -> None:
        self._is_scheduled = False
        if self._has_ended:
            return
        if not self._is_reading_paused and not self._has_read_eof and not self._is_closing:
            self._read()
        self._dispatcher.drive_once(self._write_backlog)
        self._resume_protocol()
        engine = self._state.engine
        if engine is not None and engine.state is State.FAILED:
            # Bytes that have arrived are read first, unless nobody wants them.
            if self._is_closing or self._has_read_eof or not engine.unread:
                self._end(None if self._is_closing else self._state.failed("recv"))
        elif self._is_closing and self._has_shut and self._state.has_lingered:
            self._end(None)

    def _read(self) -> None:
        data, is_last = self._dispatcher.drive_once(self._take)
        protocol = self._protocol
        assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        if data:
            if isinstance(protocol, asyncio.BufferedProtocol):
                _fill(protocol, memoryview(data))
            else:
                protocol.data_received(data)
            self._changed()  # there may be more
        elif is_last:
            self._has_read_eof = True
            if not protocol.eof_received():
                self.close()

    def _take(self) -> tuple[bytes, bool]:
        engine = self._state.engine
        assert engine is not None
        data = b"".join(engine.pieces(_MOST_READ))
        if data:
            engine.consume(len(data))
            self._state.flush()
        return data, engine.is_at_end and engine.state is not State.FAILED

    def _write_backlog(self) -> None:
        engine = self._state.engine
        assert engine is not None
        if self._backlog and engine.state in SENDING:
            with memoryview(self._backlog) as view:
                sent = engine.write(view)
            del self._backlog[:sent]
            if sent:
                self._state.flush()
        if engine.state not in SENDING:
            self._backlog.clear()
        if not self._backlog and (self._is_closing or self._is_eof_asked) and not self._has_shut:
            self._has_shut = self._is_closing
            self._state.shut(Trigger.SHUT_BOTH if self._is_closing else Trigger.SHUT_WRITING)
            self._is_eof_asked = False

    def _resume_protocol(self) -> None:
        if self._is_writing_paused and len(self._backlog) <= self._low:
            self._is_writing_paused = False
            self._protocol.resume_writing()

    def _end(self, error: Exception | None) -> None:
        self._has_ended = self._is_closing = True
        self._backlog.clear()
        self._state.release()
        self._loop.call_soon(self._protocol.connection_lost, error)

    # -- as asyncio calls it --------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Whether the protocol gets what arrives."""
        return not self._is_reading_paused and not self._is_closing

    def pause_reading(self) -> None:
        """Give the protocol nothing more for now."""
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        """Undo :meth:`pause_reading`."""
        self._is_reading_paused = False
        self._changed()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Pause the protocol above ``high`` bytes that wait, until there are ``low``."""
        if high is None:
            high = HIGH_WATER if low is None else 4 * low
        low = high // 4 if low is None else low
        if not 0 <= low <= high:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """The limits, the lower one first."""
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        """How many bytes wait."""
        return len(self._backlog)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes; what the stream does not take at once waits here."""
        if self._is_closing or self._is_eof_asked or self._has_ended:
            return
        self._backlog += data
        self._dispatcher.drive_once(self._write_backlog)
        if len(self._backlog) > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        """True."""
        return True

    def write_eof(self) -> None:
        """Close the sending half after what waits."""
        self._is_eof_asked = True
        self._dispatcher.drive_once(self._write_backlog)

    def close(self) -> None:
        """Send what waits, and end the connection."""
        if not self._is_closing:
            self._is_closing = True
            self._dispatcher.drive_once(self._write_backlog)
            self._changed()

    def abort(self) -> None:
        """End the connection at once."""
        if not self._has_ended:
            self._end(None)


def _fill(protocol: asyncio.BufferedProtocol, data: memoryview) -> None:
    while data:
        buffer = memoryview(protocol.get_buffer(len(data))).cast("B")
        if not buffer:
            raise RuntimeError("get_buffer() returned an empty buffer")
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


def open_streams(state: StreamState, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The reader and the writer of a stream, which own it. ``limit``: bytes that the reader may hold."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    return reader, asyncio.StreamWriter(StreamTransport(loop, state, protocol), protocol, reader, loop)


class StreamServer:
    """A server made by :func:`rdmacm.aio.start_rsocket_server`; ``async with`` closes it at the end."""

    def __init__(self, listener: StreamListener, handler: Handler, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._handler = handler
        self._limit = limit
        self._is_scheduled = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        listener.wakers.append(self._changed)
        self._changed()

    @property
    def address(self) -> SockAddr | None:
        """The local socket address, with the port that was assigned."""
        return self._listener.cmid.local_addr

    @property
    def port(self) -> int:
        """The port number of :attr:`address`."""
        return self._listener.cmid.src_port

    def is_serving(self) -> bool:
        """Whether clients are accepted."""
        return not self._ended.done()

    def _changed(self) -> None:
        if not self._is_scheduled and not self._ended.done():
            self._is_scheduled = True
            self._loop.call_soon(self._accept)

    @interruptible  # the handler is the application's
    def _accept(self) -> None:
        self._is_scheduled = False
        if self._ended.done():
            return
        try:
            state = self._listener.dispatcher.drive_once(self._listener.take)
        except RdmaError as error:
            self._ended.set_exception(error)
            self.close()
            return
        if state is not None:
            reader = asyncio.StreamReader(limit=self._limit, loop=self._loop)
            # The protocol makes the writer: a second one would close the transport when it is collected.
            StreamTransport(self._loop, state, asyncio.StreamReaderProtocol(reader, self._handler, loop=self._loop))
            self._changed()  # there may be more

    async def serve_forever(self) -> None:
        """Serve until the server is closed, or this is cancelled, which closes it; raises what ended the listener."""
        try:
            await asyncio.shield(self._ended)
        finally:
            self.close()

    def close(self) -> None:
        """Accept no more clients. Handlers that run go on. Closing twice is allowed."""
        if not self._ended.done():
            self._ended.set_result(None)
        self._listener.release()

    async def wait_closed(self) -> None:
        """Wait until the server is closed; raises what ended the listener."""
        await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StreamServer {self.address}>"
