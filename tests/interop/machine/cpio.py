"""The archive of an initramfs: cpio, format "newc".

Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["write"]

_END = "TRAILER!!!"


def write(stream: BinaryIO, folder: Path, below: Path = Path()) -> None:
    """Write an archive of ``folder``, all of it owned by root, to be unpacked into the existing directory ``below``.

    The kernel unpacks several archives that follow each other.
    """
    inode = 0
    for path, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            file = Path(path, name)
            mode = file.lstat().st_mode
            if stat.S_ISLNK(mode):
                content = os.readlink(file).encode()
            else:
                content = file.read_bytes() if stat.S_ISREG(mode) else b""
            inode += 1
            _entry(stream, inode, (below / file.relative_to(folder)).as_posix(), mode, content)
    _entry(stream, 0, _END, 0, b"")


def _entry(stream: BinaryIO, inode: int, name: str, mode: int, content: bytes) -> None:
    links, name_size = 1, len(name.encode()) + 1
    fields = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, name_size, 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    for data in (header, content):
        stream.write(data)
        stream.write(bytes(-len(data) % 4))
