"""Floods of packets at a server that computes in pure Python: how many READs of a peer it still answers.

``python3 dev.py bench flood --computing`` runs it; flood.py says what the namespaces, "quiet" and "flood" are. The
server never calls the package once two peers have connected. One of them reads 64 bytes of its memory in a loop.
Meanwhile a stranger sends packets that nobody accepts ("no_qp", "address", "icrc", "short", "random"), or a message of
the connection manager ("req", "sidr_req"); or the other peer sends what Python has to process ("atomic", "immediate":
with a right ICRC, and a PSN at random). The packets leave by sendmmsg(2), and the rate that was reached is printed.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from random import Random
from typing import TYPE_CHECKING, Any

from forged import forged

import rdmacm
from rdmacm import CmId
from rdmacm.address import DEFAULT_PKEY
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.roce.headers import BTH_STRUCT
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft.wire import sockets
from rdmacm.verbs import MR, SendFlag, WCStatus
from rdmacm.verbs.enums import AccessFlag

if TYPE_CHECKING:
    from flood import Role

__all__ = ["KINDS", "flood", "measure", "peer", "reader", "victim"]

SERVICE_PORT = 7471
#: What the stranger sends, and what the other peer sends.
STRAYS = ("no_qp", "address", "icrc", "short", "random")
OF_PEERS = ("atomic", "immediate")
KINDS = (*STRAYS, "req", "sidr_req", *OF_PEERS)
#: Different packets of a flood, which are sent again and again.
DIFFERENT = 1 << 14
#: How often the two ways of sending alternate.
PHASES = 4
SIZE = 64
PATIENCE = 30.0


# -- sending --------------------------------------------------------------------------------------------------------


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class _Msghdr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.POINTER(_Iovec)),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class _Mmsghdr(ctypes.Structure):
    _fields_ = [("header", _Msghdr), ("length", ctypes.c_uint)]


def _messages(packets: Sequence[bytes], address: tuple[str, int]) -> Any:
    """An array for sendmmsg(2), which refers to the packets."""
    name = struct.pack("=H", socket.AF_INET) + struct.pack("!H", address[1]) + ip_address(address[0]).packed + bytes(8)
    messages = (_Mmsghdr * len(packets))()
    for message, packet in zip(messages, packets, strict=True):
        message.header.name, message.header.name_length = name, len(name)
        message.header.iov = ctypes.pointer(_Iovec(packet, len(packet)))
        message.header.iov_length = 1
    return messages


def send_on_order(sock: socket.socket, packets: Sequence[bytes], host: str, rate: int) -> None:
    """Two lines of input: begin to send to a port, and end. Print how many were sent each second."""
    libc = ctypes.CDLL(None, use_errno=True)
    arrays: dict[int, Any] = {}
    batch = max(1, min(64, rate // 500))
    print("ready", flush=True)
    while line := sys.stdin.readline().strip():
        port = int(line)
        messages = arrays.get(port) or arrays.setdefault(port, _messages(packets, (host, port)))
        size = ctypes.sizeof(_Mmsghdr)
        began, sent, skipped = time.monotonic(), 0, 0.0
        while not select.select([0], [], [], 0.0005)[0]:
            due = int((time.monotonic() - began) * rate - skipped) - sent
            if due > rate / 10:  # it does not keep up: the rate that is printed says so
                skipped += due - rate / 10
                due = rate // 10
            while due > 0:
                first = sent % len(packets)
                count = min(batch, due, len(packets) - first)
                done = libc.sendmmsg(sock.fileno(), ctypes.byref(messages, first * size), count, socket.MSG_DONTWAIT)
                if done <= 0:  # an ICMP error of an earlier datagram, or a full queue
                    break
                sent += done
                due -= done
        sys.stdin.readline()
        print(sent / (time.monotonic() - began), flush=True)


def _stranger_packets(kind: str, source: str, target: str, qpn: int) -> list[bytes]:
    """What a stranger sends from port 4792."""
    random = Random(1)
    if kind in ("req", "sidr_req", "no_qp"):
        return [one for _, one in forged(kind, DIFFERENT, source, target, None, 0x01060000 + SERVICE_PORT, qpn, 1)]
    if kind == "short":
        return [struct.pack("!BBHII", 4, 0, 0xFFFF, qpn, random.getrandbits(24)) for _ in range(DIFFERENT)]
    if kind == "random":
        return [random.randbytes(20) for _ in range(DIFFERENT)]
    if kind == "address":
        return [one for _, one in forged("qp", DIFFERENT, source, target, None, 0, qpn, 1)]
    assert kind == "icrc", kind
    return [_packet(Opcode.RC_SEND_ONLY, qpn, random, bytes(SIZE)) + b"icrc" for _ in range(DIFFERENT)]


def _packet(opcode: Opcode, qpn: int, random: Random, body: bytes) -> bytes:
    return BTH_STRUCT.pack(opcode, 0, DEFAULT_PKEY, qpn, random.getrandbits(24)) + body


def flood(kind: str, rate: int, source: str, target: str, client: str, qpn: int) -> None:
    """The stranger. A packet with a wrong ICRC has the address of the peer, since others are not looked at."""
    sock = sockets.open_socket(socket.AF_INET, ROCE_PORT + 1)
    assert sock is not None
    if kind == "icrc":
        sock.close()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_IP, 15, 1)  # IP_FREEBIND
        sock.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
        sock.bind((client, ROCE_PORT + 1))
    send_on_order(sock, _stranger_packets(kind, source, target, qpn), target, rate)


# -- the server and its peers ---------------------------------------------------------------------------------------


def victim() -> None:
    """Accept two peers, and compute until the input ends."""
    import json
    import threading

    listener = CmId()
    listener.bind_addr(("0.0.0.0", SERVICE_PORT))
    listener.listen()
    print("ready", flush=True)
    memory, peers = bytearray(4096), []
    for _ in range(2):
        peer = listener.get_request(PATIENCE)
        peer.create_qp()
        access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
        region = MR(peer.pd, memory, access)
        for number in range(4):
            peer.post_recv(number, region, 0, 16)
        peer.accept()
        description = struct.pack("!QI", region.addr, region.rkey)
        peer.post_send(0, description, flags=SendFlag.INLINE | SendFlag.SIGNALED)
        peer.get_send_comp(PATIENCE)
        peer.get_recv_comp(PATIENCE)
        peers.append((peer, region))

    def report() -> None:
        for _ in sys.stdin:
            counters = rdmacm.query_counters()
            counts = dict(counters.udp)
            for device in counters.devices.values():
                counts.update((name, counts.get(name, 0) + count) for name, count in device.items())
            print(json.dumps(counts), flush=True)

    threading.Thread(target=report, daemon=True).start()
    total = 0
    while True:
        total = (total * 31 + 7) & 0xFFFFFF


def _connect(host: str) -> tuple[CmId, MR, int, int]:
    """A connection that both ends have joined to the core, and where the server's memory is."""
    cmid = CmId()
    cmid.resolve_addr((host, SERVICE_PORT))
    cmid.resolve_route()
    cmid.create_qp()
    memory = bytearray(4096)
    region = MR(cmid.pd, memory, AccessFlag.LOCAL_WRITE)
    cmid.post_recv(0, region, 0, 64)
    cmid.connect()
    cmid.get_recv_comp(PATIENCE)
    address, rkey = struct.unpack_from("!QI", memory)
    cmid.post_send(0, b"ready", flags=SendFlag.INLINE | SendFlag.SIGNALED)
    cmid.get_send_comp(PATIENCE)
    return cmid, region, address, rkey


def reader(host: str) -> None:
    """For each line of input, a number of seconds: read the server's memory, and print how often; -1: it was lost."""
    cmid, region, address, rkey = _connect(host)
    print("ready", flush=True)
    print(cmid.qp.query()[0].dest_qp_num, flush=True)
    for line in sys.stdin:
        until, count = time.monotonic() + float(line), 0
        while time.monotonic() < until:
            cmid.post_read(0, region, address, rkey, 0, SIZE, SendFlag.SIGNALED)
            if cmid.get_send_comp(PATIENCE).status is not WCStatus.SUCCESS:
                count = -1
                break
            count += 1
        print(count, flush=True)


def peer(host: str, kind: str, rate: int, source: str) -> None:
    """The other peer: it sends packets of its own connection that Python has to process."""
    cmid, _, address, rkey = _connect(host)
    wire: Any = cmid.qp.backend._mux.wire  # type: ignore[attr-defined]
    qpn, random, packets = cmid.qp.query()[0].dest_qp_num, Random(2), []
    sock = wire._out.sockets[0]
    icrc = icrc_between(ip_address(source).packed, ip_address(host).packed, ROCE_PORT)
    for _ in range(DIFFERENT):
        if kind == "atomic":
            packet = _packet(Opcode.RC_FETCH_ADD, qpn, random, struct.pack("!QIQQ", address, rkey, 1, 0))
        else:
            packet = _packet(Opcode.RC_SEND_ONLY_WITH_IMMEDIATE, qpn, random, bytes(4 + SIZE))
        packets.append(packet + icrc.seal([packet]))
    send_on_order(sock, packets, host, rate)


def measure(kind: str, rate: int, seconds: float, role: Any, addresses: Any) -> dict[str, Any]:
    """One kind of packets at one rate. ``role`` starts a process in a namespace (flood.py)."""
    server, client, target, stranger = addresses
    role("server", "decoy")
    computing: Role = role("server", "victim")
    reading: Role = role("client", "reader", server)
    qpn = int(reading.line())
    sender: Role = (
        role("client", "peer", server, kind, rate, client)
        if kind in OF_PEERS
        else role("stranger", "strangers", kind, rate, stranger, server if kind == "icrc" else target, client, qpn)
    )
    if kind not in OF_PEERS:
        role("client", "peer", server, "atomic", 1, client)
    reading.answer(seconds / 4)
    before = computing.answer("report")
    counts, sent, is_lost = {4790: 0, ROCE_PORT: 0}, dict.fromkeys((4790, ROCE_PORT), 0.0), False
    for _ in range(PHASES):
        for port in counts:
            sender.order(port)
            count = reading.answer(seconds / PHASES)
            is_lost |= count < 0
            counts[port] += max(count, 0)
            sent[port] += sender.answer("end") / PHASES
            if is_lost:
                break
        if is_lost:
            break
    after = computing.answer("report")
    grown = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    found = {"kind": kind, "rate": rate, "sent": sent[ROCE_PORT], "lost": is_lost, "counters": grown}
    found["quiet"], found["flood"] = (count / seconds for count in counts.values())
    found["ratio"] = found["flood"] / max(1.0, found["quiet"])
    with suppress(BrokenPipeError):
        sender.order("")
    return found
