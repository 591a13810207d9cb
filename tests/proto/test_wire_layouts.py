"""Where each field is on the wire, against ``struct``: the tables of the specification, written a second time."""

from __future__ import annotations

import struct

from rdmacm.address import Gid
from rdmacm.proto.cm.messages import LAP, MRA, REJ, REP, REQ, Path
from rdmacm.proto.sa.subnet import ClassPortInfo, NodeRecord

LOCAL, REMOTE = Gid("fe80::1"), Gid("fe80::2")


def path_bytes() -> bytes:
    """The path below (InfiniBand Architecture 12.6.5)."""
    return struct.pack(
        "!HH16s16sIBBBB", 0x1112, 0x2122, bytes(LOCAL), bytes(REMOTE), 0xABCDE << 12 | 0x2A, 0x31, 0x40,
        9 << 4 | 1 << 3, 0x15 << 3,
    )  # fmt: skip


PATH = Path(
    LOCAL, REMOTE, 0x1112, 0x2122, flow_label=0xABCDE, packet_rate=0x2A, traffic_class=0x31, hop_limit=0x40, sl=9,
    subnet_local=True, local_ack_timeout=0x15,
)  # fmt: skip


def test_path() -> None:
    assert PATH.pack() == path_bytes()


def test_req() -> None:
    request = REQ(
        service_id=0x0102030405060708, primary=PATH, local_comm_id=0x11121314, local_ca_guid=0x2122232425262728,
        local_q_key=0x31323334, local_qpn=0x414243, responder_resources=5, local_eecn=0x515253, initiator_depth=6,
        remote_eecn=0x616263, remote_cm_response_timeout=0x11, transport_service_type=2, end_to_end_flow_control=True,
        starting_psn=0x717273, local_cm_response_timeout=0x12, retry_count=5, partition_key=0x8001, path_mtu=3,
        rdc_exists=True, rnr_retry_count=6, max_cm_retries=9, srq=True, extended_transport_type=5,
        alternate=Path(REMOTE, LOCAL), sap_supported=True, private_data=b"private", vendor_id=0x818283,
    )  # fmt: skip
    alternate = bytearray(struct.pack("!4x16s16s8x", bytes(REMOTE), bytes(LOCAL)))
    alternate[43] |= 1 << 2  # sap_supported shares the last byte
    packed = struct.pack(
        "!IIQQIIIIIIHBB", 0x11121314, 0x818283, 0x0102030405060708, 0x2122232425262728, 0, 0x31323334,
        0x414243 << 8 | 5, 0x515253 << 8 | 6, 0x616263 << 8 | 0x11 << 3 | 2 << 1 | 1,
        0x717273 << 8 | 0x12 << 3 | 5, 0x8001, 3 << 4 | 1 << 3 | 6, 9 << 4 | 1 << 3 | 5,
    )  # fmt: skip
    assert request.pack() == packed + path_bytes() + bytes(alternate) + b"private".ljust(92, b"\0")
    again = REQ.unpack(request.pack())
    flags = again.rdc_exists, again.srq, again.end_to_end_flow_control, again.sap_supported
    assert all(flag is True for flag in flags)


def test_rep() -> None:
    reply = REP(
        local_comm_id=0x11121314, remote_comm_id=0x21222324, local_q_key=0x31323334, local_qpn=0x414243,
        local_eecn=0x515253, starting_psn=0x616263, responder_resources=5, initiator_depth=6, target_ack_delay=0x15,
        failover_accepted=2, end_to_end_flow_control=True, rnr_retry_count=5, srq=True,
        local_ca_guid=0x7172737475767778, private_data=b"private", vendor_id=0x818283,
    )  # fmt: skip
    assert reply.pack() == struct.pack(
        "!IIIIIIBBBBQ196s", 0x11121314, 0x21222324, 0x31323334, 0x414243 << 8 | 0x81, 0x515253 << 8 | 0x82,
        0x616263 << 8 | 0x83, 5, 6, 0x15 << 3 | 2 << 1 | 1, 5 << 5 | 1 << 4, 0x7172737475767778, b"private",
    )  # fmt: skip


def test_mra_and_rej() -> None:
    assert MRA(1, 2, 2, 0x15, b"private").pack() == struct.pack("!IIBB222s", 1, 2, 2 << 6, 0x15 << 3, b"private")
    rejection = REJ(1, 2, 1, 28, 0x45, b"information", b"private")
    assert rejection.pack() == struct.pack(
        "!IIBBH72s148s", 1, 2, 1 << 6, 0x45 << 1, 28, b"information", b"private"
    )  # fmt: skip


def test_lap() -> None:
    message = LAP(
        1, 2, 0x313233, 0x11, 0x4142, 0x5152, LOCAL, REMOTE, 0xABCDE, 0x61, 0x71, 0x2A, 9, True, 0x15, b"private"
    )
    assert message.pack() == struct.pack(
        "!IIIIIHH16s16sIBBBB168s", 1, 2, 0, 0x313233 << 8 | 0x11 << 3, 0, 0x4142, 0x5152, bytes(LOCAL), bytes(REMOTE),
        0xABCDE << 12 | 0x61, 0x71, 0x2A, 9 << 4 | 1 << 3, 0x15 << 3, b"private",
    )  # fmt: skip


def test_class_port_info() -> None:
    info = ClassPortInfo(
        3, 4, 0x1112, 0x5A5A5A5, 0x15, LOCAL, 0x21, 0xA, 0xBCDEF, 0x2122, 0x3132, 0x414243, 0x51525354,
        REMOTE, 0x61, 0xB, 0xCDEF0, 0x6162, 0x7172, 0x81, 0x919293, 0xA1A2A3A4,
    )  # fmt: skip
    assert info.pack() == struct.pack(
        "!BBHI16sIHHII16sIHHII", 3, 4, 0x1112, 0x5A5A5A5 << 5 | 0x15,
        bytes(LOCAL), 0x21 << 24 | 0xA << 20 | 0xBCDEF, 0x2122, 0x3132, 0x414243, 0x51525354,
        bytes(REMOTE), 0x61 << 24 | 0xB << 20 | 0xCDEF0, 0x6162, 0x7172, 0x81 << 24 | 0x919293, 0xA1A2A3A4,
    )  # fmt: skip
    assert ClassPortInfo().pack() == b"\1\2".ljust(72, b"\0")


def test_node_record() -> None:
    record = NodeRecord(
        0x1112, 3, 4, 2, 36, 0x2122232425262728, 0x3132333435363738, 0x4142434445464748, 0x5152, 0x6162, 0x71727374,
        0x81, 0x919293, b"name",
    )  # fmt: skip
    assert record.pack() == struct.pack(
        "!HHBBBBQQQHHII64s", 0x1112, 0, 3, 4, 2, 36, 0x2122232425262728, 0x3132333435363738, 0x4142434445464748,
        0x5152, 0x6162, 0x71727374, 0x81 << 24 | 0x919293, b"name",
    )  # fmt: skip
    assert NodeRecord().pack() == b"\0\0\0\0\1\1\1\1".ljust(40, b"\0") + b"\1".ljust(68, b"\0")
