#!/usr/bin/env python3
"""The commands for contributors.

    python3 dev.py demo [ARGS...]    run the rdmacm command from the sources, without installing anything;
                                     without ARGS: rdmacm demo, two processes that move data
    python3 dev.py test [ARGS...]    run the tests; ARGS are pytest's
    python3 dev.py interop [--machine uml|qemu|both] [--write] [ARGS...]
                                     run the tests against the kernel's device and librdmacm's tools, in a virtual
                                     machine that this command starts: uml, Linux in user mode (default); qemu, Debian's
                                     own kernel in QEMU; both, all tests in uml and a few in qemu.  --write: both, and
                                     write the results to docs/interop.md.  The other arguments are pytest's.
    python3 dev.py core [--output FILE] [ARGS...]
                                     build the compiled core (docs/core.md) for Python of this machine, and the library
                                     for programs (docs/run.md), into the sources; or the core into FILE. ARGS are the
                                     compiler's, such as -Werror
    python3 dev.py site [--output DIRECTORY]
                                     build the documentation as a site, by default in site/; a warning or a broken link
                                     is an error
    python3 dev.py tables [--check]  make the files that the Python engines and the compiled core share, of
                                     tables/wire.toml, those of the C headers, of tables/abi.toml, and the tables of
                                     docs/parity.md about providers
    python3 dev.py sanitize [--address|--thread] [ARGS...]
                                     run tests with the core built with AddressSanitizer and
                                     UndefinedBehaviorSanitizer, then with ThreadSanitizer, or with one of them; ARGS
                                     are pytest's, by default the tests of hostile packets, of the fuzz targets and of
                                     the core, and then those of the core and its threads
    python3 dev.py check             run ruff, mypy, import-linter and gcc's analyzer; build the package, check it and
                                     run it in a new environment; sanitize
    python3 dev.py mutants [--c] [ARGS...]
                                     change random places of the protocol engines, or with --c of the compiled core;
                                     list the changes that no test detects
    python3 dev.py simulate [--seeds N] [--first SEED] [--jobs N] [ARGS...]
                                     run simulations with random work and faults, check every promise, and list the
                                     states that none has visited; --replay SEED, --script FILE: one simulation
    python3 dev.py fuzz [TARGET...] [--seconds N] [ARGS...]
                                     fuzz every decoder and engine, or some of them, for a minute or N seconds; "fuzz
                                     --help" has the other arguments.  core_engine and stream_engine, C code without
                                     an interpreter, need clang and libFuzzer
    python3 dev.py coverage [ARGS...]
                                     the lines and branches of the compiled core that tests execute; ARGS are pytest's,
                                     by default the tests of the core and of the reliable connection
    python3 dev.py bench [NAME] [ARGS...]
                                     run a benchmark from the sources: resolve (cost of a resolution; the default),
                                     peers (this library and others on loopback), datagrams (the same for messages
                                     without a connection), multicast (joins and messages to a group), connections (ten
                                     thousand open at once), datapath (latency and bandwidth between two processes),
                                     operations (rates of each kind of request, beside UCX's), busy (READs while the
                                     peer computes), flood (forged requests), soak (hours of connections), sa (path
                                     records of a simulated InfiniBand fabric), guest (compared with the kernel's device
                                     and the C tools, in the machine of interop) or programs (the C tools on both, ours
                                     by "rdmacm run")

"test" without ARGS runs several tests at a time and leaves out the tests marked slow; if CI is set, it runs all, and
prints a line for each part.  Those marked wallclock come last, alone, and up to twice more if they fail.  With ARGS it
does nothing of that.  "test", "interop" and "bench" build the compiled core where there are a C
compiler and Python.h; with RDMACM_CORE=python in the environment everything runs without it.  "test", "sanitize",
"mutants", "fuzz", "coverage", "interop", "site" and "check" install the packages they need in .venv next to this file,
when .venv is missing or out of date.  "core" needs a C compiler, "sanitize", "mutants --c" and "coverage" gcc; the
other commands need Python 3.11 or later and nothing else.
"""

import os
import sys

try:
    # Python's own handler would print a traceback while the imports below run. "signal" itself takes long to import.
    import _signal  # type: ignore[import-not-found]

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))
except ImportError:
    pass

import argparse
import hashlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any, NamedTuple, NoReturn

ROOT = os.path.dirname(os.path.abspath(__file__))
OLDEST = (3, 11)


def fail(message: str) -> NoReturn:
    sys.stderr.write("dev.py: " + message + "\n")
    sys.exit(1)


def restart_with_newer_python() -> NoReturn:
    """Run this file with a newer Python from the PATH; exit when there is none."""
    test = "import sys; sys.exit(sys.version_info < (3, 11))"
    for minor in (11, 12, 13, 14):
        python = shutil.which(f"python3.{minor}")
        # A version manager's launcher may have this name without the version being installed, so run it.
        if python and subprocess.call([python, "-c", test], stderr=subprocess.DEVNULL) == 0:
            sys.stdout.flush()
            os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])
    version = "{}.{}".format(*sys.version_info)
    fail(f"needs Python 3.11 or later, not {version}; install a newer one, such as python3.11")


# An old Python runs this file up to here, and has to parse the rest: use no match statement and no walrus operator.
if sys.version_info < OLDEST:
    restart_with_newer_python()

from collections.abc import Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import contextmanager, suppress  # noqa: E402
from pathlib import Path  # noqa: E402

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

VENV = Path(ROOT, ".venv")
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# What .venv was made from; empty until .venv is complete.  A .venv without it was not made by this file.
STAMP = VENV / "rdmacm-dev"


# --- the environment ----------------------------------------------------------------------------------------


def environment(extra: str) -> None:
    """Make sure that .venv has the package (as an editable install) and the packages that the extra lists."""
    made_from = _made_from()
    if _stamp() in ((made_from, extra), (made_from, "dev")):  # the extra "dev" includes "test"
        return
    with _one_at_a_time():
        # Another run may have prepared it while this one waited for the lock.
        if _stamp() in ((made_from, extra), (made_from, "dev")):
            return
        print("dev.py: preparing .venv ...", file=sys.stderr, flush=True)
        if VENV.exists():
            if not STAMP.exists():
                fail(".venv was not made by dev.py; remove it, or use it by itself: pip install --editable '.[dev]'")
            shutil.rmtree(VENV)
        VENV.mkdir()
        STAMP.touch()
        # Not the interpreter of the environment that this runs in: that may be .venv itself.
        python = getattr(sys, "_base_executable", None) or sys.executable
        if _call([python, "-m", "venv", VENV]):
            major, minor = sys.version_info[:2]
            fail(f"could not make .venv; on Debian and Ubuntu: apt install python{major}.{minor}-venv")
        # Run in the root directory: a path with special characters would not be a valid argument of pip.
        # Most modules of these packages are never used, and compiling them takes as long as the rest.
        install = [PYTHON, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile"]
        if _call([*install, "--editable", f".[{extra}]"]):
            fail(f"could not install the packages of the extra {extra!r}")
        STAMP.write_text(f"{made_from}\n{extra}\n", "utf-8")


def _made_from() -> str:
    """A digest of everything that .venv depends on.  When it changes, .venv is made again."""
    # That includes the directory: a virtual environment contains its own path and cannot be moved.
    parts = [Path(ROOT, "pyproject.toml").read_text("utf-8"), sys.version, sys.base_prefix, ROOT]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _stamp() -> tuple[str, ...]:
    """What .venv was made from, and for which extra; empty if it is not complete."""
    try:
        return tuple(STAMP.read_text("utf-8").split())
    except OSError:
        return ()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Prevent other runs from changing .venv meanwhile.  The system releases the lock when the process ends."""
    if fcntl is None:
        yield
        return
    # The lock is on this file: it always exists, and no lock file is left behind.
    with open(__file__, "rb") as lock:
        # Some network file systems have no locks; then the user has to avoid parallel runs.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _call(command: list[Any]) -> int:
    return subprocess.call(command, cwd=ROOT, env=_venv_environ(), stdin=subprocess.DEVNULL)


# --- running things -----------------------------------------------------------------------------------------


def _venv_environ() -> dict[str, str]:
    """The environment variables that activating .venv would set."""
    environ = dict(os.environ, VIRTUAL_ENV=str(VENV))
    environ["PATH"] = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    # It would make .venv use the standard library of another Python.
    environ.pop("PYTHONHOME", None)
    # Hundreds of processes import the same modules: without bytecode each would compile them.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


def _source_environ() -> dict[str, str]:
    """The environment variables with src on the module path."""
    paths = [str(Path(ROOT, "src")), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))


def _become(command: list[str], environ: dict[str, str]) -> int:
    """Replace this process by the command, which then receives signals and sets the exit status itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(command[0], command, environ)
    return subprocess.run(command, env=environ, check=False).returncode


def demo(arguments: list[str]) -> int:
    # In this process: while another Python started, Ctrl-C would be a traceback.
    sys.path.insert(0, str(Path(ROOT, "src")))
    sys.argv = ["rdmacm", *(arguments or ["demo"])]
    from rdmacm.tools.main import command

    command()


#: The files in bench that are benchmarks; the others are parts of them.
BENCHMARKS = (
    *("resolve", "peers", "datagrams", "multicast", "connections", "datapath", "operations"),
    *("busy", "flood", "soak", "sa", "guest", "programs"),
)


def bench(arguments: list[str]) -> int:
    name = BENCHMARKS[0]
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    if name not in BENCHMARKS:
        fail(f"no benchmark {name!r}; the benchmarks are " + ", ".join(BENCHMARKS))
    _build_core()
    return _become([sys.executable, str(Path(ROOT, "bench", name + ".py")), *arguments], _source_environ())


def _several(most: int) -> list[str]:
    """pytest's arguments for up to ``most`` tests at a time, and at most two for each processor.

    Two, because many tests wait most of the time.  With more, tests that measure time would disturb each other.
    """
    number = min(most, 2 * (os.cpu_count() or 1))
    # Keep the order of files from tests/conftest.py instead of sorting files by their number of tests.
    return ["-n", str(number), "--dist", "loadfile", "--no-loadscope-reorder"]


#: Where the compiled core is, in the package, and the library for C programs.
CORE = os.path.join("proto", "_core.abi3.so")
LIBRARY = os.path.join("run", "librdmacm_run.so.1")
PACKAGE = os.path.join(ROOT, "src", "rdmacm")


def core(arguments: list[str]) -> int:
    return _become([sys.executable, os.path.join(ROOT, "hatch_build.py"), *arguments], dict(os.environ))


def tables(arguments: list[str]) -> int:
    return _become([sys.executable, os.path.join(ROOT, "tables", "generate.py"), *arguments], _source_environ())


def site(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py site", allow_abbrev=False)
    parser.add_argument("--output", metavar="DIRECTORY", default=os.path.join(ROOT, "site"))
    output = os.path.abspath(parser.parse_args(arguments).output)
    environment("docs")
    return _become([str(PYTHON), os.path.join(ROOT, "docs", "make_site.py"), output], _venv_environ())


def _build_core() -> None:
    """Build the core and the library into the sources where that is possible, unless they are newer than those."""
    if os.environ.get("RDMACM_CORE") == "python":
        return
    import hatch_build

    made_from = [*Path(ROOT, "core").glob("*/*"), Path(ROOT, "hatch_build.py")]
    newest = max(path.stat().st_mtime for path in made_from)
    for name, what in ((CORE, "the compiled core"), (LIBRARY, "the library for programs")):
        built = Path(PACKAGE, name)
        if built.exists() and built.stat().st_mtime >= newest:
            continue
        try:
            hatch_build.build(built, is_library=name == LIBRARY)
        except hatch_build.NotBuiltError as error:
            built.unlink(missing_ok=True)  # it is not what the sources are
            print(f"dev.py: without {what}: {error}", file=sys.stderr, flush=True)


#: What "sanitize" runs without arguments, of each kind of build.
SANITIZED = {
    "address": (
        *("tests/core", "tests/fuzz", "tests/proto/test_rc_hostile.py", "tests/proto/test_ud.py"),
        *("tests/soft/device/test_datagrams.py", "tests/conformance/test_hostile.py"),
    ),
    "thread": ("tests/core", "tests/soft/test_helper.py", "tests/soft/device/test_datagrams.py"),
}


class Sanitizer(NamedTuple):
    """The library that is loaded first, the compiler's arguments, and the environment variables of the tests."""

    library: str
    flags: list[str]
    variables: dict[str, str]


SANITIZERS = {
    "address": Sanitizer(
        "libasan.so",
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        {
            # Python does not free everything at its end, and some tests limit the memory of a process.
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=4",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # for the sanitizer to know each block
        },
    ),
    # The interpreter is not instrumented, but its lock orders what its threads do: the sanitizer sees every mutex. What
    # an application does with its memory while peers access it is not a fault of the core.
    "thread": Sanitizer(
        "libtsan.so",
        ["-fsanitize=thread"],
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0"},
    ),
}


def sanitize(arguments: list[str]) -> int:
    kinds = [kind for kind in SANITIZERS if f"--{kind}" in arguments] or list(SANITIZERS)
    arguments = [each for each in arguments if each.removeprefix("--") not in SANITIZERS]
    for kind in list(kinds):
        reason = _no_sanitizer(kind)
        if reason is not None:
            if kind != "thread" or kinds == ["thread"]:
                fail(f"sanitize --{kind} {reason}")
            print(f"dev.py: sanitize --{kind} {reason}", file=sys.stderr, flush=True)
            kinds.remove(kind)
    environment("test")
    for kind in kinds:
        status = _sanitize(kind, arguments)
        if status:
            return status
    return 0


def _sanitize(kind: str, arguments: list[str]) -> int:
    environ = _venv_environ()
    if not arguments:
        arguments = ["-n", "1", "-q", "-m", "not slow", *SANITIZED[kind]]  # in a process with a network of its own
        environ.pop("CI", None)  # which stands for more examples
    sanitizer = SANITIZERS[kind]
    with tempfile.TemporaryDirectory(prefix="rdmacm-sanitize-") as place:
        # A copy of the package: other processes go on with the usual core.
        package = os.path.join(place, "rdmacm")
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_core.*"))
        flags = ["-g", "-O1", "-fno-omit-frame-pointer", *sanitizer.flags]
        flags.append("-DRDMACM_CHECKS")  # of the mutex: docs/core.md
        build = [sys.executable, os.path.join(ROOT, "hatch_build.py"), "--output", os.path.join(package, CORE), *flags]
        if subprocess.call(build, env=dict(os.environ, CC="gcc")):
            return 1
        library = _sanitizer_library(sanitizer.library)
        environ.update(sanitizer.variables, LD_PRELOAD=library, PYTHONPATH=place, RDMACM_CORE="c")
        environ.setdefault("PYTEST_TIMEOUT", "120")
        return subprocess.call([str(PYTHON), "-m", "pytest", *arguments], cwd=ROOT, env=environ)


def _no_gcc() -> str | None:
    """What gcc needs to build the core, if it is missing."""
    import hatch_build

    reason: str | None = hatch_build.missing()
    return reason if shutil.which("gcc") else "needs gcc"


def _no_sanitizer(kind: str) -> str | None:
    """What is missing to run tests with the core built with a sanitizer."""
    reason = _no_gcc()
    sanitizer = SANITIZERS[kind]
    if reason is None and not os.path.isabs(_sanitizer_library(sanitizer.library)):
        reason = f"needs {sanitizer.library}, which comes with gcc"
    if reason is None and not _runs_with(sanitizer):
        reason = "does not run on this kernel"
    return reason


def _sanitizer_library(name: str) -> str:
    """The library that has to be loaded first; not a path where there is none."""
    return subprocess.check_output(["gcc", "-print-file-name=" + name], text=True).strip()


def _runs_with(sanitizer: Sanitizer) -> bool:
    """Whether processes start with a sanitizer's library: some kernels map memory where that of threads has its own."""
    environ = dict(os.environ, **sanitizer.variables, LD_PRELOAD=_sanitizer_library(sanitizer.library))
    return not subprocess.call([sys.executable, "-c", ""], env=environ, stderr=subprocess.DEVNULL)


def test(arguments: list[str]) -> int:
    environment("test")
    _build_core()
    environ = _venv_environ()
    # Seconds after which a test that hangs fails.  Not in pyproject.toml, since there pytest rejects the setting when
    # the plugin is missing.  The option "--timeout" and the marker "timeout" take precedence.
    environ.setdefault("PYTEST_TIMEOUT", "120")
    os.chdir(ROOT)
    pytest = [str(PYTHON), "-m", "pytest"]
    if arguments:
        return _become([*pytest, *arguments], environ)
    fast = "" if environ.get("CI") else " and not slow"
    status = subprocess.call([*pytest, *_several(4), "-m", "not wallclock" + fast], env=environ)
    if status not in (0, 1):  # it was interrupted, or could not run
        return status
    return _measured([*pytest, "-m", "wallclock" + fast], environ) or status


def _measured(pytest: list[str], environ: dict[str, str]) -> int:
    """Run the tests that measure time, one after the other, and those that fail up to twice more."""
    for again in range(3):
        if again:
            print(f"dev.py: a busy machine may be the reason: run {again + 1} of 3 of those that failed", flush=True)
            pytest = [*pytest, "--last-failed", "--last-failed-no-failures", "none"]
        status = subprocess.call(pytest, env=environ)
        if status != 1:
            break
    return 0 if status == 5 else status  # 5: there are none


def interop(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py interop", add_help=False, allow_abbrev=False)
    parser.add_argument("--machine", choices=("uml", "qemu", "both"))
    parser.add_argument("--write", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if options.write:
        if options.machine not in (None, "both") or rest:
            fail("--write needs all tests in both machines: give no other arguments")
        options.machine = "both"
        os.environ["RDMACM_INTEROP_TABLE"] = str(Path(ROOT, "docs", "interop.md"))
    if options.machine:
        os.environ["RDMACM_GUEST_MACHINE"] = options.machine
    return test(["tests/interop", *(rest or _several(2))])


def mutants(arguments: list[str]) -> int:
    program = "mutants.py"
    if "--c" in arguments:
        arguments = [each for each in arguments if each != "--c"]
        program = "mutants_c.py"
        reason = _no_gcc()
        if reason is not None:
            fail("mutants --c " + reason)
    environment("test")
    # Where engines in Python are changed: with the compiled core the tests would not run them.
    environ = dict(_venv_environ(), RDMACM_CORE="python")
    return _become([str(PYTHON), str(Path(ROOT, "tests", program)), *arguments], environ)


def simulate(arguments: list[str]) -> int:
    environ = _source_environ()
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(ROOT, "tests")), environ["PYTHONPATH"]])
    return _become([sys.executable, "-m", "swarm", *arguments], environ)


def fuzz(arguments: list[str]) -> int:
    environment("dev")
    return _become([str(PYTHON), str(Path(ROOT, "tests", "fuzz", "drive.py")), *arguments], _venv_environ())


def coverage(arguments: list[str]) -> int:
    reason = _no_gcc()
    if reason is not None:
        fail("coverage " + reason)
    environment("test")
    return _become([str(PYTHON), str(Path(ROOT, "tests", "coverage_c.py")), *arguments], _venv_environ())


def check(arguments: list[str]) -> int:
    if arguments:
        fail("check takes no arguments")
    environment("dev")
    with tempfile.TemporaryDirectory() as place:
        dist = os.path.join(place, "dist")
        analyze = ["python", "hatch_build.py", "--output", os.path.join(place, "core.so"), "-Werror", "-fanalyzer"]
        # As many of these as there are processors run at a time, the parts of one in turn. The longest come first.
        chains: list[list[tuple[str, list[str], str | None]]] = [
            [("sanitize --address", ["python", "dev.py", "sanitize", "--address"], _no_sanitizer("address"))],
            [("sanitize --thread", ["python", "dev.py", "sanitize", "--thread"], _no_sanitizer("thread"))],
            [("mypy", ["mypy"], None)],
            [
                ("build", ["python", "-m", "build", "--no-isolation", "--outdir", dist], None),
                ("twine", ["twine", "check", "--strict", dist + "/*"], None),
                ("check-wheel-contents", ["check-wheel-contents", dist], None),
                ("wheel", ["python", os.path.join("tests", "check_wheel.py"), dist], None),
            ],
            [
                ("tables", ["python", "dev.py", "tables", "--check"], None),
                ("ruff check", ["ruff", "check", "."], None),
                ("ruff format", ["ruff", "format", "--check", "."], None),
                ("import-linter", ["lint-imports"], None),
                ("gcc -fanalyzer", analyze, _no_gcc()),
                # An object that the program has by its first member looks lost to the analyzer.
                ("gcc -fanalyzer --library", [*analyze, "--library", "-Wno-analyzer-malloc-leak"], _no_gcc()),
            ],
        ]
        interrupted = threading.Event()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            try:
                results = list(pool.map(lambda chain: _run_chain(chain, interrupted), chains))
            except KeyboardInterrupt:  # which the running commands got too
                interrupted.set()
                raise
        failed = [name for names in results for name in names]
    print("--- failed: " + ", ".join(failed) if failed else "--- all passed", flush=True)
    return 1 if failed else 0


def _run_chain(chain: list[tuple[str, list[str], str | None]], interrupted: threading.Event) -> list[str]:
    """Run checks in turn, each a name, a command, and why it cannot run here. Returns the names of those that fail."""
    failed = []
    for name, command, reason in chain:
        if interrupted.is_set():
            break
        if reason is not None:
            print(f"--- {name}: skipped, {reason}", flush=True)
            continue
        began = time.monotonic()
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=ROOT,
            env=dict(_venv_environ(), CC="gcc") if "gcc" in name else _venv_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        text = done.stdout.decode(errors="replace")
        print(f"--- {name}, {time.monotonic() - began:.1f} s\n{text}", end="", flush=True)
        if done.returncode:
            failed.append(name)
    return failed


COMMANDS = {
    "demo": demo,
    "test": test,
    "interop": interop,
    "core": core,
    "tables": tables,
    "site": site,
    "sanitize": sanitize,
    "check": check,
    "mutants": mutants,
    "simulate": simulate,
    "fuzz": fuzz,
    "coverage": coverage,
    "bench": bench,
}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    asks_for_help = arguments[:1] in (["help"], ["-h"], ["--help"])
    print(__doc__.strip(), file=sys.stdout if asks_for_help else sys.stderr)
    return 0 if asks_for_help else 2


if __name__ == "__main__":
    try:
        if len(sys.argv) < 2 or sys.argv[1] != "demo":  # which has a handler of its own
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
