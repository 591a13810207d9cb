"""Streams of iWARP: in any segments, in another order, repeated, cut, refused and terminated."""

from __future__ import annotations

import random
import struct

import pytest

from rdmacm.trace.connection import IWARP, Connection
from rdmacm.trace.verdicts import FAILED, NOTE, OK
from support.traces import Wire, pcap, traced, verdict, verdicts

_SYN, _ACK, _FIN, _RST = 2, 16, 1, 4
_A, _B = 1000, 9000


def mpa(reply: bool, flags: int = 0x1002, private: bytes = b"") -> bytes:
    key = b"MPA ID Rep Frame" if reply else b"MPA ID Req Frame"
    return key + struct.pack("!HH", flags, 4 + len(private)) + bytes(4) + private


def fpdu(control: int, payload: bytes) -> bytes:
    head = struct.pack("!IQ", 7, 0x1000) if control & 0x8000 else struct.pack("!IIII", 0, 0, 1, 0)
    body = struct.pack("!HH", len(head) + 2 + len(payload), control) + head + payload
    return body + bytes(-len(body) & 3) + bytes(4)


def send(size: int) -> bytes:
    return fpdu(0x4143, bytes(size))


def write(size: int, last: bool = True) -> bytes:
    return fpdu(0xC140 if last else 0x8140, bytes(size))


def read_request(size: int) -> bytes:
    return fpdu(0x4141, struct.pack("!IQIIQ", 1, 2, size, 3, 4))


def read_response(size: int, last: bool = True) -> bytes:
    return fpdu(0xC142 if last else 0x8142, bytes(size))


def opened(reply: bytes | None = None) -> Wire:
    wire = Wire()
    wire.tcp(0, _A - 1, flags=_SYN)
    wire.tcp(1, _B - 1, flags=_SYN | _ACK)
    wire.tcp(0, _A)
    wire.tcp(0, _A, mpa(False))
    wire.tcp(1, _B, reply if reply is not None else mpa(True))
    return wire


AFTER_A, AFTER_B = _A + len(mpa(False)), _B + len(mpa(True))
FORTH = send(100) + write(1000, False) + write(500) + read_request(3000)
BACK = read_response(2000, False) + read_response(1000)


def moved(connection: Connection) -> list[list[tuple[str, int, int]]]:
    return [
        [] if half is None else [(name, each.count, each.octets) for name, each in half.operations.items()]
        for half in connection.halves
    ]


EXPECTED = [[("SEND", 1, 100), ("WRITE", 1, 1500), ("READ", 1, 3000)], []]


def only(wire: Wire) -> Connection:
    (found,) = traced(pcap(wire.frames))[0].found()
    assert found.kind == IWARP
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 19, 48, 100, 1460, 100000])
def test_segments_of_any_size(size: int) -> None:
    wire = opened()
    for at in range(0, len(FORTH), size):
        wire.tcp(0, AFTER_A + at, FORTH[at : at + size])
    for at in range(0, len(BACK), size):
        wire.tcp(1, AFTER_B + at, BACK[at : at + size])
    assert moved(only(wire)) == EXPECTED


def test_segments_in_any_order_and_repeated() -> None:
    repeated = 0
    for seed in range(20):
        rng = random.Random(seed)
        wire = opened()
        parts = [(at, FORTH[at : at + 300]) for at in range(0, len(FORTH), 300)]
        parts += rng.sample(parts, 3)
        rng.shuffle(parts)
        for at, part in parts:
            wire.tcp(0, AFTER_A + at, part)
        wire.tcp(1, AFTER_B, BACK)
        found = only(wire)
        assert moved(found) == EXPECTED, seed
        assert found.halves[0] is not None
        repeated += found.halves[0].repeated
    assert repeated > 20


def test_a_stream_that_lacks_bytes_is_not_read_further() -> None:
    wire = opened()
    wire.tcp(0, AFTER_A, send(100))
    for number in range(100):
        wire.tcp(0, AFTER_A + 5000 + 200 * number, bytes(200))
    found = only(wire)
    assert moved(found)[0] == [("SEND", 1, 100)]
    assert found.events[-1].text == "not read any further: bytes are missing"


def test_packets_that_the_capture_has_cut() -> None:
    wire = opened()
    wire.tcp(0, AFTER_A, write(1000, False) + write(1000))
    wire.tcp(0, AFTER_A + 2 * len(write(1000)), write(1000))
    data = pcap(wire.frames[:-2])
    for time, frame in wire.frames[-2:]:
        data += struct.pack("<IIII", time // 10**9, time % 10**9, 120, len(frame)) + frame[:120]
    (found,) = traced(data)[0].found()
    assert found.events[-1].text == "not read any further: the capture has cut its packets"


def test_healthy() -> None:
    wire = opened()
    wire.tcp(0, AFTER_A, FORTH)
    wire.tcp(1, AFTER_B, BACK)
    wire.tcp(1, AFTER_B + len(BACK), flags=_FIN | _ACK)
    found = verdict(wire)
    assert (found.level, found.text) == (OK, "healthy: 1 READ, 1 SEND, 1 WRITE of 4600 bytes, ended by 10.0.0.2")


@pytest.mark.parametrize(
    ("flags", "private", "rule", "words"),
    [(0x3002, b"full", "J3", "'full'"), (0x3002, b"", "J3", "without private data")],
)
def test_refused(flags: int, private: bytes, rule: str, words: str) -> None:
    found = verdict(opened(mpa(True, flags, private)))
    assert (found.level, found.rule) == (FAILED, rule)
    assert words in found.text


def test_markers_are_not_read() -> None:
    found = only(opened(mpa(True, 0x9002)))
    assert found.events[-1].text == "not read any further: its frames have markers"


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("12020000", "DDP: no receive buffer"),  # as RFC 5040 has it
        ("21030300", "DDP: message sequence number out of range"),  # as siw sends it
        ("11000300", "DDP: invalid STag"),
        ("01020000", "RDMAP: access rights violation"),
        ("ffff0000", "layer 15: type 15, code 255"),
    ],
)
def test_terminated(word: str, words: str) -> None:
    wire = opened()
    wire.tcp(0, AFTER_A, send(10))
    wire.tcp(1, AFTER_B, fpdu(0x4147, bytes.fromhex(word) + bytes(8)))
    found = verdict(wire)
    assert (found.level, found.text) == (FAILED, f"the stream was terminated: {words}")


def test_no_answer_to_the_request() -> None:
    wire = opened()
    wire.frames.pop()
    found = verdict(wire)
    assert (found.level, found.rule) == (FAILED, "C2")


def test_reset() -> None:
    wire = opened()
    wire.tcp(0, AFTER_A, send(10))
    wire.tcp(1, AFTER_B, flags=_RST)
    found = verdict(wire)
    assert (found.level, found.text) == (NOTE, "connected, and ended by an RST; 1 SEND of 10 bytes")


def test_port_without_listener() -> None:
    wire = Wire()
    wire.tcp(0, 5, flags=_SYN)
    wire.tcp(1, 0, flags=_RST | _ACK)
    found = verdict(wire)
    assert (found.level, found.rule) == (FAILED, "J1")
    wire = Wire()
    for _ in range(3):
        wire.tcp(0, 5, flags=_SYN)
    found = verdict(wire)
    assert (found.level, found.rule) == (FAILED, "C1")
    assert "3 SYNs" in found.text


def test_other_streams_of_tcp_are_none_of_ours() -> None:
    wire = opened()
    wire.tcp(0, 1, flags=_SYN, ports=(50000, 80))
    wire.tcp(1, 1, flags=_SYN | _ACK, ports=(50000, 80))
    wire.tcp(0, 2, b"GET / HTTP/1.1\r\n", ports=(50000, 80))
    wire.tcp(0, 5, flags=_SYN, ports=(50001, 443))
    wire.tcp(1, 0, flags=_RST | _ACK, ports=(50001, 443))
    assert len(verdicts(wire)) == 1
    # The port of iWARP is another matter.
    wire.tcp(0, 5, flags=_SYN, ports=(50002, 7471))
    wire.tcp(1, 0, flags=_RST | _ACK, ports=(50002, 7471))
    assert [each.rule for each in verdicts(wire)] == ["", "J1"]


def test_random_bytes_never_raise() -> None:
    rng = random.Random(1)
    for _ in range(300):
        wire = opened()
        data = bytearray(FORTH)
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        wire.tcp(0, AFTER_A, bytes(data))
        wire.tcp(1, AFTER_B, rng.randbytes(rng.randrange(200)))
        traced(pcap(wire.frames))[0].found()
