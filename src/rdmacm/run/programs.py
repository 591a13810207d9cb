"""Whether the library can be put in front of a program: dynamic linking, permissions, the kind of machine."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import sys

from rdmacm.errors import cm_error

_ELF = b"\x7fELF"
#: Class, byte order; type, machine, offset of the program headers, their size and number.
_HEADER_64 = struct.Struct("<16sHH4xQQQ4xHHH")
#: Type, offset in the file, size there.
_PROGRAM_HEADER_64 = struct.Struct("<I4xQ16xQ")
_CLASS_64, _INTERPRETER = 2, 3
#: Bytes of the name of a dynamic linker that are read.
_LONGEST_NAME = 4096
#: What the name of musl's has.
_MUSL = b"ld-musl"
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


def find_program(name: str, library: str, search: str) -> str:
    """The path of a program as execvp(3) finds it in directories; CannotRun if there is none that takes the library."""
    try:
        path = _path_of(name, search)
        _check(path, library)
    except OSError as error:
        raise CannotRun(error) from error
    return path


def _path_of(name: str, search: str) -> str:
    path = shutil.which(name, path=search)
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
    if head[4] != _CLASS_64:
        return
    interpreter = _interpreter_of(path, head)
    if interpreter is None:
        hint = "a program that is linked dynamically"
        raise cm_error(errno.ENOEXEC, "the program is linked statically: it takes no library", "run", path, hint)
    if (_MUSL in interpreter) != (_MUSL in (_interpreter_of(sys.executable, _read_head(sys.executable)) or b"")):
        text = "the program uses another C library, musl or glibc, than this Python and the library"
        raise cm_error(errno.ENOEXEC, text, "run", path, "this package, installed for the C library of the program")


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


def _interpreter_of(path: str, head: bytes) -> bytes | None:
    """The dynamic linker that a program names; None if it has none, empty if that cannot be read."""
    if len(head) < _HEADER_64.size:
        return b""
    *_, offset, _, _, size, count = _HEADER_64.unpack(head)
    with open(path, "rb") as file:
        file.seek(offset)
        for _ in range(min(count, _MOST_HEADERS)):
            header = file.read(size)
            if len(header) >= _PROGRAM_HEADER_64.size:
                kind, at, length = _PROGRAM_HEADER_64.unpack_from(header)
                if kind == _INTERPRETER:
                    file.seek(at)
                    return file.read(min(length, _LONGEST_NAME))
    return None
