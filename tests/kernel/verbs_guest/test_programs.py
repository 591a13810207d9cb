"""Operations between queue pairs of the kernel's device, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def checks_of(program: str) -> list[str]:
    """The checks of a program, in its order."""
    lines = (HERE / f"{program}.py").read_text().splitlines()
    return [line[4 : line.index("(")] for line in lines if line.startswith("def check_")]


def check(program: str, device: str, run_program: Callable[[str], str]) -> None:
    """Each check of a program ends without an error."""
    names = checks_of(program)
    assert names
    assert run_program(f"-m kernel.verbs_guest.{program} {device}").splitlines() == names


#: Those of seconds, and those of minutes on an emulated processor.
PROGRAMS = [
    pytest.param(name, marks=pytest.mark.debian_kernel(in_ci=name == "transfers"))
    for name in ("objects", "transfers", "waits", "removal")
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_checks_pass(program: str, run_program: Callable[[str], str]) -> None:
    check(program, "rxe0", run_program)


def test_objects_of_iwarp(run_program: Callable[[str], str]) -> None:
    check("objects", "siw0", run_program)
