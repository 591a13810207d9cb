"""Datagram ids on a simulated network: their queue pairs, service id resolution (SIDR), and messages."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from rdmacm import (
    AddrInfo,
    CmEvent,
    CmEventType,
    CmId,
    CmRejectedError,
    ConnParam,
    PortSpace,
    QPType,
    RaiFlag,
    UdParam,
    cma,
    create_ep,
    getaddrinfo,
)
from rdmacm.cma import rdma_post_ud_send
from rdmacm.verbs import AH, GRH, QPAttr, QPAttrMask, QPCap, QPInitAttr, QPState, SendFlag, SendWR, WROpcode
from support.pair import ADDRESSES, PORT, Ends, ends, refused

E = CmEventType
A, B = ADDRESSES["ipv4"]
QKEY = 0x01234567
UDP = PortSpace.UDP


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


# -- service id resolution ------------------------------------------------------------------------------


def test_sidr_resolves_a_service(both: Ends) -> None:
    both.b.listen(B, port_space=UDP)
    active = both.a.resolve(B, port_space=UDP)
    refused(lambda: active.connect(ConnParam(b"x" * 181)))
    active.connect(ConnParam(b"x" * 180))
    request = both.b.event(E.CONNECT_REQUEST)
    assert request.private_data == b"x" * 180
    refused(lambda: request.id.accept(ConnParam(b"y" * 137)))
    request.id.accept(ConnParam(b"y" * 136, qp_num=0x10055, qkey=0x77))
    event = both.a.event(E.ESTABLISHED)
    assert isinstance(event.param, UdParam)
    assert (event.param.qp_num, event.param.qkey, event.private_data) == (0x10055, 0x77, b"y" * 136)
    active.disconnect()
    both.fabric.run(seconds=1)
    assert both.b.quiet(), "the passive side gets no further event"


def test_parameters_of_a_request_are_those_of_datagrams(both: Ends) -> None:
    both.b.listen(B, port_space=UDP)
    both.a.resolve(B, port_space=UDP).connect(ConnParam(b"ask"))
    request = both.b.event(E.CONNECT_REQUEST)
    assert isinstance(request.param, UdParam)
    assert (request.param.ud.private_data[:3], request.param.qp_num) == (b"ask", 0)


def test_sidr_rejection_raises_unreachable(both: Ends) -> None:
    both.b.listen(B, port_space=UDP)
    active = both.a.resolve(B, port_space=UDP)
    active.connect()
    request = both.b.event(E.CONNECT_REQUEST)
    refused(lambda: request.id.reject(b"n" * 137))
    request.id.reject(b"no")
    event = both.a.event(E.UNREACHABLE)
    assert event.status == 2
    assert isinstance(event.error, CmRejectedError)
    assert event.private_data == event.error.private_data == b"no".ljust(136, b"\0")
    with CmId(None, UDP, provider=both.a.provider) as cmid:
        cmid.resolve_addr((B, PORT + 1))
        cmid.resolve_route()
        with pytest.raises(CmRejectedError, match="nobody listens") as error:
            cmid.connect()
        assert error.value.reason == 1


# -- queue pairs ----------------------------------------------------------------------------------------


class Talk:
    """A client with a queue pair, resolved, and the server's queue pair that it was given."""

    def __init__(self, both: Ends, family: str = "ipv4") -> None:
        self.both = both
        there = ADDRESSES[family][1]
        both.b.listen(there, port_space=UDP)
        self.client = both.a.resolve(there, port_space=UDP)
        self.client.create_qp()
        self.client.connect(ConnParam(b"hello"))
        self.request: CmEvent = both.b.event(E.CONNECT_REQUEST)
        self.server = self.request.id
        self.server.create_qp(QPInitAttr(QPType.UD, cap=QPCap(16, 16, 4, 4, 256)))
        self.inbox = self.server.reg_msgs(bytearray(16 * 2048))
        for slot in range(16):
            self.server.post_recv(slot, self.inbox, slot * 2048, 2048)
        self.server.accept(ConnParam(b"welcome"))
        event = both.a.event(E.ESTABLISHED)
        assert isinstance(event.param, UdParam)
        self.param = event.param
        self.ah = AH(self.client.pd, self.param.ah_attr)

    def send(self, data: bytes, flags: int = SendFlag.INLINE | SendFlag.SIGNALED, imm_data: int = 0) -> None:
        wr = SendWR(1, WROpcode.SEND_WITH_IMM, [data], flags, ah=self.ah, imm_data=imm_data)
        wr.remote_qpn, wr.remote_qkey = self.param.qp_num, self.param.qkey
        self.client.qp.post_send(wr)

    def close(self) -> None:
        self.ah.close()
        self.server.destroy_qp()
        self.inbox.close()


@pytest.mark.parametrize("family", ADDRESSES)
def test_messages_both_ways(both: Ends, family: str) -> None:
    talk = Talk(both, family)
    assert talk.client.qp.state is QPState.RTS, "from create_qp() on"
    assert talk.param.private_data == b"welcome".ljust(136, b"\0")
    assert (talk.param.qp_num, talk.param.qkey) == (talk.server.qp.qp_num, QKEY)
    assert talk.param.ah_attr.gr.dgid == talk.client.route.dgid
    talk.send(b"question", imm_data=talk.client.qp.qp_num)
    wc = talk.server.get_recv_comp(10)
    assert (wc.byte_len, wc.imm_data, wc.src_qp) == (48, talk.client.qp.qp_num, talk.client.qp.qp_num)
    memory = talk.inbox.buf[wc.wr_id * 2048 : (wc.wr_id + 1) * 2048]
    assert bytes(memory[40:48]) == b"question"
    answers = talk.client.reg_msgs(bytearray(100))
    talk.client.post_recv(7, answers)
    with AH(talk.server.pd, wc=wc, grh=memory, port_num=talk.server.port_num) as back:
        assert back.attr.gr.dgid == talk.client.route.sgid
        talk.server.post_ud_send(1, b"answer", back, wc.src_qp, QKEY, flags=SendFlag.INLINE)
        wc = talk.client.get_recv_comp(10)
    assert (wc.wr_id, wc.byte_len) == (7, 46)
    assert bytes(answers.buf[40:46]) == b"answer"
    talk.client.destroy_qp()
    answers.close()
    talk.close()


def test_c_helper_has_the_q_key_of_the_port_space(both: Ends) -> None:
    talk = Talk(both)
    rdma_post_ud_send(talk.client, 5, b"C", 1, None, SendFlag.INLINE, talk.ah, talk.param.qp_num)
    assert talk.server.get_recv_comp(10).byte_len == 41
    talk.close()


def test_address_handles_from_completions_by_their_c_names(both: Ends) -> None:
    talk = Talk(both)
    talk.send(b"x")
    wc = talk.server.get_recv_comp(10)
    attr = cma.ibv_init_ah_from_wc(talk.server.verbs, 1, wc, talk.inbox.buf)
    assert (attr.grh.dgid, attr.is_global, attr.port_num) == (talk.client.route.sgid, True, 1)
    assert (attr.grh.hop_limit, attr.grh.traffic_class, attr.grh.flow_label) == (64, 0, 0)
    with cma.ibv_create_ah_from_wc(talk.server.pd, wc, GRH.unpack(talk.inbox.buf), 1) as ah:
        assert (ah.attr.gr.dgid, ah.attr.gr.sgid_index) == (attr.gr.dgid, attr.gr.sgid_index)
    grh = bytearray(talk.inbox.buf[:40])
    refused(lambda: cma.ibv_init_ah_from_wc(talk.server.verbs, 1, wc, bytes(40)))
    refused(lambda: AH(talk.server.pd, wc=wc))
    refused(lambda: AH(talk.server.pd))
    grh[36:40] = bytes((224, 0, 0, 1))
    assert "multicast" in str(refused(lambda: AH(talk.server.pd, wc=wc, grh=grh)))
    grh[36:40] = bytes((10, 9, 9, 9))
    assert "no GID" in str(refused(lambda: AH(talk.server.pd, wc=wc, grh=grh)))
    wc.has_grh = False
    assert not cma.ibv_init_ah_from_wc(talk.server.verbs, 1, wc, grh).is_global
    talk.close()


def test_messages_longer_than_the_mtu_are_refused(both: Ends) -> None:
    talk = Talk(both)
    region = talk.client.reg_msgs(bytearray(2000))
    talk.client.post_ud_send(1, region, talk.ah, talk.param.qp_num, QKEY, 0, 1024)
    error = refused(lambda: talk.client.post_ud_send(1, region, talk.ah, talk.param.qp_num, QKEY, 0, 1025))
    assert error.bad_wr is not None
    assert talk.server.get_recv_comp(10).byte_len == 1064
    assert talk.client.get_send_comp(10).wr_id == 1
    talk.client.destroy_qp()
    region.close()
    talk.close()


def test_accepted_q_key_is_the_queue_pairs(both: Ends) -> None:
    both.b.listen(B, port_space=UDP)
    client = both.a.resolve(B, port_space=UDP)
    client.connect()
    server = both.b.event(E.CONNECT_REQUEST).id
    qp = server.create_qp()
    assert "0x01234567" in str(refused(lambda: server.accept(ConnParam(qkey=0x77))))
    qp.modify(QPAttr(qkey=0x77), QPAttrMask.QKEY)
    server.accept(ConnParam(qkey=0x77))
    event = both.a.event(E.ESTABLISHED)
    assert isinstance(event.param, UdParam)
    assert (event.param.qkey, event.param.qp_num) == (0x77, qp.qp_num)


def test_sidr_reply_with_another_q_key(both: Ends) -> None:
    """Linux posts ADDR_ERROR to a client whose queue pair has the Q_Key of the port space."""
    both.b.listen(B, port_space=UDP)
    client = both.a.resolve(B, port_space=UDP)
    client.create_qp()
    client.connect()
    both.b.event(E.CONNECT_REQUEST).id.accept(ConnParam(qp_num=0x10055, qkey=0x77))
    event = both.a.event(E.ESTABLISHED)
    assert isinstance(event.param, UdParam)
    assert event.param.qkey == 0x77


def test_own_queue_pair_gets_its_attributes_from_the_id(both: Ends) -> None:
    cmid = both.a.resolve(B, port_space=UDP)
    steps = [cmid.init_qp_attr(state) for state in (QPState.INIT, QPState.RTR, QPState.RTS)]
    attr, mask = steps[0]
    assert (attr.qkey, attr.port_num, attr.pkey_index) == (QKEY, 1, 0)
    assert mask == QPAttrMask.STATE | QPAttrMask.PKEY_INDEX | QPAttrMask.PORT | QPAttrMask.QKEY
    assert [mask for _, mask in steps[1:]] == [QPAttrMask.STATE, QPAttrMask.STATE | QPAttrMask.SQ_PSN]


def test_refusal_and_silence_leave_the_queue_pair_in_rts(both: Ends) -> None:
    """A datagram queue pair has other peers than the one that does not answer."""
    both.b.listen(B, port_space=UDP)
    client = both.a.resolve(B, port_space=UDP)
    qp = client.create_qp()
    client.connect()
    both.b.event(E.CONNECT_REQUEST).id.reject()
    both.a.event(E.UNREACHABLE)
    assert qp.state is QPState.RTS
    silent = both.a.resolve(B, port_space=UDP)
    other = silent.create_qp()
    both.fabric.partition("a", "b")
    silent.connect()
    event = both.a.event(E.UNREACHABLE)
    assert (event.status, other.state) == (-errno.ETIMEDOUT, QPState.RTS)
    client.disconnect()
    assert qp.query()[0].qp_state is QPState.ERR, "as in librdmacm"


def test_request_is_repeated_until_it_is_answered(both: Ends) -> None:
    """Every 4.1 s, 15 times, as Linux does."""
    both.b.listen(B, port_space=UDP)
    client = both.a.resolve(B, port_space=UDP)
    both.fabric.partition("a", "b")
    client.connect()
    both.fabric.run(seconds=30)
    both.fabric.heal()
    both.b.event(E.CONNECT_REQUEST).id.accept(ConnParam(qp_num=0x10001))
    both.a.event(E.ESTABLISHED)


def test_type_of_the_queue_pair_is_the_ids(both: Ends) -> None:
    cmid = both.a.resolve(B, port_space=UDP)
    refused(lambda: cmid.create_qp(QPInitAttr()))
    assert cmid.create_qp().qp_type is QPType.UD


def test_endpoints_of_resolved_addresses(both: Ends) -> None:
    hints = AddrInfo(port_space=UDP)
    info = getaddrinfo(B, PORT, hints, provider=both.a.provider)[0]
    assert info.qp_type == QPType.UD
    own = getaddrinfo(B, PORT, AddrInfo(flags=RaiFlag.PASSIVE, port_space=UDP), provider=both.b.provider)[0]
    with (
        create_ep(own, qp_init_attr=QPInitAttr(QPType.UD), provider=both.b.provider) as listener,
        create_ep(info, qp_init_attr=QPInitAttr(QPType.UD), provider=both.a.provider) as client,
    ):
        listener.listen()
        assert client.qp.state is QPState.RTS
        client.migrate(both.a.channel)
        client.connect(ConnParam(b"data"))
        with listener.get_request(10) as server:
            assert server.event.private_data[:4] == b"data"
            server.accept()
            event = both.a.event(E.ESTABLISHED)
            assert isinstance(event.param, UdParam)
            assert event.param.qp_num == server.qp.qp_num
