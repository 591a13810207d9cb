"""Connections for threads: each call waits in the thread that makes it, and drives the provider meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.address import SockAddr
from rdmacm.connparam import MAXIMUM
from rdmacm.endpoint.core import Message, Shape
from rdmacm.endpoint.hub import Hub, Steps, run
from rdmacm.endpoint.listening import ListenAddress, ListenerCore
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.endpoint.race import Target, connecting
from rdmacm.endpoint.shell import ConnectionShell, ListenerShell, RequestShell
from rdmacm.errors import CmDisconnectedError, RdmaError
from rdmacm.provider import Provider
from rdmacm.verbs.enums import WROpcode
from rdmacm.verbs.wr import Buffer

__all__ = ["Connection", "Listener", "Request", "connect", "listen"]

T = TypeVar("T")


class Connection(ConnectionShell):
    """A reliable connection that carries messages and reaches into the peer's memory.

    A message goes into one of the peer's ``depth`` receive buffers; while none is free, ``send`` waits. ``timeout`` is
    in seconds, None waits for ever. CmTimeoutError when it runs out, CmDisconnectedError where the connection has
    ended; both leave the memory they were given alone. An operation that is under way with memory the caller may
    change (a bytearray, a :class:`Region`) can only be given up with the whole connection, and so a timeout there ends
    it; one whose data was copied or cannot change (bytes, up to 256 bytes of anything) leaves the connection as it is,
    and may be carried out nevertheless.

    One thread may send while another receives. Use it in a ``with`` statement, or :meth:`close` it.
    """

    def _run(self, steps: Steps[T], timeout: float | None) -> T:
        return run(self._core.hub, steps, timeout)

    def send(self, data: Buffer | Region, imm: int | None = None, *, timeout: float | None = None) -> None:
        """Send a message, and wait until the peer's device has acknowledged it.

        ``imm``: a number of 32 bits that goes along. A message longer than the peer's ``max_message`` is the peer's
        error, and ends the connection on both sides.
        """
        self._run(self._core.send(data, imm), timeout)

    def recv(self, timeout: float | None = None) -> bytes:
        """The next message. Those that came before the peer disconnected are delivered; CmDisconnectedError then."""
        return self._run(self._core.receive(), timeout).data

    def recv_message(self, timeout: float | None = None) -> Message:
        """As :meth:`recv`, with the immediate number. A ``write`` with one arrives here too, without bytes."""
        return self._run(self._core.receive(), timeout)

    def __iter__(self) -> Iterator[bytes]:
        """Messages as they come, until the peer disconnects."""
        while True:
            try:
                message = self.recv()
            except CmDisconnectedError:
                return
            yield message

    def write(
        self, remote: RemoteRegion, data: Buffer | Region, imm: int | None = None, *, timeout: float | None = None
    ) -> None:
        """Write to the peer's memory, which takes no part in it; with ``imm`` it learns of it as of a message."""
        self._run(self._core.write(remote, data, imm), timeout)

    def read(
        self, remote: RemoteRegion, into: Buffer | Region | None = None, *, timeout: float | None = None
    ) -> bytes | None:
        """Read the peer's memory: its bytes, or None where they went ``into`` a buffer of the caller's."""
        return self._run(self._core.read(remote, into), timeout)

    def compare_swap(self, remote: RemoteRegion, compare: int, swap: int, *, timeout: float | None = None) -> int:
        """Replace 8 bytes of the peer's memory by ``swap`` if they are ``compare``; what they were.

        They are one number of 64 bits in the peer's byte order, at an address divisible by 8.
        """
        return self._run(self._core.atomic(WROpcode.ATOMIC_CMP_AND_SWP, remote, compare, swap), timeout)

    def fetch_add(self, remote: RemoteRegion, add: int, *, timeout: float | None = None) -> int:
        """Add to 8 bytes of the peer's memory, modulo 2**64; what they were. See :meth:`compare_swap`."""
        return self._run(self._core.atomic(WROpcode.ATOMIC_FETCH_AND_ADD, remote, add, 0), timeout)

    def disconnect(self) -> None:
        """End the connection. What was sent is there; messages that have come can still be received."""
        self._core.disconnect()

    def close(self) -> None:
        """End the connection and release everything, regions included. More than once does nothing."""
        self._core.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Request(RequestShell):
    """A connection request, for those who look at it before they answer."""

    def accept(self, private_data: bytes = b"", *, timeout: float | None = None) -> Connection:
        """Accept, with up to 196 bytes of private data, and wait for the peer's confirmation."""
        incoming = self._incoming
        return Connection(run(incoming.hub, incoming.accepting(private_data), timeout))


class Listener(ListenerShell):
    """Takes connections. Iterating gives them one after the other, until it is closed."""

    def accept(self, timeout: float | None = None, *, private_data: bytes = b"") -> Connection:
        """The next connection; CmTimeoutError where none was there within ``timeout`` seconds.

        ``private_data``: up to 196 bytes for the peer. Requests are answered while somebody is in here. A peer that
        asks and then says nothing holds up nobody.
        """
        return Connection(run(self._core.hub, self._core.accepting(private_data), timeout))

    def get_request(self, timeout: float | None = None) -> Request:
        """The next connection request, to be accepted or rejected."""
        return Request(run(self._core.hub, self._core.requesting(), timeout))

    def __iter__(self) -> Iterator[Connection]:
        while True:
            try:
                connection = self.accept()
            except RdmaError:
                if self.closed:
                    return
                raise
            yield connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def connect(
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
) -> Connection:
    """Connect to a listener.

    ``address``: (host, port), a numeric socket address, or what :func:`rdmacm.getaddrinfo` returned. Of several
    addresses, the families take turns, the next is tried 250 ms after the last or once that has failed, and the first
    connection wins (RFC 8305). ``timeout``: seconds for everything together. ``source``: the address to come from;
    ``family``: AF_INET or AF_INET6, for one of them only. ``private_data``: up to 56 bytes for the listener.

    ``depth`` buffers of ``max_message`` bytes take the messages that come in. ``responder_resources`` and
    ``initiator_depth``: READs and atomics of the peer's, and of ours, at a time. ``keepalive``: while ``recv`` waits,
    a peer that has been silent for so many seconds is asked for a sign of life, without which the connection ends;
    None never asks.

    Raises what failed: GaiError for the name, CmRejectedError where the peer refused, CmTimeoutError, or another
    RdmaError. After several attempts it is the error that says most, with a note for each.

    >>> with listen(("127.0.0.1", 0)) as listener:
    ...     import threading
    ...     threading.Thread(target=lambda: listener.accept().close()).start()
    ...     with connect(("127.0.0.1", listener.port)) as conn:
    ...         list(conn)
    []
    """
    shape = Shape(depth, max_message, private_data, responder_resources, initiator_depth, keepalive)
    hub = Hub(provider)
    try:
        return Connection(run(hub, connecting(hub, address, shape, source, family), timeout))
    finally:
        hub.release()


def listen(
    address: ListenAddress,
    *,
    backlog: int = 0,
    depth: int = 16,
    max_message: int = 65536,
    keepalive: float | None = 15.0,
    provider: str | Provider | None = None,
) -> Listener:
    """Listen for connections.

    ``address``: (host, port); an empty host, or None, is any address of either family. Port 0 takes a free one
    (``listener.port``). ``backlog``: how many requests may wait, 0 for 1024; more are refused, or lost in a burst and
    repeated by the peer. The rest is as for :func:`connect`, for each connection that is accepted. Raises what
    :meth:`rdmacm.CmId.bind_addr` and :meth:`rdmacm.CmId.listen` do.
    """
    hub = Hub(provider)
    try:
        return Listener(ListenerCore(hub, address, backlog, Shape(depth, max_message, keepalive=keepalive)))
    finally:
        hub.release()
