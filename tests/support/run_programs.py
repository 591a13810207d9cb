"""C programs of the tests, compiled against the library of ``rdmacm run``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "run" / "programs"
HEADERS = (Path("/usr/include/infiniband/verbs.h"), Path("/usr/include/rdma/rdma_cma.h"))
#: Debian's libraries, whose names programs look for.
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")

needs_headers = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
    pytest.mark.skipif(not all(map(Path.exists, HEADERS)), reason="needs libibverbs-dev and librdmacm-dev"),
]

#: Runs a program with arguments; returns what it prints.
Runs = Callable[..., str]


def compile_program(name: str, target: Path, library: Path) -> None:
    """Compile a program of the tests against the library in a directory."""
    links = [f"-L{library}", *(f"-l:{each}" for each in LIBRARIES)]
    subprocess.run(["gcc", "-O1", "-w", "-pthread", "-o", str(target), str(PROGRAMS / f"{name}.c"), *links], check=True)


def output_of(command: list[str], environment: dict[str, str]) -> str:
    """What a command prints, which has to succeed."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
