"""Check the wheel with the compiled core, as one that gets it from a package index would run it.

    python3 tests/check_wheel.py DIRECTORY

DIRECTORY has the wheel that was built here. auditwheel tells which systems it runs on and makes the wheel for them
(manylinux or musllinux), abi3audit checks that it keeps to the limited API. The result is installed into a new
environment, apart from the sources; there ``rdmacm --version`` and ``rdmacm demo`` run with both cores, and a program
on the library for programs.

A pure wheel, as it is built where there is no C compiler, is only installed and run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(
    *command: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, shown: int = 2
) -> str:
    """Run a command and return what it writes, of which the last lines are shown; all of it, and exit, if it fails."""
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = done.stdout.splitlines()
    print("$", *words, *(f"\n{line}" for line in (lines if done.returncode else lines[-shown:])), flush=True)
    if done.returncode:
        sys.exit(f"exit status {done.returncode}")
    return done.stdout


def require(condition: bool, fault: str) -> None:
    if not condition:
        sys.exit(fault)


def portable(wheel: Path, directory: Path) -> Path:
    """The wheel for all the systems that it runs on."""
    require(re.search(r"-cp311-abi3-linux_\w+\.whl$", wheel.name) is not None, f"{wheel.name}: the tag is wrong")
    absent = [name for name in ("auditwheel", "abi3audit") if importlib.util.find_spec(name) is None]
    if absent:
        print(f"skipped: {' and '.join(absent)}, which are not installed")
        return wheel
    run(sys.executable, "-m", "abi3audit", "--strict", "--verbose", wheel)
    run(sys.executable, "-m", "auditwheel", "show", wheel, shown=7)
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", directory, wheel)
    (repaired,) = directory.glob("*.whl")
    require(re.search(r"-(many|musl)linux", repaired.name) is not None, f"{repaired.name} is not for other systems")
    return repaired


#: A program of libibverbs: lists the devices, as ibv_devices(1) does.
PROGRAM = """
import ctypes
verbs = ctypes.CDLL("libibverbs.so.1")
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_get_device_name.argtypes, verbs.ibv_get_device_name.restype = [ctypes.c_void_p], ctypes.c_char_p
count = ctypes.c_int()
found = verbs.ibv_get_device_list(ctypes.byref(count))
print(*(verbs.ibv_get_device_name(found[index]).decode() for index in range(count.value)))
"""


def install_and_run(wheel: Path, place: Path, cores: Sequence[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        require("rdmacm/py.typed" in archive.namelist(), "the wheel has no py.typed: type checkers would not read it")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv")
    bin_directory = place / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = bin_directory / Path(sys.executable).name
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    for path in ("man/man1/rdmacm-perf.1", "man/man3/rdmacm.CmId.3", "bash-completion/completions/rdmacm"):
        require((python.parents[1] / "share" / path).exists(), f"the wheel does not install share/{path}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RDMACM"))}
    where = run(python, "-c", "import rdmacm; print(rdmacm.__file__)", cwd=place, env=environ)
    require(Path(where.strip()).is_relative_to(place), "the package is not that of the wheel")
    for core in cores:
        chosen = environ | {"RDMACM_CORE": core}
        version = run(bin_directory / "rdmacm", "--version", cwd=place, env=chosen)
        require((core == "c") == (", with the compiled core (" in version), "another core runs")
        run(bin_directory / "rdmacm", "demo", cwd=place, env=chosen)
    if "c" in cores:
        found = run(bin_directory / "rdmacm", "run", "--", python, "-c", PROGRAM, cwd=place, env=environ)
        require("soft_lo" in found.split(), "a program finds no device")


def main(directory: Path) -> None:
    (wheel,) = directory.glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        if wheel.name.endswith("-py3-none-any.whl"):
            print(f"{wheel.name} has no compiled core")
            install_and_run(wheel, place, ["python"])
        else:
            install_and_run(portable(wheel, place / "repaired"), place, ["c", "python"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
