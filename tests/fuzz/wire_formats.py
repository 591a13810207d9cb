"""Decoders of packets, management datagrams, records and messages: only WireError, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from socket import AF_INET, AF_INET6, inet_pton
from typing import Any, Protocol

from fuzz.harness import target
from rdmacm.address import Gid, InetAddr, SockAddrIB
from rdmacm.endpoint.memory import RemoteRegion
from rdmacm.proto import acm
from rdmacm.proto.cm.messages import pack_message, unpack_mad
from rdmacm.proto.cm.private_data import PrivateDataHeader
from rdmacm.proto.frames import udp_frame
from rdmacm.proto.ipoib import IpoibAddress
from rdmacm.proto.mad import MAD_SIZE, Mad
from rdmacm.proto.roce.headers import peek
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, Opcode
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.proto.sa.mad import SaMad, describe_status
from rdmacm.proto.sa.rmpp import RmppFlag, RmppHeader, RmppType, describe_rmpp
from rdmacm.proto.sa.subnet import ClassPortInfo, MCMemberRecord, NodeRecord, ServiceRecord
from rdmacm.proto.wire import WireError
from rdmacm.tools.perf_plan import Op, Plan
from support import roce_packets
from support.cm import request
from support.hostile import every_message
from support.roce_packets import BTH, RETH, AtomicETH, RocePacket

_HOSTS = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2))
_EXTENDED = ("DETH", "FETH", "RETH", "AtomicETH", "AETH", "AtomicAckETH", "ImmDt", "IETH")


class _Codec(Protocol):
    @classmethod
    def unpack(cls, data: bytes) -> Any: ...


def _stable(codec: type[_Codec], data: bytes) -> None:
    """What is decoded, encoded and decoded again is the same; other bytes are refused with WireError."""
    with suppress(WireError):
        found = codec.unpack(data)
        packed = found.pack(fill=False) if isinstance(found, SaMad) else found.pack()
        assert codec.unpack(packed) == found
        repr(found)


# -- packets ----------------------------------------------------------------------------------------------------------


def roce_seeds() -> Iterator[bytes]:
    for opcode in Opcode:
        yield bytes((opcode, 0x80, 0xFF, 0xFF)) + bytes(HEADER_LENGTH[opcode] - 4) + b"12345678"
    yield RocePacket(BTH(Opcode.RC_RDMA_WRITE_ONLY, 5, 9), reth=RETH(1 << 63, 7, 5), payload=b"hello").pack()
    atomic = AtomicETH((1 << 64) - 8, 7, 1, 2)
    yield RocePacket(BTH(Opcode.RC_COMPARE_SWAP, 5, 9), atomic_eth=atomic).pack()


@target(roce_seeds)
def roce_packet(data: bytes) -> None:
    with suppress(WireError):
        packet = RocePacket.unpack(data)
        whole = len(data) - data[1] // 16 % 4
        assert packet.pack()[:whole] == data[:whole], "a decoded packet is encoded as it was, except for its padding"
        bth = packet.bth
        assert peek(data) == (bth.opcode, bth.pad_cnt, bth.dest_qpn, bth.ack_req, bth.psn)
    _stable(BTH, data)
    for name in _EXTENDED:
        _stable(getattr(roce_packets, name), data)
    if len(data) >= 4:
        aeth = roce_packets.AETH.unpack(data)
        meanings = (aeth.type, aeth.nak_code, aeth.rnr_seconds, aeth.credits)
        assert len(meanings) == 4


def sealed_seeds() -> Iterator[bytes]:
    for number, packet in enumerate(roce_seeds()):
        yield packet + Icrc(*_HOSTS, 50000).seal([packet], number * 3001 & 0xFFFF)


@target(sealed_seeds)
def icrc(data: bytes) -> None:
    flow = Icrc(*_HOSTS, 50000)
    if len(data) < 16:
        return
    found = flow.solve((memoryview(data),))
    if found is not None:
        assert flow.check([data], found)
    assert flow.check([data + flow.seal([data], 7)], 7) or len(data) < 12


@target(lambda: [_HOSTS[0] + _HOSTS[1] + b"payload", bytes(32) + b"payload"])
def frame(data: bytes) -> None:
    for size in (4, 16):
        source, destination, payload = data[:size], data[size : 2 * size], data[2 * size :]
        with suppress(WireError):
            made = udp_frame(source, destination, 50000, 4791, payload)
            assert made.endswith(payload)


# -- management datagrams ------------------------------------------------------------------------------------------


def mad_seeds() -> Iterator[bytes]:
    yield pack_message(request(private_data=PrivateDataHeader(4, 5000, *_HOSTS).pack()), 1)
    for message in every_message(Random(1)):
        yield pack_message(message, 7)
    first = RmppHeader(1, RmppType.DATA, 0, RmppFlag.ACTIVE | RmppFlag.FIRST, 0, 1, 460)
    yield SaMad(0x92, 0x35, 1, data=bytes(200), attribute_offset=8, rmpp=first).pack()


@target(mad_seeds, MAD_SIZE + 8)
def cm_message(data: bytes) -> None:
    with suppress(WireError):
        message, tid = unpack_mad(data)
        again = pack_message(message, tid)
        assert len(again) == MAD_SIZE
        assert unpack_mad(again) == (message, tid)
        repr(message)
    _stable(Mad, data)


def sa_seeds() -> Iterator[bytes]:
    yield from mad_seeds()
    gid = Gid("fe80::1")
    for record in (
        PathRecord(gid, gid, mtu=4, rate=3),
        PathData(PathRecord(gid, gid)),
        ServiceRecord(5, gid, service_name=b"name"),
        MCMemberRecord(gid, gid),
        NodeRecord(5, node_description=b"node"),
        ClassPortInfo(),
    ):
        yield record.pack()
    yield RmppHeader(1, RmppType.ACK, 31, RmppFlag.ACTIVE, 0, 1, 65).pack()


@target(sa_seeds, 320)
def sa_record(data: bytes) -> None:
    for codec in (SaMad, RmppHeader, PathRecord, PathData, ServiceRecord, MCMemberRecord, NodeRecord, ClassPortInfo):
        _stable(codec, data)
        for record in (bytes(codec_size(codec)), data[: codec_size(codec)]):
            _stable(codec, record)
    status = int.from_bytes(data[:2], "big")
    assert describe_status(status)
    assert describe_rmpp(status)
    with suppress(WireError):
        assert PathRecord.unpack(data[:64]).mtu_bytes in (0, 256, 512, 1024, 2048, 4096)


def codec_size(codec: type[Any]) -> int:
    return getattr(codec, "SIZE", 12)


# -- private data, ibacm and messages of applications --------------------------------------------------------------


def acm_seeds() -> Iterator[bytes]:
    here = InetAddr(AF_INET, _HOSTS[0])
    there = InetAddr(AF_INET6, inet_pton(AF_INET6, "fd00::1"))
    gid = Gid("fe80::1")
    yield acm.resolve_request(7, source=here, destination=there, path=PathRecord(gid, gid))
    yield acm.resolve_request(7, path=PathRecord(gid, gid))


@target(acm_seeds, 16 + 9 * 72)
def acm_reply(data: bytes) -> None:
    tid = int.from_bytes(data[8:16], "little")
    for number in (tid, 7):
        with suppress(WireError):
            assert acm.HEADER_SIZE <= acm.reply_size(data[: acm.HEADER_SIZE], number) <= 16 + 8 * 72
            reply = acm.decode_reply(data, number)
            assert len(reply.paths) <= acm.MAX_ENDPOINTS
            assert reply.status == 0 or not reply.paths


def private_data_seeds() -> Iterator[bytes]:
    yield PrivateDataHeader(4, 5000, *_HOSTS).pack()
    yield PrivateDataHeader(6, 5000, bytes(15) + b"\1", bytes(15) + b"\2").pack()
    yield IpoibAddress(Gid("fe80::1"), 5, 0x80).pack()
    yield SockAddrIB(Gid("fe80::1"), 5, 7).pack()
    yield RemoteRegion(1 << 63, 7, 100).pack()
    yield Plan(Op.WRITE, 4096, 16, True, False).pack()


@target(private_data_seeds, 256)
def private_data(data: bytes) -> None:
    _stable(PrivateDataHeader, data)
    _stable(IpoibAddress, data)
    with suppress(ValueError):
        assert SockAddrIB.unpack(data).pack() == data
    with suppress(ValueError):
        assert RemoteRegion.unpack(data).pack() == data[:16]
    plan = Plan.unpack(data)
    if plan is not None:
        assert Plan.unpack(plan.pack()) == plan
