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

__all__ = ["enter_own_network", "outside"]

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_THREAD = "/proc/thread-self/ns/net"

#: The network that this process has left.
_left: int | None = None


def enter_own_network() -> bool:
    """Give this process and its children a network namespace of their own, with the loopback interface up.

    Returns False, and changes nothing, where that is not permitted.
    """
    global _left
    libc = ctypes.CDLL(None, use_errno=True)
    left = os.open(_THREAD, os.O_RDONLY | os.O_CLOEXEC)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET):
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            os.close(left)
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))  # struct ifreq
    _left = left
    return True


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Move the calling thread to the network that its process has left, for the length of a block.

    What is fetched from an archive comes from there. Nothing changes where the way back is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open(_THREAD, os.O_RDONLY | os.O_CLOEXEC)
    try:
        has_moved = _left is not None and libc.setns(_left, _CLONE_NEWNET) == 0
        try:
            yield
        finally:
            if has_moved and libc.setns(own, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(own)
