"""The invariant CRC: the specification's vectors, a reference implementation, damaged packets."""

from __future__ import annotations

import struct
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.proto.roce import icrc
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.wire import Buffer, WireError
from support.roce_vectors import VECTORS, Vector, expand
from support.rows import for_each

vectors = for_each("vector", VECTORS, ids=[vector.name for vector in VECTORS])
ids = st.integers(0, 0xFFFF)
ports = st.integers(0, 0xFFFF)
bodies = st.integers(0, 60).flatmap(lambda words: st.binary(min_size=12 + 4 * words, max_size=12 + 4 * words))
bodies_of_any_length = st.binary(min_size=12, max_size=300)


def reference_icrc(data: bytes) -> bytes:
    """The ICRC of a packet (IP header to last pad byte), computed over a masked copy."""
    masked = bytearray(data)
    if data[0] >> 4 == 4:
        udp = 20
        for at in (1, 8, 10, 11):
            masked[at] = 0xFF
    else:
        udp = 40
        masked[0] |= 0x0F
        for at in (1, 2, 3, 7):
            masked[at] = 0xFF
    masked[udp + 6] = masked[udp + 7] = masked[udp + 8 + 4] = 0xFF
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + masked))


def packet_around(source: bytes, destination: bytes, sport: int, identification: int, body: bytes) -> bytes:
    """The IP packet that carries a body."""
    udp = struct.pack("!HHHH", sport, 4791, 12 + len(body), 0x1234)
    if len(source) == 4:
        ip = struct.pack("!BBHHHBBH", 0x45, 0x28, 32 + len(body), identification, 0x4000, 63, 17, 0xBEEF)
    else:
        ip = struct.pack("!IHBB", 0x6ABCDEF0, 12 + len(body), 17, 3)
    return ip + source + destination + udp + body


def flow_of(vector: Vector) -> Icrc:
    return Icrc(vector.datagram.source, vector.datagram.destination, vector.datagram.sport)


@st.composite
def any_flow(draw: st.DrawFn, sizes: tuple[int, ...] = (4, 16)) -> tuple[bytes, bytes, int]:
    size = draw(st.sampled_from(sizes))
    address = st.binary(min_size=size, max_size=size)
    return draw(address), draw(address), draw(ports)


class TestVectors:
    @vectors
    def test_reference_icrc_matches_the_vectors(self, vector: Vector) -> None:
        assert reference_icrc(vector.data[:-4]) == vector.icrc

    @vectors
    def test_seal_returns_the_icrc(self, vector: Vector) -> None:
        assert flow_of(vector).seal([vector.body], vector.datagram.identification) == vector.icrc

    @vectors
    def test_check_accepts_only_the_right_identification(self, vector: Vector) -> None:
        flow, identification = flow_of(vector), vector.datagram.identification
        assert flow.check([vector.datagram.payload], identification)
        assert flow.check([vector.datagram.payload], identification ^ 1) is flow.is_ipv6

    @vectors
    def test_solve_finds_the_identification(self, vector: Vector) -> None:
        assert flow_of(vector).solve([vector.datagram.payload]) == vector.datagram.identification

    @vectors
    def test_every_bit_is_covered(self, vector: Vector) -> None:
        flow = flow_of(vector)
        for bit in range(8 * min(len(vector.datagram.payload), 60)):
            data = bytearray(vector.datagram.payload)
            data[bit >> 3] ^= 1 << (bit & 7)
            if bit >> 3 == 4:  # the byte that routers may change
                assert flow.solve([data]) == vector.datagram.identification
            else:
                assert flow.solve([data]) is None
                assert not flow.check([data], vector.datagram.identification)


def test_specification_example_has_the_published_icrc() -> None:
    crc = zlib.crc32(
        expand("{8}").replace(b"\0", b"\xff")
        + expand("45ff0034 12344000 ff11ffff c0000201 c0000202")
        + expand("c35012b7 0020ffff 0430ffff ff000013 80fedcba 68656c6c 6f000000")
    )
    assert crc == 0x72173697
    flow = Icrc(bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]), 50000)
    body = expand("0430ffff 00000013 80fedcba 68656c6c 6f000000")
    assert flow.seal([body], 0x1234).hex() == "97361772"
    assert flow.seal([body]).hex() == "069f330b"


@given(any_flow(), ids, bodies_of_any_length, st.data())
def test_any_segmentation_matches_the_reference_icrc(
    flow: tuple[bytes, bytes, int], identification: int, body: bytes, data: st.DataObject
) -> None:
    source, destination, sport = flow
    expected = reference_icrc(packet_around(source, destination, sport, identification, body))
    sealer = Icrc(source, destination, sport)
    first = data.draw(st.integers(12, len(body)))
    second = data.draw(st.integers(first, len(body)))
    view = memoryview(body)
    pieces: list[Buffer] = [bytearray(view[:first]), view[first:second], view[second:]]
    assert sealer.seal(pieces, identification) == sealer.seal([body], identification) == expected
    assert sealer.check([*pieces, expected], identification)
    assert sealer.solve([*pieces, expected]) == (identification if len(source) == 4 else 0)
    assert sealer.solve([*pieces, expected], identification) == identification


@given(any_flow(), bodies, ids)
def test_start_value_continues_to_the_same_crc(
    flow: tuple[bytes, bytes, int], body: bytes, identification: int
) -> None:
    body = body[:4] + b"\0" + body[5:]
    sealer = Icrc(*flow)
    start = sealer.start(len(body) + 4, identification)
    assert icrc.crc32(body, start).to_bytes(4, "little") == sealer.seal([body], identification)


class TestSolve:
    @given(any_flow((4,)), bodies, ids, ids)
    def test_any_ip_identification_is_found(
        self, flow: tuple[bytes, bytes, int], body: bytes, identification: int, guess: int
    ) -> None:
        sealer = Icrc(*flow)
        data = body + sealer.seal([body], identification)
        assert sealer.solve([data], guess) == identification

    @given(any_flow((4,)), bodies, ids, st.data())
    def test_single_bit_errors_are_detected(
        self, flow: tuple[bytes, bytes, int], body: bytes, identification: int, data: st.DataObject
    ) -> None:
        sealer = Icrc(*flow)
        damaged = bytearray(body + sealer.seal([body], identification))
        at = data.draw(st.integers(0, len(damaged) - 1).filter(lambda at: at != 4))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        assert sealer.solve([damaged]) is None
        assert not sealer.check([damaged], identification)

    @for_each("size", [12, 13, 123, 124, 127, 128, 252, 1036, 4108, 4124, 8188, 65503])
    def test_identification_is_found_at_any_length(self, size: int) -> None:
        sealer = Icrc(bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2]), 49152)
        body = bytes(size)
        for identification in (0, 1, 0x1234, 0x8000, 0xFFFF):
            assert sealer.solve([body, sealer.seal([body], identification)]) == identification

    def test_undetected_damage_is_one_in_65536(self) -> None:
        sealer = Icrc(bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2]), 49152)
        body = bytes(20)
        passed = sum(
            sealer.solve([body, struct.pack("<I", n * 2654435761 & 0xFFFFFFFF)]) is not None for n in range(1 << 16)
        )
        assert passed < 10

    def test_packet_i_of_a_train_has_identification_i(self) -> None:
        sealer = Icrc(bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2]), 49152)
        for i in range(64):
            body = bytes([7, 0, 0xFF, 0xFF, 0, 0, 0, 9, 0, 0, 0, i]) + bytes(1024)
            data = body + sealer.seal([body], i)
            assert sealer.check([data], i)
            assert sealer.solve([data], i) == sealer.solve([data]) == i


class TestInvalidPackets:
    flows = for_each("size", [4, 16])

    @flows
    @for_each("length", [*range(16), 65536, 70000])
    def test_impossible_length_fails_the_check(self, size: int, length: int) -> None:
        sealer = Icrc(bytes(size), bytes(size), 1)
        assert not sealer.check([bytes(length)])
        assert sealer.solve([bytes(length)]) is None

    @flows
    @for_each("length", [*range(12), 65536, 70000])
    def test_impossible_length_cannot_be_sealed(self, size: int, length: int) -> None:
        sealer = Icrc(bytes(size), bytes(size), 1)
        with pytest.raises(WireError, match=f"no packet has {length + 4} bytes after its UDP header"):
            sealer.seal([bytes(length)])

    @flows
    def test_empty_packet_fails_the_check(self, size: int) -> None:
        sealer = Icrc(bytes(size), bytes(size), 1)
        assert not sealer.check([])
        assert sealer.solve([]) is None

    @flows
    @given(data=st.binary(max_size=80))
    def test_arbitrary_bytes_do_not_raise(self, size: int, data: bytes) -> None:
        sealer = Icrc(bytes(size), bytes(size), 1)
        sealer.check([data])
        sealer.solve([data])

    @pytest.mark.parametrize(("source", "destination"), [(4, 16), (0, 0), (5, 5)])
    def test_invalid_address_lengths_raise_value_error(self, source: int, destination: int) -> None:
        with pytest.raises(ValueError, match="4 or 16 bytes"):
            Icrc(bytes(source), bytes(destination), 1)


class TestCrc32:
    def test_crc32_matches_zlib(self) -> None:
        assert icrc.crc32(b"123456789", 0) == 0xCBF43926
        assert icrc.crc32(memoryview(b"6789"), zlib.crc32(b"12345")) == 0xCBF43926

    def test_zlib_replaces_a_missing_zlib_ng(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
        # The module chooses at import, so the test calls the private function.
        assert icrc._find_crc32() is zlib.crc32


@given(any_flow(), st.binary(min_size=32, max_size=32), ids, ids)
def test_flush_of_rxe_is_covered_twice(
    ends: tuple[bytes, bytes, int], data: bytes, identification: int, guess: int
) -> None:
    body = data[:4] + b"\0" + data[5:]  # FECN, BECN and the bits after them
    packet = packet_around(*ends, identification, body)
    (once,) = struct.unpack("<I", reference_icrc(packet))
    sealed = body + struct.pack("<I", zlib.crc32(body, once))
    flow = Icrc(*ends)
    assert flow.seal_twice(body, identification) == sealed[-4:]
    found = flow.solve_twice(memoryview(sealed), guess)
    assert found == (guess if flow.is_ipv6 else identification)
    damaged = bytearray(sealed)
    damaged[20] ^= 4
    again = flow.solve_twice(memoryview(damaged), guess)
    assert again is None or again != found


@for_each("size", range(20))
def test_short_packet_is_no_flush(size: int) -> None:
    flow = Icrc(bytes(4), bytes(4), 1)
    assert flow.solve_twice(memoryview(bytes(size))) is None
