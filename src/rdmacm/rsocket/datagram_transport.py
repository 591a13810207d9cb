"""Datagrams in an event loop of asyncio: the transport of a datagram socket.

The loop reads the UDP socket beside the queue pairs.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from typing import Any

from rdmacm.address import InetAddr, parse_address
from rdmacm.errors import cm_error
from rdmacm.interrupts.protection import interruptible
from rdmacm.proto.rsocket.peers import PeerKey
from rdmacm.rsocket.datagrams import DatagramState, destination_of, key_of
from rdmacm.rsocket.loop_transport import HIGH_WATER, LOW_WATER, LoopTransport
from rdmacm.verbs.buffers import Buffer

#: Datagrams that are given to the protocol in one callback.
_MOST_READ = 64
#: Seconds that close() gives to datagrams that have not left.
_LINGER = 1.0


class DatagramTransport(LoopTransport, asyncio.DatagramTransport):
    """The transport of a bound datagram socket; it owns the state from here on.

    ``peer``: the only address that datagrams go to and come from; None for any.
    """

    _state: DatagramState
    _protocol: asyncio.DatagramProtocol

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: DatagramState,
        peer: InetAddr | None,
        protocol: asyncio.DatagramProtocol,
    ) -> None:
        state.peer = None if peer is None else key_of(peer)
        local = state.bound if state.peer is None else state.source_for(state.peer)
        extra = {"sockname": local.sockaddr, "peername": None if peer is None else peer.sockaddr}
        super().__init__(loop, state, protocol, extra)
        #: Datagrams that wait for room, and their bytes.
        self._backlog: deque[tuple[bytes, PeerKey]] = deque()
        self._waiting = 0
        self._is_paused = False
        #: What ends a close() that takes too long.
        self._limit: asyncio.TimerHandle | None = None
        if state.udp.fileno() >= 0:
            loop.add_reader(state.udp.fileno(), self._serve)
        self._begin()

    # -- progress -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._dispatcher.drive_once(self._state.serve)

    @interruptible  # the protocol is the application's
    def _work(self) -> None:
        self._is_scheduled = False
        if self._has_ended:
            return
        state = self._state
        self._write_backlog()
        error, state.error = state.error, None
        if error is not None:
            self._protocol.error_received(error)
        for _ in range(min(_MOST_READ, len(state.inbox))):
            if not self._is_closing:
                self._protocol.datagram_received(*state.inbox.popleft())
        if self._has_ended:
            return
        if self._is_closing and not self._backlog and state.is_idle:
            self.abort()
        elif state.inbox and not self._is_closing:
            self._changed()

    def _write_backlog(self) -> None:
        while self._backlog and not self._has_ended and self._send(*self._backlog[0]):
            if self._backlog:  # the protocol may have aborted
                self._waiting -= len(self._backlog.popleft()[0])
        if not self._has_ended:
            self._watch_udp()
        if self._is_paused and self._waiting <= LOW_WATER:
            self._is_paused = False
            self._protocol.resume_writing()

    def _watch_udp(self) -> None:
        """If it is the UDP socket that has no room, nothing else tells when it has some."""
        number = self._state.udp.fileno()
        if number < 0:
            return
        if self._backlog and self._state.is_writable:
            self._loop.add_writer(number, self._changed)
        else:
            self._loop.remove_writer(number)

    def _send(self, data: bytes, key: PeerKey) -> bool:
        """Send a datagram; return False if it has to wait."""
        try:
            return self._dispatcher.drive_once(lambda: self._state.send([memoryview(data)], key))
        except OSError as error:
            self._protocol.error_received(error)
            return True

    # -- as asyncio calls it --------------------------------------------------------------------------

    def sendto(self, data: bytes | bytearray | memoryview, addr: tuple[Any, ...] | str | Buffer | None = None) -> None:
        """Send a datagram. An error of the network, or of its length, is ``error_received`` of the protocol.

        ValueError: there is no address, a host name in it, or another one than the remote address.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")
        key = self._key_for(addr)
        if self._is_closing:
            return
        copy = bytes(data)
        if not self._backlog and self._send(copy, key):
            return
        self._backlog.append((copy, key))
        self._waiting += len(copy)
        self._watch_udp()
        if self._waiting > HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _key_for(self, address: object) -> PeerKey:
        peer, family = self._state.peer, self._state.bound.family
        if address is None:
            if peer is None:
                raise ValueError("an address is needed, as there is no remote address")
            return peer
        found = parse_address(address)  # type: ignore[arg-type]  # which checks it
        if not isinstance(found, InetAddr) or found.family != family:
            raise cm_error(errno.EAFNOSUPPORT, "the address is of another family", "sendto", str(found))
        key = key_of(destination_of(found, "sendto"))
        if peer not in (None, key):
            raise ValueError(f"Invalid address: must be None or {self.get_extra_info('peername')}")
        return key

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set another protocol."""
        assert isinstance(protocol, asyncio.DatagramProtocol)
        super().set_protocol(protocol)

    def get_write_buffer_size(self) -> int:
        """How many bytes wait."""
        return self._waiting

    def close(self) -> None:
        """Close the socket once its datagrams have left, or after a second."""
        if not self._is_closing:
            self._is_closing = True
            self._limit = self._loop.call_later(_LINGER, self.abort)
            self._changed()

    def abort(self) -> None:
        """Close the socket at once."""
        if self._has_ended:
            return
        self._has_ended = self._is_closing = True
        if self._limit is not None:
            self._limit.cancel()
        self._backlog.clear()
        self._waiting = 0
        number = self._state.udp.fileno()
        if number >= 0:
            self._loop.remove_reader(number)
            self._loop.remove_writer(number)
        self._state.release()
        self._loop.call_soon(self._protocol.connection_lost, None)
