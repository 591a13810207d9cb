"""Each name in rsocket(7) and ``<rdma/rsocket.h>`` has a row here: its calls, options and flags, by both APIs.

A row is written in C's names. It runs with those of :mod:`rdmacm.cma`, and with the methods of
:class:`rdmacm.rsocket.socket` in their place.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from mmap import PROT_READ, PROT_WRITE
from pathlib import Path
from select import POLLIN, POLLOUT
from socket import AF_INET, AF_INET6, IPPROTO_TCP, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET
from typing import Any

import pytest

from rdmacm import PathData, cma
from rdmacm.rsocket import (
    RDMA_INLINE,
    RDMA_IOMAPSIZE,
    RDMA_ROUTE,
    RDMA_RQSIZE,
    RDMA_SQSIZE,
    SOL_RDMA,
    poll,
    select,
)
from rdmacm.rsocket import socket as Socket

PAGE = Path("/usr/share/man/man7/rsocket.7.gz")
#: Seconds after which a row that hangs fails.
_PATIENCE = 20
_HOST: dict[int, str] = {AF_INET: "127.0.0.1", AF_INET6: "::1"}
PROT_NONE = 0
_DONTWAIT, _WAITALL, _NOSIGNAL = socket.MSG_DONTWAIT, socket.MSG_WAITALL, socket.MSG_NOSIGNAL


def _method(name: str) -> Any:
    """A method, of the class that an object has, as a function."""
    return staticmethod(lambda fd, *arguments: getattr(fd, name)(*arguments))


class Methods:
    """The methods of :class:`rdmacm.rsocket.socket` under C's names."""

    rsocket = Socket
    rbind, rlisten, raccept = map(_method, ("bind", "listen", "accept"))
    rconnect, rshutdown, rclose = map(_method, ("connect", "shutdown", "close"))
    rgetpeername, rgetsockname = map(_method, ("getpeername", "getsockname"))
    rsetsockopt, riounmap = map(_method, ("setsockopt", "riounmap"))

    @staticmethod
    def rrecv(fd: Any, buf: bytearray, size: int, flags: int) -> int:
        data = fd.recv(size, flags)
        buf[: len(data)] = data
        return len(data)

    @staticmethod
    def rrecvfrom(fd: Any, buf: bytearray, size: int, flags: int) -> tuple[int, Any]:
        data, source = fd.recvfrom(size, flags)
        buf[: len(data)] = data
        return len(data), source or fd.getpeername()

    @staticmethod
    def rrecvmsg(fd: Any, iov: list[bytearray], flags: int) -> int:
        return int(fd.recvmsg_into(iov, 0, flags)[0])

    @staticmethod
    def rread(fd: Any, buf: bytearray, count: int) -> int:
        with fd.makefile("rb", buffering=0) as file:
            return int(file.readinto(memoryview(buf)[:count]))

    @staticmethod
    def rreadv(fd: Any, iov: list[bytearray]) -> int:
        return int(fd.recvmsg_into(iov)[0])

    @staticmethod
    def rsend(fd: Any, buf: bytes, size: int, flags: int) -> int:
        return int(fd.send(buf[:size], flags))

    @staticmethod
    def rsendto(fd: Any, buf: bytes, size: int, flags: int, address: Any) -> int:
        return int(fd.sendto(buf[:size], flags, address) if address else fd.send(buf[:size], flags))

    @staticmethod
    def rsendmsg(fd: Any, iov: list[bytes], flags: int) -> int:
        return int(fd.sendmsg(iov, (), flags))

    @staticmethod
    def rwrite(fd: Any, buf: bytes, count: int) -> int:
        fd.sendall(buf[:count])
        return count

    @staticmethod
    def rwritev(fd: Any, iov: list[bytes]) -> int:
        return int(fd.sendmsg(iov))

    @staticmethod
    def rpoll(fds: Any, milliseconds: int) -> Any:
        return poll(fds, None if milliseconds < 0 else milliseconds / 1000)

    rselect = staticmethod(select)

    @staticmethod
    def rgetsockopt(fd: Any, level: int, name: int, size: int = 0) -> Any:
        return fd.getsockopt(level, name, size)

    @staticmethod
    def rfcntl(fd: Any, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            fd.setblocking(not argument & os.O_NONBLOCK)
            return 0
        return 0 if fd.getblocking() else os.O_NONBLOCK

    @staticmethod
    def riomap(fd: Any, buf: bytearray, size: int, prot: int, flags: int, offset: int) -> int:
        return int(fd.riomap(memoryview(buf)[:size], prot, flags, offset))

    @staticmethod
    def riowrite(fd: Any, buf: bytes, count: int, offset: int, flags: int) -> int:
        return int(fd.riowrite(buf[:count], offset, flags))


class Ends:
    """Sockets of one API, which are closed at the end."""

    def __init__(self, api: Any, stack: ExitStack) -> None:
        self.api, self._stack = api, stack

    def keep(self, fd: Any) -> Any:
        self._stack.callback(self.api.rclose, fd)
        fd.settimeout(_PATIENCE)
        return fd

    def new(self, family: int = AF_INET, kind: int = SOCK_STREAM) -> Any:
        return self.keep(self.api.rsocket(family, kind, 0))

    def listener(self, family: int = AF_INET, *options: tuple[int, int, int]) -> Any:
        fd = self.new(family)
        for option in options:
            self.api.rsetsockopt(fd, *option)
        self.api.rbind(fd, (_HOST[family], 0))
        self.api.rlisten(fd, 5)
        return fd

    def pair(self, *options: tuple[int, int, int], family: int = AF_INET) -> tuple[Any, Any]:
        """A client and the server's end, both with these options."""
        listener, client = self.listener(family, *options), self.new(family)
        for option in options:
            self.api.rsetsockopt(client, *option)
        self.api.rconnect(client, self.api.rgetsockname(listener))
        server, address = self.api.raccept(listener)
        assert address == self.api.rgetsockname(client)
        return client, self.keep(server)

    def moves(self, client: Any, server: Any) -> None:
        """Bytes go both ways."""
        buffer = bytearray(5)
        for sender, receiver in ((client, server), (server, client)):
            assert self.api.rsend(sender, b"hello", 5, 0) == 5
            assert self.api.rrecv(receiver, buffer, 5, _WAITALL) == 5
            assert buffer == b"hello"

    def is_kept(self, level: int, name: int, *values: int) -> None:
        """An option has the values that it gets, also on a connected socket, and as bytes."""
        for fd in (self.new(), *self.pair()):
            for value in values:
                self.api.rsetsockopt(fd, level, name, value)
                assert self.api.rgetsockopt(fd, level, name) == value
                self.api.rsetsockopt(fd, level, name, struct.pack("i", value))
                assert self.api.rgetsockopt(fd, level, name, 4) == struct.pack("i", value)


@pytest.fixture(params=[Methods, cma], ids=["methods", "C's names"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(request.param, stack)


def _fails(code: int, call: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(OSError) as caught:
        call(*arguments)
    assert caught.value.errno == code, caught.value


Row = Callable[[Ends], None]
#: Each test with the names that it is for.
ROWS: dict[Row, tuple[str, ...]] = {}


def row(*names: str) -> Callable[[Row], Row]:
    def add(test: Row) -> Row:
        ROWS[test] = names
        return test

    return add


# -- families and types ----------------------------------------------------------------------------------------------


@row("rsocket", "PF_INET", "SOCK_STREAM", "rsend", "rrecv")
def _stream(ends: Ends) -> None:
    ends.moves(*ends.pair())


@row("PF_INET6")
def _ipv6(ends: Ends) -> None:
    ends.moves(*ends.pair(family=AF_INET6))


@row("SOCK_DGRAM", "rsendto", "rrecvfrom")
def _datagrams(ends: Ends) -> None:
    api, (client, server) = ends.api, (ends.new(AF_INET, SOCK_DGRAM) for _ in range(2))
    api.rbind(server, ("127.0.0.1", 0))
    data = bytearray(10)
    assert api.rsendto(client, b"hello", 4, 0, api.rgetsockname(server)) == 4
    size, source = api.rrecvfrom(server, data, 10, 0)
    assert data[:size] == b"hell"
    assert api.rsendto(server, b"answer", 6, 0, source) == 6
    assert api.rrecvfrom(client, data, 10, 0) == (6, api.rgetsockname(server))

    client, server = ends.pair()
    assert api.rsendto(client, b"x", 1, 0, None) == 1
    assert api.rrecvfrom(server, data, 10, 0) == (1, api.rgetsockname(client))
    _fails(errno.EISCONN, api.rsendto, client, b"x", 1, 0, ("127.0.0.1", 1))


# -- connections -----------------------------------------------------------------------------------------------------


@row("rbind", "rgetsockname")
def _addresses(ends: Ends) -> None:
    api, fd = ends.api, ends.new()
    api.rbind(fd, ("127.0.0.1", 0))
    host, port = api.rgetsockname(fd)
    assert host == "127.0.0.1"
    assert port
    _fails(errno.EADDRINUSE, api.rbind, ends.new(), (host, port))


@row("rlisten", "raccept", "rconnect")
def _connections(ends: Ends) -> None:
    api, listener = ends.api, ends.listener()
    clients = [ends.new() for _ in range(3)]
    for client in clients:
        api.rconnect(client, api.rgetsockname(listener))
    accepted = [api.raccept(listener) for _ in clients]
    for client, (server, address) in zip(clients, accepted, strict=True):
        assert address == api.rgetsockname(client)
        ends.moves(client, ends.keep(server))
    address = api.rgetsockname(listener)
    api.rclose(listener)
    _fails(errno.ECONNREFUSED, api.rconnect, ends.new(), address)


@row("rgetpeername")
def _peers(ends: Ends) -> None:
    client, server = ends.pair()
    assert ends.api.rgetpeername(client) == ends.api.rgetsockname(server)
    assert ends.api.rgetpeername(server) == ends.api.rgetsockname(client)
    _fails(errno.ENOTCONN, ends.api.rgetpeername, ends.new())


@row("rshutdown")
def _halves(ends: Ends) -> None:
    api, (client, server) = ends.api, ends.pair()
    api.rshutdown(client, socket.SHUT_WR)
    assert api.rrecv(server, bytearray(1), 1, 0) == 0
    assert api.rsend(server, b"x", 1, 0) == 1
    assert api.rrecv(client, bytearray(1), 1, 0) == 1
    _fails(errno.EPIPE, api.rsend, client, b"x", 1, 0)


@row("rclose")
def _close(ends: Ends) -> None:
    api, (client, server) = ends.api, ends.pair()
    api.rsend(client, b"last", 4, 0)
    api.rclose(client)
    assert api.rrecv(server, bytearray(9), 9, _WAITALL) == 4
    assert api.rrecv(server, bytearray(9), 9, 0) == 0
    _fails(errno.EBADF, api.rsend, client, b"x", 1, 0)


# -- data ------------------------------------------------------------------------------------------------------------


@row("rread", "rwrite")
def _one_buffer(ends: Ends) -> None:
    api, (client, server) = ends.api, ends.pair()
    data = bytearray(9)
    assert api.rwrite(client, b"hello world", 5) == 5
    assert api.rread(server, data, 3) == 3
    assert api.rread(server, data, 9) == 2
    assert data[:3] == b"lol"


@row("rsendmsg", "rrecvmsg", "rwritev", "rreadv")
def _many_buffers(ends: Ends) -> None:
    """All are filled, where librdmacm's rsockets fill the first."""
    api, (client, server) = ends.api, ends.pair()
    for send, receive in ((api.rsendmsg, api.rrecvmsg), (api.rwritev, api.rreadv)):
        flags = (0,) if send is api.rsendmsg else ()
        first, second = bytearray(3), bytearray(9)
        assert send(client, [b"ab", b"", b"cde"], *flags) == 5
        assert receive(server, [first, second], *flags) == 5
        assert first + second[:2] == b"abcde"


@row("rpoll", "rselect")
def _waiting(ends: Ends) -> None:
    """Rsockets and ordinary descriptors together."""
    api, (client, server) = ends.api, ends.pair()
    here, there = socket.socketpair()
    with here, there:
        assert api.rpoll([(server, POLLIN), (here, POLLIN)], 0) == []
        assert api.rselect([server, here], [], [], 0) == ([], [], [])
        assert api.rpoll([(client, POLLIN | POLLOUT)], 0) == [(client, POLLOUT)]
        assert api.rselect([client], [client], [client], 0) == ([], [client], [])
        api.rsend(client, b"x", 1, 0)
        assert api.rpoll([(server, POLLIN), (here, POLLIN)], -1) == [(server, POLLIN)]
        there.send(b"x")
        assert api.rselect([server, here], [], [], None) == ([server, here], [], [])


@row("MSG_DONTWAIT", "O_NONBLOCK", "rfcntl")
def _calls_that_do_not_wait(ends: Ends) -> None:
    api, (client, server) = ends.api, ends.pair()
    _fails(errno.EAGAIN, api.rrecv, client, bytearray(1), 1, _DONTWAIT)
    assert not api.rfcntl(client, fcntl.F_GETFL) & os.O_NONBLOCK
    api.rfcntl(client, fcntl.F_SETFL, os.O_NONBLOCK)
    assert api.rfcntl(client, fcntl.F_GETFL) & os.O_NONBLOCK
    _fails(errno.EAGAIN, api.rrecv, client, bytearray(1), 1, 0)
    with pytest.raises(BlockingIOError):
        while api.rsend(client, bytes(1 << 16), 1 << 16, 0):
            pass
    with pytest.raises(BlockingIOError):
        while api.rsend(server, bytes(1 << 16), 1 << 16, _DONTWAIT):
            pass


@row("MSG_PEEK", "MSG_WAITALL", "MSG_NOSIGNAL")
def _flags(ends: Ends) -> None:
    api, (client, server) = ends.api, ends.pair()
    data = bytearray(4)
    api.rsend(client, b"ab", 2, _NOSIGNAL)
    assert api.rrecv(server, data, 2, socket.MSG_PEEK | _NOSIGNAL) == 2
    api.rsend(client, b"cd", 2, 0)
    assert api.rrecv(server, data, 4, _WAITALL) == 4
    assert data == b"abcd"
    _fails(errno.EOPNOTSUPP, api.rrecv, server, data, 4, socket.MSG_OOB)
    _fails(errno.EOPNOTSUPP, api.rsend, client, b"x", 1, socket.MSG_OOB)


# -- options ---------------------------------------------------------------------------------------------------------


@row("rsetsockopt", "rgetsockopt", "SO_KEEPALIVE", "SO_OOBINLINE")
def _options(ends: Ends) -> None:
    ends.is_kept(SOL_SOCKET, socket.SO_KEEPALIVE, 1, 0)
    ends.is_kept(SOL_SOCKET, socket.SO_OOBINLINE, 1, 0)
    _fails(errno.ENOPROTOOPT, ends.api.rsetsockopt, ends.new(), SOL_SOCKET, 9999, 1)
    _fails(errno.ENOPROTOOPT, ends.api.rgetsockopt, ends.new(), SOL_SOCKET, 9999)
    _fails(errno.EINVAL, ends.api.rsetsockopt, ends.new(), SOL_SOCKET, socket.SO_SNDBUF, -1)
    with pytest.raises(OverflowError):
        ends.api.rsetsockopt(ends.new(), IPPROTO_TCP, socket.TCP_KEEPIDLE, 1 << 31)


@row("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
def _options_of_tcp(ends: Ends) -> None:
    ends.is_kept(IPPROTO_TCP, socket.TCP_NODELAY, 0, 1)
    for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        ends.is_kept(IPPROTO_TCP, name, 5)
    fd = ends.new()
    ends.api.rsetsockopt(fd, IPPROTO_TCP, socket.TCP_KEEPIDLE, 0)
    assert ends.api.rgetsockopt(fd, IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


@row("TCP_MAXSEG")
def _segments(ends: Ends) -> None:
    """The path MTU of a connection, which cannot be changed."""
    fd, pair = ends.new(), ends.pair()
    assert ends.api.rgetsockopt(fd, IPPROTO_TCP, socket.TCP_MAXSEG) == 2048
    for end in pair:
        size = ends.api.rgetsockopt(end, IPPROTO_TCP, socket.TCP_MAXSEG)
        assert size in (256, 512, 1024, 2048, 4096)
        ends.api.rsetsockopt(end, IPPROTO_TCP, socket.TCP_MAXSEG, 100)
        assert ends.api.rgetsockopt(end, IPPROTO_TCP, socket.TCP_MAXSEG) == size


@row("SO_ERROR")
def _errors(ends: Ends) -> None:
    api, listener = ends.api, ends.listener()
    address = api.rgetsockname(listener)
    api.rclose(listener)
    fd = ends.new()
    api.rfcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    _fails(errno.EINPROGRESS, api.rconnect, fd, address)
    assert api.rpoll([(fd, POLLOUT)], _PATIENCE * 1000)
    assert api.rgetsockopt(fd, SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
    assert api.rgetsockopt(fd, SOL_SOCKET, socket.SO_ERROR) == 0


@row("SO_LINGER")
def _linger(ends: Ends) -> None:
    """With no time, the peer is told that bytes may be missing."""
    api, (client, server) = ends.api, ends.pair()
    api.rsetsockopt(client, SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert api.rgetsockopt(client, SOL_SOCKET, socket.SO_LINGER, 8) == struct.pack("ii", 1, 0)
    api.rclose(client)
    _fails(errno.ECONNRESET, api.rrecv, server, bytearray(1), 1, 0)


@row("SO_SNDBUF", "SO_RCVBUF")
def _buffers(ends: Ends) -> None:
    """A call takes no more bytes than there is room for."""
    api = ends.api
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        client, server = ends.pair((SOL_SOCKET, name, 6000))
        assert api.rgetsockopt(server, SOL_SOCKET, name) == 6000
        assert 0 < api.rsend(client, bytes(50_000), 50_000, _DONTWAIT) <= 6000
        _fails(errno.EINVAL, api.rsetsockopt, client, SOL_SOCKET, name, 7000)
        assert api.rgetsockopt(client, SOL_SOCKET, name) == 6000


@row("SO_REUSEADDR")
def _two_on_a_port(ends: Ends) -> None:
    api, first, second = ends.api, ends.new(), ends.new()
    for fd in (first, second):
        api.rsetsockopt(fd, SOL_SOCKET, socket.SO_REUSEADDR, 1)
    api.rbind(first, ("127.0.0.1", 0))
    api.rbind(second, api.rgetsockname(first))
    assert api.rgetsockopt(second, SOL_SOCKET, socket.SO_REUSEADDR) == 1


@row("IPV6_V6ONLY")
def _ipv4_by_ipv6(ends: Ends) -> None:
    api = ends.api
    for only in (0, 1):
        listener, client = ends.new(AF_INET6), ends.new()
        api.rsetsockopt(listener, socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        assert api.rgetsockopt(listener, socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == only
        api.rbind(listener, ("::", 0))
        api.rlisten(listener, 1)
        address = "127.0.0.1", api.rgetsockname(listener)[1]
        if only:
            _fails(errno.ECONNREFUSED, api.rconnect, client, address)
        else:
            api.rconnect(client, address)
            ends.moves(client, ends.keep(api.raccept(listener)[0]))


@row("RDMA_SQSIZE", "RDMA_RQSIZE", "RDMA_INLINE")
def _queues(ends: Ends) -> None:
    sizes = {RDMA_SQSIZE: 20, RDMA_RQSIZE: 30, RDMA_INLINE: 100}
    pair = ends.pair(*((SOL_RDMA, name, value) for name, value in sizes.items()))
    ends.moves(*pair)
    for fd in pair:
        cap = fd.id.qp.cap
        assert (cap.max_send_wr, cap.max_recv_wr) == (20, 30)
        assert cap.max_inline_data >= 100
        for name, value in sizes.items():
            assert ends.api.rgetsockopt(fd, SOL_RDMA, name) == value
            _fails(errno.EINVAL, ends.api.rsetsockopt, fd, SOL_RDMA, name, 40)


@row("RDMA_ROUTE")
def _routes(ends: Ends) -> None:
    """The path of one connection, for another."""
    api, listener, client = ends.api, ends.listener(), ends.new()
    api.rconnect(client, api.rgetsockname(listener))
    (path,) = client.id.route.path_rec
    data = PathData(path).pack()
    other = ends.new()
    api.rsetsockopt(other, SOL_RDMA, RDMA_ROUTE, data)
    assert api.rgetsockopt(other, SOL_RDMA, RDMA_ROUTE, 1000) == data
    api.rconnect(other, api.rgetsockname(listener))
    ends.keep(api.raccept(listener)[0])
    ends.moves(other, ends.keep(api.raccept(listener)[0]))
    assert other.id.route.path_rec == (path,)
    _fails(errno.EINVAL, api.rsetsockopt, other, SOL_RDMA, RDMA_ROUTE, data)


# -- mapped memory ---------------------------------------------------------------------------------------------------


@row("riomap", "riounmap", "riowrite", "RDMA_IOMAPSIZE", "PROT_WRITE", "PROT_NONE")
def _mapped_memory(ends: Ends) -> None:
    api, (client, server) = ends.api, ends.pair((SOL_RDMA, RDMA_IOMAPSIZE, 1))
    memory = bytearray(20)
    assert api.rgetsockopt(client, SOL_RDMA, RDMA_IOMAPSIZE) == 1
    assert api.riomap(server, memory, 10, PROT_WRITE, 0, 500) == 500
    _fails(errno.ENOSPC, api.riomap, server, memory, 10, PROT_READ | PROT_WRITE, 0, -1)
    _fails(errno.EINVAL, api.riomap, server, memory, 10, PROT_NONE, 0, -1)
    ends.moves(client, server)
    assert api.riowrite(client, b"mapped...", 6, 503, 0) == 6
    assert api.riowrite(client, b"the end", 7, 508, 0) == 2
    ends.moves(client, server)
    assert memory == bytes(3) + b"mappe" + b"th" + bytes(10)
    _fails(errno.EFAULT, api.riowrite, client, b"x", 1, 510, 0)
    api.riounmap(server, 500)
    ends.moves(client, server)
    _fails(errno.EFAULT, api.riowrite, client, b"x", 1, 500, 0)


@pytest.mark.parametrize("test", ROWS, ids=[", ".join(names) for names in ROWS.values()])
def test_row(ends: Ends, test: Row) -> None:
    test(ends)


@pytest.mark.skipif(not PAGE.exists(), reason="needs librdmacm-dev")
def test_every_name_of_the_page_has_a_row() -> None:
    text = gzip.decompress(PAGE.read_bytes()).decode()
    names = set(re.findall(r"\b(?:SO|TCP|IPV6|MSG|O|RDMA|PF|SOCK|PROT)_[A-Z0-9]+\b", text))
    calls = re.search(r"functions are defined:(.*)Functions take", text, re.DOTALL)
    assert calls is not None
    names |= set(re.findall(r"\br\w+", calls[1])) | set(re.findall(r"^(rio\w+),? ", text, re.MULTILINE))
    assert len(names) > 45
    assert names <= {name for row in ROWS.values() for name in row}
