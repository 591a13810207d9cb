"""Start a program that sees the device files of :mod:`rdmacm.run.tree`.

A process that has threads cannot enter a user namespace, and one that runs Python should not fork once it has some. So
a child is made before there are any. It waits for what it needs, makes the namespace, and becomes the program.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NoReturn, Self

from rdmacm.run.tree import Tree

#: The steps of a child, which it reports if one has failed.
_NAMESPACE, _PROGRAM = "namespace", "program"


class NoNamespaceError(Exception):
    """The program cannot have a mount namespace, and was not started. The text says why."""


class Launcher:
    """A child that becomes the program. To be made while the process has one thread; at the end it is none, or gone."""

    def __init__(self, path: str, argv: Sequence[str], mask: Iterable[int], defaults: Iterable[int]) -> None:
        """``mask``: the blocked signals of the program; ``defaults``: signals that it does not inherit as ignored."""
        orders, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        self._is_waiting = True
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._orders)
            os.close(self._reports)
            _become_program(path, argv, set(mask), defaults, orders, reports)
        os.close(orders)
        os.close(reports)

    def start(self, environment: Mapping[str, str], tree: Tree, place: str) -> int:
        """Start the program; returns its process id. NoNamespaceError; OSError if it cannot be executed.

        ``place``: see :func:`rdmacm.run.mounts.show`.
        """
        self._is_waiting = False
        with os.fdopen(self._reports, "rb") as reports:
            with suppress(BrokenPipeError), os.fdopen(self._orders, "wb") as orders:
                pickle.dump((dict(environment), tree, place), orders)
            report = reports.read()  # ends when the program is executed
        if not report:
            return self._pid
        os.waitpid(self._pid, 0)
        step, number, text = pickle.loads(report)
        if step == _NAMESPACE:
            raise NoNamespaceError(text)
        raise OSError(number, os.strerror(number))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_waiting:
            os.close(self._orders)  # the child ends
            os.close(self._reports)
            os.waitpid(self._pid, 0)


def _become_program(
    path: str, argv: Sequence[str], mask: set[int], defaults: Iterable[int], orders: int, reports: int
) -> NoReturn:
    step = _NAMESPACE
    try:
        with os.fdopen(orders, "rb") as file:
            environment, tree, place = pickle.load(file)
        from rdmacm.run.mounts import show  # ctypes takes long to import

        show(tree, place)
        step = _PROGRAM
        for number in (*defaults, *_handled()):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(path, list(argv), environment)
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        with suppress(OSError):
            os.write(reports, pickle.dumps((step, number, str(error)[:1000])))
    finally:
        os._exit(1)


def _handled() -> list[signal.Signals]:
    """The signals that Python handles: one that has come already is for the program."""
    return [number for number in signal.Signals if callable(signal.getsignal(number))]
