"""A sub-interpreter resolves addresses; the devices and the compiled core are the main interpreter's, and stay so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rdmacm
from rdmacm.proto.core_choice import compiled

PROGRAM = Path(__file__).parents[1] / "support" / "interpreters.py"
REFUSED = (
    "bind_addr 127.0.0.1:0: the software devices are for the main interpreter, and this is a sub-interpreter "
    "[EOPNOTSUPP]; try: the main interpreter, or a process of its own"
)
RESULT = ["core python", "found 7471", f"bind {REFUSED}", f"listen {REFUSED}", "the port is taken"]
#: What Python 3.12 itself says of an isolated one.
NO_CTYPES = ["import module _ctypes does not support loading in subinterpreters", "the port is taken"]


def interpreter(minor: int) -> str:
    """Python 3.``minor``: this one, one of pyenv, or one of the path."""
    if sys.version_info[:2] == (3, minor):
        return sys.executable
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions").glob(f"3.{minor}.*/bin/python")
    found = next(map(str, installed), None) or shutil.which(f"python3.{minor}")
    return found or pytest.skip(f"needs Python 3.{minor}")


@pytest.mark.parametrize("kind", ["legacy", "isolated"])
@pytest.mark.parametrize(
    ("minor", "core"),
    [
        (11, "auto"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((11, "python"), (12, "auto"), (13, "auto"))),
    ],
)
def test_connections_of_the_main_interpreter_go_on(minor: int, kind: str, core: str) -> None:
    if core == "auto" and compiled is None:
        pytest.skip("the compiled core is not built")
    package = str(Path(rdmacm.__file__).parents[1])
    done = subprocess.run(
        [interpreter(minor), str(PROGRAM), kind],
        env={**os.environ, "PYTHONPATH": package, "RDMACM_CORE": core},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    expected = NO_CTYPES if (minor, kind) == (12, "isolated") else RESULT
    assert done.stdout.splitlines() == expected
