"""Naming other processes in the texts of errors."""

from __future__ import annotations

__all__ = ["process_text"]

#: The greatest length of a command line in a text.
_LENGTH = 40


def process_text(pid: int) -> str:
    """``process 4711 (ib_send_bw)``; for a Python program the command line, ``process 4711 (python3 -m rdmacm)``."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="backslashreplace") as file:
            name = file.read().strip()
        if name.startswith("python"):
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="backslashreplace") as file:
                path, *arguments = file.read().rstrip("\0").split("\0")
            if "-c" in arguments:
                del arguments[arguments.index("-c") + 1 :]  # a whole program
            name = " ".join([path.rpartition("/")[2], *arguments])
    except OSError:  # no /proc, or the process has ended
        return f"process {pid}"
    name = "".join(character if character.isprintable() else "?" for character in name)
    return f"process {pid} ({name if len(name) <= _LENGTH else f'{name[: _LENGTH - 3]}...'})"
