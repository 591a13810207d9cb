"""A network namespace for this process alone."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["enter_own_network", "in_network", "outside"]

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_THREAD = "/proc/thread-self/ns/net"

#: The network that this process has left; None if it is still there, or has no right to go back.
_left: int | None = None


def enter_own_network() -> bool:
    """Give this process and its children a network namespace of their own, with the loopback interface up.

    Returns False, and changes nothing, where that is not permitted.
    """
    global _left
    libc = ctypes.CDLL(None, use_errno=True)
    left = os.open(_THREAD, os.O_RDONLY | os.O_CLOEXEC)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET) == 0:
        _left = left
    else:
        os.close(left)
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))  # struct ifreq
    return True


@contextlib.contextmanager
def in_network(fd: int) -> Iterator[None]:
    """Move the calling thread, and only that, to the network namespace of a descriptor for the length of a block."""
    before = os.open(_THREAD, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(fd)
        try:
            yield
        finally:
            _setns(before)
    finally:
        os.close(before)


def _setns(fd: int) -> None:
    # os.setns() exists since Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def outside() -> contextlib.AbstractContextManager[None]:
    """Move the calling thread to the network that its process has left, for the length of a block.

    What is fetched from an archive comes from there. Nothing changes where no way leads back.
    """
    return contextlib.nullcontext() if _left is None else in_network(_left)
