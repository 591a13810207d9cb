"""Mutation testing: change the sources in one small place at a time, and see whether a test fails.

    python3 dev.py mutants [--seed N] [--count N] [--file PART] [--jobs N] [--root DIR]

A share of the possible changes ("mutants") is drawn by the seed from the protocol engines and the provider seam: a
comparison, an operator or a constant is replaced, a condition negated, a statement or the value of a return dropped.
A mutant that no test notices has survived. Some survivors are equivalent to the original; each of the others is a
behaviour without a test.

First every test runs once on the unchanged sources, which tells the functions that each test calls. Then each mutant
gets a process of its own, forked from this one: it finds pytest imported and rdmacm not, imports the package with the
changed module compiled in memory, and runs the tests that call the changed function, nearest files first. Where the
system permits it, each process has a network namespace of its own, since tests open UDP port 4791.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.abc
import importlib.machinery
import json
import os
import random
import resource
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Protocol, TypeVar

import pytest

from support.own_network import enter_own_network

#: What is mutated, relative to the package.
SOURCES = ("proto/**/*.py", "provider/__init__.py", "verbs/*.py", "enums.py")

#: Directories of tests that run rdmacm in other processes or machines, where a mutant would not reach.
OUTSIDE = {"data", "infiniband", "interop", "netns", "support", "tools"}

#: A mutant that starts no test for so many seconds counts as killed: it loops or waits for ever.
SILENCE = 30.0

#: Seconds of processor time that the tests of one stage take on the unchanged sources; there are four stages.
STAGE_BUDGET = 10.0

#: The limit of the address space in bytes, for mutants that allocate without end.
MEMORY = 4 << 30

# --- the changes ----------------------------------------------------------------------------------------------

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
#: Methods that write text for people.
_TEXTS = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Change:
    """One possible change of a syntax tree."""

    line: int
    #: The first line of the innermost function, as in its code object; None for what runs at import.
    function: int | None
    text: str
    apply: Callable[[], None]


class Changes:
    """All possible changes of one tree, in the order of its nodes."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Change] = []
        self._function: int | None = None
        self._body(tree, skip_docstring=True)

    def _offer(self, holder: ast.AST, name: str, index: int | None, new: ast.AST) -> None:
        """A change that puts `new` into `holder.name`, or into that list at `index`."""
        old = getattr(holder, name) if index is None else getattr(holder, name)[index]
        shown = holder if isinstance(old, ast.operator | ast.cmpop | ast.boolop) else old

        def apply() -> None:
            if index is None:
                setattr(holder, name, new)
            else:
                getattr(holder, name)[index] = new

        before = ast.unparse(shown)
        apply()
        after = ast.unparse(ast.fix_missing_locations(shown if shown is holder else new))
        if index is None:
            setattr(holder, name, old)
        else:
            getattr(holder, name)[index] = old
        line = getattr(shown, "lineno", 0)
        self.found.append(Change(line, self._function, f"{_short(before)}  ->  {_short(after)}", apply))

    def _body(self, node: ast.AST, skip_docstring: bool = False) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("decorator_list", "annotation", "returns", "type_params"):
                continue
            if isinstance(value, ast.AST):
                self._visit(node, name, None, value)
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    docstring = skip_docstring and name == "body" and index == 0 and _is_text(item)
                    if isinstance(item, ast.AST) and not docstring:
                        self._visit(node, name, index, item)

    def _visit(self, holder: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._visit_function(node)
                return
            case ast.ClassDef():
                self._body(node, skip_docstring=True)
                return
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr() | ast.Global():
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Call(func=ast.Name(id="cast" | "TypeVar" | "NewType" | "ParamSpec")):
                return
        for new in _replacements(node):
            self._offer(holder, name, index, new)
        match node:
            case ast.Raise():
                return
            case ast.Compare():
                for position, operation in enumerate(node.ops):
                    for other in _COMPARISONS[type(operation)]:
                        self._offer(node, "ops", position, other())
            case ast.BoolOp():
                self._offer(node, "op", None, ast.Or() if isinstance(node.op, ast.And) else ast.And())
            case ast.BinOp() | ast.AugAssign() if type(node.op) in _OPERATORS and not _is_text_or_type(node):
                self._offer(node, "op", None, _OPERATORS[type(node.op)]())
            case ast.If() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
                self._offer(node, "test", None, ast.UnaryOp(ast.Not(), node.test))
        self._body(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        marks = {ast.unparse(decorator) for decorator in node.decorator_list}
        if node.name in _TEXTS or "overload" in marks:
            return
        # Defaults are computed where the function is defined.
        for name in ("defaults", "kw_defaults"):
            for index, value in enumerate(getattr(node.args, name)):
                if value is not None:
                    self._visit(node.args, name, index, value)
        outer, self._function = self._function, min([node.lineno, *(each.lineno for each in node.decorator_list)])
        for index, statement in enumerate(node.body):
            if index or not _is_text(statement):
                self._visit(node, "body", index, statement)
        self._function = outer


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of the whole node."""
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_text_or_type(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether the operator joins strings, or types to a union."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.value, ast.JoinedStr)
    for side in (node.left, node.right):
        if isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | None)):
            return True
    names = [side.id for side in (node.left, node.right) if isinstance(side, ast.Name)]
    builtin = {"int", "str", "bytes", "bytearray", "memoryview", "float", "bool"}
    return isinstance(node.op, ast.BitOr) and any(
        each in builtin or (each[0].isupper() and not each.isupper()) for each in names
    )


def _short(text: str) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= 70 else text[:67] + "..."


# --- the changed module in memory -----------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(importlib.abc.MetaPathFinder):
    """Gives one module its changed code."""

    def __init__(self, module: str, path: Path, code: CodeType) -> None:
        self.module, self.path, self.code = module, path, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        loader = _Loader(fullname, str(self.path), self.code)
        package = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=str(self.path), is_package=package is not None)
        spec.submodule_search_locations = package
        spec.has_location = True
        return spec


@dataclass
class Mutant:
    """One change of the sources, and its outcome."""

    path: Path
    #: As shown to people: relative to the root.
    file: str
    module: str
    #: Which of the file's changes.
    number: int
    line: int
    function: int | None
    text: str
    #: The tests still to be run, by stage.
    stages: list[list[str]] = field(default_factory=list)
    ran: int = 0
    killed_by: str | None = None

    def install(self) -> None:
        """Have the module imported with the change."""
        tree = ast.parse(self.path.read_text())
        Changes(tree).found[self.number].apply()
        code = compile(ast.fix_missing_locations(tree), str(self.path), "exec")
        sys.meta_path.insert(0, _Finder(self.module, self.path, code))


def all_mutants(root: Path) -> list[Mutant]:
    mutants = []
    package = root / "src" / "rdmacm"
    for path in sorted({path for pattern in SOURCES for path in package.glob(pattern)}):
        parts = path.relative_to(root / "src").with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for number, change in enumerate(Changes(ast.parse(path.read_text())).found):
            file = str(path.relative_to(root))
            mutants.append(Mutant(path, file, module, number, change.line, change.function, change.text))
    return mutants


class InFile(Protocol):
    """What has a line of a file."""

    file: str
    line: int


AnyMutant = TypeVar("AnyMutant", bound=InFile)


def draw(mutants: list[AnyMutant], seed: int) -> list[AnyMutant]:
    """The mutants in a random order in which each line of the sources comes once before any comes again."""
    mutants = random.Random(seed).sample(mutants, len(mutants))
    seen: Counter[tuple[str, int]] = Counter()
    turns = []
    for mutant in mutants:
        turns.append(seen[mutant.file, mutant.line])
        seen[mutant.file, mutant.line] += 1
    return [mutants[index] for index in sorted(range(len(mutants)), key=turns.__getitem__)]


# --- one process per mutant -----------------------------------------------------------------------------------


def isolate() -> None:
    """Give this process its own network namespace, if permitted, and resource limits."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    enter_own_network()


class Reporter:
    """A pytest plugin: runs the chosen tests in the given order and writes the name of each to a pipe."""

    def __init__(self, chosen: Iterable[str] | None, pipe: int) -> None:
        self._order = None if chosen is None else {name: place for place, name in enumerate(chosen)}
        self._pipe = pipe

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = self._order
        if order is not None:
            items[:] = sorted((each for each in items if each.nodeid in order), key=lambda each: order[each.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self._pipe, b"+" + nodeid.encode() + b"\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, b"!" + report.nodeid.encode() + b"\n")


class CallRecorder:
    """A pytest plugin: records which functions of the sources each test calls."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._codes: set[CodeType] = set()
        self._passed: dict[str, bool] = {}
        self._started = 0.0
        self.tests: dict[str, tuple[float, list[str]]] = {}

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        self._codes.add(frame.f_code)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._codes.clear()
        self._started = time.process_time()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if self._passed.pop(item.nodeid, False):
                spent = time.process_time() - self._started
                start = len(self._package)
                called = {
                    f"{code.co_filename[start:]}:{code.co_firstlineno}"
                    for code in tuple(self._codes)
                    if code.co_filename.startswith(self._package)
                }
                self.tests[item.nodeid] = spent, sorted(called)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed[report.nodeid] = report.passed and self._passed.get(report.nodeid, True)


class Run:
    """A forked process that runs pytest, seen from this one."""

    def __init__(self, label: str, arguments: Sequence[str], plugins: Callable[[int], list[Any]]) -> None:
        self.label = label
        self.failed: str | None = None
        self.current = ""
        self.started = 0
        self.heard = time.monotonic()
        self._rest = b""
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 70
            try:
                os.close(self.pipe)
                status = self._child(arguments, plugins, writing)
            except BaseException as error:
                os.write(writing, f"!{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(status)
        os.close(writing)
        os.set_blocking(self.pipe, False)

    @staticmethod
    def _child(arguments: Sequence[str], plugins: Callable[[int], list[Any]], pipe: int) -> int:
        isolate()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        prepared = plugins(pipe)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-m", "not slow", "--tb=no"]
        # Hypothesis is imported before pytest could rewrite its assertions.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*options, *arguments], plugins=prepared))

    def read(self) -> bool:
        """Read from the pipe; False once the process has ended."""
        while True:
            try:
                chunk = os.read(self.pipe, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.heard = time.monotonic()
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self.hear(line)

    def hear(self, line: bytes) -> None:
        name = line[1:].decode()
        if line.startswith(b"!"):
            self.failed = self.failed or name
        else:
            self.current = name
            self.started += 1

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Close what is left, and return pytest's exit status, or a signal's number below zero."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        # Processes that the tests left behind.
        self.kill()
        return os.waitstatus_to_exitcode(status)


def run_all(start: Callable[[], Run | None], finished: Callable[[Run, int | None], None], jobs: int) -> None:
    """Run what `start` returns until it returns None, `jobs` at a time; `finished` gets None for one that hung."""
    running = selectors.DefaultSelector()
    try:
        while True:
            while len(running.get_map()) < jobs and (run := start()):
                running.register(run.pipe, selectors.EVENT_READ, run)
            if not running.get_map():
                return
            ready = {key.fd for key, _ in running.select(1.0)}
            for key in list(running.get_map().values()):
                run = key.data
                alive = key.fd not in ready or run.read()
                hung = alive and time.monotonic() - run.heard > SILENCE
                if hung:
                    run.kill()
                if hung or not alive:
                    running.unregister(key.fd)
                    status = run.end()
                    finished(run, None if hung else status)
    finally:
        for key in running.get_map().values():
            key.data.kill()


# --- which tests call what ------------------------------------------------------------------------------------


class Calls:
    """Which tests call which functions, from one run of all tests on the unchanged sources."""

    def __init__(self, root: Path, jobs: int) -> None:
        #: Seconds of processor time that each test takes.
        self.seconds: dict[str, float] = {}
        #: The tests that call a function ("proto/mad.py:12"), or any function of a file ("proto/mad.py").
        self.callers: dict[str, set[str]] = defaultdict(set)
        #: Files of tests, or single tests, that failed; they are not used.
        self.unusable: list[str] = []
        package = str(root / "src" / "rdmacm") + os.sep
        tests = [path.relative_to(root) for path in sorted((root / "tests").rglob("test_*.py"))]
        left = [str(path) for path in tests if path.parts[1] not in OUTSIDE]

        with tempfile.TemporaryDirectory() as directory:

            def start() -> Run | None:
                if not left:
                    return None
                file = left.pop(0)
                recorder = CallRecorder(package)

                class Save:
                    def pytest_unconfigure(self) -> None:
                        place.write_text(json.dumps(recorder.tests))

                place = Path(directory, file.replace(os.sep, "."))
                return Run(file, [file], lambda pipe: [Reporter(None, pipe), recorder, Save()])

            def finished(run: Run, status: int | None) -> None:
                place = Path(directory, run.label.replace(os.sep, "."))
                if status not in (0, 5):
                    self.unusable.append(f"{run.label}: {run.failed or run.current} ({status})")
                if place.exists():
                    self._take(json.loads(place.read_text()))

            run_all(start, finished, jobs)

    def _take(self, tests: dict[str, tuple[float, list[str]]]) -> None:
        for name, (seconds, called) in tests.items():
            self.seconds[name] = seconds
            for function in called:
                self.callers[function].add(name)
                self.callers[function.partition(":")[0]].add(name)

    def stages(self, file: str, function: int | None, importers: Iterable[str]) -> list[list[str]]:
        """The tests for a change in a function of a file of the package, those most likely to fail first."""
        importers = set(importers)
        naming = {name for name in self.seconds if name.partition("::")[0] in importers}
        direct = self.callers.get(f"{file}:{function}", set())
        others: set[str] = set()
        if function is None or not direct:
            # The change runs at import, so any test of a module that imports this one may fail.
            direct = naming | self.callers[file]
            others = set().union(*(self.callers[each] for each in importers)) - direct
        directory = "tests/" + file.partition("/")[0] + "/"
        nearest = {name for name in direct if name in naming or name.startswith(directory)}
        counts = Counter(name.partition("::")[0] for name in nearest)
        sizes = Counter(name.partition("::")[0] for name in self.seconds)
        files = sorted(counts, key=lambda each: (-counts[each] / sizes[each], each))[:3]
        first = {name for name in nearest if name.partition("::")[0] in files}
        groups = first, nearest - first, direct - nearest, others
        return [stage for stage in map(self._within_budget, groups) if stage]

    def _within_budget(self, names: set[str]) -> list[str]:
        chosen, spent = [], 0.0
        for name in sorted(names, key=lambda each: (self.seconds[each], each)):
            spent += self.seconds[name]
            if spent > STAGE_BUDGET:
                break
            chosen.append(name)
        return chosen


def importers_of(root: Path) -> dict[str, set[str]]:
    """The files that import each module or something from it: of the package, and of the tests."""
    package = root / "src" / "rdmacm"
    importers = defaultdict(set)
    for path in (*package.rglob("*.py"), *(root / "tests").rglob("test_*.py")):
        file = str(path.relative_to(package if path.is_relative_to(package) else root))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                    importers[name].add(file)
    return importers


# --- all of it ------------------------------------------------------------------------------------------------


def examine(mutants: list[Mutant], jobs: int) -> None:
    """Run each mutant's tests, stage by stage, until one fails."""
    waiting = [mutant for mutant in mutants if mutant.stages]
    by_label = {f"{mutant.file}:{mutant.number}": mutant for mutant in mutants}
    done = 0

    def start() -> Run | None:
        if not waiting:
            return None
        mutant = waiting.pop(0)
        chosen = mutant.stages.pop(0)
        files = sorted({name.partition("::")[0] for name in chosen})

        def plugins(pipe: int) -> list[Any]:
            mutant.install()
            return [Reporter(chosen, pipe)]

        return Run(f"{mutant.file}:{mutant.number}", ["-x", *files], plugins)

    def finished(run: Run, status: int | None) -> None:
        nonlocal done
        mutant = by_label[run.label]
        mutant.ran += run.started
        if status is None:
            mutant.killed_by = "no end: " + run.current
        elif status not in (0, 5):
            mutant.killed_by = run.failed or f"exit status {status} {run.current}".rstrip()
        elif mutant.stages:
            waiting.insert(0, mutant)
            return
        done += 1
        if done % 20 == 0:
            print(f"{done} of {len(mutants)} mutants", file=sys.stderr, flush=True)

    run_all(start, finished, jobs)


class Outcome(Protocol):
    """A change that was tried."""

    #: As shown to people: relative to the root.
    file: str
    line: int
    text: str
    #: How many tests ran, and the one that failed.
    ran: int
    killed_by: str | None


def report(
    mutants: Sequence[Outcome], total: int, seed: int, unusable: Iterable[str], notes: Iterable[str] = ()
) -> str:
    """What is printed at the end. ``unusable``: tests that fail without a change; ``notes``: more lines."""
    survivors = [mutant for mutant in mutants if mutant.killed_by is None]
    killed = len(mutants) - len(survivors)
    share = 100 * killed / max(1, len(mutants))
    lines = [
        f"seed {seed}: {len(mutants)} of {total} mutants, {killed} killed ({share:.1f} %), {len(survivors)} survived",
        *notes,
    ]
    lines += ["", "killed  of"]
    counts = Counter(mutant.file for mutant in mutants)
    living = Counter(mutant.file for mutant in survivors)
    lines += [f"{counts[file] - living[file]:6d} {counts[file]:3d}  {file}" for file in sorted(counts)]
    lines += ["", "survived, and how many tests ran"]
    lines += [f"{mutant.ran:6d}  {mutant.file}:{mutant.line}: {mutant.text}" for mutant in survivors]
    lines += ["", "killed, and by which test"]
    lines += [f"  {each.file}:{each.line}: {each.text}\n      {each.killed_by}" for each in mutants if each.killed_by]
    broken = [f"  {each}" for each in unusable]
    if broken:
        lines += ["", "tests that fail on the unchanged sources", *broken]
    return "\n".join(lines)


def preload() -> None:
    """Import what the tests need except rdmacm, so that forked processes have it."""
    for name in ("hypothesis", "hypothesis.strategies", "pytest_timeout", "asyncio", "scapy.contrib.roce", "ssl"):
        with contextlib.suppress(ImportError):
            __import__(name)
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("mutants", derandomize=True, database=None)
        settings.load_profile("mutants")
    if "rdmacm" in sys.modules:
        raise SystemExit("rdmacm is imported already, so that no mutant would be seen")
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description="Change the sources at random and see the tests fail.")
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants (%(default)s)")
    parser.add_argument("--count", type=int, default=300, help="how many mutants are tried (%(default)s)")
    parser.add_argument("--file", default="", metavar="PART", help="only in files with this in their path")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (%(default)s)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the tree to examine")
    options = parser.parse_args()
    root = options.root.resolve()
    os.chdir(root)
    os.nice(10)
    sys.path.insert(0, str(root / "src"))
    os.environ["PYTHONPATH"] = str(root / "src")

    possible = [mutant for mutant in all_mutants(root) if options.file in mutant.file]
    drawn = draw(possible, options.seed)[: options.count]
    drawn.sort(key=lambda mutant: (mutant.file, mutant.number))
    preload()
    calls = Calls(root, options.jobs)
    importers = importers_of(root)
    for mutant in drawn:
        file = mutant.file.removeprefix("src/rdmacm/")
        # Tests take a small package's names from the package.
        importing = importers[mutant.module] | importers[mutant.module.rpartition(".")[0]]
        mutant.stages = calls.stages(file, mutant.function, importing)
    examine(drawn, options.jobs)
    print(report(drawn, len(possible), options.seed, calls.unusable))
    return 0


if __name__ == "__main__":
    sys.exit(main())
