"""Deferred ACKs: sent after the application has its completion, and soon in any case."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rdmacm import CmEventType
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import QPAttrMask, QPState, SendFlag, WCStatus, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR
from support.clock import pause
from support.echo import EchoClient
from support.netns import python_environment
from support.softdev import Connected, Pair, PairRuntime, sge

FLAGS = SendFlag.SIGNALED | SendFlag.INLINE
PATH = WirePath(bytes([10, 0, 0, 2]), bytes([10, 0, 0, 1]))


@pytest.fixture
def ends(pair: Pair) -> Connected:
    """The right end may defer ACKs, as it may while the helper thread polls often."""
    ends = Connected(pair)
    pair.b.mux.may_defer_acks = True
    for number in range(8):
        ends.right.post_recv([RecvWR(number, [sge(pair.b.region(64))])])
    return ends


def send(ends: Connected, count: int = 1) -> None:
    for number in range(count):
        ends.left.post_send([SendWR(number, WROpcode.SEND, [sge(ends.pair.a.region(b"hello"))])])


def sent_by_right(ends: Connected) -> list[Opcode]:
    """The opcodes that the right end has sent since the last call."""
    found = [Opcode(datagram[0]) for path, datagram, _ in ends.pair.net.sent if path.local == PATH.local]
    ends.pair.net.sent.clear()
    return found


def test_poll_returns_before_the_ack_is_sent(ends: Connected) -> None:
    send(ends)
    assert [wc.wr_id for wc in ends.right_cq.poll(1)] == [0]
    assert sent_by_right(ends) == []
    assert ends.right_cq.poll(1) == []
    assert sent_by_right(ends) == [Opcode.RC_ACKNOWLEDGE]


def test_ack_is_deferred_with_more_completions_queued(ends: Connected) -> None:
    send(ends, 3)
    assert len(ends.right_cq.poll(1)) == 1
    assert sent_by_right(ends) == []
    assert len(ends.right_cq.poll(1)) == 1
    assert sent_by_right(ends) == [Opcode.RC_ACKNOWLEDGE], "one for all three"


@pytest.mark.parametrize("how", ["wait", "channel"])
def test_wait_returns_before_the_ack_is_sent(pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairRuntime, "drive", Runtime.drive)
    channel = pair.b.device.create_channel()
    cq = pair.b.cq(channel=channel, owner="queue")
    left, right = pair.a.qp(), pair.b.qp(cq)
    pair.connect(left, right)
    right.post_recv([RecvWR(1, [sge(pair.b.region(64))])])
    pair.b.mux.may_defer_acks = True
    cq.req_notify(False)
    left.post_send([SendWR(1, WROpcode.SEND, [sge(pair.a.region(b"hello"))])])
    if how == "wait":
        assert cq.wait(1)
    else:
        assert channel.get(1) == "queue"
    pair.net.sent.clear()
    assert len(cq.poll(1)) == 1
    assert pair.net.sent == [], "the ACK is still deferred"
    assert cq.poll(1) == []
    assert [datagram[0] for _, datagram, _ in pair.net.sent] == [Opcode.RC_ACKNOWLEDGE]
    channel.close()


def test_next_send_precedes_the_deferred_ack(ends: Connected) -> None:
    send(ends)
    ends.right_cq.poll(1)
    ends.right.post_send([SendWR(9, WROpcode.SEND, [sge(ends.pair.b.region(b"answer"))])])
    assert sent_by_right(ends) == [Opcode.RC_SEND_ONLY, Opcode.RC_ACKNOWLEDGE]


def test_post_to_a_full_send_queue_processes_the_ack(pair: Pair) -> None:
    left, right = pair.a.qp(sends=1), pair.b.qp()
    pair.connect(left, right)
    for number in range(2):
        right.post_recv([RecvWR(number, [sge(pair.b.region(64))])])
        left.post_send([SendWR(number, WROpcode.SEND, [sge(pair.a.region(b"hello"))])])
        pair.b.provider.runtime.progress()  # sends the ACK, without which the second post would raise ENOMEM


def test_progress_without_a_poll_of_the_queue_sends_the_ack(ends: Connected) -> None:
    send(ends)
    ends.pair.b.provider.runtime.progress()
    assert sent_by_right(ends) == [Opcode.RC_ACKNOWLEDGE]


def test_ack_is_not_deferred_without_permission(ends: Connected) -> None:
    ends.pair.b.mux.may_defer_acks = False
    send(ends)
    assert len(ends.right_cq.poll(1)) == 1
    assert sent_by_right(ends) == [Opcode.RC_ACKNOWLEDGE]
    assert ends.pair.b.mux.deferrals == 1, "an ACK that could have been deferred is counted"


def test_nak_is_sent_at_once(ends: Connected) -> None:
    send(ends)
    ends.left.post_send([SendWR(7, WROpcode.RDMA_WRITE, [sge(ends.pair.a.region(8))], remote_addr=0, rkey=1)])
    assert [wc.status for wc in ends.right_cq.poll(8)][:1] == [WCStatus.SUCCESS]
    assert sent_by_right(ends) == [Opcode.RC_ACKNOWLEDGE], "a NAK"
    assert [wc.status for wc in ends.at_left(2)] == [WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR]


@pytest.mark.parametrize("how", ["destroy", "reset", "error", "mad", "close"])
def test_deferred_ack_is_sent_before_close(ends: Connected, how: str) -> None:
    send(ends)
    ends.right_cq.poll(1)
    host = ends.pair.b
    if how == "destroy":
        ends.right.destroy()
    elif how in {"reset", "error"}:
        state = QPState.RESET if how == "reset" else QPState.ERR
        ends.right.modify(QPAttr(qp_state=state), QPAttrMask.STATE)
    elif how == "mad":
        host.mux.gsi.send_mad(PATH, bytes(256))
    else:
        host.mux.close()
    assert sent_by_right(ends)[:1] == [Opcode.RC_ACKNOWLEDGE]
    assert [wc.status for wc in ends.at_left()] == [WCStatus.SUCCESS]


_BUSY = """
import time
from rdmacm import CmId

listener = CmId()
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
peer = listener.get_request(20)
peer.create_qp()
memory = peer.reg_msgs(bytearray(64))
for number in range(8):
    peer.post_recv(number, memory)
peer.accept()
while True:
    for wc in peer.recv_cq.poll(1):
        peer.post_recv(wc.wr_id, memory)
        if wc.byte_len == 2:
            time.sleep(0.05)
        if wc.byte_len == 1:  # the application computes without calling the library
            while True:
                sum(range(1000))
"""


@pytest.mark.parametrize("idle", [0.0, 0.1])
def test_ack_is_sent_while_the_application_computes(idle: float) -> None:
    """After a pause of both ends, the threads that may send it are asleep when the application polls again."""
    command = [sys.executable, "-c", _BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_environment(), text=True) as server:
        assert server.stdout is not None
        try:
            # No retransmission, which would be acknowledged, comes in the first 275 s.
            with EchoClient("127.0.0.1", int(server.stdout.readline()), ack_timeout=26) as client:
                client.wait()
                assert client.kind is CmEventType.ESTABLISHED
                for number in range(300):
                    client.cmid.post_send(number, b"go on", flags=FLAGS)
                    assert client.cmid.get_send_comp(20).status is WCStatus.SUCCESS
                client.cmid.post_send(0, b"..", flags=FLAGS)
                assert client.cmid.get_send_comp(20).status is WCStatus.SUCCESS
                pause(idle, "the threads of both ends fall asleep")
                client.cmid.post_send(0, b".", flags=FLAGS)
                assert client.cmid.get_send_comp(20).status is WCStatus.SUCCESS
        finally:
            server.kill()
