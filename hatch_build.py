"""Builds the compiled core (docs/core.md) and the library for C programs (docs/run.md) into a wheel.

A wheel also gets what docs/make_man.py writes for share/: manual pages, and completions for shells.

Both need a C compiler and nothing else; the core also needs Python.h.

RDMACM_BUILD_CORE decides: ``auto`` (the default) makes a wheel without them where they cannot be built, and says so;
``require`` fails there; ``refuse`` makes a wheel without them, which suits every machine.

As a script (``python3 dev.py core``), it builds both into the sources; with ``--output`` one of them elsewhere:
``hatch_build.py [--library] [--output FILE] [ARGUMENTS OF THE COMPILER]``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc,unused-ignore]

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "core"
#: Its folders whose headers the others include.
LAYERS = ("engine", "wire")
PACKAGE = ROOT / "src" / "rdmacm"
#: Where the core is in the package, and the library for C programs: by its suffix it is no module of Python.
TARGET = PACKAGE / "proto" / "_core.abi3.so"
LIBRARY = PACKAGE / "run" / "librdmacm_run.so.1"
#: What moves the sockets of a program onto RDMA, beside the library.
SOCKETS = "librdmacm_sockets.so.1"
#: The first Python whose limited API has buffers, and the first that the package supports.
LIMITED_API = "0x030b0000"
WARNINGS = ("-Wall", "-Wextra", "-Wconversion")


class NotBuiltError(Exception):
    """The core cannot be built here; the text says why."""


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def missing(*, is_library: bool = False) -> str | None:
    """Why the core, or the library, cannot be built on this machine; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"the core is for Linux, not for {sys.platform}"
    if shutil.which(_compiler()[0]) is None:
        return f"no C compiler: there is no {_compiler()[0]}"
    include = sysconfig.get_path("include")
    if not is_library and not Path(include, "Python.h").exists():
        return f"Python.h is not in {include}; distributions have it in a package like python3-dev"
    return None


def command(target: Path, *more: str, is_library: bool = False) -> list[str]:
    """The compiler's command; ``more`` are further arguments, such as ``-Werror``."""
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    own = "library" if is_library else "python"
    if is_library:
        exports = SOURCES / own / "exports.map"
        # Its threads run on after dlclose(3), so their code has to stay.
        special = ["-Wl,-z,defs,-z,nodelete", "-Wl,-soname,libibverbs.so.1", f"-Wl,--version-script,{exports}"]
    else:
        special = [f"-DPy_LIMITED_API={LIMITED_API}", "-isystem", sysconfig.get_path("include")]
    return [
        *(*_compiler(), "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", *WARNINGS),
        *(*(f"-I{SOURCES / name}" for name in LAYERS), *special, *flags, *more, "-shared", "-o", str(target)),
        *(str(path) for name in (*LAYERS, own) for path in sorted((SOURCES / name).glob("*.c"))),
    ]


def sockets_command(target: Path, *more: str) -> list[str]:
    """The compiler's command for what moves the sockets of a program onto RDMA."""
    return [
        *(*_compiler(), "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", *WARNINGS),
        *("-Wl,-z,defs", f"-Wl,-soname,{SOCKETS}", *shlex.split(os.environ.get("CFLAGS", "")), *more),
        *("-shared", "-o", str(target), str(SOURCES / "sockets" / "sockets.c")),
    ]


def build(target: Path = TARGET, *more: str, is_library: bool = False) -> None:
    """Build the core, or the library and what goes beside it.

    NotBuiltError where something is missing, or where the compiler fails.
    """
    reason = missing(is_library=is_library)
    if reason is not None:
        raise NotBuiltError(reason)
    if is_library:
        beside = target.with_name(SOCKETS)
        _compile(sockets_command(beside, *more), beside)
    _compile(command(target, *more, is_library=is_library), target)


def _compile(parts: list[str], target: Path) -> None:
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    parts[parts.index(str(target))] = str(beside)
    done = subprocess.run(parts, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuiltError(f"{shlex.join(parts)} failed:\n{done.stderr}")
    os.replace(beside, target)  # a process that has the old one loaded keeps it
    sys.stderr.write(done.stderr)


def make_share(directory: str) -> None:
    """Write the manual pages and the completions of shells, as docs/make_man.py does.

    In a process of its own: this one must not import the package, whose core is about to be built.
    """
    environment = {**os.environ, "RDMACM_CORE": "python"}  # the sources have none yet
    subprocess.run([sys.executable, str(ROOT / "docs" / "make_man.py"), directory], env=environment, check=True)


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
    """The hook of hatchling that pyproject.toml names."""

    #: Where the core was built, and what share/ has.
    _directory: tempfile.TemporaryDirectory[str] | None = None
    _share: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core before the files of the wheel are collected."""
        wanted = os.environ.get("RDMACM_BUILD_CORE", "auto")
        if wanted not in ("auto", "require", "refuse"):
            raise ValueError(f"RDMACM_BUILD_CORE is {wanted!r}, not auto, require or refuse")
        if self.target_name != "wheel" or version == "editable":
            return
        self._share = tempfile.TemporaryDirectory(prefix="rdmacm-share-")
        make_share(self._share.name)
        build_data["shared_data"][self._share.name] = "share"
        if wanted == "refuse":
            return
        self._directory = tempfile.TemporaryDirectory(prefix="rdmacm-core-")
        target, library = (Path(self._directory.name) / each.name for each in (TARGET, LIBRARY))
        try:
            build(target)
            build(library, is_library=True)
        except NotBuiltError as error:
            self._directory.cleanup()
            if wanted == "require":
                self.finalize("", {}, "")
                raise
            self.app.display_warning(f"without the compiled core: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["force_include"][str(target)] = f"rdmacm/proto/{TARGET.name}"
        for each in (library, library.with_name(SOCKETS)):
            build_data["force_include"][str(each)] = f"rdmacm/run/{each.name}"

    def finalize(self, _version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove what was built, which is in the wheel now."""
        for directory in (self._directory, self._share):
            if directory is not None:
                directory.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--library", action="store_true")
    options, rest = parser.parse_known_args()
    try:
        if options.output is None:
            build(TARGET, *rest)
            build(LIBRARY, *rest, is_library=True)
        else:
            build(options.output, *rest, is_library=options.library)
    except NotBuiltError as not_built:
        sys.exit(f"{not_built}")
