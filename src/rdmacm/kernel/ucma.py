"""The character device ``/dev/infiniband/rdma_cm``: opening it, and one call for each kind of command.

An open file is an event channel of the kernel. Closing it destroys the ids that were made with it.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections.abc import Callable

from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command

#: The path of the device file, below the directory of device files.
DEVICE_FILE = "infiniband/rdma_cm"
_VERSION_FILE = "class/misc/rdma_cm/abi_version"
#: ENOTSUPP, which the kernel returns and user space has no name for.
_ENOTSUPP = 524


def abi_version(sys: str = "/sys") -> int | None:
    """The version of the kernel's interface; None where the module is not loaded."""
    try:
        with open(os.path.join(sys, _VERSION_FILE)) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def check_available(dev: str = "/dev", sys: str = "/sys") -> None:
    """Raise what opening a channel would raise, and open none."""
    Ucma(dev, sys).close()


class Ucma:
    """One open file. Used with the provider's lock held, except :attr:`fd`.

    ``dev`` and ``sys`` are the directories of the device files and of sysfs. ENODEV: the module rdma_ucm is not
    loaded, or its device file is not here; EACCES or EPERM: no permission for it; EPROTONOSUPPORT: the kernel speaks
    another version.
    """

    __slots__ = ("_address", "_response", "fd")

    def __init__(self, dev: str = "/dev", sys: str = "/sys") -> None:
        #: The descriptor; -1 once closed. It polls readable when there is an event.
        self.fd: int = -1
        version = abi_version(sys)
        if version is not None and version not in abi.ABI_VERSIONS:
            spoken = ", ".join(map(str, abi.ABI_VERSIONS))
            text = f"the kernel's rdma_cm interface has version {version}, and this package speaks {spoken}"
            raise cm_error(errno.EPROTONOSUPPORT, text, "open", hint="another kernel, or the provider soft")
        path = os.path.join(dev, DEVICE_FILE)
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _not_opened(error, path, version) from None
        #: Where the kernel writes responses, and the address of that in memory.
        self._response = array("B", bytes(max(abi.Response)))
        self._address, _ = self._response.buffer_info()

    def tell(self, command: Command, payload: bytes) -> None:
        """Execute a command without response; OSError with the kernel's errno."""
        try:
            os.write(self.fd, abi.frame(command, payload, 0))
        except OSError as error:
            raise _known(error) from None

    def ask(self, command: Command, payload: Callable[[int], bytes], size: int) -> bytes:
        """Execute a command whose response has up to ``size`` bytes; OSError with the kernel's errno.

        ``payload`` makes the payload with the address of the buffer.
        """
        try:
            os.write(self.fd, abi.frame(command, payload(self._address), size))
        except OSError as error:
            raise _known(error) from None
        return self._response[:size].tobytes()

    def preset(self, offset: int, value: int) -> None:
        """Set a 32-bit field of the next response, which an older kernel leaves as it is."""
        struct.pack_into("=I", self._response, offset, value)

    def close(self) -> None:
        """Close the file; its ids are destroyed with it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _known(error: OSError) -> OSError:
    """The error with an errno that user space knows."""
    if error.errno == _ENOTSUPP:
        return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return error


def _not_opened(error: OSError, path: str, version: int | None) -> RdmaError:
    """Why the device file could not be opened, and what to do about it."""
    code = error.errno or errno.EIO
    if code in (errno.ENOENT, errno.ENXIO, errno.ENODEV, errno.ENOTDIR):
        if version is None:
            text = f"{path} is not there: the kernel module rdma_ucm is not loaded"
            hint = "'modprobe rdma_ucm'; 'ls /sys/class/misc/rdma_cm' shows whether it is loaded (rdmacm doctor D2)"
        else:
            text = f"the kernel module rdma_ucm is loaded, but {path} is not there"
            hint = (
                "starting udev; for a container --device=/dev/infiniband/rdma_cm and each /dev/infiniband/uverbsN; "
                "'ls -l /dev/infiniband' shows them (rdmacm doctor D4)"
            )
        return cm_error(errno.ENODEV, text, "open", hint=hint)
    if code in (errno.EACCES, errno.EPERM):
        try:
            mode = os.stat(path).st_mode & 0o777
        except OSError:
            mode = 0
        if mode & 0o006 == 0o006:
            text = f"{path}: the device cgroup of this container forbids it"
            hint = f"--device={path}; 'cat /proc/self/cgroup' shows the cgroup (rdmacm doctor D4)"
        else:
            text = f"{path}: no permission to read and write (mode {mode:o})"
            shown = f"'ls -l {path}' shows mode and owner (rdmacm doctor D4)"
            hint = f"'chmod 666 {path}', or a udev rule that does it; {shown}"
        return cm_error(code, text, "open", hint=hint)
    if code == errno.EMFILE:
        hint = "'ulimit -n' for more descriptors; 'ls /proc/self/fd' shows those in use"
        return cm_error(code, f"{path}: {error.strerror}", "open", hint=hint)
    return cm_error(code, f"{path}: {error.strerror}", "open")
