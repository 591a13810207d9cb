"""The Python of README and of the guides passes mypy --strict, as a reader's program would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from newcomer.pages import ROOT, blocks

#: Pages whose blocks are one program, and pages whose blocks are programs of their own.
WHOLE, APART = ("docs/porting.md",), ("README.md", "docs/resolution.md")
SETTINGS = """
[mypy]
strict = True
[mypy-zlib_ng.*]
ignore_missing_imports = True
"""


def sources(page: str) -> list[str]:
    """The programs of a page."""
    found = [block.text for block in blocks(ROOT / page) if block.language == "python"]
    return ["\n".join(found)] if page in WHOLE else found


@pytest.mark.slow
@pytest.mark.parametrize("page", [*WHOLE, *APART])
def test_python_of_a_page_passes_the_type_checker(page: str, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    names = []
    for number, source in enumerate(sources(page)):
        names.append(f"block_{number}.py")
        (tmp_path / names[-1]).write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *names],
        cwd=tmp_path,
        env=dict(os.environ, MYPYPATH=str(ROOT / "src")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
