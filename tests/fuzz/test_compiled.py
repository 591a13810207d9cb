"""The fuzz targets in C: the inputs of their corpus are handled, and some seconds of fuzzing find no fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import compiled, drive
from fuzz.harness import stored_inputs
from support.rows import for_each

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clang() -> None:
    reason = compiled.missing()
    if reason:
        pytest.skip(reason)


@for_each("name", list(compiled.COMPILED))
def test_inputs_of_the_corpus_are_handled(name: str) -> None:
    assert stored_inputs(name)
    done = compiled.run(name)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
@for_each("name", list(compiled.COMPILED))
def test_fuzzing_finds_no_fault(name: str) -> None:
    command = [sys.executable, drive.__file__, name, "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_broken_invariant_is_reported_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.c").write_text(
        "#include <stdint.h>\n#include <stdlib.h>\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { if (size > 1) abort(); return !data; }\n"
    )
    monkeypatch.setattr(compiled, "_HERE", tmp_path)
    monkeypatch.setitem(compiled.COMPILED, "broken", 16)
    assert drive.main(["broken", "--seconds", "5"]) == 1
    assert "FAULT: python3 dev.py fuzz broken --input " in capsys.readouterr().out
