"""Datagrams to multicast groups on the socket layer of the compiled core, over the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from core.test_wire_datagrams import INLINE, QKEY, ROOM, dropped, make_end
from rdmacm.address import Gid
from rdmacm.proto.constants import MULTICAST_QPN, ROCE_PORT
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.grh import GRH
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.ud import UdSend
from rdmacm.proto.work import SendWork
from rdmacm.verbs import (
    AH,
    AHAttr,
    GlobalRoute,
    RecvWR,
    SendWR,
    WROpcode,
)
from support.clock import eventually
from support.ud import make_ud

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

HOST, GROUP = "127.0.0.1", "239.9.8.7"  # IPv6 has no route to a group here


class Members:
    """Two queue pairs that are attached to a group and have joined the port, and one that sends to it."""

    def __init__(self) -> None:
        self.gid = Gid.from_ip(ip_address(GROUP).packed)
        self.ends = [make_end() for _ in range(3)]
        self.sender = self.ends[0]
        for end in self.ends[1:]:
            end.qp.attach_mcast(self.gid)
            end.receive(8)
        index = next(
            row.gid_index for row in self.sender.context.query_gid_table() if row.gid.ip == ip_address(HOST).packed
        )
        gr = GlobalRoute(dgid=self.gid, sgid_index=index, hop_limit=9, traffic_class=0x2E)
        self.ah = AH(self.sender.pd, AHAttr(is_global=True, gr=gr))
        self.send(b"the first finds the route")
        for end in self.ends[1:]:
            end.completions(1)

    def send(self, *messages: bytes, **more: object) -> None:
        fields = {"ah": self.ah, "remote_qpn": MULTICAST_QPN, "remote_qkey": QKEY, "send_flags": INLINE, **more}
        self.sender.qp.post_send([SendWR(n, sg=[m], **fields) for n, m in enumerate(messages)])  # type: ignore[arg-type]

    def close(self) -> None:
        self.ah.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def members() -> Iterator[Members]:
    members = Members()
    yield members
    members.close()


def test_messages_to_a_group(members: Members) -> None:
    sender, *attached = members.ends
    before = sender.taken
    members.send(b"every", b"member")
    for end in attached:
        assert [(wc.byte_len, wc.src_qp) for wc in end.completions(2)] == [
            (45, sender.qp.qp_num),
            (46, sender.qp.qp_num),
        ]
        assert end.message(1, 5) == b"every"
        assert end.backend.core is not None
        grh = GRH.unpack(memoryview(end.memory)[2 * ROOM :])
        assert (grh.sgid.ip, grh.dgid, grh.traffic_class, grh.hop_limit) == (
            *(ip_address(HOST).packed, members.gid, 0x2E, 9),
        )
    assert sender.taken == before + 2
    assert members.ah.core_route is not None
    sender.qp.attach_mcast(members.gid)
    sender.receive(1)
    members.send(b"and itself")
    assert sender.completions(1)[0].byte_len == 50
    attached[0].qp.detach_mcast(members.gid)
    members.send(b"without one")
    assert [wc.byte_len for wc in attached[1].completions(2)] == [50, 51]
    assert [wc.byte_len for wc in attached[0].completions(1)] == [50]
    assert not attached[0].cq.poll(1)


def test_what_a_group_drops(members: Members) -> None:
    sender, one, other = members.ends
    mux, engine = sender.backend._mux, make_ud(sender.qp.qp_num)
    stray, state, packets = mux.wire.counters["stray"], mux.dropped["state"], mux.dropped["packet"]
    before, taken = dropped(one), sender.taken
    other.qp.to_error()
    other.completions(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
        raw.bind(("127.0.0.1", 0))
        icrc = icrc_between(*(ip_address(each).packed for each in (HOST, GROUP)), raw.getsockname()[1])
        for number, (qpn, qkey) in enumerate(((one.qp.qp_num, QKEY), (MULTICAST_QPN, 5), (MULTICAST_QPN, QKEY))):
            work = SendWork(number, WROpcode.SEND, [memoryview(b"%d" % number)])
            engine.post_send(UdSend(work, "way", icrc, qpn, qkey))
            ((_, pieces, _),) = engine.datagrams(1, 0)
            raw.sendto(b"".join(pieces), (GROUP, ROCE_PORT))
    assert [wc.byte_len for wc in one.completions(1)] == [41]

    def counted() -> bool:
        mux.see_core_wire()
        found = mux.wire.counters["stray"], mux.dropped["state"], mux.dropped["packet"]
        return found == (stray + 1, state + 2, packets + 1)

    eventually(counted, "not all are counted")
    assert dropped(one).get("dropped_qkey", 0) == before.get("dropped_qkey", 0) + 1
    assert sender.taken == taken + 2


def test_member_that_has_not_joined_gets_its_messages(members: Members) -> None:
    """Python delivers to all of a group where the engine of one is not made yet."""
    one = members.ends[1]
    late = make_end(srq=True)
    srq = late.qp.srq
    assert srq is not None
    srq.post_recv([RecvWR(n, [late.region.sge(n * ROOM, ROOM)]) for n in range(4)])
    late.qp.attach_mcast(members.gid)
    assert late.backend.core is None
    for number in range(3):
        members.send(b"late")
        assert [wc.wr_id for wc in late.completions(1)] == [number]
        assert len(one.completions(1)) == 1
    assert late.backend.core is not None
    late.qp.close()
    srq.close()
    late.close()


def test_many_groups_are_read_by_the_thread(members: Members) -> None:
    """More sockets than it has had room for at first."""
    _, one, _ = members.ends
    gids = [Gid.from_ip(ip_address(f"239.9.9.{number}").packed) for number in range(1, 16)]
    for gid in gids:  # net.ipv4.igmp_max_memberships is of one socket
        one.qp.attach_mcast(gid)
    one.receive(20)
    sender = members.sender
    gr = GlobalRoute(dgid=gids[-1], sgid_index=members.ah.attr.gr.sgid_index)
    with AH(sender.pd, AHAttr(is_global=True, gr=gr)) as ah:
        for _ in range(3):
            members.send(b"there", ah=ah)
            assert len(one.completions(1)) == 1
    for gid in gids:
        one.qp.detach_mcast(gid)
    members.send(b"still a member")
    assert len(one.completions(1)) == 1
