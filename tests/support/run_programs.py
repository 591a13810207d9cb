"""C programs of the tests, compiled against the library of ``rdmacm run``."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import hatch_build
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


def built_library(factory: pytest.TempPathFactory, name: str, *flags: str) -> Path:
    """A directory with the library under both names; ``flags`` are the compiler's.

    The processes of pytest-xdist share it: the first that needs it builds it.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    place = base / name
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / LIBRARIES[1]).exists():
            place.mkdir(exist_ok=True)
            hatch_build.build(place / LIBRARIES[0], *flags, is_library=True)
            (place / LIBRARIES[1]).symlink_to(LIBRARIES[0])
    return place


def compile_program(name: str, target: Path, library: Path, *flags: str) -> None:
    """Compile a program of the tests against the library in a directory."""
    links = [f"-L{library}", *(f"-l:{each}" for each in LIBRARIES)]
    command = ["gcc", "-O1", "-w", "-pthread", *flags, "-o", str(target), str(PROGRAMS / f"{name}.c"), *links]
    subprocess.run(command, check=True)


def engine_of(name: str, factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """An engine of the library that a file of ``programs`` gives to Python. Undefined behaviour ends the process."""
    target = factory.mktemp(name) / f"{name}.so"
    options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    options += [f"-I{hatch_build.SOURCES / 'library'}", "-o", str(target)]
    subprocess.run(["gcc", *options, str(PROGRAMS / f"{name}.c")], check=True)
    return ctypes.CDLL(str(target))


def output_of(command: list[str], environment: dict[str, str]) -> str:
    """What a command prints, which has to succeed."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
