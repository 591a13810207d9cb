"""Event channels of programs, and the ids and joins whose events arrive there.

A channel has a pair of sockets: the program reads one end, and the server holds both. Only one event at a time is in
the pair; the next one follows when the program has read it. So the server knows which events the program has, as the
kernel does, and can take back one that is not read when its id is destroyed or moves to another channel.
"""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rdmacm.constants import CmEventType
from rdmacm.provider import IdBackend, QueuedEvent
from rdmacm.provider.connparam import Ece
from rdmacm.run.packing import pack_event
from rdmacm.soft.event_queue import SoftQueue

_NO_ECE = Ece(0)
#: Events whose peer may have sent options of enhanced connection establishment.
_WITH_ECE = frozenset({CmEventType.CONNECT_REQUEST, CmEventType.CONNECT_RESPONSE})
_EVENT_BYTES = 512


class Target:
    """What events are about and count for: an id, or a join of a multicast group."""

    __slots__ = ("__weakref__", "number", "reported", "uid")

    def __init__(self, number: int, uid: int) -> None:
        #: Its number in the commands of the session.
        self.number: int = number
        #: The number that the program has given it, and its events have; 0 before a request is accepted.
        self.uid: int = uid
        #: How many of its events the program has read.
        self.reported: int = 0

    def _reported(self, _: int, /) -> None:
        """See :class:`rdmacm.provider.Owner`: an event counts once the program has read it, which is later."""


class Identifier(Target):
    """An id of a program; the owner of its backend."""

    __slots__ = ("backend", "channel", "joins")

    backend: IdBackend

    def __init__(self, number: int, uid: int, channel: Channel) -> None:
        super().__init__(number, uid)
        self.channel: Channel = channel
        #: The multicast groups that it has joined.
        self.joins: list[Join] = []


class Join(Target):
    """A join of a multicast group."""

    __slots__ = ("identifier",)

    def __init__(self, number: int, uid: int, identifier: Identifier) -> None:
        super().__init__(number, uid)
        self.identifier: Identifier = identifier


class _Sent(NamedTuple):
    """An event on its way to the program."""

    packet: bytes
    #: What it counts for: an id, and of a multicast event its join too.
    targets: tuple[Target, ...]
    #: The id that a CONNECT_REQUEST has made.
    made: Identifier | None


class Channel:
    """An event channel. ``adopt`` makes an id of the backend in a CONNECT_REQUEST; None if the request is refused.

    ``see`` is told each event before the program.
    """

    def __init__(self, number: int, queue: SoftQueue, adopt: _Adopt, see: Callable[[QueuedEvent], None]) -> None:
        self.number = number
        self.queue = queue
        self._own, self._program = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._adopt, self._see = adopt, see
        #: The event that the program has perhaps not read.
        self._sent: _Sent | None = None
        #: Events that come before those of the queue.
        self._waiting: deque[_Sent] = deque()
        self._own.setblocking(False)  # not the other end: the program would find its descriptor so

    def fileno(self) -> int:
        """The descriptor of this end: it becomes writable when the program reads an event."""
        return self._own.fileno()

    def program_fileno(self) -> int:
        """The descriptor of the program's end, to be sent there."""
        return self._program.fileno()

    def pump(self) -> None:
        """Send the next event if the program has read the last one. To be called when either may have changed."""
        if self._sent is not None:
            if self._is_unread(self._sent):
                return
            self._count(self._sent)
        sent = self._waiting.popleft() if self._waiting else self._next()
        if sent is not None:
            self._own.send(sent.packet)
            self._sent = sent

    def _is_unread(self, sent: _Sent) -> bool:
        queued = fcntl.ioctl(self._own.fileno(), termios.TIOCOUTQ, bytes(4))
        # An unread packet counts for more than its bytes. While Linux frees one, this end is reported as writable with
        # a byte still counted, and not again when that has gone.
        return int.from_bytes(queued, sys.byteorder) >= len(sent.packet)

    def _count(self, sent: _Sent) -> None:
        self._sent = None
        for target in sent.targets:
            target.reported += 1

    def _next(self) -> _Sent | None:
        while self.queue.ready and (event := self.queue.get(0)) is not None:
            self._see(event)
            sent = self._prepare(event)
            if sent is not None:
                return sent
        return None

    def _prepare(self, event: QueuedEvent) -> _Sent | None:
        owner, named, made, ece = event.owner, event.owner, None, _NO_ECE
        assert isinstance(owner, Identifier) and isinstance(named, Target)
        targets: tuple[Target, ...] = (owner,)
        if event.new_id is not None:
            made = self._adopt(self, event.new_id)
            if made is None:
                return None
            named = made
        elif event.join is not None:
            assert isinstance(event.join, Join)
            named = event.join
            targets = owner, named
        if event.type in _WITH_ECE:
            ece = (made or owner).backend.remote_ece()
        # A request has the listener's uid and the new id's number; that of a group has both of the join.
        uid = owner.uid if made is not None else named.uid
        return _Sent(pack_event(uid, named.number, event, ece), targets, made)

    # -- taking back ----------------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Have no event in the pair: one that is not read is the first of those that wait."""
        if self._sent is None:
            return
        try:
            self._program.recv(_EVENT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._count(self._sent)
        else:
            self._waiting.appendleft(self._sent)
            self._sent = None

    def drop(self, target: Target) -> list[Identifier]:
        """Forget the events of an id or a join that are not read. Returns the ids that nobody will learn of."""
        self._take_back()
        dropped = [sent for sent in self._waiting if target in sent.targets]
        self._waiting = deque(sent for sent in self._waiting if target not in sent.targets)
        return [sent.made for sent in dropped if sent.made is not None]

    def move(self, identifier: Identifier, other: Channel) -> None:
        """Give the events of an id that are not read to another channel. Those in the queue have moved already."""
        self._take_back()
        for sent in self._waiting:
            if identifier in sent.targets:
                other._waiting.append(sent)
                if sent.made is not None:
                    sent.made.backend.migrate(other.queue)
                    sent.made.channel = other
        self._waiting = deque(sent for sent in self._waiting if identifier not in sent.targets)

    def close(self) -> None:
        """Destroy the ids' backends, and close the pair."""
        self.queue.close()
        self._own.close()
        self._program.close()


_Adopt = Callable[[Channel, IdBackend], Identifier | None]
