"""Communication management MADs from capture files and packets."""

from __future__ import annotations

from pathlib import Path

from support.pcap import datagram, frames

CAPTURES = Path(__file__).parent.parent / "data" / "captures"

_UD_SEND_ONLY = 0x64
_BTH_DETH = 20


def mad_of(packet: bytes) -> bytes | None:
    """The 256 bytes of the MAD in a RoCEv2 packet that starts at its IP header; None if it has none."""
    found = datagram(packet)
    if found is None or found.dport != 4791:
        return None
    payload = found.payload
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
