"""The seam for multicast: what :class:`rdmacm.provider.IdBackend` has for groups.

The rules are those of :mod:`rdmacm.provider`.
"""

from __future__ import annotations

from typing import Protocol

from rdmacm.address import Address


class GroupJoin(Protocol):
    """One join of a group by an id: the API's object. A backend holds it until the group is left."""

    def _reported(self, thread: int, /) -> None:
        """A thread, which calls this with the lock held, fetches an event of this join."""


class MulticastBackend(Protocol):
    """The part of an id backend that joins multicast groups."""

    def join_multicast(self, join: GroupJoin, group: Address, send_only: bool) -> None:
        """Join a group on the id's port, rdma_join_multicast(3). Ends in MULTICAST_JOIN or MULTICAST_ERROR.

        The events have ``join``. MULTICAST_JOIN has a :class:`rdmacm.UdParam`: the address vector of the group with its
        MGID, 0xFFFFFF and the id's Q_Key. MULTICAST_ERROR, also later when the group is lost, has ``status`` and
        ``message``. With ``send_only`` the host receives nothing from the group. EINVAL: the state, the id is not of
        type UD or is bound to no device, not a multicast address; ENOMEM: too many groups; also the errors of opening
        the wire.
        """

    def leave_multicast(self, join: GroupJoin) -> None:
        """End a join, rdma_leave_multicast(3): its events that are not fetched are dropped, and none follows."""
