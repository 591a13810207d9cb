"""recvmsg(2) that keeps the interpreter, for a process that computes in Python.

Every call of Python's sockets gives the interpreter up, and a thread that computes keeps it for 5 ms then
(:func:`sys.getswitchinterval`): 200 packets a second are all that are read while it does. A few hundred strays a second
would take an established connection's place in the socket's queue until its peer gives up. This call takes 4 µs more
than Python's, and does not wait, so it is used only while the other has had to.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable
from socket import AF_INET, AF_INET6

#: :meth:`socket.socket.recvmsg_into`, with one buffer.
ReadMessage = Callable[[list[memoryview], int], "tuple[int, list[tuple[int, int, bytes]], int, tuple[str, int]]"]

_FAMILY, _PORT = struct.Struct("=H"), struct.Struct("!H")
_SCOPE = struct.Struct("=I")
#: struct cmsghdr of Linux; its data follow, and the next one begins at a multiple of its alignment.
_CMSGHDR = struct.Struct("@Nii")
_NAME_SPACE = 28  # struct sockaddr_in6


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Msghdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def held_reader(sock: socket.socket) -> ReadMessage | None:
    """The ``recvmsg_into`` of a socket that does not block, without giving up the interpreter; None if there is none.

    It takes one buffer, and reports the address and the ancillary data as Python does. Only one thread at a time calls
    it.
    """
    if sys.platform != "linux":
        return None
    try:
        recvmsg = ctypes.PyDLL(None, use_errno=True).recvmsg
    except (OSError, AttributeError):  # a program that is linked statically
        return None
    recvmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    recvmsg.restype = ctypes.c_ssize_t
    fd, name, control = sock.fileno(), ctypes.create_string_buffer(_NAME_SPACE), ctypes.create_string_buffer(256)
    piece, message = _Iovec(), _Msghdr()
    message.name, message.control = ctypes.addressof(name), ctypes.addressof(control)
    message.iov, message.iov_length = ctypes.addressof(piece), 1
    where = ctypes.addressof(message)

    def recvmsg_into(
        buffers: list[memoryview], space: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, tuple[str, int]]:
        (buffer,) = buffers
        piece.base, piece.length = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer)
        message.name_length, message.control_length = _NAME_SPACE, min(space, len(control))
        size = recvmsg(fd, where, socket.MSG_DONTWAIT)
        if size < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code)) if code != errno.EAGAIN else BlockingIOError(code, "no datagram")
        return size, _ancillary(control.raw[: message.control_length]), message.flags, _address(name.raw)

    return recvmsg_into


def _ancillary(data: bytes) -> list[tuple[int, int, bytes]]:
    found, at = [], 0
    while len(data) - at >= _CMSGHDR.size:
        length, level, kind = _CMSGHDR.unpack_from(data, at)
        if length < _CMSGHDR.size:
            break
        found.append((level, kind, data[at + _CMSGHDR.size : at + length]))
        at += -(-length // 8) * 8
    return found


def _address(name: bytes) -> tuple[str, int]:
    (family,), (port,) = _FAMILY.unpack_from(name), _PORT.unpack_from(name, 2)
    if family == AF_INET6:
        scope_id = _SCOPE.unpack_from(name, 24)[0]
        flow = int.from_bytes(name[4:8], "big")
        return socket.inet_ntop(AF_INET6, name[8:24]), port, flow, scope_id  # type: ignore[return-value]
    return socket.inet_ntop(AF_INET, name[4:8]), port
