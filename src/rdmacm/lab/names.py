"""Labs by name: a file for each, of its user, that says where its hosts are. It is locked while the lab is there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rdmacm.errors import cm_error
from rdmacm.lab.wiring import NAME


def _directory() -> str:
    """The directory of the files, which nobody else may write to."""
    above = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"
    path = os.path.join(above, f"rdmacm-lab-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise cm_error(errno.EPERM, "the directory belongs to another user", "lab", path)
    return path


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextmanager
def published(name: str, hosts: Mapping[str, int]) -> Iterator[None]:
    """Let others find the hosts, by their process ids, for the length of a block. RdmaError: EEXIST, EINVAL."""
    if not NAME.fullmatch(name):
        raise cm_error(errno.EINVAL, "no name of a lab: letters, digits and hyphens", "lab", name)
    path = os.path.join(_directory(), name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _is_locked(descriptor):
            raise cm_error(errno.EEXIST, "a lab of this name is there already", "lab", name, "--name NAME")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(dict(hosts)).encode())
        try:
            yield
        finally:
            os.unlink(path)
    finally:
        os.close(descriptor)


def published_labs() -> dict[str, dict[str, int]]:
    """The labs of this user that are there: process ids by the names of hosts, by the name of the lab."""
    found: dict[str, dict[str, int]] = {}
    directory = _directory()
    for name in sorted(os.listdir(directory)):
        with suppress(FileNotFoundError, ValueError), open(os.path.join(directory, name), "rb") as file:
            if _is_locked(file.fileno()):
                found[name] = json.load(file)
            else:  # its process was killed
                os.unlink(file.name)
    return found
