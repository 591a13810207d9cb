"""The multicast groups of an id: rdma_join_multicast(3), rdma_leave_multicast(3)."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from rdmacm.address import Address, Gid
from rdmacm.cmid.acks import ACK_LOCK, EventOwner, wait_acked
from rdmacm.constants import McJoinFlag
from rdmacm.errors import RdmaError, cm_error
from rdmacm.provider.connparam import UdParam
from rdmacm.provider.multicast import MulticastBackend

if TYPE_CHECKING:
    from rdmacm.verbs.qp import QP


class GroupMembership(EventOwner):
    """One join of a group; implements :class:`rdmacm.provider.multicast.GroupJoin`."""

    __slots__ = ("attached", "context", "flag", "group")

    def __init__(self, group: Address, flag: McJoinFlag, context: object) -> None:
        super().__init__()
        #: The address of the group, as it was joined.
        self.group: Address = group
        #: Whether it receives.
        self.flag: McJoinFlag = flag
        #: The user's own object.
        self.context: object = context
        #: The queue pair that was attached to the group, and the group's MGID and MLID.
        self.attached: tuple[QP, Gid, int] | None = None


class Groups(list[GroupMembership]):
    """The groups that an id has joined, oldest first. It changes with ACK_LOCK held."""

    __slots__ = ()

    def join(self, backend: MulticastBackend, group: Address, flag: McJoinFlag, context: object) -> GroupMembership:
        """Begin to join a group; the outcome is an event."""
        membership = GroupMembership(group, flag, context)
        with ACK_LOCK:  # before the event, which another thread may fetch at once
            self.append(membership)
        try:
            backend.join_multicast(membership, group, flag is McJoinFlag.SENDONLY_FULLMEMBER)
        except BaseException:
            self.drop(backend, membership)
            raise
        return membership

    def find(self, group: Address) -> GroupMembership:
        """The oldest join of a group; EADDRNOTAVAIL if there is none."""
        for membership in self[:]:
            if membership.group == group:
                return membership
        raise cm_error(errno.EADDRNOTAVAIL, "the id has not joined the group", "leave_multicast", str(group))

    def leave(self, backend: MulticastBackend, membership: GroupMembership, *, wait: bool) -> None:
        """End a join, and wait until other threads have acknowledged its events."""
        membership._check_holder("leave_multicast", "group", str(membership.group))
        self.drop(backend, membership)
        if wait:
            wait_acked(lambda: not membership._holders, "leave_multicast")

    def drop(self, backend: MulticastBackend, membership: GroupMembership) -> None:
        """End a join, without waiting."""
        with ACK_LOCK:
            if membership in self:
                self.remove(membership)
        backend.leave_multicast(membership)
        self._detach(membership)

    def attach(self, membership: GroupMembership, qp: QP | None, param: UdParam) -> RdmaError | None:
        """Attach the id's queue pair to a group that was joined; return the error if that fails."""
        if qp is None or membership.flag is not McJoinFlag.FULLMEMBER:
            return None
        attached = qp, param.ah_attr.gr.dgid, param.ah_attr.dlid
        try:
            qp.attach_mcast(*attached[1:])
        except RdmaError as error:
            return error
        membership.attached = attached
        if membership not in self:  # another thread has left it meanwhile
            self._detach(membership)
        return None

    def _detach(self, membership: GroupMembership) -> None:
        """Detach the queue pair from a group, unless another join of the group needs it."""
        attached, membership.attached = membership.attached, None
        if attached is not None and all(each.attached != attached for each in self[:]):
            qp, mgid, mlid = attached
            if not qp.closed:
                qp.detach_mcast(mgid, mlid)
