"""Inputs that other implementations of RDMA have stumbled over: Linux's rxe and ib_core, and what is like them.

Each packet has a valid ICRC, as only the peer of the connection can make it, and arrives in a queue pair's engine.
"""

from __future__ import annotations

import struct
from random import Random

import pytest

from rdmacm.enums import AccessFlag, WROpcode
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.cm.messages import REJ, pack_message, unpack_mad
from rdmacm.proto.roce.opcodes import HEADER_LENGTH
from rdmacm.proto.wire import WireError
from rdmacm.proto.work import RecvWork, SendWork
from rdmacm.soft.device.memory import MemoryTable
from support.cm import SERVICE, Scripted, request
from support.cm_events import ConnectRequest
from support.rc import (
    ALL,
    BASE,
    FETCH_ADD,
    PSN,
    QPN,
    READ,
    RKEY,
    SEND_ONLY,
    WRITE_ONLY,
    Pair,
    Region,
    answers,
    give,
    packet,
    receiver,
    reth,
    statuses,
    syndromes,
    view,
)
from support.roce_packets import BTH, RocePacket
from support.rows import for_each

ACK, NAK_INVALID, NAK_ACCESS = 0x11, 0x61, 0x62
TOP = (1 << 64) - 1


@for_each("opcode", [opcode for opcode in range(256) if not HEADER_LENGTH[opcode]])
def test_unknown_opcode_is_dropped(opcode: int) -> None:
    """rxe read its table of opcodes beyond the end for opcode 0xff in a packet of 48 bytes."""
    engine = receiver()
    data = packet(opcode, bytes(32), psn=PSN)
    assert len(data) + 4 == 48
    assert give(engine, data) == 0
    assert engine.counters.dropped == {"opcode": 1}
    assert answers(engine) == []
    with pytest.raises(WireError, match="is not known"):
        RocePacket.unpack(data)


@for_each("pad", [1, 2, 3])
@for_each(("opcode", "head"), [(SEND_ONLY, b""), (WRITE_ONLY, reth(8)), (0x17, struct.pack("!I", RKEY))])
def test_padding_longer_than_the_payload_is_dropped(opcode: int, head: bytes, pad: int) -> None:
    """rxe subtracted a forged pad count from a shorter payload, and got a length below 0."""
    memory = Region()
    engine = receiver(memory)
    inbox = view(bytes(64))
    engine.post_recv(RecvWork(1, [inbox]))
    before = bytes(memory.bytes)
    data = struct.pack("!BBHII", opcode, pad << 4, 0xFFFF, QPN, PSN | 1 << 31) + head
    assert give(engine, data) == 0
    assert engine.counters.dropped == {"length": 1}
    assert bytes(memory.bytes) == before
    assert engine.completions() == []
    with pytest.raises(WireError):
        RocePacket.unpack(data)
    assert BTH.unpack(data).pad_cnt == pad


@for_each("size", [0, 4, 7, 9, 16])
def test_atomic_write_has_eight_bytes(size: int) -> None:
    """rxe read 8 bytes of an ATOMIC WRITE whose payload was empty."""
    for announced in (8, size):
        memory = Region()
        engine = receiver(memory)
        assert give(engine, packet(0x1D, reth(announced) + b"\xff" * size)) == 0
        assert syndromes(engine) == [(ACK, NAK_INVALID)]
        assert not any(memory.bytes)


@for_each("size", [0, 8, 16, 20, 27])
def test_atomic_that_is_cut_short_is_dropped(size: int) -> None:
    memory = Region()
    engine = receiver(memory)
    assert give(engine, packet(FETCH_ADD, struct.pack("!QIQQ", BASE, RKEY, 1, 0)[:size])) == 0
    assert engine.counters.dropped == {"length": 1}
    assert not any(memory.bytes[:8])


@for_each("address", [TOP, TOP - 6, TOP - 7, TOP - 255, TOP - BASE, 1 << 63])
def test_address_and_length_beyond_64_bits_are_refused(address: int) -> None:
    """rxe added address and length of WRITE, READ, atomic and FLUSH in 64 bits, and the sum passed its check."""
    memory = Region()
    address &= ~7
    # The same place as far as 64 bits tell: inside of the region after the sum has wrapped.
    for opcode, body, expected in (
        (WRITE_ONLY, reth(256, address) + bytes(256), NAK_ACCESS),
        (0x0B, reth(256, address) + bytes(4) + bytes(256), NAK_ACCESS),
        (READ, reth(0x7FFFFFFF, address), NAK_ACCESS),
        (FETCH_ADD, struct.pack("!QIQQ", address, RKEY, 1, 0), NAK_ACCESS),
        (0x1D, reth(8, address) + bytes(8), NAK_ACCESS),
        (0x1C, struct.pack("!I", 1) + reth(0x7FFFFFFF, address), NAK_ACCESS),
    ):
        engine = receiver(memory, access=ALL)
        assert give(engine, packet(opcode, body)) == 0
        assert syndromes(engine) == [(ACK, expected)], hex(opcode)
        assert engine.failed
    assert not any(memory.bytes)


@for_each("length", [1, 8, 0x1000, 0xFFFFFFFF, (1 << 64) - 1])
def test_memory_table_refuses_ranges_that_wrap(length: int) -> None:
    """The device's own check of a region, for a peer and for a local scatter/gather element."""
    table, domain = MemoryTable(Random(1), Runtime()), object()
    everything = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ
    region = table.register(domain, memoryview(bytearray(4096)), everything)
    for address in (TOP, TOP - length + 1, region.addr - 1, region.addr + 4096, region.addr - (1 << 64)):
        assert table.remote(domain, region.rkey, address, length, 0) is None
        assert table.local(domain, region.lkey, address, length, False) is None
    assert table.remote(domain, region.rkey, region.addr + 4095, 1, 0) is not None
    assert table.remote(object(), region.rkey, region.addr, 1, 0) is None


@for_each("length", [(1 << 31) + 1, 0xFFFFFFFF])
def test_message_longer_than_2_gib_is_refused(length: int) -> None:
    for opcode in (READ, 0x06):
        engine = receiver()
        give(engine, packet(opcode, reth(length) + bytes(256 if opcode == 0x06 else 0)))
        assert syndromes(engine) == [(ACK, NAK_INVALID)]


@for_each("extra", [1, 4, 256])
def test_read_response_beyond_what_was_asked_ends_the_connection(extra: int) -> None:
    """siw and rxe copied READ responses that were longer than the request into memory behind the buffer."""
    pair = Pair()
    buffer = bytearray(2000)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(buffer)[:100]], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    size = 100 + extra
    pad = -size & 3
    head = struct.pack("!BBHIII", 0x10, pad << 4, 0xFFFF, 0x11, pair.starts[0], 0x1F << 24 | 1)
    pair.deliver(0, head + b"\xff" * size + bytes(pad))
    assert statuses(pair.ends[0].completions()) == [(1, "BAD_RESP_ERR")]
    assert not any(buffer)


def test_read_responses_after_the_last_are_dropped() -> None:
    pair = Pair()
    buffer = bytearray(2000)
    pair.ends[0].post_send(SendWork(1, WROpcode.RDMA_READ, [view(buffer)[:256]], remote_addr=BASE, rkey=RKEY))
    pair.wanted(0)
    head = struct.pack("!BBHIII", 0x10, 0, 0xFFFF, 0x11, pair.starts[0], 0x1F << 24 | 1)
    assert pair.deliver(0, head + b"\xff" * 256) == 1
    for ahead in range(4):
        more = struct.pack("!BBHII", 0x0E, 0, 0xFFFF, 0x11, (pair.starts[0] + ahead) & 0xFFFFFF)
        assert pair.deliver(0, more + b"\xff" * 256) == 0
    assert statuses(pair.ends[0].completions()) == [(1, "SUCCESS")]
    assert not any(buffer[256:])
    assert not pair.ends[0].failed


@for_each("opcode", [opcode for opcode in range(0x15) if HEADER_LENGTH[opcode] > 12])
def test_packet_shorter_than_its_headers_is_dropped(opcode: int) -> None:
    engine = receiver()
    whole = packet(opcode, bytes(HEADER_LENGTH[opcode] - 12))
    for size in range(12, len(whole)):
        assert give(engine, whole[:size]) == 0
    for size in range(16):
        assert engine.received(memoryview(whole[:size]), 0, 0.0) == 0
    assert engine.counters.dropped.total() == len(whole) - 12 + 15
    assert answers(engine) == []


@for_each("length", range(73, 128))
def test_length_of_reject_information_beyond_its_field_is_harmless(length: int) -> None:
    """ib_cm copied as many bytes of additional reject information as the REJ announced, from a field of 72."""
    peer = Scripted()
    active = peer.agent.connect("peer", request(), peer.now)
    peer.say(REJ(0, active, 0, 28, length, bytes(72)))
    rejected = peer.only_event()
    assert len(rejected.ari) <= 72


def test_request_without_private_data_header_is_an_event() -> None:
    """rdma_cm read the IP addresses in the private data of a REQ before it knew that there were any."""
    for version, ip_version in ((0xFF, 4), (0, 0), (0, 15), (0x10, 6)):
        peer = Scripted()
        peer.agent.listen(SERVICE)
        peer.say(request(private_data=bytes((version, ip_version << 4)) + b"\xff" * 90))
        assert isinstance(peer.only_event(), ConnectRequest)


def test_repeated_requests_do_not_grow_anything() -> None:
    peer = Scripted()
    peer.agent.listen(SERVICE)
    mad = pack_message(request(local_comm_id=5, local_qpn=9), 5)
    for _ in range(1000):
        peer.agent.mad_received(mad, "peer", peer.now)
        peer.agent.mads_to_send()
    assert len(peer.agent) == 1
    assert len(peer.agent.events()) == 1
    assert len(peer.agent.timers) <= 2
    assert unpack_mad(mad)[0].private_data == bytes(92)
