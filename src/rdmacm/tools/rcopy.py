"""``rdmacm rcopy``: copy a file to another host through an rsocket, with the protocol of rcopy(1).

Each request has a header of 16 bytes in the client's byte order: version 0, the command, the length of the request with
its header, a number, and an id. OPEN has the mode of the file as its number, and its path follows, filled up with zeros
to a multiple of 8 bytes. WRITE is followed by the size of the file, 8 bytes, and by the file. CLOSE ends the copy. The
answer is the header, with the bit 0x80 in the command, and an errno as the number.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import stat
import struct
import time
from pathlib import Path
from typing import BinaryIO, Self

from rdmacm import rsocket
from rdmacm.errors import CmDisconnectedError, RdmaError, cm_error, printable
from rdmacm.tools.arguments import add_port, add_provider, add_wait_limit
from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.names import looking_up
from rdmacm.tools.output import Page, Parser, write, write_error, write_json
from rdmacm.tools.serving import announce

PAGE = Page(
    command="rcopy",
    summary=COMMANDS["rcopy"],
    description="""
        The server takes files of its clients, one client after the other, until it is interrupted. The client copies
        one file: to the path after the colon, or else to the path that it has here. Protocol, options and output are
        those of rcopy(1) of librdmacm, which may run at the other end, on a host of the same byte order.

        The server writes files with its own permissions, wherever a client asks it to, and asks for no password: start
        it for hosts that you trust only. With --directory it refuses paths that lead out of a directory.

        With --json, the client writes one object instead: path, bytes, seconds.
    """,
    examples=(
        ("rdmacm rcopy --directory /srv/incoming", "Take files into a directory."),
        ("rdmacm rcopy data.bin storage-7:copy.bin", "Copy a file there."),
    ),
    see_also="rcopy(1), rsocket(7), rdmacm rstream",
    environment=("RDMACM_PROVIDER", "RDMACM_CORE"),
)

_HEADER = struct.Struct("=BBHIQ")
_OPEN, _CLOSE, _WRITE, _ANSWER = 1, 2, 3, 0x80
_SIZE = struct.Struct("=Q")
#: Bytes that are read from a file, and received, at a time.
_PART = 1 << 20


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm rcopy``."""
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="Run as the client: the file to copy.")
    add("destination", nargs="?", metavar="SERVER[:PATH]", help="The server, and the path of the copy there.")
    add_port(parser, 7427)
    add("--directory", metavar="DIR", help="The server writes below this directory only.")
    add("--json", action="store_true", help="Write one JSON object instead of the progress; client only.")
    add_wait_limit(parser)
    add_provider(parser)


def run(args: argparse.Namespace) -> int:
    """Run as the server or the client."""
    if args.source is None:
        if args.json:
            args.parser.error("--json is an option of the client")
        return _serve(args)
    if args.destination is None:
        args.parser.error("a client needs SOURCE and SERVER")
    if args.directory is not None:
        args.parser.error("--directory is an option of the server")
    return _copy(args)


# -- both ends -------------------------------------------------------------------------------------------------


def _receive(stream: rsocket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = stream.recv_into(into[done:])
        if not got:
            raise CmDisconnectedError(errno.ECONNRESET, "the peer has closed the stream", "recv")
        done += got


def _receive_bytes(stream: rsocket.socket, size: int) -> bytes:
    found = bytearray(size)
    _receive(stream, memoryview(found))
    return bytes(found)


def _receive_header(stream: rsocket.socket) -> tuple[int, int, int, int]:
    """Command, length of what follows, number and id of a request or an answer."""
    version, command, length, number, identity = _HEADER.unpack(_receive_bytes(stream, _HEADER.size))
    if version or length < _HEADER.size:
        raise cm_error(errno.EPROTO, f"invalid version {version} or length {length}", "recv")
    return command, length - _HEADER.size, number, identity


# -- client ----------------------------------------------------------------------------------------------------


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise cm_error(error.errno or errno.EIO, str(error.strerror), "open", path) from error


def _copy(args: argparse.Namespace) -> int:
    host, path = _server_and_path(args.destination)
    path = path or args.source

    def say(text: str) -> None:
        if not args.json:
            write(text)

    with _opened(args.source) as file:
        info = os.fstat(file.fileno())
        with looking_up(host, args.port):
            stream = rsocket.create_connection((host, args.port), args.timeout, provider=args.provider)
        with stream:
            say("opening...")
            name = os.fsencode(path)
            name += bytes(8 - len(name) % 8)
            if _HEADER.size + len(name) > 0xFFFF:
                raise cm_error(errno.ENAMETOOLONG, "the path is too long", "open")
            stream.sendall(_HEADER.pack(0, _OPEN, _HEADER.size + len(name), info.st_mode, 0) + name)
            _take_answer(stream, _OPEN, path)
            say("transferring")
            head = _HEADER.pack(0, _WRITE, _HEADER.size + _SIZE.size, 0, 0) + _SIZE.pack(info.st_size)
            stream.sendall(head)
            say("...")
            started = time.perf_counter()
            left = info.st_size
            while left:
                part = file.read(min(left, _PART))
                if not part:
                    raise cm_error(errno.EIO, f"the file became {left} bytes shorter meanwhile", "read", args.source)
                stream.sendall(part)
                left -= len(part)
            _take_answer(stream, _WRITE, path)
            seconds = time.perf_counter() - started
            say("closing...")
            stream.sendall(_HEADER.pack(0, _CLOSE, _HEADER.size, 0, 0))
            _take_answer(stream, _CLOSE, path)
            say("done\n")
    size = info.st_size
    if args.json:
        write_json({"path": path, "bytes": size, "seconds": round(seconds, 6)})
    say(f"{size} bytes in {seconds:.2f} seconds = {size * 8 / 1e9 / max(seconds, 1e-6):.2f} Gb/sec\n")
    return 0


def _server_and_path(text: str) -> tuple[str, str]:
    """The parts of ``SERVER:PATH`` and ``[IPV6]:PATH``."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    host, _, path = text.partition(":")
    return host, path


def _take_answer(stream: rsocket.socket, command: int, path: str) -> None:
    answer, rest, status, _ = _receive_header(stream)
    if rest or answer != command | _ANSWER:
        text = f"invalid length {rest + _HEADER.size} or bad command response {answer:x}:{command | _ANSWER:x}"
        raise cm_error(errno.EPROTO, text, "recv")
    if status:
        raise cm_error(status, os.strerror(status), {_OPEN: "open", _WRITE: "write"}.get(command, "close"), path)


# -- server ----------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    with _listen(args) as listener:
        assert listener.id is not None
        announce(listener.id)
        while True:
            write("waiting for connection...")
            stream, address = listener.accept()
            write(f"client: {address[0]}\n")
            with stream, _Copy(stream, args.directory) as copy:
                try:
                    copy.serve()
                except RdmaError as error:
                    write_error(str(error))


def _listen(args: argparse.Namespace) -> rsocket.socket:
    import socket

    try:
        return rsocket.create_server(
            ("::", args.port), family=socket.AF_INET6, dualstack_ipv6=True, provider=args.provider
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return rsocket.create_server(("0.0.0.0", args.port), provider=args.provider)  # a host without IPv6


class _Copy:
    """One client of the server."""

    def __init__(self, stream: rsocket.socket, directory: str | None) -> None:
        self._stream = stream
        self._directory = None if directory is None else Path(directory).resolve()
        #: The open file; -1 for none.
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def serve(self) -> None:
        """Answer requests, until one fails or the client ends."""
        handlers = {_OPEN: self._open, _WRITE: self._write, _CLOSE: self._finish}
        while True:
            try:
                command, rest, number, identity = _receive_header(self._stream)
            except CmDisconnectedError:
                return
            try:
                if command not in handlers:
                    raise OSError(errno.EINVAL, f"unknown command {command}")
                handlers[command](rest, number)
                status = 0
            except RdmaError:
                raise
            except OSError as error:
                write(f"{error.strerror}\n")
                status = error.errno or errno.EIO
            self._stream.sendall(_HEADER.pack(0, command | _ANSWER, _HEADER.size, status, identity))
            if status:
                return

    def _open(self, rest: int, mode: int) -> None:
        write("opening: ")
        name = os.fsdecode(_receive_bytes(self._stream, rest).partition(b"\0")[0])
        if self._file >= 0:
            raise OSError(errno.EBUSY, "cannot open another file")
        path = Path(name)
        if self._directory is not None:
            path = (self._directory / path).resolve()
            if not path.is_relative_to(self._directory):
                raise OSError(errno.EACCES, f"{printable(name)} is outside of {self._directory}")
        write(f"{printable(name)}, ")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, stat.S_IMODE(mode) & 0o777)

    def _write(self, rest: int, _number: int) -> None:
        write("transferring")
        if rest != _SIZE.size:
            raise OSError(errno.EINVAL, f"...invalid message length {rest + _HEADER.size}")
        (size,) = _SIZE.unpack(_receive_bytes(self._stream, rest))
        if self._file < 0:
            raise OSError(errno.EINVAL, "...file not opened")
        write(f"...{size} bytes...")
        if size:
            os.posix_fallocate(self._file, 0, size)
        part = memoryview(bytearray(min(size, _PART)))
        offset = 0
        while offset < size:
            got = self._stream.recv_into(part[: min(size - offset, _PART)])
            if not got:
                raise CmDisconnectedError(errno.ECONNRESET, "the client has closed the stream", "recv")
            done = 0
            while done < got:
                done += os.pwrite(self._file, part[done:got], offset + done)
            offset += got

    def _finish(self, _rest: int, _number: int) -> None:
        write("closing...")
        self._close()
        write("done\n")

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)
