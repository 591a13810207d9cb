"""Unreliable connections on the sockets of the compiled core."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from core.test_wire import INLINE, SIGNALED, End
from rdmacm import CmId, PortSpace
from rdmacm.proto.core_choice import compiled
from rdmacm.verbs import (
    MR,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import AccessFlag, QPAttrMask
from support.clock import eventually
from support.programs import python_program

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

W = WROpcode


def make_end(cmid: CmId) -> End:
    cmid.create_qp(QPInitAttr(QPType.UC, cap=QPCap(64, 64, 2, 2, 256)))
    memory = bytearray(8192)
    return End(cmid, memory, MR(cmid.pd, memory, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE))


def connected(port: int) -> End:
    cmid = CmId(None, PortSpace.IB, qp_type=QPType.UC)
    cmid.resolve_addr(("127.0.0.1", port))
    cmid.resolve_route()
    end = make_end(cmid)
    cmid.connect()
    return end


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """A client and a server, neither of which has sent anything."""
    with CmId(None, PortSpace.IB, qp_type=QPType.UC) as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        accepted: list[End] = []

        def accept() -> None:
            end = make_end(listener.get_request(10))
            end.receive(8)
            end.cmid.accept()
            accepted.append(end)

        thread = threading.Thread(target=accept)
        thread.start()
        client = connected(listener.src_port)
        thread.join()
        yield client, accepted[0]
        for end in (client, accepted[0]):
            end.region.close()
            end.cmid.close()


def test_end_that_only_sends_joins_the_wire(ends: tuple[End, End]) -> None:
    client, server = ends
    client.send(b"the first message")
    assert client.backend.core is not None
    assert server.completions() == [(0, WCStatus.SUCCESS, WCOpcode.RECV, 17)]
    assert server.backend.core is not None
    client.completions(of_sends=True)
    before = server.taken
    core = client.backend.core
    write = SendWR(1, W.RDMA_WRITE, [client.region.sge(0, 5000)], SIGNALED)
    tell = SendWR(2, W.RDMA_WRITE_WITH_IMM, [], SIGNALED, imm_data=5)
    for wr in (write, tell):
        wr.set_wr_rdma(server.region.rkey, server.region.addr + 100)
    client.memory[:5000] = b"w" * 5000
    read = SendWR(3, W.RDMA_READ, [client.region.sge(0, 8)], SIGNALED, rkey=server.region.rkey)
    assert core.post_send([write, tell, SendWR(4, W.SEND_WITH_IMM, [b"last"], SIGNALED | INLINE, imm_data=6)]) is None
    assert core.post_send(read) is read, "the service does not have it"
    assert [number for number, *_ in client.completions(3, of_sends=True)] == [1, 2, 4]
    assert server.completions(2) == [
        (1, WCStatus.SUCCESS, WCOpcode.RECV_RDMA_WITH_IMM, 0),
        (2, WCStatus.SUCCESS, WCOpcode.RECV, 4),
    ]
    assert server.taken > before
    assert bytes(server.memory[100:5100]) == client.memory[:5000]
    assert client.backend._engine is not None
    assert client.backend._engine.deadline is None, "nothing is waited for"


def test_request_that_fails_leads_to_sqe_and_receives_go_on(ends: tuple[End, End]) -> None:
    client, server = ends
    client.receive()
    client.send(b"one")
    server.send(b"two")
    assert client.completions()[0][:2] == (0, WCStatus.SUCCESS)
    other = MR(client.cmid.pd, bytearray(8), AccessFlag.LOCAL_WRITE)
    gone = other.sge(0, 8)
    other.close()
    client.qp.post_send([SendWR(8, W.SEND, [gone], SIGNALED), SendWR(9, W.SEND, [b"x"], SIGNALED | INLINE)])
    found = [(number, status.name) for number, status, *_ in client.completions(3, of_sends=True)]
    assert found == [(7, "SUCCESS"), (8, "LOC_PROT_ERR"), (9, "WR_FLUSH_ERR")]
    assert eventually(lambda: client.qp.state is QPState.SQE)
    client.receive()
    server.send(b"three")
    assert client.completions() == [(0, WCStatus.SUCCESS, WCOpcode.RECV, 5)]
    client.qp.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
    client.send(b"four")
    assert [length for *_, length in server.completions(2)] == [3, 4]
    assert client.backend.core is not None


#: A server that computes without a pause of the interpreter, until a peer has written to its memory.
_COMPUTING = """
import sys
from rdmacm import CmId, PortSpace
from rdmacm.verbs import MR, QPCap, QPInitAttr, QPType, SendFlag
from rdmacm.verbs.enums import AccessFlag
listener = CmId(None, PortSpace.IB, qp_type=QPType.UC)
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
peer = listener.get_request(20)
peer.create_qp(QPInitAttr(QPType.UC, cap=QPCap(4, 32, 1, 1, 64)))
memory = bytearray(8192)
region = MR(peer.pd, memory, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE)
for number in range(20):
    peer.post_recv(number, region, 4096, 4096)
peer.accept()
print(region.addr, region.rkey, flush=True)
peer.get_recv_comp(20)
with peer.qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
print("computing", flush=True)
while not memory[0]:
    pass
sys.setswitchinterval(0.005)
found = [peer.get_recv_comp(20) for _ in range(16)]
print(*(wc.byte_len for wc in found), memory[4096:4100].decode(), flush=True)
sys.stdin.readline()
"""


def test_messages_arrive_while_the_application_computes() -> None:
    with python_program(_COMPUTING) as server:
        assert server.stdout is not None
        end = connected(int(server.stdout.readline()))
        address, rkey = map(int, server.stdout.readline().split())
        end.send(b"ready")
        assert server.stdout.readline() == "computing\n"
        end.memory[:] = b"data" * 2048
        for number in range(16):
            end.qp.post_send(SendWR(number, W.SEND, [end.region.sge(0, 256 * number)], SIGNALED))
        assert [number for number, *_ in end.completions(17, of_sends=True)] == [7, *range(16)]
        assert not select.select([server.stdout], [], [], 0.1)[0], "it has computed all the time"
        end.qp.post_send(SendWR(1, W.RDMA_WRITE, [b"x"], INLINE, remote_addr=address, rkey=rkey))
        lengths = " ".join(str(256 * number) for number in range(16))
        assert server.stdout.readline() == f"{lengths} data\n"
        server.communicate("\n", timeout=20)
    end.region.close()
    end.cmid.close()


def test_receives_are_posted_directly(ends: tuple[End, End]) -> None:
    client, server = ends
    client.send(b"join")
    server.completions()
    core = server.backend.core
    assert core is not None
    assert core.post_recv([RecvWR(20 + n, [server.region.sge(0, 100)]) for n in range(2)]) is None
    for _ in range(9):
        client.send(b"message")
    assert [number for number, *_ in server.completions(9)] == [*range(1, 8), 20, 21]
