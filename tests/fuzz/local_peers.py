"""Decoders of what this host says: the kernel (netlink, ICMP errors, ib_umad, sysfs), ibacm, and other processes."""

from __future__ import annotations

import socket
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from socket import AF_INET, AF_INET6
from typing import Any

from fuzz.harness import Source, target
from fuzz.wire_formats import acm_seeds, mad_seeds
from rdmacm.address import InetAddr, SockAddrIB
from rdmacm.errors import RdmaError
from rdmacm.ib.umad import UmadTransport
from rdmacm.net.netlink import NetlinkNetwork
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa.mad import SaMad
from rdmacm.resolution.acm import AcmClient, paths_from_acm
from rdmacm.soft.wire import forwarding, sockets
from rdmacm.soft.wire.base import Received, Undelivered
from rdmacm.soft.wire.slot_filter import is_request, qpn_of, slot_of, slot_of_sender
from support.clock import LONGEST, REAL
from support.roce_packets import BTH, DETH, RocePacket

# -- netlink ----------------------------------------------------------------------------------------------------------

_NETLINK = struct.Struct("=IHHII")


def _message(kind: int, body: bytes, sequence: int = 1) -> bytes:
    return _NETLINK.pack(16 + len(body), kind, 0, sequence, 0) + body + bytes(-len(body) & 3)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) & 3)


def netlink_seeds() -> Iterator[bytes]:
    name, v4 = _attribute(3, b"eth0\0"), bytes((10, 0, 0, 1))
    link = bytes(16) + name + _attribute(4, struct.pack("=I", 1500)) + _attribute(1, bytes(6))
    yield _message(16, link + _attribute(18, _attribute(4, b"bond\0")))
    yield _message(20, struct.pack("=BBBBI", AF_INET, 24, 0, 0, 1) + _attribute(1, v4) + _attribute(2, v4))
    yield _message(20, struct.pack("=BBBBI", AF_INET6, 64, 0, 0, 1) + _attribute(1, bytes(16)) + _attribute(8, v4))
    metrics = _attribute(8, _attribute(2, struct.pack("=I", 1400)) + _attribute(10, struct.pack("=I", 9)))
    for kind in (1, 2, 6, 7, 99):
        route = struct.pack("=BBBBBBBBI", AF_INET, 32, 0, 0, 254, 0, 0, kind, 0)
        yield _message(
            24, route + _attribute(4, struct.pack("=i", 2)) + _attribute(5, v4) + _attribute(7, v4) + metrics
        )
        yield _message(24, route + _attribute(18, b"\x0a\0" + bytes(16)) + _attribute(15, struct.pack("=I", 77)))
    yield _message(28, struct.pack("=BxxxiHBB", AF_INET, 2, 2, 0, 1) + _attribute(1, v4) + _attribute(2, bytes(6)))
    yield _message(2, struct.pack("=i", -2) + bytes(16))
    yield _message(2, struct.pack("=i", 0)) + _message(3, bytes(4))
    yield _message(32, bytes(12))


class _Kernel:
    """A socket whose datagrams are the input's; then the kernel has nothing more to say."""

    def __init__(self, datagrams: list[bytes]) -> None:
        self._datagrams = datagrams

    def send(self, data: bytes) -> int:
        return len(data)

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        if not self._datagrams:
            raise BlockingIOError
        data = self._datagrams[0]
        if flags:  # MSG_PEEK | MSG_TRUNC
            return len(data)
        del self._datagrams[0]
        memoryview(buffer)[: len(data)] = data
        return len(data)

    def close(self) -> None: ...


class _Readable:
    """The poll object of a socket that has something to read."""

    def poll(self, _timeout: int) -> bool:
        return True


@target(netlink_seeds, 1024)
def netlink(data: bytes) -> None:
    """Replies and notifications: OSError for what the kernel refuses, and no endless loop."""
    network = NetlinkNetwork()
    network.close()
    network._unread = _Readable()  # type: ignore[assignment]
    for call in (
        network.interfaces,
        network.addresses,
        lambda: network.route(AF_INET, bytes(4), None, 0, 0),
        lambda: network.neighbour(AF_INET, 1, bytes(4)),
        network.changes,
    ):
        network._sequence = 0
        network._query = network._monitor = _Kernel([data])  # type: ignore[assignment]
        with suppress(OSError):
            call()


# -- undelivered packets, and packets from other processes --------------------------------------------------------


def packet_seeds() -> Iterator[bytes]:
    for mad in mad_seeds():
        yield RocePacket(BTH(0x64, 1, 0), deth=DETH(0x80010000, 1), payload=mad).pack() + bytes(4)
    yield RocePacket(BTH(0x11, 0x123456, 0), aeth=None).bth.pack() + bytes(8)


@target(packet_seeds, 300)
def slots(data: bytes) -> None:
    """Which process a packet is for: a slot for every packet that has a BTH."""
    if len(data) < 12:
        return
    assert 0 <= slot_of(data) <= 4095
    assert 0 <= qpn_of(data) < 1 << 24
    if is_request(data):
        assert 0 <= slot_of_sender(data) <= 4095


class _ErrorQueue:
    """A socket with one report of an undelivered packet."""

    def __init__(self, family: int, quote: bytes, control: list[tuple[int, int, bytes]], remote: Any) -> None:
        self.family = family
        self._message = quote, control, 0, remote

    def recvmsg(self, *_: Any) -> Any:
        return self._message


def icmp_seeds() -> Iterator[bytes]:
    for at, packet in enumerate(packet_seeds()):
        if at % 20 == 0:
            yield bytes((at & 1, 2)) + struct.pack("=IBBBBII", 113, 2, 3, 1, 0, 0, 0) + bytes(16) + packet


@target(icmp_seeds, 400)
def icmp(data: bytes) -> None:
    """An extended error of any content is a report or None; its quote, which a stranger may forge, is only bytes."""
    source = Source(data)
    is_ipv6, shape = source.number() & 1, source.number()
    family = AF_INET6 if is_ipv6 else AF_INET
    control = source.take(shape & 0x3F)
    level = (socket.IPPROTO_IPV6, 25) if is_ipv6 else (socket.IPPROTO_IP, 11)
    remote = ("fe80::1%lo", 4791, 0, 1) if is_ipv6 else ("10.0.0.1", 4791)
    quote = source.rest()
    found = sockets.read_error(
        _ErrorQueue(family, quote, [(*level, control)], remote if shape < 0xF0 else None)  # type: ignore[arg-type]
    )
    if found is not None:
        assert found.quote == quote
        assert len(found.destination) == (16 if is_ipv6 else 4)
        _use_report(found)


def _use_report(report: Undelivered) -> None:
    if is_request(report.quote):
        assert 0 <= slot_of_sender(report.quote) <= 4095


class _Sender:
    """The connection of another process that forwards packets."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def recvmsg(self, size: int, space: int, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        return self._message[:size], [], 0, None

    def fileno(self) -> int:
        return 1 << 20


def forwarded_seeds() -> Iterator[bytes]:
    local, remote = bytes((10, 0, 0, 1)), ("10.0.0.2", 50000)
    for packet in packet_seeds():
        yield b"".join(bytes(part) for part in forwarding._pack((memoryview(packet), 0, remote, local)))
        break
    received = memoryview(bytes(64)), 32, ("fe80::1", 5, 0, 2), bytes(15) + b"\1"
    yield b"".join(bytes(part) for part in forwarding._pack(received))
    report = Undelivered(bytes(60), local, 113, remote[0].encode()[:4])
    yield b"".join(bytes(part) for part in forwarding._pack_report(report))


@target(forwarded_seeds, 512)
def forwarded(data: bytes) -> None:
    """A message of another process of this user: a packet, a report, or nothing."""
    receiver = forwarding.ForwardReceiver.__new__(forwarding.ForwardReceiver)
    reports: list[Undelivered] = []
    receiver._unwatch, receiver._on_undelivered = lambda fd: None, reports.append
    receiver._senders = OrderedDict({1 << 20: None})  # type: ignore[dict-item]
    found: list[Received] = []
    if not data:
        return
    receiver._receive(_Sender(data), found)  # type: ignore[arg-type]
    assert len(found) + len(reports) <= 1
    for packet, segment, remote, local in found:
        assert len(packet) > 0
        assert segment >= 0
        assert len(remote) in (2, 4)
        assert len(local) in (4, 16)
    for report in reports:
        _use_report(report)


# -- ibacm and ib_umad ------------------------------------------------------------------------------------------------


def acm_replies() -> Iterator[bytes]:
    for seed in acm_seeds():
        reply = bytearray(seed)
        reply[8:16] = (1).to_bytes(8, "little")
        yield bytes(reply)
        reply[3] = 0x81
        yield bytes(reply)


@target(acm_replies, 16 + 9 * 72)
def acm_client(data: bytes) -> None:
    """A daemon that says anything, and then closes: paths or None, at once."""
    ours, theirs = socket.socketpair()
    client = AcmClient("/nonexistent")
    client._is_there, client._next_look, client._socket = True, REAL() + LONGEST, ours
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    there = InetAddr(AF_INET, bytes((10, 0, 0, 2)))
    assert paths_from_acm(InetAddr(AF_INET, bytes(4)), there, timeout=LONGEST, client=client) in (None, ()) or data
    assert paths_from_acm(SockAddrIB(), SockAddrIB(), timeout=LONGEST, client=client) is None or data
    client.close()
    ours.close()
    theirs.close()


def umad_seeds() -> Iterator[bytes]:
    header = struct.pack("=5I", 0, 0, 0, 0, 320) + bytes(44)
    yield header + SaMad(0x92, 0x35, 1, data=bytes(200)).pack()
    yield header[:4] + struct.pack("=I", 110) + header[8:] + SaMad(0x92, 0x35, 2).pack()
    yield header[:30] + b"\1" + header[31:] + SaMad(0x81, 0x35, 1).pack()


@target(umad_seeds, 600)
def umad(data: bytes) -> None:
    """What a read of the device file returns: a MAD with the caller's transaction id, or a count."""
    transport = UmadTransport("dev0")
    transport._outstanding = {1: b"callers1", 2: b"callers2"}
    found = transport._unpack(data)
    if found is None:
        assert sum(transport.dropped.values()) == 1
        return
    address, mad = found
    assert isinstance(address, MadAddress)
    assert bytes(mad[8:16]).startswith(b"callers")
    assert len(mad) == len(data) - 64
    assert len(transport._outstanding) == 1


_SYSFS = (
    *("node_guid", "ports/1/state", "ports/1/lid", "ports/1/lid_mask_count", "ports/1/sm_lid", "ports/1/sm_sl"),
    *("ports/1/rate", "gids", "pkeys"),
)


class _Sysfs(UmadTransport):
    """A port whose files in sysfs are in memory."""

    def __init__(self, files: dict[str, str]) -> None:
        super().__init__("dev0")
        self._files = files

    def _file(self, name: str, default: str | None = None) -> str:
        return self._files.get(name, default or "").strip()

    def _table(self, name: str) -> list[str]:
        return self._files.get(name, "").split("\n")


def sysfs_seeds() -> Iterator[bytes]:
    head = b"0200:c0ff:fe00:0201\n\x004: ACTIVE\n\x000x1\n\x000\n\x000x1\n\x000\n\x0010 Gb/sec (4X SDR)\n"
    yield head + b"\0fe80:0000:0000:0000:0200:c0ff:fe00:0201\n::\n\x000xffff\n0x0000\n"
    yield b"x\x009: ?\x000y\x00-1\x00\x00\xff"


@target(sysfs_seeds, 300)
def sysfs(data: bytes) -> None:
    """The files of a port in sysfs: attributes, or RdmaError with EIO."""
    texts = (part.decode("ascii", "replace") for part in data.split(b"\0"))
    transport = _Sysfs(dict(zip(_SYSFS, texts, strict=False)))
    with suppress(RdmaError):
        port = transport.port()
        assert port.port_num == 1
        repr(port)
