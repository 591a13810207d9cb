"""Linux for user mode (UML): Debian's kernel source, built once as ``user_mode.config`` says. Nothing is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from interop.machine.cache import Unavailable, cached, download, file_names, run

__all__ = ["UserModeKernel", "user_mode_kernel"]

PACKAGE = "linux-source-6.12"
CONFIG = Path(__file__).with_name("user_mode.config")
#: The Debian package of each file and program that the build needs.
NEEDED = {
    "bc": "bc",
    "bison": "bison",
    "flex": "flex",
    "gcc": "gcc",
    "make": "make",
    "xz": "xz-utils",
    "/usr/include/stdio.h": "libc6-dev",
}
#: Changes to the source, as (file, old, new). The registers of a processor with AMX take 11 KiB, for which 6.12 has no
#: room: it stops with "ptrace set fp regs failed, errno = 14".
CHANGES = (("arch/x86/um/user-offsets.c", "DEFINE_LONGS(HOST_FP_SIZE, 2696)", "DEFINE_LONGS(HOST_FP_SIZE, 11264)"),)
#: Increment when the code below builds in another way.
FORMAT = 1


class UserModeKernel:
    """A folder with the program ``linux``."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "linux"


def user_mode_kernel(*, update: bool = False) -> UserModeKernel:
    """The kernel from the cache, built when it is missing or, by ``update``, of today's source package.

    The build takes minutes on all processors.

    Raises:
        Unavailable: the build needs packages that are missing here, or failed.
    """
    recipe = hashlib.sha256("\n".join([PACKAGE, repr(CHANGES), str(FORMAT), CONFIG.read_text()]).encode())
    return UserModeKernel(cached("user-mode-kernel", recipe.hexdigest()[:12], _make, update=update))


def _make(folder: Path) -> None:
    missing = [package for name, package in NEEDED.items() if shutil.which(name) is None and not Path(name).exists()]
    if missing:
        raise Unavailable(f"to build Linux for user mode: apt-get install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="source-") as source:
        _unpack(Path(source))
        for name, old, new in CHANGES:
            file = Path(source, name)
            file.write_text(file.read_text().replace(old, new))
        make = ["make", "-s", "-C", source, "ARCH=um"]
        run([*make, "allnoconfig"], environment={"KCONFIG_ALLCONFIG": str(CONFIG)})
        run([*make, f"-j{os.cpu_count()}", "linux"])
        shutil.copy(Path(source, "linux"), UserModeKernel(folder).program)


def _unpack(source: Path) -> None:
    """Unpack the source: of the package where it is installed, else of the package file."""
    archive = Path("/usr/src", f"{PACKAGE}.tar.xz")
    if archive.exists():
        command = f"cat {archive}"
    else:
        if shutil.which("apt-get") is None:
            raise Unavailable(f"to build Linux for user mode: {PACKAGE} of Debian, and apt-get to fetch it")
        (package,) = download([_package_file()])
        command = f"dpkg-deb --fsys-tarfile '{package}' | tar xO .{archive}"
    run(["bash", "-o", "pipefail", "-c", f"{command} | tar xJ --strip-components=1"], cwd=source)


def _package_file() -> str:
    found = file_names(run(["apt-get", "download", "-qq", "--print-uris", PACKAGE]))
    if not found:
        raise Unavailable(f"apt-get knows no file of {PACKAGE}; run apt-get update")
    return found[0]
