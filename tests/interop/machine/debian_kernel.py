"""Debian's own kernel, for QEMU: an uncompressed kernel and an initramfs that holds the root directory and the modules.

Every file is in memory, so that none is slow or impossible to read while tests run.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tempfile
from pathlib import Path

from interop.machine import cpio
from interop.machine.cache import Unavailable, cached, download, file_names, run
from interop.machine.root import Root

__all__ = ["DebianKernel", "debian_kernel"]

#: Its dependency names the kernel of the release.
PACKAGE = "linux-image-amd64"
#: The folders of the modules that a machine may need. Of the others, it gets those that these depend on.
MODULES = (
    "arch/x86/crypto/", "crypto/", "drivers/char/", "drivers/infiniband/core/", "drivers/infiniband/sw/",
    "drivers/net/dummy.", "drivers/net/veth.", "drivers/virtio/", "fs/9p/", "lib/", "net/9p/", "net/packet/",
    "net/sched/",
)  # fmt: skip
#: Increment when the code below makes the files in another way.
FORMAT = 1


class DebianKernel:
    """What QEMU loads: a folder with ``vmlinux`` and ``initramfs``."""

    def __init__(self, folder: Path) -> None:
        self.vmlinux = folder / "vmlinux"
        self.initramfs = folder / "initramfs"


def debian_kernel(root: Root, *, update: bool = False) -> DebianKernel:
    """The kernel from the cache, made when it is missing or, by ``update``, of today's package.

    Raises:
        Unavailable: apt-get cannot reach its archive, or it is not Debian's.
    """
    recipe = hashlib.sha256(json.dumps([root.path.name, PACKAGE, MODULES, FORMAT]).encode()).hexdigest()[:12]
    return DebianKernel(cached("debian-kernel", recipe, lambda new: _make(new, root), update=update))


def _make(folder: Path, root: Root) -> None:
    (package,) = download([_package_file()])
    new = DebianKernel(folder)
    with tempfile.TemporaryDirectory(dir=folder) as unpacked:
        run(["dpkg-deb", "--vextract", str(package), unpacked])
        _extract_kernel(next(Path(unpacked, "boot").glob("vmlinuz-*")), new.vmlinux, root)
        _keep_needed_modules(Path(unpacked), root)
        with new.initramfs.open("wb") as stream:
            cpio.write(stream, root.path)
            cpio.write(stream, Path(unpacked, "lib"), Path("usr/lib"))


def _package_file() -> str:
    depends = run(["apt-cache", "depends", "--no-recommends", "--no-suggests", PACKAGE])
    name = re.search(r"Depends: (linux-image-\S+)", depends)
    if name is None:
        raise Unavailable(f"apt-cache does not know {PACKAGE}: this is not Debian, or apt-get update was not run")
    return file_names(run(["apt-get", "download", "-qq", "--print-uris", name[1]]))[0]


def _extract_kernel(vmlinuz: Path, vmlinux: Path, root: Root) -> None:
    """Take the kernel out of the self-extracting file: on an emulated processor it starts sooner uncompressed.

    Offsets are of the setup header (Linux, Documentation/arch/x86/boot.rst).
    """
    data = vmlinuz.read_bytes()
    setup_sectors, (offset, length) = data[0x1F1] or 4, struct.unpack_from("<II", data, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = vmlinux.with_suffix(".payload")
    payload.write_bytes(data[start : start + length - 4])  # the last four bytes are the uncompressed length
    root.python("-c", _DECOMPRESS, str(payload), str(vmlinux))
    payload.unlink()


_DECOMPRESS = """
import sys, gzip, lzma
data = open(sys.argv[1], "rb").read()
plain = gzip.decompress(data) if data[:2] == b"\\x1f\\x8b" else lzma.decompress(data)
assert plain[:4] == b"\\x7fELF", "not a kernel"
open(sys.argv[2], "wb").write(plain)
"""


def _keep_needed_modules(unpacked: Path, root: Root) -> None:
    modules = next((unpacked / "lib/modules").iterdir())
    depmod = ("kmod", "depmod", "-b", str(unpacked), modules.name)
    root.execute(*depmod)
    depends: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        depends[path] = others.split()
    kept = {path for path in depends if path.removeprefix("kernel/").startswith(MODULES)}
    kept.update(*(depends[path] for path in kept))
    for path in depends.keys() - kept:
        (modules / path).unlink()
    root.execute(*depmod)
