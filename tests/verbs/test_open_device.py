"""A device opened by its name, without an id."""

from __future__ import annotations

import errno

import pytest

import rdmacm
from rdmacm import CmId, RdmaError, open_device
from rdmacm.testing import Fabric
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    WC,
    AccessFlag,
    AHAttr,
    CompChannel,
    Context,
    GlobalRoute,
    QPAttr,
    QPInitAttr,
    RecvWR,
    SendWR,
)


def connected(context: Context, here: QP, there: QP) -> None:
    route = GlobalRoute(dgid=context.query_gid(1, 0), sgid_index=0, hop_limit=64)
    here.to_rts(
        QPAttr(
            ah_attr=AHAttr(is_global=True, gr=route),
            dest_qp_num=there.qp_num,
            max_dest_rd_atomic=1,
            min_rnr_timer=12,
            timeout=14,
            retry_cnt=7,
            rnr_retry=7,
            max_rd_atomic=1,
        )
    )


def test_messages_without_an_id() -> None:
    context = open_device("soft_lo")
    assert context.name == "soft_lo"
    memory = bytearray(b"message".ljust(64, b"\0"))
    with CompChannel(context) as channel, CQ(context, 16, channel) as cq, PD(context) as pd:
        with MR(pd, memory, AccessFlag.LOCAL_WRITE) as mr, SRQ(pd) as srq:
            with QP(pd, QPInitAttr(scq=cq, rcq=cq)) as a, QP(pd, QPInitAttr(scq=cq, rcq=cq, srq=srq)) as b:
                connected(context, a, b)
                connected(context, b, a)
                cq.req_notify()
                srq.post_recv(RecvWR(2, [mr.sge(32, 16)]))
                a.post_send(SendWR(1, sg=[mr.sge(0, 7)]))
                assert channel.get_cq_event(5) is cq
                done: list[WC] = []
                while len(done) < 2 and cq.wait(5):
                    done += cq.poll(2)
                assert sorted((wc.wr_id, wc.status.name) for wc in done) == [(1, "SUCCESS"), (2, "SUCCESS")]
                assert mr.read(7, 32) == b"message"
        with AH(pd, AHAttr(is_global=True, gr=GlobalRoute(dgid=context.query_gid(1, 0)))) as ah:
            assert ah.pd is pd


def test_same_device_as_an_ids() -> None:
    context = open_device("soft_lo")
    with CmId() as cmid:
        cmid.bind_addr(("127.0.0.1", 0))
        assert cmid.verbs.backend is context.backend is open_device("soft_lo").backend
        with PD(context) as pd:
            cmid.create_qp(pd=pd)
            cmid.destroy_qp()


def test_device_that_does_not_exist() -> None:
    host = Fabric().host("a", "10.0.0.1")
    for name in ("mlx5_0", "", "SOFT_ETH0"):
        with pytest.raises(RdmaError, match=f"no device '{name}'.*try: one of: soft_lo, soft_eth0") as raised:
            rdmacm.open_device(name, host.provider)
        assert raised.value.errno == errno.ENODEV


def test_removed_device() -> None:
    host = Fabric().host("a", "10.0.0.1")
    context = open_device("soft_eth0", host.provider)
    assert context.query_port(1).gid_tbl_len == 1024
    (ifindex,) = (each.index for each in host.network.interfaces() if each.name == "eth0")
    host.network.remove_interface(ifindex)
    with pytest.raises(RdmaError, match="the device has been removed") as raised:
        context.query_port(1)
    assert raised.value.errno == errno.ENODEV
    with pytest.raises(RdmaError, match=r"try: one of: soft_lo$"):
        open_device("soft_eth0", host.provider)
