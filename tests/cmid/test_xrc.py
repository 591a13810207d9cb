"""Ids with extended reliable connections: librdmacm's rdma_xclient and rdma_xserver with -c x, and what is refused."""

from __future__ import annotations

import errno

from rdmacm import CmEventType, ConnParam, PortSpace
from rdmacm.cma import (
    IBV_SRQ_INIT_ATTR_TYPE,
    IBV_SRQT_XRC,
    IBV_WR_SEND,
    ibv_get_srq_num,
    ibv_qp_init_attr,
    ibv_send_wr,
    ibv_srq_init_attr,
    ibv_srq_init_attr_ex,
    rdma_create_srq,
    rdma_create_srq_ex,
    rdma_get_recv_comp,
    rdma_post_recv,
    rdma_reg_msgs,
)
from rdmacm.verbs import XRCD, QPCap, QPInitAttr, QPInitAttrEx, QPState, QPType, SendFlag, SrqAttr
from support.pair import ADDRESSES, PORT, Ends, ends, refused


def connected(both: Ends, plain: bool = False) -> None:
    """One message as the C examples send it. ``plain``: rdma_create_srq(), which takes the id's type."""
    listener = both.b.id(PortSpace.IB, qp_type=QPType.XRC_RECV)
    listener.bind_addr((ADDRESSES["ipv4"][1], PORT))
    listener.listen()
    active = both.a.id(PortSpace.IB, qp_type=QPType.XRC_SEND)
    active.resolve_addr((ADDRESSES["ipv4"][1], PORT))
    both.a.event(CmEventType.ADDR_RESOLVED)
    active.resolve_route()
    both.a.event(CmEventType.ROUTE_RESOLVED)
    attr = ibv_qp_init_attr(qp_type=QPType.XRC_SEND, cap=QPCap(1, 1, 1, 1, 16), sq_sig_all=1)
    active.create_qp(attr)
    assert attr.rcq is None
    refused(lambda: active.recv_cq, errno.EINVAL)
    active.connect(None)
    passive = both.b.event(CmEventType.CONNECT_REQUEST).id
    passive.create_qp(ibv_qp_init_attr(qp_type=QPType.XRC_RECV))
    sizes = SrqAttr(max_wr=1, max_sge=1)
    if plain:
        rdma_create_srq(passive, None, ibv_srq_init_attr(sizes))
    else:
        srq_attr = ibv_srq_init_attr_ex(sizes, comp_mask=IBV_SRQ_INIT_ATTR_TYPE, srq_type=IBV_SRQT_XRC)
        rdma_create_srq_ex(passive, srq_attr)
        assert srq_attr.cq is passive.recv_cq
    inbox = rdma_reg_msgs(passive, bytearray(16))
    rdma_post_recv(passive, 7, inbox.addr, 16, inbox)
    number = ibv_get_srq_num(passive.srq)
    passive.accept(ConnParam(private_data=number.to_bytes(4, "big")))
    event = both.a.event(CmEventType.ESTABLISHED)
    both.b.event(CmEventType.ESTABLISHED)
    assert isinstance(event.param, ConnParam)
    assert (event.param.qp_num, event.param.srq) == (passive.qp.qp_num, 1), "the number is in the EE context field"
    wr = ibv_send_wr(wr_id=1, sg_list=[b"sixteen bytes..."], opcode=IBV_WR_SEND, send_flags=SendFlag.INLINE)
    wr.qp_type.xrc.remote_srqn = int.from_bytes(event.private_data[:4], "big")
    active.qp.post_send(wr)
    assert active.get_send_comp(10).wr_id == 1
    wc = rdma_get_recv_comp(passive)
    assert (wc.wr_id, wc.byte_len, wc.qp_num) == (7, 16, passive.qp.qp_num)
    assert inbox.read(16) == b"sixteen bytes..."
    passive.disconnect()
    both.a.event(CmEventType.DISCONNECTED)
    both.b.event(CmEventType.DISCONNECTED)
    active.disconnect()
    assert active.qp.state is passive.qp.state is QPState.ERR
    inbox.close()
    passive.destroy_qp()
    assert passive.recv_cq is not None, "it is the shared receive queue's"
    passive.destroy_srq()
    refused(lambda: passive.recv_cq, errno.EINVAL)


def test_message_of_the_c_examples() -> None:
    with ends() as both:
        connected(both)


def test_shared_receive_queue_has_the_type_of_the_id() -> None:
    with ends() as both:
        connected(both, plain=True)


def test_other_queues_than_the_id_makes() -> None:
    with ends() as both:
        cmid = both.b.id(PortSpace.IB, qp_type=QPType.XRC_RECV)
        cmid.bind_addr((ADDRESSES["ipv4"][1], PORT))
        with XRCD(cmid.verbs) as xrcd:
            qp = cmid.create_qp(QPInitAttrEx(QPType.XRC_RECV, xrcd=xrcd))
            assert qp.xrcd is xrcd
            refused(lambda: (cmid.send_cq, cmid.recv_cq), errno.EINVAL)
            refused(lambda: cmid.create_srq(ibv_srq_init_attr_ex(SrqAttr(max_wr=1 << 30), srq_type=IBV_SRQT_XRC)))
            refused(lambda: cmid.recv_cq, errno.EINVAL)  # the completion queue is closed again
            refused(lambda: rdma_create_srq_ex(cmid, ibv_srq_init_attr_ex(srq_type=IBV_SRQT_XRC)), errno.EINVAL)
            cmid.destroy_qp()
        refused(lambda: cmid.create_qp(QPInitAttr(QPType.XRC_SEND)))
