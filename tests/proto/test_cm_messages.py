"""CM messages compared with the specification's vectors and with packets captured from Linux."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from socket import AF_INET, AF_INET6
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import AF_IB, Gid, InetAddr, parse_address
from rdmacm.proto.cm import outgoing
from rdmacm.proto.cm.codes import ApStatus, MessageKind, RejectReason, SidrStatus, TransportServiceType
from rdmacm.proto.cm.messages import (
    APR,
    DREP,
    DREQ,
    LAP,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    Message,
    Path,
    pack_message,
    unpack_mad,
    unpack_message,
)
from rdmacm.proto.cm.private_data import HEADER_SIZE, PrivateDataHeader, user_capacity
from rdmacm.proto.layout import Bits, Bytes, Layout
from rdmacm.proto.mad import Mad
from rdmacm.proto.wire import WireError
from support.cm import established
from support.pcap_cm import mad_of, mads
from support.roce_vectors import expand
from support.rows import for_each

A, B = 0x11223344, 0xA1B2C3D4
GUID_A, GUID_B = 0x0200C0FFFE000201, 0x0200C0FFFE000202
TID = 0x0000000711223344
SERVICE = 0x01061D2F

MESSAGES: tuple[type[Message], ...] = (REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP, LAP, APR)


def v4(last: int) -> Gid:
    return Gid(f"::ffff:192.0.2.{last}")


def padded(kind: type[Message], text: bytes = b"") -> bytes:
    return text.ljust(kind.PRIVATE_DATA, b"\0")


REQ_PACKET = """
45000134000040004011b5b5c0000201c0000202c35012b7012000006400ffff00000001000000008001000000000001010702030000000000000007
11223344001000000000000011223344000000000000000001061d2f0200c0fffe00020100000000000000000000120200000003000000a1abcdefa7
ffff37f0ffffffff00000000000000000000ffffc000020100000000000000000000ffffc00002021234500000400088{45}40d431{12}c0000201
{12}c000020268656c6c6f20524551{47}fe7fa528
"""
LAP_MAD = """
01070203000000000000000711223344001900000000000011223344a1b2c3d400000000000013a000000000ffffffff00000000000000000000ffff
c000020100000000000000000000ffffc00002021234500040000088{168}
"""
HEADER = PrivateDataHeader.between(InetAddr(AF_INET, bytes((192, 0, 2, 1)), 54321), InetAddr(AF_INET, v4(2)[12:]))

# name → (MAD, transaction id, message)
VECTORS: dict[str, tuple[str, int, Message]] = {
    "MRA": (
        "010702030000000000000007112233440011000000000000a1b2c3d41122334400c0{222}",
        TID,
        MRA(B, A, MessageKind.REQ, 24, padded(MRA)),
    ),
    "REP": (
        (
            "010702030000000000000007112233440013000000000000a1b2c3d411223344000000000000130000000000fedcba00030279e0"
            "0200c0fffe00020268656c6c6f20524550{187}"
        ),
        TID,
        REP(
            local_comm_id=B,
            remote_comm_id=A,
            local_qpn=0x13,
            starting_psn=0xFEDCBA,
            responder_resources=3,
            initiator_depth=2,
            target_ack_delay=15,
            end_to_end_flow_control=True,
            rnr_retry_count=7,
            local_ca_guid=GUID_B,
            private_data=padded(REP, b"hello REP"),
        ),
    ),
    "RTU": (
        "01070203000000000000000711223344001400000000000011223344a1b2c3d4{224}",
        TID,
        RTU(A, B, padded(RTU)),
    ),
    "REJ 28": (
        "01070203000000000000000711223344001200000000000000000000112233440000001c{72}6e6f207468616e6b73{139}",
        TID,
        REJ(
            local_comm_id=0,
            remote_comm_id=A,
            message_rejected=MessageKind.REQ,
            reason=RejectReason.CONSUMER_DEFINED,
            ari=bytes(72),
            private_data=padded(REJ, b"no thanks"),
        ),
    ),
    "REJ 4": (
        "0107020300000000000000071122334400120000000000001122334400000000801000040200c0fffe000201{212}",
        TID,
        REJ(
            local_comm_id=A,
            remote_comm_id=0,
            message_rejected=MessageKind.OTHER,
            reason=RejectReason.TIMEOUT,
            reject_info_length=8,
            ari=GUID_A.to_bytes(8, "big").ljust(72, b"\0"),
            private_data=padded(REJ),
        ),
    ),
    "DREQ": (
        "01070203000000000000000711223344001500000000000011223344a1b2c3d4000013{221}",
        TID,
        DREQ(A, B, 0x13, padded(DREQ)),
    ),
    "DREP": (
        "010702030000000000000007112233440016000000000000a1b2c3d411223344{224}",
        TID,
        DREP(B, A, padded(DREP)),
    ),
    "LAP": (
        LAP_MAD,
        TID,
        LAP(
            local_comm_id=A,
            remote_comm_id=B,
            remote_qpn_eecn=0x13,
            remote_cm_response_timeout=20,
            alternate_local_lid=0xFFFF,
            alternate_remote_lid=0xFFFF,
            alternate_local_gid=v4(1),
            alternate_remote_gid=v4(2),
            alternate_flow_label=0x12345,
            alternate_traffic_class=0,
            alternate_hop_limit=64,
            alternate_packet_rate=0,
            alternate_sl=0,
            alternate_subnet_local=False,
            alternate_local_ack_timeout=17,
            private_data=padded(LAP),
        ),
    ),
    "APR": (
        "01070203000000000000000711223344001a000000000000a1b2c3d4112233440002{222}",
        TID,
        APR(B, A, ApStatus.UNSUPPORTED, 0, bytes(72), padded(APR)),
    ),
    "SIDR_REQ": (
        (
            "01070203000000000000000811223345001700000000000011223345ffff00000000000001111d2f0040d431{12}c0000201"
            "{12}c000020268656c6c6f2053494452{170}"
        ),
        0x0000000811223345,
        SIDR_REQ(
            service_id=0x01111D2F,
            request_id=0x11223345,
            private_data=padded(SIDR_REQ, HEADER.pack() + b"hello SIDR"),
        ),
    ),
    "SIDR_REP": (
        "0107020300000000000000081122334500180000000000001122334500000000000015000000000001111d2f01234567{72}6869{134}",
        0x0000000811223345,
        SIDR_REP(
            request_id=0x11223345,
            status=SidrStatus.SUCCESS,
            qpn=0x15,
            service_id=0x01111D2F,
            q_key=0x01234567,
            additional_info=bytes(72),
            private_data=padded(SIDR_REP, b"hi"),
        ),
    ),
}


@for_each("name", list(VECTORS))
def test_vectors_round_trip(name: str) -> None:
    text, tid, message = VECTORS[name]
    data = expand(text)
    mad = Mad.unpack(data)
    assert mad.transaction_id == tid
    assert unpack_message(mad) == message
    assert pack_message(message, tid) == data


def test_req_vector_round_trip() -> None:
    data = expand(REQ_PACKET)[28 + 20 : -4]
    assert data == mad_of(expand(REQ_PACKET))
    req = REQ(
        service_id=SERVICE,
        primary=Path(
            local_gid=v4(1),
            remote_gid=v4(2),
            local_lid=0xFFFF,
            remote_lid=0xFFFF,
            flow_label=0x12345,
            hop_limit=64,
            local_ack_timeout=17,
        ),
        local_comm_id=A,
        local_ca_guid=GUID_A,
        local_qpn=0x12,
        responder_resources=2,
        initiator_depth=3,
        remote_cm_response_timeout=20,
        end_to_end_flow_control=True,
        starting_psn=0xABCDEF,
        local_cm_response_timeout=20,
        retry_count=7,
        path_mtu=3,
        rnr_retry_count=7,
        max_cm_retries=15,
        private_data=padded(REQ, HEADER.pack() + b"hello REQ"),
    )
    assert unpack_message(Mad.unpack(data)) == req
    assert pack_message(req, TID) == data
    header = PrivateDataHeader.unpack(req.private_data)
    assert header == HEADER
    assert (header.family, header.source_port) == (AF_INET, 54321)


# -- packets of a Linux kernel --------------------------------------------------------------------------------

KERNEL_PACKETS = {
    "REQ IPv4": """
45000134b734400040116e820a0000010a000002d87212b7012000006400ffff00000001800000008001000000000001010702030000000000000002
eec5691400100000000000001469c5ee000000000000000001061d2f0434cbfffeca8fe200000000000000000000118000000080000000a0c106caa7
ffff37f0ffffffff00000000000000000000ffff0a00000100000000000000000000ffff0a00000289aef00000400098{45}40ca40{12}0a000001
{12}0a000002{56}04f43e83""",
    "REQ IPv6": """
6000000001201140fd{14}01fd{14}02d87212b7012000006400ffff00000001800000048001000000000001010702030000000000000002eec56915
00100000000000001569c5ee000000000000000001061d2f0434cbfffeca8fe200000000000000000000128000000080000000a00d82c5a7ffff37f0
fffffffffd{14}01fd{14}0261ef300000400098{45}60b5bcfd{14}01fd{14}02{56}0ab48f06""",
    "SIDR_REQ": """
45000134c640400040115f760a0000010a000002d87212b7012000006400ffff00000001800000078001000000000001010702030000000000000002
eec5691600170000000000001669c5eeffff00000000000001111c060040df3e{12}0a000001{12}0a000002{180}e10d491c""",
    "REP": """
45000134fa97400040112b1f0a0000010a000002d87212b7012000006400ffff00000001800000008001000000000001010702030000000000000007
556677880013000000000000febdba4a55667788000000000000110000000000c78bc300010178e0b80608fffe367274{196}6060af0e""",
    "REJ": """
45000134fba4400040112a120a0000010a000002d87212b7012000006400ffff00000001800000028001000000000001010702030000000000000007
556677880012000000000000000000005566778800000008{220}c016b30f""",
    "SIDR_REP": """
45000134036b40004011224c0a0000010a000002d87212b7012000006400ffff00000001800000058001000000000001010702030000000000000008
1122334500180000000000001122334500000000000013000000000001111c0601234567{208}688b5411""",
}


def decode(packet: str) -> tuple[Mad, bytes]:
    data = mad_of(expand(packet))
    assert data is not None
    return Mad.unpack(data), data


@for_each("name", list(KERNEL_PACKETS))
def test_linux_packets_round_trip(name: str) -> None:
    mad, data = decode(KERNEL_PACKETS[name])
    message = unpack_message(mad)
    assert type(message).__name__ == name.split(maxsplit=1)[0]
    assert pack_message(message, mad.transaction_id) == data


def kernel_req(name: str) -> REQ:
    message = unpack_message(decode(KERNEL_PACKETS[name])[0])
    assert isinstance(message, REQ)
    return message


@pytest.mark.parametrize(
    ("name", "qpn", "psn", "comm_id", "ends", "port", "label"),
    [
        ("REQ IPv4", 0x11, 0xC106CA, 0x1469C5EE, ("::ffff:10.0.0.1", "::ffff:10.0.0.2"), 51776, None),
        ("REQ IPv6", 0x12, 0x0D82C5, 0x1569C5EE, ("fd00::1", "fd00::2"), 46524, 0x61EF3),
    ],
)
def test_linux_req_unpacks_to_its_fields(
    name: str, qpn: int, psn: int, comm_id: int, ends: tuple[str, str], port: int, label: int | None
) -> None:
    req = kernel_req(name)
    header = PrivateDataHeader.unpack(req.private_data)
    assert req == REQ(
        service_id=SERVICE,
        primary=Path(
            local_gid=Gid(ends[0]),
            remote_gid=Gid(ends[1]),
            local_lid=0xFFFF,
            remote_lid=0xFFFF,
            flow_label=(port * 31 + 7471) & 0xFFFFF,
            hop_limit=64,
            local_ack_timeout=19,
        ),
        local_comm_id=comm_id,
        local_ca_guid=0x0434CBFFFECA8FE2,
        local_qpn=qpn,
        responder_resources=128,
        initiator_depth=128,
        starting_psn=psn,
        path_mtu=3,
        rnr_retry_count=7,
        private_data=padded(REQ, header.pack()),
    )
    assert label in (None, req.primary.flow_label)
    assert header.source_port == port
    assert (Gid.from_ip(header.source), Gid.from_ip(header.destination)) == (Gid(ends[0]), Gid(ends[1]))
    assert (req.transport_service_type, req.alternate) == (TransportServiceType.RC, Path())


def test_linux_rep_rej_and_sidr_unpack_to_their_fields() -> None:
    assert unpack_message(decode(KERNEL_PACKETS["REP"])[0]) == REP(
        local_comm_id=0xFEBDBA4A,
        remote_comm_id=0x55667788,
        local_qpn=0x11,
        starting_psn=0xC78BC3,
        responder_resources=1,
        initiator_depth=1,
        target_ack_delay=15,
        rnr_retry_count=7,
        local_ca_guid=0xB80608FFFE367274,
        private_data=padded(REP),
    )
    assert unpack_message(decode(KERNEL_PACKETS["REJ"])[0]) == REJ(
        0, 0x55667788, MessageKind.REQ, RejectReason.INVALID_SERVICE_ID, 0, bytes(72), padded(REJ)
    )
    sidr = unpack_message(decode(KERNEL_PACKETS["SIDR_REQ"])[0])
    assert isinstance(sidr, SIDR_REQ)
    assert (sidr.request_id, sidr.partition_key, sidr.service_id) == (0x1669C5EE, 0xFFFF, 0x01111C06)
    header = PrivateDataHeader.unpack(sidr.private_data)
    assert (header.source_port, header.source[-1], header.destination[-1]) == (0xDF3E, 1, 2)
    assert unpack_message(decode(KERNEL_PACKETS["SIDR_REP"])[0]) == SIDR_REP(
        0x11223345, SidrStatus.SUCCESS, 0x13, 0x01111C06, 0x01234567, 0, bytes(72), padded(SIDR_REP)
    )


CAPTURED = {
    "rxe-rping-ipv4.pcap": "REQ REP RTU DREQ DREP",
    "rxe-rping-ipv6.pcap": "REQ REP RTU DREQ DREP",
    "rxe-reject-nolistener.pcap": "REQ REJ",
    "rxe-cm-retry.pcap": "REQ REQ REQ REP RTU DREQ DREP",
    "rxe-udaddy.pcap": "SIDR_REQ SIDR_REP",
    "rxe-udaddy-nolistener.pcap": "SIDR_REQ SIDR_REP",
    "peer-silent-ipv6.pcap": "REQ REQ REJ",
    "python-peer-rxe-active.pcapng": "REQ REQ REP RTU DREQ DREP REQ REP RTU DREQ DREP SIDR_REQ SIDR_REP",
    "python-peer-rxe-passive.pcapng": "REQ REP RTU DREQ DREP REQ REJ REQ REP RTU DREQ DREP SIDR_REQ SIDR_REP",
}


@for_each("name", list(CAPTURED))
def test_captured_handshakes_round_trip(name: str) -> None:
    messages = []
    for _, _, data in mads(name):
        mad = Mad.unpack(data)
        message = unpack_message(mad)
        assert pack_message(message, mad.transaction_id) == data
        messages.append(message)
    assert " ".join(type(message).__name__ for message in messages) == CAPTURED[name]


def messages_of(name: str) -> list[Any]:
    return [unpack_message(Mad.unpack(data)) for _, _, data in mads(name)]


@pytest.mark.parametrize("name", ["rxe-rping-ipv4.pcap", "rxe-rping-ipv6.pcap", "rxe-cm-retry.pcap"])
def test_captured_messages_carry_the_peers_ids_and_qpn(name: str) -> None:
    req, *_, rep, rtu, dreq, drep = messages_of(name)
    assert rep.remote_comm_id == req.local_comm_id
    assert (rtu.local_comm_id, rtu.remote_comm_id) == (req.local_comm_id, rep.local_comm_id)
    assert (dreq.local_comm_id, dreq.remote_comm_id) == (req.local_comm_id, rep.local_comm_id)
    assert (drep.local_comm_id, drep.remote_comm_id) == (rep.local_comm_id, req.local_comm_id)
    assert dreq.remote_qpn_eecn == rep.local_qpn
    assert (req.responder_resources, req.initiator_depth) == (rep.initiator_depth, rep.responder_resources)
    assert rep.target_ack_delay == 15
    assert req.primary.local_ack_timeout == 19
    tids = [Mad.unpack(data).transaction_id for _, _, data in mads(name)]
    assert len(set(tids)) == 1, "Linux derives it from the communication id: DREQ and REQ share it"


def test_retransmitted_reqs_are_identical() -> None:
    requests = [(when, data) for when, _, data in mads("rxe-cm-retry.pcap")][:3]
    assert len({data for _, data in requests}) == 1
    for (before, _), (after, _) in pairwise(requests):
        assert 6.144 < after - before < 6.6


def test_captured_rejections_unpack_to_their_reason() -> None:
    req, rej = messages_of("rxe-reject-nolistener.pcap")
    assert rej == REJ(0, req.local_comm_id, MessageKind.REQ, RejectReason.INVALID_SERVICE_ID, 0, bytes(72), bytes(148))
    req, _, rej = messages_of("peer-silent-ipv6.pcap")
    assert rej == REJ(
        local_comm_id=req.local_comm_id,
        remote_comm_id=0,
        message_rejected=MessageKind.OTHER,
        reason=RejectReason.TIMEOUT,
        reject_info_length=8,
        ari=req.local_ca_guid.to_bytes(8, "big").ljust(72, b"\0"),
        private_data=padded(REJ),
    )


def test_captured_sidr_replies_match_their_requests() -> None:
    request, reply = messages_of("rxe-udaddy.pcap")
    assert (reply.request_id, reply.service_id) == (request.request_id, request.service_id)
    assert (reply.status, reply.qpn, reply.q_key) == (SidrStatus.SUCCESS, 21, 0x01234567)
    request, reply = messages_of("rxe-udaddy-nolistener.pcap")
    assert (reply.request_id, reply.status, reply.qpn) == (request.request_id, SidrStatus.UNSUPPORTED, 0)


# -- any field values -------------------------------------------------------------------------------------------


def values(kind: type[Any]) -> st.SearchStrategy[Any]:
    """A strategy for messages of one type, with every field anywhere in its range."""
    layout: Layout = kind._LAYOUT
    parts: dict[str, st.SearchStrategy[Any]] = {}
    widths: Counter[str] = Counter()
    for field in layout.fields:
        if isinstance(field, Bits):
            widths[field.name] += field.width
            limit = (1 << widths[field.name]) - 1
            parts[field.name] = st.booleans() if field.is_flag else st.integers(0, limit)
    for field in layout.fields:
        if isinstance(field, Bits):
            continue
        if field.type is Gid:
            parts[field.name] = st.binary(min_size=16, max_size=16).map(Gid)
        elif field.type is bytes:
            parts[field.name] = st.binary(min_size=field.length, max_size=field.length)
        else:
            parts[field.name] = values(Path)
    if any(field.name == "attr_mod" for field in fields(kind)):
        parts["attr_mod"] = st.integers(0, (1 << 32) - 1)
    assert set(parts) == {field.name for field in fields(kind)}, "the layout and the class name the same fields"
    return st.builds(kind, **parts)


@for_each("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_messages_round_trip(kind: type[Message]) -> None:
    @given(values(kind), st.integers(0, (1 << 64) - 1))
    def check(message: Message, tid: int) -> None:
        data = pack_message(message, tid)
        mad = Mad.unpack(data)
        assert mad.transaction_id == tid
        assert unpack_message(mad) == message
        assert unpack_mad(data) == (message, tid)
        assert unpack_mad(memoryview(data)) == (message, tid)
        assert mad.attribute_modifier == getattr(message, "attr_mod", 0)

    check()


@for_each("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_no_two_fields_share_a_bit(kind: type[Message]) -> None:
    taken = [0] * (kind._LAYOUT.size * 8)
    for layout, base in [(kind._LAYOUT, 0)] + ([(Path._LAYOUT, 52), (Path._LAYOUT, 96)] if kind is REQ else []):
        for field in layout.fields:
            if isinstance(field, Bits):
                first = (base + field.offset) * 8 + field.before
                for bit in range(first, first + field.width):
                    taken[bit] += 1
            elif kind is not REQ or field.name not in ("primary", "alternate"):
                for bit in range((base + field.offset) * 8, (base + field.offset + field.length) * 8):
                    taken[bit] += 1
    assert max(taken) == 1


@given(st.integers(0, 0x20), st.binary(min_size=232, max_size=232), st.integers(0, 3), st.integers(0, 3))
def test_arbitrary_mad_data_unpacks_or_raises_wire_error(
    attribute: int, data: bytes, version: int, method: int
) -> None:
    mad = Mad(7, version, method, attribute, 1, data=data, attribute_modifier=version)
    try:
        message = unpack_message(mad)
    except WireError as error:
        assert version != 2 or method != 3 or not 0x10 <= attribute <= 0x1A
        with pytest.raises(WireError, match=re.escape(str(error))):
            unpack_mad(mad.pack())
    else:
        assert unpack_mad(mad.pack()) == (message, 1)
        assert unpack_message(Mad.unpack(pack_message(message, 1))) == message


@given(st.binary(max_size=300))
def test_arbitrary_bytes_unpack_or_raise_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):  # no other exception
        unpack_mad(data)
    for kind in (*MESSAGES, Path):
        if len(data) != kind._LAYOUT.size:
            with pytest.raises(WireError):
                kind.unpack(data)
        else:
            kind.unpack(data)
    try:
        PrivateDataHeader.unpack(data)
    except WireError:
        assert len(data) < HEADER_SIZE


@pytest.mark.parametrize(
    "mad", [Mad(3, 2, 3, 0x10, 1), Mad(7, 1, 3, 0x10, 1), Mad(7, 2, 1, 0x10, 1), Mad(7, 2, 3, 9, 1)]
)
def test_mad_of_another_class_version_method_or_attribute_raises_wire_error(mad: Mad) -> None:
    with pytest.raises(WireError):
        unpack_message(mad)


def test_pack_rejects_fields_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"REQ\.local_qpn 16777216 is outside"):
        pack_message(REQ(1, Path(), local_qpn=1 << 24), 1)
    with pytest.raises(ValueError, match=r"Path\.local_ack_timeout 32"):
        pack_message(REQ(1, Path(local_ack_timeout=32)), 1)
    with pytest.raises(ValueError, match=r"RTU\.private_data has 225 bytes"):
        pack_message(RTU(1, 2, bytes(225)), 1)
    with pytest.raises(ValueError, match=r"REP\.vendor_id -1"):
        pack_message(REP(vendor_id=-1), 1)
    with pytest.raises(ValueError, match="16"):
        Layout(20, [Bits("number", 0, 0, 8), Bytes("gid", 4, 16)]).pack(type("M", (), {"number": 1, "gid": b"x"})())


def test_vendor_id_is_split_as_in_the_specification() -> None:
    rep = pack_message(REP(vendor_id=0x123456, attr_mod=0xABCDEF01), 1)
    assert (rep[24 + 15], rep[24 + 19], rep[24 + 23]) == (0x12, 0x34, 0x56)
    assert rep[20:24] == expand("abcdef01")
    sidr = pack_message(SIDR_REP(vendor_id=0x123456), 1)
    assert (sidr[24 + 6], sidr[24 + 7], sidr[24 + 11]) == (0x12, 0x34, 0x56)


def test_private_data_capacity_depends_on_message_and_family() -> None:
    assert {kind.__name__: kind.PRIVATE_DATA for kind in MESSAGES} == {
        "REQ": 92, "MRA": 222, "REJ": 148, "REP": 196, "RTU": 224, "DREQ": 220, "DREP": 224,
        "SIDR_REQ": 216, "SIDR_REP": 136, "LAP": 168, "APR": 148,
    }  # fmt: skip
    for family in (AF_INET, AF_INET6):
        assert user_capacity(REQ, family) == 56
        assert user_capacity(SIDR_REQ, family) == 180
        assert user_capacity(REP, family) == 196
    assert user_capacity(REQ, AF_IB) == 92
    assert user_capacity(SIDR_REQ, AF_IB) == 216
    with pytest.raises(ValueError, match="MRA"):
        user_capacity(MRA, AF_INET)


def test_ip_header_of_private_data_round_trips() -> None:
    there, back = parse_address(("fe80::1", 7471, 0, 2)), parse_address(("fe80::2", 1))
    assert isinstance(there, InetAddr)
    assert isinstance(back, InetAddr)
    header = PrivateDataHeader.between(there, back)
    assert header.pack() == expand("0060 1d2f fe80{13}01 fe80{13}02")
    assert PrivateDataHeader.unpack(header.pack() + b"more") == header
    assert header.family == AF_INET6
    with pytest.raises(ValueError, match="different address families"):
        PrivateDataHeader.between(there, InetAddr(AF_INET, bytes(4)))
    with pytest.raises(ValueError, match="4 bytes"):
        PrivateDataHeader(4, 1, bytes(16), bytes(16)).pack()
    with pytest.raises(ValueError, match="range"):
        PrivateDataHeader(4, 65536, bytes(4), bytes(4)).pack()
    with pytest.raises(ValueError, match="IP version 16"):
        PrivateDataHeader(16, 1, bytes(16), bytes(16)).pack()


def test_ip_header_of_an_unknown_version_unpacks() -> None:
    ib = PrivateDataHeader.unpack(expand("00 15 0001{32}"))
    assert (ib.version, ib.ip_version, ib.family) == (0, 1, None)
    assert PrivateDataHeader.unpack(expand("10 40 0001{32}")).version == 0x10


def test_messages_of_templates_are_those_of_the_layouts() -> None:
    pair, active, _ = established()
    connection = pair.agents[0].connection(active)
    assert connection is not None
    assert connection.remote_comm_id is not None
    assert connection.remote_qpn is not None
    ids, tid = (active, connection.remote_comm_id), connection.transaction_id
    connection.dreq_transaction_id = 0x1122334455667788
    for size in (0, 1, DREQ.PRIVATE_DATA):
        data = connection.drep_private_data = bytes(range(size))
        assert outgoing.rtu(connection, data) == pack_message(RTU(*ids, data), tid)
        assert outgoing.dreq(connection, 9, data) == pack_message(DREQ(*ids, connection.remote_qpn, data), 9)
        assert outgoing.drep(connection) == pack_message(DREP(*ids, data), connection.dreq_transaction_id)
    connection.drep_private_data = bytes(DREP.PRIVATE_DATA + 1)
    with pytest.raises(ValueError, match=r"RTU\.private_data"):
        outgoing.rtu(connection, bytes(RTU.PRIVATE_DATA + 1))
    with pytest.raises(ValueError, match=r"DREQ\.private_data"):
        outgoing.dreq(connection, 9, bytes(DREQ.PRIVATE_DATA + 1))
    with pytest.raises(ValueError, match=r"DREP\.private_data"):
        outgoing.drep(connection)
