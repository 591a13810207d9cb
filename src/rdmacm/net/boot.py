"""A secret that the processes of a host share without storing anything."""

from __future__ import annotations

import hashlib
import os

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: Stands for the boot id on systems that have none: each process has its own.
_process_key = b""


def namespace_key() -> str:
    """Identifies the calling thread's network namespace: ``net:[INODE]``, or an empty string if unknown."""
    try:
        return os.readlink("/proc/thread-self/ns/net")
    except OSError:
        return ""


def boot_key() -> bytes:
    """32 bytes that all processes of the calling thread's network namespace share until the host restarts.

    They are made of the kernel's random boot id, which every process of the host can read and no other host knows.
    """
    global _process_key
    try:
        with open(_BOOT_ID, "rb") as file:
            boot_id = file.read()
    except OSError:
        boot_id = _process_key = _process_key or os.urandom(32)
    return hashlib.blake2b(
        namespace_key().encode(), key=boot_id[:64], digest_size=32, person=b"rdmacm boot key"
    ).digest()
