"""A region that is registered anew while the compiled core has the receives of a connection over loopback."""

from __future__ import annotations

import pytest

from rdmacm import CmId, EventChannel
from rdmacm.proto.core_choice import compiled
from rdmacm.verbs import MR, AccessFlag, QPCap, QPInitAttr, RecvWR, ReregMRFlag, SendWR, WCStatus

pytestmark = pytest.mark.skipif(compiled is None, reason="needs the compiled core")
SIZE = 64


@pytest.mark.parametrize("change", ["buffer", "nothing"])
def test_posted_receive_of_the_core(change: str) -> None:
    with EventChannel("soft") as channel:
        listener = CmId(channel)
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        client = CmId(channel)
        client.resolve_addr(("127.0.0.1", listener.src_port))
        channel.get_event(10).ack()
        client.resolve_route()
        channel.get_event(10).ack()
        client.create_qp(QPInitAttr(cap=QPCap(16, 16, 1, 1)))
        client.connect()
        with channel.get_event(10) as request:
            server = request.id
        server.create_qp(QPInitAttr(cap=QPCap(16, 16, 1, 1)))
        server.accept()
        for _ in range(2):
            channel.get_event(10).ack()
        old = bytearray(SIZE)
        inbox = MR(server.pd, old, AccessFlag.LOCAL_WRITE)
        outbox = MR(client.pd, bytearray(b"m" * SIZE), AccessFlag.LOCAL_WRITE)

        def send(number: int) -> tuple[WCStatus, WCStatus]:
            client.qp.post_send(SendWR(number, sg=[outbox.sge(0, SIZE)]))
            return client.get_send_comp(60).status, server.get_recv_comp(60).status

        success = WCStatus.SUCCESS, WCStatus.SUCCESS
        number = 0
        while server.qp.backend.core is None:  # it takes part after some packets
            number += 1
            assert number < 1000
            server.qp.post_recv(RecvWR(number, [inbox.sge(0, SIZE)]))
            assert send(number) == success
        old[:] = bytes(SIZE)
        server.qp.post_recv([RecvWR(1, [inbox.sge(0, SIZE)]), RecvWR(2, [inbox.sge(0, SIZE)])])
        if change == "buffer":
            inbox.rereg(ReregMRFlag.CHANGE_TRANSLATION, None, bytearray(SIZE))
            assert send(1) == (WCStatus.REM_OP_ERR, WCStatus.LOC_QP_OP_ERR)
            assert bytes(old) == bytes(SIZE)
        else:
            inbox.rereg(ReregMRFlag.CHANGE_ACCESS, access=AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ)
            assert send(1) == send(2) == success
            assert bytes(old) == b"m" * SIZE
            while server.qp.backend.core is None:  # and again later
                number += 1
                assert number < 2000
                server.qp.post_recv(RecvWR(number, [inbox.sge(0, SIZE)]))
                assert send(number) == success
        for cmid in (client, server):
            cmid.destroy_qp()
        inbox.close()
        outbox.close()
        for cmid in (client, server, listener):
            cmid.destroy()
