"""Sanitizers find nothing in the library, in the programs that use it, and in what moves their sockets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import hatch_build
import pytest

from rdmacm.run.command import environment_of
from rdmacm.run.server import Server
from support.run_programs import PROGRAMS, built_library, compile_program, needs_headers, output_of

from .test_rsocket import DATAGRAMS, PARTS

pytestmark = [pytest.mark.slow, *needs_headers]

ADDRESS, THREAD = "address,undefined", "thread"
QUIET = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}


def flags_of(kind: str) -> list[str]:
    """The flags of a sanitizer, of program and library."""
    name = {ADDRESS: "libasan.so", THREAD: "libtsan.so"}[kind]
    if not Path(sanitizer(name)).is_absolute():
        pytest.skip(f"gcc has no library for -fsanitize={kind}")
    return ["-O1", "-g", "-w", f"-fsanitize={kind}", "-fno-sanitize-recover=all"]


def sanitizer(name: str) -> str:
    """The path of a sanitizer's library; without a folder where gcc has none."""
    return subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()


@pytest.fixture(params=[ADDRESS, THREAD])
def kind(request: pytest.FixtureRequest) -> str:
    """What gcc's option names."""
    return str(request.param)


def instrumented(factory: pytest.TempPathFactory, kind: str) -> Path:
    """A directory with the library that a sanitizer watches."""
    return built_library(factory, f"library-{kind.split(',', maxsplit=1)[0]}", *flags_of(kind))


def test_exchanges(served: Server, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, kind: str) -> None:
    library, program = instrumented(tmp_path_factory, kind), tmp_path / "exchange"
    compile_program("exchange", program, library, *flags_of(kind))
    variables = {**environment_of(str(library), served.path), **QUIET}
    assert output_of([str(program), "3", "15"], variables) == "done\n"


@pytest.mark.parametrize(("name", "parts"), [("sockets", PARTS), ("datagrams", DATAGRAMS)])
def test_rsockets(
    served: Server, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, kind: str, name: str, parts: list[str]
) -> None:
    library, program = instrumented(tmp_path_factory, kind), tmp_path / name
    compile_program(name, program, library, *flags_of(kind))
    variables = {**environment_of(str(library), served.path), **QUIET}
    for part in parts:
        if part not in ("killed", "left"):  # a thread sanitizer does not like fork(2)
            assert output_of([str(program), part], variables) == "done\n"


def test_ordinary_sockets(served: Server, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    library, program = instrumented(tmp_path_factory, ADDRESS), tmp_path / "multiplexed"
    source = str(PROGRAMS / "multiplexed.c")
    subprocess.run(["gcc", "-D_GNU_SOURCE", "-pthread", *flags_of(ADDRESS), "-o", program, source], check=True)
    variables = {
        **environment_of(str(library), served.path),
        **QUIET,
        "LD_PRELOAD": f"{sanitizer('libasan.so')}:{library / hatch_build.SOCKETS}",
    }
    assert output_of([str(program)], variables) == "done\n"
