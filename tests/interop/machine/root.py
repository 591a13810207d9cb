"""The root directory of every machine: Debian's packages, fetched by apt-get and unpacked. Nothing is installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from interop.machine.cache import Unavailable, cached, download, file_names, run

__all__ = ["Root", "root"]

#: The packages of the machine, without their dependencies.
PACKAGES = (
    "base-files", "bash", "coreutils", "ethtool", "grep", "hostname", "ibverbs-providers", "ibverbs-utils", "iproute2",
    "iputils-ping", "kmod", "mount", "netbase", "perftest", "procps", "python3", "python3-pyverbs", "rdma-core",
    "rdmacm-utils", "sed", "tcpdump", "util-linux",
)  # fmt: skip
#: Files that no program in the machine reads.
UNUSED = (
    "usr/share/bash-completion", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man",
    "usr/share/perl", "usr/lib/udev", "usr/lib/x86_64-linux-gnu/gconv",
)  # fmt: skip
#: Files that the maintainer scripts of the packages would have made, and the first program of user mode.
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
    "10.0.0.1 rxe\n10.0.0.2 soft\nfd00:0:0:1::1 rxe rxe6\nfd00:0:0:1::2 soft soft6\n",
    "etc/hostname": "guest\n",
    # These files are the host's: what the machine writes goes to a layer in memory above them.
    "usr/sbin/init-user-mode": """#!/bin/bash
export PATH=/usr/sbin:/usr/bin
mount -t tmpfs layer /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work layer /mnt/root
mount -t hostfs -o "$PROJECT" project /mnt/root/project
mount -t hostfs -o "$SHARE" share /mnt/root/mnt/share
exec chroot /mnt/root /interop/machine/agent /dev/tty1 /dev/tty0
""",
}
#: Empty directories, to mount on.
FOLDERS = ("project", "mnt/share", "proc", "sys", "dev", "run", "tmp", "root")
#: Increment when the code below unpacks in another way, so that no folder made by older code is used.
FORMAT = 3


class Root:
    """The unpacked root directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def loader(self) -> Path:
        """The dynamic linker, by which the host can run the programs in here."""
        return next((self.path / "usr/lib/x86_64-linux-gnu").glob("ld-linux-x86-64.so.*"))

    def execute(self, program: str, name: str, *arguments: str, environment: Mapping[str, str] = {}) -> str:
        """What a program of this directory prints when the host runs it, with the libraries of this directory."""
        loader = [str(self.loader), "--library-path", str(self.loader.parent), "--argv0", name]
        return run([*loader, str(self.path / "usr/bin" / program), *arguments], environment=environment)

    def python(self, *arguments: str) -> str:
        """What this directory's Python prints when the host runs it."""
        return self.execute("python3", "python3", "-S", *arguments, environment={"PYTHONHOME": str(self.path / "usr")})


def root(*, update: bool = False) -> Root:
    """The root directory from the cache, made when it is missing or, by ``update``, of today's packages.

    Raises:
        Unavailable: without apt-get, or when apt-get cannot reach its archive.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar"):
        if shutil.which(tool) is None:
            raise Unavailable(f"the machine is made of Debian's packages, and {tool} is missing here")
    recipe = json.dumps([PACKAGES, UNUSED, FILES, FOLDERS, FORMAT])
    return Root(cached("root", hashlib.sha256(recipe.encode()).hexdigest()[:12], _make, update=update))


def _make(path: Path) -> None:
    packages = download(_with_dependencies())
    for folder in ("bin", "sbin", "lib", "lib64"):
        (path / "usr" / folder).mkdir(parents=True, exist_ok=True)
        (path / folder).symlink_to(f"usr/{folder}")
    for package in packages:
        _unpack(package, path)
    new = Root(path)
    _complete(new)
    # Every machine starts with the layer in memory empty: compiled here, Python's library is compiled once.
    new.python("-m", "compileall", "-q", "-s", str(path), *map(str, (path / "usr/lib").glob("python3.*")))
    for name in UNUSED:
        shutil.rmtree(path / name, ignore_errors=True)


def _with_dependencies() -> list[str]:
    """The file names of the packages and of all their dependencies, as if nothing were installed."""
    with tempfile.TemporaryDirectory() as folder:
        status, archives = Path(folder) / "status", Path(folder) / "archives"
        status.touch()
        (archives / "partial").mkdir(parents=True)
        alone = [f"-oDir::State::status={status}", f"-oDir::Cache::archives={archives}", "-oDebug::NoLocking=1"]
        listing = run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "--print-uris", *alone, *PACKAGES])
    names = file_names(listing)
    if not names:
        raise Unavailable("apt-get knows no file for these packages; run apt-get update")
    return names


def _unpack(package: Path, path: Path) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as data:
        # Some packages still name /bin and /lib, which are links here and stay links.
        done = subprocess.run(
            ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", str(path)],
            stdin=data.stdout,
            capture_output=True,
            check=False,
        )
    if done.returncode != 0 or data.returncode != 0:
        raise Unavailable(f"{package.name} cannot be unpacked: {done.stderr.decode(errors='replace')[-300:]}")


def _complete(new: Root) -> None:
    path, loader = new.path, new.loader.name
    if not (path / "usr/lib64" / loader).exists():
        (path / "usr/lib64" / loader).symlink_to(f"../lib/x86_64-linux-gnu/{loader}")
    for name, text in FILES.items():
        (path / name).write_text(text)
        if text.startswith("#!"):
            os.chmod(path / name, 0o755)
    if not (path / "usr/bin/sh").exists():
        (path / "usr/bin/sh").symlink_to("bash")
    for folder in FOLDERS:
        (path / folder).mkdir(parents=True, exist_ok=True)
    (path / "interop").symlink_to("project/tests/interop")
