"""What a program owns at the server: event channels, ids, joins of groups, sockets. All of it ends with the program."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from rdmacm.errors import cm_error
from rdmacm.provider import IdBackend, QueuedEvent
from rdmacm.run.channels import Channel, Identifier, Join
from rdmacm.run.contexts import Contexts, OpenContext
from rdmacm.run.counting import SharedCounters
from rdmacm.run.explanations import Explanations, Teller
from rdmacm.run.options import Options
from rdmacm.run.slots import Slots
from rdmacm.run.tapping import Tapping
from rdmacm.soft.provider import SoftProvider

#: So many channels and contexts a program may have, and so many ids and joins.
_MOST_CHANNELS, _MOST_TARGETS = 4096, 65536


class Common(NamedTuple):
    """What all programs have together."""

    provider: SoftProvider
    options: Options
    contexts: Contexts
    #: None: packets are not captured.
    tapping: Tapping | None


class Session:
    """See the module. ``watch`` and ``unwatch`` tell the server about a channel's descriptor and its queue."""

    def __init__(
        self,
        common: Common,
        teller: Teller,
        watch: Callable[[Channel], None],
        unwatch: Callable[[Channel], None],
    ) -> None:
        self.provider: SoftProvider = common.provider
        self.options: Options = common.options
        self.tapping: Tapping | None = common.tapping
        #: None: nothing is explained.
        self.explanations: Explanations | None = Explanations(teller) if common.options.explains else None
        #: Tells the user what the program does not.
        self.teller = teller
        self.slots: Slots = Slots(common.provider)
        #: What the program counts; None before it has asked for the memory.
        self.counters: SharedCounters | None = None
        self.ids: dict[int, Identifier] = {}
        self.joins: dict[int, Join] = {}
        self._channels: dict[int, Channel] = {}
        self._contexts = common.contexts
        self._open_contexts: dict[int, OpenContext] = {}
        self._watch, self._unwatch = watch, unwatch
        self._numbers = count(1)

    # -- channels -------------------------------------------------------------------------------------

    def open_channel(self) -> Channel:
        """Open an event channel."""
        self._check_room()
        queue = self.provider.open_queue()
        try:
            channel = Channel(next(self._numbers), queue, self._adopt, self._see)
        except BaseException:
            queue.close()
            raise
        self._channels[channel.number] = channel
        self._watch(channel)
        return channel

    def channel(self, number: int) -> Channel:
        """The channel of a number; ENOENT for an unknown one."""
        channel = self._channels.get(number)
        if channel is None:
            raise cm_error(errno.ENOENT, f"no event channel {number}", "channel")
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Close a channel and destroy its ids."""
        self._unwatch(channel)
        del self._channels[channel.number]
        channel.close()
        for identifier in [each for each in self.ids.values() if each.channel is channel]:
            self._forget(identifier)

    def _check_room(self) -> None:
        if len(self._channels) + len(self._open_contexts) >= _MOST_CHANNELS:
            raise cm_error(errno.EMFILE, f"the program has {_MOST_CHANNELS} channels", "create_event_channel")

    # -- ids ------------------------------------------------------------------------------------------

    def create_id(self, channel: Channel, uid: int, port_space: int, qp_type: int) -> Identifier:
        """A new id, whose events go to a channel."""
        identifier = self._new_id(channel, uid)
        identifier.backend = self.provider.create_id(channel.queue, identifier, port_space, qp_type)
        self.ids[identifier.number] = identifier
        return identifier

    def _new_id(self, channel: Channel, uid: int) -> Identifier:
        if len(self.ids) + len(self.joins) >= _MOST_TARGETS:
            raise cm_error(errno.ENOMEM, f"the program has {_MOST_TARGETS} ids", "create_id")
        return Identifier(next(self._numbers), uid, channel)

    def _see(self, event: QueuedEvent) -> None:
        if self.explanations is not None and isinstance(event.owner, Identifier):
            self.explanations.see(event.owner.backend, event)

    def _adopt(self, channel: Channel, backend: IdBackend) -> Identifier | None:
        """An id for a request of a peer; None if it has come to a device that the program does not see."""
        if backend.verbs is not None and not self.options.shows(backend.verbs.device):
            backend.destroy()
            return None
        identifier = Identifier(next(self._numbers), 0, channel)
        identifier.backend = backend
        backend.adopt(identifier)
        self.ids[identifier.number] = identifier
        return identifier

    def destroy_id(self, identifier: Identifier) -> None:
        """Destroy an id, its joins, and the new ids of requests that the program has not read."""
        if self.explanations is not None:
            self.explanations.end(identifier.backend)
        identifier.backend.destroy()
        channel = identifier.channel
        for event in channel.queue.take(identifier):
            if event.new_id is not None:
                event.new_id.destroy()
        for made in channel.drop(identifier):
            self.destroy_id(made)
        self._forget(identifier)
        channel.pump()

    def _forget(self, identifier: Identifier) -> None:
        self.ids.pop(identifier.number, None)
        for join in identifier.joins:
            self.joins.pop(join.number, None)

    def new_join(self, identifier: Identifier, uid: int) -> Join:
        """A join of a group by an id, which the caller adds once it has begun."""
        if len(self.ids) + len(self.joins) >= _MOST_TARGETS:
            raise cm_error(errno.ENOMEM, f"the program has {_MOST_TARGETS} ids", "join_multicast")
        return Join(next(self._numbers), uid, identifier)

    # -- contexts -------------------------------------------------------------------------------------

    def open_context(self, index: int, given: int) -> int:
        """Open a device; its asynchronous events go to the given pipe. Returns the context's number."""
        self._check_room()
        number = next(self._numbers)
        fd = _own_end(given)
        try:
            self._open_contexts[number] = self._contexts.open(index, fd)
        except BaseException:
            os.close(fd)
            raise
        return number

    def close_context(self, number: int) -> None:
        """Close a device that :meth:`open_context` has opened; ENOENT for an unknown number."""
        context = self._open_contexts.pop(number, None)
        if context is None:
            raise cm_error(errno.ENOENT, f"no context {number}", "close_device")
        self._contexts.close(context)

    # -- counters -------------------------------------------------------------------------------------

    def share_counters(self) -> SharedCounters:
        """New memory for what the program counts from now on."""
        made = SharedCounters()
        self._close_counters()
        self.counters = made
        return made

    def _close_counters(self) -> None:
        if self.counters is not None:
            self.counters.close()
            self.counters = None

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy everything: the program has ended."""
        for channel in list(self._channels.values()):
            self.close_channel(channel)
        for number in list(self._open_contexts):
            self.close_context(number)
        self.slots.close()
        self._close_counters()


def _own_end(fd: int) -> int:
    """A new descriptor that writes to a pipe, and never waits; EINVAL for another kind of file."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise cm_error(errno.EINVAL, "not a pipe", "open_device")
    # Not a copy: the program could make that wait.
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
