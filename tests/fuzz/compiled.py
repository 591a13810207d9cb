"""Fuzz targets in C: parts of the compiled core with libFuzzer and the sanitizers, without an interpreter.

A target is a file NAME.c beside this one, which clang compiles with what it tests. Its corpus is kept as that
of the targets in Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fuzz.harness import CORPUS, stored_inputs

__all__ = ["COMPILED", "build", "fuzz", "keep", "missing", "run"]

_HERE = Path(__file__).resolve().parent
_CORE = _HERE.parents[1] / "core"

#: The targets, and their longest inputs in bytes.
COMPILED = {"core_engine": 512, "stream_engine": 512}
#: What each is compiled with.
_ENGINES = {"core_engine": sorted((_CORE / "engine").glob("*.c"))}

_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]
_FLAGS += [f"-I{_CORE / part}" for part in ("engine", "library")]
_FLAGS += ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
#: An input that takes longer is a fault, in seconds.
_SLOWEST = 20
#: Of one target in the corpus: inputs, and bytes of all of them.
_MOST_INPUTS = 150
_MOST_BYTES = 20_000


def missing() -> str | None:
    """What these targets need, if it is missing."""
    if shutil.which("clang") is None:
        return "needs clang"
    where = subprocess.check_output(["clang", "-print-runtime-dir"], text=True).strip()
    return None if list(Path(where).glob("libclang_rt.fuzzer*.a")) else "needs libFuzzer (Debian: libclang-rt-dev)"


def build(name: str, program: Path) -> None:
    """Compile a target."""
    sources = [_HERE / f"{name}.c", *_ENGINES.get(name, ())]
    subprocess.run(["clang", *_FLAGS, "-o", program, *sources], check=True)


def _stored(name: str, directory: Path) -> list[Path]:
    """The corpus as files in a directory."""
    directory.mkdir(exist_ok=True)
    paths = []
    for number, data in enumerate(stored_inputs(name)):
        paths.append(directory / f"stored-{number}")
        paths[-1].write_bytes(data)
    return paths


def run(name: str, inputs: list[bytes] | None = None) -> subprocess.CompletedProcess[str]:
    """Run inputs, by default those of the corpus. A fault is a status that is not 0."""
    with tempfile.TemporaryDirectory(prefix="rdmacm-fuzz-") as temporary:
        program = Path(temporary, name)
        build(name, program)
        if inputs is None:
            paths = _stored(name, Path(temporary, "corpus"))
        else:
            paths = [Path(temporary, str(number)) for number in range(len(inputs))]
            for path, data in zip(paths, inputs, strict=True):
                path.write_bytes(data)
        return subprocess.run([program, *paths], capture_output=True, text=True, errors="replace", check=False)


def fuzz(name: str, seconds: float, directory: Path) -> int:
    """Fuzz a target in this process, which ends with its status. What it finds is in the directory."""
    program = directory / name
    build(name, program)
    _stored(name, directory / "corpus")
    options = {
        "max_total_time": max(1, round(seconds)),
        "max_len": COMPILED[name],
        "timeout": _SLOWEST,
        "print_final_stats": 1,
        "artifact_prefix": str(directory / "fault-"),
    }
    os.execv(program, [str(program), *(f"-{key}={value}" for key, value in options.items()), str(directory / "corpus")])


def keep(name: str, directory: Path) -> int:
    """Write the corpus of a target: a few inputs that reach every edge that those in the directory reach together.

    Returns how many there are.
    """
    merged = directory / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    options = ["-set_cover_merge=1", "-use_counters=0", f"-max_len={COMPILED[name]}"]
    command = [directory / name, *options, merged, directory / "corpus"]
    subprocess.run([str(part) for part in command], capture_output=True, check=True)
    kept: list[bytes] = []
    for data in sorted((path.read_bytes() for path in merged.iterdir()), key=lambda data: (len(data), data)):
        if len(kept) == _MOST_INPUTS or sum(map(len, kept)) + len(data) > _MOST_BYTES:
            break
        kept.append(data)
    (CORPUS / f"{name}.txt").write_text("".join(data.hex() + "\n" for data in kept))
    return len(kept)
