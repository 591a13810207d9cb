"""ICMP errors that quote UDP packets, sent through raw sockets."""

from __future__ import annotations

import os
import socket
import struct
from functools import cache

import pytest

from rdmacm.proto.constants import GSI_QPN
from rdmacm.proto.mad import GSI_Q_KEY
from rdmacm.proto.roce.headers import BTH_DETH_STRUCT
from rdmacm.proto.roce.opcodes import Opcode
from support.wires import packed

#: (type, code) of an error, by the length of an address.
PORT_UNREACHABLE = {4: (3, 3), 16: (1, 4)}
HOST_UNREACHABLE = {4: (3, 1), 16: (1, 3)}
TOO_LONG = {4: (3, 4), 16: (2, 0)}


@cache
def _may_open_raw_sockets() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    except OSError:
        return False
    return os.name == "posix"


needs_raw_sockets = pytest.mark.skipif(not _may_open_raw_sockets(), reason="raw sockets need root or CAP_NET_RAW")


def gsi_packet(mad: bytes, qpn: int = GSI_QPN, source_qpn: int = GSI_QPN) -> bytes:
    """A packet from QP 1 to QP 1, without ICRC."""
    return BTH_DETH_STRUCT.pack(Opcode.UD_SEND_ONLY, 0, 0xFFFF, qpn, 0, GSI_Q_KEY, source_qpn) + mad


def send_error(
    source: str,
    destination: str,
    port: int,
    packet: bytes,
    *,
    to: str | None = None,
    error: dict[int, tuple[int, int]] = PORT_UNREACHABLE,
) -> None:
    """Report to ``to`` (else to ``source``) that a packet from ``source`` to ``destination`` was not delivered.

    ``port`` is both UDP ports of the packet.
    """
    ends = packed(source), packed(destination)
    kind, code = error[len(ends[0])]
    udp = struct.pack("!HHHH", port, port, 8 + len(packet), 0) + packet
    if len(ends[0]) == 4:
        header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0x4000, 64, socket.IPPROTO_UDP, 0) + b"".join(ends)
        header = header[:10] + _checksum(header) + header[12:]
        family, protocol = socket.AF_INET, socket.IPPROTO_ICMP
    else:
        header = struct.pack("!IHBB", 6 << 28, len(udp), socket.IPPROTO_UDP, 64) + b"".join(ends)
        family, protocol = socket.AF_INET6, socket.IPPROTO_ICMPV6
    # The MTU that "too long" reports is loopback's: the kernel remembers a smaller one for minutes, for all programs.
    message = struct.pack("!BBHI", kind, code, 0, 65535) + header + udp
    if family == socket.AF_INET:
        message = message[:2] + _checksum(message) + message[4:]
    with socket.socket(family, socket.SOCK_RAW, protocol) as raw:
        raw.sendto(message, (to or source, 0))


def _checksum(data: bytes) -> bytes:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
