#!/usr/bin/env python3
"""The contributor's entry to rdmacm.

    python3 dev.py demo [ARGS...]    run the rdmacm command from the sources, with nothing installed;
                                     without arguments: rdmacm demo, two processes that move data
    python3 dev.py test [ARGS...]    run the tests; the arguments go to pytest
    python3 dev.py interop [--machine uml|qemu|both] [--readme] [ARGS...]
                                     run the tests against the kernel's device and librdmacm's tools, in a machine that
                                     this starts: uml, Linux in user mode (default); qemu, Debian's own kernel in QEMU;
                                     both, all tests in uml and a few in qemu.  --readme: both, and write the results
                                     into README's table.  The other arguments go to pytest.
    python3 dev.py check             run ruff, mypy and import-linter
    python3 dev.py mutants [ARGS...] change the protocol engines in random places and see which changes no test notices
    python3 dev.py bench [NAME] [ARGS...]
                                     run a benchmark from the sources: resolve (what a resolution costs, and what
                                     runs without a name), peers (what this and others reach on loopback),
                                     connections (ten thousand open at once), datapath (latency and bandwidth
                                     between two processes), sa (path records of a simulated InfiniBand fabric) or
                                     guest (beside the kernel's device and the C tools, in the machine of interop)

"test" runs several tests at a time and leaves out what is marked slow (unless CI is set); given ARGS, it does neither.
"test" and "check" keep what they need in .venv beside this file, and make it when it is missing or out of date.  All
of this needs Python 3.11 or later and nothing else.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any, NoReturn

ROOT = os.path.dirname(os.path.abspath(__file__))
OLDEST = (3, 11)


def fail(message: str) -> NoReturn:
    sys.stderr.write("dev.py: " + message + "\n")
    sys.exit(1)


def start_again_with_a_newer_python() -> NoReturn:
    test = "import sys; sys.exit(sys.version_info < (3, 11))"
    for minor in (11, 12, 13, 14):
        python = shutil.which(f"python3.{minor}")
        # Having the name is not enough: a version manager's launcher may stand for a Python not installed.
        if python and subprocess.call([python, "-c", test], stderr=subprocess.DEVNULL) == 0:
            sys.stdout.flush()
            os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])
    version = "{}.{}".format(*sys.version_info)
    fail(f"needs Python 3.11 or later, and this is {version}; install one, such as python3.11")


# Down to here an old Python has to run this file; below it only has to parse it, so no match, no walrus.
if sys.version_info < OLDEST:
    start_again_with_a_newer_python()

from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager, suppress  # noqa: E402
from pathlib import Path  # noqa: E402

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

VENV = Path(ROOT, ".venv")
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# What .venv was made of.  It is there from the first moment, so that a half-made .venv shows as one, and
# complete only at the end.  A .venv without it is somebody else's.
STAMP = VENV / "rdmacm-dev.json"


# --- the environment ----------------------------------------------------------------------------------------


def environment(extra: str) -> None:
    """See to it that .venv holds the package, as it stands in src, and what the extra lists."""
    key = _key()
    if _is_fresh(_read_stamp(), key, extra):
        return
    with _one_at_a_time():
        # Another run may have done the work while this one waited.
        stamp = _read_stamp()
        if _is_fresh(stamp, key, extra):
            return
        print("dev.py: preparing .venv ...", file=sys.stderr, flush=True)
        if stamp is None and VENV.exists() and (not VENV.is_dir() or any(VENV.iterdir())):
            stamp = {"adopted": True}
        adopted = bool(stamp and stamp.get("adopted"))
        if adopted:
            # Made by hand: what else it holds is not ours to delete.
            if not _runs([PYTHON, "-c", f"import sys; sys.exit(sys.version_info < {OLDEST})"]):
                fail(".venv was not made by dev.py and holds no Python 3.11 or later; move it away")
        elif not (stamp and stamp.get("key") == key and PYTHON.exists()):
            if VENV.exists():
                shutil.rmtree(VENV)
            VENV.mkdir()
        _write_stamp({"adopted": adopted})
        if not PYTHON.exists():
            _create()
        if not _runs([PYTHON, "-m", "pip", "--version"]):
            _bring_pip()
        _install(extra)
        _write_stamp({"adopted": adopted, "key": key, "extra": extra})


def _key() -> str:
    """A digest of what .venv depends on: a change of any of it makes another .venv."""
    # The place counts too, as an environment has its own path written into it and cannot be moved.
    parts = [Path(ROOT, "pyproject.toml").read_text("utf-8"), sys.version, sys.base_prefix, ROOT]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _is_fresh(stamp: dict[str, Any] | None, key: str, extra: str) -> bool:
    # The extra "dev" includes "test".
    return bool(stamp and stamp.get("key") == key and stamp.get("extra") in (extra, "dev") and PYTHON.exists())


def _read_stamp() -> dict[str, Any] | None:
    try:
        stamp = json.loads(STAMP.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(stamp: dict[str, Any]) -> None:
    # By way of another name, so that there is never half a stamp to read.
    new = STAMP.with_suffix(".new")
    new.write_text(json.dumps(stamp), "utf-8")
    os.replace(new, STAMP)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep other runs from working on .venv meanwhile.  The lock goes with the process, however it ends."""
    if fcntl is None:
        yield
        return
    # This file is what is locked: it is always there, and needs no tidying away.
    with open(__file__, "rb") as lock:
        # Some network file systems have no locks; running one at a time is then the user's care.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create() -> None:
    # The interpreter below any environment this runs in: that one may be the .venv that was just deleted.
    python = getattr(sys, "_base_executable", None) or sys.executable
    if importlib.util.find_spec("venv") is None:
        _no_environment()
    # Debian packs ensurepip apart from Python, and venv without it leaves half an environment behind.
    if importlib.util.find_spec("ensurepip") and _runs([python, "-m", "venv", VENV]):
        return
    if not _runs([python, "-m", "venv", "--without-pip", VENV]):
        _no_environment()


def _bring_pip() -> None:
    """Put pip into an environment without it, with the pip of the Python below."""
    python = getattr(sys, "_base_executable", None) or sys.executable
    if not _runs([python, "-m", "pip", "--python", PYTHON, "install", "--no-input", "pip"]):
        _no_environment()


def _no_environment() -> NoReturn:
    major, minor = sys.version_info[:2]
    fail(
        f"Python {major}.{minor} at {sys.executable} cannot make an environment with pip; "
        f"install its venv module (on Debian and Ubuntu: apt install python{major}.{minor}-venv)"
    )


def _install(extra: str) -> None:
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    # From the root directory, so that its path cannot clash with the syntax of pip's arguments.
    run = subprocess.run(
        [*pip, "--editable", f".[{extra}]"],
        cwd=ROOT,
        env=_venv_environ(),
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # What pip has to say is of interest only when it failed.
    if run.returncode:
        sys.stderr.write(run.stdout)
        fail(f"could not install what {extra!r} in pyproject.toml lists; see pip's messages above")


def _runs(command: list[Any]) -> bool:
    """Tell whether the command succeeds.  It says nothing."""
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=_venv_environ(),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return run.returncode == 0


# --- running things -----------------------------------------------------------------------------------------


def _venv_environ() -> dict[str, str]:
    """The environment variables as activating .venv would set them."""
    environ = dict(os.environ, VIRTUAL_ENV=str(VENV))
    environ["PATH"] = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    # It would give .venv the standard library of another Python.
    environ.pop("PYTHONHOME", None)
    return environ


def _source_environ() -> dict[str, str]:
    """The environment variables with src on the module path."""
    paths = [str(Path(ROOT, "src")), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))


def _become(command: list[str], environ: dict[str, str]) -> int:
    """Run the command in this process's place, so that signals and the exit status are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(command[0], command, environ)
    return subprocess.run(command, env=environ, check=False).returncode


def demo(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "rdmacm", *(arguments or ["demo"])]
    return _become(command, _source_environ())


#: Files of bench that are run by their names; the others are parts of these.
BENCHMARKS = ("resolve", "peers", "connections", "datapath", "sa", "guest")


def bench(arguments: list[str]) -> int:
    name = BENCHMARKS[0]
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    if name not in BENCHMARKS:
        fail(f"there is no benchmark {name!r}; there are " + ", ".join(BENCHMARKS))
    return _become([sys.executable, str(Path(ROOT, "bench", name + ".py")), *arguments], _source_environ())


def _several(most: int) -> list[str]:
    """pytest's arguments for up to so many tests at a time, two for a processor, as many tests wait most of their time.

    With more than that, tests that measure time would measure each other.
    """
    number = min(most, 2 * (os.cpu_count() or 1))
    # In the order in which tests/conftest.py puts the files, and not by how many tests they hold.
    return ["-n", str(number), "--dist", "loadfile", "--no-loadscope-reorder"]


def test(arguments: list[str]) -> int:
    environment("test")
    environ = _venv_environ()
    # A test that hangs fails in the end.  Not in pyproject.toml, since pytest would refuse the setting there
    # when the plugin is missing; "--timeout" and the marker "timeout" have precedence.
    environ.setdefault("PYTEST_TIMEOUT", "120")
    if not arguments:
        arguments = _several(4)
        if not environ.get("CI"):
            arguments += ["-m", "not slow"]
    os.chdir(ROOT)
    return _become([str(PYTHON), "-m", "pytest", *arguments], environ)


def interop(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py interop", add_help=False, allow_abbrev=False)
    parser.add_argument("--machine", choices=("uml", "qemu", "both"))
    parser.add_argument("--readme", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if options.readme:
        if options.machine not in (None, "both") or rest:
            fail("the table needs all tests, in both machines")
        options.machine = "both"
        os.environ["RDMACM_INTEROP_TABLE"] = str(Path(ROOT, "README.md"))
    if options.machine:
        os.environ["RDMACM_GUEST_MACHINE"] = options.machine
    return test(["tests/interop", *(rest or _several(2))])


def mutants(arguments: list[str]) -> int:
    environment("test")
    return _become([str(PYTHON), str(Path(ROOT, "tests", "mutants.py")), *arguments], _venv_environ())


def check(arguments: list[str]) -> int:
    if arguments:
        fail("check takes no arguments")
    environment("dev")
    failed = []
    for name, command in {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
        "import-linter": ["lint-imports"],
    }.items():
        print(f"--- {name}", flush=True)
        command[0] = str(BIN / command[0])
        if subprocess.run(command, cwd=ROOT, env=_venv_environ(), check=False, stdin=subprocess.DEVNULL).returncode:
            failed.append(name)
    print("--- failed: " + ", ".join(failed) if failed else "--- all passed", flush=True)
    return 1 if failed else 0


COMMANDS = {"demo": demo, "test": test, "interop": interop, "check": check, "mutants": mutants, "bench": bench}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    asked = arguments[:1] in (["help"], ["-h"], ["--help"])
    print(__doc__.strip(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
