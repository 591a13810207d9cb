"""Communication management MADs out of pcap and pcapng files, and out of the hex notation of the test vectors."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

CAPTURES = Path(__file__).parent.parent / "data" / "captures"

_ROCE_PORT = 4791
_UD_SEND_ONLY = 0x64
_BTH_DETH = 20


def unhex(text: str) -> bytes:
    """Bytes of hex in which ``{N}`` stands for N zero bytes."""
    return bytes.fromhex(re.sub(r"\{(\d+)\}", lambda found: "00" * int(found[1]), "".join(text.split())))


def frames(path: Path) -> Iterator[tuple[float, bytes]]:
    """(seconds, Ethernet frame) of a little-endian file: pcap in microseconds, pcapng in nanoseconds."""
    data = path.read_bytes()
    if data[:4] == b"\xd4\xc3\xb2\xa1":
        at = 24
        while at < len(data):
            seconds, micros, size, _ = struct.unpack_from("<IIII", data, at)
            yield seconds + micros / 1e6, data[at + 16 : at + 16 + size]
            at += 16 + size
    else:
        assert data[:4] == b"\x0a\x0d\x0d\x0a", "neither pcap nor pcapng"
        at = 0
        while at < len(data):
            kind, length = struct.unpack_from("<II", data, at)
            if kind == 6:
                _, high, low, size, _ = struct.unpack_from("<IIIII", data, at + 8)
                yield (high << 32 | low) / 1e9, data[at + 28 : at + 28 + size]
            at += length


def mad_of(packet: bytes) -> bytes | None:
    """The 256 bytes of a MAD in a RoCEv2 packet that starts at its IP header, or None where it carries none."""
    if packet[0] >> 4 == 4:
        protocol, udp = packet[9], packet[(packet[0] & 0xF) * 4 :]
    else:
        protocol, udp = packet[6], packet[40:]
    if protocol != 17 or struct.unpack_from("!H", udp, 2)[0] != _ROCE_PORT:
        return None
    payload = udp[8 : struct.unpack_from("!H", udp, 4)[0]]
    if payload[0] != _UD_SEND_ONLY or int.from_bytes(payload[5:8], "big") != 1:
        return None
    return payload[_BTH_DETH:-4]


def mads(name: str) -> list[tuple[float, bytes, bytes]]:
    """(seconds, source address, MAD) of every MAD in a capture."""
    found = []
    for when, frame in frames(CAPTURES / name):
        if frame[12:14] in (b"\x08\x00", b"\x86\xdd"):
            mad = mad_of(frame[14:])
            if mad is not None:
                source = frame[26:30] if frame[12] == 8 else frame[22:38]
                found.append((when, source, mad))
    return found
