"""Multicast groups on a simulated network: joining, messages to every member, leaving, and what is refused."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from rdmacm import CmEventType, CmId, IdOption, McJoinFlag, OptionLevel, PortSpace, SockAddrIB, UdParam, cma
from rdmacm.address import Gid
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft.device import groups
from rdmacm.verbs import AH, GRH, MR, SendFlag, SendWR, WCStatus, WROpcode
from support.hostile import sealed, throw
from support.pair import ADDRESSES, End, Ends, ends, refused
from support.roce_packets import BTH, DETH, RocePacket

E = CmEventType
UDP = PortSpace.UDP
QKEY = 0x01234567
GROUPS = {"ipv4": "239.1.2.3", "ipv6": "ff1e::1:2"}
MGIDS = {"ipv4": "::ffff:239.1.2.3", "ipv6": "ff1e::1:2"}
FAMILIES = pytest.mark.parametrize("family", GROUPS)
GROUP = GROUPS["ipv4"], 0


#: The memory of a test.
regions: list[MR] = []


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both
    while regions:
        regions.pop().close()


class Member:
    """An id of a host that has joined a group, with a queue pair and receives."""

    def __init__(self, end: End, family: str = "ipv4", flag: McJoinFlag = McJoinFlag.FULLMEMBER, tos: int = 0) -> None:
        self.id = end.id(UDP)
        index = 0 if end.host.name == "a" else 1
        self.id.bind_addr((ADDRESSES[family][index], 0))
        if tos:
            self.id.set_option(OptionLevel.ID, IdOption.TOS, tos)
        self.id.create_qp()
        self.region = self.id.reg_msgs(bytearray(8 * 1064))
        regions.append(self.region)
        for slot in range(8):
            self.id.post_recv(slot, self.region, slot * 1064, 1064)
        self.id.join_multicast_ex((GROUPS[family], 0), flag, context=self)
        event = end.event(E.MULTICAST_JOIN)
        assert event.join_context is self
        assert isinstance(event.param, UdParam)
        self.param = event.param

    def send(self, message: bytes, qkey: int | None = None) -> None:
        with AH(self.id.pd, self.param.ah_attr) as ah:
            wr = SendWR(1, WROpcode.SEND, [message], SendFlag.SIGNALED | SendFlag.INLINE)
            wr.set_wr_ud(ah, self.param.qp_num, self.param.qkey if qkey is None else qkey)
            self.id.qp.post_send(wr)

    def received(self) -> list[bytes]:
        found = []
        for wc in self.id.recv_cq.poll(100):
            assert wc.status is WCStatus.SUCCESS
            start = wc.wr_id * 1064
            found.append(bytes(self.region.buf[start + 40 : start + wc.byte_len]))
        return found


# -- joining ------------------------------------------------------------------------------------------


@FAMILIES
def test_event_says_how_to_send_to_the_group(both: Ends, family: str) -> None:
    member = Member(both.a, family, tos=0x28)
    attr = member.param.ah_attr
    assert (member.param.qp_num, member.param.qkey, member.param.private_data) == (0xFFFFFF, QKEY, b"")
    assert attr.is_global
    assert (attr.gr.dgid, attr.gr.hop_limit, attr.gr.traffic_class) == (Gid(MGIDS[family]), 64, 0x28)
    assert attr.gr.sgid_index == member.id.gid_index
    assert (attr.dlid, attr.port_num) == (0, 1)
    member.send(b"x")
    both.fabric.run(seconds=0.1)
    assert {entry.packet.traffic_class for entry in both.fabric.log} == {0x28}


@FAMILIES
def test_message_reaches_every_member_and_its_sender(both: Ends, family: str) -> None:
    a, b, other = Member(both.a, family), Member(both.b, family), Member(both.b, family)
    a.send(b"to all")
    both.fabric.run(seconds=0.1)
    assert [each.received() for each in (a, b, other)] == [[b"to all"]] * 3
    grh = GRH.unpack(bytes(b.region.buf[:40]))
    assert (grh.sgid, grh.dgid) == (a.id.route.sgid, Gid(MGIDS[family]))


def test_each_process_of_a_host_gets_a_copy(both: Ends) -> None:
    process = End(both.fabric.process("a", "a2"))
    cmid = process.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    cmid.create_qp()
    region = cmid.reg_msgs(bytearray(100))
    regions.append(region)
    cmid.post_recv(1, region, 0, 100)
    cmid.join_multicast(GROUP)
    process.event(E.MULTICAST_JOIN)
    sender, member = Member(both.b), Member(both.a)
    sender.send(b"to all")
    both.fabric.run(seconds=0.1)
    assert member.received() == [b"to all"]
    assert [wc.byte_len for wc in cmid.recv_cq.poll(10)] == [46]
    cmid.destroy()
    process.channel.close()


def test_member_that_only_sends_receives_nothing(both: Ends) -> None:
    sender, member = Member(both.a, flag=McJoinFlag.SENDONLY_FULLMEMBER), Member(both.b)
    sender.send(b"to all")
    both.fabric.run(seconds=0.1)
    assert (sender.received(), member.received()) == ([], [b"to all"])
    assert not both.a.host.wire.is_member(b"\xef\1\2\3", False)
    sender.id.leave_multicast(GROUP)


def test_id_joins_without_a_queue_pair(both: Ends) -> None:
    """The application then attaches its own one."""
    cmid = both.a.resolve(ADDRESSES["ipv4"][1], port_space=UDP)
    refused(lambda: cmid.join_multicast(GROUP))  # the route is resolved already
    cmid = both.a.id(UDP)
    cmid.resolve_addr((GROUPS["ipv4"], 0))
    both.a.event(E.ADDR_RESOLVED)
    cmid.join_multicast(GROUP)
    both.a.event(E.MULTICAST_JOIN)
    cmid.create_qp()
    cmid.qp.attach_mcast(MGIDS["ipv4"])
    region = cmid.reg_msgs(bytearray(100))
    regions.append(region)
    cmid.post_recv(1, region, 0, 100)
    Member(both.b).send(b"to all")
    both.fabric.run(seconds=0.1)
    assert len(cmid.recv_cq.poll(10)) == 1


def test_group_may_be_given_by_its_gid(both: Ends) -> None:
    cmid = both.a.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    cmid.join_multicast(SockAddrIB(Gid(MGIDS["ipv4"])))
    param = both.a.event(E.MULTICAST_JOIN).param
    assert isinstance(param, UdParam)
    assert param.ah_attr.gr.dgid == Gid(MGIDS["ipv4"])
    refused(lambda: cmid.join_multicast(SockAddrIB(Gid())))


def test_synchronous_id_waits_for_the_join(both: Ends) -> None:
    with CmId(None, UDP, provider=both.a.provider) as cmid:
        cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
        cmid.create_qp()
        cmid.join_multicast(GROUP, context="mine")
        assert cmid.event.type is E.MULTICAST_JOIN
        assert cmid.event.join_context == "mine"
        cmid.leave_multicast(GROUP)
        assert not both.a.host.wire.is_member(b"\xef\1\2\3", False)


# -- leaving ------------------------------------------------------------------------------------------


def test_member_that_leaves_receives_no_more(both: Ends) -> None:
    sender, member, other = Member(both.a), Member(both.b), Member(both.b)
    member.id.leave_multicast(GROUP)
    sender.send(b"to all")
    both.fabric.run(seconds=0.1)
    assert (member.received(), other.received()) == ([], [b"to all"])
    assert both.b.host.wire.is_member(b"\xef\1\2\3", False)
    other.id.leave_multicast(GROUP)
    assert not both.b.host.wire.is_member(b"\xef\1\2\3", False)
    refused(lambda: other.id.leave_multicast(GROUP), errno.EADDRNOTAVAIL)


def test_second_join_of_a_group_keeps_it(both: Ends) -> None:
    member = Member(both.b)
    member.id.join_multicast(GROUP)
    both.b.event(E.MULTICAST_JOIN)
    member.id.leave_multicast(GROUP)
    Member(both.a).send(b"to all")
    both.fabric.run(seconds=0.1)
    assert member.received() == [b"to all"]
    member.id.leave_multicast(GROUP)
    assert not both.b.host.wire.is_member(b"\xef\1\2\3", False)


def test_leaving_drops_the_event_that_nobody_has_fetched(both: Ends) -> None:
    cmid = both.a.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    cmid.join_multicast(GROUP)
    cmid.leave_multicast(GROUP)
    assert both.a.quiet()


def test_destroying_the_id_leaves_its_groups(both: Ends) -> None:
    member = Member(both.a)
    member.id.destroy()
    assert not both.a.host.wire.is_member(b"\xef\1\2\3", False)
    assert not len(both.a.provider.host.mux.groups)


def test_leaving_waits_for_the_acknowledgement(both: Ends) -> None:
    cmid = both.a.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    cmid.join_multicast(GROUP)
    event = both.a.channel.get_event(0)
    refused(lambda: cmid.leave_multicast(GROUP), errno.EDEADLK)
    leaving = threading.Thread(target=cmid.leave_multicast, args=(GROUP,))
    leaving.start()
    leaving.join(0.05)
    assert leaving.is_alive()
    event.ack()
    leaving.join()


def test_removed_device_leaves_its_groups(both: Ends) -> None:
    Member(both.a)
    network = both.a.host.network
    network.remove_interface(next(each.index for each in network.interfaces() if each.name == "eth0"))
    both.fabric.run(seconds=0.1)
    both.a.event(E.DEVICE_REMOVAL)
    assert not both.a.host.wire.is_member(b"\xef\1\2\3", False)


def test_link_that_goes_down_is_reported_and_the_group_stays(both: Ends) -> None:
    sender, member = Member(both.a), Member(both.b)
    network = both.b.host.network
    eth0 = next(each.index for each in network.interfaces() if each.name == "eth0")
    network.set_interface(eth0, up=False)
    both.fabric.run(seconds=0.1)
    assert both.b.event(E.ADDR_CHANGE).status == -errno.ENETDOWN
    sender.send(b"lost")
    network.set_interface(eth0, up=True)
    both.fabric.run(seconds=0.1)
    sender.send(b"to all")
    both.fabric.run(seconds=0.1)
    assert member.received() == [b"to all"]


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["10.0.0.9", "0.0.0.0", "127.0.0.1", "255.255.255.255", "ff1e::1", "fd00::2", "::"])
def test_address_that_is_no_group_of_the_family_is_refused(both: Ends, address: str) -> None:
    cmid = both.a.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    refused(lambda: cmid.join_multicast((address, 0)))
    assert both.a.quiet()
    refused(lambda: cmid.leave_multicast((address, 0)), errno.EADDRNOTAVAIL)


def test_join_needs_a_bound_datagram_id(both: Ends) -> None:
    unbound, wildcard, stream = both.a.id(UDP), both.a.id(UDP), both.a.id()
    wildcard.bind_addr(("", 0))
    stream.bind_addr((ADDRESSES["ipv4"][0], 0))
    for cmid in (unbound, wildcard, stream):
        refused(lambda cmid=cmid: cmid.join_multicast(GROUP))  # type: ignore[misc]
    refused(lambda: wildcard.join_multicast_ex(GROUP, 2))


def test_number_of_groups_is_bounded(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_GROUPS", 3)
    cmid = both.a.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    for number in (1, 2, 3, 3):
        cmid.join_multicast((f"239.0.0.{number}", 0))
    refused(lambda: cmid.join_multicast(("239.0.0.4", 0)), errno.ENOMEM)
    cmid.leave_multicast(("239.0.0.1", 0))
    cmid.join_multicast(("239.0.0.4", 0))


def test_queue_pair_that_cannot_be_attached_makes_an_error_event(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_GROUP_QPS", 1)
    first, second = Member(both.a), both.a.id(UDP)
    second.bind_addr((ADDRESSES["ipv4"][0], 0))
    second.create_qp()
    second.join_multicast(GROUP, context="mine")
    event = both.a.event(E.MULTICAST_ERROR)
    assert (event.status, event.join_context) == (-errno.ENOMEM, "mine")
    assert "attached" in event.message
    second.leave_multicast(GROUP)
    Member(both.b).send(b"to all")
    both.fabric.run(seconds=0.1)
    assert first.received() == [b"to all"]


def test_cs_structure_is_checked(both: Ends) -> None:
    cmid = both.a.id(UDP)
    cmid.bind_addr((ADDRESSES["ipv4"][0], 0))
    attr = cma.rdma_cm_join_mc_attr_ex()
    refused(lambda: cma.rdma_join_multicast_ex(cmid, attr))
    attr.addr, attr.join_flags = GROUP, cma.RDMA_MC_JOIN_FLAG_FULLMEMBER
    attr.comp_mask = cma.RDMA_CM_JOIN_MC_ATTR_ADDRESS
    refused(lambda: cma.rdma_join_multicast_ex(cmid, attr))
    attr.comp_mask |= cma.RDMA_CM_JOIN_MC_ATTR_RESERVED
    refused(lambda: cma.rdma_join_multicast_ex(cmid, attr), errno.ENOTSUP)
    attr.comp_mask = cma.RDMA_CM_JOIN_MC_ATTR_ADDRESS | cma.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
    cma.rdma_join_multicast_ex(cmid, attr, "mine")
    assert both.a.event(E.MULTICAST_JOIN).join_context == "mine"
    cma.rdma_leave_multicast(cmid, GROUP)


# -- queue pairs --------------------------------------------------------------------------------------


def test_attaching_is_checked(both: Ends) -> None:
    member = Member(both.a)
    qp = member.id.qp
    assert qp is not None
    qp.attach_mcast(Gid("ff1e::9"))
    qp.attach_mcast(Gid("ff1e::9"))
    qp.detach_mcast("ff1e::9")
    refused(lambda: qp.detach_mcast("ff1e::9"))
    refused(lambda: qp.attach_mcast("::ffff:10.0.0.1"))
    refused(lambda: qp.attach_mcast("fe80::1"))
    connected = both.a.resolve(ADDRESSES["ipv4"][1])
    connected.create_qp()
    refused(lambda: connected.qp.attach_mcast(MGIDS["ipv4"]))
    qp.close()
    refused(lambda: qp.attach_mcast("ff1e::9"), errno.EBADF)


def test_attached_queue_pair_receives_without_an_id_that_has_joined(both: Ends) -> None:
    sender, receiver = Member(both.a), Member(both.b)
    receiver.id.leave_multicast(GROUP)
    receiver.id.qp.attach_mcast(MGIDS["ipv4"])
    sender.send(b"to all")
    both.fabric.run(seconds=0.1)
    assert receiver.received() == [b"to all"]
    receiver.id.destroy_qp()
    assert not both.b.host.wire.is_member(b"\xef\1\2\3", False)


# -- strangers ----------------------------------------------------------------------------------------


def test_wrong_qkey_is_dropped(both: Ends) -> None:
    sender, member = Member(both.a), Member(both.b)
    sender.send(b"wrong", qkey=0x11)
    sender.send(b"right")
    both.fabric.run(seconds=0.1)
    assert member.received() == [b"right"]
    assert both.b.provider.query_counters().devices["soft_eth0"]["dropped_qkey"] == 1


@FAMILIES
def test_packets_for_nobody_are_dropped(both: Ends, family: str) -> None:
    """For QP 0xFFFFFF at a host's own address, and at a group without a queue pair; for a queue pair at a group."""
    member = Member(both.b, family)
    joined, other = ("239.9.9.9", "239.8.8.8") if family == "ipv4" else ("ff1e::9:9", "ff1e::8:8")
    quiet = both.b.id(UDP)
    quiet.bind_addr((ADDRESSES[family][1], 0))
    quiet.join_multicast((joined, 0))
    both.b.event(E.MULTICAST_JOIN)
    stranger = both.fabric.host("c", "10.0.0.3" if family == "ipv4" else "fd00::3")
    for address, number in (
        (ADDRESSES[family][1], 0xFFFFFF),
        (joined, 0xFFFFFF),
        (other, 0xFFFFFF),
        (GROUPS[family], member.id.qp.qp_num),
        (GROUPS[family], 1),
    ):
        packet = RocePacket(BTH(Opcode.UD_SEND_ONLY, number, 0), deth=DETH(QKEY, 5), payload=b"evil")
        throw(stranger, address, sealed(stranger, address, packet.pack()))
    both.fabric.run(seconds=0.1)
    assert member.received() == []
    assert both.b.provider.query_counters().udp["rx_group"] == 2
