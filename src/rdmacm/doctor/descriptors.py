"""Look into a descriptor of another process."""

from __future__ import annotations

import ctypes
import os
import select
import sys

#: The number of pidfd_getfd(2) on every architecture that Python is used on (Linux 5.6).
_PIDFD_GETFD = 438


def is_readable(pid: int, fd: int) -> bool:
    """Whether a descriptor of a process has something to read, by poll(2) of a copy; nothing is read.

    False where this process may not look into the other one, too: that takes the rights of ptrace(2).
    """
    if sys.platform != "linux":
        return False
    syscall = ctypes.CDLL(None).syscall
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        copy = syscall(_PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if copy < 0:
        return False
    try:
        poll = select.poll()
        poll.register(copy, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(copy)
