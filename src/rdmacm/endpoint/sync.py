"""The blocking API: each call waits in the calling thread, and drives the provider meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.address import SockAddr
from rdmacm.addrinfo import AddrInfo
from rdmacm.endpoint.base import ConnectionBase, ListenerBase, RequestBase
from rdmacm.endpoint.connection_state import ConnectionOptions, Message
from rdmacm.endpoint.dispatcher import Dispatcher, Routine, run
from rdmacm.endpoint.listening import ListenerState, listening_hosts
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.endpoint.race import connect_routine, hosts_of
from rdmacm.errors import CmDisconnectedError, RdmaError
from rdmacm.provider import Provider, get_provider
from rdmacm.provider.choice import noting_the_choice
from rdmacm.provider.connparam import MAXIMUM
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.enums import WROpcode
from rdmacm.verbs.pd import PD

T = TypeVar("T")


class Connection(ConnectionBase):
    """A reliable connection (RC) with messages, RDMA READ and WRITE, and atomic operations.

    It is made by :func:`connect` and :meth:`Listener.accept`. A message fills one of the peer's ``depth`` receive
    buffers; while none is free, ``send`` waits.

    The ``timeout`` of a method is in seconds; None means no limit, and a negative one is a ValueError. When it expires,
    CmTimeoutError is raised. When the connection has ended, CmDisconnectedError is raised. After either, the memory
    passed to the call is no longer accessed.

    A timeout during an operation on memory that the caller may change (a bytearray, a :class:`Region`) ends the
    connection, since the device can stop using that memory in no other way. When the data was copied or is immutable
    (bytes, or up to 256 bytes of any type), the connection survives, and the operation may still be executed.

    One thread may send while another receives. Use the connection in a ``with`` statement, or call :meth:`close`.
    """

    def _run(self, routine: Routine[T], timeout: float | None) -> T:
        return run(self._state.dispatcher, routine, timeout)

    def send(self, data: Buffer | Region, imm: int | None = None, *, timeout: float | None = None) -> None:
        """Send a message and wait until the peer's device has acknowledged it.

        ``imm``: 32-bit immediate data to send with it. A message longer than the peer's ``max_message`` ends the
        connection on both sides.
        """
        self._run(self._state.send(data, imm), timeout)

    def recv(self, timeout: float | None = None) -> bytes:
        """Return the next message.

        Messages that arrived before the peer disconnected are delivered first; then CmDisconnectedError is raised.
        """
        return self._run(self._state.receive(), timeout).data

    def recv_message(self, timeout: float | None = None) -> Message:
        """As :meth:`recv`, with the immediate data. A ``write`` with immediate data arrives here with no bytes."""
        return self._run(self._state.receive(), timeout)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over messages until the peer disconnects."""
        while True:
            try:
                message = self.recv()
            except CmDisconnectedError:
                return
            yield message

    def write(
        self, remote: RemoteRegion, data: Buffer | Region, imm: int | None = None, *, timeout: float | None = None
    ) -> None:
        """Write to the peer's memory (RDMA WRITE).

        The peer's program is not involved. With ``imm``, 32-bit immediate data, the peer receives a message for it.
        Raises ValueError when ``data`` is longer than ``remote``.
        """
        self._run(self._state.write(remote, data, imm), timeout)

    def read(
        self, remote: RemoteRegion, into: Buffer | Region | None = None, *, timeout: float | None = None
    ) -> bytes | None:
        """Read the peer's memory (RDMA READ) and return it as bytes.

        With ``into``, a writable buffer or a region, the bytes are stored there and None is returned. Raises ValueError
        when ``remote`` is longer than ``into``.
        """
        return self._run(self._state.read(remote, into), timeout)

    def compare_swap(self, remote: RemoteRegion, compare: int, swap: int, *, timeout: float | None = None) -> int:
        """Replace a 64-bit number in the peer's memory by ``swap`` if it equals ``compare``; return its previous value.

        The number is in the peer's byte order, at an address divisible by 8; otherwise ValueError is raised.
        """
        return self._run(self._state.atomic(WROpcode.ATOMIC_CMP_AND_SWP, remote, compare, swap), timeout)

    def fetch_add(self, remote: RemoteRegion, add: int, *, timeout: float | None = None) -> int:
        """Add to a 64-bit number in the peer's memory, modulo 2**64; return its previous value.

        Address and byte order are as for :meth:`compare_swap`.
        """
        return self._run(self._state.atomic(WROpcode.ATOMIC_FETCH_AND_ADD, remote, add, 0), timeout)

    def disconnect(self) -> None:
        """End the connection. Completed sends have arrived; messages received so far can still be read."""
        self._state.disconnect()

    def close(self) -> None:
        """End the connection and release all its resources, including regions. Closing twice is allowed."""
        self._state.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Request(RequestBase):
    """A request for a connection, made by :meth:`Listener.get_request`, to inspect before it is answered."""

    def accept(self, private_data: bytes = b"", *, timeout: float | None = None) -> Connection:
        """Accept the request, with up to 196 bytes of private data, and wait for the peer's confirmation (RTU).

        Raises EINVAL for longer private data or a request that has already been answered, ECONNABORTED when the peer
        gives up, CmTimeoutError after ``timeout`` seconds.
        """
        incoming = self._incoming
        return Connection(run(incoming.dispatcher, incoming.accept(private_data), timeout))


class Listener(ListenerBase):
    """A listener, made by :func:`listen`. Iterating over it accepts connections until it is closed."""

    def accept(self, timeout: float | None = None, *, private_data: bytes = b"") -> Connection:
        """Accept and return the next connection; raises CmTimeoutError after ``timeout`` seconds without one.

        ENODEV: the device of the listener's address was removed; EBADF: the listener is closed.

        ``private_data``: up to 196 bytes for the peer. Requests are answered only during a call of this method. A peer
        that does not confirm its connection does not delay others.
        """
        return Connection(run(self._state.dispatcher, self._state.accept(private_data), timeout))

    def get_request(self, timeout: float | None = None) -> Request:
        """Return the next connection request, to accept or reject; raises CmTimeoutError after ``timeout`` seconds."""
        return Request(run(self._state.dispatcher, self._state.get_request(), timeout))

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
) -> Connection:
    """Connect to a listener.

    ``address``: (host, port), a numeric socket address, or the result of :func:`rdmacm.getaddrinfo`. A host's addresses
    are tried with alternating families, each one 250 ms after the previous one or once that has failed; the first
    connection wins (RFC 8305).

    - ``private_data``: up to 56 bytes for the listener.
    - ``timeout``: for the whole call, in seconds.
    - ``source``: the local address to connect from.
    - ``depth``, ``max_message``: the number of receive buffers, and the size of each in bytes.
    - ``responder_resources``, ``initiator_depth``: how many RDMA READs and atomic operations the peer, and this side,
      may have outstanding.
    - ``keepalive``: while ``recv`` waits, a peer that has sent nothing for this many seconds is probed, and the
      connection ends when it does not answer. None disables probes.
    - ``family``: AF_INET or AF_INET6, to use only addresses of that family.
    - ``pd``: the protection domain, for connections of a device that are to share their regions: that of another
      connection (``conn.pd``), or a ``PD`` of the application's. Each connection has its own by default, so that a
      region is open to the peer of its connection only.

    Raises ValueError for a negative timeout, GaiError when the name cannot be resolved, CmRejectedError when the peer
    rejects the request, CmTimeoutError, or another RdmaError. After several attempts the most informative error is
    raised, with a note for each attempt.

    >>> with listen(("127.0.0.1", 0)) as listener:
    ...     import threading
    ...     threading.Thread(target=lambda: listener.accept().close()).start()
    ...     with connect(("127.0.0.1", listener.port)) as conn:
    ...         list(conn)
    []
    """
    options = ConnectionOptions(depth, max_message, private_data, responder_resources, initiator_depth, keepalive, pd)
    hosts = hosts_of(address)
    dispatcher = Dispatcher(get_provider(provider, hosts))
    try:
        with noting_the_choice(provider, hosts):
            return Connection(run(dispatcher, connect_routine(dispatcher, address, options, source, family), timeout))
    finally:
        dispatcher.release()


def listen(
    address: SockAddr | tuple[None, int],
    *,
    backlog: int = 0,
    depth: int = 16,
    max_message: int = 65536,
    keepalive: float | None = 15.0,
    provider: str | Provider | None = None,
    pd: PD | None = None,
) -> Listener:
    """Listen for connections.

    ``address``: (host, port). An empty host, or None, means any address of either family; port 0 assigns a free port
    (``listener.port``). ``backlog``: how many requests may wait, 0 for 1024. Further requests are dropped, and
    repeated by the peer. The other arguments are those of :func:`connect`, for each accepted connection.
    Raises the errors of :meth:`rdmacm.CmId.bind_addr` and :meth:`rdmacm.CmId.listen`.
    """
    options = ConnectionOptions(depth, max_message, keepalive=keepalive, pd=pd)
    hosts = listening_hosts(address)
    dispatcher = Dispatcher(get_provider(provider, hosts))
    try:
        with noting_the_choice(provider, hosts):
            return Listener(ListenerState(dispatcher, address, backlog, options))
    finally:
        dispatcher.release()
