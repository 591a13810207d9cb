"""The machine that is Linux in user mode: an ordinary process of the host, on one processor, with 6.12."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from interop.machine.cache import Unavailable, lock_file
from interop.machine.root import root
from interop.machine.run import Machine, copy_project
from interop.machine.user_mode_kernel import user_mode_kernel

__all__ = ["UserMode"]

#: Programs of util-linux.
TOOLS = ("taskset", "prlimit", "setpriv")
#: The machine's memory in bytes. It is in a file, which grows as the machine uses it.
MEMORY = 1 << 30


class UserMode(Machine):
    """A machine in user mode. Its root directory is in the host's cache, below a layer in memory.

    It stays on one processor: across two, each of its system calls takes seven times as long.
    """

    description = "in user mode"

    @classmethod
    def prepare(cls, *, update: bool = False) -> None:
        for tool in TOOLS:
            if shutil.which(tool) is None:
                raise Unavailable(f"no {tool} here; on Debian: apt-get install util-linux")
        with ThreadPoolExecutor() as threads:
            made = [threads.submit(make, update=update) for make in (user_mode_kernel, root)]
            for each in made:
                each.result()

    def make_files(self) -> None:
        copy_project(self.folder / "project")
        self._kernel, self._root = user_mode_kernel(), root()
        self._processor, self._claim = _claim_processor()

    def command(self, orders: int, console: Path, *, terminal: bool) -> list[str]:
        _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        return [
            # The kernel ends the machine when this process ends.
            *("setpriv", "--pdeathsig", "KILL"),
            # hostfs keeps an open descriptor for each file in the machine's page cache.
            *("prlimit", f"--nofile={descriptors}"),
            *("taskset", "--cpu-list", str(self._processor)),
            *("env", f"TMPDIR={_memory_folder()}"),
            *(str(self._kernel.program), f"mem={MEMORY}", "quiet", "loglevel=4", "panic=-1"),
            *("rootfstype=hostfs", f"rootflags={self._root.path}", "ro", "init=/usr/sbin/init-user-mode"),
            *("con=null", "con0=fd:0,fd:1" if terminal else "con0=null,fd:2", f"con1=fd:{orders}"),
            *(f"PROJECT={self.folder / 'project'}", f"SHARE={self.share}"),
        ]

    def close(self) -> None:
        super().close()
        self._claim.close()


def _claim_processor() -> tuple[int, IO[str]]:
    """A processor of the host that no other machine stays on, if there is one; closing the file gives it back."""
    processors = sorted(os.sched_getaffinity(0))
    random.shuffle(processors)
    for number in processors:
        file = lock_file(f"processor-{number}")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            return number, file
    return processors[0], lock_file("processors")


def _memory_folder() -> str:
    """Where the file is that holds the memory: in the host's memory, if there is room and code may be run from it."""
    found = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    if found and not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= MEMORY:
        return "/dev/shm"
    return tempfile.gettempdir()
