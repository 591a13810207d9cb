"""Sub-interpreters: they resolve addresses, and the main interpreter has the software devices.

Record locks of the port table and of the port group belong to the process: those of two interpreters would not
conflict, and an interpreter that closes the file loses those of the others. The compiled core is for one interpreter,
too.
"""

from __future__ import annotations

import errno
from importlib import import_module

from rdmacm.errors import cm_error

#: What makes sub-interpreters, of Python 3.13 and of older ones.
_MODULES = ("_interpreters", "_xxsubinterpreters")


def _is_main() -> bool:
    """True also where Python has no such module: then only a program that embeds Python has other interpreters."""
    for name in _MODULES:
        try:
            interpreters = import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() == interpreters.get_main())
    return True


def check_main_interpreter(call: str) -> None:
    """ENOTSUP in a sub-interpreter."""
    if not _is_main():
        text = "the software devices are for the main interpreter, and this is a sub-interpreter"
        raise cm_error(errno.ENOTSUP, text, call, hint="the main interpreter, or a process of its own")
