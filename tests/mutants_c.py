"""Mutation testing of the compiled core: as mutants.py, of the C code of its engines and sockets.

    python3 dev.py mutants --c [--seed N] [--count N] [--file PART] [--jobs N]

The possible changes are those of tokens: a comparison or an operator is replaced, a constant becomes one more or less,
"!" is left out, the condition of an "if" or "while" is negated, "true" and "false" are swapped, and a statement that
assigns or calls is left out. The glue to Python and the headers are not changed.

Each mutant gets a process of its own, which compiles the changed file, links it with the objects of the others, and
runs the tests with that core in a copy of the package: those that have killed most mutants first. One that does not
compile, or whose code is that of the original, is not counted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import Reporter, Run, draw, preload, report, run_all

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import hatch_build  # noqa: E402

#: What is mutated, relative to the root.
SOURCES = ("core/engine/*.c", "core/wire/*.c")

#: The tests, and those of their files that are not about what the core does.
TESTS = ("tests/core/test_*.py", *(f"tests/proto/test_{name}.py" for name in ("rc*", "uc", "ud", "xrc")))
OTHERS = {"test_arm.py", "test_build.py", "test_choice.py", "test_dev.py"}
#: Tests of an engine in Python, by its name in their parameters.
OF_PYTHON = re.compile(r"\[(.*-)?python(-.*)?\]$")

#: Seconds that the tests of the first stage take; the second has all others.
FIRST_STAGE = 3.0

# --- the changes ----------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<skip>\s+|/\*.*?\*/|//[^\n]*|^[ \t]*\#(?:[^\n\\]|\\.)*)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>0[xX][0-9a-fA-F]+[uUlL]*|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?[uUlL]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<mark><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)")
_SWAPS: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "/": ("*",),
    "%": ("/",),
    "<<": (">>",),
    ">>": ("<<",),
    "|": ("&",),
    "^": ("&",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("/=",),
    "|=": ("&=",),
    "&=": ("|=",),
    "++": ("--",),
    "--": ("++",),
    "true": ("false",),
    "false": ("true",),
    "!": ("",),
}
#: These are operators of two operands only where one comes before.
_AFTER_OPERAND = {"+": "-", "-": "+", "*": "/", "&": "|"}
_TYPES = {"bool", "char", "double", "int", "long", "return", "sizeof", "unsigned", "void"}
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "++", "--"}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Edit:
    """A change: what stands between two places of a file, and what is to stand there."""

    start: int
    end: int
    new: str


def tokens_of(source: str) -> list[Token]:
    found = (Token(str(match.lastgroup), match[0], *match.span()) for match in _TOKEN.finditer(source))
    return [token for token in found if token.kind != "skip"]


def edits_of(source: str) -> Iterator[Edit]:
    """All possible changes of a file."""
    tokens = tokens_of(source)
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else None
        for new in _SWAPS.get(token.text, ()):
            yield Edit(token.start, token.end, new)
        if token.text in _AFTER_OPERAND and _is_operand(tokens, index - 1):
            yield Edit(token.start, token.end, _AFTER_OPERAND[token.text])
        if number := _INTEGER.fullmatch(token.text):
            value = int(number[1], 0)
            yield Edit(token.start, token.end, f"{value + 1}{number[2]}")
            yield Edit(token.start, token.end, f"({value - 1}{number[2]})")
        if token.text in ("if", "while") and tokens[index + 1].text == "(":
            start, end = tokens[index + 1].start, tokens[_closing(tokens, index + 1)].end
            yield Edit(start, end, f"(!{source[start:end]})")
        if before is not None and _begins_statement(tokens, index):
            last = _end_of_statement(tokens, index)
            if last is not None:
                yield Edit(token.start, tokens[last].end, ";")


def _is_operand(tokens: list[Token], index: int) -> bool:
    """Whether an operand ends there, and not the name of a type."""
    token = tokens[index]
    if token.text.endswith("_t") or token.text in _TYPES or tokens[index - 1].text in ("struct", "enum"):
        return False
    return token.kind in ("name", "number") or token.text in (")", "]")


def _closing(tokens: list[Token], index: int) -> int:
    """The index of the parenthesis that closes the one at ``index``."""
    depth = 0
    for at in range(index, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[at].text, 0)
        if not depth:
            return at
    raise ValueError("a parenthesis is not closed")


def _begins_statement(tokens: list[Token], index: int) -> bool:
    before = tokens[index - 1].text
    if tokens[index].kind != "name" and tokens[index].text not in ("*", "(", "++", "--"):
        return False
    if before != ")":
        return before in ("{", "}", ";", "else", ":")
    depth = 0
    for at in range(index - 1, 0, -1):  # back to what the parentheses belong to
        depth += {")": 1, "(": -1}.get(tokens[at].text, 0)
        if not depth:
            return tokens[at - 1].text in ("if", "while", "for")
    return False


def _end_of_statement(tokens: list[Token], index: int) -> int | None:
    """The index of the semicolon of a statement that assigns or calls; None if it is another one."""
    if tokens[index].text in ("return", "if", "while", "for", "switch", "do", "else", "case", "goto", "break"):
        return None
    depth, does_something = 0, tokens[index + 1].text == "("
    for at in range(index, len(tokens)):
        text = tokens[at].text
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text, 0)
        does_something |= not depth and text in _ASSIGNMENTS
        if depth < 0 or text in ("{", "}"):
            return None
        if text == ";":
            return at if does_something and not depth else None
    return None


# --- building -------------------------------------------------------------------------------------------------


class NotCompiledError(Exception):
    """The change is not valid C."""


class SameCodeError(Exception):
    """The change makes no difference."""


#: Of what a process writes: why it has run no tests.
_LEFT_OUT = {"NotCompiledError: ": "do not compile", "SameCodeError: ": "have the same code"}


class Build:
    """The objects of the unchanged files, and a copy of the package."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory = root, directory
        command = hatch_build.command(Path("core.so"), "-O1", "-w")
        self._compile = [*command[: command.index("-shared")], "-c", "-o"]
        self._compiler = command[0]
        self.objects = {}
        for path in sorted((root / "core").glob("*/*.c")):
            self.objects[path] = directory / f"{path.parent.name}-{path.stem}.o"
            subprocess.run([*self._compile, self.objects[path], path], check=True)
        package = shutil.ignore_patterns("__pycache__", "_core.*")
        shutil.copytree(root / "src" / "rdmacm", directory / "package" / "rdmacm", ignore=package)

    def build(self, place: Path, path: Path | None = None, source: str = "") -> None:
        """Make a package with a core in which one file has another source."""
        place.mkdir()
        objects = dict(self.objects)
        if path is not None:
            changed = place / path.name
            changed.write_text(source)
            objects[path] = changed.with_suffix(".o")
            done = subprocess.run([*self._compile, objects[path], changed, f"-I{path.parent}"], check=False)
            if done.returncode:
                raise NotCompiledError
            if _code(objects[path]) == _code(self.objects[path]):
                raise SameCodeError
        # Links, as a copy takes longer than the compiler.
        shutil.copytree(self.directory / "package" / "rdmacm", place / "rdmacm", copy_function=os.link)
        core = place / "rdmacm" / "proto" / hatch_build.TARGET.name
        subprocess.run([self._compiler, "-shared", "-pthread", "-o", core, *objects.values()], check=True)

    @staticmethod
    def use(place: Path) -> None:
        """Have this process import that package."""
        sys.path.insert(0, str(place))
        os.environ.update(PYTHONPATH=f"{place}{os.pathsep}{ROOT / 'tests'}", RDMACM_CORE="c")


def _code(path: Path) -> bytes:
    """An object without the name of its source."""
    stripped = path.with_suffix(".stripped")
    subprocess.run(["objcopy", "--strip-unneeded", "--remove-section=.comment", path, stripped], check=True)
    return stripped.read_bytes()


# --- all of it ------------------------------------------------------------------------------------------------


@dataclass
class Mutant:
    """One change of a file, and its outcome."""

    path: Path
    #: As shown to people: relative to the root.
    file: str
    line: int
    #: Another one for each.
    name: str
    text: str
    edit: Edit
    ran: int = 0
    killed_by: str | None = None
    stage: int = 0

    def source(self) -> str:
        source = self.path.read_text()
        return source[: self.edit.start] + self.edit.new + source[self.edit.end :]


def all_mutants(root: Path) -> list[Mutant]:
    mutants = []
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        source = path.read_text()
        for number, edit in enumerate(edits_of(source)):
            line = source.count("\n", 0, edit.start) + 1
            beginning, end = source.rfind("\n", 0, edit.start) + 1, source.find("\n", edit.end)
            around = source[beginning : edit.start] + "{" + source[edit.start : edit.end]
            text = " ".join(f"{around} -> {edit.new}}}{source[edit.end : end]}".split())
            mutants.append(Mutant(path, str(path.relative_to(root)), line, f"{path.stem}-{number}", text, edit))
    return mutants


class Tests:
    """The tests, and what is known of each."""

    def __init__(self, root: Path, build: Build, jobs: int) -> None:
        #: Seconds that each test takes with the unchanged sources.
        self.seconds: dict[str, float] = {}
        self.unusable: list[str] = []
        #: How many mutants each test has killed: of a source file, and of all.
        self.kills: Counter[tuple[str, str]] = Counter()
        files = sorted(str(path.relative_to(root)) for pattern in TESTS for path in root.glob(pattern))
        files = [file for file in files if Path(file).name not in OTHERS]
        place = build.directory / "unchanged"
        build.build(place)

        def start() -> Run | None:
            if not files:
                return None
            file = files.pop(0)

            def plugins(pipe: int) -> list[Any]:
                build.use(place)
                return [Reporter(None, pipe), Durations(pipe)]

            return DurationRun(file, [file], plugins)

        def finished(run: Run, status: int | None) -> None:
            assert isinstance(run, DurationRun)
            self.seconds.update(run.durations)
            if status not in (0, 5):
                self.unusable.append(f"{run.label}: {run.failed or run.current} ({status})")

        run_all(start, finished, jobs)

    def stage(self, mutant: Mutant) -> list[str]:
        """The tests of the mutant's next stage."""
        names = sorted(self.seconds, key=lambda name: self._rank(mutant.file, name))
        first, spent = 0, 0.0
        while first < len(names) and spent < FIRST_STAGE:
            spent += self.seconds[names[first]]
            first += 1
        return names[first:] if mutant.stage else names[:first]

    def _rank(self, file: str, name: str) -> tuple[int, int, float]:
        return -self.kills[file, name], -self.kills["", name], self.seconds[name]


class Durations:
    """A pytest plugin: writes how long each test that passes takes."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed and not OF_PYTHON.search(report.nodeid):
            os.write(self._pipe, f"={report.duration} {report.nodeid}\n".encode())


class DurationRun(Run):
    """The first run, which tells how long each test takes."""

    def __init__(self, *arguments: Any) -> None:
        self.durations: dict[str, float] = {}
        super().__init__(*arguments)

    def hear(self, line: bytes) -> None:
        if line.startswith(b"="):
            seconds, _, name = line[1:].decode().partition(" ")
            self.durations[name] = float(seconds)
        else:
            super().hear(line)


def examine(
    mutants: list[Mutant], count: int, tests: Tests, build: Build, jobs: int
) -> tuple[list[Mutant], Counter[str]]:
    """Run the tests with each mutant until ``count`` of them have compiled; those, and why others were left out."""
    done: list[Mutant] = []
    left_out: Counter[str] = Counter()
    waiting: list[Mutant] = []
    running: dict[str, Mutant] = {}

    def start() -> Run | None:
        if waiting:
            mutant = waiting.pop(0)
        elif len(done) + len(running) < count and mutants:
            mutant = mutants.pop(0)
        else:
            return None
        place = build.directory / mutant.name
        chosen = tests.stage(mutant)
        running[mutant.name] = mutant

        def plugins(pipe: int) -> list[Any]:
            if not mutant.stage:
                build.build(place, mutant.path, mutant.source())
            build.use(place)
            return [Reporter(chosen, pipe)]

        return Run(mutant.name, ["-x", *sorted({name.partition("::")[0] for name in chosen})], plugins)

    def finished(run: Run, status: int | None) -> None:
        mutant = running.pop(run.label)
        mutant.ran += run.started
        if run.failed in _LEFT_OUT:
            left_out[run.failed] += 1
        elif (run.failed or "").startswith(("CalledProcessError", "OSError", "FileExistsError")):
            raise RuntimeError(run.failed)  # of this program, not of the mutant
        elif status is None:
            mutant.killed_by = "no end: " + run.current
        elif status not in (0, 5):
            mutant.killed_by = run.failed or f"exit status {status} {run.current}".rstrip()
            for file in ("", mutant.file):
                tests.kills[file, run.failed or run.current] += 1
        elif not mutant.stage:
            mutant.stage = 1
            waiting.append(mutant)
            return
        shutil.rmtree(build.directory / run.label, ignore_errors=True)
        if run.failed in _LEFT_OUT:
            return
        done.append(mutant)
        outcome = f"killed by {mutant.killed_by}" if mutant.killed_by else f"SURVIVED {mutant.ran} tests"
        print(f"{len(done)} of {count}: {mutant.file}:{mutant.line}: {outcome}", file=sys.stderr, flush=True)

    run_all(start, finished, jobs)
    return done, left_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants --c", description="Change the C code at random and see tests fail.")
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants (%(default)s)")
    parser.add_argument("--count", type=int, default=300, help="how many mutants are tried (%(default)s)")
    parser.add_argument("--file", default="", metavar="PART", help="only in files with this in their path")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (%(default)s)")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.nice(10)
    possible = [mutant for mutant in all_mutants(ROOT) if options.file in mutant.file]
    total = len(possible)
    preload()
    with tempfile.TemporaryDirectory(prefix="rdmacm-mutants-") as directory:
        build = Build(ROOT, Path(directory))
        tests = Tests(ROOT, build, options.jobs)
        found, left_out = examine(draw(possible, options.seed), options.count, tests, build, options.jobs)
    note = "not counted: " + ", ".join(f"{left_out[reason]} that {what}" for reason, what in _LEFT_OUT.items())
    done = sorted(found, key=lambda each: (each.file, each.line))
    print(report(done, total, options.seed, tests.unusable, [note]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
