"""Readers of capture files (pcap and pcapng): their frames, and their RoCEv2 packets."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROCE_PORT = 4791
ETHERNET = 1


def frames(path: Path) -> Iterator[tuple[float, bytes]]:
    """The frames of a capture file in its order, as (seconds, Ethernet frame)."""
    data = path.read_bytes()
    yield from _pcapng(data) if data[:4] == b"\x0a\x0d\x0d\x0a" else _pcap(data)


def _pcap(data: bytes) -> Iterator[tuple[float, bytes]]:
    # The magic number tells the unit of time and the byte order.
    orders = {0xA1B2C3D4: "<", 0xA1B23C4D: "<", 0xD4C3B2A1: ">", 0x4D3CB2A1: ">"}
    magic = struct.unpack_from("<I", data)[0]
    order = orders[magic]
    unit = 1e-9 if magic in (0xA1B23C4D, 0x4D3CB2A1) else 1e-6
    assert struct.unpack_from(order + "I", data, 20)[0] == ETHERNET
    at = 24
    while at < len(data):
        seconds, fraction, size, full = struct.unpack_from(order + "IIII", data, at)
        assert size == full, "a frame that was cut"
        yield seconds + fraction * unit, data[at + 16 : at + 16 + size]
        at += 16 + size


def _pcapng(data: bytes) -> Iterator[tuple[float, bytes]]:
    at, order = 0, "<"
    while at < len(data):
        kind = struct.unpack_from(order + "I", data, at)[0]
        if kind == 0x0A0D0D0A:  # section header; the same in both byte orders
            order = "<" if data[at + 8 : at + 12] == b"\x4d\x3c\x2b\x1a" else ">"
        size = struct.unpack_from(order + "I", data, at + 4)[0]
        if kind == 1:  # interface description
            assert struct.unpack_from(order + "H", data, at + 8)[0] == ETHERNET
        elif kind == 6:  # enhanced packet
            high, low, length, full = struct.unpack_from(order + "IIII", data, at + 12)
            assert length == full, "a frame that was cut"
            # Nanoseconds, as dumpcap writes them.
            yield (high << 32 | low) / 1e9, data[at + 28 : at + 28 + length]
        at += size


@dataclass(frozen=True)
class Datagram:
    """An IP packet that carries UDP."""

    source: bytes
    destination: bytes
    sport: int
    dport: int
    #: 0 for IPv6.
    identification: int
    payload: bytes
    header: bytes


def datagram(packet: bytes) -> Datagram | None:
    """A packet that starts at its IP header; None when it does not carry UDP."""
    if packet[0] >> 4 == 4:
        size, protocol, identification = (packet[0] & 15) * 4, packet[9], int.from_bytes(packet[4:6], "big")
        source, destination = packet[12:16], packet[16:20]
    else:
        size, protocol, identification = 40, packet[6], 0
        source, destination = packet[8:24], packet[24:40]
    if protocol != 17:
        return None
    sport, dport, length = struct.unpack_from("!HHH", packet, size)
    payload = packet[size + 8 : size + length]
    assert len(payload) == length - 8
    return Datagram(source, destination, sport, dport, identification, payload, packet[: size + 8])


def roce(path: Path) -> Iterator[Datagram]:
    """The RoCEv2 datagrams of a capture file."""
    for _, frame in frames(path):
        if frame[12:14] in (b"\x08\x00", b"\x86\xdd"):
            found = datagram(frame[14:])
            if found is not None and found.dport == ROCE_PORT:
                yield found
