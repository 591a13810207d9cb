"""Coverage of the compiled core: the lines and branches of its C code that tests execute, by gcc and gcov.

    python3 dev.py coverage [ARGS...]

ARGS are pytest's; by default the tests are those of the core and of the reliable connection. Headers count as part of
the files that include them. A test process that is killed is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import hatch_build  # noqa: E402

TESTS = ["tests/core", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/proto/test_rc*.py"))]
FLAGS = "-O0", "--coverage", "-fprofile-update=atomic"


class File:
    """How often the lines of a file, and the branches of a line, were executed."""

    def __init__(self) -> None:
        self.lines: Counter[int] = Counter()
        self.branches: Counter[tuple[int, int]] = Counter()


def measure(directory: Path, tests: list[str]) -> int:
    """Build the core in the directory, and run the tests with it. Returns pytest's status."""
    package = directory / "rdmacm"
    shutil.copytree(ROOT / "src" / "rdmacm", package, ignore=shutil.ignore_patterns("__pycache__", "_core.*"))
    os.environ["CC"] = "gcc"
    hatch_build.build(package / "proto" / hatch_build.TARGET.name, *FLAGS)
    environ = dict(os.environ, PYTHONPATH=str(directory), RDMACM_CORE="c")
    environ.setdefault("PYTEST_TIMEOUT", "120")
    return subprocess.call([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environ)


def read(directory: Path) -> dict[str, File]:
    """What the processes have written."""
    files: dict[str, File] = defaultdict(File)
    for data in sorted(directory.rglob("*.gcda")):
        done = subprocess.run(
            ["gcov", "--branch-probabilities", "--json-format", "--stdout", data], capture_output=True, check=True
        )
        for found in json.loads(done.stdout)["files"]:
            path = Path(found["file"]).resolve()
            if not path.is_relative_to(ROOT / "core"):
                continue
            file = files[str(path.relative_to(ROOT))]
            for line in found["lines"]:
                file.lines[line["line_number"]] += line["count"]
                for number, branch in enumerate(line["branches"]):
                    file.branches[line["line_number"], number] += branch["count"]
    return files


def share(counts: Counter[int] | Counter[tuple[int, int]]) -> tuple[int, int]:
    return sum(count > 0 for count in counts.values()), len(counts)


def report(files: dict[str, File]) -> str:
    rows = []
    for room in sorted({name.rpartition("/")[0] for name in files}):
        names = sorted(name for name in files if name.startswith(room + "/"))
        for title, those in (*((name, [name]) for name in names), (room, names)):
            numbers = []
            for kind in ("lines", "branches"):
                done, of = (
                    sum(each) for each in zip(*(share(getattr(files[name], kind)) for name in those), strict=True)
                )
                numbers.append(f"{done:5d} of {of:5d} {100 * done / max(1, of):5.1f} %")
            rows.append(f"{title:32}  {'   '.join(numbers)}")
    return "\n".join([f"{'':32}  {'lines':22}   branches", *rows])


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="rdmacm-coverage-") as directory:
        status = measure(Path(directory), arguments or ["-q", "-m", "not slow", *TESTS])
        print(report(read(Path(directory))))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
