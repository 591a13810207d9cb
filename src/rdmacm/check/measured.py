"""What is measured: the input of the judgement. Times are in microseconds, lengths in bytes as IP counts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rdmacm.explanation import Explanation


class Refusal(Enum):
    """What the network says of a packet that it has not delivered (ICMP)."""

    CLOSED = "that the port is closed"
    PROHIBITED = "that this is prohibited"
    HOST = "that the host is unreachable"
    NETWORK = "that the network is unreachable"


@dataclass(frozen=True, slots=True)
class Target:
    """What is checked. ``port`` 0: no listener is asked. ``space``: its port space, tcp, udp or ib."""

    host: str
    port: int = 0
    space: str = "tcp"
    traffic_class: int = 0


@dataclass(frozen=True, slots=True)
class Resolution:
    """The resolution of the name, and what the path is then."""

    explanation: Explanation
    #: Addresses of both ends, without ports.
    source: str = ""
    destination: str = ""
    #: Payload of the longest packet.
    path_mtu: int = 0
    interface_mtu: int = 0
    #: The address of the next hop's hardware, as text, and the one of the round before if that was another.
    hardware_address: str = ""
    hardware_address_before: str = ""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to the connection manager of the peer, each of one packet, for a service that nobody has."""

    sent: int
    #: The round trip times of those that were answered.
    round_trips: tuple[float, ...] = ()
    #: What the network reports of packets to the port, and the host that does.
    refusal: Refusal | None = None
    reporter: str = ""
    #: Whether the host answers an ICMP echo request; None if none could be sent.
    echo: bool | None = None
    #: An error of this side.
    error: str = ""
    hint: str = ""


class Answer(Enum):
    """What became of a connection request to a port."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    SILENT = "silent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Listener:
    """A connection request to the port."""

    answer: Answer
    microseconds: float = 0.0
    #: The reason of a REJ, or the status of a SIDR_REP.
    reason: int = 0
    text: str = ""
    hint: str = ""
    #: The port spaces in which the port has a listener, where this one has none.
    elsewhere: tuple[str, ...] = ()
    #: Whether the longest packet of the connection has arrived; None if that was not tried.
    long_arrived: bool | None = None
    #: The length of that packet.
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Packets of several lengths without any help of the peer: whether the host answers each."""

    #: By length, whether an answer came.
    answered: dict[int, bool] = field(default_factory=dict)
    #: The MTU that a router has reported; 0 if none has.
    reported_mtu: int = 0
    #: Why nothing could be measured.
    error: str = ""


@dataclass(frozen=True, slots=True)
class Direction:
    """Datagrams of one direction: of each (payload, traffic class) how many were sent, and how many came."""

    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    received: dict[tuple[int, int], int] = field(default_factory=dict)
    #: The traffic classes that they had on arrival, by the one they were sent with.
    classes: dict[int, int] = field(default_factory=dict)
    #: Where they came from, if that is not the address that they were sent from.
    other_source: str = ""

    def count(self, payload: int | None = None) -> tuple[int, int]:
        """How many were sent and came, of one payload or of all."""

        def total(counts: dict[tuple[int, int], int]) -> int:
            return sum(number for (size, _), number in counts.items() if payload in (None, size))

        return total(self.sent), total(self.received)

    @property
    def payloads(self) -> list[int]:
        """The payloads sent, in ascending order."""
        return sorted({size for size, _ in self.sent})


@dataclass(frozen=True, slots=True)
class Exchange:
    """What both sides have seen of each other's datagrams."""

    forward: Direction
    back: Direction
    #: Why the peer has no way back: message and hint; empty if it has one.
    no_way_back: str = ""
    way_back_hint: str = ""
    #: The hardware addresses of the peer's interface with its address, and the names of its interfaces by theirs.
    hardware_address: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    interface: str = ""
    path_mtu: int = 0
    round_trips: tuple[float, ...] = ()
