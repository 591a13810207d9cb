"""The messages between ibacm and its clients."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from socket import AF_INET, AF_INET6, inet_pton

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import Gid, InetAddr
from rdmacm.constants import PathFlag
from rdmacm.proto.acm import (
    HEADER_SIZE,
    MAX_ENDPOINTS,
    AcmReply,
    AcmStatus,
    decode_reply,
    reply_size,
    resolve_request,
)
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.proto.wire import WireError
from support.rows import for_each

TID = 0x1122334455667788
SOURCE = InetAddr(AF_INET, bytes((192, 168, 7, 1)), 99)
PATH = PathRecord(Gid("fe80::10:5"), Gid("fe80::10:3"), dlid=5, slid=4, numb_path=0, mtu=4, rate=3, packet_life_time=18)

#: The reply of ibacm 44.0 for 192.168.7.1 to 192.168.7.2, recorded on a little-endian machine.
RECORDED_REPLY = bytes.fromhex(
    "01010000000058008877665544332211"
    "2b00000010000000"
    "0000000000000000fe800000000000000000000000100005fe8000000000000000000000001000030005000400000000"
    "0080ffff0000848392000000"
    "00000000"
)
little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="recorded on a little-endian machine")


def header(size: int, *, version: int = 1, opcode: int = 0x81, status: int = 0, tid: int = TID) -> bytes:
    return struct.pack("=BBB3sHQ", version, opcode, status, b"", size, tid)


def endpoint(flags: int, kind: int, info: bytes) -> bytes:
    return struct.pack("=IHH", flags, kind, 0) + info.ljust(64, b"\0")


def message(*endpoints: bytes) -> bytes:
    return header(16 + 72 * len(endpoints)) + b"".join(endpoints)


class TestRequest:
    def test_request_carries_both_addresses(self) -> None:
        sent = resolve_request(TID, source=SOURCE, destination=InetAddr(AF_INET6, inet_pton(AF_INET6, "fd00::2"), 7471))
        assert sent == header(160, opcode=1) + endpoint(1, 2, SOURCE.ip) + endpoint(
            2, 3, inet_pton(AF_INET6, "fd00::2")
        )

    def test_nodelay_sets_the_no_wait_flag(self) -> None:
        assert resolve_request(0, destination=SOURCE, nodelay=True)[16:] == endpoint(2 | 1 << 30, 2, SOURCE.ip)

    def test_request_carries_a_path_record(self) -> None:
        assert resolve_request(0, path=PATH)[16:] == endpoint(0, 0x10, PATH.pack())

    def test_transaction_id_has_64_bits(self) -> None:
        with pytest.raises(ValueError, match="64 bits"):
            resolve_request(1 << 64, destination=SOURCE)


class TestReply:
    @little_endian
    def test_recorded_reply_decodes_to_its_path(self) -> None:
        assert reply_size(RECORDED_REPLY[:16], TID) == 88
        assert decode_reply(RECORDED_REPLY, TID) == AcmReply(0, (PathData(PATH),))

    def test_reply_decodes_to_paths_and_source_address(self) -> None:
        second = replace(PATH, sl=3)
        data = message(
            endpoint(PATH_FLAGS, 0x10, PATH.pack()),
            endpoint(1, 3, inet_pton(AF_INET6, "fd00::1")),
            endpoint(2, 2, SOURCE.ip),
            endpoint(PathFlag.ALTERNATE, 0x10, second.pack()),
        )
        assert decode_reply(data, TID) == AcmReply(
            0,
            (PathData(PATH), PathData(second, PathFlag.ALTERNATE)),
            InetAddr(AF_INET6, inet_pton(AF_INET6, "fd00::1")),
        )

    def test_reply_opcode_may_lack_the_response_bit(self) -> None:
        assert decode_reply(header(16, opcode=0x01), TID) == decode_reply(header(16, opcode=0x81), TID) == AcmReply(0)

    def test_status_numbers_are_ibacms(self) -> None:
        assert [status.value for status in AcmStatus] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
        assert (AcmStatus.ENODATA, AcmStatus.ENOTCONN, AcmStatus.EDESTADDR) == (3, 5, 9)

    def test_error_reply_has_a_status_and_no_paths(self) -> None:
        assert decode_reply(header(16, status=AcmStatus.ESRCADDR), TID) == AcmReply(AcmStatus.ESRCADDR)
        assert decode_reply(header(88, status=200) + endpoint(PATH_FLAGS, 0x10, PATH.pack()), TID) == AcmReply(200)

    def test_unknown_endpoint_types_are_ignored(self) -> None:
        assert decode_reply(message(endpoint(1, 1, b"name"), endpoint(1, 77, b"")), TID) == AcmReply(0)

    @for_each(
        ("data", "match"),
        [
            (b"", "header"),
            (header(16)[:15], "header"),
            (header(16, version=2), "version 2"),
            (header(16, opcode=0x82), "operation 0x82"),
            (header(16, tid=5), "request 5"),
            (header(15), "15 bytes"),
            (header(17) + b"\0", "17 bytes"),
            (header(0), " 0 bytes"),
            (header(16 + 72 * 9) + bytes(72 * 9), "664 bytes"),
            (header(88), "of 88 bytes has 16"),
            (header(16) + b"\0", "of 16 bytes has 17"),
        ],
    )
    def test_malformed_reply_raises_wire_error(self, data: bytes, match: str) -> None:
        with pytest.raises(WireError, match=match):
            decode_reply(data, TID)

    def test_reply_may_have_the_maximum_number_of_endpoints(self) -> None:
        paths = decode_reply(message(*[endpoint(PATH_FLAGS, 0x10, PATH.pack())] * MAX_ENDPOINTS), TID).paths
        assert paths == (PathData(PATH),) * MAX_ENDPOINTS

    @given(st.binary(max_size=700))
    def test_arbitrary_bytes_raise_only_wire_error(self, data: bytes) -> None:
        for call in (reply_size, decode_reply):
            try:
                call(data, TID)
            except WireError:
                continue

    @given(st.lists(st.binary(min_size=72, max_size=72), max_size=MAX_ENDPOINTS))
    def test_arbitrary_endpoints_do_not_raise(self, endpoints: list[bytes]) -> None:
        data = message(*endpoints)
        assert reply_size(data[:HEADER_SIZE], TID) == len(data)
        decode_reply(data, TID)
