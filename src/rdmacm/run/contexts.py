"""Asynchronous events of devices, ibv_get_async_event(3): each open context of a program gets those of its device.

Events of queue pairs and of completion queues are the program's own.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

from rdmacm.errors import cm_error
from rdmacm.run import protocol
from rdmacm.soft.device.async_events import SoftAsyncQueue
from rdmacm.soft.device.device import SoftDevice
from rdmacm.soft.provider import SoftProvider


@dataclass(eq=False, slots=True)
class OpenContext:
    """A device that a program has open. ``fd`` is the end of a pipe that takes its events; it does not block."""

    index: int
    fd: int


@dataclass(eq=False, slots=True)
class _Watched:
    queue: SoftAsyncQueue
    contexts: dict[OpenContext, None]


class Contexts:
    """The open contexts of all programs."""

    def __init__(self, provider: SoftProvider) -> None:
        self._provider = provider
        #: The devices that are open, by index.
        self._devices: dict[int, _Watched] = {}

    def open(self, index: int, fd: int) -> OpenContext:
        """Write the events of a device to a pipe; ENODEV for an unknown index."""
        watched = self._devices.get(index)
        if watched is None:
            device = self._provider.host.open_device(index)
            if not isinstance(device, SoftDevice):
                raise cm_error(errno.ENODEV, "there is no such device", "open_device")
            watched = self._devices[index] = _Watched(device.create_async_queue(True), {})
            watched.queue.get(0)  # from now on changes are followed
        made = OpenContext(index, fd)
        watched.contexts[made] = None
        return made

    def close(self, context: OpenContext) -> None:
        """Undo :meth:`open`."""
        os.close(context.fd)
        watched = self._devices[context.index]
        del watched.contexts[context]
        if not watched.contexts:
            watched.queue.close()
            del self._devices[context.index]

    @property
    def any(self) -> bool:
        """Whether a context is open."""
        return bool(self._devices)

    def look(self) -> None:
        """Pass on the events that there are. One that a program has no room for is lost."""
        for watched in self._devices.values():
            while (found := watched.queue.get(0)) is not None:
                event, port = found
                if not isinstance(port, int):
                    continue  # of an object of this process
                packed = protocol.ASYNC_EVENT.pack(port, event)
                for context in watched.contexts:
                    with suppress(OSError):
                        os.write(context.fd, packed)
