"""Checks of recorded packets: Wireshark's dissector must accept them, and zlib must compute the same ICRC."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from collections.abc import Container
from pathlib import Path

from support.pcap import frames
from support.tshark import dissect

__all__ = ["REFUSAL", "RNR", "SEQUENCE", "judge"]

#: NAKs that a scenario may explain, as syndromes of the AETH (InfiniBand 9.7.5.2): receiver not ready, with any timer;
#: packet sequence error.
RNR = frozenset(range(0x20, 0x40))
SEQUENCE = frozenset({0x60})
#: Invalid request, remote access error, remote operational error.
REFUSAL = frozenset({0x61, 0x62, 0x63})

_OPCODE, _QP, _SYNDROME = "infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.aeth.syndrome"
_PSN = "infiniband.bth.psn"
_FLUSH = 0x1C
_ETHERNET, _IPV4, _IPV6, _UDP = 14, 20, 40, 8
#: Offsets of fields that routers may change; the ICRC covers ones in their place: TOS, TTL and header checksum, or
#: traffic class, flow label and hop limit.
_CHANGING_4, _CHANGING_6 = (1, 8, 10, 11), (1, 2, 3, 7)


def judge(path: Path, naks: Container[int] = ()) -> Counter[str]:
    """Check the packets of a capture file; returns how many have each opcode, or nothing without tshark.

    Raises:
        AssertionError: Wireshark finds a malformed packet, an ICRC is wrong, or a NAK is not among ``naks``. A NAK that
            asks for a packet which is in the recording before it is explained: the machine has lost it behind that.
    """
    for number, (_, frame) in enumerate(frames(path), 1):
        assert frame[-4:] in icrcs(frame), f"frame {number} of {path.name}: wrong ICRC"
    if shutil.which("tshark") is None:
        return Counter()
    packets = dissect(path, (_OPCODE, _SYNDROME, _QP, _PSN), no_checksum=True)
    not_ready, sent = set(), set()
    for number, packet in enumerate(packets, 1):
        # READ responses and ATOMIC acknowledges have a syndrome too. An ACK is below 0x20.
        syndrome = int(packet[_SYNDROME] or "0", 0)
        if syndrome in RNR:
            not_ready.add(packet[_QP])
        elif syndrome in SEQUENCE and packet[_QP] in not_ready:
            continue  # rdma_rxe's answer to the packets after a message without a receive
        elif syndrome in SEQUENCE and packet[_PSN] in sent:
            continue
        elif not packet[_SYNDROME]:
            sent.add(packet[_PSN])
        assert syndrome < 0x20 or syndrome in naks, f"frame {number} of {path.name}: NAK {syndrome:#x}"
    return Counter(packet[_OPCODE] for packet in packets)


def icrcs(frame: bytes) -> list[bytes]:
    """The invariant CRCs that the frame may end with, computed from its bytes.

    The first is that of the specification (InfiniBand A17.3.3). rdma_rxe's for FLUSH covers the headers from the BTH on
    once more.
    """
    packet = bytearray(frame[_ETHERNET:-4])
    four = packet[0] >> 4 == 4
    for at in _CHANGING_4 if four else _CHANGING_6:
        packet[at] = 0xFF
    if not four:
        packet[0] |= 0x0F
    udp = _IPV4 if four else _IPV6
    packet[udp + 6 : udp + 8] = b"\xff\xff"  # checksum
    packet[udp + _UDP + 4] = 0xFF  # the reserved byte of the BTH
    found = zlib.crc32(b"\xff" * 8 + packet)
    bth = frame[_ETHERNET + udp + _UDP : -4]
    again = [zlib.crc32(bth, found)] if bth[0] == _FLUSH else []
    return [crc.to_bytes(4, "little") for crc in (found, *again)]
