"""Debian's packages, fetched by apt-get and unpacked: the kernel and everything that runs in the machine.

Nothing is installed.  What is unpacked goes into a folder of the user's cache and stays there:
``root`` (the machine's root directory, the kernel's modules in it), ``vmlinux`` and ``initramfs``.
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
from collections.abc import Iterator
from pathlib import Path

from interop.machine import cpio

__all__ = ["Image", "Unavailable", "image"]

#: What the machine holds, with all that these depend on.
PACKAGES = (
    "base-files", "bash", "busybox-static", "coreutils", "ethtool", "grep", "hostname", "ibverbs-providers", "iproute2",
    "iputils-ping", "kmod", "mount", "netbase", "perftest", "procps", "python3", "python3-pyverbs", "rdma-core",
    "rdmacm-utils", "sed", "tcpdump", "util-linux",
)  # fmt: skip
#: Its dependency names the release's kernel.
KERNEL = "linux-image-amd64"
#: What the kernel needs to reach the root; the rest it loads from there.
FIRST_MODULES = ("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay")
#: Raised when the way of unpacking changes, so that no older folder is taken for today's.
FORMAT = 1

_HERE = Path(__file__).parent
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
    def kernel(self) -> str:
        """The kernel's release, such as ``6.1.0-50-amd64``."""
        return next((self.root / "usr/lib/modules").iterdir()).name

    def python(self, *arguments: str) -> str:
        """What the machine's own Python prints when it is run out here."""
        library = self.root / "usr/lib/x86_64-linux-gnu"
        loader = [str(library / "ld-linux-x86-64.so.2"), "--library-path", str(library)]
        return _run([*loader, str(self.root / "usr/bin/python3"), "-S", *arguments], PYTHONHOME=str(self.root / "usr"))


def image(*, update: bool = False) -> Image:
    """The image in the cache, made when it is missing or, by ``update``, when packages have become newer.

    Raises:
        Unavailable: no apt-get, or it cannot reach its archive.
    """
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar"):
        if shutil.which(tool) is None:
            raise Unavailable(f"the machine is made of Debian's packages, and there is no {tool} here")
    recipe = hashlib.sha256("\n".join([*PACKAGES, KERNEL, str(FORMAT), *_INITIAL]).encode()).hexdigest()[:12]
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
    _furnish(new.root)
    # Emulated, Python needs minutes to compile its library.
    new.python("-m", "compileall", "-q", "-s", str(new.root), str(new.root / "usr/lib/python3.11"))
    loader = new.root / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    depmod = [str(loader), "--library-path", str(loader.parent), "--argv0", "depmod", str(new.root / "usr/bin/kmod")]
    _run([*depmod, "-b", str(new.root), new.kernel])
    new.initramfs.write_bytes(_initramfs(new))
    new.complete.touch()


def _run(command: list[str], cwd: Path | None = None, **environment: str) -> str:
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


def _furnish(root: Path) -> None:
    """What the packages' own scripts would have made."""
    loader = next((root / "usr/lib/x86_64-linux-gnu").glob("ld-linux-x86-64.so.*"))
    if not (root / "usr/lib64" / loader.name).exists():
        (root / "usr/lib64" / loader.name).symlink_to(f"../lib/x86_64-linux-gnu/{loader.name}")
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


# --- the initial file system ----------------------------------------------------------------------------------------


_INITIAL = ((_HERE / "init").read_text(),)


def _initramfs(new: Image) -> bytes:
    files: dict[str, bytes] = {
        "init": _INITIAL[0].encode(),
        "bin/busybox": (new.root / "usr/bin/busybox").read_bytes(),
        "modules": "".join(f"/{Path(path).name}\n" for path in _load_order(new)).encode(),
    }
    for path in _load_order(new):
        files[Path(path).name] = (new.root / "usr/lib/modules" / new.kernel / path).read_bytes()
    folders = ("bin", "proc", "sys", "dev", "low", "rw", "new")
    return cpio.archive(folders, files)


def _load_order(new: Image) -> list[str]:
    """Paths of the first modules below the modules' folder, each after those it depends on."""
    depends: dict[str, list[str]] = {}
    for line in (new.root / "usr/lib/modules" / new.kernel / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        depends[path] = others.split()
    by_name = {Path(path).name.split(".")[0]: path for path in depends}
    order: dict[str, None] = {}

    def walk(path: str) -> Iterator[str]:
        for other in depends[path]:
            yield from walk(other)
        yield path

    for name in FIRST_MODULES:
        if name in by_name:  # else it is built in
            order.update(dict.fromkeys(walk(by_name[name])))
    return list(order)
