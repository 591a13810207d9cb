"""A queue pair works with any engine: here with a protocol that is not RoCE's."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

import pytest

from rdmacm import RdmaError
from rdmacm.enums import AccessFlag, QPState, WCOpcode, WCStatus
from rdmacm.proto.engine import (
    NOTHING,
    PACKETS,
    Datagram,
    EngineCounters,
    QPEngine,
    RtrAttributes,
    RtsAttributes,
    SharedReceives,
)
from rdmacm.proto.wire import Buffer
from rdmacm.proto.work import WC, Memory, RecvWork, SendWork
from rdmacm.verbs.wr import RecvWR, SendWR
from support.softdev import Connected, Pair, sge, told


class PlainEngine(QPEngine):
    """Sends each message as one packet: a 12-byte header with the destination QPN, the data, and 4 trailing bytes."""

    def __init__(
        self,
        qp_num: int,
        memory: Memory,
        shared: SharedReceives | None,
        counters: EngineCounters,
    ) -> None:
        self.qp_num, self.dest_qp_num = qp_num, 0
        self.completed: list[WC] = []
        self.failed = False
        self.failure = ""
        self.sends: list[SendWork] = []
        self.recvs: list[RecvWork] = []
        self.route: tuple[bytes, bytes, int] | None = None
        self.peer_port = 0

    def set_route(self, local: bytes, remote: bytes, source_port: int) -> None:
        self.route = local, remote, source_port

    def set_peer_port(self, port: int) -> None:
        self.peer_port = port

    def ready_to_receive(self, attributes: RtrAttributes) -> None:
        self.dest_qp_num = attributes.dest_qp_num

    def ready_to_send(self, attributes: RtsAttributes) -> None:
        pass

    def set_access(self, access: AccessFlag) -> None:
        pass

    def set_min_rnr_timer(self, code: int) -> None:
        pass

    def set_max_dest_rd_atomic(self, count: int) -> None:
        pass

    def set_send_attributes(self, attributes: RtsAttributes, now: float) -> None:
        pass

    def post_send(self, work: SendWork) -> None:
        self.sends.append(work)

    def post_recv(self, work: RecvWork) -> None:
        self.recvs.append(work)

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    @property
    def drained(self) -> bool:
        return not self.sends

    def flush(self) -> None:
        self.failed = True
        for work in self.sends:
            self.completed.append(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.SEND, qp_num=self.qp_num))
        for recv in self.recvs:
            self.completed.append(WC(recv.wr_id, WCStatus.WR_FLUSH_ERR, WCOpcode.RECV, qp_num=self.qp_num))

    @property
    def deadline(self) -> float | None:
        return None

    def timer(self, now: float) -> None:
        raise AssertionError("there is no deadline")

    def received(self, data: memoryview, segment: int, now: float) -> int:
        assert self.peer_port
        recv, message = self.recvs.pop(0), data[12:-4]
        recv.segments[0][: len(message)] = message
        wc = WC(recv.wr_id, WCStatus.SUCCESS, WCOpcode.RECV, byte_len=len(message), qp_num=self.qp_num)
        self.completed.append(wc)
        return 1

    def probe(self) -> Sequence[Buffer]:
        return [struct.pack("!4xI4x", self.dest_qp_num), bytes(4)]

    @property
    def peer_activity(self) -> int:
        return len(self.recvs)

    @property
    def to_send(self) -> int:
        return PACKETS if self.sends else NOTHING

    def datagrams(self, now: float, limit: int, train: int) -> list[Datagram]:
        assert self.route is not None
        sent: list[Datagram] = []
        for work in self.sends:
            sent.append(([struct.pack("!4xI4x", self.dest_qp_num), *work.segments, bytes(4)], 0))
            self.completed.append(WC(work.wr_id, WCStatus.SUCCESS, WCOpcode.SEND, qp_num=self.qp_num))
        self.sends.clear()
        return sent


@pytest.fixture
def plain(pair: Pair) -> Connected:
    for host in (pair.a, pair.b):
        host.mux.make_engine = PlainEngine
    return Connected(pair)


def test_messages_of_another_protocol_are_sent_and_completed(pair: Pair, plain: Connected) -> None:
    buffer = bytearray(16)
    region = pair.b.region(buffer)
    source = pair.a.region(b"any protocol")
    plain.right.post_recv([RecvWR(1, [sge(region)])])
    plain.left.post_send([SendWR(2, sg=[sge(source)])])
    assert told(plain.at_right()) == [(1, "SUCCESS")]
    assert told(plain.at_left()) == [(2, "SUCCESS")]
    assert buffer == b"any protocol\0\0\0\0"


def test_error_state_flushes_the_engine(plain: Connected) -> None:
    plain.right.post_recv([RecvWR(1)])
    plain.right.fail()
    assert plain.right.state is QPState.ERR
    assert told(plain.right_cq.poll(9)) == [(1, "WR_FLUSH_ERR")]


def test_queue_pair_enforces_its_queue_depths(plain: Connected) -> None:
    with pytest.raises(RdmaError) as caught:
        plain.right.post_recv([RecvWR(n) for n in range(65)])
    assert caught.value.errno == errno.ENOMEM
