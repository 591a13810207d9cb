"""Datagram queue pairs while the addresses of their interface change."""

from __future__ import annotations

import socket

import pytest

from rdmacm import open_device
from rdmacm.address import Gid
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    PD,
    QP,
    AccessFlag,
    AHAttr,
    GlobalRoute,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPType,
    RecvWR,
    SendFlag,
    SendWR,
)
from support.clock import eventually
from support.netns import TwoHosts, needs_netns

pytestmark = needs_netns

QKEY = 0x01234567
ROOM = 100
ADDRESSES = {"10.7.0.77": ("10.7.0.1", 24, 32), "fd07::77": ("fd07::1", 64, 128)}


def gid_of(address: str) -> Gid:
    return Gid.from_ip(socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address))


@pytest.mark.parametrize("address", ADDRESSES)
def test_address_that_comes_and_goes(net: TwoHosts, address: str) -> None:
    """What is sent to it is received as long as the device has it, and not when another interface of the host has."""
    here, bits, all_bits = ADDRESSES[address]
    context = open_device("soft_va")
    with PD(context) as pd, CQ(context, 100) as cq, MR(pd, bytearray(ROOM), AccessFlag.LOCAL_WRITE) as region:
        init = QPInitAttr(QPType.UD, scq=cq, rcq=cq, cap=QPCap(64, 64, 1, 1, 64))
        with QP(pd, init, QPAttr(qkey=QKEY)) as qp:
            assert isinstance(qp.backend, SoftUdQP)
            mux = qp.backend._mux

            def gids() -> dict[Gid, int]:
                return {row.gid: row.gid_index for row in context.query_gid_table()}

            def send(to: str) -> None:
                gr = GlobalRoute(dgid=gid_of(to), sgid_index=gids()[gid_of(here)])
                with AH(pd, AHAttr(is_global=True, gr=gr)) as ah:
                    wr = SendWR(1, sg=[b"x"], send_flags=SendFlag.INLINE, ah=ah)
                    wr.remote_qpn, wr.remote_qkey = qp.qp_num, QKEY
                    qp.post_send(wr)

            def received(to: str) -> bool:
                qp.post_recv(RecvWR(1, [region.sge()]))
                send(to)
                return cq.wait(1) and len(cq.poll(10)) == 1

            def is_dropped(to: str) -> bool:
                send(to)  # again and again: the kernel may not have it ready yet, and then nothing comes
                return not cq.wait(0.1) and drops() > before

            def drops() -> int:
                mux.count_strays()
                return mux.dropped["address"]

            assert received(here)
            net.a.ip("address", "add", f"{address}/{bits}", "dev", "va", *(["nodad"] if bits == 64 else []))
            eventually(lambda: gid_of(address) in gids(), "the device has not got it")
            eventually(lambda: received(address), "nothing arrives there")
            net.a.ip("address", "del", f"{address}/{bits}", "dev", "va")
            net.a.ip("address", "add", f"{address}/{all_bits}", "dev", "lo", *(["nodad"] if bits == 64 else []))
            eventually(lambda: gid_of(address) not in gids(), "the device still has it")
            before = drops()
            qp.post_recv(RecvWR(1, [region.sge()]))
            eventually(lambda: is_dropped(address), "it is not dropped")
            assert not cq.poll(10)
            assert received(here)
