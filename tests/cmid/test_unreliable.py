"""Ids with unreliable connected queue pairs on a simulated network."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from rdmacm import AddrInfo, CmEventType, CmId, ConnParam, PortSpace, QPType, RaiFlag, create_ep
from rdmacm.proto.cm.engine import Agent
from rdmacm.proto.cm.messages import REQ
from rdmacm.verbs import CQ, QP, QPAttrMask, QPCap, QPInitAttr, QPState, SendFlag, WCStatus
from support.pair import ADDRESSES, PORT, Ends, ends, refused

E, M = CmEventType, QPAttrMask
A, B = ADDRESSES["ipv4"]
UC = QPType.UC


def equip(cmid: CmId) -> None:
    cmid.create_qp(QPInitAttr(UC, cap=QPCap(16, 16, 4, 4, 256), sq_sig_all=True))


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


def asked(both: Ends, *, listens: QPType = UC) -> tuple[CmId, CmId]:
    """A resolved id of type UC, and a listener."""
    listener = both.b.id(PortSpace.IB, qp_type=listens)
    listener.bind_addr((B, PORT))
    listener.listen()
    active = both.a.id(PortSpace.IB, qp_type=UC)
    active.resolve_addr((B, PORT))
    both.a.event(E.ADDR_RESOLVED)
    active.resolve_route()
    both.a.event(E.ROUTE_RESOLVED)
    return active, listener


def test_connected_queue_pairs_exchange_messages(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[REQ] = []
    connect = Agent.connect

    def record(agent: Agent, path: Hashable, request: REQ, now: float, **more: Any) -> int:
        sent.append(request)
        return connect(agent, path, request, now, **more)

    monkeypatch.setattr(Agent, "connect", record)
    active, _ = asked(both)
    equip(active)
    active.connect()
    assert [(req.transport_service_type, req.extended_transport_type) for req in sent] == [(1, 0)]
    passive = both.b.event(E.CONNECT_REQUEST).id
    assert passive.qp_type is UC
    equip(passive)
    inbox = passive.reg_msgs(bytearray(20_000))
    passive.post_recv(1, inbox)
    passive.accept()
    both.a.event(E.ESTABLISHED)
    both.b.event(E.ESTABLISHED)
    assert (active.qp.state, passive.qp.state) == (QPState.RTS, QPState.RTS)
    attr, _ = active.qp.query()
    assert attr.path_mtu == sent[0].path_mtu
    outbox = active.reg_msgs(bytearray(b"ab" * 10_000))
    active.post_send(2, outbox)
    assert active.get_send_comp(1).status is WCStatus.SUCCESS
    assert passive.get_recv_comp(1).byte_len == 20_000
    assert inbox.buf == outbox.buf
    refused(lambda: active.post_read(3, outbox, 0, 0))
    active.disconnect()
    both.a.event(E.DISCONNECTED)
    both.b.event(E.DISCONNECTED)
    for region in (inbox, outbox):
        region.close()


def test_sends_of_the_passive_side_wait_for_the_peer(both: Ends) -> None:
    active, _ = asked(both)
    equip(active)
    inbox = active.reg_msgs(bytearray(100))
    active.post_recv(1, inbox)
    active.connect()
    passive = both.b.event(E.CONNECT_REQUEST).id
    equip(passive)
    passive.accept()
    passive.post_send(1, b"early", flags=SendFlag.INLINE)
    assert passive.send_cq.poll(1) == [], "the REQ may have a forged address"
    both.a.event(E.ESTABLISHED)
    both.b.event(E.ESTABLISHED)
    assert active.get_recv_comp(1).byte_len == 5
    inbox.close()


def test_attributes_for_a_queue_pair_of_the_applications_own(both: Ends) -> None:
    """The masks have what InfiniBand Architecture 11.2.5.2 has for UC, so ``modify`` takes them."""
    active, _ = asked(both)
    with CQ(active.verbs, 4) as cq, QP(active.pd, QPInitAttr(UC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1, 0))) as qp:
        attr, mask = active.init_qp_attr(QPState.INIT)
        assert mask == M.STATE | M.ACCESS_FLAGS | M.PKEY_INDEX | M.PORT
        qp.modify(attr, mask)
        active.connect(ConnParam(qp_num=qp.qp_num))
        passive = both.b.event(E.CONNECT_REQUEST).id
        equip(passive)
        passive.accept()
        both.a.event(E.CONNECT_RESPONSE)
        for state, expected in (
            (QPState.RTR, M.STATE | M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN),
            (QPState.RTS, M.STATE | M.SQ_PSN),
        ):
            attr, mask = active.init_qp_attr(state)
            assert mask == expected
            qp.modify(attr, mask)
        active.establish()
        both.b.event(E.ESTABLISHED)
        assert qp.state is QPState.RTS


@pytest.mark.parametrize("listens", [QPType.RC, UC])
def test_listener_takes_its_own_transport(both: Ends, listens: QPType) -> None:
    active, _ = asked(both, listens=listens)
    refused(lambda: active.create_qp(QPInitAttr(QPType.RC)))
    equip(active)
    active.connect()
    if listens is UC:
        both.b.event(E.CONNECT_REQUEST)
    else:
        assert both.a.event(E.REJECTED).status == 9, "invalid transport type"


def test_endpoints_from_resolved_addresses(both: Ends) -> None:
    own = AddrInfo(flags=RaiFlag.PASSIVE, port_space=PortSpace.IB, qp_type=UC, src_addr=(B, PORT))
    to = AddrInfo(port_space=PortSpace.IB, qp_type=UC, dst_addr=(B, PORT))
    with (
        create_ep(own, qp_init_attr=QPInitAttr(), provider=both.b.provider) as listener,
        create_ep(to, qp_init_attr=QPInitAttr(), provider=both.a.provider) as client,
    ):
        listener.listen()
        assert (client.qp_type, client.qp.qp_type) == (UC, UC)
