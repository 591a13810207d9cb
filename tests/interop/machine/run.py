"""Starting the machine and giving it orders."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from interop.machine.packages import Image, Unavailable

__all__ = ["Machine", "MachineError", "Result"]

PROJECT = Path(__file__).parents[3]
QEMU = "qemu-system-x86_64"
#: What of the project the machine sees at /project.
SHOWN = ("src", "tests/interop", "bench", "examples")
#: Seconds: to start up, and what an order may take to begin and to end.  Emulated machines take their time.
STARTING, SLACK = 180.0, 30.0


class MachineError(Exception):
    """The machine did not do its part; it ends with what its console said last."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a script ended: its status (124: it took too long) and its output, errors included."""

    status: int
    output: str


def accelerator() -> str:
    """``kvm`` or ``tcg``, which is emulation; RDMACM_GUEST_ACCEL decides, if set."""
    if chosen := os.environ.get("RDMACM_GUEST_ACCEL"):
        return chosen
    # Where the processor offers neither, a /dev/kvm that can be opened still crawls or fails.
    flags = Path("/proc/cpuinfo").read_text().split()
    return "kvm" if os.access("/dev/kvm", os.W_OK) and {"vmx", "svm"} & set(flags) else "tcg"


class Machine:
    """A running machine; a context manager that ends it.

    ``share`` is the folder that it sees as /mnt/share and may write to; ``terminal``: our own terminal becomes its
    console for :meth:`shell`.
    """

    def __init__(self, image: Image, share: Path, *, terminal: bool = False) -> None:
        qemu = shutil.which(QEMU)
        if qemu is None:
            raise Unavailable(f"no {QEMU} here (Debian: apt-get install qemu-system-x86)")
        self.accelerator = accelerator()
        self.share = share
        self._names = count(1)
        self._folder = tempfile.TemporaryDirectory(prefix="rdmacm-guest-")
        folder = Path(self._folder.name)
        self._console = folder / "console"
        project = folder / "project"
        for name in SHOWN:
            shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "artifacts"))
        # Emulated, Python takes seconds to compile what is here; "unchecked": it need not look at times either.
        image.python(
            "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", folder.as_posix(), str(project)
        )
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._qemu = subprocess.Popen(
                [qemu, *self._machine(), *self._kernel(image), *self._devices(image, project, theirs, terminal)],
                stdin=None if terminal else subprocess.DEVNULL,
                stdout=None if terminal else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )
        self._answers: Iterator[str] = iter(self._lines())
        self.kernel = self._answer("ready", STARTING)

    def _machine(self) -> list[str]:
        kvm = ["-accel", "kvm", "-cpu", "host"]
        tcg = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
        bare = ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"]
        size = ["-smp", "2", "-m", "2048"]
        return [*(kvm if self.accelerator == "kvm" else tcg), *bare, *size, "-serial", f"file:{self._console}"]

    def _kernel(self, image: Image) -> list[str]:
        words = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off audit=0 no_timer_check net.ifnames=0"
        return ["-kernel", str(image.vmlinux), "-initrd", str(image.initramfs), "-append", words]

    def _devices(self, image: Image, project: Path, orders: socket.socket, terminal: bool) -> list[str]:
        def folder(tag: str, path: Path, more: str) -> list[str]:
            return ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,{more}multidevs=remap"]

        devices = ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        devices += ["-chardev", f"socket,id=orders,fd={orders.fileno()}"]
        devices += ["-device", "virtserialport,chardev=orders,name=orders"]
        if terminal:
            devices += ["-chardev", "stdio,id=terminal,signal=off", "-device", "virtconsole,chardev=terminal"]
        return [
            *devices,
            *folder("root", image.root, "readonly=on,"),
            *folder("project", project, "readonly=on,"),
            *folder("share", self.share, ""),
        ]

    def run(self, script: str, timeout: float = 60.0, echo: TextIO | None = None) -> Result:
        """Run bash's ``script`` with the words of ``net.sh``; its output also goes to ``echo`` while it runs.

        ``timeout`` is in seconds; then, and when it ends, all it started is killed.
        """
        name = f"order-{next(self._names)}"
        (self.share / f"{name}.sh").write_text(script)
        output = self.share / f"{name}.out"
        output.touch()
        self._orders.sendall(f"{name} {timeout:.0f}\n".encode())
        if echo is not None:
            self._follow(output, echo, timeout + SLACK)
        status = int(self._answer(name, timeout + SLACK))
        return Result(status, output.read_text(errors="replace"))

    def shell(self) -> int:
        """bash on our terminal, until it ends; its status."""
        self._orders.sendall(b"shell 0\n")
        return int(self._answer("shell", None))

    def _follow(self, output: Path, echo: TextIO, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with output.open(errors="replace") as lines:
            # An answer waits on the socket once the order has ended.
            while not self._answered(0.1) and time.monotonic() < deadline:
                echo.write(lines.read())
                echo.flush()
            echo.write(lines.read())
            echo.flush()

    def _answered(self, seconds: float) -> bool:
        self._orders.settimeout(seconds)
        try:
            return self._orders.recv(1, socket.MSG_PEEK) is not None
        except TimeoutError:
            return False

    def _answer(self, name: str, seconds: float | None) -> str:
        """What follows ``name`` in the line that begins with it."""
        self._orders.settimeout(seconds)
        try:
            for line in self._answers:
                said, _, rest = line.partition(" ")
                if said == name:
                    return rest
        except TimeoutError:
            raise MachineError(f"no word of {name} in {seconds:g} s; {self._last_words()}") from None
        raise MachineError(f"the machine has ended; {self._last_words()}")

    def _lines(self) -> Iterator[str]:
        buffered = b""
        while received := self._orders.recv(4096):
            *lines, buffered = (buffered + received).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").strip()

    def _last_words(self) -> str:
        said = self._console.read_text(errors="replace")[-1500:] if self._console.exists() else ""
        if self._qemu.poll() is not None and self._qemu.stderr is not None:
            said += self._qemu.stderr.read()[-1500:]
        return f"its console ends: {said}"

    def close(self) -> None:
        self._orders.close()
        self._qemu.kill()
        self._qemu.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
