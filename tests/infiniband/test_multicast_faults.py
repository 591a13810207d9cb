"""Multicast groups on an InfiniBand port that loses its membership, and on a subnet that loses datagrams."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from infiniband.hosts import IbHost, event
from infiniband.sites import Virtual
from rdmacm import CmEventType, CmId, EventChannel, PortSpace, RdmaError, SockAddrIB
from rdmacm.address import Gid
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.sa.subnet import JoinState, MCMemberRecord
from rdmacm.testing import SubnetMad, Verdict
from rdmacm.verbs.enums import PortState
from support.rows import for_each

E = CmEventType
GROUPS = (("239.1.2.3", 0), ("239.1.2.4", 0))
MGIDS = (Gid("ff12:4001:ffff::f01:203"), Gid("ff12:4001:ffff::f01:204"))


@pytest.fixture
def site() -> Virtual:
    return Virtual()


@pytest.fixture
def host(site: Virtual) -> Iterator[IbHost]:
    with site.host("HostA") as host:
        yield host


def bound(host: IbHost, channel: EventChannel) -> CmId:
    cmid = host.id(channel, PortSpace.UDP)
    cmid.bind_addr(SockAddrIB(host.gid))
    return cmid


def join(cmid: CmId, channel: EventChannel, index: int = 0) -> None:
    cmid.join_multicast(GROUPS[index], context=index)
    with event(channel) as joined:
        assert (joined.type, joined.join_context) == (E.MULTICAST_JOIN, index)


def changes_of_members(site: Virtual) -> list[int]:
    """The methods of the requests to join and to leave that have reached the administrator."""
    requests = [mad for _, _, mad in site.subnet.sa.requests if mad.attribute_id == MCMemberRecord.ATTRIBUTE]
    return [mad.method for mad in requests if mad.method in (SaMethod.SET, SaMethod.DELETE)]


LOSSES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"state": PortState.DOWN}, {"state": PortState.ACTIVE}, "went down"),
    ({"state": PortState.INIT}, {"state": PortState.ACTIVE}, "went down"),
    ({"lid": 77}, {}, "has another LID"),
    ({"sm_lid": 9}, {"sm_lid": 1}, "has another subnet manager"),
]


@for_each(("loss", "recovery", "reason"), LOSSES)
def test_lost_membership_is_an_event(loss: dict[str, Any], recovery: dict[str, Any], reason: str) -> None:
    """Of each id that has joined, once. Leaving says nothing to the administrator; joining again makes a member."""
    site = Virtual()
    with site.host("HostA") as host, EventChannel(host.provider) as channel:
        first, second = bound(host, channel), bound(host, channel)
        for cmid, index in ((first, 0), (first, 1), (second, 0)):
            join(cmid, channel, index)
        site.subnet.change_port("HostA", **loss)
        found = []
        for _ in range(3):
            with event(channel) as lost:
                assert (lost.type, lost.status) == (E.MULTICAST_ERROR, -errno.ENETRESET)
                assert reason in lost.message
                found.append((lost.id, lost.join_context))
        assert found == [(first, 0), (first, 1), (second, 0)]
        asked = len(changes_of_members(site))
        first.leave_multicast(GROUPS[0])
        first.leave_multicast(GROUPS[1])
        site.fabric.run(seconds=5)
        assert len(changes_of_members(site)) == asked
        site.subnet.change_port("HostA", **recovery)
        join(first, channel)
        assert site.subnet.sa.members(MGIDS[0])
        first.destroy()
        site.fabric.run(seconds=1)
        assert changes_of_members(site)[-1] == SaMethod.DELETE, "second has no membership that keeps the group"
        second.destroy()


def test_synchronous_join_reports_a_membership_lost_before(site: Virtual, host: IbHost) -> None:
    """The next call that waits gets the event, as in C."""
    with host.id(space=PortSpace.UDP) as cmid:
        cmid.bind_addr(SockAddrIB(host.gid))
        cmid.join_multicast(GROUPS[0])
        site.subnet.change_port("HostA", state=PortState.DOWN)
        site.fabric.run(seconds=2)
        site.subnet.change_port("HostA", state=PortState.ACTIVE)
        with pytest.raises(RdmaError, match="went down") as caught:
            cmid.join_multicast(GROUPS[1])
        assert caught.value.errno == errno.ENETRESET


def test_port_without_groups_is_not_looked_at(site: Virtual, host: IbHost) -> None:
    with EventChannel(host.provider) as channel, bound(host, channel) as cmid:
        join(cmid, channel)
        cmid.leave_multicast(GROUPS[0])
        site.fabric.run(seconds=5)
        assert host.provider.host.runtime.next_deadline() is None


@for_each(("kind", "source"), [("SET MC_MEMBER_RECORD", "HostA"), ("GET_RESP MC_MEMBER_RECORD", "sa")])
def test_lost_join_or_answer_is_repeated(kind: str, source: str) -> None:
    """Three times. The administrator counts a join that it gets several times once."""
    site = Virtual()
    lost: list[str] = []

    def lose(mad: SubnetMad) -> Verdict | None:
        if (mad.kind, mad.source) != (kind, source) or len(lost) == 3:
            return None
        lost.append(mad.kind)
        return Verdict(copies=0)

    with site.host("HostA") as host, EventChannel(host.provider) as channel, bound(host, channel) as cmid:
        site.subnet.faults = lose
        began = site.fabric.now
        join(cmid, channel)
        assert len(lost) == 3
        assert site.fabric.now - began < 3.0
        assert site.subnet.sa.members(MGIDS[0]) == {host.gid: JoinState.FULL_MEMBER}
        cmid.leave_multicast(GROUPS[0])
        site.fabric.run(seconds=1)
        assert not site.subnet.sa.members(MGIDS[0])


def test_lost_leave_is_repeated(site: Virtual, host: IbHost) -> None:
    with EventChannel(host.provider) as channel, bound(host, channel) as cmid:
        join(cmid, channel)
        lost: list[SubnetMad] = []

        def lose(mad: SubnetMad) -> Verdict | None:
            if mad.source != "HostA" or len(lost) == 2:
                return None
            lost.append(mad)
            return Verdict(copies=0)

        site.subnet.faults = lose
        cmid.leave_multicast(GROUPS[0])
        site.fabric.run(seconds=3)
        assert len(lost) == 2
        assert not site.subnet.sa.members(MGIDS[0])
