"""Fuzz the decoders and engines, guided by the coverage of the package.

    python3 dev.py fuzz [TARGET...] [--seconds N] [--jobs J] [--driver atheris|hypothesis|random]
                           [--keep] [--directory DIRECTORY]
    python3 dev.py fuzz TARGET --input HEX

The targets (default: all) share the time equally; each runs in its own process. A fault ends its target, and its
input is printed, which --input runs again. --keep adds the inputs that reach new code to the corpus. --directory has
what is found and each target's output; a later run goes on from there.

There are three drivers. atheris, which brings libFuzzer, is used where it is installed. Otherwise hypothesis generates
inputs, and prefers those that execute more of the package. random changes the seeds and the corpus without looking at
what is executed, and so runs a hundred times as many inputs. The targets in C (compiled.py) always run with libFuzzer;
without names they are left out where clang is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import io
import os
import random
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_HERE = Path(__file__).resolve()
_TESTS = _HERE.parents[1]
#: An input that takes longer is a fault, in seconds.
_SLOWEST = 20
_MEMORY_MB = 2048
#: Of one target in the corpus: inputs, and bytes of all of them.
_MOST_INPUTS = 40
_MOST_BYTES = 6000

if __name__ == "__main__":
    sys.path.insert(0, str(_TESTS))

from fuzz import compiled  # noqa: E402
from fuzz.harness import CORPUS, Target, load_targets, stored_inputs  # noqa: E402
from support.clock import Stopwatch  # noqa: E402


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py fuzz", allow_abbrev=False, description="Fuzz decoders and engines.")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=60, help="how long, all targets together (default: 60)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many targets run at a time")
    parser.add_argument("--driver", choices=("atheris", "hypothesis", "random"), default=default_driver())
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument("--directory", help="where to go on from, and to leave what is found")
    parser.add_argument("--input", metavar="HEX", help="run one input of one target")
    options = parser.parse_args(arguments)
    in_c = set(options.targets) & set(compiled.COMPILED)
    if in_c and (reason := compiled.missing()):
        parser.error(f"{', '.join(sorted(in_c))} {reason}")
    if options.targets and in_c == set(options.targets):
        targets = {}  # loading those in Python takes seconds
    elif options.driver == "atheris" and options.input is None:
        targets = load_instrumented()
    else:
        targets = load_targets()
    unknown = set(options.targets) - set(targets) - in_c
    if unknown:
        names = ", ".join((*targets, *compiled.COMPILED))
        parser.error(f"no target {', '.join(sorted(unknown))}; the targets are {names}")
    if options.input is not None:
        if len(options.targets) != 1:
            parser.error("--input is for one target")
        if in_c:
            done = compiled.run(options.targets[0], [bytes.fromhex(options.input)])
            print(done.stderr)
            return done.returncode
        targets[options.targets[0]].run(bytes.fromhex(options.input))
        return 0
    chosen = options.targets or [*targets, *(() if compiled.missing() else compiled.COMPILED)]
    print(f"{len(chosen)} targets, {options.driver}, {options.seconds:g} s", flush=True)
    faults = 0
    with tempfile.TemporaryDirectory(prefix="rdmacm-fuzz-") as temporary:
        directory = Path(options.directory or temporary).resolve()
        seconds = options.seconds * options.jobs / max(len(chosen), options.jobs)
        runs = [targets.get(name, name) for name in chosen]
        for outcome in run_all(runs, options.driver, seconds, options.jobs, directory):
            print(outcome, flush=True)
            faults += len(outcome.faults)
            if options.keep:
                if outcome.name in compiled.COMPILED:
                    kept = compiled.keep(outcome.name, outcome.directory)
                else:
                    kept = keep(targets[outcome.name], outcome.found())
                print(f"{'':16} {kept} inputs in the corpus", flush=True)
    return 1 if faults else 0


@functools.cache
def _package() -> str:
    """The directory of the package that runs, which is not always that of the sources. Does not import it."""
    spec = importlib.util.find_spec("rdmacm")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


def default_driver() -> str:
    return "atheris" if importlib.util.find_spec("atheris") is not None else "hypothesis"


# -- the processes ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What one target's process has reported. ``reached`` counts libFuzzer's edges, or lines after lines."""

    name: str
    directory: Path
    executed: int = 0
    reached: int = 0
    seconds: float = 0.0
    faults: list[tuple[bytes, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.name:16} {self.executed:9d} inputs in {self.seconds:4.0f} s, {self.reached:5d} edges"]
        for data, text in self.faults:
            lines += [text.rstrip(), f"FAULT: python3 dev.py fuzz {self.name} --input {data.hex()}"]
        return "\n".join(lines)

    def found(self) -> list[bytes]:
        """The inputs that the driver has found interesting."""
        return [path.read_bytes() for path in sorted(self.directory.glob("corpus/*"))]


def load_instrumented() -> dict[str, Target]:
    """The targets, whose code reports to atheris what it executes. Takes seconds, so it is done once for all."""
    import atheris

    instrumented = atheris.instrument_imports(include=["rdmacm"], enable_loader_override=False)
    with contextlib.redirect_stderr(io.StringIO()), instrumented:  # it prints a line for each module
        targets = load_targets()
        for target in targets.values():  # some modules are imported when they are first used
            for data in target.seeds():
                target.run(data)
    return targets


def run_all(targets: Iterable[Target], driver: str, seconds: float, jobs: int, directory: Path) -> Iterable[Outcome]:
    """Fuzz each target for ``seconds`` in a child of this process, ``jobs`` at a time."""
    waiting = list(targets)
    running: dict[int, tuple[Outcome, Stopwatch]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            target = waiting.pop(0)
            name = target if isinstance(target, str) else target.name
            where = directory / name
            where.mkdir(parents=True, exist_ok=True)
            running[_start(target, driver, seconds, where)] = Outcome(name, where), Stopwatch()
        child, status = os.waitpid(-1, 0)
        outcome, watch = running.pop(child)
        outcome.seconds = watch.seconds
        _read_log(outcome, os.waitstatus_to_exitcode(status))
        yield outcome


def _start(target: Target | str, driver: str, seconds: float, directory: Path) -> int:
    """Fuzz a target in a child. Return its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(directory)
        (directory / "corpus").mkdir(exist_ok=True)
        if isinstance(target, str):
            status = compiled.fuzz(target, seconds, directory)
        else:
            status = _DRIVERS[driver](target, seconds, directory)
    except BaseException:  # the parent goes on with the next target
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _read_log(outcome: Outcome, status: int) -> None:
    log = (outcome.directory / "log").read_text(errors="replace")
    for pattern, name in ((r"number_of_executed_units: *(\d+)", "executed"), (r"\bcov: (\d+)", "reached")):
        numbers = re.findall(pattern, log)
        if numbers:
            setattr(outcome, name, int(numbers[-1]))
    for path in sorted(outcome.directory.glob("fault-*")):
        outcome.faults.append((path.read_bytes(), log[-4000:]))
    if status and not outcome.faults:
        outcome.faults.append((b"", f"the process ended with status {status}:\n{log[-4000:]}"))


# -- in the process of a target ------------------------------------------------------------------------------------


def _with_atheris(target: Target, seconds: float, directory: Path) -> int:
    import atheris

    for number, data in enumerate(_beginning(target)):
        (directory / "corpus" / f"seed-{number}").write_bytes(data)
    options = {
        "max_total_time": max(1, round(seconds)),
        "max_len": target.max_size,
        "timeout": _SLOWEST,
        "rss_limit_mb": _MEMORY_MB,
        "print_final_stats": 1,
        "artifact_prefix": str(directory / "fault-"),
    }
    atheris.Setup(
        [sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(directory / "corpus")], target.run
    )
    atheris.Fuzz()
    return 0


def _with_hypothesis(target: Target, seconds: float, directory: Path) -> int:
    import hypothesis
    from hypothesis import strategies as st

    watch = Stopwatch()
    beginning = _beginning(target) or [b""]
    position = st.integers(0, max(map(len, beginning)))
    edits = st.lists(st.tuples(position, st.integers(0, 255)), max_size=6)
    changed = st.builds(_edited, st.sampled_from(beginning), edits, position)
    executed, edges, last = 0, set[Any](), b""

    @hypothesis.given(st.one_of(changed, st.binary(max_size=target.max_size)))
    @hypothesis.settings(
        max_examples=1000, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    def fuzz(data: bytes) -> None:
        nonlocal executed, last
        if watch.seconds > seconds:
            return
        executed, last = executed + 1, data
        one = Stopwatch()
        found = edges_of(target, data)
        assert one.seconds < _SLOWEST
        if not found <= edges:
            (directory / "corpus" / str(executed)).write_bytes(data)
        edges.update(found)
        hypothesis.target(float(len(found)))

    status = 0
    try:
        for data in beginning:
            edges |= edges_of(target, data)
        while watch.seconds < seconds:
            fuzz()
    except Exception:
        traceback.print_exc()
        (directory / "fault-1").write_bytes(last)
        status = 1
    print(f"number_of_executed_units: {executed} cov: {len(edges)}")
    return status


def _with_random(target: Target, seconds: float, directory: Path) -> int:
    watch = Stopwatch()
    rng = random.Random()
    beginning = _beginning(target) or [b""]
    executed, data = 0, b""
    try:
        while watch.seconds < seconds:
            for _ in range(1000):
                data = b"".join(rng.choices(beginning, k=rng.randint(1, 3)))
                edits = [(rng.randrange(len(data) + 1), rng.randrange(256)) for _ in range(rng.randrange(6))]
                data = _edited(data, edits, target.max_size)
                target.run(data)
                executed += 1
    except Exception:
        traceback.print_exc()
        (directory / "fault-1").write_bytes(data)
        return 1
    finally:
        print(f"number_of_executed_units: {executed}")
    return 0


_DRIVERS = {"atheris": _with_atheris, "hypothesis": _with_hypothesis, "random": _with_random}


def _beginning(target: Target) -> list[bytes]:
    return [*target.seeds(), *stored_inputs(target.name)]


def _edited(data: bytes, edits: list[tuple[int, int]], end: int) -> bytes:
    changed = bytearray(data)
    for position, value in edits:
        if position < len(changed):
            changed[position] = value
    return bytes(changed[: end or None])


# -- the corpus -------------------------------------------------------------------------------------------------------


def edges_of(target: Target, data: bytes) -> set[tuple[Any, int, int]]:
    """Which line of the package was executed after which, while the target ran."""
    found: set[tuple[Any, int, int]] = set()
    package = _package()

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(package):
            return None
        before = 0

        def line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal before
            found.add((code, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    previous = sys.gettrace()
    gc.disable()  # the finalizers of other objects are no code of the target
    sys.settrace(enter)
    try:
        target.run(data)
    finally:
        sys.settrace(previous)
        gc.enable()
    return found


def keep(target: Target, found: list[bytes]) -> int:
    """Write the corpus of a target: of the stored inputs and ``found``, those that reach more than the seeds do.

    Returns how many there are.
    """
    reached: set[tuple[Any, int, int]] = set()
    seeds = list(target.seeds())
    for seed in seeds:
        reached |= edges_of(target, seed)
    kept: list[bytes] = []
    for data in sorted({*stored_inputs(target.name), *found} - set(seeds), key=lambda data: (len(data), data)):
        if len(kept) >= _MOST_INPUTS or sum(map(len, kept)) + len(data) > _MOST_BYTES:
            break
        edges = edges_of(target, data)
        if not edges <= reached:
            reached |= edges
            kept.append(data)
    path = CORPUS / f"{target.name}.txt"
    path.unlink(missing_ok=True)
    if kept:
        path.write_text("".join(data.hex() + "\n" for data in kept))
    return len(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
