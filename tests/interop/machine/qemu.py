"""The machine that QEMU starts, with Debian's own kernel: two processors, emulated where there is no KVM."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from interop.machine import cpio
from interop.machine.cache import Unavailable
from interop.machine.debian_kernel import debian_kernel
from interop.machine.root import root
from interop.machine.run import Machine, copy_project

__all__ = ["Qemu"]

PROGRAM = "qemu-system-x86_64"
#: The serial port on which the agent receives its orders.
ORDERS = ("-device", "virtserialport,chardev=orders,name=orders")


def accelerator() -> str:
    """``kvm``, or ``tcg`` for emulation; RDMACM_GUEST_ACCEL overrides the choice."""
    if chosen := os.environ.get("RDMACM_GUEST_ACCEL"):
        return chosen
    # On a processor with neither flag, /dev/kvm may open and then fail or be very slow.
    flags = Path("/proc/cpuinfo").read_text().split()
    return "kvm" if os.access("/dev/kvm", os.W_OK) and {"vmx", "svm"} & set(flags) else "tcg"


class Qemu(Machine):
    """A machine with Debian's own kernel. Its files are all in its memory."""

    def __init__(self, share: Path, *, terminal: bool = False) -> None:
        self.accelerator = accelerator()
        self.flaky = self.accelerator == "tcg"
        self.description = "of Debian in QEMU, " + ("emulated" if self.flaky else "with KVM")
        super().__init__(share, terminal=terminal)

    @classmethod
    def prepare(cls, *, update: bool = False) -> None:
        if shutil.which(PROGRAM) is None:
            raise Unavailable(f"no {PROGRAM} here; on Debian: apt-get install qemu-system-x86")
        debian_kernel(root(update=update), update=update)

    def make_files(self) -> None:
        files = root()
        self._kernel = debian_kernel(files)
        self._initramfs = self.folder / "initramfs"
        project = self.folder / "project"
        copy_project(project)
        # An emulated processor needs seconds to compile this, and "unchecked" also saves looking at each source file.
        compile_all = ("-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash")
        files.python(*compile_all, "-s", self.folder.as_posix(), str(project))
        shutil.copyfile(self._kernel.initramfs, self._initramfs)
        with self._initramfs.open("ab") as stream:
            cpio.write(stream, project, Path("project"))

    def command(self, orders: int, console: Path, *, terminal: bool) -> list[str]:
        kvm = ["-accel", "kvm", "-cpu", "host"]
        tcg = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
        bare = ["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"]
        return [
            *(PROGRAM, *(kvm if self.accelerator == "kvm" else tcg), *bare),
            *("-smp", "2", "-m", "2048"),
            *("-chardev", f"file,id=console,path={console},append=on", "-serial", "chardev:console"),
            *self._boot(),
            *self._devices(terminal),
            *("-chardev", f"socket,id=orders,fd={orders}", *ORDERS),
        ]

    def _boot(self) -> list[str]:
        words = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off audit=0 no_timer_check net.ifnames=0"
        # A task that hangs in the kernel is reported on the console before the script exceeds its limit.
        words += " sysctl.kernel.hung_task_timeout_secs=20 rdinit=/interop/machine/init-qemu"
        return ["-kernel", str(self._kernel.vmlinux), "-initrd", str(self._initramfs), "-append", words]

    def _devices(self, terminal: bool) -> list[str]:
        devices = ["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]
        if terminal:
            devices += ["-chardev", "stdio,id=terminal,signal=off", "-device", "virtconsole,chardev=terminal"]
        share = f"local,path={self.share},mount_tag=share,security_model=none,multidevs=remap"
        return [*devices, "-virtfs", share]
