"""Capture files of every kind: both byte orders, units of time, links, and files that are damaged."""

from __future__ import annotations

import random
import struct

import pytest

from rdmacm.proto.wire import WireError
from rdmacm.trace.files import CaptureFile, Packet
from rdmacm.trace.tracer import Tracer
from support.rows import for_each
from support.traces import PSN_A, QPN_A, QPN_B, Bytes, Frame, Wire, pcap, pcapng, traced

_TIME = 1_700_000_000_123_456_789
_FRAMES: list[Frame] = [(_TIME, b"one"), (_TIME + 10**9, b"second"), (_TIME + 2 * 10**9, b"")]


def read(data: bytes, step: int = 1 << 20) -> tuple[list[tuple[int, bytes]], str]:
    file = CaptureFile(Bytes(data, step).read)
    found: list[Packet] = list(file)
    return [(time, packet[at:end]) for time, _, packet, at, end, _ in found], file.damage


def rounded(unit: int) -> list[tuple[int, bytes]]:
    return [(time // unit * unit, data) for time, data in _FRAMES]


@for_each("order", "<>")
@for_each("step", [1, 3, 1 << 20])
def test_pcap(order: str, step: int) -> None:
    assert read(pcap(_FRAMES, order), step) == (_FRAMES, "")
    assert read(pcap(_FRAMES, order, nanoseconds=False), step) == (rounded(1000), "")


@for_each("order", "<>")
@for_each("resolution, unit", [(9, 1), (6, 1000), (3, 10**6), (0, 10**9)])
@for_each("step", [1, 3, 1 << 20])
def test_pcapng(order: str, resolution: int, unit: int, step: int) -> None:
    assert read(pcapng(_FRAMES, order, resolution=resolution), step) == (rounded(unit), "")


def test_pcapng_with_a_power_of_two() -> None:
    found, _ = read(pcapng(_FRAMES, resolution=0x80 | 20))
    assert [abs(time - known) < 1000 for (time, _), (known, _) in zip(found, _FRAMES, strict=True)] == [True] * 3


def test_sections_of_both_byte_orders_follow_each_other() -> None:
    found, damage = read(pcapng(_FRAMES, "<") + pcapng(_FRAMES, ">"))
    assert (found, damage) == (_FRAMES * 2, "")


def test_other_blocks() -> None:
    whole = pcapng([])
    unknown = struct.pack("<III", 0x0BAD, 16, 0) + struct.pack("<I", 16)
    simple = struct.pack("<III", 3, 20, 3) + b"abc\0" + struct.pack("<I", 20)
    old = struct.pack("<IIHHIIII", 2, 36, 0, 0, 0, 5, 3, 3) + b"xyz\0" + struct.pack("<I", 36)
    found, damage = read(whole + unknown + old + simple)
    assert ([data for _, data in found], damage) == ([b"xyz", b"abc"], "")


@for_each("data", [pcap(_FRAMES), pcap(_FRAMES, ">"), pcapng(_FRAMES), pcapng(_FRAMES, ">")])
def test_a_file_that_ends_anywhere_has_the_packets_up_to_there(data: bytes) -> None:
    whole, _ = read(data)
    for size in range(12, len(data)):
        found, damage = read(data[:size])
        assert found == whole[: len(found)]
        # Between two packets, a file is whole; one that ends in the last packet lacks it.
        assert damage or len(found) < len(whole) or data[:size] == data
        if damage:
            assert "the file ends within a" in damage


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "an empty file"), (b"short", "too short"), (b"# A page of text", "not a capture file")],
)
def test_what_is_no_capture_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        CaptureFile(Bytes(data).read)


def test_lengths_that_cannot_be() -> None:
    good = pcap(_FRAMES[:1])
    found, damage = read(good + struct.pack("<IIII", 0, 0, 1 << 30, 5))
    assert (len(found), damage) == (1, f"a packet of {1 << 30} bytes at byte {len(good)}; the rest is left out")
    good = pcapng(_FRAMES[:1])
    for size in (0, 8, 13, 1 << 31):
        found, damage = read(good + struct.pack("<II", 6, size) + bytes(40))
        assert (len(found), damage) == (1, f"a block of {size} bytes at byte {len(good)}; the rest is left out")
    found, damage = read(good + struct.pack("<IIIIIII", 6, 32, 7, 0, 0, 0, 0) + bytes(4))
    assert len(found) == 1
    assert "does not fit its block or interface" in damage
    found, damage = read(good + struct.pack("<III", 0x0A0D0D0A, 28, 0) + bytes(16))
    assert "without byte order" in damage


def test_random_damage_never_raises() -> None:
    rng = random.Random(1)
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 3)
    for make in (pcap, pcapng):
        data = make(wire.frames)
        for _ in range(300):
            damaged = bytearray(data)
            for _ in range(rng.randrange(1, 8)):
                damaged[rng.randrange(12, len(data))] = rng.randrange(256)
            tracer, _ = traced(bytes(damaged))
            tracer.found()


# -- links ---------------------------------------------------------------------------------------------------------

_VLAN = b"\x81\x00\x00\x05"
_ERF_TAG = bytes(8) + bytes((2, 0)) + bytes(6)


def _grh(frame: bytes) -> bytes:
    """The frame of RoCEv1 with the transport packet of one of RoCEv2."""
    bth = frame[42:]
    gids = bytes(10) + b"\xff\xff" + frame[26:30] + bytes(10) + b"\xff\xff" + frame[30:34]
    return bytes(12) + b"\x89\x15" + struct.pack("!IHBB", 6 << 28, len(bth), 0x1B, 64) + gids + bth


def _lrh(frame: bytes) -> bytes:
    bth = frame[42:] + bytes(-len(frame[42:]) & 3)
    words = (8 + len(bth)) // 4
    source, destination = struct.pack("!H", frame[29]), struct.pack("!H", frame[33])
    return b"\x00\x02" + destination + struct.pack("!H", words) + source + bth + b"vc"


def _snap_ipv6(frame: bytes) -> bytes:
    """The datagram over IPv6, behind a hop-by-hop header and one of destination options."""
    udp = frame[34:]
    options = bytes((60, 0)) + bytes(6) + bytes((17, 0)) + bytes(6)
    addresses = bytes(12) + frame[26:30] + bytes(12) + frame[30:34]
    head = struct.pack("!IHBB", 6 << 28, len(udp) + 16, 0, 64) + addresses
    return bytes(12) + b"\x86\xdd" + head + options + udp


def _with_options(frame: bytes) -> bytes:
    ip = bytearray(frame[14:34])
    ip[0] = 0x46
    ip[2:4] = struct.pack("!H", int.from_bytes(ip[2:4], "big") + 4)
    return frame[:14] + bytes(ip) + b"\1\1\1\0" + frame[34:]


@for_each(
    "link_type, wrap",
    [
        (1, lambda frame: frame),
        (1, lambda frame: frame[:12] + _VLAN + frame[12:]),
        (1, lambda frame: frame[:12] + b"\x88\xa8\x00\x07" + _VLAN + frame[12:]),
        (1, _with_options),
        (1, _snap_ipv6),
        (1, _grh),
        (113, lambda frame: bytes(14) + b"\x08\x00" + frame[14:]),
        (113, lambda frame: bytes(14) + _VLAN + b"\x08\x00" + frame[14:]),
        (276, lambda frame: b"\x08\x00" + bytes(18) + frame[14:]),
        (276, lambda frame: b"\x81\x00" + bytes(18) + b"\x00\x05\x08\x00" + frame[14:]),
        (101, lambda frame: frame[14:]),
        (12, lambda frame: frame[14:]),
        (228, lambda frame: frame[14:]),
        (0, lambda frame: b"\2\0\0\0" + frame[14:]),
        (108, lambda frame: b"\0\0\0\2" + frame[14:]),
        (197, lambda frame: _ERF_TAG + b"\0\0" + frame),
        (247, _lrh),
        (197, lambda frame: bytes(8) + bytes((0x80 | 21, 0)) + bytes(6) + bytes(8) + _lrh(frame)),
    ],
)
def test_links(link_type: int, wrap: object) -> None:
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 3)
    wire.ack(1, PSN_A + 2)
    assert callable(wrap)
    frames = [(time, wrap(frame)) for time, frame in wire.frames]
    tracer, _ = traced(pcap(frames, link_type=link_type))
    (found,) = tracer.found()
    assert (found.kind, found.ends[0].qpn, found.ends[1].qpn, tracer.malformed) == ("RC", QPN_A, QPN_B, 0)
    half = found.halves[0]
    assert half is not None
    assert [(name, each.count, each.octets) for name, each in half.operations.items()] == [("WRITE", 1, 3072)]


def test_what_is_not_read_is_counted() -> None:
    wire = Wire()
    wire.send(0, 1)
    frame = wire.frames[0][1]
    tracer, _ = traced(pcap(wire.frames, link_type=105))
    assert (tracer.unread, tracer.rdma) == (1, 0)
    fragment = frame[:20] + b"\x20\x01" + frame[22:]
    tracer, _ = traced(pcap([(0, fragment), (0, frame[:30]), (0, frame[:45]), (0, b"")]))
    assert (tracer.fragments, tracer.rdma, tracer.malformed) == (1, 0, 3)


def test_a_capture_that_cut_its_packets_still_has_their_sizes() -> None:
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 20)
    wire.ack(1, PSN_A + 19)
    cut = pcap([])
    for time, frame in wire.frames:
        kept = frame[:96] if len(frame) > 400 else frame
        cut += struct.pack("<IIII", time // 10**9, time % 10**9, len(kept), len(frame)) + kept
    tracer, _ = traced(cut)
    half = tracer.found()[0].halves[0]
    assert half is not None
    assert (half.octets, half.operations["WRITE"].octets, tracer.cut) == (20 * 1024, 20 * 1024, 0)


def test_nothing_is_read_of_an_empty_capture() -> None:
    tracer = Tracer()
    tracer.feed([])
    assert (tracer.packets, tracer.found()) == (0, [])
