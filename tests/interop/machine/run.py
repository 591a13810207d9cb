"""Starting the machine and giving it orders."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from interop.machine import cpio
from interop.machine.packages import Image, Unavailable

__all__ = ["Machine", "MachineError", "Result"]

PROJECT = Path(__file__).parents[3]
QEMU = "qemu-system-x86_64"
#: What of the project the machine sees at /project.
SHOWN = ("src", "tests/interop", "bench", "examples")
#: Seconds: to start up, and what an order may take to begin and to end.  Emulated machines take their time.
STARTING, SLACK = 180.0, 30.0
#: The status of a script that took too long.
LATE = 124
#: How often it may be started.
STARTS = 4
#: Where orders come from inside.
ORDERS = ("-device", "virtserialport,chardev=orders,name=orders")


class MachineError(Exception):
    """The machine did not do its part; it ends with what its console said last."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a script ended: its status (LATE: it took too long) and its output, errors included."""

    status: int
    output: str


def accelerator() -> str:
    """``kvm`` or ``tcg``, which is emulation; RDMACM_GUEST_ACCEL decides, if set."""
    if chosen := os.environ.get("RDMACM_GUEST_ACCEL"):
        return chosen
    # Where the processor offers neither, a /dev/kvm that can be opened still crawls or fails.
    flags = Path("/proc/cpuinfo").read_text().split()
    return "kvm" if os.access("/dev/kvm", os.W_OK) and {"vmx", "svm"} & set(flags) else "tcg"


def _add_project(image: Image, folder: Path, initramfs: Path) -> None:
    """The image's files and the project's, in one archive after the other; ``folder`` is for what comes between."""
    project = folder / "project"
    for name in SHOWN:
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "artifacts"))
    # Emulated, Python takes seconds to compile what is here; "unchecked": it need not look at times either.
    image.python(
        "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", folder.as_posix(), str(project)
    )
    shutil.copyfile(image.initramfs, initramfs)
    with initramfs.open("ab") as stream:
        cpio.write(stream, project, Path("project"))


class Machine:
    """A running machine; a context manager that ends it.

    ``share`` is the folder that it sees as /mnt/share and may write to; ``terminal``: our own terminal becomes its
    console for :meth:`shell`. One that does not answer is ended, and the next order starts it anew, a few times.
    """

    def __init__(self, image: Image, share: Path, *, terminal: bool = False) -> None:
        qemu = shutil.which(QEMU)
        if qemu is None:
            raise Unavailable(f"no {QEMU} here (Debian: apt-get install qemu-system-x86)")
        self.accelerator = accelerator()
        self.share = share
        self._names = count(1)
        self._starts = 0
        #: What was known each time that a script was run once more.
        self.stuck: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="rdmacm-guest-")
        folder = Path(self._folder.name)
        self._console = folder / "console"
        self._files = folder / "initramfs"
        _add_project(image, folder, self._files)
        self._command = [qemu, *self._machine(), *self._kernel(image), *self._devices(terminal)]
        self._terminal = terminal
        self._qemu: subprocess.Popen[str] | None = None
        self._start()

    def _start(self) -> None:
        self._starts += 1
        if self._starts > STARTS:
            raise MachineError(f"the machine has been started {STARTS} times; not once more")
        self._received = b""
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._qemu = subprocess.Popen(
                [*self._command, "-chardev", f"socket,id=orders,fd={theirs.fileno()}", *ORDERS],
                stdin=None if self._terminal else subprocess.DEVNULL,
                stdout=None if self._terminal else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs.fileno()],
            )
        self.kernel = self._answer("ready", STARTING)

    def _machine(self) -> list[str]:
        kvm = ["-accel", "kvm", "-cpu", "host"]
        tcg = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
        bare = ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"]
        size = ["-smp", "2", "-m", "2048"]
        return [*(kvm if self.accelerator == "kvm" else tcg), *bare, *size, "-serial", f"file:{self._console}"]

    def _kernel(self, image: Image) -> list[str]:
        words = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off audit=0 no_timer_check net.ifnames=0"
        # What hangs in the kernel tells the console where, before an order is given up.
        words += " sysctl.kernel.hung_task_timeout_secs=20 rdinit=/interop/machine/agent"
        return ["-kernel", str(image.vmlinux), "-initrd", str(self._files), "-append", words]

    def _devices(self, terminal: bool) -> list[str]:
        devices = ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        if terminal:
            devices += ["-chardev", "stdio,id=terminal,signal=off", "-device", "virtconsole,chardev=terminal"]
        share = f"local,path={self.share},mount_tag=share,security_model=none,multidevs=remap"
        return [*devices, "-virtfs", share]

    def run(self, script: str, timeout: float = 60.0, echo: TextIO | None = None) -> Result:
        """Run bash's ``script`` with the words of ``net.sh``; its output also goes to ``echo`` while it runs.

        ``timeout`` is in seconds; then, and when it ends, all it started is killed.
        """
        if self._qemu is None:
            self._start()
        name = f"order-{next(self._names)}"
        (self.share / f"{name}.sh").write_text(script)
        output = self.share / f"{name}.out"
        output.touch()
        self._orders.sendall(f"{name} {timeout:.0f}\n".encode())
        if echo is not None:
            self._follow(output, echo, timeout + SLACK)
        status = int(self._answer(name, timeout + SLACK))
        return Result(status, output.read_text(errors="replace"))

    def insist(self, script: str, timeout: float = 60.0) -> Result:
        """:meth:`run`, and once more in a new machine where an emulated one got stuck.

        ``script`` needs nothing that earlier ones have made.
        """
        try:
            result = self.run(script, timeout)
        except MachineError as error:
            said = str(error)
        else:
            if result.status != LATE:
                return result
            said = result.output[-5000:]
        if self.accelerator != "tcg":
            raise MachineError(said)
        self.stuck.append(f"{script}\n{said}")
        if self._qemu is not None:
            self._end()
        return self.run(script, timeout)

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
        """What follows ``name`` in the line that begins with it; answers to what was given up are passed over."""
        self._orders.settimeout(seconds)
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                said, _, status = line.decode(errors="replace").strip().partition(" ")
                if said == name:
                    return status
                continue
            try:
                received = self._orders.recv(4096)
            except TimeoutError:
                raise MachineError(f"no word of {name} in {seconds:g} s; {self._end()}") from None
            if not received:
                raise MachineError(f"the machine has ended; {self._end()}")
            self._received += received

    def _end(self) -> str:
        """End it, and say what is known of why."""
        assert self._qemu is not None
        self._orders.close()
        try:
            # Who has closed the line is about to end by itself.
            self._qemu.wait(1)
        except subprocess.TimeoutExpired:
            self._qemu.kill()
        _, errors = self._qemu.communicate()
        status, self._qemu = self._qemu.returncode, None
        said = self._console.read_text(errors="replace")[-1500:] if self._console.exists() else ""
        return f"{QEMU} ended with {status}: {errors[-1500:]}; its console ends: {said}"

    def close(self) -> None:
        if self._qemu is not None:
            self._qemu.kill()
            self._end()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
