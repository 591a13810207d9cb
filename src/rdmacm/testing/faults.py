"""Packets on a simulated network, and what may befall them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from random import Random
from typing import Protocol, TypeAlias

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.mad import Mad, MgmtClass
from rdmacm.proto.roce.headers import peek
from rdmacm.proto.roce.icrc import ICRC_LENGTH
from rdmacm.proto.roce.opcodes import BTH_LENGTH, EXTENDED_LENGTH, ExtendedHeader, Opcode
from rdmacm.proto.wire import WireError

__all__ = ["CORRUPT", "DELIVER", "DUPLICATE", "LOSE", "Fate", "Faults", "Packet", "Verdict", "corrupted", "nth"]

_MAD = BTH_LENGTH + EXTENDED_LENGTH[ExtendedHeader.DETH]

#: No script asks for more copies of a packet than this, or for a later arrival (seconds).
_MOST_COPIES = 64
_LONGEST_DELAY = 86400.0


class Fate(Enum):
    """What became of a packet. The log has one entry for each that befell it, in order of time."""

    #: It is in the receiver's queue; once for each copy.
    DELIVERED = "delivered"
    LOST = "lost"
    #: More copies than one are on their way.
    DUPLICATED = "duplicated"
    #: Bits were flipped, or a script put other bytes in its place.
    CORRUPTED = "corrupted"
    #: It was held back, so that others overtake it.
    DELAYED = "delayed"
    #: The network is cut between the two.
    PARTITIONED = "partitioned"
    #: One of the two is down.
    CRASHED = "crashed"
    #: Nobody has the address it was sent to, or the sender not the one it was sent from.
    UNREACHABLE = "unreachable"
    #: The receiver's wire is not open.
    REFUSED = "refused"
    #: It is longer than the interface's MTU.
    TOO_LONG = "too long"
    #: A queue, the receiver's or the network's, was full.
    OVERRUN = "overrun"


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet as it was sent: ``data`` is from the BTH to the end of the ICRC.

    ``number`` counts the packets of a fabric from 1; ``time`` is virtual, in seconds. ``source`` and ``destination``
    are names of hosts (the latter is empty where nobody has the address), ``local`` and ``remote`` the packed
    addresses. ``identification`` is that of the IPv4 header: i for packet i of a train.
    """

    number: int
    time: float
    source: str
    destination: str
    local: bytes
    remote: bytes
    source_port: int
    traffic_class: int
    identification: int
    data: bytes

    @property
    def kind(self) -> str:
        """``REQ``, ``REP`` ... for messages of the communication manager, else the opcode's name, else ``?``."""
        try:
            opcode, _, qpn, _, _ = peek(self.data)
            if qpn == 1 and opcode == Opcode.UD_SEND_ONLY:
                mad = Mad.unpack(self.data[_MAD:-ICRC_LENGTH])
                if mad.mgmt_class == MgmtClass.COM_MGT and mad.attribute_id in _MESSAGES:
                    return _MESSAGES[mad.attribute_id]
        except WireError:
            pass
        return _OPCODES.get(self.data[0], "?") if len(self.data) >= BTH_LENGTH else "?"

    @property
    def dest_qp(self) -> int:
        """The queue pair number it is for; 0 where there is no whole BTH."""
        return int.from_bytes(self.data[5:8], "big") if len(self.data) >= BTH_LENGTH else 0

    @property
    def psn(self) -> int:
        """The packet sequence number; 0 where there is no whole BTH."""
        return int.from_bytes(self.data[9:12], "big") if len(self.data) >= BTH_LENGTH else 0

    def __str__(self) -> str:
        destination = self.destination or str(ip_address(self.remote))
        where = f"qp {self.dest_qp:#08x} psn {self.psn:#08x}"
        return f"{self.source} > {destination} #{self.number} {self.kind} {where} {len(self.data)} bytes"


_MESSAGES = {int(attribute): attribute.name for attribute in AttributeId}
_OPCODES = {int(opcode): opcode.name for opcode in Opcode}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of one packet.

    ``copies`` (0..64) of it arrive, ``delay`` seconds later than usual, with ``flips`` random bits of the first copy
    inverted, or with ``data`` in its place.
    """

    copies: int = 1
    delay: float = 0.0
    flips: int = 0
    data: bytes | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.copies <= _MOST_COPIES:
            raise ValueError(f"copies of a packet are 0 to {_MOST_COPIES}, not {self.copies}")
        if not (math.isfinite(self.delay) and 0 <= self.delay <= _LONGEST_DELAY):
            raise ValueError(f"a delay is 0 to {_LONGEST_DELAY:.0f} seconds, not {self.delay}")
        if self.flips < 0:
            raise ValueError(f"bits to flip are 0 or more, not {self.flips}")


DELIVER = Verdict()
LOSE = Verdict(copies=0)
DUPLICATE = Verdict(copies=2)
CORRUPT = Verdict(flips=1)

#: A script of faults: a verdict on a packet that is being sent, or None to leave it to chance.
Faults: TypeAlias = Callable[[Packet], "Verdict | None"]


class _Kind(Protocol):
    """A packet, or a datagram of a subnet."""

    @property
    def kind(self) -> str: ...


def nth(kind: str, number: int, verdict: Verdict = LOSE) -> Callable[[_Kind], Verdict | None]:
    """A script with one fault: for the ``number``-th (from 1) packet of a :attr:`Packet.kind`.

    >>> fabric.faults = nth("REQ", 3)  # doctest: +SKIP
    """
    seen = 0

    def faults(packet: _Kind) -> Verdict | None:
        nonlocal seen
        if packet.kind != kind:
            return None
        seen += 1
        return verdict if seen == number else None

    return faults


def corrupted(data: bytes, flips: int, random: Random) -> bytes:
    """``data`` with so many different bits inverted (all of them where there are not so many)."""
    bits = len(data) * 8
    chosen: set[int] = set()
    while len(chosen) < min(flips, bits):
        chosen.add(int(random.random() * bits))
    damaged = bytearray(data)
    for bit in chosen:
        damaged[bit >> 3] ^= 1 << (bit & 7)
    return bytes(damaged)
