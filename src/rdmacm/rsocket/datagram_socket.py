"""Sockets of SOCK_DGRAM."""

from __future__ import annotations

import errno
import select as _select
import socket as _socket
from collections.abc import Callable, Iterable
from typing import IO, Any, Self, TypeVar

from rdmacm.address import InetAddr, SockAddr, format_address
from rdmacm.cmid import CmId
from rdmacm.endpoint.dispatcher import Observable
from rdmacm.errors import CmTimeoutError, CmWouldBlockError, cm_error
from rdmacm.rsocket.base import DONTWAIT
from rdmacm.rsocket.datagrams import DatagramState, destination_of, key_of
from rdmacm.rsocket.options import set_option
from rdmacm.rsocket.polling import poll
from rdmacm.rsocket.sockets import socket
from rdmacm.rsocket.stream import StreamState
from rdmacm.verbs.buffers import Buffer, byte_view

T = TypeVar("T")

_NOSIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)
_WAITALL = getattr(_socket, "MSG_WAITALL", 0)
_PEEK = _socket.MSG_PEEK
#: How long close() waits for datagrams to leave, in seconds, without SO_LINGER.
_LINGER = 1.0


class DatagramSocket(socket):
    """A :class:`rdmacm.rsocket.socket` of SOCK_DGRAM."""

    _protocol = _socket.IPPROTO_UDP

    def __init__(self, family: int = _socket.AF_INET, type: int = _socket.SOCK_DGRAM, *args: Any, **named: Any) -> None:
        super().__init__(family, type, *args, **named)
        #: From bind(), connect() or the first datagram on.
        self._end: DatagramState | None = None
        #: The peer of connect().
        self._peer: InetAddr | None = None
        #: The halves that shutdown() has closed: SHUT_RD, SHUT_WR.
        self._shut: set[int] = set()

    @property
    def type(self) -> int:
        """SOCK_DGRAM."""
        return _socket.SOCK_DGRAM

    @property
    def id(self) -> CmId | None:
        """The :class:`rdmacm.CmId` of a queue pair; None before there is one."""
        return None if self._end is None else self._end.cmid

    # -- addresses ------------------------------------------------------------------------------------

    def bind(self, address: SockAddr) -> None:
        """Bind to a local address, as a UDP socket and as rdma_bind_addr(3): the port must be free for both."""
        self._check_open("bind")
        bound = self._lookup(address, "bind")
        if self._end is not None:
            raise cm_error(errno.EINVAL, "the socket is bound already", "bind", format_address(address))
        self._open(bound, bound.host)

    def _open(self, bound: InetAddr, host: str) -> DatagramState:
        dispatcher = self._dispatcher_for(host)
        self._end = dispatcher.drive_once(lambda: DatagramState(dispatcher, bound, self._options))
        if self._epoll is not None and self._descriptor_beside() >= 0:
            self._epoll.register(self._descriptor_beside(), _select.EPOLLIN)
        self._watch(self._end.wakers)
        return self._end

    def _opened(self, host: str) -> DatagramState:
        """The state; an unbound socket gets a free port. ``host``: where it is going to send."""
        return self._end or self._open(InetAddr.any(self._family), host)

    def connect(self, address: SockAddr) -> None:
        """Have datagrams go to an address, and receive from there only."""
        self._check_open("connect")
        peer = destination_of(self._lookup(address, "connect"), "connect")
        end = self._opened(peer.host)
        key = key_of(peer)
        end.dispatcher.drive_once(lambda: end.source_for(key))
        end.peer = key
        self._peer = peer

    def getsockname(self) -> Any:
        """The local address; of a connected socket the one from which datagrams leave."""
        self._check_open("getsockname")
        end = self._end
        if end is None:
            return InetAddr.any(self._family).sockaddr
        return (end.bound if end.peer is None else end.source_for(end.peer)).sockaddr

    def getpeername(self) -> Any:
        """The address of :meth:`connect`. ENOTCONN: the socket is not connected."""
        self._check_open("getpeername")
        if self._peer is None:
            raise cm_error(errno.ENOTCONN, "the socket is not connected", "getpeername")
        return self._peer.sockaddr

    def listen(self, backlog: int = 128) -> None:  # noqa: ARG002
        """EOPNOTSUPP: there are no connections."""
        raise cm_error(errno.EOPNOTSUPP, "a datagram socket has no connections", "listen")

    def accept(self) -> tuple[Self, Any]:
        """EOPNOTSUPP, as :meth:`listen`."""
        raise cm_error(errno.EOPNOTSUPP, "a datagram socket has no connections", "accept")

    # -- waiting --------------------------------------------------------------------------------------

    def _wait_for(self, end: DatagramState, bits: int, ready: Callable[[], T | None], flags: int, step: str) -> T:
        """The first value of ``ready()`` that is not None, within the timeout; ``bits``: what poll() waits for."""
        end.dispatcher.check_fork()
        timeout = 0.0 if flags & DONTWAIT else self._timeout
        clock = end.dispatcher.clock
        until = None if timeout is None else clock() + timeout

        def attempt() -> tuple[T] | None:
            end.serve()
            if end.error is not None:
                error, end.error = end.error, None
                raise error
            found = ready()
            return None if found is None else (found,)

        while True:
            self._check_open(step)
            done = end.dispatcher.wait(attempt, 0)
            if done is not None:
                return done[0]
            if timeout == 0:
                raise CmWouldBlockError(errno.EAGAIN, "the call would have to wait", step)
            left = None if until is None else max(until - clock(), 0.0)
            if not left and left is not None:
                raise CmTimeoutError(errno.ETIMEDOUT, "timed out", step)
            # The UDP socket may have no room while the queue pairs have some: then this is tried again at once.
            poll([(self, bits)], left)

    def _observed(self) -> Observable | None:
        return self._end

    def _descriptor_beside(self) -> int:
        return -1 if self._end is None or self._is_closed else self._end.udp.fileno()

    def _serve(self) -> None:
        end = self._end
        if end is not None and not self._is_closed:
            end.dispatcher.drive_once(end.serve)

    def _poll(self) -> int:
        end = self._end
        if end is None:
            return _select.POLLOUT
        found = _select.POLLIN * bool(end.inbox or _socket.SHUT_RD in self._shut) | _select.POLLOUT * end.is_writable
        return found | _select.POLLERR * (end.error is not None)

    def fileno(self) -> int:
        """A descriptor to poll for reading, as of a stream; -1 once closed."""
        is_new = self._epoll is None
        number = super().fileno()
        if is_new and self._epoll is not None and self._descriptor_beside() >= 0:
            self._epoll.register(self._descriptor_beside(), _select.EPOLLIN)
        return number

    # -- receiving ------------------------------------------------------------------------------------

    def _take(self, flags: int, step: str) -> tuple[bytes, Any]:
        """The next datagram, and its source; empty without a source after shutdown()."""
        if flags & ~(DONTWAIT | _NOSIGNAL | _WAITALL | _PEEK):
            raise cm_error(errno.EOPNOTSUPP, f"flags {flags:#x}", step, hint="MSG_PEEK, MSG_DONTWAIT")
        self._check_open(step)
        end = self._opened(InetAddr.any(self._family).host)

        def ready() -> tuple[bytes, Any] | None:
            if end.inbox:
                return end.inbox[0] if flags & _PEEK else end.inbox.popleft()
            return (b"", None) if _socket.SHUT_RD in self._shut else None

        found = self._wait_for(end, _select.POLLIN, ready, flags, step)
        self._signal()
        return found

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        return self.recvfrom(bufsize, flags)[0]

    def recvfrom(self, bufsize: int, flags: int = 0) -> tuple[bytes, Any]:
        if bufsize < 0:
            raise ValueError("negative buffersize in recvfrom")
        data, source = self._take(flags, "recvfrom")
        return data[:bufsize], source

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        return self.recvfrom_into(buffer, nbytes, flags)[0]

    def recvfrom_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> tuple[int, Any]:
        if nbytes < 0:
            raise ValueError("negative buffersize in recvfrom_into")
        view = byte_view(buffer)
        if nbytes > len(view):
            raise ValueError("nbytes is greater than the length of the buffer")
        size, _, _, source = self._take_into([view[: nbytes or len(view)]], flags, "recvfrom_into")
        return size, source

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0) -> tuple[bytes, list[Any], int, Any]:
        if bufsize < 0 or ancbufsize < 0:
            raise ValueError("invalid ancillary data buffer length" if ancbufsize < 0 else "negative buffer size")
        data, source = self._take(flags, "recvmsg")
        return data[:bufsize], [], _socket.MSG_TRUNC * (len(data) > bufsize), source

    def recvmsg_into(
        self, buffers: Iterable[Buffer], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        if ancbufsize < 0:
            raise ValueError("invalid ancillary data buffer length")
        return self._take_into([byte_view(buffer) for buffer in buffers], flags, "recvmsg_into")

    def _take_into(self, views: list[memoryview], flags: int, step: str) -> tuple[int, list[Any], int, Any]:
        data, source = self._take(flags, step)
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return at, [], _socket.MSG_TRUNC * (len(data) > at), source

    # -- sending --------------------------------------------------------------------------------------

    def _send_datagram(self, views: list[memoryview], flags: int, address: Any, step: str) -> int:
        if flags & ~(DONTWAIT | _NOSIGNAL):
            raise cm_error(errno.EOPNOTSUPP, f"flags {flags:#x}", step, hint="MSG_DONTWAIT or MSG_NOSIGNAL")
        self._check_open(step)
        if address is None:
            peer = self._peer
            if peer is None:
                raise cm_error(errno.EDESTADDRREQ, "the socket is not connected", step, hint="sendto() or connect()")
        else:
            peer = destination_of(self._lookup(address, step), step)
        if _socket.SHUT_WR in self._shut:
            raise BrokenPipeError(errno.EPIPE, f"{step}: the socket was shut down")
        end, key = self._opened(peer.host), key_of(peer)
        size = sum(map(len, views))
        self._wait_for(end, _select.POLLOUT, lambda: end.send(views, key) or None, flags, step)
        return size

    def send(self, data: Buffer, flags: int = 0) -> int:
        return self._send_datagram([byte_view(data)], flags, None, "send")

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        self._send_datagram([byte_view(data)], flags, None, "sendall")

    def sendto(self, data: Buffer, *flags_and_address: Any) -> int:
        if len(flags_and_address) not in (1, 2):
            raise TypeError(f"sendto() takes 2 or 3 arguments ({len(flags_and_address) + 1} given)")
        flags = flags_and_address[0] if len(flags_and_address) == 2 else 0
        return self._send_datagram([byte_view(data)], flags, flags_and_address[-1], "sendto")

    def sendmsg(
        self, buffers: Iterable[Buffer], ancdata: Iterable[Any] = (), flags: int = 0, address: Any = None
    ) -> int:
        if list(ancdata):
            raise cm_error(errno.EOPNOTSUPP, "an rsocket has no ancillary data", "sendmsg")
        return self._send_datagram([byte_view(buffer) for buffer in buffers], flags, address, "sendmsg")

    def sendfile(self, file: IO[bytes], offset: int = 0, count: int | None = None) -> int:  # noqa: ARG002
        """ValueError: only streams send files."""
        raise ValueError("only SOCK_STREAM type sockets are supported")

    def _stream(self, step: str) -> StreamState:
        """EOPNOTSUPP: what needs a connection, as mapped memory does."""
        raise cm_error(errno.EOPNOTSUPP, "a datagram socket has no connection", step, hint="SOCK_STREAM")

    # -- options, the end -----------------------------------------------------------------------------

    def setsockopt(self, level: int, optname: int, value: int | Buffer | None, optlen: int | None = None) -> None:
        """As of a stream; sizes are set before the socket is bound."""
        self._check_open("setsockopt")
        if optlen is not None and value is not None:
            raise TypeError("optlen is for a value of None")
        number = value if isinstance(value, int) or value is None else bytes(byte_view(value))
        set_option(self._options, level, optname, number, is_connected=self._end is not None)

    def _take_error(self) -> int:
        end = self._end
        if end is None or end.error is None:
            return 0
        error, end.error = end.error, None
        return error.errno or errno.EIO

    def shutdown(self, how: int) -> None:
        """Receive no more, send no more, or both. ENOTCONN: the socket is not connected."""
        halves = {_socket.SHUT_RDWR: {_socket.SHUT_RD, _socket.SHUT_WR}}.get(how, {how})
        if not halves <= {_socket.SHUT_RD, _socket.SHUT_WR}:
            raise cm_error(errno.EINVAL, f"how is {how!r}", "shutdown", hint="SHUT_RD, SHUT_WR or SHUT_RDWR")
        self._check_open("shutdown")
        end = self._end
        if self._peer is None or end is None:
            raise cm_error(errno.ENOTCONN, "the socket is not connected", "shutdown")
        self._shut |= halves
        end.dispatcher.drive_once(end.changed)

    def close(self) -> None:
        """Close the socket, once its datagrams have left: it waits a second for that, or as long as SO_LINGER says."""
        self._is_closing = True
        if self._io_refs or self._is_closed:
            return
        self._is_closed = True
        end = self._end
        try:
            if end is not None and not end.dispatcher.channel._is_inherited:
                end.dispatcher.drive_once(end.changed)  # wakes other threads that wait
                linger = self._options.linger
                end.dispatcher.wait(lambda: end.is_idle, _LINGER if linger is None else linger)
        finally:
            self._release()

    def _release(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.release()
        super()._release()

    def __repr__(self) -> str:
        if self._is_closed:
            return "<rsocket closed>"
        ends = "" if self._end is None else f" {self._end.bound} -> {self._peer}"
        return f"<rsocket datagrams{ends}>"


socket._kinds[_socket.SOCK_DGRAM] = DatagramSocket
