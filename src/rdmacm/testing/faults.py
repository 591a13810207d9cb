"""Packets on a simulated network, and the faults a test can inject."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from random import Random
from typing import Protocol

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.constants import BTH_LENGTH, ICRC_LENGTH, ROCE_PORT
from rdmacm.proto.mad import Mad, MgmtClass
from rdmacm.proto.roce.headers import peek
from rdmacm.proto.roce.opcodes import EXTENDED_LENGTH, ExtendedHeader, Opcode
from rdmacm.proto.wire import WireError

#: Offset of the MAD in a UD packet.
MAD_OFFSET = BTH_LENGTH + EXTENDED_LENGTH[ExtendedHeader.DETH]

#: Limits of a verdict: copies of one packet, and its delay in seconds.
_MAX_COPIES = 64
_MAX_DELAY = 86400.0


class Outcome(Enum):
    """What happened to a packet. The log has an entry for each outcome of each packet, in order of time."""

    #: Appended to the receiver's queue; one entry for each copy.
    DELIVERED = "delivered"
    #: Dropped, by chance or by a script.
    LOST = "lost"
    #: Sent on in more than one copy.
    DUPLICATED = "duplicated"
    #: Bits were flipped, or a script replaced the bytes.
    CORRUPTED = "corrupted"
    #: Held back, so that later packets may overtake it.
    DELAYED = "delayed"
    #: Dropped: the network is partitioned between sender and receiver.
    PARTITIONED = "partitioned"
    #: Dropped: sender or receiver has crashed.
    CRASHED = "crashed"
    #: Dropped: no host has the destination address, or the sender lacks the source address.
    UNREACHABLE = "unreachable"
    #: Dropped: the receiver's wire is not open.
    REFUSED = "refused"
    #: Dropped: longer than the interface's MTU.
    TOO_LONG = "too long"
    #: Dropped: the queue of the receiver or of the network was full.
    OVERRUN = "overrun"


@dataclass(frozen=True, slots=True)
class FabricPacket:
    """A RoCEv2 packet as it was sent, or a datagram of a UDP socket.

    - ``number``: counts the packets of a fabric, from 1.
    - ``time``: when it was sent, in seconds of virtual time.
    - ``source``: name of the sending host.
    - ``destination``: name of the receiving host; empty when no host has the address.
    - ``local``: source IP address, packed (4 or 16 bytes).
    - ``remote``: destination IP address, packed (4 or 16 bytes).
    - ``source_port``: UDP source port.
    - ``traffic_class``: traffic class or type of service of the IP header.
    - ``identification``: identification field of the IPv4 header: i for packet i of a train.
    - ``data``: the UDP payload: BTH to ICRC.
    - ``port``: UDP destination port; 4791 of RoCEv2.
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
    port: int = ROCE_PORT

    @property
    def kind(self) -> str:
        """``REQ``, ``REP`` and so on for connection management, otherwise the name of the opcode, or ``?``.

        ``UDP`` of a datagram to another port than that of RoCEv2.
        """
        if self.port != ROCE_PORT:
            return "UDP"
        try:
            opcode, _, qpn, _, _ = peek(self.data)
            if qpn == 1 and opcode == Opcode.UD_SEND_ONLY:
                mad = Mad.unpack(self.data[MAD_OFFSET:-ICRC_LENGTH])
                if mad.mgmt_class == MgmtClass.COM_MGT and mad.attribute_id in _MESSAGES:
                    return _MESSAGES[mad.attribute_id]
        except WireError:
            pass
        return _OPCODES.get(self.data[0], "?") if len(self.data) >= BTH_LENGTH else "?"

    @property
    def dest_qp(self) -> int:
        """Destination queue pair number; 0 for a packet without a complete BTH."""
        return int.from_bytes(self.data[5:8], "big") if self._has_bth else 0

    @property
    def psn(self) -> int:
        """Packet sequence number; 0 for a packet without a complete BTH."""
        return int.from_bytes(self.data[9:12], "big") if self._has_bth else 0

    @property
    def _has_bth(self) -> bool:
        return self.port == ROCE_PORT and len(self.data) >= BTH_LENGTH

    def __str__(self) -> str:
        destination = self.destination or str(ip_address(self.remote))
        where = f"qp {self.dest_qp:#08x} psn {self.psn:#08x}" if self.port == ROCE_PORT else f"port {self.port}"
        return f"{self.source} > {destination} #{self.number} {self.kind} {where} {len(self.data)} bytes"


#: Names of connection management messages by attribute id, and of packets by opcode.
_MESSAGES = {int(attribute): attribute.name for attribute in AttributeId}
_OPCODES = {int(opcode): opcode.name for opcode in Opcode}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the network does with one packet. Raises ValueError for values out of range.

    - ``copies``: how many copies arrive, 0 to 64.
    - ``delay``: delay in addition to the latency, in seconds (at most one day). Later packets may overtake.
    - ``flips``: how many random bits of the first copy are inverted.
    - ``data``: bytes that replace those of the packet.
    """

    copies: int = 1
    delay: float = 0.0
    flips: int = 0
    data: bytes | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.copies <= _MAX_COPIES:
            raise ValueError(f"copies must be 0 to {_MAX_COPIES}, not {self.copies}")
        if not (math.isfinite(self.delay) and 0 <= self.delay <= _MAX_DELAY):
            raise ValueError(f"delay must be 0 to {_MAX_DELAY:.0f} seconds, not {self.delay}")
        if self.flips < 0:
            raise ValueError(f"flips must be 0 or more, not {self.flips}")


#: Deliver the packet.
DELIVER = Verdict()
#: Drop the packet.
LOSE = Verdict(copies=0)
#: Deliver the packet twice.
DUPLICATE = Verdict(copies=2)
#: Invert one random bit.
CORRUPT = Verdict(flips=1)


class HasKind(Protocol):
    """What :func:`nth` looks at: a :class:`FabricPacket`, or a :class:`SubnetMad`."""

    @property
    def kind(self) -> str:
        """The kind of the packet or datagram, as text."""


def nth(kind: str, number: int, verdict: Verdict = LOSE) -> Callable[[HasKind], Verdict | None]:
    """Return a script that applies ``verdict`` to the ``number``-th packet (from 1) of a :attr:`FabricPacket.kind`.

    It leaves all other packets to chance. It works for :attr:`Fabric.faults` and for :attr:`MemorySubnet.faults`.

    >>> fabric.faults = nth("REQ", 3)  # doctest: +SKIP
    """
    seen = 0

    def faults(packet: HasKind) -> Verdict | None:
        nonlocal seen
        if packet.kind != kind:
            return None
        seen += 1
        return verdict if seen == number else None

    return faults


def corrupted(data: bytes, flips: int, random: Random) -> bytes:
    """Return ``data`` with ``flips`` different random bits inverted, or all its bits if it has fewer."""
    bits = len(data) * 8
    chosen: set[int] = set()
    while len(chosen) < min(flips, bits):
        chosen.add(int(random.random() * bits))
    damaged = bytearray(data)
    for bit in chosen:
        damaged[bit >> 3] ^= 1 << (bit & 7)
    return bytes(damaged)


def check_probabilities(**probabilities: float) -> None:
    """Raise ValueError for a probability outside 0 to 1."""
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be a probability, 0 to 1, not {value}")


def check_durations(**durations: float) -> None:
    """Raise ValueError for a number of seconds that is negative or not finite."""
    for name, seconds in durations.items():
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
