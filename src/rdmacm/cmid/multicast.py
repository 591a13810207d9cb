"""Multicast groups of an id: rdma_join_multicast(3), rdma_join_multicast_ex(3), rdma_leave_multicast(3)."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from rdmacm.address import Address, Gid, SockAddr, lookup_address
from rdmacm.cmid.acks import ACK_LOCK, wait_acked
from rdmacm.cmid.connecting import ConnectionBase
from rdmacm.constants import CmEventType, McJoinFlag, PortSpace
from rdmacm.errors import RdmaError, cm_error
from rdmacm.provider.connparam import UdParam
from rdmacm.verbs.checks import member
from rdmacm.verbs.enums import QPType

if TYPE_CHECKING:
    from rdmacm.verbs.qp import QP

__all__ = ["GroupMembership", "MulticastBase"]


class GroupMembership:
    """One join of a group; implements :class:`rdmacm.provider.multicast.GroupJoin`."""

    __slots__ = ("attached", "completed", "context", "flag", "group", "holders", "reported")

    def __init__(self, group: Address, flag: McJoinFlag, context: object) -> None:
        #: The address of the group, as it was joined.
        self.group = group
        #: Whether it receives.
        self.flag = flag
        #: The user's own object.
        self.context = context
        #: The queue pair that was attached to the group, and the group's MGID and MLID.
        self.attached: tuple[QP, Gid, int] | None = None
        #: How many of its events were fetched, and acknowledged; the threads that hold one, once for each event.
        self.reported = 0
        self.completed = 0
        self.holders: list[int] = []

    def _reported(self) -> None:
        self.reported += 1
        self.holders.append(threading.get_ident())

    def acknowledged(self, thread: int) -> None:
        """Count an event that ``thread`` fetched as acknowledged (ACK_LOCK is held)."""
        self.completed += 1
        if thread in self.holders:
            self.holders.remove(thread)


class MulticastBase(ConnectionBase):
    """The part of :class:`rdmacm.CmId` that joins multicast groups."""

    __slots__ = ("_memberships",)

    def _prepare(self, ps: PortSpace, qp_type: QPType) -> None:
        super()._prepare(ps, qp_type)
        #: The groups that it has joined, oldest first; replaced with ACK_LOCK held.
        self._memberships: tuple[GroupMembership, ...] = ()

    def join_multicast(self, address: SockAddr, context: object = None) -> None:
        """Join a multicast group on the id's port, to send to it and receive from it, rdma_join_multicast(3).

        Ends in MULTICAST_JOIN, whose ``event.param`` has the address vector, queue pair number 0xFFFFFF and the Q_Key
        to send with, or in MULTICAST_ERROR; both have ``context`` as ``event.join_context``. As the event is fetched,
        the id's queue pair is attached to the group: it receives its messages, the id's own as well. An id without one
        attaches the application's with :meth:`rdmacm.verbs.QP.attach_mcast`.

        EINVAL: the id is not of type UD, is not bound to a device, or is resolving or connected; not a multicast
        address, or one of another family than the id's; ENOMEM: ``max_mcast_grp`` groups of the device are in use.
        """
        self.join_multicast_ex(address, McJoinFlag.FULLMEMBER, context)

    def join_multicast_ex(
        self, address: SockAddr, join_flags: int = McJoinFlag.FULLMEMBER, context: object = None
    ) -> None:
        """As :meth:`join_multicast`; with SENDONLY_FULLMEMBER to send only, rdma_join_multicast_ex(3).

        ``join_flags``: a :class:`McJoinFlag`. On InfiniBand, EOPNOTSUPP if the subnet administrator lacks send-only
        members.
        """
        self._check_alive("join_multicast")
        flag = member(McJoinFlag, join_flags, "join_flags", "join_multicast")
        membership = GroupMembership(lookup_address(address), flag, context)
        with ACK_LOCK:  # before the event, which another thread may fetch at once
            self._memberships = (*self._memberships, membership)
        try:
            self._backend.join_multicast(membership, membership.group, flag is McJoinFlag.SENDONLY_FULLMEMBER)
            if self._private:
                self._await(CmEventType.MULTICAST_JOIN, CmEventType.MULTICAST_ERROR)
        except BaseException:
            self._leave(membership)
            raise

    def leave_multicast(self, address: SockAddr) -> None:
        """Leave a group, rdma_leave_multicast(3), with the address that it was joined with.

        The id's queue pair receives no more of its messages. Waits until other threads have acknowledged the events of
        this join; EDEADLK where this thread holds one. Also before MULTICAST_JOIN has come. EADDRNOTAVAIL: it was not
        joined. Destroying the id leaves all groups.
        """
        self._check_alive("leave_multicast")
        group = lookup_address(address)
        found = next((each for each in self._memberships if each.group == group), None)
        if found is None:
            raise cm_error(errno.EADDRNOTAVAIL, "the id has not joined the group", "leave_multicast", str(group))
        if self._private:
            self._release_event()
        if threading.get_ident() in found.holders:
            text = "this thread holds an event of the group, and would wait for itself"
            raise cm_error(errno.EDEADLK, text, "leave_multicast", str(group), "ack() the event first")
        self._leave(found)
        if not self._channel._is_inherited:
            wait_acked(lambda: found.completed >= found.reported)

    def _leave(self, membership: GroupMembership) -> None:
        with ACK_LOCK:
            self._memberships = tuple(each for each in self._memberships if each is not membership)
        self._backend.leave_multicast(membership)
        self._detach_group(membership)

    def _detach_group(self, membership: GroupMembership) -> None:
        """Detach the queue pair from a group, unless another join of the group needs it."""
        attached, membership.attached = membership.attached, None
        if attached is not None and all(each.attached != attached for each in self._memberships):
            qp, mgid, mlid = attached
            if not qp.closed:
                qp.detach_mcast(mgid, mlid)

    def _attach_group(self, membership: GroupMembership, param: UdParam) -> RdmaError | None:
        """Attach the queue pair to a group that was joined; return the error if that fails."""
        qp = self._qp
        if qp is None or membership.flag is not McJoinFlag.FULLMEMBER:
            return None
        attached = qp, param.ah_attr.gr.dgid, param.ah_attr.dlid
        try:
            qp.attach_mcast(*attached[1:])
        except RdmaError as error:
            return error
        membership.attached = attached
        if membership not in self._memberships:  # another thread has left it meanwhile
            self._detach_group(membership)
        return None
