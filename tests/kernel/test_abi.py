"""The commands and events of /dev/infiniband/rdma_cm, against bytes that were written by hand from their layouts."""

from __future__ import annotations

import struct
import sys

import pytest

from rdmacm.address import Gid, parse_address
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command, Query
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.proto.wire import WireError
from rdmacm.provider.connparam import ConnParam, Ece
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import Mtu, QPAttrMask, QPState

IPV4 = parse_address(("10.0.0.1", 7471))
IPV6 = parse_address(("fe80::1", 7471, 5, 3))
GID = Gid("fe80::2")

pytestmark = pytest.mark.skipif(sys.byteorder == "big", reason="the expected bytes are little-endian")


def test_a_frame_has_command_and_sizes() -> None:
    payload = abi.pair(9, 2000)
    framed = abi.frame(Command.RESOLVE_ROUTE, payload, 0)
    assert framed == bytes.fromhex("04000000 0800 0000 09000000 d0070000")
    assert abi.frame(Command.QUERY, abi.query(0x1122, 9, Query.GID), 280) == bytes.fromhex(
        "13000000 1000 1801 2211000000000000 09000000 02000000"
    )


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        (abi.create_id(1, 2, 0x106, 2), 24),
        (abi.destroy_id(1, 2), 16),
        (abi.bind(1, IPV6), 136),
        (abi.resolve_addr(1, None, IPV4, 2000), 272),
        (abi.only_id(1), 4),
        (abi.conn_param(ConnParam()), 272),
        (abi.connect(1, ConnParam(), Ece(0)), 288),
        (abi.accept(1, 2, ConnParam(), Ece(0)), 296),
        (abi.reject(1, b"no", 28), 264),
        (abi.init_qp_attr(1, 2, QPState.RTR), 16),
        (abi.get_event(1), 8),
        (abi.set_option(1, 4, 2, 0, 1), 24),
        (abi.join_multicast(1, 2, 3, IPV4, 0), 152),
        (abi.migrate_id(1, 2, 3), 16),
        (abi.resolve_ib_service(1, None, b"name"), 88),
        (abi.write_cm_event(1, 18, 0, 5), 320),
    ],
)
def test_a_payload_has_the_kernels_size(payload: bytes, size: int) -> None:
    assert len(payload) == size


def test_create_and_bind() -> None:
    assert abi.create_id(0xA0, 7, 0x0106, 2) == bytes.fromhex("0700000000000000 a000000000000000 0601 02 0000000000")
    bound = abi.bind(3, IPV4)
    assert bound[:8] == bytes.fromhex("03000000 1000 0000")
    assert bound[8:] == IPV4.pack().ljust(128, b"\0")


def test_resolve_addr_has_both_addresses_and_their_sizes() -> None:
    packed = abi.resolve_addr(3, IPV6, IPV4, 500)
    assert packed[:16] == bytes.fromhex("03000000 f4010000 1c00 1000 00000000")
    assert packed[16:144] == IPV6.pack().ljust(128, b"\0")
    assert packed[144:] == IPV4.pack().ljust(128, b"\0")
    assert abi.resolve_addr(3, None, IPV4, 0)[8:12] == bytes.fromhex("0000 1000")


def test_connection_parameters_are_those_of_c() -> None:
    param = ConnParam(b"hello", 3, 4, 1, 9, 8, 1, 0x123456, 0x11)
    packed = abi.conn_param(param)
    assert packed[:8] == bytes.fromhex("56341200 11000000")
    assert packed[8:264] == b"hello".ljust(256, b"\0")
    assert packed[264:] == bytes((5, 1, 3, 4, 1, 7, 7, 1))  # retry counts of at most 7; valid
    assert abi.conn_param(None) == bytes(272)
    back = abi.unpack_conn(packed.ljust(304, b"\0"))
    assert back == ConnParam(b"hello", 3, 4, 1, 7, 7, 1, 0x123456, 0x11)
    whole = abi.connect(7, param, Ece(0xABC, 5))
    assert whole[:272] == packed
    assert whole[272:] == bytes.fromhex("07000000 00000000 bc0a0000 05000000")
    assert abi.accept(7, 0x99, param, Ece(1, 2)) == (
        bytes.fromhex("9900000000000000") + packed + bytes.fromhex("07000000 00000000 01000000 02000000")
    )


def test_reject_and_options() -> None:
    assert abi.reject(2, b"no", 28)[:12] == bytes.fromhex("02000000 02 1c 0000") + b"no\0\0"
    assert abi.set_option(0x50, 4, 2, 0, 1) == bytes.fromhex("5000000000000000 02000000 00000000 01000000 04000000")
    assert abi.migrate_id(0x50, 2, 9) == bytes.fromhex("5000000000000000 02000000 09000000")
    join = abi.join_multicast(0x50, 0x60, 2, IPV4, 1)
    assert join[:24] == bytes.fromhex("5000000000000000 6000000000000000 02000000 1000 0100")


def test_a_service_is_asked_for_by_number_or_name() -> None:
    by_number = abi.resolve_ib_service(2, 0x1234, b"")
    assert by_number[:16] == bytes.fromhex("02000000 00000000 3412000000000000")
    assert by_number[16:] == bytes(64) + bytes.fromhex("01000000 00000000")
    by_name = abi.resolve_ib_service(2, None, b"storage")
    assert by_name[16:] == b"storage".ljust(64, b"\0") + bytes.fromhex("02000000 00000000")


def test_addresses_of_an_id() -> None:
    data = bytes.fromhex("0200 00ff fe00 0001 02 00 8001 1c00 1000")
    data += IPV6.pack().ljust(128, b"\0") + IPV4.pack().ljust(128, b"\0")
    data += bytes.fromhex("05000000 00000000")
    found = abi.unpack_addresses(data)
    assert found == (0x020000FFFE000001, 5, 2, 0x8001, IPV6, IPV4)
    unbound = bytes(14) + bytes(2) + bytes(256) + b"\xff" * 4 + bytes(4)
    assert abi.unpack_addresses(unbound) == (0, None, 0, 0, None, None)
    older = data[:272] + b"\xff" * 4 + bytes(4)
    assert abi.unpack_addresses(older).device_index is None
    assert abi.DEVICE_INDEX_OFFSET == 272


def test_paths_and_services_are_counted() -> None:
    path = PathData(PathRecord(dgid=GID, sgid=Gid("fe80::1"), mtu=5))
    data = bytes.fromhex("02000000 00000000") + path.pack() * 2 + bytes(100)
    assert abi.unpack_paths(data) == (path, path)
    service = ServiceRecord(5, service_name=b"storage")
    assert abi.unpack_services(bytes.fromhex("01000000 00000000") + service.pack()) == (service,)
    with pytest.raises(WireError, match="3 records"):
        abi.unpack_paths(bytes.fromhex("03000000 00000000") + path.pack() * 2)


def test_attributes_of_a_queue_pair() -> None:
    vector = bytes(GID) + struct.pack("=IBBBxHBBBBBx", 0x12345, 3, 64, 8, 7, 1, 2, 4, 1, 1)
    data = struct.pack("=10I", 0x00E12181, 2, 0, 5, 0, 0x11, 22, 33, 44, 6) + vector + bytes(32)
    data += struct.pack("=5IHH11B5x", 0, 0, 0, 0, 0, 1, 0, 0, 0, 4, 5, 0, 1, 18, 6, 7, 0, 0)
    attr = QPAttr()
    mask = abi.unpack_qp_attr(data, attr)
    assert mask == QPAttrMask(0x012181)  # without the bits that only the kernel knows
    assert (attr.qp_state, attr.path_mtu, attr.qkey) == (QPState.RTR, Mtu.MTU_4096, 0x11)
    assert (attr.rq_psn, attr.sq_psn, attr.dest_qp_num, attr.qp_access_flags) == (22, 33, 44, 6)
    assert (attr.pkey_index, attr.max_rd_atomic, attr.max_dest_rd_atomic) == (1, 4, 5)
    assert attr.min_rnr_timer == 12  # 0.64 ms; the kernel's 0 means 655 ms
    assert (attr.port_num, attr.timeout, attr.retry_cnt, attr.rnr_retry) == (1, 18, 6, 7)
    handle = attr.ah_attr
    assert (handle.dlid, handle.sl, handle.src_path_bits, handle.static_rate) == (7, 1, 2, 4)
    assert (handle.is_global, handle.port_num) == (True, 1)
    assert (handle.gr.dgid, handle.gr.flow_label, handle.gr.sgid_index) == (GID, 0x12345, 3)
    assert (handle.gr.hop_limit, handle.gr.traffic_class) == (64, 8)


def test_an_event_has_cookie_id_and_status() -> None:
    param = abi.conn_param(ConnParam(b"x", 1, 2, qp_num=9))
    data = struct.pack("=QIIi", 0x77, 5, 8, -110) + param.ljust(304, b"\0") + bytes(4) + struct.pack("=II", 3, 4)
    assert len(data) == int(abi.Response.EVENT) == 336
    event = abi.unpack_event(data)
    assert event[:4] == (0x77, 5, 8, -110)
    assert event.ece == Ece(3, 4)
    assert abi.unpack_conn(event.param).qp_num == 9


def test_parameters_of_a_datagram_peer() -> None:
    vector = bytes(GID) + struct.pack("=IBBBxHBBBBBx", 0, 1, 64, 0, 0, 0, 0, 0, 1, 1)
    data = struct.pack("=II", 0xFFFFFF, 0x01234567) + vector + b"hi".ljust(256, b"\0") + b"\2" + bytes(7)
    found = abi.unpack_ud(data)
    assert (found.qp_num, found.qkey, found.private_data) == (0xFFFFFF, 0x01234567, b"hi")
    assert found.ah_attr.gr.dgid == GID
    assert abi.unpack_arg(struct.pack("=Q", 1 << 40) + bytes(296)) == 1 << 40
