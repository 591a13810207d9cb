"""Programs in Python that run beside a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.netns import python_environment

__all__ = ["python_program"]


@contextmanager
def python_program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program whose standard input and output are pipes. It is killed at the end, if it still runs."""
    command = [sys.executable, "-c", source, *arguments]
    environment = python_environment()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()
