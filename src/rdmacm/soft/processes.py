"""Naming other processes in the texts of errors."""

from __future__ import annotations

#: The greatest length of a command line in a text.
_LENGTH = 40


def process_text(pid: int) -> str:
    """``process 4711 (ib_send_bw)``; for a Python program the command line, ``process 4711 (rdmacm rping -s)``."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="backslashreplace") as file:
            name = file.read().strip()
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="backslashreplace") as file:
            path, *arguments = file.read().rstrip("\0").split("\0")
        interpreter = path.rpartition("/")[2]
        if interpreter.startswith("python"):
            if "-c" in arguments:
                del arguments[arguments.index("-c") + 1 :]  # a whole program
            if name.startswith("python"):
                name = " ".join([interpreter, *arguments])
            elif arguments and (script := arguments[0].rpartition("/")[2]).startswith(name):
                # Started by the script's name, of which the kernel keeps 15 characters, as the command rdmacm is.
                name = " ".join([script, *arguments[1:]])
    except OSError:  # no /proc, or the process has ended
        return f"process {pid}"
    name = "".join(character if character.isprintable() else "?" for character in name)
    return f"process {pid} ({name if len(name) <= _LENGTH else f'{name[: _LENGTH - 3]}...'})"
