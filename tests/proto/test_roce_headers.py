"""RoCE headers and packets: the specification's vectors, arbitrary and damaged bytes, peek and the codec."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rdmacm.proto.constants import RNR_TIMER_SECONDS
from rdmacm.proto.roce import headers
from rdmacm.proto.roce.headers import BTH_HALVES, BTH_HALVES_AETH, AethType, peek
from rdmacm.proto.roce.opcodes import EXTENDED_HEADERS, HEADER_LENGTH, ExtendedHeader, Opcode
from rdmacm.proto.wire import WireError
from support import roce_packets
from support.roce_packets import (
    AETH,
    BTH,
    DETH,
    FETH,
    IETH,
    RETH,
    XRCETH,
    AtomicAckETH,
    AtomicETH,
    ImmDt,
    NakCode,
    RocePacket,
    pad_count,
)
from support.roce_vectors import VECTORS, Vector
from support.rows import for_each

vectors = for_each("vector", VECTORS, ids=[vector.name for vector in VECTORS])


def bits(width: int) -> st.SearchStrategy[int]:
    return st.integers(0, (1 << width) - 1)


any_bth = st.builds(
    BTH,
    opcode=bits(8),
    dest_qpn=bits(24),
    psn=bits(24),
    ack_req=st.booleans(),
    se=st.booleans(),
    pad_cnt=bits(2),
    pkey=bits(16),
    migreq=st.booleans(),
    tver=bits(4),
    fecn=st.booleans(),
    becn=st.booleans(),
    resv6=bits(6),
    resv7=bits(7),
)
any_header = {
    "xrceth": st.builds(XRCETH, srqn=bits(24), resv8=bits(8)),
    "deth": st.builds(DETH, qkey=bits(32), src_qpn=bits(24), resv8=bits(8)),
    "feth": st.builds(FETH, sel=bits(2), plt=bits(4), resv26=bits(26)),
    "reth": st.builds(RETH, virtual_address=bits(64), rkey=bits(32), dma_length=bits(32)),
    "atomic_eth": st.builds(AtomicETH, virtual_address=bits(64), rkey=bits(32), swap_add=bits(64), compare=bits(64)),
    "aeth": st.builds(AETH, syndrome=bits(8), msn=bits(24)),
    "atomic_ack_eth": st.builds(AtomicAckETH, original=bits(64)),
    "imm_dt": st.builds(ImmDt, st.binary(min_size=4, max_size=4)),
    "ieth": st.builds(IETH, rkey=bits(32)),
}
SIZES: dict[type, int] = {
    BTH: 12,
    XRCETH: 4,
    DETH: 8,
    FETH: 4,
    RETH: 16,
    AtomicETH: 28,
    AETH: 4,
    AtomicAckETH: 8,
    ImmDt: 4,
    IETH: 4,
}


@st.composite
def any_packet(draw: st.DrawFn) -> RocePacket:
    bth = draw(any_bth).replace(opcode=draw(st.sampled_from(Opcode)))
    wanted = ExtendedHeader(EXTENDED_HEADERS[bth.opcode])
    extended: dict[str, Any] = {bit.name.lower(): draw(any_header[bit.name.lower()]) for bit in wanted if bit.name}
    return RocePacket(bth, **extended, payload=draw(st.binary(max_size=40)))


class TestVectors:
    @vectors
    @for_each("kind", [bytes, bytearray, memoryview])
    def test_vectors_unpack_to_the_specified_packet(self, vector: Vector, kind: Callable[[bytes], bytes]) -> None:
        packet = RocePacket.unpack(kind(vector.body))
        assert packet == vector.packet
        assert isinstance(packet.payload, memoryview)

    @vectors
    def test_vectors_pack_to_the_specified_bytes(self, vector: Vector) -> None:
        assert vector.packet.pack() == vector.body
        assert RocePacket.unpack(vector.body).pack() == vector.body

    @vectors
    def test_peek_returns_the_bth_fields(self, vector: Vector) -> None:
        bth = vector.packet.bth
        assert peek(vector.body) == (bth.opcode, bth.pad_cnt, bth.dest_qpn, bth.ack_req, bth.psn)

    @vectors
    def test_pad_count_matches_the_payload(self, vector: Vector) -> None:
        assert vector.packet.bth.pad_cnt == pad_count(len(vector.packet.payload))

    def test_payload_is_not_copied(self) -> None:
        data = bytearray(VECTORS[0].body)
        payload = RocePacket.unpack(data).payload
        data[12:17] = b"HELLO"
        assert payload == b"HELLO"


class TestPacket:
    @given(any_packet())
    def test_packets_round_trip(self, packet: RocePacket) -> None:
        data = packet.pack()
        again = RocePacket.unpack(data)
        assert again == packet
        assert hash(again) == hash(packet)
        assert len(data) == HEADER_LENGTH[packet.bth.opcode] + len(packet.payload) + packet.bth.pad_cnt
        assert pickle.loads(pickle.dumps(packet)) == packet

    @given(st.binary(max_size=80))
    @example(b"")
    def test_arbitrary_bytes_unpack_or_raise_wire_error(self, data: bytes) -> None:
        with contextlib.suppress(WireError):
            packet = RocePacket.unpack(data)
            pad = packet.bth.pad_cnt
            assert packet.pack()[: len(data) - pad] == data[: len(data) - pad]

    @given(st.sampled_from(VECTORS), st.data())
    def test_damaged_packets_raise_only_wire_error(self, vector: Vector, data: st.DataObject) -> None:
        body = bytearray(vector.body)
        for _ in range(data.draw(st.integers(1, 3))):
            body[data.draw(st.integers(0, min(len(body), 44) - 1))] = data.draw(bits(8))
        body = body[: data.draw(st.integers(0, len(body)))]
        with contextlib.suppress(WireError):
            RocePacket.unpack(body).pack()
        with contextlib.suppress(WireError):
            peek(body)

    @vectors
    def test_truncated_packets_raise_wire_error(self, vector: Vector) -> None:
        shortest = HEADER_LENGTH[vector.packet.bth.opcode] + vector.packet.bth.pad_cnt
        for size in range(shortest):
            with pytest.raises(WireError):
                RocePacket.unpack(vector.body[:size])
        RocePacket.unpack(vector.body[:shortest])

    @for_each("opcode", sorted(set(range(256)) - set(Opcode)))
    def test_unknown_opcodes_raise_wire_error(self, opcode: int) -> None:
        data = bytes([opcode]) + bytes(79)
        with pytest.raises(WireError, match=f"opcode {opcode:#04x} is not known"):
            RocePacket.unpack(data)
        with pytest.raises(WireError, match=f"opcode {opcode:#04x} is not known"):
            RocePacket(BTH(opcode, 1, 1)).pack()

    def test_packet_must_have_the_headers_of_its_opcode(self) -> None:
        with pytest.raises(WireError, match="0x06 lacks reth"):
            RocePacket(BTH(Opcode.RC_RDMA_WRITE_FIRST, 1, 1)).pack()
        with pytest.raises(WireError, match="0x04 does not have aeth"):
            RocePacket(BTH(Opcode.RC_SEND_ONLY, 1, 1), aeth=AETH.ack(1)).pack()

    def test_replace_changes_one_field(self) -> None:
        packet = VECTORS[0].packet
        assert packet.replace(payload=b"HELLO").payload == b"HELLO"
        assert packet.replace(bth=packet.bth.replace(psn=1)).bth.psn == 1


class TestHeaders:
    @given(any_bth)
    def test_bth_round_trips(self, bth: BTH) -> None:
        data = bth.pack()
        assert len(data) == 12
        assert BTH.unpack(data) == bth

    @given(st.binary(min_size=12, max_size=12))
    def test_any_twelve_bytes_unpack_as_bth(self, data: bytes) -> None:
        assert BTH.unpack(data).pack() == data

    @for_each("header", SIZES)
    @given(data=st.binary(max_size=32))
    def test_arbitrary_bytes_unpack_or_raise_wire_error(self, header: type[BTH], data: bytes) -> None:
        size = SIZES[header]
        if len(data) < size:
            with pytest.raises(WireError, match=f"{header.__name__} has {size} bytes, not {len(data)}$"):
                header.unpack(data)
        else:
            assert header.unpack(data).pack() == data[:size]

    @for_each(
        ("field", "limit"),
        [
            *[("opcode", 1 << 8), ("dest_qpn", 1 << 24), ("psn", 1 << 24), ("pad_cnt", 4), ("pkey", 1 << 16)],
            *[("tver", 16), ("resv6", 64), ("resv7", 128)],
        ],
    )
    @for_each("negative", [False, True])
    def test_bth_pack_rejects_fields_out_of_range(self, field: str, limit: int, negative: bool) -> None:
        bth = BTH(0, 0, 0).replace(**{field: -1 if negative else limit})
        with pytest.raises(WireError, match=rf"BTH\.{field} has \d+ bits; "):
            bth.pack()
        assert BTH(0, 0, 0).replace(**{field: limit - 1}).pack()

    @for_each(
        "header",
        [
            *[DETH(1 << 32, 0), DETH(0, 1 << 24), FETH(4, 0), FETH(0, 16), RETH(1 << 64, 0, 0), RETH(0, 1 << 32, 0)],
            *[RETH(0, 0, 1 << 32), AtomicETH(0, 0, -1), AtomicETH(0, 0, 0, 1 << 64), AETH(256, 0), AETH(0, 1 << 24)],
            *[AtomicAckETH(1 << 64), IETH(-1), ImmDt(b""), ImmDt(b"12345")],
        ],
    )
    def test_extended_header_pack_rejects_fields_out_of_range(self, header: DETH) -> None:
        with pytest.raises(WireError):
            header.pack()

    def test_feth_unpacks_to_selectivity_and_placement_type(self) -> None:
        assert FETH.unpack(bytes.fromhex("00000012")) == FETH(sel=1, plt=2)

    def test_headers_are_immutable(self) -> None:
        bth: Any = BTH(0, 0, 0)
        with pytest.raises(AttributeError):
            bth.psn = 1


class TestSyndromes:
    @for_each("syndrome", range(256))
    def test_every_syndrome_is_classified(self, syndrome: int) -> None:
        aeth = AETH(syndrome, 5)
        kind = {0: AethType.ACK, 1: AethType.RNR_NAK, 3: AethType.NAK}.get(syndrome >> 5, AethType.RESERVED)
        assert aeth.type is kind
        assert (aeth.rnr_seconds is not None) is (kind is AethType.RNR_NAK)
        assert (aeth.credits is not None) is (kind is AethType.ACK and syndrome != 0x1F)
        assert (aeth.nak_code is not None) is (0x60 <= syndrome <= 0x64)

    def test_ack_syndrome_encodes_credits(self) -> None:
        assert AETH.ack(7) == AETH(0x1F, 7)
        credits = [AETH(code, 0).credits for code in range(31)]
        assert credits[:6] == [0, 1, 2, 3, 4, 6]
        # From 2 on, each two codes double it: 2^n and 1.5 * 2^n.
        assert credits[2:] == [value << n for n in range(15) for value in (2, 3)][:29]

    def test_nak_syndrome_encodes_the_error(self) -> None:
        assert [AETH(code, 0).nak_code for code in range(0x60, 0x65)] == list(NakCode)
        assert AETH.nak(NakCode.REMOTE_OPERATIONAL_ERROR, 9) == AETH(0x63, 9)
        assert AETH.nak(NakCode.INVALID_REQUEST, 9).pack().hex() == "61000009"

    def test_rnr_nak_syndrome_encodes_the_timer(self) -> None:
        assert AETH.rnr_nak(14, 1).pack().hex() == "2e000001"
        assert AETH.rnr_nak(14, 1).rnr_seconds == 0.00128

    def test_rnr_timer_codes_match_the_specification(self) -> None:
        seconds = list(RNR_TIMER_SECONDS)
        assert len(seconds) == 32
        assert seconds[1:] == sorted(seconds[1:])
        assert max(seconds) == seconds[0] == 0.65536
        # From code 4 on, the time doubles every two codes.
        for code in range(4, 30):
            assert seconds[code + 2] == pytest.approx(seconds[code] * 2)
        assert (seconds[1], seconds[12], seconds[31]) == (0.00001, 0.00064, 0.49152)


class TestFastPath:
    """peek and the codec give the same result for any packet."""

    @given(st.binary(max_size=40))
    def test_peek_matches_bth(self, data: bytes) -> None:
        try:
            bth = BTH.unpack(data)
        except WireError as error:
            with pytest.raises(WireError, match=str(error)):
                peek(data)
        else:
            assert peek(memoryview(data)) == (bth.opcode, bth.pad_cnt, bth.dest_qpn, bth.ack_req, bth.psn)

    @given(any_bth)
    def test_bth_packed_in_halves_matches_the_codec(self, bth: BTH) -> None:
        bth = bth.replace(migreq=False, tver=0, fecn=False, becn=False, resv6=0, resv7=0)
        half = bth.opcode << 56 | bth.se << 55 | bth.pad_cnt << 52 | bth.pkey << 32 | bth.dest_qpn
        assert BTH_HALVES.pack(half, bth.ack_req << 31 | bth.psn) == bth.pack()

    @given(any_bth, any_header["aeth"])
    def test_bth_and_aeth_packed_in_halves_match_the_codec(self, bth: BTH, aeth: AETH) -> None:
        bth = bth.replace(migreq=False, tver=0, fecn=False, becn=False, resv6=0, resv7=0, se=False, ack_req=False)
        half = bth.opcode << 56 | bth.pad_cnt << 52 | bth.pkey << 32 | bth.dest_qpn
        assert BTH_HALVES_AETH.pack(half, bth.psn, aeth.syndrome << 24 | aeth.msn) == bth.pack() + aeth.pack()

    @for_each(
        ("layout", "header"),
        [
            (headers.XRCETH_STRUCT, XRCETH),
            (roce_packets.DETH_STRUCT, DETH),
            (headers.FETH_STRUCT, FETH),
            (headers.RETH_STRUCT, RETH),
            (headers.ATOMIC_ETH_STRUCT, AtomicETH),
            (headers.AETH_STRUCT, AETH),
            (headers.ATOMIC_ACK_ETH_STRUCT, AtomicAckETH),
            (roce_packets.IETH_STRUCT, IETH),
        ],
    )
    def test_structs_match_the_headers(self, layout: Any, header: Any) -> None:
        data = bytes(range(1, layout.size + 1))
        assert layout.pack(*layout.unpack(data)) == data == header.unpack(data).pack()
