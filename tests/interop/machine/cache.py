"""The cache of the user that holds the kernels and the root directory, and the commands that fill it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from support.own_network import outside

__all__ = ["Unavailable", "cached", "download", "file_names", "lock_file", "run"]

_URI = re.compile(r"^'[^']*' (\S+) \d+", re.MULTILINE)


class Unavailable(Exception):
    """No machine can be started here. The message says why, and which packages would help."""


def _folder() -> Path:
    """The cache: RDMACM_GUEST_CACHE, or ``rdmacm-guest`` in the cache directory of the user."""
    if chosen := os.environ.get("RDMACM_GUEST_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rdmacm-guest"


def cached(kind: str, recipe: str, make: Callable[[Path], None], *, update: bool = False) -> Path:
    """The folder ``kind-recipe`` of the cache.

    ``make`` fills an empty folder when the cache lacks this one, and also for ``update``. A second process that asks
    meanwhile waits for the first.
    """
    found = _folder() / f"{kind}-{recipe}"
    with lock_file(kind) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if update or not found.exists():
            with tempfile.TemporaryDirectory(dir=found.parent, prefix="new-") as folder:
                new = Path(folder) / found.name
                new.mkdir()
                make(new)
                shutil.rmtree(found, ignore_errors=True)
                new.rename(found)
    return found


def lock_file(name: str) -> IO[str]:
    """A file of the cache to be locked by flock(2)."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{name}.lock").open("w")


def run(command: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] = {}) -> str:
    """Run a command and return its output. Raises Unavailable with its error output if it fails."""
    with outside():
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)[:200]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def file_names(listing: str) -> list[str]:
    """The names of the package files in what ``apt-get --print-uris`` prints."""
    return _URI.findall(listing)


def download(files: Sequence[str]) -> list[Path]:
    """The package files with these names, from the cache or by ``apt-get download``."""
    folder = _folder() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        wanted = []
        for file in missing:
            name, version, _ = file.split("_")
            wanted.append(f"{name}={version.replace('%3a', ':')}")
        # As root, apt-get would switch to a user who may not write here.
        sandbox = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
        run(["apt-get", "download", "-qq", *sandbox, *wanted], cwd=folder)
        absent = [file for file in missing if not (folder / file).exists()]
        if absent:
            raise Unavailable(f"apt-get did not download {', '.join(absent)}")
    return [folder / file for file in files]
