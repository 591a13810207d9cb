"""Debian's packages, fetched by apt-get and unpacked: the kernel and everything that runs in the machine.

Nothing is installed.  What is unpacked goes into a folder of the user's cache and stays there: ``root`` (the machine's
root directory, the kernel's modules in it), ``vmlinux`` and ``initramfs``, which holds the same: the kernel unpacks it
into its memory, so that no file is slow to come, or does not come at all, while tests run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from interop.machine import cpio

__all__ = ["Image", "Unavailable", "image"]

#: What the machine holds, with all that these depend on.
PACKAGES = (
    "base-files", "bash", "coreutils", "ethtool", "grep", "hostname", "ibverbs-providers", "iproute2",
    "iputils-ping", "kmod", "mount", "netbase", "perftest", "procps", "python3", "python3-pyverbs", "rdma-core",
    "rdmacm-utils", "sed", "tcpdump", "util-linux",
)  # fmt: skip
#: Its dependency names the release's kernel.
KERNEL = "linux-image-amd64"
#: Where the modules are that may be needed, with those they depend on; the others go.
MODULES = (
    "arch/x86/crypto/", "crypto/", "drivers/char/", "drivers/infiniband/core/", "drivers/infiniband/sw/",
    "drivers/net/dummy.", "drivers/net/veth.", "drivers/virtio/", "fs/9p/", "lib/", "net/9p/", "net/packet/",
    "net/sched/",
)  # fmt: skip
#: What no program in the machine looks at.
IDLE = (
    "usr/share/bash-completion", "usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man",
    "usr/share/perl", "usr/lib/udev", "usr/lib/x86_64-linux-gnu/gconv",
)  # fmt: skip
#: Raised when the way of unpacking changes, so that no older folder is taken for today's.
FORMAT = 2

_URI = re.compile(r"^'[^']*' (\S+) \d+", re.MULTILINE)


class Unavailable(Exception):
    """Why no machine can be had here, and what would help."""


class Image:
    """What QEMU starts: a folder with ``root``, ``vmlinux`` and ``initramfs``."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.vmlinux = folder / "vmlinux"
        self.initramfs = folder / "initramfs"
        self.complete = folder / "complete"

    @property
    def modules(self) -> Path:
        """The folder of the kernel's modules."""
        return next((self.root / "usr/lib/modules").iterdir())

    @property
    def loader(self) -> Path:
        return next((self.root / "usr/lib/x86_64-linux-gnu").glob("ld-linux-x86-64.so.*"))

    def execute(self, program: str, name: str, *arguments: str, environment: Mapping[str, str] = {}) -> str:
        """What a program of the machine prints when it is run out here, with the machine's libraries."""
        loader = [str(self.loader), "--library-path", str(self.loader.parent), "--argv0", name]
        return _run([*loader, str(self.root / "usr/bin" / program), *arguments], environment=environment)

    def python(self, *arguments: str) -> str:
        """What the machine's own Python prints when it is run out here."""
        return self.execute("python3", "python3", "-S", *arguments, environment={"PYTHONHOME": str(self.root / "usr")})


def image(*, update: bool = False) -> Image:
    """The image in the cache, made when it is missing or, by ``update``, when packages have become newer.

    Raises:
        Unavailable: no apt-get, or it cannot reach its archive.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar"):
        if shutil.which(tool) is None:
            raise Unavailable(f"the machine is made of Debian's packages, and there is no {tool} here")
    recipe = hashlib.sha256("\n".join([*PACKAGES, KERNEL, *MODULES, *IDLE, str(FORMAT)]).encode()).hexdigest()[:12]
    base = Path(os.environ.get("RDMACM_GUEST_CACHE") or _user_cache() / "rdmacm-guest")
    found = Image(base / recipe)
    base.mkdir(parents=True, exist_ok=True)
    with (base / "lock").open("w") as lock:
        # Whoever comes second waits for the first and then has it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if update or not found.complete.exists():
            with tempfile.TemporaryDirectory(dir=base, prefix="new-") as folder:
                _make(Image(Path(folder) / recipe), base / "packages")
                shutil.rmtree(base / recipe, ignore_errors=True)
                (Path(folder) / recipe).rename(base / recipe)
    return found


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _make(new: Image, packages: Path) -> None:
    names = _closure()
    kernel = _kernel_package()
    packages.mkdir(exist_ok=True)
    missing = [name for name in [*names, kernel] if not (packages / name).exists()]
    if missing:
        _download(missing, packages)
    _unpack([packages / name for name in names], new.root)
    with tempfile.TemporaryDirectory(dir=packages) as folder:
        _run(["dpkg-deb", "--vextract", str(packages / kernel), folder])
        modules = next((Path(folder) / "lib/modules").iterdir())
        shutil.move(modules, new.root / "usr/lib/modules" / modules.name)
        _extract_kernel(new, next((Path(folder) / "boot").glob("vmlinuz-*")))
    _furnish(new)
    # Emulated, Python needs minutes to compile its library.
    new.python("-m", "compileall", "-q", "-s", str(new.root), *map(str, (new.root / "usr/lib").glob("python3.*")))
    _trim(new)
    with new.initramfs.open("wb") as stream:
        cpio.write(stream, new.root)
    new.complete.touch()


def _run(command: list[str], cwd: Path | None = None, environment: Mapping[str, str] = {}) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "LC_ALL": "C", **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)[:200]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


# --- fetching -----------------------------------------------------------------------------------------------------


def _closure() -> list[str]:
    """The file names of the packages and of all they depend on, as if nothing were installed."""
    with tempfile.TemporaryDirectory() as folder:
        status, archives = Path(folder) / "status", Path(folder) / "archives"
        status.touch()
        (archives / "partial").mkdir(parents=True)
        alone = [f"-oDir::State::status={status}", f"-oDir::Cache::archives={archives}", "-oDebug::NoLocking=1"]
        listing = _run(
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "--print-uris", *alone, *PACKAGES]
        )
    names = _URI.findall(listing)
    if not names:
        raise Unavailable("apt-get names no file for these packages; are its lists there (apt-get update)?")
    return names


def _kernel_package() -> str:
    depends = _run(["apt-cache", "depends", "--no-recommends", "--no-suggests", KERNEL])
    name = re.search(r"Depends: (linux-image-\S+)", depends)
    if name is None:
        raise Unavailable(f"apt-cache knows no {KERNEL}; is this Debian, and are its lists there (apt-get update)?")
    found = _URI.findall(_run(["apt-get", "download", "-qq", "--print-uris", name[1]]))
    return str(found[0])


def _download(files: list[str], to: Path) -> None:
    wanted = []
    for file in files:
        name, version, _ = file.split("_")
        wanted.append(f"{name}={version.replace('%3a', ':')}")
    # As root, apt-get would hand over to a user who may not write here.
    user = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    _run(["apt-get", "download", "-qq", *user, *wanted], cwd=to)
    absent = [file for file in files if not (to / file).exists()]
    if absent:
        raise Unavailable(f"apt-get did not bring {', '.join(absent)}")


# --- unpacking ----------------------------------------------------------------------------------------------------


def _unpack(packages: list[Path], root: Path) -> None:
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).symlink_to(f"usr/{folder}")
    (root / "usr/lib/modules").mkdir()
    for package in packages:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as data:
            # The packages still say /bin and /lib; the links stay what they are.
            done = subprocess.run(
                ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", str(root)],
                stdin=data.stdout,
                capture_output=True,
                check=False,
            )
        if done.returncode != 0 or data.returncode != 0:
            raise Unavailable(f"{package.name} cannot be unpacked: {done.stderr.decode(errors='replace')[-300:]}")


def _furnish(new: Image) -> None:
    """What the packages' own scripts would have made."""
    root = new.root
    loader = new.loader.name
    if not (root / "usr/lib64" / loader).exists():
        (root / "usr/lib64" / loader).symlink_to(f"../lib/x86_64-linux-gnu/{loader}")
    for name, text in _FILES.items():
        (root / name).write_text(text)
    if not (root / "usr/bin/sh").exists():
        (root / "usr/bin/sh").symlink_to("bash")
    for folder in ("project", "mnt/share", "proc", "sys", "dev", "run", "tmp", "root"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "interop").symlink_to("project/tests/interop")


_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
    "10.0.0.1 rxe\n10.0.0.2 soft\nfd00:0:0:1::1 rxe rxe6\nfd00:0:0:1::2 soft soft6\n",
    "etc/hostname": "guest\n",
}


def _extract_kernel(new: Image, vmlinuz: Path) -> None:
    """Out of the self-extracting file: an uncompressed kernel starts quicker where the processor is emulated.

    Offsets are of the setup header (Linux, Documentation/arch/x86/boot.rst).
    """
    data = vmlinuz.read_bytes()
    setup_sectors, (offset, length) = data[0x1F1] or 4, struct.unpack_from("<II", data, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = new.vmlinux.with_suffix(".payload")
    payload.write_bytes(data[start : start + length - 4])  # the last four are the length of what is inside
    new.python("-c", _DECOMPRESS, str(payload), str(new.vmlinux))
    payload.unlink()


_DECOMPRESS = """
import sys, gzip, lzma
data = open(sys.argv[1], "rb").read()
plain = gzip.decompress(data) if data[:2] == b"\\x1f\\x8b" else lzma.decompress(data)
assert plain[:4] == b"\\x7fELF", "not a kernel"
open(sys.argv[2], "wb").write(plain)
"""


def _trim(new: Image) -> None:
    """Leave out what only takes memory."""
    for name in IDLE:
        shutil.rmtree(new.root / name, ignore_errors=True)
    depmod = ("kmod", "depmod", "-b", str(new.root), new.modules.name)
    new.execute(*depmod)
    depends: dict[str, list[str]] = {}
    for line in (new.modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        depends[path] = others.split()
    kept = {path for path in depends if path.removeprefix("kernel/").startswith(MODULES)}
    kept.update(*(depends[path] for path in kept))
    for path in depends.keys() - kept:
        (new.modules / path).unlink()
    new.execute(*depmod)
