"""Requests that arrive while their queue pair joins the port of the compiled core are processed in their order.

No queue pair of the server has joined when a connection's first requests arrive, so Python reads them; the thread of
the core must not overtake it with those that come after.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from rdmacm import CmId
from rdmacm.proto.core_choice import compiled
from rdmacm.verbs import SGE, QPCap, QPInitAttr, SendFlag, SendWR, WROpcode
from support.netns import python_environment

CONNECTIONS, REQUESTS, LONGEST = 300, 60, 700

_SERVER = """
import sys
import rdmacm
from rdmacm import CmId
from rdmacm.verbs import QPCap, QPInitAttr, SendFlag
connections, requests = map(int, sys.argv[1:])
listener = CmId()
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
for _ in range(connections):
    peer = listener.get_request(20)
    peer.create_qp(QPInitAttr(cap=QPCap(4, requests, 1, 1, 8)))
    region = peer.reg_msgs(bytearray(1024 * requests))
    for number in range(requests):
        peer.post_recv(number, region, number * 1024, 1024)
    peer.accept()
    for number in range(requests):
        assert peer.get_recv_comp(20).wr_id == number
    peer.post_send(1, b"all", flags=SendFlag.INLINE | SendFlag.SIGNALED)
    peer.get_send_comp(20)
    peer.disconnect()
    peer.destroy_qp()
    region.close()
    peer.destroy()
print(sum(each["out_of_seq_request"] for each in rdmacm.query_counters().devices.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")
def test_first_requests_of_a_connection_are_processed_in_order() -> None:
    command = [sys.executable, "-c", _SERVER, str(CONNECTIONS), str(REQUESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_environment(), text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for _ in range(CONNECTIONS):
            send_all(port)
        assert server.stdout.read() == "0\n"
    assert server.returncode == 0


def send_all(port: int) -> None:
    """A connection whose requests are posted at once."""
    with CmId() as cmid:
        cmid.resolve_addr(("127.0.0.1", port))
        cmid.resolve_route()
        cmid.create_qp(QPInitAttr(cap=QPCap(max_send_wr=REQUESTS, max_recv_wr=4)))
        region = cmid.reg_msgs(bytearray(LONGEST))
        cmid.post_recv(0, region, 0, 8)
        cmid.connect()
        lengths = [1 + number * 37 % LONGEST for number in range(REQUESTS)]
        requests = [
            SendWR(number, WROpcode.SEND, [SGE(region.addr, length, region.lkey)], SendFlag.SIGNALED)
            for number, length in enumerate(lengths)
        ]
        cmid.qp.post_send(requests)
        cmid.get_recv_comp(20)
        cmid.disconnect()
        cmid.destroy_qp()
        region.close()
