"""The socket layer of the compiled core, between queue pairs over the loopback interface."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rdmacm import CmId, RdmaError
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.core_choice import compiled
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.verbs import (
    CQ,
    MR,
    QP,
    CompChannel,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendFlag,
    SendWR,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from rdmacm.verbs.enums import AccessFlag
from support.clock import eventually
from support.compiled import CoreEnd
from support.programs import python_program

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

SIGNALED, INLINE = SendFlag.SIGNALED, SendFlag.INLINE
DEPTH = 64
SIZE = 4096


@dataclass
class End(CoreEnd):
    cmid: CmId
    memory: bytearray
    region: MR

    @property
    def qp(self) -> QP:
        return self.cmid.qp

    @property
    def backend(self) -> SoftQP:
        backend = self.qp.backend
        assert isinstance(backend, SoftQP)
        return backend

    def completions(self, count: int = 1, *, of_sends: bool = False) -> list[tuple[int, WCStatus, WCOpcode, int]]:
        cq = self.cmid.send_cq if of_sends else self.cmid.recv_cq
        assert cq is not None
        found: list[tuple[int, WCStatus, WCOpcode, int]] = []
        while len(found) < count:
            assert cq.wait(10)
            found.extend((wc.wr_id, wc.status, wc.opcode, wc.byte_len) for wc in cq.poll(count - len(found)))
        return found

    def send(self, data: bytes, flags: SendFlag = SIGNALED | INLINE) -> None:
        self.cmid.post_send(7, data, flags=flags)

    def receive(self, count: int = 1) -> None:
        self.qp.post_recv([RecvWR(number, [self.region.sge(0, SIZE)]) for number in range(count)])


def make_end(cmid: CmId, scq: CQ | None = None, size: int = SIZE) -> End:
    cmid.create_qp(QPInitAttr(scq=scq, cap=QPCap(DEPTH, DEPTH, 2, 2, 256)))
    memory = bytearray(size)
    access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    return End(cmid, memory, MR(cmid.pd, memory, access))


def connect(listener: CmId, host: str = "127.0.0.1") -> tuple[End, End]:
    """Two connected ends that have joined the port: each has received."""
    accepted: list[End] = []

    def accept() -> None:
        end = make_end(listener.get_request(10))
        end.receive()
        end.cmid.accept()
        accepted.append(end)

    thread = threading.Thread(target=accept)
    thread.start()
    cmid = CmId()
    cmid.resolve_addr((host, listener.src_port))
    cmid.resolve_route()
    client = make_end(cmid)
    client.receive()
    cmid.connect()
    thread.join()
    server = accepted[0]
    for one, other in ((client, server), (server, client)) * 8:
        one.send(b"hello")
        other.completions()
        one.completions(of_sends=True)
        other.receive()
    assert client.backend.core is not None
    assert server.backend.core is not None
    return client, server


@pytest.fixture
def listener() -> Iterator[CmId]:
    with CmId() as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        yield listener


@pytest.fixture
def ends(listener: CmId) -> Iterator[tuple[End, End]]:
    ends = connect(listener)
    yield ends
    for end in ends:
        end.region.close()
        end.cmid.close()


def test_list_is_one_train_and_keeps_its_order(ends: tuple[End, End]) -> None:
    client, server = ends
    server.receive(15)
    before = client.taken
    texts = [b"%02d" % number * 8 for number in range(16)]
    client.qp.post_send([SendWR(n, WROpcode.SEND, [text], SIGNALED | INLINE) for n, text in enumerate(texts)])
    found = server.completions(16)
    assert [(status, length) for _, status, _, length in found] == [(WCStatus.SUCCESS, 16)] * 16
    assert bytes(server.memory[:16]) == texts[-1]
    sent = client.completions(16, of_sends=True)
    assert [(number, opcode) for number, _, opcode, _ in sent] == [(n, WCOpcode.SEND) for n in range(16)]
    assert client.taken - before < 16, "the receives came in trains"


def test_deferred_acks_are_left_to_the_thread_of_the_core(ends: tuple[End, End]) -> None:
    """If they were counted, the helper would take the lock every 2 ms, and compete with the application for it."""
    left, right = ends
    mux = left.backend._mux
    before = mux.deferrals
    for one, other in ((left, right), (right, left)) * 8:
        other.receive()
        one.send(b"hello")
        other.completions()
    assert mux.deferrals == before


def test_signals_are_for_the_threads_of_the_application(ends: tuple[End, End]) -> None:
    assert ends[0].wire.core_wire is not None
    assert ends[0].wire.core_wire.is_served
    masks = [path.read_text().split("SigBlk:")[1].split()[0] for path in Path("/proc/self/task").glob("*/status")]
    wanted = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
    assert any(int(mask, 16) & wanted == wanted for mask in masks), "the thread that serves peers takes none"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_route_without_trains_is_tried_once(ends: tuple[End, End]) -> None:
    client, server = ends
    sock = client.wire._out.sockets[False]
    assert sock is not None
    sock.setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK: the kernel refuses trains without UDP checksums
    server.receive(31)
    before = client.wire.counters["trains_cut"]
    try:
        for _ in range(2):
            client.qp.post_send([SendWR(n, WROpcode.SEND, [b"text"], SIGNALED | INLINE) for n in range(16)])
            assert [wc[1] for wc in server.completions(16)] == [WCStatus.SUCCESS] * 16
            client.completions(16, of_sends=True)
    finally:
        sock.setsockopt(socket.SOL_SOCKET, 11, 0)
    assert client.wire.counters["trains_cut"] == before + 1


def test_strays_alone_are_counted(ends: tuple[End, End]) -> None:
    client, _ = ends
    context = client.cmid.verbs
    assert context is not None
    context.query_counters()  # takes what was refused before
    before = client.wire.counters["short"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"too short", ("127.0.0.1", ROCE_PORT))

    def is_counted() -> bool:
        client.cmid.recv_cq.poll(1)
        context.query_counters()
        return client.wire.counters["short"] == before + 1

    eventually(is_counted, "it is not counted")


def test_ipv6() -> None:
    with CmId() as listener:
        listener.bind_addr(("::1", 0))
        listener.listen()
        ends = client, server = connect(listener, "::1")
        server.receive(3)
        before = client.taken
        client.qp.post_send([SendWR(n, WROpcode.SEND, [client.region.sge(0, SIZE)], SIGNALED) for n in range(4)])
        assert [length for *_, length in server.completions(4)] == [SIZE] * 4
        client.completions(4, of_sends=True)
        assert client.taken > before
        for end in ends:
            end.region.close()
            end.cmid.close()


def test_one_sided_operations(ends: tuple[End, End]) -> None:
    client, server = ends
    client.memory[:5] = b"write"
    server.memory[100:104] = b"read"
    remote = server.region
    client.qp.post_send(
        [
            SendWR(1, WROpcode.RDMA_WRITE, [client.region.sge(0, 5)], 0, remote_addr=remote.addr, rkey=remote.rkey),
            SendWR(
                2, WROpcode.RDMA_READ, [client.region.sge(50, 4)], SIGNALED, remote_addr=remote.addr + 100,
                rkey=remote.rkey,
            ),
        ]
    )  # fmt: skip
    assert client.completions(of_sends=True) == [(2, WCStatus.SUCCESS, WCOpcode.RDMA_READ, 4)]
    assert bytes(server.memory[:5]) == b"write"
    assert bytes(client.memory[50:54]) == b"read"
    assert client.backend._sends + client.backend.core.take_posted_counts()[0] == 0  # type: ignore[union-attr]


def test_what_the_core_does_not_take_is_posted_by_python(ends: tuple[End, End]) -> None:
    client, server = ends
    server.receive(3)
    client.memory[:6] = b"abcdef"
    sges = [client.region.sge(0, 2), client.region.sge(4, 2)]
    client.qp.post_send(
        [
            SendWR(1, WROpcode.SEND, [client.region.sge(0, 3)], SIGNALED),
            SendWR(2, WROpcode.SEND, sges, SIGNALED),
            SendWR(3, WROpcode.SEND_WITH_IMM, [client.region.sge(0, 1)], SIGNALED, imm_data=5),
        ]
    )
    assert [length for *_, length in server.completions(3)] == [3, 4, 1]
    assert [number for number, *_ in client.completions(3, of_sends=True)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (SendWR(2, WROpcode.SEND, [b"x" * 257], INLINE), errno.EINVAL),
        (SendWR(2, WROpcode.SEND, [b"x"]), errno.EINVAL),
        (SendWR(2, WROpcode.RDMA_WRITE, [b"x"], INLINE, remote_addr=1 << 64), errno.EINVAL),
        (SendWR(2, WROpcode.RDMA_WRITE, [b"x"], INLINE, rkey=-1), errno.EINVAL),
        (SendWR(2, WROpcode.RDMA_READ, [b"x"], INLINE), errno.EINVAL),
        (SendWR(2, WROpcode.SEND, [b"x"], 1 << 20), errno.EINVAL),
        (SendWR(2.5, WROpcode.SEND, [b"x"], INLINE), errno.EINVAL),  # type: ignore[arg-type]
    ],
)
def test_refused_request_ends_the_list(ends: tuple[End, End], wrong: SendWR, code: int) -> None:
    client, server = ends
    with pytest.raises(RdmaError) as caught:
        client.qp.post_send([SendWR(1, WROpcode.SEND, [b"before"], SIGNALED | INLINE), wrong])
    assert caught.value.errno == code
    assert caught.value.bad_wr is wrong
    assert server.completions()[0][3] == 6
    assert client.completions(of_sends=True)[0][0] == 1


def test_wrong_key_completes_with_an_error(ends: tuple[End, End]) -> None:
    client, _ = ends
    sge = client.region.sge(0, 4)
    sge.lkey ^= 1
    client.qp.post_send(SendWR(9, WROpcode.SEND, [sge], SIGNALED))
    assert client.completions(of_sends=True)[0][:2] == (9, WCStatus.LOC_PROT_ERR)
    assert client.backend.core is None


def test_full_queues(ends: tuple[End, End]) -> None:
    client, server = ends
    recvs = [RecvWR(number, [server.region.sge(0, 64)]) for number in range(DEPTH)]
    with pytest.raises(RdmaError) as caught:
        server.qp.post_recv(recvs)
    assert caught.value.errno == errno.ENOMEM
    assert caught.value.bad_wr is recvs[-1], "one receive was posted before"
    for _ in range(3):  # silent requests free their places as well
        client.qp.post_send([SendWR(n, WROpcode.SEND, [b"x"], INLINE) for n in range(DEPTH // 2)])
        server.completions(DEPTH // 2)
        server.receive(DEPTH // 2)
        client.send(b"x")
        client.completions(of_sends=True)
        server.completions()
        server.receive()


def test_region_that_is_deregistered_under_way(ends: tuple[End, End]) -> None:
    client, server = ends
    memory = bytearray(64)
    region = MR(server.cmid.pd, memory, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ)
    server.qp.post_recv(RecvWR(5, [region.sge()]))
    region.close()
    with pytest.raises(BufferError):
        memory.append(1)
    for _ in range(2):
        client.send(b"into it")
    server.completions(2)
    assert bytes(memory[:7]) == b"into it"
    memory.append(1)
    client.completions(2, of_sends=True)
    client.cmid.post_read(3, client.region, server.region.addr, region.rkey, 0, 4, SIGNALED)
    assert client.completions(of_sends=True)[0][1] is WCStatus.REM_ACCESS_ERR


def test_tap_sees_every_packet(ends: tuple[End, End]) -> None:
    client, server = ends
    seen: list[bool] = []
    before = client.taken
    client.wire.tap = lambda outgoing, *_: seen.append(outgoing)
    try:
        client.send(b"x")
        server.completions()
        client.completions(of_sends=True)
        assert client.taken == before
        assert {True, False} == set(seen)
    finally:
        client.wire.tap = None
    server.receive()
    client.send(b"x")
    server.completions()
    assert client.taken > before


def test_channel_reports_what_the_core_completes(ends: tuple[End, End]) -> None:
    client, server = ends
    cq, channel = server.cmid.recv_cq, server.cmid.recv_cq_channel
    assert cq is not None
    assert isinstance(channel, CompChannel)
    server.receive(2)
    cq.req_notify()
    client.send(b"one")
    assert channel.get_cq_event(10) is cq
    cq.ack_events()
    assert len(cq.poll(5)) == 1
    cq.req_notify(solicited_only=True)
    client.send(b"two")
    client.completions(2, of_sends=True)
    client.send(b"three", SIGNALED | INLINE | SendFlag.SOLICITED)
    assert channel.get_cq_event(10) is cq
    cq.ack_events()
    assert len(cq.poll(5)) == 2


def test_queue_that_overflows(listener: CmId) -> None:
    client, server = connect(listener)
    cq = server.cmid.recv_cq
    assert cq is not None
    cq.resize(2)
    server.receive(4)
    client.qp.post_send([SendWR(n, WROpcode.SEND, [b"x"], SIGNALED | INLINE) for n in range(3)])
    client.completions(3, of_sends=True)
    assert cq.wait(10)
    assert len(cq.poll(5)) == 2
    with pytest.raises(RdmaError) as caught:
        while not cq.poll(5):
            pass
    assert caught.value.errno == errno.EOVERFLOW
    assert server.backend.core is None
    for end in (client, server):
        end.region.close()
        end.cmid.close()


def test_threads_post_and_poll(ends: tuple[End, End]) -> None:
    client, server = ends
    count, failed = 300, []
    cq = server.cmid.recv_cq
    assert cq is not None

    def work(end: End) -> None:
        """Send, and take the completions of sends."""
        try:
            for _ in range(count):
                end.send(b"a message")
                end.completions(of_sends=True)
        except BaseException as error:
            failed.append(error)
            raise

    server.receive(DEPTH - 1)
    threads = [threading.Thread(target=work, args=(client,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    received = 0
    while received < 2 * count and not failed:
        found = cq.poll(16)
        received += len(found)
        assert all(wc.byte_len == 9 for wc in found)
        server.receive(len(found)) if found else None
    for thread in threads:
        thread.join()
    assert not failed


def test_fork_leaves_the_port_to_the_parent(ends: tuple[End, End]) -> None:
    client, server = ends
    child = os.fork()
    if not child:
        status = 1
        try:
            client.send(b"from the child")
        except RdmaError as error:
            status = 0 if error.errno == errno.EBADF else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.send(b"from the parent")
    assert server.completions()[0][3] == 15


#: A server that computes without a pause of the interpreter, until a peer has written to its memory.
_COMPUTING = """
import struct, sys
from rdmacm import CmId
from rdmacm.verbs import MR, SendFlag
from rdmacm.verbs.enums import AccessFlag
listener = CmId()
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
peers, memory = [], bytearray(64)
for _ in range(2):
    peer = listener.get_request(20)
    peer.create_qp()
    access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
    region = MR(peer.pd, memory, access)
    for number in range(4):
        peer.post_recv(number, region, 32, 16)
    peer.accept()
    description = struct.pack("!QI", region.addr, region.rkey)
    peer.post_send(0, description, flags=SendFlag.INLINE | SendFlag.SIGNALED)
    peer.get_send_comp(20)
    peers.append((peer, region))
for peer, region in peers:
    for number in range(8):
        peer.get_recv_comp(20)
        peer.post_recv(number, region, 32, 16)
with peers[0][0].qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
print("computing", flush=True)
while not memory[0]:
    pass
sys.setswitchinterval(0.005)
peers[0][0].get_recv_comp(20)
print(memory[8], flush=True)
sys.stdin.readline()
"""


def connected(port: int, host: str = "127.0.0.1") -> tuple[End, int, int]:
    """A connected end, and address and R_Key of the server's memory."""
    cmid = CmId()
    cmid.resolve_addr((host, port))
    cmid.resolve_route()
    end = make_end(cmid)
    end.receive()
    cmid.connect()
    end.completions()
    address = int.from_bytes(end.memory[:8], "big")
    rkey = int.from_bytes(end.memory[8:12], "big")
    return end, address, rkey


def test_peers_are_served_while_the_application_computes() -> None:
    with python_program(_COMPUTING) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        (one, address, rkey), (two, *_) = connected(port), connected(port)
        for end in (one, two):  # both ends join the port
            for _ in range(8):
                end.send(b"ready")
                end.completions(of_sends=True)
        assert server.stdout.readline() == "computing\n"
        for _ in range(3):
            two.cmid.post_read(1, two.region, address, rkey, 0, 8, SIGNALED)
            assert two.completions(of_sends=True) == [(1, WCStatus.SUCCESS, WCOpcode.RDMA_READ, 8)]
        atomic = SendWR(
            2, WROpcode.ATOMIC_FETCH_AND_ADD, [one.region.sge(0, 8)], SIGNALED, remote_addr=address + 8, rkey=rkey,
            compare_add=1 << 56 if sys.byteorder == "big" else 3,
        )  # fmt: skip
        one.qp.post_send(atomic)
        one.send(b"after it")
        assert [number for number, *_ in one.completions(2, of_sends=True)] == [2, 7]
        two.cmid.post_read(1, two.region, address, rkey, 0, 16, SIGNALED)
        assert two.completions(of_sends=True) == [(1, WCStatus.SUCCESS, WCOpcode.RDMA_READ, 16)]
        assert any(two.memory[8:16]), "the atomic is executed"
        two.memory[:1] = b"x"
        two.cmid.post_write(3, two.region, address, rkey, 0, 1, SIGNALED)
        assert two.completions(of_sends=True)[0][:2] == (3, WCStatus.SUCCESS)
        assert int(server.stdout.readline()) == 3
        server.communicate("\n", timeout=20)
    for end in (one, two):
        end.region.close()
        end.cmid.close()


#: A client that computes without a pause of the interpreter from its request on, until the request was executed.
_COMPUTING_CLIENT = """
import struct, sys
from rdmacm import CmId, IdOption, OptionLevel
from rdmacm.verbs import MR, SendFlag, SendWR, WROpcode
from rdmacm.verbs.enums import AccessFlag
cmid = CmId()
cmid.resolve_addr(("127.0.0.1", int(sys.argv[1])))
cmid.resolve_route()
cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 15)  # 134 ms, eight times at most
cmid.create_qp()
memory = bytearray(1 << 15)
region = MR(cmid.pd, memory, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE)
for number in range(4):
    cmid.post_recv(number, region, 64, 16)
cmid.connect()
for number in range(8):
    description = struct.pack("!QI", region.addr, region.rkey)
    cmid.post_send(0, description, flags=SendFlag.INLINE | SendFlag.SIGNALED)
    cmid.get_send_comp(20)
    cmid.get_recv_comp(20)
    cmid.post_recv(number, region, 64, 16)
opcode, length, address, rkey = map(int, sys.stdin.readline().split())
memory[1000:1000 + length] = b"x" * length
request = SendWR(1, WROpcode(opcode), [region.sge(1000, length)], SendFlag.SIGNALED, remote_addr=address, rkey=rkey)
with cmid.qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
cmid.qp.post_send([request])
while not memory[0] and memory[1000] == ord("x"):
    pass
sys.setswitchinterval(0.005)
counters = cmid.verbs.query_counters()
print(cmid.get_send_comp(20).status.name, counters["completer_retry_err"], counters["rcvd_rnr_err"], flush=True)
sys.stdin.readline()
"""

#: Of asm/socket.h: take the first packets of a socket, and what its memory is used for.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MEMINFO = 26, 27, 55


def _lose(sock: socket.socket, opcode: int) -> None:
    """Let a UDP socket lose all packets that have an opcode in their BTH, which follows the UDP header."""
    lines = (0x30, 0, 0, 8), (0x15, 0, 1, opcode), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF)  # load, compare, drop, take
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(lines), ctypes.addressof(code)))


def _lost_packets(sockets: list[socket.socket]) -> int:
    return sum(struct.unpack("9I", sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36))[8] for sock in sockets)


@dataclass
class Computing:
    """The computing client, its connection here, which has no receive, and where its memory is."""

    client: subprocess.Popen[str]
    server: End
    address: int
    rkey: int

    def request(self, opcode: WROpcode, length: int) -> None:
        """Have it post a request, and compute."""
        assert self.client.stdin is not None
        region = self.server.region
        self.client.stdin.write(f"{int(opcode)} {length} {region.addr + 1000} {region.rkey}\n")
        self.client.stdin.flush()

    def end(self) -> None:
        """End the computation."""
        self.server.memory[30_000] = 1
        self.server.cmid.post_write(1, self.server.region, self.address, self.rkey, 30_000, 1)

    def result(self) -> list[str]:
        """What it prints then: the status of its request, and how often it has sent again."""
        assert self.client.stdout is not None
        assert select.select([self.client.stdout], [], [], 10)[0], "it computes for ever"
        return self.client.stdout.readline().split()


@pytest.fixture
def computing(listener: CmId) -> Iterator[Computing]:
    with python_program(_COMPUTING_CLIENT, str(listener.src_port)) as client:
        server = make_end(listener.get_request(10), size=1 << 15)
        server.receive(8)
        server.cmid.accept()
        for _ in range(8):
            server.completions()
            server.send(b"ready")
            server.completions(of_sends=True)
        yield Computing(client, server, *struct.unpack_from("!QI", server.memory))
        server.region.close()
        server.cmid.close()


@pytest.mark.parametrize(
    ("opcode", "length", "lost"),
    [
        (WROpcode.RDMA_WRITE, 8, 0x0A),  # RDMA WRITE Only: the retransmission timer
        # RDMA WRITE First: the NAK of the packets after it
        pytest.param(WROpcode.RDMA_WRITE, 10_000, 0x06, marks=pytest.mark.slow),
        pytest.param(WROpcode.RDMA_READ, 8, 0x0C, marks=pytest.mark.slow),  # RDMA READ Request
    ],
)
def test_lost_packets_are_sent_again_while_the_application_computes(
    computing: Computing, opcode: WROpcode, length: int, lost: int
) -> None:
    server = computing.server
    sockets = [sock for sock in server.wire._out.sockets if sock is not None]
    before = _lost_packets(sockets)
    for sock in sockets:
        _lose(sock, lost)
    computing.request(opcode, length)
    eventually(lambda: _lost_packets(sockets) != before, "nothing is lost")
    assert server.memory[1000] == 0
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    if opcode is WROpcode.RDMA_WRITE:

        def written() -> bool:
            server.cmid.recv_cq.poll(1)
            return server.memory[1000 : 1000 + length] == b"x" * length

        eventually(written, "the client has not sent it again")
        computing.end()
    status, retries, _ = computing.result()
    assert status == "SUCCESS"
    assert int(retries) > 0


def test_message_without_a_receive_is_sent_again_while_the_application_computes(computing: Computing) -> None:
    server, verbs = computing.server, computing.server.cmid.verbs
    assert verbs is not None
    before = verbs.query_counters()["send_rnr_err"]
    computing.request(WROpcode.SEND, 8)

    def refused() -> bool:
        server.cmid.recv_cq.poll(1)
        return verbs.query_counters()["send_rnr_err"] != before

    eventually(refused, "no message has come")
    server.receive()
    assert server.completions()[0][3] == 8
    assert server.memory[:8] == b"x" * 8
    computing.end()
    status, _, pauses = computing.result()
    assert status == "SUCCESS"
    assert int(pauses) > 0
