"""The multicast groups of an InfiniBand port: joined and left by its subnet administrator (MCMemberRecord).

A membership is the port's. So the administrator is told to end it when the last join of the group is left, whichever id
that is of.

A port loses its memberships when it goes down, or gets another LID or another subnet manager. No transport reports
that, so the port is looked at every second while it is a member of a group. As in Linux, the port does not join again.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from rdmacm.address import Gid
from rdmacm.errors import Failure
from rdmacm.ib.session import SaSession
from rdmacm.ib.transport import IbPort
from rdmacm.progress.runtime import Runtime
from rdmacm.progress.timers import Timer
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.sa.subnet import JoinState, MCMemberRecord
from rdmacm.verbs.enums import PortState

#: Takes the group as the administrator has it, or why the port is not a member.
GroupDone: TypeAlias = Callable[["MCMemberRecord | None", "Failure | None"], None]

#: Seconds that each query may take, as in Linux.
_TIMEOUT = 3.0
#: Seconds between two looks at the port.
_LOOK_INTERVAL = 1.0
#: Bit 12 of CapabilityMask2: the administrator knows send-only full members.
_KNOWS_SEND_ONLY = 1 << 12
_ANY_GROUP = Gid()


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What an id wants to join.

    - ``mgid``: the group; the zero GID to have the administrator assign one.
    - ``like``: the broadcast group of the partition. SL, flow label and traffic class are those of this group.
    - ``port_gid``, ``pkey``: of the port.
    - ``qkey``: 0 for that of ``like``, and then MTU, rate and hop limit are its as well.
    - ``send_only``: whether to join as a send-only full member.
    """

    mgid: Gid
    like: Gid
    port_gid: Gid
    pkey: int
    qkey: int
    send_only: bool

    @property
    def state(self) -> JoinState:
        return JoinState.SEND_ONLY_FULL_MEMBER if self.send_only else JoinState.FULL_MEMBER


class PortGroups:
    """See the module. Used with the runtime's lock held.

    ``find_port()`` returns the port as it is now; OSError if it is gone, ETIMEDOUT if it is only slow.
    """

    def __init__(self, runtime: Runtime, sa: SaSession, find_port: Callable[[], IbPort]) -> None:
        self.sa = sa
        self._runtime = runtime
        self._find_port = find_port
        #: How many joins each membership has, by group and join state: from when the administrator is asked.
        self.joins: Counter[tuple[Gid, JoinState]] = Counter()
        #: The joins that have succeeded, oldest first, and the timer of the next look at their port.
        self._joined: dict[PortJoin, None] = {}
        self._timer: Timer | None = None

    def join(self, port: IbPort, request: GroupRequest, done: GroupDone) -> PortJoin:
        """Join a group; ``done`` is called once, not before this returns, unless the join is left before.

        The failure's errno is ETIMEDOUT, EINVAL (refused), EIO, EOPNOTSUPP (no send-only members), or EADDRNOTAVAIL
        (``like`` has to be known, and is not). When the port loses the membership, ``done`` is called once more, with
        ENETRESET. Raises what :meth:`SaSession.query` raises.
        """
        found = PortJoin(self, port, request, done)
        found.start()
        return found

    def watch(self, join: PortJoin) -> None:
        """Look at the port as long as this join is not left."""
        self._joined[join] = None
        self._look_later()

    def unwatch(self, join: PortJoin) -> None:
        self._joined.pop(join, None)
        if not self._joined:
            self.close()

    def close(self) -> None:
        """Look at the port no longer."""
        self._joined.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self._joined and self._timer is None:
            self._timer = self._runtime.call_at(self._runtime.clock() + _LOOK_INTERVAL, self._look)

    def _look(self, _now: float) -> None:
        self._timer = None
        port: IbPort | None = None
        try:
            port = self._find_port()
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                self._look_later()
                return
        for join in list(self._joined):
            reason = _why_lost(join.port, port)
            if reason:
                del self._joined[join]
                join.lost(reason)
        self._look_later()


class PortJoin:
    """One join of a group."""

    def __init__(self, groups: PortGroups, port: IbPort, request: GroupRequest, done: GroupDone) -> None:
        self._groups = groups
        #: The port as it was when the administrator was asked.
        self.port = port
        self._request = request
        self._done = done
        #: The membership that is counted, if any.
        self._membership: tuple[Gid, JoinState] | None = None
        #: The query that has no effect if it is dropped.
        self._query: int | None = None
        #: Whether the administrator has been asked to make the port a member, and has not answered.
        self._is_joining = False
        self._is_left = False

    # -- the steps ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask whether there are send-only members, if that matters, and then for the broadcast group."""
        sa = self._groups.sa
        if self._request.send_only:
            self._query = sa.query_capabilities(self.port, _TIMEOUT, self._capabilities_answered)
        else:
            self._ask_group()

    def _capabilities_answered(self, mask2: int, failure: Failure | None) -> None:
        self._query = None
        if failure is None and not mask2 & _KNOWS_SEND_ONLY:
            text = "the subnet administrator knows no send-only full members"
            failure = Failure(errno.EOPNOTSUPP, "group", text, "a full member")
        if failure is not None:
            self._done(None, failure)
        else:
            self._continue(self._ask_group)

    def _ask_group(self) -> None:
        self._query = self._groups.sa.query_group(self.port, self._request.like, _TIMEOUT, self._group_answered)

    def _group_answered(self, found: tuple[MCMemberRecord, ...], failure: Failure | None) -> None:
        self._query = None
        if failure is not None and (failure.errno != errno.ENODATA or not self._request.qkey):
            missing = failure.errno == errno.ENODATA
            self._done(None, Failure(errno.EADDRNOTAVAIL, "group", failure.message) if missing else failure)
            return
        self._continue(lambda: self._join(found[0] if found else MCMemberRecord()))

    def _join(self, like: MCMemberRecord) -> None:
        wanted = self._request
        fields: dict[str, Any] = {
            "mgid": wanted.mgid,
            "port_gid": wanted.port_gid,
            "q_key": wanted.qkey or like.q_key,
            "pkey": wanted.pkey,
            "sl": like.sl,
            "flow_label": like.flow_label,
            "traffic_class": like.traffic_class,
            "join_state": int(wanted.state),
        }
        if not wanted.qkey:
            for name in ("mtu", "mtu_selector", "rate", "rate_selector", "hop_limit"):
                fields[name] = getattr(like, name)
        sa = self._groups.sa
        sa.change_member(self.port, SaMethod.SET, _TIMEOUT, self._joined, fields)
        self._is_joining = True
        if wanted.mgid != _ANY_GROUP:
            self._count(wanted.mgid)

    def _joined(self, found: tuple[MCMemberRecord, ...], failure: Failure | None) -> None:
        self._is_joining = False
        if failure is not None:
            if self._membership is not None:
                self._groups.joins[self._membership] -= 1
                self._membership = None
            if not self._is_left:
                self._done(None, failure)
            return
        if self._membership is None:
            self._count(found[0].mgid)
        if self._is_left:
            self._release()
        else:
            self._groups.watch(self)
            self._done(found[0], None)

    def _continue(self, step: Callable[[], None]) -> None:
        """Take the next step, which may fail as a query does."""
        try:
            step()
        except OSError as error:
            self._done(None, Failure(error.errno or errno.EIO, "group", str(error.strerror)))

    # -- the end --------------------------------------------------------------------------------------

    def lost(self, reason: str) -> None:
        """The port is no longer a member. Leaving tells the administrator nothing then."""
        self._discount()
        hint = "leaving the group, and joining again"
        self._done(None, Failure(errno.ENETRESET, "group", f"the membership is lost: {reason}", hint))

    def leave(self) -> None:
        """End the join. The administrator is told, without waiting for its answer."""
        if self._is_left:
            return
        self._is_left = True
        self._groups.unwatch(self)
        if self._query is not None:
            self._groups.sa.cancel(self._query)
        if not self._is_joining:  # else once it has answered
            self._release()

    def _count(self, mgid: Gid) -> None:
        self._membership = mgid, self._request.state
        self._groups.joins[self._membership] += 1

    def _discount(self) -> bool:
        """Count the membership no longer; whether it was the last one."""
        if self._membership is None:
            return False
        joins, membership = self._groups.joins, self._membership
        self._membership = None
        joins[membership] -= 1
        if joins[membership] > 0:
            return False
        del joins[membership]
        return True

    def _release(self) -> None:
        membership = self._membership
        if membership is not None and self._discount():
            fields = {"mgid": membership[0], "port_gid": self._request.port_gid, "join_state": int(membership[1])}
            with suppress(OSError):  # no administrator is known any more
                self._groups.sa.change_member(self.port, SaMethod.DELETE, _TIMEOUT, _ignore, fields)


def _ignore(found: tuple[MCMemberRecord, ...], failure: Failure | None) -> None:
    """The outcome of leaving a group changes nothing here."""


def _why_lost(before: IbPort, after: IbPort | None) -> str:
    """Why a port has lost its memberships, in words; empty if it has not. ``after`` is None if it is gone."""
    name = f"{before.device} port {before.port_num}"
    if after is None:
        return f"{name} is gone"
    if after.state is not PortState.ACTIVE:
        return f"{name} went down"
    if after.lid != before.lid:
        return f"{name} has another LID"
    if after.sm_lid != before.sm_lid:
        return f"{name} has another subnet manager"
    return ""
