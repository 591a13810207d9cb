"""Given the requests of a capture, the responder sends the same bytes as the kernel did."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rdmacm.enums import AccessFlag, WCStatus
from rdmacm.proto.engine import RtrAttributes
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, IS_REQUEST, IS_RESPONSE
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.work import RecvWork
from support.pcap import Datagram, roce
from support.rc import ALL, connect, flows, packets
from support.rows import for_each

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
READ_REQUEST, READ_FIRST, READ_ONLY = 0x0C, 0x0D, 0x10
ATOMIC_ACKNOWLEDGE, COMPARE_SWAP, FETCH_ADD = 0x12, 0x13, 0x14

#: Captures without loss in which a kernel responds on reliable connections → number of responses to compare.
NAMES = {
    "rxe-send-5000.pcap": 34,
    "rxe-rping-ipv4.pcap": 18,
    "rxe-rping-ipv6.pcap": 18,
    "rxe-rping-3000.pcap": 16,
    "rxe-atomic-cmp-swap.pcap": 28,
    "rxe-atomic-fetch-add.pcap": 38,
    "rxe-flush-ipv4.pcap": 22,
    "rxe-flush-ipv6.pcap": 22,
    "rxe-rdma-client.pcap": 2,
    "rxe-ucmatose.pcap": 4,
}


class AnyMemory:
    """Memory that is valid at every address and for every key."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview:
        page = self.pages.setdefault(address >> 24, bytearray(1 << 25))
        start = address & 0xFFFFFF
        return memoryview(page)[start : start + length]

    def permits(self, rkey: int, access: AccessFlag) -> bool:
        return True

    def invalidate(self, rkey: int) -> bool:
        return True

    def bind(self, bind: object) -> bool:
        return True


class Connection:
    """One direction of a captured connection: the requests to a QP, and its responses."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.answers: list[bytes] = []


def fields(packet: bytes) -> tuple[int, int, int]:
    """Opcode, destination QPN, PSN."""
    opcode, _, _, qpn, psn = struct.unpack_from("!BBHII", packet)
    return opcode, qpn & 0xFFFFFF, psn & 0xFFFFFF


def pad(packet: bytes) -> int:
    return packet[1] >> 4 & 3


def connections(path: Path) -> list[Connection]:
    """Requests grouped by destination QP, and the responses whose PSN one of the requests covers."""
    by_target: dict[tuple[bytes, int], Connection] = {}
    for datagram in roce(path):
        packet = datagram.payload[:-4]
        opcode, qpn, _ = fields(packet)
        if opcode & 0xE0 or qpn < 2:
            continue  # UD: communication management
        if IS_REQUEST[opcode]:
            by_target.setdefault((datagram.destination, qpn), Connection()).requests.append(packet)
        elif IS_RESPONSE[opcode]:
            add_response(by_target, datagram, packet)
    return list(by_target.values())


def add_response(by_target: dict[tuple[bytes, int], Connection], datagram: Datagram, packet: bytes) -> None:
    psn = fields(packet)[2]
    for (host, _), connection in by_target.items():
        if host == datagram.source and any(covers(request, psn) for request in connection.requests):
            connection.answers.append(packet)
            return


def covers(request: bytes, psn: int) -> bool:
    """Whether a PSN is one of the request's."""
    opcode, _, first = fields(request)
    count = 1
    if opcode == READ_REQUEST:
        count = max(1, -(-struct.unpack_from("!I", request, 24)[0] // 1024))
    return (psn - first) & 0xFFFFFF < count


@pytest.mark.slow
@for_each("name", list(NAMES))
def test_responses_match_linux(name: str) -> None:
    compared = 0
    for connection in connections(CAPTURES / name):
        if not connection.answers:
            continue
        _, qpn, first = fields(connection.requests[0])
        peer = fields(connection.answers[0])[1]
        memory = AnyMemory()
        engine = RcEngine(qpn, memory)
        connect(engine, 1)
        engine.ready_to_receive(RtrAttributes(peer, first, access=ALL))
        there, _ = flows()
        ours: list[bytes] = []
        for request in connection.requests:
            engine.post_recv(RecvWork(0, [memoryview(bytearray(1 << 16))]))
            opcode = request[0]
            answers = [a for a in connection.answers if covers(request, fields(a)[2])]
            prepare(memory, request, opcode, answers)
            engine.received(memoryview(request + there.seal([request])), 0, 0.0)
            for datagram in engine.datagrams(0.0, 1000, 0):
                ours += [packet[:-4] for packet in packets(datagram)]
        assert all(c.status is WCStatus.SUCCESS for c in engine.completions())
        assert not engine.counters.dropped
        kernel = set(connection.answers)
        assert kernel <= set(ours), "every packet that the kernel sent is among ours"
        compared += len(kernel)
    assert compared == NAMES[name]


def prepare(memory: AnyMemory, request: bytes, opcode: int, answers: list[bytes]) -> None:
    """Fill the memory with the data of the kernel's responses."""
    if opcode not in (READ_REQUEST, COMPARE_SWAP, FETCH_ADD):
        return
    address = struct.unpack_from("!Q", request, 12)[0]
    for answer in answers:
        kind = answer[0]
        if kind == ATOMIC_ACKNOWLEDGE:
            found = struct.unpack_from("!Q", answer, 16)[0]
            memory.remote(0, address, 8, ALL)[:] = struct.pack("=Q", found)
        elif READ_FIRST <= kind <= READ_ONLY:
            data = answer[HEADER_LENGTH[kind] : len(answer) - pad(answer)]
            offset = ((fields(answer)[2] - fields(request)[2]) & 0xFFFFFF) * 1024
            memory.remote(0, address + offset, len(data), ALL)[:] = data
