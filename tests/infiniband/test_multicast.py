"""Multicast groups of ids on InfiniBand ports: the subnet administrator makes the port a member."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from infiniband.hosts import PATIENCE, IbHost
from infiniband.sites import Embedded, OpenSM, Site, Virtual
from rdmacm import CmEventType, CmId, EventChannel, McJoinFlag, PortSpace, RdmaError, SockAddrIB, UdParam
from rdmacm.address import Gid, InetAddr
from rdmacm.ib.session import SaSession
from rdmacm.proto.ipoib import broadcast_gid
from rdmacm.proto.sa.subnet import MCMemberRecord
from rdmacm.soft.ids.ib_link import group_gid

E = CmEventType
GROUP = ("239.1.2.3", 0)
MGID = Gid("ff12:4001:ffff::f01:203")
QKEY = 0x01234567


def joined(host: IbHost, group: object = GROUP, flag: McJoinFlag = McJoinFlag.FULLMEMBER) -> tuple[CmId, UdParam]:
    """A synchronous datagram id that has joined a group, and what its event says."""
    cmid = host.id(space=PortSpace.UDP)
    cmid.bind_addr(SockAddrIB(host.gid))
    cmid.join_multicast_ex(group, flag)  # type: ignore[arg-type]
    assert isinstance(cmid.event.param, UdParam)
    return cmid, cmid.event.param


def group_of(host: IbHost, mgid: Gid = MGID) -> MCMemberRecord | None:
    """The record of a group, as the administrator has it; None if there is no such group."""
    (subnet,) = host.provider.host.ib.subnets
    answers: list[tuple[MCMemberRecord, ...]] = []
    with host.provider.host.runtime.lock:
        view = subnet.view()
        assert view is not None
        subnet.sa.query_group(view.ib_port, mgid, PATIENCE, lambda found, _: answers.append(found))
    host.provider.drive(lambda: answers, PATIENCE)
    return answers[0][0] if answers[0] else None


def await_end_of(host: IbHost, mgid: Gid = MGID) -> None:
    """A port leaves without waiting for the answer."""
    for _ in range(100):
        if group_of(host, mgid) is None:
            return
    pytest.fail("the group is still there")


def test_join_creates_the_group_and_leaving_ends_it(a: IbHost, b: IbHost) -> None:
    cmid, param = joined(a)
    record = group_of(a)
    assert record is not None
    attr = param.ah_attr
    assert (param.qp_num, param.qkey, attr.gr.dgid, attr.port_num) == (0xFFFFFF, QKEY, MGID, 1)
    assert attr.is_global
    assert (attr.dlid, attr.sl, attr.static_rate) == (record.mlid, record.sl, record.rate)
    assert attr.dlid >= 0xC000
    other, theirs = joined(b)
    assert theirs.ah_attr.dlid == attr.dlid
    cmid.leave_multicast(GROUP)
    assert group_of(b) is not None
    other.destroy()
    await_end_of(a)
    cmid.destroy()


def test_last_join_of_a_port_ends_its_membership(a: IbHost) -> None:
    first, _ = joined(a)
    second, _ = joined(a)
    first.destroy()
    assert group_of(a) is not None
    second.leave_multicast(GROUP)
    await_end_of(a)
    second.destroy()


def test_administrator_assigns_a_gid(a: IbHost, site: Site) -> None:
    if not isinstance(site, OpenSM):
        pytest.skip("the simulated administrator assigns no GIDs")
    cmid, param = joined(a, ("0.0.0.0", 0))
    assert param.ah_attr.gr.dgid[:1] == b"\xff"
    mgid = param.ah_attr.gr.dgid
    again, theirs = joined(a, SockAddrIB(mgid))
    assert theirs.ah_attr.dlid == param.ah_attr.dlid
    for each in (cmid, again):
        each.destroy()
    await_end_of(a, mgid)


def test_member_that_only_sends(a: IbHost, b: IbHost) -> None:
    receiver, _ = joined(a)
    sender, param = joined(b, flag=McJoinFlag.SENDONLY_FULLMEMBER)
    assert param.ah_attr.gr.dgid == MGID
    sender.destroy()
    receiver.destroy()
    await_end_of(a)


def test_refusal_is_an_event(a: IbHost) -> None:
    """A group of another P_Key or Q_Key than the administrator has is refused."""
    with EventChannel(a.provider) as channel, a.id(channel, PortSpace.UDP) as cmid:
        cmid.bind_addr(SockAddrIB(a.gid))
        cmid.join_multicast(SockAddrIB(broadcast_gid(0xFFFF)), context="mine")  # its Q_Key is another one
        with channel.get_event(PATIENCE) as event:
            assert (event.type, event.status, event.join_context) == (E.MULTICAST_ERROR, -errno.EINVAL, "mine")
            assert event.error is not None
            assert "refused" in event.message
        cmid.leave_multicast(SockAddrIB(broadcast_gid(0xFFFF)))
    with a.id(space=PortSpace.UDP) as synchronous:
        synchronous.bind_addr(SockAddrIB(a.gid))
        with pytest.raises(RdmaError, match="refused"):
            synchronous.join_multicast(SockAddrIB(broadcast_gid(0xFFFF)))


def test_silent_administrator(own_site: Site) -> None:
    if not isinstance(own_site, Virtual):
        pytest.skip("it takes three seconds")
    with own_site.host("HostA") as host:
        own_site.end_administrator()
        with host.id(space=PortSpace.UDP) as cmid:
            cmid.bind_addr(SockAddrIB(host.gid))
            with pytest.raises(RdmaError) as error:
                cmid.join_multicast(GROUP)
        assert error.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_leaving_before_the_answer_leaves_no_membership(own_site: Site, steps: int) -> None:
    """Whichever answer is under way."""
    if not isinstance(own_site, Embedded):
        pytest.skip("tested with the administrators in memory")
    asked = 0
    wanted: Callable[..., int] = SaSession.query

    def counting(session: SaSession, *args: object) -> int:
        nonlocal asked
        asked += 1
        return wanted(session, *args)

    with own_site.host("HostA") as host, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaSession, "query", counting)
        with EventChannel(host.provider) as channel, host.id(channel, PortSpace.UDP) as cmid:
            cmid.bind_addr(SockAddrIB(host.gid))
            asked = 0
            cmid.join_multicast(GROUP)
            host.provider.drive(lambda: asked > min(steps, 1), PATIENCE)
            if steps == 2:
                host.provider.drive(lambda: own_site.subnet.sa.members(MGID), PATIENCE)
            cmid.leave_multicast(GROUP)
            host.provider.drive(lambda: not own_site.subnet.sa.members(MGID), PATIENCE)
            await_end_of(host)


@pytest.mark.parametrize(
    ("address", "space", "mgid"),
    [
        ("239.1.2.3", PortSpace.UDP, "ff12:4001:ffff::f01:203"),
        ("239.1.2.3", PortSpace.IPOIB, "ff12:401b:ffff::f01:203"),
        ("ff1e::1:2", PortSpace.UDP, "ff12:6001:ffff::1:2"),
        ("ff1e::1:2", PortSpace.IPOIB, "ff12:601b:ffff::1:2"),
        ("ff12:a01b::7", PortSpace.UDP, "ff12:a01b::7"),
        ("0.0.0.0", PortSpace.UDP, "::"),
        ("127.0.0.1", PortSpace.UDP, "::"),
        ("::", PortSpace.UDP, "::"),
    ],
)
def test_gid_of_a_group_is_rdma_cms(address: str, space: PortSpace, mgid: str) -> None:
    from rdmacm.address import parse_address

    assert group_gid(parse_address((address, 0)), broadcast_gid(0xFFFF), space) == Gid(mgid)


def test_address_that_is_no_group_is_refused() -> None:
    with pytest.raises(RdmaError):
        group_gid(InetAddr.loopback(2)._replace(ip=b"\x0a\0\0\1"), broadcast_gid(0xFFFF), PortSpace.UDP)
