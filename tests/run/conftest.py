"""A server for programs, in a thread, and the library of programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmacm.run.command import environment_of
from rdmacm.run.options import Options
from rdmacm.run.server import Server
from support.run_client import Client
from support.run_programs import Runs, built_library, compile_program, output_of


@pytest.fixture
def options() -> Options:
    """The options of the server: none. A test that wants others has a parameter of this name."""
    return Options()


@pytest.fixture
def served(tmp_path: Path, options: Options) -> Iterator[Server]:
    """A server that serves."""
    server = Server(str(tmp_path / "socket"), options)
    stopped = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stopped.is_set,))
    thread.start()
    yield server
    stopped.set()
    server.wake()
    thread.join()
    server.close()


@pytest.fixture
def client(served: Server) -> Iterator[Client]:
    """A connection of this process to the server."""
    with Client(served.path) as connected:
        yield connected


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the library under both names."""
    return built_library(tmp_path_factory, "library")


@pytest.fixture
def runs(library: Path, served: Server, tmp_path: Path) -> Runs:
    """Compile a program of the tests against the library, run it, and return what it prints."""

    def run(name: str, *arguments: str) -> str:
        program = tmp_path / name
        if not program.exists():
            compile_program(name, program, library)
        return output_of([str(program), *arguments], environment_of(str(library), served.path))

    return run
