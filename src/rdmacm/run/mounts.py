"""A mount namespace, in which a program sees a tree of device files: mount_namespaces(7), user_namespaces(7).

Without the privilege to mount, the namespace is in a user namespace of its own, which has the same users. The program
stays in all other namespaces, that of the network among them.

Where a directory of the tree is not there and none may be made, as in sysfs, an empty file system covers the one above
it, and what that had is mounted there again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
from collections.abc import Iterable
from contextlib import suppress

from rdmacm.run.tree import STAND_IN, Tree

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_BIND, _MS_MOVE, _MS_REC, _MS_SLAVE = 2, 4096, 8192, 16384, 1 << 19
#: The name in ``/dev`` of what that was before it was covered.
_WHOLE = ".host"
_libc = ctypes.CDLL(None, use_errno=True)


def show(tree: Tree, place: str) -> None:
    """Move this process, which has one thread, to a mount namespace with the tree. OSError: that is not possible.

    ``place``: a directory where something can be mounted for a moment.

    After an error the process may be in the namespace, with a part of the tree.
    """
    _enter()
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)  # mounts of the host are still seen here, and none of these there
    _make_room({_root_of(path) for path in (*tree.files, *tree.nodes)}, place)
    for path in tree.directories:
        os.makedirs(path, exist_ok=True)
    for path, text in tree.files.items():
        _write(path, text)
    for path, target in tree.links.items():
        os.symlink(posixpath.relpath(target, posixpath.dirname(path)), path)
    for path in tree.nodes:
        _write(path, "")
        _bind(STAND_IN, path)


# -- namespaces -----------------------------------------------------------------------------------------------


def _enter() -> None:
    """A mount namespace, in a user namespace if need be."""
    try:
        _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "unshare")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/setgroups", "deny")  # else no group may be mapped
        _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    """Write a file, whose directory may be missing."""
    if not os.path.exists(path):
        os.makedirs(posixpath.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


# -- mounts ---------------------------------------------------------------------------------------------------


def _root_of(path: str) -> str:
    """The directory of a tree that a path is in: ``/dev/infiniband``, ``/sys/class/infiniband``."""
    return "/".join(path.split("/")[: 3 if path.startswith("/dev/") else 4])


def _make_room(roots: Iterable[str], place: str) -> None:
    """Empty directories for a tree, which are writable and of this namespace alone."""
    by_parent: dict[str, set[str]] = {}
    for root in roots:
        parent, name = posixpath.split(root)
        by_parent.setdefault(parent, set()).add(name)
    for parent, names in by_parent.items():
        if all(os.path.isdir(posixpath.join(parent, name)) for name in names):
            for name in names:
                _mount_empty(posixpath.join(parent, name))
        else:
            _cover(parent, names, place)


def _cover(directory: str, new: Iterable[str], place: str) -> None:
    """Make a directory have some new, empty directories besides what it has."""
    if directory == "/":
        raise OSError(errno.EINVAL, "the root directory cannot be covered", directory)
    if not os.path.isdir(directory):
        parent, name = posixpath.split(directory)
        _cover(parent, {name}, place)
    _mount_empty(place)
    with os.scandir(directory) as found:
        for entry in found:
            if entry.name not in new:
                with suppress(FileNotFoundError):  # it has gone meanwhile
                    _show_again(entry, posixpath.join(place, entry.name))
    for name in new:
        os.mkdir(posixpath.join(place, name), 0o755)
    _mount(place, directory, None, _MS_MOVE)


def _show_again(entry: os.DirEntry[str], path: str) -> None:
    """Show an entry of a directory at another path."""
    if entry.path == "/dev/ptmx" and not entry.is_symlink():
        # It makes pseudo terminals in what is mounted at pts beside it, so it has to be in a whole directory.
        whole = posixpath.join(posixpath.dirname(path), _WHOLE)
        os.mkdir(whole, 0o755)
        _bind("/dev", whole)
        os.symlink(f"{_WHOLE}/ptmx", path)
    elif entry.is_symlink():
        os.symlink(os.readlink(entry.path), path)
    else:
        if entry.is_dir():
            os.mkdir(path, 0o755)
        else:
            _write(path, "")
        _bind(entry.path, path)


def _mount_empty(path: str) -> None:
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID, "mode=755")


def _bind(source: str, path: str) -> None:
    _mount(source, path, None, _MS_BIND | _MS_REC)


def _mount(source: str, path: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, path, kind, options)]
    _check(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {path}")


def _check(code: int, what: str) -> None:
    if code < 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number), what)
