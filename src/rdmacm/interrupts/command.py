"""Quiet Ctrl-C for the command ``rdmacm``, from the first import on. Programs that import the package are unaffected.

``python -m rdmacm`` and the installed script import the command's modules first, which takes tens of milliseconds. An
interrupt then would be a traceback, as no code of the command can catch it yet.
"""

import os
import sys

try:
    # "signal" itself imports "enum", which takes milliseconds.
    from _signal import SIGINT, default_int_handler, getsignal, signal  # type: ignore[import-not-found]
except ImportError:
    from signal import SIGINT, default_int_handler, getsignal, signal

#: The exit status of an interrupted command: 128 + SIGINT.
STATUS = 130


def is_command() -> bool:
    """Whether this process is the command: ``python -m rdmacm``, or the script that an installation makes."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # as long as Python looks for the module
        options = sys.orig_argv
        return "-mrdmacm" in options or ("-m" in options and options[options.index("-m") + 1 :][:1] == ["rdmacm"])
    if os.path.basename(program) != "rdmacm":
        return False
    try:
        with open(program, "rb") as script:
            return b"rdmacm.tools.main" in script.read(1000)
    except OSError:
        return False


def _exit(*_: object) -> None:
    os._exit(STATUS)


def exit_when_interrupted() -> None:
    """From now on an interrupt ends the process at once and without a word. Keeps a handler that is not Python's."""
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, _exit)


def raise_when_interrupted() -> None:
    """From now on an interrupt raises KeyboardInterrupt. Interrupts that are ignored stay so, as of "command &"."""
    if callable(getsignal(SIGINT)):
        signal(SIGINT, default_int_handler)
