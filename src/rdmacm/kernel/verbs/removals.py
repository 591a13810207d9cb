"""Devices that the kernel is about to remove: the events of kobjects, on a netlink socket.

Before the kernel removes a device whose driver cannot take it away from a process (rdma_rxe, siw), it waits until no
process has it open, and tells nobody through the device. But it has removed the device's node by then, and says so to
everybody.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref
from collections.abc import Callable
from typing import TypeAlias

from rdmacm.kernel.verbs.watch import Watch

_Lose: TypeAlias = "weakref.WeakMethod[Callable[[], None]]"

_KOBJECT_UEVENT = 15
#: The group of the events that the kernel itself sends.
_KERNEL_GROUP = 1
_LARGEST = 8192
_SYSFS = "/sys/class/infiniband_verbs"


class _Removals:
    """The socket of one watch, and the devices that are followed."""

    def __init__(self) -> None:
        #: By a key of the caller's: the name of the device's node, and what to call.
        self.devices: dict[int, tuple[str, _Lose]] = {}
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _KOBJECT_UEVENT)
        try:
            self.socket.bind((0, _KERNEL_GROUP))
        except OSError:
            self.socket.close()
            raise

    def read(self) -> None:
        """Read the events that are there. The lock is held."""
        while True:
            try:
                event = self.socket.recv(_LARGEST)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    return
                gone = [name for name, _ in self.devices.values() if not os.path.exists(f"{_SYSFS}/{name}")]
            else:
                action, _, path = event.partition(b"\0")[0].partition(b"@")
                folder, _, name = os.fsdecode(path).rpartition("/")
                is_gone = action == b"remove" and folder.endswith("/infiniband_verbs")
                gone = [name] if is_gone else []
            for lose in [lose() for name, lose in self.devices.values() if name in gone]:
                if lose is not None:
                    lose()


#: By watch.
_all: weakref.WeakKeyDictionary[Watch, _Removals] = weakref.WeakKeyDictionary()


def follow(watch: Watch, key: int, name: str, lose: _Lose) -> None:
    """Call ``lose()()`` when the device with this node (``uverbs0``) is about to be removed, until :func:`forget`.

    Where the system does not allow such a socket, nothing happens. The lock is held, here and in the call.
    """
    found = _all.get(watch)
    if found is None:
        try:
            found = _all[watch] = _Removals()
        except OSError:
            return
        watch.add(found.socket.fileno(), weakref.WeakMethod(found.read))
    found.devices[key] = name, lose


def forget(watch: Watch, key: int) -> None:
    """Undo :func:`follow`. The lock is held."""
    found = _all.get(watch)
    if found is not None:
        found.devices.pop(key, None)
        if not found.devices:
            watch.remove(found.socket.fileno())
            found.socket.close()
            del _all[watch]


def abandon() -> None:
    """In a child of fork(2): close the child's copies of the sockets."""
    for found in _all.values():
        found.socket.close()
    _all.clear()
