"""The class of rsockets, with the methods of Python's sockets."""

from __future__ import annotations

import builtins
import contextlib
import errno
import select as _select
import socket as _socket
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import IO, Any, ClassVar, Self

from rdmacm.address import InetAddr, SockAddr, format_address, lookup_address, parse_address
from rdmacm.cmid import CmId
from rdmacm.constants import IdOption, OptionLevel, PortSpace
from rdmacm.endpoint.dispatcher import Dispatcher, Observable
from rdmacm.errors import CmTimeoutError, CmWouldBlockError, RdmaError, cm_error
from rdmacm.interrupts.protection import finalize
from rdmacm.progress.wake import Wake
from rdmacm.proto.rsocket.states import State, Trigger
from rdmacm.provider import Provider, get_provider
from rdmacm.rsocket.host import HostDispatcher
from rdmacm.rsocket.listening import StreamListener
from rdmacm.rsocket.options import check_int, get_option, set_option
from rdmacm.rsocket.stream import StreamState
from rdmacm.rsocket.transfer import Transfer
from rdmacm.verbs.buffers import Buffer, byte_view

_HOW = {
    _socket.SHUT_RD: Trigger.SHUT_READING,
    _socket.SHUT_WR: Trigger.SHUT_WRITING,
    _socket.SHUT_RDWR: Trigger.SHUT_BOTH,
}


class socket(Transfer):
    """A socket over RDMA, rsocket(7), with the methods and blocking rules of Python's sockets.

    ``family``: AF_INET or AF_INET6. ``type``: SOCK_STREAM for a stream of bytes, SOCK_DGRAM for datagrams, with
    SOCK_NONBLOCK if it is not to block. ``provider``: a name or an object (:func:`rdmacm.provider.get_provider`); by
    default it is chosen by the address, when that is known. EAFNOSUPPORT, EPROTONOSUPPORT: another family, type or
    protocol.

    It speaks the protocol of librdmacm's rsockets. What differs from TCP and UDP is in docs/rsocket.md; methods without
    a description do what those of :class:`socket.socket` do.

    >>> with socket() as server, socket() as client:
    ...     server.bind(("127.0.0.1", 0))
    ...     server.listen()
    ...     client.connect(server.getsockname())
    ...     peer, address = server.accept()
    ...     client.sendall(b"hello")
    ...     with peer:
    ...         peer.recv(100)
    b'hello'
    """

    #: The protocol that the constructor takes besides 0.
    _protocol = _socket.IPPROTO_TCP
    #: The subclasses for other types than SOCK_STREAM; the constructor of this class makes them.
    _kinds: ClassVar[dict[int, builtins.type[socket]]] = {}

    def __new__(cls, *args: Any, **named: Any) -> Self:
        made: builtins.type[socket] = cls
        if cls is socket:
            kind = named.get("type", args[1] if len(args) > 1 else _socket.SOCK_STREAM)
            made = cls._kinds.get(_kind(kind), cls)
        return object.__new__(made)  # type: ignore[return-value]

    def __init__(
        self,
        family: int = _socket.AF_INET,
        type: int = _socket.SOCK_STREAM,
        proto: int = 0,
        *,
        provider: str | Provider | None = None,
    ) -> None:
        self._is_closed = True  # of one that cannot be made
        if family not in (_socket.AF_INET, _socket.AF_INET6):
            raise cm_error(errno.EAFNOSUPPORT, f"address family {family!r}", "socket", hint="AF_INET or AF_INET6")
        nonblocking = getattr(_socket, "SOCK_NONBLOCK", 0)
        if _kind(type) != self.type or proto not in (0, self._protocol):
            text = f"type {type!r} with protocol {proto}"
            raise cm_error(errno.EPROTONOSUPPORT, text, "socket", hint="SOCK_STREAM or SOCK_DGRAM")
        super().__init__(family, 0.0 if type & nonblocking else _socket.getdefaulttimeout())
        self._provider = provider
        #: The descriptor, and what makes it readable; None before the first fileno().
        self._epoll: _select.epoll | None = None
        self._wake: Wake | None = None
        #: Calls :meth:`_signal`. Weakly: what the provider keeps, it keeps without the socket.
        self._waker = _weak_waker(self)
        #: Files of makefile() that are open, and whether close() was called: named as those of Python's sockets.
        self._io_refs = 0
        self._closed = False

    # -- addresses ------------------------------------------------------------------------------------

    def _lookup(self, address: Any, step: str) -> InetAddr:
        """An address of the socket's family; the lookup of a name may wait."""
        if not isinstance(address, tuple) or not 2 <= len(address) <= 4:
            raise TypeError(f"{step}(): a socket address is a tuple (host, port), not {address!r}")
        host, port = address[0] or InetAddr.any(self._family).host, address[1]
        if not isinstance(port, int):
            raise TypeError(f"{step}(): the port is an integer, not {port!r}")
        if not 0 <= port <= 0xFFFF:
            raise OverflowError(f"{step}(): port must be 0-65535.")
        if len(address) > 2 and not 0 <= address[2] <= 0xFFFFF:
            raise OverflowError(f"{step}(): flowinfo must be 0-1048575.")
        try:
            found = parse_address((host, port, *address[2:]))
        except ValueError:
            answers = _socket.getaddrinfo(host, port, self._family, self.type)
            found = lookup_address((str(answers[0][4][0]), *answers[0][4][1:]))
        if not isinstance(found, InetAddr) or found.family != self._family:
            raise cm_error(errno.EAFNOSUPPORT, "the address is of another family", step, format_address(address))
        return found

    def _begin(self, host: str) -> CmId:
        """The id, which is made with the provider that suits an address."""
        if self._cmid is None:
            self._cmid = CmId(self._dispatcher_for(host).channel, PortSpace.TCP)
            if self._options.reuse_address:
                self._cmid.set_option(OptionLevel.ID, IdOption.REUSEADDR, 1)
            if self._family == _socket.AF_INET6:
                self._cmid.set_option(OptionLevel.ID, IdOption.AFONLY, int(self._options.v6only))
        return self._cmid

    def _dispatcher_for(self, host: str) -> Dispatcher:
        """The dispatcher, which is made with the provider that suits an address."""
        if self._dispatcher is None:
            self._dispatcher = HostDispatcher.get(get_provider(self._provider, [host]))
            if self._epoll is not None:
                self._epoll.register(self._dispatcher.channel.fileno(), _select.EPOLLIN)
        return self._dispatcher

    def bind(self, address: SockAddr) -> None:
        """Bind to a local address. EADDRINUSE also where librdmacm's id has EADDRNOTAVAIL for a wildcard."""
        self._check_open("bind")
        bound = self._lookup(address, "bind")
        if self.id is not None:
            raise cm_error(errno.EINVAL, "the socket is bound already", "bind", format_address(address))
        try:
            self._begin(bound.host).bind_addr(bound.sockaddr)
        except RdmaError as error:
            self._drop_id()
            if error.errno == errno.EADDRNOTAVAIL and bound.port and bound.is_any:
                raise cm_error(errno.EADDRINUSE, str(error.strerror), "bind", error.address, error.hint) from error
            raise

    def _drop_id(self) -> None:
        cmid, self._cmid = self._cmid, None
        if cmid is not None:
            cmid.destroy()

    def getsockname(self) -> Any:
        """The local address; the wildcard and port 0 before it is known."""
        self._check_open("getsockname")
        found = self.id.route.src_addr if self.id is not None else None
        return InetAddr.any(self._family).sockaddr if found is None else found

    def getpeername(self) -> Any:
        """The peer's address. ENOTCONN: the socket is not connected."""
        self._check_open("getpeername")
        state = self._state
        if state is None or not state.is_established:
            raise cm_error(errno.ENOTCONN, "the socket is not connected", "getpeername")
        return state.cmid.peer_addr

    # -- connecting -----------------------------------------------------------------------------------

    def listen(self, backlog: int = 128) -> None:
        """Accept connections; up to ``backlog`` wait for :meth:`accept`. An unbound socket gets a free port."""
        check_int(backlog)
        self._check_open("listen")
        if self._state is not None:
            raise cm_error(errno.EINVAL, "the socket is connected", "listen")
        if self._listener is not None:
            listener = self._listener
            listener.dispatcher.drive_once(lambda: listener.set_backlog(backlog))
            return
        if self._cmid is None:
            self.bind((InetAddr.any(self._family).host, 0))
        cmid, dispatcher = self._cmid, self._dispatcher
        assert cmid is not None and dispatcher is not None
        options = replace(self._options)
        self._listener = dispatcher.drive_once(lambda: StreamListener(dispatcher, cmid, options, backlog))
        self._cmid = None
        self._watch(self._listener.wakers)

    def accept(self) -> tuple[Self, Any]:
        """The next connection as a new socket, and the peer's address. EINVAL: the socket does not listen."""
        self._check_open("accept")
        listener = self._listener
        if listener is None:
            raise cm_error(errno.EINVAL, "the socket does not listen", "accept", hint="listen()")
        state = self._wait(listener.take, 0, "accept")
        assert state is not None
        self._signal()
        new = type(self)(self._family, provider=self._provider)
        new._options = state.options
        new._dispatcher = listener.dispatcher
        listener.dispatcher.retain()
        new._state = state
        return new, state.cmid.peer_addr

    def connect(self, address: SockAddr) -> None:
        """Connect to a listener: of librdmacm's rsockets, or of these.

        BlockingIOError with EINPROGRESS where the socket does not block: it is writable once that is decided.
        EOPNOTSUPP: the peer has another version of the protocol, or is no rsocket; ConnectionRefusedError: nobody
        listens, or the peer's program has rejected the request.
        """
        self._check_open("connect")
        if self._state is not None:
            self._check_again()
        if self._listener is not None:
            raise cm_error(errno.EINVAL, "the socket listens", "connect")
        destination = self._lookup(address, "connect")
        if destination.is_any:  # as TCP
            destination = InetAddr.loopback(self._family, destination.port)
        cmid = self._begin(destination.host)
        dispatcher = self._dispatcher
        assert dispatcher is not None
        self._cmid = None
        state = self._state = StreamState(dispatcher, cmid, replace(self._options))
        self._watch(state.wakers)
        state.lifecycle.wakers.append(self._waker)
        try:
            dispatcher.drive_once(lambda: state.connect(destination.sockaddr))
        except BaseException:
            self._forget_state()
            raise
        if self._timeout == 0:
            raise CmWouldBlockError(errno.EINPROGRESS, "the connection is being made", "connect")
        self._wait(lambda: state.is_established or state.error, 0, "connect")
        self._raise_error(state)

    def _check_again(self) -> None:
        state = self._state
        assert state is not None
        self._raise_error(state)
        if self._state is not None:
            code = errno.EISCONN if state.is_established else errno.EALREADY
            text = "the socket is connected" if state.is_established else "the connection is being made"
            kind = CmWouldBlockError if code == errno.EALREADY else RdmaError
            raise kind(code, text, "connect")

    def _raise_error(self, state: StreamState) -> None:
        """Raise why the connection was not made; the socket may then connect again."""
        if state.error is not None and not state.is_established:
            self._forget_state()
            raise state.error

    def _forget_state(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            state.release()

    def connect_ex(self, address: SockAddr) -> int:
        """As :meth:`connect`, but returns the errno of an error, or 0."""
        try:
            self.connect(address)
        except CmTimeoutError:
            return errno.EAGAIN if self._state is not None else errno.ETIMEDOUT  # as Python's, if the timeout is over
        except _socket.gaierror:
            raise
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    # -- options --------------------------------------------------------------------------------------

    def setsockopt(self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None) -> None:
        """Set an option: those of rsocket(7), and SOL_RDMA. ENOPROTOOPT: there is no such option."""
        self._check_open("setsockopt")
        if optlen is not None and value is not None:
            raise TypeError("optlen is for a value of None")
        number = value if isinstance(value, int) or value is None else bytes(byte_view(value))
        set_option(self._options, level, optname, number, is_connected=self._state is not None)
        if self._state is not None:
            self._state.options = self._options.with_sizes_of(self._state.options)
        if self._listener is not None:
            self._listener.options = replace(self._options)

    def getsockopt(self, level: int, optname: int, buflen: int = 0) -> int | bytes:
        """The value of an option, as a number, or with ``buflen`` as bytes. SO_ERROR is cleared."""
        self._check_open("getsockopt")
        value = self._get_option(level, optname)
        if isinstance(value, bytes):
            return value[:buflen] if buflen else value
        return value if not buflen else value.to_bytes(4, "little", signed=True)[:buflen]

    def _get_option(self, level: int, optname: int) -> int | bytes:
        if level == _socket.SOL_SOCKET:
            if optname == _socket.SO_ERROR:
                return self._take_error()
            if optname == _socket.SO_TYPE:
                return self.type
            if optname == _socket.SO_ACCEPTCONN:
                return int(self._listener is not None)
            if optname == getattr(_socket, "SO_DOMAIN", None):
                return self._family
        if (level, optname) == (_socket.IPPROTO_TCP, _socket.TCP_MAXSEG) and self.id is not None:
            paths = self.id.route.path_rec
            if paths and paths[0].mtu_bytes:
                return paths[0].mtu_bytes
        return get_option(self._options if self._state is None else self._state.options, level, optname)

    def _take_error(self) -> int:
        state = self._state
        if state is None:
            return 0
        if state.error is not None and not state.is_established:
            self._forget_state()
            return state.error.errno or errno.EIO
        return errno.ECONNRESET if state.engine is not None and state.engine.state is State.FAILED else 0

    # -- descriptors ----------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor to poll for reading; -1 once closed.

        It is readable when there is something to read or to accept, or progress to be made: then call a method without
        blocking, and expect BlockingIOError. :func:`rdmacm.rsocket.poll` and the other functions there tell exactly
        what a socket is ready for, also for writing.
        """
        if self._is_closed:
            return -1
        if self._epoll is None:
            self._wake = Wake()
            self._epoll = _select.epoll()
            self._epoll.register(self._wake.fd, _select.EPOLLIN)
            if self._dispatcher is not None:
                self._epoll.register(self._dispatcher.channel.fileno(), _select.EPOLLIN)
            owner = self._observed()
            if owner is not None:
                self._watch(owner.wakers)
        return self._epoll.fileno()

    def _observed(self) -> Observable | None:
        """What changes when the socket becomes ready."""
        return self._state or self._listener

    def _descriptor_beside(self) -> int:
        """A descriptor that is readable when :meth:`_serve` has something to do; -1 for none."""
        return -1

    def _serve(self) -> None:
        """Read what comes by other ways than the dispatcher."""

    def _watch(self, wakers: list[Callable[[], None]]) -> None:
        if self._wake is not None and self._waker not in wakers:
            wakers.append(self._waker)
            self._signal()

    def _signal(self) -> None:
        """Set whether the descriptor is readable."""
        if self._wake is not None:
            if self._poll() & ~_select.POLLOUT:
                self._wake.set()
            else:
                self._wake.clear()

    def _poll(self) -> int:
        """What it is ready for: bits of poll(2)."""
        if self._listener is not None:
            return _select.POLLIN if self._listener.is_ready else 0
        state = self._state
        if state is None:
            return _select.POLLOUT | _select.POLLHUP
        found = _select.POLLIN * state.is_readable | _select.POLLOUT * state.is_writable
        engine = state.engine
        if state.error is not None or (engine is not None and engine.state is State.FAILED):
            found |= _select.POLLERR | _select.POLLHUP
        elif engine is not None and engine.state is State.CLOSED:
            found |= _select.POLLHUP
        return found

    def detach(self) -> int:
        """EOPNOTSUPP: its descriptor is not the connection."""
        raise cm_error(errno.EOPNOTSUPP, "the connection is not in a descriptor", "detach")

    def dup(self) -> Self:
        """EOPNOTSUPP, as :meth:`detach`."""
        raise cm_error(errno.EOPNOTSUPP, "the connection is not in a descriptor", "dup")

    def get_inheritable(self) -> bool:
        """False: a program that is executed does not get the connection."""
        return False

    def set_inheritable(self, inheritable: bool) -> None:
        """EOPNOTSUPP for True, as :meth:`dup`."""
        if inheritable:
            raise cm_error(errno.EOPNOTSUPP, "the connection is not in a descriptor", "set_inheritable")

    def makefile(
        self,
        mode: str = "r",
        buffering: int | None = None,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """A file object that reads from or writes to the stream, as :meth:`socket.socket.makefile`."""
        # The method uses no more of its socket than this class has.
        return _socket.socket.makefile(  # type: ignore[call-overload, no-any-return]
            self, mode, buffering, encoding=encoding, errors=errors, newline=newline
        )

    def _decref_socketios(self) -> None:
        """A file of :meth:`makefile` is closed; the standard library calls this."""
        self._io_refs = max(self._io_refs - 1, 0)
        if self._closed:
            self.close()

    # -- the end --------------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        """Close the sending half, the receiving half, or both. ENOTCONN: the socket is not connected."""
        check_int(how)
        trigger = _HOW.get(how)
        if trigger is None:
            raise cm_error(errno.EINVAL, f"how is {how!r}", "shutdown", hint="SHUT_RD, SHUT_WR or SHUT_RDWR")
        state = self._stream("shutdown")
        if not state.is_established:
            raise cm_error(errno.ENOTCONN, "the socket is not connected", "shutdown")
        state.dispatcher.drive_once(lambda: state.shut(trigger))
        with contextlib.suppress(RdmaError):
            state.cmid.write_cm_event()  # wakes other threads that wait

    def close(self) -> None:
        """End the connection: what was sent arrives before. Files of :meth:`makefile` keep the socket open.

        It waits until the peer's device has acknowledged everything: with SO_LINGER only so many seconds, and otherwise
        until the device gives up. Closing twice is allowed.
        """
        self._closed = True
        if self._io_refs or self._is_closed:
            return
        self._is_closed = True
        state, dispatcher = self._state, self._dispatcher
        try:
            if state is not None and dispatcher is not None and not state.is_released:
                self._linger(state, dispatcher)
        finally:
            self._release()

    def _linger(self, state: StreamState, dispatcher: Dispatcher) -> None:
        if dispatcher.channel._is_inherited:
            return
        linger = self._options.linger
        if linger != 0:
            dispatcher.drive_once(lambda: state.shut(Trigger.SHUT_BOTH))
            dispatcher.wait(lambda: state.has_lingered, linger)

    def _release(self) -> None:
        epoll, wake, self._epoll, self._wake = self._epoll, self._wake, None, None
        for part in (self._state, self._listener):
            if part is not None:
                part.release()
        self._drop_id()
        for descriptor in (epoll, wake):
            if descriptor is not None:
                descriptor.close()
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.release()

    def _abort(self) -> None:
        self._is_closed = True
        with contextlib.suppress(Exception):
            self._release()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if not getattr(self, "_is_closed", True):
            finalize(self, self._abort, unclosed="unclosed rsocket")

    def __getstate__(self) -> object:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: builtins.type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "<rsocket closed>"
        route = None if self.id is None else self.id.route
        ends = "" if route is None else f" {format_address(route.src_addr)} -> {format_address(route.dst_addr)}"
        kind = "listening" if self._listener is not None else "new" if self._state is None else "stream"
        return f"<rsocket {kind}{ends}>"


def _kind(given: int) -> int:
    """The type of a socket without its flags."""
    return given & ~(getattr(_socket, "SOCK_NONBLOCK", 0) | getattr(_socket, "SOCK_CLOEXEC", 0))


def _weak_waker(owner: socket) -> Callable[[], None]:
    reference = weakref.ref(owner)

    def wake() -> None:
        found = reference()
        if found is not None:
            found._signal()

    return wake
