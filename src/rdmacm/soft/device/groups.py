"""The multicast groups of a wire: who has joined them, and which queue pairs receive their packets.

A group is an IP address on one interface. The host is a member as long as an id has joined the group or a queue pair
is attached to it: the first of them joins it on the wire, and the last one leaves it.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Generic, TypeVar

from rdmacm.errors import cm_error
from rdmacm.soft.wire.base import Wire, group_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Groups of one process. Each takes a socket.
MAX_GROUPS = 1024
#: Queue pairs of one process that are attached to one group.
MAX_GROUP_QPS = 1024


Q = TypeVar("Q")


class _Group(Generic[Q]):
    """A group that the host is a member of."""

    __slots__ = ("members", "qps")

    def __init__(self) -> None:
        #: How many ids have joined it, and how many queue pairs are attached.
        self.members = 0
        #: The queue pairs that receive its packets, in the order in which they were attached.
        self.qps: tuple[Q, ...] = ()


class Groups(Generic[Q]):
    """See the module. Used with the runtime's lock held. ``Q`` is a queue pair.

    ``open_wire`` opens the wire; ``tell`` is called with the key of a group and the queue pairs that are attached to it
    from now on.
    """

    def __init__(self, wire: Wire, open_wire: Callable[[], None], tell: Callable[[bytes, Sequence[Q]], None]) -> None:
        self._wire = wire
        self._open_wire = open_wire
        self._tell = tell
        #: By key (:func:`rdmacm.soft.wire.base.group_key`).
        self._groups: dict[bytes, _Group[Q]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def attached(self, key: bytes) -> Sequence[Q]:
        """The queue pairs that receive the packets of a group, by its :func:`group_key`."""
        group = self._groups.get(key)
        return () if group is None else group.qps

    def join(self, group: bytes, ifindex: int) -> None:
        """Make the host a member of a group; :meth:`leave` once for each call. ENOMEM: too many groups.

        Opening the wire, and joining the group on it, may fail as :meth:`Wire.open` and :meth:`Wire.join_group` do.
        """
        key = group_key(group, ifindex)
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) >= MAX_GROUPS:
                raise cm_error(errno.ENOMEM, f"{MAX_GROUPS} multicast groups are joined", "join_multicast")
            self._open_wire()
            self._wire.join_group(group, ifindex)
            found = self._groups[key] = _Group()
        found.members += 1

    def leave(self, group: bytes, ifindex: int) -> None:
        """Undo one :meth:`join`. Does nothing if the wire was closed meanwhile."""
        key = group_key(group, ifindex)
        found = self._groups.get(key)
        if found is not None:
            found.members -= 1
            if not found.members:
                del self._groups[key]
                self._wire.leave_group(group, ifindex)

    def attach(self, qp: Q, group: bytes, ifindex: int) -> None:
        """Give a queue pair the packets of a group. ENOMEM: too many queue pairs, or as :meth:`join`."""
        if len(self.attached(group_key(group, ifindex))) >= MAX_GROUP_QPS:
            text = f"{MAX_GROUP_QPS} queue pairs are attached to the group"
            raise cm_error(errno.ENOMEM, text, "attach_mcast")
        self.join(group, ifindex)
        key = group_key(group, ifindex)
        found = self._groups[key]
        found.qps = (*found.qps, qp)
        self._tell(key, found.qps)

    def detach(self, qp: Q, group: bytes, ifindex: int) -> None:
        """Undo :meth:`attach`."""
        key = group_key(group, ifindex)
        found = self._groups.get(key)
        if found is not None:
            found.qps = tuple(each for each in found.qps if each is not qp)
            self._tell(key, found.qps)
            self.leave(group, ifindex)

    def clear(self) -> None:
        """Forget all groups: the wire is closed."""
        self._groups.clear()
