"""Extended reliable connections on the sockets of the compiled core."""

from __future__ import annotations

import gc
import select
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from core.test_wire import INLINE, SIGNALED, End
from rdmacm import CmId, PortSpace
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import EngineCounters, RtrAttributes
from rdmacm.proto.roce.opcodes import Opcode, TransportService
from rdmacm.proto.work import RecvWork
from rdmacm.verbs import (
    CQ,
    MR,
    SRQ,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    SrqAttr,
    SrqInitAttrEx,
    SRQType,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from rdmacm.verbs.enums import AccessFlag, EventType, SrqAttrMask
from support.clock import eventually
from support.compiled import is_held
from support.programs import python_program
from support.rc import Region, connect, flows

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

W = WROpcode
ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC


@dataclass
class Queue:
    srq: SRQ
    cq: CQ
    region: MR

    def receive(self, count: int = 1) -> None:
        for number in range(count):
            self.srq.post_recv(RecvWR(number, [self.region.sge(4096, 4096)]))

    def completions(self, count: int) -> list[tuple[int, WCStatus, WCOpcode, int]]:
        found: list[tuple[int, WCStatus, WCOpcode, int]] = []
        while len(found) < count:
            assert self.cq.wait(10)
            found.extend((wc.wr_id, wc.status, wc.opcode, wc.byte_len) for wc in self.cq.poll(count - len(found)))
        return found

    def close(self) -> None:
        for each in (self.srq, self.region, self.cq):
            each.close()


def initiator(port: int) -> End:
    cmid = CmId(None, PortSpace.IB, qp_type=QPType.XRC_SEND)
    cmid.resolve_addr(("127.0.0.1", port))
    cmid.resolve_route()
    cmid.create_qp(QPInitAttr(QPType.XRC_SEND, cap=QPCap(64, 0, 2, 0, 256)))
    memory = bytearray(8192)
    end = End(cmid, memory, MR(cmid.pd, memory, AccessFlag.LOCAL_WRITE))
    cmid.connect()
    return end


class Target:
    """An XRC target with two queues, each of which has a completion queue."""

    def __init__(self, cmid: CmId, cqe: int = 16) -> None:
        self.cmid = cmid
        cmid.create_qp()
        first = cmid.create_srq(SrqInitAttrEx(SrqAttr(max_wr=32, max_sge=1), srq_type=SRQType.XRC))
        cq = CQ(cmid.verbs, cqe)
        attr = SrqInitAttrEx(SrqAttr(max_wr=32, max_sge=1), srq_type=SRQType.XRC, xrcd=first.xrcd, cq=cq)
        self.queues = [
            Queue(srq, cq, MR(cmid.pd, bytearray(8192), ACCESS))
            for srq, cq in ((first, cmid.recv_cq), (SRQ(cmid.pd, attr), cq))
        ]

    def close(self) -> None:
        self.queues[0].region.close()
        self.queues[1].close()
        self.cmid.close()


def to(queue: Queue, wr: SendWR) -> SendWR:
    wr.set_qp_type_xrc(queue.srq.get_srq_num())
    return wr


def message(queue: Queue, data: bytes, number: int = 7) -> SendWR:
    return to(queue, SendWR(number, W.SEND, [data], SIGNALED | INLINE))


@pytest.fixture
def ends() -> Iterator[tuple[End, Target]]:
    with CmId(None, PortSpace.IB, qp_type=QPType.XRC_RECV) as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        accepted: list[Target] = []

        def accept() -> None:
            target = Target(listener.get_request(10))
            target.cmid.accept()
            accepted.append(target)

        thread = threading.Thread(target=accept)
        thread.start()
        client = initiator(listener.src_port)
        thread.join()
        target = accepted[0]
        for queue in target.queues:
            queue.receive(2)
            for _ in range(2):
                client.qp.post_send(message(queue, b"hello"))
                queue.completions(1)
                client.completions(of_sends=True)
        assert client.backend.core is not None
        assert target.cmid.qp.backend.core is not None
        yield client, target
        client.region.close()
        client.cmid.close()
        target.close()


def test_requests_of_one_list_use_the_queues_they_name(ends: tuple[End, Target]) -> None:
    client, target = ends
    first, second = target.queues
    for queue in target.queues:
        queue.receive(3)
        queue.region.buf[:8] = bytes(8)
    before = client.taken
    core = client.backend.core
    assert core is not None
    wrs = [message(queue, b"x" * size, number) for number, (queue, size) in enumerate([(first, 1), (second, 2)] * 3)]
    for number, queue in enumerate(target.queues, 6):
        write = to(queue, SendWR(number, W.RDMA_WRITE, [b"%d" % number], SIGNALED | INLINE))
        write.set_wr_rdma(queue.region.rkey, queue.region.addr)
        read = to(queue, SendWR(number + 2, W.RDMA_READ, [client.region.sge(100 * number, 1)], SIGNALED))
        read.set_wr_rdma(queue.region.rkey, queue.region.addr)
        add = to(queue, SendWR(number + 4, W.ATOMIC_FETCH_AND_ADD, [client.region.sge(0, 8)], SIGNALED, compare_add=1))
        add.remote_addr, add.rkey = queue.region.addr + 8, queue.region.rkey
        wrs += [write, read, add]
    assert core.post_send(wrs) is None
    assert sorted(number for number, *_ in client.completions(12, of_sends=True)) == [*range(12)]
    assert [length for *_, length in first.completions(3)] == [1] * 3
    assert [length for *_, length in second.completions(3)] == [2] * 3
    assert [bytes(queue.region.buf[:1]) for queue in target.queues] == [b"6", b"7"]
    assert [bytes(client.memory[at : at + 1]) for at in (600, 700)] == [b"6", b"7"]
    assert all(any(queue.region.buf[8:16]) for queue in target.queues)
    assert client.taken > before


def test_memory_of_another_queue_is_refused(ends: tuple[End, Target]) -> None:
    client, target = ends
    read = to(target.queues[0], SendWR(1, W.RDMA_READ, [client.region.sge(0, 8)], SIGNALED))
    read.set_wr_rdma(client.region.rkey, client.region.addr)
    client.qp.post_send(read)
    assert client.completions(of_sends=True)[0][:2] == (1, WCStatus.REM_ACCESS_ERR)


def test_queue_that_is_closed_is_refused(ends: tuple[End, Target]) -> None:
    client, target = ends
    first, second = target.queues
    first.receive()
    second.receive()
    number = second.srq.get_srq_num()
    second.srq.close()
    client.qp.post_send(message(first, b"hello"))
    assert client.completions(of_sends=True)[0][:2] == (7, WCStatus.SUCCESS)
    wr = SendWR(8, W.SEND, [b"hello"], SIGNALED | INLINE)
    wr.set_qp_type_xrc(number)
    client.qp.post_send(wr)
    assert client.completions(of_sends=True)[0][:2] == (8, WCStatus.REM_INV_REQ_ERR)
    assert [length for *_, length in first.completions(1)] == [5]
    qp = target.cmid.qp
    assert eventually(lambda: qp.state is QPState.ERR)


def test_limit_of_each_queue_is_reported(ends: tuple[End, Target]) -> None:
    client, target = ends
    second = target.queues[1]
    second.receive(2)
    second.srq.modify(SrqAttr(srq_limit=2), SrqAttrMask.LIMIT)
    client.qp.post_send(message(second, b"hello"))
    client.completions(of_sends=True)
    event = target.cmid.verbs.get_async_event(10)
    assert event is not None
    assert (event.event_type, event.element) == (EventType.SRQ_LIMIT_REACHED, second.srq)
    event.ack()


def test_completion_queue_that_overflows_ends_the_target(ends: tuple[End, Target]) -> None:
    client, target = ends
    second = target.queues[1]
    second.receive(20)
    client.qp.post_send([message(second, b"hello", number) for number in range(17)])
    qp = target.cmid.qp
    assert eventually(lambda: qp.state is QPState.ERR)


#: A target that computes without a pause of the interpreter, until a peer has written to its memory.
_COMPUTING = """
import sys
from rdmacm import CmId, PortSpace
from rdmacm.verbs import MR, QPType, RecvWR, SrqAttr, SrqInitAttrEx, SRQType
from rdmacm.verbs.enums import AccessFlag
listener = CmId(None, PortSpace.IB, qp_type=QPType.XRC_RECV)
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
peer = listener.get_request(20)
peer.create_qp()
srq = peer.create_srq(SrqInitAttrEx(SrqAttr(max_wr=32, max_sge=1), srq_type=SRQType.XRC))
memory = bytearray(8192)
region = MR(peer.pd, memory, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ)
for number in range(20):
    srq.post_recv(RecvWR(number, [region.sge(4096, 4096)]))
peer.accept()
print(region.addr, region.rkey, srq.get_srq_num(), flush=True)
for _ in range(2):
    peer.recv_cq.wait(20)
    peer.recv_cq.poll(1)
with peer.qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
print("computing", flush=True)
while not memory[0]:
    pass
sys.setswitchinterval(0.005)
print(*(wc.byte_len for wc in peer.recv_cq.poll(20)), memory[4096:4100].decode(), flush=True)
sys.stdin.readline()
"""


def test_messages_arrive_and_are_answered_while_the_application_computes() -> None:
    with python_program(_COMPUTING) as server:
        assert server.stdout is not None
        end = initiator(int(server.stdout.readline()))
        address, rkey, number = map(int, server.stdout.readline().split())

        def post(opcode: WROpcode, size: int) -> None:
            wr = SendWR(1, opcode, [end.region.sge(0, size)], SIGNALED, remote_addr=address, rkey=rkey)
            wr.set_qp_type_xrc(number)
            end.qp.post_send(wr)
            assert end.completions(of_sends=True)[0][:2] == (1, WCStatus.SUCCESS)

        end.memory[:] = b"data" * 2048
        for _ in range(2):
            post(W.SEND, 1)
        assert server.stdout.readline() == "computing\n"
        for size in range(16):
            post(W.SEND, 256 * size)
        post(W.RDMA_READ, 8)
        assert end.memory[:8] == bytes(8)
        assert not select.select([server.stdout], [], [], 0)[0], "it has computed all the time"
        end.memory[:8] = b"finished"
        post(W.RDMA_WRITE, 8)
        lengths = " ".join(str(256 * size) for size in range(16))
        assert server.stdout.readline() == f"{lengths} data\n"
        server.communicate("\n", timeout=20)
    end.region.close()
    end.cmid.close()


def test_domain_refuses_what_is_not_its_own() -> None:
    assert compiled is not None
    region, other = Region(), Region()
    domain = compiled.XrcDomain(region.regions)
    receives = compiled.SharedReceives(8, 1, region.regions, region.pd, None)
    foreign = compiled.SharedReceives(8, 1, other.regions, other.pd, None)
    domain.add(1, receives, None)
    for number, each, queue in ((1, receives, None), (2, foreign, None), (1 << 24, receives, None), (2, receives, 5)):
        with pytest.raises(ValueError, match="number"):
            domain.add(number, each, queue)
    for memory, shared, transport, of in (
        (other, None, TransportService.XRC, domain),
        (region, receives, TransportService.XRC, domain),
        (region, None, TransportService.RC, domain),
        (region, None, TransportService.UD, None),
    ):
        with pytest.raises((ValueError, TypeError)):
            compiled.ConnectedEngine(1, memory, shared, EngineCounters(), int(transport), of)
    domain.remove(1)
    with pytest.raises(KeyError):
        domain.remove(1)


def test_queues_live_as_long_as_their_domain() -> None:
    assert compiled is not None
    region = Region()
    domain = compiled.XrcDomain(region.regions)
    target = compiled.ConnectedEngine(0x12, region, None, EngineCounters(), int(TransportService.XRC), domain)
    connect(target, 1)
    target.ready_to_receive(RtrAttributes(0x11, 0, path_mtu=256))
    buffer = bytearray(300)
    receives = compiled.SharedReceives(8, 1, region.regions, region.pd, None)
    receives.post_work(RecvWork(1, [memoryview(buffer)]))
    domain.add(7, receives, None)
    del receives, domain
    for number, opcode in enumerate((Opcode.XRC_SEND_FIRST, Opcode.XRC_SEND_LAST)):
        head = struct.pack("!BBHIII", opcode, 0, 0xFFFF, 0x12, number, 7) + bytes(256 if number == 0 else 4)
        assert target.received(memoryview(head + flows()[0].seal([head])), 0, 0.0) == 1
        gc.collect()
    assert [(number, wc.wr_id, wc.byte_len) for number, wc in target.take_completed()] == [(7, 1, 260)]
    assert not is_held(buffer)
