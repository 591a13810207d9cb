"""Shared receive queues of the compiled core: its engines take from them, by themselves and beside those in Python."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rdmacm import CmId, CmWouldBlockError, RdmaError
from rdmacm.enums import WROpcode
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.work import RecvWork, SendWork
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.verbs import (
    CQ,
    MR,
    SGE,
    SRQ,
    AccessFlag,
    EventType,
    QPCap,
    QPInitAttr,
    RecvWR,
    ReregMRFlag,
    SendFlag,
    SrqAttr,
    SrqAttrMask,
    SrqInitAttr,
    WCStatus,
)
from support.compiled import assert_collected, is_held
from support.programs import python_program
from support.rc import ALL, Region, connect

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

FLAGS = SendFlag.SIGNALED | SendFlag.INLINE
OK, REFUSED = WCStatus.SUCCESS, WCStatus.LOC_QP_OP_ERR
SIZE = 64


# -- engines without a wire -------------------------------------------------------------------------------------


class Engines:
    """A sender, and two receivers of one queue."""

    def __init__(self, receives: int = 0) -> None:
        assert compiled is not None
        self.queue = compiled.SharedReceives(16, 4, compiled.Regions(), self, None)
        make = compiled.ConnectedEngine
        self.pairs = [
            (make(1, Region(), None, EngineCounters()), make(2, Region(), self.queue, EngineCounters()))
            for _ in range(2)
        ]
        for pair in self.pairs:
            for index, end in enumerate(pair):
                connect(end, index)
                end.ready_to_receive(RtrAttributes(2 - index, 5, path_mtu=256, access=ALL, min_rnr_timer=1))
                end.ready_to_send(RtsAttributes(5))
        self.buffers = [bytearray(1000) for _ in range(receives)]
        for number, buffer in enumerate(self.buffers):
            assert self.queue.post_work(RecvWork(number, (memoryview(buffer),)))

    def send(self, pair: int, data: bytes, opcode: WROpcode = WROpcode.SEND, limit: int = 64) -> list[tuple[int, str]]:
        """Send a message, of which ``limit`` packets leave; what completes at the receiver."""
        sender, receiver = self.pairs[pair]
        sender.post_send(SendWork(0, opcode, (memoryview(data),), imm=7))
        for one, other in ((sender, receiver), (receiver, sender)):
            for pieces, segment in one.datagrams(0.0, limit, 0):
                other.received(memoryview(b"".join(pieces)), segment, 0.0)
        return [(wc.wr_id, wc.status.name) for wc in receiver.completions()]


def test_connections_take_in_order() -> None:
    both = Engines(3)
    both.queue.limit = 2
    assert both.send(0, b"one") == [(0, "SUCCESS")]
    assert not both.queue.take_limit_reached()
    assert both.send(1, b"two", WROpcode.SEND_WITH_IMM) == [(1, "SUCCESS")]
    assert (both.queue.limit, both.queue.take_limit_reached(), both.queue.take_limit_reached()) == (0, True, False)
    assert both.send(0, b"third") == [(2, "SUCCESS")]
    assert [bytes(buffer[:3]) for buffer in both.buffers] == [b"one", b"two", b"thi"]
    assert not is_held(both.buffers[0])
    assert both.send(0, b"none left") == []
    assert both.pairs[1][1].counters.errors["rcvd_rnr_err"] == 0
    assert both.pairs[0][0].counters.errors["rcvd_rnr_err"] == 1


def test_connection_that_ends_completes_the_receive_in_progress_alone() -> None:
    both = Engines(3)
    assert both.send(0, bytes(900), limit=2) == []
    assert len(both.queue) == 2
    both.pairs[0][1].flush()
    assert [(wc.wr_id, wc.status.name) for wc in both.pairs[0][1].completions()] == [(0, "WR_FLUSH_ERR")]
    assert both.send(1, b"next") == [(1, "SUCCESS")]
    both.queue.clear()
    assert not any(map(is_held, both.buffers[1:]))


def test_message_that_is_too_long_ends_its_connection_alone() -> None:
    both = Engines(2)
    sender, receiver = both.pairs[0]
    sender.post_send(SendWork(0, WROpcode.SEND, (memoryview(bytes(1100)),)))
    for pieces, segment in sender.datagrams(0.0, 64, 0):
        receiver.received(memoryview(b"".join(pieces)), segment, 0.0)
    assert [(wc.wr_id, wc.status.name) for wc in receiver.completions()] == [(0, "LOC_LEN_ERR")]
    assert receiver.failed
    assert both.send(1, b"next") == [(1, "SUCCESS")]


def test_queue_that_is_full() -> None:
    queue = Engines(16).queue
    assert not queue.post_work(RecvWork(16, (memoryview(bytearray(8)),)))
    queue.max_wr = 17
    assert queue.post_work(RecvWork(16, (memoryview(bytearray(8)),)))
    assert (len(queue), queue.max_wr) == (17, 17)


def test_queue_and_buffers_in_a_cycle_are_collected() -> None:
    def post(sent: memoryview, received: memoryview) -> object:
        both = Engines()
        both.pairs[0][0].post_send(SendWork(1, WROpcode.SEND, (sent,)))
        both.queue.post_work(RecvWork(2, (received,)))
        return both

    assert_collected(post)


def test_wrong_types_are_refused() -> None:
    both = Engines(1)
    assert compiled is not None
    for call in (
        lambda: both.queue.post_work(5),
        lambda: both.queue.post_work(RecvWork(1, (memoryview(bytearray(1)),) * 33)),
        lambda: both.queue.look_up_again("key"),
        lambda: compiled.SharedReceives(1, 1, compiled.Regions(), None, 5),
        lambda: compiled.ConnectedEngine(1, Region(), 5, EngineCounters()),
        lambda: setattr(both.queue, "limit", -1),
    ):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            call()
    wr = RecvWR(1)
    assert both.queue.post(wr) is wr, "without a wire nothing is posted directly"


# -- connections of a wire --------------------------------------------------------------------------------------


class Ends:
    """Two clients, and their peers, which share a queue."""

    def __init__(self) -> None:
        self.listener = CmId()
        self.listener.bind_addr(("127.0.0.1", 0))
        self.listener.listen()
        self.clients: list[CmId] = []
        self.servers: list[CmId] = []
        for _ in range(2):
            thread = threading.Thread(target=self._accept)
            thread.start()
            client = CmId()
            client.resolve_addr(("127.0.0.1", self.listener.src_port))
            client.resolve_route()
            client.create_qp(QPInitAttr(cap=QPCap(32, 32, 1, 1, 64)))
            client.connect()
            thread.join()
            self.clients.append(client)
        for number in range(20):
            self.srq.post_recv(RecvWR(number, [self.inbox.sge(0, SIZE)]))
            assert self.send(number % 2, b"hello") == (number, OK)
        assert all(server.qp.backend.core is not None for server in self.servers)

    def _accept(self) -> None:
        server = self.listener.get_request(10)
        if not self.servers:
            self.pd = server.pd
            self.cq = CQ(self.pd.context, 64)
            self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(8, 2)))
            self.memory = bytearray(SIZE)
            self.inbox = MR(self.pd, self.memory, AccessFlag.LOCAL_WRITE)
        server.create_qp(QPInitAttr(scq=self.cq, rcq=self.cq, srq=self.srq, cap=QPCap(8, 0, 1, 0)))
        server.accept()
        self.servers.append(server)

    def send(self, client: int, data: bytes) -> tuple[int, WCStatus]:
        """Send a message, and return what its receive completes with."""
        self.clients[client].post_send(1, data, flags=FLAGS)
        self.clients[client].get_send_comp(20)
        assert self.cq.wait(20)
        (found,) = self.cq.poll(1)
        return found.wr_id, found.status

    def events(self) -> list[EventType]:
        found = []
        with suppress(CmWouldBlockError):
            while True:
                with self.pd.context.get_async_event(0) as event:
                    found.append(event.event_type)
        return found

    def close(self) -> None:
        for cmid in (*self.clients, *self.servers):
            cmid.destroy_qp()
        self.srq.close()
        self.inbox.close()
        self.cq.close()
        for cmid in (*self.clients, *self.servers, self.listener):
            cmid.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_receives_are_posted_directly(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    by_python: list[int] = []
    post = SoftSRQ.post_recv

    def posting(self: SoftSRQ, wrs: list[RecvWR]) -> None:
        by_python.extend(wr.wr_id for wr in wrs)
        post(self, wrs)

    monkeypatch.setattr(SoftSRQ, "post_recv", posting)
    usual = [RecvWR(n, [ends.inbox.sge(0, SIZE)]) for n in range(3)]
    ends.srq.post_recv(usual)
    ends.srq.post_recv([RecvWR(3, [ends.inbox.sge(0, SIZE // 2), ends.inbox.sge(SIZE // 2, 8)])])
    assert by_python == []
    ends.srq.post_recv([usual[0], RecvWR(4, [SGE(1, 1, 1)])])
    ends.srq.post_recv(tuple(usual[:1]))
    assert by_python == [4, 0]
    with pytest.raises(RdmaError) as caught:
        ends.srq.post_recv([usual[0], RecvWR(5), RecvWR(6)])
    assert caught.value.errno == errno.ENOMEM
    assert isinstance(caught.value.bad_wr, RecvWR)
    assert caught.value.bad_wr.wr_id == 5
    with pytest.raises(RdmaError) as caught:
        ends.srq.post_recv(RecvWR(7, [ends.inbox.sge(0, 1)] * 3))
    assert caught.value.errno == errno.EINVAL
    assert [ends.send(n % 2, b"x" * 40) for n in range(5)] == [(0, OK), (1, OK), (2, OK), (3, OK), (0, OK)]
    assert ends.memory[:40] == b"x" * 40
    assert ends.send(0, b"x") == (4, REFUSED)
    with pytest.raises(RdmaError) as caught:
        ends.servers[0].qp.post_recv(usual[0])
    assert caught.value.errno == errno.EINVAL


def test_limit_is_reported_once(ends: Ends) -> None:
    ends.srq.post_recv([RecvWR(n, [ends.inbox.sge(0, SIZE)]) for n in range(6)])
    ends.srq.modify(SrqAttr(srq_limit=4), SrqAttrMask.LIMIT)
    found = []
    for number in range(4):
        assert ends.send(number % 2, b"x") == (number, OK)
        found.append((ends.srq.query().srq_limit, ends.events()))
    assert found == [(4, []), (4, []), (0, [EventType.SRQ_LIMIT_REACHED]), (0, [])]


@pytest.mark.parametrize("how", [list, tuple])
@pytest.mark.parametrize("change", ["buffer", "nothing"])
def test_region_that_is_registered_anew(ends: Ends, change: str, how: type) -> None:
    """A list is posted directly, a tuple as Python's requests."""
    ends.srq.post_recv(how([RecvWR(n, [ends.inbox.sge(0, SIZE)]) for n in range(3)]))
    ends.memory[:] = bytes(SIZE)
    if change == "nothing":
        ends.inbox.rereg(ReregMRFlag.CHANGE_ACCESS, access=AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ)
        assert ends.send(0, b"one") == (0, OK)
        assert ends.memory[:3] == b"one"
        return
    ends.inbox.rereg(ReregMRFlag.CHANGE_TRANSLATION, None, bytearray(SIZE))
    assert [ends.send(n, b"one") for n in range(2)] == [(0, REFUSED), (1, REFUSED)]
    assert bytes(ends.memory) == bytes(SIZE)


def test_child_leaves_the_queue_to_the_parent(ends: Ends) -> None:
    ends.srq.post_recv(RecvWR(1, [ends.inbox.sge(0, SIZE)]))
    child = os.fork()
    if not child:
        status = 1
        try:
            ends.srq.post_recv(RecvWR(2, [ends.inbox.sge(0, SIZE)]))
        except RdmaError as error:
            status = 0 if error.errno == errno.EBADF else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ends.send(0, b"x") == (1, OK)


#: A server that computes without a pause of the interpreter until the last receive of its queue is used.
_COMPUTING = """
import sys
from rdmacm import CmId, CmWouldBlockError
from rdmacm.verbs import CQ, MR, SRQ, AccessFlag, QPCap, QPInitAttr, RecvWR, SrqAttr, SrqAttrMask, SrqInitAttr
listener = CmId()
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
peers, memory = [], bytearray(64)
for number in range(2):
    peer = listener.get_request(20)
    if not peers:
        cq, srq = CQ(peer.verbs, 64), SRQ(peer.pd, SrqInitAttr(SrqAttr(32, 1)))
        region = MR(peer.pd, memory, AccessFlag.LOCAL_WRITE)
        srq.post_recv([RecvWR(n, [region.sge(0, 8)]) for n in range(16)])
    peer.create_qp(QPInitAttr(scq=cq, rcq=cq, srq=srq, cap=QPCap(4, 0, 1, 0)))
    peer.accept()
    peers.append(peer)
seen = 0
while seen < 16:
    cq.wait(20)
    seen += len(cq.poll(16))
srq.post_recv([RecvWR(n, [region.sge(8 * (n + 1), 8)]) for n in range(6)])
srq.modify(SrqAttr(srq_limit=4), SrqAttrMask.LIMIT)
assert all(peer.qp.backend.core is not None for peer in peers)
with peers[0].qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
print("computing", flush=True)
while not memory[48]:
    pass
context = peers[0].verbs
sys.setswitchinterval(0.005)
with context.get_async_event(20) as event:
    print(event.event_type.name, event.element is srq, srq.query().srq_limit, flush=True)
try:
    context.get_async_event(0)
except CmWouldBlockError:
    print("no other", flush=True)
print(*[(wc.wr_id, wc.status.name, wc.byte_len) for wc in cq.poll(16)], bytes(memory[8:56:8]), flush=True)
sys.stdin.readline()
"""


def test_messages_and_the_limit_while_the_application_computes() -> None:
    with python_program(_COMPUTING) as server:
        assert server.stdout is not None
        clients = []
        port = int(server.stdout.readline())
        for _ in range(2):
            client = CmId()
            client.resolve_addr(("127.0.0.1", port))
            client.resolve_route()
            client.create_qp(QPInitAttr(cap=QPCap(8, 1, 1, 1, 64)))
            client.connect()
            clients.append(client)

        def send(number: int) -> None:
            client = clients[number % 2]
            client.post_send(number, b"%d" % number, flags=FLAGS)
            assert client.get_send_comp(20).status is OK

        for number in range(16):
            send(number % 2)
        assert server.stdout.readline() == "computing\n"
        for number in range(1, 7):
            send(number)
        assert server.stdout.readline() == "SRQ_LIMIT_REACHED True 0\n"
        assert server.stdout.readline() == "no other\n"
        done = " ".join(str((number, "SUCCESS", 1)) for number in range(6))
        assert server.stdout.readline() == f"{done} {b'123456'!r}\n"
        server.communicate("\n", timeout=20)
    for client in clients:
        client.close()
