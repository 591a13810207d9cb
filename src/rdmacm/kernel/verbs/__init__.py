"""The verbs of the kernel's RDMA devices, through libibverbs.

The library is loaded when the first device is opened; nothing is compiled, and no other package is needed. Everything
is a backend of :mod:`rdmacm.verbs.backend`. :func:`runtime` has the lock and the descriptors of all devices, which the
kernel provider shares.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_void_p
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.kernel.sysfs import PROVIDER
from rdmacm.kernel.verbs.device import KernelDevice
from rdmacm.kernel.verbs.layouts import ibv_device
from rdmacm.kernel.verbs.library import Library, code_of, last_error, load
from rdmacm.kernel.verbs.opened import OpenedDevice
from rdmacm.kernel.verbs.refusals import absence, open_refusal
from rdmacm.kernel.verbs.snapshot import snapshot
from rdmacm.kernel.verbs.watch import runtime

if TYPE_CHECKING:
    from rdmacm.verbs.device import Device

__all__ = [
    "PROVIDER",
    "KernelDevice",
    "device_names",
    "fork_init",
    "fork_status",
    "open_device",
    "read_device",
    "runtime",
]

#: The open devices, by name.
_devices: weakref.WeakValueDictionary[str, KernelDevice] = weakref.WeakValueDictionary()


@contextmanager
def _listed(library: Library) -> Iterator[list[tuple[str, int]]]:
    """The devices that the library finds, name and address, for a ``with`` block."""
    count = c_int()
    address = library.ibv_get_device_list(byref(count))
    if address:
        try:
            table = (c_void_p * count.value).from_address(address)
            yield [(library.ibv_get_device_name(each).decode(), each) for each in table if each]
        finally:
            library.ibv_free_device_list(address)
    elif (code := last_error()) in (errno.ENOSYS, errno.ENOENT):  # the kernel has no RDMA at all
        yield []
    else:
        raise cm_error(code, "the devices could not be listed", "ibv_get_device_list", hint="modprobe ib_uverbs")


def device_names() -> list[str]:
    """The names of the kernel's devices that libibverbs has a driver for. ENOENT: there is no libibverbs."""
    with _listed(load()) as found:
        return [name for name, _ in found]


def open_device(name: str) -> KernelDevice:
    """Open a device, ibv_open_device(3); the same object as long as the device exists and something refers to it.

    ENOENT: there is no libibverbs, or no node ``/dev/infiniband/uverbsN``; EACCES: no permission to open it; ENODEV:
    there is no such device.
    """
    shared = runtime()
    with shared.lock:
        device = _devices.get(name)
        if device is not None and not device.opened.abandoned:
            shared.progress()  # perhaps it has been removed
            if not device.opened.removed:
                return device
        library = load()
        with _listed(library) as found:
            address = dict(found).get(name)
            if address is None:
                raise absence(name, [each for each, _ in found])
            node = ibv_device.from_address(address).dev_name.decode()
            context = library.ibv_open_device(address)
            if not context:
                raise open_refusal(name, node, last_error())
            index = library.ibv_get_device_index(address) if library.ibv_get_device_index else -1
        opened = OpenedDevice(name, node, library, context, shared)
        device = _devices[name] = KernelDevice(opened, index)
        return device


def fork_init() -> None:
    """Have the library keep registered memory out of children, ibv_fork_init(3).

    Linux 5.12 and newer copy such memory when a process forks, and the library does nothing then. EINVAL: it was called
    too late.
    """
    code = load().ibv_fork_init()
    if code:
        text, hint = "memory is registered already", "ibv_fork_init() before the first region or queue"
        raise cm_error(code_of(code), text, "fork_init", hint=hint)


def fork_status() -> int:
    """``enum ibv_fork_status``: 0 if fork(2) may corrupt registered memory, 1 after :func:`fork_init`, 2 not needed."""
    return load().fork_status()


def read_device(name: str) -> Device:
    """What a device is now, with its ports and their tables; errors as for :func:`open_device`."""
    return snapshot(open_device(name))
