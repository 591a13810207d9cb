"""The methods of a socket that move bytes."""

from __future__ import annotations

import errno
import mmap
import socket as _socket
from collections.abc import Callable, Iterable
from typing import IO, Any

from rdmacm.errors import cm_error
from rdmacm.proto.rsocket.engine import MAX_MESSAGE, StreamEngine
from rdmacm.proto.rsocket.states import RECEIVING, SENDING, State
from rdmacm.rsocket.base import DONTWAIT, SocketBase
from rdmacm.rsocket.options import check_int
from rdmacm.rsocket.stream import StreamState
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.enums import AccessFlag

_WAITALL = int(getattr(_socket, "MSG_WAITALL", 0))
_NOSIGNAL = int(getattr(_socket, "MSG_NOSIGNAL", 0))
_PEEK = int(_socket.MSG_PEEK)
_SEND_FLAGS = DONTWAIT | _NOSIGNAL
_RECEIVE_FLAGS = _SEND_FLAGS | _WAITALL | _PEEK


class Transfer(SocketBase):
    """The part of :class:`rdmacm.rsocket.socket` that sends, receives, and writes to mapped memory."""

    # -- receiving ------------------------------------------------------------------------------------

    def _receive(self, take: Callable[[StreamEngine, bool], int], flags: int, step: str) -> int:
        """Wait until there are bytes, and return what ``take(engine, peek)`` returns; 0 at the end of the stream."""
        if flags & ~_RECEIVE_FLAGS:
            raise cm_error(errno.EOPNOTSUPP, f"flags {flags:#x}", step, hint="MSG_PEEK, MSG_DONTWAIT, MSG_WAITALL")
        state = self._stream(step)

        def ready() -> tuple[int] | None:
            engine = state.engine
            if engine is not None and engine.unread:
                taken = take(engine, bool(flags & _PEEK))
                if engine.work:
                    state.flush()
                return (taken,)
            if state.error is not None:
                raise state.error
            if engine is None or engine.state in RECEIVING:
                return None
            if engine.state is State.FAILED:
                raise state.failed(step)
            return (0,)

        return self._wait(ready, flags, step)[0]

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Up to ``bufsize`` bytes, as soon as there are any; none at the end of the stream."""
        if bufsize < 0:
            raise ValueError("negative buffersize in recv")
        if flags & _WAITALL and not flags & _PEEK:
            whole = bytearray(bufsize)
            return bytes(whole[: self.recv_into(whole, 0, flags)])
        found: list[bytes] = []

        def take(engine: StreamEngine, peek: bool) -> int:
            pieces = engine.pieces(bufsize)
            found.append(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
            if not peek:
                engine.consume(len(found[0]))
            return len(found[0])

        if bufsize:
            self._receive(take, flags, "recv")
        else:
            self._stream("recv")
        return found[0] if found else b""

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """As :meth:`recv`, into a buffer; returns the number of bytes. ``nbytes`` 0 is the whole buffer."""
        if nbytes < 0:
            raise ValueError("negative buffersize in recv_into")
        view = byte_view(buffer)
        if nbytes > len(view):
            raise ValueError("buffer too small for requested bytes")
        return self._fill([view[: nbytes or len(view)]], flags, "recv_into")

    def _fill(self, views: list[memoryview], flags: int, step: str) -> int:
        """Fill one buffer after the other."""

        def take(engine: StreamEngine, peek: bool) -> int:
            done = 0
            for view in views:
                at = 0
                for piece in engine.pieces(len(view), done):
                    view[at : at + len(piece)] = piece
                    at += len(piece)
                done += at
            if not peek:
                engine.consume(done)
            return done

        size = sum(map(len, views))
        if not size:
            self._stream(step)
            return 0
        done = self._receive(take, flags, step)
        if flags & _WAITALL and not flags & _PEEK and 0 < done < size:
            done += self._fill(_after(views, done), flags, step)
        return done

    def recvfrom(self, bufsize: int, flags: int = 0) -> tuple[bytes, Any]:
        """:meth:`recv`, and the source of a datagram; of a stream, which has one peer, None."""
        return self.recv(bufsize, flags), None

    def recvfrom_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> tuple[int, Any]:
        """:meth:`recv_into`, and the source as of :meth:`recvfrom`."""
        return self.recv_into(buffer, nbytes, flags), None

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0) -> tuple[bytes, list[Any], int, Any]:
        """:meth:`recv`, no ancillary data, the flags, and the source as of :meth:`recvfrom`.

        The flag MSG_TRUNC tells that a datagram was longer.
        """
        if ancbufsize < 0:
            raise ValueError("invalid ancillary data buffer length")
        return self.recv(bufsize, flags), [], 0, None

    def recvmsg_into(
        self, buffers: Iterable[Buffer], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        """As :meth:`recvmsg`, into one buffer after the other; returns the number of bytes instead of them."""
        if ancbufsize < 0:
            raise ValueError("invalid ancillary data buffer length")
        return self._fill([byte_view(buffer) for buffer in buffers], flags, "recvmsg_into"), [], 0, None

    # -- sending --------------------------------------------------------------------------------------

    def _send(self, views: list[memoryview], flags: int, step: str, until: float | None = None) -> int:
        """Send as much as fits, and at least a byte; return how many bytes that is."""
        if flags & ~_SEND_FLAGS:
            raise cm_error(errno.EOPNOTSUPP, f"flags {flags:#x}", step, hint="MSG_DONTWAIT or MSG_NOSIGNAL")
        state = self._stream(step)
        # As one message where that is possible: the peer sees the pieces together.
        given = [memoryview(b"".join(views))] if len(views) > 1 and sum(map(len, views)) <= MAX_MESSAGE else views

        def ready() -> tuple[int] | None:
            engine = state.engine
            if state.error is not None:
                raise state.error
            if engine is None or not state.is_established:
                return None
            if not any(map(len, given)):
                return (0,)  # as TCP, also after the peer has closed
            self._check_sending(state, engine, step)
            done = 0
            for view in given:
                sent = engine.write(view)
                done += sent
                if sent < len(view):
                    break
            if done:
                state.flush()
            return (done,) if done else None

        return self._wait(ready, flags, step, until)[0]

    def _check_sending(self, state: StreamState, engine: StreamEngine, step: str) -> None:
        if engine.state in SENDING:
            return
        if engine.state is State.FAILED:
            raise state.failed(step)
        text = "the peer has closed the stream, or shutdown() has closed this half"
        raise BrokenPipeError(errno.EPIPE, f"{step} {self._peer_text()}: {text}")

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Send bytes; return how many, all of them if the socket blocks without a timeout."""
        view = byte_view(data)
        done = self._send([view], flags, "send")
        while done < len(view) and self._timeout is None and not flags & DONTWAIT:
            try:
                done += self._send([view[done:]], flags, "send")
            except OSError:
                break  # the next call raises it
        return done

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Send all bytes, within the timeout as a whole. After an error it is not known how many were sent."""
        view = byte_view(data)
        self._stream("sendall")
        dispatcher = self._dispatcher
        assert dispatcher is not None
        until = dispatcher.clock() + self._timeout if self._timeout else None
        done = self._send([view], flags, "sendall", until)
        while done < len(view):
            done += self._send([view[done:]], flags, "sendall", until)

    def sendto(self, data: Buffer, *flags_and_address: Any) -> int:  # noqa: ARG002
        """``sendto(data, address)`` or ``sendto(data, flags, address)``. EISCONN, ENOTCONN: it is a stream."""
        code = errno.ENOTCONN if self._state is None else errno.EISCONN
        raise cm_error(code, "a stream has one peer", "sendto", hint="SOCK_DGRAM")

    def sendmsg(
        self, buffers: Iterable[Buffer], ancdata: Iterable[Any] = (), flags: int = 0, address: Any = None
    ) -> int:
        """Send one buffer after the other; return how many bytes were sent. EOPNOTSUPP: ancillary data."""
        if _check_ancillary(ancdata):
            raise cm_error(errno.EOPNOTSUPP, "an rsocket has no ancillary data", "sendmsg")
        if address is not None:
            if not isinstance(address, tuple):
                raise TypeError(f"sendmsg(): a socket address is a tuple (host, port), not {address!r}")
            raise cm_error(errno.EISCONN, "a stream has one peer", "sendmsg")
        return self._send([byte_view(buffer) for buffer in buffers], flags, "sendmsg")

    def sendfile(self, file: IO[bytes], offset: int = 0, count: int | None = None) -> int:
        """Send a file from ``offset`` on, up to ``count`` bytes or its end; return how many bytes were sent."""
        if "b" not in getattr(file, "mode", "b"):
            raise ValueError("file should be opened in binary mode")
        if count is not None and not isinstance(count, int):
            raise TypeError(f"count must be a positive integer (got {count!r})")
        if count is not None and count <= 0:
            raise ValueError(f"count must be a positive integer (got {count!r})")
        if self._timeout == 0:
            raise ValueError("non-blocking sockets are not supported")
        if offset:
            file.seek(offset)
        sent = 0
        try:
            while count is None or sent < count:
                data = file.read(1 << 16 if count is None else min(1 << 16, count - sent))
                if not data:
                    break
                self.sendall(data)
                sent += len(data)
        finally:
            if sent and hasattr(file, "seek"):
                file.seek(offset + sent)  # after an error: behind what is known to be sent
        return sent

    # -- I/O mappings ---------------------------------------------------------------------------------

    def riomap(self, buffer: Buffer, prot: int = mmap.PROT_WRITE, flags: int = 0, offset: int = -1) -> int:
        """Let the peer write to a buffer with :meth:`riowrite`, riomap in rsocket(7); returns the offset that it uses.

        ``prot``: PROT_WRITE, or with PROT_READ also for RDMA READs. ``offset`` -1 is the address of the buffer. The
        peer may use it after the next data that it receives. ENOSPC: the peer's table is full (RDMA_IOMAPSIZE).
        """
        state = self._stream("riomap")
        if flags or prot & ~(mmap.PROT_READ | mmap.PROT_WRITE) or not prot:
            raise cm_error(errno.EINVAL, "flags are 0, and prot is of PROT_READ and PROT_WRITE", "riomap")
        access = AccessFlag.LOCAL_WRITE
        if prot & mmap.PROT_WRITE:
            access |= AccessFlag.REMOTE_WRITE
        if prot & mmap.PROT_READ:
            access |= AccessFlag.REMOTE_READ
        return state.dispatcher.drive_once(lambda: state.map(buffer, access, offset))

    def riounmap(self, offset: int) -> None:
        """Undo :meth:`riomap`, which has returned ``offset``. The peer cannot write from here on."""
        state = self._stream("riounmap")
        state.dispatcher.drive_once(lambda: state.unmap(offset))

    def riowrite(self, data: Buffer, offset: int, flags: int = 0) -> int:
        """Write to the memory that the peer has mapped at an offset, riowrite in rsocket(7); returns how many bytes.

        Fewer than all: the mappings end there. Data that are sent afterwards arrive after them. EFAULT: nothing is
        mapped at ``offset``.
        """
        view = byte_view(data)
        state = self._stream("riowrite")

        def ready() -> tuple[int] | None:
            engine = state.engine
            if engine is None or not state.is_established:
                return None
            self._check_sending(state, engine, "riowrite")
            if len(view) and engine.mapping_at(offset) is None:
                raise cm_error(errno.EFAULT, f"the peer has mapped nothing at {offset}", "riowrite", self._peer_text())
            done = engine.write_mapped(view, offset)
            state.flush()
            return (done,) if done or not len(view) else None

        done = self._wait(ready, flags, "riowrite")[0]
        is_patient = self._timeout is None and not flags & DONTWAIT
        while is_patient and done < len(view) and state.engine is not None and state.engine.mapping_at(offset + done):
            done += self.riowrite(view[done:], offset + done, flags)
        return done


def _check_ancillary(items: Iterable[Any]) -> int:
    """How many items of ancillary data these are. TypeError: one is none."""
    found = list(items)
    for item in found:
        if not isinstance(item, tuple) or len(item) != 3:
            raise TypeError("sendmsg(): an item of ancillary data is a tuple (level, type, data)")
        level, kind, data = item
        check_int(level)
        check_int(kind)
        byte_view(data)
    return len(found)


def _after(views: list[memoryview], size: int) -> list[memoryview]:
    """The parts of buffers after the first ``size`` bytes."""
    rest = []
    for view in views:
        skipped = min(size, len(view))
        size -= skipped
        rest.append(view[skipped:])
    return rest
