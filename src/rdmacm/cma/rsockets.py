"""The calls of ``rdma/rsocket.h``, rsocket(7): each is a method of :class:`rdmacm.rsocket.socket`, which stands for C's
descriptor.

Addresses are tuples, as of Python's sockets, and are returned. A buffer comes with its length, as in C, and is filled.
Lists of buffers have no count.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rdmacm import rsocket as _rsocket
from rdmacm.address import SockAddr
from rdmacm.errors import cm_error
from rdmacm.rsocket import FileLike
from rdmacm.rsocket import epoll as _epoll
from rdmacm.verbs.buffers import Buffer, byte_view

Socket = _rsocket.socket
Epoll = _epoll.Epoll


def rsocket(domain: int, type: int, protocol: int = 0) -> Socket:
    """rsocket(7)."""
    return Socket(domain, type, protocol)


def rbind(socket: Socket, addr: SockAddr) -> None:
    """rbind, rsocket(7)."""
    socket.bind(addr)


def rlisten(socket: Socket, backlog: int) -> None:
    """rlisten, rsocket(7)."""
    socket.listen(backlog)


def raccept(socket: Socket) -> tuple[Socket, Any]:
    """raccept, rsocket(7): the new socket and its peer's address."""
    return socket.accept()


def rconnect(socket: Socket, addr: SockAddr) -> None:
    """rconnect, rsocket(7)."""
    socket.connect(addr)


def rshutdown(socket: Socket, how: int) -> None:
    """rshutdown, rsocket(7)."""
    socket.shutdown(how)


def rclose(socket: Socket | Epoll) -> None:
    """rclose, rsocket(7); also of what :func:`repoll_create1` returns."""
    socket.close()


def rrecv(socket: Socket, buf: Buffer, len: int, flags: int) -> int:
    """rrecv, rsocket(7): how many bytes ``buf`` has got."""
    return socket.recv_into(buf, len, flags) if len else 0


def rrecvfrom(socket: Socket, buf: Buffer, len: int, flags: int) -> tuple[int, Any]:
    """rrecvfrom, rsocket(7): how many bytes ``buf`` has got, and from which address."""
    size, source = socket.recvfrom_into(buf, len, flags) if len else (0, None)
    return size, socket.getpeername() if source is None else source


def rrecvmsg(socket: Socket, iov: Sequence[Buffer], flags: int) -> int:
    """rrecvmsg, rsocket(7), with the buffers of the message: how many bytes they have got."""
    return socket.recvmsg_into(iov, 0, flags)[0]


def rread(socket: Socket, buf: Buffer, count: int) -> int:
    """rread, rsocket(7): how many bytes ``buf`` has got."""
    return rrecv(socket, buf, count, 0)


def rreadv(socket: Socket, iov: Sequence[Buffer]) -> int:
    """rreadv, rsocket(7): how many bytes the buffers have got."""
    return rrecvmsg(socket, iov, 0)


def rsend(socket: Socket, buf: Buffer, len: int, flags: int) -> int:
    """rsend, rsocket(7): how many bytes were sent."""
    return socket.send(byte_view(buf)[:len], flags)


def rsendto(socket: Socket, buf: Buffer, len: int, flags: int, dest_addr: SockAddr | None) -> int:
    """rsendto, rsocket(7): how many bytes were sent. A stream takes no address: EISCONN."""
    if dest_addr is None:
        return rsend(socket, buf, len, flags)
    return socket.sendto(byte_view(buf)[:len], flags, dest_addr)


def rsendmsg(socket: Socket, iov: Sequence[Buffer], flags: int) -> int:
    """rsendmsg, rsocket(7), with the buffers of the message: how many bytes were sent."""
    return socket.sendmsg(iov, (), flags)


def rwrite(socket: Socket, buf: Buffer, count: int) -> int:
    """rwrite, rsocket(7): how many bytes were sent."""
    return rsend(socket, buf, count, 0)


def rwritev(socket: Socket, iov: Sequence[Buffer]) -> int:
    """rwritev, rsocket(7): how many bytes were sent."""
    return rsendmsg(socket, iov, 0)


def rpoll(fds: Iterable[tuple[FileLike, int]], timeout: int) -> list[tuple[FileLike, int]]:
    """rpoll, rsocket(7): those that are ready, each with its revents. ``timeout``: milliseconds, -1 for ever."""
    return _rsocket.poll(fds, None if timeout < 0 else timeout / 1000)


def rselect(
    readfds: Iterable[FileLike],
    writefds: Iterable[FileLike],
    exceptfds: Iterable[FileLike],
    timeout: float | None,
) -> tuple[list[FileLike], list[FileLike], list[FileLike]]:
    """rselect, rsocket(7): those that are ready. ``timeout``: seconds, None for ever."""
    return _rsocket.select(readfds, writefds, exceptfds, timeout)


def repoll_create(size: int) -> Epoll:
    """repoll_create, as epoll_create(2): ``size`` is without effect, but not 0."""
    if size <= 0:
        raise cm_error(errno.EINVAL, f"size {size}", "repoll_create")
    return repoll_create1(0)


def repoll_create1(flags: int) -> Epoll:
    """repoll_create1, as epoll_create1(2), for :func:`repoll_ctl` and :func:`rclose`. ``flags``: 0 or EPOLL_CLOEXEC."""
    if flags & ~os.O_CLOEXEC:
        raise cm_error(errno.EINVAL, f"flags 0x{flags:x}", "repoll_create1")
    return Epoll()


def repoll_ctl(epfd: Epoll, op: int, fd: FileLike, event: tuple[int, object] | None) -> None:
    """repoll_ctl, as epoll_ctl(2), for rsockets and other descriptors; ``event``: the events, and the user's data.

    ``op``: EPOLL_CTL_ADD, EPOLL_CTL_MOD or EPOLL_CTL_DEL. Events are those of poll(2), and EPOLLONESHOT; of EPOLLRDHUP,
    an rsocket reports EPOLLIN. EINVAL: EPOLLET and other bits.
    """
    epfd.ctl(op, fd, event)


def repoll_wait(epfd: Epoll, maxevents: int, timeout: int) -> list[tuple[int, object]]:
    """repoll_wait, as epoll_wait(2): events, each with the user's data. ``timeout``: milliseconds, -1 for ever."""
    return repoll_pwait(epfd, maxevents, timeout, None)


def repoll_pwait(
    epfd: Epoll, maxevents: int, timeout: int, sigmask: Collection[int] | None
) -> list[tuple[int, object]]:
    """repoll_pwait, as epoll_pwait(2): :func:`repoll_wait`, with these signals blocked in this thread meanwhile."""
    return epfd.wait(maxevents, None if timeout < 0 else timeout / 1000, sigmask)


def rgetpeername(socket: Socket) -> Any:
    """rgetpeername, rsocket(7)."""
    return socket.getpeername()


def rgetsockname(socket: Socket) -> Any:
    """rgetsockname, rsocket(7)."""
    return socket.getsockname()


def rsetsockopt(socket: Socket, level: int, optname: int, optval: int | Buffer) -> None:
    """rsetsockopt, rsocket(7)."""
    socket.setsockopt(level, optname, optval)


def rgetsockopt(socket: Socket, level: int, optname: int, optlen: int = 0) -> int | bytes:
    """rgetsockopt, rsocket(7): an int, or with ``optlen`` bytes."""
    return socket.getsockopt(level, optname, optlen)


def rfcntl(socket: Socket, cmd: int, arg: int = 0) -> int:
    """rfcntl, rsocket(7): F_GETFL and F_SETFL, with O_NONBLOCK."""
    if cmd == fcntl.F_SETFL:
        socket.setblocking(not arg & os.O_NONBLOCK)
        return 0
    if cmd == fcntl.F_GETFL:
        return os.O_RDWR | (0 if socket.getblocking() else os.O_NONBLOCK)
    raise cm_error(errno.EOPNOTSUPP, f"command {cmd}", "rfcntl", hint="F_GETFL and F_SETFL")


def riomap(socket: Socket, buf: Buffer, len: int, prot: int, flags: int, offset: int) -> int:
    """riomap, rsocket(7): the offset by which the peer calls ``buf``."""
    return socket.riomap(byte_view(buf)[:len], prot, flags, offset)


def riounmap(socket: Socket, offset: int) -> None:
    """riounmap, rsocket(7), with the offset that riomap has returned in place of the buffer."""
    socket.riounmap(offset)


def riowrite(socket: Socket, buf: Buffer, count: int, offset: int, flags: int) -> int:
    """riowrite, rsocket(7): how many bytes were written."""
    return socket.riowrite(byte_view(buf)[:count], offset, flags)


SOL_RDMA = _rsocket.SOL_RDMA
RDMA_SQSIZE, RDMA_RQSIZE, RDMA_INLINE = _rsocket.RDMA_SQSIZE, _rsocket.RDMA_RQSIZE, _rsocket.RDMA_INLINE
RDMA_IOMAPSIZE, RDMA_ROUTE = _rsocket.RDMA_IOMAPSIZE, _rsocket.RDMA_ROUTE

EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD = _epoll.CTL_ADD, _epoll.CTL_DEL, _epoll.CTL_MOD

if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if getattr(value, "__module__", None) == __name__] + [
        "SOL_RDMA",
        "RDMA_SQSIZE",
        "RDMA_RQSIZE",
        "RDMA_INLINE",
        "RDMA_IOMAPSIZE",
        "RDMA_ROUTE",
        "EPOLL_CTL_ADD",
        "EPOLL_CTL_DEL",
        "EPOLL_CTL_MOD",
    ]
