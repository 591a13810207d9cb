"""Whether the library can be put in front of a program: dynamic linking, permissions, the kind of machine."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct

from rdmacm.errors import cm_error

_ELF = b"\x7fELF"
#: Class, byte order; type, machine, offset of the program headers, their size and number.
_HEADER_64 = struct.Struct("<16sHH4xQQQ4xHHH")
_INTERPRETER = 3
#: Program headers that are looked at.
_MOST_HEADERS = 512
#: The status of env(1) and shells: not found, and not executable.
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class CannotRun(Exception):
    """A program cannot be run. ``error`` says why, ``status`` is what env(1) would exit with."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error
        self.status = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE


def find_program(name: str, library: str) -> str:
    """The path of a program as execvp(3) finds it, which takes the library; CannotRun if there is none."""
    try:
        path = _path_of(name)
        _check(path, library)
    except OSError as error:
        raise CannotRun(error) from error
    return path


def _path_of(name: str) -> str:
    path = shutil.which(name)
    if path is not None:
        return path
    if "/" in name and os.path.exists(name):
        raise cm_error(errno.EACCES, "the program cannot be executed", "run", name)
    raise cm_error(errno.ENOENT, "there is no such program", "run", name)


def _check(path: str, library: str) -> None:
    """Raise if the dynamic linker would not put the library in front of a program: ENOEXEC or EPERM."""
    _check_privileges(path)
    head, of_library = _read_head(path), _read_head(library)
    if not head.startswith(_ELF):
        return  # a script, whose interpreter is found by the kernel
    if head[4:6] != of_library[4:6] or head[18:20] != of_library[18:20]:
        raise cm_error(errno.ENOEXEC, "the program is of another kind of machine than the library", "run", path)
    if head[4] == 2 and not _has_interpreter(path, head):
        hint = "a program that is linked dynamically"
        raise cm_error(errno.ENOEXEC, "the program is linked statically: it takes no library", "run", path, hint)


def _check_privileges(path: str) -> None:
    """EPERM for a program that gets privileges of its own, as the dynamic linker takes no libraries for it."""
    status = os.stat(path)
    if status.st_mode & stat.S_ISUID and status.st_uid != os.getuid():
        why = "is set-user-ID"
    elif status.st_mode & stat.S_ISGID and status.st_gid != os.getgid():
        why = "is set-group-ID"
    elif _has_capabilities(path):
        why = "has file capabilities"
    else:
        return
    text = f"the program {why}, so the dynamic linker ignores LD_LIBRARY_PATH"
    raise cm_error(errno.EPERM, text, "run", path, "a copy of it, which has no privileges")


def _has_capabilities(path: str) -> bool:
    try:
        return bool(os.getxattr(path, "security.capability"))
    except OSError:
        return False


def _read_head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEADER_64.size)
    except OSError:
        return b""


def _has_interpreter(path: str, head: bytes) -> bool:
    if len(head) < _HEADER_64.size:
        return True
    *_, offset, _, _, size, count = _HEADER_64.unpack(head)
    with open(path, "rb") as file:
        file.seek(offset)
        for _ in range(min(count, _MOST_HEADERS)):
            header = file.read(size)
            if len(header) >= 4 and struct.unpack_from("<I", header)[0] == _INTERPRETER:
                return True
    return False
