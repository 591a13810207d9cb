"""Namespaces for any user: user_namespaces(7), pid_namespaces(7), mount_namespaces(7), setns(2)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def enter_new_user_namespace() -> None:
    """Become root of a new user namespace, which stands for the user of this process outside.

    The children of this process are in a PID namespace. The first of them is its process 1, at whose end the kernel
    ends all others. The process has one thread.
    """
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEWUSER | _NEWPID | _NEWNS | _NEWNET | _NEWIPC), "unshare")
    _write("/proc/self/uid_map", f"0 {user} 1")
    _write("/proc/self/setgroups", "deny")  # else no group may be mapped
    _write("/proc/self/gid_map", f"0 {group} 1")


def enter_new_host(name: str) -> None:
    """Enter a network namespace, with a host name and mounts of its own."""
    _check(_libc.unshare(_NEWNET | _NEWNS | _NEWUTS), "unshare")
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")
    # /sys/class/net is then that of the host. A container may refuse it, and few programs look there.
    with contextlib.suppress(OSError):
        _mount("sysfs", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def keep_mounts_private() -> None:
    """Let nobody else see what is mounted from now on, and mount the /proc of this PID namespace."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def replace_file(path: str, text: str) -> None:
    """Put a text in the place of a file, in this mount namespace alone."""
    with tempfile.NamedTemporaryFile("w", prefix="rdmacm-lab-") as file:  # the mount keeps what it shows
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        _mount(file.name, path, None, _MS_BIND)


def join_host(pid: int) -> None:
    """Enter the namespaces of a process; children are in its PID namespace. The process has one thread."""
    place = os.getcwd()
    descriptor = os.pidfd_open(pid)
    try:
        flags = _NEWUSER | _NEWPID | _NEWNS | _NEWNET | _NEWIPC | _NEWUTS
        _check(_libc.setns(descriptor, flags), "setns")
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # it is the root directory now
        os.chdir(place)


def end_with_parent(number: int) -> None:
    """Get a signal when the thread that has made this process ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(source: str, path: str, kind: str | None, flags: int) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, path, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), None), f"mount {path}")


def _check(code: int, what: str) -> None:
    if code < 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number), what)
