"""The archive that Linux unpacks first: cpio, format "newc" (Linux, early-userspace/buffer-format.rst)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["archive"]

_FOLDER, _FILE = 0o040755, 0o100755
_END = "TRAILER!!!"


def archive(folders: Iterable[str], files: Mapping[str, bytes]) -> bytes:
    """An archive of empty ``folders`` and of ``files``, all of them executable; parents first."""
    entries = [(name, _FOLDER, b"") for name in folders]
    entries += [(name, _FILE, content) for name, content in files.items()]
    entries.append((_END, 0, b""))
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, 1))


def _entry(inode: int, name: str, mode: int, content: bytes) -> bytes:
    links, name_size = 1, len(name.encode()) + 1
    fields = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, name_size, 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(header) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
